"""The thread that owns the model: admits requests, advances the batch token by token, swaps weights between steps.

Everything that touches weights, keys and values happens on this thread, so no lock guards them. Callers hand over jobs
and updates and hear back through futures.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch

from services.common.errors import DeadlineExceeded, FailedPrecondition, Internal, ResourceExhausted, Unavailable
from services.common.logging import get_logger
from services.generation import metrics
from services.generation.engine import Feature, Finish, UpdateMode, UpdateResult
from services.generation.job import Job, check_request
from services.generation.model import LoadedModel, Staged
from services.generation.prefix_cache import Prefix, PrefixCache
from services.generation.running_batch import Row, RunningBatch, chunks

log = get_logger("rollwise.generation")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on memory and queues; see the settings of the same names."""

    max_rows: int = 256
    max_batch_tokens: int = 131_072
    max_waiting: int = 4096
    max_prefill_tokens: int = 8192
    prefix_cache_tokens: int = 65_536
    gather_seconds: float = 0.003


@dataclass(slots=True, eq=False)
class Update:
    """Staged weights waiting for the thread to serve them."""

    staged: Staged
    policy_id: str
    version: int
    mode: UpdateMode
    deadline: float
    began: float
    future: Future[UpdateResult] = field(default_factory=Future)


class Scheduler:
    """Continuous batching over one model. `model`, `policy_id`, `version` and the counters may be read anywhere."""

    def __init__(self, limits: Limits, *, threads: int = 0) -> None:
        self._limits = limits
        self._threads = threads
        self.model: LoadedModel | None = None
        self.policy_id = ""
        self.version = 0
        self.path: str = ""
        self.fingerprint = ""
        self.generated_tokens = 0
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._update: Update | None = None
        self._stopping = False
        self._prefixes = PrefixCache(limits.prefix_cache_tokens)
        self._batch = RunningBatch(
            max_rows=limits.max_rows, max_tokens=limits.max_batch_tokens, finished=self._on_row_finished
        )
        self._resolved: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)

    # --- called from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; what is unfinished fails with Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job; ResourceExhausted when the queue is full."""
        with self._wake:
            self._check_alive()
            if len(self._waiting) >= self._limits.max_waiting:
                raise ResourceExhausted(
                    f"{len(self._waiting)} requests wait already (max_waiting); try again later", reason="BUSY"
                )
            self._waiting.append(job)
            self._wake.notify()

    def update(self, update: Update) -> None:
        """Hand over staged weights; at most one at a time."""
        with self._wake:
            self._check_alive()
            assert self._update is None, "updates are handed over one at a time"
            self._update = update
            self._wake.notify()

    def nudge(self) -> None:
        """Make the thread look around: a caller gave up."""
        with self._wake:
            self._wake.notify()

    @property
    def running(self) -> int:
        """Rollouts in the batch."""
        return len(self._batch.rows)

    @property
    def waiting(self) -> int:
        """Requests with rollouts that have not started."""
        return len(self._waiting)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise Unavailable(f"the generation engine died: {self.failure}", reason="ENGINE_DEAD")
        if self._stopping:
            raise Unavailable("the generation engine is shutting down", reason="SHUTTING_DOWN")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while self._wait_for_work():
                    self._tick()
            self._fail_all(Unavailable("the generation engine is shutting down", reason="SHUTTING_DOWN"))
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            log.exception("the engine thread died")
            with self._wake:
                self.failure = cause
            self._fail_all(Unavailable(f"the generation engine died: {cause}", reason="ENGINE_DEAD"))
            self.on_failure()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._waiting or self._update or self._batch.rows):
                self._wake.wait()
                # Calls of one burst arrive within moments: one prefill for all is cheaper than one for the first.
                if self._waiting and not self._stopping:
                    self._wake.wait_for(lambda: self._stopping, self._limits.gather_seconds)
            return not self._stopping

    def _tick(self) -> None:
        self._drop_abandoned()
        self._close_overdue()
        self._serve_update()
        if self.model is not None:
            self._admit(self.model)
            if self._batch.rows:
                before = self.generated_tokens
                rows = len(self._batch.rows)
                self._batch.step(self.model, self.version)
                self.generated_tokens += rows
                metrics.DECODE_SECONDS.observe(self._batch.step_seconds)
                metrics.GENERATED_TOKENS.inc(self.generated_tokens - before)
        else:
            self._refuse_all_waiting()
        self._resolve_complete()
        metrics.RUNNING.set(len(self._batch.rows))
        metrics.WAITING.set(len(self._waiting))

    def _admit(self, model: LoadedModel) -> None:
        """Seat as many waiting rollouts as fit, first come first served, prefilling the prompts that are not at hand.

        At most max_prefill_tokens prompt tokens are computed a tick, so that a burst does not hold up the batch.
        """
        budget = self._limits.max_prefill_tokens
        chosen: list[tuple[Job, int]] = []
        reach = 0
        missing: set[tuple[bool, tuple[int, ...]]] = set()
        while True:
            with self._wake:
                job = self._waiting[0] if self._waiting else None
            if job is None or not self._may_start(job, bool(chosen)):
                break
            try:
                if not job.started:
                    check_request(
                        job.request, model, self.policy_id, self.version, max_tokens=self._limits.max_batch_tokens
                    )
            except Exception as error:  # noqa: BLE001 - the error is the caller's answer
                self._pop_waiting()
                job.fail(error)
                continue
            reach = max(reach, job.reach(model.context_length))
            free = self._batch.room(reach) - sum(count for _, count in chosen)
            count = max(0, min(free, len(job.unseated)))
            if job.request.count and count <= 0:
                break
            key = (job.request.pinned_batch, job.request.prompt)
            if key not in missing and self._prefixes.get(key) is None:
                if missing and budget < len(job.request.prompt):
                    break
                budget -= len(job.request.prompt)
                missing.add(key)
            chosen.append((job, count))
            if count < len(job.unseated):
                break
            self._pop_waiting()
            if job.request.pinned_batch:
                break
        if chosen:
            self._seat(model, chosen)

    def _may_start(self, job: Job, others_chosen: bool) -> bool:
        """Pinned requests run alone, and while weights wait to change only what has begun goes on."""
        if self._update is not None and not job.started:
            return False
        if job.request.pinned_batch:
            return not others_chosen and all(row.tag is job for row in self._batch.rows)
        return not any(row.tag.request.pinned_batch for row in self._batch.rows if isinstance(row.tag, Job))

    def _seat(self, model: LoadedModel, chosen: list[tuple[Job, int]]) -> None:
        prefixes, computed = self._prefill(model, [job for job, _ in chosen])
        arrivals: list[tuple[Row, Prefix]] = []
        for job, count in chosen:
            key = (job.request.pinned_batch, job.request.prompt)
            prefix = prefixes[key]
            if not job.started:
                job.prefill_version = self.version
                job.prefix_cached = key not in computed
                job.tokenizer = model.tokenizer
                if job.request.want_feature:
                    job.feature = Feature(model.feature_layer, prefix.feature.cpu().numpy(), self.version)
            arrivals += [(row, prefix) for row in job.rows(count, model)]
            if job.complete:
                self._resolved.append(job)
        self.generated_tokens += len(arrivals)
        metrics.GENERATED_TOKENS.inc(len(arrivals))
        self._batch.join(model, arrivals, self.version)

    def _prefill(
        self, model: LoadedModel, jobs: list[Job]
    ) -> tuple[dict[tuple[bool, tuple[int, ...]], Prefix], set[tuple[bool, tuple[int, ...]]]]:
        """Each job's prefix by key, and which of them were computed now rather than found."""
        prefixes: dict[tuple[bool, tuple[int, ...]], Prefix] = {}
        wanted: list[tuple[bool, tuple[int, ...]]] = []
        for job in jobs:
            key = (job.request.pinned_batch, job.request.prompt)
            found = self._prefixes.get(key)
            if found is not None:
                prefixes[key] = found
                metrics.PREFIX_HITS.inc()
            elif key not in wanted:
                wanted.append(key)
        for part in chunks(wanted, lambda key: len(key[1]), self._limits.max_prefill_tokens):
            for key, prefix in zip(part, model.prefill([prompt for _, prompt in part]), strict=True):
                prefixes[key] = prefix
                self._prefixes.put(key, prefix)
                metrics.PREFILL_TOKENS.inc(prefix.tokens)
        return prefixes, set(wanted)

    def _serve_update(self) -> None:
        update = self._update
        if update is None:
            return
        if update.future.done() or time.monotonic() > update.deadline:
            self._end_update(
                update,
                DeadlineExceeded(
                    f"{len(self._batch.rows)} rollouts were still running when the update's deadline passed; version "
                    f"{self.version} goes on serving",
                    reason="UPDATE_DEADLINE",
                ),
            )
            return
        if update.mode is UpdateMode.WAIT and (self._batch.rows or any(job.started for job in self._waiting)):
            return
        staged, kept, aborted = update.staged, 0, 0
        swap = staged.model is not None or update.policy_id != self.policy_id
        if update.mode is UpdateMode.ABORT or swap:
            # Rollouts of one policy cannot go on under another's weights, whatever was asked.
            aborted = self._abort_all()
        if staged.model is not None:
            self._batch.release()
            self.model = staged.model
        else:
            assert self.model is not None
            self.model.apply(staged)
        self._prefixes.clear()
        self.policy_id, self.version = update.policy_id, update.version
        self.path, self.fingerprint = str(staged.path), staged.fingerprint
        if self._batch.rows:
            kept = len(self._batch.rows)
            self._batch.rebuild(self.model, self._limits.max_prefill_tokens)
        seconds = time.monotonic() - update.began
        metrics.UPDATE_SECONDS.observe(seconds)
        metrics.POLICY_VERSION.set(self.version)
        self._end_update(update, UpdateResult(self.version, seconds, kept, aborted))

    def _end_update(self, update: Update, outcome: UpdateResult | Exception) -> None:
        with self._wake:
            self._update = None
        try:
            if isinstance(outcome, Exception):
                update.future.set_exception(outcome)
            else:
                update.future.set_result(outcome)
        except InvalidStateError:
            log.warning("a weight update ended after its caller had left", version=update.version)

    def _abort_all(self) -> int:
        """End every rollout in flight, and those of begun requests that still wait, as they are."""
        gone = self._batch.drop(lambda row: True)
        for row in gone:
            self._on_row_finished(row, Finish.ABORTED)
        for job in [job for job in self._waiting if job.started]:
            job.close_unseated(Finish.ABORTED)
            self._remove_waiting(job)
            self._resolved.append(job)
        return len(gone)

    def _drop_abandoned(self) -> None:
        self._batch.drop(lambda row: isinstance(row.tag, Job) and row.tag.abandoned)
        for job in [job for job in self._waiting if job.abandoned]:
            self._remove_waiting(job)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        for row in self._batch.drop(lambda row: isinstance(row.tag, Job) and row.tag.deadline <= now):
            self._on_row_finished(row, Finish.DEADLINE)
        for job in [job for job in self._waiting if job.deadline <= now]:
            self._remove_waiting(job)
            job.close_unseated(Finish.DEADLINE)
            if len(job.done) == job.request.count:
                self._resolved.append(job)

    def _on_row_finished(self, row: Row, finish: Finish) -> None:
        job = row.tag
        assert isinstance(job, Job)
        if not all(value <= 0.0 for value in row.logprobs):  # also true of not-a-number
            job.fail(Internal("the model's logits are not finite; its weights have diverged", reason="NOT_FINITE"))
            return
        job.done[row.index] = row.closed(finish)
        if len(job.done) == job.request.count:
            self._resolved.append(job)

    def _resolve_complete(self) -> None:
        resolved, self._resolved = self._resolved, []
        for job in resolved:
            job.resolve(self.version)

    def _refuse_all_waiting(self) -> None:
        while (job := self._pop_waiting()) is not None:
            job.fail(FailedPrecondition("no weights are loaded yet; send UpdateWeights first", reason="NO_WEIGHTS"))

    def _pop_waiting(self) -> Job | None:
        with self._wake:
            return self._waiting.popleft() if self._waiting else None

    def _remove_waiting(self, job: Job) -> None:
        with self._wake:
            self._waiting.remove(job)

    def _fail_all(self, error: Exception) -> None:
        for row in self._batch.rows:
            if isinstance(row.tag, Job):
                row.tag.fail(error)
        for job in self._resolved:
            job.fail(error)
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
            update, self._update = self._update, None
        for job in waiting:
            job.fail(error)
        if update is not None and not update.future.done():
            update.future.set_exception(error)
