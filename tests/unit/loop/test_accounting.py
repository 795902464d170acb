import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.errors import FailedPrecondition, InvalidArgument
from trainer.accounting import Admission, Final, Ledger


class LedgerMachine(RuleBasedStateMachine):
    """Any order of admissions, ends, repeats and checkpoints keeps the books straight."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.open: list[Admission] = []
        self.ended: list[Admission] = []
        self.serial = 0

    @rule(prompt=st.integers(0, 3))
    def admit(self, prompt):
        admission = Admission(self.serial, f"p{prompt}", 0)
        self.serial += 1
        self.ledger.admit(admission)
        self.open.append(admission)

    @rule(data=st.data(), final=st.sampled_from(list(Final)))
    def end(self, data, final):
        if not self.open:
            return
        admission = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert self.ledger.settle(admission, final, rollouts=4)
        self.ended.append(admission)

    @rule(data=st.data(), final=st.sampled_from(list(Final)))
    def repeat(self, data, final):
        if not self.ended:
            return
        before = self.ledger.counts(), self.ledger.duplicates
        assert not self.ledger.settle(data.draw(st.sampled_from(self.ended)), final)
        assert (self.ledger.counts(), self.ledger.duplicates) == (before[0], before[1] + 1)

    @rule()
    def checkpoint_and_resume(self):
        before = self.ledger.state()
        self.ledger = Ledger.from_state(json.loads(json.dumps(before)))
        assert self.ledger.state() == before

    @invariant()
    def books_add_up(self):
        counts = self.ledger.counts()
        assert counts["submitted"] == sum(counts[name] for name in ("trained", "filtered", "dropped", "in_flight"))
        assert list(self.ledger.in_flight) == self.open
        assert self.ledger.rollouts == 4 * len(self.ended)
        self.ledger.check()


TestLedgerMachine = LedgerMachine.TestCase


def test_an_admission_is_opened_once():
    ledger = Ledger()
    ledger.admit(Admission(0, "a"))
    with pytest.raises(FailedPrecondition, match="in flight already"):
        ledger.admit(Admission(0, "a"))
    ledger.admit(Admission(0, "a", 1))
    assert ledger.counts()["in_flight"] == 2


@given(st.integers(1, 50))
def test_ten_thousand_filtered_groups_leave_nothing_behind(batch):
    ledger = Ledger()
    for step in range(10_000 // batch):
        for i in range(batch):
            ledger.admit(Admission(step, str(i)))
        for i in range(batch):
            ledger.settle(Admission(step, str(i)), Final.FILTERED)
    assert len(ledger) == 0 and ledger.filtered == ledger.submitted


def test_damaged_accounts_are_refused():
    ledger = Ledger()
    ledger.admit(Admission(0, "a"))
    state = ledger.state()
    with pytest.raises(FailedPrecondition, match="do not add up"):
        Ledger.from_state({**state, "submitted": 7})
    with pytest.raises(InvalidArgument, match="damaged"):
        Ledger.from_state({**state, "in_flight": [["a"]]})
    with pytest.raises(InvalidArgument, match="damaged"):
        Ledger.from_state({})
