"""Settings of the value prior."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import Port, ServiceSettings


class ValuePriorSettings(ServiceSettings):
    """Value prior: predicts how likely a policy is to solve a prompt, over gRPC and HTTP."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="ROLLWISE_VALUE_PRIOR_", validate_default=True)

    port: Port = Field(7102, description="gRPC port; 0 takes any free one.")
    http_port: Port | None = Field(8102, description="HTTP port (REST, /docs, /metrics); 0: any free, 'none': no HTTP.")
    metrics_port: Port | None = Field(9102, description="Port of /metrics; 0 takes any free one, 'none' serves none.")
    embedder: str = Field(
        "hashing",
        min_length=1,
        description="How prompts are compared: hashing, smollm2, policy (the hidden state sent along), a model folder.",
    )
    embedder_layer: int | None = Field(
        None, ge=0, description="0-based block of a language-model embedder; default two thirds of the depth."
    )
    embedder_threads: Annotated[int, Field(ge=1, le=64)] = Field(1, description="CPU threads of the embedder.")
    context_capacity: int = Field(4096, ge=16, le=65_536, description="Outcomes kept a policy.")
    fit_rows: int = Field(1024, ge=8, le=16_384, description="Newest outcomes that the regression uses.")
    max_policies: int = Field(64, ge=1, description="Policies in memory; the others wait in Redis.")
    context_ttl_seconds: int = Field(
        30 * 86_400, ge=60, description="Life of a policy's context after its last change."
    )
    max_prompts: int = Field(4096, ge=1, description="Prompts in one Score.")
    max_outcomes: int = Field(4096, ge=1, description="Outcomes in one Observe.")
    max_text_bytes: int = Field(262_144, ge=1, description="UTF-8 bytes of one prompt.")
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Size of one HTTP request's body.")
    catch_up_seconds: float = Field(
        5.0, ge=0, description="How long a Score with before_version waits for outcomes published before it."
    )
    redis_patience_seconds: float = Field(
        5.0, ge=0, description="How long a call waits for a Redis that does not answer before it fails as UNAVAILABLE."
    )
    consume: bool = Field(True, description="Learn from the outcomes stream (besides Observe).")
    consumer: str = Field("value-prior-0", min_length=1, description="Name in the stream's group; keep it stable.")
    blob_dir: str | None = Field(
        None, description="Folder of payloads too large for the stream (default: run/blobs, as the trainer's)."
    )
