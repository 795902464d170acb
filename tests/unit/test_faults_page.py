"""Every test that docs/faults.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_on_the_page_exists():
    named = re.findall(r"`(tests/[^`:]+)::(\w+)`", (ROOT / "docs/faults.md").read_text())
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
