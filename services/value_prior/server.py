"""Wires the value prior: settings, embedder, store, model, stream worker, gRPC and HTTP servers; one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from redis.asyncio import Redis
from rollwise.v1 import value_prior_pb2_grpc

from services.common import keys, lifecycle
from services.common.blobs import FolderBlobStore
from services.common.errors import ConfigurationError, InvalidArgument, RollwiseError, Unavailable
from services.common.grpc_server import GrpcServer
from services.common.lifecycle import Background
from services.common.logging import configure_logging, get_logger
from services.common.paths import STATE_DIR
from services.common.redis_client import check_server, connect, execute, survive
from services.common.settings import load_settings
from services.common.streams import StreamConsumer
from services.value_prior.embedder import Embedder, HashingEmbedder, PolicyEmbedder
from services.value_prior.metrics import PrometheusRecorder
from services.value_prior.model import ValuePrior
from services.value_prior.records import Limits
from services.value_prior.rest import create_app
from services.value_prior.servicer import ValuePriorServicer
from services.value_prior.settings import ValuePriorSettings
from services.value_prior.store import RedisContextStore
from services.value_prior.worker import OutcomeWorker

log = get_logger("rollwise.value_prior")
SERVICE_NAME = "rollwise.v1.ValuePriorService"
GROUP = "value-prior"


@dataclass(slots=True)
class Running:
    """A value prior that serves, with the ports it got."""

    model: ValuePrior
    server: GrpcServer
    port: int
    http_port: int | None


def make_embedder(settings: ValuePriorSettings) -> Embedder:
    """The embedder that `settings.embedder` names. Loads weights: call it in a thread."""
    if settings.embedder == "hashing":
        return HashingEmbedder()
    if settings.embedder == "policy":
        return PolicyEmbedder()
    from services.value_prior.language_model_embedder import LanguageModelEmbedder

    if settings.embedder == "smollm2":
        from services.common.models import smollm2_folder

        folder = smollm2_folder()
    else:
        folder = Path(settings.embedder).expanduser()
    try:
        return LanguageModelEmbedder(folder, layer=settings.embedder_layer, threads=settings.embedder_threads)
    except InvalidArgument as error:
        raise ConfigurationError(str(error), setting="embedder") from error


@contextlib.asynccontextmanager
async def running(settings: ValuePriorSettings, background: Background) -> AsyncIterator[Running]:
    """A value prior that serves until the block ends."""
    client = connect(settings.redis_url)
    blocking = connect(settings.redis_url, blocking=True)
    model: ValuePrior | None = None
    http: _HttpServer | None = None
    listener: socket.socket | None = None
    try:
        await check_server(client)
        store = RedisContextStore(
            client,
            capacity=settings.context_capacity,
            ttl_seconds=settings.context_ttl_seconds,
            patience_seconds=settings.redis_patience_seconds,
        )
        await store.open()
        model = ValuePrior(
            store,
            await asyncio.to_thread(make_embedder, settings),
            PrometheusRecorder(),
            limits=Limits(settings.max_prompts, settings.max_outcomes, settings.max_text_bytes),
            fit_rows=settings.fit_rows,
            max_policies=settings.max_policies,
            keep_features=settings.embedder == "policy",
        )
        if settings.consume:
            _start_worker(settings, model, client, blocking, background)
        server = _grpc_server(settings, model, client)
        if settings.http_port is not None:
            listener = _bind(settings.host, settings.http_port)
            server.extra_ready["http_port"] = int(listener.getsockname()[1])
            http = _http_server(settings, model, server)
            background.start("http", http.serve(sockets=[listener]))
            await http.wait_started()
        port = await server.start()
        background.start("warm-up", _warm_up(model, store))
        yield Running(model, server, port, server.extra_ready.get("http_port"))
        await server.stop()
    finally:
        if http is not None:
            http.should_exit = True
            await http.wait_ended(settings.grace_seconds)
        if listener is not None:
            listener.close()
        await background.stop()
        if model is not None:
            await asyncio.to_thread(model.close)
        await client.aclose()
        await blocking.aclose()


async def serve(settings: ValuePriorSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with Background() as background, running(settings, background) as value_prior:
        log.info("value prior ready", embedder=settings.embedder, http_port=value_prior.http_port)
        await value_prior.server.run_until_signal()


def main() -> None:
    """Entry point of `python -m services.value_prior`."""
    settings = load_settings(ValuePriorSettings)
    configure_logging("value-prior", settings.log_level, settings.log_format)
    lifecycle.run(lambda: serve(settings), service="value-prior")


def blob_folder(settings: ValuePriorSettings) -> Path:
    """Where outcomes lie that were too large for the stream: the allocator's folder."""
    return STATE_DIR / "blobs" if settings.blob_dir is None else Path(settings.blob_dir).expanduser()


def _start_worker(
    settings: ValuePriorSettings, model: ValuePrior, client: Redis, blocking: Redis, background: Background
) -> None:
    consumer = StreamConsumer(
        client,
        blocking,
        FolderBlobStore(blob_folder(settings)),
        stream=keys.outcomes(),
        group=GROUP,
        consumer=settings.consumer,
    )
    worker = OutcomeWorker(model, consumer, client, stream=keys.outcomes(), catch_up_seconds=settings.catch_up_seconds)
    model.catch_up = worker.caught_up
    background.start("leases", consumer.run_leases())
    background.start("outcomes", worker.run())


def _grpc_server(settings: ValuePriorSettings, model: ValuePrior, client: Redis) -> GrpcServer:
    async def healthy() -> str | None:
        try:
            await survive(lambda: execute(client, "PING"), client=client, seconds=0)
        except Unavailable as error:
            return str(error)
        return None

    return GrpcServer(
        settings,
        name="value-prior",
        register=lambda server: value_prior_pb2_grpc.add_ValuePriorServiceServicer_to_server(
            ValuePriorServicer(model), server
        ),
        service_names=[SERVICE_NAME],
        healthy=healthy,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has one way to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self._ended.set()

    async def wait_started(self) -> None:
        # uvicorn offers a flag and no event.
        while not self.started and not self._ended.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def wait_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds + 1.0)


def _http_server(settings: ValuePriorSettings, model: ValuePrior, server: GrpcServer) -> _HttpServer:
    app = create_app(
        model,
        token=settings.token,
        max_body_bytes=settings.max_body_bytes,
        unhealthy_cause=lambda: server.unhealthy_cause,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(settings.grace_seconds)),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_ca is None else str(settings.tls_ca),
    )
    return _HttpServer(config)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another with --http-port "
            "(0 takes any free one)",
            reason="PORT_IN_USE",
            port=str(port),
            setting="http_port",
        ) from error


async def _warm_up(model: ValuePrior, store: RedisContextStore) -> None:
    """Rebuilds what was in memory before the restart, so that nobody's first Score waits for it."""
    try:
        for policy_id in (await store.recent())[:8]:
            await model.warm_up(policy_id)
    except RollwiseError as error:
        # Whoever needs that policy gets the error then; the others must not go without a service.
        log.error("warm-up failed", cause=str(error), reason=error.reason)
