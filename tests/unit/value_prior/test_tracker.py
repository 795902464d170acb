"""The discounted Beta tracker."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.value_prior.tracker import Evidence, beta_estimate, drift_discount, gather, gather_by_prompt

histories = st.lists(
    st.tuples(st.integers(1, 32), st.floats(0, 1), st.integers(0, 60)).map(
        lambda row: (row[0] * row[1], row[0], row[2])
    ),
    min_size=1,
    max_size=12,
)


def columns(history):
    return [row[0] for row in history], [row[1] for row in history], [row[2] for row in history]


def test_spo_numbers_without_decay():
    # 8 pseudo-rollouts at 0.5, then 6 of 8 right: (4 + 6) / 16.
    value, spread = beta_estimate(gather([6], [8], [3], now=3))
    assert value == pytest.approx(10 / 16)
    assert spread == pytest.approx(np.sqrt(10 * 6 / (16**2 * 17)))


@pytest.mark.parametrize(("drift", "discount"), [(0.0, 0.96), (0.03, 0.875), (0.008, 2 ** (-0.008 / 0.06)), (1, 0.875)])
def test_discount_follows_the_drift_of_the_policy_within_spos_bounds(drift, discount):
    assert drift_discount(drift) == pytest.approx(discount)
    assert drift_discount(-drift) == drift_discount(drift)


def test_evidence_fades_by_distance_in_versions():
    evidence = gather([4, 4], [4, 8], [10, 8], now=12, discount=0.9)
    assert evidence.successes == pytest.approx(0.9**2 * 4 + 0.9**4 * 4)
    assert evidence.trials == pytest.approx(0.9**2 * 4 + 0.9**4 * 8)


@given(histories, st.floats(0.05, 0.95), st.integers(0, 80))
def test_estimates_stay_inside_the_unit_interval(history, mean, now):
    value, spread = beta_estimate(gather(*columns(history), now=now), mean=mean)
    assert 0 < value < 1
    assert 0 < spread <= 0.5


@given(histories, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_show_even_in_the_last_bit(history, random):
    shuffled = list(history)
    random.shuffle(shuffled)
    assert gather(*columns(history), now=70) == gather(*columns(shuffled), now=70)


@given(histories, st.data())
def test_one_more_success_never_lowers_the_estimate(history, data):
    row = data.draw(st.integers(0, len(history) - 1))
    s, n, v = columns(history)
    more = list(s)
    more[row] = min(n[row], s[row] + 1)
    assert beta_estimate(gather(more, n, v, now=60))[0] >= beta_estimate(gather(s, n, v, now=60))[0] - 1e-12


def test_prompts_do_not_mix():
    found = gather_by_prompt(["a", "b", "a"], [1, 2, 3], [4, 4, 4], [0, 0, 0], now=0)
    assert found == {"a": Evidence(4, 8), "b": Evidence(2, 4)}


@pytest.mark.parametrize("bad", [([float("nan")], [1], [0]), ([2], [1], [0]), ([-1], [1], [0])])
def test_impossible_counts_are_an_error(bad):
    with pytest.raises(ValueError, match="successes"):
        gather(*bad, now=0)
