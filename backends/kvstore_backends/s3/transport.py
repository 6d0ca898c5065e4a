"""Pooled keep-alive connections to one endpoint, and hedged requests."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.wrappers.hedging import Budget, LatencyTable
from kvstore_backends._resolver import ResolveError, Resolver

from .http import Connection, Head, LinkError, Timing, too_late

__all__ = ["Hedging", "Origin", "Pool", "Request", "Resolver", "Transport"]

_IDLE_S = 20.0  # an idle connection older than this is likely closed by the other side
_MIN_DELAY_S = 0.001
_HEDGE_CONNECT_S = 0.1  # for the second connection of a hedged request; longer only if answers usually take longer
_SAMPLES = 32


class Origin(NamedTuple):
    """Where a request goes."""

    scheme: str
    host: str
    port: int


class Request(NamedTuple):
    """A request that is ready to be sent: its head as bytes, its body as views."""

    origin: Origin
    method: str
    head: bytes
    body: Sequence[memoryview] = ()


class Pool:
    """Idle connections by origin, the last used first. `connect` opens new ones."""

    def __init__(
        self, resolver: Resolver, *, connect_timeout: float, tls: Callable[[], ssl.SSLContext], most_idle: int
    ) -> None:
        self._resolver = resolver
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: dict[Origin, deque[Connection]] = {}
        self._closed = False
        self.opened = 0  # connections so far

    def take(self, origin: Origin, timing: Timing) -> Connection:
        """An idle connection that still looks alive, or a new one."""
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                connection = idle.pop() if idle else None
            if connection is None:
                return self.connect(origin, timing)
            if time.monotonic() - connection.idle_since < _IDLE_S and not connection.readable():
                return connection
            connection.close()  # ended by the other side, or it says what nobody asked for

    def connect(self, origin: Origin, timing: Timing) -> Connection:
        """A new connection, TLS included. Raises `LinkError` "dns", "connect" or "deadline"."""
        try:
            addresses = self._resolver.addresses(origin.host, origin.port, timing.until)
        except ResolveError as error:
            raise LinkError(error.kind, str(error)) from error
        tls = self._tls() if origin.scheme == "https" else None
        end = min(timing.until, time.monotonic() + self._connect_timeout)
        failure: OSError | None = None
        for number, (family, address) in enumerate(addresses):
            left = end - time.monotonic()
            if left <= 0:
                break
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(left / (len(addresses) - number))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if tls is not None:
                    sock.settimeout(max(_MIN_DELAY_S, end - time.monotonic()))  # for the whole handshake
                    sock = tls.wrap_socket(sock, server_hostname=origin.host)
            except OSError as error:  # includes ssl.SSLError
                failure = error
                sock.close()
                continue
            except BaseException:
                sock.close()
                raise
            with self._lock:
                self.opened += 1
            return Connection(sock)
        where = f"{origin.host}:{origin.port}"
        if time.monotonic() >= timing.until:
            raise LinkError("deadline", f"the deadline passed while connecting to {where}") from failure
        if isinstance(failure, ssl.SSLCertVerificationError):
            text = f"the certificate of {where} cannot be trusted: {failure.verify_message}; see option ca_bundle"
            raise LinkError("tls", text) from failure
        if failure is None or isinstance(failure, TimeoutError):
            raise LinkError("connect", f"no connection to {where} within {self._connect_timeout:.3g} s") from failure
        what = "does it speak TLS? " if isinstance(failure, ssl.SSLError) else ""
        raise LinkError(
            "connect", f"no connection to {where}: {what}{failure.strerror or type(failure).__name__}"
        ) from failure

    def give(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        with self._lock:
            idle = self._idle.setdefault(origin, deque())
            if not self._closed and len(idle) < self._most_idle:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def after_fork(self) -> None:
        """In a forked child: the connections are the parent's; drop our descriptors of them, say nothing."""
        self._lock = threading.Lock()
        self._resolver.after_fork()
        self.close()


class Hedging:
    """When a second request is sent on a fresh connection: after the quantile of recent times to the first byte, and
    for at most a share of all requests. Not while the service throttles.

    S3's own advice ("Performance design patterns for Amazon S3": retry the slowest requests on a new connection), and
    J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013.
    """

    def __init__(self, *, quantile: float = 0.95, share: float = 0.05, samples: int = _SAMPLES) -> None:
        self._lock = threading.Lock()
        self._table = LatencyTable(quantile, samples)
        self._budget = Budget(share)
        self._quiet_until = 0.0
        self.sent = self.won = 0

    def begin(self, kind: str) -> float | None:
        """A request begins: seconds after which to hedge it; None: not."""
        with self._lock:
            self._budget.earn(1)
            usual = self._table.quantile(kind, 1)
            if usual is None or not self._budget.covers(1) or time.monotonic() < self._quiet_until:
                return None
        return max(usual, _MIN_DELAY_S)

    def pay(self) -> bool:
        with self._lock:
            paid = self._budget.pay(1)
            self.sent += paid
            return paid

    def refund(self) -> None:
        with self._lock:
            self._budget.refund(1)
            self.sent -= 1

    def note(self, kind: str, seconds: float, *, throttled: bool, won: bool) -> None:
        """A request was answered: seconds from its start to the first byte."""
        with self._lock:
            self.won += won
            if throttled:
                self._quiet_until = time.monotonic() + 1.0
            else:
                self._table.note(kind, 1, seconds)


class Transport:
    """Sends requests and reads the heads of the answers. The caller reads the body and then calls `done`."""

    def __init__(self, pool: Pool, hedging: Hedging | None = None) -> None:
        self.pool = pool
        self.hedging = hedging
        self._lock = threading.Lock()
        self.requests = 0

    def exchange(self, request: Request, timing: Timing, *, hedge: str = "") -> tuple[Connection, Head]:
        """Send `request` and read the head of its answer.

        A connection that had been idle may have been closed meanwhile: then a new one is tried, once.

        Args:
            hedge: kind of request for hedging; "" never hedges.

        Raises:
            LinkError: nothing is left open then.
        """
        connection = self.pool.take(request.origin, timing)
        while True:
            was_idle = connection.used > 0
            try:
                return self._on(connection, request, timing, hedge)
            except LinkError as error:
                if not was_idle or error.kind not in ("closed", "connect"):
                    raise
            connection = self.pool.connect(request.origin, timing)

    def _on(self, connection: Connection, request: Request, timing: Timing, hedge: str) -> tuple[Connection, Head]:
        hedging = self.hedging if hedge else None
        delay = None if hedging is None else hedging.begin(hedge)
        start = time.monotonic()
        first = connection
        try:
            with self._lock:
                self.requests += 1
            whole = connection.send(request.head, request.body, timing)
            if delay is not None and not connection.readable(min(delay, timing.left())):
                connection = self._race(connection, request, timing, delay)
            head = connection.read_head(timing)
        except BaseException:
            connection.close()
            raise
        if hedging is not None:
            throttled = head.status in (429, 503)
            hedging.note(hedge, time.monotonic() - start, throttled=throttled, won=connection is not first)
        return connection, head if whole else head._replace(keep=False)

    def _race(self, first: Connection, request: Request, timing: Timing, delay: float) -> Connection:
        """Send it once more on a fresh connection; the one that begins to answer first. The other is closed.

        The first may answer while the second is being made, and would have to wait: so that gets little time.
        """
        hedging = self.hedging
        if hedging is None or not hedging.pay():
            return first
        soon = time.monotonic() + max(_HEDGE_CONNECT_S, delay)
        try:
            second = self.pool.connect(request.origin, timing._replace(until=min(timing.until, soon)))
        except LinkError:
            hedging.refund()
            return first
        if first.readable():
            hedging.refund()
            self.pool.give(request.origin, second)
            return first
        with self._lock:
            self.requests += 1
        try:
            second.send(request.head, request.body, timing)
            return _first_to_answer(first, second, timing)
        except BaseException:
            second.close()
            raise

    def done(self, request: Request, connection: Connection, head: Head, *, ended: bool) -> None:
        """The body was read (`ended`) or is not wanted."""
        if ended and head.keep:
            self.pool.give(request.origin, connection)
        else:
            connection.close()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.pool.after_fork()


def _first_to_answer(first: Connection, second: Connection, timing: Timing) -> Connection:
    racing = {first.fileno(): first, second.fileno(): second}
    poll = select.poll()
    for number in racing:
        poll.register(number, select.POLLIN)
    end = time.monotonic() + timing.left()  # of their silence; what they say may not be an answer yet
    while len(racing) > 1:
        left = end - time.monotonic()
        if left <= 0:
            raise too_late(timing, "does not answer")
        for number, _ in poll.poll(left * 1000):
            connection = racing[number]
            try:
                if connection.pull():
                    (second if connection is first else first).close()
                    return connection
            except LinkError:
                connection.close()
                del racing[number]
                break
    return next(iter(racing.values()))
