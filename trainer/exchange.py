"""Sends prompts out and waits for their groups, with every wait bounded, watched and interruptible.

Used for training and for evaluation alike. Publishing is idempotent by entry id and fenced by the lineage: once the
job was started anew elsewhere, this run can publish nothing any more and ends. This module knows no model.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rollwise.v1 import allocator_pb2

from services.common import keys
from services.common.errors import Unavailable
from services.common.logging import get_logger
from services.common.redis_client import LOST, survive
from services.common.streams import Fence, Publisher, Target
from trainer.accounting import Admission
from trainer.collector import Collector
from trainer.entries import entry_id
from trainer.failures import InterruptedRunError, Interruption, JobFailedError
from trainer.watch import Watch

T = TypeVar("T")
log = get_logger()

BLOCK_SECONDS = 0.5
PUBLISH_AT_ONCE = 16
DRAIN_POLL_SECONDS = 0.02


class Guard:
    """Lets a run be interrupted, and survive a Redis that is away for a while."""

    def __init__(self, redis: Any, *, patience_seconds: float) -> None:
        self.redis = redis
        self._patience = patience_seconds
        self._asked = asyncio.Event()
        self.why: Interruption | None = None

    def interrupt(self, why: Interruption) -> None:
        """Asks the run to end. The first reason stands, except that a cancel or a newer run overrules a stop."""
        if self.why is None or (self.why is Interruption.STOP and why is not Interruption.STOP):
            self.why = why
        self._asked.set()

    def check(self) -> None:
        """Raises InterruptedRunError when the run was asked to end."""
        if self.why is not None:
            raise InterruptedRunError(self.why)

    def check_hard(self) -> None:
        """As `check`, but a mere stop lets the work in hand be finished. For threads that compute."""
        if self.why is not None and self.why is not Interruption.STOP:
            raise InterruptedRunError(self.why)

    async def run(self, work: Awaitable[T]) -> T:
        """Awaits `work`; on a cancel or a newer run it is given up at once."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check_hard()
            return await task
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def steady(self, call: Callable[[], Awaitable[T]]) -> T:
        """An idempotent command to Redis, repeated while Redis is away. Raises JobFailedError (redis_unavailable)."""
        return await self.streams(survive(call, client=self.redis, seconds=self._patience))

    async def streams(self, work: Awaitable[T]) -> T:
        """Awaits what repeats by itself while Redis is away. Raises JobFailedError (redis_unavailable)."""
        try:
            return await work
        except (Unavailable, *LOST) as error:
            raise JobFailedError(
                f"{error}. Start Redis again, then resume the job: it goes on from its last checkpoint",
                code="redis_unavailable",
                service="redis",
            ) from error


class Exchange:
    """Prompts out, groups in, for one stream of one run."""

    def __init__(
        self,
        publisher: Publisher,
        collector: Collector,
        guard: Guard,
        watch: Watch,
        *,
        job_id: str,
        lineage: int,
        kind: str,
        drain_seconds: float,
    ) -> None:
        self.collector = collector
        self._publisher = publisher
        self._guard = guard
        self._watch = watch
        self._job_id = job_id
        self._lineage = lineage
        self._kind = kind
        self._drain_seconds = drain_seconds
        self._waiting: deque[tuple[Admission, allocator_pb2.PromptEntry]] = deque()
        self._sent: set[Admission] = set()

    def send(self, entries: Sequence[tuple[Admission, allocator_pb2.PromptEntry]]) -> None:
        """Puts prompts in line; they go out while `wait` waits."""
        self._waiting.extend(entries)

    async def wait(self, ready: Callable[[], T | None], *, progress: Callable[[], str], one_by_one: bool = False) -> T:
        """Waits until `ready` returns something, and returns that.

        With `one_by_one` a prompt goes out only after the group before it has come and the value prior has learnt its
        outcome: then no prior depends on timing.
        """
        self._watch.group_came()
        while (result := ready()) is None:
            self._guard.check()
            await self._publish(one_by_one)
            if await self._guard.streams(self.collector.pump(BLOCK_SECONDS)):
                self._watch.group_came()
            await self._guard.run(self._watch.look(progress()))
        return result

    async def settle(self, admissions: Sequence[Admission]) -> None:
        """These groups have been consumed."""
        self._sent.difference_update(admissions)
        await self._guard.streams(self.collector.settle(admissions))

    async def drained(self, seconds: float | None = None) -> bool:
        """Waits until the value prior has taken everything off the outcomes stream; False when it takes too long."""
        deadline = time.monotonic() + (self._drain_seconds if seconds is None else seconds)
        while await self._guard.steady(lambda: self._guard.redis.xlen(keys.outcomes())):
            if time.monotonic() > deadline:
                log.warning("the value prior is behind with its outcomes")
                return False
            self._guard.check()
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return True

    async def _publish(self, one_by_one: bool) -> None:
        if not self._waiting:
            return
        if one_by_one:
            if self._sent - self.collector.ready.keys():
                return
            if not await self.drained():
                raise JobFailedError(
                    f"the value prior did not take outcomes off its stream within {self._drain_seconds:.0f} s, and a "
                    "deterministic run cannot go on without them",
                    code="prior_behind",
                    service="value-prior",
                )
        while self._waiting:
            count = 1 if one_by_one else PUBLISH_AT_ONCE
            batch = [self._waiting[i] for i in range(min(count, len(self._waiting)))]
            await asyncio.gather(*(self._publish_one(admission, entry) for admission, entry in batch))
            for admission, _ in batch:
                self._waiting.popleft()
                self._sent.add(admission)
            if one_by_one:
                return

    async def _publish_one(self, admission: Admission, entry: allocator_pb2.PromptEntry) -> None:
        name = entry_id(self._job_id, self._lineage, admission, self._kind)
        targets = [Target(keys.prompts(), entry.SerializeToString())]
        fence = Fence(keys.lineage(self._job_id), self._lineage)
        published = await self._guard.streams(self._publisher.publish(name, targets, fence=fence))
        if published.stale:
            raise InterruptedRunError(Interruption.SUPERSEDED)
