"""`rollwise watch`, and how every command that waits for a job does it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.live import Live

from services.cli.client import ApiClient, Event
from services.cli.job_view import JobView
from services.cli.output import FAILED, CliError, Unreachable, note, print_json, stderr

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0


def watch(
    *,
    job: Annotated[str, typer.Argument(help="The job's id, as `rollwise jobs` lists it.")],
    api_url: Annotated[str | None, typer.Option(help="The trainer API's address.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line an event.")] = False,
) -> None:
    """Follow a job until it ends; Ctrl-C stops watching, not the job.

    Exit code 0 when the job succeeded, else 1. Events missed while the connection was broken are caught up.
    """
    from services.cli.common import api

    with api(api_url) as client:
        finish(follow(client, job, as_json=as_json), as_json=as_json)


def follow(
    client: ApiClient, job_id: str, *, as_json: bool = False, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Shows a job until it ends and returns its last record. `check` is called about every second and may raise."""
    view = JobView()
    view.take_record(client.job(job_id))
    events: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(client, job_id, events), name="events", daemon=True).start()
    live = Live(console=stderr, refresh_per_second=4) if stderr.is_terminal and not as_json else None
    try:
        if live is not None:
            live.start()
        _pump(client, job_id, view, events, live, as_json, check)
    finally:
        if live is not None:
            live.update(view.draw())
            live.stop()
    return view.record


def _pump(
    client: ApiClient,
    job_id: str,
    view: JobView,
    events: queue.SimpleQueue[Event | Exception | None],
    live: Live | None,
    as_json: bool,
    check: Callable[[], None],
) -> None:
    """Feeds the view until the job has ended and every event of it was seen."""
    listening, looked, answered = True, 0.0, time.monotonic()
    while listening or not view.over:
        try:
            item = events.get(timeout=0.25)
        except queue.Empty:
            item = Event("", "", None)
        if item is None:
            listening = False
        elif isinstance(item, Exception):
            raise item
        elif item.kind:
            _tell(item, view.take(item), live, as_json)
        now = time.monotonic()
        if now - looked > _LOOK_SECONDS or not listening:
            looked = now
            check()
            try:
                view.take_record(client.job(job_id))
                answered = now
            except Unreachable:  # the API may be restarting
                if now - answered > _PATIENCE_SECONDS:
                    raise
            if not listening and not view.over:
                time.sleep(_LOOK_SECONDS)
        if live is not None:
            live.update(view.draw())


def _tell(event: Event, line: str | None, live: Live | None, as_json: bool) -> None:
    if as_json:
        print_json({"id": event.id, "type": event.kind, "data": event.data})
    elif live is None and line:
        note(line)


def _listen(client: ApiClient, job_id: str, events: queue.SimpleQueue[Event | Exception | None]) -> None:
    try:
        for event in client.events(job_id, patience=_PATIENCE_SECONDS):
            events.put(event)
        events.put(None)
    except Exception as error:  # noqa: BLE001 -- raised again where the command waits
        events.put(error)


def finish(record: dict[str, Any], *, as_json: bool = False) -> None:
    """Ends a command as the job ended: nothing for success, CliError with the job's own cause otherwise."""
    if record.get("state") == "succeeded":
        if not as_json:
            note(f"job {record['id']} succeeded")
        return
    raise failure(record)


def failure(record: dict[str, Any]) -> CliError:
    """What to say of a job that did not succeed."""
    error = record.get("error") or {}
    job_id = record.get("id", "?")
    if record.get("state") == "cancelled":
        return CliError(f"job {job_id} was cancelled", f"`rollwise resume {job_id}` goes on from its last checkpoint")
    cause = error.get("message") or "no cause was recorded"
    service = f" ({error['service']})" if error.get("service") else ""
    return CliError(
        f"job {job_id} {record.get('state')}{service}: {cause}",
        f"`rollwise resume {job_id}` goes on from its last checkpoint, once the cause is gone",
        code=FAILED,
    )
