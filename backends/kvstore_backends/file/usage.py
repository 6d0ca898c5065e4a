"""How many bytes of a folder are in use: a small file that all processes on it share, under a lock.

    header   magic "kvusage1", bytes ever added, bytes ever removed, bytes reserved by puts in flight   (u64, LE)
    slots    256 of (1 if taken, bytes reserved)                                                          (u64, LE)

In use is added − removed; a put reserves before it writes and commits after it published, so what lies on the disk
never exceeds in use + reserved. Each process holds the lock of its slot's byte for as long as it lives: a slot that is
taken but not locked belongs to a process that died, and what it had reserved is given back.

The locks are open-file-description locks, which NFSv4 and most shared file systems pass to the server. Where they do
not work the counters are this process's own, and so is the cap.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import struct
import threading
import time

from kvstore.errors import TransientError
from kvstore.wrappers.base import LocalWait

from .naming import OWN, USAGE_FILE
from .oscalls import OsCalls

__all__ = ["Usage"]

logger = logging.getLogger("kvstore.file")

_HEADER = struct.Struct("<8sQQQ")
_SLOT = struct.Struct("<QQ")
_MAGIC = b"kvusage1"
_SLOTS = 256
_SLOTS_AT = 64
_MUTEX_BYTE = 0
_SLOT_BYTE = 4096  # lock of slot i; behind the data, so that no mandatory lock could hinder reading it
_NO_LOCKS = frozenset({
    errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO,
})  # fmt: skip


class Usage:
    """The counters, and the mutual exclusion around them.

    Use `acquire`, read and change the attributes, `release`. Changes that must not be lost and cannot wait for the lock
    are added to `later` (under no lock but the GIL's and `_later_lock`) and applied by the next holder.

    Attributes:
        added, removed: bytes ever committed and taken away; valid while the lock is held.
        reserved: bytes of all puts in flight, of every process; valid while the lock is held.
        shared: whether other processes see the counters.
        known: whether the counters say what lies on the disk. False: count, then call `set_total`.
        unclean: a process of this folder ended without closing; the counters may be a little off.
    """

    def __init__(self, calls: OsCalls, root: int, name: str, *, local: bool, deadline: float) -> None:
        self._calls = calls
        self._root = root
        self._local = local
        self._name = name
        self._thread_lock = threading.Lock()
        self._later_lock = threading.Lock()
        self._later = [0, 0, 0]  # added, removed, reserved
        self._mine = 0  # reserved by this process
        self._slot = -1
        self._fd = -1  # carries the locks
        self._data = -1  # reads and writes the counters
        self.added = self.removed = self.reserved = 0
        self._leaving = False
        self.known = False
        self.unclean = False
        self.shared = True
        try:
            self._open(root, deadline)
        except TransientError:
            self._close_fd()
            raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._close_fd()
            self.shared = False
            logger.warning(
                "%s: no shared usage counter (%s): the capacity holds for each process by itself, not for all of them",
                name, error.strerror,
            )  # fmt: skip

    def _open(self, root: int, deadline: float) -> None:
        calls = self._calls
        try:
            calls.mkdir(OWN, dir_fd=root)
        except FileExistsError:
            pass
        folder = calls.open_beneath(root, OWN, os.O_PATH | os.O_DIRECTORY)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = calls.open(USAGE_FILE.rpartition("/")[2], flags, 0o666, dir_fd=folder)
        finally:
            calls.close(folder)
        self._lock(deadline)  # also the test whether locks work
        try:
            self._take_slot()
            self._load()
        finally:
            self._unlock()

    def _take_slot(self) -> None:
        for index in range(_SLOTS):
            if self._calls.try_lock(self._fd, _SLOT_BYTE + index):
                self._slot = index
                # What is in the slot was left by a dead process: `_load` and `reclaim` deal with its reservation.
                taken, reserved = self._read_slot(index)
                self.unclean = self.unclean or bool(taken)
                self._load()
                self.reserved -= min(reserved, self.reserved)
                if self.known:
                    self._store()
                else:
                    self._write_slot(1, 0)
                return
        # More processes than slots: it works, but what is in flight when such a process dies stays reserved.

    def _read_slot(self, index: int) -> tuple[int, int]:
        raw = os.pread(self._data, _SLOT.size, _SLOTS_AT + index * _SLOT.size)
        if len(raw) < _SLOT.size:
            return 0, 0
        taken, reserved = _SLOT.unpack(raw)
        return taken, reserved

    def _write_slot(self, taken: int, reserved: int) -> None:
        if self._slot >= 0:
            os.pwrite(self._data, _SLOT.pack(taken, reserved), _SLOTS_AT + self._slot * _SLOT.size)

    def _load(self) -> None:
        raw = os.pread(self._data, _HEADER.size, 0)
        if len(raw) == _HEADER.size:
            magic, added, removed, reserved = _HEADER.unpack(raw)
            if magic == _MAGIC and removed <= added:
                self.added, self.removed, self.reserved = added, removed, reserved
                self.known = True
                return
        self.added = self.removed = self.reserved = 0
        self.known = False

    def _store(self) -> None:
        if self.shared and self.known:
            os.pwrite(self._data, _HEADER.pack(_MAGIC, self.added, self.removed, self.reserved), 0)
            self._write_slot(0 if self._leaving else 1, self._mine)

    def _wait_for_lock(self, deadline: float) -> None:
        pause = 5e-5
        while not self._calls.try_lock(self._fd, _MUTEX_BYTE):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            # Polling, because a holder that was stopped (SIGSTOP, a frozen host) must not hold us past the deadline.
            time.sleep(min(pause * (0.5 + random.random()), left))
            pause = min(2 * pause, 5e-3)

    def _lock(self, deadline: float) -> None:
        """Lock the counters and see what others wrote. Clients of shared file systems keep the data of an open file to
        themselves, both ways (NFS makes an exception for locks, JuiceFS does not): only open() and close() tell."""
        self._wait_for_lock(deadline)
        try:
            self._data = self._fd if self._local else self._calls.open_beneath(self._root, USAGE_FILE, os.O_RDWR)
        except BaseException:
            self._calls.unlock(self._fd, _MUTEX_BYTE)
            raise

    def _unlock(self) -> None:
        data, self._data = self._data, -1
        try:
            if data not in (-1, self._fd):
                self._calls.close(data)
        finally:
            self._calls.unlock(self._fd, _MUTEX_BYTE)

    def _late(self) -> LocalWait:
        return LocalWait(
            "the deadline passed while waiting for the usage counter of the folder", backend=self._name, operation="put"
        )

    def acquire(self, deadline: float) -> None:
        """Take both locks and read the counters.

        Raises:
            LocalWait: not before the deadline: other threads or processes on this folder were at it.
            TransientError: the counters cannot be read.
        """
        timeout = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._thread_lock.acquire(timeout=timeout):
            raise self._late()
        try:
            if self.shared:
                self._lock(deadline)
                try:
                    self._load()
                except BaseException:
                    self._unlock()
                    raise
            if self.known:
                self._apply_later()
        except OSError as error:
            self._thread_lock.release()
            raise TransientError(
                f"the usage counter of the folder cannot be used: {error.strerror}",
                backend=self._name, operation="put", cause=error,
            ) from error  # fmt: skip
        except BaseException:
            self._thread_lock.release()
            raise

    def release(self) -> None:
        """Write the counters and give both locks back."""
        try:
            if self.shared:
                try:
                    self._store()
                finally:
                    self._unlock()
        except OSError as error:
            logger.warning("%s: the usage counter cannot be written: %s", self._name, error.strerror)
        finally:
            self._thread_lock.release()

    def _apply_later(self) -> None:
        with self._later_lock:
            added, removed, reserved = self._later
            self._later = [0, 0, 0]
        self.added += added
        self.removed = min(self.removed + removed, self.added)
        self.reserve(reserved)

    @property
    def in_use(self) -> int:
        """Committed bytes."""
        return self.added - self.removed

    @property
    def total(self) -> int:
        """Bytes that may lie on the disk, with puts in flight."""
        return self.added - self.removed + self.reserved

    def reserve(self, nbytes: int) -> None:
        """For puts of this process (negative: give back). With the lock held."""
        self._mine = max(0, self._mine + nbytes)
        self.reserved = max(0, self.reserved + nbytes)

    @property
    def others_reserved(self) -> bool:
        """Whether puts in flight hold room that will become evictable. With the lock held."""
        return self.reserved > 0

    def remove(self, nbytes: int) -> None:
        """Bytes that this process took from the disk. With the lock held."""
        self.removed = min(self.removed + nbytes, self.added)

    def set_total(self, nbytes: int) -> None:
        """What a count of the folder found. With the lock held. `added` never falls: counts that run elsewhere
        measure by it what came meanwhile."""
        self.added = max(self.added, nbytes)
        self.removed = self.added - nbytes
        self.known = True

    def change(self, *, added: int = 0, removed: int = 0, reserved: int = 0, deadline: float) -> None:
        """Apply a change now if the lock is free soon, else at the next chance. Never fails and never waits long: until
        then the books say more than there is, which keeps the cap."""
        with self._later_lock:
            for index, value in enumerate((added, removed, reserved)):
                self._later[index] += value
        try:
            self.acquire(min(deadline, time.monotonic() + 0.2))
        except TransientError:
            return
        self.release()

    def reclaim(self) -> bool:
        """Give back what dead processes had reserved; True if there was any. With the lock held."""
        found = False
        if not self.shared or self.reserved <= self._mine:
            return False
        raw = os.pread(self._data, _SLOTS * _SLOT.size, _SLOTS_AT)
        for index in range(len(raw) // _SLOT.size):
            taken, reserved = _SLOT.unpack_from(raw, index * _SLOT.size)
            if not taken or index == self._slot or not self._calls.try_lock(self._fd, _SLOT_BYTE + index):
                continue
            try:
                os.pwrite(self._data, _SLOT.pack(0, 0), _SLOTS_AT + index * _SLOT.size)
                self.reserved -= min(reserved, self.reserved)
                found = True
            finally:
                self._calls.unlock(self._fd, _SLOT_BYTE + index)
        self.unclean = self.unclean or found
        return found

    def close(self) -> None:
        """Post what is left to post and give the slot back."""
        if self._fd < 0:
            return
        try:
            self.acquire(time.monotonic() + 1.0)
        except TransientError:
            pass
        else:
            self._leaving = True
            self.release()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            try:
                self._calls.close(self._fd)
            except OSError:
                pass
            self._fd = -1

    def abandon(self) -> None:
        """In a forked child: the descriptor shares its locks with the parent, so it must not be used."""
        self._close_fd()
