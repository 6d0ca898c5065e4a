"""Weighted rendezvous placement."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.placement import Placement

PINNED = [(1, 0), (0, 2), (0, 1), (2, 0), (0, 2)]


def keys(count: int) -> list[Key]:
    return [Key(hashlib.sha256(b"%d" % number).digest()) for number in range(count)]


def names_of(placement: Placement, names: list[str], key: Key) -> list[str]:
    return [names[index] for index in placement.order(key)]


def test_everybody_agrees_whatever_order_they_list_the_backends_in() -> None:
    names, weights = ["a", "b", "c", "d"], [1.0, 2.0, 1.0, 0.5]
    first = Placement(names, weights, replicas=3)
    second = Placement(names[::-1], weights[::-1], replicas=3)
    for key in keys(200):
        assert names_of(first, names, key) == names_of(second, names[::-1], key)


def test_a_pinned_vector_holds_in_every_process() -> None:
    placement = Placement(["file:///a", "file:///b", "file:///c"], replicas=2)
    assert [placement.order(key) for key in keys(5)] == PINNED


def _by_definition(names: list[str], weights: list[float], key: Key) -> list[int]:
    def score(index: int) -> float:
        seed = xxh3_64(names[index].encode()).intdigest()
        u = ((xxh3_64(bytes(key), seed).intdigest() >> 11) + 0.5) / 2**53
        return -weights[index] / math.log(u)

    return sorted(range(len(names)), key=score, reverse=True)


def test_it_is_what_the_definition_says() -> None:
    names, weights = ["x", "y", "z"], [1.0, 3.0, 0.25]
    placement = Placement(names, weights, replicas=3)
    for key in keys(100):
        assert list(placement.order(key)) == _by_definition(names, weights, key)


def test_keys_spread_by_weight() -> None:
    placement = Placement(["a", "b", "c"], [1.0, 1.0, 2.0])
    count = Counter(placement.order(key)[0] for key in keys(8000))
    assert abs(count[0] - 2000) < 200
    assert abs(count[1] - 2000) < 200
    assert abs(count[2] - 4000) < 250


def test_removing_a_backend_moves_only_its_keys() -> None:
    names = ["a", "b", "c", "d"]
    before, after = Placement(names), Placement(names[:3])
    for key in keys(2000):
        owner = names_of(before, names, key)[0]
        if owner != "d":
            assert names_of(after, names, key)[0] == owner


def test_replicas_are_different_backends() -> None:
    placement = Placement(["a", "b", "c"], replicas=3)
    assert all(sorted(placement.order(key)) == [0, 1, 2] for key in keys(50))


def test_a_backend_of_weight_zero_gets_nothing() -> None:
    placement = Placement(["a", "b"], [0.0, 1.0])
    assert {placement.order(key) for key in keys(100)} == {(1,)}


@pytest.mark.parametrize(
    ("names", "weights", "replicas", "words"),
    [
        ([], None, 1, "0 backends"),
        (["a", "a"], None, 1, "unique"),
        (["a"], [1.0, 2.0], 1, "2 weights"),
        (["a"], [-1.0], 1, "weights"),
        (["a"], [0.0], 1, "weights"),
        (["a", "b"], [float("nan"), 1.0], 1, "weights"),
        (["a", "b"], None, 3, "replicas=3"),
        (["a", "b"], [1.0, 0.0], 2, "replicas=2"),
        (["a", "b"], None, 0, "replicas=0"),
    ],
)
def test_bad_input_is_named(names: list[str], weights: list[float] | None, replicas: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Placement(names, weights, replicas)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True), st.binary(min_size=32, max_size=32))
def test_any_names_and_keys_work(names: list[str], digest: bytes) -> None:
    order = Placement(names, replicas=len(names)).order(Key(digest))
    assert sorted(order) == list(range(len(names)))


def test_the_nearest_replica_is_first_and_nearness_chooses_none() -> None:
    """Each process has distances of its own; which backends hold a key they all agree on."""
    names = ["a", "b", "c", "d"]
    anywhere = Placement(names, replicas=2)
    for distances in ([0, 1, 1, 1], [2, 2, 0, 1], [1, 1, 1, 1], [3, 2, 1, 0]):
        here = Placement(names, replicas=2, distances=distances)
        for key in keys(200):
            order, plain = here.order(key), anywhere.order(key)
            assert set(order) == set(plain)
            assert [distances[index] for index in order] == sorted(distances[index] for index in order)
            if distances[order[0]] == distances[order[1]]:
                assert order == plain
