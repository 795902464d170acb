"""`rollwise score`: how likely a policy is to solve a prompt, asked of the value prior over REST."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.output import UsageProblem, print_json, stdout

_BATCH = 256


def score(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, JSONL is read.")] = None,
    policy_id: Annotated[
        str, typer.Option("--policy-id", help="Whose success: a job's id, or any name of yours.")
    ] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help='JSONL rows {"prompt": ..., "id"?: ...}; - is standard input.')
    ] = None,
    url: Annotated[str | None, typer.Option(help="The value prior's REST address.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a prompt.")] = False,
) -> None:
    """Predict success rates before any rollout.

    Examples: rollwise score --policy-id job-12ab "What is 2 + 2?"     rollwise score -f prompts.jsonl --json
    """
    from deploy.endpoints import DEFAULT_VALUE_PRIOR, find
    from services.cli.client import HttpClient

    rows = [{"prompt_id": "", "text": prompt} for prompt in prompts or []]
    if file is not None or not rows:
        rows += _read(file)
    if not rows:
        raise UsageProblem(
            "no prompt was given", 'give prompts as arguments, or JSONL rows {"prompt": ...} with --file'
        )
    address = find(url, "ROLLWISE_CLI_VALUE_PRIOR_URL", "value_prior_url", DEFAULT_VALUE_PRIOR)
    priors: list[dict[str, Any]] = []
    with HttpClient(address, what="the value prior") as client:
        for start in range(0, len(rows), _BATCH):
            body = {"policy_id": policy_id or "unknown", "prompts": rows[start : start + _BATCH]}
            priors += client.request("POST", "/v1/score", json=body)["priors"]
    if as_json:
        for row, prior in zip(rows, priors, strict=True):
            print_json({**prior, "text": row["text"]})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("P(success)", "±", "rests on", "prompt"):
        table.add_column(heading)
    for row, prior in zip(rows, priors, strict=True):
        source = str(prior.get("source", "")).removeprefix("PRIOR_SOURCE_").lower()
        table.add_row(f"{prior['value']:.3f}", f"{prior['uncertainty']:.3f}", source, row["text"][:100])
    stdout.print(table)


def _read(file: Path | None) -> list[dict[str, str]]:
    if file is None or str(file) == "-":
        if file is None and sys.stdin.isatty():
            return []
        content, name = sys.stdin.buffer.read(), "standard input"
    else:
        try:
            content, name = file.read_bytes(), str(file)
        except OSError as error:
            raise UsageProblem(f"{file}: {error.strerror}", "give a JSONL file, or - for standard input") from error
    rows = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{name}, line {number}"))
    return rows


def _row(line: bytes, where: str) -> dict[str, str]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{where}: not UTF-8 (byte {error.start + 1})", "save it as UTF-8") from error
    except RecursionError as error:
        raise UsageProblem(f"{where}: not JSON (nested too deeply)") from error
    except ValueError as error:
        raise UsageProblem(
            f"{where}: not JSON ({error})", 'each line is an object {"prompt": ..., "id"?: ...}'
        ) from error
    text = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UsageProblem(f"{where}: no text under `prompt`", 'each line is an object {"prompt": ..., "id"?: ...}')
    return {"prompt_id": str(row.get("id", "")), "text": text}
