"""`python -m services.generation`: one generation server."""

import os

# Read by OpenMP once, when torch loads. Its threads otherwise spin at every barrier, and where other processes share
# the cores (the trainer, on one machine) a decode step takes over ten times as long; sleeping costs little when alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from services.common.lifecycle import run
from services.common.settings import load_settings
from services.generation.server import serve
from services.generation.settings import GenerationSettings


def main() -> None:
    """Read the settings and serve."""
    settings = load_settings(GenerationSettings)
    run(lambda: serve(settings), service="generation", settings=settings)


if __name__ == "__main__":
    main()
