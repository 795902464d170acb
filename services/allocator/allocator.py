"""The sequential loop for one prompt: prior once, a first round, verdicts, a decision, more rollouts where it says so.

Knows no transport and no queue; the contract's messages serve as plain data. A group always closes: complete, or
filtered with its cause. Nothing waits past the group's deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from rollwise.v1 import allocator_pb2, common_pb2, generation_pb2, value_prior_pb2, verifier_pb2

from services.allocator.messages import KIND_MESSAGES, budget_of, check_entry, decision_message, scale_of
from services.allocator.ports import Ports
from services.allocator.stopping import Decision, FixedBudget, Kind, decide
from services.common.errors import DeadlineExceeded, Internal, RollwiseError, Unavailable
from services.common.logging import get_logger

log = get_logger("rollwise.allocator")

ATTEMPTS_PER_ROLLOUT = 2
"""Rollouts without a verdict are replaced until this many times k_max were sampled."""
VERDICT_SHARE = 0.1
"""Share of the remaining time, at most VERDICT_SECONDS, that sampling leaves to the verdicts."""
VERDICT_SECONDS = 5.0
PRIOR_SHARE = 0.5
"""Share of the group's time after which a prior that does not answer is a fault: rollouts need the rest."""


class Allocator:
    """Works on one prompt at a time per call; calls may run side by side.

    `feature_for_prior` fetches the prompt's hidden state by a prefill of its own before the prior is asked, for a prior
    that looks at it; the prefill is kept by the engine for the first round.
    """

    def __init__(self, ports: Ports, *, feature_for_prior: bool = False) -> None:
        self._ports = ports
        self._feature_for_prior = feature_for_prior

    async def allocate(self, entry: allocator_pb2.PromptEntry) -> allocator_pb2.ScoredGroup:
        """The closed group of one prompt. Raises InvalidArgument only, naming the field of a malformed entry."""
        check_entry(entry)
        work = _Group(entry, self._ports, feature_for_prior=self._feature_for_prior)
        try:
            async with asyncio.timeout(entry.deadline_seconds):
                await work.run()
        except (TimeoutError, DeadlineExceeded):
            detail = f"not done after {entry.deadline_seconds:g} s, waiting for {work.waiting_for}"
            work.close_early(allocator_pb2.FILTER_CAUSE_DEADLINE, detail)
        except RollwiseError as error:
            timed_out = work.seconds_left <= 0
            cause = allocator_pb2.FILTER_CAUSE_DEADLINE if timed_out else allocator_pb2.FILTER_CAUSE_FAULT
            work.close_early(cause, f"{work.waiting_for}: {error.reason}: {error.message}")
        return work.group


class _Group:
    """One group in the making."""

    def __init__(self, entry: allocator_pb2.PromptEntry, ports: Ports, *, feature_for_prior: bool) -> None:
        self._entry = entry
        self._ports = ports
        self._feature_for_prior = feature_for_prior
        self._budget = budget_of(entry.budget)
        self._scale = scale_of(entry.scale)
        self._end = time.monotonic() + entry.deadline_seconds
        self._prior: float | None = None
        self._next_index = 0
        self.waiting_for = "the allocator itself"
        self.group = allocator_pb2.ScoredGroup(
            key=entry.key,
            kind=entry.kind,
            prompt_token_ids=entry.prompt_token_ids,
            prompt_text=entry.prompt_text,
            scale=entry.scale,
            budget=entry.budget,
            policy_version=entry.policy_version,
            started_at=time.time(),
            trace_id=entry.trace_id,
        )

    @property
    def seconds_left(self) -> float:
        """Until the deadline; may be negative."""
        return self._end - time.monotonic()

    @property
    def _rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.group.rollouts]

    @property
    def _least(self) -> int:
        """Judged rollouts without which a group is not trainable: OSLA's k_min; of a fixed number, two (or the one)."""
        return min(2, self._budget.rollouts) if isinstance(self._budget, FixedBudget) else self._budget.k_min

    async def run(self) -> None:
        """Buys rollouts until the rule stops, the limit is reached or there is no time for another round."""
        if self._entry.want_prior:
            await self._ask_prior()
        more = self._budget.k_min
        while more:
            await self._buy(more)
            decision = self._look()
            more = decision.more
            room = ATTEMPTS_PER_ROLLOUT * self._budget.k_max - self._next_index
            if more and room <= 0:
                detail = f"{len(self.group.unjudged)} of {self._next_index} rollouts got no verdict"
                self.close_early(allocator_pb2.FILTER_CAUSE_NO_VERDICT, detail, kind=Kind.LIMIT)
                return
            more = min(more, room)
        if len(self.group.rollouts) < self._least:
            self._close(allocator_pb2.FILTER_CAUSE_DEADLINE, "no time for another round")
        else:
            self._close()

    def close_early(
        self, cause: allocator_pb2.FilterCause.ValueType, detail: str, *, kind: Kind = Kind.DEADLINE
    ) -> None:
        """Closes with what there is: complete when the rule's minimum was reached, else filtered with the cause.

        The detail is kept either way: a complete group with one was cut short.
        """
        if len(self.group.rollouts) < self._least:
            self._close(cause, detail)
            return
        last = self.group.trail[-1]
        if last.more:
            last.kind, last.more = KIND_MESSAGES[kind], 0
        self._close(detail=detail)

    # ------------------------------------------------------------------------------------- one round

    async def _ask_prior(self) -> None:
        entry = self._entry
        if self._feature_for_prior and entry.want_prompt_feature:
            answer = await self._generate(0)
            self.group.prompt_feature.CopyFrom(answer.prompt_feature)
        prompt = value_prior_pb2.ScoredPrompt(prompt_id=entry.key.prompt_id, text=entry.prompt_text)
        if self.group.HasField("prompt_feature"):
            prompt.feature.CopyFrom(self.group.prompt_feature)
        request = value_prior_pb2.ScoreRequest(policy_id=entry.policy_id, prompts=[prompt])
        if entry.pinned_batch:
            # A prior that depends on how far the other groups of the step have got would not be reproducible.
            request.before_version = entry.policy_version
        self.waiting_for = "the value prior"
        seconds = PRIOR_SHARE * self.seconds_left
        try:
            async with asyncio.timeout(seconds):
                response = await self._ports.prior.score(request, seconds)
        except (TimeoutError, DeadlineExceeded) as error:
            raise Unavailable(f"no answer within {seconds:.3g} s") from error
        if len(response.priors) != 1:
            raise Internal(f"{len(response.priors)} priors for one prompt", reason="BAD_ANSWER")
        prior = response.priors[0]
        self._prior = self._scale.check("the prior's value", self._scale.reward(prior.value))
        self.group.prior.CopyFrom(prior)

    async def _buy(self, count: int) -> None:
        """Samples `count` more rollouts and files each under its verdict."""
        answer = await self._generate(count)
        self._next_index += count
        if answer.HasField("prompt_feature") and not self.group.HasField("prompt_feature"):
            self.group.prompt_feature.CopyFrom(answer.prompt_feature)
        verdicts = await self._verify(answer.samples)
        for sample in answer.samples:
            rollout = allocator_pb2.Rollout(
                index=sample.index,
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                version_spans=sample.version_spans,
                text=sample.text,
                verdict=verdicts[sample.index],
            )
            if rollout.verdict.kind == common_pb2.VERDICT_KIND_NO_VERDICT:
                self.group.unjudged.append(rollout)
            else:
                rollout.reward = self._scale.reward(rollout.verdict.score)
                self.group.rollouts.append(rollout)

    async def _generate(self, count: int) -> generation_pb2.GenerateResponse:
        entry = self._entry
        first = self._next_index
        request = generation_pb2.GenerateRequest(
            request_id=f"{entry.trace_id or entry.key.job_id}/{entry.key.prompt_id}/{first}",
            prompt_token_ids=entry.prompt_token_ids,
            count=count,
            first_index=first,
            sampling=entry.sampling,
            want_prompt_feature=entry.want_prompt_feature and not self.group.HasField("prompt_feature"),
            min_policy_version=entry.policy_version,
            pinned_batch=entry.pinned_batch,
            policy_id=entry.policy_id,
        )
        left = self.seconds_left
        if count:
            request.time_limit_seconds = max(0.01, left - min(VERDICT_SECONDS, VERDICT_SHARE * left))
        self.waiting_for = "generation"
        answer = await self._ports.generation.generate(request, left)
        expected = list(range(first, first + count))
        if sorted(sample.index for sample in answer.samples) != expected:
            raise Internal(
                f"generation answered with rollouts {[s.index for s in answer.samples]}, asked were {expected}",
                reason="BAD_ANSWER",
            )
        return answer

    async def _verify(self, samples: Sequence[generation_pb2.Sample]) -> dict[int, common_pb2.Verdict]:
        verdicts = {
            sample.index: common_pb2.Verdict(
                kind=common_pb2.VERDICT_KIND_NO_VERDICT, reason="aborted: a weight update ended the rollout"
            )
            for sample in samples
            if sample.finish_reason == common_pb2.FINISH_REASON_ABORTED
        }
        items = [
            verifier_pb2.VerifyItem(item_id=str(sample.index), completion=sample.text, reference=self._entry.reference)
            for sample in samples
            if sample.index not in verdicts
        ]
        if items:
            self.waiting_for = "the verifier"
            response = await self._ports.verifier.verify(verifier_pb2.VerifyRequest(items=items), self.seconds_left)
            asked = {item.item_id for item in items}
            verdicts |= {int(v.item_id): _checked(v.verdict) for v in response.verdicts if v.item_id in asked}
        missing = common_pb2.Verdict(
            kind=common_pb2.VERDICT_KIND_NO_VERDICT, reason="fault: the verifier did not answer for this rollout"
        )
        return {sample.index: verdicts.get(sample.index, missing) for sample in samples}

    # --------------------------------------------------------------------------------- the decision

    def _look(self) -> Decision:
        out_of_time = any(
            r.finish_reason == common_pb2.FINISH_REASON_DEADLINE for r in [*self.group.rollouts, *self.group.unjudged]
        )
        decision = decide(self._budget, self._rewards, self._prior, self._scale, time_is_up=out_of_time)
        if decision.rewards:
            self.group.trail.append(decision_message(decision))
        return decision

    def _close(
        self,
        cause: allocator_pb2.FilterCause.ValueType = allocator_pb2.FILTER_CAUSE_UNSPECIFIED,
        detail: str = "",
    ) -> None:
        group = self.group
        group.state = allocator_pb2.GROUP_STATE_FILTERED if cause else allocator_pb2.GROUP_STATE_COMPLETE
        group.cause = cause
        group.cause_detail = detail
        group.closed_at = time.time()


def _checked(verdict: common_pb2.Verdict) -> common_pb2.Verdict:
    """The verdict, or NO_VERDICT when it is none of the three or its score is no share of 1."""
    if verdict.kind == common_pb2.VERDICT_KIND_NO_VERDICT:
        return verdict
    judged = verdict.kind in (common_pb2.VERDICT_KIND_CORRECT, common_pb2.VERDICT_KIND_WRONG)
    if judged and math.isfinite(verdict.score) and 0 <= verdict.score <= 1:
        return verdict
    return common_pb2.Verdict(
        kind=common_pb2.VERDICT_KIND_NO_VERDICT, reason=f"fault: verdict {verdict.kind} with score {verdict.score}"
    )
