"""Completion: one handle to block on, await, be called back from, or poll; and what cancelling means."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import select
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore.completion import CancelledError, Completion, CompletionQueue
from kvstore.errors import ClosedError

PATIENCE = 10.0  # seconds; only a broken implementation waits so long


FINISHES: list[Callable[[Completion[int]], object]] = [
    lambda c: c.set_result(1),
    lambda c: c.set_exception(ClosedError("x")),
    lambda c: c.cancel(),
]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_result() -> None:
    completion: Completion[int] = Completion()
    assert not completion.done()
    assert completion.set_result(7)
    assert completion.done()
    assert completion.result() == completion.result(0) == completion.result(math.inf) == 7
    assert not completion.cancelled()
    assert Completion.of("x").result(0) == "x"


def test_only_the_first_outcome_counts() -> None:
    for first in ("result", "error", "cancel"):
        completion: Completion[int] = Completion()
        acts: dict[str, Callable[[], bool]] = {
            "result": lambda c=completion: c.set_result(1),  # type: ignore[misc]
            "error": lambda c=completion: c.set_exception(ClosedError("no")),  # type: ignore[misc]
            "cancel": completion.cancel,
        }
        assert acts[first]()
        for act in acts.values():  # a second cancel is not the one that cancelled it, either
            assert act() is False
        assert completion.cancelled() is (first == "cancel")


def test_errors_and_timeouts() -> None:
    completion: Completion[int] = Completion()
    for timeout in (0, 0.001, -1.0):
        with pytest.raises(TimeoutError):
            completion.result(timeout)
    assert not completion.done()
    completion.set_exception(ClosedError("the store is closed"))
    with pytest.raises(ClosedError, match="the store is closed"):
        completion.result(0)
    cancelled: Completion[int] = Completion()
    cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result()


@pytest.mark.parametrize("timeout", [None, math.inf, PATIENCE, 1e12])
def test_a_waiting_thread_wakes(timeout: float | None) -> None:
    completion: Completion[int] = Completion()
    got: list[int] = []
    waiter = in_thread(lambda: got.append(completion.result(timeout)))
    completion.set_result(5)
    waiter.join(PATIENCE)
    assert got == [5]


def test_callbacks_run_once_in_order_with_the_completion() -> None:
    completion: Completion[int] = Completion()
    seen: list[tuple[str, object]] = []
    completion.add_done_callback(lambda c: seen.append(("early", c)))
    completion.add_done_callback(lambda c: seen.append(("second", c.result(0))))
    assert not seen
    completion.set_result(3)
    completion.add_done_callback(lambda c: seen.append(("late", c)))
    assert seen == [("early", completion), ("second", 3), ("late", completion)]


def test_a_failing_callback_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    completion: Completion[int] = Completion()
    seen: list[int] = []

    def broken(_: Completion[int]) -> None:
        raise ValueError("broken callback")

    completion.add_done_callback(broken)
    completion.add_done_callback(lambda c: seen.append(c.result(0)))
    with caplog.at_level(logging.CRITICAL + 1, logger="concurrent.futures"):
        assert completion.set_result(1)
        completion.add_done_callback(broken)
    assert seen == [1]


def test_cancel_runs_callbacks_and_the_hook_once(caplog: pytest.LogCaptureFixture) -> None:
    completion: Completion[int] = Completion()
    calls: list[str] = []
    completion.add_done_callback(lambda c: calls.append(f"callback {c.cancelled()} {c.cancel()}"))
    completion.on_cancel(lambda: calls.append(f"hook {completion.cancel()}"))  # coming back must not lock up
    assert completion.cancel()
    assert completion.cancel() is False
    assert calls == ["callback True False", "hook False"]
    assert not caplog.records


def test_a_hook_set_after_the_cancel_still_runs() -> None:
    """The caller may be faster than the scheduler that installs the hook; its I/O must be dropped all the same."""
    completion: Completion[int] = Completion()
    completion.cancel()
    calls: list[str] = []
    completion.on_cancel(lambda: calls.append("hook"))
    assert calls == ["hook"]
    done = Completion.of(1)
    done.on_cancel(lambda: calls.append("wrong"))
    done.cancel()
    assert calls == ["hook"]


def test_the_hook_is_let_go_when_there_is_a_result() -> None:
    class Big:
        def drop(self) -> None: ...

    for finish in FINISHES:
        completion: Completion[int] = Completion()
        big = Big()
        alive = weakref.ref(big)
        completion.on_cancel(big.drop)
        finish(completion)
        del big
        gc.collect()
        assert alive() is None


def test_racing_outcomes_have_one_winner() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(300):
            completion: Completion[str] = Completion()
            hooks: list[int] = []
            barrier = threading.Barrier(4)

            def act(kind: str, c: Completion[str] = completion, b: threading.Barrier = barrier) -> bool:
                b.wait(PATIENCE)
                return c.cancel() if kind == "cancel" else c.set_result(kind)

            def hook(c: Completion[str] = completion, b: threading.Barrier = barrier, h: list[int] = hooks) -> bool:
                b.wait(PATIENCE)
                c.on_cancel(lambda: h.append(1))
                return False

            kinds = ("cancel", "a", "cancel")
            work = [*(threads.submit(act, kind) for kind in kinds), threads.submit(hook)]
            assert sum(w.result(PATIENCE) for w in work) == 1
            assert len(hooks) == completion.cancelled()


# --- settled ---------------------------------------------------------------------------------------------------------


def test_settled_with_the_result_unless_late_io_is_expected() -> None:
    completion: Completion[int] = Completion()
    assert not completion.settled()
    assert not completion.settled(0.001)
    completion.set_result(1)
    assert completion.settled()
    cancelled: Completion[int] = Completion()
    cancelled.cancel()
    assert cancelled.settled()
    assert cancelled.settled(None)
    failed: Completion[int] = Completion()
    failed.set_exception(ClosedError("x"))
    assert failed.settled(math.inf)


def test_late_io_keeps_it_unsettled_after_a_deadline_and_after_a_cancel() -> None:
    for finish in FINISHES:
        completion: Completion[int] = Completion()
        ended = completion.expect_late_io()
        assert completion.expect_late_io() is ended
        finish(completion)
        assert completion.done()
        assert not completion.settled()
        assert not completion.settled(0.001)
        ended.set()
        assert completion.settled()
        assert completion.settled(math.inf)


def test_io_that_ended_before_the_result_does_not_settle_it() -> None:
    completion: Completion[int] = Completion()
    completion.expect_late_io().set()
    assert not completion.settled()  # the batch goes on: there may be more I/O
    completion.set_result(1)
    assert completion.settled()


def test_late_io_announced_while_somebody_waits_is_waited_for() -> None:
    """Fault 2: the waiter sleeps on the result; at the deadline the scheduler announces late I/O, then resolves."""
    completion: Completion[int] = Completion()
    waiting, woken = threading.Event(), threading.Event()
    answer: list[bool] = []
    original = completion._future.exception

    def exception(timeout: float | None = None) -> BaseException | None:
        waiting.set()
        try:
            return original(timeout)
        finally:
            woken.set()

    completion._future.exception = exception  # type: ignore[method-assign]
    waiter = in_thread(lambda: answer.append(completion.settled(None)))
    assert waiting.wait(PATIENCE)
    ended = completion.expect_late_io()
    completion.set_result(1)
    assert woken.wait(PATIENCE)
    waiter.join(0.05)  # a wrong answer would come now
    assert not answer
    assert not completion.settled(0)
    ended.set()
    waiter.join(PATIENCE)
    assert answer == [True]


# --- await -----------------------------------------------------------------------------------------------------------


def test_await_a_result_an_error_and_a_done_one() -> None:
    async def main() -> None:
        assert await Completion.of(4) == 4
        later: Completion[int] = Completion()
        thread = in_thread(lambda: later.set_result(5))
        assert await later == 5
        thread.join()
        failing: Completion[int] = Completion()
        asyncio.get_running_loop().call_soon(failing.set_exception, ClosedError("gone"))
        with pytest.raises(ClosedError, match="gone"):
            await failing
        several = [Completion[int]() for _ in range(50)]
        thread = in_thread(lambda: [c.set_result(i) for i, c in enumerate(several)])
        assert await asyncio.gather(*several) == list(range(50))
        thread.join()

    asyncio.run(main())


def test_a_cancelled_task_cancels_what_it_awaits() -> None:
    async def main() -> None:
        completion: Completion[int] = Completion()
        calls: list[str] = []
        completion.on_cancel(lambda: calls.append("hook"))

        async def wait() -> int:
            return await completion

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert completion.cancelled()
        assert calls == ["hook"]
        assert not completion.set_result(1)  # the late result finds nobody, without an error

    asyncio.run(main())


def test_wait_for_and_shield() -> None:
    async def main() -> None:
        timed: Completion[int] = Completion()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(timed, 0.01)
        assert timed.cancelled()
        kept: Completion[int] = Completion()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(kept), 0.01)
        assert not kept.cancelled()
        kept.set_result(3)
        assert await kept == 3

    asyncio.run(main())


def test_a_result_that_came_first_is_kept_when_the_task_is_cancelled() -> None:
    """Fault 3: leased buffers in it can still be released by whoever holds the completion."""

    async def main() -> None:
        completion: Completion[list[str]] = Completion()

        async def wait() -> list[str]:
            return await completion

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        completion.set_result(["lease"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not completion.cancelled()
        assert completion.result(0) == ["lease"]

    asyncio.run(main())


def test_awaiting_a_completion_cancelled_elsewhere() -> None:
    async def main() -> None:
        completion: Completion[int] = Completion()
        asyncio.get_running_loop().call_soon(completion.cancel)
        with pytest.raises(asyncio.CancelledError):
            await completion
        with pytest.raises(asyncio.CancelledError):
            await completion

    asyncio.run(main())


def test_a_result_after_the_loop_was_closed_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    completion: Completion[int] = Completion()
    loop = asyncio.new_event_loop()

    async def wait() -> int:
        return await asyncio.shield(completion)

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    others = asyncio.all_tasks(loop)  # the shielded one
    loop.close()
    assert completion.set_result(1)
    assert completion.result(0) == 1
    assert not caplog.records
    for other in others:
        other._log_destroy_pending = False  # type: ignore[attr-defined]  # left on purpose


# --- CompletionQueue -------------------------------------------------------------------------------------------------


def readable(queue: CompletionQueue) -> bool:
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    with select.epoll() as epoll:
        epoll.register(queue.fileno(), select.EPOLLIN)
        answers = {bool(select.select([queue], [], [], 0)[0]), bool(poll.poll(0)), bool(epoll.poll(0))}
    assert len(answers) == 1
    return answers.pop()


def test_the_queue_delivers_in_the_order_of_completion() -> None:
    with CompletionQueue() as queue:
        a, b, c = (queue.add(Completion[Any]()) for _ in range(3))
        done = queue.add(Completion.of(0))
        assert readable(queue)
        assert queue.drain() == [done]
        assert not readable(queue)
        assert queue.drain() == []
        b.set_result(1)
        a.set_exception(ClosedError("x"))
        c.cancel()
        assert readable(queue)
        assert queue.drain() == [b, a, c]
        assert not readable(queue)


def test_a_poller_is_woken_by_another_thread_and_loses_nothing() -> None:
    with CompletionQueue() as queue:
        completions = [queue.add(Completion[int]()) for _ in range(2_000)]
        parts = [completions[i::4] for i in range(4)]
        threads = [
            in_thread(lambda part=part: [c.set_result(i) for i, c in enumerate(part)])  # type: ignore[misc]
            for part in parts
        ]
        got: list[Any] = []
        while len(got) < len(completions):
            assert select.select([queue], [], [], PATIENCE)[0]
            got += queue.drain()
        for thread in threads:
            thread.join()
        assert len(set(map(id, got))) == len(completions)
        for part in parts:
            mine = set(map(id, part))
            assert [c for c in got if id(c) in mine] == part
        assert not readable(queue)
        assert queue.drain() == []


def test_a_callback_may_drain() -> None:
    with CompletionQueue() as queue:
        completion = queue.add(Completion[int]())
        got: list[object] = []
        completion.add_done_callback(lambda _: got.extend(queue.drain()))
        completion.set_result(1)
        assert got == [completion]


def test_closing_the_queue() -> None:
    queue = CompletionQueue()
    fd = queue.fileno()
    late = queue.add(Completion[int]())
    done = queue.add(Completion.of(1))
    queue.close()
    queue.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert late.set_result(1)  # dropped silently, and nothing is written to whatever has that number now
    assert queue.drain() == []
    assert done.result() == 1
    with pytest.raises(ClosedError):
        queue.add(Completion[int]())
    with pytest.raises(ClosedError):
        queue.fileno()
    with pytest.raises(ClosedError):
        select.select([queue], [], [], 0)


def test_nothing_is_written_to_a_descriptor_that_was_reused() -> None:
    queue = CompletionQueue()
    fd = queue.fileno()
    late = queue.add(Completion[int]())
    queue.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.dup2(other, fd) if fd != other else None
        late.set_result(1)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
        if fd != other:
            os.close(fd)
