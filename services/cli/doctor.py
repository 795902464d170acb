"""`rollwise doctor`: is everything here that Rollwise needs, and does what runs serve?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import FAILED, print_json, stdout

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def doctor(
    *,
    state_dir: Annotated[Path, typer.Option(help="Where jobs are kept.")] = Path("run"),
    redis_url: Annotated[str | None, typer.Option(help="Check this Redis, even if no stack runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: {ok, checks: [...]}.")] = False,
) -> None:
    """Check this machine, what is installed and every service that runs; say what to do about what is wrong.

    Exit code 1 when a check failed; warnings do not count.
    """
    from deploy.endpoints import running_stack
    from services.cli import checks
    from services.common.paths import cache_dir

    found: list[checks.Check] = []

    def add(check: checks.Check) -> None:
        found.append(check)
        if not as_json:
            todo = f"\n       try: {check.todo}" if check.todo else ""
            line = f"{check.name:<22} {check.detail}{todo}".replace("[", "\\[")
            stdout.print(f"{_MARKS[check.status]} {line}", highlight=False)

    stack = running_stack()
    for check in checks.machine(Path(stack.state_dir) if stack else state_dir, cache_dir()):
        add(check)
    address = redis_url or (stack.redis_url if stack else None)
    if address:
        add(checks.redis(address))
    if stack is None:
        add(checks.Check("services", "warn", "no stack of yours runs on this machine", "start one with `rollwise up`"))
    else:
        for check in checks.services(stack):
            add(check)
    failed = any(check.status == "fail" for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [check.as_dict() for check in found]})
    if failed:
        raise typer.Exit(FAILED)
