"""Connections by server, as many as calls are under way; names, TLS and the greeting of new ones."""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.errors import ClosedError, ConfigError
from kvstore_backends._resolver import ResolveError, Resolver

from .errors import LinkError
from .exchange import Run
from .link import Link
from .options import Node, Settings, as_bytes
from .resp import Ask, command

__all__ = ["Pool", "tls_context"]

_DOWN_S = 0.5  # how long a server that let us wait is not tried again; twice that the next time, and so on
_MOST_DOWN_S = 5.0
_IDLE_S = 60.0  # an idle connection older than this may have been forgotten by a firewall on the way


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """None without TLS. Raises `ConfigError` for files that cannot be read or are no certificates."""
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_cert is not None:
            context.load_cert_chain(settings.tls_cert, settings.tls_key, _no_password)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"{settings.name}: tls_ca, tls_cert and tls_key must be PEM files that can be read: "
            f"{error.strerror or error}"
        ) from error
    except _LockedKey:
        raise ConfigError(f"{settings.name}: the key for tls_cert is encrypted; store it without a password") from None
    return context


class _LockedKey(Exception):
    """A private key that needs a password."""


def _no_password() -> str:
    """Without this, OpenSSL asks on the terminal, and waits."""
    raise _LockedKey


class Pool:
    """Lanes, and the connections of each. A call takes a lane, and then at most one connection to each server.

    Args:
        resolver: for tests.
    """

    def __init__(self, settings: Settings, resolver: Resolver | None = None) -> None:
        self._settings = settings
        self._resolver = resolver or Resolver()
        self._tls = tls_context(settings)
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()  # only while all lanes are busy
        self._busy = 0
        self._idle: dict[Node, deque[Link]] = {}
        self._links: set[Link] = set()
        self._down: dict[Node, tuple[float, float]] = {}  # until when, and for how long
        self._closed = False
        self.opened = 0  # connections so far

    @contextmanager
    def lane(self, deadline: float) -> Iterator[None]:
        """Within the block, one of `lanes` calls. Raises `LinkError` "deadline" if none was free in time.

        Calls that wait have their turn in order: a thread that has just given a lane back would else be the first to
        find it free, again and again, and others would wait for seconds.
        """
        turn: threading.Event | None = None
        with self._lock:
            self._check()
            if self._busy < self._settings.lanes:
                self._busy += 1
            else:
                turn = threading.Event()
                self._waiting.append(turn)
        if turn is not None:
            self._wait(turn, deadline)
        try:
            yield
        finally:
            self._give_back()

    def _wait(self, turn: threading.Event, deadline: float) -> None:
        """Until a lane is handed over: then `turn` is in the queue no more."""
        try:
            turn.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
            with self._lock:
                if turn not in self._waiting:
                    return
                self._check()
            lanes = self._settings.lanes
            raise LinkError("deadline", f"the deadline passed while {lanes} other calls had all lanes")
        except BaseException:
            with self._lock:
                waits = turn in self._waiting
                if waits:
                    self._waiting.remove(turn)
            if not waits:  # it came too late
                self._give_back()
            raise

    def _give_back(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._busy -= 1

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the backend is closed", backend=self._settings.name)

    def run(
        self, node: Node, asks: Sequence[Ask], *, deadline: float, sentinel: bool = False, fresh: bool = False
    ) -> Run:
        """A run over an idle connection to `node` that still looks alive, or a new one. It belongs in a list of `runs`.

        Args:
            sentinel: `node` is a Sentinel: it has other credentials and no databases, and the connection is not kept.
            fresh: only a new one will do.

        Raises:
            LinkError: "dns", "deadline", or "connect": the server let us wait for a connection a moment ago.
        """
        if time.monotonic() < self._down.get(node, (0.0, 0.0))[0]:
            raise LinkError(
                "connect", f"no connection to {node}: it did not answer a moment ago, and is tried again soon"
            )
        link = None if sentinel or fresh else self._idle_link(node)
        if link is None:
            link = self._connect(node, deadline)
        greeting = self._greeting(sentinel=sentinel)
        return Run(node, link, asks, greeting=greeting, window=self._settings.window)

    def _idle_link(self, node: Node) -> Link | None:
        while True:
            with self._lock:
                idle = self._idle.get(node)
                link = idle.pop() if idle else None
            if link is None:
                return None
            if time.monotonic() - link.idle_since < _IDLE_S and not link.stale():
                return link
            self._drop(link)

    def _connect(self, node: Node, deadline: float) -> Link:
        until = min(deadline, time.monotonic() + self._settings.connect_timeout)
        try:
            addresses = self._resolver.addresses(*node, until)
        except ResolveError as error:
            raise LinkError(error.kind, str(error)) from error
        name = self._settings.tls_server_name or node.host.partition("%")[0]
        link = Link(node, addresses, tls=self._tls, server_name=name, until=until)
        with self._lock:
            self._check()
            self._links.add(link)
            self.opened += 1
        return link

    def _greeting(self, *, sentinel: bool) -> list[Ask]:
        settings = self._settings
        words: list[bytes | int] = [b"HELLO", 2]
        password = settings.sentinel_password if sentinel else settings.password
        if password is not None:
            user = (None if sentinel else settings.username) or "default"
            words += [b"AUTH", as_bytes(user), as_bytes(password)]
        asks = [Ask([command(*words, b"SETNAME", b"kvstore")], accepts=list)]
        if settings.database and not sentinel:
            asks.append(Ask([command(b"SELECT", settings.database)]))
        return asks

    @contextmanager
    def runs(self, *, keep: bool = True) -> Iterator[list[Run]]:
        """A list for runs: when the block ends, however it does, each is `done`."""
        runs: list[Run] = []
        try:
            yield runs
        finally:
            for run in runs:
                self._done(run, keep=keep)

    def _done(self, run: Run, *, keep: bool) -> None:
        """Keep the connection of a run that ended well; end any other."""
        link = run.link
        self._note(run.node, link)
        if keep and run.over and run.error is None and link.greeted:
            link.idle_since = time.monotonic()
            with self._lock:
                idle = self._idle.setdefault(run.node, deque())
                if not self._closed and len(idle) < self._settings.lanes:
                    idle.append(link)
                    return
        self._drop(link)

    def _note(self, node: Node, link: Link) -> None:
        """Remember a server that cost a whole `connect_timeout`, so that calls which need others, too, are not held up
        by it one after the other."""
        if link.greeted:
            self._down.pop(node, None)
        elif time.monotonic() - link.began >= 0.9 * self._settings.connect_timeout:
            seconds = min(2 * self._down.get(node, (0.0, _DOWN_S / 2))[1], _MOST_DOWN_S)
            self._down[node] = (time.monotonic() + seconds, seconds)

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.close()

    def forget(self, node: Node) -> None:
        """Do not use idle connections to `node`, nor its address: it is not what it was."""
        with self._lock:
            idle = self._idle.pop(node, ())
        for link in idle:
            self._drop(link)
        self._resolver.forget(*node)

    def close(self) -> None:
        """End everything; calls under way end with errors."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
            for link in self._links:
                link.hang_up()  # under the lock: its descriptor is still its own
            for turn in self._waiting:
                turn.set()
        for links in idle.values():
            for link in links:
                self._drop(link)

    def after_fork(self) -> None:
        """In a forked child: the connections are the parent's. Drop our descriptors of them, say nothing."""
        self._lock = threading.Lock()
        self._waiting = deque()
        self._busy = 0
        self._idle = {}
        links, self._links = self._links, set()
        for link in links:
            link.close()
        self._resolver.after_fork()
