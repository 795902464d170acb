"""The verifier over real gRPC, with its real workers."""

import contextlib
import json

import pytest
from prometheus_client import REGISTRY
from rollwise.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.grpc_client import connect
from services.common.settings import load_settings
from services.verifier import metrics, server
from services.verifier.pool import VerdictPool
from services.verifier.settings import VerifierSettings

CORRECT, WRONG, NO_VERDICT = (
    common_pb2.VERDICT_KIND_CORRECT,
    common_pb2.VERDICT_KIND_WRONG,
    common_pb2.VERDICT_KIND_NO_VERDICT,
)
HANGS = "\\boxed{\\binom{1000000000}{500000000}}"


@pytest.fixture(scope="module")
def verifier():
    settings = VerifierSettings(port=0, metrics_port=None, workers=2, limit_seconds=2, queue_limit=200)
    with VerdictPool(settings.pool_options(), metrics.observer()) as pool:
        metrics.watch(pool)
        yield settings, pool


@pytest.fixture
async def stub(verifier):
    settings, pool = verifier
    running = server.build(settings, pool)
    port = await running.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)
    await running.stop(0)


def math_reference(answer):
    return common_pb2.Reference(domain=common_pb2.DOMAIN_MATH, math=common_pb2.MathReference(answer=answer))


def gym_reference(task, answer):
    entry = json.dumps({"answer": answer, "metadata": {}})
    return common_pb2.Reference(reasoning_gym=common_pb2.ReasoningGymReference(task=task, entry_json=entry))


def request(*items):
    return verifier_pb2.VerifyRequest(
        items=[
            verifier_pb2.VerifyItem(item_id=item_id, completion=completion, reference=reference)
            for item_id, completion, reference in items
        ]
    )


async def test_every_item_gets_its_own_verdict_in_order(stub):
    answer = await stub.Verify(
        request(
            ("b", "\\boxed{\\frac{2}{4}}", math_reference("1/2")),
            ("a", "\\boxed{2}", math_reference("1/2")),
            ("c", "\\boxed{2}", math_reference("foo bar")),
            ("g", "7 + 5 = 12", gym_reference("chain_sum", "12")),
            ("h", "13", gym_reference("chain_sum", "12")),
            ("d", "print(1)", common_pb2.Reference(code=common_pb2.CodeReference(language="python"))),
            ("e", "1", common_pb2.Reference()),
            ("f", "1", common_pb2.Reference(domain=common_pb2.DOMAIN_CODE, math=common_pb2.MathReference(answer="1"))),
        ),
        timeout=30,
    )
    assert [(v.item_id, v.verdict.kind) for v in answer.verdicts] == [
        ("b", CORRECT),
        ("a", WRONG),
        ("c", NO_VERDICT),
        ("g", CORRECT),
        ("h", WRONG),
        ("d", NO_VERDICT),
        ("e", NO_VERDICT),
        ("f", NO_VERDICT),
    ]
    first, _, unparsable, _, _, unbuilt, *_ = (v.verdict for v in answer.verdicts)
    assert (first.score, first.reason, first.extracted) == (1.0, "equal", "\\frac{2}{4}")
    assert unparsable.reason.startswith("gold_unparsable")
    assert unbuilt.reason == "unsupported domain 'code'"


async def test_an_empty_request_is_an_empty_answer(stub):
    assert not (await stub.Verify(verifier_pb2.VerifyRequest(), timeout=5)).verdicts


async def test_repeated_and_empty_ids_are_refused_by_name(stub):
    twice = ("twice", "1", math_reference("1"))
    with pytest.raises(InvalidArgument, match="twice"):
        await stub.Verify(request(twice, ("once", "1", math_reference("1")), twice), timeout=5)
    with pytest.raises(InvalidArgument, match=r"items\[1\]"):
        await stub.Verify(request(twice, ("", "1", math_reference("1"))), timeout=5)


async def test_what_the_deadline_cuts_off_is_no_verdict_and_the_rest_is_answered(stub):
    items = [("good", "\\boxed{4}", math_reference("4"))]
    items += [(f"bad{i}", HANGS, math_reference(str(i))) for i in range(4)]
    answer = await stub.Verify(request(*items), timeout=1.5)
    assert [v.verdict.kind for v in answer.verdicts] == [CORRECT, *[NO_VERDICT] * 4]
    assert all(v.verdict.reason.startswith("timeout") for v in answer.verdicts[1:])


async def test_more_than_the_queue_holds_is_refused_as_busy(stub):
    with pytest.raises(ResourceExhausted, match="try again later"):
        await stub.Verify(request(*((str(i), "1", math_reference("1")) for i in range(201))), timeout=5)


async def test_references_are_checked_one_by_one(stub):
    answer = await stub.CheckReferences(
        verifier_pb2.CheckReferencesRequest(
            references=[
                math_reference("\\frac{1}{2}"),
                math_reference("Answer is forty three."),
                gym_reference("chain_sum", "12"),
                gym_reference("no_such_task", "12"),
                common_pb2.Reference(tool_call=common_pb2.ToolCallReference()),
                common_pb2.Reference(),
            ]
        ),
        timeout=30,
    )
    assert [c.usable for c in answer.checks] == [True, False, True, False, False, False]
    assert "forty three" in answer.checks[1].reason
    assert "no_such_task" in answer.checks[3].reason
    assert answer.checks[4].reason == "unsupported domain 'tool_call'"


async def test_verdicts_and_workers_are_counted(stub):
    def value(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    before = value("rollwise_verifier_verdicts_total", kind="correct", reason="equal")
    await stub.Verify(request(("a", "\\boxed{\\frac{6}{8}}", math_reference("3/4"))), timeout=30)
    assert value("rollwise_verifier_verdicts_total", kind="correct", reason="equal") == before + 1
    assert value("rollwise_verifier_queue_length") == 0
    assert value("rollwise_verifier_item_duration_seconds_count") > 0


@pytest.mark.parametrize(
    ("argument", "value"), [("--domains", "math,chess"), ("--memory-mb", "100"), ("--workers", "0"), ("--wrkers", "1")]
)
def test_bad_settings_are_refused_by_name(argument, value, capsys):
    with contextlib.suppress(SystemExit):
        load_settings(VerifierSettings, [argument, value])
        pytest.fail("was accepted")
    assert argument.strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
