"""`Ahead`: brings into memory what engines said they will need, before they ask for it.

Each engine announces the queue of its scheduler: the keys of the jobs that wait, first to run first. The queues of all
engines are one, job by job in turn. Of it, as much as half of the memory takes is brought up in this order by one
thread; what lies behind that is announced to the hierarchy below, which brings it from afar into the folder. Behind
a record that is nowhere, nothing of that job is looked for. An announcement holds until the next one of the same
engine, or until the connection on which it came ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Hashable, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from kvstore.errors import KVStoreError
from kvstore.keys import Key

from ._memory_store import MemoryStore
from ._node_below import Below
from .node.background import Background

__all__ = ["MOST_ANNOUNCED", "Ahead"]

logger = logging.getLogger("kvstore.node")

MOST_ANNOUNCED = 1 << 14
"""Records of one announcement, and of all together, that are looked at: the first ones."""

_MOST_KEPT = 1 << 18  # records of the queues of all engines
_BATCH = 16
_LOAD_S = 30.0  # for one batch
_ABSENT_S = 5.0  # a record that was nowhere is looked for again after that
_JOIN_S = 2.0


class _Step(NamedTuple):
    key: Key
    job: int


class _Queue(NamedTuple):
    by: object  # what it lasts as long as
    jobs: list[list[Key]]
    size: int  # its records


class Ahead:
    """See the module's docstring.

    Args:
        below: None: nothing can be brought up. The policy of the memory is told of the queue's head all the same, as
            many records as half of the memory takes.
    """

    def __init__(self, store: MemoryStore, below: Below | None) -> None:
        self._store = store
        self._below = below
        self._window = store.pool.nbytes // 2
        self._lock = threading.Lock()
        self._queues: dict[Hashable, _Queue] = {}
        self._version = 0
        self._absent: dict[Key, float] = {}
        self._announced = self._brought = 0
        self._worker = Background(self._work, "kvstore-node-ahead")
        self._closed = False

    def announce(self, who: Hashable, by: object, waiting: Sequence[Sequence[Key]]) -> None:
        """The queue of one engine, which takes the place of its last one; an empty one ends it. Returns at once.

        Args:
            by: what it lasts as long as: its connection.
        """
        queue = _merged([[job for job in waiting if job]])
        with self._lock:
            self._announced += 1
            before = self._queues.pop(who, None)
            size = sum(map(len, queue))
            if queue and size + sum(each.size for each in self._queues.values()) <= _MOST_KEPT:
                self._queues[who] = _Queue(by, queue, size)
            elif before is None:
                return
            self._version += 1
        self._worker.wake()

    def forget(self, by: object) -> None:
        """A connection has ended, and with it what was announced on it."""
        with self._lock:
            theirs = [who for who, queue in self._queues.items() if queue.by is by]
            if not theirs:
                return
            for who in theirs:
                del self._queues[who]
            self._version += 1
        self._worker.wake()

    def counts(self) -> dict[str, int]:
        """`announced`: announcements; `prefetched`: records that were brought into memory by them; `waiting_jobs`."""
        with self._lock:
            jobs = sum(len(queue.jobs) for queue in self._queues.values())
            return {"announced": self._announced, "prefetched": self._brought, "waiting_jobs": jobs}

    def close(self, timeout: float = _JOIN_S) -> None:
        """The thread ends with the batch it is at, for which we wait `timeout` seconds."""
        self._closed = True
        self._worker.close()
        self._worker.join(timeout)

    # The thread.

    def _work(self) -> float:
        with self._lock:
            version = self._version
            queues = [queue.jobs for queue in self._queues.values()]
        jobs = _merged(queues)
        with self._store.lock:
            policy = self._store.policy
            mean = policy.nbytes / len(policy) if len(policy) else 0.0
            policy.announce(_head(jobs, int(self._window / mean)) if mean else jobs)
        if self._below is not None:
            self._bring_up(jobs, version)
        return math.inf

    def _stale(self, version: int) -> bool:
        return self._closed or version != self._version

    def _bring_up(self, jobs: Sequence[Sequence[Key]], version: int) -> None:
        now = time.monotonic()
        self._absent = {key: when for key, when in self._absent.items() if now - when < _ABSENT_S}
        steps = [_Step(key, number) for number, job in enumerate(jobs) for key in job]
        broken = {number for number, job in enumerate(jobs) if job[0] in self._absent}
        room = self._window
        rest: list[_Step] = []  # for which there is no room
        at = 0
        while at < len(steps) and room > 0 and not self._stale(version):
            batch = [step for step in steps[at : at + _BATCH] if step.job not in broken]
            at += _BATCH
            if batch:
                room = self._bring(batch, broken, room, rest)
        if not self._stale(version):
            self._tell_lower([*rest, *steps[at:]], broken)

    def _bring(self, batch: Sequence[_Step], broken: set[int], room: int, rest: list[_Step]) -> int:
        """Have records in memory, in their order, as far as `room` bytes go; what does not fit joins `rest`. Returns
        the room that is left, 0 once something did not fit. Jobs of which a record is nowhere are `broken`."""
        store, below = self._store, self._below
        assert below is not None
        keys = [*dict.fromkeys(step.key for step in batch)]
        with store.lock:
            if store.closed:
                return 0
            records = store.look_locked(keys)
        here = {key: record.found.nbytes for key, record in zip(keys, records, strict=True) if record is not None}
        missing = [key for key in keys if key not in here]
        deadline = time.monotonic() + _LOAD_S
        found = dict(zip(missing, below.sizes(missing, deadline), strict=True)) if missing else {}
        wanted: dict[Key, int] = {}
        counted: set[Key] = set()
        for step in batch:
            key = step.key
            if step.job in broken or key in counted:
                continue
            if key not in here and not found[key].ok:
                broken.add(step.job)
                if found[key].error is None:
                    self._absent[key] = time.monotonic()
                continue
            nbytes = here[key] if key in here else found[key].nbytes
            if nbytes > room:
                rest.append(step)
                room = 0
                continue
            counted.add(key)
            room -= nbytes
            if key not in here:
                wanted[key] = nbytes
        if wanted:
            loaded = below.load([*wanted], [*wanted.values()], deadline)
            store.let_go([*loaded.records.values()])
            with self._lock:
                self._brought += len(loaded.records)
        return room

    def _tell_lower(self, steps: Sequence[_Step], broken: set[int]) -> None:
        """What the memory has no room for may come nearer all the same."""
        tiers = None if self._below is None else self._below.lower.tiers
        if tiers is None or len(tiers.tiers) < 2:
            return
        jobs: dict[int, list[Key]] = {}
        for step in steps:
            if step.job not in broken:
                jobs.setdefault(step.job, []).append(step.key)
        try:
            tiers.announce([*jobs.values()])
        except KVStoreError as error:
            logger.debug("what waits could not be announced below: %s", error)


def _merged(queues: Sequence[Sequence[Sequence[Key]]]) -> list[list[Key]]:
    """The first jobs of all engines, then the second ones, and so on, as far as `MOST_ANNOUNCED` records go."""
    jobs: list[list[Key]] = []
    left = MOST_ANNOUNCED
    for job in chain.from_iterable(zip_longest(*queues, fillvalue=())):
        if left <= 0:
            break
        if job:
            jobs.append([*job[:left]])
            left -= len(job)
    return jobs


def _head(jobs: Sequence[Sequence[Key]], count: int) -> list[Sequence[Key]]:
    """The first `count` records of a queue."""
    head: list[Sequence[Key]] = []
    for job in jobs:
        if count <= 0:
            break
        head.append(job[:count])
        count -= len(job)
    return head
