"""Keeps processes alive: starts them, restarts what dies with back-off, gives up on a crash loop, stops them in order.

Every process runs in a process group of its own, so that Ctrl-C reaches only the launcher and a dead process's own
children go with it. No process outlives the launcher: the kernel kills leaders (guarded.py), the guardian the groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from deploy.processes import CLI_PREFIX, ProcessSpec

State = Literal["starting", "serving", "waiting to restart", "stopped", "failed"]
Ready = Callable[[ProcessSpec], str | None]

_POLL_SECONDS = 0.1
_QUICK_DEATH_SECONDS = 20.0
_QUICK_DEATHS = 5
_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 8.0
_TAIL_LINES = 25
_LINE_LENGTH = 400
_HERE = Path(__file__).parent


class StackFailed(Exception):
    """A process could not be started or kept alive. `log` is its log file, `tail` the end of it."""

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.tail = tail_of(log) if log is not None else ""


def tail_of(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, or a note that there are none; our JSON lines in words."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return "(no log was written)"
    return "\n".join(_in_words(line) for line in text) or "(the log is empty)"


def _in_words(line: str) -> str:
    """`level: event key=value`, with exceptions as type and message; a line that is no JSON stays as it is."""
    try:
        entry = json.loads(line)
        event, level = entry.pop("event"), entry.pop("level", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line[:_LINE_LENGTH]
    for name in ("timestamp", "service", "logger"):
        entry.pop(name, None)
    exceptions = entry.pop("exception", None)
    words = [f"{level}: {event}", *(f"{name}={value}" for name, value in entry.items())]
    if isinstance(exceptions, list):
        words += [f"({each.get('exc_type')}: {each.get('exc_value')})" for each in exceptions]
    return " ".join(words)[:_LINE_LENGTH]


@dataclass
class Child:
    """One supervised process and what happened to it."""

    spec: ProcessSpec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    state: State = "stopped"
    restarts: int = 0
    quick_deaths: int = 0
    ready_at: float | None = None
    restart_at: float = 0.0
    not_ready_because: str = "not started"
    _log_handle: IO[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None


class Guardian:
    """The watch process that survives the launcher; see guardian.py."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """This group ends with the launcher."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def discard(self, group: int) -> None:
        """This group is gone."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guardian; groups it still knows are killed."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process = None

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()  # it learns all groups anew
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", str(_HERE / "guardian.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"+{group}\n" for group in self._groups).encode())
        self._process.stdin.flush()


class Supervisor:
    """Runs processes until told to stop. `probe` says why a process does not serve yet, or None when it does."""

    def __init__(self, logs: Path, probe: Ready, on_change: Callable[[], None] = lambda: None) -> None:
        self.children: dict[str, Child] = {}
        self.failure: StackFailed | None = None
        self._logs = logs
        self._probe = probe
        self._on_change = on_change
        self._guardian = Guardian()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._idle = threading.Event()
        self._watching: threading.Thread | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Starts processes; they are watched from now on."""
        with self._lock:
            for spec in specs:
                child = self.children[spec.name] = Child(spec, self._logs / f"{spec.name}.log")
                self._spawn(child)
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="supervisor", daemon=True)
            self._watching.start()
        self._on_change()

    def wait_until_serving(self, names: Sequence[str], timeout: float, progress: Callable[[], None]) -> None:
        """Returns when all of `names` serve. Raises StackFailed when one dies first or `timeout` seconds pass."""
        deadline = time.monotonic() + timeout
        while True:
            if self.failure is not None:
                raise self.failure
            waiting = [child for name in names if (child := self.children[name]).state != "serving"]
            progress()
            if not waiting:
                return
            if time.monotonic() > deadline:
                first = waiting[0]
                raise StackFailed(
                    f"{first.spec.name} did not serve within {timeout:.0f} s: {first.not_ready_because}", log=first.log
                )
            time.sleep(_POLL_SECONDS)

    def stop(
        self, order: Sequence[str], grace: float = 15.0, *, on_stop: Callable[[str], None] = lambda name: None
    ) -> None:
        """Stops every process, one after the other; one that ignores SIGTERM for `grace` seconds is killed."""
        self._stopping.set()
        if self._watching is not None:
            self._idle.wait()
        try:
            for name in [*order, *(name for name in self.children if name not in order)]:
                child = self.children.get(name)
                if child is not None:
                    on_stop(name)
                    self._end(child, grace)
        finally:
            for child in self.children.values():
                self._end(child, 0.0)
            self._guardian.close()
            self._ended.set()

    # ------------------------------------------------------------------------------------- inside

    def _spawn(self, child: Child) -> None:
        spec = child.spec
        if spec.ready_file is not None:
            spec.ready_file.parent.mkdir(parents=True, exist_ok=True)
            spec.ready_file.unlink(missing_ok=True)
        if child._log_handle is None:
            child._log_handle = child.log.open("ab")
        guarded = [sys.executable, "-I", "-S", str(_HERE / "guarded.py"), str(os.getpid()), *spec.command]
        child.process = subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=child._log_handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(spec.environment),
        )
        self._guardian.add(child.process.pid)
        child.state, child.ready_at, child.not_ready_because = "starting", None, "starting"

    def _watch(self) -> None:
        while self.failure is None and not self._stopping.wait(_POLL_SECONDS):
            with self._lock:
                changed = [self._look_at(child) for child in self.children.values()]
            if any(changed):
                self._on_change()
        # The kernel kills a guarded process when the thread that started it ends, and this thread starts the restarted.
        self._idle.set()
        self._ended.wait()

    def _look_at(self, child: Child) -> bool:
        """Moves one child along; True when something changed that readers of the endpoints file should know."""
        now = time.monotonic()
        if child.state == "waiting to restart":
            if now < child.restart_at:
                return False
            self._spawn(child)
            return True
        assert child.process is not None
        code = child.process.poll()
        if code is not None:
            self._bury(child, code, now)
            return True
        if child.state == "starting":
            why = self._probe(child.spec)
            child.not_ready_because = why or ""
            if why is None:
                child.state, child.ready_at = "serving", now
                return True
        return False

    def _bury(self, child: Child, code: int, now: float) -> None:
        self._clear_group(child)
        never_served = child.ready_at is None and child.restarts == 0
        lived = now - child.ready_at if child.ready_at is not None else 0.0
        child.quick_deaths = child.quick_deaths + 1 if lived < _QUICK_DEATH_SECONDS else 1
        name, how = child.spec.name, _how(code)
        if never_served or child.quick_deaths > _QUICK_DEATHS:
            child.state = "failed"
            what = "ended while starting" if never_served else f"died {child.quick_deaths} times in a row"
            self.failure = StackFailed(f"{name} {what} ({how})", log=child.log)
            return
        backoff = min(_LAST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0 ** (child.quick_deaths - 1))
        child.restarts += 1
        child.state, child.restart_at = "waiting to restart", now + backoff
        child.not_ready_because = f"{how}; restarts in {backoff:.1f} s"
        if child._log_handle is not None:
            child._log_handle.write(
                f"--- launcher: {name} {how}; restart {child.restarts} in {backoff:.1f} s\n".encode()
            )
            child._log_handle.flush()

    def _end(self, child: Child, grace: float) -> None:
        process = child.process
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            if process.poll() is None:
                process.kill()
                process.wait()
            self._clear_group(child)
        if child.state != "failed":
            child.state = "stopped"
        if child._log_handle is not None:
            child._log_handle.close()
            child._log_handle = None

    def _clear_group(self, child: Child) -> None:
        """Whatever the dead process left running goes too."""
        assert child.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        self._guardian.discard(child.process.pid)
        child.process = None


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLI_PREFIX)}
    return {**kept, **extra}


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
