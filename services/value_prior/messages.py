"""Messages of the contract to the value prior's plain values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollwise.v1 import common_pb2, value_prior_pb2

from services.common.errors import InvalidArgument
from services.value_prior.records import Feature, Outcome, Prior, PriorSource, Prompt

_DTYPES: dict[int, Literal["float32", "float16"]] = {
    common_pb2.FEATURE_DTYPE_FLOAT32: "float32",
    common_pb2.FEATURE_DTYPE_FLOAT16: "float16",
}
_SOURCES = {
    PriorSource.UNINFORMED: value_prior_pb2.PRIOR_SOURCE_UNINFORMED,
    PriorSource.CONTEXT: value_prior_pb2.PRIOR_SOURCE_CONTEXT,
    PriorSource.HISTORY: value_prior_pb2.PRIOR_SOURCE_HISTORY,
}


def prompts_of(request: value_prior_pb2.ScoreRequest) -> list[Prompt]:
    """The prompts of a Score call."""
    return [
        Prompt(
            text=prompt.text,
            prompt_id=prompt.prompt_id,
            feature=_feature(prompt.feature, f"prompts[{row}].feature") if prompt.HasField("feature") else None,
        )
        for row, prompt in enumerate(request.prompts)
    ]


def outcomes_of(outcomes: Sequence[value_prior_pb2.Outcome]) -> list[Outcome]:
    """The outcomes of an Observe call or of stream entries."""
    return [
        Outcome(
            outcome_id=outcome.outcome_id,
            policy_id=outcome.policy_id,
            text=outcome.text,
            successes=outcome.successes,
            trials=outcome.trials,
            lineage=outcome.lineage,
            policy_version=outcome.policy_version,
            prompt_id=outcome.prompt_id,
            feature=_feature(outcome.feature, f"outcomes[{row}].feature") if outcome.HasField("feature") else None,
            predicted=outcome.predicted if outcome.HasField("predicted") else None,
        )
        for row, outcome in enumerate(outcomes)
    ]


def prior_message(prior: Prior) -> value_prior_pb2.Prior:
    """A prior as a message."""
    return value_prior_pb2.Prior(
        prompt_id=prior.prompt_id,
        value=prior.value,
        uncertainty=prior.uncertainty,
        source=_SOURCES[prior.source],
        context_size=prior.context_size,
    )


def _feature(feature: common_pb2.HiddenFeature, field: str) -> Feature:
    dtype = _DTYPES.get(feature.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{field}.dtype is {feature.dtype}, must be FEATURE_DTYPE_FLOAT32 or FEATURE_DTYPE_FLOAT16",
            field=f"{field}.dtype",
        )
    return Feature(feature.layer, dtype, feature.dimension, feature.values, feature.policy_version)
