"""`rollwise replay`: every recorded allocation decision, taken again offline, by the recorded rule or another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.output import FAILED, CliError, UsageProblem, note, print_json, stdout

if TYPE_CHECKING:
    from services.allocator.replay import Replayed
    from services.allocator.stopping import Budget

_ROWS_SHOWN = 60


@dataclass(frozen=True)
class Group:
    """One line of a trail with its decisions taken again; `other` is what another rule would have bought."""

    line: dict[str, Any]
    replayed: list[Replayed]
    other: int | None = None

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return str((self.line.get("key") or {}).get("prompt_id", ""))


def replay(
    *,
    source: Annotated[str, typer.Argument(metavar="JOB|FOLDER|trail.jsonl", help="A job's id, or its trail on disk.")],
    group: Annotated[str | None, typer.Option(help="Only groups of this prompt id.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="What another rule would have bought: fixed:8 or osla:k_min=4,k_max=16,price=0.004."),
    ] = None,
    api_url: Annotated[str | None, typer.Option(help="The trainer API's address.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a decision.")] = False,
) -> None:
    """Take every recorded decision again and compare; exit code 1 when one is not reproduced.

    With --budget it also says how many rollouts another rule would have bought on the same rewards, in their order (at
    most the recorded ones).
    """
    other = parse_budget(budget) if budget else None
    lines = [line for line in _lines(source, api_url) if group is None or _prompt_id(line) == group]
    if not lines:
        raise UsageProblem(
            f"{source} has no group{f' of prompt {group}' if group else ''}", "`rollwise jobs` lists jobs"
        )
    groups = [take_again(line, other) for line in lines]
    decisions = [(each, number, one) for each in groups for number, one in enumerate(each.replayed)]
    wrong = sum(not one.reproduced for _, _, one in decisions)
    if as_json:
        for each, number, one in decisions:
            print_json(_as_dict(each, number, one))
    else:
        _table(decisions)
        note(f"{len(decisions)} decisions of {len(groups)} groups taken again, {wrong} not reproduced")
        if other is not None:
            spent = sum(len(each.line.get("rewards") or []) for each in groups)
            would = sum(each.other or 0 for each in groups)
            stdout.print(f"{budget}: {would} rollouts, recorded {spent}", highlight=False)
    if wrong:
        raise CliError(f"{wrong} of {len(decisions)} decisions were not reproduced", code=FAILED)


def take_again(line: dict[str, Any], other: Budget | None) -> Group:
    """A line's decisions, replayed. Raises UsageProblem for a line that is no group."""
    from google.protobuf.json_format import ParseDict, ParseError
    from rollwise.v1 import allocator_pb2

    from services.allocator.messages import scale_of
    from services.allocator.replay import counterfactual, replay_group
    from services.common.errors import InvalidArgument

    try:
        rule = ParseDict(line.get("budget") or {}, allocator_pb2.BudgetRule())
        scale = allocator_pb2.RewardScale(**(line.get("scale") or {}))
        message = allocator_pb2.ScoredGroup(budget=rule, scale=scale, trail=[_decision(d) for d in line["trail"]])
        replayed = replay_group(message)
        bought = None
        rewards = line.get("rewards") or []
        if other is not None and rewards:
            prior = line["trail"][0]["prior"] if line["trail"] else None
            bought = len(counterfactual(rewards, prior, other, scale_of(scale)).rewards)
    except (KeyError, TypeError, ValueError, AttributeError, ParseError, InvalidArgument) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageProblem(
            f"group {_prompt_id(line)!r} cannot be replayed: {why}", "is this a job's trail.jsonl?"
        ) from error
    return Group(line, replayed, bought)


def parse_budget(text: str) -> Budget:
    """`fixed:N` or `osla[:key=value,...]` as a rule. Raises UsageProblem."""
    from services.allocator.stopping import FixedBudget, OslaBudget
    from services.common.errors import InvalidArgument

    kind, _, rest = text.partition(":")
    hint = "for example fixed:8 or osla:k_min=4,k_max=16,price=0.004"
    try:
        if kind == "fixed":
            return FixedBudget(int(rest))
        if kind == "osla":
            pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
            known = {"k_min": int, "k_max": int, "price": float, "round_size": int}
            unknown = set(pairs) - set(known)
            if unknown:
                raise UsageProblem(f"--budget {text}: unknown {', '.join(sorted(unknown))}", hint)
            return OslaBudget(**{name: known[name](value) for name, value in pairs.items()})
    except InvalidArgument as error:
        raise UsageProblem(f"--budget {text}: {error}", hint) from error
    except ValueError as error:
        raise UsageProblem(f"--budget {text}: {error}", hint) from error
    raise UsageProblem(f"--budget {text}: unknown rule {kind!r}", hint)


def _lines(source: str, api_url: str | None) -> Iterable[dict[str, Any]]:
    from trainer.recorder import read_lines

    path = Path(source)
    if path.is_dir():
        path = path / "trail.jsonl"
    if path.is_file():
        return read_lines(path)
    if path.suffix or len(path.parts) > 1:
        raise UsageProblem(f"{path}: no such file", "give a job's id, its folder, or its trail.jsonl")
    from services.cli.common import api

    with api(api_url) as client:
        return client.trail(source)


def _decision(line: dict[str, Any]) -> Any:
    from rollwise.v1 import allocator_pb2

    fields = {name: value for name, value in line.items() if name != "kind" and value is not None}
    kind = allocator_pb2.DecisionKind.Value(f"DECISION_KIND_{str(line['kind']).upper()}")
    return allocator_pb2.Decision(**fields, kind=kind)


def _prompt_id(line: dict[str, Any]) -> str:
    if not isinstance(line, dict) or not isinstance(line.get("key") or {}, dict):
        raise UsageProblem("a line is no group of a trail", "is this a job's trail.jsonl?")
    return str((line.get("key") or {}).get("prompt_id", ""))


def _as_dict(group: Group, number: int, one: Replayed) -> dict[str, Any]:
    return {
        "step": group.line.get("step"),
        "prompt_id": group.prompt_id,
        "decision": number,
        **group.line["trail"][number],
        "reproduced": one.reproduced,
        "difference": one.difference or None,
        "other_budget_rollouts": group.other,
    }


def _table(decisions: list[tuple[Group, int, Replayed]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in (
        "step",
        "prompt",
        "k",
        "mean",
        "prior",
        "Δ̂²",
        "weight",
        "baseline",
        "gain",
        "cost",
        "decision",
        "again",
    ):
        table.add_column(heading, justify="left" if heading in ("prompt", "decision", "again") else "right")
    for row in _rows(decisions):
        table.add_row(*row)
    stdout.print(table)
    if len(decisions) > _ROWS_SHOWN:
        note(f"the first {_ROWS_SHOWN} of {len(decisions)} are shown, and all that differ; --json prints all")


def _rows(decisions: list[tuple[Group, int, Replayed]]) -> Iterator[list[str]]:
    for shown, (group, _, one) in enumerate(decisions):
        if shown >= _ROWS_SHOWN and one.reproduced:
            continue
        seen = one.recorded
        prior = f"{seen.prior:.3f}" if seen.HasField("prior") else "-"
        numbers = [f"{value:.3f}" for value in (seen.delta_squared, seen.weight, seen.baseline)]
        prices = [f"{seen.expected_gain:.5f}", f"{seen.cost:.5f}"]
        more = f" +{seen.more}" if seen.more else ""
        verdict = "[green]same[/]" if one.reproduced else f"[red]{one.difference}[/]"
        kind = _kind(seen) + more
        yield [
            str(group.line.get("step")),
            group.prompt_id,
            str(seen.rollouts),
            f"{seen.mean:.3f}",
            prior,
            *numbers,
            *prices,
            kind,
            verdict,
        ]


def _kind(decision: Any) -> str:
    from rollwise.v1 import allocator_pb2

    return str(allocator_pb2.DecisionKind.Name(decision.kind)).removeprefix("DECISION_KIND_").lower()
