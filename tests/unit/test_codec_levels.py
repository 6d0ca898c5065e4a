"""Levels through the store: what is fetched and decoded for which want, refinement in place, and what lossy readers
and lossless ones may see."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.backend import Status
from kvstore.dropping import pack_positions
from kvstore.errors import ConfigError, PermanentError
from kvstore.keys import Key
from kvstore.layout import KVLayout
from kvstore.prefetch import LayerPlan, Prefetcher
from kvstore.record import build_record, kv_spec, parse_header
from kvstore.store import Item, Progress, Store, Want
from kvstore.targets import HeadMemo
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.corpus import corrupt_variants
from tests.faults.support import Unclosed, chain, payload, poisoned, soon, store_over
from tests.unit.level_codec import LevelCodec, LevelDecoder, level_codec, masked

LAYERS = 6
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=2, head_dim=32)
TOKENS = 64
SPEC = kv_spec(LAYOUT, "bfloat16", TOKENS)
SIZE = SPEC.sizes[0]


def items(keys: list[Key], **meta: Any) -> list[Item]:
    return [Item(key, SPEC.split(memoryview(payload(key, SPEC.raw_bytes))), SPEC, meta) for key in keys]


def level_bytes(record: bytes, level: int, first: int = 0, count: int = LAYERS) -> int:
    header = parse_header(record)
    return sum(s.length for s in header.segments if s.level == level and first <= s.layer < first + count)


def release(backend: FaultyBackend) -> None:
    """Let the call go on that hangs, or will."""
    while not backend.release():
        time.sleep(0.001)


@pytest.fixture
def codec() -> Iterator[LevelCodec]:
    with level_codec() as codec:
        yield codec


def lossy(*backends: Any, **options: Any) -> Store:
    return store_over(*backends, remote_serde="kvt", codec_profile="unused", **options)


@pytest.fixture
def stored(codec: LevelCodec) -> tuple[DictBackend, Key]:
    backend, (key,) = DictBackend(), chain(1)
    with lossy(Unclosed(backend)) as store:
        assert store.submit_put(items([key])).result()[0].status is Status.OK
    return backend, key


# Writing.


def test_records_are_level_major(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    header = parse_header(backend.records[key], key=key)
    assert (header.layers, header.levels, header.raw_bytes) == (LAYERS, 3, SPEC.raw_bytes)
    assert [(s.level, s.layer) for s in header.segments] == [(v, n) for v in range(3) for n in range(LAYERS)]


def test_the_codec_is_told_what_spec_and_meta_say(codec: LevelCodec) -> None:
    (key, other, third) = chain(3)
    kept = [*range(0, 2 * TOKENS, 2)]
    with lossy(DictBackend()) as store:
        full = items([key], tokens=[64, 128], rope="none", dtype="bf16")
        reduced = items([other], tokens=[64, 192], positions=pack_positions(kept, 128), rope="applied")
        assert all(outcome.ok for outcome in store.submit_put(full + reduced + items([third])).result())
    told = {(about.layer, about.start, about.rope): about for about in codec.seen}
    assert len(told) == len(codec.seen) == 3 * LAYERS
    about = told[5, 64, "none"]
    assert (about.itemsize, about.layout, about.dtype, about.tokens) == (2, LAYOUT, "bfloat16", TOKENS)
    assert about.positions is None
    assert about.token_positions().tolist() == [*range(64, 128)]  # type: ignore[union-attr]
    about = told[0, 64, "applied"]
    assert about.positions.tolist() == [64 + n for n in kept]  # type: ignore[union-attr]
    assert told[0, None, None].token_positions() is None


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"tokens": [0, 63]}, "meta tokens say that the record holds 63 tokens, but its spec says 64"),
        ({"tokens": [0, 128], "positions": pack_positions([1, 2], 128)}, "tokens and positions say .* holds 2 tokens"),
        ({"tokens": [5, 4]}, "meta tokens"),
        ({"tokens": "0-64"}, "meta tokens"),
        ({"tokens": [0, True]}, "meta tokens"),
        ({"tokens": [-64, 0]}, "meta tokens"),
        ({"positions": b"\xff" * 8}, "meta positions needs meta tokens"),
        ({"tokens": [0, 64], "positions": [1, 2]}, "meta positions must be bytes"),
        ({"tokens": [0, 64], "positions": b"\xff" * 9}, "one bit for each of 64"),
        ({"rope": "sideways"}, "meta rope='sideways'"),
        ({"dtype": "float32"}, "spec is of bfloat16, but meta says dtype 'float32'"),
    ],
)
def test_what_meta_and_spec_do_not_agree_on_is_not_stored(codec: LevelCodec, meta: dict[str, Any], says: str) -> None:
    (key,) = chain(1)
    with lossy(DictBackend()) as store:
        (outcome,) = store.submit_put(items([key], **meta)).result()
        assert outcome.status is Status.ERROR
        with pytest.raises(ConfigError, match=says):
            raise outcome.error  # type: ignore[misc]
        assert store.submit_lookup([key]).result() == 0


def test_opaque_records_are_stored_raw(codec: LevelCodec) -> None:
    backend = DictBackend()
    with lossy(backend) as store:
        assert all(outcome.ok for outcome in store.put_many({"a": b"x" * 100_000}))
        assert store.get_many(["a"]) == [b"x" * 100_000]
        (record,) = backend.records.values()
        assert {s.codec for s in parse_header(record).segments} == {0}


# Reading.


@pytest.mark.parametrize("level", [0, 1, 2, 3, 255, None])
@pytest.mark.parametrize("run", [(0, LAYERS), (0, 2), (3, 2), (5, 1)])
def test_levels_and_layers(stored: tuple[DictBackend, Key], level: int | None, run: tuple[int, int]) -> None:
    backend, key = stored
    first, count = run
    whole = payload(key, SPEC.raw_bytes)
    expected = b"".join(masked(whole, 2 if level is None else min(level, 2))[n * SIZE :][:SIZE] for n in range(LAYERS))
    with lossy(Unclosed(backend)) as store:
        for _ in range(2):  # the second one knows how long records are
            (got,) = poisoned(1, count * SIZE)
            (outcome,) = store.submit_get([Want(key, memoryview(got), SPEC, first, count, level=level)]).result()
            assert (outcome.status, outcome.nbytes) == (Status.OK, count * SIZE)
            assert got == expected[first * SIZE :][: count * SIZE]


def test_codec_level_is_the_default(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    whole = payload(key, SPEC.raw_bytes)
    with lossy(Unclosed(backend), codec_level=0) as store:
        for level, expected in ((None, 0), (1, 1), (255, 2)):
            (got,) = poisoned(1, SPEC.raw_bytes)
            assert store.submit_get([Want(key, memoryview(got), SPEC, level=level)]).result()[0].ok
            assert got == masked(whole, expected)


@pytest.mark.parametrize("level", [-1, 256, True, 1.0, "0"])
def test_bad_levels_are_refused(stored: tuple[DictBackend, Key], level: Any) -> None:
    with lossy(Unclosed(stored[0])) as store, pytest.raises(ConfigError, match="level"):
        store.submit_get([Want(stored[1], memoryview(bytearray(SPEC.raw_bytes)), SPEC, level=level)])


def test_a_coarse_read_does_not_fetch_the_rest(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    coarse = level_bytes(backend.records[key], 0)
    faulty = Unclosed(backend)
    with lossy(faulty) as store:
        fetched = []
        for _ in range(3):
            before, calls = store.stats().get("get_fetched_bytes", 0), len(faulty.calls)
            assert (
                store.submit_get([Want(key, memoryview(poisoned(1, SPEC.raw_bytes)[0]), SPEC, level=0)]).result()[0].ok
            )
            fetched.append((store.stats()["get_fetched_bytes"] - before, len(faulty.calls) - calls))
        assert fetched[0][1] == 2  # the header, then all of level 0 in one
        assert [calls for _, calls in fetched[1:]] == [1, 1]  # how long it is, is known by then
        assert all(nbytes <= coarse + SPEC.data_offset + 64 * LAYERS for nbytes, _ in fetched)


def test_neighbours_are_read_in_one_range(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    faulty = Unclosed(backend)
    with lossy(faulty) as store:
        faulty.calls.clear()
        (got,) = poisoned(1, 3 * SIZE)
        assert store.submit_get([Want(key, memoryview(got), SPEC, 2, 3)]).result()[0].ok
        head, levels = (call for call in faulty.calls if call.operation == "get")
        assert (len(head.keys), len(levels.keys)) == (1, 3)  # a range per level


def test_flights_of_different_levels_do_not_merge(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    whole = payload(key, SPEC.raw_bytes)
    hung = FaultyBackend(Unclosed(backend), {"get": [Fault.hang()]})
    with lossy(hung) as store:
        got = poisoned(5, SPEC.raw_bytes)
        levels = (0, 0, 1, None, 2)
        done = [
            store.submit_get([Want(key, memoryview(dst), SPEC, level=level)], deadline=soon())
            for dst, level in zip(got, levels, strict=True)
        ]
        release(hung)
        assert all(each.result()[0].ok for each in done)
        assert [bytes(each) for each in got] == [masked(whole, 2 if n is None else n) for n in levels]
        assert store.stats()["get_joined"] <= 2  # of 0 and 0; of None and 2, which is all there is


def test_a_pool_that_holds_little_still_reads_records_of_many_levels(codec: LevelCodec) -> None:
    """Layers are brought with all their levels, some layers at a time."""
    layout = KVLayout(num_layers=40, num_kv_heads=8, head_dim=64)
    spec = kv_spec(layout, "float16", 64)
    assert spec.raw_bytes > 4 << 20
    (key,) = chain(1)
    raw = payload(key, spec.raw_bytes)
    with lossy(DictBackend(), buffer_pool_bytes=1 << 20) as store:
        assert store.submit_put([Item(key, spec.split(memoryview(raw)), spec)]).result()[0].ok
        for level in (None, 1):
            got = bytearray(spec.raw_bytes)
            assert store.submit_get([Want(key, memoryview(got), spec, level=level)]).result()[0].ok
            assert got == masked(raw, 2 if level is None else level)


# Refinement in place.


@pytest.mark.parametrize("steps", [(0, 1, 2), (0, 2), (1, 2), (2,), (0, 0, 1), (None,), (0, None), (0, 9)])
@pytest.mark.parametrize("run", [(0, LAYERS), (2, 3)])
def test_refinement_in_place_fetches_only_what_is_missing(
    stored: tuple[DictBackend, Key], steps: tuple[int | None, ...], run: tuple[int, int]
) -> None:
    backend, key = stored
    first, count = run
    whole = payload(key, SPEC.raw_bytes)[first * SIZE :][: count * SIZE]
    with lossy(Unclosed(backend)) as store:
        progress, (got,) = Progress(), poisoned(1, count * SIZE)
        reached = -1
        for step in steps:
            level = 2 if step is None else min(step, 2)
            before = progress.fetched_bytes
            done = store.submit_get([Want(key, memoryview(got), SPEC, first, count, level=step, progress=progress)])
            assert done.result()[0].ok
            assert done.settled(10)
            assert got == masked(whole, level)
            assert (progress.level, progress.complete) == (level, level == 2)
            new = sum(level_bytes(backend.records[key], n, first, count) for n in range(reached + 1, level + 1))
            fetched = progress.fetched_bytes - before
            head = SPEC.data_offset if reached < 0 else 0
            assert new <= fetched <= new + head + 64 * count * 3
            reached = max(reached, level)
        assert store.stats()["get_fetched_bytes"] == progress.fetched_bytes
        assert all(decoder is None for decoder in progress.decoders) == progress.complete


def test_a_lower_level_than_there_is_changes_nothing(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    with lossy(Unclosed(backend)) as store:
        progress, (got,) = Progress(), poisoned(1, SPEC.raw_bytes)
        for level in (1, 0):
            assert store.submit_get([Want(key, memoryview(got), SPEC, level=level, progress=progress)]).result()[0].ok
            assert got == masked(payload(key, SPEC.raw_bytes), 1)
            assert progress.level == 1


def test_a_progress_belongs_to_one_read(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    hung = FaultyBackend(Unclosed(backend), {"get": [Fault.hang()]})
    with lossy(hung) as store:
        progress, (got, other) = Progress(), poisoned(2, SPEC.raw_bytes)
        want = Want(key, memoryview(got), SPEC, level=0, progress=progress)
        done = store.submit_get([want], deadline=soon())
        with pytest.raises(ConfigError, match="one read at a time"):
            store.submit_get([want])
        with pytest.raises(ConfigError, match="one read at a time"):
            store.submit_get([want, want])
        release(hung)
        assert done.result()[0].ok
        assert done.settled(10)
        for wrong in (want._replace(dst=memoryview(other)), want._replace(key=chain(2)[1])):
            with pytest.raises(ConfigError, match="belongs to one record"):
                store.submit_get([wrong])
        with pytest.raises(ConfigError, match="Progress is needed"):
            store.submit_get([want._replace(progress=object())])  # type: ignore[arg-type]
        assert store.submit_get([want._replace(level=1)]).result()[0].ok
        fresh = want._replace(dst=memoryview(other), progress=Progress())
        with pytest.raises(ConfigError, match="one read at a time"):
            store.submit_get([fresh, fresh])
        assert store.submit_get([fresh]).result()[0].ok  # what was refused holds nothing


def test_a_failed_refinement_leaves_the_coarse_level(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    whole = payload(key, SPEC.raw_bytes)
    faulty = FaultyBackend(Unclosed(backend))
    with lossy(faulty) as store:
        progress, (got,) = Progress(), poisoned(1, SPEC.raw_bytes)
        want = Want(key, memoryview(got), SPEC, level=0, progress=progress)
        assert store.submit_get([want]).result()[0].ok
        faulty.push(Fault.error(), operation="get")
        outcome = store.submit_get([want._replace(level=2)]).result()[0]
        assert outcome.status is Status.ERROR
        assert (progress.level, got) == (0, masked(whole, 0))
        assert store.submit_get([want._replace(level=2)]).result()[0].ok
        assert (progress.level, got) == (2, whole)


@pytest.mark.parametrize("error", [PermanentError("no library"), IndexError("a bug")])
def test_a_decoder_that_fails_half_way_leaves_nothing_to_go_on_from(
    stored: tuple[DictBackend, Key], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    backend, key = stored

    def broken(self: LevelDecoder, part: memoryview) -> None:
        np.frombuffer(self.dst, np.uint8)[::2] = 0x5A
        raise error

    with lossy(Unclosed(backend)) as store:
        progress, (got,) = Progress(), poisoned(1, SPEC.raw_bytes)
        want = Want(key, memoryview(got), SPEC, level=0, progress=progress)
        assert store.submit_get([want]).result()[0].ok
        with monkeypatch.context() as patch:
            patch.setattr(LevelDecoder, "feed", broken)
            assert store.submit_get([want._replace(level=1)]).result()[0].status is Status.ERROR
        assert (progress.level, progress.complete) == (None, False)
        assert store.submit_get([want._replace(level=1)]).result()[0].ok
        assert got == masked(payload(key, SPEC.raw_bytes), 1)


def test_what_holds_no_level_yet_may_be_used_for_something_else(codec: LevelCodec) -> None:
    """A read that failed half-way through level 0 leaves undefined memory; the next one begins anew."""
    spec = kv_spec(KVLayout(num_layers=40, num_kv_heads=8, head_dim=64), "float16", 64)
    (key,), faulty = chain(1), FaultyBackend(DictBackend())
    raw = payload(key, spec.raw_bytes)
    with lossy(faulty, buffer_pool_bytes=1 << 20) as store:  # some layers at a time
        assert store.submit_put([Item(key, spec.split(memoryview(raw)), spec)]).result()[0].ok
        progress, (got,) = Progress(), poisoned(1, spec.raw_bytes)
        want = Want(key, memoryview(got), spec, level=0, progress=progress)
        for fault in (Fault.ok(), Fault.ok(), Fault.ok(), Fault.error()):  # the header takes two reads
            faulty.push(fault, operation="get")
        done = store.submit_get([want])
        assert done.result()[0].status is Status.ERROR
        assert done.settled(10)
        assert set(got[: spec.sizes[0]]) != {0xA5}  # something came
        assert progress.level is None
        got[:] = bytes(len(got))
        assert store.submit_get([want]).result()[0].ok
        assert got == masked(raw, 0)


def test_a_pool_buffer_of_a_progress_is_pinned_while_it_is_read(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    with lossy(Unclosed(backend)) as store, store.pool.acquire(SPEC.raw_bytes, 5) as buffer:
        progress = Progress()
        for level in (0, 1):
            want = Want(key, buffer.view, SPEC, level=level, progress=progress, hold=buffer)
            assert store.submit_get([want]).result()[0].ok
            assert bytes(buffer.view) == masked(payload(key, SPEC.raw_bytes), level)


def test_progress_over_a_store_of_raw_records() -> None:
    (key,) = chain(1)
    with store_over(DictBackend()) as store:
        assert store.submit_put(items([key])).result()[0].ok
        progress, (got,) = Progress(), poisoned(1, SPEC.raw_bytes)
        for _ in range(2):
            assert store.submit_get([Want(key, memoryview(got), SPEC, level=0, progress=progress)]).result()[0].ok
            assert got == payload(key, SPEC.raw_bytes)
            assert (progress.level, progress.complete) == (0, True)
        other = poisoned(1, SPEC.raw_bytes)[0]  # others in the same batch go their usual way
        both = [
            Want(key, memoryview(other), SPEC),
            Want(key, memoryview(got), SPEC, level=3, progress=Progress()),
        ]
        assert all(outcome.ok for outcome in store.submit_get(both).result())
        assert other == got == payload(key, SPEC.raw_bytes)


# Damage, and readers who must not see it.


def flip(backend: DictBackend, key: Key, level: int, layer: int) -> None:
    record = bytearray(backend.records[key])
    segment = next(s for s in parse_header(bytes(record)).segments if (s.level, s.layer) == (level, layer))
    record[segment.offset + 7] ^= 1
    backend.records[key] = bytes(record)


@pytest.mark.parametrize("level", [0, 2])
def test_a_damaged_level_is_quarantined_and_heals(stored: tuple[DictBackend, Key], level: int) -> None:
    backend, key = stored
    flip(backend, key, level, 3)
    with lossy(Unclosed(backend)) as store:
        (got,) = poisoned(1, SPEC.raw_bytes)
        if level == 2:  # who does not read it does not see it
            assert store.submit_get([Want(key, memoryview(got), SPEC, level=1)]).result()[0].ok
        assert store.submit_get([Want(key, memoryview(got), SPEC)]).result()[0].status is Status.MISS
        stats = store.stats()
        assert (stats["second_looks"], stats["corrupt_records"]) == (1, 1)
        assert store.submit_put(items([key])).result()[0].status is Status.OK
        assert store.submit_get([Want(key, memoryview(got), SPEC)]).result()[0].ok
        assert got == payload(key, SPEC.raw_bytes)


@pytest.mark.parametrize("level", [None, 0])
def test_no_damaged_record_gives_wrong_bytes(stored: tuple[DictBackend, Key], level: int | None) -> None:
    backend, key = stored
    record, other = backend.records[key], chain(2)[1]
    with lossy(Unclosed(backend)) as store:
        assert store.submit_put(items([other])).result()[0].ok
        expected = masked(payload(key, SPEC.raw_bytes), 2 if level is None else level)
        seen = 0
        for name, data in corrupt_variants(record, backend.records[other]):
            seen += 1
            backend.records[key] = data
            for progress in (None, Progress()):
                got = bytearray(SPEC.raw_bytes)
                want = Want(key, memoryview(got), SPEC, level=level, progress=progress)
                (outcome,) = store.submit_get([want]).result()
                if outcome.ok:
                    assert got == expected, name
                    assert level == 0 or not name.startswith(("flip", "swap", "fill", "cut")), name
                else:
                    assert outcome.status is Status.MISS, (name, outcome.error)
                backend.records[key] = data
        assert seen > 80
        assert store.pool.stats().in_use == 0


@pytest.mark.parametrize("careful", [False, True])
def test_a_read_that_came_wrong_once_is_looked_at_again(stored: tuple[DictBackend, Key], careful: bool) -> None:
    backend, key = stored
    whole = payload(key, SPEC.raw_bytes)
    faulty = FaultyBackend(Unclosed(backend))
    with lossy(faulty) as store:
        progress, (got,) = (Progress() if careful else None), poisoned(1, SPEC.raw_bytes)
        want = Want(key, memoryview(got), SPEC, level=0, progress=progress)
        assert store.submit_get([want]).result()[0].ok
        faulty.push(Fault.flip(3), operation="get")
        assert store.submit_get([want._replace(level=2)]).result()[0].ok
        assert got == whole
        assert store.stats()["second_looks"] == 1
        assert "corrupt_records" not in store.stats()
        if progress is not None:
            assert (progress.level, progress.complete) == (2, True)


def test_damage_makes_a_progress_undefined_until_it_is_read_anew(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    with lossy(Unclosed(backend)) as store:
        progress, (got,) = Progress(), poisoned(1, SPEC.raw_bytes)
        want = Want(key, memoryview(got), SPEC, level=0, progress=progress)
        assert store.submit_get([want]).result()[0].ok
        flip(backend, key, 1, 0)
        assert store.submit_get([want._replace(level=1)]).result()[0].status is Status.MISS
        assert (progress.level, progress.complete) == (None, False)
        assert store.submit_put(items([key])).result()[0].ok
        assert store.submit_get([want._replace(level=1)]).result()[0].ok
        assert got == masked(payload(key, SPEC.raw_bytes), 1)


@pytest.mark.parametrize("serde", ["raw", "lz4", "shuffle-zstd", "int8"])
def test_a_store_of_another_codec_never_gets_lossy_bytes(stored: tuple[DictBackend, Key], serde: str) -> None:
    backend, key = stored
    with store_over(Unclosed(backend), remote_serde=serde) as store:
        (got,) = poisoned(1, SPEC.raw_bytes)
        wants = [Want(key, memoryview(got), SPEC), Want(key, memoryview(bytearray(SIZE)), SPEC, 2, 1)]
        assert [outcome.status for outcome in store.submit_get(wants).result()] == [Status.MISS] * 2
        assert store.stats()["wrong_codec"] == 2
        assert "corrupt_records" not in store.stats()
        assert serde == "raw" or set(got) == {0xA5}
    assert key in backend.records
    assert not backend.quarantined


def test_an_unknown_profile_is_a_miss(stored: tuple[DictBackend, Key], codec: LevelCodec) -> None:
    backend, key = stored
    with lossy(Unclosed(backend)) as store:
        codec.profiles.clear()
        (got,) = poisoned(1, SPEC.raw_bytes)
        for progress in (None, Progress()):
            want = Want(key, memoryview(got), SPEC, progress=progress)
            assert store.submit_get([want]).result()[0].status is Status.MISS
        assert store.stats()["unknown_profiles"] == 2
        assert not backend.quarantined
        codec.profiles.add("p")
        assert store.submit_get([Want(key, memoryview(got), SPEC)]).result()[0].ok


def test_a_codec_that_fails_is_an_outcome(stored: tuple[DictBackend, Key], codec: LevelCodec) -> None:
    backend, key = stored

    def broken(parts: Any, dst: Any) -> None:
        raise IndexError("a bug")

    codec.decode_into = broken  # type: ignore[method-assign]
    with lossy(Unclosed(backend)) as store:
        (outcome,) = store.submit_get([Want(key, memoryview(bytearray(SPEC.raw_bytes)), SPEC)]).result()
        assert outcome.status is Status.ERROR
        assert "IndexError" in str(outcome.error)
    assert not backend.quarantined


def test_leases_refuse_records_with_levels(stored: tuple[DictBackend, Key]) -> None:
    backend, key = stored
    with lossy(Unclosed(backend)) as store:
        assert store.submit_lease([key]).result() == [None]
        (header,) = store.submit_heads([key]).result()
        assert header is not None
        assert header.levels == 3
    assert not backend.quarantined


def test_a_memo_saves_reading_the_header_again_and_does_no_harm_when_it_is_wrong(
    stored: tuple[DictBackend, Key],
) -> None:
    backend, key = stored
    whole, faulty, memo = payload(key, SPEC.raw_bytes), Unclosed(backend), HeadMemo()
    with lossy(faulty) as store:

        def read(layer: int) -> int:
            before, got = len(faulty.calls), bytearray(SIZE)
            want = Want(key, memoryview(got), SPEC, layer, 1, memo=memo)
            assert store.submit_get([want]).result()[0].ok
            assert got == whole[layer * SIZE :][:SIZE]
            return len(faulty.calls) - before

        assert [read(layer) for layer in (1, 2, 5)] == [2, 1, 1]
        record = backend.records[key]  # the same values, stored by somebody else: everything lies elsewhere
        header = parse_header(record)
        data = {s.layer: bytes(record[s.offset : s.offset + s.length]) for s in header.segments[:LAYERS]}
        finer = [
            (s.layer, s.level, memoryview(record)[s.offset : s.offset + s.length]) for s in header.segments[LAYERS:]
        ]
        views = [memoryview(data[layer]) for layer in range(LAYERS)]
        moved = build_record(key, SPEC, views, meta={"x": b"x" * 5000}, codecs=[6] * LAYERS, refinements=finer)
        backend.records[key] = b"".join(moved)
        assert read(3) > 1
        assert store.stats()["second_looks"] == 1
        assert not backend.quarantined


# Keys, prefetching.


def test_another_models_profile_is_pointed_at(codec: LevelCodec, caplog: pytest.LogCaptureFixture) -> None:
    codec.profile.model = "org/model"
    with lossy(DictBackend()) as store:
        store.key_context(model="org/model", layout=LAYOUT, dtype="bf16")
        store.key_context(model="model", layout=LAYOUT, dtype="bf16")  # as integrations call a local folder
        assert "org/model" not in caplog.text
        for _ in range(2):
            store.key_context(model="org/other", layout=LAYOUT, dtype="bf16")
    (record,) = [record for record in caplog.records if "org/other" in record.message]
    assert "org/model" in record.message


def test_the_profile_is_in_the_key_and_the_level_is_not(codec: LevelCodec) -> None:
    with lossy(DictBackend()) as store, lossy(DictBackend(), codec_level=0) as coarse, store_over(DictBackend()) as raw:
        contexts = [s.key_context(model="m", layout=LAYOUT, dtype="bf16") for s in (store, coarse, raw)]
    assert (contexts[0].codec, contexts[0].codec_profile) == ("kvt", "00112233445566aa")
    assert contexts[0].digest == contexts[1].digest != contexts[2].digest
    assert contexts[2].codec_profile is None


@pytest.mark.parametrize("level", [None, 0, 1])
def test_prefetching_a_level(codec: LevelCodec, level: int | None) -> None:
    keys = chain(3)
    with lossy(DictBackend()) as store, Prefetcher(store) as prefetcher:
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())
        plan = LayerPlan.of(keys, SPEC, level=level)
        seen: list[int] = []
        with prefetcher.start(plan) as stream:
            for part in stream.parts():
                for layer in range(part.first, part.first + part.count):
                    seen.append(layer)
                    for key, view in zip(keys, part.views(layer), strict=True):
                        raw = masked(payload(key, SPEC.raw_bytes), 2 if level is None else level)
                        assert view == raw[layer * SIZE :][:SIZE]
        assert seen == [*range(LAYERS)]


def test_readers_of_all_kinds_at_once(codec: LevelCodec) -> None:
    backend, keys = DictBackend(), chain(6)
    with lossy(backend) as store:
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())
        trouble: list[str] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(20):
                key, level = keys[random.integers(6)], int(random.integers(3))
                progress, got = Progress(), bytearray(SPEC.raw_bytes)
                for step in (level, 2):
                    done = store.submit_get([Want(key, memoryview(got), SPEC, level=step, progress=progress)])
                    if not done.result()[0].ok or got != masked(payload(key, SPEC.raw_bytes), step):
                        trouble.append(f"{key!r} {step}")
                    done.settled(10)
                plain = bytearray(SPEC.raw_bytes)
                if not store.submit_get([Want(key, memoryview(plain), SPEC, level=level)]).result()[0].ok:
                    trouble.append("plain")
                if plain != masked(payload(key, SPEC.raw_bytes), level):
                    trouble.append("plain bytes")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not trouble
        assert store.pool.stats().in_use == 0
