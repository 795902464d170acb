"""Any interleaving of publishing, reading, crashing, renewing, settling and burying keeps every entry's fate single."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common import keys
from services.common.blobs import FolderBlobStore
from services.common.redis_client import connect
from services.common.streams import Delivery, Publisher, StreamConsumer, Target

A = "rollwise:test-a"
LEASE_SECONDS = 0.02
NAMES = ["one", "two"]

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 8)),
        st.tuples(st.just("read"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.just("settle"), st.sampled_from(NAMES)),
        st.tuples(st.just("crash"), st.sampled_from(NAMES)),
        st.tuples(st.just("renew"), st.sampled_from(NAMES)),
        st.tuples(st.just("bury"), st.sampled_from(NAMES)),
        st.tuples(st.just("expire")),
    ),
    max_size=40,
)


class World:
    def __init__(self, client: Any, blocking: Any, folder: Path) -> None:
        self.client, self.blocking = client, blocking
        self.blobs = FolderBlobStore(folder)
        self.publisher = Publisher(client, self.blobs)
        self.consumers = {name: self.consumer(name) for name in NAMES}
        self.at_hand: dict[str, list[Delivery]] = {name: [] for name in NAMES}
        self.published: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.crashes = 0

    def consumer(self, name: str) -> StreamConsumer:
        return StreamConsumer(
            self.client,
            self.blocking,
            self.blobs,
            stream=A,
            group="g",
            consumer=name,
            lease_seconds=LEASE_SECONDS,
            max_deliveries=4,
        )

    async def read(self, name: str, count: int) -> int:
        held = self.consumers[name].held
        found = await self.consumers[name].read(count=count, block_seconds=0)
        assert not held & {delivery.entry_id for delivery in found}, "handed out twice while held"
        self.at_hand[name] += found
        return len(found)

    async def end(self, name: str, bury: bool) -> None:
        """Finish what this consumer still owns; what it lost is another's to finish."""
        consumer = self.consumers[name]
        await consumer.renew()
        for delivery in self.at_hand[name]:
            if not consumer.owns(delivery):
                continue
            if bury:
                await consumer.bury(delivery, "asked to")
            else:
                await consumer.settle(delivery)
                self.ended[delivery.key] += 1
        self.at_hand[name] = []

    async def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("publish", number):
                result = await self.publisher.publish(f"id-{number}", [Target(A, b"x" * (number + 1))])
                assert result.duplicate == (f"id-{number}" in self.published)
                self.published.add(f"id-{number}")
            case ("read", name, count):
                await self.read(name, count)
            case ("settle", name):
                await self.end(name, bury=False)
            case ("bury", name):
                await self.end(name, bury=True)
            case ("renew", name):
                await self.consumers[name].renew()
            case ("crash", name):
                self.consumers[name], self.at_hand[name] = self.consumer(name), []
            case _:
                await asyncio.sleep(LEASE_SECONDS * 1.2)


async def play(url: str, steps: list[tuple[Any, ...]], folder: Path) -> None:
    client, blocking = connect(url), connect(url, blocking=True)
    try:
        world = World(client, blocking, folder)
        for step in steps:
            await world.step(step)
        # Drain: everybody finishes what they hold, and one goes on until nothing is left.
        for name in NAMES:
            await world.end(name, bury=False)
        for _ in range(50):
            if not await client.xlen(A):
                break
            await asyncio.sleep(LEASE_SECONDS)
            for name in NAMES:
                await world.read(name, 10)
                await world.end(name, bury=False)
        dead = Counter(fields[b"id"].decode() for _, fields in await client.xrange(keys.dead(A)))
        assert await client.xlen(A) == 0
        assert world.ended + dead == Counter(dict.fromkeys(world.published, 1))
        if await client.exists(A) and world.published:
            assert (await world.consumers["one"].depth()).pending == 0
    finally:
        await client.aclose()
        await blocking.aclose()


@given(steps=STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_entry_ends_exactly_once(redis_url: str, tmp_path: Path, steps: list[tuple[Any, ...]]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    asyncio.run(play(redis_url, steps, tmp_path / "blobs"))
