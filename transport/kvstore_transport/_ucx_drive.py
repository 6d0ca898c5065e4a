"""`Driver`: moves a lane along from the thread that waits, and sees the control connection end while it does.

It sleeps in poll(2) whenever UCX has nothing to do. Looking again and again instead, for 20 µs to 5 ms, was measured
(two processes, 2 cores, interleaved medians): 7.8 to 8.7 GB/s against 8.0 in pieces of 1 MiB over shared memory, 9.6 to
10.4 against 10.3 in pieces of 16 MiB, 1.1 to 1.9 against 1.96 over TCP, and up to three times the CPU.
"""

from __future__ import annotations

import math
import select
import time

from ._ucx_library import Lane, Pending, translate
from .control import Control
from .errors import ConnectionLost, DeadlinePassed, ProtocolError, TransportError
from .frames import Header, Kind
from .seam import Limits

__all__ = ["Driver"]

_MOST_SLEEP_S = 0.05  # insurance against a wake-up that UCX loses; nothing waits here while a connection is idle


class Driver:
    """Of one connection, used by one thread at a time.

    Args:
        errors: what the library raises.
        limits: `stall_s`: the longest time without a message's end.
    """

    def __init__(self, lane: Lane, control: Control, *, errors: tuple[type[Exception], ...], limits: Limits) -> None:
        self._lane = lane
        self._control = control
        self._errors = errors
        self._limits = limits
        self._control_fd = control.fileno()
        self._messages, self._frames = select.poll(), select.poll()
        for poll in (self._messages, self._frames):
            poll.register(lane.fd, select.POLLIN)
        self._messages.register(self._control_fd, select.POLLRDHUP)
        self._frames.register(self._control_fd, select.POLLIN | select.POLLRDHUP)

    def complete(self, pending: Pending, *, deadline: float) -> None:
        """Return when the message has ended well.

        Raises:
            ConnectionLost, DeadlinePassed, ProtocolError, TransportClosed: the control connection is aborted, the lane
                is not yet.
        """
        lane, control = self._lane, self._control
        try:
            lane.progress()
            if pending.done():
                return
            stalled, gone = time.monotonic() + self._limits.stall_s, False
            while True:
                lane.progress()
                if pending.done():
                    return
                now = time.monotonic()
                if gone or not control.usable:
                    raise control.fail(ConnectionLost(f"{control.peer}: it closed the connection within a body"))
                if now >= deadline:
                    raise control.fail(DeadlinePassed(f"{control.peer}: the deadline passed within a body"))
                if now >= stalled:
                    raise control.fail(
                        ConnectionLost(f"{control.peer}: no progress of a body for {self._limits.stall_s:g} s")
                    )
                if lane.arm():
                    gone = self._sleep(self._messages, min(deadline, stalled) - now)
        except self._errors as error:
            raise control.fail(translate(error, control.peer)) from error

    def frame(self, kind: Kind, number: int, *, deadline: float) -> tuple[Header, bytes]:
        """The next frame, as `Control.await_frame`, while the lane is moved along: the other side may need that."""
        patience = min(deadline, time.monotonic() + self._limits.stall_s)
        try:
            while True:
                self._lane.progress()
                now = time.monotonic()
                if now >= patience or not self._control.usable or self._control.ahead:
                    break  # the control connection says so, or has a frame already
                if self._lane.arm() and self._sleep(self._frames, patience - now):
                    break
        except self._errors as error:
            raise self._control.fail(translate(error, self._control.peer)) from error
        return self.quiet_frame(kind, number, deadline=deadline)

    def quiet_frame(self, kind: Kind, number: int, *, deadline: float) -> tuple[Header, bytes]:
        """The next frame, as `Control.await_frame`, within `deadline` and the longest time without progress."""
        patience = min(deadline, time.monotonic() + self._limits.stall_s)
        try:
            return self._control.await_frame(kind, number, limits=self._limits, deadline=patience)
        except DeadlinePassed:
            if patience < deadline:
                raise ConnectionLost(f"{self._control.peer}: nothing heard for {self._limits.stall_s:g} s") from None
            raise

    def wrong(self, what: str | Exception) -> TransportError:
        """A `ProtocolError` to raise; the control connection is aborted."""
        return self._control.fail(ProtocolError(f"{self._control.peer}: {what}"))

    def _sleep(self, poll: select.poll, wait: float) -> bool:
        """Whether the control connection has something: a frame, or its end."""
        events = poll.poll(math.ceil(max(0.0, min(wait, _MOST_SLEEP_S)) * 1000))
        return any(fd == self._control_fd for fd, _ in events)
