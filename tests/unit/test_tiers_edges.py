"""Hierarchies at their limits: the only copy, no room, a full disk, what never moves, and who waits for whom."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ClosedError, PermanentError, TransientError
from kvstore.eviction import make_policy
from kvstore.keys import Key
from kvstore.record import build_record, opaque_spec
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.tiers import Tier, workers
from kvstore.tiers.window import Window, window_of
from kvstore_backends.memory import MemoryBackend
from tests.tiers_support import SIZE, Make, data, durable, get, held, hierarchies, key, memory, put, quiet, soon

_NO_SPACE = PermanentError("no space left", cause=OSError(errno.ENOSPC, "no space left"))


@pytest.fixture
def tiered() -> Iterator[Make]:
    with hierarchies() as make:
        yield make


def fill(backend: Any, *numbers: int) -> None:
    backend.put([Write(key(n), [memoryview(data(n))]) for n in numbers], deadline=soon())


# The only copy.


def _record(name: Key) -> bytes:
    spec = opaque_spec(700)
    return b"".join(build_record(name, spec, spec.split(memoryview(random.Random(1).randbytes(700))), meta={}))


@pytest.mark.parametrize("how", ["demotion", "put"])
def test_what_lost_its_copy_below_is_not_taken_for_kept_there(tiered: Make, how: str) -> None:
    """The last tier puts its copy aside as damaged: memory's is the only one, and goes down before it goes away."""
    flips = FaultyBackend(durable())
    backend = tiered(memory(2, promote="never"), Tier(flips))
    name = key(7)
    write = Write(name, [memoryview(_record(name))])
    backend.put([write], deadline=soon())
    flips.inner.records[name] = b"X" + flips.inner.records[name][1:]  # type: ignore[attr-defined]
    with backend._hierarchy.lock:
        backend._hierarchy.served[name] = 1  # the damaged copy is the one that was read
    assert backend.quarantine([name], deadline=soon())[0].ok
    assert flips.inner.stat([name], deadline=soon())[0].status is Status.MISS
    if how == "put":
        assert backend.put([write], deadline=soon())[0].status is Status.EXISTS
    else:
        for number in range(20, 24):
            put(quiet(backend), number)
    assert flips.inner.stat([name], deadline=soon())[0].ok
    assert backend.stat([name], deadline=soon())[0].ok


def test_a_delete_that_fails_below_leaves_no_false_trust(tiered: Make) -> None:
    below = FaultyBackend(durable())
    upper = FaultyBackend(DictBackend(name="upper"))
    backend = tiered(Tier(upper, 2 * SIZE), Tier(below))
    put(backend, 1)
    upper.push(Fault.error(), operation="delete")
    below.push(Fault.error(), operation="delete")
    assert backend.delete([key(1)], deadline=soon())[0].status is Status.ERROR
    below.inner.delete([key(1)], deadline=soon())  # it had gone through
    for number in range(2, 6):
        put(quiet(backend), number)
    assert get(backend, 1) == [Status.OK], "neither copy was acknowledged as gone, and one was kept"


def test_what_others_removed_is_found_out_about_when_it_is_missed(tiered: Make) -> None:
    disk = DictBackend(name="disk")
    backend = tiered(Tier(disk, 10 * SIZE, promote="never"), Tier(durable()))
    put(backend, 1, 2, 3)
    disk.records.clear()  # somebody removed the folder
    assert get(backend, 1, 2) == [Status.OK] * 2
    assert quiet(backend).usage() == {"disk": SIZE}


# Up.


def test_what_is_read_below_comes_up_to_every_tier_with_one_read(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(4), Tier(DictBackend(name="disk"), 50 * SIZE), Tier(below))
    fill(below.inner, *range(10))
    for number in range(10):
        get(backend, number)
        quiet(backend)
    assert held(backend.tiers[1]) == set(range(10)), "not only what was put here"
    assert len(held(backend.tiers[0])) in (3, 4)
    assert below.count("get") == 20, "one to answer, one for both tiers"
    assert [tier["promotions"] for tier in backend.stats()] == [10, 10, 0]
    assert get(backend, *range(10)) == [Status.OK] * 10
    assert below.count("get") == 20


def test_what_cannot_come_up_is_not_read_for_it(tiered: Make) -> None:
    """A record larger than the tier, and a tier full of pinned records."""
    below = FaultyBackend(durable())
    backend = tiered(memory(4, high=1.0), Tier(below))
    large = bytes(10 * SIZE)
    below.inner.put([Write(key(50), [memoryview(large)])], deadline=soon())
    memory_of = memoryview(bytearray(len(large)))
    for _ in range(3):
        assert backend.get_into([Read(key(50), memory_of)], deadline=soon())[0].ok
        quiet(backend)
    assert below.count("get") == 3
    put(backend, 0, 1, 2, 3)
    backend.pin([key(n) for n in range(4)])
    fill(below.inner, 10, 11)
    assert get(backend, 10, 11) == [Status.OK] * 2
    quiet(backend)
    assert below.count("get") == 5
    assert held(backend.tiers[0]) == {0, 1, 2, 3}


# Down.


class Picky(DictBackend):
    """Refuses records by number, for good."""

    def __init__(self, refused: range) -> None:
        super().__init__(name="picky")
        self.refused = refused

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [
            Outcome.failed(PermanentError("not this one", backend=self.name))
            if int.from_bytes(write.key, "big") in self.refused
            else super(Picky, self).put([write], deadline=deadline)[0]
            for write in writes
        ]


def test_records_that_cannot_be_brought_down_do_not_hold_up_others(tiered: Make) -> None:
    below = Picky(range(100))
    backend = tiered(memory(300, write="back"), Tier(below))
    put(backend, *range(80))
    put(backend, 200, 201)
    end = soon()
    while key(201) not in below.records and time.monotonic() < end:
        backend._background.hurry()
        time.sleep(0.002)
    assert {key(200), key(201)} <= set(below.records)
    assert len(backend.tiers[0].owed) == 80


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_a_record_that_cannot_move_does_not_stop_demotion(tiered: Make, policy: str) -> None:
    below = Picky(range(3))
    backend = tiered(memory(10, policy=policy, write="back"), Tier(below, 100 * SIZE))
    put(backend, 0, 1, 2)
    for number in range(10, 40):
        put(backend, number)
    end = soon()
    while backend.tiers[0].excess() > 0 and time.monotonic() < end:
        backend._background.hurry()
        time.sleep(0.002)
    assert backend.tiers[0].used <= 9 * SIZE
    assert {0, 1, 2} <= held(backend.tiers[0])
    assert get(backend, *range(3), *range(10, 40)) == [Status.OK] * 33


def test_a_record_that_no_slower_tier_takes_is_refused(tiered: Make) -> None:
    """Else it could never leave."""
    backend = tiered(memory(20), Tier(durable(), 5 * SIZE))
    large = [memoryview(bytes(6 * SIZE))]
    (outcome,) = backend.put([Write(key(1), large)], deadline=soon())
    assert isinstance(outcome.error, PermanentError)
    assert held(quiet(backend).tiers[0]) == set()
    assert backend.limits.max_value_bytes == 5 * SIZE


def test_a_pin_keeps_a_record_that_is_about_to_move(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(4), Tier(below))
    put(backend, 1)
    below.inner.delete([key(1)], deadline=soon())
    with backend._hierarchy.lock:
        backend._hierarchy.loose.add(key(1))  # in memory only
    below.push(Fault.hang(), operation="put")
    claimed = backend._hierarchy.take([key(1)], soon())
    mover = threading.Thread(target=backend._mover.demote, args=(0, claimed))
    mover.start()
    below.wait_hung()
    backend.pin([key(1)])
    below.release()
    mover.join(30)
    assert held(backend.tiers[0]) == {1}
    assert held(quiet(backend).tiers[1]) == {1}


class Forgetful(DictBackend):
    """Stores, and loses the answer."""

    forgets = True

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        lost = Outcome.failed(TransientError("the answer was lost", backend=self.name))
        return [lost] * len(writes) if self.forgets else outcomes


def test_a_put_of_which_nobody_knows_keeps_its_room(tiered: Make) -> None:
    """It may have been stored: until that is known its bytes are not given to others."""
    inner = Forgetful(name="disk")
    disk = FaultyBackend(inner)
    backend = tiered(Tier(disk, 2 * SIZE, high=1.0, promote="never"), Tier(durable()))
    disk.push(Fault.ok(), Fault.hang(), operation="stat")  # before the put, and after it
    writer = threading.Thread(target=put, args=(backend, 1))
    writer.start()
    disk.wait_hung()
    inner.forgets = False
    put(backend, 2)
    put(backend, 3)
    assert len(inner.records) <= 2, "not {1, 2, 3}"
    disk.release()
    writer.join(30)
    assert quiet(backend).usage() == {"disk": SIZE * len(inner.records)}


# A disk that is smaller than its capacity.


def test_a_last_tier_whose_disk_is_full_drops_records(tiered: Make) -> None:
    disk = FaultyBackend(DictBackend(name="disk"))
    backend = tiered(Tier(disk, 1000 * SIZE))
    put(backend, *range(10))
    disk.push(Fault.error(_NO_SPACE), operation="put")
    assert put(backend, 10)[0].status is Status.OK, "one retry, once something went"
    assert backend.stats()[0]["drops"] >= 1
    disk.push(Fault.error(_NO_SPACE), Fault.error(_NO_SPACE), operation="put")
    assert put(backend, 11)[0].status is Status.ERROR
    assert put(quiet(backend), 12)[0].status is Status.OK
    disk.assert_done()


def test_a_tier_whose_disk_is_full_makes_room(tiered: Make) -> None:
    disk = FaultyBackend(DictBackend(name="disk"))
    backend = tiered(Tier(disk, 1000 * SIZE), Tier(durable()))
    put(backend, *range(10))
    disk.push(Fault.error(_NO_SPACE), operation="put")
    assert put(backend, 10)[0].status is Status.OK
    quiet(backend)
    assert backend.usage() == {"disk": 9 * SIZE}
    assert get(backend, *range(11)) == [Status.OK] * 11


def test_nothing_is_added_to_a_tier_whose_contents_are_not_known(tiered: Make) -> None:
    """After a restart, unless its backend keeps the limit by itself."""
    inner = DictBackend(name="disk")
    fill(inner, *range(9))
    disk = FaultyBackend(inner)
    disk.push(Fault.hang(), operation="list")
    memory_of_all = MemoryBackend(1 << 20, policy="none")
    from kvstore.tiers import TieredBackend  # not by `tiered`, which waits until all is known

    backend = TieredBackend([Tier(disk, 10 * SIZE, promote="never"), Tier(memory_of_all)])
    try:
        disk.wait_hung()
        assert [outcome.status for outcome in put(backend, *range(20, 28))] == [Status.OK] * 8
        assert get(backend, 0) == [Status.OK], "meanwhile it serves"
        assert len(inner.records) == 9
        disk.release()
        assert quiet(backend).usage() == {"disk": 9 * SIZE}
        put(backend, 30)
        assert key(30) in inner.records
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("policy", "ages"), [("ttl", True), ("session", True), ("default", False), ("lookahead", False), ("of ttl", True)]
)
def test_which_policies_remove_by_age(policy: str, ages: bool) -> None:
    """Only for those a thread looks now and then."""
    made = make_policy("lookahead", inner="ttl") if policy == "of ttl" else make_policy(policy)
    assert memory(2, policy=made).expires is ages


# Who waits for whom.


def test_looking_again_does_not_spin_while_others_are_at_work(tiered: Make) -> None:
    backend = tiered(Tier(DictBackend(name="disk"), 10 * SIZE))
    put(backend, 1)
    h = backend._hierarchy
    claimed = h.take([key(1)], soon())
    with h.lock:
        backend.tiers[0].doubt(key(1))
    pauses: list[float | None] = []
    step = threading.Thread(target=lambda: pauses.append(backend._background._settle(0)), daemon=True)
    step.start()
    step.join(10)
    h.give(claimed)
    assert pauses == [workers._BUSY_S]
    assert quiet(backend).usage() == {"disk": SIZE}


def test_the_window_is_made_without_the_lock(tiered: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of 100,000 records would hold up all reads."""
    backend = tiered(memory(8), Tier(durable()))
    held_up: list[bool] = []

    def made(*args: Any) -> Window:
        held_up.append(backend._hierarchy.lock.locked())
        return window_of(*args)

    monkeypatch.setattr(workers, "window_of", made)
    backend.announce([[key(1), key(2)]])
    assert held_up == [False]
    assert list(backend._hierarchy.window.rank) == [key(1), key(2)]


def _cold(tiered: Make, *records: int) -> tuple[Any, FaultyBackend]:
    """Nothing is near, and some is far."""
    below = FaultyBackend(durable())
    fill(below.inner, *records)
    return tiered(memory(5, high=1.0), Tier(DictBackend(name="disk"), 7 * SIZE, high=1.0), Tier(below)), below


def test_a_long_queue_fills_cold_tiers_in_its_order(tiered: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there is room for is known only once the first have come; later ones never drive out earlier ones. Also
    across the slices in which the queue is looked through."""
    monkeypatch.setattr(workers, "_ANNOUNCE_SLICE", 3)
    backend, below = _cold(tiered, *range(100))
    backend.announce([[key(n) for n in range(100)]])
    quiet(backend)
    assert held(backend.tiers[0]) == {0, 1, 2, 3, 4}
    assert held(backend.tiers[1]) == {5, 6, 7, 8, 9, 10, 11}
    order = [int.from_bytes(name, "big") for call in below.calls_of("get") for name in call.keys]
    assert order[:5] == [0, 1, 2, 3, 4]
    assert len(order) <= 12 + 16, "at most one batch that was on its way is read in vain"


def test_behind_a_hole_nothing_is_looked_for(tiered: Make) -> None:
    backend, below = _cold(tiered, 0, 200)
    put(backend, 300)  # so that the window is not cut short
    backend.announce([[key(n) for n in range(100)], [key(200)]])
    quiet(backend)
    assert 0 in held(backend.tiers[0])
    asked = {int.from_bytes(name, "big") for call in below.calls_of("stat") for name in call.keys}
    assert len(asked - {300}) <= 2 * 16


def test_in_a_forked_child_nothing_waits_for_a_lock(tiered: Make) -> None:
    backend = tiered(memory(4), Tier(durable()))
    with backend._hierarchy.lock:  # another thread might hold it
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (backend.usage, backend.stats, lambda: backend.pin([key(1)]), lambda: backend.announce([])):
                try:
                    call()
                except ClosedError:
                    refused += 1
            os._exit(refused)
    end = time.monotonic() + 30
    done = status = 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done
    assert os.waitstatus_to_exitcode(status) == 4
