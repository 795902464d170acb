"""Where Rollwise keeps files that outlive a process; knows nothing of what is in them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATE_DIR = Path("run")
"""Folder of jobs and large payloads where none is told: processes started by hand in one place share it."""


def cache_dir() -> Path:
    """Return the folder for converted models and other files worth keeping, created when missing.

    It is `$ROLLWISE_CACHE` when that is set, else `~/.cache/rollwise`.
    """
    named = os.environ.get("ROLLWISE_CACHE", "").strip()
    folder = Path(named).expanduser() if named else Path.home() / ".cache" / "rollwise"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, also one after a crash, sees the old content or the new and nothing between.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, by a lock on the file at `path`; a process that dies lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
