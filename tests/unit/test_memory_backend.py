"""MemoryBackend beyond the conformance suite: what is stored, capacity, copies, locks."""

from __future__ import annotations

import array
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvstore_backends._memory_store as store_module
import kvstore_backends.memory as memory_module
from kvstore.backend import EXISTS, MISS, NO_DEADLINE, OK, Outcome, Read, Status, Write
from kvstore.buffers import copy_bytes
from kvstore.errors import ClosedError, PermanentError, PoolExhausted, TransientError
from kvstore_backends.memory import MemoryBackend
from tests.unit.memory_support import (
    LARGE,
    KiB,
    MiB,
    get,
    here,
    hit_prefix,
    key,
    keys,
    leased,
    opened,
    payload,
    put,
    put_chain,
    statuses,
)

__all__ = ["opened"]  # fixtures


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
