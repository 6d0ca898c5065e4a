"""The ceiling of bench_transport.py: blocking sockets on loopback, nothing else. Imports nothing of kvstore.

    python tests/bench/raw_sockets.py         serves, prints its port, and ends with its standard input

A request is 17 bytes: b"G" or b"P", and two u64: bytes of body, and a number that comes back. A get is answered with
the body, a put with 8 bytes. One thread and one buffer per connection, one system call per send and receive.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable

REQUEST = struct.Struct("<cQQ")
MOST = 64 << 20


def fill(sock: socket.socket, view: memoryview) -> bool:
    """Receive exactly `view`; False if the other side ended the connection."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)
        if not got:
            return False
        at += got
    return True


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RawClient:
    """One connection. `get` fills the given view, `put` sends it."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        tune(self._sock)
        self._short = memoryview(bytearray(8))

    def get(self, view: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"G", len(view), 0))
        if not fill(self._sock, view):
            raise ConnectionError("the server ended the connection")

    def put(self, view: memoryview) -> None:
        self._sock.sendall(REQUEST.pack(b"P", len(view), 0))
        self._sock.sendall(view)
        if not fill(self._sock, self._short):
            raise ConnectionError("the server ended the connection")

    def job(self, op: str, view: memoryview) -> Callable[[], None]:
        return (lambda: self.get(view)) if op == "get" else (lambda: self.put(view))

    def close(self) -> None:
        self._sock.close()


def _serve(sock: socket.socket) -> None:
    tune(sock)
    memory = memoryview(bytearray(MOST))
    head = memoryview(bytearray(REQUEST.size))
    with sock:
        while fill(sock, head):
            op, nbytes, _ = REQUEST.unpack(head)
            if op == b"G":
                sock.sendall(memory[:nbytes])
            else:
                if not fill(sock, memory[:nbytes]):
                    return
                sock.sendall(bytes(8))


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
