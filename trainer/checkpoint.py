"""Checkpoints: complete or absent, the newest few kept, and the authority on what a run has done.

A checkpoint is a folder `step-000010` with the policy as a Hugging Face folder (`model/`), the optimizer, the random
number generators, the run's own state as JSON and the value prior's snapshot. It is written under another name,
flushed to disk and renamed; the marker, which lists every file with its size, is the last file written. What a kill
leaves behind is either no checkpoint or a folder that `latest` passes over.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.errors import FailedPrecondition, NotFound, ResourceExhausted

MARKER = "COMPLETE.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Restored:
    """What `load` read. `random_state` goes to `set_random_state`, `optimizer` to Optimizer.load_state_dict."""

    path: Path
    step: int
    model: Path
    optimizer: dict[str, Any]
    random_state: dict[str, Any]
    state: dict[str, Any]
    value_prior: bytes | None


class Checkpoints:
    """The checkpoints of one job, in one folder."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        write_model: Callable[[Path], None],
        optimizer: dict[str, Any],
        state: dict[str, Any],
        value_prior: bytes | None = None,
    ) -> Path:
        """Writes the checkpoint of `step` and drops the oldest ones past `keep`; returns its folder.

        `write_model(folder)` fills an existing, empty folder (Policy.write). `state` must be plain JSON. A checkpoint
        of the same step is replaced. On a full disk raises ResourceExhausted, naming the place and the space left,
        and leaves older checkpoints as they were.
        """
        final = self.folder / f"step-{step:06d}"
        # Refused before anything is written: a state that JSON would change must not look saved.
        encoded = json.dumps(state, allow_nan=False, sort_keys=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = self.folder / f".tmp-{final.name}-{os.getpid()}"
        try:
            (temporary / "model").mkdir(parents=True)
            write_model(temporary / "model")
            torch.save(optimizer, temporary / "optimizer.pt")
            torch.save(random_state(), temporary / "random.pt")
            (temporary / "state.json").write_text(encoded)
            if value_prior is not None:
                (temporary / "value_prior.bin").write_bytes(value_prior)
            files = {str(p.relative_to(temporary)): p.stat().st_size for p in _files(temporary)}
            for path in _files(temporary):
                _flush(path)
            marker = temporary / MARKER
            marker.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}))
            _flush(marker)
            _flush(temporary / "model")
            _flush(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _flush(self.folder)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if _is_disk_full(error):
                free = shutil.disk_usage(self.folder).free
                raise ResourceExhausted(
                    f"no space left for the checkpoint of step {step} in {self.folder} ({free / 2**20:.0f} MiB free); "
                    "older checkpoints are untouched. Free some space, then resume the job",
                    reason="DISK_FULL",
                    path=str(self.folder),
                    free_bytes=str(free),
                ) from error
            raise
        self._prune()
        return final

    def list(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)) and defect(p) is None]
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None. Half-written ones are passed over."""
        complete = self.list()
        return complete[-1] if complete else None

    def load(self, path: Path | None = None) -> Restored:
        """Reads a checkpoint (default: the newest complete one).

        Raises NotFound when there is none, FailedPrecondition, naming what is wrong, for one that is not complete.
        """
        if path is None:
            path = self.latest()
            if path is None:
                raise NotFound(f"there is no complete checkpoint in {self.folder}")
        path = Path(path)
        if not path.is_dir():
            raise NotFound(f"there is no checkpoint {path}")
        problem = defect(path)
        if problem is not None:
            raise FailedPrecondition(f"checkpoint {path} is not complete: {problem}", reason="CHECKPOINT_INCOMPLETE")
        prior = path / "value_prior.bin"
        marker = json.loads((path / MARKER).read_text())
        return Restored(
            path=path,
            step=int(marker["step"]),
            model=path / "model",
            optimizer=torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu"),
            random_state=torch.load(path / "random.pt", weights_only=True),
            state=json.loads((path / "state.json").read_text()),
            value_prior=prior.read_bytes() if prior.exists() else None,
        )

    def _prune(self) -> None:
        for path in self.list()[: -self.keep]:
            # The marker goes first, so that a kill in between leaves no folder that looks complete.
            (path / MARKER).unlink()
            shutil.rmtree(path)

    def _sweep(self) -> None:
        """Removes what earlier processes left half-written; one trainer owns the folder at a time."""
        for path in self.folder.glob(".tmp-step-*"):
            shutil.rmtree(path, ignore_errors=True)


def defect(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every file its marker lists is there in full."""
    try:
        marker = json.loads((path / MARKER).read_text())
        files = marker["files"]
        if marker["format"] != FORMAT:
            return f"its format is {marker['format']}, this version reads {FORMAT}"
    except FileNotFoundError:
        return f"it has no {MARKER}"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} cannot be read"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def random_state() -> dict[str, Any]:
    """State of the generators of python, numpy and torch, as plain values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what `random_state` saw."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_disk_full(error: BaseException | None) -> bool:
    """True for ENOSPC/EDQUOT, also where a library wrapped it in an error of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # torch and safetensors report a failed write as their own error, with the system's text inside.
        if "No space left" in str(error) or "PytorchStreamWriter failed writing" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
