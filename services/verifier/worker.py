"""What runs inside one worker process: read a task, judge it, answer; nothing else.

Tasks and verdicts travel as JSON, so that nothing a worker sends back can run code in its parent.
While it judges, the process can start no program, open no socket and write, move or delete no file.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from services.verifier import verdicts
from services.verifier.verdicts import Kind, Verdict

MATH = "math"
REASONING_GYM = "reasoning_gym"
DOMAINS = (MATH, REASONING_GYM)
JUDGE = "judge"
CHECK = "check"

_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.killpg",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.putenv", "os.unsetenv", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "urllib.", "ftplib.",
    "smtplib.", "webbrowser.", "signal.pthread_kill", "tempfile.",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def run(connection: Connection, domains: Sequence[str], limit_seconds: float, memory_bytes: int) -> None:
    """The process's main function: warm up, say so, then judge until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers itself
    sys.dont_write_bytecode = True
    _warm(domains)
    gc.freeze()
    _limit_memory(memory_bytes)
    _forbid()
    connection.send_bytes(b"ready")
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        _limit_cpu(limit_seconds)
        exhausted = False
        try:
            verdict = handle(json.loads(data))
        except MemoryError:
            exhausted = True
            verdict = verdicts.no_verdict(f"{verdicts.FAULT}: the worker's memory limit was reached")
        except RecursionError:
            verdict = verdicts.no_verdict(f"{verdicts.FAULT}: nested too deeply")
        except BaseException as error:  # noqa: BLE001 - SystemExit from a scorer too: reported as a fault, never a 0
            verdict = verdicts.no_verdict(f"{verdicts.FAULT}: {type(error).__name__}: {str(error)[:200]}")
        connection.send_bytes(encode_verdict(verdict))
        if exhausted:
            return  # a fresh process is surer than one that ran out of memory


def handle(task: dict[str, Any]) -> Verdict:
    """The verdict on one task: {"op": judge|check, "domain", "completion", and the reference's fields}."""
    checking = task["op"] == CHECK
    if task["domain"] == MATH:
        from services.verifier import math as domain

        return domain.check(task["gold"]) if checking else domain.judge(task["gold"], task["completion"])
    if task["domain"] == REASONING_GYM:
        from services.verifier import reasoning_gym as gym

        if checking:
            return gym.check(task["task"], task["entry_json"])
        return gym.judge(task["task"], task["entry_json"], task["completion"])
    return verdicts.no_verdict(f"{verdicts.UNSUPPORTED} domain {task['domain']!r}")


def encode_verdict(verdict: Verdict) -> bytes:
    """A verdict as JSON."""
    return json.dumps([verdict.kind.value, verdict.score, verdict.reason, verdict.extracted]).encode()


def decode_verdict(data: bytes) -> Verdict:
    """A verdict from its JSON; ValueError where it is none."""
    kind, score, reason, extracted = json.loads(data)
    if not (isinstance(score, (int, float)) and math.isfinite(score) and 0 <= score <= 1):
        raise ValueError(f"a worker's score must be in [0, 1], not {score!r}")
    return Verdict(Kind(kind), float(score), str(reason), str(extracted))


def _warm(domains: Sequence[str]) -> None:
    if MATH in domains:
        from services.verifier import math as domain

        domain.judge("\\frac{1}{2}", "\\boxed{x^2+1}")  # fills the parser's tables
    if REASONING_GYM in domains:
        from services.verifier import reasoning_gym as gym

        gym.warm()


def _limit_memory(memory_bytes: int) -> None:
    if memory_bytes > 0:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))


def _limit_cpu(limit_seconds: float) -> None:
    """Ends this process even where its parent was killed and nobody else is left to end it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + limit_seconds) + 5
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _forbid() -> None:
    """A second wall behind the checks in the domains: Python's audit events of anything but computing raise."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            mode, flags = args[1], args[2]
            writes = isinstance(flags, int) and flags & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            )
            if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
                raise PermissionError("a verifier worker writes no file")
        elif event.startswith(_FORBIDDEN):
            raise PermissionError(f"a verifier worker may not use {event}")

    sys.addaudithook(hook)
