"""`rollwise replay`: every recorded allocation decision, taken again offline."""

from __future__ import annotations

from typing import Annotated

import typer


def replay(
    *,
    source: Annotated[str, typer.Argument(metavar="JOB|trail.jsonl", help="A job's id, or its trail on disk.")],
    group: Annotated[str | None, typer.Option(help="Only groups whose prompt id is this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a decision.")] = False,
) -> None:
    """Replay the decisions of a job."""
    raise NotImplementedError
