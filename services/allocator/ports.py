"""What the allocator needs of the other services, as protocols that know no transport.

Each call takes the seconds it may last and raises an error of services.common.errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollwise.v1 import generation_pb2, value_prior_pb2, verifier_pb2


class PriorPort(Protocol):
    """The value prior."""

    async def score(self, request: value_prior_pb2.ScoreRequest, seconds: float) -> value_prior_pb2.ScoreResponse:
        """P(success) of each prompt."""
        ...


class GenerationPort(Protocol):
    """The generation service."""

    async def generate(
        self, request: generation_pb2.GenerateRequest, seconds: float
    ) -> generation_pb2.GenerateResponse:
        """Rollouts of one prompt."""
        ...


class VerifierPort(Protocol):
    """The verifier."""

    async def verify(self, request: verifier_pb2.VerifyRequest, seconds: float) -> verifier_pb2.VerifyResponse:
        """One verdict an item."""
        ...


@dataclass(frozen=True)
class Ports:
    """The services that one allocator works with."""

    prior: PriorPort
    generation: GenerationPort
    verifier: VerifierPort
