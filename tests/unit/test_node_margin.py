"""What nodes of a pool leave of a deadline, so that one that is silent takes nothing from the others."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.backend import NO_DEADLINE, Outcome, Read, Status, Write
from kvstore.errors import TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.placement import Placement
from kvstore.testing import DictBackend
from kvstore.wrappers import wrap
from kvstore.wrappers.base import LocalWait
from kvstore_backends.node import NodeBackend
from kvstore_backends.node.errors import NodeSilent
from kvstore_backends.node.margin import Margin
from tests.node_support import keys, settings, soon, statuses


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("left", "margin"),
    [(30.0, 0.05), (1.0, 0.05), (0.4, 0.04), (0.1, 0.02), (0.03, 0.015), (0.002, 0.001)],
)
def test_a_tenth_is_left_at_most_50_ms_but_what_handing_over_takes(left: float, margin: float) -> None:
    clock = Clock()
    assert Margin(clock).before(clock.now + left) == pytest.approx(clock.now + left - margin)


def test_without_a_deadline_or_after_it_there_is_no_margin() -> None:
    clock = Clock()
    for deadline in (math.inf, clock.now, clock.now - 1):
        assert Margin(clock).before(deadline) == deadline


def test_what_handing_over_took_is_left_the_next_time() -> None:
    clock = Clock()
    margin = Margin(clock)

    def ends(late: float) -> None:
        until = clock.now
        clock.now += late
        margin.note(until)
        clock.now += 1.0

    ends(0.2)
    assert margin.before(clock.now + 2.0) == pytest.approx(clock.now + 1.7)  # half as much again
    assert margin.before(clock.now + 0.4) == pytest.approx(clock.now + 0.2)  # never more than half
    for _ in range(100):
        ends(0.0001)
    assert margin.before(clock.now + 0.02) == pytest.approx(clock.now + 0.018)  # forgotten
    margin.note(clock.now + 1.0)  # in time: says nothing
    assert margin.before(clock.now + 0.02) == pytest.approx(clock.now + 0.018)


class Scripted(DictBackend):
    """In place of a node's client: may be silent until each call's deadline, as a node that hangs."""

    def __init__(self, silent: threading.Event) -> None:
        super().__init__()
        self.silent = silent
        self.deadlines: list[float] = []

    def _slept(self, deadline: float, count: int) -> list[Outcome] | None:
        self.deadlines.append(deadline)
        if not self.silent.is_set():
            return None
        time.sleep(max(0.0, deadline - time.monotonic()))
        return [Outcome.failed(TransientError("the deadline passed"))] * count

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._slept(deadline, len(keys)) or super().stat(keys, deadline=deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return self._slept(deadline, len(reads)) or super().get_into(reads, deadline=deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return self._slept(deadline, len(writes)) or super().put(writes, deadline=deadline)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._slept(deadline, len(keys)) or super().delete(keys, deadline=deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._slept(deadline, len(keys)) or super().quarantine(keys, deadline=deadline)


NAMES = ["a:1", "b:1", "c:1"]


@contextlib.contextmanager
def scripted_pool(count: int = 3, **options: object) -> Iterator[tuple[NodeBackend, list[Scripted]]]:
    """A pool whose clients are in this process; none of them is silent yet."""

    def nobody(member: object, deadline: float) -> None:
        raise TimeoutError("not needed")

    backend = NodeBackend(settings(NAMES[:count], read_repair=False, **options), dial=nobody)  # type: ignore[arg-type]
    with contextlib.closing(backend):
        clients = [Scripted(threading.Event()) for _ in range(count)]
        for node, client in zip(backend.pool.now.nodes, clients, strict=True):
            node._breaker._inner = client
        yield backend, clients


def operations(backend: object, some: Sequence[Key]) -> dict[str, Callable[[float], list[Outcome]]]:
    at: object = backend
    return {
        "stat": lambda deadline: at.stat(some, deadline=deadline),  # type: ignore[attr-defined]
        "get": lambda deadline: at.get_into(  # type: ignore[attr-defined]
            [Read(each, memoryview(bytearray(1))) for each in some], deadline=deadline
        ),
        "put": lambda deadline: at.put(  # type: ignore[attr-defined]
            [Write(each, [memoryview(b"x")]) for each in some], deadline=deadline
        ),
        "quarantine": lambda deadline: at.quarantine(some, deadline=deadline),  # type: ignore[attr-defined]
        "delete": lambda deadline: at.delete(some, deadline=deadline),  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("operation", ["stat", "get", "put", "quarantine", "delete"])
def test_nodes_of_several_end_before_the_caller_goes(operation: str) -> None:
    """And the share of the one that is silent is not tried again in what is left of the time: the standard wrappers
    would, and the others' answers would come too late."""
    some = keys(30)
    owner = Placement(NAMES)
    with scripted_pool() as (backend, clients):
        if operation != "put":
            assert statuses(operations(backend, some)["put"](soon())) == [Status.OK] * 30
        clients[1].silent.set()
        whole = wrap(backend, {}, metrics=Metrics())
        for client in clients:
            client.deadlines.clear()
        deadline = time.monotonic() + 0.5
        outcomes = operations(whole, some)[operation](deadline)
        for each, outcome in zip(some, outcomes, strict=True):
            if owner.order(each)[0] == 1:
                assert isinstance(outcome.error, NodeSilent)
                assert isinstance(outcome.error, TransientError)
                assert isinstance(outcome.error, LocalWait)  # one node of three says nothing about the pool
            else:
                assert outcome.ok
        for client in clients:
            (asked,) = client.deadlines
            assert deadline - 0.3 <= asked <= deadline - 0.02 + 1e-6


def test_one_node_alone_has_all_of_the_time() -> None:
    """Nobody else's answer waits for it."""
    with scripted_pool(1) as (backend, (client,)):
        for call in operations(backend, keys(3)).values():
            call(deadline := soon())
            assert client.deadlines.pop() == deadline


def test_no_deadline_stays_none() -> None:
    with scripted_pool() as (backend, clients):
        assert statuses(operations(backend, keys(9))["put"](NO_DEADLINE)) == [Status.OK] * 9
        assert {deadline for client in clients for deadline in client.deadlines} == {NO_DEADLINE}


def test_a_put_whose_first_replica_is_silent_has_time_for_the_next() -> None:
    """And is not sent to the silent one again."""
    some = keys(12)
    order = {each: Placement(NAMES, replicas=2).order(each) for each in some}
    with scripted_pool(replicas=2) as (backend, clients):
        clients[1].silent.set()
        begin = time.monotonic()
        outcomes = operations(backend, some)["put"](begin + 0.6)
        assert statuses(outcomes) == [Status.OK] * 12
        (first,) = [at for at, client in enumerate(clients) if client.silent.is_set()]
        asked = clients[first].deadlines
        assert any(places[0] == 1 for places in order.values())
        assert len(asked) == 2  # as the first of some, as the second of others
        assert asked[0] <= begin + 0.35
        for each, places in order.items():
            for at in places:
                assert statuses(DictBackend.stat(clients[at], [each], deadline=soon())) == [
                    Status.MISS if at == 1 else Status.OK
                ]
