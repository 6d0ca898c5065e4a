"""What a blended prompt tells of itself: metrics for CloudWatch's `CacheBlend/RAG`, a line of the event log, a span."""

from __future__ import annotations

import io
import json

import pytest

pytest.importorskip("transformers")

from kvstore.telemetry import exposition, request_scope
from kvstore_cli.cloudwatch_metrics import CACHEGEN, RAG, compute
from kvstore_cli.cloudwatch_scrape import Interval, parse_metrics
from tests.unit.blend_world import DOCUMENTS, PREFIX, QUESTION, backend, blender, model, store, tokens
from tests.unit.test_telemetry_lines import events_to

UNKNOWN = tokens(77, 33)  # a document that nobody stored


def test_documents_recomputed_tokens_and_time_to_first_token() -> None:
    out = io.StringIO()
    with events_to(out), store(backend()) as opened:
        made = blender(model(), opened)
        made.precompute(DOCUMENTS[:3])
        assert made.blend([DOCUMENTS[0], QUESTION], ratio=0.0)[1].misses == 0
        before = parse_metrics(exposition(opened.metrics).decode())
        with request_scope("rag-1"):
            _, report = made.blend([DOCUMENTS[2], UNKNOWN, DOCUMENTS[0], QUESTION], ratio=0.25)
        interval = Interval()
        interval.add(before, parse_metrics(exposition(opened.metrics).decode()))
    length = len(PREFIX) + len(DOCUMENTS[2]) + len(UNKNOWN) + len(DOCUMENTS[0]) + len(QUESTION)
    assert (report.tokens, report.hits, report.misses) == (length, 3, 1)
    told = {(datum.namespace, datum.name): datum.values[0] for datum in compute(interval)}
    assert told[RAG, "CacheHitRate"] == 75.0, "the fixed prefix and two of three documents"
    assert told[RAG, "RecomputeRatio"] == pytest.approx(report.token_layers, abs=1 / length)
    assert 0.25 < told[RAG, "RecomputeRatio"] < 0.75
    assert told[CACHEGEN, "TTFT"] == pytest.approx(1e3 * report.total_s, rel=1e-3)
    assert told[RAG, "TTFT_P95"] > 0
    lines = map(json.loads, out.getvalue().splitlines())
    (line,) = [line for line in lines if line["message"] == "token_usage" and line.get("request_id") == "rag-1"]
    assert (line["doc_count"], line["hit_chunks"], line["input_tokens"]) == (4, 3, length)
    assert line["recompute_ratio"] == pytest.approx(report.token_layers, abs=1 / length)
    assert line["ttft_ms"] == pytest.approx(1e3 * report.total_s, rel=1e-3)
    assert line["cache_size_bytes"] == report.nbytes > 0
    assert line["model_name"]
