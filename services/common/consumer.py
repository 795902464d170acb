"""Consuming a stream under leases: what is handed out is settled, lost to another consumer, or buried."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from services.common import keys, scripts
from services.common import telemetry as metrics
from services.common.blobs import BlobCorrupt, BlobStore
from services.common.errors import InvalidArgument, NotFound
from services.common.logging import get_logger
from services.common.redis_client import LOST, MAX_BLOCK_SECONDS, execute, survive
from services.common.stream_entries import Delivery, Depth, fields_of, group_lost, pending_count, text

log = get_logger("rollwise.streams")


class StreamConsumer:
    """One member of a consumer group.

    Args:
        client: Not a blocking one.
        blocking_client: `connect(url, blocking=True)`, for the waiting read alone.
        blobs: Where large payloads are.
        stream: Key of the stream.
        group: The role; every role has one group.
        consumer: Stable over restarts of the process, and no other live process may have it.
        lease_seconds: An entry not renewed for this long goes to another consumer.
        max_deliveries: An entry handed out this often is buried instead of handed out again.
        reconnect_seconds: How long a call outlives a server that does not answer.
        on_lost: Told when a held entry was lost: another consumer may be working on it.
    """

    def __init__(
        self,
        client: Redis,
        blocking_client: Redis,
        blobs: BlobStore,
        *,
        stream: str,
        group: str,
        consumer: str,
        lease_seconds: float = 30,
        max_deliveries: int = 5,
        reconnect_seconds: float = 30.0,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._blocking_client = blocking_client
        self._blobs = blobs
        self.stream, self.group, self.consumer = stream, group, consumer
        self._lease_seconds = lease_seconds
        self._max_deliveries = max_deliveries
        self._reconnect_seconds = reconnect_seconds
        self._on_lost = on_lost
        self._label = metrics.stream_label(stream)
        self._held: set[str] = set()
        # Entries may be delivered to us without our knowing: before a restart, or when a reply was lost.
        self._own_unread = True
        self._expired_from = "0-0"
        self._reading = asyncio.Lock()

    @property
    def held(self) -> frozenset[str]:
        """Ids of the entries handed out and neither settled, buried nor lost."""
        return frozenset(self._held)

    def owns(self, delivery: Delivery) -> bool:
        """Say whether, as far as the last renewal knows, the entry is still this consumer's."""
        return delivery.entry_id in self._held

    async def read(self, *, count: int, block_seconds: float) -> list[Delivery]:
        """Return up to `count` entries: own pending ones first, then those whose lease expired, then new ones.

        What cannot be read, or was handed out too often, is buried on the way and not returned.

        Args:
            count: At least 1.
            block_seconds: How long to wait when there is nothing; 0 does not wait.

        Raises:
            Unavailable: Redis did not answer for `reconnect_seconds`; names its address.
        """
        if count < 1:
            raise InvalidArgument(f"count must be at least 1, got {count}")
        async with self._reading:
            deadline = time.monotonic() + block_seconds
            while True:
                wait = deadline - time.monotonic()
                # In steps, because leases of others can expire while we wait.
                step = max(0.0, min(wait, self._lease_seconds / 4, MAX_BLOCK_SECONDS))
                found = await survive(
                    lambda step=step: self._read_once(count, step),  # type: ignore[misc]
                    client=self._client,
                    seconds=self._reconnect_seconds,
                )
                if found or time.monotonic() >= deadline:
                    return found

    async def settle(self, *deliveries: Delivery) -> None:
        """Say that entries are done with: they, and their blobs, are deleted. Settling twice is no error.

        Raises:
            Unavailable: Redis did not answer for `reconnect_seconds`; the entries stay held.
        """
        if not deliveries:
            return
        ids = [delivery.entry_id for delivery in deliveries]

        async def both() -> int:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.xack(self.stream, self.group, *ids)
                pipe.xdel(self.stream, *ids)
                answers = await pipe.execute()
            return int(answers[1])

        deleted = await survive(both, client=self._client, seconds=self._reconnect_seconds)
        self._held.difference_update(ids)
        metrics.STREAM_SETTLED.labels(self._label).inc(deleted)
        for delivery in deliveries:
            if delivery.blob is None:
                continue
            try:
                await self._blobs.delete(delivery.blob)
            except OSError as error:
                # The entry is settled whatever becomes of its blob, which a sweep finds later.
                log.warning("blob not deleted", blob=delivery.blob, error=str(error))

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """Move an entry to `<stream>:dead` with the reason and its original fields; its blob stays with it."""
        await self._bury(delivery.entry_id, reason, delivery.deliveries)

    async def run_leases(self) -> None:
        """Renew the lease of everything held, at a quarter of its length, until cancelled; a background task."""
        while True:
            await asyncio.sleep(self._lease_seconds / 4)
            await self.renew()

    async def renew(self) -> None:
        """Renew the lease of everything held, once; a server that does not answer is asked again the next time."""
        held = sorted(self._held)
        if not held:
            return
        try:
            lost = await scripts.renew(
                self._client, stream=self.stream, group=self.group, consumer=self.consumer, ids=held
            )
        except LOST as error:
            log.warning("leases not renewed, redis does not answer", stream=self.stream, error=str(error))
            return
        except redis.exceptions.ResponseError as error:
            if not group_lost(error):
                raise
            lost = held
        for entry_id in lost:
            if entry_id not in self._held:
                continue  # settled while the renewal was on its way
            self._held.discard(entry_id)
            metrics.STREAM_LEASES_LOST.labels(self._label).inc()
            log.warning("lease lost", stream=self.stream, entry=entry_id, consumer=self.consumer)
            if self._on_lost is not None:
                self._on_lost(entry_id)

    async def depth(self) -> Depth:
        """Return how much is in the stream, and set the gauges."""

        async def ask() -> Depth:
            length = int(await execute(self._client, "XLEN", self.stream))
            try:
                pending = pending_count(await execute(self._client, "XPENDING", self.stream, self.group))
            except redis.exceptions.ResponseError as error:
                if not group_lost(error):
                    raise
                pending = 0
            return Depth(length, max(0, length - pending), pending)

        depth = await survive(ask, client=self._client, seconds=self._reconnect_seconds)
        metrics.STREAM_LENGTH.labels(self._label).set(depth.length)
        metrics.STREAM_UNDELIVERED.labels(self._label).set(depth.undelivered)
        metrics.STREAM_PENDING.labels(self._label).set(depth.pending)
        return depth

    async def ensure_group(self) -> None:
        """Make the stream and its group, from the first entry on, unless they are there."""
        try:
            await execute(self._client, "XGROUP", "CREATE", self.stream, self.group, "0", "MKSTREAM")
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read_once(self, count: int, block_seconds: float) -> list[Delivery]:
        delay = 0.05
        while True:
            try:
                return await self._read_all_sources(count, block_seconds)
            except redis.exceptions.ResponseError as error:
                if not group_lost(error):
                    raise
                log.warning("consumer group is not there, making it", stream=self.stream, group=self.group)
                await self.ensure_group()
                # Somebody who deletes the stream again and again must not make us spin.
                await asyncio.sleep(delay)
                delay = min(delay * 2, 1.0)

    async def _read_all_sources(self, count: int, block_seconds: float) -> list[Delivery]:
        complete = False
        try:
            found: list[Delivery] = []
            if self._own_unread:
                found = await self._own_pending(count)
            if not found:
                found = await self._expired(count)
            if not found:
                found = await self._new(count, block_seconds)
            complete = True
            return found
        finally:
            if not complete:
                # Cancelled or cut off: entries may be ours that nobody was handed.
                self._own_unread = True

    async def _own_pending(self, count: int) -> list[Delivery]:
        start = "-"
        found: list[Delivery] = []
        while True:
            page = await self._client.xpending_range(self.stream, self.group, start, "+", 100, self.consumer)
            ids = [text(row["message_id"]) for row in page]
            unread = [entry_id for entry_id in ids if entry_id not in self._held][: count - len(found)]
            if unread:
                raw = await execute(self._client, "XCLAIM", self.stream, self.group, self.consumer, 0, *unread)
                found += await self._accept(raw, "own")
            if len(found) >= count:
                return found
            if len(ids) < 100:
                self._own_unread = False
                return found
            start = f"({ids[-1]}"

    async def _expired(self, count: int) -> list[Delivery]:
        while True:
            reply = await execute(
                self._client,
                "XAUTOCLAIM",
                self.stream,
                self.group,
                self.consumer,
                int(self._lease_seconds * 1000),
                self._expired_from,
                "COUNT",
                count,
            )
            self._expired_from = text(reply[0])
            # Our own late renewals show up here too; what we hold is not handed out again.
            found = await self._accept([row for row in reply[1] if row and text(row[0]) not in self._held], "expired")
            if found or self._expired_from == "0-0":
                return found

    async def _new(self, count: int, block_seconds: float) -> list[Delivery]:
        arguments: list[str | int] = ["XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", count]
        if block_seconds > 0:
            arguments += ["BLOCK", max(1, int(block_seconds * 1000))]
        client = self._blocking_client if block_seconds > 0 else self._client
        reply = await execute(client, *arguments, "STREAMS", self.stream, ">")
        if not reply:
            return []
        return await self._accept(reply[0][1], "new")

    async def _accept(self, raw: Sequence[Any], source: str) -> list[Delivery]:
        """Turn raw entries into deliveries and hold them; bury what cannot be handed out."""
        rows = [(text(row[0]), row[1]) for row in raw if row and row[0] is not None]
        counts = {entry_id: 1 for entry_id, _ in rows} if source == "new" else await self._delivery_counts(rows)
        accepted = []
        for entry_id, raw_fields in rows:
            deliveries = counts.get(entry_id, 1)
            fields = fields_of(raw_fields)
            if deliveries > self._max_deliveries:
                await self._bury(entry_id, f"delivered {deliveries - 1} times and never settled", deliveries - 1)
                continue
            try:
                payload = await self._payload(fields)
            except (NotFound, BlobCorrupt, InvalidArgument) as error:
                await self._bury(entry_id, f"unreadable: {error}", deliveries)
                continue
            blob = fields.get("blob")
            accepted.append(
                Delivery(
                    self.stream,
                    entry_id,
                    payload,
                    deliveries,
                    fields["id"].decode(errors="replace"),
                    None if blob is None else blob.decode(),
                )
            )
        # Held only now: an error on the way leaves all of them unread, to be found again.
        self._held.update(delivery.entry_id for delivery in accepted)
        metrics.STREAM_DELIVERED.labels(self._label, source).inc(len(accepted))
        return accepted

    async def _delivery_counts(self, rows: Sequence[tuple[str, Any]]) -> dict[str, int]:
        if not rows:
            return {}
        async with self._client.pipeline(transaction=False) as pipe:
            for entry_id, _ in rows:
                pipe.xpending_range(self.stream, self.group, entry_id, entry_id, 1)
            pages = await pipe.execute()
        counts = {}
        for page in pages:
            for row in page:
                counts[text(row["message_id"])] = int(row["times_delivered"])
        return counts

    async def _payload(self, fields: dict[str, bytes]) -> bytes:
        if "id" not in fields:
            raise InvalidArgument("the entry has no field `id`")
        if "payload" in fields:
            return fields["payload"]
        if "blob" not in fields or "sha256" not in fields:
            raise InvalidArgument("the entry has neither `payload` nor `blob` with `sha256`")
        pointer, digest = fields["blob"].decode(errors="replace"), fields["sha256"].decode(errors="replace")
        return await self._blobs.get(pointer, digest)

    async def _bury(self, entry_id: str, reason: str, deliveries: int) -> None:
        moved = await survive(
            lambda: scripts.bury(
                self._client,
                stream=self.stream,
                dead=keys.dead(self.stream),
                group=self.group,
                entry_id=entry_id,
                reason=reason,
                deliveries=deliveries,
            ),
            client=self._client,
            seconds=self._reconnect_seconds,
        )
        self._held.discard(entry_id)
        if moved:
            metrics.STREAM_BURIED.labels(self._label).inc()
            log.error("entry buried", stream=self.stream, entry=entry_id, reason=reason, deliveries=deliveries)
