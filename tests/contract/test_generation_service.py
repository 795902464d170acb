"""One generation process over real gRPC: the wire format, refusals, and a SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rollwise.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.grpc_client import connect
from services.common.packing import pack_ids, unpack_floats, unpack_ids


def save_tiny(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)
    return folder


class Process:
    """A generation server of its own."""

    def __init__(self, folder: Path) -> None:
        self.ready = folder / "ready.json"
        self.ready.unlink(missing_ok=True)
        arguments = ["--port", "0", "--metrics-port", "0", "--threads", "1", "--state-dir", str(folder / "state")]
        self.log = (folder / "log.txt").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.generation", *arguments, "--ready-file", str(self.ready)],
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def port(self) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.ready.exists():
                return int(json.loads(self.ready.read_text())["port"])
            assert self.process.poll() is None, Path(self.log.name).read_text()
            time.sleep(0.05)
        raise AssertionError("the server did not get ready: " + Path(self.log.name).read_text())

    def end(self, number: int) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.log.close()
        return code


def generate_request(**fields):
    sampling = common_pb2.SamplingParams(temperature=1.0, max_tokens=6, seed=1, stop_token_ids=[59])
    return generation_pb2.GenerateRequest(
        **{"prompt_token_ids": pack_ids([3, 4, 5]), "count": 2, "sampling": sampling, **fields}
    )


async def test_a_server_samples_refuses_survives_sigkill_and_stops_in_order(tmp_path):
    weights = save_tiny(tmp_path / "weights")
    server = Process(tmp_path)
    try:
        async with connect(f"127.0.0.1:{await asyncio.to_thread(server.port)}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(FailedPrecondition) as error:
                await stub.Generate(generate_request(), timeout=20)
            assert error.value.reason == "NO_WEIGHTS"
            update = generation_pb2.UpdateWeightsRequest(policy_version=7, path=str(weights), policy_id="job-1")
            assert (await stub.UpdateWeights(update, timeout=30)).policy_version == 7
            with pytest.raises(InvalidArgument, match="does not exist"):
                await stub.UpdateWeights(
                    generation_pb2.UpdateWeightsRequest(policy_version=8, path="/nowhere", policy_id="job-1"),
                    timeout=30,
                )
            with pytest.raises(InvalidArgument, match="vocabulary"):
                await stub.Generate(generate_request(prompt_token_ids=pack_ids([60])), timeout=20)
            before = await stub.Generate(
                generate_request(
                    request_id="r", first_index=4, policy_id="job-1", min_policy_version=7, want_prompt_feature=True
                ),
                timeout=20,
            )
            assert [sample.index for sample in before.samples] == [4, 5]
            for sample in before.samples:
                ids = unpack_ids(sample.token_ids)
                assert len(ids) == len(unpack_floats(sample.logprobs)) == sample.version_spans[0].token_count
                assert sample.version_spans[0].policy_version == 7
                assert sample.finish_reason in {
                    common_pb2.FINISH_REASON_LENGTH,
                    common_pb2.FINISH_REASON_STOP,
                }
            feature = before.prompt_feature
            assert (feature.dimension, len(feature.values), feature.policy_version) == (16, 64, 7)

            # A client that leaves frees its rollouts.
            long = common_pb2.SamplingParams(temperature=1.0, max_tokens=4000, stop_token_ids=[2**31])
            call = stub.Generate(generate_request(count=4, sampling=long), timeout=60)
            await _until_running(stub, 4)
            call.cancel()
            await _until_running(stub, 0)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL

        server = Process(tmp_path)
        async with connect(f"127.0.0.1:{await asyncio.to_thread(server.port)}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            status = await stub.GetEngineStatus(generation_pb2.GetEngineStatusRequest(), timeout=20)
            assert (status.policy_id, status.policy_version, status.vocabulary_size) == ("job-1", 7, 60)
            after = await stub.Generate(generate_request(first_index=4, policy_id="job-1"), timeout=20)
            assert [s.token_ids for s in after.samples] == [s.token_ids for s in before.samples]
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="rollwise.v1.GenerationService"), timeout=20
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert server.end(signal.SIGTERM) == 0
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


async def _until_running(stub, rows: int) -> None:
    for _ in range(400):
        status = await stub.GetEngineStatus(generation_pb2.GetEngineStatusRequest(), timeout=20)
        if status.running_rollouts == rows:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never had {rows} rollouts running: {status}")
