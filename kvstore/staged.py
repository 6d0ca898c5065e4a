"""Reads by the record's own table: encoded records, and second looks at what failed verification.

Stored bytes come into staging memory of the pool, are verified there, and are decoded into their destination. A second
look takes nothing from the caller's memory, which he may have given up and changed: only what proves corrupt in memory
of our own is quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .backend import MISS, Limits, Outcome, Read, Status
from .buffers import BufferPool, copy_bytes
from .codec import codec_by_number
from .errors import CorruptRecord, KVStoreError, PermanentError
from .flights import Flight
from .keys import Key
from .plan import runs
from .record import MAX_HEAD_BYTES, RAW, NeedMore, Segment, checksum, parse_header
from .scheduler import seconds_left
from .targets import Counters, Target, attempt

__all__ = ["SUSPECT", "Stager", "call_get", "cut_view"]

logger = logging.getLogger("kvstore.staged")

SUSPECT = Outcome(Status.ERROR, 0, CorruptRecord("failed verification", operation="get"))
"""Told apart by identity: what was read is not what it should be; it needs a second look. Never shown to a caller."""

_Rest = Outcome | list[tuple[Segment, memoryview]]
"""A final outcome, or the segments that are still to be fetched, and where to."""


class Stager:
    """Reads records of one store through staging memory."""

    def __init__(self, targets: Sequence[Target], pool: BufferPool, counters: Counters) -> None:
        self._pool = pool
        self._counters = counters
        self._lock = threading.Lock()
        # Staging never asks for more at once than half the pool, so that one job leaves room for another.
        most = max(pool.largest // 2, 1)
        self.limits: Sequence[Limits] = [
            replace(t.limits, preferred_io_bytes=min(t.limits.preferred_io_bytes, most)) for t in targets
        ]

    def read(
        self,
        target: Target,
        flights: Sequence[Flight],
        deadline: float,
        end: Callable[[Sequence[tuple[Flight, Outcome]]], None],
    ) -> None:
        """Read flights; `end` gets their outcomes as soon as they are known. Raises `KVStoreError` if there is no
        staging memory."""
        # An encoded record is hardly longer than a raw one, so this much holds most records whole.
        room = max(self.limits[target.index].preferred_io_bytes // len(flights), 1)
        sizes = [f.spec.data_offset if f.first else max(f.spec.data_offset, min(f.spec.nbytes, room)) for f in flights]
        done: list[tuple[Flight, Outcome]] = []
        more: list[tuple[Flight, list[tuple[Segment, memoryview]]]] = []
        with self._staging(sum(sizes), deadline) as staging:
            views = cut_view(staging, sizes)
            reads = [Read(flight.key, view, 0) for flight, view in zip(flights, views, strict=True)]
            for flight, view, outcome in zip(flights, views, call_get(target, reads, deadline), strict=True):
                rest: _Rest = outcome
                if outcome.status is Status.OK:
                    rest = self._by_table(target, flight, view[: outcome.nbytes], len(view), deadline)
                if isinstance(rest, Outcome):
                    done.append((flight, rest))
                elif rest:
                    more.append((flight, rest))
                else:
                    done.append((flight, Outcome(Status.OK, flight.nbytes)))
        # The staging memory is back before more is asked for: nobody holds some while waiting for more. And what is
        # complete does not wait for what is not.
        if done:
            end(done)
        for flight, missing in more:
            end([(flight, self._fetch_rest(target, flight, missing, deadline))])

    @contextlib.contextmanager
    def _staging(self, nbytes: int, deadline: float, *, careful: bool = False) -> Iterator[memoryview]:
        """Memory of our own. A second look always gets some: healing must not depend on the size of the pool."""
        if careful and nbytes > self._pool.largest:
            yield memoryview(bytearray(nbytes))
            return
        with self._pool.acquire(nbytes, seconds_left(deadline)) as buffer:
            yield buffer.view

    def _by_table(self, target: Target, flight: Flight, staged: memoryview, asked: int, deadline: float) -> _Rest:
        """Begin to fill the flight's memory by the record's own table.

        Args:
            staged: the record's first bytes; `asked` of them were asked for.

        Returns:
            What is still to be fetched, or the outcome if it is final.
        """
        try:
            try:
                header = parse_header(staged, key=flight.key)
            except NeedMore as more:
                if len(staged) < asked:  # the record really ends there
                    return SUSPECT
                longer = memoryview(bytearray(min(more.need, MAX_HEAD_BYTES)))
                outcome = call_get(target, [Read(flight.key, longer, 0)], deadline)[0]
                if outcome.status is not Status.OK:
                    return outcome
                header, staged = parse_header(longer[: outcome.nbytes], key=flight.key), longer[: outcome.nbytes]
            if header.kind != flight.spec.kind:  # keys of the two kinds never meet: the header lies
                return SUSPECT
            if not header.matches(flight.spec):
                message = (
                    f"the record holds {header.raw_bytes} bytes in {len(header.segments)} segments,"
                    f" but {flight.spec.raw_bytes} in {len(flight.spec.sizes)} were asked for"
                )
                error = PermanentError(message, backend=target.name, operation="get", key=flight.key)
                return Outcome.failed(error)
            if all(segment.codec == RAW for segment in header.segments):
                flight.checksums = [segment.checksum for segment in header.segments]
            rest: list[tuple[Segment, memoryview]] = []
            segments = header.segments[flight.first : flight.first + len(flight.views)]
            for segment, view in zip(segments, flight.views, strict=True):
                if segment.offset + segment.length <= len(staged):
                    _decode(segment, staged[segment.offset : segment.offset + segment.length], view)
                else:
                    rest.append((segment, view))
        except CorruptRecord:
            return SUSPECT
        return rest

    def _fetch_rest(
        self,
        target: Target,
        flight: Flight,
        rest: Sequence[tuple[Segment, memoryview]],
        deadline: float,
        *,
        careful: bool = False,
    ) -> Outcome:
        """Fetch and decode what `_by_table` left, in runs of the preferred size. Does not raise."""
        size = self.limits[target.index].preferred_io_bytes
        try:
            for begin, count, _ in runs([segment.length for segment, _ in rest], size):
                some = rest[begin : begin + count]
                outcome = self._fetch_run(target, flight.key, some, deadline, careful=careful)
                if outcome.status is not Status.OK:
                    return outcome
        except CorruptRecord:
            return SUSPECT
        except KVStoreError as error:  # no staging memory, a closed pool
            return Outcome.failed(error)
        return Outcome(Status.OK, flight.nbytes)

    def _fetch_run(
        self,
        target: Target,
        key: Key,
        some: Sequence[tuple[Segment, memoryview]],
        deadline: float,
        *,
        careful: bool,
    ) -> Outcome:
        """Read consecutive segments: raw ones into their destinations (unless `careful`), others into staging; verify,
        decode."""
        sizes = [segment.length for segment, _ in some if careful or segment.codec != RAW]
        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(self._staging(sum(sizes), deadline, careful=careful)) if sizes else None
            staged = iter(cut_view(staging, sizes) if staging is not None else ())
            reads = [
                Read(key, next(staged) if careful or segment.codec != RAW else view, segment.offset)
                for segment, view in some
            ]
            for outcome, read in zip(call_get(target, reads, deadline), reads, strict=True):
                if outcome.status is not Status.OK:
                    return outcome
                if outcome.nbytes != len(read.dst):
                    return SUSPECT
            for (segment, view), read in zip(some, reads, strict=True):
                _decode(segment, read.dst, view)
        return Outcome(Status.OK)

    # What failed verification.

    def look_again(self, target: Target, flight: Flight) -> Outcome:
        """A second, careful read of a record that failed verification; quarantine if it fails again. Where the backend
        may have another copy, that is tried then."""
        self._count("second_looks")
        for _ in range(target.copies):
            outcome = self._read_carefully(target, flight)
            if outcome is not SUSPECT:
                return outcome
            self.quarantine(target, flight.key, flight.deadline)
        return MISS

    def _read_carefully(self, target: Target, flight: Flight) -> Outcome:
        """Read a record into memory of our own, by its own table, and from there to where it is wanted."""
        deadline = flight.deadline
        head = memoryview(bytearray(flight.spec.data_offset))
        outcome = call_get(target, [Read(flight.key, head, 0)], deadline)[0]
        if outcome.status is not Status.OK:
            return outcome
        rest = self._by_table(target, flight, head[: outcome.nbytes], len(head), deadline)
        return rest if isinstance(rest, Outcome) else self._fetch_rest(target, flight, rest, deadline, careful=True)

    def quarantine(self, target: Target, key: Key, deadline: float) -> None:
        """Put a record aside that proved corrupt twice."""
        logger.warning("corrupt record %s… in %s: quarantined", key[:6].hex(), target.name)
        self._count("corrupt_records")
        call = attempt(target.name, "quarantine", 1, lambda: target.backend.quarantine([key], deadline=deadline))
        if call[0].status is Status.ERROR:
            logger.warning("could not quarantine %s… in %s: %s", key[:6].hex(), target.name, call[0].error)
            self._count("quarantine_failed")

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters.add(name)


def call_get(target: Target, reads: Sequence[Read], deadline: float) -> Sequence[Outcome]:
    """One read call of the backend; it never raises."""
    return attempt(target.name, "get", len(reads), lambda: target.backend.get_into(reads, deadline=deadline))


def cut_view(view: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """`view` cut into consecutive parts of these sizes."""
    views, at = [], 0
    for size in sizes:
        views.append(view[at : at + size])
        at += size
    return views


def _decode(segment: Segment, stored: memoryview, view: memoryview) -> None:
    """Verify one stored segment and put its raw bytes into `view`. Raises `CorruptRecord`."""
    if checksum(stored) != segment.checksum:
        raise CorruptRecord("a segment's checksum is wrong")
    if segment.codec != RAW:
        codec_by_number(segment.codec).decode_into(stored, view)
    elif stored is not view:  # else it was read in place
        copy_bytes(view, stored)
