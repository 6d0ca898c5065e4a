"""Snapshots of `Metrics` as text for Prometheus, by `prometheus_client`.

    exposition(store.metrics)                 # what GET /metrics answers
    exposition(node.metrics, lmcache_names=True)

What several sources count under the same name and labels is added up; of a gauge the larger value counts. With
`lmcache_names` what means the same is given a second time under LMCache's name, for dashboards that exist already
(docs/metrics.md has the table); off by default, since each of these is a second name of one thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

__all__ = ["CONTENT_TYPE", "LMCACHE_NAMES", "Source", "exposition", "merged"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What `exposition` gives (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

Snapshot = Mapping[str, Mapping[str, Any]]
"""As `Metrics.snapshot` gives it."""

Source = Metrics | Callable[[], Snapshot]

LMCACHE_NAMES: Mapping[str, tuple[tuple[str, Mapping[str, str]], ...]] = {
    "lmcache:num_hit_tokens": (("kvstore_hit_tokens_total", {}),),
    "lmcache:num_remote_read_requests": (("kvstore_backend_calls_total", {"operation": "get"}),),
    "lmcache:num_remote_read_bytes": (("kvstore_backend_bytes_total", {"operation": "get"}),),
    "lmcache:num_remote_write_requests": (("kvstore_backend_calls_total", {"operation": "put"}),),
    "lmcache:num_remote_write_bytes": (("kvstore_backend_bytes_total", {"operation": "put"}),),
    "lmcache:get_blocking_failed_count": (("kvstore_missed_records_total", {"reason": "error"}),),
    "lmcache:put_failed_count": (("kvstore_put_records_total", {"result": "error"}),),
}
"""LMCache's name of a counter (`_total` goes behind) → what of ours is added up for it: (name, labels that count)."""


def merged(*sources: Source) -> dict[str, dict[str, Any]]:
    """The snapshots of all sources as one. Series with equal labels are added up (counters, histograms), or the larger
    one counts (gauges).

    Raises:
        ConfigError: two sources define one metric differently.
    """
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        snapshot = source.snapshot() if isinstance(source, Metrics) else source()
        for name, family in snapshot.items():
            known = found.setdefault(
                name, {"kind": family["kind"], "doc": family["doc"], "labels": family["labels"], "by": {}}
            )
            if (known["kind"], known["labels"]) != (family["kind"], family["labels"]):
                raise ConfigError(f"metric {name!r} is defined differently by two sources")
            for series in family["series"]:
                labels = tuple(series["labels"].values())
                before = known["by"].get(labels)
                known["by"][labels] = series if before is None else _added(known["kind"], before, series)
    for family in found.values():
        family["series"] = [*family.pop("by").values()]
    return found


def _added(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    if kind == "gauge":
        return one if one["value"] >= other["value"] else other
    if kind == "counter":
        return {**one, "value": one["value"] + other["value"]}
    buckets = [
        [bound, count + more] for (bound, count), (_, more) in zip(one["buckets"], other["buckets"], strict=True)
    ]
    return {**one, "count": one["count"] + other["count"], "sum": one["sum"] + other["sum"], "buckets": buckets}


def exposition(*sources: Source, lmcache_names: bool = False) -> bytes:
    """What all sources count, as Prometheus' text format (`CONTENT_TYPE`).

    Args:
        lmcache_names: also give what `LMCACHE_NAMES` lists under LMCache's names.

    Raises:
        ConfigError: `prometheus_client` is not installed, or two sources define one metric differently.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ConfigError("metrics need prometheus_client: pip install 'kvstore[control]'", cause=error) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(merged(*sources), lmcache_names))
    return generate_latest(registry)


class _Collector:
    """One snapshot, as `prometheus_client` wants it."""

    def __init__(self, found: Mapping[str, Mapping[str, Any]], lmcache_names: bool) -> None:
        self._found = found
        self._lmcache_names = lmcache_names

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, family in self._found.items():
            text, labels = family["doc"], family["labels"]
            if family["kind"] == "histogram":
                histogram = HistogramMetricFamily(name, text, labels=labels)
                for series in family["series"]:
                    buckets = [(_bound(bound), count) for bound, count in series["buckets"]]
                    buckets.append(("+Inf", series["count"]))
                    histogram.add_metric(_labels(series), buckets, series["sum"])
                yield histogram
                continue
            make = CounterMetricFamily if family["kind"] == "counter" else GaugeMetricFamily
            plain = make(name, text, labels=labels)
            for series in family["series"]:
                plain.add_metric(_labels(series), series["value"])
            yield plain
        if self._lmcache_names:
            for theirs, ours in LMCACHE_NAMES.items():
                values = [value for name, labels in ours for value in self._values(name, labels)]
                if values:
                    same = " and ".join(name for name, _ in ours)
                    yield CounterMetricFamily(theirs, f"LMCache's name of {same}.", value=math.fsum(values))

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float]:
        series = self._found.get(name, {"series": ()})["series"]
        return [each["value"] for each in series if labels.items() <= each["labels"].items()]


def _labels(series: Mapping[str, Any]) -> list[str]:
    """Values of labels; what UTF-8 cannot be (a path with other bytes in it) is shown as an escape."""
    return [value.encode("utf-8", "backslashreplace").decode() for value in series["labels"].values()]


def _bound(value: float) -> str:
    """Prometheus' spelling of a bound: as Python's, which is what its own client writes."""
    return repr(float(value))
