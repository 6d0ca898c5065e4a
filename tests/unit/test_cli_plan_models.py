"""Models of `kvstore plan`: by name, and by their Hugging Face configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore_cli.plan_models import MODELS, find_model, model_from_config

KiB = 1 << 10


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("Llama-3.1-8B", 128 * KiB),
        ("meta-llama/Llama-3.1-70B-Instruct", 320 * KiB),
        ("Llama-2-13B", 800 * KiB),
        ("mistral-7b-v0.3", 128 * KiB),
        ("Qwen2.5-7B", 56 * KiB),
        ("Qwen/Qwen3-0.6B", 112 * KiB),
        ("gemma-2-27b", 368 * KiB),
        ("DeepSeek-V3", 61 * 576 * 2),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", 27 * 576 * 2),
        ("SmolLM2-135M", 11520 * 2),  # 11,520 values a token: notes/papers.md
    ],
)
def test_kv_bytes_per_token_of_known_models(name: str, nbytes: int) -> None:
    assert find_model(name).kv_bytes(1) == nbytes


def test_the_table_of_models_is_large_and_makes_sense() -> None:
    assert len(MODELS) >= 25
    assert sum(model.layout.kind == "mla" for model in MODELS.values()) >= 3
    for model in MODELS.values():
        assert 0 < model.active <= model.params
        assert 0.5 <= model.weight_bytes / model.params <= 2
        assert model.attention_width > 0


LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16", "model_type": "llama",
}  # fmt: skip


def test_a_configuration_gives_what_the_table_says() -> None:
    read, known = model_from_config(LLAMA, name="x"), MODELS["llama-3.1-8b"]
    assert read.layout == known.layout
    assert read.attention_width == known.attention_width
    assert read.params == pytest.approx(known.params, rel=0.01)
    assert read.weight_bytes == pytest.approx(known.weight_bytes, rel=0.01)


def test_a_configuration_of_deepseek_gives_what_the_table_says() -> None:
    config = {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    read, known = model_from_config(config, name="x"), MODELS["deepseek-v3"]
    assert read.layout == known.layout
    assert read.attention_width == known.attention_width
    assert read.params == pytest.approx(known.params, rel=0.02)
    assert read.active == pytest.approx(known.active, rel=0.05)
    assert read.weight_bytes == pytest.approx(known.weight_bytes, rel=0.02)


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "dtype": "float16", "model_type": "qwen2",
        "layer_types": ["full_attention"] * 28,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = find_model(str(tmp_path))
    assert read.layout == MODELS["qwen2.5-7b"].layout
    assert read.params == pytest.approx(MODELS["qwen2.5-7b"].params, rel=0.01)
    assert (read.dtype, read.name) == ("float16", tmp_path.name)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"num_key_value_heads": None}, (32, 32, 128)),
        ({"head_dim": 64}, (32, 8, 64)),
        ({"multi_query": True, "num_key_value_heads": None}, (32, 1, 128)),
        ({"layer_types": ["full_attention"] * 8 + ["linear_attention"] * 24}, (8, 8, 128)),
    ],
)
def test_shapes_of_configurations(changes: dict[str, Any], layout: tuple[int, int, int]) -> None:
    found = model_from_config({**LLAMA, **changes}, name="x").layout
    assert (found.num_layers, found.num_kv_heads, found.head_dim) == layout


def test_text_of_a_multimodal_model_is_read() -> None:
    assert model_from_config({"text_config": LLAMA}, name="x").layout == MODELS["llama-3.1-8b"].layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be a whole number"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
        ({"hidden_size": 4097}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 64}, "more than 32 heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"layer_types": ["mamba"] * 32}, "no layer with a KV cache"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_from_config({**LLAMA, **changes}, name="x")


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    for text, message in (("{", "not JSON"), ("[]", "holds no map"), (" " * (1 << 20) + "{}", "larger than")):
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            find_model(str(path))
    with pytest.raises(ConfigError, match=r"nowhere.json cannot be read"):
        find_model("nowhere.json")
