import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rollwise.v1 import verifier_pb2 as pb
from rollwise.v1 import verifier_pb2_grpc as rpc

from services.common.errors import Unavailable
from services.common.grpc_client import connect, connect_as
from services.common.grpc_server import GrpcServer
from services.common.settings import ServiceSettings


def asking(text: str) -> pb.VerifyRequest:
    return pb.VerifyRequest(items=[pb.VerifyItem(item_id=text)])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


PROGRAM = """
import asyncio, sys
from rollwise.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from services.common import lifecycle
from services.common.grpc_server import GrpcServer
from services.common.settings import ServiceSettings, load_settings

class Servicer(rpc.VerifierServiceServicer):
    async def Verify(self, request, context):
        await asyncio.sleep(float(request.items[0].item_id))
        return pb.VerifyResponse()
    async def CheckReferences(self, request, context):
        return pb.CheckReferencesResponse()

async def main():
    server = GrpcServer(settings, name="probe", service_names=["rollwise.v1.VerifierService"],
        register=lambda server: rpc.add_VerifierServiceServicer_to_server(Servicer(), server))
    await server.start()
    await server.run_until_signal()

settings = load_settings(ServiceSettings)
lifecycle.run(main, service="probe", settings=settings)
"""


@asynccontextmanager
async def process(tmp_path: Path, *argv: str) -> AsyncIterator[tuple["subprocess.Popen[str]", dict[str, int]]]:
    program, ready = tmp_path / "program.py", tmp_path / "ready.json"
    program.write_text(textwrap.dedent(PROGRAM))
    started = subprocess.Popen(
        [sys.executable, str(program), "--ready-file", str(ready), *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in ["", *sys.path] if entry)},
    )
    try:
        for _ in range(600):
            if ready.exists() or started.poll() is not None:
                break
            await asyncio.sleep(0.05)
        yield started, json.loads(ready.read_text()) if ready.exists() else {}
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


async def test_sigterm_drains_calls_in_progress_and_refuses_new_ones(tmp_path: Path) -> None:
    async with process(tmp_path, "--metrics-port", "0", "--grace-seconds", "10") as (running, ports):
        assert ports["pid"] == running.pid
        assert "rollwise_healthy" in await asyncio.to_thread(scrape, ports["metrics_port"])
        async with connect(f"127.0.0.1:{ports['port']}") as channel:
            stub: Any = rpc.VerifierServiceStub(channel)
            in_progress = asyncio.ensure_future(stub.Verify(asking("1.5"), timeout=10))
            await asyncio.sleep(0.4)
            running.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.4)
            with pytest.raises(Unavailable):
                await stub.Verify(asking("0"), timeout=5)
            assert running.poll() is None
            await in_progress
        assert await asyncio.to_thread(running.wait, 10) == 0
        assert not (tmp_path / "ready.json").exists()


async def test_grace_ends_and_a_port_in_use_exits_with_2(tmp_path: Path) -> None:
    async with process(tmp_path, "--grace-seconds", "0.3") as (running, ports):
        async with process(tmp_path / "..", "--port", str(ports["port"])) as (second, _):
            assert await asyncio.to_thread(second.wait, 20) == 2
            assert second.stderr is not None
            assert f"cannot listen on 127.0.0.1:{ports['port']}" in second.stderr.read()
        async with connect(f"127.0.0.1:{ports['port']}") as channel:
            stub: Any = rpc.VerifierServiceStub(channel)
            stuck = asyncio.ensure_future(stub.Verify(asking("60"), timeout=60))
            await asyncio.sleep(0.4)
            running.send_signal(signal.SIGTERM)
            with pytest.raises(Unavailable):
                await stuck
        assert await asyncio.to_thread(running.wait, 10) == 0


def certificate(folder: Path, name: str, ca: Path | None) -> Path:
    """A key and a certificate at <folder>/<name>.key and .pem, signed by `ca` or by itself."""
    key, pem = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key)]
    command += ["-out", str(pem), "-subj", f"/CN={name}"]
    if ca is not None:
        command += ["-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-addext", "basicConstraints=CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return pem


class Fine(rpc.VerifierServiceServicer):
    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        return pb.VerifyResponse()

    async def CheckReferences(self, request: pb.CheckReferencesRequest, context: Any) -> pb.CheckReferencesResponse:
        return pb.CheckReferencesResponse()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program to make certificates")
async def test_with_roots_both_sides_must_show_a_certificate(tmp_path: Path) -> None:
    ca = certificate(tmp_path, "ca", None)
    ours, foreign_ca = certificate(tmp_path, "ours", ca), certificate(tmp_path, "foreign", None)
    settings = ServiceSettings(tls_cert=ours, tls_key=ours.with_suffix(".key"), tls_ca=ca)
    server = GrpcServer(
        settings,
        name="probe",
        register=lambda server: rpc.add_VerifierServiceServicer_to_server(Fine(), server),
        service_names=[],
    )
    target = f"127.0.0.1:{await server.start()}"
    try:
        async with connect_as(settings, target) as channel:
            stub: Any = rpc.VerifierServiceStub(channel)
            await stub.Verify(pb.VerifyRequest(), timeout=5)
        for channel in (connect(target), connect(target, tls_ca=ca), connect(target, tls_ca=foreign_ca)):
            async with channel:
                stub = rpc.VerifierServiceStub(channel)
                with pytest.raises(Unavailable):
                    await stub.Verify(pb.VerifyRequest(), timeout=5)
    finally:
        await server.stop(0)


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="belong together"):
        ServiceSettings(tls_cert=tmp_path / "x.pem")
