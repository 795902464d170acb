"""Swapping weights: what serves before, during and after, and what a failing update leaves behind."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from services.generation.engine import Finish, GenerationRequest, Sampling, UpdateMode
from services.generation.served import recall

PROMPT = (0, 5, 9, 77, 31)
NEVER = 10**6


def request(count=1, *, tokens=12, temperature=0.0, prompt=PROMPT, **keywords):
    return GenerationRequest(prompt, count, Sampling(temperature, tokens, stop_token_ids=(NEVER,), seed=5), **keywords)


def logprobs_of(folder: Path, prompt, tokens) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.003)
    raise AssertionError("never came true")


async def until_running(engine, rows: int, tokens: int = 0) -> None:
    await until(lambda: engine.status().running_rollouts >= rows and engine.status().generated_tokens >= tokens)


async def test_new_weights_change_the_greedy_answer_to_theirs(start, llama, other_llama):
    engine = await start(llama)
    before = await engine.generate(request())
    result = await engine.update_weights(other_llama, policy_id="job", version=4)
    after = await engine.generate(request())
    fresh = await (await start(other_llama)).generate(request())
    assert result.policy_version == after.policy_version == 4
    assert before.samples[0].tokens != after.samples[0].tokens == fresh.samples[0].tokens
    assert not after.prefix_cached  # keys and values of the old weights are gone
    expected = logprobs_of(other_llama, PROMPT, after.samples[0].tokens)
    np.testing.assert_allclose(after.samples[0].logprobs, expected, atol=1e-5)
    assert after.samples[0].spans == [(4, 12)]


async def test_under_keep_rollouts_go_on_and_say_which_version_made_which_token(start, llama_long, other_long):
    engine = await start(llama_long)
    calls = [
        asyncio.create_task(engine.generate(request(2, tokens=150 + 20 * i, temperature=1.0, prompt=(0, 9 + i))))
        for i in range(2)
    ]
    await until_running(engine, 4, 40)
    update = await engine.update_weights(other_long, policy_id="", version=1, mode=UpdateMode.KEEP)
    results = await asyncio.gather(*calls)
    assert update.kept_rollouts == 4
    for i, result in enumerate(results):
        for sample in result.samples:
            (first, old), (second, new) = sample.spans
            assert (first, second, old + new) == (0, 1, len(sample.tokens))
            prompt = (0, 9 + i)
            by_old = logprobs_of(llama_long, prompt, sample.tokens)[:old]
            by_new = logprobs_of(other_long, prompt, sample.tokens)[old:]
            np.testing.assert_allclose(sample.logprobs, [*by_old, *by_new], atol=2e-4)
        assert result.policy_version == 0


async def test_under_wait_rollouts_finish_first_and_newcomers_get_the_new_version(start, llama_long, other_long):
    engine = await start(llama_long)
    running = asyncio.create_task(engine.generate(request(2, tokens=150)))
    await until_running(engine, 2)
    update = asyncio.create_task(engine.update_weights(other_long, policy_id="", version=1))
    await until(lambda: engine._scheduler._update is not None)
    late = asyncio.create_task(engine.generate(request(1)))
    old, result, new = await asyncio.gather(running, update, late)
    assert [sample.spans for sample in old.samples] == [[(0, 150)]] * 2
    assert new.samples[0].spans == [(1, 12)]
    assert (result.kept_rollouts, result.aborted_rollouts) == (0, 0)


async def test_under_abort_rollouts_return_what_they_have(start, llama_long, other_long):
    engine = await start(llama_long, max_rows=2)
    running = asyncio.create_task(engine.generate(request(3, tokens=5000)))
    await until_running(engine, 2)
    result = await engine.update_weights(other_long, policy_id="", version=1, mode=UpdateMode.ABORT)
    samples = (await running).samples
    assert result.aborted_rollouts == 2
    assert [sample.finish for sample in samples] == [Finish.ABORTED] * 3
    assert 0 < len(samples[0].tokens) < 5000
    assert samples[2].tokens == []


async def test_an_update_that_waits_past_its_deadline_leaves_the_old_version(start, llama_long, other_long):
    engine = await start(llama_long)
    running = asyncio.create_task(engine.generate(request(1, tokens=4000)))
    await until_running(engine, 1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await engine.update_weights(other_long, policy_id="", version=1, deadline_seconds=1.0)
    assert time.monotonic() - began < 5
    assert engine.status().policy_version == 0
    assert engine.status().running_rollouts == 1
    running.cancel()
    await engine.update_weights(other_long, policy_id="", version=1, deadline_seconds=30)
    assert engine.status().policy_version == 1


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _edit(change):
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE = {
    "cannot be read": _truncate,
    "lacks 1 of": _edit(lambda t: t.pop(NORM)),
    r"has shape \[31\], the model wants \[32\]": _edit(lambda t: t.update({NORM: t[NORM][:31].clone()})),
    "not finite": _edit(lambda t: t[NORM].__setitem__(3, torch.nan)),
    "holds 'extra'": _edit(lambda t: t.update({"extra": torch.zeros(2)})),
    "lacks ": lambda folder: (folder / "model.safetensors").unlink(),
    "does not exist": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("message", list(DAMAGE))
async def test_a_bad_folder_is_refused_by_name_and_the_old_weights_serve_on(
    message, start, llama, other_llama, tmp_path
):
    folder = shutil.copytree(other_llama, tmp_path / "bad")
    DAMAGE[message](folder)
    engine = await start(llama)
    before = await engine.generate(request())
    with pytest.raises(InvalidArgument, match=message):
        await engine.update_weights(folder, policy_id="", version=1)
    after = await engine.generate(request())
    assert after.samples[0].tokens == before.samples[0].tokens
    assert after.samples[0].logprobs == before.samples[0].logprobs
    assert engine.status().policy_version == 0
    await engine.update_weights(other_llama, policy_id="", version=1)
    assert (await engine.generate(request())).policy_version == 1


async def test_an_older_version_needs_leave_to_roll_back(start, llama, other_llama):
    engine = await start(None)
    await engine.update_weights(llama, policy_id="job", version=5)
    with pytest.raises(FailedPrecondition) as error:
        await engine.update_weights(other_llama, policy_id="job", version=4)
    assert error.value.reason == "VERSION_TOO_OLD"
    await engine.update_weights(other_llama, policy_id="job", version=4, allow_rollback=True)
    await engine.update_weights(llama, policy_id="another", version=0)
    assert (engine.status().policy_id, engine.status().policy_version) == ("another", 0)


async def test_the_same_update_again_is_answered_at_once_unless_its_files_changed(start, llama, other_llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "weights")
    engine = await start(None)
    await engine.update_weights(folder, policy_id="job", version=2)
    await engine.generate(request())
    await engine.update_weights(folder, policy_id="job", version=2)
    assert (await engine.generate(request())).prefix_cached  # nothing was swapped
    shutil.copy(other_llama / "model.safetensors", folder / "model.safetensors")
    await engine.update_weights(folder, policy_id="job", version=2)
    rewritten = await engine.generate(request())
    assert not rewritten.prefix_cached
    expected = await (await start(other_llama)).generate(request())
    assert rewritten.samples[0].tokens == expected.samples[0].tokens


async def test_another_architecture_replaces_the_model(start, llama, qwen):
    engine = await start(llama)
    await engine.generate(request())
    await engine.update_weights(qwen, policy_id="q", version=0, mode=UpdateMode.KEEP)
    after = await engine.generate(request())
    fresh = await (await start(qwen)).generate(request())
    assert after.samples[0].tokens == fresh.samples[0].tokens


async def test_a_restarted_engine_serves_the_last_acknowledged_weights(start, llama, other_llama, tmp_path):
    memory = tmp_path / "generation" / "current.json"
    gone = shutil.copytree(other_llama, tmp_path / "gone")
    engine = await start(None, memory=memory)
    await engine.update_weights(gone, policy_id="job", version=3)
    await engine.close()
    again = await start(llama, memory=memory)
    assert (again.status().policy_id, again.status().policy_version) == ("job", 3)
    assert recall(memory).path == str(gone)
    shutil.rmtree(gone)
    idle = await start(None, memory=memory)
    assert idle.status().policy_id == ""
    with pytest.raises(FailedPrecondition):
        await idle.generate(request())


async def test_a_dead_engine_fails_its_callers_with_the_cause(start, llama_long, monkeypatch):
    from services.common.errors import Unavailable

    engine = await start(llama_long)
    running = asyncio.create_task(engine.generate(request(1, tokens=4000)))
    await until_running(engine, 1)

    def burst(*_):
        raise RuntimeError("out of memory, for the test")

    monkeypatch.setattr(engine._scheduler._batch, "step", burst)
    with pytest.raises(Unavailable, match="out of memory"):
        await running
    assert "out of memory" in await asyncio.wait_for(engine.wait_failed(), 5)
    with pytest.raises(Unavailable):
        await engine.generate(request())
    assert "out of memory" in engine.failure()
