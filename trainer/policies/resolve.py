"""A policy's name to a Hugging Face folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import InvalidArgument, Unavailable
from trainer.data import did_you_mean

KNOWN_POLICIES: dict[str, str] = {
    "smollm2": "SmolLM2-135M-Instruct, from an installed Python package",
    "tiny": "a model of under a million parameters, taught arithmetic on this machine in under a minute",
}

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_policy(name: str) -> Path:
    """The folder of a policy: a name of KNOWN_POLICIES, the path of a model folder, or the name of a model on the hub.

    Makes or downloads what is not there yet, once. Raises InvalidArgument for a name that is none of these (with the
    nearest known one), Unavailable when the hub is needed and cannot be reached.
    """
    if name == "smollm2":
        from services.common.models import smollm2_folder

        return smollm2_folder()
    if name == "tiny":
        from trainer.policies.tiny import tiny_folder

        return tiny_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgument(f"policy folder {path} holds no config.json, so it is no Hugging Face model")
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")):
        raise InvalidArgument(f"there is no policy folder {path}")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise InvalidArgument(
        f"unknown policy {name!r}{did_you_mean(name, list(KNOWN_POLICIES)).rstrip('?')}; otherwise give the path of a "
        "model folder or a hub name like owner/model",
        reason="UNKNOWN_POLICY",
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise Unavailable(
            f"policy {name!r} is no folder here and the hub does not give it ({_in_one_line(error)}). "
            "Without a connection, download it on a machine that has one and give the folder's path",
            reason="HUB_UNREACHABLE",
        ) from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")
