"""The context of one policy: the past outcomes its priors are made from. Pure, in memory.

Invariants: a window of rows is always given in the order (policy version, outcome id), whatever the order of arrival;
at most `capacity` rows are kept, those of the oldest versions going first; an outcome counts once; what belongs to a
lineage below the fence is refused. The ids of the last `capacity` rows that went are remembered too, so that a late
repetition of one of them still counts as a duplicate.
"""

from __future__ import annotations

import base64
import heapq
import json
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidArgument
from services.value_prior.records import Feature, Limits, Observed, Outcome, check_outcome

SNAPSHOT_FORMAT = "rollwise.value_prior.context"
SNAPSHOT_VERSION = 1
MAX_SNAPSHOT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Change:
    """What an Observe or Restore does to a context; stored first, then applied.

    `added` are rows with their arrival numbers; `evicted` rows leave and only their ids stay, with the arrival number
    they had; `forgotten` ids leave for good.
    """

    added: tuple[tuple[int, Outcome], ...] = ()
    evicted: tuple[tuple[int, str], ...] = ()
    forgotten: tuple[str, ...] = ()
    fence: int = 0
    # Restore: everything that was there goes first.
    replace: bool = False


@dataclass(slots=True)
class PolicyContext:
    """Rows, fence and remembered ids of one policy. Not thread-safe."""

    capacity: int
    fence: int = 0
    rows: dict[str, Outcome] = field(default_factory=dict)
    arrival: dict[str, int] = field(default_factory=dict)
    # Ids of evicted rows, oldest arrival first.
    gone: dict[str, int] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    # Restores so far. Between two of them rows are only added, or leave at the old end.
    replaced: int = 0

    @classmethod
    def of(
        cls, capacity: int, rows: Iterable[tuple[int, Outcome]], *, fence: int, gone: Mapping[str, int] | None = None
    ) -> PolicyContext:
        """A context that holds `rows` (with their arrival numbers) and remembers the ids in `gone`."""
        numbered = list(rows)
        return cls(
            capacity,
            fence,
            rows={row.outcome_id: row for _, row in numbered},
            arrival={row.outcome_id: number for number, row in numbered},
            gone=dict(sorted((gone or {}).items(), key=lambda item: item[1])),
            order=sorted(row.order for _, row in numbered),
        )

    def plan(self, outcomes: Sequence[Outcome]) -> tuple[Change, Observed]:
        """What accepting `outcomes` would change, and how each of them counts. Changes nothing."""
        fresh: dict[str, Outcome] = {}
        duplicates = stale = 0
        for outcome in outcomes:
            known = outcome.outcome_id
            if outcome.lineage < self.fence:
                stale += 1
            elif known in self.rows or known in self.gone or known in fresh:
                duplicates += 1
            else:
                fresh[known] = outcome
        start = 1 + max(max(self.arrival.values(), default=0), max(self.gone.values(), default=0))
        numbered = {outcome_id: start + place for place, outcome_id in enumerate(fresh)}
        evicted = self._oldest(len(self.rows) + len(fresh) - self.capacity, fresh, numbered)
        leaving = {outcome_id for _, outcome_id in evicted}
        surplus = len(self.gone) + len(evicted) - self.capacity
        change = Change(
            added=tuple((numbered[key], row) for key, row in fresh.items() if key not in leaving),
            evicted=evicted,
            forgotten=tuple(list(self.gone)[: max(0, surplus)]),
            fence=self.fence,
        )
        return change, Observed(len(fresh), duplicates, stale)

    def apply(self, change: Change) -> None:
        """Does what `plan` or a restore said."""
        if change.replace:
            self.rows, self.arrival, self.gone, self.order = {}, {}, {}, []
            self.replaced += 1
        for outcome_id in change.forgotten:
            del self.gone[outcome_id]
        for number, outcome_id in change.evicted:
            self.rows.pop(outcome_id, None)
            self.arrival.pop(outcome_id, None)
            self.gone[outcome_id] = number
        if change.evicted:
            self.order = sorted(row.order for row in self.rows.values())
        for number, row in change.added:
            self.rows[row.outcome_id] = row
            self.arrival[row.outcome_id] = number
            insort(self.order, row.order)
        self.fence = change.fence

    def window(self, before_version: int | None) -> list[Outcome]:
        """The newest rows of versions below `before_version` (None: all), in order; at most 3/4 of the capacity.

        The rest is slack: while a step's own outcomes push old rows out, the window below that step stays as it is.
        """
        end = len(self.order) if before_version is None else bisect_left(self.order, (before_version, ""))
        start = max(0, end - max(1, self.capacity * 3 // 4))
        return [self.rows[outcome_id] for _, outcome_id in self.order[start:end]]

    def all_rows(self) -> list[Outcome]:
        """Every row, in order."""
        return [self.rows[outcome_id] for _, outcome_id in self.order]

    def _oldest(
        self, count: int, fresh: Mapping[str, Outcome], numbered: Mapping[str, int]
    ) -> tuple[tuple[int, str], ...]:
        """The `count` rows, kept or fresh, that go first: oldest version, then earliest arrival."""
        if count <= 0:
            return ()
        kept = ((row.policy_version, self.arrival[key], key) for key, row in self.rows.items())
        new = ((row.policy_version, numbered[key], key) for key, row in fresh.items())
        return tuple((number, key) for _, number, key in heapq.nsmallest(count, [*kept, *new]))


# ------------------------------------------------------------------------------------------ encoding


def encode_row(row: Outcome) -> bytes:
    """One outcome as compact JSON, without its policy: the place it is kept at names that."""
    given: dict[str, Any] = {
        "id": row.outcome_id,
        "lineage": row.lineage,
        "version": row.policy_version,
        "prompt": row.prompt_id,
        "text": row.text,
        "successes": row.successes,
        "trials": row.trials,
    }
    if row.predicted is not None:
        given["predicted"] = row.predicted
    if row.feature is not None:
        feature = row.feature
        packed = base64.b64encode(feature.values).decode()
        given["feature"] = [feature.layer, feature.dtype, feature.dimension, packed, feature.policy_version]
    return json.dumps(given, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def decode_row(data: bytes | dict[str, Any], policy_id: str) -> Outcome:
    """The outcome that `encode_row` wrote. Raises KeyError, TypeError or ValueError on anything else."""
    given = data if isinstance(data, dict) else json.loads(data)
    feature = None
    if "feature" in given:
        layer, dtype, dimension, packed, version = given["feature"]
        feature = Feature(layer, dtype, dimension, base64.b64decode(packed), version)
    predicted = given.get("predicted")
    return Outcome(
        outcome_id=str(given["id"]),
        policy_id=policy_id,
        text=str(given["text"]),
        successes=float(given["successes"]),
        trials=int(given["trials"]),
        lineage=int(given["lineage"]),
        policy_version=int(given["version"]),
        prompt_id=str(given["prompt"]),
        feature=feature,
        predicted=None if predicted is None else float(predicted),
    )


def encode_snapshot(rows: Sequence[Outcome], fence: int) -> bytes:
    """Rows (in order) as zlib-compressed JSON; equal contents give equal bytes, whatever the order of arrival."""
    document = {
        "format": SNAPSHOT_FORMAT,
        "version": SNAPSHOT_VERSION,
        "fence": fence,
        "rows": [json.loads(encode_row(row)) for row in rows],
    }
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return zlib.compress(text.encode(), level=6)


def decode_snapshot(data: bytes, policy_id: str, capacity: int, fence: int) -> Change:
    """The change that makes a context hold a snapshot's rows and nothing else, behind `fence`.

    Raises `InvalidArgument` for bytes that are not a whole snapshot of a known version.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_SNAPSHOT_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut short or too large")
        document = json.loads(text)
        if document["format"] != SNAPSHOT_FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        if document["version"] != SNAPSHOT_VERSION:
            raise ValueError(f"its version is {document['version']!r}, this service reads {SNAPSHOT_VERSION}")
        rows = [decode_row(row, policy_id) for row in document["rows"]]
        for number, row in enumerate(rows):
            check_outcome(row, f"rows[{number}]", Limits())
    except (zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidArgument(f"snapshot is not one of this service's: {error}", field="snapshot") from error
    if len({row.outcome_id for row in rows}) != len(rows):
        raise InvalidArgument("snapshot holds an outcome id twice", field="snapshot")
    rows.sort(key=lambda row: row.order)
    return Change(added=tuple(enumerate(rows[-capacity:], start=1)), fence=fence, replace=True)
