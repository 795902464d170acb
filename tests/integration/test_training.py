"""Whole training runs: every service for real, in one event loop; the policy is a small model made here."""

import asyncio
import errno
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio
import torch
from rollwise.v1 import generation_pb2, generation_pb2_grpc
from training_stack import (
    Running,
    assert_books,
    ended,
    run_until_told,
    specification,
    submit,
    trained_ids,
    until,
    wanted_ids,
    working,
    write_rows,
)

from services.allocator import server as allocator
from services.allocator.settings import AllocatorSettings
from services.common import keys
from services.common.embedded import EmbeddedRedis
from services.common.errors import Unavailable
from services.common.grpc_client import connect as grpc_connect
from services.common.grpc_server import GrpcServer
from services.common.redis_client import connect
from services.generation import server as generation
from services.generation.settings import GenerationSettings
from services.value_prior import server as value_prior
from services.value_prior.settings import ValuePriorSettings
from services.verifier import server as verifier
from services.verifier.settings import VerifierSettings
from trainer.api.server import ApiServer
from trainer.jobs import WORKERS, JobStore
from trainer.policies.tiny import Recipe, make_tiny
from trainer.policy import Policy
from trainer.recorder import read_lines
from trainer.settings import ApiSettings
from trainer.streams import Streams
from trainer.weights import WeightFolders

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(GrpcServer, "run_until_signal", run_until_told)
    root = tmp_path_factory.mktemp("stack")
    policy = root / "policy"
    await asyncio.to_thread(make_tiny, policy, Recipe(steps=60, batch=64, hidden=64, layers=2, intermediate=128))
    redis = EmbeddedRedis().start(root / "redis")
    common = {"redis_url": redis.url, "metrics_port": None, "port": 0}
    made = {}

    async def up(name, serve, settings):
        made[name] = Running(serve, settings)
        return await made[name].start()

    targets = {
        "generation_target": await up(
            "generation",
            generation.serve,
            GenerationSettings(**common, state_dir=root, threads=1, ready_file=root / "generation.json"),
        ),
        "value_prior_target": await up(
            "value_prior",
            value_prior.serve,
            ValuePriorSettings(**common, http_port=None, blob_dir=str(root / "blobs"), ready_file=root / "prior.json"),
        ),
        "verifier_target": await up(
            "verifier", verifier.serve, VerifierSettings(**common, workers=1, ready_file=root / "verifier.json")
        ),
    }
    targets["allocator_target"] = await up(
        "allocator",
        allocator.serve,
        AllocatorSettings(**common, **targets, state_dir=root, ready_file=root / "allocator.json"),
    )
    # Worker settings come from keywords only: whatever the developer has set is of no use here.
    yield SimpleNamespace(root=root, policy=policy, redis=redis, targets=targets, services=made)
    for running in reversed(made.values()):
        await running.stop()
    redis.stop()
    patch.undo()


@pytest_asyncio.fixture(loop_scope="module")
async def bench(stack):
    """Store, Redis client, API and helpers; no worker."""
    client = connect(stack.redis.url)
    common = {"redis_url": stack.redis.url, "state_dir": stack.root, **stack.targets}
    api = ApiServer(ApiSettings(port=0, **common))
    port = await api.start()
    streams = Streams(api.settings, consumer="test", lease_seconds=30, patience_seconds=5)
    store = JobStore(streams.client, streams.publisher)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield SimpleNamespace(
            client=client,
            http=http,
            store=store,
            settings=api.settings,
            stack=stack,
            common=common,
            folder=lambda j: stack.root / "jobs" / j,
        )
    await api.stop()
    await streams.close()
    await client.aclose()


async def test_a_job_trains_evaluates_and_leaves_its_records(bench, tmp_path):
    held_out = {"path": write_rows(tmp_path / "held_out.jsonl", 4, 2, start=100)}
    spec = specification(bench, tmp_path, evaluation={"data": held_out, "every": 1})
    async with working(bench):
        job_id = await submit(bench, spec)
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)

    series = (await bench.http.get(f"/v1/jobs/{job_id}/metrics")).json()["data"]
    assert [(line["kind"], line["step"]) for line in series] == [
        ("evaluation", 0),
        ("step", 0),
        ("evaluation", 1),
        ("step", 1),
        ("evaluation", 2),
    ]
    for line in series:
        if line["kind"] == "step":
            assert line["engine_log_ratio_mean"] < 1e-3, "the trainer's log-probs are not the engine's"
            assert 2 <= line["rollouts_per_prompt"] <= 4
            assert line["gradient_norm"] >= 0 and line["prior_brier"] is not None
            assert line["submitted"] == line["trained"] + line["filtered"] + line["dropped"] + line["in_flight"]
    assert [c["step"] for c in (await bench.http.get(f"/v1/jobs/{job_id}/checkpoints")).json()["data"]] == [2]
    trail = [json.loads(line) for line in (await bench.http.get(f"/v1/jobs/{job_id}/trail")).text.splitlines()]
    assert len(trail) == 8 and all(line["trail"] and line["prior"] and line["samples"] for line in trail)
    events = (await bench.http.get(f"/v1/jobs/{job_id}/events", params={"format": "json"})).json()["data"]
    kinds = Counter(event["type"] for event in events)
    assert (kinds["step"], kinds["evaluation"], kinds["checkpoint"]) == (2, 3, 1)
    # Nothing is left behind but the newest weights.
    assert WeightFolders(bench.folder(job_id) / "weights").versions() == [2]
    assert await bench.client.xlen(keys.prompts()) == 0 and await bench.client.xlen(keys.jobs()) == 0
    assert not await bench.client.exists(keys.groups(job_id), keys.evals(job_id), keys.heartbeat(job_id))


async def test_a_checkpoint_interval_longer_than_the_window_neither_stalls_nor_fills_redis(bench, tmp_path):
    spec = specification(
        bench, tmp_path, steps=6, max_staleness=1, checkpoint_every=1000, preset="grpo",
        algorithm={"budget": {"rollouts": 2}},
    )  # fmt: skip
    longest = 0
    async with working(bench):
        job_id = await submit(bench, spec)
        while not (await bench.store.get(job_id)).state.terminal:
            longest = max(longest, await bench.client.xlen(keys.groups(job_id)))
            await asyncio.sleep(0.02)
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)
    assert 0 < longest <= 2 * spec["prompts_per_step"]
    steps = [line for line in read_lines(bench.folder(job_id) / "metrics.jsonl") if line["kind"] == "step"]
    assert max(line["staleness_max"] for line in steps) <= 1
    assert record.progress.dropped == 0


async def test_a_worker_told_to_stop_hands_the_job_back_and_another_goes_on(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=4, checkpoint_every=0)
    async with working(bench):
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 1)
    handed_back = await bench.store.get(job_id)
    assert (handed_back.state, handed_back.run) == ("queued", 2)
    async with working(bench, "worker-2"):
        record = await ended(bench, job_id)
    assert record.state == "succeeded" and record.progress.lineage == 2, record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)


async def test_a_cancelled_job_ends_within_seconds_and_can_be_resumed(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=50, checkpoint_every=1)
    async with working(bench):
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 1)
        asked = time.monotonic()
        await bench.http.post(f"/v1/jobs/{job_id}/cancel")
        record = await ended(bench, job_id)
        assert record.state == "cancelled" and time.monotonic() - asked < 5
        before = record.progress
        assert (await bench.http.post(f"/v1/jobs/{job_id}/resume")).json()["state"] == "queued"
        record = await until(bench, job_id, lambda r: r.progress.step > before.step and r.progress.lineage > 1)
        assert record.progress.lineage > before.lineage
        await bench.http.post(f"/v1/jobs/{job_id}/cancel")
        await ended(bench, job_id)
    ids = trained_ids(bench, job_id)
    assert max(ids.values()) == 1


async def test_steps_without_a_trainable_group_end_the_job_with_the_causes(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=9, group_deadline_seconds=0.001)
    async with working(bench, empty_steps=2):
        job_id = await submit(bench, spec)
        record = await ended(bench, job_id)
    assert record.state == "failed" and record.error.code == "nothing_to_train"
    assert "deadline" in record.error.message
    assert (record.progress.filtered, record.progress.policy_version) == (8, 0)


async def test_a_generation_server_with_other_weights_gets_the_right_ones_again(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=6)
    async with working(bench), grpc_connect(bench.stack.targets["generation_target"]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 1)
        other = generation_pb2.UpdateWeightsRequest(
            policy_version=7,
            path=str(bench.stack.policy),
            mode=generation_pb2.UPDATE_MODE_ABORT,
            policy_id="somebody-else",
            allow_rollback=True,
        )
        await stub.UpdateWeights(other, timeout=20)
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)


async def test_without_an_allocator_the_job_ends_and_names_it(bench, tmp_path):
    running = bench.stack.services["allocator"]
    await running.stop()
    try:
        spec = specification(bench, tmp_path, stall_timeout_seconds=2)
        async with working(bench):
            job_id = await submit(bench, spec)
            record = await ended(bench, job_id)
        assert record.state == "failed"
        assert (record.error.code, record.error.service) == ("stalled", "allocator")
        assert "out of reach" in record.error.message and "step 0 of 2" in record.error.message
    finally:
        await running.start()
    # With the allocator back, the same job goes on.
    async with working(bench):
        await bench.http.post(f"/v1/jobs/{job_id}/resume")
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)


async def test_two_deterministic_jobs_with_one_seed_take_the_same_steps(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=2, deterministic=True, seed=5)
    seen = []
    async with working(bench):
        for _ in range(2):
            job_id = await submit(bench, spec)
            record = await ended(bench, job_id)
            assert record.state == "succeeded", record.error
            lines = [line for line in read_lines(bench.folder(job_id) / "metrics.jsonl") if line["kind"] == "step"]
            names = ("reward_mean", "rollouts", "loss", "gradient_norm", "entropy", "prior_brier")
            seen.append([[line[name] for name in names] for line in lines])
    assert seen[0] == seen[1]


@pytest.mark.slow
async def test_a_killed_worker_resumes_and_trains_every_prompt_once(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=6, checkpoint_every=2)
    settings = {**bench.common, "consumer": "killed", "lease_seconds": 3, "torch_threads": 1, "metrics_port": "none"}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    def start():
        log = (tmp_path / "worker.log").open("a")
        return subprocess.Popen([sys.executable, "-m", "trainer.worker", *flags], stderr=log)

    worker = start()
    try:
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 3, 120)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        killed = await bench.store.get(job_id)
        assert killed.state == "running"
        worker = start()
        record = await ended(bench, job_id, 120)
    finally:
        worker.terminate()
        worker.wait(30)
    assert record.state == "succeeded", record.error
    assert record.progress.lineage == 2
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)
    assert worker.returncode == 0


async def test_a_redis_that_is_away_for_a_moment_is_survived(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=5)
    async with working(bench):
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 1)
        redis = bench.stack.redis
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(1)
        await asyncio.to_thread(redis.start, bench.stack.root / "redis", redis.port)
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)


@pytest.mark.slow
async def test_a_redis_that_stays_away_ends_the_worker_with_its_address_and_the_next_one_resumes(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=6, checkpoint_every=1)
    redis = bench.stack.redis
    with pytest.raises(Unavailable, match=str(redis.port)):
        async with working(bench, redis_patience_seconds=1):
            job_id = await submit(bench, spec)
            await until(bench, job_id, lambda record: record.progress.step >= 1)
            await asyncio.to_thread(redis.kill)
            await asyncio.sleep(8)
    await asyncio.to_thread(redis.start, bench.stack.root / "redis", redis.port)
    async with working(bench):
        record = await ended(bench, job_id)
    assert record.state == "succeeded" and record.progress.lineage == 2, record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)


async def test_a_full_disk_at_the_checkpoint_fails_the_job_which_goes_on_when_there_is_space(
    bench, tmp_path, monkeypatch
):
    spec = specification(bench, tmp_path, steps=4, checkpoint_every=2)
    write, saves = Policy.write, []

    def full_the_second_time(policy, folder):
        saves.append(folder)
        if "checkpoints" in str(folder) and len([f for f in saves if "checkpoints" in str(f)]) == 2:
            (folder / "half").write_bytes(b"x")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(policy, folder)

    monkeypatch.setattr(Policy, "write", full_the_second_time)
    async with working(bench):
        job_id = await submit(bench, spec)
        record = await ended(bench, job_id)
        assert (record.state, record.error.code) == ("failed", "disk_full")
        assert "no space left" in record.error.message and "resume" in record.error.message
        listed = (await bench.http.get(f"/v1/jobs/{job_id}/checkpoints")).json()["data"]
        assert [checkpoint["step"] for checkpoint in listed] == [2]
        await bench.http.post(f"/v1/jobs/{job_id}/resume")
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert_books(record.progress, spec)
    assert trained_ids(bench, job_id) == wanted_ids(spec)


async def test_a_weight_update_that_fails_ends_the_job_with_the_servers_words(bench, tmp_path, monkeypatch):
    spec = specification(bench, tmp_path)
    saved = Policy.save

    def torn(policy, folder):
        saved(policy, folder)
        if folder.name == "v000001":
            (folder / "model.safetensors").write_bytes(b"no weights")

    monkeypatch.setattr(Policy, "save", torn)
    async with working(bench, push_seconds=20):
        job_id = await submit(bench, spec)
        record = await ended(bench, job_id)
        assert (record.state, record.error.code, record.error.service) == ("failed", "weights_not_served", "generation")
        monkeypatch.undo()
        await bench.http.post(f"/v1/jobs/{job_id}/resume")  # the next update works
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error
    assert trained_ids(bench, job_id) == wanted_ids(spec)


async def test_data_that_changed_since_the_checkpoint_is_refused_at_resume(bench, tmp_path):
    spec = specification(bench, tmp_path, steps=50, checkpoint_every=1)
    async with working(bench):
        job_id = await submit(bench, spec)
        await until(bench, job_id, lambda record: record.progress.step >= 1)
        await bench.http.post(f"/v1/jobs/{job_id}/cancel")
        await ended(bench, job_id)
        write_rows(tmp_path / "train.jsonl", 10, 99)
        await bench.http.post(f"/v1/jobs/{job_id}/resume")
        record = await ended(bench, job_id)
    assert (record.state, record.error.code, record.error.param) == ("failed", "data_changed", "data")


async def test_a_job_whose_submitter_died_before_it_was_queued_is_run(bench, tmp_path):
    job_id = await submit(bench, specification(bench, tmp_path, steps=1))
    # What the store looks like when the API dies between record and queue entry.
    await bench.client.delete(keys.jobs(), keys.seen(keys.jobs(), f"job/{job_id}/1"))
    async with working(bench):
        record = await ended(bench, job_id)
    assert record.state == "succeeded", record.error


async def test_a_job_whose_worker_died_too_often_is_given_up(bench, tmp_path):
    job_id = await submit(bench, specification(bench, tmp_path))
    dying = Streams(bench.settings, consumer="dying", lease_seconds=0.05, patience_seconds=5)
    queue = dying.consumer(keys.jobs(), group=WORKERS, max_deliveries=100)
    for _ in range(3):
        deliveries = []
        while not deliveries:
            deliveries = await queue.read(count=1, block_seconds=0.2)
            queue._held.clear()  # the process is gone, and knows nothing any more
            await asyncio.sleep(0.1)
    await dying.close()
    async with working(bench, lease_seconds=1.1, max_deliveries=3):
        record = await ended(bench, job_id)
    assert (record.state, record.error.code) == ("failed", "worker_died")
    assert "died 3 times" in record.error.message
