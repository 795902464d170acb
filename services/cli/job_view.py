"""What is known of a running job, gathered from its events and its record, and how it looks on a terminal."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from services.cli.client import Event
from trainer.records import TERMINAL

FIXED_ROLLOUTS = 16
# Other events worth a line.
_TOLD = {
    "checkpoint": "checkpoint after {step} steps",
    "weights_repushed": "generation came back without the weights; version {policy_version} was sent again",
}
_COLOURS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan"}


@dataclass
class JobView:
    """The newest of everything; safe to feed from one thread and to draw from another."""

    record: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    activity: str = ""
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def state(self) -> str:
        """The job's state."""
        return str(self.record.get("state", "?"))

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL

    def take_record(self, record: dict[str, Any]) -> None:
        """The job as the API has it now."""
        with self._lock:
            self.record = record

    def take(self, event: Event) -> str | None:
        """One event; returns a line worth telling where there is no live view, or None."""
        data = event.data if isinstance(event.data, dict) else {}
        with self._lock:
            if event.kind == "state":
                self.record = {**self.record, "state": data.get("state"), "error": data.get("error")}
                self.activity = ""
                return f"job is {data.get('state')}"
            if event.kind == "step":
                self.step = data
                return step_line(data, self._steps())
            if event.kind == "evaluation":
                self.evaluations.append(data)
                return f"evaluation after {data.get('step')} steps: accuracy {_percent(data.get('accuracy'))}"
            told = _TOLD.get(event.kind)
            if told is None:
                return None
            self.activity = told.format(**{"step": "?", "policy_version": "?", **data})
            return self.activity

    def draw(self) -> RenderableType:
        """The live view."""
        with self._lock:
            return Group(self._head(), self._bar(), self._numbers())

    def _steps(self) -> int:
        return int((self.record.get("progress") or {}).get("steps") or 0)

    def _head(self) -> str:
        name = self.record.get("name") or self.record.get("id", "")
        colour = _COLOURS.get(self.state, "yellow")
        seconds = time.monotonic() - self.began
        text = f"[bold]{name}[/]  [{colour}]{self.state}[/]  {seconds:.0f} s"
        return f"{text}  [dim]{self.activity}[/]" if self.activity else text

    def _bar(self) -> RenderableType:
        progress = self.record.get("progress") or {}
        done, steps = int(progress.get("step") or 0), self._steps()
        row = Table.grid(padding=(0, 1))
        row.add_row("step", ProgressBar(total=max(steps, 1), completed=done, width=40), f"{done}/{steps}")
        return row

    def _numbers(self) -> RenderableType:
        progress, step = self.record.get("progress") or {}, self.step
        prompts = sum(int(progress.get(name) or 0) for name in ("trained", "filtered", "dropped"))
        spent = int(progress.get("rollouts") or 0)
        mean = f"{spent / prompts:.1f} of {FIXED_ROLLOUTS}" if prompts else "-"
        accuracy = " → ".join(_percent(point.get("accuracy")) for point in self.evaluations) or "-"
        table = Table.grid(padding=(0, 2))
        table.add_row("accuracy (held out)", accuracy)
        table.add_row("reward (sampled)", _number(step.get("reward_mean")))
        table.add_row("rollouts a prompt", mean)
        table.add_row(
            "groups",
            f"{progress.get('submitted', 0)} submitted = {progress.get('trained', 0)} trained + "
            f"{progress.get('filtered', 0)} filtered + {progress.get('dropped', 0)} dropped + "
            f"{progress.get('in_flight', 0)} in flight",
        )
        table.add_row("gradient norm", _number(step.get("gradient_norm")))
        table.add_row("entropy", _number(step.get("entropy")))
        return table


def step_line(data: dict[str, Any], steps: int) -> str:
    """One step in one line, for logs and pipes."""
    parts = [f"step {int(data.get('step', 0)) + 1}/{steps}"]
    for label, key in (
        ("reward", "reward_mean"),
        ("rollouts/prompt", "rollouts_per_prompt"),
        ("gradient norm", "gradient_norm"),
        ("entropy", "entropy"),
    ):
        if data.get(key) is not None:
            parts.append(f"{label} {_number(data[key])}")
    return "  ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else "?"
