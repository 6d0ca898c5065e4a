"""A peer's own client, in a process and an interpreter of its own: `python child.py PEER SOCKET`.

This file imports nothing of kvstore, and needs numpy and the peer's wheel. It connects to the Unix socket SOCKET,
starts what the peer consists of, and then does what it is told, one JSON object a line. The first line it writes says
who it is, or `{"error": …}` with what is missing. Each further lane is a connection with a thread of its own.

    load    {size, count}                    memory of `count` records in and out, registered, filled with noise
    fill    {}                               store them, to be read
    run     {op, form, first, count}         the timed part: get or put of some of them, by one of the peer's calls
    settle  {}                               after puts: remove what they stored
    verify  {op}                             how many records come back with other bytes
    drop    {}                               remove everything, give the memory back
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import IO, Any, ClassVar

import numpy as np

HOST = "127.0.0.1"
_START_S = 60.0
_POISON = 0xA5


class Missing(Exception):
    """The peer is not installed, or does not start. The message says what to do."""


class Memory:
    """Anonymous memory in huge pages where there are any, touched once."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, np.uint8)
        self.array[:] = _POISON
        self.address = int(self.array.ctypes.data)
        self.nbytes = nbytes


class Peer(ABC):
    """One peer. `forms`: for each of its operations, the calls that do it."""

    forms: ClassVar[dict[str, tuple[str, ...]]]
    lanes = 1
    name: str
    processes: list[subprocess.Popen[bytes]]

    def __init__(self) -> None:
        self.size = self.count = 0
        self.processes = []

    @property
    def pids(self) -> list[int]:
        """Processes whose CPU belongs to the peer."""
        return [os.getpid(), *(process.pid for process in self.processes)]

    def load(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.source, self.out = Memory(size * count), Memory(size * count)
        random = np.random.Generator(np.random.SFC64(size))
        words = self.source.array[: size * count // 8 * 8].view(np.uint64)
        words[:] = random.integers(0, 1 << 64, len(words), dtype=np.uint64)
        self.register()

    def addresses(self, memory: Memory, first: int, count: int) -> list[int]:
        return [memory.address + index * self.size for index in range(first, first + count)]

    def wrong(self) -> int:
        """Records in `out` that differ from `source`."""
        size = self.size
        return sum(
            not np.array_equal(self.source.array[at : at + size], self.out.array[at : at + size])
            for at in range(0, size * self.count, size)
        )

    @abstractmethod
    def register(self) -> None: ...

    @abstractmethod
    def fill(self) -> None: ...

    @abstractmethod
    def run(self, op: str, form: str, first: int, count: int) -> None: ...

    @abstractmethod
    def settle(self) -> None: ...

    @abstractmethod
    def verify(self, op: str) -> int: ...

    @abstractmethod
    def drop(self) -> None: ...

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process that does not outlive this one, where setpriv(1) is there."""
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return subprocess.Popen([*guard, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def version(*names: str) -> str:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "?"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Mooncake(Peer):
    """Mooncake Store: its master, a process of its own that offers the memory, its client here, over TCP."""

    forms: ClassVar[dict[str, tuple[str, ...]]] = {
        "get": ("get_into", "batch_get_into", "get_into_ranges"),
        "put": ("put_from", "batch_put_from", "put_session"),
    }
    lanes = 4

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        os.environ["MC_TCP_BIND_ADDRESS"] = HOST
        install = "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine, with CUDA)"
        try:
            mooncake = importlib.import_module("mooncake")
            client = importlib.import_module("mooncake.store").MooncakeDistributedStore
        except ModuleNotFoundError as error:
            raise Missing(f"{sys.executable} has no {error.name}: {install}") from error
        except ImportError as error:
            raise Missing(f"{error}; on Debian: apt-get install libibverbs1 libnuma1 libcurl4") from error
        found = version("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
        self.name = f"mooncake {found}"
        folder = os.path.dirname(str(mooncake.__file__))
        port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the processes
        self.processes = [
            start([
                os.path.join(folder, "mooncake_master"), f"-rpc_port={port}", f"-rpc_address={HOST}",
                "-enable_metric_reporting=false", f"-metrics_port={free_port()}", f"-metrics_host={HOST}",
                "-default_kv_lease_ttl=60000",  # shorter leases expire under large gets on a busy machine
            ], self._log)
        ]  # fmt: skip
        self._until(lambda: _accepts(port))
        self.processes.append(
            start([
                os.path.join(folder, "mooncake_client"), f"-host={HOST}", f"-port={free_port()}",
                f"-master_server_address={HOST}:{port}", "-metadata_server=P2PHANDSHAKE", "-global_segment_size=2 GB",
            ], self._log)
        )  # fmt: skip
        self.store = client()
        if self.store.setup(HOST, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"{HOST}:{port}"):
            raise Missing(f"Mooncake's client cannot join its master:\n{self._tail()}")
        self._until(lambda: self.store.put("ready", b"ready") == 0)
        self._round = 0
        self._live: list[str] = []
        self._lock = threading.Lock()

    def _until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_S
        while not ready():
            dead = [process for process in self.processes if process.poll() is not None]
            if dead or time.monotonic() > end:
                raise Missing(f"Mooncake did not start:\n{self._tail()}")
            time.sleep(0.02)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    def register(self) -> None:
        for memory in (self.source, self.out):
            if self.store.register_buffer(memory.address, memory.nbytes):
                raise Missing("Mooncake does not register memory")

    def _names(self, kind: str, first: int, count: int) -> list[str]:
        return [f"{self.size}-{kind}-{index}" for index in range(first, first + count)]

    def fill(self) -> None:
        self._put("batch_put_from", self._names("get", 0, self.count), self.addresses(self.source, 0, self.count))

    def run(self, op: str, form: str, first: int, count: int) -> None:
        if op == "get":
            self._get(form, self._names("get", first, count), self.addresses(self.out, first, count))
            return
        names = self._names(f"put{self._round}", first, count)
        with self._lock:
            self._live += names
        self._put(form, names, self.addresses(self.source, first, count))

    def _get(self, form: str, names: list[str], to: list[int]) -> None:
        size, store = self.size, self.store
        if form == "get_into":
            got = [store.get_into(name, address, size) for name, address in zip(names, to, strict=True)]
        elif form == "batch_get_into":
            got = store.batch_get_into(names, to, [size] * len(names))
        else:
            base = self.out.address
            (answers,) = store.get_into_ranges(
                [base], [names], [[[address - base] for address in to]], [[[0]] * len(names)], [[[size]] * len(names)]
            )
            got = [answer[0] for answer in answers]
        if got != [size] * len(names):
            raise RuntimeError(f"{form} answered {[code for code in got if code != size][:3]}")

    def _put(self, form: str, names: list[str], at: list[int]) -> None:
        size, store = self.size, self.store
        if form == "put_from":
            codes = [store.put_from(name, address, size) for name, address in zip(names, at, strict=True)]
        elif form == "batch_put_from":
            codes = store.batch_put_from(names, at, [size] * len(names))
        else:
            codes = store.batch_put_session_start(names, [size] * len(names))
            moved = store.batch_put_from_multi_buffer_ranges(
                names, [[address] for address in at], [[size]] * len(names), [[0]] * len(names)
            )
            codes = [*codes, *store.batch_put_session_end(names), *(size - each for each in moved)]
        if any(codes):
            raise RuntimeError(f"{form} answered {[code for code in codes if code][:3]}")

    def settle(self) -> None:
        live, self._live = self._live, []
        self._round += 1
        if live and any(codes := self.store.batch_remove(live, True)):
            raise RuntimeError(f"what was put is not there: remove answered {[code for code in codes if code][:3]}")

    def verify(self, op: str) -> int:
        names = self._names("get", 0, self.count)
        if op == "put":
            names = self._names("verify", 0, self.count)
            for form in self.forms["put"]:
                self._put(form, names, self.addresses(self.source, 0, self.count))
                wrong = self._read_back(names)
                self.store.batch_remove(names, True)
                if wrong:
                    return wrong
            return 0
        return max(self._read_back(names, form) for form in self.forms["get"])

    def _read_back(self, names: list[str], form: str = "batch_get_into") -> int:
        self.out.array[:] = _POISON
        self._get(form, names, self.addresses(self.out, 0, self.count))
        return self.wrong()

    def drop(self) -> None:
        self.settle()
        self.store.batch_remove(self._names("get", 0, self.count), True)
        for memory in (self.source, self.out):
            self.store.unregister_buffer(memory.address)
        del self.source, self.out


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True


class Nixl(Peer):
    """NIXL's transfer engine over UCX and TCP: an agent here, one in a second process whose memory is read and written.
    It has no store: get is READ, put is WRITE, of memory whose place both sides know."""

    forms: ClassVar[dict[str, tuple[str, ...]]] = {
        "get": ("READ", "READ one by one"),
        "put": ("WRITE", "WRITE one by one"),
    }

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("UCX_TLS", "tcp")
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        self._api = nixl_api()
        self.name = f"nixl {version('nixl-cu12', 'nixl-cu13', 'nixl')} UCX_TLS={os.environ['UCX_TLS']}"
        self.agent = self._api.nixl_agent("initiator", self._api.nixl_agent_config(backends=["UCX"]))
        self._registered: list[Any] = []
        self._remote = b""

    def register(self) -> None:
        nbytes = self.size * self.count
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(  # it goes when its end of the socket is closed
            [sys.executable, __file__, "nixl-target", str(theirs.fileno()), str(nbytes)], pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr,
        )  # fmt: skip
        theirs.close()
        self.processes, self._control = [process], ours.makefile("rwb")
        ours.close()
        for memory in (self.source, self.out):
            self._registered.append(self.agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM"))
        hello = json.loads(self._control.readline())
        self._there = int(hello["address"])
        self._control.write(json.dumps({"metadata": self.agent.get_agent_metadata().hex()}).encode() + b"\n")
        self._control.flush()
        self._remote = self.agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
        if not self._control.readline():
            raise Missing("NIXL's second process died")
        # The first transfer connects; it is not timed.
        self.run("put", "WRITE", 0, 1)

    def fill(self) -> None:
        self.run("put", "WRITE", 0, self.count)

    def run(self, op: str, form: str, first: int, count: int) -> None:
        memory, kind = (self.out, "READ") if op == "get" else (self.source, "WRITE")
        here = [(address, self.size, 0) for address in self.addresses(memory, first, count)]
        there = [(self._there + index * self.size, self.size, 0) for index in range(first, first + count)]
        if form == kind:
            self._move(kind, here, there)
            return
        for one, other in zip(here, there, strict=True):
            self._move(kind, [one], [other])

    def _move(self, kind: str, here: list[tuple[int, int, int]], there: list[tuple[int, int, int]]) -> None:
        agent = self.agent
        remote = self._remote.decode() if isinstance(self._remote, bytes) else self._remote
        handle = agent.initialize_xfer(
            kind, agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), remote, b""
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"{kind} ended in {state}")

    def settle(self) -> None:
        return

    def verify(self, op: str) -> int:
        wrong = 0
        for form in self.forms[op]:
            self.out.array[:] = _POISON
            if op == "put":  # other bytes first, from memory that holds none of ours
                self.run_raw("WRITE", self.out)
                self.run(op, form, 0, self.count)
                self.run("get", "READ", 0, self.count)
            else:
                self.run(op, form, 0, self.count)
            wrong = max(wrong, self.wrong())
        return wrong

    def run_raw(self, kind: str, memory: Memory) -> None:
        self._move(kind, [(memory.address, memory.nbytes, 0)], [(self._there, memory.nbytes, 0)])

    def drop(self) -> None:
        for registered in self._registered:
            self.agent.deregister_memory(registered)
        self._registered.clear()
        with contextlib.suppress(Exception):  # the other side goes anyway
            self.agent.remove_remote_agent(self._remote)
        self._control.close()
        self.close()
        self.processes = []
        del self.source, self.out


def nixl_api() -> Any:
    for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise Missing(
        f"{sys.executable} has no NIXL: pip install numpy, then pip install --no-deps nixl-cu12 (without --no-deps it "
        "brings a CUDA build of torch)"
    )


def nixl_target(descriptor: int, nbytes: int) -> None:
    """The second process: memory that the first one reads and writes."""
    api, memory = nixl_api(), Memory(nbytes)
    agent = api.nixl_agent("target", api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.address, nbytes, 0, "")], "DRAM")
    with socket.socket(fileno=descriptor) as own, own.makefile("rwb") as control:
        hello = {"address": memory.address, "metadata": agent.get_agent_metadata().hex()}
        control.write(json.dumps(hello).encode() + b"\n")
        control.flush()
        line = control.readline()
        if line:
            agent.add_remote_agent(bytes.fromhex(json.loads(line)["metadata"]))
            control.write(b"{}\n")
            control.flush()
            control.readline()  # until the other side goes
    os._exit(0)  # library threads are not worth waiting for


PEERS: dict[str, type[Peer]] = {"mooncake": Mooncake, "nixl": Nixl}


def commands(peer: Peer, lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Do what each line says; yields the answers."""
    for line in lines:
        asked = json.loads(line)
        try:
            kind = asked.pop("do")
            if kind == "run":
                peer.run(asked["op"], asked["form"], asked["first"], asked["count"])
                yield {}
            elif kind == "load":
                peer.load(asked["size"], asked["count"])
                yield {"pids": peer.pids}
            elif kind == "verify":
                yield {"wrong": peer.verify(asked["op"])}
            elif kind in ("fill", "settle", "drop"):
                getattr(peer, kind)()
                yield {}
            else:
                yield {"error": f"unknown command {kind!r}"}
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            yield {"error": f"{type(error).__name__}: {error}"}


def serve(peer: Peer, connection: socket.socket) -> None:
    with connection, connection.makefile("rwb") as stream:
        for answer in commands(peer, iter(stream.readline, b"")):
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


def main(name: str, path: str) -> None:
    first = socket.socket(socket.AF_UNIX)
    first.connect(path)
    try:
        peer = PEERS[name]()
    except Missing as error:
        first.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(3)
    hello = {"name": peer.name, "forms": peer.forms, "lanes": peer.lanes, "pids": peer.pids}
    lanes = []
    for _ in range(peer.lanes - 1):
        lane = socket.socket(socket.AF_UNIX)
        lane.connect(path)
        lanes.append(threading.Thread(target=serve, args=(peer, lane), daemon=True))
    try:
        first.sendall(json.dumps(hello).encode() + b"\n")
        for thread in lanes:
            thread.start()
        serve(peer, first)
    except OSError:  # who asked went away
        pass
    peer.close()
    os._exit(0)  # library threads are not worth waiting for


if __name__ == "__main__":
    if sys.argv[1] == "nixl-target":
        nixl_target(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2])
