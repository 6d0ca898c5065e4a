"""Waiting for another engine's prefill when something lies, goes, comes twice or has another name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.integrations.vllm._arrivals import announced_tokens
from kvstore.integrations.vllm._settings import Settings
from kvstore.testing import DictBackend
from tests.unit.test_vllm_arrivals import PREFILL, WAITS, Scripted, until, waiting
from tests.unit.test_vllm_engine import TOKENS, engine_on, keys, opened, stored
from tests.unit.vllm_support import request


def compute(store: Any, prompt: list[int], **fields: Any) -> None:
    """Another engine computes a prompt, and all of it is stored."""
    with engine_on(store) as other:
        other.compute(request("other", prompt, **fields))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_prefill_that_stores_no_chunk_is_no_reason_not_to_look(tokens: int) -> None:
    """What a prefiller tells that could store nothing, and what a client could write there."""
    with opened() as store, engine_on(store) as engine:
        compute(store, TOKENS[:44])
        r = waiting("a", TOKENS[:44], tokens=tokens)
        assert engine.admit(r) == 40
        assert engine.side.counters["awaited"] == 0
        assert engine.step([(r, 40, 4)]) == set(), "layer by layer, as any other"
        assert engine.holds(r, 0, 44)
        engine.end(r)


@pytest.mark.parametrize(
    "tokens", [10**30, -(10**30), float("nan"), float("inf"), 1e300, 16.0, "16", "", None, [16], {"a": 1}, b"16", True]
)
def test_numbers_that_lie_never_announce_more_than_the_prompt(tokens: Any) -> None:
    r = request("a", TOKENS[:24], kv_transfer_params={**WAITS, "tokens": tokens})
    assert announced_tokens(r) in (None, 24)
    with opened() as store, engine_on(store, prefill_timeout=0.0) as engine:
        engine.compute(r)
        assert engine.holds(r, 0, 24)
        engine.end(r)


def test_without_patience_it_takes_what_is_there() -> None:
    assert Settings.of({"prefill_timeout": 0}).prefill_timeout == 0
    with opened() as store:
        compute(store, TOKENS[:16])
        with engine_on(store, prefill_timeout=0.0) as engine:
            r = waiting("a", TOKENS[:44])
            failed = engine.compute(r)
            assert failed == set(engine.tables["a"][4:10])
            assert engine.worker.counters["load_tokens"] == 16
            engine.end(r)


def test_one_prompt_awaited_twice_in_one_engine_and_in_another_comes_to_all() -> None:
    with opened() as store, engine_on(store) as one, engine_on(store, block_size=3, transposed=True) as two:
        prompt = TOKENS[:44]
        awaiting = [(one, waiting("a", prompt)), (one, waiting("b", prompt)), (two, waiting("a", prompt))]
        for engine, r in awaiting:
            assert engine.admit(r) == 40
            engine.idle()
        compute(store, TOKENS[:44])
        ended = {(one, "a"): 0, (one, "b"): 0, (two, "a"): 0}
        pause = threading.Event()
        for _ in range(60_000):
            for engine in (one, two):
                finished, failed = engine.idle()
                assert not failed
                for name in finished:
                    ended[engine, name] += 1
            if all(ended.values()):
                break
            pause.wait(0.001)
        assert set(ended.values()) == {1}
        for engine, r in awaiting:
            assert engine.holds(r, 0, 40)
            engine.end(r)
        assert one.side.outstanding == two.side.outstanding == 0
        assert not one.side._loading
        assert sorted(one.free) == list(range(64))


def test_of_two_that_wait_for_one_prompt_only_the_one_that_is_aborted_stops() -> None:
    with opened() as store, engine_on(store) as engine:
        gone, stays = waiting("gone", TOKENS[:44]), waiting("stays", TOKENS[:44])
        for r in (gone, stays):
            engine.admit(r)
        engine.idle()
        engine.side.finished("gone")
        engine.worker.drop({"gone"})
        assert engine.wait_for_load(gone) == set()
        assert engine.worker.counters["loads"] == 1
        compute(store, TOKENS[:44])
        assert engine.wait_for_load(stays) == set()
        assert engine.holds(stays, 0, 40)


def test_a_node_that_forgets_in_between_loses_only_what_was_not_loaded() -> None:
    inner = DictBackend()
    with opened(inner) as store, engine_on(store, prefill_timeout=0.3) as engine:
        compute(store, TOKENS[:16])
        r = waiting("a", TOKENS[:44])
        engine.admit(r)
        until(engine, lambda: engine.worker.counters["arrived_chunks"] == 2)
        inner.records.clear()  # a restart
        failed = engine.wait_for_load(r)
        assert failed == set(engine.tables["a"][4:10])
        assert engine.holds(r, 0, 16), "what had been loaded stays"


def test_chunks_of_another_size_are_never_found_and_the_prompt_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    from tests.faults.support import store_over

    inner = DictBackend()
    with store_over(inner, chunk_size=16) as other, engine_on(other, loads=False) as prefiller:
        prefiller.compute(request("p", TOKENS[:64], kv_transfer_params=PREFILL))
        with opened(inner) as store, engine_on(store, prefill_timeout=0.05) as decoder:
            r = waiting("a", TOKENS[:64])
            decoder.compute(r)
            assert decoder.worker.counters["arrived_chunks"] == 0
            assert "chunk_size" in caplog.text
            decoder.end(r)


@pytest.mark.parametrize("salt", [None, "b"])
def test_what_waits_gets_nothing_of_another_salt(salt: str | None) -> None:
    with opened() as store, engine_on(store, prefill_timeout=0.05) as engine:
        compute(store, TOKENS[:44], cache_salt="a")
        r = waiting("r", TOKENS[:44])
        r.cache_salt = salt
        engine.compute(r)
        assert engine.worker.counters["arrived_chunks"] == 0
        same = waiting("same", TOKENS[:44])
        same.cache_salt = "a"
        assert engine.compute(same) == set()


def test_after_a_reset_nobody_is_waited_for_and_nothing_is_promised() -> None:
    """This engine's names are known to no other: what it would wait for cannot come; nobody finds what it stores."""
    with opened() as store, engine_on(store) as engine:
        engine.side.reset()
        r = waiting("a", TOKENS[:44])
        engine.side.arrived(r)
        assert engine.matched(r) == 0
        assert engine.side.between_steps(r) is False
        asked = request("b", TOKENS[:44], kv_transfer_params=PREFILL)
        engine.compute(asked)
        assert engine.end(asked)["tokens"] == 0
        compute(store, TOKENS[:44])
        assert stored(store, TOKENS[:44]) == 5


def test_a_request_that_was_told_of_and_had_it_all_is_looked_up_when_it_is_preempted() -> None:
    with opened() as store, engine_on(store) as engine:
        r = waiting("a", TOKENS[:44])
        assert engine.admit(r, 44 - 4) == 0, "all of it in the engine's own prefix cache"
        engine.free += engine.tables.pop("a")
        compute(store, TOKENS[:44])
        assert engine.admit(r) == 40
        assert engine.side.counters["lookups"] == 1
        engine.step([(r, 40, 4)])
        assert engine.holds(r, 0, 44)


def _watched(times: list[float], until: float) -> tuple[list[int], list[float]]:
    """Somebody watches records that are stored at these times. Returns how often the store was asked before each of
    them (and from the last one on), and how late each was seen."""
    store = Scripted()
    arrivals, begun = store.arrivals(len(times), patience=1000.0), store.now
    asked, late = [0] * (len(times) + 1), list[float]()
    while not arrivals.over and store.now < begun + until:
        before = len(store.asked)
        arrivals.look()
        stored = sum(begun + each <= store.now for each in times)
        if len(store.asked) > before:
            asked[stored] += 1
            store.now += 0.002
            store.answer(stored - arrivals.here)
            arrivals.look()
            late += [store.now - begun - each for each in times[len(late) : arrivals.here]]
        store.now += max(arrivals.pause, 1e-6)
    return asked, late


def test_a_crowd_that_waits_for_its_turn_does_not_crowd_the_store() -> None:
    """What a question costs is taken from decoding: of what waits in a prefiller's queue, some a second is enough."""
    asked, _ = _watched([1000.0], 60.0)
    assert asked[0] <= 60 * 3
    _, late = _watched([30.0 + 0.8 * n for n in range(4)], 60.0)
    assert max(late) < 0.51


@pytest.mark.parametrize("together", [1, 2, 16])
@pytest.mark.parametrize("tail", [0.05, 0.4, 0.8])
def test_chunks_that_come_step_by_step_are_seen_soon_and_seldom_asked_for(together: int, tail: float) -> None:
    """The steps of a prefill take equally long, but for the last one; what comes together is not stored at once."""
    steps = [0.8 * n for n in range(1, 8)] + [0.8 * 7 + tail]
    times = [step + 0.003 * n for step in steps for n in range(together)]
    asked, late = _watched(times, 60.0)
    assert len(late) == len(times)
    assert max(late) < 0.065
    steady = sum(asked[3 * together : 7 * together]) / 4
    assert steady <= 20


def test_steps_that_become_short_after_a_long_one_are_not_slept_through() -> None:
    """The prefiller did something else meanwhile."""
    times = [0.8, 1.6, 9.0, 9.8, 10.6, 11.0, 11.4, 11.8, 12.2]
    _, late = _watched(times, 60.0)
    assert max(late) < 0.15


def test_a_request_without_a_name_is_not_waited_for() -> None:
    with opened() as store, engine_on(store) as engine:
        r = waiting("a", TOKENS[:24])
        r.lora_request = "broken"
        assert engine.admit(r) == 0
        assert engine.side.outstanding == 0
        assert engine.end(r) is None


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["chunk", "abort", "damage", "idle"]), st.integers(0, 5)), max_size=30))
def test_whatever_happens_every_wait_ends_once_and_gives_everything_back(events: list[tuple[str, int]]) -> None:
    """Six requests for three prompts; chunks come, are damaged, requests are aborted, in any order."""
    inner, filled = DictBackend(), DictBackend()
    prompts = [TOKENS[40 * n : 40 * n + 32] for n in range(3)]
    with opened(filled) as source, opened(inner) as store, engine_on(store, blocks=64) as engine:
        for prompt in prompts:
            compute(source, prompt)
        records = [[(key, bytes(filled.records[key])) for key in keys(source, prompt)] for prompt in prompts]
        requests = [waiting(str(n), prompts[n % 3]) for n in range(6)]
        ended, failed, gone = dict.fromkeys(map(str, range(6)), 0), set[int](), set[str]()

        def look() -> None:
            finished, bad = engine.idle()
            failed.update(bad)
            for name in finished:
                ended[name] += 1

        def abort(name: str) -> None:
            if name not in gone and not ended[name]:
                gone.add(name)
                engine.side.finished(name)
                engine.worker.drop({name})

        came, hurt = [0, 0, 0], set[int]()
        for r in requests:
            assert engine.admit(r) == 31
        look()
        for what, number in events:
            which = number % 3
            if what == "abort":
                abort(str(number))
            elif what in ("chunk", "damage") and came[which] < 4:
                key, record = records[which][came[which]]
                came[which] += 1
                if what == "damage":
                    hurt.add(which)
                    record = record[:-5] + bytes([record[-5] ^ 1]) + record[-4:]
                inner.records[key] = record
            else:
                look()
        for n in range(6):
            if came[n % 3] < 4 and n % 3 not in hurt:
                abort(str(n))
        pause = threading.Event()
        for _ in range(60_000):
            look()
            if all(ended.values()):
                break
            pause.wait(0.001)
        assert set(ended.values()) == {1}, "each once, and all of them"
        for n, r in enumerate(requests):
            table = engine.tables[r.request_id]
            bad = [index for index, block in enumerate(table) if block in failed]
            good = (bad[0] if bad else len(table)) * engine.block_size
            assert bad == list(range(good // engine.block_size, len(table))), "a prefix is good, the rest is not"
            if r.request_id not in gone:
                assert (good == 32) is (n % 3 not in hurt)
                assert engine.holds(r, 0, min(good, 31))
            engine.end(r)
        assert not engine.side._loading
        assert engine.side.outstanding == 0
        assert engine.worker.stats()["prefetch"]["streams"] == 0
        assert sorted(engine.free) == list(range(64))
