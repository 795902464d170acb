"""Clumsy and hostile input to the commands: exit code 2 and a line that says what is wrong, never a traceback."""

import json
import signal
import subprocess
import sys

import pytest

from services.cli.client import ApiClient
from services.cli.main import refuse_unknown_variables
from services.cli.output import UsageProblem
from services.cli.replay import take_again
from services.cli.report import from_folder
from services.cli.score import _read
from services.cli.spec_input import read_spec_file
from services.cli.verify import BadRow, parse_row


def test_a_misspelt_variable_of_the_command_is_refused_by_name():
    refuse_unknown_variables({"ROLLWISE_CLI_API_URL": "x", "ROLLWISE_GENERATION_PORT": "1", "HOME": "/"})
    with pytest.raises(UsageProblem, match="ROLLWISE_CLI_APIURL") as caught:
        refuse_unknown_variables({"ROLLWISE_CLI_APIURL": "x"})
    assert "ROLLWISE_CLI_API_URL?" in caught.value.todo


def test_a_misspelt_variable_ends_the_program_with_exit_code_2(monkeypatch):
    monkeypatch.setenv("ROLLWISE_CLI_TOKEN", "x")
    code = "import sys; sys.argv = ['rollwise', 'jobs']; import services.cli.main as m; m.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown environment variable ROLLWISE_CLI_TOKEN" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [(b'{"policy": "\xff"}', "not UTF-8 (byte 13)"), (b"[" * 100_000, "nested too deeply"), (b"{", "not valid JSON")],
)
def test_a_specification_that_is_no_text_or_json_is_named(tmp_path, content, says):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(UsageProblem) as caught:
        read_spec_file(path)
    assert str(path) in caught.value.what and says in caught.value.what


def test_rows_to_score_are_named_by_line_and_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\\u2028"}\r\n')
    assert [row["text"] for row in _read(path)] == ["a", "b\u2028"]
    for content, says in ((b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2: not UTF-8"), (b"[" * 100_000, "line 1")):
        path.write_bytes(content)
        with pytest.raises(UsageProblem, match=says):
            _read(path)


def test_a_row_whose_gold_is_not_a_number_says_so():
    with pytest.raises(BadRow, match="NaN is no number"):
        parse_row(b'{"gold": NaN, "answer": "1"}')


def test_an_id_with_slashes_stays_one_part_of_the_path_and_dots_are_no_id(monkeypatch):
    asked = []
    client = ApiClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "request", lambda method, path, **_: asked.append(path) or {})
    client.job("../../etc/passwd?x=1#y")
    assert asked == ["/v1/jobs/..%2F..%2Fetc%2Fpasswd%3Fx%3D1%23y"]
    for job_id in ("..", ".", "", "a\x00b", "a\r\nb"):
        with pytest.raises(UsageProblem, match="no job's id"):
            client.cancel(job_id)


def test_an_address_without_a_scheme_is_wrong_usage():
    with pytest.raises(UsageProblem, match="no address of the trainer API"):
        ApiClient("localhost").job("job-1")


@pytest.mark.parametrize("line", [{}, {"trail": 5}, {"trail": [{"kind": "x"}], "budget": 7}, {"trail": [], "key": 5}])
def test_a_line_that_is_no_group_cannot_be_replayed_and_says_so(line):
    with pytest.raises(UsageProblem) as caught:
        take_again(line, None)
    assert "trail" in caught.value.what + caught.value.todo


def test_a_folder_of_nonsense_is_no_report(tmp_path):
    metrics, spec = tmp_path / "metrics.jsonl", tmp_path / "spec.json"
    for content in (b"x\n", b"[1]\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        metrics.write_bytes(content)
        with pytest.raises(UsageProblem, match="holds no recorded step"):
            from_folder(tmp_path)
    metrics.write_text(json.dumps({"kind": "step"}) + "\n")
    assert from_folder(tmp_path)["metrics"] == [{"kind": "step"}]
    spec.write_text("[1]")
    with pytest.raises(UsageProblem, match=r"spec\.json holds no job specification"):
        from_folder(tmp_path)


def test_ctrl_c_while_the_program_is_loaded_leaves_no_traceback():
    code = "import services.cli; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_state_folder_that_cannot_be_made_is_wrong_usage(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "up", "--any-ports", "--state-dir", str(tmp_path / "file")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "--state-dir" in done.stderr and "Traceback" not in done.stderr
