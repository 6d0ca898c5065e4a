"""Attacks on the streamer: what is cancelled, dropped, closed or lies gives everything back and slows nobody down."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore.codec.base import Encoded, SegmentInfo, stored_raw
from kvstore.completion import CancelledError
from kvstore.errors import ClosedError, ConfigError
from kvstore.keys import Key
from kvstore.stream import (
    COMPUTED,
    LinkShare,
    Policy,
    PrefillModel,
    TextPart,
    break_even_tokens,
    load_is_faster,
)
from kvstore.stream.course import Course
from kvstore.stream.planner import plan
from kvstore.stream.streamer import Streamer
from kvstore.stream.terms import Group, Speeds, Standing, Step
from kvstore.targets import Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import until
from tests.faults.support import Unclosed, chain, payload
from tests.unit.level_codec import LevelCodec, level_codec, masked
from tests.unit.test_stream_streamer import COUNT, LOAD, QUICK, SPEC, Engine, check, chunks, fill, lossy, streamer


@pytest.fixture(autouse=True)
def codec() -> Iterator[LevelCodec]:
    with level_codec() as codec:
        yield codec


@pytest.fixture
def stored() -> tuple[DictBackend, list[Key]]:
    backend, keys = DictBackend(), chain(COUNT)
    with lossy(Unclosed(backend)) as store:
        fill(store, keys)
    return backend, keys


# Cancelled, dropped, closed.


def test_cancelling_while_a_group_is_computed_begins_nothing_more(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    hangs = FaultyBackend(backend)
    begun: list[int] = []
    with lossy(hangs) as store:
        mine = streamer(store, PrefillModel(1.0), policy=Policy())  # a group takes 64 s to compute, by that
        with mine.stream(chunks(keys[:2]), policy=LOAD) as stream:  # the sizes are known from now on
            list(stream)
        submit = store.submit_get

        def watched(wants: Sequence[Want], **more: Any) -> Any:
            begun.append(keys.index(wants[0].key))
            hangs.push(*[Fault.hang()] * 8, operation="get")
            return submit(wants, **more)

        def compute(part: TextPart) -> None:
            assert (part.group, bool(begun)) == (0, True)
            stream.cancel()
            begun.clear()

        store.submit_get = watched  # type: ignore[method-assign]
        with mine.stream(chunks(keys), recompute=compute, slo_s=100.0) as stream:
            with pytest.raises(CancelledError):
                list(stream)
            assert begun == []
            assert mine.link.requests == 0
        hangs._by_operation["get"].clear()
        until(lambda: hangs.release() >= 0 and store.pool.stats().in_use == 0)
        assert mine.stats()["requests"] == 2


def test_a_stream_that_is_dropped_leaves_the_link(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    hangs = FaultyBackend(backend)
    with lossy(hangs) as store:
        mine = streamer(store)
        with mine.stream(chunks(keys[:2]), recompute=Engine()) as stream:  # the sizes are known from now on
            list(stream)
        mine.link = LinkShare()
        hangs.push(Fault.hang(then=Fault.ok()), operation="get")
        stream = mine.stream(chunks(keys[:2]), recompute=Engine(), slo_s=1000.0)
        stream._course.hold(0)  # somebody looks at it: its refinement waits, and the stream stays on the link
        hangs.wait_hung()
        hangs.release()
        course = stream._course
        until(lambda: course.standing[0].level == 0)
        assert mine.link.requests == 1
        del stream
        until(lambda: bool(gc.collect() + 1) and store.pool.stats().in_use == 0)
        assert mine.link.requests == 0


def test_an_engine_that_fails_leaves_the_link(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored

    def broken(_: TextPart) -> None:
        raise MemoryError("no room on the device")

    with lossy(backend) as store:
        mine = streamer(store, PrefillModel(1e-3), policy=Policy())
        stream = mine.stream(chunks(keys), recompute=broken, slo_s=0.2)
        with pytest.raises(MemoryError, match="no room"):
            list(stream)
        until(lambda: store.pool.stats().in_use == 0)
        assert mine.link.requests == 0


def test_a_store_that_is_closed_in_the_middle_ends_the_stream(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    slow = FaultyBackend(backend)
    store = lossy(slow)
    mine = streamer(store, None)
    with mine.stream(chunks(keys[:2])) as stream:
        list(stream)
    slow.push(*[Fault.hang()] * 8, operation="get")
    begun = time.monotonic()
    with mine.stream(chunks(keys), timeout=300.0) as stream:
        slow.wait_hung()
        closer = threading.Thread(target=lambda: store.close(drain=False, timeout=0.1))
        closer.start()
        with contextlib.suppress(ClosedError):  # or it ends with what is missing, if that is heard of first
            assert list(stream) == []
        assert stream.report.violated
        assert len(stream.missing) == 4
        closer.join()
    assert mine.link.requests == 0
    assert time.monotonic() - begun < 200
    until(lambda: slow.release() >= 0 and store.pool.stats().pinned == 0)


def test_a_group_that_is_computed_beyond_the_deadline_is_reported(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    for key in keys[:2]:
        del backend.records[key]
    with lossy(backend) as store:
        mine = streamer(store, PrefillModel(1e-3), policy=Policy(text="never"))

        def compute(part: TextPart) -> None:
            stream._course._deadline_s = 0.0  # it passes meanwhile; something ends, and the course is asked what to do
            stream.look_again()

        with mine.stream(chunks(keys[:2]), recompute=compute) as stream:
            assert [group.group for group in stream] == [0]
            assert stream.missing == []
            assert stream.report.levels == (COMPUTED,)
            assert stream.report.computed_tokens == 2 * SPEC.tokens
        assert mine.stats()["computed_tokens"] == 2 * SPEC.tokens


# Records that are other than was thought.


def test_records_with_fewer_levels_than_were_thought(codec: LevelCodec) -> None:
    """A record whose values could not be encoded is raw: it has one level. The others are still refined, and nobody
    takes the link to be down since a level brought no bytes."""
    backend, keys = DictBackend(), chain(COUNT)
    odd = {payload(keys[n], SPEC.raw_bytes)[:64] for n in (3, 6)}
    encode = codec.encode
    names: set[bytes] = set()

    def sometimes_raw(raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        if about.layer == 0:
            names.discard(b"now")
            if bytes(raw[:64]) in odd:
                names.add(b"now")
        return stored_raw(raw) if names else encode(raw, about)

    with lossy(Unclosed(backend)) as store:
        for number, key in enumerate(keys):  # one by one, so that layers of records do not mix
            codec.encode = sometimes_raw  # type: ignore[method-assign]
            fill(store, [key])
            assert bool(names) == (number in (3, 6))
    with lossy(backend) as store:
        mine = streamer(store, None)
        for _ in range(2):  # the second request knows sizes from the first one
            with mine.stream(chunks(keys), slo_s=1000.0) as stream:
                for group in stream:
                    assert group.level is not None
                    for number, view in zip(group.chunks, group.views, strict=True):
                        data = payload(keys[number], SPEC.raw_bytes)
                        assert bytes(view) == (data if number in (3, 6) else masked(data, group.level))
                assert stream.report.levels == (2,) * 4
            assert mine.link.bytes_per_s
        assert mine.link.requests == 0


@pytest.mark.parametrize("number", [0, COUNT - 1])
def test_a_first_record_with_one_level_does_not_hide_the_levels_of_the_others(codec: LevelCodec, number: int) -> None:
    backend, keys = DictBackend(), chain(COUNT)
    encode = codec.encode
    with lossy(Unclosed(backend)) as store:
        for index, key in enumerate(keys):
            raw = index == number
            codec.encode = (lambda raw, about: stored_raw(raw)) if raw else encode  # type: ignore[method-assign]
            fill(store, [key])
    with lossy(backend) as store:
        mine = streamer(store, None)
        with mine.stream(chunks(keys), policy=Policy(max_level=1)) as stream:
            for group in stream:
                assert group.level is not None
                for index, view in zip(group.chunks, group.views, strict=True):
                    data = payload(keys[index], SPEC.raw_bytes)
                    assert bytes(view) == (data if index == number else masked(data, group.level))
            assert stream.report.levels == (1,) * 4


# Numbers.


@pytest.mark.parametrize("slo", [0.0, -1.0, math.nan])
def test_an_slo_that_is_none_is_refused_before_anything_is_asked(
    stored: tuple[DictBackend, list[Key]], slo: float
) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store, None)
        store.submit_heads = None  # type: ignore[assignment,method-assign]
        with pytest.raises(ConfigError, match="slo_s"):
            mine.stream(chunks(keys), slo_s=slo)
        with pytest.raises(ConfigError, match="timeout"):
            mine.stream(chunks(keys), timeout=math.nan)
        with pytest.raises(ConfigError, match="new_tokens"):
            mine.stream(chunks(keys), new_tokens=-1)
        assert mine.link.requests == 0


@pytest.mark.parametrize("slo", [1e-300, 1e300, math.inf])
def test_an_slo_that_is_tiny_or_huge(stored: tuple[DictBackend, list[Key]], slo: float) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store, None)
        with mine.stream(chunks(keys), slo_s=slo, timeout=math.inf) as stream:
            for group in stream:
                assert group.level is not None
                check(keys, group.chunks, group.level, group.views)
            assert stream.missing == []
            assert stream.report.violated == (slo < 1)


@pytest.mark.parametrize("costs", [(math.nan,), (-1.0,), (0.0, math.inf)])
def test_decoding_that_takes_no_time_that_there_is(costs: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="decode_s_per_token"):
        Course([Group(0, 8, (8,))], LinkShare(), decode_s_per_token=costs)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_link_that_brings_nothing_never_pays(rate: float) -> None:
    assert break_even_tokens(PrefillModel(1e-3, 1e-6), 100.0, rate) is None
    assert not load_is_faster(PrefillModel(1.0), 100, 1.0, rate)
    assert break_even_tokens(PrefillModel(1e-3, 1e-6), 100.0, math.inf) == 1


def test_a_transfer_without_bytes_says_nothing_of_the_link() -> None:
    link = LinkShare(1000.0, latency_s=0.0)
    transfer = link.begin(0, 1.0)
    assert link.share(2.0) == 1000.0
    assert link.overdue_at(transfer, 2.0) > 2.0
    link.end(transfer, 3.0)
    assert link.bytes_per_s == 1000.0
    other = link.begin(500, 3.0)
    link.end(link.begin(0, 3.0), 3.1)
    link.end(other, 3.5)
    assert link.bytes_per_s == pytest.approx(1000.0, rel=0.3)


@pytest.mark.parametrize("streams", [3, 8, 32])
def test_transfers_side_by_side_do_not_make_the_link_look_faster(streams: int) -> None:
    """All get their share of it at the same time, and end almost at once: the last ones did not come in no time."""
    rate, nbytes = 1e6, 10_000
    link = LinkShare(latency_s=0.0)
    for _ in range(streams):
        link.join()
    now = 0.0
    for turn in range(6):
        flights = [link.begin(nbytes, now) for _ in range(streams)]
        now += streams * nbytes / rate
        for number, flight in enumerate(flights):
            link.end(flight, now + number * 1e-5)
            assert link.bytes_per_s is not None
            assert link.bytes_per_s <= 1.25 * rate
            if turn >= 3:
                assert link.bytes_per_s >= rate / 2
        now += streams * 1e-5


def test_a_backend_in_trouble_leaves_the_text(stored: tuple[DictBackend, list[Key]]) -> None:
    """Also where the store raises errors: the text is there for that."""
    backend, keys = stored
    broken = FaultyBackend(backend)
    engine = Engine()
    with lossy(broken, on_error="raise") as store:
        broken.push(*[Fault.error()] * 64, operation="get")
        with streamer(store, PrefillModel(1e-3)).stream(chunks(keys), recompute=engine) as stream:
            list(stream)
            assert stream.report.levels == (COMPUTED,) * 4
            assert stream.missing == []
    assert [part.group for part in engine.parts] == [0, 1, 2, 3]


@pytest.mark.parametrize("slo", [None, 3.0])
def test_a_backend_that_hangs_leaves_the_text(stored: tuple[DictBackend, list[Key]], slo: float | None) -> None:
    """Also for who has heard nothing of the records yet, and sets no SLO."""
    backend, keys = stored
    hangs = FaultyBackend(backend)
    engine = Engine()
    with lossy(hangs) as store:
        hangs.push(*[Fault.hang()] * 64, operation="get")
        with streamer(store, QUICK).stream(chunks(keys), recompute=engine, slo_s=slo, timeout=6.0) as stream:
            list(stream)
            assert stream.report.levels == (COMPUTED,) * 4
        until(lambda: hangs.release() >= 0 and store.pool.stats().in_use == 0)
    assert [part.group for part in engine.parts] == [0, 1, 2, 3]


def test_nobody_waits_for_what_was_given_up_and_computed(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    hangs = FaultyBackend(backend)
    with lossy(hangs) as store:
        mine = streamer(store, QUICK)
        with mine.stream(chunks(keys[:2]), policy=Policy(text="never")) as stream:  # the sizes are known from now on
            list(stream)
        mine.link = LinkShare()  # but nothing of the link: the last group is asked for first, and then given up
        hangs.push(*[Fault.hang()] * 64, operation="get")
        begun = time.monotonic()
        with mine.stream(chunks(keys), recompute=lambda part: hangs.wait_hung(), slo_s=1000.0, timeout=300.0) as stream:
            list(stream)
            assert stream.report.levels == (COMPUTED,) * 4
            assert hangs.hung == 1
        assert time.monotonic() - begun < 20  # a twentieth of the SLO is kept for refinements that were given up
        hangs._by_operation["get"].clear()
        until(lambda: hangs.release() >= 0 and store.pool.stats().in_use == 0)


# Few tokens, many tokens.


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_groups_that_are_not_full(stored: tuple[DictBackend, list[Key]], count: int) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = Streamer(store, prefill=PrefillModel(1.0), policy=LOAD)  # groups of six chunks
        with mine.stream(chunks(keys[:count]), recompute=Engine(), slo_s=1000.0) as stream:
            seen: set[int] = set()
            for group in stream:
                assert group.level is not None
                check(keys, group.chunks, group.level, group.views)
                seen.update(group.chunks)
            assert seen == set(range(count))
            assert stream.report.loaded_tokens == count * SPEC.tokens


def test_text_that_is_longer_than_a_hundred_thousand_tokens_is_planned_quickly() -> None:
    """A course of 100 groups ends after a bounded number of plans."""
    groups = [Group(1536 * n, 1536, (1000, 2000, 3000)) for n in range(100)]
    course = Course(groups, LinkShare(1e5, latency_s=0.001), prefill=PrefillModel(1e-3), slo_s=5.0)
    course.begin(0.0)
    now, under_way = 0.0, []
    while not (found := course.decide(now)).finished:
        for step in found.load:
            course.started(step, now)
            under_way.append(step)
        if found.compute is not None:
            course.computing(found.compute, now)
            course.computed(found.compute, now + 1.536)
        now += 0.01
        if under_way:
            course.ended(under_way.pop(0), now, ok=True)
    assert course.ready
    assert course.report.plans < 1000


def test_metrics_of_the_store_count_streams(stored: tuple[DictBackend, list[Key]]) -> None:
    backend, keys = stored
    with lossy(backend) as store:
        mine = streamer(store)
        for slo in (1000.0, 1e-6):
            with mine.stream(chunks(keys), recompute=Engine(), slo_s=slo) as stream:
                list(stream)
        with streamer(store, QUICK, policy=Policy()).stream(chunks(keys), recompute=Engine(), slo_s=9.0) as stream:
            list(stream)
        value = store.metrics.value
        assert value("kvstore_stream_requests_total") == 3
        assert value("kvstore_stream_violations_total") == 1
        assert value("kvstore_stream_groups_total", "2") + value("kvstore_stream_groups_total", "0") == 8
        assert value("kvstore_stream_groups_total", "computed") == 4
        assert value("kvstore_stream_bytes_total", "loaded") == mine.stats()["loaded_bytes"]
        saved = value("kvstore_stream_seconds_total", "saved") - value("kvstore_stream_seconds_total", "lost")
        assert saved == pytest.approx(mine.stats()["saved_s"], rel=0.01)  # the third one saved or lost milliseconds
        assert "kvstore_stream_requests_total" in str(store.stats())


def test_what_can_only_be_computed_is_late_if_it_takes_too_long_whatever_the_link() -> None:
    groups = [Group(0, 100, (8,)), Group(100, 100, (8,))]
    states = [Standing(level=0, loadable=False), Standing(loadable=False)]
    for slo, meets in ((99.0, False), (101.0, True)):
        found = plan(
            groups, states, Speeds(None, prefill=PrefillModel(1.0)), remaining_s=slo, policy=Policy(safety=1.0)
        )
        assert (found.seconds, found.meets, found.compute) == (100.0, meets, (1,))


def test_steps_of_a_group_are_never_two_at_once() -> None:
    course = Course([Group(0, 8, (10, 20)), Group(8, 8, (10, 20))], LinkShare(100.0))
    course.begin(0.0)
    first = course.decide(0.0).load
    assert len({step.group for step in first}) == len(first) == 2
    for step in first:
        course.started(step, 0.0)
    assert course.decide(0.01).load == ()
    course.ended(first[0], 0.1, ok=True)
    assert all(isinstance(step, Step) and step.group != first[1].group for step in course.decide(0.1).load)
