"""The ports over gRPC. What may succeed later is tried again until the caller's time is over, the rest raised at once.

All three calls are idempotent: a repeated Generate asks for the same rollout indexes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from rollwise.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    value_prior_pb2,
    value_prior_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

from services.allocator.metrics import CALLS_RETRIED
from services.allocator.ports import Ports
from services.common.errors import FailedPrecondition, Internal, ResourceExhausted, Unavailable
from services.common.grpc_client import with_retries

T = TypeVar("T")

# The generation server is starting, or the trainer's next weights are on their way.
NOT_YET = frozenset({"NO_WEIGHTS", "VERSION_TOO_OLD", "POLICY_MISMATCH"})


class NotYet(Unavailable):
    """The service is there and will be able to do this later."""


class GrpcPrior:
    """The value prior at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: value_prior_pb2_grpc.ValuePriorServiceAsyncStub = value_prior_pb2_grpc.ValuePriorServiceStub(
            channel
        )

    async def score(self, request: value_prior_pb2.ScoreRequest, seconds: float) -> value_prior_pb2.ScoreResponse:
        """See PriorPort."""
        return await _patiently("value prior", lambda left: self._stub.Score(request, timeout=left), seconds)


class GrpcGeneration:
    """The generation service at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def generate(
        self, request: generation_pb2.GenerateRequest, seconds: float
    ) -> generation_pb2.GenerateResponse:
        """See GenerationPort."""
        return await _patiently("generation", lambda left: self._stub.Generate(request, timeout=left), seconds)


class GrpcVerifier:
    """The verifier at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)

    async def verify(self, request: verifier_pb2.VerifyRequest, seconds: float) -> verifier_pb2.VerifyResponse:
        """See VerifierPort."""
        return await _patiently("verifier", lambda left: self._stub.Verify(request, timeout=left), seconds)


def ports(prior: grpc.aio.Channel, generation: grpc.aio.Channel, verifier: grpc.aio.Channel) -> Ports:
    """The three services by their channels."""
    return Ports(GrpcPrior(prior), GrpcGeneration(generation), GrpcVerifier(verifier))


async def _patiently(service: str, call: Callable[[float], Awaitable[T]], seconds: float) -> T:
    end = time.monotonic() + seconds

    async def once() -> T:
        try:
            return await call(max(0.01, end - time.monotonic()))
        except FailedPrecondition as error:
            if error.reason in NOT_YET:
                raise NotYet(error.message, reason=error.reason, **error.metadata) from error
            raise
        except Internal as error:
            # How a server that is told to stop ends the calls that outlast its grace.
            if error.reason == "CANCELLED":
                raise NotYet(error.message, reason=error.reason) from error
            raise

    return await with_retries(
        once,
        deadline_seconds=seconds,
        retry_on=(Unavailable, ResourceExhausted),
        on_retry=lambda _: CALLS_RETRIED.labels(service).inc(),
    )
