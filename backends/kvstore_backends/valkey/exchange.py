"""Pipelines to several servers at once, in the calling thread: one poll(2) loop for all of them.

A server that is slow, silent or gone holds up nobody else's part of the call: its run fails at the deadline, after
`silence` seconds without a byte, or when it does not let us connect in time; the others go on.

What is asked for ahead on one connection is bounded (`window`): the server keeps replies that we have not read in
memory of its own. What we send needs no bound but the kernel's: a server reads on only as it executes.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence

from .errors import HALTING, LinkError, ReplyError
from .link import Link
from .options import Node
from .resp import PENDING, Ask, Part

__all__ = ["Run", "exchange"]

_LONGEST_S = 3600.0
_QUEUE = 1 << 20  # bytes prepared for sending before more asks are begun
_PEEK_S = 0.05  # how often bytes below a link's low water are looked at
_TURN = 8 << 20  # bytes received from one server before the others have their turn


class Run:
    """One pipeline: asks for one server, in order, and the connection they go over.

    Args:
        asks: their replies come in the same order.
        greeting: asks that introduce us on a new connection. Nothing else is sent before the server has answered them,
            for it takes no more than a few bytes from strangers.

    Attributes:
        error: why the run ended early; asks that are still pending then have no reply.
        idle: the connection was an idle one that had been used before.
        heard: bytes have come.
        mine: for the owner's use.
    """

    def __init__(self, node: Node, link: Link, asks: Sequence[Ask], *, greeting: Sequence[Ask], window: int) -> None:
        self.node = node
        self.link = link
        self.error: LinkError | ReplyError | None = None
        self.idle = link.greeted
        self.heard = False
        self.mine: Ask | None = None
        self._greeting = [] if link.greeted else list(greeting)
        self._asks = [*self._greeting, *asks]
        self._window = window
        self._out: deque[Part] = deque()
        self._queued = 0  # bytes in `_out`
        self._begun = 0  # asks that are in `_out` or sent
        self._done = 0  # asks that have their reply
        self._expected = 0  # bytes of replies to come
        self._halt: ReplyError | None = None
        self.moved_at = 0.0  # when bytes last moved

    @property
    def over(self) -> bool:
        return self.error is not None or self._done == len(self._asks)

    @property
    def wants(self) -> int:
        """Events to poll for."""
        return select.POLLIN | select.POLLOUT if self._out or self._may_begin() else select.POLLIN

    def _may_begin(self) -> bool:
        at = self._begun
        if at == len(self._asks) or (at >= len(self._greeting) > self._done):
            return False
        return self._halt is None and (not self._expected or self._expected + self._asks[at].expect <= self._window)

    def step(self, now: float) -> bool:
        """Send and receive what can be without waiting. True: there is more that poll(2) may not show.

        Raises:
            LinkError: the connection is of no use any more.
            ReplyError: the server does not want us.
        """
        if self._send():
            self.moved_at = now
        received = 0
        while not self.over:
            count = self.link.receive()
            if not count:
                break
            received += count
            self._take_replies()
            if received >= _TURN or not self.link.encrypted:  # TLS brings one record (16 KiB) at a time
                break
        if received:
            self.heard = True
            self.moved_at = now
            if not self.over:
                self._send()  # the window has moved
        return not self.over and self.link.unread

    def _send(self) -> int:
        total = 0
        while True:
            small: list[bytes] = []
            while self._queued < _QUEUE and self._may_begin():
                ask = self._asks[self._begun]
                self._expected += ask.expect
                self._begun += 1
                if len(ask.parts) == 1 and isinstance(ask.parts[0], bytes):
                    small.append(ask.parts[0])  # commands without a body travel joined: each part costs as much as one
                    self._queued += len(ask.parts[0])
                    continue
                if small:
                    self._out.append(b"".join(small))
                    small = []
                self._out.extend(ask.parts)
                self._queued += sum(map(len, ask.parts))
            if small:
                self._out.append(b"".join(small))
            if not self._out:
                return total
            sent = self.link.send(self._out)
            self._queued -= sent
            total += sent
            if self._out or not sent:
                return total

    def _take_replies(self) -> None:
        asks, begun, link = self._asks, self._begun, self.link
        while self._done < begun:
            ask = asks[self._done]
            if not link.next_reply(ask):
                return
            if not isinstance(ask.reply, ask.accepts) and not isinstance(ask.reply, ReplyError):
                ask.reply = PENDING
                raise LinkError("protocol", f"{self.node} answers with something else than it was asked for")
            self._done += 1
            self._expected -= ask.expect
            if self._done <= len(self._greeting):
                self._greeted(ask)
            elif ask.follow is not None:
                if self._done == len(asks):
                    asks.extend(ask.follow(ask.reply))
            elif ask.halts and isinstance(ask.reply, ReplyError) and ask.reply.code in HALTING:
                self._stop(ask.reply)
        if link.has_more:
            raise LinkError("protocol", f"{self.node} sends replies that nobody asked for")

    def _greeted(self, ask: Ask) -> None:
        if isinstance(ask.reply, ReplyError):
            raise ask.reply
        if isinstance(ask.reply, list):
            pairs = zip(ask.reply[::2], ask.reply[1::2], strict=False)
            self.link.facts = {name.decode("latin-1"): value for name, value in pairs if isinstance(name, bytes)}
        if self._done == len(self._greeting):
            self.link.greeted = True

    def _stop(self, reply: ReplyError) -> None:
        """The rest would be told the same: what was not begun is not sent."""
        for ask in self._asks[self._begun :]:
            ask.reply = reply
        del self._asks[self._begun :]
        self._halt = reply

    def due(self, silence: float) -> float:
        """Monotonic time until which something must have happened."""
        link = self.link
        if not link.connected:
            return link.due
        heard = self.moved_at + silence
        return heard if link.greeted else min(heard, link.until)

    def too_late(self, silence: float) -> LinkError:
        """Why it failed when `due` passed on a connection."""
        if not self.link.greeted:
            return LinkError("connect", f"{self.node} accepted the connection, but does not answer")
        return LinkError("silence", f"{self.node} fell silent: no byte within {silence:.3g} s")

    def fail(self, error: LinkError | ReplyError) -> None:
        self.error = error


def exchange(
    runs: Sequence[Run], *, deadline: float, silence: float, enough: Callable[[Run], bool] | None = None
) -> None:
    """Do the runs side by side. Returns when each is over: its asks have replies, or it has an `error`.

    Args:
        deadline: absolute monotonic seconds.
        silence: longest time without a byte either way, seconds.
        enough: asked of each run that is over without an error; True: the others are given up.
    """
    loop = _Loop(deadline, silence)
    for run in runs:
        loop.begin(run)
    while loop.active:
        loop.turn()
        if enough is not None and any(run.over and run.error is None and enough(run) for run in runs):
            loop.give_up(LinkError("topology", "somebody else answered first"))
            return


class _Loop:
    """The runs that are not over, by descriptor."""

    def __init__(self, deadline: float, silence: float) -> None:
        self._deadline = deadline
        self._silence = silence
        self._poll = select.poll()
        self._masks: dict[int, int] = {}
        self._again: list[Run] = []
        self.active: dict[int, Run] = {}

    def begin(self, run: Run) -> None:
        run.moved_at = time.monotonic()
        self._step(run)

    def turn(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            self.give_up(LinkError("deadline", "the deadline passed"))
            return
        wait = min(self._deadline - now, _LONGEST_S)
        for run in list(self.active.values()):
            due = run.due(self._silence)
            if now < due:
                wait = min(wait, due - now, _PEEK_S if run.link.sleepy else _LONGEST_S)
                continue
            wait = 0.0
            self._step(run)  # to the next address; or for bytes that were below the low water
            if not run.over and run.link.connected and now >= run.due(self._silence):
                self._end(run, run.too_late(self._silence))
        again, self._again = self._again, []
        if again:
            wait = 0.0
        ready = {fd for fd, _ in self._poll.poll(wait * 1000)} if self.active else set()
        if not ready:
            ready = {fd for fd, run in self.active.items() if run.link.sleepy}
        for fd in ready:
            run = self.active[fd]
            if run not in again:
                self._step(run)
        for run in again:
            if not run.over:
                self._step(run)

    def _step(self, run: Run) -> None:
        before = run.link.fileno()
        try:
            wants = 0 if run.link.connected else run.link.advance()
            if not wants:
                if run.step(time.monotonic()):
                    self._again.append(run)
                wants = run.wants
        except (LinkError, ReplyError) as error:
            self._forget(before)
            run.fail(error)
            return
        if run.over:
            self._forget(before)
            return
        fd = run.link.fileno()
        if fd != before:
            self._forget(before)
        if fd not in self.active:
            self.active[fd] = run
            self._poll.register(fd, wants)
            self._masks[fd] = wants
        elif self._masks[fd] != wants:
            self._poll.modify(fd, wants)
            self._masks[fd] = wants

    def _end(self, run: Run, error: LinkError) -> None:
        self._forget(run.link.fileno())
        run.fail(error)

    def _forget(self, fd: int) -> None:
        if self.active.pop(fd, None) is not None:
            del self._masks[fd]
            try:
                self._poll.unregister(fd)
            except (KeyError, OSError):  # closed, and so gone from the table
                pass

    def give_up(self, error: LinkError) -> None:
        for run in list(self.active.values()):
            self._end(run, error)
