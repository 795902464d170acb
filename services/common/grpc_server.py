"""An asyncio gRPC server as every service runs it: health, reflection, guards, metrics, and an orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import ConfigurationError
from services.common.grpc_guards import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, Guard
from services.common.lifecycle import write_ready_file
from services.common.logging import get_logger
from services.common.settings import ServiceSettings
from services.common.telemetry import HEALTHY, MetricsServer, serve_metrics

__all__ = ["MAX_MESSAGE_BYTES", "GrpcServer"]

log = get_logger("rollwise.grpc")
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# Health of a service that does not answer the poller for this long is not known, which is not health.
_POLL_TIMEOUT_SECONDS = 5.0


class GrpcServer:
    """One service's server.

    Args:
        settings: Address, token, TLS, grace.
        name: Of the service, in logs and metrics.
        register: Adds the servicers to the server.
        service_names: Full names, e.g. "rollwise.v1.GenerationService"; each has a health of its own.
        healthy: Returns None when the service can work, else the cause. A poller asks it; a health call only reads
            what the poller last heard, so it never waits behind work.
        health_seconds: Time between two polls.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        name: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        healthy: Callable[[], Awaitable[str | None]] | None = None,
        health_seconds: float = 1.0,
    ) -> None:
        self._settings = settings
        self._name = name
        self._register = register
        self._service_names = tuple(service_names)
        self._healthy = healthy
        self._health_seconds = health_seconds
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._poller: asyncio.Task[None] | None = None
        self._metrics: MetricsServer | None = None
        self._cause: str | None = "starting"
        self.port = 0
        self.metrics_port: int | None = None
        # More ports for the ready file, e.g. {"http_port": 8102}; set before start().
        self.extra_ready: dict[str, int] = {}

    async def start(self) -> int:
        """Serve, and return the bound port.

        Raises:
            ConfigurationError: a port is in use, or the TLS files are no good.
        """
        settings = self._settings
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            # Without this a second server shares the port in silence and takes half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        server = grpc.aio.server(interceptors=[Guard(settings.token)], options=options)
        self._register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        self.port = self._bind(server)
        if settings.host not in _LOOPBACK and settings.token is None:
            log.warning("listening beyond this machine without a token; set auth_token_file", host=settings.host)
        if settings.metrics_port is not None:
            self._metrics = serve_metrics(settings.metrics_port, settings.host)
            self.metrics_port = self._metrics.port
        await server.start()
        self._server = server
        await self._poll()
        self._poller = asyncio.create_task(self._keep_polling(), name=f"{self._name}-health")
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, port=self.port, metrics_port=self.metrics_port, **self.extra_ready)
        log.info("serving", server=self._name, host=settings.host, port=self.port, metrics_port=self.metrics_port)
        return self.port

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop in order. A second signal ends the grace at once."""
        if self._server is None:
            await self.start()
        asked = asyncio.Event()
        hurry = asyncio.Event()

        def on_signal() -> None:
            (hurry if asked.is_set() else asked).set()

        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, on_signal)
        try:
            await asked.wait()
            log.info("stopping", server=self._name, grace_seconds=self._settings.grace_seconds)
            stopping = asyncio.create_task(self.stop())
            hurrying = asyncio.create_task(hurry.wait())
            await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            if not stopping.done() and self._server is not None:
                await self._server.stop(0)
            await stopping
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new calls, let those in progress end for `grace` seconds (None: the setting), then close."""
        server = self._server
        if server is None:
            return
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        await self._publish_health("shutting down")
        await self._health.enter_graceful_shutdown()
        if self._settings.ready_file is not None:
            self._settings.ready_file.unlink(missing_ok=True)
        await server.stop(self._settings.grace_seconds if grace is None else grace)
        self._server = None
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None

    @property
    def unhealthy_cause(self) -> str | None:
        """Why the service last said that it cannot work; None when it can."""
        return self._cause

    def _bind(self, server: grpc.aio.Server) -> int:
        settings = self._settings
        address = f"{settings.host}:{settings.port}"
        try:
            if settings.tls_cert is None or settings.tls_key is None:
                port = server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(_bytes(settings.tls_key), _bytes(settings.tls_cert))],
                    root_certificates=None if settings.tls_ca is None else _bytes(settings.tls_ca),
                    require_client_auth=settings.tls_ca is not None,
                )
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            port, reason = 0, f" ({error})"
        else:
            reason = ""
        if port == 0:
            variable = f"{settings.model_config.get('env_prefix', '')}PORT"
            raise ConfigurationError(
                f"cannot listen on {address}: the port is in use or the address is not of this machine{reason}; "
                f"choose another with --port or {variable} (0 takes any free one)",
                reason="PORT_IN_USE",
                port=str(settings.port),
                setting="port",
            )
        return port

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self._poll()

    async def _poll(self) -> None:
        cause: str | None = None
        if self._healthy is not None:
            try:
                async with asyncio.timeout(_POLL_TIMEOUT_SECONDS):
                    cause = await self._healthy()
            except TimeoutError:
                cause = f"no answer about its health within {_POLL_TIMEOUT_SECONDS:g} s"
            except Exception as error:
                log.exception("the health check failed", server=self._name)
                cause = f"the health check failed: {error}"
        await self._publish_health(cause)

    async def _publish_health(self, cause: str | None) -> None:
        if cause != self._cause:
            log.info("health changed", server=self._name, healthy=cause is None, cause=cause)
        self._cause = cause
        HEALTHY.labels(self._name).set(cause is None)
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if cause is None else answer.NOT_SERVING
        for service in ("", *self._service_names):
            await self._health.set(service, status)


def _bytes(path: Path) -> bytes:
    return path.read_bytes()
