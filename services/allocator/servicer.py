"""The gRPC face of the allocator. Thin: rule and loop are elsewhere."""

from __future__ import annotations

from typing import Any

import grpc
from rollwise.v1 import allocator_pb2, allocator_pb2_grpc

from services.allocator.allocator import Allocator
from services.allocator.messages import budget_of, decision_message, scale_of
from services.allocator.record import record
from services.allocator.stopping import Kind, decide
from services.common.errors import InvalidArgument

Context = grpc.aio.ServicerContext[Any, Any]
MAX_REWARDS = 100_000


class AllocatorServicer(allocator_pb2_grpc.AllocatorServiceServicer):
    """Allocate for one prompt, Decide for trainers that generate by themselves."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    async def Allocate(
        self, request: allocator_pb2.AllocateRequest, context: Context
    ) -> allocator_pb2.AllocateResponse:
        """The group of one prompt, by the same loop as the stream worker's; its deadline is at most the call's."""
        entry = allocator_pb2.PromptEntry()
        entry.CopyFrom(request.entry)
        remaining = context.time_remaining()
        if remaining is not None:
            entry.deadline_seconds = min(entry.deadline_seconds or remaining, 0.95 * remaining)
        group = await self._allocator.allocate(entry)
        record(group)
        return allocator_pb2.AllocateResponse(group=group)

    async def Decide(self, request: allocator_pb2.DecideRequest, context: Context) -> allocator_pb2.DecideResponse:
        """What the rule says after these rewards."""
        if len(request.rewards) > MAX_REWARDS:
            raise InvalidArgument(f"rewards has {len(request.rewards)} entries; at most {MAX_REWARDS} are taken")
        prior = request.prior if request.HasField("prior") else None
        decision = decide(budget_of(request.budget), list(request.rewards), prior, scale_of(request.scale))
        return allocator_pb2.DecideResponse(
            stop=decision.kind is not Kind.CONTINUE,
            more=decision.more,
            baseline=decision.baseline,
            decision=decision_message(decision),
        )
