"""One optimizer step on one batch: forward, loss and backward a micro-batch at a time, then the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.errors import InvalidArgument
from trainer.batch import MicroBatch, Sample
from trainer.config import LossSpec
from trainer.losses import LossStats, TokenInputs, policy_loss, token_weights
from trainer.optimizer import Optimizer
from trainer.policy import Policy


@dataclass(frozen=True)
class StepReport:
    """What one step did; `metrics` are plain numbers (see LossStats.summary, plus the optimizer's)."""

    metrics: dict[str, float]


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    samples: Sequence[Sample],
    spec: LossSpec,
    *,
    temperature: float,
    micro_batch_tokens: int,
    on_micro_batch: Callable[[], None] | None = None,
) -> StepReport:
    """Trains on `samples` once. Samples without tokens are ignored; a batch without any trained token is an error.

    `on_micro_batch` is called after each forward and backward pass, so that a caller may show life.
    """
    started = time.monotonic()
    stats = accumulate(
        policy,
        samples,
        spec,
        temperature=temperature,
        micro_batch_tokens=micro_batch_tokens,
        on_micro_batch=on_micro_batch,
    )
    learning_rate = optimizer.learning_rate
    norm = optimizer.step()
    seconds = time.monotonic() - started
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    return StepReport(
        metrics={
            **stats.summary(),
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "update_seconds": seconds,
            "update_tokens_per_second": tokens / max(seconds, 1e-9),
        }
    )


def accumulate(
    policy: Policy,
    samples: Sequence[Sample],
    spec: LossSpec,
    *,
    temperature: float,
    micro_batch_tokens: int,
    on_micro_batch: Callable[[], None] | None = None,
) -> LossStats:
    """Adds the batch's gradient to the parameters and returns its statistics; takes no step.

    The gradient does not depend on `micro_batch_tokens`.
    """
    weights = token_weights(samples, spec)
    if not any(weights):
        raise InvalidArgument(f"none of the {len(samples)} rollouts has a token to train on")
    stats = LossStats()
    for batch in policy.micro_batches(samples, micro_batch_tokens):
        inputs = token_inputs(samples, weights, batch, policy.device)
        current = policy.logprobs(batch, temperature)
        loss, part = policy_loss(current.logprobs_N, inputs, spec, entropy_N=current.entropy_N)
        loss.backward()  # type: ignore[no-untyped-call]
        stats.add(part)
        if on_micro_batch is not None:
            on_micro_batch()
    return stats


def token_inputs(
    samples: Sequence[Sample], weights: Sequence[float], batch: MicroBatch, device: torch.device
) -> TokenInputs:
    """The per-token arrays of one micro-batch, in the order of its flat log-probs."""
    members = [samples[i] for i in batch.members]
    trained = [np.ones(len(s.completion_ids), bool) if s.mask is None else s.mask for s in members]
    stale = [np.zeros(len(s.completion_ids), bool) if s.stale is None else s.stale for s in members]
    weight = [weights[i] * mask.astype(np.float32) for i, mask in zip(batch.members, trained, strict=True)]
    advantage = [np.full(len(s.completion_ids), s.advantage, np.float32) for s in members]

    def flat(arrays: Sequence[np.ndarray[tuple[int], np.dtype[np.generic]]], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate(arrays), dtype=dtype).to(device)

    return TokenInputs(
        engine_logprobs_N=flat([s.engine_logprobs for s in members], torch.float32),
        advantages_N=flat(advantage, torch.float32),
        weight_N=flat(weight, torch.float32),
        stale_N=flat(stale, torch.bool),
    )
