"""From the groups of one step to what is trained, and to the numbers that describe the step.

Sorts groups into trained, filtered and dropped; makes samples with advantages of the trained ones. This module knows
no service, no stream and no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from rollwise.v1 import allocator_pb2

from services.common.errors import InvalidArgument
from services.common.packing import unpack_floats, unpack_ids
from trainer.accounting import Admission, Final
from trainer.algorithms import GroupRewards, Scale, advantages, baselines
from trainer.batch import Sample
from trainer.config import JobSpec


@dataclass(frozen=True)
class Judged:
    """One group of a step and what became of it. `baselines` is None unless it was trained."""

    admission: Admission
    group: allocator_pb2.ScoredGroup
    final: Final
    cause: str | None
    baselines: list[float] | None = None

    @property
    def rollouts(self) -> int:
        """Rollouts that were paid for, judged or not."""
        return len(self.group.rollouts) + len(self.group.unjudged)


@dataclass
class StepBatch:
    """Everything of one step: its groups in order, the samples to train on, and the metrics so far."""

    judged: list[Judged]
    samples: list[Sample]
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        """Why groups were not trained, in words, without repeats."""
        return list(dict.fromkeys(j.cause for j in self.judged if j.cause is not None))


def build_batch(
    groups: Mapping[Admission, allocator_pb2.ScoredGroup], spec: JobSpec, *, policy_version: int
) -> StepBatch:
    """Makes one step's batch from its groups, in the given order. `policy_version` is that of the weights now."""
    judged: list[Judged] = []
    kept: list[tuple[Admission, allocator_pb2.ScoredGroup, GroupRewards, list[Sample]]] = []
    for admission, group in groups.items():
        if group.state != allocator_pb2.GROUP_STATE_COMPLETE:
            judged.append(Judged(admission, group, Final.FILTERED, _filter_cause(group)))
            continue
        try:
            rewards = _rewards(admission, group)
            samples = [_sample(admission, group, rollout, policy_version) for rollout in group.rollouts]
        except InvalidArgument as error:
            judged.append(Judged(admission, group, Final.DROPPED, f"malformed: {error}"))
            continue
        age = policy_version - _oldest_version(group)
        if age > spec.max_staleness:
            cause = f"too_old: {age} versions old, at most {spec.max_staleness} are allowed"
            judged.append(Judged(admission, group, Final.DROPPED, cause))
        elif not any(sample.trained_tokens for sample in samples):
            judged.append(Judged(admission, group, Final.DROPPED, "malformed: no rollout has a token"))
        else:
            kept.append((admission, group, rewards, samples))
    of_all = [rewards for _, _, rewards, _ in kept]
    advantage_lists, baseline_lists = advantages(of_all, spec.algorithm), baselines(of_all, spec.algorithm)
    trained: list[Sample] = []
    for (admission, group, _, samples), values, base in zip(kept, advantage_lists, baseline_lists, strict=True):
        trained.extend(_with_advantage(sample, value) for sample, value in zip(samples, values, strict=True))
        judged.append(Judged(admission, group, Final.TRAINED, None, list(base)))
    order = {admission: i for i, admission in enumerate(groups)}
    judged.sort(key=lambda j: order[j.admission])
    return StepBatch(judged, trained, _metrics(judged, spec, policy_version))


def _filter_cause(group: allocator_pb2.ScoredGroup) -> str:
    name = allocator_pb2.FilterCause.Name(group.cause).removeprefix("FILTER_CAUSE_").lower()
    return f"{name}: {group.cause_detail}" if group.cause_detail else name


def _rewards(admission: Admission, group: allocator_pb2.ScoredGroup) -> GroupRewards:
    scale = Scale(group.scale.low, group.scale.high)
    prior = scale.low + group.prior.value * (scale.high - scale.low) if group.HasField("prior") else None
    key = f"{admission.step}/{admission.prompt_id}/{admission.attempt}"
    return GroupRewards(key, tuple(rollout.reward for rollout in group.rollouts), prior, scale)


def _sample(
    admission: Admission, group: allocator_pb2.ScoredGroup, rollout: allocator_pb2.Rollout, policy_version: int
) -> Sample:
    ids = unpack_ids(rollout.token_ids)
    counts = [span.token_count for span in rollout.version_spans]
    if sum(counts) != len(ids):
        raise InvalidArgument(f"rollout {rollout.index} has {len(ids)} tokens, but its versions cover {sum(counts)}")
    older = [span.policy_version < policy_version for span in rollout.version_spans]
    return Sample(
        group=f"{admission.step}/{admission.prompt_id}/{admission.attempt}",
        prompt_ids=unpack_ids(group.prompt_token_ids),
        completion_ids=ids,
        engine_logprobs=unpack_floats(rollout.logprobs),
        advantage=0.0,
        stale=np.repeat(np.array(older, bool), counts),
    )


def _with_advantage(sample: Sample, advantage: float) -> Sample:
    return Sample(
        sample.group,
        sample.prompt_ids,
        sample.completion_ids,
        sample.engine_logprobs,
        advantage,
        sample.stale,
        sample.mask,
    )


def _oldest_version(group: allocator_pb2.ScoredGroup) -> int:
    versions = [span.policy_version for rollout in group.rollouts for span in rollout.version_spans]
    return min(versions, default=group.policy_version)


def _metrics(judged: Sequence[Judged], spec: JobSpec, policy_version: int) -> dict[str, Any]:
    trained = [j for j in judged if j.final is Final.TRAINED]
    rewards = [[rollout.reward for rollout in j.group.rollouts] for j in trained]
    flat = [reward for of_group in rewards for reward in of_group]
    lengths = [len(rollout.token_ids) // 4 for j in trained for rollout in j.group.rollouts]
    paid = sum(j.rollouts for j in judged)
    metrics: dict[str, Any] = {
        "groups": len(judged),
        "groups_trained": len(trained),
        "groups_filtered": sum(j.final is Final.FILTERED for j in judged),
        "groups_dropped": sum(j.final is Final.DROPPED for j in judged),
        "rollouts": paid,
        "rollouts_per_prompt": paid / max(len(judged), 1),
        "unjudged_rollouts": sum(len(j.group.unjudged) for j in judged),
        "reward_mean": _mean(flat),
        "zero_signal_share": _mean([float(len(set(of_group)) == 1) for of_group in rewards]),
        "sampled_tokens": sum(lengths),
        "response_tokens_mean": _mean(lengths),
        "truncated_share": _mean(
            [float(r.finish_reason != 1) for j in trained for r in j.group.rollouts]  # FINISH_REASON_STOP is 1
        ),
        "staleness_mean": _mean([float(policy_version - _oldest_version(j.group)) for j in trained]),
        "staleness_max": max((policy_version - _oldest_version(j.group) for j in trained), default=0),
        "group_seconds_mean": _mean([max(0.0, j.group.closed_at - j.group.started_at) for j in judged]),
        "baseline_mean": _mean([b for j in trained for b in j.baselines or []]),
        "baseline_shift_mean": _mean(
            [abs(b - fmean(of_group)) for j, of_group in zip(trained, rewards, strict=True) for b in j.baselines or []]
        ),
    }
    if spec.algorithm.needs_prior:
        metrics.update(_prior_metrics(trained))
    return metrics


def _prior_metrics(trained: Sequence[Judged]) -> dict[str, Any]:
    """Brier score of the prior per rollout, and its squared error against the group's mean, both in 0..1."""
    brier, squared, priors = [], [], []
    for j in trained:
        if not j.group.HasField("prior"):
            continue
        span = j.group.scale.high - j.group.scale.low
        scores = [(rollout.reward - j.group.scale.low) / span for rollout in j.group.rollouts]
        value = j.group.prior.value
        priors.append(value)
        brier.append(fmean((value - score) ** 2 for score in scores))
        squared.append((value - fmean(scores)) ** 2)
    return {"prior_mean": _mean(priors), "prior_brier": _mean(brier), "prior_squared_error": _mean(squared)}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values and all(math.isfinite(v) for v in values) else None
