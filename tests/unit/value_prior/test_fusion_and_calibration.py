"""Fusing prediction and history by precision; online calibration and its scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.value_prior import calibration, fusion
from services.value_prior.tracker import Evidence

unit = st.floats(0, 1)
trials = st.floats(0, 500)


@given(unit, st.floats(0, 0.6), unit, trials)
def test_fused_priors_are_strictly_inside_the_unit_interval(mean, spread, rate, count):
    value, uncertainty = fusion.fuse(mean, spread, Evidence(rate * count, count))
    assert 0.02 <= value <= 0.98
    assert 0 < uncertainty <= 0.5


@given(unit, st.floats(0.01, 0.5), st.floats(0.1, 100), unit, unit)
def test_fusion_rises_with_successes(mean, spread, count, first, second):
    low, high = sorted((first, second))
    assert (
        fusion.fuse(mean, spread, Evidence(low * count, count))[0]
        <= fusion.fuse(mean, spread, Evidence(high * count, count))[0] + 1e-12
    )


@given(unit, st.floats(0.01, 0.5), unit, trials)
def test_history_never_makes_us_know_less(mean, spread, rate, count):
    alone = fusion.fuse(mean, spread, Evidence())[1]
    assert fusion.fuse(mean, spread, Evidence(rate * count, count))[1] <= alone


def test_fusion_is_exact_at_both_ends():
    assert fusion.fuse(0.3, 0.1, Evidence()) == (0.3, 0.1)
    assert fusion.fuse(0.3, 0.1, Evidence(7e6, 1e7))[0] == pytest.approx(0.7, abs=1e-4)


def test_the_more_certain_side_wins():
    # .3 ± .1 is worth .21/.01 - 1 = 20 rollouts.
    assert fusion.strength(0.3, 0.1) == pytest.approx(20)
    assert fusion.fuse(0.3, 0.1, Evidence(20, 20))[0] == pytest.approx(0.65)
    vague = fusion.fuse(0.3, 0.4, Evidence(8, 8))[0]
    sharp = fusion.fuse(0.3, 0.05, Evidence(8, 8))[0]
    assert vague > 0.85
    assert sharp < 0.45


def simulate(rng, count, distort):
    """Predictions that were distorted in logit space, and what then happened."""
    truth = rng.uniform(0.05, 0.95, count)
    logits = np.log(truth / (1 - truth))
    predicted = 1 / (1 + np.exp(-distort(logits)))
    tried = np.full(count, 4)
    return truth, predicted, rng.binomial(tried, truth), tried


def test_identity_until_enough_data():
    fitted = calibration.fit([0.9] * 40, [0] * 40, [4] * 40)
    assert (fitted.slope, fitted.shift) == (1.0, 0.0)
    assert fitted.apply(0.3, 0.1) == (0.3, 0.1)


def test_a_biased_prior_is_corrected():
    # The loop as it runs: each batch is predicted with the calibration made from everything before.
    rng = np.random.default_rng(0)
    predicted, won, tried = np.zeros(0), np.zeros(0), np.zeros(0)
    for _ in range(20):
        fitted = calibration.fit(predicted, won, tried)
        truth, raw, successes, counts = simulate(rng, 64, lambda z: z + 1.0)
        given_out = [fitted.apply(float(p), 0.1)[0] for p in raw]
        predicted, won, tried = np.append(predicted, given_out), np.append(won, successes), np.append(tried, counts)
    assert calibration.brier(raw, successes, counts) > calibration.brier(given_out, successes, counts)
    assert abs(np.mean(given_out) - np.mean(truth)) < 0.5 * abs(np.mean(raw) - np.mean(truth))


def test_a_good_prior_is_left_nearly_alone():
    _, predicted, won, tried = simulate(np.random.default_rng(1), 1500, lambda z: z)
    fitted = calibration.fit(predicted, won, tried)
    for p in (0.1, 0.5, 0.9):
        assert fitted.apply(p, 0.1)[0] == pytest.approx(p, abs=0.08)


pairs = st.lists(st.tuples(unit, unit, st.integers(1, 16)), min_size=1, max_size=200)


@given(pairs, st.floats(0.02, 0.98), st.floats(0.02, 0.98))
def test_calibration_is_increasing_and_bounded(rows, first, second):
    p = [row[0] for row in rows]
    n = [row[2] for row in rows]
    fitted = calibration.fit(p, [row[1] * row[2] for row in rows], n)
    low, high = sorted((first, second))
    assert 0 < fitted.apply(low, 0.1)[0] <= fitted.apply(high, 0.1)[0] + 1e-12 < 1 + 1e-12
    assert 0 < fitted.apply(low, 0.1)[1] <= 0.5


def test_brier_counts_single_rollouts():
    # One right and three wrong at 0.25: (0.75² + 3 · 0.25²) / 4.
    assert calibration.brier([0.25], [1], [4]) == pytest.approx((0.75**2 + 3 * 0.25**2) / 4)
    with pytest.raises(ValueError, match="no pairs"):
        calibration.brier([], [], [])


def test_reliability_bins_hold_every_group_once():
    bins = calibration.reliability_bins([0.0, 0.05, 0.55, 1.0], [0, 1, 2, 4], [4, 4, 4, 4], bins=10)
    assert [(b.low, b.groups) for b in bins] == [(0.0, 2), (0.5, 1), (0.9, 1)]
    assert bins[0].success_rate == pytest.approx(1 / 8)
    assert bins[0].mean_predicted == pytest.approx(0.025)


@pytest.mark.parametrize("bad", [([1.2], [1], [2]), ([0.5], [3], [2]), ([0.5], [0], [0]), ([float("nan")], [0], [1])])
def test_impossible_pairs_are_an_error(bad):
    with pytest.raises(ValueError, match=r"need 0 <= predicted|finite"):
        calibration.fit(*bad)
