"""Leases of a MemoryBackend, several threads, and what happens under its feet: deadlines, close, fork."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvstore_backends._memory_store as store_module
import kvstore_backends.memory as memory_module
from kvstore.backend import EXISTS, MISS, NO_DEADLINE, OK, Capability, KeyInfo, Outcome, Read, Status, Write
from kvstore.buffers import copy_bytes
from kvstore.errors import ClosedError, ConfigError, PermanentError, PoolExhausted, TransientError
from kvstore.registry import open_backend
from kvstore_backends.memory import MemoryBackend
from tests.unit.memory_support import (
    LARGE,
    Gate,
    KiB,
    MiB,
    get,
    here,
    in_thread,
    key,
    keys,
    leased,
    opened,
    payload,
    put,
    statuses,
)

__all__ = ["opened"]  # fixtures


# Leases.


def test_a_lease_is_the_record_itself_read_only(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    a, b = keys(2)
    data = payload("a", 1000)
    put(backend, {a: data})
    first, none, second = backend.lease([a, b, a], deadline=NO_DEADLINE)
    assert first is not None
    assert second is not None
    assert none is None
    assert first.view == data
    assert first.view.readonly
    assert np.shares_memory(np.frombuffer(first.view, np.uint8), np.frombuffer(second.view, np.uint8))
    second.release()
    assert backend.lease([a], deadline=time.monotonic()) == [None]
    assert backend.delete([a], deadline=NO_DEADLINE) == [OK]
    assert here(backend, [a]) == [False]
    put(backend, {name: payload(name, 1000) for name in keys(500, "other")})  # nothing gets at its memory
    assert first.view == data
    in_use = backend.stats().in_use
    first.release()
    assert backend.stats().in_use == in_use - 1024


def test_a_lease_outlives_close() -> None:
    backend = MemoryBackend(MiB)
    (a,) = keys(1)
    put(backend, {a: b"data"})
    with leased(backend, a) as lease:
        backend.close()
        assert bytes(lease.view) == b"data"


def test_leased_records_are_passed_over(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(4 * KiB)
    names = keys(4)
    for name in names:
        put(backend, {name: bytes(KiB)})
    with leased(backend, names[0]):
        for name in names[1:]:
            get(backend, name, KiB)  # names[0] is the oldest now
        assert put(backend, {key("new"): bytes(KiB)})[0].ok
        assert here(backend, names) == [True, False, True, True]
    assert put(backend, {key("newer"): bytes(KiB)})[0].ok
    assert here(backend, names) == [False, False, True, True]


def test_everything_leased_ends_in_pool_exhausted_by_the_deadline(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(4 * KiB)
    names = keys(4)
    put(backend, {name: bytes(KiB) for name in names})
    leases = [leased(backend, name) for name in names]
    began = time.monotonic()
    outcomes = put(backend, {key("x"): bytes(KiB), key("y"): bytes(10)}, deadline=began + 0.1)
    assert 0.1 <= time.monotonic() - began < 2
    assert [type(outcome.error) for outcome in outcomes] == [PoolExhausted] * 2
    assert here(backend, [*names, key("x")]) == [True] * 4 + [False]  # and nothing was evicted for nothing
    for lease in leases:
        lease.release()
    assert put(backend, {key("x"): bytes(KiB)})[0].ok


def test_no_deadline_is_no_endless_wait(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(memory_module, "_LONGEST_WAIT_S", 0.05)
    backend = opened(KiB)
    (a,) = keys(1)
    put(backend, {a: bytes(KiB)})
    with leased(backend, a):
        (outcome,) = put(backend, {key("x"): b"x"}, deadline=math.inf)
    assert isinstance(outcome.error, PoolExhausted)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_put_that_waits_goes_on_when_a_lease_ends(opened: Callable[..., MemoryBackend], deleted: bool) -> None:
    backend = opened(KiB)
    a, b = keys(2)
    put(backend, {a: bytes(KiB)})
    lease = leased(backend, a)
    if deleted:
        backend.delete([a], deadline=NO_DEADLINE)
    waiting = threading.Event()
    original = backend._memory.make_room

    def noticed(*args: Any) -> Any:
        room = original(*args)
        waiting.set()
        return room

    backend._memory.make_room = noticed  # type: ignore[method-assign, assignment]
    join = in_thread(lambda: put(backend, {b: bytes(KiB)}, deadline=time.monotonic() + 20))
    assert waiting.wait(10)
    assert here(backend, [b]) == [False]
    lease.release()
    assert join()[0].ok
    assert here(backend, [a, b]) == [False, True]


# Several threads.


def test_two_puts_of_one_key_one_wins(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(8 * MiB)
    names = keys(20)
    barrier = threading.Barrier(8)

    def writer(thread: int) -> list[Outcome]:
        barrier.wait(10)
        order = names if thread % 2 else names[::-1]
        outcomes = put(backend, {name: bytes([thread]) * LARGE for name in order})
        return outcomes if thread % 2 else outcomes[::-1]

    joins = [in_thread(lambda thread=thread: writer(thread)) for thread in range(8)]  # type: ignore[misc]
    results = [join() for join in joins]
    for i, name in enumerate(names):
        winners = [thread for thread in range(8) if results[thread][i].status is Status.OK]
        assert sorted(statuses([result[i] for result in results]), key=str) == [Status.EXISTS] * 7 + [Status.OK]
        assert get(backend, name, LARGE) == bytes(winners) * LARGE


def test_a_second_writer_waits_and_then_finds_it_there(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(MiB)
    a, b = keys(2)
    gate = Gate(monkeypatch)
    join = in_thread(lambda: put(backend, {a: b"1" * LARGE}))
    assert gate.begun.wait(10)
    assert here(backend, [a]) == [False]  # nothing or everything
    assert get(backend, a, LARGE) is None
    assert backend.delete([a], deadline=NO_DEADLINE) == [MISS]
    outcomes = put(backend, {a: b"2" * LARGE, b: b"b"}, deadline=time.monotonic() + 0.05)
    assert isinstance(outcomes[0].error, TransientError)  # not known to be there
    assert outcomes[1].ok
    second = in_thread(lambda: put(backend, {a: b"3" * LARGE}))
    gate.open.set()
    assert join() == [Outcome(Status.OK, LARGE)]
    assert second() == [EXISTS]
    assert get(backend, a, LARGE) == b"1" * LARGE


def test_a_second_writer_stores_it_itself_if_the_first_fails(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(2 * LARGE)
    (a,) = keys(1)
    gate = Gate(monkeypatch, fail=True)
    join = in_thread(lambda: put(backend, {a: b"1" * LARGE}))
    assert gate.begun.wait(10)
    second = in_thread(lambda: put(backend, {a: b"2" * LARGE}))
    gate.open.set()
    assert isinstance(join()[0].error, PermanentError)
    assert second() == [Outcome(Status.OK, LARGE)]
    assert get(backend, a, LARGE) == b"2" * LARGE
    assert backend.stats().in_use == LARGE


def test_memory_that_is_being_read_is_not_given_away(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(LARGE)
    a, b = keys(2)
    data = payload("a", LARGE)
    put(backend, {a: data})
    dst = bytearray(LARGE)
    gate = Gate(monkeypatch)
    join = in_thread(lambda: backend.get_into([Read(a, memoryview(dst))], deadline=NO_DEADLINE))
    assert gate.begun.wait(10)
    assert backend.delete([a], deadline=NO_DEADLINE) == [OK]
    (outcome,) = put(backend, {b: bytes(LARGE)}, deadline=time.monotonic() + 0.05)
    assert isinstance(outcome.error, PoolExhausted)
    gate.open.set()
    assert join() == [Outcome(Status.OK, LARGE)]
    assert dst == data
    assert put(backend, {b: bytes(LARGE)})[0].ok


def test_many_threads_in_too_little_memory(opened: Callable[..., MemoryBackend]) -> None:
    """Readers, writers, deleters and leaseholders on twice as many records as fit: every hit is byte-exact."""
    backend = opened(40 * KiB)
    names = keys(40)
    records = {name: payload(name, 1000 + 50 * i) for i, name in enumerate(names)}
    hits = [0] * 4

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(150):
            some = rng.sample(names, 6)
            put(backend, {name: records[name] for name in some}, deadline=time.monotonic() + 5)
            dsts = [bytearray(3000) for _ in some]
            reads = [Read(name, memoryview(dst)) for name, dst in zip(some, dsts, strict=True)]
            for name, dst, outcome in zip(some, dsts, backend.get_into(reads, deadline=NO_DEADLINE), strict=True):
                if outcome.ok:
                    hits[thread] += 1
                    assert dst[: outcome.nbytes] == records[name]
            for name, buffer in zip(some, backend.lease(some, deadline=NO_DEADLINE), strict=True):
                if buffer is not None:
                    with buffer:
                        assert buffer.view == records[name]
            backend.delete(some[:1], deadline=NO_DEADLINE)
            stats = backend.stats()
            assert stats.in_use <= stats.capacity

    for join in [in_thread(lambda thread=thread: work(thread)) for thread in range(4)]:  # type: ignore[misc]
        join()
    assert min(hits) > 100
    stats = backend.stats()
    assert stats.evicted > 0
    assert len(backend._memory.policy) == stats.records
    assert stats.in_use == sum((info.nbytes + 63) & -64 for page in backend.list(deadline=NO_DEADLINE) for info in page)


# Open, close, fork.


def test_urls() -> None:
    with_options = open_backend("memory://?bytes=1.5MiB&policy=fifo")
    other = open_backend("memory://?bytes=1MiB")
    assert isinstance(with_options, MemoryBackend)
    assert with_options.limits.max_value_bytes == MiB * 3 // 2
    assert with_options.name == "memory"
    put(with_options, {key("a"): b"a"})
    assert isinstance(other, MemoryBackend)
    assert here(other, [key("a")]) == [False]  # each its own
    for backend in (with_options, other):
        assert {Capability.LEASE, Capability.LIST, Capability.CAPACITY} <= set(backend.capabilities)
        assert Capability.SHARED not in backend.capabilities
        backend.close()
    for url, message in [
        ("memory:///tmp?bytes=1MiB", "takes no path"),
        ("memory://?policy=lfu", "lru, fifo, none"),
        ("memory://?bytes=10", "at least 64"),
        ("memory://?bytes=1parsec", "parsec"),
        ("memory://?size=1MiB", "bytes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_backend(url)
    with pytest.raises(ConfigError, match="at least 64 bytes"):
        MemoryBackend(63)
    with pytest.raises(ConfigError, match="lru, fifo, none"):
        MemoryBackend(MiB, policy="lfu")


def test_a_name_is_shared_until_the_last_one_closes() -> None:
    url = "memory://shared?bytes=1MiB"
    first, second = open_backend(url), open_backend(url)
    assert isinstance(first, MemoryBackend)
    assert isinstance(second, MemoryBackend)
    assert first.name == second.name == "memory://shared"
    put(first, {key("a"): b"a"})
    assert get(second, key("a"), 1) == b"a"
    with pytest.raises(ConfigError, match="with the same options"):
        open_backend("memory://shared?bytes=2MiB")
    first.close()
    first.close()  # does not take the other's share
    with pytest.raises(ClosedError):
        first.stat([key("a")], deadline=NO_DEADLINE)
    assert get(second, key("a"), 1) == b"a"
    second.close()
    third = open_backend("memory://shared?bytes=2MiB")
    assert isinstance(third, MemoryBackend)
    assert here(third, [key("a")]) == [False]
    third.close()
    assert not store_module._named


def calls(backend: MemoryBackend, deadline: float) -> list[Callable[[], Any]]:
    name = key("a")
    return [
        lambda: backend.stat([name], deadline=deadline),
        lambda: backend.get_into([Read(name, memoryview(bytearray(1)))], deadline=deadline),
        lambda: backend.put([Write(name, [memoryview(b"x")])], deadline=deadline),
        lambda: backend.delete([name], deadline=deadline),
        lambda: backend.quarantine([name], deadline=deadline),
        lambda: backend.lease([name], deadline=deadline),
        lambda: backend.list(deadline=deadline),
    ]


def test_a_passed_deadline(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    put(backend, {key("a"): b"a"})
    for call in calls(backend, time.monotonic())[:5]:
        (outcome,) = call()
        assert isinstance(outcome.error, TransientError)
    assert get(backend, key("a"), 1) == b"a"


def test_a_deadline_that_passes_between_large_copies(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(MiB)
    names = keys(3)
    copies: list[int] = []

    def copy(dst: memoryview, src: memoryview) -> None:
        copies.append(len(src))
        copy_bytes(dst, src)

    class Clock:
        def time(self) -> float:
            return time.time()

        def monotonic(self) -> float:
            return 100.0 + len(copies)

    monkeypatch.setattr(memory_module, "copy_bytes", copy)
    monkeypatch.setattr(memory_module, "time", Clock())
    outcomes = put(backend, {name: bytes(LARGE) for name in names}, deadline=102)
    assert statuses(outcomes) == [Status.OK, Status.OK, Status.ERROR]
    assert isinstance(outcomes[2].error, TransientError)
    assert here(backend, names) == [True, True, False]
    copies.clear()
    reads = [Read(name, memoryview(bytearray(LARGE))) for name in names[:2]]
    assert statuses(backend.get_into(reads, deadline=101)) == [Status.OK, Status.ERROR]


def test_close_with_work_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend(MiB)
    a, b = keys(2)
    data = payload("a", LARGE)
    put(backend, {a: data})
    dst = bytearray(LARGE)
    reading = Gate(monkeypatch)
    read = in_thread(lambda: backend.get_into([Read(a, memoryview(dst))], deadline=NO_DEADLINE))
    assert reading.begun.wait(10)
    writing = Gate(monkeypatch)
    write = in_thread(lambda: put(backend, {b: data}))
    assert writing.begun.wait(10)
    backend.close()
    backend.close()
    for call in calls(backend, NO_DEADLINE):
        with pytest.raises(ClosedError, match="closed"):
            call()
    with pytest.raises(ClosedError):
        backend.stats()
    assert "closed" in repr(backend)
    reading.open.set()
    writing.open.set()
    assert read() == [Outcome(Status.OK, LARGE)]
    assert dst == data
    with pytest.raises(ClosedError):
        write()
    stats = backend._memory.pool.stats()
    assert (stats.in_use, stats.buffers) == (0, 0)


def test_close_ends_a_put_that_waits_for_room() -> None:
    backend = MemoryBackend(KiB)
    (a,) = keys(1)
    put(backend, {a: bytes(KiB)})
    lease = leased(backend, a)
    waiting = threading.Event()
    original = backend._memory.make_room

    def noticed(*args: Any) -> Any:
        room = original(*args)
        waiting.set()
        return room

    backend._memory.make_room = noticed  # type: ignore[method-assign, assignment]
    join = in_thread(lambda: put(backend, {key("x"): b"x"}, deadline=time.monotonic() + 60))
    assert waiting.wait(10)
    backend.close()
    with pytest.raises(ClosedError):
        join()
    lease.release()


def test_after_fork_the_child_is_told_and_never_hangs(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    named = open_backend("memory://forked?bytes=1MiB")
    assert isinstance(named, MemoryBackend)
    put(backend, {key("a"): b"a"})
    put(named, {key("a"): b"a"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
        with backend._memory.lock, store_module._named_lock:  # as another thread might hold them
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                for each in (backend, named):
                    for call in calls(each, NO_DEADLINE):
                        with pytest.raises(ClosedError, match="fork"):
                            call()
                    each.close()
                again = open_backend("memory://forked?bytes=2MiB")
                assert isinstance(again, MemoryBackend)
                assert here(again, [key("a")]) == [False]
                assert put(again, {key("a"): b"new"})[0].ok
                again.close()
                status = 0
            finally:
                os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert get(backend, key("a"), 1) == get(named, key("a"), 1) == b"a"
    named.close()


def test_key_info_of_an_empty_store(opened: Callable[..., MemoryBackend]) -> None:
    pages: list[Sequence[KeyInfo]] = list(opened(MiB).list(deadline=NO_DEADLINE))
    assert pages == []
