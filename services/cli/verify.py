"""`rollwise verify FILE.jsonl`: judges rows {gold, answer} in this process's own workers; needs no server."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

if TYPE_CHECKING:
    from services.verifier.verdicts import Verdict

MAX_LINE_BYTES = 16 << 20
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_WINDOW_PER_WORKER = 64
_PROGRESS_EVERY_SECONDS = 0.1
_LIMIT_SECONDS = 10.0


class BadRow(ValueError):
    """A line that is no row {gold, answer}."""


@dataclass(frozen=True)
class Row:
    """One line: the gold and the completion that answers it."""

    gold: str
    answer: str


def verify_file(
    path: str | Path,
    *,
    json_output: bool,
    workers: int | None = None,
    domain: str = "math",
    out: IO[str] | None = None,
    err: IO[str] | None = None,
) -> int:
    """Judge every row of a JSONL file ("-" is standard input) and print the verdicts in the file's order.

    With json_output one line a row, as soon as it is known: {"row": 1-based line number, "verdict":
    correct|wrong|no_verdict, "score": 0..1, "reason"}; else a progress bar and a summary by reason. Memory stays
    bounded for any length. Returns the exit code: 0; 2 where a line is no row (each is named on err, all others are
    judged and printed) or the file cannot be read; 130 after Ctrl-C.
    """
    out, err = out or sys.stdout, err or sys.stderr
    if domain != "math":
        print(f"error: --domain {domain}: only 'math' is built so far", file=err)
        return EXIT_BAD_INPUT
    if workers is not None and workers < 1:
        print(f"error: --workers must be at least 1, not {workers}", file=err)
        return EXIT_BAD_INPUT
    try:
        with contextlib.ExitStack() as stack:
            stream: BinaryIO = sys.stdin.buffer if str(path) == "-" else stack.enter_context(Path(path).open("rb"))
            return _run(stream, workers or min(os.cpu_count() or 1, 8), json_output, out, err)
    except OSError as error:
        print(f"error: cannot read {path}: {error.strerror or error}", file=err)
        return EXIT_BAD_INPUT


def _run(stream: BinaryIO, workers: int, json_output: bool, out: IO[str], err: IO[str]) -> int:
    from services.verifier import tasks, worker
    from services.verifier.pool import PoolOptions, PoolStopped, VerdictPool, WorkerStartError

    pool = VerdictPool(PoolOptions(workers=workers, limit_seconds=_LIMIT_SECONDS, domains=(worker.MATH,)))
    pending: queue.Queue[tuple[int, Future[Verdict] | BadRow] | None] = queue.Queue(workers * _WINDOW_PER_WORKER)
    printer = _Printer(pending, json_output, out, err)
    try:
        printer.start()
        started = False
        for number, item in _rows(stream):
            handed: Future[Verdict] | BadRow
            if isinstance(item, BadRow):
                handed = item
            else:
                if not started:
                    pool.start()
                    started = True
                handed = pool.submit(tasks.judge_math(item.gold, item.answer))
            if not printer.hand(number, handed):
                break  # nobody reads what is printed any more
        printer.finish()
    except KeyboardInterrupt:
        printer.abandon()
        print("interrupted: the rows not yet printed were not judged", file=err)
        return EXIT_INTERRUPTED
    except (WorkerStartError, PoolStopped) as error:
        printer.abandon()
        print(f"error: {error}", file=err)
        return 1
    finally:
        pool.stop()
    return printer.summary()


def _rows(stream: BinaryIO) -> Iterator[tuple[int, Row | BadRow]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, BadRow(f"longer than {MAX_LINE_BYTES >> 20} MiB")
        elif line.strip():
            try:
                yield number, parse_row(line)
            except BadRow as error:
                yield number, error


def parse_row(line: bytes) -> Row:
    """The row in one line. Numbers stand for their own digits. Raises BadRow with what is wrong and wanted."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start + 1})") from error
    try:
        data = json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_number)
    except RecursionError as error:
        raise BadRow("not JSON: nested too deeply") from error
    except ValueError as error:
        raise BadRow(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRow('must be an object like {"gold": "12", "answer": "\\\\boxed{12}"}')
    return Row(_text(data, "gold"), _text(data, "answer"))


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _text(data: dict[str, Any], name: str) -> str:
    if name not in data:
        raise BadRow(f'has no "{name}"; a row is {{"gold": ..., "answer": ...}}')
    value = data[name]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadRow(f'"{name}" must be a string or a number, not {kind}')
    return value


class _Printer(threading.Thread):
    """Prints verdicts in order as they come, while the main thread reads on."""

    def __init__(
        self,
        pending: queue.Queue[tuple[int, Future[Verdict] | BadRow] | None],
        json_output: bool,
        out: IO[str],
        err: IO[str],
    ) -> None:
        super().__init__(name="verify-printer", daemon=True)
        self._pending, self._json, self._out, self._err = pending, json_output, out, err
        self._gone = threading.Event()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bad = 0
        self._score = 0.0
        self._began = time.monotonic()

    def hand(self, number: int, item: Future[Verdict] | BadRow) -> bool:
        """Queue one row; waits while the window is full. False where printing has ended."""
        while not self._gone.is_set():
            with contextlib.suppress(queue.Full):
                self._pending.put((number, item), timeout=0.2)
                return True
        return False

    def finish(self) -> None:
        """Wait until everything handed over is printed."""
        while not self._gone.is_set():
            with contextlib.suppress(queue.Full):
                self._pending.put(None, timeout=0.2)
                break
        while self.is_alive():
            self.join(0.2)  # short waits leave Ctrl-C working

    def abandon(self) -> None:
        """Print nothing more."""
        self._gone.set()

    def run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                progress = None if self._json else stack.enter_context(self._progress())
                last = 0.0
                while (entry := self._pending.get()) is not None:
                    self._take(*entry)
                    if self._gone.is_set():
                        return
                    now = time.monotonic()
                    if progress is not None and now - last > _PROGRESS_EVERY_SECONDS:
                        done = sum(self._counts.values())
                        progress.update(progress.task_ids[0], completed=done, rate=done / (now - self._began))
                        last = now
        except BrokenPipeError:
            # The reader of our output left, as `head` does. Python would complain again at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
        finally:
            self._gone.set()

    def _take(self, number: int, item: Future[Verdict] | BadRow) -> None:
        if isinstance(item, BadRow):
            self._bad += 1
            print(f"error: line {number}: {item}", file=self._err, flush=True)
            return
        verdict = item.result()
        if self._gone.is_set():
            return
        self._counts[verdict.kind.value, verdict.word] += 1
        self._score += verdict.score
        if self._json:
            row = {"row": number, "verdict": verdict.kind.value, "score": verdict.score, "reason": verdict.reason}
            print(json.dumps(row), file=self._out, flush=True)

    def _progress(self) -> Any:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        progress = Progress(
            SpinnerColumn(),
            TextColumn("judged {task.completed} rows"),
            TextColumn("{task.fields[rate]:.0f}/s"),
            TimeElapsedColumn(),
            console=Console(file=self._err),
            transient=True,
        )
        progress.add_task("judging", total=None, rate=0.0)
        return progress

    def summary(self) -> int:
        """Print the summary (not with --json) and give the exit code."""
        if not self._json:
            self._table()
        if self._bad:
            plural = "line was" if self._bad == 1 else "lines were"
            print(f"error: {self._bad} {plural} not judged; see above", file=self._err)
        return EXIT_BAD_INPUT if self._bad else 0

    def _table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table("verdict", "reason", "rows")
        for (kind, word), count in sorted(self._counts.items()):
            table.add_row(kind, word, str(count))
        console = Console(file=self._out)
        console.print(table)
        judged = sum(n for (kind, _), n in self._counts.items() if kind != "no_verdict")
        total = sum(self._counts.values())
        share = f"mean score {self._score / judged:.3f} over {judged} judged rows" if judged else "no row was judged"
        console.print(f"{total} rows in {time.monotonic() - self._began:.1f} s; {share}", highlight=False)


def verify(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", help="Rows {gold, answer}, one a line; - is stdin.")],
    json_output: Annotated[
        bool, typer.Option("--json", help="One line of JSON a row: {row, verdict, score, reason}, in order.")
    ] = False,
    domain: Annotated[str, typer.Option(help="What the golds are; 'math' is built so far.")] = "math",
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one a core, up to 8.")] = None,
) -> None:
    """Judge answers against golds, without any server.

    The verdict is correct, wrong or no_verdict (the gold cannot be read, or the grader gave up). The last answer of a
    completion counts, and nothing inside unfinished thinking. Exit code 2: a line was no row; all others were judged.
    """
    raise typer.Exit(verify_file(file, json_output=json_output, workers=workers, domain=domain))
