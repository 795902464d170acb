"""The value prior itself: scores prompts, learns from outcomes, snapshots and restores.

Knows no transport. State of a policy lives in a `ContextStore`, which is asked first whenever something changes: an
outcome is in memory, and acknowledged, only once the store has it. Fits and embeddings run in one worker thread, so
that the event loop (health, small calls, other policies' bookkeeping) is never behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.logging import get_logger
from services.value_prior import calibration, prediction
from services.value_prior.context import Change, PolicyContext, decode_snapshot, encode_snapshot
from services.value_prior.embedder import CachedEmbedder, Embedder
from services.value_prior.prediction import Fitted
from services.value_prior.records import (
    Feature,
    Limits,
    Observed,
    Outcome,
    Prior,
    Prompt,
    check_outcomes,
    check_policy_id,
    check_prompts,
)

T = TypeVar("T")
_log = get_logger()

# One for "now" and a few for versions that are still being sampled.
FITS_KEPT = 4


class ContextStore(Protocol):
    """Where contexts outlive the process."""

    async def load(self, policy_id: str) -> PolicyContext:
        """The stored context; an empty one for a policy never seen."""
        ...

    async def save(self, policy_id: str, change: Change) -> None:
        """Makes `change` durable, all or nothing, before it returns."""
        ...


class Recorder(Protocol):
    """Takes the model's measurements; names of policies and prompts stay out of them."""

    def scored(self, priors: Sequence[Prior]) -> None:
        """A Score call was answered."""
        ...

    def observed(self, result: Observed, brier: float | None, trials: int) -> None:
        """An Observe call was answered; `brier` of its accepted outcomes that carried a prediction."""
        ...

    def fitted(self, seconds: float, rows: int) -> None:
        """A fit was made on `rows` rows."""
        ...

    def held(self, policies: int, outcomes: int) -> None:
        """Policies and outcomes in memory now."""
        ...


@dataclass(slots=True)
class _Policy:
    context: PolicyContext
    # Changes of one policy happen one after the other: plan, store, apply.
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    fitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    fits: OrderedDict[tuple[object, ...], Fitted] = field(default_factory=OrderedDict)
    users: int = 0


class ValuePrior:
    """Priors for any number of policies; at most `max_policies` of them in memory, the rest in the store."""

    def __init__(
        self,
        store: ContextStore,
        embedder: Embedder,
        recorder: Recorder,
        *,
        limits: Limits | None = None,
        fit_rows: int = 1024,
        max_policies: int = 64,
        keep_features: bool = False,
        cache_size: int = 16_384,
    ) -> None:
        self._store = store
        self._embedder = CachedEmbedder(embedder, cache_size)
        self._recorder = recorder
        self.limits = limits or Limits()
        self._fit_rows = fit_rows
        self._max_policies = max_policies
        self._keep_features = keep_features
        self._policies: OrderedDict[str, _Policy] = OrderedDict()
        self._loading: dict[str, asyncio.Task[None]] = {}
        # Awaited before a Score that is limited to earlier versions; the stream worker puts itself here.
        self.catch_up: Callable[[], Awaitable[None]] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="value-prior")

    def close(self) -> None:
        """Ends the worker thread; work that has begun is finished."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def score(
        self, policy_id: str, prompts: Sequence[Prompt], *, before_version: int | None = None
    ) -> list[Prior]:
        """Priors in the order of `prompts`, from outcomes of versions below `before_version` (None: all)."""
        check_policy_id(policy_id)
        check_prompts(prompts, self.limits)
        if before_version is not None and before_version < 0:
            raise InvalidArgument(f"before_version is {before_version}, must be a count from 0", field="before_version")
        self._embedder.check(prompts)
        if before_version is not None and self.catch_up is not None:
            await self.catch_up()
        async with self._using(policy_id) as policy:
            self._check_dimension(policy, [(f"prompts[{i}]", prompt.feature) for i, prompt in enumerate(prompts)])
            fitted = await self._fitted(policy, before_version)
        if fitted.context_size:
            priors = await self._in_worker(lambda: fitted.predict(prompts, self._embedder))
        else:
            priors = fitted.predict(prompts, self._embedder)
        self._recorder.scored(priors)
        return priors

    async def observe(self, outcomes: Sequence[Outcome]) -> Observed:
        """Takes outcomes in; returns once all of them are durable. Repeating the call changes nothing."""
        check_outcomes(outcomes, self.limits)
        rows = [self._row(number, outcome) for number, outcome in enumerate(outcomes)]
        by_policy: dict[str, list[Outcome]] = {}
        for row in rows:
            by_policy.setdefault(row.policy_id, []).append(row)
        accepted = duplicates = stale = 0
        for policy_id, own in by_policy.items():
            result = await self._observe_policy(policy_id, own)
            accepted, duplicates, stale = (
                accepted + result.accepted,
                duplicates + result.duplicates,
                stale + result.stale,
            )
        self._record_held()
        return Observed(accepted, duplicates, stale)

    async def snapshot(self, policy_id: str) -> tuple[bytes, int]:
        """Everything learnt of a policy as bytes, and how many outcomes they hold."""
        check_policy_id(policy_id)
        async with self._using(policy_id) as policy:
            # No await in between: rows and fence are of one moment.
            rows, fence = policy.context.all_rows(), policy.context.fence
        return await asyncio.to_thread(encode_snapshot, rows, fence), len(rows)

    async def restore(self, policy_id: str, lineage: int, snapshot: bytes) -> int:
        """Replaces a policy's context by a snapshot (empty: forgets it) and refuses lineages below `lineage`.

        Returns the number of outcomes held afterwards. `FailedPrecondition` when a later lineage restored before.
        """
        check_policy_id(policy_id)
        if not 0 <= lineage < 2**53:
            raise InvalidArgument(f"lineage is {lineage}, must be a count from 0", field="lineage")
        async with self._using(policy_id) as policy:
            change = Change(fence=lineage, replace=True)
            if snapshot:
                capacity = policy.context.capacity
                change = await asyncio.to_thread(decode_snapshot, snapshot, policy_id, capacity, lineage)
            async with policy.changing:
                if lineage < policy.context.fence:
                    raise FailedPrecondition(
                        f"lineage {lineage} of policy {policy_id!r} was fenced off by lineage {policy.context.fence}: "
                        "another resume of this job came later",
                        reason="STALE_LINEAGE",
                    )
                await self._commit(policy_id, policy, change)
                held = len(policy.context.rows)
        self._record_held()
        return held

    async def warm_up(self, policy_id: str) -> None:
        """Loads a policy and makes its fit, so that the first Score after a restart need not wait for it."""
        async with self._using(policy_id) as policy:
            await self._fitted(policy, None)

    # ------------------------------------------------------------------------------------- inside

    async def _observe_policy(self, policy_id: str, rows: Sequence[Outcome]) -> Observed:
        async with self._using(policy_id) as policy, policy.changing:
            self._check_dimension(policy, [(f"outcome {row.outcome_id!r}", row.feature) for row in rows])
            change, result = policy.context.plan(rows)
            if result.accepted:
                await self._commit(policy_id, policy, change)
        predicted = [row for _, row in change.added if row.predicted is not None]
        score = None
        if predicted:
            score = calibration.brier(
                [row.predicted or 0.0 for row in predicted],
                [row.successes for row in predicted],
                [float(row.trials) for row in predicted],
            )
        self._recorder.observed(result, score, sum(row.trials for row in predicted))
        return result

    async def _commit(self, policy_id: str, policy: _Policy, change: Change) -> None:
        """Stores, then applies. A cancelled caller must not leave memory behind the store."""

        async def both() -> None:
            await self._store.save(policy_id, change)
            policy.context.apply(change)

        task = asyncio.ensure_future(both())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The caller holds the policy's lock: finish under it, then go.
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is not None:
                _log.warning("save_failed_after_cancel", error=repr(task.exception()))
            raise

    @asynccontextmanager
    async def _using(self, policy_id: str) -> AsyncIterator[_Policy]:
        """The policy, loaded from the store if need be; it stays in memory while it is in use."""
        while (policy := self._policies.get(policy_id)) is None:
            loading = self._loading.get(policy_id)
            if loading is None:
                loading = asyncio.ensure_future(self._load(policy_id))
                self._loading[policy_id] = loading
                loading.add_done_callback(lambda _: self._loading.pop(policy_id, None))
            await asyncio.shield(loading)
        self._policies.move_to_end(policy_id)
        policy.users += 1
        try:
            yield policy
        finally:
            policy.users -= 1

    async def _load(self, policy_id: str) -> None:
        self._policies[policy_id] = _Policy(await self._store.load(policy_id))
        for other_id, other in list(self._policies.items()):
            if len(self._policies) <= self._max_policies:
                break
            if other_id != policy_id and not other.users:
                del self._policies[other_id]
        self._record_held()

    async def _fitted(self, policy: _Policy, before_version: int | None) -> Fitted:
        """The fit for the rows that count now; made at most once for each content."""
        async with policy.fitting:
            rows = policy.context.window(before_version)
            if self._keep_features:  # rows from before the embedder was "policy" cannot be used by it
                rows = [row for row in rows if row.feature is not None]
            if not rows:
                return prediction.NOTHING
            # Between restores a window only gains rows and loses its oldest, so these three name its content.
            key = (policy.context.replaced, before_version, len(rows), rows[0].order, rows[-1].order)
            fitted = policy.fits.get(key)
            if fitted is None:
                start = time.perf_counter()
                fitted = await self._in_worker(lambda: prediction.fit(rows, self._embedder, fit_rows=self._fit_rows))
                self._recorder.fitted(time.perf_counter() - start, len(rows))
                policy.fits[key] = fitted
                while len(policy.fits) > FITS_KEPT:
                    policy.fits.popitem(last=False)
            return fitted

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _row(self, number: int, outcome: Outcome) -> Outcome:
        """The outcome as it is kept: features only where they are used."""
        if not self._keep_features:
            return outcome if outcome.feature is None else replace(outcome, feature=None)
        if outcome.feature is None:
            raise InvalidArgument(
                f"outcomes[{number}].feature is missing: this value prior runs with embedder 'policy'",
                field=f"outcomes[{number}].feature",
            )
        return outcome

    def _check_dimension(self, policy: _Policy, features: Sequence[tuple[str, Feature | None]]) -> None:
        """All features of one policy have one size; `features` are pairs (what to call the row, its feature)."""
        if not self._keep_features:
            return
        newest = policy.context.rows.get(policy.context.order[-1][1]) if policy.context.order else None
        known = newest.feature if newest is not None else None
        for where, feature in features:
            known = known or feature
            if feature is not None and known is not None and feature.dimension != known.dimension:
                raise InvalidArgument(
                    f"{where}.feature.dimension is {feature.dimension}, outcomes of this policy have "
                    f"{known.dimension}: restore an empty snapshot to forget them",
                    field=f"{where}.feature.dimension",
                )

    def _record_held(self) -> None:
        self._recorder.held(len(self._policies), sum(len(policy.context.rows) for policy in self._policies.values()))
