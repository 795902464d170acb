"""Learns from the `outcomes` stream: reads, observes, settles.

An entry is settled only after the model has made it durable; observing is idempotent, so an entry delivered twice
counts once. What cannot be read, or breaks the contract, goes to the dead stream with the reason.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from rollwise.v1 import value_prior_pb2

from services.common.errors import InvalidArgument, Unavailable
from services.common.logging import get_logger
from services.common.redis_client import execute, patiently, survive
from services.common.streams import Delivery
from services.value_prior import metrics
from services.value_prior.messages import outcomes_of
from services.value_prior.model import ValuePrior
from services.value_prior.records import Outcome

log = get_logger("rollwise.value_prior")

T = TypeVar("T")

BATCH = 256
BLOCK_SECONDS = 1.0


class Consumer(Protocol):
    """The part of `StreamConsumer` that is used here."""

    async def read(self, *, count: int, block_seconds: float) -> list[Delivery]:
        """Next deliveries; empty after `block_seconds` without any."""
        ...

    async def settle(self, *deliveries: Delivery) -> None:
        """Done with these."""
        ...

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """To the dead stream."""
        ...


class OutcomeWorker:
    """One reader of the stream. `client` is for short commands, `stream` the stream's key."""

    def __init__(
        self, model: ValuePrior, consumer: Consumer, client: Redis, *, stream: str, catch_up_seconds: float
    ) -> None:
        self._model = model
        self._consumer = consumer
        self._client = client
        self._stream = stream
        self._catch_up_seconds = catch_up_seconds
        self._done_through = (0, 0)
        self._progress = asyncio.Event()

    async def run(self) -> NoReturn:
        """Reads for ever. While Redis is away it waits and tries again."""
        while True:
            deliveries = await _patiently(lambda: self._consumer.read(count=BATCH, block_seconds=BLOCK_SECONDS))
            if deliveries:
                await self._handle(deliveries)

    async def caught_up(self) -> None:
        """Returns once every outcome published before the call is learnt, or after `catch_up_seconds`."""
        try:
            async with asyncio.timeout(self._catch_up_seconds):
                newest = await self._newest_entry()
                while newest is not None and self._done_through < newest:
                    self._progress.clear()
                    await self._progress.wait()
        except (TimeoutError, Unavailable) as error:
            metrics.CATCH_UP_TIMEOUTS.inc()
            log.warning("scored before all earlier outcomes were learnt from", cause=repr(error))

    async def _newest_entry(self) -> tuple[int, int] | None:
        found = await survive(
            lambda: execute(self._client, "XREVRANGE", self._stream, "+", "-", "COUNT", 1),
            client=self._client,
            seconds=0,
        )
        return _entry_number(found[0][0].decode()) if found else None

    async def _handle(self, deliveries: Sequence[Delivery]) -> None:
        good: list[tuple[Delivery, Outcome]] = []
        for delivery in deliveries:
            try:
                message = value_prior_pb2.Outcome.FromString(delivery.payload)
                good.append((delivery, outcomes_of([message])[0]))
            except (DecodeError, InvalidArgument) as error:
                await self._bury(delivery, f"unreadable outcome: {error}")
        await self._observe(good)
        newest = max(_entry_number(delivery.entry_id) for delivery in deliveries)
        self._done_through = max(self._done_through, newest)
        self._progress.set()

    async def _observe(self, pairs: Sequence[tuple[Delivery, Outcome]]) -> None:
        if not pairs:
            return
        try:
            await _patiently(lambda: self._model.observe([outcome for _, outcome in pairs]))
        except InvalidArgument as error:
            if len(pairs) == 1:
                await self._bury(pairs[0][0], str(error))
                return
            # One bad row refuses a whole call; the others must not go with it.
            for pair in pairs:
                await self._observe([pair])
            return
        await _patiently(lambda: self._consumer.settle(*(delivery for delivery, _ in pairs)))

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        log.error("outcome buried", entry_id=delivery.entry_id, reason=reason)
        await _patiently(lambda: self._consumer.bury(delivery, reason))


_patiently = functools.partial(patiently, waiting="outcomes wait")


def _entry_number(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
