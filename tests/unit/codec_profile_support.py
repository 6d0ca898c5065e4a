"""Synthetic KV and small profiles of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvstore.codec.base import SegmentInfo
from kvstore.codec.cachegen import CachegenCodec
from kvstore.codec.floats import from_float32
from kvstore.codec.profile import Profile
from kvstore.codec.profiling_cachegen import profile_of
from kvstore.layout import KVLayout, dtype_itemsize

LAYOUT = KVLayout(3, 2, 8)
DTYPES = ("bfloat16", "float16", "float32")


def synthetic_kv(layout: KVLayout, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """K and V `[layers, tokens, heads, width]`: channels of different size and mean, neighbours alike."""
    rng = np.random.default_rng(seed)
    both = []
    for width in (layout.head_dim, layout.v_head_dim or 0):
        shape = (layout.num_layers, 1, layout.num_kv_heads, width)
        of_layout = np.random.default_rng(width + layout.num_layers)
        size, mean = np.exp(of_layout.standard_normal(shape)), 3 * of_layout.standard_normal(shape)
        walk = rng.standard_normal((layout.num_layers, tokens, layout.num_kv_heads, width))
        for token in range(1, tokens):
            walk[:, token] = 0.9 * walk[:, token - 1] + 0.4 * walk[:, token]
        both.append((mean + size * walk).astype(np.float32))
    return both[0], both[1]


@functools.cache
def small_profile(layout: KVLayout = LAYOUT, **options: Any) -> Profile:
    """A profile of synthetic KV. `options` as `profile_of` has them (levels as tuples)."""
    return profile_of(lambda: (synthetic_kv(layout, 120, seed) for seed in range(2)), name="made/up", **options)


def segment_of(k: np.ndarray, v: np.ndarray, layer: int, dtype: str) -> memoryview:
    """The raw bytes of one layer of `synthetic_kv`."""
    flat = np.concatenate((k[layer].reshape(-1), v[layer].reshape(-1)))
    raw = np.empty(flat.size * dtype_itemsize(dtype), np.uint8)
    from_float32(flat, dtype, raw)
    return raw.data


def info(profile: Profile, layer: int, dtype: str, tokens: int, **more: Any) -> SegmentInfo:
    return SegmentInfo(dtype_itemsize(dtype), layer, profile.layout, dtype, tokens, **more)


def encode(codec: CachegenCodec, raw: memoryview, layer: int, dtype: str, tokens: int) -> list[bytes]:
    """The parts of a segment that must not be stored raw."""
    assert codec.profile is not None
    parts = codec.encode(raw, info(codec.profile, layer, dtype, tokens))
    assert [part.codec for part in parts] == [codec.number] * len(parts)
    assert [part.level for part in parts] == list(range(len(parts)))
    return [bytes(part.data) for part in parts]


def decode(codec: CachegenCodec, parts: list[bytes], nbytes: int) -> bytes:
    out = bytearray(nbytes)
    codec.decode_into([memoryview(part) for part in parts], memoryview(out))
    return bytes(out)
