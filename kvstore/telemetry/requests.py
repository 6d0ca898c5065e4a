"""What is known of one request of an engine when it has ended. Storage knows chunks and bytes; times to first token,
input and output tokens are known by an engine, a proxy in front of it, or `kvstore.stream`. Whoever knows calls
`report_request` once per request; it becomes metrics, a log line with the marker `token_usage`, and a span.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.metrics import SECOND_BUCKETS, Metric, Metrics

from .logs import TOKEN_USAGE, RequestInfo, current_request, log_event

if TYPE_CHECKING:
    from .tracing import Tracer

__all__ = ["REQUEST_METRICS", "RequestReport", "report_request"]

TTFT_BUCKETS = (*SECOND_BUCKETS[6:], 20.0, 40.0, 80.0)
"""Upper bounds in seconds: 1 ms to 80 s."""

REQUEST_METRICS = (
    Metric("kvstore_request_ttft_seconds", "histogram", "Time to first token of requests.", (), TTFT_BUCKETS),
    Metric("kvstore_request_itl_seconds", "histogram", "Mean time between tokens of requests.", (), SECOND_BUCKETS),
    Metric("kvstore_request_tokens_total", "counter", "Tokens of requests: input, output, or saved (input tokens that "
           "were not computed).", ("what",)),
    Metric("kvstore_requests_total", "counter", "Requests that were reported."),
    Metric("kvstore_request_documents_total", "counter", "Documents of requests, by whether their KV was had.",
           ("result",)),
    Metric("kvstore_blend_tokens_total", "counter", "Input tokens of requests made of documents, and those of them "
           "that were computed.", ("what",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One finished request. What is None is not known, and is left out everywhere.

    Attributes:
        id: of the request; "": that of `request_scope`.
        model: its model's name; "": that of `request_scope`.
        input_tokens: tokens of the prompt.
        output_tokens: tokens that were made.
        tokens_saved: input tokens whose KV came from storage, so that they were not computed; None: it is not known.
        ttft_s: seconds from its arrival to the first token.
        itl_s: mean seconds between its tokens.
        doc_count: documents that the prompt was made of (retrieval); None: it was not.
        doc_hits: those of them whose KV was had.
        hit_chunks: chunks that were had.
        cache_size_bytes: bytes of KV that were had, as the engine uses them.
        encoded_size_bytes: bytes that were moved for that.
        started_s: when it arrived, seconds since the epoch; None: `ttft_s` ago.
    """

    id: str = ""
    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    tokens_saved: int | None = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    doc_count: int | None = None
    doc_hits: int | None = None
    hit_chunks: int | None = None
    cache_size_bytes: int | None = None
    encoded_size_bytes: int | None = None
    started_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= (self.tokens_saved or 0) <= self.input_tokens or self.output_tokens < 0:
            raise ConfigError(
                f"a request of {self.input_tokens} input and {self.output_tokens} output tokens cannot have saved "
                f"{self.tokens_saved}"
            )
        if self.doc_count is not None and not 0 <= (self.doc_hits or 0) <= self.doc_count:
            raise ConfigError(f"{self.doc_hits} of {self.doc_count} documents cannot have been had")
        for name, value in (("ttft_s", self.ttft_s), ("itl_s", self.itl_s)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value!r} is no time in seconds")

    @property
    def recompute_ratio(self) -> float | None:
        """Part of the input tokens that was computed; None without input, or if that is not known."""
        if not self.input_tokens or self.tokens_saved is None:
            return None
        return (self.input_tokens - self.tokens_saved) / self.input_tokens

    @property
    def compression_ratio(self) -> float | None:
        """Bytes of KV for each byte that was moved; None if either is not known."""
        if not self.cache_size_bytes or not self.encoded_size_bytes:
            return None
        return self.cache_size_bytes / self.encoded_size_bytes

    def fields(self) -> dict[str, Any]:
        """The fields of its log line, without what is not known."""
        ratio, compression = self.recompute_ratio, self.compression_ratio
        fields = {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "tokens_saved": self.tokens_saved,
            "ttft_ms": None if self.ttft_s is None else round(1000 * self.ttft_s, 3),
            "itl_ms": None if self.itl_s is None else round(1000 * self.itl_s, 3),
            "recompute_ratio": None if ratio is None else round(ratio, 6),
            "compression_ratio": None if compression is None else round(compression, 4),
            "cache_size_bytes": self.cache_size_bytes,
            "encoded_size_bytes": self.encoded_size_bytes,
            "hit_chunks": self.hit_chunks,
            "doc_count": self.doc_count,
            "model_name": self.model or None,
            "request_id": self.id or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def report_request(report: RequestReport, *, metrics: Metrics | None = None, tracer: Tracer | None = None) -> None:
    """Tell of a finished request: a log line, and what is counted in `metrics` and traced by `tracer`, if they are
    given (of a store: `store.metrics`, `store.tracer`)."""
    scope = current_request()
    request = RequestInfo(
        report.id or scope.id, report.model or scope.model, report.input_tokens or scope.prompt_length,
        scope.doc_count if report.doc_count is None else report.doc_count,
    )  # fmt: skip
    log_event(TOKEN_USAGE, report.fields(), request=request)
    if metrics is not None:
        _count(report, metrics)
    if tracer is not None:
        started = report.started_s if report.started_s is not None else time.time() - (report.ttft_s or 0.0)
        hit = None if report.tokens_saved is None else report.tokens_saved > 0
        tracer.request(report.fields(), request, started, cache_hit=hit)


def _count(report: RequestReport, metrics: Metrics) -> None:
    for metric in REQUEST_METRICS:
        metrics.define(metric)
    changes: list[tuple[str, tuple[str, ...], float]] = [
        ("kvstore_requests_total", (), 1),
        ("kvstore_request_tokens_total", ("input",), report.input_tokens),
        ("kvstore_request_tokens_total", ("output",), report.output_tokens),
    ]
    saved = report.tokens_saved
    if saved is not None:
        changes.append(("kvstore_request_tokens_total", ("saved",), saved))
    if report.ttft_s is not None:
        changes.append(("kvstore_request_ttft_seconds", (), report.ttft_s))
    if report.itl_s is not None:
        changes.append(("kvstore_request_itl_seconds", (), report.itl_s))
    if report.doc_count is not None:
        hits = report.doc_hits or 0
        changes += [
            ("kvstore_request_documents_total", ("hit",), hits),
            ("kvstore_request_documents_total", ("miss",), report.doc_count - hits),
        ]
    if report.doc_count is not None and saved is not None:
        changes += [
            ("kvstore_blend_tokens_total", ("input",), report.input_tokens),
            ("kvstore_blend_tokens_total", ("computed",), report.input_tokens - saved),
        ]
    metrics.update(changes)
