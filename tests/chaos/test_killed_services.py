"""A real stack, a real job, and SIGKILL: the job ends, and every prompt that was submitted has one final state."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS = 14, 8
TASK = {"task": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
SPEC = {
    "policy": "tiny",
    "data": {"reasoning_gym": [{**TASK, "size": 400, "seed": 1}]},
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 3e-4},
    "sampling": {"max_tokens": 12},
    "group_deadline_seconds": 90,
}


class Stack:
    """`rollwise up` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "xdg")}
        command = [sys.executable, "-m", "services.cli.main", "up", "--any-ports", "--json", "--state-dir", "run"]
        with (folder / "up.err").open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (folder / "up.err").read_text()
        self.ends = json.loads(line)
        self.run = folder / "run"
        self.http = httpx.Client(base_url=self.ends["api_url"], timeout=120)

    def pid(self, name: str) -> int | None:
        return json.loads((self.run / "endpoints.json").read_text())["pids"].get(name)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until the launcher has started another."""
        old = self.pid(name)
        assert old is not None
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: self.pid(name) not in (None, old), 90, f"{name} to be restarted")

    def submit(self, **changes: object) -> str:
        answer = self.http.post("/v1/jobs", json={**SPEC, **changes})
        assert answer.status_code in (200, 201, 202), answer.text
        return answer.json()["id"]

    def job(self, job: str) -> dict:
        return self.http.get(f"/v1/jobs/{job}").raise_for_status().json()

    def wait_for_step(self, job: str, step: int) -> None:
        wait_for(lambda: self.job(job)["progress"]["step"] >= step, 120, f"step {step}")

    def wait_for_end(self, job: str) -> dict:
        def over() -> bool:
            return self.job(job)["state"] in ("succeeded", "failed", "cancelled")

        wait_for(over, 300, "the job to end")
        return self.job(job)

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(90)


def wait_for(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)


def assert_complete(job: dict) -> None:
    progress = job["progress"]
    assert job["state"] == "succeeded", job
    assert progress["step"] == STEPS
    assert progress["in_flight"] == 0
    assert progress["submitted"] == progress["trained"] + progress["filtered"] + progress["dropped"]
    assert progress["submitted"] == STEPS * PROMPTS
    assert progress["dropped"] == 0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("chaos"))
    yield running
    running.stop()


def test_while_a_job_runs_everything_answers_and_the_death_of_each_service_is_survived(stack: Stack) -> None:
    job = stack.submit()
    stack.wait_for_step(job, 1)

    question = {"policy_id": job, "prompts": [{"text": "Calculate 1 + 2."}]}
    answer = httpx.post(stack.ends["value_prior_url"] + "/v1/score", json=question, timeout=10)
    assert 0 < answer.raise_for_status().json()["priors"][0]["value"] < 1

    for name, url in stack.ends["metrics"].items():
        page = httpx.get(url, timeout=10).raise_for_status().text
        assert list(text_string_to_metric_families(page)), name
        if shutil.which("promtool"):
            command = ["promtool", "check", "metrics"]
            checked = subprocess.run(command, input=page, text=True, capture_output=True, check=False)
            assert checked.returncode in (0, 3), f"{name}: {checked.stderr}"  # 3: style hints only
            assert "error" not in checked.stderr.lower(), f"{name}: {checked.stderr}"

    for name, service in (
        ("generation", "GenerationService"),
        ("value_prior", "ValuePriorService"),
        ("verifier", "VerifierService"),
        ("allocator", "AllocatorService"),
    ):
        with grpc.insecure_channel(stack.ends["targets"][name]) as channel:
            assert f"rollwise.v1.{service}" in ProtoReflectionDescriptorDatabase(channel).get_services()

    for name in ("allocator", "verifier", "generation", "value_prior"):
        stack.kill(name)
        now = stack.job(job)["progress"]["step"]
        if now < STEPS:
            stack.wait_for_step(job, now + 1)
    assert_complete(stack.wait_for_end(job))


def test_a_killed_trainer_goes_on_from_its_checkpoint_under_a_new_lineage(stack: Stack) -> None:
    undisturbed = stack.submit(seed=3)
    assert_complete(stack.wait_for_end(undisturbed))

    job = stack.submit(seed=3)
    stack.wait_for_step(job, 5)
    lineage = stack.job(job)["progress"]["lineage"]
    os.kill(stack.pid("worker"), signal.SIGKILL)
    resumed = stack.http.post(f"/v1/jobs/{job}/resume")
    assert resumed.status_code in (200, 202), resumed.text
    ended = stack.wait_for_end(job)
    assert_complete(ended)
    assert ended["progress"]["lineage"] > lineage
    ours, theirs = final_prompts(stack, job), final_prompts(stack, undisturbed)
    assert ours == theirs
    assert sum(ours.values()) == STEPS * PROMPTS


def final_prompts(stack: Stack, job: str) -> Counter[str]:
    """Prompt ids of the groups that count: a step trained again under a newer lineage replaces the old one."""
    trail = (stack.run / "jobs" / job / "trail.jsonl").read_text().splitlines()
    by_step: dict[int, dict[int, list[str]]] = {}
    for line in map(json.loads, trail):
        by_step.setdefault(line["key"]["step"], {}).setdefault(line["key"]["lineage"], []).append(
            line["key"]["prompt_id"]
        )
    return Counter(prompt for lineages in by_step.values() for prompt in lineages[max(lineages)])
