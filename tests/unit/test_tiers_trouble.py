"""Hierarchies in trouble, and with a queue of jobs in sight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import kvstore
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.config import Config
from kvstore.errors import TransientError
from kvstore.eviction import LRUPolicy, RecordInfo
from kvstore.keys import Key
from kvstore.store import Store
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.tiers import Tier, TieredBackend
from kvstore.wrappers import BreakerBackend
from tests.tiers_support import SIZE, Make, data, durable, get, held, hierarchies, key, memory, put, quiet, soon


@pytest.fixture
def tiered() -> Iterator[Make]:
    with hierarchies() as make:
        yield make


# Trouble.


def test_a_tier_that_fails_is_passed_over_and_comes_back(tiered: Make) -> None:
    clock = [0.0]
    upper = FaultyBackend(DictBackend(name="upper"))
    breaker = BreakerBackend(upper, failures=2, open_for=1.0, clock=lambda: clock[0], rng=lambda: 1.0)
    below = durable()
    backend = tiered(Tier(breaker, promote="never"), Tier(below))
    put(backend, 1, 2)
    upper.push(*[Fault.raises(OSError(5, "scripted"))] * 2, operation="get")
    for _ in range(4):
        assert get(backend, 1, 2) == [Status.OK] * 2, "the lower tier serves"
    assert upper.count("get") == 4, "with the breaker open it is not asked"
    clock[0] += 2.0
    assert get(backend, 1) == [Status.OK]
    assert upper.count("get") == 5
    assert backend.stats()[0]["hits"] == 1


def test_a_last_tier_that_fails_is_passed_over_but_does_not_acknowledge(tiered: Make) -> None:
    """What only memory has is served, but not acknowledged; it is brought down when the tier is back."""
    below = FaultyBackend(durable())
    backend = tiered(memory(10), Tier(below))
    below.push(Fault.error(), Fault.error(), operation="put")
    assert put(backend, 1)[0].status is Status.ERROR
    assert get(backend, 1) == [Status.OK]
    quiet(backend)
    assert held(backend.tiers[1]) == {1}
    assert put(backend, 1)[0].status is Status.EXISTS


def test_a_put_of_what_only_memory_has_brings_it_down_first(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(10), Tier(below))
    below.push(Fault.error(), *[Fault.hang(Fault.error())] * 2, operation="put")
    put(backend, 1)
    below.wait_hung()  # what brings it down
    statuses: list[Status] = []
    thread = threading.Thread(target=lambda: statuses.append(put(backend, 1)[0].status))
    thread.start()
    below.release()
    below.wait_hung()
    below.release()
    thread.join()
    assert statuses[0] in (Status.ERROR, Status.EXISTS)
    quiet(backend)
    assert held(backend.tiers[1]) == {1}
    assert put(backend, 1)[0].status is Status.EXISTS


def test_a_tier_that_hangs_to_its_deadline_leaves_time_for_the_next(tiered: Make) -> None:
    class Hanging(DictBackend):
        """Answers at the deadline, as a server behind a dead link."""

        asked: list[float]

        def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            self.asked.append(deadline - time.monotonic())
            threading.Event().wait(max(0.0, deadline - time.monotonic()))
            return super().get_into(reads, deadline=deadline)

    upper, below = Hanging(name="upper"), durable()
    upper.asked = []
    backend = tiered(Tier(upper, promote="never"), Tier(below))
    below.records[key(1)] = data(1)
    assert get(backend, 1, seconds=0.4) == [Status.OK]
    assert upper.asked[0] <= 0.2
    limited = tiered(Tier(Hanging(name="other"), promote="never", timeout=0.05), Tier(below))
    limited.tiers[0].backend.asked = []  # type: ignore[attr-defined]
    assert get(limited, 1, seconds=30.0) == [Status.OK]
    assert limited.tiers[0].backend.asked[0] <= 0.05  # type: ignore[attr-defined]


def test_without_any_tier_that_answers_it_is_an_error_not_a_miss(tiered: Make) -> None:
    upper = FaultyBackend(DictBackend(name="upper"))
    backend = tiered(Tier(upper), Tier(durable()))
    upper.push(Fault.error(), operation="stat")
    assert backend.stat([key(1)], deadline=soon())[0].status is Status.ERROR
    assert backend.stat([key(1)], deadline=soon())[0].status is Status.MISS
    upper.push(Fault.error(), operation="delete")
    assert backend.delete([key(1)], deadline=soon())[0].status is Status.ERROR


def test_a_delete_waits_for_a_move_and_nothing_comes_back(tiered: Make) -> None:
    below = FaultyBackend(DictBackend())
    backend = tiered(memory(10, write="back"), Tier(below))
    below.push(Fault.hang(), operation="put")
    put(backend, 1)
    below.wait_hung()
    (late,) = backend.delete([key(1)], deadline=soon(0.05))
    assert isinstance(late.error, TransientError)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(backend.delete([key(1)], deadline=soon())))
    thread.start()
    below.release()
    thread.join()
    assert outcomes[0].ok
    quiet(backend)
    assert backend.stat([key(1)], deadline=soon())[0].status is Status.MISS
    assert held(backend.tiers[0]) == held(backend.tiers[1]) == set()


def test_a_promotion_under_way_does_not_bring_back_what_is_deleted(tiered: Make) -> None:
    upper = FaultyBackend(DictBackend(name="upper"))
    below = durable()
    below.records[key(1)] = data(1)
    backend = tiered(Tier(upper, 10 * SIZE), Tier(below))
    upper.push(Fault.hang(), operation="put")
    assert get(backend, 1) == [Status.OK]
    upper.wait_hung()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(backend.delete([key(1)], deadline=soon())))
    thread.start()
    upper.release()
    thread.join()
    assert outcomes[0].ok
    quiet(backend)
    assert get(backend, 1) == [Status.MISS]


def test_quarantine_spares_a_sound_copy_and_the_same_read_gets_it() -> None:
    """Memory holds damaged bytes; the store puts that copy aside, and serves the one on the disk."""
    upper, below = DictBackend(name="upper"), durable()
    config = Config(remote_url="memory://", buffer_pool_bytes=1 << 20)  # type: ignore[arg-type]
    with Store(config, backends=[TieredBackend([Tier(upper, 1 << 20), Tier(below)])]) as store:
        payload = bytes(range(256)) * 8
        store.put_many({"name": payload})
        name = kvstore.opaque_key("name")
        damaged = bytearray(upper.records[name])
        damaged[-1] ^= 1
        upper.records[name] = bytes(damaged)
        into = bytearray(len(payload))
        assert store.get_many(["name"], into=[into]) == [len(payload)]
        assert into == payload
        assert [found for found, _ in upper.quarantined] == [name]
        assert name in below.records
        assert store.stats()["corrupt_records"] == 1
        assert store.tiers is not None
        quiet(store.tiers)
        assert upper.records[name] == below.records[name], "and it came up again, sound"


def test_a_damaged_copy_is_not_copied(tiered: Make) -> None:
    """Found on the way down: it is put aside in its own tier, and nothing else is touched."""
    upper, below = DictBackend(name="upper"), durable()
    config = Config(remote_url="memory://", buffer_pool_bytes=1 << 20)  # type: ignore[arg-type]
    backend = TieredBackend([Tier(upper, 1 << 20), Tier(below)])
    with Store(config, backends=[backend]) as store:
        store.put_many({"name": bytes(1000)})
        name = kvstore.opaque_key("name")
        upper.delete([name], deadline=soon())
        quiet(backend)
        backend.tiers[0].forget(name)
        broken = bytearray(below.records[name])
        broken[-1] ^= 1
        below.records[name] = bytes(broken)
        backend.announce([[name]])
        quiet(backend)
        assert name not in upper.records
        assert name not in below.records
        assert backend.stats()[1]["quarantined"] == 1


def test_a_failed_call_leaves_no_doubt_for_long(tiered: Make) -> None:
    """A put that was stored although it failed, and a delete that failed, are found out about."""
    inner = DictBackend(name="disk")
    disk = FaultyBackend(inner)
    backend = tiered(Tier(disk, 10 * SIZE))
    put(backend, 1)
    disk.push(Fault.error(), operation="delete")
    assert backend.delete([key(1)], deadline=soon())[0].status is Status.ERROR
    inner.records.pop(key(1))  # it had gone through after all
    quiet(backend)
    assert backend.usage() == {"disk": 0}


def test_a_put_whose_answer_was_lost_is_found_out_about(tiered: Make) -> None:
    class Forgetful(DictBackend):
        def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
            super().put(writes, deadline=deadline)
            lost = TransientError("the answer was lost", backend=self.name, operation="put")
            return [Outcome.failed(lost)] * len(writes)

    backend = tiered(Tier(Forgetful(name="disk"), 10 * SIZE))
    assert put(backend, 1, 2)[0].status is Status.EXISTS
    assert backend.usage() == {"disk": 2 * SIZE}


# The look-ahead.


def test_what_waiting_jobs_need_is_brought_up_in_their_order(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(8), Tier(below))
    for number in range(20):
        below.inner.records[key(number)] = data(number)  # type: ignore[attr-defined]
    put(backend, 100)
    backend.announce([[key(5), key(6)], [key(1), key(2)], [key(9)]])
    quiet(backend)
    assert held(backend.tiers[0]) >= {5, 6, 1, 2, 9}
    order = [int.from_bytes(k, "big") for call in below.calls_of("get") for k in call.keys]
    assert order == [5, 6, 1, 2, 9]


def test_nothing_in_the_window_leaves_the_store(tiered: Make) -> None:
    backend = tiered(memory(4), Tier(DictBackend(), 8 * SIZE, high=1.0, low=1.0))
    put(backend, *range(8))
    backend.announce([[key(0), key(1)], [key(2)]])
    for number in range(8, 30):
        put(backend, number)
    quiet(backend)
    assert all(outcome.ok for outcome in backend.stat([key(0), key(1), key(2)], deadline=soon()))
    backend.announce([])
    for number in range(30, 60):
        put(quiet(backend), number)
    assert not all(outcome.ok for outcome in backend.stat([key(0), key(1), key(2)], deadline=soon()))


def test_a_window_larger_than_the_tiers_is_cut(tiered: Make) -> None:
    backend = tiered(memory(2), Tier(DictBackend(), 6 * SIZE))
    put(backend, *range(4))
    backend.announce([[key(n) for n in range(100)]])
    assert list(backend._hierarchy.window.rank) == [key(n) for n in range(8)]
    assert backend._hierarchy.window.wanted == [2, 8]
    assert put(backend, 50)[0].stored, "others still find room"


# Age.


class Ageing(LRUPolicy):
    """Expires records by their own time to live, on a clock that the test moves."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now = now
        self.ends: dict[Key, float] = {}

    def admit(self, key: Key, nbytes: int, *, parent: Any = None, info: RecordInfo | None = None) -> None:
        super().admit(key, nbytes, parent=parent, info=info)
        if info is not None and info.ttl is not None:
            self.ends[key] = self.now[0] + info.ttl

    def expired(self) -> Iterator[Key]:
        return iter([key for key, end in self.ends.items() if key in self and end <= self.now[0]])


def test_expired_records_go_in_the_background(tiered: Make) -> None:
    """In memory first; on the disk, where the time is twice as long, later. What is waited for stays."""
    now = [0.0]
    backend = tiered(
        memory(10, policy=Ageing(now), promote="never"), Tier(DictBackend(name="disk"), 100 * SIZE, policy=Ageing(now))
    )
    put(backend, 1, 2, info=RecordInfo(ttl=10.0))
    put(backend, 3)
    backend.announce([[key(2)]])
    now[0] = 11.0
    backend._background.relief[0].wake()
    while 1 in held(backend.tiers[0]):
        time.sleep(0.002)
    assert held(backend.tiers[0]) == {2, 3}
    assert get(backend, 1, 2, 3) == [Status.OK] * 3
    backend.announce([])
    now[0] = 21.0
    backend._background.relief[1].wake()
    while 1 in held(backend.tiers[1]):
        time.sleep(0.002)
    assert get(backend, 1) == [Status.MISS]
    assert backend.stats()[0]["expired"] + backend.stats()[1]["expired"] >= 2
    assert backend.usage()["disk"] == len(held(backend.tiers[1])) * SIZE
