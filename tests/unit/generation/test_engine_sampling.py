"""What the engine samples, against transformers itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from services.generation.engine import Finish, GenerationRequest, Sampling

NEVER = 10**6
PROMPTS = [(0, 5, 9, 77), (0, 8), (0, *range(20, 50)), (0, 200, 100, 50, 25, 12, 6, 3)]


def request(prompt, count=1, **keywords):
    sampling = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "stop_token_ids": (NEVER,)}
    sampling |= {key: keywords.pop(key) for key in list(keywords) if key in Sampling.__slots__}
    return GenerationRequest(tuple(prompt), count, Sampling(**sampling), **keywords)


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.003)
    raise AssertionError("never came true")


def forward_logprobs(folder: Path, prompt, tokens, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scaled = logits.double() / (temperature or 1.0)
    return scaled.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize("pack", [True, False])
async def test_greedy_tokens_equal_those_of_generate(kind, pack, start, request_folder):
    folder = request_folder(kind)
    engine = await start(folder, pack=pack)
    results = await asyncio.gather(*(engine.generate(request(p, temperature=0.0, max_tokens=20)) for p in PROMPTS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, min_new_tokens=20
        )
        forced = expected[0, len(prompt) :].tolist()
        # generate suppresses EOS to reach the length; the engine does not, so compare up to it.
        ours = result.samples[0].tokens
        end = ours.index(1) if 1 in ours else len(ours)
        assert ours[:end] == forced[:end]
        assert end > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_equal_a_teacher_forced_forward_pass(temperature, start, llama):
    engine = await start(llama)
    results = await asyncio.gather(*(engine.generate(request(p, 4, temperature=temperature)) for p in PROMPTS))
    gaps = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        for sample in result.samples:
            expected = forward_logprobs(llama, prompt, sample.tokens, temperature)
            gaps.append(np.abs(expected - np.array(sample.logprobs)).mean())
    assert max(gaps) < 1e-5


async def test_seeded_rollouts_do_not_depend_on_what_runs_beside_them(start, llama):
    engine = await start(llama)
    alone = await engine.generate(request(PROMPTS[0], 4))
    third = await engine.generate(request(PROMPTS[0], 1, first_index=2))
    crowd, *_ = await asyncio.gather(
        engine.generate(request(PROMPTS[0], 4)),
        *(engine.generate(request(p, 5, seed=i, max_tokens=7 + i)) for i, p in enumerate(PROMPTS)),
    )
    pinned = await engine.generate(request(PROMPTS[0], 4, pinned_batch=True))
    tokens = [sample.tokens for sample in alone.samples]
    assert [sample.tokens for sample in crowd.samples] == tokens
    assert [sample.tokens for sample in pinned.samples] == tokens
    assert third.samples[0].tokens == tokens[2]
    assert third.samples[0].index == 2
    assert len({tuple(t) for t in tokens}) == 4


async def test_without_a_seed_two_calls_differ(start, llama):
    engine = await start(llama)
    one = await engine.generate(request(PROMPTS[0], 1, seed=None))
    two = await engine.generate(request(PROMPTS[0], 1, seed=None))
    assert one.samples[0].tokens != two.samples[0].tokens


async def test_a_rollout_stops_at_and_includes_the_stop_token(start, llama):
    engine = await start(llama)
    free = (await engine.generate(request(PROMPTS[1]))).samples[0]
    stop = free.tokens[4]
    cut = (await engine.generate(request(PROMPTS[1], stop_token_ids=(stop,)))).samples[0]
    end = free.tokens.index(stop) + 1
    assert cut.tokens == free.tokens[:end]
    assert cut.finish is Finish.STOP
    assert free.finish is Finish.LENGTH
    assert engine.status().stop_token_ids == (1,)
    assert cut.text == " ".join(f"w{t}" for t in cut.tokens if t > 1)


async def test_prompts_beyond_context_or_vocabulary_are_refused_with_numbers(start, llama):
    engine = await start(llama)
    with pytest.raises(InvalidArgument, match=r"120 tokens and the context 96"):
        await engine.generate(request([0] * 120))
    with pytest.raises(InvalidArgument, match=r"300 is outside the vocabulary 0..299"):
        await engine.generate(request([0, 300]))
    with pytest.raises(InvalidArgument, match="empty"):
        await engine.generate(request([]))
    full = await engine.generate(request([0] * 90, max_tokens=50))
    assert len(full.samples[0].tokens) == 6
    assert full.samples[0].finish is Finish.LENGTH


async def test_preconditions_name_their_reason(start, llama):
    idle = await start(None)
    with pytest.raises(FailedPrecondition) as error:
        await idle.generate(request(PROMPTS[0]))
    assert error.value.reason == "NO_WEIGHTS"
    engine = await start(llama)
    with pytest.raises(FailedPrecondition) as error:
        await engine.generate(request(PROMPTS[0], policy_id="job-1"))
    assert error.value.reason == "POLICY_MISMATCH"
    with pytest.raises(FailedPrecondition) as error:
        await engine.generate(request(PROMPTS[0], min_policy_version=1))
    assert error.value.reason == "VERSION_TOO_OLD"


async def test_a_prefill_is_shared_and_kept_for_later_rounds(start, llama):
    engine = await start(llama)
    first = await engine.generate(request(PROMPTS[0], 0, want_feature=True))
    later = await engine.generate(request(PROMPTS[0], 3, want_feature=True))
    assert (first.samples, first.prefix_cached, later.prefix_cached) == ([], False, True)
    assert len(later.samples) == 3
    np.testing.assert_array_equal(first.feature.values, later.feature.values)


async def test_the_feature_is_the_mean_state_of_the_last_ten_prompt_tokens(start, llama):
    engine = await start(llama)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    results = await asyncio.gather(*(engine.generate(request(p, 2, want_feature=True)) for p in PROMPTS))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.feature.layer == 2
        captured: list[torch.Tensor] = []
        handle = model.model.layers[2].register_forward_hook(
            lambda _m, _i, out, keep=captured: keep.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            model(torch.tensor([prompt]))
        handle.remove()
        np.testing.assert_allclose(result.feature.values, captured[0][0, -10:].mean(0).numpy(), atol=1e-5)


async def test_top_k_and_top_p_limit_what_is_drawn(start, llama):
    engine = await start(llama)
    greedy = await engine.generate(request(PROMPTS[0], temperature=0.0))
    narrow = await engine.generate(request(PROMPTS[0], temperature=1.0, top_k=1))
    tiny = await engine.generate(request(PROMPTS[0], temperature=1.0, top_p=1e-6))
    assert narrow.samples[0].tokens == greedy.samples[0].tokens == tiny.samples[0].tokens
    assert narrow.samples[0].logprobs == pytest.approx([0.0] * 12, abs=1e-6)


async def test_cancelling_a_call_frees_its_rows(start, llama_long):
    engine = await start(llama_long)
    task = asyncio.create_task(engine.generate(request(PROMPTS[0], 8, max_tokens=4000)))
    await until(lambda: engine.status().running_rollouts == 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.status().running_rollouts == 0)
    assert len((await engine.generate(request(PROMPTS[0]))).samples[0].tokens) == 12


async def test_at_the_time_limit_what_was_sampled_comes_back(start, llama_long):
    engine = await start(llama_long)
    result = await engine.generate(request(PROMPTS[0], 2, max_tokens=4000, time_limit_seconds=0.3))
    for sample in result.samples:
        assert sample.finish is Finish.DEADLINE
        assert 0 < len(sample.tokens) < 4000
        assert len(sample.tokens) == len(sample.logprobs) == sum(count for _, count in sample.spans)


async def test_more_rollouts_than_rows_are_served_in_turns(start, llama):
    engine = await start(llama, max_rows=3)
    result = await engine.generate(request(PROMPTS[0], 10))
    roomy = await (await start(llama)).generate(request(PROMPTS[0], 10))
    assert [s.tokens for s in result.samples] == [s.tokens for s in roomy.samples]
    assert [s.index for s in result.samples] == list(range(10))


async def test_a_full_queue_refuses_as_busy(start, llama_long):
    engine = await start(llama_long, max_rows=1, max_waiting=2)
    tasks = [asyncio.create_task(engine.generate(request(PROMPTS[0], max_tokens=3000))) for _ in range(1)]
    await until(lambda: engine.status().running_rollouts == 1)
    tasks += [asyncio.create_task(engine.generate(request(PROMPTS[1]))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(ResourceExhausted, match="2 requests wait"):
        await engine.generate(request(PROMPTS[2]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_two_hundred_requests_leave_memory_flat(start, llama):
    engine = await start(llama, prefix_cache_tokens=200)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 300, size=20).tolist()) for _ in range(200)]
    await asyncio.gather(*(engine.generate(request(p, 2, max_tokens=4)) for p in prompts))
    scheduler = engine._scheduler
    assert scheduler._prefixes.tokens <= 200
    slots, positions = scheduler._batch._cache.shape
    await asyncio.gather(*(engine.generate(request(p, 2, max_tokens=4)) for p in prompts))
    assert scheduler._batch._cache.shape == (slots, positions)
    assert (scheduler.running, scheduler.waiting) == (0, 0)
