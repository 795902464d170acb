"""The stream worker: prompts in, scored groups and outcomes out, many groups at a time.

Every prompt yields exactly one group, whatever dies on the way: an entry is settled only after its group was published,
a redelivered entry's second group is a duplicate to the publisher, and the fence discards what an ended lineage still
publishes. A prompt that cannot be worked on yields a filtered group, so that the trainer's account closes.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from rollwise.v1 import allocator_pb2, common_pb2, value_prior_pb2

from services.allocator import metrics
from services.allocator.allocator import Allocator
from services.allocator.messages import entry_id
from services.allocator.record import outcome_of, record
from services.common import keys
from services.common.errors import InvalidArgument
from services.common.logging import bind_context, get_logger
from services.common.redis_client import RETRY_SECONDS, execute, patiently, survive
from services.common.streams import Delivery, Fence, Publisher, StreamConsumer, Target

T = TypeVar("T")
log = get_logger("rollwise.allocator")

GROUP = "allocator"
BLOCK_SECONDS = 1.0
LINEAGE_POLL_SECONDS = 1.0


class _LineageEnded(Exception):
    """The job was cancelled, or resumed under a newer lineage."""


class StreamWorker:
    """One reader of the `prompts` stream.

    Args:
        allocator: Does the work on one prompt.
        consumer: Of the `prompts` stream; its `max_deliveries` must be above ours.
        publisher: Of groups and outcomes.
        client: For short commands.
        max_groups: Groups in the making at a time.
        max_deliveries: A prompt handed out more often than this is given up as a filtered group.
    """

    def __init__(
        self,
        allocator: Allocator,
        consumer: StreamConsumer,
        publisher: Publisher,
        client: Redis,
        *,
        max_groups: int,
        max_deliveries: int,
    ) -> None:
        self._allocator = allocator
        self._consumer = consumer
        self._publisher = publisher
        self._client = client
        self._max_groups = max_groups
        self._max_deliveries = max_deliveries
        self._running: dict[asyncio.Task[None], common_pb2.GroupKey] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Reads until `drain` is called. While Redis is away it waits and tries again."""
        while not self._stopping.is_set():
            free = self._max_groups - len(self._running)
            if free <= 0:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            deliveries = await _patiently(
                functools.partial(self._consumer.read, count=free, block_seconds=BLOCK_SECONDS)
            )
            for delivery in deliveries:
                if self._stopping.is_set():
                    return  # what was read stays pending, for whoever comes next
                await self._start(delivery)

    async def watch_lineages(self) -> None:
        """Gives up groups of jobs that were cancelled or resumed under a newer lineage, within about a second."""
        while True:
            await asyncio.sleep(LINEAGE_POLL_SECONDS)
            jobs = {key.job_id for key in self._running.values()}
            current = {job: await _patiently(functools.partial(self._lineage, job)) for job in jobs}
            for task, key in list(self._running.items()):
                if key.lineage < current.get(key.job_id, 0) and task not in self._ended:
                    # Once: a second cancellation would interrupt the settling of the entry.
                    self._ended.add(task)
                    task.cancel()

    async def drain(self, seconds: float) -> None:
        """Takes no more prompts, lets running groups end for `seconds`, and hands the rest back to the stream."""
        self._stopping.set()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        # What is still pending under our name comes back to us, or to another allocator when its lease ends.
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _start(self, delivery: Delivery) -> None:
        try:
            entry = allocator_pb2.PromptEntry.FromString(delivery.payload)
            keys.lineage(entry.key.job_id)
        except (DecodeError, InvalidArgument) as error:
            log.error("prompt buried", entry_id=delivery.entry_id, cause=str(error))
            reason = f"unreadable prompt: {error}"
            await _patiently(lambda: self._consumer.bury(delivery, reason))
            return
        task = asyncio.create_task(self._work(delivery, entry), name=f"group {entry.key.prompt_id}")
        self._running[task] = entry.key
        metrics.GROUPS_RUNNING.set(len(self._running))
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._ended.discard(task)
        metrics.GROUPS_RUNNING.set(len(self._running))
        if not task.cancelled() and task.exception() is not None:
            # _work closes every group it can; what comes here is a fault of ours, and the entry stays pending.
            log.error("a group ended on an unexpected error", exc_info=task.exception())

    async def _work(self, delivery: Delivery, entry: allocator_pb2.PromptEntry) -> None:
        bind_context(job_id=entry.key.job_id, step=entry.key.step, trace_id=entry.trace_id or None)
        try:
            if entry.key.lineage < await _patiently(lambda: self._lineage(entry.key.job_id)):
                raise _LineageEnded
            exhausted = delivery.deliveries > self._max_deliveries
            if exhausted:
                group = _unworkable(entry, f"handed out {delivery.deliveries} times; whoever worked on it died")
            else:
                group = await self._group(entry)
            await self._publish(entry, group)
            if exhausted:
                await _patiently(lambda: self._consumer.bury(delivery, group.cause_detail))
            else:
                await _patiently(lambda: self._consumer.settle(delivery))
        except (asyncio.CancelledError, _LineageEnded):
            if self._stopping.is_set():
                raise
            await self._give_up(delivery, entry)

    async def _group(self, entry: allocator_pb2.PromptEntry) -> allocator_pb2.ScoredGroup:
        try:
            return await self._allocator.allocate(entry)
        except InvalidArgument as error:
            return _unworkable(entry, str(error))
        except Exception as error:
            log.exception("allocation failed", job_id=entry.key.job_id, prompt_id=entry.key.prompt_id)
            return _unworkable(entry, f"{type(error).__name__}: {error}")

    async def _publish(self, entry: allocator_pb2.PromptEntry, group: allocator_pb2.ScoredGroup) -> None:
        job = entry.key.job_id
        evaluation = entry.kind == common_pb2.PROMPT_KIND_EVAL
        targets = [Target(keys.evals(job) if evaluation else keys.groups(job), group.SerializeToString())]
        outcome: value_prior_pb2.Outcome | None = outcome_of(entry, group)
        if outcome is not None:
            targets.append(Target(keys.outcomes(), outcome.SerializeToString()))
        fence = Fence(keys.lineage(job), entry.key.lineage)
        while True:
            try:
                published = await self._publisher.publish(entry_id(entry.key, entry.kind), targets, fence=fence)
                break
            except Exception:
                # Redis away or out of memory, no room for a blob: the group is made and must not be lost, and the
                # same id may be published again. The lease is kept; an ended lineage still ends this wait.
                log.exception("a group cannot be published, trying again", prompt_id=entry.key.prompt_id)
                await asyncio.sleep(RETRY_SECONDS)
        if published.stale:
            metrics.GROUPS_STALE.inc()
        elif not published.duplicate:
            record(group)

    async def _give_up(self, delivery: Delivery, entry: allocator_pb2.PromptEntry) -> None:
        metrics.GROUPS_STALE.inc()
        log.info("group given up: its lineage ended", job_id=entry.key.job_id, lineage=entry.key.lineage)
        await _patiently(lambda: self._consumer.settle(delivery))

    async def _lineage(self, job_id: str) -> int:
        found = await survive(
            lambda: execute(self._client, "GET", keys.lineage(job_id)), client=self._client, seconds=0
        )
        return int(found) if found is not None else 0


def _unworkable(entry: allocator_pb2.PromptEntry, detail: str) -> allocator_pb2.ScoredGroup:
    return allocator_pb2.ScoredGroup(
        key=entry.key,
        kind=entry.kind,
        prompt_token_ids=entry.prompt_token_ids,
        prompt_text=entry.prompt_text,
        scale=entry.scale,
        budget=entry.budget,
        policy_version=entry.policy_version,
        trace_id=entry.trace_id,
        state=allocator_pb2.GROUP_STATE_FILTERED,
        cause=allocator_pb2.FILTER_CAUSE_FAULT,
        cause_detail=detail,
    )


_patiently = functools.partial(patiently, waiting="the allocator waits")
