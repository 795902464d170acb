import asyncio
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rollwise.v1 import verifier_pb2 as pb
from rollwise.v1 import verifier_pb2_grpc as rpc

from services.common.errors import (
    ConfigurationError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from services.common.grpc_client import connect, with_retries
from services.common.grpc_server import GrpcServer
from services.common.logging import bind_context, context
from services.common.settings import ServiceSettings

NAME = "rollwise.v1.VerifierService"
Behaviour = Callable[[pb.VerifyRequest, Any], Awaitable[pb.VerifyResponse]]


class Servicer(rpc.VerifierServiceServicer):
    def __init__(self, verify: Behaviour) -> None:
        self._verify = verify

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        return await self._verify(request, context)

    async def CheckReferences(self, request: pb.CheckReferencesRequest, context: Any) -> pb.CheckReferencesResponse:
        return pb.CheckReferencesResponse()


def asking(text: str) -> pb.VerifyRequest:
    return pb.VerifyRequest(items=[pb.VerifyItem(item_id=text)])


async def fine(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
    return pb.VerifyResponse()


@asynccontextmanager
async def serving(
    verify: Behaviour = fine, *, settings: ServiceSettings | None = None, **options: Any
) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(
        settings or ServiceSettings(),
        name="probe",
        register=lambda server: rpc.add_VerifierServiceServicer_to_server(Servicer(verify), server),
        service_names=[NAME],
        **options,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def stub_of(server: GrpcServer, **options: Any) -> AsyncIterator[Any]:
    async with connect(f"127.0.0.1:{server.port}", **options) as channel:
        yield rpc.VerifierServiceStub(channel)


@asynccontextmanager
async def bare_stub_of(server: GrpcServer) -> AsyncIterator[Any]:
    """A client that is not ours."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield rpc.VerifierServiceStub(channel)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


async def test_an_error_arrives_as_the_class_that_was_raised() -> None:
    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        raise ResourceExhausted("all 2 workers are busy — später", reason="BUSY", workers="2")

    async with serving(verify) as server, stub_of(server) as stub:
        with pytest.raises(ResourceExhausted) as caught:
            await stub.Verify(pb.VerifyRequest(), timeout=5)
    assert str(caught.value) == "all 2 workers are busy — später"
    assert (caught.value.reason, caught.value.metadata) == ("BUSY", {"workers": "2"})


async def test_an_unexpected_error_hides_its_text_and_has_an_id_that_the_log_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        raise KeyError("secret detail")

    async with serving(verify) as server, stub_of(server) as stub:
        with pytest.raises(Internal, match="KeyError") as caught:
            await stub.Verify(pb.VerifyRequest(), timeout=5)
    assert "secret detail" not in str(caught.value)
    assert caught.value.metadata["error_id"] in caplog.text
    assert "secret detail" in caplog.text


async def test_a_call_without_a_deadline_is_refused_on_both_sides() -> None:
    async with serving() as server:
        async with stub_of(server) as stub:
            with pytest.raises(InvalidArgument, match="timeout=") as ours:
                await stub.Verify(pb.VerifyRequest())
        async with bare_stub_of(server) as bare:
            with pytest.raises(grpc.aio.AioRpcError) as foreign:
                await bare.Verify(pb.VerifyRequest())
            await bare.Verify(pb.VerifyRequest(), timeout=5)
    assert ours.value.reason == "DEADLINE_REQUIRED"
    assert foreign.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "DEADLINE_REQUIRED" in str(dict(foreign.value.trailing_metadata())["grpc-status-details-bin"])


async def test_a_deadline_that_passes_is_that_error_and_stops_the_work() -> None:
    stopped = asyncio.Event()

    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()
        return pb.VerifyResponse()

    async with serving(verify) as server, stub_of(server) as stub:
        with pytest.raises(DeadlineExceeded):
            await stub.Verify(pb.VerifyRequest(), timeout=0.2)
        async with asyncio.timeout(5):
            await stopped.wait()


async def test_a_client_that_cancels_stops_the_work() -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()
        return pb.VerifyResponse()

    async with serving(verify) as server, stub_of(server) as stub:

        async def call() -> None:
            await stub.Verify(pb.VerifyRequest(), timeout=60)

        task = asyncio.create_task(call())
        async with asyncio.timeout(5):
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stopped.wait()


@pytest.mark.parametrize(("token", "reason"), [(None, "TOKEN_MISSING"), ("wrong", "TOKEN_WRONG"), ("right", None)])
async def test_the_token_is_asked_for(token: str | None, reason: str | None) -> None:
    settings = ServiceSettings(auth_token="right")  # type: ignore[arg-type]
    async with serving(settings=settings) as server, stub_of(server, token=token) as stub:
        if reason is None:
            await stub.Verify(pb.VerifyRequest(), timeout=5)
            return
        with pytest.raises(Unauthenticated) as caught:
            await stub.Verify(pb.VerifyRequest(), timeout=5)
        assert caught.value.reason == reason


async def test_health_is_polled_named_by_service_and_needs_no_token() -> None:
    cause: list[str | None] = [None]

    async def healthy() -> str | None:
        return cause[0]

    async def blocked(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        await asyncio.sleep(60)
        return pb.VerifyResponse()

    answer = health_pb2.HealthCheckResponse
    settings = ServiceSettings(auth_token="right")  # type: ignore[arg-type]
    async with (
        serving(blocked, settings=settings, healthy=healthy, health_seconds=0.05) as server,
        connect(f"127.0.0.1:{server.port}", token="right") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as bare,
    ):
        work = [
            asyncio.ensure_future(rpc.VerifierServiceStub(channel).Verify(pb.VerifyRequest(), timeout=60))
            for _ in range(50)
        ]
        health = health_pb2_grpc.HealthStub(bare)

        async def status(service: str) -> Any:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)).status

        assert [await status(""), await status(NAME)] == [answer.SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        cause[0] = "the engine is gone"
        await asyncio.sleep(0.2)
        assert [await status(""), await status(NAME)] == [answer.NOT_SERVING] * 2
        assert server.unhealthy_cause == "the engine is gone"
        cause[0] = None
        await asyncio.sleep(0.2)
        assert await status("") == answer.SERVING
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def test_a_health_check_that_fails_is_no_health() -> None:
    async def healthy() -> str | None:
        raise OSError("disk gone")

    async with serving(healthy=healthy) as server:
        assert server.unhealthy_cause is not None
        assert "disk gone" in server.unhealthy_cause


async def test_reflection_lists_the_services() -> None:
    async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        call.cancel()
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_calls_are_counted_by_code_and_timed() -> None:
    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        if request.items:
            raise NotFound("no")
        return pb.VerifyResponse()

    async with serving(verify, settings=ServiceSettings(metrics_port=0)) as server, stub_of(server) as stub:
        assert server.metrics_port
        labels = f'method="Verify",service="{NAME}"'

        async def count(side: str, code: str) -> float:
            text = await asyncio.to_thread(scrape, server.metrics_port or 0)
            wanted = f'rollwise_grpc_{side}_handled_total{{code="{code}",{labels}}} '
            return sum(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))

        before = [await count(side, code) for side in ("server", "client") for code in ("OK", "NOT_FOUND")]
        await stub.Verify(pb.VerifyRequest(), timeout=5)
        with pytest.raises(NotFound):
            await stub.Verify(asking("bad"), timeout=5)
        after = [await count(side, code) for side in ("server", "client") for code in ("OK", "NOT_FOUND")]
        text = await asyncio.to_thread(scrape, server.metrics_port)
    assert after == [number + 1 for number in before]
    assert f"rollwise_grpc_server_in_flight{{{labels}}} 0.0" in text
    assert f"rollwise_grpc_server_duration_seconds_count{{{labels}}}" in text


async def test_the_log_context_travels_with_the_call() -> None:
    seen: list[dict[str, object]] = []

    async def verify(request: pb.VerifyRequest, _context: Any) -> pb.VerifyResponse:
        seen.append(context())
        return pb.VerifyResponse()

    async with serving(verify) as server, stub_of(server) as stub:
        bind_context(trace_id="t-1", job_id="j-ü", step=7, private="stays")
        await stub.Verify(pb.VerifyRequest(), timeout=5)
        bind_context(trace_id=None, job_id=None, step=None, private=None)
        await stub.Verify(pb.VerifyRequest(), timeout=5)
    assert seen == [{"trace_id": "t-1", "job_id": "j-?", "step": "7"}, {}]


async def test_a_message_far_above_the_grpc_default_passes() -> None:
    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        assert len(request.items[0].item_id) == 20_000_000
        return pb.VerifyResponse()

    async with serving(verify) as server, stub_of(server) as stub:
        await stub.Verify(asking("x" * 20_000_000), timeout=20)


async def test_a_message_over_the_limit_is_no_busy_server() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
    rpc.add_VerifierServiceServicer_to_server(Servicer(fine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        stub: Any = rpc.VerifierServiceStub(channel)
        with pytest.raises(InvalidArgument, match="send less") as caught:
            await stub.Verify(asking("x" * 2000), timeout=5)
    await server.stop(0)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


async def test_a_port_in_use_is_named_with_its_setting() -> None:
    async with serving() as server:
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{server.port}.*--port or ROLLWISE_PORT") as caught:
            async with serving(settings=ServiceSettings(port=server.port)):
                pass
        assert caught.value.reason == "PORT_IN_USE"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port}.*--metrics-port"):
            async with serving(settings=ServiceSettings(metrics_port=port)):
                pass


async def test_retries_end_with_success_or_the_last_error_and_repeat_nothing_else() -> None:
    tries: list[str] = []

    async def verify(request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        tries.append(request.items[0].item_id)
        if request.items[0].item_id == "bad":
            raise InvalidArgument("bad")
        if request.items[0].item_id == "never" or len(tries) < 3:
            raise Unavailable("not yet")
        return pb.VerifyResponse()

    async with serving(verify) as server, stub_of(server) as stub:

        async def call(request_id: str, deadline: float) -> None:
            request = asking(request_id)
            await with_retries(
                lambda: stub.Verify(request, timeout=5), deadline_seconds=deadline, first_wait_seconds=0.02
            )

        await call("late", 10)
        assert tries == ["late"] * 3
        with pytest.raises(InvalidArgument):
            await call("bad", 10)
        assert tries.count("bad") == 1
        start = time.monotonic()
        with pytest.raises(Unavailable, match="not yet"):
            await call("never", 0.5)
        assert time.monotonic() - start < 2
        assert tries.count("never") > 1


async def test_a_server_that_comes_back_is_found_within_seconds() -> None:
    async with serving() as server:
        port = server.port
        async with connect(f"127.0.0.1:{port}") as channel:
            stub: Any = rpc.VerifierServiceStub(channel)
            await stub.Verify(pb.VerifyRequest(), timeout=5)
            await server.stop(0)
            with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
                await stub.Verify(pb.VerifyRequest(), timeout=5)
            await asyncio.sleep(1.5)
            async with serving(settings=ServiceSettings(port=port)):
                await with_retries(lambda: stub.Verify(pb.VerifyRequest(), timeout=5), deadline_seconds=4)
