"""Answers that are a sum, product or quotient still to be worked out.

The grader takes "28 + 47" for 75, so a policy that repeats the question would be paid for it. Text in, text out, like
`normalise`: nothing here evaluates an expression. docs/decisions/0005-unevaluated-answers.md has the reasons.
"""

from __future__ import annotations

import re
from fractions import Fraction

from services.verifier import normalise

_TEXT = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|operatorname|mbox)\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])|\\?[$%]|[€£¥]")
_TIMES = re.compile(r"\\(?:times|cdot|ast|bullet|star)(?![A-Za-z])|[⋅∙•⨯✕∗＊]")
_DIVIDED = re.compile(r"\\div(?![A-Za-z])|[:∶÷]")
_RELATION = re.compile(r"(?:(?<![<>!=\\])=(?!=)|\\(?:approx|equiv)(?![A-Za-z])|≈)(?![^{}]*\})")

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"{_INTEGER}?(?:\.\d*)?"
_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<top>{_INTEGER})/(?P<bottom>-?{_INTEGER})|"
    rf"\\[dtc]?frac(?:\{{(?P<upper>-?{_INTEGER})\}}|(?P<u>\d))(?:\{{(?P<lower>-?{_INTEGER})\}}|(?P<l>\d)))"
)
_MIXED = re.compile(r"[+-]?\d+(?:\s+\d+\s*/\s*\d+|\s*\\[dtc]?frac\s*\{\d+\}\s*\{\d+\})")
_SCIENTIFIC = re.compile(rf"[+-]?{_DECIMAL}\*10\^(?:[+-]?\d+|\{{[+-]?\d+\}}|\([+-]?\d+\))")

_RIGHT = r"[({\[]*[+-]*[({\[]*(?:\d|\.|\\|e(?![A-Za-z])|pi(?![A-Za-z]))"
_LEFT = r"(?:\d|\.|!|e|pi|[)}\]])"
_OPERATION = re.compile(
    "|".join(
        (
            rf"{_LEFT}[*/]{_RIGHT}",
            r"(?:\d|\.|!)[)}\]]*[+-]",  # a number before the sign
            r"(?<![A-Za-z])(?:\\?pi|e)[)}\]]*[+-]",
            r"[A-Za-z)}\]][+-][({\[+-]*(?:\d|\.|\\)",  # or after it
            r"-[({\[+]*-",  # the negative of a negative
            r"\d\(|\)\(|\)\d|\)\{|\d\{",  # a product without its sign
            r"\\[dtc]?frac|\\over(?![A-Za-z])",
            r"(?<![A-Za-z])(?:gcd|lcm|max|min|mod|bmod|pmod|sum|prod|abs|lfloor|lceil)(?![A-Za-z])|\|",
        )
    )
)
_FRACTION_OF_UNITS = re.compile(r"\\[dtc]?frac\{[A-Za-z^\d]*[A-Za-z][A-Za-z^\d]*\}\{[A-Za-z^\d]*[A-Za-z][A-Za-z^\d]*\}")


def is_number(gold: str) -> bool:
    """Whether a gold is a number as people write one: plain, a fraction of integers or a mixed number."""
    return normalise.plain_number(gold) is not None or _fraction(_bare(gold)) is not None or _is_mixed(gold)


def is_unevaluated(text: str) -> bool:
    """Whether an answer that should be a number is an operation on numbers instead.

    What stands after the last equals sign counts. Not counted: "3/4" and "\\frac{3}{4}" (but "150/2", which is an
    integer), "1 1/4", "1.5e3", "1.5 \\times 10^3", powers, roots, factorials and units ("75 km/h").
    """
    last = _RELATION.split(text)[-1].strip()
    if normalise.plain_number(last) is not None or _is_mixed(last):
        return False
    bare = _bare(last)
    fraction = _fraction(bare)
    if fraction is not None:
        value, bottom = fraction
        return value.denominator == 1 and abs(bottom) != 1
    if _SCIENTIFIC.fullmatch(bare):
        return False
    return _OPERATION.search(_FRACTION_OF_UNITS.sub("", bare)) is not None


def _is_mixed(text: str) -> bool:
    return _MIXED.fullmatch(text.strip()) is not None


def _bare(text: str) -> str:
    """Without spaces, units in \\text, signs of money and percent; every operator in one spelling."""
    text = _DROPPED.sub("", _TEXT.sub(r" \1 ", text))
    text = _TIMES.sub("*", text).replace("**", "^")
    text = _DIVIDED.sub(" / 1 / ", text)  # never the bar of a fraction
    text = text.translate(_SIGNS)
    text = re.sub(r"\s+", "", text)
    while len(text) > 2 and text[0] + text[-1] in {"()", "{}"} and not re.search(r"[(){}]", text[1:-1]):
        text = text[1:-1]
    return text


_SIGNS = str.maketrans({"＋": "+", "﹢": "+", "－": "-", "−": "-", "∕": "/", "⁄": "/", "／": "/"})


def _fraction(bare: str) -> tuple[Fraction, int] | None:
    """The value and the denominator of a fraction of two integers, else None."""
    match = _FRACTION.fullmatch(bare)
    if match is None:
        return None
    top, bottom = (
        next(int(match[name].replace(",", "")) for name in names if match[name] is not None)
        for names in (("top", "upper", "u"), ("bottom", "lower", "l"))
    )
    return (Fraction(top, bottom), bottom) if bottom else None
