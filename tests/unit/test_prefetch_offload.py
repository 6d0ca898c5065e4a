"""The three pointers into the free list, against the simplest model of it that is obviously right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.prefetch import OffloadWindow, PageOffloader
from tests.faults.store_support import until


class Pointers(RuleBasedStateMachine):
    """The model: a list of pages, each untouched, being copied, or copied; the front is allocated."""

    @initialize(window=st.integers(1, 6), total=st.integers(0, 20))
    def begin(self, window: int, total: int) -> None:
        self.real = OffloadWindow(window, total)
        self.window = window
        self.pages = [False] * total  # copied or not, from the front of the free list on
        self.allocated = 0
        self.intended = min(window, total)  # so many of them are copied or being copied

    @rule(count=st.integers(0, 8))
    def free(self, count: int) -> None:
        self.real.free(count)
        self.pages += [False] * count
        self.intended = max(self.intended, min(self.window, len(self.pages)))

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        todo = self.intended - sum(self.pages)
        count = data.draw(st.integers(0, todo))
        self.real.copied(count)
        done = sum(self.pages)
        self.pages[done : done + count] = [True] * count
        with pytest.raises(ConfigError):
            self.real.copied(todo - count + 1)

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > len(self.pages):
            with pytest.raises(PoolExhausted):
                self.real.demand(count)
            return
        may = all(self.pages[:count])
        assert self.real.demand(count) is may  # exactly when all of them are copied
        self.intended = max(self.intended, count)
        if not may:
            with pytest.raises(ConfigError, match="before they are copied"):
                self.real.take(count)
            return
        self.real.take(count)
        del self.pages[:count]
        self.allocated += count
        self.intended = max(self.intended - count, min(self.window, len(self.pages)))  # what is copied stays so

    @rule()
    def settle(self) -> None:
        """All copies end: current == end, and the window is as wide as it can be."""
        self.real.copied(self.real.end - self.real.current)
        self.pages[: self.intended] = [True] * self.intended
        assert self.real.current == self.real.end
        assert self.real.end - self.real.start >= min(self.window, len(self.pages))

    @invariant()
    def as_the_model(self) -> None:
        if not hasattr(self, "real"):
            return
        real = self.real
        assert 0 <= real.start <= real.current <= real.end <= real.total
        assert real.start == self.allocated
        assert real.total - real.start == len(self.pages)
        assert real.current - real.start == sum(self.pages)
        assert real.end - real.start == self.intended


TestPointers = Pointers.TestCase
TestPointers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_as_in_the_paper() -> None:
    """k pages: wait until current ≥ start + k, then start += k, end = min(end + k, total)."""
    window = OffloadWindow(4, total=10)
    assert (window.start, window.current, window.end) == (0, 0, 4)
    assert not window.demand(2)
    window.copied(4)
    assert window.demand(3)
    window.take(3)
    assert (window.start, window.current, window.end) == (3, 4, 7)
    window.copied(3)
    window.take(4)
    assert (window.start, window.current, window.end) == (7, 7, 10)
    assert not window.demand(1)


def test_what_makes_no_sense_is_refused() -> None:
    for window, total in ((0, 1), (1, -1)):
        with pytest.raises(ConfigError):
            OffloadWindow(window, total)
    window = OffloadWindow(1, 1)
    for call in (window.free, window.copied, window.demand, window.take):
        with pytest.raises(ConfigError):
            call(-1)


class Mover:
    """Copies when it is told to, in the order it is told."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.waiting: list[tuple[list[int], object]] = []

    def save(self, pages: object, done: object) -> None:
        self.waiting.append((list(pages), done))  # type: ignore[call-overload]

    def finish(self, number: int = 0, error: BaseException | None = None) -> None:
        pages, done = self.waiting.pop(number)
        self.saved += pages
        done(error)  # type: ignore[operator]


def test_no_page_is_handed_out_before_it_was_copied() -> None:
    mover = Mover()
    pages = PageOffloader(range(10), window=3, save=mover.save)
    assert [batch for batch, _ in mover.waiting] == [[0, 1, 2]]
    with pytest.raises(PoolExhausted, match="not copied in time"):
        pages.allocate(1, timeout=0)
    mover.finish()
    assert pages.pointers == (0, 3, 3)
    assert pages.allocate(2) == [0, 1]
    assert pages.pointers == (2, 3, 5)
    assert [batch for batch, _ in mover.waiting] == [[3, 4]]
    assert pages.allocate(1) == [2]
    mover.finish(1)  # [5] before [3, 4]: current does not move over the gap
    assert pages.pointers == (3, 3, 6)
    mover.finish()
    assert pages.pointers == (3, 6, 6)
    with pytest.raises(PoolExhausted, match="11 pages asked for, but only 7 are free"):
        pages.allocate(11)
    pages.free([0, 1])
    assert pages.num_free == 9


def test_more_than_the_window_is_copied_on_demand() -> None:
    mover = Mover()
    pages = PageOffloader(range(10), window=2, save=mover.save)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(pages.allocate(7)))
    thread.start()
    until(lambda: len(mover.waiting) == 2)
    while mover.waiting:
        mover.finish()
    thread.join(20)
    assert got == [list(range(7))]
    assert set(got[0]) <= set(mover.saved)


def test_a_large_allocation_that_was_given_up_leaves_the_pointers_right() -> None:
    """What it had begun to copy is still under way when a smaller one succeeds."""
    batches: list[tuple[Any, Callable[..., None]]] = []
    free = PageOffloader(range(20), window=2, save=lambda pages, done: batches.append((list(pages), done)))
    with pytest.raises(PoolExhausted, match="in time"):
        free.allocate(10, timeout=0)
    assert free.pointers == (0, 0, 10)
    batches.pop(0)[1]()
    assert free.allocate(1, timeout=0) == [0]
    assert free.pointers == (1, 2, 10)
    batches.pop(0)[1]()
    assert free.pointers == (1, 10, 10)
    assert free.allocate(9, timeout=0) == list(range(1, 10))
    assert free.pointers == (10, 10, 12)  # and the window is as wide as it was


def test_a_save_that_raises_loses_its_pages_and_blocks_nobody() -> None:
    def save(pages: Sequence[int], done: Callable[..., None]) -> None:
        if pages[0] == 4:
            done()
        if pages[0] in (0, 4):
            raise OSError("no")
        done()

    free = PageOffloader(range(8), window=2, save=save)
    assert [free.allocate(2, timeout=0) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert free.lost == 2


def test_pages_whose_copy_failed_are_lost_but_free() -> None:
    mover = Mover()
    pages = PageOffloader(range(4), window=4, save=mover.save)
    done = mover.waiting[0][1]
    mover.finish(error=OSError("gone"))
    assert pages.allocate(4) == [0, 1, 2, 3]
    assert pages.lost == 4
    with pytest.raises(ConfigError, match="copied before"):
        done()  # type: ignore[operator]


def test_many_threads_get_every_page_once_and_only_copied_ones() -> None:
    copied: set[int] = set()
    lock = threading.Lock()

    def save(batch: object, done: object) -> None:
        with lock:
            copied.update(batch)  # type: ignore[call-overload]
        done()  # type: ignore[operator]

    pages = PageOffloader(range(200), window=5, save=save)
    got: list[int] = []

    def engine(number: int) -> None:
        for turn in range(10):
            taken = pages.allocate(1 + (number + turn) % 3, timeout=20)
            with lock:
                assert set(taken) <= copied
                got.extend(taken)

    threads = [threading.Thread(target=engine, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == len(set(got)) == sum(1 + (n + turn) % 3 for n in range(8) for turn in range(10))
    assert pages.num_free == 200 - len(got)


def test_closing_wakes_who_waits() -> None:
    pages = PageOffloader(range(4), window=2, save=lambda *_: None)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            pages.allocate(1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: pages._waiting)
    pages.close()
    pages.close()
    thread.join(20)
    assert [type(error) for error in raised] == [ClosedError]
    with pytest.raises(ClosedError):
        pages.allocate(0)
