"""Says whether a process serves: its ready file is there, and its own health check agrees."""

from __future__ import annotations

import socket

from deploy.ports import LOOPBACK
from deploy.processes import ProcessSpec

_TIMEOUT_SECONDS = 1.0


def why_not_serving(spec: ProcessSpec) -> str | None:
    """None when `spec` serves, else the cause in a few words. Never raises for a process that is merely down."""
    if spec.ready_file is not None and not spec.ready_file.exists():
        return "still starting (no ready file yet)"
    if spec.redis_port is not None:
        return redis_cause(spec.redis_port)
    if spec.grpc_target is not None:
        return grpc_cause(spec.grpc_target)
    if spec.http_url is not None:
        return http_cause(spec.http_url)
    return None


def redis_cause(port: int, host: str = LOOPBACK) -> str | None:
    """Asks a Redis-compatible server for a PONG; one that still loads its append-only file does not serve."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError as error:
        return f"no connection to port {port} ({error})"
    return None if answer.startswith(b"+PONG") else f"answered {answer.decode(errors='replace').strip()!r} to PING"


def grpc_cause(target: str, timeout: float = _TIMEOUT_SECONDS) -> str | None:
    """The standard gRPC health check of the whole server."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return f"health check failed: {error.code().name} {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"health check says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def http_cause(url: str, timeout: float = _TIMEOUT_SECONDS) -> str | None:
    """A GET that must answer 2xx."""
    import httpx

    try:
        answer = httpx.get(url, timeout=timeout, trust_env=False)
    except httpx.HTTPError as error:
        return f"{url}: {error or type(error).__name__}"
    return None if answer.is_success else f"{url} answered {answer.status_code}"
