"""Messages of the contract to the rule's plain values and back. Errors name the field of the message."""

from __future__ import annotations

from rollwise.v1 import allocator_pb2, common_pb2

from services.allocator.shrinkage import RewardScale
from services.allocator.stopping import Budget, Decision, FixedBudget, Kind, OslaBudget
from services.common.errors import InvalidArgument

KIND_MESSAGES = {
    Kind.STOP: allocator_pb2.DECISION_KIND_STOP,
    Kind.CONTINUE: allocator_pb2.DECISION_KIND_CONTINUE,
    Kind.LIMIT: allocator_pb2.DECISION_KIND_LIMIT,
    Kind.DEADLINE: allocator_pb2.DECISION_KIND_DEADLINE,
}


def budget_of(rule: allocator_pb2.BudgetRule) -> Budget:
    """The budget rule as plain values. Raises InvalidArgument, naming the field, for an empty or impossible rule."""
    match rule.WhichOneof("kind"):
        case "fixed":
            return FixedBudget(rule.fixed.rollouts)
        case "osla":
            osla = rule.osla
            return OslaBudget(osla.k_min, osla.k_max, osla.price, osla.round_size)
        case _:
            raise InvalidArgument("budget is missing; give budget.fixed or budget.osla")


def scale_of(message: allocator_pb2.RewardScale) -> RewardScale:
    """The reward scale; a missing one is an error, not 0..1."""
    return RewardScale(message.low, message.high)


def decision_message(decision: Decision) -> allocator_pb2.Decision:
    """A decision as it is kept with the group."""
    return allocator_pb2.Decision(
        rollouts=len(decision.rewards),
        rewards=decision.rewards,
        prior=decision.prior,
        mean=decision.mean,
        delta_squared=decision.delta_squared,
        weight=decision.weight,
        baseline=decision.baseline,
        expected_gain=decision.expected_gain,
        cost=decision.cost,
        kind=KIND_MESSAGES[decision.kind],
        more=decision.more,
    )


def check_entry(entry: allocator_pb2.PromptEntry) -> None:
    """Raises InvalidArgument, naming the field, when a prompt cannot be worked on."""
    for field, value in (
        ("key.job_id", entry.key.job_id),
        ("key.prompt_id", entry.key.prompt_id),
        ("prompt_token_ids", entry.prompt_token_ids),
    ):
        if not value:
            raise InvalidArgument(f"{field} is empty")
    if entry.kind not in (common_pb2.PROMPT_KIND_TRAIN, common_pb2.PROMPT_KIND_EVAL):
        raise InvalidArgument("kind must be TRAIN or EVAL")
    if not 0 < entry.deadline_seconds < float("inf"):
        raise InvalidArgument(f"deadline_seconds is {entry.deadline_seconds}; it must be positive and finite")
    if len(entry.prompt_token_ids) % 4:
        raise InvalidArgument(f"prompt_token_ids has {len(entry.prompt_token_ids)} bytes, which is no array of uint32")
    if entry.reference.WhichOneof("kind") is None:
        raise InvalidArgument("reference is missing; without one no rollout can be judged")
    sampling = entry.sampling
    if sampling.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens must be at least 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidArgument(f"sampling.temperature is {sampling.temperature}; it must be finite and not negative")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument(f"sampling.top_p is {sampling.top_p}; it must be above 0 and at most 1")
    scale_of(entry.scale)
    budget = budget_of(entry.budget)
    if budget.needs_prior and not entry.want_prior:
        raise InvalidArgument("want_prior is false, and the OSLA rule needs a prior")


def entry_id(key: common_pb2.GroupKey, kind: common_pb2.PromptKind.ValueType) -> str:
    """Names a group for idempotent publishing, and its outcome for the value prior."""
    name = "eval" if kind == common_pb2.PROMPT_KIND_EVAL else "train"
    return f"{key.job_id}/{key.lineage}/{key.step}/{key.prompt_id}/{key.attempt}/{name}"
