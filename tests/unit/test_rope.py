"""The rotary code: its own algebra, in numpy and torch, in place and not, and what it refuses."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.rope import MAX_POSITION, RotarySpec

torch = pytest.importorskip("torch")

SPECS = {
    "neox": RotarySpec(64),
    "interleaved": RotarySpec(64, layout="interleaved"),
    "partial": RotarySpec(80, rotary_dim=32),
    "partial interleaved": RotarySpec(80, rotary_dim=40, layout="interleaved"),
    "linear": RotarySpec(64, scaling="linear", factor=4),
    "llama3": RotarySpec(
        128, 5e5, scaling="llama3", factor=8, low_freq_factor=1, high_freq_factor=4,
        original_max_position_embeddings=8192,
    ),
    "yarn": RotarySpec(128, 1e6, scaling="yarn", factor=4, original_max_position_embeddings=32768),
}  # fmt: skip
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def random_k(spec: RotarySpec, *shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=(*shape, spec.head_dim)).astype(dtype)


def textbook(spec: RotarySpec, k: Any, positions: Any) -> Any:
    """The definition, in fp64, with complex numbers and loops over tokens and pairs: no code of ours."""
    out = k.astype(np.float64)
    half = spec.width // 2
    for token, position in enumerate(positions):
        for pair in range(half):
            i, j = (pair, pair + half) if spec.layout == "neox" else (2 * pair, 2 * pair + 1)
            turned = (k[..., token, :, i] + 1j * k[..., token, :, j].astype(np.float64)) * np.exp(
                1j * position * float(spec.frequencies[pair])
            )
            out[..., token, :, i], out[..., token, :, j] = turned.real * spec.magnitude, turned.imag * spec.magnitude
    return out


def pairs(spec: RotarySpec, k: Any) -> Any:
    """The length of the pair that each element belongs to; of what is not rotated, its own."""
    half = spec.width // 2
    first = k[..., :half] if spec.layout == "neox" else k[..., 0 : spec.width : 2]
    second = k[..., half : spec.width] if spec.layout == "neox" else k[..., 1 : spec.width : 2]
    length = np.hypot(first, second)
    both = np.concatenate([length, length], -1) if spec.layout == "neox" else np.repeat(length, 2, -1)
    return np.concatenate([both, np.abs(k[..., spec.width :])], -1)


@pytest.mark.parametrize("name", SPECS)
def test_apply_is_the_definition(name: str) -> None:
    spec = SPECS[name]
    k = random_k(spec, 5, 2)
    positions = [0, 1, 17, 300, 999]
    expected = textbook(spec, k, positions)
    got = spec.apply(k, positions)
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 2e-4  # angles are rounded to fp32, as in models
    assert np.abs(got[:2] - expected[:2]).max() < 1e-6
    assert np.array_equal(got[0] / np.float32(spec.magnitude), k[0]) or spec.magnitude != 1
    assert not np.allclose(got[2], k[2])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_undo_after_apply_is_the_identity(name: str, library: str) -> None:
    spec = SPECS[name]
    k = random_k(spec, 3, 50, 4)
    positions = np.random.default_rng(1).integers(0, 100_000, 50)
    given_k = k if library == "numpy" else torch.from_numpy(k)
    back = spec.undo(spec.apply(given_k, positions), positions)
    assert np.abs(np.asarray(back) - k).max() < 1e-5


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_move_is_undo_and_apply(name: str, library: str) -> None:
    spec = SPECS[name]
    plain = random_k(spec, 2, 40, 3)
    plain = plain if library == "numpy" else torch.from_numpy(plain)
    old = np.arange(7000, 7040)
    for new in (old - 6000, old, old + 1000, np.arange(40)[::-1].copy()):
        moved = spec.move(spec.apply(plain, old), old, new)
        assert np.abs(np.asarray(moved - spec.apply(plain, new))).max() < 1e-5


@given(
    data=st.data(),
    name=st.sampled_from(sorted(SPECS)),
    leading=st.lists(st.integers(1, 3), max_size=2),
    tokens=st.integers(0, 20),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "float16"]),
)
@settings(max_examples=60, deadline=None)
def test_numpy_and_torch_agree_and_in_place_too(
    data: st.DataObject, name: str, leading: list[int], tokens: int, heads: int, dtype: str
) -> None:
    spec = SPECS[name]
    k = random_k(spec, *leading, tokens, heads, dtype=dtype)
    own = data.draw(st.booleans())
    shape = (*leading, tokens) if own else (tokens,)
    positions = np.random.default_rng(2).integers(0, 10_000, shape)
    kept = k.copy()
    expected = spec.apply(k, positions)
    assert np.array_equal(k, kept)
    assert expected.dtype == k.dtype
    tensor = torch.from_numpy(k.copy())
    # torch may fuse a multiplication and an addition, which rounds once instead of twice.
    most = 4 * UNIT[dtype] * spec.magnitude * pairs(spec, k.astype(np.float64)) + 2**-24
    assert (np.abs(spec.apply(tensor, torch.from_numpy(positions)).numpy().astype(np.float64) - expected) <= most).all()
    assert spec.apply(k, positions, out=k) is k
    assert np.array_equal(k, expected)
    first = spec.apply(tensor, positions)
    assert spec.apply(tensor, positions, out=tensor) is tensor
    assert torch.equal(tensor, first)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_the_error_bounds_of_the_module(name: str, dtype: str) -> None:
    """|error| ≤ u ‖pair‖ for one call, 2 u ‖pair‖ for undo, storing and apply."""
    spec = SPECS[name]
    unit = UNIT[dtype] if dtype != "float32" else 0.0
    k = torch.from_numpy(random_k(spec, 4, 300, 2)).to(getattr(torch, dtype))
    positions = range(1000, 1300)
    exact = spec.undo(k.float(), positions).double()
    stored = spec.undo(k, positions)
    assert stored.dtype == k.dtype
    length = torch.from_numpy(pairs(spec, k.double().numpy()))
    slack = 2.0**-22 * length + 2.0**-24
    assert bool(((stored.double() - exact).abs() <= unit * length / spec.magnitude + slack).all())
    back = spec.apply(stored, positions)
    error = (back.double() - k.double()).abs()
    assert bool((error <= 2 * unit * (1 + unit) * length + slack).all())
    if dtype != "float32":
        assert float(error.max()) > 0  # the bound bounds something


def test_strided_views_and_outputs_of_another_dtype() -> None:
    spec = SPECS["neox"]
    cache = torch.from_numpy(random_k(spec, 2, 3, 30))  # [batch, heads, tokens, head_dim], as models have it
    positions = range(100, 130)
    expected = spec.undo(cache.transpose(1, 2).contiguous(), positions)
    stored = torch.empty(2, 30, 3, 64, dtype=torch.bfloat16)
    spec.undo(cache.transpose(1, 2), positions, out=stored)
    assert torch.equal(stored, expected.bfloat16())
    spec.undo(cache.transpose(1, 2), positions, out=cache.transpose(1, 2))
    assert torch.equal(cache.transpose(1, 2), expected)
    array = random_k(spec, 30, 6)
    other = np.empty((30, 3, 64), np.float16)
    spec.apply(array[:, ::2], positions, out=other)
    assert np.array_equal(other, spec.apply(array, positions)[:, ::2].astype(np.float16))


def test_positions_of_their_own_per_row() -> None:
    spec = SPECS["neox"]
    k = random_k(spec, 2, 700, 3)
    positions = np.stack([np.arange(700), np.arange(700) + 5000])
    whole = spec.apply(k, positions)
    for row in range(2):
        assert np.array_equal(whole[row], spec.apply(k[row], positions[row]))
    layers = np.stack([k, 2 * k, 3 * k])  # [layers, batch, tokens, heads, head_dim]
    assert np.array_equal(spec.apply(layers, positions)[1], spec.apply(2 * k, positions))
    assert np.allclose(
        spec.apply(torch.from_numpy(layers), positions)[2].numpy(), spec.apply(3 * k, positions), atol=1e-5
    )


def test_a_rotation_is_made_once_and_used_in_parts() -> None:
    spec = SPECS["llama3"]
    k = random_k(spec, 100, 2)
    whole = spec.undoing(range(100))
    assert whole.tokens == 100
    expected = spec.undo(k, range(100))
    parts = [whole.part(begin, begin + 25)(k[begin : begin + 25]) for begin in range(0, 100, 25)]
    assert np.array_equal(np.concatenate(parts), expected)
    tensor = torch.from_numpy(k)
    assert np.allclose(whole(tensor).numpy(), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="100 tokens; 90 to 101"):
        whole.part(90, 101)


def test_a_rotation_by_nothing_copies() -> None:
    spec = SPECS["neox"]
    k = random_k(spec, 10, 2, dtype=np.float16)
    same = spec.move(k, range(10), range(10))
    assert np.array_equal(same, k)
    assert not np.shares_memory(same, k)
    yarn = SPECS["yarn"]
    k = random_k(yarn, 1, 1)
    assert np.allclose(yarn.apply(k, [0]), k * np.float32(yarn.magnitude), rtol=1e-6)


def test_angles_are_those_of_models_at_far_positions() -> None:
    """An angle is the fp32 product of position and frequency: 16 million has no room for fractions, and ours follow."""
    spec = RotarySpec(4, theta=100.0)
    position = MAX_POSITION - 1
    angle = np.float32(position) * spec.frequencies
    rotation = spec.applying([position])
    assert np.array_equal(rotation.cos[0], np.cos(angle.astype(np.float64)).astype(np.float32))


def test_frequencies_by_hand() -> None:
    assert np.allclose(RotarySpec(8, theta=10_000).frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-7)
    assert np.allclose(RotarySpec(8, scaling="linear", factor=2).frequencies, [0.5, 0.05, 0.005, 0.0005])
    three = RotarySpec(
        8, scaling="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=2000
    )
    wavelength = 2 * math.pi / 0.01
    share = (2000 / wavelength - 1) / 3
    assert 0 < share < 1
    assert np.allclose(three.frequencies, [1, 0.1, 0.01 * ((1 - share) / 8 + share), 0.001 / 8])
    yarn = RotarySpec(128, 1e6, scaling="yarn", factor=4, original_max_position_embeddings=32768)
    assert yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    plain = RotarySpec(128, 1e6).frequencies
    assert yarn.frequencies[0] == plain[0]
    assert yarn.frequencies[-1] == pytest.approx(plain[-1] / 4)
    with pytest.raises(ValueError, match="read-only"):
        plain[0] = 0


# Descriptions.


@pytest.mark.parametrize("name", SPECS)
def test_a_description_comes_back(name: str) -> None:
    spec = SPECS[name]
    again = RotarySpec.from_text(spec.text)
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.text == spec.text
    assert np.array_equal(again.frequencies, spec.frequencies)
    assert len(spec.text) < 300
    spec.require(again.text, "it")


def test_the_description_is_canonical() -> None:
    assert RotarySpec(64, 100_000).text == RotarySpec(64, 1e5, 64, "neox").text
    assert RotarySpec(64, 100_000).text == (
        '{"head_dim":64,"layout":"neox","rotary_dim":64,"scaling":"default","theta":100000.0}'
    )
    assert len({spec.text for spec in SPECS.values()}) == len(SPECS)


def test_other_descriptions_are_refused() -> None:
    one, other = SPECS["neox"], SPECS["linear"]
    with pytest.raises(ConfigError, match="the record was made with the rotary parameters"):
        one.require(other.text, "the record")
    with pytest.raises(ConfigError, match="None"):
        one.require(None, "the record")
    for text in (
        "",
        "[]",
        "{}",
        "nonsense",
        '{"head_dim":64,"pickle":1}',
        "[" * 4000,
        '{"head_dim":' + " " * 5000 + "64}",
    ):
        with pytest.raises(ConfigError, match="does not describe a rotary embedding"):
            RotarySpec.from_text(text)
    with pytest.raises(ConfigError, match="theta=nan"):
        RotarySpec.from_text('{"head_dim":64,"theta":NaN}')
    with pytest.raises(ConfigError, match="head_dim='64'"):
        RotarySpec.from_text('{"head_dim":"64"}')
    with pytest.raises(ConfigError, match="head_dim=None"):
        RotarySpec.from_text('{"head_dim":null}')


def test_a_models_own_table() -> None:
    spec = SPECS["neox"]
    table = np.nextafter(spec.frequencies, np.float32(2))
    own = spec.with_frequencies(torch.from_numpy(table))
    assert np.array_equal(own.frequencies, table)
    assert own == spec
    assert own.text == spec.text
    with pytest.raises(ConfigError, match="frequencies are not those"):
        spec.with_frequencies(spec.frequencies * np.float32(1.001))
    with pytest.raises(ConfigError, match="frequencies are not those"):
        spec.with_frequencies(spec.frequencies[:5])


# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "dynamic", "factor": 2.0}, "dynamic rotary embeddings cannot be moved"),
        ({"scaling": "longrope"}, "longrope rotary embeddings cannot be moved"),
        ({"scaling": "proportional"}, "'proportional' is not supported; use default, linear, llama3, yarn"),
        ({"layout": "gptj"}, "layout 'gptj' is not known"),
        ({"rotary_dim": 33}, "rotary_dim=33 must be even"),
        ({"rotary_dim": 128}, "at most head_dim=64"),
        ({"rotary_dim": 0}, "rotary_dim=0 must be an integer"),
        ({"theta": 1.0}, "theta=1.0 must be > 1"),
        ({"theta": "10000"}, "theta='10000' must be a finite number"),
        ({"theta": float("inf")}, "must be a finite number"),
        ({"factor": 2.0}, "scaling default has no factor"),
        ({"scaling": "linear"}, "scaling linear needs factor"),
        ({"scaling": "linear", "factor": 0.5}, "factor=0.5 must be ≥ 1"),
        ({"scaling": "llama3", "factor": 8.0}, "scaling llama3 needs low_freq_factor"),
        (
            {"scaling": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192},
            "high_freq_factor=4.0 must exceed",
        ),
        ({"scaling": "yarn", "factor": 4.0}, "scaling yarn needs original_max_position_embeddings"),
        ({"scaling": "yarn", "original_max_position_embeddings": 4096}, "scaling yarn needs factor"),
        (
            {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.0},
            "attention_factor=0.0 must be > 0",
        ),
        (
            {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 9, "beta_fast": 1, "beta_slow": 2},
            "beta_fast=1.0 is below beta_slow=2.0",
        ),
        ({"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 9, "truncate": 1}, "truncate=1"),
    ],
)  # fmt: skip
def test_impossible_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotarySpec(64, **fields)


def test_what_does_not_fit() -> None:
    spec = SPECS["neox"]
    k = random_k(spec, 10, 2)
    for bad, message in [
        (k[:9], "instead of"),
        (k[..., :32], "instead of"),
        (k[0], "instead of"),
        (k.astype(np.float64), "float64"),
        (k.astype(np.int32), "int32"),
        (torch.from_numpy(k).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (k.tolist(), "numpy array or a torch tensor, not list"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spec.apply(bad, range(10))
    for positions, message in [
        ([-1] * 10, "between 0 and 2"),
        ([MAX_POSITION] * 10, "between 0 and 2"),
        (np.zeros(10), "must be integers"),
        (5, "must be integers"),
        ([[1, 2], [3]], "must be integers"),
        (np.zeros((2, 10), int), "do not fit K"),
        ([True] * 10, "must be integers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            spec.apply(k, positions)
    with pytest.raises(ConfigError, match=r"old positions have shape \(10,\), new ones \(9,\)"):
        spec.move(k, range(10), range(9))
    with pytest.raises(ConfigError, match="output has shape"):
        spec.apply(k, range(10), out=np.empty((10, 3, 64), np.float32))
    with pytest.raises(ConfigError, match="but the output a Tensor"):
        spec.apply(k, range(10), out=torch.empty(10, 2, 64))


# Configurations.


LLAMA3 = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip


def test_configurations_as_files() -> None:
    """config.json as models are shipped: old names, new names, a text part."""
    assert RotarySpec.from_config(LLAMA3) == SPECS["llama3"]
    new = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 131072,
           "rope_parameters": {**LLAMA3["rope_scaling"], "rope_theta": 500000.0}}  # fmt: skip
    assert RotarySpec.from_config(new) == SPECS["llama3"]
    assert RotarySpec.from_config({"model_type": "llava", "text_config": LLAMA3}) == SPECS["llama3"]
    old = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
    assert RotarySpec.from_config(old) == RotarySpec(128, 10_000.0)
    neox = {"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8, "rotary_pct": 0.25,
            "rotary_emb_base": 10000}  # fmt: skip
    assert RotarySpec.from_config(neox) == RotarySpec(64, 10_000.0, 16)
    gptj = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64}
    assert RotarySpec.from_config(gptj) == RotarySpec(256, rotary_dim=64, layout="interleaved")
    yarn = {**LLAMA3, "model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 131072,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}  # fmt: skip
    assert RotarySpec.from_config(yarn) == SPECS["yarn"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "new idea"}}, "'new idea' is not supported"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, "other layers"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "layers without a rotary embedding"),
        ({"model_type": "mystery"}, "how mystery lays out its rotary embedding is not known; pass layout="),
        ({"partial_rotary_factor": 0.5}, "rotate whole heads, but partial_rotary_factor is 0.5"),
        ({"model_type": "mixtral", "rope_theta": None}, "mixtral has no rope_theta"),
        ({"hidden_size": None}, "has no head_dim"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotarySpec.from_config({**LLAMA3, **change})


def test_a_model_that_is_not_known_with_its_layout() -> None:
    for layout in ("neox", "interleaved"):
        spec = RotarySpec.from_config({**LLAMA3, "model_type": "mystery"}, layout=layout)
        assert (spec.layout, spec.scaling) == (layout, "llama3")


def test_torch_is_not_imported_for_arrays() -> None:
    code = f"""
import sys, numpy as np
from kvstore.rope import RotarySpec
spec = RotarySpec.from_config({LLAMA3!r})
k = np.ones((3, 1, 128), np.float32)
spec.move(spec.apply(k, [1, 2, 3]), [1, 2, 3], [0, 1, 2])
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_combination_of_spec_is_distinct() -> None:
    for (one, a), (two, b) in itertools.combinations(SPECS.items(), 2):
        assert a != b, (one, two)
