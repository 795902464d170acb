"""Rewards to advantages, group by group (faults A1, A2, A4, A5, A6)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from trainer.algorithms import GroupRewards, Scale, advantages, baselines, known_baselines
from trainer.algorithms.registry import baseline_of, register
from trainer.config import PRESETS, AlgorithmSpec, FixedBudget, GroupMeanBaseline, LossSpec, ShrinkageBaseline


def algorithm(baseline: str = "group_mean", *, loo: bool = False, std: bool = False) -> AlgorithmSpec:
    choice = GroupMeanBaseline if baseline == "group_mean" else ShrinkageBaseline
    return AlgorithmSpec(
        budget=FixedBudget(rollouts=4), baseline=choice(leave_one_out=loo), loss=LossSpec(std_normalise=std)
    )


ALL = [
    algorithm(b, loo=loo, std=std)
    for b in ("group_mean", "shrinkage")
    for loo in (False, True)
    for std in (False, True)
]
binary_groups = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16)


def test_uneven_groups_are_each_compared_with_themselves() -> None:
    groups = [GroupRewards("g0", (1, 3), scale=Scale(0, 5)), GroupRewards("g1", (5,), scale=Scale(0, 5))]
    assert advantages(groups, algorithm()) == [[-1, 1], [0]]


@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize("std", [False, True])
def test_a_single_rollout_has_advantage_zero_under_the_group_mean(loo: bool, std: bool) -> None:
    assert advantages([GroupRewards("g", (1.0,))], algorithm(loo=loo, std=std)) == [[0.0]]


def test_a_single_rollout_is_compared_with_the_prior_under_shrinkage() -> None:
    group = GroupRewards("g", (1.0,), prior=0.7)
    assert advantages([group], algorithm("shrinkage", loo=True))[0] == pytest.approx([0.3])
    # One reward is no evidence against a prior this near (d = .3 < R/sqrt(1) = .5): the prior stands.
    assert advantages([group], algorithm("shrinkage"))[0] == pytest.approx([0.3])


def test_one_correct_of_four_has_a_bounded_advantage_under_leave_one_out_and_std() -> None:
    (values,) = advantages([GroupRewards("g", (1, 0, 0, 0))], algorithm(loo=True, std=True))
    # 1 / population std of [1,0,0,0], which is sqrt(3)/4.
    assert values[0] == pytest.approx(4 / math.sqrt(3))
    assert values[1:] == pytest.approx([-(1 / 3) / (math.sqrt(3) / 4)] * 3)


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("std", [False, True])
def test_equal_rewards_give_no_advantage_under_the_group_mean(reward: float, std: bool) -> None:
    assert advantages([GroupRewards("g", (reward,) * 5)], algorithm(std=std)) == [[0.0] * 5]


def test_equal_rewards_still_teach_where_the_prior_expected_something_else() -> None:
    (values,) = advantages([GroupRewards("g", (1.0,) * 4, prior=0.9)], algorithm("shrinkage"))
    assert values == pytest.approx([0.1] * 4)
    (divided,) = advantages([GroupRewards("g", (1.0,) * 4, prior=0.9)], algorithm("shrinkage", std=True))
    assert divided == pytest.approx([0.2] * 4)  # by R = 1/2, since the group's own spread is 0


@given(rewards=binary_groups, prior=st.floats(0, 1))
def test_advantages_stay_bounded_with_any_choice(rewards: list[float], prior: float) -> None:
    k = len(rewards)
    bound = 2.0 if len(set(rewards)) == 1 else k / math.sqrt(k - 1)
    for choice in ALL:
        (values,) = advantages([GroupRewards("g", tuple(rewards), prior=prior)], choice)
        assert all(abs(v) <= bound + 1e-9 for v in values)


@given(rewards=st.lists(st.floats(0, 1), min_size=1, max_size=8), prior=st.floats(0, 1), data=st.data())
def test_shuffling_rollouts_changes_no_rollouts_advantage(
    rewards: list[float], prior: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    for choice in ALL:
        (straight,) = advantages([GroupRewards("g", tuple(rewards), prior=prior)], choice)
        (shuffled,) = advantages([GroupRewards("g", tuple(rewards[i] for i in order), prior=prior)], choice)
        assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-9)


@given(groups=st.lists(binary_groups, min_size=1, max_size=5), data=st.data())
def test_the_order_of_groups_in_a_batch_does_not_matter(groups: list[list[float]], data: st.DataObject) -> None:
    made = [GroupRewards(f"g{i}", tuple(rewards), prior=0.4) for i, rewards in enumerate(groups)]
    order = data.draw(st.permutations(range(len(made))))
    for choice in ALL:
        alone = [advantages([group], choice)[0] for group in made]
        assert advantages([made[i] for i in order], choice) == [alone[i] for i in order]


@given(rewards=binary_groups, prior=st.floats(0, 1))
def test_zero_one_and_minus_one_one_rewards_agree_up_to_the_scale(rewards: list[float], prior: float) -> None:
    wide = GroupRewards("g", tuple(2 * r - 1 for r in rewards), prior=2 * prior - 1, scale=Scale(-1, 1))
    for choice in ALL:
        factor = 1 if choice.loss.std_normalise else 2
        (small,) = advantages([GroupRewards("g", tuple(rewards), prior=prior)], choice)
        assert advantages([wide], choice)[0] == pytest.approx([factor * v for v in small], abs=1e-7)


def test_the_same_prompt_twice_in_a_batch_stays_two_groups() -> None:
    twice = [GroupRewards("step0/p/0", (1, 0)), GroupRewards("step0/p/1", (1, 1))]
    assert advantages(twice, algorithm()) == [[0.5, -0.5], [0, 0]]
    with pytest.raises(InvalidArgument, match=r"'p'.*twice"):
        advantages([GroupRewards("p", (1,)), GroupRewards("p", (0,))], algorithm())


def test_shrinkage_without_a_prior_is_refused_by_the_groups_name() -> None:
    with pytest.raises(InvalidArgument, match="'g7' has no prior"):
        advantages([GroupRewards("g7", (1, 0))], algorithm("shrinkage"))


@pytest.mark.parametrize(
    ("rewards", "prior", "says"),
    [
        ((), None, "no judged rollout"),
        ((math.nan,), None, "reward 0"),
        ((0, 2), None, "outside"),
        ((0,), math.inf, "prior"),
    ],
)
def test_bad_rewards_are_refused(rewards: tuple[float, ...], prior: float | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        GroupRewards("g", rewards, prior=prior)


def test_the_recorded_baseline_is_what_rewards_were_compared_with() -> None:
    groups = [GroupRewards("g", (1, 0, 0, 1, 1), prior=0.1)]
    for choice in (algorithm(), algorithm("shrinkage"), algorithm("shrinkage", loo=True)):
        (b,), (a,) = baselines(groups, choice), advantages(groups, choice)
        assert [r - v for r, v in zip(groups[0].rewards, b, strict=True)] == pytest.approx(a)


def test_baselines_are_found_by_kind_and_unknown_ones_are_named() -> None:
    assert {"group_mean", "shrinkage"} <= set(known_baselines())
    assert {preset.baseline.kind for preset in PRESETS.values()} <= set(known_baselines())
    with pytest.raises(InvalidArgument, match="unknown baseline 'mean'; known: group_mean"):
        baseline_of("mean")
    with pytest.raises(RuntimeError, match="two baselines"):
        register("group_mean")(lambda group, spec: [])
