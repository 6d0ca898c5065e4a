"""The meta bytes of requests and replies of nodes: what is packed in a few calls, next to the plain way."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import Key
from kvstore_backends._memory_reservation import span, spans
from kvstore_backends.node.protocol import (
    MAX_ITEMS,
    Code,
    ListPage,
    Malformed,
    pack_get,
    pack_keys,
    pack_list,
    pack_outcomes,
    pack_page,
    pack_put,
    unpack_get,
    unpack_keys,
    unpack_list,
    unpack_outcomes,
    unpack_page,
    unpack_put,
)

_KEYS = st.binary(min_size=32, max_size=32).map(Key)
_U64 = st.integers(0, (1 << 64) - 1)
_MANY = st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200])


def keys_of(count: int) -> list[Key]:
    return [Key(bytes([n % 256, n // 256]) + bytes(30)) for n in range(count)]


def u64s(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


@given(st.lists(st.tuples(_KEYS, _U64, _U64), max_size=80))
@settings(max_examples=50)
def test_a_get_is_what_the_format_says(items: list[tuple[Key, int, int]]) -> None:
    keys, offsets, lengths = ([item[at] for item in items] for at in range(3))
    meta = pack_get(keys, offsets, lengths)  # type: ignore[arg-type]
    plain = len(items).to_bytes(4, "little") + b"".join(keys)  # type: ignore[arg-type]
    assert meta == plain + u64s(offsets) + u64s(lengths)  # type: ignore[arg-type]
    assert unpack_get(meta) == (keys, offsets, lengths)


@given(_MANY)
def test_keys_are_keys_however_many(count: int) -> None:
    keys = keys_of(count)
    found = unpack_keys(pack_keys(keys))
    assert found == keys
    assert {type(key) for key in found} <= {Key}
    assert unpack_get(pack_get(keys, [0] * count, [9] * count)).keys == keys


@given(st.lists(st.tuples(_KEYS, _U64, st.none() | _KEYS), max_size=80))
@settings(max_examples=50)
def test_a_put_comes_back(items: list[tuple[Key, int, Key | None]]) -> None:
    keys, sizes, parents = ([item[at] for item in items] for at in range(3))
    found = unpack_put(pack_put(keys, sizes, parents))  # type: ignore[arg-type]
    assert found == (keys, sizes, parents)


@given(st.lists(st.tuples(st.sampled_from(Code), _U64), max_size=80), st.booleans())
@settings(max_examples=50)
def test_outcomes_are_what_the_format_says(items: list[tuple[Code, int]], noted: bool) -> None:
    codes, sizes = [code for code, _ in items], [size for _, size in items]
    notes = [(at, f"why {at}") for at, code in enumerate(codes) if code is Code.FAILED and noted]
    meta = pack_outcomes(codes, sizes, notes)
    assert meta.startswith(len(items).to_bytes(4, "little") + bytes(codes) + u64s(sizes))
    found, their_sizes, their_notes = unpack_outcomes(meta)
    assert all(mine is theirs for mine, theirs in zip(codes, found, strict=True)), "looked for by identity"
    assert (their_sizes, their_notes) == (sizes, dict(notes))


def test_pages_come_back() -> None:
    page = ListPage(7, keys_of(70), [*range(70)], [at / 3 for at in range(70)])
    assert unpack_page(pack_page(page)) == page
    assert unpack_list(pack_list(3, 9)) == (3, 9)


def test_what_is_cut_or_too_long_is_malformed() -> None:
    keys = keys_of(3)
    for meta, unpack in (
        (pack_get(keys, [0] * 3, [1] * 3), unpack_get),
        (pack_outcomes([0, 1, 0], [5, 0, 6]), unpack_outcomes),
        (pack_outcomes([6], [0], [(0, "why")]), unpack_outcomes),
        (pack_put(keys, [1] * 3, [None, keys[0], None]), unpack_put),
        (pack_keys(keys), unpack_keys),
    ):
        unpack(meta)
        for wrong in (*(meta[:n] for n in range(len(meta))), meta + b"\0"):
            with pytest.raises(Malformed):
                unpack(wrong)


def test_what_makes_no_sense_is_malformed() -> None:
    for unpack in (unpack_get, unpack_outcomes, unpack_put, unpack_keys):
        with pytest.raises(Malformed, match="at most"):
            unpack(struct.pack("<I", MAX_ITEMS + 1) + bytes(64))
    unknown = bytearray(pack_outcomes([0], [0]))
    unknown[4] = len(Code)
    with pytest.raises(Malformed, match="unknown code"):
        unpack_outcomes(bytes(unknown))


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_number_that_does_not_fit_is_no_request(number: int) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        pack_get(keys_of(1), [number], [1])


@given(st.lists(st.integers(0, 1 << 40), max_size=50))
def test_what_a_batch_occupies_is_the_sum_of_its_records(sizes: list[int]) -> None:
    assert spans(sizes) == sum(map(span, sizes))
