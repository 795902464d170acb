"""What METHODS section 1 claims of shrinkage and OSLA by Monte-Carlo, through the benchmark that reports it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shrinkage import break_even, measure, worst_case
from services.allocator.shrinkage import RewardScale, fuse_mean
from services.allocator.stopping import exact_stopping_point, stopping_point

PLUS_MINUS = RewardScale(-1.0, 1.0)


@functools.cache
def measured() -> dict[str, Any]:
    return measure([0, 1], 8000)


@pytest.mark.parametrize(
    ("name", "value", "tolerance"),
    [
        ("osla_rollouts", 5.1, 0.15),
        ("mse_osla", 0.040, 0.003),
        ("mse_fixed_4_fused", 0.065, 0.004),
        ("mse_mean_4", 0.137, 0.006),
        ("mse_mean_16", 0.034, 0.002),
    ],
)
def test_five_rollouts_give_nearly_the_error_of_sixteen(name: str, value: float, tolerance: float) -> None:
    assert measured()["mse"]["error .2, 10 % hallucinated"][name]["mean"] == pytest.approx(value, abs=tolerance)


def test_the_wrong_half_range_buys_too_little_for_hallucinated_priors() -> None:
    row = measured()["wrong_scale_on_hallucinated_prompts"]
    assert row["rollouts_right_scale"]["mean"] == pytest.approx(9.7, abs=0.3)
    assert row["rollouts_wrong_scale"]["mean"] == pytest.approx(6.4, abs=0.3)
    assert row["mse_wrong_scale_01"]["mean"] == pytest.approx(0.074, abs=0.006)
    assert row["mse_right_scale_01"]["mean"] == pytest.approx(0.029, abs=0.004)


@pytest.mark.parametrize(("mu", "below"), [(0.0, 0.65), (0.5, 0.49), (0.8, 0.30), (0.95, 0.16)])
def test_fusion_beats_the_plain_mean_of_four_only_near_the_prior(mu: float, below: float) -> None:
    assert break_even(mu) == pytest.approx(below, abs=0.02)


def test_the_worst_case_is_far_below_the_proven_bound() -> None:
    assert worst_case(4) == pytest.approx(1.65, abs=0.02)
    assert all(worst_case(k) <= 4 for k in (1, 2, 8, 16))


def test_which_baselines_leave_the_gradient_alone() -> None:
    for cell in measured()["gradient_ratio"].values():
        ratio = {name: value["mean"] for name, value in cell.items()}
        # A fixed number: leave-one-out. Adaptive: the sum with a baseline made before the rollout.
        for unbiased in ("fixed_4_leave_one_out", "osla_prefix_sum", "osla_prior_alone_sum"):
            assert ratio[unbiased] == pytest.approx(1, abs=0.04)
        assert ratio["fixed_4_in_sample"] < ratio["fixed_4_leave_one_out"] + 0.02
    smallest = min(cell["fixed_4_in_sample"]["mean"] for cell in measured()["gradient_ratio"].values())
    assert smallest < 0.8


@given(st.integers(1, 30), st.floats(0, 1), st.floats(0, 1), st.floats(1e-4, 1))
def test_worse_priors_and_lower_prices_never_stop_earlier(k: int, near: float, far: float, price: float) -> None:
    near, far = sorted((near, far))
    deltas = [fuse_mean(-d, d, k, PLUS_MINUS).delta_squared for d in (near, far)]
    assert deltas[0] <= deltas[1]
    for rule in (stopping_point, exact_stopping_point):
        assert rule(deltas[0], price, PLUS_MINUS) <= rule(deltas[1], price, PLUS_MINUS)
        assert rule(deltas[1], price, PLUS_MINUS) <= rule(deltas[1], price / 2, PLUS_MINUS)
