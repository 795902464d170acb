import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from services.common.blobs import FolderBlobStore
from services.common.embedded import EmbeddedRedis
from services.common.errors import ConfigurationError, FailedPrecondition, ResourceExhausted, Unavailable
from services.common.redis_client import check_server, connect
from services.common.streams import Depth, Publisher, StreamConsumer, Target

A = "rollwise:test-a"


async def test_a_killed_valkey_loses_nothing_acknowledged(redis_server: Any, blobs: FolderBlobStore) -> None:
    client, blocking = connect(redis_server.url), connect(redis_server.url, blocking=True)
    publisher = Publisher(client, blobs)
    consumer = StreamConsumer(client, blocking, blobs, stream=A, group="g", consumer="c")
    acknowledged: set[str] = set()
    settled: list[str] = []
    total = 400

    moments = {number: asyncio.Event() for number in (total // 4, total // 2)}

    async def publish() -> None:
        for number in range(total):
            await publisher.publish(f"id-{number}", [Target(A, b"x")])
            acknowledged.add(f"id-{number}")
            if number in moments:
                moments[number].set()

    async def consume() -> None:
        while len(set(settled)) < total:
            batch = await consumer.read(count=7, block_seconds=1)
            await consumer.settle(*batch)
            settled.extend(delivery.key for delivery in batch)

    async def disturb() -> None:
        for moment in moments.values():
            await moment.wait()
            await asyncio.to_thread(redis_server.kill)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(redis_server.restart)

    async with asyncio.timeout(60):
        await asyncio.gather(publish(), consume(), disturb())
    assert acknowledged == set(settled)
    assert len(settled) == total  # each settled exactly once, though replies were lost
    assert await consumer.depth() == Depth(0, 0, 0)
    await client.aclose()
    await blocking.aclose()


async def test_a_waiting_read_outlives_a_restart(redis_server: Any, blobs: FolderBlobStore) -> None:
    client, blocking = connect(redis_server.url), connect(redis_server.url, blocking=True)
    consumer = StreamConsumer(client, blocking, blobs, stream=A, group="g", consumer="c")
    reading = asyncio.create_task(consumer.read(count=1, block_seconds=20))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(redis_server.kill)
    await asyncio.to_thread(redis_server.restart)
    await Publisher(client, blobs).publish("id", [Target(A, b"x")])
    async with asyncio.timeout(10):
        assert [delivery.key for delivery in await reading] == ["id"]
    await client.aclose()
    await blocking.aclose()


async def test_a_server_that_stays_away_is_named_after_a_settable_time(
    redis_server: Any, blobs: FolderBlobStore
) -> None:
    client, blocking = connect(redis_server.url), connect(redis_server.url, blocking=True)
    consumer = StreamConsumer(
        client, blocking, blobs, stream=A, group="g", consumer="c", reconnect_seconds=0.5, lease_seconds=0.4
    )
    publisher = Publisher(client, blobs, reconnect_seconds=0.2)
    redis_server.stop()
    start = time.monotonic()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{redis_server.port}"):
        await consumer.read(count=1, block_seconds=0.1)
    assert 0.4 < time.monotonic() - start < 3
    with pytest.raises(Unavailable, match="is it running"):
        await publisher.publish("id", [Target(A, b"x")])
    await consumer.renew()  # nothing held: no matter
    await client.aclose()
    await blocking.aclose()


class LosesReplies(Redis):
    """Runs a command and then reports a lost connection, as when the reply never came."""

    losses = 0
    commands = ("EVAL", "EVALSHA", "XREADGROUP", "XAUTOCLAIM")

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = await super().execute_command(*args, **options)
        if args[0] in self.commands and type(self).losses > 0:
            type(self).losses -= 1
            raise sync_redis.exceptions.ConnectionError("the reply was lost")
        return answer


async def test_a_lost_reply_makes_no_second_entry_and_keeps_the_blob(redis_url: str, blobs: FolderBlobStore) -> None:
    lossy = LosesReplies.from_url(redis_url, protocol=2)
    client, blocking = connect(redis_url), connect(redis_url, blocking=True)
    LosesReplies.losses = 2
    published = await Publisher(lossy, blobs).publish("id", [Target(A, b"x" * 2_000_000)])
    assert LosesReplies.losses == 0
    assert not published.duplicate
    consumer = StreamConsumer(client, blocking, blobs, stream=A, group="g", consumer="c")
    [delivery] = await consumer.read(count=10, block_seconds=0)
    assert (delivery.entry_id, len(delivery.payload)) == (published.entry_ids[0], 2_000_000)
    for each in (lossy, client, blocking):
        await each.aclose()


async def test_a_lost_reply_to_a_read_hides_no_entry(redis_url: str, blobs: FolderBlobStore) -> None:
    lossy = LosesReplies.from_url(redis_url, protocol=2)
    LosesReplies.losses = 0
    await Publisher(lossy, blobs).publish("id", [Target(A, b"x")])
    consumer = StreamConsumer(lossy, lossy, blobs, stream=A, group="g", consumer="c")
    await consumer.ensure_group()
    await consumer.read(count=1, block_seconds=0)  # nothing of its own is left to look for
    assert len(consumer.held) == 1
    await Publisher(lossy, blobs).publish("next", [Target(A, b"y")])
    LosesReplies.commands, LosesReplies.losses = ("XREADGROUP",), 1
    try:
        [found] = await consumer.read(count=5, block_seconds=0.5)
    finally:
        LosesReplies.commands = ("EVAL", "EVALSHA", "XREADGROUP", "XAUTOCLAIM")
    assert (found.key, found.deliveries) == ("next", 2)
    await lossy.aclose()


async def test_a_full_redis_is_said_to_be_full_and_keeps_nothing(redis_server: Any, blobs: FolderBlobStore) -> None:
    client = connect(redis_server.url)
    publisher = Publisher(client, blobs)
    await client.config_set("maxmemory", 1)
    with pytest.raises(ResourceExhausted, match=f"{redis_server.port}.*maxmemory") as full:
        await publisher.publish("id", [Target(A, b"x" * 2_000_000), Target("rollwise:test-b", b"y")])
    assert full.value.reason == "REDIS_FULL"
    assert list(blobs.path.iterdir()) == []
    await client.config_set("maxmemory", 0)
    assert not (await publisher.publish("id", [Target(A, b"x")])).duplicate
    await client.aclose()


async def test_a_full_disk_is_said_to_be_full(blobs: FolderBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ResourceExhausted, match="No space left") as caught:
        await blobs.put(b"x")
    assert caught.value.reason == "DISK_FULL"
    assert list(blobs.path.iterdir()) == []


def test_the_embedded_server_keeps_its_data_and_guards_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with EmbeddedRedis().start(folder) as server:
        client = sync_redis.Redis(port=server.port)
        client.set("k", "v")
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("appendfsync")["appendfsync"] == "everysec"
        client.close()
        with pytest.raises(FailedPrecondition, match="another Valkey runs on"):
            EmbeddedRedis().start(folder)
        with pytest.raises(ConfigurationError, match=f"port {server.port} is in use"):
            EmbeddedRedis().start(tmp_path / "other", server.port)
        server.kill()
        server.start(folder)
        client = sync_redis.Redis(port=server.port)
        assert client.get("k") == b"v"
        client.close()
    assert not server.running


async def test_the_embedded_server_passes_the_check(redis_server: Any) -> None:
    client = connect(redis_server.url)
    await check_server(client)
    await client.aclose()
    with pytest.raises(ConfigurationError, match="no Redis address"):
        connect("localhost:6379")
