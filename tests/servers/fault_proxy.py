"""An HTTP proxy in this process that is a bad network, or a bad server, exactly when told to be.

    with FaultProxy(upstream_port) as proxy:
        proxy.next(Cut("rst", after=1000), Answer(503, "SlowDown"), only="GET")  # the next GET, then the one after it
        proxy.always(Link(latency_s=0.02, bytes_per_s=200e6))                    # every request that no script takes
        ...
        assert proxy.count("GET") == 3

Order and number are the script's, never luck: each request takes the first entry that is meant for it. What happens
to connections is told by `refuse`, `black_hole` and `recover`. One thread with an event loop of its own; `stop` (or
leaving the block) ends every connection and joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

__all__ = ["Answer", "Cut", "Drip", "Fault", "FaultProxy", "Flip", "IgnoreRange", "Link", "Request", "Run", "Silence"]

_PIECE = 1 << 18
_HEAD_MAX = 1 << 16
_T = TypeVar("_T")


class Request(NamedTuple):
    """One request as it came: `headers` with lower-case names, `connection` counts from 0."""

    method: str
    target: str
    headers: dict[str, str]
    connection: int


class Fault:
    """What happens to one request. The subclasses say what."""


@dataclass(frozen=True)
class Link(Fault):
    """Nothing bad: an answer later by `latency_s`, bodies at `bytes_per_s` shared by all connections (0: no limit)."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Cut(Fault):
    """Break off after `after` bytes of a body: "rst" resets, "fin" closes cleanly, "stall" says no more.

    `after=None`, in the response: before its first byte, when the server has done its work. `where="request"`: after so
    many bytes of the request's body, which the server then never gets whole.
    """

    how: Literal["rst", "fin", "stall"]
    after: int | None = 0
    where: Literal["request", "response"] = "response"


@dataclass(frozen=True)
class Silence(Fault):
    """Read the request, never answer. The server does not hear of it unless `forward`."""

    forward: bool = False


@dataclass(frozen=True)
class Answer(Fault):
    """Read the request and answer in the server's place, with S3's XML (or `body`)."""

    status: int
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    message: str = "scripted"


@dataclass(frozen=True)
class Flip(Fault):
    """Flip all bits of byte `at` of the response's body."""

    at: int


@dataclass(frozen=True)
class Drip(Fault):
    """The response's body, so many bytes at a time, `every_s` seconds apart."""

    nbytes: int = 1
    every_s: float = 0.05


@dataclass(frozen=True)
class IgnoreRange(Fault):
    """A server that does not know ranges: the whole object, with 200."""


@dataclass(frozen=True)
class Run(Fault):
    """Call `function` (in a thread) before the request is forwarded: replace the object just now, for instance."""

    function: Callable[[], object]


@dataclass
class _Entry:
    fault: Fault
    matches: Callable[[Request], bool]
    left: int | None  # None: for ever


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    up_reader: asyncio.StreamReader | None = None
    up_writer: asyncio.StreamWriter | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class _Gone(Exception):
    """This connection is over."""


class FaultProxy:
    """See the module. `endpoint` is its URL; `requests` and `connections` are what has come so far."""

    def __init__(self, upstream_port: int, *, host: str = "127.0.0.1") -> None:
        self._upstream, self._host = upstream_port, host
        self._lock = threading.Lock()
        self._script: list[_Entry] = []
        self._base: Fault = Link()
        self._link_free = 0.0
        self._hole = False
        self._fillers: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._open: dict[int, _Connection] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.requests: list[Request] = []
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())
        self.endpoint = f"http://{host}:{self.port}"

    # What a test says.

    def next(self, *faults: Fault, only: str | None = None, match: Callable[[Request], bool] | None = None) -> None:
        """The next requests get these faults, one each, in order. `only`: of this method; `match`: where it is true."""
        self._add(faults, only, match, 1)

    def repeat(
        self, fault: Fault, times: int, *, only: str | None = None, match: Callable[[Request], bool] | None = None
    ) -> None:
        """The next `times` requests get this fault."""
        self._add((fault,), only, match, times)

    def every(self, fault: Fault, *, only: str | None = None, match: Callable[[Request], bool] | None = None) -> None:
        """All requests that it is meant for get this fault, until `clear`."""
        self._add((fault,), only, match, None)

    def _add(
        self,
        faults: tuple[Fault, ...],
        only: str | None,
        match: Callable[[Request], bool] | None,
        times: int | None,
    ) -> None:
        def matches(request: Request) -> bool:
            return (only is None or request.method == only) and (match is None or match(request))

        with self._lock:
            self._script += [_Entry(fault, matches, times) for fault in faults]

    def always(self, fault: Fault) -> None:
        """What happens to requests that no script takes."""
        self._base = fault

    def clear(self) -> None:
        """Forget all scripts; the link is perfect again."""
        with self._lock:
            self._script.clear()
        self._base = Link()

    @property
    def pending(self) -> int:
        """Scripted faults that no request has taken yet (those of `every` not counted)."""
        with self._lock:
            return sum(entry.left or 0 for entry in self._script)

    def count(self, method: str | None = None) -> int:
        """Requests so far, of one method or all."""
        return sum(method is None or request.method == method for request in list(self.requests))

    def refuse(self) -> None:
        """From now on connections are refused, and those that are open are reset."""
        self._call(self._stop_listening())
        self._call(self._reset_all())

    def black_hole(self) -> None:
        """From now on nothing is answered: a connection is not even accepted (its SYN is dropped, as by a firewall),
        and those that are open fall silent."""
        self._hole = True
        self._call(self._stop_listening())
        hole = self._bind(backlog=0)
        self._listener = hole
        for _ in range(64):  # fill the accept queue; then the kernel drops what comes
            filler = socket.socket()
            filler.setblocking(False)
            self._fillers.append(filler)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self._host, self.port))
            if not _connected(filler):
                return
        raise RuntimeError("the kernel goes on accepting connections")

    def recover(self) -> None:
        """Listen again after `refuse` or `black_hole`. Connections from before are reset."""
        self._call(self._stop_listening())
        self._call(self._reset_all())
        self._hole = False
        self._call(self._listen())

    def drop_connections(self) -> None:
        """Reset every open connection, idle ones too (a load balancer that restarts)."""
        self._call(self._reset_all())

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self._stop_listening())
        self._call(self._reset_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    # Listening.

    def _bind(self, *, backlog: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self.port))
        listener.listen(backlog)
        listener.setblocking(False)
        return listener

    async def _listen(self) -> None:
        listener = self._bind(backlog=512)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._accepted, sock=listener, limit=_HEAD_MAX)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()

    async def _reset_all(self) -> None:
        for connection in list(self._open.values()):
            _reset(connection.writer)
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop

    # One connection.

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        connection = _Connection(reader, writer, self.connections)
        self.connections += 1
        self._open[connection.number] = connection
        try:
            while await self._one(connection):
                pass
        except (_Gone, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._open.pop(connection.number, None)
            self._running.discard(task)
            for end in (connection.up_writer, writer):
                if end is not None:
                    end.close()

    def _fault_for(self, request: Request) -> Fault:
        with self._lock:
            self.requests.append(request)
            for index, entry in enumerate(self._script):
                if entry.matches(request):
                    if entry.left is not None:
                        entry.left -= 1
                        if entry.left <= 0:
                            del self._script[index]
                    return entry.fault
        return self._base

    async def _one(self, connection: _Connection) -> bool:
        """Serve one request. False when the client has gone."""
        try:
            head = await connection.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        start, headers = _parse(head)
        method, target, _ = start.split(" ", 2)
        request = Request(method, target, headers, connection.number)
        await self._listening()
        fault = self._fault_for(request)
        if isinstance(fault, Link) and fault.latency_s:
            await asyncio.sleep(fault.latency_s)
        if isinstance(fault, Run):
            await asyncio.get_running_loop().run_in_executor(None, fault.function)
        if isinstance(fault, Answer) or (isinstance(fault, Silence) and not fault.forward):
            await self._swallow(connection, request)
            if isinstance(fault, Silence):
                await self._for_ever(connection)
            assert isinstance(fault, Answer)
            connection.writer.write(_scripted(fault, request.method))
            await connection.writer.drain()
            return True
        if isinstance(fault, IgnoreRange):
            kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"range:")]
            head = b"\r\n".join(kept)
        await self._forward(connection, head, request, fault)
        return await self._respond(connection, request, fault)

    async def _listening(self) -> None:
        """In a black hole nothing comes out any more."""
        while self._hole:
            await asyncio.sleep(3600)

    async def _for_ever(self, connection: _Connection) -> None:
        """Say nothing until the client goes away."""
        while await connection.reader.read(_PIECE):
            pass
        raise _Gone

    async def _swallow(self, connection: _Connection, request: Request) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        left = int(request.headers.get("content-length", 0))
        while left > 0:
            left -= len(await _some(connection.reader, min(left, _PIECE)))
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            await _chunked(connection.reader, _nothing)

    async def _forward(self, connection: _Connection, head: bytes, request: Request, fault: Fault) -> None:
        if connection.up_writer is None:
            connection.up_reader, connection.up_writer = await asyncio.open_connection(
                self._host, self._upstream, limit=_HEAD_MAX
            )
        upstream = connection.up_writer
        assert connection.up_reader is not None
        upstream.write(head)
        await upstream.drain()
        if request.headers.get("expect", "").lower() == "100-continue":
            interim = await connection.up_reader.readuntil(b"\r\n\r\n")
            if b" 100 " not in interim.split(b"\r\n")[0]:
                raise _Gone
            connection.writer.write(interim)
        cut = fault if isinstance(fault, Cut) and fault.where == "request" else None
        left, sent = int(request.headers.get("content-length", 0)), 0
        while left > 0:
            data = await _some(connection.reader, min(left, _PIECE))
            if cut is not None and sent + len(data) > (cut.after or 0):
                upstream.write(data[: max(0, (cut.after or 0) - sent)])
                await upstream.drain()
                await self._break_off(connection, cut.how)
            left -= len(data)
            sent += len(data)
            await self._pace(fault, len(data))
            upstream.write(data)
            await upstream.drain()
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            await _chunked(connection.reader, upstream.write)
            await upstream.drain()

    async def _break_off(self, connection: _Connection, how: str) -> None:
        if how == "stall":
            await self._for_ever(connection)
        if how == "rst":
            _reset(connection.writer)
        raise _Gone

    async def _respond(self, connection: _Connection, request: Request, fault: Fault) -> bool:
        reader, writer = connection.up_reader, connection.writer
        assert reader is not None
        head = await reader.readuntil(b"\r\n\r\n")
        start, headers = _parse(head)
        status = int(start.split(" ", 2)[1])
        await self._listening()
        if isinstance(fault, Silence):
            await self._for_ever(connection)
        cut = fault if isinstance(fault, Cut) and fault.where == "response" else None
        if cut is not None and cut.after is None:
            await self._break_off(connection, cut.how)
        writer.write(head)
        await writer.drain()
        sent = 0

        async def pass_on(data: bytes) -> None:
            nonlocal sent
            await self._listening()
            if cut is not None and sent + len(data) >= (cut.after or 0):
                writer.write(data[: max(0, (cut.after or 0) - sent)])
                await writer.drain()
                await self._flushed(writer)
                await self._break_off(connection, cut.how)
            if isinstance(fault, Flip) and sent <= fault.at < sent + len(data):
                at = fault.at - sent
                data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            sent += len(data)
            if isinstance(fault, Drip):
                for at in range(0, len(data), fault.nbytes):
                    writer.write(data[at : at + fault.nbytes])
                    await writer.drain()
                    await asyncio.sleep(fault.every_s)
                return
            await self._pace(fault, len(data))
            writer.write(data)
            await writer.drain()

        if request.method == "HEAD" or status in (204, 304):
            if cut is not None:
                await self._break_off(connection, cut.how)
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            await _chunked(reader, pass_on)
        else:
            left = int(headers.get("content-length", 0))
            if cut is not None and (not left or not cut.after):
                await self._flushed(writer)
                await self._break_off(connection, cut.how)
            while left > 0:
                data = await _some(
                    reader, min(left, 1 << 16 if isinstance(fault, Link) and fault.bytes_per_s else _PIECE)
                )
                left -= len(data)
                await pass_on(data)
        return headers.get("connection", "").lower() != "close"

    async def _flushed(self, writer: asyncio.StreamWriter) -> None:
        """Until the client's kernel has all of it: a reset would throw away what is still on the way."""
        transport: Any = writer.transport
        while transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        sock = writer.get_extra_info("socket")
        end = time.monotonic() + 1.0
        while _unsent(sock) and time.monotonic() < end:
            await asyncio.sleep(0.001)

    async def _pace(self, fault: Fault, nbytes: int) -> None:
        if isinstance(fault, Link) and fault.bytes_per_s:
            now = time.monotonic()
            self._link_free = max(self._link_free, now) + nbytes / fault.bytes_per_s
            await asyncio.sleep(self._link_free - now)


async def _some(reader: asyncio.StreamReader, most: int) -> bytes:
    data = await reader.read(most)
    if not data:
        raise _Gone
    return data


async def _chunked(reader: asyncio.StreamReader, sink: Callable[[bytes], Any]) -> None:
    """Pass a chunked body on as it is; `sink` may be a coroutine function."""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        data = line + (await reader.readexactly(size + 2) if size else b"")
        while not size:  # the trailer
            more = await reader.readuntil(b"\r\n")
            data += more
            if more == b"\r\n":
                break
        done = sink(data)
        if asyncio.iscoroutine(done):
            await done
        if not size:
            return


def _nothing(data: bytes) -> None:
    return


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    """Start line and headers."""
    start, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return start, headers


def _scripted(fault: Answer, method: str) -> bytes:
    body = fault.body
    if body is None:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message><RequestId>PROXY</RequestId></Error>"
        ).encode()
    lines = [f"HTTP/1.1 {fault.status} Scripted", "Content-Type: application/xml", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fault.headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else body)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _unsent(sock: socket.socket) -> int:
    """Bytes that the other side has not acknowledged (`SIOCOUTQ`, tcp(7))."""
    import fcntl

    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), 0x5411, b"\0" * 4))[0])
    except OSError:
        return 0


def _connected(sock: socket.socket, patience_s: float = 0.05) -> bool:
    import select

    return bool(select.select([], [sock], [], patience_s)[1])
