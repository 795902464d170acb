import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common import keys
from services.common import telemetry as metrics
from services.common.blobs import FolderBlobStore
from services.common.errors import ConfigurationError, InvalidArgument, ResourceExhausted
from services.common.redis_client import check_server, connect
from services.common.streams import Depth, Fence, Publisher, StreamConsumer, Target, referenced_blobs

A, B = "rollwise:test-a", "rollwise:test-b"
Clients = tuple[Redis, Redis]


def consumer(clients: Clients, blobs: FolderBlobStore, name: str = "one", **options: Any) -> StreamConsumer:
    options = {"stream": A, "group": "g", "lease_seconds": 30, **options}
    return StreamConsumer(*clients, blobs, consumer=name, **options)


@pytest.fixture
async def publisher(redis_clients: Clients, blobs: FolderBlobStore) -> AsyncIterator[Publisher]:
    yield Publisher(redis_clients[0], blobs)


async def test_what_is_published_is_read_once_and_gone_when_settled(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs)
    published = await publisher.publish("id-1", [Target(A, b"hello")])
    [delivery] = await one.read(count=10, block_seconds=0)
    assert (delivery.payload, delivery.key, delivery.deliveries) == (b"hello", "id-1", 1)
    assert (delivery.entry_id,) == published.entry_ids
    assert await one.depth() == Depth(length=1, undelivered=0, pending=1)
    assert await one.read(count=10, block_seconds=0) == []
    await one.settle(delivery)
    await one.settle(delivery)
    assert await one.depth() == Depth(0, 0, 0)


async def test_a_second_publication_of_an_id_answers_the_first_entries(
    redis_clients: Clients, publisher: Publisher
) -> None:
    first = await publisher.publish("id-1", [Target(A, b"x"), Target(B, b"y")])
    second = await publisher.publish("id-1", [Target(A, b"x"), Target(B, b"y")])
    assert not first.duplicate
    assert second.duplicate
    assert second.entry_ids == first.entry_ids
    assert await redis_clients[0].xlen(A) == await redis_clients[0].xlen(B) == 1
    assert 0 < await redis_clients[0].ttl(keys.seen(A, "id-1")) <= 86400


async def test_a_prompt_and_its_group_may_share_an_id(redis_clients: Clients, publisher: Publisher) -> None:
    await publisher.publish("id-1", [Target(A, b"prompt")])
    assert not (await publisher.publish("id-1", [Target(B, b"group")])).duplicate


async def test_many_publishers_of_one_id_write_one_entry(redis_clients: Clients, publisher: Publisher) -> None:
    results = await asyncio.gather(*(publisher.publish("id-1", [Target(A, b"x")]) for _ in range(20)))
    assert sum(not result.duplicate for result in results) == 1
    assert await redis_clients[0].xlen(A) == 1


async def test_an_older_lineage_is_discarded_and_counted(redis_clients: Clients, publisher: Publisher) -> None:
    await redis_clients[0].set(keys.lineage("j"), 3)
    before = metrics.STREAM_STALE.labels("test-a")._value.get()
    stale = await publisher.publish("old", [Target(A, b"x")], fence=Fence(keys.lineage("j"), 2))
    assert stale.stale
    assert stale.entry_ids == ()
    assert await redis_clients[0].xlen(A) == 0
    assert metrics.STREAM_STALE.labels("test-a")._value.get() == before + 1
    assert not (await publisher.publish("same", [Target(A, b"x")], fence=Fence(keys.lineage("j"), 3))).stale
    assert not (await publisher.publish("unset", [Target(A, b"x")], fence=Fence(keys.lineage("new"), 0))).stale


async def test_a_full_stream_says_busy_and_writes_to_none(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs)
    for number in range(3):
        await publisher.publish(f"id-{number}", [Target(A, b"x")], cap=3)
    with pytest.raises(ResourceExhausted, match="3 undelivered entries") as busy:
        await publisher.publish("id-3", [Target(B, b"y"), Target(A, b"x" * 2_000_000)], cap=3)
    assert busy.value.reason == "BUSY"
    assert await redis_clients[0].xlen(B) == 0
    assert list(blobs.path.iterdir()) == []
    # A duplicate is answered, not refused; and what is being worked on does not count.
    assert (await publisher.publish("id-2", [Target(A, b"x")], cap=3)).duplicate
    assert len(await one.read(count=1, block_seconds=0)) == 1
    assert not (await publisher.publish("id-3", [Target(A, b"x")], cap=3)).duplicate


@pytest.mark.parametrize("targets", [[], [Target(A, b""), Target(A, b"")]])
async def test_a_publication_without_distinct_targets_is_refused(publisher: Publisher, targets: list[Target]) -> None:
    with pytest.raises(InvalidArgument, match="distinct streams"):
        await publisher.publish("id", targets)


async def test_a_large_payload_goes_to_the_blob_store_and_goes_with_its_entry(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    payload = bytes(range(256)) * 8192
    one = consumer(redis_clients, blobs)
    await publisher.publish("big", [Target(A, payload)])
    await publisher.publish("big", [Target(A, payload)])
    [entry] = await redis_clients[0].xrange(A)
    assert sum(len(value) for value in entry[1].values()) < 200
    assert len(list(blobs.path.iterdir())) == 1
    assert await referenced_blobs(redis_clients[0], [A, B]) == {path.name for path in blobs.path.iterdir()}
    [delivery] = await one.read(count=1, block_seconds=0)
    assert delivery.payload == payload
    await one.settle(delivery)
    assert list(blobs.path.iterdir()) == []


async def test_orphan_blobs_are_swept_by_age_and_those_in_use_stay(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    await publisher.publish("big", [Target(A, b"x" * 2_000_000)])
    await blobs.put(b"orphan")
    (blobs.path / "someone-elses.txt").write_text("stays")
    keep = await referenced_blobs(redis_clients[0], [A])
    assert await blobs.sweep(older_than_seconds=3600, keep=keep) == 0
    assert await blobs.sweep(older_than_seconds=-1, keep=keep) == 1
    assert {path.name for path in blobs.path.iterdir()} == keep | {"someone-elses.txt"}


@pytest.mark.parametrize("damage", ["missing", "changed", "fields", "pointer"])
async def test_what_cannot_be_read_is_buried_with_reason_and_fields(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher, damage: str
) -> None:
    client = redis_clients[0]
    one = consumer(redis_clients, blobs)
    if damage == "fields":
        await client.xadd(A, {"foreign": "field"})
    elif damage == "pointer":
        await client.xadd(A, {"id": "x", "blob": "../../etc/passwd", "sha256": "0"})
    else:
        await publisher.publish("big", [Target(A, b"x" * 2_000_000)])
        [path] = blobs.path.iterdir()
        path.unlink() if damage == "missing" else path.write_bytes(b"other")
    await publisher.publish("good", [Target(A, b"fine")])
    [original, _] = await client.xrange(A)
    [delivery] = await one.read(count=10, block_seconds=0)
    assert delivery.payload == b"fine"
    [dead] = await client.xrange(keys.dead(A))
    assert original[1].items() <= dead[1].items()
    assert dead[1][b"dead_reason"].startswith(b"unreadable: ")
    assert dead[1][b"dead_entry"] == original[0]
    assert await one.depth() == Depth(1, 0, 1)


async def test_an_entry_delivered_too_often_is_buried(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    await publisher.publish("poison", [Target(A, b"x")])
    for attempt in (1, 2, 3):
        # A process that restarts under its own name each time, and dies on the entry each time.
        [delivery] = await consumer(redis_clients, blobs, max_deliveries=3).read(count=1, block_seconds=0)
        assert delivery.deliveries == attempt
    assert await consumer(redis_clients, blobs, max_deliveries=3).read(count=1, block_seconds=0) == []
    [dead] = await redis_clients[0].xrange(keys.dead(A))
    assert dead[1][b"dead_reason"] == b"delivered 3 times and never settled"
    assert dead[1][b"payload"] == b"x"


async def test_burying_twice_makes_one_dead_entry(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs)
    await publisher.publish("bad", [Target(A, b"x")])
    [delivery] = await one.read(count=1, block_seconds=0)
    await one.bury(delivery, "no such policy")
    await one.bury(delivery, "no such policy")
    assert await redis_clients[0].xlen(keys.dead(A)) == 1
    assert await redis_clients[0].xlen(A) == 0
    assert not one.owns(delivery)


async def test_an_expired_lease_moves_the_entry_and_a_renewed_one_does_not(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    lost: list[str] = []
    one = consumer(redis_clients, blobs, "one", lease_seconds=0.8, on_lost=lost.append)
    two = consumer(redis_clients, blobs, "two", lease_seconds=0.8)
    await publisher.publish("id", [Target(A, b"x")])
    [held] = await one.read(count=1, block_seconds=0)
    leases = asyncio.create_task(one.run_leases())
    assert await two.read(count=1, block_seconds=1.6) == []
    leases.cancel()
    [taken] = await two.read(count=1, block_seconds=5.0)
    # Renewals are no deliveries: this is the second one.
    assert (taken.entry_id, taken.deliveries) == (held.entry_id, 2)
    # The first one's late renewal neither takes the entry back nor goes unnoticed.
    await one.renew()
    assert lost == [held.entry_id]
    assert not one.owns(held)
    [owner] = await redis_clients[0].xpending_range(A, "g", "-", "+", 10)
    assert owner["consumer"] == b"two"
    await two.settle(taken)
    await one.settle(held)
    assert await two.depth() == Depth(0, 0, 0)


async def test_what_a_consumer_holds_is_not_handed_to_it_again_when_its_renewal_is_late(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs, lease_seconds=0.1)
    await publisher.publish("id", [Target(A, b"x")])
    [held] = await one.read(count=1, block_seconds=0)
    await asyncio.sleep(0.15)
    assert await one.read(count=1, block_seconds=0) == []
    await one.renew()
    assert one.owns(held)


async def test_a_restarted_consumer_gets_its_own_entries_first(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    for number in range(5):
        await publisher.publish(f"id-{number}", [Target(A, str(number).encode())])
    assert len(await consumer(redis_clients, blobs).read(count=3, block_seconds=0)) == 3
    again = consumer(redis_clients, blobs)
    seen = []
    while batch := await again.read(count=2, block_seconds=0):
        seen += [(delivery.payload, delivery.deliveries) for delivery in batch]
    assert seen == [(b"0", 2), (b"1", 2), (b"2", 2), (b"3", 1), (b"4", 1)]


async def test_a_cancelled_read_loses_nothing(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs)
    for number in range(30):
        reading = asyncio.create_task(one.read(count=1, block_seconds=5))
        await asyncio.sleep(0.002)
        publishing = asyncio.create_task(publisher.publish(f"id-{number}", [Target(A, b"x")]))
        await asyncio.sleep(0.0002 * number)
        reading.cancel()
        [found] = await asyncio.gather(reading, return_exceptions=True)
        await publishing
        got = [] if isinstance(found, BaseException) else found
        got += await one.read(count=5, block_seconds=1) if not got else []
        assert len(got) == 1
        await one.settle(*got)


async def test_a_waiting_read_wakes_when_something_comes(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    one = consumer(redis_clients, blobs)
    reading = asyncio.create_task(one.read(count=1, block_seconds=10))
    await asyncio.sleep(0.1)
    await publisher.publish("id", [Target(A, b"x")])
    async with asyncio.timeout(1):
        assert len(await reading) == 1


async def test_a_lost_group_is_made_again_from_the_first_entry(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    client = redis_clients[0]
    one = consumer(redis_clients, blobs)
    await publisher.publish("before", [Target(A, b"x")])
    await client.xgroup_create(A, "g", "0")
    await client.xgroup_destroy(A, "g")
    assert [delivery.key for delivery in await one.read(count=1, block_seconds=0)] == ["before"]
    # And while a read waits.
    reading = asyncio.create_task(one.read(count=1, block_seconds=10))
    await asyncio.sleep(0.1)
    await client.delete(A)
    await publisher.publish("after", [Target(A, b"x")])
    async with asyncio.timeout(5):
        assert [delivery.key for delivery in await reading] == ["after"]


async def test_a_server_that_evicts_or_forgets_is_refused_with_the_remedy(redis_url: str, tmp_path: Path) -> None:
    client = connect(redis_url)
    try:
        await check_server(client)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigurationError, match="CONFIG SET maxmemory-policy noeviction"):
            await check_server(client)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("appendonly", "no")
        with pytest.raises(ConfigurationError, match="CONFIG SET appendonly yes"):
            await check_server(client)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("appendonly", "yes")
        await client.aclose()


async def test_a_deleted_stream_takes_its_large_payloads_and_its_dead_entries_with_it(
    redis_clients: Clients, blobs: FolderBlobStore, publisher: Publisher
) -> None:
    await publisher.publish("large", [Target("a", b"x" * (2 << 20))])
    await publisher.publish("buried", [Target("a", b"y" * (2 << 20))])
    await publisher.publish("other", [Target("b", b"z" * (2 << 20))])
    one = consumer(redis_clients, blobs, stream="a", group="g")
    first, _ = await one.read(count=2, block_seconds=0)
    await one.bury(first, "unreadable")
    await publisher.delete_streams("a")
    client: Any = redis_clients[0]
    assert await client.exists("a", "a:dead") == 0
    left = await referenced_blobs(client, ["b"])
    assert {path.name for path in blobs.path.rglob("*") if path.is_file()} == {p.rsplit("/", 1)[-1] for p in left}
