"""A causal language model ready to sample from: prefill, one decode step, and weights that swap in place.

Knows tensors and folders, no scheduling. Works for decoder-only models in the Llama mould (Llama, SmolLM2, Qwen2/3,
Mistral without a sliding window): rotary positions given by row, full attention, logits straight from the output
embedding. What does not fit is refused when it is loaded, by comparing with the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.common.errors import InvalidArgument
from services.generation import weights
from services.generation.engine import FEATURE_TOKENS
from services.generation.packed_linear import pack_linears, repack
from services.generation.prefix_cache import Prefix
from services.generation.slot_cache import PrefillCache, SlotCache


@dataclass(slots=True)
class Staged:
    """Weights read and checked, not yet served: either new tensors for the same model, or a whole new one."""

    path: Path
    fingerprint: str
    tensors: dict[str, Tensor] | None
    model: LoadedModel | None
    tokenizer: Any
    tokenizer_digest: str | None
    stop_token_ids: tuple[int, ...]


class LoadedModel:
    """A transformers model, its tokenizer and what the engine needs to know of both."""

    def __init__(
        self,
        model: Any,
        config: dict[str, object],
        tokenizer: Any,
        tokenizer_digest: str | None,
        *,
        stop_token_ids: tuple[int, ...],
        feature_layer: int | None,
        pack: bool,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.tokenizer_digest = tokenizer_digest
        self.stop_token_ids = stop_token_ids
        self._model = model
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self.vocabulary_size = int(self._head.weight.shape[0])
        self.context_length = int(model.config.max_position_embeddings)
        blocks = self._decoder.layers
        default = min(round(2 * len(blocks) / 3), len(blocks) - 1)
        self.feature_layer = default if feature_layer is None else feature_layer
        if not 0 <= self.feature_layer < len(blocks):
            raise InvalidArgument(
                f"feature_layer {feature_layer} is outside the model's blocks 0..{len(blocks) - 1}",
                reason="FEATURE_LAYER",
            )
        self._captured: Tensor | None = None
        self._capture = False
        blocks[self.feature_layer].register_forward_hook(self._keep_block_output)
        self._packed = pack_linears(model) if pack else []

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return torch.device(self._head.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch.empty(0, dtype=self._head.weight.dtype).dtype

    @property
    def module(self) -> nn.Module:
        """The transformers model itself."""
        module: nn.Module = self._model
        return module

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """One right-padded forward pass over whole prompts (each at least one token); causal, so padding is unseen."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros((len(prompts), max(lengths)), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt)
        ids = ids.to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        cache = PrefillCache()
        self._capture = True
        try:
            hidden = self._decoder(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)[0]
        finally:
            self._capture = False
            block, self._captured = self._captured, None
        assert block is not None
        rows = torch.arange(len(prompts), device=self.device)
        logits = self._head(hidden[rows, torch.tensor(lengths, device=self.device) - 1]).float()
        kept = cache.stacked()
        prefixes = []
        for row, length in enumerate(lengths):
            tail = block[row, max(0, length - FEATURE_TOKENS) : length].float().mean(0)
            prefixes.append(Prefix(kept[:, :, row, :length].contiguous(), logits[row].clone(), tail))
        return prefixes

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: SlotCache) -> Tensor:
        """Float32 logits [rows, vocabulary] after each row's next token, which stands at positions[row] (0-based)."""
        cache.begin_step(positions, longest)
        seen = torch.arange(longest, device=self.device)[None] <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        hidden = self._decoder(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            cache=cache,
            use_cache=True,
        )[0]
        logits: Tensor = self._head(hidden[:, -1])
        return logits.float()

    def stage(self, path: Path, *, pack: bool, feature_layer: int | None) -> Staged:
        """Read and check the weights of `path` against this model, or build another when the config differs.

        Touches nothing that serves, so it may run beside the engine.
        """
        mark = weights.fingerprint(path)
        config = weights.read_config(path)
        digest = weights.tokenizer_digest(path)
        if not weights.same_architecture(config, self.config):
            other = load_model(path, dtype=self.dtype, device=self.device, feature_layer=feature_layer, pack=pack)
            return Staged(path, mark, None, other, other.tokenizer, other.tokenizer_digest, other.stop_token_ids)
        tensors = weights.read_weights(path, self._model, dtype=self.dtype)
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        tokenizer = self.tokenizer
        if digest is None or digest == self.tokenizer_digest:
            digest = self.tokenizer_digest
        else:
            tokenizer = _load_tokenizer(path)
        stops = _stop_tokens(path, self._model.config, tokenizer)
        return Staged(path, mark, tensors, None, tokenizer, digest, stops)

    def apply(self, staged: Staged) -> None:
        """Serve staged tensors: each parameter takes over its new memory, then packed copies are made anew."""
        assert staged.tensors is not None
        parameters = dict(self._model.named_parameters())
        for name, tensor in staged.tensors.items():
            parameters[name].data = tensor
        repack(self._packed)
        self.tokenizer = staged.tokenizer
        self.tokenizer_digest = staged.tokenizer_digest
        self.stop_token_ids = staged.stop_token_ids

    def _keep_block_output(self, _module: nn.Module, _inputs: object, output: Any) -> None:
        if self._capture:
            self._captured = output[0] if isinstance(output, tuple) else output


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, feature_layer: int | None, pack: bool
) -> LoadedModel:
    """Build the model of a Hugging Face folder; InvalidArgument says what is wrong with the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = weights.read_config(path)
    try:
        parsed = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            blank = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InvalidArgument(f"{path}/config.json describes no usable model: {error}", reason="NO_CONFIG") from error
    layers = set(getattr(parsed, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or (getattr(parsed, "sliding_window", None) and not hasattr(parsed, "layer_types")):
        raise InvalidArgument(
            f"{path}: only full attention is supported, this model has {sorted(layers)} (sliding_window "
            f"{getattr(parsed, 'sliding_window', None)})",
            reason="UNSUPPORTED_MODEL",
        )
    # Checked here with names and shapes in the message; the library would only warn and fill in random values.
    weights.read_weights(path, blank, dtype=dtype)
    tokenizer = _load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    model.requires_grad_(False)
    loaded = LoadedModel(
        model,
        config,
        tokenizer,
        weights.tokenizer_digest(path),
        stop_token_ids=_stop_tokens(path, model.config, tokenizer),
        feature_layer=feature_layer,
        pack=pack,
    )
    _check_against_own_forward(loaded, path)
    return loaded


def _check_against_own_forward(loaded: LoadedModel, path: Path) -> None:
    """Some architectures scale or cap logits after the output embedding; sampling from others would be wrong."""
    probe = [0, min(1, loaded.vocabulary_size - 1), min(2, loaded.vocabulary_size - 1)]
    with torch.inference_mode():
        ours = loaded.prefill([probe])[0].logits
        theirs = loaded.module(input_ids=torch.tensor([probe], device=loaded.device)).logits[0, -1].float()
    tolerance = 1e-3 if loaded.dtype == torch.float32 else 0.2
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        raise InvalidArgument(
            f"{path}: {type(loaded.module).__name__} changes its logits after the output embedding, which this engine "
            "does not do",
            reason="UNSUPPORTED_MODEL",
        )


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path} has no usable tokenizer ({error}); save it beside the weights", reason="NO_TOKENIZER"
        ) from error


def _stop_tokens(path: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """generation_config.json's end tokens, else config.json's, else the tokenizer's."""
    from transformers import GenerationConfig

    found: Any = None
    if (path / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(path).eos_token_id
    if found is None:
        found = config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list | tuple) else [found]))
