"""What an algorithm sees of a group: rewards, the prior that was fixed before them, and their scale.

A group is known by its key, never by its prompt's text or its place in a batch. This module knows no model,
no service and no token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidArgument


class Scale(NamedTuple):
    """Rewards of a wrong and of a correct rollout; every reward of the group lies between them."""

    low: float = 0.0
    high: float = 1.0

    @property
    def half_range(self) -> float:
        """R = (high - low) / 2: no reward's standard deviation is larger."""
        return (self.high - self.low) / 2


_ZERO_TO_ONE = Scale()


@dataclass(frozen=True)
class GroupRewards:
    """The judged rollouts of one prompt.

    `rewards` and `prior` are on `scale`. `prior` is the value prior's V, fixed before the first rollout, or None
    when none was asked for. Raises InvalidArgument for a non-finite number, an empty group or an empty scale.
    """

    key: str
    rewards: tuple[float, ...]
    prior: float | None = None
    scale: Scale = _ZERO_TO_ONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", tuple(float(r) for r in self.rewards))
        object.__setattr__(self, "scale", Scale(*self.scale))
        if not self.rewards:
            raise InvalidArgument(f"group {self.key!r} has no judged rollout; close it as filtered instead")
        if not (math.isfinite(self.scale.low) and math.isfinite(self.scale.high) and self.scale.low < self.scale.high):
            raise InvalidArgument(f"group {self.key!r}: the reward scale {tuple(self.scale)} needs finite low < high")
        slack = 1e-9 * max(1.0, abs(self.scale.low), abs(self.scale.high))
        for name, value in [*((f"reward {i}", r) for i, r in enumerate(self.rewards)), ("prior", self.prior)]:
            if value is None:
                continue
            if not math.isfinite(value):
                raise InvalidArgument(f"group {self.key!r}: {name} is {value}, not a finite number")
            if not self.scale.low - slack <= value <= self.scale.high + slack:
                raise InvalidArgument(
                    f"group {self.key!r}: {name} is {value}, outside the scale {self.scale.low}..{self.scale.high}"
                )

    @property
    def spread(self) -> float:
        """Population standard deviation of the rewards; exactly 0 when they are all equal."""
        if len(set(self.rewards)) == 1:
            return 0.0
        mean = math.fsum(self.rewards) / len(self.rewards)
        return math.sqrt(math.fsum((r - mean) ** 2 for r in self.rewards) / len(self.rewards))


def others_mean(rewards: tuple[float, ...], i: int) -> float:
    """Mean of all rewards but the i-th (at least two rewards)."""
    rest = [r for j, r in enumerate(rewards) if j != i]
    return math.fsum(rest) / len(rest)
