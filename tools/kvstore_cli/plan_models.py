"""Models by name, and models by their Hugging Face `config.json`, as far as `kvstore plan` needs them.

The table holds what the models' published configurations say; `kvstore plan --model config.json` reads any other one.
Parameters are counts of all weights; `active` are those that one token passes through (fewer with experts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout, canonical_dtype

__all__ = ["MODELS", "Model", "find_model", "model_from_config"]

_MAX_CONFIG_BYTES = 1 << 20
_NO_KV = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "rwkv"})


@dataclass(frozen=True, slots=True)
class Model:
    """What a model costs to run and to store.

    Attributes:
        layout: of the whole model's KV cache (all ranks).
        dtype: of the KV cache.
        params: weights.
        active: weights that one token passes through.
        weight_bytes: all weights in memory, bytes.
        attention_width: query heads · (width of a key + width of a value), per layer: attention takes twice so many
            FLOPs per pair of tokens.
        note: what was assumed; "" if nothing was.
    """

    name: str
    layout: KVLayout
    dtype: str
    params: float
    active: float
    weight_bytes: float
    attention_width: int
    note: str = ""

    def kv_bytes(self, tokens: int) -> int:
        """Raw bytes of K and V of all layers for so many tokens."""
        return self.layout.chunk_bytes(tokens, self.dtype)


def _kv(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    billions: float,
    active: float = 0.0,
    weight_bits: float = 16.0,
) -> Model:
    params = billions * 1e9
    return Model(
        name,
        KVLayout(layers, kv_heads, width),
        "bfloat16",
        params,
        (active or billions) * 1e9,
        params * weight_bits / 8,
        2 * heads * width,
    )


def _mla(
    name: str, layers: int, heads: int, billions: float, active: float, weight_bits: float = 8.0, latent: int = 576
) -> Model:
    """DeepSeek's attention: 512 + 64 values per token and layer; keys of 192 and values of 128 while computing."""
    params = billions * 1e9
    return Model(
        name,
        KVLayout(layers, 1, latent, kind="mla"),
        "bfloat16",
        params,
        active * 1e9,
        params * weight_bits / 8,
        heads * (192 + 128),
    )


MODELS: dict[str, Model] = {
    model.name.lower(): model
    for model in (
        _kv("SmolLM2-135M", 30, 9, 3, 64, 0.135),
        _kv("Llama-1-65B", 80, 64, 64, 128, 65.2),
        _kv("Llama-2-7B", 32, 32, 32, 128, 6.74),
        _kv("Llama-2-13B", 40, 40, 40, 128, 13.0),
        _kv("Llama-2-70B", 80, 64, 8, 128, 69.0),
        _kv("Llama-3.2-1B", 16, 32, 8, 64, 1.24),
        _kv("Llama-3.2-3B", 28, 24, 8, 128, 3.21),
        _kv("Llama-3.1-8B", 32, 32, 8, 128, 8.03),
        _kv("Llama-3.1-70B", 80, 64, 8, 128, 70.6),
        _kv("Llama-3.3-70B", 80, 64, 8, 128, 70.6),
        _kv("Llama-3.1-405B", 126, 128, 8, 128, 406.0),
        _kv("Llama-4-Scout-17B-16E", 48, 40, 8, 128, 109.0, 17.0),
        _kv("Mistral-7B-v0.3", 32, 32, 8, 128, 7.25),
        _kv("Mistral-Nemo-12B", 40, 32, 8, 128, 12.2),
        _kv("Mistral-Small-24B", 40, 32, 8, 128, 23.6),
        _kv("Mistral-Large-123B", 88, 96, 8, 128, 123.0),
        _kv("Mixtral-8x7B", 32, 32, 8, 128, 46.7, 12.9),
        _kv("Mixtral-8x22B", 56, 48, 8, 128, 141.0, 39.0),
        _kv("Qwen2.5-0.5B", 24, 14, 2, 64, 0.494),
        _kv("Qwen2.5-7B", 28, 28, 4, 128, 7.62),
        _kv("Qwen2.5-14B", 48, 40, 8, 128, 14.8),
        _kv("Qwen2.5-32B", 64, 40, 8, 128, 32.8),
        _kv("Qwen2.5-72B", 80, 64, 8, 128, 72.7),
        _kv("Qwen3-0.6B", 28, 16, 8, 128, 0.6),
        _kv("Qwen3-8B", 36, 32, 8, 128, 8.2),
        _kv("Qwen3-14B", 40, 40, 8, 128, 14.8),
        _kv("Qwen3-32B", 64, 64, 8, 128, 32.8),
        _kv("Qwen3-30B-A3B", 48, 32, 4, 128, 30.5, 3.3),
        _kv("Qwen3-235B-A22B", 94, 64, 4, 128, 235.0, 22.0),
        _kv("Gemma-2-9B", 42, 16, 8, 256, 9.24),
        _kv("Gemma-2-27B", 46, 32, 16, 128, 27.2),
        _kv("Gemma-3-27B", 62, 32, 16, 128, 27.4),
        _kv("Phi-3-mini", 32, 32, 32, 96, 3.82),
        _kv("Phi-4", 40, 40, 10, 128, 14.7),
        _kv("Yi-34B", 60, 56, 8, 128, 34.4),
        _kv("Falcon-40B", 60, 128, 8, 64, 41.8),
        _kv("GLM-4-9B", 40, 32, 2, 128, 9.4),
        _kv("gpt-oss-20b", 24, 64, 8, 64, 20.9, 3.6, 4.25),
        _kv("gpt-oss-120b", 36, 64, 8, 64, 117.0, 5.1, 4.25),
        _mla("DeepSeek-V2-Lite", 27, 16, 15.7, 2.4, 16.0),
        _mla("DeepSeek-V2", 60, 128, 236.0, 21.0, 16.0),
        _mla("DeepSeek-V3", 61, 128, 671.0, 37.0),
        _mla("DeepSeek-R1", 61, 128, 671.0, 37.0),
        _mla("Kimi-K2", 61, 64, 1026.0, 32.0),
    )
}
"""Lower-case name → model."""


def find_model(text: str) -> Model:
    """A model by name (an organisation before it, `-Instruct` and the like behind it do not matter), or by the path of
    its `config.json`, or of the folder that holds one.

    Raises:
        ConfigError: no such model or file (the nearest names are given), or a configuration that makes no sense.
    """
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if text.endswith(".json") or path.is_file():
        return model_from_config(_read(path), name=str(path.parent.name or path.stem))
    name = text.rpartition("/")[2].lower()
    for known in sorted(MODELS, key=len, reverse=True):
        if name == known or name.startswith(f"{known}-"):
            return MODELS[known]
    near = get_close_matches(name, MODELS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(MODELS[each].name for each in near)}? " if near else ""
    raise ConfigError(
        f"option 'model': {text[:80]!r} is not a known model, and no file of that name is there; {hint}"
        f"name one of {', '.join(model.name for model in MODELS.values())}, or a Hugging Face config.json"
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"option 'model': {path} cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"option 'model': {path} is larger than {_MAX_CONFIG_BYTES} bytes; it is no config.json")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"option 'model': {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"option 'model': {path} is not a Hugging Face config.json: it holds no map")
    return value


class _Fields:
    """Reads fields of a configuration; the messages name them."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def get(self, *names: str, default: int | None = None, most: int = 1 << 20) -> int:
        """A positive whole number, under whichever name it has."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(
                    f"option 'model': {self._where}: {name}={str(value)[:40]} must be a whole number from 1 to {most}"
                )
            return value
        if default is None:
            raise ConfigError(f"option 'model': {self._where} has no {names[0]}; it is not one of a language model")
        return default


def model_from_config(config: Mapping[str, Any], *, name: str) -> Model:
    """The model that a Hugging Face configuration describes. Weights are counted from its shapes.

    Raises:
        ConfigError: a number is missing or makes no sense; the message names it.
    """
    inner = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(inner, Mapping):
        raise ConfigError(f"option 'model': {name}: text_config is not a map")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"option 'model': {name} is an encoder-decoder model; kvstore stores decoder-only models")
    read = _Fields(inner, name)
    layers = read.get("num_hidden_layers", "n_layer", "num_layers", most=1 << 12)
    hidden = read.get("hidden_size", "n_embd", "d_model")
    heads = read.get("num_attention_heads", "n_head", "num_heads", most=1 << 14)
    notes = []
    with_kv = layers
    kinds = inner.get("layer_types")
    if isinstance(kinds, list) and kinds:
        with_kv = sum(kind not in _NO_KV for kind in kinds)
        if with_kv < len(kinds):
            notes.append(f"{len(kinds) - with_kv} layers keep a state of fixed size and no KV: they are not counted")
        if not with_kv:
            raise ConfigError(f"option 'model': {name} has no layer with a KV cache")
    if inner.get("kv_lora_rank") is not None:
        rope = read.get("qk_rope_head_dim")
        layout = KVLayout(with_kv, 1, read.get("kv_lora_rank") + rope, kind="mla")
        value_width = read.get("v_head_dim", default=128)
        width = heads * (read.get("qk_nope_head_dim", default=128) + rope + value_width)
        attention = hidden * heads * value_width + hidden * layout.head_dim + width * read.get("kv_lora_rank")
        q_rank = read.get("q_lora_rank", default=hidden)
        attention += q_rank * (hidden + heads * (width // heads - value_width))
    else:
        if hidden % heads and inner.get("head_dim") is None:
            raise ConfigError(
                f"option 'model': {name}: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and "
                "there is no head_dim"
            )
        head = read.get("head_dim", default=hidden // heads)
        one = inner.get("multi_query") and not inner.get("new_decoder_architecture")  # Falcon's way to say 1
        kv_heads = 1 if one else read.get("num_key_value_heads", "num_kv_heads", default=heads)
        if kv_heads > heads:
            raise ConfigError(f"option 'model': {name}: num_key_value_heads={kv_heads} is more than {heads} heads")
        layout = KVLayout(with_kv, kv_heads, head)
        width = 2 * heads * head
        attention = hidden * head * 2 * (heads + kv_heads)
    dense, active = _mlp(inner, read, hidden, layers)
    vocabulary = read.get("vocab_size", default=32000, most=1 << 24) * hidden
    params = float(vocabulary * (1 if inner.get("tie_word_embeddings") else 2) + layers * attention + dense)
    passed = float(vocabulary + layers * attention + active)
    return Model(
        name,
        layout,
        _dtype(inner, config, notes),
        params,
        passed,
        params * _weight_bytes(config),
        width,
        "; ".join([f"weights counted from the shapes: {params / 1e9:.2f} billion", *notes]),
    )


def _mlp(inner: Mapping[str, Any], read: _Fields, hidden: int, layers: int) -> tuple[int, int]:
    """(all weights, weights that one token passes) of the feed-forward blocks of all layers."""
    gates = 2 if inner.get("model_type") in ("gpt2", "opt", "falcon", "gpt_neox", "phi", "bloom") else 3
    plain = gates * hidden * read.get("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden)
    experts = read.get("n_routed_experts", "num_local_experts", "num_experts", default=1, most=1 << 14)
    if experts == 1:
        return layers * plain, layers * plain
    expert = gates * hidden * read.get("moe_intermediate_size", "intermediate_size", default=4 * hidden)
    chosen = read.get("num_experts_per_tok", "num_experts_per_token", "experts_per_token", default=2)
    shared = inner.get("n_shared_experts") or 0
    shared = shared if isinstance(shared, int) and 0 <= shared < 1 << 10 else 0
    first = inner.get("first_k_dense_replace") or 0
    first = first if isinstance(first, int) and 0 <= first <= layers else 0
    sparse = layers - first
    every = first * plain + sparse * expert * (experts + shared)
    return every, first * plain + sparse * expert * (min(chosen, experts) + shared)


def _dtype(inner: Mapping[str, Any], config: Mapping[str, Any], notes: list[str]) -> str:
    named = inner.get("dtype") or inner.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    if named is None:
        notes.append("no dtype in the configuration: bfloat16 is assumed")
        return "bfloat16"
    return canonical_dtype(named)


def _weight_bytes(config: Mapping[str, Any]) -> float:
    """Bytes per weight: two, or what a quantization says."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        bits = quantization.get("bits")
        if isinstance(bits, int) and 1 <= bits <= 16:
            return bits / 8
        return {"fp8": 1.0, "mxfp4": 4.25 / 8}.get(str(quantization.get("quant_method")), 2.0)
    return 2.0
