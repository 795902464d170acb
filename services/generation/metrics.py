"""Every metric of the generation service, in one place."""

from prometheus_client import Counter, Gauge, Histogram

RUNNING = Gauge("rollwise_generation_running_rollouts", "Rollouts being decoded.")
WAITING = Gauge("rollwise_generation_waiting_requests", "Requests with rollouts that have not started.")
POLICY_VERSION = Gauge("rollwise_generation_policy_version", "Policy version served.")
GENERATED_TOKENS = Counter("rollwise_generation_generated_tokens_total", "Tokens sampled.")
PREFILL_TOKENS = Counter("rollwise_generation_prefill_tokens_total", "Prompt tokens computed.")
PREFIX_HITS = Counter("rollwise_generation_prefix_hits_total", "Prompts whose keys and values were still at hand.")
UPDATE_SECONDS = Histogram(
    "rollwise_generation_update_duration_seconds",
    "From an update's arrival until the new version serves.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
DECODE_SECONDS = Histogram(
    "rollwise_generation_decode_step_seconds",
    "One token for every running rollout.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2),
)
UPDATES_LATE = Counter("rollwise_generation_updates_late_total", "Weight updates given up at their deadline.")
