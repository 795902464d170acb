"""The engine on Hugging Face transformers: CPU by default, the same code on a GPU.

The asyncio side: checks requests, stages weights beside the running batch, and waits for the scheduler's thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

from services.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, RollwiseError, Unavailable
from services.common.logging import get_logger
from services.generation import metrics, weights
from services.generation.engine import (
    EngineStatus,
    GenerationRequest,
    GenerationResult,
    UpdateMode,
    UpdateResult,
)
from services.generation.job import Job, check_request
from services.generation.model import LoadedModel, Staged, load_model
from services.generation.packed_linear import can_pack
from services.generation.scheduler import Limits, Scheduler, Update
from services.generation.served import recall, remember

log = get_logger("rollwise.generation")
T = TypeVar("T")


class TransformersEngine:
    """An Engine (see engine.py) with continuous batching.

    Args:
        limits: Bounds on rows, tokens and queues.
        model: Folder to serve as version 0 of policy "" when nothing was remembered; None starts idle.
        memory: current.json; None remembers nothing.
        dtype: Type of weights, keys and values.
        device: A torch device.
        threads: Of the engine's matrix products; 0 leaves torch's choice.
        feature_layer: 0-based block whose output is the prompt feature; None: about 2/3 of the depth.
        pack: Keep a second, faster copy of the weights where that helps (float32 on a CPU).
    """

    name = "transformers"

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        model: Path | None = None,
        memory: Path | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        threads: int = 0,
        feature_layer: int | None = None,
        pack: bool = True,
    ) -> None:
        self._limits = limits or Limits()
        self._scheduler = Scheduler(self._limits, threads=threads)
        self._initial = model
        self._memory = memory
        self._dtype = dtype
        self._device = torch.device(device)
        self._feature_layer = feature_layer
        self._pack = pack and can_pack(self._device, dtype)
        self._updating = asyncio.Lock()
        self._failed = asyncio.Event()

    async def start(self) -> None:
        """Start the thread and load the remembered weights, else `model`, else nothing."""
        loop = asyncio.get_running_loop()
        self._scheduler.on_failure = lambda: _from_thread(loop, self._failed)
        self._scheduler.start()
        served = None if self._memory is None else recall(self._memory)
        if served is not None:
            try:
                await self.update_weights(
                    Path(served.path), policy_id=served.policy_id, version=served.policy_version, allow_rollback=True
                )
                log.info("serving the last acknowledged weights again", path=served.path, version=served.policy_version)
                return
            except RollwiseError as error:
                log.warning("the last acknowledged weights cannot be served", path=served.path, error=error.message)
        if self._initial is not None:
            await self.update_weights(self._initial, policy_id="", version=0)
        else:
            log.warning("no weights to serve yet; waiting for UpdateWeights")

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See Engine. Cancelling frees the rollouts' slots within one decode step."""
        scheduler = self._scheduler
        cause = scheduler.failure
        if cause is not None:
            raise Unavailable(f"the generation engine died: {cause}", reason="ENGINE_DEAD")
        check_request(
            request,
            scheduler.model,
            scheduler.policy_id,
            scheduler.version,
            max_tokens=self._limits.max_batch_tokens,
        )
        job = Job.of(request)
        scheduler.submit(job)
        result = await self._answer(job.future)
        if job.tokenizer is not None:
            for rollout in result.samples:
                rollout.text = job.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        return result

    async def update_weights(
        self,
        path: Path,
        *,
        policy_id: str,
        version: int,
        mode: UpdateMode = UpdateMode.WAIT,
        allow_rollback: bool = False,
        deadline_seconds: float | None = None,
    ) -> UpdateResult:
        """See Engine. Reads and checks everything first, beside the running batch, then swaps between two steps.

        Asking again for what is served already (same policy, version, path and untouched files) answers at once.

        Raises:
            InvalidArgument: the folder is no good; the message says why.
            FailedPrecondition: reason VERSION_TOO_OLD, older than what is served and no allow_rollback.
            DeadlineExceeded: rollouts were still running (WAIT) or reading took too long.
        """
        began = time.monotonic()
        deadline = float("inf") if deadline_seconds is None else began + deadline_seconds
        if version < 0:
            raise InvalidArgument(f"policy_version {version} must be at least 0", reason="BAD_REQUEST")
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._updating.acquire()
        except TimeoutError as error:
            raise _late("another update was still under way") from error
        try:
            if await self._serves(path, policy_id, version):
                return UpdateResult(version, time.monotonic() - began)
            self._check_version(policy_id, version, allow_rollback)
            staged = await asyncio.to_thread(self._stage, path)
            if time.monotonic() > deadline:
                raise _late(f"reading {path} took {time.monotonic() - began:.1f} s")
            update = Update(staged, policy_id, version, mode, deadline, began)
            self._scheduler.update(update)
            result = await self._answer(update.future)
            if self._memory is not None:
                await asyncio.to_thread(remember, self._memory, policy_id, version, path)
            log.info("serving new weights", policy_id=policy_id, version=version, seconds=round(result.seconds, 3))
            return result
        finally:
            self._updating.release()

    def status(self) -> EngineStatus:
        """See Engine."""
        scheduler = self._scheduler
        model = scheduler.model
        common = EngineStatus(
            engine=self.name,
            running_rollouts=scheduler.running,
            waiting_requests=scheduler.waiting,
            generated_tokens=scheduler.generated_tokens,
        )
        if model is None:
            return common
        return EngineStatus(
            engine=self.name,
            model=scheduler.path,
            policy_id=scheduler.policy_id,
            policy_version=scheduler.version,
            running_rollouts=common.running_rollouts,
            waiting_requests=common.waiting_requests,
            generated_tokens=common.generated_tokens,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            stop_token_ids=model.stop_token_ids,
            feature_layer=model.feature_layer,
        )

    def failure(self) -> str | None:
        """See Engine."""
        return self._scheduler.failure

    async def wait_failed(self) -> str:
        """See Engine."""
        await self._failed.wait()
        return self._scheduler.failure or "unknown"

    async def close(self) -> None:
        """See Engine."""
        await asyncio.to_thread(self._scheduler.stop)

    async def _answer(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            self._scheduler.nudge()
            raise

    async def _serves(self, path: Path, policy_id: str, version: int) -> bool:
        scheduler = self._scheduler
        if scheduler.model is None or (scheduler.policy_id, scheduler.version) != (policy_id, version):
            return False
        return await asyncio.to_thread(_untouched, path, Path(scheduler.path), scheduler.fingerprint)

    def _check_version(self, policy_id: str, version: int, allow_rollback: bool) -> None:
        scheduler = self._scheduler
        if scheduler.model is None or scheduler.policy_id != policy_id or allow_rollback:
            return
        if version < scheduler.version:
            raise FailedPrecondition(
                f"version {version} of policy {policy_id!r} is older than {scheduler.version}, which is served; set "
                "allow_rollback to go back",
                reason="VERSION_TOO_OLD",
                served_policy_version=str(scheduler.version),
            )

    def _stage(self, path: Path) -> Staged:
        """Runs beside the engine's thread; only reads the served model's shapes."""
        current: LoadedModel | None = self._scheduler.model
        if current is not None:
            return current.stage(path, pack=self._pack, feature_layer=self._feature_layer)
        mark = weights.fingerprint(path)
        loaded = load_model(
            path, dtype=self._dtype, device=self._device, feature_layer=self._feature_layer, pack=self._pack
        )
        return Staged(path, mark, None, loaded, loaded.tokenizer, loaded.tokenizer_digest, loaded.stop_token_ids)


def _untouched(path: Path, served: Path, fingerprint: str) -> bool:
    """Whether `path` is the folder that is served and its files are still those that were read."""
    return served.absolute() == path.absolute() and path.is_dir() and weights.fingerprint(path) == fingerprint


def _late(what: str) -> DeadlineExceeded:
    metrics.UPDATES_LATE.inc()
    return DeadlineExceeded(f"{what} when the update's deadline passed; the old weights go on serving")


def _from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
