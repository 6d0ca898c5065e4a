"""`connect` and the client's `Channel` over a control connection, whatever way bodies travel."""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_64

from ._shm_peer import host_id
from .addresses import Address, connect_control, parse_address
from .bodies import LOCAL, LeasingBodies, auto
from .control import Control, EarlyReply
from .errors import (
    ConnectionLost,
    DeadlinePassed,
    PeerBusy,
    ProtocolError,
    TransportClosed,
    TransportError,
    TransportUnavailable,
)
from .frames import BODY_SUM, LEASE, Header, Kind
from .handshake import LOCAL_FACT, Agreed, Wishes, greet_server, our_wishes
from .process import process_id
from .seam import Bodies, Channel, Credentials, Leased, Limits, Plan, Reply

__all__ = ["SocketChannel", "connect"]

_MOST_BUDGET_US = (1 << 63) - 1


def connect(
    address: str,
    *,
    deadline: float,
    credentials: Credentials = Credentials(),  # noqa: B008 - immutable
    transport: str | Sequence[str] = "auto",
    tls: ssl.SSLContext | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    client_id: bytes = b"",
    facts: Mapping[str, object] | None = None,
    body_sums: bool = False,
) -> Channel:
    """Open a channel to the server at `address`.

    Args:
        address: "host:port", "[v6]:port", or the path of a Unix socket, which contains a "/".
        deadline: absolute `time.monotonic()` seconds; covers the name look-up, the connect and the handshake, which
            together are also limited by `limits.handshake_s`.
        transport: how bodies shall travel: a name, several in order of preference (as a sequence, or with commas), or
            "auto" (`bodies.auto`). If it is one name, nothing else will do; otherwise `Peer.note` says why it became a
            later one. Shared memory needs a Unix socket: a server on this host names its own when reached over TCP.
        tls: for TCP; a Unix socket is not encrypted. With TLS, only transports that encrypt bodies are used: "tcp".
        client_id: 16 bytes that all channels of one client object share; made up if empty.
        facts: further ones for the server's `Peer.facts`, of plain types, together less than 60 KiB.
        body_sums: let every body carry an XXH3-64, in both directions. TCP's own checksum has 16 bits.

    Raises:
        ConnectionLost, DeadlinePassed: nobody there, or not in time. Another try may help.
        PeerBusy: it has its most connections. Another try may help.
        PeerRefused, TransportUnavailable: the message says what to change.
        ProtocolError: there is something else at that address.
        ValueError: `address`, `transport` or `client_id` makes no sense.
    """
    place = parse_address(address)
    if client_id and len(client_id) != 16:
        raise ValueError(f"client_id of {len(client_id)} bytes instead of 16")
    names = tuple(transport.split(",")) if isinstance(transport, str) else tuple(transport)
    exact = len(names) == 1 and names != ("auto",)
    names = tuple(dict.fromkeys(part for name in names for part in (auto() if name == "auto" else (name,))))
    tls = None if place.path else tls
    wishes = our_wishes(names, encrypted=tls is not None, exact=exact)
    hello = _Hello(place, credentials, tls, limits, client_id or os.urandom(16), facts or {}, body_sums)
    if place.path or not LOCAL & set(wishes.names):
        return _connect(hello, wishes, deadline)
    return _connect_nearer(hello, wishes, deadline)


def _connect_nearer(hello: _Hello, wishes: Wishes, deadline: float) -> Channel:
    """Over TCP, and then over the Unix socket that the server may have named, if it is on this host."""
    over_tcp = our_wishes(("tcp",), encrypted=hello.tls is not None, exact=False)
    far = tuple(name for name in wishes.names if name not in LOCAL)
    channel = _connect(hello, wishes._replace(names=far) if far else over_tcp, deadline)
    try:
        better = wishes.names[: wishes.names.index(channel.peer.transport)] if far else wishes.names
        local = tuple(name for name in better if name in LOCAL)
        if not local:
            return channel
        try:
            path = _path_of(channel.peer.facts.get(LOCAL_FACT))
            nearer = _connect(
                hello._replace(address=Address("", 0, path), tls=None),
                wishes._replace(names=local, exact=True),
                deadline,
            )
        except TransportError as error:
            if not far:
                if isinstance(error, DeadlinePassed | ConnectionLost | PeerBusy):  # another try may help
                    raise
                raise TransportUnavailable(f"{hello.address}: no {' or '.join(local)}: {error}") from error
            note = "; ".join(filter(None, [channel.peer.note, f"{', '.join(local)}: {error}"]))
            channel.peer = channel.peer._replace(note=note)
            return channel
        channel.close()
        return nearer
    except BaseException:
        channel.close()
        raise


def _path_of(fact: object) -> str:
    """Of the Unix socket of a server on this host."""
    if not isinstance(fact, list) or len(fact) != 2 or not all(isinstance(part, str) and part for part in fact):
        raise TransportUnavailable("the server has no Unix socket: start it with --unix PATH")
    host, path = fact
    if host != host_id():
        raise TransportUnavailable("not on the same host")
    return str(path)


def _connect(hello: _Hello, wishes: Wishes, deadline: float) -> Channel:
    """Connect, with fewer wishes if a way that was agreed upon cannot be opened."""
    while True:
        until = min(deadline, time.monotonic() + hello.limits.handshake_s)
        try:
            return _attempt(hello, wishes, until)
        except _WayFailedError as failed:
            left = tuple(name for name in wishes.names if name != failed.name)
            if wishes.exact or not left:
                raise failed.error from failed.error.__cause__
            wishes = wishes._replace(names=left, notes=(*wishes.notes, f"{failed.name}: {failed.error}"))
        except DeadlinePassed as error:
            if until >= deadline:
                raise
            raise ConnectionLost(f"{hello.address}: no handshake within {hello.limits.handshake_s:g} s") from error


class _Hello(NamedTuple):
    """What does not change from one attempt to connect to the next."""

    address: Address
    credentials: Credentials
    tls: ssl.SSLContext | None
    limits: Limits
    client: bytes
    facts: Mapping[str, object]
    sums: bool


class _WayFailedError(Exception):
    """Both sides agreed on a way, and it could not be opened."""

    def __init__(self, name: str, error: TransportError) -> None:
        super().__init__(name)
        self.name = name
        self.error = error


def _attempt(hello: _Hello, wishes: Wishes, deadline: float) -> SocketChannel:
    limits = hello.limits
    control = connect_control(hello.address, tls=hello.tls, stall_s=limits.stall_s, deadline=deadline)
    try:
        agreed = greet_server(
            control,
            wishes,
            credentials=hello.credentials,
            limits=limits,
            client=hello.client,
            facts=hello.facts,
            sums=hello.sums,
            deadline=deadline,
        )
        try:
            bodies = agreed.way.open(
                control, server=False, mine=agreed.mine, theirs=agreed.theirs, limits=agreed.limits, deadline=deadline
            )
        except TransportError as error:
            raise _WayFailedError(agreed.way.name, error) from error
        return SocketChannel(control, bodies, agreed)
    except BaseException:
        control.close()
        raise


class SocketChannel(Channel):
    """A channel over a control connection. See `Channel`."""

    def __init__(self, control: Control, bodies: Bodies, agreed: Agreed) -> None:
        self.peer = agreed.peer
        self._control = control
        self._bodies = bodies
        self._limits = agreed.limits
        self._sums = agreed.sums
        self._number = 0
        self._calling = threading.Lock()
        self._closing = False
        self._pid = process_id()

    @property
    def usable(self) -> bool:
        return self._control.usable

    def call(
        self, op: int, meta: bytes, body: Sequence[memoryview] = (), *, plan: Plan | None = None, deadline: float
    ) -> Reply:
        body, nbytes = flat(body)
        self._check(op, meta, nbytes)
        with _Calling(self):
            number, flags, body_sum = self._next(), 0, 0
            if nbytes and self._sums:
                flags, body_sum = BODY_SUM, checksum(body)
            header = Header(Kind.REQUEST, op, flags, number, 0, nbytes, self._budget(deadline), body_sum)
            early = self._send(header, meta, body, deadline)
            header, meta = early or self._reply(number, deadline)
            if header.flags & LEASE:
                raise self._wrong("a body was left in shared memory, which nobody asked for")
            if header.body_nbytes:
                if plan is None:
                    raise self._wrong(f"a reply with {header.body_nbytes} bytes of body, which nobody expects")
                self._receive(header, plan(header.code, meta, header.body_nbytes), deadline)
            if early:  # the server ends the connection now, and what we began to send is of no use to it
                self.abort()
            return Reply(header.code, meta, header.body_nbytes)

    def call_leased(self, op: int, meta: bytes, *, deadline: float) -> Leased | None:
        bodies = self._bodies
        if not isinstance(bodies, LeasingBodies):
            return None
        self._check(op, meta, 0)
        with _Calling(self):
            number = self._next()
            header = Header(Kind.REQUEST, op, LEASE, number, 0, 0, self._budget(deadline))
            self._control.send_frame(header, meta, deadline=deadline)
            header, meta = self._reply(number, deadline)
            if not header.flags & LEASE:  # not in shared memory: a private copy
                own = memoryview(bytearray(header.body_nbytes))
                if own:
                    self._receive(header, [own], deadline)
                return Leased(header.code, meta, own.toreadonly(), Once(None), lambda: True)
            _, place = self._control.await_frame(Kind.GRANT, number, limits=self._limits, deadline=deadline)
            body = bodies.take(place, header.body_nbytes, number=number, deadline=deadline)
            return Leased(header.code, meta, body, Once(lambda: bodies.release(number)), self.alive)

    def register(self, memory: memoryview, fd: int | None) -> None:
        self._bodies.register(memory, fd)

    def alive(self) -> bool:
        return self._control.usable and not self._control.peer_gone()

    def abort(self) -> None:
        if self._pid == process_id():  # a UCX endpoint is the parent's, and so are its threads
            self._control.abort()
            self._bodies.abort()

    def close(self) -> None:
        self._closing = True
        if self._pid != process_id():
            self._control.close()
            return
        if self._calling.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._calling.release()
        else:
            self.abort()  # the call under way ends now, and closes what is left

    def _close(self) -> None:
        if not self._control.usable:
            self._bodies.abort()
        self._bodies.close()
        self._control.close()

    # The steps of a call.

    def _check(self, op: int, meta: bytes, nbytes: int) -> None:
        if not 0 <= op <= 255:
            raise ValueError(f"op {op} is not a byte")
        if len(meta) > self._limits.max_meta or nbytes > self._limits.max_body:
            raise ValueError(
                f"a request with {len(meta)} bytes of meta and {nbytes} of body; {self.peer.address} takes at most "
                f"{self._limits.max_meta} and {self._limits.max_body}"
            )

    def _next(self) -> int:
        self._number = self._number + 1 & 0xFFFFFFFF
        return self._number

    def _budget(self, deadline: float) -> int:
        if deadline == math.inf:
            return 0
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed(f"{self.peer.address}: the deadline passed before anything was sent")
        return min(max(1, int(left * 1e6)), _MOST_BUDGET_US)

    def _send(
        self, header: Header, meta: bytes, body: Sequence[memoryview], deadline: float
    ) -> tuple[Header, bytes] | None:
        """Send the request; the reply, if the server ended it before it took the whole body."""
        control, bodies, nbytes = self._control, self._bodies, header.body_nbytes
        try:
            if bodies.inline or not nbytes:
                control.send_frame(header, meta, body, deadline=deadline)
            else:
                if bodies.joined:
                    control.hold_frame(header, meta)
                else:
                    control.send_frame(header, meta, deadline=deadline)
                bodies.send(body, nbytes, number=header.number, deadline=deadline)
        except EarlyReply as early:
            return early.header, early.meta
        except ConnectionLost:
            words = control.last_words(limits=self._limits) if nbytes else None
            if words is None or words[0].kind != Kind.REPLY or words[0].number != header.number or words[0].body_nbytes:
                raise
            return words
        return None

    def _reply(self, number: int, deadline: float) -> tuple[Header, bytes]:
        while True:
            header, meta = self._control.receive_frame(limits=self._limits, deadline=deadline)
            if header.kind == Kind.REPLY and header.number == number:
                return header, meta
            if header.kind not in (Kind.GRANT, Kind.RELEASE):
                raise self._wrong(f"{header.kind.name} {header.number} instead of REPLY {number}")
            self._bodies.heard(header, meta, deadline=deadline)

    def _receive(self, header: Header, views: Sequence[memoryview], deadline: float) -> None:
        views, nbytes = flat(views)
        if nbytes != header.body_nbytes:
            raise self._wrong(f"a body of {header.body_nbytes} bytes where {nbytes} were planned")
        self._bodies.receive(views, nbytes, number=header.number, deadline=deadline)
        if header.flags & BODY_SUM:
            if checksum(views) != header.body_sum:
                raise self._wrong("a body whose checksum is wrong")
        elif self._sums:
            raise self._wrong("a body without the checksum that was agreed upon")

    def _wrong(self, what: str) -> TransportError:
        return self._control.fail(ProtocolError(f"{self.peer.address}: {what}"))


class _Calling:
    """Surrounds one call: one at a time, and whatever it raises aborts the channel."""

    __slots__ = ("_channel",)

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        channel = self._channel
        if channel._pid != process_id():
            raise TransportClosed(
                f"{channel.peer.address}: the channel belongs to the process before os.fork(); open another"
            )
        if not channel._calling.acquire(blocking=False):
            raise RuntimeError("a channel is for one call at a time")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        channel = self._channel
        try:
            if error is not None:
                channel.abort()
            if channel._closing:
                channel._close()
        finally:
            channel._calling.release()
        if channel._closing:  # between the look above and the release
            channel.close()


class Once:
    """Calls `function`, if any, at the first call; nothing at further ones. For any thread."""

    __slots__ = ("_todo",)

    def __init__(self, function: Callable[[], None] | None) -> None:
        self._todo = [function]

    def __call__(self) -> None:
        try:
            function = self._todo.pop()  # atomic
        except IndexError:
            return
        if function is not None:
            function()


def flat(views: Sequence[memoryview]) -> tuple[Sequence[memoryview], int]:
    """(`views` as flat views of bytes, their length together)."""
    nbytes = 0
    for view in views:
        if view.ndim != 1 or view.itemsize != 1:
            views = [each.cast("B") for each in views]
            return views, sum(map(len, views))
        nbytes += len(view)
    return views, nbytes


def checksum(views: Sequence[memoryview]) -> int:
    """XXH3-64 of `views` behind one another."""
    state = xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()
