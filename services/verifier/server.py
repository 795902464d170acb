"""Wires the verifier: settings, pool, gRPC server."""

from __future__ import annotations

import asyncio

from rollwise.v1 import verifier_pb2_grpc

from services.common import lifecycle
from services.common.errors import ConfigurationError
from services.common.grpc_server import GrpcServer
from services.common.logging import get_logger
from services.common.settings import load_settings
from services.verifier import metrics
from services.verifier.pool import VerdictPool, WorkerStartError
from services.verifier.servicer import VerifierServicer
from services.verifier.settings import VerifierSettings

SERVICE_NAME = "rollwise.v1.VerifierService"


def build(settings: VerifierSettings, pool: VerdictPool) -> GrpcServer:
    """The gRPC server over a started pool."""

    async def healthy() -> str | None:
        return pool.problem()

    return GrpcServer(
        settings,
        name="verifier",
        register=lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(pool), server),
        service_names=[SERVICE_NAME],
        healthy=healthy,
    )


async def serve(settings: VerifierSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    pool = VerdictPool(settings.pool_options(), metrics.observer())
    metrics.watch(pool)
    try:
        await asyncio.to_thread(pool.start)
    except WorkerStartError as error:
        raise ConfigurationError(str(error), reason="WORKER_START") from error
    try:
        server = build(settings, pool)
        await server.start()
        get_logger().info("verifier workers ready", workers=settings.workers, domains=settings.domains)
        await server.run_until_signal()
    finally:
        await asyncio.to_thread(pool.stop)


def main() -> None:
    """Entry point of `python -m services.verifier`."""
    settings = load_settings(VerifierSettings)
    lifecycle.run(lambda: serve(settings), service="verifier", settings=settings)
