"""Fixtures that all areas share: a real Valkey for the session, and one of one's own to kill."""

import os

# Before torch or numpy are imported anywhere: the machine is shared, and tiny models gain nothing from more threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from services.common.blobs import FolderBlobStore
from services.common.embedded import EmbeddedRedis
from services.common.redis_client import connect

# A developer's own settings must not reach into the tests; where models are cached may.
for _name in [name for name in os.environ if name.startswith("ROLLWISE_") and name != "ROLLWISE_CACHE"]:
    del os.environ[_name]


class RedisServer(EmbeddedRedis):
    """A Valkey that a test may kill and start again on the same port with the same data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def restart(self) -> None:
        self.start(self.folder, self.port)


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis().start(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def redis_url(session_redis: EmbeddedRedis) -> Iterator[str]:
    """Address of an empty Valkey with AOF and noeviction; one process for the whole session."""
    with redis.Redis.from_url(session_redis.url) as client:
        client.flushall()
    yield session_redis.url


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Valkey of the test's own, with `kill()`, `restart()` and `url`."""
    server = RedisServer(tmp_path / "valkey")
    server.start(server.folder)
    yield server
    server.stop()


@pytest.fixture
async def redis_clients(redis_url: str) -> AsyncIterator[tuple[object, object]]:
    """A plain and a blocking client of the session's Valkey, closed at the end."""
    client, blocking = connect(redis_url), connect(redis_url, blocking=True)
    yield client, blocking
    await client.aclose()
    await blocking.aclose()


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobStore:
    return FolderBlobStore(tmp_path / "blobs")
