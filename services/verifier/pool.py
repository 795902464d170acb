"""Worker processes that judge, each with a hard wall-clock limit on every task.

One thread of the parent serves one worker over its own pipe, and that is all they share: a worker that hangs, dies
or is killed at any moment takes nothing with it but the task it holds, and is replaced at once. (A pool whose
workers share one queue and its locks can be blocked for good by a worker that is killed while it holds them.)
Workers are spawned, never forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from services.verifier import verdicts, worker
from services.verifier.tasks import Task
from services.verifier.verdicts import Verdict

_IDLE_CHECK_SECONDS = 0.25
_RESTART_PAUSE_SECONDS = 1.0
_ATTEMPTS = 2


class PoolBusy(RuntimeError):
    """The queue is full; try again later or send less at once."""


class PoolStopped(RuntimeError):
    """The pool was not started or was stopped."""


class WorkerStartError(RuntimeError):
    """A worker process could not be started."""


@dataclass(frozen=True)
class PoolOptions:
    """How a pool behaves. Times are seconds, sizes bytes; memory_bytes 0 sets no limit."""

    workers: int = 2
    limit_seconds: float = 5.0
    max_tasks: int = 5_000
    queue_limit: int = 16_384
    cache_size: int = 65_536
    memory_bytes: int = 2 << 30
    start_seconds: float = 120.0
    domains: tuple[str, ...] = worker.DOMAINS


@dataclass
class Observer:
    """Called by the pool as things happen, from its threads; each does nothing unless set."""

    judged: Callable[[Verdict, float], None] = lambda verdict, seconds: None
    replaced: Callable[[str], None] = lambda cause: None


@dataclass
class _Job:
    task: Task
    deadline: float | None
    future: Future[Verdict] = field(default_factory=Future)
    attempts: int = 0


class VerdictPool:
    """Judges tasks in `options.workers` processes. Thread-safe; `judge` is for asyncio, `submit` for threads."""

    def __init__(self, options: PoolOptions | None = None, observer: Observer | None = None) -> None:
        self.options = options or PoolOptions()
        if self.options.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.options.workers}")
        self.observer = observer or Observer()
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the workers and wait until each is warm, so that the first request is as fast as the next.

        Raises WorkerStartError where one cannot be started.
        """
        self._slots = [_Slot(self, self._jobs, self._stopping, i) for i in range(self.options.workers)]
        for slot in self._slots:
            slot.start()
        for slot in self._slots:
            slot.first_start.wait(self.options.start_seconds)
            if slot.problem is not None or not slot.first_start.is_set():
                problem = slot.problem or f"not ready after {self.options.start_seconds:g} s"
                self.stop()
                raise WorkerStartError(f"a verifier worker could not be started: {problem}")

    def stop(self) -> None:
        """End every worker; what was not judged by then is NO_VERDICT. May be called twice."""
        self._stopping.set()
        for slot in self._slots:
            self._jobs.put(None)
            slot.kill()
        for slot in self._slots:
            slot.join(timeout=10)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    _resolve(job, verdicts.no_verdict(f"{verdicts.FAULT}: the verifier was stopped"))

    def __enter__(self) -> VerdictPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def queued(self) -> int:
        """Tasks that wait for a worker."""
        return self._jobs.qsize()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [pid for slot in self._slots if (pid := slot.pid) is not None]

    def problem(self) -> str | None:
        """Why the pool cannot judge now, or None where at least one worker can."""
        if self._stopping.is_set() or not self._slots:
            return "the verifier's workers are stopped"
        problems = [slot.problem for slot in self._slots]
        return problems[0] if all(p is not None for p in problems) else None

    def submit(self, task: Task, *, deadline: float | None = None) -> Future[Verdict]:
        """Queue one task. deadline is a `time.monotonic()` value; a task not begun by then is NO_VERDICT.

        Raises PoolStopped. The future never fails: every fault is a verdict.
        """
        if self._stopping.is_set() or not self._slots:
            raise PoolStopped("the verifier's workers are stopped")
        job = _Job(task, deadline)
        if task.domain not in self.options.domains:
            self._finish(job, verdicts.no_verdict(f"{verdicts.UNSUPPORTED} domain {task.domain!r}"), 0.0)
        elif (known := self._recall(task)) is not None:
            self._finish(job, known, 0.0)
        else:
            self._jobs.put(job)
        return job.future

    async def judge(self, tasks: Sequence[Task], *, timeout_seconds: float) -> list[Verdict]:
        """One verdict for each task, in order, within timeout_seconds; what is not judged by then is NO_VERDICT.

        Raises PoolBusy where the queue has no room for the tasks, PoolStopped.
        """
        if self.queued + len(tasks) > self.options.queue_limit:
            raise PoolBusy(
                f"{self.queued} tasks wait and {len(tasks)} more do not fit the limit of {self.options.queue_limit}:"
                " try again later or send fewer items in one request"
            )
        deadline = time.monotonic() + timeout_seconds
        # Encoding and hashing megabytes of text would hold up the event loop.
        futures = await asyncio.to_thread(lambda: [self.submit(task, deadline=deadline) for task in tasks])
        waiting = [asyncio.wrap_future(future) for future in futures]
        if not waiting:
            return []
        _, late = await asyncio.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        for future in late:
            future.cancel()
        missed = verdicts.no_verdict(f"{verdicts.TIMEOUT}: not judged before the call's deadline")
        return [missed if future in late else future.result() for future in waiting]

    def _recall(self, task: Task) -> Verdict | None:
        with self._cache_lock:
            verdict = self._cache.get(task.key)
            if verdict is not None:
                self._cache.move_to_end(task.key)
            return verdict

    def _finish(self, job: _Job, verdict: Verdict, seconds: float) -> None:
        if verdict.cacheable and self.options.cache_size > 0:
            with self._cache_lock:
                self._cache[job.task.key] = verdict
                self._cache.move_to_end(job.task.key)
                while len(self._cache) > self.options.cache_size:
                    self._cache.popitem(last=False)
        self.observer.judged(verdict, seconds)
        _resolve(job, verdict)


def _resolve(job: _Job, verdict: Verdict) -> None:
    if job.future.cancelled():
        return
    with contextlib.suppress(Exception):  # cancelled between the two lines: nobody waits for it any more
        job.future.set_result(verdict)


class _Slot(threading.Thread):
    """One worker's place in the pool: the thread that feeds it, times it and replaces it."""

    def __init__(
        self, pool: VerdictPool, jobs: queue.Queue[_Job | None], stopping: threading.Event, index: int
    ) -> None:
        super().__init__(name=f"verifier-slot-{index}", daemon=True)
        self._pool, self._jobs, self._stopping = pool, jobs, stopping
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._served = 0
        self.first_start = threading.Event()
        self.problem: str | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        with contextlib.suppress(ValueError):  # closed by its own thread in this moment: it is gone
            return process.pid if process is not None and process.is_alive() else None
        return None

    def run(self) -> None:
        self._ensure()
        self.first_start.set()
        while not self._stopping.is_set():
            try:
                job = self._jobs.get(timeout=_IDLE_CHECK_SECONDS)
            except queue.Empty:
                self._ensure()
                continue
            if job is not None:
                self._serve(job)
        self.kill()

    def kill(self) -> None:
        """End the worker now. From any thread."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ValueError, AttributeError):  # closed, or not begun: nothing to end
                process.kill()

    def _serve(self, job: _Job) -> None:
        if job.future.cancelled():
            return
        if job.deadline is not None and time.monotonic() >= job.deadline:
            self._pool._finish(
                job, verdicts.no_verdict(f"{verdicts.TIMEOUT}: not begun before the call's deadline"), 0.0
            )
            return
        began = time.monotonic()
        verdict: Verdict | None = None
        while verdict is None:
            verdict = self._attempt(job)
        self._pool._finish(job, verdict, time.monotonic() - began)

    def _attempt(self, job: _Job) -> Verdict | None:  # noqa: PLR0911 - one return a way to end
        """The verdict, or None where the worker died and the task deserves another try."""
        if not self._ensure():
            return verdicts.no_verdict(f"{verdicts.FAULT}: no worker could be started ({self.problem})")
        assert self._connection is not None
        job.attempts += 1
        try:
            self._connection.send_bytes(job.task.payload)
            if not self._connection.poll(self._pool.options.limit_seconds):
                self._discard("timeout")
                limit = self._pool.options.limit_seconds
                return verdicts.no_verdict(f"{verdicts.TIMEOUT}: the grader took more than {limit:g} s and was ended")
            verdict = worker.decode_verdict(self._connection.recv_bytes())
        except (EOFError, OSError):
            exit_code = self._discard("died")
            if self._stopping.is_set():
                return verdicts.no_verdict(f"{verdicts.FAULT}: the verifier was stopped")
            if exit_code == -signal.SIGXCPU:
                return verdicts.no_verdict(f"{verdicts.TIMEOUT}: the grader used up its processor time")
            if job.attempts < _ATTEMPTS:
                return None  # killed from outside, perhaps for memory that others used: once more on a fresh worker
            return verdicts.no_verdict(f"{verdicts.FAULT}: the grader's process died (exit code {exit_code})")
        except ValueError as error:
            self._discard("garbled")
            return verdicts.no_verdict(f"{verdicts.FAULT}: the grader's process answered nonsense ({error})")
        self._served += 1
        if self._served >= self._pool.options.max_tasks:
            self._discard("recycled")
        return verdict

    def _ensure(self) -> bool:
        """Have a live, warm worker; False where none can be started."""
        if self._process is not None:
            if self._process.is_alive():
                return True
            self._discard("died")
        while not self._stopping.is_set():
            try:
                self._spawn()
            except (OSError, EOFError, WorkerStartError) as error:
                self.problem = str(error) or type(error).__name__
                self._discard("failed")
                self._stopping.wait(_RESTART_PAUSE_SECONDS)
                return False
            self.problem = None
            return True
        return False

    def _spawn(self) -> None:
        options = self._pool.options
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=worker.run,
            args=(theirs, options.domains, options.limit_seconds, options.memory_bytes),
            name="rollwise-verifier-worker",
            daemon=True,
        )
        self._connection = ours
        self._served = 0
        self._process.start()
        theirs.close()  # so that the worker's death closes the pipe
        if self._stopping.is_set():
            raise WorkerStartError("the verifier was stopped")
        if not ours.poll(options.start_seconds):
            raise WorkerStartError(f"a worker was not ready after {options.start_seconds:g} s")
        ours.recv_bytes()

    def _discard(self, cause: str) -> int | None:
        """End the worker, count the cause, and give its exit code."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None or process.pid is None:
            return None
        process.join(timeout=0.2 if cause == "died" else 0)  # let a death say its own exit code
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        if not self._stopping.is_set():
            self._pool.observer.replaced(cause)
        return code
