"""Takes recorded decisions again, offline: with the rule that was recorded, or with another one. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollwise.v1 import allocator_pb2

from services.allocator.messages import KIND_MESSAGES, budget_of, scale_of
from services.allocator.shrinkage import RewardScale
from services.allocator.stopping import Budget, Decision, Kind, decide

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Replayed:
    """One recorded decision and the same decision taken again. `difference` names what does not agree, or is empty."""

    recorded: allocator_pb2.Decision
    again: Decision
    difference: str

    @property
    def reproduced(self) -> bool:
        """True when nothing differs."""
        return not self.difference


def replay_group(group: allocator_pb2.ScoredGroup) -> list[Replayed]:
    """Takes every decision of a group's trail again. Raises InvalidArgument for a group without budget or scale.

    A recorded DEADLINE, and a LIMIT set because replacements ran out, depend on time and faults: there the numbers are
    compared and not the kind.
    """
    return list(replay_trail(group.trail, budget_of(group.budget), scale_of(group.scale)))


def replay_trail(trail: Iterable[allocator_pb2.Decision], budget: Budget, scale: RewardScale) -> Iterator[Replayed]:
    """Takes recorded decisions again under `budget`."""
    for recorded in trail:
        prior = recorded.prior if recorded.HasField("prior") else None
        again = decide(budget, list(recorded.rewards), prior, scale)
        yield Replayed(recorded, again, _difference(recorded, again))


def counterfactual(rewards: Iterable[float], prior: float | None, budget: Budget, scale: RewardScale) -> Decision:
    """Where another rule would have stopped on the recorded rewards, in their order.

    The last decision is CONTINUE when that rule wants more rollouts than were recorded.
    """
    known = list(rewards)
    k = min(budget.k_min, len(known))
    decision = decide(budget, known[:k], prior, scale)
    while decision.kind is Kind.CONTINUE and k < len(known):
        k = min(k + decision.more, len(known))
        decision = decide(budget, known[:k], prior, scale)
    return decision


def _difference(recorded: allocator_pb2.Decision, again: Decision) -> str:
    names = ("mean", "delta_squared", "weight", "baseline", "expected_gain", "cost")
    wrong = [
        f"{name} {getattr(recorded, name):.9g} recorded, {getattr(again, name):.9g} replayed"
        for name in names
        if abs(getattr(recorded, name) - getattr(again, name)) > TOLERANCE
    ]
    cut_short = again.kind is Kind.CONTINUE and recorded.kind in (
        allocator_pb2.DECISION_KIND_DEADLINE,
        allocator_pb2.DECISION_KIND_LIMIT,
    )
    if not cut_short and recorded.kind != KIND_MESSAGES[again.kind]:
        name = allocator_pb2.DecisionKind.Name(recorded.kind).removeprefix("DECISION_KIND_").lower()
        wrong.append(f"{name} recorded, {again.kind.value} replayed")
    return "; ".join(wrong)
