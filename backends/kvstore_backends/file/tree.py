"""Walking the folder: pages of records, sweeping what crashed writers left behind."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.keys import Key

from .naming import OWN, QUARANTINE, WRITERS, is_folder, parse_record, parse_temp, parse_writer, quarantined
from .oscalls import OsCalls

__all__ = [
    "FOLDER_FLAGS", "HANDLE_FLAGS", "Leaf", "Marker", "Stored", "dead_writers", "forget_writers", "list_quarantine",
    "sweep_leaf", "walk",
]  # fmt: skip

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
HANDLE_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EXDEV})
_MARKER_SECONDS = 600.0


class Stored(NamedTuple):
    """One record on disk: its size in bytes and its modification time, which is its last use."""

    key: Key
    nbytes: int
    mtime_ns: int


class Leaf(NamedTuple):
    """One folder ROOT/ab. `temps`: name, size and mtime of temporary files."""

    path: str
    records: list[Stored]
    temps: list[tuple[str, int, float]]


def _names(calls: OsCalls, root: int) -> list[str]:
    """The leaf folders; none if the root is gone."""
    try:
        fd = calls.open_beneath(root, ".", FOLDER_FLAGS)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    try:
        with calls.scandir(fd) as entries:
            return [entry.name for entry in entries if is_folder(entry.name)]
    finally:
        calls.close(fd)


def walk(calls: OsCalls, root: int) -> Iterator[Leaf]:
    """All leaf folders, one at a time; no descriptor is held between two of them. Symbolic links are not followed,
    foreign names are passed over, folders that vanish meanwhile are skipped.

    Raises:
        OSError: a folder cannot be read.
    """
    for name in sorted(_names(calls, root)):
        leaf = _read_leaf(calls, root, name)
        if leaf is not None:
            yield leaf


def _read_leaf(calls: OsCalls, root: int, path: str) -> Leaf | None:
    try:
        fd = calls.open_beneath(root, path, FOLDER_FLAGS)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    records: list[Stored] = []
    temps: list[tuple[str, int, float]] = []
    try:
        with calls.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                key = parse_record(name, path)
                if key is None and parse_temp(name) is None:
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno in _GONE:
                        continue
                    raise
                if not stat.S_ISREG(found.st_mode):
                    continue
                if key is not None:
                    records.append(Stored(key, found.st_size, found.st_mtime_ns))
                else:
                    temps.append((name, found.st_size, found.st_mtime))
    finally:
        calls.close(fd)
    return Leaf(path, records, temps)


def sweep_leaf(calls: OsCalls, root: int, leaf: Leaf, now: float) -> tuple[int, int]:
    """Remove the temporary files in `leaf` that their writers left behind.

    Returns:
        number of files removed, and bytes of temporary files that stay although no process of this host has them.
    """
    if not leaf.temps:
        return 0, 0
    removed = left = 0
    try:
        folder = calls.open_beneath(root, leaf.path, HANDLE_FLAGS)
    except OSError as error:
        if error.errno in _GONE:
            return 0, 0
        raise
    try:
        for name, nbytes, mtime in leaf.temps:
            owner = parse_temp(name)
            if owner is None or not owner.is_stale(now - mtime):
                continue
            try:
                calls.unlink(name, dir_fd=folder)
                removed += 1
            except FileNotFoundError:
                pass
            except OSError:  # not ours to remove (another user's), or the file system is read-only: it stays
                left += nbytes
    finally:
        calls.close(folder)
    return removed, left


def list_quarantine(calls: OsCalls, root: int) -> list[tuple[str, int]]:
    """Names and sizes of quarantined records, oldest first."""
    try:
        fd = calls.open_beneath(root, QUARANTINE, FOLDER_FLAGS)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    found = []
    try:
        with calls.scandir(fd) as entries:
            for entry in entries:
                if quarantined(entry.name):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        found.append((entry.name, status.st_size))
    finally:
        calls.close(fd)
    return sorted(found)


def dead_writers(calls: OsCalls, root: int) -> list[str]:
    """Markers of processes that made named temporary files and ended without saying so."""
    try:
        fd = calls.open_beneath(root, WRITERS, FOLDER_FLAGS)
    except OSError as error:
        if error.errno in _GONE or error.errno == errno.EACCES:
            return []
        raise
    dead = []
    now = time.time()
    try:
        with calls.scandir(fd) as entries:
            for entry in entries:
                owner = parse_writer(entry.name)
                if owner is None:
                    continue
                try:
                    if owner.is_stale(now - entry.stat(follow_symlinks=False).st_mtime):
                        dead.append(entry.name)
                except FileNotFoundError:
                    continue
    finally:
        calls.close(fd)
    return dead


def forget_writers(calls: OsCalls, root: int, names: list[str]) -> None:
    """Remove their markers, when what they left was swept."""
    fd = calls.open_beneath(root, WRITERS, HANDLE_FLAGS)
    try:
        for name in names:
            try:
                calls.unlink(name, dir_fd=fd)
            except OSError:  # gone, or another user's: then its sweep is that user's as well
                continue
    finally:
        calls.close(fd)


class Marker:
    """Says that this process makes named temporary files, so that after a crash somebody sweeps them.

    A clean close removes it, so an ordinary start does not walk the folder at all. Where O_TMPFILE works none is made.
    """

    def __init__(self, calls: OsCalls, new_name: Callable[[], str]) -> None:
        self._calls = calls
        self._new_name = new_name
        self._name = ""
        self._pid = 0
        self._fresh_until = 0.0

    def show(self, root: int) -> None:
        """Make the marker, or make it young again; at most once in 10 minutes. Failing is no reason not to write."""
        now = time.monotonic()
        if now < self._fresh_until and self._pid == os.getpid():
            return
        try:
            for folder in (OWN, WRITERS):
                try:
                    self._calls.mkdir(folder, dir_fd=root)
                except FileExistsError:
                    pass
            fd = self._calls.open_beneath(root, WRITERS, HANDLE_FLAGS)
            try:
                if self._pid != os.getpid():  # the parent's marker stays the parent's
                    self._name, self._pid = self._new_name(), os.getpid()
                self._calls.close(self._calls.open(self._name, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, dir_fd=fd))
                self._calls.utime(self._name, dir_fd=fd, follow_symlinks=False)
            finally:
                self._calls.close(fd)
        except OSError:
            pass
        self._fresh_until = now + _MARKER_SECONDS

    def remove(self, root: int) -> None:
        if not self._name or self._pid != os.getpid():
            return
        try:
            fd = self._calls.open_beneath(root, WRITERS, HANDLE_FLAGS)
            try:
                self._calls.unlink(self._name, dir_fd=fd)
            finally:
                self._calls.close(fd)
        except OSError:
            pass
        self._name = ""
