"""Prometheus metrics of the worker, all in one place. Prefix rollwise_trainer_, base units, no job or prompt ids."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram

JOBS = Counter("rollwise_trainer_jobs_total", "Runs of jobs that ended, by how.", ["outcome"])
RUNNING = Gauge("rollwise_trainer_running", "1 while a job runs here.")
STEPS = Counter("rollwise_trainer_steps_total", "Steps done.", ["kind"])
GROUPS = Counter("rollwise_trainer_groups_total", "Groups that ended, by final state.", ["state"])
IGNORED = Counter("rollwise_trainer_groups_ignored_total", "Groups that were discarded on arrival.", ["why"])
ROLLOUTS = Counter("rollwise_trainer_rollouts_total", "Rollouts of groups that ended.")
TOKENS = Counter("rollwise_trainer_trained_tokens_total", "Tokens in losses.")
IN_FLIGHT = Gauge("rollwise_trainer_groups_in_flight", "Prompts admitted whose group has not ended.")
STEP = Gauge("rollwise_trainer_step", "Steps done of the current job.")
POLICY_VERSION = Gauge("rollwise_trainer_policy_version", "Version of the weights that were published last.")
ACCURACY = Gauge("rollwise_trainer_evaluation_accuracy_ratio", "Mean score of the last evaluation, in [0, 1].")
REPUSHES = Counter(
    "rollwise_trainer_weights_repushed_total", "Times the generation server had to be given weights again."
)
SECONDS = Histogram(
    "rollwise_trainer_phase_duration_seconds",
    "Seconds a step spent in a phase.",
    ["phase"],
    buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
_GAUGES = {
    "reward_mean": "Mean reward of the last step, on 0..1.",
    "rollouts_per_prompt": "Rollouts a prompt in the last step.",
    "zero_signal_share": "Share of groups with equal rewards in the last step.",
    "entropy": "Mean token entropy of the last step, nats.",
    "gradient_norm": "Norm of the last gradient before clipping.",
    "loss": "Loss of the last step.",
    "clip_fraction": "Share of tokens clipped in the last step.",
    "engine_log_ratio_mean": "Mean |log-prob trainer - engine| of the last step.",
    "engine_log_ratio_max": "Largest |log-prob trainer - engine| of the last step.",
    "prior_brier": "Brier score of the value prior on the last step's rollouts.",
    "staleness_max": "Most versions that a group of the last step was old.",
}
_LAST = {name: Gauge(f"rollwise_trainer_{name}", text) for name, text in _GAUGES.items()}


def show_step(metrics: dict[str, Any]) -> None:
    """Shows one step's record."""
    for name, gauge in _LAST.items():
        if metrics.get(name) is not None:
            gauge.set(float(metrics[name]))
    for state in ("trained", "filtered", "dropped"):
        GROUPS.labels(state).inc(metrics[f"groups_{state}"])
    ROLLOUTS.inc(metrics["rollouts"])
    TOKENS.inc(metrics.get("trained_tokens") or 0)
    STEPS.labels("trained" if metrics["groups_trained"] else "empty").inc()
    STEP.set(metrics["step"] + 1)
    POLICY_VERSION.set(metrics["policy_version"])
    for phase in ("wait", "train", "push"):
        SECONDS.labels(phase).observe(metrics[f"{phase}_seconds"])
