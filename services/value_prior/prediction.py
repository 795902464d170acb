"""From a policy's outcomes to priors: regression, the prompt's own history and calibration, put together.

Pure: a `Fitted` is a function of the rows it was made from, in their order, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.value_prior import calibration, fusion, regression
from services.value_prior.calibration import Calibration
from services.value_prior.embedder import Embedder
from services.value_prior.records import Outcome, Prior, PriorSource, Prompt
from services.value_prior.regression import Posterior, Rows
from services.value_prior.tracker import Evidence, gather_by_prompt

# Predictions made while the context was this small say nothing about the ones made now.
CALIBRATION_WARMUP = 64


@dataclass(frozen=True, slots=True)
class Fitted:
    """All that is needed to predict for one policy."""

    context_size: int
    posterior: Posterior
    evidence: dict[str, Evidence]
    calibration: Calibration

    def predict(self, prompts: Sequence[Prompt], embedder: Embedder) -> list[Prior]:
        """Priors in the order of `prompts`; one prompt's prior does not depend on the others."""
        if not self.context_size:
            return [self._uninformed(prompt) for prompt in prompts]
        means, spreads = self.posterior.predict(embedder.embed(prompts))
        return [
            self._prior(prompt, float(mean), float(spread))
            for prompt, mean, spread in zip(prompts, means, spreads, strict=True)
        ]

    def _prior(self, prompt: Prompt, mean: float, spread: float) -> Prior:
        known = self.evidence.get(prompt.prompt_id) if prompt.prompt_id else None
        value, uncertainty = fusion.fuse(mean, spread, known or Evidence())
        value, uncertainty = self.calibration.apply(value, uncertainty)
        return Prior(
            prompt_id=prompt.prompt_id,
            value=fusion.clip_value(value),
            uncertainty=fusion.clip_uncertainty(uncertainty),
            source=PriorSource.HISTORY if known else PriorSource.CONTEXT,
            context_size=self.context_size,
        )

    @staticmethod
    def _uninformed(prompt: Prompt) -> Prior:
        spread = math.sqrt(regression.UNINFORMED_VARIANCE)
        return Prior(prompt.prompt_id, regression.UNINFORMED_MEAN, spread, PriorSource.UNINFORMED, 0)


NOTHING = Fitted(0, regression.uninformed(), {}, Calibration())


def fit(rows: Sequence[Outcome], embedder: Embedder, *, fit_rows: int) -> Fitted:
    """Fits on `rows`, sorted by (policy version, outcome id); the regression uses the newest `fit_rows` of them."""
    if not rows:
        return NOTHING
    now = rows[-1].policy_version
    newest = rows[-fit_rows:]
    embeddings = embedder.embed([Prompt(row.text, row.prompt_id, row.feature) for row in newest])
    posterior = regression.fit(
        Rows(
            embeddings,
            np.array([row.successes for row in newest], dtype=np.float64),
            np.array([row.trials for row in newest], dtype=np.float64),
            np.array([row.policy_version for row in newest], dtype=np.float64),
        ),
        now=now,
        direct=embedder.direct,
    )
    return Fitted(len(rows), posterior, _evidence(rows, now, posterior.discount), _calibration(rows))


def _evidence(rows: Sequence[Outcome], now: int, discount: float) -> dict[str, Evidence]:
    own = [row for row in rows if row.prompt_id]
    return gather_by_prompt(
        [row.prompt_id for row in own],
        [row.successes for row in own],
        [row.trials for row in own],
        [row.policy_version for row in own],
        now=now,
        discount=discount,
    )


def _calibration(rows: Sequence[Outcome]) -> Calibration:
    pairs = [
        (row.predicted, row.successes, row.trials)
        for row in rows[CALIBRATION_WARMUP:]
        # Exactly ½ is what a policy never seen gets: an answer without opinion cannot be miscalibrated.
        if row.predicted is not None and row.predicted != regression.UNINFORMED_MEAN
    ]
    if not pairs:
        return Calibration()
    predicted, successes, trials = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    return calibration.fit(predicted, successes, trials)
