"""The read side of the store: from a backend, through verification, into the caller's memory.

Records stored raw go straight into the destination: the table's offsets follow from the spec, so header, table and
segments arrive in one call, and each segment is checksummed while it is still in the cache. Encoded ones go through
staging memory (`staged`). Who asks for what is on its way already rides along (`flights`). What fails verification is
read once more, carefully; what fails again is quarantined and counted as a miss.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence

from .backend import Capability, Outcome, Read, Status
from .buffers import BufferPool
from .codec.base import RAW, Codec
from .errors import ClosedError, ConfigError, KVStoreError, PermanentError, TransientError
from .flights import Flight, FlightJob, Flights, Parts
from .placement import Placement
from .plan import Piece, cut, group, runs
from .record import checksum, raw_checksums
from .scheduler import Batch, Priority, by_priority, deadline_passed, traces_of
from .staged import SUSPECT, Stager, call_get, cut_view
from .targets import Counters, Target, pin_all
from .telemetry.tracing import BatchTrace

__all__ = ["Reader"]

logger = logging.getLogger("kvstore.reads")

_Ended = Sequence[tuple[Flight, Outcome]]

_read: Callable[[tuple[object, ...]], Read] = functools.partial(tuple.__new__, Read)  # a `Read`, in half the time

_LANDING_BYTES = 256 << 10  # segments are checksummed as they land in units of about so much
_SCRATCH_BYTES = 4 << 20  # most that a lane keeps for headers between jobs


class _FlightsJob(FlightJob):
    """Whole flights of one target."""

    __slots__ = ("_conclude", "_run", "flights")

    def __init__(
        self,
        priority: Priority,
        target: Target,
        flights: Sequence[Flight],
        run: Callable[[_FlightsJob], None],
        conclude: Callable[[Target, _Ended], None],
    ) -> None:
        super().__init__(priority, target)
        self.flights = flights  # those that have not ended
        self._run = run
        self._conclude = conclude

    @property
    def wanted(self) -> bool:
        return any(flight.batch.alive for flight in self.flights)

    def run(self) -> None:
        self._run(self)

    def about(self) -> tuple[str, int, Sequence[BatchTrace]]:
        return "get", len(self.flights), traces_of(flight.batch for flight in self.flights)

    def drop(self, error: KVStoreError) -> None:
        outcome = Outcome.failed(error)
        self.end([(flight, outcome) for flight in self.flights])

    def end(self, ended: _Ended) -> None:
        """These flights have ended."""
        if len(ended) == len(self.flights):
            self.flights = ()
        else:
            gone = {flight for flight, _ in ended}
            self.flights = [flight for flight in self.flights if flight not in gone]
        self._conclude(self.target, ended)

    def part(self) -> tuple[Sequence[Flight], list[tuple[Flight, Outcome]]]:
        """The flights that are still wanted, and outcomes for the others."""
        flights = self.flights
        wanted = [flight for flight in flights if flight.batch.alive]
        if len(wanted) == len(flights):
            return flights, []
        late, still = deadline_passed(self.target.name, "get"), set(wanted)
        return wanted, [(flight, late) for flight in flights if flight not in still]


class _PiecesJob(FlightJob):
    """Pieces of large flights."""

    __slots__ = ("_reader", "pieces")

    def __init__(
        self, priority: Priority, target: Target, pieces: Sequence[tuple[Flight, Piece]], reader: Reader
    ) -> None:
        super().__init__(priority, target)
        self.pieces = pieces
        self._reader = reader

    @property
    def wanted(self) -> bool:
        return any(flight.batch.alive for flight, _ in self.pieces)

    def run(self) -> None:
        self._reader.run_pieces(self)

    def about(self) -> tuple[str, int, Sequence[BatchTrace]]:
        return "get", len(self.pieces), traces_of(flight.batch for flight, _ in self.pieces)

    def drop(self, error: KVStoreError) -> None:
        outcome = Outcome.failed(error)
        self.end([(flight, outcome) for flight, _ in self.pieces])

    def end(self, seen: Sequence[tuple[Flight, Outcome | None]]) -> None:
        """All pieces have ended; with each flight what is wrong with its piece."""
        self.pieces = ()
        self._reader.pieces_done(self.target, seen)


class Reader:
    """Plans and runs reads over the targets of one store.

    Args:
        codec: the one that records of this store are encoded with.
        level: the highest level that is read for those who do not say; None: all.

    Attributes:
        quick: False takes the general path throughout; for the test that both are equal.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        placement: Placement,
        pool: BufferPool,
        counters: Counters,
        *,
        codec: Codec,
        level: int | None = None,
    ) -> None:
        self._targets = targets
        self._order = placement.order
        self._raw = codec.number == RAW  # records are expected to be stored raw
        # So many levels have all records; profiles may differ in theirs.
        self._levels = codec.levels if codec.profile is None else 256
        self._level = level
        self._scratch = threading.local()
        self.stager = Stager(targets, pool, counters, codec)
        self.flights = Flights(counters, self._dispatch, placement.order)
        self.quick = True

    # Submission.

    def submit(self, batch: Batch, flights: Sequence[Flight], priority: Priority) -> None:
        """Start reading; outcomes go to `batch` by index. Raises `ClosedError` if a `hold` was released, `ConfigError`
        if a progress is in use."""
        try:
            pin_all([flight.hold for flight in flights if flight.hold is not None])
        except (ClosedError, ConfigError) as error:
            batch.fail(error)
            raise
        if not self._raw:
            for flight in flights:
                level = self._level if flight.level is None else flight.level
                flight.ask_for(None if level is None or level + 1 >= self._levels else level)
        batch.begin(len(flights))
        fresh: list[Flight] = []
        try:
            self.flights.board(batch, flights, priority, fresh)
            if len(self._targets) > 1:
                order = self._order
                for flight in fresh:
                    flight.targets = order(flight.key)
            self._dispatch(fresh)
        except BaseException:  # an interrupt: nobody may wait for a flight that never takes off
            self._ground(fresh)
            raise
        batch.on_give_up(lambda: self.flights.leave(batch, flights))

    def _ground(self, flights: Sequence[Flight]) -> None:
        error = TransientError("submitting it was interrupted", operation="get")
        for job in {job: None for flight in flights for job in flight.jobs}:
            if job.target.lanes.withdraw(job):
                job.target.lanes.drop(job, error)
        self.flights.land([(flight, Outcome.failed(error)) for flight in flights if not flight.jobs])

    def _dispatch(self, flights: Sequence[Flight]) -> None:
        """Queue jobs for flights on the target each is to try now."""
        by_target: dict[int, Sequence[Flight]] = {0: flights}
        if len(self._targets) > 1:
            sorted_: dict[int, list[Flight]] = {}
            for flight in flights:
                sorted_.setdefault(flight.targets[flight.attempt], []).append(flight)
            by_target = {**sorted_}
        for index, some in by_target.items():
            for priority, equal in by_priority(some):
                self._queue(self._targets[index], equal, priority)

    def _queue(self, target: Target, flights: Sequence[Flight], priority: Priority) -> None:
        jobs = (self._raw_jobs if self._raw else self._staged_jobs)(target, flights, priority)
        try:
            target.lanes.submit(jobs)
        except KVStoreError as error:
            for job in jobs:
                job.drop(error)
            return
        if priority is not Priority.DEMAND:  # somebody more urgent may have come aboard before there were jobs
            for flight in flights:
                if flight.priority < priority:
                    for job in flight.jobs:
                        target.lanes.promote(job, flight.priority)

    def _raw_jobs(self, target: Target, flights: Sequence[Flight], priority: Priority) -> list[FlightJob]:
        size = target.limits.preferred_io_bytes
        whole = [
            flight
            for flight in flights
            if (flight.nbytes <= size or len(flight.views) == 1) and flight.progress is None
        ]
        jobs: list[FlightJob] = []
        sizes = [flight.nbytes for flight in whole]
        for begin, end in group(sizes, limits=target.limits, capabilities=target.capabilities):
            jobs.append(self._flights_job(priority, target, whole[begin:end], self._run_raw))
        if len(whole) < len(flights):
            if followed := [flight for flight in flights if flight.progress is not None]:
                jobs += self._staged_jobs(target, followed, priority)
            pieces: list[tuple[Flight, Piece]] = []
            for number, flight in enumerate(flights):
                if flight.nbytes > size and len(flight.views) > 1 and flight.progress is None:
                    cuts = cut(number, [len(view) for view in flight.views], flight.first, size)
                    flight.parts = Parts(len(cuts), len(flight.views))
                    pieces += [(flight, piece) for piece in cuts]
            sizes = [piece.nbytes for _, piece in pieces]
            carriers: dict[Flight, dict[FlightJob, None]] = {}
            for begin, end in group(sizes, limits=target.limits, capabilities=target.capabilities):
                job = _PiecesJob(priority, target, pieces[begin:end], self)
                jobs.append(job)
                for flight, _ in job.pieces:
                    carriers.setdefault(flight, {})[job] = None
            for flight, its in carriers.items():
                flight.jobs = tuple(its)
        return jobs

    def _staged_jobs(self, target: Target, flights: Sequence[Flight], priority: Priority) -> list[FlightJob]:
        sizes = [max(flight.nbytes, flight.spec.data_offset) for flight in flights]
        jobs = group(sizes, limits=self.stager.limits[target.index], capabilities=target.capabilities)
        return [self._flights_job(priority, target, flights[begin:end], self._run_staged) for begin, end in jobs]

    def _flights_job(
        self, priority: Priority, target: Target, flights: Sequence[Flight], run: Callable[[_FlightsJob], None]
    ) -> _FlightsJob:
        job = _FlightsJob(priority, target, flights, run, self._conclude)
        jobs = (job,)
        for flight in flights:
            flight.jobs = jobs
        return job

    # Records stored raw: one call brings headers and segments to where they belong.

    def _run_raw(self, job: _FlightsJob) -> None:
        wanted, ended = job.part()
        if not wanted:
            job.end(ended)
            return
        heads = self._heads_for(wanted)
        reads: list[Read] = []
        marks: list[int] = []
        deadline, batch = -math.inf, None
        landing = Capability.LANDING in job.target.capabilities
        for flight, head in zip(wanted, heads, strict=False):
            flight.asked = True
            if flight.batch is not batch:
                batch = flight.batch
                deadline = max(deadline, batch.deadline)
            if flight.riders:
                deadline = max(deadline, flight.deadline)
            if head is not None:
                reads.append(_read((flight.key, head, 0, None)))
            if len(flight.views) == 1:
                reads.append(_read((flight.key, flight.views[0], flight.spec.offsets[flight.first], None)))
            else:
                if landing and flight.nbytes >= _LANDING_BYTES:
                    flight.digests = [None] * len(flight.views)
                _segment_reads(flight, flight.first, len(flight.views), reads, flight.digests)
            marks.append(len(reads))
        outcomes = call_get(job.target, reads, deadline)
        quick, ok, begin = self.quick, Status.OK, 0
        for flight, head, end in zip(wanted, heads, marks, strict=False):
            # Most small records; in any trouble `_judge` says which.
            if quick and head is not None and len(flight.views) == 1:
                view, (header, body) = flight.views[0], outcomes[begin:end]
                if (
                    header.status is ok
                    and header.nbytes == len(head)
                    and body.status is ok
                    and body.nbytes == len(view)
                ):
                    sums = raw_checksums(head, flight.key, flight.spec)
                    if sums is not None and sums[flight.first] == checksum(view):
                        _remember(flight, sums)
                        ended.append((flight, body))
                        begin = end
                        continue
            ended.append((flight, _judge(flight, head, reads[begin:end], outcomes[begin:end])))
            begin = end
        job.end(ended)

    def _heads_for(self, flights: Sequence[Flight]) -> Sequence[memoryview | None]:
        """Where the header of each flight's record goes; None if an earlier read knows it. At least as many."""
        if not [None for flight in flights if flight.memo is not None]:
            return self._head_views([flight.spec.data_offset for flight in flights])
        for flight in flights:  # looked at once: another thread may empty a memo at any time
            flight.checksums = None if flight.memo is None else flight.memo.checksums
        sizes = [flight.spec.data_offset for flight in flights if flight.checksums is None]
        views = iter(self._head_views(sizes) if sizes else ())
        return [next(views) if flight.checksums is None else None for flight in flights]

    def _head_views(self, sizes: Sequence[int]) -> Sequence[memoryview]:
        """This lane's own scratch memory for headers, at least one view per size. They are parsed before the next
        job."""
        size = sizes[0]
        if sizes.count(size) != len(sizes) or size * len(sizes) > _SCRATCH_BYTES:
            return cut_view(memoryview(bytearray(sum(sizes))), sizes)
        scratch = self._scratch.__dict__
        views: Sequence[memoryview] = scratch.get("views", ())
        if scratch.get("size") != size or len(views) < len(sizes):
            scratch["views"] = views = cut_view(memoryview(bytearray(size * len(sizes))), [size] * len(sizes))
            scratch["size"] = size
        return views

    def run_pieces(self, job: _PiecesJob) -> None:
        """Bring pieces of large flights."""
        seen: list[tuple[Flight, Outcome | None]] = []
        wanted: list[tuple[Flight, Piece]] = []
        late = deadline_passed(job.target.name, "get")
        for flight, piece in job.pieces:
            if flight.batch.alive:
                wanted.append((flight, piece))
            else:
                seen.append((flight, late))
        if not wanted:
            job.end(seen)
            return
        sizes = [flight.spec.data_offset for flight, piece in wanted if piece.head]
        heads = iter(self._head_views(sizes) if sizes else ())
        reads: list[Read] = []
        marks: list[tuple[memoryview | None, int]] = []
        landing = Capability.LANDING in job.target.capabilities
        for flight, piece in wanted:
            flight.asked = True
            head = next(heads) if piece.head else None
            if head is not None:
                reads.append(Read(flight.key, head, 0))
            digests = flight.parts.digests if landing and flight.parts is not None else None
            _segment_reads(flight, piece.first, piece.num, reads, digests)
            marks.append((head, len(reads)))
        outcomes = call_get(job.target, reads, max(flight.deadline for flight, _ in wanted))
        begin = 0
        for (flight, piece), (head, end) in zip(wanted, marks, strict=True):
            seen.append((flight, _judge_piece(flight, piece, head, reads[begin:end], outcomes[begin:end])))
            begin = end
        job.end(seen)

    def pieces_done(self, target: Target, seen: Sequence[tuple[Flight, Outcome | None]]) -> None:
        """Count pieces, with what is wrong with each; after its last piece a flight has ended."""
        ended: list[tuple[Flight, Outcome]] = []
        for flight, bad in seen:
            parts = flight.parts
            if parts is None:
                raise PermanentError("a flight was cut and forgotten", operation="get", key=flight.key)
            with parts.lock:
                parts.left -= 1
                if bad is not None and parts.outcome is None:
                    parts.outcome = bad
                if parts.left:
                    continue
            outcome = parts.outcome
            if outcome is None:
                sums = flight.checksums
                good = sums is not None and sums[flight.first : flight.first + len(flight.views)] == parts.digests
                outcome = Outcome(Status.OK, flight.nbytes) if good else SUSPECT
            ended.append((flight, outcome))
        if ended:
            self._conclude(target, ended)

    # Encoded records.

    def _run_staged(self, job: _FlightsJob) -> None:
        wanted, ended = job.part()
        if ended:
            job.end(ended)
        if not wanted:
            return
        for flight in wanted:
            flight.asked = True
        try:
            self.stager.read(job.target, wanted, max(flight.deadline for flight in wanted), job.end)
        except KVStoreError as error:  # no staging memory, a closed pool
            job.drop(error)

    # The end of a flight.

    def _conclude(self, target: Target, ended: _Ended) -> None:
        """Flights ended on `target`: land them, try the next replica, or look again."""
        ok = Status.OK
        if not [None for _, outcome in ended if outcome.status is not ok]:
            self.flights.land(ended)
            return
        final: list[tuple[Flight, Outcome]] = []
        again: list[Flight] = []
        suspects: list[Flight] = []
        for pair in ended:
            flight, outcome = pair
            if outcome.status is ok:
                final.append(pair)
            elif outcome is SUSPECT:
                suspects.append(flight)
            elif not flight.last_target and flight.batch.alive:
                flight.attempt += 1
                flight.reset()
                again.append(flight)
            else:
                final.append(pair)
        if again:
            self._dispatch(again)
            for flight in again:
                if not flight.batch.alive:  # it gave up just before there was a job that could be withdrawn
                    self.flights.leave(flight.batch, [flight])
        if final:
            self.flights.land(final)
        for flight in suspects:  # last: what is good does not wait for what is not
            if flight.memo is not None:
                flight.memo.forget()
            self._conclude(target, [(flight, self._look_again(target, flight))])

    def _look_again(self, target: Target, flight: Flight) -> Outcome:
        try:
            return self.stager.look_again(target, flight)
        except KVStoreError as error:
            return Outcome.failed(error)
        except Exception as error:  # whatever it is, the flight must land
            logger.exception("a second look failed")
            message = f"the store failed: {type(error).__name__}"
            return Outcome.failed(PermanentError(message, backend=target.name, operation="get", key=flight.key))


def _segment_reads(flight: Flight, first: int, count: int, reads: list[Read], digests: list[int | None] | None) -> None:
    """Append the reads of a run of segments: one for all of it if it is contiguous in the record and in memory.

    Args:
        digests: where the checksums of the flight's segments go as they land, in units that fit the L2 cache; None if
            the backend does not say what has landed, or the run is too small for it to matter.
    """
    spec, base = flight.spec, first - flight.first
    sizes = spec.sizes[first : first + count]
    units = [(0, count, sum(sizes))] if digests is None else runs(sizes, _LANDING_BYTES)
    start = sum(spec.sizes[flight.first : first]) if base and flight.flat is not None else 0
    for begin, number, nbytes in units:
        place, last = first + begin, first + begin + number - 1
        offset = spec.offsets[place]
        if flight.flat is not None and spec.offsets[last] + spec.sizes[last] - offset == nbytes:
            landed = None if digests is None else _landing(digests, base + begin, flight.views, number)
            reads.append(Read(flight.key, flight.flat[start : start + nbytes], offset, landed))
        else:
            for position in range(begin, begin + number):
                landed = None if digests is None else _landing(digests, base + position, flight.views, 1)
                reads.append(Read(flight.key, flight.views[base + position], spec.offsets[first + position], landed))
        start += nbytes


def _landing(digests: list[int | None], base: int, views: Sequence[memoryview], count: int) -> Callable[[], None]:
    """Takes the checksums of `count` segments while their bytes are in the cache."""

    def landed() -> None:
        for position in range(base, base + count):
            digests[position] = checksum(views[position])

    return landed


def _remember(flight: Flight, sums: list[int]) -> None:
    """The header was verified: these are the checksums of the record's segments."""
    flight.checksums = sums
    if flight.memo is not None:
        flight.memo.checksums = sums


def _judge(flight: Flight, head: memoryview | None, reads: Sequence[Read], outcomes: Sequence[Outcome]) -> Outcome:
    """What became of a flight that was read whole; the first of its reads is the header's, unless that is known.
    `SUSPECT`: look again."""
    bad = _first_bad(reads, outcomes, headed=head is not None)
    if bad is not None:
        return bad
    sums = flight.checksums if head is None else raw_checksums(head[: outcomes[0].nbytes], flight.key, flight.spec)
    if sums is None:
        return SUSPECT
    _remember(flight, sums)
    digests = flight.digests or [None] * len(flight.views)
    for number, (view, digest) in enumerate(zip(flight.views, digests, strict=True), flight.first):
        if (checksum(view) if digest is None else digest) != sums[number]:
            return SUSPECT
    return Outcome(Status.OK, flight.nbytes)


def _judge_piece(
    flight: Flight, piece: Piece, head: memoryview | None, reads: Sequence[Read], outcomes: Sequence[Outcome]
) -> Outcome | None:
    """What is wrong with a piece; None: nothing so far. Its digests are compared when the last piece is there."""
    bad = _first_bad(reads, outcomes, headed=head is not None)
    if bad is not None:
        return bad
    if head is not None:
        flight.checksums = raw_checksums(head[: outcomes[0].nbytes], flight.key, flight.spec)
        if flight.checksums is None:
            return SUSPECT
    if flight.parts is not None:
        base, digests = piece.first - flight.first, flight.parts.digests
        for position, view in enumerate(flight.views[base : base + piece.num], base):
            if digests[position] is None:  # else it was taken as it landed
                digests[position] = checksum(view)
    return None


def _first_bad(reads: Sequence[Read], outcomes: Sequence[Outcome], *, headed: bool) -> Outcome | None:
    """The first outcome that is not a full read. A header may be short: small records end early."""
    for number, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
        if outcome.status is not Status.OK:
            return outcome
        if outcome.nbytes != len(read.dst) and not (headed and number == 0):
            return SUSPECT
    return None
