"""How a local stack is shown while it starts, runs and stops (standard error); shared by `up` and `demo`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from deploy.launcher import Stack, StateDirInUse
from deploy.ports import PortInUse
from deploy.processes import STOP_ORDER
from deploy.supervisor import StackFailed
from services.cli.output import CliError, UsageProblem, note, stderr

_COLOURS = {"serving": "green", "failed": "red", "stopped": "dim"}
_START_ORDER = tuple(reversed(STOP_ORDER))


def start_with_progress(stack: Stack) -> None:
    """Starts `stack` with a live table of its processes. Raises CliError with the cause and the log."""
    began = time.monotonic()
    with explained(), _live() as show:
        stack.start(lambda running: show(running, time.monotonic() - began))


@contextmanager
def explained() -> Iterator[None]:
    """Turns what a stack raises into an error people can act on."""
    try:
        yield
    except (PortInUse, StateDirInUse) as error:
        what, _, todo = str(error).partition(". ")
        raise UsageProblem(what, todo) from error
    except StackFailed as error:
        if error.log is None:
            raise CliError(str(error)) from error
        raise CliError(f"{error}\n{indented(error.tail)}", f"read {error.log}") from error


def indented(text: str) -> str:
    """A log's tail, set off from our own words."""
    return "\n".join(f"  | {line}" for line in text.splitlines())


@contextmanager
def _live() -> Iterator[Callable[[Stack, float], None]]:
    if not stderr.is_terminal:
        yield _Lines()
        return
    with Live(console=stderr, refresh_per_second=8, transient=True) as live:
        yield lambda stack, seconds: live.update(table(stack, seconds))


class _Lines:
    """Progress where there is no terminal: a line when something changed."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, stack: Stack, seconds: float) -> None:
        for name, child in stack.children.items():
            if child.state == "serving" and name not in self._told:
                self._told.add(name)
                note(f"{seconds:6.1f} s  {name} serves")


def table(stack: Stack, seconds: float) -> Table:
    """Every process with its state."""
    view = Table(title=f"starting Rollwise, {seconds:.0f} s", box=None, title_justify="left", pad_edge=False)
    for heading in ("process", "state", ""):
        view.add_column(heading)
    children = stack.children
    for name in (name for name in _START_ORDER if name in children):
        child = children[name]
        colour = _COLOURS.get(child.state, "yellow")
        view.add_row(name, f"[{colour}]{child.state}[/]", "" if child.state == "serving" else child.not_ready_because)
    return view


def stop_with_progress(stack: Stack) -> None:
    """Stops everything and says so."""
    if not stack.children:
        stack.stop()
        return
    with stderr.status("stopping") as status:
        stack.stop(lambda name: status.update(f"stopping {name}"))


def addresses(stack: Stack) -> Table:
    """Where everything listens."""
    view = Table(box=None, pad_edge=False)
    for heading in ("what", "address", "metrics", "pid"):
        view.add_column(heading)
    ends = stack.endpoints
    assert ends is not None
    rows = {
        "trainer API": (ends.api_url + "  (docs: /docs)", "api"),
        "value prior REST": (ends.value_prior_url, ""),
        "value prior gRPC": (ends.targets["value_prior"], "value_prior"),
        "generation gRPC": (ends.targets["generation"], "generation"),
        "verifier gRPC": (ends.targets["verifier"], "verifier"),
        "allocator gRPC": (ends.targets["allocator"], "allocator"),
        "trainer worker": ("-", "worker"),
        "Redis": (ends.redis_url, "redis"),
    }
    for title, (address, name) in rows.items():
        view.add_row(title, address, ends.metrics.get(name, ""), str(ends.pids.get(name, "")))
    return view
