"""What `kvstore-bench io node://…` needs besides the backend: a node of its own, and the ceilings of the transports.

`node://local` is a node in a process of its own on loopback, with `--transport tcp`, `ucx` or `shm`. The ceiling over
TCP is a pair of blocking sockets, in shared memory memcpy, over UCX the `ucx_perftest` of the same UCX with the same
settings where the wheel has it, else memcpy. CPU seconds are those of both ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.backend import Read, Write
from kvstore.errors import ConfigError
from kvstore.keys import opaque_key

from .ceilings import Job, Memcpy, Pass
from .ceilings_socket import RawServer, SocketGet, SocketPut, runs
from .processes import NodeProcess

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.registry import BackendURL

    from .measure import Side
    from .workload import Region, Workload

__all__ = ["SCHEMES", "TRANSPORTS", "NodePlace", "Perftest", "batched_against_single", "open_place", "round_trip_us"]

SCHEMES = ("node", "kvstore+ucx")
TRANSPORTS = ("tcp", "ucx", "shm")
MIB = 1 << 20
_TIMEOUT_S = 60.0
_PAGE_BYTES, _PAGES = 64 << 10, 256
_ROUND_TRIPS = 10_000


@dataclass(frozen=True)
class NodePlace:
    """Where the ceiling of a `node://` URL works.

    Attributes:
        transport: "tcp", "ucx", "shm", or "auto" for nodes that are not ours.
        server: the other end of the raw sockets; None if nothing is measured through it.
        pids: of the node's process, if it is ours.
    """

    transport: str
    server: RawServer | None = None
    pids: tuple[int, ...] = ()

    def ceiling(self, op: str, work: Workload, regions: tuple[Region, Region]) -> Side:
        """The other side of a row."""
        if self.transport == "shm":
            return Memcpy(work.sources, work.destinations)
        if self.transport == "ucx":
            perftest = Perftest(work.nbytes, work.count)
            return perftest if perftest.there else Memcpy(work.sources, work.destinations)
        if self.server is None:
            raise ValueError("a raw socket server is needed")
        if op == "get":
            return SocketGet(self.server, runs(regions[1].view, work.destinations))
        return SocketPut(self.server, runs(regions[0].view, work.sources))


@contextlib.contextmanager
def open_place(
    url: BackendURL, transport: str | None, memory_bytes: int
) -> Iterator[tuple[BackendURL, str, NodePlace]]:
    """The URL to open, the label of its rows, and where its ceiling works.

    Args:
        transport: of `node://local`, and of other nodes whose URL does not say; None: tcp for the former.
        memory_bytes: of a node of our own.

    Raises:
        ConfigError: the URL says another transport than the command line, or a node of our own does not start.
    """
    said = "ucx" if url.scheme == "kvstore+ucx" else url.options.get("transport")
    if said and transport and said != transport:
        raise ConfigError(f"--transport {transport}, but the URL says {said}; give one of them")
    local = url.authority == "local" and not url.path
    chosen = said or transport or ("tcp" if local else "auto")
    with contextlib.ExitStack() as stack:
        options = dict(url.options)
        if url.scheme == "node" and chosen != "auto":
            options["transport"] = chosen
        pids: tuple[int, ...] = ()
        authority, path = url.authority, url.path
        if local:
            words: tuple[str, ...] = ()
            if chosen == "shm":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-node-"))
                words = ("--unix", str(Path(folder) / "node.sock"))
            node = stack.enter_context(NodeProcess(memory_bytes=memory_bytes, words=words))
            authority, path, pids = node.address, "", (node.pid,)
        server = stack.enter_context(RawServer()) if chosen in ("tcp", "auto") else None
        place = NodePlace(chosen, server, pids)
        label = "node" if chosen == "auto" else f"node_{chosen}"
        yield replace(url, authority=authority, path=path, options=options), label, place


class Perftest:
    """`ucx_perftest` of the libucx wheel in use, test tag_bw, 4 messages under way: it times itself.

    Debian's `ucx-utils` has another version of UCX, and is not used.
    """

    name = "ucx_perftest"
    repeatable = True

    def __init__(self, nbytes: int, count: int) -> None:
        from importlib.util import find_spec

        spec = find_spec("libucx")
        folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
        self._program, self._libraries = folder / "bin" / "ucx_perftest", folder / "lib"
        self.there = spec is not None and self._program.exists()
        self._nbytes, self._count = nbytes, count

    def _environment(self) -> dict[str, str]:
        from kvstore_transport.ucx import UcxEngine

        settings = {f"UCX_{name}": value for name, value in UcxEngine.get().settings["host"].items()}
        return {**os.environ, **settings, "LD_LIBRARY_PATH": str(self._libraries), "UCX_LOG_LEVEL": "error"}

    def jobs(self, lanes: int) -> list[Job]:
        """Not used: see `timed`."""
        raise NotImplementedError

    def timed(self, lanes: int, rounds: int) -> Pass:
        """One run of as many messages as a pass has; at least 8."""
        messages = max(8, rounds * self._count)
        speed = self._speed(messages)
        return Pass(rounds * self._count * self._nbytes / speed, math.nan, [])

    def _speed(self, messages: int) -> float:
        """Bytes per second. Raises `OSError` if the program does not work."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        base, environment = [str(self._program), "-p", port], self._environment()
        test = ["-t", "tag_bw", "-s", str(self._nbytes), "-n", str(messages), "-w", "4", "-O", "4", "-f", "-v"]
        server = subprocess.Popen(base, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                client = subprocess.run(
                    [*base, "127.0.0.1", *test], env=environment, capture_output=True, text=True,
                    timeout=_TIMEOUT_S, check=False,
                )  # fmt: skip
                found = re.findall(r"^ *\d+,.*$", client.stdout, re.M)
                if found:
                    return float(found[-1].split(",")[5]) * MIB
                threading.Event().wait(0.05)  # it does not listen yet
            raise OSError(f"ucx_perftest did not work: {client.stderr[-300:]}")
        finally:
            server.kill()
            server.wait()

    def settle(self, rounds: int) -> int:
        return rounds * self._count * self._nbytes

    def close(self) -> None:
        return


def _deadline() -> float:
    return time.monotonic() + _TIMEOUT_S


def _stored(backend: Backend, names: Sequence[str], data: memoryview) -> list[Any]:
    keys = [opaque_key(name) for name in names]
    for outcome in backend.put([Write(key, (data,)) for key in keys], deadline=_deadline()):
        if outcome.error is not None:
            raise outcome.error
    return keys


def round_trip_us(backend: Backend, run_id: str) -> float:
    """p50 of 10,000 gets of one record of 64 bytes, one after another from one thread, in microseconds."""
    (key,) = _stored(backend, [f"kvstore-bench/{run_id}/tiny"], memoryview(bytes(range(64))))
    into = bytearray(64)
    read = [Read(key, memoryview(into))]
    get_into, clock, times = backend.get_into, time.perf_counter, []
    deadline = _deadline()
    try:
        for _ in range(_ROUND_TRIPS):
            began = clock()
            (outcome,) = get_into(read, deadline=deadline)
            times.append(clock() - began)
            if outcome.nbytes != 64:
                raise outcome.error or ConfigError(f"a tiny record came back as {outcome}")
    finally:
        backend.delete([key], deadline=_deadline())
    return statistics.median(times) * 1e6


def batched_against_single(backend: Backend, run_id: str, region: memoryview) -> float:
    """Reading 256 pages of 64 KiB (16 MiB) in one call, against one call each: how many times faster; the median of
    seven pairs."""
    names = [f"kvstore-bench/{run_id}/page/{index}" for index in range(_PAGES)]
    keys = _stored(backend, names, region[:_PAGE_BYTES])
    views = [region[at * _PAGE_BYTES : (at + 1) * _PAGE_BYTES] for at in range(_PAGES)]
    reads = [Read(key, view) for key, view in zip(keys, views, strict=True)]

    def whole() -> None:
        check(backend.get_into(reads, deadline=_deadline()))

    def single() -> None:
        for read in reads:
            check(backend.get_into([read], deadline=_deadline()))

    def check(outcomes: Sequence[Any]) -> None:
        if any(outcome.nbytes != _PAGE_BYTES for outcome in outcomes):
            raise ConfigError("a page did not come back whole")

    def seconds(call: Callable[[], None]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    try:
        whole()
        return statistics.median(seconds(single) / seconds(whole) for _ in range(7))
    finally:
        backend.delete(keys, deadline=_deadline())
