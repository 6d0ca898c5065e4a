"""Keys: one prompt, one context, one key, everywhere; and nothing else shares it (faults 7 and 8)."""

from __future__ import annotations

import array
import copy
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.keys import (
    KEY_BYTES,
    Key,
    KeyContext,
    MultimodalItem,
    _encode,
    _Window,
    chunk_hashes,
    chunk_keys,
    opaque_key,
)
from kvstore.layout import KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8)
CONTEXT = KeyContext(model="org/model", layout=LAYOUT, dtype="bfloat16")
TOKENS = [(i * 7919 + 3) % 151_936 for i in range(700)]
KEYS = chunk_keys(TOKENS, context=CONTEXT)

# --- an independent implementation, written from the docstring of kvstore.keys alone ---------------------------------


def ref_encode(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, list):
        return f"l{len(value)}:".encode() + b"".join(ref_encode(part) for part in value)
    content: bytes
    tag, content = {int: ("i", str(value).encode()), str: ("s", str(value).encode()), bytes: ("b", value)}[type(value)]
    return f"{tag}{len(content)}:".encode() + content


def sha(data: bytes) -> bytes:
    return bytes(hashlib.new("sha256", data).digest())


def ref_hashes(
    tokens: Sequence[int], chunk_size: int, partial: bool, items: Sequence[tuple[str, int, int]]
) -> list[bytes]:
    hashes, parent = [], sha(ref_encode(["kvstore chunk", 1, chunk_size]))
    for begin in range(0, len(tokens), chunk_size):
        chunk = list(tokens[begin : begin + chunk_size])
        if len(chunk) < chunk_size and not partial:
            break
        inside = [
            ref_encode([name, offset - begin, length])
            for offset, length, name in sorted((offset, length, name) for name, offset, length in items)
            if set(range(offset, offset + length)) & set(range(begin, begin + len(chunk)))
        ]
        parts = [parent, struct.pack("<I", len(chunk)), struct.pack("<I", len(inside))]
        parts += [struct.pack("<I", token) for token in chunk] + inside
        parent = sha(b"".join(parts))
        hashes.append(parent)
    return hashes


def ref_context(context: KeyContext) -> bytes:
    parts: list[Any] = ["kvstore context", 1]
    names = ["model", "dtype", "revision", "namespace", "cache_salt", "lora", "tp_rank", "tp_size"]
    for name in [*names, "pp_rank", "pp_size", "codec", "codec_profile"]:
        parts += [name, getattr(context, name)]
    parts += ["extra", [list(pair) for pair in sorted(context.extra)]]
    names = ["num_layers", "num_kv_heads", "head_dim", "v_head_dim", "kind"]
    parts += [f"layout.{name}" for name in names] + [getattr(context.layout, name) for name in names]
    return sha(ref_encode(parts))


FULL_CONTEXT = KeyContext(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    layout=KVLayout(30, 3, 64),
    dtype="torch.bfloat16",
    revision="7e27bd9f",
    namespace="tenant-ä",
    cache_salt="",
    lora="style@3",
    tp_rank=1,
    tp_size=2,
    codec="shuffle-zstd",
    extra=(("rope", "yarn×4"), ("a", "")),
)


@pytest.mark.parametrize(
    ("context", "kwargs", "last"),
    [
        (CONTEXT, {}, "abc63b360d45d2344ff7a2406f893bf0425ee520ddf2a7bff36d8d0c4abf3b66"),
        (
            FULL_CONTEXT,
            {"chunk_size": 64, "save_unfull_chunk": True, "multimodal": [("image-1", 60, 20), ("image-2", 690, 5)]},
            "d5aeaa996fa83adf81fd3d5bd1cf19f0089f986da266da28cfa1fe146ffe49e5",
        ),
    ],
)
def test_pinned_vector_equals_an_independent_implementation(
    context: KeyContext, kwargs: dict[str, Any], last: str
) -> None:
    keys = chunk_keys(TOKENS, context=context, **kwargs)
    hashes = ref_hashes(
        TOKENS,
        kwargs.get("chunk_size", 256),
        kwargs.get("save_unfull_chunk", False),
        kwargs.get("multimodal", ()),
    )
    assert list(keys) == [sha(ref_context(context) + chunk_hash) for chunk_hash in hashes]
    assert keys[-1].hex() == last, "the key format changed: every stored record would become unreachable"


def test_pinned_opaque_key() -> None:
    assert opaque_key("name", namespace="ns") == sha(ref_encode(["kvstore opaque", 1, "ns", "name"]))
    assert opaque_key("name").hex() == "867e71ce859595eaf82805f5223a954c0effa881b4cfcf0fd534c1f89d0a8224"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    chunk_size=st.integers(8, 20),
    partial=st.booleans(),
    items=st.lists(st.tuples(st.text(min_size=1, max_size=3), st.integers(0, 59), st.integers(1, 80)), max_size=4),
)
def test_equals_the_independent_implementation(
    tokens: list[int], chunk_size: int, partial: bool, items: list[tuple[str, int, int]]
) -> None:
    items = [item for item in items if item[1] < len(tokens)]
    got = chunk_hashes(tokens, chunk_size=chunk_size, save_unfull_chunk=partial, multimodal=items)
    assert got == ref_hashes(tokens, chunk_size, partial, items)


# --- the same everywhere (fault 8) -----------------------------------------------------------------------------------


def _generator() -> Iterator[int]:
    yield from TOKENS


class _Iterable:
    def __iter__(self) -> Iterator[int]:
        return iter(TOKENS)


def _strided() -> Any:
    wide = np.zeros((len(TOKENS), 3), dtype=np.int64)
    wide[:, 1] = TOKENS
    return wide[:, 1]


def _read_only() -> Any:
    frozen = np.array(TOKENS, dtype=np.uint32)
    frozen.flags.writeable = False
    return frozen


FORMS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(TOKENS),
    "generator": _generator,
    "iterable": _Iterable,
    "array.array": lambda: array.array("q", TOKENS),
    "memoryview": lambda: memoryview(array.array("I", TOKENS)),
    "list of numpy": lambda: list(np.array(TOKENS)),
    "numpy strided": _strided,
    "numpy reversed": lambda: np.array(TOKENS[::-1])[::-1],
    "numpy strided u4": lambda: np.repeat(np.array(TOKENS, dtype=np.uint32), 2)[::2],
    "numpy read-only": _read_only,
} | {
    f"numpy {dtype}": lambda dtype=dtype: np.array(TOKENS, dtype=dtype)
    for dtype in ("<i4", ">i4", "<i8", ">i8", "<u4", ">u4", "<u8", ">u8")
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_tokens_gives_the_same_keys(form: str) -> None:
    assert chunk_keys(FORMS[form](), context=CONTEXT) == KEYS


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", ">u2"])
def test_narrow_integers(dtype: str) -> None:
    small = [i % 100 for i in range(600)]
    expected = chunk_hashes(small)
    assert chunk_hashes(np.array(small, dtype=dtype)) == expected
    assert chunk_hashes(range(100), chunk_size=50) == chunk_hashes(np.arange(100, dtype=dtype), chunk_size=50)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64, torch.uint32):
        assert chunk_keys(torch.tensor(TOKENS).to(dtype), context=CONTEXT) == KEYS
    column = torch.tensor(TOKENS).repeat_interleave(2)[::2]
    assert not column.is_contiguous()
    assert chunk_keys(column, context=CONTEXT) == KEYS
    assert chunk_keys(list(torch.tensor(TOKENS)), context=CONTEXT) == KEYS
    for bad in (torch.ones(8), torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bool),
                torch.ones(2, 8, dtype=torch.int64), torch.tensor(3), torch.full((8,), -1),
                torch.ones(8, dtype=torch.int64, device="meta"), [torch.tensor(True)] * 8):  # fmt: skip
        with pytest.raises(ConfigError):
            chunk_hashes(bad, chunk_size=8)


def test_blocks_of_any_length_agree_with_the_slow_path() -> None:
    """Wide arrays are converted block by block (16,384 tokens); the joins must not show."""
    for count in (0, 1, 7, 8, 16_383, 16_384, 16_385, 32_768, 40_001):
        tokens = np.arange(count, dtype=np.int64) * 104_729 % 2**32
        for chunk_size in (8, 300):
            expected = ref_hashes(tokens.tolist(), chunk_size, True, ())
            for form in (tokens, tokens.astype(np.uint32), tokens.tolist()):
                assert chunk_hashes(form, chunk_size=chunk_size, save_unfull_chunk=True) == expected


_CHILD = """
import numpy as np
from kvstore.keys import KeyContext, chunk_keys
from kvstore.layout import KVLayout
c = KeyContext(model="org/model", layout=KVLayout(4, 2, 8), dtype="bf16", extra=(("b", "1"), ("a", "2")), lora=None)
t = [(i * 7919 + 3) % 151936 for i in range(700)]
print(chunk_keys(t, context=c)[-1].hex(), chunk_keys(np.array(t), context=c)[-1].hex())
"""


def test_the_same_in_processes_with_different_hash_seeds() -> None:
    context = replace(CONTEXT, extra=(("a", "2"), ("b", "1")))
    want = chunk_keys(TOKENS, context=context)[-1].hex()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("0", "1", "4294967295")
    ]
    assert [child.communicate()[0].split() for child in children] == [[want, want]] * 3


def test_keys_are_long_enough_not_to_collide() -> None:
    assert KEY_BYTES * 8 >= 128
    assert all(len(key) == KEY_BYTES == 32 for key in KEYS)
    assert all(len(chunk_hash) * 8 >= 128 for chunk_hash in chunk_hashes(TOKENS))


# --- every field counts (fault 7) ------------------------------------------------------------------------------------

OTHER_VALUES: dict[str, list[Any]] = {
    "model": ["org/model2", "Org/model", "org/model "],
    "layout": [
        KVLayout(5, 2, 8), KVLayout(4, 3, 8), KVLayout(4, 2, 9), KVLayout(4, 2, 8, 7), KVLayout(4, 2, 8, 0),
        KVLayout(2, 4, 8), KVLayout(8, 2, 4), KVLayout(4, 1, 8), KVLayout(4, 1, 8, kind="mla"), KVLayout(4, 1, 8, 0),
    ],
    "dtype": ["float16", "float32", "int8", "uint8", "fp8_e4m3", "fp8_e5m2"],
    "revision": ["", "None", "n", "1", "default"],
    "namespace": ["tenant", "defaul", "default\0"],
    "cache_salt": ["", "None", "1"],
    "lora": ["", "None", "1", "adapter@1", "adapter@2"],
    "tp_rank": [],  # with tp_size, below: a rank alone is out of range
    "tp_size": [2, 4],
    "pp_rank": [],
    "pp_size": [2, 4],
    "codec": ["lz4", "shuffle-zstd"],
    "codec_profile": ["", "None", "1"],
    "extra": [(("a", "b"),), (("a", ""),), (("", "a"),), (("a", "b"), ("c", "d")), (("a", "bcd"),), (("ab", "cd"),),
              (("a", "b"), ("a", "b")), (("None", ""),)],
}  # fmt: skip


def test_changing_any_one_field_changes_all_keys() -> None:
    assert set(OTHER_VALUES) == {f.name for f in fields(KeyContext)} - {"digest"}, "a new field needs a row here"
    contexts = [CONTEXT] + [replace(CONTEXT, **{name: v}) for name, values in OTHER_VALUES.items() for v in values]
    contexts += [
        replace(CONTEXT, tp_size=4, tp_rank=1), replace(CONTEXT, tp_size=4, tp_rank=2),
        replace(CONTEXT, pp_size=4, pp_rank=1), replace(CONTEXT, pp_size=4, pp_rank=2),
        replace(CONTEXT, model="a", revision="b"), replace(CONTEXT, model="ab", revision=""),
        replace(CONTEXT, lora="x", cache_salt="y"), replace(CONTEXT, lora="y", cache_salt="x"),
    ]  # fmt: skip
    sets = [chunk_keys(TOKENS, context=context) for context in contexts]
    for (_, a), (_, b) in combinations(zip(contexts, sets, strict=True), 2):
        assert not set(a) & set(b)
    # Every layout field was varied.
    for f in fields(KVLayout):
        assert len({getattr(layout, f.name) for layout in [LAYOUT, *OTHER_VALUES["layout"]]}) > 1


def test_spellings_of_one_context_are_one_context() -> None:
    same = KeyContext(
        model="org/model", layout=KVLayout(4, 2, 8, v_head_dim=8, kind="kv"), dtype="torch.bfloat16", extra=()
    )
    assert same == CONTEXT
    assert same.digest == CONTEXT.digest
    a = replace(CONTEXT, extra=(("x", "1"), ("y", "2")))
    b = replace(CONTEXT, extra=(("y", "2"), ("x", "1")))
    assert a == b
    assert a.digest == b.digest
    assert copy.deepcopy(a).digest == a.digest


plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.binary(max_size=4), lambda s: st.lists(s, max_size=4)
)


@settings(max_examples=120, deadline=None)
@given(a=st.lists(plain, max_size=4), b=st.lists(plain, max_size=4))
def test_no_two_lists_encode_alike(a: list[Any], b: list[Any]) -> None:
    assert (_encode(a) == _encode(b)) == (a == b)
    assert _encode(a) == ref_encode(a)


def _decode(data: bytes, at: int = 0) -> tuple[Any, int]:
    if data[at : at + 1] == b"n":
        return None, at + 1
    colon = data.index(b":", at)
    tag, count = data[at : at + 1], int(data[at + 1 : colon])
    if tag == b"l":
        parts, at = [], colon + 1
        for _ in range(count):
            part, at = _decode(data, at)
            parts.append(part)
        return parts, at
    content = data[colon + 1 : colon + 1 + count]
    return {b"i": int, b"s": bytes.decode, b"b": bytes}[tag](content), colon + 1 + count  # type: ignore[operator]


@settings(max_examples=200, deadline=None)
@given(value=st.lists(plain, max_size=5))
def test_the_encoding_can_be_read_back_so_it_is_injective(value: list[Any]) -> None:
    data = _encode(value)
    assert _decode(data) == (value, len(data))


def test_the_salt_is_not_shown() -> None:
    context = replace(CONTEXT, cache_salt="s3cret-salt")
    assert "s3cret" not in repr(context) + str(context)
    with pytest.raises(ConfigError) as caught:
        KeyContext(model="m", layout=LAYOUT, dtype="bf16", cache_salt=b"s3cret")  # type: ignore[arg-type]
    assert "cache_salt" in str(caught.value)
    assert "s3cret" not in str(caught.value)


# --- chunks and prefixes ---------------------------------------------------------------------------------------------


def test_chunk_size_limits() -> None:
    assert len(chunk_hashes(range(4096), chunk_size=8)) == 512
    assert len(chunk_hashes(range(4096), chunk_size=2048)) == 2
    for bad in (7, 2049, 0, -8, 256.0, "256", None, True):
        with pytest.raises(ConfigError, match="chunk_size"):
            chunk_hashes(range(16), chunk_size=bad)  # type: ignore[arg-type]
    sets = [chunk_hashes(range(2048), chunk_size=size) for size in (8, 16, 32, 64, 2048)]
    assert len({h for hashes in sets for h in hashes}) == sum(map(len, sets))


def test_short_prompts_have_no_chunk() -> None:
    assert chunk_keys([], context=CONTEXT) == []
    assert chunk_keys([], context=CONTEXT, save_unfull_chunk=True) == []
    assert chunk_keys(range(255), context=CONTEXT) == []
    assert len(chunk_keys(range(256), context=CONTEXT)) == 1
    assert len(chunk_keys(range(1), context=CONTEXT, save_unfull_chunk=True)) == 1


def test_equal_prefix_equal_hash_and_only_then() -> None:
    longer = chunk_hashes(TOKENS, chunk_size=16)
    for cut in (0, 15, 16, 17, 320, 699):
        assert chunk_hashes(TOKENS[:cut], chunk_size=16) == longer[: cut // 16]
    for changed in (0, 15, 16, 320):
        other = list(TOKENS)
        other[changed] += 1
        hashes = chunk_hashes(other, chunk_size=16)
        assert hashes[: changed // 16] == longer[: changed // 16]
        assert not set(hashes[changed // 16 :]) & set(longer[changed // 16 :])
    same_chunk_elsewhere = chunk_hashes([5] * 64, chunk_size=16)
    assert len(set(same_chunk_elsewhere)) == 4


def test_a_partial_chunk_is_found_only_as_itself() -> None:
    partials = [chunk_hashes(TOKENS[:n], chunk_size=16, save_unfull_chunk=True) for n in range(1, 65)]
    lasts = [hashes[-1] for hashes in partials]
    assert len(set(lasts)) == len(lasts)
    full = chunk_hashes(TOKENS[:64], chunk_size=16)
    assert [h for h in lasts if h in full] == full
    # A zero is a token: padding a partial chunk does not find it.
    assert chunk_hashes([1, 2, 3], chunk_size=8, save_unfull_chunk=True) != chunk_hashes(
        [1, 2, 3, 0, 0, 0, 0, 0], chunk_size=8
    )
    # The full chunks before it are the same as without it.
    assert partials[40][:-1] == full[:2]


# --- multimodal items ------------------------------------------------------------------------------------------------


def hashes_with(*items: Any, count: int = 64) -> list[bytes]:
    return chunk_hashes([9] * count, chunk_size=16, multimodal=items)


def test_an_item_enters_exactly_the_chunks_it_overlaps() -> None:
    plain_hashes = hashes_with()
    for offset, length, first in ((0, 1, 0), (15, 1, 0), (16, 1, 1), (15, 2, 0), (0, 64, 0), (63, 1, 3), (32, 16, 2)):
        hashes = hashes_with(("img", offset, length))
        assert hashes[:first] == plain_hashes[:first]
        assert not set(hashes[first:]) & set(plain_hashes[first:])


@pytest.mark.parametrize(("offset", "length"), [(0, 16), (14, 4), (10, 40)])
def test_items_differ_by_identity_place_and_length(offset: int, length: int) -> None:
    variants = [
        hashes_with((name, offset + shift, length + more))[-1]
        for name in ("a", "b")
        for shift in (0, 1)
        for more in (0, 1)
    ]
    assert len(set(variants)) == len(variants)


def test_two_images_swapped_differ_and_their_order_in_the_argument_does_not() -> None:
    a, b = ("a", 3, 4), ("b", 9, 4)
    assert hashes_with(a, b) == hashes_with(b, a)
    assert hashes_with(a, b)[0] != hashes_with(("b", 3, 4), ("a", 9, 4))[0]
    assert hashes_with(a, a)[0] != hashes_with(a)[0]
    assert hashes_with(("a", 3)) == hashes_with(MultimodalItem("a", 3)) == hashes_with(["a", 3, 1])
    assert hashes_with(("a", np.int64(3), np.int32(4))) == hashes_with(a)


def test_an_item_spanning_chunks_keeps_counting_and_ends() -> None:
    """Its content already is in the chain; but the middle chunks must show it too, in any overlap of items."""
    items = [("long", 2, 50), ("short", 5, 3), ("late", 40, 20)]
    assert hashes_with(*items) == ref_hashes([9] * 64, 16, False, items)
    assert hashes_with(("a", 0, 16))[1] != hashes_with(("a", 0, 17))[1]


def test_items_at_the_end_of_the_prompt() -> None:
    cut = hashes_with(("img", 30, 10), count=32)  # it goes on behind the prompt: the same as in the longer one
    assert cut == hashes_with(("img", 30, 10))[:2]
    for offset in (64, 65, 10**9):
        with pytest.raises(ConfigError, match="behind the prompt of 64 tokens"):
            hashes_with(("img", offset, 1))
    # In a tail that is not hashed it is not behind the prompt.
    assert hashes_with(("img", 65, 1), count=70) == hashes_with(count=70)


def test_many_items_cost_linear_time() -> None:
    """A video has thousands of frames: each chunk looks at the items around it, not at all of them."""
    window = _Window([MultimodalItem(f"frame-{i}", i * 32, 16) for i in range(2_000)])
    for start in range(0, 64_000, 16):
        assert len(window.overlapping(start, start + 16)) == (start % 32 == 0)
        assert len(window._open) <= 1


# --- Key, opaque keys ------------------------------------------------------------------------------------------------


def test_key_is_32_bytes_and_nothing_else() -> None:
    key = Key(bytes(range(32)))
    assert key == bytes(range(32))
    assert hash(key) == hash(bytes(range(32)))
    assert Key.from_hex(key.hex()) == key
    assert key.hex() in repr(key)
    assert copy.deepcopy(key) == key
    assert type(copy.copy(key)) is Key
    assert Key(memoryview(key)) == Key(bytearray(key)) == key  # type: ignore[arg-type]
    for bad in (b"", bytes(31), bytes(33), 32, "a" * 32, None, [1] * 32):
        with pytest.raises(ConfigError):
            Key(bad)  # type: ignore[arg-type]
    for text in ("", "0" * 63, "0" * 66, "g" * 64, " ".join(["00"] * 32), "00 " + "0" * 61, "é" * 64, None, b"0" * 64):
        with pytest.raises(ConfigError):
            Key.from_hex(text)  # type: ignore[arg-type]


def test_opaque_keys_are_injective() -> None:
    names: list[str | bytes] = ["a", "b", "ab", b"a", "a\0", "ä", "a\u0308", "\ud800", "default"]
    keys = {opaque_key(name, namespace=ns) for name in names for ns in ("default", "a", "b")}
    assert len(keys) == 27
    assert not keys & set(KEYS)
    for bad in ("", b"", None, 5, ["a"]):
        with pytest.raises(ConfigError):
            opaque_key(bad)  # type: ignore[arg-type]
    for bad in ("", None, 5, b"ns"):
        with pytest.raises(ConfigError, match="namespace"):
            opaque_key("a", namespace=bad)  # type: ignore[arg-type]
