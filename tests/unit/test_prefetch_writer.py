"""Saving layer by layer: what is complete is put, what has no room is dropped and said, and nobody is blocked."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.backend import Status
from kvstore.errors import ClosedError, ConfigError, PermanentError
from kvstore.keys import Key
from kvstore.prefetch import ChunkSave, LayerSave, LayerWriter, SaveReport
from kvstore.record import kv_spec
from kvstore.store import Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import until
from tests.faults.support import LAYOUT as OTHER
from tests.faults.support import chain, soon, store_over
from tests.unit.prefetch_support import CHUNKS, LAYERS, SPEC, expected

RECORD = SPEC.raw_bytes


def chunks(keys: Sequence[Key]) -> list[ChunkSave]:
    return [ChunkSave(key, SPEC, {"n": n}, keys[n - 1] if n else None) for n, key in enumerate(keys)]


def produce(save: LayerSave, keys: Sequence[Key], layers: Any = range(LAYERS)) -> None:
    for layer in layers:
        with save.layer(layer) as segments:
            for key, segment in zip(keys, segments, strict=True):
                if segment is not None:
                    segment[:] = expected(key, layer)


def report(save: LayerSave) -> SaveReport:
    return save.completion.result(20)


def stored(store: Any, keys: Sequence[Key]) -> int:
    """How many leading chunks are there, byte for byte."""
    rooms = [bytearray(RECORD) for _ in keys]
    wants = [Want(key, memoryview(room), SPEC) for key, room in zip(keys, rooms, strict=True)]
    outcomes = store.submit_get(wants, deadline=soon()).result()
    whole = [b"".join(expected(key, layer) for layer in range(LAYERS)) for key in keys]
    good = [o.status is Status.OK and room == w for o, room, w in zip(outcomes, rooms, whole, strict=True)]
    return good.index(False) if False in good else len(good)


def idle(writer: LayerWriter) -> bool:
    stats = writer.stats()
    return stats["used_bytes"] == stats["late"] == writer.store.pool.stats().in_use == 0


def test_a_record_is_put_when_its_last_layer_has_come() -> None:
    backend, keys = FaultyBackend(DictBackend()), chain(CHUNKS)
    with store_over(backend) as store, LayerWriter(store) as writer:
        save = writer.start(chunks(keys))
        assert save.wanted == [True] * CHUNKS
        produce(save, keys, [3, *range(3), *range(4, LAYERS - 1)])  # in any order
        assert not backend.calls_of("put")
        assert not save.completion.done()
        produce(save, keys, [LAYERS - 1])
        done = report(save)
        assert done == SaveReport(CHUNKS, 0, 0, 0, done.nbytes)
        assert done.nbytes >= CHUNKS * RECORD
        assert stored(store, keys) == CHUNKS
        until(lambda: idle(writer))
        (head,) = store.submit_heads(keys[2:3]).result()
        assert head is not None
        assert head.meta()["n"] == 2


def test_what_is_stored_already_is_left_out() -> None:
    keys = chain(CHUNKS)
    with store_over(DictBackend()) as store, LayerWriter(store) as writer:
        first = writer.start(chunks(keys[:2]))
        produce(first, keys[:2])
        report(first)
        save = writer.start(chunks(keys), timeout=5)
        assert save.wanted == [False, False, True, True, True, True]
        produce(save, keys)
        assert report(save)[:4] == (4, 2, 0, 0)
        again = writer.start(chunks(keys), timeout=5)
        assert report(again)[:4] == (0, CHUNKS, 0, 0)  # known at once: no layer is wanted
        hasty = writer.start(chunks(keys))  # without time to ask, the store says so at the put
        produce(hasty, keys)
        assert report(hasty)[:4] == (0, CHUNKS, 0, 0)
        assert report(writer.start([])) == SaveReport(0, 0, 0, 0, 0)
        until(lambda: idle(writer))


def test_what_has_no_room_is_dropped_from_the_tail_and_said() -> None:
    keys = chain(CHUNKS)
    with store_over(DictBackend()) as store, LayerWriter(store, buffer_bytes=3 * RECORD) as writer:
        save = writer.start(chunks(keys))
        assert save.wanted == [True, True, True, False, False, False]
        other = writer.start(chunks(chain(1, start=999)), timeout=0.01)  # does not wait longer than told
        assert report(other).dropped == 1
        produce(save, keys)
        done = report(save)
        assert done[:4] == (3, 0, 3, 0)
        assert "the write buffer holds" in str(done.error)
        assert stored(store, keys) == 3
        assert writer.stats()["peak_bytes"] <= 3 * RECORD
        until(lambda: idle(writer))
        large = LayerWriter(store, buffer_bytes=1).start(chunks(chain(2, start=5000)))
        assert large.wanted == [True, False]  # larger than the buffer: alone
        large.cancel()


def test_back_pressure_ends_when_room_comes() -> None:
    backend, keys, other = FaultyBackend(DictBackend(), {"put": [Fault.hang()]}), chain(2), chain(2, start=999)
    with store_over(backend) as store, LayerWriter(store, buffer_bytes=2 * RECORD) as writer:
        first = writer.start(chunks(keys))
        produce(first, keys)
        backend.wait_hung()
        got: list[list[bool]] = []
        thread = threading.Thread(target=lambda: got.append(_kept(writer.start(chunks(other), timeout=20)).wanted))
        thread.start()
        until(lambda: len(writer._less._waiters) > 0)  # type: ignore[attr-defined]
        assert not got
        backend.release()
        thread.join(20)
        assert got == [[True, True]]
        assert report(first).stored == 2
        _KEPT.clear()
        gc.collect()
        until(lambda: idle(writer))


_KEPT: list[LayerSave] = []


def _kept(save: LayerSave) -> LayerSave:
    _KEPT.append(save)
    return save


def test_a_full_pool_drops_too() -> None:
    keys = chain(1)
    with store_over(DictBackend(), buffer_pool_bytes=1 << 20) as store, LayerWriter(store) as writer:
        with store.pool.acquire(1 << 20):
            assert report(writer.start(chunks(keys), timeout=0.01))[:4] == (0, 0, 1, 0)
        assert idle(writer)


def test_failures_and_refusals_of_the_store_are_told_apart() -> None:
    keys = chain(3)
    errors = [Fault.each({1: Fault.error(PermanentError("full disk"))})]
    with store_over(FaultyBackend(DictBackend(), {"put": errors})) as store, LayerWriter(store) as writer:
        save = writer.start(chunks(keys))
        produce(save, keys)
        done = report(save)
        assert done[:4] == (2, 0, 0, 1)
        assert "full disk" in str(done.error)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    with store_over(backend, write_queue_bytes=1, on_error="raise") as store, LayerWriter(store) as writer:
        first, second = writer.start(chunks(keys[:1])), writer.start(chunks(keys[1:2]))
        produce(first, keys[:1])
        backend.wait_hung()
        produce(second, keys[1:2])
        assert report(second)[:4] == (0, 0, 1, 0)  # the store's own queue was full
        backend.release()
        assert report(first).stored == 1
        until(lambda: idle(writer))


def test_a_hung_put_ends_at_the_deadline_and_its_memory_stays_away() -> None:
    keys = chain(2)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    with store_over(backend) as store, LayerWriter(store) as writer:
        save = writer.start(chunks(keys), deadline=soon(0.2))
        produce(save, keys)
        assert report(save)[:4] == (0, 0, 0, 2)
        assert writer.stats()["used_bytes"] == 2 * RECORD
        backend.release()
        until(lambda: idle(writer))


@pytest.mark.parametrize("after", [0, 1, 5, LAYERS - 1])
@pytest.mark.parametrize("how", ["cancel", "with", "dropped", "raised", "closed"])
def test_giving_up_before_the_last_layer_puts_nothing(after: int, how: str) -> None:
    backend, keys = FaultyBackend(DictBackend()), chain(CHUNKS)
    with store_over(backend) as store:
        writer = LayerWriter(store)
        save: Any = writer.start(chunks(keys))
        completion = save.completion
        produce(save, keys, range(after))
        if how == "cancel":
            save.cancel()
            save.cancel()
        elif how == "with":
            with save:
                pass
        elif how == "raised":
            with pytest.raises(ZeroDivisionError), save.layer(after):
                _ = 1 // 0
        elif how == "closed":
            writer.close()
            with pytest.raises(ClosedError):
                writer.start(chunks(keys))
        else:
            knot = [save]
            knot.append(knot)
            del save, knot
            gc.collect()
        assert completion.result(20)[:4] == (0, 0, CHUNKS, 0)
        until(lambda: idle(writer))
        assert not backend.calls_of("put")


def test_a_cancel_while_a_layer_is_copied_leaves_its_memory_alone() -> None:
    keys = chain(CHUNKS)
    with (
        store_over(DictBackend(), buffer_pool_bytes=1 << 20) as store,
        LayerWriter(store, buffer_bytes=CHUNKS * RECORD) as writer,
    ):
        save = writer.start(chunks(keys))
        with save.layer(0) as segments:
            save.cancel()
            assert store.pool.stats().in_use > 0
            for segment in segments:
                assert segment is not None
                segment[:] = bytes(len(segment))
        assert report(save).dropped == CHUNKS
        assert idle(writer)
        store.pool.acquire(1 << 20, 5).release()  # the canary is checked
        with save.layer(1) as segments:
            assert segments == [None] * CHUNKS


def test_what_makes_no_sense_is_refused() -> None:
    keys = chain(2)
    with store_over(DictBackend(), buffer_pool_bytes=1 << 20) as store:
        writer = LayerWriter(store)
        other = kv_spec(OTHER, "bfloat16", 16)
        with pytest.raises(ConfigError, match="different numbers of layers"):
            writer.start([ChunkSave(keys[0], SPEC), ChunkSave(keys[1], other)])
        with writer.start(chunks(keys)) as save:
            for layer in (-1, LAYERS):
                with pytest.raises(ConfigError, match="there is no layer"), save.layer(layer):
                    pass
            produce(save, keys, [0])
            with pytest.raises(ConfigError, match="layer 0 was saved before"), save.layer(0):
                pass
        for size in (0, 2 << 20):
            with pytest.raises(ConfigError, match="buffer_bytes"):
                LayerWriter(store, buffer_bytes=size)
        with pytest.raises(ConfigError, match="not object"):
            LayerWriter(object())  # type: ignore[arg-type]


def test_many_engines_share_one_buffer() -> None:
    with store_over(DictBackend()) as store, LayerWriter(store, buffer_bytes=3 * RECORD) as writer:
        reports: list[tuple[Any, SaveReport]] = []

        def engine(number: int) -> None:
            for turn in range(4):
                keys = chain(2, start=1000 * (10 * number + turn + 1))
                save = writer.start(chunks(keys), timeout=30)
                produce(save, keys)
                reports.append((keys, save.completion.result(30)))

        threads = [threading.Thread(target=engine, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(reports) == 32
        for keys, each in reports:
            assert each.stored + each.dropped == 2
            assert stored(store, keys) == each.stored
        assert sum(each.stored for _, each in reports) > 32
        assert writer.stats()["peak_bytes"] <= 3 * RECORD
        until(lambda: idle(writer))


def test_a_save_with_a_dropped_tail_that_is_let_go_gives_its_memory_back() -> None:
    """The error of what was dropped must not keep the save alive: its traceback knows the frames that know it."""
    with store_over(DictBackend()) as store:
        writer = LayerWriter(store, buffer_bytes=2 * SPEC.raw_bytes)
        save = writer.start([ChunkSave(key, SPEC) for key in chain(5)])
        assert save.wanted == [True, True, False, False, False]
        with save.layer(0):
            pass
        done = save.completion
        del save
        gc.collect()
        assert done.result(20).dropped == 5
        until(lambda: writer.stats()["used_bytes"] == 0 == store.pool.stats().in_use)


def test_after_a_fork_nothing_hangs() -> None:
    with store_over(DictBackend()) as store:
        writer = LayerWriter(store)
        save = writer.start([ChunkSave(key, SPEC) for key in chain(2)])
        with writer._less, save._save.lock:  # as if another thread were in the middle of something
            child = os.fork()
            if not child:
                signal.alarm(20)
                os._exit(_in_a_child(writer, save))
        assert os.waitpid(child, 0)[1] == 0
        save.cancel()
        assert writer.stats()["used_bytes"] == 0


def _in_a_child(writer: LayerWriter, save: LayerSave) -> int:
    save.cancel()
    writer.close()
    try:
        writer.start([ChunkSave(key, SPEC) for key in chain(1)])
    except ClosedError:
        return writer.stats()["used_bytes"]
    return 1
