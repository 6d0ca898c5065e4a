"""The last hour by minutes, from counters that only grow: what the page draws, without a time series database.

    history = History(node.metrics)
    ...
    history.tick()                  # every second or so, by whoever has a loop already; once a minute it does something
    for minute in history.rows():   # the oldest first; the last one is under way
        print(minute.start, minute.hit_rate)

Memory is 60 rows of a few numbers. A counter that became smaller began anew (a source was replaced): what it shows
counts from 0.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .prometheus import Source, merged

__all__ = ["COLUMNS", "History", "Minute"]

_MINUTE_S = 60.0

_Terms = tuple[tuple[str, Mapping[str, frozenset[str]]], ...]


def _of(name: str, **labels: str) -> tuple[str, Mapping[str, frozenset[str]]]:
    """A metric, and for some of its labels the values that count, with `|` between."""
    return name, {label: frozenset(values.split("|")) for label, values in labels.items()}


class _Column(NamedTuple):
    """What is added up for one number of a `Minute`.

    Attributes:
        store: what stores count; where there is a node only if it has nothing of its own: its numbers are those of the
            whole, and a store's, of what lies below it, would be counted twice.
        node: what nodes count.
        always: what is added in any case.
    """

    store: _Terms = ()
    node: _Terms = ()
    always: _Terms = ()

    def terms(self, *, node: bool) -> _Terms:
        """What counts, with a node or without."""
        return (*(self.node if node else self.store), *self.always)


COLUMNS: Mapping[str, _Column] = {
    "hits": _Column((_of("kvstore_hit_records_total"),), (_of("kvstore_node_records_total", event="hits"),)),
    "misses": _Column(
        (_of("kvstore_lookup_records_total", result="miss"), _of("kvstore_missed_records_total")),
        (_of("kvstore_node_records_total", event="misses|absent"),),
    ),
    "hit_tokens": _Column((_of("kvstore_hit_tokens_total"),)),
    "saved_seconds": _Column(
        (_of("kvstore_prefill_saved_seconds_total"),), (_of("kvstore_node_prefill_saved_seconds_total"),)
    ),
    "read_bytes": _Column(
        (_of("kvstore_backend_bytes_total", operation="get"),), (_of("kvstore_node_bytes_total", way="out"),)
    ),
    "written_bytes": _Column(
        (_of("kvstore_backend_bytes_total", operation="put"),), (_of("kvstore_node_bytes_total", way="in"),)
    ),
    "errors": _Column(
        (), (_of("kvstore_node_records_total", event="failed|disk_failed"),), (_of("kvstore_backend_errors_total"),)
    ),
    "deadline_misses": _Column(
        (_of("kvstore_deadline_misses_total"),), (_of("kvstore_node_requests_total", event="late"),)
    ),
}
"""What the numbers of a `Minute` are made of."""


class Minute(NamedTuple):
    """What happened in one minute.

    Attributes:
        start: seconds since the epoch.
        seconds: how long it was; the last one is under way, and one during which nobody ticked is longer.
        hits: records that were had.
        misses: records that were asked for, and not had.
        hit_tokens: tokens of the hits, where they are known.
        saved_seconds: of prefill.
        read_bytes, written_bytes: from and to places.
        errors: items that failed.
        deadline_misses: batches, or requests to a node, that were too late.
    """

    start: float
    seconds: float
    hits: float = 0
    misses: float = 0
    hit_tokens: float = 0
    saved_seconds: float = 0
    read_bytes: float = 0
    written_bytes: float = 0
    errors: float = 0
    deadline_misses: float = 0

    @property
    def hit_rate(self) -> float | None:
        """Part of the records that were had, 0 to 1; None if none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class History:
    """Differences of counters, minute by minute. Safe from any thread.

    Args:
        sources: as for `exposition`.
        minutes: how many finished ones are kept.
        clock: seconds since the epoch; it only says when a minute began. It may be set while minutes are counted.
        monotonic: seconds, of `time.monotonic()`; by it minutes are long.
    """

    def __init__(
        self,
        *sources: Source,
        minutes: int = 60,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._rows: deque[Minute] = deque(maxlen=minutes)
        self._began = monotonic()
        self._before = self._totals()
        self._sums = dict.fromkeys(COLUMNS, 0.0)  # of the minute under way

    def tick(self) -> None:
        """End the minute under way if it is over. Cheap otherwise; to be called every second or so."""
        if self._monotonic() - self._began < _MINUTE_S:
            return
        with self._lock:
            now = self._monotonic()
            if now - self._began >= _MINUTE_S:
                self._take()
                self._rows.append(self._row(now))
                self._began = now
                self._sums = dict.fromkeys(COLUMNS, 0.0)

    def rows(self) -> Sequence[Minute]:
        """The finished minutes, the oldest first, and the one under way."""
        self.tick()
        with self._lock:
            self._take()
            return [*self._rows, self._row(self._monotonic())]

    def _row(self, now: float) -> Minute:
        seconds = now - self._began
        return Minute(self._clock() - seconds, seconds, **self._sums)

    def _take(self) -> None:
        """Add what came since the last look. Called with the lock held."""
        totals = self._totals()
        for (column, series), value in totals.items():
            before = self._before.get((column, series), 0.0)
            self._sums[column] += value - before if value >= before else value
        self._before = totals

    def _totals(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The value of every series that counts for a column."""
        found = merged(*self._sources)
        node = any(name.startswith("kvstore_node_") for name in found)
        totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for column, definition in COLUMNS.items():
            for name, wanted in definition.terms(node=node):
                for series in found.get(name, {"series": ()})["series"]:
                    labels: Mapping[str, Any] = series["labels"]
                    if all(labels[label] in values for label, values in wanted.items()):
                        totals[column, (name, *labels.values())] = series["value"]
        return totals
