"""A node that hangs, as the store sees it: with real processes, of which one is stopped under load.

Whatever it is asked, it neither answers nor hangs up. Without replicas that costs its share of the keys, and nothing of
what the others hold; with replicas, nothing that anybody would notice.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

import kvstore
from kvstore.backend import Outcome, Status
from kvstore.errors import TransientError
from kvstore.keys import Key
from kvstore.placement import Placement
from kvstore.record import opaque_spec
from kvstore.store import Item, Priority, Store, Want
from kvstore.wrappers import HedgedBackend, unwrap
from kvstore_backends.node import NodeBackend
from tests.node_support import NodeProcess, data, key, keys, processes, wait_until

SIZE = 20_000
SECONDS = 1.0
SLACK_S = 1.5  # a busy machine may hold a thread up for so long


@pytest.fixture(autouse=True)
def _wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So wide that a stall of this machine is not taken for a fault: what is tested is that there is one."""
    monkeypatch.setattr("kvstore_backends.node.margin._SHARE", 0.4)
    monkeypatch.setattr("kvstore_backends.node.margin._MOST_S", 0.4)


@pytest.fixture
def nodes() -> Iterator[list[NodeProcess]]:
    with processes(3) as found:
        yield found


def opened(nodes: Sequence[NodeProcess], options: str) -> Store:
    where = ",".join(node.address for node in nodes)
    return kvstore.open_store(f"node://{where}?transport=tcp&{options}", buffer_pool_bytes=32 << 20)


def pool_of(store: Store) -> NodeBackend:
    found = unwrap(store._machinery.targets[0].backend)
    assert isinstance(found, NodeBackend)
    return found


def down(store: Store) -> float:
    pool = pool_of(store)
    return pool.metrics.value("kvstore_node_down", pool.name)


class Load:
    """Batches in a thread, one after the other; each must be as `expected` says, and none may be late."""

    def __init__(self, batch: Callable[[float], Sequence[Outcome]], check: Callable[[Sequence[Outcome]], None]) -> None:
        self._batch, self._check = batch, check
        self._done = threading.Event()
        self.count = 0
        self.slowest = 0.0
        self.errors: list[BaseException] = []
        self.whole = 0  # batches without a failed item in a row
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                begin = time.monotonic()
                outcomes = self._batch(begin + SECONDS)
                took = time.monotonic() - begin
                self.slowest = max(self.slowest, took)
                assert took < SECONDS + SLACK_S
                self._check(outcomes)
                self.whole = self.whole + 1 if all(outcome.stored for outcome in outcomes) else 0
                self.count += 1
        except BaseException as error:
            self.errors.append(error)

    def wait_for(self, more: int) -> None:
        until = self.count + more
        wait_until(lambda: bool(self.errors) or self.count >= until, "batches go on")

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        if self.errors:
            raise self.errors[0]


def reading(store: Store, records: dict[Key, bytes]) -> Callable[[float], Sequence[Outcome]]:
    spec = opaque_spec(SIZE)

    def batch(deadline: float) -> Sequence[Outcome]:
        memory = [bytearray(SIZE) for _ in records]
        wants = [Want(each, memoryview(dst), spec) for each, dst in zip(records, memory, strict=True)]
        outcomes = store.submit_get(wants, deadline=deadline).result()
        for dst, value, outcome in zip(memory, records.values(), outcomes, strict=True):
            assert not outcome.ok or dst == value, "wrong bytes"
        return outcomes

    return batch


def items(records: dict[Key, bytes]) -> list[Item]:
    spec = opaque_spec(SIZE)
    return [Item(each, spec.split(memoryview(value)), spec) for each, value in records.items()]


def test_without_replicas_a_node_that_hangs_costs_its_share_of_each_batch_and_no_more(
    nodes: list[NodeProcess],
) -> None:
    with opened(nodes, "replicas=1") as store:
        records = {each: data(SIZE, each) for each in keys(48)}
        assert all(outcome.ok for outcome in store.put_many(records))
        owner = Placement([node.address for node in nodes])
        mine = [owner.order(each)[0] == 1 for each in records]
        assert 5 < sum(mine) < 43

        def check(outcomes: Sequence[Outcome]) -> None:
            for its, outcome in zip(mine, outcomes, strict=True):
                assert outcome.ok or its, f"a record of a living node: {outcome}"
                assert outcome.ok or outcome.status is Status.MISS or isinstance(outcome.error, TransientError)

        load = Load(reading(store, records), check)
        try:
            load.wait_for(5)
            nodes[1].stop()
            wait_until(lambda: bool(load.errors) or down(store) == 1, "the node is found to hang")
            load.wait_for(5)
            assert load.whole == 0
            nodes[1].go_on()
            wait_until(lambda: bool(load.errors) or load.whole >= 5, "the node is used again by itself")
        finally:
            load.stop()
        assert load.slowest > SECONDS / 2  # it did hang


def test_without_replicas_puts_of_the_others_are_stored(nodes: list[NodeProcess]) -> None:
    owner = Placement([node.address for node in nodes])
    with opened(nodes, "replicas=1") as store:
        batches: list[dict[Key, bytes]] = []

        def batch(deadline: float) -> Sequence[Outcome]:
            some = [key(f"{len(batches)}/{number}") for number in range(24)]
            batches.append({each: data(SIZE, each) for each in some})
            return store.submit_put(items(batches[-1]), priority=Priority.DEMAND, deadline=deadline).result()

        def check(outcomes: Sequence[Outcome]) -> None:
            for each, outcome in zip(batches[-1], outcomes, strict=True):
                if owner.order(each)[0] != 1:
                    assert outcome.stored, f"a record of a living node: {outcome}"
                else:
                    assert outcome.stored or isinstance(outcome.error, TransientError)

        load = Load(batch, check)
        try:
            load.wait_for(5)
            nodes[1].stop()
            wait_until(lambda: bool(load.errors) or down(store) == 1, "the node is found to hang")
            load.wait_for(5)
            assert load.whole == 0
            nodes[1].go_on()
            wait_until(lambda: bool(load.errors) or load.whole >= 5, "the node is used again by itself")
        finally:
            load.stop()
        assert load.slowest > SECONDS / 2
        whole = {each: value for some in batches[-5:] for each, value in some.items()}
        assert store.get_many([*whole]) == [*whole.values()]


def test_with_replicas_a_node_that_hangs_is_hedged_at_once(nodes: list[NodeProcess]) -> None:
    """Also if every batch has another size. Without a second request each read of it would last for half of the time,
    twenty seconds."""
    picks = random.Random(7)
    with opened(nodes, "replicas=2") as store:
        records = {each: data(SIZE, each) for each in keys(60)}
        assert all(outcome.ok for outcome in store.put_many(records))
        pool = pool_of(store)

        def read(count: int) -> float:
            for node in pool.pool.now.nodes:
                node._pace = 0.0  # nobody is avoided for having been slow: each key is read from the first of its nodes
            some = picks.sample([*records], count)
            begin = time.monotonic()
            outcomes = reading(store, {each: records[each] for each in some})(begin + 40.0)
            assert all(outcome.ok for outcome in outcomes)
            return time.monotonic() - begin

        for _ in range(80):
            read(picks.randint(6, 60))
        for reader in pool.pool.now.readers:
            assert isinstance(reader, HedgedBackend)
            reader._budget.refund(64)  # as after a longer time, also if this machine made every read look slow
        nodes[1].stop()
        assert read(60) < 15.0
        hedged = pool.metrics.value("kvstore_hedged_reads_total", f"node {nodes[1].address}", "get", "won")
        assert hedged > 0
        assert max(read(60) for _ in range(10)) < 15.0
        nodes[1].go_on()
        read(60)
