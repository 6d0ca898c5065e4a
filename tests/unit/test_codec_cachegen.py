"""The `cachegen` codec: what docs/codec-format.md says, for every level, tail, dtype and kind of content."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import cachegen, cachegen_native, cachegen_reference, codec_by_name, codec_by_number
from kvstore.codec.base import RAW, SegmentInfo, UnknownProfile
from kvstore.codec.cachegen import CachegenCodec
from kvstore.codec.cachegen_tables import tables_for, third_of
from kvstore.codec.floats import from_float32, to_float32
from kvstore.codec.profile import Profile, register
from kvstore.codec.profiling_cachegen import profile_of
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import KVLayout

from .codec_profile_support import DTYPES, LAYOUT, decode, encode, info, segment_of, small_profile, synthetic_kv

QUANTISERS: tuple[ModuleType, ...] = (cachegen_reference, cachegen_native)
BITS = ((8, 5, 3), (4, 3, 2))


def using(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(cachegen, "quantiser", lambda: module)


# The arithmetic, written a second time: scalar by scalar, from the format document.


def fp32(value: Any) -> np.float32:
    return np.float32(value)


def step_of(vector: np.ndarray, limit: int) -> np.float32:
    exact = fp32(fp32(np.abs(vector).max(initial=0)) * fp32(fp32(1) / fp32(limit)))
    bits = (int(exact.view(np.uint32)) + 0xFFFF) & 0xFFFF0000
    step = np.array(bits, np.uint32).view(np.float32)[()]
    return fp32(0) if step < fp32(2.0**-100) else step


def nearest(x: np.float32, step: np.float32) -> int:
    if step == 0:
        return 0
    return int(np.rint(fp32(x * fp32(fp32(1) / step))))


def expected(values: np.ndarray, dtype: str, group: int, step: float, limit: int) -> np.ndarray:
    """What one half `[tokens, channels]` decodes to."""
    out = np.empty(values.shape, np.float32)
    for token, row in enumerate(values):
        if token % group == 0:
            size = step_of(row, 127)
            anchor = np.array([fp32(fp32(max(-127, min(127, nearest(x, size)))) * size) for x in row], np.float32)
            out[token] = anchor
            continue
        rest = row - anchor
        size = fp32(step) if step else step_of(rest, limit)
        for channel, x in enumerate(rest):
            q = nearest(x, size)
            q = max(-32767, min(32767, q)) if step else max(-limit, min(limit, q))
            out[token, channel] = fp32(anchor[channel] + fp32(fp32(q) * size))
    largest = fp32(cachegen_reference.LARGEST[dtype])
    return np.clip(out, -largest, largest)


def expected_segment(profile: Profile, level: int, raw: memoryview, layer: int, dtype: str, tokens: int) -> bytes:
    tables, layout = tables_for(profile), profile.layout
    x = to_float32(raw, dtype)
    middle = tokens * layout.num_kv_heads * layout.head_dim
    limit = tables.levels[level].limit(third_of(layer, layout.num_layers))
    halves = []
    for half, part in enumerate((x[:middle], x[middle:])):
        if part.size:
            step = float(tables.levels[level].steps[half, layer])
            halves.append(expected(part.reshape(tokens, -1), dtype, tables.group, step, limit).reshape(-1))
    out = bytearray(len(raw))
    from_float32(np.concatenate(halves), dtype, memoryview(out))
    return bytes(out)


@st.composite
def segments(draw: st.DrawFn) -> tuple[Profile, int, int, str, int, memoryview]:
    layout = draw(st.sampled_from([LAYOUT, KVLayout(5, 1, 6, 10), KVLayout(3, 1, 12, kind="mla")]))
    levels = draw(st.sampled_from([(1.0, 0.25), BITS]))
    profile = small_profile(layout, levels=levels, group=draw(st.sampled_from([10, 3])))
    level, layer = draw(st.integers(0, 1)), draw(st.integers(0, layout.num_layers - 1))
    tokens = draw(st.integers(1, 25))
    dtype = draw(st.sampled_from(DTYPES))
    k, v = synthetic_kv(layout, tokens, draw(st.integers(0, 99)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    for kind in draw(st.lists(st.sampled_from(["zero", "large", "tiny", "token", "channel", "same"]), max_size=3)):
        token = int(rng.integers(tokens))
        if kind == "zero":
            k[:, token] = v[:, token:] = 0
        elif kind == "large":
            k[:, token] *= 50
        elif kind == "tiny":
            v *= np.float32(1e-6)
        elif kind == "token":
            v[:, token] = rng.standard_normal(v[:, token].shape) * 30
        elif kind == "channel":
            k[..., 0] += 200
        else:
            k[:, 1:] = k[:, :1]
    return profile, level, layer, dtype, tokens, segment_of(k, v, layer, dtype)


@settings(max_examples=120)
@given(segments())
def test_what_is_decoded_is_what_the_format_says(case: tuple[Profile, int, int, str, int, memoryview]) -> None:
    profile, level, layer, dtype, tokens, raw = case
    codec = CachegenCodec(profile, level=level)
    found = []
    for module in QUANTISERS:
        with pytest.MonkeyPatch.context() as patch:
            using(patch, module)
            parts = codec.encode(raw, info(profile, layer, dtype, tokens))
            if parts[0].codec == RAW:
                assert parts[0].data is raw
                found.append((None, b""))
                continue
            stored = [bytes(part.data) for part in parts]
            found.append((stored, decode(codec, stored, len(raw))))
    assert found[0] == found[1], "numpy and numba give the same bytes, and the same values"
    if found[0][0] is not None:
        assert found[0][1] == expected_segment(profile, level, raw, layer, dtype, tokens)
    else:
        assert len(raw) < 3000, "only short segments do not become smaller"


@pytest.mark.parametrize("tokens", [*range(1, 21), 29, 31, 256, 2048])
@pytest.mark.parametrize("level", [0, 1])
def test_every_tail(tokens: int, level: int) -> None:
    """An anchor each 10 tokens, the last group shorter; a wide layer, so that one token is worth encoding."""
    layout = KVLayout(3, 4, 64)
    profile = small_profile(layout, levels=(1.0, 0.25))
    k, v = synthetic_kv(layout, tokens)
    codec = CachegenCodec(profile, level=level)
    raw = segment_of(k, v, 1, "bfloat16")
    parts = encode(codec, raw, 1, "bfloat16", tokens)
    out = to_float32(memoryview(decode(codec, parts, len(raw))), "bfloat16")
    x = to_float32(raw, "bfloat16")
    steps = tables_for(profile).levels[level].steps[:, 1]
    middle = x.size // 2
    for half in range(2):
        error = np.abs(out - x).reshape(2, tokens, -1)[half]
        mine = x[half * middle : (half + 1) * middle].reshape(tokens, -1)
        anchors = np.arange(tokens) % 10 == 0
        rounding = np.abs(mine).max() * 2**-8
        assert error[~anchors].max(initial=0) <= steps[half] / 2 + rounding
        assert error[anchors].max() <= np.abs(mine).max() / 127 + rounding


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 128])
def test_every_layer(layers: int) -> None:
    layout = KVLayout(layers, 1, 16)
    profile = small_profile(layout, levels=(0.5,))
    k, v = synthetic_kv(layout, 40)
    codec = CachegenCodec(profile)
    for layer in range(layers):
        raw = segment_of(k, v, layer, "float16")
        parts = encode(codec, raw, layer, "float16", 40)
        out = decode(codec, parts, len(raw))
        if layer in (0, layers // 2, layers - 1):
            assert out == expected_segment(profile, 0, raw, layer, "float16", 40)
        error = to_float32(memoryview(out), "float16") - to_float32(raw, "float16")
        assert np.abs(error).max() < 2 * tables_for(profile).levels[0].steps[:, layer].max()


def test_thirds() -> None:
    assert [third_of(layer, 30) for layer in (0, 9, 10, 19, 20, 29)] == [0, 0, 1, 1, 2, 2]
    assert [third_of(layer, 4) for layer in range(4)] == [0, 0, 1, 2]
    assert [third_of(layer, 1) for layer in range(1)] == [0]


def test_steps_grow_over_the_thirds() -> None:
    profile = small_profile(KVLayout(6, 2, 8), levels=(0.8,), value_scale=2.0)
    steps, rms = profile.arrays["level.0.steps"], profile.arrays["rms"]
    shares = steps / (np.float32(0.8) * rms * np.array([[1], [2]], np.float32))
    assert np.allclose(shares, [0.5, 0.5, 1, 1, 1.5, 1.5], rtol=1e-6)


def test_zeros_take_no_room_and_stay_zeros() -> None:
    profile = small_profile(KVLayout(3, 4, 64))
    raw = memoryview(bytes(256 * 512 * 2))
    codec = CachegenCodec(profile)
    parts = encode(codec, raw, 0, "bfloat16", 256)
    assert decode(codec, parts, len(raw)) == bytes(raw)


# What is stored raw, and what is refused.


def some(tokens: int = 64, dtype: str = "bfloat16", layer: int = 0) -> memoryview:
    return segment_of(*synthetic_kv(LAYOUT, tokens), layer, dtype)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_are_stored_raw(value: float, dtype: str) -> None:
    k, v = synthetic_kv(LAYOUT, 64)
    v[1, 63, 1, 7] = value
    raw = segment_of(k, v, 1, dtype)
    (part,) = CachegenCodec(small_profile()).encode(raw, info(small_profile(), 1, dtype, 64))
    assert part.codec == RAW
    assert part.data is raw


def test_what_is_too_large_for_the_steps_is_stored_raw() -> None:
    k, v = synthetic_kv(LAYOUT, 64)
    for large in (1e7, 3e38):
        k[1, 13] = large
        raw = segment_of(k, v, 1, "float32")
        (part,) = CachegenCodec(small_profile()).encode(raw, info(small_profile(), 1, "float32", 64))
        assert part.codec == RAW


def test_the_largest_values_do_not_become_inf() -> None:
    """The anchor's step is rounded up, so 127 steps may be more than the dtype can hold."""
    for dtype in ("bfloat16", "float16"):
        k, v = synthetic_kv(LAYOUT, 64)
        k[0, 0] = v[0, 10] = 65504.0
        codec = CachegenCodec(small_profile(levels=BITS))
        raw = segment_of(k, v, 0, dtype)
        out = to_float32(memoryview(decode(codec, encode(codec, raw, 0, dtype, 64), len(raw))), dtype)
        assert np.isfinite(out).all()
        assert out.max() >= 65000


def test_opaque_records_are_stored_raw() -> None:
    raw = memoryview(b"x" * 4096)
    for about in (SegmentInfo(), SegmentInfo(layout=LAYOUT, dtype="bfloat16", tokens=0)):
        (part,) = CachegenCodec(small_profile()).encode(raw, about)
        assert (part.codec, part.data) == (RAW, raw)


def test_what_is_not_the_profiles_is_refused_with_both_sides() -> None:
    profile = small_profile()
    codec = CachegenCodec(profile)
    raw = some()
    good = info(profile, 0, "bfloat16", 64)
    for change, message in (
        ({"layout": KVLayout(3, 2, 9)}, "3 layers x 2 heads x 8, not kv 3 layers x 2 heads x 9"),
        ({"dtype": "int8"}, "bfloat16, float16, float32, not int8"),
        ({"rope": "none"}, "rope='applied', not 'none'"),
        ({"layer": 3}, "layer 3 is not one of the 3"),
        ({"tokens": 63}, "63 tokens has 4096 bytes"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            codec.encode(raw, good._replace(**change))
        assert profile.id in str(caught.value)
    plain = CachegenCodec(small_profile(rope="none"))
    with pytest.raises(ConfigError, match="rope='none', not 'applied'"):
        plain.encode(raw, good)
    assert plain.encode(raw, good._replace(rope="none"))[0].codec == 5


def test_making_a_codec() -> None:
    profile = small_profile(levels=(1.0, 0.4, 0.2))
    assert isinstance(codec_by_name("cachegen", profile), CachegenCodec)
    assert codec_by_number(5).name == "cachegen"
    with pytest.raises(ConfigError, match="needs a profile"):
        codec_by_name("cachegen")
    with pytest.raises(ConfigError, match="needs a profile to encode"):
        CachegenCodec().encode(some(), info(profile, 0, "bfloat16", 64))
    with pytest.raises(ConfigError, match="no level 3"):
        CachegenCodec(profile, level=3)
    other = Profile("kvt", "m", LAYOUT)
    with pytest.raises(ConfigError, match=f"profile {other.id} .* is not a profile of codec cachegen"):
        CachegenCodec(other)


def test_a_profile_that_is_not_loaded_is_said() -> None:
    profile = small_profile(levels=(0.77,))
    parts = encode(CachegenCodec(profile), some(), 0, "bfloat16", 64)
    with pytest.raises(UnknownProfile, match=profile.id):
        decode(CachegenCodec(), parts, 4096)
    assert decode(CachegenCodec(profile), parts, 4096)
    register(profile)
    assert decode(CachegenCodec(), parts, 4096) == decode(CachegenCodec(profile), parts, 4096)


def test_memory_that_is_not_aligned() -> None:
    codec = CachegenCodec(small_profile())
    for dtype in DTYPES:
        raw = some(dtype=dtype)
        shifted = memoryview(b"\0" + bytes(raw))[1:]
        parts = encode(codec, raw, 0, dtype, 64)
        assert encode(codec, shifted, 0, dtype, 64) == parts
        out = bytearray(len(raw) + 1)
        codec.decode_into([memoryview(b"\0" + parts[0])[1:]], memoryview(out)[1:])
        assert out[1:] == decode(codec, parts, len(raw))


def test_the_numpy_path_serves_where_numba_is_missing() -> None:
    code = """
import sys
sys.modules["numba"] = None
from kvstore.codec import cachegen, cachegen_reference
assert cachegen.quantiser() is cachegen_reference
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Embedded levels.


def nested() -> Profile:
    return small_profile(levels=(1.8, 0.6, 0.2), embedded=True)


@settings(max_examples=40)
@given(st.integers(1, 45), st.integers(0, 2), st.sampled_from(DTYPES), st.integers(0, 99), st.booleans())
def test_embedded_levels(tokens: int, layer: int, dtype: str, seed: int, large: bool) -> None:
    """At every level the values of that level's steps; refined in place or at once; the finest is the level alone."""
    profile = nested()
    codec = CachegenCodec(profile)
    k, v = synthetic_kv(LAYOUT, tokens, seed)
    if large:
        k[:, tokens // 2] *= 40
    raw = segment_of(k, v, layer, dtype)
    found = codec.encode(raw, info(profile, layer, dtype, tokens))
    if found[0].codec == RAW:
        return
    parts = [bytes(part.data) for part in found]
    assert len(parts) == codec.levels == 3
    refined = bytearray(len(raw))
    decoder = codec.decoder(memoryview(refined))
    before = np.inf
    x = to_float32(raw, dtype)
    for level, part in enumerate(parts):
        decoder.feed(memoryview(part))
        assert refined == decode(codec, parts[: level + 1], len(raw))
        error = float(np.square(to_float32(memoryview(refined), dtype) - x, dtype=np.float64).mean())
        assert error <= before * 1.2 + 1e-12
        before = error
    assert bytes(refined) == expected_segment(profile, 2, raw, layer, dtype, tokens)
    with pytest.raises(CorruptRecord):
        decoder.feed(memoryview(parts[-1]))


def test_embedded_levels_cost_little() -> None:
    layout = KVLayout(3, 4, 64)
    k, v = synthetic_kv(layout, 512, 9)
    whole = small_profile(layout, levels=(1.2, 0.4), embedded=True)
    alone = small_profile(layout, levels=(0.4,))
    raw = segment_of(k, v, 1, "bfloat16")
    both = encode(CachegenCodec(whole), raw, 1, "bfloat16", 512)
    (one,) = encode(CachegenCodec(alone), raw, 1, "bfloat16", 512)
    assert sum(map(len, both)) < 1.05 * len(one)
    assert len(both[0]) < 0.75 * len(one)


def test_levels_out_of_order_are_refused() -> None:
    codec = CachegenCodec(nested())
    parts = encode(codec, some(), 0, "bfloat16", 64)
    others = encode(codec, some(layer=1), 1, "bfloat16", 64)
    for wrong in ([parts[1]], [parts[0], parts[2]], [parts[0], parts[0]], [parts[0], others[1]], [*parts, parts[2]]):
        with pytest.raises(CorruptRecord):
            decode(codec, wrong, 4096)
    with pytest.raises(CorruptRecord, match="not level 1 of this"):  # said before anything of it is decoded
        decode(codec, [parts[0], others[1]], 4096)
    with pytest.raises(CorruptRecord, match="at least one level"):
        decode(codec, [], 4096)
    register(nested())  # known, but another profile
    single = CachegenCodec(small_profile())
    (one,) = encode(single, some(), 0, "bfloat16", 64)
    with pytest.raises(CorruptRecord):
        decode(single, [one, parts[1]], 4096)
    decoder = single.decoder(memoryview(bytearray(4096)))
    decoder.feed(memoryview(one))
    with pytest.raises(CorruptRecord):
        decoder.feed(memoryview(one))


def test_a_profile_whose_tables_are_read_anew_between_two_levels() -> None:
    """Tables are kept of some profiles only; the levels of a segment belong together all the same."""
    profile = nested()
    codec = CachegenCodec(profile)
    parts = encode(codec, some(), 0, "bfloat16", 64)
    out = bytearray(4096)
    decoder = codec.decoder(memoryview(out))
    for part in parts:
        tables_for.cache_clear()
        decoder.feed(memoryview(part))
    assert out == decode(codec, parts, 4096)


# Size.


@pytest.mark.parametrize(("tokens", "most"), [(256, 1.10), (1536, 1.03)])
def test_segments_are_hardly_longer_than_the_entropy(tokens: int, most: float) -> None:
    """Everything counted but the head; the entropy is that of the profile's distributions, with the scales."""
    layout = KVLayout(3, 3, 64)
    profile = small_profile(layout, levels=(1.0, 0.4))
    tables = tables_for(profile)
    k, v = synthetic_kv(layout, tokens, 5)
    for level in range(2):
        codec = CachegenCodec(profile, level=level)
        for layer in range(3):
            raw = segment_of(k, v, layer, "bfloat16")
            (part,) = encode(codec, raw, layer, "bfloat16", tokens)
            head = cachegen.read_head(memoryview(part), len(raw), profile)
            modelled = 16.0 * (2 * head.groups + head.escapes)
            anchors, deltas = symbols_of(tables.levels[level].limit(layer), profile, level, raw, layer, tokens)
            modelled += tables.anchors.bits[tables.anchor_classes[layer], anchors].sum()
            chosen = tables.levels[level]
            modelled += chosen.distributions[layer].bits[chosen.classes[layer], deltas].sum()
            assert 8 * len(part) <= most * modelled


def symbols_of(
    limit: int, profile: Profile, level: int, raw: memoryview, layer: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    tables = tables_for(profile)
    groups = -(-tokens // 10)
    made: list[Sequence[np.ndarray]] = []
    for half in range(2):
        words = np.frombuffer(raw, np.uint16).reshape(2, tokens, -1)[half]
        anchors, deltas = (np.zeros((n, words.shape[1]), np.uint8) for n in (groups, tokens - groups))
        step = tables.levels[level].steps[half, layer]
        cachegen_reference.quantise(
            words, "bfloat16", 10, step, limit, anchors, deltas, np.zeros(groups, np.uint16), np.zeros(0, np.uint16)
        )
        made.append((anchors, deltas))
    return np.concatenate([m[0] for m in made], 1), np.concatenate([m[1] for m in made], 1)


# Making profiles.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": ()}, "1 to 16 levels"), ({"levels": (0.0,)}, "scale"), ({"levels": ((8, 5),)}, "bits of three"),
        ({"levels": ((9, 5, 3),)}, "bits of three"), ({"levels": ("x",)}, "bits of three"),
        ({"levels": (1.0, 0.5), "embedded": True}, "factor of 3"), ({"levels": BITS, "embedded": True}, "factor of 3"),
        ({"level": 4}, "level=4"), ({"value_scale": 0.0}, "value_scale"), ({"group": 1}, "group"),
    ],
)  # fmt: skip
def test_options_that_make_no_profile(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_of(lambda: [synthetic_kv(LAYOUT, 40)], name="m", **options)


def test_contexts_that_make_no_profile() -> None:
    k, v = synthetic_kv(LAYOUT, 40)
    bad = k.copy()
    bad[0, 0] = np.nan
    for contexts, message in (
        ([], "contexts of more than 10 tokens"),
        ([(k[:, :1], v[:, :1])], "contexts of more than 10 tokens"),
        ([(k, v), (k[:2], v[:2])], "differ in layers"),
        ([(k, v[:, :3])], "have the shapes"),
        ([(bad, v)], "inf or nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile_of(lambda contexts=contexts: contexts, name="m")


@pytest.mark.parametrize(
    ("parameters", "arrays", "message"),
    [
        ({"format": 2}, {}, "has format 2"), ({"rope": "x"}, {}, "whether K is rotated"),
        ({"embedded": 1}, {}, "whether K is rotated"), ({"group": 1}, {}, "group"), ({"group": 10.0}, {}, "group"),
        ({"level": 9}, {}, "level"), ({"levels": []}, {}, "levels"), ({"levels": [1]}, {}, "is no map"),
        ({}, {"level.0.steps": None}, "no array 'level.0.steps'"),
        ({}, {"level.0.steps": np.zeros((2, 3), np.float32)}, "impossible step"),
        ({}, {"level.0.steps": np.full((2, 3), 1e30, np.float32)}, "impossible step"),
        ({}, {"level.0.steps": np.ones((2, 4), np.float32)}, "level.0.steps"),
        ({}, {"level.0.classes": np.full((3, 32), 9999, np.uint16)}, "names a distribution that is not there"),
        ({}, {"level.0.frequencies.1": np.full((1, 3), 1365, np.uint16)}, "an even number|sum to"),
        ({}, {"level.0.frequencies.1": np.array([[4096, 0, 0, 0]], np.uint16)}, "cannot be coded"),
        ({}, {"level.0.frequencies.1": np.array([[4000, 1, 1, 1]], np.uint16)}, "sum to"),
        ({}, {"anchor.frequencies": np.ones((1, 254), np.uint16)}, "anchor.frequencies"),
    ],
)  # fmt: skip
def test_a_hostile_profile_is_refused(parameters: dict[str, Any], arrays: dict[str, Any], message: str) -> None:
    good = small_profile(levels=(0.5,))
    mixed = {name: array for name, array in {**good.arrays, **arrays}.items() if array is not None}
    bad = Profile(good.codec, good.model, good.layout, parameters={**good.parameters, **parameters}, arrays=mixed)
    with pytest.raises(ConfigError, match=message) as caught:
        CachegenCodec(bad)
    if "sum to" not in message:
        assert bad.id in str(caught.value)


def test_every_float16_is_rounded_alike() -> None:
    """Each float16, what lies half-way to the next, and what is next to that; subnormal ones and overflow included."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate(
        (halves, middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, np.float32(0)))
    )
    values = np.append(values, np.float32(1e9))
    for symbol in (126, 128):  # -1 and 1 times the step
        out = []
        for module in QUANTISERS:
            words = np.zeros((len(values), 1), np.uint16)
            module.dequantise(
                np.full((len(values), 1), symbol, np.uint8), np.zeros((0, 1), np.uint8), values,
                np.zeros(0, np.float32), 1, np.zeros(0, np.int16), 1, words, "float16",
            )  # fmt: skip
            out.append(words[:, 0])
        assert np.array_equal(*out)
        expected = np.minimum(values, np.float32(65504)).astype(np.float16) * np.float16(symbol - 127)
        assert np.array_equal(out[0], expected.view(np.uint16))
