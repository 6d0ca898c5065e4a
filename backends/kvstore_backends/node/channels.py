"""The connections to one node: opened when needed, up to a number, and used again, the warmest first."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.buffers import Slab
from kvstore.errors import ClosedError
from kvstore.scheduler import seconds_left
from kvstore.wrappers.base import LocalWait
from kvstore_transport.errors import PeerRefused, TransportError
from kvstore_transport.seam import Channel

__all__ = ["Channels", "Dial", "Line"]

Dial = Callable[[float], Channel]
"""Opens a connection by the given deadline (absolute `time.monotonic()` seconds)."""

_IDLE_S = 60.0  # a connection that nobody needed for so long is closed
_WARM_S = 0.05  # one that was used so lately is not looked at: if it has died since, the call says so
_REFUSED_S = 2.0  # a node that would not have us is not asked again for so long
_SCARCE_S = 1.0  # while this process has no descriptor free, the connections that are there do


class Line:
    """A connection, and what is known of it. Used by the thread that took it.

    Attributes:
        fresh: opened just now: it cannot have died while it lay idle.
        leases: leases on the peer's memory that go with it.
    """

    __slots__ = ("channel", "fresh", "idle_since", "leases", "slabs")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fresh = True
        self.idle_since = 0.0
        self.leases = 0
        self.slabs = 0  # how many of the slabs it knows


class Channels:
    """See the module's docstring.

    Args:
        dial: opens a connection.
        most: connections at most; further callers wait for their turn, the first come first.
        name: of the node, for errors.
    """

    def __init__(self, dial: Dial, most: int, name: str) -> None:
        self._dial = dial
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle: list[Line] = []
        self._lines: set[Line] = set()  # open: idle or busy
        self._opening = 0
        self._waiting: deque[object] = deque()
        self._extra: set[Line] = set()  # beyond `most`, see `extra`
        self._closed = False
        self._slabs: list[Slab] = []
        self._refused: tuple[float, PeerRefused] | None = None
        self._scarce = 0.0  # until when no further connection is tried, as long as there is one

    def take(self, deadline: float, operation: str, *, fresh: bool = False) -> Line:
        """A connection for the calling thread alone; hand it to `give` or `drop`.

        Args:
            fresh: do not use one that lay idle: they are all closed, since one of them proved dead.

        Raises:
            LocalWait: none became free before the deadline.
            ClosedError: closed.
            TransportError, OSError: none can be opened.
        """
        warm = None if fresh else self._warm()
        if warm is not None:
            self._introduce(warm)
            return warm
        line: Line | None = None
        while line is None:
            dead: list[Line] = []
            try:
                line = self._turn(deadline, operation, fresh, dead)
            finally:
                for each in dead:
                    each.channel.close()
            if line is None:
                try:
                    line = self._open(deadline, operation)
                except OSError as error:  # no fault of the node, which must not be taken for one that is down
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._lines:
                        raise
                    self._scarce = time.monotonic() + _SCARCE_S
        self._introduce(line)
        return line

    def _warm(self) -> Line | None:
        """The connection that was used last, if nobody waits for one and it was just now; None: see `_turn`."""
        now = time.monotonic()
        with self._lock:
            idle = self._idle
            if not idle or self._waiting or now - idle[-1].idle_since > _WARM_S or not idle[-1].channel.usable:
                return None
            line = idle.pop()
        line.fresh = False
        return line

    def _turn(self, deadline: float, operation: str, fresh: bool, dead: list[Line]) -> Line | None:
        """An idle connection, or None: the caller may open one (and is counted for it)."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    self._check(operation)
                    if self._waiting[0] is turn:
                        if fresh:
                            self._forget([line for line in self._idle if not line.leases], dead)
                        while self._idle and not fresh:
                            line = self._idle.pop()
                            if line.channel.usable and line.channel.alive():
                                line.fresh = False
                                return line
                            self._forget([line], dead)
                        scarce = bool(self._lines) and time.monotonic() < self._scarce
                        if len(self._lines) + self._opening < self._most and not scarce:
                            self._opening += 1
                            return None
                        if fresh and self._idle:  # all others are busy, and these have leases: one of these then
                            line = self._idle.pop()
                            line.fresh = False
                            return line
                    left = seconds_left(deadline)
                    if left <= 0 or not self._changed.wait(left):
                        raise LocalWait("no connection became free in time", backend=self._name, operation=operation)
            finally:
                self._waiting.remove(turn)
                if self._waiting:
                    self._changed.notify_all()

    def _forget(self, lines: list[Line], dead: list[Line]) -> None:
        """Called with the lock held; what is added to `dead` is closed without it."""
        for line in lines:
            if line in self._idle:
                self._idle.remove(line)
            self._lines.discard(line)
            dead.append(line)

    def _open(self, deadline: float, operation: str) -> Line:
        line: Line | None = None
        try:
            line = Line(self._connect(deadline))
        finally:
            with self._changed:
                self._opening -= 1
                if line is not None and not self._closed:
                    self._lines.add(line)
                self._changed.notify_all()
        self._close_if_late(line, operation)
        return line

    def extra(self, deadline: float, operation: str) -> Line:
        """A connection of the caller's own, beyond the number: for what may take long, such as a listing. Ends with
        `drop`.

        Raises: as `take`.
        """
        with self._changed:
            self._check(operation)
        line = Line(self._connect(deadline))
        with self._changed:
            if not self._closed:
                self._extra.add(line)
        self._close_if_late(line, operation)
        return line

    def _close_if_late(self, line: Line, operation: str) -> None:
        """`close` may have come while the connection was opened."""
        with self._changed:
            known = line in self._lines or line in self._extra
        if not known:
            line.channel.close()
            with self._changed:
                self._check(operation)

    def _connect(self, deadline: float) -> Channel:
        refused = self._refused
        if refused is not None and time.monotonic() < refused[0]:
            raise refused[1]
        try:
            channel = self._dial(deadline)
        except PeerRefused as error:
            self._refused = (time.monotonic() + _REFUSED_S, error)
            raise
        self._refused = None
        return channel

    def _introduce(self, line: Line) -> None:
        """Make known to the connection the memory that it does not know yet."""
        while line.slabs < len(self._slabs):
            slab = self._slabs[line.slabs]
            line.slabs += 1
            try:
                view = slab.view[:]
            except ValueError:  # the pool was closed meanwhile
                continue
            try:
                line.channel.register(view, slab.fd)
            except (TransportError, OSError):  # it is slower without; and if it is dead, the call will say so
                continue

    def give(self, line: Line) -> None:
        """The call is over, and the connection fine."""
        dead: list[Line] = []
        now = time.monotonic()
        with self._lock:
            if line not in self._lines:  # closed meanwhile
                dead.append(line)
            elif not line.channel.usable:
                self._forget([line], dead)
            else:
                line.idle_since = now
                self._idle.append(line)
                oldest = self._idle[0]
                if now - oldest.idle_since > _IDLE_S and not oldest.leases:
                    self._forget([oldest], dead)
            if self._waiting:
                self._changed.notify_all()
        for each in dead:
            each.channel.close()

    def drop(self, line: Line) -> None:
        """The call is over, and the connection of no more use."""
        with self._changed:
            self._lines.discard(line)
            self._extra.discard(line)
            self._changed.notify_all()
        line.channel.close()

    def register(self, slab: Slab) -> None:
        """Have `slab` made known to every connection, those that are there and those that come."""
        with self._changed:
            if not any(known is slab for known in self._slabs):
                self._slabs.append(slab)

    def hold(self, line: Line, leases: int) -> None:
        """`leases` more (or, negative, fewer) go with the connection; while there are any it is not closed for lying
        idle."""
        with self._changed:
            line.leases += leases

    @property
    def open(self) -> int:
        """How many connections there are."""
        with self._changed:
            return len(self._lines) + len(self._extra)

    def _check(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("the client of this node is closed", backend=self._name, operation=operation)

    def close(self) -> None:
        """Idle connections in order; the others are aborted, and their calls end soon."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = [*(self._lines - set(idle)), *self._extra]
            self._lines.clear()
            self._extra.clear()
            self._changed.notify_all()
        for line in idle:
            line.channel.close()
        for line in busy:
            line.channel.abort()
