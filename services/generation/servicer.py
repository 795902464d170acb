"""Messages to the engine's plain data and back. Thin: every decision is the engine's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import grpc
from rollwise.v1 import common_pb2, generation_pb2, generation_pb2_grpc

from services.common.errors import InvalidArgument
from services.common.packing import pack_floats, pack_ids, unpack_ids
from services.generation.engine import (
    Engine,
    Finish,
    GenerationRequest,
    GenerationResult,
    Rollout,
    Sampling,
    UpdateMode,
)

_FINISH = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    Finish.ABORTED: common_pb2.FINISH_REASON_ABORTED,
}
_MODES = {
    generation_pb2.UPDATE_MODE_UNSPECIFIED: UpdateMode.WAIT,
    generation_pb2.UPDATE_MODE_WAIT: UpdateMode.WAIT,
    generation_pb2.UPDATE_MODE_KEEP: UpdateMode.KEEP,
    generation_pb2.UPDATE_MODE_ABORT: UpdateMode.ABORT,
}
Context = grpc.aio.ServicerContext[Any, Any]
# An answer must leave before its caller's deadline; the update gives up this much earlier.
_MARGIN_SECONDS = 0.2


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC face of an Engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        """Sample rollouts; a cancelled call cancels this coroutine, and with it the work."""
        result = await self._engine.generate(request_from_message(request))
        return response_message(request.request_id, result)

    async def UpdateWeights(
        self, request: generation_pb2.UpdateWeightsRequest, context: Context
    ) -> generation_pb2.UpdateWeightsResponse:
        """Serve other weights."""
        if not request.path:
            raise InvalidArgument("path is empty; name the folder with the weights", reason="BAD_REQUEST")
        mode = _MODES.get(request.mode)
        if mode is None:
            raise InvalidArgument(f"unknown update mode {request.mode}", reason="BAD_REQUEST")
        remaining = context.time_remaining()
        deadline = None
        if remaining is not None and math.isfinite(remaining):
            deadline = max(0.0, remaining - _MARGIN_SECONDS)
        result = await self._engine.update_weights(
            Path(request.path),
            policy_id=request.policy_id,
            version=request.policy_version,
            mode=mode,
            allow_rollback=request.allow_rollback,
            deadline_seconds=deadline,
        )
        return generation_pb2.UpdateWeightsResponse(
            policy_version=result.policy_version,
            seconds=result.seconds,
            kept_rollouts=result.kept_rollouts,
            aborted_rollouts=result.aborted_rollouts,
        )

    async def GetEngineStatus(
        self, request: generation_pb2.GetEngineStatusRequest, context: Context
    ) -> generation_pb2.GetEngineStatusResponse:
        """Say what is served and how busy the engine is."""
        status = self._engine.status()
        return generation_pb2.GetEngineStatusResponse(
            engine=status.engine,
            model=status.model,
            policy_id=status.policy_id,
            policy_version=status.policy_version,
            running_rollouts=status.running_rollouts,
            waiting_requests=status.waiting_requests,
            generated_tokens=status.generated_tokens,
            context_length=status.context_length,
            vocabulary_size=status.vocabulary_size,
            stop_token_ids=status.stop_token_ids,
            feature_layer=status.feature_layer,
        )


def request_from_message(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    """The engine's request; numbers are checked by the engine."""
    sampling = message.sampling
    return GenerationRequest(
        prompt=tuple(unpack_ids(message.prompt_token_ids).tolist()),
        count=message.count,
        sampling=Sampling(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sampling.stop_token_ids),
            seed=sampling.seed if sampling.HasField("seed") else None,
        ),
        request_id=message.request_id,
        first_index=message.first_index,
        want_feature=message.want_prompt_feature,
        min_policy_version=message.min_policy_version if message.HasField("min_policy_version") else None,
        time_limit_seconds=message.time_limit_seconds if message.HasField("time_limit_seconds") else None,
        pinned_batch=message.pinned_batch,
        policy_id=message.policy_id,
    )


def response_message(request_id: str, result: GenerationResult) -> generation_pb2.GenerateResponse:
    """The answer on the wire."""
    response = generation_pb2.GenerateResponse(
        request_id=request_id,
        samples=[_sample_message(rollout) for rollout in result.samples],
        policy_version=result.policy_version,
        prefix_cached=result.prefix_cached,
    )
    if result.feature is not None:
        response.prompt_feature.CopyFrom(
            common_pb2.HiddenFeature(
                layer=result.feature.layer,
                dtype=common_pb2.FEATURE_DTYPE_FLOAT32,
                dimension=len(result.feature.values),
                values=pack_floats(result.feature.values),
                policy_version=result.feature.policy_version,
            )
        )
    return response


def _sample_message(rollout: Rollout) -> generation_pb2.Sample:
    return generation_pb2.Sample(
        index=rollout.index,
        token_ids=pack_ids(rollout.tokens),
        logprobs=pack_floats(rollout.logprobs),
        finish_reason=_FINISH[rollout.finish],
        version_spans=[
            common_pb2.VersionSpan(policy_version=version, token_count=count) for version, count in rollout.spans
        ],
        text=rollout.text,
    )
