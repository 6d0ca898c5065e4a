"""What each metric in CloudWatch is computed from. docs/metrics.md has the table; here are its formulas.

Nothing is made up: what no endpoint tells is left out, and an alarm on it has no data. So is a rate of an interval in
which nothing was asked for, and what makes no sense: below 0, no number, more than 100 % of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .cloudwatch_gpu import Gpu
from .cloudwatch_scrape import MOST, Interval, quantile

__all__ = ["NAMESPACES", "Datum", "compute"]

TIERS, RAG, CACHEGEN, LMCACHE = NAMESPACES = ("CachedAttention/Tiers", "CacheBlend/RAG", "CacheGen", "LMCache")

_TIER_NAMES = (("CPU", "memory"), ("SSD", "disk"), ("Remote", "remote"))
_TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "kvstore_request_ttft_seconds")


class Datum(NamedTuple):
    """One number for CloudWatch.

    Attributes:
        values: one, or one for each GPU: CloudWatch then has mean and maximum.
        unit: of CloudWatch's.
        source: what it was computed from, for people.
    """

    namespace: str
    name: str
    values: Sequence[float]
    unit: str
    source: str


def compute(interval: Interval, gpus: Sequence[Gpu] = ()) -> list[Datum]:
    """All metrics that the numbers of one interval give.

    Args:
        gpus: of this host, if they were asked.
    """
    found = [*_tiers(interval), *_rag(interval), *_cachegen(interval, gpus), *_lmcache(interval)]
    return [datum for datum in found if all(0 <= value <= MOST for value in datum.values)]


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else min(100.0, 100.0 * part / whole)


def _datum(namespace: str, name: str, value: float | None, unit: str, source: str) -> list[Datum]:
    return [] if value is None else [Datum(namespace, name, (value,), unit, source)]


def _device_rate(interval: Interval) -> list[Datum]:
    asked, hits = interval.sum("vllm:prefix_cache_queries_total"), interval.sum("vllm:prefix_cache_hits_total")
    source = "vllm:prefix_cache_hits / vllm:prefix_cache_queries (tokens)"
    return _datum(TIERS, "GPUCacheHitRate", _percent(hits, asked), "Percent", source)


class _Hits(NamedTuple):
    """Hits by tier, and everything that was asked for."""

    by_tier: Mapping[str, float]
    asked: float
    source: str


def _records(interval: Interval) -> _Hits | None:
    """Hits as a node tells them of its tiers; without a node, as stores do: an engine's reads from a node would be
    counted twice. Misses as stores tell them, who know what was asked for and why; without stores, as a node does."""
    node, store = interval.has("kvstore_node_tier_hits_total"), interval.has("kvstore_batch_seconds_count")
    if not node and not store:
        return None
    name, label = ("kvstore_node_tier_hits_total", "tier") if node else ("kvstore_hit_records_total", "medium")
    source = name.removesuffix("_total")
    terms: list[tuple[str, dict[str, str]]] = [
        ("kvstore_lookup_records_total", {"result": "miss"}), ("kvstore_missed_records_total", {}),
    ]  # fmt: skip
    if not store:
        terms = [("kvstore_node_records_total", {"event": event}) for event in ("misses", "absent")]
    missed = sum(interval.sum(each, **labels) or 0.0 for each, labels in terms)
    by_tier = {tier: found for _, tier in _TIER_NAMES if (found := interval.sum(name, **{label: tier})) is not None}
    return _Hits(by_tier, sum(by_tier.values()) + missed, f"{source} / all records asked for")


def _tiers(interval: Interval) -> list[Datum]:
    data = _device_rate(interval)
    hits = _records(interval)
    if hits is not None:
        for shown, tier in _TIER_NAMES:
            rate = _percent(hits.by_tier.get(tier), hits.asked)
            data += _datum(TIERS, f"{shown}CacheHitRate", rate, "Percent", f"{hits.source} ({tier})")
    return data


def _histogram(interval: Interval, names: Sequence[str]) -> str | None:
    """The first histogram that got values."""
    return next((name for name in names if interval.sum(f"{name}_count")), None)


def _rag(interval: Interval) -> list[Datum]:
    data: list[Datum] = []
    ttft = _histogram(interval, _TTFT)
    if ttft is not None:
        p95 = quantile(interval.buckets(ttft), 0.95)
        data += _datum(RAG, "TTFT_P95", None if p95 is None else 1e3 * p95, "Milliseconds", f"{ttft}, 95 %")
    hits, misses = (interval.sum("kvstore_request_documents_total", result=each) for each in ("hit", "miss"))
    if hits is not None and misses is not None:
        rate = _percent(hits, hits + misses)
        data += _datum(RAG, "CacheHitRate", rate, "Percent", "kvstore_request_documents")
    computed, given = (interval.sum("kvstore_blend_tokens_total", what=each) for each in ("computed", "input"))
    if computed is not None and given:
        data += _datum(RAG, "RecomputeRatio", computed / given, "None", "kvstore_blend_tokens: computed / input")
    return data


def _cachegen(interval: Interval, gpus: Sequence[Gpu]) -> list[Datum]:
    data: list[Datum] = []
    ttft = _histogram(interval, _TTFT)
    if ttft is not None:
        total, count = interval.sum(f"{ttft}_sum"), interval.sum(f"{ttft}_count")
        if total is not None and count:
            data += _datum(CACHEGEN, "TTFT", 1e3 * total / count, "Milliseconds", f"{ttft}, mean")
    raw, stored = interval.sum("kvstore_codec_raw_bytes_total"), interval.sum("kvstore_codec_stored_bytes_total")
    if raw and stored:
        data += _datum(CACHEGEN, "CompressionRatio", raw / stored, "None", "kvstore_codec: raw / stored bytes")
    for name, pick in _GPU:
        known, source = _dcgm(interval, name), "DCGM exporter"
        if not known:
            known, source = [value for gpu in gpus if (value := pick(gpu)) is not None], "nvidia-smi"
        known = [value for value in known if 0 <= value <= 100]
        if known:
            data.append(Datum(CACHEGEN, name, known, "Percent", source))
    return data


_GPU: Sequence[tuple[str, Callable[[Gpu], float | None]]] = (
    ("GPUMemoryUtilization", lambda gpu: gpu.memory_percent),
    ("GPUUtilization", lambda gpu: gpu.percent),
)


def _dcgm(interval: Interval, name: str) -> list[float]:
    """One value per GPU from NVIDIA's exporter; none if it was not scraped."""
    if name == "GPUUtilization":
        return interval.values("DCGM_FI_DEV_GPU_UTIL")
    free = interval.by_labels("DCGM_FI_DEV_FB_FREE")
    found: list[float] = []
    for labels, used in interval.by_labels("DCGM_FI_DEV_FB_USED").items():
        for one, rest in zip(used, free.get(labels, ()), strict=False):
            if one + rest > 0:
                found.append(100.0 * one / (one + rest))
    return found


def _lmcache(interval: Interval) -> list[Datum]:
    """Prefixes: of prompts' tokens if the engine counts them, else of records."""
    asked = interval.sum("vllm:external_prefix_cache_queries_total")
    saved = interval.sum("vllm:external_prefix_cache_hits_total")
    source = "vllm:external_prefix_cache (tokens)"
    rate = _percent(saved, asked)
    if asked is None:
        hits = _records(interval)
        if hits is not None:
            rate = _percent(sum(hits.by_tier.values()), hits.asked)
            source = hits.source
    saved_source = "vllm:external_prefix_cache_hits"
    if saved is None:  # a node knows records, not tokens
        saved, saved_source = interval.sum("kvstore_hit_tokens_total"), "kvstore_hit_tokens"
    return [
        *_datum(LMCACHE, "CacheHitRate", rate, "Percent", source),
        *_datum(LMCACHE, "TokensSaved", saved, "Count", saved_source),
    ]
