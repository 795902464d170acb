"""What a client may send by mistake or on purpose: each answer is a problem that says what is wrong, none a fault."""

import json
import os

import httpx
import pytest

from services.common.redis_client import connect
from services.common.streams import Publisher
from trainer.api.limits import MAX_BODY_BYTES
from trainer.api.server import ApiServer
from trainer.jobs import JobStore, Ticket
from trainer.settings import ApiSettings

JSON = {"content-type": "application/json"}


@pytest.fixture
async def api(redis_url, tmp_path):
    running = ApiServer(ApiSettings(port=0, redis_url=redis_url, state_dir=tmp_path / "state"))
    port = await running.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client
    await running.stop()


def spec(**changes):
    return {"policy": "tiny", "data": {"path": "/nowhere/data.jsonl"}, **changes}


def refused(answer, status=422):
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{bad", "the body is not JSON: "),
        (b"[]", "the body must be a JSON object"),
        (b"", "the body must be a JSON object"),
        (b'{"policy": "\xff"}', "the body is no JSON: not UTF-8"),
        (b"[" * 100_000, "the body is no JSON: "),
    ],
)
async def test_a_body_that_is_no_object_is_named_as_such(api, body, says):
    answer = await api.post("/v1/jobs", content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert says in answer.json()["detail"]


async def test_a_body_beyond_the_limit_is_refused_announced_or_not(api):
    big = b'{"policy": "' + b"a" * MAX_BODY_BYTES + b'"}'

    async def pieces():
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    for content in (big, pieces()):
        assert refused(await api.post("/v1/jobs", content=content, headers=JSON), 413)["code"] == "too_large"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 10**22}, "steps"),
        ({"optimizer": {"learning_rate": "inf"}}, "optimizer.learning_rate"),
        ({"optimizer": {"weight_decay": "inf"}}, "optimizer.weight_decay"),
        ({"group_deadline_seconds": 1e300}, "group_deadline_seconds"),
        ({"algorithm": {"budget": {"k_max": 10**9}}}, "algorithm.budget.osla.k_max"),
        ({"data": {"reasoning_gym": [{"task": "chain_sum", "size": 10**12}]}}, "data.reasoning_gym.0.size"),
        ({"policy": ""}, "policy"),
        ({"stepz": 3}, "stepz"),
    ],
)
async def test_values_beyond_reason_are_refused_by_name(api, changes, field):
    assert refused(await api.post("/v1/jobs", json=spec(**changes)))["param"] == field


async def test_a_data_path_that_is_no_regular_file_is_refused_at_once(api, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path), "a\x00b"):
        body = refused(await api.post("/v1/jobs", json=spec(data={"path": path})))
        assert (body["code"], body["param"]) == ("bad_data", "data")


@pytest.mark.parametrize("job_id", ["%2e%2e", "..%2f..%2fetc%2fpasswd", "a%00b", "%0d%0a", "x" * 5000])
async def test_an_id_that_is_no_id_reaches_no_file(api, job_id):
    for rest in ("", "/trail", "/metrics", "/checkpoints", "/events"):
        answer = await api.get(f"/v1/jobs/{job_id}{rest}")
        assert answer.status_code in (404, 422), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_job_that_is_being_cancelled_is_not_said_to_go_on(api, redis_url, blobs):
    client = connect(redis_url)
    store = JobStore(client, Publisher(client, blobs))
    from trainer.config import JobSpec

    job = await store.create(JobSpec.model_validate(spec()))
    assert await store.claim(Ticket(job.id, 1), "w")
    await store.beat(job.id, "w")
    await store.start(job.id, 1)
    assert (await api.post(f"/v1/jobs/{job.id}/cancel")).json()["cancel_requested"]
    answer = refused(await api.post(f"/v1/jobs/{job.id}/resume"), 409)
    assert "being cancelled" in answer["detail"]
    assert json.loads((await api.get(f"/v1/jobs/{job.id}")).text)["run"] == 1
    await client.aclose()
