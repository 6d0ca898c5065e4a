"""K stored before its rotary embedding, and sessions that outgrow their window, with real transformers models."""

from __future__ import annotations

import runpy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.eviction.base import RecordInfo
from kvstore.rope import RotarySpec
from kvstore.sessions import SessionStore
from kvstore.testing import DictBackend, FaultyBackend
from kvstore.testing.models import default_model_folder, tiny_model
from tests.faults.support import store_over

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.integrations.transformers import KVCacheStore  # noqa: E402

CHUNK = 16
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

pytestmark = pytest.mark.leaves("torch keeps threads of its own")


def make_store(backend: Any = None, **options: Any) -> kvstore.Store:
    return store_over(backend or DictBackend(), **{"chunk_size": CHUNK, "buffer_pool_bytes": 2 << 20, **options})


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Any:
    return torch.randint(3, 1000, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, ids: Any, **more: Any) -> tuple[Any, Any]:
    """(logits, cache) of a forward pass."""
    with torch.inference_mode():
        out = model(ids, use_cache=True, **more)
    return out.logits, out["cache"] if "cache" in out else out["past_key_values"]


def text(model: Any, ids: Any, **more: Any) -> Any:
    with torch.inference_mode():
        return model.generate(ids, max_new_tokens=8, do_sample=False, **more)


def assert_close(cache: Any, whole: Any, columns: int, most: float) -> None:
    for got, expected in zip(cache.layers, whole.layers, strict=True):
        assert got.keys.shape[2] == columns
        assert (got.keys - expected.keys[:, :, :columns]).abs().max() < most
        assert torch.equal(got.values, expected.values[:, :, :columns])


# Stored before the embedding.


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_save_and_load(kind: str, rope: str) -> None:
    more = {} if rope == "default" else {"rope_parameters": {"llama3": LLAMA3, "yarn": YARN}[rope]}
    model = tiny_model(kind, **more)
    ids = prompt(100, 2)
    with make_store() as store:
        kv = KVCacheStore(store, model, rope="pre")
        assert kv.rotary is not None
        assert kv.rotary.scaling == rope
        _, cache = forward(model, ids)
        assert kv.save(ids, cache).stored == 12
        loaded, hit = kv.load(ids)
        assert hit == 96
        assert_close(loaded, cache, 96, 1e-4)
        assert torch.equal(text(model, ids, **kv.cache_argument(loaded)), text(model, ids))
        # What is stored is K before the embedding: in the first layer the same for the same token anywhere.
        keys = kv._rows(ids[:1], None)[0].keys
        head = store.submit_heads(keys[:1]).result()[0]
        assert head is not None
        assert head.meta()["rope"] == "none"
        assert RotarySpec.from_text(head.meta()["rotary"]) == kv.rotary


def test_pre_and_post_never_mix() -> None:
    model = tiny_model("llama")
    other = tiny_model("llama", rope_parameters=LLAMA3)
    ids = prompt(64)
    with make_store() as store:
        pre = KVCacheStore(store, model, rope="pre", revision="same", model_name="same")
        post = KVCacheStore(store, model, revision="same", model_name="same")
        scaled = KVCacheStore(store, other, rope="pre", revision="same", model_name="same")
        pre.save(ids, forward(model, ids)[1])
        assert pre.load(ids)[1] == 63
        assert post.load(ids)[1] == 0
        assert scaled.load(ids)[1] == 0  # other rotary parameters
        post.save(ids, forward(model, ids)[1])
        _, cache = forward(model, ids)
        assert torch.equal(post.load(ids)[0].layers[1].keys, cache.layers[1].keys[:, :, :63])


def test_left_padded_batches() -> None:
    model = tiny_model("llama")
    rows = [prompt(80, seed=1)[0], prompt(70, seed=2)[0]]
    ids, mask = torch.zeros(2, 80, dtype=torch.long), torch.zeros(2, 80, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, 80 - len(row) :] = row
        mask[number, 80 - len(row) :] = 1
    with make_store() as store:
        kv = KVCacheStore(store, model, rope="pre")
        for row in rows:
            kv.save(row, forward(model, row[None])[1])
        loaded, hit = kv.load(ids, attention_mask=mask)
        assert hit == 74
        expected = text(model, ids, attention_mask=mask)
        assert torch.equal(text(model, ids, attention_mask=mask, **kv.cache_argument(loaded)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():  # as `from_pretrained(dtype=...)` does: the frequencies stay fp32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    ids = prompt(64)
    with make_store() as store:
        kv = KVCacheStore(store, model, rope="pre")
        _, cache = forward(model, ids)
        kv.save(ids, cache)
        loaded, hit = kv.load(ids)
        assert hit == 63
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        for got, expected in zip(loaded.layers, cache.layers, strict=True):
            k = expected.keys[:, :, :63].double()
            length = torch.hypot(k[..., :8], k[..., 8:]).repeat(1, 1, 1, 2)
            assert bool(((got.keys.double() - k).abs() <= 2.1 * unit * length + 1e-6).all())
            assert torch.equal(got.values, expected.values[:, :, :63])


def test_refusals() -> None:
    with make_store() as store:
        with pytest.raises(ConfigError, match="rope='both' is not known"):
            KVCacheStore(store, tiny_model("llama"), rope="both")
        with pytest.raises(ConfigError, match=r"were cast to torch\.bfloat16"):
            KVCacheStore(store, tiny_model("llama", dtype=torch.bfloat16), rope="pre")
        model = tiny_model("llama")
        model.model.rotary_emb.inv_freq *= 1.01
        with pytest.raises(ConfigError, match="frequencies are not those"):
            KVCacheStore(store, model, rope="pre")
        model = tiny_model("llama")
        model.model.rotary_emb.attention_scaling = 1.5
        with pytest.raises(ConfigError, match="not what its configuration says"):
            KVCacheStore(store, model, rope="pre")
        KVCacheStore(store, model)  # as it is, nothing needs to be known of it


# Sessions.


def play(sessions: SessionStore, model: Any, turn: Any, answer: int = 4) -> tuple[int, Any]:
    """Load, generate, save. Returns the hit and the answer."""
    cache, hit = sessions.load(turn)
    ids = torch.from_numpy(turn.input_ids)
    with torch.inference_mode():
        out = model.generate(
            ids, max_new_tokens=answer, min_new_tokens=answer, do_sample=False, **sessions.kv.cache_argument(cache)
        )
    turn.finish(out[0, ids.shape[1] :])
    assert sessions.save(turn, cache).kv.failed == 0
    return hit, out[0, ids.shape[1] :]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_what_was_stored_is_embedded_where_it_stands_now(kind: str, rope: str) -> None:
    """After a truncation: layer 0, which depends on token and position alone, is that of the truncated text."""
    more = {} if rope == "default" else {"rope_parameters": {"llama3": LLAMA3, "yarn": YARN}[rope]}
    model = tiny_model(kind, **more)
    with make_store() as store:
        sessions = SessionStore(KVCacheStore(store, model, rope="pre"), window=128, reserve=4)
        session = sessions.open("a")
        hits = [play(sessions, model, session.turn(prompt(28, seed=n)[0]))[0] for n in range(3)]
        assert hits == [0, 16, 48]  # of 0, 31 and 63 tokens whose KV was there
        turn = session.turn(prompt(40, seed=9)[0])
        assert turn.dropped > 0
        assert turn.dropped % CHUNK != 0 or turn.pieces[1].first == 0
        cache, hit = sessions.load(turn)
        assert hit > 30
        _, whole = forward(model, torch.from_numpy(turn.input_ids))
        first, expected = cache.layers[0], whole.layers[0]
        assert (first.keys - expected.keys[:, :, :hit]).abs().max() < 1e-4
        assert (first.values - expected.values[:, :, :hit]).abs().max() < 1e-5
        assert not torch.allclose(cache.layers[1].keys, whole.layers[1].keys[:, :, :hit], atol=1e-2)  # it approximates


def test_without_a_truncation_a_session_is_exact() -> None:
    model = tiny_model("llama")
    with make_store() as store:
        sessions = SessionStore(KVCacheStore(store, model, rope="pre"), window=1000)
        session = sessions.open("a", system=prompt(20, seed=7)[0])
        for number in range(4):
            turn = session.turn(prompt(25, seed=number)[0])
            expected = text(model, torch.from_numpy(turn.input_ids))[0, -8:]
            _, answer = play(sessions, model, turn, answer=8)
            assert torch.equal(answer, expected)
        assert sessions.stats()["hit_tokens"] > 100


def test_records_tell_the_policies_of_the_session() -> None:
    backend = FaultyBackend(DictBackend())
    seen: list[RecordInfo] = []
    put = backend.inner.put

    def recording(writes: Any, *, deadline: float) -> Any:
        seen.extend(write.info for write in writes if write.info is not None)
        return put(writes, deadline=deadline)

    backend.inner.put = recording  # type: ignore[method-assign]
    model = tiny_model("llama")
    with make_store(backend) as store:
        kv = KVCacheStore(store, model, rope="pre")
        sessions = SessionStore(kv, ttl=120.0, persist=False)
        session = sessions.open("a")
        for number in range(2):
            play(sessions, model, session.turn(prompt(20, seed=number)[0]))
        assert seen == [RecordInfo(0, 16, "a", 1, 120.0), RecordInfo(16, 16, "a", 2, 120.0)]
        seen.clear()
        ids = prompt(32, seed=5)
        kv.save(ids, forward(model, ids)[1])
        assert sorted(seen) == [RecordInfo(0, 16), RecordInfo(16, 16)]


def test_a_model_that_changes_between_turns() -> None:
    model = tiny_model("llama")
    with make_store() as store:
        sessions = SessionStore(KVCacheStore(store, model, rope="pre"), window=128, reserve=4)
        session = sessions.open("a")
        for number in range(3):
            play(sessions, model, session.turn(prompt(28, seed=number)[0]))
        turn = session.turn(prompt(40, seed=9)[0])
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        cache, hit = sessions.load(turn)  # notices
        assert hit == 0
        assert turn.context.digest == sessions.kv.context.digest
        ids = torch.from_numpy(turn.input_ids)
        _, cache = forward(model, ids)
        turn.finish()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        saved = sessions.save(turn, cache).kv  # computed with weights that are gone
        assert saved.stored == 0
        assert saved.failed == saved.chunks > 0
        assert "the model changed" in str(saved.error)


def test_the_example_of_the_manual_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text(encoding="utf-8")
    code = manual.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert "0 of them loaded" in lines[0]
    dropping = [line for line in lines if not line.endswith(" 0 dropped")]
    assert dropping
    assert all(" 0 of them loaded" not in line for line in lines[1:])


def test_rows_and_caches_must_fit_the_turn() -> None:
    model = tiny_model("llama")
    with make_store() as store:
        sessions = SessionStore(KVCacheStore(store, model, rope="pre"))
        turn = sessions.open("a").turn(prompt(40)[0])
        _, two = forward(model, prompt(40, batch=2))
        with pytest.raises(ConfigError, match="instead of"):
            sessions.save(turn, two)


# The real model.


@pytest.fixture(scope="module")
def smollm2() -> Any:
    folder = default_model_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip("make model was not run")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.model
def test_smollm2_says_the_same(smollm2: Any) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(topics["assignment"][:1200], return_tensors="pt")["input_ids"]
    with make_store(chunk_size=64, buffer_pool_bytes=64 << 20) as store:
        kv = KVCacheStore(store, model, rope="pre", revision="1")
        _, cache = forward(model, ids)
        kv.save(ids, cache)
        loaded, hit = kv.load(ids)
        assert hit == ids.shape[1] // 64 * 64 > 200
        worst = max(
            float((got.keys - whole.keys[:, :, :hit]).abs().max())
            for got, whole in zip(loaded.layers, cache.layers, strict=True)
        )
        assert worst < 1e-4
        assert torch.equal(text(model, ids, **kv.cache_argument(loaded)), text(model, ids))


def converse(smollm2: Any, rope: str, ids: Any, *, window: int, each: int) -> list[tuple[int, int, float, float]]:
    """Turns of `each` given tokens over a window: (hit, dropped, NLL on what was loaded, with "pre" also the NLL when
    all the context is computed anew) of each, the NLL over the turn's new tokens."""
    model, _ = smollm2
    results = []
    with make_store(chunk_size=32, buffer_pool_bytes=64 << 20) as store:
        kv = KVCacheStore(store, model, rope=rope, revision="1")
        sessions = SessionStore(kv, window=window, persist=False)
        session = sessions.open("a")
        for begin in range(0, len(ids) - each + 1, each):
            turn = session.turn(ids[begin : begin + each])
            cache, hit = sessions.load(turn)
            context = torch.from_numpy(turn.input_ids)
            reused, cache = forward(model, context[:, hit:], **kv.cache_argument(cache))
            anew = reused
            if hit and rope == "pre":
                anew, _ = forward(model, context)
            results.append((hit, turn.dropped, loss(reused, context, each), loss(anew, context, each)))
            turn.finish()
            assert sessions.save(turn, cache).kv.failed == 0
    return results


def loss(logits: Any, context: Any, new: int) -> float:
    """Mean NLL of the last `new` - 1 tokens of a context, by the logits of its last tokens."""
    return float(torch.nn.functional.cross_entropy(logits[0, -new:-1], context[0, 1 - new :]))


@pytest.mark.model
def test_smollm2_outgrows_its_window(smollm2: Any) -> None:
    """papers.md C9: hits after an overflow with and without K before its embedding, and NLL against recomputation."""
    _, tokenizer = smollm2
    ids = tokenizer(topics["assignment"])["input_ids"][:384]
    pre = converse(smollm2, "pre", ids, window=192, each=48)
    post = converse(smollm2, "post", ids, window=192, each=48)
    overflows = [number for number, (_, dropped, _, _) in enumerate(pre) if dropped]
    assert overflows
    assert all(pre[number][0] >= 60 for number in overflows)
    assert [hit for hit, dropped, _, _ in post if dropped] == [0] * len([1 for _, dropped, _, _ in post if dropped])
    assert sum(hit for hit, *_ in pre) > sum(hit for hit, *_ in post)
    after = pre[overflows[0] :]
    difference = sum(reused - anew for _, _, reused, anew in after) / len(after)
    assert difference <= 0.05
    assert any(reused != anew for _, _, reused, anew in after)
    exact = pre[: overflows[0]]
    assert all(abs(reused - anew) < 1e-3 for _, _, reused, anew in exact)
    print(f"hits pre {[h for h, *_ in pre]}, post {[h for h, *_ in post]}; NLL reuse − recompute {difference:+.4f}")
