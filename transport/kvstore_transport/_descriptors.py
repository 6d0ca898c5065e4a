"""Open descriptors over a Unix-domain socket: cmsg(3), SCM_RIGHTS of unix(7).

`socket.send_fds` and `socket.recv_fds` of Python 3.11 to 3.13 ignore their flags, so they would block, and what they
receive would be inherited by every program that this process starts.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

__all__ = ["pass_fds", "take_fds"]

_MARK = b"F"  # descriptors travel with at least one byte of the stream


def pass_fds(sock: socket.socket, fds: Sequence[int]) -> None:
    """Send `fds`, at most 253, with one byte. Raises BlockingIOError if that is not possible at once."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([_MARK], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def take_fds(sock: socket.socket, count: int) -> list[int] | None:
    """What one `pass_fds` of `count` descriptors sent; None if the peer closed the connection. They are closed on exec.

    Raises:
        BlockingIOError: nothing is there yet.
        ValueError: another byte, or another number of descriptors, came. None of them is kept.
    """
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if data == _MARK and len(fds) == count and not flags & socket.MSG_CTRUNC:
        return list(fds)
    for fd in fds:
        os.close(fd)
    if not data:
        return None
    raise ValueError(f"{len(fds)} descriptors instead of {count}")
