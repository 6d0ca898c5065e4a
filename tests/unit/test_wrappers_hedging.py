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


def test_a_size_of_which_little_is_known_is_judged_by_its_neighbours() -> None:
    """The parts of batches that go to one node have many sizes: without that most of them would never be hedged."""
    table = LatencyTable(0.95, 32)
    assert [table.size_class(size) for size in (256 << 10, 1 << 20, 4 << 20, 64 << 20)] == [10, 11, 12, 14]
    for _ in range(20):
        table.note("get", 1 << 20, 0.002)
    for _ in range(11):
        table.note("get", 4 << 20, 0.005)
    assert table.quantile("get", 1 << 20) is None  # 31 together
    table.note("get", 4 << 20, 0.005)
    assert table.quantile("get", 1 << 20) == 0.005  # a smaller one takes no longer
    assert table.quantile("get", 4 << 20) == 0.005
    assert table.quantile("get", 16 << 20) == 2 * 0.005  # a larger one takes longer
    assert table.quantile("get", 256 << 10) == 0.005
    assert table.quantile("get", 64 << 20) is None  # too far away
    assert table.quantile("stat", 1 << 20) is None
    for _ in range(32):
        table.note("get", 1 << 20, 0.001)
    assert table.quantile("get", 1 << 20) == 0.002  # its own, now that there are enough
    assert table.quantile("get", 256 << 10) == 0.002  # and that of the neighbour is taken anew


def test_half_of_the_savings_are_kept_for_what_is_urgent() -> None:
    budget = Budget(0.05, burst=10)
    for _ in range(10_000):
        budget.earn(1)
    paid = 0
    while budget.pay(1, urgent=False):
        paid += 1
    assert paid == 5
    assert budget.covers(5)
    assert budget.pay(5)
    assert not budget.pay(1)
    budget.earn(1000)
    assert not budget.pay(50, urgent=False)  # eight batches of this size can be saved for; half of that is kept
    for _ in range(200):
        budget.earn(1000)
    assert sum(budget.pay(1000, urgent=False) for _ in range(8)) == 4
    assert sum(budget.pay(1000) for _ in range(8)) == 4


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
