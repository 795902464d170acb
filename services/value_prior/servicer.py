"""ValuePriorService over gRPC: message in, domain call, message out."""

from __future__ import annotations

from typing import Any

import grpc
from rollwise.v1 import value_prior_pb2, value_prior_pb2_grpc

from services.value_prior.messages import outcomes_of, prior_message, prompts_of
from services.value_prior.model import ValuePrior

Context = grpc.aio.ServicerContext[Any, Any]


class ValuePriorServicer(value_prior_pb2_grpc.ValuePriorServiceServicer):
    """Thin layer over `ValuePrior`."""

    def __init__(self, model: ValuePrior) -> None:
        self._model = model

    async def Score(self, request: value_prior_pb2.ScoreRequest, context: Context) -> value_prior_pb2.ScoreResponse:
        """Priors in the order of the request."""
        before = request.before_version if request.HasField("before_version") else None
        priors = await self._model.score(request.policy_id, prompts_of(request), before_version=before)
        return value_prior_pb2.ScoreResponse(priors=[prior_message(prior) for prior in priors])

    async def Observe(
        self, request: value_prior_pb2.ObserveRequest, context: Context
    ) -> value_prior_pb2.ObserveResponse:
        """Acknowledged once durable."""
        result = await self._model.observe(outcomes_of(request.outcomes))
        return value_prior_pb2.ObserveResponse(
            accepted=result.accepted, duplicates=result.duplicates, stale=result.stale
        )

    async def Snapshot(
        self, request: value_prior_pb2.SnapshotRequest, context: Context
    ) -> value_prior_pb2.SnapshotResponse:
        """Everything learnt of one policy."""
        data, outcomes = await self._model.snapshot(request.policy_id)
        return value_prior_pb2.SnapshotResponse(snapshot=data, outcomes=outcomes)

    async def Restore(
        self, request: value_prior_pb2.RestoreRequest, context: Context
    ) -> value_prior_pb2.RestoreResponse:
        """Replaces the policy's context and raises its fence."""
        outcomes = await self._model.restore(request.policy_id, request.lineage, request.snapshot)
        return value_prior_pb2.RestoreResponse(outcomes=outcomes)
