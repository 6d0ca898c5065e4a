"""Another process's memory, by its memfd: checked, read from, and mapped when somebody wants to look at it in place.

What a peer passes is not believed. Memory is taken only if it can neither shrink nor be written to by anyone but its
owner's existing mapping (seals, fcntl(2)), has the size that was announced, and consists of ordinary pages. So a peer
cannot make us die of SIGBUS by cutting off what we have mapped.

It is mapped read-only, once in a process however many connections lead to it, and copied from by the C library without
the interpreter's lock: as fast as a copy within the process. preadv(2) on the descriptor would need no mapping and no
page tables (0.2 % of what was read, in each process that reads it, with pages of 4 KiB), but it costs 1.7 times the CPU
of memcpy (0.13 against 0.075 s/GB), and twice the time where two cores copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from .errors import ConnectionLost, ProtocolError

__all__ = ["Attachment", "Attachments", "check_sealed"]

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; in `fcntl` from Python 3.13
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_ONLY = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE

_SMALL_BYTES = 32 << 10  # below, giving up the interpreter's lock costs more than the copy


def check_sealed(fd: int, nbytes: int) -> tuple[int, int]:
    """(device, inode) of the memfd `fd` of exactly `nbytes` bytes.

    Raises:
        ProtocolError: it is something else, has another size, or could change its size or be written to by us.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        page = os.fstatvfs(fd).f_bsize
        found = os.fstat(fd)
    except OSError as error:  # EINVAL: no file that can have seals
        raise ProtocolError(f"the peer passed a descriptor that is no memory: {error}") from error
    if seals & _FIXED_SIZE != _FIXED_SIZE or not seals & _READ_ONLY:
        raise ProtocolError(f"the peer passed memory that is not sealed as needed (seals {seals:#x})")
    if page != mmap.PAGESIZE:  # huge pages of hugetlbfs: a hole may have no page to fill it, which is SIGBUS
        raise ProtocolError(f"the peer passed memory of pages of {page} bytes")
    if nbytes < 1 or found.st_size != nbytes:
        raise ProtocolError(f"the peer passed memory of {found.st_size} bytes and said {nbytes}")
    return found.st_dev, found.st_ino


class Attachment:
    """One slab of another process. Made by `Attachments.attach`; each attach is followed by one `detach`.

    Attributes:
        nbytes: its size.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # as the owner's own mapping; without it each 4 KiB is a fault of its own
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views` (writable, flat) from byte `offset` on. The caller has checked that this lies inside."""
        for view in views:
            nbytes = len(view)
            source = memoryview(self._map)[offset : offset + nbytes]
            if nbytes < _SMALL_BYTES:
                view[:] = source
            else:
                np.copyto(np.frombuffer(view, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
            offset += nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only memory of the peer, in place. It stays mapped as long as the view or the attachment lives."""
        return memoryview(self._map)[offset : offset + nbytes]

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:  # leases are out; the mapping goes with the last of them
            pass


class Attachments:
    """The memory of other processes that this process has open: once, however many connections lead to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, ...], tuple[Attachment, int]] = {}  # → (attachment, how often it is attached)

    def attach(self, fd: int, nbytes: int, *, pid: int) -> tuple[tuple[int, ...], Attachment]:
        """(what to `detach`, the memory). Closes `fd`, also when it raises.

        Args:
            pid: process that passed it (SO_PEERCRED): what one peer passes cannot stand in for another's.

        Raises:
            ProtocolError: see `check_sealed`.
            ConnectionLost: it cannot be mapped (no address space, too many mappings or descriptors).
        """
        try:
            key = (pid, *check_sealed(fd, nbytes))
            with self._lock:
                attachment, count = self._open.get(key, (None, 0))
                self._open[key] = (attachment or Attachment(fd, nbytes), count + 1)
                return key, self._open[key][0]
        except (OSError, OverflowError) as error:
            raise ConnectionLost(f"the peer's memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def detach(self, key: tuple[int, ...]) -> None:
        """The last one unmaps it, unless views are out; then the mapping goes with the last of them."""
        with self._lock:
            attachment, count = self._open[key]
            if count > 1:
                self._open[key] = (attachment, count - 1)
                return
            del self._open[key]
        attachment.close()

    def renew_lock(self) -> None:
        """After `os.fork()`, in the child: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)
