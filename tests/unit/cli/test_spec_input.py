"""How files, options and --set become one specification, and what is said about faults."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.output import UsageProblem
from services.cli.spec_input import apply_set, data_source, read_spec_file, validate

MINIMAL = {"policy": "tiny", "data": {"reasoning_gym": [{"task": "chain_sum", "size": 10}]}}


def test_set_reaches_any_depth_and_reads_values_as_json():
    spec = apply_set(
        MINIMAL, ["optimizer.learning_rate=2e-5", "algorithm.budget.k_max=8", "name=my run", "deterministic=true"]
    )
    full = validate(spec)
    assert full["optimizer"]["learning_rate"] == 2e-5
    assert full["algorithm"]["budget"] == {"kind": "osla", "k_min": 4, "k_max": 8, "price": None, "round_size": 1}
    assert full["name"] == "my run"
    assert full["deterministic"] is True


def test_set_indexes_lists_and_leaves_the_given_specification_alone():
    before = json.dumps(MINIMAL)
    spec = apply_set(MINIMAL, ["data.reasoning_gym.0.size=99"])
    assert spec["data"]["reasoning_gym"][0]["size"] == 99
    assert json.dumps(MINIMAL) == before


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("steps", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("optimizer..x=3", "expected key.path=value"),
        ("policy.size=3", "policy is text, it has no 'size'"),
        ("data.reasoning_gym.5.size=3", "is a list of 1; give an index"),
        ("data.reasoning_gym.x=3", "is a list of 1; give an index"),
    ],
)
def test_a_bad_assignment_is_named(assignment, complaint):
    with pytest.raises(UsageProblem) as caught:
        apply_set(MINIMAL, [assignment])
    assert assignment in caught.value.what
    assert complaint in caught.value.what
    assert caught.value.code == 2


@given(
    st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=4),
    st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_set_is_what_is_read(path, value):
    spec = apply_set({}, [f"{'.'.join(path)}={json.dumps(value)}"])
    for key in path:
        spec = spec[key]
    assert spec == value


def test_every_fault_of_a_specification_gets_its_own_line_with_the_key():
    bad = {**MINIMAL, "stepz": 3, "optimizer": {"learning_rate": -1}, "seed": -5}
    with pytest.raises(UsageProblem) as caught:
        validate(bad)
    lines = caught.value.what.splitlines()
    assert lines[0] == "the job specification has 3 faults"
    assert "  - stepz: no such key" in lines
    assert any(line.startswith("  - optimizer.learning_rate:") for line in lines)
    assert any(line.startswith("  - seed:") for line in lines)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(UsageProblem, match=r"unknown preset 'v5'; known: grpo, v0\.5"):
        validate({**MINIMAL, "preset": "v5"})


def test_data_sources(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    assert data_source(str(file)) == {"path": str(file)}
    assert data_source("gym:chain_sum,gcd:200:7")["reasoning_gym"] == [
        {"task": "chain_sum", "size": 200, "seed": 7},
        {"task": "gcd", "size": 200, "seed": 7},
    ]
    assert data_source("hub:openai/gsm8k:test") == {"hub": {"name": "openai/gsm8k", "split": "test"}}
    for bad in ("nowhere.jsonl", "gym:chain_sum", "gym:chain_sum:many", "hub:"):
        with pytest.raises(UsageProblem) as caught:
            data_source(bad)
        assert bad in caught.value.what


def test_specification_files(tmp_path):
    yaml_file, json_file = tmp_path / "job.yaml", tmp_path / "job.json"
    yaml_file.write_text("policy: tiny\nsteps: 3\n")
    json_file.write_text('{"policy": "tiny", "steps": 3}')
    assert read_spec_file(yaml_file) == read_spec_file(json_file) == {"policy": "tiny", "steps": 3}
    for name, text, complaint in (
        ("a.json", "{", "is not valid JSON"),
        ("b.yaml", "[1]", "holds a list, not an object"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageProblem, match=complaint):
            read_spec_file(tmp_path / name)
    with pytest.raises(UsageProblem, match="No such file"):
        read_spec_file(tmp_path / "none.json")
