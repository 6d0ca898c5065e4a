"""Reading: ranges of many records, each record from one version.

A string of the server's has no version that one could ask for. But every record has an expiry, exact to the millisecond
and partly random (`writes`), and PEXPIRETIME tells it without touching the value: two records that had one name at
different times differ in it. So each record is asked for by

    PEXPIRETIME name    GETRANGE name first last    …    PEXPIRETIME name

in one pipeline. -2 is a miss; the same answer before and after means that all ranges are of one version. A single
GETRANGE that brings something is of one version anyhow, so its bytes are final as they land; one that brings nothing
is a missing record, or a range behind the end, and the expiries tell which. PEXPIRETIME needs Redis 7.0, or Valkey.

Reads whose ranges follow each other share a GETRANGE, whose bytes the kernel copies straight
into their destinations (`link`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.backend import MISS, Outcome, Read, Status
from kvstore.keys import Key

from .dispatch import Dispatch, Job
from .errors import Faults
from .names import record_name, slot_of
from .options import Settings
from .resp import Ask, about, get_range

__all__ = ["GONE", "Reader"]

GONE = -2
"""What PEXPIRETIME answers for a name that is not there."""

_SEEN = 16384
_FAR = 1 << 62  # behind any end, and small enough for the server's integers


class _Piece(NamedTuple):
    """What one GETRANGE brings of a read: all of it, or a part of a long one.

    Attributes:
        item: index of the read in the batch.
        view: where it goes.
    """

    item: int
    view: memoryview


_Span = tuple[int, list[_Piece]]
"""First byte, and what follows from there: one GETRANGE."""


class _Record(Job):
    """One record of a batch: the ranges wanted of it, and what has come of them.

    Attributes:
        items: indexes of its reads.
        final: bytes that came of reads that are final, whatever happens later; by item.
    """

    __slots__ = ("_spans", "final", "items", "key")

    def __init__(self, key: Key, name: bytes, items: Sequence[int], reads: Sequence[Read], part: int) -> None:
        self.key = key
        self.items = items
        self.final: dict[int, int] = {}
        self._spans = _spans(items, reads, part)
        version = [about(b"PEXPIRETIME", name)]
        asks = [Ask(version, accepts=int)]
        for first, pieces in self._spans:
            nbytes = sum(len(piece.view) for piece in pieces)
            words = get_range(name, first, first + nbytes - 1)
            asks.append(Ask([words], [piece.view for piece in pieces], expect=nbytes))
        asks.append(Ask(version, accepts=int))
        super().__init__(slot_of(name), asks, settled=lambda: bool(self.final))
        if len(self._spans) == 1:  # its pieces are whole reads, and of one version: each is final when it is there
            asks[1].landed = self._landing(reads)

    def _landing(self, reads: Sequence[Read]) -> Callable[[int, int], None]:
        pieces, final = self._spans[0][1], self.final

        def landed(index: int, nbytes: int) -> None:
            if nbytes:
                item = pieces[index].item
                final[item] = nbytes
                tell = reads[item].landed
                if tell is not None:
                    tell()

        return landed

    @property
    def version(self) -> int:
        """What PEXPIRETIME said first."""
        reply = self.asks[0].reply
        return reply if isinstance(reply, int) else GONE

    @property
    def there(self) -> bool:
        """Whether its replies are all of one version: the record was there, and the same, all the time."""
        if self.trouble is None and self.version != GONE and self.asks[-1].reply == self.version:
            return True
        reply = self.asks[1].reply
        return len(self._spans) == 1 and isinstance(reply, int) and reply > 0  # one reply, with something in it

    def brought(self) -> dict[int, int]:
        """Bytes that came, by item; for a record that is `there`."""
        if len(self._spans) == 1:
            return self.final
        found: dict[int, int] = {}
        for (_, pieces), ask in zip(self._spans, self.asks[1:-1], strict=True):
            left = ask.reply
            for piece in pieces:
                step = min(left, len(piece.view))
                found[piece.item] = found.get(piece.item, 0) + step
                left -= step
        return found


class Reader:
    """`Backend.get_into`."""

    def __init__(self, settings: Settings, dispatch: Dispatch, faults: Faults) -> None:
        self._prefix = settings.prefix.encode()
        self._part = settings.part_size
        self._dispatch = dispatch
        self._faults = faults
        self._lock = threading.Lock()
        self._seen: OrderedDict[Key, int] = OrderedDict()

    def seen(self, key: Key) -> int | None:
        """The version that the bytes of the last read of `key` came from, if that is not long ago."""
        return self._seen.get(key)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def get(self, reads: Sequence[Read], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = [MISS] * len(reads)
        wanted: dict[Key, list[int]] = {}
        for item, read in enumerate(reads):
            if _makes_sense(read):
                wanted.setdefault(read.key, []).append(item)
            else:
                text = "the destination is not a writable flat view of bytes, or the offset is negative"
                outcomes[item] = self._faults.refused(text, "get", read.key)
        records = [
            _Record(key, record_name(self._prefix, key), items, reads, self._part) for key, items in wanted.items()
        ]
        self._dispatch.run(records, deadline)
        for record in records:
            self._conclude(record, reads, outcomes)
        self._remember(records)
        return outcomes

    def _conclude(self, record: _Record, reads: Sequence[Read], outcomes: list[Outcome]) -> None:
        if record.there:
            brought = record.brought()
            for item in record.items:
                outcomes[item] = Outcome(Status.OK, brought.get(item, 0))
                tell = reads[item].landed
                if item not in record.final and tell is not None:
                    tell()
            return
        trouble = record.trouble
        failed = MISS if trouble is None else self._faults.outcome(trouble, "get", record.key)
        for item in record.items:
            nbytes = record.final.get(item)
            outcomes[item] = failed if nbytes is None else Outcome(Status.OK, nbytes)

    def _remember(self, records: Sequence[_Record]) -> None:
        with self._lock:
            seen = self._seen
            for record in records:
                if record.version != GONE and (record.final or record.there):
                    seen[record.key] = record.version
                    seen.move_to_end(record.key)
            while len(seen) > _SEEN:
                seen.popitem(last=False)


def _spans(items: Sequence[int], reads: Sequence[Read], part: int) -> list[_Span]:
    """What to ask for: reads that follow each other together, up to `part` bytes; longer ones in parts, which share
    their spans with nobody."""
    spans: list[_Span] = []
    end = size = 0
    for item in items:
        _, dst, offset, _ = reads[item]
        offset = min(offset, _FAR)
        nbytes = len(dst)
        if not nbytes:
            continue
        if nbytes > part:
            spans += [(offset + at, [_Piece(item, dst[at : at + part])]) for at in range(0, nbytes, part)]
            size = part  # nothing joins it
            continue
        if spans and offset == end and size + nbytes <= part:
            spans[-1][1].append(_Piece(item, dst))
            size += nbytes
        else:
            spans.append((offset, [_Piece(item, dst)]))
            size = nbytes
        end = offset + nbytes
    return spans


def _makes_sense(read: Read) -> bool:
    dst = read.dst
    return read.offset >= 0 and dst.contiguous and not dst.readonly and dst.itemsize == 1 and dst.ndim == 1
