"""The buffer pool: exact accounting, back-pressure with a deadline, and no memory with two owners (faults 2, 3, 4)."""

from __future__ import annotations

import bisect
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.buffers import CANARY, Buffer, BufferPool, _FreeList
from kvstore.errors import ClosedError, ConfigError, PoolExhausted

PAGE = 4096
PATIENCE = 10.0  # seconds; only a broken implementation waits so long


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until_waiting(pool: BufferPool, count: int) -> None:
    """Until `count` threads stand in the pool's queue (they are on their way; there is no event for arriving)."""
    end = threading.Event()
    for _ in range(int(PATIENCE * 1000)):
        if pool.stats().waiting == count:
            return
        end.wait(0.001)
    raise AssertionError(f"{pool.stats().waiting} threads wait instead of {count}")


def idle(pool: BufferPool) -> bool:
    return pool.stats()._replace(total=0) == (0, 0, 0, 0, 0, 0)


# --- against an oracle -----------------------------------------------------------------------------------------------


class Lease:
    """What the oracle knows of one buffer: its memory, its owners, its pins, the lease it was made from."""

    def __init__(self, buffer: Buffer, fill: int, parent: Lease | None = None) -> None:
        self.buffer, self.fill, self.parent = buffer, fill, parent
        self.refs, self.pins = 1, 0

    @property
    def span(self) -> int:
        return max(-(-self.buffer.nbytes // PAGE), 1) * PAGE


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool of two slabs, of 8 and 5 pages. `root` leases own memory; read-only ones share it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(13 * PAGE, slab_bytes=8 * PAGE, canary=True)
        self.leases: list[Lease] = []
        self.gone: list[Buffer] = []
        self.fill = 0

    def pick(self, data: st.DataObject, **wanted: bool) -> Lease | None:
        fitting = [
            lease for lease in self.leases if all((getattr(lease, name) > 0) is value for name, value in wanted.items())
        ]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def drop_if_free(self, lease: Lease) -> None:
        if not lease.refs and not lease.pins:
            self.leases.remove(lease)
            self.gone.append(lease.buffer)
            if lease.parent is not None:
                lease.parent.refs -= 1
                self.drop_if_free(lease.parent)

    @rule(sizes=st.lists(st.integers(0, 9 * PAGE), min_size=1, max_size=3))
    def acquire(self, sizes: list[int]) -> None:
        try:
            buffers = self.pool.acquire_many(sizes)
        except PoolExhausted:
            # All or none; and one small buffer always fits in what is free.
            assert len(sizes) > 1 or sizes[0] > PAGE or self.pool.stats().in_use == self.pool.nbytes
            return
        for buffer, size in zip(buffers, sizes, strict=True):
            assert len(buffer.view) == len(buffer) == buffer.nbytes == size
            assert buffer.offset % PAGE == 0
            assert not buffer.view.readonly
            self.fill = self.fill % 250 + 1
            buffer.view[:] = bytes([self.fill]) * size
            self.leases.append(Lease(buffer, self.fill))

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if lease := self.pick(data, refs=True):
            assert lease.buffer.retain() is lease.buffer
            lease.refs += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if (lease := self.pick(data, refs=True)) and lease.refs > sum(a.parent is lease for a in self.leases):
            lease.buffer.release()
            lease.refs -= 1
            self.drop_if_free(lease)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if lease := self.pick(data, refs=True):
            lease.buffer.pin()
            lease.pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if lease := self.pick(data, pins=True):
            lease.buffer.unpin()
            lease.pins -= 1
            self.drop_if_free(lease)

    @rule(data=st.data())
    def readonly(self, data: st.DataObject) -> None:
        if lease := self.pick(data, refs=True):
            child = lease.buffer.readonly()
            lease.refs += 1
            assert child.view.readonly
            assert child.view == lease.buffer.view
            self.leases.append(Lease(child, lease.fill, lease))

    @rule(data=st.data())
    def misuse_in_quarantine(self, data: st.DataObject) -> None:
        if lease := self.pick(data, refs=False, pins=True):
            for act in (lease.buffer.release, lease.buffer.retain, lease.buffer.pin, lease.buffer.readonly):
                with pytest.raises(ClosedError):
                    act()
            with pytest.raises(ClosedError):
                _ = lease.buffer.view

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def misuse_after_the_end(self, data: st.DataObject) -> None:
        buffer = data.draw(st.sampled_from(self.gone))
        for act in (buffer.release, buffer.retain, buffer.pin, buffer.unpin, buffer.readonly):
            with pytest.raises(ClosedError):
                act()

    @invariant()
    def exact(self) -> None:
        stats = self.pool.stats()
        roots = [lease for lease in self.leases if lease.parent is None]
        assert stats.in_use == sum(lease.span for lease in roots)
        assert stats.buffers == len(roots)
        assert stats.pinned == sum(lease.pins for lease in self.leases)
        assert stats.quarantined == sum(not lease.refs for lease in self.leases)
        assert stats.waiting == 0
        places = sorted((id(lease.buffer.slab), lease.buffer.offset, lease.span) for lease in roots)
        for (where, start, span), (next_where, next_start, _) in pairwise(places):
            assert where != next_where or start + span <= next_start
        for lease in self.leases:  # nobody else wrote there, whether an owner is left or only late I/O
            slab = lease.buffer.slab
            assert lease.buffer.offset + lease.span <= slab.nbytes
            mine = slab.view[lease.buffer.offset : lease.buffer.offset + lease.buffer.nbytes]
            assert mine == bytes([lease.fill]) * lease.buffer.nbytes

    def teardown(self) -> None:
        for lease in list(self.leases):
            children = sum(other.parent is lease for other in self.leases)
            for _ in range(lease.refs - children):
                lease.buffer.release()
            for _ in range(lease.pins):
                lease.buffer.unpin()
        assert idle(self.pool)
        for slab in self.pool.slabs:  # all of it is free again, in one piece, and clean
            whole = self.pool.acquire(slab.nbytes)
            assert bytes(whole.view) == bytes([CANARY]) * slab.nbytes
            self.gone.append(whole)
        for buffer in self.gone[-len(self.pool.slabs) :]:
            buffer.release()
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_second_release_is_an_error_not_a_clamp() -> None:
    with BufferPool(4 * PAGE) as pool:
        buffer = pool.acquire(10)
        other = pool.acquire(10)
        buffer.release()
        with pytest.raises(ClosedError, match="one release too many"):
            buffer.release()
        assert pool.stats().in_use == PAGE
        with other, pytest.raises(ClosedError):
            buffer.retain()
        with pytest.raises(ClosedError):
            other.release()
        with pool.acquire(1) as third, pytest.raises(ClosedError, match="no pin"):
            third.unpin()
        assert idle(pool)


def test_use_after_release_is_an_error() -> None:
    """Not of the property alone: the very view that was handed out is dead once the memory has a new owner."""
    with BufferPool(PAGE) as pool:
        buffer = pool.acquire(100)
        view = buffer.view
        view[0] = 1
        buffer.release()
        with pytest.raises(ClosedError):
            _ = buffer.view
        with pytest.raises(ValueError, match="released"):
            view[0] = 2
        shared = pool.acquire(100)
        child = shared.readonly()
        shared.release()
        with pytest.raises(TypeError):
            child.view[0] = 1
        seen = child.view
        child.release()
        with pytest.raises(ValueError, match="released"):
            bytes(seen)
        assert idle(pool)


def test_an_array_that_outlives_the_lease_does_not_break_the_pool() -> None:
    pool = BufferPool(2 * PAGE, shared=True)
    buffer, kept = pool.acquire(PAGE), pool.acquire(PAGE)
    array = np.frombuffer(buffer.view, dtype=np.uint8)
    buffer.release()
    other = np.frombuffer(kept.view, dtype=np.uint8)
    pool.close()
    kept.release()
    assert idle(pool)
    assert pool.slabs[0].fd is None
    assert int(array[0]) >= 0
    assert int(other[0]) >= 0  # the mapping lives as long as something looks at it: no crash


def test_pins_of_a_readonly_lease_hold_the_memory() -> None:
    with BufferPool(2 * PAGE) as pool:
        buffer = pool.acquire(PAGE)
        buffer.view[:] = b"\x07" * PAGE
        child = buffer.readonly().pin()
        buffer.release()
        child.release()
        assert pool.stats()[1:5] == (PAGE, 1, 1, 1)
        assert bytes(child.slab.view[child.offset : child.offset + 1]) == b"\x07"
        child.unpin()
        assert idle(pool)


def test_quarantine_until_late_io_has_ended() -> None:
    """Fault 2: the reader's deadline passes, its buffer gets no new owner until the late write is over."""
    with BufferPool(PAGE) as pool:
        go = threading.Event()
        buffer = pool.acquire(PAGE).pin()
        target = buffer.view

        def late_io() -> None:
            go.wait(PATIENCE)
            target[:] = b"\xee" * PAGE
            buffer.unpin()

        io = in_thread(late_io)
        buffer.release()  # the owner gave up
        assert pool.stats() == (PAGE, PAGE, 1, 1, 1, 0)
        with pytest.raises(PoolExhausted):
            pool.acquire(1, timeout=0.01)
        got: list[bytes] = []

        def next_owner() -> None:
            with pool.acquire(PAGE, timeout=PATIENCE) as mine:
                mine.view[:] = b"\x11" * PAGE
                got.append(bytes(mine.view))

        owner = in_thread(next_owner)
        until_waiting(pool, 1)
        go.set()
        io.join()
        owner.join()
        assert got == [b"\x11" * PAGE]
        assert idle(pool)


# --- a full pool -----------------------------------------------------------------------------------------------------


def test_texts_and_limits() -> None:
    with BufferPool(4 * PAGE, slab_bytes=2 * PAGE) as pool:
        assert (pool.nbytes, pool.largest) == (4 * PAGE, 2 * PAGE)
        for sizes in ([2 * PAGE + 1], [PAGE] * 5, [1 << 60]):
            with pytest.raises(PoolExhausted, match=f"{sum(sizes)} bytes asked for.*{4 * PAGE} in slabs of {2 * PAGE}"):
                pool.acquire_many(sizes, timeout=None)  # at once: it could never be served
        held = pool.acquire_many([PAGE] * 3)
        with pytest.raises(
            PoolExhausted, match=f"no {2 * PAGE} bytes became free.*{3 * PAGE} of {4 * PAGE} are in use"
        ):
            pool.acquire(2 * PAGE)
        with pytest.raises(ConfigError, match="-1"):
            pool.acquire(-1)
        with pytest.raises(ConfigError, match="-5"):
            pool.acquire_many([1, -5])
        assert pool.acquire_many([]) == []
        with pool.acquire(0) as empty:
            assert len(empty.view) == 0
            assert pool.stats().in_use == 4 * PAGE
        for buffer in held:
            buffer.release()
        assert idle(pool)


def test_a_request_that_no_packing_can_serve_is_refused_not_waited_for() -> None:
    """3 × 2 pages are no more than 6, but two slabs of 3 hold only one such buffer each."""
    with BufferPool(6 * PAGE, slab_bytes=3 * PAGE) as pool:
        answered = threading.Event()

        def ask() -> None:
            with pytest.raises(PoolExhausted, match="slabs"):
                pool.acquire_many([2 * PAGE] * 3, timeout=None)
            answered.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert answered.wait(PATIENCE)
        thread.join()
        for buffer in pool.acquire_many([2 * PAGE, 2 * PAGE, PAGE, PAGE]):
            buffer.release()


@pytest.mark.parametrize("timeout", [None, math.inf, 1e12, PATIENCE])
def test_waiting_ends_when_memory_comes_back(timeout: float | None) -> None:
    with BufferPool(PAGE) as pool:
        buffer = pool.acquire(1)
        got: list[int] = []

        def wait() -> None:
            with pool.acquire(5, timeout) as mine:
                got.append(len(mine.view))

        thread = in_thread(wait)
        until_waiting(pool, 1)
        buffer.release()
        thread.join(PATIENCE)
        assert got == [5]
        assert idle(pool)


def test_waiters_are_served_in_order_and_small_ones_do_not_starve_a_large_one() -> None:
    with BufferPool(4 * PAGE) as pool:
        held = [pool.acquire(PAGE) for _ in range(4)]
        order: list[str] = []

        def wait(name: str, nbytes: int) -> None:
            with pool.acquire(nbytes, PATIENCE):
                order.append(name)

        threads = []
        for index, (name, nbytes) in enumerate([("large", 4 * PAGE), ("small 1", PAGE), ("small 2", PAGE)]):
            threads.append(in_thread(lambda name=name, nbytes=nbytes: wait(name, nbytes)))  # type: ignore[misc]
            until_waiting(pool, index + 1)
        for buffer in held[:3]:
            buffer.release()
            # Enough for the small ones, but the large one came first: nobody overtakes, not even without waiting.
            with pytest.raises(PoolExhausted, match="3 other requests wait"):
                pool.acquire(1)
        assert order == []
        held[3].release()
        for thread in threads:
            thread.join(PATIENCE)
        assert order[0] == "large"
        assert sorted(order) == ["large", "small 1", "small 2"]
        assert idle(pool)


def test_those_behind_a_waiter_that_gives_up_are_served() -> None:
    with BufferPool(2 * PAGE) as pool:
        held = pool.acquire(PAGE)
        failed, served = threading.Event(), threading.Event()

        def large() -> None:
            with pytest.raises(PoolExhausted):
                pool.acquire(2 * PAGE, timeout=0.1)
            failed.set()

        def small() -> None:
            with pool.acquire(PAGE, timeout=PATIENCE):
                served.set()

        threads = [in_thread(large)]
        until_waiting(pool, 1)
        threads.append(in_thread(small))
        assert served.wait(PATIENCE)  # without any release
        assert failed.is_set()
        held.release()
        for thread in threads:
            thread.join()
        assert idle(pool)


def test_an_interrupted_waiter_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a waiting thread: its turn must not block everybody behind it for ever."""
    with BufferPool(PAGE) as pool:
        buffer = pool.acquire(1)

        class Interrupted(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading, "Event", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.acquire(1, timeout=PATIENCE)
        buffer.release()
        pool.acquire(1).release()
        assert idle(pool)


def test_requests_for_several_buffers_do_not_deadlock() -> None:
    """Fault 4 (b): four callers that need 2 pages of a pool of 4, together, many times."""
    with BufferPool(4 * PAGE) as pool:
        barrier = threading.Barrier(8)
        done: list[int] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            barrier.wait(PATIENCE)
            for _ in range(60):
                buffers = pool.acquire_many([PAGE] * rng.randint(1, 4), timeout=PATIENCE)
                for buffer in buffers:
                    buffer.release()
            done.append(seed)

        threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(8)]  # type: ignore[misc]
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(8))
        assert idle(pool)


def test_nothing_is_kept_when_only_part_of_a_request_fits() -> None:
    with BufferPool(4 * PAGE, slab_bytes=2 * PAGE) as pool:
        held = pool.acquire(PAGE)
        for _ in range(50):
            with pytest.raises(PoolExhausted):
                pool.acquire_many([PAGE, PAGE, 2 * PAGE])
            assert pool.stats()[1:3] == (PAGE, 1)
        held.release()
        for buffer in pool.acquire_many([2 * PAGE, 2 * PAGE]):
            buffer.release()


def test_many_threads() -> None:
    """Each writes its own pattern and finds it again; canaries would tell of a write into free memory."""
    with BufferPool(32 * PAGE, slab_bytes=16 * PAGE, canary=True) as pool, ThreadPoolExecutor(6) as threads:

        def work(seed: int) -> int:
            rng, served = random.Random(seed), 0
            for _ in range(150):
                try:
                    buffers = pool.acquire_many(
                        [rng.randint(1, 6 * PAGE) for _ in range(rng.randint(1, 3))], timeout=rng.choice([0, PATIENCE])
                    )
                except PoolExhausted:
                    continue
                pattern = bytes([rng.randint(1, 250)])
                for buffer in buffers:
                    buffer.view[:] = pattern * len(buffer)
                    buffer.pin()
                for buffer in buffers:
                    assert buffer.view == pattern * len(buffer)
                    child = buffer.readonly()
                    buffer.release()
                    buffer.unpin()
                    assert child.view == pattern * len(child)
                    child.release()
                served += 1
            return served

        assert min(threads.map(work, range(6))) > 10
        assert idle(pool)


class Plain(_FreeList):
    """One after the other: what `take_many` is to give."""

    def take(self, nbytes: int) -> int | None:
        index = bisect.bisect_left(self.by_size, (nbytes, -1))
        if index == len(self.by_size):
            return None
        size, start = self.by_size.pop(index)
        del self.by_start[start]
        del self.by_end[start + size]
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        return start


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40),
    st.integers(1, 40), st.integers(1, 20),
)  # fmt: skip
def test_many_places_at_once_are_those_of_one_after_the_other(
    before: list[tuple[int, bool]], nbytes: int, count: int
) -> None:
    one, many = Plain(600), Plain(600)
    taken = []
    for size, kept in before:  # holes
        places = one.take(size), many.take(size)
        assert places[0] == places[1]
        if places[0] is not None and not kept:
            taken.append((places[0], size))
    for start, size in taken:
        one.put(start, size)
        many.put(start, size)
    expected = []
    for _ in range(count):
        start = one.take(nbytes)
        if start is None:
            break
        expected.append(start)
    assert many.take_many(nbytes, count) == expected
    assert (many.by_size, many.by_start, many.by_end) == (one.by_size, one.by_start, one.by_end)
