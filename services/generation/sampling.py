"""Draws one token a row from logits, with noise that depends on nothing but (seed, rollout index, token position).

Every rollout has its own SplitMix64 stream (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
whose start is a hash of seed and index; its draw for position t is a pure function of t. So batching, order and other
traffic leave the noise alone. One uniform a token goes through the inverse of the cumulative distribution, which is
exact and costs two passes over the logits instead of a random number a vocabulary entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 256


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection of 64-bit words that spreads every input bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def stream_key(seed: int, index: int) -> int:
    """Start of the noise stream of rollout `index` under `seed` (both taken modulo 2**64)."""
    words = np.array([index % 2**64, seed % 2**64], dtype=np.uint64)
    hashed = _mix(words + _GOLDEN)
    return int(_mix(hashed[:1] * _GOLDEN ^ hashed[1:])[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) a row, [rows], from stream keys and token positions (0 is the first sampled token)."""
    words = _mix(keys + (positions + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row parameters, [rows] each. plain is True when every row has T = 1 and no truncation."""

    temperature: Tensor
    top_p: tuple[float, ...]
    top_k: tuple[int, ...]

    @property
    def truncated(self) -> bool:
        """Whether any row limits the vocabulary."""
        return any(p < 1.0 for p in self.top_p) or any(k > 0 for k in self.top_k)


def sample(logits: Tensor, rows: SamplingRows, noise: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Token ids [rows] int64 and their log-probs [rows] float32 from float32 logits [rows, vocabulary] (overwritten).

    The log-prob is that of softmax(logits / temperature); at temperature 0 the token is the argmax and the log-prob
    that of softmax(logits). With top_k or top_p (applied in this order, after the temperature) it is renormalised
    over what is left.
    """
    greedy = rows.temperature == 0
    any_greedy = bool(greedy.any())
    best = logits.argmax(-1) if any_greedy else None
    scale = torch.where(greedy, 1.0, rows.temperature)
    if bool((scale != 1.0).any()):
        logits.div_(scale[:, None])
    if rows.truncated:
        _truncate(logits, rows)
    logits.sub_(logits.amax(-1, keepdim=True))
    mass = logits.exp()
    token, total = _invert(mass, torch.from_numpy(noise).to(logits.device))
    if best is not None:
        token = torch.where(greedy, best, token)
    logprob = logits.gather(-1, token[:, None])[:, 0].double() - total.log()
    return token, logprob.float()


def _invert(mass: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative mass exceeds noise * total, and the total, with float64 sums.

    In two levels: a cumulative sum over blocks finds the block, one inside it finds the entry. A strict comparison
    never picks an entry of mass 0.
    """
    rows, vocabulary = mass.shape
    whole = vocabulary // _BLOCK * _BLOCK
    blocks = mass[:, :whole].reshape(rows, -1, _BLOCK).sum(-1, dtype=torch.float64)
    if whole < vocabulary:
        blocks = torch.cat([blocks, mass[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    cumulative = blocks.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(cumulative, target, right=True)
    before = cumulative.gather(-1, block) - blocks.gather(-1, block)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(-1, columns.clamp(max=vocabulary - 1)).double()
    inside = inside.masked_fill(columns >= vocabulary, 0.0).cumsum(-1)
    last = inside[:, -1:]
    rest = torch.minimum((target - before).clamp(min=0.0), torch.nextafter(last, torch.zeros_like(last)))
    entry = torch.searchsorted(inside, rest, right=True)
    return (block * _BLOCK + entry)[:, 0], total[:, 0]


def _truncate(logits: Tensor, rows: SamplingRows) -> None:
    """Set what top_k and top_p leave out to minus infinity, in place; at least the best entry stays."""
    for row, (top_p, top_k) in enumerate(zip(rows.top_p, rows.top_k, strict=True)):
        if top_p >= 1.0 and top_k <= 0:
            continue
        ordered, order = logits[row].sort(descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if top_k > 0:
            keep[top_k:] = False
        if top_p < 1.0:
            weights = ordered.masked_fill(~keep, -torch.inf).double().softmax(-1)
            # An entry stays while the mass before it is below top_p: the smallest set that reaches top_p.
            keep &= weights.cumsum(-1) - weights < top_p
            keep[0] = True
        logits[row, order[~keep]] = -torch.inf
