"""Online calibration of a policy's priors, and the scores that tell how good they are.

Pure functions on arrays. A calibration is a line in logit space (Platt scaling),

    logit p' = a · logit p + b,        identity: a = 1, b = 0,

fitted on (predicted, successes, trials) of the past by ridge-regularised logistic likelihood. The past predictions
were themselves calibrated, so fitting once over all of them would keep undoing its own work. Instead they are walked
through in order, a batch at a time, each batch's fit being composed with what came before, and the whole fades toward
the identity by `FADE` a batch, so that a correction lives on only as long as the data keep asking for it.
Rows must come sorted by (policy version, outcome id); the result is a function of that list alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from services.value_prior.records import FloatArray

# Fewer judged groups than this: identity.
MIN_PAIRS = 48
BATCH = 64
# The newest pairs that count.
MAX_PAIRS = 2048
FADE = 0.9
# Share of a batch's fit that is taken over: less follows slower and wanders less.
GAIN = 0.25
# Prior variance of a − 1 and b in one batch's fit; in a batch of 64 groups of 5 rollouts the data outweigh it.
RIDGE_VARIANCE = 0.25
SLOPE_RANGE = (0.25, 2.0)
SHIFT_RANGE = (-2.0, 2.0)
# Rollouts of one group are alike (the same prompt); a group counts at most this many independent trials.
MAX_TRIALS_PER_GROUP = 4.0
_EDGE = 1e-4


@dataclass(frozen=True, slots=True)
class Calibration:
    """logit p' = slope · logit p + shift, with slope in [0.25, 2] and shift in [−2, 2]."""

    slope: float = 1.0
    shift: float = 0.0
    pairs: int = 0

    def apply(self, value: float, uncertainty: float) -> tuple[float, float]:
        """Calibrated value, and uncertainty scaled by the line's derivative there (never below half of it)."""
        if self.slope == 1.0 and self.shift == 0.0:
            return value, uncertainty
        calibrated = float(_sigmoid(self.slope * _logit(np.float64(value)) + self.shift))
        derivative = self.slope * calibrated * (1 - calibrated) / (value * (1 - value))
        return calibrated, min(0.5, uncertainty * max(0.5, derivative))


def fit(predicted: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> Calibration:
    """Calibration from past pairs, three arrays of shape (pairs,), oldest first; identity until enough data."""
    p, s, n = _checked(predicted, successes, trials)
    p, s, n = p[-MAX_PAIRS:], s[-MAX_PAIRS:], n[-MAX_PAIRS:]
    if len(p) < MIN_PAIRS:
        return Calibration(pairs=len(p))
    slope, shift = 1.0, 0.0
    for batch in np.array_split(np.arange(len(p)), max(1, round(len(p) / BATCH))):
        step_slope, step_shift = _fit_batch(_logit(p[batch]), s[batch] / n[batch], n[batch])
        step_slope, step_shift = 1 + GAIN * (step_slope - 1), GAIN * step_shift
        slope, shift = FADE * step_slope * slope + (1 - FADE), FADE * (step_slope * shift + step_shift)
        slope, shift = float(np.clip(slope, *SLOPE_RANGE)), float(np.clip(shift, *SHIFT_RANGE))
    return Calibration(slope, shift, len(p))


def _fit_batch(logits: FloatArray, rates: FloatArray, trials: FloatArray) -> tuple[float, float]:
    """Maximum of Σ w (r log p' + (1 − r) log(1 − p')) − ((a − 1)² + b²) / (2·variance), by Newton's method."""
    design = np.stack([logits, np.ones_like(logits)], axis=1)
    weights = np.minimum(trials, MAX_TRIALS_PER_GROUP)
    start = np.array([1.0, 0.0])
    theta = start.copy()
    for _ in range(8):
        fitted = _sigmoid(design @ theta)
        gradient = design.T @ (weights * (rates - fitted)) - (theta - start) / RIDGE_VARIANCE
        curvature = (design * (weights * fitted * (1 - fitted))[:, None]).T @ design + np.eye(2) / RIDGE_VARIANCE
        step = np.linalg.solve(curvature, gradient)
        # A full Newton step can overshoot where the sigmoid is flat.
        step *= min(1.0, 1.0 / (float(np.abs(step).max()) + 1e-12))
        theta = theta + step
        if float(np.abs(step).max()) < 1e-6:
            break
    return float(np.clip(theta[0], *SLOPE_RANGE)), float(np.clip(theta[1], *SHIFT_RANGE))


def brier(predicted: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> float:
    """Mean of (p − r)² over all single trials, in [0, 1]: (S (1 − p)² + (n − S) p²) summed, divided by Σ n."""
    p, s, n = _checked(predicted, successes, trials)
    if not len(p):
        raise ValueError("the Brier score of no pairs is undefined")
    return float(np.sum(s * (1 - p) ** 2 + (n - s) * p**2) / np.sum(n))


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Predictions in [low, high), the last bin closed: how many groups, their mean prediction and success rate."""

    low: float
    high: float
    groups: int
    mean_predicted: float
    success_rate: float


def reliability_bins(
    predicted: ArrayLike, successes: ArrayLike, trials: ArrayLike, *, bins: int = 10
) -> list[ReliabilityBin]:
    """Equal-width bins of the prediction; empty ones are left out. Rates are weighted by trials."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    p, s, n = _checked(predicted, successes, trials)
    index = np.minimum((p * bins).astype(int), bins - 1)
    found = []
    for number in range(bins):
        inside = index == number
        if inside.any():
            total = float(n[inside].sum())
            mean = float((p[inside] * n[inside]).sum()) / total
            rate = float(s[inside].sum()) / total
            found.append(ReliabilityBin(number / bins, (number + 1) / bins, int(inside.sum()), mean, rate))
    return found


def _checked(
    predicted: ArrayLike, successes: ArrayLike, trials: ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    p, s, n = (np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (predicted, successes, trials))
    if not p.shape == s.shape == n.shape or p.ndim != 1:
        raise ValueError(f"predicted, successes and trials differ in shape: {p.shape}, {s.shape}, {n.shape}")
    if not (np.isfinite(p).all() and np.isfinite(s).all() and np.isfinite(n).all()):
        raise ValueError("predicted, successes and trials must be finite")
    if ((p < 0) | (p > 1)).any() or (n <= 0).any() or ((s < 0) | (s > n)).any():
        raise ValueError("need 0 <= predicted <= 1, trials > 0 and 0 <= successes <= trials")
    return p, s, n


def _logit(p: FloatArray | np.float64) -> FloatArray:
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _sigmoid(z: FloatArray) -> FloatArray:
    # Written with tanh: no overflow for any z.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * z)))
