"""Folders of policy versions on disk: `weights/v000010/`, each a complete Hugging Face folder.

Invariant: a folder is deleted only after the generation server acknowledged another version of this job, so it never
disappears between the server being told of it and the server reading it; the acknowledged one stays, because a
restarted server reads it again. This module knows no service.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Protocol

_NAME = re.compile(r"v(\d{6,})")


class Saves(Protocol):
    """Anything that writes itself as a complete folder, atomically."""

    def save(self, folder: Path) -> None:
        """Writes the folder; it appears complete or not at all."""
        ...


class WeightFolders:
    """The versions of one job."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, version: int) -> Path:
        """Where a version lies, or would lie."""
        return self.root / f"v{version:06d}"

    def versions(self) -> list[int]:
        """Versions on disk, ascending."""
        if not self.root.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(name.group(1)) for name in names if name)

    def write(self, version: int, policy: Saves) -> Path:
        """Writes a version and returns its folder. Raises OSError (a full disk among them)."""
        self.root.mkdir(parents=True, exist_ok=True)
        policy.save(self.path(version))
        return self.path(version)

    def acknowledged(self, version: int) -> None:
        """The server serves `version`: nobody reads the others any more (later ones are of an abandoned lineage)."""
        for other in self.versions():
            if other != version:
                shutil.rmtree(self.path(other), ignore_errors=True)
