"""`LatencyBackend`, on a clock that only its own sleeps move."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.backend import NO_DEADLINE, Read, Status, Write
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import Key
from kvstore.testing import DictBackend, FaultyBackend, LatencyBackend

KEYS = [Key(bytes([i]) * 32) for i in range(8)]
MB = 1_000_000


class Clock:
    """Sleeping is the only thing that takes time."""

    def __init__(self) -> None:
        self.start = self.now = time.monotonic()
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now += seconds

    @property
    def passed(self) -> float:
        return self.now - self.start


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inner() -> FaultyBackend:
    backend = DictBackend()
    backend.records.update(dict.fromkeys(KEYS[:4], bytes(MB)))
    return FaultyBackend(backend)


def slow(inner: FaultyBackend, clock: Clock, *, shared: bool = True) -> LatencyBackend:
    """10 ms per call, and 10 ms per MB."""
    return LatencyBackend(inner, 0.010, gbytes_per_s=0.1, shared=shared, clock=clock, sleep=clock.sleep)


def reads(*keys: Key, length: int = MB) -> list[Read]:
    return [Read(key, memoryview(bytearray(length))) for key in keys]


def writes(*keys: Key) -> list[Write]:
    return [Write(key, [memoryview(bytes(MB))]) for key in keys]


def test_calls_cost_latency_and_bytes(inner: FaultyBackend, clock: Clock) -> None:
    backend = slow(inner, clock)
    spent = 0.0
    for call, cost in (
        (lambda: backend.stat(KEYS, deadline=NO_DEADLINE), 0.010),
        (lambda: backend.get_into(reads(*KEYS), deadline=NO_DEADLINE), 0.050),
        (lambda: backend.get_into(reads(KEYS[0], length=MB // 2), deadline=NO_DEADLINE), 0.015),
        (lambda: backend.put(writes(KEYS[4], KEYS[5]), deadline=NO_DEADLINE), 0.030),
        (lambda: backend.put(writes(KEYS[4]), deadline=NO_DEADLINE), 0.010),  # EXISTS moves nothing
        (lambda: backend.delete(KEYS[4:6], deadline=NO_DEADLINE), 0.010),
        (lambda: backend.quarantine(KEYS[:1], deadline=NO_DEADLINE), 0.010),
        (lambda: backend.lease(KEYS[:1], deadline=NO_DEADLINE), 0.010),
        (lambda: list(backend.list(deadline=NO_DEADLINE)), 0.020),  # one page, and its end
        (lambda: backend.stat([], deadline=NO_DEADLINE), 0.0),
    ):
        call()
        spent += cost
        assert clock.passed == pytest.approx(spent)


def test_no_bandwidth_means_no_limit(inner: FaultyBackend, clock: Clock) -> None:
    backend = LatencyBackend(inner, 0.001, clock=clock, sleep=clock.sleep)
    backend.get_into(reads(*KEYS), deadline=NO_DEADLINE)
    assert clock.passed == pytest.approx(0.001)


def test_a_deadline_inside_the_latency(inner: FaultyBackend, clock: Clock) -> None:
    backend = slow(inner, clock)
    deadline = clock() + 0.004
    for outcome in backend.put(writes(*KEYS), deadline=deadline):
        assert isinstance(outcome.error, TransientError)
    assert clock() == pytest.approx(deadline)
    assert backend.stat(KEYS[:1], deadline=deadline)[0].status is Status.ERROR
    assert backend.lease(KEYS[:1], deadline=deadline) == [None]
    with pytest.raises(TransientError):
        next(backend.list(deadline=deadline))
    assert [call.operation for call in inner.calls] == ["list"]  # nothing of it was begun
    assert clock() == pytest.approx(deadline)


def test_a_deadline_inside_the_transfer(inner: FaultyBackend, clock: Clock) -> None:
    backend = slow(inner, clock)
    deadline = clock() + 0.035
    outcomes = backend.get_into(reads(KEYS[0], KEYS[1], KEYS[2], KEYS[7]), deadline=deadline)
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK, Status.ERROR, Status.MISS]
    assert clock() == pytest.approx(deadline)
    deadline = clock() + 0.035
    outcomes = backend.put(writes(*KEYS[4:8]), deadline=deadline)
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 2 + [Status.ERROR] * 2
    assert clock() == pytest.approx(deadline)
    assert [o.status for o in inner.stat(KEYS[4:8], deadline=NO_DEADLINE)] == [Status.OK] * 2 + [Status.MISS] * 2


class Standing(Clock):
    """A clock for several calls at once: sleeps are recorded and take no time."""

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)


@pytest.mark.parametrize("shared", [True, False])
def test_threads_share_the_link_or_do_not(inner: FaultyBackend, shared: bool) -> None:
    clock = Standing()
    backend = slow(inner, clock, shared=shared)
    threads = [
        threading.Thread(target=lambda: backend.get_into(reads(KEYS[0]), deadline=NO_DEADLINE)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfers = sorted(seconds for seconds in clock.sleeps)[3:] if shared else clock.sleeps
    assert transfers == pytest.approx([0.010, 0.020, 0.030][-len(transfers) :] if shared else [0.010] * 6)


def test_a_put_that_moved_nothing_frees_the_link(inner: FaultyBackend) -> None:
    clock = Standing()
    backend = slow(inner, clock)
    backend.put(writes(KEYS[0], KEYS[4]), deadline=NO_DEADLINE)
    backend.get_into(reads(KEYS[0]), deadline=NO_DEADLINE)
    assert clock.sleeps == pytest.approx([0.010, 0.010, 0.010, 0.020])


def test_closed_and_bad_arguments(inner: FaultyBackend, clock: Clock) -> None:
    backend = slow(inner, clock)
    backend.close()
    backend.close()
    with pytest.raises(ClosedError):
        backend.stat(KEYS[:1], deadline=NO_DEADLINE)
    assert clock.passed == 0
    for latency, bandwidth in ((-1.0, 1.0), (float("nan"), 1.0), (0.0, 0.0), (0.0, -1.0)):
        with pytest.raises(ConfigError):
            LatencyBackend(inner, latency, gbytes_per_s=bandwidth)
