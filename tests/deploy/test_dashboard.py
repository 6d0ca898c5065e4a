"""The Grafana dashboard asks for metrics that there are, by labels that they have, in PromQL that parses."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from kvstore.control.guard import CONTROL_METRICS
from kvstore.metrics import METRICS, Metric
from kvstore.telemetry.node import NODE_METRICS

from .support import DEPLOY, child

_TARGET = {"job", "instance"}  # labels that Prometheus adds
KNOWN: dict[str, Metric] = {each.name: each for each in (*METRICS, *NODE_METRICS.values(), *CONTROL_METRICS)}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvstore.json").read_text())
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*") for expr in found]


def metric_of(name: str) -> Metric | None:
    metric = KNOWN.get(name)
    if metric is not None:
        return metric if metric.kind != "histogram" else None
    base, _, part = name.rpartition("_")
    metric = KNOWN.get(base)
    return metric if metric is not None and metric.kind == "histogram" and part in ("bucket", "sum", "count") else None


def test_every_query_is_of_metrics_and_labels_that_there_are(dashboard: dict[str, Any]) -> None:
    asked = queries(dashboard)
    assert len(asked) > 30
    for query, found in zip(asked, child("promql", queries=asked), strict=True):
        assert found["error"] is None, f"{query}: {found['error']}"
        assert found["selectors"]
        labels: set[str] = set()
        for name, matchers in found["selectors"]:
            metric = metric_of(name)
            assert metric is not None, f"{query}: no metric {name}"
            labels |= {*metric.labels, *(["le"] if metric.kind == "histogram" else [])}
            assert set(matchers) <= {*metric.labels, *_TARGET}, f"{query}: {name} has no label {matchers}"
            assert set(matchers) >= _TARGET, f"{query}: {name} is of all jobs"
        assert set(found["labels"]) <= labels | _TARGET, f"{query}: by {found['labels']}"


def test_counters_are_asked_for_how_they_grow(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        for name in re.findall(r"kvstore_[a-z0-9_]+", query):
            metric = metric_of(name)
            assert metric is not None
            growing = metric.kind != "gauge"
            assert bool(re.search(rf"(rate|increase)\({name}\{{", query)) == growing, query


def test_legends_name_labels_that_are_left(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            left = {
                label.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(",")
            }  # fmt: skip
            assert shown <= left, panel["title"]


def test_what_the_issue_names_is_on_it(dashboard: dict[str, Any]) -> None:
    asked = " ".join(queries(dashboard))
    for name in (
        "kvstore_backend_call_seconds_bucket", "kvstore_backend_errors_total", "kvstore_retries_total",
        "kvstore_breaker_state", "kvstore_hit_tokens_total", "kvstore_codec_saved_bytes_total",
        "kvstore_prefill_saved_seconds_total", "kvstore_pool_used_bytes", "kvstore_queue_jobs",
        "kvstore_deadline_misses_total", "kvstore_node_tier_used_bytes", "kvstore_node_records_total",
        "kvstore_control_request_seconds_bucket",
    ):  # fmt: skip
        assert name in asked


def test_panels_stand_side_by_side_and_say_what_they_show(dashboard: dict[str, Any]) -> None:
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for one, two in itertools.combinations(boxes, 2):
        apart = (
            one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
            or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        )  # fmt: skip
        assert apart
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(boxes)
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)
    for panel in panels(dashboard):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["type"] == "state-timeline" or panel["fieldConfig"]["defaults"]["unit"]
    assert {each["name"] for each in dashboard["templating"]["list"]} == {"datasource", "job", "instance"}
