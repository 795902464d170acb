"""The value prior over real gRPC, HTTP and Redis."""

import asyncio
import contextlib
import json

import httpx
import numpy as np
import pytest
from rollwise.v1 import common_pb2, value_prior_pb2, value_prior_pb2_grpc

from services.common import keys
from services.common.blobs import FolderBlobStore
from services.common.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable
from services.common.grpc_client import connect as connect_grpc
from services.common.lifecycle import Background
from services.common.redis_client import connect
from services.common.streams import Publisher, Target
from services.value_prior.server import running
from services.value_prior.settings import ValuePriorSettings
from services.value_prior.store import RedisContextStore, context_key

DEADLINE = 20.0


@contextlib.asynccontextmanager
async def value_prior(redis_url, tmp_path, **changes):
    """A running service and a stub to call it."""
    settings = ValuePriorSettings(
        **{
            "port": 0,
            "http_port": 0,
            "metrics_port": None,
            "redis_url": redis_url,
            "blob_dir": str(tmp_path / "blobs"),
            "grace_seconds": 1.0,
            **changes,
        }
    )
    async with Background() as background, running(settings, background) as service:
        channel = connect_grpc(f"127.0.0.1:{service.port}", token=settings.token)
        try:
            yield service, value_prior_pb2_grpc.ValuePriorServiceStub(channel)
        finally:
            await channel.close()


def outcome(number, policy="job-1", won=4.0, tried=4, **more):
    fields = {
        "outcome_id": f"{policy}/0/{number}",
        "policy_id": policy,
        "prompt_id": f"p{number % 7}",
        "text": f"Compute {number} + {number * 3} =",
        "policy_version": number // 8,
        **more,
    }
    return value_prior_pb2.Outcome(successes=won, trials=tried, **fields)


def score_request(*texts, policy="job-1", **more):
    prompts = [value_prior_pb2.ScoredPrompt(text=text) for text in texts]
    return value_prior_pb2.ScoreRequest(policy_id=policy, prompts=prompts, **more)


async def score(stub, *texts, **more):
    return (await stub.Score(score_request(*texts, **more), timeout=DEADLINE)).priors


async def observe(stub, *outcomes):
    answer = await stub.Observe(value_prior_pb2.ObserveRequest(outcomes=outcomes), timeout=DEADLINE)
    return answer.accepted, answer.duplicates, answer.stale


async def snapshot(stub, policy="job-1"):
    return await stub.Snapshot(value_prior_pb2.SnapshotRequest(policy_id=policy), timeout=DEADLINE)


async def restore(stub, data=b"", lineage=0, policy="job-1"):
    request = value_prior_pb2.RestoreRequest(policy_id=policy, lineage=lineage, snapshot=data)
    return (await stub.Restore(request, timeout=DEADLINE)).outcomes


async def test_a_policy_never_seen_gets_a_half_with_high_uncertainty(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        (prior,) = await score(stub, "1 + 1 =", policy="nobody")
        assert prior.value == 0.5
        assert prior.uncertainty == pytest.approx(1 / np.sqrt(12))
        assert prior.source == value_prior_pb2.PRIOR_SOURCE_UNINFORMED
        assert prior.context_size == 0


async def test_outcomes_move_the_prior_and_policies_do_not_mix(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        assert await observe(stub, *(outcome(i, won=0.0) for i in range(40))) == (40, 0, 0)
        assert await observe(stub, *(outcome(i, "job-2") for i in range(40))) == (40, 0, 0)
        (bad,), (good,) = await score(stub, "5 + 6 ="), await score(stub, "5 + 6 =", policy="job-2")
        assert bad.value < 0.15
        assert good.value > 0.85
        assert bad.source == value_prior_pb2.PRIOR_SOURCE_CONTEXT
        assert bad.context_size == 40
        request = value_prior_pb2.ScoreRequest(policy_id="job-1")
        request.prompts.add(text="5 + 6 =", prompt_id="p1")
        known = (await stub.Score(request, timeout=DEADLINE)).priors[0]
        assert known.source == value_prior_pb2.PRIOR_SOURCE_HISTORY
        assert 0 < known.value < 0.15


async def test_the_same_outcomes_in_50_concurrent_calls_count_once(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (service, stub):
        batch = [outcome(i) for i in range(10)]
        counts = await asyncio.gather(*(observe(stub, *batch) for _ in range(50)))
        assert sum(accepted for accepted, _, _ in counts) == 10
        assert sum(duplicates for _, duplicates, _ in counts) == 490
        assert (await snapshot(stub)).outcomes == 10
        text = (await http(service).get("/metrics")).text
        assert 'rollwise_value_prior_observations_total{result="duplicate"}' in text


async def test_a_restart_rebuilds_everything_from_redis(redis_url, tmp_path):
    rng = np.random.default_rng(0)
    batch = [outcome(i, won=float(rng.integers(0, 5)), predicted=0.4) for i in range(100)]
    async with value_prior(redis_url, tmp_path) as (_, stub):
        await restore(stub, lineage=3)
        await observe(stub, *(outcome(i, lineage=3, won=batch[i].successes) for i in range(100)))
        before = [prior.value for prior in await score(stub, "8 + 9 =", "123 + 456 =")]
        kept = await snapshot(stub)
    async with value_prior(redis_url, tmp_path) as (_, stub):
        assert [prior.value for prior in await score(stub, "8 + 9 =", "123 + 456 =")] == before
        assert await snapshot(stub) == kept
        assert await observe(stub, outcome(5, lineage=3), outcome(5, lineage=2)) == (0, 1, 1)


async def test_a_snapshot_goes_round_and_older_lineages_are_fenced_off(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        await observe(stub, *(outcome(i, won=float(i % 5)) for i in range(64)))
        before = [prior.value for prior in await score(stub, "8 + 9 =", "99 + 1 =")]
        kept = await snapshot(stub)
        await observe(stub, *(outcome(i, won=4.0) for i in range(64, 128)))
        assert [prior.value for prior in await score(stub, "8 + 9 =", "99 + 1 =")] != before
        assert await restore(stub, kept.snapshot, lineage=2) == 64
        assert [prior.value for prior in await score(stub, "8 + 9 =", "99 + 1 =")] == before
        late = outcome(200, lineage=1)
        assert await observe(stub, late, outcome(201, lineage=2), outcome(3, lineage=2)) == (1, 1, 1)
        with pytest.raises(FailedPrecondition, match="fenced off by lineage 2") as caught:
            await restore(stub, kept.snapshot, lineage=1)
        assert caught.value.reason == "STALE_LINEAGE"
        # Another policy may begin from it: a job that branches off a checkpoint.
        assert await restore(stub, kept.snapshot, policy="branch") == 64
        assert [prior.value for prior in await score(stub, "8 + 9 =", "99 + 1 =", policy="branch")] == before


async def test_an_empty_snapshot_forgets_the_policy(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        await observe(stub, *(outcome(i) for i in range(20)))
        assert await restore(stub, lineage=1) == 0
        assert (await score(stub, "1 + 1 ="))[0].source == value_prior_pb2.PRIOR_SOURCE_UNINFORMED
        assert await observe(stub, outcome(1)) == (0, 0, 1)
        with pytest.raises(InvalidArgument, match="snapshot is not one of this service's"):
            await restore(stub, b"junk", lineage=1)


async def test_order_of_arrival_does_not_change_a_prior(redis_url, tmp_path):
    rng = np.random.default_rng(1)
    wins = rng.integers(0, 5, 96)
    answers = []
    async with value_prior(redis_url, tmp_path) as (_, stub):
        for policy, order in (("a", range(96)), ("b", rng.permutation(96).tolist())):
            for start in range(0, 96, 32):
                rows = [outcome(i, policy, won=float(wins[i])) for i in list(order)[start : start + 32]]
                renamed = [
                    outcome(i, policy, won=r.successes, outcome_id=f"x/{i}")
                    for i, r in zip(list(order)[start : start + 32], rows, strict=True)
                ]
                await observe(stub, *renamed)
                await score(stub, "1 + 2 =", policy=policy)
            answers.append([p.value for p in await score(stub, "1 + 2 =", "777 + 1 =", policy=policy)])
    assert answers[0] == answers[1]


async def test_a_score_limited_to_earlier_versions_ignores_the_running_step(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        await observe(stub, *(outcome(i, won=float(i % 3)) for i in range(32)))  # versions 0 to 3
        first = await score(stub, "1 + 2 =", before_version=4)
        await observe(stub, *(outcome(i, won=4.0) for i in range(32, 40)))  # version 4
        assert await score(stub, "1 + 2 =", before_version=4) == first
        assert (await score(stub, "1 + 2 ="))[0].context_size == 40
        assert (await score(stub, "1 + 2 =", before_version=0))[0].source == value_prior_pb2.PRIOR_SOURCE_UNINFORMED


async def publish(redis_url, tmp_path, payloads):
    client = connect(redis_url)
    publisher = Publisher(client, FolderBlobStore(tmp_path / "blobs"))
    for entry_id, payload in payloads.items():
        await publisher.publish(entry_id, [Target(keys.outcomes(), payload)])
    return client


async def drained(client):
    async with asyncio.timeout(15):
        while await client.xlen(keys.outcomes()):
            await asyncio.sleep(0.02)


async def test_outcomes_of_the_stream_are_learnt_before_a_limited_score_is_answered(redis_url, tmp_path):
    batch = {f"e{i}": outcome(i).SerializeToString() for i in range(24)}
    async with value_prior(redis_url, tmp_path) as (_, stub):
        client = await publish(redis_url, tmp_path, batch)
        assert (await score(stub, "1 + 2 =", before_version=3))[0].context_size == 24
        await drained(client)
        await client.aclose()


async def test_unreadable_and_impossible_outcomes_are_buried_and_the_rest_is_learnt(redis_url, tmp_path):
    batch = {
        "good-1": outcome(1).SerializeToString(),
        "noise": b"\xff\xff\xff",
        "impossible": outcome(2, won=9.0).SerializeToString(),
        "good-2": outcome(3).SerializeToString(),
    }
    client = await publish(redis_url, tmp_path, batch)
    async with value_prior(redis_url, tmp_path) as (_, stub):
        await drained(client)
        assert (await snapshot(stub)).outcomes == 2
        buried = [str(entry) for entry in await client.xrange(keys.dead(keys.outcomes()))]
        assert len(buried) == 2
        assert any("unreadable" in entry for entry in buried)
        assert any("successes is 9" in entry for entry in buried)
    await client.aclose()


async def test_the_policys_own_hidden_state_is_an_embedder(redis_url, tmp_path):
    rng = np.random.default_rng(2)

    def feature(x, size=6):
        values = np.concatenate([[x], rng.standard_normal(size - 1)]).astype("<f4").tobytes()
        kind = common_pb2.FEATURE_DTYPE_FLOAT32
        return common_pb2.HiddenFeature(layer=20, dtype=kind, dimension=size, values=values)

    async with value_prior(redis_url, tmp_path, embedder="policy") as (_, stub):
        signs = rng.choice([-1.0, 1.0], 200)
        await observe(stub, *(outcome(i, won=2 + 2 * s, feature=feature(s)) for i, s in enumerate(signs)))
        request = score_request("same text", "same text")
        for prompt, x in zip(request.prompts, (-1.0, 1.0), strict=True):
            prompt.feature.CopyFrom(feature(x))
        low, high = (await stub.Score(request, timeout=DEADLINE)).priors
        assert low.value < 0.2
        assert high.value > 0.8
        with pytest.raises(InvalidArgument, match=r"prompts\[1\].feature is missing"):
            request.prompts[1].ClearField("feature")
            await stub.Score(request, timeout=DEADLINE)
        with pytest.raises(InvalidArgument, match=r"outcomes\[0\].feature is missing"):
            await observe(stub, outcome(900))
        with pytest.raises(InvalidArgument, match=r"feature\.dimension is 4, outcomes of this policy have 6"):
            await observe(stub, outcome(901, feature=feature(1.0, size=4)))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        (["fine", " "], r"prompts\[1\].text is empty"),
        (["x" * 2000], r"prompts\[0\].text is 2000 bytes of UTF-8, the limit is 1000"),
        (["a", "b", "c", "d"], "prompts has 4 rows, the limit is 3"),
    ],
)
async def test_bad_prompts_are_named(redis_url, tmp_path, prompts, message):
    async with value_prior(redis_url, tmp_path, max_prompts=3, max_text_bytes=1000, consume=False) as (_, stub):
        with pytest.raises(InvalidArgument, match=message):
            await score(stub, *prompts)
        with pytest.raises(InvalidArgument, match="policy_id is empty"):
            await score(stub, "fine", policy="")


async def test_a_bad_row_refuses_its_call_as_a_whole(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (_, stub):
        with pytest.raises(InvalidArgument, match=r"outcomes\[1\].successes is nan"):
            await observe(stub, outcome(1), outcome(2, won=float("nan")))
        assert (await snapshot(stub)).outcomes == 0


async def test_without_redis_nothing_is_acknowledged_and_what_is_known_still_answers(redis_server, tmp_path):
    async with value_prior(redis_server.url, tmp_path, redis_patience_seconds=0.3) as (service, stub):
        assert await observe(stub, *(outcome(i, won=0.0) for i in range(20))) == (20, 0, 0)
        redis_server.kill()
        with pytest.raises(Unavailable, match="does not answer"):
            await observe(stub, outcome(20, won=0.0))
        assert (await score(stub, "1 + 2 ="))[0].context_size == 20
        async with http(service) as client, asyncio.timeout(15):
            while (await client.get("/healthz")).status_code != 503:
                await asyncio.sleep(0.05)
        redis_server.restart()
        # Sent again, as a client does: counted once, whether or not the first try had arrived.
        assert await observe(stub, *(outcome(i, won=0.0) for i in range(21))) == (1, 20, 0)
        assert (await snapshot(stub)).outcomes == 21


async def test_every_key_but_the_owners_has_a_time_to_live(redis_url, tmp_path):
    client = connect(redis_url)
    async with value_prior(redis_url, tmp_path, context_ttl_seconds=1000) as (_, stub):
        await observe(stub, outcome(1))
        assert 0 < await client.ttl(context_key("job-1")) <= 1000
        lasting = [k for k in await client.keys("*") if await client.ttl(k) < 0]
        assert set(lasting) <= {b"rollwise:prior:owner", keys.outcomes().encode()}
    await client.aclose()


async def test_a_process_that_was_replaced_cannot_write_any_more(redis_url, tmp_path):
    client = connect(redis_url)
    async with value_prior(redis_url, tmp_path, consume=False) as (_, stub):
        await observe(stub, outcome(1))
        successor = RedisContextStore(client, capacity=16, ttl_seconds=100)
        await successor.open()
        assert len((await successor.load("job-1")).rows) == 1
        with pytest.raises(FailedPrecondition, match="took over"):
            await observe(stub, outcome(2))
    await client.aclose()


def http(service, **headers):
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.http_port}", timeout=DEADLINE, headers=headers)


def rest_outcome(number, **changes):
    return {
        "outcome_id": f"r{number}",
        "policy_id": "mine",
        "text": f"What is {number}?",
        "successes": 3,
        "trials": 4,
        **changes,
    }


async def test_rest_scores_and_learns(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path) as (service, _), http(service) as client:
        body = {"outcomes": [rest_outcome(i) for i in range(20)]}
        assert (await client.post("/v1/observations", json=body)).json() == {
            "accepted": 20,
            "duplicates": 0,
            "stale": 0,
        }
        assert (await client.post("/v1/observations", json=body)).json()["duplicates"] == 20
        answer = await client.post("/v1/score", json={"policy_id": "mine", "prompts": [{"text": "What is 99?"}]})
        (prior,) = answer.json()["priors"]
        assert answer.status_code == 200
        assert 0.6 < prior["value"] < 0.85
        assert prior["source"] == "context"
        assert prior["context_size"] == 20
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert "rollwise_value_prior_scores_total" in (await client.get("/metrics")).text
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/v1/score", "/v1/observations", "/healthz"} <= set(paths)
        assert (await client.get("/docs")).status_code == 200


BAD_BODIES = [
    ("/v1/score", {"policy_id": "", "prompts": [{"text": "a"}]}, 400, "policy_id"),
    ("/v1/score", {"policy_id": "p", "prompts": []}, 400, None),
    ("/v1/score", {"policy_id": "p", "prompts": [{"text": "a"}, {"text": ""}]}, 400, "prompts[1].text"),
    ("/v1/score", {"policy_id": "p", "prompts": [{"txt": "a"}]}, 400, "prompts[0].text"),
    ("/v1/observations", {"outcomes": [rest_outcome(1), rest_outcome(2, trials=0)]}, 400, "outcomes[1].trials"),
    ("/v1/observations", {"outcomes": [rest_outcome(1, successes=5)]}, 400, "outcomes[0].successes"),
    ("/v1/observations", {"outcomes": [rest_outcome(1, successes=float("nan"))]}, 400, "outcomes[0].successes"),
    ("/v1/observations", {"outcomes": [rest_outcome(1, text="\ud800")]}, 400, "outcomes[0].text"),
    ("/v1/nothing", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), BAD_BODIES)
async def test_rest_errors_are_problem_details_that_name_the_field(redis_url, tmp_path, path, body, status, field):
    async with value_prior(redis_url, tmp_path, consume=False) as (service, _), http(service) as client:
        answer = await client.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.status_code, problem["status"], problem.get("field")) == (status, status, field)
        assert problem["title"]
        assert problem["detail"]


async def test_rest_refuses_bodies_that_are_too_large_or_no_text(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path, max_body_bytes=2048) as (service, _), http(service) as client:
        large = json.dumps({"policy_id": "p", "prompts": [{"text": "x" * 4000}]}).encode()

        async def in_pieces():
            for start in range(0, len(large), 500):
                yield large[start : start + 500]

        for content in (large, in_pieces()):
            answer = await client.post("/v1/score", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert "2048 bytes" in answer.json()["detail"]
        for content in (b"\xff\xfe{}", b"{"):
            answer = await client.post("/v1/score", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/problem+json"


async def test_both_transports_want_the_token(redis_url, tmp_path):
    async with value_prior(redis_url, tmp_path, auth_token="secret-1") as (service, stub):
        assert (await score(stub, "a"))[0].value == 0.5
        async with connect_grpc(f"127.0.0.1:{service.port}") as bare:
            with pytest.raises(Unauthenticated):
                await score(value_prior_pb2_grpc.ValuePriorServiceStub(bare), "a")
        body = {"policy_id": "p", "prompts": [{"text": "a"}]}
        for header, status in ((None, 401), ("Bearer wrong", 401), ("Bearer secret-1", 200)):
            async with http(service, **({"authorization": header} if header else {})) as client:
                answer = await client.post("/v1/score", json=body)
                assert answer.status_code == status
                assert (await client.get("/healthz")).status_code == 200
        assert "secret-1" not in answer.text
