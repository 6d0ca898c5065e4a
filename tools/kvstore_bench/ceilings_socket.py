"""What blocking sockets on loopback do, and nothing else: the ceiling next to `node://` over TCP.

This file imports nothing of kvstore.

    python ceilings_socket.py         serves, prints its port, and ends with its standard input

A request is 9 bytes: b"G" or b"P", and the bytes of body (u64). A get is answered with the body, a put with one byte.
One thread and one buffer per connection, one system call per send and receive where the kernel takes it all.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

if __package__:
    from .ceilings import Job, split
    from .processes import cpu_of

__all__ = ["RawClient", "RawServer", "SocketGet", "SocketPut", "runs"]

REQUEST = struct.Struct("<cQ")
MOST = 64 << 20
RUN_BYTES = 16 << 20


def _fill(sock: socket.socket, view: memoryview) -> bool:
    """Receive exactly `view`; False if the other side ended the connection."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)
        if not got:
            return False
        at += got
    return True


class RawClient:
    """One connection. `get` fills the given view, `put` sends it."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._short = memoryview(bytearray(1))

    def get(self, view: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"G", len(view)))
        if not _fill(self._sock, view):
            raise ConnectionError("the raw socket server ended the connection")

    def put(self, view: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"P", len(view)))
        self._sock.sendall(view)
        if not _fill(self._sock, self._short):
            raise ConnectionError("the raw socket server ended the connection")

    def close(self) -> None:
        self._sock.close()


class RawServer:
    """This file as a process of its own; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            self.close()
            raise OSError("the raw socket server did not start")
        self.port = int(line)
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def runs(region: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
    """The views, joined where they are neighbours in `region`, up to 16 MiB each: a ceiling knows no records."""
    stride = len(views[0])
    per = max(1, RUN_BYTES // stride) if stride % 4096 == 0 else 1  # otherwise there are gaps
    return (
        [*views]
        if per == 1
        else [region[at * stride : min(at + per, len(views)) * stride] for at in range(0, len(views), per)]
    )


class _Side:
    """Connections by lane, one request for each view of a lane's share."""

    repeatable = True
    name = "raw socket"
    operation: str

    def __init__(self, server: RawServer, views: Sequence[memoryview]) -> None:
        self._server, self._views = server, views
        self._clients: list[RawClient] = []

    def cpu_s(self) -> float:
        return time.process_time() + cpu_of(self._server.pid)

    def jobs(self, lanes: int) -> list[Job]:
        parts = split(len(self._views), lanes)
        while len(self._clients) < len(parts):
            self._clients.append(RawClient(self._server.port))
        return [
            self._job(getattr(client, self.operation), self._views[part.start : part.stop])
            for client, part in zip(self._clients, parts, strict=False)
        ]

    @staticmethod
    def _job(call: object, views: Sequence[memoryview]) -> Job:
        def job() -> None:
            for view in views:
                call(view)  # type: ignore[operator]

        return job

    def settle(self, rounds: int) -> int:
        return rounds * sum(map(len, self._views))

    def close(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()


class SocketGet(_Side):
    """The server's bytes into the views."""

    operation = "get"


class SocketPut(_Side):
    """The views to the server, which keeps nothing."""

    operation = "put"


def _serve(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(b"\xa5") * MOST)  # real pages, as records have
    head = memoryview(bytearray(REQUEST.size))
    with sock:
        while _fill(sock, head):
            op, nbytes = REQUEST.unpack(head)
            if op == b"G":
                sock.sendall(memory[:nbytes])
            else:
                if not _fill(sock, memory[:nbytes]):
                    return
                sock.sendall(b"!")


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
