"""Giving a node, in the background, the records that it should hold and another one has."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.backend import Outcome, Read, Write
from kvstore.errors import KVStoreError
from kvstore.keys import Key
from kvstore.metrics import Metrics

from .background import Background
from .node import Node

__all__ = ["Repairer"]

logger = logging.getLogger("kvstore.node")

_QUEUED = 4096
_ROUND = 64  # records per request
_PATIENCE_S = 10.0


class _Repair(NamedTuple):
    key: Key
    target: Node
    sources: tuple[Node, ...]


class Repairer:
    """Copies whole records, each read in one request and so from one version, from the first source that has it to its
    target. A target that got the record meanwhile says EXISTS, and keeps what it has. The queue is bounded: what does
    not fit is dropped, and comes again with the next read that misses it.

    Args:
        name: of the pool, for metrics and the thread.
        rate: bytes per second at most, on average.
        memory: bytes held at a time; a larger record is not repaired.
        metrics: counts `kvstore_node_repairs_total`.
    """

    def __init__(self, name: str, *, rate: int, memory: int, metrics: Metrics) -> None:
        self._name = name
        self._rate = rate
        self._memory = memory
        self._metrics = metrics
        self._lock = threading.Lock()
        self._queue: deque[_Repair] = deque()
        self._queued: set[tuple[Key, str]] = set()
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = Background(self._work, "kvstore-node-repair")

    def offer(self, keys: Sequence[Key], target: Node, sources: Sequence[Node]) -> None:
        """`target` lacks records that one of `sources` has. Does not block."""
        dropped = 0
        with self._lock:
            for key in keys:
                mark = (key, target.member.name)
                if mark in self._queued:
                    continue
                if len(self._queue) >= _QUEUED or self._thread.closed:
                    dropped += 1
                    continue
                self._queued.add(mark)
                self._queue.append(_Repair(key, target, tuple(sources)))
            self._idle.clear()
        if dropped:
            self._count("dropped", dropped)
        self._thread.wake()

    def settled(self, timeout: float) -> bool:
        """Wait until nothing is queued or under way; False if that took longer. For tests and tools."""
        return self._idle.wait(timeout)

    def _count(self, result: str, amount: int) -> None:
        self._metrics.add("kvstore_node_repairs_total", self._name, result, amount=amount)

    def _take(self) -> list[_Repair]:
        """Some that have target and sources in common."""
        with self._lock:
            if not self._queue:
                self._idle.set()
                return []
            some = [self._queue.popleft()]
            first = some[0]
            while self._queue and len(some) < _ROUND:
                following = self._queue[0]
                if following.target is not first.target or following.sources != first.sources:
                    break
                some.append(self._queue.popleft())
            self._queued -= {(each.key, each.target.member.name) for each in some}
            return some

    def _work(self) -> float:
        while not self._stop.is_set():
            some = self._take()
            if not some:
                break
            try:
                moved = self._repair([each.key for each in some], some[0].target, some[0].sources)
            except KVStoreError as error:  # a node that left the pool meanwhile
                logger.debug("repair given up: %s", error)
                self._count("failed", len(some))
                moved = 0
            if moved:
                self._stop.wait(moved / self._rate)
        return float("inf")

    def _repair(self, keys: Sequence[Key], target: Node, sources: Sequence[Node]) -> int:
        """Returns the bytes moved."""
        left, moved = list(keys), 0
        for source in sources:
            if not left or self._stop.is_set():
                break
            there = source.stat(left, deadline=time.monotonic() + _PATIENCE_S)
            found = [(key, outcome.nbytes) for key, outcome in zip(left, there, strict=True) if outcome.ok]
            left = [key for key, outcome in zip(left, there, strict=True) if not outcome.ok]
            begin = 0
            while begin < len(found):
                end, total = begin, 0
                while end < len(found) and total + found[end][1] <= self._memory:
                    total += found[end][1]
                    end += 1
                if end == begin:
                    self._count("too_large", 1)
                    begin += 1
                    continue
                moved += self._copy(found[begin:end], total, source, target)
                begin = end
        if left:
            self._count("gone", len(left))
        return moved

    def _copy(self, found: Sequence[tuple[Key, int]], total: int, source: Node, target: Node) -> int:
        memory, reads, at = memoryview(bytearray(total)), [], 0
        for key, nbytes in found:
            reads.append(Read(key, memory[at : at + nbytes]))
            at += nbytes
        outcomes = source.get_into(reads, deadline=time.monotonic() + _PATIENCE_S)
        writes = [
            Write(read.key, [read.dst])
            for read, outcome in zip(reads, outcomes, strict=True)
            if outcome.ok and outcome.nbytes == len(read.dst)
        ]
        stored: Sequence[Outcome] = target.put(writes, deadline=time.monotonic() + _PATIENCE_S) if writes else ()
        good = sum(outcome.stored for outcome in stored)
        nbytes = sum(outcome.nbytes for outcome in stored)
        self._metrics.update((
            ("kvstore_node_repairs_total", (self._name, "ok"), good),
            ("kvstore_node_repairs_total", (self._name, "failed"), len(found) - good),
            ("kvstore_node_repair_bytes_total", (self._name,), nbytes),
        ))  # fmt: skip
        return nbytes

    def close(self) -> None:
        """What is queued is dropped. Does not wait."""
        self._stop.set()
        self._thread.close()
        with self._lock:
            self._queue.clear()
            self._queued.clear()
            self._idle.set()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)
