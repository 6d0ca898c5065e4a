"""The index of a controller, against a model made of plain sets."""

from __future__ import annotations

import hashlib
import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.control.index import TIERS, Index
from kvstore.errors import ConfigError

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(12)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=8)
namespaces = st.sampled_from(["", "a"])


class IndexMachine(RuleBasedStateMachine):
    """Every operation is done to the index and to {(slot, namespace, key): tiers}."""

    @initialize()
    def begin(self) -> None:
        self.index = Index()
        self.has: dict[tuple[int, str, bytes], set[int]] = {}
        self.slots: list[int] = []

    @rule()
    def open(self) -> None:
        if len(self.slots) < 5:
            slot = self.index.open()
            assert slot not in self.slots
            assert not any(key[0] == slot for key in self.has)
            self.slots.append(slot)

    @rule(data=st.data(), namespace=namespaces, tier=st.integers(0, TIERS - 1), keys=some_keys)
    def admit(self, data: st.DataObject, namespace: str, tier: int, keys: list[bytes]) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(self.slots))
            self.index.admit(slot, namespace, tier, keys)
            for key in keys:
                self.has.setdefault((slot, namespace, key), set()).add(tier)

    @rule(data=st.data(), namespace=namespaces, tier=st.integers(0, TIERS - 1), keys=some_keys)
    def evict(self, data: st.DataObject, namespace: str, tier: int, keys: list[bytes]) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(self.slots))
            self.index.evict(slot, namespace, tier, keys)
            for key in keys:
                self.has.get((slot, namespace, key), set()).discard(tier)

    @rule(data=st.data(), namespace=namespaces, tier=st.integers(0, TIERS - 1))
    def clear(self, data: st.DataObject, namespace: str, tier: int) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(self.slots))
            for _ in self.index.clear(slot, namespace, tier):
                pass
            for (owner, space, _), tiers in self.has.items():
                if (owner, space) == (slot, namespace):
                    tiers.discard(tier)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(self.slots))
            self.slots.remove(slot)
            self.index.retire(slot)
            self.has = {key: tiers for key, tiers in self.has.items() if key[0] != slot}

    @rule(steps=st.integers(1, 600))
    def sweep(self, steps: int) -> None:
        for _ in range(steps):
            if not self.index.sweep():
                break

    @rule(namespace=namespaces, keys=some_keys, data=st.data())
    def look(self, namespace: str, keys: list[bytes], data: st.DataObject) -> None:
        chosen = data.draw(st.none() | st.lists(st.sampled_from(self.slots), unique=True) if self.slots else st.none())
        expected = {}
        for slot in self.slots if chosen is None else chosen:
            tiers = []
            for key in keys:
                found = self.has.get((slot, namespace, key))
                if not found:
                    break
                tiers.append(min(found))
            if tiers:
                expected[slot] = tiers
        found_now = {holding.slot: list(holding.tiers) for holding in self.index.lookup(namespace, keys, chosen)}
        assert found_now == expected
        holders = {slot for slot in self.slots for key in keys if self.has.get((slot, namespace, key))}
        assert self.index.holders(namespace, keys) == holders

    @invariant()
    def counts(self) -> None:
        for slot in self.slots:
            for names in ([""], ["a"], ["", "a"]):
                expected = sum(
                    bool(tiers) for (owner, space, _), tiers in self.has.items() if owner == slot and space in names
                )
                assert self.index.count(slot, names) == expected

    @invariant()
    def length(self) -> None:
        live = {(space, key) for (_, space, key), tiers in self.has.items() if tiers}
        assert len(self.index) >= len(live)

    def teardown(self) -> None:
        """Once swept, nothing of those who left is there any more."""
        if not hasattr(self, "index"):
            return
        while self.index.sweep():
            pass
        live = {(space, key) for (_, space, key), tiers in self.has.items() if tiers}
        assert len(self.index) == len(live)
        assert set(self.index.namespaces()) == {space for space, _ in live}


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _random_keys(seed: int, count: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(32) for _ in range(count)]


def test_more_than_there_is_room_for_the_largest_namespace_loses_its_oldest() -> None:
    index = Index(capacity=4096)
    slot = index.open()
    small = _random_keys(1, 300)
    index.admit(slot, "small", 0, small)
    for part in range(40):
        index.admit(slot, "large", 0, _random_keys(100 + part, 512))
        assert len(index) <= 4096
    assert index.dropped == 300 + 40 * 512 - len(index)
    assert index.count(slot, ["small"]) == 300
    assert index.count(slot, ["small", "large"]) == len(index)
    assert all(index.lookup("small", [key]) for key in small)
    newest = _random_keys(139, 512)
    assert sum(bool(index.lookup("large", [key])) for key in newest) == 512


def test_a_sweep_goes_in_steps_and_frees_the_slot() -> None:
    index = Index()
    first, second = index.open(), index.open()
    keys = _random_keys(2, 2000)
    index.admit(first, "", 0, keys)
    index.admit(second, "", 1, keys[:500])
    index.retire(first)
    assert index.lookup("", keys[:1]) == [(second, [1])]
    assert index.lookup("", keys[600:601]) == []
    assert index.open() not in (first, second)  # bits of the first are still in the records
    steps = 0
    while index.sweep():
        steps += 1
    assert steps >= 255
    assert len(index) == 500
    assert index.open() == first


def test_a_tier_beyond_those_that_are_told_apart_counts_as_the_last() -> None:
    index = Index()
    slot = index.open()
    index.admit(slot, "", 17, [KEYS[0]])
    assert index.lookup("", [KEYS[0]]) == [(slot, [TIERS - 1])]


def test_memory_per_record_is_what_the_figure_says() -> None:
    """Counted, not measured by the process: 200,000 records of 8 instances, two of which hold each."""
    index = Index()
    slots = [index.open() for _ in range(8)]
    for part in range(50):
        keys = _random_keys(part, 4000)
        index.admit(slots[part % 8], "", 0, keys)
        index.admit(slots[(part + 1) % 8], "", 1, keys)
    (space,) = index._spaces.values()
    numbers = {id(mask): mask for shard in space.shards for mask in shard.values()}
    nbytes = sum(sys.getsizeof(shard) + 80 * len(shard) for shard in space.shards)  # 80: what 65 bytes take of the heap
    nbytes += sum(sys.getsizeof(mask) for mask in numbers.values())
    assert len(index) == 200_000
    assert nbytes / len(index) <= 200


def test_a_namespace_with_few_records_costs_little() -> None:
    index = Index()
    slot = index.open()
    for number in range(500):
        index.admit(slot, str(number), 0, KEYS[:2])
    kept = [shard for space in index._spaces.values() for shard in space.shards]
    assert len({id(shard) for shard in kept}) == 500 * 2 + 1
    for number in range(500):
        index.evict(slot, str(number), 0, KEYS)
    assert index.namespaces() == []
    index.admit(slot, "new", 0, KEYS[:1])
    assert index.lookup("other", KEYS[:1]) == []


def test_an_index_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Index(0)
