"""`HedgedBackend`: a second request after the usual time, bounded in number, and never a late write to `dst`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.backend import MISS, Backend, Capability, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool, Slab
from kvstore.errors import ClosedError, ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.wrappers import HedgedBackend

FAR = math.inf


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


class Rig:
    """Two replicas, both scripted, with the same records; the primary's usual time is known after `warm`."""

    def __init__(self, **more: object) -> None:
        self.metrics = Metrics()
        self.primary = FaultyBackend(DictBackend(name="primary"))
        self.alternate = FaultyBackend(DictBackend(name="alternate"))
        self.pool = BufferPool(1 << 20)
        arguments: dict[str, object] = {"max_extra": 1.0, "min_samples": 4, "min_delay": 0.005, **more}
        self.backend = HedgedBackend(
            self.primary,
            self.alternate,
            pool=self.pool,
            metrics=self.metrics,
            **arguments,  # type: ignore[arg-type]
        )
        self.stored: dict[int, bytes] = {}
        self.before: dict[tuple[str, str], float] = {}

    def store(self, number: int, data: bytes, *, primary: bool = True, alternate: bool = True) -> None:
        self.stored[number] = data
        for there, replica in ((primary, self.primary), (alternate, self.alternate)):
            if there:
                replica.inner.put([Write(key(number), [memoryview(data)])], deadline=FAR)

    def reads(self, *numbers: int, nbytes: int = 100) -> list[Read]:
        return [Read(key(number), memoryview(bytearray(b"\xa5" * nbytes))) for number in numbers]

    def get(self, reads: Sequence[Read], deadline: float = FAR) -> list[Outcome]:
        return self.backend.get_into(reads, deadline=deadline)

    def check(self, reads: Sequence[Read], outcomes: Sequence[Outcome]) -> None:
        """Every read is OK with exactly its bytes, and nothing behind them was written."""
        for read, outcome in zip(reads, outcomes, strict=True):
            data = self.stored[int.from_bytes(read.key)][read.offset : read.offset + len(read.dst)]
            assert outcome == Outcome(Status.OK, len(data))
            assert bytes(read.dst[: len(data)]) == data
            assert bytes(read.dst[len(data) :]) == b"\xa5" * (len(read.dst) - len(data))

    def warm(self, *numbers: int, nbytes: int = 100) -> None:
        for _ in range(4):
            self.get(self.reads(*numbers, nbytes=nbytes))
            self.backend.stat([key(number) for number in numbers], deadline=FAR)
        self.primary.calls.clear()
        self.alternate.calls.clear()
        self.before = self.counted()

    def counted(self) -> dict[tuple[str, str], float]:
        series = self.metrics.snapshot().get("kvstore_hedged_reads_total", {"series": []})["series"]
        return {(one["labels"]["operation"], one["labels"]["result"]): one["value"] for one in series}

    def value(self, result: str, operation: str = "get") -> float:
        """Reads with that result since `warm`."""
        return self.counted().get((operation, result), 0) - self.before.get((operation, result), 0)

    def close(self) -> None:
        self.primary.release()
        self.alternate.release()
        self.backend.close()
        assert self.pool.stats().in_use == self.pool.stats().pinned == 0
        self.pool.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**more: object) -> Rig:
        rigs.append(Rig(**more))
        for number in range(4):
            rigs[-1].store(number, bytes([number + 1]) * (60 + number))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """Asks again after 5 ms."""
    rig = make_rig()
    for count in (1, 2, 4):  # of several size classes
        rig.warm(*range(count))
    return rig


@pytest.fixture
def calm(make_rig: Callable[..., Rig]) -> Rig:
    """Reads as if it could ask again, but so late that no stall of this machine makes it do so."""
    rig = make_rig(min_delay=3600.0)
    rig.warm(0, 1, 2, 3)
    return rig


# The second request.


def test_a_slow_read_is_served_by_the_other_replica(rig: Rig) -> None:
    """The primary hangs; the caller gets the alternate's bytes, and the late primary never touches `dst`."""
    rig.primary.push(Fault.late(), operation="get")
    reads = rig.reads(0, 1, 2, 3)
    rig.check(reads, rig.get(reads))
    assert rig.primary.hung == 1
    assert rig.value("won") == 4
    stats = rig.pool.stats()
    assert (stats.pinned, stats.quarantined) == (1, 1)  # the loser's scratch memory, until it has ended
    for read in reads:
        read.dst[:] = bytes(len(read.dst))  # the memory is the caller's again
    rig.primary.release()
    rig.primary.wait_done(1, "get")
    assert all(bytes(read.dst) == bytes(len(read.dst)) for read in reads)
    rig.backend.close()
    assert rig.pool.stats().in_use == 0


def test_a_read_in_the_usual_time_sends_no_second_request(calm: Rig) -> None:
    for _ in range(20):
        reads = calm.reads(0, 1, 2, 3)
        calm.check(reads, calm.get(reads))
    assert len(calm.primary.calls) == 20
    assert calm.alternate.calls == []
    assert calm.value("fast") == 80


def test_the_first_success_wins_also_if_it_is_the_primary(rig: Rig) -> None:
    reads = rig.reads(0, 1)
    outcomes: list[Outcome] = []
    rig.primary.push(Fault.late(), operation="get")
    rig.alternate.push(Fault.late(), operation="get")
    caller = threading.Thread(target=lambda: outcomes.extend(rig.get(reads)))
    caller.start()
    rig.alternate.wait_hung()
    rig.primary.release()
    caller.join(30)
    rig.check(reads, outcomes)
    assert rig.alternate.hung == 1
    assert rig.value("lost") == 2


def test_a_slow_stat_is_served_by_the_other_replica(rig: Rig) -> None:
    rig.primary.push(Fault.hang(), operation="stat")
    outcomes = rig.backend.stat([key(number) for number in range(4)], deadline=FAR)
    assert outcomes == [Outcome(Status.OK, 60 + number) for number in range(4)]
    assert rig.value("won", "stat") == 4
    assert rig.pool.stats().in_use == 0


def test_a_second_request_that_fails_is_no_harm(rig: Rig) -> None:
    rig.primary.push(Fault.hang(), operation="get")
    rig.alternate.push(Fault.error(), operation="get")
    reads = rig.reads(0, 1, 2, 3)
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.extend(rig.get(reads)))
    caller.start()
    rig.alternate.wait_done(1, "get")
    assert caller.is_alive()  # it waits for the primary
    rig.primary.release()
    caller.join(30)
    rig.check(reads, outcomes)


def test_each_key_is_taken_from_one_replica_as_a_whole(make_rig: Callable[..., Rig]) -> None:
    """The replicas hold different versions of a key; each answers one of its two ranges. No mixture comes out."""
    rig = make_rig()
    rig.store(9, b"P" * 100, alternate=False)
    rig.store(9, b"A" * 100, primary=False)
    reads = [
        Read(key(9), memoryview(bytearray(50)), 0),
        Read(key(0), memoryview(bytearray(60)), 0),
        Read(key(9), memoryview(bytearray(50)), 50),
    ]
    rig.primary.push(Fault.error().on(2), operation="get")
    outcomes = rig.get(reads)
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 3
    assert [bytes(read.dst[:1]) for read in reads] == [b"A", b"\1", b"A"]
    rig.primary.push(Fault.error().on(2), operation="get")
    rig.alternate.push(Fault.error().on(0), operation="get")
    outcomes = rig.get(reads)
    assert [outcome.status for outcome in outcomes] == [Status.ERROR, Status.OK, Status.OK]
    assert bytes(reads[2].dst) == b"A" * 50
    rig.primary.push(Fault.error().on(2), operation="get")
    rig.alternate.push(Fault.miss(), operation="get")
    outcomes = rig.get(reads)
    assert [outcome.status for outcome in outcomes] == [Status.ERROR, Status.OK, Status.ERROR]


def test_partial_answers_of_both_replicas_are_put_together_by_key(rig: Rig) -> None:
    rig.primary.push(Fault.hang(Fault.error().on(0)), operation="get")
    rig.alternate.push(Fault.error().on(1), operation="get")
    reads = rig.reads(0, 1, 2, 3)
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.extend(rig.get(reads)))
    caller.start()
    rig.alternate.wait_done(1, "get")
    rig.primary.release()
    caller.join(30)
    rig.check(reads, outcomes)


def test_when_both_fail_the_primarys_outcome_stands(rig: Rig) -> None:
    reads = rig.reads(0, 1, 2)
    rig.primary.push(
        Fault.hang(Fault.each({0: Fault.miss(), 1: Fault.error(PermanentError("denied"))})), operation="get"
    )
    rig.alternate.push(Fault.error(), operation="get")
    outcomes: list[Outcome] = []
    caller = threading.Thread(target=lambda: outcomes.extend(rig.get(reads)))
    caller.start()
    rig.alternate.wait_done(1, "get")
    rig.primary.release()
    caller.join(30)
    assert [outcome.status for outcome in outcomes] == [Status.MISS, Status.ERROR, Status.OK]
    assert isinstance(outcomes[1].error, PermanentError)
    rig.check(reads[2:], outcomes[2:])


def test_at_the_deadline_the_call_returns_and_nobody_writes_later(rig: Rig) -> None:
    rig.primary.push(Fault.late(), operation="get")
    rig.alternate.push(Fault.late(), operation="get")
    reads = rig.reads(0, 1, 2, 3)
    begun = time.monotonic()
    outcomes = rig.get(reads, deadline=begun + 0.1)
    assert 0.1 <= time.monotonic() - begun < 5.0
    assert all(isinstance(outcome.error, TransientError) for outcome in outcomes)
    assert rig.pool.stats().quarantined == 2
    rig.primary.release()
    rig.alternate.release()
    rig.primary.wait_done(1, "get")
    rig.alternate.wait_done(1, "get")
    assert all(bytes(read.dst) == b"\xa5" * 100 for read in reads)


def test_short_records_and_ends_are_as_the_replica_says(rig: Rig) -> None:
    """Offsets at and behind the end, empty destinations, and a destination longer than the record; scratch memory
    that held other data before never shows."""
    reads = [
        Read(key(number), memoryview(bytearray(b"\xa5" * nbytes)), offset)
        for number, offset, nbytes in ((0, 10, 100), (0, 60, 10), (0, 99, 10), (1, 0, 0), (1, 5, 3), (2, 0, 287))
    ]
    rig.primary.push(Fault.late(), operation="get")
    rig.check(reads, rig.get(reads))
    assert rig.value("won") == 6


# What is not hedged.


def test_the_budget_bounds_second_requests(make_rig: Callable[..., Rig]) -> None:
    """Every read of the primary is slow from some point on; only 5 % of all get a second request."""
    rig = make_rig(max_extra=0.05, min_samples=20, threads=64)
    total = 0
    for _ in range(200):
        rig.get(rig.reads(0))
        total += 1
    for _ in range(40):
        rig.primary.push(Fault.hang(), operation="get")
        hedged = rig.alternate.count("get")
        outcomes: list[Outcome] = []
        caller = threading.Thread(target=lambda out=outcomes: out.extend(rig.get(rig.reads(0))))
        caller.start()
        total += 1
        rig.primary.wait_hung()
        if rig.backend._budget.covers(1):
            rig.alternate.wait_done(hedged + 1, "get")
        rig.primary.release()
        caller.join(30)
        assert outcomes[0].ok
    assert 0 < rig.alternate.count("get") <= 0.05 * total
    assert rig.value("budget") > 0


def test_a_replica_that_hangs_is_hedged_also_if_no_read_was_of_that_size_before(make_rig: Callable[..., Rig]) -> None:
    """What a pool of nodes asks of one node has another size with every batch."""
    rig = make_rig(min_samples=8)
    for _ in range(4):
        rig.get(rig.reads(0, 1))  # 200 bytes
        rig.get(rig.reads(0, 1, 2, 3))  # 400
    rig.primary.push(Fault.hang(), operation="get")
    reads = rig.reads(3)
    rig.check(reads, rig.get(reads, time.monotonic() + 20.0))
    assert rig.value("won") == 1


def test_what_was_spent_on_slow_reads_does_not_lack_when_the_primary_hangs(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_extra=0.25, min_samples=4, threads=64)
    for _ in range(400):
        rig.get(rig.reads(0))
    while rig.backend._budget.pay(1, urgent=False):  # a bad day: all that it may is spent on what is a little slow
        pass
    for _ in range(4):
        rig.primary.push(Fault.hang(), operation="get")
        reads = rig.reads(0)
        rig.check(reads, rig.get(reads, time.monotonic() + 20.0))
    assert rig.value("won") == 4
    assert rig.alternate.count("get") == 4


def test_without_enough_latencies_the_read_goes_straight_to_dst(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(min_samples=1000)
    views: list[int] = []

    class Spy(DictBackend):
        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            views.extend(id(read.dst) for read in reads)
            return [MISS] * len(reads)

    rig.primary.inner = Spy()
    reads = rig.reads(7)
    rig.get(reads)
    assert views == [id(reads[0].dst)]
    assert rig.pool.stats().in_use == 0


def test_without_scratch_memory_it_is_a_plain_read(calm: Rig) -> None:
    with calm.pool.acquire(calm.pool.largest):
        reads = calm.reads(0, 1, 2, 3)
        calm.check(reads, calm.get(reads))
    assert calm.value("memory") == 4
    assert calm.alternate.calls == []
    reads = calm.reads(0, 1, 2, 3)
    calm.check(reads, calm.get(reads))
    assert calm.value("fast") == 4


def test_without_scratch_memory_for_the_second_request_the_first_goes_on(rig: Rig) -> None:
    rig.primary.push(Fault.hang(), operation="get")
    outcomes: list[Outcome] = []
    reads = rig.reads(0, 1, 2, 3)
    caller = threading.Thread(target=lambda: outcomes.extend(rig.get(reads)))
    held = rig.pool.acquire(rig.pool.largest - 4096)
    saved = rig.backend._budget._saved
    caller.start()
    rig.primary.wait_hung()
    end = time.monotonic() + 30
    while not rig.value("memory"):
        assert time.monotonic() < end
        time.sleep(0.001)
    rig.primary.release()
    caller.join(30)
    held.release()
    rig.check(reads, outcomes)
    assert rig.alternate.calls == []
    assert rig.backend._budget._saved == saved + 4  # earned by these four, and what was paid is given back


def test_without_a_free_thread_it_is_a_plain_read(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(threads=1)
    rig.warm(0)
    rig.primary.push(Fault.hang(), operation="get")
    blocked = threading.Thread(target=lambda: rig.get(rig.reads(0)))
    blocked.start()
    rig.primary.wait_hung()
    reads = rig.reads(0)
    rig.check(reads, rig.get(reads))
    assert rig.value("threads") >= 1
    rig.primary.release()
    blocked.join(30)


def test_a_deadline_nearer_than_the_usual_time_is_not_hedged(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(min_delay=60.0)
    rig.warm(0)
    reads = rig.reads(0)
    rig.check(reads, rig.get(reads, deadline=time.monotonic() + 30))
    assert rig.value("fast") == 0
    assert rig.pool.stats().in_use == 0


def test_everything_else_goes_to_the_primary_only(rig: Rig) -> None:
    backend = rig.backend
    backend.put([Write(key(50), [memoryview(b"x")])], deadline=FAR)
    backend.quarantine([key(50)], deadline=FAR)
    backend.delete([key(0)], deadline=FAR)
    assert backend.lease([key(1)], deadline=FAR) == [None]
    assert {info.key for page in backend.list(deadline=FAR) for info in page} == {key(1), key(2), key(3)}
    assert rig.alternate.calls == []
    rig.primary.push(Fault.error(), operation="put")
    (outcome,) = backend.put([Write(key(60), [memoryview(b"x")])], deadline=FAR)
    assert outcome.status is Status.ERROR
    assert rig.alternate.calls == []


# Falling through.


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault.miss(), Fault.error(), Fault.raises(OSError(5, "x")), Fault.raises(ClosedError("c"))]
)
def test_misses_and_errors_fall_through(make_rig: Callable[..., Rig], fault: Fault, warm: bool) -> None:
    rig = make_rig(min_samples=4 if warm else 1000, min_delay=3600.0)
    rig.warm(0, 1, 2, 3)
    rig.primary.push(fault, operation="get")
    reads = rig.reads(0, 1, 2, 3)
    rig.check(reads, rig.get(reads))
    assert rig.metrics.value("kvstore_fallthrough_items_total", "primary", "get", "saved") == 4
    rig.primary.push(fault, operation="stat")
    assert [outcome.ok for outcome in rig.backend.stat([key(0), key(1)], deadline=FAR)] == [True, True]


@pytest.mark.parametrize("warm", [False, True])
def test_only_what_is_missing_is_asked_of_the_alternate(make_rig: Callable[..., Rig], warm: bool) -> None:
    rig = make_rig(min_samples=4 if warm else 1000, min_delay=3600.0)
    rig.store(8, b"only there", primary=False)
    rig.warm(0, 1, 2, 3)
    reads = rig.reads(0, 8, 1, 99)
    outcomes = rig.get(reads)
    rig.check(reads[:3], outcomes[:3])
    assert outcomes[3] == MISS
    assert [call.keys for call in rig.alternate.calls] == [(key(8), key(99))]


def test_after_the_deadline_nothing_falls_through(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    (outcome,) = rig.get(rig.reads(0), deadline=time.monotonic() - 1)
    assert isinstance(outcome.error, TransientError)
    assert rig.alternate.calls_of("get") == []


def test_an_unusable_primary_is_replaced_and_two_of_them_raise(rig: Rig) -> None:
    rig.primary.inner.close()
    reads = rig.reads(0, 1, 2, 3)
    rig.check(reads, rig.get(reads))
    (outcome,) = rig.backend.stat([key(99)], deadline=FAR)
    assert isinstance(outcome.error, ClosedError)
    rig.alternate.inner.close()
    for _ in range(2):
        with pytest.raises(ClosedError):
            rig.get(reads)
        with pytest.raises(ClosedError):
            rig.backend.stat([key(0)], deadline=FAR)


def test_an_interrupt_in_a_worker_is_the_callers(calm: Rig) -> None:
    calm.primary.push(Fault.raises(KeyboardInterrupt()), operation="get")
    with pytest.raises(KeyboardInterrupt):
        calm.get(calm.reads(0, 1, 2, 3))
    reads = calm.reads(0, 1, 2, 3)
    calm.check(reads, calm.get(reads))  # the thread lives on


# Life.


class Registering(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capability.REGISTERED_MEMORY
        self.slabs: list[Slab] = []

    def register(self, slab: Slab) -> None:
        self.slabs.append(slab)


def test_memory_is_made_known_to_both_replicas() -> None:
    primary, alternate = DictBackend(), Registering()
    with BufferPool(4096) as pool, HedgedPair(primary, alternate, pool=pool) as backend:
        assert alternate.slabs == list(pool.slabs)
        assert Capability.REGISTERED_MEMORY in backend.capabilities
        assert backend.limits == primary.limits


class HedgedPair(HedgedBackend):
    def __enter__(self) -> HedgedPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_close_returns_with_requests_in_flight_and_the_threads_end(rig: Rig) -> None:
    rig.primary.push(Fault.late(), operation="get")
    rig.get(rig.reads(0, 1, 2, 3))
    begun = time.monotonic()
    rig.backend.close()  # the primary still hangs
    assert time.monotonic() - begun < 10
    with pytest.raises(ClosedError):
        rig.get(rig.reads(0))
    rig.primary.release()
    end = time.monotonic() + 30
    while any(thread.name.startswith("kvstore-hedge") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert rig.pool.stats().in_use == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_without_hedging(rig: Rig) -> None:
    class Plain(DictBackend):
        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            return [Outcome(Status.OK, 0)] * len(reads)

    child_safe: list[Backend] = [Plain(), Plain()]
    rig.primary, rig.alternate = FaultyBackend(DictBackend()), FaultyBackend(DictBackend())
    rig.backend._inner, rig.backend._alternate = child_safe
    for _ in range(10):
        rig.get(rig.reads(0, 1, 2, 3))
    pid = os.fork()
    if pid == 0:
        threads = threading.active_count()
        fine = all(outcome.ok for _ in range(50) for outcome in rig.get(rig.reads(0)))
        os._exit(0 if fine and threading.active_count() == threads else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_many_threads_get_their_own_bytes(make_rig: Callable[..., Rig]) -> None:
    """Half of the primary's reads are slower than the usual time; 6 callers check every byte they get."""
    rig = make_rig(min_delay=0.0005)
    rig.warm(0, 1, 2, 3)
    turn = iter(range(1 << 30))

    class Uneven(DictBackend):
        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            if next(turn) % 2:
                time.sleep(0.002)
            return super().get_into(reads, deadline=deadline)

    uneven = Uneven(name="primary")
    uneven.records.update(rig.primary.inner.records)  # type: ignore[attr-defined]
    rig.primary.inner = uneven
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for at in range(60):
                reads = rig.reads(*(number % 4 for number in range(at, at + 4)))
                rig.check(reads, rig.get(reads))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.parametrize(
    "bad",
    [{"quantile": 0.0}, {"quantile": 1.0}, {"max_extra": 1.1}, {"min_samples": 0}, {"min_delay": -1.0}, {"threads": 0}],
)
def test_bad_arguments(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        HedgedBackend(DictBackend(), DictBackend(), **bad)  # type: ignore[arg-type]
