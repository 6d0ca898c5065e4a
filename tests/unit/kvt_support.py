"""Profiles of kvt for tests: made up, with random bases, and registered."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.codec.base import SegmentInfo
from kvstore.codec.floats import from_float32
from kvstore.codec.kvt_fitting import Histogram, fit_arrays, plan_shifts
from kvstore.codec.kvt_reference import quantise
from kvstore.codec.profile import Profile, register
from kvstore.layout import DTYPES, KVLayout
from kvstore.rope import RotarySpec

SMALL = KVLayout(3, 2, 16, 8)


def bases(layers: int, heads: int, width: int, step: float, rng: np.random.Generator) -> np.ndarray:
    """Random bases whose axes are `step` long, `[layers, heads, width, width]`."""
    turned = np.linalg.qr(rng.standard_normal((layers, heads, width, width)))[0]
    return (turned * step).astype(np.float32)


def make_profile(
    layout: KVLayout = SMALL,
    *,
    levels: int = 3,
    seed: int = 0,
    step: float = 0.25,
    spread: float = 6.0,
    tail: float = 4.0,
    rotary: RotarySpec | str | None = "default",
    **parameters: Any,
) -> Profile:
    """A profile for K and V of about unit variance. `spread`: indices of the channel that varies most; the others are
    smaller by a factor of up to exp(tail)."""
    rng = np.random.default_rng(seed)
    layers, heads = layout.num_layers, layout.num_kv_heads
    widths = layout.head_dim, layout.v_head_dim or 0
    if isinstance(rotary, str):
        rotary = RotarySpec(layout.head_dim)
    channels = layout.elements_per_token
    histogram = Histogram(layers, channels)
    histogram.tokens = 400
    sizes = spread * np.exp(-tail * rng.random(channels))
    for layer in range(layers):
        z = (rng.laplace(size=(400, channels)) * sizes).astype(np.float32)
        indices = np.empty(z.shape, np.int8)
        quantise(z, np.zeros(channels, np.float32), 0.5, indices)
        histogram.add(layer, indices, z)
    arrays = fit_arrays(histogram, plan_shifts(histogram, levels))
    for name, width in zip("kv", widths, strict=True):
        arrays[f"{name}_basis"] = bases(layers, heads, width, step, rng)
        arrays[f"{name}_mean"] = rng.normal(0, 0.3, (layers, heads, width)).astype(np.float32)
    given: dict[str, Any] = {"sinks": 4, "raw_last": 0, "rounding": 0.5, **parameters}
    text = None if rotary is None else rotary.text
    profile = Profile("kvt", "made/up", layout, rotary=text, parameters=given, arrays=arrays)
    register(profile)
    return profile


def segment(
    layout: KVLayout, tokens: int, dtype: str = "bfloat16", *, seed: int = 0, scale: float = 1.0
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """A segment's bytes, and its K and V as they come back from `dtype`, `[tokens, heads, width]`."""
    rng = np.random.default_rng(seed)
    widths = layout.head_dim, layout.v_head_dim or 0
    parts = [rng.standard_normal((tokens, layout.num_kv_heads, width)) * scale for width in widths]
    raw = bytearray(layout.segment_bytes(tokens, dtype))
    from_float32(np.concatenate([part.astype(np.float32).ravel() for part in parts]), dtype, memoryview(raw))
    k, v = sides(raw, layout, tokens, dtype)
    return bytes(raw), k, v


def sides(raw: bytes | bytearray, layout: KVLayout, tokens: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a segment, float32 `[tokens, heads, width]`."""
    from kvstore.codec.floats import to_float32

    flat = to_float32(memoryview(bytes(raw)), dtype)
    cut = tokens * layout.num_kv_heads * layout.head_dim
    return (
        flat[:cut].reshape(tokens, layout.num_kv_heads, -1).copy(),
        flat[cut:].reshape(tokens, layout.num_kv_heads, -1).copy(),
    )


def info(layout: KVLayout, tokens: int, dtype: str = "bfloat16", **more: Any) -> SegmentInfo:
    """What the codec is told; position 0 and rotated unless said otherwise."""
    fields: dict[str, Any] = {"start": 0, "rope": "applied", **more}
    layer = fields.pop("layer", 0)
    return SegmentInfo(DTYPES[dtype], layer, layout, dtype, tokens, **fields)
