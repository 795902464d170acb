"""Baselines by the `kind` of their specification: a new baseline is one new file that registers itself.

Every module of this package is imported once, so putting a file here is all that is needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from services.common.errors import InvalidArgument
from trainer.algorithms.groups import GroupRewards

# (group, its specification) -> one baseline a rollout, on the group's reward scale, in the order of its rewards.
Baseline = Callable[[GroupRewards, Any], Sequence[float]]

_BASELINES: dict[str, Baseline] = {}


def register(kind: str) -> Callable[[Baseline], Baseline]:
    """Decorator: makes a function the baseline of this `kind`. Two functions of one kind are a fault."""

    def add(baseline: Baseline) -> Baseline:
        if kind in _BASELINES:
            raise RuntimeError(f"two baselines are registered as {kind!r}")
        _BASELINES[kind] = baseline
        return baseline

    return add


def baseline_of(kind: str) -> Baseline:
    """The baseline registered under `kind`; InvalidArgument names the known ones."""
    _load_all()
    if kind not in _BASELINES:
        raise InvalidArgument(f"unknown baseline {kind!r}; known: {', '.join(sorted(_BASELINES))}")
    return _BASELINES[kind]


def known_baselines() -> list[str]:
    """Names of all baselines, sorted."""
    _load_all()
    return sorted(_BASELINES)


def _load_all() -> None:
    package = importlib.import_module("trainer.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"trainer.algorithms.{module.name}")
