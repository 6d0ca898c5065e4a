"""The read side of the store: flights of records from a backend, through verification, into the caller's memory.

A flight is one record (or run of segments) on its way, whoever asked first. Others who ask for the same join it
(single flight). Records stored raw go straight into the destination: the table's offsets follow from the spec, so
header, table and segments arrive in one call, and each segment is checksummed while it is still in the cache. Encoded
ones go through a staging buffer and are decoded from there. What fails verification is read once more, carefully; what
fails again is quarantined and counted as a miss.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .backend import MISS, Outcome, Read, Status
from .buffers import Buffer, BufferPool, copy_bytes
from .codec import codec_by_number
from .errors import CorruptRecord, KVStoreError, PermanentError, PoolExhausted, TransientError
from .keys import Key
from .placement import Placement
from .plan import Piece, cut, group, runs
from .record import MAX_HEAD_BYTES, RAW, NeedMore, RecordSpec, Segment, checksum, parse_header, raw_checksums
from .scheduler import Batch, Priority, deadline_passed
from .targets import Counters, Target, attempt

__all__ = ["Flight", "Reader"]

logger = logging.getLogger("kvstore.reads")


class _Seat:
    """One caller's place on a flight: the memory its bytes go to, and where its outcome belongs."""

    __slots__ = ("batch", "flat", "hold", "index", "views")

    def __init__(
        self, batch: Batch, index: int, views: Sequence[memoryview], flat: memoryview | None, hold: Buffer | None
    ) -> None:
        self.batch = batch
        self.index = index
        self.views = views
        self.flat = flat  # the views joined, if they lie next to each other
        self.hold = hold


class Flight:
    """One record, or a run of its segments, on its way into the leader's memory."""

    __slots__ = (
        "attempt", "checksums", "digests", "first", "followers", "key", "leader", "left", "lock", "outcome", "priority",
        "spec", "targets",
    )  # fmt: skip

    def __init__(self, key: Key, spec: RecordSpec, first: int, leader: _Seat, targets: tuple[int, ...]) -> None:
        self.key = key
        self.spec = spec
        self.first = first
        self.leader = leader
        self.followers: list[_Seat] = []
        self.targets = targets
        self.attempt = 0
        self.priority = Priority.DEMAND
        self.reset()

    def reset(self) -> None:
        """Forget what an earlier attempt saw."""
        self.checksums: list[int] | None = None  # of the raw segments of the record, once its header was verified
        self.outcome: Outcome | None = None  # the first thing that went wrong
        self.digests: list[int | None] | None = None
        self.left = 1
        self.lock: threading.Lock | None = None

    @property
    def views(self) -> Sequence[memoryview]:
        return self.leader.views

    @property
    def wanted(self) -> bool:
        """False if everybody who asked for it has given up."""
        return self.leader.batch.alive or any(seat.batch.alive for seat in self.followers)

    @property
    def deadline(self) -> float:
        """The latest deadline of those who still wait."""
        if not self.followers:
            return self.leader.batch.deadline
        return max(
            (seat.batch.deadline for seat in (self.leader, *self.followers) if seat.batch.alive), default=-math.inf
        )

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.leader.views))


class Reader:
    """Plans and runs reads over the targets of one store."""

    def __init__(
        self,
        targets: Sequence[Target],
        placement: Placement,
        pool: BufferPool,
        counters: Counters,
        *,
        raw: bool,
    ) -> None:
        self._targets = targets
        self._placement = placement
        self._pool = pool
        self._counters = counters
        self._raw = raw  # records are expected to be stored raw
        self._lock = threading.Lock()
        self._flights: dict[tuple[Key, int, int], Flight] = {}
        self._scratch = threading.local()
        # Staging never asks for more at once than half the pool, so that one job leaves room for another.
        most = max(pool.largest // 2, 1)
        self._staging_limits = [
            replace(t.limits, preferred_io_bytes=min(t.limits.preferred_io_bytes, most)) for t in targets
        ]

    # Submission.

    def submit(
        self,
        batch: Batch,
        wants: Sequence[tuple[Key, RecordSpec, int, Sequence[memoryview], memoryview | None, Buffer | None]],
        priority: Priority,
    ) -> None:
        """Start reading; outcomes go to `batch` by index. Each want is (key, spec, first, views, flat, hold)."""
        fresh: list[Flight] = []
        order = self._placement.order
        batch.begin(len(wants))
        for want in wants:
            if want[5] is not None:
                want[5].pin()
        joined = 0
        with self._lock:
            flights = self._flights
            for index, (key, spec, first, views, flat, hold) in enumerate(wants):
                seat = _Seat(batch, index, views, flat, hold)
                name = (key, first, len(views))
                flight = flights.get(name)
                if flight is not None and flight.spec == spec:
                    flight.followers.append(seat)
                    joined += 1
                    continue
                flight = Flight(key, spec, first, seat, order(key))
                flight.priority = priority
                flights.setdefault(name, flight)  # one of another shape under this name flies alone
                fresh.append(flight)
            self._counters.add("get_items", len(wants))
            self._counters.add("get_joined", joined)
        self._dispatch(fresh)

    def _dispatch(self, flights: Sequence[Flight]) -> None:
        """Queue jobs for flights on the target each is to try now."""
        by_target: dict[tuple[int, Priority], list[Flight]] = {}
        for flight in flights:
            by_target.setdefault((flight.targets[flight.attempt], flight.priority), []).append(flight)
        for (index, priority), some in by_target.items():
            target = self._targets[index]
            jobs = self._raw_jobs(target, some) if self._raw else self._staged_jobs(target, some)
            try:
                target.lanes.submit(jobs, priority)
            except KVStoreError as error:
                self._conclude(target, [(flight, Outcome.failed(error)) for flight in some])

    def _raw_jobs(self, target: Target, flights: Sequence[Flight]) -> list[Callable[[], None]]:
        size = target.limits.preferred_io_bytes
        pieces: list[tuple[Flight, Piece]] = []
        for number, flight in enumerate(flights):
            cuts = cut(number, [len(view) for view in flight.views], flight.first, size)
            if len(cuts) > 1:
                flight.left = len(cuts)
                flight.lock = threading.Lock()
                flight.digests = [None] * len(flight.views)
            pieces += [(flight, piece) for piece in cuts]
        jobs = group([p.nbytes for _, p in pieces], limits=target.limits, capabilities=target.capabilities)
        return [_job(self._run_raw, target, pieces[begin:end], self._fail_pieces) for begin, end in jobs]

    def _staged_jobs(self, target: Target, flights: Sequence[Flight]) -> list[Callable[[], None]]:
        sizes = [max(flight.nbytes, flight.spec.data_offset) for flight in flights]
        jobs = group(sizes, limits=self._staging_limits[target.index], capabilities=target.capabilities)
        return [_job(self._run_staged, target, flights[begin:end], self._conclude_all) for begin, end in jobs]

    # Records stored raw: one call brings headers and segments to where they belong.

    def _run_raw(self, target: Target, pieces: Sequence[tuple[Flight, Piece]]) -> None:
        wanted: list[tuple[Flight, Piece]] = []
        dropped: list[tuple[Flight, Piece]] = []
        for pair in pieces:
            (wanted if pair[0].wanted else dropped).append(pair)
        if dropped:
            self._fail_pieces(target, dropped, deadline_passed(target.name, "get"))
        if not wanted:
            return
        heads = self._head_views([flight.spec.data_offset for flight, piece in wanted if piece.head])
        reads: list[Read] = []
        marks: list[int] = []
        at = 0
        for flight, piece in wanted:
            if piece.head:
                reads.append(Read(flight.key, heads[at], 0))
                at += 1
            _segment_reads(flight, piece, reads)
            marks.append(len(reads))
        deadline = max(flight.deadline for flight, _ in wanted)
        outcomes = _call(target, reads, deadline)
        done: list[tuple[Flight, Outcome]] = []
        begin = at = 0
        for (flight, piece), end in zip(wanted, marks, strict=True):
            head = None
            if piece.head:
                head = heads[at]
                at += 1
            bad = _first_bad(outcomes, reads, begin, end, head is not None)
            if bad is None:
                bad = self._verify_piece(flight, piece, head, outcomes[begin].nbytes)
            begin = end
            outcome = self._piece_done(flight, bad)
            if outcome is not None:
                done.append((flight, outcome))
        self._conclude(target, done)

    def _head_views(self, sizes: Sequence[int]) -> list[memoryview]:
        """This lane's own scratch memory for headers, cut to size. They are parsed before the next job."""
        need = sum(sizes)
        scratch: memoryview | None = getattr(self._scratch, "view", None)
        if scratch is None or len(scratch) < need:
            scratch = self._scratch.view = memoryview(bytearray(max(need, 64 << 10)))
        return _cut(scratch, sizes)

    def _verify_piece(self, flight: Flight, piece: Piece, head: memoryview | None, got: int) -> Outcome | None:
        """Check what arrived. None: good as far as one can say; else what is wrong (`_SUSPECT`: look again)."""
        base = piece.first - flight.first
        if head is not None:
            flight.checksums = raw_checksums(head[:got], flight.key, flight.spec)
            if flight.checksums is None:
                return _SUSPECT
        digests = flight.digests
        if digests is None:  # the whole flight is this piece
            if flight.checksums is None:
                return _SUSPECT
            number = piece.first
            for view in flight.leader.views:
                if checksum(view) != flight.checksums[number]:
                    return _SUSPECT
                number += 1
            return None
        for position, view in enumerate(flight.leader.views[base : base + piece.num], base):
            digests[position] = checksum(view)
        return None

    def _piece_done(self, flight: Flight, bad: Outcome | None) -> Outcome | None:
        """Count a piece; the outcome of the whole flight after its last one, else None."""
        if flight.lock is not None:
            with flight.lock:
                flight.left -= 1
                if bad is not None and flight.outcome is None:
                    flight.outcome = bad
                if flight.left:
                    return None
            bad = flight.outcome
            if bad is None and (
                flight.checksums is None
                or flight.checksums[flight.first : flight.first + len(flight.views)] != flight.digests
            ):
                bad = _SUSPECT
        return Outcome(Status.OK, flight.nbytes) if bad is None else bad

    def _fail_pieces(self, target: Target, pieces: Sequence[tuple[Flight, Piece]], outcome: Outcome) -> None:
        done = []
        for flight, _ in pieces:
            whole = self._piece_done(flight, outcome)
            if whole is not None:
                done.append((flight, whole))
        self._conclude(target, done)

    # Encoded records, and second looks: through staging memory, by the table.

    def _run_staged(self, target: Target, flights: Sequence[Flight]) -> None:
        wanted: list[Flight] = []
        done: list[tuple[Flight, Outcome]] = []
        for flight in flights:
            if flight.wanted:
                wanted.append(flight)
            else:
                done.append((flight, deadline_passed(target.name, "get")))
        if wanted:
            # An encoded record is hardly longer than a raw one, so this much holds most records whole.
            room = max(self._staging_limits[target.index].preferred_io_bytes // len(wanted), 1)
            sizes = [
                f.spec.data_offset if f.first else max(f.spec.data_offset, min(f.spec.nbytes, room)) for f in wanted
            ]
            deadline = max(flight.deadline for flight in wanted)
            rests: list[_Rest] = []
            with self._pool.acquire(sum(sizes), _left(deadline)) as staging:
                views = _cut(staging.view, sizes)
                reads = [Read(flight.key, view, 0) for flight, view in zip(wanted, views, strict=True)]
                for flight, view, outcome in zip(wanted, views, _call(target, reads, deadline), strict=True):
                    if outcome.status is Status.OK:
                        rests.append(self._by_table(target, flight, view[: outcome.nbytes], len(view), deadline))
                    else:
                        rests.append(outcome)
            # The staging memory is back before more is asked for: nobody holds some while waiting for more.
            for flight, rest in zip(wanted, rests, strict=True):
                done.append((flight, self._fetch_rest(target, flight, rest, deadline)))
        self._conclude(target, done)

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
                    return _SUSPECT
                longer = memoryview(bytearray(min(more.need, MAX_HEAD_BYTES)))
                outcome = _call(target, [Read(flight.key, longer, 0)], deadline)[0]
                if outcome.status is not Status.OK:
                    return outcome
                header, staged = parse_header(longer[: outcome.nbytes], key=flight.key), longer[: outcome.nbytes]
            if header.kind != flight.spec.kind:  # keys of the two kinds never meet: the header lies
                return _SUSPECT
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
                    self._decode(segment, staged[segment.offset : segment.offset + segment.length], view)
                else:
                    rest.append((segment, view))
        except CorruptRecord:
            return _SUSPECT
        return rest

    def _fetch_rest(self, target: Target, flight: Flight, rest: _Rest, deadline: float) -> Outcome:
        """Fetch and decode what `_by_table` left, in runs of the preferred size."""
        if isinstance(rest, Outcome):
            return rest
        size = self._staging_limits[target.index].preferred_io_bytes
        try:
            for begin, count, _ in runs([segment.length for segment, _ in rest], size):
                outcome = self._fetch_run(target, flight.key, rest[begin : begin + count], deadline)
                if outcome.status is not Status.OK:
                    return outcome
        except CorruptRecord:
            return _SUSPECT
        except PoolExhausted as error:
            return Outcome.failed(error)
        return Outcome(Status.OK, flight.nbytes)

    def _fetch_run(
        self, target: Target, key: Key, some: Sequence[tuple[Segment, memoryview]], deadline: float
    ) -> Outcome:
        """Read consecutive segments: raw ones into their destinations, encoded ones into staging; verify, decode."""
        sizes = [segment.length for segment, _ in some if segment.codec != RAW]
        staging = self._pool.acquire(sum(sizes), _left(deadline)) if sizes else None
        try:
            staged = iter(_cut(staging.view, sizes) if staging is not None else ())
            reads = [
                Read(key, view if segment.codec == RAW else next(staged), segment.offset) for segment, view in some
            ]
            for outcome, read in zip(_call(target, reads, deadline), reads, strict=True):
                if outcome.status is not Status.OK:
                    return outcome
                if outcome.nbytes != len(read.dst):
                    return _SUSPECT
            for (segment, view), read in zip(some, reads, strict=True):
                self._decode(segment, read.dst, view)
        finally:
            if staging is not None:
                staging.release()
        return Outcome(Status.OK)

    @staticmethod
    def _decode(segment: Segment, stored: memoryview, view: memoryview) -> None:
        """Verify one stored segment and put its raw bytes into `view`. Raises `CorruptRecord`."""
        if checksum(stored) != segment.checksum:
            raise CorruptRecord("a segment's checksum is wrong")
        if segment.codec != RAW:
            codec_by_number(segment.codec).decode_into(stored, view)
        elif stored is not view:  # else it was read in place
            copy_bytes(view, stored)

    def _look_again(self, target: Target, flight: Flight) -> Outcome:
        """A second, careful read of a record that failed verification; quarantine if it fails again."""
        deadline = flight.deadline
        head = memoryview(bytearray(flight.spec.data_offset))
        outcome = _call(target, [Read(flight.key, head, 0)], deadline)[0]
        if outcome.status is Status.OK:
            rest = self._by_table(target, flight, head[: outcome.nbytes], len(head), deadline)
            outcome = self._fetch_rest(target, flight, rest, deadline)
        if outcome is not _SUSPECT:
            return outcome
        logger.warning("corrupt record %s… in %s: quarantined", flight.key[:6].hex(), target.name)
        with self._lock:
            self._counters.add("corrupt_records")
        freed = target.backend.quarantine([flight.key], deadline=deadline)[0]
        if freed.status is Status.ERROR:
            logger.warning("could not quarantine %s… in %s: %s", flight.key[:6].hex(), target.name, freed.error)
            with self._lock:
                self._counters.add("quarantine_failed")
        return MISS

    # The end of a flight.

    def _conclude_all(self, target: Target, flights: Sequence[Flight], outcome: Outcome) -> None:
        self._conclude(target, [(flight, outcome) for flight in flights])

    def _conclude(self, target: Target, done: Sequence[tuple[Flight, Outcome]]) -> None:
        """Flights ended on `target`: look again, try the next replica, or deliver."""
        again: list[Flight] = []
        final: list[tuple[Flight, Outcome]] = []
        for flight, seen in done:
            outcome = seen
            if seen is _SUSPECT:
                outcome = self._careful(target, flight)
            if outcome.status is not Status.OK and flight.attempt + 1 < len(flight.targets) and flight.wanted:
                flight.attempt += 1
                flight.reset()
                again.append(flight)
            else:
                final.append((flight, outcome))
        if final:
            again += self._deliver(final)
        if again:
            self._dispatch(again)

    def _careful(self, target: Target, flight: Flight) -> Outcome:
        with self._lock:
            self._counters.add("second_looks")
        try:
            return self._look_again(target, flight)
        except KVStoreError as error:
            return Outcome.failed(error)

    def _deliver(self, final: Sequence[tuple[Flight, Outcome]]) -> list[Flight]:
        """Give outcomes to everybody on the flights. Returns flights that must take off again for followers."""
        seats: list[tuple[Flight, Outcome, list[_Seat]]] = []
        again: list[Flight] = []
        with self._lock:
            for flight, outcome in final:
                name = (flight.key, flight.first, len(flight.leader.views))
                followers, flight.followers = flight.followers, []
                retry = self._heir(flight, outcome, followers) if followers else None
                if retry is not None:
                    if self._flights.get(name) is flight:
                        self._flights[name] = retry
                    again.append(retry)
                    followers = []
                elif self._flights.get(name) is flight:
                    del self._flights[name]
                seats.append((flight, outcome, followers))
                if outcome.status is Status.OK:
                    self._counters.values["get_hits"] += 1 + len(followers)
                    self._counters.values["get_bytes"] += outcome.nbytes
                elif outcome.status is Status.ERROR:
                    self._counters.values["get_errors"] += 1 + len(followers)
                else:
                    self._counters.values["get_misses"] += 1 + len(followers)
        results: dict[Batch, list[tuple[int, Outcome]]] = {}
        for flight, outcome, followers in seats:
            for seat in followers:
                shared = self._share(flight, seat, outcome) if outcome.status is Status.OK else outcome
                results.setdefault(seat.batch, []).append((seat.index, shared))
                if seat.hold is not None:
                    seat.hold.unpin()
            results.setdefault(flight.leader.batch, []).append((flight.leader.index, outcome))
            if flight.leader.hold is not None:
                flight.leader.hold.unpin()
        for batch, outcomes in results.items():
            batch.end(len(outcomes))
            batch.settle(outcomes)
        return again

    @staticmethod
    def _heir(flight: Flight, outcome: Outcome, followers: list[_Seat]) -> Flight | None:
        """After an error that was only the leader's (its deadline, its cancel), a follower flies on with the rest."""
        if outcome.status is not Status.ERROR or not isinstance(outcome.error, TransientError):
            return None
        alive = [seat for seat in followers if seat.batch.alive]
        longer = [seat for seat in alive if seat.batch.deadline > flight.leader.batch.deadline]
        if flight.leader.batch.alive and not longer:
            return None
        if not alive:
            return None
        leader = max(alive, key=lambda seat: seat.batch.deadline)
        heir = Flight(flight.key, flight.spec, flight.first, leader, flight.targets)
        heir.priority = flight.priority
        heir.followers = [seat for seat in followers if seat is not leader]
        return heir

    def _share(self, flight: Flight, seat: _Seat, outcome: Outcome) -> Outcome:
        """Copy a flight's bytes to a follower. If the leader gave up, its memory may have changed: verify the copy."""
        for source, view in zip(flight.views, seat.views, strict=True):
            copy_bytes(view, source)
        if flight.leader.batch.alive:
            return outcome
        if flight.checksums is not None:
            expected = flight.checksums[flight.first : flight.first + len(seat.views)]
            if [checksum(view) for view in seat.views] == expected:
                return outcome
        return Outcome.failed(TransientError("the reader this one had joined gave up", operation="get", key=flight.key))


_SUSPECT = Outcome(Status.ERROR, 0, CorruptRecord("failed verification", operation="get"))


_Rest = Outcome | list[tuple[Segment, memoryview]]


def _call(target: Target, reads: Sequence[Read], deadline: float) -> Sequence[Outcome]:
    """One read call of the backend; it never raises."""
    return attempt(target.name, "get", len(reads), lambda: target.backend.get_into(reads, deadline=deadline))


def _cut(view: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    views, at = [], 0
    for size in sizes:
        views.append(view[at : at + size])
        at += size
    return views


def _left(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _segment_reads(flight: Flight, piece: Piece, reads: list[Read]) -> None:
    """Append the reads of a piece: one for the whole run if it is contiguous in the record and in memory."""
    spec, base = flight.spec, piece.first - flight.first
    begin, last = spec.offsets[piece.first], piece.first + piece.num - 1
    flat = flight.leader.flat
    if flat is not None and spec.offsets[last] + spec.sizes[last] - begin == piece.nbytes:
        start = sum(spec.sizes[flight.first : piece.first]) if base else 0
        reads.append(Read(flight.key, flat[start : start + piece.nbytes], begin))
        return
    for number in range(piece.num):
        reads.append(Read(flight.key, flight.views[base + number], spec.offsets[piece.first + number]))


def _first_bad(
    outcomes: Sequence[Outcome], reads: Sequence[Read], begin: int, end: int, has_head: bool
) -> Outcome | None:
    """The first of these outcomes that is not a full read. A header may be short: small records end early."""
    for number in range(begin, end):
        outcome = outcomes[number]
        if outcome.status is not Status.OK:
            return outcome
        if outcome.nbytes != len(reads[number].dst) and not (has_head and number == begin):
            return _SUSPECT
    return None


def _job(run: Any, target: Target, work: Any, fail: Any) -> Callable[[], None]:
    """A job that ends its work with an error if it cannot be run (no staging memory, a closed pool)."""

    def job() -> None:
        try:
            run(target, work)
        except KVStoreError as error:
            fail(target, work, Outcome.failed(error))

    return job
