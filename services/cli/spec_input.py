"""A job specification from a file, options and `--set key.path=value`, checked before it goes anywhere.

Later sources win: file, then options, then --set. Says in one line per fault what is wrong and where.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.cli.output import UsageProblem


def read_spec_file(path: Path) -> dict[str, Any]:
    """A JSON or YAML object. Raises UsageProblem."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}", "give a JSON or YAML file with a job specification") from error
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{path} is not UTF-8 (byte {error.start + 1})", "save it as UTF-8") from error
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except RecursionError as error:
        raise UsageProblem(f"{path} is nested too deeply for a job specification") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageProblem(f"{path} is not valid {path.suffix.removeprefix('.').upper() or 'YAML'}: {error}") from error
    if not isinstance(value, dict):
        raise UsageProblem(
            f"{path} holds {_kind(value)}, not an object", "start from `rollwise submit --dry-run --json`"
        )
    return value


def data_source(text: str) -> dict[str, Any]:
    """What --data means: a JSONL file; `gym:TASK[,TASK]:SIZE[:SEED]`; or a Hugging Face data set `hub:NAME[:SPLIT]`."""
    scheme, colon, rest = text.partition(":")
    if scheme == "gym" and colon:
        return {"reasoning_gym": _gym_tasks(text, rest)}
    if scheme == "hub" and colon:
        name, _, split = rest.partition(":")
        if not name:
            raise UsageProblem(f"--data {text}: the data set's name is missing", "for example hub:openai/gsm8k:train")
        return {"hub": {"name": name, **({"split": split} if split else {})}}
    path = Path(text)
    if not path.is_file():
        raise UsageProblem(
            f"--data {text}: no such file",
            "give a JSONL file, gym:TASK:SIZE[:SEED] (reasoning-gym), or hub:NAME[:SPLIT] (Hugging Face)",
        )
    return {"path": str(path.resolve())}


def _gym_tasks(text: str, rest: str) -> list[dict[str, Any]]:
    names, *numbers = rest.split(":")
    if not names or not 1 <= len(numbers) <= 2 or not all(number.isdigit() for number in numbers):
        raise UsageProblem(f"--data {text}: expected gym:TASK[,TASK]:SIZE[:SEED]", "for example gym:chain_sum:2000:0")
    size, seed = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
    return [{"task": name, "size": size, "seed": seed} for name in names.split(",")]


def apply_set(spec: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`spec` with each `key.path=value` laid in; values are JSON when they parse as such, else text.

    A number in the path indexes a list. Raises UsageProblem naming the assignment.
    """
    changed: dict[str, Any] = json.loads(json.dumps(spec))
    for assignment in assignments:
        path, equals, raw = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UsageProblem(
                f"--set {assignment}: expected key.path=value", "for example --set optimizer.learning_rate=2e-5"
            )
        _put(changed, keys, _value(raw), assignment)
    return changed


def _put(target: Any, keys: list[str], value: Any, assignment: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        slot: Any = key
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise UsageProblem(
                    f"--set {assignment}: {'.'.join(keys[:depth])} is a list of {len(target)}; give an index"
                )
            slot = int(key)
        elif not isinstance(target, dict):
            raise UsageProblem(f"--set {assignment}: {'.'.join(keys[:depth])} is {_kind(target)}, it has no {key!r}")
        if last:
            target[slot] = value
        elif isinstance(target, list):
            target = target[slot]
        else:
            if target.get(slot) is None:
                target[slot] = {}
            target = target[slot]


def _value(raw: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def validate(spec: dict[str, Any]) -> dict[str, Any]:
    """The full specification with every default filled in. Raises UsageProblem with a line a fault."""
    from trainer.config import JobSpec

    try:
        return JobSpec.model_validate(spec).model_dump(mode="json")
    except ValidationError as error:
        lines = [f"  - {_where(fault['loc'])}: {_message(fault)}" for fault in error.errors()]
        count = len(lines)
        what = f"the job specification has {count} fault{'s' if count > 1 else ''}\n" + "\n".join(lines)
        raise UsageProblem(what, "`rollwise submit --help` shows options; docs list every key") from error


def _where(location: Sequence[Any]) -> str:
    return ".".join(str(part) for part in location) or "specification"


def _message(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "no such key"
    return str(fault["msg"]).removeprefix("Value error, ")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")
