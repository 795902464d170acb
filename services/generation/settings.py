"""Settings of the generation service: environment prefix ROLLWISE_GENERATION_, or flags."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings


class GenerationSettings(ServiceSettings):
    """Samples rollouts from the current policy, over gRPC."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="ROLLWISE_GENERATION_", validate_default=True)

    port: int = Field(7101, ge=0, le=65535, description="gRPC port; 0 takes any free one.")
    metrics_port: int | None = Field(
        9101, ge=0, le=65535, description="Port of /metrics; 0 takes any free one, 'none' serves none."
    )
    state_dir: Path = Field(
        Path(".rollwise"), description="Folder for generation/current.json, which names the last acknowledged weights."
    )
    model: str | None = Field(
        None,
        description="Weights to start with when none are remembered: 'smollm2' or a Hugging Face folder. Without it "
        "the service waits for UpdateWeights.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of weights, keys and values.")
    device: str = Field("cpu", description="Torch device, for example cpu or cuda.")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 leaves torch's choice (one a core).")
    pack_weights: bool = Field(
        True, description="Keep float32 weights a second time in the layout the CPU multiplies fastest."
    )
    feature_layer: int | None = Field(
        None, ge=0, description="0-based block whose output is the prompt feature; 'none': about 2/3 of the depth."
    )
    max_rows: int = Field(256, ge=1, description="Rollouts decoded together.")
    max_batch_tokens: int = Field(
        131_072, ge=16, description="Bound on rollouts x longest rollout, and so on the memory of keys and values."
    )
    max_prefill_tokens: int = Field(8192, ge=16, description="Padded prompt tokens in one prefill pass.")
    prefix_cache_tokens: int = Field(
        65_536, ge=0, description="Prompt tokens whose keys and values are kept for later rounds; 0 keeps none."
    )
    max_waiting: int = Field(4096, ge=1, description="Requests that may wait; one more is refused as BUSY.")
