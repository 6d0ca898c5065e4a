"""`PageData`: what the page shows, as one object of plain JSON. The page draws it and computes nothing of its own.

    node        name, address, unix, version, started (epoch s), state ("ready", "draining", "degraded"), problems
    tiers       the fastest first, over all namespaces: name, url, used, capacity (0: unknown), records (-1: unknown),
                pinned, hits, evicted, state (of its breaker), read_bytes_s and write_bytes_s (null: not known yet)
    engines     connections of clients; null: not known
    hour        start (epoch s of the first minute), and 60 values each, the last one of the minute under way, null
                where nobody counted: asked, hits, saved_s, bytes (read), errors. null: there is no node here
    window_s    seconds that `operations` and `errors` are about
    operations  the slowest first: backend, operation, calls, p50_s, p99_s, p99_over (more than p99_s), bytes_s
    errors      the most first: backend, operation, error, count
    breakers    backend, side, state ("closed", "half-open", "open"), refused
    nodes       name, address, state ("ready", "draining", "loading", "lost"), self, heard_s, used, capacity, records,
                load
    namespaces  the fullest ones: name, and tiers: {name: {used, capacity, records}}
    more_nodes, more_namespaces   how many there are besides these

Rates are over the last seconds in which somebody looked, `operations` and `errors` over the last hour or since the
process started.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.control.instance import Health, Instance, InstanceInfo, TierUsage
from kvstore.control.messages import Worker
from kvstore.errors import TransientError
from kvstore.telemetry import History, Minute, Source
from kvstore.telemetry.prometheus import merged

__all__ = ["MINUTES", "PageData"]

MINUTES = 60
_RATE_S = 10.0  # what flows is averaged over this
_RATE_STEP_S = 1.0
_KEEP_S = 3600.0
_KEEP_STEP_S = 60.0
_MOST_ROWS = 12
_MOST_NODES, _MOST_NAMESPACES = 200, 50  # a page that is asked for every two seconds
_HEALTH_S = 1.0
_STATES = ("closed", "half-open", "open")

_MEMORY = "memory"
_HISTOGRAMS = {
    "kvstore_backend_call_seconds": "",
    "kvstore_batch_seconds": "store",
    "kvstore_node_request_seconds": "node",
    "kvstore_control_request_seconds": "http",
}
"""Histograms that are operations, and what they are called where they have no label `backend`."""
_ERRORS = {
    "kvstore_backend_errors_total": {},
    "kvstore_deadline_misses_total": {"error": "deadline missed"},
    "kvstore_node_records_total": {"backend": "node"},
}
"""Counters that are errors, and labels that they lack."""
_NODE_ERRORS = frozenset(("failed", "quarantined", "disk_errors", "disk_failed"))

_FLOWS = (
    ("kvstore_node_bytes_total", None, "way", ("out", "in")),
    ("kvstore_tier_events_total", "tier", "event", ("hit_bytes", "stored_bytes")),
    ("kvstore_backend_bytes_total", "backend", "operation", ("get", "put")),
)
"""Counters of bytes: of the memory what clients got and put, of other tiers what the hierarchy says or, without one,
their backends. The label that names the tier, and the one that tells reads from writes."""
_SPEED = ("kvstore_backend_transfer_bytes_total", "kvstore_backend_transfer_seconds_total")
_COUNTERS = (*_ERRORS, *(name for name, *_ in _FLOWS), *_SPEED)
_NOTHING: Mapping[str, Any] = {"series": ()}

_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Sample(NamedTuple):
    """Counters and histograms at one time: numbers, and (bounds, cumulative counts, count)."""

    at: float
    numbers: Mapping[_Key, float]
    histograms: Mapping[_Key, tuple[Sequence[float], Sequence[int], int]]


class PageData:
    """Makes the object, and keeps what it needs of the past: a minute's numbers 60 times, at most.

    Safe from any thread. `tick` it every few seconds if the last hour is to be known before anybody looks.

    Args:
        instance: the node; None: there is none here (a controller).
        metrics: what is counted here.
        history: of the same.
        clock, monotonic: seconds since the epoch, and of `time.monotonic()`.
    """

    def __init__(
        self,
        instance: Instance | None,
        metrics: Source,
        history: History,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._metrics = metrics
        self._history = history
        self._clock = clock
        self._monotonic = monotonic
        self._started = clock()
        self._lock = threading.Lock()
        first = _Sample(monotonic(), {}, {})  # before anything was counted
        self._minutes: deque[_Sample] = deque([first])
        self._recent: deque[_Sample] = deque()

    def tick(self) -> None:
        """Remember the numbers of now, if a minute is over since they were remembered last."""
        with self._lock:
            due = self._monotonic() - self._minutes[-1].at >= _KEEP_STEP_S
        if due:
            self._remember(self._sample(merged(self._metrics)))

    def __call__(self, workers: Sequence[Worker] = ()) -> dict[str, Any]:
        """The object that the module's docstring describes.

        Args:
            workers: all instances, where somebody knows them; else the instance alone is shown.
        """
        found = merged(self._metrics)
        sample = self._sample(found)
        recent, before = self._remember(sample)
        now = self._clock()
        if self._instance is not None:
            info: InstanceInfo | None = self._instance.info()
            usage = self._instance.usage()
            health = self._health(self._instance)
        else:
            info, health = None, Health(ok=True, ready=True, load=0.0)
            usage = [each for worker in workers for each in worker.usage]
        aliases = _aliases(usage)
        breakers = _breakers(found, aliases)
        names = info.tiers if info is not None else _names(usage)
        nodes, namespaces = _nodes(info, health, usage, workers), _namespaces(usage)
        return {
            "now": now,
            "node": self._node(info, health),
            "engines": _gauge(found, "kvstore_node_connections"),
            "tiers": [_tier(name, usage, aliases, breakers, recent, sample) for name in names],
            "hour": None if info is None else _hour(self._history.rows(), now),
            "window_s": sample.at - before.at,
            "operations": _operations(before, sample, aliases),
            "errors": _errors(before, sample, aliases),
            "breakers": breakers,
            "nodes": nodes[:_MOST_NODES],
            "more_nodes": max(0, len(nodes) - _MOST_NODES),
            "namespaces": namespaces[:_MOST_NAMESPACES],
            "more_namespaces": max(0, len(namespaces) - _MOST_NAMESPACES),
        }

    def _sample(self, found: Mapping[str, Mapping[str, Any]]) -> _Sample:
        """What is compared later, no more: it is kept 60 times. Namespaces, of which there may be many, are added."""
        numbers: dict[_Key, float] = {}
        histograms: dict[_Key, tuple[Sequence[float], Sequence[int], int]] = {}
        for name in _COUNTERS:
            for series in found.get(name, _NOTHING)["series"]:
                labels = series["labels"]
                if name == "kvstore_node_records_total" and labels["event"] not in _NODE_ERRORS:
                    continue
                key = (name, tuple(item for item in labels.items() if item[0] != "namespace"))
                numbers[key] = numbers.get(key, 0.0) + series["value"]
        for name in _HISTOGRAMS:
            for series in found.get(name, _NOTHING)["series"]:
                bounds, counts = zip(*series["buckets"], strict=True)
                histograms[name, tuple(series["labels"].items())] = (bounds, counts, series["count"])
        return _Sample(self._monotonic(), numbers, histograms)

    def _remember(self, sample: _Sample) -> tuple[_Sample | None, _Sample]:
        """The samples to compare this one with: of some seconds ago (None: there is none yet), and of an hour ago."""
        with self._lock:
            if sample.at - self._minutes[-1].at >= _KEEP_STEP_S:
                self._minutes.append(sample)
            while len(self._minutes) > 1 and sample.at - self._minutes[1].at >= _KEEP_S:
                self._minutes.popleft()
            recent = self._recent
            while recent and sample.at - recent[0].at > _RATE_S:
                recent.popleft()
            then = recent[0] if recent and sample.at - recent[0].at >= _RATE_STEP_S / 2 else None
            if not recent or sample.at - recent[-1].at >= _RATE_STEP_S:
                recent.append(sample)
            return then, self._minutes[0]

    def _health(self, instance: Instance) -> Health:
        """How it is. One that does not say so in time is shown, too."""
        try:
            return instance.health(deadline=self._monotonic() + _HEALTH_S)
        except TransientError as error:
            return Health(ok=True, ready=False, load=1.0, problems=[error.message])

    def _node(self, info: InstanceInfo | None, health: Health) -> dict[str, Any]:
        problems = [*health.problems]
        state = "ready" if health.ready and not problems else "degraded" if health.ready else "draining"
        if info is None:
            from kvstore import __version__

            return {
                "name": "controller", "address": "", "unix": "", "version": __version__, "started": self._started,
                "state": state, "problems": problems,
            }  # fmt: skip
        return {
            "name": info.name, "address": info.address, "unix": info.unix, "version": info.version,
            "started": info.started, "state": state if health.ok else "down", "problems": problems,
        }  # fmt: skip


def _names(usage: Iterable[TierUsage]) -> list[str]:
    return [*dict.fromkeys(each.name for each in usage)]


def _gauge(found: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    series = found.get(name, _NOTHING)["series"]
    return sum(each["value"] for each in series) if series else None


def _added(usage: Iterable[TierUsage]) -> dict[str, Any]:
    """Several tiers as one. What one of them does not know, the whole does not know either."""
    usage = [*usage]
    records = [each.records for each in usage]
    bounded = bool(usage) and all(each.capacity for each in usage)
    return {
        "used": sum(each.used for each in usage),
        "capacity": sum(each.capacity for each in usage) if bounded else 0,
        "records": -1 if -1 in records else sum(records),
    }


def _aliases(usage: Iterable[TierUsage]) -> dict[str, str]:
    """What metrics call the backends of tiers, and the tiers' names: a backend's label is its URL without options, or
    "file:/path"."""
    found = {}
    for each in usage:
        base = each.url.partition("?")[0]
        if base:
            found[base] = found[base.replace("://", ":", 1)] = each.name
    return found


def _tier(
    name: str,
    usage: Sequence[TierUsage],
    aliases: Mapping[str, str],
    breakers: Sequence[Mapping[str, Any]],
    then: _Sample | None,
    now: _Sample,
) -> dict[str, Any]:
    mine = [each for each in usage if each.name == name]
    urls = [*dict.fromkeys(each.url for each in mine if each.url)]
    states = [breaker["state"] for breaker in breakers if breaker["backend"] == name]
    return {
        "name": name,
        "url": urls[0] if len(urls) == 1 else f"{len(urls)} places" if urls else "",
        **_added(mine),
        "pinned": sum(each.pinned for each in mine),
        "hits": sum(each.hits for each in mine),
        "evicted": sum(each.evicted for each in mine),
        "state": max(states, key=_STATES.index, default="closed"),
        "read_bytes_s": _rate(then, now, name, aliases, 0),
        "write_bytes_s": _rate(then, now, name, aliases, 1),
    }


def _rate(then: _Sample | None, now: _Sample, tier: str, aliases: Mapping[str, str], direction: int) -> float | None:
    """Bytes a second out of a tier (direction 0) or into it (1); None: not counted, or not for long enough."""
    if then is None:
        return None
    for metric, place, way, values in _FLOWS:
        if (place is None) != (tier == _MEMORY):
            continue
        counted = [
            key
            for key in now.numbers
            if key[0] == metric and (place is None or aliases.get(dict(key[1])[place]) == tier)
        ]
        if counted:  # what has moved nothing in one direction yet has no such series
            grown = (_grown(then, now, key) for key in counted if (way, values[direction]) in key[1])
            return sum(grown) / (now.at - then.at)
    return None


def _grown(then: _Sample, now: _Sample, key: _Key) -> float:
    """How much a counter grew. One that became smaller began anew."""
    value, before = now.numbers[key], then.numbers.get(key, 0.0)
    return value - before if value >= before else value


def _hour(rows: Sequence[Minute], now: float) -> dict[str, Any]:
    """The rows of a history on a grid of minutes. One that is longer (nobody ticked) is spread over its minutes."""
    columns: dict[str, list[float | None]] = {
        name: [None] * MINUTES for name in ("asked", "hits", "saved_s", "bytes", "errors")
    }
    last = MINUTES - 1
    for number, row in enumerate(reversed(rows)):
        long = 1 if number == 0 else max(1, round(row.seconds / 60))
        values = {
            "asked": row.hits + row.misses, "hits": row.hits, "saved_s": row.saved_seconds, "bytes": row.read_bytes,
            "errors": row.errors,
        }  # fmt: skip
        for place in range(max(0, last - long + 1), last + 1):
            for name, value in values.items():
                columns[name][place] = value / long
        last -= long
        if last < 0:
            break
    start = rows[-1].start if rows else now
    return {"start": start - 60.0 * (MINUTES - 1), **columns}


def _operations(then: _Sample, now: _Sample, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, (bounds, counts, count) in now.histograms.items():
        name, labels = key[0], dict(key[1])
        _, before, began = then.histograms.get(key, (bounds, [0] * len(counts), 0))
        if began > count:  # it began anew
            before, began = [0] * len(counts), 0
        calls = count - began
        if not calls or not labels.get("route", "/v1").startswith("/v1"):  # nobody waits for the page and the probes
            continue
        grown = [value - old for value, old in zip(counts, before, strict=True)]
        p50, _ = _quantile(bounds, grown, calls, 0.5)
        p99, over = _quantile(bounds, grown, calls, 0.99)
        backend = labels.get("backend", _HISTOGRAMS[name])
        backend = aliases.get(backend, backend)
        operation = labels.get("operation") or labels.get("route") or labels.get("request") or ""
        rows.append({
            "backend": backend, "operation": operation, "calls": calls, "p50_s": p50, "p99_s": p99, "p99_over": over,
            "bytes_s": _speed(then, now, key[1]) if name == "kvstore_backend_call_seconds" else 0.0,
        })  # fmt: skip
    rows.sort(key=lambda row: -row["p99_s"])
    return rows[:_MOST_ROWS]


def _speed(then: _Sample, now: _Sample, labels: tuple[tuple[str, str], ...]) -> float:
    """Bytes a second of the calls of an operation, 0 if it moved none."""
    nbytes, seconds = (
        _grown(then, now, (name, labels)) if (name, labels) in now.numbers else 0.0 for name in _SPEED
    )  # fmt: skip
    return nbytes / seconds if seconds > 0 else 0.0


def _quantile(bounds: Sequence[float], counts: Sequence[int], total: int, part: float) -> tuple[float, bool]:
    """A quantile of a histogram, as Prometheus' histogram_quantile has it: even within a bucket.

    Args:
        counts: cumulative, of the values up to each of `bounds`.

    Returns:
        the value; and whether it is more than that, since it lies behind the last bound.
    """
    rank = part * total
    place = bisect.bisect_left(counts, rank)
    if place == len(bounds):
        return float(bounds[-1]), True
    low, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0)
    inside = counts[place] - below
    return low + (bounds[place] - low) * ((rank - below) / inside if inside else 1.0), False


def _errors(then: _Sample, now: _Sample, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key in now.numbers:
        lacking = _ERRORS.get(key[0])
        if lacking is None:
            continue
        labels = {**lacking, **dict(key[1])}
        error = labels.get("error") or labels.get("event", "")
        count = _grown(then, now, key)
        if count:
            backend = labels.get("backend", "store")
            where = {"backend": aliases.get(backend, backend), "operation": labels.get("operation", "")}
            rows.append({**where, "error": error.replace("_", " "), "count": count})
    rows.sort(key=lambda row: -row["count"])
    return rows[:_MOST_ROWS]


def _breakers(found: Mapping[str, Mapping[str, Any]], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    refused: dict[str, float] = {}
    for series in found.get("kvstore_breaker_refused_total", _NOTHING)["series"]:
        backend = series["labels"]["backend"]
        refused[backend] = refused.get(backend, 0.0) + series["value"]
    rows = [
        {
            "backend": aliases.get(series["labels"]["backend"], series["labels"]["backend"]),
            "side": series["labels"]["side"],
            "state": _STATES[int(series["value"])], "refused": refused.get(series["labels"]["backend"], 0.0),
        }
        for series in found.get("kvstore_breaker_state", _NOTHING)["series"]
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-_STATES.index(row["state"]), row["backend"], row["side"]))


def _nodes(
    info: InstanceInfo | None, health: Health, usage: Sequence[TierUsage], workers: Sequence[Worker]
) -> list[dict[str, Any]]:
    rows = [
        {
            "name": worker.instance, "address": worker.address or worker.unix, "state": worker.state,
            "self": info is not None and worker.instance == info.name, "heard_s": worker.age_s,
            **_added(each for each in worker.usage if each.name == _MEMORY), "records": worker.chunks,
            "load": worker.load,
        }
        for worker in workers
    ]  # fmt: skip
    if info is not None and not any(row["self"] for row in rows):
        memory = _added(each for each in usage if each.name == _MEMORY)
        rows.insert(0, {
            "name": info.name, "address": info.address or info.unix, "state": "ready" if health.ready else "draining",
            "self": True, "heard_s": 0.0, **memory, "load": health.load,
        })  # fmt: skip
    if len(rows) > _MOST_NODES:  # those that somebody should look at
        rows.sort(key=lambda row: (not row["self"], row["state"] == "ready"))
    return rows


def _namespaces(usage: Iterable[TierUsage]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, list[TierUsage]]] = {}
    for each in usage:
        rows.setdefault(each.namespace, {}).setdefault(each.name, []).append(each)
    if len(rows) > _MOST_NAMESPACES:
        used = {name: sum(each.used for found in tiers.values() for each in found) for name, tiers in rows.items()}
        rows = dict(sorted(rows.items(), key=lambda row: -used[row[0]]))
    return [
        {"name": name, "tiers": {tier: _added(found) for tier, found in tiers.items()}} for name, tiers in rows.items()
    ]
