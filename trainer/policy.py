"""The policy that is trained: a Hugging Face causal language model with fp32 master weights, and its log-probs.

Knows nothing of groups, rewards or services. Log-probs include the temperature, as the engine's do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from services.common.errors import InvalidArgument
from trainer.batch import MicroBatch, Sample, micro_batches

LOGIT_BLOCK = 2**27
"""Most logits (tokens x vocabulary) held at once, 512 MiB in fp32; the backward pass recomputes longer blocks."""


class TokenLogprobs(NamedTuple):
    """Of each completion token of a micro-batch: log-prob (with gradient), and entropy in nats (without)."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor


class Policy:
    """A causal language model and its tokenizer, from a Hugging Face folder."""

    def __init__(self, folder: Path, *, device: str | None = None, autocast: bool | None = None) -> None:
        """Loads the model; `autocast` runs the forward pass in bf16 (default: on CUDA only).

        Raises InvalidArgument, naming the folder, when it holds no loadable model.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise InvalidArgument(f"{folder} is no Hugging Face model folder: it has no config.json")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.autocast = self.device.type == "cuda" if autocast is None else autocast
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"the model in {folder} does not load: {error}") from error
        self.model.to(self.device)
        # No dropout: the log-probs must be those of the policy that sampled.
        self.model.eval()
        self.context_length = int(getattr(self.model.config, "max_position_embeddings", 0) or 2**31 - 1)
        self.vocabulary_size = int(self.model.config.vocab_size)
        self._static_files = _static_files(folder)
        self._split_head, self._shares_prompts = self._probe()

    # ------------------------------------------------------------------------------------- forward

    def micro_batches(self, samples: Sequence[Sample], max_tokens: int) -> list[MicroBatch]:
        """The samples in blocks of at most `max_tokens` padded tokens; siblings share their prompt where exact."""
        return list(micro_batches(samples, max_tokens, pack=self._shares_prompts))

    def logprobs(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """log pi(token | prompt, earlier tokens) of every completion token, of the softmax of logits / temperature.

        The vocabulary projection is done at completion positions only. Gradients flow unless torch.no_grad is on.
        """
        batch = batch.to(self.device)
        hidden_ND = self._hidden(batch).flatten(0, 1)[batch.predicted_from_N]
        block = max(1, LOGIT_BLOCK // self.vocabulary_size)
        pieces = []
        for start in range(0, len(hidden_ND), block):
            arguments = (hidden_ND[start : start + block], batch.targets_N[start : start + block], temperature)
            if len(hidden_ND) > block and torch.is_grad_enabled():
                pieces.append(checkpoint(self._token_logprobs, *arguments, use_reentrant=False))
            else:
                pieces.append(self._token_logprobs(*arguments))
        return TokenLogprobs(torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]))

    def sample_logprobs(self, samples: Sequence[Sample], temperature: float, max_tokens: int) -> list[torch.Tensor]:
        """Log-probs of each sample's tokens, without gradient, in the samples' own order."""
        result = [torch.zeros(0)] * len(samples)
        with torch.no_grad():
            for batch in self.micro_batches(samples, max_tokens):
                values = self.logprobs(batch, temperature).logprobs_N.cpu().split(list(batch.lengths))  # type: ignore[no-untyped-call]
                for i, piece in zip(batch.members, values, strict=True):
                    result[i] = piece
        return result

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Final hidden states (B, L, D); or the logits (B, L, V) of a model whose head is more than a projection."""
        mask = None
        if batch.allowed_B1LL is not None:
            lowest = torch.finfo(torch.bfloat16 if self.autocast else torch.float32).min
            mask = torch.where(batch.allowed_B1LL, 0.0, lowest).to(torch.bfloat16 if self.autocast else torch.float32)
        arguments = {
            "input_ids": batch.input_ids_BL,
            "position_ids": batch.positions_BL,
            "attention_mask": mask,
            "use_cache": False,
        }
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            if self._split_head:
                hidden: torch.Tensor = self.model.base_model(**arguments).last_hidden_state
            else:
                hidden = self.model(**arguments).logits
        return hidden

    def _token_logprobs(
        self, hidden_nD: torch.Tensor, targets_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._split_head:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                hidden_nD = self.model.get_output_embeddings()(hidden_nD)
        logprobs_nV = torch.log_softmax(hidden_nD.float() / temperature, dim=-1)
        with torch.no_grad():
            entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
        return logprobs_nV.gather(-1, targets_n[:, None]).squeeze(-1), entropy_n

    def _probe(self) -> tuple[bool, bool]:
        """Finds out, on a few tokens, whether the two shortcuts give this architecture's own numbers.

        First: the head is a plain projection of the base model's output. Second: siblings may share a prompt
        (false for recurrent layers, sliding windows and attention kernels that ignore the mask).
        """
        import numpy as np

        ids = (np.arange(12, dtype=np.uint32) * 7 + 3) % self.vocabulary_size
        pair = [Sample("probe", ids[:5], ids[5 + 3 * i : 8 + 3 * i], np.zeros(3, np.float32), 0.0) for i in (0, 1)]
        # Both shortcuts must be exact, so the check is made in fp32 whatever the training dtype is.
        autocast, self.autocast = self.autocast, False
        values = {}
        with torch.no_grad():
            for split, packed in ((False, False), (True, False), (True, True), (False, True)):
                self._split_head = split
                blocks = micro_batches(pair, 64, pack=packed)
                values[split, packed] = torch.cat([self.logprobs(block, 1.0).logprobs_N for block in blocks])
        self.autocast = autocast
        plain = values[False, False]
        split = torch.allclose(values[True, False], plain, atol=1e-4)
        windows = set(getattr(self.model.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        windowed = windows or getattr(self.model.config, "sliding_window", None)
        shares = not windowed and torch.allclose(values[split, True], plain, atol=1e-4)
        return split, shares

    # --------------------------------------------------------------------------------------- files

    def save(self, folder: Path) -> None:
        """Writes a full Hugging Face folder (fp32), atomically: `folder` appears complete or not at all.

        An existing folder of that name is replaced.
        """
        folder = Path(folder)
        temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            self.write(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def write(self, folder: Path) -> None:
        """Writes the folder's files into an existing folder; `save` is the atomic form."""
        for name, content in self._static_files.items():
            (folder / name).write_bytes(content)
        if getattr(self.model, "_weight_conversions", None):
            # The architecture is laid out otherwise on disk; only transformers knows the way back.
            self.model.save_pretrained(folder)
            return
        save_file(self._tensors(), folder / "model.safetensors", metadata={"format": "pt"})

    def load_weights(self, folder: Path) -> None:
        """Replaces the weights in place by those of a folder that `save` wrote; optimizer references stay valid."""
        from safetensors.torch import load_file

        state = load_file(Path(folder) / "model.safetensors")
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        tied = set(self.model.state_dict()) - set(self._tensors())
        if unexpected or set(missing) - tied:
            raise InvalidArgument(f"the weights in {folder} are of another model: {[*missing, *unexpected][:3]}")

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The weights, every storage once: tied ones are tied again by the loader."""
        seen: set[int] = set()
        tensors = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() in seen and tensor.numel():
                continue
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
        return tensors


def _static_files(folder: Path) -> dict[str, bytes]:
    """Configuration and tokenizer, a few MB, kept in memory so that a vanished source harms nothing.

    The configuration is made to say what dtype the written weights have.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in {".json", ".txt", ".model", ".jinja", ".tiktoken"}
        and not path.name.endswith(".index.json")
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files
