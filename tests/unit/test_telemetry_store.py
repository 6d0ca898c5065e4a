"""What a store counts: records and tokens by the place that had them, misses, deadlines, codecs, pool, queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.completion import CancelledError
from kvstore.config import load_config
from kvstore.errors import TransientError
from kvstore.keys import Key, opaque_key
from kvstore.layout import KVLayout
from kvstore.metrics import METRICS, Metrics
from kvstore.record import kv_spec, opaque_spec
from kvstore.store import Item, Progress, Store, Want, open_store
from kvstore.targets import HeadMemo
from kvstore.telemetry.watch import medium_of
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.tiers import Tier, TieredBackend
from tests.unit.level_codec import level_codec

LAYOUT = KVLayout(4, 2, 16)
TOKENS = 32
SPEC = kv_spec(LAYOUT, "float16", TOKENS)


def keys(count: int, name: str = "k") -> list[Key]:
    return [opaque_key(f"{name}{number}") for number in range(count)]


def items(names: Sequence[Key]) -> list[Item]:
    rng = np.random.default_rng(1)
    data = memoryview(rng.standard_normal(SPEC.raw_bytes // 2).astype(np.float16)).cast("B")
    return [Item(key, SPEC.split(data), SPEC) for key in names]


def put(store: Store, names: Sequence[Key]) -> None:
    assert all(outcome.ok for outcome in store.submit_put(items(names)).result())


def wants(names: Sequence[Key], **more: Any) -> list[Want]:
    return [Want(key, memoryview(bytearray(SPEC.raw_bytes)), SPEC, **more) for key in names]


def value(store: Store, name: str, *labels: str) -> float:
    store.metrics.snapshot()
    return store.metrics.value(name, *labels)


def series(store: Store, name: str) -> dict[tuple[str, ...], float]:
    family = store.metrics.snapshot().get(name, {"series": []})
    return {tuple(each["labels"].values()): each["value"] for each in family["series"]}


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://?bytes=16MiB", buffer_pool_bytes="4MiB", prefill_per_token="100us") as opened:
        yield opened


# Hits and misses.


def test_from_the_beginning_nothing_is_zero(store: Store) -> None:
    assert series(store, "kvstore_hit_records_total") == {("memory", "memory"): 0}
    assert series(store, "kvstore_hit_tokens_total") == {("memory", "memory"): 0}


def test_hits_tokens_and_seconds_saved(store: Store) -> None:
    names = keys(5)
    put(store, names[:3])
    assert store.submit_lookup(names).result() == 3
    got = store.submit_get(wants(names)).result()
    assert [outcome.ok for outcome in got] == [True] * 3 + [False] * 2
    assert value(store, "kvstore_hit_records_total", "memory", "memory") == 3
    assert value(store, "kvstore_hit_tokens_total", "memory", "memory") == 3 * TOKENS
    assert value(store, "kvstore_prefill_saved_seconds_total") == pytest.approx(3 * TOKENS * 100e-6)
    assert series(store, "kvstore_missed_records_total") == {("miss",): 2}
    assert series(store, "kvstore_lookup_records_total") == {("hit",): 3, ("miss",): 2}
    assert value(store, "kvstore_batch_seconds", "lookup") == 1
    assert value(store, "kvstore_batch_seconds", "get") == 1


def test_what_lies_behind_a_hole_is_a_miss(store: Store) -> None:
    names = keys(6)
    put(store, [names[0], names[2], names[3]])
    assert store.submit_lookup(names).result() == 1
    assert series(store, "kvstore_lookup_records_total") == {("hit",): 1, ("miss",): 5}


def test_opaque_records_have_no_tokens(store: Store) -> None:
    store.put_many({"a": bytes(100)})
    store.get_many(["a"])
    assert value(store, "kvstore_hit_records_total", "memory", "memory") == 1
    assert value(store, "kvstore_hit_tokens_total", "memory", "memory") == 0


def test_a_record_that_is_read_layer_by_layer_counts_once(store: Store) -> None:
    names = keys(2)
    put(store, names)
    for key in names:
        memo = HeadMemo()
        for layer in range(LAYOUT.num_layers):
            view = memoryview(bytearray(SPEC.sizes[layer]))
            (outcome,) = store.submit_get([Want(key, view, SPEC, layer, 1, memo=memo)]).result()
            assert outcome.ok
    assert value(store, "kvstore_hit_records_total", "memory", "memory") == 2
    assert value(store, "kvstore_hit_tokens_total", "memory", "memory") == 2 * TOKENS


def test_a_record_that_is_refined_counts_once() -> None:
    config = {"remote_serde": "kvt", "codec_profile": "unused", "buffer_pool_bytes": "4MiB"}
    with level_codec(), Store(load_config("memory://", **config), backends=[DictBackend(name="b")]) as store:
        names = keys(2)
        put(store, names)
        for key in names:
            progress, view = Progress(), memoryview(bytearray(SPEC.raw_bytes))
            reads = 0
            while not progress.complete:
                done = store.submit_get([Want(key, view, SPEC, level=reads, progress=progress)])
                assert done.result()[0].ok
                assert done.settled(20)
                reads += 1
            assert reads > 1
        assert value(store, "kvstore_hit_records_total", "b", "memory") == 2
        assert value(store, "kvstore_hit_tokens_total", "b", "memory") == 2 * TOKENS


def test_riders_are_hits_too() -> None:
    """Single flight: two batches want one record, one of them reads it."""
    slow = FaultyBackend(DictBackend(name="slow"))
    with Store(load_config("memory://", buffer_pool_bytes="4MiB"), backends=[slow]) as store:
        names = keys(2)
        put(store, names)
        slow.push(Fault.hang(), operation="get")
        first = store.submit_get(wants(names), deadline=time.monotonic() + 20)
        second = store.submit_get(wants(names), deadline=time.monotonic() + 20)
        slow.wait_hung()
        slow.release()
        assert all(outcome.ok for done in (first, second) for outcome in done.result())
        assert store.stats()["get_joined"] == 2
        assert sum(series(store, "kvstore_hit_records_total").values()) == 4
        assert sum(series(store, "kvstore_hit_tokens_total").values()) == 4 * TOKENS
        assert value(store, "kvstore_reads_total", "joined") == 2


def test_trouble_is_no_miss_and_too_late_is_no_hit() -> None:
    backend = FaultyBackend(DictBackend(name="b"))
    with Store(load_config("memory://", buffer_pool_bytes="4MiB"), backends=[backend]) as store:
        names = keys(3)
        put(store, names)
        backend.push(Fault.error(TransientError("down")), operation="get")
        store.submit_get(wants(names[:1])).result()
        assert series(store, "kvstore_missed_records_total") == {("error",): 1}
        backend.push(Fault.hang(), operation="get")
        late = store.submit_get(wants(names[1:]), deadline=time.monotonic() + 0.05)
        assert not any(outcome.ok for outcome in late.result())
        backend.wait_hung()
        backend.release()
        assert late.settled(20)
        assert series(store, "kvstore_deadline_misses_total") == {("get",): 1}
        end = time.monotonic() + 20
        while store.stats()["backends"]["b"]["busy"] and time.monotonic() < end:
            time.sleep(0.001)
        assert sum(series(store, "kvstore_hit_records_total").values()) == 0
        assert series(store, "kvstore_missed_records_total") == {("error",): 3}


def test_hits_by_tier() -> None:
    fast = DictBackend(name="fast")
    below = DictBackend(name="below")
    tiers = TieredBackend([Tier(fast, 1 << 20, promote="never", name="fast"), Tier(below, name="below")])
    with Store(load_config("memory://", buffer_pool_bytes="4MiB"), backends=[tiers]) as store:
        names = keys(5)
        put(store, names)
        fast.delete(names[2:], deadline=time.monotonic() + 5)
        below.delete(names[4:], deadline=time.monotonic() + 5)
        got = store.submit_get(wants(names)).result()
        assert [outcome.ok for outcome in got] == [True] * 4 + [False]
        found = {labels[0]: count for labels, count in series(store, "kvstore_hit_records_total").items()}
        assert found == {"fast": 2, "below": 2}
        tokens = {labels[0]: count for labels, count in series(store, "kvstore_hit_tokens_total").items()}
        assert tokens == {"fast": 2 * TOKENS, "below": 2 * TOKENS}
        assert series(store, "kvstore_missed_records_total") == {("miss",): 1}
        assert ("fast", "hits") in series(store, "kvstore_tier_events_total"), "tiers publish when somebody looks"


def test_leases_are_hits(store: Store) -> None:
    names = keys(3)
    put(store, names[:2])
    for buffer in store.submit_lease(names).result():
        if buffer is not None:
            buffer.release()
    assert value(store, "kvstore_hit_records_total", "memory", "memory") == 2
    assert series(store, "kvstore_missed_records_total") == {}, "a lease is a short cut; who has none reads"


@pytest.mark.parametrize(
    ("scheme", "medium"), [("memory", "memory"), ("file", "disk"), ("s3", "remote"), ("node", "remote"), ("", "memory")]
)
def test_media(scheme: str, medium: str) -> None:
    assert medium_of(scheme, DictBackend(name="b")) == medium


def test_places_of_urls(tmp_path: Path) -> None:
    tiers = ["memory://?bytes=1MiB", f"file://{tmp_path}/kv"]
    with open_store(tiers=tiers, buffer_pool_bytes="4MiB") as store:
        put(store, keys(1))
        assert store.submit_get(wants(keys(1))).result()[0].ok
        assert series(store, "kvstore_hit_records_total") == {
            ("memory://", "memory"): 1, (f"file://{tmp_path}/kv", "disk"): 0,
        }  # fmt: skip


# What is stored, memory, lanes.


def test_bytes_saved_by_the_codec() -> None:
    with open_store("memory://?bytes=16MiB", buffer_pool_bytes="4MiB", remote_serde="int8") as store:
        names = keys(4)
        put(store, names)
        put_again = store.submit_put(items(names[:2])).result()
        assert all(outcome.stored for outcome in put_again)
        raw, stored = (value(store, f"kvstore_codec_{what}_bytes_total", "int8") for what in ("raw", "stored"))
        assert raw == 4 * SPEC.raw_bytes
        assert raw > stored > 0
        assert value(store, "kvstore_codec_saved_bytes_total", "int8") == raw - stored
        assert series(store, "kvstore_put_records_total") == {("stored",): 4, ("exists",): 2}


def test_raw_records_have_no_codec(store: Store) -> None:
    put(store, keys(1))
    assert series(store, "kvstore_codec_raw_bytes_total") == {}


def test_the_pool_and_the_queues() -> None:
    backend = FaultyBackend(DictBackend(name="b"))
    config = load_config("memory://", buffer_pool_bytes="4MiB", write_queue_bytes="1MiB")
    with Store(config, backends=[backend]) as store, store.pool.acquire(1 << 20) as buffer:
        backend.push(Fault.hang(), operation="put")
        done = store.submit_put(items(keys(1)))
        end = time.monotonic() + 20
        while not value(store, "kvstore_lanes_busy", "b") and time.monotonic() < end:
            time.sleep(0.001)
        big = opaque_spec(2 << 20)
        assert value(store, "kvstore_lanes_busy", "b") == 1
        assert value(store, "kvstore_write_queue_bytes") == SPEC.nbytes
        assert value(store, "kvstore_pool_capacity_bytes") == 4 << 20
        assert value(store, "kvstore_pool_used_bytes") >= buffer.nbytes
        assert value(store, "kvstore_lanes", "b") == store.stats()["backends"]["b"]["lanes"]
        dropped = store.submit_put([Item(opaque_key("big"), big.split(memoryview(bytes(2 << 20))), big)]).result()
        assert not dropped[0].stored
        backend.wait_hung()
        backend.release()
        assert done.result()[0].ok
        assert value(store, "kvstore_write_queue_bytes") == 0
        assert series(store, "kvstore_put_records_total") == {("stored",): 1, ("dropped",): 1}


def test_backends_are_told_apart() -> None:
    config = load_config("memory://", buffer_pool_bytes="4MiB")
    with Store(config, backends=[DictBackend(name="one"), DictBackend(name="two")]) as store:
        put(store, keys(8))
        store.submit_get(wants(keys(8))).result()
        by_place = series(store, "kvstore_hit_records_total")
        assert {labels[0] for labels in by_place} == {"one", "two"}
        assert sum(by_place.values()) == 8
        assert set(series(store, "kvstore_lanes")) == {("one",), ("two",)}


# Several who look, and the end.


def test_scrapes_at_once_count_nothing_twice(store: Store) -> None:
    put(store, keys(4))
    barrier = threading.Barrier(4)

    def scrape() -> None:
        barrier.wait()
        for _ in range(20):
            store.metrics.snapshot()

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        store.submit_get(wants(keys(4))).result()
    for thread in threads:
        thread.join(30)
    assert value(store, "kvstore_hit_records_total", "memory", "memory") == 40


@pytest.mark.parametrize("tiered", [False, True])
def test_numbers_stay_when_the_store_is_closed(tiered: bool, tmp_path: Path) -> None:
    places: dict[str, Any] = {"remote_url": f"file://{tmp_path}/kv"}
    if tiered:
        places["tiers"] = ["memory://?bytes=4MiB"]
    store = open_store(**places, buffer_pool_bytes="4MiB")
    put(store, keys(2))
    store.close()
    assert series(store, "kvstore_put_records_total") == {("stored",): 2}


def test_cancelled_batches_are_not_timed(store: Store) -> None:
    backend = FaultyBackend(DictBackend(name="b"))
    with Store(load_config("memory://", buffer_pool_bytes="4MiB"), backends=[backend]) as slow:
        put(slow, keys(1))
        backend.push(Fault.hang(), operation="get")
        done = slow.submit_get(wants(keys(1)))
        backend.wait_hung()
        assert done.cancel()
        backend.release()
        with pytest.raises(CancelledError):
            done.result()
        assert done.settled(20)
        assert value(slow, "kvstore_batch_seconds", "get") == 0


def test_everything_that_is_counted_is_defined() -> None:
    defined = {metric.name for metric in METRICS}
    with open_store("memory://?bytes=16MiB", buffer_pool_bytes="4MiB") as store:
        put(store, keys(1))
        store.submit_get(wants(keys(1))).result()
        assert set(store.metrics.snapshot()) <= defined | {metric.name for metric in _others()}


def _others() -> Sequence[Any]:
    from kvstore.tiers.backend import TIER_METRICS

    return TIER_METRICS


def test_metrics_of_one_store_are_its_own() -> None:
    assert isinstance(kvstore.metrics.Metrics(), Metrics)
    with open_store("memory://?bytes=1MiB") as one, open_store("memory://?bytes=1MiB") as other:
        one.put_many({"a": b"x"})
        assert series(one, "kvstore_put_records_total") == {("stored",): 1}
        assert series(other, "kvstore_put_records_total") == {}
