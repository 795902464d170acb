"""What a training job is: the specification that is submitted, validated, stored and recorded with every run.

Unknown keys are refused. This module knows no service, no model and no file system.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

# Beyond these a value is a slip of the keyboard; the wire carries counts in 32 bits, and timers end at some years.
PositiveInt = Annotated[int, Field(gt=0, le=1_000_000_000)]
NonNegativeInt = Annotated[int, Field(ge=0, le=1_000_000_000)]
Rollouts = Annotated[int, Field(gt=0, le=65_536)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]


class Spec(BaseModel):
    """Base of every part of a job specification: immutable, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


# ---------------------------------------------------------------------------------------------- data


class HubData(Spec):
    """A Hugging Face data set by name."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"


class GymTask(Spec):
    """One task of reasoning-gym; `config` holds the keyword arguments of the task's own configuration."""

    task: str
    size: int = Field(gt=0, le=1_000_000)
    seed: int = 0
    config: dict[str, Any] = Field(default_factory=dict)


class DataSource(Spec):
    """Where prompts come from: exactly one of `path` (JSONL), `hub` or `reasoning_gym`."""

    path: str | None = Field(None, description="JSONL file with rows {id?, prompt | messages, domain?, answer | ...}")
    hub: HubData | None = None
    reasoning_gym: list[GymTask] | None = Field(None, min_length=1)
    limit: PositiveInt | None = Field(None, description="use only the first rows")

    @model_validator(mode="after")
    def _exactly_one(self) -> DataSource:
        given = [name for name in ("path", "hub", "reasoning_gym") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, hub, reasoning_gym (got {', '.join(given) or 'none'})")
        return self


class Example(Spec):
    """One solved prompt that is shown before every prompt."""

    prompt: str
    answer: str


class PromptFormat(Spec):
    """How a plain `prompt` becomes chat messages; rows with `messages` are used as they are."""

    system: str | None = None
    examples: list[Example] = Field(default_factory=list)


# --------------------------------------------------------------------------------- the four axes


class UniformPrompts(Spec):
    """Every prompt once an epoch, in an order drawn from the seed."""

    kind: Literal["uniform"] = "uniform"


class FixedBudget(Spec):
    """The same number of rollouts for every prompt."""

    kind: Literal["fixed"] = "fixed"
    rollouts: Rollouts = 16


class OslaBudget(Spec):
    """V0.5's one-step-look-ahead rule."""

    kind: Literal["osla"] = "osla"
    k_min: Rollouts = 4
    k_max: Rollouts = 16
    price: PositiveFloat | None = Field(None, description="squared reward (scale -1..1) a rollout; default 1/k_max^2")
    round_size: NonNegativeInt = Field(1, description="rollouts bought at a time; 1 is exact, 0 goes up to k*")

    @model_validator(mode="after")
    def _ordered(self) -> OslaBudget:
        if self.k_min > self.k_max:
            raise ValueError(f"k_min ({self.k_min}) is larger than k_max ({self.k_max})")
        return self


class GroupMeanBaseline(Spec):
    """Mean reward of the group (GRPO); `leave_one_out` leaves the rollout's own reward out (RLOO)."""

    kind: Literal["group_mean"] = "group_mean"
    leave_one_out: bool = False


class ShrinkageBaseline(Spec):
    """V0.5: the group mean, shrunk toward the prior as far as the evidence allows."""

    kind: Literal["shrinkage"] = "shrinkage"
    leave_one_out: bool = False


class LossSpec(Spec):
    """Clipped policy-gradient loss and how it is summed."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 10.0
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    constant_length: PositiveInt | None = Field(None, description="tokens a rollout counts for, aggregation 'constant'")
    std_normalise: bool = Field(False, description="divide advantages by the group's standard deviation (GRPO)")
    importance_cap: PositiveFloat = Field(2.0, description="cap of the truncated importance weight engine -> trainer")

    @model_validator(mode="after")
    def _constant_needs_length(self) -> LossSpec:
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError("constant_length belongs to aggregation 'constant', and only to it")
        return self


Budget = Annotated[FixedBudget | OslaBudget, Field(discriminator="kind")]
Baseline = Annotated[GroupMeanBaseline | ShrinkageBaseline, Field(discriminator="kind")]


class AlgorithmSpec(Spec):
    """One choice on each axis: prompts, budget, baseline, loss."""

    prompts: UniformPrompts = UniformPrompts()
    budget: Budget
    baseline: Baseline
    loss: LossSpec = LossSpec()

    @property
    def needs_prior(self) -> bool:
        """True when the allocator must ask the value prior before the first rollout."""
        return isinstance(self.budget, OslaBudget) or isinstance(self.baseline, ShrinkageBaseline)


PRESETS: dict[str, AlgorithmSpec] = {
    "v0.5": AlgorithmSpec(budget=OslaBudget(), baseline=ShrinkageBaseline(), loss=LossSpec()),
    "grpo": AlgorithmSpec(
        budget=FixedBudget(rollouts=16),
        baseline=GroupMeanBaseline(),
        loss=LossSpec(clip_high=0.2, dual_clip=None, aggregation="sequence", std_normalise=True),
    ),
}


# ------------------------------------------------------------------------------------------- the run


class OptimizerSpec(Spec):
    """AdamW with linear warm-up, then constant."""

    learning_rate: PositiveFloat = 1e-6
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: NonNegativeInt = 10
    gradient_clip: PositiveFloat = 1.0
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    micro_batch_tokens: PositiveInt = Field(8192, description="padded tokens a forward pass; no effect on gradients")


class SamplingSpec(Spec):
    """How training rollouts are drawn. Truncated sampling (top-p, top-k) is refused: its log-probs would be biased."""

    temperature: PositiveFloat = 1.0
    max_tokens: PositiveInt = 1024


class EvaluationSpec(Spec):
    """Held-out prompts, graded before, during and after training."""

    data: DataSource
    every: NonNegativeInt = Field(10, description="steps between evaluations; 0: only before and after")
    rollouts: Rollouts = 1
    temperature: float = Field(0.0, ge=0)
    max_tokens: PositiveInt | None = Field(None, description="default: that of training")


class JobSpec(Spec):
    """A training job."""

    policy: str = Field(min_length=1, description="smollm2, tiny, or the path or hub name of a Hugging Face model")
    data: DataSource
    evaluation: EvaluationSpec | None = None
    format: PromptFormat = PromptFormat()
    preset: str = "v0.5"
    algorithm: AlgorithmSpec = Field(PRESETS["v0.5"], description="default: the preset's; given keys override it")
    optimizer: OptimizerSpec = OptimizerSpec()
    sampling: SamplingSpec = SamplingSpec()
    steps: NonNegativeInt = Field(100, description="optimizer steps; 0 only evaluates")
    prompts_per_step: PositiveInt = 32
    max_staleness: NonNegativeInt = Field(0, description="policy versions that generation may run ahead")
    seed: int = Field(0, ge=0, lt=2**31)
    deterministic: bool = Field(False, description="same seed, same steps (transformers engine); slower")
    checkpoint_every: NonNegativeInt = Field(10, description="steps; 0: only at the end")
    keep_checkpoints: PositiveInt = 2
    group_deadline_seconds: Seconds = 300.0
    stall_timeout_seconds: Seconds = Field(600.0, description="no group for this long ends the job with the cause")
    name: str | None = Field(None, max_length=200)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        """Overlays what was given under `algorithm` on the preset's choices, key by key."""
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "v0.5")
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
        overrides = given.get("algorithm") or {}
        if isinstance(overrides, AlgorithmSpec):
            return given
        if not isinstance(overrides, dict):
            # pydantic turns a ValueError, and only that, into an error that names the field.
            raise ValueError("algorithm must be an object with keys prompts, budget, baseline, loss")  # noqa: TRY004
        return {**given, "algorithm": overlay(PRESETS[name].model_dump(), overrides)}

    @model_validator(mode="after")
    def _deterministic_is_on_policy(self) -> JobSpec:
        if self.deterministic and self.max_staleness:
            raise ValueError("deterministic needs max_staleness 0: with more, the batches depend on timing")
        return self


def overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, recursively; another `kind` replaces the whole choice."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = overlay(old, value)
        else:
            merged[key] = value
    return merged
