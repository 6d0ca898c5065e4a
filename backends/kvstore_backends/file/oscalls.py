"""Every system call of the `file` backend, in one object that tests replace.

Two of them are not in Python's `os`: openat2(2), which opens a path that cannot leave its root, and renameat2(2). Both
go through ctypes; where the kernel or a sandbox lacks openat2, the path is walked one component at a time instead
(4 µs more per open, measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import sys
from collections.abc import Iterator

__all__ = ["LOCAL_FILE_SYSTEMS", "OsCalls"]

_SYS_OPENAT2 = 437  # the same number on every architecture that Linux numbers alike (all but alpha)
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RENAME_NOREPLACE = 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_OPENAT2_TRIES = 128

# f_type of statfs(2) of file systems whose files live in this kernel, so that O_TMPFILE, close() and rmdir are local.
_EXT4 = 0xEF53
LOCAL_FILE_SYSTEMS = frozenset({_EXT4, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0xCA451A4E, 0x2FC12FC1})
"""ext2/3/4, xfs, btrfs, tmpfs, f2fs, bcachefs, zfs."""

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_renameat2 = getattr(_libc, "renameat2", None)  # glibc 2.28


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class OsCalls:
    """The calls as attributes, so that a test can subclass it or replace single ones on an instance.

    Args:
        openat2: use openat2(2) when it works here. False forces the walk.
    """

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    stat = staticmethod(os.stat)
    fstat = staticmethod(os.fstat)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)
    link = staticmethod(os.link)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    utime = staticmethod(os.utime)

    def __init__(self, *, openat2: bool = True) -> None:
        self._hows: dict[int, int] = {}  # flags -> address of a struct open_how
        self._keep: list[_OpenHow] = []
        self.has_openat2 = openat2 and sys.maxsize > 1 << 32 and self._probe()

    def scandir(self, fd: int) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return os.scandir(fd)

    def may_write(self, folder: int) -> bool:
        """Whether this process may make files in a folder: its mode, its owner, and whether the mount is read-only."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True)

    def _probe(self) -> bool:
        """Whether openat2 works: old kernels say ENOSYS, some sandboxes EPERM."""
        try:
            fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.close(self._openat2(fd, ".", os.O_PATH | os.O_DIRECTORY))
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _openat2(self, root: int, path: str, flags: int) -> int:
        how = self._hows.get(flags)
        if how is None:
            struct_how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS)
            self._keep.append(struct_how)
            how = self._hows[flags] = ctypes.addressof(struct_how)
        raw = path.encode()
        for _ in range(_OPENAT2_TRIES):
            fd = int(_syscall(_SYS_OPENAT2, root, raw, how, 24))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number not in (errno.EINTR, errno.EAGAIN):  # openat2(2) says to retry when a rename came in between
                break
        raise _error(number, path)

    def open_beneath(self, root: int, path: str, flags: int) -> int:
        """Open an existing relative path without following any symbolic link and without leaving `root`.

        Raises:
            OSError: as open(2); ELOOP or ENOTDIR for a link on the way.
        """
        if self.has_openat2:
            return self._openat2(root, path, flags)
        *folders, last = path.split("/")
        at, held = root, -1
        try:
            for folder in folders:
                step = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                if held >= 0:
                    os.close(held)
                at = held = step
            return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            if held >= 0:
                os.close(held)

    def rename_noreplace(self, folder: int, old: str, new: str) -> None:
        """renameat2(RENAME_NOREPLACE) inside one folder. EEXIST if `new` is there; EINVAL or ENOSYS: unsupported."""
        if _renameat2 is None:
            raise _error(errno.ENOSYS, new)
        if _renameat2(folder, old.encode(), folder, new.encode(), _RENAME_NOREPLACE) != 0:
            raise _error(ctypes.get_errno(), new)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """fallocate(2) without glibc's emulation, which would write to every block."""
        if _fallocate(fd, 0, 0, nbytes) != 0:
            raise _error(ctypes.get_errno(), "")

    def link_anonymous(self, fd: int, folder: int, name: str) -> None:
        """Give a file opened with O_TMPFILE its name; never overwrites (open(2), linkat(2))."""
        self.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)

    def set_direct(self, fd: int, on: bool) -> None:
        """Switch O_DIRECT of an open file; EINVAL where the file system refuses it."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def try_lock(self, fd: int, byte: int) -> bool:
        """Take the exclusive open-file-description lock of one byte, without waiting; False if another has it.

        These locks belong to the open file, not to the process: two backends of one process exclude each other, and
        closing another descriptor of the file does not drop them (fcntl(2), F_OFD_SETLK).
        """
        return self._lock(fd, fcntl.F_WRLCK, byte)

    def unlock(self, fd: int, byte: int) -> None:
        """Give such a lock back."""
        self._lock(fd, fcntl.F_UNLCK, byte)

    @staticmethod
    def _lock(fd: int, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EACCES:
                return False
            raise
        return True

    @staticmethod
    def file_system(fd: int) -> int:
        """f_type of statfs(2), or 0 if unknown."""
        buffer = ctypes.create_string_buffer(256)
        with contextlib.suppress(AttributeError):
            if _libc.fstatfs(fd, buffer) == 0:
                return int.from_bytes(buffer.raw[:8], sys.byteorder) & 0xFFFFFFFF
        return 0

    @staticmethod
    def prefers_fallocate(file_system: int) -> bool:
        """ext4 writes a 16 MiB file 1.4 times faster into preallocated blocks (measured); tmpfs does not."""
        return file_system == _EXT4
