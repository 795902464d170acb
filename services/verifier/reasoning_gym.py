"""Verdicts on reasoning-gym tasks, by each task's own scorer.

CORRECT only at the scorer's full score; anything less is WRONG with its score kept as partial credit.
Some scorers hand the answer to `eval` or to sympy's parser, which evaluates as well. Here the first read
literals only, and the second see no answer with a name that is not mathematics.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from services.verifier import normalise, verdicts
from services.verifier.extract import FUNCTIONS, TAIL_CHARS, after_thinking, boxes, final_answer, trim
from services.verifier.verdicts import Verdict

MAX_ANSWER_CHARS = TAIL_CHARS
FULL_SCORE = 1.0 - 1e-9
_SHORT_ORACLE_CHARS = 200

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.S | re.I)
_HASHES = re.compile(r"^[ \t]*####[ \t]+([^\n]+)$", re.M)
_ANSWER_LINE = re.compile(
    r"^[\s*_>#-]{0,8}(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t]*(?:\*\*|__)?[ \t]*:[ \t]*(?:\*\*|__(?!_))?[ \t]*",
    re.M | re.I,
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SYMPY_NAMES = FUNCTIONS | {"pi", "ln", "E", "C", "I", "oo", "Abs", "sign", "erf", "Rational", "Integer"}


class Scorer(NamedTuple):
    """A task's scorer, and whether it lets sympy evaluate the answer's text."""

    score: Callable[[str, dict[str, Any]], float]
    evaluates: bool


@lru_cache(maxsize=256)
def scorer(task: str) -> Scorer | None:
    """The scorer of a task, or None where reasoning-gym has no task of that name."""
    from reasoning_gym import get_score_answer_fn

    try:
        score = get_score_answer_fn(task)
    except ValueError:
        return None
    source = inspect.getsource(score)
    if "eval(" in source:
        # A name in the module comes before the builtin: what was evaluated is now only read.
        vars(sys.modules[type(score.__self__).__module__])["eval"] = ast.literal_eval
    return Scorer(score, evaluates=bool(re.search(r"parse_expr|sympify|\bsp\.|\bsympy\.", source)))


def warm() -> None:
    """Import reasoning-gym, so that the first task does not wait for it."""
    import reasoning_gym

    assert reasoning_gym.get_score_answer_fn is not None


def judge(task: str, entry_json: str, completion: str) -> Verdict:  # noqa: PLR0911 - one return a verdict
    """The verdict of the task's scorer on the answer in a completion.

    entry_json is the data-set entry: {"question", "answer", "metadata", …}.
    """
    prepared = _prepare(task, entry_json)
    if isinstance(prepared, Verdict):
        return prepared
    score, entry = prepared
    answer = extract(completion, oracle=entry.get("answer"))
    if answer is None:
        return verdicts.wrong(f"{verdicts.NO_ANSWER}: no final answer was found in the completion")
    if answer == entry.get("answer"):
        return _scored(score, answer, entry)
    if len(answer) > MAX_ANSWER_CHARS or re.search(rf"\d{{{normalise.MAX_DIGITS},}}", answer):
        return verdicts.wrong(f"{verdicts.ANSWER_TOO_LARGE}: {len(answer)} characters", answer)
    if score.evaluates:
        if (why := normalise.too_large(answer)) is not None:
            return verdicts.wrong(f"{verdicts.ANSWER_TOO_LARGE}: {why}", answer)
        if (name := _unsafe(answer)) is not None:
            return verdicts.wrong(f"{verdicts.ANSWER_UNSAFE}: {name!r} is no mathematics", answer)
    return _scored(score, answer, entry)


def check(task: str, entry_json: str) -> Verdict:
    """CORRECT where the entry's own answer gets the full score (or the entry has none and the scorer still runs)."""
    prepared = _prepare(task, entry_json)
    if isinstance(prepared, Verdict):
        return prepared
    score, entry = prepared
    oracle = entry.get("answer")
    if oracle is None:
        verdict = _scored(score, "", entry)
        return verdict if verdict.kind is verdicts.Kind.NO_VERDICT else verdicts.correct(verdicts.EQUAL)
    verdict = _scored(score, str(oracle), entry)
    if verdict.kind is verdicts.Kind.WRONG:
        return verdicts.wrong(f"{verdicts.UNEQUAL}: the entry's own answer scores {verdict.score:g}", str(oracle))
    return verdict


def extract(completion: str, *, oracle: object) -> str | None:  # noqa: PLR0911 - one return a form
    """The answer in a completion; oracle is the entry's own answer and only tells which shape is wanted.

    In this order: `<answer>…</answer>`, the last box, `#### …`, what follows the last `Answer:`; then the final
    number where the oracle is one; then the whole text.
    """
    text = after_thinking(completion)
    if text is None:
        return None
    text = text[-TAIL_CHARS:].strip()
    if not text:
        return None
    shape = oracle if isinstance(oracle, str) else ""
    for found in (_ANSWER_TAG.findall(text), [content for _, _, content in boxes(text)], _HASHES.findall(text)):
        if found:
            return _tidy(found[-1], shape) or None
    if normalise.plain_number(shape) is not None:
        number = final_answer(text)
        return None if number is None else normalise.without_unit(normalise.clean(number))
    lines = list(_ANSWER_LINE.finditer(text))
    if lines and (payload := text[lines[-1].end() :].strip()):
        many = "\n" in shape or len(shape) > _SHORT_ORACLE_CHARS
        return _tidy(payload if many else payload.split("\n", 1)[0], shape)
    if shape and "\n" not in shape and len(shape) <= _SHORT_ORACLE_CHARS and len(text) > 4 * len(shape) + 40:
        return final_answer(text) or text
    return _tidy(text, shape)


def _tidy(text: str, shape: str) -> str:
    """Without markdown and maths delimiters around it, and without a full stop that the oracle does not have."""
    if "\n" in shape:
        return text.strip("\n `")  # a grid: its own signs may be stars and underscores
    tidy = trim(text)
    stop = shape[-1:]
    return tidy + stop if stop in tuple(".,;:") and text.strip("*` ").endswith(stop) else tidy


@lru_cache(maxsize=512)
def _prepare(task: str, entry_json: str) -> tuple[Scorer, dict[str, Any]] | Verdict:
    found = scorer(task)
    if found is None:
        return verdicts.no_verdict(f"{verdicts.GOLD_UNPARSABLE}: reasoning-gym has no task {task!r}")
    try:
        entry = json.loads(entry_json)
    except ValueError as error:
        return verdicts.no_verdict(f"{verdicts.GOLD_UNPARSABLE}: entry_json is not JSON ({error})")
    if not isinstance(entry, dict) or "answer" not in entry:
        return verdicts.no_verdict(
            f'{verdicts.GOLD_UNPARSABLE}: entry_json must be an object with "answer" and "metadata"'
        )
    entry.setdefault("metadata", {})
    if isinstance(entry["answer"], str):
        # JSON knows no tuples; a scorer that compares with one finds its own answer only in this form.
        tuples = {**entry, "metadata": _tuples(entry["metadata"])}
        if _full(found, entry) < FULL_SCORE <= _full(found, tuples):
            return found, tuples
    return found, entry


def _full(found: Scorer, entry: dict[str, Any]) -> float:
    """The score of an entry's own answer; 0 where the scorer fails on it, which judging then reports."""
    verdict = _scored(found, entry["answer"], entry)
    return verdict.score


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value


def _scored(score: Scorer, answer: str, entry: dict[str, Any]) -> Verdict:
    try:
        value = float(score.score(answer, entry))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a scorer may raise anything; it is reported, never a 0
        return verdicts.no_verdict(
            f"{verdicts.FAULT}: the task's scorer raised {type(error).__name__}: {error}", answer
        )
    if not math.isfinite(value):
        return verdicts.no_verdict(f"{verdicts.FAULT}: the task's scorer gave {value}", answer)
    if value >= FULL_SCORE:
        return verdicts.correct(verdicts.EQUAL, answer)
    value = max(value, 0.0)
    return verdicts.wrong(f"{verdicts.PARTIAL}: score {value:g}" if value else verdicts.UNEQUAL, answer, value)


def _unsafe(answer: str) -> str | None:
    """The first part of an answer that is no mathematics, else None: names, quotes and attributes."""
    if found := re.search(r"__|['\"`\[\]{}:;\\@]|\.\s*[A-Za-z_]|\blambda\b", answer):
        return found[0]
    for name in _NAME.findall(answer):
        if len(name) > 2 and name not in _SYMPY_NAMES:
            return str(name)
    return None
