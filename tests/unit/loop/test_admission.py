import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from trainer.accounting import Admission, Final, Ledger
from trainer.admission import Credits


def simulate(credits: Credits, order: random.Random, *, resume_at: set[int]) -> list[int]:
    """Runs a job whose groups finish in a random order; returns the age of every consumed group."""
    ledger, admitted_at, ready, ages = Ledger(), {}, set(), []
    done = admitted = 0
    while done < credits.steps:
        for step in credits.admissible_steps(steps_done=done, steps_admitted=admitted):
            for i in range(credits.prompts_per_step):
                ledger.admit(Admission(step, str(i)))
                admitted_at[Admission(step, str(i))] = done
            admitted += 1
        assert len(ledger) <= (credits.max_staleness + 1) * credits.prompts_per_step
        chosen = credits.choose(step=done, admitted_at=admitted_at, ready=ready)
        if chosen is None:
            waiting = [a for a in ledger.in_flight if a not in ready]
            assert waiting, "nothing to wait for, and no step possible: a deadlock"
            ready.add(order.choice(waiting[-3:] if order.random() < 0.7 else waiting))
            continue
        for admission in chosen:
            ages.append(done - admitted_at.pop(admission))
            ready.discard(admission)
            ledger.settle(admission, order.choice(list(Final)))
        done += 1
        if done in resume_at:  # everything in flight is sampled again, under the weights of now
            ledger, ready = Ledger.from_state(ledger.state()), set()
            admitted_at = dict.fromkeys(ledger.in_flight, done)
    assert len(ledger) == 0 and ledger.submitted == credits.steps * credits.prompts_per_step
    return ages


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 12), st.integers(0, 2**32), st.sets(st.integers(1, 11)))
def test_no_group_is_older_than_the_bound_also_right_after_a_resume(batch, staleness, steps, seed, resumes):
    ages = simulate(Credits(batch, staleness, steps), random.Random(seed), resume_at=resumes)
    assert all(0 <= age <= staleness for age in ages)
    assert len(ages) == batch * steps


def test_without_staleness_a_step_is_exactly_its_own_prompts():
    credits = Credits(prompts_per_step=2, max_staleness=0, steps=5)
    assert list(credits.admissible_steps(steps_done=1, steps_admitted=1)) == [1]
    assert list(credits.admissible_steps(steps_done=1, steps_admitted=2)) == []
    a, b = Admission(1, "a"), Admission(1, "b")
    assert credits.choose(step=1, admitted_at={a: 1, b: 1}, ready={b}) is None
    assert credits.choose(step=1, admitted_at={a: 1, b: 1}, ready={b, a}) == [a, b]


def test_a_fast_group_overtakes_a_slow_one_until_that_one_is_due():
    credits = Credits(prompts_per_step=1, max_staleness=2, steps=9)
    slow, fast, faster = Admission(0, "slow"), Admission(1, "fast"), Admission(2, "faster")
    at = {slow: 0, fast: 0, faster: 0}
    assert credits.choose(step=0, admitted_at=at, ready={faster}) == [faster]
    later = {slow: 0, fast: 0, Admission(3, "new"): 1}
    # Both old ones are due by step 2: one of them must go now.
    assert credits.choose(step=1, admitted_at=later, ready={Admission(3, "new")}) is None
    assert credits.choose(step=1, admitted_at=later, ready={Admission(3, "new"), fast}) == [fast]


def test_nothing_is_admitted_past_the_last_step():
    credits = Credits(prompts_per_step=4, max_staleness=3, steps=2)
    assert list(credits.admissible_steps(steps_done=0, steps_admitted=0)) == [0, 1]
    assert list(credits.admissible_steps(steps_done=1, steps_admitted=2)) == []


def test_senseless_credits_are_refused():
    with pytest.raises(InvalidArgument):
        Credits(prompts_per_step=0, max_staleness=0, steps=1)
