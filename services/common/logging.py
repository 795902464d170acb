"""Structured logs on stderr, with the job, step and trace that a line belongs to."""

import logging
import sys
from typing import Any

import structlog

_state: dict[str, bool] = {"configured": False}


def configure_logging(service: str, level: str = "info", format: str = "json") -> None:
    """Send all logs, also those of libraries, to stderr.

    Args:
        service: Name of the process, on every line.
        level: debug, info, warning or error.
        format: "json" for one object a line, "console" for people.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _method, event: {"service": service, **event},
    ]
    rendered: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if format == "console"
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # One line a request or a decision of these is noise at our "info".
    for noisy in ("httpx", "httpcore", "urllib3", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING if level != "debug" else logging.DEBUG)
    _state["configured"] = True


def is_configured() -> bool:
    """Say whether `configure_logging` ran in this process."""
    return _state["configured"]


def get_logger(name: str | None = None) -> structlog.stdlib.BoundLogger:
    """Return a logger; call it as `log.info("group closed", cause=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name or "rollwise")
    return logger


def bind_context(**values: object) -> None:
    """Put values (job_id, step, trace_id) on every later log line of the current task and of those it starts.

    A value of None removes the name. `job_id`, `step` and `trace_id` also travel with gRPC calls.
    """
    gone = [name for name, value in values.items() if value is None]
    structlog.contextvars.unbind_contextvars(*gone)
    structlog.contextvars.bind_contextvars(**{name: value for name, value in values.items() if value is not None})


def context() -> dict[str, object]:
    """Return what `bind_context` bound in the current task."""
    return dict(structlog.contextvars.get_contextvars())


def _quiet_default() -> None:
    # Unconfigured, structlog prints on stdout, which belongs to the answers of a command. Until a process sets its
    # logging up, lines go through the standard library: warnings and worse on stderr.
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


if not structlog.is_configured():
    _quiet_default()
