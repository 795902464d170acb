"""The jobs API over real HTTP, with a real Valkey and a real verifier. There is no worker: tests play it."""

import asyncio
import json
import socket
import subprocess
import sys

import httpx
import pytest

from services.common.errors import ConfigurationError
from services.common.redis_client import connect
from services.common.streams import Publisher
from services.verifier import server as verifier_server
from services.verifier.pool import VerdictPool
from services.verifier.settings import VerifierSettings
from trainer.api.server import ApiServer
from trainer.jobs import JobStore, Ticket
from trainer.policies.tiny import Recipe, make_tiny
from trainer.records import JobError, JobState
from trainer.settings import ApiSettings


@pytest.fixture(scope="module")
def pool():
    settings = VerifierSettings(port=0, metrics_port=None, workers=1)
    with VerdictPool(settings.pool_options()) as running:
        yield settings, running


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy folder that is quick to make; nothing is generated here."""
    folder = tmp_path_factory.mktemp("policy") / "small"
    make_tiny(folder, Recipe(steps=1, batch=4, hidden=32, layers=1, intermediate=64))
    return folder


@pytest.fixture
async def verifier(pool):
    running = verifier_server.build(*pool)
    port = await running.start()
    yield f"127.0.0.1:{port}"
    await running.stop(0)


@pytest.fixture
def settings(redis_url, verifier, tmp_path):
    return ApiSettings(port=0, redis_url=redis_url, verifier_target=verifier, state_dir=tmp_path / "state")


@pytest.fixture
async def api(settings):
    running = ApiServer(settings)
    port = await running.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client
    await running.stop()


@pytest.fixture
async def store(redis_url, blobs):
    client = connect(redis_url)
    yield JobStore(client, Publisher(client, blobs))
    await client.aclose()


@pytest.fixture
def spec(tmp_path, policy):
    data = {"path": rows(tmp_path, ("1+1", "2"), ("2+2", "4"))}
    return {"policy": str(policy), "data": data, "steps": 3, "sampling": {"max_tokens": 16}}


def rows(folder, *pairs, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    return str(path)


def assert_problem(answer, status, code):
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code), body
    assert body["type"] and body["title"] and body["detail"]
    return body


async def test_a_job_is_submitted_listed_and_fetched(api, spec):
    answer = await api.post("/v1/jobs", json={**spec, "name": "first"})
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["state"], job["name"], job["progress"]["steps"]) == ("queued", "first", 3)
    assert job["spec"]["algorithm"]["budget"]["kind"] == "osla"
    second = (await api.post("/v1/jobs", json=spec)).json()
    page = (await api.get("/v1/jobs", params={"limit": 1})).json()
    assert [j["id"] for j in page["data"]] == [second["id"]] and page["has_more"]
    rest = (await api.get("/v1/jobs", params={"after": second["id"]})).json()
    assert [j["id"] for j in rest["data"]] == [job["id"]] and not rest["has_more"]
    assert (await api.get(f"/v1/jobs/{job['id']}")).json() == job
    assert (await api.get(f"/v1/jobs/{job['id']}/checkpoints")).json()["data"] == []
    assert (await api.get(f"/v1/jobs/{job['id']}/metrics")).json()["data"] == []
    assert (await api.get(f"/v1/jobs/{job['id']}/trail")).text == ""


async def test_two_clients_with_one_idempotency_key_make_one_job(api, spec):
    async def submit():
        while True:
            answer = await api.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "k1"})
            if answer.status_code != 409:
                return answer
            assert_problem(answer, 409, "idempotency_key_in_progress")
            assert answer.headers["retry-after"]
            await asyncio.sleep(0.05)

    answers = await asyncio.gather(*(submit() for _ in range(6)))
    assert {a.status_code for a in answers} == {201}
    assert len({a.text for a in answers}) == 1
    assert len((await api.get("/v1/jobs")).json()["data"]) == 1
    other = await api.post("/v1/jobs", json={**spec, "steps": 4}, headers={"Idempotency-Key": "k1"})
    assert assert_problem(other, 422, "idempotency_key_reused")["param"] == "Idempotency-Key"


async def test_a_refused_submission_gives_its_key_back(api, spec, tmp_path):
    bad = {**spec, "data": {"path": rows(tmp_path, ("1+1", "\\frac{1}{"), name="bad.jsonl")}}
    assert (await api.post("/v1/jobs", json=bad, headers={"Idempotency-Key": "k2"})).status_code == 422
    assert (await api.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "k2"})).status_code == 201


async def test_bad_gold_answers_are_named_by_row(api, spec, tmp_path):
    path = rows(tmp_path, ("1+1", "2"), ("x", "\\frac{1}{"), ("2+2", "4"), ("y", "no number"), name="bad.jsonl")
    body = assert_problem(await api.post("/v1/jobs", json={**spec, "data": {"path": path}}), 422, "bad_reference")
    assert 2 in [item["row"] for item in body["errors"]]
    assert all(item["message"] and item["field"] == "data.answer" for item in body["errors"])
    assert "row 2" in body["detail"] and body["param"] == "data"


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        ("", "empty_data", "empty"),
        ('{"id": "a", "prompt": "p", "answer": "1"}\n{"id": "a", "prompt": "q", "answer": "1"}\n', "bad_data", "row 1"),
        ('{"prompt": "p", "anwser": "1"}\n', "bad_data", "row 1"),
        ('{"prompt": "%s", "answer": "1"}\n' % ("7 " * 300), "bad_data", "tokens"),
        ("not json\n", "bad_data", "row 1"),
    ],
    ids=["empty", "duplicate ids", "unknown key", "too long", "no json"],
)
async def test_bad_data_is_refused_with_the_cause(api, spec, tmp_path, content, code, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    request = {**spec, "data": {"path": str(path)}}
    body = assert_problem(await api.post("/v1/jobs", json=request), 422, code)
    assert says in body["detail"] and body["param"] == "data"
    if code == "bad_data":
        assert body["errors"][0]["row"] in (1, 2)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"polcy": "tiny"}, "polcy"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate"),
        ({"algorithm": {"budget": {"kind": "osla", "k_mn": 4}}}, "k_mn"),
        ({"data": {}}, "data"),
        ({"preset": "grpoo"}, None),
    ],
)
async def test_a_bad_specification_names_the_field(api, spec, change, param):
    body = assert_problem(await api.post("/v1/jobs", json={**spec, **change}), 422, "invalid_request")
    if param is not None:
        assert any(param in item["field"] for item in body["errors"]), body
    assert body["errors"][0]["message"]


async def test_an_unknown_policy_is_refused(api, spec):
    body = assert_problem(await api.post("/v1/jobs", json={**spec, "policy": "smolm2"}), 422, "unknown_policy")
    assert body["param"] == "policy" and "smollm2" in body["detail"]


async def test_without_a_verifier_nothing_is_queued_and_it_is_named(settings, spec):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    running = ApiServer(settings.model_copy(update={"verifier_target": nowhere}))
    port = await running.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        body = assert_problem(await client.post("/v1/jobs", json=spec), 503, "verifier_unavailable")
        assert body["service"] == "verifier" and nowhere in body["detail"]
        assert (await client.get("/v1/jobs")).json()["data"] == []
    await running.stop()


async def test_unknown_jobs_and_paths_are_problems(api):
    for path in ("/v1/jobs/job-none", "/v1/jobs/job-none/events", "/v1/jobs/job-none/metrics", "/v1/jobs/a:b"):
        assert (await api.get(path)).headers["content-type"] == "application/problem+json"
    assert_problem(await api.get("/v1/jobs/job-none"), 404, "job_not_found")
    assert_problem(await api.post("/v1/jobs/job-none/cancel"), 404, "job_not_found")
    assert_problem(await api.get("/v2/nothing"), 404, "http_404")
    assert_problem(await api.delete("/v1/jobs"), 405, "http_405")
    assert_problem(await api.get("/v1/jobs", params={"limit": 0}), 422, "invalid_request")
    assert_problem(await api.get("/v1/jobs", params={"after": "job-none"}), 404, "job_not_found")


async def test_cancel_and_resume_can_be_sent_twice(api, spec):
    job = (await api.post("/v1/jobs", json=spec)).json()
    for _ in range(2):
        cancelled = (await api.post(f"/v1/jobs/{job['id']}/cancel")).json()
        assert cancelled["state"] == "cancelled" and cancelled["finished_at"]
    for _ in range(2):
        resumed = (await api.post(f"/v1/jobs/{job['id']}/resume")).json()
        assert (resumed["state"], resumed["run"], resumed["finished_at"]) == ("queued", 2, None)


async def test_a_running_job_in_good_health_is_resumed_by_nobody(api, spec, store):
    job = (await api.post("/v1/jobs", json=spec)).json()
    assert await store.claim(Ticket(job["id"], 1), "w")
    await store.beat(job["id"], "w")
    await store.start(job["id"], 1)
    assert (await api.post(f"/v1/jobs/{job['id']}/resume")).json()["run"] == 1
    await store.let_go(job["id"])  # its worker died
    resumed = (await api.post(f"/v1/jobs/{job['id']}/resume")).json()
    assert (resumed["state"], resumed["run"]) == ("queued", 2)


async def test_events_are_resumed_behind_the_last_one_seen_and_end_with_the_job(api, spec, store):
    job = (await api.post("/v1/jobs", json=spec)).json()

    async def play():
        await store.claim(Ticket(job["id"], 1), "w")
        await store.start(job["id"], 1)
        for step in range(3):
            await store.add_event(job["id"], "step", {"step": step})
            await asyncio.sleep(0.02)
        error = JobError(code="stalled", message="nothing moves", service="allocator")
        await store.finish(job["id"], 1, JobState.FAILED, error)

    async def listen(last=None):
        seen = []
        headers = {"Last-Event-ID": last} if last else {}
        async with api.stream("GET", f"/v1/jobs/{job['id']}/events", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            event = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name in ("id", "event", "data"):
                    event[name] = value
                elif not line and event:
                    seen.append((event["id"], event["event"], json.loads(event["data"])))
                    event = {}
        return seen

    async with asyncio.timeout(20):
        seen, _ = await asyncio.gather(listen(), play())
    kinds = [(kind, data.get("state", data.get("step"))) for _, kind, data in seen]
    assert kinds == [
        ("state", "queued"),
        ("state", "validating"),
        ("state", "running"),
        ("step", 0),
        ("step", 1),
        ("step", 2),
        ("state", "failed"),
    ]
    assert seen[-1][2]["error"]["service"] == "allocator"
    async with asyncio.timeout(10):
        assert await listen(seen[3][0]) == seen[4:]
        assert await listen(seen[-1][0]) == []
    listed = (await api.get(f"/v1/jobs/{job['id']}/events", params={"format": "json", "after": seen[4][0]})).json()
    assert [(e["id"], e["type"], e["data"]) for e in listed["data"]] == seen[5:]
    assert_problem(
        await api.get(f"/v1/jobs/{job['id']}/events", headers={"Last-Event-ID": "x"}), 422, "invalid_request"
    )


async def test_jobs_outlive_the_api(settings, spec):
    first = ApiServer(settings)
    port = await first.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        job = (await client.post("/v1/jobs", json=spec)).json()
    await first.stop()
    second = ApiServer(settings)
    port = await second.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        assert (await client.get(f"/v1/jobs/{job['id']}")).json() == job
    await second.stop()


async def test_a_token_is_asked_for_when_one_is_set(settings, spec):
    running = ApiServer(settings.model_copy(update={"auth_token": settings_secret("s3cret")}))
    port = await running.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        answer = await client.get("/v1/jobs")
        assert_problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await client.get("/v1/jobs", headers={"Authorization": "Bearer s3cret"})).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
    await running.stop()


def settings_secret(text):
    from pydantic import SecretStr

    return SecretStr(text)


async def test_operations_endpoints_answer(api, spec):
    await api.post("/v1/jobs", json=spec)
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    metrics = (await api.get("/metrics")).text
    assert 'rollwise_api_requests_total{method="POST",route="/v1/jobs",status="201"}' in metrics
    assert (await api.get("/docs")).status_code == 200
    assert "/v1/jobs/{job_id}/events" in (await api.get("/openapi.json")).json()["paths"]


async def test_a_port_in_use_is_said_so(settings):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="another port with --port"):
            await ApiServer(settings.model_copy(update={"port": taken.getsockname()[1]})).start()


@pytest.mark.slow
def test_without_redis_the_api_ends_with_its_address(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{free.getsockname()[1]}/0"
    command = [sys.executable, "-m", "trainer.api", "--port", "0", "--redis-url", url, "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0 and url.removesuffix("/0") in ended.stderr


async def test_a_redis_that_goes_away_is_a_problem_that_names_it(redis_server, verifier, tmp_path, spec):
    settings = ApiSettings(port=0, redis_url=redis_server.url, verifier_target=verifier, state_dir=tmp_path / "s")
    running = ApiServer(settings)
    port = await running.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        job = (await client.post("/v1/jobs", json=spec)).json()
        redis_server.kill()
        body = assert_problem(await client.get(f"/v1/jobs/{job['id']}"), 503, "redis_unavailable")
        assert body["service"] == "redis"
        assert (await client.get("/healthz")).status_code == 503
        redis_server.restart()
        assert (await client.get(f"/v1/jobs/{job['id']}")).json()["id"] == job["id"]
    await running.stop()
