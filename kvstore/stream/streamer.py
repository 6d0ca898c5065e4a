"""`Streamer`: what an engine calls. Plans with `planner`, keeps to `course`, reads through the store.

    streamer = Streamer(store, prefill=PrefillModel.fit(samples))        # one per link, shared by all requests
    with streamer.stream(chunks, recompute=compute, slo_s=0.5, new_tokens=64) as stream:
        for group in stream:                     # each time a group is there, or finer; `compute` is called in between
            ...                                  # copy group.views into the cache
    stream.report                                # what came of it

It has no thread of its own. Transfers are begun and planned in the callbacks of the store and in the thread that
iterates; records are decoded in the store's lanes while the next ones come; `recompute` is called in the thread that
iterates.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.metrics import Metric
from kvstore.prefetch.plan import Chunk
from kvstore.targets import flat_bytes
from kvstore.telemetry.logs import current_request
from kvstore.telemetry.requests import RequestReport, report_request

from .course import Course, Report
from .estimates import LinkShare, PrefillModel
from .shapes import Shape
from .stream import ReadyGroup, Stream, TextPart
from .terms import ABSENT, COMPUTED, Group, Policy

if TYPE_CHECKING:
    from kvstore.record import Header
    from kvstore.store import Store

__all__ = ["GROUP_CHUNKS", "Chunk", "ReadyGroup", "Stream", "Streamer", "TextPart"]

GROUP_CHUNKS = 6
"""Chunks of a stream group: 1,536 tokens of 256-token chunks, as in CacheGen."""

METRICS = (
    Metric("kvstore_stream_requests_total", "counter", "Streams that came to their first token, or to nothing."),
    Metric("kvstore_stream_violations_total", "counter", "Streams beyond their SLO, or with something missing."),
    Metric("kvstore_stream_groups_total", "counter", "Groups by the level they had for the first token, or computed.",
           ("level",)),
    Metric("kvstore_stream_bytes_total", "counter", "Bytes of transfers that served, or were given up: loaded, wasted.",
           ("result",)),
    Metric("kvstore_stream_tokens_total", "counter", "Tokens by where they came from: loaded, computed.", ("source",)),
    Metric("kvstore_stream_seconds_total", "counter",
           "Seconds saved, or lost, against computing all of a prompt, by the prefill model.", ("result",)),
)  # fmt: skip
"""What a streamer counts in its store's metrics."""

_HEADS_SHARE = 0.2  # of the SLO, or of all time, at most, to find out how large the levels are


class Streamer:
    """Streams prefixes from one store over one link. Thread-safe; one for all requests, since they share the link.

    Args:
        store: an open store. It is not closed.
        link: what is known of the link, for requests of several streamers over the same one; None: its own.
        prefill: how long the engine takes to compute tokens. None: nothing is computed, only loaded.
        decode_s_per_token: seconds to decode a token's KV, per level; see `Speeds`. Without it decoding counts only as
            far as it makes transfers slower.
        policy: how to weigh time against quality; a request may have its own.
        group_chunks: chunks of a stream group.

    Raises:
        ConfigError: no store, or no chunks in a group.
    """

    def __init__(
        self,
        store: Store,
        *,
        link: LinkShare | None = None,
        prefill: PrefillModel | None = None,
        decode_s_per_token: Sequence[float] = (),
        policy: Policy | None = None,
        group_chunks: int = GROUP_CHUNKS,
    ) -> None:
        if not hasattr(store, "submit_get"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        if group_chunks < 1:
            raise ConfigError(f"a group of {group_chunks} chunks is none")
        self.store = store
        self.link = link or LinkShare()
        self.prefill = prefill
        self.policy = policy or Policy()
        self.group_chunks = group_chunks
        self._decode = tuple(decode_s_per_token)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._levels: Counter[int] = Counter()
        self._saved_s = 0.0
        self._metrics = store.metrics
        for metric in METRICS:
            self._metrics.define(metric)
        self._shapes: dict[tuple[int, ...], Shape] = {}

    def stream(
        self,
        chunks: Sequence[Chunk],
        *,
        recompute: Callable[[TextPart], object] | None = None,
        slo_s: float | None = None,
        timeout: float | None = None,
        new_tokens: int = 0,
        policy: Policy | None = None,
        into: Sequence[memoryview] | None = None,
    ) -> Stream:
        """Begin to bring the KV of a prompt's chunks. Its time runs from here.

        Args:
            chunks: in order, from the first token of the prompt; each with `kv_spec`. Those that turn out not to be
                stored are computed.
            recompute: computes a group's KV into the caller's own cache, synchronously. It is called in the thread that
                iterates, once all groups before it were given. None: what cannot be loaded ends the prefix.
            slo_s: seconds to the first token; None: as fast as possible, at the finest level that the policy allows.
            timeout: seconds after which nothing more is waited for; None: the store's `blocking_timeout`.
            new_tokens: tokens behind the chunks: computing them takes part of the SLO.
            policy: other than the streamer's.
            into: memory for each chunk, as long as its raw bytes; None: memory of the store's pool.

        Raises:
            ConfigError: chunks without tokens, memory that does not fit, `recompute` without a prefill model.
            ClosedError: the store is closed.
        """
        if not chunks or any(not chunk.spec.tokens for chunk in chunks):
            raise ConfigError("a stream needs chunks, each with a spec that kv_spec made")
        if into is not None and [len(flat_bytes(view, writable=True)) for view in into] != [
            chunk.spec.raw_bytes for chunk in chunks
        ]:
            raise ConfigError(f"{len(into)} destinations do not fit the {len(chunks)} chunks")
        if recompute is not None and self.prefill is None:
            raise ConfigError("recompute= needs the streamer's prefill=: how long it takes; see PrefillModel.fit")
        begun = time.monotonic()
        seconds = self.store.config.blocking_timeout if timeout is None else timeout
        if (slo_s is not None and not slo_s > 0) or math.isnan(seconds) or new_tokens < 0:
            raise ConfigError(f"slo_s={slo_s}, timeout={timeout}, new_tokens={new_tokens} make no sense")
        patience = _HEADS_SHARE * min(seconds, math.inf if slo_s is None else slo_s)
        shape = self._shape(chunks, begun + patience)
        groups: list[Group] = []
        parts: list[TextPart] = []
        at = 0
        for first in range(0, len(chunks), self.group_chunks):
            some = range(first, min(first + self.group_chunks, len(chunks)))
            tokens = sum(chunks[i].spec.tokens for i in some)
            groups.append(shape.group(at, tokens, sum(chunks[i].spec.raw_bytes for i in some)))
            parts.append(TextPart(len(parts), at, at + tokens, some))
            at += tokens
        course = Course(
            groups,
            self.link,
            prefill=self.prefill if recompute is not None else None,
            decode_s_per_token=self._decode,
            slo_s=slo_s,
            deadline_s=seconds,
            new_tokens=new_tokens,
            policy=(policy or self.policy).capped(self.store.config.codec_level),
        )
        course.begin(begun)
        with self._lock:
            self._counts["requests"] += 1
        return Stream(self, course, list(chunks), parts, recompute, begun + seconds, into)

    def _shape(self, chunks: Sequence[Chunk], deadline: float) -> Shape:
        """How large the levels of such records are: known from others, or read from the header of one or two. It is
        the first that is heard of the link, too."""
        with self._lock:
            known = self._shapes.get(_name(chunks[0]))
        if known is None:
            some = [chunks[0]] if len(chunks) == 1 else [chunks[0], chunks[-1]]
            asked = time.monotonic()
            heads = self.store.submit_heads([chunk.key for chunk in some], deadline=deadline).result()
            found = next(((head, chunk) for head, chunk in zip(heads, some, strict=True) if head is not None), None)
            if found is None:  # maybe others are there; their headers will tell when they come
                return Shape.guess(self.store.codec)
            self.link.answered(time.monotonic() - asked)
            known = self.learn(found[1], found[0])
        return known

    def learn(self, chunk: Chunk, header: Header) -> Shape:
        """How large the levels of records like this one are: the last that was read tells."""
        shape = Shape.of(header, chunk.spec.raw_bytes, self.store.codec)
        with self._lock:
            self._shapes[_name(chunk)] = shape
        return shape

    def _ended(self, report: Report, loaded: Sequence[int]) -> None:
        """A stream has ended. `loaded`: raw bytes of each chunk that came from the store."""
        with self._lock:
            counts = self._counts
            counts["violations"] += report.violated
            counts["loaded_bytes"] += report.loaded_bytes
            counts["wasted_bytes"] += report.wasted_bytes
            counts["loaded_tokens"] += report.loaded_tokens
            counts["computed_tokens"] += report.computed_tokens
            counts["failed_groups"] += report.failed
            counts["plans"] += report.plans
            levels = Counter(level for level in report.levels if level != ABSENT)
            self._levels.update({level: count for level, count in levels.items() if level >= 0})
            if report.saved_s is not None:
                self._saved_s += report.saved_s
        saved = report.saved_s or 0.0
        self._metrics.update(
            (
                ("kvstore_stream_requests_total", (), 1),
                ("kvstore_stream_violations_total", (), report.violated),
                ("kvstore_stream_bytes_total", ("loaded",), report.loaded_bytes),
                ("kvstore_stream_bytes_total", ("wasted",), report.wasted_bytes),
                ("kvstore_stream_tokens_total", ("loaded",), report.loaded_tokens),
                ("kvstore_stream_tokens_total", ("computed",), report.computed_tokens),
                ("kvstore_stream_seconds_total", ("saved" if saved >= 0 else "lost",), abs(saved)),
                *(
                    ("kvstore_stream_groups_total", ("computed" if level == COMPUTED else str(level),), count)
                    for level, count in levels.items()
                ),
            )
        )
        report_request(  # of the prefix; whoever iterates may have said in a `request_scope` whose it is
            RequestReport(
                model=current_request().model or self.store._machinery.watch.model,
                input_tokens=report.loaded_tokens + report.computed_tokens,
                tokens_saved=report.loaded_tokens,
                ttft_s=report.ttft_s if math.isfinite(report.ttft_s) else None,
                hit_chunks=len(loaded),
                cache_size_bytes=sum(loaded),
                encoded_size_bytes=report.loaded_bytes,
            ),
            metrics=self._metrics,
            tracer=self.store.tracer,
        )

    def count(self, name: str) -> None:
        """One more of something that `stats` tells."""
        with self._lock:
            self._counts[name] += 1

    def stats(self) -> dict[str, Any]:
        """Requests, violations of their SLOs, bytes and tokens by where they came from, groups by the level they had
        for the first token, seconds saved against computing everything, and the speed of the link (bytes/s)."""
        with self._lock:
            names = (
                "requests", "violations", "loaded_bytes", "wasted_bytes", "loaded_tokens", "computed_tokens",
                "failed_groups", "plans", "no_memory",
            )  # fmt: skip
            return {
                **{name: self._counts[name] for name in names},
                "levels": dict(sorted(self._levels.items())),
                "saved_s": self._saved_s,
                "bytes_per_s": self.link.bytes_per_s,
            }


def _name(chunk: Chunk) -> tuple[int, ...]:
    """What records have in common whose levels are about as large."""
    return (*chunk.spec.sizes[:1], len(chunk.spec.sizes), chunk.spec.tokens)
