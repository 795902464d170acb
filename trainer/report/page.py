"""The report as one HTML file: no network, no scripts, readable in light and dark, in print and by screen readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.report.plots import all_plots

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(report: dict[str, Any]) -> str:
    """The page's text. Raises ModuleNotFoundError when matplotlib or jinja2 (extra `trainer`) is missing."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = _percent
    environment.filters["number"] = _number
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        plots=all_plots(report),
        spec=json.dumps(report["spec"], indent=2, ensure_ascii=False),
        share=report["rollouts"] / report["rollouts_fixed"] if report["rollouts_fixed"] else None,
    )


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}"
