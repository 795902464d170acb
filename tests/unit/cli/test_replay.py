"""`rollwise replay` on trails made by the real rule: reproduced as recorded, and a changed number is noticed."""

from __future__ import annotations

import json
import sys

import pytest

from services.allocator.messages import decision_message
from services.allocator.shrinkage import RewardScale
from services.allocator.stopping import Kind, OslaBudget, decide
from services.cli.main import main
from services.cli.output import UsageProblem
from services.cli.replay import parse_budget, take_again
from trainer.recorder import decision_line

OSLA = OslaBudget()
SCALE = RewardScale(0.0, 1.0)


def line(prompt_id: str, rewards: list[float], prior: float) -> dict:
    """What the recorder writes of a group that the rule let run over `rewards`."""
    trail, k = [], OSLA.k_min
    while True:
        decision = decide(OSLA, rewards[:k], prior, SCALE)
        trail.append(decision_line(decision_message(decision)))
        if decision.kind is not Kind.CONTINUE:
            break
        k += decision.more
    return {
        "step": 0,
        "key": {"prompt_id": prompt_id},
        "budget": {"osla": {"k_min": 4, "k_max": 16, "price": 1 / 256, "round_size": 1}},
        "scale": {"low": 0.0, "high": 1.0},
        "prior": {"value": prior},
        "rewards": rewards[:k],
        "trail": trail,
    }


@pytest.fixture
def trail(tmp_path):
    lines = [line("agrees", [1.0, 0.0] * 8, 0.5), line("differs", [1.0] * 16, 0.1)]
    path = tmp_path / "trail.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["rollwise", "replay", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_recorded_trail_is_reproduced(trail, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, trail, "--json")
    rows = [json.loads(text) for text in out.splitlines()]
    assert code == 0
    assert all(row["reproduced"] for row in rows)
    assert [row["kind"] for row in rows if row["prompt_id"] == "agrees"] == ["stop"]
    assert len([row for row in rows if row["prompt_id"] == "differs"]) > 1


def test_a_changed_number_is_noticed_with_exit_code_1(trail, monkeypatch, capsys):
    lines = [json.loads(text) for text in trail.read_text().splitlines()]
    lines[1]["trail"][0]["baseline"] += 0.01
    trail.write_text("".join(json.dumps(each) + "\n" for each in lines))
    code, out, err = run(monkeypatch, capsys, trail, "--json")
    wrong = [row for row in map(json.loads, out.splitlines()) if not row["reproduced"]]
    assert code == 1
    assert [row["prompt_id"] for row in wrong] == ["differs"]
    assert wrong[0]["difference"].startswith("baseline ")
    assert "were not reproduced" in err


def test_one_group_and_another_rule(trail, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, trail, "--group", "differs", "--budget", "fixed:4")
    assert code == 0
    assert "agrees" not in out
    recorded = len(line("differs", [1.0] * 16, 0.1)["rewards"])
    assert f"fixed:4: 4 rollouts, recorded {recorded}" in out


def test_a_missing_group_or_file_is_exit_code_2(trail, monkeypatch, capsys):
    assert run(monkeypatch, capsys, trail, "--group", "nobody")[0] == 2
    assert run(monkeypatch, capsys, "nowhere/trail.jsonl")[0] == 2


@pytest.mark.parametrize("text", ["fixed:0", "fixed:x", "osla:k_min=9,k_max=3", "osla:k=3", "osla:price", "dapo:4"])
def test_a_bad_budget_is_named(text):
    with pytest.raises(UsageProblem) as caught:
        parse_budget(text)
    assert text in caught.value.what


def test_a_line_that_is_no_group_is_named():
    with pytest.raises(UsageProblem, match="group 'p1' cannot be replayed"):
        take_again({"key": {"prompt_id": "p1"}}, None)
    bad_kind = {**line("p2", [1.0] * 16, 0.5)}
    bad_kind["trail"][0]["kind"] = "perhaps"
    with pytest.raises(UsageProblem, match="group 'p2' cannot be replayed"):
        take_again(bad_kind, None)
