"""Servers that misbehave as Valkey would, or would not: scripted ones, and a bad link in front of a real one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

__all__ = ["BadLink", "Scripted", "array", "black_hole", "bulk", "commands", "hello"]

Words = list[bytes]


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def array(*replies: bytes) -> bytes:
    return b"*%d\r\n" % len(replies) + b"".join(replies)


def hello(*, version: bytes = b"7.0.15", mode: bytes = b"standalone", role: bytes = b"master") -> bytes:
    """The reply to HELLO 2."""
    facts = {b"server": b"redis", b"version": version, b"mode": mode, b"role": role}
    return array(*(bulk(word) for pair in facts.items() for word in pair), bulk(b"proto"), b":2\r\n")


def commands(sock: socket.socket) -> Iterator[Words]:
    """The commands that come over a connection, until it ends."""
    with contextlib.suppress(OSError), sock.makefile("rb") as file:
        while head := file.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int(file.readline()[1:])
                words.append(file.read(size + 2)[:size])
            yield words


class _Listener:
    """Accepts on a free loopback port, each connection in a thread of its own; a context manager.

    Attributes:
        port: where.
        accepted: connections so far.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._open = True
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _spawn(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(sock,), daemon=True, name="valkey-double")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock = listener.accept()[0]
            except OSError:
                return
            self.accepted += 1
            self._keep(sock)
            self._spawn(self._serve, sock)

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks.add(sock)
            if not self._open:
                self._shut(sock)

    def _serve(self, sock: socket.socket) -> None:
        raise NotImplementedError

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """End all connections now."""
        with self._lock:
            for sock in self._socks:
                self._shut(sock)

    def refuse(self) -> None:
        """End all connections, and accept no more: whoever connects is refused."""
        self._shut(self._listener)
        self._listener.close()
        self.hang_up()

    def close(self) -> None:
        with self._lock:
            self._open = False
        self.refuse()
        for thread in self._threads:
            thread.join(10)
        for sock in self._socks:
            sock.close()

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Scripted(_Listener):
    """A server whose replies are the test's.

    Args:
        reply: called with each command: what is sent back; None: nothing, ever; a list of bytes: one piece after the
            other, as packets of their own. HELLO and CLUSTER SLOTS have usual answers unless it gives one.

    Attributes:
        heard: all commands, in order.
    """

    def __init__(
        self, reply: Callable[[Words], bytes | Sequence[bytes] | None], *, greeting: bytes | None = None
    ) -> None:
        self._reply = reply
        self._greeting = greeting or hello()
        self.heard: list[Words] = []
        super().__init__()

    def __enter__(self) -> Scripted:
        return self

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for words in commands(sock):
            self.heard.append(words)
            with contextlib.suppress(OSError):
                said = self._reply(words)
                if said is None and words[0] == b"HELLO":
                    said = self._greeting
                elif said is None and words[:2] == [b"CLUSTER", b"SLOTS"]:
                    said = b"-ERR This instance has cluster support disabled\r\n"
                for piece in [said] if isinstance(said, bytes) else said or ():
                    sock.sendall(piece)
                    if not isinstance(said, bytes):
                        time.sleep(0.001)  # so that they are packets of their own

    def count(self, verb: bytes) -> int:
        return sum(words[0] == verb for words in self.heard)


class BadLink(_Listener):
    """A link to a real server; what is wrong with it may change at any time.

    Attributes:
        mode: "pass"; "silent": requests go through, answers do not; "drip": a byte of the answer every `drip_s`;
            "stall": nothing goes through at all.
        cut: after so many bytes of answers, all connections end (RST or FIN, as the kernel likes); None: never.
        pause: called with the number of bytes of answers so far before more are passed on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.mode = "pass"
        self.drip_s = 0.05
        self.cut: int | None = None
        self.pause: Callable[[int], None] | None = None
        self._changed = threading.Event()
        super().__init__()

    def __enter__(self) -> BadLink:
        return self

    def drop_answers(self) -> None:
        """All connections end, with what is on the way; new ones pass."""
        self.hang_up()
        self.mode = "pass"

    def close(self) -> None:
        self.mode, self.cut, self.pause = "pass", None, None
        self._changed.set()
        super().close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            upstream = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            self._shut(sock)
            return
        self._keep(upstream)
        self._spawn(lambda _: self._pass(upstream, sock, answers=True), sock)
        self._pass(sock, upstream, answers=False)

    def _pass(self, source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        total = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while self.mode == "stall" or (answers and self.mode == "silent"):
                    if self._changed.wait(0.01) and not self._open:
                        return
                if answers:
                    if self.pause is not None:
                        self.pause(total)
                    total += len(data)
                    if self.cut is not None and total > self.cut:
                        target.sendall(data[: max(0, len(data) - (total - self.cut))])
                        break
                if answers and self.mode == "drip":
                    for at in range(len(data)):
                        target.sendall(data[at : at + 1])
                        if self._changed.wait(self.drip_s):
                            break
                    continue
                target.sendall(data)
        self._shut(source)
        self._shut(target)


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that answers no SYN: its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield port
