"""Eviction policies against a simple O(n) oracle, and against what hurts users: heads before tails, wedges, hangs."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES, EvictionPolicy, FIFOPolicy, KeepPolicy, LRUPolicy, make_policy
from kvstore.keys import Key


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def chain(name: str, length: int) -> list[Key]:
    return [key((name, i)) for i in range(length)]


def admit_chain(policy: EvictionPolicy, keys: Sequence[Key], *, parent: Key | None = None, nbytes: int = 1) -> None:
    for each in keys:
        policy.admit(each, nbytes, parent=parent)
        parent = each


def evict(policy: EvictionPolicy, count: int) -> list[Key]:
    gone = []
    for victim in policy.victims():
        assert policy.forget(victim) > 0
        gone.append(victim)
        if len(gone) == count:
            break
    return gone


def prefix(policy: EvictionPolicy, keys: Iterable[Key]) -> int:
    count = 0
    for each in keys:
        if each not in policy:
            break
        count += 1
    return count


class Oracle:
    """The rule, spelled out: of the records without a resident child the oldest; each step looks at all records."""

    def __init__(self, *, refresh: bool) -> None:
        self.refresh = refresh
        self.clock = 0
        self.size: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.parent: dict[Key, Key] = {}

    def _use(self, name: Key) -> None:
        self.clock += 1
        self.used[name] = self.clock

    def admit(self, name: Key, nbytes: int, parent: Key | None) -> None:
        if name not in self.size or self.refresh:
            self._use(name)
        self.size[name] = nbytes
        if parent is not None and parent != name:
            self.parent[name] = parent

    def touch(self, names: Sequence[Key]) -> None:
        for name in reversed(names):
            if name in self.size and self.refresh:
                self._use(name)

    def forget(self, name: Key) -> int:
        self.used.pop(name, None)
        self.parent.pop(name, None)
        return self.size.pop(name, 0)

    def walk(self, stuck: set[Key], keep: set[Key], limit: int) -> list[Key]:
        """Offer up to `limit` records; all but the stuck ones are removed."""
        offered: list[Key] = []
        passed: set[Key] = set()
        lent: dict[Key, Key] = {}  # children that could not be removed let their parents go, in this walk
        while len(offered) < limit:
            free = set(self.size) - passed - set(self.parent.values())
            if free:
                victim = min(free, key=self.used.__getitem__)
                passed.add(victim)
                if victim in keep:
                    continue
                offered.append(victim)
                if victim not in stuck:
                    self.forget(victim)
                continue
            if blocked := [name for name in offered if name in self.parent and name in self.size]:
                for name in blocked:
                    lent[name] = self.parent.pop(name)
            elif not self._cut_circles():
                break
        for name, parent in lent.items():
            if name in self.size:
                self.parent.setdefault(name, parent)
        return offered

    def _cut_circles(self) -> bool:
        cut = []
        for name in self.size:
            circle = [name]
            while (above := self.parent.get(circle[-1])) in self.size and above not in circle:
                circle.append(above)
            if above == name and name == min(circle, key=self.used.__getitem__):
                cut.append(circle[-1])
        for name in cut:
            del self.parent[name]
        return bool(cut)


NAMES = [key(i) for i in range(9)]
names = st.sampled_from(NAMES)
admits = st.tuples(st.just("admit"), names, st.integers(0, 5), st.none() | names)
touches = st.tuples(st.just("touch"), st.lists(names, max_size=5))
forgets = st.tuples(st.just("forget"), names)
walks = st.tuples(st.just("walk"), st.sets(names, max_size=4), st.sets(names, max_size=2), st.integers(0, 12))
steps = st.lists(st.one_of(admits, admits, touches, forgets, walks), max_size=60)


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_equals_the_oracle(name: str) -> None:
    @settings(max_examples=400, deadline=None)
    @given(steps)
    def check(script: list[tuple[object, ...]]) -> None:
        policy = make_policy(name)
        oracle = Oracle(refresh=name == "lru")
        for step in [*script, ("walk", set(), set(), 99)]:
            match step:
                case ("admit", Key() as one, int() as nbytes, parent):
                    policy.admit(one, nbytes, parent=parent)  # type: ignore[arg-type]
                    oracle.admit(one, nbytes, parent)  # type: ignore[arg-type]
                case ("touch", list() as many):
                    policy.touch(many)
                    oracle.touch(many)
                case ("forget", Key() as one):
                    assert policy.forget(one) == oracle.forget(one)
                case ("walk", set() as stuck, set() as keep, int() as limit):
                    got: list[Key] = []
                    for victim in islice(policy.victims(keep=keep), limit):
                        got.append(victim)
                        if victim not in stuck:
                            policy.forget(victim)
                    assert got == oracle.walk(stuck, keep, limit)
            assert len(policy) == len(oracle.size)
            assert policy.nbytes == sum(oracle.size.values())
            assert {name for name in NAMES if name in policy} == set(oracle.size)
        assert len(policy) == 0
        assert policy.nbytes == 0
        state = vars(policy)
        assert not state["_records"]
        assert not state["_orphans"]
        assert not state["_queues"][0].order

    check()


def test_plain_recency_without_hints() -> None:
    policy = LRUPolicy()
    a, b, c = NAMES[:3]
    for each in (a, b, c):
        policy.admit(each, 10)
    policy.touch([a])
    policy.admit(b, 20)  # again: refreshed, new size
    assert policy.nbytes == 40
    assert evict(policy, 3) == [c, a, b]


def test_fifo_ignores_use() -> None:
    policy = FIFOPolicy()
    a, b, c = NAMES[:3]
    for each in (a, b, c):
        policy.admit(each, 1)
    policy.touch([a])
    policy.admit(a, 7)
    assert policy.nbytes == 9
    assert evict(policy, 3) == [a, b, c]


def test_head_of_a_touched_batch_outlives_its_tail_without_hints() -> None:
    policy = LRUPolicy()
    keys = chain("a", 4)
    for each in keys:
        policy.admit(each, 1)
    policy.touch(keys)
    assert evict(policy, 4) == keys[::-1]


def test_fault_12_chain_in_two_calls_loses_its_tail_first() -> None:
    policy = LRUPolicy()
    keys = chain("a", 8)
    admit_chain(policy, keys[:4])
    policy.touch(keys[:4])
    admit_chain(policy, keys[4:], parent=keys[3])
    policy.touch(keys[4:])
    for other in chain("x", 2):
        evict(policy, 1)
        policy.admit(other, 1)
    assert prefix(policy, keys) == 6


def test_fault_12_only_the_tail_is_touched_here() -> None:
    policy = LRUPolicy()
    keys = chain("a", 8)
    admit_chain(policy, keys)
    others = chain("x", 2)
    for other in others:
        policy.admit(other, 1)
    policy.touch(keys[4:])  # an upper tier serves 0..3
    assert evict(policy, 2) == others
    assert evict(policy, 2) == [keys[7], keys[6]]
    assert prefix(policy, keys) == 6


@pytest.mark.parametrize("order", ["head first", "tail first"])
def test_siblings_protect_a_shared_head(order: str) -> None:
    policy = LRUPolicy()
    head = chain("head", 3)
    left, right = chain("left", 2), chain("right", 2)
    links = [*zip(head, [None, *head], strict=False)]
    links += [(left[0], head[2]), (left[1], left[0]), (right[0], head[2]), (right[1], right[0])]
    for each, parent in links if order == "head first" else links[::-1]:
        policy.admit(each, 1, parent=parent)
    policy.touch(left)
    assert evict(policy, 2) == right[::-1]
    assert evict(policy, 5) == [*left[::-1], *head[::-1]]


def test_a_parent_that_returns_is_protected_by_the_children_it_left() -> None:
    policy = LRUPolicy()
    keys = chain("a", 3)
    admit_chain(policy, keys)
    policy.forget(keys[1])  # quarantined, say
    policy.admit(keys[1], 1, parent=keys[0])
    assert evict(policy, 3) == keys[::-1]


def test_a_victim_that_cannot_be_removed_is_skipped_and_protects_its_parents_to_the_last() -> None:
    policy = LRUPolicy()
    keys = chain("a", 3)
    admit_chain(policy, keys)
    others = chain("x", 2)
    for other in others:
        policy.admit(other, 1)
    seen = []
    for victim in policy.victims():
        seen.append(victim)
        if victim != keys[2]:
            policy.forget(victim)
    assert seen == [keys[2], *others, keys[1], keys[0]]
    assert list(policy.victims()) == [keys[2]]
    assert policy.forget(keys[2]) == 1


def test_touching_what_cannot_be_removed_does_not_make_the_walk_endless() -> None:
    policy = LRUPolicy()
    keys = chain("a", 5)
    for each in keys:
        policy.admit(each, 1)
    seen = []
    for victim in policy.victims():
        seen.append(victim)
        policy.touch([victim])
        assert len(seen) <= 5
    assert sorted(seen) == sorted(keys)
    assert len(policy) == 5


def test_an_abandoned_walk_forgets_nothing() -> None:
    policy = LRUPolicy()
    keys = chain("a", 4)
    admit_chain(policy, keys)
    walk = policy.victims()
    assert [next(walk), next(walk)] == [keys[3], keys[2]]  # offered twice over, nothing removed
    walk.close()  # type: ignore[attr-defined]
    assert set(policy.victims()) == set(keys)


def test_kept_records_protect_their_parents() -> None:
    policy = LRUPolicy()
    keys = chain("a", 5)
    admit_chain(policy, keys)
    other = key("x")
    policy.admit(other, 1)
    assert list(policy.victims(keep={keys[4]})) == [other]
    assert next(policy.victims()) == keys[4]


@pytest.mark.parametrize("length", [2, 3, 1000])
def test_circles_of_parents_end(length: int) -> None:
    policy = LRUPolicy()
    keys = chain("a", length)
    admit_chain(policy, keys, parent=keys[-1])
    policy.admit(key("tail"), 1, parent=keys[0])
    policy.admit(keys[1], 1, parent=keys[1])  # its own parent: ignored
    gone = evict(policy, length + 1)
    assert gone[:2] == [key("tail"), keys[0]]
    assert len(gone) == length + 1
    assert len(policy) == 0


@pytest.mark.parametrize("backwards", [False, True])
def test_a_very_long_chain(backwards: bool) -> None:
    length = 100_000
    keys = [Key(i.to_bytes(32, "big")) for i in range(length)]
    policy = LRUPolicy()
    for i in range(length)[:: -1 if backwards else 1]:
        policy.admit(keys[i], 1, parent=keys[i - 1] if i else None)
    began = time.process_time()
    assert evict(policy, length) == keys[::-1]
    assert time.process_time() - began < 5  # 0.1 s here; quadratic would be minutes


def test_cost_and_memory_do_not_grow_with_the_number_of_records() -> None:
    def cost(count: int) -> tuple[float, float]:
        keys = [Key(i.to_bytes(32, "big")) for i in range(count)]
        tracemalloc.start()
        policy = LRUPolicy()
        for i, each in enumerate(keys):
            policy.admit(each, 1, parent=keys[i - 1] if i % 16 else None)
        memory = tracemalloc.get_traced_memory()[0] / count
        tracemalloc.stop()
        sample = keys[:: max(1, count // 500)][:500]
        began = time.process_time()
        for each in sample:
            policy.touch([each])
            (gone,) = evict(policy, 1)
            policy.admit(gone, 1, parent=each)
        return (time.process_time() - began) / len(sample), memory

    _, small_memory = cost(2_000)
    large, large_memory = cost(100_000)
    assert large < 1e-3  # a few µs here; a walk over all records would be 10 ms
    assert large_memory < 450
    assert large_memory < 2.5 * small_memory


def test_outdated_entries_are_bounded() -> None:
    policy = LRUPolicy()
    head, other = NAMES[:2]
    policy.admit(head, 1)
    policy.admit(other, 1)
    assert list(policy.victims()) == [head, other]  # both are passed now
    for i in range(5_000):
        policy.admit(key(("child", i)), 1, parent=head)
        policy.forget(key(("child", i)))
    assert len(policy._queues[0].ready) < 200
    assert list(policy.victims()) == [head, other]


def test_none_offers_nothing() -> None:
    policy = KeepPolicy()
    a, b = NAMES[:2]
    policy.admit(a, 3)
    policy.admit(b, 4, parent=a)
    policy.admit(b, 5)
    policy.touch([a])
    assert list(policy.victims()) == []
    assert (policy.nbytes, len(policy), a in policy) == (8, 2, True)
    assert policy.forget(a) == 3
    assert policy.forget(a) == 0
    assert (policy.nbytes, len(policy), a in policy) == (5, 1, False)


def test_make_policy_names_the_choices() -> None:
    for name, kind in POLICIES.items():
        assert type(make_policy(name)) is kind
        assert kind.name == name
    with pytest.raises(ConfigError, match=r"'lfu'.*lru, fifo, none"):
        make_policy("lfu")
