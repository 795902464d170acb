"""The rollouts of a step as the model sees them, and how they are laid out in padded micro-batches.

Rollouts of one prompt share a row: the prompt once, then their completions side by side, each of which attends to
the prompt and to itself only. For short answers that saves most of the work (eight answers of 16 tokens to a prompt
of 60: 188 tokens instead of 608), and it changes no number, since positions go on from the prompt in every
completion. Masks come from lengths and segments; no token id is looked at, so padding may equal the end token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.errors import InvalidArgument

PACK_TOKENS = 512
"""Longest row that completions are packed into: past it, attention among strangers costs more than sharing saves."""


@dataclass(frozen=True)
class Sample:
    """One rollout, ready for training. Arrays are one-dimensional; all but `prompt_ids` have one entry a token sampled.

    `group` names the group (any hashable id that is equal for siblings only). `engine_logprobs` are those of the
    policy that sampled the token, temperature included. `stale` marks tokens that an older policy version sampled;
    `mask` tokens to be trained (default: all).
    """

    group: str
    prompt_ids: npt.NDArray[np.uint32]
    completion_ids: npt.NDArray[np.uint32]
    engine_logprobs: npt.NDArray[np.float32]
    advantage: float
    stale: npt.NDArray[np.bool_] | None = None
    mask: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        tokens = len(self.completion_ids)
        if not len(self.prompt_ids):
            raise InvalidArgument(f"a rollout of group {self.group!r} has an empty prompt")
        if not np.isfinite(self.advantage):
            raise InvalidArgument(f"a rollout of group {self.group!r} has advantage {self.advantage}")
        for name in ("engine_logprobs", "stale", "mask"):
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise InvalidArgument(
                    f"a rollout of group {self.group!r} has {tokens} tokens but {len(values)} entries in {name}"
                )
        if tokens and not bool(np.isfinite(self.engine_logprobs).all()):
            raise InvalidArgument(f"a rollout of group {self.group!r} has log-probs that are not finite")

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss."""
        return len(self.completion_ids) if self.mask is None else int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class Row:
    """One prompt and the completions (indices into the step's samples) that share it."""

    prompt: int
    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class MicroBatch:
    """A padded block of rows. B rows, L padded tokens a row, N completion tokens in all.

    `members` are sample indices in the order in which their tokens lie in the flat (N) arrays; `lengths` their token
    counts. `predicted_from_N` are positions in the flattened (B*L) hidden states whose next token is `targets_N`.
    `allowed_B1LL` is True where attention is allowed, or None when plain causal attention does.
    """

    members: tuple[int, ...]
    lengths: tuple[int, ...]
    input_ids_BL: torch.Tensor
    positions_BL: torch.Tensor
    allowed_B1LL: torch.Tensor | None
    predicted_from_N: torch.Tensor
    targets_N: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same block on another device."""
        move = [self.input_ids_BL, self.positions_BL, self.allowed_B1LL, self.predicted_from_N, self.targets_N]
        return MicroBatch(self.members, self.lengths, *(None if t is None else t.to(device) for t in move))  # type: ignore[arg-type]


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, *, pack: bool = True, pad_id: int = 0
) -> Iterable[MicroBatch]:
    """Lays samples out in blocks of at most `max_tokens` padded tokens (one row at least), longest rows first.

    The order depends on the samples only, so a run can be repeated. Samples without a token are left out.
    """
    rows = sorted(
        _rows(samples, min(PACK_TOKENS, max_tokens) if pack else 0), key=lambda row: (-row.tokens, row.members)
    )
    start = 0
    while start < len(rows):
        fits = max(1, max_tokens // rows[start].tokens)
        yield _collate(samples, rows[start : start + fits], pad_id)
        start += fits


def _rows(samples: Sequence[Sample], pack_tokens: int) -> list[Row]:
    by_prompt: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        if len(sample.completion_ids):
            by_prompt.setdefault(np.asarray(sample.prompt_ids, np.uint32).tobytes(), []).append(i)
    rows = []
    for siblings in by_prompt.values():
        prompt_tokens = len(samples[siblings[0]].prompt_ids)
        open_row: list[int] = []
        used = prompt_tokens
        for i in siblings:
            more = len(samples[i].completion_ids)
            if open_row and used + more > pack_tokens:
                rows.append(Row(open_row[0], tuple(open_row), used))
                open_row, used = [], prompt_tokens
            open_row.append(i)
            used += more
        rows.append(Row(open_row[0], tuple(open_row), used))
    return rows


def _collate(samples: Sequence[Sample], rows: Sequence[Row], pad_id: int) -> MicroBatch:
    width = rows[0].tokens
    ids = np.full((len(rows), width), pad_id, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segment = np.full((len(rows), width), -1, np.int64)  # -1 padding, 0 prompt, 1.. completions
    members, lengths, sources, targets = [], [], [], []
    for r, row in enumerate(rows):
        prompt = samples[row.prompt].prompt_ids
        p = len(prompt)
        ids[r, :p], positions[r, :p], segment[r, :p] = prompt, np.arange(p), 0
        at = p
        for s, i in enumerate(row.members, start=1):
            completion = samples[i].completion_ids
            n = len(completion)
            ids[r, at : at + n], positions[r, at : at + n], segment[r, at : at + n] = completion, np.arange(p, p + n), s
            members.append(i)
            lengths.append(n)
            sources.append(r * width + np.concatenate(([p - 1], np.arange(at, at + n - 1))))
            targets.append(np.asarray(completion, np.int64))
            at += n
    allowed = None
    if any(len(row.members) > 1 for row in rows):
        seg = torch.from_numpy(segment)
        query, key = seg[:, :, None], seg[:, None, :]
        # Padding attends to itself: a row of the softmax without any key would be NaN.
        allowed = (((key == query) | ((key == 0) & (query > 0))) & torch.ones(width, width, dtype=torch.bool).tril())[
            :, None
        ]
    return MicroBatch(
        members=tuple(members),
        lengths=tuple(lengths),
        input_ids_BL=torch.from_numpy(ids),
        positions_BL=torch.from_numpy(positions),
        allowed_B1LL=allowed,
        predicted_from_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=torch.from_numpy(np.concatenate(targets)),
    )
