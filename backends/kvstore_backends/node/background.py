"""Threads of a pool of nodes: a few that wait for work, and those over which a call fans out."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.wrappers.hedging import Workers

__all__ = ["Background", "run_all"]

logger = logging.getLogger("kvstore.node")

_T = TypeVar("_T")


class Background:
    """A daemon thread, started by the first `wake`, that calls `work` when it is woken or its time has come.

    Args:
        work: returns the seconds until it wants to be called again; math.inf: not before it is woken. What it raises
            is logged, and it is called again after a second.
    """

    def __init__(self, work: Callable[[], float], name: str) -> None:
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self.closed = False

    def wake(self) -> None:
        self._woken.set()
        if self._thread is not None or self.closed:
            return
        with self._lock:
            if self._thread is None and not self.closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads: the next one who wakes tries again
                    return
                self._thread = thread

    def _run(self) -> None:
        wait = 0.0
        while True:
            self._woken.wait(None if wait == math.inf else min(wait, threading.TIMEOUT_MAX))
            self._woken.clear()
            if self.closed:
                return
            try:
                wait = self._work()
            except Exception:
                logger.exception("%s failed", self._name)
                wait = 1.0

    def close(self) -> None:
        """The thread ends with what it does just now. Does not wait."""
        with self._lock:
            self.closed = True
        self._woken.set()

    def join(self, timeout: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


def run_all(workers: Workers, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
    """Run all tasks and return what they returned, in order: the first in the calling thread, the others in workers as
    long as there are any free, the rest in the calling thread too. Raises what the first one to fail raised, when all
    have ended."""
    if len(tasks) == 1:
        return [tasks[0]()]
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []
    done = threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            errors.append(error)
        finally:
            done.release()

    mine = [index for index in range(len(tasks)) if not index or not workers.submit(functools.partial(run, index))]
    for index in mine:
        run(index)
    for _ in tasks:
        done.acquire()
    if errors:
        raise errors[0]
    return results
