"""What counts as a right answer. Called in this process: the inputs here keep no grader busy."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.verifier import math, normalise
from services.verifier.extract import TAIL_CHARS, final_answer
from services.verifier.verdicts import Kind

CASES = [json.loads(line) for line in (Path(__file__).parent / "grader_cases.jsonl").read_text().splitlines()]
EXPECTED = {True: Kind.CORRECT, False: Kind.WRONG, None: Kind.NO_VERDICT}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gold'][:30]}|{case['answer'][-30:]}")
def test_cases_that_other_graders_got_wrong_are_right(case):
    assert math.judge(case["gold"], case["answer"]).kind is EXPECTED[case["expected"]]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("12", "12", True),
        ("12", "7 + 5 = 12", True),
        ("12", "The answer is 12.", True),
        ("12", "The answer is 12, not 13.", True),
        ("12", "**12**", True),
        ("12", "12 apples", True),
        ("12", "I got 12 apples", True),
        ("12", "= 12", True),
        ("12", "12.0", True),
        ("12", "x = 12", True),
        ("12", "12/1", True),
        ("12", "Answer: 12 apples", True),
        ("12", "#### 12", True),
        ("12", "-12", False),
        ("12", "the answer is -12", False),
        ("-12", "12", False),
        ("12", "112", False),
        ("12", "1 2", False),
        ("12", "12 13", False),
        ("12", "12,000", False),
        ("12", "12 million", False),
        ("12", "Answer: x", False),
        ("1234", "The total is 1,234 dollars.", True),
        ("1000000", "1 000 000", True),
        ("1/2", ".5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.33", False),
        ("1e-8", "2e-8", False),
        ("50\\%", "50%", True),
        ("\\{3,5\\}", "\\boxed{3}, \\boxed{5}", True),
        ("5", "\\boxed{3}, \\boxed{5}", False),
        ("x^{10}", "x**10", True),
        ("x^{10}", "x^10", True),
        ("x", "\\boxed{|x|}", False),
        ("\\sqrt{x^2}", "\\boxed{x}", False),
        ("5!", "120", True),
        ("\\text{east}", "The answer is East.", True),
        ("east", "\\boxed{\\text{west}}", False),
        ("A", "(A)", True),
        ("A", "B", False),
    ],
)
def test_plain_ways_to_write_an_answer(gold, answer, right):
    assert math.judge(gold, answer).kind is (Kind.CORRECT if right else Kind.WRONG)


def test_the_last_answer_counts():
    assert math.judge("12", "\\boxed{13} no, wait: \\boxed{12}").kind is Kind.CORRECT
    assert math.judge("12", "\\boxed{12} no, wait: \\boxed{13}").kind is Kind.WRONG
    assert math.judge("12", "\\boxed{12}\n#### Step 13: check").kind is Kind.CORRECT
    assert math.judge("12", "\\boxed{13}\n#### 12").kind is Kind.CORRECT


def test_unfinished_thinking_scores_nothing():
    verdict = math.judge("12", "<think>so it is \\boxed{12}")
    assert (verdict.kind, verdict.word, verdict.score) == (Kind.WRONG, "no_answer", 0.0)
    assert math.judge("12", "<think>a</think> \\boxed{12} <think> or \\boxed{12}").word == "no_answer"


def test_text_before_the_end_of_thinking_is_ignored():
    assert math.judge("12", "<think>\\boxed{12}</think> \\boxed{13}").kind is Kind.WRONG
    assert math.judge("12", "<think>\\boxed{13}</think> \\boxed{12}").kind is Kind.CORRECT
    assert math.judge("12", "\\boxed{12}</think> no idea at all, sorry").word == "no_answer"


@pytest.mark.parametrize(
    "gold", ["", "   ", "$$", "\\frac{1}{", "???", "foo bar", "Answer is forty three.", "\\boxed{}"]
)
@pytest.mark.parametrize("answer", ["\\boxed{1}", "", "\\boxed{\\frac{1}{}", "same"])
def test_a_gold_that_does_not_parse_gives_no_verdict_to_anyone(gold, answer):
    for completion in (answer, gold):
        verdict = math.judge(gold, completion)
        assert (verdict.kind, verdict.word) == (Kind.NO_VERDICT, "gold_unparsable")
    assert math.check(gold).kind is not Kind.CORRECT


@pytest.mark.parametrize("gold", ["12", "\\frac{1}{2}", "n=3k", "(0,1]", "\\text{no solution}", "12:00", "x^2+y^2=1"])
def test_a_usable_gold_equals_itself(gold):
    assert math.check(gold).kind is Kind.CORRECT


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9",
        "\\boxed{9^{9^{9}}}",
        "9" * 100_000,
        "\\boxed{" + "7" * 1_500 + "}",
        "\\boxed{" + "{" * 5_000 + "}" * 5_000 + "}",
        "\\boxed{99999!}",
        "\\boxed{2^{99999999}}",
        "\\boxed{" + "+".join("1" * 1_000) + "}",
    ],
)
def test_an_answer_of_unreasonable_size_is_wrong_at_once(answer):
    began = time.monotonic()
    verdict = math.judge("12", answer)
    assert (verdict.kind, verdict.word) == (Kind.WRONG, "answer_too_large")
    assert time.monotonic() - began < 2


def test_a_megabyte_of_text_is_read_from_its_end_and_quickly():
    began = time.monotonic()
    assert math.judge("12", "so 3 = 3, $x$ and \\boxed{ then\n" * 40_000 + "\\boxed{12}").kind is Kind.CORRECT
    assert math.judge("12", "\\boxed{12}" + " and so on" * TAIL_CHARS).kind is Kind.WRONG
    assert time.monotonic() - began < 5


pieces = st.sampled_from([*"\\{}$#*()[]=.,- 12ax\n", "\\boxed{", "the answer is ", "Answer: ", "</think>", "<think>"])


@given(st.lists(pieces).map("".join))
def test_looking_for_the_answer_never_fails(text):
    found = final_answer(text)
    assert found is None or (found == found.strip() and found)


numbers = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-(10**9), 10**9).map(lambda n: f"{n:,}"),
    st.decimals(-(10**6), 10**6, places=3).map(str),
    st.tuples(st.integers(-9999, 9999), st.integers(0, 4)).map(lambda t: f"{t[0]}.{'0' * t[1]}"),
)


@settings(deadline=None, max_examples=150)
@given(numbers, numbers)
@example("12", "112")
@example("0", "-0")
@example("0.001", "0.0010000001")
def test_plain_numbers_are_judged_alike_both_ways_and_by_their_value(first, second):
    there, back = math.judge(first, second), math.judge(second, first)
    assert there.kind is back.kind
    assert math.judge(first, first).kind is Kind.CORRECT
    one, two = normalise.plain_number(first), normalise.plain_number(second)
    if one == two:
        assert there.kind is Kind.CORRECT
    elif abs(one - two) > 1e-5 * max(abs(one), abs(two)):
        assert there.kind is Kind.WRONG


def test_the_grader_is_not_imported_with_the_module():
    code = "import sys, services.verifier.pool, services.cli.verify; print([m for m in ('sympy',) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
