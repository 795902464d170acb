"""Settings of the trainer's two processes: the API (ROLLWISE_API_*) and the worker (ROLLWISE_WORKER_*)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from services.common.paths import STATE_DIR
from services.common.settings import ServiceSettings

# Weight folders are named to another process, which may have another working folder.
AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class ServiceTargets(ServiceSettings):
    """Where the other services are, and where jobs lie on disk."""

    generation_target: str = Field("127.0.0.1:7101", description="host:port of the generation service")
    value_prior_target: str = Field("127.0.0.1:7102", description="host:port of the value prior")
    verifier_target: str = Field("127.0.0.1:7103", description="host:port of the verifier")
    allocator_target: str = Field("127.0.0.1:7104", description="host:port of the allocator")
    state_dir: AbsolutePath = Field(STATE_DIR, description="folder for jobs/<id>/ (checkpoints, weights, records)")
    blob_dir: AbsolutePath | None = Field(
        None, description="folder for large payloads, shared with the allocator (default: state_dir/blobs)"
    )

    def tls(self) -> dict[str, Any]:
        """Arguments for grpc_client.connect."""
        return {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}

    @property
    def blob_folder(self) -> Path:
        """Where payloads too large for Redis lie; shared by every process that uses the streams."""
        return self.blob_dir if self.blob_dir is not None else self.state_dir / "blobs"

    def job_folder(self, job_id: str) -> Path:
        """Everything of one job on disk."""
        return self.state_dir / "jobs" / job_id


class ApiSettings(ServiceTargets):
    """The HTTP API."""

    model_config = SettingsConfigDict(env_prefix="ROLLWISE_API_")

    port: int = Field(8100, ge=0, le=65535, description="HTTP port; 0 takes any free one")
    preflight_rows: int = Field(10_000, ge=1, description="rows checked at submission; the worker checks all")
    preflight_seconds: float = Field(120.0, gt=0, description="time limit of the check at submission")


class WorkerSettings(ServiceTargets):
    """The worker that runs jobs."""

    model_config = SettingsConfigDict(env_prefix="ROLLWISE_WORKER_")

    port: int = Field(0, ge=0, le=65535, description="unused; the worker serves only metrics")
    metrics_port: int | None = Field(9105, description="Prometheus metrics; 0 takes any free port")
    consumer: str = Field("worker-1", description="stable name of this worker; two workers need two names")
    lease_seconds: float = Field(30.0, gt=1, description="a worker silent for this long loses its job to another")
    max_deliveries: int = Field(5, ge=1, description="starts of one run before its job is failed")
    push_seconds: float = Field(300.0, gt=0, description="time limit of one weight update, retries included")
    redis_patience_seconds: float = Field(60.0, gt=0, description="how long Redis may be gone before the job fails")
    watch_seconds: float = Field(2.0, gt=0, description="between looks at the generation server while waiting")
    empty_steps: int = Field(5, ge=1, description="steps in a row without a trainable group before the job fails")
    drain_seconds: float = Field(30.0, gt=0, description="how long the value prior may take to learn a step's outcomes")
    torch_threads: int = Field(0, ge=0, description="0 leaves torch's own choice")
