"""Which ranges of which objects are asked for: neighbours together, large ones in parts. Pure functions.

A **span** is a run of a record's bytes that is wanted, with small gaps that are fetched along and thrown away. A
**part** is one request: a span, or a piece of a large one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from .client import gather

__all__ = ["Part", "Piece", "Splitter", "parts_of", "spans_of"]

MIB = 1 << 20
_BURST = 4.0  # a part's bytes should take this many times the latency
_WEIGHT = 0.1  # of a new measurement


class Piece(NamedTuple):
    """A wanted range.

    Attributes:
        item: its index in the batch.
        offset: first byte in the record.
        dst: where it goes.
    """

    item: int
    offset: int
    dst: memoryview


class Part(NamedTuple):
    """One request.

    Attributes:
        start: first byte in the record.
        views: where the bytes go, in order, gaps included.
        nbytes: length of the views together.
    """

    start: int
    views: Sequence[memoryview]
    nbytes: int


def spans_of(pieces: Sequence[Piece], gap: int, waste: memoryview) -> list[Part]:
    """Join the non-empty ranges of one record into spans, by offset.

    Ranges that overlap go into different spans: each destination gets its own bytes.

    Args:
        gap: ranges at most this many bytes apart are joined.
        waste: scratch memory of at least `gap` bytes, for what lies between.
    """
    spans: list[Part] = []
    rest = sorted((piece for piece in pieces if len(piece.dst)), key=lambda piece: piece.offset)
    while rest:
        later: list[Piece] = []
        views: list[memoryview] = []
        start = end = -1
        for piece in rest:
            if start >= 0 and piece.offset < end:
                later.append(piece)
                continue
            if start >= 0 and piece.offset - end <= gap:
                if piece.offset > end:
                    views.append(waste[: piece.offset - end])
            else:
                if start >= 0:
                    spans.append(Part(start, views, end - start))
                start, views = piece.offset, []
            views.append(piece.dst)
            end = piece.offset + len(piece.dst)
        spans.append(Part(start, views, end - start))
        rest = later
    return spans


def parts_of(span: Part, size: int) -> list[Part]:
    """Cut a span into requests of about `size` bytes, if it is longer than two of them."""
    if span.nbytes <= 2 * size:
        return [span]
    count = -(-span.nbytes // size)
    step = -(-span.nbytes // count)
    return [
        Part(span.start + at, gather(span.views, at, min(at + step, span.nbytes)), min(step, span.nbytes - at))
        for at in range(0, span.nbytes, step)
    ]


class Splitter:
    """The size of parts, from what was measured: long enough that the wait for the first byte is a fifth of the whole
    at most, so that a connection is kept busy, and short enough that many connections share the work.

    Args:
        size: to begin with, bytes.
        adapt: False: it stays so.
        least, most: bounds, bytes.
    """

    def __init__(self, size: int, *, adapt: bool = True, least: int = 4 * MIB, most: int = 32 * MIB) -> None:
        self._lock = threading.Lock()
        self._adapt = adapt
        self._least = least
        self._most = most
        self._latency = 0.0
        self._bandwidth = 0.0
        self.size = size

    def note(self, nbytes: int, first_byte: float, body: float) -> None:
        """A part came: seconds to its first byte, and from there to its last one."""
        if not self._adapt or nbytes < MIB or body <= 0 or first_byte <= 0:
            return
        with self._lock:
            known = self._bandwidth > 0
            self._latency += (first_byte - self._latency) * (_WEIGHT if known else 1.0)
            self._bandwidth += (nbytes / body - self._bandwidth) * (_WEIGHT if known else 1.0)
            wanted = _BURST * self._latency * self._bandwidth
            self.size = min(max(self._least, round(wanted / MIB) * MIB), self._most)
