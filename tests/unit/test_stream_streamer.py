"""`Streamer` over real stores: what is given is what was stored at its level, whatever goes wrong on the way."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.completion import CancelledError
from kvstore.errors import ClosedError, ConfigError
from kvstore.keys import Key
from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.store import Item, Store
from kvstore.stream import Chunk, LinkShare, Policy, PrefillModel, Streamer, TextPart
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import until
from tests.faults.support import Unclosed, chain, payload, store_over
from tests.unit.level_codec import level_codec, masked

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16)
TOKENS = 32
SPEC = kv_spec(LAYOUT, "bfloat16", TOKENS)
SLOW = PrefillModel(1.0)  # so slow that nothing is computed without need
QUICK = PrefillModel(1e-9)
LOAD = Policy(text="time")
GROUP = 2
COUNT = 8


@pytest.fixture(autouse=True)
def codec() -> Iterator[Any]:
    with level_codec() as codec:
        yield codec


def lossy(*backends: Any, **options: Any) -> Store:
    return store_over(*backends, remote_serde="kvt", codec_profile="unused", **options)


@pytest.fixture
def stored() -> tuple[DictBackend, list[Key]]:
    backend, keys = DictBackend(), chain(COUNT)
    with lossy(Unclosed(backend)) as store:
        fill(store, keys)
    return backend, keys


def fill(store: Store, keys: list[Key]) -> None:
    items = [Item(key, SPEC.split(memoryview(payload(key, SPEC.raw_bytes))), SPEC, {}) for key in keys]
    assert all(outcome.ok for outcome in store.submit_put(items).result())


def chunks(keys: list[Key]) -> list[Chunk]:
    return [Chunk(key, SPEC) for key in keys]


def streamer(store: Store, prefill: PrefillModel | None = SLOW, **options: Any) -> Streamer:
    return Streamer(store, prefill=prefill, group_chunks=GROUP, **{"policy": LOAD, **options})


def check(keys: list[Key], numbers: range, level: int, views: Any) -> None:
    assert len(views) == len(numbers)
    for number, view in zip(numbers, views, strict=True):
        assert bytes(view) == masked(payload(keys[number], SPEC.raw_bytes), level)


class Engine:
    """Computes nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.parts: list[TextPart] = []

    def __call__(self, part: TextPart) -> None:
        self.parts.append(part)


def test_everything_comes_at_its_finest_level_without_an_slo(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    engine = Engine()
    with lossy(backend) as store:
        mine = streamer(store)
        with mine.stream(chunks(keys), recompute=engine) as stream:
            seen = {}
            for group in stream:
                assert group.level is not None
                check(keys, group.chunks, group.level, group.views)
                assert group.first == (group.group not in seen)
                seen[group.group] = group.level
            assert seen == dict.fromkeys(range(4), 2)
            for number in range(4):
                check(keys, range(2 * number, 2 * number + 2), 2, stream.views(number))
            assert stream.missing == []
            report = stream.report
        assert not engine.parts
        assert (report.violated, report.loaded_tokens, report.computed_tokens) == (False, COUNT * TOKENS, 0)
        total = sum(map(len, backend.records.values()))
        assert total <= report.loaded_bytes < 1.1 * total  # the room for meta behind a header is read, too
        stats = mine.stats()
        assert (stats["requests"], stats["violations"], stats["levels"]) == (1, 0, {2: 4})
        assert stats["saved_s"] == pytest.approx(COUNT * TOKENS, rel=0.2)
        assert mine.link.requests == 0
        assert store.pool.stats().in_use == 0


def test_text_that_fits_is_computed_and_nothing_is_loaded(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    engine = Engine()
    with lossy(backend) as store:
        mine = streamer(store, QUICK, policy=Policy())
        with mine.stream(chunks(keys), recompute=engine, slo_s=20.0) as stream:
            given = [group.group for group in stream]
            assert [group for group, *_ in engine.parts] == given == [0, 1, 2, 3]
            assert stream.report.loaded_bytes == 0
            assert stream.report.levels == (-2,) * 4
            assert stream.views(0) == ()
        assert [part.end for part in engine.parts] == [64, 128, 192, 256]
        assert engine.parts[1].chunks == range(2, 4)
        with pytest.raises(ConfigError, match="prefill"):
            streamer(store, None).stream(chunks(keys), recompute=engine)


def test_what_is_missing_is_computed_once_all_before_it_was_given(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    del backend.records[keys[5]]  # in group 2
    given: list[int] = []
    engine: list[int] = []

    def compute(part: TextPart) -> None:
        assert {0, 1} <= set(given)
        engine.append(part.group)

    with lossy(backend) as store:
        mine = streamer(store, PrefillModel(1e-2))
        with mine.stream(chunks(keys), recompute=compute, policy=Policy(text="never")) as stream:
            given.extend(group.group for group in _noting(stream, given))
            assert stream.report.failed == 1
            assert stream.report.levels == (2, 2, -2, 2)
            assert stream.missing == []
    assert engine == [2]


def _noting(stream: Any, given: list[int]) -> Iterator[Any]:
    for group in stream:
        given.append(group.group)
        yield group


def test_without_an_engine_a_hole_ends_the_prefix(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    del backend.records[keys[3]]  # in group 1
    with lossy(backend) as store, streamer(store, None).stream(chunks(keys)) as stream:
        given = {group.group for group in stream}
        assert 0 in given
        assert [part.group for part in stream.missing] == [1, 2, 3]
        assert stream.report.violated


def test_a_corrupt_record_is_computed(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    damaged = bytearray(backend.records[keys[0]])
    damaged[-1] ^= 0xFF  # of the finest level of the last layer
    backend.records[keys[0]] = bytes(damaged)
    engine = Engine()
    with lossy(backend) as store:
        with streamer(store, PrefillModel(1e-2)).stream(chunks(keys), recompute=engine) as stream:
            for group in stream:
                if group.level is not None:
                    check(keys, group.chunks, group.level, group.views)
        assert 0 in [part.group for part in engine.parts]
        assert stream.report.levels[0] == -2


def test_when_the_slo_is_lost_it_is_as_fast_as_possible_and_the_rest_is_refined_later(
    stored: tuple[DictBackend, list[Key]],
) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store, None)
        with mine.stream(chunks(keys), slo_s=1e-4) as stream:
            with pytest.raises(ConfigError, match="first token"):
                stream.refinements()
            for group in stream:
                assert group.level == 0
                check(keys, group.chunks, 0, group.views)
            assert stream.report.violated
            carried = stream.report.loaded_bytes
            levels: dict[int, int] = {}
            for group in stream.refinements():
                assert group.level is not None
                assert not group.first
                assert group.level > levels.get(group.group, 0)
                levels[group.group] = group.level
                check(keys, group.chunks, group.level, group.views)
            assert levels == dict.fromkeys(range(4), 2)
            assert stream.report.loaded_bytes > carried
            assert stream.report.levels == (2,) * 4
            assert stream.report.loaded_bytes < 1.1 * sum(map(len, backend.records.values()))  # no byte twice
        assert mine.stats()["violations"] == 1


def test_levels_are_capped_by_the_policy_and_by_the_option(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    for options, policy, level in (({}, Policy(max_level=1), 1), ({"codec_level": 0}, Policy(), 0)):
        with lossy(Unclosed(backend), **options) as store:
            with streamer(store, None, policy=policy).stream(chunks(keys)) as stream:
                assert {group.level for group in stream} <= set(range(level + 1))
            assert stream.report.levels == (level,) * 4


def test_a_record_that_hangs_is_missing_at_the_deadline_and_its_memory_is_kept(
    stored: tuple[DictBackend, list[Key]],
) -> None:
    backend, keys = stored
    hangs = FaultyBackend(backend)
    with lossy(hangs) as store:
        mine = streamer(store, None)
        with mine.stream(chunks(keys[:2])) as stream:  # the sizes are known from now on
            assert len(list(stream)) == 1
        hangs.push(Fault.hang(), operation="get")
        stream = mine.stream(chunks(keys[6:]), timeout=0.05)
        assert list(stream) == []
        assert len(stream.missing) == 1
        assert stream.report.violated
        stream.close()
        assert store.pool.stats().pinned > 0  # the late read may still write there
        assert hangs.release()
        until(lambda: store.pool.stats().pinned == 0 and store.pool.stats().in_use == 0)


def test_closing_in_the_middle_gives_everything_back(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store)
        stream = mine.stream(chunks(keys), recompute=Engine())
        next(stream)
        stream.close()
        stream.close()
        with pytest.raises(CancelledError):
            next(stream)
        until(lambda: store.pool.stats().in_use == 0)
        assert mine.link.requests == 0
        forgotten = mine.stream(chunks(keys), recompute=Engine())
        next(forgotten)
        del forgotten
        until(lambda: bool(gc.collect() + 1) and store.pool.stats().in_use == 0)


def test_an_engine_that_fails_is_heard_of(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored

    def broken(_: TextPart) -> None:
        raise RuntimeError("out of memory")

    with lossy(backend) as store:
        stream = streamer(store, QUICK, policy=Policy()).stream(chunks(keys), recompute=broken, slo_s=9.0)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
        until(lambda: store.pool.stats().in_use == 0)


def test_without_memory_it_is_computed(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    engine = Engine()
    with lossy(backend, buffer_pool_bytes=1 << 20) as store:
        mine = streamer(store, PrefillModel(1e-2))
        with store.pool.acquire(store.pool.largest, 1.0), mine.stream(chunks(keys), recompute=engine) as stream:
            list(stream)
        assert stream.report.levels == (-2,) * 4
        assert mine.stats()["no_memory"] >= 1
    assert [part.group for part in engine.parts] == [0, 1, 2, 3]


def test_memory_of_the_callers_own(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    rooms = [memoryview(bytearray(SPEC.raw_bytes)) for _ in keys]
    with lossy(backend) as store:
        mine = streamer(store)
        with mine.stream(chunks(keys), recompute=Engine(), into=rooms) as stream:
            list(stream)
            assert store.pool.stats().in_use == 0
        for key, room in zip(keys, rooms, strict=True):
            assert bytes(room) == masked(payload(key, SPEC.raw_bytes), 2)
        with pytest.raises(ConfigError, match="do not fit"):
            mine.stream(chunks(keys), into=rooms[1:])
        with pytest.raises(ConfigError, match="needs chunks"):
            mine.stream([])
        with pytest.raises(ConfigError, match=r"open kvstore\.Store"):
            Streamer(object())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="group"):
            Streamer(store, group_chunks=0)


def test_records_stored_raw_have_one_level() -> None:
    backend, keys = DictBackend(), chain(4)
    with store_over(backend) as store:
        fill(store, keys)
        with Streamer(store, prefill=SLOW, group_chunks=GROUP).stream(
            chunks(keys), recompute=Engine(), slo_s=1000.0
        ) as stream:
            for group in stream:
                assert group.level == 0
                for number, view in zip(group.chunks, group.views, strict=True):
                    assert bytes(view) == payload(keys[number], SPEC.raw_bytes)
        assert stream.report.levels == (0, 0)  # exact, so there is no reason to compute


def test_streams_of_several_threads_share_the_link(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    errors: list[BaseException] = []
    with lossy(backend) as store:
        mine = streamer(store, link=LinkShare())

        def one(turn: int) -> None:
            try:
                mixed = keys[turn % 4 :]
                with mine.stream(chunks(mixed), recompute=Engine()) as stream:
                    for group in stream:
                        if group.level is not None:
                            check(mixed, group.chunks, group.level, group.views)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(turn,)) for turn in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors
        assert mine.link.requests == 0
        assert mine.stats()["requests"] == 8
        until(lambda: store.pool.stats().in_use == 0)


def test_a_closed_store_says_so(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    store = lossy(backend)
    mine = streamer(store)
    with mine.stream(chunks(keys), recompute=Engine()) as stream:
        list(stream)
    store.close()
    stream = mine.stream(chunks(keys), recompute=Engine())
    with pytest.raises(ClosedError):
        list(stream)


def test_nothing_is_begun_behind_the_deadline(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store, None)
        with mine.stream(chunks(keys[:2])) as stream:
            list(stream)
        begun = time.monotonic()
        with mine.stream(chunks(keys), timeout=0.0) as stream:
            assert list(stream) == []
        assert time.monotonic() - begun < 10
        assert stream.report.levels == (-1,) * 4
