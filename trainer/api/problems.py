"""Every error of the API as RFC 9457 application/problem+json.

Members beside type, title, status and detail: `code` (stable, for programs), `param` (the field to blame), `service`
(the service to blame), `todo` (what to do), `errors` (a list of {row?, field, message}).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

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

log = get_logger()

MEDIA_TYPE = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Not authorised",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    422: "The request was refused",
    429: "Too busy",
    500: "Internal error",
    503: "A service is out of reach",
    504: "A service took too long",
}
_STATUS: dict[type[RollwiseError], int] = {
    NotFound: 404,
    InvalidArgument: 422,
    AlreadyExists: 409,
    FailedPrecondition: 409,
    ResourceExhausted: 429,
    Unauthenticated: 401,
    Unavailable: 503,
    DeadlineExceeded: 504,
}


class ProblemError(Exception):
    """An answer that is a problem. `members` are added to the document."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: dict[str, str] | None = None, **members: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers
        self.members = {name: value for name, value in members.items() if value is not None}


def problem(
    status: int, code: str, detail: str, *, headers: dict[str, str] | None = None, **members: Any
) -> JSONResponse:
    """The response."""
    body = {
        "type": f"urn:rollwise:problem:{code.replace('_', '-')}",
        "title": TITLES.get(status, "Error"),
        "status": status,
        "detail": detail,
        "code": code,
        **members,
    }
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def field_errors(errors: Sequence[Any]) -> list[dict[str, str]]:
    """Pydantic's errors as {field, message}; the field is dotted, without the name of the place it came in."""
    result = []
    for error in errors:
        places = [str(part) for part in error["loc"] if part not in ("body", "query", "path", "header")]
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] == "json_invalid":
            why = (error.get("ctx") or {}).get("error", "")
            places, message = [], f"the body is not JSON: {why} at character {error['loc'][-1]}"
        elif not places and tuple(error["loc"]) == ("body",):
            message = "the body must be a JSON object, sent with the header content-type: application/json"
        elif error["type"] == "extra_forbidden":
            message = "no such key"
        result.append({"field": ".".join(places), "message": message})
    return result


def install(app: FastAPI) -> None:
    """Registers the handlers."""

    @app.exception_handler(ProblemError)
    async def _problem(_: Request, error: ProblemError) -> JSONResponse:
        return problem(error.status, error.code, error.detail, headers=error.headers, **error.members)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = field_errors(error.errors())
        first = errors[0]
        detail = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
        if len(errors) > 1:
            detail += f" (and {len(errors) - 1} more)"
        return problem(422, "invalid_request", detail, param=first["field"] or None, errors=errors)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"there is nothing at {request.url.path}" if error.status_code == 404 else str(error.detail)
        if error.status_code == 400 and "parsing the body" in detail:
            detail = "the body is no JSON: not UTF-8, or nested too deeply"
        headers = dict(error.headers) if error.headers else None
        return problem(error.status_code, f"http_{error.status_code}", detail, headers=headers)

    @app.exception_handler(RollwiseError)
    async def _rollwise(_: Request, error: RollwiseError) -> JSONResponse:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        headers = {"Retry-After": "2"} if status in (429, 503) else None
        return problem(status, error.reason.lower(), str(error), headers=headers)

    @app.exception_handler(RedisError)
    async def _redis(_: Request, error: RedisError) -> JSONResponse:
        log.error("redis failed", error=str(error))
        detail = f"Redis does not answer: {error}"
        todo = "start it with `rollwise up`, or look with `rollwise doctor`"
        return problem(503, "redis_unavailable", detail, headers={"Retry-After": "2"}, service="redis", todo=todo)

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> JSONResponse:
        log.exception("fault while answering", path=request.url.path, error=str(error))
        return problem(500, "internal", f"{type(error).__name__}: the log of the API says more")
