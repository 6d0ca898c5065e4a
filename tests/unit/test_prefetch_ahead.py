"""Look-ahead from the waiting queue, and who goes first when memory is short."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvstore.errors import TransientError
from kvstore.prefetch import LayerPlan, Prefetcher
from kvstore.scheduler import Priority
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import until
from tests.faults.support import chain, soon, store_over
from tests.unit.prefetch_support import (
    CHUNKS,
    LAYER,
    LAYERS,
    SPEC,
    fill,
    filled,
    gone,
    plan,
    read_all,
    single,
)


def prompts(count: int) -> tuple[FaultyBackend, list[list[Any]]]:
    backend, first = filled()
    keys = [first, *(chain(CHUNKS, start=10_000 * n) for n in range(1, count))]
    for each in keys[1:]:
        fill(backend.inner, each)
    return backend, keys


def queued(keys: Any, **options: Any) -> LayerPlan:
    return LayerPlan.of(keys, SPEC, **options)


def quiet(prefetcher: Prefetcher) -> bool:
    """Nothing is under way, and nothing more is going to be."""
    return all(not state.loading for state in prefetcher._arbiter._streams)


def test_what_was_announced_is_not_read_again_when_the_job_begins() -> None:
    backend, (keys,) = prompts(1)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=40 * LAYER)
        prefetcher.announce([queued(keys)])
        until(lambda: prefetcher.stats()["used_bytes"] == LAYERS * LAYER and quiet(prefetcher))
        before = len(backend.calls_of("get"))
        assert before
        with prefetcher.start(plan(keys)) as stream:
            assert stream.ready(LAYERS - 1)
            assert read_all(stream, keys) == CHUNKS
        assert len(backend.calls_of("get")) == before
        assert prefetcher.stats()["announced"] == 0
        assert gone(prefetcher)


def test_the_queue_is_prefetched_by_deadline_and_within_its_share() -> None:
    backend, keys = prompts(4)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=40 * LAYER, lookahead_bytes=2 * LAYERS * LAYER)
        late, soonest, never, middle = (
            queued(k, deadline=d) for k, d in zip(keys, (soon(90), soon(10), None, soon(50)), strict=True)
        )
        prefetcher.announce([late, soonest, never, middle])
        until(lambda: prefetcher.stats()["used_bytes"] == 2 * LAYERS * LAYER and quiet(prefetcher))
        read = {number for number, each in enumerate(keys) if backend.count("get", each[0])}
        assert read == {1, 3}  # the two that are due first fill the share
        prefetcher.announce([late])  # the others have gone: their memory with them
        until(lambda: prefetcher.stats()["used_bytes"] == LAYERS * LAYER and quiet(prefetcher))
        assert backend.count("get", keys[0][0])
        prefetcher.announce([])
        until(lambda: gone(prefetcher))


def test_the_read_buffer_bounds_what_is_loaded_before_a_job() -> None:
    backend, (keys, other) = prompts(2)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=40 * LAYER)
        prefetcher._arbiter.speed.bytes_per_s = float(LAYER)  # a layer per second
        prefetcher._arbiter.speed.end = lambda *_: None  # type: ignore[method-assign]
        prefetcher.announce([queued(keys, compute_s=0.5), queued(other, compute_s=2.0)])
        # Half of it is short of the computation; of the other, all hides but the first layer.
        until(lambda: prefetcher.stats()["used_bytes"] == 7 * LAYER and quiet(prefetcher))
        states = list(prefetcher._arbiter._streams)
        assert [state.ahead // LAYER for state in states] == [6, 1]
        with prefetcher.start(plan(other, compute_s=2.0)) as stream:
            until(lambda: stream.state.ahead == 2 * LAYER)  # double buffering is enough
            assert quiet(prefetcher) or stream.state.loading <= 2
        prefetcher.close()
        until(lambda: gone(prefetcher))


def test_trouble_with_speculation_is_no_miss() -> None:
    backend, (keys,) = prompts(1)
    backend.push(*[Fault.ok(), Fault.error(), Fault.miss()], operation="get")
    with store_over(backend) as store:
        prefetcher = single(store)
        prefetcher.announce([queued(keys)])
        until(lambda: any(state.stalled for state in prefetcher._arbiter._streams))
        until(lambda: quiet(prefetcher))
        backend._by_operation["get"].clear()  # the miss, if the error came before it was asked for
        with prefetcher.start(plan(keys)) as stream:
            assert stream.hit_prefix == CHUNKS
            assert read_all(stream, keys) == CHUNKS
        until(lambda: gone(prefetcher))


def test_a_job_that_begins_while_its_speculation_is_under_way_joins_it() -> None:
    backend, (keys,) = prompts(1)
    backend.push(Fault.hang(), Fault.hang(), operation="get")
    with store_over(backend) as store:
        prefetcher = single(store)
        prefetcher.announce([queued(keys)])
        backend.wait_hung(2)
        with prefetcher.start(plan(keys)) as stream:
            until(lambda: store.stats().get("get_joined", 0) >= 2 * CHUNKS)
            backend.release()
            assert read_all(stream, keys) == CHUNKS
        until(lambda: gone(prefetcher))


def test_speculation_gives_way_to_what_is_waited_for() -> None:
    backend, (keys, other) = prompts(2)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=4 * LAYER, lookahead_bytes=4 * LAYER)
        prefetcher.announce([queued(keys)])
        until(lambda: prefetcher.stats()["used_bytes"] == 4 * LAYER and quiet(prefetcher))
        with prefetcher.start(plan(other)) as stream:
            assert read_all(stream, other) == CHUNKS
        assert prefetcher.stats()["revoked"] >= 1
        assert prefetcher.stats()["peak_bytes"] <= 4 * LAYER
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == CHUNKS
        until(lambda: gone(prefetcher))


def test_read_ahead_of_one_job_gives_way_to_another_that_waits() -> None:
    backend, (keys, other) = prompts(2)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=3 * LAYER)
        with prefetcher.start(plan(keys)) as idle:
            idle.wait(0)
            until(lambda: prefetcher.stats()["used_bytes"] == 3 * LAYER and quiet(prefetcher))
            with prefetcher.start(plan(other)) as stream:  # its engine thread does nothing meanwhile
                assert read_all(stream, other) == CHUNKS
            assert read_all(idle, keys) == CHUNKS
        until(lambda: gone(prefetcher))


def test_demand_is_asked_for_with_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, (keys, other) = prompts(2)
    with store_over(backend) as store:
        asked: list[tuple[Any, Priority]] = []
        submit = store.submit_get

        def noted(wants: Any, *, priority: Priority = Priority.DEMAND, deadline: float | None = None) -> Any:
            asked.append((wants[0].key, priority))
            return submit(wants, priority=priority, deadline=deadline)

        monkeypatch.setattr(store, "submit_get", noted)
        prefetcher = single(store)
        prefetcher.announce([queued(keys)])
        with prefetcher.start(plan(other)) as stream:
            read_all(stream, other)
        assert {priority for key, priority in asked if key == keys[0]} == {Priority.PREFETCH}
        assert {priority for key, priority in asked if key == other[0]} == {Priority.DEMAND}
        prefetcher.close()
        asked.clear()
        again = single(store)
        with again.start(plan(keys, priority=Priority.PREFETCH)) as stream:
            read_all(stream, keys)
        assert Priority.PREFETCH in {priority for _, priority in asked}
        until(lambda: gone(again))


def test_backends_are_told_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, keys = prompts(2)
    told: list[Any] = []
    monkeypatch.setattr(backend, "announce", told.append)

    with store_over(backend) as store:
        prefetcher = Prefetcher(store, lookahead_bytes=0)
        prefetcher.announce([queued(keys[0]), queued(keys[1], deadline=soon())])
        assert told == [[keys[1], keys[0]]]
        assert not backend.calls_of("get")
        prefetcher.close()
        prefetcher.announce([queued(keys[0])])
        assert prefetcher.stats()["streams"] == 0
        assert gone(prefetcher)


def test_engines_and_a_scheduler_at_once() -> None:
    backend, keys = prompts(6)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=6 * LAYER, lookahead_bytes=4 * LAYER)
        hits: list[int] = []
        over = threading.Event()

        def engine(number: int) -> None:
            for turn in range(4):
                its = keys[(number + turn) % len(keys)]
                with prefetcher.start(plan(its)) as stream:
                    hits.append(read_all(stream, its))

        def scheduler() -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                prefetcher.announce([queued(keys[(turn + n) % len(keys)]) for n in range(turn % 4)])
                over.wait(0.002)

        threads = [threading.Thread(target=engine, args=(n,)) for n in range(6)]
        chief = threading.Thread(target=scheduler)
        chief.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        over.set()
        chief.join(20)
        prefetcher.announce([])
        assert hits == [CHUNKS] * 24
        assert prefetcher.stats()["peak_bytes"] <= 6 * LAYER
        until(lambda: gone(prefetcher))


@pytest.mark.parametrize("error", [TransientError("down")])
def test_a_backend_that_fails_throughout_is_a_miss(error: TransientError) -> None:
    keys = chain(CHUNKS)
    with store_over(FaultyBackend(DictBackend(), otherwise=Fault.error(error))) as store:
        prefetcher = single(store)
        prefetcher.announce([queued(keys)])
        with prefetcher.start(plan(keys)) as stream:
            assert stream.wait(0).views() == []
            assert stream.hit_prefix == 0
        until(lambda: gone(prefetcher))


def test_an_announcement_of_another_shape_is_given_up() -> None:
    """With `split` the parts are others; what was loaded for them must not stay behind."""
    backend, (keys,) = prompts(1)
    with store_over(backend) as store:
        prefetcher = single(store, max_group_bytes=LAYER // 2)
        for announced in (True, False):
            prefetcher.announce([queued(keys, split=announced)])
            until(lambda: quiet(prefetcher))
            with prefetcher.start(plan(keys, split=not announced)) as stream:
                if announced:
                    assert read_all(stream, keys) == CHUNKS
                else:
                    assert sum(part.count * len(part.chunks()) for part in stream.parts()) == LAYERS * CHUNKS
            until(lambda: gone(prefetcher))
        prefetcher.announce([queued(keys, split=True)])
        prefetcher.announce([queued(keys)])
        with prefetcher.start(plan(keys)) as stream:
            assert read_all(stream, keys) == CHUNKS
        until(lambda: gone(prefetcher))


def test_who_waits_with_a_low_priority_takes_nothing_from_others() -> None:
    backend, (keys, other) = prompts(2)
    with store_over(backend) as store:
        prefetcher = single(store, budget_bytes=2 * LAYER)
        urgent = prefetcher.start(plan(keys))
        until(lambda: prefetcher.stats()["used_bytes"] == 2 * LAYER and quiet(prefetcher))
        with prefetcher.start(plan(other, priority=Priority.PREFETCH)) as idle:
            with pytest.raises(TimeoutError):
                idle.wait(0, timeout=0.02)
            assert prefetcher.stats()["revoked"] == 0
            assert urgent.ready(0)
            assert urgent.ready(1)
            assert read_all(urgent, keys) == CHUNKS
            assert read_all(idle, other) == CHUNKS
        until(lambda: gone(prefetcher))
