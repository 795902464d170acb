"""Redis Streams as the queue of Rollwise: nothing acknowledged is lost, and nothing counts twice.

An entry carries its id and its payload, or a pointer to the payload in the blob store with its SHA-256. A publisher
writes to all streams that must agree in one step; a consumer holds what it was handed under a lease that it renews, and
either settles it, or loses it to another consumer when it dies, or buries it.
"""

from collections.abc import Sequence

from redis.asyncio import Redis

from services.common import keys
from services.common.consumer import StreamConsumer
from services.common.publisher import Publisher
from services.common.redis_client import execute
from services.common.stream_entries import Delivery, Depth, Fence, Published, Target, fields_of, text

__all__ = [
    "Delivery",
    "Depth",
    "Fence",
    "Published",
    "Publisher",
    "StreamConsumer",
    "Target",
    "referenced_blobs",
]


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
