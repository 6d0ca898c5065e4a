"""The table of transports: how bodies may travel (`seam.Bodies`), and who can build that: a `Way` for each.

    name     module          needs
    tcp      stream          nothing: the body follows the meta on the control connection (TCP, TLS or Unix socket)
    shm      shm             both processes on one host
    ucx      ucx             ucxx (or ucx-py) at both sides, with equal UCX versions

A way is imported when it is asked for. Its life in a handshake:

1. Both sides call `facts(server=…)`: a msgpack-able dict of plain types that goes into HELLO and WELCOME, under the
   way's name. `TransportUnavailable` says why not here, and what to install.
2. The server walks through the client's wishes, in order, and takes the first for which `agree(mine, theirs)` is "".
3. Server and client then call `open(control, server=…, …)`, the server after it sent WELCOME, the client after it
   received it. They may talk over `control` there, with GRANT frames: nobody else uses it yet.

From then on, a side that sends a frame with a body calls `bodies.send(…)` behind it, and the other `bodies.receive(…)`
or `skip`, in the order of the frames; `number` is that of the request for both its bodies, so (number, direction) names
a body. While they do, they may use `control`, which nobody else reads from then: at a client that waits for leave to
send, `control.await_frame(Kind.GRANT, number, …)`, which raises `EarlyReply` if the server does not want the body; let
that pass. A GRANT or RELEASE that arrives while a side waits for a REQUEST or a REPLY is handed to
`bodies.heard(header, meta)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from .control import Control
from .errors import TransportUnavailable
from .seam import Bodies, Limits

__all__ = ["AUTO", "LOCAL", "TRANSPORTS", "LeasingBodies", "Way", "auto", "way"]

Facts = dict[str, object]

TRANSPORTS = {"tcp": "stream:StreamWay", "shm": "shm:SharedWay", "ucx": "ucx:UcxWay"}
"""Name → "module:class" within this package."""

AUTO = ("shm", "ucx", "tcp")
"""What "auto" stands for at a server: all that it may offer, in order of preference."""

_RDMA_DEVICES = Path("/sys/class/infiniband")  # InfiniBand, RoCE and EFA

LOCAL = frozenset({"shm"})
"""Those that need a Unix-domain socket as control connection."""


class Way(ABC):
    """One way for bodies to travel; an object without state, or with the process's own (a UCX context).

    Attributes:
        name: as in `TRANSPORTS`.
        private: whether bodies are as private as the control connection; those that are not are never used with TLS.
    """

    name: str
    private: bool = False

    @abstractmethod
    def facts(self, *, server: bool) -> Facts:
        """What the other side must know: plain types, at most a few KiB.

        Raises:
            TransportUnavailable: not usable in this process; says why, and what to install or set.
        """

    @abstractmethod
    def agree(self, mine: Facts, theirs: Facts) -> str:
        """ "" if these two can talk this way, else why not: "UCX 1.21.0 here, 1.20.1 there". Called at the server, with
        facts that a client sent: of any shape, to be checked."""

    @abstractmethod
    def open(
        self, control: Control, *, server: bool, mine: Facts, theirs: Facts, limits: Limits, deadline: float
    ) -> Bodies:
        """Build this side of it.

        Args:
            limits: what this side accepts; `max_body` bounds every body in either direction.

        Raises:
            TransportError: it did not work. Whatever was built is freed; the caller closes `control`.
        """


class LeasingBodies(Bodies):
    """Bodies that can leave a reply's body where it is, in memory that both sides see (see `Channel.call_leased`)."""

    # At the server.

    @abstractmethod
    def lend(self, views: Sequence[memoryview], nbytes: int, *, number: int, done: Callable[[], None]) -> bytes | None:
        """Before the REPLY with `Flags.LEASE` is sent: keep `views` as they are until the peer's RELEASE of `number`
        (handed in by `heard`), or `abort` or `close`; then call `done`, exactly once. Does not block.

        Returns:
            Where the body lies, for the peer's `take` (it travels as the meta of a GRANT behind the REPLY); None, and
            `done` is not called, if the views do not lie in memory that the peer sees: the body is then sent as any
            other.
        """

    @abstractmethod
    def patience(self) -> float:
        """When the oldest lease must have come back, in `time.monotonic()` seconds; math.inf if there is none. The
        server ends the connection then."""

    # At the client.

    @abstractmethod
    def take(self, place: bytes, nbytes: int, *, number: int, deadline: float) -> memoryview:
        """The body of the reply `number`, as a read-only flat view of the peer's memory. `place` is from `lend`, and
        not to be believed.

        Raises:
            ProtocolError: `place` makes no sense.
        """

    @abstractmethod
    def release(self, number: int) -> None:
        """Let the peer have the memory of `number` back (a RELEASE frame). Any thread; nothing if the channel ended."""


def auto() -> tuple[str, ...]:
    """What "auto" stands for at a client: as `AUTO`, but without UCX where there is no RDMA device. There it gains
    nothing (over TCP, sockets of our own are faster; on one host, `shm` is), and its start costs each process 0.6 s."""
    try:
        rdma = any(_RDMA_DEVICES.iterdir())
    except OSError:
        rdma = False
    return AUTO if rdma else tuple(name for name in AUTO if name != "ucx")


def way(name: str) -> Way:
    """The `Way` of that name.

    Raises:
        TransportUnavailable: unknown, or a library that it needs is missing.
    """
    if name not in TRANSPORTS:
        raise TransportUnavailable(f"unknown transport {name!r}; there are {', '.join(TRANSPORTS)}")
    module, _, cls = TRANSPORTS[name].partition(":")
    try:
        found: Way = getattr(import_module(f"{__package__}.{module}"), cls)()
    except ImportError as error:
        raise TransportUnavailable(f"transport {name!r} cannot be used here: {error}") from error
    return found
