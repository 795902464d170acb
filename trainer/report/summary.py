"""The numbers of a report, from what the recorder left: metrics.jsonl and trail.jsonl (see trainer/recorder.py).

Pure: lists of dicts in, one JSON-serialisable dict out. What was not recorded is null, never a guess.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

# What GRPO and DAPO runs spend on every prompt; the yardstick of all rollout counts.
FIXED_ROLLOUTS = 16
FORMAT = 1
_BINS = 10
_SAMPLES = 12
Line = dict[str, Any]


def build_report(
    *,
    job: Line,
    metrics: Sequence[Line],
    trail: Sequence[Line],
    seconds: float | None = None,
    run: Line | None = None,
) -> Line:
    """Everything the page shows. `job` is the API's record, `metrics` and `trail` the lines of the two files.

    `seconds`: wall time of the whole run; by default from the job's own times. `run`: what the worker wrote of the
    run's making beside the specification (versions, data fingerprint, machine).
    """
    spec = job.get("spec") or {}
    progress = job.get("progress") or {}
    steps = sorted((line for line in metrics if line.get("kind") == "step"), key=lambda line: int(line["step"]))
    evaluations = [line for line in metrics if line.get("kind") == "evaluation"]
    groups = _group_counts(progress, trail)
    used = sum(_rollouts(line) for line in trail)
    rollouts = int(progress.get("rollouts") or used)
    accuracy = accuracy_curve(evaluations, trail)
    return {
        "format": FORMAT,
        "job_id": job.get("id"),
        "name": job.get("name"),
        "state": job.get("state"),
        "error": job.get("error"),
        "policy": spec.get("policy"),
        "preset": spec.get("preset"),
        "seed": spec.get("seed"),
        "steps": int(progress.get("step") or len(steps)),
        "prompts": groups["submitted"],
        "rollouts": rollouts,
        "rollouts_fixed": FIXED_ROLLOUTS * groups["submitted"],
        "accuracy_before": accuracy[0]["accuracy"] if accuracy else None,
        "accuracy_after": accuracy[-1]["accuracy"] if len(accuracy) > 1 else None,
        "seconds": round(seconds if seconds is not None else _job_seconds(job), 1),
        "groups": groups,
        "filter_causes": dict(Counter(str(line["cause"]) for line in trail if line.get("cause"))),
        "accuracy": accuracy,
        "series": step_series(steps, trail),
        "rollouts_per_prompt": rollouts_per_prompt(trail),
        "calibration": calibration(trail),
        "samples": pick_samples(trail),
        "recorded": [*steps, *evaluations],
        "spec": spec,
        "run": run or {},
    }


def success_rate(line: Line, rewards: Sequence[float]) -> float:
    """Mean of `rewards` as a success rate in [0, 1], by the group's own reward scale."""
    scale = line.get("scale") or {}
    low, high = float(scale.get("low", 0.0)), float(scale.get("high", 1.0))
    return (math.fsum(rewards) / len(rewards) - low) / ((high - low) or 1.0)


def accuracy_curve(evaluations: Sequence[Line], trail: Sequence[Line]) -> list[Line]:
    """One point an evaluation: steps done, rollouts spent until then, accuracy in [0, 1] and how many prompts."""
    spent: dict[int, int] = defaultdict(int)
    for line in trail:
        spent[int(line["step"])] += _rollouts(line)
    points: dict[int, Line] = {}
    for line in evaluations:  # the last evaluation after a step is the one that counts
        step = int(line["step"])
        points[step] = {
            "step": step,
            "rollouts": sum(count for at, count in spent.items() if at < step),
            "accuracy": line.get("accuracy"),
            "prompts": line.get("prompts"),
        }
    return [points[step] for step in sorted(points) if points[step]["accuracy"] is not None]


def step_series(steps: Sequence[Line], trail: Sequence[Line]) -> dict[str, list[Any]]:
    """Aligned lists, one entry a step: what the step recorded, and means over the groups it consumed."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in trail:
        if line.get("rewards"):
            by_step[int(line["step"])].append(line)
    at = [int(line["step"]) for line in steps] or sorted(by_step)
    recorded = {int(line["step"]): line for line in steps}

    def of_step(*names: str) -> list[Any]:
        return [next((recorded.get(s, {}).get(n) for n in names if n in recorded.get(s, {})), None) for s in at]

    return {
        "step": at,
        "gradient_norm": of_step("gradient_norm"),
        "entropy": of_step("entropy"),
        "loss": of_step("loss"),
        "learning_rate": of_step("learning_rate"),
        "reward": [_mean([success_rate(g, g["rewards"]) for g in by_step[s]]) for s in at],
        "rollouts_per_prompt": [_mean([float(_rollouts(g)) for g in by_step[s]]) for s in at],
        "seconds": of_step("seconds", "step_seconds"),
    }


def rollouts_per_prompt(trail: Sequence[Line]) -> Line:
    """Mean and histogram (rollouts -> groups), unjudged rollouts included: they were paid for."""
    counts = Counter(_rollouts(line) for line in trail)
    total = sum(counts.values())
    mean = sum(size * groups for size, groups in counts.items()) / total if total else None
    return {"mean": mean, "histogram": {str(size): counts[size] for size in sorted(counts)}, "fixed": FIXED_ROLLOUTS}


def calibration(trail: Sequence[Line]) -> Line:
    """Reliability of the prior V and its Brier score beside that of a running mean.

    Measured on each group's first look only (the k_min rollouts bought before any decision): what is bought after it
    depends on how the first ones came out, and would bias the comparison. Brier: mean over groups of the mean over
    rollouts of (V - r)^2. The running mean predicts, for every group of a step, the mean over all earlier steps.
    """
    squared_prior, squared_mean = list[float](), list[float]()
    bins: list[list[tuple[float, float]]] = [[] for _ in range(_BINS)]
    seen, total = 0, 0.0
    pending: list[float] = []
    at: int | None = None
    for line in sorted((line for line in trail if line.get("prior")), key=lambda line: int(line["step"])):
        first = _first_look(line)
        if not first:
            continue
        if line["step"] != at:
            seen, total, pending, at = seen + len(pending), total + sum(pending), [], line["step"]
        predicted = float(line["prior"]["value"])
        scores = [success_rate(line, [reward]) for reward in first]
        rate = sum(scores) / len(scores)
        running = total / seen if seen else 0.5
        squared_prior.append(sum((predicted - score) ** 2 for score in scores) / len(scores))
        squared_mean.append(sum((running - score) ** 2 for score in scores) / len(scores))
        bins[min(_BINS - 1, int(predicted * _BINS))].append((predicted, rate))
        pending.append(rate)
    return {
        "groups": len(squared_prior),
        "brier_prior": _mean(squared_prior),
        "brier_running_mean": _mean(squared_mean),
        "bins": [
            {
                "low": index / _BINS,
                "high": (index + 1) / _BINS,
                "predicted": _mean([predicted for predicted, _ in members]),
                "observed": _mean([rate for _, rate in members]),
                "groups": len(members),
            }
            for index, members in enumerate(bins)
            if members
        ],
    }


def pick_samples(trail: Sequence[Line], count: int = _SAMPLES) -> list[Line]:
    """Groups to show, spread evenly over the run, with a few completions and the decisions that were taken."""
    shown = [line for line in trail if line.get("samples")]
    if not shown:
        return []
    stride = max(1, len(shown) // count)
    picked = shown[::stride][: count - 1]
    if shown[-1] is not picked[-1]:
        picked.append(shown[-1])
    return [
        {
            "step": line["step"],
            "prompt_id": (line.get("key") or {}).get("prompt_id"),
            "prompt": line.get("prompt"),
            "state": line.get("state"),
            "prior": (line.get("prior") or {}).get("value"),
            "rewards": line.get("rewards"),
            "trail": line.get("trail"),
            "samples": line["samples"],
        }
        for line in picked
    ]


def _first_look(line: Line) -> list[float]:
    decisions = line.get("trail") or []
    rewards = decisions[0].get("rewards") if decisions else None
    return [float(reward) for reward in rewards or []]


def _rollouts(line: Line) -> int:
    return len(line.get("rewards") or []) + len(line.get("unjudged") or [])


def _group_counts(progress: Line, trail: Sequence[Line]) -> dict[str, int]:
    names = ("submitted", "trained", "filtered", "dropped", "in_flight")
    if progress.get("submitted"):
        return {name: int(progress.get(name) or 0) for name in names}
    states = Counter(str(line.get("state")) for line in trail)
    counts = {name: states[name] for name in ("trained", "filtered", "dropped")}
    return {"submitted": sum(counts.values()), **counts, "in_flight": 0}


def _job_seconds(job: Line) -> float:
    begin, end = job.get("started_at") or job.get("created_at"), job.get("finished_at")
    return float(end) - float(begin) if begin and end else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
