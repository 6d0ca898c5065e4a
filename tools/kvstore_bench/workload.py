"""What is moved: memory touched before it is timed, bytes that cannot be compressed, names used once.

The bytes of a record follow from its key and size: random words from a generator seeded with the size, and at both
ends a stamp of the key. So a record that comes back under another name, cut, shifted or not at all cannot pass.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.keys import Key

__all__ = ["POISON", "Region", "Workload", "same_bytes", "size_name", "stamp"]

POISON = 0x5C
"""What a destination is filled with before a read that is going to be compared."""

_PAGE = 4096
_STAMP_BYTES = 32
_CHUNK_WORDS = 1 << 17  # random words made at a time: stays in the L2 cache

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """True if two writable flat byte views are equal (`memcmp`, without the GIL)."""
    return len(a) == len(b) and (not len(a) or _memcmp(_address(a), _address(b), len(a)) == 0)


def size_name(nbytes: int) -> str:
    """`16777216` → "16MiB": the largest binary unit that divides it; part of the names of figures."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % factor == 0 and nbytes:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes}B"


def stamp(key: bytes, nbytes: int) -> bytes:
    """The 32 bytes that a record of this key and size begins and ends with (cut if it is shorter)."""
    return hashlib.sha256(b"kvstore-bench %d " % nbytes + key).digest()[: min(_STAMP_BYTES, nbytes)]


class Region:
    """Memory in huge pages where the system has them, touched once so that no page fault is ever timed.

    Args:
        shared: as a store's pool has it for transports: it can be registered, and other processes can see it.

    Attributes:
        slab: for `Backend.register`, if it is shared.
    """

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        from kvstore.buffers import Slab

        self.slab: Slab | None = None
        if shared:
            self.slab = Slab(-(-max(nbytes, _PAGE) // _PAGE) * _PAGE, shared=True)
            self.view = self.slab.view
        else:
            mapping = mmap.mmap(-1, max(nbytes, _PAGE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                except OSError:  # the kernel has none
                    pass
            self.view = memoryview(mapping)
        ctypes.memset(_address(self.view), POISON, len(self.view))

    def slots(self, count: int, nbytes: int) -> list[memoryview]:
        """The first `count` views of `nbytes` bytes, each beginning on a page."""
        stride = _stride(nbytes)
        return [self.view[index * stride : index * stride + nbytes] for index in range(count)]

    def poison(self, count: int, nbytes: int) -> None:
        """Overwrite the first `count` slots."""
        for slot in self.slots(count, nbytes):
            ctypes.memset(_address(slot), POISON, nbytes)


def _stride(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Workload:
    """A batch of records of one size: sources, destinations, and the names they get.

    Args:
        sources, destinations: regions with room for the batch (`Workload.room`).
        make_key: name → key.
        run_id: unique per run and row; part of every name.
        announce: told the names' common beginning before a batch of names is used (each is `beginning/index`).
    """

    def __init__(
        self,
        sources: Region,
        destinations: Region,
        *,
        count: int,
        nbytes: int,
        make_key: Callable[[str], Key],
        run_id: str,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.count, self.nbytes = count, nbytes
        self.sources = sources.slots(count, nbytes)
        self.destinations = destinations.slots(count, nbytes)
        self._destination_region = destinations
        self._make_key = make_key
        self._announce = announce
        self._prefix = f"kvstore-bench/{run_id}/{nbytes}"
        self._serial = itertools.count()
        _fill(self.sources, seed=nbytes)

    @staticmethod
    def room(count: int, nbytes: int) -> int:
        """Bytes a region needs for `count` records of `nbytes`."""
        return count * _stride(nbytes)

    def new_keys(self) -> list[Key]:
        """Keys never used before, one per record; the sources are stamped with them."""
        prefix = f"{self._prefix}/{next(self._serial)}"
        if self._announce is not None:
            self._announce(prefix)
        keys = [self._make_key(f"{prefix}/{index}") for index in range(self.count)]
        for key, source in zip(keys, self.sources, strict=True):
            mark = stamp(key, self.nbytes)
            source[: len(mark)] = mark
            source[self.nbytes - len(mark) :] = mark
        return keys

    def poison(self) -> None:
        """Make sure that nothing that lies in the destinations can pass as data."""
        self._destination_region.poison(self.count, self.nbytes)

    def wrong(self) -> list[int]:
        """Indices of the records whose destination differs from what the last `new_keys` were put with."""
        pairs: Sequence[tuple[memoryview, memoryview]] = list(zip(self.sources, self.destinations, strict=True))
        return [index for index, (source, destination) in enumerate(pairs) if not same_bytes(source, destination)]


def _fill(slots: Sequence[memoryview], *, seed: int) -> None:
    import numpy as np

    random = np.random.Generator(np.random.SFC64(seed))
    for slot in slots:
        step = _CHUNK_WORDS * 8
        for start in range(0, len(slot), step):
            piece = slot[start : start + step]
            words = random.integers(0, 1 << 64, -(-len(piece) // 8), dtype=np.uint64)
            piece[:] = words.view(np.uint8)[: len(piece)].data
