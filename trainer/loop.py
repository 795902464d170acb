"""One run of a job, from its newest checkpoint (or its beginning) to its end.

Invariants:

- the checkpoint is the authority. A run begins from the newest one under a new lineage; prompts that were in flight
  there are sampled again, so none is skipped and none is trained twice (docs/decisions/0002);
- with max_staleness 0 the prompts of a step are exactly those that the seed draws for it;
- submitted = trained + filtered + dropped + in flight, at every moment;
- computing happens in a thread, so that leases, heartbeats, cancels and the watchdog go on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rollwise.v1 import allocator_pb2

from services.common import keys
from services.common.lifecycle import Background
from services.common.logging import bind_context, get_logger
from services.common.streams import StreamConsumer
from trainer import telemetry
from trainer.accounting import Admission, Final, Ledger
from trainer.clients import Services
from trainer.collector import Collector
from trainer.config import JobSpec
from trainer.entries import training_entry
from trainer.evaluate import Evaluator
from trainer.exchange import Exchange, Guard
from trainer.failures import InterruptedRunError, Interruption, JobFailedError
from trainer.jobs import JobStore
from trainer.learner import Learner
from trainer.preflight import build_prompts, check_references, find_policy, load_job_data
from trainer.prompts import Prompt
from trainer.recorder import Recorder, group_line, read_lines
from trainer.records import JobRecord
from trainer.run_info import write_run_info
from trainer.run_state import RunState
from trainer.settings import WorkerSettings
from trainer.step import StepBatch, build_batch
from trainer.streams import Streams
from trainer.watch import Watch

T = TypeVar("T")
log = get_logger()

CHECK_SECONDS = 600.0
CHECKPOINT_DRAIN_SECONDS = 5.0


class TrainingRun:
    """A job in the hands of this worker. `run` returns when the job is done, and raises when it is not.

    Raises JobFailedError or PreflightError (the job cannot go on), or InterruptedRunError (cancelled, stopped,
    superseded).
    """

    def __init__(
        self, record: JobRecord, *, settings: WorkerSettings, store: JobStore, services: Services, streams: Streams
    ) -> None:
        self.record = record
        self.spec = JobSpec.model_validate(record.spec)
        self.guard = Guard(streams.client, patience_seconds=settings.redis_patience_seconds)
        self._settings = settings
        self._store = store
        self._services = services
        self._streams = streams
        self._folder = settings.job_folder(record.id)
        self._recorder = Recorder(self._folder)
        self._learner = Learner(self.spec, self._folder, threads=settings.torch_threads)
        self._state: RunState
        self._live = False
        self._eval_ledger = Ledger()
        self._checkpointed = -1
        self._fingerprint = ""
        self._prompts: dict[str, Prompt] = {}
        self._watch = Watch(
            services,
            streams.client,
            job_id=record.id,
            needs_prior=self.spec.algorithm.needs_prior,
            every_seconds=settings.watch_seconds,
            stall_seconds=self.spec.stall_timeout_seconds,
            repush=self._repush,
        )

    # ------------------------------------------------------------------------------------- the run

    async def run(self) -> None:
        """Does all steps that are left."""
        lineage = await self.guard.steady(lambda: self._store.next_lineage(self.record.id))
        try:
            held_out, snapshot = await self._prepare(lineage)
            async with Background() as background:
                train, evals = self._exchanges(background)
                await self._go_live(snapshot)
                evaluator = Evaluator(
                    self.spec, held_out, evals, self._eval_ledger, job_id=self.record.id, lineage=lineage
                )
                train.send([(admission, self._entry(admission)) for admission in self._state.ledger.in_flight])
                await self._steps(train, evaluator, bool(held_out))
        except InterruptedRunError as error:
            if error.why is Interruption.STOP and self._live:
                await self._checkpoint()
            raise
        finally:
            # The thread may still be in a micro-batch; it ends at the next one, and nothing waits for it.
            self._learner.close()

    async def _steps(self, train: Exchange, evaluator: Evaluator, evaluates: bool) -> None:
        spec = self.spec
        if evaluates and (self._state.steps_done == 0 or self._evaluation_due()):
            await self._evaluate(evaluator)
        while self._state.steps_done < spec.steps:
            bind_context(step=self._state.steps_done)
            await self._step(train)
            if evaluates and self._evaluation_due():
                await self._evaluate(evaluator)
            if self._state.steps_done == spec.steps or (
                spec.checkpoint_every and not self._state.steps_done % spec.checkpoint_every
            ):
                await self._checkpoint()
            self.guard.check()
        if self._checkpointed != self._state.steps_done:
            await self._checkpoint()

    async def _step(self, train: Exchange) -> None:
        step, started = self._state.steps_done, time.monotonic()
        state = self._state
        train.send([(admission, self._entry(admission)) for admission in state.admit()])
        telemetry.IN_FLIGHT.set(len(state.ledger))
        await self._show_progress()
        ready = train.collector.ready
        chosen = await train.wait(
            lambda: state.credits.choose(step=step, admitted_at=state.admitted_at, ready=ready.keys()),
            progress=lambda: f"step {step} of {self.spec.steps}, {len(ready)} of {len(self._state.ledger)} groups came",
            one_by_one=self.spec.deterministic,
        )
        waited = time.monotonic()
        if self.spec.deterministic:
            chosen = sorted(chosen, key=lambda admission: (admission.step, admission.prompt_id, admission.attempt))
        groups = {admission: ready[admission].group for admission in chosen}
        batch = await asyncio.to_thread(build_batch, groups, self.spec, policy_version=self._state.policy_version)
        version_trained = self._state.policy_version
        if batch.samples:
            batch.metrics.update(await self._compute(self._learner.train, batch.samples, self.guard.check_hard))
            self._state.policy_version = version_trained + 1
        trained = time.monotonic()
        if batch.samples:
            await self._push()
        pushed = time.monotonic()
        self._account(batch)
        metrics = {
            "step": step,
            "policy_version": self._state.policy_version,
            "lineage": self._state.lineage,
            **batch.metrics,
            **self._state.ledger.counts(),
            "duplicates": self._state.ledger.duplicates,
            "stale": self._state.ledger.stale,
            "rollouts_total": self._state.ledger.rollouts,
            "wait_seconds": waited - started,
            "train_seconds": trained - waited,
            "push_seconds": pushed - trained,
            "seconds": pushed - started,
        }
        self._state.steps_done = step + 1
        await self._record(batch, step, metrics)
        # A resume starts a new lineage and never reads these again, so nothing is kept for it (decision 0002).
        await train.settle(chosen)
        self._check_empty(batch)

    # --------------------------------------------------------------------------------- preparation

    async def _prepare(self, lineage: int) -> tuple[list[Prompt], bytes]:
        """Loads policy and data; takes up the newest checkpoint. Returns held-out prompts and the prior's snapshot."""
        data = await self._compute(load_job_data, self.spec)
        base: Path | None = None

        def find_base() -> Path:
            nonlocal base
            base = find_policy(self.spec)
            return base

        restored = await self._compute(self._learner.open, find_base)
        policy = self._learner.policy
        train, held_out = await self._compute(build_prompts, self.spec, data, policy.tokenizer, policy.context_length)
        self._prompts = {prompt.id: prompt for prompt in train}
        self._fingerprint = data.train.fingerprint
        self._state = RunState(self.spec, [prompt.id for prompt in train], lineage=lineage)
        if restored is None:
            sources = {"data": train, "evaluation.data": held_out}
            await self.guard.run(check_references(sources, self._services, seconds=CHECK_SECONDS))
            await asyncio.to_thread(write_run_info, self._folder, self.record, self._fingerprint, base)
        else:
            if restored.state["data_fingerprint"] != self._fingerprint:
                raise JobFailedError(
                    "the training data changed since the checkpoint; put the old data back, or submit a new job",
                    code="data_changed",
                    param="data",
                )
            self._state.take_up(restored.state)
            self._checkpointed = restored.step
            log.info("resumed", step=restored.step, in_flight=len(self._state.ledger), lineage=lineage)
        await asyncio.to_thread(self._recorder.rewind, self._state.steps_done)
        return held_out, (restored.value_prior or b"") if restored is not None else b""

    def _exchanges(self, background: Background) -> tuple[Exchange, Exchange]:
        """The training and the evaluation side, leases running."""
        made = []
        for kind, stream, ledger in (
            ("train", keys.groups(self.record.id), self._state.ledger),
            ("eval", keys.evals(self.record.id), self._eval_ledger),
        ):
            consumer: StreamConsumer = self._streams.consumer(stream, group="trainer")
            background.start(f"leases-{kind}", consumer.run_leases())
            collector = Collector(consumer, ledger, job_id=self.record.id, lineage=self._state.lineage)
            made.append(
                Exchange(
                    self._streams.publisher,
                    collector,
                    self.guard,
                    self._watch,
                    job_id=self.record.id,
                    lineage=self._state.lineage,
                    kind=kind,
                    drain_seconds=self._settings.drain_seconds,
                )
            )
        return made[0], made[1]

    async def _go_live(self, snapshot: bytes) -> None:
        """The prior knows what the checkpoint knew, and nothing of older lineages; the weights are served."""
        if self.spec.algorithm.needs_prior:
            await self.guard.run(
                self._services.restore_prior(
                    self.record.id,
                    lineage=self._state.lineage,
                    snapshot=snapshot,
                    patience_seconds=self._settings.push_seconds,
                )
            )
        await self._push()
        self._live = True
        await self.guard.steady(lambda: self._store.start(self.record.id, self.record.run))
        await self._show_progress()

    # --------------------------------------------------------------------------------------- parts

    def _entry(self, admission: Admission) -> allocator_pb2.PromptEntry:
        return training_entry(
            self.spec,
            self._prompts[admission.prompt_id],
            admission,
            job_id=self.record.id,
            lineage=self._state.lineage,
            policy_version=self._state.policy_version,
            resampled=admission in self._state.resampled,
        )

    def _account(self, batch: StepBatch) -> None:
        for judged in batch.judged:
            self._state.settle(judged.admission, judged.final, rollouts=judged.rollouts)
        self._state.ledger.check()
        telemetry.IN_FLIGHT.set(len(self._state.ledger))

    def _check_empty(self, batch: StepBatch) -> None:
        self._state.empty_in_a_row = 0 if batch.samples else self._state.empty_in_a_row + 1
        if self._state.empty_in_a_row >= self._settings.empty_steps:
            causes = "; ".join(batch.causes[:5])
            raise JobFailedError(
                f"{self._state.empty_in_a_row} steps in a row had no group to train on. Causes of the last: {causes}",
                code="nothing_to_train",
                service="verifier" if "no_verdict" in causes else None,
            )

    async def _record(self, batch: StepBatch, step: int, metrics: dict[str, Any]) -> None:
        lines = [
            group_line(j.group, step=step, final=j.final.value, cause=j.cause, baselines=j.baselines)
            for j in batch.judged
        ]
        await asyncio.to_thread(self._recorder.groups, lines)
        written = await asyncio.to_thread(self._recorder.step, metrics)
        telemetry.show_step(metrics)
        for judged in batch.judged:
            if judged.final is Final.DROPPED:
                log.error("group dropped", prompt=judged.admission.prompt_id, cause=judged.cause)
        await self._show_progress()
        await self._event("step", written)
        log.info("step done", step=step, reward=metrics["reward_mean"], rollouts=metrics["rollouts"])

    async def _push(self) -> None:
        """The generation server serves the weights of now; older folders go once it said so."""
        path = await self._compute(self._learner.write_weights, self._state.policy_version)
        await self._serve(path)
        await asyncio.to_thread(self._learner.weights.acknowledged, self._state.policy_version)

    async def _serve(self, path: Path) -> None:
        await self.guard.run(
            self._services.push_weights(
                path,
                policy_id=self.record.id,
                version=self._state.policy_version,
                patience_seconds=self._settings.push_seconds,
                # On-policy nothing is in flight here; ahead of it, a push must not wait for the longest rollout.
                keep_running=self.spec.max_staleness > 0,
            )
        )
        self._watch.expected_version = self._state.policy_version

    async def _repush(self, found: str) -> None:
        await self._event("weights_repushed", {"policy_version": self._state.policy_version, "server_had": found})
        await self._serve(self._learner.weights.path(self._state.policy_version))

    def _evaluation_due(self) -> bool:
        done, every = self._state.steps_done, self.spec.evaluation.every if self.spec.evaluation is not None else 0
        if not (done in (0, self.spec.steps) or (every and done % every == 0)):
            return False
        lines = read_lines(self._recorder.metrics_path)
        return not any(line.get("kind") == "evaluation" and line["step"] == done for line in lines)

    async def _evaluate(self, evaluator: Evaluator) -> None:
        if not self._evaluation_due():
            return
        result = await evaluator.run(step=self._state.steps_done, policy_version=self._state.policy_version)
        result["rollouts_total"] = self._state.ledger.rollouts
        written = await asyncio.to_thread(self._recorder.evaluation, result)
        if result["accuracy"] is not None:
            telemetry.ACCURACY.set(result["accuracy"])
        telemetry.SECONDS.labels("evaluate").observe(result["seconds"])
        await self._event("evaluation", written)
        log.info("evaluated", step=self._state.steps_done, accuracy=result["accuracy"])

    async def _checkpoint(self) -> None:
        started = time.monotonic()
        snapshot = None
        if self.spec.algorithm.needs_prior:
            await self._let_prior_learn()
            snapshot = await self._services.snapshot_prior(self.record.id, patience_seconds=self._settings.push_seconds)
        state = {**self._state.state(), "data_fingerprint": self._fingerprint}
        path = await asyncio.to_thread(self._learner.save, self._state.steps_done, state, snapshot)
        self._checkpointed = self._state.steps_done
        telemetry.SECONDS.labels("checkpoint").observe(time.monotonic() - started)
        await self._event("checkpoint", {"step": self._state.steps_done, "id": path.name})

    async def _let_prior_learn(self) -> None:
        """Gives the prior a moment to take what is on the outcomes stream, so that the snapshot has it."""
        deadline = time.monotonic() + CHECKPOINT_DRAIN_SECONDS
        while time.monotonic() < deadline:
            if not await self.guard.steady(lambda: self._streams.client.xlen(keys.outcomes())):
                return
            await asyncio.sleep(0.05)
        log.warning("the snapshot of the value prior lacks outcomes that it has not taken yet")

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs in a thread; a cancel gives it up at once."""
        work: Awaitable[T] = asyncio.to_thread(function, *arguments)
        return await self.guard.run(work)

    async def _show_progress(self) -> None:
        await self.guard.steady(
            lambda: self._store.update(self.record.id, self.record.run, progress=self._state.progress)
        )

    async def _event(self, kind: str, data: dict[str, Any]) -> None:
        await self.guard.steady(lambda: self._store.add_event(self.record.id, kind, data))
