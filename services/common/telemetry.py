"""Prometheus metrics that every process has, all in one place, and the server that shows them.

Names start with `rollwise_`, units are base units, and no label grows with prompts, rollouts or entries.
"""

from dataclasses import dataclass, field
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from services.common.errors import ConfigurationError

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

HEALTHY = Gauge("rollwise_healthy", "1 while the service says that it can work, else 0.", ["service"])

GRPC_SERVER_HANDLED = Counter(
    "rollwise_grpc_server_handled_total", "Calls that ended, by status code.", ["service", "method", "code"]
)
GRPC_SERVER_SECONDS = Histogram(
    "rollwise_grpc_server_duration_seconds",
    "Time from a call's start to its end.",
    ["service", "method"],
    buckets=_LATENCY,
)
GRPC_SERVER_IN_FLIGHT = Gauge("rollwise_grpc_server_in_flight", "Calls in progress.", ["service", "method"])
GRPC_CLIENT_HANDLED = Counter(
    "rollwise_grpc_client_handled_total", "Calls made that ended, by status code.", ["service", "method", "code"]
)
GRPC_CLIENT_SECONDS = Histogram(
    "rollwise_grpc_client_duration_seconds",
    "Time from a call made to its end.",
    ["service", "method"],
    buckets=_LATENCY,
)

STREAM_PUBLISHED = Counter("rollwise_stream_published_total", "Entries written.", ["stream"])
STREAM_DUPLICATES = Counter("rollwise_stream_duplicates_total", "Publications of an id already seen.", ["stream"])
STREAM_STALE = Counter("rollwise_stream_stale_total", "Publications of an older lineage, discarded.", ["stream"])
STREAM_BUSY = Counter("rollwise_stream_busy_total", "Publications refused because the stream was full.", ["stream"])
STREAM_DELIVERED = Counter(
    "rollwise_stream_delivered_total", "Entries handed out, by how they came.", ["stream", "source"]
)
STREAM_SETTLED = Counter("rollwise_stream_settled_total", "Entries done with and deleted.", ["stream"])
STREAM_BURIED = Counter("rollwise_stream_buried_total", "Entries moved to the dead stream.", ["stream"])
STREAM_LEASES_LOST = Counter(
    "rollwise_stream_leases_lost_total", "Entries that another consumer took, or that vanished, while held.", ["stream"]
)
STREAM_LENGTH = Gauge("rollwise_stream_length", "Entries in the stream.", ["stream"])
STREAM_UNDELIVERED = Gauge("rollwise_stream_undelivered", "Entries that no consumer has had yet.", ["stream"])
STREAM_PENDING = Gauge("rollwise_stream_pending", "Entries delivered and not settled.", ["stream"])
REDIS_RECONNECTS = Counter("rollwise_redis_reconnects_total", "Redis commands tried again after a lost connection.")


def stream_label(stream: str) -> str:
    """Return the label of a stream: its kind without the job's id, so that labels stay few."""
    parts = stream.split(":")
    # rollwise:job:<id>:groups -> job:groups
    if len(parts) >= 4 and parts[1] == "job":
        return ":".join(["job", *parts[3:]])
    return ":".join(parts[1:]) or stream


@dataclass
class MetricsServer:
    """A running /metrics endpoint."""

    port: int
    _server: WSGIServer = field(repr=False)
    _thread: Thread = field(repr=False)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve /metrics in a thread; port 0 takes any free one.

    Raises:
        ConfigurationError: the port is taken or the address is not ours.
    """
    try:
        started: tuple[Any, Thread] = start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another with --metrics-port "
            "(0 takes any free one)",
            reason="PORT_IN_USE",
            port=str(port),
            setting="metrics_port",
        ) from error
    server, thread = started
    return MetricsServer(port=int(server.server_port), _server=server, _thread=thread)


def start_metrics_server(port: int, host: str = "127.0.0.1") -> int:
    """Serve /metrics for the life of the process and return the port; 0 takes any free one."""
    return serve_metrics(port, host).port
