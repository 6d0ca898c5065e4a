"""The rotary code against the rotary modules of transformers themselves."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.rope import RotarySpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0,
        "mscale_all_dim": 0.707, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn attention factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.25,
    },
}  # fmt: skip
MODELS = {
    "Llama": {}, "Qwen2": {"use_sliding_window": False}, "Mistral": {"sliding_window": None},
    "Glm": {"partial_rotary_factor": 0.5, "head_dim": 64}, "Cohere": {}, "GPTNeoX": {"partial_rotary_factor": 0.25},
    "Phi3": {"pad_token_id": 0}, "StableLm": {"partial_rotary_factor": 0.25},
}  # fmt: skip


def made(name: str, scaling: str, theta: float = 10_000.0) -> tuple[Any, Any, Any]:
    """(configuration, rotary module, its `apply_rotary_pos_emb`) of transformers."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rope_parameters={**SCALINGS[scaling], "rope_theta": theta},
        **MODELS[name],
    )  # fmt: skip
    home = sys.modules[getattr(transformers, f"{name}ForCausalLM").__module__]
    rotary = next(getattr(home, each) for each in dir(home) if each == f"{name}RotaryEmbedding")
    return config, rotary(config), home.apply_rotary_pos_emb


def theirs(rotary: Any, embed: Any, k: Any, positions: Any, width: int) -> Any:
    """K `[batch, tokens, heads, head_dim]` as the model embeds it."""
    cos, sin = rotary(k, positions)
    heads_first = k.transpose(1, 2)
    if cos.shape[-1] == width and width < k.shape[-1] and embed.__module__.endswith("stablelm"):
        _, turned = embed(heads_first[..., :width], heads_first[..., :width], cos, sin)  # it cuts the head by itself
        return torch.cat([turned, heads_first[..., width:]], -1).transpose(1, 2)
    return embed(heads_first, heads_first, cos, sin)[1].transpose(1, 2)


def some_k(tokens: int, head_dim: int = 64) -> Any:
    return torch.randn(2, tokens, 2, head_dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.parametrize("theta", [10_000.0, 1e6])
def test_equal_to_the_models_own(name: str, scaling: str, theta: float) -> None:
    config, rotary, embed = made(name, scaling, theta)
    spec = RotarySpec.from_config(config)
    assert spec.theta == theta
    assert spec.magnitude == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert torch.allclose(torch.tensor(spec.frequencies), rotary.inv_freq, rtol=5e-7, atol=0)
    plain = some_k(200)
    here, there = torch.arange(1500, 1700), torch.arange(900, 1100)
    at_here = theirs(rotary, embed, plain, here[None].expand(2, -1), spec.width)
    at_there = theirs(rotary, embed, plain, there[None].expand(2, -1), spec.width)
    assert not torch.allclose(at_here, at_there, atol=0.1)
    for ours in (spec, spec.with_frequencies(rotary.inv_freq)):
        exact = ours is not spec  # with the model's own table: rounding only; else its pow() adds 1e-7 · position
        most = 5e-6 if exact else 5e-4
        assert (ours.apply(plain, here) - at_here).abs().max() < most
        assert (ours.undo(at_here, here) - plain).abs().max() < most
        assert (ours.move(at_here, here, there) - at_there).abs().max() < most


@pytest.mark.parametrize("scaling", ["default", "llama3", "yarn"])
def test_a_slice_re_embedded_is_the_embedding_at_the_new_positions(scaling: str) -> None:
    """Truncation: what was stored before the embedding, cut and embedded again, to 1e-4 (fp32)."""
    config, rotary, embed = made("Llama", scaling)
    spec = RotarySpec.from_config(config).with_frequencies(rotary.inv_freq)
    plain = some_k(2048)
    everywhere = torch.arange(2048)
    cached = theirs(rotary, embed, plain, everywhere[None].expand(2, -1), spec.width)
    stored = spec.undo(cached, everywhere)
    for dropped in (1, 256, 1000, 1792):
        kept = torch.arange(2048 - dropped)
        expected = theirs(rotary, embed, plain[:, dropped:], kept[None].expand(2, -1), spec.width)
        assert (spec.apply(stored[:, dropped:], kept) - expected).abs().max() < 1e-4
        assert (spec.move(cached[:, dropped:], everywhere[dropped:], kept) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Glm", "Cohere", "GPTNeoX", "Phi3", "StableLm"])
def test_interleaved_and_partial_models(name: str) -> None:
    config, rotary, embed = made(name, "default")
    spec = RotarySpec.from_config(config)
    assert spec.width == round(64 * MODELS[name].get("partial_rotary_factor", 1.0))
    assert spec.layout == ("interleaved" if name in ("Glm", "Cohere") else "neox")
    plain = some_k(100)
    positions = torch.arange(300, 400)
    expected = theirs(rotary, embed, plain, positions[None].expand(2, -1), spec.width)
    assert (spec.apply(plain, positions) - expected).abs().max() < 1e-4
    assert (spec.undo(expected, positions) - plain).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_half_precision(dtype: str) -> None:
    """Such a model rounds cos, sin and each product; undo in fp32 gives K back to four units in the last place."""
    config, rotary, embed = made("Llama", "default")
    spec = RotarySpec.from_config(config)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    plain = some_k(256).to(getattr(torch, dtype))
    positions = torch.arange(700, 956)
    cached = theirs(rotary, embed, plain, positions[None].expand(2, -1), spec.width)
    assert cached.dtype == plain.dtype
    half = spec.width // 2
    length = torch.hypot(plain[..., :half].double(), plain[..., half:].double()).repeat(1, 1, 1, 2)
    error = (spec.undo(cached, positions).double() - plain.double()).abs()
    assert bool((error <= 4 * unit * length).all())
    assert float(error.max()) > 0


def test_every_scaling_of_transformers_is_taken_or_refused_by_name() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    refused = {}
    for scaling in ROPE_INIT_FUNCTIONS:
        rope = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "rope_type": scaling}  # fmt: skip
        config = {"model_type": "llama", "head_dim": 64, "rope_parameters": rope, "max_position_embeddings": 128}
        try:
            assert RotarySpec.from_config(config).scaling == scaling
        except ConfigError as error:
            refused[scaling] = str(error)
    assert {"dynamic", "longrope"} <= refused.keys()
    assert not {"default", "linear", "llama3", "yarn"} & refused.keys()
    assert all(name in message for name, message in refused.items())
