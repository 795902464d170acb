"""The group's own mean as the baseline (GRPO), or the mean of the other rollouts (RLOO)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.algorithms.groups import GroupRewards, others_mean
from trainer.algorithms.registry import register
from trainer.config import GroupMeanBaseline


@register("group_mean")
def group_mean(group: GroupRewards, spec: GroupMeanBaseline) -> Sequence[float]:
    """b_i = mean(r), or mean of r without r_i.

    A single rollout has nothing to be compared with: its baseline is its own reward, so its advantage is 0,
    with and without leave-one-out.
    """
    rewards = group.rewards
    if len(set(rewards)) == 1:
        return rewards
    if spec.leave_one_out:
        return [others_mean(rewards, i) for i in range(len(rewards))]
    return [math.fsum(rewards) / len(rewards)] * len(rewards)
