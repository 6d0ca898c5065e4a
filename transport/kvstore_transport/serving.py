"""What a server does on one connection: the greeting, then one request after another."""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._metas import LEAST_RATE, Metas, MetaShare
from ._shm_peer import check_peer
from .bodies import LeasingBodies
from .channel import Once, checksum, flat
from .control import Control
from .errors import ConnectionLost, DeadlinePassed, PeerRefused, ProtocolError, TransportError
from .frames import BODY_SUM, LEASE, Header, Kind, pack_header
from .handshake import Agreed, Identify, greet_client, refuse
from .seam import Answer, Bodies, Handler, Incoming, Limits, Peer

__all__ = ["Connection", "Terms", "Totals"]

logger = logging.getLogger("kvstore.transport")

_MOST_DISCARDED = 1 << 20  # of a body that the handler did not take; more is not worth the time
_REPLY_GRACE_S = 1.0  # the caller's deadline may have passed just now: let the reply go out all the same
_TLS_RECORD = b"\x16"  # how a TLS ClientHello begins (RFC 8446, 5.1)
_OUR_FRAME = b"K"


class Totals:
    """What connections that ended have counted. Guarded by its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.accepted = self.refused = self.failed = 0
        self.requests: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()


class Terms(NamedTuple):
    """What all connections of a server share.

    Attributes:
        slabs: what was registered, only ever appended to.
        metas: memory for the metas of all connections.
    """

    handler: Handler
    identify: Identify
    tls: ssl.SSLContext | None
    limits: Limits
    transports: tuple[str, ...]
    facts: dict[str, object]
    slabs: list[tuple[memoryview, int | None]]
    totals: Totals
    metas: Metas


class Connection:
    """One connection, served by its own thread.

    However slowly a client takes a body, or sends one, it ends: by the deadline of the request, or `stall_s` and one
    second for each MiB after it began. Then the connection is cut, and what the body pinned is given back.

    Args:
        admit: asked once the client has proven who it is; False: tell it to come again.
        ended: called at the very end, in the connection's thread.

    Attributes:
        transport: how bodies travel; "" before that is known.
        requests, received, sent: counts; bytes are those of bodies.
    """

    def __init__(
        self, terms: Terms, sock: socket.socket, peer: str, *, admit: Callable[[Connection], bool],
        ended: Callable[[Connection], None],
    ) -> None:  # fmt: skip
        self._terms = terms
        self._sock: socket.socket | None = sock
        self._peer = peer
        self._admit = admit
        self._ended = ended
        self._control: Control | None = None
        self._bodies: Bodies | None = None
        self._lock = threading.Lock()
        self._working = False
        self._draining = False
        self._aborted = False
        self._session: dict[str, object] = {}
        self._registered = 0
        self.transport = ""
        self.requests = self.received = self.sent = 0
        self.thread = threading.Thread(target=self._run, name=f"kvstore-serve-{peer}", daemon=True)

    # From other threads.

    def drain(self) -> None:
        """End it when the request under way, if any, has its reply."""
        with self._lock:
            self._draining = True
            working = self._working
        if not working:
            self.abort()

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            control, bodies, sock = self._control, self._bodies, self._sock
        if control is not None:
            control.abort()
        elif sock is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which is not safe under a call
            except OSError:  # not connected any more, or closed
                pass
        if bodies is not None:
            bodies.abort()

    # In its own thread.

    def _run(self) -> None:
        totals = self._terms.totals
        clean = False
        try:
            agreed = self._greet()
            with totals.lock:
                totals.accepted += 1
            self._serve(agreed)
            clean = True
        except PeerRefused as error:
            with totals.lock:
                totals.refused += 1
            logger.info("%s", error)
        except TransportError as error:
            if not self._aborted:
                with totals.lock:
                    totals.failed += 1
                logger.debug("connection ended: %s", error)
        except Exception:
            with totals.lock:
                totals.failed += 1
            logger.exception("%s: the handler failed; the connection ends", self._peer)
        finally:
            self._clean_up(clean)
            self._ended(self)

    def _clean_up(self, clean: bool) -> None:
        """Cut the connection first, so that whoever holds a lease can tell; then let go of everything."""
        control, bodies = self._control, self._bodies
        try:
            if control is not None and control.metas is not None:
                control.metas.free()
            if control is not None and not clean:
                control.abort()
            if bodies is not None:
                if not clean:
                    bodies.abort()
                bodies.close()
        except Exception:
            logger.exception("%s: freeing what the connection used failed", self._peer)
        on_close = self._session.pop("on_close", None)
        if callable(on_close):
            try:
                on_close()
            except Exception:
                logger.exception("%s: on_close failed", self._peer)
        with self._lock:  # `abort` never meets a closed descriptor's number
            sock, self._sock, self._control = self._sock, None, None
        if control is not None:
            control.close()
        elif sock is not None:
            sock.close()

    # The greeting.

    def _greet(self) -> Agreed:
        terms, limits = self._terms, self._terms.limits
        deadline = time.monotonic() + limits.handshake_s
        control = self._control_of(deadline)
        agreed = greet_client(
            control,
            identify=terms.identify,
            transports=terms.transports,
            limits=limits,
            facts=terms.facts,
            admit=lambda: self._admit(self),
            deadline=deadline,
        )
        bodies = agreed.way.open(
            control, server=True, mine=agreed.mine, theirs=agreed.theirs, limits=agreed.limits, deadline=deadline
        )
        with self._lock:
            self._bodies = bodies
            self.transport = agreed.peer.transport
        return agreed

    def _control_of(self, deadline: float) -> Control:
        """Over TLS or not, as the server is; a client that does the other thing is told so."""
        sock, limits, tls = self._sock, self._terms.limits, self._terms.tls
        if sock is None:
            raise ConnectionLost(f"{self._peer}: closed")
        if sock.family == socket.AF_UNIX:
            control = self._own(Control(sock, self._peer, stall_s=limits.stall_s))
            try:
                check_peer(control.fileno(), limits.uids)
            except PeerRefused as error:
                refuse(control, "user", str(error), deadline=deadline)
                raise
            return control
        begins = _first_byte(sock, self._peer, deadline)
        if begins not in (_TLS_RECORD, _OUR_FRAME):
            raise ProtocolError(f"{self._peer}: neither our protocol nor TLS")
        if tls is None or begins != _TLS_RECORD:
            control = self._own(Control(sock, self._peer, stall_s=limits.stall_s))
            if tls is None and begins != _TLS_RECORD:
                return control
            wrong = "wants TLS: switch tls on" if tls else "does not speak TLS: leave tls out"
            refuse(control, "tls", f"this server {wrong}", deadline=deadline)
            raise PeerRefused(f"{self._peer} was refused: TLS at one side only")
        from .tls import TlsControl

        try:  # `wrap_socket`, too, raises if the client is gone by now
            secured = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                self._sock = secured
            secured.settimeout(max(0.001, deadline - time.monotonic()))
            secured.do_handshake()
        except OSError as error:
            raise ConnectionLost(f"{self._peer}: the TLS handshake failed: {error}") from error
        return self._own(TlsControl(secured, self._peer, stall_s=limits.stall_s))

    def _own(self, control: Control) -> Control:
        with self._lock:
            self._control = control
            aborted = self._aborted
        if aborted:
            control.abort()
        return control

    # Requests.

    def _serve(self, agreed: Agreed) -> None:
        control, bodies = self._control, self._bodies
        if control is None or bodies is None:
            return
        patience = bodies.patience if isinstance(bodies, LeasingBodies) else _no_end
        metas = control.metas = MetaShare(self._terms.metas, agreed.peer.client)
        while True:
            metas.free()
            try:
                header, meta = control.receive_frame(limits=agreed.limits, deadline=patience())
            except ConnectionLost:
                return  # the usual end
            if header.kind != Kind.REQUEST:
                if header.kind not in (Kind.GRANT, Kind.RELEASE):
                    raise control.fail(ProtocolError(f"{self._peer}: {header.kind.name} out of turn"))
                bodies.heard(header, meta)
                continue
            if not self._work(True):
                return
            go_on = self._request(agreed, control, bodies, header, meta)
            if not go_on:
                control.finish(deadline=time.monotonic() + self._terms.limits.stall_s)
                return
            if not self._work(False):
                return

    def _work(self, working: bool) -> bool:
        """A request begins or ended; False if no more are wanted."""
        with self._lock:
            self._working = working and not self._draining
            return not self._draining

    def _request(self, agreed: Agreed, control: Control, bodies: Bodies, header: Header, meta: bytes) -> bool:
        """Whether the connection can go on."""
        slabs = self._terms.slabs
        while self._registered < len(slabs):
            bodies.register(*slabs[self._registered])
            self._registered += 1
        self.requests += 1
        incoming = _Incoming(agreed, bodies, control, header, meta, self._session)
        answer = self._terms.handler(incoming)
        done, lent = Once(answer.done), False
        try:
            go_on = incoming.end()
            self.received += incoming.received
            lent = self._reply(agreed, control, bodies, header, answer, done, incoming.deadline + _REPLY_GRACE_S)
        finally:
            if not lent:
                done()
        return go_on

    def _reply(
        self,
        agreed: Agreed,
        control: Control,
        bodies: Bodies,
        request: Header,
        answer: Answer,
        done: Callable[[], None],
        deadline: float,
    ) -> bool:
        """Send the reply; whether its body was lent, so that `done` is called when the peer lets go of it."""
        views, nbytes = flat(answer.body)
        limits, number, meta = agreed.limits, request.number, answer.meta
        deadline = min(deadline, _latest(limits, nbytes))
        if len(meta) > limits.max_meta or nbytes > limits.max_body:
            raise ValueError(
                f"a reply with {len(meta)} bytes of meta and {nbytes} of body; the peer takes at most "
                f"{limits.max_meta} and {limits.max_body}"
            )
        self.sent += nbytes
        header = Header(Kind.REPLY, answer.status, 0, number, 0, nbytes)
        if nbytes and request.flags & LEASE and isinstance(bodies, LeasingBodies):
            place = bodies.lend(views, nbytes, number=number, done=done)
            if place is not None:
                parts = [pack_header(header._replace(flags=LEASE), meta), meta]
                parts += [pack_header(Header(Kind.GRANT, number=number), place), place]
                control.send([part for part in parts if part], deadline=deadline)
                return True
        if nbytes and agreed.sums:
            header = header._replace(flags=BODY_SUM, body_sum=checksum(views))
        if bodies.inline or not nbytes:
            control.send_frame(header, meta, views, deadline=deadline)
        else:
            if bodies.joined:
                control.hold_frame(header, meta)
            else:
                control.send_frame(header, meta, deadline=deadline)
            bodies.send(views, nbytes, number=number, deadline=deadline)
        return False


class _Incoming(Incoming):
    """Attributes:
    received: bytes of the body that the handler took.
    """

    def __init__(
        self,
        agreed: Agreed,
        bodies: Bodies,
        control: Control,
        header: Header,
        meta: bytes,
        session: dict[str, object],
    ) -> None:
        self.peer: Peer = agreed.peer
        self.op = header.code
        self.meta = meta
        self.body_nbytes = header.body_nbytes
        self.deadline = time.monotonic() + header.budget_us / 1e6 if header.budget_us else math.inf
        self.session = session
        self.leasing = bool(header.flags & LEASE)
        self.received = 0
        self._sums = agreed.sums
        self._limits = agreed.limits
        self._bodies = bodies
        self._control = control
        self._header = header
        self._pending = bool(header.body_nbytes)

    def receive(self, views: Sequence[memoryview]) -> None:
        views, nbytes = flat(views)
        if nbytes != self.body_nbytes:
            raise ValueError(f"views of {nbytes} bytes for a body of {self.body_nbytes}")
        if not nbytes:
            return
        if not self._pending:
            raise RuntimeError("the body was received or discarded before")
        self._pending = False
        header = self._header
        try:
            deadline = min(self.deadline, _latest(self._limits, nbytes))
            self._bodies.receive(views, nbytes, number=header.number, deadline=deadline)
            if header.flags & BODY_SUM:
                if checksum(views) != header.body_sum:
                    raise ProtocolError(f"{self.peer.address}: a body whose checksum is wrong")
            elif self._sums:
                raise ProtocolError(f"{self.peer.address}: a body without the checksum that was agreed upon")
        except BaseException:
            self._control.abort()
            self._bodies.abort()
            raise
        self.received = nbytes

    def discard(self) -> None:
        if self._pending:
            self._pending = False
            deadline = min(self.deadline, _latest(self._limits, self.body_nbytes))
            self._bodies.skip(self.body_nbytes, number=self._header.number, deadline=deadline)

    def end(self) -> bool:
        """After the handler: get the body out of the way; whether the connection can go on."""
        if self._pending and self.body_nbytes > _MOST_DISCARDED:
            return False
        self.discard()
        return True


def _latest(limits: Limits, nbytes: int) -> float:
    """When a body that begins now must be through."""
    return time.monotonic() + limits.stall_s + nbytes / LEAST_RATE


def _no_end() -> float:
    return math.inf


def _first_byte(sock: socket.socket, peer: str, deadline: float) -> bytes:
    """Peeked at, not taken."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))):
        raise DeadlinePassed(f"{peer}: said nothing")
    try:
        first = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        raise ConnectionLost(f"{peer}: lost before it said anything: {error}") from error
    if not first:
        raise ConnectionLost(f"{peer}: closed the connection before it said anything")
    return first
