"""Evaluation: held-out prompts take the same road as training prompts, and come back on a stream of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rollwise.v1 import allocator_pb2

from trainer.accounting import Admission, Final, Ledger
from trainer.config import JobSpec
from trainer.entries import evaluation_entry
from trainer.exchange import Exchange
from trainer.prompts import Prompt

AT_ONCE = 256


class Evaluator:
    """Grades the weights that are served now on the held-out prompts. `ledger` is the collector's."""

    def __init__(
        self, spec: JobSpec, prompts: Sequence[Prompt], exchange: Exchange, ledger: Ledger, *, job_id: str, lineage: int
    ) -> None:
        self._spec = spec
        self._prompts = prompts
        self._exchange = exchange
        self._ledger = ledger
        self._job_id = job_id
        self._lineage = lineage

    async def run(self, *, step: int, policy_version: int) -> dict[str, Any]:
        """One evaluation after `step` steps; returns its record (see `summarise`)."""
        started = time.monotonic()
        scores: list[list[float]] = []
        tokens: list[int] = []
        causes: dict[str, int] = {}
        unjudged = 0
        ready = self._exchange.collector.ready
        for start in range(0, len(self._prompts), AT_ONCE):
            part = self._prompts[start : start + AT_ONCE]
            wanted = [Admission(step, prompt.id) for prompt in part]
            for admission in wanted:
                self._ledger.admit(admission)
            self._exchange.send(
                [
                    (
                        admission,
                        evaluation_entry(
                            self._spec,
                            prompt,
                            admission,
                            job_id=self._job_id,
                            lineage=self._lineage,
                            policy_version=policy_version,
                        ),
                    )
                    for admission, prompt in zip(wanted, part, strict=True)
                ]
            )

            def done(wanted: Sequence[Admission] = wanted) -> bool | None:
                return True if all(admission in ready for admission in wanted) else None

            await self._exchange.wait(done, progress=lambda: f"evaluation after step {step}, {len(ready)} groups came")
            for admission in wanted:
                group = ready[admission].group
                complete = group.state == allocator_pb2.GROUP_STATE_COMPLETE and len(group.rollouts) > 0
                if complete:
                    scores.append([_score(group, rollout) for rollout in group.rollouts])
                    tokens.extend(len(rollout.token_ids) // 4 for rollout in group.rollouts)
                else:
                    cause = allocator_pb2.FilterCause.Name(group.cause).removeprefix("FILTER_CAUSE_").lower()
                    causes[cause] = causes.get(cause, 0) + 1
                unjudged += len(group.unjudged)
                self._ledger.settle(admission, Final.TRAINED if complete else Final.FILTERED)
            await self._exchange.settle(wanted)
        record = summarise(scores, prompts=len(self._prompts), unjudged=unjudged, causes=causes)
        return {
            "step": step,
            "policy_version": policy_version,
            **record,
            "response_tokens_mean": fmean(tokens) if tokens else None,
            "seconds": time.monotonic() - started,
        }


def summarise(
    scores: Sequence[Sequence[float]], *, prompts: int, unjudged: int, causes: dict[str, int]
) -> dict[str, Any]:
    """Accuracy is the mean over judged prompts of the mean score of their rollouts, in [0, 1].

    `accuracy_stderr` is the standard error of that mean over prompts. Prompts without a verdict are in neither; they
    are counted under `unjudged_prompts`, with their causes.
    """
    means = [fmean(of_prompt) for of_prompt in scores]
    n = len(means)
    spread = math.sqrt(sum((m - fmean(means)) ** 2 for m in means) / (n - 1)) if n > 1 else None
    return {
        "accuracy": fmean(means) if means else None,
        "accuracy_stderr": spread / math.sqrt(n) if spread is not None else None,
        "prompts": prompts,
        "judged_prompts": n,
        "unjudged_prompts": prompts - n,
        "causes": causes,
        "rollouts": sum(len(of_prompt) for of_prompt in scores) + unjudged,
        "unjudged_rollouts": unjudged,
    }


def _score(group: allocator_pb2.ScoredGroup, rollout: allocator_pb2.Rollout) -> float:
    return (rollout.reward - group.scale.low) / (group.scale.high - group.scale.low)
