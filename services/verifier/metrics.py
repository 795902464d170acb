"""The verifier's own metrics. Labels are a handful of stable words; never an item."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.verifier.pool import Observer, VerdictPool
from services.verifier.verdicts import Verdict

VERDICTS = Counter(
    "rollwise_verifier_verdicts_total", "Verdicts, by kind and by the reason's first word.", ["kind", "reason"]
)
SECONDS = Histogram(
    "rollwise_verifier_item_duration_seconds",
    "Time a worker spent on one item; verdicts from the cache are not in it.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
REPLACED = Counter("rollwise_verifier_workers_replaced_total", "Workers ended and replaced, by cause.", ["cause"])
QUEUED = Gauge("rollwise_verifier_queue_length", "Items that wait for a worker.")
WORKERS = Gauge("rollwise_verifier_workers", "Live worker processes.")


def observer() -> Observer:
    """Counts what a pool does."""

    def judged(verdict: Verdict, seconds: float) -> None:
        VERDICTS.labels(verdict.kind.value, verdict.word).inc()
        if seconds > 0:
            SECONDS.observe(seconds)

    return Observer(judged=judged, replaced=lambda cause: REPLACED.labels(cause).inc())


def watch(pool: VerdictPool) -> None:
    """Show the pool's queue and workers at each scrape."""
    QUEUED.set_function(lambda: pool.queued)
    WORKERS.set_function(lambda: len(pool.worker_pids))
