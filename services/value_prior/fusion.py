"""Fuses the regression's prediction for a prompt with the prompt's own history, by precision.

Pure; knows no prompt and no model. The prediction m ± s is taken as the Beta distribution with that mean and sd, whose
strength in pseudo-rollouts is

    N = clip(m (1 − m) / s² − 1, 1, 64)

and the history (S successes in n discounted trials) updates it: value = (N m + S) / (N + n). That is precision
weighting in the natural units of the problem: one rollout has variance m (1 − m), so N and n are the two precisions
times that variance. It is exact at both ends (no history: m; endless history: S / n) and monotone in S.
"""

from __future__ import annotations

import math

from services.value_prior.tracker import Evidence, beta_estimate

VALUE_MIN = 0.02
VALUE_MAX = 0.98
STRENGTH_MIN = 1.0
# A regression is never worth more than this many rollouts of the prompt itself: its own sd can be too optimistic.
STRENGTH_MAX = 64.0
UNCERTAINTY_MIN = 1e-3
UNCERTAINTY_MAX = 0.5


def clip_value(value: float) -> float:
    """Into [0.02, 0.98]: a prior of exactly 0 or 1 could never be contradicted."""
    if not math.isfinite(value):
        raise ValueError(f"value must be finite, got {value}")
    return min(max(value, VALUE_MIN), VALUE_MAX)


def clip_uncertainty(uncertainty: float) -> float:
    """Into (0, 0.5], the range a standard deviation on [0, 1] can have."""
    if not math.isfinite(uncertainty):
        raise ValueError(f"uncertainty must be finite, got {uncertainty}")
    return min(max(uncertainty, UNCERTAINTY_MIN), UNCERTAINTY_MAX)


def strength(mean: float, uncertainty: float) -> float:
    """Pseudo-rollouts that the prediction `mean` ± `uncertainty` is worth, in [1, 64]."""
    mean, uncertainty = clip_value(mean), clip_uncertainty(uncertainty)
    return min(max(mean * (1 - mean) / uncertainty**2 - 1, STRENGTH_MIN), STRENGTH_MAX)


def fuse(mean: float, uncertainty: float, evidence: Evidence) -> tuple[float, float]:
    """Value in [0.02, 0.98] and uncertainty in (0, 0.5] of the prediction after the prompt's own evidence."""
    if evidence.trials <= 0:
        return clip_value(mean), clip_uncertainty(uncertainty)
    value, spread = beta_estimate(evidence, mean=clip_value(mean), pseudo_count=strength(mean, uncertainty))
    # History can surprise (value moves toward 1/2, where the Beta is wider), yet it never makes us know less than
    # the prediction alone did.
    return clip_value(value), clip_uncertainty(min(spread, clip_uncertainty(uncertainty)))
