"""`BreakerBackend`: opens on what counts, refuses fast, comes back by itself."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore.backend import Backend, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import ClosedError, ConfigError, CorruptRecord, PermanentError, PoolExhausted, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.wrappers import BreakerBackend, BreakerState, RetryingBackend

FAR = math.inf
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class FakeClock:
    """Far ahead of the real clock, so that the deadlines derived from it are in a double's future."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 1e6

    def __call__(self) -> float:
        return self.now


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


class Rig:
    """A breaker over a scripted backend, with a clock and jitter of the test's."""

    def __init__(self, *, failures: int = 3, otherwise: Fault | None = None, **more: object) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.inner = FaultyBackend(DictBackend(), otherwise=otherwise or Fault.error())
        arguments: dict[str, object] = {"open_for": 1.0, "max_open_for": 8.0, "rng": lambda: 1.0, **more}
        self.backend = BreakerBackend(
            self.inner,
            failures=failures,
            metrics=self.metrics,
            clock=self.clock,
            **arguments,  # type: ignore[arg-type]
        )

    def stat(self, count: int = 1, deadline: float = FAR) -> list[Outcome]:
        return self.backend.stat([key(at) for at in range(count)], deadline=deadline)

    def open(self) -> None:
        while self.backend.state is not OPEN:
            self.stat()

    def reached(self, call: Callable[[], object]) -> bool:
        """Whether `call` reached the inner backend."""
        before = len(self.inner.calls)
        call()
        return len(self.inner.calls) > before


def refused(outcomes: Sequence[Outcome]) -> bool:
    return all(
        isinstance(outcome.error, TransientError) and "breaker open" in str(outcome.error) for outcome in outcomes
    )


# Opening.


@pytest.mark.parametrize("failures", [1, 3, 5])
def test_it_opens_after_so_many_failed_calls_in_a_row(failures: int) -> None:
    rig = Rig(failures=failures)
    for _ in range(failures):
        assert rig.backend.state is CLOSED
        assert not refused(rig.stat(4))
    assert rig.backend.state is OPEN
    assert not rig.reached(rig.stat)
    assert rig.metrics.value("kvstore_breaker_state", "dict", "reads") == 2


def test_a_success_between_failures_starts_the_count_anew() -> None:
    rig = Rig()
    for fault in (Fault.error(), Fault.error(), Fault.miss(), Fault.error(), Fault.error()):
        rig.inner.push(fault)
        rig.stat()
    assert rig.backend.state is CLOSED
    rig.stat()
    assert rig.backend.state is OPEN


DEFINITE = [
    Fault.ok(),
    Fault.miss(),
    Fault.error(PermanentError("access denied")),
    Fault.error(CorruptRecord("checksum")),
    Fault.raises(PermanentError("no such bucket")),
    Fault.error().on(0),  # one of two items failed in passing: the backend answers
    Fault.each({0: Fault.error(), 1: Fault.error(PermanentError("too large"))}),
]
SILENT = [Fault.error(PoolExhausted("no memory")), Fault.raises(PoolExhausted("no memory"))]
FAILED = [
    Fault.error(),
    Fault.raises(OSError(5, "Input/output error")),
    Fault.raises(TimeoutError()),
    Fault.raises(ValueError("bug")),
    Fault.raises(TransientError("throttled")),
    Fault.each({0: Fault.error(), 1: Fault.error(PoolExhausted("no memory"))}),
]


@pytest.mark.parametrize("fault", DEFINITE)
def test_definite_answers_keep_it_closed(fault: Fault) -> None:
    rig = Rig(failures=2, otherwise=fault)
    for _ in range(10):
        rig.stat(2)
    assert rig.backend.state is CLOSED
    rig.inner.push(Fault.error(), fault, Fault.error())
    for _ in range(3):
        rig.stat(2)
    assert rig.backend.state is CLOSED


@pytest.mark.parametrize("fault", FAILED)
def test_failures_of_whole_calls_open_it(fault: Fault) -> None:
    rig = Rig(failures=2, otherwise=fault)
    rig.stat(2)
    assert rig.backend.state is CLOSED
    rig.stat(2)
    assert rig.backend.state is OPEN


@pytest.mark.parametrize("fault", SILENT)
def test_what_says_nothing_neither_opens_it_nor_starts_the_count_anew(fault: Fault) -> None:
    rig = Rig(failures=2)
    rig.inner.push(Fault.error(), fault)
    rig.stat(2)
    rig.stat(2)
    rig.backend.stat([], deadline=FAR)
    rig.stat(2, deadline=rig.clock())  # too late before it began: no fault of the backend
    assert rig.backend.state is CLOSED
    rig.stat(2)
    assert rig.backend.state is OPEN


def test_every_operation_counts_and_is_refused() -> None:
    reads: list[Callable[[Backend], list[Outcome]]] = [
        lambda backend: backend.stat([key(1)], deadline=FAR),
        lambda backend: backend.get_into([Read(key(1), memoryview(bytearray(1)))], deadline=FAR),
    ]
    writes: list[Callable[[Backend], list[Outcome]]] = [
        lambda backend: backend.put([Write(key(1), [memoryview(b"x")])], deadline=FAR),
        lambda backend: backend.delete([key(1)], deadline=FAR),
        lambda backend: backend.quarantine([key(1)], deadline=FAR),
    ]
    for call in [*reads, *writes]:
        rig = Rig(failures=2)
        call(rig.backend)
        call(rig.backend)
        assert rig.backend.state is OPEN
        side = reads if call in reads else writes
        for other in side:
            assert refused(other(rig.backend))
        assert len(rig.inner.calls) == 2


def test_trouble_with_writes_refuses_no_reads_and_the_other_way_round() -> None:
    failing = {"stat": [], "put": [Fault.error()] * 3}
    backend = BreakerBackend(FaultyBackend(DictBackend(), failing), failures=3, metrics=(metrics := Metrics()))
    write = [Write(key(1), [memoryview(b"x")])]
    for _ in range(3):
        assert backend.stat([key(1)], deadline=FAR)[0].status is Status.MISS  # an answer to a read saves no write
        backend.put(write, deadline=FAR)
    assert (backend.read_state, backend.write_state, backend.state) == (CLOSED, OPEN, OPEN)
    assert refused(backend.put(write, deadline=FAR))
    assert refused(backend.delete([key(1)], deadline=FAR))
    assert backend.stat([key(1)], deadline=FAR)[0].status is Status.MISS
    assert list(backend.list(deadline=FAR)) == []
    assert [metrics.value("kvstore_breaker_state", "dict", side) for side in ("reads", "writes")] == [0, 2]
    rig = Rig()
    rig.open()
    assert (rig.backend.read_state, rig.backend.write_state) == (OPEN, CLOSED)
    rig.inner.push(Fault.ok())
    assert rig.backend.put(write, deadline=FAR)[0].ok


def test_a_slow_hang_opens_it() -> None:
    """Calls that end in nothing at their deadline, as against a server that accepts and never answers."""
    rig = Rig(failures=2)

    class Hung(DictBackend):
        def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
            rig.clock.now = deadline
            late = TransientError("the deadline passed", backend=self.name, operation="stat")
            return [Outcome.failed(late)] * len(keys)

    rig.inner.inner = Hung()
    rig.inner.push(Fault.ok(), Fault.ok())
    for _ in range(2):
        rig.stat(100, deadline=rig.clock() + 30)
    assert rig.backend.state is OPEN


# Open.


def test_an_open_breaker_answers_within_5_ms_without_asking() -> None:
    rig = Rig()
    rig.open()
    before = len(rig.inner.calls)
    durations = []
    for _ in range(50):
        start = time.perf_counter()
        outcomes = rig.stat(100)
        durations.append(time.perf_counter() - start)
        assert refused(outcomes)
        assert len(outcomes) == 100
    assert sorted(durations)[25] < 0.005
    assert len(rig.inner.calls) == before
    assert rig.metrics.value("kvstore_breaker_refused_total", "dict", "stat") == 5000


def test_lease_and_list_of_an_open_breaker() -> None:
    with BufferPool(4096) as pool, pool.acquire(4) as buffer:

        class Leasing(DictBackend):
            def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
                return [buffer.retain()] * len(keys)

        rig = Rig()
        rig.inner.inner = Leasing()
        rig.inner.push(Fault.ok(), operation="lease")
        (lease,) = rig.backend.lease([key(1)], deadline=FAR)
        assert lease is not None
        lease.release()
        rig.open()
        assert rig.backend.lease([key(1), key(2)], deadline=FAR) == [None, None]
        with pytest.raises(TransientError, match="breaker open"):
            rig.backend.list(deadline=FAR)
        rig.backend.register(pool.slabs[0])  # local, and needed later
        assert len(rig.inner.calls_of("register")) == 1


def test_a_closed_backend_says_so_even_if_the_breaker_is_open() -> None:
    rig = Rig()
    rig.open()
    rig.backend.close()
    with pytest.raises(ClosedError):
        rig.stat()


# Coming back.


def test_it_comes_back_by_itself_however_long_nobody_asks() -> None:
    """No thread, no timer: the first call after the interval is the probe, a second or a day later."""
    for pause in (1.0, 86_400.0):
        rig = Rig()
        rig.open()
        rig.clock.now += 0.999
        assert refused(rig.stat())
        rig.clock.now += pause
        rig.inner.push(Fault.miss())
        assert rig.stat()[0].status is Status.MISS
        assert rig.backend.state is CLOSED
        assert rig.metrics.value("kvstore_breaker_state", "dict", "reads") == 0


def test_the_interval_grows_to_its_bound_and_starts_anew_after_success() -> None:
    rig = Rig()
    rig.open()
    for interval in (1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        rig.clock.now += interval - 0.001
        assert not rig.reached(rig.stat)
        rig.clock.now += 0.002
        assert rig.reached(rig.stat)
        assert rig.backend.state is OPEN
    rig.clock.now += 9.0
    rig.inner.push(Fault.miss())
    rig.stat()
    assert rig.backend.state is CLOSED
    rig.open()
    rig.clock.now += 1.001
    assert rig.reached(rig.stat)


def test_the_interval_is_jittered_between_a_half_and_the_whole() -> None:
    for share, interval in ((0.0, 0.5), (0.5, 0.75), (1.0, 1.0)):
        rig = Rig(rng=lambda share=share: share)
        rig.open()
        rig.clock.now += interval - 0.001
        assert not rig.reached(rig.stat)
        rig.clock.now += 0.002
        assert rig.reached(rig.stat)


def test_after_success_it_takes_the_full_number_of_failures_again() -> None:
    rig = Rig(failures=3)
    rig.open()
    rig.clock.now += 1.001
    rig.inner.push(Fault.miss())
    rig.stat()
    for _ in range(2):
        rig.stat()
    assert rig.backend.state is CLOSED
    rig.stat()
    assert rig.backend.state is OPEN


def test_one_probe_at_a_time() -> None:
    rig = Rig()
    rig.open()
    rig.clock.now += 1.001
    rig.inner.push(Fault.hang(Fault.miss()))
    answers: list[list[Outcome]] = []
    probe = threading.Thread(target=lambda: answers.append(rig.stat()))
    probe.start()
    rig.inner.wait_hung()
    assert rig.backend.state is HALF_OPEN
    before = len(rig.inner.calls)
    others = [threading.Thread(target=lambda: answers.append(rig.stat())) for _ in range(8)]
    for other in others:
        other.start()
    for other in others:
        other.join(30)
    assert len(answers) == 8
    assert all(refused(answer) for answer in answers)
    assert len(rig.inner.calls) == before
    rig.inner.release()
    probe.join(30)
    assert answers[-1][0].status is Status.MISS
    assert rig.backend.state is CLOSED


def test_a_probe_that_never_answers_is_given_up() -> None:
    rig = Rig()
    rig.open()
    rig.clock.now += 1.001
    rig.inner.push(Fault.hang(Fault.error()), Fault.miss())
    probe = threading.Thread(target=rig.stat)
    probe.start()
    rig.inner.wait_hung()
    rig.clock.now += 7.9
    assert refused(rig.stat())
    rig.clock.now += 0.2
    assert rig.stat()[0].status is Status.MISS
    assert rig.backend.state is CLOSED
    rig.inner.release()  # the given-up probe fails at last: an old story
    probe.join(30)
    assert rig.backend.state is CLOSED
    rig.inner.push(Fault.error(), Fault.error())
    rig.stat()
    rig.stat()
    assert rig.backend.state is CLOSED


def test_results_of_calls_from_before_the_change_are_ignored() -> None:
    """A call that began before the breaker opened ends while it is open: neither success nor failure moves it."""
    for late in (Fault.miss(), Fault.error()):
        rig = Rig()
        rig.inner.push(Fault.hang(late))
        slow = threading.Thread(target=rig.stat)
        slow.start()
        rig.inner.wait_hung()
        rig.open()
        rig.inner.release()
        slow.join(30)
        assert rig.backend.state is OPEN
        rig.clock.now += 0.999
        assert refused(rig.stat())


@pytest.mark.parametrize("error", [ClosedError("closed"), KeyboardInterrupt()])
def test_a_probe_without_an_answer_leaves_room_for_the_next(error: BaseException) -> None:
    rig = Rig()
    rig.open()
    rig.clock.now += 1.001
    rig.inner.push(Fault.raises(error), Fault.error(PoolExhausted("no memory")), Fault.miss())
    with pytest.raises(type(error)):
        rig.stat()
    rig.stat()
    assert rig.backend.state is OPEN
    assert rig.stat()[0].status is Status.MISS
    assert rig.backend.state is CLOSED


def test_a_listing_counts_probes_and_closes() -> None:
    rig = Rig(failures=2)
    for _ in range(2):
        with pytest.raises(TransientError):
            rig.backend.list(deadline=FAR)
    assert rig.backend.state is OPEN
    rig.clock.now += 1.001
    rig.inner.inner.put([Write(key(1), [memoryview(b"x")])], deadline=FAR)
    rig.inner.push(Fault.ok())
    assert [info.key for page in rig.backend.list(deadline=FAR) for info in page] == [key(1)]
    assert rig.backend.state is CLOSED


class NoList(DictBackend):
    def list(self, *, deadline: float) -> object:  # type: ignore[override]
        raise PermanentError("cannot list")


def test_a_backend_that_cannot_list_is_not_down() -> None:
    backend = BreakerBackend(NoList(), failures=1)
    for _ in range(3):
        with pytest.raises(PermanentError):
            backend.list(deadline=FAR)
    assert backend.state is CLOSED


def test_a_probe_function_spares_callers_the_wait() -> None:
    asked: list[float] = []
    answers: list[bool | Exception] = [False, ValueError("probe"), True]

    def probe(inner: Backend, deadline: float) -> bool:
        asked.append(deadline)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rig = Rig(probe=probe, probe_timeout=0.25)
    rig.open()
    for interval in (1.001, 2.001):
        rig.clock.now += interval
        before = len(rig.inner.calls)
        assert refused(rig.stat())
        assert asked[-1] == pytest.approx(rig.clock() + 0.25)
        assert len(rig.inner.calls) == before
    rig.clock.now += 4.001
    rig.inner.push(Fault.miss())
    assert rig.stat(deadline=rig.clock() + 0.1)[0].status is Status.MISS
    assert asked[-1] == pytest.approx(rig.clock() + 0.1)
    assert rig.backend.state is CLOSED


def test_changes_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.wrappers")
    rig = Rig()
    rig.open()
    for interval in (1.001, 2.001, 4.001):
        rig.clock.now += interval
        if interval > 4:
            rig.inner.push(Fault.miss())
        for _ in range(1 if interval > 4 else 5):
            rig.stat()
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in messages] == ["WARNING", "INFO"]
    assert "opens after 3 failed calls" in messages[0][1]
    assert "scripted error" in messages[0][1]
    assert "answers again after 7.0 s" in messages[1][1]
    states = ("open", "half_open", "closed")
    changes = [rig.metrics.value("kvstore_breaker_changes_total", "dict", "reads", state) for state in states]
    assert changes == [3, 3, 1]


def test_retries_inside_count_as_one_call() -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    backend = BreakerBackend(RetryingBackend(inner, base_delay=0.0), failures=2)
    backend.stat([key(1)], deadline=FAR)
    assert (backend.state, len(inner.calls)) == (CLOSED, 3)
    backend.stat([key(1)], deadline=FAR)
    assert (backend.state, len(inner.calls)) == (OPEN, 6)


def test_many_threads_leave_it_consistent() -> None:
    """Failures, successes and probes from 8 threads; at the end the backend is fine, and the breaker must agree."""
    inner = FaultyBackend(DictBackend(), [Fault.error()] * 400, otherwise=Fault.miss())
    backend = BreakerBackend(inner, failures=3, open_for=0.0005, max_open_for=0.001)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait(30)
        for _ in range(300):
            (outcome,) = backend.stat([key(1)], deadline=FAR)
            assert outcome.status in {Status.MISS, Status.ERROR}

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    end = time.monotonic() + 30
    while backend.stat([key(1)], deadline=FAR)[0].status is not Status.MISS:
        assert time.monotonic() < end
    assert backend.state is CLOSED


@pytest.mark.parametrize(
    "bad", [{"failures": 0}, {"open_for": 0.0}, {"open_for": 9.0, "max_open_for": 8.0}, {"probe_timeout": 0.0}]
)
def test_bad_arguments(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BreakerBackend(DictBackend(), **bad)  # type: ignore[arg-type]
