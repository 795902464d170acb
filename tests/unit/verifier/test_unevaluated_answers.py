"""A number is wanted: an operation on numbers is no answer, whatever it comes to."""

import time

import pytest

from services.verifier import arithmetic, math
from services.verifier.verdicts import Kind


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("75", "28 + 47"),
        ("75", "The answer is 28 + 47."),
        ("75", "Answer: 28 + 47"),
        ("75", "#### 28 + 47"),
        ("75", "**28 + 47**"),
        ("75", "$28+47$"),
        ("75", r"\boxed{28 + 47}"),
        ("75", r"\boxed{\left(28+47\right)}"),
        ("75", r"\boxed{28+47\text{ apples}}"),
        ("75", r"\boxed{\$28 + \$47}"),
        ("75", r"\boxed{x = 28+47}"),
        ("75", r"\boxed{28+47 = 28+47}"),
        ("75", r"\boxed{\{28+47\}}"),
        ("75", "100 - 25"),
        ("75", r"\boxed{-25 + 100}"),
        ("75", r"\boxed{-(-75)}"),
        ("75", "5 × 15"),
        ("75", r"\boxed{5 \cdot 15}"),
        ("75", r"\boxed{5 * 15}"),
        ("75", r"\boxed{150/2}"),
        ("75", r"\boxed{\frac{150}{2}}"),
        ("75", r"\boxed{\frac{100+50}{2}}"),
        ("75", "150 ÷ 2"),
        ("75", "150:2"),
        ("75", r"\boxed{150 \over 2}"),
        ("75", r"\boxed{2\cdot 75/2}"),
        ("75", r"\boxed{75.0 + 0}"),
        ("75", r"\boxed{28^1+47}"),
        ("75", r"\boxed{28+47+0\pi}"),
        ("75", r"\boxed{\sqrt{(28+47)^2}}"),
        ("75", r"\boxed{75!/74!}"),
        ("75", r"\boxed{\gcd(150,225)}"),
        ("75", r"\boxed{|-75|}"),
        ("75", r"\boxed{\sum_{i=1}^{1} 75}"),
        ("-3", "5 - 8"),
        ("-3", "5 + -8"),
        ("8", "4-(-4)"),
        ("2.5", "1.2+1.3"),
        ("0.75", "1.5/2"),
        ("0.75", "1/2+1/4"),
        ("3/4", "1/2+1/4"),
        (r"\frac{3}{4}", r"\boxed{\frac{1}{2}+\frac{1}{4}}"),
    ],
)
def test_arithmetic_left_undone_is_wrong_and_says_so(gold, answer):
    verdict = math.judge(gold, answer)
    assert (verdict.kind, verdict.word, verdict.score) == (Kind.WRONG, "unevaluated", 0.0)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("75", "28 + 47 = 75"),
        ("75", r"\boxed{28+47=75}"),
        ("75", "+75"),
        ("-75", "- 75"),
        ("75", "(75)"),
        ("75", "75/1"),
        ("75", r"\boxed{75\text{ km/h}}"),
        ("75", r"\boxed{75\text{ N-m}}"),
        ("75", r"\boxed{75 \text{ cm}^2}"),
        ("75", "7.5e1"),
        ("75", "7.5 × 10^1"),
        ("1500", r"1.5\times10^{3}"),
        ("0.001", "10^{-3}"),
        ("0.125", "2^-3"),
        ("1024", "2^{10}"),
        ("75", r"\sqrt{5625}"),
        ("120", "5!"),
        ("0.75", "3/4"),
        ("0.75", "3 / 4"),
        ("0.75", r"\frac{3}{4}"),
        ("0.75", r"\frac34"),
        ("-0.75", r"-\frac{3}{4}"),
        ("1.25", "1 1/4"),
        ("1.25", r"\boxed{1\frac{1}{4}}"),
        ("0.5", r"50\%"),
        ("3.4641016", r"2\sqrt{3}"),
        ("3.4641016", r"\boxed{2*\sqrt{3}}"),
        ("2.7320508", r"\boxed{1+\sqrt{3}}"),
        ("0.785398", "pi/4"),
        ("0.785398", r"\boxed{\frac{\pi}{4}}"),
    ],
)
def test_a_number_in_any_form_people_accept_as_final_is_right(gold, answer):
    assert math.judge(gold, answer).kind is Kind.CORRECT


@pytest.mark.parametrize(("gold", "answer"), [("x+1", "1+x"), (r"2\pi", r"\pi+\pi"), ("28+47", "75"), ("5!", "60*2")])
def test_a_gold_that_is_no_number_may_be_answered_by_an_expression(gold, answer):
    assert math.judge(gold, answer).kind is Kind.CORRECT


def test_undone_arithmetic_that_comes_to_another_number_is_unequal():
    assert math.judge("75", "28 + 46").word == "unequal"


def test_looking_for_arithmetic_stays_fast_on_hostile_text():
    began = time.monotonic()
    for piece in ("(", "-", "/(", "1*(", "\\frac{", ")-", "5)", "{a^2"):
        arithmetic.is_unevaluated(piece * (4_000 // len(piece)))
    assert time.monotonic() - began < 2
