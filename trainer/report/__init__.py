"""What a run showed, for people and programs: `report.json` and a self-contained `report.html`.

    report = build_report(job=..., metrics=..., trail=...)
    write_report(report, Path("demo-out"))

The numbers (summary.py) know no plotting; the plots (plots.py) know only the numbers; the page (page.py) joins both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.report.summary import build_report

__all__ = ["build_report", "write_report"]


def write_report(report: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes report.json and report.html into `folder` (made when missing) and returns both paths."""
    from trainer.report.page import render

    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "report.json", folder / "report.html"
    data.write_text(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text(render(report), encoding="utf-8")
    return data, page
