"""Where a body lies in shared memory: at the sender from views to places, at the receiver from places to bytes.

The meta of a GRANT frame, which follows the frame that announced the body; little-endian:

    "A"  n × size u64                              n new slabs, whose descriptors come next (SCM_RIGHTS). Slabs are
                                                   numbered in the order in which they are passed, from 0
    "B"  n × (slab u32, offset u64, length u64)    the body, in order. Slab 0xFFFFFFFF: so many bytes follow behind
                                                   this frame, on the connection

Two places may overlap: a batch may ask for one record twice.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._shm_memory import check_sealed
from .errors import ProtocolError

__all__ = [
    "INLINE",
    "MAX_SLABS",
    "Place",
    "Region",
    "Regions",
    "pack_places",
    "pack_slabs",
    "unpack_places",
    "unpack_slabs",
]

INLINE = 0xFFFFFFFF
MAX_SLABS = 1024
"""Most slabs that one side passes over one connection. Memory beyond that is not shared."""

MAX_FDS = 64
"""Most slabs in one message. The kernel takes 253 descriptors (unix(7), SCM_MAX_FD)."""

MAX_PLACES = 1 << 18

_PLACE = np.dtype([("slab", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])
_SLABS, _BODY = b"A", b"B"


class Place(NamedTuple):
    """`nbytes` bytes at `offset` of slab number `slab`, or behind the frame if that is `INLINE`."""

    slab: int
    offset: int
    nbytes: int


class Region:
    """Registered memory of ours, as one connection knows it.

    Attributes:
        number: what the peer calls it; -1 until it was passed.
    """

    def __init__(self, memory: memoryview, fd: int, base: int) -> None:
        self.base = base
        self.nbytes = len(memory)
        self.number = -1
        self._memory = memory[:]  # keeps it mapped when its owner closes it: its addresses must not become another's
        self._fd = os.dup(fd)  # the owner may close its own

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        """The descriptor is not needed any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Regions:
    """All memory that one side of a connection has registered."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: list[Region] = []

    def add(self, memory: memoryview, fd: int) -> bool:
        """False if it cannot be shared: no sealed memfd, too many slabs, or no descriptor left."""
        if not len(memory) or len(self._regions) >= MAX_SLABS:
            return False
        base = _address(memory)
        at = bisect.bisect_left(self._bases, base)
        if at < len(self._bases) and self._bases[at] == base:
            return True  # known
        try:
            check_sealed(fd, len(memory))
            region = Region(memory, fd, base)
        except (ProtocolError, OSError):
            return False
        self._bases.insert(at, base)
        self._regions.insert(at, region)
        return True

    def locate(self, view: memoryview) -> tuple[Region, int] | None:
        """(region, offset in it) of a view that is not empty; None if it lies elsewhere."""
        if not self._bases:
            return None
        address = _address(view)
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        region = self._regions[at]
        offset = address - region.base
        return (region, offset) if offset + len(view) <= region.nbytes else None

    def close(self) -> None:
        """The memory may be unmapped again."""
        for region in self._regions:
            region.close()
        self._bases, self._regions = [], []


def pack_slabs(sizes: Sequence[int]) -> bytes:
    return _SLABS + np.array(sizes, dtype="<u8").tobytes()


def unpack_slabs(meta: bytes, known: int) -> list[int] | None:
    """The sizes of new slabs; None if `meta` is something else.

    Args:
        known: number of slabs passed before.

    Raises:
        ProtocolError: none, too many at a time, or too many together.
    """
    if meta[:1] != _SLABS:
        return None
    count, rest = divmod(len(meta) - 1, 8)
    if rest or not 0 < count <= MAX_FDS or known + count > MAX_SLABS:
        raise ProtocolError(f"the peer announced {count} slabs of memory ({len(meta)} bytes), after {known}")
    sizes: list[int] = np.frombuffer(meta, dtype="<u8", offset=1).tolist()
    return sizes


def pack_places(places: Sequence[Place]) -> bytes:
    return _BODY + np.array([tuple(place) for place in places], dtype=_PLACE).tobytes()


def unpack_places(meta: bytes, nbytes: int, slabs: Sequence[int]) -> list[Place]:
    """The places of a body of `nbytes` bytes.

    Args:
        slabs: size of each slab that was passed.

    Raises:
        ProtocolError: none, too many, of an unknown slab, empty, not wholly inside their slab, or of another total.
    """
    count, rest = divmod(len(meta) - 1, _PLACE.itemsize)
    if meta[:1] != _BODY or rest or not 0 < count <= MAX_PLACES:
        raise ProtocolError(f"the peer said where a body lies in {len(meta)} bytes that make no sense")
    places = [Place(*fields) for fields in np.frombuffer(meta, dtype=_PLACE, offset=1).tolist()]
    total = 0
    for slab, offset, length in places:
        total += length
        if slab == INLINE:
            if length and not offset:
                continue
        elif slab < len(slabs) and 0 < length <= slabs[slab] - offset:
            continue
        raise ProtocolError(f"the peer says that {length} bytes of a body lie at {offset} of its slab {slab}")
    if total != nbytes:
        raise ProtocolError(f"the peer announced a body of {nbytes} bytes and said where {total} lie")
    return places


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
