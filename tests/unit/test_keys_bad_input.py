"""Keys: bad input is a ConfigError that names the offender, and never a key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.keys import KeyContext, chunk_hashes
from kvstore.layout import KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8)
CONTEXT = KeyContext(model="org/model", layout=LAYOUT, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""), ("model", None), ("model", 5), ("namespace", ""), ("namespace", None), ("codec", ""),
        ("revision", 3), ("lora", 1), ("codec_profile", 1.5), ("cache_salt", 0),
        ("dtype", "float64"), ("dtype", None), ("dtype", "complex64"),
        ("layout", None), ("layout", (4, 2, 8)),
        ("tp_rank", -1), ("tp_rank", 1), ("tp_size", 0), ("tp_rank", True), ("tp_rank", 0.0), ("tp_size", "1"),
        ("pp_rank", 1), ("pp_size", None), ("pp_size", 2.0),
        ("extra", (("a", None),)), ("extra", (("a", 1),)), ("extra", ("ab",)), ("extra", {"ab": "1"}),
        ("extra", None), ("extra", (("a", "b", "c"),)), ("extra", "ab"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(CONTEXT, **{name: value})


@pytest.mark.parametrize(
    ("bad", "shown"),
    [(-1, "-1"), (2**32, "4294967296"), (2**70, str(2**70)[:10]), (1.0, "1.0"), (True, "True"), (False, "False"),
     ("7", "'7'"), (None, "None"), ([1, 2], "[1, 2]"), (np.int64(-5), "-5"), (np.float32(2.0), "2.0"),
     (np.True_, "True"), (b"\x01", "b'"), (np.array([1, 2]), "array")],
)  # fmt: skip
@pytest.mark.parametrize("index", [0, 5, 600])
def test_a_bad_token_is_named(bad: Any, shown: str, index: int) -> None:
    tokens: list[Any] = list(range(100, 800))
    tokens[index] = bad
    for form in (tokens, tuple(tokens), iter(tokens)):
        with pytest.raises(ConfigError, match=f"index {index} ") as caught:
            chunk_hashes(form)
        assert shown in str(caught.value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [-1, -(2**31)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_bad_number_in_an_array_is_named(value: int, dtype: str) -> None:
    tokens = np.arange(40_000).astype(dtype)
    tokens[33_333] = value
    with pytest.raises(ConfigError, match=str(value)):
        chunk_hashes(tokens)
    tokens[33_333] = 5
    assert len(chunk_hashes(tokens)) == 156


def test_too_large_a_number_in_an_array_is_named() -> None:
    for dtype, value in (("int64", 2**32), ("uint64", 2**63), ("uint64", 2**64 - 1), (">i8", 2**40)):
        with pytest.raises(ConfigError, match=str(value)):
            chunk_hashes(np.array([1] * 20 + [value], dtype=dtype), chunk_size=8)
    assert chunk_hashes(np.full(8, 2**32 - 1), chunk_size=8) == chunk_hashes([2**32 - 1] * 8, chunk_size=8)


@pytest.mark.parametrize(
    ("bad", "named"),
    [("12345678", "str"), (b"12345678", "bytes"), (bytearray(8), "bytearray"), ({1, 2}, "set"), ({1: 2}, "dict"),
     (5, "int"), (None, "NoneType"), (np.zeros(8), "float64"), (np.zeros(8, bool), "bool"),
     (np.zeros((2, 8), int), r"\(2, 8\)"), (np.array(3), r"\(\)"), (np.array([1, "x"], dtype=object), "object"),
     (np.array([b"a"] * 8), "S1")],
)  # fmt: skip
def test_what_is_not_a_sequence_of_tokens_is_refused(bad: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        chunk_hashes(bad, chunk_size=8)


@pytest.mark.parametrize(
    "bad",
    [("", 0, 1), (b"x", 0, 1), (None, 0, 1), ("a", -1, 1), ("a", 0, 0), ("a", 0, -1), ("a", 0.0, 1), ("a", 0, 1.5),
     ("a", True, 1), ("a", 0, True), ("a", "0", 1), ("a",), ("a", 0, 1, 2), "abc", 5, None],
)  # fmt: skip
def test_a_bad_item_is_named(bad: Any) -> None:
    with pytest.raises(ConfigError, match="multimodal item"):
        chunk_hashes([9] * 64, chunk_size=16, multimodal=[bad])
