"""Memory that bytes are read into and written from: slabs, and reference-counted leases on them.

A `BufferPool` maps its slabs once (huge pages where the system has them, shared memory when other processes must see
them, page-locked when torch with CUDA is loaded) and never allocates outside them. A full pool is back-pressure with a
deadline. `Buffer` counts two things: references of owners (`retain`/`release`) and pins of I/O under way
(`pin`/`unpin`). Memory returns to the pool when both are zero, so a buffer that its owner gave up after a deadline
stays in quarantine until the late I/O has really ended.

Safety rests on these counts: a plain memoryview does not tell who still holds it (Python 3.12's export counts could
only be a debug check, 3.11 has none).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from .errors import ClosedError, ConfigError, PoolExhausted

__all__ = ["CANARY", "Buffer", "BufferPool", "PoolStats", "Slab", "copy_bytes"]

CANARY = 0xA5
"""What free memory is filled with in canary mode (`KVSTORE_POOL_CANARY=1`): no caller may ever see it as data."""

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

# Not in `fcntl` before Python 3.13; values of linux/fcntl.h.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_RELEASED = memoryview(b"")
_RELEASED.release()


class PoolStats(NamedTuple):
    """What a pool holds right now.

    Attributes:
        total: bytes of all slabs.
        in_use: bytes that are not free (rounded up to the pool's alignment).
        buffers: number of live buffers.
        pinned: number of pins of I/O under way.
        quarantined: buffers that every owner has released but late I/O still pins.
        waiting: threads that wait in `acquire`.
    """

    total: int
    in_use: int
    buffers: int
    pinned: int
    quarantined: int
    waiting: int


class _CannotSeal(Exception):
    """This system has no memfd that can be sealed as needed."""


def _map_sealed(nbytes: int) -> tuple[int, mmap.mmap]:
    """(memfd, its only writable mapping).

    Raises:
        _CannotSeal: the system cannot do that.
        OSError, OverflowError: there is not that much memory.
    """
    try:
        fd = os.memfd_create("kvstore-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        raise _CannotSeal(f"this system has no memfd that can be sealed: {error}") from error
    mapping: mmap.mmap | None = None
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise _CannotSeal(f"this system cannot seal a memfd against writes of others: {error}") from error
    except BaseException:
        if mapping is not None:
            mapping.close()
        os.close(fd)
        raise
    return fd, mapping


class Slab:
    """One mapping of memory. `view` covers all of it; `fd` is its memfd when it is shared, else None.

    The memfd is sealed (F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK, F_SEAL_GROW; memfd_create(2), fcntl(2)): another process
    that is given `fd` can map and read it, but it can neither write to it nor cut it off under our feet. Where the
    system has no such seals (Linux before 5.1, some sandboxes), memory that was to be shared is private instead.

    Attributes:
        unshared: why memory that was to be shared is not; "" otherwise.
    """

    def __init__(self, nbytes: int, *, shared: bool = False, page_lock: bool = False) -> None:
        self.nbytes = nbytes
        self.fd: int | None = None
        self.unshared = ""
        self._map: mmap.mmap | None = None
        try:
            if shared:
                try:
                    self.fd, self._map = _map_sealed(nbytes)
                except _CannotSeal as error:
                    self.unshared = str(error)
            if self._map is None:
                self._map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"a buffer pool cannot map a slab of {nbytes} bytes: {error}", cause=error) from error
        if _MADV_HUGEPAGE is not None:
            try:
                self._map.madvise(_MADV_HUGEPAGE)
            except OSError:  # the kernel has no huge pages
                pass
        self.view = memoryview(self._map)
        self.page_locked = page_lock and _cuda_host_register(self.view)

    def close(self) -> None:
        """Unmap, unless views are still out; then the mapping goes with the last of them."""
        if self.page_locked:
            _cuda_host_unregister(self.view)
            self.page_locked = False
        view, mapping = self.view, self._map
        self.view, self._map = _RELEASED, None
        try:
            view.release()
            if mapping is not None:
                mapping.close()
        except BufferError:  # views are out; with these references gone they alone keep the mapping
            pass
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _cudart() -> object | None:
    """torch's CUDA runtime if torch is already loaded and has a device. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    runtime: object = torch.cuda.cudart()
    return runtime


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _cuda_host_register(view: memoryview) -> bool:
    runtime = _cudart()
    if runtime is None:
        return False
    return int(runtime.cudaHostRegister(_address(view), len(view), 0)) == 0  # type: ignore[attr-defined]


def _cuda_host_unregister(view: memoryview) -> None:
    runtime = _cudart()
    if runtime is not None:
        runtime.cudaHostUnregister(_address(view))  # type: ignore[attr-defined]


class Buffer:
    """A lease on contiguous memory of a pool. Begins with one reference, which the caller of `acquire` owns.

    `release` exactly once per reference; a second release is an error, not a clamp. As a context manager it
    releases its reference at the end.
    """

    __slots__ = ("_nbytes", "_parent", "_pins", "_pool", "_refs", "_slab", "_span", "_start", "_view")

    def __init__(
        self, pool: BufferPool, slab: int, start: int, span: int, nbytes: int, parent: Buffer | None = None
    ) -> None:
        self._pool = pool
        self._slab = slab
        self._start = start
        self._span = span
        self._nbytes = nbytes
        self._parent = parent
        self._refs = 1
        self._pins = 0
        view = pool.slabs[slab].view[start : start + nbytes]
        self._view = view if parent is None else view.toreadonly()

    @property
    def view(self) -> memoryview:
        """The memory, flat bytes, exactly as long as asked for. Raises `ClosedError` once every owner released it.

        A view taken before is released (`ValueError` on use) when the memory goes back to the pool.
        """
        if self._refs <= 0:
            raise ClosedError("this buffer was released")
        return self._view

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def slab(self) -> Slab:
        """The slab it lies in (for registered memory)."""
        return self._pool.slabs[self._slab]

    @property
    def offset(self) -> int:
        """Where it begins in its slab, in bytes."""
        return self._start

    @property
    def exclusive(self) -> bool:
        """True if there is one owner and no I/O under way: its release frees the memory at once."""
        return self._refs == 1 and self._pins == 0

    @property
    def intact(self) -> bool:
        """Whether what was read through `view` so far was what the buffer held. False only for a lease on memory of
        another process that may have reused it: who has read from a lease looks here afterwards."""
        return True

    def __len__(self) -> int:
        return self._nbytes

    def retain(self) -> Buffer:
        """One more owner; returns self. Raises `ClosedError` if nobody owns it any more."""
        with self._pool._lock:
            if self._refs <= 0:
                raise ClosedError("this buffer was released; it cannot be retained")
            self._refs += 1
        return self

    def release(self) -> None:
        """One owner less. Raises `ClosedError` on one release too many."""
        self._drop(pin=False)

    def pin(self) -> Buffer:
        """I/O on the memory begins; returns self. Memory with a pin never goes back to the pool."""
        with self._pool._lock:
            if self._refs <= 0:
                raise ClosedError("this buffer was released; no I/O may begin on it")
            self._pins += 1
            self._pool._pinned += 1
        return self

    def unpin(self) -> None:
        """I/O on the memory has really ended."""
        self._drop(pin=True)

    def _drop(self, *, pin: bool) -> None:
        pool = self._pool
        with pool._lock:
            if pin:
                if self._pins <= 0:
                    raise ClosedError("this buffer has no pin to drop")
                self._pins -= 1
                pool._pinned -= 1
            else:
                if self._refs <= 0:
                    raise ClosedError("this buffer was released before: one release too many")
                self._refs -= 1
                if self._refs == 0 and self._pins:
                    pool._quarantined += 1
            if self._refs or self._pins:
                return
            if pin:
                pool._quarantined -= 1
            # Nobody may use this very view any more; slices and arrays made from it are the caller's own risk.
            try:
                self._view.release()
            except BufferError:  # an array made from it is still alive
                pass
            if self._parent is None:
                pool._give_back(self)
                return
        self._parent.release()

    def readonly(self) -> Buffer:
        """A second lease on the same memory whose `view` cannot be written to. The memory lives as long as either."""
        self.retain()
        return Buffer(self._pool, self._slab, self._start, self._span, self._nbytes, self)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Buffer {self._nbytes} B refs={self._refs} pins={self._pins}>"


class _FreeList:
    """Free runs of one slab. Best fit in O(log n), with neighbours joined again on `put`."""

    def __init__(self, nbytes: int) -> None:
        self.by_size = [(nbytes, 0)]
        self.by_start = {0: nbytes}
        self.by_end = {nbytes: 0}

    def take_many(self, nbytes: int, count: int) -> list[int]:
        """Where up to `count` runs of `nbytes` begin: what taking one after the other, each from the smallest run that
        has room, would give. One run that has room for several gives them in one step."""
        starts: list[int] = []
        while len(starts) < count:
            index = bisect.bisect_left(self.by_size, (nbytes, -1))
            if index == len(self.by_size):
                break
            size, start = self.by_size.pop(index)
            del self.by_start[start]
            del self.by_end[start + size]
            end = start + nbytes * min(size // nbytes, count - len(starts))
            starts += range(start, end, nbytes)
            if start + size > end:
                self._add(end, start + size - end)
        return starts

    def put(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        if (size := self.by_start.get(end)) is not None:
            self._remove(end, size)
            nbytes += size
        if (before := self.by_end.get(start)) is not None:
            self._remove(before, start - before)
            nbytes += start - before
            start = before
        self._add(start, nbytes)

    def _add(self, start: int, nbytes: int) -> None:
        bisect.insort(self.by_size, (nbytes, start))
        self.by_start[start] = nbytes
        self.by_end[start + nbytes] = start

    def _remove(self, start: int, nbytes: int) -> None:
        del self.by_size[bisect.bisect_left(self.by_size, (nbytes, start))]
        del self.by_start[start]
        del self.by_end[start + nbytes]


class BufferPool:
    """A fixed amount of memory, handed out as `Buffer`s.

    Args:
        nbytes: size of the whole pool; rounded up to the alignment. Mapped at once, backed by pages when touched.
        slab_bytes: size of one slab, the largest possible buffer; default: one slab for the whole pool.
        alignment: every buffer begins at a multiple of this and occupies a multiple of it; a power of two.
        shared: map the slabs as shared memory (memfd), for other processes of this host to read; see `Slab`.
        page_lock: page-lock the slabs for CUDA; None: if torch with CUDA is loaded.
        canary: fill free memory with 0xA5 and check it at the next `acquire`; default: `KVSTORE_POOL_CANARY=1`.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        slab_bytes: int | None = None,
        alignment: int = 4096,
        shared: bool = False,
        page_lock: bool | None = None,
        canary: bool | None = None,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"alignment={alignment} must be a power of two")
        if nbytes < 1 or (slab_bytes is not None and slab_bytes < 1):
            raise ConfigError(f"a buffer pool needs at least one byte, not {min(nbytes, slab_bytes or nbytes)}")
        self._alignment = alignment
        total = self._round(nbytes)
        size = min(total, self._round(slab_bytes or total))
        sizes = [size] * (total // size) + ([total % size] if total % size else [])
        lock_pages = page_lock is not False and _cudart() is not None
        self.slabs: Sequence[Slab] = [Slab(n, shared=shared, page_lock=lock_pages) for n in sizes]
        self._free = [_FreeList(n) for n in sizes]
        self._total = total
        self._largest = max(sizes)
        self._canary = os.environ.get("KVSTORE_POOL_CANARY") == "1" if canary is None else canary
        self._lock = threading.Lock()
        self._waiters: deque[threading.Event] = deque()
        self._in_use = self._buffers = self._pinned = self._quarantined = 0
        self._closed = False
        self._filled = [0] * len(sizes)  # canary mode: memory below this was handed out before, or filled

    def _round(self, nbytes: int) -> int:
        return (max(nbytes, 1) + self._alignment - 1) & -self._alignment

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self._total

    @property
    def largest(self) -> int:
        """Size of the largest buffer it can ever hand out, in bytes."""
        return self._largest

    def acquire(self, nbytes: int, timeout: float | None = 0) -> Buffer:
        """A buffer of `nbytes` bytes with one reference. Its content is undefined.

        Args:
            timeout: seconds to wait for memory to become free; 0 does not wait, None waits without limit.

        Raises:
            PoolExhausted: nothing became free in time, or `nbytes` is more than the pool could ever give.
            ClosedError: the pool is closed.
            ConfigError: `nbytes` is negative.
            RuntimeError: in canary mode, somebody wrote into the memory while it was free.
        """
        return self.acquire_many([nbytes], timeout)[0]

    def acquire_many(self, sizes: Sequence[int], timeout: float | None = 0) -> list[Buffer]:
        """Buffers of all `sizes`, or none: two callers that each hold half of what they need cannot block each other.
        Waiting callers are served in the order they came, so a large one is not starved by small ones.

        Raises: as `acquire`.
        """
        if min(sizes, default=0) < 0:
            raise ConfigError(f"a buffer cannot have {min(sizes)} bytes")
        spans = [self._round(n) for n in sizes]
        if not self._can_ever_hold(spans):
            raise PoolExhausted(
                f"{sum(sizes)} bytes asked for, but the pool has {self._total} in slabs of {self._largest}"
            )
        end = None if timeout is None or timeout > threading.TIMEOUT_MAX else time.monotonic() + timeout
        turn: threading.Event | None = None
        got: list[Buffer] | None = None
        try:
            while True:
                with self._lock:
                    if self._closed:
                        raise ClosedError("the buffer pool is closed")
                    before = len(self._waiters) if turn is None else self._waiters.index(turn)
                    if before == 0 and (got := self._take(sizes, spans)) is not None:
                        break
                    if turn is None:
                        turn = threading.Event()
                        self._waiters.append(turn)
                    else:
                        turn.clear()
                    in_use = self._in_use
                left = None if end is None else end - time.monotonic()
                if (left is not None and left <= 0) or not turn.wait(left):
                    raise PoolExhausted(
                        f"no {sum(sizes)} bytes became free in time: {in_use} of {self._total} are in use"
                        + (f" and {before} other requests wait before this one" if before else "")
                    )
        finally:  # also after an interrupt: a turn that nobody takes would block all others
            if turn is not None:
                with self._lock:
                    self._waiters.remove(turn)
                    self._wake_first()
        if self._canary:
            self._check_canary(got)
        return got

    def _can_ever_hold(self, spans: Sequence[int]) -> bool:
        """True if the empty pool could serve the request; as `_take` would do it."""
        if sum(spans) > self._total:
            return False
        if len(self.slabs) == 1 or len(spans) == 1:
            return max(spans, default=0) <= self._largest
        room = [slab.nbytes for slab in self.slabs]
        for span in spans:
            index = next((index for index, left in enumerate(room) if left >= span), None)
            if index is None:
                return False
            room[index] -= span
        return True

    def _take(self, sizes: Sequence[int], spans: Sequence[int]) -> list[Buffer] | None:
        """Allocate all or nothing; called with the lock held."""
        got: list[tuple[int, int, int]] = []
        for span, alike in itertools.groupby(spans):  # most records of a batch have one size
            left = len([*alike])
            for index, free in enumerate(self._free):
                starts = free.take_many(span, left)
                got += [(index, start, span) for start in starts]
                left -= len(starts)
                if not left:
                    break
            else:
                for index, start, taken in got:
                    self._free[index].put(start, taken)
                return None
        if self._canary:
            for index, start, span in got:
                self._fill_first_time(index, start + span)
        self._in_use += sum(spans)
        self._buffers += len(spans)
        return [Buffer(self, *place, nbytes) for place, nbytes in zip(got, sizes, strict=True)]

    def _give_back(self, buffer: Buffer) -> None:
        """Called with the lock held, when the last reference and pin are gone."""
        self._buffers -= 1
        self._in_use -= buffer._span
        if self._closed:
            if not self._buffers:
                self._unmap()
            return
        if self._canary:
            slab = self.slabs[buffer._slab]
            ctypes.memset(_address(slab.view) + buffer._start, CANARY, buffer._span)
        self._free[buffer._slab].put(buffer._start, buffer._span)
        self._wake_first()

    def _wake_first(self) -> None:
        if self._waiters:
            self._waiters[0].set()

    def _fill_first_time(self, index: int, end: int) -> None:
        """Fill memory of a slab up to `end` that was never handed out: a large pool is not touched as a whole."""
        filled = self._filled[index]
        if end > filled:  # best fit takes the beginning of a run, so all below was handed out once
            ctypes.memset(_address(self.slabs[index].view) + filled, CANARY, end - filled)
            self._filled[index] = end

    def _check_canary(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            view = self.slabs[buffer._slab].view[buffer._start : buffer._start + buffer._span]
            if view != bytes([CANARY]) * buffer._span:
                for each in buffers:
                    each.release()
                raise RuntimeError(f"free pool memory was written to: slab {buffer._slab}, offset {buffer._start}")

    def stats(self) -> PoolStats:
        """What the pool holds right now. After all work is done, everything but `total` is 0."""
        with self._lock:
            return PoolStats(
                self._total, self._in_use, self._buffers, self._pinned, self._quarantined, len(self._waiters)
            )

    def close(self) -> None:
        """No more buffers; those still out stay valid, and the memory goes with the last one. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for waiter in self._waiters:
                waiter.set()
            if not self._buffers:
                self._unmap()

    def _unmap(self) -> None:
        for slab in self.slabs:
            slab.close()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NUMPY_COPY_BYTES = 32 << 10  # from here releasing the GIL is worth numpy's overhead of about 1 µs


def copy_bytes(dst: memoryview, src: memoryview) -> None:
    """Copy flat bytes; large copies release the GIL. `dst` and `src` are equally long and do not overlap."""
    if len(src) < _NUMPY_COPY_BYTES:
        dst[:] = src
        return
    import numpy as np

    np.copyto(np.frombuffer(dst, dtype=np.uint8), np.frombuffer(src, dtype=np.uint8))
