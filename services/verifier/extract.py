"""Where the final answer stands in a completion. Text in, text out; nothing is parsed or evaluated.

The rules, in this order:

1. Only text after the last `</think>` counts; a completion that opens `<think>` and never closes it has no answer.
2. Strong markers: the last of `\\boxed{…}`, a line `#### …` and a line that begins `Answer:` or `Final answer:`.
3. Weak marker: the last `answer is …`.
4. The last formula in `$…$`, `\\(…\\)` or `\\[…\\]`, bold text or number, in the last lines.
"""

from __future__ import annotations

import re

TAIL_CHARS = 20_000
"""Only this much of a completion's end is looked at: no honest answer stands 20,000 characters before the end,
and the patterns stay fast on a megabyte of text."""

_BOX_HEAD = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.S)
_BOX_JOIN = re.compile(r"[\s$,;.]*(?:\\?(?:text\{)?\s*(?:and|or)\s*\}?)?[\s$,;]*")
_HASHES = re.compile(r"^[ \t]*####[ \t]+(?P<a>[^\n]+)$", re.M)
_LINE = re.compile(
    r"^[\s>*_#-]{0,8}(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t*_]{0,4}:[ \t*_]{0,4}(?P<a>[^\n]+)$", re.M | re.I
)
_ANSWER_IS = re.compile(r"\banswer(?:[^\n.:=]{0,60}?)[ \t](?:is|equals)(?:[ \t]*:)?[ \t]+(?P<a>[^\n]+)", re.I)
# Bounded, because an opening without its end would make the search quadratic.
_MATH_SPAN = re.compile(
    r"\$\$([^$]{1,1000})\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)|(?<!\\)\$([^$\n]{1,1000})\$", re.S
)
_BOLD = re.compile(r"\*\*(?P<a>[^*\n]+)\*\*")
_NUMBER = re.compile(
    r"(?<![\w.,\\^{/])[-+−]?[$€£¥]?[-+−]?(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d{1,3}\b)?"
    r"(?:/\d+(?:\.\d+)?)?[ \t]?(?:\\?%)?"
)
_SENTENCE_END = re.compile(r"(?<=[\w)\]}$%*])[.!?](?:\s|$)|\n")
_CLAUSE = re.compile(r",?\s+(?:not|which|because|since|so|as|where|when|if|but)\b|,\s+(?=[a-z]{2})")
_SCALE = re.compile(r"\s*(?:hundred|thousand|million|billion|trillion|dozen)\b", re.I)
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "asin",
     "acos", "atan", "log", "exp", "sqrt", "cbrt", "abs", "max", "min", "gcd", "lcm", "mod", "inf", "infty",
     "infinity", "alpha", "beta", "gamma", "delta", "theta", "lambda", "sigma", "omega", "phi", "rho"}
)  # fmt: skip
"""Names that are mathematics when written without a backslash."""

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


def after_thinking(completion: str) -> str | None:
    """The text that counts, or None where the thinking never ended.

    A completion may also begin inside the thinking (the prompt's template opened it): then only a closing
    tag is there, and text before it is ignored all the same.
    """
    head, closed, tail = completion.rpartition("</think>")
    if "<think>" in tail:
        return None
    return tail if closed else head + tail


def final_answer(completion: str) -> str | None:
    """The final answer as it was written, or None where there is none. Never raises on any text."""
    text = after_thinking(completion)
    if text is None:
        return None
    text = text[-TAIL_CHARS:].strip()
    if not text:
        return None
    for finder in (_strong, _weak, _plain):
        found = finder(text)
        if found is not None and (found := trim(found)):
            return found
    return None


def trim(answer: str) -> str:
    """Without markdown, code and maths delimiters around it and the full stop after it."""
    before = None
    text = answer.strip()
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for left, right in (
            ("**", "**"),
            ("__", "__"),
            ("`", "`"),
            ("$$", "$$"),
            ("$", "$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
        ):
            if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : len(text) - len(right)]
                break
    return text


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Every complete outermost `\\boxed{…}`: start, end and content. One without its closing brace is no box."""
    heads = {match.end(): match.start() for match in _BOX_HEAD.finditer(text)}
    if not heads:
        return []
    found: list[tuple[int, int, str]] = []
    open_braces: list[int] = []  # index after each brace that is still open
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif brace[0] == "}" and open_braces:
            start = open_braces.pop()
            if start in heads:
                while found and found[-1][0] > heads[start]:
                    found.pop()  # it stood inside this one
                found.append((heads[start], brace.end(), text[start : brace.start()]))
    return found


def _strong(text: str) -> str | None:
    best: tuple[int, str] | None = None
    boxed = boxes(text)
    if boxed:
        start, _, content = boxed[-1]
        run = [content.strip()]
        # "\boxed{1} and \boxed{2}" is one answer with two parts; the same box twice is one part.
        for earlier in reversed(boxed[:-1]):
            gap = text[earlier[1] : start]
            if "\n" in gap or not _BOX_JOIN.fullmatch(gap) or not re.search(r"and|or|,|;", gap):
                break
            start = earlier[0]
            if earlier[2].strip() not in run:
                run.insert(0, earlier[2].strip())
        best = (boxed[-1][0], ", ".join(run))
    for pattern in (_HASHES, _LINE):
        for match in pattern.finditer(text):
            payload = match["a"].strip()
            if best is not None and match.start() < best[0]:
                continue
            # A heading such as "#### Step 2" or "Answer: see below" is no answer, least of all after a box.
            if boxes(payload) or ((pattern is _HASHES or best is not None) and not _mathlike(payload)):
                continue
            best = (match.start(), _head(payload))
    return best[1] if best else None


def _weak(text: str) -> str | None:
    matches = list(_ANSWER_IS.finditer(text))
    for match in reversed(matches):
        payload = _CLAUSE.split(_head(match["a"]), maxsplit=1)[0]
        if re.search(r"\d|\\|\$", payload) or len(payload.split()) <= 2:
            return payload if not _prose(trim(payload)) else _last_piece(payload)
    return None


def _head(payload: str) -> str:
    """The first sentence, and of it bold text or the formula where that is how it begins."""
    stop = _SENTENCE_END.search(payload)
    head = (payload[: stop.start()] if stop else payload).strip()
    for pattern in (_BOLD, _MATH_SPAN):
        match = pattern.match(head)
        if match:
            inner = next(g for g in match.groups() if g)
            return inner.strip()
    return head.replace("**", "")


def _plain(text: str) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) == 1:
        line = trim(lines[0]).lstrip("= ")
        words = [word for word in _words(line) if word != "and"]
        if line.endswith(")") and "(" not in line:
            line = line[:-1]
        if not words and re.search(r"[\dA-Za-z\\]", line):
            parts = _EQUALS.split(line)
            # "7 + 5 = 12" is a sum and its result; "x = 12" is an assignment, which the grader reads itself.
            return parts[-1] if len(parts) > 1 and re.search(r"\d", parts[0]) and not _letters(line) else line
        if words and len(line.split()) <= 3 and not re.search(r"\d", line):
            return line
    for line in reversed(lines):
        piece = _last_piece(line)
        if piece is not None:
            return piece
    return None


def _last_piece(line: str) -> str | None:
    """The last formula or number of a line."""
    last: tuple[int, str] | None = None
    taken: list[tuple[int, int]] = []
    for match in _MATH_SPAN.finditer(line):
        inner = next(g for g in match.groups() if g)
        taken.append(match.span())
        last = (match.start(), inner)
    for match in _NUMBER.finditer(line):
        inside = any(start <= match.start() < end for start, end in taken)
        if match.group().strip() and not inside and (last is None or match.start() > last[0]):
            scale = _SCALE.match(line, match.end())
            last = (match.start(), match.group().strip() + (scale[0] if scale else ""))
    if last is None:
        return None
    parts = _EQUALS.split(last[1])
    return parts[-1] if len(parts) > 1 and any(c.isdigit() for c in parts[0]) else last[1]


def _words(text: str) -> list[str]:
    """Plain words, without commands of LaTeX and names of functions."""
    return [word for word in _WORD.findall(text) if word.lower() not in FUNCTIONS]


def _letters(text: str) -> bool:
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]", text) is not None


def _prose(text: str) -> bool:
    """Whether a text is a sentence and not an answer: three or more plain words."""
    return len(_words(text)) > 2


def _mathlike(text: str) -> bool:
    return bool(re.search(r"\d|\\|\$", text)) and not _prose(text) and not re.match(r"(?i)\s*step\b", text)
