"""One HTTP/1.1 connection (RFC 9112) whose bodies go straight from and into the caller's memory.

Every wait is bounded twice: by the absolute deadline of the call, and by a longest silence. Bytes are copied by the
kernel only, except what arrives in one read with the headers (at most `_BUFFER` bytes). Over TLS, OpenSSL decrypts
into the destination.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Body", "Connection", "Head", "LinkError", "Stopped", "Timing", "request_head", "too_late"]

_BUFFER = 16 << 10  # also the longest head of an answer
_SLICE = 4 << 20  # sent at a time, so that an early answer (412, 503) is seen before all is sent
_IOV = 512
_TLS_JOIN = 64 << 10  # small pieces are joined up to this: each write over TLS is at least one record
_RESET_S = 0.02  # how exact a timeout is kept while bytes flow, seconds
_LONGEST = 3600.0  # seconds; a socket timeout must be finite
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.ASCII | re.DOTALL)
_INTERIM = (b"HTTP/1.1 1", b"HTTP/1.0 1")


class LinkError(Exception):
    """The connection, not the service, failed. Passes through botocore unchanged.

    Attributes:
        kind: "deadline", "dns", "connect", "tls", "silence", "closed", "short" (cut body) or "protocol".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Timing(NamedTuple):
    """Bounds of one exchange.

    Attributes:
        until: absolute monotonic deadline.
        silence: longest wait for the next byte, in seconds.
    """

    until: float
    silence: float

    def left(self) -> float:
        """Seconds that the next wait may take. Raises `LinkError` at the deadline."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise LinkError("deadline", "the deadline passed")
        return min(left, self.silence, _LONGEST)


class Head(NamedTuple):
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    keep: bool  # the connection may be used again once the body has been read


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request, from headers that are ready to be sent. `Expect` is left out: there is nothing to wait
    for when an early answer is looked for anyway, and silent servers would cost a second. Bodies are wanted as they
    are stored, not compressed by something on the way."""
    lines = [f"{method} {target} HTTP/1.1"]
    plain = False
    for name, value in headers.items():
        if name.lower() != "expect":
            if "\r" in value or "\n" in value:
                raise LinkError("protocol", f"header {name} holds a line break")
            plain = plain or name.lower() == "accept-encoding"
            lines.append(f"{name}: {value}")
    if not plain:
        lines.append("Accept-Encoding: identity")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _header_fields(lines: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise LinkError("protocol", "the server sent a header without a colon")
        name = name.strip().lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    return headers


class Connection:
    """A connected socket. Used by one thread at a time.

    Attributes:
        used: answers read so far; 0 means that a failure cannot be that of an idle connection.
        idle_since: monotonic time at which it was put back.
    """

    __slots__ = ("_begin", "_buffer", "_end", "_poll", "_sock", "_timeout", "_tls", "_view", "idle_since", "used")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._timeout = sock.gettimeout()
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self.used = 0
        self.idle_since = 0.0

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        try:
            self._sock.close()
        except OSError:
            pass

    def _bound(self, seconds: float | None) -> None:
        if seconds != self._timeout:
            self._sock.settimeout(seconds)
            self._timeout = seconds

    def readable(self, seconds: float = 0.0) -> bool:
        """Whether something (an answer, an end) arrives within `seconds`."""
        if self._begin < self._end:
            return True
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    def pull(self) -> bool:
        """Take what has arrived, without waiting. False: nothing of an answer yet (over TLS there are other things).

        Raises:
            LinkError: the connection has ended, or says more than a head.
        """
        if self._end == len(self._buffer):
            raise LinkError("protocol", f"the server's headers exceed {_BUFFER} bytes")
        self._bound(0.0)
        try:
            count = self._sock.recv_into(self._view[self._end :])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise LinkError("closed", f"the connection broke: {_reason(error)}") from error
        if not count:
            raise LinkError("closed", "the server closed the connection")
        self._end += count
        return True

    # Sending.

    def _answered(self) -> bool:
        """Whether the server has said something that ends the sending. Not if it was an interim answer (1xx, which some
        servers send unasked), nor if it was TLS's own: after a handshake session tickets arrive."""
        if not self._poll.poll(0):
            return False
        try:
            self.pull()
        except LinkError:
            return True
        while self._begin < self._end:
            if not _may_be_interim(bytes(self._view[self._begin : min(self._begin + 10, self._end)])):
                return True
            end = self._buffer.find(b"\r\n\r\n", self._begin, self._end)
            if end < 0:
                return self._end == len(self._buffer)
            self._begin = end + 4
        self._begin = self._end = 0
        return False

    def send(self, head: bytes, body: Sequence[memoryview], timing: Timing) -> bool:
        """Send a request. False: the server answered or hung up before it had everything; nothing more was sent.

        Raises:
            LinkError: "deadline", or "silence": the server takes nothing more.
        """
        self._begin = self._end = 0
        pieces = [memoryview(head), *(view for view in body if len(view))]
        try:
            return self._send_records(pieces, timing) if self._tls else self._send_pieces(pieces, timing)
        except TimeoutError as error:
            raise too_late(timing, "takes no more bytes") from error
        except OSError:
            return False  # it may have said why before it hung up

    def _send_pieces(self, pieces: list[memoryview], timing: Timing) -> bool:
        """The socket blocks, with the kernel's own timeout (SO_SNDTIMEO, socket(7)): one system call sends up to
        `_SLICE` bytes, where a non-blocking one would return, and take the GIL, for each piece of the send buffer."""
        sock, at = self._sock, 0
        while at < len(pieces):
            if at and self._answered():
                return False
            self._bound(None)
            size, end = 0, at
            while end < len(pieces) and end - at < _IOV and size < _SLICE:
                size += len(pieces[end])
                end += 1
            batch = pieces[at:end]
            if size > _SLICE:
                batch[-1] = batch[-1][: len(batch[-1]) - (size - _SLICE)]
            left = timing.left()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(left))
            try:
                sent = sock.sendmsg(batch)
            except BlockingIOError as error:
                raise TimeoutError from error
            while sent and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if sent:
                pieces[at] = pieces[at][sent:]
        return True

    def _send_records(self, pieces: list[memoryview], timing: Timing) -> bool:
        joined = bytearray()
        since = 0
        for number, piece in enumerate(pieces):
            last = number + 1 == len(pieces)
            if len(piece) + len(joined) < _TLS_JOIN and not last:
                joined += piece
                continue
            for view in (memoryview(joined), piece) if joined else (piece,):
                for begin in range(0, len(view), _SLICE):
                    part = view[begin : begin + _SLICE]
                    if since >= _SLICE:
                        since = 0
                        if self._answered():
                            return False
                    while len(part):
                        self._bound(timing.left())
                        sent = self._sock.send(part)
                        since += sent
                        part = part[sent:]
            joined = bytearray()
        return True

    # Receiving.

    def receive(self, into: memoryview, timing: Timing) -> int:
        """At least one byte into `into`; 0 at the end of the stream."""
        have = self._end - self._begin
        if have:
            count = min(have, len(into))
            into[:count] = self._view[self._begin : self._begin + count]
            self._begin += count
            return count
        self._bound(timing.left())
        try:
            return self._sock.recv_into(into)
        except TimeoutError as error:
            raise too_late(timing, "fell silent") from error
        except OSError as error:
            raise LinkError("closed", f"the connection broke: {_reason(error)}") from error

    def fill(self, into: memoryview, timing: Timing) -> int:
        """All of `into`; fewer bytes at the end of the stream. The hot loop: with a far deadline one system call and
        one look at the clock per piece."""
        done, size = 0, len(into)
        sock = self._sock
        if self._begin < self._end:
            done = self.receive(into, timing)
        set_at = -_LONGEST
        while done < size:
            now = time.monotonic()
            if now - set_at > _RESET_S or now >= timing.until:
                self._bound(timing.left())
                set_at = now
            try:
                count = sock.recv_into(into[done:] if done else into)
            except TimeoutError as error:
                raise Stopped(done, too_late(timing, "fell silent")) from error
            except OSError as error:
                raise Stopped(done, LinkError("closed", f"the connection broke: {_reason(error)}")) from error
            if not count:
                break
            done += count
        return done

    def _more(self, timing: Timing) -> None:
        """More of a head into the buffer."""
        if self._begin and self._end == len(self._buffer):
            rest = self._end - self._begin
            self._buffer[:rest] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, rest
        if self._end == len(self._buffer):
            raise LinkError("protocol", f"the server's headers exceed {_BUFFER} bytes")
        self._bound(timing.left())
        try:
            count = self._sock.recv_into(self._view[self._end :])
        except TimeoutError as error:
            raise too_late(timing, "does not answer") from error
        except OSError as error:
            raise LinkError("closed", f"the connection broke: {_reason(error)}") from error
        if not count:
            raise LinkError("closed", "the server closed the connection before it answered")
        self._end += count

    def read_until(self, mark: bytes, timing: Timing) -> bytes:
        """The bytes before `mark`, which is consumed."""
        while True:
            at = self._buffer.find(mark, self._begin, self._end)
            if at >= 0:
                found = bytes(self._view[self._begin : at])
                self._begin = at + len(mark)
                return found
            self._more(timing)

    def read_head(self, timing: Timing) -> Head:
        """The head of the answer, after any 1xx ones."""
        while True:
            lines = self.read_until(b"\r\n\r\n", timing).decode("latin-1").split("\r\n")
            version, _, rest = lines[0].partition(" ")
            code = rest[:3]
            if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
                raise LinkError("protocol", "the server does not speak HTTP/1.1")
            if code.startswith("1"):
                continue
            self.used += 1
            headers = _header_fields(lines[1:])
            wish = headers.get("connection", "").lower()
            keep = "close" not in wish and (version != "HTTP/1.0" or "keep-alive" in wish)
            return Head(int(code), headers, keep)


class Stopped(Exception):
    """`Connection.fill` ended early, after `done` bytes."""

    def __init__(self, done: int, error: LinkError) -> None:
        super().__init__(str(error))
        self.done = done
        self.error = error


class Body:
    """The body of an answer on a connection: by length, in chunks, or up to the end of the stream.

    Attributes:
        left: bytes left, or None if the answer does not say.
        ended: all of it was read.
    """

    __slots__ = ("_chunk", "_chunked", "_connection", "_first", "_timing", "ended", "left")

    def __init__(self, connection: Connection, method: str, head: Head, timing: Timing) -> None:
        self._connection = connection
        self._timing = timing
        self._chunked = False
        self._chunk = 0
        self._first = True
        self.left: int | None = None
        if method == "HEAD" or head.status in (204, 304):
            self.left = 0
        elif (coding := head.headers.get("transfer-encoding", "").lower()) != "":
            if coding != "chunked":
                raise LinkError("protocol", f"the server sent a body in another encoding ({coding[:20]})")
            self._chunked = True
        elif (length := head.headers.get("content-length")) is not None:
            if not _NUMBER.fullmatch(length):
                raise LinkError("protocol", "the server sent a Content-Length that is not a number")
            self.left = int(length)
        self.ended = self.left == 0

    def readinto(self, into: memoryview) -> int:
        """Fill `into`; fewer bytes only at the end of the body.

        Raises:
            Stopped: the connection ended or fell silent in the middle; it knows how many bytes are there.
        """
        done = 0
        try:
            while done < len(into) and not self.ended:
                done += self._some(into[done:] if done else into)
        except Stopped as stopped:
            raise Stopped(done + stopped.done, stopped.error) from stopped.error
        except LinkError as error:
            raise Stopped(done, error) from error
        return done

    def _some(self, into: memoryview) -> int:
        if self._chunked:
            return self._some_of_chunk(into)
        wanted = into if self.left is None or len(into) <= self.left else into[: self.left]
        count = self._connection.fill(wanted, self._timing)
        if self.left is not None:
            if count < len(wanted):
                short = f"the server closed the connection {self.left - count} bytes before the end of the body"
                raise Stopped(count, LinkError("short", short))
            self.left -= count
            self.ended = self.left == 0
        else:
            self.ended = count < len(wanted)
        return count

    def _some_of_chunk(self, into: memoryview) -> int:
        connection, timing = self._connection, self._timing
        if not self._chunk:
            if not self._first and connection.read_until(b"\r\n", timing):
                raise LinkError("protocol", "a chunk of the body is longer than it says")
            self._first = False
            size = _CHUNK.fullmatch(connection.read_until(b"\r\n", timing))
            if size is None:
                raise LinkError("protocol", "a chunk of the body has no length")
            self._chunk = int(size[1], 16)
            if not self._chunk:
                while connection.read_until(b"\r\n", timing):
                    pass  # trailers
                self.ended = True
                return 0
        count = connection.fill(into[: self._chunk], timing)
        if count < min(len(into), self._chunk):
            raise Stopped(count, LinkError("short", "the server closed the connection in the middle of the body"))
        self._chunk -= count
        return count

    def read(self, most: int) -> bytes:
        """All of the body, if it is not longer than `most` bytes.

        Raises:
            LinkError: it is, or it was cut.
        """
        parts = []
        total = 0
        try:
            while not self.ended:
                size = 64 << 10 if self.left is None else min(self.left, 1 << 20)
                part = bytearray(size)
                count = self.readinto(memoryview(part))
                total += count
                if total > most:
                    raise LinkError("protocol", f"the server's answer exceeds {most} bytes")
                parts.append(bytes(part[:count]))
        except Stopped as stopped:
            raise stopped.error from stopped
        return b"".join(parts)


def _may_be_interim(begin: bytes) -> bool:
    """Whether an answer of which this is the beginning is a 1xx, or may still become one."""
    return any(begin.startswith(interim) or interim.startswith(begin) for interim in _INTERIM)


def _timeval(seconds: float) -> bytes:
    """A struct timeval; 0 would be no timeout at all."""
    microseconds = max(1, int(seconds * 1e6))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)


def too_late(timing: Timing, what: str) -> LinkError:
    """The error of a wait that ended: by the deadline, or because the server was silent for too long."""
    if time.monotonic() >= timing.until:
        return LinkError("deadline", f"the deadline passed: the server {what}")
    return LinkError("silence", f"the server {what}: no byte within {timing.silence:.3g} s")


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
