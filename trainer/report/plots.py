"""The report's plots as inline SVG, from its numbers alone.

Ink is `currentColor` and the ground is clear, so that a plot follows the page into dark mode; text stays text.
Every plot carries a title and a description in words for those who cannot see it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Line = dict[str, Any]
# Stand-ins that are replaced after drawing.
_INK = "#010203"
_BLUE, _ORANGE, _GREEN = "#3b82f6", "#e0722b", "#16a34a"
_SIZE = (6.0, 3.4)


@dataclass(frozen=True)
class Plot:
    """One figure: `svg` is a complete element, `caption` what it shows, `words` the same without seeing it."""

    name: str
    title: str
    caption: str
    words: str
    svg: str


def all_plots(report: Line) -> list[Plot]:
    """Every plot, in reading order. Where nothing was recorded the plot says so."""
    from matplotlib import rc_context

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "rollwise",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.2,
        "legend.frameon": False,
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
        ),
    }
    with rc_context(style):
        return [draw(report) for draw in (_accuracy, _rollouts, _histogram, _calibration, _gradient, _entropy, _reward)]


def _accuracy(report: Line) -> Plot:
    points = report["accuracy"]
    steps = [point["step"] for point in points]
    values = [point["accuracy"] for point in points]
    words = "; ".join(f"after {p['step']} steps ({p['rollouts']} rollouts) {p['accuracy']:.1%}" for p in points)

    def draw(axes: Any) -> None:
        axes.plot(steps, values, marker="o", color=_BLUE)
        axes.set(xlabel="steps (rollouts below)", ylabel="accuracy, held out", ylim=(0, 1))
        axes.set_xticks(steps, [f"{p['step']}\n{p['rollouts']}" for p in points])

    return _plot(
        "accuracy", "Held-out accuracy", "Greedy answers to prompts never trained on.", words, draw, empty=not points
    )


def _rollouts(report: Line) -> Plot:
    series, fixed = report["series"], report["rollouts_per_prompt"]["fixed"]
    steps, values = _known(series["step"], series["rollouts_per_prompt"])
    mean = report["rollouts_per_prompt"]["mean"]
    words = f"mean {mean:.1f} rollouts a prompt against {fixed} fixed; {_ends(values)}" if values else ""

    def draw(axes: Any) -> None:
        axes.plot(steps, values, marker=".", color=_BLUE, label="bought")
        axes.axhline(fixed, color=_ORANGE, linestyle="--", label=f"{fixed} fixed")
        axes.set(xlabel="step", ylabel="rollouts a prompt, mean", ylim=(0, fixed * 1.1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="lower right")

    return _plot("rollouts", "Rollouts per prompt", "Mean over each step's prompts.", words, draw, empty=not values)


def _histogram(report: Line) -> Plot:
    histogram = {int(size): groups for size, groups in report["rollouts_per_prompt"]["histogram"].items()}
    fixed = report["rollouts_per_prompt"]["fixed"]
    words = "; ".join(f"{groups} prompts got {size}" for size, groups in histogram.items())

    def draw(axes: Any) -> None:
        axes.bar(list(histogram), list(histogram.values()), color=_BLUE, label="prompts")
        axes.axvline(fixed, color=_ORANGE, linestyle="--", label=f"{fixed} fixed")
        axes.set(xlabel="rollouts bought for a prompt", ylabel="prompts", xlim=(0, max([fixed, *histogram]) + 1))
        axes.legend(loc="upper center")

    caption = "Few where the prior held, more where it looked wrong."
    return _plot("histogram", "How the rollouts were spread", caption, words, draw, empty=not histogram)


def _calibration(report: Line) -> Plot:
    table = report["calibration"]
    bins, prior, mean = table["bins"], table["brier_prior"], table["brier_running_mean"]
    words = "; ".join(
        f"predicted {b['predicted']:.2f}, observed {b['observed']:.2f} ({b['groups']} prompts)" for b in bins
    )
    if bins:
        words = f"Brier score {prior:.3f} for the prior, {mean:.3f} for a running mean. {words}"

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=_INK, alpha=0.4, linestyle=":", label="perfect")
        sizes = [20 + 180 * b["groups"] / table["groups"] for b in bins]
        axes.plot([b["predicted"] for b in bins], [b["observed"] for b in bins], color=_BLUE, alpha=0.5)
        axes.scatter([b["predicted"] for b in bins], [b["observed"] for b in bins], s=sizes, color=_BLUE, label="prior")
        axes.set(xlabel="predicted P(success)", ylabel="observed success rate", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"Brier: prior {prior:.3f}, running mean {mean:.3f}", fontsize=10)
        axes.legend(loc="upper left")

    caption = "On each prompt's first rollouts only, before any decision; larger dots hold more prompts."
    return _plot("calibration", "Prior calibration", caption, words, draw, empty=not bins)


def _gradient(report: Line) -> Plot:
    return _line(
        report,
        "gradient_norm",
        title="Gradient norm",
        caption="Before clipping.",
        label="gradient norm",
        colour=_ORANGE,
    )


def _entropy(report: Line) -> Plot:
    return _line(
        report,
        "entropy",
        title="Entropy",
        caption="Mean over the trained tokens, in nats.",
        label="entropy, nats a token",
        colour=_GREEN,
    )


def _reward(report: Line) -> Plot:
    caption = "Mean success rate of the sampled training rollouts; not comparable with held-out accuracy."
    return _line(
        report,
        "reward",
        title="Training reward",
        caption=caption,
        label="success rate, sampled",
        colour=_BLUE,
        limits=(0.0, 1.0),
    )


def _line(
    report: Line,
    name: str,
    *,
    title: str,
    caption: str,
    label: str,
    colour: str,
    limits: tuple[float, float] | None = None,
) -> Plot:
    steps, values = _known(report["series"]["step"], report["series"][name])

    def draw(axes: Any) -> None:
        axes.plot(steps, values, marker=".", color=colour)
        axes.set(xlabel="step", ylabel=label)
        axes.set_ylim(limits if limits else (0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)

    return _plot(name.replace("_", "-"), title, caption, _ends(values), draw, empty=not values)


def _plot(name: str, title: str, caption: str, words: str, draw: Callable[[Any], None], *, empty: bool = False) -> Plot:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    if empty:
        words = "Nothing was recorded."
        axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
    else:
        draw(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Plot(name, title, caption, words, _inline(buffer.getvalue(), name, title, words))


def _inline(svg: str, name: str, title: str, words: str) -> str:
    """The bare element: ids made unique on the page, ink that follows the page, title and description inside."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace(_INK, "currentColor")
    # The size is the page's business; the view box keeps the shape.
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    label = f' role="img" aria-labelledby="{name}-title {name}-words"'
    names = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-words">{escape(words)}</desc>'
    return f"{head}{label}>{names}{rest}"


def _known(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _ends(values: Sequence[float]) -> str:
    if not values:
        return ""
    span = f"lowest {min(values):.3g}, highest {max(values):.3g}"
    return f"{len(values)} steps, from {values[0]:.3g} to {values[-1]:.3g}; {span}"
