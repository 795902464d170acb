"""Wires the allocator: settings, channels, stream worker, gRPC server; one process."""

from __future__ import annotations

from rollwise.v1 import allocator_pb2_grpc

from services.allocator.allocator import Allocator
from services.allocator.clients import ports
from services.allocator.servicer import AllocatorServicer
from services.allocator.settings import AllocatorSettings
from services.allocator.worker import GROUP, StreamWorker
from services.common import keys, lifecycle
from services.common.blobs import FolderBlobStore
from services.common.errors import Unavailable
from services.common.grpc_client import connect_as
from services.common.grpc_server import GrpcServer
from services.common.lifecycle import Background
from services.common.redis_client import check_server, connect, execute, survive
from services.common.settings import load_settings
from services.common.streams import Publisher, StreamConsumer

SERVICE_NAME = "rollwise.v1.AllocatorService"


async def serve(settings: AllocatorSettings) -> None:
    """Serve until SIGTERM or SIGINT; running groups may end within the grace time."""
    client = connect(settings.redis_url)
    blocking = connect(settings.redis_url, blocking=True)
    channels = [
        connect_as(settings, target)
        for target in (settings.value_prior_target, settings.generation_target, settings.verifier_target)
    ]
    try:
        async with Background() as background:
            allocator = Allocator(ports(*channels), feature_for_prior=settings.feature_for_prior)
            worker: StreamWorker | None = None
            if settings.consume:
                await check_server(client)
                blobs = FolderBlobStore(settings.state_dir.expanduser() / "blobs")
                consumer = StreamConsumer(
                    client,
                    blocking,
                    blobs,
                    stream=keys.prompts(),
                    group=GROUP,
                    consumer=settings.consumer,
                    lease_seconds=settings.lease_seconds,
                    # Ours comes first: it closes the group for the trainer before the stream buries the entry.
                    max_deliveries=settings.max_deliveries + 5,
                )
                worker = StreamWorker(
                    allocator,
                    consumer,
                    Publisher(client, blobs),
                    client,
                    max_groups=settings.max_groups,
                    max_deliveries=settings.max_deliveries,
                )
                background.start("leases", consumer.run_leases())
                background.start("lineages", worker.watch_lineages())
                background.start("prompts", worker.run())

            async def healthy() -> str | None:
                if worker is None:
                    return None
                try:
                    await survive(lambda: execute(client, "PING"), client=client, seconds=0)
                except Unavailable as error:
                    return str(error)
                return None

            server = GrpcServer(
                settings,
                name="allocator",
                register=lambda s: allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(
                    AllocatorServicer(allocator), s
                ),
                service_names=[SERVICE_NAME],
                healthy=healthy,
            )
            await server.start()
            await server.run_until_signal()
            if worker is not None:
                await worker.drain(settings.grace_seconds)
    finally:
        for channel in channels:
            await channel.close()
        await client.aclose()
        await blocking.aclose()


def main() -> None:
    """Entry point of `python -m services.allocator`."""
    settings = load_settings(AllocatorSettings)
    lifecycle.run(lambda: serve(settings), service="allocator", settings=settings)
