"""Layers come in order, whole and verified, within the budget; and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import staged
from kvstore.buffers import Buffer
from kvstore.completion import CancelledError
from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.keys import Key
from kvstore.prefetch import Chunk, LayerPlan, LayerStream, Prefetcher, arbiter
from kvstore.record import kv_spec
from kvstore.store import Item
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import until
from tests.faults.support import chain, soon, store_over
from tests.unit.prefetch_support import (
    CHUNKS,
    LAYER,
    LAYERS,
    LAYOUT,
    SEGMENT,
    SPEC,
    expected,
    fill,
    filled,
    gone,
    plan,
    read_all,
    records,
    single,
)


@pytest.mark.parametrize("serde", ["raw", "shuffle-zstd"])
@pytest.mark.parametrize("place", ["memory", "file", "dict"])
def test_all_layers_come_as_they_were_stored(place: str, serde: str, tmp_path: Path) -> None:
    keys = chain(CHUNKS, codec=serde)
    options: dict[str, Any] = {"remote_serde": serde, "buffer_pool_bytes": 4 << 20}
    if place == "dict":
        store = store_over(DictBackend(), **options)
    else:
        url = "memory://?bytes=64MiB" if place == "memory" else f"file://{tmp_path}"
        store = kvstore.open_store(url, **options)
    with store:
        assert all(o.stored for o in store.submit_put(records(keys), deadline=soon()).result())
        prefetcher = Prefetcher(store)
        for _ in range(2):
            with prefetcher.start(plan(keys)) as stream:
                assert read_all(stream, keys) == CHUNKS
                assert stream.settled(10)
        assert gone(prefetcher)


def test_ranges_are_joined_over_neighbouring_layers_and_asked_for_in_layer_order() -> None:
    backend, keys = filled(2, lanes=1)
    with store_over(backend) as store, Prefetcher(store, first_group_bytes=4 * SEGMENT).start(plan(keys)) as stream:
        assert read_all(stream, keys) == 2
    bodies = [
        (key, offset, length)
        for call in backend.calls_of("get")
        for key, (offset, length) in zip(call.keys, call.ranges, strict=True)
        if offset
    ]
    for key in keys:
        spans = [(offset, length) for each, offset, length in bodies if each == key]
        assert spans[0] == (SPEC.offsets[0], 2 * SEGMENT)  # the first group: two layers of both chunks
        assert max(length for _, length in spans) > SEGMENT
        at = SPEC.offsets[0]
        for offset, length in spans:  # in order, without holes
            assert offset == at
            at += length
        assert at == SPEC.nbytes
    assert [key for key, _, _ in bodies[:2]] == keys  # over all chunks before the next layers


def test_wait_ready_and_the_order_of_layers() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.hang()]}, lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream:
            backend.wait_hung()
            assert not stream.ready(0)
            with pytest.raises(TimeoutError):
                stream.wait(0, timeout=0)
            with pytest.raises(TimeoutError):
                stream.wait(0, deadline=0.0)
            assert stream.hit_prefix == CHUNKS
            backend.release()
            loaded = stream.wait(0)
            assert stream.ready(0)
            assert [bytes(view) for view in loaded.views()] == [expected(key, 0) for key in keys]
            assert stream.wait(0).views()[0] == expected(keys[0], 0)  # once more, as long as it is there
            stream.wait(5)  # some may be left out
            with pytest.raises(ClosedError):
                loaded.views()
            with pytest.raises(ConfigError, match="layer 4 was given back"):
                stream.wait(4)
            for layer in (-1, LAYERS):
                with pytest.raises(ConfigError, match="there is no layer"):
                    stream.wait(layer)
            read = [stream.wait(layer).views()[0] == expected(keys[0], layer) for layer in range(5, LAYERS)]
            assert all(read)
            stream.wait(LAYERS - 1)
        with pytest.raises(CancelledError):
            stream.wait(LAYERS - 1)
        assert gone(prefetcher)


def test_several_prefixes_of_several_shapes_in_one_stream() -> None:
    short = kv_spec(LAYOUT, "bfloat16", 5)
    one, other = chain(3), chain(2, start=10_000)
    with store_over(DictBackend()) as store:
        store.submit_put([*records(one), records(other[:1])[0], records(other[1:], short)[0]]).result()
        prefixes = [[Chunk(key, SPEC) for key in one], [Chunk(other[0], SPEC), Chunk(other[1], short)]]
        prefetcher = Prefetcher(store)
        with prefetcher.start(LayerPlan(prefixes, soon())) as stream:
            for layer in range(LAYERS):
                with stream.wait(layer) as loaded:
                    assert [bytes(v) for v in loaded.views(0)] == [expected(key, layer) for key in one]
                    assert [len(v) for v in loaded.views(1)] == [SEGMENT, short.sizes[layer]]
            assert stream.hit_prefixes == (3, 2)
            with pytest.raises(ConfigError, match="2 prefixes"):
                _ = stream.hit_prefix
        assert gone(prefetcher)


@pytest.mark.parametrize("layer", [0, 4, LAYERS - 1])
@pytest.mark.parametrize("missing", [0, 3, CHUNKS - 1])
def test_a_miss_at_any_layer_ends_the_prefix_on_all_layers(layer: int, missing: int) -> None:
    backend, keys = filled()
    backend._by_key["get", keys[missing]] = deque([Fault.ok()] * layer + [Fault.miss()] * LAYERS)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=2 * LAYER)
        with prefetcher.start(plan(keys)) as stream:
            seen = []
            for number in range(LAYERS):
                with stream.wait(number) as loaded:
                    seen.append(len(loaded.views()))
            assert seen == sorted(seen, reverse=True)
            assert seen[layer:] == [missing] * (LAYERS - layer)
            assert stream.hit_prefix == missing
            assert not missing or seen[0] >= missing
        until(lambda: gone(prefetcher))
        # What is of no use was not asked for after the miss was known: at most the layers that were under way.
        late = [call for call in backend.calls_of("get") if keys[-1] in call.keys]
        assert len(late) <= min(layer + 3, LAYERS)


def test_a_corrupt_segment_of_a_late_layer_is_a_miss_there() -> None:
    backend, keys = filled()
    damaged = bytearray(backend.inner.records[keys[2]])
    damaged[SPEC.offsets[9] + 77] ^= 4
    backend.inner.records[keys[2]] = bytes(damaged)
    with store_over(backend) as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == 2
        until(lambda: gone(prefetcher))
        assert len(backend.inner.quarantined) == 1


def test_a_hung_backend_is_a_miss_at_the_deadline_and_its_memory_stays_away() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.ok()] * 3 + [Fault.late()] * 40}, lanes=2)
    with store_over(backend, buffer_pool_bytes=2 << 20) as store:
        prefetcher = single(store)
        stream = prefetcher.start(plan(keys, deadline=soon(0.3)))
        served = 0
        for layer in range(LAYERS):
            with stream.wait(layer) as loaded:
                served += bool(loaded.views())
        assert 0 < served <= 3
        assert stream.hit_prefix == 0
        assert not stream.settled()
        stats = prefetcher.stats()
        assert stats["late"] >= 1
        assert 0 < stats["used_bytes"] <= prefetcher.budget_bytes
        assert store.pool.stats().pinned
        until(lambda: backend.release() or stream.settled())  # what comes late goes into memory that nobody has
        until(lambda: gone(prefetcher))
        store.pool.acquire(store.pool.nbytes, 5).release()  # the canary is checked


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, LAYERS])
def test_cancel_at_every_point(after: int, late: bool) -> None:
    """Also with I/O under way that succeeds after the cancel: it writes to nothing that somebody else has by then."""
    script = {"get": [Fault.ok()] * after}  # one call for each layer
    backend, keys = filled(CHUNKS, script, lanes=2, otherwise=Fault.late() if late else Fault.ok())
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=4 * LAYER)
        stream = prefetcher.start(plan(keys))
        for layer in range(after):
            with stream.wait(layer) as loaded:
                assert len(loaded.views()) == CHUNKS
        if late and after < LAYERS:
            backend.wait_hung()
        stream.cancel()
        stream.cancel()
        with pytest.raises(CancelledError):
            stream.wait(min(after, LAYERS - 1))
        if late and after < LAYERS:
            assert not stream.settled()
            assert prefetcher.stats()["used_bytes"] >= LAYER
        mine = everything_free(store)
        for buffer in mine:
            buffer.view[:] = b"\x5c" * len(buffer)
        until(lambda: backend.release() or stream.settled())
        assert all(buffer.view == b"\x5c" * len(buffer) for buffer in mine)
        for buffer in mine:
            buffer.release()
        until(lambda: gone(prefetcher))
        store.pool.acquire(store.pool.nbytes, 5).release()  # the canary is checked


def everything_free(store: kvstore.Store) -> list[Buffer]:
    """All memory of the pool that can be had now."""
    found: list[Buffer] = []
    try:
        while True:
            found.append(store.pool.acquire(SEGMENT))
    except PoolExhausted:
        return found


def test_a_cancel_from_elsewhere_wakes_who_waits_and_leaves_what_is_looked_at() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.ok(), Fault.hang()]}, lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store)
        stream = prefetcher.start(plan(keys))
        with stream.wait(0) as loaded:
            stream.cancel()
            assert [bytes(v) for v in loaded.views()] == [expected(key, 0) for key in keys]
            assert prefetcher.stats()["used_bytes"] >= LAYER
        with pytest.raises(ClosedError):
            loaded.views()
        backend.release()
        backend.push(Fault.hang(), operation="get")
        stream = prefetcher.start(plan(keys))
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                stream.wait(0)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: stream.state.waiting)
        stream.cancel()
        thread.join(20)
        assert [type(error) for error in raised] == [CancelledError]
        until(lambda: backend.release() or gone(prefetcher))


def test_retained_layers_outlive_the_stream_and_releases_are_counted() -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream:
            loaded = stream.wait(3)
            loaded.retain()
            stream.wait(4)
        assert loaded.views()[1] == expected(keys[1], 3)
        loaded.release()
        with pytest.raises(ClosedError, match="released before"):
            loaded.release()
        with pytest.raises(CancelledError):
            loaded.retain()
        until(lambda: gone(prefetcher))


def test_a_stream_that_is_dropped_gives_everything_back() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.ok(), Fault.hang()]}, lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store)
        stream: Any = prefetcher.start(plan(keys))
        stream.wait(0)
        backend.wait_hung()
        knot: list[Any] = [stream]
        knot.append(knot)  # only a collection finds it
        del stream, knot
        gc.collect()
        until(lambda: prefetcher.stats()["streams"] == 0)
        until(lambda: backend.release() or gone(prefetcher))
        done = prefetcher.start(plan(keys))
        read_all(done, keys)  # to its end: nothing is left to give back
        assert gone(prefetcher)


def test_the_budget_holds_and_a_larger_layer_runs_alone() -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        for budget in (1, LAYER - 1, LAYER, 3 * LAYER, 5 * LAYER):
            prefetcher = single(store, budget_bytes=budget)
            with prefetcher.start(plan(keys)) as stream, prefetcher.start(plan(keys[:2])) as second:
                for layer in range(LAYERS):  # one thread, two streams: neither may hold up the other
                    for each, its in ((stream, keys), (second, keys[:2])):
                        with each.wait(layer) as loaded:
                            assert [bytes(v) for v in loaded.views()] == [expected(key, layer) for key in its]
            assert 0 < prefetcher.stats()["peak_bytes"] <= max(budget, LAYER)
            assert gone(prefetcher)


def test_sixteen_threads_share_a_small_budget() -> None:
    backend, _ = filled(1)
    prompts = [chain(CHUNKS, start=1000 * n) for n in range(8)]
    for keys in prompts:
        fill(backend.inner, keys)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=2 * LAYER)
        results: list[int] = []

        def engine(number: int) -> None:
            keys = prompts[number % len(prompts)]
            for turn in range(3):
                with prefetcher.start(plan(keys)) as stream:
                    if turn == 1 and number % 4 == 0:  # some leave early
                        stream.wait(2)
                        continue
                    results.append(read_all(stream, keys))

        threads = [threading.Thread(target=engine, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [CHUNKS] * (16 * 3 - 4)
        assert prefetcher.stats()["peak_bytes"] <= 2 * LAYER
        until(lambda: gone(prefetcher))


@pytest.mark.parametrize("budget", [1, 3 * SEGMENT, LAYER, 10 * LAYER])
def test_a_layer_in_parts(budget: int) -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        prefetcher = Prefetcher(store, budget_bytes=budget, first_group_bytes=1)
        with prefetcher.start(plan(keys, split=True)) as stream:
            seen = []
            for part in stream.parts():
                for layer in range(part.first, part.first + part.count):
                    chunks = part.chunks()
                    for chunk, view in zip(chunks, part.views(layer), strict=True):
                        assert view == expected(keys[chunk], layer)
                        seen.append((layer, chunk))
                with pytest.raises(ConfigError, match="this part has layers"):
                    part.views(part.first + part.count)
            assert seen == [(layer, chunk) for layer in range(LAYERS) for chunk in range(CHUNKS)]
            if budget < LAYER:
                with pytest.raises(ConfigError, match=r"parts\(\)"):
                    prefetcher.start(plan(keys, split=True)).wait(0)
                gc.collect()
        assert prefetcher.stats()["peak_bytes"] <= max(budget, SEGMENT)
        until(lambda: gone(prefetcher))


def test_parts_stop_early_and_chunks_that_are_not_wanted_are_not_read() -> None:
    backend, keys = filled(lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=3 * LAYER)
        with prefetcher.start(plan(keys)) as stream:
            for number, part in enumerate(stream.parts()):
                if number == 1:
                    stream.limit(2)
                if number == 6:
                    assert part.chunks() == [0, 1]
                    break
        until(lambda: gone(prefetcher))
        # The body of each part, and the header with those that were under way before it was known.
        assert backend.count("get", keys[5]) <= 2 * 5
        assert backend.count("get", keys[1]) >= 1 + 6
        with prefetcher.start(plan(keys)) as stream:
            with pytest.raises(ConfigError, match="prefix 1"):
                stream.limit(1, prefix=1)
            stream.limit(0)
            assert stream.wait(0).views() == []


def test_errors_are_raised_if_the_store_is_told_to() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.error()] * 99})
    with store_over(backend, on_error="raise") as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream, pytest.raises(kvstore.TransientError, match="scripted"):
            stream.wait(0)
        until(lambda: gone(prefetcher))


def test_a_store_that_is_closed_ends_streams() -> None:
    backend, keys = filled(CHUNKS, {"get": [Fault.hang()] * 4})
    store = store_over(backend, close_timeout=0.05)
    prefetcher = single(store)
    stream = prefetcher.start(plan(keys))
    backend.wait_hung()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            stream.wait(0)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: stream.state.waiting)
    store.close()
    thread.join(20)
    assert [type(error) for error in raised] == [ClosedError]
    with pytest.raises(ClosedError):
        prefetcher.start(plan(keys)).wait(0)
    until(lambda: backend.release() or prefetcher.stats()["used_bytes"] == 0)
    prefetcher.close()
    with pytest.raises(ClosedError, match="prefetcher is closed"):
        prefetcher.start(plan(keys))


def test_others_use_the_pool_too() -> None:
    backend, keys = filled()
    with store_over(backend, buffer_pool_bytes=1 << 20) as store:
        prefetcher = single(store)
        taken = store.pool.acquire((1 << 20) - 4096)
        with prefetcher.start(plan(keys)) as stream:
            with pytest.raises(TimeoutError):
                stream.wait(0, timeout=0.01)
            thread = threading.Thread(target=lambda: (until(lambda: store.pool.stats().waiting), taken.release()))
            thread.start()
            assert read_all(stream, keys) == CHUNKS
            thread.join(20)
        assert gone(prefetcher)


def test_a_pool_that_stays_full_is_a_miss_at_the_deadline_and_said(caplog: pytest.LogCaptureFixture) -> None:
    backend, keys = filled()
    with store_over(backend, buffer_pool_bytes=1 << 20) as store:
        prefetcher = single(store)
        with store.pool.acquire(1 << 20), prefetcher.start(plan(keys, deadline=soon(0.1))) as stream:
            assert stream.wait(0).views() == []
            assert stream.hit_prefix == 0
        assert "buffer_pool_bytes may be too small" in caplog.text
        assert gone(prefetcher)


def test_decoding_one_group_overlaps_loading_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain(2, codec="shuffle-zstd")
    backend = FaultyBackend(DictBackend(lanes=2))
    decode = staged._decode
    overlapped: list[bool] = []

    def slow(flight: Any, layer: Any, stored: Any) -> None:
        if not overlapped and layer.segments[0].layer == 0:
            overlapped.append(False)
            backend.wait_done(2, "get")  # the read of another group ends while this one is being decoded
            overlapped[0] = True
        decode(flight, layer, stored)

    with store_over(backend, remote_serde="shuffle-zstd") as store:
        store.submit_put(records(keys), deadline=soon()).result()
        monkeypatch.setattr(staged, "_decode", slow)
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == 2
        assert overlapped == [True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"budget_bytes": 3 << 20}, "half of the store's buffer_pool_bytes"),
        ({"first_group_bytes": 0}, "make no sense"),
        ({"max_group_bytes": 0}, "make no sense"),
        ({"lookahead_bytes": -1}, "make no sense"),
    ],
)
def test_a_prefetcher_that_makes_no_sense_is_refused(options: dict[str, int], said: str) -> None:
    with store_over(DictBackend(), buffer_pool_bytes=4 << 20) as store:
        with pytest.raises(ConfigError, match=said):
            Prefetcher(store, **options)
        with pytest.raises(ConfigError, match="not object"):
            Prefetcher(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("latency_s", "groups", "most"), [(0.0, LAYERS, 2), (10.0, LAYERS // 2, 2)], ids=["no latency", "latency"]
)
def test_over_a_slow_link_little_is_under_way(latency_s: float, groups: int, most: int) -> None:
    """Parts under way share the link: who waits for the first one waits for all of them."""
    backend, keys = filled(lanes=4)
    with store_over(backend) as store:
        prefetcher = Prefetcher(store)
        speed = prefetcher._arbiter.speed
        speed.end = lambda *_: None  # type: ignore[method-assign]
        speed.took = lambda *_: None  # type: ignore[method-assign]
        speed.bytes_per_s, speed.latency_s = float(LAYER) / 10, latency_s  # ten seconds for a layer
        stream = prefetcher.start(plan(keys))
        parts = [*stream.state.active, *stream.state.pending]
        seen = 0
        for layer in range(LAYERS):
            seen = max(seen, stream.state.loading)
            with stream.wait(layer):
                pass
        assert seen <= most
        assert len(parts) == groups
        stream.cancel()
        speed.bytes_per_s, speed.latency_s = float(LAYER) * 1e4, 0.0
        fast = prefetcher.start(plan(keys))
        assert len([*fast.state.active, *fast.state.pending]) < LAYERS
        fast.cancel()
        until(lambda: gone(prefetcher))


def test_a_pool_that_is_full_for_long_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for memory gives up his turn now and then; it must come back to him without anybody's help."""
    monkeypatch.setattr(arbiter, "_POOL_SLICE_S", 0.01)
    backend, keys = filled()
    with store_over(backend, buffer_pool_bytes=4 << 20) as store:
        prefetcher = single(store)
        whole = [store.pool.acquire(store.pool.stats().total)]
        asked = 0
        real = store.pool.acquire_many

        def counted(sizes: Any, timeout: float | None = 0) -> list[Buffer]:
            nonlocal asked
            asked += bool(timeout)
            if asked == 3:
                for buffer in whole:
                    buffer.release()
                whole.clear()
            return real(sizes, timeout)

        monkeypatch.setattr(store.pool, "acquire_many", counted)
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == CHUNKS
        assert asked >= 3


def test_after_a_fork_nothing_hangs() -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        prefetcher = single(store)
        stream = prefetcher.start(plan(keys))
        with stream.wait(0):
            with prefetcher._arbiter._lock:  # as if another thread were in the middle of something
                child = os.fork()
                if not child:
                    signal.alarm(20)
                    os._exit(_in_a_child(prefetcher, stream, keys))
            assert os.waitpid(child, 0)[1] == 0
        stream.cancel()
        until(lambda: gone(prefetcher))


def _in_a_child(prefetcher: Prefetcher, stream: LayerStream, keys: list[Key]) -> int:
    refused = 0
    for call in (lambda: stream.wait(1), lambda: prefetcher.start(plan(keys))):
        try:
            call()
        except ClosedError:
            refused += 1
    stream.cancel()
    prefetcher.announce([plan(keys)])
    prefetcher.close()
    return 2 - refused + prefetcher.stats()["used_bytes"]


def test_a_stream_without_hope_that_is_dropped_is_forgotten() -> None:
    backend, keys = filled(script={"get": [Fault.miss()] * LAYERS})
    with store_over(backend) as store:
        prefetcher = single(store)
        for _ in range(3):
            stream = prefetcher.start(plan(keys))
            stream.limit(0)
            until(lambda: not prefetcher._arbiter._posted)
            del stream
        gc.collect()
        until(lambda: prefetcher.stats()["streams"] == 0)
        until(lambda: gone(prefetcher))


def test_an_error_that_was_raised_keeps_nothing_alive() -> None:
    backend, keys = filled(lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=LAYER)
        stream = prefetcher.start(plan(keys))
        stream.wait(0)
        store.close()
        with pytest.raises(ClosedError) as caught:
            stream.wait(LAYERS - 1)
        del caught
        dead = weakref.ref(stream)
        del stream
        gc.collect()
        assert dead() is None


def test_the_header_of_a_record_is_read_with_the_first_groups_only() -> None:
    backend, keys = filled(lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=LAYER)  # one part under way at a time
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == CHUNKS
        until(lambda: gone(prefetcher))
    calls = backend.calls_of("get")
    assert [len(call.keys) for call in calls] == [2 * CHUNKS] + [CHUNKS] * (LAYERS - 1)
    assert [sum(offset == 0 for offset, _ in call.ranges) for call in calls] == [CHUNKS] + [0] * (LAYERS - 1)


def test_a_record_that_was_exchanged_meanwhile_is_noticed_though_its_header_is_known() -> None:
    backend, keys = filled(2, lanes=1)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=2 * SEGMENT, max_group_bytes=2 * SEGMENT)
        with prefetcher.start(plan(keys)) as stream:
            with stream.wait(0):
                pass
            assert store.delete_many([keys[1]])[0].ok
            other = bytes(SPEC.raw_bytes)
            put = Item(keys[1], SPEC.split(memoryview(other)), SPEC, {})
            assert store.submit_put([put], deadline=soon()).result()[0].stored
            for layer in range(1, LAYERS):
                with stream.wait(layer) as loaded:
                    views = loaded.views()
                    assert bytes(views[0]) == expected(keys[0], layer)
                    assert bytes(views[1]) in (expected(keys[1], layer), other[:SEGMENT])  # what is stored, or was
            assert stream.hit_prefix == 2
        until(lambda: gone(prefetcher))
