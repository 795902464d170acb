"""What the tests of whole training runs share: services in this process, a worker, a job's books."""

import asyncio
import contextlib
import json
import random
from collections import Counter

from trainer.clients import Services
from trainer.config import JobSpec
from trainer.recorder import read_lines
from trainer.run_state import admissions_of
from trainer.settings import WorkerSettings
from trainer.streams import Streams
from trainer.worker import Worker

LIMIT_SECONDS = 60


class Running:
    """A service in this process, by its own `serve`; `stop` ends it, `start` starts it again on the same port."""

    def __init__(self, serve, settings):
        self.serve, self.settings, self.port = serve, settings, 0

    async def start(self):
        self.told = asyncio.Event()
        settings = self.settings.model_copy(update={"port": self.port})
        settings.ready_file.unlink(missing_ok=True)
        self.task = asyncio.create_task(self.serve(settings))
        TOLD[self.task] = self.told
        while not settings.ready_file.exists():
            if self.task.done():
                await self.task
            await asyncio.sleep(0.02)
        self.port = json.loads(settings.ready_file.read_text())["port"]
        return f"127.0.0.1:{self.port}"

    async def stop(self):
        self.told.set()
        await asyncio.wait_for(self.task, 20)


TOLD: dict[asyncio.Task, asyncio.Event] = {}


async def run_until_told(server):
    """GrpcServer.run_until_signal for several servers in one process: an event in place of the signal."""
    if server._server is None:
        await server.start()
    await TOLD[asyncio.current_task()].wait()
    await server.stop(0)


@contextlib.asynccontextmanager
async def working(bench, name="worker-1", **changes):
    """A worker in this process."""
    settings = WorkerSettings(
        **bench.common, metrics_port=None, consumer=name, torch_threads=1, watch_seconds=0.5, **changes
    )
    patience = settings.redis_patience_seconds
    streams = Streams(settings, consumer=name, lease_seconds=settings.lease_seconds, patience_seconds=patience)
    services = Services(settings)
    worker = Worker(settings, streams, services)
    task = asyncio.create_task(worker.work())
    try:
        yield worker
    finally:
        worker.stop()
        try:
            await asyncio.wait_for(task, LIMIT_SECONDS)
        finally:
            await services.close()
            await streams.close()


def write_rows(path, count, seed, start=0):
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        rows.append({"id": f"q{start + i}", "prompt": f"Calculate {a} + {b}. ({start + i})", "answer": str(a + b)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def specification(bench, tmp_path, **changes):
    return {
        "policy": str(bench.stack.policy),
        "data": {"path": write_rows(tmp_path / "train.jsonl", 10, 1)},
        "algorithm": {"budget": {"k_min": 2, "k_max": 4}},
        "optimizer": {"learning_rate": 1e-4},
        "sampling": {"max_tokens": 5},
        "steps": 2,
        "prompts_per_step": 4,
        "checkpoint_every": 2,
        "group_deadline_seconds": 60,
        "stall_timeout_seconds": 60,
        **changes,
    }


async def submit(bench, spec):
    answer = await bench.http.post("/v1/jobs", json=spec)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


async def until(bench, job_id, condition, seconds=LIMIT_SECONDS):
    async with asyncio.timeout(seconds):
        while True:
            record = await bench.store.get(job_id)
            if condition(record):
                return record
            assert not record.state.terminal or condition(record), record
            await asyncio.sleep(0.05)


async def ended(bench, job_id, seconds=LIMIT_SECONDS):
    return await until(bench, job_id, lambda record: record.state.terminal, seconds)


def trained_ids(bench, job_id):
    lines = read_lines(bench.folder(job_id) / "trail.jsonl")
    return Counter((line["key"]["step"], line["key"]["prompt_id"]) for line in lines if line["state"] == "trained")


def wanted_ids(spec, prompts=10):
    job = JobSpec.model_validate(spec)
    order = [f"q{i}" for i in range(prompts)]
    return Counter((a.step, a.prompt_id) for step in range(job.steps) for a in admissions_of(step, job, order))


def assert_books(progress, spec):
    assert progress.submitted == progress.trained + progress.filtered + progress.dropped + progress.in_flight
    assert (progress.submitted, progress.in_flight) == (spec["steps"] * spec["prompts_per_step"], 0)
