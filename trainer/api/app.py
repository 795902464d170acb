"""The HTTP API: routes only. Jobs live in the store, files in the job's folder; the API itself keeps nothing."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from sse_starlette import EventSourceResponse

from services.common.errors import NotFound
from trainer.api.limits import BodyLimit
from trainer.api.problems import ProblemError, install
from trainer.checkpoint import MARKER, Checkpoints
from trainer.config import JobSpec
from trainer.jobs import Event, JobStore, is_terminal_event
from trainer.preflight import PreflightError, PreflightReport
from trainer.recorder import read_lines
from trainer.records import JobRecord
from trainer.settings import ApiSettings

REQUESTS = Counter("rollwise_api_requests_total", "HTTP requests answered.", ["method", "route", "status"])
SECONDS = Histogram("rollwise_api_request_duration_seconds", "Time to an answer's first byte.", ["method", "route"])

POLL_SECONDS = 0.25
PING_SECONDS = 10
# After the end, how long to wait for its event where a worker died between record and event.
END_GRACE_SECONDS = 2.0

Preflight = Callable[[JobSpec], Awaitable[PreflightReport]]


@dataclass
class Context:
    """What the routes work with."""

    settings: ApiSettings
    store: JobStore
    preflight: Preflight
    redis_answers: Callable[[], Awaitable[bool]]
    closing: asyncio.Event


def create_app(context: Context) -> FastAPI:
    """The application; `context` is owned, opened and closed by the caller."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.closing.set()

    app = FastAPI(title="Rollwise", version="1", description="Training jobs.", lifespan=lifespan)
    install(app)
    app.add_middleware(BodyLimit)

    @app.middleware("http")
    async def _measure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        started = time.monotonic()
        response = await call_next(request)
        route = getattr(request.scope.get("route"), "path", "other")
        REQUESTS.labels(request.method, route, response.status_code).inc()
        SECONDS.labels(request.method, route).observe(time.monotonic() - started)
        return response

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> JSONResponse:
        """Is the API able to work?"""
        if await context.redis_answers():
            return JSONResponse({"status": "ok"})
        raise ProblemError(503, "redis_unavailable", "Redis does not answer", service="redis")

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Metrics of this process, for Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    authorised = [Depends(_authorised(context.settings.token))]
    app.include_router(_jobs(context), dependencies=authorised)
    app.include_router(_records(context), dependencies=authorised)
    return app


def _authorised(token: str | None) -> Callable[[str | None], None]:
    def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if token is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise ProblemError(
                401,
                "unauthenticated",
                "this API wants a token",
                headers={"WWW-Authenticate": "Bearer"},
                todo="send the header `Authorization: Bearer TOKEN`",
            )

    return check


def _jobs(context: Context) -> APIRouter:
    """Submit, look at, cancel and resume jobs."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    store = context.store

    @router.post("", status_code=201, response_model=JobRecord)
    async def submit(
        spec: JobSpec,
        response: Response,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    ) -> Any:
        """Checks the data and queues a job. The same Idempotency-Key and body twice gives one job and one answer."""
        body = json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()
        if idempotency_key is None:
            return (await _create(spec)).model_dump(mode="json")
        reservation = await store.reserve(idempotency_key, body)
        if reservation.status == "conflict":
            raise ProblemError(
                422,
                "idempotency_key_reused",
                "this Idempotency-Key was used for another job specification",
                param="Idempotency-Key",
                todo="use a new key for a new job",
            )
        if reservation.status == "pending":
            raise ProblemError(
                409,
                "idempotency_key_in_progress",
                "a request with this Idempotency-Key is still being worked on",
                headers={"Retry-After": "1"},
                todo="send it again in a moment",
            )
        if reservation.answer is not None:
            response.headers["Idempotent-Replayed"] = "true"
            return reservation.answer
        try:
            answer = (await _create(spec)).model_dump(mode="json")
        except BaseException:
            await store.release(idempotency_key)
            raise
        await store.fulfil(idempotency_key, body, answer)
        return answer

    async def _create(spec: JobSpec) -> JobRecord:
        try:
            await context.preflight(spec)
        except PreflightError as error:
            status = 503 if error.service else 422
            headers = {"Retry-After": "5"} if error.service else None
            raise ProblemError(
                status,
                error.problem,
                str(error),
                headers=headers,
                param=error.param,
                service=error.service,
                errors=[item.as_dict() for item in error.errors] or None,
                todo=error.todo,
            ) from error
        return await store.create(spec)

    @router.get("")
    async def list_jobs(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(description="id of the last job of the page before")] = None,
    ) -> dict[str, Any]:
        """Jobs, newest first."""
        records, more = await store.page(limit=limit, after=after)
        return {"object": "list", "data": [record.model_dump(mode="json") for record in records], "has_more": more}

    @router.get("/{job_id}", response_model=JobRecord)
    async def get(job_id: str) -> Any:
        """One job."""
        return await store.get(job_id)

    @router.post("/{job_id}/cancel", response_model=JobRecord)
    async def cancel(job_id: str) -> Any:
        """Ends a job within seconds; one that has ended is returned as it is."""
        return await store.cancel(job_id)

    @router.post("/{job_id}/resume", response_model=JobRecord)
    async def resume(job_id: str) -> Any:
        """Queues a dead, failed or cancelled job again; it goes on from its last checkpoint.

        A job that is in good health, queued or done is returned as it is.
        """
        return (await store.resume(job_id))[0]

    return router


def _records(context: Context) -> APIRouter:
    """What a job leaves: events, checkpoints, metrics, trail."""
    router = APIRouter(prefix="/v1/jobs", tags=["records"])
    store, settings = context.store, context.settings

    @router.get("/{job_id}/events", response_model=None)
    async def events(
        job_id: str,
        request: Request,
        format: Annotated[Literal["sse", "json"], Query()] = "sse",
        after: Annotated[str | None, Query(pattern=_EVENT_ID, description="id of the last event seen")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="format=json only")] = 500,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response | dict[str, Any]:
        """What happens to the job, as server-sent events; resumable with Last-Event-ID; ends with the job."""
        await store.get(job_id)
        start = _event_id(last_event_id) or after or "0-0"
        if format == "json":
            found = await store.events(job_id, after=start, limit=limit + 1)
            data = [{"id": e.id, "type": e.type, "data": e.data} for e in found[:limit]]
            return {"object": "list", "data": data, "has_more": len(found) > limit}
        return EventSourceResponse(_stream(context, job_id, start, request), ping=PING_SECONDS)

    @router.get("/{job_id}/checkpoints")
    async def checkpoints(job_id: str) -> dict[str, Any]:
        """Complete checkpoints, oldest first."""
        await store.get(job_id)
        folder = settings.job_folder(job_id) / "checkpoints"
        found = await asyncio.to_thread(Checkpoints(folder).list)
        return {"object": "list", "data": [_checkpoint(path) for path in found]}

    @router.get("/{job_id}/metrics")
    async def series(
        job_id: str, kind: Annotated[Literal["step", "evaluation"] | None, Query()] = None
    ) -> dict[str, Any]:
        """One object a step, and one an evaluation, in the order in which they were made."""
        await store.get(job_id)
        lines = await asyncio.to_thread(lambda: list(read_lines(settings.job_folder(job_id) / "metrics.jsonl")))
        return {"object": "list", "data": [line for line in lines if kind is None or line.get("kind") == kind]}

    @router.get("/{job_id}/trail", response_class=StreamingResponse)
    async def trail(job_id: str) -> StreamingResponse:
        """One JSON line a group: prior, rewards, decisions, state, cause."""
        await store.get(job_id)
        path = settings.job_folder(job_id) / "trail.jsonl"
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in read_lines(path))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return router


_EVENT_ID = r"^\d{1,20}(-\d{1,20})?$"


def _event_id(given: str | None) -> str | None:
    if not given:
        return None
    head, _, tail = given.partition("-")
    if not (head.isdigit() and (not tail or tail.isdigit()) and len(given) <= 41):
        raise ProblemError(422, "invalid_request", f"{given!r} is no event id", param="Last-Event-ID")
    return given


def _checkpoint(path: Path) -> dict[str, Any]:
    marker = path / MARKER
    return {
        "object": "training.job.checkpoint",
        "id": path.name,
        "step": int(path.name.removeprefix("step-")),
        "path": str(path),
        "created_at": marker.stat().st_mtime,
        "bytes": sum(json.loads(marker.read_text(encoding="utf-8"))["files"].values()),
    }


async def _stream(context: Context, job_id: str, start: str, request: Request) -> AsyncIterator[dict[str, str]]:
    """Events past `start` until the one that ends the job has been sent.

    A job that was resumed has such an event in the middle; it ends the stream only where nothing follows it.
    """
    last: Event | None = None
    after = start
    while not context.closing.is_set() and not await request.is_disconnected():
        try:
            batch = await context.store.events(job_id, after=after)
            if not batch and await _over(context.store, job_id, last):
                return
        except NotFound:
            return
        for event in batch:
            last, after = event, event.id
            yield {"id": event.id, "event": event.type, "data": json.dumps(event.data)}
        if not batch:
            await asyncio.sleep(POLL_SECONDS)


async def _over(store: JobStore, job_id: str, last: Event | None) -> bool:
    """Has the job ended, and been told of? The record changes a moment before the last event is written."""
    record = await store.get(job_id)
    if not record.state.terminal:
        return False
    return (last is not None and is_terminal_event(last)) or time.time() - (record.finished_at or 0) > END_GRACE_SECONDS
