"""`Server`: listens on TCP and on a Unix socket, and serves every connection in a thread of its own.

A thread waits in recv(2) while its connection is idle, so idle connections cost no CPU, only a small stack. What
strangers do costs little, and never stops the accept loop: the handshake is bounded in bytes and in time. Connections
count from the moment that their client has proven who it is; those that have not wait in a lobby of their own, of
bounded size, in which the oldest make way for newcomers. `accepting` has the accept loop, `serving` what happens on one
connection.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from . import _shm_peer
from ._lobby import Lobby, origin
from ._metas import Metas
from .accepting import Acceptor, listen_tcp, start_with_small_stack
from .addresses import Address
from .bodies import way
from .errors import TransportUnavailable
from .handshake import LOCAL_FACT, Identify
from .seam import Handler, Limits
from .serving import Connection, Terms, Totals

__all__ = ["Server", "ServerStats", "open_default_namespace"]

logger = logging.getLogger("kvstore.transport")

_MOST_ENDING = 2  # times the lobby: threads of connections that are not served; more clients are cut off without a word
_ABORT_S = 5.0  # how long `close` waits for threads after it aborted their connections


def open_default_namespace(namespace: str) -> bytes | None:
    """`Identify` of a server without tokens: the default namespace is open, and there is no other."""
    return None if namespace else b""


class ServerStats(NamedTuple):
    """Counts since the start.

    Attributes:
        connections: open now, those in the handshake included.
        accepted, refused, failed: connections that finished the handshake, were refused, or ended in it or by an error.
        requests, received_bytes, sent_bytes: by transport; bytes of bodies.
        pushed_out: connections that made way for others before their client had proven who it is.
        meta_bytes: memory that long metas of requests take now.
    """

    connections: int
    accepted: int
    refused: int
    failed: int
    requests: dict[str, int]
    received_bytes: dict[str, int]
    sent_bytes: dict[str, int]
    pushed_out: int
    meta_bytes: int


class Server:
    """Serves `handler` from its construction until `close`.

    Args:
        handler: called in the connection's thread for each request.
        listen: (host, port) for TCP; port 0 for any, host "" for all. None: not on TCP.
        path: of a Unix socket; created for this user only (unless `Limits.uids` has others), a stale one is replaced,
            and it is removed by `close`. "auto": a new one in a folder that only this user can enter.
        identify: namespace → token; see `Identify`.
        tls: for TCP. The Unix socket is never encrypted.
        transports: how bodies may travel. "tcp" (behind the meta) also on the Unix socket.
        facts: further ones for every client's `Peer.facts`, of plain types.

    Attributes:
        address: "host:port" that it listens on, "" without TCP. If it listens on all, this host's loopback address.
        path: absolute.

    Raises:
        TransportUnavailable: it cannot listen there.
        ValueError: neither `listen` nor `path`.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        listen: tuple[str, int] | None = None,
        path: str = "",
        identify: Identify = open_default_namespace,
        tls: ssl.SSLContext | None = None,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        transports: Sequence[str] = ("tcp",),
        facts: Mapping[str, object] | None = None,
    ) -> None:
        if listen is None and not path:
            raise ValueError("a server needs listen or path")
        path = _shm_peer.private_path() if path == "auto" else path
        self.path = os.path.abspath(path) if path else ""
        facts = dict(facts or {})
        if self.path:
            facts[LOCAL_FACT] = [_shm_peer.host_id(), self.path]
        self._limits = limits
        self._totals = Totals()
        metas = Metas(limits.max_meta)
        self._terms = Terms(handler, identify, tls, limits, tuple(transports), facts, [], self._totals, metas)
        self._pid = os.getpid()
        self._connections: set[Connection] = set()  # all
        self._served: set[Connection] = set()  # whose client has proven who it is
        self._lobby: Lobby[Connection] = Lobby(limits.connections)  # whose client has not
        self._pushed_out = 0
        self._lock = threading.Lock()
        self._closed = False
        for name in transports:
            try:  # imported now, and not while the first client waits for its WELCOME
                way(name)
            except TransportUnavailable:  # the handshake says so to those who want it
                continue
        listeners: list[socket.socket] = []
        try:
            if listen is not None:
                listeners.append(listen_tcp(*listen))
            if path:
                listeners.append(_shm_peer.listen(self.path, uids=limits.uids))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self.address = _address_of(listeners[0]) if listen is not None else ""
        self._acceptor = Acceptor(listeners, self._accepted)

    def register(self, memory: memoryview, fd: int | None) -> None:
        """Make long-lived memory known to all connections; see `Channel.register`. Cannot be taken back."""
        self._terms.slabs.append((memory, fd))

    def stats(self) -> ServerStats:
        totals = self._totals
        with self._lock, totals.lock:
            live = [*self._connections]
            requests, received, sent = Counter(totals.requests), Counter(totals.received), Counter(totals.sent)
            for connection in live:
                _add(connection, requests, received, sent)
            return ServerStats(
                len(live), totals.accepted, totals.refused, totals.failed, dict(requests), dict(received), dict(sent),
                self._pushed_out, self._terms.metas.used,
            )  # fmt: skip

    def close(self, drain_s: float = 0.0) -> None:
        """Accept nobody any more, let requests that are under way end within `drain_s` seconds, then abort the rest.
        Returns when all threads ended, or are stuck in the handler. May be called twice."""
        if self._pid != os.getpid():  # a forked child has nothing of it
            return
        with self._lock:
            self._closed = True
        self._acceptor.close()
        if self.path:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
        self._each(Connection.drain)
        self._join(time.monotonic() + drain_s)
        self._each(Connection.abort)
        stuck = self._join(time.monotonic() + _ABORT_S)
        if stuck:
            logger.error("%d connections are stuck in the handler and were left behind", len(stuck))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, action: Callable[[Connection], None]) -> None:
        with self._lock:
            connections = [*self._connections]
        for connection in connections:
            action(connection)

    def _join(self, until: float) -> list[Connection]:
        """Wait for the threads of all connections; those that are still running then."""
        with self._lock:
            connections = [*self._connections]
        for connection in connections:
            if connection.thread is not threading.current_thread():
                connection.thread.join(max(0.0, until - time.monotonic()))
        return [connection for connection in connections if connection.thread.is_alive()]

    # In the acceptor's thread.

    def _accepted(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            if self._closed or len(self._connections) - len(self._served) >= _MOST_ENDING * self._lobby.most:
                sock.close()
                return
            connection = Connection(self._terms, sock, peer, admit=self._admit, ended=self._ended)
            self._connections.add(connection)
            pushed_out = self._lobby.enter(connection, origin(sock))
            self._pushed_out += pushed_out is not None
        if pushed_out is not None:
            pushed_out.abort()
        try:
            start_with_small_stack(connection.thread)
        except RuntimeError as error:  # no more threads
            logger.warning("%s was turned away: %s", peer, error)
            self._forget(connection)
            sock.close()

    # In the threads of the connections.

    def _admit(self, connection: Connection) -> bool:
        """Its client has proven who it is; whether there is a place for it."""
        with self._lock:
            self._lobby.leave(connection)
            if len(self._served) >= self._limits.connections:
                return False
            self._served.add(connection)
            return True

    def _ended(self, connection: Connection) -> None:
        with self._totals.lock:
            _add(connection, self._totals.requests, self._totals.received, self._totals.sent)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._served.discard(connection)
            self._lobby.leave(connection)


def _add(connection: Connection, requests: Counter[str], received: Counter[str], sent: Counter[str]) -> None:
    name = connection.transport
    if name:
        requests[name] += connection.requests
        received[name] += connection.received
        sent[name] += connection.sent


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return str(Address(host, port))
