"""MemoryBackend beyond the conformance suite: capacity, leases, copies, locks, and what happens under its feet."""

from __future__ import annotations

import array
import hashlib
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import kvstore_backends._memory_store as store_module
import kvstore_backends.memory as memory_module
from kvstore.backend import EXISTS, MISS, NO_DEADLINE, OK, Capability, KeyInfo, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, copy_bytes
from kvstore.errors import ClosedError, ConfigError, PermanentError, PoolExhausted, TransientError
from kvstore.keys import Key
from kvstore.registry import open_backend
from kvstore_backends.memory import MemoryBackend

KiB, MiB = 1 << 10, 1 << 20
LARGE = 64 * KiB  # copied with the GIL released


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def keys(count: int, name: str = "k") -> list[Key]:
    return [key((name, i)) for i in range(count)]


def payload(name: object, nbytes: int) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def put(backend: MemoryBackend, records: dict[Key, bytes], *, deadline: float = NO_DEADLINE) -> list[Outcome]:
    return backend.put([Write(name, [memoryview(data)]) for name, data in records.items()], deadline=deadline)


def put_chain(
    backend: MemoryBackend, chain: Sequence[Key], data: bytes, *, parent: Key | None = None
) -> list[Outcome]:  # fmt: skip
    parents = [parent, *chain[:-1]]
    writes = [Write(each, [memoryview(data)], above) for each, above in zip(chain, parents, strict=True)]
    return backend.put(writes, deadline=NO_DEADLINE)


def get(backend: MemoryBackend, name: Key, nbytes: int) -> bytes | None:
    data = bytearray(nbytes)
    (outcome,) = backend.get_into([Read(name, memoryview(data))], deadline=NO_DEADLINE)
    assert outcome.error is None
    return bytes(data[: outcome.nbytes]) if outcome.ok else None


def here(backend: MemoryBackend, names: Sequence[Key]) -> list[bool]:
    return [outcome.ok for outcome in backend.stat(names, deadline=NO_DEADLINE)]


def hit_prefix(backend: MemoryBackend, names: Sequence[Key]) -> int:
    return [*here(backend, names), False].index(False)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def leased(backend: MemoryBackend, name: Key) -> Buffer:
    (buffer,) = backend.lease([name], deadline=NO_DEADLINE)
    assert buffer is not None
    return buffer


@pytest.fixture
def opened() -> Iterator[Callable[..., MemoryBackend]]:
    """Opens backends; afterwards they are closed and must have given all their memory back."""
    backends: list[MemoryBackend] = []

    def make(*args: Any, **options: Any) -> MemoryBackend:
        backends.append(MemoryBackend(*args, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
        stats = backend._memory.pool.stats()
        assert (stats.in_use, stats.buffers, stats.pinned) == (0, 0, 0)
        assert not backend._memory.pending


class Gate:
    """Stops the first copy of `name`'s direction until `open` is set; tells when it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: bool = False) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.fail = fail
        monkeypatch.setattr(memory_module, "copy_bytes", self.copy)

    def copy(self, dst: memoryview, src: memoryview) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.open.wait(10)
            if self.fail:
                raise ValueError("scripted")
        copy_bytes(dst, src)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a thread; the returned function joins it, and returns or raises what it did."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(20)
        assert not thread.is_alive()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    return join


# What is stored.


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 32 * KiB - 1, 32 * KiB, LARGE, MiB + 1])
def test_bytes_come_back(opened: Callable[..., MemoryBackend], nbytes: int) -> None:
    backend = opened(4 * MiB)
    data = payload("a", nbytes)
    parts = [memoryview(data)[at : at + nbytes // 3 + 1] for at in range(0, nbytes, nbytes // 3 + 1)]
    a, b = keys(2)
    outcomes = backend.put([Write(a, [memoryview(data)]), Write(b, parts)], deadline=NO_DEADLINE)
    assert outcomes == [Outcome(Status.OK, nbytes)] * 2
    assert backend.stat([a, key("none"), b], deadline=NO_DEADLINE) == [outcomes[0], MISS, outcomes[1]]
    assert get(backend, a, nbytes + 10) == get(backend, b, nbytes) == data
    for offset, count in [(0, nbytes // 2), (nbytes // 2, nbytes), (nbytes, 5), (nbytes + 9, 5)]:
        dst = bytearray(b"\x5a" * count)
        (outcome,) = backend.get_into([Read(b, memoryview(dst), offset)], deadline=NO_DEADLINE)
        want = data[offset : offset + count]
        assert outcome == Outcome(Status.OK, len(want))
        assert dst == want + b"\x5a" * (count - len(want))


def test_the_first_of_equal_keys_in_a_batch_wins(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    a, b = keys(2)
    writes = [Write(name, [memoryview(data)]) for name, data in [(a, b"first"), (b, b"b"), (a, b"second")]]
    outcomes = backend.put(writes, deadline=NO_DEADLINE)
    assert statuses(outcomes) == [Status.OK, Status.OK, Status.EXISTS]
    assert get(backend, a, 10) == b"first"
    assert backend.put(writes, deadline=NO_DEADLINE) == [EXISTS] * 3


def test_views_that_cannot_be_used_cost_only_their_own_item(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(4 * MiB)
    a, b, c, d = keys(4)
    good = payload("a", 100)
    wide = array.array("f", range(100))
    big = memoryview(bytes(2 * LARGE))
    outcomes = backend.put(
        [
            Write(a, [memoryview(good)]),
            Write(b, [memoryview(wide)]),  # items of 4 bytes
            Write(c, [big[::2]]),  # not contiguous
            Write(d, [memoryview(good)]),
        ],
        deadline=NO_DEADLINE,
    )
    assert statuses(outcomes) == [Status.OK, Status.ERROR, Status.ERROR, Status.OK]
    assert all(isinstance(outcomes[i].error, PermanentError) for i in (1, 2))
    assert here(backend, [a, b, c, d]) == [True, False, False, True]
    assert put(backend, {b: good, c: good}) == [Outcome(Status.OK, 100)] * 2

    dst = bytearray(100)
    reads = [Read(a, memoryview(bytes(100))), Read(a, memoryview(dst), -1), Read(d, memoryview(dst))]
    outcomes = backend.get_into(reads, deadline=NO_DEADLINE)
    assert statuses(outcomes) == [Status.ERROR, Status.ERROR, Status.OK]
    assert isinstance(outcomes[0].error, PermanentError)
    assert dst == good


def test_quarantine_frees_the_name_but_not_of_a_record_that_replaced_the_bad_one(
    opened: Callable[..., MemoryBackend],
) -> None:
    backend = opened(MiB)
    (a,) = keys(1)
    put(backend, {a: b"bad"})
    get(backend, a, 3)
    assert backend.quarantine([a, a, key("none")], deadline=NO_DEADLINE) == [OK, MISS, MISS]
    assert backend.stats().in_use == 0
    assert put(backend, {a: b"healed"})[0].ok
    assert backend.quarantine([a], deadline=NO_DEADLINE) == [MISS]
    assert get(backend, a, 6) == b"healed"


def test_list_gives_pages_and_times(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    before = time.time()
    names = keys(2500)
    for at in range(0, 2500, 500):
        put(backend, dict.fromkeys(names[at : at + 500], b"x" * (at // 500)))
    pages = list(backend.list(deadline=NO_DEADLINE))
    assert [len(page) for page in pages] == [1000, 1000, 500]
    infos = [info for page in pages for info in page]
    assert {info.key: info.nbytes for info in infos} == {name: i // 500 for i, name in enumerate(names)}
    assert all(before <= info.last_used <= time.time() for info in infos)

    listing = backend.list(deadline=time.monotonic())
    with pytest.raises(TransientError):
        next(listing)
    listing = backend.list(deadline=NO_DEADLINE)
    next(listing)
    backend.close()
    with pytest.raises(ClosedError):
        next(listing)


def test_tiny_records_waste_little(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(MiB)
    put(backend, {name: bytes(100) for name in keys(1000)})
    stats = backend.stats()
    assert (stats.records, stats.nbytes, stats.in_use, stats.capacity) == (1000, 100_000, 128_000, MiB)


# Capacity and what goes.


def test_an_oversize_record_is_refused_before_anything_is_evicted(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(10 * KiB)
    names = keys(10)
    put(backend, {name: bytes(KiB) for name in names})
    (large,) = keys(1, "large")
    (outcome,) = put(backend, {large: bytes(10 * KiB + 1)})
    assert isinstance(outcome.error, PermanentError)
    assert backend.limits.max_value_bytes == 10 * KiB
    assert all(here(backend, names))
    assert put(backend, {large: b"small"})[0].ok
    assert backend.stats().evicted == 1


def test_get_lease_and_put_again_make_recent_but_stat_does_not(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(8 * KiB)
    names = keys(8)
    for name in names:
        put(backend, {name: bytes(KiB)})
    backend.stat(names[:4], deadline=NO_DEADLINE)
    get(backend, names[0], KiB)
    leased(backend, names[1]).release()
    assert put(backend, {names[2]: bytes(KiB)}) == [EXISTS]
    put(backend, {name: bytes(KiB) for name in keys(5, "new")})
    assert here(backend, names) == [True, True, True] + [False] * 5


def test_fifo_and_none(opened: Callable[..., MemoryBackend]) -> None:
    a, b, c = keys(3)
    fifo = opened(2 * KiB, policy="fifo")
    put(fifo, {a: bytes(KiB)})
    put(fifo, {b: bytes(KiB)})
    get(fifo, a, KiB)
    put(fifo, {c: bytes(KiB)})
    assert here(fifo, [a, b, c]) == [False, True, True]

    keep = opened(2 * KiB, policy="none")
    outcomes = put(keep, {a: bytes(KiB), b: bytes(KiB), c: bytes(KiB)})
    assert statuses(outcomes) == [Status.OK, Status.OK, Status.ERROR]
    assert isinstance(outcomes[2].error, PoolExhausted)
    keep.delete([a], deadline=NO_DEADLINE)
    assert put(keep, {c: bytes(KiB)})[0].ok


def test_fault_12_the_tail_goes_before_the_head(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(8 * KiB)
    chain = keys(8, "chain")
    put_chain(backend, chain[:4], bytes(KiB))
    put_chain(backend, chain[4:], bytes(KiB), parent=chain[3])
    for name in keys(2, "other"):
        put(backend, {name: bytes(KiB)})
    assert hit_prefix(backend, chain) == 6


def test_fault_12_without_hints_within_a_batch(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(8 * KiB)
    chain = keys(8, "chain")
    put(backend, {name: bytes(KiB) for name in chain})
    put(backend, {name: bytes(KiB) for name in keys(3, "other")})
    assert hit_prefix(backend, chain) == 5


@pytest.mark.parametrize(("length", "per_call"), [(20, 20), (9, 1), (9, 3)])
def test_a_chain_longer_than_the_store_keeps_its_head(
    opened: Callable[..., MemoryBackend], length: int, per_call: int
) -> None:
    """No record pushes out what leads up to it; and nobody waits for room that cannot come."""
    backend = opened(8 * KiB)
    put(backend, {name: bytes(KiB) for name in keys(8, "other")})
    chain = keys(length, "chain")
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for at in range(0, length, per_call):
        outcomes += put_chain(backend, chain[at : at + per_call], bytes(KiB), parent=chain[at - 1] if at else None)
    assert time.monotonic() - began < 2
    assert statuses(outcomes) == [Status.OK] * 8 + [Status.ERROR] * (length - 8)
    assert all(isinstance(outcome.error, PoolExhausted) for outcome in outcomes[8:])
    assert here(backend, chain) == [True] * 8 + [False] * (length - 8)


def test_records_of_all_sizes_share_the_limit(opened: Callable[..., MemoryBackend]) -> None:
    """Holes of the wrong size: eviction goes on until a large one fits; the limit is never exceeded."""
    backend = opened(256 * KiB)
    rng = random.Random(7)
    sizes: list[int] = []
    found = 0
    for i in range(600):
        nbytes = rng.choice([0, 10, 100, 1000, 5000, 40_000, 130_000])
        sizes.append(nbytes)
        name = key(i)
        assert put(backend, {name: payload(i, nbytes)})[0].ok
        assert get(backend, name, nbytes) == payload(i, nbytes)
        stats = backend.stats()
        assert stats.nbytes <= stats.in_use <= stats.capacity
        back = rng.randrange(max(0, i - 10), i + 1)
        data = get(backend, key(back), sizes[back])
        if data is not None:
            found += 1
            assert data == payload(back, sizes[back])
    assert 100 < found < 600
    assert backend.stats().evicted > 400


def test_outcomes_of_many_sizes_are_right_and_not_kept_for_ever(
    opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_KNOWN_SIZES", 10)
    backend = opened(MiB)
    names = keys(50)
    put(backend, {name: bytes(i) for i, name in enumerate(names)})
    assert [o.nbytes for o in backend.stat(names, deadline=NO_DEADLINE)] == list(range(50))
    assert len(backend._memory.sizes) == 10


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


# Cost: copies, locks.


def test_bytes_are_copied_once(opened: Callable[..., MemoryBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def counting(dst: memoryview, src: memoryview) -> None:
        assert not backend._memory.lock.locked()
        copied.append(len(src))
        copy_bytes(dst, src)

    backend = opened(4 * MiB)
    a, b = keys(2)
    monkeypatch.setattr(memory_module, "copy_bytes", counting)
    put(backend, {a: bytes(MiB), b: bytes(LARGE)})
    assert copied == [MiB, LARGE]
    copied.clear()
    put(backend, {a: bytes(MiB)})
    assert copied == []
    get(backend, a, MiB)
    assert copied == [MiB]
    copied.clear()
    leased(backend, a).release()
    assert copied == []


def test_locks_are_taken_per_batch_not_per_key(opened: Callable[..., MemoryBackend]) -> None:
    class Counting:
        def __init__(self, lock: Any) -> None:
            self.lock, self.count = lock, 0

        def __enter__(self) -> None:
            self.count += 1
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    backend = opened(MiB)
    names = keys(64)
    put(backend, {key("first"): b""})
    counting = Counting(backend._memory.lock)
    backend._memory.lock = counting  # type: ignore[assignment]
    reads = [Read(name, memoryview(bytearray(10))) for name in names]
    operations: list[tuple[Callable[[], Any], int]] = [
        (lambda: put(backend, {name: bytes(10) for name in names}), 3),
        (lambda: put(backend, {name: bytes(10) for name in names}), 1),
        (lambda: backend.stat(names, deadline=NO_DEADLINE), 1),
        (lambda: backend.get_into(reads, deadline=NO_DEADLINE), 2),
        (lambda: backend.delete(names, deadline=NO_DEADLINE), 1),
    ]
    for operation, most in operations:
        counting.count = 0
        operation()
        assert counting.count <= most


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
