"""What a plan is, in which groups it is loaded, and the formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.prefetch import Chunk, LayerPlan, layer_groups, pipeline_seconds, read_buffer_bytes
from kvstore.prefetch.speed import Speed
from kvstore.record import kv_spec
from tests.faults.support import SPEC, chain


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 1 << 22), min_size=1, max_size=40), st.integers(1, 1 << 24), st.integers(1, 1 << 24),
    st.integers(1, 1 << 22), st.integers(1, 8),
)  # fmt: skip
def test_groups_cover_all_layers_in_order_within_the_bounds(
    totals: list[int], preferred: int, most: int, first: int, chunks: int
) -> None:
    largest = [-(-total // chunks) for total in totals]
    groups = layer_groups(totals, largest, preferred=preferred, most=most, first=first)
    assert [layer for begin, count in groups for layer in range(begin, begin + count)] == list(range(len(totals)))
    target = first
    for begin, count in groups:
        size, piece = sum(totals[begin : begin + count]), sum(largest[begin : begin + count])
        if count > 1:
            assert size <= min(most, target)
            assert piece <= preferred
            assert count <= max(1, len(totals) // 10) or size <= first
        target *= 2


def test_the_first_group_is_small_and_later_ones_grow_and_shrink_again() -> None:
    layers, size = 80, 1 << 20
    groups = layer_groups([size] * layers, [size // 4] * layers, preferred=4 << 20, most=1 << 30, first=size)
    counts = [count for _, count in groups]
    assert counts[:4] == [1, 2, 4, 8]
    assert max(counts) == 8  # a tenth of the layers
    assert counts[-1] == 1
    capped = layer_groups([size] * layers, [size // 4] * layers, preferred=1 << 20, most=1 << 30, first=size)
    assert max(count for _, count in capped) == 4  # ranges of the preferred size


@given(st.integers(10, 100), st.floats(0.05, 20))
def test_groups_cost_little_of_the_overlap(layers: int, ratio: float) -> None:
    groups = layer_groups([1 << 20] * layers, [1 << 20] * layers, preferred=1 << 30, most=1 << 40, first=1 << 20)
    load, compute = ratio, 1.0
    grouped = pipeline_seconds([load * n for _, n in groups], [compute * n for _, n in groups])
    single = pipeline_seconds([load] * layers, [compute] * layers)
    assert grouped <= single * (1.15 + 1 / layers)


def test_the_pipeline_formula() -> None:
    assert pipeline_seconds([3.0], [5.0]) == 8.0
    assert pipeline_seconds([1, 2, 3], [10, 10, 10]) == 1 + 10 + 10 + 10
    assert pipeline_seconds([5, 5, 5], [1, 1, 1]) == 5 + 5 + 5 + 1
    assert pipeline_seconds([1, 4, 1], [2, 2, 7]) == 1 + 4 + 2 + 7
    for load, compute in (([], []), ([1.0], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ConfigError, match="no pipeline"):
            pipeline_seconds(load, compute)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_the_formula_is_what_a_simulated_pipeline_takes(stages: list[tuple[float, float]]) -> None:
    """One loader and one computer, at most one layer ahead: the formula, exactly."""
    load, compute = [t for t, _ in stages], [c for _, c in stages]
    begun = load[0]  # layer 0 is there, its computation begins, and so does the load of layer 1
    for layer in range(1, len(stages)):
        begun += max(compute[layer - 1], load[layer])
    assert pipeline_seconds(load, compute) == pytest.approx(begun + compute[-1])


def test_the_read_buffer_formula() -> None:
    # 1000 tokens at 1 ms to load and 100 at 4 ms to compute: 0.6 s short, at 2 GB/s.
    assert read_buffer_bytes(2e9, 1e-3, 1000, 4e-3, 100) == pytest.approx(1.2e9, abs=2)
    assert read_buffer_bytes(2e9, 1e-3, 1000, 4e-3, 250) == 0
    assert read_buffer_bytes(2e9, 1e-3, 1000, 4e-3, 1000) == 0


@given(st.floats(1e3, 1e11), st.floats(0, 1), st.integers(0, 10**6), st.floats(0, 1), st.integers(0, 10**6))
def test_loading_the_read_buffer_first_hides_the_rest(
    bandwidth: float, load: float, history: int, prefill: float, new: int
) -> None:
    buffer = read_buffer_bytes(bandwidth, load, history, prefill, new)
    assert buffer >= 0
    rest_s = load * history - buffer / bandwidth
    assert rest_s <= prefill * new + 1e-6 * (1 + load * history)
    if buffer:  # and no more than that
        assert rest_s >= prefill * new - 1 / bandwidth - 1e-6 * (1 + load * history)


def test_a_plan_that_makes_no_sense_is_named() -> None:
    keys = chain(2)
    with pytest.raises(ConfigError, match="at least one chunk"):
        LayerPlan([[], []])
    other = kv_spec(KVLayout(num_layers=4, num_kv_heads=2, head_dim=8), "bfloat16", 16)
    with pytest.raises(ConfigError, match=r"different numbers of layers: \[3, 4\]"):
        LayerPlan([[Chunk(keys[0], SPEC), Chunk(keys[1], other)]])
    with pytest.raises(ConfigError, match="deadline"):
        LayerPlan.of(keys, SPEC, deadline=math.nan)
    with pytest.raises(ConfigError, match="compute_s=-1"):
        LayerPlan.of(keys, SPEC, compute_s=-1)


def test_what_a_plan_knows() -> None:
    keys = chain(3)
    plan = LayerPlan.of(keys, SPEC)
    assert plan.num_layers == 3
    assert plan.layer_bytes(0) == 3 * SPEC.sizes[0]
    assert plan.name == LayerPlan.of(keys, SPEC, deadline=1.0, compute_s=2.0).name
    assert plan.name != LayerPlan.of(keys[:2], SPEC).name
    assert plan.name != LayerPlan([[Chunk(keys[0], SPEC)], [Chunk(k, SPEC) for k in keys[1:]]]).name


def test_what_fills_the_link_grows_with_its_latency() -> None:
    speed = Speed()
    speed.took(1.0, 500)  # without a speed it says nothing
    assert speed.window(0.1) == math.inf
    speed.begin(10.0)
    speed.end(11.0, 1000)
    assert speed.window(0.1) == math.inf
    speed.took(0.5, 500)  # its bytes alone
    assert speed.window(0.1) == pytest.approx(100)
    for _ in range(40):
        speed.took(1.0, 500)  # half a second besides: as much again comes in it, and twice that is allowed
    assert speed.window(0.1) == pytest.approx(1100, rel=0.01)
    for _ in range(40):
        speed.took(0.1, 500)  # faster than it was said to be: no latency, never a negative one
    assert speed.window(0.1) == pytest.approx(100, rel=0.01)


def test_speed_counts_overlapping_transfers_once_and_forgets() -> None:
    speed = Speed()
    assert speed.bytes_per_s is None
    speed.begin(10.0)
    speed.begin(10.5)
    speed.end(11.0, 500)
    speed.end(11.0, 500)
    assert speed.bytes_per_s == pytest.approx(1000, rel=0.2)
    for second in range(40):  # a minute of nothing between: only loading counts
        speed.begin(100.0 + 2 * second)
        speed.end(101.0 + 2 * second, 4000)
    assert speed.bytes_per_s == pytest.approx(4000, rel=0.3)
