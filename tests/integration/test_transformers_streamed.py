"""`KVCacheStore.load_streamed`: what is loaded or computed is what the model computed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.keys import chunk_keys
from kvstore.stream import COMPUTED, LinkShare, Policy, PrefillModel, Streamer
from kvstore.testing import DictBackend
from kvstore.testing.models import tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.integrations.transformers import KVCacheStore  # noqa: E402
from tests.faults.support import store_over  # noqa: E402
from tests.integration.test_transformers import (  # noqa: E402
    CHUNK,
    assert_same,
    forward,
    make_store,
    prompt,
    smollm2,  # noqa: F401 - a fixture
    text,
)

pytestmark = pytest.mark.leaves("torch keeps threads of its own")

LOAD = Policy(text="never")
SLOW = PrefillModel(1.0)


def streamer_of(store: Any, prefill: PrefillModel | None = SLOW, **options: Any) -> Streamer:
    return Streamer(store, prefill=prefill, group_chunks=2, **{"policy": LOAD, **options})


def close_to(cache: Any, whole: Any, tokens: int) -> None:
    for got, expected in zip(cache.layers, whole.layers, strict=True):
        assert got.keys.shape[2] == tokens
        for one, two in ((got.keys, expected.keys), (got.values, expected.values)):
            torch.testing.assert_close(one, two[:, :, :tokens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 5 * CHUNK + 3, 6 * CHUNK])
def test_all_is_loaded(kind: str, rope: str, tokens: int) -> None:
    model = tiny_model(kind)
    ids = prompt(tokens)
    with make_store() as store:
        kv = KVCacheStore(store, model, rope=rope)
        whole = forward(model, ids)
        kv.save(ids, whole)
        found = kv.load_streamed(ids, streamer_of(store))
        held = (tokens - 1) // CHUNK * CHUNK
        assert found.tokens == held
        assert found.report.computed_tokens == 0
        if held:
            (assert_same if rope == "post" else close_to)(found.cache, whole, held)
        assert torch.equal(text(model, ids, **kv.cache_argument(found.cache)), text(model, ids))
        assert store.pool.stats().in_use == 0


@pytest.mark.parametrize("holes", [(0,), (3,), (1, 4), tuple(range(6))])
@pytest.mark.parametrize("rope", ["post", "pre"])
def test_what_is_not_stored_is_computed_by_the_model(holes: tuple[int, ...], rope: str) -> None:
    model = tiny_model("llama")
    ids = prompt(6 * CHUNK + 5)
    with make_store() as store:
        kv = KVCacheStore(store, model, rope=rope)
        whole = forward(model, ids)
        kv.save(ids, whole)
        keys = chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK)
        store.submit_delete([keys[hole] for hole in holes]).result()
        found = kv.load_streamed(ids[0], streamer_of(store, PrefillModel(1e-6)))
        groups = {hole // 2 for hole in holes}
        assert [n for n, level in enumerate(found.report.levels) if level == COMPUTED] == sorted(groups)
        close_to(found.cache, whole, 6 * CHUNK)
        assert torch.equal(text(model, ids, **kv.cache_argument(found.cache)), text(model, ids))


def test_text_that_fits_is_computed_and_nothing_is_loaded() -> None:
    model = tiny_model("llama")
    ids = prompt(4 * CHUNK + 1)
    with make_store(remote_serde="int8") as store:
        kv = KVCacheStore(store, model)
        whole = forward(model, ids)
        kv.save(ids, whole)
        found = kv.load_streamed(ids, streamer_of(store, PrefillModel(1e-9), policy=Policy()), slo_s=600.0)
        assert found.report.levels == (COMPUTED, COMPUTED)
        assert found.report.loaded_bytes == 0
        close_to(found.cache, whole, 4 * CHUNK)


def test_without_prefill_the_cache_ends_at_the_first_hole() -> None:
    model = tiny_model("llama")
    ids = prompt(6 * CHUNK + 1)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        whole = forward(model, ids)
        kv.save(ids, whole)
        keys = chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK)
        store.submit_delete([keys[3]]).result()
        found = kv.load_streamed(ids, streamer_of(store, None))
        assert found.tokens == 2 * CHUNK
        assert_same(found.cache, whole, 2 * CHUNK)
        store.submit_delete(keys).result()
        none = kv.load_streamed(ids, streamer_of(store, None))
        assert none.tokens == 0
        assert torch.equal(text(model, ids, **kv.cache_argument(none.cache)), text(model, ids))


def test_a_model_that_fails_gives_everything_back() -> None:
    model = tiny_model("llama")
    ids = prompt(4 * CHUNK + 1)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        mine = streamer_of(store, PrefillModel(1e-6))

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

        model.base_model.forward = broken
        with pytest.raises(RuntimeError, match="out of memory"):
            kv.load_streamed(ids, mine)
        assert store.pool.stats().in_use == 0
        assert mine.link.requests == 0


def test_what_makes_no_sense_is_refused() -> None:
    model = tiny_model("llama")
    ids = prompt(2 * CHUNK + 1)
    with make_store() as store, make_store() as other:
        kv = KVCacheStore(store, model)
        with pytest.raises(ConfigError, match="another store"):
            kv.load_streamed(ids, streamer_of(other))
        with pytest.raises(ConfigError, match="batch of 2"):
            kv.load_streamed(prompt(2 * CHUNK + 1, batch=2), streamer_of(store))
        for slo in (0.0, -1.0, math.nan):
            with pytest.raises(ConfigError, match="slo_s"):
                kv.load_streamed(ids, streamer_of(store), slo_s=slo)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_says_the_same_from_a_stream(smollm2: Any) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = model.eval()
    ids = prompt(20 * CHUNK + 1)
    with store_over(DictBackend(), chunk_size=CHUNK, buffer_pool_bytes=64 << 20) as store:
        kv = KVCacheStore(store, model, revision="test")
        whole = forward(model, ids)
        kv.save(ids, whole)
        keys = chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK)
        store.submit_delete([keys[9]]).result()
        mine = Streamer(store, prefill=PrefillModel(1e-3), policy=LOAD, link=LinkShare())  # groups of 6 chunks
        found = kv.load_streamed(ids, mine)
        assert found.report.levels == (0, COMPUTED, 0, 0)
        again = text(model, ids, **kv.cache_argument(found.cache))
        assert torch.equal(again, text(model, ids))
