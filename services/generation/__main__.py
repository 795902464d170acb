"""`python -m services.generation`: one generation server."""

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
