"""Algorithms: groups in, advantages out. They know no model, no token and no service."""

from trainer.algorithms.advantages import advantages, baselines
from trainer.algorithms.groups import GroupRewards, Scale
from trainer.algorithms.registry import known_baselines

__all__ = ["GroupRewards", "Scale", "advantages", "baselines", "known_baselines"]
