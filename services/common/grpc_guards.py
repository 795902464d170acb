"""What stands before every call on a server: deadline, token, error mapping, log context and metrics."""

import hmac
import inspect
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from services.common.errors import DETAILS_KEY, Internal, InvalidArgument, RollwiseError, Unauthenticated, to_status
from services.common.logging import bind_context, get_logger
from services.common.telemetry import GRPC_SERVER_HANDLED, GRPC_SERVER_IN_FLIGHT, GRPC_SERVER_SECONDS

log = get_logger("rollwise.grpc")

# Above the largest legal group: 16 rollouts of 20,000 tokens with 8 bytes a token are 2.6 MB; weights never travel.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
# Log context that travels with a call.
TRACE_KEYS = {"rollwise-trace-id": "trace_id", "rollwise-job-id": "job_id", "rollwise-step": "step"}
_EXEMPT = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler but those of health and reflection.

    Args:
        token: What `authorization: Bearer <token>` must carry; None asks for none.
    """

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call with the guards around it."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_EXEMPT):
            return handler
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            behaviour: Any = self._streaming(inner, method)
        else:
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            behaviour = self._unary(inner, method)
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _unary(self, inner: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            with _Observed(method, context) as observed:
                try:
                    self._admit(context)
                    answer = inner(request, context)
                    return await answer if inspect.isawaitable(answer) else answer
                except Exception as error:  # noqa: BLE001 - the boundary: every failure becomes a status
                    await _abort(context, error, method, observed)

        return call

    def _streaming(self, inner: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with _Observed(method, context) as observed:
                try:
                    self._admit(context)
                    answers = inner(request, context)
                    if inspect.isawaitable(answers):
                        await answers  # a handler that writes through the context
                        return
                    async for answer in answers:
                        yield answer
                except Exception as error:  # noqa: BLE001 - the boundary: every failure becomes a status
                    await _abort(context, error, method, observed)

        return call

    def _admit(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        structlog.contextvars.clear_contextvars()
        bind_context(**{name: metadata.get(key) for key, name in TRACE_KEYS.items()})
        if self._expected is not None:
            given = metadata.get("authorization", "")
            given = given if isinstance(given, bytes) else given.encode()
            if not hmac.compare_digest(given, self._expected):
                raise Unauthenticated(
                    "this call needs the service's token: send `authorization: Bearer <token>`; see auth_token_file",
                    reason="TOKEN_MISSING" if not given else "TOKEN_WRONG",
                )
        if context.time_remaining() is None:
            raise InvalidArgument(
                "this call has no deadline, so a fault could hold it forever; pass timeout=<seconds>",
                reason="DEADLINE_REQUIRED",
            )


class _Observed:
    """Counts one call and times it."""

    def __init__(self, method: str, context: Any) -> None:
        _, self._service, self._method = method.split("/", 2)
        self._context = context
        self.code: grpc.StatusCode | None = None

    def __enter__(self) -> "_Observed":
        self._start = time.perf_counter()
        GRPC_SERVER_IN_FLIGHT.labels(self._service, self._method).inc()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        GRPC_SERVER_IN_FLIGHT.labels(self._service, self._method).dec()
        seconds = time.perf_counter() - self._start
        GRPC_SERVER_SECONDS.labels(self._service, self._method).observe(seconds)
        if self.code is None:
            # No mapped error and still an exception: the client went away, or the server is closing.
            self.code = grpc.StatusCode.OK if kind is None else grpc.StatusCode.CANCELLED
        GRPC_SERVER_HANDLED.labels(self._service, self._method, self.code.name).inc()


async def _abort(context: Any, error: Exception, method: str, observed: _Observed) -> None:
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        observed.code = code if isinstance(code, grpc.StatusCode) else _code_of(code)
        raise error
    if not isinstance(error, RollwiseError):
        error_id = uuid.uuid4().hex[:12]
        log.error(
            "unexpected error in a call",
            method=method,
            error_id=error_id,
            error=repr(error),
            traceback="".join(traceback.format_exception(error)),
        )
        error = Internal(
            f"{method} failed with {type(error).__name__}; the log has the traceback under error_id {error_id}",
            error_id=error_id,
        )
    status = to_status(error)
    observed.code = error.code
    log.debug("call refused", method=method, code=error.code.name, reason=error.reason, error=error.message)
    await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


def _code_of(number: object) -> grpc.StatusCode:
    for code in grpc.StatusCode:
        if code.value[0] == number:
            return code
    return grpc.StatusCode.UNKNOWN
