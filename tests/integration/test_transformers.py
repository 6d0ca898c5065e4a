"""Real transformers models: what is loaded is what was saved, and the text does not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import ConfigError, TransientError
from kvstore.prefetch import Prefetcher
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.testing.models import default_model_folder, tiny_model
from tests.faults.support import items, store_over

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.integrations import _models  # noqa: E402
from kvstore.integrations import transformers as integration  # noqa: E402
from kvstore.integrations.transformers import KVCacheStore, SaveResult, weights_fingerprint  # noqa: E402

CHUNK = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

pytestmark = pytest.mark.leaves("torch keeps threads of its own")


def make_store(backend: Any = None, **options: Any) -> kvstore.Store:
    return store_over(backend or DictBackend(), chunk_size=CHUNK, buffer_pool_bytes=1 << 20, **options)


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Any:
    return torch.randint(3, 1000, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, ids: Any, **more: Any) -> Any:
    with torch.inference_mode():
        out = model(ids, use_cache=True, **more)
    return out["cache"] if "cache" in out else out["past_key_values"]


def text(model: Any, ids: Any, **more: Any) -> Any:
    with torch.inference_mode():
        return model.generate(ids, max_new_tokens=8, do_sample=False, **more)


def assert_same(cache: Any, whole: Any, columns: int, row: int | None = None) -> None:
    """The loaded cache holds just the first `columns` of the whole one."""
    assert len(cache.layers) == len(whole.layers)
    for got, expected in zip(cache.layers, whole.layers, strict=True):
        rows = slice(None) if row is None else slice(row, row + 1)
        assert torch.equal(got.keys, expected.keys[rows, :, :columns])
        assert torch.equal(got.values, expected.values[rows, :, :columns])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("serde", ["raw", "shuffle-zstd"])
def test_save_and_load(kind: str, dtype: str, batch: int, serde: str) -> None:
    model = tiny_model(kind, dtype=DTYPES[dtype])
    ids = prompt(100, batch)
    with make_store(remote_serde=serde) as store:
        kv = KVCacheStore(store, model)
        assert kv.load(ids)[1] == 0
        cache = forward(model, ids)
        saved = kv.save(ids, cache)
        assert (saved.chunks, saved.stored, saved.failed) == (6 * batch, 6 * batch, 0)
        loaded, hit = kv.load(ids)
        assert hit == 96
        assert_same(loaded, cache, 96)
        assert torch.equal(text(model, ids, **kv.cache_argument(loaded)), text(model, ids))
        again = kv.save(ids, cache)
        assert (again.stored, again.existing) == (0, 6 * batch)
        assert store.pool.stats().in_use == 0


def test_a_longer_prompt_hits_its_prefix_and_another_prompt_nothing() -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        kv.save(ids, forward(model, ids))
        longer = torch.cat([ids, prompt(30, seed=1)], dim=1)
        loaded, hit = kv.load(longer)
        assert hit == 64
        assert torch.equal(text(model, longer, **kv.cache_argument(loaded)), text(model, longer))
        assert kv.load(prompt(64, seed=2))[1] == 0
        assert kv.load(ids[0])[1] == 63  # one-dimensional; one token is left to compute
        assert kv.load(ids[0].tolist())[1] == 63


def test_a_fully_cached_prompt_leaves_one_token_to_compute() -> None:
    model = tiny_model("llama")
    ids = prompt(48)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        kv.save(ids, cache)
        loaded, hit = kv.load(ids)
        assert hit == 47
        assert_same(loaded, cache, 47)
        assert torch.equal(text(model, ids, **kv.cache_argument(loaded)), text(model, ids))


def test_a_prompt_shorter_than_a_chunk_stores_nothing_and_hits_nothing() -> None:
    model = tiny_model("llama")
    ids = prompt(CHUNK - 1)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        assert kv.save(ids, forward(model, ids)).chunks == 0
        loaded, hit = kv.load(ids)
        assert hit == 0
        assert torch.equal(text(model, ids, **kv.cache_argument(loaded)), text(model, ids))
        assert kv.load(prompt(1))[1] == 0


def test_a_last_partial_chunk_is_stored_if_wanted_and_found_only_as_itself() -> None:
    model = tiny_model("llama")
    ids = prompt(40)
    with make_store(save_unfull_chunk=True) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        assert kv.save(ids, cache).stored == 3
        loaded, hit = kv.load(ids)
        assert hit == 39
        assert_same(loaded, cache, 39)
        assert kv.load(torch.cat([ids, prompt(20, seed=3)], dim=1))[1] == 32
        assert kv.load(ids[:, :36])[1] == 32


def test_rows_of_a_batch_share_chunks_and_the_shortest_row_decides() -> None:
    model = tiny_model("llama")
    one = prompt(64)
    other = torch.cat([one[:, :32], prompt(32, seed=5)], dim=1)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        kv.save(one, forward(model, one))
        both = torch.cat([one, other])
        loaded, hit = kv.load(both)
        assert hit == 32
        assert torch.equal(text(model, both, **kv.cache_argument(loaded)), text(model, both))


def test_left_padded_batches() -> None:
    model = tiny_model("llama")
    rows = [prompt(80, seed=1)[0], prompt(64, seed=2)[0], prompt(75, seed=3)[0]]
    width = 80
    ids = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = row
        mask[number, width - len(row) :] = 1
    with make_store() as store:
        kv = KVCacheStore(store, model)
        for row in rows:  # stored one by one, without padding
            kv.save(row, forward(model, row[None]))
        loaded, hit = kv.load(ids, attention_mask=mask)
        assert hit == 69  # the last row's 5 columns of padding and 4 chunks
        expected = text(model, ids, attention_mask=mask)
        assert torch.equal(text(model, ids, attention_mask=mask, **kv.cache_argument(loaded)), expected)
        for row in rows:
            assert_same(kv.load(row)[0], forward(model, row[None]), min(len(row) - 1, len(row) // CHUNK * CHUNK))


def test_padding_is_stripped_on_save_too() -> None:
    model = tiny_model("llama")
    row = prompt(48)
    ids = torch.cat([torch.zeros(1, 7, dtype=torch.long), row], dim=1)
    mask = torch.cat([torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 48, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids, attention_mask=mask, position_ids=positions)
        assert kv.save(ids, cache, attention_mask=mask).stored == 3
        loaded, hit = kv.load(torch.cat([row, prompt(4, seed=8)], dim=1))
        assert hit == 48
        got: Any
        for got, expected in zip(loaded.layers, cache.layers, strict=True):
            assert torch.equal(got.keys, expected.keys[:, :, 7:])


def test_a_bad_mask_is_named() -> None:
    model = tiny_model("llama")
    ids = prompt(32)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        mask = torch.ones(1, 32, dtype=torch.long)
        mask[0, 10] = 0
        with pytest.raises(ConfigError, match="padding between"):
            kv.load(ids, attention_mask=mask)
        with pytest.raises(ConfigError, match="no tokens"):
            kv.load(ids, attention_mask=torch.zeros(1, 32, dtype=torch.long))
        with pytest.raises(ConfigError, match="mask has shape"):
            kv.load(ids, attention_mask=torch.ones(1, 31, dtype=torch.long))


def test_a_chunk_that_fails_in_any_layer_ends_the_prefix_there() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    ids = prompt(100)
    backend = FaultyBackend(DictBackend())
    with make_store(backend) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        kv.save(ids, cache)
        keys = kvstore.chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK)
        faulty = FaultyBackend(backend.inner, by_key={("get", keys[3]): [Fault.error()] * 20})
        with store_over(faulty, chunk_size=CHUNK, buffer_pool_bytes=1 << 20) as broken:
            loaded, hit = KVCacheStore(broken, model).load(ids)
            assert hit == 48
            assert_same(loaded, cache, 48)
            assert broken.pool.stats().in_use == 0


def test_a_deadline_gives_what_is_complete_or_nothing() -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    backend = FaultyBackend(DictBackend())
    with make_store(backend) as store:
        kv = KVCacheStore(store, model)
        kv.save(ids, forward(model, ids))
        backend.push(Fault.hang(), operation="get")
        assert kv.load(ids, timeout=0.2)[1] == 0
        backend.release()
        assert kv.load(ids)[1] == 63


def test_a_cache_larger_than_the_pool_is_read_in_smaller_groups() -> None:
    model = tiny_model("llama", num_hidden_layers=12)
    ids = prompt(600)
    with store_over(DictBackend(), chunk_size=CHUNK, buffer_pool_bytes=1 << 20) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        assert kv.layout.chunk_bytes(600, "float32") > store.pool.nbytes
        kv.save(ids, cache)
        loaded, hit = kv.load(ids)
        assert hit == 592
        assert_same(loaded, cache, 592)


def test_other_weights_or_rotary_parameters_under_the_same_name_never_match() -> None:
    ids = prompt(64)
    one, two = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    scaled = tiny_model("llama", seed=0, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert len({weights_fingerprint(model) for model in (one, two, scaled)}) == 3
    with make_store() as store:
        kv = KVCacheStore(store, one, model_name="same")
        kv.save(ids, forward(one, ids))
        assert kv.load(ids)[1] == 63
        assert KVCacheStore(store, two, model_name="same").load(ids)[1] == 0
        assert KVCacheStore(store, scaled, model_name="same").load(ids)[1] == 0
        assert KVCacheStore(store, one, model_name="other").load(ids)[1] == 0
        assert KVCacheStore(store, one, model_name="same", cache_salt="tenant").load(ids)[1] == 0
        assert KVCacheStore(store, one.to(torch.bfloat16), model_name="same").load(ids)[1] == 0


def test_any_byte_of_weights_buffers_and_configuration_changes_the_fingerprint() -> None:
    model = tiny_model("llama")
    weight = model.model.embed_tokens.weight
    seen = [weights_fingerprint(model)]
    with torch.no_grad():
        for index in (1, weight.numel() // 2, weight.numel() - 1):  # between and behind what a sample would take
            weight.view(-1)[index] += 1
            seen.append(weights_fingerprint(model))
        model.model.rotary_emb.inv_freq[-1] *= 2
        seen.append(weights_fingerprint(model))
        weight.copy_(weight.view(64, 1024).T.clone())  # the same numbers elsewhere
        seen.append(weights_fingerprint(model))
    model.config.mlp_bias = True
    seen.append(weights_fingerprint(model))
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_is_that_of_the_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tiny_model("llama", dtype=torch.bfloat16), tiny_model("llama", dtype=torch.bfloat16)
    two.config._name_or_path = "/somewhere/else"
    two.config.dtype = torch.bfloat16  # as from_pretrained sets it
    two.config.transformers_version = "5.19.0"
    two.config.use_cache = False
    expected = weights_fingerprint(one)
    assert weights_fingerprint(two) == expected
    monkeypatch.setattr(_models, "_BLOCK_BYTES", 1000)
    assert weights_fingerprint(two) == expected
    weight = two.lm_head.weight = torch.nn.Parameter(two.lm_head.weight.T.contiguous().T)
    two.model.embed_tokens.weight = weight
    assert not weight.is_contiguous()
    assert weights_fingerprint(two) == expected


def test_weights_without_bytes_need_a_revision() -> None:
    model = tiny_model("llama")
    model.model.norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"))
    with make_store() as store:
        with pytest.raises(ConfigError, match=r"norm\.weight has no bytes.*revision"):
            KVCacheStore(store, model)
        assert KVCacheStore(store, model, revision="v1").context.revision == "v1"


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.view(-1)[1] += 1


def _one_tensor_replaced(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(weight * 2)


def _through_data(model: Any) -> None:  # torch counts no version; PEFT merges adapters so
    model.model.layers[0].self_attn.k_proj.weight.data *= 2


def _rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 2


def _adapter(model: Any) -> None:  # as PEFT marks the layers that an adapter works on
    model.model.layers[0].self_attn.k_proj._active_adapter = ["other"]


def _more_adapters(model: Any) -> None:
    model.peft_config = {"other": None}


def _inference_tensors(model: Any) -> None:  # they have no version
    with torch.inference_mode():
        model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(torch.ones(32, 64), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [_in_place, _one_tensor_replaced, _through_data, _rotary, _adapter, _more_adapters, _inference_tensors],
)
def test_weights_changed_later_do_not_match(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(64)
    model = tiny_model("llama")
    hashed: list[str] = []

    def counted(of: Any) -> str:
        hashed.append(weights_fingerprint(of))
        return hashed[-1]

    monkeypatch.setattr(integration, "weights_fingerprint", counted)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        promised = KVCacheStore(store, model, revision="v1")
        for each in (kv, promised):
            each.save(ids, forward(model, ids))
            assert each.load(ids)[1] == 63
        assert len(hashed) == 1  # not again while nothing changes
        change(model)
        assert kv.load(ids)[1] == 0
        assert kv.save(ids, forward(model, ids)).stored == 4
        assert kv.load(ids)[1] == 63
        assert len(set(hashed)) == 2
        assert promised.load(ids)[1] == 63  # whoever gives a revision answers for it


def test_a_change_that_no_token_shows_is_seen_by_refresh() -> None:
    ids = prompt(64)
    model = tiny_model("llama")
    with make_store() as store:
        kv = KVCacheStore(store, model)
        kv.save(ids, forward(model, ids))
        model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1
        kv.refresh()
        assert kv.load(ids)[1] == 0


def test_a_model_that_was_converted_later_is_stored_in_its_new_dtype() -> None:
    ids = prompt(64)
    model = tiny_model("llama")
    with make_store() as store:
        kv = KVCacheStore(store, model, revision="v1")
        kv.save(ids, forward(model, ids))
        model.to(torch.bfloat16)
        assert kv.load(ids)[1] == 0
        cache = forward(model, ids)
        assert kv.save(ids, cache).stored == 4
        loaded, hit = kv.load(ids)
        assert hit == 63
        assert_same(loaded, cache, 63)


def save_in_thread(kv: KVCacheStore, *args: Any) -> tuple[threading.Thread, list[SaveResult]]:
    results: list[SaveResult] = []
    thread = threading.Thread(target=lambda: results.append(kv.save(*args)))
    thread.start()
    return thread, results


def test_a_long_prompt_waits_for_room_in_the_write_queue() -> None:
    model = tiny_model("llama")
    ids = prompt(600)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    with make_store(backend, write_queue_bytes=30_000) as store:  # two chunks
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        thread, results = save_in_thread(kv, ids, cache)
        backend.wait_hung()
        backend.release()
        thread.join(30)
        assert results == [SaveResult(37, 37, 0, 0, results[0].nbytes)]
        assert store.stats()["put_dropped"] == 0
        assert_same(kv.load(ids)[0], cache, 592)


def test_a_chunk_waits_while_other_writers_fill_the_write_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    with make_store(backend, write_queue_bytes=13_000) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        others = store.submit_put(items([kvstore.opaque_key("other")]))
        backend.wait_hung()
        filled = threading.Event()
        put = kv._put

        def told(*args: Any) -> Any:
            filled.set()
            return put(*args)

        monkeypatch.setattr(kv, "_put", told)
        thread, results = save_in_thread(kv, ids, cache)
        assert filled.wait(30)
        backend.release()
        thread.join(30)
        assert others.result()[0].status is kvstore.Status.OK
        assert (results[0].stored, results[0].failed) == (4, 0)


@pytest.mark.parametrize("on_error", ["miss", "raise"])
def test_a_chunk_that_lost_the_race_for_room_is_tried_again(monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    with make_store(on_error=on_error) as store:
        kv = KVCacheStore(store, model)
        put = store._put
        refusals = [TransientError("dropped: the write queue is full", operation="put") for _ in range(3)]

        def refused_at_first(*args: Any, **more: Any) -> Any:
            if not refusals:
                return put(*args, **more)
            done: kvstore.Completion[Any] = kvstore.Completion()
            error = refusals.pop()
            if on_error == "raise":
                done.set_exception(error)
            else:
                done.set_result([kvstore.Outcome.failed(error)])
            return done

        monkeypatch.setattr(store, "_put", refused_at_first)
        assert kv.save(ids, forward(model, ids)).stored == 4
        assert not refusals


def test_a_save_ends_at_its_deadline_and_says_what_failed() -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()] * 4})
    with make_store(backend, write_queue_bytes=13_000) as store:
        kv = KVCacheStore(store, model)
        saved = kv.save(ids, forward(model, ids), timeout=0.3)
        assert (saved.stored, saved.failed) == (0, 4)
        assert isinstance(saved.error, TransientError)
        backend.release()


def test_on_error_raise_raises_after_all_chunks_were_tried() -> None:
    model = tiny_model("llama")
    ids = prompt(64)
    backend = FaultyBackend(DictBackend(), {"put": [Fault.error()]})
    with make_store(backend, on_error="raise") as store:
        kv = KVCacheStore(store, model)
        with pytest.raises(TransientError, match="scripted"):
            kv.save(ids, forward(model, ids))
        assert kv.save(ids, forward(model, ids)).existing == 3


def test_models_share_a_prefetcher_of_their_store() -> None:
    one, other = tiny_model("llama", seed=0), tiny_model("qwen2", seed=1)
    ids = prompt(64)
    with make_store() as store, make_store() as another:
        prefetcher = Prefetcher(store, budget_bytes=8192)
        for model in (one, other):
            kv = KVCacheStore(store, model, prefetcher=prefetcher)
            cache = forward(model, ids)
            kv.save(ids, cache)
            loaded, hit = kv.load(ids)
            assert hit == 63
            assert_same(loaded, cache, 63)
        assert 0 < prefetcher.stats()["peak_bytes"] <= 8192
        with pytest.raises(ConfigError, match="another store"):
            KVCacheStore(another, one, prefetcher=prefetcher)


@pytest.mark.parametrize("missing", [0, 2])
def test_what_misses_is_not_read_in_later_layers(missing: int) -> None:
    layers = 8  # one group each
    model = tiny_model("llama", num_hidden_layers=layers)
    ids = prompt(100)
    backend = FaultyBackend(DictBackend())
    with make_store(backend) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        kv.save(ids, cache)
        keys = kvstore.chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK)
        backend.inner.delete([keys[missing]], deadline=float("inf"))
        known = FaultyBackend(backend, {"stat": []})
        known.stat = lambda keys, *, deadline: [kvstore.Outcome(kvstore.Status.OK)] * len(keys)  # type: ignore[method-assign]
        with store_over(known, chunk_size=CHUNK, buffer_pool_bytes=1 << 20) as hopeful:
            prefetcher = Prefetcher(hopeful, first_group_bytes=1)
            loaded, hit = KVCacheStore(hopeful, model, prefetcher=prefetcher).load(ids)
            assert hit == missing * CHUNK
            # Two groups were under way; a get may read the header besides.
            assert 1 <= known.count("get", keys[5]) <= 4
            if missing:
                assert known.count("get", keys[0]) >= layers
                assert_same(loaded, cache, hit)
                heads, size = kv.layout.num_kv_heads, kv.layout.head_dim
                layer: Any
                for layer in loaded.layers:
                    assert layer.keys.untyped_storage().nbytes() == heads * hit * size * 4
            else:
                assert known.count("get") <= 6 * 4
            # A group that was given up may still be under way; all memory comes back when it ends.
            hopeful.pool.acquire(hopeful.pool.nbytes, 30).release()


def test_the_last_column_is_not_read_if_it_is_a_chunk_of_its_own() -> None:
    model = tiny_model("llama")
    ids = prompt(33)
    backend = FaultyBackend(DictBackend())
    with make_store(backend, save_unfull_chunk=True) as store:
        kv = KVCacheStore(store, model)
        assert kv.save(ids, forward(model, ids)).stored == 3
        assert kv.load(ids)[1] == 32
        keys = kvstore.chunk_keys(ids[0], context=kv.context, chunk_size=CHUNK, save_unfull_chunk=True)
        assert backend.count("get", keys[2]) == 0


WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_larger_than_the_pool_is_read_in_parts(batch: int) -> None:
    model = tiny_model("llama", **WIDE)
    ids = prompt(400, batch)
    with make_store() as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        assert kv.layout.segment_bytes(400, "float32") > store.pool.nbytes
        assert kv.save(ids, cache).failed == 0
        loaded, hit = kv.load(ids)
        assert hit == 399
        assert_same(loaded, cache, 399)
        longer = torch.cat([ids[:, :320], prompt(80, batch, seed=9)], dim=1)
        loaded, hit = kv.load(longer)
        assert hit == 320
        assert_same(loaded, cache, 320)


def test_a_pool_too_small_for_one_layer_of_a_chunk_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", **WIDE)
    ids = prompt(520)
    backend = DictBackend()
    with (
        store_over(backend, chunk_size=512, buffer_pool_bytes=8 << 20) as large,
        store_over(backend, chunk_size=512, buffer_pool_bytes=1 << 20) as small,
    ):
        cache = forward(model, ids)
        assert KVCacheStore(large, model).save(ids, cache).stored == 1
        assert KVCacheStore(large, model).load(ids)[1] == 512
        assert not caplog.records
        assert KVCacheStore(small, model).load(ids)[1] == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "buffer_pool_bytes" in caplog.text


def test_padding_on_the_right_is_refused_on_load() -> None:
    model = tiny_model("llama")
    ids = prompt(48, 2)
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 40:] = 0
    with make_store() as store:
        kv = KVCacheStore(store, model)
        assert kv.save(ids, forward(model, ids, attention_mask=mask), attention_mask=mask).stored == 5
        with pytest.raises(ConfigError, match=r"row 1 .* padding on the right"):
            kv.load(ids, attention_mask=mask)
        assert kv.load(ids[1, :40])[1] == 32


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    import transformers

    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2)
    )
    with make_store() as store:
        with pytest.raises(ConfigError, match=r"GPT2.* no rotary"):
            KVCacheStore(store, gpt2)
        with pytest.raises(ConfigError, match="sliding"):
            KVCacheStore(store, tiny_model("mistral", sliding_window=32))
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=100)
        )
        with pytest.raises(ConfigError, match="encoder-decoder"):
            KVCacheStore(store, t5)
        dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        with pytest.raises(ConfigError, match="dynamic rotary"):
            KVCacheStore(store, dynamic)


def test_a_cache_of_another_model_is_refused() -> None:
    ids = prompt(32)
    with make_store() as store:
        kv = KVCacheStore(store, tiny_model("llama"))
        with pytest.raises(ConfigError, match="3 layers"):
            kv.save(ids, forward(tiny_model("llama", num_hidden_layers=3), ids))
        with pytest.raises(ConfigError, match="shape"):
            kv.save(ids, forward(tiny_model("llama", num_key_value_heads=4), ids))
        with pytest.raises(ConfigError, match="bfloat16"):
            kv.save(ids, forward(tiny_model("llama", dtype=torch.bfloat16), ids))
        with pytest.raises(ConfigError, match="DynamicCache"):
            kv.save(ids, None)
        mixed = forward(kv._model, ids)
        mixed.layers[1].values = mixed.layers[1].values.to(torch.float16)
        with pytest.raises(ConfigError, match=r"layer 1 .* values of torch.float16"):
            kv.save(ids, mixed)
        short = forward(kv._model, ids)
        short.layers[1].values = short.layers[1].values[:, :, :-1]
        with pytest.raises(ConfigError, match=r"layer 1 .* values of shape \(1, 2, 31, 16\)"):
            kv.save(ids, short)
        flat = forward(kv._model, ids)
        flat.layers[0].keys, flat.layers[0].values = flat.layers[0].keys[0], flat.layers[0].values[0]
        with pytest.raises(ConfigError, match=r"layer 0 .* keys of shape \(2, 32, 16\)"):
            kv.save(ids, flat)


def test_a_cache_with_room_that_is_not_filled_is_refused() -> None:
    import transformers

    model = tiny_model("llama")
    ids = prompt(32)
    with make_store() as store:
        static: Any = transformers.StaticCache(config=model.config, max_cache_len=64)
        kv = KVCacheStore(store, model)
        with pytest.raises(ConfigError, match="DynamicCache"):
            kv.save(ids, forward(model, ids, **kv.cache_argument(static)))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = default_model_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip("the model is not there; `make model` makes it")
    return folder


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_real_model_answers_the_same_from_the_store(smollm2: Path, tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=DTYPES[dtype])
    model.eval()
    note = "The meeting with Alice is on Tuesday at 4pm in room B12. " * 24
    ids = tokenizer(note + "\nQuestion: In which room is the meeting?\nAnswer:", return_tensors="pt").input_ids
    with kvstore.open_store(f"file://{tmp_path}", remote_serde="shuffle-zstd", chunk_size=128) as store:
        kv = KVCacheStore(store, model)
        cache = forward(model, ids)
        kv.save(ids, cache)
        loaded, hit = kv.load(ids)
        assert hit == (ids.shape[1] - 1) // 128 * 128 >= 256
        assert_same(loaded, cache, hit)
        with_store = text(model, ids, pad_token_id=0, **kv.cache_argument(loaded))
        assert torch.equal(with_store, text(model, ids, pad_token_id=0))


@pytest.mark.model
def test_the_demo_runs_and_is_as_claimed(smollm2: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "examples/demo.py", "--tokens", "700", "--new-tokens", "4", "--no-bench"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout
    assert "hit prefix in B" in done.stdout


def test_importing_kvstore_does_not_import_torch() -> None:
    code = "import sys, json, kvstore; print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
