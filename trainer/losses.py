"""Clipped policy-gradient loss with truncated importance sampling, summed so that no micro-batch split shows.

Which ratio is clipped. Write pi for the policy being updated (this forward pass), mu for the policy that sampled a
token, with the engine's log-prob. PPO needs an *anchor* log-prob that the ratio starts from; each token has one:

- sampled by the current version: the anchor is the trainer's own log-prob at the start of the step, `old_logprobs`,
  or this very forward pass when the step is the only one on the batch. The ratio starts at exactly 1, so clipping
  binds only by how far the update itself moves. What engine and trainer differ in (kernels, dtype) is no policy change
  and must not be clipped away; it is corrected by the truncated weight w = min(exp(anchor - mu), cap), detached.
- sampled by an older version (`stale`): the anchor is mu. The ratio is exp(pi - mu), so a policy that has moved away
  from its samples since is clipped as PPO clips it, and w is exactly 1.

In both cases ratio x w is exp(pi - mu) up to the cap: every token is corrected once, never twice.

    loss = - sum_t weight_t w_t min(ratio_t A, clip(ratio_t, 1 - clip_low, 1 + clip_high) A)

and, with dual clip c, for A < 0 no smaller than c A (Ye et al. 2020, arXiv 1912.09729). `weight_t` holds the whole
batch's denominator (`token_weights`), so losses and gradients of micro-batches simply add up.

Engine log-probs include the temperature (METHODS.md section 5), so the trainer's must too: `Policy` scales them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from trainer.batch import Sample
from trainer.config import LossSpec


def token_weights(samples: Sequence[Sample], spec: LossSpec) -> list[float]:
    """For each sample, the weight of each of its trained tokens; denominators count trained (unmasked) tokens only.

    With T tokens, S rollouts and P prompts that have at least one trained token, t_i tokens in rollout i and t_p in
    all rollouts of its prompt: token 1/T; sequence 1/(S t_i); prompt 1/(P t_p); constant 1/(S constant_length).
    A rollout without trained tokens weighs 0 and is in no denominator.
    """
    tokens = [sample.trained_tokens for sample in samples]
    total = sum(tokens)
    rollouts = sum(1 for t in tokens if t)
    by_prompt: dict[str, int] = {}
    for sample, t in zip(samples, tokens, strict=True):
        if t:
            by_prompt[sample.group] = by_prompt.get(sample.group, 0) + t

    def weight(sample: Sample, t: int) -> float:
        match spec.aggregation:
            case "token":
                return 1 / total
            case "sequence":
                return 1 / (rollouts * t)
            case "prompt":
                return 1 / (len(by_prompt) * by_prompt[sample.group])
            case "constant":
                assert spec.constant_length is not None
                return 1 / (rollouts * spec.constant_length)

    return [weight(sample, t) if t else 0.0 for sample, t in zip(samples, tokens, strict=True)]


@dataclass(frozen=True)
class TokenInputs:
    """What the loss needs beside the log-probs; tensors of shape (N), one entry a completion token.

    `weight_N` is 0 for tokens that are not trained. `old_logprobs_N` is None when this forward pass is the first on
    the batch.
    """

    engine_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    weight_N: torch.Tensor
    stale_N: torch.Tensor
    old_logprobs_N: torch.Tensor | None = None


@dataclass
class LossStats:
    """Sums over trained tokens, so that micro-batches add up; read the means by the properties."""

    tokens: int = 0
    loss: float = 0.0
    clipped: int = 0
    dual_clipped: int = 0
    capped: int = 0
    stale: int = 0
    ratio_sum: float = 0.0
    entropy_sum: float = 0.0
    log_ratio_sum: float = 0.0
    log_ratio_max: float = 0.0

    def add(self, other: LossStats) -> None:
        """Adds another micro-batch."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name == "log_ratio_max" else mine + theirs)

    def summary(self) -> dict[str, float]:
        """Plain numbers for a metrics record; shares and means are over trained tokens, entropy is in nats."""
        n = max(self.tokens, 1)
        return {
            "loss": self.loss,
            "trained_tokens": float(self.tokens),
            "clip_fraction": self.clipped / n,
            "dual_clip_fraction": self.dual_clipped / n,
            "importance_cap_fraction": self.capped / n,
            "stale_token_fraction": self.stale / n,
            "ratio_mean": self.ratio_sum / n,
            "entropy": self.entropy_sum / n,
            "engine_log_ratio_mean": self.log_ratio_sum / n,
            "engine_log_ratio_max": self.log_ratio_max,
        }


def policy_loss(
    logprobs_N: torch.Tensor, inputs: TokenInputs, spec: LossSpec, *, entropy_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, LossStats]:
    """The loss of one micro-batch (a scalar with gradient) and its statistics.

    Sum over micro-batches, and over processes, to get the batch's loss: nothing is averaged here.
    """
    current = logprobs_N.detach()
    anchor = torch.where(inputs.stale_N, inputs.engine_logprobs_N, _or(inputs.old_logprobs_N, current))
    advantage = inputs.advantages_N
    ratio = torch.exp(logprobs_N - anchor)
    uncapped = torch.exp(anchor - inputs.engine_logprobs_N)
    importance = uncapped.clamp(max=spec.importance_cap)

    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    clipped = (bounded * advantage < ratio * advantage).detach()
    dual = torch.zeros_like(clipped)
    if spec.dual_clip is not None:
        floor = spec.dual_clip * advantage
        dual = ((advantage < 0) & (objective < floor)).detach()
        objective = torch.where(dual, floor, objective)
    trained = inputs.weight_N > 0
    # where, not a product: a masked token may hold an infinite ratio, and 0 x inf is NaN.
    loss = -torch.where(trained, inputs.weight_N * importance * objective, torch.zeros_like(objective)).sum()

    gap = (current - inputs.engine_logprobs_N).abs()[trained]
    stats = LossStats(
        tokens=int(trained.sum()),
        loss=float(loss.detach()),
        clipped=int((clipped & trained).sum()),
        dual_clipped=int((dual & trained).sum()),
        capped=int(((uncapped > spec.importance_cap) & trained).sum()),
        stale=int((inputs.stale_N & trained).sum()),
        ratio_sum=float(ratio.detach()[trained].sum()),
        entropy_sum=float(entropy_N.detach()[trained].sum()) if entropy_N is not None else math.nan,
        log_ratio_sum=float(gap.sum()),
        log_ratio_max=float(gap.max()) if gap.numel() else 0.0,
    )
    return loss, stats


def _or(tensor: torch.Tensor | None, default: torch.Tensor) -> torch.Tensor:
    return default if tensor is None else tensor
