"""TCP ports of a local stack: which are wanted, which are free.

Free ports are drawn below the range the kernel uses for outgoing connections, so that a port chosen now is not taken by
somebody's outgoing connection before the process that gets it has bound it, or while that process is being restarted.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

LOOPBACK = "127.0.0.1"
_FREE_RANGE = range(20_000, 32_000)


class PortInUse(Exception):
    """A wanted port is taken; the message names the port, what it was for and the option that changes it."""


@dataclass(frozen=True)
class Ports:
    """One number for each thing that listens; 0 asks for any free port."""

    redis: int = 7379
    generation: int = 7101
    value_prior: int = 7102
    value_prior_http: int = 8102
    verifier: int = 7103
    allocator: int = 7104
    api: int = 8100
    generation_metrics: int = 9101
    value_prior_metrics: int = 9102
    verifier_metrics: int = 9103
    allocator_metrics: int = 9104
    worker_metrics: int = 9105

    @classmethod
    def any_free(cls) -> Ports:
        """Every port 0: `resolve` picks free ones."""
        return cls(**{field.name: 0 for field in fields(cls)})

    def as_dict(self) -> dict[str, int]:
        """Name -> number."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def option_of(name: str) -> str:
    """The command-line option that sets the port called `name`."""
    return f"--{name.replace('_', '-')}-port"


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be bound again
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def resolve(wanted: Ports) -> Ports:
    """`wanted` with every 0 replaced by a free port. Raises PortInUse, naming all that are taken."""
    given = wanted.as_dict()
    fixed = {name: port for name, port in given.items() if port}
    _refuse_repeats(fixed)
    taken = [name for name, port in fixed.items() if not is_free(port)]
    if taken:
        ports = ", ".join(f"{fixed[name]} ({name})" for name in taken)
        options = " ".join(f"{option_of(name)} N" for name in taken)
        raise PortInUse(f"port in use: {ports}. Stop what listens there, or choose others: {options} (or --any-ports)")
    used = set(fixed.values())
    for name, port in given.items():
        if not port:
            given[name] = _free_port(used)
            used.add(given[name])
    return Ports(**given)


def _refuse_repeats(fixed: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for name, port in fixed.items():
        if port in seen:
            raise PortInUse(
                f"port {port} is wanted twice, by {option_of(seen[port])} and {option_of(name)}; change one"
            )
        seen[port] = name


def _free_port(used: set[int]) -> int:
    for _ in range(1_000):
        port = random.choice(_FREE_RANGE)
        if port not in used and is_free(port):
            return port
    raise PortInUse(f"no free port found between {_FREE_RANGE.start} and {_FREE_RANGE.stop}; give ports by hand")
