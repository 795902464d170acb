"""Shared by the trainer's unit tests: two untrained models small enough to be built anew in a moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.batch import Sample
from trainer.policies.tiny import Recipe, make_tokenizer
from trainer.policy import Policy


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(Recipe())
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,  # far from uniform, so that wrong positions or masks show
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model") / "random"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    return Policy(model_folder)


@pytest.fixture
def samples() -> list[Sample]:
    """Three prompts with 3, 1 and 4 rollouts of 1..9 tokens, one of them partly masked."""
    rng = np.random.default_rng(5)
    made = []
    for group, rollouts in enumerate((3, 1, 4)):
        prompt = rng.integers(3, 250, 4 + 3 * group).astype(np.uint32)
        for r in range(rollouts):
            tokens = int(rng.integers(1, 10))
            completion = rng.integers(3, 250, tokens).astype(np.uint32)
            mask = np.arange(tokens) < 1 if (group, r) == (2, 1) else None
            logprobs = rng.normal(-5, 1, tokens).astype(np.float32)
            made.append(Sample(f"g{group}", prompt, completion, logprobs, float(rng.normal()), mask=mask))
    return made
