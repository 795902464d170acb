"""What a run leaves for people: metrics.jsonl (one step a line), evaluations in it, and trail.jsonl (one group a line).

Lines are appended and flushed; after a crash the last may be torn, and readers skip it. A resume from step n first
removes what steps n and later wrote, so every step and every group is in the files once. This module knows no service.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rollwise.v1 import allocator_pb2, common_pb2, value_prior_pb2

SAMPLE_CHARACTERS = 400
SAMPLES_KEPT = 2


class Recorder:
    """Writes one job's files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_path = folder / "metrics.jsonl"
        self.trail_path = folder / "trail.jsonl"

    def rewind(self, steps_done: int) -> None:
        """Removes what steps from `steps_done` on wrote (an evaluation after n steps belongs to step n and stays).

        The evaluation at `steps_done` itself was made from the weights that are resumed from.
        """
        _keep(self.metrics_path, lambda line: _before(line, steps_done))
        _keep(self.trail_path, lambda line: int(line["step"]) < steps_done)

    def step(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Appends one step's line; returns it as written (no NaN or infinity: those become null)."""
        line: dict[str, Any] = clean({"kind": "step", **metrics})
        _append(self.metrics_path, [line])
        return line

    def evaluation(self, result: dict[str, Any]) -> dict[str, Any]:
        """Appends one evaluation's line."""
        line: dict[str, Any] = clean({"kind": "evaluation", **result})
        _append(self.metrics_path, [line])
        return line

    def groups(self, lines: list[dict[str, Any]]) -> None:
        """Appends groups, as `group_line` describes them."""
        _append(self.trail_path, [clean(line) for line in lines])


def group_line(
    group: allocator_pb2.ScoredGroup, *, step: int, final: str, cause: str | None, baselines: list[float] | None
) -> dict[str, Any]:
    """One group for trail.jsonl: everything needed to replay its decisions offline, and a look at its texts.

    `step` is the step that consumed it (the key's is the step that drew it).
    """
    prior: dict[str, Any] | None = None
    if group.HasField("prior"):
        prior = {
            "value": group.prior.value,
            "uncertainty": group.prior.uncertainty,
            "source": value_prior_pb2.PriorSource.Name(group.prior.source),
            "context_size": group.prior.context_size,
        }
    return {
        "step": step,
        "key": {
            "job_id": group.key.job_id,
            "lineage": group.key.lineage,
            "step": group.key.step,
            "prompt_id": group.key.prompt_id,
            "attempt": group.key.attempt,
        },
        "prompt": group.prompt_text,
        "state": final,
        "cause": cause,
        "cause_detail": group.cause_detail or None,
        "prior": prior,
        "scale": {"low": group.scale.low, "high": group.scale.high},
        "budget": MessageToDict(group.budget, preserving_proto_field_name=True),
        "rewards": [rollout.reward for rollout in group.rollouts],
        "baselines": baselines,
        "trail": [decision_line(decision) for decision in group.trail],
        "policy_version": group.policy_version,
        "seconds": max(0.0, group.closed_at - group.started_at),
        "unjudged": [rollout.verdict.reason for rollout in group.unjudged],
        "samples": [_sample_line(rollout) for rollout in [*group.rollouts][:SAMPLES_KEPT]],
        "trace_id": group.trace_id,
    }


def decision_line(decision: allocator_pb2.Decision) -> dict[str, Any]:
    """One decision; `prior` is null when none was asked for."""
    return {
        "rollouts": decision.rollouts,
        "rewards": list(decision.rewards),
        "prior": decision.prior if decision.HasField("prior") else None,
        "mean": decision.mean,
        "delta_squared": decision.delta_squared,
        "weight": decision.weight,
        "baseline": decision.baseline,
        "expected_gain": decision.expected_gain,
        "cost": decision.cost,
        "kind": allocator_pb2.DecisionKind.Name(decision.kind).removeprefix("DECISION_KIND_").lower(),
        "more": decision.more,
    }


def _sample_line(rollout: allocator_pb2.Rollout) -> dict[str, Any]:
    return {
        "text": rollout.text[:SAMPLE_CHARACTERS],
        "reward": rollout.reward,
        "tokens": len(rollout.token_ids) // 4,
        "finish": common_pb2.FinishReason.Name(rollout.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "verdict": rollout.verdict.reason,
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's lines as objects; a torn last line is left out, a missing file is empty."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue  # torn by a crash in the middle of the file: what followed it is whole
            if isinstance(line, dict):
                yield line


def clean(value: Any) -> Any:
    """`value` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _before(line: dict[str, Any], steps_done: int) -> bool:
    # An evaluation after n steps carries step n, a step its own number, counted from 0.
    return int(line["step"]) < steps_done + (line.get("kind") == "evaluation")


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    if not path.is_file():
        return
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for line in read_lines(path):
            if wanted(line):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    temporary.replace(path)
