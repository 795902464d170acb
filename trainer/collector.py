"""Takes scored groups off a stream and keeps those that somebody waits for.

A group is kept until the step that trains it has been done, and its stream entry is settled then; everything else
(an older lineage's, a second copy, one that nobody asked for) is settled at once and counted. What is kept is bounded
by the credits. This module knows streams and the ledger, no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from rollwise.v1 import allocator_pb2

from services.common.logging import get_logger
from services.common.streams import Delivery, StreamConsumer
from trainer.accounting import Admission, Ledger

log = get_logger()

READ_COUNT = 64


@dataclass(frozen=True)
class Received:
    """A group and the stream entry it came in."""

    group: allocator_pb2.ScoredGroup
    delivery: Delivery


class Collector:
    """The groups of one job and lineage that have arrived and are not consumed."""

    def __init__(self, consumer: StreamConsumer, ledger: Ledger, *, job_id: str, lineage: int) -> None:
        self._consumer = consumer
        self._ledger = ledger
        self._job_id = job_id
        self._lineage = lineage
        self.ready: dict[Admission, Received] = {}

    async def pump(self, block_seconds: float) -> int:
        """Reads what there is, waiting at most `block_seconds` for a first entry; returns how many groups were kept."""
        kept, useless = 0, []
        for delivery in await self._consumer.read(count=READ_COUNT, block_seconds=block_seconds):
            try:
                group = allocator_pb2.ScoredGroup.FromString(delivery.payload)
            except DecodeError as error:
                log.error("unreadable group", entry=delivery.entry_id, error=str(error))
                await self._consumer.bury(delivery, f"not a ScoredGroup: {error}")
                continue
            if self._keep(group, delivery):
                kept += 1
            else:
                useless.append(delivery)
        if useless:
            await self._consumer.settle(*useless)
        return kept

    def _keep(self, group: allocator_pb2.ScoredGroup, delivery: Delivery) -> bool:
        if group.key.job_id != self._job_id or group.key.lineage != self._lineage:
            self._ledger.stale += 1
            return False
        admission = Admission(group.key.step, group.key.prompt_id, group.key.attempt)
        if admission not in self._ledger or admission in self.ready:
            self._ledger.duplicates += 1
            return False
        self.ready[admission] = Received(group, delivery)
        return True

    async def settle(self, admissions: Iterable[Admission]) -> None:
        """The groups have been consumed: their entries leave the stream, they leave memory."""
        done = list(admissions)
        await self._consumer.settle(*(self.ready[admission].delivery for admission in done))
        for admission in done:
            del self.ready[admission]
