"""The loops of kvt: numpy's and numba's say the same, and undo each other. (The codec: test_codec_kvt.py.)"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.codec import kvt_native, kvt_reference
from kvstore.codec.floats import from_float32, to_float32
from kvstore.codec.kvt_reference import ABSENT, LARGEST
from kvstore.codec.kvt_tables import Level
from kvstore.codec.rans import Distributions
from kvstore.rope import RotarySpec


@st.composite
def levels(draw: st.DrawFn) -> tuple[np.ndarray, Level, Distributions, int]:
    """Indices, a level that says something of some channels, and a number of lanes."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows, channels = draw(st.integers(1, 30)), draw(st.integers(1, 20))
    alphabet = draw(st.sampled_from([4, 8, 64, 256]))
    live = np.sort(rng.permutation(channels)[: draw(st.integers(1, channels))]).astype(np.uint16)
    after = rng.integers(0, 4, len(live)).astype(np.uint8)
    before = np.where(rng.random(len(live)) < draw(st.sampled_from([0, 0.5, 1])), ABSENT, after + 1).astype(np.uint8)
    # Classes 0 to 8 are for new channels, and have no symbols for what a shift of 3 cannot say; 9 to 12 for zeros, 13
    # to 16 for further bits.
    codable = rng.random((17, alphabet)) < draw(st.sampled_from([0.5, 1.0]))
    codable[:, 0] = True
    far = np.abs(np.arange(alphabet) - alphabet // 2) > LARGEST >> 3
    codable[:9, far & (np.arange(alphabet) > 0)] = False
    codable[9:] = np.arange(alphabet) < np.where(np.arange(9, 17) < 13, 3, 2)[:, None]
    frequencies = codable * rng.integers(1, 4096 // alphabet, codable.shape, endpoint=True)
    likely = np.where(np.arange(17) < 9, 0, rng.integers(0, 2, 17))
    frequencies[np.arange(17), likely] += 4096 - frequencies.sum(1)
    classes = rng.integers(0, 9, (len(live), 3))
    old = before != ABSENT
    classes[old] = rng.integers((9, 13, 13), (13, 17, 17), (int(old.sum()), 3))
    spread = draw(st.sampled_from([1, 12, 127]))
    indices = rng.integers(-spread, spread + 1, (rows, channels)).astype(np.int8)
    distributions = Distributions(frequencies)
    nothing = np.zeros((3, channels), np.float32)
    level = Level.of(live, before, after, classes.astype(np.uint16), nothing, nothing[0], distributions)
    return indices, level, distributions, draw(st.integers(1, len(live)))


def known(indices: np.ndarray, live: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """What is known of the live channels at these shifts; 0 of the others."""
    wide = indices[:, live].astype(int)
    out = np.zeros_like(indices)
    out[:, live] = np.where(shifts == ABSENT, 0, np.sign(wide) * (np.abs(wide) >> np.minimum(shifts, 7)))
    return out


@settings(max_examples=200, deadline=None)
@given(levels())
def test_a_level_is_what_both_loops_say_and_is_undone(case: tuple[np.ndarray, Level, Distributions, int]) -> None:
    indices, level, distributions, lanes = case
    words, states, escapes = kvt_reference.encode_level(indices, level, distributions, lanes)
    for mine, other in zip(
        kvt_native.encode_level(indices, level, distributions, lanes), (words, states, escapes), strict=True
    ):
        assert np.array_equal(mine, other)
    before, after = known(indices, level.live, level.before), known(indices, level.live, level.after)
    limits = LARGEST >> level.after[level.before == ABSENT].astype(int)
    for module in (kvt_reference, kvt_native):

        def undo(
            words: np.ndarray = words, states: np.ndarray = states, escapes: np.ndarray = escapes,
            module: ModuleType = module,
        ) -> np.ndarray | None:  # fmt: skip
            values = before.copy()
            done = module.decode_level(words, states.copy(), level, distributions, lanes, escapes, values)
            return values if done else None

        values = undo()
        assert values is not None
        assert np.array_equal(values, after)
        assert undo(words=np.append(words, np.uint16(7))) is None
        assert undo(escapes=np.append(escapes, np.int8(1))) is None
        if len(words):
            assert undo(words=words[:-1]) is None
        if len(escapes):
            assert undo(escapes=escapes[:-1]) is None
            assert undo(escapes=np.full_like(escapes, -128)) is None
            assert (
                undo(escapes=np.append(escapes[:-1], np.int8(limits.max() + 1 if limits.max() < 127 else -128))) is None
            )
    # Whatever a damaged stream says, both loops see the same in it.
    rng = np.random.default_rng(len(words))
    wrong = rng.integers(0, 1 << 16, len(words)).astype(np.uint16)
    got = []
    for module in (kvt_reference, kvt_native):
        values = before.copy()
        done = module.decode_level(wrong, states.copy(), level, distributions, lanes, escapes, values)
        got.append(values if done else None)
    assert (got[0] is None) == (got[1] is None)
    assert got[0] is None or np.array_equal(got[0], got[1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.3, 0.5, 1.0]), st.sampled_from([1.0, 60.0, 1e30]))
def test_rounding_and_centres_are_the_same_in_both_loops(seed: int, rounding: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal((9, 7)) * scale).astype(np.float32)
    z[rng.integers(9), rng.integers(7)] = rng.choice([0, -0.0, np.nan, np.inf, 126.5])
    offset = rng.standard_normal(7).astype(np.float32)
    both = []
    for module in (kvt_reference, kvt_native):
        indices = np.empty(z.shape, np.int8)
        beyond = module.quantise(z, offset, rounding, indices)
        centres, size = rng.random((3, 7)).astype(np.float32), np.exp2(rng.integers(0, 7, 7)).astype(np.float32)
        rng = np.random.default_rng(seed)
        out = np.empty(z.shape, np.float32)
        centres, size = rng.random((3, 7)).astype(np.float32), np.exp2(rng.integers(0, 7, 7)).astype(np.float32)
        module.dequantise(indices, centres, size, offset, out)
        both.append((indices, beyond, out))
    for mine, other in zip(*both, strict=True):
        assert np.array_equal(mine, other)
    moved = z - offset
    inside = np.abs(moved) + np.float32(rounding) < 128
    plain = np.sign(moved) * np.floor(np.abs(moved) + np.float32(rounding))
    assert np.array_equal(both[0][0][inside], plain[inside].astype(np.int8))
    assert np.array_equal(both[0][1], ~inside.all(1))


ROTARY = {
    "none": None,
    "neox": RotarySpec(16),
    "partly": RotarySpec(16, rotary_dim=6),
    "interleaved": RotarySpec(16, layout="interleaved"),
    "yarn": RotarySpec(16, scaling="yarn", factor=4.0, original_max_position_embeddings=4096),
}


@pytest.mark.parametrize("positions", [range(7, 57), [0] * 50], ids=["some", "zero"])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_loops_load_and_store_the_same(dtype: str, rotary: str, positions: Any) -> None:
    spec = ROTARY[rotary]
    values = np.random.default_rng(0).standard_normal((50, 3, 16)).astype(np.float32) * np.float32(300)
    values[3, 1, :8] = [0.0, -0.0, 1e-40, -1e-40, 1.00390625, 1.01171875, 3e4, -3e4]  # ties, subnormals
    nbytes = 3 * 16 * (4 if dtype == "float32" else 2)
    stored, loaded = [], []
    for module in (kvt_reference, kvt_native):
        out = np.empty((50, nbytes), np.uint8)
        module.store(values.copy(), dtype, None if spec is None else spec.applying(positions), out)
        stored.append(out)
        back = np.empty(values.shape, np.float32)
        module.load(out, dtype, None if spec is None else spec.undoing(positions), back)
        loaded.append(back)
    assert np.array_equal(*stored)
    assert np.array_equal(loaded[0].view(np.uint32), loaded[1].view(np.uint32))
    near = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-20}[dtype]
    assert np.abs(loaded[0] - values).max() <= near * 2 * np.abs(values).max()
    if spec is not None and any(positions):
        assert not np.array_equal(to_float32(stored[0], dtype).reshape(values.shape), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("worst", [3e38, np.inf, -np.inf, np.nan])
def test_both_loops_find_what_is_not_finite(dtype: str, worst: float) -> None:
    values = np.full(77, -6e4, np.float32)
    values[50] = worst if dtype != "float16" or not np.isfinite(worst) else 6.5e4
    raw = np.empty(77 * (4 if dtype == "float32" else 2), np.uint8)
    from_float32(values, dtype, raw)
    for module in (kvt_reference, kvt_native):
        assert module.finite(memoryview(raw), dtype) == np.isfinite(values).all()
