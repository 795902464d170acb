"""`rollwise up`: every process on this machine, kept alive until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.cli.output import UsageProblem, note, print_json, stderr


def up(
    *,
    state_dir: Annotated[Path, typer.Option(help="Jobs, checkpoints, logs and Redis data are kept here.")] = Path(
        "run"
    ),
    redis_url: Annotated[str | None, typer.Option(help="Use this Redis; by default an embedded Valkey starts.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of generation and trainer each; default: all cores.")
    ] = None,
    any_ports: Annotated[bool, typer.Option("--any-ports", help="Take any free ports.")] = False,
    api_port: Annotated[int | None, typer.Option(help="Trainer API (8100).", min=1, max=65535)] = None,
    redis_port: Annotated[int | None, typer.Option(help="Embedded Valkey (7379).", min=1, max=65535)] = None,
    generation_port: Annotated[int | None, typer.Option(help="Generation gRPC (7101).", min=1, max=65535)] = None,
    value_prior_port: Annotated[int | None, typer.Option(help="Value prior gRPC (7102).", min=1, max=65535)] = None,
    value_prior_http_port: Annotated[
        int | None, typer.Option(help="Value prior REST (8102).", min=1, max=65535)
    ] = None,
    verifier_port: Annotated[int | None, typer.Option(help="Verifier gRPC (7103).", min=1, max=65535)] = None,
    allocator_port: Annotated[int | None, typer.Option(help="Allocator gRPC (7104).", min=1, max=65535)] = None,
    generation_metrics_port: Annotated[int | None, typer.Option(help="(9101)", min=1, max=65535)] = None,
    value_prior_metrics_port: Annotated[int | None, typer.Option(help="(9102)", min=1, max=65535)] = None,
    verifier_metrics_port: Annotated[int | None, typer.Option(help="(9103)", min=1, max=65535)] = None,
    allocator_metrics_port: Annotated[int | None, typer.Option(help="(9104)", min=1, max=65535)] = None,
    worker_metrics_port: Annotated[int | None, typer.Option(help="(9105)", min=1, max=65535)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON object when ready.")] = False,
) -> None:
    """Start all services on this machine and keep them running; Ctrl-C stops them.

    What dies is restarted on the port it had. Other commands find the running stack by themselves.
    Each service's own settings come from the environment, for example ROLLWISE_GENERATION_LOG_LEVEL=debug.

    Example: rollwise up --state-dir run     (then, elsewhere: rollwise submit ...)
    """
    from deploy.launcher import Stack, StackOptions
    from deploy.ports import Ports
    from services.cli.stack_view import addresses, explained, start_with_progress, stop_with_progress

    base = Ports.any_free() if any_ports else Ports()
    given = {
        "api": api_port,
        "redis": redis_port,
        "generation": generation_port,
        "value_prior": value_prior_port,
        "value_prior_http": value_prior_http_port,
        "verifier": verifier_port,
        "allocator": allocator_port,
        "generation_metrics": generation_metrics_port,
        "value_prior_metrics": value_prior_metrics_port,
        "verifier_metrics": verifier_metrics_port,
        "allocator_metrics": allocator_metrics_port,
        "worker_metrics": worker_metrics_port,
    }
    ports = Ports(**{name: given[name] or port for name, port in base.as_dict().items()})
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"--state-dir {state_dir}: {error.strerror}", "give a folder that can be written") from error
    stack = Stack(StackOptions(state_dir, ports, redis_url, threads))
    with terminable() as stop:
        try:
            start_with_progress(stack)
            assert stack.endpoints is not None
            if as_json:
                print_json(stack.endpoints.model_dump(mode="json"))
            stderr.print(addresses(stack))
            note(f"logs: {stack.logs}   stop: Ctrl-C   try: rollwise doctor")
            with explained():
                stack.wait(stop)
        finally:
            stop_with_progress(stack)
    note("stopped")


@contextmanager
def terminable() -> Iterator[threading.Event]:
    """Within, SIGTERM and SIGHUP do what Ctrl-C does, and Ctrl-C works even where a shell had it ignored (`... &`).

    The event is set just before KeyboardInterrupt is raised, so a waiting loop may wait on it.
    """
    event = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        event.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
