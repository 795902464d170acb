"""Which blobs the entries of streams point to."""

from collections.abc import Sequence

from redis.asyncio import Redis

from services.common import keys
from services.common.redis_client import execute
from services.common.stream_entries import fields_of, text


async def referenced_blobs(client: Redis, streams: Sequence[str]) -> set[str]:
    """Return the pointers that entries of these streams, and of their dead streams, hold: what a sweep must keep."""
    pointers = set()
    for stream in [*streams, *map(keys.dead, streams)]:
        start = "-"
        while True:
            page = await execute(client, "XRANGE", stream, start, "+", "COUNT", 100)
            for row in page:
                blob = fields_of(row[1]).get("blob")
                if blob is not None:
                    pointers.add(blob.decode())
            if len(page) < 100:
                break
            start = f"({text(page[-1][0])}"
    return pointers
