"""Connections to Redis or Valkey, what a server must be set to, and how a command outlives a restart of it."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.errors import ConfigurationError, Unavailable
from services.common.logging import get_logger
from services.common.telemetry import REDIS_RECONNECTS

T = TypeVar("T")
log = get_logger("rollwise.redis")

# The longest a single blocking command may wait; a blocking client's socket waits longer than that.
MAX_BLOCK_SECONDS = 5.0
SOCKET_SECONDS = 10.0
# Between the tries of a worker that waits for Redis however long it takes.
RETRY_SECONDS = 0.5
# What a lost or restarting server looks like. A timeout leaves open whether the command ran.
LOST = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, ConnectionError)


def connect(url: str, *, blocking: bool = False) -> Redis:
    """Return a client. It connects on first use and answers in bytes.

    The library's own retries are off: with them one XADD whose reply is lost becomes two entries. Retry idempotent
    commands with `survive`.

    Args:
        url: redis://, rediss:// or unix:// address.
        blocking: For blocking commands (of at most MAX_BLOCK_SECONDS), which need a client of their own: the socket
            then waits longer than the command, and nobody else's command waits behind it.
    """
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            socket_connect_timeout=5.0,
            socket_timeout=SOCKET_SECONDS + (MAX_BLOCK_SECONDS if blocking else 0.0),
            health_check_interval=0,
        )
    except ValueError as error:
        raise ConfigurationError(f"redis_url {redacted(url)!r} is no Redis address: {error}") from error
    pool = client.connection_pool
    pool.connection_class = type(pool.connection_class.__name__, (_Cancellable, pool.connection_class), {})
    return client


class _Cancellable:
    """Mixed into the library's connections: a cancellation while a command is being sent is not lost.

    The library sends within asyncio.wait_for, which on Python 3.11 returns as if nothing had happened when the
    cancellation meets the end of the sending. A background task then goes on for ever, and whoever waits for its end
    with it.
    """

    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*arguments, **options)  # type: ignore[misc]  # a mixin: the base comes later
        if task is not None and task.cancelling() > before:
            # The reply is nobody's; the connection must not hand it to the next command.
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # a mixin
            raise asyncio.CancelledError


def redacted(url: str) -> str:
    """Return the address without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return url
    return f"{scheme}{separator}{credentials.partition(':')[0]}:***@{host}"


def url_of(client: "Redis") -> str:
    """Return the address a client connects to, for messages; without its password."""
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    return f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db') or 0}"


async def survive(
    call: Callable[[], Awaitable[T]], *, client: "Redis", seconds: float, on_lost: Callable[[], None] | None = None
) -> T:
    """Run an idempotent command, again and again with back-off while the server does not answer.

    Args:
        call: Makes the command anew each time; running it twice must do no harm.
        client: Whose address the error names.
        seconds: How long to keep trying after the first failure; 0 tries once.
        on_lost: Called after every failure, before the next try.

    Raises:
        Unavailable: the server did not answer in that time; names its address.
    """
    deadline: float | None = None
    delay = 0.05
    while True:
        try:
            return await call()
        except redis.exceptions.AuthenticationError:
            raise  # a kind of ConnectionError to the library, and no waiting mends it
        except (*LOST, redis.exceptions.ResponseError) as error:
            if isinstance(error, redis.exceptions.ResponseError) and not _passes(error):
                raise
            now = time.monotonic()
            if deadline is None:
                deadline = now + seconds
            if on_lost is not None:
                on_lost()
            if now >= deadline:
                address = url_of(client)
                raise Unavailable(
                    f"Redis at {address} does not answer ({error}); is it running? Tried for {seconds:g} s",
                    reason="REDIS_UNAVAILABLE",
                    url=address,
                ) from error
            REDIS_RECONNECTS.inc()
            log.warning("redis does not answer, trying again", url=url_of(client), error=str(error))
            await asyncio.sleep(min(delay * random.uniform(0.5, 1.0), max(deadline - now, 0.0)))
            delay = min(delay * 2, 1.0)


def _passes(error: redis.exceptions.ResponseError) -> bool:
    """Say whether a server that answers with this error may do better soon.

    It takes no writes while its disk is full (MISCONF), nor while another one is the primary (READONLY).
    """
    return isinstance(error, redis.exceptions.ReadOnlyError) or str(error).startswith("MISCONF")


async def execute(client: "Redis", *arguments: str | bytes | int | float) -> Any:
    """Run one command; the library's own method is untyped."""
    return await client.execute_command(*arguments)  # type: ignore[no-untyped-call]


async def check_server(client: "Redis", *, seconds: float = 10.0) -> None:
    """Make sure that the server keeps what it acknowledged.

    Raises:
        ConfigurationError: it evicts keys or has no append-only file; a FailedPrecondition that says how to fix it.
        Unavailable: it does not answer within `seconds`.
    """

    async def ask() -> dict[str, str]:
        answer: dict[str, str] = {}
        for name in ("maxmemory-policy", "appendonly"):
            raw = await execute(client, "CONFIG GET", name)
            pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
            answer.update({_text(key): _text(value) for key, value in pairs})
        return answer

    address = url_of(client)
    try:
        settings = await survive(ask, client=client, seconds=seconds)
    except redis.exceptions.AuthenticationError as error:
        raise ConfigurationError(f"Redis at {address} refuses the password in redis_url: {error}") from error
    except redis.exceptions.ResponseError as error:
        # Managed servers forbid CONFIG. What cannot be asked cannot be checked; say so and go on.
        log.warning("cannot check Redis: CONFIG GET is refused; make sure of noeviction and AOF", error=str(error))
        return
    problems = []
    if settings.get("maxmemory-policy", "noeviction") != "noeviction":
        problems.append(
            f"maxmemory-policy is {settings['maxmemory-policy']}, so work in progress can be evicted: "
            "run `CONFIG SET maxmemory-policy noeviction` and put it into redis.conf"
        )
    if settings.get("appendonly", "yes") != "yes":
        problems.append(
            "appendonly is no, so a crash loses acknowledged entries: "
            "run `CONFIG SET appendonly yes` and put it into redis.conf"
        )
    if problems:
        raise ConfigurationError(
            f"Redis at {address} is not safe for a queue: {'; '.join(problems)}", reason="REDIS_UNSAFE", url=address
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def patiently(call: Callable[[], Awaitable[T]], *, waiting: str) -> T:
    """Make a call again until Redis is there, for workers that have nothing else to do meanwhile.

    Args:
        call: Raises Unavailable while Redis is away; what was handed out to the caller stays the caller's.
        waiting: Says in the log who waits.
    """
    while True:
        try:
            return await call()
        except Unavailable as error:
            log.warning(f"{waiting} for Redis", cause=str(error))
            await asyncio.sleep(RETRY_SECONDS)
