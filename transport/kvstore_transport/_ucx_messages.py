"""`Messages`: the UCX messages of one connection, and the memory that they use; `Sending` and `Receiving`: the pieces
of one body. What is said on the control connection meanwhile is told in `ucx`."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

from ._ucx_device import DeviceView, is_device, wait_for_stream
from ._ucx_drive import Driver
from ._ucx_engine import UcxEngine
from ._ucx_library import HINT, Lane, Pending, translate
from ._ucx_pieces import Piece, Run, View, Walk, runs_of
from .control import Control, EarlyReply
from .errors import ConnectionLost, DeadlinePassed, TransportClosed, TransportUnavailable
from .frames import Header, Kind
from .seam import Limits

__all__ = ["Flying", "Messages", "Receiving", "Sending"]

_SENDS, _RECEIVES = 4, 1024  # under way; all receives in place are posted at once
_SLOTS = 2  # of staging memory, for one body: one is filled while the other travels
_SLOT_WAIT_S = 0.05  # between two looks whether the connection still stands
_MARK_BYTES = 8
_NUMBERS = 1 << 32


class Flying(NamedTuple):
    """A message under way. `slot`: its place in staging memory, empty if it is in place."""

    pending: Pending
    piece: Piece
    buffer: View
    slot: memoryview | None


class Messages:
    """Of one connection, used by one thread at a time.

    Args:
        lane: connected; this object's own.
        connection: 16 bits that are in all tags.
        limits: what this side accepts.
    """

    def __init__(self, control: Control, engine: UcxEngine, lane: Lane, *, connection: int, limits: Limits) -> None:
        self.driver = Driver(lane, control, errors=engine.library.errors, limits=limits)
        self._control = control
        self._engine = engine
        self._lane: Lane | None = lane
        self._connection = connection
        self._stage_all = not lane.trusted
        self._stall_s = limits.stall_s
        self._mark = os.urandom(_MARK_BYTES)
        self._slots: list[memoryview] = []
        self._pool = engine.sending  # that they are of

    def end(self) -> None:
        """Abort the endpoint: nothing is read or written any more. May be called twice."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self.give_slots_back(safe=self._engine.release(lane))

    # What is said.

    def expect(self, kind: Kind, number: int, letter: bytes, deadline: float) -> bytes:
        """The meta of the next frame, which begins with `letter`, while UCX is moved along."""
        try:
            _, meta = self.driver.frame(kind, number, deadline=deadline)
        except EarlyReply as error:
            raise self.driver.wrong(error) from None
        if meta[:1] != letter:
            raise self.driver.wrong(f"{kind.name} {number} with {meta[:16]!r} instead of {letter!r}")
        return meta

    def grant(self, number: int, meta: bytes, deadline: float) -> None:
        """Send GRANT."""
        self._control.send_frame(Header(Kind.GRANT, number=number), meta, deadline=deadline)

    # What is moved.

    def runs(self, views: Sequence[memoryview]) -> list[Run]:
        if self._stage_all and any(is_device(view) for view in views):
            raise TransportUnavailable(f"device memory needs ucxx instead of {self._engine.library.name}: {HINT}")
        return runs_of(views, stage_all=self._stage_all)

    def walk(self, runs: Sequence[Run], table: Sequence[int]) -> list[Piece]:
        """Raises `ProtocolError` unless `table` fits `runs`."""
        walk = Walk(runs, stage_all=self._stage_all)
        return [walk.take(nbytes) for nbytes in table]

    def tag(self, number: int, index: int) -> int:
        """connection << 48 | number << 16 | index of the piece."""
        return self._connection << 48 | number % _NUMBERS << 16 | index

    def take_slots(self, count: int, deadline: float, *, sending: bool) -> list[memoryview]:
        """Staging memory for one body, which goes back when the body has arrived, or after everything was cut."""
        pool = self._engine.sending if sending else self._engine.receiving
        stalled = time.monotonic() + self._stall_s
        while count and not self._slots:
            now = time.monotonic()
            if not self._control.usable:
                raise TransportClosed(f"{self._control.peer}: the channel was closed")
            if now >= min(deadline, stalled):
                error = DeadlinePassed if now >= deadline else ConnectionLost
                raise self._control.fail(error(f"{self._control.peer}: no staging memory came free in time"))
            self._slots = pool.acquire(count, wait=min(_SLOT_WAIT_S, deadline - now))
        self._pool = pool
        return list(self._slots)

    def give_slots_back(self, *, safe: bool) -> None:
        slots, self._slots = self._slots, []
        if slots:
            (self._pool.release if safe else self._pool.forget)(slots)

    def post(self, piece: Piece, index: int, number: int, slot: memoryview | None, *, sending: bool) -> Flying:
        """Hand one message to UCX."""
        lane = self._lane
        if lane is None:
            raise TransportClosed(f"{self._control.peer}: the channel was closed")
        buffer = piece.parts[0] if slot is None else slot[: piece.nbytes]
        if isinstance(buffer, DeviceView):
            wait_for_stream(buffer)
        elif sending:
            if slot is not None:
                gather(cast("Sequence[memoryview]", piece.parts), buffer)
        else:
            buffer[-_MARK_BYTES:] = self._mark[: piece.nbytes]
        try:
            pending = (lane.send if sending else lane.receive)(buffer, self.tag(number, index))
        except self._engine.library.errors as error:
            raise self._control.fail(translate(error, self._control.peer)) from error
        return Flying(pending, piece, buffer, slot)

    def complete(self, flying: Flying, deadline: float, *, sending: bool) -> None:
        """Wait for one message, and take it out of its slot."""
        self.driver.complete(flying.pending, deadline=deadline)
        if sending or isinstance(flying.buffer, DeviceView):
            return
        if flying.piece.nbytes >= _MARK_BYTES and flying.buffer[-_MARK_BYTES:] == self._mark:
            raise self.driver.wrong("a UCX message was shorter than agreed upon")
        if flying.slot is not None:
            scatter(flying.buffer, cast("Sequence[memoryview]", flying.piece.parts))


class _Moving:
    """The pieces of one body, some of them under way."""

    sending: bool
    most: int

    def __init__(self, messages: Messages, pieces: Sequence[Piece], number: int, deadline: float) -> None:
        self._messages = messages
        self._pieces = pieces
        self._number = number
        self._deadline = deadline
        self._flying: deque[Flying] = deque()
        self.posted = 0
        staged = sum(1 for piece in pieces if piece.staged)
        self._free = deque(messages.take_slots(min(staged, _SLOTS), deadline, sending=self.sending))

    def post(self, allowed: int) -> None:
        """Hand as many to UCX as may be under way; `allowed`: up to which piece."""
        while self.posted < allowed and len(self._flying) < self.most:
            piece = self._pieces[self.posted]
            slot = None
            if piece.staged:
                if not self._free:
                    return
                slot = self._free.popleft()
            flying = self._messages.post(piece, self.posted, self._number, slot, sending=self.sending)
            self._flying.append(flying)
            self.posted += 1

    def land(self) -> None:
        """Wait for the oldest message."""
        self._messages.complete(self._flying[0], self._deadline, sending=self.sending)
        slot = self._flying.popleft().slot
        if slot is not None:
            self._free.append(slot)


class Sending(_Moving):
    sending = True
    most = _SENDS
    _allowed = 0

    def granted(self, meta: bytes) -> None:
        """The receiver has posted more; see `ucx`."""
        allowed = int.from_bytes(meta[1:5], "little")
        if len(meta) < 5 or not self._allowed < allowed <= len(self._pieces):
            raise self._messages.driver.wrong(
                f"leave to send {allowed} pieces of {len(self._pieces)}, after {self._allowed}"
            )
        self._allowed = allowed

    def run(self) -> None:
        """Send all."""
        messages = self._messages
        while self.posted < len(self._pieces):
            self.post(self._allowed)
            if self._flying:
                self.land()
            else:
                self.granted(messages.expect(Kind.GRANT, self._number, b"M", self._deadline))
        while self._flying:
            self.land()
        messages.give_slots_back(safe=True)


class Receiving(_Moving):
    sending = False
    most = _RECEIVES

    def run(self, table: bytes) -> None:
        """Post as many as there is room for, give leave to send them, take them, and so on."""
        before = b"P"
        while self.posted < len(self._pieces) or self._flying:
            known = self.posted
            self.post(len(self._pieces))
            if self.posted > known:
                leave = before + self.posted.to_bytes(4, "little") + table
                self._messages.grant(self._number, leave, self._deadline)
                before, table = b"M", b""
            self.land()
        self._messages.give_slots_back(safe=True)


def gather(parts: Sequence[memoryview], into: memoryview) -> None:
    """Copy `parts` behind one another into `into`."""
    at = 0
    for part in parts:
        end = at + len(part)
        into[at:end] = part
        at = end


def scatter(source: memoryview, parts: Sequence[memoryview]) -> None:
    """Copy `source` into `parts`, one after another."""
    at = 0
    for part in parts:
        end = at + len(part)
        part[:] = source[at:end]
        at = end
