"""A whole Rollwise on one machine: embedded Valkey, the services, trainer API and worker.

    with Stack(StackOptions(state_dir=Path("run"))) as stack:
        stack.start(progress)
        stack.wait(until)

Leaving the block stops everything, whatever happened. What dies meanwhile is restarted on the port it had.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from deploy import endpoints as places
from deploy.endpoints import Endpoints
from deploy.health import why_not_serving
from deploy.ports import LOOPBACK, Ports, resolve
from deploy.processes import REDIS, STOP_ORDER, redis_spec, service_specs
from deploy.supervisor import Child, StackFailed, Supervisor

START_TIMEOUT_SECONDS = 180.0
Progress = Callable[["Stack"], None]


class StateDirInUse(Exception):
    """Another stack runs in the same folder."""


@dataclass(frozen=True)
class StackOptions:
    """What a stack needs to know; everything else is in the services' own settings (environment)."""

    state_dir: Path
    ports: Ports = field(default_factory=Ports)
    # None: an embedded Valkey.
    redis_url: str | None = None
    threads: int | None = None


class Stack:
    """All processes of one local installation."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.state_dir = options.state_dir.resolve()
        self.logs = self.state_dir / "logs"
        self.ports = options.ports
        self.endpoints: Endpoints | None = None
        self._lock: IO[str] | None = None
        self._supervisor: Supervisor | None = None
        self._publish_lock = threading.Lock()

    # ------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, progress: Progress = lambda stack: None, timeout: float = START_TIMEOUT_SECONDS) -> None:
        """Starts everything and returns when all serve.

        Raises PortInUse or StateDirInUse before anything is started, StackFailed when a process cannot be brought up.
        """
        self._take_state_dir()
        external = self.options.redis_url
        self.ports = resolve(self.options.ports)
        redis_url = external or f"redis://{LOOPBACK}:{self.ports.redis}/0"
        supervisor = self._supervisor = Supervisor(self.logs, why_not_serving, self._publish)
        services = service_specs(
            self.ports, redis_url=redis_url, state_dir=self.state_dir, threads=self.options.threads
        )
        self.endpoints = self._describe(redis_url)

        def tell() -> None:
            progress(self)

        if external is None:
            try:
                redis = redis_spec(self.state_dir / "redis", self.ports.redis)
            except ImportError as error:
                raise StackFailed(
                    "the embedded Valkey is not installed: pip install 'rollwise[local]', or give --redis-url"
                ) from error
            supervisor.start([redis])
            supervisor.wait_until_serving([REDIS], 30.0, tell)
        supervisor.start(services)
        supervisor.wait_until_serving([spec.name for spec in services], timeout, tell)
        self._publish()

    def wait(self, until: threading.Event, progress: Progress = lambda stack: None) -> None:
        """Returns when `until` is set; raises StackFailed when a process cannot be kept alive."""
        while not until.wait(0.2):
            self.check()
            progress(self)

    def check(self) -> None:
        """Raises StackFailed when a process cannot be kept alive."""
        if self._supervisor is not None and self._supervisor.failure is not None:
            raise self._supervisor.failure

    def stop(self, on_stop: Callable[[str], None] = lambda name: None) -> None:
        """Stops everything in order; does nothing when nothing runs."""
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            try:
                supervisor.stop(STOP_ORDER, on_stop=on_stop)
            finally:
                if self.endpoints is not None:
                    places.withdraw(self.endpoints)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def children(self) -> dict[str, Child]:
        """What is supervised at the moment, by name."""
        return self._supervisor.children if self._supervisor is not None else {}

    # ---------------------------------------------------------------------------------- inside

    def _take_state_dir(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        lock = (self.state_dir / "launcher.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StateDirInUse(
                f"another Rollwise runs in {self.state_dir}: stop it (Ctrl-C where it was started), or give --state-dir"
            ) from None
        self._lock = lock

    def _describe(self, redis_url: str) -> Endpoints:
        at = {name: f"{LOOPBACK}:{port}" for name, port in self.ports.as_dict().items()}
        metrics = {
            name.removesuffix("_metrics"): f"http://{address}/metrics"
            for name, address in at.items()
            if name.endswith("_metrics")
        }
        return Endpoints(
            launcher_pid=os.getpid(),
            launcher_started=places.own_start_time(),
            state_dir=str(self.state_dir),
            logs=str(self.logs),
            api_url=f"http://{at['api']}",
            value_prior_url=f"http://{at['value_prior_http']}",
            redis_url=redis_url,
            targets={name: at[name] for name in ("generation", "value_prior", "verifier", "allocator")},
            metrics={**metrics, "api": f"http://{at['api']}/metrics"},
            pids={},
        )

    def _publish(self) -> None:
        """Called whenever a process started, served or died: readers always see the pids of now."""
        if self.endpoints is None:
            return
        with self._publish_lock:
            children = dict(self.children)
            self.endpoints = self.endpoints.model_copy(
                update={
                    "pids": {name: pid for name, child in children.items() if (pid := child.pid) is not None},
                    "states": {name: child.state for name, child in children.items()},
                    "restarts": {name: child.restarts for name, child in children.items()},
                }
            )
            places.publish(self.endpoints)
