"""V0.5's baseline: a group's mean reward, shrunk toward the prior as far as the evidence allows. Pure functions.

Everything is stated for a reward scale with half-range R (R = 1 on -1..1, R = 1/2 on 0..1); the scale is explicit in
one type and never assumed. Source: V0.5 (arXiv 2603.10848); the James-Stein form and the bounds were derived for this
project (METHODS section 1) and are property tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument


@dataclass(frozen=True)
class RewardScale:
    """The reward of a wrong (`low`) and of a correct rollout (`high`); every reward lies between them."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InvalidArgument(f"scale: low {self.low} and high {self.high} must be finite with low < high")

    @property
    def half_range(self) -> float:
        """R = (high - low) / 2; no reward's variance is above R^2."""
        return (self.high - self.low) / 2

    def reward(self, score: float) -> float:
        """A score in [0, 1], or a success probability, on this scale."""
        return self.low + score * (self.high - self.low)

    def check(self, name: str, value: float) -> float:
        """`value` when it is finite and inside the scale; InvalidArgument naming it otherwise."""
        slack = 1e-9 * max(1.0, abs(self.low), abs(self.high))
        if not math.isfinite(value):
            raise InvalidArgument(f"{name} is {value}, not a finite number")
        if not self.low - slack <= value <= self.high + slack:
            raise InvalidArgument(f"{name} is {value}, outside the reward scale {self.low}..{self.high}")
        return value


@dataclass(frozen=True)
class Fusion:
    """Prior and evidence after k rollouts.

    `delta_squared` estimates the prior's squared error, max(0, (mean - prior)^2 - R^2/k); `weight` is the mean's share
    in `baseline`; all on the reward scale.
    """

    rollouts: int
    prior: float
    mean: float
    delta_squared: float
    weight: float
    baseline: float


def fuse_mean(prior: float, mean: float, rollouts: int, scale: RewardScale) -> Fusion:
    """Shrinks `mean` of `rollouts` rewards toward `prior`.

    delta^2 = max(0, (mean - V)^2 - R^2/k), w = delta^2 / (delta^2 + R^2/k), baseline = w mean + (1 - w) V
    (V0.5, positive-part plug-in). Equal to V + max(0, 1 - R^2/(k d^2)) (mean - V) with d = |mean - V|, so
    |baseline - mean| = min(d, R^2/(k d)) <= R/sqrt(k).

    Raises InvalidArgument for a non-finite number, one outside the scale, or rollouts < 1.
    """
    if rollouts < 1:
        raise InvalidArgument(f"rollouts is {rollouts}; a mean needs at least one")
    scale.check("prior", prior)
    scale.check("mean", mean)
    noise = scale.half_range**2 / rollouts
    delta_squared = max(0.0, (mean - prior) ** 2 - noise)
    weight = delta_squared / (delta_squared + noise)
    return Fusion(rollouts, prior, mean, delta_squared, weight, prior + weight * (mean - prior))


def fuse(prior: float, rewards: Sequence[float], scale: RewardScale) -> Fusion:
    """`fuse_mean` of the rewards of one group. Raises InvalidArgument, naming the reward, for bad ones and for none."""
    return fuse_mean(prior, mean_of(rewards, scale), len(rewards), scale)


def leave_one_out_baselines(prior: float, rewards: Sequence[float], scale: RewardScale) -> list[float]:
    """For each rollout the shrinkage baseline of the other k - 1 rewards; the prior itself for a single rollout.

    No rollout's own reward is in its baseline, so for a fixed number of rollouts the gradient is unbiased.
    """
    mean_of(rewards, scale)
    scale.check("prior", prior)
    others = len(rewards) - 1
    if others == 0:
        return [prior]
    baselines = []
    for left_out in range(len(rewards)):
        # Summed anew: the difference of the whole sum and the own reward would let the own reward in by rounding.
        mean = math.fsum(r for i, r in enumerate(rewards) if i != left_out) / others
        baselines.append(fuse_mean(prior, mean, others, scale).baseline)
    return baselines


def mean_of(rewards: Sequence[float], scale: RewardScale) -> float:
    """Mean reward, after checking each reward. Raises InvalidArgument, naming the index, for a bad one and for none."""
    if not rewards:
        raise InvalidArgument("rewards is empty; a mean needs at least one")
    for index, reward in enumerate(rewards):
        scale.check(f"rewards[{index}]", reward)
    # Exactly the reward when all are equal, and never outside the scale by rounding.
    mean = math.fsum(rewards) / len(rewards)
    return min(max(mean, min(rewards)), max(rewards))
