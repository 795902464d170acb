"""What a run is made of, written beside its records: specification, seed, data fingerprint, versions."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.common.paths import write_atomically
from trainer.records import JobRecord

PACKAGES = ("rollwise", "torch", "transformers", "numpy", "grpcio", "redis", "math-verify", "reasoning-gym")


def write_run_info(folder: Path, record: JobRecord, data_fingerprint: str, policy: Path | None) -> None:
    """Writes spec.json."""
    info = {
        "job_id": record.id,
        "spec": record.spec,
        "seed": record.spec["seed"],
        "policy_folder": None if policy is None else str(policy),
        "data_fingerprint": data_fingerprint,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    write_atomically(folder / "spec.json", json.dumps(info, indent=2, ensure_ascii=False).encode())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
