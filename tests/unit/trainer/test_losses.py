"""The clipped loss: its anchors, its denominators and its gradient (faults L1, L2, L4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import Sample
from trainer.config import LossSpec
from trainer.losses import LossStats, TokenInputs, policy_loss, token_weights
from trainer.policy import Policy
from trainer.update import accumulate

AGGREGATIONS = [
    LossSpec(aggregation="token"),
    LossSpec(aggregation="sequence"),
    LossSpec(aggregation="prompt"),
    LossSpec(aggregation="constant", constant_length=16),
]


def sample(group: str, tokens: int, trained: int | None = None) -> Sample:
    mask = None if trained is None else np.arange(tokens) < trained
    ids = np.arange(1, tokens + 1, dtype=np.uint32)
    return Sample(group, np.ones(2, np.uint32), ids, np.zeros(tokens, np.float32), 1.0, mask=mask)


def loss_of(
    current: float, engine: float, advantage: float, spec: LossSpec, *, stale: bool = False, old: float | None = None
) -> tuple[float, float, LossStats]:
    """Loss, its derivative by the log-prob, and statistics, for one token of weight 1."""
    logprob = torch.tensor([current], requires_grad=True)
    inputs = TokenInputs(
        engine_logprobs_N=torch.tensor([engine]),
        advantages_N=torch.tensor([advantage]),
        weight_N=torch.ones(1),
        stale_N=torch.tensor([stale]),
        old_logprobs_N=None if old is None else torch.tensor([old]),
    )
    loss, stats = policy_loss(logprob, inputs, spec)
    loss.backward()
    assert logprob.grad is not None
    return float(loss.detach()), float(logprob.grad), stats


def gradient(policy: Policy, samples: list[Sample], spec: LossSpec, tokens: int) -> tuple[torch.Tensor, LossStats]:
    policy.model.zero_grad()
    stats = accumulate(policy, samples, spec, temperature=0.8, micro_batch_tokens=tokens)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]).clone(), stats


# ------------------------------------------------------------------------------------- denominators


def test_denominators_count_unmasked_tokens_only() -> None:
    batch = [sample("a", 4), sample("a", 6, trained=2), sample("b", 3, trained=0), sample("b", 2)]
    token, sequence, prompt, constant = (token_weights(batch, spec) for spec in AGGREGATIONS)
    assert token == pytest.approx([1 / 8, 1 / 8, 0, 1 / 8])
    assert sequence == pytest.approx([1 / 12, 1 / 6, 0, 1 / 6])
    assert prompt == pytest.approx([1 / 12, 1 / 12, 0, 1 / 4])
    assert constant == pytest.approx([1 / 48, 1 / 48, 0, 1 / 48])


@pytest.mark.parametrize("spec", AGGREGATIONS[:3], ids=lambda s: s.aggregation)
def test_weights_of_all_trained_tokens_sum_to_one(spec: LossSpec, samples: list[Sample]) -> None:
    weights = token_weights(samples, spec)
    assert sum(w * s.trained_tokens for w, s in zip(weights, samples, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize("spec", AGGREGATIONS, ids=lambda s: s.aggregation)
def test_the_gradient_is_the_same_for_every_micro_batch_split(
    policy: Policy, samples: list[Sample], spec: LossSpec
) -> None:
    whole, stats = gradient(policy, samples, spec, 10_000)
    assert whole.abs().max() > 1e-4
    for tokens in (1, 17, 40, 90):
        part, part_stats = gradient(policy, samples, spec, tokens)
        torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-4)
        assert part_stats.summary() == pytest.approx(stats.summary(), rel=1e-4, abs=1e-6)


def test_the_gradient_does_not_depend_on_the_order_of_rollouts(policy: Policy, samples: list[Sample]) -> None:
    straight, _ = gradient(policy, samples, LossSpec(), 40)
    backwards, _ = gradient(policy, samples[::-1], LossSpec(), 40)
    torch.testing.assert_close(backwards, straight, atol=1e-6, rtol=1e-4)


def test_masked_tokens_are_in_no_gradient(policy: Policy, samples: list[Sample]) -> None:
    changed = [
        Sample(
            s.group,
            s.prompt_ids,
            s.completion_ids,
            np.where(s.mask, s.engine_logprobs, -50).astype(np.float32),
            s.advantage,
            mask=s.mask,
        )
        if s.mask is not None
        else s
        for s in samples
    ]
    torch.testing.assert_close(
        gradient(policy, changed, LossSpec(), 64)[0], gradient(policy, samples, LossSpec(), 64)[0]
    )


def test_a_group_without_advantage_has_no_gradient(policy: Policy, samples: list[Sample]) -> None:
    silent = [Sample(s.group, s.prompt_ids, s.completion_ids, s.engine_logprobs, 0.0) for s in samples]
    assert gradient(policy, silent, LossSpec(), 64)[0].abs().max() == 0


# ------------------------------------------------------------------------------------------- ratios


def test_the_ratio_of_a_fresh_token_is_one_and_the_gradient_is_that_of_the_policy_gradient() -> None:
    loss, slope, stats = loss_of(-1.0, -1.0, 0.7, LossSpec())
    assert loss == pytest.approx(-0.7)
    assert slope == pytest.approx(-0.7)
    assert stats.summary()["ratio_mean"] == 1.0
    assert stats.clipped == 0


@pytest.mark.parametrize(("gap", "weight"), [(0.1, math.exp(0.1)), (-0.4, math.exp(-0.4)), (3.0, 2.0)])
def test_engine_mismatch_on_a_fresh_token_is_weighed_and_capped_but_never_clipped(gap: float, weight: float) -> None:
    _, slope, stats = loss_of(-1.0, -1.0 - gap, 1.0, LossSpec(importance_cap=2.0))
    assert slope == pytest.approx(-weight, rel=1e-5)
    assert stats.clipped == 0
    assert stats.capped == int(gap == 3.0)
    assert stats.log_ratio_max == pytest.approx(abs(gap), rel=1e-5)


def test_a_stale_behaviour_policy_makes_clipping_bind() -> None:
    spec = LossSpec(clip_low=0.2, clip_high=0.28)
    # The policy already makes this good token 1.5 times as likely as when it was sampled: enough.
    loss, slope, stats = loss_of(-1.0 + math.log(1.5), -1.0, 1.0, spec, stale=True)
    assert (loss, slope, stats.clipped) == (pytest.approx(-1.28), 0.0, 1)
    # And this bad one half as likely.
    loss, slope, stats = loss_of(-1.0 + math.log(0.5), -1.0, -1.0, spec, stale=True)
    assert (loss, slope, stats.clipped) == (pytest.approx(0.8), 0.0, 1)
    # Within the range the ratio itself is the importance weight, and counts once.
    _, slope, stats = loss_of(-1.0 + math.log(1.1), -1.0, 1.0, spec, stale=True)
    assert (slope, stats.clipped) == (pytest.approx(-1.1), 0)


def test_a_second_step_on_one_batch_clips_from_the_first_steps_logprobs() -> None:
    _, slope, stats = loss_of(-0.5, -1.0, 1.0, LossSpec(), old=-1.0)
    assert (slope, stats.clipped) == (0.0, 1)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    loss, slope, stats = loss_of(2.0, -2.0, -1.0, LossSpec(dual_clip=10.0), stale=True)
    assert (loss, slope, stats.dual_clipped) == (pytest.approx(10.0), 0.0, 1)
    unbounded, slope, _ = loss_of(2.0, -2.0, -1.0, LossSpec(dual_clip=None), stale=True)
    assert unbounded == pytest.approx(math.exp(4), rel=1e-4)
    assert slope > 50


@settings(max_examples=60)
@given(
    current=st.floats(-8, 0),
    engine=st.floats(-8, 0),
    advantage=st.floats(-2, 2),
    stale=st.booleans(),
    cap=st.floats(1, 3),
)
def test_no_token_weighs_more_than_the_bounds_say(
    current: float, engine: float, advantage: float, stale: bool, cap: float
) -> None:
    loss, _, _ = loss_of(current, engine, advantage, LossSpec(importance_cap=cap), stale=stale)
    # A > 0: ratio at most 1.28; A < 0: at most dual clip 10; the weight at most the cap, 1 for stale tokens.
    bound = abs(advantage) * (10.0 if advantage < 0 else 1.28) if stale else abs(advantage) * cap
    assert abs(loss) <= bound + 1e-4
