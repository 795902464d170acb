"""The `rollwise` program as a person or a script meets it: help, exit codes, what goes where."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from services.cli.main import main

COMMANDS = [
    "demo",
    "up",
    "doctor",
    "submit",
    "eval",
    "jobs",
    "watch",
    "cancel",
    "resume",
    "report",
    "score",
    "verify",
    "replay",
]
NOWHERE = {"ROLLWISE_CLI_API_URL": "http://127.0.0.1:1", "ROLLWISE_CLI_VALUE_PRIOR_URL": "http://127.0.0.1:1"}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def rollwise(tmp_path, monkeypatch, capsys):
    """Runs the program's entry point in this process."""
    for name, value in {**NOWHERE, "XDG_STATE_HOME": str(tmp_path / "xdg"), "COLUMNS": "200", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["rollwise", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return run


def test_help_lists_every_command_and_imports_no_model_library():
    code = (
        "import sys; sys.argv = ['rollwise', '--help']\n"
        "import services.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'grpc', 'matplotlib', 'sklearn', 'math_verify'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 10  # under 1 s alone; this machine may be busy
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(rollwise, command):
    done = rollwise(command, "--help")
    assert done.returncode == 0
    assert "Usage: rollwise" in done.stdout or f"{command} [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["jobs"], ["watch", "job-1"], ["cancel", "job-1"], ["resume", "job-1"], ["score", "2+2?"], ["report", "job-1"]],
)
def test_a_service_out_of_reach_is_exit_code_3_with_nothing_on_stdout(rollwise, arguments):
    done = rollwise(*arguments)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert "does not answer at http://127.0.0.1:1" in done.stderr
    assert "rollwise up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["submit"], "policy"),
        (["submit", "--policy", "tiny", "--data", "nothing.jsonl"], "no such file"),
        (["submit", "--policy", "tiny", "--data", "gym:chain_sum:9", "--set", "stepz=1"], "stepz: no such key"),
        (["submit", "none.yaml"], "No such file"),
        (["submit", "--resume", "job-1", "--policy", "tiny"], "--resume takes no specification"),
        (["eval", "--policy", "tiny"], "--policy and --data are needed"),
        (["score", "--file", "none.jsonl"], "No such file"),
        (["demo", "--policy", "gpt"], "gpt"),
        (["frobnicate"], "No such command"),
        (["jobs", "--limit", "0"], "--limit"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what(rollwise, arguments, complaint):
    done = rollwise(*arguments)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_dry_run_prints_the_full_specification_and_nothing_else(rollwise):
    done = rollwise(
        "submit", "--policy", "tiny", "--data", "gym:chain_sum:9", "--dry-run", "--json", "--set", "steps=7"
    )
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)
    assert spec["steps"] == 7
    assert spec["algorithm"]["budget"]["kind"] == "osla"


def test_data_paths_in_a_file_are_meant_from_its_folder(rollwise, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "job.yaml").write_text("policy: tiny\ndata: {path: rows.jsonl}\n")
    done = rollwise("submit", "sub/job.yaml", "--dry-run", "--json")
    assert json.loads(done.stdout)["data"]["path"] == str(tmp_path / "sub" / "rows.jsonl")


def test_a_bad_row_for_score_is_named_by_its_line(rollwise):
    done = rollwise("score", "--file", "-", stdin='{"prompt": "a"}\n\n{"promt": "b"}\n')
    assert done.returncode == 2
    assert "standard input, line 3: no text under `prompt`" in done.stderr


def test_doctor_answers_in_one_json_object(rollwise):
    done = rollwise("doctor", "--json")
    answer = json.loads(done.stdout)
    assert {"python", "torch", "cores", "memory", "services"} <= {check["name"] for check in answer["checks"]}
    assert done.returncode == (0 if answer["ok"] else 1)
    assert {check["status"] for check in answer["checks"]} <= {"ok", "warn", "fail"}


def test_doctor_fails_on_an_evicting_redis_and_says_what_to_do(rollwise, redis_url):
    import redis

    client = redis.Redis.from_url(redis_url)
    good = json.loads(rollwise("doctor", "--json", "--redis-url", redis_url).stdout)
    assert next(c for c in good["checks"] if c["name"] == "redis")["status"] == "ok"
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        done = rollwise("doctor", "--json", "--redis-url", redis_url)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    found = next(c for c in json.loads(done.stdout)["checks"] if c["name"] == "redis")
    assert done.returncode == 1
    assert found["status"] == "fail"
    assert found["todo"] == "CONFIG SET maxmemory-policy noeviction"


def test_up_names_a_taken_port_and_its_option_before_starting_anything(rollwise, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = rollwise("up", "--any-ports", "--api-port", str(port))
    assert done.returncode == 2
    assert f"port in use: {port} (api)" in done.stderr
    assert "--api-port" in done.stderr
    assert list((tmp_path / "run").glob("logs/*.log")) == []
