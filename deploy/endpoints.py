"""Where a running stack can be reached: written by the launcher, read by every command.

Two files hold the same JSON: `<state_dir>/endpoints.json`, and one per user, by which commands find the stack from any
folder. Both are replaced atomically and removed when the stack stops. Environment variables and options go first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

FILE_NAME = "endpoints.json"
DEFAULT_API = "http://127.0.0.1:8100"
DEFAULT_VALUE_PRIOR = "http://127.0.0.1:8102"


class Endpoints(BaseModel):
    """Addresses, process ids and folders of one stack."""

    model_config = ConfigDict(extra="ignore")

    launcher_pid: int
    launcher_started: float
    state_dir: str
    logs: str
    api_url: str
    value_prior_url: str
    redis_url: str
    targets: dict[str, str]
    metrics: dict[str, str]
    pids: dict[str, int]
    states: dict[str, str] = {}
    restarts: dict[str, int] = {}

    @property
    def alive(self) -> bool:
        """Whether the launcher that wrote this still runs; a recycled process id does not count."""
        try:
            started = psutil.Process(self.launcher_pid).create_time()
        except psutil.Error:
            return False
        return abs(started - self.launcher_started) < 1.0


def own_start_time() -> float:
    """When this process began, as `alive` will see it."""
    return psutil.Process().create_time()


def user_file(environment: dict[str, str] | None = None) -> Path:
    """The per-user file: $XDG_STATE_HOME/rollwise/endpoints.json, by default under ~/.local/state."""
    env = os.environ if environment is None else environment
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "rollwise" / FILE_NAME


def write(path: Path, endpoints: Endpoints) -> None:
    """Replaces `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(endpoints.model_dump_json(indent=2) + "\n")
    draft.replace(path)


def read(path: Path) -> Endpoints | None:
    """What `path` says, or None when there is no such file or it is not one of ours."""
    try:
        return Endpoints.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def publish(endpoints: Endpoints) -> None:
    """Writes both files; the per-user one only when no other living stack holds it."""
    write(Path(endpoints.state_dir) / FILE_NAME, endpoints)
    holder = read(user_file())
    if holder is None or not holder.alive or holder.launcher_pid == endpoints.launcher_pid:
        write(user_file(), endpoints)


def withdraw(endpoints: Endpoints) -> None:
    """Removes both files; the per-user one only when it is this stack's."""
    (Path(endpoints.state_dir) / FILE_NAME).unlink(missing_ok=True)
    holder = read(user_file())
    if holder is not None and holder.launcher_pid == endpoints.launcher_pid:
        user_file().unlink(missing_ok=True)


def running_stack() -> Endpoints | None:
    """The stack this user has running, if any."""
    found = read(user_file())
    return found if found is not None and found.alive else None


def find(option: str | None, variable: str, field: str, default: str) -> str:
    """One address: the option if given, else the environment variable, else the running stack's, else `default`."""
    if option:
        return option.rstrip("/")
    from_environment = os.environ.get(variable)
    if from_environment:
        return from_environment.rstrip("/")
    stack = running_stack()
    if stack is not None:
        value: Any = getattr(stack, field, None) or stack.targets.get(field)
        if value:
            return str(value)
    return default
