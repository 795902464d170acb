"""The Lua scripts of the streams, as typed functions. Redis 7.0 command subset; also Valkey.

Each runs as one step: no other command, and no crash of a client, comes between its parts. Each may be run twice with
the same arguments without harm, so a lost reply is answered by running it again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from services.common.redis_client import execute

# KEYS: seen, then (fence) when ARGV[3] is not empty, then the streams.
# ARGV: token, ttl seconds, lineage or "", cap or "", then for each stream: number of its arguments, those arguments.
_PUBLISH = """
local first = 2
if ARGV[3] ~= '' then
  local current = redis.call('GET', KEYS[2])
  if current and tonumber(current) > tonumber(ARGV[3]) then return {'stale'} end
  first = 3
end
local seen = redis.call('HGETALL', KEYS[1])
if #seen > 0 then
  local record = {}
  for i = 1, #seen, 2 do record[seen[i]] = seen[i + 1] end
  local answer = {record['token'] == ARGV[1] and 'written' or 'duplicate'}
  for i = 1, tonumber(record['n']) do answer[i + 1] = record[tostring(i)] end
  return answer
end
if ARGV[4] ~= '' then
  for k = first, #KEYS do
    local waiting = redis.call('XLEN', KEYS[k])
    if waiting > 0 then
      local groups = redis.call('XINFO', 'GROUPS', KEYS[k])
      local least = nil
      for _, group in ipairs(groups) do
        for i = 1, #group, 2 do
          if group[i] == 'pending' and (least == nil or group[i + 1] < least) then least = group[i + 1] end
        end
      end
      waiting = waiting - (least or 0)
    end
    if waiting >= tonumber(ARGV[4]) then return {'busy', KEYS[k], tostring(waiting)} end
  end
end
local answer = {'written'}
local at = 5
local record = {'token', ARGV[1], 'n', tostring(#KEYS - first + 1)}
for k = first, #KEYS do
  local count = tonumber(ARGV[at])
  local fields = {}
  for i = 1, count do fields[i] = ARGV[at + i] end
  at = at + count + 1
  local id = redis.call('XADD', KEYS[k], '*', unpack(fields))
  answer[#answer + 1] = id
  record[#record + 1] = tostring(k - first + 1)
  record[#record + 1] = id
end
redis.call('HSET', KEYS[1], unpack(record))
redis.call('EXPIRE', KEYS[1], ARGV[2])
return answer
"""

# KEYS: stream. ARGV: group, consumer, ids. Renews only what this consumer still owns; returns the ids it does not.
_RENEW = """
local lost = {}
for i = 3, #ARGV do
  local own = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #own == 0 then
    lost[#lost + 1] = ARGV[i]
  else
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', 0, 'JUSTID')
  end
end
return lost
"""

# KEYS: stream, dead stream. ARGV: group, id, reason, deliveries. Returns 1 when it moved the entry, 0 when it was gone.
_BURY = """
local found = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if #found == 0 then return 0 end
local fields = found[1][2]
local extra = {'dead_reason', ARGV[3], 'dead_stream', KEYS[1], 'dead_entry', ARGV[2], 'dead_deliveries', ARGV[4]}
for i = 1, #extra do fields[#fields + 1] = extra[i] end
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""


@dataclass(frozen=True)
class PublishAnswer:
    """What the publish script did: outcome is written, duplicate, stale or busy."""

    outcome: str
    entry_ids: tuple[str, ...] = ()
    full_stream: str = ""
    waiting: int = 0


class Script:
    """A script, run by its hash and sent whole only to a server that does not know it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._sha = ""

    async def run(self, client: Redis, keys: Sequence[str], arguments: Sequence[str | bytes | int]) -> Any:
        """Run it and return the raw reply."""
        if self._sha:
            try:
                return await execute(client, "EVALSHA", self._sha, len(keys), *keys, *arguments)
            except NoScriptError:
                pass  # the server restarted or was flushed
        self._sha = hashlib.sha1(self._source.encode(), usedforsecurity=False).hexdigest()
        return await execute(client, "EVAL", self._source, len(keys), *keys, *arguments)


_publish, _renew, _bury = Script(_PUBLISH), Script(_RENEW), Script(_BURY)


async def publish(
    client: Redis,
    *,
    seen_key: str,
    token: str,
    ttl_seconds: int,
    streams: Sequence[tuple[str, Sequence[tuple[str, str | bytes]]]],
    fence: tuple[str, int] | None,
    cap: int | None,
) -> PublishAnswer:
    """Write one entry to every stream, unless it is stale, was seen, or a stream is full.

    Args:
        client: Connection.
        seen_key: Remembers the entry's ids for `ttl_seconds`.
        token: Names this publication; running it again with the same token answers "written" with the first ids.
        ttl_seconds: How long to remember.
        streams: For each stream its key and the entry's fields.
        fence: Key and lineage; stale when the integer at the key is larger.
        cap: Refuse when a stream has this many entries that no consumer has had.
    """
    keys = [seen_key, *([fence[0]] if fence else []), *(stream for stream, _ in streams)]
    arguments: list[str | bytes | int] = [
        token,
        ttl_seconds,
        "" if fence is None else fence[1],
        "" if cap is None else cap,
    ]
    for _, fields in streams:
        arguments.append(2 * len(fields))
        for name, value in fields:
            arguments += [name, value]
    reply = await _publish.run(client, keys, arguments)
    outcome, *rest = [part.decode() for part in reply]
    if outcome == "busy":
        return PublishAnswer(outcome, full_stream=rest[0], waiting=int(rest[1]))
    return PublishAnswer(outcome, entry_ids=tuple(rest))


async def renew(client: Redis, *, stream: str, group: str, consumer: str, ids: Sequence[str]) -> list[str]:
    """Start the lease of entries anew, without counting a delivery; return those the consumer does not own any more."""
    reply = await _renew.run(client, [stream], [group, consumer, *ids])
    return [part.decode() for part in reply]


async def bury(
    client: Redis, *, stream: str, dead: str, group: str, entry_id: str, reason: str, deliveries: int
) -> bool:
    """Move an entry, with all its fields, to the dead stream; False when somebody did that already."""
    return bool(await _bury.run(client, [stream, dead], [group, entry_id, reason, deliveries]))
