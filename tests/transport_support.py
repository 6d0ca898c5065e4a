"""Servers and clients of each transport, in this process and in processes of their own, for the transports' tests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.buffers import Slab
from kvstore_transport import Answer, Channel, Handler, Incoming, Server, TransportError, connect
from kvstore_transport.bodies import TRANSPORTS, way
from kvstore_transport.errors import TransportUnavailable
from kvstore_transport.inproc import InprocServer

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
POISON = 0xA5


class Kind(NamedTuple):
    """A transport in one of its settings.

    Attributes:
        over: "inproc", "tcp" or "unix": how the control connection travels.
        transport: how bodies travel.
    """

    name: str
    over: str
    transport: str
    tls: bool = False
    sums: bool = False

    def missing(self) -> str:
        """Why it cannot be used here; "" if it can."""
        if self.over == "inproc":
            return ""
        try:
            way(self.transport).facts(server=False)
        except TransportUnavailable as error:
            return str(error)
        return ""


TRANSPORTS["ucx_net"] = "ucx:UcxNetworkWay"  # ucx without shared memory, which it would use on one host

KINDS = [
    Kind("inproc", "inproc", "inproc"),
    Kind("tcp", "tcp", "tcp"),
    Kind("tls", "tcp", "tcp", tls=True),
    Kind("tcp_sums", "tcp", "tcp", sums=True),
    Kind("unix", "unix", "tcp"),
    Kind("shm", "unix", "shm"),
    Kind("shm_sums", "unix", "shm", sums=True),
    Kind("ucx", "tcp", "ucx"),
    Kind("ucx_tcp", "tcp", "ucx_net"),
]
BY_NAME = {kind.name: kind for kind in KINDS}
REMOTE = [kind for kind in KINDS if kind.over != "inproc"]


def params(kinds: Sequence[Kind]) -> list[Any]:
    """For `pytest.fixture(params=…)`."""
    import pytest  # not in the processes that only serve: half of their start

    leaves = pytest.mark.leaves("the UCX context and its descriptors are the process's")
    return [
        pytest.param(kind, id=kind.name, marks=[leaves] if kind.transport.startswith("ucx") else []) for kind in kinds
    ]


def soon(seconds: float = 30.0) -> float:
    """A deadline that passes only if something hangs."""
    return time.monotonic() + seconds


@functools.cache
def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(the server's, a client's that trusts it)."""
    from tests.servers.certificate import make_certificate

    with tempfile.TemporaryDirectory() as folder:
        path = make_certificate(Path(folder) / "cert.pem")
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(path)
        return server, ssl.create_default_context(cafile=path)


def digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes in which a shifted or missing piece shows."""
    block = hashlib.shake_256(seed.to_bytes(8, "little")).digest(min(nbytes, 1 << 20) or 1)
    return (block * (nbytes // len(block) + 1))[:nbytes]


# Memory.


class Memory:
    """Memory of the sort that a transport likes: shared memory for shm, else private."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.slabs: list[Slab] = []

    def take(self, nbytes: int, fill: bytes = b"", *, shared: bool = True) -> memoryview:
        slab = Slab(max(nbytes, 1), shared=shared)
        self.slabs.append(slab)
        self._stack.callback(slab.close)
        slab.view[: len(fill)] = fill
        view = slab.view[:nbytes]
        self._stack.callback(_let_go, view)
        return view

    def register(self, place: Channel | Server) -> None:
        for slab in self.slabs:
            place.register(slab.view, slab.fd)

    def close(self) -> None:
        self._stack.close()


def _let_go(view: memoryview) -> None:
    """A mapping, and its descriptor, lives as long as a view of it."""
    with contextlib.suppress(BufferError):
        view.release()


# In this process.


class Service:
    """A server of one kind and the way to it.

    Attributes:
        server: None if it is in-process.
    """

    def __init__(self, kind: Kind, handler: Handler, folder: Path, **options: Any) -> None:
        self.kind = kind
        self._stack = contextlib.ExitStack()
        self.server: Server | None = None
        self.inproc: InprocServer | None = None
        if kind.over == "inproc":
            self.inproc = InprocServer(handler, **options)
            self.address = "inproc"
            return
        place: dict[str, Any] = {"listen": ("127.0.0.1", 0)}
        if kind.over == "unix":
            place = {"path": str(folder / f"{os.urandom(3).hex()}.sock")}
        tls = tls_contexts()[0] if kind.tls else None
        self.server = Server(handler, **place, tls=tls, transports=(kind.transport,), **options)
        self.address = self.server.address or self.server.path

    def connect(self, **options: Any) -> Channel:
        """A channel; deadline half a minute. It is closed with the service, if nobody did so before."""
        if self.inproc is not None:
            options.pop("deadline", None)
            options.pop("body_sums", None)
            channel = self.inproc.connect(**options)
        else:
            channel = connect_to(self.kind, self.address, **options)
        self._stack.callback(channel.close)
        return channel

    def close(self, drain_s: float = 0.0) -> None:
        server = self.inproc or self.server
        assert server is not None
        server.close(drain_s)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.close()


def connect_to(kind: Kind, address: str, **options: Any) -> Channel:
    given: dict[str, Any] = {
        "deadline": soon(),
        "transport": kind.transport,
        "body_sums": kind.sums,
        "tls": tls_contexts()[1] if kind.tls else None,
        **options,
    }
    return connect(address, **given)


def plan_into(*views: memoryview) -> Callable[[int, bytes, int], Sequence[memoryview]]:
    return lambda status, meta, nbytes: views


ECHO, SINK, MAKE, STOP_SELF, KILL_SELF, WHAT = 1, 2, 3, 4, 5, 6
"""Ops of `Toy`."""


class Toy:
    """A handler: ECHO the body, SINK it, MAKE one as long as meta says. Counts what was given away and came back."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory
        self.given = self.back = 0
        self.heard: list[str] = []
        self._lock = threading.Lock()
        self._made: dict[int, memoryview] = {}

    def __call__(self, incoming: Incoming) -> Answer:
        if incoming.op in (STOP_SELF, KILL_SELF):
            os.kill(os.getpid(), signal.SIGSTOP if incoming.op == STOP_SELF else signal.SIGKILL)
        if incoming.op == MAKE:
            return self._give(0, incoming.meta, [self.made(int.from_bytes(incoming.meta, "little"))])
        if incoming.op == WHAT:
            with self._lock:
                return Answer(0, "\n".join(self.heard).encode())
        view = memoryview(bytearray(incoming.body_nbytes))
        try:
            incoming.receive([view])
        except TransportError as error:
            self._hear(f"failed {type(error).__name__}")
            raise
        self._hear(f"received {digest(view).hex()}")
        if incoming.op == ECHO:
            return self._give(incoming.op, incoming.meta, [view.toreadonly()] if view else [])
        return self._give(incoming.op, digest(view), [])

    def made(self, nbytes: int) -> memoryview:
        with self._lock:
            if nbytes not in self._made:
                data = pattern(nbytes, seed=nbytes)
                self._made[nbytes] = self.memory.take(nbytes, data) if self.memory else memoryview(data)
            return self._made[nbytes]

    def _hear(self, what: str) -> None:
        with self._lock:
            self.heard.append(what)

    def _give(self, status: int, meta: bytes, body: Sequence[memoryview]) -> Answer:
        with self._lock:
            self.given += 1
        return Answer(status, meta, body, self._done)

    def _done(self) -> None:
        with self._lock:
            self.back += 1


# In processes of their own.


class Remote(NamedTuple):
    """A `Toy` served by a process. `stop`, `go_on` and `kill` are SIGSTOP, SIGCONT and SIGKILL."""

    process: subprocess.Popen[str]
    kind: Kind
    address: str

    def connect(self, **options: Any) -> Channel:
        return connect_to(self.kind, self.address, **options)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: _state(self.process.pid) == "T")

    def wait_stopped(self) -> None:
        wait_until(lambda: _state(self.process.pid) == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def remote(kind: Kind, folder: Path, *, listen: str = "", code: str = "") -> Iterator[Remote]:
    """A server process, killed at the end. `listen`: at this place and no other. `code`: what the process runs instead
    of this module, with the same arguments. TLS is not offered."""
    place = listen or (str(folder / f"{os.urandom(3).hex()}.sock") if kind.over == "unix" else "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, *(["-c", code] if code else ["-m", "tests.transport_support"]), kind.name, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server process did not start"
        yield Remote(process, kind, address)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look every few milliseconds, until it holds."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        pause.wait(0.005)


def context_switches(pid: int | str = "self") -> int:
    """Voluntary context switches of all threads of a process: how often one went to sleep, so how often one woke."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/task/{task}/status").read_text(encoding="ascii")
            total += int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def _main(name: str, place: str) -> None:
    kind = BY_NAME[name]
    memory = Memory()
    toy = Toy(memory if kind.transport == "shm" else None)
    for nbytes in (16 * MIB,) if kind.transport == "shm" else ():
        toy.made(nbytes)
    where: dict[str, Any] = {"path": place}
    if kind.over != "unix":
        host, _, port = place.rpartition(":")
        where = {"listen": (host, int(port))}
    server = Server(toy, **where, transports=(kind.transport,))
    memory.register(server)
    print(server.address or server.path, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    server.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
