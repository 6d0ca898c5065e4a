"""What a hierarchy does with records: where they are read, where they go, when they leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import kvstore
from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.config import Config
from kvstore.errors import ClosedError, ConfigError, PoolExhausted, TransientError
from kvstore.eviction import LRUPolicy, RecordInfo
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.record import opaque_spec
from kvstore.store import Item, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.tiers import Tier, TieredBackend
from kvstore_backends.file import FileBackend
from kvstore_backends.memory import MemoryBackend
from tests.tiers_support import SIZE, Make, data, durable, get, held, hierarchies, key, memory, put, quiet, soon


@pytest.fixture
def tiered() -> Iterator[Make]:
    with hierarchies() as make:
        yield make


# Reads.


def test_the_fastest_tier_that_has_it_serves(tiered: Make) -> None:
    below = durable()
    backend = tiered(memory(10, promote="never"), Tier(below))
    put(backend, 1, 2)
    assert below.records.keys() == {key(1), key(2)}, "one buffer, both destinations"
    below.records[key(3)] = data(3)
    assert get(backend, 1, 3, 2, 4) == [Status.OK, Status.OK, Status.OK, Status.MISS]
    first, second = backend.stats()
    assert (first["hits"], first["misses"]) == (2, 2)
    assert (second["hits"], second["misses"]) == (1, 1)
    assert first["hit_bytes"] == 2 * SIZE


def test_the_hit_prefix_spans_tiers_and_ends_at_a_hole(tiered: Make) -> None:
    below = durable()
    config = Config(remote_url="memory://", buffer_pool_bytes=1 << 20)  # type: ignore[arg-type]
    with Store(config, backends=[TieredBackend([memory(50, promote="never"), Tier(below)])]) as store:
        assert all(outcome.ok for outcome in store.put_many({f"{n}": bytes(100) for n in range(6)}))
        assert store.tiers is not None
        keys = [kvstore.opaque_key(f"{n}") for n in range(6)]
        memory_tier = store.tiers.tiers[0].backend
        memory_tier.delete([keys[1], keys[4]], deadline=soon())
        below.records.pop(keys[4])
        assert store.hit_prefix([f"{n}" for n in range(6)]) == 4


def test_what_is_read_below_comes_up(tiered: Make) -> None:
    below = durable()
    below.records.update({key(n): data(n) for n in range(4)})
    backend = tiered(memory(10), Tier(below))
    assert get(backend, 0, 1) == [Status.OK] * 2
    quiet(backend)
    assert held(backend.tiers[0]) == {0, 1}
    assert get(backend, 0, 1) == [Status.OK] * 2
    assert backend.stats()[0]["hits"] == 2
    assert backend.stats()[0]["promotions"] == 2
    assert backend.usage() == {"memory": 2 * SIZE}


def test_second_use_and_never(tiered: Make) -> None:
    below = durable()
    below.records.update({key(n): data(n) for n in range(4)})
    backend = tiered(memory(10, promote="second_use"), Tier(below))
    get(backend, 0, 1)
    assert held(quiet(backend).tiers[0]) == set()
    get(backend, 1, 2)
    assert held(quiet(backend).tiers[0]) == {1}
    other = tiered(memory(10, promote="never"), Tier(durable()))
    other.tiers[1].backend.put([Write(key(0), [memoryview(data(0))])], deadline=soon())
    for _ in range(3):
        assert get(other, 0) == [Status.OK]
    assert held(quiet(other).tiers[0]) == set()


def test_stat_and_list_touch_nothing(tiered: Make) -> None:
    """A record that is only looked up is no more recent for it."""
    backend = tiered(Tier(DictBackend(), 4 * SIZE, high=1.0, low=1.0))
    for number in range(4):
        put(backend, number)
    for _ in range(5):
        backend.stat([key(0)], deadline=soon())
        list(backend.list(deadline=soon()))
    put(backend, 4)
    assert held(backend.tiers[0]) == {1, 2, 3, 4}


def test_several_reads_of_a_record_are_served_by_one_tier(tiered: Make) -> None:
    """A tier that fails in the middle of a record does not mix its bytes with those of another."""
    upper = FaultyBackend(DictBackend(name="upper"))
    below = DictBackend(name="below")
    upper.inner.records[key(1)] = b"A" * 100  # type: ignore[attr-defined]
    below.records[key(1)] = b"B" * 100
    backend = tiered(Tier(upper, promote="never"), Tier(below))
    upper.push(Fault.error().on(1), operation="get")
    into = bytearray(100)
    reads = [Read(key(1), memoryview(into)[:50], 0), Read(key(1), memoryview(into)[50:], 50)]
    assert [outcome.ok for outcome in backend.get_into(reads, deadline=soon())] == [True, True]
    assert into == b"B" * 100


def test_what_has_landed_is_not_written_again(tiered: Make) -> None:
    upper = MemoryBackend(1 << 20, policy="none")
    backend = tiered(Tier(upper, promote="never"), Tier(MemoryBackend(1 << 20, policy="none", name="low")))
    put(backend, 1)
    original = upper.get_into

    def half(reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        found = original(reads[:1], deadline=deadline)
        failed = TransientError("scripted", backend="upper", operation="get")
        return [*found, *[Outcome.failed(failed)] * (len(reads) - 1)]

    upper.get_into = half  # type: ignore[method-assign]
    landed: list[int] = []
    into = bytearray(SIZE)
    reads = [
        Read(key(1), memoryview(into)[:500], 0, lambda: landed.append(0)),
        Read(key(1), memoryview(into)[500:], 500, lambda: landed.append(1)),
    ]
    assert Capability.LANDING in backend.capabilities
    outcomes = backend.get_into(reads, deadline=soon())
    assert [outcome.ok for outcome in outcomes] == [True, False]
    assert landed == [0]


def test_leases_come_from_memory_and_keep_their_record_there(tiered: Make) -> None:
    backend = tiered(memory(2, high=1.0, low=1.0), Tier(durable()))
    put(backend, 0, 1)
    (lease,) = backend.lease([key(0)], deadline=soon())
    assert lease is not None
    with lease:
        assert lease.view == data(0)
        put(backend, 2)
        assert 0 in held(quiet(backend).tiers[0]), "removing it would free nothing"
        backend.delete([key(0)], deadline=soon())
        put(backend, 3, 4)
        quiet(backend)
        assert backend.tiers[0].occupied <= 2 * SIZE
        assert len(held(backend.tiers[0])) <= 1, "its memory still counts"
        assert lease.view == data(0)


# Writes.


def test_through_is_acknowledged_by_the_last_tier(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(10), Tier(below))
    below.push(Fault.hang(), operation="put")
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(put(backend, 1)))
    thread.start()
    below.wait_hung()
    assert not outcomes
    below.release()
    thread.join()
    assert [outcome.status for outcome in outcomes] == [Status.OK]


def test_back_is_acknowledged_at_once_and_brought_down(tiered: Make) -> None:
    below = FaultyBackend(durable())
    backend = tiered(memory(10, write="back"), Tier(below))
    below.push(Fault.hang(), operation="put")
    assert [outcome.status for outcome in put(backend, 1)] == [Status.OK]
    below.wait_hung()
    assert get(backend, 1) == [Status.OK]
    assert backend.stats()[0]["queued_records"] == 1
    assert backend.drain(time.monotonic() + 0.01) == {"memory": 1}, "what is not down is said"
    below.release()
    assert backend.drain(soon()) == {}
    assert below.inner.records == {key(1): data(1)}  # type: ignore[attr-defined]


def test_the_queue_is_bounded(tiered: Make) -> None:
    """What does not fit into it goes through."""
    below = FaultyBackend(durable())
    backend = tiered(memory(100, write="back", queue_bytes=3 * SIZE), Tier(below))
    below.push(Fault.hang(), operation="put")
    put(backend, 0)
    below.wait_hung()
    assert all(outcome.ok for outcome in put(backend, 1, 2, 3, 4, 5))
    assert {3, 4, 5} <= held(backend.tiers[1]), "these were written before they were acknowledged"
    assert backend.stats()[0]["queued_bytes"] == 3 * SIZE
    below.release()
    assert backend.drain(soon()) == {}
    assert held(backend.tiers[1]) == {0, 1, 2, 3, 4, 5}


def test_a_full_tier_is_passed_by_without_waiting(tiered: Make) -> None:
    """The lower tier hangs for whoever wants to move something down; puts go on all the same."""
    below = FaultyBackend(DictBackend())
    backend = tiered(memory(3, high=1.0, low=1.0, write="back"), Tier(below))
    below.push(Fault.hang(), operation="put")
    put(backend, 0, 1, 2)
    below.wait_hung()
    assert put(backend, 3)[0].ok
    assert below.hung == 1
    assert held(backend.tiers[1]) == {3}
    below.release()
    quiet(backend)
    assert get(backend, 0, 1, 2, 3) == [Status.OK] * 4


def test_records_move_down_from_the_watermark_before_room_is_needed(tiered: Make) -> None:
    backend = tiered(memory(10, high=0.8, low=0.5), Tier(DictBackend(name="disk"), 100 * SIZE))
    for number in range(8):
        put(backend, number)
    assert len(held(quiet(backend).tiers[0])) == 8
    put(backend, 8)
    quiet(backend)
    assert len(held(backend.tiers[0])) == 5
    assert held(backend.tiers[0]) == {4, 5, 6, 7, 8}, "the least recently used have gone"
    assert backend.stats()[0]["released"] == 4, "they were below already"
    assert backend.usage() == {"memory": 5 * SIZE, "disk": 9 * SIZE}


def test_a_record_leaves_only_once_a_slower_tier_has_acknowledged_it(tiered: Make) -> None:
    below = FaultyBackend(DictBackend(), otherwise=Fault.ok())
    backend = tiered(memory(10, high=0.5, low=0.3, write="back"), Tier(below))
    below.push(*[Fault.error()] * 1000, operation="put")
    for number in range(10):
        assert put(backend, number)[0].ok
    time.sleep(0.05)
    assert held(backend.tiers[0]) == set(range(10))
    for steps in below._by_operation.values():
        steps.clear()
    quiet(backend)
    assert len(held(backend.tiers[0])) == 3
    assert held(backend.tiers[1]) == set(range(10))


def test_a_demoted_record_takes_its_hints_along(tiered: Make) -> None:
    """The policy of the next tier learns parent and info; the own time to live is extended there."""

    class Recording(LRUPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[Key, tuple[Any, Any]] = {}

        def admit(self, key: Key, nbytes: int, *, parent: Any = None, info: Any = None) -> None:
            self.seen[key] = (parent, info)
            super().admit(key, nbytes, parent=parent, info=info)

    upper, lower = Recording(), Recording()
    backend = tiered(
        memory(4, policy=upper, high=0.9, low=0.5, write="back"), Tier(DictBackend(), 100 * SIZE, policy=lower)
    )
    info = RecordInfo(start=256, tokens=256, session="s", turns=2, ttl=10.0)
    put(backend, 1, 2, 3, 4, parent=True, info=info)
    quiet(backend)
    assert upper.seen[key(2)] == (key(1), info)
    assert lower.seen[key(2)] == (key(1), info._replace(ttl=20.0))


# Capacity and restarts.


def test_usage_is_exact_after_a_restart(tmp_path: Any, tiered: Make) -> None:
    """A file tier is listed behind the scenes; meanwhile it serves."""

    def disk() -> Tier:
        return Tier(FileBackend(tmp_path / "kv", nbytes=20 * SIZE, policy="none", name="disk"), 20 * SIZE)

    first = tiered(memory(3), disk())
    put(first, *range(12))
    first.close()
    hold = threading.Event()
    tier = disk()
    listing = tier.backend.list

    def slow(*, deadline: float) -> Any:
        hold.wait(30)
        return listing(deadline=deadline)

    tier.backend.list = slow  # type: ignore[method-assign]
    second = TieredBackend([memory(3), tier])
    try:
        assert get(second, *range(12)) == [Status.OK] * 12
        assert put(second, 12)[0].ok
        assert second.delete([key(0)], deadline=soon())[0].ok
        assert SIZE <= second.usage()["disk"] < 12 * SIZE, "so far what was written, or met on the way down"
        hold.set()
        quiet(second)
        assert second.usage()["disk"] == 12 * SIZE
        assert held(tier) == set(range(1, 13))
    finally:
        hold.set()
        second.close()


def test_the_last_tier_makes_room_itself_and_drops_what_nobody_needs(tiered: Make) -> None:
    backend = tiered(Tier(DictBackend(), 5 * SIZE, high=1.0, low=1.0))
    for number in range(9):
        assert put(backend, number)[0].ok
    assert held(backend.tiers[0]) == {4, 5, 6, 7, 8}
    assert backend.stats()[0]["drops"] == 4
    assert backend.stats()[0]["dropped_bytes"] == 4 * SIZE


def test_pinned_records_stay(tiered: Make) -> None:
    backend = tiered(Tier(DictBackend(), 4 * SIZE, high=1.0, low=1.0))
    backend.pin([key(0), key(1)])
    put(backend, 0, 1, 2, 3)
    put(backend, 4, 5)
    put(backend, 6)
    assert {0, 1} <= held(backend.tiers[0])
    backend.pin([key(4), key(5), key(6)])
    (full,) = put(backend, 7)
    if held(backend.tiers[0]) <= {0, 1, 4, 5, 6}:
        assert isinstance(full.error, PoolExhausted)
    backend.unpin([key(0), key(1), key(4), key(5), key(6), key(99)])
    assert put(backend, 8)[0].ok


# The rest.


def test_stats_and_metrics(tiered: Make) -> None:
    backend = tiered(memory(10), Tier(durable()))
    put(backend, 1, 2)
    get(backend, 1, 3)
    metrics = Metrics()
    backend.publish(metrics)
    backend.publish(metrics)
    assert metrics.value("kvstore_tier_used_bytes", "memory") == 2 * SIZE
    assert metrics.value("kvstore_tier_capacity_bytes", "memory") == 10 * SIZE
    assert metrics.value("kvstore_tier_events_total", "memory", "hits") == 1
    assert metrics.value("kvstore_tier_events_total", "below", "misses") == 1


def test_items_of_a_store_carry_hints_to_the_policy() -> None:
    seen: list[RecordInfo | None] = []

    class Recording(LRUPolicy):
        def admit(self, key: Key, nbytes: int, *, parent: Any = None, info: RecordInfo | None = None) -> None:
            seen.append(info)
            super().admit(key, nbytes, parent=parent, info=info)

    backend = TieredBackend([Tier(DictBackend(), 1 << 20, policy=Recording())])
    config = Config(remote_url="memory://", buffer_pool_bytes=1 << 20)  # type: ignore[arg-type]
    with Store(config, backends=[backend]) as store:
        spec = opaque_spec(10)
        info = RecordInfo(tokens=256, session="a", turns=3)
        done = store.submit_put([Item(key(1), [memoryview(bytes(10))], spec, info=info)])
        assert done.result()[0].ok
        assert seen == [info]
        into = bytearray(10)
        assert store.submit_get([Want(key(1), memoryview(into), spec)]).result()[0].ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity of 0"),
        ({"low": 0.9, "high": 0.5}, "watermarks"),
        ({"promote": "sometimes"}, "promote"),
        ({"write": "sideways"}, "write"),
        ({"timeout": -1.0}, "must be positive"),
        ({"capacity": 5, "policy": "nonsense"}, "unknown eviction policy"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tier(DictBackend(), **options)


def test_two_tiers_in_one_place_are_a_mistake(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="at least one tier"):
        TieredBackend([])
    with pytest.raises(ConfigError, match="two tiers have the name dict"):
        TieredBackend([Tier(DictBackend()), Tier(DictBackend())])
    one, two = FileBackend(tmp_path / "kv", name="one"), FileBackend(tmp_path / "kv", name="two")
    with pytest.raises(ConfigError, match="one and the same place"):
        TieredBackend([Tier(one), Tier(two)])
    one.close()
    two.close()


def test_close_ends_what_is_under_way() -> None:
    below = FaultyBackend(DictBackend())
    backend = TieredBackend([memory(10, write="back"), Tier(below)])
    below.push(Fault.hang(), operation="put")
    put(backend, 1)
    below.wait_hung()
    threading.Timer(0.05, below.release).start()
    backend.close()
    backend.close()
    with pytest.raises(ClosedError):
        backend.announce([])
    with pytest.raises(ClosedError):
        backend.drain(soon())
