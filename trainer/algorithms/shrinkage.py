"""V0.5's baseline: the group's mean, shrunk toward the prior. The formulas are the allocator's own pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from services.allocator.shrinkage import RewardScale, fuse, leave_one_out_baselines
from services.common.errors import InvalidArgument
from trainer.algorithms.groups import GroupRewards
from trainer.algorithms.registry import register
from trainer.config import ShrinkageBaseline


@register("shrinkage")
def shrinkage(group: GroupRewards, spec: ShrinkageBaseline) -> Sequence[float]:
    """The fused mean for all rollouts, or for each rollout the fusion of the others' rewards.

    A single rollout keeps a baseline of its own: the prior fused with its reward, or the prior alone under
    leave-one-out. Never 0, never the raw reward. Raises InvalidArgument when the group has no prior.
    """
    if group.prior is None:
        raise InvalidArgument(f"group {group.key!r} has no prior, which the shrinkage baseline needs")
    scale = RewardScale(group.scale.low, group.scale.high)
    if spec.leave_one_out:
        return leave_one_out_baselines(group.prior, group.rewards, scale)
    return [fuse(group.prior, group.rewards, scale).baseline] * len(group.rewards)
