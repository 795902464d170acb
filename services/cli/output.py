"""What every command says and how it ends: results on standard output, everything else on standard error.

Exit codes: 0 fine, 1 the job or a check failed, 2 wrong usage or input, 3 a service is out of reach, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from rich.console import Console

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

# Tables are cut to the width of a terminal; where there is none, nothing needs cutting.
_WIDTH_OF_A_PIPE = 180


def _console(*, error: bool) -> Console:
    stream = sys.stderr if error else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=error, soft_wrap=True, width=None if known else _WIDTH_OF_A_PIPE)


stdout = _console(error=False)
stderr = _console(error=True)


class CliError(Exception):
    """Ends a command. `what` went wrong in one line, `todo` is what to do about it, `code` the exit code."""

    def __init__(self, what: str, todo: str = "", *, code: int = FAILED) -> None:
        super().__init__(what)
        self.what = what
        self.todo = todo
        self.code = code


class UsageProblem(CliError):
    """Wrong usage or input: exit code 2."""

    def __init__(self, what: str, todo: str = "") -> None:
        super().__init__(what, todo, code=USAGE)


class Unreachable(CliError):
    """A service does not answer: exit code 3."""

    def __init__(self, what: str, todo: str = "") -> None:
        super().__init__(what, todo, code=UNREACHABLE)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON value on standard output, nothing else with it; not-a-number becomes null."""
    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(error: CliError) -> None:
    """One line what, one line what to do."""
    stderr.print(f"[bold red]error:[/] {_plain(error.what)}", highlight=False)
    if error.todo:
        stderr.print(f"[bold]  try:[/] {_plain(error.todo)}", highlight=False)


def note(text: str) -> None:
    """A line of progress, on standard error."""
    stderr.print(text, highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
