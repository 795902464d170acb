"""Reads a Hugging Face folder and checks all of it before anything live is touched.

Every error names the file or the tensor and says what to do. Nothing here knows an engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.common.errors import InvalidArgument

# Differences between two configs that change no tensor and no result.
_COSMETIC = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, else model.safetensors, else every one there is."""
    if not folder.is_dir():
        raise InvalidArgument(f"weights folder {folder} does not exist", reason="WEIGHTS_NOT_FOUND")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from error
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        what = ", ".join(missing) or "*.safetensors"
        raise InvalidArgument(f"weights folder {folder} lacks {what}", reason="WEIGHTS_NOT_FOUND")
    return files


def fingerprint(folder: Path) -> str:
    """Changes when a weight file or the config is rewritten, without reading the weights."""
    digest = hashlib.sha256()
    for file in [*weight_files(folder), folder / "config.json"]:
        if file.exists():
            state = file.stat()
            digest.update(f"{file.name}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns};".encode())
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, object]:
    """config.json as a dict, without the entries that change nothing."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise InvalidArgument(f"weights folder {folder} does not exist", reason="WEIGHTS_NOT_FOUND")
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise InvalidArgument(f"{file} does not exist; save the model with its config", reason="NO_CONFIG") from error
    except ValueError as error:
        raise _unreadable(file, error) from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{file} holds no JSON object", reason="NO_CONFIG")
    return {key: value for key, value in config.items() if key not in _COSMETIC}


def tokenizer_digest(folder: Path) -> str | None:
    """Hash of the tokenizer's files, or None when the folder has none."""
    digest = hashlib.sha256()
    found = False
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            found = True
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest() if found else None


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter's first name -> all names it goes by (tied weights have several)."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in groups.values()}


def read_weights(folder: Path, model: nn.Module, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters of `model` (which may live on the meta device) from the folder, by first name, checked.

    Raises InvalidArgument (reason BAD_WEIGHTS) for an unreadable file, a missing or unknown tensor, a wrong shape,
    a type that is no float, or a value that is not finite. The tensors own their memory.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = parameter_names(model)
    first = {alias: head for head, aliases in names.items() for alias in aliases}
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a mapping
                    if name.endswith("rotary_emb.inv_freq"):
                        continue
                    if name not in first:
                        raise InvalidArgument(
                            f"{file} holds {name!r}, which the model of config.json has not; save the whole model "
                            "under its own names (merge adapters first)",
                            reason="BAD_WEIGHTS",
                        )
                    if first[name] not in found or name == first[name]:
                        tensor = tensors.get_tensor(name)
                        _check(file, name, tensor, shapes[first[name]])
                        # A copy: the file is mapped, and its owner may rewrite or delete it.
                        found[first[name]] = torch.empty_like(tensor, dtype=dtype).copy_(tensor)
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
    missing = [name for name in shapes if name not in found]
    if missing:
        raise InvalidArgument(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors: {_some(missing)}", reason="BAD_WEIGHTS"
        )
    return found


def same_architecture(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether weights of one config fit a model built from the other."""
    return dict(one) == dict(other)


def _check(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(
            f"{file}: {name} has shape {list(tensor.shape)}, the model wants {list(shape)}", reason="BAD_WEIGHTS"
        )
    if not tensor.is_floating_point():
        raise InvalidArgument(f"{file}: {name} is {tensor.dtype}, not a float type", reason="BAD_WEIGHTS")
    # One pass without a mask in memory: a sum is finite unless a value is not (or the sum itself overflows).
    if not bool(tensor.sum(dtype=torch.float64).isfinite()):
        raise InvalidArgument(f"{file}: {name} holds values that are not finite", reason="BAD_WEIGHTS")


def _some(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _unreadable(file: Path, error: Exception) -> InvalidArgument:
    return InvalidArgument(f"{file} cannot be read ({error}); write it again", reason="BAD_WEIGHTS")
