"""What is watched of one store. Its parts count plain integers where they hold a lock anyway; here these become metrics
when somebody reads them, and batches become spans and log lines where tracing or the event log is on.

Per batch this costs one observation of a histogram; per record a few additions. Nothing is built for spans or lines
that nobody wants.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.backend import Backend, Capability, Outcome, Status
from kvstore.completion import CancelledError, Completion
from kvstore.metrics import Metrics, error_class
from kvstore.scheduler import Batch, deadline_passed
from kvstore.tiers.backend import TieredBackend

from .logs import CACHE_HIT, CACHE_STORE, EVENTS, RequestInfo, current_request, log_event
from .tracing import Tracer

if TYPE_CHECKING:
    from kvstore.buffers import BufferPool
    from kvstore.config import Config
    from kvstore.targets import Counters, Target
    from kvstore.writes import Writer

__all__ = ["StoreWatch", "medium_of"]

OPERATIONS = ("lookup", "get", "put", "lease", "delete")

# Operation → marker of its line in the event log, and which number must not be 0 for one.
_MARKERS = {"get": (CACHE_HIT, "hit_chunks"), "put": (CACHE_STORE, "stored_chunks")}
_MEDIA = {"memory": "memory", "file": "disk"}
_RESULTS = {"put_stored": "stored", "put_exists": "exists", "put_errors": "error", "put_dropped": "dropped"}
_Series = tuple[str, tuple[str, ...]]


def medium_of(scheme: str, backend: Backend) -> str:
    """memory, disk or remote: what the hit rates of tiers are told apart by.

    Args:
        scheme: of its URL; "" if it was not opened by one.
    """
    if scheme:
        return _MEDIA.get(scheme, "remote")
    return "remote" if Capability.SHARED in backend.capabilities else "memory"


class StoreWatch:
    """Watches one store.

    Args:
        tracer: makes spans; None: none are made.
    """

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        counters: Counters,
        targets: Sequence[Target],
        pool: BufferPool,
        writer: Writer,
        tracer: Tracer | None,
    ) -> None:
        self.tracer = tracer
        self.model = ""  # of the last key context: what a store's records are of, mostly
        self._metrics = metrics
        self._counters = counters
        self._targets = targets
        self._pool = pool
        self._writer = writer
        self._codec = config.remote_serde
        self._per_token = config.prefill_per_token
        names = [target.backend.name for target in targets]
        # The wrappers' metrics have the backend's own name; where two have the same, the store's tells them apart.
        self._names = [
            target.name if names.count(target.backend.name) > 1 else target.backend.name for target in targets
        ]
        schemes = {config.backend_name(url): url.scheme for url in config.urls}
        self._places: dict[tuple[int, int], tuple[str, str]] = {}  # (target, place in its hierarchy) → tier, medium
        for target in targets:
            self._places[target.index, -1] = (
                self._names[target.index],
                medium_of(schemes.get(target.name, ""), target.backend),
            )
            if isinstance(target.backend, TieredBackend):
                for place, tier in enumerate(target.backend.tiers):
                    medium = medium_of(schemes.get(tier.name, ""), tier.backend)
                    self._places[target.index, place] = tier.name, medium
        self._seconds = {name: metrics.observer("kvstore_batch_seconds", name) for name in OPERATIONS}
        self.late: Mapping[str, Callable[[], Outcome]] = {
            name: functools.partial(self._missed_deadline, name) for name in OPERATIONS
        }
        self._lock = threading.Lock()
        self._looked = [0, 0]  # records in lookups: hits, misses
        self._late: Counter[str] = Counter()
        self._published: dict[_Series, float] = {}
        for index, place in self._places:  # from the beginning: a hit rate of nothing is 0, not unknown
            if place < 0 and isinstance(targets[index].backend, TieredBackend):
                continue
            for name in ("kvstore_hit_records_total", "kvstore_hit_tokens_total"):
                metrics.add(name, *self._places[index, place], amount=0)
        metrics.before_snapshot(self.publish)

    # What happens in the store.

    def timed(self, operation: str, finish: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """`finish` of a batch that is made now, with its time taken."""
        start, observe, clock = time.perf_counter(), self._seconds[operation], time.perf_counter

        def finished(outcomes: Sequence[Any]) -> Any:
            observe(clock() - start)
            return finish(outcomes)

        return finished

    def _missed_deadline(self, operation: str) -> Outcome:
        with self._lock:
            self._late[operation] += 1
        return deadline_passed(None, operation)

    def looked(self, hits: int, asked: int) -> None:
        """A lookup of `asked` records found a hit prefix of `hits`."""
        with self._lock:
            self._looked[0] += hits
            self._looked[1] += asked - hits

    @property
    def telling(self) -> bool:
        """Whether somebody wants spans or log lines of batches."""
        return self.tracer is not None or EVENTS.isEnabledFor(logging.INFO)

    def follow(self, batch: Batch, operation: str, about: Sequence[Any]) -> None:
        """Have a span and a log line made of a batch. Called before its jobs are queued, if somebody is `telling`.

        Args:
            about: its wants, items or keys.
        """
        request = current_request()
        if not request.model:
            request = request._replace(model=self.model)
        if self.tracer is not None:
            batch.trace = self.tracer.batch(operation, len(about), request)
        if batch.trace is None and (operation not in _MARKERS or not EVENTS.isEnabledFor(logging.INFO)):
            return
        fresh: Sequence[int] = ()
        if operation == "get" and about and hasattr(about[0], "spec"):
            # Of what is refined, or read in several runs of layers, only the first read is a hit.
            fresh = [want.spec.tokens if want.progress is None and not want.first else _tokens(want) for want in about]
        done = functools.partial(self._ended, batch, operation, about, fresh, request, time.perf_counter())
        batch.completion.add_done_callback(done)

    def _ended(
        self, batch: Batch, operation: str, about: Sequence[Any], fresh: Sequence[int], request: RequestInfo,
        start: float, completion: Completion[Any],
    ) -> None:  # fmt: skip
        seconds = time.perf_counter() - start
        result: Any = None
        error = ""
        try:
            result = completion.result(0)
        except CancelledError:
            error = "cancelled"
        except Exception as raised:  # noqa: BLE001 - whatever the batch failed with
            error = error_class(raised)
        facts: dict[str, Any] = {}
        if result is not None:
            facts = _FACTS.get(operation, _facts_of_any)(result, about, fresh)
            error = facts.pop("error", "")
            if self._codec == "raw":  # nothing was compressed
                facts.pop("compression_ratio", None)
        marker, counted = _MARKERS.get(operation, ("", ""))
        if facts.get(counted):
            fields = {**facts, "seconds": round(seconds, 6)}
            fields["encoded_size_bytes"] = fields.pop("compressed_size_bytes", None)
            fields.pop("cache_hit", None)
            log_event(marker, fields, request=request)
        if self.tracer is not None and batch.trace is not None:
            self.tracer.end_batch(batch.trace, facts, error)

    # What is read.

    def publish(self) -> None:
        """Bring the metrics up to date with the counters and the state of now."""
        totals = self._totals()
        with self._lock:
            changes = []
            for series, value in totals.items():
                before = self._published.get(series, 0.0)
                if value > before:
                    self._published[series] = value
                    changes.append((*series, value - before))
            self._metrics.update(changes)
        # What is now is last: of a closed store there is nothing any more.
        self._metrics.update((name, labels, value) for (name, labels), value in self._gauges().items())
        tiers = self._targets[0].backend
        if isinstance(tiers, TieredBackend):
            tiers.publish(self._metrics)

    def _totals(self) -> dict[_Series, float]:
        values = self._counters.values
        with self._lock:
            hits, misses = self._looked
            late = dict(self._late)
        totals: dict[_Series, float] = {
            ("kvstore_lookup_records_total", ("hit",)): hits,
            ("kvstore_lookup_records_total", ("miss",)): misses,
            ("kvstore_missed_records_total", ("miss",)): self._counters.missed,
            ("kvstore_missed_records_total", ("error",)): self._counters.failed,
        }
        for target in self._targets:
            failures = target.lanes.failures
            totals["kvstore_lane_failures_total", (self._names[target.index],)] = failures
        for operation, count in late.items():
            totals["kvstore_deadline_misses_total", (operation,)] = count
        all_tokens = 0
        with self._counters.lock:
            served = {place: (*counts,) for place, counts in self._counters.served.items()}
        for place, (records, tokens) in served.items():
            labels = self._places[place]
            totals["kvstore_hit_records_total", labels] = records + totals.get(("kvstore_hit_records_total", labels), 0)
            totals["kvstore_hit_tokens_total", labels] = tokens + totals.get(("kvstore_hit_tokens_total", labels), 0)
            all_tokens += tokens
        if self._per_token:
            totals["kvstore_prefill_saved_seconds_total", ()] = all_tokens * self._per_token
        for name, result in _RESULTS.items():
            totals["kvstore_put_records_total", (result,)] = values[name]
        if self._codec != "raw":
            raw, stored = values["put_raw_bytes"], values["put_bytes"]
            totals["kvstore_codec_raw_bytes_total", (self._codec,)] = raw
            totals["kvstore_codec_stored_bytes_total", (self._codec,)] = stored
            totals["kvstore_codec_saved_bytes_total", (self._codec,)] = max(0, raw - stored)
        for name, count in list(values.items()):
            if name == "get_joined" or not name.startswith(("get_", "put_")):
                totals["kvstore_reads_total", (name.removeprefix("get_"),)] = count
        return totals

    def _gauges(self) -> dict[_Series, float]:
        pool = self._pool.stats()
        gauges: dict[_Series, float] = {
            ("kvstore_pool_capacity_bytes", ()): pool.total,
            ("kvstore_pool_used_bytes", ()): pool.in_use,
            ("kvstore_pool_quarantined_buffers", ()): pool.quarantined,
            ("kvstore_pool_waiting_threads", ()): pool.waiting,
            ("kvstore_write_queue_bytes", ()): self._writer.queued_bytes,
        }
        for target in self._targets:
            stats, labels = target.lanes.stats(), (self._names[target.index],)
            gauges["kvstore_lanes", labels] = stats["lanes"]
            gauges["kvstore_lanes_busy", labels] = stats["busy"]
            gauges["kvstore_queue_jobs", labels] = stats["queued"]
        return gauges


def _tokens(want: Any) -> int:
    """Tokens that a want brings for the first time; -1: another want of the same record brought them."""
    if want.first or (want.progress is not None and want.progress.level is not None):
        return -1
    return int(want.spec.tokens)


def _first_error(outcomes: Sequence[Any]) -> str:
    for outcome in outcomes:
        if isinstance(outcome, Outcome) and outcome.error is not None:
            return error_class(outcome.error)
    return ""


def _facts_of_get(outcomes: Sequence[Any], _: Sequence[Any], fresh: Sequence[int]) -> dict[str, Any]:
    if not fresh:  # of headers alone nothing is a hit yet
        facts = _facts_of_any(outcomes, (), ())
        del facts["hit_chunks"]
        return facts
    ok = Status.OK
    hits = [outcome[1] for outcome in outcomes if outcome[0] is ok]
    first = [tokens for tokens, outcome in zip(fresh, outcomes, strict=True) if outcome[0] is ok and tokens >= 0]
    return {
        "cache_hit": bool(hits),
        "hit_chunks": len(first),
        "tokens_saved": sum(first),
        "cache_size_bytes": sum(hits),
        "error": _first_error(outcomes) if len(hits) < len(outcomes) else "",
    }


def _facts_of_put(outcomes: Sequence[Any], items: Sequence[Any], _: Sequence[int]) -> dict[str, Any]:
    stored = [index for index, outcome in enumerate(outcomes) if outcome.status is Status.OK]
    raw = sum(items[index].spec.raw_bytes for index in stored)
    kept = sum(outcomes[index].nbytes for index in stored)
    return {
        "stored_chunks": len(stored),
        "cache_size_bytes": raw,
        "compressed_size_bytes": kept,
        "compression_ratio": round(raw / kept, 4) if kept else None,
        "error": _first_error(outcomes),
    }


def _facts_of_lookup(result: Any, _: Sequence[Any], __: Sequence[int]) -> dict[str, Any]:
    if isinstance(result, int):
        return {"cache_hit": result > 0, "hit_chunks": result}
    return _facts_of_any(result, (), ())


def _facts_of_any(results: Any, _: Sequence[Any], __: Sequence[int]) -> dict[str, Any]:
    hits = sum(result is not None and getattr(result, "status", Status.OK) is Status.OK for result in results)
    return {"cache_hit": hits > 0, "hit_chunks": hits, "error": _first_error(results)}


_FACTS: Mapping[str, Callable[[Any, Sequence[Any], Sequence[int]], dict[str, Any]]] = {
    "get": _facts_of_get, "put": _facts_of_put, "lookup": _facts_of_lookup,
}  # fmt: skip
