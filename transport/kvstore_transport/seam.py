"""The seam of all transports: a client's `Channel`, a server's handler, and `Bodies` between them.

The pattern is request and reply, one at a time per channel; several channels to one peer are the lanes of a backend.
Header and meta travel over a socket of our own (`frames`), so a round trip costs no event loop; the body travels by
whatever `Bodies` both sides agreed upon in the handshake. That is all in which transports differ.

Rules, each of which is a test of the conformance suite over all transports (tests/conformance/test_transports.py):

* A call returns, or raises a `TransportError`, by its deadline. Whatever it raises, the channel is aborted then: a
  stream that was read half is never used again, and **when the call has returned or raised, nothing writes into the
  caller's memory or reads from it any more** (with UCX that takes an abort of the endpoint).
* The reply's body lands where `plan` says, with no copy in between (`copies` of a transport says which it needs).
* What the server's handler gives away is given back exactly once: `Answer.done` is called when the body was sent, or
  the peer let it go, or the connection is dead.
* Nothing a peer sends is believed: lengths are bounded before anything is allocated, meta and header have a checksum.
* Nothing spins while idle. `close` may be called from another thread and ends a call under way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from .errors import ProtocolError
from .frames import Header

__all__ = [
    "Answer",
    "Bodies",
    "Channel",
    "Credentials",
    "Handler",
    "Incoming",
    "Leased",
    "Limits",
    "Peer",
    "Plan",
    "Reply",
]

Plan = Callable[[int, bytes, int], Sequence[memoryview]]
"""`plan(status, meta, body_nbytes)` → writable flat views that take the body in order; their lengths sum to
`body_nbytes`, anything else is a `ProtocolError`. Called in the thread of `Channel.call`. It does not block; what it
raises aborts the channel and is raised by `call`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a side accepts, in bytes and seconds. Both sides tell each other the first two in the handshake; the smaller
    of what the sender may and the receiver takes holds.

    Attributes:
        max_meta: longest meta of a frame.
        max_body: longest body of a frame.
        connections: most connections at a time (server); one more is told to come again.
        handshake_s: longest handshake.
        stall_s: longest time without any progress of a body, or without its RELEASE, before the connection is aborted.
        uids: users that may share memory with this process (shm), besides root and its own. Whoever is given a slab
            can read all of it.
    """

    max_meta: int = 16 << 20
    max_body: int = 256 << 20
    connections: int = 4096
    handshake_s: float = 5.0
    stall_s: float = 30.0
    uids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """What a client proves in the handshake. The token itself never travels: both sides prove that they know it, by
    HMAC-SHA256 over both nonces (RFC 2104).

    Attributes:
        namespace: which namespace it wants; "" is the default one.
        token: its secret; b"" if the namespace is open.
    """

    namespace: str = ""
    token: bytes = b""

    def __repr__(self) -> str:
        return f"Credentials({self.namespace!r}, {'…' if self.token else 'no token'})"


class Peer(NamedTuple):
    """The other side of a channel, as the handshake told.

    Attributes:
        address: for messages: host:port, or the path of a Unix socket.
        transport: how bodies travel: "tcp", "ucx", "shm", "inproc".
        version: the peer's kvstore version.
        namespace: the namespace of this channel.
        client: (server side) 16 random bytes that all channels of one client object share.
        max_meta, max_body: what may be sent to it, in bytes.
        facts: further facts from HELLO or WELCOME, of plain types: UCX version, host id, what the server can do.
        note: why the transport is not the one that was asked for; "" if it is.
    """

    address: str
    transport: str
    version: str
    namespace: str
    client: bytes
    max_meta: int
    max_body: int
    facts: dict[str, object]
    note: str = ""


class Reply(NamedTuple):
    """What a call brought. The body lies where `plan` wanted it."""

    status: int
    meta: bytes
    body_nbytes: int


class Leased(NamedTuple):
    """A reply whose body was left in the peer's memory.

    Attributes:
        body: read-only flat view of the whole body; not valid after `release`.
        release: lets the peer have its memory back; may be called from any thread, once.
        alive: False once the peer may have reused the memory (its process died, or cut the connection): what was read
            since cannot be believed. Look after reading.
    """

    status: int
    meta: bytes
    body: memoryview
    release: Callable[[], None]
    alive: Callable[[], bool]


class Channel(ABC):
    """A client's connection to one peer. Not for two threads at a time, except `abort`, `close` and `Leased.release`.

    Attributes:
        peer: who is at the other side.
        usable: False after `abort`, `close`, any error raised by `call`, and in a forked child.
    """

    peer: Peer

    @property
    @abstractmethod
    def usable(self) -> bool: ...

    @abstractmethod
    def call(
        self, op: int, meta: bytes, body: Sequence[memoryview] = (), *, plan: Plan | None = None, deadline: float
    ) -> Reply:
        """Send a request, receive its reply.

        Args:
            op: 0..255; what it means is the server's handler's matter.
            body: flat byte views, gathered and never joined. Not read any more once the call is over.
            plan: where the body of the reply goes; None: a reply with a body is a `ProtocolError`.
            deadline: absolute `time.monotonic()` seconds, math.inf for none; covers everything. The peer is told
                how much is left.

        Raises:
            DeadlinePassed, ConnectionLost, ProtocolError, TransportClosed: the channel is aborted.
            ValueError: `meta` or `body` is longer than the peer takes; nothing was sent, the channel is fine.
        """

    def call_leased(self, op: int, meta: bytes, *, deadline: float) -> Leased | None:
        """As `call`, but the body stays where it is, if the transport has shared memory; else None, and nothing was
        sent. The channel can be used for further calls while the lease lasts."""
        return None

    def register(self, memory: memoryview, fd: int | None) -> None:
        """Make long-lived memory known: `memory` covers the whole mapping of the memfd `fd` (None: private memory).
        Bodies that lie in it travel without an extra copy where the transport can."""
        return

    @abstractmethod
    def alive(self) -> bool:
        """Whether an idle channel still seems connected; does not block, sends nothing."""

    @abstractmethod
    def abort(self) -> None:
        """End it now, from any thread. A call under way raises `TransportClosed` soon."""

    @abstractmethod
    def close(self) -> None:
        """End it in order. May be called twice; from another thread it is `abort`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Incoming(ABC):
    """A request, as a server's handler sees it.

    Attributes:
        peer: who asks.
        op, meta: of the request.
        body_nbytes: length of the body that can be received.
        deadline: the asker's, in our own `time.monotonic()` seconds.
        session: a dict of the connection, for the handler's own state; `on_close` in it (a callable) is called when
            the connection ended.
        leasing: the body of the reply shall be left in shared memory, until the asker lets go of it.
    """

    leasing = False
    peer: Peer
    op: int
    meta: bytes
    body_nbytes: int
    deadline: float
    session: dict[str, object]

    @abstractmethod
    def receive(self, views: Sequence[memoryview]) -> None:
        """Receive the body, whose `body_nbytes` the views have together, at once. At most once.

        Raises:
            TransportError: the connection is of no use any more, nothing will be written into the views any more. The
                handler frees what it holds and lets the error pass.
        """

    @abstractmethod
    def discard(self) -> None:
        """Have the body thrown away. What a handler neither received nor discarded is discarded when it returns; more
        than 1 MiB of it ends the connection after the reply instead."""


class Answer(NamedTuple):
    """What a handler returns.

    Attributes:
        status: 0..255, the handler's own meaning.
        body: read-only flat views, gathered and never joined.
        done: called exactly once, when nothing reads from `body` any more.
    """

    status: int
    meta: bytes = b""
    body: Sequence[memoryview] = ()
    done: Callable[[], None] | None = None


Handler = Callable[[Incoming], Answer]
"""Called in the connection's thread, one request at a time per connection. An exception that is not a `TransportError`
is logged, and ends the connection."""


class Bodies(ABC):
    """How bodies travel between the two sides of one channel: both sides have one, and it is symmetric. Used by one
    thread at a time, in the order in which the frames that announce the bodies are sent and received.

    Attributes:
        name: "tcp", "ucx", "shm", "inproc".
        copies: copies in user space between the sender's and the receiver's memory (registered memory).
        inline: whether the body follows the meta on the control connection: it is gathered with the frame then, in one
            system call, and `send` is not called.
        joined: whether the first thing that `send` does is to send something on the control connection: the frame goes
            out with it then, in one system call.
    """

    name: str
    copies: int
    inline: bool = False
    joined: bool = False

    @abstractmethod
    def send(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """Send the body of frame `number`. When it returns or raises, the views are not read any more."""

    @abstractmethod
    def receive(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """Receive the body of frame `number`. When it returns or raises, the views are not written any more."""

    @abstractmethod
    def skip(self, nbytes: int, *, number: int, deadline: float) -> None:
        """Have the body of frame `number` thrown away."""

    def heard(self, header: Header, meta: bytes, *, deadline: float = math.inf) -> None:
        """Take a GRANT or RELEASE that came while this side waited for a REQUEST or a REPLY.

        Args:
            deadline: for what was sent right behind it, in `time.monotonic()` seconds.

        Raises:
            ProtocolError: it makes no sense.
            DeadlinePassed, ConnectionLost: what belongs to it did not come.
        """
        raise ProtocolError(f"{header.kind.name} {header.number} out of turn")

    def register(self, memory: memoryview, fd: int | None) -> None:
        """See `Channel.register`."""
        return

    @abstractmethod
    def abort(self) -> None:
        """From any thread: nothing reads or writes anybody's memory any more when it returns."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. By the side's own thread, when nothing is under way; in order, or after `abort`."""
