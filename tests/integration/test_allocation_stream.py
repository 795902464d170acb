"""The stream worker on a real Valkey, with the other services behind real sockets; also as a process that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from allocation_doubles import Doubles, doubles, fixed, prompt, until
from redis.asyncio import Redis
from rollwise.v1 import allocator_pb2, common_pb2, value_prior_pb2

from services.allocator.allocator import Allocator
from services.allocator.clients import ports
from services.allocator.worker import GROUP, StreamWorker
from services.common import keys
from services.common.blobs import FolderBlobStore
from services.common.redis_client import execute
from services.common.streams import Publisher, StreamConsumer, Target

Clients = tuple[Redis, Redis]


@pytest.fixture
async def world() -> AsyncIterator[Doubles]:
    async with doubles() as running:
        yield running


class Queue:
    """The trainer's side of the streams."""

    def __init__(self, client: Redis, blobs: FolderBlobStore) -> None:
        self.client = client
        self.publisher = Publisher(client, blobs)

    async def submit(self, *entries: allocator_pb2.PromptEntry) -> None:
        for entry in entries:
            name = f"{entry.key.prompt_id}/{entry.key.lineage}"
            await self.publisher.publish(name, [Target(keys.prompts(), entry.SerializeToString())])

    async def _payloads(self, stream: str) -> list[bytes]:
        rows = await execute(self.client, "XRANGE", stream, "-", "+")
        found = []
        for row in rows:
            fields = dict(zip(row[1][::2], row[1][1::2], strict=True)) if isinstance(row[1], list) else row[1]
            found.append({(k.decode() if isinstance(k, bytes) else k): v for k, v in fields.items()}["payload"])
        return found

    async def groups(self, stream: str = "") -> list[allocator_pb2.ScoredGroup]:
        payloads = await self._payloads(stream or keys.groups("job"))
        return [allocator_pb2.ScoredGroup.FromString(p) for p in payloads]

    async def outcomes(self) -> list[value_prior_pb2.Outcome]:
        return [value_prior_pb2.Outcome.FromString(p) for p in await self._payloads(keys.outcomes())]

    async def length(self, stream: str) -> int:
        return int(await execute(self.client, "XLEN", stream))

    async def until_empty(self, seconds: float = 20) -> None:
        """Until every prompt is settled or buried."""
        async with asyncio.timeout(seconds):
            while await self.length(keys.prompts()):
                await asyncio.sleep(0.02)


@pytest.fixture
def queue(redis_clients: Clients, blobs: FolderBlobStore) -> Queue:
    return Queue(redis_clients[0], blobs)


@asynccontextmanager
async def working(
    world: Doubles, clients: Clients, blobs: FolderBlobStore, *, consumer: str = "a0", **options: Any
) -> AsyncIterator[StreamWorker]:
    """A worker in this process; leaving it is a crash (nothing is handed back) unless the test drained it."""
    lease = options.pop("lease_seconds", 30)
    reader = StreamConsumer(
        clients[0], clients[1], blobs,
        stream=keys.prompts(), group=GROUP, consumer=consumer, lease_seconds=lease, max_deliveries=8,
    )  # fmt: skip
    allocator = Allocator(ports(*(world.channels[name] for name in ("value_prior", "generation", "verifier"))))
    options = {"max_groups": 64, "max_deliveries": 3} | options
    worker = StreamWorker(allocator, reader, Publisher(clients[0], blobs), clients[0], **options)
    tasks = [asyncio.create_task(t) for t in (worker.run(), worker.watch_lineages(), reader.run_leases())]
    try:
        yield worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.drain(0)


async def test_every_prompt_yields_one_group_and_one_outcome(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await queue.submit(*(prompt(f"p{i}") for i in range(12)))
    async with working(world, redis_clients, blobs):
        await queue.until_empty()
    groups, outcomes = await queue.groups(), await queue.outcomes()
    assert sorted(g.key.prompt_id for g in groups) == sorted(f"p{i}" for i in range(12))
    assert {o.outcome_id for o in outcomes} == {f"job/1/2/p{i}/0/train" for i in range(12)}
    assert {(o.trials, o.successes, o.predicted, o.policy_version) for o in outcomes} == {(4, 2.0, 0.5, 3)}
    assert len(world.prior.requests) == 12


async def test_evaluations_and_filtered_groups_teach_the_prior_nothing(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    evaluation = prompt("eval", kind=common_pb2.PROMPT_KIND_EVAL, budget=fixed(1))
    evaluation.want_prior = False
    unjudgeable = prompt("odd", budget=fixed(2))
    malformed = prompt("bad")
    malformed.budget.osla.k_max = 1
    world.generation.says = lambda index: "?"
    async with working(world, redis_clients, blobs):
        await queue.submit(unjudgeable, malformed)
        await queue.until_empty()
        world.generation.says = lambda index: "right"
        await queue.submit(evaluation)
        await queue.until_empty()
    causes = {g.key.prompt_id: g.cause for g in await queue.groups()}
    assert causes == {"odd": allocator_pb2.FILTER_CAUSE_NO_VERDICT, "bad": allocator_pb2.FILTER_CAUSE_FAULT}
    assert [g.key.prompt_id for g in await queue.groups(keys.evals("job"))] == ["eval"]
    assert await queue.outcomes() == []


async def test_groups_are_made_side_by_side_up_to_the_setting(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    world.generation.seconds = 0.1
    await queue.submit(*(prompt(f"p{i}") for i in range(9)))
    async with working(world, redis_clients, blobs, max_groups=3):
        await queue.until_empty()
    assert world.generation.most_running == 3
    assert len(await queue.groups()) == 9


async def test_a_crashed_workers_prompts_come_again_and_count_once(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await queue.submit(*(prompt(f"p{i}") for i in range(4)))
    world.generation.stuck = lambda request: len(world.generation.requests) > 2
    async with working(world, redis_clients, blobs):
        await until(lambda: len(world.generation.requests) >= 4)
    world.generation.stuck = lambda request: False
    async with working(world, redis_clients, blobs):
        await queue.until_empty()
    assert sorted(g.key.prompt_id for g in await queue.groups()) == ["p0", "p1", "p2", "p3"]
    assert len(await queue.outcomes()) == 4


async def test_a_group_published_by_two_workers_counts_once(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    # The first worker holds the prompt without renewing its lease, as a paused process does.
    first = len(world.generation.requests)
    await queue.submit(prompt())
    world.generation.stuck = lambda request: len(world.generation.requests) == first + 1
    async with working(world, redis_clients, blobs, consumer="a0"):
        await until(lambda: world.generation.running)
        async with working(world, redis_clients, blobs, consumer="a1", lease_seconds=0.2):
            await queue.until_empty()
        assert len(await queue.groups()) == 1
        await world.stop("generation")  # breaks the held call, which is then tried again and succeeds
        await world.serve("generation")
        await until(lambda: len(world.generation.requests) == first + 3)
        await asyncio.sleep(0.3)
    assert len(await queue.groups()) == 1
    assert len(await queue.outcomes()) == 1


async def test_a_stale_lineage_is_given_up_before_and_during_its_group_and_publishes_nothing(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await execute(queue.client, "SET", keys.lineage("job"), 2)
    await queue.submit(prompt("old", lineage=1))
    async with working(world, redis_clients, blobs):
        await queue.until_empty()
        assert not world.generation.requests
        world.generation.stuck = lambda request: True
        await queue.submit(prompt("current", lineage=2))
        await until(lambda: world.generation.running)
        await execute(queue.client, "SET", keys.lineage("job"), 3)
        await queue.until_empty(5)
        await until(lambda: not world.generation.running)
    assert await queue.groups() == []
    assert await queue.outcomes() == []


async def test_a_prompt_that_kills_its_worker_again_and_again_is_closed_and_buried(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await queue.submit(prompt("poison"))
    world.generation.stuck = lambda request: True
    for attempt in range(3):
        async with working(world, redis_clients, blobs, max_deliveries=3):
            await until(lambda n=attempt: len(world.generation.requests) > n)  # type: ignore[misc]
    async with working(world, redis_clients, blobs, max_deliveries=3):
        await queue.until_empty()
    [group] = await queue.groups()
    assert (group.state, group.cause) == (allocator_pb2.GROUP_STATE_FILTERED, allocator_pb2.FILTER_CAUSE_FAULT)
    assert "handed out 4 times" in group.cause_detail
    assert await queue.length(keys.dead(keys.prompts())) == 1


async def test_an_unreadable_entry_is_buried_and_holds_nothing_up(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await queue.publisher.publish("junk", [Target(keys.prompts(), b"\xff\xff\xff")])
    nameless = prompt("nameless")
    nameless.key.job_id = ""
    await queue.submit(nameless, prompt("good"))
    async with working(world, redis_clients, blobs):
        await queue.until_empty()
    assert [g.key.prompt_id for g in await queue.groups()] == ["good"]
    assert await queue.length(keys.dead(keys.prompts())) == 2


async def test_draining_ends_running_groups_and_takes_no_new_ones(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    world.generation.seconds = 0.3
    await queue.submit(prompt("running"))
    async with working(world, redis_clients, blobs) as worker:
        await until(lambda: world.generation.running)
        await worker.drain(5)
        await queue.submit(prompt("late"))
        await asyncio.sleep(0.3)
    assert [g.key.prompt_id for g in await queue.groups()] == ["running"]
    assert await queue.length(keys.prompts()) == 1


async def test_a_group_waits_for_room_to_be_published(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore, queue: Queue
) -> None:
    await queue.submit(prompt())
    world.generation.seconds = 0.2
    try:
        async with working(world, redis_clients, blobs):
            await until(lambda: world.generation.running)
            await execute(queue.client, "CONFIG", "SET", "maxmemory", 1)
            await until(lambda: world.verifier.judged)
            await asyncio.sleep(0.8)
            assert (await queue.length(keys.prompts()), await queue.groups()) == (1, [])
            await execute(queue.client, "CONFIG", "SET", "maxmemory", 0)
            await queue.until_empty()
    finally:
        await execute(queue.client, "CONFIG", "SET", "maxmemory", 0)
    assert len(await queue.groups()) == 1
    assert len(await queue.outcomes()) == 1
    assert len(world.generation.requests) == 1


class Process:
    """`python -m services.allocator`."""

    def __init__(self, world: Doubles, redis_url: str, folder: Path) -> None:
        self.ready = folder / "ready.json"
        self.command = [
            sys.executable, "-m", "services.allocator", "--port", "0", "--metrics-port", "0",
            "--redis-url", redis_url, "--state-dir", str(folder), "--ready-file", str(self.ready),
            "--grace-seconds", "2", "--lease-seconds", "5",
        ]  # fmt: skip
        for name, target in world.targets.items():
            self.command += [f"--{name.replace('_', '-')}-target", target]

    async def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLWISE_")}
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL, env=environment)
        await until(lambda: self.ready.exists() or self.process.poll() is not None, 30)
        assert self.process.poll() is None, "the allocator ended at start"

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 20)


async def test_a_process_killed_in_mid_group_loses_and_doubles_nothing(
    world: Doubles, redis_clients: Clients, redis_url: str, tmp_path: Path, queue: Queue
) -> None:
    process = Process(world, redis_url, tmp_path)
    world.generation.seconds = 0.05
    world.prior.value = 0.95
    await queue.submit(*(prompt(f"p{i}", deadline_seconds=60) for i in range(20)))
    await process.start()
    try:
        await until(lambda: len(world.generation.requests) > 40, 20)
        await process.end(signal.SIGKILL)
        await process.start()
        assert json.loads(process.ready.read_text())["metrics_port"] > 0
        await queue.until_empty(30)
        assert await process.end(signal.SIGTERM) == 0
    finally:
        process.process.kill()
    groups = await queue.groups()
    assert sorted(g.key.prompt_id for g in groups) == sorted(f"p{i}" for i in range(20))
    assert {g.state for g in groups} == {allocator_pb2.GROUP_STATE_COMPLETE}
    assert all([r.index for r in g.rollouts] == list(range(len(g.rollouts))) for g in groups)
    assert len(await queue.outcomes()) == 20
