"""Real transformers models: what is loaded is what was saved, and the text does not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.testing.models import default_model_folder, tiny_model
from tests.faults.support import store_over

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.integrations.transformers import KVCacheStore, weights_fingerprint  # noqa: E402

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
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=DTYPES[dtype]).eval()
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
