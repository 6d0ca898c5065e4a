"""Bodies between two processes of one host: only the places travel, over a Unix-domain socket; the bytes stay.

Each side registers its long-lived memory, sealed memfds (`kvstore.buffers.Slab`). When a body lies in it, the receiver
is given the descriptor, once per connection and slab, and then for every body a list of places (`_shm_places`). It
copies them once, straight into their destination, and sends RELEASE. Bytes that lie elsewhere, and small pieces, follow
on the socket, which copies them twice: a ring of shared memory between the two was measured, and was 7 % faster with 4
connections busy (11.1 against 10.3 GB/s), not worth its memory for each connection.

    sender                                   receiver
    REQUEST or REPLY                    →
    GRANT "A" and descriptors           →    checks them             (only for slabs that were not passed before)
    GRANT "B", places, small pieces     →    copies
                                        ←    RELEASE

The sender waits for RELEASE, since only then may its memory change. If it gives up (its deadline, `Limits.stall_s`, an
abort) it first cuts the connection. The receiver believes what it copied only if its RELEASE could be sent after that:
on a Unix-domain socket, send(2) fails once the other side has shut down or is dead. So bytes that changed under a copy
are never presented as good ones, wherever either process is stopped or killed, with no check of content.

A lease is a view of the peer's memory, mapped read-only. It is RELEASEd from any thread, whatever the channel does
meanwhile. One that is held for longer than `Limits.stall_s` costs its holder the connection.

Neither side can harm the other's process by its memory: see `_shm_memory`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ._shm_memory import Attachment, Attachments
from ._shm_peer import check_peer, host_id
from ._shm_places import (
    INLINE,
    MAX_FDS,
    Place,
    Region,
    Regions,
    pack_places,
    pack_slabs,
    unpack_places,
    unpack_slabs,
)
from .bodies import Facts, LeasingBodies, Way
from .control import Control, EarlyReply
from .errors import ConnectionLost, DeadlinePassed, ProtocolError, TransportClosed, TransportError, TransportUnavailable
from .frames import Header, Kind
from .seam import Limits

__all__ = ["SharedBodies", "SharedWay"]

_SMALL_BODY = 256 << 10  # up to here, two more copies are quicker than a RELEASE: 120 against 165 µs, by round trips
_SMALL_PIECE = 16 << 10  # below, they are cheaper than a place: 3.4 against 7 µs for 4 KiB, 16 against 11 for 32
_COPY_BYTES = 32 << 20  # between two looks at the clock, 3 ms; the C library copies 8 MiB less well than 16 at a time

_ATTACHMENTS = Attachments()
os.register_at_fork(after_in_child=_ATTACHMENTS.renew_lock)


class SharedBodies(LeasingBodies):
    """One side of a connection. See the module.

    Args:
        control: a Unix-domain socket.
        limits: what this side accepts; `stall_s` is also the longest lease.
        pid: the peer's process, by SO_PEERCRED.
    """

    name = "shm"
    copies = 1
    joined = True

    def __init__(self, control: Control, *, limits: Limits, pid: int) -> None:
        self._control = control
        self._limits = limits
        self._peer_pid = pid
        self._pid = os.getpid()
        self._regions = Regions()
        self._passed = 0  # slabs the peer knows
        self._slabs: list[tuple[tuple[int, ...], Attachment]] = []  # of the peer
        self._order = threading.Lock()  # held while frames that belong together are sent
        self._due: deque[int] = deque()  # RELEASEs to send
        self._taken: set[int] = set()
        self._state = threading.Lock()
        self._lent: dict[int, tuple[float, Callable[[], None]]] = {}  # number → (until when, done)
        self._copying = threading.Lock()
        self._ended = False

    # Sending.

    def register(self, memory: memoryview, fd: int | None) -> None:
        """Memory that cannot be shared (not sealed, more than 1,024 slabs) is left alone: its bytes are sent."""
        if fd is not None:
            self._regions.add(memory, fd)

    def send(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """One copy, at the receiver, of what lies in registered memory.

        Raises:
            EarlyReply: the server does not want the body.
            DeadlinePassed, ConnectionLost, ProtocolError, TransportClosed: the connection is cut.
        """
        if not nbytes:
            return
        self._check()
        try:
            places, behind = self._lay_out(views, small=nbytes <= _SMALL_BODY, deadline=deadline)
            with self._order:
                header = Header(Kind.GRANT, number=number)
                self._control.send_frame(header, pack_places(places), behind, deadline=deadline)
            self._flush()
            if any(place.slab != INLINE for place in places):
                self._await_release(number, deadline)
        except EarlyReply:  # it will not look at the places
            raise
        except BaseException:
            self.abort()  # before anybody may write to the memory again
            raise

    def _lay_out(
        self, views: Sequence[memoryview], *, small: bool, deadline: float
    ) -> tuple[list[Place], list[memoryview]]:
        """(where the body lies, what follows behind the frame). Passes what the peer does not know yet."""
        found: list[tuple[Region | None, int, int]] = []
        behind = []
        for view in views:
            size = len(view)
            if not size:
                continue
            place = None if small or size < _SMALL_PIECE else self._regions.locate(view)
            if place is None:
                behind.append(view)
            region, offset = place or (None, 0)
            if found and found[-1][0] is region and (region is None or offset == found[-1][1] + found[-1][2]):
                _, offset, before = found.pop()
                size += before
            found.append((region, offset, size))
        self._pass(list({id(region): region for region, _, _ in found if region is not None}.values()), deadline)
        places = [Place(INLINE if region is None else region.number, offset, size) for region, offset, size in found]
        return places, behind

    def _pass(self, regions: Sequence[Region], deadline: float) -> None:
        """Give the peer the descriptors of `regions` that it does not have."""
        new = [region for region in regions if region.number < 0]
        for at in range(0, len(new), MAX_FDS):
            some = new[at : at + MAX_FDS]
            meta = pack_slabs([region.nbytes for region in some])
            with self._order:  # no RELEASE of another thread between the two
                self._control.send_frame(Header(Kind.GRANT), meta, deadline=deadline)
                self._control.send_fds([region.fd for region in some], deadline=deadline)
            self._flush()
            for region in some:
                region.number = self._passed
                region.close()
                self._passed += 1

    def _await_release(self, number: int, deadline: float) -> None:
        while True:
            header, meta = self._next_frame(deadline)
            if header.kind == Kind.RELEASE and header.number == number and number not in self._lent:
                return
            if header.kind == Kind.REPLY and header.number == number:
                raise EarlyReply(header, meta)
            self.heard(header, meta, deadline=deadline)

    def _next_frame(self, deadline: float) -> tuple[Header, bytes]:
        """The next frame, within `deadline` and the longest time without progress."""
        patience = min(deadline, time.monotonic() + self._limits.stall_s, self.patience())
        try:
            return self._control.receive_frame(limits=self._limits, deadline=patience)
        except DeadlinePassed:
            if patience < deadline:
                raise ConnectionLost(f"{self._control.peer}: nothing heard for {self._limits.stall_s:g} s") from None
            raise

    # Receiving.

    def receive(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """One copy, by the calling thread, of what lies in memory that the peer registered."""
        if not nbytes:
            return
        self._check()
        try:
            places = self._await_places(nbytes, number, deadline)
            pieces = _cut(views, _at_most(places, _COPY_BYTES))
            for place, parts in pieces:
                if place.slab == INLINE:
                    self._control.receive_into(parts, deadline=deadline)
                else:
                    self._copy(place, parts, deadline)
            self._let_go(places, number, deadline)
        except BaseException:
            self.abort()
            raise

    def skip(self, nbytes: int, *, number: int, deadline: float) -> None:
        """Costs nothing for what lies in shared memory."""
        if not nbytes:
            return
        self._check()
        try:
            places = self._await_places(nbytes, number, deadline)
            for place in places:
                if place.slab == INLINE:
                    self._control.skip(place.nbytes, deadline=deadline)
            self._let_go(places, number, deadline)
        except BaseException:
            self.abort()
            raise

    def _await_places(self, nbytes: int, number: int, deadline: float) -> list[Place]:
        while True:
            header, meta = self._next_frame(deadline)
            if header.kind == Kind.GRANT and header.number == number and meta[:1] == b"B":
                return self._places(meta, nbytes)
            self.heard(header, meta, deadline=deadline)

    def _places(self, meta: bytes, nbytes: int) -> list[Place]:
        try:
            return unpack_places(meta, nbytes, [slab.nbytes for _, slab in self._slabs])
        except ProtocolError as error:
            raise self._lie(error) from None

    def _copy(self, place: Place, parts: Sequence[memoryview], deadline: float) -> None:
        with self._copying:
            if self._ended:
                raise TransportClosed(f"{self._control.peer}: the channel was closed")
            if time.monotonic() >= deadline:
                raise self._control.fail(DeadlinePassed(f"{self._control.peer}: the deadline passed while copying"))
            self._slabs[place.slab][1].read_into(parts, place.offset)

    def _let_go(self, places: Sequence[Place], number: int, deadline: float) -> None:
        """Send RELEASE. That this works proves that the peer had not cut the connection: what was copied is whole."""
        if any(place.slab != INLINE for place in places):
            self._control.send_frame(Header(Kind.RELEASE, number=number), deadline=deadline)

    def heard(self, header: Header, meta: bytes, *, deadline: float = math.inf) -> None:
        """New slabs of the peer, or the RELEASE of a lease.

        Raises:
            ProtocolError: anything else.
        """
        if header.kind == Kind.RELEASE and self._returned(header.number):
            return
        sizes = None
        if header.kind == Kind.GRANT:
            try:
                sizes = unpack_slabs(meta, len(self._slabs))
            except ProtocolError as error:
                raise self._lie(error) from None
        if sizes is None:
            raise self._lie(f"{header.kind.name} {header.number} out of turn")
        self._attach(sizes, deadline)

    def _attach(self, sizes: Sequence[int], deadline: float) -> None:
        patience = min(deadline, time.monotonic() + self._limits.stall_s)  # they were sent right behind the frame
        try:
            fds = deque(self._control.receive_fds(len(sizes), deadline=patience))
        except DeadlinePassed:
            if patience < deadline:
                raise ConnectionLost(f"{self._control.peer}: nothing heard for {self._limits.stall_s:g} s") from None
            raise
        try:
            for nbytes in sizes:
                self._slabs.append(_ATTACHMENTS.attach(fds.popleft(), nbytes, pid=self._peer_pid))
        except ProtocolError as error:
            raise self._lie(error) from None
        except ConnectionLost as error:
            raise self._control.fail(error) from error.__cause__
        finally:
            for fd in fds:
                os.close(fd)

    def _lie(self, what: object) -> TransportError:
        """Cut the connection; returns what to raise."""
        return self._control.fail(ProtocolError(f"{self._control.peer}: {what}"))

    # Leases.

    def lend(self, views: Sequence[memoryview], nbytes: int, *, number: int, done: Callable[[], None]) -> bytes | None:
        """Only what lies in one piece can be lent: the other side wants one view."""
        self._check()
        now = time.monotonic()
        found = [(self._regions.locate(view), len(view)) for view in views if len(view)]
        if not found or any(place is None for place, _ in found):
            return None
        places, _ = self._lay_out(views, small=False, deadline=now + self._limits.stall_s)
        if len(places) != 1 or places[0].slab == INLINE:
            return None
        with self._state:
            if self._ended or number in self._lent:
                return None
            self._lent[number] = (now + self._limits.stall_s, done)
        return pack_places(places)

    def patience(self) -> float:
        """When the oldest lease must have come back, in `time.monotonic()` seconds; math.inf if there is none."""
        with self._state:
            return min((until for until, _ in self._lent.values()), default=float("inf"))

    def _returned(self, number: int) -> bool:
        with self._state:
            _, done = self._lent.pop(number, (0.0, None))
        if done is None:
            return False
        done()
        return True

    def take(self, place: bytes, nbytes: int, *, number: int, deadline: float) -> memoryview:
        """No byte is touched: the same time for any size."""
        self._check()
        places = self._places(place, nbytes)
        if len(places) != 1 or places[0].slab == INLINE:
            raise self._lie("a lease that does not lie in one piece")
        view = self._slabs[places[0].slab][1].view(places[0].offset, nbytes)
        with self._state:
            self._taken.add(number)
        return view

    def release(self, number: int) -> None:
        """RELEASE is sent at once, or behind the body that another thread is sending just now."""
        if self._pid != os.getpid():  # the lease is the parent's
            return
        with self._state:
            if number not in self._taken:
                return
            self._taken.discard(number)
        self._due.append(number)
        self._flush()

    def _flush(self) -> None:
        """Send the RELEASEs that are due. Who finds the lock taken leaves them to its holder, who comes here next."""
        while self._due and self._order.acquire(blocking=False):
            try:
                while self._due:
                    soon = time.monotonic() + self._limits.stall_s
                    self._control.send_frame(Header(Kind.RELEASE, number=self._due.popleft()), deadline=soon)
            except (TransportError, IndexError):  # no connection: the peer has its memory back
                self._due.clear()
            finally:
                self._order.release()

    # Life.

    def _check(self) -> None:
        if self._pid != os.getpid():  # where a thread of the parent may hold our locks for ever
            raise TransportClosed(f"{self._control.peer}: the channel belongs to the process before os.fork()")

    def abort(self) -> None:
        self._control.abort()
        if self._pid != os.getpid():
            return
        self._ended = True
        with self._copying:  # what is being copied ends; nothing more is
            pass
        self._give_back()

    def close(self) -> None:
        if self._pid == os.getpid():
            self._ended = True
            if self._lent:
                self._control.abort()  # before the memory changes, so that holders of leases can tell
            self._give_back()
        self._regions.close()
        slabs, self._slabs = self._slabs, []
        for key, _ in slabs:
            _ATTACHMENTS.detach(key)

    def _give_back(self) -> None:
        with self._state:
            lent, self._lent = list(self._lent.values()), {}
        for _, done in lent:
            done()


def _at_most(places: Sequence[Place], most: int) -> Iterator[Place]:
    """The places, those in memory cut to at most `most` bytes."""
    for slab, offset, nbytes in places:
        if slab == INLINE:
            yield Place(slab, offset, nbytes)
            continue
        for at in range(0, nbytes, most):
            yield Place(slab, offset + at, min(most, nbytes - at))


def _cut(views: Sequence[memoryview], places: Iterator[Place]) -> Iterator[tuple[Place, list[memoryview]]]:
    """Each place with the parts of `views` that it fills."""
    left = deque(view for view in views if len(view))
    for place in places:
        parts, missing = [], place.nbytes
        while missing:
            view = left.popleft()
            parts.append(view[:missing])
            if len(view) > missing:
                left.appendleft(view[missing:])
            missing -= len(parts[-1])
        yield place, parts


class SharedWay(Way):
    """Needs Linux, both processes on one host, a Unix-domain socket between them, and a peer of our own user, of root,
    or of `Limits.uids`: who is given a slab can read all of it, not only the bodies that lie there."""

    name = "shm"

    def facts(self, *, server: bool) -> Facts:
        """The host.

        Raises:
            TransportUnavailable: not Linux, or a system without a boot id.
        """
        host = host_id()
        if not host or not hasattr(os, "memfd_create"):
            raise TransportUnavailable("sharing memory between processes needs Linux, with /proc")
        return {"host": host}

    def agree(self, mine: Facts, theirs: Facts) -> str:
        return "" if mine.get("host") == theirs.get("host") else "not on the same host"

    def open(
        self, control: Control, *, server: bool, mine: Facts, theirs: Facts, limits: Limits, deadline: float
    ) -> SharedBodies:
        """
        Raises:
            TransportUnavailable: not over a Unix-domain socket.
            PeerRefused: the peer runs as a user that is not allowed.
        """
        if not control.local:
            raise TransportUnavailable(f"{control.peer}: shared memory needs the path of a Unix socket as the address")
        return SharedBodies(control, limits=limits, pid=check_peer(control.fileno(), limits.uids).pid)
