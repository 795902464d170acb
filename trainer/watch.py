"""Looks after the services while the trainer waits for groups, so that no wait is silent or without end.

- a generation server that serves another policy or version than expected (it was restarted) gets the weights again;
- when no group came for too long, the run ends with the service that is to blame, why, and the last progress.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from services.common import keys
from services.common.errors import RollwiseError
from services.common.logging import get_logger
from trainer.clients import Services
from trainer.failures import JobFailedError
from trainer.telemetry import REPUSHES

log = get_logger()


class Watch:
    """One run's watchdog. `repush` gives the generation server the current weights."""

    def __init__(
        self,
        services: Services,
        redis: Any,
        *,
        job_id: str,
        needs_prior: bool,
        every_seconds: float,
        stall_seconds: float,
        repush: Callable[[str], Awaitable[None]],
    ) -> None:
        self._services = services
        self._redis = redis
        self._job_id = job_id
        self._needs_prior = needs_prior
        self._every = every_seconds
        self._stall = stall_seconds
        self._repush = repush
        self._next_look = 0.0
        self._last_group = time.monotonic()
        self.expected_version = -1

    def group_came(self) -> None:
        """There was progress."""
        self._last_group = time.monotonic()

    async def look(self, progress: str) -> None:
        """Called all the time while waiting; looks every few seconds. Raises JobFailedError when nothing moves."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._every
        if now - self._last_group > self._stall:
            raise await self._stalled(progress)
        try:
            status = await self._services.engine_status()
        except RollwiseError as error:
            # It may be on its way back; when it is not, the stall ends the run and names it.
            log.warning("the generation server does not answer", error=str(error))
            return
        if status.policy_id == self._job_id and status.policy_version == self.expected_version:
            return
        found = f"version {status.policy_version} of {status.policy_id}" if status.policy_id else "no weights"
        log.warning("the generation server lost the weights", serves=found, expected=self.expected_version)
        REPUSHES.inc()
        await self._repush(found)

    async def _stalled(self, progress: str) -> JobFailedError:
        health = await self._services.all_health()
        names = ["generation", "verifier", "allocator"]
        if self._needs_prior:
            names.insert(1, "value-prior")
        prompts = int(await self._redis.xlen(keys.prompts()))
        groups = int(await self._redis.xlen(keys.groups(self._job_id)))
        sick = {name: health[name] for name in names if health[name] is not None}
        if sick:
            service = next(iter(sick))
            why = "; ".join(str(cause) for cause in sick.values())
        elif prompts:
            service = "allocator"
            why = f"all services answer, but {prompts} prompts are on the stream and no group comes of them"
        else:
            service = "allocator"
            why = "all services answer, but the prompts that were sent are no longer on the stream and gave no group"
        return JobFailedError(
            f"no group came for {self._stall:.0f} s: {why}. Streams: prompts {prompts}, groups {groups}. "
            f"Last progress: {progress}. Look with `rollwise doctor`, then resume the job",
            code="stalled",
            service=service,
        )
