"""kvt: its arithmetic against a plain one, its levels, what it refuses. (The contract: test_codec_kvt_suite.py.)"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.codec import codec_by_name, kvt, kvt_reference
from kvstore.codec.base import RAW, UnknownProfile
from kvstore.codec.kvt import KvtCodec, KvtDecoder
from kvstore.codec.kvt_reference import ABSENT
from kvstore.codec.kvt_tables import Tables, tables_of
from kvstore.codec.profile import Profile
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec

from .kvt_support import SMALL, info, make_profile, segment, sides


def parts_of(profile: Profile, raw: bytes, about: Any) -> list[memoryview]:
    encoded = KvtCodec(profile).encode(memoryview(raw), about)
    assert [each.codec for each in encoded] == [6] * len(encoded)
    return [each.data for each in encoded]


def decode(parts: list[memoryview], nbytes: int) -> bytes:
    dst = bytearray(nbytes)
    KvtCodec().decode_into(parts, memoryview(dst))
    return bytes(dst)


# The whole codec, against a plain computation of the same.


def expected(profile: Profile, layer: int, k: np.ndarray, v: np.ndarray, positions: np.ndarray, level: int,
             rotated: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(K, V, how far a token's values are from the edge of a cell, in steps), in float64."""
    arrays = profile.arrays
    spec = RotarySpec.from_text(profile.rotary) if profile.rotary and rotated else None
    outs, edges = [], []
    at = 0
    plain = k if spec is None else spec.undo(k, positions)
    for name, x in (("k", plain), ("v", v)):
        basis, mean = arrays[f"{name}_basis"][layer].astype(float), arrays[f"{name}_mean"][layer].astype(float)
        z = np.einsum("thd,hde->the", x - mean, np.linalg.inv(basis))
        heads, width = z.shape[1:]
        own = slice(at, at + heads * width)
        at += heads * width
        shift = arrays["shifts"][level, layer, own].reshape(heads, width).astype(int)
        centre = arrays["centres"][level, layer, own].reshape(heads, width, 3).astype(float)
        size = np.where(
            shift == ABSENT, 0, np.floor(np.abs(z) + profile.parameters["rounding"]).astype(int) >> shift % 8
        )
        low = np.choose(np.minimum(size, 3), [0 * z, *(centre[..., n] + 0 * z for n in range(3))])
        y = np.where(z < 0, -1, 1) * (low + np.maximum(size - 3, 0) * 2.0 ** (shift % 8)) * (shift != ABSENT)
        back = np.einsum("the,hed->thd", y, basis) + mean
        outs.append(spec.apply(back.astype(np.float32), positions) if name == "k" and spec is not None else back)
        part = np.abs(z) + profile.parameters["rounding"]
        edges.append(np.abs(part - np.round(part)).min((1, 2)))
    return outs[0], outs[1], np.minimum(*edges)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 24) | st.just(300),
    seed=st.integers(0, 1 << 32),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    count=st.integers(1, 5),
    start=st.sampled_from([0, 2, 4, 1000]),
    rotated=st.booleans(),
    rotary=st.sampled_from(["default", "partial", "interleaved", "yarn"]),
    layer=st.integers(0, 2),
)
def test_it_decodes_to_what_the_format_says(
    tokens: int, seed: int, dtype: str, count: int, start: int, rotated: bool, rotary: str, layer: int
) -> None:
    specs = {
        "default": RotarySpec(16),
        "partial": RotarySpec(16, rotary_dim=8),
        "interleaved": RotarySpec(16, layout="interleaved", theta=500.0),
        "yarn": RotarySpec(16, scaling="yarn", factor=4.0, original_max_position_embeddings=256),
    }
    profile = make_profile(levels=count, seed=seed % 3, rotary=specs[rotary], step=0.05, spread=15.0, tail=1.0)
    raw, k, v = segment(SMALL, tokens, dtype, seed=seed)
    about = info(SMALL, tokens, dtype, start=start, layer=layer, rope="applied" if rotated else "none")
    encoded = KvtCodec(profile).encode(memoryview(raw), about)
    if encoded[0].codec == RAW:
        assert tokens < 24
        return
    positions = np.arange(start, start + tokens)
    for level in range(count):
        after = sides(decode([each.data for each in encoded[: level + 1]], len(raw)), SMALL, tokens, dtype)
        wanted = expected(profile, layer, k, v, positions, level, rotated)
        sure = (wanted[2] > 1e-4) & (positions >= 4)
        rounding = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-23}[dtype]
        for mine, plain in zip(after, wanted[:2], strict=True):
            scale = np.abs(plain).max(initial=1)
            assert np.abs(mine[sure] - plain[sure]).max(initial=0) <= rounding * scale + 2e-5
    sinks = positions < 4
    for mine, plain in zip(after, (k, v), strict=True):
        assert np.array_equal(mine[sinks], plain[sinks])


def test_each_level_is_nearer_than_the_one_before() -> None:
    profile = make_profile(levels=5, step=0.05, spread=15.0, tail=1.0)
    raw, k, v = segment(SMALL, 400)
    parts = parts_of(profile, raw, info(SMALL, 400))
    errors, sizes = [], []
    for level in range(5):
        after = sides(decode(parts[: level + 1], len(raw)), SMALL, 400, "bfloat16")
        errors.append(sum(float(((a - b) ** 2).sum()) for a, b in zip(after, (k, v), strict=True)))
        sizes.append(sum(map(len, parts[: level + 1])))
    assert all(b < 0.75 * a for a, b in itertools.pairwise(errors)), errors
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert errors[-1] < 0.002 * float((k**2).sum() + (v**2).sum())


def test_the_indices_of_every_level_are_exact() -> None:
    """What the decoder knows after level n are the encoder's indices, without their last bits."""
    profile = make_profile(levels=4)
    tables = tables_of(profile)
    raw, _, _ = segment(SMALL, 77)
    about = info(SMALL, 77, start=10, layer=2)
    indices, kept = KvtCodec._quantised(tables, memoryview(raw), about, np.arange(10, 87, dtype=np.int32), True)
    assert not len(kept)
    decoder = KvtDecoder(memoryview(bytearray(len(raw))))
    for level, part in enumerate(parts_of(profile, raw, about)):
        decoder.feed(part)
        shift = profile.arrays["shifts"][level, 2].astype(int)
        known = np.sign(indices) * (np.abs(indices.astype(int)) >> shift % 8) * (shift != ABSENT)
        assert np.array_equal(decoder._values, known)


# What is stored as it is.


def test_sinks_outliers_and_last_tokens_come_back_exactly() -> None:
    profile = make_profile(raw_last=3)
    _, k, v = segment(SMALL, 40, "float16")
    k[17] *= 300
    v[20, 1, 3] = 999.0
    raw = np.concatenate([k.ravel(), v.ravel()]).astype(np.float16).tobytes()
    parts = parts_of(profile, raw, info(SMALL, 40, "float16", start=2))
    for level in range(3):
        after = sides(decode(parts[: level + 1], len(raw)), SMALL, 40, "float16")
        exact = [0, 1, 17, 20, 37, 38, 39]
        others = [n for n in range(40) if n not in exact]
        for mine, plain in zip(after, (k, v), strict=True):
            assert np.array_equal(mine[exact], plain[exact].astype(np.float16))
            assert (mine[others] != plain[others].astype(np.float16)).any()


def test_tokens_may_be_missing() -> None:
    """The positions say by how much K was rotated, so the same tokens decode to the same values."""
    profile = make_profile(sinks=0)
    _, k, v = segment(SMALL, 60, "float32")
    spec = RotarySpec(16)
    k = spec.apply(k, np.arange(60))
    kept = np.sort(np.random.default_rng(1).choice(60, 25, replace=False)).astype(np.int32)

    def coded(which: np.ndarray, **more: Any) -> tuple[list[memoryview], tuple[np.ndarray, np.ndarray]]:
        raw = k[which].tobytes() + v[which].tobytes()
        parts = parts_of(profile, raw, info(SMALL, len(which), "float32", **more))
        return parts, sides(decode(parts, len(raw)), SMALL, len(which), "float32")

    whole = coded(np.arange(60))[1]
    parts, some = coded(kept, start=int(kept[0]), positions=kept)
    assert np.abs(some[0] - whole[0][kept]).max() < 1e-4
    assert np.abs(some[1] - whole[1][kept]).max() < 1e-4
    plain = coded(kept, start=0)[0]
    assert 0 < len(parts[0]) - len(plain[0]) < 60  # about a byte for each
    backwards = coded(kept[::-1].copy(), start=int(kept[-1]), positions=kept[::-1].copy())[1]
    assert np.abs(backwards[0] - some[0][::-1]).max() < 1e-4


@pytest.mark.parametrize("case", ["opaque", "empty", "inf", "noise", "single"])
def test_what_does_not_pay_is_stored_raw(case: str) -> None:
    codec = KvtCodec(make_profile())
    raw, k, v = segment(SMALL, 9 if case != "single" else 1, "float32")
    about = info(SMALL, 9, "float32")
    if case == "opaque":
        about = about._replace(layout=None)
    elif case == "empty":
        raw, about = b"", info(SMALL, 0)
    elif case == "inf":
        v[3, 0, 0] = np.inf
        raw = k.tobytes() + v.tobytes()
    elif case == "noise":
        raw = (k * 1e6).tobytes() + v.tobytes()
    else:
        about = info(SMALL, 1, "float32")
    (encoded,) = codec.encode(memoryview(raw), about)
    assert (encoded.codec, encoded.level, bytes(encoded.data)) == (RAW, 0, raw)


# What is refused.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": KVLayout(3, 4, 16, 8)}, ["3 layers x 2 heads", "3 layers x 4 heads"]),
        ({"dtype": "int8"}, ["bfloat16", "int8"]),
        ({"layer": 3}, ["3 layers", "layer 3"]),
        ({"rope": None}, ["applied", "None"]),
        ({"start": None}, ["position"]),
        ({"tokens": 11}, ["704", "640"]),
        ({"positions": np.arange(3, dtype=np.int32)}, ["10 tokens", "[3]"]),
    ],
)
def test_a_segment_that_does_not_fit_names_both_sides(change: dict[str, Any], words: list[str]) -> None:
    profile = make_profile()
    raw, _, _ = segment(SMALL, 10)
    assert len(raw) == 960
    words = [{"704": "1056", "640": "960"}.get(word, word) for word in words]
    with pytest.raises(ConfigError) as error:
        KvtCodec(profile).encode(memoryview(raw), info(SMALL, 10)._replace(**change))
    assert all(word in str(error.value) for word in words), error.value


def test_a_rotated_segment_needs_a_rotary_profile() -> None:
    profile = make_profile(rotary=None)
    raw, _, _ = segment(SMALL, 30)
    with pytest.raises(ConfigError, match="without a rotary"):
        KvtCodec(profile).encode(memoryview(raw), info(SMALL, 30))
    parts = parts_of(profile, raw, info(SMALL, 30, rope="none"))
    decode(parts, len(raw))
    rotated = bytearray(parts[0])
    rotated[3] |= 1
    with pytest.raises(CorruptRecord, match="rotated"):
        decode([memoryview(rotated)], len(raw))


def test_it_only_decodes_without_a_profile() -> None:
    raw, _, _ = segment(SMALL, 10)
    with pytest.raises(ConfigError, match="codec_profile"):
        KvtCodec().encode(memoryview(raw), info(SMALL, 10))
    with pytest.raises(ConfigError, match="profile"):
        codec_by_name("kvt")


def test_an_unknown_profile_is_said_by_its_id() -> None:
    raw, _, _ = segment(SMALL, 30)
    data = bytearray(parts_of(make_profile(), raw, info(SMALL, 30))[0])
    data[4:12] = bytes(range(8))
    with pytest.raises(UnknownProfile, match="0001020304050607"):
        decode([memoryview(data)], len(raw))


def test_a_refinement_must_be_the_next_one_of_this_segment() -> None:
    profile = make_profile(levels=3)
    mine, other = (parts_of(profile, segment(SMALL, 30, seed=seed)[0], info(SMALL, 30)) for seed in (1, 2))
    size = SMALL.segment_bytes(30, "bfloat16")
    for wrong in (other[1], mine[2], mine[0]):
        decoder = KvtCodec().decoder(memoryview(bytearray(size)))
        decoder.feed(mine[0])
        with pytest.raises(CorruptRecord):
            decoder.feed(wrong)
        with pytest.raises(CorruptRecord, match="before"):
            decoder.feed(mine[1])
    with pytest.raises(CorruptRecord, match="3 levels"):
        decode([*mine, mine[2]], size)


ONLY_0 = np.arange(64) == 0


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("shifts", lambda a: a + (a == 0), "shift 0"),
        ("shifts", lambda a: np.where(a == ABSENT, 3, a), "a bit|too large"),
        ("classes", lambda a: a + 500, "class that there is not"),
        ("frequencies", lambda a: a[:, :-1], "even number|sum to"),
        ("frequencies", lambda a: np.where((a > 0).sum(1)[:, None] == 2, 4096 * ONLY_0, a), "lacks a symbol"),
        ("frequencies", lambda a: np.where((a > 0).sum(1)[:, None] == 3, 4096 * ONLY_0, a), "lacks a symbol"),
        ("centres", lambda a: a - 100, "negative"),
        ("k_basis", lambda a: a[:, :1], "k_basis"),
        ("v_mean", lambda a: a.astype(np.float64), "v_mean"),
    ],
)
def test_an_inconsistent_profile_is_refused(name: str, change: Any, words: str) -> None:
    good = make_profile()
    arrays = {**good.arrays, name: change(good.arrays[name])}
    if name == "shifts":
        arrays["shifts"] = arrays["shifts"].astype(np.uint8)
    elif name in ("classes", "frequencies"):
        arrays[name] = arrays[name].astype(np.uint16)
    bad = Profile("kvt", "bad", SMALL, rotary=good.rotary, parameters=good.parameters, arrays=arrays)
    with pytest.raises(ConfigError, match=words):
        Tables(bad)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"sinks": -1}, "sinks"), ({"rounding": 2.0}, "rounding"), ({"raw_last": 1.5}, "raw_last")],
)
def test_impossible_parameters_are_refused(parameters: dict[str, Any], words: str) -> None:
    good = make_profile()
    bad = Profile("kvt", "bad", SMALL, rotary=good.rotary, parameters={**good.parameters, **parameters},
                  arrays=good.arrays)  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        KvtCodec(bad)


def test_a_basis_without_an_inverse_is_refused() -> None:
    good = make_profile()
    arrays = {**good.arrays, "k_basis": good.arrays["k_basis"] * 0}
    bad = Profile("kvt", "bad", SMALL, rotary=good.rotary, parameters=good.parameters, arrays=arrays)
    with pytest.raises(ConfigError, match="no inverse"):
        Tables(bad).layer(0)


def test_latent_attention_is_refused_by_name() -> None:
    good = make_profile()
    bad = Profile("kvt", "latent", KVLayout(2, 1, 72, kind="mla"), parameters=good.parameters)
    with pytest.raises(ConfigError, match="mla"):
        KvtCodec(bad)


# How long it is.


@pytest.mark.parametrize(("tokens", "most"), [(256, 1.10), (1536, 1.03)])
def test_a_segment_is_hardly_longer_than_its_entropy(tokens: int, most: float) -> None:
    layout = KVLayout(1, 3, 64)
    profile = make_profile(layout, levels=3, spread=2.0, tail=3.0)
    tables = tables_of(profile)
    rng = np.random.default_rng(4)
    layer = tables.layer(0)
    sizes = 2.0 * np.exp(-3 * np.random.default_rng(0).random(384))  # as the profile was made of
    z = (rng.laplace(size=(tokens, 384)) * sizes).astype(np.float32)
    values = [np.empty((tokens, 192), np.float32) for _ in range(2)]
    for n, side in enumerate((layer.k, layer.v)):
        kvt._into_values(z[:, 192 * n : 192 * (n + 1)] + layer.offset[192 * n : 192 * (n + 1)], side, values[n])
    raw = b"".join(each.astype(np.float16).tobytes() for each in values)
    about = info(layout, tokens, "float16", rope="none")
    parts = parts_of(profile, raw, about)
    indices, kept = KvtCodec._quantised(tables, memoryview(raw), about, np.arange(tokens, dtype=np.int32), False)
    codable = (tables.distributions.frequencies > 0).astype(np.uint8)
    bits = 0.0
    for level in layer.levels:
        shape = len(indices), len(level.live)
        symbols, kinds = np.empty(shape, np.uint8), np.empty(shape, np.uint16)
        escapes = kvt_reference.split(
            indices, level.live, level.before, level.after, level.classes, codable, kinds, symbols
        )
        bits += float(tables.distributions.bits[kinds, symbols].sum()) + 8 * len(escapes)
    assert len(kept) == 4
    raw_bytes = 4 * 384 * 2
    assert sum(map(len, parts)) - raw_bytes <= most * bits / 8
    assert bits / z.size < 3


def test_it_is_the_same_codec_without_numba() -> None:
    code = """
import sys
sys.modules["numba"] = None
from kvstore.codec import kvt, kvt_reference
assert kvt.loops() is kvt_reference
from tests.unit.kvt_support import SMALL, info, make_profile, segment
profile = make_profile(levels=3)
raw, _, _ = segment(SMALL, 50)
parts = [bytes(each.data) for each in kvt.KvtCodec(profile).encode(memoryview(raw), info(SMALL, 50))]
dst = bytearray(len(raw))
kvt.KvtCodec().decode_into([memoryview(part) for part in parts], memoryview(dst))
import hashlib
print(hashlib.sha256(b"".join(parts) + dst).hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    raw, _, _ = segment(SMALL, 50)
    parts = parts_of(make_profile(levels=3), raw, info(SMALL, 50))
    mine = hashlib.sha256(b"".join(map(bytes, parts)) + decode(parts, len(raw))).hexdigest()
    assert done.stdout.strip() == mine, done.stderr
