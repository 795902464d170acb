"""Prompts as messages on the stream. Everything on an entry follows from the specification, the prompt and the step.

The sampling seed is a stable hash of the job's seed, the step, the prompt's id and its attempt. The job's id is not in
it, so two jobs with one seed draw the same rollouts. This module knows no service.
"""

from __future__ import annotations

from rollwise.v1 import allocator_pb2, common_pb2

from trainer.accounting import Admission
from trainer.config import FixedBudget, JobSpec, OslaBudget
from trainer.data import hash_seed
from trainer.preflight import evaluation_tokens
from trainer.prompts import Prompt


def entry_id(job_id: str, lineage: int, admission: Admission, kind: str) -> str:
    """Names an entry for idempotent publishing."""
    return f"{job_id}/{lineage}/{admission.step}/{admission.prompt_id}/{admission.attempt}/{kind}"


def budget_rule(budget: FixedBudget | OslaBudget) -> allocator_pb2.BudgetRule:
    """The budget as a message; the price of OSLA defaults to the paper's 1/k_max^2 (scale -1..1)."""
    if isinstance(budget, FixedBudget):
        return allocator_pb2.BudgetRule(fixed=allocator_pb2.FixedBudget(rollouts=budget.rollouts))
    return allocator_pb2.BudgetRule(
        osla=allocator_pb2.OslaBudget(
            k_min=budget.k_min,
            k_max=budget.k_max,
            price=budget.price if budget.price is not None else 1 / budget.k_max**2,
            round_size=budget.round_size,
        )
    )


def training_entry(
    spec: JobSpec,
    prompt: Prompt,
    admission: Admission,
    *,
    job_id: str,
    lineage: int,
    policy_version: int,
    resampled: bool = False,
) -> allocator_pb2.PromptEntry:
    """A prompt to train on; rewards are on the scale 0..1.

    With `resampled` (it was in flight at the checkpoint that the run began from) the noise is this lineage's own.
    """
    again = lineage if resampled else 0
    seed = hash_seed("rollouts", spec.seed, admission.step, admission.prompt_id, admission.attempt, again)
    return allocator_pb2.PromptEntry(
        key=_key(job_id, lineage, admission),
        kind=common_pb2.PROMPT_KIND_TRAIN,
        policy_id=job_id,
        prompt_token_ids=prompt.token_ids.astype("<u4").tobytes(),
        prompt_text=prompt.text,
        reference=prompt.reference,
        sampling=common_pb2.SamplingParams(
            temperature=spec.sampling.temperature, max_tokens=spec.sampling.max_tokens, seed=seed
        ),
        budget=budget_rule(spec.algorithm.budget),
        scale=allocator_pb2.RewardScale(low=0.0, high=1.0),
        policy_version=policy_version,
        deadline_seconds=spec.group_deadline_seconds,
        want_prior=spec.algorithm.needs_prior,
        # Costs nothing beside the prefill; a prior that looks at hidden states needs it.
        want_prompt_feature=spec.algorithm.needs_prior,
        pinned_batch=spec.deterministic,
        trace_id=f"{job_id}-{lineage}-{admission.step}",
    )


def evaluation_entry(
    spec: JobSpec, prompt: Prompt, admission: Admission, *, job_id: str, lineage: int, policy_version: int
) -> allocator_pb2.PromptEntry:
    """A held-out prompt: a fixed number of rollouts, no prior, and the same noise at every evaluation."""
    assert spec.evaluation is not None
    return allocator_pb2.PromptEntry(
        key=_key(job_id, lineage, admission),
        kind=common_pb2.PROMPT_KIND_EVAL,
        policy_id=job_id,
        prompt_token_ids=prompt.token_ids.astype("<u4").tobytes(),
        prompt_text=prompt.text,
        reference=prompt.reference,
        sampling=common_pb2.SamplingParams(
            temperature=spec.evaluation.temperature,
            max_tokens=evaluation_tokens(spec),
            seed=hash_seed("evaluation", spec.seed, admission.prompt_id),
        ),
        budget=budget_rule(FixedBudget(rollouts=spec.evaluation.rollouts)),
        scale=allocator_pb2.RewardScale(low=0.0, high=1.0),
        policy_version=policy_version,
        deadline_seconds=spec.group_deadline_seconds,
        want_prior=False,
        pinned_batch=spec.deterministic,
        trace_id=f"{job_id}-{lineage}-{admission.step}-eval",
    )


def _key(job_id: str, lineage: int, admission: Admission) -> common_pb2.GroupKey:
    return common_pb2.GroupKey(
        job_id=job_id,
        lineage=lineage,
        step=admission.step,
        prompt_id=admission.prompt_id,
        attempt=admission.attempt,
    )
