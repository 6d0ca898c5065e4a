"""What goes wrong between threads: joins, cancels, deadlines and failures that cross each other's way.

Each test holds the store still at one moment, with a backend that hangs, and lets the other side act.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore import asks
from kvstore.backend import MISS, Outcome, Read, Status
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import opaque_key
from kvstore.layout import KVLayout
from kvstore.record import kv_spec, opaque_spec
from kvstore.scheduler import Job, LaneGroup
from kvstore.store import Item, Priority, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import RAW, expire, faulty, idle, order_of, times, until
from tests.faults.support import DTYPE, LAYOUT, SPEC, TOKENS, chain, items, payload, poisoned, soon, store_over, wants

# Priorities.


@pytest.mark.parametrize("low", [Priority.PREFETCH, Priority.BACKGROUND])
def test_who_waits_for_a_record_does_not_wait_behind_prefetches(low: Priority) -> None:
    keys = chain(4)
    backend = faulty()
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        backend.push(Fault.hang(), operation="get")
        first = store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        early = [store.submit_get(wants([key], poisoned(1)), priority=low) for key in keys[1:]]
        urgent = store.submit_get(wants(keys[3:], poisoned(1)), priority=Priority.DEMAND)
        backend.release()
        assert all(done.result(20)[0].ok for done in [first, urgent, *early])
        assert order_of(backend, "get") == [keys[0], keys[3], keys[1], keys[2]]
        assert idle(store)


def test_who_waits_for_a_put_does_not_wait_behind_background_writes() -> None:
    keys = chain(4)
    backend = faulty({"put": [Fault.hang()]})
    with store_over(backend) as store:
        first = store.submit_put(items(keys[:1]))
        backend.wait_hung()
        early = [store.submit_put(items([key])) for key in keys[1:]]
        urgent = store.submit_put(items(keys[3:]), priority=Priority.DEMAND)
        backend.release()
        assert all(done.result(20)[0].stored for done in [first, urgent, *early])
        assert order_of(backend, "put") == [keys[0], keys[3], keys[1], keys[2]]
        until(lambda: idle(store))


# What no lane has begun waits for nobody.


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_read_that_was_never_begun_gives_its_memory_back_while_the_backend_hangs(how: str) -> None:
    keys = chain(3)
    backend = faulty({"get": [Fault.hang()]})
    with store_over(backend) as store:
        running = store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        buffer = store.pool.acquire(RAW)
        waiting = store.submit_get([Want(keys[1], buffer.view, SPEC, hold=buffer)])
        # Rides along, and gives up as well: it touches nothing either.
        rider = store.submit_get([Want(keys[0], buffer.view, SPEC, hold=buffer)])
        assert store.pool.stats().pinned == 2
        for done in (waiting, rider):
            if how == "cancel":
                assert done.cancel()
            else:
                expire(store, done)
                assert isinstance(done.result(0)[0].error, TransientError)
            assert done.settled()
        buffer.release()
        assert store.pool.stats()[1:5] == (0, 0, 0, 0)
        assert store.stats()["backends"]["dict"]["queued"] == 0
        assert not running.done()
        backend.release()
        assert running.result(20)[0].status is Status.MISS
        assert order_of(backend, "get") == [keys[0]]


def test_puts_that_expire_in_the_queue_make_room_in_it_while_the_backend_hangs() -> None:
    keys = chain(9)
    backend = faulty({"put": [Fault.hang()]})
    with store_over(backend, write_queue_bytes=3 * SPEC.nbytes) as store:
        running = store.submit_put(items(keys[:1]))
        backend.wait_hung()
        for number in (1, 3, 5):
            waiting = store.submit_put(items(keys[number : number + 2]))
            expire(store, waiting)
            assert all("deadline" in str(outcome.error) for outcome in waiting.result(0))
            assert waiting.settled()
            assert store.stats()["write_queue_bytes"] == SPEC.nbytes
        last = store.submit_put(items(keys[7:]))
        backend.release()
        assert running.result(20)[0].ok
        assert all(outcome.ok for outcome in last.result(20))
        assert backend.count("put") == 3
        until(lambda: idle(store))


def test_a_rider_on_a_put_that_expires_lets_go_at_once() -> None:
    (key,) = chain(1)
    backend = faulty({"put": [Fault.hang()]})
    with store_over(backend) as store, BufferPool(1 << 16) as pool:
        first = store.submit_put(items([key]))
        backend.wait_hung()
        buffer = pool.acquire(RAW)
        rider = store.submit_put([Item(key, SPEC.split(buffer.view), SPEC, hold=buffer)])
        buffer.release()
        assert pool.stats().quarantined == 1
        rider.cancel()
        assert rider.settled()
        assert pool.stats().in_use == 0
        backend.release()
        assert first.result(20)[0].ok


def test_a_hung_backend_does_not_fill_the_memory_with_what_waits_for_it() -> None:
    keys = chain(50)
    backend = faulty({"get": [Fault.hang()]})
    with store_over(backend) as store:
        running = store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        for number in range(1000):
            done = store.submit_get(wants(keys[number % 50 :][:1], poisoned(1)))
            ask = store.submit_lookup(keys[:3])
            done.cancel()
            ask.cancel()
            assert done.settled()
        lanes = store._machinery.targets[0].lanes
        assert lanes.stats()["queued"] == 0
        assert len(lanes._heap) < 100
        backend.release()
        assert running.result(20)[0].status is Status.MISS


class _Noted(Job):
    """A job that notes what becomes of it."""

    def __init__(self, priority: Priority = Priority.DEMAND) -> None:
        super().__init__(priority)
        self.ran, self.dropped = threading.Event(), threading.Event()

    def run(self) -> None:
        self.ran.set()

    def drop(self, error: KVStoreError) -> None:
        self.dropped.set()


def test_a_job_that_was_withdrawn_before_it_was_queued_is_never_counted() -> None:
    lanes = LaneGroup("test", 1)
    early, later = _Noted(), _Noted(Priority.BACKGROUND)
    assert lanes.withdraw(early)
    lanes.promote(later, Priority.DEMAND)
    lanes.submit([early, later])
    assert later.ran.wait(20)
    until(lambda: lanes.stats() == {"queued": 0, "busy": 0, "lanes": 1, "failures": 0})
    assert not lanes.withdraw(early)
    assert not early.ran.is_set()
    lanes.shut(drop=False)
    assert lanes.join(soon())


def test_every_queued_job_is_run_or_dropped_but_never_both() -> None:
    lanes = LaneGroup("test", 3)
    stop = threading.Event()

    class Blocked(_Noted):
        def run(self) -> None:
            super().run()
            stop.wait(20)

    blockers = [Blocked(Priority.BACKGROUND) for _ in range(2)]  # all lanes but the last
    lanes.submit(blockers)
    assert all(job.ran.wait(20) for job in blockers)
    background = [_Noted(Priority.BACKGROUND) for _ in range(100)]
    lanes.submit(background)
    for job in background[:80]:
        assert lanes.withdraw(job)
        lanes.drop(job, ClosedError("test"))
    lanes.submit(demand := [_Noted() for _ in range(20)])
    lanes.promote(background[90], Priority.PREFETCH)
    assert all(job.ran.wait(20) for job in [*demand, background[90]])
    assert lanes.stats()["queued"] == 19
    stop.set()
    lanes.shut(drop=False)
    assert lanes.join(soon())
    assert all(job.ran.is_set() != job.dropped.is_set() for job in background)
    assert [job.dropped.is_set() for job in background] == [True] * 80 + [False] * 20


# Single flight.


def test_a_leader_that_gives_up_in_the_queue_hands_over_and_is_free() -> None:
    keys = chain(2)
    backend = faulty()
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        backend.push(Fault.hang(), operation="get")
        store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        leader = store.submit_get(wants(keys[1:], poisoned(1)))
        got = poisoned(1)
        rider = store.submit_get(wants(keys[1:], got))
        leader.cancel()
        assert leader.settled()
        backend.release()
        assert rider.result(20)[0].ok
        assert got[0] == payload(keys[1])
        assert times(backend, "get", keys[1]) == 1


@pytest.mark.parametrize("serde", ["raw", "lz4", "shuffle-zstd"])
def test_a_leader_that_gives_up_in_the_middle_fails_nobody(serde: str) -> None:
    (key,) = chain(1)
    backend = faulty()
    with store_over(backend, remote_serde=serde) as store:
        data = bytes(RAW // 2) + payload(key)[: RAW - RAW // 2]  # half of it can be compressed
        store.submit_put([Item(key, SPEC.split(memoryview(data)), SPEC)]).result()
        backend.push(Fault.hang(), operation="get")
        leader = store.submit_get(wants([key], poisoned(1)))
        backend.wait_hung()
        got = poisoned(5)
        riders = [store.submit_get(wants([key], [dst])) for dst in got]
        leader.cancel()
        backend.release()
        assert all(rider.result(20)[0].ok for rider in riders)
        assert all(dst == data for dst in got)
        assert leader.settled(20)
        assert times(backend, "get", key) <= 2
        until(lambda: idle(store))


def test_a_released_destination_of_one_who_gave_up_fails_nobody() -> None:
    keys = chain(2)
    backend = faulty()
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        backend.push(Fault.hang(), operation="get")
        store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        view = memoryview(bytearray(RAW))
        leader = store.submit_get([Want(keys[1], view, SPEC)])
        rider = store.submit_get(wants(keys[1:], got := poisoned(1)))
        leader.cancel()
        view.release()
        backend.release()
        assert rider.result(20)[0].ok
        assert got[0] == payload(keys[1])


def test_what_was_stored_before_a_get_is_not_a_miss_for_it() -> None:
    (key,) = chain(1)
    backend = faulty({"get": [Fault.hang(Fault.miss())]}, lanes=2)
    with store_over(backend) as store:
        early = store.submit_get(wants([key], poisoned(1)))
        backend.wait_hung()
        assert store.submit_put(items([key])).result(20)[0].ok
        got = poisoned(3)
        late = [store.submit_get(wants([key], [dst])) for dst in got]  # aboard a read that began before the put
        backend.release()
        assert early.result(20)[0].status is Status.MISS
        assert all(done.result(20)[0].ok for done in late)
        assert all(dst == payload(key) for dst in got)


def test_misses_are_shared_by_all_who_were_there_in_time() -> None:
    keys = chain(2)
    backend = faulty({"get": [Fault.hang()]})
    with store_over(backend) as store:
        store.submit_get(wants(keys[:1], poisoned(1)))
        backend.wait_hung()
        done = [store.submit_get(wants(keys[1:], poisoned(1))) for _ in range(10)]
        backend.release()
        assert all(each.result(20)[0] == MISS for each in done)
        assert times(backend, "get", keys[1]) == 1


def test_when_the_leader_gives_up_at_the_first_replica_the_rider_goes_on_to_the_second() -> None:
    inner = [DictBackend(name=name) for name in ("a", "b")]
    backends = [FaultyBackend(each) for each in inner]
    keys = chain(12)
    with store_over(*backends, replicas=2) as store:
        store.submit_put(items(keys)).result()
        for key in keys:
            first = backends[store._machinery.reader._order(key)[0]]
            first.push(Fault.hang(Fault.error(ConfigError("no"))), operation="get")
            leader = store.submit_get(wants([key], poisoned(1)))
            first.wait_hung()
            rider = store.submit_get(wants([key], got := poisoned(1)))
            leader.cancel()
            first.release()
            assert rider.result(20)[0].ok
            assert got[0] == payload(key)
        until(lambda: idle(store))


def test_a_rider_with_more_time_gets_staging_memory_that_came_too_late_for_the_leader() -> None:
    (key,) = chain(1)
    with store_over(DictBackend(), remote_serde="lz4", buffer_pool_bytes=1 << 20) as store:
        store.submit_put(items([key])).result()
        held = store.pool.acquire(store.pool.nbytes)
        leader = store.submit_get(wants([key], poisoned(1)), deadline=time.monotonic() + 0.7)
        until(lambda: store.pool.stats().waiting == 1)
        rider = store.submit_get(wants([key], got := poisoned(1)), deadline=soon())
        assert leader.result(20)[0].status is Status.ERROR
        held.release()
        assert rider.result(20)[0].ok
        assert got[0] == payload(key)


def test_one_key_twice_in_a_batch_and_other_shapes_of_it_at_once() -> None:
    (key,) = chain(1)
    backend = faulty({"get": [Fault.hang()]}, lanes=3)
    with store_over(backend) as store:
        store.submit_put(items([key])).result()
        got = poisoned(3)
        part = bytearray(SPEC.sizes[1])
        shorter = kv_spec(LAYOUT, DTYPE, TOKENS // 2)
        twice = store.submit_get(wants([key] * 3, got))
        backend.wait_hung()
        one = store.submit_get([Want(key, memoryview(part), SPEC, 1, 1)])
        other = store.submit_get(wants([key], poisoned(1, shorter.raw_bytes), shorter))  # of a shape that it has not
        assert one.result(20)[0].ok
        assert part == payload(key)[SPEC.sizes[0] :][: SPEC.sizes[1]]
        backend.release()
        assert [outcome.ok for outcome in twice.result(20)] == [True] * 3
        assert all(dst == payload(key) for dst in got)
        assert isinstance(other.result(20)[0].error, PermanentError)
        assert backend.inner.quarantined == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", [Fault.error(), Fault.miss(), Fault.flip(77), Fault.short(10)])
def test_a_large_read_over_several_lanes_of_which_one_fails(fault: Fault) -> None:
    inner = [DictBackend(name=name, lanes=4) for name in ("a", "b")]
    for each in inner:
        each.limits = each.limits.__class__(lanes=4, preferred_io_bytes=RAW // 3)
    backends = [FaultyBackend(each) for each in inner]
    (key,) = chain(1)
    with store_over(*backends, replicas=2) as store:
        store.submit_put(items([key])).result()
        first = backends[store._machinery.reader._order(key)[0]]
        first.push(Fault.hang(), Fault.hang(fault), Fault.hang(), operation="get")
        done = store.submit_get(wants([key], got := poisoned(1)))
        first.wait_hung(3)
        rider = store.submit_get(wants([key], more := poisoned(1)))
        first.release(2)
        first.wait_done(2, "get")
        assert not done.done()
        first.release()
        assert done.result(20)[0] == rider.result(20)[0] == Outcome(Status.OK, RAW)
        assert got[0] == more[0] == payload(key)
        assert inner[0].quarantined == inner[1].quarantined == []
        until(lambda: idle(store))


# Verification.


class _Scribbler(DictBackend):
    """While a read is under way somebody changes the destination, as one may whose read was cancelled."""

    def __init__(self, victim: bytearray) -> None:
        super().__init__(lanes=1)
        self.victim = victim

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        self.victim[:] = bytes(len(self.victim))
        return outcomes


def test_a_good_record_is_not_condemned_for_what_a_caller_did_to_his_memory() -> None:
    (key,) = chain(1)
    mine = bytearray(RAW)
    inner = _Scribbler(mine)
    backend = FaultyBackend(inner)
    with store_over(backend) as store:
        store.submit_put(items([key])).result()
        backend.push(Fault.hang(), operation="get")
        leader = store.submit_get([Want(key, memoryview(mine), SPEC)])
        backend.wait_hung()
        rider = store.submit_get(wants([key], got := poisoned(1)))
        leader.cancel()
        backend.release()
        assert rider.result(20)[0].ok
        assert got[0] == payload(key)
        assert inner.quarantined == []
        assert store.stats().get("corrupt_records", 0) == 0


def test_a_second_look_that_hangs_holds_up_nobody_else() -> None:
    keys = chain(3)
    backend = faulty(by_key={("get", keys[1]): [Fault.flip(9), Fault.hang()]})
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        got = poisoned(3)
        done = store.submit_get(wants(keys, got))
        backend.wait_hung()
        expire(store, done)
        assert [outcome.ok for outcome in done.result(0)] == [True, False, True]
        assert (got[0], got[2]) == (payload(keys[0]), payload(keys[2]))
        backend.release()
        assert done.settled(20)


def test_a_second_look_needs_no_room_in_the_pool_for_a_segment_larger_than_it() -> None:
    (key,) = chain(1)
    spec = kv_spec(KVLayout(1, 8, 128), "bfloat16", 512)
    assert spec.sizes == (2 << 20,)
    backend = faulty(by_key={("get", key): [Fault.flip(8 << 20)]})
    with store_over(backend, buffer_pool_bytes=1 << 20) as store:
        store.submit_put(items([key], spec)).result()
        assert store.submit_get(wants([key], got := poisoned(1, spec.raw_bytes), spec)).result(20)[0].ok
        assert got[0] == payload(key, spec.raw_bytes)
        assert store.stats()["second_looks"] == 1


def test_a_damaged_header_heals_for_those_who_do_not_know_the_size() -> None:
    inner = DictBackend()
    with store_over(inner) as store:
        store.put_many({"x": b"value"})
        (key,) = inner.records
        for cut in (inner.records[key][:50], b"\x00" + inner.records[key][1:]):
            inner.records[key] = cut
            assert store.get_many(["x"]) == [None]
            assert store.put_many({"x": b"value"})[0].ok
            assert store.get_many(["x"]) == [b"value"]


def test_destinations_that_overlap_are_refused_where_that_is_cheap_to_see() -> None:
    with store_over(DictBackend()) as store:
        store.put_many({"x": b"12345678", "y": b"abcdefgh"})
        memory = memoryview(bytearray(16))
        with pytest.raises(ConfigError, match="overlap"):
            store.get_many(["x", "y"], into=[memory[:8], memory[7:15]])
        assert store.get_many(["x", "y"], into=[memory[:8], memory[8:]]) == [8, 8]
        assert memory == b"12345678abcdefgh"
        twice = [Want(opaque_key(name, namespace=store.config.namespace), memory[:8], opaque_spec(8)) for name in "xy"]
        assert [outcome.ok for outcome in store.submit_get(twice[:1] * 2).result(20)] == [
            True,
            True,
        ]  # one and the same
        with pytest.raises(ConfigError, match="overlap"):
            store.submit_get([twice[0], twice[1]._replace(dst=twice[0].dst)])


def test_a_question_that_expires_on_its_way_to_the_next_replica_leaves_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    key = chain(1)
    backends = [FaultyBackend(DictBackend(name=name, lanes=1)) for name in ("one", "two")]
    with store_over(*backends, replicas=2) as store:
        target = store._machinery.targets[store._machinery.asker._order(key[0])[1]]
        second = backends[target.index]
        second.push(Fault.hang(), operation="quarantine")
        busy = _Busy(lambda: second.quarantine(key, deadline=soon()))
        target.lanes.submit([busy])
        second.wait_hung()
        real = asks._Question.ask

        def ask(self: asks._Question, indices: Sequence[int], number: int) -> None:
            if number:
                expire(store, done)
            real(self, indices, number)

        monkeypatch.setattr(asks._Question, "ask", ask)
        first = backends[1 - target.index]
        first.push(Fault.hang(Fault.miss()), operation="stat")
        done = store.submit_lookup(key, deadline=soon())
        first.wait_hung()
        first.release()
        assert done.result(20) == 0
        until(lambda: first_idle(store, first.name))
        assert target.lanes.stats()["queued"] == 0
        second.release()
        until(lambda: idle(store))
    assert second.calls_of("stat") == []


class _Busy(Job):
    """Holds a lane."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(Priority.DEMAND)
        self._work = work

    def run(self) -> None:
        self._work()

    def drop(self, error: KVStoreError) -> None:
        pass


def first_idle(store: Store, name: str) -> bool:
    return bool(store.stats()["backends"][name]["busy"] == 0)
