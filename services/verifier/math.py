"""Verdicts on mathematics: the final answer against the gold, by math-verify.

Runs inside a worker process that its pool kills at a wall-clock limit, so the library's own signal time-outs
are off (they work in a main thread only and fail silently elsewhere). No text is evaluated by Python here.

A gold that cannot be read is NO_VERDICT; an answer that cannot be read is WRONG; an answer whose size is
beyond reason is WRONG before the grader sees it, unless it is the gold to the letter. Where the gold is a number,
an answer that leaves its arithmetic undone ("28 + 47") is WRONG, whatever it comes to.
"""

from __future__ import annotations

import logging
import random
from fractions import Fraction
from typing import Any

from services.verifier import arithmetic, normalise, verdicts
from services.verifier.extract import final_answer, trim
from services.verifier.verdicts import Verdict

RELATIVE_TOLERANCE = 1.5e-6
"""math-verify rounds to six decimals, which makes any two tiny numbers equal; values must also agree to this
share of the larger one. It lets 0.333333 pass for 1/3."""

_SAMPLES = 24
_GOLD_MARK = "####"  # GSM8K writes its solution, then "#### answer"

logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(gold: str, completion: str) -> Verdict:
    """The verdict on a completion against a gold answer. May hang or run out of memory on hostile text."""
    reference = _reference(gold)
    if isinstance(reference, Verdict):
        return reference
    answer = final_answer(completion)
    if answer is None:
        return verdicts.wrong(f"{verdicts.NO_ANSWER}: no final answer was found in the completion")
    return _compare(reference, normalise.clean(answer))


def check(gold: str) -> Verdict:
    """CORRECT where the gold can be read and equals itself; otherwise NO_VERDICT or WRONG, with the reason."""
    reference = _reference(gold)
    return reference if isinstance(reference, Verdict) else _compare(reference, reference)


def _reference(gold: str) -> str | Verdict:
    """The gold's text without delimiters, or the verdict that it cannot be judged against."""
    text = gold.rpartition(_GOLD_MARK)[2]
    text = normalise.clean(trim(text))
    if not text:
        return verdicts.no_verdict(f"{verdicts.GOLD_UNPARSABLE}: the gold is empty")
    if _simple(text) is not None or normalise.too_large(text):
        return text  # judged by exact text where it is too large to be computed
    if normalise.is_prose(text) or _parse(text) is None:
        return verdicts.no_verdict(
            f"{verdicts.GOLD_UNPARSABLE}: the gold {verdicts.shown(text)!r} cannot be read as mathematics"
        )
    return text


def _simple(text: str) -> Fraction | str | None:
    """What needs no grader: a plain number, a time of day or a word; equal exactly when these are equal."""
    number = normalise.plain_number(text)
    return (
        number if number is not None else normalise.clock(text) or normalise.chain(text) or normalise.plain_words(text)
    )


def _compare(gold: str, answer: str) -> Verdict:  # noqa: PLR0911 - one return a verdict reads best
    if gold == answer:
        return verdicts.correct(f"{verdicts.EQUAL}: the same text", answer)
    if (why := normalise.too_large(answer)) is not None:
        return verdicts.wrong(f"{verdicts.ANSWER_TOO_LARGE}: {why}", answer)
    if (why := normalise.too_large(gold)) is not None:
        return verdicts.no_verdict(
            f"{verdicts.GOLD_UNPARSABLE}: the gold has {why} and the answer is another text", answer
        )
    wanted = _simple(gold)
    given = _simple(answer)
    if given is None and normalise.plain_number(gold) is not None:
        given = _simple(normalise.without_unit(answer))
    if wanted is not None and type(wanted) is type(given) and wanted == given:
        return verdicts.correct(verdicts.EQUAL, answer)
    integers = all(isinstance(v, Fraction) and v.denominator == 1 for v in (wanted, given))
    if isinstance(wanted, str) or integers:
        return verdicts.wrong(verdicts.UNEQUAL, answer)
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None:
        return verdicts.no_verdict(f"{verdicts.GOLD_UNPARSABLE}: the gold cannot be read", answer)
    if parsed_answer is None:
        return verdicts.wrong(f"{verdicts.ANSWER_UNPARSABLE}: the answer cannot be read as mathematics", answer)
    if not _equal(parsed_gold, parsed_answer):
        return verdicts.wrong(verdicts.UNEQUAL, answer)
    if arithmetic.is_number(gold) and arithmetic.is_unevaluated(answer) and _comes_out(gold, parsed_answer):
        return verdicts.wrong(f"{verdicts.UNEVALUATED}: the answer must be worked out to one number", answer)
    return verdicts.correct(verdicts.EQUAL, answer)


def _comes_out(gold: str, answer: Any) -> bool:
    """Whether an operation comes out as one number; 2*sqrt(3) and pi/4 do not, nor can they equal an integer."""
    from sympy import Expr, Number

    number = normalise.plain_number(gold)
    if number is not None and number.denominator == 1:
        return True
    return not isinstance(answer, Expr) or isinstance(answer.doit(), Number)


def _parse(text: str) -> Any | None:
    """The text as the grader's expression; None where it cannot be read or is no finite value."""
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, MatrixBase, nan, zoo

    latex = normalise.to_latex(text)
    if latex is None:
        return None
    found = parse(
        f"\\boxed{{{latex}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found or not isinstance(found[0], (Basic, MatrixBase)):
        return None
    expression = found[0]
    if not isinstance(expression, Basic):
        return expression
    return None if expression.has(nan, zoo) else _one_field(expression)


def _one_field(expression: Any) -> Any:
    """The expression with one kind of symbol: the reader calls them real or not by how a text is spelt, and a
    lone `i` is the imaginary unit."""
    from sympy import Expr, I, Symbol

    if isinstance(expression, Expr) and {s.name for s in expression.free_symbols} == {"i"}:
        return expression.xreplace(dict.fromkeys(expression.free_symbols, I))
    odd = {s: Symbol(s.name, real=True) for s in expression.atoms(Symbol) if s.is_real is False}
    return expression.xreplace(odd) if odd else expression


def _equal(gold: Any, answer: Any) -> bool:
    from math_verify import verify
    from sympy import Expr

    same = bool(verify(gold, answer, timeout_seconds=None))
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return same
    if same and not gold.free_symbols and not answer.free_symbols:
        return _close(gold, answer)
    if not same and gold.free_symbols and gold.free_symbols == answer.free_symbols:
        return _equal_where_real(gold, answer)
    return same


def _close(gold: Any, answer: Any) -> bool:
    """Whether two values agree to RELATIVE_TOLERANCE of the larger."""
    first, second = gold.doit().evalf(30), answer.doit().evalf(30)
    if not (first.is_number and second.is_number):
        return True  # no number to compare: the grader's word stands
    return bool(abs(first - second) <= RELATIVE_TOLERANCE * max(abs(first), abs(second)))


def _equal_where_real(gold: Any, answer: Any) -> bool:
    """Whether two expressions are one function wherever both are real, as sqrt(1/n) and 1/sqrt(n) are.

    Asks for a proof with positive symbols and for agreement at every sampled real point, negative ones too,
    so that |x| does not pass for x.
    """
    from sympy import Rational, Symbol, simplify

    symbols = sorted(gold.free_symbols, key=str)
    rng = random.Random(0)
    agreed = 0
    for _ in range(_SAMPLES):
        point = {s: Rational(rng.randint(-40, 40) or 1, rng.randint(1, 12)) for s in symbols}
        first, second = (e.subs(point).doit().evalf(20) for e in (gold, answer))
        if not (first.is_real and second.is_real and first.is_finite and second.is_finite):
            continue
        if abs(first - second) > 1e-9 * max(1, abs(first), abs(second)):
            return False
        agreed += 1
    if agreed < _SAMPLES // 8:
        return False
    positive = {s: Symbol(f"p{i}", positive=True) for i, s in enumerate(symbols)}
    return bool(simplify(gold.subs(positive).doit() - answer.subs(positive).doit()) == 0)
