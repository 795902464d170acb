"""`python -m trainer.api`: serves the HTTP API of training jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Read by OpenMP once, when torch loads: idle threads sleep instead of spinning on cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from services.common.lifecycle import run
from services.common.settings import load_settings
from trainer.api.server import ApiServer
from trainer.settings import ApiSettings


async def serve(settings: ApiSettings) -> None:
    """The process, until SIGTERM or SIGINT."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    await ApiServer(settings).run_until_signal()


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the settings and serves."""
    settings = load_settings(ApiSettings, argv)
    run(lambda: serve(settings), service="api", settings=settings)


if __name__ == "__main__":
    main()
