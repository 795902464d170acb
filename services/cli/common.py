"""How commands find the services."""

from __future__ import annotations

from deploy.endpoints import DEFAULT_API, find
from services.cli.client import ApiClient

API_VARIABLE = "ROLLWISE_CLI_API_URL"


def api(option: str | None) -> ApiClient:
    """The trainer API: --api-url, else ROLLWISE_CLI_API_URL, else the running stack's, else the default port."""
    return ApiClient(find(option, API_VARIABLE, "api_url", DEFAULT_API))
