"""Rewards to advantages: A = r - baseline, divided by the group's spread when the loss asks for it.

Everything is worked out inside one group, so sizes may differ, groups may come in any order, and the rollouts of
a group may be shuffled without changing any rollout's advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import InvalidArgument
from trainer.algorithms.groups import GroupRewards
from trainer.algorithms.registry import baseline_of
from trainer.config import AlgorithmSpec

STD_FLOOR = 1e-2
"""Smallest spread, as a share of the half-range R, that advantages are divided by."""


def advantages(groups: Sequence[GroupRewards], algorithm: AlgorithmSpec) -> list[list[float]]:
    """One list of advantages a group, in the order of its rewards.

    With `std_normalise`, A is divided by the population standard deviation s of the group's own rewards. Where that
    says nothing (s below STD_FLOOR x R: all rewards equal, or one rollout), A is divided by R instead, so |A| is at
    most 2 there. Elsewhere |A| is at most k/sqrt(k - 1) for a group of k with a mean as baseline, and for binary
    rewards with any baseline; in every case it is at most 2/STD_FLOOR. The spread is that of the whole group, also
    under leave-one-out, where the other rollouts may all be equal: dividing by their spread, 0, is how one correct
    rollout of four comes to weigh a million.

    Raises InvalidArgument for groups with the same key, and what the baseline raises (a missing prior).
    """
    seen: set[str] = set()
    for group in groups:
        if group.key in seen:
            raise InvalidArgument(f"group {group.key!r} is in the batch twice; a group's rollouts belong together")
        seen.add(group.key)
    baseline = baseline_of(algorithm.baseline.kind)
    result = []
    for group in groups:
        values = baseline(group, algorithm.baseline)
        divisor = _divisor(group) if algorithm.loss.std_normalise else 1.0
        result.append([(r - b) / divisor for r, b in zip(group.rewards, values, strict=True)])
    return result


def baselines(groups: Sequence[GroupRewards], algorithm: AlgorithmSpec) -> list[list[float]]:
    """One list of baselines a group, on its reward scale: what the rewards were compared with, for the record."""
    baseline = baseline_of(algorithm.baseline.kind)
    return [list(baseline(group, algorithm.baseline)) for group in groups]


def _divisor(group: GroupRewards) -> float:
    half_range = group.scale.half_range
    spread = group.spread
    return spread if spread >= STD_FLOOR * half_range else half_range
