"""What the value prior takes in and gives out, as plain values, and the checks on it.

Knows no message format and no storage. Every check raises `InvalidArgument` whose text begins with the field it is
about, for example ``outcomes[3].successes``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InvalidArgument

FloatArray = NDArray[np.float64]

MAX_ID_CHARACTERS = 512
MAX_TRIALS = 1_000_000
_DTYPES: dict[str, str] = {"float32": "<f4", "float16": "<f2"}


class PriorSource(Enum):
    """What a prediction rests on."""

    UNINFORMED = "uninformed"
    CONTEXT = "context"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Feature:
    """Hidden state of a policy: `dimension` little-endian values of `dtype`, the output of block `layer` (0-based)."""

    layer: int
    dtype: Literal["float32", "float16"]
    dimension: int
    values: bytes
    policy_version: int = 0

    def vector(self) -> NDArray[np.float32]:
        """The values, shape (dimension,)."""
        return np.frombuffer(self.values, dtype=_DTYPES[self.dtype]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to predict; without `prompt_id` (empty) no history of its own is used."""

    text: str
    prompt_id: str = ""
    feature: Feature | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the rollouts of one group showed.

    `successes` is the sum of scores in [0, trials]; `predicted` the prior given before the first rollout, in (0, 1).
    """

    outcome_id: str
    policy_id: str
    text: str
    successes: float
    trials: int
    lineage: int = 0
    policy_version: int = 0
    prompt_id: str = ""
    feature: Feature | None = None
    predicted: float | None = None

    @property
    def order(self) -> tuple[int, str]:
        """Rows are always used in this order, so that the order of arrival cannot matter."""
        return (self.policy_version, self.outcome_id)


@dataclass(frozen=True, slots=True)
class Prior:
    """P(success) in (0, 1) and its standard deviation as a success rate, in (0, 0.5]."""

    prompt_id: str
    value: float
    uncertainty: float
    source: PriorSource
    context_size: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What became of the outcomes of one Observe call."""

    accepted: int = 0
    duplicates: int = 0
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on one request."""

    max_prompts: int = 4096
    max_outcomes: int = 4096
    max_text_bytes: int = 262_144
    max_feature_dimension: int = 65_536


def check_policy_id(policy_id: str, field: str = "policy_id") -> None:
    """Refuses an empty, over-long or unencodable id."""
    _check_id(policy_id, field, empty_ok=False)


def check_prompts(prompts: Sequence[Prompt], limits: Limits) -> None:
    """Checks the prompts of a Score call; names the row."""
    if not prompts:
        raise InvalidArgument("prompts is empty: give at least one prompt")
    if len(prompts) > limits.max_prompts:
        raise InvalidArgument(
            f"prompts has {len(prompts)} rows, the limit is {limits.max_prompts}: split the request", field="prompts"
        )
    for row, prompt in enumerate(prompts):
        where = f"prompts[{row}]"
        _check_id(prompt.prompt_id, f"{where}.prompt_id", empty_ok=True)
        _check_text(prompt.text, f"{where}.text", limits)
        if prompt.feature is not None:
            _check_feature(prompt.feature, f"{where}.feature", limits)


def check_outcomes(outcomes: Sequence[Outcome], limits: Limits) -> None:
    """Checks the outcomes of an Observe call; names the row. All or nothing: one bad row refuses the call."""
    if not outcomes:
        raise InvalidArgument("outcomes is empty: give at least one outcome")
    if len(outcomes) > limits.max_outcomes:
        raise InvalidArgument(
            f"outcomes has {len(outcomes)} rows, the limit is {limits.max_outcomes}: split the request",
            field="outcomes",
        )
    for row, outcome in enumerate(outcomes):
        check_outcome(outcome, f"outcomes[{row}]", limits)


def check_outcome(outcome: Outcome, where: str, limits: Limits) -> None:
    """Checks one outcome; `where` begins the message."""
    _check_id(outcome.outcome_id, f"{where}.outcome_id", empty_ok=False)
    check_policy_id(outcome.policy_id, f"{where}.policy_id")
    _check_id(outcome.prompt_id, f"{where}.prompt_id", empty_ok=True)
    _check_text(outcome.text, f"{where}.text", limits)
    if outcome.feature is not None:
        _check_feature(outcome.feature, f"{where}.feature", limits)
    for name, number in (("lineage", outcome.lineage), ("policy_version", outcome.policy_version)):
        if not 0 <= number < 2**53:
            raise _bad(f"{where}.{name}", f"is {number}, must be a count from 0")
    if not 1 <= outcome.trials <= MAX_TRIALS:
        raise _bad(f"{where}.trials", f"is {outcome.trials}, must be 1 to {MAX_TRIALS}")
    if not math.isfinite(outcome.successes) or not 0 <= outcome.successes <= outcome.trials:
        raise _bad(f"{where}.successes", f"is {outcome.successes:g}, must be in [0, trials = {outcome.trials}]")
    if outcome.predicted is not None and not 0 <= outcome.predicted <= 1:
        raise _bad(f"{where}.predicted", f"is {outcome.predicted:g}, must be a probability, or absent")


def _check_id(value: str, field: str, *, empty_ok: bool) -> None:
    if not value and not empty_ok:
        raise _bad(field, "is empty")
    if len(value) > MAX_ID_CHARACTERS:
        raise _bad(field, f"has {len(value)} characters, the limit is {MAX_ID_CHARACTERS}")
    _encoded(value, field)


def _check_text(text: str, field: str, limits: Limits) -> None:
    if not text or text.isspace():
        raise _bad(field, "is empty: give the prompt's text")
    size = len(_encoded(text, field))
    if size > limits.max_text_bytes:
        raise _bad(field, f"is {size} bytes of UTF-8, the limit is {limits.max_text_bytes}")


def _encoded(value: str, field: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:  # lone surrogates, which JSON can spell
        raise _bad(field, f"is not valid Unicode (position {error.start})") from error


def _check_feature(feature: Feature, field: str, limits: Limits) -> None:
    if feature.dtype not in _DTYPES:
        raise _bad(f"{field}.dtype", "must be float32 or float16")
    if not 1 <= feature.dimension <= limits.max_feature_dimension:
        raise _bad(f"{field}.dimension", f"is {feature.dimension}, must be 1 to {limits.max_feature_dimension}")
    wanted = feature.dimension * np.dtype(_DTYPES[feature.dtype]).itemsize
    if len(feature.values) != wanted:
        raise _bad(
            f"{field}.values",
            f"has {len(feature.values)} bytes, {feature.dimension} values of {feature.dtype} need {wanted}",
        )
    if not np.isfinite(feature.vector()).all():
        raise _bad(f"{field}.values", "holds a NaN or an infinity")


def _bad(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field)
