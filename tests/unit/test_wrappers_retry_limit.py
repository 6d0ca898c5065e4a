"""`RetryingBackend` and `LimitedBackend`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvstore.backend import EXISTS, KeyInfo, Outcome, Read, Status, Write
from kvstore.errors import ClosedError, ConfigError, PermanentError, PoolExhausted, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.wrappers import BreakerBackend, LimitedBackend, RetryingBackend
from kvstore.wrappers.base import LocalWait

FAR = math.inf
ERROR, MISSED, FINE = Status.ERROR, Status.MISS, Status.OK


class FakeClock:
    """Time that passes only when somebody sleeps, or a test says so. Far ahead of the real one, so that the deadlines
    derived from it are in a double's future."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 1e6
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def write(number: int, data: bytes = b"data") -> Write:
    return Write(key(number), [memoryview(data)])


def read(number: int, nbytes: int = 4) -> Read:
    return Read(key(number), memoryview(bytearray(nbytes)))


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


# Retrying.


def retrying(inner: FaultyBackend, clock: FakeClock, **more: object) -> RetryingBackend:
    arguments: dict[str, object] = {"base_delay": 0.1, "rng": lambda: 0.5, **more}
    return RetryingBackend(inner, clock=clock, sleep=clock.sleep, **arguments)  # type: ignore[arg-type]


def test_only_what_failed_in_passing_is_tried_again_and_merged_in_order() -> None:
    inner = FaultyBackend(DictBackend())
    for at in (0, 2, 4):
        inner.inner.put([write(at, b"%04d" % at)], deadline=FAR)
    permanent = Fault.error(PermanentError("denied"))
    inner.push(
        Fault.each({1: permanent, 2: Fault.error(), 3: Fault.miss(), 4: Fault.error()}),
        Fault.error().on(1),
        operation="get",
    )
    reads = [read(at) for at in range(5)]
    clock, metrics = FakeClock(), Metrics()
    backend = retrying(inner, clock, metrics=metrics)
    outcomes = backend.get_into(reads, deadline=FAR)
    assert statuses(outcomes) == [FINE, ERROR, FINE, MISSED, FINE]
    assert [bytes(reads[at].dst) for at in (0, 2, 4)] == [b"0000", b"0002", b"0004"]
    assert [call.keys for call in inner.calls_of("get")] == [
        tuple(key(at) for at in range(5)),
        (key(2), key(4)),
        (key(4),),
    ]
    inner.assert_done()
    assert clock.slept == [0.05, 0.1]  # half of 0.1, half of 0.2
    assert metrics.value("kvstore_retries_total", "dict", "get") == 2
    assert metrics.value("kvstore_retried_items_total", "dict", "get") == 3
    assert metrics.value("kvstore_recovered_items_total", "dict", "get") == 2


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_there_are_at_most_so_many_requests(attempts: int) -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    backend = retrying(inner, FakeClock(), attempts=attempts)
    (outcome,) = backend.stat([key(1)], deadline=FAR)
    assert isinstance(outcome.error, TransientError)
    assert len(inner.calls) == attempts


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"attempts": 4}, {"base_delay": -1.0}, {"max_delay": 0.01}])
def test_bad_arguments_of_retrying(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        retrying(FaultyBackend(DictBackend()), FakeClock(), **bad)


@pytest.mark.parametrize("error", [TransientError("throttled"), PoolExhausted("no memory"), OSError(116, "Stale")])
def test_a_call_that_raises_as_a_whole_is_tried_again(error: Exception) -> None:
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.raises(error), Fault.raises(error)]})
    backend = retrying(inner, FakeClock())
    assert statuses(backend.stat([key(1), key(2)], deadline=FAR)) == [MISSED, MISSED]
    assert len(inner.calls) == 3


@pytest.mark.parametrize("error", [ValueError("bug"), PermanentError("denied")])
def test_what_will_fail_again_is_not_tried_again(error: Exception) -> None:
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.raises(error)]})
    backend = retrying(inner, FakeClock())
    assert statuses(backend.stat([key(1)], deadline=FAR)) == [ERROR]
    assert len(inner.calls) == 1


@pytest.mark.parametrize("left", [0.0, 0.01, 0.04, 0.3, 1.0, 5.0])
def test_it_never_sleeps_past_the_deadline(left: float) -> None:
    clock = FakeClock()
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    backend = retrying(inner, clock, base_delay=1.0, max_delay=10.0, rng=lambda: 0.999)
    deadline = clock() + left
    assert statuses(backend.stat([key(1)], deadline=deadline)) == [ERROR]
    assert clock() < deadline or left == 0.0
    assert (not clock.slept) == (left == 0.0)


def test_a_try_that_cannot_finish_is_not_begun() -> None:
    """Successful calls took 0.5 s; 0.4 s before the deadline no further try begins, 0.6 s before it one does."""
    clock = FakeClock()

    class Slow(DictBackend):
        def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
            clock.now += 0.5
            return super().stat(keys, deadline=deadline)

    inner = FaultyBackend(Slow())
    backend = retrying(inner, clock, base_delay=0.0)
    assert statuses(backend.stat([key(1)], deadline=FAR)) == [MISSED]
    inner.push(Fault.error(), operation="stat")
    assert statuses(backend.stat([key(1)], deadline=clock() + 0.4)) == [ERROR]
    assert len(inner.calls) == 2
    assert statuses(backend.delete([key(1)], deadline=clock() + 0.4)) == [MISSED]  # each operation has its own time
    inner.push(Fault.error(), operation="stat")
    assert statuses(backend.stat([key(1)], deadline=clock() + 0.6)) == [MISSED]
    inner.assert_done()


def test_a_sleep_that_took_too_long_is_followed_by_no_try() -> None:
    clock = FakeClock()
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    backend = RetryingBackend(inner, clock=clock, sleep=lambda seconds: clock.sleep(seconds + 1.0))
    assert statuses(backend.stat([key(1)], deadline=clock() + 0.5)) == [ERROR]
    assert (len(clock.slept), len(inner.calls)) == (1, 1)


def test_jitter_is_full() -> None:
    """Sleeps are uniform between 0 and the step: nothing is added, nothing is a minimum."""
    for share in (0.0, 0.25, 0.75):
        clock = FakeClock()
        inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
        retrying(inner, clock, max_delay=0.15, rng=lambda share=share: share).stat([key(1)], deadline=FAR)
        assert clock.slept == pytest.approx([share * 0.1, share * 0.15] if share else [])


class AckLost(DictBackend):
    """Its first put lands, and the answer is lost."""

    lost = 1

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        if self.lost:
            self.lost -= 1
            return [Outcome.failed(TransientError("connection lost"))] * len(writes)
        return outcomes


def test_a_put_whose_first_try_landed_counts_as_stored() -> None:
    backend = RetryingBackend(AckLost(), base_delay=0.0)
    outcomes = backend.put([write(1), write(2)], deadline=FAR)
    assert outcomes == [EXISTS, EXISTS]
    assert all(outcome.stored for outcome in outcomes)


def test_a_backend_that_is_closed_between_tries_leaves_the_first_answer() -> None:
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.miss(), Fault.raises(ClosedError("closed"))]})
    inner.push(Fault.error().on(1), operation="get")
    inner.push(Fault.raises(ClosedError("closed")), operation="get")
    inner.inner.put([write(0)], deadline=FAR)
    backend = retrying(inner, FakeClock())
    assert statuses(backend.get_into([read(0), read(1)], deadline=FAR)) == [FINE, ERROR]
    assert statuses(backend.stat([key(0)], deadline=FAR)) == [MISSED]
    with pytest.raises(ClosedError):
        backend.stat([key(0)], deadline=FAR)


def test_close_ends_a_sleeping_retry() -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    backend = RetryingBackend(inner, base_delay=3600.0, max_delay=3600.0, rng=lambda: 0.999)
    answers: list[list[Outcome]] = []
    caller = threading.Thread(target=lambda: answers.append(backend.stat([key(1)], deadline=FAR)))
    caller.start()
    inner.wait_done(1, "stat")
    backend.close()
    caller.join(30)
    assert [statuses(answer) for answer in answers] == [[ERROR]]
    assert len(inner.calls_of("stat")) == 1


def test_a_listing_is_begun_anew_until_a_page_was_handed_out() -> None:
    inner = FaultyBackend(DictBackend(), {"list": [Fault.error(), Fault.cut(0)]})
    inner.inner.put([write(1)], deadline=FAR)
    backend = retrying(inner, FakeClock())
    assert list(backend.list(deadline=FAR)) == [[KeyInfo(key(1), 4)]]
    inner.push(Fault.cut(1), operation="list")
    pages = backend.list(deadline=FAR)
    assert next(pages) == [KeyInfo(key(1), 4)]
    with pytest.raises(TransientError):
        next(pages)
    inner.push(Fault.cut(0), Fault.cut(0), Fault.cut(0), operation="list")
    with pytest.raises(TransientError):
        list(backend.list(deadline=FAR))
    inner.assert_done()


# Limited.


def start(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool]) -> None:
    """Block until another thread has got where the test needs it."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "a thread did not get where it should be"
        time.sleep(0.001)


def waiting(backend: LimitedBackend) -> int:
    return len(backend._waiters)


def test_no_more_calls_than_allowed_reach_the_backend() -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.hang())
    backend = LimitedBackend(inner, concurrency=2)
    threads = [start(lambda: backend.stat([key(1)], deadline=FAR)) for _ in range(5)]
    inner.wait_hung(2)
    wait_for(lambda: waiting(backend) == 3)
    assert (len(inner.calls), backend.in_flight) == (2, (2, 0))
    for _ in range(5):
        inner.wait_hung(1)
        inner.release(1)
    for thread in threads:
        thread.join(30)
    assert (len(inner.calls), backend.in_flight) == (5, (0, 0))


def test_bytes_in_flight_are_bounded_and_callers_served_in_order() -> None:
    """8 of 10 bytes are in flight; 9 wait, and 2 behind them wait too, although they would fit."""
    inner = FaultyBackend(DictBackend(), {"put": [Fault.hang(), Fault.hang(), Fault.hang()]})
    backend = LimitedBackend(inner, concurrency=9, bytes_in_flight=10)

    def put(size: int) -> None:
        backend.put([write(size, bytes(size))], deadline=FAR)

    threads = []
    for count, size in enumerate((8, 9, 2)):
        threads.append(start(partial(put, size)))
        inner.wait_hung(1)
        wait_for(lambda count=count: waiting(backend) == count)  # type: ignore[misc]
    for in_flight in (8, 9, 2):
        inner.wait_hung(1)
        assert backend.in_flight == (1, in_flight)
        inner.release(1)
    for thread in threads:
        thread.join(30)
    assert [call.nbytes for call in inner.calls_of("put")] == [8, 9, 2]
    assert backend.in_flight == (0, 0)


def test_an_item_larger_than_the_budget_runs_alone() -> None:
    inner = FaultyBackend(DictBackend(), {"put": [Fault.hang(), Fault.hang()]})
    backend = LimitedBackend(inner, concurrency=9, bytes_in_flight=10)
    small = start(lambda: backend.put([write(1, bytes(1))], deadline=FAR))
    inner.wait_hung(1)
    large = start(lambda: backend.put([write(2, bytes(1000))], deadline=FAR))
    wait_for(lambda: waiting(backend) == 1)
    inner.release(1)
    inner.wait_hung(1)
    assert backend.in_flight == (1, 1000)
    late = backend.put([write(3, bytes(1))], deadline=time.monotonic() + 0.02)
    assert isinstance(late[0].error, TransientError)
    inner.release()
    small.join(30)
    large.join(30)


def test_a_batch_larger_than_the_budget_goes_in_parts() -> None:
    inner = FaultyBackend(DictBackend())
    backend = LimitedBackend(inner, concurrency=1, bytes_in_flight=10)
    sizes = [4, 4, 4, 30, 10, 0, 1]
    data = [bytes([at]) * size for at, size in enumerate(sizes)]
    outcomes = backend.put([write(at, one) for at, one in enumerate(data)], deadline=FAR)
    assert outcomes == [Outcome(FINE, size) for size in sizes]
    assert [call.nbytes for call in inner.calls_of("put")] == [8, 4, 30, 10, 1]
    again = [write(1, b"xxxx"), write(7, bytes(8)), write(7, bytes(3))]
    assert statuses(backend.put(again, deadline=FAR)) == [Status.EXISTS, FINE, Status.EXISTS]
    # All ranges of one key are in one call, wherever they stand in the batch.
    reads = [Read(key(at), memoryview(bytearray(4)), offset) for offset in (0, 4) for at in (0, 4, 3)]
    outcomes = backend.get_into(reads, deadline=FAR)
    assert [outcome.nbytes for outcome in outcomes] == [4, 4, 4, 0, 4, 4]
    assert [bytes(one.dst[: outcome.nbytes]) for one, outcome in zip(reads, outcomes, strict=True)] == [
        data[one.key[-1]][one.offset : one.offset + 4] for one in reads
    ]
    for call in inner.calls_of("get"):
        assert call.nbytes <= 10
        assert set(call.keys) in ({key(0)}, {key(4)}, {key(3)})


def test_parts_that_find_no_slot_in_time_are_errors_and_the_others_stand() -> None:
    inner = FaultyBackend(DictBackend(), {"put": [Fault.ok(), Fault.hang()]})
    backend = LimitedBackend(inner, concurrency=1, bytes_in_flight=10)
    answers: list[list[Outcome]] = []
    deadline = time.monotonic() + 0.05
    big = start(lambda: answers.append(backend.put([write(at, bytes(10)) for at in range(3)], deadline=deadline)))
    inner.wait_hung(1)
    wait_for(lambda: time.monotonic() > deadline)
    inner.release()
    big.join(30)
    (outcomes,) = answers
    assert statuses(outcomes)[0] is FINE
    assert statuses(outcomes)[2] is ERROR
    assert len(outcomes) == 3


def test_waiting_ends_at_the_deadline_and_gives_the_place_up() -> None:
    metrics = Metrics()
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.hang()]})
    backend = LimitedBackend(inner, concurrency=1, metrics=metrics)
    first = start(lambda: backend.stat([key(1)], deadline=FAR))
    inner.wait_hung(1)
    for left in (-1.0, 0.0, 0.02):
        begun = time.monotonic()
        outcomes = backend.stat([key(1), key(2)], deadline=begun + left)
        assert statuses(outcomes) == [ERROR, ERROR]
        assert isinstance(outcomes[0].error, TransientError)
        assert "slot" in str(outcomes[0].error)
        assert time.monotonic() >= begun + left
    assert waiting(backend) == 0
    assert metrics.value("kvstore_limit_timeouts_total", "dict") == 3
    inner.release()
    first.join(30)
    assert statuses(backend.stat([key(1)], deadline=FAR)) == [MISSED]


def test_a_large_one_that_gives_up_lets_those_behind_it_in() -> None:
    inner = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    backend = LimitedBackend(inner, concurrency=9, bytes_in_flight=10)
    first = start(lambda: backend.put([write(1, bytes(5))], deadline=FAR))
    inner.wait_hung(1)
    large = start(lambda: backend.put([write(2, bytes(10))], deadline=time.monotonic() + 0.1))
    wait_for(lambda: waiting(backend) == 1)
    assert backend.put([write(3, bytes(5))], deadline=time.monotonic() + 20) == [Outcome(FINE, 5)]
    large.join(30)
    inner.release()
    first.join(30)


def test_close_wakes_those_that_wait() -> None:
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.hang(Fault.miss())]})
    backend = LimitedBackend(inner, concurrency=1)
    first = start(lambda: backend.stat([key(1)], deadline=FAR))
    inner.wait_hung(1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            backend.stat([key(1)], deadline=FAR)
        except ClosedError as error:
            raised.append(error)

    second = start(wait)
    wait_for(lambda: waiting(backend) == 1)
    backend.close()
    second.join(30)
    assert len(raised) == 1
    inner.release()
    first.join(30)
    assert backend.in_flight == (0, 0)


def test_slots_come_back_whatever_the_call_does() -> None:
    inner = FaultyBackend(DictBackend())
    backend = LimitedBackend(inner, concurrency=1, bytes_in_flight=8)
    for error in (ValueError("x"), ClosedError("x"), KeyboardInterrupt(), TransientError("x")):
        inner.push(Fault.raises(error), operation="put")
        try:
            backend.put([write(1)], deadline=FAR)
        except (ClosedError, KeyboardInterrupt):
            pass
        assert backend.in_flight == (0, 0)


def test_throttling_halves_the_concurrency_and_success_brings_it_back() -> None:
    metrics = Metrics()
    inner = FaultyBackend(DictBackend())
    backend = LimitedBackend(inner, concurrency=8, metrics=metrics)
    inner.push(*[Fault.error()] * 4, operation="stat")
    allowed = []
    for _ in range(4):
        backend.stat([key(1)], deadline=FAR)
        allowed.append(backend.allowed)
    assert allowed == [4, 2, 1, 1]
    assert metrics.snapshot()["kvstore_limit_concurrency"]["series"][0]["value"] == 1
    for _ in range(60):
        backend.stat([key(1)], deadline=FAR)
        allowed.append(backend.allowed)
    assert allowed[4:8] == [2, 2, 2, 3]
    assert allowed[-1] == 8
    assert sorted(allowed[3:]) == allowed[3:]


def test_throttled_calls_of_one_round_trip_halve_it_once() -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.hang(Fault.error()))
    backend = LimitedBackend(inner, concurrency=8)
    threads = [start(lambda: backend.stat([key(1)], deadline=FAR)) for _ in range(8)]
    inner.wait_hung(8)
    inner.release()
    for thread in threads:
        thread.join(30)
    assert backend.allowed == 4


@pytest.mark.parametrize("fault", [Fault.miss(), Fault.error(PermanentError("denied")), Fault.error().on(0)])
def test_what_is_not_throttling_changes_nothing(fault: Fault) -> None:
    backend = LimitedBackend(FaultyBackend(DictBackend(), otherwise=fault), concurrency=8)
    backend.stat([key(1), key(2)], deadline=FAR)
    assert backend.allowed == 8
    fixed = LimitedBackend(FaultyBackend(DictBackend(), otherwise=Fault.error()), concurrency=8, adaptive=False)
    fixed.stat([key(1)], deadline=FAR)
    assert fixed.allowed == 8


def test_what_says_nothing_about_the_backend_is_no_throttling() -> None:
    late = LimitedBackend(FaultyBackend(DictBackend(), otherwise=Fault.error()), concurrency=8)
    late.stat([key(1)], deadline=time.monotonic() - 1)  # over before it began
    assert late.allowed == 8
    late.stat([key(1)], deadline=FAR)
    assert late.allowed == 4
    waits = FaultyBackend(DictBackend(), otherwise=Fault.error(LocalWait("others hold the lock")))
    local = LimitedBackend(waits, concurrency=8)
    local.stat([key(1)], deadline=FAR)
    assert local.allowed == 8


def test_a_full_house_does_not_open_the_breaker() -> None:
    """Calls that found no slot say nothing about the backend."""
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.hang()]})
    limited = LimitedBackend(inner, concurrency=1)
    backend = BreakerBackend(RetryingBackend(limited, base_delay=0.0), failures=2)
    first = start(lambda: backend.stat([key(1)], deadline=FAR))
    inner.wait_hung(1)
    for _ in range(5):
        assert statuses(backend.stat([key(1)], deadline=time.monotonic() + 0.002)) == [ERROR]
    assert backend.state.name == "CLOSED"
    inner.release()
    first.join(30)


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"concurrency": 1, "bytes_in_flight": 0}])
def test_bad_arguments_of_limited(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LimitedBackend(DictBackend(), **bad)
