"""The OSLA rule: decision table, scale equivalence, limits; and fixed budgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollwise.v1 import allocator_pb2

from services.allocator.messages import decision_message
from services.allocator.replay import counterfactual, replay_group, replay_trail
from services.allocator.shrinkage import RewardScale, fuse_mean
from services.allocator.stopping import (
    FixedBudget,
    Kind,
    OslaBudget,
    decide,
    exact_stopping_point,
    expected_gain,
    price_on,
    stopping_point,
)
from services.common.errors import InvalidArgument

PLUS_MINUS = RewardScale(-1.0, 1.0)
ZERO_ONE = RewardScale(0.0, 1.0)
PAPER = OslaBudget(4, 16, 1 / 256, 1)

budgets = st.builds(
    lambda k_min, extra, price, size: OslaBudget(k_min, k_min + extra, price, size),
    st.integers(1, 6),
    st.integers(0, 20),
    st.floats(1e-4, 0.5),
    st.integers(0, 5),
)


@pytest.mark.parametrize(("k", "go_on"), [(4, 0.577), (8, 0.500), (12, 0.577), (15, 1.033)])
def test_the_decision_table_of_the_paper_setting(k: int, go_on: float) -> None:
    for d, expected in ((go_on - 0.002, True), (go_on + 0.002, False)):
        delta_squared = max(0.0, d * d - 1 / k)
        assert (k >= stopping_point(delta_squared, PAPER.price, PLUS_MINUS)) is expected


def test_the_threshold_has_the_closed_form() -> None:
    for k in range(4, 16):
        d = math.sqrt(1 / k + 1 / (16 - k))
        assert stopping_point(d * d - 1 / k, 1 / 256, PLUS_MINUS) == pytest.approx(k)


@given(budgets, st.lists(st.booleans(), max_size=26), st.floats(0, 1))
def test_0_1_rewards_decide_exactly_as_minus_1_1_rewards(b: OslaBudget, outcomes: list[bool], p: float) -> None:
    narrow = decide(b, [float(o) for o in outcomes], p, ZERO_ONE)
    wide = decide(b, [2.0 * o - 1 for o in outcomes], 2 * p - 1, PLUS_MINUS)
    # At the very threshold rounding may tip either; METHODS' equivalence is about everything else.
    point = stopping_point(wide.delta_squared, b.price, PLUS_MINUS)
    at_threshold = math.isfinite(point) and abs(point - round(point)) <= 1e-6
    at_zero = 0 < max(narrow.delta_squared, wide.delta_squared) <= 1e-9
    if not at_threshold and not at_zero:
        assert (narrow.kind, narrow.more) == (wide.kind, wide.more)
    assert narrow.cost == pytest.approx(wide.cost / 4)
    assert narrow.baseline * 2 - 1 == pytest.approx(wide.baseline, abs=1e-9)


@given(budgets, st.lists(st.booleans(), max_size=40), st.floats(0, 1))
def test_rollouts_stay_between_k_min_and_k_max(b: OslaBudget, outcomes: list[bool], p: float) -> None:
    decision = decide(b, [float(o) for o in outcomes], p, ZERO_ONE)
    k = len(outcomes)
    if k < b.k_min:
        assert decision.kind is Kind.CONTINUE
        assert k + decision.more == b.k_min
    elif k >= b.k_max:
        assert (decision.kind, decision.more) == (Kind.LIMIT, 0)
    elif decision.kind is Kind.CONTINUE:
        assert 1 <= decision.more <= b.k_max - k
    else:
        assert (decision.kind, decision.more) == (Kind.STOP, 0)


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.floats(0, 1))
def test_one_at_a_time_stops_at_the_first_k_at_or_past_the_threshold(outcomes: list[bool], p: float) -> None:
    rewards = [float(o) for o in outcomes]
    k = len(counterfactual(rewards, p, PAPER, ZERO_ONE).rewards)

    def past(n: int) -> bool:
        fusion = fuse_mean(p, sum(rewards[:n]) / n, n, ZERO_ONE)
        return n >= stopping_point(fusion.delta_squared, PAPER.price, ZERO_ONE)

    assert not any(past(n) for n in range(4, k))
    assert k == 16 or past(k)


def test_a_prior_that_agrees_with_the_evidence_stops_at_once() -> None:
    assert decide(PAPER, [1.0, 0.0, 1.0, 0.0], 0.5, ZERO_ONE).kind is Kind.STOP
    assert stopping_point(0.0, 1e-9, ZERO_ONE) == -math.inf


def test_a_prior_that_disagrees_buys_more() -> None:
    decision = decide(PAPER, [0.0] * 4, 0.95, ZERO_ONE)
    assert (decision.kind, decision.more) == (Kind.CONTINUE, 1)
    up_to = decide(OslaBudget(4, 16, 1 / 256, 0), [0.0] * 4, 0.95, ZERO_ONE)
    assert up_to.more == math.ceil(stopping_point(decision.delta_squared, 1 / 256, ZERO_ONE) - 4) > 1


@given(st.integers(1, 30), st.floats(1e-4, 4), st.floats(1e-4, 1))
def test_the_continuous_rule_stops_where_its_gain_falls_to_the_cost(k: int, delta_squared: float, price: float) -> None:
    a = 1 / delta_squared
    point = stopping_point(delta_squared, price, PLUS_MINUS)
    assert (1 / (k + a) ** 2 <= price + 1e-12) == (k >= point - 1e-6) or abs(k - point) < 1e-3
    exact = exact_stopping_point(delta_squared, price, PLUS_MINUS)
    assert -1e-9 <= point - exact <= 0.5 + 1e-9
    if exact > 0:
        assert 1 / ((exact + a) * (exact + 1 + a)) == pytest.approx(price, rel=1e-6)


@given(st.integers(1, 30), st.floats(0, 4))
def test_the_gain_is_what_the_next_rollout_takes_off_the_error(k: int, delta_squared: float) -> None:
    gain = expected_gain(k, delta_squared, PLUS_MINUS)
    if delta_squared < 1e-9:
        assert gain <= 1e-9
        return
    a = 1 / delta_squared
    assert gain == pytest.approx(1 / (k + a) - 1 / (k + 1 + a), abs=1e-12)


def test_prices_scale_with_the_square_of_the_half_range() -> None:
    assert price_on(1.0, ZERO_ONE) == 0.25
    assert price_on(1.0, PLUS_MINUS) == 1.0


def test_a_fixed_budget_needs_no_prior_and_buys_what_is_missing() -> None:
    assert decide(FixedBudget(8), [], None, ZERO_ONE).more == 8
    assert decide(FixedBudget(8), [1.0] * 6, None, ZERO_ONE).more == 2
    done = decide(FixedBudget(8), [1.0, 0.0] * 4, None, ZERO_ONE)
    assert (done.kind, done.more, done.baseline) == (Kind.LIMIT, 0, 0.5)


def test_time_up_ends_a_group_that_would_go_on() -> None:
    assert decide(PAPER, [0.0] * 4, 0.95, ZERO_ONE, time_is_up=True).kind is Kind.DEADLINE
    assert decide(PAPER, [1.0, 0.0] * 2, 0.5, ZERO_ONE, time_is_up=True).kind is Kind.STOP


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: OslaBudget(0, 4), "k_min"), (lambda: OslaBudget(5, 4), "k_max"),
        (lambda: OslaBudget(price=0.0), "price"), (lambda: OslaBudget(price=math.nan), "price"),
        (lambda: OslaBudget(round_size=-1), "round_size"), (lambda: FixedBudget(0), "rollouts"),
        (lambda: decide(PAPER, [1.0], None, ZERO_ONE), "prior"),
        (lambda: decide(PAPER, [math.nan], 0.5, ZERO_ONE), "rewards"),
        (lambda: decide(PAPER, [1.0], math.inf, ZERO_ONE), "prior"),
    ],
)  # fmt: skip
def test_impossible_input_is_an_error_naming_its_field(make: object, field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        make()  # type: ignore[operator]


@given(budgets, st.lists(st.booleans(), min_size=1, max_size=26), st.floats(0, 1))
def test_a_recorded_trail_is_reproduced(b: OslaBudget, outcomes: list[bool], p: float) -> None:
    rewards = [float(o) for o in outcomes]
    trail = [decision_message(decide(b, rewards[:k], p, ZERO_ONE)) for k in range(1, len(rewards) + 1)]
    assert all(step.reproduced for step in replay_trail(trail, b, ZERO_ONE))


def test_a_trail_that_was_tampered_with_is_not_reproduced() -> None:
    osla = {"k_min": 4, "k_max": 16, "price": 1 / 256, "round_size": 1}
    group = allocator_pb2.ScoredGroup(scale={"low": 0, "high": 1}, budget={"osla": osla})
    group.trail.append(decision_message(decide(PAPER, [0.0] * 4, 0.95, ZERO_ONE)))
    assert replay_group(group)[0].reproduced
    group.trail[0].baseline += 0.1
    assert "baseline" in replay_group(group)[0].difference
    group.trail[0].baseline -= 0.1
    group.trail[0].kind = allocator_pb2.DECISION_KIND_STOP
    assert "stop recorded, continue replayed" in replay_group(group)[0].difference
