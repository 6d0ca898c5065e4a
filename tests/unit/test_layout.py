"""KV layouts: sizes, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.layout import DTYPES, KVLayout, canonical_dtype, dtype_itemsize


def test_sizes() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert layout.v_head_dim == 64
    assert layout.elements_per_token == 3 * 128
    assert layout.key_bytes(256, "bf16") == 256 * 3 * 64 * 2
    assert layout.segment_bytes(256, "bf16") == 2 * layout.key_bytes(256, "bf16")
    assert layout.chunk_bytes(256, "bf16") == 30 * layout.segment_bytes(256, "bf16")
    assert layout.segment_bytes(0, "bf16") == 0
    assert layout.segment_bytes(256, "float32") == 4 * layout.segment_bytes(256, "int8")


def test_uneven_and_latent_heads() -> None:
    uneven = KVLayout(2, 4, 192, v_head_dim=128)
    assert uneven.segment_bytes(1, "int8") == 4 * (192 + 128)
    assert uneven.key_bytes(1, "int8") == 4 * 192
    assert KVLayout(2, 4, 192, v_head_dim=0).segment_bytes(1, "int8") == 4 * 192
    latent = KVLayout(61, 1, 576, kind="mla")
    assert latent.v_head_dim == 0
    assert latent.segment_bytes(1, "bf16") == latent.key_bytes(1, "bf16") == 576 * 2
    assert latent == KVLayout(61, 1, 576, v_head_dim=0, kind="mla")
    assert latent != KVLayout(61, 1, 576, v_head_dim=0)


def test_equal_by_value_and_frozen() -> None:
    layout = KVLayout(2, 2, 8)
    assert layout == KVLayout(2, 2, 8, 8) == copy.deepcopy(layout)
    assert hash(layout) == hash(KVLayout(2, 2, 8, 8))
    with pytest.raises(AttributeError):
        layout.head_dim = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "v_head_dim"])
@pytest.mark.parametrize("value", [-1, 1.0, "8", True, 1 << 21, [8], np.float32(8)])
def test_a_bad_number_is_named(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, name: value}
    with pytest.raises(ConfigError, match=name):
        KVLayout(**numbers)


def test_other_nonsense() -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        for value in (0, None):
            numbers: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, name: value}
            with pytest.raises(ConfigError, match=name):
                KVLayout(**numbers)
    with pytest.raises(ConfigError, match="gqa"):
        KVLayout(2, 2, 8, kind="gqa")
    for heads, v_head_dim in ((2, None), (1, 8)):
        with pytest.raises(ConfigError, match="MLA"):
            KVLayout(2, heads, 8, v_head_dim=v_head_dim, kind="mla")


def test_dtypes() -> None:
    for name, size in DTYPES.items():
        assert canonical_dtype(name) == canonical_dtype(f"torch.{name}") == name
        assert dtype_itemsize(name) == size
    assert canonical_dtype("bf16") == "bfloat16"
    assert canonical_dtype("half") == canonical_dtype("fp16") == "float16"
    assert canonical_dtype(np.dtype(np.float32)) == canonical_dtype(np.float32) == "float32"
    for bad in ("float64", "bool", "", "torch.", None, 2, np.float64, "FP9", object()):
        with pytest.raises(ConfigError, match="known dtypes"):
            canonical_dtype(bad)


def test_item_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name in DTYPES:
        dtype = getattr(torch, name)
        assert canonical_dtype(dtype) == name
        assert dtype_itemsize(name) == torch.empty(0, dtype=dtype).element_size()
    for other in (torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fnuz):
        with pytest.raises(ConfigError):
            canonical_dtype(other)
