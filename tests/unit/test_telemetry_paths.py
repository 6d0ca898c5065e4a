"""What traces, lines and metrics say of a request that the product itself brought: nobody hands in a number here."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore import machinery
from kvstore.keys import chunk_keys
from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.store import Item, Store, open_store
from kvstore.stream import Chunk, Policy, PrefillModel, Streamer, TextPart
from kvstore.telemetry import Tracer, exposition, open_tracer, request_scope
from kvstore.telemetry.tracing import ANNOTATIONS, METADATA
from kvstore_cli.cloudwatch import find_queries
from kvstore_cli.cloudwatch_metrics import compute
from kvstore_cli.cloudwatch_scrape import Interval, parse_metrics
from tests.unit.insights import run
from tests.unit.test_telemetry_lines import events_to

LAYOUT = KVLayout(2, 2, 16)
TOKENS = 64
SPEC = kv_spec(LAYOUT, "float16", TOKENS)


def stored(store: Store, count: int) -> list[Chunk]:
    """A prompt of `count` chunks, of which all but the last two are stored."""
    context = store.key_context(model="tiny-llama", layout=LAYOUT, dtype="float16")
    keys = chunk_keys(list(range(TOKENS * count)), context=context, chunk_size=TOKENS)
    rng = np.random.default_rng(0)
    raw = memoryview(rng.standard_normal(SPEC.raw_bytes // 2).astype(np.float16)).cast("B")
    items = [Item(key, SPEC.split(raw), SPEC) for key in keys[:-2]]
    assert all(outcome.ok for outcome in store.submit_put(items).result())
    return [Chunk(key, SPEC) for key in keys]


def test_a_streamed_prefix_has_every_annotation_and_all_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")

    def opened(mode: str, *, chunk_size: int = 0) -> Tracer | None:
        return open_tracer(mode, chunk_size=chunk_size, exporter=exporter)

    monkeypatch.setattr(machinery, "open_tracer", opened)
    out = io.StringIO()
    options: dict[str, Any] = {"remote_serde": "int8", "buffer_pool_bytes": "4MiB", "chunk_size": TOKENS}
    with events_to(out), open_store(f"file://{tmp_path}/kv", tracing="otlp", **options) as store:
        before = parse_metrics(exposition(store.metrics).decode())
        chunks = stored(store, 8)
        streamer = Streamer(store, prefill=PrefillModel(1.0), group_chunks=2, policy=Policy(text="time"))
        computed: list[TextPart] = []
        with (
            request_scope("req-1", model="tiny-llama", prompt_length=8 * TOKENS, doc_count=3),
            streamer.stream(chunks, recompute=computed.append, timeout=30.0) as stream,
        ):
            for _ in stream:
                pass
        assert sum(part.end - part.begin for part in computed) == 2 * TOKENS
        interval = Interval()
        interval.add(before, parse_metrics(exposition(store.metrics).decode()))
        assert store.tracer is not None
        end = time.monotonic() + 20
        while store.tracer.live and time.monotonic() < end:
            time.sleep(0.001)
        store.tracer._provider.force_flush()
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(dict(span.attributes or {}))
    (request,) = spans["kvstore.request"]
    assert set(ANNOTATIONS) | set(METADATA) <= set(request), "of one request, from one place"
    assert {name: request[name] for name in ANNOTATIONS} == {
        "doc_count": 3, "cache_hit": True, "prompt_length": 8 * TOKENS, "chunk_size": TOKENS, "operation": "request",
        "model": "tiny-llama",
    }  # fmt: skip
    assert (request["hit_chunks"], request["cache_size_bytes"]) == (6, 6 * SPEC.raw_bytes)
    assert request["compression_ratio"] == pytest.approx(6 * SPEC.raw_bytes / request["compressed_size_bytes"], 1e-3)
    assert 1 < request["compression_ratio"] < 3
    assert 0 < request["ttft_ms"] < 30_000
    assert request["recompute_ratio"] == pytest.approx(0.25)
    # What lanes and batches did for it says the same.
    gets = [found for found in spans["kvstore.get"] if found.get("hit_chunks")]
    assert sum(found["hit_chunks"] for found in gets) == 6
    assert {found["request_id"] for found in gets} == {"req-1"}
    assert {found["model"] for found in gets} == {"tiny-llama"}
    (put,) = spans["kvstore.put"]
    assert put["compressed_size_bytes"] < put["cache_size_bytes"] == 6 * SPEC.raw_bytes
    assert put["model"] == "tiny-llama", "of the last key context"

    # The same, as lines: what the saved queries read is there.
    lines = out.getvalue().splitlines()
    (usage,) = [line for line in map(json.loads, lines) if line["message"] == "token_usage"]
    assert usage["ttft_ms"] == request["ttft_ms"]
    assert (usage["input_tokens"], usage["tokens_saved"], usage["request_id"]) == (8 * TOKENS, 6 * TOKENS, "req-1")
    queries = {name: path.read_text(encoding="utf-8") for name, path in find_queries().items()}
    (row,) = run(queries["ttft_and_recompute"], lines)
    assert (row["ttft_p95"], row["recompute"]) == (usage["ttft_ms"], 0.25)
    (row,) = run(queries["token_use_per_hour"], lines)
    assert (row["model_name"], row["input"], row["saved"]) == ("tiny-llama", 8 * TOKENS, 6 * TOKENS)
    (row,) = run(queries["hits_and_tokens_saved"], lines)
    assert row["saved"] == 6 * TOKENS
    (row,) = run(queries["compression_per_hour"], lines)
    assert 1 < row["ratio"] < 3

    # And as CloudWatch's metrics.
    told = {datum.name: datum.values[0] for datum in compute(interval)}
    assert told["TokensSaved"] == 6 * TOKENS
    assert told["SSDCacheHitRate"] == pytest.approx(100 * 6 / 8)
    assert 1 < told["CompressionRatio"] < 3
    assert told["TTFT"] == pytest.approx(usage["ttft_ms"], abs=0.01)
    assert "TTFT_P95" in told
