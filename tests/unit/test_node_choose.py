"""Whom a pool reads from."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest

from kvstore.backend import Outcome
from kvstore.keys import Key
from kvstore.placement import Placement
from kvstore.testing import DictBackend
from kvstore_backends.node.members import Member
from kvstore_backends.node.node import Node
from kvstore_backends.node.snapshot import Snapshot
from tests.node_support import key, keys, member


class Slow:
    """A node as `Snapshot.choose` sees it."""

    def __init__(self, name: str, pace: float, outstanding: int = 0, *, up: bool = True, stuck: float = 0.0) -> None:
        self.member = Member(name, name)
        self.up = up
        self._cost = (pace, outstanding + 65536)
        self._stuck = stuck

    def stuck(self) -> float:
        return self._stuck

    def cost(self) -> tuple[float, float]:
        return self._cost


def chosen(nodes: list[Slow], sizes: Sequence[int], some: Sequence[Key] | None = None) -> dict[str, int]:
    """How many items each node is asked for; all of them have all keys."""
    snapshot = Snapshot.__new__(Snapshot)
    snapshot.nodes = tuple(nodes)  # type: ignore[arg-type]
    snapshot.replicas = len(nodes)
    snapshot.placement = Placement([node.member.name for node in nodes], replicas=len(nodes))
    groups = snapshot.choose(some or keys(len(sizes)), sizes)
    return {nodes[index].member.name: len(items) for index, items in groups.items()}


def test_reads_go_to_the_node_that_will_be_done_first() -> None:
    far, near = Slow("far", 3e-9), Slow("near", 1e-9)
    assert chosen([far, near], [1000]) == {"near": 1}
    assert chosen([far, Slow("near", 1e-9, outstanding=64 << 20)], [1000]) == {"far": 1}
    assert chosen([far, Slow("near", 1e-9, up=False)], [1000]) == {"far": 1}
    assert chosen([Slow("far", 3e-9, up=False), Slow("near", 1e-9, up=False)], [1000]) == {"near": 1}


def test_a_node_whose_calls_do_not_end_gets_no_more_of_them() -> None:
    """Long before the first of them has failed."""
    hangs, near = Slow("hangs", 1e-9, stuck=0.5), Slow("near", 3e-9)
    assert chosen([hangs, near], [1000] * 50) == {"near": 50}
    assert chosen([hangs, Slow("near", 3e-9, up=False)], [1000]) == {"hangs": 1}
    assert chosen([hangs, Slow("near", 3e-9, stuck=0.7)], [1000]) == {"hangs": 1}


def test_whose_calls_do_not_end_is_asked_last() -> None:
    """If no thread is free, nobody waits for it."""
    snapshot = Snapshot([Slow("a", 1.0, stuck=2.0), Slow("b", 1.0), Slow("c", 1.0, stuck=1.0)], 1)  # type: ignore[list-item]
    assert [*snapshot.choose(keys(60), [1] * 60)] == [1, 2, 0]


def test_a_node_knows_how_long_its_oldest_call_takes() -> None:
    now, gate, asked = [100.0], threading.Event(), threading.Semaphore(0)

    class Hangs(DictBackend):
        def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
            asked.release()
            gate.wait(60)
            return super().stat(keys, deadline=deadline)

    node = Node(member("a:1"), Hangs(), clock=lambda: now[0])  # type: ignore[arg-type]
    assert node.stuck() == 0.0
    threads = [threading.Thread(target=node.stat, args=(keys(1),), kwargs={"deadline": math.inf}) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert asked.acquire(timeout=60)
        now[0] += 1.0
    assert node.stuck() == 2.0
    gate.set()
    for thread in threads:
        thread.join()
    assert node.stuck() == 0.0


def test_a_large_batch_is_shared_by_what_each_can_do() -> None:
    found = chosen([Slow("far", 3e-9), Slow("near", 1e-9)], [1 << 20] * 40)
    assert found["far"] == pytest.approx(10, abs=2)
    assert found["near"] == pytest.approx(30, abs=2)


def test_all_reads_of_one_key_go_to_one_node() -> None:
    assert len(chosen([Slow("a", 1e-9), Slow("b", 1e-9)], [1 << 20] * 40, [key("one")] * 40)) == 1
