"""Plain-text mathematics to LaTeX, plain numbers to exact fractions, and the limits on an answer's size.

Text in, text out: nothing here evaluates an expression.
"""

from __future__ import annotations

import re
from fractions import Fraction

from services.verifier.extract import FUNCTIONS, boxes, trim

MAX_ANSWER_CHARS = 4_000
MAX_DEPTH = 40
MAX_DIGITS = 1_000
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 2_000
MAX_OPERANDS = 400

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})")
_MIXED = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)")
_SPACED_DIGITS = re.compile(r"\d\s+[\d.]*\d")
_CLOCK = re.compile(r"(?P<h>\d{1,2}):(?P<m>\d{2})(?::(?P<s>\d{2}))?\s*(?P<half>[ap]\.?m\.?)?", re.I)
_UNIT_TAIL = re.compile(r"(?P<n>[+-]?\$?[\d.,]*\d)\s*(?:\\?[,;!~ ]*)?(?P<words>[A-Za-z]{2,}(?:[ -][A-Za-z]+){0,4})\.?")
_SCALE_WORDS = frozenset(
    {"hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "pct", "percentage", "half",
     "halves", "thirds", "quarters", "pi", "mod", "or", "and", "to", "times", "squared"}
)  # fmt: skip
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_HUGE_POWER = re.compile(rf"(?:\^|\*\*)\s*[{{(]?\s*[+-]?\s*(\d{{{len(str(MAX_EXPONENT))},}})")
_TOWER = re.compile(r"\d\s*[)}]*\s*(?:\^|\*\*)\s*[{(]*\s*[+-]?\s*\d+\s*[)}]*\s*(?:\^|\*\*)\s*[{(]*\s*\d")
_FACTORIAL = re.compile(r"(\d+)\s*[)}]*\s*!")
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(" + "|".join(sorted(FUNCTIONS | {"pi", "ln"}, key=len, reverse=True)) + r")(?![A-Za-z])"
)
_LATEX_NAME = {
    "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
    "inf": r"\infty", "infinity": r"\infty", "abs": "abs", "cbrt": "cbrt", "mod": r"\bmod",
}  # fmt: skip


def clean(text: str) -> str:
    """Unicode signs to their ASCII or LaTeX forms, spacing commands and delimiters dropped."""
    text = text.translate(_UNICODE)
    if (found := boxes(text)) and text.strip().startswith(("\\boxed", "\\fbox")) and found[0][1] == len(text.strip()):
        text = found[0][2]
    text = re.sub(
        r"\\[,;:!>]|~|\\ (?=\S)|\\q?quad(?![A-Za-z])|\\displaystyle", lambda m: "" if m[0] == "\\!" else " ", text
    )
    text = re.sub(r"\\(?:mathrm|mathit|rm)\s*\{([A-Za-z])\}", r"{\1}", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3})", ",", text)
    return trim(text)


_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
     "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "²": "^2", "³": "^3",
     "½": r"\frac{1}{2}", "\u00a0": " ", "\u202f": " "}
)  # fmt: skip


def plain_number(text: str) -> Fraction | None:
    """The exact value of a plain number ("-1,234.50", "2.5e-3", "$12"), else None. Symmetric by construction."""
    text = text.strip().replace("\\$", "").lstrip("$€£¥").strip().replace("−", "-")
    if len(text) > MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text) and re.search(r"\d", text):
        return Fraction(text.replace(",", "").rstrip("."))
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])
    return None


def without_unit(text: str) -> str:
    """ "12 apples" -> "12". A word that changes the value ("12 million", "12 percent") stays."""
    bare = _TEXT_COMMAND.sub(r" \1", text).strip()
    match = _UNIT_TAIL.fullmatch(bare)
    if match and not _SCALE_WORDS & set(match["words"].lower().replace("-", " ").split()):
        return match["n"]
    return text


def clock(text: str) -> str | None:
    """A time of day in one spelling ("12:00"), else None; "12:00" is no division by zero."""
    match = _CLOCK.fullmatch(_TEXT_COMMAND.sub(r" \1", text).strip())
    if not match:
        return None
    half = (match["half"] or "").replace(".", "").lower()
    return f"{int(match['h'])}:{match['m']}:{match['s'] or '00'}{half}"


def chain(text: str) -> str | None:
    """A chain of three ratios or more ("1:2:3:\\ldots") without spaces, else None."""
    bare = re.sub(r"\s", "", text)
    return bare if re.fullmatch(r"[\w.]+(?::(?:[\w.]+|\\[lc]?dots)){2,}", bare) else None


def plain_words(text: str) -> str | None:
    """The words of an answer that is a word and not mathematics, lower-case, else None.

    Inside \\text{…} any words; outside it one word of three letters or more ("xy" is a product), or "(A)".
    """
    bare = text.strip()
    inner = _TEXT_COMMAND.fullmatch(bare)
    if inner:
        bare = inner[1].strip()
        pattern = r"\(?[A-Za-z][A-Za-z' -]*\)?"
    else:
        pattern = r"\(?(?:[A-Za-z][A-Za-z'-]{2,}|[A-Z]|[Nn]o)\)?"
    bare = bare.rstrip(".")
    if not re.fullmatch(pattern, bare) or bare.lower() in FUNCTIONS or bare in {"pi"}:
        return None
    return bare.strip("()").strip().lower()


def is_prose(text: str) -> bool:
    """Whether a text is words where an expression is wanted: three plain words, or two and no digit."""
    bare = _TEXT_COMMAND.sub(" ", text)
    words = [w for w in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{])", bare) if w.lower() not in FUNCTIONS]
    words = [w for w in words if w.lower() not in {"and", "or", "pi", "ln"} and len(w) > 2]
    return len(words) >= 3 or (len(words) >= 2 and not re.search(r"\d", bare))


def too_large(text: str) -> str | None:  # noqa: PLR0911 - one return a limit
    """Why an expression is beyond reason, else None. Such a text would only keep the grader busy."""
    if len(text) > MAX_ANSWER_CHARS:
        return f"{len(text)} characters, more than {MAX_ANSWER_CHARS}"
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"nested {deepest} deep, more than {MAX_DEPTH}"
    if re.search(rf"\d{{{MAX_DIGITS},}}", text):
        return f"a number of more than {MAX_DIGITS} digits"
    if _TOWER.search(text):
        return "a tower of powers"
    if (power := _HUGE_POWER.search(text)) and int(power[1][:9]) > MAX_EXPONENT:
        return f"an exponent over {MAX_EXPONENT}"
    if any(len(m[1]) > 5 or int(m[1]) > MAX_FACTORIAL for m in _FACTORIAL.finditer(text)):
        return f"a factorial over {MAX_FACTORIAL}"
    if len(re.findall(r"[-+*/^!]|\\(?:cdot|times|frac|sqrt|d?frac)", text)) > MAX_OPERANDS:
        return f"more than {MAX_OPERANDS} operations"
    return None


def to_latex(text: str) -> str | None:
    """An answer or gold as LaTeX the grader reads, or None where the writing is ambiguous ("1 2", "4 10/3").

    Plain-text forms are rewritten: pi/2, 2*x, sqrt(2), x**10, 1 1/4, "1331 and 1728".
    """
    match = _MIXED.fullmatch(text)
    if match:
        whole, top, bottom = (int(match[g]) for g in ("whole", "top", "bottom"))
        if top >= bottom:
            return None
        return f"{match['sign'] if match['sign'] == '-' else ''}\\frac{{{whole * bottom + top}}}{{{bottom}}}"
    text = (
        re.sub(r"(?<=\d)[ ]+(?=\d{3}(?:[ ]\d{3})*$)", "", text)
        if re.fullmatch(r"[+-]?[1-9]\d{0,2}(?: \d{3})+", text)
        else text
    )
    text = re.sub(r"(?<=\d),\s(?=\d{3}$)", "", text) if re.fullmatch(r"[1-9]\d{0,2},\s\d{3}", text) else text
    if _SPACED_DIGITS.search(text):
        return None
    if match := _SCIENTIFIC.fullmatch(text):
        return f"{match[1]} \\cdot 10^{{{match[2]}}}"
    text = re.sub(r"\s+(?:and|or)\s+", ", ", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"\+\s*-", "-", re.sub(r"-\s*-", "+", text))
    text = re.sub(r"(?<!\\)sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", text)
    text = _NAMES.sub(lambda m: _LATEX_NAME.get(m[1], "\\" + m[1]) + " ", text)
    text = re.sub(r"(?<!\\)\*", r" \\cdot ", text)
    return text
