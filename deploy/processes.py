"""Which processes make up a local stack, how each is started and in which order they stop.

Knows the environment variables of every service's settings, and nothing of how processes are kept alive.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.ports import LOOPBACK, Ports

REDIS = "redis"
# Consumers first, so that nobody is left waiting for a service that is gone; Redis last, so that everything is settled.
STOP_ORDER = ("worker", "api", "allocator", "generation", "verifier", "value_prior", REDIS)
# The command line's own variables are no service's settings.
CLI_PREFIX = "ROLLWISE_CLI_"


@dataclass(frozen=True)
class ProcessSpec:
    """One process: how it is started, and how to see that it serves."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    # Address of a gRPC health service, or URL that answers 200, when it serves.
    grpc_target: str | None = None
    http_url: str | None = None
    redis_port: int | None = None


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def redis_spec(folder: Path, port: int) -> ProcessSpec:
    """The embedded Valkey: append-only file, no eviction, loopback only. Raises ConfigurationError
    without a server program."""
    from services.common.embedded import _binary

    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "port": str(port),
        "bind": LOOPBACK,
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    command = [str(_binary())]
    for name, value in options.items():
        command += [f"--{name}", value]
    return ProcessSpec(REDIS, tuple(command), redis_port=port)


def service_specs(ports: Ports, *, redis_url: str, state_dir: Path, threads: int | None = None) -> list[ProcessSpec]:
    """Every Python process of a stack. `threads`: of generation and trainer each; default all cores.

    On-policy, generation and training alternate, so both may use every core; the others get one thread.
    """
    heavy, light = str(threads or cores()), "1"
    target = {
        name: f"{LOOPBACK}:{getattr(ports, name)}" for name in ("generation", "value_prior", "verifier", "allocator")
    }
    state = str(state_dir)

    def service(name: str, module: str, count: str, settings: Mapping[str, object], **health: str) -> ProcessSpec:
        prefix = f"ROLLWISE_{name.upper()}_"
        ready = state_dir / "ready" / f"{name}.json"
        values = {"redis_url": redis_url, "log_format": "json", "ready_file": ready, **settings}
        environment = {prefix + key.upper(): str(value) for key, value in values.items()}
        environment |= {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
        # Idle threads sleep instead of spinning: the processes share their cores, and spinning slows each tenfold.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment["PYTHONUNBUFFERED"] = "1"
        command = (sys.executable, "-m", module)
        return ProcessSpec(name, command, environment, ready, health.get("grpc"), health.get("http"))

    return [
        service(
            "value_prior",
            "services.value_prior",
            light,
            {
                "port": ports.value_prior,
                "http_port": ports.value_prior_http,
                "metrics_port": ports.value_prior_metrics,
                "blob_dir": state_dir / "blobs",
            },
            grpc=target["value_prior"],
        ),
        service(
            "verifier",
            "services.verifier",
            light,
            {"port": ports.verifier, "metrics_port": ports.verifier_metrics},
            grpc=target["verifier"],
        ),
        service(
            "generation",
            "services.generation",
            heavy,
            {"port": ports.generation, "metrics_port": ports.generation_metrics, "state_dir": state},
            grpc=target["generation"],
        ),
        service(
            "allocator",
            "services.allocator",
            light,
            {
                "port": ports.allocator,
                "metrics_port": ports.allocator_metrics,
                "state_dir": state,
                "generation_target": target["generation"],
                "verifier_target": target["verifier"],
                "value_prior_target": target["value_prior"],
            },
            grpc=target["allocator"],
        ),
        service(
            "api",
            "trainer.api",
            light,
            {"port": ports.api, "state_dir": state, "verifier_target": target["verifier"]},
            http=f"http://{LOOPBACK}:{ports.api}/healthz",
        ),
        service(
            "worker",
            "trainer.worker",
            heavy,
            {
                "metrics_port": ports.worker_metrics,
                "state_dir": state,
                "generation_target": target["generation"],
                "verifier_target": target["verifier"],
                "value_prior_target": target["value_prior"],
                "allocator_target": target["allocator"],
            },
        ),
    ]
