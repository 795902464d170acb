"""Small random models on disk, and engines over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from services.generation.scheduler import Limits
from services.generation.transformers_engine import TransformersEngine

VOCABULARY = 300
EOS = 1


def save_model(folder: Path, *, kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
        **changes,
    }
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes))
    model.save_pretrained(folder)
    words = {"<bos>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen"), kind="qwen", seed=3)


StartEngine = Callable[..., Awaitable[TransformersEngine]]


@pytest.fixture
async def start() -> AsyncIterator[StartEngine]:
    engines: list[TransformersEngine] = []

    async def begin(model: Path | None, *, memory: Path | None = None, pack: bool = True, **limits: Any) -> Any:
        engine = TransformersEngine(Limits(**limits), model=model, memory=memory, threads=1, pack=pack)
        engines.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def llama_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.fixture
def request_folder(llama: Path, qwen: Path) -> Callable[[str], Path]:
    return {"llama": llama, "qwen": qwen}.__getitem__


@pytest.fixture(scope="session")
def other_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other-long"), seed=7, max_position_embeddings=8192)
