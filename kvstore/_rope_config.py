"""Rotary parameters in the configurations of transformers models, old and new."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError
from .rope import LAYOUTS, WANTED, YARN_DEFAULTS, yarn_magnitude

__all__ = ["rotary_fields"]

# How transformers' models pair elements, and whether they know a partial rotary factor.
_MODELS: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(
        (
            "arcee", "gemma", "gemma2", "granite", "granitemoe", "llama", "ministral", "mistral", "mixtral", "olmo",
            "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "starcoder2",
        ),
        ("neox", False),
    ),
    **dict.fromkeys(
        ("glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "persimmon", "phi", "phi3", "stablelm"), ("neox", True)
    ),
    **dict.fromkeys(("cohere", "ernie4_5", "helium"), ("interleaved", False)),
    **dict.fromkeys(("glm", "glm4", "gptj"), ("interleaved", True)),
}  # fmt: skip

_OLD_THETA = ("gptj", "llama")  # configurations without rope_theta mean 10,000


def rotary_fields(config: Any, layout: str | None) -> dict[str, Any]:
    """The fields of the `RotarySpec` of a configuration; see `RotarySpec.from_config`."""
    try:
        return _fields(_reader(config), type(config).__name__, layout)
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the configuration has a rotary parameter of no use: {error}", cause=error) from error


def _fields(read: Callable[[str], Any], kind: str, layout: str | None) -> dict[str, Any]:
    kind = str(read("model_type") or kind)
    known = _MODELS.get(kind)
    if layout is None and known is None:
        raise ConfigError(f"how {kind} lays out its rotary embedding is not known; pass layout='neox' (half-split "
                          "pairs) or layout='interleaved'")  # fmt: skip
    rope = dict(read("rope_parameters") or read("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"{kind} has other rotary embeddings in other layers ({', '.join(rope)}), which is not "
                          "supported")  # fmt: skip
    if any(not each for each in read("no_rope_layers") or ()):
        raise ConfigError(f"{kind} has layers without a rotary embedding, which is not supported")
    if rope.get("mrope_section") or read("mrope_section"):
        raise ConfigError(f"{kind} has multimodal rotary embeddings (mrope), which are not supported")
    scaling = str(rope.get("rope_type") or rope.get("type") or "default")
    head_dim = read("head_dim")
    if not head_dim:
        hidden, heads = (read("hidden_size") or read("n_embd")), (read("num_attention_heads") or read("n_head"))
        if not hidden or not heads:
            raise ConfigError(f"the configuration of {kind} has no head_dim, nor hidden_size and heads")
        head_dim = hidden // heads
    if not isinstance(head_dim, int):
        raise ConfigError(f"the configuration of {kind} has head_dim={reprlib.repr(head_dim)}; it must be an integer")
    share = _first(rope.get("partial_rotary_factor"), read("partial_rotary_factor"), read("rotary_pct"), 1.0)
    rotary_dim = _first(read("rotary_dim"), int(head_dim * share))
    if known is not None and not known[1] and rotary_dim != head_dim:
        raise ConfigError(f"models of type {kind} rotate whole heads, but partial_rotary_factor is {share}")
    theta = _first(rope.get("rope_theta"), read("rope_theta"), read("rotary_emb_base"))
    if theta is None:
        if kind not in _OLD_THETA:  # Mixtral's default is another one
            raise ConfigError(f"the configuration of {kind} has no rope_theta")
        theta = 10_000.0
    more = _scaling_of(scaling, rope, read)
    return {
        "head_dim": head_dim, "theta": theta, "rotary_dim": rotary_dim, "layout": layout or (known or LAYOUTS)[0],
        "scaling": scaling, **more,
    }  # fmt: skip


def _scaling_of(scaling: str, rope: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """The fields of this scaling in a transformers configuration."""
    wanted = WANTED.get(scaling, ())
    found = {name: rope.get(name) for name in wanted}
    if "original_max_position_embeddings" in wanted:
        # transformers lets a field of the configuration itself win.
        found["original_max_position_embeddings"] = _first(
            read("original_max_position_embeddings"),
            rope.get("original_max_position_embeddings"),
            read("max_position_embeddings"),
        )
    if scaling == "yarn":
        if found["factor"] is None and found["original_max_position_embeddings"]:
            found["factor"] = (read("max_position_embeddings") or 0) / found["original_max_position_embeddings"]
        found |= {name: rope.get(name) or default for name, default in YARN_DEFAULTS.items() if name != "truncate"}
        found["truncate"] = rope.get("truncate", True)
        found["attention_factor"] = rope.get("attention_factor")
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        if found["attention_factor"] is None and all(scales) and found["factor"]:
            top, bottom = (yarn_magnitude(found["factor"], scale) for scale in scales if scale)
            found["attention_factor"] = top / bottom
    return found


def _reader(config: Any) -> Callable[[str], Any]:
    """A function that reads a field of a configuration's text part; None for one that is not there."""
    if isinstance(config, Mapping):
        part = config.get("text_config") or config
        return part.get
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return lambda name: getattr(config, name, None)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
