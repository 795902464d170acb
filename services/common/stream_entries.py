"""What goes into a stream and what comes out of it, as plain values, and how Redis says it."""

from dataclasses import dataclass
from typing import Any

import redis.exceptions


@dataclass(frozen=True)
class Target:
    """One stream that an entry goes to, and what it carries there."""

    stream: str
    payload: bytes


@dataclass(frozen=True)
class Fence:
    """Refuses a publication as stale when the integer at `key` is larger than `lineage`."""

    key: str
    lineage: int


@dataclass(frozen=True)
class Published:
    """What became of a publication. `entry_ids` has one id a target: those of the first publication for a duplicate."""

    duplicate: bool
    stale: bool
    entry_ids: tuple[str, ...]


@dataclass(frozen=True)
class Delivery:
    """One entry handed to this consumer.

    `entry_id` is the stream's id, `key` the publisher's; `deliveries` counts from 1; `blob` points to a large payload.
    """

    stream: str
    entry_id: str
    payload: bytes
    deliveries: int
    key: str = ""
    blob: str | None = None


@dataclass(frozen=True)
class Depth:
    """Entries in a stream: all, never delivered, delivered and not settled."""

    length: int
    undelivered: int
    pending: int


def group_lost(error: redis.exceptions.ResponseError) -> bool:
    """Say whether an error means that the stream or its group is gone."""
    # UNBLOCKED and "no longer exists": the stream was deleted under a waiting read.
    message = str(error)
    return any(sign in message for sign in ("NOGROUP", "UNBLOCKED", "no longer exists", "no such key"))


def text(value: Any) -> str:
    """Return a reply as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def fields_of(raw: Any) -> dict[str, bytes]:
    """Return the fields of an entry, in whichever form the library hands them out."""
    if isinstance(raw, dict):
        return {text(key): value for key, value in raw.items()}
    return {text(key): value for key, value in zip(raw[::2], raw[1::2], strict=True)} if raw else {}


def pending_count(reply: Any) -> int:
    """Return the number of pending entries from the short form of XPENDING."""
    return int(reply["pending"] if isinstance(reply, dict) else reply[0])
