"""Bytes between memory and an open file: gathered, in a loop over short transfers, directly where it is aligned.

A byte is copied once: by the kernel, between the page cache and the memory given (O_DIRECT: by the device, not at all).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.errors import TransientError

from .oscalls import OsCalls

__all__ = ["ALIGNMENT", "Cut", "DeadlinePassed", "Direct", "Range", "check_deadline", "read_ranges", "write_all"]

logger = logging.getLogger("kvstore.file")

ALIGNMENT = 4096
MAX_IO = 16 << 20
"""Bytes of one system call, so that the deadline is looked at now and then. Larger ones are not faster (measured)."""
LANDING_STEP = 1 << 20
_STEP_MIN = 256 << 10
"""Whoever checks bytes as they land gets them in steps of about so many, while they are still in the L2 cache."""
GAP = 64 << 10
"""A gap of at most so many bytes between two ranges is read too: that is cheaper than another call (NFS round trip)."""
DIRECT_MIN = 1 << 20
"""`direct=auto` leaves smaller transfers to the page cache."""
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class DeadlinePassed(TransientError):
    """The deadline passed between two system calls."""


class Cut(OSError):
    """A file ended before the size it has: never a short OK."""

    def __init__(self, at: int, size: int) -> None:
        super().__init__(errno.EIO, f"the file ends at byte {at}, before its size of {size} bytes")


class Direct:
    """Whether transfers go past the page cache, and how often they could not.

    Args:
        mode: "off", "on" (whatever is aligned) or "auto" (from 1 MiB).
        count: is called with "direct_ios" or "direct_refused".
    """

    def __init__(self, mode: str, calls: OsCalls, count: Callable[[str], None], name: str) -> None:
        self.minimum = {"on": ALIGNMENT, "auto": DIRECT_MIN}.get(mode, 0)
        self.enabled = self.minimum > 0
        self._calls = calls
        self._count = count
        self._name = name
        self._logged = False

    def used(self) -> None:
        self._count("direct_ios")

    def refused(self, error: OSError, *, forever: bool = False) -> None:
        """An operation goes buffered. `forever`: the file system cannot do it at all."""
        self._count("direct_refused")
        logged, self._logged = self._logged, True
        if forever:
            self.enabled = False
        if not logged:
            logger.warning(
                "%s: O_DIRECT is refused (%s); %s through the page cache", self._name, error.strerror,
                "everything goes" if forever else "such operations go",
            )  # fmt: skip


class _Piece(NamedTuple):
    direct: bool
    views: list[memoryview]
    offset: int
    nbytes: int


def _address(view: memoryview) -> int:
    import numpy as np  # the only way to the address of read-only memory, and needed for O_DIRECT alone

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _pieces(views: Sequence[memoryview], offset: int, minimum: int) -> Iterator[_Piece]:
    """Split a transfer into runs that are aligned (offset, address, length) and runs that are not.

    Only runs of at least `minimum` aligned bytes are worth the switch; the rest joins its buffered neighbours.
    """
    parts: list[tuple[bool, memoryview]] = []
    at = offset
    for view in views:
        length = len(view)
        head = -at % ALIGNMENT
        aligned = length >= head + ALIGNMENT and (_address(view) + head) % ALIGNMENT == 0
        middle = (length - head) // ALIGNMENT * ALIGNMENT if aligned else 0
        cuts = ((False, head), (True, middle), (False, length - head - middle)) if aligned else ((False, length),)
        start = 0
        for direct, size in cuts:
            if size:
                parts.append((direct, view[start : start + size]))
                start += size
        at += length
    runs: list[_Piece] = []
    at = offset
    for direct, view in parts:
        if runs and runs[-1].direct == direct:
            last = runs[-1]
            last.views.append(view)
            runs[-1] = last._replace(nbytes=last.nbytes + len(view))
        else:
            runs.append(_Piece(direct, [view], at, len(view)))
        at += len(view)
    pending: _Piece | None = None
    for run in runs:
        worth = run.direct and run.nbytes >= minimum
        if worth:
            if pending is not None:
                yield pending
            pending = None
            yield run
        elif pending is None:
            pending = run._replace(direct=False)
        else:
            pending = pending._replace(views=pending.views + run.views, nbytes=pending.nbytes + run.nbytes)
    if pending is not None:
        yield pending


class _Cursor:
    """What is left of a list of views."""

    __slots__ = ("_at", "_skip", "_views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._at = 0  # first view that is not done
        self._skip = 0  # bytes of it that are

    def batch(self) -> list[memoryview]:
        """Views for the next call: at most IOV_MAX of them and MAX_IO bytes."""
        out: list[memoryview] = []
        room = MAX_IO
        skip = self._skip
        for index in range(self._at, min(len(self._views), self._at + _IOV_MAX)):
            view = self._views[index]
            if skip or len(view) > room:
                view = view[skip : skip + room]
                skip = 0
            out.append(view)
            room -= len(view)
            if room <= 0:
                break
        return out

    def advance(self, count: int) -> None:
        while count:
            left = len(self._views[self._at]) - self._skip
            if count < left:
                self._skip += count
                return
            count -= left
            self._at += 1
            self._skip = 0


def check_deadline(deadline: float) -> None:
    """Raise `DeadlinePassed` if it has."""
    if time.monotonic() >= deadline:
        raise DeadlinePassed("the deadline passed")


def _read_piece(calls: OsCalls, fd: int, piece: _Piece, deadline: float, aligned: bool) -> int:
    """Fill the views from the file; returns fewer bytes than asked for only at its end (or, `aligned`, after a count
    that direct I/O cannot go on from)."""
    done = 0
    if piece.nbytes <= MAX_IO and len(piece.views) <= _IOV_MAX:  # nearly always: one call, nothing sliced
        done = calls.preadv(fd, piece.views, piece.offset)
        if done in (0, piece.nbytes):
            return done
    cursor = _Cursor(piece.views)
    cursor.advance(done)
    while done < piece.nbytes:
        if aligned and done % ALIGNMENT:
            return done
        if done:
            check_deadline(deadline)
        count = calls.preadv(fd, cursor.batch(), piece.offset + done)
        if count == 0:
            break
        cursor.advance(count)
        done += count
    return done


def _write_piece(calls: OsCalls, fd: int, piece: _Piece, deadline: float, aligned: bool) -> int:
    done = 0
    if piece.nbytes <= MAX_IO and len(piece.views) <= _IOV_MAX:
        done = calls.pwritev(fd, piece.views, piece.offset)
        if done == piece.nbytes:
            return done
    cursor = _Cursor(piece.views)
    cursor.advance(done)
    stuck = 0
    while done < piece.nbytes:
        if aligned and done % ALIGNMENT:
            return done
        if done:
            check_deadline(deadline)
        count = calls.pwritev(fd, cursor.batch(), piece.offset + done)
        if count == 0:
            stuck += 1
            if stuck > 3:  # POSIX allows 0 only for nothing to write: do not spin
                raise OSError(errno.EIO, "write accepts no bytes")
        cursor.advance(count)
        done += count
    return done


def _try_direct(calls: OsCalls, fd: int, piece: _Piece, deadline: float, direct: Direct, write: bool) -> int:
    """Transfer an aligned piece past the page cache; returns the bytes done, 0 if it was refused."""
    try:
        calls.set_direct(fd, True)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        direct.refused(error, forever=True)
        return 0
    try:
        done = (_write_piece if write else _read_piece)(calls, fd, piece, deadline, True)
        direct.used()
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        direct.refused(error)
        return 0
    finally:
        calls.set_direct(fd, False)
    return done


def _rest(piece: _Piece, done: int) -> _Piece:
    if done == 0:
        return piece
    views = []
    skip = done
    for view in piece.views:
        if skip < len(view):
            views.append(view[skip:])
        skip = max(0, skip - len(view))
    return _Piece(False, views, piece.offset + done, piece.nbytes - done)


def write_all(
    calls: OsCalls, fd: int, views: Sequence[memoryview], nbytes: int, deadline: float, direct: Direct
) -> None:
    """Write the concatenation of `views` at the beginning of the file.

    Raises:
        OSError: as pwritev(2).
        DeadlinePassed: between two calls.
    """
    views = [view for view in views if len(view)]
    if not views:
        return
    whole = _Piece(False, views, 0, nbytes)
    for piece in _pieces(views, 0, direct.minimum) if direct.enabled and nbytes >= direct.minimum else (whole,):
        done = _try_direct(calls, fd, piece, deadline, direct, True) if piece.direct else 0
        if done < piece.nbytes:
            _write_piece(calls, fd, _rest(piece, done), deadline, False)


def _read_run(
    calls: OsCalls, fd: int, views: list[memoryview], offset: int, nbytes: int, size: int, deadline: float,
    direct: Direct,
) -> int:  # fmt: skip
    """Read neighbouring views; fewer bytes than `nbytes` only where the file of `size` bytes ends."""
    if not (direct.enabled and nbytes >= direct.minimum):
        return _read_piece(calls, fd, _Piece(False, views, offset, nbytes), deadline, False)
    total = 0
    inside = min(nbytes, size - offset)
    if inside < nbytes:  # a direct read of the last block would fill memory behind the end with zeros
        views = _head(views, inside)
    for piece in _pieces(views, offset, direct.minimum):
        done = _try_direct(calls, fd, piece, deadline, direct, False) if piece.direct else 0
        if done < piece.nbytes:
            done += _read_piece(calls, fd, _rest(piece, done), deadline, False)
        total += done
        if done < piece.nbytes:
            break
    return total


def _head(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the concatenation of `views`."""
    out: list[memoryview] = []
    for view in views:
        if nbytes <= 0:
            break
        out.append(view[:nbytes])
        nbytes -= len(view)
    return out


class Range(NamedTuple):
    """One wanted range: which item of the batch, where it goes, where it begins in the record, whom to tell."""

    item: int
    dst: memoryview
    offset: int
    landed: Callable[[], None] | None = None


def _read_steps(
    calls: OsCalls, fd: int, size: int, ranges: Sequence[Range], deadline: float, counts: dict[int, int]
) -> int:
    """The fast path of `read_ranges` for large ranges whose bytes are checked as they land: one call each (a small
    one, a header, goes with its neighbour), and nothing else. Returns how many ranges it has finished, in order; the
    general path does the rest: small ones, and whatever a call cut short."""
    preadv, position = calls.preadv, 0
    while position < len(ranges):
        first = last = ranges[position]
        views, nbytes, done = [first.dst], len(first.dst), 1
        if nbytes < _STEP_MIN and position + 1 < len(ranges) and ranges[position + 1].offset == first.offset + nbytes:
            last = ranges[position + 1]
            views, nbytes, done = [first.dst, last.dst], nbytes + len(last.dst), 2
        if not _STEP_MIN <= nbytes <= MAX_IO or first.offset + nbytes > size:
            break
        check_deadline(deadline)
        if preadv(fd, views, first.offset) != nbytes:
            break
        for wanted in (first, last) if done == 2 else (first,):
            counts[wanted.item] = len(wanted.dst)
            if wanted.landed is not None:
                wanted.landed()
        position += done
    return position


def read_ranges(
    calls: OsCalls, fd: int, size: int, ranges: Sequence[Range], deadline: float, direct: Direct, counts: dict[int, int]
) -> None:
    """Read ranges of one open file, given in rising order of offset; near neighbours share a call.

    Args:
        size: of the file, in bytes. A file that ends earlier while it is read was cut.
        counts: receives for each finished range, by `item`, the bytes that lie inside the file.

    Raises:
        OSError: as preadv(2); `Cut`.
        DeadlinePassed: between two calls.
    """
    if len(ranges) == 1 and not direct.enabled:
        item, dst, offset, landed = ranges[0]
        nbytes = len(dst)
        if nbytes <= MAX_IO and offset + nbytes <= size:  # nearly always: one range, inside the file, in one call
            done = calls.preadv(fd, [dst], offset)
            if 0 < done < nbytes:
                check_deadline(deadline)
                rest = _Piece(False, [dst[done:]], offset + done, nbytes - done)
                done += _read_piece(calls, fd, rest, deadline, False)
            if done < nbytes:
                raise Cut(offset + done, size)
            counts[item] = nbytes
            if landed is not None:
                landed()
            return
    stepped = any(wanted_range.landed is not None for wanted_range in ranges)
    position, scratch = 0, None
    if stepped and not direct.enabled:
        position = _read_steps(calls, fd, size, ranges, deadline, counts)
    while position < len(ranges):
        if position:
            check_deadline(deadline)
        first = ranges[position]
        views, end, stop = [first.dst], first.offset + len(first.dst), position + 1
        while stop < len(ranges) and 0 <= ranges[stop].offset - end <= GAP and end < size:
            if stepped and end - first.offset >= LANDING_STEP:
                break
            gap = ranges[stop].offset - end
            if gap:
                scratch = scratch or memoryview(bytearray(GAP))
                views.append(scratch[:gap])
            views.append(ranges[stop].dst)
            end = ranges[stop].offset + len(ranges[stop].dst)
            stop += 1
        # preadv of nothing, or at an offset the kernel refuses, is still an answer: nothing lies there.
        wanted = end - first.offset if first.offset < size else 0
        done = _read_run(calls, fd, views, first.offset, wanted, size, deadline, direct) if wanted else 0
        if done < wanted and first.offset + done < size:
            raise Cut(first.offset + done, size)
        for wanted_range in ranges[position:stop]:
            inside = max(0, first.offset + done - wanted_range.offset)
            counts[wanted_range.item] = min(len(wanted_range.dst), inside)
            if wanted_range.landed is not None:
                wanted_range.landed()
        position = stop
