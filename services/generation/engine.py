"""What a generation engine is: plain requests in, plain samples out.

Knows no transport, no queue and no model library. An engine is driven from one asyncio loop; cancelling the task that
awaits `generate` frees everything the request holds within one decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FEATURE_TOKENS = 10
"""The prompt feature is the mean over this many last prompt tokens (METHODS.md section 2)."""


class Finish(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"


class UpdateMode(StrEnum):
    """What happens to rollouts in flight when weights change; the contract's enum says more."""

    WAIT = "wait"
    KEEP = "keep"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rollouts are drawn.

    temperature >= 0 (0 is greedy), top_p in (0, 1], top_k >= 0 (0: no limit), max_tokens >= 1. With top_p or top_k the
    log-probs are those of the truncated, renormalised distribution, which is what was sampled from.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`count` rollouts of one prompt, with indices first_index .. first_index + count - 1; count 0 prefills only."""

    prompt: tuple[int, ...]
    count: int
    sampling: Sampling
    request_id: str = ""
    first_index: int = 0
    want_feature: bool = False
    min_policy_version: int | None = None
    time_limit_seconds: float | None = None
    pinned_batch: bool = False
    policy_id: str = ""


@dataclass(slots=True)
class Rollout:
    """One sampled answer. logprobs has one value a token; spans are (policy version, token count) in order."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: Finish
    spans: list[tuple[int, int]]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """Mean hidden state of the last FEATURE_TOKENS prompt tokens at the output of block `layer` (0-based), [hidden]."""

    layer: int
    values: NDArray[np.float32]
    policy_version: int


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The answer to one request; samples are in index order. policy_version is that of the prefill."""

    samples: Sequence[Rollout]
    policy_version: int
    prefix_cached: bool
    feature: Feature | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What a weight update did to the rollouts in flight, and how long it took."""

    policy_version: int
    seconds: float
    kept_rollouts: int = 0
    aborted_rollouts: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot; reading it never waits for work. policy_id is empty and version 0 until weights are loaded."""

    engine: str
    model: str = ""
    policy_id: str = ""
    policy_version: int = 0
    running_rollouts: int = 0
    waiting_requests: int = 0
    generated_tokens: int = 0
    context_length: int = 0
    vocabulary_size: int = 0
    stop_token_ids: tuple[int, ...] = field(default=())
    feature_layer: int = 0


class Engine(Protocol):
    """Samples rollouts from the weights it serves."""

    async def start(self) -> None:
        """Begin serving, with the last acknowledged weights when they still exist."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample; raises InvalidArgument, FailedPrecondition, ResourceExhausted or Unavailable (engine dead)."""

    async def update_weights(
        self,
        path: Path,
        *,
        policy_id: str,
        version: int,
        mode: UpdateMode = UpdateMode.WAIT,
        allow_rollback: bool = False,
        deadline_seconds: float | None = None,
    ) -> UpdateResult:
        """Serve other weights; returns when they serve. When it raises, the old ones go on serving."""

    def status(self) -> EngineStatus:
        """What is served and how busy the engine is."""

    def failure(self) -> str | None:
        """None while the engine can work, else the cause of its death."""

    async def wait_failed(self) -> str:
        """Return the cause once the engine has died; for whoever must end the process."""

    async def close(self) -> None:
        """Stop; unfinished calls fail with Unavailable."""
