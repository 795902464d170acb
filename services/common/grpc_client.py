"""Channels to other services: a deadline on every call, the token, and errors of `services.common.errors`."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import tenacity

from services.common.errors import InvalidArgument, RollwiseError, Unavailable, from_status
from services.common.grpc_guards import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, TRACE_KEYS
from services.common.logging import context, get_logger
from services.common.settings import ServiceSettings
from services.common.telemetry import GRPC_CLIENT_HANDLED, GRPC_CLIENT_SECONDS

T = TypeVar("T")
log = get_logger("rollwise.grpc")


def connect(
    target: str,
    *,
    token: str | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> grpc.aio.Channel:
    """Return a channel to `host:port`; use it as `GenerationServiceStub(connect(target)).Generate(req, timeout=5)`.

    A call without `timeout=` is refused with InvalidArgument. A call that fails raises a RollwiseError.

    Args:
        target: host:port.
        token: Sent as `authorization: Bearer`.
        tls_ca: PEM roots to trust. With these, or with a certificate, the channel uses TLS.
        tls_cert: PEM certificate chain to show to the server, with `tls_key`.
        tls_key: PEM private key of the certificate.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # The library would repeat calls unseen; only `with_retries` repeats, and only what is idempotent.
        ("grpc.enable_retries", 0),
        # A restarted peer should be found within about a second, not after the default two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A peer whose machine is gone answers no ping; without them a call waits for its whole deadline.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    watch = _Watch(target, token)
    interceptors: list[grpc.aio.ClientInterceptor] = [
        _UnaryUnary(watch),
        _UnaryStream(watch),
        _StreamUnary(watch),
        _StreamStream(watch),
    ]
    if tls_ca is None and tls_cert is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=None if tls_ca is None else tls_ca.read_bytes(),
        private_key=None if tls_key is None else tls_key.read_bytes(),
        certificate_chain=None if tls_cert is None else tls_cert.read_bytes(),
    )
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


def connect_as(settings: ServiceSettings, target: str) -> grpc.aio.Channel:
    """Return a channel to another service with the token and the TLS files of this one's settings."""
    return connect(
        target,
        token=settings.token,
        tls_ca=settings.tls_ca,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
    )


async def with_retries(
    call: Callable[[], Awaitable[T]],
    *,
    deadline_seconds: float,
    retry_on: tuple[type[BaseException], ...] = (Unavailable,),
    first_wait_seconds: float = 0.1,
    longest_wait_seconds: float = 2.0,
    on_retry: Callable[[BaseException], None] | None = None,
) -> T:
    """Make an idempotent call again, with growing random waits, until it succeeds or the time is over.

    Args:
        call: Makes the call anew each time, with the same idempotency key.
        deadline_seconds: No new try starts later than this after the first one.
        retry_on: What is worth another try; anything else is raised at once.
        first_wait_seconds: Upper bound of the first wait.
        longest_wait_seconds: Upper bound of every wait.
        on_retry: Told of every failure that is tried again.

    Raises:
        RollwiseError: the last failure.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is None:
            return
        log.debug("trying a call again", attempt=state.attempt_number, error=str(error))
        if on_retry is not None:
            on_retry(error)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(retry_on),
        wait=tenacity.wait_random_exponential(multiplier=first_wait_seconds, max=longest_wait_seconds),
        stop=tenacity.stop_before_delay(deadline_seconds),
        before_sleep=before_sleep,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError("unreachable: tenacity raises the last failure")


class _Watch:
    """What all four kinds of call share."""

    def __init__(self, target: str, token: str | None) -> None:
        self.target = target
        self._token = token

    def prepare(self, details: Any) -> Any:
        if details.timeout is None:
            raise InvalidArgument(
                f"call of {_text(details.method)} without a deadline; pass timeout=<seconds>",
                reason="DEADLINE_REQUIRED",
            )
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        if self._token is not None:
            metadata["authorization"] = f"Bearer {self._token}"
        bound = context()
        for key, name in TRACE_KEYS.items():
            if name in bound and metadata.get(key) is None:
                # Header values are ASCII; a job id of other letters must not break the call.
                metadata[key] = str(bound[name]).encode("ascii", "replace").decode()
        return details._replace(metadata=metadata)

    def fail(self, error: grpc.aio.AioRpcError) -> RollwiseError:
        return from_status(error.code(), error.details(), error.trailing_metadata(), where=self.target)


class _Timed:
    """Counts one call made and times it."""

    def __init__(self, method: Any) -> None:
        _, self._service, self._method = _text(method).split("/", 2)
        self._start = time.perf_counter()

    def done(self, code: grpc.StatusCode) -> None:
        GRPC_CLIENT_HANDLED.labels(self._service, self._method, code.name).inc()
        GRPC_CLIENT_SECONDS.labels(self._service, self._method).observe(time.perf_counter() - self._start)


async def _answer(watch: _Watch, continuation: Any, details: Any, request: Any) -> Any:
    prepared = watch.prepare(details)
    timed = _Timed(details.method)
    code = grpc.StatusCode.CANCELLED
    try:
        call = await continuation(prepared, request)
        await call
        code = grpc.StatusCode.OK
        return call
    except grpc.aio.AioRpcError as error:
        code = error.code()
        raise watch.fail(error) from error
    finally:
        timed.done(code)


async def _answers(watch: _Watch, continuation: Any, details: Any, request: Any) -> AsyncIterator[Any]:
    prepared = watch.prepare(details)
    call = await continuation(prepared, request)

    async def read() -> AsyncIterator[Any]:
        timed = _Timed(details.method)
        code = grpc.StatusCode.CANCELLED
        try:
            async for answer in call:
                yield answer
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise watch.fail(error) from error
        finally:
            call.cancel()  # no effect on one that ended
            timed.done(code)

    return read()


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await _answer(self._watch, continuation, client_call_details, request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await _answer(self._watch, continuation, client_call_details, request_iterator)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await _answers(self._watch, continuation, client_call_details, request)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await _answers(self._watch, continuation, client_call_details, request_iterator)


def _text(method: Any) -> str:
    return method.decode() if isinstance(method, bytes) else str(method)
