"""`rollwise report`: report.json and report.html of any job, running or over."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.output import UsageProblem, print_json, stdout

_RECORDED = ("rollwise", "torch", "transformers", "numpy", "math-verify", "reasoning-gym")


def report(
    *,
    job: Annotated[str, typer.Argument(metavar="JOB|FOLDER", help="A job's id, or its folder on disk.")],
    out: Annotated[Path, typer.Option(help="Where to write report.json and report.html.")] = Path("report"),
    api_url: Annotated[str | None, typer.Option(help="The trainer API's address.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report's numbers as one JSON object.")] = False,
) -> None:
    """Write a job's report: accuracy, rollouts per prompt, prior calibration, gradient norm, entropy, samples.

    A folder (with metrics.jsonl and trail.jsonl) needs no service.
    """
    from trainer.report import build_report, write_report

    folder = Path(job)
    sources = from_folder(folder) if folder.is_dir() else _from_api(job, api_url)
    sources.setdefault("run", {"versions": versions()})
    result = build_report(**sources)
    try:
        data, page = write_report(result, out)
    except OSError as error:
        raise UsageProblem(f"--out {out}: {error.strerror or error}", "give a folder that can be written") from error
    if as_json:
        print_json(result)
    else:
        stdout.print(f"{page}\n{data}", highlight=False)


def from_folder(folder: Path) -> dict[str, Any]:
    """What `build_report` needs, from a job's folder. Raises UsageProblem when it is none."""
    from trainer.recorder import read_lines

    metrics, trail = folder / "metrics.jsonl", folder / "trail.jsonl"
    if not metrics.is_file():
        raise UsageProblem(f"{folder} holds no metrics.jsonl", "give a job's folder: STATE_DIR/jobs/JOB_ID")
    spec_file = folder / "spec.json"
    try:
        run = json.loads(spec_file.read_text()) if spec_file.is_file() else {}
    except ValueError as error:
        raise UsageProblem(f"{spec_file} is not JSON: {error}") from error
    if not isinstance(run, dict) or not isinstance(run.get("spec", {}), dict):
        raise UsageProblem(f"{spec_file} holds no job specification", "give a job's folder: STATE_DIR/jobs/JOB_ID")
    recorded = list(read_lines(metrics))
    if not recorded and metrics.stat().st_size:
        raise UsageProblem(f"{metrics} holds no recorded step", "give a job's folder: STATE_DIR/jobs/JOB_ID")
    spec = run.pop("spec", {})
    job = {"id": folder.resolve().name, "name": spec.get("name"), "state": "as on disk", "spec": spec, "progress": {}}
    return {"job": job, "metrics": recorded, "trail": list(read_lines(trail)), "run": run}


def versions() -> dict[str, str]:
    """What is installed here."""
    found = {"python": platform.python_version()}
    for name in _RECORDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _from_api(job: str, api_url: str | None) -> dict[str, Any]:
    from services.cli.common import api

    with api(api_url) as client:
        return {"job": client.job(job), "metrics": client.metrics(job), "trail": client.trail(job)}
