"""How bodies are cut into messages: pure functions, no UCX needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_transport._ucx_pieces import (
    DIRECT_BYTES,
    PIECE_BYTES,
    SLOT_BYTES,
    Walk,
    cut,
    pack_offer,
    pack_table,
    runs_of,
    unpack_offer,
    unpack_table,
)
from kvstore_transport.errors import ProtocolError

KIB, MIB = 1 << 10, 1 << 20
BODY = memoryview(random.Random(1).randbytes(40 * MIB))


def views_of(lengths: list[int]) -> list[memoryview]:
    views, at = [], 0
    for length in lengths:
        views.append(BODY[at : at + length])
        at += length
    return views


def lengths_of(total: int) -> st.SearchStrategy[list[int]]:
    """Cuts of a body, some of them empty, of sizes on both sides of the threshold."""
    sizes = st.sampled_from([0, 1, 7, 4 * KIB, 100 * KIB, DIRECT_BYTES - 1, DIRECT_BYTES, MIB, 5 * MIB, 17 * MIB])

    def fill(parts: list[int]) -> list[int]:
        kept, left = [], total
        for part in parts:
            kept.append(min(part, left))
            left -= kept[-1]
        return [*kept, left]

    return st.lists(sizes, max_size=30).map(fill)


@given(st.integers(1, 40 * MIB).flatmap(lambda total: st.tuples(lengths_of(total), lengths_of(total))), st.booleans())
def test_both_sides_walk_to_the_same_bytes(lengths: tuple[list[int], list[int]], stage_all: bool) -> None:
    total = sum(lengths[0])
    sent, received = (views_of(each) for each in lengths)
    theirs, mine = runs_of(sent), runs_of(received, stage_all=stage_all)
    offer = unpack_offer(pack_offer(theirs), total)
    table = unpack_table(pack_table(cut(offer, mine)), total)
    assert max(table) <= PIECE_BYTES
    walks = Walk(theirs), Walk(mine, stage_all=stage_all)
    at = 0
    for nbytes in table:
        for walk in walks:
            piece = walk.take(nbytes)
            assert piece.nbytes == nbytes
            assert b"".join(cast("Sequence[memoryview]", piece.parts)) == BODY[at : at + nbytes]
            assert piece.staged or len(piece.parts) == 1
            assert not piece.staged or nbytes <= SLOT_BYTES
            if len(piece.parts) > 1:
                assert max(map(len, piece.parts)) < DIRECT_BYTES or stage_all
        assert walks[1] is not walk or piece.staged or not stage_all
        at += nbytes
    assert at == total


def test_small_neighbours_become_few_messages() -> None:
    views = views_of([16 * KIB] * 1024)
    runs = runs_of(views)
    assert [(run.nbytes, run.scattered) for run in runs] == [(16 * MIB, True)]
    assert cut(unpack_offer(pack_offer(runs), 16 * MIB), runs) == [SLOT_BYTES] * 4


def test_large_views_travel_in_place() -> None:
    runs = runs_of(views_of([MIB, 20 * MIB, DIRECT_BYTES]))
    assert [run.scattered for run in runs] == [False] * 3
    table = cut(unpack_offer(pack_offer(runs), 21 * MIB + DIRECT_BYTES), runs)
    assert table == [MIB, 16 * MIB, 4 * MIB, DIRECT_BYTES]
    walk = Walk(runs)
    assert not any(walk.take(nbytes).staged for nbytes in table)


def test_a_lone_small_view_needs_no_slot() -> None:
    (run,) = runs_of(views_of([10 * KIB]))
    assert not run.scattered
    assert runs_of(views_of([10 * KIB]), stage_all=True)[0].scattered


def test_views_of_other_bytes_are_taken_as_plain_ones() -> None:
    odd: Any = memoryview(b"abc").cast("c")
    (run,) = runs_of([odd])
    (part,) = run.parts
    assert isinstance(part, memoryview)
    assert (bytes(part), part.format) == (b"abc", "B")


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", b"\0" * 8, pack_table([1]), (18).to_bytes(8, "little"), (22).to_bytes(8, "little") * 2],
)
def test_an_offer_that_does_not_add_up_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_offer(data, 10)


@pytest.mark.parametrize("table", [[], [9], [11], [10, 0], [5, 5, 5], [PIECE_BYTES + 1]])
def test_a_table_that_does_not_add_up_is_refused(table: list[int]) -> None:
    with pytest.raises(ProtocolError):
        unpack_table(pack_table(table), 10 if table != [PIECE_BYTES + 1] else PIECE_BYTES + 1)


def test_half_a_number_is_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_table(b"123", 3)


def test_too_many_pieces_are_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_table(pack_table([1] * 65537), 65537)


def test_a_piece_across_two_runs_is_refused() -> None:
    walk = Walk(runs_of(views_of([MIB, MIB])))
    walk.take(MIB - 1)
    with pytest.raises(ProtocolError):
        walk.take(2)


def test_a_piece_of_many_parts_must_fit_into_a_slot() -> None:
    walk = Walk(runs_of(views_of([100 * KIB] * 50)))
    with pytest.raises(ProtocolError):
        walk.take(SLOT_BYTES + 1)


def test_a_walk_ends() -> None:
    walk = Walk(runs_of(views_of([10])))
    walk.take(10)
    with pytest.raises(ProtocolError):
        walk.take(1)
    with pytest.raises(ProtocolError):
        Walk([]).take(1)
