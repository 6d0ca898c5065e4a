"""The rotary code against the rotary modules of transformers themselves."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvstore._rope_config import _MODELS
from kvstore.errors import ConfigError
from kvstore.rope import RotarySpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.integrations._rotary import model_rotary  # noqa: E402

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


ODD: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.7},
    "llama3": {
        "rope_type": "llama3", "factor": 7.3, "low_freq_factor": 1.3, "high_freq_factor": 3.9,
        "original_max_position_embeddings": 1900,
    },
    "llama3 by 1": {
        "rope_type": "llama3", "factor": 1.0, "low_freq_factor": 0.1, "high_freq_factor": 100.0,
        "original_max_position_embeddings": 77,
    },
    "yarn": {"rope_type": "yarn", "factor": 3.3, "original_max_position_embeddings": 1000},
    "yarn of few": {
        "rope_type": "yarn", "factor": 128.5, "original_max_position_embeddings": 7, "beta_fast": 31, "beta_slow": 0.7,
    },
    "yarn in one step": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False,
        "beta_fast": 2.2, "beta_slow": 2.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", ODD)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_odd_factors_heads_and_far_positions(scaling: str, head_dim: int) -> None:
    """To a few units in the last place of fp32, up to position 1,000,000, forwards and back."""
    home = sys.modules[transformers.LlamaForCausalLM.__module__]
    here = torch.tensor([0, 1, 1000, 65_537, 131_071, 999_999, 1_000_000])
    there = torch.tensor([999_999, 0, 77, 3, 500_000, 5, 0])
    for theta in (10_000.0, 123_456.7, 1e6, 1e7):
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim,
            max_position_embeddings=65536, rope_parameters={**ODD[scaling], "rope_theta": theta},
        )  # fmt: skip
        rotary = home.LlamaRotaryEmbedding(config)
        spec = RotarySpec.from_config(config).with_frequencies(rotary.inv_freq)
        plain = some_k(len(here), head_dim)
        at_here, at_there = (
            theirs(rotary, home.apply_rotary_pos_emb, plain, where[None].expand(2, -1), head_dim)
            for where in (here, there)
        )
        most = 2e-6 * spec.magnitude
        assert (spec.apply(plain, here) - at_here).abs().max() < most
        assert (spec.undo(at_here, here) - plain).abs().max() < most
        assert (spec.move(at_here, here, there) - at_there).abs().max() < most


def made_whole(kind: str, share: float) -> Any:
    """A tiny model of this type, with a part of each head rotated."""
    fields: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share},
    }  # fmt: skip
    if kind == "gptj":
        fields = {"vocab_size": 64, "n_embd": 128, "n_layer": 1, "n_head": 4, "rotary_dim": 16}
    config = transformers.CONFIG_MAPPING[kind](**fields)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", sorted(_MODELS))
def test_every_model_in_the_table(kind: str) -> None:
    """Live: K of the same token at nine places, as the model caches it, is the same K once the embedding is undone."""
    for share in (1.0, 0.5) if _MODELS[kind][1] else (1.0,):
        model = made_whole(kind, share)
        if kind == "gptj":  # computes its embedding in the attention layer: nothing to compare with
            with pytest.raises(ConfigError, match="no module with rotary frequencies"):
                model_rotary(model, model.config, 32)
            return
        spec = model_rotary(model, model.config, 32)
        assert spec.width == 32 * share
        with torch.no_grad():
            out = model(torch.full((1, 9), 5), use_cache=True)
        cached = (out["cache"] if "cache" in out else out["past_key_values"]).layers[0].keys.transpose(1, 2)
        plain = spec.undo(cached, range(9))
        size = cached.abs().max()
        assert size > 0
        assert (plain - plain[:, :1]).abs().max() < 1e-5 * size
        assert (cached - cached[:, :1]).abs().max() > 1e-2 * size
