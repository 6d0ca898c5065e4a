"""`MeteredBackend`: what is counted, and the trace hook."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kvstore.backend import Outcome, Read, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import ClosedError, PermanentError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.wrappers import CallTrace, MeteredBackend

FAR = math.inf


class FakeClock:
    """Time that passes only when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def write(number: int, data: bytes = b"data") -> Write:
    return Write(key(number), [memoryview(data)])


def read(number: int, nbytes: int = 4) -> Read:
    return Read(key(number), memoryview(bytearray(nbytes)))


def test_every_outcome_is_counted_where_it_belongs() -> None:
    clock = FakeClock()
    metrics = Metrics()
    inner = FaultyBackend(DictBackend())
    backend = MeteredBackend(inner, metrics, clock=clock)
    backend.put([write(1, bytes(100)), write(2, bytes(50)), write(1)], deadline=FAR)
    inner.push(Fault.each({1: Fault.error(), 2: Fault.error(PermanentError("denied"))}), operation="get")
    backend.get_into([read(1, 100), read(2, 50), read(2, 50), read(3)], deadline=FAR)
    backend.get_into([read(1, 100), read(3, 9)], deadline=FAR)
    backend.stat([key(1)], deadline=FAR)

    def value(name: str, *labels: str) -> float:
        return metrics.value(f"kvstore_{name}", "dict", *labels)

    assert value("backend_calls_total", "get") == 2
    assert value("backend_items_total", "put", "ok") == 2
    assert value("backend_items_total", "put", "exists") == 1
    assert value("backend_items_total", "get", "ok") == 2
    assert value("backend_items_total", "get", "miss") == 2
    assert value("backend_items_total", "get", "error") == 2
    assert value("backend_errors_total", "get", "TransientError") == 1
    assert value("backend_errors_total", "get", "PermanentError") == 1
    assert value("backend_bytes_total", "put") == 150
    assert value("backend_bytes_total", "get") == 200
    assert value("backend_transfer_bytes_total", "get") == 100  # the call with failures is not throughput
    assert value("backend_bytes_total", "stat") == 0  # the size of a record is not moved
    assert value("backend_call_seconds", "get") == 2


def test_seconds_of_failed_calls_are_latency_but_not_throughput() -> None:
    clock = FakeClock()
    metrics = Metrics()

    class Slow(DictBackend):
        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            clock.now += 2.0
            return super().get_into(reads, deadline=deadline)

    inner = FaultyBackend(Slow())
    backend = MeteredBackend(inner, metrics, clock=clock)
    backend.put([write(1, bytes(100))], deadline=FAR)
    backend.get_into([read(1, 100)], deadline=FAR)
    inner.push(Fault.cut(10), operation="get")
    backend.get_into([read(1, 100)], deadline=FAR)
    assert metrics.value("kvstore_backend_transfer_seconds_total", "dict", "get") == pytest.approx(2.0)
    assert metrics.value("kvstore_backend_transfer_bytes_total", "dict", "get") == 100
    (series,) = [
        s for s in metrics.snapshot()["kvstore_backend_call_seconds"]["series"] if s["labels"]["operation"] == "get"
    ]
    assert (series["count"], series["sum"]) == (2, pytest.approx(4.0))


def test_what_is_raised_is_counted_and_passes() -> None:
    metrics = Metrics()
    backend = MeteredBackend(FaultyBackend(DictBackend(), otherwise=Fault.raises(ClosedError("closed"))), metrics)
    with pytest.raises(ClosedError):
        backend.stat([key(1), key(2)], deadline=FAR)
    with pytest.raises(ClosedError):
        backend.list(deadline=FAR)
    assert metrics.value("kvstore_backend_errors_total", "dict", "stat", "ClosedError") == 2
    assert metrics.value("kvstore_backend_errors_total", "dict", "list", "ClosedError") == 1
    foreign = MeteredBackend(FaultyBackend(DictBackend(), otherwise=Fault.raises(ValueError("bug"))), metrics)
    foreign.stat([key(1)], deadline=FAR)
    assert metrics.value("kvstore_backend_errors_total", "dict", "stat", "PermanentError") == 1


def test_leases_and_listings_are_counted() -> None:
    metrics = Metrics()
    with BufferPool(1 << 16) as pool:

        class Leasing(DictBackend):
            def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
                return [None, *(pool.acquire(8) for _ in keys[1:])]

        inner = Leasing()
        backend = MeteredBackend(inner, metrics)
        for lease in backend.lease([key(1), key(2), key(3)], deadline=FAR):
            if lease is not None:
                lease.release()
    assert metrics.value("kvstore_backend_items_total", "dict", "lease", "ok") == 2
    assert metrics.value("kvstore_backend_items_total", "dict", "lease", "miss") == 1
    inner.put([write(1), write(2)], deadline=FAR)
    assert len(list(backend.list(deadline=FAR))) == 1
    assert metrics.value("kvstore_backend_items_total", "dict", "list", "ok") == 2
    assert metrics.value("kvstore_backend_calls_total", "dict", "list") == 1


def test_a_trace_hook_sees_start_and_end() -> None:
    clock = FakeClock()
    events: list[CallTrace] = []
    inner = FaultyBackend(DictBackend(), {"get": [Fault.ok(), Fault.error().on(0)]})
    inner.inner.put([write(1)], deadline=FAR)
    backend = MeteredBackend(inner, Metrics(), trace=events.append, clock=clock)
    backend.get_into([read(1)], deadline=FAR)
    backend.get_into([read(1), read(1)], deadline=FAR)
    backend.lease([key(1)], deadline=FAR)
    list(backend.list(deadline=FAR))
    inner.push(Fault.raises(KeyboardInterrupt()), operation="stat")
    with pytest.raises(KeyboardInterrupt):
        backend.stat([key(1)], deadline=FAR)
    assert events == [
        CallTrace(False, "dict", "get", 1), CallTrace(True, "dict", "get", 1, 4, 0.0, 0),
        CallTrace(False, "dict", "get", 2), CallTrace(True, "dict", "get", 2, 4, 0.0, 1),
        CallTrace(False, "dict", "lease", 1), CallTrace(True, "dict", "lease", 1, 0, 0.0, 0),
        CallTrace(False, "dict", "list", 0), CallTrace(True, "dict", "list", 1, 0, 0.0, 0),
        CallTrace(False, "dict", "stat", 1), CallTrace(True, "dict", "stat", 1, 0, 0.0, 1),
    ]  # fmt: skip


def test_a_trace_hook_that_raises_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[CallTrace] = []

    def trace(event: CallTrace) -> None:
        seen.append(event)
        raise RuntimeError("hook")

    backend = MeteredBackend(DictBackend(), Metrics(), trace=trace)
    for _ in range(3):
        assert backend.put([write(1)], deadline=FAR)[0].stored
    assert len(seen) == 1
    assert len([record for record in caplog.records if "trace hook" in record.message]) == 1
