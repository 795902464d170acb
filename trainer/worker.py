"""The worker process: takes one job at a time off the queue and runs it (`python -m trainer.worker`).

A job is held under a lease that is renewed while it runs; when this process dies, the entry goes to the next worker
(or to this one, restarted), which resumes from the newest checkpoint under a new lineage. SIGTERM hands the job back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

# Read by OpenMP once, when torch loads: idle threads sleep instead of spinning on cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from services.common import keys
from services.common.errors import NotFound, RollwiseError, Unavailable
from services.common.lifecycle import Background, run, write_ready_file
from services.common.logging import bind_context, get_logger
from services.common.redis_client import LOST, check_server, url_of
from services.common.settings import load_settings
from services.common.streams import Delivery, StreamConsumer
from services.common.telemetry import serve_metrics
from trainer import telemetry
from trainer.clients import Services
from trainer.exchange import Guard
from trainer.failures import DISK_FULL, InterruptedRunError, Interruption, JobFailedError
from trainer.jobs import WORKERS, JobStore, SupersededError, Ticket
from trainer.learner import is_disk_full, process_id
from trainer.loop import TrainingRun
from trainer.preflight import PreflightError
from trainer.records import JobError, JobRecord, JobState
from trainer.settings import WorkerSettings
from trainer.streams import Streams

log = get_logger("rollwise.worker")

HEARTBEAT_EVERY_SECONDS = 2.0
CONTROL_EVERY_SECONDS = 0.5
READ_SECONDS = 2.0
REQUEUE_EVERY_SECONDS = 60.0


class Worker:
    """Runs jobs until it is told to stop."""

    def __init__(self, settings: WorkerSettings, streams: Streams, services: Services) -> None:
        self._settings = settings
        self._streams = streams
        self._services = services
        self._store = JobStore(streams.client, streams.publisher)
        self._name = process_id()
        self._stopping = asyncio.Event()
        self._guard: Guard | None = None
        # Deliveries are counted here rather than by the consumer: a job that is given up must be told so.
        self._queue: StreamConsumer = streams.consumer(keys.jobs(), group=WORKERS, max_deliveries=1_000_000)

    def stop(self) -> None:
        """Finishes the step in hand, hands the job back, and ends."""
        self._stopping.set()
        if self._guard is not None:
            self._guard.interrupt(Interruption.STOP)

    async def work(self) -> None:
        """Takes jobs until `stop`."""
        async with Background() as background:
            background.start("queue-leases", self._queue.run_leases())
            background.start("lost-jobs", self._requeue_lost())
            while not self._stopping.is_set():
                try:
                    deliveries = await self._queue.read(count=1, block_seconds=READ_SECONDS)
                except (RollwiseError, *LOST) as error:
                    log.error("the queue cannot be read", error=str(error))
                    await asyncio.sleep(1.0)
                    continue
                for delivery in deliveries:
                    await self._take(delivery)

    async def _requeue_lost(self) -> None:
        """Queues jobs whose submitter died between writing the record and the queue entry."""
        while True:
            try:
                if lost := await self._store.requeue_lost():
                    log.warning("jobs without a queue entry were queued", jobs=lost)
            except (RollwiseError, *LOST) as error:
                log.warning("cannot look for lost jobs, redis does not answer", error=str(error))
            await asyncio.sleep(REQUEUE_EVERY_SECONDS)

    async def _take(self, delivery: Delivery) -> None:
        try:
            ticket = Ticket.decode(delivery.payload)
        except (ValueError, KeyError, TypeError) as error:
            await self._queue.bury(delivery, f"no ticket: {error}")
            return
        if not await self._free(ticket):
            await self._queue.settle(delivery)
            return
        record = await self._store.claim(ticket, self._name)
        if record is None:
            log.info("ticket is out of date", job_id=ticket.job_id, run=ticket.run)
            await self._queue.settle(delivery)
            return
        if delivery.deliveries > self._settings.max_deliveries:
            message = (
                f"the worker died {delivery.deliveries - 1} times on this job; its log, and the kernel's (memory), say "
                "why. Then resume the job"
            )
            await self._end(record, JobState.FAILED, JobError(code="worker_died", message=message))
            await self._queue.settle(delivery)
            return
        await self._run(record, delivery)

    async def _free(self, ticket: Ticket) -> bool:
        """Waits until no other worker is on the job; False when the ticket is of no use any more."""
        while await self._store.alive(ticket.job_id, other_than=self._name):
            try:
                record = await self._store.get(ticket.job_id)
            except NotFound:
                return False
            if record.run != ticket.run or record.state.terminal or self._stopping.is_set():
                return False
            await asyncio.sleep(1.0)
        return True

    async def _run(self, record: JobRecord, delivery: Delivery) -> None:
        bind_context(job_id=record.id)
        log.info("job taken", run=record.run, deliveries=delivery.deliveries)
        telemetry.RUNNING.set(1)
        outcome = "failed"
        try:
            await self._store.beat(record.id, self._name)
            outcome = await self._attempt(record)
        finally:
            self._guard = None
            telemetry.RUNNING.set(0)
            telemetry.JOBS.labels(outcome).inc()
            bind_context(job_id=None, step=None)
        await self._queue.settle(delivery)
        log.info("job left", job_id=record.id, outcome=outcome)

    async def _attempt(self, record: JobRecord) -> str:
        """Runs the job and writes down how it ended; returns that as one word."""
        try:
            training = TrainingRun(
                record, settings=self._settings, store=self._store, services=self._services, streams=self._streams
            )
            self._guard = training.guard
            if self._stopping.is_set():
                training.guard.interrupt(Interruption.STOP)
            async with Background() as background:
                background.start("heartbeat", self._beat(record))
                background.start("control", self._control(record, training.guard))
                await training.run()
            await self._end(record, JobState.SUCCEEDED)
            return "succeeded"
        except InterruptedRunError as error:
            return await self._interrupted(record, error.why)
        except SupersededError:
            return "superseded"
        except Exception as error:
            log.exception("job failed", error=str(error))
            await self._end(record, JobState.FAILED, describe(error))
            return "failed"

    async def _interrupted(self, record: JobRecord, why: Interruption) -> str:
        if why is Interruption.CANCEL:
            await self._store.next_lineage(record.id)
            await self._end(record, JobState.CANCELLED)
            return "cancelled"
        if why is Interruption.STOP:
            await self._store.give_back(record.id, record.run)
            return "handed_back"
        return "superseded"

    async def _end(self, record: JobRecord, state: JobState, error: JobError | None = None) -> None:
        """Writes the end down; with Redis away it tries for a while, and past that the lease gives the job away."""
        deadline = time.monotonic() + self._settings.redis_patience_seconds
        while True:
            try:
                await self._store.finish(record.id, record.run, state, error)
                return
            except SupersededError:
                log.warning("the job went on elsewhere", job_id=record.id)
                return
            except (RollwiseError, *LOST) as problem:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"Redis at {url_of(self._streams.client)} stays away, so the worker ends; job {record.id} goes "
                        f"on from its last checkpoint when Redis and a worker are back ({problem})",
                        reason="REDIS_UNAVAILABLE",
                    ) from problem
                log.warning("cannot write down how the job ended, trying again", error=str(problem))
                await asyncio.sleep(1.0)

    async def _beat(self, record: JobRecord) -> None:
        while True:
            try:
                await self._store.beat(record.id, self._name)
            except (RollwiseError, *LOST) as error:
                log.warning("no heartbeat, redis does not answer", error=str(error))
            await asyncio.sleep(HEARTBEAT_EVERY_SECONDS)

    async def _control(self, record: JobRecord, guard: Guard) -> None:
        """Sees that somebody cancelled the job, or that it went on elsewhere."""
        while True:
            await asyncio.sleep(CONTROL_EVERY_SECONDS)
            try:
                now = await self._store.get(record.id)
            except NotFound:
                guard.interrupt(Interruption.SUPERSEDED)
                return
            except (RollwiseError, *LOST) as error:
                log.warning("cannot look at the job, redis does not answer", error=str(error))
                continue
            if now.run != record.run or now.state.terminal:
                guard.interrupt(Interruption.SUPERSEDED)
                return
            if now.cancel_requested:
                guard.interrupt(Interruption.CANCEL)
                return


def describe(error: BaseException) -> JobError:
    """What the job's record says of a failure."""
    if isinstance(error, JobFailedError):
        return error.error
    if isinstance(error, PreflightError):
        return JobError(code=error.problem, message=str(error), param=error.param, service=error.service)
    if is_disk_full(error):
        message = f"no space left on the disk ({error}); free some, then resume the job"
        return JobError(code=DISK_FULL, message=message)
    if isinstance(error, RollwiseError):
        return JobError(code=error.reason.lower(), message=str(error))
    return JobError(code="internal", message=f"{type(error).__name__}: {error}; the worker's log has the traceback")


async def serve(settings: WorkerSettings) -> None:
    """The process, until SIGTERM or SIGINT."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    streams = Streams(
        settings,
        consumer=settings.consumer,
        lease_seconds=settings.lease_seconds,
        patience_seconds=settings.redis_patience_seconds,
    )
    services = Services(settings)
    metrics = None if settings.metrics_port is None else serve_metrics(settings.metrics_port, settings.host)
    try:
        await check_server(streams.client)
        worker = Worker(settings, streams, services)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, worker.stop)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, port=None, metrics_port=metrics.port if metrics else None)
        log.info("waiting for jobs", consumer=settings.consumer)
        await worker.work()
    finally:
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
        await services.close()
        await streams.close()
        if metrics is not None:
            await asyncio.to_thread(metrics.close)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m trainer.worker`."""
    settings = load_settings(WorkerSettings, argv)
    run(lambda: serve(settings), service="worker", settings=settings)


if __name__ == "__main__":
    main()
