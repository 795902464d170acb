"""Rows, prompts and their order: what is refused and how, and what is sent (faults T1, T2, K1, K2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollwise.v1 import common_pb2
from transformers import AutoTokenizer

from services.common.errors import InvalidArgument, Unavailable
from trainer.config import DataSource, Example, GymTask, HubData, PromptFormat
from trainer.data import DataSet, load_data
from trainer.policies import resolve_policy
from trainer.policies.presets import demo_job, sums
from trainer.prompts import PromptBuilder, PromptSampler
from trainer.rows import DataError


def write(folder: Path, *rows: Any) -> DataSource:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return DataSource(path=str(folder / "data.jsonl"))


def problems(folder: Path, *rows: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        load_data(write(folder, *rows))
    return [str(problem) for problem in caught.value.problems]


# --------------------------------------------------------------------------------------------- rows


def test_all_domains_become_references(tmp_path: Path) -> None:
    data = load_data(
        write(
            tmp_path,
            {"id": "m", "prompt": "1+1?", "answer": 2},
            {"messages": [{"role": "user", "content": "hi"}], "domain": "math", "answer": "3"},
            {"prompt": "code", "tests": [{"stdin": "1", "expected_stdout": "2"}, {"assertion": "assert f() == 1"}]},
            {"prompt": "call", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
            {"prompt": "follow", "constraints": [{"id": "length:words", "kwargs": {"n": 3}}]},
        )
    )
    assert [entry.id for entry in data.entries] == ["m", "2", "3", "4", "5"]
    references = [entry.row.reference() for entry in data.entries]
    assert references[0].math.answer == "2"
    assert references[2].code.language == "python"
    assert references[2].code.tests[0].expected_stdout == "2"
    assert json.loads(references[3].tool_call.accepted_json[0]) == [{"name": "f", "arguments": {"x": 1}}]
    assert json.loads(references[4].instruction.constraints_json) == [{"id": "length:words", "kwargs": {"n": 3}}]


def test_every_bad_row_is_named_with_its_number(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        {"prompt": "fine", "answer": "1"},
        {"prompt": "x", "anwser": "1"},
        "{not json",
        {"prompt": "x", "messages": [{"role": "user", "content": "y"}], "answer": "1"},
        {"prompt": "x", "answer": "1", "tests": [{"assertion": "1"}]},
        {"prompt": "x", "domain": "code", "answer": "1"},
        "[1]",
        {"prompt": "  ", "answer": "1"},
        {"prompt": "x", "tests": [{"stdin": "1"}]},
    )
    text = "\n".join(found)
    for expected in (
        "row 2, anwser: unknown key",
        "row 3: not JSON",
        "row 4: give exactly one of prompt and messages",
        "row 5: give exactly one of answer, tests",
        "row 6: domain code needs tests",
        "row 7: a row must be an object",
        "row 8: prompt is blank",
        "row 9, tests.0: give either expected_stdout",
    ):
        assert expected in text
    assert "row 1" not in text


def test_a_long_list_of_problems_is_shown_in_part_and_kept_in_full(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"50 problems[\s\S]*row 20[\s\S]*and 30 more") as caught:
        load_data(write(tmp_path, *[{"prompt": "x"}] * 50))
    assert len(caught.value.problems) == 50


def test_duplicate_ids_are_refused_with_both_rows(tmp_path: Path) -> None:
    row = {"prompt": "x", "answer": "1"}
    assert problems(tmp_path, {**row, "id": "a"}, row, {**row, "id": "a"}) == [
        "row 3, id: id 'a' is also the id of row 1; ids must differ"
    ]
    # An id may not collide with the number that stands in for a missing one either.
    assert "row 2" in problems(tmp_path, {**row, "id": "2"}, row)[0]


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is empty"):
        load_data(write(tmp_path))
    with pytest.raises(InvalidArgument, match="there is no data file"):
        load_data(DataSource(path="nowhere.jsonl"), folder=tmp_path)


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "a", "answer": "1"}, "{broken")
    assert len(load_data(source.model_copy(update={"limit": 1}))) == 1


def test_the_fingerprint_follows_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    first = load_data(write(tmp_path, *rows)).fingerprint
    assert load_data(write(tmp_path, *rows)).fingerprint == first
    assert load_data(write(tmp_path, rows[0], {**rows[1], "answer": "3"})).fingerprint != first
    assert load_data(write(tmp_path, *rows[::-1])).fingerprint != first


# ---------------------------------------------------------------------------------------------- gym


def test_reasoning_gym_tasks_are_mixed_by_seed_and_judged_by_their_own_scorer() -> None:
    tasks = [GymTask(task="chain_sum", size=20, seed=1), GymTask(task="letter_counting", size=20, seed=1)]
    data = load_data(DataSource(reasoning_gym=tasks))
    assert len({entry.id for entry in data.entries}) == 40
    names = [entry.row.reference().reasoning_gym.task for entry in data.entries]
    assert 4 <= names[:20].count("chain_sum") <= 16
    assert load_data(DataSource(reasoning_gym=tasks)).fingerprint == data.fingerprint
    reference = data.entries[0].row.reference()
    assert reference.domain == common_pb2.DOMAIN_REASONING_GYM
    assert "answer" in json.loads(reference.reasoning_gym.entry_json)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (GymTask(task="chain_sums", size=1), "did you mean chain_sum"),
        (GymTask(task="chain_sum", size=1, config={"min_term": 2}), "refuses its config"),
        (GymTask(task="chain_sum", size=1, config={"min_terms": 9, "max_terms": 2}), "refuses its config"),
        (GymTask(task="chain_sum", size=1, config={"seed": 2}), "give seed beside config"),
    ],
)
def test_a_bad_gym_task_is_refused(task: GymTask, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        load_data(DataSource(reasoning_gym=[task]))


def test_held_out_prompts_are_taken_out_of_the_training_data(tmp_path: Path) -> None:
    train, held_out = load_data(sums("train", 400, 3, digits=1)), load_data(sums("eval", 50, 3, digits=1))
    cleaned, dropped = train.without_texts_of(held_out)
    assert dropped > 0
    assert len(cleaned) + dropped == 400
    assert not {e.text for e in cleaned.entries} & {e.text for e in held_out.entries}
    with pytest.raises(InvalidArgument, match="every row"):
        held_out.without_texts_of(held_out)


def test_an_unreachable_hub_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match=r"'nobody/none'.*data\.path"):
        load_data(DataSource(hub=HubData(name="nobody/none")))
    with pytest.raises(Unavailable, match=r"'nobody/none'.*folder's path"):
        resolve_policy("nobody/none")


# ------------------------------------------------------------------------------------------ prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def rows(tmp_path: Path, *made: Any) -> DataSet:
    return load_data(write(tmp_path, *made))


def test_prompt_ids_are_the_templates_own_with_one_begin_token(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    style = PromptFormat(system="S", examples=[Example(prompt="1+1", answer="2")])
    builder = PromptBuilder(tokenizer, style, context_length=128, max_tokens=8)
    data = rows(
        tmp_path, {"prompt": "2+2", "answer": "4"}, {"messages": [{"role": "user", "content": "q"}], "answer": "4"}
    )
    first, second = builder.build_all(data)
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert first.token_ids.tolist() == expected["input_ids"]
    assert first.token_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(second.token_ids) == "<s>[user]q[assistant]"


def test_a_second_begin_token_in_front_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer, PromptFormat(), context_length=128, max_tokens=8)
    with pytest.raises(DataError, match=r"row 1: .*two begin-of-sequence"):
        builder.build_all(rows(tmp_path, {"prompt": "<s>2+2", "answer": "4"}))


def test_without_a_chat_template_the_prompt_is_plain_lines(tmp_path: Path, tokenizer: Any) -> None:
    style = PromptFormat(system="S", examples=[Example(prompt="1+1", answer="2")])
    builder = PromptBuilder(tokenizer, style, context_length=128, max_tokens=8)
    (prompt,) = builder.build_all(rows(tmp_path, {"prompt": "2+2", "answer": "4"}))
    assert tokenizer.decode(prompt.token_ids) == "<s>S\n1+1\n2\n2+2"
    with pytest.raises(DataError, match=r"row 1: .*no chat template"):
        builder.build_all(rows(tmp_path, {"messages": [{"role": "user", "content": "q"}], "answer": "4"}))


def test_a_prompt_too_long_for_the_context_is_refused_with_its_row(tmp_path: Path, tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer, PromptFormat(), context_length=40, max_tokens=10)
    data = rows(tmp_path, {"prompt": "1", "answer": "4"}, {"prompt": "9" * 30, "answer": "4"})
    with pytest.raises(DataError, match="row 2: the prompt has 31 tokens; the context of 40 tokens leaves 30"):
        builder.build_all(data)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        PromptBuilder(tokenizer, PromptFormat(), context_length=40, max_tokens=40)


@given(text=st.text(max_size=60))
def test_any_text_survives_the_digit_tokenizer(model_folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer("1234", add_special_tokens=False)["input_ids"]) == 4


# ------------------------------------------------------------------------------------------- order


@given(size=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), stop=st.integers(0, 90))
def test_a_restored_sampler_goes_on_as_if_never_interrupted(size: int, seed: int, stop: int) -> None:
    whole = PromptSampler(size, seed)
    expected = [whole.next() for _ in range(100)]
    first = PromptSampler(size, seed)
    head = [first.next() for _ in range(stop)]
    second = PromptSampler(size, seed)
    second.restore(json.loads(json.dumps(first.state())))
    assert head + [second.next() for _ in range(100 - stop)] == expected


@given(size=st.integers(1, 40), seed=st.integers(0, 1000))
def test_every_prompt_comes_once_an_epoch(size: int, seed: int) -> None:
    sampler = PromptSampler(size, seed)
    for _ in range(3):
        assert sorted(sampler.next() for _ in range(size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = PromptSampler(30, seed)
        return [sampler.at(epoch * 30 + i) for i in range(30)]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_a_sampler_of_other_data_is_refused() -> None:
    sampler = PromptSampler(10, 1)
    with pytest.raises(InvalidArgument, match="size 9"):
        sampler.restore({"position": 3, "size": 9, "seed": 1})


# ----------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("name", ["smolm2", "tinny"])
def test_an_unknown_policy_is_answered_with_the_nearest_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unknown policy '{name}'; did you mean (smollm2|tiny)"):
        resolve_policy(name)


def test_a_policy_folder_must_hold_a_model(tmp_path: Path, model_folder: Path) -> None:
    assert resolve_policy(str(model_folder)) == model_folder
    with pytest.raises(InvalidArgument, match=r"no config\.json"):
        resolve_policy(str(tmp_path))
    with pytest.raises(InvalidArgument, match="there is no policy folder"):
        resolve_policy(str(tmp_path / "missing"))


@pytest.mark.parametrize("policy", ["smollm2", "tiny"])
def test_the_demo_trains_and_evaluates_on_different_prompts(policy: str) -> None:
    job = demo_job(policy, steps=3, seed=1)
    assert (job.steps, job.seed, job.policy) == (3, 1, policy)
    assert job.evaluation is not None
    held_out = load_data(job.evaluation.data)
    assert len(held_out) == 200
    train, _ = load_data(job.data).without_texts_of(held_out)
    assert len({entry.text for entry in train.entries}) >= 100
    assert load_data(demo_job(policy, seed=2).data).fingerprint != load_data(job.data).fingerprint
    with pytest.raises(InvalidArgument, match="no demo of policy"):
        demo_job("gpt")


# ----------------------------------------------------------------------------------- files that are no data


def test_lines_that_are_no_utf8_or_json_are_named_and_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = b'{"prompt": "1+1?", "answer": "2"}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + row * 2)
    assert len(load_data(DataSource(path=str(path)))) == 2
    path.write_bytes(
        row + b'{"prompt": "\xff", "answer": "2"}\n' + b"[" * 100_000 + b"\n" + row.replace(b'"2"', b"NaN")
    )
    with pytest.raises(DataError) as caught:
        load_data(DataSource(path=str(path)))
    assert [str(problem) for problem in caught.value.problems] == [
        "row 2: not UTF-8 (byte 13)",
        "row 3: not JSON (nested too deeply)",
        "row 4: not JSON (NaN is no number)",
    ]


@pytest.mark.parametrize("path", ["/dev/zero", "/", "a\x00b"])
def test_a_path_that_is_no_regular_file_is_refused_without_reading_it(path: str) -> None:
    with pytest.raises(InvalidArgument, match=r"regular file|folder|NUL"):
        load_data(DataSource(path=path))
