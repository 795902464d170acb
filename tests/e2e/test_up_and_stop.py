"""`rollwise up` with every real service: it serves, heals, stops, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVICES = {"redis", "generation", "value_prior", "verifier", "allocator", "api", "worker"}


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "xdg")}


def rollwise(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path), timeout=120, check=False, cwd=tmp_path
    )


@contextmanager
def up(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    """A running stack and its endpoints."""
    command = [sys.executable, "-m", "services.cli.main", "up", "--any-ports", "--json", "--state-dir", "run"]
    with (tmp_path / "up.err").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(tmp_path), cwd=tmp_path
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (tmp_path / "up.err").read_text()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        process.stdout.close()


def everything_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.2)


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def read(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "endpoints.json").read_text())


def test_it_serves_answers_the_doctor_heals_and_stops_without_a_trace(tmp_path):
    with up(tmp_path) as (process, ends):
        assert set(ends["pids"]) == SERVICES
        done = rollwise(tmp_path, "doctor", "--json")
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        for name in SERVICES | {"value_prior REST"}:
            assert checks[name]["status"] == "ok", checks[name]

        jobs = rollwise(tmp_path, "jobs", "--json")
        assert (jobs.returncode, jobs.stdout) == (0, "")
        score = rollwise(tmp_path, "score", "--json", "What is 2 + 2?")
        assert score.returncode == 0, score.stderr
        assert 0 < json.loads(score.stdout)["value"] < 1

        second = rollwise(tmp_path, "up", "--any-ports", "--state-dir", "run")
        assert second.returncode == 2
        assert "another Rollwise runs in" in second.stderr

        victims = ("verifier", "allocator", "redis")
        for name in victims:
            os.kill(ends["pids"][name], signal.SIGKILL)
        eventually(lambda: all(read(tmp_path)["pids"].get(n) not in (None, ends["pids"][n]) for n in victims), 60)
        eventually(lambda: set(read(tmp_path)["states"].values()) == {"serving"}, 60)
        healed = read(tmp_path)
        assert healed["targets"] == ends["targets"]
        assert healed["redis_url"] == ends["redis_url"]
        assert all(healed["restarts"][name] >= 1 for name in victims)
        assert rollwise(tmp_path, "jobs", "--json").returncode == 0

        family = everything_of(process)
        assert len(family) >= len(SERVICES)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
        assert left(family) == []
    assert not (tmp_path / "run" / "endpoints.json").exists()
    assert not (tmp_path / "xdg" / "rollwise" / "endpoints.json").exists()
    assert rollwise(tmp_path, "jobs", "--api-url", ends["api_url"]).returncode == 3


def test_a_killed_launcher_leaves_no_orphan(tmp_path):
    with up(tmp_path) as (process, ends):
        family = everything_of(process)
        process.kill()
        process.wait(10)
        eventually(lambda: left(family) == [], 20)
        done = rollwise(tmp_path, "doctor", "--json")
        services = next(c for c in json.loads(done.stdout)["checks"] if c["name"] == "services")
        assert services["detail"] == "no stack of yours runs on this machine"
    assert ends["launcher_pid"] == process.pid
