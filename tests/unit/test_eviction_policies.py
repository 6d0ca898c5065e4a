"""What holds for every policy whatever happens, against a plain model; and what each policy is for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.eviction import (
    POLICIES,
    EvictionPolicy,
    LearnedPolicy,
    LookAheadPolicy,
    RecordInfo,
    S3FIFOPolicy,
    SessionPolicy,
    TTLPolicy,
    ValuePolicy,
    eviction_window,
    make_policy,
    prefetch_window,
    prefill_seconds,
)
from kvstore.keys import Key

ORDERED = [name for name in POLICIES if name != "none"]


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admit_chain(
    policy: EvictionPolicy, keys: Sequence[Key], *, nbytes: int = 1, session: str | None = None, turns: int = 0,
    tokens: int = 16, ttl: float | None = None,
) -> None:  # fmt: skip
    parent = None
    for place, each in enumerate(keys):
        policy.admit(each, nbytes, parent=parent, info=RecordInfo(place * tokens, tokens, session, turns, ttl))
        parent = each


def evict(policy: EvictionPolicy, count: int = 10**9) -> list[Key]:
    gone = []
    for victim in policy.victims():
        assert policy.forget(victim) > 0
        gone.append(victim)
        if len(gone) == count:
            break
    return gone


# Whatever happens.

NAMES = [key(i) for i in range(10)]
names = st.sampled_from(NAMES)
infos = st.none() | st.builds(
    RecordInfo, start=st.integers(0, 3).map(lambda n: n * 16), tokens=st.integers(0, 16),
    session=st.none() | st.sampled_from("ab"), turns=st.integers(0, 3), ttl=st.none() | st.sampled_from([3.0, 20.0]),
)  # fmt: skip
admits = st.tuples(st.just("admit"), st.integers(0, 9), st.integers(1, 5), infos)
touches = st.tuples(st.just("touch"), st.lists(names, max_size=5))
forgets = st.tuples(st.just("forget"), names)
pins = st.tuples(st.sampled_from(["pin", "unpin"]), st.lists(names, max_size=3))
announces = st.tuples(st.just("announce"), st.lists(st.lists(names, max_size=4), max_size=3))
waits = st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 30.0]))
walks = st.tuples(st.just("walk"), st.sets(names, max_size=3), st.sets(names, max_size=2), st.integers(0, 12))
expiries = st.tuples(st.just("expire"), st.sets(names, max_size=2))
steps = st.lists(
    st.one_of(admits, admits, admits, touches, forgets, pins, announces, waits, walks, expiries), max_size=50
)
PARENTS = [None, 0, 1, 1, 3, None, 5, 6, 6, 20]  # a small forest; the last one's parent never comes


class Model:
    """Sizes, pins and the window; nothing of orders."""

    def __init__(self) -> None:
        self.sizes: dict[Key, int] = {}
        self.pins: dict[Key, int] = {}
        self.window: set[Key] = set()
        self.parents: dict[Key, Key] = {}

    def held(self, keep: set[Key], *, window: bool) -> set[Key]:
        """What must not be offered: what is kept, pinned or in the window, and what that hangs on."""
        found = {each for each in self.sizes if each in keep or each in self.pins or (window and each in self.window)}
        todo = list(found)
        while todo:
            above = self.parents.get(todo.pop())
            if above in self.sizes and above not in found:
                found.add(above)
                todo.append(above)
        return found

    def children(self, name: Key) -> set[Key]:
        return {each for each in self.sizes if self.parents.get(each) == name}

    def forget(self, name: Key) -> int:
        self.parents.pop(name, None)
        return self.sizes.pop(name, 0)


def walk(policy: EvictionPolicy, model: Model, offers: Any, stuck: set[Key], held: set[Key], limit: int) -> list[Key]:
    offered: list[Key] = []
    for victim in islice(offers, limit):
        assert victim in model.sizes
        assert victim not in offered, "offered twice"
        assert victim not in held
        assert model.children(victim) <= set(offered), "a parent before its children"
        offered.append(victim)
        if victim not in stuck:
            assert policy.forget(victim) == model.forget(victim)
    return offered


@pytest.mark.parametrize(
    ("name", "last"), [*((name, True) for name in ORDERED), ("default", False), ("lookahead", False)]
)
def test_any_history(name: str, last: bool) -> None:
    looks_ahead = name in ("default", "lookahead")

    @settings(max_examples=150, deadline=None)
    @given(steps)
    def check(script: list[tuple[Any, ...]]) -> None:
        clock, model = Clock(), Model()
        options: dict[str, Any] = {"last": last} if looks_ahead else {}
        policy = make_policy(name, clock=clock, **options)
        end: list[tuple[Any, ...]] = [("unpin", NAMES * 60), ("announce", []), ("walk", set(), set(), 99)]
        for step in [*script, *end]:
            match step:
                case ("admit", int(place), int(nbytes), info):
                    above = PARENTS[place]
                    policy.admit(NAMES[place], nbytes, parent=None if above is None else key(above), info=info)
                    model.sizes[NAMES[place]] = nbytes
                    if above is not None:
                        model.parents[NAMES[place]] = key(above)
                case ("touch", list(many)):
                    policy.touch(many)
                case ("forget", Key() as one):
                    assert policy.forget(one) == model.forget(one)
                case ("pin", list(many)):
                    policy.pin(many)
                    for each in many:
                        model.pins[each] = model.pins.get(each, 0) + 1
                case ("unpin", list(many)):
                    policy.unpin(many)
                    for each in many:
                        if each in model.pins:
                            model.pins[each] -= 1
                            if not model.pins[each]:
                                del model.pins[each]
                case ("announce", list(jobs)):
                    policy.announce(jobs)
                    model.window = {each for job in jobs for each in job} if looks_ahead else set()
                case ("wait", float(seconds)):
                    clock.now += seconds
                case ("walk", set(stuck), set(keep), int(limit)):
                    held = model.held(keep, window=last)
                    before = set(model.sizes)
                    gone = walk(policy, model, policy.victims(keep=keep), stuck, held, limit)
                    if len(gone) < limit:
                        assert set(gone) == before - held, "not all were offered"
                case ("expire", set(stuck)):
                    walk(policy, model, policy.expired(), stuck, model.held(set(), window=True), 99)
            assert policy.nbytes == sum(model.sizes.values())
            assert len(policy) == len(model.sizes)
            assert {each for each in NAMES if each in policy} == set(model.sizes)
            assert all(policy.size_of(each) == model.sizes.get(each, 0) for each in NAMES)
        assert not model.sizes

    check()


@pytest.mark.parametrize("name", ORDERED)
def test_a_chain_goes_tail_first_and_siblings_hold_their_head(name: str) -> None:
    clock = Clock()
    policy = make_policy(name, clock=clock)
    keys = [key(("chain", i)) for i in range(40)]
    admit_chain(policy, keys)
    policy.touch(keys)
    clock.now = 5.0
    policy.touch(keys[:7])
    policy.admit(key("sibling"), 1, parent=keys[0])
    gone = evict(policy)
    assert [each for each in gone if each != key("sibling")] == keys[::-1]
    assert gone.index(key("sibling")) < gone.index(keys[0])


@pytest.mark.parametrize("name", ORDERED)
def test_many_pins_do_not_slow_walks_down(name: str) -> None:
    policy = make_policy(name, clock=Clock())
    pinned = [Key(i.to_bytes(32, "big")) for i in range(2000)]
    for each in pinned:
        policy.admit(each, 1)
    policy.pin(pinned)
    seen = 0

    class Counted(set[Key]):
        def __contains__(self, item: object) -> bool:
            nonlocal seen
            seen += 1
            return False

    keep = Counted()
    for i in range(200):
        policy.admit(key(("x", i)), 1)
        assert evict_one(policy, keep) == key(("x", i))
    assert seen < 1000  # not 200 x 2000
    policy.unpin(pinned)
    assert set(policy.victims()) == set(pinned)


def evict_one(policy: EvictionPolicy, keep: set[Key]) -> Key:
    victim = next(policy.victims(keep=keep))
    policy.forget(victim)
    return victim


def test_pins_are_counted_and_outlive_the_record() -> None:
    policy = make_policy("lru")
    a, b = NAMES[:2]
    policy.pin([a])
    policy.pin([a])
    policy.admit(a, 1)
    policy.admit(b, 1)
    policy.unpin([a, b])
    assert list(policy.victims()) == [b]
    policy.forget(a)
    policy.admit(a, 1)
    assert a not in list(policy.victims())
    policy.unpin([a])
    assert set(policy.victims()) == {a, b}


# S3-FIFO.


def test_s3fifo_one_use_goes_and_what_was_used_stays() -> None:
    clock = Clock()
    policy = make_policy("s3fifo", clock=clock)
    hot, cold = [key(("hot", i)) for i in range(5)], [key(("cold", i)) for i in range(50)]
    for each in hot:
        policy.admit(each, 1)
    clock.now = 1.0
    policy.touch(hot)
    for each in cold:
        policy.admit(each, 1)
    assert evict(policy, 40) == cold[:40]
    policy.admit(cold[39], 1)  # a ghost: into the main queue
    gone = evict(policy, 10)
    assert cold[39] not in gone
    assert not set(hot) & set(gone)


def test_s3fifo_keeps_few_ghosts() -> None:
    policy = S3FIFOPolicy()
    for i in range(5000):
        policy.admit(key(i), 1)
        if len(policy) > 20:
            evict(policy, 1)
    assert len(policy._ghosts) <= 22


# TTL.


def test_ttl_expires_by_default_by_record_and_children_first() -> None:
    clock = Clock()
    policy = TTLPolicy(ttl=10.0, clock=clock)
    keys = [key(("a", i)) for i in range(3)]
    admit_chain(policy, keys)
    short, longer = key("short"), key("longer")
    policy.admit(short, 1, info=RecordInfo(ttl=2.0))
    policy.admit(longer, 1, info=RecordInfo(ttl=100.0))
    clock.now = 3.0
    assert list(policy.expired()) == [short]
    assert list(policy.expired()) == [short]  # not removed: told again
    policy.forget(short)
    policy.touch(keys[2:])  # only the tail lives on, and with it what it hangs on
    clock.now = 10.5
    assert list(policy.expired()) == []
    clock.now = 13.0
    gone = []
    for each in policy.expired():
        policy.forget(each)
        gone.append(each)
    assert gone == keys[::-1]
    assert list(policy.victims()) == [longer]


def test_ttl_of_a_record_that_moved_to_a_slower_tier_is_longer_there() -> None:
    clock = Clock()
    fast, slow = TTLPolicy(ttl=10.0, clock=clock), TTLPolicy(ttl=10.0, clock=clock)
    a = NAMES[0]
    fast.admit(a, 1)
    clock.now = 9.0
    fast.forget(a)
    slow.admit(a, 1, info=RecordInfo(ttl=fast.ttl_of(a) * 4))
    clock.now = 48.0
    assert list(slow.expired()) == []
    clock.now = 49.0
    assert list(slow.expired()) == [a]


def test_ttl_expired_go_before_older_ones_and_pinned_do_not() -> None:
    clock = Clock()
    policy = make_policy("ttl", clock=clock, ttl=100.0)
    old, young, pinned = NAMES[:3]
    policy.admit(old, 1)
    clock.now = 1.0
    policy.admit(young, 1, info=RecordInfo(ttl=2.0))
    policy.admit(pinned, 1, info=RecordInfo(ttl=2.0))
    policy.pin([pinned])
    clock.now = 5.0
    assert list(policy.expired()) == [young]
    assert list(policy.victims()) == [young, old]
    policy.unpin([pinned])
    assert set(policy.expired()) == {young, pinned}


# Sessions.


def test_session_order_equals_the_formula() -> None:
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 8), st.integers(0, 6), st.floats(0, 50), st.sampled_from([60.0, 200.0])),
            min_size=1, max_size=8,
        ),
        st.tuples(st.floats(0, 4), st.floats(0, 4), st.floats(0.01, 4)),
    )  # fmt: skip
    def check(sessions: list[tuple[int, int, float, float]], weights: tuple[float, float, float]) -> None:
        alpha, beta, gamma = weights
        clock = Clock()
        policy = SessionPolicy(alpha=alpha, beta=beta, gamma=gamma, clock=clock)
        for number, (length, turns, at, ttl) in sorted(enumerate(sessions), key=lambda item: item[1][2]):
            clock.now = at
            chain = [key((number, i)) for i in range(length)]
            admit_chain(policy, chain, session=str(number), turns=turns, ttl=ttl)
        clock.now = 100.0
        tokens, turn = max(each[0] for each in sessions) * 16, max(1, *(each[1] for each in sessions))

        def retain(number: int) -> float:
            length, turns, at, ttl = sessions[number]
            age = clock.now - at
            if age >= ttl:
                return -math.inf
            return alpha * length * 16 / tokens + beta * turns / turn + gamma * (1 - min(1.0, age / ttl))

        owner = {key((number, i)): number for number, each in enumerate(sessions) for i in range(each[0])}
        order = [owner[each] for each in evict(policy)]
        assert len(order) == len(owner)
        for one, two in pairwise(order):
            first, second = retain(one), retain(two)
            assert first <= second or math.isclose(first, second, abs_tol=0.06 * (alpha + beta + gamma))
            if one != two and first == second == -math.inf:
                assert sessions[one][2] + sessions[one][3] <= sessions[two][2] + sessions[two][3]
        assert len([1 for one, two in pairwise(order) if one != two]) == len(sessions) - 1  # one after the other

    check()


def test_session_has_the_sign_of_age_right_and_breaks_ties_by_recency() -> None:
    clock = Clock()
    policy = SessionPolicy(alpha=1, beta=1, gamma=1, ttl=100, clock=clock)
    chains = {name: [key((name, i)) for i in range(2)] for name in "abc"}
    for name, chain in chains.items():
        admit_chain(policy, chain, session=name, turns=1)
        clock.now += 10.0
    policy.touch(chains["a"])
    assert policy.retain(chains["a"][0]) > policy.retain(chains["b"][0])
    assert evict(policy, 2) == chains["b"][::-1]
    clock.now = 500.0
    assert policy.retain(chains["a"][0]) == -math.inf
    flat = SessionPolicy(alpha=1, beta=1, gamma=0, ttl=1e9, clock=clock)
    for name in "abc":
        clock.now += 1
        admit_chain(flat, chains[name], session=name, turns=1)
    clock.now += 1
    flat.touch(chains["a"])
    assert evict(flat) == [*chains["b"][::-1], *chains["c"][::-1], *chains["a"][::-1]]


def test_session_with_more_turns_stays_and_expired_go_first() -> None:
    clock = Clock()
    policy = SessionPolicy(ttl=100, clock=clock)
    a, b, c = ([key((name, i)) for i in range(3)] for name in "abc")
    admit_chain(policy, c, session="c", turns=9, tokens=64, ttl=20)
    admit_chain(policy, a, session="a", turns=5)
    clock.now = 30.0
    admit_chain(policy, b, session="b", turns=1)
    assert list(policy.expired()) == c[:1] or list(policy.expired()) == c[2:]
    gone = evict(policy)
    assert gone == [*c[::-1], *b[::-1], *a[::-1]]


# Look-ahead.


def test_windows_are_the_formulas() -> None:
    assert prefetch_window(128 << 30, 2 << 30) == 64
    assert eviction_window(128 << 30, 10 << 40, 2 << 30) == 64 + 5120


def test_lookahead_first_what_nobody_waits_for_then_from_the_tail() -> None:
    policy = LookAheadPolicy("lru", last=False)
    jobs = [[key((job, i)) for i in range(3)] for job in range(3)]
    others = [key(("other", i)) for i in range(3)]
    for job in jobs:
        admit_chain(policy, job)
    for each in others:
        policy.admit(each, 1)
    policy.announce(jobs[::-1])  # 2 runs first, 0 last
    assert evict(policy, 4) == [*others, jobs[0][2]]
    late = key("late")
    policy.admit(late, 1)  # what came meanwhile goes before the window again
    assert evict(policy, 3) == [late, jobs[0][1], jobs[0][0]]
    policy.announce(jobs[1:])  # 1 runs first now
    assert evict(policy, 3) == jobs[2][::-1]
    policy.announce([])
    policy.admit(late, 1)
    assert evict(policy) == [*jobs[1][::-1], late]


def test_lookahead_nothing_of_the_window_leaves_the_last_tier() -> None:
    policy = LookAheadPolicy("fifo", last=True)
    jobs = [[key((job, i)) for i in range(3)] for job in range(2)]
    for job in jobs:
        admit_chain(policy, job)
    policy.announce(jobs[:1])
    assert evict(policy) == jobs[1][::-1]
    assert set(jobs[0]) <= {each for each in jobs[0] if each in policy}
    policy.pin([jobs[0][1]])
    policy.announce([])
    assert evict(policy) == [jobs[0][2]]  # the caller's pin is another one than the window's


def test_lookahead_window_ends_where_the_tiers_do() -> None:
    policy = LookAheadPolicy("lru", window=50)
    jobs = [[key((job, i)) for i in range(2)] for job in range(4)]
    for job in jobs:
        admit_chain(policy, job, nbytes=10)
    policy.announce(jobs)  # 20 bytes each: two fit into 50
    assert set(evict(policy)) == {*jobs[2], *jobs[3]}
    policy.announce([[*jobs[0], *jobs[1]], [*jobs[1], key("absent")], [key("more")]])  # shared ones count once
    policy.announce([[*jobs[0], *jobs[1], key("absent"), key("more")]])  # 60 bytes: more than there is
    assert set(evict(policy)) == {*jobs[0], *jobs[1]}


def test_lookahead_can_be_put_around_any_policy_but_itself() -> None:
    for name in ORDERED:
        if name in ("lookahead", "default"):
            with pytest.raises(ConfigError, match="twice"):
                make_policy("lookahead", inner=name)
            continue
        policy = make_policy("lookahead", inner=name)
        policy.admit(NAMES[0], 1)
        policy.admit(NAMES[1], 1)
        policy.announce([[NAMES[0]]])
        assert evict(policy) == [NAMES[1]]
    with pytest.raises(ConfigError, match="window"):
        make_policy("lookahead", window=0)


# What is learned.


def replayed(policy: EvictionPolicy, clock: Clock) -> int:
    """A session of 4 records each second; every twentieth comes back every 60 s, ten times; the others never. Room for
    40 sessions. Returns how many of the last returns were hits."""
    hits = 0

    def use(chain: Sequence[Key]) -> bool:
        found = all(each in policy for each in chain)
        if found:
            policy.touch(chain)
        else:
            admit_chain(policy, chain)
            policy.touch(chain)
        return found

    for number in range(2000):
        clock.now += 1.0
        use([key((number, i)) for i in range(4)])
        for back in range(number - 60, max(-1, number - 601), -60):
            if back % 20 == 0:
                hits += use([key((back, i)) for i in range(4)]) and number >= 1000
        while len(policy) > 160:
            evict(policy, 1)
    return hits


def test_default_learns_who_returns() -> None:
    clocks = Clock(), Clock()
    learned = replayed(make_policy("default", clock=clocks[0]), clocks[0])
    assert replayed(make_policy("lru", clock=clocks[1]), clocks[1]) == 0  # it keeps 40 s
    assert learned > 250  # of 500


def test_before_anything_is_learned_the_default_is_lru() -> None:
    clock = Clock()
    policy, lru = make_policy("default", clock=clock), make_policy("lru", clock=clock)
    for i in range(100):
        clock.now += 1
        for each in (policy, lru):
            each.admit(key(i), 1)
            each.touch([key(i // 2)])
    assert evict(policy) == evict(lru)


def test_tails_that_do_not_fill_a_chunk_go_early_once_learned() -> None:
    def hits(name: str) -> int:
        clock = Clock()
        policy = make_policy(name, clock=clock)
        found = 0
        for number in range(600):
            clock.now += 1
            whole, tail = key(("whole", number)), key(("tail", number))
            policy.admit(whole, 1, info=RecordInfo(0, 16))
            policy.admit(tail, 1, parent=whole, info=RecordInfo(16, 5))
            back = key(("whole", number - 20))  # comes back, without the tail
            if back in policy:
                found += number >= 300
                policy.touch([back])
            elif number >= 20:
                policy.admit(back, 1, info=RecordInfo(0, 16))
            while len(policy) > 40:
                evict(policy, 1)
        return found

    assert hits("lru") == 0  # it holds the last 13 with their tails, and what has just come back
    assert hits("default") > 150  # of 300


def test_uses_within_a_burst_count_once() -> None:
    clock = Clock()
    policy = LearnedPolicy(burst=1.0, clock=clock)
    a = NAMES[0]
    policy.admit(a, 1)
    for _ in range(50):
        policy.touch([a])
    assert policy._records[a].uses == 0
    clock.now = 1.0
    policy.touch([a])
    assert policy._records[a].uses == 1


def test_who_comes_back_is_known() -> None:
    clock = Clock()
    policy = LearnedPolicy(clock=clock)
    a = NAMES[0]
    policy.admit(a, 1)
    for _ in range(3):
        clock.now += 5
        policy.touch([a])
    policy.forget(a)
    policy.admit(a, 1)
    assert policy._records[a].uses == 4
    policy.admit(NAMES[1], 1)
    assert policy._records[NAMES[1]].uses == 0


# Value.


def test_prefill_seconds_grow_with_position() -> None:
    kwargs = {"per_token": 1.0, "per_position": 0.5}
    whole = prefill_seconds(0, 100, **kwargs)
    assert whole == pytest.approx(100 + 0.5 * 100 * 100 / 2)
    assert prefill_seconds(0, 40, **kwargs) + prefill_seconds(40, 100, **kwargs) == pytest.approx(whole)


def test_value_dear_bytes_stay_and_what_loads_slower_than_it_computes_goes_first() -> None:
    clock = Clock()
    policy = ValuePolicy(per_token=1.0, per_position=1.0, bandwidth=1e9, clock=clock)
    cheap, dear, big = NAMES[:3]
    policy.admit(dear, 100, info=RecordInfo(1000, 16))
    policy.admit(cheap, 100, info=RecordInfo(0, 16))
    policy.admit(big, 100_000, info=RecordInfo(1000, 16))
    clock.now = 1.0
    assert list(policy.victims()) == [big, cheap, dear]
    policy.measured(1.0)  # a byte takes a second: `cheap` saves 0.25 s a byte, `dear` about 160
    assert list(policy.victims()) == [big, cheap, dear]
    policy.measured(1e-3)  # nothing is worth loading: cheap bytes first, still
    assert list(policy.victims()) == [big, cheap, dear]
    later = NAMES[3]
    clock.now = 2.0
    policy.admit(later, 100, info=RecordInfo(0, 16))
    assert list(policy.victims())[:3] == [big, cheap, later]  # alike: by age


# Options.


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("lru", {"alpha": 1}, "no option 'alpha'"),
        ("session", {"alhpa": 1}, "choices: alpha, beta, gamma, ttl"),
        ("session", {"gamma": -1}, "gamma"),
        ("ttl", {"ttl": 0}, "ttl"),
        ("s3fifo", {"small": 1.0}, "small"),
        ("default", {"trust": 2}, "trust"),
        ("default", {"inner": "lru"}, "no option 'inner'"),
        ("value", {"bandwidth": 0}, "bandwidth"),
        ("lookahead", {"inner": "lru", "alpha": 1}, "no option 'alpha'"),
        ("lookahead", {"inner": "lfu"}, "lfu"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_policy(name, **options)
