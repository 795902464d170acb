"""Per-prompt discounted Beta tracker: what a prompt's own past rollouts say about its success rate now.

Pure functions on arrays; knows no prompt, no storage and no model.

With S_i successes in n_i trials at policy version v_i, seen from version v:

    w_i  = ρ^max(0, v − v_i)
    α    = N·m + Σ w_i S_i          β = N·(1 − m) + Σ w_i (n_i − S_i)          value = α / (α + β)

m is the mean expected without history and N its pseudo-count. This is the tracker of SPO (METHODS section 3), which
starts from N = 8 and multiplies both counts by ρ = clip(2^(−D/0.06), 0.875, 0.96) once a visit, with D the mean
|Δ log-prob| of the policy. Here the exponent is the distance in policy versions, so that a prompt that nobody asked
for ages too, and D is the drift of the policy's success rate per version (see `drift_discount`): it is known for any
policy, also one whose log-probs are never seen here. Sums do not depend on the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from services.value_prior.records import FloatArray

PSEUDO_COUNT = 8.0
DISCOUNT_MIN = 0.875
DISCOUNT_MAX = 0.96
DRIFT_HALVING = 0.06


@dataclass(frozen=True, slots=True)
class Evidence:
    """Discounted counts of one prompt: `successes` in [0, trials]; both are real numbers ≥ 0."""

    successes: float = 0.0
    trials: float = 0.0


def drift_discount(drift: float) -> float:
    """ρ per policy version in [0.875, 0.96], from the change of the success rate per version (sign ignored)."""
    if not np.isfinite(drift):
        raise ValueError(f"drift must be finite, got {drift}")
    return float(np.clip(2.0 ** (-abs(drift) / DRIFT_HALVING), DISCOUNT_MIN, DISCOUNT_MAX))


def discount_weights(versions: ArrayLike, now: int, discount: float) -> FloatArray:
    """ρ^max(0, now − version) in (0, 1], shape of `versions`; rows from the future count in full."""
    if not 0 < discount <= 1:
        raise ValueError(f"discount must be in (0, 1], got {discount}")
    ages = np.maximum(0, now - np.asarray(versions, dtype=np.float64))
    return np.asarray(np.power(discount, ages), dtype=np.float64)


def gather(
    successes: ArrayLike, trials: ArrayLike, versions: ArrayLike, *, now: int, discount: float = DISCOUNT_MAX
) -> Evidence:
    """Discounted evidence of one prompt from its rows, three arrays of shape (rows,)."""
    s = np.asarray(successes, dtype=np.float64)
    return gather_by_prompt([""] * s.size, s, trials, versions, now=now, discount=discount).get("", Evidence())


def gather_by_prompt(
    prompt_ids: Sequence[str],
    successes: ArrayLike,
    trials: ArrayLike,
    versions: ArrayLike,
    *,
    now: int,
    discount: float = DISCOUNT_MAX,
) -> dict[str, Evidence]:
    """`gather` for many prompts at once: row i belongs to ``prompt_ids[i]``."""
    s, n = np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    if not (np.isfinite(s).all() and np.isfinite(n).all()):
        raise ValueError("successes and trials must be finite")
    if (n < 0).any() or (s < 0).any() or (s > n).any():
        raise ValueError("successes must be in [0, trials]")
    weights = discount_weights(versions, now, discount)
    rows: dict[str, tuple[list[float], list[float]]] = {}
    for prompt_id, won, tried in zip(prompt_ids, (weights * s).tolist(), (weights * n).tolist(), strict=True):
        sums = rows.setdefault(prompt_id, ([], []))
        sums[0].append(won)
        sums[1].append(tried)
    # fsum is exact, so the order of rows cannot show even in the last bit.
    return {
        prompt_id: Evidence(min(math.fsum(won), math.fsum(tried)), math.fsum(tried))
        for prompt_id, (won, tried) in rows.items()
    }


def beta_estimate(evidence: Evidence, *, mean: float = 0.5, pseudo_count: float = PSEUDO_COUNT) -> tuple[float, float]:
    """Posterior mean and standard deviation of the success rate under Beta(N·m, N·(1 − m)) and the evidence.

    `mean` is in (0, 1), `pseudo_count` > 0. The sd is √(αβ / ((α + β)² (α + β + 1))).
    """
    if not 0 < mean < 1 or not pseudo_count > 0:
        raise ValueError(f"need 0 < mean < 1 and pseudo_count > 0, got {mean} and {pseudo_count}")
    alpha = pseudo_count * mean + evidence.successes
    beta = pseudo_count * (1 - mean) + evidence.trials - evidence.successes
    total = alpha + beta
    return alpha / total, float(np.sqrt(alpha * beta / (total**2 * (total + 1))))
