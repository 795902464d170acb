"""The demo's jobs: for each policy that needs no GPU, data it can learn from and settings that suit it."""

from __future__ import annotations

from typing import Any

from services.common.errors import InvalidArgument
from trainer.config import DataSource, GymTask, JobSpec
from trainer.data import did_you_mean, hash_seed

_SUMS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def demo_job(policy: str, steps: int | None = None, seed: int = 0) -> JobSpec:
    """The demo of `smollm2` or `tiny`: V0.5 with OSLA on small sums. InvalidArgument for another policy."""
    jobs = {"smollm2": _smollm2, "tiny": _tiny}
    if policy not in jobs:
        raise InvalidArgument(f"there is no demo of policy {policy!r}{did_you_mean(policy, list(jobs))}")
    job = jobs[policy](seed)
    if steps is not None:
        job["steps"] = steps
    return JobSpec.model_validate({**job, "policy": policy, "preset": "v0.5", "seed": seed, "name": f"demo {policy}"})


def sums(purpose: str, size: int, seed: int, *, digits: int, spacings: tuple[str, ...] = ("single",)) -> DataSource:
    """Sums and differences of two numbers, `size` in all; `purpose` ("train", "eval") keeps the draws apart."""
    tasks = [
        GymTask(
            task="basic_arithmetic",
            size=size // len(spacings),
            # Entry i of a task is drawn from seed + i: seeds must lie further apart than any size.
            seed=hash_seed(purpose, spacing, seed) % 10**6 * 1000,
            config={**_SUMS, "min_digits": 1, "max_digits": digits, "whitespace": spacing},
        )
        for spacing in spacings
    ]
    return DataSource(reasoning_gym=tasks)


def _smollm2(seed: int) -> dict[str, Any]:
    """Two-term sums of one- and two-digit numbers, to be answered as `7 + 5 = 12`.

    At first the model explains at length and is cut off; about one rollout in ten writes the calculation out, and those
    are right about half the time. So there is a form to find, and then arithmetic to sharpen.
    """
    return {
        "data": sums("train", 1000, seed, digits=2),
        "evaluation": {"data": sums("eval", 200, 0, digits=2), "every": 7},
        "format": {"system": "Answer like this: 7 + 5 = 12"},
        "algorithm": {"budget": {"k_min": 4, "k_max": 8, "round_size": 2}},
        "optimizer": {
            "learning_rate": 2e-5,
            "weight_decay": 0.0,
            "warmup_steps": 3,
            "micro_batch_tokens": 1024,
        },
        "sampling": {"temperature": 1.0, "max_tokens": 14},
        "steps": 14,
        "prompts_per_step": 12,
        "checkpoint_every": 0,
    }


def _tiny(seed: int) -> dict[str, Any]:
    """Sums of one-digit numbers, written with and without spaces, which `tiny` was taught hastily."""
    spacings = ("single", "no_space")
    return {
        "data": sums("train", 2000, seed, digits=1, spacings=spacings),
        "evaluation": {"data": sums("eval", 200, 0, digits=1, spacings=spacings), "every": 10},
        "algorithm": {"budget": {"k_min": 4, "k_max": 8, "round_size": 2}},
        "optimizer": {
            "learning_rate": 1e-4,
            "weight_decay": 0.0,
            "warmup_steps": 2,
            "micro_batch_tokens": 8192,
        },
        "sampling": {"temperature": 1.0, "max_tokens": 5},
        "steps": 20,
        "prompts_per_step": 32,
        "checkpoint_every": 10,
    }
