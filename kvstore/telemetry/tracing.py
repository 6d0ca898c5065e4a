"""Spans by OpenTelemetry: one for each batch that is asked of a store, below it one for each lane that worked for it,
and one for each request that is reported. None per key, none per job.

Off unless the option `tracing` is `otlp`; then spans go where OTEL_EXPORTER_OTLP_ENDPOINT says, under the name that
OTEL_SERVICE_NAME says (`kvstore` by default), sampled as OTEL_TRACES_SAMPLER says (`SAMPLED` by default): all of
OpenTelemetry's variables hold, since it is its own SDK that reads them. A batch's span is a child of the caller's span,
if there is one.

For AWS X-Ray, spans go through the OpenTelemetry collector. `aws.xray.annotations` names the attributes that X-Ray
indexes (`ANNOTATIONS`); the others become metadata. A batch is a span of kind server, which X-Ray shows as a segment of
the service `kvstore`; a lane's is of kind client, to the backend.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstore._version import __version__
from kvstore.errors import ConfigError

from .logs import RequestInfo

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from kvstore.scheduler import Job

__all__ = ["ANNOTATIONS", "METADATA", "SAMPLED", "BatchTrace", "Tracer", "open_tracer", "run_traced"]

ANNOTATIONS = ("doc_count", "cache_hit", "prompt_length", "chunk_size", "operation", "model")
"""Attributes that X-Ray indexes, so that traces can be found by them."""

METADATA = ("hit_chunks", "cache_size_bytes", "compressed_size_bytes", "compression_ratio", "ttft_ms")
"""Attributes that are shown with a trace."""

_INDEX = "aws.xray.annotations"
_FLUSH_S, _END_S = 2.0, 0.5

SAMPLED = 0.05
"""Part of the traces that begin here which is kept, unless OTEL_TRACES_SAMPLER says otherwise; a caller's trace is kept
if the caller keeps it. As in terraform's sampling rule."""


class LaneWork:
    """What one lane did for one batch: times in nanoseconds since the epoch; `end` is 0 while it is at it."""

    __slots__ = ("backend", "begin", "end", "items", "jobs", "operation")

    def __init__(self, backend: str, operation: str) -> None:
        self.backend = backend
        self.operation = operation
        self.begin = time.time_ns()
        self.end = self.items = self.jobs = 0


class BatchTrace:
    """The span of a batch, and what lanes did for it. A lane writes its own entry only; spans are made of them at the
    end, so that a job costs next to nothing.

    Attributes:
        lanes: (backend, thread) → what it did.
    """

    __slots__ = ("lanes", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.lanes: dict[tuple[str, int], LaneWork] = {}

    def enter(self, backend: str, thread: int, operation: str, items: int) -> LaneWork:
        """A lane begins a job for this batch."""
        work = self.lanes.get((backend, thread))
        if work is None:
            work = self.lanes[backend, thread] = LaneWork(backend, operation)
        work.end = 0
        work.jobs += 1
        work.items += items
        return work


def run_traced(backend: str, job: Job) -> None:
    """Run a job, and note for the batches that wait for it which lane did it, and when."""
    operation, items, traces = job.about()
    thread = threading.get_ident()
    works = [trace.enter(backend, thread, operation, items) for trace in traces]
    try:
        job.run()
    finally:
        if works:
            now = time.time_ns()
            for work in works:
                work.end = now


class Tracer:
    """Makes spans. Made by `open_tracer`.

    Args:
        exporter: where finished spans go, in the background.
        chunk_size: tokens of a chunk; an annotation.

    Attributes:
        live: traces of batches that have not ended: while there are none, lanes need not ask.
    """

    def __init__(self, exporter: SpanExporter, *, chunk_size: int = 0) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        own = {"service.version": __version__} if named else {"service.name": "kvstore", "service.version": __version__}
        told = "OTEL_TRACES_SAMPLER" in os.environ
        self._kept = 1.0 if told else SAMPLED
        sampler = None if told else ParentBased(ALWAYS_ON)
        self._provider = TracerProvider(resource=Resource.create(own), sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvstore", __version__)
        self._trace = trace
        self._exporter = exporter
        self.live: set[BatchTrace] = set()
        self._chunk_size = chunk_size

    def batch(self, operation: str, items: int, request: RequestInfo) -> BatchTrace | None:
        """The trace of a batch that begins; `end_batch` ends it. Its parent is the caller's span. None: it is not
        sampled."""
        if not self._keep():
            return None
        attributes = self._annotations(operation, request)
        attributes["items"] = items
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span(f"kvstore.{operation}", kind=kind, attributes=attributes)
        if not span.is_recording():
            return None
        trace = BatchTrace(span)
        self.live.add(trace)
        return trace

    def _keep(self) -> bool:
        """Whether to begin a span: not, for most traces that would begin here. Decided before anything is made for it:
        a span that is thrown away costs OpenTelemetry nearly what one costs that is kept."""
        return (
            self._kept >= 1
            or random.random() < self._kept
            or self._trace.get_current_span().get_span_context().is_valid
        )

    def _annotations(self, operation: str, request: RequestInfo) -> dict[str, Any]:
        attributes: dict[str, Any] = {"operation": operation, _INDEX: ANNOTATIONS}
        if self._chunk_size:
            attributes["chunk_size"] = self._chunk_size
        if request.model:
            attributes["model"] = request.model
        if request.prompt_length:
            attributes["prompt_length"] = request.prompt_length
        if request.doc_count:
            attributes["doc_count"] = request.doc_count
        if request.id:
            attributes["request_id"] = request.id
        return attributes

    def end_batch(self, trace: BatchTrace, facts: Mapping[str, Any], error: str = "") -> None:
        """A batch has ended.

        Args:
            facts: what came of it (`cache_hit`, `METADATA`, …); what is None is not known.
            error: why it failed as a whole, or the class of its first error; "": it did not.
        """
        span = trace.span
        for name, value in facts.items():
            if value is not None:
                span.set_attribute(name, value)
        if error:
            span.set_status(self._trace.StatusCode.ERROR, error)
        now = time.time_ns()
        context = self._trace.set_span_in_context(span)
        for work in list(trace.lanes.values()):
            attributes: dict[str, Any] = {
                "operation": work.operation, "backend": work.backend, "peer.service": work.backend,
                "items": work.items, "jobs": work.jobs, _INDEX: ("operation",),
            }  # fmt: skip
            lane = self._tracer.start_span(
                f"{work.backend} {work.operation}", context=context, kind=self._trace.SpanKind.CLIENT,
                attributes=attributes, start_time=work.begin,
            )  # fmt: skip
            lane.end(work.end or now)  # without an end it still runs: it has brought the last of the batch, or hangs
        span.end(now)
        self.live.discard(trace)

    def request(
        self, facts: Mapping[str, Any], request: RequestInfo, started: float, *, cache_hit: bool | None
    ) -> None:
        """The span of a whole request, which ends now.

        Args:
            facts: fields of its log line.
            started: seconds since the epoch.
            cache_hit: None: it is not known.
        """
        if not self._keep():
            return
        attributes = self._annotations("request", request)
        if cache_hit is not None:
            attributes["cache_hit"] = cache_hit
        known = {**facts, "compressed_size_bytes": facts.get("encoded_size_bytes")}
        for name in (*METADATA, "recompute_ratio", "tokens_saved", "input_tokens", "output_tokens"):
            if known.get(name) is not None:
                attributes[name] = known[name]
        span = self._tracer.start_span(
            "kvstore.request", kind=self._trace.SpanKind.SERVER, attributes=attributes, start_time=int(started * 1e9)
        )
        span.end(max(time.time_ns(), int(started * 1e9)))

    def close(self, timeout: float = _FLUSH_S) -> None:
        """Send what waits, for `timeout` seconds at most, and no longer than two: a collector that is gone holds
        nobody up."""
        ending = threading.Thread(target=self._provider.shutdown, name="kvstore-tracing-close", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter is about to end
            return
        ending.join(min(timeout, _FLUSH_S))
        if ending.is_alive():
            self._exporter.shutdown()  # ends its waiting for a further try
            ending.join(_END_S)


def open_tracer(mode: str, *, chunk_size: int = 0, exporter: SpanExporter | None = None) -> Tracer | None:
    """The tracer of the option `tracing`; None for "off".

    Args:
        exporter: instead of OTLP over HTTP to what OpenTelemetry's variables say; for tests and programs.

    Raises:
        ConfigError: an unknown mode, or OpenTelemetry is not installed.
    """
    if mode == "off":
        return None
    if mode != "otlp":
        raise ConfigError(f"option 'tracing': {mode!r} is not known; choices: off, otlp")
    try:
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        return Tracer(exporter, chunk_size=chunk_size)
    except ImportError as error:
        what = "tracing needs opentelemetry-sdk and its OTLP exporter: pip install 'kvstore[tracing]'"
        raise ConfigError(f"option 'tracing': {what}", cause=error) from error
