"""What a node counts, as a source for `exposition` and `History`.

    source = node_source(node.stats, instance.usage)
    exposition(source)

A node counts plain integers (`kvstore_backends.node_server.NodeServer.stats`); nothing is done for metrics until
somebody looks. The core does not import the node: what is needed of it is these two functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvstore.errors import ClosedError
from kvstore.metrics import OTHER, Metric

from .prometheus import Snapshot, Source

__all__ = ["MOST_NAMESPACES", "NODE_METRICS", "Usage", "node_source"]

_NS = ("namespace",)
_TIER = ("namespace", "tier")

NODE_METRICS = {metric.name: metric for metric in (
    Metric("kvstore_node_connections", "gauge", "Connections that are open."),
    Metric("kvstore_node_connections_total", "counter", "Connections by how their handshake ended.", ("result",)),
    Metric("kvstore_node_transport_requests_total", "counter", "Requests by transport.", ("transport",)),
    Metric("kvstore_node_transport_bytes_total", "counter", "Bytes of bodies by transport, in and out.",
           ("transport", "way")),
    Metric("kvstore_node_meta_bytes", "gauge", "Memory that long metas of requests take."),
    Metric("kvstore_node_sessions", "gauge", "Connections that asked for something."),
    Metric("kvstore_node_listings", "gauge", "Listings that are half read."),
    Metric("kvstore_node_records_total", "counter",
           "Records by what happened to them: hits, misses, puts, exists, evicted, …", ("namespace", "event")),
    Metric("kvstore_node_bytes_total", "counter", "Bytes of records received (in) and sent (out).",
           ("namespace", "way")),
    Metric("kvstore_node_requests_total", "counter",
           "Requests that could not be served as usual: busy, late, abandoned.", ("namespace", "event")),
    Metric("kvstore_node_held_bytes", "gauge", "Memory that clients hold: answers on their way, writes under way.",
           _NS),
    Metric("kvstore_node_waiting_requests", "gauge", "Requests that wait for leave.", _NS),
    Metric("kvstore_node_announced_jobs", "gauge", "Jobs of engines that were announced and not begun.", _NS),
    Metric("kvstore_node_backlog_bytes", "gauge", "Bytes that wait to be written below the memory.", _NS),
    Metric("kvstore_node_prefill_saved_seconds_total", "counter",
           "Seconds of prefill that hits saved, by the node's estimate of what a record saves."),
    Metric("kvstore_node_tier_hits_total", "counter", "Records read from a tier.", _TIER),
    Metric("kvstore_node_tier_evictions_total", "counter", "Records that left a tier for want of room.", _TIER),
    Metric("kvstore_node_tier_used_bytes", "gauge", "Bytes of the records in a tier.", _TIER),
    Metric("kvstore_node_tier_capacity_bytes", "gauge", "What a tier can hold, if it is bounded.", _TIER),
    Metric("kvstore_node_tier_records", "gauge", "Records in a tier, if they are counted.", _TIER),
    Metric("kvstore_node_tier_pinned_records", "gauge", "Records that are pinned.", _TIER),
)}  # fmt: skip

MOST_NAMESPACES = 256
"""Namespaces that have series of their own; what further ones count is added up under `OTHER`."""

_BYTES = {"bytes_in": "in", "bytes_out": "out"}
_REQUESTS = ("busy", "late", "abandoned")
_GAUGES = {
    "held": "kvstore_node_held_bytes",
    "waiting": "kvstore_node_waiting_requests",
    "waiting_jobs": "kvstore_node_announced_jobs",
    "disk_backlog": "kvstore_node_backlog_bytes",
}
_NOT_COUNTED = ("records", "nbytes", "capacity", "in_use")  # of the memory tier; `usage` has them


class Usage(Protocol):
    """What is read of a `kvstore.control.instance.TierUsage`."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def used(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def pinned(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def evicted(self) -> int: ...


def node_source(
    stats: Callable[[], Mapping[str, Any]], usage: Callable[[], Iterable[Usage]], *, prefill_per_record: float = 0.0
) -> Source:
    """A source over one node. Once the node is closed it shows nothing.

    Args:
        stats: as `NodeServer.stats`.
        usage: the tiers of all namespaces now, as `Instance.usage`.
        prefill_per_record: seconds of prefill that a hit saves: a node knows neither tokens nor engines. 0: not known,
            and seconds saved are not counted.
    """

    def snapshot() -> Snapshot:
        found = _Families()
        try:
            now = stats()
            names = {name: name or "default" for name in itertools.islice(now["namespaces"], MOST_NAMESPACES)}
            _of_stats(found, now, names)
            hits = 0
            for tier in usage():
                _of_tier(found, tier, names.get(tier.namespace, OTHER))
                hits += tier.hits
            if prefill_per_record:
                found.add("kvstore_node_prefill_saved_seconds_total", hits * prefill_per_record)
        except ClosedError:
            return {}
        return found.families

    return snapshot


class _Families:
    """A snapshot under construction."""

    def __init__(self) -> None:
        self.families: dict[str, dict[str, Any]] = {}
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        metric = NODE_METRICS[name]
        family = self.families.setdefault(
            name, {"kind": metric.kind, "doc": metric.doc, "labels": list(metric.labels), "series": []}
        )
        known = self._known.get((name, *labels))
        if known is None:
            known = {"labels": dict(zip(metric.labels, labels, strict=True)), "value": 0}
            self._known[name, *labels] = known
            family["series"].append(known)
        known["value"] += value


def _of_stats(found: _Families, stats: Mapping[str, Any], names: Mapping[str, str]) -> None:
    found.add("kvstore_node_connections", stats["connections"])
    for result in ("accepted", "refused", "failed", "pushed_out"):
        found.add("kvstore_node_connections_total", stats[result], result)
    for transport, count in stats["requests"].items():
        found.add("kvstore_node_transport_requests_total", count, transport)
    for way, name in (("in", "received_bytes"), ("out", "sent_bytes")):
        for transport, count in stats[name].items():
            found.add("kvstore_node_transport_bytes_total", count, transport, way)
    found.add("kvstore_node_meta_bytes", stats["meta_bytes"])
    found.add("kvstore_node_sessions", stats["sessions"])
    found.add("kvstore_node_listings", stats["listings"])
    for name, space in stats["namespaces"].items():
        shown = names.get(name, OTHER)
        for what, value in space.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or what in _NOT_COUNTED:
                continue
            if what in _BYTES:
                found.add("kvstore_node_bytes_total", value, shown, _BYTES[what])
            elif what in _REQUESTS:
                found.add("kvstore_node_requests_total", value, shown, what)
            elif what in _GAUGES:
                found.add(_GAUGES[what], value, shown)
            else:
                found.add("kvstore_node_records_total", value, shown, what)


def _of_tier(found: _Families, tier: Usage, namespace: str) -> None:
    labels = (namespace, tier.name)
    found.add("kvstore_node_tier_hits_total", tier.hits, *labels)
    found.add("kvstore_node_tier_evictions_total", tier.evicted, *labels)
    found.add("kvstore_node_tier_used_bytes", tier.used, *labels)
    if tier.capacity > 0:
        found.add("kvstore_node_tier_capacity_bytes", tier.capacity, *labels)
    if tier.records >= 0:
        found.add("kvstore_node_tier_records", tier.records, *labels)
    found.add("kvstore_node_tier_pinned_records", tier.pinned, *labels)
