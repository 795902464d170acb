"""The job store: records, queue, events, idempotency, heartbeats and lineages, all in Redis.

Invariants:

- a job is in one state; a worker's writes carry the run they belong to, and are refused once the job was resumed
  under a newer one;
- a job that is queued has an entry on the queue: publishing is idempotent by (job, run), and is repeated for jobs
  whose submitter died between the two writes (`requeue_lost`);
- the lineage of a job only grows, and every start of a worker on it takes a new one.

Records and events of terminal jobs expire after RETENTION_SECONDS; their group streams are deleted at once.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.asyncio import Redis

from services.common import keys
from services.common.errors import FailedPrecondition, NotFound
from services.common.streams import Publisher, Target
from trainer.config import JobSpec
from trainer.records import TERMINAL, JobError, JobRecord, JobState, Progress

RETENTION_SECONDS = 30 * 86400
HEARTBEAT_SECONDS = 6.0
EVENTS_KEPT = 20_000
IDEMPOTENCY_SECONDS = 86400
IDEMPOTENCY_PENDING_SECONDS = 180
WORKERS = "workers"

# Writes fields if the record exists, is of this run ('' accepts any) and in one of these states ('' accepts any).
# Returns 1 when written, 0 when refused, -1 when there is no such job.
_WRITE_IF = """
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
local state = ',' .. redis.call('HGET', KEYS[1], 'state') .. ','
if ARGV[2] ~= '' and not string.find(ARGV[2], state, 1, true) then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""


class SupersededError(FailedPrecondition):
    """The job was resumed under a newer run (or taken back) while this worker was on it."""


@dataclass(frozen=True)
class Event:
    """One entry of a job's event stream; `id` is ordered and usable as an SSE id."""

    id: str
    type: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Ticket:
    """What the queue holds: run this job, in this run."""

    job_id: str
    run: int

    def encode(self) -> bytes:
        """As bytes for the queue."""
        return json.dumps({"job_id": self.job_id, "run": self.run}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Ticket:
        """From the queue; raises ValueError or KeyError on something else."""
        fields = json.loads(payload)
        return cls(str(fields["job_id"]), int(fields["run"]))


@dataclass(frozen=True)
class Reservation:
    """What an idempotency key stands for: `new` was reserved now; `done` carries the first answer."""

    status: Literal["new", "done", "pending", "conflict"]
    answer: dict[str, Any] | None = None


def new_job_id() -> str:
    """A fresh id, safe in paths, keys and URLs."""
    return f"job-{secrets.token_hex(6)}"


class JobStore:
    """Everything the API and the worker do to jobs. Errors: NotFound, FailedPrecondition, Unavailable (no Redis)."""

    def __init__(self, client: Redis, publisher: Publisher) -> None:
        self._redis: Any = client
        self._publisher = publisher

    # ---------------------------------------------------------------------------------------- records

    async def create(self, spec: JobSpec, *, job_id: str | None = None) -> JobRecord:
        """Stores a new job as queued and puts it on the queue."""
        record = JobRecord(
            id=job_id or new_job_id(),
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            created_at=time.time(),
            progress=Progress(steps=spec.steps),
        )
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.job(record.id), mapping=_encode(record.model_dump(mode="json")))
            pipe.zadd(keys.job_index(), {record.id: record.created_at})
            await pipe.execute()
        await self.add_event(record.id, "state", {"state": record.state.value})
        await self._enqueue(record)
        return record

    async def get(self, job_id: str) -> JobRecord:
        """The record; NotFound when there is none."""
        fields = await self._redis.hgetall(keys.job(job_id))
        if not fields:
            raise NotFound(f"there is no job {job_id!r}", reason="JOB_NOT_FOUND")
        return _decode(fields)

    async def page(self, *, limit: int, after: str | None = None) -> tuple[list[JobRecord], bool]:
        """Jobs, newest first, from the one after `after` on; and whether there are more."""
        start = 0
        if after is not None:
            rank = await self._redis.zrevrank(keys.job_index(), after)
            if rank is None:
                raise NotFound(f"there is no job {after!r} to list from", reason="JOB_NOT_FOUND")
            start = rank + 1
        ids = [_text(i) for i in await self._redis.zrevrange(keys.job_index(), start, start + limit)]
        records = []
        for job_id in ids[:limit]:
            fields = await self._redis.hgetall(keys.job(job_id))
            if fields:
                records.append(_decode(fields))
            else:  # its retention is over
                await self._redis.zrem(keys.job_index(), job_id)
        return records, len(ids) > limit

    async def claim(self, ticket: Ticket, worker: str) -> JobRecord | None:
        """Takes a job off the queue for `worker`: state validating. None when the ticket is of no use any more."""
        live = (JobState.QUEUED, JobState.VALIDATING, JobState.RUNNING)
        written = await self._write(
            ticket.job_id, {"state": JobState.VALIDATING, "worker": worker}, run=ticket.run, states=live
        )
        if written != 1:
            return None
        record = await self.get(ticket.job_id)
        if record.started_at is None:
            record.started_at = time.time()
            await self.update(record.id, ticket.run, started_at=record.started_at)
        await self.add_event(record.id, "state", {"state": JobState.VALIDATING.value})
        return record

    async def update(self, job_id: str, run: int, **fields: Any) -> None:
        """Writes fields of the record. Raises SupersededError when the job has a newer run, NotFound without one."""
        written = await self._write(job_id, fields, run=run)
        if written < 0:
            raise NotFound(f"there is no job {job_id!r}", reason="JOB_NOT_FOUND")
        if written == 0:
            raise SupersededError(f"job {job_id} was resumed under a newer run than {run}", reason="JOB_SUPERSEDED")

    async def start(self, job_id: str, run: int) -> None:
        """The job runs."""
        await self.update(job_id, run, state=JobState.RUNNING, error=None, finished_at=None)
        await self.add_event(job_id, "state", {"state": JobState.RUNNING.value})

    async def give_back(self, job_id: str, run: int) -> None:
        """The worker stops and the job goes on elsewhere: queued again, on the queue under a newer run."""
        fields = {"state": JobState.QUEUED, "run": run + 1, "worker": None}
        if await self._write(job_id, fields, run=run) != 1:
            raise SupersededError(f"job {job_id} was resumed under a newer run than {run}", reason="JOB_SUPERSEDED")
        await self._redis.delete(keys.heartbeat(job_id))
        await self.add_event(job_id, "state", {"state": JobState.QUEUED.value})
        await self._enqueue(await self.get(job_id))

    async def finish(self, job_id: str, run: int, state: JobState, error: JobError | None = None) -> None:
        """Ends the job: the state, then its last event, then its streams go."""
        await self.update(job_id, run, state=state, error=error, finished_at=time.time(), cancel_requested=False)
        await self._after_end(job_id, state, error)

    async def cancel(self, job_id: str) -> JobRecord:
        """Asks a running job to end; one that no worker is on ends here. A terminal job is returned as it is."""
        record = await self.get(job_id)
        if record.state.terminal:
            return record
        fields = {"state": JobState.CANCELLED, "finished_at": time.time(), "cancel_requested": False}
        states: tuple[JobState, ...] = (JobState.QUEUED,)
        if not await self.alive(job_id):
            states = (JobState.QUEUED, JobState.VALIDATING, JobState.RUNNING)
        if await self._write(job_id, fields, run=record.run, states=states) == 1:
            await self.next_lineage(job_id)
            await self._after_end(job_id, JobState.CANCELLED, None)
        else:
            live = (JobState.VALIDATING, JobState.RUNNING)
            await self._write(job_id, {"cancel_requested": True}, run=record.run, states=live)
        return await self.get(job_id)

    async def resume(self, job_id: str) -> tuple[JobRecord, bool]:
        """Queues a job again, from its last checkpoint; False for one in good health or done, which stays as it is.

        Raises FailedPrecondition for one that is being cancelled: it would end after it was said to go on.
        """
        record = await self.get(job_id)
        if record.state is JobState.SUCCEEDED:
            return record, False
        if record.state is JobState.QUEUED:
            await self._enqueue(record)
            return record, False
        if not record.state.terminal and await self.alive(job_id):
            if record.cancel_requested:
                raise FailedPrecondition(f"job {job_id} is being cancelled: resume it once it has ended, in seconds")
            return record, False
        fields = {
            "state": JobState.QUEUED,
            "run": record.run + 1,
            "error": None,
            "finished_at": None,
            "cancel_requested": False,
            "worker": None,
        }
        if await self._write(job_id, fields, run=record.run, states=(record.state,)) != 1:
            return await self.get(job_id), False  # somebody else resumed it in this moment
        for key in (keys.job(job_id), keys.events(job_id), keys.lineage(job_id)):
            await self._redis.persist(key)
        await self.add_event(job_id, "state", {"state": JobState.QUEUED.value})
        record = await self.get(job_id)
        await self._enqueue(record)
        return record, True

    async def requeue_lost(self) -> int:
        """Puts queued jobs on the queue whose entry was never written; returns how many."""
        lost = 0
        for job_id in await self._redis.zrange(keys.job_index(), 0, -1):
            fields = await self._redis.hgetall(keys.job(_text(job_id)))
            if fields and _decode(fields).state is JobState.QUEUED:
                lost += await self._enqueue(_decode(fields))
        return lost

    # ------------------------------------------------------------------------- lineage and heartbeat

    async def next_lineage(self, job_id: str) -> int:
        """A new lineage, larger than every one before: from now on nothing of an older one can be published."""
        return int(await self._redis.incr(keys.lineage(job_id)))

    async def beat(self, job_id: str, worker: str) -> None:
        """Says that `worker` is on the job, for the next HEARTBEAT_SECONDS."""
        await self._redis.set(keys.heartbeat(job_id), worker, px=int(HEARTBEAT_SECONDS * 1000))

    async def alive(self, job_id: str, *, other_than: str | None = None) -> bool:
        """Is a worker (other than this one) on the job?"""
        holder = await self._redis.get(keys.heartbeat(job_id))
        return holder is not None and (other_than is None or _text(holder) != other_than)

    async def let_go(self, job_id: str) -> None:
        """Ends the heartbeat at once."""
        await self._redis.delete(keys.heartbeat(job_id))

    # --------------------------------------------------------------------------------------- events

    async def add_event(self, job_id: str, kind: str, data: dict[str, Any]) -> str:
        """Appends to the job's events; returns the id."""
        fields = {"type": kind, "at": repr(time.time()), "data": json.dumps(data, separators=(",", ":"))}
        return _text(await self._redis.xadd(keys.events(job_id), fields, maxlen=EVENTS_KEPT, approximate=True))

    async def events(self, job_id: str, *, after: str = "0-0", limit: int = 500) -> list[Event]:
        """Events past the id `after`, oldest first."""
        entries = await self._redis.xrange(keys.events(job_id), min=f"({after}", max="+", count=limit)
        return [_event(entry_id, fields) for entry_id, fields in entries]

    # ---------------------------------------------------------------------------------- idempotency

    async def reserve(self, key: str, body: bytes) -> Reservation:
        """Takes an idempotency key for this body, or says what it stands for already."""
        name, digest = keys.idempotency(_digest(key.encode())), _digest(body)
        mine = json.dumps({"body": digest})
        if await self._redis.set(name, mine, nx=True, ex=IDEMPOTENCY_PENDING_SECONDS):
            return Reservation("new")
        held = await self._redis.get(name)
        if held is None:  # expired in this moment
            return await self.reserve(key, body)
        fields = json.loads(held)
        if fields["body"] != digest:
            return Reservation("conflict")
        return Reservation("done", fields["answer"]) if "answer" in fields else Reservation("pending")

    async def fulfil(self, key: str, body: bytes, answer: dict[str, Any]) -> None:
        """Keeps the first answer for whoever asks again."""
        value = json.dumps({"body": _digest(body), "answer": answer})
        await self._redis.set(keys.idempotency(_digest(key.encode())), value, ex=IDEMPOTENCY_SECONDS)

    async def release(self, key: str) -> None:
        """Gives the key back: the request was refused, and may be corrected and sent again."""
        await self._redis.delete(keys.idempotency(_digest(key.encode())))

    # -------------------------------------------------------------------------------------- private

    async def _write(
        self, job_id: str, fields: dict[str, Any], *, run: int | None = None, states: Iterable[JobState] = ()
    ) -> int:
        allowed = "".join(f",{state.value}" for state in states)
        flat = [part for name, value in _encode(fields).items() for part in (name, value)]
        arguments = ["" if run is None else str(run), allowed + "," if allowed else "", *flat]
        return int(await self._redis.eval(_WRITE_IF, 1, keys.job(job_id), *arguments))

    async def _enqueue(self, record: JobRecord) -> bool:
        ticket = Ticket(record.id, record.run)
        published = await self._publisher.publish(
            f"job/{record.id}/{record.run}", [Target(keys.jobs(), ticket.encode())]
        )
        return not published.duplicate

    async def _after_end(self, job_id: str, state: JobState, error: JobError | None) -> None:
        data: dict[str, Any] = {"state": state.value}
        if error is not None:
            data["error"] = error.model_dump(mode="json")
        await self.add_event(job_id, "state", data)
        await self._publisher.delete_streams(keys.groups(job_id), keys.evals(job_id))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.heartbeat(job_id))
            for key in (keys.job(job_id), keys.events(job_id), keys.lineage(job_id)):
                pipe.expire(key, RETENTION_SECONDS)
            await pipe.execute()


def _encode(fields: dict[str, Any]) -> dict[str, str]:
    plain = {n: v.model_dump(mode="json") if isinstance(v, JobError | Progress) else v for n, v in fields.items()}
    # run and state are compared inside the script, so they are stored bare; everything else is JSON.
    return {n: str(v) if n in ("run", "state") else json.dumps(v) for n, v in plain.items()}


def _decode(fields: dict[Any, Any]) -> JobRecord:
    named = {_text(name): _text(value) for name, value in fields.items()}
    return JobRecord.model_validate({n: v if n in ("run", "state") else json.loads(v) for n, v in named.items()})


def _event(entry_id: Any, fields: dict[Any, Any]) -> Event:
    named = {_text(name): _text(value) for name, value in fields.items()}
    data = cast("dict[str, Any]", json.loads(named["data"]))
    return Event(_text(entry_id), named["type"], {**data, "at": float(named["at"])})


def _digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_terminal_event(event: Event) -> bool:
    """True for the event that ends a run of the job."""
    return event.type == "state" and event.data.get("state") in TERMINAL
