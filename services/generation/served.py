"""Remembers the last acknowledged weights, so that a restarted engine serves them again without being told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from services.common.logging import get_logger
from services.common.paths import write_atomically

log = get_logger("rollwise.generation")


@dataclass(frozen=True, slots=True)
class Served:
    """What current.json holds."""

    policy_id: str
    policy_version: int
    path: str


def remember(file: Path, policy_id: str, version: int, path: Path) -> None:
    """Write the file atomically. A failure is logged: the weights serve all the same, a restart starts idle."""
    served = Served(policy_id, version, str(path.absolute()))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(served)).encode())
    except OSError as error:
        log.warning("cannot remember the served weights", file=str(file), error=str(error))


def recall(file: Path) -> Served | None:
    """What was remembered, or None; a file that cannot be read is logged and ignored."""
    try:
        found = json.loads(file.read_text())
        return Served(str(found["policy_id"]), int(found["policy_version"]), str(found["path"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cannot read which weights were served; starting idle", file=str(file), error=str(error))
        return None
