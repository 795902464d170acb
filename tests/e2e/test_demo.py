"""`rollwise demo --policy tiny` from nothing to a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_tiny_demo_learns_spends_half_and_adds_up(tmp_path: Path):
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "xdg")}
    command = [sys.executable, "-m", "services.cli.main", "demo", "--policy", "tiny", "--steps", "20", "--json"]
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # exactly one object
    assert result["policy"] == "tiny"
    assert result["steps"] == 20
    assert result["accuracy_after"] >= result["accuracy_before"] + 0.1
    assert result["rollouts_fixed"] == 16 * result["prompts"]
    assert result["rollouts"] <= result["rollouts_fixed"] / 2
    groups = result["groups"]
    assert groups["submitted"] == result["prompts"]
    assert groups["submitted"] == sum(groups[name] for name in ("trained", "filtered", "dropped", "in_flight"))
    report = json.loads((tmp_path / "demo-out" / "report.json").read_text())
    assert report["accuracy_after"] == result["accuracy_after"]
    assert len(report["series"]["step"]) == 20
    page = (tmp_path / "demo-out" / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "Nothing was recorded" not in page
    for word in ("services are up", "evaluation after 0 steps", "step 20/20", "evaluation after 20 steps"):
        assert word in done.stderr
    # Nothing of ours is left, and no state folder either.
    assert {path.name for path in (tmp_path / "demo-out").iterdir()} == {"report.json", "report.html"}
    ours = [
        process
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.pid not in before and str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert ours == []
