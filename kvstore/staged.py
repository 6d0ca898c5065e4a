"""Reads by the record's own table: encoded records, and second looks at what failed verification.

Stored bytes come into staging memory of the pool, are verified there, and are decoded into their destination. A second
look takes nothing from the caller's memory, which he may have given up and changed: only what proves corrupt in memory
of our own is quarantined.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .backend import MISS, Limits, Outcome, Read, Status
from .buffers import BufferPool, copy_bytes
from .codec import LOSSY, codec_by_number
from .codec.base import Codec, UnknownProfile
from .errors import CorruptRecord, KVStoreError, PermanentError
from .flights import Flight
from .keys import Key
from .plan import runs
from .record import MAX_HEAD_BYTES, RAW, Header, NeedMore, Segment, checksum, parse_header
from .scheduler import seconds_left
from .targets import Counters, Progress, Target, attempt

__all__ = ["SUSPECT", "Stager", "call_get", "cut_view"]

logger = logging.getLogger("kvstore.staged")

SUSPECT = Outcome(Status.ERROR, 0, CorruptRecord("failed verification", operation="get"))
"""Told apart by identity: what was read is not what it should be; it needs a second look. Never shown to a caller."""

_SMALL_GAP = 64  # bytes between segments that one read may span: what packing leaves


class _Refused(Exception):
    """The record is as it should be, but not for this store. `counter`: what it is counted as."""

    def __init__(self, counter: str) -> None:
        super().__init__(counter)
        self.counter = counter


class _Layer(NamedTuple):
    """What is to be brought of one layer of a flight.

    Attributes:
        place: which of the flight's views it goes to.
        segments: its levels that are missing, in order.
    """

    place: int
    segments: Sequence[Segment]

    @property
    def nbytes(self) -> int:
        return sum(segment.length for segment in self.segments)


_Rest = Outcome | list[_Layer]
"""A final outcome, or what is still to be fetched."""


class Stager:
    """Reads records of one store through staging memory.

    Args:
        codec: what records of this store are encoded with. What another lossy codec encoded is a miss.
    """

    def __init__(self, targets: Sequence[Target], pool: BufferPool, counters: Counters, codec: Codec) -> None:
        self._pool = pool
        self._counters = counters
        self._codec = codec
        self._lock = threading.Lock()
        # Which part of the raw bytes a read from the record's beginning had to bring, by (all layers?, level).
        self._shares: dict[tuple[bool, int | None], float] = {}
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
        done: list[tuple[Flight, Outcome]] = []
        more: list[tuple[Flight, list[_Layer]]] = []

        def sort(flight: Flight, rest: _Rest) -> None:
            if isinstance(rest, Outcome):
                done.append((flight, rest))
            elif rest:
                more.append((flight, rest))
            else:
                done.append((flight, Outcome(Status.OK, flight.nbytes)))

        unknown: list[Flight] = []
        for flight in flights:
            header = _known_header(flight)
            if header is None:
                unknown.append(flight)
            else:
                sort(flight, self._guard(target, flight, functools.partial(self._plan, flight, header)))
        if done:
            end(done)
            done = []
        if unknown:
            room = max(self.limits[target.index].preferred_io_bytes // len(unknown), 1)
            sizes = [self._first_bytes(flight, room) for flight in unknown]
            with self._staging(sum(sizes), deadline) as staging:
                views = cut_view(staging, sizes)
                reads = [Read(flight.key, view, 0) for flight, view in zip(unknown, views, strict=True)]
                outcomes = self._get(target, reads, deadline)
                for flight, view, outcome in zip(unknown, views, outcomes, strict=True):
                    rest: _Rest = outcome
                    if outcome.status is Status.OK:
                        rest = self._by_table(target, flight, view[: outcome.nbytes], len(view), deadline)
                    sort(flight, rest)
        # The staging memory is back before more is asked for: nobody holds some while waiting for more. And what is
        # complete does not wait for what is not.
        if done:
            end(done)
        for flight, missing in more:
            end([(flight, self._fetch_rest(target, flight, missing, deadline))])

    def _first_bytes(self, flight: Flight, room: int) -> int:
        """How much is read when nothing is known of a record yet: its header, and what is wanted of it if that follows
        the header and fits."""
        spec = flight.spec
        if flight.first:
            return spec.data_offset
        whole = len(flight.views) == len(spec.sizes)
        if whole and flight.level is None:  # an encoded record is hardly longer than a raw one, and a read ends with it
            if spec.nbytes > room and self._codec.levels > 1:  # what came of a layer would have to come again
                return spec.data_offset
            return max(spec.data_offset, min(spec.nbytes, room))
        # How long what is wanted is, is known once one was read. Until then the header alone is asked for where levels
        # lie apart or a lossy codec leaves little: reading what is not wanted costs more than asking twice.
        guess = 1.0 if flight.level is None and self._codec.lossless else 0.0
        share = self._shares.get((whole, flight.level), guess)
        return max(spec.data_offset, min(spec.data_offset + int(share * flight.nbytes), spec.nbytes, room))

    def _learn(self, flight: Flight, header: Header) -> None:
        """Remember which part of the raw bytes the wanted levels took, for the first read of the next record."""
        whole = len(flight.views) == header.layers
        if flight.first or not flight.nbytes or (whole and flight.level is None):
            return
        last = header.segments[len(flight.views) - 1]
        if whole:
            last = next(s for s in reversed(header.segments) if flight.level is None or s.level <= flight.level)
        share = max(0, last.offset + last.length - flight.spec.data_offset) / flight.nbytes
        before = self._shares.get((whole, flight.level), share)
        self._shares[whole, flight.level] = share if share > before else (7 * before + share) / 8

    def _get(
        self, target: Target, reads: Sequence[Read], deadline: float, progress: Progress | None = None
    ) -> Sequence[Outcome]:
        """One read call of the backend; what it brings is counted."""
        outcomes = call_get(target, reads, deadline)
        nbytes = sum(outcome.nbytes for outcome in outcomes)
        with self._lock:
            self._counters.add("get_fetched_bytes", nbytes)
        if progress is not None:
            progress.fetched_bytes += nbytes
        return outcomes

    def _guard(self, target: Target, flight: Flight, work: Callable[[], _Rest]) -> _Rest:
        """What `work` returns, or what becomes of a flight whose record cannot be decoded. Does not raise."""
        try:
            return work()
        except CorruptRecord:
            rest: Outcome = SUSPECT
        except _Refused as refused:
            self._count(refused.counter)
            rest = MISS
        except UnknownProfile:
            self._count("unknown_profiles")
            rest = MISS
        except KVStoreError as error:  # no staging memory, a closed pool, a codec that cannot be used here
            return Outcome.failed(error)
        except Exception as error:  # whatever a codec does, the flight must land
            logger.exception("decoding %s… failed", flight.key[:6].hex())
            message = f"decoding failed: {type(error).__name__}: {error}"
            rest = Outcome.failed(PermanentError(message, backend=target.name, operation="get", key=flight.key))
        return rest

    @contextlib.contextmanager
    def _staging(self, nbytes: int, deadline: float, *, careful: bool = False) -> Iterator[memoryview]:
        """Memory of our own. A second look always gets some: healing must not depend on the size of the pool."""
        if careful and nbytes > self._pool.largest:
            yield memoryview(bytearray(nbytes))
            return
        with self._pool.acquire(nbytes, seconds_left(deadline)) as buffer:
            yield buffer.view

    def _by_table(self, target: Target, flight: Flight, staged: memoryview, asked: int, deadline: float) -> _Rest:
        """Begin to fill the flight's memory by the record's own table. Does not raise.

        Args:
            staged: the record's first bytes; `asked` of them were asked for.

        Returns:
            What is still to be fetched, or the outcome if it is final.
        """
        if flight.progress is not None:
            flight.progress.fetched_bytes += len(staged)

        def begin() -> _Rest:
            nonlocal staged
            try:
                header = parse_header(staged, key=flight.key)
            except NeedMore as more:
                if len(staged) < asked:  # the record really ends there
                    return SUSPECT
                longer = memoryview(bytearray(min(more.need, MAX_HEAD_BYTES)))
                outcome = self._get(target, [Read(flight.key, longer, 0)], deadline, flight.progress)[0]
                if outcome.status is not Status.OK:
                    return outcome
                staged = longer[: outcome.nbytes]
                header = parse_header(staged, key=flight.key)
            if header.kind != flight.spec.kind:  # keys of the two kinds never meet: the header lies
                return SUSPECT
            if not header.matches(flight.spec):
                message = (
                    f"the record holds {header.raw_bytes} bytes in {header.layers} segments,"
                    f" but {flight.spec.raw_bytes} in {len(flight.spec.sizes)} were asked for"
                )
                error = PermanentError(message, backend=target.name, operation="get", key=flight.key)
                return Outcome.failed(error)
            if flight.progress is not None:
                flight.progress.begin(header, len(flight.views))
            elif flight.memo is not None:
                flight.memo.header = header
            self._learn(flight, header)
            rest: list[_Layer] = []
            for layer in self._plan(flight, header):
                if all(each.offset + each.length <= len(staged) for each in layer.segments):
                    stored = [staged[each.offset : each.offset + each.length] for each in layer.segments]
                    _decode(flight, layer, stored)
                else:
                    rest.append(layer)
            _tell(flight, header)
            return rest

        return self._guard(target, flight, begin)

    def _plan(self, flight: Flight, header: Header) -> list[_Layer]:
        """What a flight wants of a record and does not have. Raises `_Refused` if this store must not have it."""
        parts = header.parts(flight.first, len(flight.views), flight.level)
        own = self._codec.number
        codecs = {levels[0].codec for levels in parts}
        if any(codec in LOSSY and codec != own for codec in codecs):
            raise _Refused("wrong_codec")
        if codecs == {RAW}:
            flight.checksums = [segment.checksum for segment in header.segments] if header.levels == 1 else None
        have = [0] * len(parts) if flight.progress is None else flight.progress.have
        layers = [_Layer(index, levels[have[index] :]) for index, levels in enumerate(parts)]
        return [layer for layer in layers if layer.segments]

    def _fetch_rest(
        self,
        target: Target,
        flight: Flight,
        rest: Sequence[_Layer],
        deadline: float,
        *,
        careful: bool = False,
    ) -> Outcome:
        """Fetch and decode what is missing, in runs of layers of about the preferred size. Does not raise."""
        size = self.limits[target.index].preferred_io_bytes

        def fetch() -> Outcome:
            for begin, count, _ in runs([layer.nbytes for layer in rest], size):
                some = rest[begin : begin + count]
                outcome = self._fetch_run(target, flight, some, deadline, careful=careful)
                if outcome.status is not Status.OK:
                    return outcome
            return Outcome(Status.OK, flight.nbytes)

        outcome = self._guard(target, flight, fetch)
        if not isinstance(outcome, Outcome):
            raise TypeError("fetching ends with an outcome")
        if flight.progress is not None and flight.progress.header is not None:
            _tell(flight, flight.progress.header)
        return outcome

    def _fetch_run(
        self, target: Target, flight: Flight, some: Sequence[_Layer], deadline: float, *, careful: bool
    ) -> Outcome:
        """Read what is missing of some layers in one call, neighbours in one range: raw segments into their
        destinations (unless `careful`), others into staging; verify, decode."""
        spans: list[list[int]] = []  # begin and end in the record of what goes into staging
        direct: list[Read] = []
        places: dict[int, tuple[int, int]] = {}  # offset of a segment → its span, and where in it
        ordered = sorted((s.offset, s.length, s.codec, layer.place) for layer in some for s in layer.segments)
        for offset, length, codec, index in ordered:
            if codec == RAW and not careful:
                direct.append(Read(flight.key, flight.views[index], offset))
            elif spans and offset - spans[-1][1] < _SMALL_GAP:
                places[offset] = (len(spans) - 1, offset - spans[-1][0])
                spans[-1][1] = offset + length
            else:
                places[offset] = (len(spans), 0)
                spans.append([offset, offset + length])
        sizes = [end - begin for begin, end in spans]
        with contextlib.ExitStack() as stack:
            staged: Sequence[memoryview] = ()
            if sizes:
                staged = cut_view(stack.enter_context(self._staging(sum(sizes), deadline, careful=careful)), sizes)
            reads = [Read(flight.key, view, span[0]) for view, span in zip(staged, spans, strict=True)]
            reads = [read for read in (*reads, *direct) if len(read.dst)]
            for outcome, read in zip(self._get(target, reads, deadline, flight.progress), reads, strict=True):
                if outcome.status is not Status.OK:
                    return outcome
                if outcome.nbytes != len(read.dst):
                    return SUSPECT
            for layer in some:
                stored = []
                for segment in layer.segments:
                    if segment.offset in places:
                        number, at = places[segment.offset]
                        stored.append(staged[number][at : at + segment.length])
                    else:
                        stored.append(flight.views[layer.place])
                _decode(flight, layer, stored)
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
        if flight.progress is not None:
            flight.progress.forget()
        head = memoryview(bytearray(flight.spec.data_offset))
        outcome = self._get(target, [Read(flight.key, head, 0)], deadline)[0]
        if outcome.status is not Status.OK:
            return outcome
        rest = self._by_table(target, flight, head[: outcome.nbytes], len(head), deadline)
        if isinstance(rest, Outcome):
            return rest
        return self._fetch_rest(target, flight, rest, deadline, careful=True)

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


def _known_header(flight: Flight) -> Header | None:
    """What an earlier read learned."""
    if flight.progress is not None:
        return flight.progress.header
    return None if flight.memo is None else flight.memo.header


def _decode(flight: Flight, layer: _Layer, stored: Sequence[memoryview]) -> None:
    """Verify the stored levels of a layer and decode them into its view. Raises `CorruptRecord`, `UnknownProfile`."""
    index, segments = layer
    view, progress = flight.views[index], flight.progress
    for segment, data in zip(segments, stored, strict=True):
        if checksum(data) != segment.checksum:
            raise CorruptRecord("a segment's checksum is wrong")
    number = segments[0].codec
    if number == RAW:
        if stored[0] is not view:  # else it was read in place
            copy_bytes(view, stored[0])
    elif progress is None:
        codec_by_number(number).decode_into(stored, view)
    else:
        decoder = progress.decoders[index]
        if decoder is None:
            progress.decoders[index] = decoder = codec_by_number(number).decoder(view)
        try:
            for data in stored:
                decoder.feed(data)
        except BaseException:  # what was decoded of the layer is undefined
            progress.forget()
            raise
    if progress is not None:
        progress.have[index] += len(segments)


def _tell(flight: Flight, header: Header) -> None:
    """Let a flight's progress say how far it is."""
    if flight.progress is not None:
        flight.progress.count(header.parts(flight.first, len(flight.views)))
