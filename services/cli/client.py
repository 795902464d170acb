"""The trainer's HTTP API and the value prior's REST API, as the commands see them.

Every failure becomes a CliError that says what happened and what to do; RFC 9457 problems are told in their own words.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx

from services.cli.output import CliError, Unreachable, UsageProblem

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_NOT_FOUND, _BAD_INPUT, _UNAUTHORISED = 404, (400, 409, 413, 415, 422, 428), (401, 403)


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: str
    kind: str
    data: Any


class HttpClient:
    """JSON over HTTP with one time limit a request (seconds)."""

    def __init__(self, url: str, *, what: str, timeout: float = 30.0) -> None:
        self.url = url
        self._what = what
        token = os.environ.get("ROLLWISE_CLI_AUTH_TOKEN")
        self._http = httpx.Client(
            base_url=url,
            timeout=timeout,
            headers={"authorization": f"Bearer {token}"} if token else {},
            # A proxy of the environment is of no use for services on this machine.
            trust_env=httpx.URL(url).host not in _LOOPBACK,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON. Raises Unreachable, UsageProblem (refused input) or CliError (anything else)."""
        try:
            answer = self._http.request(method, path, **options)
        except httpx.UnsupportedProtocol as error:
            raise UsageProblem(
                f"{self.url!r} is no address of {self._what}", "give one like http://127.0.0.1:8100"
            ) from error
        except httpx.HTTPError as error:
            raise self.out_of_reach(error) from error
        if answer.is_success:
            return answer.json() if answer.content else None
        raise self.problem(answer)

    def out_of_reach(self, error: Exception) -> Unreachable:
        """The error for a service that does not answer."""
        return Unreachable(
            f"{self._what} does not answer at {self.url} ({error or type(error).__name__})",
            "start it with `rollwise up` (another terminal), look with `rollwise doctor`, or give its address",
        )

    def problem(self, answer: httpx.Response) -> CliError:
        """An RFC 9457 answer as an error of ours: its title and detail, and each of its `errors` on a line."""
        try:
            body = answer.json()
        except ValueError:
            body = {}
        if not isinstance(body, dict):
            body = {}
        what = ": ".join(str(body[key]) for key in ("title", "detail") if body.get(key)) or answer.text[:200]
        if len(body.get("errors") or []) > 1:
            what = what.split("\n")[0]  # the detail may have the rows as well
        for item in body.get("errors") or []:
            what += f"\n  - {_one_problem(item)}"
        todo = str(body.get("todo") or body.get("hint") or "")
        if answer.status_code in _UNAUTHORISED:
            return UsageProblem(what, todo or "set ROLLWISE_CLI_AUTH_TOKEN to the service's token")
        if body.get("code") == "job_not_found":
            return UsageProblem(what, todo or "`rollwise jobs` lists jobs")
        if answer.status_code == _NOT_FOUND or answer.status_code in _BAD_INPUT:
            return UsageProblem(what, todo)
        if answer.status_code in (502, 503, 504):
            return Unreachable(f"{self._what}: {what}", todo or "try again, or look with `rollwise doctor`")
        return CliError(f"{self._what} answered {answer.status_code}: {what}", todo or "its log says more")


def _one_problem(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    places = [f"row {item['row']}"] if item.get("row") is not None else []
    places += [str(item["field"])] if item.get("field") else []
    text = str(item.get("message") or item.get("detail") or json.dumps(item))
    return f"{', '.join(places)}: {text}" if places else text


def _segment(job_id: str) -> str:
    """An id as one part of a path, whatever is in it. Raises UsageProblem for what no URL can carry."""
    if job_id.strip(".") == "" or not job_id.isprintable():
        raise UsageProblem(f"{job_id!r} is no job's id", "`rollwise jobs` lists them")
    return quote(job_id, safe="")


class ApiClient(HttpClient):
    """The trainer API: jobs, events, checkpoints, metrics, trail."""

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        super().__init__(url, what="the trainer API", timeout=timeout)

    def submit(self, spec: dict[str, Any], *, key: str | None = None) -> dict[str, Any]:
        """Creates a job. The same `key` twice gives the same job."""
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        # The preflight reads all data and asks the verifier about every gold answer.
        return self._object("POST", "/v1/jobs", json=spec, headers=headers, timeout=900.0)

    def job(self, job_id: str) -> dict[str, Any]:
        """One job."""
        return self._object("GET", f"/v1/jobs/{_segment(job_id)}")

    def jobs(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest jobs first."""
        return cast(list[dict[str, Any]], self._object("GET", "/v1/jobs", params={"limit": limit})["data"])

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Asks a job to end."""
        return self._object("POST", f"/v1/jobs/{_segment(job_id)}/cancel")

    def resume(self, job_id: str) -> dict[str, Any]:
        """Continues a job from its last checkpoint under a new lineage."""
        return self._object("POST", f"/v1/jobs/{_segment(job_id)}/resume")

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """A job's checkpoints."""
        return cast(list[dict[str, Any]], self._object("GET", f"/v1/jobs/{_segment(job_id)}/checkpoints")["data"])

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """A job's series: one object a step."""
        return cast(list[dict[str, Any]], self._object("GET", f"/v1/jobs/{_segment(job_id)}/metrics")["data"])

    def trail(self, job_id: str) -> list[dict[str, Any]]:
        """One object a group: prior, rewards, decisions, state."""
        return list(self._lines(f"/v1/jobs/{_segment(job_id)}/trail"))

    def _lines(self, path: str) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("GET", path, timeout=120.0) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self.problem(answer)
                for line in answer.iter_lines():
                    if line.strip():
                        yield json.loads(line)
        except httpx.HTTPError as error:
            raise self.out_of_reach(error) from error

    def events(self, job_id: str, *, after: str | None = None, patience: float = 60.0) -> Iterator[Event]:
        """A job's events until the server ends the stream; a broken connection is taken up where it ended.

        Raises Unreachable when nothing can be had for `patience` seconds.
        """
        last, silent_since = after, time.monotonic()
        while True:
            headers = {"accept": "text/event-stream"}
            if last is not None:
                headers["last-event-id"] = last
            try:
                with self._http.stream(
                    "GET", f"/v1/jobs/{_segment(job_id)}/events", headers=headers, timeout=_EVENTS
                ) as answer:
                    if not answer.is_success:
                        answer.read()
                        raise self.problem(answer)
                    for event in parse_events(answer.iter_lines()):
                        silent_since = time.monotonic()
                        last = event.id or last
                        yield event
                return
            except httpx.HTTPError as error:
                if time.monotonic() - silent_since > patience:
                    raise self.out_of_reach(error) from error
                time.sleep(0.5)

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        return cast(dict[str, Any], self.request(method, path, **options))


# The server sends a ping well within this time.
_EVENTS = httpx.Timeout(30.0, read=60.0)


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events from the lines of a stream (HTML Living Standard, section 9.2); comments are pings."""
    event_id, kind, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                text = "\n".join(data)
                yield Event(event_id, kind, _json_or_text(text))
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            event_id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
