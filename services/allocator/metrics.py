"""Every metric of the allocator, in one place."""

from prometheus_client import Counter, Gauge, Histogram

GROUPS = Counter("rollwise_allocator_groups_total", "Groups closed.", ["kind", "state", "cause"])
GROUPS_STALE = Counter("rollwise_allocator_groups_stale_total", "Groups given up because their lineage ended.")
GROUPS_RUNNING = Gauge("rollwise_allocator_groups_running", "Groups being worked on.")
GROUP_SECONDS = Histogram(
    "rollwise_allocator_group_duration_seconds",
    "From a group's start to its close.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
ROLLOUTS = Counter("rollwise_allocator_rollouts_total", "Rollouts bought.", ["kind", "verdict"])
ROLLOUTS_PER_GROUP = Histogram(
    "rollwise_allocator_rollouts_per_group",
    "Judged rollouts of a closed training group.",
    buckets=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 64, 128),
)
DECISIONS = Counter("rollwise_allocator_decisions_total", "Looks at the evidence, by what was decided.", ["decision"])
CALLS_RETRIED = Counter("rollwise_allocator_calls_retried_total", "Calls that were tried again.", ["service"])
