"""docs/metrics.md names every metric that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.metrics import METRICS
from kvstore.telemetry.logs import CACHE_HIT, CACHE_STORE, TOKEN_USAGE
from kvstore.telemetry.node import NODE_METRICS
from kvstore.telemetry.prometheus import LMCACHE_NAMES
from kvstore.telemetry.requests import REQUEST_METRICS
from kvstore.telemetry.tracing import ANNOTATIONS, METADATA
from kvstore.tiers.backend import TIER_METRICS
from kvstore_cli.cloudwatch_metrics import NAMESPACES

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_metric_is_there_and_no_other() -> None:
    known = {metric.name for metric in (*METRICS, *REQUEST_METRICS, *NODE_METRICS.values(), *TIER_METRICS)}
    assert set(re.findall(r"`(kvstore_\w+)", TEXT)) == known


def test_names_of_lmcache() -> None:
    assert set(re.findall(r"`(lmcache:\w+)`", TEXT)) == set(LMCACHE_NAMES)


def test_annotations_metadata_markers_and_namespaces() -> None:
    for name in (*ANNOTATIONS, *METADATA, CACHE_HIT, CACHE_STORE, TOKEN_USAGE, *NAMESPACES):
        assert f"`{name}`" in TEXT, name
