"""Draws run.svg, the figure of a real run in the README: `python docs/img/draw_run.py demo-out/report.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    """Writes run.svg beside this file from the report of a demo."""
    report = json.loads(Path(sys.argv[1]).read_text())
    steps = report["series"]["step"]
    plt.rcParams["svg.hashsalt"] = "rollwise"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    left.plot([s + 1 for s in steps], report["series"]["reward"], color="#94a3b8", label="sampled, training prompts")
    evaluations = report["accuracy"]
    left.plot(
        [e["step"] for e in evaluations],
        [e["accuracy"] for e in evaluations],
        "o-",
        color="#2563eb",
        label="greedy, 200 held-out prompts",
    )
    left.set(xlabel="optimizer step", ylabel="accuracy", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    right.bar([s + 1 for s in steps], report["series"]["rollouts_per_prompt"], color="#b45309")
    right.axhline(16, color="#1f2937", linestyle="--", linewidth=1)
    right.text(steps[-1] + 1, 15.6, "16 a prompt, as GRPO and DAPO spend", ha="right", va="top", fontsize=8)
    right.set(xlabel="optimizer step", ylabel="rollouts a prompt", ylim=(0, 17))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("run.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
