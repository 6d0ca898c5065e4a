"""Taking records away: for delete, for eviction, into the quarantine."""

from __future__ import annotations

import enum
import errno
import os
import stat
import time
from typing import NamedTuple

from kvstore.keys import Key

from .naming import OWN, QUARANTINE, file_name, leaf_path, new_temp_name, quarantine_name
from .oscalls import OsCalls
from .tree import HANDLE_FLAGS, list_quarantine

__all__ = [
    "ABSENT",
    "MAX_QUARANTINED",
    "Identity",
    "Removal",
    "Removed",
    "drop_quarantine",
    "remove_record",
    "set_aside",
]

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE, errno.ENXIO})
"""What opening a name says when no record of ours is there: nothing, or something foreign in its way."""
MAX_QUARANTINED = 64


class Identity(NamedTuple):
    """Which file a name led to: tells a record from one that was stored again under its name."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Removal(enum.Enum):
    DONE = enum.auto()
    GONE = enum.auto()  # there was none
    NEWER = enum.auto()  # it was used since
    STUCK = enum.auto()  # it cannot be removed


class Removed(NamedTuple):
    """`nbytes` of DONE; `mtime_ns` of NEWER; `error` of STUCK."""

    how: Removal
    nbytes: int = 0
    mtime_ns: int = 0
    error: OSError | None = None


def remove_record(
    calls: OsCalls, root: int, key: Key, *, unless_used_since: int | None = None, prune: bool = False
) -> Removed:
    """Unlink a record. Only a regular file is one: what else has its name is foreign and stays.

    Args:
        unless_used_since: leave it if its modification time (last use) is later than this, in ns.
        prune: also remove its folder when it is empty then.
    """
    name = file_name(key)
    try:
        folder = calls.open_beneath(root, leaf_path(key), HANDLE_FLAGS)
    except OSError as error:
        return Removed(Removal.GONE) if error.errno in ABSENT else Removed(Removal.STUCK, error=error)
    try:
        found = calls.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return Removed(Removal.GONE)
        if unless_used_since is not None and found.st_mtime_ns > unless_used_since:
            return Removed(Removal.NEWER, mtime_ns=found.st_mtime_ns)
        calls.unlink(name, dir_fd=folder)
    except OSError as error:
        return Removed(Removal.GONE) if error.errno in ABSENT else Removed(Removal.STUCK, error=error)
    finally:
        calls.close(folder)
    if prune:
        _prune(calls, root, leaf_path(key))
    return Removed(Removal.DONE, found.st_size)


def _prune(calls: OsCalls, root: int, leaf: str) -> None:
    """Remove a leaf if it is empty; a writer that just came makes it again."""
    try:
        calls.rmdir(leaf, dir_fd=root)
    except OSError:  # nearly always ENOTEMPTY
        pass


def drop_quarantine(calls: OsCalls, root: int, *, files: int, nbytes: int) -> int:
    """Remove the oldest quarantined records until at most `files` with at most `nbytes` are left; the newest one stays
    unless `files` or `nbytes` is 0. Returns the bytes freed."""
    found = list_quarantine(calls, root)
    total = sum(size for _, size in found)
    freed, count = 0, len(found)
    if not found:
        return 0
    folder = calls.open_beneath(root, QUARANTINE, HANDLE_FLAGS)
    try:
        for name, size in found:
            if (count <= files and total <= nbytes) or (count == 1 and files and nbytes):
                break
            try:
                calls.unlink(name, dir_fd=folder)
                freed += size
            except FileNotFoundError:
                pass
            except OSError:
                continue
            total -= size
            count -= 1
    finally:
        calls.close(folder)
    return freed


def set_aside(calls: OsCalls, root: int, key: Key, *, expected: Identity | None, max_bytes: int) -> tuple[Removed, int]:
    """Move a record into the quarantine, or unlink it where that is not possible or `max_bytes` is 0.

    Args:
        expected: the file whose bytes proved corrupt; another one under the name is left alone. None: unknown.

    Returns:
        what became of it, and how many bytes are no longer on the disk.
    """
    name = file_name(key)
    try:
        folder = calls.open_beneath(root, leaf_path(key), HANDLE_FLAGS)
    except OSError as error:
        return (Removed(Removal.GONE) if error.errno in ABSENT else Removed(Removal.STUCK, error=error)), 0
    try:
        found = calls.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return Removed(Removal.GONE), 0
        if expected is not None and Identity.of(found) != expected:
            return Removed(Removal.GONE), 0
        if max_bytes and _move(calls, root, folder, name, key, found):
            freed = drop_quarantine(calls, root, files=MAX_QUARANTINED, nbytes=max_bytes)
            return Removed(Removal.DONE, found.st_size), freed
        calls.unlink(name, dir_fd=folder)
        return Removed(Removal.DONE, found.st_size), found.st_size
    except OSError as error:
        return (Removed(Removal.GONE) if error.errno in ABSENT else Removed(Removal.STUCK, error=error)), 0
    finally:
        calls.close(folder)


def _move(calls: OsCalls, root: int, folder: int, name: str, key: Key, found: os.stat_result) -> bool:
    """Rename a record into the quarantine; False if that cannot be done."""
    aside = quarantine_name(key, time.time_ns())
    try:
        for own in (OWN, QUARANTINE):
            try:
                calls.mkdir(own, dir_fd=root)
            except FileExistsError:
                pass
        target = calls.open_beneath(root, QUARANTINE, HANDLE_FLAGS)
    except OSError:
        return False
    try:
        calls.rename(name, aside, src_dir_fd=folder, dst_dir_fd=target)
        moved = calls.stat(aside, dir_fd=target, follow_symlinks=False)
        if moved.st_ino != found.st_ino:
            # Stored again between our look and the rename: put the good one back, without overwriting a third.
            try:
                _put_back(calls, target, aside, folder, name)
            except (
                OSError
            ):  # it stays aside, a loss to nobody but the cache; what has its name now is not ours to judge
                pass
    except FileNotFoundError:
        raise
    except OSError:
        return False
    finally:
        calls.close(target)
    return True


def _put_back(calls: OsCalls, target: int, aside: str, folder: int, name: str) -> None:
    """Give a record in the quarantine its name back, unless that is taken by now. Raises `OSError`: it stays there."""
    try:
        calls.link(aside, name, src_dir_fd=target, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        pass
    except OSError:  # no hard links here
        temp = new_temp_name()
        calls.rename(aside, temp, src_dir_fd=target, dst_dir_fd=folder)
        try:
            calls.rename_noreplace(folder, temp, name)
        except FileExistsError:
            calls.unlink(temp, dir_fd=folder)
        except OSError:  # nor that; a third one here would have been stored in this very moment, and is as good
            calls.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    calls.unlink(aside, dir_fd=target)
