"""Who is at the other end of a Unix-domain socket, where the socket lies, and whether that is this host.

The socket lies in the file system and not in the abstract namespace: a path has an owner and a mode, so that nobody
else can listen there in our place, and a directory can be mounted into another container; an abstract name belongs to
a network namespace, which containers do not share, and anybody may take it. Sources: unix(7), user_namespaces(7),
proc_sys_kernel(5).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Collection
from typing import NamedTuple

from .errors import PeerRefused, TransportUnavailable

__all__ = ["PeerProcess", "check_peer", "host_id", "listen", "private_path"]

_CREDENTIALS = struct.Struct("3i")
_PATH_BYTES = 107  # sun_path has 108, with a NUL


class PeerProcess(NamedTuple):
    """The process that connected, or that listened (SO_PEERCRED). In another user namespace's numbers it is ours."""

    pid: int
    uid: int
    gid: int


def host_id() -> str:
    """The same for two processes if they run under one kernel: its boot id. "" if there is none.

    Nothing else is compared. Whether this process reaches the socket, and may pass descriptors over it, connect(2)
    tells better than any list of namespaces; whose process answers is checked by `check_peer` and by the handshake.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def check_peer(fd: int, uids: Collection[int]) -> PeerProcess:
    """The process at the other side of the connected Unix-domain socket `fd`.

    Args:
        uids: users that are welcome besides root and our own.

    Raises:
        PeerRefused: it runs as another user.
    """
    with socket.socket(fileno=os.dup(fd)) as sock:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    peer = PeerProcess(*_CREDENTIALS.unpack(raw))
    if peer.uid not in {0, os.geteuid(), *uids}:
        raise PeerRefused(
            f"the process {peer.pid} runs as user {peer.uid}, which is not allowed to share memory with us"
        )
    return peer


def private_path() -> str:
    """A new name for a socket in a folder that only this user can enter, made if need be: $XDG_RUNTIME_DIR/kvstore,
    or kvstore-UID in the system's folder for temporary files. Sockets of dead processes there are swept away.

    Raises:
        TransportUnavailable: the folder cannot be made, or somebody else made it before.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    mine = f"kvstore-{os.geteuid()}"
    folder = os.path.join(runtime, "kvstore") if runtime else os.path.join(tempfile.gettempdir(), mine)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise TransportUnavailable(f"no folder for a Unix socket: {error}; give its path") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise TransportUnavailable(f"{folder} is no folder of user {os.geteuid()} with mode 0700; give another path")
    _sweep(folder)
    return os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}.sock")


def listen(path: str, *, uids: Collection[int] = (), backlog: int = 128) -> socket.socket:
    """A listening Unix-domain socket. What a dead process left at `path` is replaced; who closes it unlinks `path`.

    Args:
        uids: users besides root and our own that may connect; if there are any, the socket's mode lets everybody try,
            and `check_peer` decides.

    Raises:
        TransportUnavailable: the path is too long, somebody listens there, or the system refuses.
    """
    # Bound under another name and renamed when it listens: a socket that refuses connections is then always a dead one.
    first = f"{path}.{os.urandom(2).hex()}"
    if len(os.fsencode(first)) > _PATH_BYTES:
        raise TransportUnavailable(f"the path of a Unix socket has at most {_PATH_BYTES - 5} bytes: {path}")
    if not os.path.isdir(folder := os.path.dirname(path) or "."):
        raise TransportUnavailable(f"cannot listen at {path}: there is no folder {folder}; make it first")
    if _listened(path):
        raise TransportUnavailable(f"another process listens at {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(first)
        os.chmod(first, 0o666 if uids else 0o600)
        sock.listen(backlog)
        os.rename(first, path)
    except OSError as error:
        sock.close()
        with contextlib.suppress(OSError):
            os.unlink(first)
        raise TransportUnavailable(f"cannot listen at {path}: {error.strerror or error}") from error
    return sock


def _listened(path: str) -> bool:
    """Whether a process listens at `path`.

    Raises:
        TransportUnavailable: there is something that is no socket of ours to replace.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise TransportUnavailable(f"{path} exists and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except BlockingIOError:  # its backlog is full
        return True
    except OSError as error:
        raise TransportUnavailable(f"cannot listen at {path}: {error.strerror or error}") from error
    return True


def _sweep(folder: str) -> None:
    """Remove sockets that killed processes left behind."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(".sock"):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError, TransportUnavailable):
                    if not _listened(path):
                        os.unlink(path)
