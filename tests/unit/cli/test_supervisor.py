"""The supervisor with real processes: small scripts that serve, die, ignore signals or leave children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy import supervisor as module
from deploy.processes import ProcessSpec
from deploy.supervisor import StackFailed, Supervisor

READY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('{}')\n"
# Serves, with a child of its own that it does not look after.
WITH_CHILD = (
    "import subprocess, sys, pathlib, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "pathlib.Path(sys.argv[1] + '.child').write_text(str(child.pid))\n" + READY + "time.sleep(600)\n"
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)\n"


def spec(folder: Path, name: str, script: str) -> ProcessSpec:
    ready = folder / f"{name}.ready"
    return ProcessSpec(name, (sys.executable, "-c", script, str(ready)), ready_file=ready)


def probe(spec: ProcessSpec) -> str | None:
    assert spec.ready_file is not None
    return None if spec.ready_file.exists() else "no ready file"


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def running(tmp_path: Path):
    made: list[Supervisor] = []

    def start(*specs: ProcessSpec) -> Supervisor:
        supervisor = Supervisor(tmp_path / "logs", probe)
        made.append(supervisor)
        supervisor.start(specs)
        supervisor.wait_until_serving([s.name for s in specs], 20.0, lambda: None)
        return supervisor

    yield start
    for supervisor in made:
        supervisor.stop([], grace=1.0)


def test_a_killed_process_is_restarted_and_its_own_children_go_with_it(tmp_path, running):
    supervisor = running(spec(tmp_path, "a", WITH_CHILD))
    child = supervisor.children["a"]
    first, grandchild = child.pid, int((tmp_path / "a.ready.child").read_text())
    os.kill(first, signal.SIGKILL)
    eventually(lambda: child.state == "serving" and child.pid not in (None, first))
    eventually(lambda: gone(grandchild))
    assert child.restarts == 1
    assert "killed by SIGKILL" in child.log.read_text()


def test_a_restarted_process_can_still_be_stopped_in_order(tmp_path, running):
    script = (
        "import signal, sys, pathlib\n"
        "clean = pathlib.Path(sys.argv[1] + '.clean')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (clean.write_text('x'), sys.exit(0)))\n" + READY + "time.sleep(600)\n"
    )
    supervisor = running(spec(tmp_path, "a", script))
    child = supervisor.children["a"]
    first = child.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: child.state == "serving" and child.pid not in (None, first))
    supervisor.stop(["a"], grace=10.0)
    assert (tmp_path / "a.ready.clean").exists()


def test_processes_stop_in_the_order_given_and_a_stubborn_one_is_killed(tmp_path, running):
    specs = [spec(tmp_path, "a", READY + "time.sleep(600)\n"), spec(tmp_path, "b", STUBBORN)]
    supervisor = running(*specs)
    pids = [child.pid for child in supervisor.children.values()]
    stopped: list[str] = []
    began = time.monotonic()
    supervisor.stop(["b", "a"], grace=0.5, on_stop=stopped.append)
    assert stopped == ["b", "a"]
    assert 0.5 <= time.monotonic() - began < 10
    assert all(gone(pid) for pid in pids)


def test_one_that_dies_while_starting_fails_at_once_with_the_end_of_its_log(tmp_path, running):
    with pytest.raises(StackFailed) as caught:
        running(spec(tmp_path, "a", "import sys; print('no model here'); sys.exit(7)"))
    assert "a ended while starting (exit code 7)" in str(caught.value)
    assert "no model here" in caught.value.tail


def test_a_crash_loop_ends_the_stack_with_the_cause(tmp_path, running, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_BACKOFF_SECONDS", 0.01)
    supervisor = running(spec(tmp_path, "a", READY + "time.sleep(0.3); print('tripped'); sys.exit(3)"))
    eventually(lambda: supervisor.failure is not None, 30.0)
    assert supervisor.failure is not None
    assert "a died 6 times in a row (exit code 3)" in str(supervisor.failure)
    assert "tripped" in supervisor.failure.tail


def test_one_that_never_serves_is_named_with_its_cause(tmp_path):
    supervisor = Supervisor(tmp_path / "logs", probe)
    supervisor.start([spec(tmp_path, "slow", "import time; time.sleep(600)")])
    try:
        with pytest.raises(StackFailed, match="slow did not serve within 1 s: no ready file"):
            supervisor.wait_until_serving(["slow"], 1.0, lambda: None)
    finally:
        supervisor.stop([], grace=0.5)


LAUNCHER = """
import sys, time, pathlib
sys.path.insert(0, {here!r})
from test_supervisor import WITH_CHILD, Supervisor, probe, spec
folder = pathlib.Path(sys.argv[1])
supervisor = Supervisor(folder / "logs", probe)
supervisor.start([spec(folder, "a", WITH_CHILD), spec(folder, "b", WITH_CHILD)])
supervisor.wait_until_serving(["a", "b"], 20.0, lambda: None)
print(*[child.pid for child in supervisor.children.values()], flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    code = LAUNCHER.format(here=str(Path(__file__).parent))
    launcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    pids += [int(path.read_text()) for path in tmp_path.glob("*.child")]
    assert len(pids) == 4
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    eventually(lambda: all(gone(pid) for pid in pids))
