"""The shape of a model's KV cache, and the canonical order of a layer segment's bytes.

A layer segment holds K and then V of one layer of one chunk. K is `[tokens, num_kv_heads, head_dim]`, V is
`[tokens, num_kv_heads, v_head_dim]`, both token-major and contiguous, in the layout's dtype, K after the rotary
embedding (before it where the key context says `rope=pre`). Multi-head latent attention (MLA) has one latent vector per
token instead: `[tokens, 1, head_dim]`, no V.
Every engine integration converts to this one order while it copies, so that all engines find the same records.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["DTYPES", "KVLayout", "dtype_itemsize"]

DTYPES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Names (as in torch) and item sizes in bytes of the dtypes a KV cache may have."""

_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32",
            "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # fmt: skip


def canonical_dtype(dtype: object) -> str:
    """The name in `DTYPES` of a torch or numpy dtype, or of a common spelling ("torch.bfloat16", "bf16").

    Raises:
        ConfigError: not a dtype of a KV cache.
    """
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")  # numpy.float16 is a type
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype {dtype!s} is not supported; known dtypes: {', '.join(DTYPES)}")
    return name


def dtype_itemsize(dtype: str) -> int:
    """Bytes per element. Raises `ConfigError` for an unknown name."""
    return DTYPES[canonical_dtype(dtype)]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV cache of one shard of a model is shaped.

    Attributes:
        num_layers: layers held by this shard (of this pipeline stage).
        num_kv_heads: KV heads held by this shard (of this tensor-parallel rank); 1 for MLA.
        head_dim: width of K per head; for MLA the width of the latent vector (rank + rotary part).
        v_head_dim: width of V per head; None means `head_dim`; 0 for MLA.
        kind: "kv", or "mla".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    kind: str = "kv"

    def __post_init__(self) -> None:
        if self.kind not in ("kv", "mla"):
            raise ConfigError(f"KV layout kind {self.kind!r} is not known; use 'kv' or 'mla'")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
                raise ConfigError(f"KV layout {name}={value!r} must be an integer between 1 and 2^20")
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", 0 if self.kind == "mla" else self.head_dim)
        value = self.v_head_dim
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 20:
            raise ConfigError(f"KV layout v_head_dim={value!r} must be None or an integer between 0 and 2^20")
        if self.kind == "mla" and (self.num_kv_heads != 1 or self.v_head_dim != 0):
            raise ConfigError("an MLA layout has one latent head and no V: num_kv_heads=1, v_head_dim=0")

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V together, per token and layer."""
        return self.num_kv_heads * (self.head_dim + (self.v_head_dim or 0))

    def segment_bytes(self, tokens: int, dtype: str) -> int:
        """Raw bytes of one layer segment of `tokens` tokens."""
        return tokens * self.elements_per_token * dtype_itemsize(dtype)

    def key_bytes(self, tokens: int, dtype: str) -> int:
        """Raw bytes of the K part of one layer segment; V follows it."""
        return tokens * self.num_kv_heads * self.head_dim * dtype_itemsize(dtype)

    def chunk_bytes(self, tokens: int, dtype: str) -> int:
        """Raw bytes of all layer segments of a chunk of `tokens` tokens."""
        return self.num_layers * self.segment_bytes(tokens, dtype)
