"""Accuracy gained and rollouts spent by `rollwise demo`, over seeds: the README's figures on training come from here.

    python benchmarks/demo_seeds.py                                  # smollm2, seeds 0 1 2: about 20 minutes on 2 cores
    python benchmarks/demo_seeds.py --policy tiny --seeds 0 1 2 3 4

Each seed is a run of its own, with every service. The held-out prompts are the same for all seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(policy: str, seed: int, out: Path) -> dict[str, Any]:
    """One demo; its progress goes to stderr. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "services.cli.main", "demo", "--policy", policy, "--seed", str(seed), "--json"]
    done = subprocess.run([*command, "--out", str(out)], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range over seeds."""
    gains = [row["accuracy_after"] - row["accuracy_before"] for row in rows]
    shares = [row["rollouts"] / row["rollouts_fixed"] for row in rows]
    return {
        "gain_median": statistics.median(gains),
        "gain_min": min(gains),
        "gain_max": max(gains),
        "rollouts_share_median": statistics.median(shares),
        "rollouts_share_max": max(shares),
        "seconds_max": max(row["seconds"] for row in rows),
    }


def main() -> None:
    """Prints one line a seed and the summary; with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="smollm2", choices=["smollm2", "tiny"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(options.policy, seed, Path(folder) / "out"))
        if not options.json:
            row = rows[-1]
            print(
                f"seed {seed}: accuracy {row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}, "
                f"{row['rollouts']} rollouts of {row['rollouts_fixed']} (16 a prompt), {row['seconds']:.0f} s",
                flush=True,
            )
    result = {"policy": options.policy, "rows": rows, "summary": summary(rows)}
    print(json.dumps(result) if options.json else json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
