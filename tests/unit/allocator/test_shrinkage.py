"""Every identity of METHODS section 1 on shrinkage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.allocator.shrinkage import RewardScale, fuse, fuse_mean, leave_one_out_baselines
from services.common.errors import InvalidArgument

PLUS_MINUS = RewardScale(-1.0, 1.0)
ZERO_ONE = RewardScale(0.0, 1.0)

scales = st.tuples(st.floats(-5, 5), st.floats(0.1, 10)).map(lambda t: RewardScale(t[0], t[0] + t[1]))
shares = st.floats(0, 1)


@st.composite
def groups(draw: st.DrawFn, smallest: int = 1) -> tuple[float, list[float], RewardScale]:
    scale = draw(scales)
    rewards = [scale.reward(s) for s in draw(st.lists(shares, min_size=smallest, max_size=24))]
    return scale.reward(draw(shares)), [min(max(r, scale.low), scale.high) for r in rewards], scale


@given(groups())
def test_plug_in_equals_the_positive_part_james_stein_form(group: tuple[float, list[float], RewardScale]) -> None:
    prior, rewards, scale = group
    fusion = fuse(prior, rewards, scale)
    d, k, r = abs(fusion.mean - prior), len(rewards), scale.half_range
    closed = prior + (max(0.0, 1 - r**2 / (k * d**2)) if d**2 > 0 else 0.0) * (fusion.mean - prior)
    assert fusion.baseline == pytest.approx(closed, abs=1e-9 * max(1, abs(scale.low), abs(scale.high)))


@given(groups())
def test_the_baseline_moves_from_the_mean_by_at_most_r_over_root_k(
    group: tuple[float, list[float], RewardScale],
) -> None:
    prior, rewards, scale = group
    fusion = fuse(prior, rewards, scale)
    d, k, r = abs(fusion.mean - prior), len(rewards), scale.half_range
    moved = abs(fusion.baseline - fusion.mean)
    expected = min(d, r**2 / (k * d)) if d > 0 else 0.0
    tolerance = 1e-9 * max(1, abs(scale.low), abs(scale.high))
    assert moved == pytest.approx(expected, abs=tolerance)
    assert moved <= r / math.sqrt(k) + tolerance


@given(groups())
def test_the_baseline_lies_between_prior_and_mean_and_the_weight_in_0_to_1(
    group: tuple[float, list[float], RewardScale],
) -> None:
    prior, rewards, scale = group
    fusion = fuse(prior, rewards, scale)
    assert 0 <= fusion.weight < 1
    assert min(prior, fusion.mean) - 1e-9 <= fusion.baseline <= max(prior, fusion.mean) + 1e-9
    assert fusion.delta_squared >= 0


@given(st.lists(st.booleans(), min_size=1, max_size=20), shares)
def test_rewards_0_1_and_minus_1_1_give_the_same_weight_and_the_same_baseline(outcomes: list[bool], p: float) -> None:
    narrow = fuse(p, [float(o) for o in outcomes], ZERO_ONE)
    wide = fuse(2 * p - 1, [2.0 * o - 1 for o in outcomes], PLUS_MINUS)
    assert narrow.weight == pytest.approx(wide.weight, abs=1e-9)
    assert 2 * narrow.baseline - 1 == pytest.approx(wide.baseline, abs=1e-9)


@pytest.mark.parametrize(("k", "threshold"), [(4, 0.500), (8, 0.354), (12, 0.289), (15, 0.258)])
def test_the_prior_is_untrusted_beyond_one_over_root_k(k: int, threshold: float) -> None:
    assert fuse_mean(0.0, threshold - 0.001, k, PLUS_MINUS).weight == 0
    assert fuse_mean(0.0, threshold + 0.001, k, PLUS_MINUS).weight > 0


@given(groups(smallest=2), st.data())
def test_a_leave_one_out_baseline_does_not_see_its_own_reward(
    group: tuple[float, list[float], RewardScale], data: st.DataObject
) -> None:
    prior, rewards, scale = group
    i = data.draw(st.integers(0, len(rewards) - 1))
    before = leave_one_out_baselines(prior, rewards, scale)[i]
    changed = [*rewards[:i], scale.high if rewards[i] < scale.high else scale.low, *rewards[i + 1 :]]
    assert leave_one_out_baselines(prior, changed, scale)[i] == before


def test_leave_one_out_of_a_single_rollout_is_the_prior() -> None:
    assert leave_one_out_baselines(0.3, [1.0], ZERO_ONE) == [0.3]


@pytest.mark.parametrize("rewards", [[1.0], [0.0], [1.0] * 4, [0.0] * 16])
def test_one_rollout_and_equal_rewards_are_finite(rewards: list[float]) -> None:
    for prior in (0.0, 0.5, 1.0):
        assert 0 <= fuse(prior, rewards, ZERO_ONE).baseline <= 1


def test_a_prior_that_agrees_is_kept_whole() -> None:
    fusion = fuse(0.5, [1.0, 0.0, 1.0, 0.0], ZERO_ONE)
    assert (fusion.delta_squared, fusion.weight, fusion.baseline) == (0, 0, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.5, -0.5])
def test_a_number_that_is_not_finite_or_off_the_scale_is_an_error_naming_it(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="prior"):
        fuse(bad, [0.0, 1.0], ZERO_ONE)
    with pytest.raises(InvalidArgument, match=r"rewards\[1\]"):
        fuse(0.5, [0.0, bad], ZERO_ONE)


def test_no_reward_and_an_empty_scale_are_errors() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        fuse(0.5, [], ZERO_ONE)
    for low, high in ((1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(InvalidArgument, match="scale"):
            RewardScale(low, high)


@pytest.mark.parametrize("mean", [-0.9, -0.3, 0.0, 0.5, 0.8])
@pytest.mark.parametrize("k", [2, 4, 16])
def test_the_mean_squared_error_stays_below_four_over_k_for_every_prior(mean: float, k: int) -> None:
    rng = np.random.default_rng(7)
    counts = rng.binomial(k, (mean + 1) / 2, size=4000)
    for prior in np.linspace(-1, 1, 9):
        errors = [(fuse_mean(float(prior), 2 * c / k - 1, k, PLUS_MINUS).baseline - mean) ** 2 for c in range(k + 1)]
        assert np.asarray(errors)[counts].mean() <= 4 / k
