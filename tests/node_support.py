"""Nodes for tests: servers in this process, processes of their own, and pools of clients on them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.keys import Key
from kvstore_backends.node import NodeBackend, NodeClient
from kvstore_backends.node.members import Member, parse_authority
from kvstore_backends.node.options import Settings
from kvstore_backends.node_server import NodeServer
from kvstore_transport import connect

MEMORY = 64 << 20
PATIENCE_S = 60.0


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def keys(count: int, name: str = "k") -> list[Key]:
    return [key(f"{name}{index}") for index in range(count)]


def data(nbytes: int, tag: object = "") -> bytes:
    """The same bytes in every process."""
    block = hashlib.sha512(f"{tag}/{nbytes}".encode()).digest()
    return (block * (nbytes // len(block) + 1))[:nbytes]


def put(backend: Any, records: dict[Key, bytes], *, seconds: float = PATIENCE_S) -> list[Outcome]:
    writes = [Write(each, [memoryview(value)]) for each, value in records.items()]
    outcomes: list[Outcome] = backend.put(writes, deadline=soon(seconds))
    return outcomes


def get(backend: Any, some: Sequence[Key], nbytes: int, *, seconds: float = PATIENCE_S) -> list[tuple[Outcome, bytes]]:
    memory = [bytearray(nbytes) for _ in some]
    reads = [Read(each, memoryview(dst)) for each, dst in zip(some, memory, strict=True)]
    outcomes: list[Outcome] = backend.get_into(reads, deadline=soon(seconds))
    return [(outcome, bytes(dst[: outcome.nbytes])) for outcome, dst in zip(outcomes, memory, strict=True)]


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def settings(addresses: Sequence[str], **options: Any) -> Settings:
    """For tests: tcp, unless they say otherwise."""
    return Settings(members=parse_authority(",".join(addresses)), **{"transport": "tcp", **options})


def pool(addresses: Sequence[str], **options: Any) -> NodeBackend:
    return NodeBackend(settings(addresses, **options))


def client(address: str, *, lanes: int = 4, **options: Any) -> NodeClient:
    """A bare client of one node."""
    options = {"transport": "tcp", **options}
    return NodeClient(lambda deadline: connect(address, deadline=deadline, **options), name=address, lanes=lanes)


@contextlib.contextmanager
def servers(count: int, **options: Any) -> Iterator[list[NodeServer]]:
    """Nodes in this process."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(NodeServer(**{"memory_bytes": MEMORY, **options})) for _ in range(count)]


def copies(addresses: Sequence[str], some: Key, nbytes: int, **options: Any) -> list[bytes | None]:
    """What each node has of a record, behind the pool's back."""
    found: list[bytes | None] = []
    for address in addresses:
        with contextlib.closing(client(address, lanes=1, **options)) as each:
            ((outcome, value),) = get(each, [some], nbytes)
            if outcome.error is not None:
                raise outcome.error
            found.append(value if outcome.ok else None)
    return found


def wait_until(done: Callable[[], bool], what: str, *, seconds: float = PATIENCE_S) -> None:
    """Until something that happens in the background has happened."""
    end = soon(seconds)
    pause = threading.Event()
    while not done():
        if time.monotonic() >= end:
            raise AssertionError(f"not in {seconds} s: {what}")
        pause.wait(0.005)


_SERVE = """
import sys, threading
from kvstore_backends.node_server import NodeServer
node = NodeServer(sys.argv[1], memory_bytes=int(sys.argv[2]), token=sys.argv[3].encode())
print(node.address, flush=True)
sys.stdin.read()
node.close()
"""


class NodeProcess:
    """A node in a process of its own, which can be killed, stopped and started again on the same port.

    Args:
        command: what the process is started by ("ip netns exec …").
    """

    def __init__(
        self, *, memory: int = MEMORY, token: str = "", host: str = "127.0.0.1", command: Sequence[str] = ()
    ) -> None:
        self._memory, self._token, self._command = memory, token, command
        self.address = f"{host}:0"
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Raises if it cannot listen on the port it had."""
        process = subprocess.Popen(
            [*self._command, sys.executable, "-c", _SERVE, self.address, str(self._memory), self._token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KVSTORE_POOL_CANARY": "0"},
        )
        self._process = process
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            self.kill()
            raise RuntimeError(f"no node at {self.address}")
        self.address = address

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """As a machine that hangs: connections stay, nothing answers. All its threads have stopped on return."""
        self.signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def processes(count: int, **options: Any) -> Iterator[list[NodeProcess]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(NodeProcess(**options)) for _ in range(count)]


def member(address: str, name: str = "", weight: float = 1.0) -> Member:
    return Member(name or address, address, weight)


FOREVER = math.inf
