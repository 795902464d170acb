"""The stream worker when things die around it: workers at random, its process in mid-group, its Redis, its job."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from allocation_doubles import Doubles, doubles, prompt, until
from redis.asyncio import Redis
from rollwise.v1 import allocator_pb2, value_prior_pb2

from services.allocator import metrics
from services.allocator.allocator import Allocator
from services.allocator.clients import ports
from services.allocator.worker import GROUP, StreamWorker
from services.common import keys
from services.common.blobs import FolderBlobStore
from services.common.redis_client import connect, execute
from services.common.streams import Publisher, StreamConsumer, Target

Clients = tuple[Redis, Redis]


@pytest.fixture
async def world() -> AsyncIterator[Doubles]:
    async with doubles() as running:
        yield running


async def submit(client: Redis, blobs: FolderBlobStore, *entries: allocator_pb2.PromptEntry) -> None:
    publisher = Publisher(client, blobs)
    for entry in entries:
        name = f"{entry.key.job_id}/{entry.key.prompt_id}"
        await publisher.publish(name, [Target(keys.prompts(), entry.SerializeToString())])


async def length(client: Redis, stream: str) -> int:
    return int(await execute(client, "XLEN", stream))


async def until_empty(client: Redis, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while await length(client, keys.prompts()):
            await asyncio.sleep(0.02)


async def check_accounts(client: Redis, blobs: FolderBlobStore, names: list[str], job: str = "job") -> None:
    """One complete group and one outcome a prompt, and the two say the same."""
    messages: dict[str, list[bytes]] = {}
    for stream in (keys.groups(job), keys.outcomes()):
        reader = StreamConsumer(client, client, blobs, stream=stream, group="check", consumer="check")
        found = await reader.read(count=1000, block_seconds=0)
        messages[stream] = [delivery.payload for delivery in found]
    groups = [allocator_pb2.ScoredGroup.FromString(p) for p in messages[keys.groups(job)]]
    outcomes = [value_prior_pb2.Outcome.FromString(p) for p in messages[keys.outcomes()]]
    assert sorted(group.key.prompt_id for group in groups) == sorted(names)
    assert {group.state for group in groups} == {allocator_pb2.GROUP_STATE_COMPLETE}
    for group in groups:
        indexes = sorted(rollout.index for rollout in [*group.rollouts, *group.unjudged])
        assert indexes == list(range(len(indexes)))
    told = {o.prompt_id: (o.trials, o.successes) for o in outcomes}
    assert len(outcomes) == len(groups)
    assert told == {g.key.prompt_id: (len(g.rollouts), sum(r.verdict.score for r in g.rollouts)) for g in groups}


@asynccontextmanager
async def working(
    world: Doubles, clients: Clients, blobs: FolderBlobStore, *, consumer: str, lease_seconds: float = 30
) -> AsyncIterator[StreamWorker]:
    """A worker in this process; leaving it is a crash: nothing is settled, published or handed back."""
    reader = StreamConsumer(
        clients[0], clients[1], blobs,
        stream=keys.prompts(), group=GROUP, consumer=consumer, lease_seconds=lease_seconds, max_deliveries=100,
    )  # fmt: skip
    allocator = Allocator(ports(*(world.channels[name] for name in ("value_prior", "generation", "verifier"))))
    worker = StreamWorker(allocator, reader, Publisher(clients[0], blobs), clients[0], max_groups=8, max_deliveries=90)
    tasks = [asyncio.create_task(t) for t in (worker.run(), worker.watch_lineages(), reader.run_leases())]
    try:
        yield worker
        assert not any(task.done() for task in tasks), "a task of the worker ended by itself"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.drain(0)


@pytest.mark.parametrize("seed", range(2))
async def test_however_workers_die_every_prompt_yields_one_group_and_one_outcome(
    world: Doubles, redis_url: str, blobs: FolderBlobStore, seed: int
) -> None:
    chance = random.Random(seed)
    world.generation.seconds = 0.01
    world.generation.says = lambda index: ("right", "wrong", "?")[index % 3]
    world.prior.value = 0.9
    names = [f"p{i}" for i in range(30)]
    alive: dict[str, AsyncExitStack] = {}

    async def birth(name: str) -> None:
        # Connections of its own, as a process has: a crash must not hurt the other worker's.
        stack = alive[name] = AsyncExitStack()
        own = connect(redis_url), connect(redis_url, blocking=True)
        for client in own:
            stack.push_async_callback(client.aclose)
        await stack.enter_async_context(working(world, own, blobs, consumer=name, lease_seconds=0.5))

    async with connect(redis_url) as client:
        await submit(client, blobs, *(prompt(name) for name in names))
        try:
            for name in ("a0", "a1"):
                await birth(name)
            for _ in range(8):
                await asyncio.sleep(chance.uniform(0.01, 0.25))
                victim = chance.choice(("a0", "a1"))
                await alive.pop(victim).aclose()
                await birth(victim)
            await until_empty(client, 30)
        finally:
            for stack in alive.values():
                await stack.aclose()
        await check_accounts(client, blobs, names)
        assert await length(client, keys.dead(keys.prompts())) == 0


async def test_a_cancelled_jobs_groups_stop_within_two_seconds_and_other_jobs_go_on(
    world: Doubles, redis_clients: Clients, blobs: FolderBlobStore
) -> None:
    client = redis_clients[0]
    counted = metrics.GROUPS_STALE._value.get()
    world.generation.stuck = lambda request: True
    others = prompt("other")
    others.key.job_id = "another"
    await submit(client, blobs, prompt("p0"), prompt("p1"), others)
    async with working(world, redis_clients, blobs, consumer="a0"):
        await until(lambda: world.generation.running == 3)
        world.generation.stuck = lambda request: False
        began = time.monotonic()
        await execute(client, "INCRBY", keys.lineage("job"), 2)
        await until(lambda: world.generation.running == 1)
        assert time.monotonic() - began < 2
        async with asyncio.timeout(2):
            while await length(client, keys.prompts()) > 1:
                await asyncio.sleep(0.02)
        assert metrics.GROUPS_STALE._value.get() == counted + 2
        await world.stop("generation")  # ends the other job's held call, which is then made again
        await world.serve("generation")
        await until_empty(client, 10)
    assert await length(client, keys.groups("job")) == 0
    await check_accounts(client, blobs, ["other"], job="another")


class Process:
    """`python -m services.allocator`."""

    def __init__(self, world: Doubles, redis_url: str, folder: Path, **options: Any) -> None:
        self.ready = folder / "ready.json"
        options = {
            "port": 0, "metrics-port": "none", "redis-url": redis_url, "state-dir": folder,
            "ready-file": self.ready, "grace-seconds": 0.3, "lease-seconds": 2,
        } | options  # fmt: skip
        options |= {f"{name.replace('_', '-')}-target": target for name, target in world.targets.items()}
        self.command = [sys.executable, "-m", "services.allocator"]
        for name, value in options.items():
            self.command += [f"--{name}", str(value)]
        self.process: subprocess.Popen[bytes]

    async def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLWISE_")}
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL, env=environment)
        await until(lambda: self.ready.exists() or self.process.poll() is not None, 30)
        assert self.process.poll() is None, "the allocator ended at start"

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 20)


async def test_sigterm_hands_back_what_does_not_end_in_time(
    world: Doubles, redis_clients: Clients, redis_url: str, blobs: FolderBlobStore, tmp_path: Path
) -> None:
    client = redis_clients[0]
    process = Process(world, redis_url, tmp_path)
    world.generation.stuck = lambda request: True
    await submit(client, blobs, prompt("p0", deadline_seconds=60))
    await process.start()
    try:
        await until(lambda: world.generation.running)
        began = time.monotonic()
        assert await process.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 5
        await until(lambda: not world.generation.running)
        assert await length(client, keys.prompts()) == 1
        assert await length(client, keys.groups("job")) == 0
        world.generation.stuck = lambda request: False
        # Under another name: what was handed back does not wait for its former owner.
        async with working(world, redis_clients, blobs, consumer="a-new-one", lease_seconds=2):
            await until_empty(client, 15)
    finally:
        process.process.kill()
    await check_accounts(client, blobs, ["p0"])


async def test_redis_killed_in_mid_group_costs_no_group(world: Doubles, redis_server: Any, tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path / "blobs")
    process = Process(world, redis_server.url, tmp_path, **{"lease-seconds": 30})
    names = [f"p{i}" for i in range(6)]
    world.generation.seconds = 0.2
    world.prior.value = 0.9
    async with connect(redis_server.url) as client:
        await submit(client, blobs, *(prompt(name, deadline_seconds=60) for name in names))
    await process.start()
    try:
        await until(lambda: world.generation.running >= 6)
        redis_server.kill()
        await asyncio.sleep(1.5)
        assert process.process.poll() is None
        redis_server.restart()
        async with connect(redis_server.url) as client:
            await until_empty(client, 30)
            await check_accounts(client, blobs, names)
        assert await process.end(signal.SIGTERM) == 0
    finally:
        process.process.kill()
