"""Stores with the real lossy codecs: profiles from files, keys, levels, refusals that name both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backend import Status
from kvstore.codec import codec_number
from kvstore.codec import profile as profiles
from kvstore.codec.floats import to_float32
from kvstore.codec.profile import Profile
from kvstore.dropping import choose_tokens, reduced_item
from kvstore.errors import ConfigError
from kvstore.keys import Key, chunk_keys
from kvstore.layout import KVLayout
from kvstore.record import kv_spec, parse_header
from kvstore.rope import RotarySpec
from kvstore.store import Item, Progress, Store, Want
from kvstore.testing import DictBackend
from tests.faults.support import Unclosed, store_over
from tests.unit.codec_profile_support import segment_of, small_profile, synthetic_kv
from tests.unit.kvt_support import make_profile

LAYOUT = KVLayout(3, 2, 16)
DTYPE = "bfloat16"
TOKENS = 64
SPEC = kv_spec(LAYOUT, DTYPE, TOKENS)
META = {"tokens": [0, TOKENS], "rope": "applied", "dtype": DTYPE}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does, with no profile."""
    for name, value in vars(profiles).items():
        if name.startswith("_") and isinstance(value, dict) and all(isinstance(v, Profile) for v in value.values()):
            monkeypatch.setattr(profiles, name, {})


def profile_file(name: str, path: Path) -> Profile:
    profile = small_profile(LAYOUT) if name == "cachegen" else make_profile(LAYOUT)
    profile.save(path)
    return profile


def segments(seed: int = 0, tokens: int = TOKENS) -> list[memoryview]:
    k, v = synthetic_kv(LAYOUT, tokens, seed)
    return [segment_of(k, v, layer, DTYPE) for layer in range(LAYOUT.num_layers)]


def key_of(store: Store, **more: Any) -> Key:
    context = store.key_context(model="made/up", layout=LAYOUT, dtype=DTYPE, **more)
    return chunk_keys(range(TOKENS), context=context, chunk_size=TOKENS)[0]


def off(got: bytes | bytearray, raw: list[memoryview]) -> float:
    """Energy of the error, as a share."""
    after = to_float32(memoryview(got), DTYPE).astype(float)
    before = np.concatenate([to_float32(view, DTYPE) for view in raw]).astype(float)
    return float(((after - before) ** 2).sum() / (before**2).sum())


@pytest.mark.parametrize("name", ["cachegen", "kvt"])
def test_a_profile_from_a_file_serves_a_store(name: str, tmp_path: Path) -> None:
    path, backend, raw = tmp_path / "a.kvprofile", DictBackend(), segments()
    profile = profile_file(name, path)
    with store_over(backend, remote_serde=name, codec_profile=str(path)) as store:
        context = store.key_context(model="made/up", layout=LAYOUT, dtype=DTYPE)
        assert (context.codec, context.codec_profile) == (name, profile.id)
        key = key_of(store)
        assert store.submit_put([Item(key, raw, SPEC, META)]).result()[0].ok
        got = bytearray(SPEC.raw_bytes)
        assert store.submit_get([Want(key, memoryview(got), SPEC)]).result()[0].ok
        assert off(got, raw) < 0.6
        levels = parse_header(backend.records[key]).levels
        assert len(backend.records[key]) < SPEC.raw_bytes
        progress, refined = Progress(), bytearray(SPEC.raw_bytes)
        for level in range(levels):
            want = Want(key, memoryview(refined), SPEC, level=level, progress=progress)
            assert store.submit_get([want]).result()[0].ok
            alone = bytearray(SPEC.raw_bytes)
            assert store.submit_get([Want(key, memoryview(alone), SPEC, level=level)]).result()[0].ok
            assert refined == alone
        assert progress.complete
        assert refined == got
        part = bytearray(SPEC.sizes[1])
        assert store.submit_get([Want(key, memoryview(part), SPEC, 1, 1)]).result()[0].ok
        assert part == got[SPEC.sizes[0] :][: SPEC.sizes[1]]


@pytest.mark.parametrize("name", ["cachegen", "kvt"])
def test_several_profiles_the_first_encodes_all_decode(name: str, tmp_path: Path) -> None:
    old, new, backend, raw = tmp_path / "old", tmp_path / "new", Unclosed(DictBackend()), segments()
    profile_file(name, old)
    fresh = small_profile(LAYOUT, levels=(2.0,), level=0) if name == "cachegen" else make_profile(LAYOUT, seed=7)
    fresh.save(new)
    with store_over(backend, remote_serde=name, codec_profile=str(old)) as store:
        before = key_of(store)
        assert store.submit_put([Item(before, raw, SPEC, META)]).result()[0].ok
    with store_over(backend, remote_serde=name, codec_profile=f"{new}, {old}") as store:
        assert key_of(store) != before
        assert key_of(store, codec_profile=Profile.load(old).id) == before
        got = bytearray(SPEC.raw_bytes)
        assert store.submit_get([Want(before, memoryview(got), SPEC)]).result()[0].ok


def test_a_profile_that_is_not_loaded_makes_a_miss(tmp_path: Path) -> None:
    old, new, inner = tmp_path / "old", tmp_path / "new", DictBackend()
    profile_file("kvt", old)
    make_profile(LAYOUT, seed=7).save(new)
    with store_over(Unclosed(inner), remote_serde="kvt", codec_profile=str(old)) as store:
        key = key_of(store)
        assert store.submit_put([Item(key, segments(), SPEC, META)]).result()[0].ok
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.codec.kvt_format.find", lambda _: None, raising=False)
        patch.setattr("kvstore.codec.kvt.find", lambda _: None, raising=False)
        with store_over(Unclosed(inner), remote_serde="kvt", codec_profile=str(new)) as store:
            want = Want(key, memoryview(bytearray(SPEC.raw_bytes)), SPEC)
            assert store.submit_get([want]).result()[0].status is Status.MISS
            assert store.stats()["unknown_profiles"] == 1
    assert not inner.quarantined


def test_what_does_not_fit_the_profile_is_refused_early_and_names_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "a.kvprofile"
    profile = profile_file("kvt", path)
    other = KVLayout(3, 4, 16)
    with store_over(DictBackend(), remote_serde="kvt", codec_profile=str(path)) as store:
        with pytest.raises(ConfigError, match=profile.id):
            store.key_context(model="made/up", layout=other, dtype=DTYPE)
        spec, key = kv_spec(other, DTYPE, TOKENS), key_of(store)
        views = spec.split(memoryview(bytes(spec.raw_bytes)))
        for item in (
            Item(key, views, spec, META),
            Item(key, segments(), SPEC, {**META, "tokens": None}),  # kvt must know where the tokens are
            Item(key, segments(), SPEC, {**META, "rope": None}),
        ):
            outcome = store.submit_put([item]).result()[0]
            assert isinstance(outcome.error, ConfigError), item.meta
        assert store.submit_lookup([key]).result() == 0


def test_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.kvprofile"
    for content, says in ((None, "a.kvprofile"), (b"", "a.kvprofile"), (b"junk" * 100, "a.kvprofile")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            store_over(DictBackend(), remote_serde="kvt", codec_profile=str(path))
    profile_file("cachegen", path)
    with pytest.raises(ConfigError, match=rf"cannot use {path}: .* for codec 'cachegen'"):
        store_over(DictBackend(), remote_serde="kvt", codec_profile=str(path))


def test_every_profile_is_looked_into_when_a_store_is_opened(tmp_path: Path) -> None:
    """One that is no use later would make every record of it a miss, and nobody would know why."""
    good, other, broken = tmp_path / "good", tmp_path / "other", tmp_path / "broken"
    profile_file("cachegen", good)
    profile_file("kvt", other)
    Profile(codec="cachegen", model="made/up", layout=LAYOUT).save(broken)
    for wrong, says in ((other, "for codec 'kvt'"), (broken, "format None")):
        with pytest.raises(ConfigError, match=says):
            store_over(DictBackend(), remote_serde="cachegen", codec_profile=f"{good},{wrong}")
        assert profiles.find(Profile.load(good).id) is None  # all or none


@pytest.mark.parametrize("name", ["cachegen", "kvt"])
def test_reduced_chunks(name: str, tmp_path: Path) -> None:
    path, raw = tmp_path / "a.kvprofile", segments(tokens=128)
    profile_file(name, path)
    kept = choose_tokens(np.random.default_rng(0).random(128), budget=TOKENS)
    with store_over(DictBackend(), remote_serde=name, codec_profile=str(path)) as store:
        key = key_of(store)
        item = reduced_item(key, raw, LAYOUT, DTYPE, kept, begin=0, end=128, rope="applied")
        assert store.submit_put([item]).result()[0].ok
        got = bytearray(item.spec.raw_bytes)
        assert store.submit_get([Want(key, memoryview(got), item.spec)]).result()[0].ok
        assert off(got, list(item.segments)) < 0.6


@pytest.mark.parametrize("serde", ["shuffle-zstd", "int8", "fp8"])
def test_a_model_goes_on_from_what_was_stored(serde: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvstore.integrations.transformers import KVCacheStore
    from kvstore.testing.models import tiny_model

    model = tiny_model("llama", dtype=torch.bfloat16)
    ids = torch.randint(2, 1000, (1, 49), generator=torch.Generator().manual_seed(3))
    with store_over(DictBackend(), remote_serde=serde, buffer_pool_bytes=1 << 20) as store:
        kv = KVCacheStore(store, model)
        with torch.no_grad():
            full = model(ids[:, :48], use_cache=True)
        cache = full.cache if hasattr(full, "cache") else full.past_key_values
        assert kv.save(ids[:, :48], cache).stored == 3
        loaded, hit = kv.load(ids)
        assert hit == 48
        with torch.no_grad():
            got = model(ids[:, 48:], **kv.cache_argument(loaded)).logits[0, -1].float()
            want = model(ids[:, 48:], **kv.cache_argument(cache)).logits[0, -1].float()
        assert float((got - want).square().mean().sqrt()) <= (
            0.0 if serde == "shuffle-zstd" else 0.1 * float(want.std())
        )


@pytest.mark.parametrize("name", ["cachegen", "kvt"])
def test_one_prompt_saved_lossy_and_lossless_through_transformers(name: str, tmp_path: Path) -> None:
    """Over one backend: who asks for exact bytes finds nothing of the lossy store's, and gets his own exactly."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvstore.integrations.transformers import KVCacheStore
    from kvstore.testing.models import tiny_model

    model = tiny_model("llama", dtype=torch.bfloat16)
    layout, rotary = KVLayout(2, 2, 16), RotarySpec.from_config(model.config)
    profile = small_profile(layout) if name == "cachegen" else make_profile(layout, rotary=rotary)
    profile.save(tmp_path / "p")
    ids = torch.randint(2, 1000, (1, 49), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        full = model(ids[:, :48], use_cache=True)
    cache = full.cache if hasattr(full, "cache") else full.past_key_values
    backend = Unclosed(DictBackend())
    with (
        store_over(backend, remote_serde=name, codec_profile=str(tmp_path / "p")) as lossy,
        store_over(backend) as exact,
    ):
        assert KVCacheStore(lossy, model).save(ids[:, :48], cache).stored == 3
        assert KVCacheStore(exact, model).load(ids)[1] == 0
        assert KVCacheStore(exact, model).save(ids[:, :48], cache).stored == 3
        for store, same in ((exact, True), (lossy, False)):
            loaded, hit = KVCacheStore(store, model).load(ids)
            assert hit == 48
            pairs = [
                (getattr(got, what), getattr(had, what)[:, :, :48])
                for got, had in zip(loaded.layers, cache.layers, strict=True)
                for what in ("keys", "values")
            ]
            assert all(torch.equal(got, had) for got, had in pairs) is same
            assert all(torch.isfinite(got).all() for got, _ in pairs)
    codecs = {segment.codec for record in backend.inner.records.values() for segment in parse_header(record).segments}
    assert codecs == {0, codec_number(name)}
