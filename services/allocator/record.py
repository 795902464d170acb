"""What a closed group means to others: the outcome for the value prior, and the metrics."""

from __future__ import annotations

from rollwise.v1 import allocator_pb2, common_pb2, value_prior_pb2

from services.allocator import metrics
from services.allocator.messages import entry_id


def outcome_of(entry: allocator_pb2.PromptEntry, group: allocator_pb2.ScoredGroup) -> value_prior_pb2.Outcome | None:
    """What the value prior learns from a group: nothing from evaluations and from groups that are not trained."""
    if entry.kind != common_pb2.PROMPT_KIND_TRAIN or group.state != allocator_pb2.GROUP_STATE_COMPLETE:
        return None
    outcome = value_prior_pb2.Outcome(
        outcome_id=entry_id(entry.key, entry.kind),
        policy_id=entry.policy_id,
        lineage=entry.key.lineage,
        policy_version=group.policy_version,
        prompt_id=entry.key.prompt_id,
        text=entry.prompt_text,
        successes=sum(rollout.verdict.score for rollout in group.rollouts),
        trials=len(group.rollouts),
    )
    if group.HasField("prior"):
        outcome.predicted = group.prior.value
    if group.HasField("prompt_feature"):
        outcome.feature.CopyFrom(group.prompt_feature)
    return outcome


def record(group: allocator_pb2.ScoredGroup) -> None:
    """Counts a closed group."""
    kind = "eval" if group.kind == common_pb2.PROMPT_KIND_EVAL else "train"
    state = allocator_pb2.GroupState.Name(group.state).removeprefix("GROUP_STATE_").lower()
    cause = allocator_pb2.FilterCause.Name(group.cause).removeprefix("FILTER_CAUSE_").lower() if group.cause else ""
    metrics.GROUPS.labels(kind, state, cause).inc()
    for rollout in [*group.rollouts, *group.unjudged]:
        verdict = common_pb2.VerdictKind.Name(rollout.verdict.kind).removeprefix("VERDICT_KIND_").lower()
        metrics.ROLLOUTS.labels(kind, verdict).inc()
    for decision in group.trail:
        name = allocator_pb2.DecisionKind.Name(decision.kind).removeprefix("DECISION_KIND_").lower()
        metrics.DECISIONS.labels(name).inc()
    if kind == "train" and state == "complete":
        metrics.ROLLOUTS_PER_GROUP.observe(len(group.rollouts))
    if group.started_at:
        metrics.GROUP_SECONDS.observe(max(0.0, group.closed_at - group.started_at))
