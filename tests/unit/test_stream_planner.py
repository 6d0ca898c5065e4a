"""The planner: against brute force on small instances, and what must hold of every plan."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.stream.estimates import PrefillModel
from kvstore.stream.planner import plan
from kvstore.stream.terms import COMPUTED, Group, Plan, Policy, Speeds, Standing, Step

TOKENS = 100
PLAIN = Policy(safety=1.0)


def row(count: int, sizes: tuple[int, ...], *, lossless: bool = False) -> list[Group]:
    return [Group(n * TOKENS, TOKENS, sizes, lossless) for n in range(count)]


def fresh(count: int) -> list[Standing]:
    return [Standing() for _ in range(count)]


def finish(groups: list[Group], levels: tuple[int, ...], speeds: Speeds) -> float:
    """An independent model of what a choice takes: loads in the order that suits the computations best."""
    assert speeds.prefill is not None
    computed = [i for i, level in enumerate(levels) if level == COMPUTED]
    needed = [i for i in range(len(groups)) if levels[i] != COMPUTED]
    now, at = 0.0, {}
    for index in needed:  # in order: what a computation waits for comes first
        now += groups[index].sizes[levels[index]] / speeds.bytes_per_s if speeds.bytes_per_s else math.inf
        at[index] = now
    clock = 0.0
    for index in computed:
        clock = max([clock, *(when for before, when in at.items() if before < index)])
        clock += speeds.prefill.seconds(groups[index].begin, groups[index].tokens)
    return max([clock, *at.values()])


def rank(groups: list[Group], levels: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(groups[0].finest + 1 if level == COMPUTED else level for level in levels))


def coarsest(quality: tuple[int, ...]) -> tuple[int, int]:
    """The worst level and how few have it: greater is better."""
    return quality[0], -quality.count(quality[0])


def choices(count: int, levels: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product([COMPUTED, *range(levels)], repeat=count)


instances = st.tuples(
    st.integers(1, 4),
    st.lists(st.integers(1, 60), min_size=1, max_size=3).map(lambda parts: tuple(itertools.accumulate(parts))),
    st.floats(0.5, 60),  # bytes per second
    st.floats(0.001, 0.05),  # seconds per token
    st.floats(0, 2e-4),
)


@given(instances, st.floats(0, 20))
@settings(max_examples=150, deadline=None)
def test_no_choice_is_better(instance: tuple[int, tuple[int, ...], float, float, float], slo: float) -> None:
    count, sizes, rate, a, b = instance
    groups = row(count, sizes)
    speeds = Speeds(rate, prefill=PrefillModel(a, b))
    found = plan(groups, fresh(count), speeds, remaining_s=slo, policy=PLAIN)
    every = {levels: finish(groups, levels, speeds) for levels in choices(count, len(sizes))}
    fitting = [levels for levels, seconds in every.items() if seconds <= slo]
    assert found.seconds == pytest.approx(every[found.levels], rel=1e-9)  # it knows what it takes
    if not fitting and min(every.values()) > slo * (1 + 1e-9):
        assert not found.meets
        assert found.seconds == pytest.approx(min(every.values()), rel=1e-9)
        return
    assert found.meets
    assert found.seconds <= slo * (1 + 1e-9)
    best = max(coarsest(rank(groups, levels)) for levels in fitting)
    assert coarsest(found.quality) == best
    assert found.quality == rank(groups, found.levels)


@given(instances)
@settings(max_examples=100, deadline=None)
def test_without_an_slo_nothing_is_faster(instance: tuple[int, tuple[int, ...], float, float, float]) -> None:
    count, sizes, rate, a, b = instance
    groups = row(count, sizes)
    speeds = Speeds(rate, prefill=PrefillModel(a, b))
    found = plan(groups, fresh(count), speeds, policy=PLAIN)
    top = len(sizes) - 1
    fastest = min(finish(groups, levels, speeds) for levels in itertools.product([COMPUTED, top], repeat=count))
    assert found.meets
    assert found.seconds == pytest.approx(fastest, rel=1e-9)
    assert set(found.levels) <= {COMPUTED, top}


@given(instances, st.floats(0.1, 20))
@settings(max_examples=100, deadline=None)
def test_text_only_where_it_saves_time(instance: tuple[int, tuple[int, ...], float, float, float], slo: float) -> None:
    """`text="time"`: the finest level is as good as computing, and the faster way to have it is taken."""
    count, sizes, rate, a, b = instance
    groups = row(count, sizes)
    speeds = Speeds(rate, prefill=PrefillModel(a, b))
    found = plan(groups, fresh(count), speeds, remaining_s=slo, policy=Policy(safety=1.0, text="time"))
    top = len(sizes) - 1
    fastest = min(finish(groups, levels, speeds) for levels in itertools.product([COMPUTED, top], repeat=count))
    if fastest <= slo * (1 - 1e-9):
        assert set(found.levels) <= {COMPUTED, top}
        assert found.seconds == pytest.approx(fastest, rel=1e-9)


speeds_of = st.builds(
    Speeds,
    st.none() | st.just(0.0) | st.floats(1e-3, 1e12) | st.just(math.inf),
    st.floats(0, 2),
    st.lists(st.floats(0, 0.1), max_size=3),
    st.none() | st.builds(PrefillModel, st.floats(1e-6, 1), st.floats(0, 1e-3), st.floats(0, 1)),
)
standings = st.builds(
    Standing,
    level=st.integers(-1, 2),
    computed=st.booleans(),
    loadable=st.booleans(),
    target=st.none() | st.integers(0, 2),
    left=st.integers(0, 1000),
)
policies = st.builds(
    Policy,
    text=st.sampled_from(("quality", "time", "never")),
    pointers=st.booleans(),
    commit=st.floats(0.01, 1),
    safety=st.floats(0.01, 1),
    min_level=st.integers(0, 1),
    max_level=st.none() | st.integers(1, 3),
)
remaining = st.floats(-10, 100) | st.just(math.inf) | st.just(0.0)


@given(st.lists(standings, max_size=6), speeds_of, remaining, policies, st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_every_plan_is_sound(
    states: list[Standing], speeds: Speeds, slo: float, policy: Policy, new_tokens: int
) -> None:
    for state in states:
        if state.target is not None and (state.target <= state.level or state.computed):
            state.target = None
    groups = row(len(states), (10, 30, 100))
    found = plan(groups, states, speeds, remaining_s=slo, new_tokens=new_tokens, policy=policy)
    assert not math.isnan(found.seconds)
    assert found.seconds >= 0
    assert not found.meets or found.seconds <= slo * (1 + 1e-9)
    assert len(found.levels) == len(groups)
    assert list(found.compute) == sorted(set(found.compute))
    reached = [max(s.level, -1 if s.target is None else s.target) for s in states]
    for step in found.load:
        assert not states[step.group].computed
        assert states[step.group].loadable
        assert step.level > reached[step.group]  # each brings something that is not there or on its way
        reached[step.group] = step.level
    for index, (state, level) in enumerate(zip(states, found.levels, strict=True)):
        if index in found.compute or state.computed:
            assert level == COMPUTED
            assert speeds.prefill is not None or state.computed
            assert not state.there or state.computed  # what is there is not computed again
        elif level >= 0:
            assert reached[index] == level
            assert policy.max_level is None or level <= max(policy.max_level, state.level, state.target or 0)
    if speeds.prefill is not None:
        assert -1 not in found.levels  # nothing is left out: what cannot be loaded is computed
    else:
        hole = next((i for i, s in enumerate(states) if not s.there and not s.loadable), len(states))
        assert all(level >= 0 or s.computed for level, s in zip(found.levels[:hole], states[:hole], strict=True))
        assert all(step.group < hole for step in found.load)


@given(instances, st.floats(0.1, 20), st.floats(1.0, 8.0), st.sampled_from(("quality", "time")))
@settings(max_examples=150, deadline=None)
def test_more_bandwidth_or_more_time_is_never_worse(
    instance: tuple[int, tuple[int, ...], float, float, float], slo: float, factor: float, text: str
) -> None:
    count, sizes, rate, a, b = instance
    groups, policy = row(count, sizes), Policy(text=text)

    def at(rate: float, slo: float) -> Plan:
        return plan(groups, fresh(count), Speeds(rate, prefill=PrefillModel(a, b)), remaining_s=slo, policy=policy)

    def worth(found: Plan, slo: float) -> tuple[bool, tuple[int, int]]:
        top = len(sizes) - 1  # for "time" the finest level is as good as text
        quality = tuple(min(top, each) for each in found.quality) if text == "time" else found.quality
        return (found.meets, coarsest(quality)) if found.meets else (False, (0, 0))

    base = at(rate, slo)
    assert worth(at(rate * factor, slo), slo) >= worth(base, slo)
    assert worth(at(rate, slo * factor), slo) >= worth(base, slo)
    if not base.meets:
        assert at(rate * factor, slo).seconds <= base.seconds * (1 + 1e-9) or at(rate * factor, slo).meets


def test_all_as_text_if_that_fits() -> None:
    groups = row(3, (10, 20))
    speeds = Speeds(1e9, prefill=PrefillModel(0.01))  # loading would take no time
    assert plan(groups, fresh(3), speeds, remaining_s=4).levels == (COMPUTED,) * 3
    assert plan(groups, fresh(3), speeds, remaining_s=4).load == ()
    assert plan(groups, fresh(3), speeds, remaining_s=4, policy=Policy(text="time")).levels == (1,) * 3
    assert plan(groups, fresh(3), speeds, remaining_s=4, policy=Policy(text="never")).levels == (1,) * 3
    exact = row(3, (10, 20), lossless=True)
    assert plan(exact, fresh(3), speeds, remaining_s=4).levels == (1,) * 3  # as good, and faster


def test_front_and_back_meet() -> None:
    groups = row(4, (100,))
    speeds = Speeds(100, prefill=PrefillModel(0.01))  # a second for a group, either way
    found = plan(groups, fresh(4), speeds, policy=PLAIN)
    assert found.levels == (COMPUTED, COMPUTED, 0, 0)
    assert found.compute == (0, 1)
    assert found.load == (Step(3, 0), Step(2, 0))
    assert found.seconds == pytest.approx(2)
    one_way = plan(groups, fresh(4), speeds, policy=Policy(safety=1.0, pointers=False))
    assert one_way.seconds == pytest.approx(4)


def test_what_is_left_of_the_slo_refines_some() -> None:
    groups = row(4, (100, 200))
    speeds = Speeds(100)
    found = plan(groups, fresh(4), speeds, remaining_s=6.5, policy=PLAIN)
    assert sorted(found.levels) == [0, 0, 1, 1]
    assert found.meets
    assert found.seconds == pytest.approx(6)


def test_all_are_there_before_any_is_refined_on_a_link_that_is_not_trusted() -> None:
    groups = row(4, (100, 200))
    steps = plan(groups, fresh(4), Speeds(100), remaining_s=8, policy=PLAIN).load
    assert [step.level for step in steps] == [0] * 4 + [1] * 4
    steps = plan(groups, fresh(4), Speeds(100), remaining_s=8, policy=Policy(safety=1.0, commit=1.0)).load
    assert [step.level for step in steps] == [1] * 4
    steps = plan(groups, fresh(4), Speeds(100), remaining_s=16, policy=Policy(safety=1.0, commit=0.5)).load
    assert [step.level for step in steps] == [1] * 4  # at half its speed they still come in time


def test_an_unknown_link_gets_the_coarsest_level_first_or_the_medium_one_if_trusted() -> None:
    groups = row(3, (10, 20, 30))
    speeds = Speeds(None, prefill=PrefillModel(1.0))
    found = plan(groups, fresh(3), speeds, remaining_s=1)
    assert found.load[0] == Step(2, 0)
    assert found.seconds == math.inf
    assert plan(groups, fresh(3), speeds, remaining_s=1, policy=Policy(commit=1.0)).load[0] == Step(2, 1)
    quick = Speeds(None, prefill=PrefillModel(1e-4))
    assert plan(groups, fresh(3), quick, remaining_s=1).levels == (COMPUTED,) * 3
    assert plan(groups, fresh(3), speeds).load[0] == Step(2, 2)  # without an SLO there is no reason for a coarse one


def test_a_link_that_is_down_leaves_the_text() -> None:
    groups = row(3, (10, 20))
    found = plan(groups, fresh(3), Speeds(0.0, prefill=PrefillModel(0.01)), remaining_s=0.5, policy=PLAIN)
    assert not found.meets
    assert found.levels == (COMPUTED,) * 3
    assert found.seconds == pytest.approx(3)
    nothing = plan(groups, fresh(3), Speeds(0.0), remaining_s=0.5)
    assert (nothing.meets, nothing.seconds) == (False, math.inf)
    assert [step.group for step in nothing.load] == [0, 1, 2]  # nothing else can be tried


def test_a_hole_is_computed_and_what_lies_before_it_comes_first() -> None:
    groups = row(4, (100,))
    states = fresh(4)
    states[2].loadable = False
    found = plan(groups, states, Speeds(100, prefill=PrefillModel(0.02)), policy=PLAIN)
    assert found.levels == (0, 0, COMPUTED, 0)
    assert [step.group for step in found.load] == [1, 0, 3]
    assert found.seconds == pytest.approx(4)  # two loads, then it is computed while the last one comes
    without = plan(groups, states, Speeds(100), policy=PLAIN)
    assert without.levels == (0, 0, -1, -1)  # what lies behind it is of no use then


def test_what_is_there_is_refined_and_what_is_on_its_way_is_waited_for() -> None:
    groups = row(3, (100, 200))
    states = [Standing(level=0), Standing(target=0, left=50), Standing()]
    found = plan(groups, states, Speeds(100), remaining_s=2.5, policy=PLAIN)
    assert found.load[0] == Step(2, 0)
    assert sorted(found.levels) == [0, 0, 1]
    assert found.seconds == pytest.approx(2.5)


def test_a_stalled_transfer_is_given_up_for_text() -> None:
    groups = row(2, (100,))
    states = [Standing(target=0, left=100), Standing(level=0)]
    found = plan(groups, states, Speeds(1, prefill=PrefillModel(0.01)), remaining_s=5, policy=PLAIN)
    assert found.compute == found.abandon == (0,)
    assert found.seconds == pytest.approx(1)


def test_decoding_counts() -> None:
    groups = row(2, (100,))
    speeds = Speeds(100, decode_s_per_token=(0.02,))  # two seconds a group, and one for its bytes
    assert plan(groups, fresh(2), speeds, policy=PLAIN).seconds == pytest.approx(5)
    quick = Speeds(100, decode_s_per_token=(0.005,))
    assert plan(groups, fresh(2), quick, policy=PLAIN).seconds == pytest.approx(2.5)


def test_new_tokens_are_paid_for() -> None:
    groups = row(1, (100,))
    speeds = Speeds(100, prefill=PrefillModel(0.05))
    assert plan(groups, fresh(1), speeds, new_tokens=20, policy=PLAIN).seconds == pytest.approx(2)
    assert not plan(groups, fresh(1), speeds, new_tokens=20, remaining_s=1.9, policy=PLAIN).meets
    assert plan([], [], speeds, new_tokens=20, remaining_s=2, policy=PLAIN).seconds == pytest.approx(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Group(0, 0, (1,)),
        lambda: Group(0, 1, ()),
        lambda: Group(0, 1, (2, 1)),
        lambda: Policy(text="maybe"),
        lambda: Policy(commit=0),
        lambda: Policy(safety=1.5),
        lambda: Policy(min_level=2, max_level=1),
        lambda: plan(row(2, (1,)), fresh(1), Speeds(1)),
        lambda: plan([Group(0, 1, (1,)), Group(5, 1, (1,))], fresh(2), Speeds(1)),
        lambda: plan(row(1, (1,)), fresh(1), Speeds(1), remaining_s=math.nan),
        lambda: plan(row(1, (1,)), fresh(1), Speeds(math.nan)),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
