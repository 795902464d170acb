"""The policy's log-probs against a plain forward pass, and its files (faults L4, L6, T1)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import InvalidArgument
from trainer.batch import Sample, micro_batches
from trainer.config import LossSpec, OptimizerSpec
from trainer.optimizer import Optimizer
from trainer.policy import Policy
from trainer.update import train_step


def naive_logprobs(policy: Policy, sample: Sample, temperature: float) -> torch.Tensor:
    """One rollout on its own, no padding, nothing shared: what everything else must equal."""
    ids = torch.as_tensor(np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.model(input_ids=ids).logits[0] / temperature, -1)
    start = len(sample.prompt_ids)
    return torch.stack([logprobs[start - 1 + j, int(t)] for j, t in enumerate(sample.completion_ids)])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_logprobs_equal_those_of_a_plain_forward_pass(
    policy: Policy, samples: list[Sample], temperature: float, tokens: int
) -> None:
    assert policy._shares_prompts
    for got, sample in zip(policy.sample_logprobs(samples, temperature, tokens), samples, strict=True):
        torch.testing.assert_close(got, naive_logprobs(policy, sample, temperature), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_unchanged_policy_has_ratio_one_and_no_gap_to_its_own_samples(
    policy: Policy, samples: list[Sample], temperature: float
) -> None:
    own = [
        Sample(s.group, s.prompt_ids, s.completion_ids, naive_logprobs(policy, s, temperature).numpy(), s.advantage)
        for s in samples
    ]
    optimizer = Optimizer(policy.model.parameters(), OptimizerSpec(learning_rate=1e-4))
    metrics = train_step(policy, optimizer, own, LossSpec(), temperature=temperature, micro_batch_tokens=64).metrics
    assert metrics["engine_log_ratio_mean"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1)
    assert metrics["clip_fraction"] == 0
    assert metrics["trained_tokens"] == sum(len(s.completion_ids) for s in own)


def test_a_padding_token_equal_to_the_end_token_changes_nothing(policy: Policy, samples: list[Sample]) -> None:
    eos = int(policy.tokenizer.eos_token_id)
    # One rollout ends with the end token, one holds it in the middle; neither is a sign of padding.
    samples[0] = Sample(
        "g0", samples[0].prompt_ids, np.array([7, eos, 9, eos], np.uint32), np.zeros(4, np.float32), 1.0
    )
    found = {}
    for pad in (0, eos, 77):
        found[pad] = torch.cat(
            [policy.logprobs(block, 1.0).logprobs_N.detach() for block in micro_batches(samples, 64, pad_id=pad)]
        )
    torch.testing.assert_close(found[eos], found[0])
    torch.testing.assert_close(found[77], found[0])
    assert len(found[0]) == sum(len(s.completion_ids) for s in samples)


def test_every_sampled_token_is_trained_once_and_no_other(samples: list[Sample]) -> None:
    for pack in (True, False):
        for tokens in (1, 30, 10_000):
            blocks = list(micro_batches(samples, tokens, pack=pack))
            seen = sorted(i for block in blocks for i in block.members)
            assert seen == list(range(len(samples)))
            for block in blocks:
                at = 0
                for i, n in zip(block.members, block.lengths, strict=True):
                    assert block.targets_N[at : at + n].tolist() == samples[i].completion_ids.tolist()
                    at += n
                assert at == len(block.targets_N)


def test_micro_batches_keep_to_their_budget_and_come_in_one_order(samples: list[Sample]) -> None:
    blocks = list(micro_batches(samples, 60))
    assert all(b.input_ids_BL.numel() <= 60 or b.input_ids_BL.shape[0] == 1 for b in blocks)
    again = list(micro_batches(samples, 60))
    assert [b.members for b in blocks] == [b.members for b in again]


def test_siblings_share_their_prompt(samples: list[Sample]) -> None:
    packed = sum(b.input_ids_BL.numel() for b in micro_batches(samples, 10_000))
    plain = sum(b.input_ids_BL.numel() for b in micro_batches(samples, 10_000, pack=False))
    assert packed < plain


def test_long_blocks_of_logits_are_split_without_changing_the_gradient(
    policy: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[torch.Tensor]:
        policy.model.zero_grad()
        (block,) = policy.micro_batches(samples, 10_000)
        policy.logprobs(block, 0.7).logprobs_N.sum().backward()
        return [p.grad.clone() for p in policy.model.parameters()]

    whole = run()
    monkeypatch.setattr("trainer.policy.LOGIT_BLOCK", policy.vocabulary_size * 5)
    for a, b in zip(run(), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_entropy_is_that_of_the_scaled_distribution(policy: Policy, samples: list[Sample]) -> None:
    (block,) = policy.micro_batches(samples[:1], 1000)
    ids = torch.as_tensor(np.concatenate([samples[0].prompt_ids, samples[0].completion_ids]).astype(np.int64))[None]
    with torch.no_grad():
        p = torch.softmax(policy.model(input_ids=ids).logits[0, len(samples[0].prompt_ids) - 1 : -1] / 0.6, -1)
    expected = torch.distributions.Categorical(probs=p).entropy()
    torch.testing.assert_close(policy.logprobs(block, 0.6).entropy_N, expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_sliding_windows_does_not_share_prompts_and_still_agrees(
    tmp_path: Path, model_folder: Path
) -> None:
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.3,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "m")
    policy = Policy(tmp_path / "m")
    assert not policy._shares_prompts
    ids = np.arange(3, 20, dtype=np.uint32)
    pair = [Sample("g", ids[:9], ids[9 : 9 + n], np.zeros(n, np.float32), 1.0) for n in (3, 8)]
    for got, sample in zip(policy.sample_logprobs(pair, 1.0, 100), pair, strict=True):
        torch.testing.assert_close(got, naive_logprobs(policy, sample, 1.0), atol=2e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------- files


def test_a_saved_policy_loads_in_transformers_with_the_same_logprobs(
    policy: Policy, samples: list[Sample], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    expected = policy.sample_logprobs(samples, 1.0, 1000)
    policy.save(tmp_path / "v000001")
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]
    assert json.loads((tmp_path / "v000001" / "config.json").read_text())["dtype"] == "float32"
    AutoModelForCausalLM.from_pretrained(tmp_path / "v000001")
    assert AutoTokenizer.from_pretrained(tmp_path / "v000001")("1 + 2")["input_ids"]
    again = Policy(tmp_path / "v000001")
    for a, b in zip(again.sample_logprobs(samples, 1.0, 1000), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_saving_does_not_need_the_source_folder_any_more(model_folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(model_folder, tmp_path / "source")
    policy = Policy(tmp_path / "source")
    shutil.rmtree(tmp_path / "source")
    policy.save(tmp_path / "out")
    Policy(tmp_path / "out")


def test_weights_load_in_place(policy: Policy, samples: list[Sample], tmp_path: Path) -> None:
    policy.save(tmp_path / "a")
    before = policy.sample_logprobs(samples, 1.0, 1000)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    policy.load_weights(tmp_path / "a")
    for a, b in zip(policy.sample_logprobs(samples, 1.0, 1000), before, strict=True):
        torch.testing.assert_close(a, b)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no config\.json"):
        Policy(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_ids": np.zeros(0, np.uint32)}, "empty prompt"),
        ({"engine_logprobs": np.zeros(1, np.float32)}, "1 entries in engine_logprobs"),
        ({"engine_logprobs": np.full(2, np.nan, np.float32)}, "not finite"),
        ({"advantage": float("inf")}, "advantage inf"),
        ({"stale": np.zeros(3, bool)}, "3 entries in stale"),
    ],
)
def test_a_malformed_sample_is_refused(change: dict[str, object], says: str) -> None:
    good = {
        "group": "g", "prompt_ids": np.ones(2, np.uint32), "completion_ids": np.ones(2, np.uint32),
        "engine_logprobs": np.zeros(2, np.float32), "advantage": 1.0,
    }  # fmt: skip
    Sample(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=says):
        Sample(**{**good, **change})  # type: ignore[arg-type]
