"""Settings of the allocator."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.paths import STATE_DIR
from services.common.settings import Port, ServiceSettings


class AllocatorSettings(ServiceSettings):
    """The allocator decides how many rollouts a prompt is worth, and buys them."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="ROLLWISE_ALLOCATOR_", validate_default=True)

    port: Port = Field(7104, description="gRPC port; 0 takes any free one.")
    metrics_port: Port | None = Field(9104, description="Port of /metrics; 0 takes any free one, 'none' serves none.")
    generation_target: str = Field("127.0.0.1:7101", description="host:port of the generation service.")
    value_prior_target: str = Field("127.0.0.1:7102", description="host:port of the value prior.")
    verifier_target: str = Field("127.0.0.1:7103", description="host:port of the verifier.")
    state_dir: Path = Field(STATE_DIR, description="Folder shared with the trainer; holds blobs/ for large groups.")
    consume: bool = Field(True, description="Work on the prompts stream (besides Allocate and Decide).")
    consumer: str = Field("allocator-0", min_length=1, description="Name in the stream's group; keep it stable.")
    max_groups: int = Field(64, ge=1, le=65_536, description="Groups in the making at a time.")
    max_deliveries: int = Field(5, ge=1, description="A prompt handed out more often is closed as filtered.")
    lease_seconds: float = Field(
        30.0, gt=0, description="A prompt whose allocator is silent for this long goes to another one."
    )
    feature_for_prior: bool = Field(
        False,
        description="Fetch the prompt's hidden state before the prior is asked (value prior with embedder policy).",
    )
