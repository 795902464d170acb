"""Metrics of the value prior. No label grows with policies, jobs or prompts."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram

from services.value_prior.records import Observed, Prior

SCORES = Counter("rollwise_value_prior_scores_total", "Prompts scored, by what the prior rests on.", ["source"])
OBSERVATIONS = Counter(
    "rollwise_value_prior_observations_total", "Outcomes offered, by what became of them.", ["result"]
)
BRIER_SUM = Counter(
    "rollwise_value_prior_squared_error_total", "Squared error of the priors given, summed over judged rollouts."
)
BRIER_TRIALS = Counter("rollwise_value_prior_judged_rollouts_total", "Judged rollouts whose group had a prior.")
BRIER = Gauge("rollwise_value_prior_brier", "Brier score of the priors given, exponential mean over groups' rollouts.")
OUTCOMES_HELD = Gauge("rollwise_value_prior_context_outcomes", "Outcomes in memory, of all policies.")
POLICIES_HELD = Gauge("rollwise_value_prior_policies", "Policies in memory.")
FIT_SECONDS = Histogram(
    "rollwise_value_prior_fit_duration_seconds",
    "Time of one fit, embedding of new prompts included.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
FIT_ROWS = Gauge("rollwise_value_prior_fit_rows", "Outcomes in the newest fit.")
CATCH_UP_TIMEOUTS = Counter(
    "rollwise_value_prior_catch_up_timeouts_total", "Scores answered before all earlier outcomes were learnt from."
)

# Rollouts after which an old error's weight in the gauge has fallen to 1/e.
_BRIER_MEMORY = 1000.0


class PrometheusRecorder:
    """`Recorder` that feeds the metrics above."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum = 0.0
        for source in ("uninformed", "context", "history"):
            SCORES.labels(source)
        for result in ("accepted", "duplicate", "stale"):
            OBSERVATIONS.labels(result)

    def scored(self, priors: Sequence[Prior]) -> None:
        """See `Recorder`."""
        for prior in priors:
            SCORES.labels(prior.source.value).inc()

    def observed(self, result: Observed, brier: float | None, trials: int) -> None:
        """See `Recorder`."""
        OBSERVATIONS.labels("accepted").inc(result.accepted)
        OBSERVATIONS.labels("duplicate").inc(result.duplicates)
        OBSERVATIONS.labels("stale").inc(result.stale)
        if brier is not None:
            BRIER_SUM.inc(brier * trials)
            BRIER_TRIALS.inc(trials)
            keep = max(0.0, 1.0 - trials / _BRIER_MEMORY)
            self._weight = keep * self._weight + trials
            self._sum = keep * self._sum + brier * trials
            BRIER.set(self._sum / self._weight)

    def fitted(self, seconds: float, rows: int) -> None:
        """See `Recorder`."""
        FIT_SECONDS.observe(seconds)
        FIT_ROWS.set(rows)

    def held(self, policies: int, outcomes: int) -> None:
        """See `Recorder`."""
        POLICIES_HELD.set(policies)
        OUTCOMES_HELD.set(outcomes)
