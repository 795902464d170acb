"""The life of a process: start, background tasks that must not die in silence, exit codes, the ready file."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.common.errors import ConfigurationError, RollwiseError
from services.common.logging import configure_logging, get_logger, is_configured
from services.common.paths import write_atomically
from services.common.settings import ServiceSettings

log = get_logger("rollwise.lifecycle")

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def run(
    main: Callable[[], Coroutine[Any, Any, None]],
    *,
    service: str = "rollwise",
    settings: ServiceSettings | None = None,
) -> None:
    """Run a process's main coroutine and leave with a code that mirrors the outcome.

    0: ended in order. 1: failed (logged with its traceback). 2: a setting or the set-up is wrong. 130: interrupted.

    Args:
        main: Makes the coroutine.
        service: Name on every log line.
        settings: Log level and format; None keeps logging as it is set up already, or sets up the default.
    """
    if settings is not None:
        configure_logging(service, settings.log_level, settings.log_format)
    elif not is_configured():
        configure_logging(service)
    try:
        asyncio.run(main())
    except ConfigurationError as error:
        sys.stderr.write(f"{service}: cannot start: {error}\n")
        raise SystemExit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except RollwiseError as error:
        log.exception("the process ends: " + error.message, reason=error.reason, **error.metadata)
        raise SystemExit(EXIT_FAILED) from None
    except Exception:
        log.exception("the process ends on an unexpected error")
        raise SystemExit(EXIT_FAILED) from None


class Background:
    """Named tasks beside a main one. When one fails, the main task is cancelled and the failure raised in its place.

    async with Background() as background:
        background.start("leases", consumer.run_leases())
        await server.run_until_signal()
    # here every task is cancelled and finished

    A task that merely returns is no failure.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._owner: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._interrupted = False
        self._closing = False

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task under a name that no running task of this has."""
        running = self._tasks.get(name)
        if running is not None and not running.done():
            work.close()
            raise ValueError(f"background task {name!r} runs already")
        task = asyncio.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._on_done)
        return task

    async def cancel(self, name: str) -> None:
        """Cancel a task and wait for its end; a name that is unknown or done is no error."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel all tasks and wait for their end."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def wait_failed(self) -> None:
        """Wait until a task fails, and raise its failure; for a main task that has nothing else to wait for."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._failure is None:
            return
        if self._interrupted and self._owner is not None:
            self._owner.uncancel()
            self._interrupted = False
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self._failure

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        log.error("a background task failed", task=task.get_name(), exc_info=task.exception())
        if self._failure is not None:
            return
        self._failure = task.exception()
        self._failed.set()
        if self._owner is not None and not self._closing and not self._owner.done():
            self._interrupted = True
            self._owner.cancel()


def write_ready_file(path: Path, **ports: int | None) -> None:
    """Say that the process serves, by one JSON object with its ports and its process id, written atomically.

    Whoever started it reads the ports from there, so that it can ask for port 0.
    """
    write_atomically(path, json.dumps({**ports, "pid": os.getpid()}).encode())
