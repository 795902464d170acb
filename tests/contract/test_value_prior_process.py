"""The value prior as a process of its own: killed, restarted, misconfigured."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rollwise.v1 import value_prior_pb2, value_prior_pb2_grpc

from services.common.errors import RollwiseError
from services.common.grpc_client import connect


def start(tmp_path, redis_url, *flags):
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    ports = ["--port", "0", "--http-port", "0", "--metrics-port", "0"]
    command = [sys.executable, "-m", "services.value_prior", *ports, "--redis-url", redis_url]
    command += ["--ready-file", str(ready), "--blob-dir", str(tmp_path / "blobs"), "--grace-seconds", "2", *flags]
    with (tmp_path / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}), ready


async def wait_ready(process, ready, tmp_path, seconds=60):
    deadline = time.monotonic() + seconds
    while not ready.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        await asyncio.sleep(0.05)
    return json.loads(ready.read_text())


def outcome(number):
    return value_prior_pb2.Outcome(
        outcome_id=f"o{number}", policy_id="job", text=f"{number} + 1 =", successes=1.0, trials=4, policy_version=number
    )


@pytest.mark.slow
async def test_kill_9_during_observe_loses_nothing_acknowledged(redis_url, tmp_path):
    process, ready = start(tmp_path, redis_url)
    acknowledged = set()
    try:
        ports = await wait_ready(process, ready, tmp_path)
        async with connect(f"127.0.0.1:{ports['port']}") as channel:
            stub = value_prior_pb2_grpc.ValuePriorServiceStub(channel)

            async def observe(numbers):
                for number in numbers:
                    request = value_prior_pb2.ObserveRequest(outcomes=[outcome(number)])
                    try:
                        answer = await stub.Observe(request, timeout=5)
                    except RollwiseError:
                        return  # the process is gone
                    assert answer.accepted == 1
                    acknowledged.add(number)
                    if len(acknowledged) == 300:
                        process.kill()

            await asyncio.gather(*(observe(range(lane, 4000, 8)) for lane in range(8)))
        process.wait(10)
        assert 300 <= len(acknowledged) < 4000
        process, ready = start(tmp_path, redis_url)
        ports = await wait_ready(process, ready, tmp_path)
        async with connect(f"127.0.0.1:{ports['port']}") as channel:
            stub = value_prior_pb2_grpc.ValuePriorServiceStub(channel)
            again = value_prior_pb2.ObserveRequest(outcomes=[outcome(number) for number in sorted(acknowledged)])
            answer = await stub.Observe(again, timeout=20)
            assert (answer.accepted, answer.duplicates) == (0, len(acknowledged))
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_wrong_settings_end_the_process_with_code_2_and_a_hint(redis_url, tmp_path):
    first, ready = start(tmp_path, redis_url)
    try:
        ports = await wait_ready(first, ready, tmp_path)
        taken = str(ports["http_port"])
        for flags, hint in (
            (["--http-port", taken], "--http-port"),
            (["--embedder", str(tmp_path / "nothing")], "holds no config.json"),
        ):
            folder = tmp_path / hint.replace(" ", "").strip("-")
            folder.mkdir()
            process, _ = start(folder, redis_url, *flags)
            try:
                assert process.wait(60) == 2
            finally:
                process.kill()
                process.wait()
            assert hint in (folder / "log").read_text()
    finally:
        first.kill()
        first.wait()
