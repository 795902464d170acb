"""What the allocator makes of answers that are late, missing, cut short or wrong; over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from allocation_doubles import Doubles, Generation, Verifier, fixed, prompt, until
from rollwise.v1 import allocator_pb2, allocator_pb2_grpc, common_pb2, generation_pb2, verifier_pb2

from services.allocator.replay import replay_group
from services.common.errors import FailedPrecondition, InvalidArgument, RollwiseError, Unavailable
from services.common.grpc_client import connect

COMPLETE, FILTERED = allocator_pb2.GROUP_STATE_COMPLETE, allocator_pb2.GROUP_STATE_FILTERED
NO_VERDICT, CORRECT = common_pb2.VERDICT_KIND_NO_VERDICT, common_pb2.VERDICT_KIND_CORRECT
pytestmark = pytest.mark.asyncio(loop_scope="module")


class SpoiltGeneration(Generation):
    """Its answers, and whether it answers at all, can be spoilt."""

    def reset(self) -> None:
        self.__init__()
        self.spoil: Any = lambda answer: None
        self.flaky: Any = lambda: None

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> generation_pb2.GenerateResponse:
        fault = self.flaky()
        if fault is not None:
            self.requests.append(request)
            raise fault
        answer = await super().Generate(request, context)
        self.spoil(answer)
        return answer


class SpoiltVerifier(Verifier):
    """Its answers can be spoilt."""

    def reset(self) -> None:
        self.__init__()
        self.spoil: Any = lambda answer: None

    async def Verify(self, request: verifier_pb2.VerifyRequest, context: Any) -> verifier_pb2.VerifyResponse:
        answer = await super().Verify(request, context)
        self.spoil(answer)
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allocator")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(folder: Path) -> AsyncIterator[tuple[Doubles, str]]:
    """`python -m services.allocator` without a queue, and the services it calls."""
    world = Doubles(generation=SpoiltGeneration(), verifier=SpoiltVerifier())
    await world.start()
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "services.allocator", "--port", "0", "--metrics-port", "none"]
    command += ["--consume", "false", "--ready-file", str(ready), "--grace-seconds", "1"]
    for name, target in world.targets.items():
        command += [f"--{name.replace('_', '-')}-target", target]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLWISE_")}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    try:
        await until(lambda: ready.exists() or running.poll() is not None, 30)
        assert running.poll() is None, running.communicate()[1].decode()
        yield world, f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        running.terminate()
        assert await asyncio.to_thread(running.wait, 20) == 0
    finally:
        running.kill()
        running.communicate()
        await world.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(process: tuple[Doubles, str]) -> AsyncIterator[Doubles]:
    doubles = process[0]
    doubles.generation.reset()
    doubles.verifier.reset()
    doubles.prior.__init__()
    yield doubles
    assert not doubles.generation.faults and not doubles.prior.faults, "a canned fault was never asked for"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(process: tuple[Doubles, str]) -> AsyncIterator[Any]:
    channel = connect(process[1])
    yield allocator_pb2_grpc.AllocatorServiceStub(channel)
    await channel.close()


async def allocate(stub: Any, entry: allocator_pb2.PromptEntry) -> allocator_pb2.ScoredGroup:
    return (await stub.Allocate(allocator_pb2.AllocateRequest(entry=entry), timeout=40)).group


def spoil_first_round(world: Doubles, change: Any) -> None:
    """Applies `change` to each sample of the first answer."""

    def spoil(answer: generation_pb2.GenerateResponse) -> None:
        if answer.samples and answer.samples[0].index == 0:
            for sample in answer.samples:
                change(sample)

    world.generation.spoil = spoil


def spoil_verdicts(world: Doubles, change: Any) -> None:
    """Applies `change` to the verdicts of the first two rollouts."""

    def spoil(answer: verifier_pb2.VerifyResponse) -> None:
        for item in answer.verdicts:
            if item.item_id in ("0", "1"):
                change(item)

    world.verifier.spoil = spoil


async def test_aborted_rollouts_are_replaced_and_never_judged(world: Doubles, stub: Any) -> None:
    def abort(sample: generation_pb2.Sample) -> None:
        if sample.index < 3:
            sample.finish_reason = common_pb2.FINISH_REASON_ABORTED

    spoil_first_round(world, abort)
    group = await allocate(stub, prompt())
    assert (group.state, [r.index for r in group.rollouts]) == (COMPLETE, [3, 4, 5, 6])
    assert [r.index for r in group.unjudged] == [0, 1, 2]
    assert all(r.verdict.reason.startswith("aborted") and r.verdict.kind == NO_VERDICT for r in group.unjudged)
    assert world.verifier.judged == ["3", "4", "5", "6"]


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.1, 1.5])
async def test_a_score_that_is_no_share_of_one_is_no_verdict(world: Doubles, stub: Any, score: float) -> None:
    spoil_verdicts(world, lambda item: setattr(item.verdict, "score", score))
    group = await allocate(stub, prompt())
    assert (group.state, [r.index for r in group.unjudged]) == (COMPLETE, [0, 1])
    assert all(r.verdict.kind == NO_VERDICT and r.verdict.reason.startswith("fault") for r in group.unjudged)
    assert [r.index for r in group.rollouts] == [2, 3, 4, 5]
    assert all(len(decision.rewards) == decision.rollouts for decision in group.trail)
    assert all(math.isfinite(decision.baseline) for decision in group.trail)


@pytest.mark.parametrize(
    "change",
    [
        lambda item: setattr(item, "item_id", "another"),
        lambda item: setattr(item, "item_id", ""),
        lambda item: setattr(item, "item_id", "77"),
        lambda item: item.verdict.ClearField("kind"),
        lambda item: item.ClearField("verdict"),
    ],
)
async def test_a_rollout_without_a_usable_answer_of_the_verifier_is_replaced(
    world: Doubles, stub: Any, change: Any
) -> None:
    spoil_verdicts(world, change)
    group = await allocate(stub, prompt())
    assert (group.state, [r.index for r in group.unjudged]) == (COMPLETE, [0, 1])
    assert [r.index for r in group.rollouts] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.ClearField("samples"),
        lambda answer: answer.samples.pop(),
        lambda answer: setattr(answer.samples[1], "index", 0),
        lambda answer: setattr(answer.samples[1], "index", 9),
    ],
)
async def test_an_answer_with_other_indexes_than_asked_filters_the_group(world: Doubles, stub: Any, spoil: Any) -> None:
    world.generation.spoil = spoil
    group = await allocate(stub, prompt())
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_FAULT)
    assert "generation" in group.cause_detail and "asked were [0, 1, 2, 3]" in group.cause_detail
    assert not group.rollouts


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 1.5])
async def test_a_prior_that_is_no_probability_filters_the_group(world: Doubles, stub: Any, value: float) -> None:
    world.prior.value = value
    group = await allocate(stub, prompt())
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_FAULT)
    assert "prior" in group.cause_detail
    assert not world.generation.requests


async def test_a_refusal_in_a_later_round_keeps_what_is_judged(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95
    world.generation.says = lambda index: "wrong"

    def refuse_later() -> RollwiseError | None:
        return InvalidArgument("no more of these") if len(world.generation.requests) == 2 else None

    world.generation.flaky = refuse_later
    group = await allocate(stub, prompt())
    assert (group.state, [r.index for r in group.rollouts]) == (COMPLETE, [0, 1, 2, 3, 4])
    assert group.trail[-1].more == 0
    assert "no more of these" in group.cause_detail


async def test_rollouts_cut_at_the_time_limit_that_are_too_few_filter_the_group(world: Doubles, stub: Any) -> None:
    world.generation.says = lambda index: "?" if index == 2 else "right"
    world.generation.slow = lambda request: True
    group = await allocate(stub, prompt(deadline_seconds=1))
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_DEADLINE)
    assert ([r.index for r in group.rollouts], [r.index for r in group.unjudged]) == ([0, 1, 3], [2])
    assert len(world.generation.requests) == 1


async def test_one_rollout_cut_at_the_time_limit_is_judged_with_the_others(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95

    def cut(sample: generation_pb2.Sample) -> None:
        if sample.index == 1:
            sample.finish_reason = common_pb2.FINISH_REASON_DEADLINE

    world.generation.says = lambda index: "wrong"
    spoil_first_round(world, cut)
    group = await allocate(stub, prompt())
    assert [(r.index, r.finish_reason, r.verdict.kind) for r in group.rollouts][1] == (
        1,
        common_pb2.FINISH_REASON_DEADLINE,
        common_pb2.VERDICT_KIND_WRONG,
    )
    assert (group.state, len(group.rollouts)) == (COMPLETE, 4)
    assert group.trail[-1].kind == allocator_pb2.DECISION_KIND_DEADLINE


async def test_when_replacements_run_out_above_the_minimum_the_group_is_complete(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95
    world.generation.says = lambda index: "wrong" if index < 6 else "?"
    group = await allocate(stub, prompt())
    assert (group.state, len(group.rollouts), len(group.unjudged)) == (COMPLETE, 6, 26)
    assert (group.trail[-1].kind, group.trail[-1].more) == (allocator_pb2.DECISION_KIND_LIMIT, 0)
    assert all(step.reproduced for step in replay_group(group))
    assert {len(decision.rewards) for decision in group.trail} == {4, 5, 6}


async def test_a_fixed_budget_samples_at_most_twice_its_number(world: Doubles, stub: Any) -> None:
    world.generation.says = lambda index: "right" if index == 0 else "?"
    entry = prompt(budget=fixed(5))
    entry.want_prior = False
    group = await allocate(stub, entry)
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_NO_VERDICT)
    assert (len(group.rollouts), len(group.unjudged)) == (1, 9)


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_fails_in_passing_no_index_is_lost_or_doubled(world: Doubles, stub: Any, seed: int) -> None:
    chance = random.Random(seed)
    faults = [
        Unavailable("restarting"),
        FailedPrecondition("no weights", reason="NO_WEIGHTS"),
        FailedPrecondition("older", reason="VERSION_TOO_OLD"),
    ]
    world.generation.flaky = lambda: chance.choice(faults) if chance.random() < 0.4 else None
    world.generation.says = lambda index: "?" if index % 3 == 2 else "wrong"
    world.prior.value = 0.9
    group = await allocate(stub, prompt())
    taken = sorted([r.index for r in group.rollouts] + [r.index for r in group.unjudged])
    assert group.state == COMPLETE
    assert taken == list(range(len(taken)))
    assert [r.index for r in group.unjudged] == [index for index in taken if index % 3 == 2]
    assert len(set(world.verifier.judged)) == len(world.verifier.judged)
    # Every range that was asked for follows on the one before, or repeats it.
    ends = 0
    for request, after in zip(world.generation.requests, [*world.generation.requests[1:], None], strict=True):
        assert request.first_index == ends
        if after is None or after.first_index != request.first_index:
            ends += request.count
    assert len(world.prior.requests) == 1


async def test_the_prior_is_asked_before_the_first_rollout(world: Doubles, stub: Any) -> None:
    world.prior.stuck = True
    call = asyncio.create_task(allocate(stub, prompt()))
    await until(lambda: world.prior.requests)
    await asyncio.sleep(0.1)
    assert not world.generation.requests
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_caller_that_goes_away_frees_the_engine(world: Doubles, stub: Any) -> None:
    world.generation.stuck = lambda request: True
    call = asyncio.create_task(allocate(stub, prompt()))
    await until(lambda: world.generation.running)
    call.cancel()
    began = time.monotonic()
    await until(lambda: not world.generation.running)
    assert time.monotonic() - began < 3
    await asyncio.gather(call, return_exceptions=True)


async def test_a_call_without_a_deadline_is_refused(process: tuple[Doubles, str], world: Doubles) -> None:
    async with grpc.aio.insecure_channel(process[1]) as channel:
        raw: Any = allocator_pb2_grpc.AllocatorServiceStub(channel)
        for call, request in (
            (raw.Allocate, allocator_pb2.AllocateRequest(entry=prompt())),
            (raw.Decide, allocator_pb2.DecideRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "deadline" in (caught.value.details() or "")
    assert not world.prior.requests


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("prompt_token_ids", lambda e: setattr(e, "prompt_token_ids", b"\x01\x02\x03")),
        ("sampling.temperature", lambda e: setattr(e.sampling, "temperature", math.nan)),
        ("sampling.temperature", lambda e: setattr(e.sampling, "temperature", -1)),
        ("sampling.top_p", lambda e: setattr(e.sampling, "top_p", 0)),
        ("reference", lambda e: e.ClearField("reference")),
        ("scale", lambda e: setattr(e.scale, "high", math.inf)),
        ("rollouts", lambda e: e.budget.CopyFrom(fixed(0))),
        ("key.prompt_id", lambda e: e.key.ClearField("prompt_id")),
    ],
)
async def test_a_malformed_entry_buys_nothing_and_is_refused_naming_the_field(
    world: Doubles, stub: Any, field: str, spoil: Any
) -> None:
    entry = prompt()
    spoil(entry)
    with pytest.raises(InvalidArgument, match=field):
        await allocate(stub, entry)
    assert not world.prior.requests and not world.generation.requests
