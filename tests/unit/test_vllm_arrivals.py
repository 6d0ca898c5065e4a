"""Prefill by another engine: what is told of it, waiting for its chunks, and what happens when they do not come."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.completion import Completion
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.integrations.vllm._arrivals import Arrivals, announced_tokens, handed_over
from kvstore.integrations.vllm._settings import Settings, SharedStore
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.unit.test_vllm_engine import TOKENS, engine_on, keys, opened, stored
from tests.unit.vllm_support import Engine, Request, request

WAITS = {"do_remote_prefill": True}
PREFILL = {"do_remote_decode": True}


# What is told.


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None), ({}, None), ("do_remote_prefill", None), ({"do_remote_prefill": 1}, None),
        ({"do_remote_prefill": False, "tokens": 8}, None), (WAITS, 24), ({**WAITS, "tokens": 16}, 16),
        ({**WAITS, "tokens": 99}, 24), ({**WAITS, "tokens": -1}, None), ({**WAITS, "tokens": True}, None),
        ({**WAITS, "tokens": "16"}, None), ({**WAITS, "remote_host": "x", "remote_block_ids": [1]}, 24),
    ],
)  # fmt: skip
def test_what_clients_write_there_announces_a_prefill_or_nothing(params: Any, expected: int | None) -> None:
    assert announced_tokens(request("a", TOKENS[:24], kv_transfer_params=params)) == expected


@pytest.mark.parametrize("unfull", [False, True])
def test_what_the_answer_tells_is_what_the_next_engine_understands(unfull: bool) -> None:
    with opened(save_unfull_chunk=unfull) as store, engine_on(store, loads=False) as engine:
        asked, plain = request("a", TOKENS[:27], kv_transfer_params=PREFILL), request("b", TOKENS[50:77])
        for r in (asked, plain):
            engine.compute(r)
        told = engine.end(asked)
        assert engine.end(plain) is None, "it was not asked for"
        assert told == {"do_remote_prefill": True, "do_remote_decode": False, "tokens": 27 if unfull else 24}
        assert handed_over(asked, 10**6) == {**told, "tokens": 27}
        assert announced_tokens(request("c", TOKENS[:27], kv_transfer_params=told)) == told["tokens"]
        aborted = request("d", TOKENS[100:127], kv_transfer_params=PREFILL)
        engine.admit(aborted)
        engine.step([(aborted, 0, 10)])
        assert engine.end(aborted)["tokens"] == 8, "what was computed of it"
        engine.drain()


# Watching a store.


class Scripted:
    """A store whose lookups are answered by the test, and a clock that it moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[tuple[int, Completion[int]]] = []

    def submit_lookup(self, some: list[Any]) -> Completion[int]:
        answer: Completion[int] = Completion()
        self.asked.append((len(some), answer))
        return answer

    def arrivals(self, count: int = 5, patience: float = 1.0) -> Arrivals:
        store: Any = self
        names: Any = list(range(count))
        return Arrivals(store, names, patience=patience, clock=lambda: self.now)

    def answer(self, found: int | Exception) -> None:
        if isinstance(found, Exception):
            self.asked[-1][1].set_exception(found)
        else:
            self.asked[-1][1].set_result(found)


def test_records_are_counted_as_they_come_and_asked_for_once_at_a_time() -> None:
    store = Scripted()
    arrivals = store.arrivals()
    assert [arrivals.look() for _ in range(3)] == [0, 0, 0]
    assert [count for count, _ in store.asked] == [5], "one question at a time"
    store.answer(2)
    assert arrivals.look() == 2
    assert arrivals.look() == 2
    assert len(store.asked) == 1, "not at once again"
    assert 0 < arrivals.pause <= 0.05
    store.now += arrivals.pause
    arrivals.look()
    assert [count for count, _ in store.asked] == [5, 3], "only for what is missing"
    store.answer(3)
    assert arrivals.look() == 5
    assert arrivals.over
    arrivals.look()
    assert len(store.asked) == 2


def test_patience_ends_when_nothing_came_for_so_long_and_begins_anew_with_each_record() -> None:
    store = Scripted()
    arrivals = store.arrivals(patience=1.0)
    for found in (0, 1, 0, 1):
        arrivals.look()
        store.now += 0.9
        store.answer(found)
        arrivals.look()
        assert not arrivals.over
        store.now += arrivals.pause
    arrivals.look()
    store.now += 5  # a load took long meanwhile: the answer that is under way is waited for
    assert arrivals.look() == 2
    assert not arrivals.over
    store.answer(1)
    assert arrivals.look() == 3
    assert not arrivals.over
    store.now += 1.0
    arrivals.look()
    store.answer(0)
    assert arrivals.look() == 3
    assert arrivals.over


def test_it_is_asked_less_often_the_longer_nothing_comes() -> None:
    store = Scripted()
    arrivals = store.arrivals(patience=10.0)
    while not arrivals.over:
        arrivals.look()
        store.answer(0)
        arrivals.look()
        store.now += max(arrivals.pause, 1e-6)
    assert 40 <= len(store.asked) <= 100
    assert store.now == pytest.approx(110.0), "and the end of patience is not slept through"


@pytest.mark.parametrize("how", ["answer", "raise"])
def test_a_store_that_cannot_be_asked_brings_nothing(how: str) -> None:
    store = Scripted()
    arrivals = store.arrivals(patience=1.0)
    if how == "raise":

        def closed(_: Any) -> Completion[int]:
            raise ClosedError("closed")

        store.submit_lookup = closed  # type: ignore[method-assign]
        arrivals.look()
    else:
        arrivals.look()
        store.answer(TransientError("no"))
        arrivals.look()
        assert not arrivals.over, "it may work next time"
        store.now += 1.0
        arrivals.look()
        store.answer(TransientError("no"))
        arrivals.look()
    assert arrivals.over
    assert arrivals.here == 0


def test_who_does_not_want_to_know_any_more_asks_no_more() -> None:
    store = Scripted()
    arrivals = store.arrivals()
    arrivals.look()
    arrivals.close()
    assert store.asked[0][1].cancelled()
    assert arrivals.look() == 0
    assert len(store.asked) == 1


# Two engines.


def until(engine: Engine, done: Callable[[], bool]) -> None:
    """Idle steps, as an engine makes them that waits, until something happened."""
    pause = threading.Event()
    for _ in range(60_000):
        if done():
            return
        assert engine.idle() == (set(), set()), "it has not ended"
        pause.wait(0.001)
    raise AssertionError("it does not happen")


def waiting(name: str, prompt: list[int], **more: Any) -> Request:
    return request(name, prompt, kv_transfer_params={**WAITS, **more})


@settings(max_examples=15)
@given(
    st.integers(9, 60), st.sampled_from([1, 3, 4, 8, 16]), st.sampled_from([8, 16, 24]), st.booleans(), st.booleans(),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_a_prompt_is_loaded_chunk_by_chunk_while_another_engine_computes_it(
    tokens: int, block_size: int, budget: int, unfull: bool, asynchronous: bool, transposed: bool, local: int
) -> None:
    with opened(save_unfull_chunk=unfull) as store, engine_on(store, loads=False) as prefiller:
        options = {"block_size": block_size, "blocks": 256, "asynchronous": asynchronous, "transposed": transposed}
        with engine_on(store, saves=False, **options) as decoder:
            here, there = waiting("a", TOKENS[:tokens]), request("a", TOKENS[:tokens], kv_transfer_params=PREFILL)
            decoder.side.arrived(here)
            had = min(local * block_size, (tokens - 1) // block_size * block_size)  # in the engine's own prefix cache
            expected = max(0, min(tokens - 1, tokens if unfull else tokens // 8 * 8) - had)
            assert decoder.matched(here, had) == expected, "nothing is looked up"
            assert decoder.side.between_steps(here) is True
            external = decoder.admit(here, had)
            prefiller.side.arrived(there)
            prefiller.admit(there)
            arrived = decoder.worker.counters
            skipped = had // 8
            for computed in range(0, tokens, budget):
                prefiller.step([(there, computed, min(budget, tokens - computed))])
                prefiller.drain()
                so_far = stored(store, here.all_token_ids) - skipped
                if external and computed + budget < tokens:
                    until(decoder, lambda so_far=so_far: arrived["arrived_chunks"] == max(0, so_far))  # type: ignore[misc]
            if external:
                assert decoder.wait_for_load(here) == set()
                assert decoder.holds(here, had, had + external)
            assert arrived["load_tokens"] == external
            assert arrived["prefills_lost"] == 0
            assert decoder.side.counters["lookups"] == 0
            prefiller.end(there)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("came", [0, 2])
def test_a_prefiller_that_dies_leaves_the_rest_to_be_computed_here(asynchronous: bool, came: int) -> None:
    with opened() as store:
        if came:
            with engine_on(store) as prefiller:
                prefiller.compute(request("a", TOKENS[: 8 * came]))
        with engine_on(store, asynchronous=asynchronous, prefill_timeout=0.05) as engine:
            r = waiting("a", TOKENS[:44])
            failed = engine.compute(r)
            assert failed == set(engine.tables["a"][2 * came : 10]), "what did not come, and nothing else"
            assert engine.worker.counters["prefills_lost"] == 1
            assert engine.worker.counters["load_tokens"] == 8 * came
            assert stored(store, r.all_token_ids) == 5, "saved as it was computed"
            assert not engine.side._bad
            engine.end(r)


def test_a_request_that_begins_again_is_looked_up() -> None:
    """Nothing came, so vLLM frees its blocks and asks anew; or it was preempted."""
    with opened() as store, engine_on(store, prefill_timeout=0.05) as engine:
        r = waiting("a", TOKENS[:44])
        assert engine.admit(r) == 40
        assert engine.wait_for_load(r) == set(engine.tables["a"][:10])
        engine.free += engine.tables.pop("a")
        assert engine.matched(r) == 0
        assert engine.side.between_steps(r) is False
        with engine_on(store) as other:
            other.compute(request("b", TOKENS[:44]))
        fresh = waiting("c", TOKENS[:44])
        assert engine.admit(fresh) == 40
        assert engine.wait_for_load(fresh) == set()
        engine.free += engine.tables.pop("c")  # preempted
        assert engine.admit(fresh) == 40
        assert engine.side.counters["lookups"] == 1
        assert engine.step([(fresh, 40, 4)]) == set(), "layer by layer"
        assert engine.holds(fresh, 0, 44)


def test_what_nobody_wants_any_more_is_not_waited_for() -> None:
    with opened() as store, engine_on(store) as engine:
        r = waiting("a", TOKENS[:44])
        assert engine.admit(r) == 40
        assert engine.idle() == (set(), set())
        engine.side.finished("a")
        engine.worker.drop({"a", "others"})
        assert engine.wait_for_load(r) == set(), "its blocks may be freed, and nobody computes them"
        assert engine.worker.counters["prefills_lost"] == 0
        assert not engine.side._loading


def test_one_that_waits_holds_up_neither_other_loads_nor_steps() -> None:
    with opened() as store, engine_on(store) as engine:
        stuck, fine = waiting("stuck", TOKENS[:44]), request("fine", TOKENS[100:124])
        with engine_on(store) as other:
            other.compute(request("x", fine.all_token_ids))
        assert engine.admit(stuck) == 40
        assert engine.admit(fine) == 23
        assert engine.step([(fine, 23, 1)]) == set(), "layer by layer, in the same step"
        assert engine.holds(fine, 0, 24)
        engine.end(fine)
        engine.worker.drop({"stuck"})
        assert engine.wait_for_load(stuck) == set()


@pytest.mark.parametrize("damage", ["corrupt", "error"])
def test_a_chunk_that_came_and_cannot_be_read_ends_it_there(damage: str) -> None:
    inner = DictBackend()
    faulty = FaultyBackend(inner)
    with opened(faulty) as store:
        with engine_on(store) as prefiller:
            prefiller.compute(request("a", TOKENS[:44]))
        with engine_on(store) as engine:
            r = waiting("a", TOKENS[:44])
            if damage == "corrupt":
                hurt = keys(store, r.all_token_ids)[1]
                record = bytearray(inner.records[hurt])
                record[-5] ^= 1
                inner.records[hurt] = bytes(record)
            else:
                faulty.push(Fault.error(), operation="get")
            failed = engine.compute(r)
            assert failed == set(engine.tables["a"][2 if damage == "corrupt" else 0 : 10])
            assert engine.worker.counters["prefills_lost"] == 1


def test_a_failed_load_between_steps_is_nobody_elses_trouble_and_one_within_a_step_is() -> None:
    """Both in one engine: blocks of the first were seen by nobody; those of the second may have been."""
    inner = DictBackend()
    with opened(inner) as store, engine_on(store, prefill_timeout=0.05) as engine:
        engine.compute(request("a", TOKENS[:24]))
        lost, hurt = waiting("lost", TOKENS[50:74]), request("hurt", TOKENS[:24])
        assert engine.admit(hurt) == 23
        assert engine.admit(lost) == 23
        inner.delete(keys(store, TOKENS[:24])[1:2], deadline=float("inf"))
        failed = engine.step([(hurt, 23, 1)])
        assert failed >= set(engine.tables["hurt"][2:])
        assert engine.side._bad == set(engine.tables["hurt"][2:])
        engine.side.finished("hurt")
        assert engine.wait_for_load(lost) | failed >= set(engine.tables["lost"])
        assert engine.side._bad == set(engine.tables["hurt"][2:]), "blocks that nobody has seen are not taken out"


def test_an_engine_that_only_saves_waits_for_nobody() -> None:
    with opened() as store, engine_on(store, loads=False) as engine:
        r = waiting("a", TOKENS[:24])
        engine.side.arrived(r)
        assert engine.matched(r) == 0


def test_only_what_the_prefiller_says_it_stores_is_waited_for() -> None:
    with opened(save_unfull_chunk=True) as store, engine_on(store) as engine:
        for name, tokens, expected in (("a", 24, 24), ("b", 23, 16), ("c", 7, 0), ("d", 30, 29)):
            r = waiting(name, TOKENS[:30], tokens=tokens)
            engine.side.arrived(r)
            assert engine.matched(r) == expected, name


def test_orders_to_wait_can_be_copied_to_other_processes() -> None:
    with opened() as store, engine_on(store) as engine:
        engine.admit(waiting("a", TOKENS[:24]))
        orders = engine.side.step([], engine.tables.get)
        assert copy.deepcopy(orders) == orders
        assert [(load.awaited, load.asynchronous) for load in orders.loads] == [(True, True)]


# Options.


def test_the_timeout_of_a_prefill_has_a_unit_or_is_in_seconds() -> None:
    assert Settings.of({}).prefill_timeout == 10.0
    assert Settings.of({"prefill_timeout": "500ms"}).prefill_timeout == 0.5
    assert Settings.of({"prefill_timeout": 3}).prefill_timeout == 3.0
    with pytest.raises(ConfigError, match="prefill_timeout"):
        Settings.of({"prefill_timeout": "soon"})


@pytest.mark.parametrize("how", ["option", "file"])
def test_blending_is_refused_with_what_is_possible(how: str, tmp_path: Any) -> None:
    extra: dict[str, Any] = {"remote_url": "memory://a", "enable_blending": True}
    if how == "file":
        (tmp_path / "kv.yaml").write_text("remote_url: memory://a\nenable_blending: true\n")
        extra = {"config_file": str(tmp_path / "kv.yaml")}
    with pytest.raises(ConfigError, match=r"cannot be had in vLLM.*exact prefix.*kvstore\.blend"):
        SharedStore.of(Settings.of(extra))
    SharedStore.of(Settings.of({"remote_url": "memory://a", "enable_blending": False})).close()
