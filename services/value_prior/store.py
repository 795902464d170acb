"""Contexts in Redis, so that what was acknowledged outlives the process.

One hash a policy: field ``r:<outcome id>`` holds ``<arrival>:<row as JSON>``, or ``<arrival>:`` once the row was
evicted and only its id is remembered; field ``fence`` holds the lineage below which outcomes are refused. Every change
is one script, so it is there whole or not at all, and repeating it does no harm. The hash lives `ttl_seconds` after
its last change.

One process owns all contexts, because it decides from memory what is new. Each start takes a higher ownership number,
and the script refuses to write for a lower one: a process that was thought dead cannot overwrite its successor's work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis.exceptions
from redis.asyncio import Redis

from services.common import keys
from services.common.errors import FailedPrecondition, Internal
from services.common.redis_client import execute, survive
from services.value_prior.context import Change, PolicyContext, decode_row, encode_row
from services.value_prior.records import Outcome

_ROW = b"r:"
_FENCE = b"fence"
RECENT_POLICIES = 64

# KEYS: owner number, the policy's hash, recent policies.
# ARGV: my number, policy, ttl (s), replace (0/1), fence, now (s), policies to keep in "recent",
#       count of sets, field/value pairs ..., fields to delete ...
_SAVE = """
local owner = tonumber(redis.call('GET', KEYS[1]) or '0')
if owner > tonumber(ARGV[1]) then return 0 end
if owner < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
if ARGV[4] == '1' then redis.call('DEL', KEYS[2]) end
redis.call('HSET', KEYS[2], 'fence', ARGV[5])
local sets = tonumber(ARGV[8])
for i = 9, 8 + 2 * sets, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
for i = 9 + 2 * sets, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -(tonumber(ARGV[7]) + 1))
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 1
"""


def context_key(policy_id: str) -> str:
    """Hash with the context of a policy; has a time to live."""
    return f"{keys.NAMESPACE}:prior:context:{policy_id}"


def recent_key() -> str:
    """Sorted set of the policies that changed last, by time; has a time to live."""
    return f"{keys.NAMESPACE}:prior:recent"


def owner_key() -> str:
    """Integer: the ownership number of the newest value prior process. One key for ever."""
    return f"{keys.NAMESPACE}:prior:owner"


class RedisContextStore:
    """`ContextStore` on Redis. Call `open` before anything else."""

    def __init__(self, client: Redis, *, capacity: int, ttl_seconds: int, patience_seconds: float = 5.0) -> None:
        self._client = client
        self._capacity = capacity
        self._ttl_seconds = ttl_seconds
        self._patience = patience_seconds
        self._number = 0

    async def open(self) -> None:
        """Takes over the contexts from any process before this one."""
        self._number = int(
            await survive(
                lambda: execute(self._client, "INCR", owner_key()), client=self._client, seconds=self._patience
            )
        )

    async def recent(self) -> list[str]:
        """Policies that changed last, newest first, at most 64."""
        found: Sequence[bytes] = await survive(
            lambda: execute(self._client, "ZREVRANGE", recent_key(), 0, -1), client=self._client, seconds=self._patience
        )
        return [policy_id.decode() for policy_id in found]

    async def load(self, policy_id: str) -> PolicyContext:
        """See `ContextStore`. Raises `Internal` when the hash holds what this service did not write."""
        flat: Sequence[bytes] = await survive(
            lambda: execute(self._client, "HGETALL", context_key(policy_id)),
            client=self._client,
            seconds=self._patience,
        )
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        fence = 0
        rows: list[tuple[int, Outcome]] = []
        gone: dict[str, int] = {}
        for name, value in pairs:
            if name == _FENCE:
                fence = int(value)
                continue
            try:
                number, _, data = value.partition(b":")
                if data:
                    rows.append((int(number), decode_row(data, policy_id)))
                else:
                    gone[name.removeprefix(_ROW).decode()] = int(number)
            except (ValueError, KeyError, TypeError) as error:
                raise Internal(
                    f"the stored context of policy {policy_id!r} is damaged at field {name!r}: {error!r}; "
                    "restore the policy from a snapshot, or an empty one to begin anew",
                    key=context_key(policy_id),
                ) from error
        return PolicyContext.of(self._capacity, rows, fence=fence, gone=gone)

    async def save(self, policy_id: str, change: Change) -> None:
        """See `ContextStore`. `FailedPrecondition` when another process took over, `Unavailable` without Redis."""
        sets: list[bytes] = []
        for number, row in change.added:
            sets += [_ROW + row.outcome_id.encode(), b"%d:" % number + encode_row(row)]
        for number, outcome_id in change.evicted:
            sets += [_ROW + outcome_id.encode(), b"%d:" % number]
        arguments: list[str | bytes | int | float] = [self._number, policy_id, self._ttl_seconds]
        arguments += [int(change.replace), change.fence, time.time(), RECENT_POLICIES, len(sets) // 2]
        arguments += sets
        arguments += [_ROW + outcome_id.encode() for outcome_id in change.forgotten]
        try:
            done = await survive(
                lambda: execute(
                    self._client, "EVAL", _SAVE, 3, owner_key(), context_key(policy_id), recent_key(), *arguments
                ),
                client=self._client,
                seconds=self._patience,
            )
        except redis.exceptions.ResponseError as error:
            raise FailedPrecondition(f"Redis refused to store outcomes: {error}", reason="REDIS_REFUSED") from error
        if not done:
            raise FailedPrecondition(
                "another value prior process took over the contexts; this one must not write any more",
                reason="TAKEN_OVER",
            )
