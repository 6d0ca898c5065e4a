"""What the connector counts, in vLLM's log line and on its /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["KVStoreStats", "make_metrics"]

COUNTERS = {
    "lookups": "Lookups of prompts.",
    "lookup_pending": "Times that the scheduler was told to ask again, since a lookup was under way.",
    "lookup_hit_tokens": "Tokens that were found, beyond those that the engine had.",
    "failed_tokens": "Tokens that were found, could not be loaded, and were computed.",
    "loads": "Loads of requests.",
    "loads_failed": "Loads of which some or all could not be had.",
    "load_tokens": "Tokens loaded.",
    "load_bytes": "Bytes loaded into pages.",
    "load_seconds": "Seconds from the beginning of loads to their end.",
    "wait_seconds": "Seconds that steps waited for layers.",
    "awaited": "Requests whose prefill another engine was said to compute.",
    "arrived_chunks": "Chunks of those, loaded as they came.",
    "prefills_lost": "Requests of those of which not all chunks came, or not in time; the rest was computed here.",
    "failed_blocks": "Blocks that could not be loaded.",
    "save_chunks": "Chunks stored.",
    "save_bytes": "Bytes stored.",
    "save_dropped": "Chunks that were not stored: no room in the write buffer, or no backend took them.",
}


@dataclass
class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counters since the last report."""

    def reset(self) -> None:
        """Nothing counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Add another report to this one."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not any(self.data.values())


class _Metrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `vllm:kvstore_…_total`, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        engines: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in engines.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report."""
        for name, value in transfer_stats_data.items():
            if value > 0 and name in self._counters:
                self._counters[name][engine_idx].inc(value)


def make_metrics(vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> Any:
    """The connector's metrics for vLLM's /metrics."""
    return _Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
