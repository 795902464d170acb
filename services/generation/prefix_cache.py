"""What is left of prompts already prefilled: keys and values, last logits, feature.

Bounded by tokens, least recently used first out. Must be emptied whenever weights change: an entry holds nothing that
says which weights made it, so keeping one across an update would mix policies unnoticed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

Key = tuple[bool, tuple[int, ...]]
"""(pinned, prompt ids): pinned requests share only what was computed in a batch of its own."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """kept [layer, 2, position, head, head_dim]; logits [vocabulary] after the last token; feature [hidden]."""

    kept: Tensor
    logits: Tensor
    feature: Tensor

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return int(self.kept.shape[2])


class PrefixCache:
    """LRU of prefixes holding at most `max_tokens` prompt tokens; 0 keeps nothing."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[Key, Prefix] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Prefix | None:
        """The prefix, now the most recently used, or None."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, prefix: Prefix) -> None:
        """Keep a prefix, dropping the least recently used ones that no longer fit; too long a one is not kept."""
        if prefix.tokens > self._max_tokens or key in self._entries:
            return
        self._entries[key] = prefix
        self.tokens += prefix.tokens
        while self.tokens > self._max_tokens:
            _, dropped = self._entries.popitem(last=False)
            self.tokens -= dropped.tokens

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.tokens = 0
