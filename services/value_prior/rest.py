"""The value prior over HTTP: POST /v1/score, POST /v1/observations, GET /healthz, GET /metrics, OpenAPI at /docs.

Thin over `ValuePrior`. Errors are RFC 9457 problem details that name the field.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RollwiseError,
    Unauthenticated,
    Unavailable,
)
from services.common.logging import get_logger
from services.value_prior.model import ValuePrior
from services.value_prior.records import Feature, Outcome, Prompt

log = get_logger("rollwise.value_prior")

_STATUS: tuple[tuple[type[RollwiseError], int], ...] = (
    (InvalidArgument, 400),
    (Unauthenticated, 401),
    (NotFound, 404),
    (FailedPrecondition, 409),
    (AlreadyExists, 409),
    (ResourceExhausted, 429),
    (Unavailable, 503),
    (DeadlineExceeded, 504),
)


class Body(BaseModel):
    """Base of everything that is sent here: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class FeatureBody(Body):
    """A policy's hidden state; needed with embedder "policy" only."""

    layer: int = Field(0, ge=0)
    values: list[float] = Field(min_length=1)
    policy_version: int = Field(0, ge=0)

    def feature(self) -> Feature:
        """As float32."""
        packed = np.asarray(self.values, dtype="<f4").tobytes()
        return Feature(self.layer, "float32", len(self.values), packed, self.policy_version)


class PromptBody(Body):
    """A prompt to predict."""

    text: str
    prompt_id: str = Field("", description="Unique within the policy's data; without it no history is used.")
    feature: FeatureBody | None = None


class ScoreBody(Body):
    """Which policy, which prompts."""

    policy_id: str
    prompts: list[PromptBody]
    before_version: int | None = Field(None, description="Use only outcomes of policy versions below this one.")


class PriorBody(BaseModel):
    """P(success), strictly inside (0, 1), with its standard deviation."""

    prompt_id: str
    value: float
    uncertainty: float
    source: Literal["uninformed", "context", "history"]
    context_size: int


class ScoreAnswer(BaseModel):
    """In the order of the request."""

    priors: list[PriorBody]


class OutcomeBody(Body):
    """What the rollouts of one group showed."""

    outcome_id: str = Field(description="Names it for idempotence.")
    policy_id: str
    text: str
    successes: float = Field(description="Sum of scores, in [0, trials].")
    trials: int
    lineage: int = 0
    policy_version: int = 0
    prompt_id: str = ""
    predicted: float | None = Field(None, description="The prior given before the first rollout.")
    feature: FeatureBody | None = None


class ObserveBody(Body):
    """Outcomes; repeating the request changes nothing."""

    outcomes: list[OutcomeBody]


class ObserveAnswer(BaseModel):
    """How the outcomes counted; `stale` are those of a lineage that was fenced off."""

    accepted: int
    duplicates: int
    stale: int


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    reason: str | None = None
    field: str | None = None


def create_app(
    model: ValuePrior,
    *,
    token: str | None = None,
    max_body_bytes: int = 16 * 1024 * 1024,
    unhealthy_cause: Callable[[], str | None] = lambda: None,
) -> FastAPI:
    """The HTTP application. With a `token`, /v1/* wants ``Authorization: Bearer <token>``."""
    app = FastAPI(
        title="Rollwise value prior",
        description="Predicts how likely a policy is to solve a prompt, before any rollout.",
        version="1",
    )
    errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": Problem}, "5XX": {"model": Problem}}

    @app.post("/v1/score", responses=errors)
    async def score(body: ScoreBody) -> ScoreAnswer:
        """Priors of prompts for a policy; one never seen gets 0.5 with high uncertainty."""
        prompts = [Prompt(p.text, p.prompt_id, p.feature.feature() if p.feature else None) for p in body.prompts]
        priors = await model.score(body.policy_id, prompts, before_version=body.before_version)
        return ScoreAnswer(
            priors=[
                PriorBody(
                    prompt_id=prior.prompt_id,
                    value=prior.value,
                    uncertainty=prior.uncertainty,
                    source=prior.source.value,
                    context_size=prior.context_size,
                )
                for prior in priors
            ]
        )

    @app.post("/v1/observations", responses=errors)
    async def observations(body: ObserveBody) -> ObserveAnswer:
        """Learns from outcomes; answered once they are durable."""
        outcomes = [
            Outcome(**{**dict(outcome), "feature": outcome.feature.feature() if outcome.feature else None})
            for outcome in body.outcomes
        ]
        result = await model.observe(outcomes)
        return ObserveAnswer(accepted=result.accepted, duplicates=result.duplicates, stale=result.stale)

    @app.get("/healthz", responses={503: {"model": Problem}})
    async def healthz() -> Response:
        """200 while the service can work."""
        cause = unhealthy_cause()
        return JSONResponse({"status": "ok"}) if cause is None else _problem(503, cause, reason="UNHEALTHY")

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(RollwiseError)
    async def on_error(_: Request, error: RollwiseError) -> Response:
        status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
        return _problem(status, error.message, reason=error.reason, field=error.metadata.get("field"))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = _field_name(first["loc"])
        return _problem(400, f"{field or 'body'}: {first['msg']}", reason="INVALID_ARGUMENT", field=field or None)

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        log.error("fault in an HTTP request", path=request.url.path, exc_info=error)
        return _problem(500, "internal error; see the service's log", reason="INTERNAL")

    app.add_middleware(_Guards, token=token, max_body_bytes=max_body_bytes)
    return app


class _Guards:
    """Refuses requests without the token and bodies past the limit, before anything is parsed."""

    def __init__(self, app: ASGIApp, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"].startswith("/v1/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = _problem(
                    401,
                    "the Authorization header must be 'Bearer <token>' with this service's token",
                    reason="UNAUTHENTICATED",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal(scope, receive, send)
                return
        length = headers.get(b"content-length", b"0")
        text = f"the body is larger than {self._limit} bytes: split the request"
        if length.isdigit() and int(length) > self._limit:
            await _problem(413, text, reason="TOO_LARGE")(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, text)
            return message

        await self._app(scope, counted, send)


def _problem(
    status: int, detail: str, *, reason: str | None = None, field: str | None = None, headers: Any = None
) -> JSONResponse:
    titles = {400: "Bad request", 401: "Unauthenticated", 404: "Not found", 405: "Method not allowed"}
    titles |= {409: "Conflict", 413: "Too large", 429: "Busy", 500: "Internal error", 503: "Unavailable"}
    problem = Problem(title=titles.get(status, "Error"), status=status, detail=detail, reason=reason, field=field)
    # A NaN or a lone surrogate that was sent must not break the answer that refuses it.
    content = problem.model_copy(update={"detail": detail.encode("utf-8", "replace").decode()})
    return JSONResponse(
        content.model_dump(exclude_none=True), status, media_type="application/problem+json", headers=headers
    )


def _field_name(location: Any) -> str:
    """``('body', 'prompts', 3, 'text')`` as ``prompts[3].text``."""
    name = ""
    for part in location[1:] if location and location[0] == "body" else location:
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name else ''}{part}"
    return name
