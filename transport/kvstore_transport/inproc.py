"""`InprocServer`: the reference transport, within one process. Nothing is sent: the receiver copies.

For tests of what stands on channels, and to say what a transport must do in the fewest words. A handler runs in a
thread of its channel's own, as with the others, so that a call returns by its deadline whatever the handler does.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

from .channel import Once, flat
from .errors import ConnectionLost, DeadlinePassed, PeerBusy, PeerRefused, ProtocolError, TransportClosed
from .handshake import Identify
from .seam import Answer, Channel, Credentials, Handler, Incoming, Limits, Peer, Plan, Reply
from .server import open_default_namespace

__all__ = ["InprocServer"]

logger = logging.getLogger("kvstore.transport")

_PIECE = 1 << 20  # copied at a time, between two looks whether the channel was aborted
_MOST_DISCARDED = 1 << 20


class _Request(NamedTuple):
    op: int
    meta: bytes
    body: Sequence[memoryview]
    nbytes: int
    deadline: float


class _Link:
    """What the two sides of a channel share.

    Attributes:
        changed: guards and announces everything below.
        copying: held while one side reads the other's memory; what it read from may be reused once `ended` is set and
            this lock was free.
        busy: a call is under way.
        last: the channel ends with this reply.
        ended: by whom the channel was ended: "" while it is not.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.copying = threading.Lock()
        self.request: _Request | None = None
        self.answer: Answer | None = None
        self.busy = False
        self.last = False
        self.ended = ""

    def check(self, side: str) -> None:
        """Raises what `side` is to raise if the channel was ended."""
        if self.ended == side:
            raise TransportClosed("inproc: the channel was closed")
        if self.ended:
            raise ConnectionLost("inproc: the other side ended the channel")

    def end(self, by: str) -> None:
        with self.changed:
            self.ended = self.ended or by
            self.changed.notify_all()
        with self.copying:
            pass

    def wait_for_answer(self, deadline: float) -> Answer:
        """With `changed` held."""
        while self.answer is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlinePassed("inproc: the deadline passed")
            self.check("client")
            self.changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
        return self.answer

    def copy(self, src: Sequence[memoryview], dst: Sequence[memoryview], *, side: str, deadline: float) -> None:
        """Copy `src` to `dst`, which are equally long together."""
        parts = iter([view[at : at + _PIECE] for view in src for at in range(0, len(view), _PIECE)])
        part = memoryview(b"")
        for view in dst:
            at = 0
            while at < len(view):
                part = part if part else next(parts)
                nbytes = min(len(part), len(view) - at)
                with self.copying:
                    self.check(side)
                    if time.monotonic() >= deadline:
                        raise DeadlinePassed("inproc: the deadline passed while a body was copied")
                    view[at : at + nbytes] = part[:nbytes]
                part, at = part[nbytes:], at + nbytes


class _InprocChannel(Channel):
    def __init__(self, link: _Link, peer: Peer) -> None:
        self.peer = peer
        self._link = link
        self._pid = os.getpid()
        self._calling = threading.Lock()

    @property
    def usable(self) -> bool:
        return not self._link.ended and self._pid == os.getpid()

    def call(
        self, op: int, meta: bytes, body: Sequence[memoryview] = (), *, plan: Plan | None = None, deadline: float
    ) -> Reply:
        body, nbytes = flat(body)
        if not 0 <= op <= 255:
            raise ValueError(f"op {op} is not a byte")
        if len(meta) > self.peer.max_meta or nbytes > self.peer.max_body:
            raise ValueError(
                f"a request with {len(meta)} bytes of meta and {nbytes} of body is longer than agreed upon"
            )
        if self._pid != os.getpid():
            raise TransportClosed("inproc: the channel belongs to the process before os.fork()")
        if not self._calling.acquire(blocking=False):
            raise RuntimeError("a channel is for one call at a time")
        try:
            return self._call(_Request(op, bytes(meta), body, nbytes, deadline), plan)
        except BaseException:
            self._link.end("client")
            raise
        finally:
            self._calling.release()

    def _call(self, request: _Request, plan: Plan | None) -> Reply:
        link = self._link
        with link.changed:
            link.check("client")
            link.request, link.answer, link.busy = request, None, True
            link.changed.notify_all()
            answer, last = link.wait_for_answer(request.deadline), link.last
        views, nbytes = flat(answer.body)
        if nbytes:
            if plan is None:
                raise ProtocolError(f"inproc: a reply with {nbytes} bytes of body, which nobody expects")
            into, planned = flat(plan(answer.status, answer.meta, nbytes))
            if planned != nbytes:
                raise ProtocolError(f"inproc: a body of {nbytes} bytes where {planned} were planned")
            link.copy(views, into, side="client", deadline=request.deadline)
        with link.changed:
            link.answer, link.busy = None, False
            link.changed.notify_all()
        if last:
            link.end("client")
        return Reply(answer.status, answer.meta, nbytes)

    def alive(self) -> bool:
        return self.usable

    def abort(self) -> None:
        if self._pid == os.getpid():
            self._link.end("client")

    def close(self) -> None:
        self.abort()


class _InprocIncoming(Incoming):
    def __init__(self, link: _Link, request: _Request, peer: Peer, session: dict[str, object]) -> None:
        self.peer = peer
        self.op, self.meta, self.body_nbytes, self.deadline = request.op, request.meta, request.nbytes, request.deadline
        self.session = session
        self.pending = bool(request.nbytes)
        self._link = link
        self._body = request.body

    def receive(self, views: Sequence[memoryview]) -> None:
        views, nbytes = flat(views)
        if nbytes != self.body_nbytes:
            raise ValueError(f"views of {nbytes} bytes for a body of {self.body_nbytes}")
        if nbytes and not self.pending:
            raise RuntimeError("the body was received or discarded before")
        self.pending = False
        try:
            self._link.copy(self._body, views, side="server", deadline=self.deadline)
        except BaseException:
            self._link.end("server")
            raise

    def discard(self) -> None:
        self.pending = False


class InprocServer:
    """Serves `handler` to channels of this process.

    Args: as those of `Server`.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        identify: Identify = open_default_namespace,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        facts: dict[str, object] | None = None,
    ) -> None:
        self._handler = handler
        self._identify = identify
        self._limits = limits
        self._facts = facts or {}
        self._lock = threading.Lock()
        self._links: dict[_Link, threading.Thread] = {}
        self._draining = False

    def connect(
        self,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008 - immutable
        limits: Limits = Limits(),  # noqa: B008 - immutable
        client_id: bytes = b"",
        facts: dict[str, object] | None = None,
    ) -> Channel:
        """A channel; as `kvstore_transport.connect`, less what makes no sense here.

        Raises:
            ConnectionLost, PeerBusy, PeerRefused: as over a network.
        """
        token = self._identify(credentials.namespace)
        if token is None or not hmac.compare_digest(token, credentials.token):
            name = credentials.namespace
            shown_namespace = f"namespace {name!r}" if name else "the default namespace"
            raise PeerRefused(f"inproc: wrong token for {shown_namespace}, or no such namespace")
        max_meta = min(limits.max_meta, self._limits.max_meta)
        max_body = min(limits.max_body, self._limits.max_body)
        server = Peer("inproc", "inproc", "", credentials.namespace, b"", max_meta, max_body, self._facts)
        client = server._replace(client=client_id or os.urandom(16), facts=facts or {})
        link = _Link()
        thread = threading.Thread(target=self._serve, args=(link, client), name="kvstore-inproc", daemon=True)
        with self._lock:
            if self._draining:
                raise ConnectionLost("inproc: the server was closed")
            if len(self._links) >= self._limits.connections:
                raise PeerBusy(f"inproc: {len(self._links)} connections already")
            self._links[link] = thread
        thread.start()
        return _InprocChannel(link, server)

    def close(self, drain_s: float = 0.0) -> None:
        """As `Server.close`."""
        with self._lock:
            self._draining = True
            links = dict(self._links)
        until = time.monotonic() + drain_s
        for link in links:
            with link.changed:
                if not link.busy:
                    link.ended = link.ended or "server"
                    link.changed.notify_all()
        for link, thread in links.items():
            thread.join(max(0.0, until - time.monotonic()))
            link.end("server")
        for thread in links.values():
            thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the thread of a channel.

    def _serve(self, link: _Link, peer: Peer) -> None:
        session: dict[str, object] = {}
        try:
            while (request := _wait_for_request(link)) is not None:
                self._answer(link, request, peer, session)
                if self._draining:
                    break
        except (ConnectionLost, DeadlinePassed, TransportClosed):
            pass
        except Exception:
            logger.exception("inproc: the handler failed; the channel ends")
        finally:
            link.end("server")
            on_close = session.pop("on_close", None)
            if callable(on_close):
                on_close()
            with self._lock:
                del self._links[link]

    def _answer(self, link: _Link, request: _Request, peer: Peer, session: dict[str, object]) -> None:
        incoming = _InprocIncoming(link, request, peer, session)
        answer = self._handler(incoming)
        done = Once(answer.done)
        try:
            if len(answer.meta) > peer.max_meta or sum(map(len, answer.body)) > peer.max_body:
                raise ValueError("a reply that is longer than agreed upon")
            with link.changed:
                link.check("server")
                link.answer, link.request = answer, None
                link.last = incoming.pending and request.nbytes > _MOST_DISCARDED
                link.changed.notify_all()
                while link.answer is answer and not link.ended:
                    link.changed.wait()
            with link.copying:  # if it was aborted: until nobody reads from the body any more
                pass
        finally:
            done()


def _wait_for_request(link: _Link) -> _Request | None:
    with link.changed:
        while link.request is None:
            if link.ended:
                return None
            link.changed.wait()
        return link.request
