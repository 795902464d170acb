"""Settings of the verifier."""

from __future__ import annotations

import os

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.common.settings import Port, ServiceSettings
from services.verifier import worker
from services.verifier.pool import PoolOptions


class VerifierSettings(ServiceSettings):
    """The verifier judges completions against golds, in worker processes with a hard time limit."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="ROLLWISE_VERIFIER_", validate_default=True)

    port: Port = Field(7103, description="gRPC port; 0 takes any free one.")
    metrics_port: Port | None = Field(9103, description="Port of /metrics; 0 takes any free one, 'none' serves none.")
    workers: int = Field(
        default_factory=lambda: min(os.cpu_count() or 1, 8),
        ge=1,
        le=256,
        description="Worker processes, about 130 MB each; default: one a core, at most 8.",
    )
    limit_seconds: float = Field(
        5.0, gt=0, le=600, description="Wall-clock limit on one item; past it the worker is killed and replaced."
    )
    max_tasks: int = Field(5_000, ge=1, description="Items after which a worker is replaced by a fresh one.")
    queue_limit: int = Field(16_384, ge=1, description="Items that may wait; past it a request is refused as busy.")
    cache_size: int = Field(65_536, ge=0, description="Verdicts kept by content, so that equal items cost nothing.")
    memory_mb: int = Field(2_048, ge=0, description="Address space of one worker in MiB; 0 sets no limit.")
    domains: list[str] = Field(
        list(worker.DOMAINS), min_length=1, description="Domains to judge; others answer NO_VERDICT."
    )

    @field_validator("memory_mb")
    @classmethod
    def _enough(cls, value: int) -> int:
        if 0 < value < 512:
            raise ValueError("a worker needs at least 512 MiB of address space; 0 sets no limit")
        return value

    @field_validator("domains")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        unknown = sorted(set(value) - set(worker.DOMAINS))
        if unknown:
            raise ValueError(f"unknown: {', '.join(unknown)}; built are {', '.join(worker.DOMAINS)}")
        return value

    def pool_options(self) -> PoolOptions:
        """The pool's options."""
        return PoolOptions(
            workers=self.workers,
            limit_seconds=self.limit_seconds,
            max_tasks=self.max_tasks,
            queue_limit=self.queue_limit,
            cache_size=self.cache_size,
            memory_bytes=self.memory_mb << 20,
            domains=tuple(self.domains),
        )
