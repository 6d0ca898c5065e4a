"""`Link`: one connection to a server, never waiting: `exchange` polls many of them in one thread.

A value lands in the caller's memory by recvmsg(2), together with the head of the reply behind it, so that its bytes
are copied by the kernel only, but for those that arrive in one read with the reply before (at most `_BUFFER`). Over
TLS, OpenSSL decrypts into the destination. While much is still to come, SO_RCVLOWAT (socket(7)) keeps poll(2) from
waking us for every packet: 0.16 CPU seconds per GiB instead of 0.26.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvstore_backends._resolver import Address

from .errors import LinkError, ReplyError
from .options import Node
from .resp import Ask, Part, number, parse

__all__ = ["Link"]

_BUFFER = 64 << 10
_LARGEST_BUFFER = 16 << 20  # for a reply that becomes an object: a page of names
_KEPT_BUFFER = 1 << 20  # a larger one is given back when it is empty
_IOV = 512
_SLICE = 4 << 20  # sent or received before the others have their turn
_LOW_WATER = 1 << 20
_LOW_WATER_FROM = 256 << 10
_TLS_JOIN = 64 << 10  # small parts are joined up to this: each write over TLS is at least one record
_MOST_HEAD = 32  # bytes of "$…\r\n"


class Link:
    """A connection, and the parser of what it brings. Used by one thread at a time, except `hang_up`.

    Attributes:
        node: whom it is connected to.
        connected: the connection (and TLS) is there.
        greeted: the server knows who we are; set by `exchange`.
        facts: what the server told in answer to HELLO.
        idle_since: monotonic time at which it was put back.
        until: monotonic time by which it must be connected and greeted.
        began: monotonic time at which it was made.
    """

    def __init__(
        self, node: Node, addresses: Sequence[Address], *, tls: ssl.SSLContext | None, server_name: str, until: float
    ) -> None:
        self.node = node
        self.connected = False
        self.greeted = False
        self.facts: dict[str, Any] = {}
        self.idle_since = 0.0
        self._addresses = deque(addresses)
        self._tls = tls
        self._server_name = server_name
        self.until = until
        self.began = time.monotonic()
        self._try_until = until
        self._failure: OSError | None = None
        self._ended = False
        self._sock: socket.socket | None = None
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._low = 1
        # A value that is landing: views still to fill, bytes still to come (trailing CRLF excluded), what to tell.
        self._landing: Ask | None = None
        self._views: deque[memoryview] = deque()
        self._index = 0
        self._filled = 0
        self._total = 0
        self._left = 0

    # Connecting.

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def due(self) -> float:
        """While it is not connected: monotonic time at which `advance` must be called whatever happens."""
        return self._try_until

    def advance(self) -> int:
        """Go on connecting. Returns the events to poll for; 0 once it is connected.

        Raises:
            LinkError: "connect" or "tls".
        """
        while True:
            if self._ended:
                raise LinkError("closed", "the backend was closed")
            if self._sock is None and not self._dial():
                raise self._unreachable()
            sock = self._sock
            if sock is None:
                continue
            if time.monotonic() >= self._try_until:
                self._next(TimeoutError("no answer in time"))
                continue
            try:
                if isinstance(sock, ssl.SSLSocket):
                    return self._shake(sock)
                return self._arrived(sock)
            except ssl.SSLCertVerificationError as error:
                text = f"the certificate of {self.node} cannot be trusted: {error.verify_message}; see options tls_ca"
                raise LinkError("tls", f"{text} and tls_server_name") from error
            except OSError as error:  # includes ssl.SSLError
                self._next(error)

    def _dial(self) -> bool:
        """Begin with the next address. False: there is none."""
        now = time.monotonic()
        if not self._addresses or now >= self.until:
            return False
        self._try_until = now + (self.until - now) / len(self._addresses)
        family, address = self._addresses.popleft()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor left, or a kernel without IPv6
            self._failure = error
            return bool(self._addresses)
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            self._sock = sock
            self._next(error)
            return bool(self._addresses)
        self._sock = sock
        return True

    def _arrived(self, sock: socket.socket) -> int:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLOUT)
        if not poll.poll(0):
            return select.POLLOUT
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if sock.getsockname() == sock.getpeername():  # TCP's simultaneous open: we met ourselves on an ephemeral port
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if self._tls is None:
            self.connected = True
            return 0
        wrapped = self._tls.wrap_socket(sock, server_hostname=self._server_name, do_handshake_on_connect=False)
        self._sock = wrapped
        return self._shake(wrapped)

    def _shake(self, sock: ssl.SSLSocket) -> int:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        self.connected = True
        return 0

    def _next(self, error: OSError) -> None:
        self._failure = error
        self.close()
        self._sock = None

    def _unreachable(self) -> LinkError:
        failure = self._failure
        if failure is None or isinstance(failure, TimeoutError):
            error = LinkError("connect", f"no connection to {self.node} in time")
        elif isinstance(failure, ssl.SSLError):
            error = self._tls_failed(failure)
        else:
            error = LinkError("connect", f"no connection to {self.node}: {_reason(failure)}")
        error.__cause__ = failure
        return error

    def _tls_failed(self, failure: ssl.SSLError) -> LinkError:
        if isinstance(failure, ssl.SSLEOFError | ssl.SSLZeroReturnError):  # it may just have died
            return LinkError("connect", f"{self.node} hung up during the TLS handshake; is its port one for TLS?")
        hint = "is its port one for TLS, and does it want a tls_cert?"
        return LinkError("tls", f"TLS with {self.node} failed: {failure.reason or type(failure).__name__}; {hint}")

    # Life.

    def stale(self) -> bool:
        """Whether an idle connection has ended, or says what nobody asked for."""
        if self.unread:
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | select.POLLRDHUP)
        return self._begin < self._end or bool(poll.poll(0))

    def hang_up(self) -> None:
        """From any thread: what the connection is used for ends soon. Its descriptor stays."""
        self._ended = True
        sock = self._sock
        if sock is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which is not safe under a call
            except OSError:
                pass

    def close(self) -> None:
        if self._sock is not None:
            try:
                self._sock.close()
            except OSError:
                pass

    # Sending.

    def send(self, parts: deque[Part]) -> int:
        """Send of `parts` what the kernel takes now; what was sent is taken out. Returns the number of bytes.

        Raises:
            LinkError: "closed".
        """
        try:
            return self._send_tls(parts) if self._tls is not None else self._send_plain(parts)
        except OSError as error:
            raise self._broke(error) from error

    def _send_plain(self, parts: deque[Part]) -> int:
        sock, total = self._socket(), 0
        while parts and total < _SLICE:
            batch, size = [], 0
            for part in parts:
                batch.append(part)
                size += len(part)
                if len(batch) >= _IOV or size >= _SLICE:
                    break
            try:
                sent = sock.sendmsg(batch, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            total += sent
            _take(parts, sent)
            if sent < size:
                break
        return total

    def _send_tls(self, parts: deque[Part]) -> int:
        sock, total = self._socket(), 0
        while parts and total < _SLICE:
            if len(parts) > 1 and len(parts[0]) < _TLS_JOIN:
                _join(parts)
            try:
                sent = sock.send(parts[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            total += sent
            _take(parts, sent)
        return total

    # Receiving.

    def receive(self) -> int:
        """Take what has arrived: into the sink of a value that is landing, the rest into the buffer. Returns the
        number of bytes; 0: nothing now.

        Raises:
            LinkError: "closed", or "protocol".
        """
        into: list[memoryview] = []
        if self._left:
            for view in self._views:
                into.append(view)
                if len(into) >= _IOV:
                    break
        wanted = sum(map(len, into))
        whole = not self._left or wanted >= self._left
        if whole and wanted > self._left:  # the record ends before the views do
            into = _cut(into, self._left)
            wanted = self._left
        if whole:
            self._make_room()
            into.append(self._view[self._end :])
        try:
            count = self._socket().recv_into(into[0]) if self._tls is not None else self._scatter(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise self._broke(error) from error
        if not count:
            raise self._hung_up("closed the connection")
        landed = min(count, wanted)
        if landed:
            self._land(landed)
        self._end += count - landed
        return count

    def _scatter(self, into: list[memoryview]) -> int:
        if len(into) == 1:
            return self._socket().recv_into(into[0], 0, socket.MSG_DONTWAIT)
        return self._socket().recvmsg_into(into, 0, socket.MSG_DONTWAIT)[0]

    def _make_room(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _KEPT_BUFFER:
                self._buffer = bytearray(_BUFFER)
                self._view = memoryview(self._buffer)
        elif self._begin > _BUFFER // 2 or self._end == len(self._buffer):
            rest = self._end - self._begin
            self._buffer[:rest] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, rest
        if self._end == len(self._buffer):
            if self._end >= _LARGEST_BUFFER:
                raise LinkError("protocol", f"{self.node} sends a reply of more than {_LARGEST_BUFFER >> 20} MiB")
            larger = bytearray(min(4 * self._end, _LARGEST_BUFFER))
            larger[: self._end] = self._buffer
            self._buffer, self._view = larger, memoryview(larger)

    def next_reply(self, ask: Ask) -> bool:
        """Take the reply of `ask` out of what has arrived. False: not all of it is there yet.

        Raises:
            LinkError: "protocol".
        """
        if ask.sink:
            if self._landing is ask:
                return self._finish(ask)
            if self._end > self._begin and self._buffer[self._begin] == 0x24:
                return self._begin_landing(ask)
        found = parse(self._buffer, self._begin, self._end)
        if found is None:
            return False
        if ask.sink and not isinstance(found[0], ReplyError):
            raise LinkError("protocol", f"{self.node} sends something else than the string it was asked for")
        ask.reply, self._begin = found
        return True

    def _begin_landing(self, ask: Ask) -> bool:
        at = self._buffer.find(b"\r\n", self._begin, min(self._end, self._begin + _MOST_HEAD))
        if at < 0:
            if self._end - self._begin >= _MOST_HEAD:
                raise LinkError("protocol", "a string's length has too many digits")
            return False
        size = number(bytes(self._view[self._begin + 1 : at]))
        if size > sum(map(len, ask.sink)):
            raise LinkError("protocol", f"{self.node} sends more bytes than were asked for")
        if size < 0:
            raise LinkError("protocol", f"{self.node} sends no string, but was asked for one")
        self._begin = at + 2
        self._landing = ask
        self._views = deque(ask.sink)
        self._index = self._filled = 0
        self._total = self._left = size
        have = min(self._end - self._begin, size)
        begin = self._begin
        while have:  # what came along with the reply before
            view = self._views[0]
            step = min(have, len(view))
            view[:step] = self._view[begin : begin + step]
            begin += step
            have -= step
            self._land(step)
        self._begin = begin
        return self._finish(ask)

    def _land(self, count: int) -> None:
        """`count` bytes have landed in the first views."""
        self._left -= count
        ask = self._landing
        if ask is None:
            raise LinkError("protocol", "bytes landed for nobody")
        while count:
            view = self._views[0]
            step = min(count, len(view))
            count -= step
            self._filled += step
            if step < len(view):
                self._views[0] = view[step:]
            else:
                self._views.popleft()
                if ask.landed is not None and self._left + count:  # the last one is told by `_finish`
                    ask.landed(self._index, self._filled)
                    self._index += 1
                    self._filled = 0
        if self._tls is None:
            self._water()

    def _water(self) -> None:
        low = min(self._left, _LOW_WATER) if self._left >= _LOW_WATER_FROM else 1
        if low != self._low and (low == 1 or self._low == 1 or low < self._low):
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low = low

    def _finish(self, ask: Ask) -> bool:
        if self._left or self._end - self._begin < 2:
            return False
        if self._buffer[self._begin : self._begin + 2] != b"\r\n":
            raise LinkError("protocol", f"a value of {self.node}'s is longer than it says")
        self._begin += 2
        self._landing = None
        self._views.clear()
        ask.reply = self._total
        if ask.landed is not None:
            for index in range(self._index, len(ask.sink)):
                ask.landed(index, self._filled)
                self._filled = 0
        return True

    @property
    def encrypted(self) -> bool:
        return self._tls is not None

    @property
    def sleepy(self) -> bool:
        """Whether poll(2) says nothing of bytes that have arrived as long as they are few."""
        return self._low > 1

    @property
    def has_more(self) -> bool:
        """Whether there are bytes behind the last reply that was taken."""
        return self._begin < self._end

    @property
    def unread(self) -> bool:
        """Whether bytes have arrived that poll(2) does not show any more (in OpenSSL's buffer)."""
        sock = self._sock
        return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise LinkError("closed", f"there is no connection to {self.node}")
        return self._sock

    def _broke(self, error: OSError) -> LinkError:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return self._tls_failed(error)
        if self._tls is not None and not self.greeted:
            return self._hung_up("broke the connection")
        return LinkError("closed", f"the connection to {self.node} broke: {_reason(error)}")

    def _hung_up(self, what: str) -> LinkError:
        if self._tls is not None and not self.greeted:  # with TLS 1.3 a client learns late that it was turned away
            return LinkError("connect", f"{self.node} {what} before it answered; does it want a tls_cert?")
        return LinkError("closed", f"{self.node} {what}")


def _take(parts: deque[Part], count: int) -> None:
    """Take the first `count` bytes out."""
    while count:
        part = parts[0]
        if count < len(part):
            parts[0] = memoryview(part)[count:]
            return
        count -= len(part)
        parts.popleft()


def _join(parts: deque[Part]) -> None:
    joined = bytearray()
    while parts and len(joined) + len(parts[0]) <= _TLS_JOIN:
        joined += parts.popleft()
    if joined:
        parts.appendleft(bytes(joined))


def _cut(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the views."""
    found = []
    for view in views:
        if nbytes <= 0:
            break
        found.append(view[:nbytes])
        nbytes -= len(view)
    return found


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
