"""reasoning-gym's scorers: the whole score is CORRECT, less is kept, and no answer's text is evaluated."""

import json

import pytest
import reasoning_gym

from services.verifier import reasoning_gym as gym
from services.verifier.verdicts import Kind


def entry(task, **options):
    return reasoning_gym.create_dataset(task, size=1, seed=3, **options)[0]


TASKS = ["chain_sum", "basic_arithmetic", "word_sorting", "n_queens", "rearc", "sentence_reordering", "countdown"]


@pytest.mark.parametrize("task", TASKS)
def test_the_entrys_own_answer_is_correct_however_it_is_given(task):
    made = entry(task)
    answer, text = made["answer"], json.dumps(made)
    assert gym.check(task, text).kind is Kind.CORRECT
    forms = (
        "{}",
        "<think>hm, 3</think>\n{}",
        "\\boxed{{{}}}",
        "Let me see.\nAnswer: {}",
        "Some words.\n<answer>{}</answer>",
    )
    for form in forms:
        verdict = gym.judge(task, text, form.format(answer))
        assert (verdict.kind, verdict.score) == (Kind.CORRECT, 1.0), (form, verdict)


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("7 + 5 = 12", Kind.CORRECT),
        ("The answer is 12.", Kind.CORRECT),
        ("7 plus 5 is **12**", Kind.CORRECT),
        ("12 apples", Kind.CORRECT),
        ("#### 12", Kind.CORRECT),
        ("112", Kind.WRONG),
        ("12, or rather 13", Kind.WRONG),
        ("<think>12", Kind.WRONG),
        ("12</think>", Kind.WRONG),
        ("", Kind.WRONG),
        ("no idea", Kind.WRONG),
    ],
)
def test_arithmetic_takes_the_final_number(completion, kind):
    assert gym.judge("chain_sum", '{"answer": "12", "metadata": {}}', completion).kind is kind


def test_partial_credit_is_wrong_with_its_score():
    made = entry("word_sorting")
    verdict = gym.judge("sentence_reordering", json.dumps(entry("sentence_reordering")), "This too is one of Mr.")
    assert verdict.kind is Kind.WRONG
    assert 0 < verdict.score < 1
    assert gym.judge("word_sorting", json.dumps(made), "nothing like it").score == 0


@pytest.mark.parametrize(
    ("task", "text"),
    [("no_such_task", '{"answer": "1"}'), ("chain_sum", "{"), ("chain_sum", "[]"), ("chain_sum", '{"metadata": {}}')],
)
def test_an_entry_that_cannot_be_scored_gives_no_verdict(task, text):
    assert gym.judge(task, text, "1").word == "gold_unparsable"
    assert gym.check(task, text).kind is Kind.NO_VERDICT


def test_an_entry_whose_own_answer_is_wrong_is_not_usable():
    made = entry("countdown")
    made["answer"] = "1"
    assert gym.check("countdown", json.dumps(made)).kind is Kind.WRONG


@pytest.mark.parametrize(
    "task", ["n_queens", "spiral_matrix", "binary_matrix", "string_insertion", "countdown", "puzzle24"]
)
@pytest.mark.parametrize(
    "payload",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "open({path!r}, 'w')",
        "exec(chr(111)+chr(112))",
        "[open({path!r}, 'w').name]",
        "(lambda: open({path!r}, 'w'))()",
    ],
)
def test_an_answer_that_is_code_is_wrong_and_does_not_run(task, payload, tmp_path):
    made = entry(task)
    target = tmp_path / "ran"
    verdict = gym.judge(task, json.dumps(made), payload.format(path=str(target)))
    assert verdict.kind is Kind.WRONG
    assert verdict.score <= 0.1
    assert not target.exists()


def test_a_scorer_that_raises_is_a_fault_not_a_zero():
    made = entry("countdown")
    del made["metadata"]
    verdict = gym.judge("countdown", json.dumps(made), "1 + 1")
    assert verdict.kind is Kind.NO_VERDICT or verdict.score < 1
    verdict = gym.judge("shortest_path", '{"answer": "up", "metadata": {}}', "down")
    assert (verdict.kind, verdict.word) == (Kind.NO_VERDICT, "fault")
