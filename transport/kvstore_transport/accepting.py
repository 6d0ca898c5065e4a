"""The accept loop of a server, which nothing that a peer does may stop or make spin."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence

from .errors import TransportUnavailable

__all__ = ["Acceptor", "listen_tcp", "start_with_small_stack"]

logger = logging.getLogger("kvstore.transport")

_BACKLOG = 1024
_STACK_BYTES = 1 << 20  # the handler may call C libraries; of the usual 8 MiB 200 connections would reserve 1.6 GiB
_PAUSE_MS = 100  # after an error that closing a spare descriptor did not cure
_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_stack_lock = threading.Lock()


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Host "" is all addresses, of both IP versions if the system has them. SO_REUSEADDR, so that a
    server can be restarted at once on its port.

    Raises:
        TransportUnavailable: somebody listens there, or the host has no such address.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, reuse_port=False, dualstack_ipv6=True
            )
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise TransportUnavailable(f"cannot listen at {host or '*'}:{port}: {error.strerror or error}") from error


def start_with_small_stack(thread: threading.Thread) -> None:
    """Start `thread`; raises RuntimeError if the system has no more. Python knows one stack size for all threads that
    are to be started, so one that another thread starts in the same instant may get the small one, too."""
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


class Acceptor:
    """Accepts from `listeners`, which become its own, in a thread of its own, until `close`.

    Args:
        accepted: called with each connection and the peer's address, for messages. It does not block; what it raises
            costs that connection only.
    """

    def __init__(self, listeners: Sequence[socket.socket], accepted: Callable[[socket.socket, str], None]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._accepted = accepted
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._spare = _open_spare()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="kvstore-accept", daemon=True)
        for listener in listeners:
            listener.setblocking(False)  # a peer may be gone again between poll(2) and accept(2)
        _LIVE.add(self)
        start_with_small_stack(self._thread)

    def close(self) -> None:
        """Listen no longer; returns when the thread ended. May be called twice."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close the descriptors only: all that a forked child may do, whose parent goes on listening."""
        for listener in self._listeners.values():
            listener.close()
        for fd in (self._wake, self._spare):
            if fd >= 0:
                os.close(fd)
        self._listeners, self._wake, self._spare = {}, -1, -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._listeners:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    return
                if not self._accept(self._listeners[fd]):
                    pause = select.poll()
                    pause.register(self._wake, select.POLLIN)
                    pause.poll(_PAUSE_MS)

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one. False: the system is out of something, and polling again at once would spin."""
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno not in _OUT_OF:  # it is gone again: accept(2) reports errors of the network
                return True
            return self._turn_away(listener, error)
        self._complained = False
        try:
            self._accepted(sock, _name(listener, address))
        except Exception:
            logger.exception("a connection could not be taken; listening goes on")
            sock.close()
        return True

    def _turn_away(self, listener: socket.socket, error: OSError) -> bool:
        """Out of descriptors: with the spare one, take one connection and close it, so that its client knows."""
        if not self._complained:
            self._complained = True
            logger.error("cannot accept connections: %s", error.strerror)
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            sock, _ = listener.accept()
            sock.close()
            turned = True
        except OSError:
            turned = False
        try:
            self._spare = _open_spare()
        except OSError:
            return False
        return turned


def _after_fork_in_child() -> None:
    """A child that kept listening would keep the port, and clients that nobody serves."""
    for acceptor in list(_LIVE):
        acceptor.forget()


_LIVE: weakref.WeakSet[Acceptor] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork_in_child)


def _open_spare() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _name(listener: socket.socket, address: object) -> str:
    if isinstance(address, tuple) and address:
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"a client of {listener.getsockname()}"
