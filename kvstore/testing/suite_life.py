"""The part of `BackendSuite` about deadlines, threads, close, fork, reopening, and what a backend says of itself."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore.backend import NO_DEADLINE, Backend, Capability, Limits, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.options import Option

from .suite_base import CANARY, Child, SuiteBase, payload, run_in_child, run_threads

__all__ = ["LifeTests"]

_MAX_THREADS = 16
CHILD_ENDS = (Child(True, "works"), Child(True, "closed"))


def _operations(backend: Backend, keys: Sequence[Key], deadline: float) -> dict[str, Callable[[], list[Outcome]]]:
    """A call of each batch operation on `keys`."""
    return {
        "stat": lambda: backend.stat(keys, deadline=deadline),
        "get": lambda: backend.get_into([Read(key, memoryview(bytearray(10))) for key in keys], deadline=deadline),
        "put": lambda: backend.put([Write(key, [memoryview(b"new")]) for key in keys], deadline=deadline),
        "delete": lambda: backend.delete(keys, deadline=deadline),
        "quarantine": lambda: backend.quarantine(keys, deadline=deadline),
    }


class LifeTests(SuiteBase):
    """Time, threads, processes, and honesty."""

    # Deadlines.

    @pytest.mark.parametrize("operation", ["stat", "get", "put", "delete", "quarantine"])
    def test_a_deadline_that_has_passed(self, backend: Backend, operation: str) -> None:
        """ERROR with a TransientError for every item, and nothing is done; the next call works."""
        there, missing = self.key("there"), self.key("missing")
        self.seed(backend, there, b"old")
        keys = [there, missing, there]
        for passed in (time.monotonic() - 0.001, time.monotonic() - 1e6, 0.0, -NO_DEADLINE):
            self.check_late(_operations(backend, keys, passed)[operation](), 3, operation)
            assert _operations(backend, [], passed)[operation]() == []
        assert self.inspect(backend, there) == b"old"
        assert self.inspect(backend, missing) is None
        assert [outcome.status for outcome in self.stat(backend, keys)] == [Status.OK, Status.MISS, Status.OK]
        assert self.put(backend, {missing: b"new"})[0].ok
        assert self.get_one(backend, missing, 10)[1] == b"new"

    def test_dst_is_left_alone_after_a_deadline(self, backend: Backend) -> None:
        """A get that its deadline stopped has stopped: memory does not change after the return."""
        keys = self.keys(20)
        for key in keys:
            self.seed(backend, key, payload(50_000, key))
        memory = bytearray([CANARY]) * (50_000 * len(keys))
        view = memoryview(memory)
        reads = [Read(key, view[i * 50_000 : i * 50_000 + 50_000]) for i, key in enumerate(keys)]
        for seconds in (-1.0, 0.0, 0.0002, 0.002):
            outcomes = backend.get_into(reads, deadline=time.monotonic() + seconds)
            self.check_shape(outcomes, len(keys), {Status.OK, Status.ERROR})
            for read, outcome in zip(reads, outcomes, strict=True):
                if outcome.ok:
                    assert read.dst == payload(50_000, read.key)
                else:
                    assert isinstance(outcome.error, TransientError)
            pattern = payload(len(memory), seconds)
            memory[:] = pattern
            self.get(backend, [(key, 0, 10) for key in keys])
            assert memory == pattern
        backend.close()
        assert memory == pattern

    def test_list_with_a_deadline_that_has_passed(self, backend: Backend) -> None:
        if Capability.LIST not in backend.capabilities:
            pytest.skip("this backend cannot list")
        self.seed(backend, self.key("there"), b"1")
        with pytest.raises(TransientError):
            list(backend.list(deadline=time.monotonic() - 1))

    def test_lease_with_a_deadline_that_has_passed(self, backend: Backend) -> None:
        """Aligned as ever; a record may still be leased, for that takes no time."""
        keys = [self.key("there"), self.key("missing")]
        self.put(backend, {keys[0]: b"1"})
        leases = backend.lease(keys, deadline=time.monotonic() - 1)
        assert len(leases) == 2
        assert leases[1] is None
        if leases[0] is not None:
            assert bytes(leases[0].view) == b"1"
            leases[0].release()

    def test_no_deadline_at_all(self, backend: Backend) -> None:
        """`math.inf` is a deadline too, also where a library wants a number of seconds."""
        key = self.key("record")
        write = Write(key, [memoryview(b"data")])
        memory = bytearray(4)
        assert backend.put([write], deadline=NO_DEADLINE)[0].ok
        assert backend.put([write], deadline=NO_DEADLINE)[0].status is Status.EXISTS
        assert backend.stat([key], deadline=NO_DEADLINE) == [(Status.OK, 4, None)]
        assert backend.get_into([Read(key, memoryview(memory))], deadline=NO_DEADLINE)[0].ok
        assert memory == b"data"
        if Capability.LIST in backend.capabilities:
            assert key in {info.key for page in backend.list(deadline=NO_DEADLINE) for info in page}
        for lease in backend.lease([key], deadline=NO_DEADLINE):
            if lease is not None:
                lease.release()
        assert backend.quarantine([key], deadline=NO_DEADLINE)[0].ok
        assert backend.delete([key], deadline=NO_DEADLINE)[0].status is Status.MISS

    # Threads.

    def threads(self, backend: Backend) -> int:
        """As many threads as may call at once, within reason."""
        if backend.limits.lanes < 2:
            pytest.skip("limits.lanes is 1: only one thread may call")
        return min(backend.limits.lanes, _MAX_THREADS)

    def test_a_reader_sees_nothing_or_everything(self, backend: Backend) -> None:
        """While records are being stored, every stat and every read, ranged or not, is a miss or exact."""
        readers = min(self.threads(backend) - 1, 3)
        nbytes = min(200_000, self.max_value, backend.limits.max_value_bytes)
        records = {key: payload(nbytes, index) for index, key in enumerate(self.keys(12))}
        stored = threading.Event()

        def write() -> None:
            try:
                for key, data in records.items():
                    pieces = [memoryview(data)[at : at + 10_000] for at in range(0, nbytes, 10_000)]
                    assert backend.put([Write(key, pieces)], deadline=self.soon())[0].ok
            finally:
                stored.set()

        def read() -> None:
            last = False
            while not last:
                last = stored.is_set()
                for key, data in records.items():
                    tail = nbytes // 2
                    for (outcome, got), wanted in zip(
                        self.get(backend, [(key, 0, nbytes + 1), (key, tail, nbytes)]), (data, data[tail:]), strict=True
                    ):
                        assert outcome.status is Status.OK or (outcome.status is Status.MISS and not last)
                        assert got == (wanted if outcome.ok else b"")
                    (size,) = self.stat(backend, [key])
                    assert size.nbytes == (nbytes if size.ok else 0)

        run_threads([write, *[read] * readers])

    def test_of_several_writers_one_wins(self, backend: Backend) -> None:
        """Writers of one key with different bytes do no harm: one is OK, the rest EXISTS, and its bytes are there."""
        writers = self.threads(backend)
        keys = self.keys(10)
        outcomes: dict[tuple[int, Key], Outcome] = {}
        barrier = threading.Barrier(writers)

        def write(writer: int) -> None:
            for key in keys:
                barrier.wait(60)
                outcomes[writer, key] = self.put(backend, {key: payload(30_000 + writer, writer)})[0]

        run_threads([functools.partial(write, writer) for writer in range(writers)])
        for key in keys:
            won = [writer for writer in range(writers) if outcomes[writer, key].ok]
            assert len(won) == 1
            assert all(outcomes[writer, key].stored for writer in range(writers))
            assert self.inspect(backend, key) == payload(30_000 + won[0], won[0])

    def test_all_lanes_at_once(self, backend: Backend) -> None:
        """Every thread sees its own work exactly, whatever the others do."""

        def work(number: int) -> None:
            for turn in range(6):
                keys = self.keys(8, f"{number}/{turn}/")
                records = {key: payload(1_000 + 10 * number + index, key) for index, key in enumerate(keys)}
                assert all(outcome.ok for outcome in self.put(backend, records))
                reads = [(key, 3, 2_000) for key in keys]
                assert [got for _, got in self.get(backend, reads)] == [data[3:] for data in records.values()]
                assert all(outcome.ok for outcome in self.delete(backend, keys[:4]))
                assert all(outcome.ok for outcome in self.quarantine(backend, keys[4:6]))
                wanted = [Status.MISS] * 6 + [Status.OK] * 2
                assert [outcome.status for outcome in self.stat(backend, keys)] == wanted
                if Capability.LIST in backend.capabilities and turn == 3:
                    assert not set(keys[:6]) & self.listing(backend).keys()

        run_threads([functools.partial(work, number) for number in range(self.threads(backend))])

    # Close.

    def test_after_close_everything_says_so(self, backend: Backend) -> None:
        key = self.key("record")
        assert self.put(backend, {key: b"data"})[0].ok
        backend.close()
        backend.close()
        for call in _operations(backend, [key], self.soon()).values():
            with pytest.raises(ClosedError):
                call()
        if Capability.LIST in backend.capabilities:
            with pytest.raises(ClosedError):
                list(backend.list(deadline=self.soon()))
        if Capability.LEASE in backend.capabilities:
            with pytest.raises(ClosedError):
                backend.lease([key], deadline=self.soon())
        if Capability.REGISTERED_MEMORY in backend.capabilities:
            with BufferPool(4096) as pool, pytest.raises(ClosedError):
                backend.register(pool.slabs[0])

    def test_close_returns_while_work_is_under_way(self, backend: Backend) -> None:
        """Calls under way end, with outcomes or a ClosedError; what they call OK is exact."""
        workers = max(1, self.threads(backend) - 1)
        data = payload(100_000)
        there = self.key("there")
        self.seed(backend, there, data)
        started = [threading.Event() for _ in range(workers)]

        def work(number: int) -> None:
            for turn in itertools.count():
                try:
                    outcome, got = self.get_one(backend, there, len(data))
                    self.put(backend, {self.key(f"{number}/{turn}"): b"more"})
                except ClosedError:
                    return
                assert got == (data if outcome.ok else b"")
                started[number].set()

        def close() -> None:
            for event in started:
                assert event.wait(60)
            backend.close()

        run_threads([close, *[functools.partial(work, number) for number in range(workers)]])

    # Processes.

    def in_child(self, backend: Backend, there: Key, data: bytes, mine: Key) -> Callable[[], str]:
        """What a forked child does: everything works, or the first call says that it does not after a fork."""

        def work() -> str:
            try:
                memory = bytearray(len(data))
                (outcome,) = backend.get_into([Read(there, memoryview(memory))], deadline=self.soon())
            except ClosedError as error:
                return "closed" if "fork" in str(error).lower() else f"the error does not name the fork: {error}"
            assert outcome.ok, outcome
            assert memory == data
            assert backend.stat([there], deadline=self.soon())[0].nbytes == len(data)
            assert self.put(backend, {mine: b"from the child"})[0].ok
            assert self.get_one(backend, mine, 100)[1] == b"from the child"
            return "works"

        return work

    def test_after_fork(self, backend: Backend) -> None:
        """The child works or gets a ClosedError that names the fork; the parent goes on; a close in the child is
        none in the parent."""
        there, mine, data = self.key("there"), self.key("child's"), payload(10_000)
        assert self.put(backend, {there: data})[0].ok
        assert self.get_one(backend, there, 10)[0].ok  # connections are open now
        work = self.in_child(backend, there, data, mine)

        def work_and_close() -> str:
            text = work()
            backend.close()
            return text

        child = run_in_child(work_and_close, limit_s=self.fork_limit_s)
        assert child in CHILD_ENDS
        assert self.get_one(backend, there, len(data))[1] == data
        assert self.put(backend, {self.key("parent's"): b"still works"})[0].ok
        if child.text == "works" and Capability.SHARED in backend.capabilities:
            assert self.inspect(backend, mine) == b"from the child"

    def test_fork_while_other_threads_work(self, backend: Backend) -> None:
        """A lock that another thread holds at the moment of the fork must not hang the child."""
        workers = min(2, self.threads(backend) - 1)
        there, data = self.key("there"), payload(10_000)
        assert self.put(backend, {there: data})[0].ok
        done = threading.Event()

        def hammer(number: int) -> None:
            for turn in itertools.count():
                if done.is_set():
                    return
                key = self.key(f"{number}/{turn}")
                self.put(backend, {key: b"1"})
                self.get_one(backend, there, len(data))
                self.stat(backend, [there, key])
                self.delete(backend, [key])

        def fork() -> None:
            try:
                for turn in range(3):
                    work = self.in_child(backend, there, data, self.key(f"child's {turn}"))
                    child = run_in_child(work, limit_s=self.fork_limit_s)
                    assert child in CHILD_ENDS
            finally:
                done.set()

        run_threads(
            [fork, *[functools.partial(hammer, number) for number in range(workers)]],
            limit_s=60 + 3 * self.fork_limit_s,
        )

    def test_a_second_instance_sees_the_same_records(self, backend: Backend) -> None:
        """SHARED is honest: what one instance stores, deletes or quarantines is so for another at once."""
        if Capability.SHARED not in backend.capabilities:
            pytest.skip("this backend is not shared")
        other = self.opened(self.open())
        a, b, c = self.keys(3)
        assert self.stat(other, [a])[0].status is Status.MISS
        assert all(outcome.ok for outcome in self.put(backend, {a: b"a", b: b"b", c: b"c"}))
        assert [got for _, got in self.get(other, [(a, 0, 9), (b, 0, 9), (c, 0, 9)])] == [b"a", b"b", b"c"]
        assert self.put(other, {a: b"another"})[0].status is Status.EXISTS
        self.get_one(backend, b, 9)
        assert self.delete(other, [a])[0].ok
        assert self.quarantine(other, [b])[0].ok
        assert [outcome.status for outcome in self.stat(backend, [a, b, c])] == [Status.MISS, Status.MISS, Status.OK]
        assert [o.status for o, _ in self.get(backend, [(a, 0, 9), (b, 0, 9)])] == [Status.MISS, Status.MISS]
        other.close()
        assert self.put(backend, {b: b"healed"})[0].ok

    def test_records_survive_reopening(self, backend: Backend) -> None:
        """DURABLE is honest: records are there after close and reopen, and what was removed is not."""
        if Capability.DURABLE not in backend.capabilities:
            pytest.skip("this backend is not durable")
        keys = self.keys(10)
        records = {key: payload(5_000 + index, index) for index, key in enumerate(keys)}
        assert all(outcome.ok for outcome in self.put(backend, records))
        self.get(backend, [(key, 0, 10) for key in keys[:4]])
        self.delete(backend, keys[:2])
        self.quarantine(backend, keys[2:4])
        backend.close()
        again = self.opened(self.reopen())
        got = self.get(again, [(key, 0, 6_000) for key in keys])
        assert [outcome.status for outcome, _ in got] == [Status.MISS] * 4 + [Status.OK] * 6
        assert [data for _, data in got[4:]] == [records[key] for key in keys[4:]]
        if Capability.LIST in again.capabilities:
            assert self.listing(again).keys() & set(keys) == set(keys[4:])
        assert self.put(again, {keys[4]: b"x", keys[0]: b"y"})[0].status is Status.EXISTS
        assert self.get_one(again, keys[0], 9)[1] == b"y"

    # Capacity.

    def limited_place(self, capacity_bytes: int) -> Backend:
        backend = self.open_capacity(capacity_bytes)
        if backend is None:
            pytest.skip("open_capacity() is not defined")
        assert Capability.CAPACITY in backend.capabilities
        assert Capability.LIST in backend.capabilities, "a limit that nobody can check"
        return self.opened(backend)

    def test_the_capacity_is_enforced(self) -> None:
        """Records of four times the capacity are all accepted, and at no time is more there than the capacity and
        one record. What is still there is exact."""
        backend = self.limited_place(1 << 20)
        records = {key: payload(64 << 10, index) for index, key in enumerate(self.keys(64))}
        for key, data in records.items():
            assert self.put(backend, {key: data})[0].ok
            assert sum(info.nbytes for info in self.listing(backend).values()) <= (1 << 20) + (64 << 10)
        left = self.listing(backend).keys()
        assert left
        for key in left:
            assert self.get_one(backend, key, 1 << 20)[1] == records[key]

    def test_what_never_fits_evicts_nothing(self) -> None:
        """A record larger than the whole capacity is refused before anything makes room for it, and its key stays
        free."""
        backend = self.limited_place(1 << 20)
        records = {key: payload(100_000, index) for index, key in enumerate(self.keys(8))}
        assert all(outcome.ok for outcome in self.put(backend, records))
        before = self.listing(backend).keys()
        large = self.key("large")
        (outcome,) = self.put(backend, {large: payload((1 << 20) + 1)})
        assert isinstance(outcome.error, PermanentError)
        assert self.listing(backend).keys() == before == records.keys()
        assert self.put(backend, {large: b"small"})[0].ok

    def test_stat_does_not_change_recency(self) -> None:
        """Two places with the same history, but for stats: the same records are left."""
        plain, asked = self.limited_place(1 << 20), self.limited_place(1 << 20)
        keys = self.keys(24)
        for index, key in enumerate(keys):
            for backend in (plain, asked):
                assert self.put(backend, {key: payload(100_000, index)})[0].ok
            for _ in range(3):
                self.stat(asked, keys[:6])
        assert self.listing(plain).keys() == self.listing(asked).keys()

    # What a backend says of itself.

    def test_names_limits_and_capabilities_make_sense(self, backend: Backend) -> None:
        assert isinstance(backend.name, str)
        assert backend.name
        assert "\n" not in backend.name
        limits = backend.limits
        assert isinstance(limits, Limits)
        for value in (limits.max_value_bytes, limits.alignment, limits.lanes, limits.preferred_io_bytes):
            assert type(value) is int
            assert value >= 1
        assert limits.lanes <= 4096
        assert isinstance(backend.capabilities, Capability)
        assert self.requires in backend.capabilities
        assert all(isinstance(option, Option) and option.doc for option in backend.options)
        names = [option.name for option in backend.options]
        assert len(set(names)) == len(names)

    def test_register_takes_a_slab(self, backend: Backend) -> None:
        """With or without REGISTERED_MEMORY; afterwards reads into it work."""
        key = self.key("record")
        self.seed(backend, key, payload(1_000))
        with BufferPool(1 << 16) as pool:
            for slab in pool.slabs:
                backend.register(slab)
            with pool.acquire(1_000) as buffer:
                assert backend.get_into([Read(key, buffer.view)], deadline=self.soon())[0].ok
                assert buffer.view == payload(1_000)

    def test_nothing_secret_is_shown(self, backend: Backend) -> None:
        """No secret in name, repr or errors; and of a key no more than its beginning in an error."""
        key = self.key("record")
        texts = [backend.name, repr(backend), str(backend)]
        for call in _operations(backend, [key], time.monotonic() - 1).values():
            for outcome in call():
                texts += [str(outcome.error), repr(outcome.error)]
        backend.close()
        with pytest.raises(ClosedError) as caught:
            backend.stat([key], deadline=self.soon())
        texts += [str(caught.value), repr(caught.value)]
        for text in texts:
            assert key.hex() not in text
            for secret in self.forbidden_text:
                assert secret not in text
