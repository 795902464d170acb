"""What docs/guide.md shows is accepted by the code."""

import json
import re
from pathlib import Path

from trainer.config import JobSpec

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_job_in_the_guide_is_a_valid_specification():
    (job,) = blocks("json")
    spec = JobSpec.model_validate(json.loads(job))
    assert spec.steps == 50
    assert spec.prompts_per_step == 16


def test_the_imports_of_the_stopping_rule_example_exist():
    snippet = next(block for block in blocks("python") if "BudgetRule" in block)
    names: dict[str, object] = {}
    exec(compile(snippet, "guide.md", "exec"), names)
    assert callable(names["more_rollouts"])
