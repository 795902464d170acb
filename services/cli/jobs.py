"""`rollwise jobs` and `rollwise cancel`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from services.cli.output import note, print_json, stdout

ApiUrl = Annotated[str | None, typer.Option(help="The trainer API's address.")]


def jobs(
    *,
    job: Annotated[str | None, typer.Argument(help="Show this job; without one, list the newest.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many to list.")] = 20,
    api_url: ApiUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a job.")] = False,
) -> None:
    """List jobs, newest first, or show one with its checkpoints."""
    from services.cli.common import api

    with api(api_url) as client:
        if job is None:
            found = client.jobs(limit)
            if as_json:
                for record in found:
                    print_json(record)
            else:
                _table(found)
            return
        record = client.job(job)
        saved = client.checkpoints(job)
    if as_json:
        print_json({**record, "checkpoints": saved})
    else:
        _details(record, saved)


def cancel(
    *,
    job: Annotated[str, typer.Argument(help="The job's id.")],
    api_url: ApiUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """End a job; `rollwise resume` can take it up again from its last checkpoint."""
    from services.cli.common import api

    with api(api_url) as client:
        record = client.cancel(job)
    if as_json:
        print_json(record)
    elif record.get("cancel_requested"):
        stdout.print(f"job {job} was asked to end", highlight=False)
    else:
        stdout.print(f"job {job} is {record['state']}", highlight=False)


def _table(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    if not found:
        note("no jobs yet; submit one with `rollwise submit`")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("job", "state", "step", "policy", "preset", "submitted", "name"):
        table.add_column(heading, overflow="fold")
    for record in found:
        progress, spec = record["progress"], record["spec"]
        table.add_row(
            record["id"],
            record["state"],
            f"{progress['step']}/{progress['steps']}",
            str(spec.get("policy", "")),
            str(spec.get("preset", "")),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record["created_at"])),
            record.get("name") or "",
        )
    stdout.print(table)


def _details(record: dict[str, Any], saved: list[dict[str, Any]]) -> None:
    progress, spec = record["progress"], record["spec"]
    lines = [
        f"{record['id']}  {record['state']}  {record.get('name') or ''}",
        f"policy {spec.get('policy')}, preset {spec.get('preset')}, seed {spec.get('seed')}",
        f"step {progress['step']} of {progress['steps']}, policy version {progress['policy_version']}, "
        f"lineage {progress['lineage']}, {progress['rollouts']} rollouts",
        f"groups: {progress['submitted']} submitted = {progress['trained']} trained + "
        f"{progress['filtered']} filtered + {progress['dropped']} dropped + {progress['in_flight']} in flight",
    ]
    error = record.get("error")
    if error:
        lines.append(f"error: {error['message']}")
    lines += [f"checkpoint at step {item['step']}: {item['path']}" for item in saved]
    stdout.print("\n".join(lines), highlight=False, markup=False)
