"""Spans: one per batch and lane, what they say, where they go, and what is left when tracing is off."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import kvstore
from kvstore import machinery
from kvstore.completion import CancelledError
from kvstore.config import load_config
from kvstore.errors import ConfigError, TransientError
from kvstore.record import opaque_spec
from kvstore.store import Item, Store, Want
from kvstore.telemetry import RequestReport, Tracer, open_tracer, report_request, request_scope
from kvstore.telemetry.logs import RequestInfo
from kvstore.telemetry.tracing import ANNOTATIONS, METADATA
from kvstore.testing import DictBackend, Fault, FaultyBackend

SPEC = opaque_spec(1000)


class Traced:
    """A store whose spans are kept."""

    def __init__(self, store: Store, exporter: InMemorySpanExporter) -> None:
        self.store = store
        self._exporter = exporter

    def spans(self) -> list[ReadableSpan]:
        """All that were begun, the oldest first. A batch's span ends just behind its result, in a thread of the
        store's."""
        assert self.store.tracer is not None
        end = time.monotonic() + 20
        while self.store.tracer.live and time.monotonic() < end:
            time.sleep(0.001)
        assert not self.store.tracer.live
        self.store.tracer._provider.force_flush()
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@contextlib.contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, *backends: Any, sampler: str = "always_on") -> Iterator[Traced]:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    exporter = InMemorySpanExporter()

    def opened(mode: str, *, chunk_size: int = 0) -> Tracer | None:
        return open_tracer(mode, chunk_size=chunk_size, exporter=exporter)

    monkeypatch.setattr(machinery, "open_tracer", opened)
    config = load_config("memory://", tracing="otlp", buffer_pool_bytes="4MiB")
    with Store(config, backends=backends or [DictBackend(name="b")]) as store:
        yield Traced(store, exporter)


def keys(count: int) -> list[Any]:
    return [kvstore.opaque_key(f"k{number}") for number in range(count)]


def items(names: Sequence[Any]) -> list[Item]:
    return [Item(key, SPEC.split(memoryview(bytes(1000))), SPEC) for key in names]


def wants(names: Sequence[Any]) -> list[Want]:
    return [Want(key, memoryview(bytearray(1000)), SPEC) for key in names]


def test_one_span_per_batch_and_lane_none_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch, DictBackend(name="b", lanes=2)) as found:
        names = keys(300)
        found.store.submit_put(items(names)).result()
        found.store.submit_get(wants(names)).result()
        (put,) = found.named("kvstore.put")
        (get,) = found.named("kvstore.get")
        for batch, lanes in ((put, found.named("b put")), (get, found.named("b get"))):
            assert 1 <= len(lanes) <= 2
            assert sum(attributes(lane)["items"] for lane in lanes) == 300
            assert sum(attributes(lane)["jobs"] for lane in lanes) >= len(lanes)
            for lane in lanes:
                assert lane.parent is not None
                assert batch.context is not None
                assert lane.parent.span_id == batch.context.span_id
                assert lane.kind is trace.SpanKind.CLIENT
                assert batch.start_time <= lane.start_time <= lane.end_time <= batch.end_time  # type: ignore[operator]
            assert batch.kind is trace.SpanKind.SERVER, "what X-Ray shows as a segment of its own"
            assert batch.parent is None


def test_annotations_and_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch) as found:
        names = keys(4)
        with request_scope("r-1", model="llama", prompt_length=900, doc_count=3):
            found.store.submit_put(items(names[:3])).result()
            found.store.submit_lookup(names).result()
            found.store.submit_get(wants(names)).result()
        found.store.submit_get(wants(names[3:])).result()
        shown = attributes(found.named("kvstore.get")[0])
        assert shown["aws.xray.annotations"] == ANNOTATIONS
        assert {name: shown[name] for name in ANNOTATIONS} == {
            "doc_count": 3, "cache_hit": True, "prompt_length": 900, "chunk_size": 256, "operation": "get",
            "model": "llama",
        }  # fmt: skip
        assert (shown["hit_chunks"], shown["cache_size_bytes"], shown["items"]) == (3, 3000, 4)
        assert shown["request_id"] == "r-1"
        miss = attributes(found.named("kvstore.get")[1])
        assert miss["cache_hit"] is False
        assert not {"model", "doc_count", "prompt_length", "request_id"} & set(miss), "nobody said"
        lookup = attributes(found.named("kvstore.lookup")[0])
        assert (lookup["cache_hit"], lookup["hit_chunks"]) == (True, 3)
        put = attributes(found.named("kvstore.put")[0])
        assert put["cache_size_bytes"] == 3 * SPEC.raw_bytes
        assert put["compressed_size_bytes"] == sum(map(len, _records(found)))


def _records(found: Traced) -> list[bytes]:
    backend: Any = found.store._machinery.targets[0].backend
    return [*backend.records.values()]


def test_a_request_that_is_reported_is_a_span_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch) as found:
        report = RequestReport(
            "r-7", "llama", input_tokens=100, output_tokens=9, tokens_saved=50, ttft_s=0.5, doc_count=2, hit_chunks=4,
            cache_size_bytes=3000, encoded_size_bytes=1000,
        )  # fmt: skip
        report_request(report, tracer=found.store.tracer)
        (span,) = found.named("kvstore.request")
        shown = attributes(span)
        assert {name: shown[name] for name in METADATA} == {
            "hit_chunks": 4, "cache_size_bytes": 3000, "compressed_size_bytes": 1000, "compression_ratio": 3.0,
            "ttft_ms": 500.0,
        }  # fmt: skip
        assert (shown["cache_hit"], shown["prompt_length"], shown["doc_count"]) == (True, 100, 2)
        assert 0.4e9 < span.end_time - span.start_time < 60e9  # type: ignore[operator]


def test_errors_deadlines_and_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FaultyBackend(DictBackend(name="b", lanes=1))
    with traced(monkeypatch, backend) as found:
        names = keys(1)
        found.store.submit_put(items(names)).result()
        backend.push(Fault.error(TransientError("down")), operation="get")
        found.store.submit_get(wants(names)).result()
        backend.push(Fault.hang(), operation="get")
        late = found.store.submit_get(wants(names), deadline=time.monotonic() + 0.05)
        late.result()
        backend.wait_hung()
        cancelled = found.store.submit_get(wants(names), deadline=time.monotonic() + 20)
        cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.result()
        backend.release()
        assert late.settled(20)
        said = [span.status.description for span in found.named("kvstore.get")]
        assert said == ["TransientError", "TransientError", "cancelled"]
        assert all(span.status.status_code is trace.StatusCode.ERROR for span in found.named("kvstore.get"))
        hung = found.named("b get")[1]
        assert hung.end_time is not None, "the lane that hung is shown until the batch gave up"


def test_a_batch_belongs_to_the_span_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TracerProvider().get_tracer("engine")
    with traced(monkeypatch, sampler="parentbased_always_off") as found:
        with engine.start_as_current_span("request") as span:
            found.store.submit_lookup(keys(1)).result()
        found.store.submit_lookup(keys(2)).result()  # begins a trace of its own, which is not sampled
        (lookup,) = found.named("kvstore.lookup")
        assert lookup.parent is not None
        assert lookup.parent.span_id == span.get_span_context().span_id
        assert len(found.spans()) == 2, "the batch and its lane"


def test_what_is_not_sampled_costs_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TracerProvider(sampler=ALWAYS_OFF).get_tracer("engine")
    with traced(monkeypatch, sampler="parentbased_always_on") as found:
        with engine.start_as_current_span("request"):
            found.store.submit_lookup(keys(1)).result()
        assert found.spans() == []
        assert found.store.tracer is not None
        assert not found.store.tracer.live


def test_by_default_one_trace_in_twenty_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    exporter = InMemorySpanExporter()
    tracer = open_tracer("otlp", exporter=exporter)
    assert tracer is not None
    monkeypatch.setattr("random.random", iter([0.0, 0.049, 0.05, 0.5, 0.9, 0.999]).__next__)
    made = [tracer.batch("get", 1, RequestInfo()) for _ in range(5)]
    assert [found is not None for found in made] == [True, True, False, False, False]
    with TracerProvider().get_tracer("engine").start_as_current_span("request"):
        assert tracer.batch("get", 1, RequestInfo()) is not None, "whoever traces sees all of his"
    for found in made[:2]:
        assert found is not None
        tracer.end_batch(found, {})
    tracer.close()
    assert len(exporter.get_finished_spans()) == 2


def test_tracing_is_off_by_default_and_imports_nothing() -> None:
    program = (
        "import sys, kvstore\n"
        "with kvstore.open_store('memory://?bytes=1MiB') as store:\n"
        "    store.put_many({'a': b'x'}); store.get_many(['a'])\n"
        "    assert store.tracer is None\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found & {'opentelemetry', 'prometheus_client', 'http'}, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_opentelemetry_a_hint_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstore\[tracing\]'"):
        kvstore.open_store("memory://?bytes=1MiB", tracing="otlp")


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError, match="jaeger"):
        open_tracer("jaeger")


class Collector(ThreadingHTTPServer):
    """An OTLP receiver: keeps what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
        with kvstore.open_store("memory://?bytes=1MiB", tracing="otlp", buffer_pool_bytes="1MiB") as store:
            store.put_many({"a": b"x"})  # closing sends what waits
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join(20)
    (path, body) = collector.requests[0]
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    facts = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert facts["service.name"] == "kvstore", "what X-Ray's groups and sampling rule ask for"
    spans = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert "kvstore.put" in spans
    assert any(name.endswith(" put") and name != "kvstore.put" for name in spans), spans


def test_the_service_has_the_name_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "team-a")
    tracer = open_tracer("otlp", exporter=InMemorySpanExporter())
    assert tracer is not None
    assert tracer._provider.resource.attributes["service.name"] == "team-a"
    tracer.close()


def test_a_collector_that_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    store = kvstore.open_store("memory://?bytes=1MiB", tracing="otlp", buffer_pool_bytes="1MiB")
    store.put_many({"a": b"x"})
    begin = time.monotonic()
    store.close(timeout=0.5)
    assert time.monotonic() - begin < 4, "OpenTelemetry's own shutdown takes longer"
