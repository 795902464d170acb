"""A small run as trainer/recorder.py leaves it: four steps of five prompts under OSLA, three evaluations."""

from __future__ import annotations

import random
from typing import Any

SPEC = {"policy": "tiny", "preset": "v0.5", "seed": 3, "steps": 4, "prompts_per_step": 5}


def run() -> dict[str, Any]:
    draw = random.Random(0)
    trail, metrics = [], [evaluation(0, 0.2)]
    for step in range(4):
        for number in range(5):
            rollouts = 4 if number else 9
            rewards = [float(draw.random() < 0.3 + 0.1 * step) for _ in range(rollouts)]
            trail.append(group(step, f"p{step}-{number}", rewards, prior=0.3 + 0.1 * step))
        metrics.append(
            {"kind": "step", "step": step, "gradient_norm": 1.0 + step, "entropy": 2.0 - 0.3 * step, "loss": 0.1}
        )
        if step == 1:
            metrics.append(evaluation(2, 0.4))
    metrics.append(evaluation(4, 0.7))
    progress = {"step": 4, "submitted": 20, "trained": 20, "filtered": 0, "dropped": 0, "in_flight": 0, "rollouts": 100}
    job = {
        "id": "job-1",
        "state": "succeeded",
        "spec": SPEC,
        "progress": progress,
        "error": None,
        "started_at": 10.0,
        "finished_at": 73.5,
    }
    return {"job": job, "metrics": metrics, "trail": trail}


def evaluation(step: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "accuracy": accuracy, "prompts": 50}


def group(step: int, prompt_id: str, rewards: list[float], *, prior: float, low: float = 0.0) -> dict[str, Any]:
    looks = range(4, len(rewards) + 1)
    return {
        "step": step,
        "key": {"job_id": "job-1", "lineage": 1, "step": step, "prompt_id": prompt_id, "attempt": 0},
        "prompt": f"<b>What</b> is {prompt_id}?",
        "state": "trained",
        "cause": None,
        "prior": {"value": prior, "uncertainty": 0.2, "source": "PRIOR_SOURCE_CONTEXT", "context_size": 8},
        "scale": {"low": low, "high": 1.0},
        "budget": {"osla": {"k_min": 4, "k_max": 16, "price": 0.00390625, "round_size": 1}},
        "rewards": rewards,
        "baselines": [0.5] * len(rewards),
        "trail": [decision(rewards[:k], prior, last=k == len(rewards)) for k in looks],
        "unjudged": [],
        "samples": [{"text": "7 <i>", "reward": rewards[0], "tokens": 2, "finish": "stop", "verdict": "equal"}],
    }


def decision(rewards: list[float], prior: float, *, last: bool) -> dict[str, Any]:
    return {
        "rollouts": len(rewards),
        "rewards": rewards,
        "prior": prior,
        "mean": sum(rewards) / len(rewards),
        "delta_squared": 0.1,
        "weight": 0.4,
        "baseline": 0.5,
        "expected_gain": 0.01,
        "cost": 0.004,
        "kind": "stop" if last else "continue",
        "more": 0 if last else 1,
    }
