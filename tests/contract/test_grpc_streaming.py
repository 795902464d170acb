import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound
from services.common.grpc_client import connect
from services.common.grpc_server import GrpcServer
from services.common.settings import ServiceSettings


def streams() -> grpc.GenericRpcHandler:
    """Bytes in, bytes out, for the kinds of call that the contract has no method of."""

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()
        raise NotFound("no more", reason="THE_END")

    async def total(requests: AsyncIterator[bytes], context: Any) -> bytes:
        numbers = [int(request) async for request in requests]
        if not numbers:
            raise InvalidArgument("nothing to add")
        return str(sum(numbers)).encode()

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"boom":
                raise ValueError("boom")
            yield request

    async def forever(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield b"tick"
            await asyncio.sleep(0.01)

    return grpc.method_handlers_generic_handler(
        "probe.Streams",
        {
            "Count": grpc.unary_stream_rpc_method_handler(count),
            "Total": grpc.stream_unary_rpc_method_handler(total),
            "Echo": grpc.stream_stream_rpc_method_handler(echo),
            "Forever": grpc.unary_stream_rpc_method_handler(forever),
        },
    )


async def test_streaming_calls_are_guarded_and_translated_as_well() -> None:
    def register(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((streams(),))

    server = GrpcServer(ServiceSettings(), name="probe", register=register, service_names=[])
    await server.start()

    async def send(*messages: bytes) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    try:
        async with connect(f"127.0.0.1:{server.port}") as channel:
            got = []
            with pytest.raises(NotFound) as end:
                async for message in channel.unary_stream("/probe.Streams/Count")(b"3", timeout=5):
                    got.append(message)
            assert (got, end.value.reason) == ([b"0", b"1", b"2"], "THE_END")
            assert await channel.stream_unary("/probe.Streams/Total")(send(b"1", b"2"), timeout=5) == b"3"
            with pytest.raises(InvalidArgument, match="nothing to add"):
                await channel.stream_unary("/probe.Streams/Total")(send(), timeout=5)
            with pytest.raises(Internal, match="ValueError"):
                async for message in channel.stream_stream("/probe.Streams/Echo")(send(b"a", b"boom"), timeout=5):
                    assert message == b"a"
            with pytest.raises(DeadlineExceeded):
                async for _ in channel.unary_stream("/probe.Streams/Forever")(b"", timeout=0.3):
                    pass
            with pytest.raises(InvalidArgument, match="timeout="):
                async for _ in channel.unary_stream("/probe.Streams/Count")(b"1"):
                    pass
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as bare:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in bare.unary_stream("/probe.Streams/Count")(b"1"):
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await server.stop(0)
