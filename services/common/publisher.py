"""Publishing to streams: all targets or none, each id once."""

import hashlib
import uuid
from collections.abc import Sequence

import redis.exceptions
from redis.asyncio import Redis

from services.common import keys, scripts
from services.common import telemetry as metrics
from services.common.blob_references import referenced_blobs
from services.common.blobs import BLOB_THRESHOLD_BYTES, BlobStore
from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.logging import get_logger
from services.common.redis_client import execute, survive, url_of
from services.common.stream_entries import Fence, Published, Target

log = get_logger("rollwise.streams")


class Publisher:
    """Writes entries, each id once.

    Args:
        client: Not a blocking one.
        blobs: For payloads over 1 MiB.
        seen_ttl_seconds: How long an id is remembered.
        reconnect_seconds: How long a publication outlives a server that does not answer.
    """

    def __init__(
        self, client: Redis, blobs: BlobStore, *, seen_ttl_seconds: int = 86400, reconnect_seconds: float = 30.0
    ) -> None:
        self._client = client
        self._blobs = blobs
        self._seen_ttl_seconds = seen_ttl_seconds
        self._reconnect_seconds = reconnect_seconds

    async def publish(
        self, entry_id: str, targets: Sequence[Target], *, fence: Fence | None = None, cap: int | None = None
    ) -> Published:
        """Write one entry to all targets or to none.

        An id counts as seen for the first target's stream, so a prompt and its group may share one.

        Args:
            entry_id: The same for every try to publish the same thing.
            targets: At least one; each stream once.
            fence: Discards what an older lineage still publishes.
            cap: Refuse when a target has this many undelivered entries.

        Raises:
            ResourceExhausted: a target is full (reason BUSY), or Redis itself is (REDIS_FULL).
            Unavailable: Redis does not answer; publishing the same id again is safe.
            InvalidArgument: no target, a stream twice, or an empty id.
        """
        names = [target.stream for target in targets]
        if not entry_id or not names or len(set(names)) != len(names):
            raise InvalidArgument(f"cannot publish {entry_id!r} to {names}: an id and distinct streams are needed")
        streams, pointers = await self._encode(entry_id, targets)
        token = uuid.uuid4().hex
        # When Redis stays away it is not known whether the entry is there, so its blobs stay; a sweep finds orphans.
        try:
            answer = await survive(
                lambda: scripts.publish(
                    self._client,
                    seen_key=keys.seen(names[0], entry_id),
                    token=token,
                    ttl_seconds=self._seen_ttl_seconds,
                    streams=streams,
                    fence=None if fence is None else (fence.key, fence.lineage),
                    cap=cap,
                ),
                client=self._client,
                seconds=self._reconnect_seconds,
            )
        except redis.exceptions.OutOfMemoryError as error:
            await self._discard(pointers)
            raise ResourceExhausted(
                f"Redis at {url_of(self._client)} is full ({error}); raise its maxmemory or let consumers catch up",
                reason="REDIS_FULL",
            ) from error
        if answer.outcome != "written":
            await self._discard(pointers)
        label = metrics.stream_label(names[0])
        if answer.outcome == "busy":
            metrics.STREAM_BUSY.labels(label).inc()
            raise ResourceExhausted(
                f"stream {answer.full_stream} has {answer.waiting} undelivered entries, the cap is {cap}; "
                "try again when its consumers caught up",
                stream=answer.full_stream,
            )
        if answer.outcome == "stale":
            metrics.STREAM_STALE.labels(label).inc()
            log.warning("publication of an older lineage discarded", stream=names[0], id=entry_id)
        elif answer.outcome == "duplicate":
            metrics.STREAM_DUPLICATES.labels(label).inc()
        else:
            for name in names:
                metrics.STREAM_PUBLISHED.labels(metrics.stream_label(name)).inc()
        return Published(answer.outcome == "duplicate", answer.outcome == "stale", answer.entry_ids)

    async def _encode(
        self, entry_id: str, targets: Sequence[Target]
    ) -> tuple[list[tuple[str, list[tuple[str, str | bytes]]]], list[str]]:
        """Return each stream with the fields of its entry, and the pointers of the blobs written for them."""
        streams: list[tuple[str, list[tuple[str, str | bytes]]]] = []
        pointers: list[str] = []
        for target in targets:
            fields: list[tuple[str, str | bytes]] = [("id", entry_id)]
            if len(target.payload) > BLOB_THRESHOLD_BYTES:
                pointers.append(await self._blobs.put(target.payload))
                fields += [("blob", pointers[-1]), ("sha256", hashlib.sha256(target.payload).hexdigest())]
            else:
                fields.append(("payload", target.payload))
            streams.append((target.stream, fields))
        return streams, pointers

    async def _discard(self, pointers: Sequence[str]) -> None:
        for pointer in pointers:
            await self._blobs.delete(pointer)

    async def delete_streams(self, *streams: str) -> None:
        """Delete streams that nobody needs any more, with their dead streams and the large payloads of what was left.

        Raises:
            Unavailable: Redis does not answer; deleting again is safe.
        """
        pointers = await survive(
            lambda: referenced_blobs(self._client, streams), client=self._client, seconds=self._reconnect_seconds
        )
        names = [*streams, *map(keys.dead, streams)]
        await survive(
            lambda: execute(self._client, "DEL", *names), client=self._client, seconds=self._reconnect_seconds
        )
        for pointer in pointers:
            await self._blobs.delete(pointer)
