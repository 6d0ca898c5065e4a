"""What `Control` does with its socket besides moving bytes, and the arithmetic of gathered and scattered parts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

__all__ = ["Part", "advance", "fill", "let_go", "notice_vanished_peers"]

Part = bytes | memoryview

_LARGE, _ROUND = 64 << 10, 64


def advance(parts: list[Part] | list[memoryview], at: int, nbytes: int) -> int:
    """Index of the first part that is not done after `nbytes` more, of which what is done is cut off."""
    while nbytes:
        part = parts[at]
        if nbytes < len(part):
            parts[at] = memoryview(part)[nbytes:]
            return at
        nbytes -= len(part)
        at += 1
    return at


def fill(views: Sequence[memoryview], data: memoryview) -> tuple[list[memoryview], int]:
    """Copy `data` into `views` (none of them empty) as far as they go: (what of them is left, bytes copied). A large
    view that was begun is cut once more, at the next multiple of 64 bytes: the kernel copies faster to round addresses.
    """
    left = [*views]
    at = done = 0
    while at < len(left) and done < len(data):
        view = left[at]
        some = min(len(view), len(data) - done)
        view[:some] = data[done : done + some]
        done += some
        if some < len(view):
            left[at] = view[some:]
        else:
            at += 1
    if done and at < len(left) and len(left[at]) >= _LARGE:
        view = left[at]
        cut = (len(view) - len(views[at])) % _ROUND
        left[at : at + 1] = [view[:cut], view[cut:]] if cut else [view]
    return left[at:], done


def let_go(fd: int) -> None:
    """Put a socket that was closed at its other end (EOF, EPIPE) into the place of `fd`, so that the kernel closes the
    connection as soon as no call uses it any more. After a mere shutdown(2), a peer that waits for our window of TCP to
    open would wait on."""
    try:
        dead, other = socket.socketpair()
        with dead, other:
            os.dup2(dead.fileno(), fd, inheritable=False)
    except OSError:  # no descriptor is free: then when it is closed
        pass


def notice_vanished_peers(sock: socket.socket, stall_s: float) -> None:
    """A machine without power sends no RST: keepalive finds it when idle, TCP_USER_TIMEOUT when data is unsent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(min(stall_s, 86400) * 1000)))
