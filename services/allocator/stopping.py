"""When to stop buying rollouts for a prompt. Pure functions on plain numbers.

OSLA, the one-step-look-ahead rule of V0.5 (arXiv 2603.10848): the risk after k rollouts is MSE(k) + c k; stop at
K = inf{k >= k_min : k >= R/sqrt(c) - R^2/delta^2}, at k_max at the latest, and at once when delta^2 = 0. Prices are
always given on the scale -1..1; on a scale with half-range R the same decisions need R^2 times the price, which is
what `price_on` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from services.allocator.shrinkage import Fusion, RewardScale, fuse, mean_of
from services.common.errors import InvalidArgument


class Kind(Enum):
    """What was decided."""

    STOP = "stop"
    CONTINUE = "continue"
    LIMIT = "limit"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class FixedBudget:
    """The same number of rollouts for every prompt."""

    rollouts: int

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise InvalidArgument(f"budget.fixed.rollouts is {self.rollouts}; it must be at least 1")

    @property
    def k_min(self) -> int:
        """Rollouts of the first round."""
        return self.rollouts

    @property
    def k_max(self) -> int:
        """Most rollouts."""
        return self.rollouts

    @property
    def needs_prior(self) -> bool:
        """False: the number is known beforehand."""
        return False


@dataclass(frozen=True)
class OslaBudget:
    """V0.5's rule. `price` is squared reward a rollout on the scale -1..1; `round_size` 1 is exact, 0 buys up to k*."""

    k_min: int = 4
    k_max: int = 16
    price: float = 1 / 256
    round_size: int = 1

    def __post_init__(self) -> None:
        if self.k_min < 1:
            raise InvalidArgument(f"budget.osla.k_min is {self.k_min}; it must be at least 1")
        if self.k_max < self.k_min:
            raise InvalidArgument(f"budget.osla.k_max is {self.k_max}, below k_min {self.k_min}")
        if not (math.isfinite(self.price) and self.price > 0):
            raise InvalidArgument(f"budget.osla.price is {self.price}; it must be a positive finite number")
        if self.round_size < 0:
            raise InvalidArgument(f"budget.osla.round_size is {self.round_size}; it must not be negative")

    @property
    def needs_prior(self) -> bool:
        """True: the rule compares the evidence with the prior."""
        return True


Budget = FixedBudget | OslaBudget


@dataclass(frozen=True)
class Decision:
    """One look at the evidence, with all that the rule saw. Numbers are on the reward scale.

    `expected_gain` is what one more rollout takes off the squared error, sigma^2/((k + a)(k + 1 + a)) with
    a = sigma^2/delta^2 at sigma = R, and `cost` the price on this scale: the rule goes on while the gain's continuous
    form R^2/(k + a)^2 is above the cost. `prior` is None, and the fusion that of the plain mean, without a prior.
    """

    kind: Kind
    more: int
    rewards: tuple[float, ...]
    prior: float | None
    mean: float
    delta_squared: float
    weight: float
    baseline: float
    expected_gain: float
    cost: float


def price_on(price: float, scale: RewardScale) -> float:
    """A price of the scale -1..1 on another scale: R^2 price (so a quarter on 0..1)."""
    return scale.half_range**2 * price


def stopping_point(delta_squared: float, price: float, scale: RewardScale) -> float:
    """k* = R/sqrt(c) - R^2/delta^2 with c the price on this scale: the rule stops at the first k >= k*.

    R/sqrt(R^2 price) = 1/sqrt(price), so only the second term depends on the scale. -inf for delta^2 = 0.
    """
    if delta_squared <= 0:
        return -math.inf
    return 1 / math.sqrt(price) - scale.half_range**2 / delta_squared


def exact_stopping_point(delta_squared: float, price: float, scale: RewardScale) -> float:
    """The exact discrete form -1/2 - a + sqrt(1/4 + sigma^2/c) at sigma = R; half a rollout earlier.

    Solves sigma^2/((k + a)(k + 1 + a)) = c for k (METHODS section 1). Not what V0.5 publishes; for comparison.
    """
    if delta_squared <= 0:
        return -math.inf
    return -0.5 - scale.half_range**2 / delta_squared + math.sqrt(0.25 + 1 / price)


def expected_gain(rollouts: int, delta_squared: float, scale: RewardScale) -> float:
    """What rollout k + 1 takes off the minimal MSE sigma^2/(k + a): sigma^2/((k + a)(k + 1 + a)); 0 for delta^2 = 0."""
    if delta_squared <= 0:
        return 0.0
    variance = scale.half_range**2
    a = variance / delta_squared
    return variance / ((rollouts + a) * (rollouts + 1 + a))


def decide(
    budget: Budget, rewards: Sequence[float], prior: float | None, scale: RewardScale, *, time_is_up: bool = False
) -> Decision:
    """What the rule says after these rewards.

    With fewer rewards than the first round asks for (k_min, or the fixed number) it is CONTINUE with the missing ones.
    `time_is_up` turns a CONTINUE into DEADLINE.

    Raises InvalidArgument, naming the field: a prior is missing for OSLA, or a number is not finite or off the scale.
    """
    if budget.needs_prior and prior is None:
        raise InvalidArgument("prior is missing; the OSLA rule compares the rewards with it")
    if prior is not None:
        scale.check("prior", prior)
    decision = _at_start(budget, prior, scale) if not rewards else _after(budget, tuple(rewards), prior, scale)
    if time_is_up and decision.kind is Kind.CONTINUE:
        return _as_deadline(decision)
    return decision


def _at_start(budget: Budget, prior: float | None, scale: RewardScale) -> Decision:
    start = prior if prior is not None else (scale.low + scale.high) / 2
    cost = price_on(budget.price, scale) if isinstance(budget, OslaBudget) else 0.0
    return Decision(Kind.CONTINUE, budget.k_min, (), prior, start, 0.0, 0.0, start, 0.0, cost)


def _after(budget: Budget, rewards: tuple[float, ...], prior: float | None, scale: RewardScale) -> Decision:
    k = len(rewards)
    if prior is None:
        mean = mean_of(rewards, scale)
        fusion = Fusion(k, mean, mean, 0.0, 1.0, mean)
    else:
        fusion = fuse(prior, rewards, scale)
    if isinstance(budget, FixedBudget):
        gain, cost = 0.0, 0.0
        kind, more = (Kind.LIMIT, 0) if k >= budget.rollouts else (Kind.CONTINUE, budget.rollouts - k)
    else:
        gain, cost = expected_gain(k, fusion.delta_squared, scale), price_on(budget.price, scale)
        kind, more = _osla(budget, k, fusion.delta_squared, scale)
    return Decision(
        kind,
        more,
        rewards,
        prior,
        fusion.mean,
        fusion.delta_squared,
        fusion.weight,
        fusion.baseline,
        gain,
        cost,
    )


def _osla(budget: OslaBudget, k: int, delta_squared: float, scale: RewardScale) -> tuple[Kind, int]:
    if k < budget.k_min:
        return Kind.CONTINUE, budget.k_min - k
    if k >= budget.k_max:
        return Kind.LIMIT, 0
    point = stopping_point(delta_squared, budget.price, scale)
    if k >= point:
        return Kind.STOP, 0
    room = budget.k_max - k
    wanted = math.ceil(min(point - k, room)) if budget.round_size == 0 else budget.round_size
    return Kind.CONTINUE, max(1, min(wanted, room))


def _as_deadline(decision: Decision) -> Decision:
    return replace(decision, kind=Kind.DEADLINE, more=0)
