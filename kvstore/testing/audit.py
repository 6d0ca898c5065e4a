"""`LeakAudit`: what a test must leave behind: nothing. For a fixture that surrounds every test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from kvstore.buffers import BufferPool

__all__ = ["LeakAudit", "track_pools"]


@contextmanager
def track_pools() -> Iterator[list[BufferPool]]:
    """Within the block, every `BufferPool` that is made is added to the list."""
    pools: list[BufferPool] = []
    original = BufferPool.__init__

    def recording(self: BufferPool, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pools.append(self)

    BufferPool.__init__ = recording  # type: ignore[method-assign]
    try:
        yield pools
    finally:
        BufferPool.__init__ = original  # type: ignore[method-assign]


class LeakAudit:
    """Threads, file descriptors and child processes of this process, now; compared with later by `problems`.

        audit = LeakAudit()
        with track_pools() as pools: ...
        assert not audit.problems(pools)

    The helper process of `multiprocessing`, which lives as long as the interpreter, is not counted.
    """

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.descriptors = _descriptors()
        self.children = _children()

    def problems(self, pools: list[BufferPool] | None = None, *, settle_s: float = 5.0) -> list[str]:
        """What is not as it was, one sentence each; an empty list if all is well.

        Args:
            pools: pools that must have nothing in use and nothing pinned.
            settle_s: seconds to give threads that are about to end. Descriptors and children are looked at after
                that, once, and once more after a garbage collection.
        """
        found = []
        end = time.monotonic() + settle_s
        for thread in [t for t in threading.enumerate() if t not in self.threads]:
            if not _joined(thread, end):
                found.append(f"thread {thread.name!r} is still running")
        if _descriptors() != self.descriptors or any(_busy(pool) for pool in pools or ()):
            gc.collect()
        now = _descriptors()
        for fd in sorted(now.keys() | self.descriptors.keys()):
            before, after = self.descriptors.get(fd), now.get(fd)
            if before != after:
                found.append(f"file descriptor {fd} was {before or 'closed'} and is {after or 'closed'}")
        for pid in sorted(_children() - self.children):
            found.append(f"child process {pid} was not waited for")
        for pool in pools or ():
            if _busy(pool):
                found.append(f"a buffer pool is in use: {pool.stats()}")
        return found


def _joined(thread: threading.Thread, end: float) -> bool:
    while True:
        try:
            thread.join(max(0.0, end - time.monotonic()))
        except RuntimeError:  # it is being started: not yet to be joined, and not yet alive
            if time.monotonic() >= end:
                return False
            time.sleep(0.001)
        else:
            return not thread.is_alive()


def _busy(pool: BufferPool) -> bool:
    stats = pool.stats()
    return bool(stats.in_use or stats.pinned)


def _tracker(name: str) -> Any:
    return getattr(getattr(resource_tracker, "_resource_tracker", None), name, None)


def _descriptors() -> dict[int, str]:
    """Open descriptors and what they are."""
    found = {}
    for text in os.listdir("/proc/self/fd"):
        try:
            found[int(text)] = os.readlink(f"/proc/self/fd/{text}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    found.pop(_tracker("_fd") or -1, None)
    return found


def _children() -> set[int]:
    """Process ids of all children, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all: the usual case, without a walk through /proc
        return set()
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if parent == os.getpid():
                found.add(int(name))
    return found - {_tracker("_pid")}
