"""`kvstore.metrics`: plain numbers, bounded memory, one consistent snapshot."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import tracemalloc

import pytest

from kvstore.backend import EXISTS, MISS, OK, Outcome, Status
from kvstore.errors import ClosedError, ConfigError, CorruptRecord, PermanentError, TransientError
from kvstore.metrics import BYTE_BUCKETS, METRICS, SECOND_BUCKETS, Metric, Metrics, error_class
from kvstore.wrappers.base import LocalWait, Unexpected

HITS = Metric("kvstore_test_hits_total", "counter", "Hits.", ("tier",))
LEVEL = Metric("kvstore_test_level", "gauge", "A level.")
WAIT = Metric("kvstore_test_seconds", "histogram", "A wait.", ("tier",), (0.1, 1.0))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics([HITS, LEVEL, WAIT])


def test_the_table_follows_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("kvstore_")
        assert metric.doc.endswith(".")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert not set(metric.labels) & {"key", "url"}, "labels of unbounded or secret values"
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_bytes"))
    for buckets in (SECOND_BUCKETS, BYTE_BUCKETS):
        assert all(low < high for low, high in itertools.pairwise(buckets))
    assert (SECOND_BUCKETS[0], SECOND_BUCKETS[-1], BYTE_BUCKETS[0], BYTE_BUCKETS[-1]) == (1e-5, 10.0, 4096, 4 << 30)


def test_counters_gauges_and_histograms(metrics: Metrics) -> None:
    metrics.add(HITS.name, "host")
    metrics.add(HITS.name, "host", amount=41)
    metrics.add(HITS.name, "disk")
    metrics.set(LEVEL.name, value=7)
    metrics.set(LEVEL.name, value=-2.5)
    for value in (0.05, 0.1, 0.5, 1.0, 50.0):
        metrics.observe(WAIT.name, "host", value=value)
    assert metrics.value(HITS.name, "host") == 42
    assert metrics.value(HITS.name, "disk") == 1
    assert metrics.value(HITS.name, "absent") == 0
    assert metrics.value("kvstore_absent") == 0
    assert metrics.value(LEVEL.name) == -2.5
    assert metrics.value(WAIT.name, "host") == 5
    assert metrics.snapshot() == {
        HITS.name: {
            "kind": "counter", "doc": "Hits.", "labels": ["tier"],
            "series": [{"labels": {"tier": "host"}, "value": 42}, {"labels": {"tier": "disk"}, "value": 1}],
        },
        LEVEL.name: {"kind": "gauge", "doc": "A level.", "labels": [], "series": [{"labels": {}, "value": -2.5}]},
        WAIT.name: {
            "kind": "histogram", "doc": "A wait.", "labels": ["tier"],
            "series": [{"labels": {"tier": "host"}, "count": 5, "sum": pytest.approx(51.65),
                        "buckets": [[0.1, 2], [1.0, 4]]}],
        },
    }  # fmt: skip


def test_a_snapshot_is_json_and_a_copy(metrics: Metrics) -> None:
    metrics.observe(WAIT.name, "host", value=2.0)
    before = metrics.snapshot()
    text = json.dumps(before, allow_nan=False)
    metrics.observe(WAIT.name, "host", value=2.0)
    assert json.dumps(before, allow_nan=False) == text
    assert metrics.snapshot() != before


def test_several_changes_in_one_go(metrics: Metrics) -> None:
    metrics.update([(HITS.name, ("a",), 2), (LEVEL.name, (), 3), (WAIT.name, ("a",), 0.2)])
    assert (metrics.value(HITS.name, "a"), metrics.value(LEVEL.name), metrics.value(WAIT.name, "a")) == (2, 3, 1)


@pytest.mark.parametrize(
    "change",
    [
        ("kvstore_unknown", (), 1),
        (HITS.name, (), 1),
        (HITS.name, ("a", "b"), 1),
        (HITS.name, ("a",), -1),
        (HITS.name, ("a",), math.nan),
        (WAIT.name, ("a",), math.inf),
    ],
)
def test_bad_changes_are_refused(metrics: Metrics, change: tuple[str, tuple[str, ...], float]) -> None:
    with pytest.raises(ConfigError, match=change[0]):
        metrics.update([change])
    assert metrics.value(HITS.name, "a") == 0


def test_a_metric_keeps_its_kind(metrics: Metrics) -> None:
    with pytest.raises(ConfigError, match="is a counter"):
        metrics.set(HITS.name, "a", value=1)
    with pytest.raises(ConfigError, match="is a gauge"):
        metrics.add(LEVEL.name)
    with pytest.raises(ConfigError, match="is a histogram"):
        metrics.add(WAIT.name, "a")
    metrics.define(HITS)
    with pytest.raises(ConfigError, match="defined differently"):
        metrics.define(Metric(HITS.name, "counter", "Something else.", ("tier",)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("hits_total", "counter", "d"),
        ("kvstore_Hits", "counter", "d"),
        ("kvstore_x", "summary", "d"),
        ("kvstore_x", "counter", "d", ("1a",)),
        ("kvstore_x", "counter", "d", (), (1.0,)),
        ("kvstore_x", "histogram", "d"),
        ("kvstore_x", "histogram", "d", (), (2.0, 1.0)),
        ("kvstore_x", "histogram", "d", (), (1.0, math.inf)),
    ],
)
def test_bad_definitions_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        Metric(*arguments)  # type: ignore[arg-type]


def test_memory_is_bounded_whatever_names_come() -> None:
    metrics = Metrics([HITS, WAIT], max_series=10)

    def flood() -> None:
        for at in range(5_000):
            metrics.add(HITS.name, f"name-{at}")
            metrics.observe(WAIT.name, f"name-{at}", value=0.5)

    flood()
    assert len(metrics.snapshot()[HITS.name]["series"]) == 11
    assert metrics.value(HITS.name, "name-0") == 1
    assert metrics.value(HITS.name, "other") == 4990
    assert metrics.value(WAIT.name, "other") == 4990
    assert metrics.value("kvstore_metrics_overflow_total", HITS.name) == 4990
    tracemalloc.start()
    try:
        flood()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000
    with pytest.raises(ConfigError):
        Metrics(max_series=0)


def test_an_operation_counts_batches() -> None:
    metrics = Metrics()
    meter = metrics.operation("b", "get")
    assert meter.record_outcomes(0.5, [Outcome(Status.OK, 10), Outcome(Status.OK, 30)], moves_bytes=True) == (40, 0)
    mixed = [
        Outcome(Status.OK, 7), MISS, EXISTS,
        Outcome.failed(TransientError("x")), Outcome.failed(LocalWait("x")),
        Outcome.failed(Unexpected("x")), Outcome.failed(CorruptRecord("x")),
    ]  # fmt: skip
    assert meter.record_outcomes(3.0, mixed, moves_bytes=True) == (7, 4)
    assert meter.record_outcomes(0.1, [MISS], moves_bytes=True) == (0, 0)
    assert meter.record_outcomes(0.1, [], moves_bytes=True) == (0, 0)
    assert meter.record_outcomes(0.1, [Outcome(Status.OK, 999)], moves_bytes=False) == (0, 0)

    def value(name: str, *more: str) -> float:
        return metrics.value(f"kvstore_backend_{name}", "b", "get", *more)

    assert value("calls_total") == 5
    assert [value("items_total", status) for status in ("ok", "miss", "exists", "error")] == [4, 2, 1, 4]
    errors = ("TransientError", "PermanentError", "CorruptRecord")
    assert [value("errors_total", error) for error in errors] == [2, 1, 1]
    assert value("bytes_total") == 47
    assert (value("transfer_bytes_total"), value("transfer_seconds_total")) == (40, 0.5)
    assert (value("call_seconds"), value("call_bytes")) == (5, 2)


def test_two_handles_of_one_operation_share_their_numbers() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.operation("b", "get").record_outcomes(0.1, [OK], moves_bytes=True)
    assert metrics.value("kvstore_backend_calls_total", "b", "get") == 2
    assert metrics.value("kvstore_backend_items_total", "b", "get", "ok") == 2


def test_error_classes_are_a_closed_set() -> None:
    assert error_class(LocalWait("x")) == "TransientError"
    assert error_class(Unexpected("x")) == "PermanentError"
    assert error_class(ClosedError("x")) == "ClosedError"
    assert error_class(PermanentError("x")) == "PermanentError"
    assert error_class(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_nothing_is_lost_between_threads(metrics: Metrics) -> None:
    """8 threads add, while snapshots are taken that must be consistent within themselves."""
    meter = metrics.operation("b", "get")
    barrier = threading.Barrier(9)

    def work() -> None:
        barrier.wait(30)
        for _ in range(500):
            metrics.add(HITS.name, "host")
            meter.record_outcomes(0.001, [Outcome(Status.OK, 1), MISS], moves_bytes=True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait(30)
        while any(thread.is_alive() for thread in threads):
            found = metrics.snapshot()
            if "kvstore_backend_items_total" in found:
                calls = found["kvstore_backend_calls_total"]["series"][0]["value"]
                items = [series["value"] for series in found["kvstore_backend_items_total"]["series"]]
                assert items == [calls, calls]
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert metrics.value(HITS.name, "host") == 4000
    assert metrics.value("kvstore_backend_calls_total", "b", "get") == 4000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_counts_even_if_the_lock_was_held(metrics: Metrics) -> None:
    with metrics._lock:
        pid = os.fork()
        if pid == 0:
            metrics.add(HITS.name, "host")
            os._exit(0 if metrics.value(HITS.name, "host") == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert metrics.value(HITS.name, "host") == 0


def test_what_a_backend_counts_for_itself_is_shown_too() -> None:
    own = Metric("kvstore_own_total", "counter", "Of a backend.", ("backend",))
    store, backend, other = Metrics(), Metrics((own,)), Metrics((own,))
    for each in (backend, other):
        store.include(each)
    backend.add("kvstore_own_total", "b", amount=3)
    other.add("kvstore_own_total", "c")
    for each, name in ((store, "a"), (backend, "b")):
        each.set("kvstore_limit_concurrency", name, value=1)
    found = store.snapshot()
    assert [series["labels"]["backend"] for series in found["kvstore_own_total"]["series"]] == ["b", "c"]
    assert [series["labels"]["backend"] for series in found["kvstore_limit_concurrency"]["series"]] == ["a", "b"]
    assert backend.snapshot()["kvstore_own_total"]["series"][0]["value"] == 3
    assert len(store.snapshot()["kvstore_own_total"]["series"]) == 2  # shown once, however often it is asked for
    with pytest.raises(ConfigError, match="defined differently"):
        store.include(Metrics((Metric("kvstore_own_total", "gauge", "Another.", ("backend",)),)))
