"""Alarms, dashboard and saved queries name what kvstore publishes and logs, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.terraform.support import MODULES, check, load, variables
from tests.terraform.test_root_config import resources

# What `kvstore cloudwatch` publishes, what the nodes' agent does, and what AWS itself has.
METRICS = {
    "CachedAttention/Tiers": {"GPUCacheHitRate", "CPUCacheHitRate", "SSDCacheHitRate", "RemoteCacheHitRate"},
    "CacheBlend/RAG": {"TTFT_P95", "CacheHitRate", "RecomputeRatio"},
    "CacheGen": {"TTFT", "CompressionRatio", "GPUMemoryUtilization", "GPUUtilization"},
    "LMCache": {"CacheHitRate", "TokensSaved"},
    "vLLM": {"vllm:kv_cache_usage_perc"},
    "AWS/ElastiCache": {"DatabaseMemoryUsagePercentage", "BytesUsedForCache"},
    "AWS/EFS": {"MeteredIOBytes", "PermittedThroughput", "PercentIOLimit"},
    "AWS/S3": {"5xxErrors"},
}
FIELDS = {
    "ttft_ms", "itl_ms", "recompute_ratio", "compression_ratio", "cache_size_bytes", "encoded_size_bytes",
    "tokens_saved", "input_tokens", "output_tokens", "model_name",
}  # fmt: skip
MARKERS = {"kv_cache_hit", "token_usage"}
QUERIES = sorted((MODULES / "observability" / "queries").glob("*.query"))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    saved = tmp_path_factory.mktemp("observability")
    options = (f"--var-file={variables('observability')}", f"--save={saved}")
    checked = check(MODULES / "observability", *options, steps=("init", "plan", "apply"))
    assert checked.code == 0, checked.said
    found: dict[str, Any] = load(saved / "state.json")
    return found


def test_alarms_watch_metrics_that_exist(state: dict[str, Any]) -> None:
    alarms = resources(state, "aws_cloudwatch_metric_alarm")
    assert len(alarms) == 9 + 1 + 2 + 2
    for alarm in alarms:
        metrics = [(alarm["namespace"], alarm["metric_name"])]
        if alarm["metric_query"]:
            metrics = [
                (q["metric"][0]["namespace"], q["metric"][0]["metric_name"])
                for q in alarm["metric_query"]
                if q["metric"]
            ]
            (answer,) = [q for q in alarm["metric_query"] if q["return_data"]]
            names = set(re.findall(r"[a-z]\w*", answer["expression"])) - {"PERIOD"}
            assert names == {q["id"] for q in alarm["metric_query"]} - {answer["id"]}
        for namespace, metric in metrics:
            assert metric in METRICS[namespace], alarm["alarm_name"]
        assert alarm["alarm_actions"] == alarm["ok_actions"] != []
        assert len(alarm["alarm_description"]) > 30


def test_dashboard_shows_metrics_that_exist(state: dict[str, Any]) -> None:
    (dashboard,) = resources(state, "aws_cloudwatch_dashboard")
    widgets = json.loads(dashboard["dashboard_body"])["widgets"]
    shown: dict[str, set[str]] = {}
    places = set()
    for widget in widgets:
        assert 0 <= widget["x"] <= 24 - widget["width"]
        places.add((widget["x"], widget["y"]))
        for namespace, metric, *dimensions in widget["properties"].get("metrics", []):
            assert metric in METRICS[namespace]
            assert len(dimensions) % 2 == 0
            shown.setdefault(namespace, set()).add(metric)
    assert len(places) == len(widgets), "widgets lie on each other"
    for namespace in ("CachedAttention/Tiers", "CacheBlend/RAG", "CacheGen", "LMCache"):
        assert shown[namespace] == METRICS[namespace]
    (log,) = [w for w in widgets if w["type"] == "log"]
    assert log["properties"]["query"].startswith("SOURCE '/kv-test/engine' | SOURCE '/kv-test/node' | filter")


def test_queries_are_saved_as_the_files_are(state: dict[str, Any]) -> None:
    saved = {q["name"]: q["query_string"] for q in resources(state, "aws_cloudwatch_query_definition")}
    assert saved == {f"kv-test/{path.stem}": path.read_text() for path in QUERIES}


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.stem)
def test_queries_read_fields_that_are_logged(path: Path) -> None:
    text = re.sub(r"^#.*$", "", path.read_text(), flags=re.M)
    markers = set(re.findall(r"@message like /([^/]+)/", text))
    assert markers <= MARKERS
    text = re.sub(r"@message like /[^/]+/", "", text)
    named = set(re.findall(r"\bas (\w+)", text))
    words = set(re.findall(r"[a-z][a-z0-9_]*", text)) - named
    language = {
        "filter",
        "stats",
        "sort",
        "by",
        "as",
        "desc",
        "sum",
        "avg",
        "max",
        "count",
        "pct",
        "stddev",
        "bin",
        "ispresent",
        "h",
        "m",
    }
    assert words - language <= FIELDS, words - language - FIELDS
    assert words & FIELDS or markers, "it reads nothing"
    # Every command is one of the language, and each stage follows a bar.
    for stage in text.strip().split("\n"):
        assert re.match(r"(\| )?(filter|stats|sort) ", stage) or not stage.strip(), stage


def test_traces_are_sampled_and_grouped(state: dict[str, Any]) -> None:
    (rule,) = resources(state, "aws_xray_sampling_rule")
    assert (rule["service_name"], rule["reservoir_size"], rule["fixed_rate"]) == ("kvstore", 1, 0.05)
    groups = {g["group_name"]: g["filter_expression"] for g in resources(state, "aws_xray_group")}
    assert set(groups) == {"kv-test-all", "kv-test-misses", "kv-test-slow"}
    annotations = set(re.findall(r"annotation\.(\w+)", " ".join(groups.values())))
    assert annotations <= {"doc_count", "cache_hit", "prompt_length", "chunk_size", "operation", "model"}
