"""Where policies come from: two that need no GPU and no hub, and any Hugging Face model otherwise."""

from trainer.policies.resolve import KNOWN_POLICIES, resolve_policy

__all__ = ["KNOWN_POLICIES", "resolve_policy"]
