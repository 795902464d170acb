"""Allocate and Decide over real sockets, with real servers for what the allocator calls."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from allocation_doubles import Doubles, doubles, fixed, prompt, until
from rollwise.v1 import allocator_pb2, allocator_pb2_grpc, common_pb2

from services.allocator.allocator import Allocator
from services.allocator.clients import ports
from services.allocator.replay import replay_group
from services.allocator.servicer import AllocatorServicer
from services.common.errors import FailedPrecondition, Internal, InvalidArgument, ResourceExhausted, Unavailable
from services.common.grpc_client import connect
from services.common.grpc_server import GrpcServer
from services.common.settings import ServiceSettings

COMPLETE, FILTERED = allocator_pb2.GROUP_STATE_COMPLETE, allocator_pb2.GROUP_STATE_FILTERED


@pytest.fixture
async def world() -> AsyncIterator[Doubles]:
    async with doubles() as running:
        yield running


@pytest.fixture
async def stub(world: Doubles) -> AsyncIterator[Any]:
    allocator = Allocator(ports(*(world.channels[name] for name in ("value_prior", "generation", "verifier"))))
    server = GrpcServer(
        ServiceSettings(port=0, grace_seconds=0),
        name="allocator",
        register=lambda s: allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(AllocatorServicer(allocator), s),
        service_names=["rollwise.v1.AllocatorService"],
    )
    channel = connect(f"127.0.0.1:{await server.start()}")
    yield allocator_pb2_grpc.AllocatorServiceStub(channel)
    await channel.close()
    await server.stop(0)


async def allocate(stub: Any, entry: allocator_pb2.PromptEntry, seconds: float = 30) -> allocator_pb2.ScoredGroup:
    response = await stub.Allocate(allocator_pb2.AllocateRequest(entry=entry), timeout=seconds)
    return response.group


async def test_a_good_prior_costs_k_min_rollouts_and_is_asked_once(world: Doubles, stub: Any) -> None:
    group = await allocate(stub, prompt())
    assert group.state == COMPLETE
    assert [r.index for r in group.rollouts] == [0, 1, 2, 3]
    assert [r.reward for r in group.rollouts] == [0, 1, 0, 1]
    assert [d.kind for d in group.trail] == [allocator_pb2.DECISION_KIND_STOP]
    assert group.prior.value == 0.5
    assert len(world.prior.requests) == 1
    assert len(world.generation.requests) == 1
    asked = world.generation.requests[0]
    assert (asked.sampling.seed, asked.min_policy_version, asked.policy_id) == (11, 3, "job")
    assert 0 < asked.time_limit_seconds < 20


async def test_a_wrong_prior_buys_rollouts_one_at_a_time_and_the_trail_replays(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95
    world.generation.says = lambda index: "wrong"
    group = await allocate(stub, prompt())
    assert len(group.rollouts) > 8
    assert [r.first_index for r in world.generation.requests] == [0, *range(4, len(group.rollouts))]
    assert [r.index for r in group.rollouts] == list(range(len(group.rollouts)))
    assert all(step.reproduced for step in replay_group(group))
    assert [d.rollouts for d in group.trail] == list(range(4, len(group.rollouts) + 1))
    assert len(world.prior.requests) == 1


async def test_rewards_prior_and_decisions_are_on_the_scale_of_the_entry(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.75
    scale = allocator_pb2.RewardScale(low=-1, high=1)
    entry = prompt()
    entry.scale.CopyFrom(scale)
    group = await allocate(stub, entry)
    assert [r.reward for r in group.rollouts] == [-1, 1, -1, 1]
    assert group.trail[0].prior == 0.5
    assert group.prior.value == 0.75
    assert group.trail[0].cost == 1 / 256


async def test_a_fixed_budget_without_prior_never_asks_for_one(world: Doubles, stub: Any) -> None:
    entry = prompt(kind=common_pb2.PROMPT_KIND_EVAL, budget=fixed(3))
    entry.want_prior = False
    group = await allocate(stub, entry)
    assert (group.state, len(group.rollouts), len(world.prior.requests)) == (COMPLETE, 3, 0)
    assert not group.HasField("prior")
    assert not group.trail[0].HasField("prior")


async def test_what_was_sampled_arrives_to_the_bit(world: Doubles, stub: Any) -> None:
    group = await allocate(stub, prompt())
    rollout = group.rollouts[2]
    assert rollout.token_ids == (2).to_bytes(4, "little") + (7).to_bytes(4, "little")
    assert len(rollout.logprobs) == 8
    assert [(s.policy_version, s.token_count) for s in rollout.version_spans] == [(3, 2)]


async def test_rollouts_without_a_verdict_are_replaced_and_stay_out_of_the_baseline(world: Doubles, stub: Any) -> None:
    world.generation.says = lambda index: "?" if index in (1, 2, 4) else "right"
    world.prior.value = 0.99
    group = await allocate(stub, prompt())
    assert group.state == COMPLETE
    assert [r.index for r in group.unjudged] == [1, 2, 4]
    assert [r.index for r in group.rollouts] == [0, 3, 5, 6]
    assert group.trail[-1].rollouts == 4
    assert group.trail[-1].rewards == [1, 1, 1, 1]


async def test_replacements_are_capped_and_the_group_says_why(world: Doubles, stub: Any) -> None:
    world.generation.says = lambda index: "?"
    group = await allocate(stub, prompt())
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_NO_VERDICT)
    assert "32 of 32" in group.cause_detail
    assert sum(r.count for r in world.generation.requests) == 2 * 16
    assert len(group.unjudged) == 32


@pytest.mark.parametrize(
    "fault",
    [
        Unavailable("restarting"),
        ResourceExhausted("queue is full"),
        FailedPrecondition("no weights yet", reason="NO_WEIGHTS"),
        FailedPrecondition("version 2", reason="VERSION_TOO_OLD"),
        FailedPrecondition("another job's", reason="POLICY_MISMATCH"),
    ],
)
async def test_what_may_pass_is_tried_again_with_the_same_indexes(world: Doubles, stub: Any, fault: Any) -> None:
    world.generation.faults.extend([fault, fault])
    group = await allocate(stub, prompt())
    assert group.state == COMPLETE
    assert [(r.first_index, r.count) for r in world.generation.requests] == [(0, 4)] * 3
    assert [r.index for r in group.rollouts] == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", [InvalidArgument("prompt is longer than the context"), Internal("broken")])
async def test_what_will_not_pass_filters_the_group_at_once(world: Doubles, stub: Any, fault: Any) -> None:
    world.generation.faults.append(fault)
    began = time.monotonic()
    group = await allocate(stub, prompt())
    assert time.monotonic() - began < 5
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_FAULT)
    assert "generation" in group.cause_detail
    assert fault.message in group.cause_detail


async def test_generation_that_restarts_in_mid_group_is_waited_for(world: Doubles, stub: Any) -> None:
    world.generation.stuck = lambda request: True
    task = asyncio.create_task(allocate(stub, prompt()))
    await until(lambda: world.generation.requests)
    await world.stop("generation")
    world.generation.stuck = lambda request: False
    await world.serve("generation")
    group = await task
    assert (group.state, group.cause_detail) == (COMPLETE, "")
    assert [r.index for r in group.rollouts] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["stuck", "away"])
async def test_a_prior_that_does_not_answer_is_a_fault_that_names_it(world: Doubles, stub: Any, how: str) -> None:
    if how == "stuck":
        world.prior.stuck = True
    else:
        await world.stop("value_prior")
    began = time.monotonic()
    group = await allocate(stub, prompt(deadline_seconds=2))
    assert time.monotonic() - began < 3
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_FAULT)
    assert "value prior" in group.cause_detail
    assert not world.generation.requests


async def test_a_stuck_rollout_closes_its_group_at_the_deadline(world: Doubles, stub: Any) -> None:
    world.generation.stuck = lambda request: True
    began = time.monotonic()
    group = await allocate(stub, prompt(deadline_seconds=1))
    assert 0.9 < time.monotonic() - began < 2.5
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_DEADLINE)
    assert "generation" in group.cause_detail
    # The abandoned call is cancelled, not left to the engine.
    await until(lambda: not world.generation.running)


async def test_a_stuck_later_round_keeps_the_rollouts_that_are_there(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95
    world.generation.says = lambda index: "wrong"
    world.generation.stuck = lambda request: request.first_index >= 6
    group = await allocate(stub, prompt(deadline_seconds=1.5))
    assert (group.state, len(group.rollouts)) == (COMPLETE, 6)
    assert (group.trail[-1].kind, group.trail[-1].more) == (allocator_pb2.DECISION_KIND_DEADLINE, 0)
    assert all(step.reproduced for step in replay_group(group))


async def test_rollouts_cut_at_the_time_limit_are_judged_and_kept(world: Doubles, stub: Any) -> None:
    world.prior.value = 0.95
    world.generation.says = lambda index: "wrong"
    world.generation.slow = lambda request: True
    group = await allocate(stub, prompt(deadline_seconds=1.5))
    assert (group.state, len(group.rollouts)) == (COMPLETE, 4)
    assert {r.finish_reason for r in group.rollouts} == {common_pb2.FINISH_REASON_DEADLINE}
    assert group.trail[-1].kind == allocator_pb2.DECISION_KIND_DEADLINE


async def test_a_stuck_verifier_closes_the_group_at_the_deadline(world: Doubles, stub: Any) -> None:
    world.verifier.stuck = True
    group = await allocate(stub, prompt(deadline_seconds=1))
    assert (group.state, group.cause) == (FILTERED, allocator_pb2.FILTER_CAUSE_DEADLINE)
    assert "verifier" in group.cause_detail


async def test_the_deadline_of_the_call_bounds_the_group(world: Doubles, stub: Any) -> None:
    world.generation.stuck = lambda request: True
    group = await allocate(stub, prompt(deadline_seconds=600), seconds=1.5)
    assert group.cause == allocator_pb2.FILTER_CAUSE_DEADLINE


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("key.job_id", lambda e: e.key.ClearField("job_id")),
        ("prompt_token_ids", lambda e: e.ClearField("prompt_token_ids")),
        ("kind", lambda e: e.ClearField("kind")),
        ("budget", lambda e: e.ClearField("budget")),
        ("scale", lambda e: e.ClearField("scale")),
        ("k_max", lambda e: setattr(e.budget.osla, "k_max", 3)),
        ("price", lambda e: setattr(e.budget.osla, "price", 0)),
        ("deadline_seconds", lambda e: setattr(e, "deadline_seconds", math.nan)),
        ("want_prior", lambda e: setattr(e, "want_prior", False)),
        ("max_tokens", lambda e: e.sampling.ClearField("max_tokens")),
    ],
)
async def test_a_malformed_entry_is_refused_naming_the_field(stub: Any, field: str, spoil: Any) -> None:
    entry = prompt()
    spoil(entry)
    with pytest.raises(InvalidArgument, match=field):
        await allocate(stub, entry)


def question(**changes: Any) -> allocator_pb2.DecideRequest:
    known = {
        "budget": prompt().budget,
        "scale": allocator_pb2.RewardScale(low=0, high=1),
        "prior": 0.95,
        "rewards": [0.0] * 4,
    }
    return allocator_pb2.DecideRequest(**{k: v for k, v in (known | changes).items() if v is not None})


async def test_decide_answers_like_the_loop_and_keeps_no_state(stub: Any) -> None:
    for _ in range(2):
        go_on = await stub.Decide(question(), timeout=5)
        assert (go_on.stop, go_on.more, go_on.decision.kind) == (False, 1, allocator_pb2.DECISION_KIND_CONTINUE)
        stop = await stub.Decide(question(prior=0.0), timeout=5)
        assert (stop.stop, stop.more, stop.baseline) == (True, 0, 0.0)
    first = await stub.Decide(question(rewards=[]), timeout=5)
    assert (first.stop, first.more) == (False, 4)
    done = await stub.Decide(question(budget=fixed(4), prior=None), timeout=5)
    assert (done.stop, done.decision.kind) == (True, allocator_pb2.DECISION_KIND_LIMIT)
    assert not done.decision.HasField("prior")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prior is missing", {"prior": None}),
        ("prior is nan", {"prior": math.nan}),
        (r"rewards\[1\] is nan", {"rewards": [0.0, math.nan]}),
        (r"rewards\[0\] is 2.0, outside the reward scale", {"rewards": [2.0]}),
        ("prior is -1.0, outside the reward scale", {"prior": -1.0}),
        ("k_max", {"budget": {"osla": {"k_min": 5, "k_max": 4, "price": 0.1}}}),
        ("price", {"budget": {"osla": {"k_min": 4, "k_max": 16, "price": -1}}}),
        ("budget", {"budget": None}),
        ("scale", {"scale": None}),
    ],
)
async def test_decide_refuses_bad_input_naming_the_field(stub: Any, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=field):
        await stub.Decide(question(**changes), timeout=5)
