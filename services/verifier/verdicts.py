"""What a verdict is. Plain data: knows no transport, no process and no domain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SHOWN_CHARS = 200


class Kind(StrEnum):
    """The three outcomes. NO_VERDICT is the verifier's own failure and is never a 0."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_VERDICT = "no_verdict"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement of one completion.

    score is in [0, 1] and meaningless for NO_VERDICT. reason begins with a stable word (`word`), then
    optionally a colon and a sentence for people. extracted is the answer found in the completion,
    cut to MAX_SHOWN_CHARS.
    """

    kind: Kind
    score: float
    reason: str
    extracted: str = ""

    @property
    def word(self) -> str:
        """The stable first word of the reason, fit for a metric label."""
        return self.reason.split(":", 1)[0].split(" ", 1)[0]

    @property
    def cacheable(self) -> bool:
        """Whether the same input gives the same verdict again; a time-out or a fault may not."""
        return self.kind is not Kind.NO_VERDICT or self.word not in {TIMEOUT, FAULT}


EQUAL = "equal"
UNEQUAL = "unequal"
UNEVALUATED = "unevaluated"
PARTIAL = "partial"
NO_ANSWER = "no_answer"
ANSWER_UNPARSABLE = "answer_unparsable"
ANSWER_TOO_LARGE = "answer_too_large"
ANSWER_UNSAFE = "answer_unsafe"
GOLD_UNPARSABLE = "gold_unparsable"
UNSUPPORTED = "unsupported"
TIMEOUT = "timeout"
FAULT = "fault"


def shown(text: str) -> str:
    """The text as people see it in a verdict: at most MAX_SHOWN_CHARS characters."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def correct(reason: str, extracted: str = "") -> Verdict:
    """CORRECT with score 1."""
    return Verdict(Kind.CORRECT, 1.0, reason, shown(extracted))


def wrong(reason: str, extracted: str = "", score: float = 0.0) -> Verdict:
    """WRONG; a score below 1 is kept as partial credit."""
    return Verdict(Kind.WRONG, score, reason, shown(extracted))


def no_verdict(reason: str, extracted: str = "") -> Verdict:
    """NO_VERDICT: the rollout leaves its group and the baseline."""
    return Verdict(Kind.NO_VERDICT, 0.0, reason, shown(extracted))
