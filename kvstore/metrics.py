"""Counters, gauges and histograms: plain numbers behind one lock, in bounded memory, read as one dict.

Nothing here knows a monitoring system; `snapshot` holds what an exporter needs (kind, help, labels, buckets), and the
names and types follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): `kvstore_` first, base
units last, `_total` on what only grows. Label values are names of backends, operations and error classes; never keys,
never URLs with secrets. The throughput of a backend is `kvstore_backend_transfer_bytes_total` over
`kvstore_backend_transfer_seconds_total`: both count only calls without a failed item.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .backend import Outcome, Status
from .errors import ConfigError, KVStoreError

__all__ = ["BYTE_BUCKETS", "METRICS", "SECOND_BUCKETS", "Metric", "Metrics", "OperationMeter", "error_class"]

SECOND_BUCKETS = tuple(round(m * 10.0**e, 6) for e in range(-5, 2) for m in (1, 2.5, 5) if m * 10.0**e <= 10)
"""Upper bounds of latency buckets in seconds: 10 µs to 10 s, about 3 per decade."""

BYTE_BUCKETS = tuple(float(1 << n) for n in range(12, 33, 2))
"""Upper bounds of size buckets in bytes: 4 KiB to 4 GiB, each four times the one before."""

logger = logging.getLogger("kvstore.metrics")

OTHER = "other"
"""Value of every label of the series that takes what no longer fits: see `Metrics(max_series=…)`."""

_NAME = re.compile(r"kvstore_[a-z0-9_]+")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric.

    Attributes:
        name: begins with `kvstore_` and ends with its unit, or `_total`.
        kind: "counter" (only grows), "gauge" (is set) or "histogram".
        doc: one sentence.
        labels: names of its labels, in the order in which values are given.
        buckets: of a histogram: finite, rising, inclusive upper bounds; one more bucket takes the rest.
    """

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not all(map(_LABEL.fullmatch, self.labels)):
            raise ConfigError(f"metric {self.name!r} with labels {self.labels}: bad name; it must begin with kvstore_")
        if self.kind not in {"counter", "gauge", "histogram"}:
            raise ConfigError(f"metric {self.name!r}: unknown kind {self.kind!r}; use counter, gauge or histogram")
        rising = all(low < high for low, high in itertools.pairwise(self.buckets)) and all(
            map(math.isfinite, self.buckets)
        )
        if bool(self.buckets) != (self.kind == "histogram") or not rising:
            raise ConfigError(f"metric {self.name!r}: a histogram, and nothing else, has rising finite buckets")


_BACKEND = ("backend",)
_OPERATION = ("backend", "operation")
_PLACE = ("tier", "medium")

METRICS: tuple[Metric, ...] = (
    Metric("kvstore_backend_calls_total", "counter", "Calls of a backend, whatever came of them.", _OPERATION),
    Metric("kvstore_backend_items_total", "counter", "Items by how they ended: ok, miss, exists, error.",
           (*_OPERATION, "status")),
    Metric("kvstore_backend_errors_total", "counter", "Items that ended with an error, by its class.",
           (*_OPERATION, "error")),
    Metric("kvstore_backend_bytes_total", "counter", "Bytes of items read or stored; failed items count nothing.",
           _OPERATION),
    Metric("kvstore_backend_transfer_bytes_total", "counter", "Bytes of calls without a failed item.", _OPERATION),
    Metric("kvstore_backend_transfer_seconds_total", "counter",
           "Seconds of calls that moved bytes and had no failed item.", _OPERATION),
    Metric("kvstore_backend_call_seconds", "histogram", "Seconds per call, failed ones too.", _OPERATION,
           SECOND_BUCKETS),
    Metric("kvstore_backend_call_bytes", "histogram", "Bytes per call that moved any.", _OPERATION, BYTE_BUCKETS),
    Metric("kvstore_retries_total", "counter", "Further tries after a transient error, in calls.", _OPERATION),
    Metric("kvstore_retried_items_total", "counter", "Items in further tries.", _OPERATION),
    Metric("kvstore_recovered_items_total", "counter", "Items that a further try saved.", _OPERATION),
    Metric("kvstore_breaker_state", "gauge", "0 closed, 1 half-open (a probe is under way), 2 open.",
           (*_BACKEND, "side")),
    Metric("kvstore_breaker_changes_total", "counter", "Changes of a breaker, by the state it came to.",
           (*_BACKEND, "side", "state")),
    Metric("kvstore_breaker_refused_total", "counter", "Items refused because the breaker was open.", _OPERATION),
    Metric("kvstore_limit_wait_seconds", "histogram", "Seconds that calls waited for a slot, if they had to wait.",
           _BACKEND, SECOND_BUCKETS),
    Metric("kvstore_limit_timeouts_total", "counter", "Calls that found no slot before their deadline.", _BACKEND),
    Metric("kvstore_limit_concurrency", "gauge", "Calls allowed at once, after adapting to throttling.", _BACKEND),
    Metric("kvstore_hedged_reads_total", "counter",
           "Reads (items) that could be hedged, by what came of it: fast (no second request needed), won (the second "
           "helped), lost (it did not), budget, memory or threads (not hedged for lack of it).",
           (*_OPERATION, "result")),
    Metric("kvstore_fallthrough_items_total", "counter",
           "Items asked of the alternate after the primary missed or failed, by result: saved or lost.",
           (*_OPERATION, "result")),
    Metric("kvstore_batch_seconds", "histogram",
           "Seconds from the submission of a batch to its result, by what was asked of the store.", ("operation",),
           SECOND_BUCKETS),
    Metric("kvstore_deadline_misses_total", "counter", "Batches that ended at their deadline with something missing.",
           ("operation",)),
    Metric("kvstore_lookup_records_total", "counter",
           "Records asked for in lookups: hit (in the hit prefix) or miss (all behind it).", ("result",)),
    Metric("kvstore_hit_records_total", "counter",
           "Records that were read and verified, by the place that had them; medium: memory, disk or remote.", _PLACE),
    Metric("kvstore_hit_tokens_total", "counter", "Tokens of these records, as far as they are KV records.", _PLACE),
    Metric("kvstore_missed_records_total", "counter",
           "Records that a get did not bring: miss (not stored, or not whole) or error (trouble, or too late).",
           ("reason",)),
    Metric("kvstore_prefill_saved_seconds_total", "counter",
           "Seconds of prefill that hit tokens saved, by the option prefill_per_token."),
    Metric("kvstore_put_records_total", "counter", "Records by what came of storing them: stored, exists, error.",
           ("result",)),
    Metric("kvstore_codec_raw_bytes_total", "counter", "Bytes of stored records before encoding.", ("codec",)),
    Metric("kvstore_codec_stored_bytes_total", "counter", "Bytes of the same records as they were stored.", ("codec",)),
    Metric("kvstore_codec_saved_bytes_total", "counter", "Bytes that encoding saved: raw less stored.", ("codec",)),
    Metric("kvstore_reads_total", "counter",
           "What happened in the read path, by its name in Store.stats: joined, corrupt, quarantined, ….", ("event",)),
    Metric("kvstore_pool_capacity_bytes", "gauge", "Size of the buffer pool."),
    Metric("kvstore_pool_used_bytes", "gauge", "Bytes of the buffer pool that are not free."),
    Metric("kvstore_pool_quarantined_buffers", "gauge", "Buffers kept back since late I/O may still touch them."),
    Metric("kvstore_pool_waiting_threads", "gauge", "Threads that wait for memory of the pool."),
    Metric("kvstore_lanes", "gauge", "Lanes of a backend.", _BACKEND),
    Metric("kvstore_lanes_busy", "gauge", "Lanes that have a job.", _BACKEND),
    Metric("kvstore_queue_jobs", "gauge", "Jobs that wait for a lane.", _BACKEND),
    Metric("kvstore_lane_failures_total", "counter", "Jobs that raised, which none should.", _BACKEND),
    Metric("kvstore_write_queue_bytes", "gauge", "Bytes of puts that are not done."),
    Metric("kvstore_metrics_overflow_total", "counter",
           "Updates that went to the series `other` because a metric had too many.", ("metric",)),
)  # fmt: skip
"""Every metric of kvstore's core."""


class _Forked(Protocol):
    def _after_fork(self) -> None: ...


_forked: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(thing: _Forked) -> None:
    """Have `thing._after_fork()` called in the child of each `os.fork`, where a lock may have been copied while some
    other thread of the parent held it. Does not keep `thing` alive."""
    _forked.add(thing)


def _renew_all() -> None:
    for thing in list(_forked):
        thing._after_fork()


os.register_at_fork(after_in_child=_renew_all)


def error_class(error: BaseException) -> str:
    """The name of the class of `error` in `kvstore.errors`, or the foreign class's own name. A closed set, nearly."""
    for kind in type(error).__mro__:
        if kind.__module__ == "kvstore.errors":
            return kind.__name__
    return type(error).__name__


class _Histogram:
    """Count per bucket, sum and number of the values observed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> dict[str, Any]:
        cumulative = list(itertools.accumulate(self.counts))
        buckets = [[*pair] for pair in zip(self.bounds, cumulative, strict=False)]
        return {"count": cumulative[-1], "sum": self.total, "buckets": buckets}


class _Cell:
    """One number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def snapshot(self) -> dict[str, Any]:
        return {"value": self.value}


class _Family:
    """One metric with all its series."""

    __slots__ = ("metric", "series")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.series: dict[tuple[str, ...], Any] = {}


Change = tuple[str, tuple[str, ...], float]
"""(name, label values, value): a counter adds the value, a gauge takes it, a histogram observes it."""


class Metrics:
    """The numbers of one store (or of a process, if shared). Safe from any thread; one lock hop per call.

    Args:
        extra: metrics beyond `METRICS`; more can follow with `define`.
        max_series: label sets per metric. Further ones are added up in one series whose labels are all "other",
            so memory is bounded whatever names come.
    """

    def __init__(self, extra: Iterable[Metric] = (), *, max_series: int = 256) -> None:
        if max_series < 1:
            raise ConfigError(f"max_series={max_series} must be at least 1")
        self._max_series = max_series
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._included: list[Metrics] = []
        self._hooks: list[Callable[[], None]] = []
        for metric in (*METRICS, *extra):
            self.define(metric)
        renew_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def define(self, metric: Metric) -> None:
        """Make a metric known. Defining the same one again is fine.

        Raises:
            ConfigError: another metric has this name.
        """
        with self._lock:
            known = self._families.get(metric.name)
            if known is None:
                self._families[metric.name] = _Family(metric)
            elif known.metric != metric:
                raise ConfigError(f"metric {metric.name!r} is defined differently already")

    def include(self, other: Metrics) -> None:
        """Show the numbers of `other` in `snapshot` as well: what a backend counts for itself, and goes on counting
        there. Label sets must differ, so who counts in both uses other names of backends.

        Raises:
            ConfigError: a metric is defined differently there.
        """
        with other._lock:
            theirs = [family.metric for family in other._families.values()]
        for metric in theirs:
            self.define(metric)
        with self._lock:
            self._included.append(other)

    def before_snapshot(self, hook: Callable[[], None]) -> None:
        """Have `hook` called before each snapshot, in the thread that takes it: it brings gauges up to date, so that
        nothing needs to be done while nobody looks. A `KVStoreError` of its means that there is nothing new."""
        with self._lock:
            self._hooks.append(hook)

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add `amount` ≥ 0 to a counter. Raises `ConfigError` for an unknown name, kind or number of labels."""
        self._update(((name, labels, amount),), "counter")

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge. Raises: as `add`."""
        self._update(((name, labels, value),), "gauge")

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Count `value` in a histogram. Raises: as `add`."""
        self._update(((name, labels, value),), "histogram")

    def update(self, changes: Iterable[Change]) -> None:
        """Several changes in one lock hop. Raises: as `add`; those before the bad one are kept."""
        self._update(changes, None)

    def _update(self, changes: Iterable[Change], kind: str | None) -> None:
        with self._lock:
            for name, labels, value in changes:
                cell = self._series(name, labels)
                found = self._families[name].metric.kind
                if (
                    (kind is not None and kind != found)
                    or not math.isfinite(value)
                    or (found == "counter" and value < 0)
                ):
                    raise ConfigError(f"{name} is a {found}; it cannot take {value} as a {kind or found}")
                if found == "histogram":
                    cell.observe(value)
                elif found == "gauge":
                    cell.value = value
                else:
                    cell.value += value

    def _series(self, name: str, labels: tuple[str, ...]) -> Any:
        """The cell of one label set, made if need be. Called with the lock held."""
        family = self._families.get(name)
        if family is None:
            raise ConfigError(f"unknown metric {name!r}; define it first")
        cell = family.series.get(labels)
        if cell is not None:
            return cell
        if len(labels) != len(family.metric.labels):
            raise ConfigError(f"{name} has the labels {family.metric.labels}, not {len(labels)} of them")
        other = (OTHER,) * len(labels)
        if len(family.series) >= self._max_series and labels != other:
            if name != "kvstore_metrics_overflow_total":
                self._series("kvstore_metrics_overflow_total", (name,)).value += 1
            return self._series(name, other)
        cell = _Histogram(family.metric.buckets) if family.metric.kind == "histogram" else _Cell()
        return family.series.setdefault(labels, cell)

    def observer(self, name: str, *labels: str) -> Callable[[float], None]:
        """What counts values in one series of a histogram: a handle that looks nothing up. Raises: as `add`."""
        with self._lock:
            cell = self._series(name, labels)
        if not isinstance(cell, _Histogram):
            raise ConfigError(f"{name} is no histogram")
        counts, bounds, find = cell.counts, cell.bounds, bisect.bisect_left

        def observe(value: float) -> None:
            with self._lock:
                counts[find(bounds, value)] += 1
                cell.total += value

        return observe

    def operation(self, backend: str, operation: str) -> OperationMeter:
        """What counts the calls of one operation of one backend: a handle that looks nothing up."""
        return OperationMeter(self, backend, operation)

    def value(self, name: str, *labels: str) -> float:
        """The value of a counter or gauge, or the number of values of a histogram; 0 if there is none yet."""
        with self._lock:
            family = self._families.get(name)
            cell = family.series.get(labels) if family is not None else None
            if cell is None:
                return 0
            return sum(cell.counts) if isinstance(cell, _Histogram) else float(cell.value)

    def snapshot(self) -> dict[str, Any]:
        """Everything, consistent within itself (and what is included within itself), as plain JSON-ready data. Metrics
        without a series are left out.

        Returns:
            `{name: {"kind", "doc", "labels": [...], "series": [{"labels": {name: value}, ...}]}}`; a series holds
            "value", or "count" (of all values), "sum" and "buckets": [[inclusive upper bound, cumulative count], …].
        """
        for hook in tuple(self._hooks):
            try:
                hook()
            except KVStoreError:  # closed, most likely: what it counted last stays
                pass
            except Exception:
                logger.exception("a hook of the metrics failed")
        with self._lock:
            found = {name: self._family_snapshot(family) for name, family in self._families.items() if family.series}
            included = [*self._included]
        for other in included:
            for name, family in other.snapshot().items():
                known = found.setdefault(name, family)
                if known is not family:
                    known["series"] += family["series"]
        return found

    @staticmethod
    def _family_snapshot(family: _Family) -> dict[str, Any]:
        metric = family.metric
        series = [
            {"labels": dict(zip(metric.labels, labels, strict=True)), **cell.snapshot()}
            for labels, cell in family.series.items()
        ]
        return {"kind": metric.kind, "doc": metric.doc, "labels": list(metric.labels), "series": series}


class OperationMeter:
    """Counts the calls of one operation of one backend. `record` takes the lock once per batch.

    The status and error series appear when the first item of that kind does.
    """

    def __init__(self, metrics: Metrics, backend: str, operation: str) -> None:
        self._metrics = metrics
        self._labels = (backend, operation)
        with metrics._lock:
            cell = metrics._series
            self._calls = cell("kvstore_backend_calls_total", self._labels)
            self._bytes = cell("kvstore_backend_bytes_total", self._labels)
            self._transfer_bytes = cell("kvstore_backend_transfer_bytes_total", self._labels)
            self._transfer_seconds = cell("kvstore_backend_transfer_seconds_total", self._labels)
            self._seconds = cell("kvstore_backend_call_seconds", self._labels)
            self._sizes = cell("kvstore_backend_call_bytes", self._labels)
        self._statuses: dict[str, _Cell] = {}

    def record(
        self,
        seconds: float,
        *,
        statuses: Mapping[str, int],
        nbytes: int = 0,
        errors: Mapping[str, int] | None = None,
    ) -> None:
        """One finished call.

        Args:
            seconds: how long it took.
            statuses: number of items by status ("ok", "miss", "exists", "error").
            nbytes: bytes moved for the items that are OK.
            errors: number of items by class of error; if there are any, the call does not count for throughput.
        """
        with self._metrics._lock:
            self._calls.value += 1
            self._seconds.observe(seconds)
            for status, count in statuses.items():
                cell = self._statuses.get(status)
                if cell is None:
                    cell = self._metrics._series("kvstore_backend_items_total", (*self._labels, status))
                    self._statuses[status] = cell
                cell.value += count
            if nbytes:
                self._bytes.value += nbytes
                self._sizes.observe(nbytes)
            if errors:
                for name, count in errors.items():
                    self._metrics._series("kvstore_backend_errors_total", (*self._labels, name)).value += count
            elif nbytes:
                self._transfer_bytes.value += nbytes
                self._transfer_seconds.value += seconds

    def record_outcomes(self, seconds: float, outcomes: Sequence[Outcome], *, moves_bytes: bool) -> tuple[int, int]:
        """`record` for a batch.

        Args:
            moves_bytes: `nbytes` of an outcome is what was moved (get, put), not what is stored there (stat).

        Returns:
            Bytes moved, and number of failed items.
        """
        total = len(outcomes)
        kinds = [outcome.status for outcome in outcomes]
        if kinds.count(Status.OK) == total:
            nbytes = sum([outcome.nbytes for outcome in outcomes]) if moves_bytes else 0
            self.record(seconds, statuses={"ok": total} if total else {}, nbytes=nbytes)
            return nbytes, 0
        statuses = {status.value: count for status in Status if (count := kinds.count(status))}
        nbytes = sum(outcome.nbytes for outcome in outcomes if outcome.ok) if moves_bytes else 0
        errors: dict[str, int] = {}
        for outcome in outcomes:
            if outcome.status is Status.ERROR:
                name = error_class(outcome.error) if outcome.error is not None else "KVStoreError"
                errors[name] = errors.get(name, 0) + 1
        self.record(seconds, statuses=statuses, nbytes=nbytes, errors=errors)
        return nbytes, statuses.get("error", 0)
