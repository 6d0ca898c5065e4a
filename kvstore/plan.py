"""In which reads and writes a batch is done. Pure functions: they look at sizes and limits and do no I/O.

The unit is a piece: a run of consecutive segments of one record. Pieces that lie next to each other in a job go to
the backend in one call, large records are cut so that lanes share them, small ones are joined so that a lane hop is
paid once for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .backend import Capability, Limits

__all__ = ["Piece", "cut", "group", "runs"]

_MIN_ITEMS_PER_JOB = 8  # below this a lane hop (10–50 µs) costs more than the items
_MAX_ITEMS_PER_JOB = 512


class Piece(NamedTuple):
    """A run of segments of one item of a batch.

    Attributes:
        item: index of the item in the batch.
        first: first segment, counted in the record.
        num: number of segments.
        nbytes: bytes they occupy.
        head: True if the record's header is read along with them.
    """

    item: int
    first: int
    num: int
    nbytes: int
    head: bool


def runs(sizes: Sequence[int], target: int) -> list[tuple[int, int, int]]:
    """Cut a list of sizes into consecutive runs of about `target` bytes: (first index, count, bytes).

    A run ends before it would exceed the target; a single size above the target is a run of its own.
    """
    out: list[tuple[int, int, int]] = []
    begin, total = 0, 0
    for index, size in enumerate(sizes):
        if total and total + size > target:
            out.append((begin, index - begin, total))
            begin, total = index, 0
        total += size
    if begin < len(sizes):
        out.append((begin, len(sizes) - begin, total))
    return out


def cut(item: int, sizes: Sequence[int], first: int, target: int) -> list[Piece]:
    """The pieces in which one record's segments `first`, `first + 1`, … of the given sizes are read.

    The header comes with the first piece, so that one request brings header, table and the first layers.
    """
    total = sum(sizes)
    if total <= target:
        return [Piece(item, first, len(sizes), total, True)]
    return [Piece(item, first + begin, count, nbytes, begin == 0) for begin, count, nbytes in runs(sizes, target)]


def group(sizes: Sequence[int], *, limits: Limits, capabilities: Capability) -> list[tuple[int, int]]:
    """Join consecutive units of work of the given sizes into jobs: (first, end) index pairs, in order.

    A job is one call of a backend, by one lane. It ends at about `preferred_io_bytes`. Few small units become one
    job where a batch is cheap for the backend, else they are spread over its lanes.
    """
    count = len(sizes)
    if not count:
        return []
    target = limits.preferred_io_bytes
    most = _MAX_ITEMS_PER_JOB
    if not capabilities & Capability.NATIVE_BATCH:
        most = max(min(most, -(-count // limits.lanes)), _MIN_ITEMS_PER_JOB)
    jobs, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and (total + size > target or index - begin >= most):
            jobs.append((begin, index))
            begin, total = index, 0
        total += size
    jobs.append((begin, count))
    return jobs
