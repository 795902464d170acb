"""What docs/guide.md shows works."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.common.lifecycle import Background
from services.value_prior.server import running
from services.value_prior.settings import ValuePriorSettings
from trainer.config import JobSpec

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_job_in_the_guide_is_a_valid_specification():
    (job,) = blocks("json")
    spec = JobSpec.model_validate(json.loads(job))
    assert spec.steps == 50
    assert spec.prompts_per_step == 16


async def test_the_examples_work_against_a_value_prior_and_an_allocator(redis_url: str, tmp_path: Path) -> None:
    rest, decide = blocks("python")
    ready = tmp_path / "allocator.json"
    command = [sys.executable, "-m", "services.allocator", "--consume", "false", "--port", "0", "--metrics-port", "0"]
    process = subprocess.Popen([*command, "--ready-file", str(ready)], cwd=tmp_path)
    settings = ValuePriorSettings(
        redis_url=redis_url, port=0, http_port=0, metrics_port=None, consume=False, blob_dir=str(tmp_path / "blobs")
    )
    try:
        async with Background() as background, running(settings, background) as prior:
            names: dict[str, Any] = {}
            code = compile(rest.replace(":8102", f":{prior.http_port}"), "guide.md", "exec")
            await asyncio.to_thread(exec, code, names)
            assert [0 < score["value"] < 1 for score in names["scores"]] == [True, True]
            names["prior"].close()
        async with asyncio.timeout(30):
            while not ready.exists():
                await asyncio.sleep(0.05)
        port = json.loads(ready.read_text())["port"]
        exec(compile(decide.replace(":7104", f":{port}"), "guide.md", "exec"), names)
        more, baseline = await names["more_rollouts"]([0.0] * 4, 0.95)
        assert more == 1
        assert 0 < baseline < 0.95
        assert await names["more_rollouts"]([1.0, 0.0, 1.0, 0.0], 0.5) == (0, 0.5)
    finally:
        process.terminate()
        process.wait(20)
