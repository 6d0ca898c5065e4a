"""Reading: ranges of many records, each record from one version of its object."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.backend import MISS, Outcome, Read, Status
from kvstore.errors import KVStoreError, PermanentError
from kvstore.keys import Key

from .answers import UNKNOWN
from .calls import Calls
from .client import BEHIND, BodyBroken, Got, gather
from .http import LinkError
from .names import record_name
from .plan import Part, Piece, Splitter, parts_of, spans_of

__all__ = ["Reader"]

_FOLLOW_UPS = 3  # of one broken body
_SEEN = 16384


class _Record:
    """One record of a batch: the ranges wanted of it, and what has come of it so far.

    `failure` and `gone` are set by whichever part meets them; writes of single attributes need no lock.
    """

    __slots__ = ("behind", "end", "etag", "failure", "gone", "key", "name", "parts", "pieces", "single")

    def __init__(self, key: Key, name: str) -> None:
        self.key = key
        self.name = name
        self.pieces: list[Piece] = []
        self.parts: list[Part] = []
        self.single = False  # one request brings all of it
        self.etag: str | None = None
        self.end: int | None = None  # where the record ends, as far as is known
        self.behind: int | None = None  # a range from here on was behind its end, in whichever version
        self.failure: KVStoreError | None = None
        self.gone = False  # there is none, it is another version by now, or it has expired

    def take(self, part: Part, got: Got, nbytes: int) -> None:
        """A part has come: `nbytes` of it are in place."""
        if got is BEHIND:
            self.behind = part.start if self.behind is None else min(self.behind, part.start)
            return
        if self.etag is None:
            self.etag = got.etag
        elif self.etag != got.etag:
            self.gone = True
        if got.total >= 0:
            self.end = got.total
        elif nbytes < part.nbytes:
            self.end = part.start + nbytes

    def settle(self) -> None:
        """All parts have come. The version that the bytes are from must end where another range found nothing."""
        if self.behind is not None:
            if self.end is None:
                self.end = self.behind
            elif self.end > self.behind:
                self.gone = True

    def bytes_of(self, piece: Piece) -> int:
        size = len(piece.dst)
        return size if self.end is None else max(0, min(size, self.end - piece.offset))


class Reader:
    """`Backend.get_into`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        settings = calls.settings
        self.splitter = Splitter(settings.part_size, adapt=settings.part_adapt)
        self._waste = threading.local()
        self._seen_lock = threading.Lock()
        self._seen: OrderedDict[Key, str] = OrderedDict()

    def seen(self, key: Key) -> str | None:
        """The ETag that the bytes of the last read of `key` came from, if that is not long ago."""
        return self._seen.get(key)

    def _remember(self, record: _Record) -> None:
        if record.etag:
            with self._seen_lock:
                self._seen[record.key] = record.etag
                self._seen.move_to_end(record.key)
                if len(self._seen) > _SEEN:
                    self._seen.popitem(last=False)

    def after_fork(self) -> None:
        self._seen_lock = threading.Lock()

    def get(self, reads: Sequence[Read], deadline: float) -> list[Outcome]:
        records: dict[Key, _Record] = {}
        outcomes: list[Outcome] = [MISS] * len(reads)
        for item, read in enumerate(reads):
            wrong = _wrong(read, self._calls.name)
            if wrong is not None:
                outcomes[item] = wrong
                continue
            record = records.get(read.key)
            if record is None:
                record = records[read.key] = _Record(read.key, record_name(self._calls.settings.prefix, read.key))
            record.pieces.append(Piece(item, read.offset, read.dst))
        work = self._plan(list(records.values()))

        def fetch(index: int) -> None:
            record, part = work[index]
            self._fetch(record, part, reads, deadline)

        lanes = self._calls.settings.lanes
        self._calls.lanes.each(fetch, len(work), at_once=lanes, pace=self._calls.pace)
        for record in records.values():
            self._conclude(record, reads, outcomes)
        return outcomes

    def _plan(self, records: Sequence[_Record]) -> list[tuple[_Record, Part | None]]:
        """The requests, in the order in which their bytes were asked for."""
        gap = self._calls.settings.gap
        waste: memoryview | None = getattr(self._waste, "view", None)
        if waste is None:
            waste = self._waste.view = memoryview(bytearray(gap))
        work: list[tuple[_Record, Part | None]] = []
        size = self.splitter.size
        for record in records:
            spans = spans_of(record.pieces, gap, waste)
            record.parts = [part for span in spans for part in parts_of(span, size)]
            record.single = len(record.parts) <= 1
            work += [(record, part) for part in record.parts] or [(record, None)]
        return work

    def _fetch(self, record: _Record, part: Part | None, reads: Sequence[Read], deadline: float) -> None:
        """One request, and what it takes to finish it. Never raises."""
        if record.gone or record.failure is not None:
            return
        try:
            if time.monotonic() >= deadline:
                raise LinkError("deadline", "the deadline passed")
            if part is None:
                found = self._calls.head(record.name, deadline)
                if found is None or self._calls.expired(found.age):
                    record.gone = True
            else:
                self._fetch_part(record, part, deadline)
        except Exception as error:  # noqa: BLE001 - mapped once, here
            failure = self._calls.failed(error, "get", record.key)
            if record.failure is None:
                record.failure = failure
            return
        if record.single and not record.gone and record.failure is None:
            _land(record, reads)

    def _fetch_part(self, record: _Record, part: Part, deadline: float) -> None:
        views, done, etag = part.views, 0, record.etag
        follow_ups = 0
        while True:
            begin = time.monotonic()
            try:
                got = self._calls.get(record.name, part.start + done, views, etag, deadline)
                break
            except BodyBroken as broken:
                if etag is not None and broken.etag != etag:
                    record.gone = True  # the service ignores If-Match
                    return
                done += broken.nbytes
                follow_ups += 1
                if follow_ups > _FOLLOW_UPS or time.monotonic() >= deadline:
                    raise
                etag = broken.etag
                self._calls.count("follow_ups")
                if done >= part.nbytes:  # everything had come before it broke
                    got = Got(0, etag, 0.0, UNKNOWN)
                    break
                views = gather(part.views, done, part.nbytes)
        if got is None or self._calls.expired(got.age) or (follow_ups and got.etag != etag):
            record.gone = True
            return
        record.take(part, got, done + got.nbytes)
        self.splitter.note(got.nbytes, got.seconds, time.monotonic() - begin - got.seconds)

    def _conclude(self, record: _Record, reads: Sequence[Read], outcomes: list[Outcome]) -> None:
        record.settle()
        if record.failure is not None:
            failed = Outcome.failed(record.failure)
            for piece in record.pieces:
                outcomes[piece.item] = failed
        elif not record.gone:
            self._remember(record)
            if not record.single:
                _land(record, reads)
            for piece in record.pieces:
                outcomes[piece.item] = Outcome(Status.OK, record.bytes_of(piece))


def _land(record: _Record, reads: Sequence[Read]) -> None:
    for piece in record.pieces:
        landed: Callable[[], None] | None = reads[piece.item].landed
        if landed is not None:
            landed()


def _wrong(read: Read, backend: str) -> Outcome | None:
    """The outcome of a read that makes no sense."""
    dst = read.dst
    if read.offset >= 0 and dst.contiguous and not dst.readonly and dst.itemsize == 1 and dst.ndim == 1:
        return None
    text = "the destination is not a writable flat view of bytes, or the offset is negative"
    return Outcome.failed(PermanentError(text, backend=backend, operation="get", key=read.key))
