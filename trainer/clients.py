"""The services as the trainer calls them: every call has a deadline, and every failure names its service.

The trainer asks the generation server for its status and gives it weights, keeps and restores the value prior's
context, and has gold answers checked; rollouts themselves travel by the streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rollwise.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    value_prior_pb2,
    value_prior_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

from services.common.errors import DeadlineExceeded, RollwiseError, Unavailable
from services.common.grpc_client import connect
from trainer.failures import JobFailedError
from trainer.settings import ServiceTargets

T = TypeVar("T")

STATUS_SECONDS = 5.0
PRIOR_SECONDS = 120.0
CHECK_SECONDS = 120.0
CHECK_BATCH = 256


class Services:
    """Channels to the four services; close them with `close`."""

    def __init__(self, targets: ServiceTargets) -> None:
        token = targets.token
        tls = targets.tls()
        self.targets = {
            "generation": targets.generation_target,
            "value-prior": targets.value_prior_target,
            "verifier": targets.verifier_target,
            "allocator": targets.allocator_target,
        }
        self._channels: dict[str, grpc.aio.Channel] = {
            name: connect(target, token=token, **tls) for name, target in self.targets.items()
        }
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channels["generation"])
        self._prior = value_prior_pb2_grpc.ValuePriorServiceStub(self._channels["value-prior"])
        self._verifier = verifier_pb2_grpc.VerifierServiceStub(self._channels["verifier"])

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()

    # ------------------------------------------------------------------------------------ generation

    async def push_weights(
        self, path: Path, *, policy_id: str, version: int, patience_seconds: float, keep_running: bool = False
    ) -> generation_pb2.UpdateWeightsResponse:
        """Has the generation server serve `version` from `path`; returns when it does.

        With `keep_running`, rollouts in flight go on under the new weights (their spans say which token is whose);
        without, they finish first. Idempotent by version, so a server that is down is asked again until
        `patience_seconds` are over. Raises JobFailedError (code weights_not_served) with the server's own words.
        """
        request = generation_pb2.UpdateWeightsRequest(
            policy_version=version,
            path=str(path),
            mode=generation_pb2.UPDATE_MODE_KEEP if keep_running else generation_pb2.UPDATE_MODE_WAIT,
            allow_rollback=True,
            policy_id=policy_id,
        )
        return await self._insist(
            "generation",
            f"serve version {version} of {policy_id}",
            lambda seconds: self._generation.UpdateWeights(request, timeout=seconds),
            patience_seconds=patience_seconds,
            code="weights_not_served",
        )

    async def engine_status(self) -> generation_pb2.GetEngineStatusResponse:
        """What the generation server serves. Raises RollwiseError."""
        response: generation_pb2.GetEngineStatusResponse = await self._generation.GetEngineStatus(
            generation_pb2.GetEngineStatusRequest(), timeout=STATUS_SECONDS
        )
        return response

    # ----------------------------------------------------------------------------------- value prior

    async def restore_prior(self, policy_id: str, *, lineage: int, snapshot: bytes, patience_seconds: float) -> int:
        """Puts the prior's context of this policy back (empty: forgets it) and fences off older lineages."""
        request = value_prior_pb2.RestoreRequest(policy_id=policy_id, lineage=lineage, snapshot=snapshot)
        response = await self._insist(
            "value-prior",
            "restore its context",
            lambda seconds: self._prior.Restore(request, timeout=seconds),
            patience_seconds=patience_seconds,
            code="prior_not_restored",
        )
        return response.outcomes

    async def snapshot_prior(self, policy_id: str, *, patience_seconds: float) -> bytes:
        """Everything the prior has learnt of this policy."""
        request = value_prior_pb2.SnapshotRequest(policy_id=policy_id)
        response = await self._insist(
            "value-prior",
            "hand out a snapshot",
            lambda seconds: self._prior.Snapshot(request, timeout=seconds),
            patience_seconds=patience_seconds,
            code="prior_not_saved",
        )
        return response.snapshot

    # -------------------------------------------------------------------------------------- verifier

    async def check_references(
        self, references: Sequence[common_pb2.Reference], *, timeout_seconds: float = CHECK_SECONDS
    ) -> list[verifier_pb2.ReferenceCheck]:
        """One check a reference, in order. Raises RollwiseError."""
        checks: list[verifier_pb2.ReferenceCheck] = []
        deadline = time.monotonic() + timeout_seconds
        for start in range(0, len(references), CHECK_BATCH):
            request = verifier_pb2.CheckReferencesRequest(references=references[start : start + CHECK_BATCH])
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the verifier checked {start} of {len(references)} gold answers in time")
            response = await self._verifier.CheckReferences(request, timeout=left)
            if len(response.checks) != len(request.references):
                raise RollwiseError(
                    f"the verifier answered {len(response.checks)} checks for {len(request.references)} references"
                )
            checks.extend(response.checks)
        return checks

    # ---------------------------------------------------------------------------------------- health

    async def health(self, name: str) -> str | None:
        """None when the service is well, else what is the matter, in words."""
        stub = health_pb2_grpc.HealthStub(self._channels[name])
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except RollwiseError as error:
            return f"{name} at {self.targets[name]} is out of reach: {error}"
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            return f"{name} at {self.targets[name]} is up, but not serving"
        return None

    async def all_health(self) -> dict[str, str | None]:
        """Health of every service, asked at once."""
        names = list(self._channels)
        return dict(zip(names, await asyncio.gather(*(self.health(name) for name in names)), strict=True))

    async def _insist(
        self,
        service: str,
        what: str,
        call: Callable[[float], Awaitable[T]],
        *,
        patience_seconds: float,
        code: str,
    ) -> T:
        """Repeats an idempotent call while the service is out of reach, within `patience_seconds` in all."""
        deadline, pause = time.monotonic() + patience_seconds, 0.2
        while True:
            try:
                return await call(max(0.1, deadline - time.monotonic()))
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() + pause >= deadline:
                    raise JobFailedError(
                        f"{service} at {self.targets[service]} did not {what} within {patience_seconds:.0f} s: {error}",
                        code=code,
                        service=service,
                    ) from error
            except RollwiseError as error:
                raise JobFailedError(
                    f"{service} at {self.targets[service]} refused to {what}: {error}", code=code, service=service
                ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 3.0)
