"""The planner's rule for chunks out of place: against brute force over grids, and by enumeration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.prefetch import pipeline_seconds
from kvstore.stream import (
    COMPUTED,
    Group,
    Plan,
    Policy,
    PrefillModel,
    Speeds,
    Standing,
    TierOffer,
    blend_ratio,
    cheapest_tier,
    plan,
)

LAYERS = 24
STEP = 0.01
RULE = Policy(text="time", pointers=False, safety=1.0)
POINTERS = Policy(text="time", safety=1.0)
BANDWIDTHS = [10 ** (exponent / 8) for exponent in range(-8, 25)]


def brute_ratio(load_s: float, prefill_s: float, r_min: float) -> float:
    """The largest r of a grid with which no layer takes longer than it takes to load the next one, r_min otherwise;
    1 if computing everything is no slower than that."""
    grid = [n * STEP for n in range(round(1 / STEP) + 1)]
    load = [load_s / LAYERS] * LAYERS

    def seconds(r: float) -> float:
        """Of the pipeline, without its last layer, which nothing is loaded beside."""
        compute = [r * prefill_s / LAYERS] * LAYERS
        return pipeline_seconds(load, compute) - compute[-1]

    free = [r for r in grid if r >= r_min and seconds(r) <= seconds(r_min) * (1 + 1e-9)]
    best = max(free, default=r_min)
    return 1.0 if prefill_s <= load_s else best


@pytest.mark.parametrize("r_min", [0.0, 0.05, 0.15, 0.5])
def test_the_ratio_over_a_sweep_of_bandwidths(r_min: float) -> None:
    nbytes, prefill_s = 40.0, 3.0
    seen = set()
    for bandwidth in BANDWIDTHS:
        found = blend_ratio(nbytes / bandwidth, prefill_s, r_min)
        assert found == pytest.approx(brute_ratio(nbytes / bandwidth, prefill_s, r_min), abs=STEP + 1e-9)
        seen.add(round(found, 2))
    assert 1.0 in seen
    assert len(seen) > 3, "the sweep shows more than the ends"


@pytest.mark.parametrize("r_min", [0.0, 0.05, 0.15, 0.5])
def test_the_planner_says_the_same(r_min: float) -> None:
    """Six chunks; CacheBlend's rule."""
    prefill = PrefillModel(0.005)
    groups = [Group(100 * n, 100, (7,), True, r_min) for n in range(6)]
    for bandwidth in BANDWIDTHS:
        found = plan(groups, [Standing()] * 6, Speeds(bandwidth, prefill=prefill), policy=RULE)
        load_s = 42 / bandwidth
        expected = brute_ratio(load_s, 3.0, r_min)
        if COMPUTED in found.levels:
            assert found.levels == (COMPUTED,) * 6
            assert load_s >= 3.0 * (1 - 1e-9)
            assert found.seconds == pytest.approx(3.0)
        else:
            assert found.levels == (0,) * 6
            assert found.repair == pytest.approx(expected, abs=STEP + 1e-9)
            assert found.seconds == pytest.approx(max(load_s, r_min * 3.0))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 30),  # bytes
            st.sampled_from([None, 0.0, 0.1, 0.3, 1.0]),
            st.sampled_from(["stored", "stored", "missing"]),
        ),
        min_size=1, max_size=6,
    ),
    st.floats(0.5, 200),
    st.floats(0.001, 0.05),
    st.floats(0, 1e-4),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_split_is_faster(chunks: list[tuple[int, float | None, str]], rate: float, a: float, b: float) -> None:
    """With the two pointers: of all numbers of chunks computed from the front, none is ready sooner."""
    prefill = PrefillModel(a, b)
    groups = [Group(50 * n, 50, (size,), True, repair) for n, (size, repair, _) in enumerate(chunks)]
    standing = [Standing(loadable=kind == "stored") for _, _, kind in chunks]
    found = plan(groups, standing, Speeds(rate, prefill=prefill), policy=POINTERS)
    costs = [prefill.seconds(group.begin, group.tokens) for group in groups]
    loadable = [n for n, state in enumerate(standing) if state.loadable]
    if all(groups[n].repair is None for n in loadable):
        return  # nothing out of place: `test_stream_planner` has these

    def seconds(computed: frozenset[int]) -> float:
        busy = sum(cost if n in computed else (groups[n].repair or 0.0) * cost for n, cost in enumerate(costs))
        return max(busy, sum(groups[n].sizes[0] for n in range(len(groups)) if n not in computed) / rate)

    forced = frozenset(range(len(groups))) - frozenset(loadable)
    every = [seconds(forced | frozenset(range(m))) for m in range(len(groups) + 1)]
    assert found.seconds == pytest.approx(min(every), rel=1e-9)
    chosen = frozenset(n for n, level in enumerate(found.levels) if level == COMPUTED)
    assert seconds(chosen) == pytest.approx(found.seconds, rel=1e-9)
    spread = [n for n in range(len(groups)) if n not in chosen and groups[n].repair is not None]
    if spread:  # what it says can be repaired is not ready later, and it is at least what must be
        whole = sum(costs[n] for n in spread)
        least = sum((groups[n].repair or 0.0) * costs[n] for n in spread)
        more = found.repair * whole + sum(costs[n] for n in chosen)
        assert found.repair * whole >= least * (1 - 1e-9)
        assert found.repair <= 1
        assert more <= max(found.seconds, least + sum(costs[n] for n in chosen)) * (1 + 1e-9)


def test_level_recompute_and_blend_are_chosen_in_one() -> None:
    """Under an SLO chunks with levels come as fine as they can, and repairing them has its share of the time."""
    prefill = PrefillModel(0.01)
    groups = [Group(100 * n, 100, (10, 30), False, 0.2) for n in range(4)]

    def at(slo: float, rate: float) -> Plan:
        policy = Policy(text="time", safety=1.0, pointers=False)
        return plan(groups, [Standing()] * 4, Speeds(rate, prefill=prefill), remaining_s=slo, policy=policy)

    assert at(1.5, 100).levels == (1, 1, 1, 1)
    coarse = at(1.5, 40)
    assert coarse.meets
    assert set(coarse.levels) == {0, 1}
    assert at(1.5, 20).levels == (0, 0, 0, 0)
    assert not at(1.5, 20).meets, "40 bytes take 2 s"
    assert not at(0.7, 1000).meets, "repairing alone takes 0.8 s"
    assert at(math.inf, 5).levels == (COMPUTED,) * 4


def test_what_nothing_can_repair_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill"):
        plan([Group(0, 8, (1,), True, 0.1)], [Standing()], Speeds(1.0))
    with pytest.raises(ConfigError, match="repair"):
        Group(0, 8, (1,), True, 1.1)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5), st.floats(0, 0.2)), max_size=6),
    st.floats(0, 1000), st.floats(0, 50), st.floats(0, 1),
)  # fmt: skip
def test_the_cheapest_tier_by_enumeration(
    offers: list[tuple[float, int, float]], nbytes: float, prefill_s: float, r_min: float
) -> None:
    tiers = [TierOffer(str(n), *offer) for n, offer in enumerate(offers)]
    found = cheapest_tier(tiers, nbytes, prefill_s, r_min)
    hiding = []
    for tier in tiers:
        load_s = tier.latency_s + (0 if not nbytes else math.inf if not tier.bytes_per_s else nbytes / tier.bytes_per_s)
        if load_s <= r_min * prefill_s:
            hiding.append(tier)
    if not hiding:
        assert found is None
        return
    assert found in hiding
    assert found.cost == min(tier.cost for tier in hiding)


def test_a_dearer_tier_where_the_cheap_one_cannot_hide() -> None:
    tiers = [TierOffer("s3", 1e9, 1.0, 0.02), TierOffer("nvme", 5e9, 4.0), TierOffer("memory", 5e10, 100.0)]
    names = [getattr(cheapest_tier(tiers, nbytes, 1.0, 0.15), "name", None) for nbytes in (1e8, 5e8, 5e9, 5e10)]
    assert names == ["s3", "nvme", "memory", None]


@pytest.mark.parametrize(
    "bad", [(-1.0, 1.0, 0.1), (math.nan, 1.0, 0.1), (1.0, -1.0, 0.1), (1.0, 1.0, 1.5), (1.0, 1.0, -0.1)]
)
def test_numbers_that_are_none(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError):
        blend_ratio(*bad)
