"""`Control`: the control connection, a blocking TCP, TLS or Unix-domain socket that carries frames (see `frames`).

How it waits was chosen by measurement (two processes on loopback, 2 cores): a blocking socket with SO_RCVTIMEO and
MSG_WAITALL makes one system call per receive, however long the body. Python's `settimeout` makes a poll(2) before
every call, 3 µs more per round trip, and takes the GIL again for every piece that arrives: 0.6 to 0.95 of the
throughput. The buffer sizes are the kernel's, which tunes them; fixed ones of 1 or 4 MiB were no faster.

A frame's header is received with up to 1 KiB of what follows, so that a small one takes one system call and not three;
what of a body comes along is copied once more. Not on a Unix socket, where descriptors go with certain bytes. Who waits
for a frame that is likely to come at once looks for it before he sleeps: `_glance`.

Two cases need poll(2) and MSG_DONTWAIT all the same, and get it: the main thread, in which the kernel delivers signals,
because Python retries a call that a signal interrupted with its full timeout (PEP 475); and sends on a Unix socket,
where SO_SNDTIMEO holds for each buffer and not for the call (net/unix/af_unix.c). For TLS see `tls`.

Sources: socket(7), tcp(7), unix(7), recv(2), send(2), cmsg(3).
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence

from ._descriptors import pass_fds, take_fds
from ._glance import Glance
from ._metas import LEAST_RATE, MetaShare
from ._sockets import Part, advance, fill, let_go, notice_vanished_peers
from .errors import ConnectionLost, DeadlinePassed, ProtocolError, TransportClosed, TransportError
from .frames import HEADER_BYTES, Header, Kind, check_meta, pack_header, unpack_header
from .process import in_main_thread, process_id
from .seam import Limits

__all__ = ["Control", "EarlyReply", "Part"]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_TIMEVAL = struct.Struct("@qq")
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_SCRATCH_BYTES = 256 << 10
_FINISH_READS, _FINISH_BYTES = 64, 16 << 10
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_AHEAD_BYTES = 1024  # received together with a header, at most: a small frame is one system call
_JOIN_BYTES = 4096  # a frame with so much behind its header is sent as one piece: a copy is cheaper than a list
_COARSE_S = 5.0  # a socket's timeout that is shorter than it need be, but so long, is left: it wakes us up in vain


class EarlyReply(TransportError):
    """Instead of leave to send the body of a request, its REPLY came: the server does not want the body.

    Attributes:
        header, meta: the REPLY; its body, if any, was not received yet.
    """

    def __init__(self, header: Header, meta: bytes) -> None:
        super().__init__("the reply came before the body was sent")
        self.header = header
        self.meta = meta


class Control:
    """The control connection of one channel, at either side.

    Sends are safe from several threads (frames do not mix), receives are for one thread at a time; `abort`,
    `peer_gone` and `close` are for any. Every error aborts the connection: a stream that was read half is of no use.
    In a forked child it is unusable, says so, and leaves the parent's connection alone.

    Args:
        sock: connected; becomes this object's own.
        peer: its address, for messages.
        stall_s: longest time without any progress of a send or receive, in seconds. Waiting for a frame to begin
            is not limited by it.

    Attributes:
        peer, stall_s: as given; both may be changed.
        local: whether it is a Unix-domain socket, so that descriptors can be passed.
        encrypted: whether it is TLS.
        metas: what bounds the memory for metas that come (server); None: only the limit of each frame.
    """

    encrypted = False

    def __init__(self, sock: socket.socket, peer: str, *, stall_s: float = 30.0) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self.metas: MetaShare | None = None
        self.local = sock.family == socket.AF_UNIX
        self._sock = sock
        self._pid = process_id()
        self._ended = False
        self._ending = threading.Lock()
        self._said = b""
        self._held: list[Part] = []
        self._sending = threading.Lock()
        self._ahead = memoryview(bytearray(HEADER_BYTES if self.local else _AHEAD_BYTES))
        self._at = self._end = 0  # what of that was received and not taken yet
        self._glance = Glance(sock.fileno())
        self._armed = {socket.SO_RCVTIMEO: math.inf, socket.SO_SNDTIMEO: math.inf}
        _LIVE.add(self)
        sock.settimeout(None)
        if not self.local:
            notice_vanished_peers(sock, stall_s)

    # Frames.

    def send_frame(
        self, header: Header, meta: bytes = b"", views: Sequence[memoryview] = (), *, deadline: float
    ) -> None:
        """Send header, meta and `views` (flat, of bytes) behind one another, gathered.

        Args:
            header: `meta_nbytes` is filled in.
            deadline: absolute `time.monotonic()` seconds, math.inf for none.

        Raises:
            DeadlinePassed, ConnectionLost, TransportClosed: the connection is aborted.
        """
        parts: list[Part] = [pack_header(header, meta)]
        if len(meta) + header.body_nbytes <= _JOIN_BYTES:
            parts = [b"".join((parts[0], meta, *views))]
        else:
            if meta:
                parts.append(meta)
            parts.extend([view for view in views if len(view)])
        self.send(parts, deadline=deadline)

    def hold_frame(self, header: Header, meta: bytes = b"") -> None:
        """Send this frame in front of what is sent next, in the same system call: the peer wakes up once for both."""
        with self._sending:
            self._held = [pack_header(header, meta), *([meta] if meta else [])]

    def receive_frame(self, *, limits: Limits, deadline: float) -> tuple[Header, bytes]:
        """Wait for a frame, however long within `deadline`: (header, meta). Its body, if any, is not received yet.

        Raises:
            ProtocolError: what came is no frame, or a length is beyond `limits`.
            DeadlinePassed, ConnectionLost, TransportClosed: as all methods. The connection is aborted.
        """
        self._check()
        head = self._receive_head(deadline)
        try:
            header, digest = unpack_header(head, max_meta=limits.max_meta, max_body=limits.max_body)
            nbytes = header.meta_nbytes
            here = nbytes <= self._end - self._at
            meta = self._taken(nbytes) if here else self._receive_meta(nbytes, deadline)
            check_meta(head, meta, digest)
        except ProtocolError as error:
            raise self.fail(ProtocolError(f"{self.peer}: {error}")) from None
        return header, meta

    def _receive_meta(self, nbytes: int, deadline: float) -> bytes:
        """However slowly it comes, it ends: what holds memory makes progress."""
        now = time.monotonic()
        if self.metas is not None and not self.metas.take(nbytes, min(deadline, now + self.stall_s)):
            raise self.fail(ConnectionLost(f"{self.peer}: no memory for {nbytes} bytes of meta became free in time"))
        return self._receive_bytes(nbytes, min(deadline, now + self.stall_s + nbytes / LEAST_RATE))

    def await_frame(self, kind: Kind, number: int, *, limits: Limits, deadline: float) -> tuple[Header, bytes]:
        """The next frame, which must be `kind` of request `number`.

        Raises:
            EarlyReply: a REPLY of that number came instead. The connection is not aborted.
            ProtocolError: anything else came.
        """
        header, meta = self.receive_frame(limits=limits, deadline=deadline)
        if header.number == number:
            if header.kind == kind:
                return header, meta
            if header.kind == Kind.REPLY:
                raise EarlyReply(header, meta)
        raise self.fail(
            ProtocolError(f"{self.peer}: {header.kind.name} {header.number} instead of {kind.name} {number}")
        )

    # Bytes.

    def send(self, parts: Sequence[Part], *, deadline: float) -> None:
        """Send `parts`, none of which is empty, behind one another, and nothing of another thread in between."""
        if not self._sending.acquire(blocking=False):
            wait = deadline - time.monotonic()
            if not self._sending.acquire(timeout=max(0.0, min(wait, self.stall_s))):
                raise self.fail(self._late("sending", wait <= self.stall_s))
        try:
            self._check()
            held, self._held = self._held, []
            self._send([*held, *parts], deadline)
        finally:
            self._sending.release()

    def receive_into(self, views: Sequence[memoryview], *, deadline: float) -> None:
        """Fill `views` (flat, writable, of bytes), in order. Nothing is written into them once this ended."""
        self._check()
        left = [view for view in views if len(view)]
        if self._at < self._end:
            left, done = fill(left, self._ahead[self._at : self._end])
            self._at += done
        if len(left) == 1:
            self._receive(left[0], deadline)
        elif left:
            self._scatter(left, deadline)

    def skip(self, nbytes: int, *, deadline: float) -> None:
        """Receive `nbytes` and throw them away."""
        self._check()
        here = min(nbytes, self._end - self._at)
        self._at += here
        nbytes -= here
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes > 0:
            piece = scratch[:nbytes]
            self._receive(piece, deadline)
            nbytes -= len(piece)

    def send_fds(self, fds: Sequence[int], *, deadline: float) -> None:
        """Pass open descriptors to the peer, with one byte of the stream. Unix sockets only (cmsg(3), SCM_RIGHTS)."""
        with self._sending:
            self._check()
            while True:
                try:
                    return pass_fds(self._sock, fds)
                except BlockingIOError:
                    self._poll(select.POLLOUT, self._patience(deadline, None, "sending"))
                except OSError as error:
                    raise self._lost("sending descriptors", error) from error

    def receive_fds(self, count: int, *, deadline: float) -> list[int]:
        """Receive `count` descriptors, sent by one `send_fds`. They are the caller's, and closed on exec.

        Raises:
            ProtocolError: other bytes, or another number of descriptors, came.
        """
        self._check()
        while True:
            self._poll(select.POLLIN, self._patience(deadline, None, "receiving"))
            try:
                fds = take_fds(self._sock, count)
            except BlockingIOError:
                continue
            except ValueError as error:
                raise self.fail(ProtocolError(f"{self.peer}: {error}")) from None
            except OSError as error:
                raise self._lost("receiving descriptors", error) from error
            if fds is None:
                raise self._lost("receiving descriptors", None)
            return fds

    # Life.

    @property
    def usable(self) -> bool:
        """False after `abort`, `close` and any error, and in a forked child."""
        return not self._ended and self._pid == process_id()

    def fileno(self) -> int:
        """The socket's descriptor; -1 after `close`."""
        return self._sock.fileno()

    @property
    def ahead(self) -> bool:
        """Whether something was received that nobody has taken yet: the descriptor does not tell of that."""
        return self._at < self._end

    def peer_gone(self) -> bool:
        """Whether the peer is known to have closed or reset the connection. Does not block and sends nothing."""
        fd = self._sock.fileno()
        if self._ended or fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        return any(events & _GONE for _, events in poll.poll(0))

    def abort(self) -> None:
        """End the connection now, from any thread. A blocked call raises `TransportClosed`; the descriptor's number
        stays taken until `close`, so that it cannot become something else under a call."""
        if self._pid != process_id():
            self._ended = True
            return  # shutdown(2) would end the parent's connection
        with self._ending:
            fd = self._sock.fileno()
            if self._ended or fd < 0:
                return
            self._ended = True
            try:
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not SSLSocket's, which is not safe under a call
            except OSError:  # not connected any more
                pass
            let_go(fd)

    def close(self) -> None:
        """`abort`, and close the descriptor. No receive may be under way; sends of other threads end first."""
        self.abort()
        if self._pid != process_id():
            self._sock.close()  # without the locks, which a thread of the parent may hold for ever here
            return
        with self._sending, self._ending:
            self._sock.close()

    def finish(self, *, deadline: float) -> None:
        """Say that no more comes, and wait for the peer to end the connection too, at most half a second and 1 MiB:
        closing at once would send a reset that may overtake what was said last. `close` is still to be called."""
        if self._ended:
            return
        self._ended = True
        end = min(deadline, time.monotonic() + 0.5)
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            for _ in range(_FINISH_READS):
                if not self._poll(select.POLLIN, max(0.0, end - time.monotonic())):
                    return
                if not os.read(self._sock.fileno(), _FINISH_BYTES):
                    return
        except OSError:  # it ended already
            return

    def last_words(self, *, limits: Limits) -> tuple[Header, bytes] | None:
        """After a send failed: the frame that the peer sent before it ended the connection; None if there was none."""
        said = memoryview(self._said)
        head = said[:HEADER_BYTES]
        try:
            header, digest = unpack_header(head, max_meta=limits.max_meta, max_body=limits.max_body)
            meta = bytes(said[HEADER_BYTES : HEADER_BYTES + header.meta_nbytes])
            check_meta(head, meta, digest)
        except ProtocolError:
            return None
        return header, meta

    def fail(self, error: TransportError) -> TransportError:
        """Abort the connection; the error to raise, which is `TransportClosed` if somebody aborted it before."""
        if self._ended:
            return TransportClosed(f"{self.peer}: the channel was closed")
        self.abort()
        return error

    def _check(self) -> None:
        if self._pid != process_id():
            raise TransportClosed(f"{self.peer}: the channel belongs to the process before os.fork(); open another")
        if self._ended:
            raise TransportClosed(f"{self.peer}: the channel was closed")

    # Waiting.

    def _patience(self, deadline: float, since: float | None, doing: str) -> float:
        """Seconds that may be waited now; `since`: of the last progress, None if it may take any time."""
        now = time.monotonic()
        left = deadline - now
        if left <= 0:
            raise self.fail(self._late(doing, True))
        if since is None:
            return left
        patience = since + self.stall_s - now
        if patience <= 0:
            raise self.fail(self._late(doing, False))
        return min(left, patience)

    def _late(self, doing: str, deadline: bool) -> TransportError:
        if deadline:
            return DeadlinePassed(f"{self.peer}: the deadline passed while {doing}")
        return ConnectionLost(f"{self.peer}: no progress for {self.stall_s:g} s while {doing}")

    def _lost(self, doing: str, error: OSError | None) -> TransportError:
        """`error` None: the peer closed the connection."""
        why = "it closed the connection" if error is None else error.strerror or str(error)
        return self.fail(ConnectionLost(f"{self.peer}: lost while {doing}: {why}"))

    def _poll(self, events: int, wait: float) -> bool:
        """Whether the socket was ready within `wait` seconds. Right under signals, too (PEP 475)."""
        poll = select.poll()
        poll.register(self._sock.fileno(), events)
        return bool(poll.poll(None if wait == math.inf else math.ceil(min(wait, 1e6) * 1000)))

    def _arm(self, option: int, wait: float) -> None:
        """Let the socket's timeout be at most `wait`, and not so short that it costs anything: a call every few µs need
        not set it."""
        armed = self._armed[option]
        if min(wait / 2, _COARSE_S) <= armed <= wait:
            return
        if wait < math.inf:
            wait = min(wait * 0.75 if wait > 0.1 else wait, 1e6)
        seconds, rest = (0, 0) if wait == math.inf else divmod(max(1, math.ceil(wait * 1e6)), 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, rest))
        self._armed[option] = wait

    # Moving bytes.

    def _send(self, parts: list[Part], deadline: float) -> None:
        sock, at, since, flags = self._sock, 0, None, _NOW
        while True:
            try:
                if len(parts) == 1:
                    sent = sock.send(parts[0], flags)
                else:
                    sent = sock.sendmsg(
                        parts if len(parts) <= _IOV_MAX and not at else parts[at : at + _IOV_MAX], (), flags
                    )
            except BlockingIOError:
                sent = 0
            except OSError as error:
                try:  # what was received before a reset can still be read (Linux)
                    self._said = bytes(self._ahead[self._at : self._end])
                    self._said += sock.recv(_SCRATCH_BYTES, socket.MSG_DONTWAIT)
                except OSError:
                    pass
                raise self._lost("sending", error) from error
            if len(parts) == 1 and sent == len(parts[0]):
                return
            at = advance(parts, at, sent)
            if at == len(parts):
                return
            if sent or since is None:
                since = time.monotonic()
            wait = self._patience(deadline, since, "sending")
            if self.local or in_main_thread():
                self._poll(select.POLLOUT, wait)
            else:
                self._arm(socket.SO_SNDTIMEO, wait)
                flags = socket.MSG_NOSIGNAL

    def _receive_head(self, deadline: float) -> memoryview:
        """The next header, valid until the next call; it may take any time until it begins."""
        ahead, at, end = self._ahead, self._at, self._end
        if at == end:
            at, end = 0, self._receive(ahead, deadline, least=HEADER_BYTES, stall=False)
        elif end - at < HEADER_BYTES:
            have = end - at
            ahead[:have] = ahead[at:end]
            at, end = 0, have + self._receive(ahead[have:], deadline, least=HEADER_BYTES - have)
        self._at, self._end = at + HEADER_BYTES, end
        return ahead[at : at + HEADER_BYTES]

    def _receive(self, view: memoryview, deadline: float, *, least: int = -1, stall: bool = True) -> int:
        """Fill `view`, which is not empty, with at least `least` bytes, all if that is negative; how many they are.
        Without `stall` it may take any time until the first byte."""
        sock, left, total = self._sock, len(view), len(view)
        careful = in_main_thread()
        missing = left if least < 0 else least
        flags = socket.MSG_WAITALL if missing == left else 0
        since = time.monotonic() if stall else None
        ready = not stall and self._glance.look()
        while True:
            wait = self._patience(deadline, since, "receiving")
            try:
                if careful:
                    if not ready:
                        self._poll(select.POLLIN, wait)
                    ready = False
                    got = sock.recv_into(view, left, socket.MSG_DONTWAIT)
                else:
                    self._arm(socket.SO_RCVTIMEO, wait)
                    got = sock.recv_into(view, left, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost("receiving", error) from error
            if not stall:
                self._glance.found()
            if got >= missing:
                return total - left + got
            if not got:
                raise self._lost("receiving", None)
            missing -= got
            view, left, since, stall = view[got:], left - got, time.monotonic(), True

    def _scatter(self, views: list[memoryview], deadline: float) -> None:
        sock, at, since = self._sock, 0, time.monotonic()
        careful = in_main_thread()
        while at < len(views):
            wait = self._patience(deadline, since, "receiving")
            batch = views[at : at + _IOV_MAX]
            try:
                if careful:
                    self._poll(select.POLLIN, wait)
                    got = sock.recvmsg_into(batch, 0, socket.MSG_DONTWAIT)[0]
                else:
                    self._arm(socket.SO_RCVTIMEO, wait)
                    got = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost("receiving", error) from error
            if not got:
                raise self._lost("receiving", None)
            at = advance(views, at, got)
            since = time.monotonic()

    def _taken(self, nbytes: int) -> bytes:
        """Up to `nbytes` of what came with the header."""
        at = self._at
        self._at = end = min(at + nbytes, self._end)
        return bytes(self._ahead[at:end])

    def _receive_bytes(self, nbytes: int, deadline: float) -> bytes:
        data = self._taken(nbytes)
        if len(data) < nbytes:
            try:  # it came with the header, nearly always
                more = self._sock.recv(min(nbytes - len(data), _SCRATCH_BYTES), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._lost("receiving", error) from error
            else:
                if not more:
                    raise self._lost("receiving", None)
                data = data + more if data else more
        return data if len(data) == nbytes else self._rest(data, nbytes, deadline)

    def _rest(self, data: bytes, nbytes: int, deadline: float) -> bytes:
        """`data` and what is missing to `nbytes`. Memory is taken as bytes arrive, not because a header claims them."""
        whole = bytearray(data)
        while len(whole) < nbytes:
            piece = bytearray(min(nbytes - len(whole), _SCRATCH_BYTES))
            self._receive(memoryview(piece), deadline)
            whole += piece
        return bytes(whole)


def _after_fork_in_child() -> None:
    """A child that kept the descriptors would keep connections, and ports, of its parent alive."""
    for control in list(_LIVE):
        control.close()


_LIVE: weakref.WeakSet[Control] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork_in_child)
