"""The parts of `HedgedBackend`: latencies, budget, threads."""

from __future__ import annotations

import threading
import time

from kvstore.wrappers.hedging import Budget, LatencyTable, Workers


def test_the_quantile_is_of_recent_latencies_of_that_size() -> None:
    table = LatencyTable(0.95, 20)
    for at in range(19):
        table.note("get", 1000, float(at))
    assert table.quantile("get", 1000) is None
    table.note("get", 1000, 19.0)
    assert table.quantile("get", 1000) == 19.0
    assert table.quantile("get", 1 << 20) is None
    assert table.quantile("stat", 1000) is None
    for _ in range(300):
        table.note("get", 1000, 0.5)
    assert table.quantile("get", 1000) == 0.5  # the old ones are forgotten
    assert [LatencyTable.size_class(size) for size in (0, 1, 3, 4, 15, 16, 1 << 20)] == [0, 1, 1, 2, 2, 3, 11]


def test_the_budget_is_a_share_with_bounded_savings() -> None:
    budget = Budget(0.05, burst=10)
    assert not budget.pay(1)
    for _ in range(20):
        budget.earn(1)
    assert budget.covers(1)
    assert budget.pay(1)
    assert not budget.pay(1)
    for _ in range(10_000):
        budget.earn(1)
    paid = 0
    while budget.pay(1):
        paid += 1
    assert paid == 10


def test_workers_are_reused_bounded_and_stopped() -> None:
    workers = Workers(2, "test")
    gate, begun, done = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    names: list[str] = []

    def task() -> None:
        names.append(threading.current_thread().name)
        begun.release()
        gate.wait(30)
        done.release()

    assert workers.submit(task)
    assert workers.submit(task)
    assert not workers.submit(task)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    gate.set()
    for _ in range(2):
        assert done.acquire(timeout=30)
    end = time.monotonic() + 30
    while not workers.submit(task):  # a thread is free a moment after its task has ended
        assert time.monotonic() < end
    assert done.acquire(timeout=30)
    assert len(set(names)) == 2
    workers.stop()
    workers.stop()
    assert not workers.submit(task)
    assert workers.join(30)
