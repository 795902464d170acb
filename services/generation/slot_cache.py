"""Keys and values of the running batch, one slot a rollout, and of a prefill.

A decode step writes one position of every active row in place and reads views: nothing is concatenated or copied.
Active rows are the slots 0 .. active-1; when a row ends, the last active row moves into its slot. Buffers grow by
doubling up to what is asked for and are laid out [layer, key|value, slot, position, head, head_dim].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class PrefillCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """Keeps the keys and values of one forward pass over whole prompts; starts empty and is used once."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._parts: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep [prompts, heads, length, head_dim] of one layer and hand it on unchanged."""
        self._parts.append(torch.stack((keys, values)))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing precedes the prompt."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(key length, key offset) for the causal mask."""
        return query_length, 0

    def stacked(self) -> Tensor:
        """[layer, 2, prompt, position, head, head_dim]."""
        return torch.stack(self._parts).permute(0, 1, 2, 4, 3, 5)


class SlotCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """The preallocated buffer; `begin_step` says where the next token of each active row goes."""

    def __init__(self, *, max_rows: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._buffer: Tensor | None = None
        self._flat: Tensor | None = None
        self._active = 0
        self._length = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(slots, positions) allocated."""
        return (0, 0) if self._buffer is None else (self._buffer.shape[2], self._buffer.shape[3])

    def reserve(self, rows: int, length: int, like: Tensor) -> None:
        """Make room for `rows` slots of `length` positions; `like` is any [layer, 2, ..., head, head_dim].

        `rows` and `length` must cover the active rows. Doubling stops where slots x positions would pass max_tokens;
        then just what is asked for is kept.
        """
        slots, positions = self.shape
        if rows <= slots and length <= positions:
            return
        slots = slots if rows <= slots else min(self._max_rows, max(rows, 2 * slots, 8))
        positions = positions if length <= positions else max(length, 2 * positions, 64)
        if slots * positions > self._max_tokens:
            slots, positions = rows, length
        grown = like.new_zeros((like.shape[0], 2, slots, positions, *like.shape[-2:]))
        if self._buffer is not None:
            kept_slots, kept_positions = min(slots, self.shape[0]), min(positions, self.shape[1])
            grown[:, :, :kept_slots, :kept_positions] = self._buffer[:, :, :kept_slots, :kept_positions]
        self._buffer = grown

    def fill(self, slots: list[int], kept: Tensor) -> None:
        """Copy a prompt's keys and values, [layer, 2, position, head, head_dim], into each of the slots."""
        assert self._buffer is not None
        for slot in slots:
            self._buffer[:, :, slot, : kept.shape[2]] = kept

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        assert self._buffer is not None
        self._buffer[:, :, target, :length] = self._buffer[:, :, source, :length]

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """The next `update`s write position positions[i] of slot i and read the first `longest` positions."""
        assert self._buffer is not None
        slots = torch.arange(len(positions), device=positions.device)
        self._flat = slots * self._buffer.shape[3] + positions
        self._active = len(positions)
        self._length = longest

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [active, heads, 1, head_dim] in place; return views [active, heads, longest, dim]."""
        assert self._buffer is not None
        assert self._flat is not None
        seen = []
        for buffer, new in zip(self._buffer[layer], (keys, values), strict=True):
            buffer.flatten(0, 1).index_copy_(0, self._flat, new[:, :, 0])
            seen.append(buffer[: self._active, : self._length].transpose(1, 2))
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions in view; masks are always given explicitly, so nothing is derived from it."""
        return self._length

    def release(self) -> None:
        """Drop the buffers (another architecture follows)."""
        self._buffer = None
        self._flat = None
