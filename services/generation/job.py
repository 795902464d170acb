"""One request on its way through the scheduler: what it still wants, what it has, and its answer."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.generation.engine import Feature, Finish, GenerationRequest, GenerationResult, Rollout
from services.generation.model import LoadedModel
from services.generation.running_batch import Row, new_row


@dataclass(slots=True, eq=False)
class Job:
    """A request with its future. `unseated` are indices of rollouts that have not started."""

    request: GenerationRequest
    future: Future[GenerationResult] = field(default_factory=Future)
    deadline: float = float("inf")
    seed: int = 0
    unseated: deque[int] = field(default_factory=deque)
    done: dict[int, Rollout] = field(default_factory=dict)
    prefill_version: int | None = None
    prefix_cached: bool = False
    feature: Feature | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, request: GenerationRequest) -> Job:
        """A job that arrived now. Without a seed its noise comes from the operating system's entropy."""
        limit = request.time_limit_seconds
        seed = request.sampling.seed
        return cls(
            request,
            deadline=float("inf") if limit is None else time.monotonic() + limit,
            seed=secrets.randbits(64) if seed is None else seed,
            unseated=deque(range(request.first_index, request.first_index + request.count)),
        )

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.future.done()

    @property
    def started(self) -> bool:
        """Whether its prompt was prefilled."""
        return self.prefill_version is not None

    @property
    def complete(self) -> bool:
        """Whether every rollout has ended."""
        return self.started and len(self.done) == self.request.count

    def reach(self, context: int) -> int:
        """Positions one of its rollouts may need."""
        return min(len(self.request.prompt) + self.request.sampling.max_tokens, context)

    def rows(self, count: int, model: LoadedModel) -> list[Row]:
        """Take the next `count` rollouts as rows."""
        request = self.request
        stops = frozenset(request.sampling.stop_token_ids or model.stop_token_ids)
        limit = self.reach(model.context_length) - len(request.prompt)
        return [
            new_row(self, request.prompt, self.unseated.popleft(), request.sampling, stops, limit, self.seed)
            for _ in range(count)
        ]

    def close_unseated(self, finish: Finish) -> None:
        """End the rollouts that never started, without tokens."""
        while self.unseated:
            index = self.unseated.popleft()
            self.done[index] = Rollout(index, [], [], finish, [])

    def resolve(self, version: int) -> None:
        """Answer the caller, if there still is one."""
        served = version if self.prefill_version is None else self.prefill_version
        samples = [self.done[index] for index in sorted(self.done)]
        # The caller may have cancelled between two looks; then there is nobody to tell.
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(GenerationResult(samples, served, self.prefix_cached, self.feature))

    def fail(self, error: Exception) -> None:
        """Fail the caller, if there still is one."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


def check_request(
    request: GenerationRequest, model: LoadedModel | None, policy_id: str, version: int, *, max_tokens: int
) -> LoadedModel:
    """Raise when the request cannot be served by what is loaded; max_tokens bounds one rollout's positions."""
    if model is None:
        raise FailedPrecondition(
            "no weights are loaded yet; send UpdateWeights first, or start the service with --model",
            reason="NO_WEIGHTS",
        )
    if request.policy_id and request.policy_id != policy_id:
        raise FailedPrecondition(
            f"the engine serves policy {policy_id!r}, not {request.policy_id!r}; update its weights first",
            reason="POLICY_MISMATCH",
            served_policy_id=policy_id,
        )
    if request.min_policy_version is not None and version < request.min_policy_version:
        raise FailedPrecondition(
            f"the engine serves policy version {version}, older than the {request.min_policy_version} asked for",
            reason="VERSION_TOO_OLD",
            served_policy_version=str(version),
        )
    _check_numbers(request)
    length, context = len(request.prompt), model.context_length
    if length > context or (length == context and request.count):
        raise InvalidArgument(
            f"the prompt has {length} tokens and the context {context}: no room for an answer; shorten the prompt",
            reason="PROMPT_TOO_LONG",
            prompt_tokens=str(length),
            context_length=str(context),
        )
    reach = min(length + request.sampling.max_tokens, context) if request.count else length
    if reach > max_tokens:
        raise InvalidArgument(
            f"one rollout may take {reach} positions, more than the engine's max_batch_tokens {max_tokens}; lower "
            "max_tokens or raise the setting",
            reason="ROLLOUT_TOO_LONG",
        )
    top = max(request.prompt)
    if top >= model.vocabulary_size or min(request.prompt) < 0:
        raise InvalidArgument(
            f"prompt token id {top} is outside the vocabulary 0..{model.vocabulary_size - 1}; the prompt was made "
            "with another tokenizer",
            reason="TOKEN_OUTSIDE_VOCABULARY",
        )
    return model


def _check_numbers(request: GenerationRequest) -> None:
    sampling = request.sampling
    limit = request.time_limit_seconds
    problems = [
        (not request.prompt, "prompt_token_ids is empty; sample from at least one token (for example BOS)"),
        (not 0 <= sampling.temperature < float("inf"), f"temperature {sampling.temperature} must be finite and >= 0"),
        (not 0 < sampling.top_p <= 1, f"top_p {sampling.top_p} must be in (0, 1]"),
        (request.count > 0 and sampling.max_tokens < 1, "max_tokens must be at least 1"),
        (limit is not None and not limit > 0, f"time_limit_seconds {limit} must be above 0"),
        (request.count > MAX_COUNT, f"count {request.count} is above {MAX_COUNT}; ask in several calls"),
    ]
    for wrong, message in problems:
        if wrong:
            raise InvalidArgument(message, reason="BAD_REQUEST")


MAX_COUNT = 4096
