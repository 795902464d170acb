"""The rollouts being decoded right now: one row each, advanced together, one token a step.

Single-threaded; driven by the scheduler. Knows the model and its buffers, not requests' queues or futures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.generation.engine import Finish, Rollout, Sampling
from services.generation.model import LoadedModel
from services.generation.prefix_cache import Prefix
from services.generation.sampling import SamplingRows, sample, stream_key, uniforms
from services.generation.slot_cache import SlotCache

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Row:
    """One rollout in flight. limit is the number of tokens it may sample; tag is the owner's, opaque here."""

    tag: object
    prompt: tuple[int, ...]
    index: int
    sampling: Sampling
    stops: frozenset[int]
    limit: int
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """Positions the row may come to need."""
        return len(self.prompt) + self.limit

    @property
    def position(self) -> int:
        """Where the last sampled token stands, which is the next one to be fed."""
        return len(self.prompt) + len(self.tokens) - 1

    def take(self, token: int, logprob: float, version: int) -> Finish | None:
        """Record one token; says why the rollout is over, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))
        if token in self.stops:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.limit else None

    def closed(self, finish: Finish) -> Rollout:
        """The rollout as it stands."""
        return Rollout(self.index, self.tokens, self.logprobs, finish, self.spans)


def new_row(
    tag: object, prompt: tuple[int, ...], index: int, sampling: Sampling, stops: frozenset[int], limit: int, seed: int
) -> Row:
    """A row that has sampled nothing yet; its noise is that of (seed, index)."""
    return Row(tag, prompt, index, sampling, stops, limit, stream_key(seed, index))


class RunningBatch:
    """Active rows in slots 0 .. n-1 of a SlotCache. `finished` gets each row that ends by itself, with the reason."""

    def __init__(self, *, max_rows: int, max_tokens: int, finished: Callable[[Row, Finish], None]) -> None:
        self.rows: list[Row] = []
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._finished = finished
        self._cache = SlotCache(max_rows=max_rows, max_tokens=max_tokens)
        self._reach = 0
        self.step_seconds = 0.0

    def room(self, reach: int) -> int:
        """How many more rows that need `reach` positions fit beside the active ones (rows x longest is bounded)."""
        longest = max(reach, self._reach)
        return max(0, min(self._max_rows, self._max_tokens // longest) - len(self.rows))

    def join(self, model: LoadedModel, arrivals: list[tuple[Row, Prefix]], version: int) -> None:
        """Sample the first token of new rows from their prompts' last logits, and give those that go on a slot."""
        if not arrivals:
            return
        rows = [row for row, _ in arrivals]
        logits = torch.stack([prefix.logits for _, prefix in arrivals])
        going = [
            (row, prefix)
            for (row, prefix), ended in zip(arrivals, self._draw(rows, logits, version), strict=True)
            if not ended
        ]
        self._seat(going, model)

    def step(self, model: LoadedModel, version: int) -> None:
        """Advance every active row by one token."""
        began = time.perf_counter()
        rows = list(self.rows)
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=model.device)
        positions = torch.tensor([row.position for row in rows], device=model.device)
        longest = max(row.position for row in rows) + 1
        self._cache.reserve(len(rows), longest, self._like)
        logits = model.decode(tokens, positions, longest, self._cache)
        ended = self._draw(rows, logits, version)
        self._remove([slot for slot, over in enumerate(ended) if over])
        self.step_seconds = time.perf_counter() - began

    def drop(self, leaves: Callable[[Row], bool]) -> list[Row]:
        """Take out the rows for which `leaves` holds, whatever they were doing."""
        slots = [slot for slot, row in enumerate(self.rows) if leaves(row)]
        gone = [self.rows[slot] for slot in slots]
        self._remove(slots)
        return gone

    def rebuild(self, model: LoadedModel, max_padded_tokens: int) -> None:
        """Compute every active row's keys and values anew, under the weights that `model` now has."""
        rows, self.rows = self.rows, []
        for part in chunks(rows, lambda row: row.position, max_padded_tokens):
            # The last sampled token is still to be fed; everything before it is history.
            prefixes = model.prefill([[*row.prompt, *row.tokens[:-1]] for row in part])
            self._seat(list(zip(part, prefixes, strict=True)), model)

    def release(self) -> None:
        """Forget the buffers; only without active rows."""
        assert not self.rows
        self._cache.release()

    def _seat(self, rows: list[tuple[Row, Prefix]], model: LoadedModel) -> None:
        if not rows:
            return
        self._like = rows[0][1].kept
        longest = max(row.position + 1 for row in [*self.rows, *(row for row, _ in rows)])
        self._cache.reserve(len(self.rows) + len(rows), longest, self._like)
        for row, prefix in rows:
            self._cache.fill([len(self.rows)], prefix.kept)
            self.rows.append(row)
        self._reach = max(row.reach for row in self.rows)

    def _draw(self, rows: list[Row], logits: Tensor, version: int) -> list[bool]:
        keys = np.array([row.key for row in rows], dtype=np.uint64)
        counts = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
        parameters = SamplingRows(
            torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32, device=logits.device),
            tuple(row.sampling.top_p for row in rows),
            tuple(row.sampling.top_k for row in rows),
        )
        tokens, logprobs = sample(logits, parameters, uniforms(keys, counts))
        ended = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            finish = row.take(token, logprob, version)
            if finish is not None:
                self._finished(row, finish)
            ended.append(finish is not None)
        return ended

    def _remove(self, slots: list[int]) -> None:
        """Free slots, highest first, so that the last active row always is one that stays or is the freed one."""
        for slot in sorted(slots, reverse=True):
            last = self.rows.pop()
            if slot < len(self.rows):
                self._cache.move(len(self.rows), slot, last.position)
                self.rows[slot] = last
        if slots:
            self._reach = max((row.reach for row in self.rows), default=0)


def chunks(items: Iterable[T], length: Callable[[T], int], max_padded: int) -> list[list[T]]:
    """Split into parts of similar length whose padded size (count x longest) is at most `max_padded`, or single."""
    parts: list[list[T]] = []
    for item in sorted(items, key=length):
        if parts and (len(parts[-1]) + 1) * length(item) <= max_padded:
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts
