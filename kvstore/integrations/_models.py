"""What a transformers model is to the store: the shape of its cache, its name, and which weights it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from kvstore.codec.profiling import model_name
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

__all__ = ["cache_layout", "model_name", "weights_fingerprint", "weights_token"]

_BLOCK_BYTES = 64 << 20  # of a tensor on another device, copied to the host at a time
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_GLANCE_BYTES = 64  # of each tensor, in a token

# What does not change the KV, or is hashed with the tensors (dtypes), or says where and by whom it was saved.
_NOT_THE_MODEL = frozenset(
    (
        "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
        "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    )
)  # fmt: skip

# Attributes in which PEFT keeps, on the model and on each adapted layer, which adapters work and how strongly.
_ADAPTER_STATE = (
    "active_adapter", "_active_adapter", "active_adapters", "_disable_adapters", "merged_adapters", "scaling"
)  # fmt: skip


def cache_layout(model: Any, config: Any) -> KVLayout:
    """The layout of a model's cache. Raises `ConfigError` naming what makes it unfit."""
    name = f"{type(model).__name__} ({config.model_type})"
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder model; only decoder-only models can be stored")
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(f"{name} uses multi-head latent attention, which this integration does not store yet")
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention"}:
        raise ConfigError(f"{name} has layers of type {', '.join(sorted(other))}; only full attention can be stored")
    window = getattr(config, "sliding_window", None)
    if window and not kinds and getattr(config, "use_sliding_window", True):
        raise ConfigError(f"{name} attends over a sliding window of {window} tokens; its cache cannot be stored whole")
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    if not rotary:
        raise ConfigError(f"{name} has no rotary position embedding; its cache cannot be stored by prefix chunks")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(f"{name} has {kind} rotary embeddings: its KV depends on the length of the whole prompt")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout(config.num_hidden_layers, kv_heads, head_dim)


def weights_fingerprint(model: Any) -> str:
    """Which weights a model has, as 32 hex digits: XXH3-128 over every byte of all parameters and buffers (the
    rotary frequencies among them) with their names, shapes and dtypes, over the text configuration without paths and
    versions, and over the state of PEFT adapters.

    It is the same in every process that has the same bytes. Reads all weights once: about 0.1 s per GB on a CPU; from
    other devices they are copied in blocks of 64 MiB. It guards against mistakes, not against somebody who makes
    weights that collide.

    Raises:
        ConfigError: the bytes of a tensor cannot be had (on the meta device, of a class of its own).
    """
    digest = xxhash.xxh3_128(b"kvstore weights 2")
    for name, tensor in sorted(_tensors(model)):
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        raw = _raw(name, tensor)
        for begin in range(0, len(raw), _BLOCK_BYTES):
            digest.update(raw[begin : begin + _BLOCK_BYTES].cpu().numpy().data)
    digest.update(json.dumps([_config_text(model), _adapters(model)]).encode())
    return digest.hexdigest()


def weights_token(model: Any) -> object:
    """A cheap hint whether `weights_fingerprint` may have changed: tokens that differ say so. About 10 µs per tensor.

    It has the address and torch's version counter of every parameter and buffer, 64 bytes from the middle of each
    (what is written through `.data` is not counted), the state of PEFT adapters, and the text configuration. Equal
    tokens do not prove that a tensor written to through `.data` is the same all over. Inference tensors have no
    counter; a model with any gets a token that equals no other.

    Raises:
        ConfigError: as `weights_fingerprint`.
    """
    marks = []
    glances: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _tensors(model):
        if tensor.is_inference():
            return object()
        marks.append((name, tensor.data_ptr(), tensor._version, tensor.shape, tensor.dtype))
        raw = _raw(name, tensor)
        begin = max(0, (len(raw) - _GLANCE_BYTES) // 2)
        glances.setdefault(tensor.device, []).append(raw[begin : begin + _GLANCE_BYTES])
    seen = [torch.cat(pieces).cpu().numpy().tobytes() for pieces in glances.values()]
    return marks, seen, _adapters(model), _config_text(model)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _raw(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, `[nbytes]` uint8, on its device."""
    try:
        if tensor.is_meta:
            raise NotImplementedError("it lies on the meta device")
        return tensor.detach().reshape(-1).view(torch.uint8)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(f"weight {name} has no bytes to fingerprint ({error}); give a revision instead") from error


def _config_text(model: Any) -> str:
    config = model.config.get_text_config(decoder=True).to_dict()
    kept = {str(key): value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return json.dumps(kept, sort_keys=True, default=str)


def _adapters(model: Any) -> list[tuple[str, str, str]]:
    """What PEFT adapters there are, and which are active, disabled or merged, and how they are scaled."""
    state = [("", "peft_config", repr(sorted(getattr(model, "peft_config", None) or ())))]
    for name, module in model.named_modules():
        own = vars(module)
        state += [(name, field, repr(own[field])) for field in _ADAPTER_STATE if field in own]
    return state
