"""The connector's two sides together, over a scripted store, driven as vLLM drives them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.completion import Completion
from kvstore.errors import TransientError
from kvstore.integrations.vllm._keys import hashed, shards_of
from kvstore.integrations.vllm._messages import Isolation
from kvstore.integrations.vllm._paging import Pages
from kvstore.integrations.vllm._worker import WorkerSide
from kvstore.keys import keys_of
from kvstore.layout import KVLayout
from kvstore.store import Store
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import store_over
from tests.unit.vllm_support import LAYOUT, Engine, context_of, kv_of, request

TOKENS = random.Random(5).choices(range(1000), k=200)


@contextmanager
def opened(backend: Any = None, **options: Any) -> Iterator[Store]:
    with store_over(backend or DictBackend(), chunk_size=8, **options) as store:
        yield store


@contextmanager
def engine_on(store: Store, **options: Any) -> Iterator[Engine]:
    engine = Engine(store, **options)
    try:
        yield engine
    finally:
        engine.close()
        assert engine.worker.stats()["prefetch"]["used_bytes"] == 0


def keys(store: Store, tokens: list[int], salt: str | None = None) -> list[Any]:
    context = context_of(store)(Isolation(salt))
    return keys_of(hashed(tokens, chunk_size=8, unfull=store.config.save_unfull_chunk), context=context)


def stored(store: Store, tokens: list[int], salt: str | None = None) -> int:
    return store.submit_lookup(keys(store, tokens, salt)).result()


@settings(max_examples=30)
@given(
    st.integers(1, 60), st.integers(0, 40), st.sampled_from([1, 3, 4, 8, 16]), st.integers(1, 30), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_one_engine_computed_another_one_loads(
    shared: int, more: int, block_size: int, budget: int, asynchronous: bool, unfull: bool, transposed: bool
) -> None:
    """Whatever the block size (chunks have 8 tokens), however prompts are cut into steps, whatever the layouts."""
    first = request("a", TOKENS[:shared] + [1000 + n for n in range(more)])
    second = request("b", TOKENS[: shared + more])
    with opened(save_unfull_chunk=unfull) as store:
        with engine_on(store, block_size=block_size, blocks=256) as engine:
            engine.compute(first, budget=budget)
            assert stored(store, first.all_token_ids) == len(keys(store, first.all_token_ids))
        with engine_on(
            store, block_size=block_size, blocks=256, asynchronous=asynchronous, transposed=transposed
        ) as engine:
            again = request("again", first.all_token_ids)
            whole = len(first.all_token_ids) if unfull else len(first.all_token_ids) // 8 * 8
            for r in (again, second):
                engine.side.arrived(r)
            assert engine.matched(again) == min(whole, again.num_tokens - 1)
            assert engine.compute(again, budget=budget) == set()
            assert engine.compute(second, budget=budget) == set()
            for r in (again, second):
                engine.end(r)
            assert engine.side.outstanding == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("damage", ["gone", "corrupt"])
def test_what_cannot_be_loaded_is_reported_computed_and_stored_again(asynchronous: bool, bad: int, damage: str) -> None:
    inner = DictBackend()
    with opened(inner) as store, engine_on(store, asynchronous=asynchronous) as engine:
        first = request("a", TOKENS[:44])
        engine.side.arrived(first)
        engine.compute(first)
        engine.end(first)
        hurt = keys(store, first.all_token_ids)[bad]
        second = request("b", TOKENS[:44])
        engine.side.arrived(second)
        assert engine.matched(second) == 40
        if damage == "gone":  # after the lookup
            inner.delete([hurt], deadline=float("inf"))
        else:
            record = bytearray(inner.records[hurt])
            record[-5] ^= 1
            inner.records[hurt] = bytes(record)
        failed = engine.compute(second)
        table = engine.tables["b"]
        assert failed == set(table[2 * bad : 10]), "exactly the blocks from the bad chunk to the end of the load"
        assert stored(store, second.all_token_ids) == 5
        assert engine.worker.counters["loads_failed"] == 1
        assert engine.worker.counters["failed_blocks"] == len(failed)
        engine.end(second)
        third = request("c", TOKENS[:44])
        engine.side.arrived(third)
        assert engine.compute(third) == set()


def test_nothing_computed_from_kv_that_failed_is_saved() -> None:
    """The step that loads also computes and saves the chunks behind; they must not be stored from garbage."""
    inner = DictBackend()
    with opened(inner) as store, engine_on(store) as engine:
        first = request("a", TOKENS[:16])
        engine.side.arrived(first)
        engine.compute(first)
        second = request("b", TOKENS[:32])
        engine.side.arrived(second)
        assert engine.admit(second) == 16
        inner.delete(keys(store, TOKENS[:16])[1:], deadline=float("inf"))
        assert engine.step([(second, 16, 16)]) == set(engine.tables["b"][2:4])
        engine.drain()
        assert stored(store, TOKENS[:32]) == 1
        assert [bool(o.stored) for o in store.submit_stat(keys(store, TOKENS[:32])).result()] == [True] + [False] * 3
        assert engine.step([(second, 8, 24)]) == set()
        engine.drain()
        assert stored(store, TOKENS[:32]) == 4


def test_another_request_of_the_step_on_the_same_blocks_is_not_saved_either() -> None:
    inner = DictBackend()
    with opened(inner) as store, engine_on(store) as engine:
        for name, length in (("a", 16),):
            r = request(name, TOKENS[:length])
            engine.side.arrived(r)
            engine.compute(r)
        second, third = request("b", TOKENS[:24]), request("c", TOKENS[:16] + list(range(8)))
        for r in (second, third):
            engine.side.arrived(r)
        assert engine.admit(second) == 16
        assert engine.matched(third, 16) == 0
        engine.tables["c"] = [*engine.tables["b"][:4], engine.free.pop(), engine.free.pop()]
        engine.side.allocated(third, engine.tables["c"], 0)
        inner.delete(keys(store, TOKENS[:16])[:1], deadline=float("inf"))
        failed = engine.step([(second, 16, 8), (third, 16, 8)])
        assert failed == set(engine.tables["b"][:4])
        engine.drain()
        assert not any(o.stored for o in store.submit_stat(keys(store, third.all_token_ids)[2:]).result())
        # vLLM lets the second compute all it lost, in two steps here, and thinks that the third has what they share.
        assert engine.step([(second, 0, 8), (third, 16, 8)]) == set(engine.tables["b"][2:4]), "it has not: told again"
        engine.drain()
        assert not any(o.stored for o in store.submit_stat(keys(store, third.all_token_ids)[2:]).result())
        assert engine.step([(second, 8, 16), (third, 16, 8)]) == set(), "computed in the same step: fine"
        for r in (second, third):
            assert engine.holds(r, 0, 24)
        engine.drain()
        for r in (second, third):
            assert stored(store, r.all_token_ids) == 3
        assert not engine.side._bad


def test_salts_and_adapters_share_nothing() -> None:
    with opened() as store, engine_on(store) as engine:
        for name, fields in (
            ("a", {}),
            ("b", {"cache_salt": "x"}),
            ("c", {"cache_salt": "y"}),
            ("d", {"lora_request": "l"}),
        ):
            r = request(name, TOKENS[:24], **fields)
            engine.side.arrived(r)
            assert engine.matched(r) == 0
            engine.compute(r)
            again = request(name + "2", TOKENS[:24], **fields)
            engine.side.arrived(again)
            assert engine.matched(again) == 23


def test_what_has_no_name_is_served_but_not_stored() -> None:
    with opened() as store, engine_on(store) as engine:
        for r in (
            request("a", TOKENS[:24], lora_request="broken"), request("b", TOKENS[:24], prompt_embeds=object()),
            request("c", [*TOKENS[:23], 2**32]),
        ):  # fmt: skip
            engine.side.arrived(r)
            assert engine.side.matched(r, 0) == 0
            engine.side.allocated(r, [0], 0)
            assert not engine.side.step([(r.request_id, 0, 24)], lambda _: [0, 1, 2, 3, 4, 5]).saves
        assert engine.side.outstanding == 0


def test_after_a_reset_nothing_stored_before_is_found() -> None:
    with opened() as store, engine_on(store) as engine:
        engine.compute(request("a", TOKENS[:24]))
        waiting = request("b", TOKENS[:24])
        engine.side.arrived(waiting)
        assert engine.matched(waiting) == 23
        engine.side.reset()
        assert engine.matched(waiting) == 0
        engine.compute(waiting)
        again = request("c", TOKENS[:24])
        engine.side.arrived(again)
        assert engine.matched(again) == 23
        assert stored(store, TOKENS[:24]) == 3, "others still have theirs"


def test_tokens_that_the_engine_has_are_not_loaded() -> None:
    with opened() as store, engine_on(store) as engine:
        first = request("a", TOKENS[:40])
        engine.side.arrived(first)
        engine.compute(first)
        second = request("b", TOKENS[:48])
        engine.side.arrived(second)
        assert engine.matched(second, 12) == 28, "not a multiple of the chunk size"
        assert engine.matched(second, 40) == 0
        assert engine.matched(second, 44) == 0
        before = engine.worker.counters["load_bytes"]
        assert engine.admit(second, 20) == 20
        engine.pages[0].keys[engine.tables["b"][4]] = 7.0  # block 4 holds tokens 16..19: not to be touched
        assert engine.step([(second, 40, 8)]) == set()
        assert engine.holds(second, 20, 48)
        assert (engine.pages[0].keys[engine.tables["b"][4]] == 7.0).all()
        chunk = LAYOUT.chunk_bytes(8, "float32")
        assert engine.worker.counters["load_bytes"] - before == 3 * chunk, "chunks 2, 3, 4"


def test_a_preempted_request_looks_again_and_saves_nothing_twice() -> None:
    with opened() as store, engine_on(store) as engine:
        r = request("a", TOKENS[:40])
        engine.side.arrived(r)
        assert engine.admit(r) == 0
        engine.step([(r, 0, 20)])
        engine.drain()
        assert engine.worker.counters["save_chunks"] == 2
        engine.free += engine.tables.pop("a")  # preempted
        r.all_token_ids.append(3)
        assert engine.admit(r) == 16
        assert engine.step([(r, 16, 25)]) == set()
        assert engine.holds(r, 0, 41)
        engine.drain()
        assert engine.worker.counters["save_chunks"] == 5


@pytest.mark.parametrize("generated", [True, False])
def test_generated_chunks_are_saved_once_their_tokens_are_known(generated: bool) -> None:
    with opened() as store, engine_on(store, save_generated=generated) as engine:
        r = request("a", TOKENS[:14])
        engine.side.arrived(r)
        engine.admit(r, external=0)
        engine.tables["a"] += [engine.free.pop() for _ in range(3)]
        engine.step([(r, 0, 14)])
        for n in range(14, 24):
            r.all_token_ids.append(TOKENS[n])
            engine.step([(r, n, 1)])
        engine.drain()
        assert stored(store, TOKENS[:24]) == (3 if generated else 1)
        # Drafts beyond what is known count for nothing.
        save = engine.side.step([("a", 24, 8)], engine.tables.get).saves
        assert not save


def test_a_lookup_never_holds_the_scheduler() -> None:
    with opened() as store, engine_on(store) as engine:
        answer: Completion[int] = Completion()
        store.submit_lookup = lambda keys, **_: answer  # type: ignore[method-assign]
        r = request("a", TOKENS[:24])
        engine.side.arrived(r)
        assert engine.side.matched(r, 0) is None
        assert engine.side.matched(r, 0) is None
        assert engine.side.counters["lookup_pending"] == 2
        answer.set_result(2)
        assert engine.side.matched(r, 0) == 16
        assert engine.side.matched(r, 0) == 16, "asked once"


def test_trouble_with_a_lookup_is_a_miss() -> None:
    with opened() as store, engine_on(store) as engine:
        answer: Completion[int] = Completion()
        store.submit_lookup = lambda keys, **_: answer  # type: ignore[method-assign]
        r = request("a", TOKENS[:24])
        engine.side.arrived(r)
        answer.set_exception(TransientError("no"))
        assert engine.side.matched(r, 0) == 0


def test_a_request_that_is_aborted_cancels_its_lookup_and_leaves_the_queue() -> None:
    with opened() as store, engine_on(store) as engine:
        answer: Completion[int] = Completion()
        store.submit_lookup = lambda keys, **_: answer  # type: ignore[method-assign]
        r = request("a", TOKENS[:24])
        engine.side.arrived(r)
        engine.side.finished("a")
        assert answer.cancelled()
        assert engine.side.outstanding == 0
        assert engine.side.matched(r, 0) == 0


def test_waiting_requests_are_announced_and_loaded_ahead() -> None:
    with opened() as store, engine_on(store) as engine:
        r = request("a", TOKENS[:40])
        engine.side.arrived(r)
        engine.compute(r)
        waiting = request("b", TOKENS[:48])
        engine.side.arrived(waiting)
        assert engine.matched(waiting) == 40
        orders = engine.side.step([], engine.tables.get)
        assert orders.announced is not None
        assert [len(each.chunks) for each in orders.announced] == [5]
        assert engine.side.step([], engine.tables.get).announced is None, "told once"
        engine.worker.begin(orders)
        engine.worker.finish()
        assert engine.worker.stats()["prefetch"]["announced"] == 1
        engine.side.finished("b")
        orders = engine.side.step([], engine.tables.get)
        assert orders.announced == []
        engine.worker.begin(orders)
        assert engine.worker.stats()["prefetch"]["announced"] == 0


def test_a_load_that_hangs_holds_up_no_other() -> None:
    slow = FaultyBackend(DictBackend())
    with opened(slow) as store, engine_on(store, asynchronous=True) as engine:
        for name, begin in (("a", 0), ("b", 100)):
            engine.compute(request(name, TOKENS[begin : begin + 24]))
        hung, fine = request("h", TOKENS[:24]), request("f", TOKENS[100:124])
        assert engine.admit(hung) == 23
        slow.push(Fault.hang(), operation="get")
        engine.worker.begin(engine.side.step([], engine.tables.get))
        engine.worker.start_loads()
        engine.worker.finish()
        slow.wait_hung()
        assert engine.admit(fine) == 23
        assert engine.wait_for_load(fine) == set()
        assert engine.holds(fine, 0, 23)
        assert engine.worker.take_finished() == set(), "the other one still hangs"
        slow.release()
        assert engine.wait_for_load(hung) == set()
        assert engine.holds(hung, 0, 23)


@pytest.mark.parametrize("lost", [None, (1, 2), (0, 0)])
def test_a_prefix_counts_as_far_as_all_ranks_have_it(lost: tuple[int, int] | None) -> None:
    """Two tensor-parallel ranks, each with its half of the heads, under one scheduler."""
    inner = DictBackend()
    whole = KVLayout(3, 4, 4)
    shards = shards_of(tp_size=2, layers=[3], kv_heads=2, head_dim=4, v_head_dim=4, mla=False)
    with opened(inner) as store, engine_on(store, asynchronous=True) as engine:
        contexts = [context_of(store, s.layout, tp_rank=s.tp_rank, tp_size=s.tp_size) for s in shards]
        engine.side._contexts = contexts
        ranks = []
        for context in contexts:
            pages = [Pages.strided(torch.zeros(64, 2, 4, 8), LAYOUT, 4) for _ in range(3)]
            ranks.append((WorkerSide(store, context, layout=LAYOUT, dtype=torch.float32, pages=pages), pages))

        def heads_of(r: Any, layer: int, rank: int) -> list[torch.Tensor]:
            return [each[:, 2 * rank : 2 * rank + 2] for each in kv_of(r.all_token_ids, layer, whole)]

        first = request("a", TOKENS[:32])
        assert engine.admit(first) == 0
        orders = engine.side.step([("a", 0, 32)], engine.tables.get)
        for number, (worker, pages) in enumerate(ranks):
            worker.begin(orders)
            for layer in range(3):
                pages[layer].scatter(engine.tables["a"], 0, 32, *heads_of(first, layer, number))
                worker.save_layer(layer)
            worker.finish()
            engine.worker = worker
            engine.drain()
        names = [
            keys_of(hashed(TOKENS[:32], chunk_size=8, unfull=False), context=context(Isolation()))
            for context in contexts
        ]
        assert len({*names[0], *names[1]}) == 8
        if lost is not None:
            inner.delete([names[lost[0]][lost[1]]], deadline=float("inf"))
        second = request("b", TOKENS[:32])
        assert engine.admit(second) == (31 if lost is None else 8 * lost[1])
        orders = engine.side.step([], engine.tables.get)
        for number, (worker, pages) in enumerate(ranks):
            engine.worker = worker
            if orders.loads:
                worker.begin(orders)
                worker.start_loads()
                worker.finish()
                assert engine.wait_for_load(second) == set()
                end = orders.loads[0].end
                got = [torch.zeros(end, 2, 4), torch.zeros(end, 2, 4)]
                pages[0].gather(engine.tables["b"], 0, end, *got)
                assert all(torch.equal(a, b[:end]) for a, b in zip(got, heads_of(second, 0, number), strict=True))
            worker.close()


def test_of_several_ranks_with_the_same_kv_one_writes() -> None:
    with opened() as store, engine_on(store) as engine:
        engine.worker._writes = False
        r = request("a", TOKENS[:24])
        engine.side.arrived(r)
        engine.compute(r)
        assert stored(store, TOKENS[:24]) == 0


def test_layers_without_hooks_are_saved_and_their_loads_do_not_count() -> None:
    with opened() as store, engine_on(store) as engine:
        r = request("a", TOKENS[:24])
        engine.side.arrived(r)
        engine.admit(r)
        engine.worker.begin(engine.side.step([("a", 0, 24)], engine.tables.get))
        for layer, pages in enumerate(engine.pages):
            pages.scatter(engine.tables["a"], 0, 24, *kv_of(r.all_token_ids, layer))
        engine.worker.finish()
        engine.drain()
        assert stored(store, TOKENS[:24]) == 3
        again = request("b", TOKENS[:24])
        engine.side.arrived(again)
        assert engine.admit(again) == 23
        engine.worker.begin(engine.side.step([("b", 23, 1)], engine.tables.get))
        engine.worker.start_loads()
        engine.worker.finish()  # nobody asked for a layer
        assert engine.worker.take_failed() == set(engine.tables["b"])
