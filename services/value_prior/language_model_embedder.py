"""Embeds prompts with a frozen language model's hidden states.

Features from a language model predict success better than sentence embeddings do (METHODS section 3). Any Hugging Face
causal-model folder will do; `smollm2` is the small one that comes as a package. Knows nothing of policies or outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import InvalidArgument
from services.value_prior.embedder import SIZES, Vectors, size_features
from services.value_prior.records import Prompt

LAST_TOKENS = 10


class LanguageModelEmbedder:
    """Mean hidden state of the last 10 tokens and of all tokens at the output of one block, float32.

    `layer` is the 0-based block index, by default at two thirds of the depth. Texts are cut on the left to `max_tokens`
    (the question usually comes last). Sequences run in batches padded on the right, of about equal length; with causal
    attention the padding cannot reach the real tokens, so neighbours only change the last bits, which are rounded off.
    """

    direct = SIZES

    def __init__(
        self,
        folder: Path,
        *,
        layer: int | None = None,
        max_tokens: int = 1024,
        batch_tokens: int = 4096,
        threads: int = 1,
    ) -> None:
        if not (folder / "config.json").is_file():
            raise InvalidArgument(
                f"embedder: {folder} holds no config.json; give 'hashing', 'smollm2', 'policy' or a model folder"
            )
        # After the check: these take seconds.
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self._model = model.eval()
        depth = int(model.config.num_hidden_layers)
        self._layer = round(depth * 2 / 3) if layer is None else layer
        if not 0 <= self._layer < depth:
            raise InvalidArgument(f"embedder_layer is {layer}, the model has blocks 0 to {depth - 1}")
        if hasattr(model, "layers") and hasattr(model, "norm"):
            # Later blocks are not needed, and the final norm would hide the chosen block's own output.
            model.layers = model.layers[: self._layer + 1]
            model.norm = torch.nn.Identity()
        elif self._layer == depth - 1:
            raise InvalidArgument(f"embedder_layer {self._layer} is the last block, which this architecture norms")
        self._max_tokens = max_tokens
        self._batch_tokens = batch_tokens
        config = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=4).hexdigest()
        self.name = f"lm-{config}-{self._layer}-{max_tokens}"

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any text can be embedded."""

    def embed(self, prompts: Sequence[Prompt]) -> Vectors:
        """See `Embedder`; columns are sizes, then the last tokens' mean, then the mean over all."""
        token_ids = [
            self._tokenizer(prompt.text, add_special_tokens=False)["input_ids"][-self._max_tokens :] or [0]
            for prompt in prompts
        ]
        vectors: list[Vectors | None] = [None] * len(prompts)
        for batch in self._batches([len(ids) for ids in token_ids]):
            for row, state in zip(batch, self._states([token_ids[row] for row in batch]), strict=True):
                last, whole = state[-LAST_TOKENS:].mean(axis=0), state.mean(axis=0)
                # float16 has 11 bits: coarser than what batching changes, finer than what the regression can tell.
                hidden = np.concatenate([last, whole]).astype(np.float16).astype(np.float32)
                sizes = np.array(size_features(prompts[row].text), dtype=np.float32)
                vectors[row] = np.concatenate([sizes, hidden])
        return np.stack([vector for vector in vectors if vector is not None])

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows by falling length, as many at a time as fit `batch_tokens` with their padding."""
        batches: list[list[int]] = []
        longest = 0
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if not batches or (len(batches[-1]) + 1) * longest > self._batch_tokens:
                batches.append([])
                longest = lengths[row]
            batches[-1].append(row)
        return batches

    def _states(self, token_ids: Sequence[Sequence[int]]) -> list[Vectors]:
        """Output of the block for each sequence, arrays of shape (tokens, hidden)."""
        torch = self._torch
        longest = max(map(len, token_ids))
        ids = torch.zeros((len(token_ids), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(token_ids):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        with torch.inference_mode():
            # hidden_states[0] are the token embeddings, so the output of block i is entry i + 1.
            output = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
            hidden = output.hidden_states[self._layer + 1].float().numpy()
        return [hidden[row, : len(sequence)] for row, sequence in enumerate(token_ids)]
