"""Draws dataflow.svg, the picture of the data flow in the README: `python docs/img/draw_dataflow.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

INK, RPC, STREAM = "#1f2937", "#2563eb", "#b45309"
BOXES = {
    "api": (0.6, 4.3, "trainer API", "HTTP: jobs, events"),
    "worker": (0.6, 1.9, "trainer", "advantages, loss, weights"),
    "allocator": (5.2, 1.9, "allocator", "OSLA: stop, or buy more?"),
    "prior": (9.8, 4.3, "value prior", "P(success) before any rollout"),
    "generation": (9.8, 1.9, "generation", "rollouts and log-probs"),
    "verifier": (9.8, -0.5, "verifier", "correct, wrong, no verdict"),
}
WIDTH, HEIGHT = 2.9, 1.1


def arrow(
    axes: plt.Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    colour: str,
    at: tuple[float, float],
    curve: float = 0.0,
) -> None:
    """One arrow with its label at `at`."""
    style = {
        "arrowstyle": "-|>",
        "color": colour,
        "lw": 1.6,
        "connectionstyle": f"arc3,rad={curve}",
        "shrinkA": 2,
        "shrinkB": 2,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
    axes.text(*at, label, color=colour, fontsize=9, ha="center", va="center", backgroundcolor="white")


def main() -> None:
    """Writes dataflow.svg beside this file."""
    plt.rcParams["svg.hashsalt"] = "rollwise"
    figure, axes = plt.subplots(figsize=(10.5, 5.4))
    for x, y, title, subtitle in BOXES.values():
        axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.06", fc="#f8fafc", ec=INK, lw=1.4))
        axes.text(x + WIDTH / 2, y + 0.7, title, ha="center", va="center", fontsize=12, color=INK, weight="bold")
        axes.text(x + WIDTH / 2, y + 0.28, subtitle, ha="center", va="center", fontsize=8.5, color=INK)
    arrow(axes, (2.05, 4.22), (2.05, 3.08), "jobs", STREAM, (2.05, 3.65))
    arrow(axes, (3.6, 2.7), (5.1, 2.7), "prompts", STREAM, (4.35, 2.95))
    arrow(axes, (5.1, 2.15), (3.6, 2.15), "groups", STREAM, (4.35, 1.9))
    arrow(axes, (7.6, 3.08), (9.75, 4.7), "Score", RPC, (8.4, 3.95))
    arrow(axes, (8.2, 2.45), (9.7, 2.45), "Generate", RPC, (8.95, 2.72))
    arrow(axes, (7.6, 1.82), (9.75, 0.2), "Verify", RPC, (8.45, 0.85))
    arrow(axes, (6.2, 3.08), (9.72, 5.1), "outcomes", STREAM, (7.3, 4.5), -0.2)
    arrow(axes, (2.05, 1.82), (10.6, 1.82), "UpdateWeights", RPC, (5.6, -0.25), 0.38)
    axes.text(0.6, -1.05, "orange: Redis Streams      blue: gRPC", fontsize=9, color=INK)
    axes.set_xlim(0.3, 13.1)
    axes.set_ylim(-1.4, 5.7)
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("dataflow.svg"), bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
