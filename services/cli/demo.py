"""`rollwise demo`: a whole training run on this machine, from nothing to a report."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.output import CliError, UsageProblem, note, print_json, stderr, stdout

if TYPE_CHECKING:
    from deploy.launcher import Stack

# What --json prints first, in this order; the rest of the report's figures follow.
_KEYS = (
    "policy",
    "steps",
    "prompts",
    "rollouts",
    "rollouts_fixed",
    "accuracy_before",
    "accuracy_after",
    "seconds",
    "groups",
)


def demo(
    *,
    policy: Annotated[
        str, typer.Option(help="smollm2 (135M, about 8 minutes on 2 cores) or tiny (2 minutes).")
    ] = "smollm2",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the policy's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data and sampling.")] = 0,
    preset: Annotated[str, typer.Option(help="v0.5 (shrinkage + OSLA) or grpo (16 rollouts each).")] = "v0.5",
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")] = Path("demo-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    keep_up: Annotated[bool, typer.Option("--keep-up", help="Leave the services running until Ctrl-C.")] = False,
) -> None:
    """Post-train a real language model on arithmetic with every service, and show what came of it.

    Starts its own services on free ports, trains, writes report.json and report.html, and stops everything.
    While it runs, `rollwise jobs`, `rollwise watch` and `rollwise score` work from another terminal.
    """
    from deploy.launcher import Stack, StackOptions
    from deploy.ports import Ports
    from services.cli.stack_view import start_with_progress, stop_with_progress
    from services.cli.up import terminable

    began = time.monotonic()
    spec = demo_spec(policy, steps, seed, preset)
    state = _scratch(out)
    stack = Stack(StackOptions(state, Ports.any_free()))
    with terminable() as interrupted:
        finished = False
        try:
            prepare_policy(policy, state)
            start_with_progress(stack)
            assert stack.endpoints is not None
            note(f"services are up ({time.monotonic() - began:.0f} s); trainer API at {stack.endpoints.api_url}")
            report = _train(stack, spec, lambda: time.monotonic() - began)
            _show(report, out, as_json)
            finished = True
            if keep_up:
                note(f"services keep running at {stack.endpoints.api_url}; Ctrl-C stops them")
                _wait(stack, interrupted)
        except CliError as error:
            logs = "" if str(stack.logs) in error.todo or not stack.logs.is_dir() else f"; logs: {stack.logs}"
            raise type(error)(error.what, f"{error.todo}{logs}".removeprefix("; "), **_code(error)) from error
        finally:
            stop_with_progress(stack)
            if finished:
                shutil.rmtree(state, ignore_errors=True)
            else:
                note(f"logs and state are kept in {state}; delete the folder when you are done with it")


def demo_spec(policy: str, steps: int | None, seed: int, preset: str) -> dict[str, Any]:
    """The demo's job. Raises UsageProblem for a policy or preset that it does not know."""
    from services.cli.spec_input import validate
    from trainer.policies.presets import demo_job

    try:
        job = demo_job(policy, steps=steps, seed=seed)
    except (KeyError, ValueError) as error:
        raise UsageProblem(f"--policy {policy}: {error}", "the demo knows smollm2 and tiny") from error
    given = job.model_dump(mode="json")
    if preset != given["preset"]:
        given["preset"] = preset
        given["algorithm"] = {}
    return validate(given)


def prepare_policy(policy: str, state: Path) -> None:
    """Makes the policy's folder (converted or warm-started once, then cached), in a process of its own."""
    code = "import sys; from trainer.policies import resolve_policy; print(resolve_policy(sys.argv[1]))"
    log = state / "logs" / "policy.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with stderr.status(f"preparing policy {policy} (once; then it is cached)"), log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-c", code, policy], stdout=subprocess.PIPE, stderr=errors)
        try:
            output, _ = process.communicate()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise CliError(f"policy {policy} could not be prepared: {lines[-1]}", f"read {log}")
    note(f"policy {policy} is ready ({time.monotonic() - began:.0f} s): {output.decode().strip()}")


def _train(stack: Stack, spec: dict[str, Any], elapsed: Callable[[], float]) -> dict[str, Any]:
    from services.cli.client import ApiClient
    from services.cli.report import from_folder
    from services.cli.stack_view import explained
    from services.cli.watch import failure, follow
    from trainer.report import build_report

    assert stack.endpoints is not None
    with ApiClient(stack.endpoints.api_url) as client, explained():
        with stderr.status("checking data and policy"):
            record = client.submit(spec)
        note(f"submitted {record['id']}: {spec['steps']} steps of {spec['prompts_per_step']} prompts")
        record = follow(client, record["id"], check=stack.check)
        if record.get("state") != "succeeded":
            raise failure(record)
    return build_report(**{**from_folder(stack.state_dir / "jobs" / record["id"]), "job": record}, seconds=elapsed())


def _show(report: dict[str, Any], out: Path, as_json: bool) -> None:
    from trainer.report import write_report

    data, page = write_report(report, out)
    if as_json:
        print_json(summary(report, data, page))
        return
    from rich.table import Table

    share = report["rollouts"] / report["rollouts_fixed"] if report["rollouts_fixed"] else 0.0
    groups = report["groups"]
    table = Table(title="Rollwise demo", box=None, show_header=False, title_justify="left", pad_edge=False)
    rows = {
        "policy": f"{report['policy']}, preset {report['preset']}, seed {report['seed']}, {report['steps']} steps",
        "accuracy (held out)": f"{_percent(report['accuracy_before'])} → {_percent(report['accuracy_after'])}",
        "rollouts": f"{report['rollouts']} of {report['rollouts_fixed']} that 16 a prompt would take ({share:.0%})",
        "groups": f"{groups['submitted']} submitted = {groups['trained']} trained + {groups['filtered']} filtered + "
        f"{groups['dropped']} dropped + {groups['in_flight']} in flight",
        "time": f"{report['seconds']:.0f} s",
        "report": f"{page}  {data}",
    }
    for label, value in rows.items():
        table.add_row(f"[bold]{label}[/]", value)
    stdout.print(table)


def summary(report: dict[str, Any], data: Path, page: Path) -> dict[str, Any]:
    """The one object that `demo --json` prints."""
    return {
        **{key: report[key] for key in _KEYS},
        "seed": report["seed"],
        "preset": report["preset"],
        "job_id": report["job_id"],
        "brier_prior": report["calibration"]["brier_prior"],
        "brier_running_mean": report["calibration"]["brier_running_mean"],
        "report_json": str(data),
        "report_html": str(page),
    }


def _wait(stack: Stack, interrupted: Any) -> None:
    from services.cli.stack_view import explained

    with explained(), contextlib.suppress(KeyboardInterrupt):
        stack.wait(interrupted)


def _scratch(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="state-", dir=out.resolve()))
    except OSError as error:
        raise UsageProblem(f"--out {out}: {error.strerror}", "give a folder that can be written to") from error


def _code(error: CliError) -> dict[str, int]:
    return {"code": error.code} if type(error) is CliError else {}


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
