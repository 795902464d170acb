"""Redis Streams as the queue of Rollwise: nothing acknowledged is lost, and nothing counts twice.

An entry carries its id and its payload, or a pointer to the payload in the blob store with its SHA-256. A publisher
writes to all streams that must agree in one step; a consumer holds what it was handed under a lease that it renews, and
either settles it, or loses it to another consumer when it dies, or buries it.
"""

from services.common.blob_references import referenced_blobs
from services.common.consumer import StreamConsumer
from services.common.publisher import Publisher
from services.common.stream_entries import Delivery, Depth, Fence, Published, Target

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
