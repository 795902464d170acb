"""This process's connections to Redis: one publisher, and consumers that carry the worker's name."""

from __future__ import annotations

from typing import Any

from services.common.blobs import FolderBlobStore
from services.common.redis_client import connect
from services.common.streams import Publisher, StreamConsumer
from trainer.settings import ServiceTargets


class Streams:
    """Clients and what is made of them; close with `close`."""

    def __init__(
        self, settings: ServiceTargets, *, consumer: str, lease_seconds: float, patience_seconds: float
    ) -> None:
        self._url = settings.redis_url
        self._name = consumer
        self._lease_seconds = lease_seconds
        self._patience_seconds = patience_seconds
        self._blobs = FolderBlobStore(settings.blob_folder)
        self.client: Any = connect(self._url)
        self._blocking: list[Any] = []
        self.publisher = Publisher(self.client, self._blobs, reconnect_seconds=patience_seconds)

    def consumer(self, stream: str, *, group: str, max_deliveries: int = 5) -> StreamConsumer:
        """A consumer with a blocking connection of its own."""
        blocking: Any = connect(self._url, blocking=True)
        self._blocking.append(blocking)
        return StreamConsumer(
            self.client,
            blocking,
            self._blobs,
            stream=stream,
            group=group,
            consumer=self._name,
            lease_seconds=self._lease_seconds,
            max_deliveries=max_deliveries,
            reconnect_seconds=self._patience_seconds,
        )

    async def close(self) -> None:
        """Closes all connections."""
        for client in [*self._blocking, self.client]:
            await client.aclose()
