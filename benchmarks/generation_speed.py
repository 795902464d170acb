"""Tokens per second of the transformers engine against `model.generate`, in one process, on the same prompts.

Eight prompts of 50 tokens, 8 rollouts each of exactly 16 tokens, float32 SmolLM2. Both are warmed up and take turns;
the ratio is that of the medians. `python -m benchmarks.generation_speed --json` prints one object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

# As the service does, for both contenders: on shared cores spinning OpenMP threads would measure the neighbours.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from services.generation.engine import GenerationRequest, Sampling
from services.generation.transformers_engine import TransformersEngine

NEVER = 2**31


def _folder(given: str | None) -> Path:
    if given:
        return Path(given)
    from services.common.models import smollm2_folder

    return smollm2_folder()


def _prompts(count: int, length: int, vocabulary: int) -> list[tuple[int, ...]]:
    ids = np.random.default_rng(0).integers(100, vocabulary, size=(count, length))
    return [tuple(row) for row in ids.tolist()]


async def _engine_round(
    engine: TransformersEngine, prompts: list[tuple[int, ...]], rollouts: int, tokens: int, turn: int
) -> float:
    # Another first token each turn, so that nothing comes from the prefix cache.
    began = time.perf_counter()
    results = await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(
                    (turn + 1, *prompt[1:]),
                    rollouts,
                    Sampling(max_tokens=tokens, seed=turn, stop_token_ids=(NEVER,)),
                )
            )
            for prompt in prompts
        )
    )
    seconds = time.perf_counter() - began
    sampled = sum(len(sample.tokens) for result in results for sample in result.samples)
    assert sampled == len(prompts) * rollouts * tokens, sampled
    return sampled / seconds


def _generate_round(model: Any, prompts: list[tuple[int, ...]], rollouts: int, tokens: int, turn: int) -> float:
    ids = torch.tensor([(turn + 1, *prompt[1:]) for prompt in prompts])
    began = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_return_sequences=rollouts,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    seconds = time.perf_counter() - began
    sampled = (output.shape[1] - ids.shape[1]) * output.shape[0]
    assert sampled == len(prompts) * rollouts * tokens, sampled
    return float(sampled / seconds)


def _summary(rates: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(rates), 1),
        "lowest": round(min(rates), 1),
        "highest": round(max(rates), 1),
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both contenders' tokens per second and their ratio."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    folder = _folder(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = TransformersEngine(model=folder, threads=arguments.threads, pack=not arguments.no_pack)
    await engine.start()
    prompts = _prompts(arguments.prompts, arguments.prompt_tokens, model.config.vocab_size)
    ours: list[float] = []
    theirs: list[float] = []
    # Warm-up: every code path once, on little work.
    _generate_round(model, prompts, 2, 3, 0)
    await _engine_round(engine, prompts, 2, 3, 0)
    for turn in range(1, arguments.repetitions + 1):
        theirs.append(_generate_round(model, prompts, arguments.rollouts, arguments.tokens, turn))
        ours.append(await _engine_round(engine, prompts, arguments.rollouts, arguments.tokens, turn))
    await engine.close()
    mine, reference = _summary(ours), _summary(theirs)
    return {
        "threads": arguments.threads,
        "repetitions": arguments.repetitions,
        "engine_tokens_per_second": mine,
        "generate_tokens_per_second": reference,
        "ratio": round(mine["median"] / reference["median"], 2),
    }


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder; default SmolLM2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-pack", action="store_true", help="without the packed copy of the weights")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(result))
        return
    for name in ("engine_tokens_per_second", "generate_tokens_per_second"):
        rate = result[name]
        print(f"{name:28s} {rate['median']:8.1f}  ({rate['lowest']:.1f} .. {rate['highest']:.1f})")
    print(f"ratio                        {result['ratio']:8.2f}")


if __name__ == "__main__":
    main()
