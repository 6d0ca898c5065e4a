"""Opening the folder: making it, recognising it, sweeping it after a crash, finding it again when it went away."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator

from kvstore.errors import ConfigError

from .naming import FORMAT_FILE, FORMAT_TEXT, OWN, is_folder, new_temp_name
from .oscalls import OsCalls
from .transfer import ALIGNMENT, Direct
from .tree import FOLDER_FLAGS, HANDLE_FLAGS, Leaf, dead_writers, forget_writers, sweep_leaf, walk

__all__ = ["Sweep", "folder_identity", "open_root", "probe_direct", "revive_root", "start_sweep"]

logger = logging.getLogger("kvstore.file")

_SWEEP_AT_ONCE = 0.2
"""Seconds of an open that follows a crash; a larger folder is swept on by a thread."""


def open_root(calls: OsCalls, path: str, name: str) -> int:
    """A descriptor of the root folder, which is made if it is not there. The last symbolic link in `path` is followed:
    where the root lies is the operator's business.

    Raises:
        ConfigError: it is a file or the root of the file system, cannot be made or read, or holds a format that we do
            not know.
    """
    if not path.strip("/"):
        raise _is_slash(path, name)
    try:
        os.makedirs(path, exist_ok=True)
        root = calls.open(path, FOLDER_FLAGS)
    except FileExistsError as error:
        raise ConfigError(f"{path} is not a folder", backend=name, operation="open", cause=error) from error
    except OSError as error:
        raise ConfigError(
            f"the folder {path} cannot be used: {error.strerror} [{errno.errorcode.get(error.errno or 0, '?')}]"
            f"{f' at {error.filename}' if error.filename and error.filename != path else ''}",
            backend=name, operation="open", cause=error,
        ) from error  # fmt: skip
    try:
        if folder_identity(root) == _identity(os.stat("/")):
            raise _is_slash(path, name)
        _check_format(calls, root, path, name)
    except BaseException:
        calls.close(root)
        raise
    if not calls.may_write(root):
        logger.warning("%s: the folder %s is read-only for this process: it reads records and stores none", name, path)
    return root


def _is_slash(path: str, name: str) -> ConfigError:
    return ConfigError(
        f"{path} is the root of the file system; name a folder of its own for records, for instance file:///mnt/kv",
        backend=name, operation="open",
    )  # fmt: skip


def _identity(found: os.stat_result) -> tuple[str, int, int]:
    return "folder", found.st_dev, found.st_ino


def folder_identity(root: int) -> tuple[str, int, int]:
    """The same for two descriptors of one folder, whatever links or bind mounts their paths went through."""
    return _identity(os.fstat(root))


def _refuse_foreign(error: OSError, path: str, name: str) -> None:
    """Raises `ConfigError` if the error says that our own folder's name is taken by a file or a link."""
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        raise ConfigError(
            f"{path}/{OWN} is something else than this backend's folder", backend=name, operation="open", cause=error
        ) from error


def _check_format(calls: OsCalls, root: int, path: str, name: str) -> None:
    try:
        fd = calls.open_beneath(root, FORMAT_FILE, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        _mark(calls, root, path, name)
        return
    except OSError as error:
        _refuse_foreign(error, path, name)
        logger.info("%s: %s cannot be read: %s", name, FORMAT_FILE, error.strerror)
        return
    try:
        text = os.read(fd, 256)
    except OSError as error:
        logger.info("%s: %s cannot be read: %s", name, FORMAT_FILE, error.strerror)
        return
    finally:
        calls.close(fd)
    if not FORMAT_TEXT.startswith(text):  # the beginning of it: another process is writing it now, or crashed then
        raise ConfigError(
            f"{path} has the format {text[:40]!r}; this version of kvstore knows {FORMAT_TEXT!r}",
            backend=name, operation="open",
        )  # fmt: skip


def _mark(calls: OsCalls, root: int, path: str, name: str) -> None:
    """Say in the folder that it is ours. A folder that cannot be written can still be read."""
    try:
        fd = calls.open_beneath(root, ".", FOLDER_FLAGS)
        try:
            with calls.scandir(fd) as entries:
                foreign = next(
                    (entry.name for entry in entries if not is_folder(entry.name) and entry.name != OWN), None
                )
        finally:
            calls.close(fd)
        if foreign is not None:
            logger.info("%s: the folder %s holds other files (%s, …); they are left alone", name, path, foreign)
        try:
            calls.mkdir(OWN, dir_fd=root)
        except FileExistsError:
            pass
        folder = calls.open_beneath(root, OWN, HANDLE_FLAGS)
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = calls.open(FORMAT_FILE.rpartition("/")[2], flags, 0o666, dir_fd=folder)
            try:
                os.write(fd, FORMAT_TEXT)
            finally:
                calls.close(fd)
        finally:
            calls.close(folder)
    except FileExistsError:
        pass
    except OSError as error:
        _refuse_foreign(error, path, name)
        logger.info("%s: the folder %s cannot be written: %s", name, path, error.strerror)


def revive_root(calls: OsCalls, root: int, path: str) -> bool:
    """If the root itself was removed, or its handle became stale (an NFS server that exports another volume now), open
    it by its path again, and make it if need be. The new folder gets the old descriptor number, so that calls in flight
    see it. True if that happened."""
    try:
        if calls.fstat(root).st_nlink > 0:
            return False
    except OSError as error:
        if error.errno != errno.ESTALE:
            return False
    try:
        os.makedirs(path, exist_ok=True)
        fresh = calls.open(path, FOLDER_FLAGS)
    except OSError:
        return False
    try:
        os.dup2(fresh, root, inheritable=False)
    finally:
        calls.close(fresh)
    return True


def probe_direct(calls: OsCalls, root: int, direct: Direct) -> None:
    """Try one block with O_DIRECT. tmpfs, and some overlay and NFS mounts, answer EINVAL: then everything is buffered.
    In a folder that cannot be written nothing is learnt; single operations fall back then."""
    try:
        fd = calls.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=root)
    except OSError:
        try:
            folder = calls.open_beneath(root, OWN, HANDLE_FLAGS)
        except OSError:
            return
        name = new_temp_name()
        try:
            fd = calls.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
            calls.unlink(name, dir_fd=folder)
        except OSError:
            return
        finally:
            calls.close(folder)
    try:
        with mmap.mmap(-1, ALIGNMENT) as block, memoryview(block) as view:
            calls.set_direct(fd, True)
            calls.pwritev(fd, [view], 0)
            calls.preadv(fd, [view], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            direct.refused(error, forever=True)
    finally:
        calls.close(fd)


class Sweep:
    """Removes what crashed writers left: a little at open, the rest of a large folder in a thread of its own."""

    def __init__(self, calls: OsCalls, root: int, name: str, dead: list[str]) -> None:
        self._calls = calls
        self._root = os.dup(root)  # its own, so that close() need not wait for a file server
        self._name = name
        self._dead = dead
        self._leaves = walk(calls, self._root)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.removed = 0

    def begin(self) -> None:
        if self._run(self._leaves, time.monotonic() + _SWEEP_AT_ONCE):
            return
        self._thread = threading.Thread(target=self._run, args=(self._leaves, float("inf")), name="kvstore-file-sweep")
        self._thread.daemon = True
        self._thread.start()

    def _run(self, leaves: Iterator[Leaf], until: float) -> bool:
        """True when it ended, one way or another."""
        now = time.time()
        try:
            for leaf in leaves:
                if leaf.temps:
                    self.removed += sweep_leaf(self._calls, self._root, leaf, now)[0]
                if self._stop.is_set():
                    break
                if time.monotonic() >= until:
                    return False
            else:
                forget_writers(self._calls, self._root, self._dead)
        except OSError as error:
            logger.warning("%s: temporary files cannot be swept: %s", self._name, error)
        self._calls.close(self._root)
        if self.removed:
            logger.info("%s: %d temporary files of crashed writers removed", self._name, self.removed)
        return True

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def start_sweep(calls: OsCalls, root: int, name: str) -> Sweep | None:
    """Sweep if a writer crashed; nothing is walked if none did."""
    try:
        dead = dead_writers(calls, root)
    except OSError as error:
        logger.warning("%s: cannot see whether writers crashed: %s", name, error)
        return None
    if not dead:
        return None
    sweep = Sweep(calls, root, name, dead)
    sweep.begin()
    return sweep
