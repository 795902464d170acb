"""Data sets: rows from a JSONL file, from reasoning-gym or from the Hugging Face hub, checked as a whole.

Everything that is wrong is reported at once, with row numbers. Rows are known by their ids, never by their text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.common.errors import InvalidArgument, Unavailable
from trainer.config import DataSource, GymTask, HubData
from trainer.rows import DataError, DataRow, Problem, problems_of


@dataclass(frozen=True)
class Entry:
    """A checked row with its id; `number` is its place in the source, counted from 1."""

    number: int
    id: str
    row: DataRow

    @property
    def text(self) -> str:
        """What is asked, without formatting: the prompt, or the messages one a line."""
        if self.row.prompt is not None:
            return self.row.prompt
        return "\n".join(f"{m.role}: {m.content}" for m in self.row.messages or [])


@dataclass(frozen=True)
class DataSet:
    """Checked rows, in the source's order. `source` names it in messages."""

    source: str
    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over ids and rows: equal exactly when the same prompts would be trained."""
        digest = hashlib.sha256()
        for entry in self.entries:
            content = entry.row.model_dump(exclude_none=True, exclude={"id"})
            digest.update(json.dumps([entry.id, content], sort_keys=True, ensure_ascii=False).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def without_texts_of(self, other: DataSet) -> tuple[DataSet, int]:
        """This data set without the rows whose text is also in `other`, and how many those were.

        Training data is cleaned of held-out prompts this way: a held-out score over prompts that were trained on
        would say nothing. Raises InvalidArgument when no row is left.
        """
        texts = {entry.text for entry in other.entries}
        kept = tuple(entry for entry in self.entries if entry.text not in texts)
        if not kept:
            raise InvalidArgument(f"every row of {self.source} is also in the held-out data ({other.source})")
        return DataSet(self.source, kept), len(self.entries) - len(kept)


def load_data(source: DataSource, *, folder: Path | None = None) -> DataSet:
    """Reads and checks a data source; relative paths are taken from `folder` (default: the working folder).

    Raises DataError with every bad row, InvalidArgument for a source that does not exist or is empty, Unavailable
    when the hub cannot be reached.
    """
    if source.path is not None:
        path = (folder or Path.cwd()) / source.path
        return _checked(str(source.path), _read_jsonl(path), source.limit)
    if source.hub is not None:
        return _checked(f"hub data set {source.hub.name}", _read_hub(source.hub), source.limit)
    assert source.reasoning_gym is not None
    seed = hash_seed(*(f"{t.task}:{t.seed}" for t in source.reasoning_gym))
    return _checked("reasoning-gym", _read_gym(source.reasoning_gym, seed), source.limit)


def hash_seed(*parts: str | int) -> int:
    """A stable seed in [0, 2^63) from names and numbers, the same in every process and on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _checked(source: str, rows: Iterator[tuple[int, dict[str, Any] | Problem]], limit: int | None) -> DataSet:
    entries: list[Entry] = []
    problems: list[Problem] = []
    first_of: dict[str, int] = {}
    count = 0
    for number, raw in rows:
        if limit is not None and count >= limit:
            break
        count += 1
        if isinstance(raw, Problem):
            problems.append(raw)
            continue
        try:
            row = DataRow.model_validate(raw)
        except ValidationError as error:
            problems.extend(problems_of(number, error))
            continue
        identity = row.id if row.id is not None else str(number)
        if identity in first_of:
            message = f"id {identity!r} is also the id of row {first_of[identity]}; ids must differ"
            problems.append(Problem(number, "id", message))
            continue
        first_of[identity] = number
        entries.append(Entry(number, identity, row))
    if problems:
        raise DataError(source, problems)
    if not entries:
        raise InvalidArgument(f"{source} is empty: it holds no row to train or evaluate on", reason="EMPTY_DATA")
    return DataSet(source, tuple(entries))


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    if "\x00" in str(path):
        raise InvalidArgument(f"{str(path)!r} is no file's path: it holds a NUL character")
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"  # a device or a pipe may never end
            raise InvalidArgument(f"{path} is {kind}; give the path of a JSONL file")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parsed(number, line)
    except FileNotFoundError:
        raise InvalidArgument(f"there is no data file {path}") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _parsed(number: int, line: bytes) -> dict[str, Any] | Problem:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        return Problem(number, "", f"not UTF-8 (byte {error.start + 1})")
    except RecursionError:
        return Problem(number, "", "not JSON (nested too deeply)")
    except ValueError as error:
        return Problem(number, "", f"not JSON ({error})")
    if not isinstance(row, dict):
        return Problem(number, "", f"a row must be an object, not {type(row).__name__}")
    return row


def _read_gym(tasks: Sequence[GymTask], seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Entries of all tasks, shuffled together so that any stretch holds the tasks in their proportions."""
    entries = [
        (f"{task.task}-{place}-{index}", task.task, entry)
        for place, task in enumerate(tasks)
        for index, entry in enumerate(_gym_entries(task))
    ]
    if len(tasks) > 1:
        random.Random(seed).shuffle(entries)
    for number, (identity, name, entry) in enumerate(entries, start=1):
        # The task's own scorer judges, also where the gold is a plain number: mathematically the question
        # "28 + 47" equals its answer, and a policy soon learns to echo it.
        gym = {"task": name, "entry": json.loads(json.dumps(entry, default=str))}
        yield number, {"id": identity, "prompt": entry["question"], "gym": gym}


def _gym_entries(task: GymTask) -> list[dict[str, Any]]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if task.task not in DATASETS:
        raise InvalidArgument(f"unknown reasoning-gym task {task.task!r}{did_you_mean(task.task, list(DATASETS))}")
    reserved = {"seed", "size"} & set(task.config)
    if reserved:
        raise InvalidArgument(f"task {task.task}: give {', '.join(sorted(reserved))} beside config, not in it")
    try:
        return list(create_dataset(task.task, seed=task.seed, size=task.size, **task.config))
    except (TypeError, AssertionError, ValueError) as error:
        raise InvalidArgument(f"task {task.task} refuses its config {task.config}: {error}") from error


def _read_hub(hub: HubData) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    from datasets import load_dataset

    try:
        table = load_dataset(hub.name, hub.config, split=hub.split, revision=hub.revision)
    except Exception as error:
        raise Unavailable(
            f"data set {hub.name!r} could not be loaded from the hub ({type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}). Without a "
            "connection, save it as JSONL on a machine that has one and give its path under data.path",
            reason="HUB_UNREACHABLE",
        ) from error
    missing = [name for name in (hub.prompt_column, hub.answer_column) if name not in table.column_names]
    if missing:
        raise InvalidArgument(
            f"data set {hub.name!r} has no column {', '.join(missing)}; its columns are {', '.join(table.column_names)}"
        )
    for number, record in enumerate(table, start=1):
        prompt, answer = record[hub.prompt_column], record[hub.answer_column]
        row: dict[str, Any] = {"answer": answer}
        row["messages" if isinstance(prompt, list) else "prompt"] = prompt
        yield number, row


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint to append to "unknown X": the closest names, or a few of the known ones."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    shown = sorted(known)
    return f"; known: {', '.join(shown[:12])}{', ...' if len(shown) > 12 else ''}"
