"""`rollwise verify`, with its real workers."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from services.cli.verify import BadRow, parse_row, verify, verify_file

app = typer.Typer()
app.command()(verify)


def run(path, *, json_output=True, **options):
    out, err = io.StringIO(), io.StringIO()
    code = verify_file(path, json_output=json_output, workers=1, out=out, err=err, **options)
    return code, out.getvalue(), err.getvalue()


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_rows_are_judged_in_order_one_line_each(tmp_path):
    rows = [{"gold": str(i), "answer": f"\\boxed{{{i + i % 3}}}"} for i in range(300)]
    rows[7] = {"gold": "7^{12}-7^{12}+7", "answer": "\\boxed{7}"}  # slower than its neighbours
    code, out, err = run(write(tmp_path, *rows))
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [f["row"] for f in found] == list(range(1, 301))
    assert [f["verdict"] for f in found] == ["correct" if i % 3 == 0 or i == 7 else "wrong" for i in range(300)]
    assert all(list(f) == ["row", "verdict", "score", "reason"] for f in found)
    assert [f["score"] for f in found[:2]] == [1.0, 0.0]


def test_malformed_rows_are_named_and_nothing_else_is_lost(tmp_path):
    path = write(
        tmp_path,
        {"gold": 12, "answer": 12.0},
        b"",
        b"not json",
        [1],
        {"gold": "1"},
        {"gold": "1", "answer": None},
        {"gold": True, "answer": "1"},
        b'\xff\xfe{"gold": "1", "answer": "1"}',
        b"[" * 100_000,
        {"gold": "Answer is forty three.", "answer": "43"},
        {"gold": "3", "answer": "\ud800 3"},
    )
    code, out, err = run(path)
    assert code == 2
    assert [(f["row"], f["verdict"]) for f in map(json.loads, out.splitlines())] == [
        (1, "correct"),
        (10, "no_verdict"),
        (11, "wrong"),
    ]
    for number in (3, 4, 5, 6, 7, 8, 9):
        assert f"line {number}: " in err
    assert 'has no "answer"' in err
    assert "not UTF-8" in err
    assert "7 lines were not judged" in err


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path):
    code, out, err = run(tmp_path / "none.jsonl")
    assert (code, out) == (2, "")
    assert "none.jsonl: No such file" in err
    assert run(tmp_path)[0] == 2
    assert run(write(tmp_path, {}), domain="code")[0] == 2


def test_an_empty_file_has_no_rows(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert run(path) == (0, "", "")


def test_without_json_there_is_a_summary_by_reason(tmp_path):
    code, out, _ = run(write(tmp_path, {"gold": "1", "answer": "1"}, {"gold": "1", "answer": "2"}), json_output=False)
    assert code == 0
    assert "correct" in out
    assert "unequal" in out
    assert "2 rows" in out
    assert "mean score 0.500" in out


def test_the_command_reads_standard_input(tmp_path):
    done = CliRunner().invoke(app, ["-", "--json", "--workers", "1"], input='{"gold": "4", "answer": "x = 4"}\n')
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"] == "correct"
    assert CliRunner().invoke(app, ["-", "--workers", "0"]).exit_code == 2


@pytest.mark.parametrize("line", [b'{"gold": "1", "answer": ["1"]}', b'{"gold": {}, "answer": "1"}', b"null", b'"x"'])
def test_a_row_needs_text_or_numbers(line):
    with pytest.raises(BadRow):
        parse_row(line)


def test_numbers_keep_their_digits():
    assert parse_row(b'{"gold": 1.50, "answer": 123456789012345678901234567890}').gold == "1.50"


COMMAND = [sys.executable, "-c", "import typer; from services.cli.verify import verify; typer.run(verify)"]


def test_verdicts_stream_while_the_input_is_still_open():
    with subprocess.Popen([*COMMAND, "-", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'{"gold": "4", "answer": "4"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["row"] == 1  # the test's time limit guards this read
        process.stdin.close()
        assert process.wait(20) == 0


def test_ctrl_c_ends_it_cleanly_and_leaves_no_worker(tmp_path):
    hang = {"gold": "1", "answer": "\\boxed{\\binom{1000000000}{500000000}}"}
    path = write(tmp_path, {"gold": "1", "answer": "1"}, *({**hang, "gold": str(i)} for i in range(50)))
    with subprocess.Popen(
        [*COMMAND, str(path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert json.loads(process.stdout.readline())["verdict"] == "correct"
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert b"Traceback" not in err
        with pytest.raises(ProcessLookupError):  # the last to go is the interpreter's own helper, a moment later
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    path = write(tmp_path, *({"gold": str(i), "answer": str(i)} for i in range(20_000)))
    done = subprocess.run(
        f"{sys.executable} -c '{COMMAND[2]}' {path} --json | head -1",
        shell=True,
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert json.loads(done.stdout)["row"] == 1
    assert done.stderr == b""
