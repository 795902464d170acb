"""Small real servers for the allocator's tests: they keep the contract over sockets and judge by rules one can read.

A completion is right when its text is "right"; what a rollout says is a function of its index. An answer that was
canned and never asked for fails the test (`Doubles.close`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from rollwise.v1 import (
    allocator_pb2,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    value_prior_pb2,
    value_prior_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

from services.common.errors import RollwiseError
from services.common.grpc_client import connect
from services.common.grpc_server import GrpcServer
from services.common.packing import pack_floats, pack_ids
from services.common.settings import ServiceSettings

SCORES = {"right": 1.0, "wrong": 0.0, "half": 0.5}


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Says `says(index)`; raises the next canned fault first; can be held still, or be slow and keep the time limit."""

    def __init__(self) -> None:
        self.says: Callable[[int], str] = lambda index: "right" if index % 2 else "wrong"
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.faults: deque[RollwiseError] = deque()
        self.stuck: Callable[[generation_pb2.GenerateRequest], bool] = lambda request: False
        self.slow: Callable[[generation_pb2.GenerateRequest], bool] = lambda request: False
        self.running = 0
        self.most_running = 0
        self.seconds = 0.0

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> generation_pb2.GenerateResponse:
        self.requests.append(request)
        if self.faults:
            raise self.faults.popleft()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.stuck(request):
                await asyncio.Event().wait()
            late = self.slow(request)
            await asyncio.sleep(request.time_limit_seconds if late else self.seconds)
        finally:
            self.running -= 1
        finish = common_pb2.FINISH_REASON_DEADLINE if late else common_pb2.FINISH_REASON_STOP
        answer = generation_pb2.GenerateResponse(request_id=request.request_id, policy_version=3)
        for index in range(request.first_index, request.first_index + request.count):
            answer.samples.append(
                generation_pb2.Sample(
                    index=index,
                    token_ids=pack_ids([index, 7]),
                    logprobs=pack_floats([-0.5, -0.25]),
                    finish_reason=finish,
                    version_spans=[common_pb2.VersionSpan(policy_version=3, token_count=2)],
                    text=self.says(index),
                )
            )
        if request.want_prompt_feature:
            answer.prompt_feature.dimension = 1
        return answer


class Verifier(verifier_pb2_grpc.VerifierServiceServicer):
    """NO_VERDICT for any text it has no score of."""

    def __init__(self) -> None:
        self.judged: list[str] = []
        self.stuck = False

    async def Verify(self, request: verifier_pb2.VerifyRequest, context: Any) -> verifier_pb2.VerifyResponse:
        if self.stuck:
            await asyncio.Event().wait()
        answer = verifier_pb2.VerifyResponse()
        for item in request.items:
            self.judged.append(item.item_id)
            score = SCORES.get(item.completion)
            kind = common_pb2.VERDICT_KIND_NO_VERDICT
            if score is not None:
                kind = common_pb2.VERDICT_KIND_CORRECT if score == 1 else common_pb2.VERDICT_KIND_WRONG
            verdict = common_pb2.Verdict(kind=kind, score=score or 0.0, reason="equal" if score == 1 else "unequal")
            answer.verdicts.append(verifier_pb2.ItemVerdict(item_id=item.item_id, verdict=verdict))
        return answer


class Prior(value_prior_pb2_grpc.ValuePriorServiceServicer):
    """Answers `value` for every prompt."""

    def __init__(self) -> None:
        self.value = 0.5
        self.requests: list[value_prior_pb2.ScoreRequest] = []
        self.faults: deque[RollwiseError] = deque()
        self.stuck = False

    async def Score(self, request: value_prior_pb2.ScoreRequest, context: Any) -> value_prior_pb2.ScoreResponse:
        self.requests.append(request)
        if self.faults:
            raise self.faults.popleft()
        if self.stuck:
            await asyncio.Event().wait()
        priors = [
            value_prior_pb2.Prior(prompt_id=p.prompt_id, value=self.value, uncertainty=0.2) for p in request.prompts
        ]
        return value_prior_pb2.ScoreResponse(priors=priors)


@dataclass
class Doubles:
    generation: Generation = field(default_factory=Generation)
    verifier: Verifier = field(default_factory=Verifier)
    prior: Prior = field(default_factory=Prior)
    targets: dict[str, str] = field(default_factory=dict)
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    servers: dict[str, GrpcServer] = field(default_factory=dict)

    async def start(self) -> None:
        for name in ("value_prior", "generation", "verifier"):
            await self.serve(name)
            self.channels[name] = connect(self.targets[name])

    async def serve(self, name: str) -> None:
        """Starts one of the servers, on the port it had before."""
        servicer, add, service = {
            "value_prior": (self.prior, value_prior_pb2_grpc.add_ValuePriorServiceServicer_to_server, "ValuePrior"),
            "generation": (self.generation, generation_pb2_grpc.add_GenerationServiceServicer_to_server, "Generation"),
            "verifier": (self.verifier, verifier_pb2_grpc.add_VerifierServiceServicer_to_server, "Verifier"),
        }[name]
        port = int(self.targets[name].rsplit(":", 1)[1]) if name in self.targets else 0
        server = GrpcServer(
            ServiceSettings(port=port, grace_seconds=0),
            name=name,
            register=lambda s: add(servicer, s),
            service_names=[f"rollwise.v1.{service}Service"],
        )
        self.targets[name] = f"127.0.0.1:{await server.start()}"
        self.servers[name] = server

    async def stop(self, name: str) -> None:
        await self.servers.pop(name).stop(0)

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        for name in list(self.servers):
            await self.stop(name)
        assert not self.generation.faults, "a canned fault of generation was never asked for"
        assert not self.prior.faults, "a canned fault of the prior was never asked for"


@asynccontextmanager
async def doubles() -> AsyncIterator[Doubles]:
    world = Doubles()
    await world.start()
    try:
        yield world
    finally:
        await world.close()


def prompt(prompt_id: str = "p0", *, lineage: int = 1, **changes: Any) -> allocator_pb2.PromptEntry:
    """A prompt under the paper's rule on rewards 0..1, with a prior."""
    entry = allocator_pb2.PromptEntry(
        key=common_pb2.GroupKey(job_id="job", lineage=lineage, step=2, prompt_id=prompt_id),
        kind=common_pb2.PROMPT_KIND_TRAIN,
        policy_id="job",
        prompt_token_ids=pack_ids([1, 2, 3]),
        prompt_text="1+1=",
        reference=common_pb2.Reference(domain=common_pb2.DOMAIN_MATH, math=common_pb2.MathReference(answer="2")),
        sampling=common_pb2.SamplingParams(temperature=1, max_tokens=8, seed=11),
        budget=allocator_pb2.BudgetRule(osla=allocator_pb2.OslaBudget(k_min=4, k_max=16, price=1 / 256, round_size=1)),
        scale=allocator_pb2.RewardScale(low=0, high=1),
        policy_version=3,
        deadline_seconds=20,
        want_prior=True,
        trace_id="t",
    )
    entry.MergeFrom(allocator_pb2.PromptEntry(**changes))
    return entry


def fixed(n: int) -> allocator_pb2.BudgetRule:
    return allocator_pb2.BudgetRule(fixed=allocator_pb2.FixedBudget(rollouts=n))


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Waits for something that the test cannot be told of."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
