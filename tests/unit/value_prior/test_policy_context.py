"""The context of one policy: bounded, idempotent, fenced, and the same whatever the order of arrival."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.value_prior.context import (
    PolicyContext,
    decode_row,
    decode_snapshot,
    encode_row,
    encode_snapshot,
)
from services.value_prior.records import Feature, Limits, Observed, Outcome, check_outcomes


def outcome(name, version=0, lineage=0, **more):
    return Outcome(name, "p", "1 + 1 =", more.pop("won", 1.0), 4, lineage, version, "q", **more)


def take(context, *outcomes):
    change, result = context.plan(outcomes)
    context.apply(change)
    return result


def test_an_outcome_counts_once():
    context = PolicyContext(10)
    assert take(context, outcome("a"), outcome("b"), outcome("a")) == Observed(2, 1, 0)
    assert take(context, outcome("a"), outcome("c")) == Observed(1, 1, 0)
    assert [row.outcome_id for row in context.all_rows()] == ["a", "b", "c"]


def test_older_lineages_are_stale():
    context = PolicyContext(10, fence=2)
    assert take(context, outcome("a", lineage=1), outcome("b", lineage=2), outcome("c", lineage=3)) == Observed(2, 0, 1)


def test_the_oldest_versions_leave_and_still_count_as_duplicates():
    context = PolicyContext(4)
    take(context, *(outcome(f"v{v}", v) for v in range(6)))
    assert [row.policy_version for row in context.all_rows()] == [2, 3, 4, 5]
    assert take(context, outcome("v0", 0), outcome("v5", 5)) == Observed(0, 2, 0)
    # Older than anything kept: accepted, of no effect, and remembered.
    assert take(context, outcome("late", 0)) == Observed(1, 0, 0)
    assert [row.policy_version for row in context.all_rows()] == [2, 3, 4, 5]
    assert take(context, outcome("late", 0)) == Observed(0, 1, 0)


def test_the_memory_of_what_left_is_bounded_too():
    context = PolicyContext(4)
    for version in range(40):
        take(context, outcome(f"v{version}", version))
    assert len(context.rows) == 4
    assert len(context.gone) == 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_show(rows, random):
    outcomes = [outcome(f"{v}/{i}", v, won=float(i % 5)) for v, i in dict.fromkeys(rows)]
    shuffled = list(outcomes)
    random.shuffle(shuffled)
    first, second = PolicyContext(100), PolicyContext(100)
    take(first, *outcomes)
    for row in shuffled:
        take(second, row)
    assert first.window(None) == second.window(None)
    assert first.window(3) == second.window(3)
    assert all(row.policy_version < 3 for row in first.window(3))
    assert encode_snapshot(first.all_rows(), 1) == encode_snapshot(second.all_rows(), 1)


def test_a_window_below_a_step_stands_still_while_the_step_pushes_old_rows_out():
    context = PolicyContext(16)
    take(context, *(outcome(f"{v}/{i}", v) for v in range(4) for i in range(4)))
    before = context.window(4)
    assert len(before) == 12
    for number in range(4):
        take(context, outcome(f"4/{number}", 4))
        assert context.window(4) == before


@given(st.text(min_size=1, max_size=40).filter(lambda t: t.isprintable()), st.floats(0, 4))
def test_rows_survive_their_encoding(text, won):
    feature = Feature(3, "float16", 2, b"\x00<\x00@", 7)
    row = Outcome("o", "p", text, won, 4, 1, 2, "q", feature, 0.25)
    assert decode_row(encode_row(row), "p") == row
    plain = Outcome("o", "p", text, won, 4)
    assert decode_row(encode_row(plain), "p") == plain


def test_snapshots_go_round():
    context = PolicyContext(10)
    take(context, outcome("a"), outcome("b", 3, predicted=0.4))
    data = encode_snapshot(context.all_rows(), 0)
    other = PolicyContext(10)
    take(other, outcome("z"))
    other.apply(decode_snapshot(data, "p", 10, fence=5))
    assert other.all_rows() == context.all_rows()
    assert other.fence == 5
    small = PolicyContext(1)
    small.apply(decode_snapshot(data, "p", 1, fence=0))
    assert [row.outcome_id for row in small.all_rows()] == ["b"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"rubbish", "snapshot"),
        (zlib.compress(b"{}"), "snapshot"),
        (zlib.compress(b"[1]"), "snapshot"),
        (zlib.compress(b'{"format":"rollwise.value_prior.context","version":9,"rows":[]}'), "version is 9"),
        (encode_snapshot([outcome("a")], 0)[:-6], "cut short"),
        (encode_snapshot([outcome("a", won=9.0)], 0), r"rows\[0\].successes"),
        (encode_snapshot([outcome("a"), outcome("a")], 0), "twice"),
    ],
)
def test_what_is_no_snapshot_is_refused(data, why):
    with pytest.raises(InvalidArgument, match=why):
        decode_snapshot(data, "p", 10, fence=0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"successes": float("nan")}, "successes"),
        ({"successes": 5.0}, "successes"),
        ({"successes": -0.1}, "successes"),
        ({"trials": 0}, "trials"),
        ({"policy_id": ""}, "policy_id"),
        ({"outcome_id": ""}, "outcome_id"),
        ({"text": ""}, "text"),
        ({"text": " \n"}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"text": "x" * 2000}, "text"),
        ({"lineage": -1}, "lineage"),
        ({"predicted": 1.5}, "predicted"),
        ({"predicted": float("nan")}, "predicted"),
        ({"feature": Feature(0, "float32", 2, b"\x00" * 7)}, "feature.values"),
        ({"feature": Feature(0, "float16", 1, b"\x00\x7e")}, "feature.values"),
    ],
)
def test_bad_outcomes_are_refused_by_row_and_field(changes, field):
    good = {"outcome_id": "a", "policy_id": "p", "text": "t", "successes": 1.0, "trials": 4}
    rows = [Outcome(**good), Outcome(**{**good, **changes})]
    with pytest.raises(InvalidArgument) as caught:
        check_outcomes(rows, Limits(max_text_bytes=1000))
    assert str(caught.value).startswith(f"outcomes[1].{field} ")
    assert caught.value.metadata["field"] == f"outcomes[1].{field}"
