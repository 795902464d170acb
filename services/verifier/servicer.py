"""VerifierService over gRPC: message to task, verdict to message; the judging is the pool's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import grpc.aio
from rollwise.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc

from services.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.verifier import tasks
from services.verifier.pool import PoolBusy, PoolStopped, VerdictPool
from services.verifier.tasks import Task
from services.verifier.verdicts import GOLD_UNPARSABLE, Kind, Verdict, no_verdict

_KINDS = {
    Kind.CORRECT: common_pb2.VERDICT_KIND_CORRECT,
    Kind.WRONG: common_pb2.VERDICT_KIND_WRONG,
    Kind.NO_VERDICT: common_pb2.VERDICT_KIND_NO_VERDICT,
}
_DOMAIN_OF_KIND = {
    "math": common_pb2.DOMAIN_MATH,
    "code": common_pb2.DOMAIN_CODE,
    "tool_call": common_pb2.DOMAIN_TOOL_CALL,
    "instruction": common_pb2.DOMAIN_INSTRUCTION_FOLLOWING,
    "reasoning_gym": common_pb2.DOMAIN_REASONING_GYM,
}
_NAMES_SHOWN = 5
# What is kept of a call's time for the way back.
_RETURN_SHARE = 0.05
_RETURN_SECONDS_AT_MOST = 0.5
_DEFAULT_SECONDS = 600.0


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers Verify and CheckReferences from a pool."""

    def __init__(self, pool: VerdictPool) -> None:
        self._pool = pool

    async def Verify(
        self,
        request: verifier_pb2.VerifyRequest,
        context: grpc.aio.ServicerContext[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
    ) -> verifier_pb2.VerifyResponse:
        """One verdict for each item, in order; what is not judged within the call's deadline is NO_VERDICT."""
        _check_ids([item.item_id for item in request.items])
        found = await self._judge([_judge_task(item) for item in request.items], context)
        return verifier_pb2.VerifyResponse(
            verdicts=[
                verifier_pb2.ItemVerdict(item_id=item.item_id, verdict=_message(verdict))
                for item, verdict in zip(request.items, found, strict=True)
            ]
        )

    async def CheckReferences(
        self,
        request: verifier_pb2.CheckReferencesRequest,
        context: grpc.aio.ServicerContext[verifier_pb2.CheckReferencesRequest, verifier_pb2.CheckReferencesResponse],
    ) -> verifier_pb2.CheckReferencesResponse:
        """Whether each reference parses and equals itself."""
        found = await self._judge([_check_task(reference) for reference in request.references], context)
        return verifier_pb2.CheckReferencesResponse(
            checks=[verifier_pb2.ReferenceCheck(usable=v.kind is Kind.CORRECT, reason=_clean(v.reason)) for v in found]
        )

    async def _judge(self, wanted: Sequence[Task | Verdict], context: Any) -> list[Verdict]:
        left = context.time_remaining()
        seconds = _DEFAULT_SECONDS if left is None else max(left, 0.0)
        seconds -= min(seconds * _RETURN_SHARE, _RETURN_SECONDS_AT_MOST)
        try:
            open_tasks = [w for w in wanted if isinstance(w, Task)]
            judged = iter(await self._pool.judge(open_tasks, timeout_seconds=seconds))
        except PoolBusy as error:
            raise ResourceExhausted(str(error)) from error
        except PoolStopped as error:
            raise Unavailable(str(error)) from error
        return [next(judged) if isinstance(w, Task) else w for w in wanted]


def _check_ids(ids: Sequence[str]) -> None:
    empty = [str(i) for i, item_id in enumerate(ids) if not item_id]
    if empty:
        raise InvalidArgument(f"items[{_some(empty)}] have no item_id; give each item an id of its own")
    repeated = [item_id for item_id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InvalidArgument(f"item_id must be unique in a request; given more than once: {_some(repeated)}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _judge_task(item: verifier_pb2.VerifyItem) -> Task | Verdict:
    kind = _kind(item.reference)
    if kind == "math":
        return tasks.judge_math(item.reference.math.answer, item.completion)
    if kind == "reasoning_gym":
        entry = item.reference.reasoning_gym
        return tasks.judge_gym(entry.task, entry.entry_json, item.completion)
    return kind if isinstance(kind, Verdict) else tasks.unsupported(kind)


def _check_task(reference: common_pb2.Reference) -> Task | Verdict:
    kind = _kind(reference)
    if kind == "math":
        return tasks.check_math(reference.math.answer)
    if kind == "reasoning_gym":
        return tasks.check_gym(reference.reasoning_gym.task, reference.reasoning_gym.entry_json)
    return kind if isinstance(kind, Verdict) else tasks.unsupported(kind)


def _kind(reference: common_pb2.Reference) -> str | Verdict:
    """Which kind of reference it is, or the verdict that it is none; one bad reference hides no other verdict.

    Its domain may be left unspecified but must not name another kind.
    """
    kind = reference.WhichOneof("kind")
    if kind is None:
        wanted = ", ".join(_DOMAIN_OF_KIND)
        return no_verdict(f"{GOLD_UNPARSABLE}: the reference is empty; set one of {wanted}")
    if reference.domain not in (common_pb2.DOMAIN_UNSPECIFIED, _DOMAIN_OF_KIND[kind]):
        named = _domain_name(reference.domain)
        return no_verdict(f"{GOLD_UNPARSABLE}: a {kind} reference whose domain is {named}; make them agree")
    return str(kind)


def _domain_name(value: int) -> str:
    known: Iterable[int] = common_pb2.Domain.values()
    return common_pb2.Domain.Name(common_pb2.Domain.ValueType(value)) if value in known else str(value)


def _message(verdict: Verdict) -> common_pb2.Verdict:
    return common_pb2.Verdict(
        kind=_KINDS[verdict.kind],
        score=verdict.score,
        reason=_clean(verdict.reason),
        extracted=_clean(verdict.extracted),
    )


def _clean(text: str) -> str:
    """Text that protobuf takes: a cut or hostile string may hold half a character."""
    return text.encode("utf-8", "replace").decode()
