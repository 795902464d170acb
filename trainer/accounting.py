"""The books of a job: every admitted prompt ends in exactly one state.

Invariant, at all times and across resume: submitted == trained + filtered + dropped + in_flight.
A ledger knows admissions by their key (step, prompt id, attempt), which a resume does not change: the lineage is
not part of it, so a prompt that is sampled again under a newer lineage is still the same admission. Nothing is kept
of settled admissions but the counts, so memory follows what is in flight. This module knows no service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from services.common.errors import FailedPrecondition, InvalidArgument


class Final(StrEnum):
    """The one state an admission ends in."""

    TRAINED = "trained"
    # Closed by the allocator as not trainable, with its cause.
    FILTERED = "filtered"
    # Complete, but not fit for training: too old, or malformed.
    DROPPED = "dropped"


class Admission(NamedTuple):
    """Names one admission of a prompt within a job, for good: `step` it was drawn for, prompt id, attempt."""

    step: int
    prompt_id: str
    attempt: int = 0


class Ledger:
    """Counts admissions and their ends; `in_flight` keeps admission order."""

    def __init__(self) -> None:
        self._in_flight: dict[Admission, None] = {}
        self.submitted = 0
        self.trained = 0
        self.filtered = 0
        self.dropped = 0
        # Groups that came again after their admission had ended, or that no admission asked for: ignored.
        self.duplicates = 0
        # Groups of an older lineage: ignored.
        self.stale = 0
        # Judged and unjudged rollouts of settled admissions.
        self.rollouts = 0

    @property
    def in_flight(self) -> tuple[Admission, ...]:
        """Admissions without an end, oldest first."""
        return tuple(self._in_flight)

    def __contains__(self, admission: object) -> bool:
        return admission in self._in_flight

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[Admission]:
        return iter(self._in_flight)

    def admit(self, admission: Admission) -> None:
        """Opens an admission. Raises FailedPrecondition when it is open already."""
        if admission in self._in_flight:
            raise FailedPrecondition(f"{admission} is in flight already; a prompt is admitted once a step")
        self._in_flight[admission] = None
        self.submitted += 1

    def settle(self, admission: Admission, final: Final, *, rollouts: int = 0) -> bool:
        """Ends an admission; False (and counted as a duplicate) when it is not in flight."""
        if admission not in self._in_flight:
            self.duplicates += 1
            return False
        del self._in_flight[admission]
        if final is Final.TRAINED:
            self.trained += 1
        elif final is Final.FILTERED:
            self.filtered += 1
        else:
            self.dropped += 1
        self.rollouts += rollouts
        return True

    def check(self) -> None:
        """Raises FailedPrecondition when the books do not add up (they always do; a resume checks what it read)."""
        ends = self.trained + self.filtered + self.dropped
        if self.submitted != ends + len(self._in_flight):
            raise FailedPrecondition(
                f"accounts do not add up: {self.submitted} submitted, but {self.trained} trained + {self.filtered} "
                f"filtered + {self.dropped} dropped + {len(self._in_flight)} in flight"
            )

    def counts(self) -> dict[str, int]:
        """The numbers people see."""
        return {
            "submitted": self.submitted,
            "trained": self.trained,
            "filtered": self.filtered,
            "dropped": self.dropped,
            "in_flight": len(self._in_flight),
        }

    def state(self) -> dict[str, Any]:
        """Everything, as JSON-serialisable values, for the checkpoint."""
        return {
            **self.counts(),
            "duplicates": self.duplicates,
            "stale": self.stale,
            "rollouts": self.rollouts,
            "in_flight": [list(admission) for admission in self._in_flight],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger that `state()` described. Raises InvalidArgument or FailedPrecondition on a damaged one."""
        ledger = cls()
        try:
            for name in ("submitted", "trained", "filtered", "dropped", "duplicates", "stale", "rollouts"):
                setattr(ledger, name, int(state[name]))
            for step, prompt_id, attempt in state["in_flight"]:
                ledger._in_flight[Admission(int(step), str(prompt_id), int(attempt))] = None
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"the checkpoint's accounts are damaged: {error!r}") from error
        ledger.check()
        return ledger
