"""Single flight: of those who want the same bytes one flies, and the others ride along.

A flight is one want, and it flies into its own memory. While it is under way, wants for the same segments of the same
record join it and get a copy. Whatever befalls the one that flies (its deadline, a cancel) befalls nobody else: those
who still wait then fly themselves.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence

from .backend import Outcome, Status
from .buffers import copy_bytes
from .errors import KVStoreError, TransientError
from .keys import Key
from .record import RecordSpec, checksum
from .scheduler import Batch, Job, Priority
from .targets import Counters, HeadMemo, Pinned, Progress, Target
from .telemetry.served import SERVED

__all__ = ["Flight", "FlightJob", "Flights", "Parts"]

logger = logging.getLogger("kvstore.flights")

Name = Key | tuple[object, ...]
"""What is wanted: a whole record; segments of it (key, first, how many); or levels of these (…, level). Whoever refines
what he has already, flies alone (…, level, his progress)."""


class Parts:
    """What is known of a flight that several jobs share, each of which brings a part."""

    __slots__ = ("digests", "left", "lock", "outcome")

    def __init__(self, count: int, views: int) -> None:
        self.lock = threading.Lock()
        self.left = count
        self.digests: list[int | None] = [None] * views
        self.outcome: Outcome | None = None  # the first thing that went wrong


class Flight:
    """One want: it flies, and its memory takes the bytes; or it rides along with one that wants the same.

    Args:
        views: one destination per segment.
        flat: the destinations joined, if they lie next to each other.
        nbytes: bytes of all of them.
        hold: pool buffer that they lie in, or the progress that holds it.
    """

    batch: Batch
    index: int  # in the batch
    # What few flights need is set when it is needed: it takes half the time to make one.
    targets: tuple[int, ...] = (0,)
    attempt = 0  # index of the target that is asked now
    asked = False  # a backend has been asked
    priority = Priority.DEMAND
    jobs: Sequence[FlightJob] = ()
    checksums: list[int] | None = None  # of all raw segments of the record, once its header was verified
    digests: list[int | None] | None = None  # checksums of its segments as they landed
    parts: Parts | None = None
    memo: HeadMemo | None = None
    level: int | None = None  # the highest that is wanted; None: all there are
    progress: Progress | None = None
    riders: dict[Flight, None] | None = None
    host: Flight | None = None  # what it rides along with
    late = False  # it came aboard after the backend was asked
    refines = False  # some levels of it were read before

    def __init__(
        self,
        key: Key,
        spec: RecordSpec,
        first: int,
        views: Sequence[memoryview],
        flat: memoryview | None,
        nbytes: int,
        hold: Pinned | None,
    ) -> None:
        self.key = key
        self.spec = spec
        self.first = first
        self.views = views
        self.flat = flat
        self.nbytes = nbytes
        self.hold = hold
        self.name: Name = key if len(views) == len(spec.sizes) else (key, first, len(views))

    def ask_for(self, level: int | None) -> None:
        """Of an encoded record levels 0 to `level` are wanted."""
        self.level = level
        if self.progress is not None:
            self.refines = self.progress.level is not None
            self.name = (self.key, self.first, len(self.views), level, self.progress)
        elif level is not None:
            self.name = (self.key, self.first, len(self.views), level)

    @property
    def deadline(self) -> float:
        """The latest deadline of those who still wait."""
        aboard = (self, *self.riders) if self.riders else (self,)
        return max((flight.batch.deadline for flight in aboard if flight.batch.alive), default=-math.inf)

    @property
    def last_target(self) -> bool:
        """True if there is no further replica to ask."""
        return self.attempt + 1 >= len(self.targets)

    def reset(self) -> None:
        """Forget what an attempt saw."""
        self.checksums = self.parts = self.digests = None


class FlightJob(Job):
    """A job that brings flights, or parts of them, from one target."""

    __slots__ = ("target",)

    def __init__(self, priority: Priority, target: Target) -> None:
        super().__init__(priority)
        self.target = target

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """False if nobody waits for any of it."""


class Flights:
    """The flights under way of one store.

    Args:
        dispatch: queues jobs for flights that are to take off.
        order: the targets of a key, best first.
    """

    def __init__(
        self,
        counters: Counters,
        dispatch: Callable[[Sequence[Flight]], None],
        order: Callable[[Key], tuple[int, ...]],
    ) -> None:
        self._counters = counters
        self._dispatch = dispatch
        self._order = order
        self._lock = threading.Lock()
        self._current: dict[Name, Flight] = {}

    def __len__(self) -> int:
        return len(self._current)

    def board(self, batch: Batch, flights: Sequence[Flight], priority: Priority, fresh: list[Flight]) -> None:
        """Let each ride along with one that is under way, or fly: those are added to `fresh`, and are the caller's
        to dispatch."""
        urgent: list[tuple[FlightJob, Priority]] = []
        demand = priority is Priority.DEMAND
        with self._lock:
            enter = self._current.setdefault
            for index, flight in enumerate(flights):
                flight.batch = batch
                flight.index = index
                if not demand:
                    flight.priority = priority
                host = enter(flight.name, flight)
                if host is flight or not self._ride(flight, host, urgent):
                    fresh.append(flight)
            self._counters.add("get_items", len(flights))
            self._counters.add("get_joined", len(flights) - len(fresh))
        _hurry(urgent)

    @staticmethod
    def _ride(flight: Flight, host: Flight, urgent: list[tuple[FlightJob, Priority]]) -> bool:
        """Called with the lock held. False: it wants another shape under this name, and flies alone."""
        if host.spec != flight.spec:
            return False
        flight.host = host
        flight.late = host.asked
        if host.riders is None:
            host.riders = {}
        host.riders[flight] = None
        if flight.priority < host.priority:  # nobody waits behind work of a lower priority than his own
            host.priority = flight.priority
            urgent += [(job, flight.priority) for job in host.jobs]
        return True

    def leave(self, batch: Batch, flights: Sequence[Flight]) -> None:
        """`batch` gave up: take its flights off whatever has not begun to bring them."""
        left: list[Flight] = []
        jobs: dict[FlightJob, None] = {}
        with self._lock:
            for flight in flights:
                if flight.host is None:
                    jobs.update(dict.fromkeys(flight.jobs))
                elif flight.host.riders and flight in flight.host.riders:
                    del flight.host.riders[flight]
                    left.append(flight)
            if left:
                self._counters.add("get_errors", len(left))
        _unpin(left)
        batch.end(len(left))
        gone = TransientError("nobody waits for it any more", operation="get")
        for job in jobs:
            if not job.wanted and job.target.lanes.withdraw(job):
                job.target.lanes.drop(job, gone)

    def land(self, ended: Sequence[tuple[Flight, Outcome]]) -> None:
        """Flights have ended: give everybody aboard the outcome, and a copy of the bytes; or let them fly again."""
        results: dict[Batch, list[tuple[int, Outcome]]] = {}
        pinned: list[Flight] = []
        shared: list[tuple[Flight, Outcome, Sequence[Flight]]] = []
        fresh: list[Flight] = []
        urgent: list[tuple[FlightJob, Priority]] = []
        batch, outcomes = None, []
        current = self._current
        with self._lock:
            for flight, outcome in ended:
                if current.get(flight.name) is flight:
                    del current[flight.name]
                if flight.riders:
                    served, back = _divide(flight, outcome)
                    flight.riders = None
                    shared.append((flight, outcome, served))
                    self._again(back, fresh, urgent)
                if flight.batch is not batch:
                    batch = flight.batch
                    outcomes = results.setdefault(batch, [])
                outcomes.append((flight.index, outcome))
                if flight.hold is not None:
                    pinned.append(flight)
            if not shared:
                self._count(results)
        if shared:
            unserved: list[Flight] = []
            for flight, outcome, served in shared:
                for rider in served:
                    if outcome.status is Status.OK and not _share(flight, rider):
                        unserved.append(rider)
                    else:
                        results.setdefault(rider.batch, []).append((rider.index, outcome))
                        pinned.append(rider)
            with self._lock:
                self._again(unserved, fresh, urgent)
                self._count(results)
            if fresh:  # before callbacks run: one that takes its time holds nobody up
                self._take_off(fresh)
            _hurry(urgent)
        self._tally(ended, shared)
        _unpin(pinned)
        for batch, outcomes in results.items():
            batch.settle(outcomes, ended=len(outcomes))

    def _tally(
        self,
        ended: Sequence[tuple[Flight, Outcome]],
        shared: Sequence[tuple[Flight, Outcome, Sequence[Flight]]],
    ) -> None:
        """Count records, each once however many runs of layers or levels it is read in, by the place that had them."""
        ok, miss = Status.OK, Status.MISS
        index = ended[0][0].targets[ended[0][0].attempt]  # all of them end on one target
        places = SERVED.places
        found: dict[int, list[int]] = {}
        missed = failed = 0
        for flight, outcome in ended:
            if flight.first or flight.refines:
                continue
            if outcome[0] is ok and flight.batch.alive:
                place = places.get(flight.key, -1) if places else -1
                counts = found.get(place)
                if counts is None:
                    counts = found[place] = [0, 0]
                counts[0] += 1
                counts[1] += flight.spec.tokens
            elif outcome[0] is miss:
                missed += 1
            else:
                failed += 1
        for flight, outcome, served in shared:
            if flight.first == 0 and served:
                if outcome[0] is ok:
                    counts = found.setdefault(places.get(flight.key, -1), [0, 0])
                    counts[0] += len(served)
                    counts[1] += len(served) * flight.spec.tokens
                elif outcome[0] is miss:
                    missed += len(served)
                else:
                    failed += len(served)
        if places:
            places.clear()
        counters = self._counters
        with counters.lock:
            for place, (records, tokens) in found.items():
                sums = counters.served.setdefault((index, place), [0, 0])
                sums[0] += records
                sums[1] += tokens
            counters.missed += missed
            counters.failed += failed

    def _again(self, riders: Sequence[Flight], fresh: list[Flight], urgent: list[tuple[FlightJob, Priority]]) -> None:
        """Riders are not served by the flight they were on. Called with the lock held."""
        # He who waits longest flies, so that the others can ride to their end.
        for rider in sorted(riders, key=lambda rider: -rider.batch.deadline):
            rider.host, rider.late = None, False
            host = self._current.setdefault(rider.name, rider)
            if host is rider or not self._ride(rider, host, urgent):
                fresh.append(rider)

    def _take_off(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.targets = self._order(flight.key)
        self._dispatch(flights)
        for flight in flights:
            if not flight.batch.alive:  # it gave up just before there was a job that could be withdrawn
                self.leave(flight.batch, [flight])

    def _count(self, results: dict[Batch, list[tuple[int, Outcome]]]) -> None:
        """Called with the lock held."""
        ok, miss = Status.OK, Status.MISS
        hits = nbytes = misses = errors = 0
        for outcomes in results.values():
            for _, (status, size, _) in outcomes:
                if status is ok:
                    hits += 1
                    nbytes += size
                elif status is miss:
                    misses += 1
                else:
                    errors += 1
        values = self._counters.values
        for name, amount in (("hits", hits), ("bytes", nbytes), ("misses", misses), ("errors", errors)):
            if amount:
                values[f"get_{name}"] += amount


def _hurry(jobs: Sequence[tuple[FlightJob, Priority]]) -> None:
    for job, priority in jobs:
        job.target.lanes.promote(job, priority)


def _unpin(flights: Sequence[Flight]) -> None:
    for flight in flights:
        if flight.hold is not None:
            try:
                flight.hold.unpin()
            except KVStoreError:  # somebody unpinned what he had not pinned; others must not wait for ever
                logger.exception("a buffer has lost its pin")


def _divide(flight: Flight, outcome: Outcome) -> tuple[Sequence[Flight], Sequence[Flight]]:
    """Riders whom `outcome` serves, and those who fly again."""
    riders = tuple(flight.riders or ())
    if outcome.status is Status.OK:
        return riders, ()
    alive = [rider for rider in riders if rider.batch.alive]
    if not flight.last_target:  # whoever flew gave up; other replicas were not asked
        back = alive
    elif outcome.status is Status.MISS:  # it may have been stored since the backend was asked
        back = [rider for rider in alive if rider.late]
    elif outcome.error is not None and outcome.error.retryable:
        # Not if it was everybody's error. His own: he gave up, or had less time than others.
        longer = any(rider.batch.deadline > flight.batch.deadline for rider in alive)
        back = alive if longer or not flight.batch.alive else []
    else:
        back = []
    leaving = set(back)
    return [rider for rider in riders if rider not in leaving], back


def _share(flight: Flight, rider: Flight) -> bool:
    """Copy a flight's bytes to a rider. False if they cannot be vouched for: once its owner has given up on them,
    the memory they are copied from may have changed."""
    try:
        for source, view in zip(flight.views, rider.views, strict=True):
            copy_bytes(view, source)
    except (ValueError, TypeError):  # memory was taken away that the store was to keep until the end
        logger.warning("a destination cannot be copied to or from")
        return False
    if flight.batch.alive:
        return True
    sums = flight.checksums
    return sums is not None and all(
        checksum(view) == sums[number] for number, view in enumerate(rider.views, flight.first)
    )
