"""From checked rows to token ids, and the order in which prompts are trained.

Token ids are made once, here, by the tokenizer's own chat template; nothing downstream decodes or encodes them again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rollwise.v1 import common_pb2

from services.common.errors import InvalidArgument
from trainer.config import PromptFormat
from trainer.data import DataSet, Entry, hash_seed
from trainer.rows import DataError, Problem


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to be sent: what is sampled from (`token_ids`), what is asked (`text`), what is expected."""

    id: str
    row: int
    token_ids: npt.NDArray[np.uint32]
    text: str
    reference: common_pb2.Reference


class PromptBuilder:
    """Formats rows for one policy.

    With a chat template the ids are exactly `apply_chat_template(messages, add_generation_prompt=True)`, which places
    the begin-of-sequence token itself. Without one (`tiny`, base models) the text is

        system, then for every example prompt and answer, then the prompt, joined by line ends

    encoded by the tokenizer, which adds what it adds (a begin-of-sequence token if it is made so); the answer is
    expected right behind. Rows with `messages` need a chat template.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat, *, context_length: int, max_tokens: int) -> None:
        if max_tokens >= context_length:
            raise InvalidArgument(
                f"sampling.max_tokens is {max_tokens}, but the policy's context holds {context_length} tokens in all"
            )
        self.tokenizer = tokenizer
        self.format = prompt_format
        self.limit = context_length - max_tokens
        self._limit_says = f"the context of {context_length} tokens leaves {self.limit} beside max_tokens {max_tokens}"

    def build(self, entry: Entry) -> Prompt:
        """The prompt of one row; InvalidArgument, without the row's number, when it does not fit."""
        token_ids = np.asarray(self._encode(entry), dtype=np.uint32)
        if not len(token_ids):
            raise InvalidArgument("the prompt has no token")
        if len(token_ids) > self.limit:
            raise InvalidArgument(f"the prompt has {len(token_ids)} tokens; {self._limit_says}")
        bos = getattr(self.tokenizer, "bos_token_id", None)
        if bos is not None and len(token_ids) > 1 and token_ids[0] == bos and token_ids[1] == bos:
            raise InvalidArgument("the prompt starts with two begin-of-sequence tokens; take one out of the text")
        return Prompt(entry.id, entry.number, token_ids, entry.text, entry.row.reference())

    def build_all(self, data: DataSet) -> list[Prompt]:
        """The prompts of a data set, in its order; DataError lists every row that does not fit."""
        prompts: list[Prompt] = []
        problems: list[Problem] = []
        for entry in data.entries:
            try:
                prompts.append(self.build(entry))
            except InvalidArgument as error:
                problems.append(Problem(entry.number, "", str(error)))
        if problems:
            raise DataError(data.source, problems)
        return prompts

    def _encode(self, entry: Entry) -> Sequence[int]:
        row = entry.row
        if getattr(self.tokenizer, "chat_template", None):
            messages = (
                [m.model_dump() for m in row.messages] if row.messages is not None else self._messages(row.prompt)
            )
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            ids: Sequence[int] = encoded["input_ids"]
            return ids
        if row.messages is not None:
            raise InvalidArgument("the row has messages, but this policy has no chat template; give a prompt")
        ids = self.tokenizer(self._plain(row.prompt))["input_ids"]
        eos = getattr(self.tokenizer, "eos_token_id", None)
        # Some tokenizers end every text; an answer must be able to follow.
        return ids[:-1] if eos is not None and len(ids) > 1 and ids[-1] == eos else ids

    def _messages(self, prompt: str | None) -> list[dict[str, str]]:
        assert prompt is not None
        messages = [{"role": "system", "content": self.format.system}] if self.format.system is not None else []
        for example in self.format.examples:
            messages.append({"role": "user", "content": example.prompt})
            messages.append({"role": "assistant", "content": example.answer})
        return [*messages, {"role": "user", "content": prompt}]

    def _plain(self, prompt: str | None) -> str:
        assert prompt is not None
        parts = [self.format.system] if self.format.system is not None else []
        for example in self.format.examples:
            parts += [example.prompt, example.answer]
        return "\n".join([*parts, prompt])


class PromptSampler:
    """Every prompt once an epoch, in an order drawn from (seed, epoch).

    The position, one integer, is the number of prompts drawn since the start; it is the whole state, and prompt number
    n is the same whether the run was interrupted or not.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise InvalidArgument("there is no prompt to sample", reason="EMPTY_DATA")
        self.size = size
        self.seed = seed
        self.position = 0
        self._order: tuple[int, list[int]] | None = None

    def next(self) -> int:
        """Index of the next prompt."""
        index = self.at(self.position)
        self.position += 1
        return index

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.next()

    def at(self, position: int) -> int:
        """Index of the prompt at a position; does not move."""
        epoch, place = divmod(position, self.size)
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.size))
            random.Random(hash_seed("prompt order", self.seed, epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]

    def state(self) -> dict[str, int]:
        """Plain JSON for the checkpoint."""
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on from a state; InvalidArgument when it belongs to other data or another seed."""
        for name in ("size", "seed"):
            if state[name] != getattr(self, name):
                raise InvalidArgument(
                    f"the checkpoint's prompt order has {name} {state[name]}, this run {getattr(self, name)}: "
                    "resume needs the same data and seed"
                )
        self.position = int(state["position"])
