"""Wiring of the API process: settings, connections, the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn

from services.common.errors import ConfigurationError
from services.common.lifecycle import write_ready_file
from services.common.logging import get_logger
from services.common.redis_client import LOST, check_server
from trainer.api.app import Context, create_app
from trainer.clients import Services
from trainer.config import JobSpec
from trainer.jobs import JobStore
from trainer.preflight import PreflightReport, preflight
from trainer.settings import ApiSettings
from trainer.streams import Streams

log = get_logger("rollwise.api")

PING_SECONDS = 2.0


class ApiServer:
    """The API on a socket. `start`, then `run_until_signal` or `stop`."""

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        self.port = 0
        self._closing = asyncio.Event()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Serves; returns the port. Raises ConfigurationError (port in use, unsafe Redis) or Unavailable (no Redis)."""
        settings = self.settings
        self._socket = _bind(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self._streams = Streams(settings, consumer="api", lease_seconds=30.0, patience_seconds=5.0)
        self._services = Services(settings)
        try:
            await check_server(self._streams.client)
        except BaseException:
            await self._close()
            raise
        store = JobStore(self._streams.client, self._streams.publisher)
        app = create_app(Context(settings, store, self._preflight, self._redis_answers, self._closing))
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=max(1, int(settings.grace_seconds)),
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise ConfigurationError("the HTTP server ended at once; the log says why")
            await asyncio.sleep(0.01)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, port=self.port, http_port=self.port, metrics_port=self.port)
        log.info("serving", host=settings.host, port=self.port)
        return self.port

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        if self._task is None:
            await self.start()
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, asked.set)
        assert self._task is not None
        waiting = asyncio.ensure_future(asked.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await self.stop()

    async def stop(self) -> None:
        """Ends event streams, lets requests finish, closes everything."""
        self._closing.set()
        if self.settings.ready_file is not None:
            self.settings.ready_file.unlink(missing_ok=True)
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        await self._close()

    async def _close(self) -> None:
        await self._services.close()
        await self._streams.close()
        self._socket.close()

    async def _preflight(self, spec: JobSpec) -> PreflightReport:
        settings = self.settings
        return await preflight(
            spec, self._services, max_rows=settings.preflight_rows, seconds=settings.preflight_seconds
        )

    async def _redis_answers(self) -> bool:
        try:
            async with asyncio.timeout(PING_SECONDS):
                return bool(await self._streams.client.ping())
        except LOST as error:
            log.warning("redis does not answer", error=str(error))
            return False


class _Server(uvicorn.Server):
    """Without signal handlers of its own: the process has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"cannot serve on {host}:{port}: {error.strerror}; choose another port with --port (0 takes any free one)",
            reason="PORT_IN_USE",
            port=str(port),
        ) from error
    return bound
