"""The planner: pure functions from sizes and limits to jobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.backend import Capability, Limits
from kvstore.plan import cut, group, runs

sizes_lists = st.lists(st.integers(0, 10_000), max_size=200)


@given(sizes_lists, st.integers(1, 30_000))
def test_runs_cover_everything_once_in_order(sizes: list[int], target: int) -> None:
    at = 0
    for begin, count, nbytes in runs(sizes, target):
        assert begin == at
        assert count >= 1
        assert nbytes == sum(sizes[begin : begin + count])
        assert nbytes <= target or sum(1 for size in sizes[begin : begin + count] if size) == 1
        at += count
    assert at == len(sizes)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=100), st.integers(0, 50), st.integers(1, 30_000))
def test_pieces_cover_the_segments_and_the_first_brings_the_header(sizes: list[int], first: int, target: int) -> None:
    pieces = cut(7, sizes, first, target)
    assert [piece.head for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert sum(piece.num for piece in pieces) == len(sizes)
    assert sum(piece.nbytes for piece in pieces) == sum(sizes)
    at = first
    for piece in pieces:
        assert piece.item == 7
        assert piece.first == at
        at += piece.num


@given(
    st.lists(st.integers(0, 10_000), max_size=700),
    st.integers(1, 64),
    st.integers(1, 100_000),
    st.sampled_from([Capability.NONE, Capability.NATIVE_BATCH]),
)
def test_jobs_cover_everything_once_in_order(
    sizes: list[int], lanes: int, preferred: int, capabilities: Capability
) -> None:
    jobs = group(sizes, limits=Limits(lanes=lanes, preferred_io_bytes=preferred), capabilities=capabilities)
    at = 0
    for begin, end in jobs:
        assert begin == at
        assert end > begin
        assert end - begin == 1 or sum(sizes[begin:end]) <= preferred
        at = end
    assert at == len(sizes)


def test_few_small_items_are_one_job_where_a_batch_is_cheap_and_spread_where_not() -> None:
    limits = Limits(lanes=4, preferred_io_bytes=4 << 20)
    assert group([100] * 64, limits=limits, capabilities=Capability.NATIVE_BATCH) == [(0, 64)]
    spread = group([100] * 64, limits=limits, capabilities=Capability.NONE)
    assert spread == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_a_hop_is_not_paid_for_a_handful_of_small_items() -> None:
    assert group([100] * 8, limits=Limits(lanes=4), capabilities=Capability.NONE) == [(0, 8)]


def test_large_records_are_cut_so_that_lanes_share_them() -> None:
    pieces = cut(0, [1 << 20] * 16, 0, 4 << 20)
    assert [(piece.first, piece.num) for piece in pieces] == [(0, 4), (4, 4), (8, 4), (12, 4)]
