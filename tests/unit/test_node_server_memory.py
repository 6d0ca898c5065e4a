"""Reservations of a `MemoryStore`: claim, take memory, commit or give back; and the age of records."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.backend import EXISTS, MISS, NO_DEADLINE, OK, Capability, Read, Write
from kvstore.errors import ClosedError
from kvstore.keys import Key
from kvstore_backends._memory_reservation import Claimed, Expiry, Reservation, span
from kvstore_backends._memory_store import MemoryStore
from kvstore_backends.memory import MemoryBackend

from .node_server_support import KiB, keys, payload

_KEYS = keys(6)
_SIZES = st.sampled_from([0, 1, 64, 65, 500, 1000, 4000, 5000])


def claim(store: MemoryStore, records: dict[Key, int], **more: Any) -> Claimed:
    names = [*records]
    return store.claim(names, [*records.values()], [None] * len(names), range(len(names)), **more)


def fill(reservation: Reservation, until: float = 0.0) -> list[int]:
    with_room = [index for wave in reservation.rooms(until) for index in wave]
    for index in with_room:
        reservation.views[index][:] = payload(reservation.keys[index], reservation.sizes[index])
    return with_room


class ReservationMachine(RuleBasedStateMachine):
    """Any interleaving of writers that claim, commit and give up, rivals included, with readers, deletes and puts.

    Whatever happens: the books add up, what can be read is whole, and at the end everything comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backend = MemoryBackend(8 * KiB)
        self.store = self.backend.store
        self.open: list[tuple[Reservation, list[int]]] = []
        self.pinned: list[list[Any]] = []
        self.sizes: dict[Key, int] = {}

    @rule(
        wanted=st.dictionaries(st.sampled_from(_KEYS), _SIZES, min_size=1, max_size=4),
        rival=st.booleans(),
    )
    def begin(self, wanted: dict[Key, int], rival: bool) -> None:
        there = {key for key in wanted if key in self.store.records}
        pending = {key for key in wanted if key in self.store.pending}
        claimed = claim(self.store, wanted, rival=rival)
        names = [*wanted]
        assert {names[place] for place in claimed.there} == there
        assert {names[place] for place in claimed.others} == (set() if rival else pending - there)
        assert {names[place] for place in claimed.reservation.places} == set(wanted) - there - (
            set() if rival else pending
        )
        if claimed.reservation.places:
            self.open.append((claimed.reservation, fill(claimed.reservation)))

    @rule(which=st.integers(0, 9), all_of_it=st.booleans())
    def commit(self, which: int, all_of_it: bool) -> None:
        if not self.open:
            return
        reservation, ready = self.open[which % len(self.open)]
        some = ready if all_of_it else ready[:1]
        already = {index for index in some if reservation.keys[index] in self.store.records}
        lost = reservation.commit(some)
        assert set(lost) == already
        for index in some:
            if index not in already:
                self.sizes[reservation.keys[index]] = reservation.sizes[index]
        del ready[: len(some)]

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        if self.open:
            reservation, _ = self.open.pop(which % len(self.open))
            reservation.close()
            reservation.close()

    @rule(key=st.sampled_from(_KEYS), nbytes=_SIZES)
    def put(self, key: Key, nbytes: int) -> None:
        """As the backend does it: over the same reservations."""
        if key in self.store.pending:
            return  # it would wait for the other
        data = payload(key, nbytes)
        there = key in self.store.records
        (outcome,) = self.backend.put([Write(key, [memoryview(data)])], deadline=time.monotonic() + 0.02)
        assert outcome.error is not None or (outcome is EXISTS if there else outcome.ok)
        if outcome.ok:
            self.sizes[key] = nbytes

    @rule(key=st.sampled_from(_KEYS))
    def delete(self, key: Key) -> None:
        there = key in self.store.records
        assert self.backend.delete([key], deadline=NO_DEADLINE) == [OK if there else MISS]

    @rule(some=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3))
    def pin(self, some: list[Key]) -> None:
        if len(self.pinned) < 3:
            self.pinned.append(self.store.find(some, "get"))

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.store.let_go(self.pinned.pop())

    @rule(key=st.sampled_from(_KEYS))
    def read(self, key: Key) -> None:
        dst = bytearray(5000)
        (outcome,) = self.backend.get_into([Read(key, memoryview(dst))], deadline=NO_DEADLINE)
        if outcome.ok:
            assert outcome.nbytes == self.sizes[key]
            assert dst[: outcome.nbytes] == payload(key, outcome.nbytes)

    @invariant()
    def the_books_add_up(self) -> None:
        store = self.store
        assert {key for key in _KEYS if key in store.policy} == store.records.keys() | store.pending.keys()
        held = sum(span(reservation.sizes[index]) for reservation, ready in self.open for index in ready)
        gone = {id(r): r for batch in self.pinned for r in batch if r is not None and r.gone}
        stats = store.pool.stats()
        assert stats.in_use == (
            sum(span(record.found.nbytes) for record in store.records.values())
            + sum(span(record.found.nbytes) for record in gone.values())
            + held
        )
        claimed = {key for reservation, _ in self.open for key in reservation.keys}
        assert store.pending.keys() <= claimed

    def teardown(self) -> None:
        for reservation, _ in self.open:
            reservation.close()
        for batch in self.pinned:
            self.store.let_go(batch)
        assert not self.store.pending
        self.backend.close()
        assert self.store.pool.stats().in_use == 0


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@pytest.fixture
def opened() -> Iterator[Callable[..., MemoryBackend]]:
    backends: list[MemoryBackend] = []

    def make(*args: Any, **options: Any) -> MemoryBackend:
        backends.append(MemoryBackend(*args, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
        assert backend.store.pool.stats().in_use == 0
        assert not backend.store.pending


def test_a_reservation_is_seen_by_nobody_until_it_is_committed(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(64 * KiB)
    a, b = keys(2)
    reservation = claim(backend.store, {a: 1000, b: 2000}).reservation
    ready = fill(reservation)
    assert backend.stat([a, b], deadline=NO_DEADLINE) == [MISS, MISS]
    assert backend.delete([a], deadline=NO_DEADLINE) == [MISS]
    assert not [info for page in backend.list(deadline=NO_DEADLINE) for info in page]
    assert reservation.commit(ready) == []
    assert [outcome.nbytes for outcome in backend.stat([a, b], deadline=NO_DEADLINE)] == [1000, 2000]
    with pytest.raises(ClosedError):
        reservation.commit(ready)
    reservation.close()
    assert backend.stats().in_use == span(1000) + span(2000)


def test_memory_that_a_reservation_holds_is_not_waited_for_by_itself(opened: Callable[..., MemoryBackend]) -> None:
    """The rest of a batch does not wait for memory that its own head holds."""
    backend = opened(4 * KiB)
    began = time.monotonic()
    reservation = claim(backend.store, dict.fromkeys(keys(6), KiB)).reservation
    assert len(fill(reservation, math.inf)) == 4
    assert time.monotonic() - began < 30
    reservation.close()


def test_a_rival_takes_over_when_the_first_gives_up(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(64 * KiB)
    a, parent = keys(2)
    first = claim(backend.store, {a: 100}).reservation
    store = backend.store
    second = store.claim([a], [200], [parent], [0], rival=True).reservation
    ready = fill(second)
    first.close()
    assert a not in store.policy
    assert second.commit(ready) == []
    assert a in store.policy
    second.close()
    assert backend.stat([a], deadline=NO_DEADLINE)[0].nbytes == 200


def test_shared_memory(opened: Callable[..., MemoryBackend]) -> None:
    backend = opened(64 * KiB, shared=True)
    (a,) = keys(1)
    data = payload("a", 5000)
    backend.put([Write(a, [memoryview(data)])], deadline=NO_DEADLINE)
    record = backend.store.records[a]
    slab = record.buffer.slab
    if slab.fd is None:
        pytest.skip(slab.unshared)
    assert os.pread(slab.fd, 5000, record.buffer.offset) == data


# Age.


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def put(backend: MemoryBackend, *names: Key) -> None:
    for name in names:
        backend.put([Write(name, [memoryview(b"data")])], deadline=NO_DEADLINE)


def here(backend: MemoryBackend, *names: Key) -> list[bool]:
    return [outcome.ok for outcome in backend.stat(names, deadline=NO_DEADLINE)]


def test_records_go_by_age_since_their_last_use(opened: Callable[..., MemoryBackend]) -> None:
    clock = Clock()
    backend = opened(64 * KiB, expiry=Expiry(10.0, True, clock))
    assert Capability.TTL in backend.capabilities
    a, b, c, d = keys(4)
    put(backend, a, b, c, d)
    clock.now += 9
    backend.get_into([Read(a, memoryview(bytearray(4)))], deadline=NO_DEADLINE)
    put(backend, b)  # finds it there
    backend.stat([c], deadline=NO_DEADLINE)  # no use
    clock.now += 1
    assert here(backend, a, b, c, d) == [True, True, False, False]
    assert backend.lease([d], deadline=NO_DEADLINE) == [None]
    put(backend, d)
    clock.now += 9
    assert here(backend, a, b, d) == [False, False, True]
    assert backend.stats().expired == 4
    assert backend.stats().in_use == 64


def test_records_go_by_age_since_their_put(opened: Callable[..., MemoryBackend]) -> None:
    clock = Clock()
    backend = opened(64 * KiB, expiry=Expiry(10.0, False, clock))
    (a,) = keys(1)
    put(backend, a)
    clock.now += 9
    assert backend.get_into([Read(a, memoryview(bytearray(4)))], deadline=NO_DEADLINE)[0].ok
    clock.now += 1
    assert backend.get_into([Read(a, memoryview(bytearray(4)))], deadline=NO_DEADLINE) == [MISS]


@pytest.mark.parametrize("operation", ["list", "delete", "quarantine", "put", "sweep"])
def test_what_is_too_old_is_gone_for_every_operation(opened: Callable[..., MemoryBackend], operation: str) -> None:
    clock = Clock()
    backend = opened(64 * KiB, expiry=Expiry(10.0, True, clock))
    (a,) = keys(1)
    put(backend, a)
    backend.get_into([Read(a, memoryview(bytearray(4)))], deadline=NO_DEADLINE)
    clock.now += 10
    if operation == "list":
        assert not [info for page in backend.list(deadline=NO_DEADLINE) for info in page]
    elif operation == "put":
        assert backend.put([Write(a, [memoryview(b"new")])], deadline=NO_DEADLINE)[0].ok
        clock.now += 9
        assert here(backend, a) == [True]
    elif operation == "sweep":
        assert backend.store.expire() == 1
        assert (backend.stats().records, backend.stats().expired) == (0, 1)
    else:
        assert getattr(backend, operation)([a], deadline=NO_DEADLINE) == [MISS]


def test_a_sweep_of_many_leaves_what_was_used_meanwhile(opened: Callable[..., MemoryBackend]) -> None:
    clock = Clock()
    backend = opened(1 << 20, expiry=Expiry(10.0, True, clock))
    names = keys(3000)
    put(backend, *names)
    clock.now += 5
    put(backend, *names[::3])
    clock.now += 5
    leased = backend.lease(names[:2], deadline=NO_DEADLINE)
    assert leased[1] is None
    assert backend.store.expire() == 1999  # one of them went when it was asked for
    assert backend.stats().records == 1000
    assert leased[0] is not None
    leased[0].release()


def test_without_a_ttl_nothing_is_looked_at(opened: Callable[..., MemoryBackend]) -> None:
    def broken() -> float:
        raise AssertionError("the clock was read")

    backend = opened(64 * KiB, expiry=Expiry(math.inf, True, broken))
    (a,) = keys(1)
    put(backend, a)
    assert here(backend, a) == [True]
    assert backend.store.expire() == 0
    assert Capability.TTL not in backend.capabilities
