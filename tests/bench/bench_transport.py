"""Transports, bare: GB/s and round trips of channels, next to blocking sockets that move the same bytes.

    python tests/bench/bench_transport.py [--transports tcp,unix,tls,shm,ucx] [--repeats N] [--quick] [--json FILE]

Server and client are two processes on loopback. The ceiling is `kvstore_bench.ceilings_socket`, with its best number of
connections of 1, 2 and 4, for all transports: one figure to compare with. All sides take turns, pass by pass, so that
whatever else the machine does meets all of them; medians of GB/s (1e9 bytes) and CPU seconds per GiB of both processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kvstore_bench.ceilings import Job, Lanes  # noqa: E402
from kvstore_bench.ceilings_socket import RawClient, RawServer  # noqa: E402
from kvstore_bench.processes import cpu_of  # noqa: E402
from kvstore_transport import Answer, Channel, Incoming, Server  # noqa: E402
from tests.servers.certificate import make_certificate  # noqa: E402
from tests.transport_support import BY_NAME, Kind, Memory, connect_to, soon  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
SIZE = 16 * MIB
LANES = 4
GET, PUT, PING = 1, 2, 3


class Timing(NamedTuple):
    """Medians of one side."""

    gbytes_per_s: float
    cpu_s_per_gib: float


class Side(NamedTuple):
    """One thing that is timed: what its lanes do, and the process at the other end."""

    jobs: Sequence[Job]
    nbytes: int
    server: int


# The server's process.


class Handler:
    """GET: as many bytes, in as many pieces, as meta says. PUT: into memory of the connection. PING: nothing."""

    def __init__(self, memory: Memory, lanes: int) -> None:
        self._free = [memory.take(SIZE, bytes([7]) * SIZE) for _ in range(lanes)]  # one for each connection
        self._lock = threading.Lock()

    def __call__(self, incoming: Incoming) -> Answer:
        if incoming.op == PING:
            return Answer(0, incoming.meta)
        session = incoming.session
        if "memory" not in session:
            with self._lock:
                session["memory"] = own = self._free.pop()
            session["on_close"] = lambda: self._free.append(own)
        view: Any = session["memory"]
        nbytes, pieces = int.from_bytes(incoming.meta[:8], "little"), int.from_bytes(incoming.meta[8:], "little")
        views = cut(view[:nbytes], pieces)
        if incoming.op == PUT:
            incoming.receive(views)
            return Answer(0)
        return Answer(0, b"", views)


def cut(view: memoryview, pieces: int) -> list[memoryview]:
    step = len(view) // pieces
    return [view[at : at + step] for at in range(0, len(view), step)]


def serve(kind: Kind, place: str, certificate: str) -> None:
    memory = Memory()
    handler = Handler(memory, 3 * LANES)
    where: dict[str, Any] = {"path": place} if kind.over == "unix" else {"listen": ("127.0.0.1", 0)}
    tls = None
    if kind.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    with Server(handler, **where, transports=(kind.transport,), tls=tls) as server:
        memory.register(server)
        print(server.address or server.path, flush=True)
        sys.stdin.read()


@contextmanager
def started(*command: str) -> Iterator[tuple[int, str]]:
    """(process id, first line of output) of a process that ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


# The client's process.


class Client:
    """Channels of one kind to a server process, each with its own memory."""

    def __init__(self, kind: Kind, pid: int, address: str, tls: ssl.SSLContext | None) -> None:
        self.pid = pid
        self._memory = Memory()
        self.views = [self._memory.take(SIZE, bytes([3]) * SIZE) for _ in range(LANES)]
        self.channels = [connect_to(kind, address, tls=tls) for _ in range(LANES)]
        for channel in self.channels:
            self._memory.register(channel)

    def side(self, op: str, nbytes: int, pieces: int, *, calls: int = 1, lanes: int = LANES) -> Side:
        jobs = [self._job(lane, op, nbytes, pieces, calls) for lane in range(lanes)]
        return Side(jobs, nbytes * calls * lanes, self.pid)

    def _job(self, lane: int, op: str, nbytes: int, pieces: int, calls: int) -> Job:
        channel, views = self.channels[lane], cut(self.views[lane][:nbytes], pieces)
        meta = nbytes.to_bytes(8, "little") + pieces.to_bytes(4, "little")

        def get() -> None:
            for _ in range(calls):
                channel.call(GET, meta, plan=lambda *_: views, deadline=soon(60))

        def put() -> None:
            for _ in range(calls):
                channel.call(PUT, meta, views, deadline=soon(60))

        return get if op == "get" else put

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self._memory.close()


class Raw:
    """The ceiling."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self._views = [memoryview(bytearray([3]) * SIZE) for _ in range(LANES)]
        self.clients = [RawClient(port) for _ in range(LANES)]

    def side(self, op: str, lanes: int) -> Side:
        """16 MiB × 4, by so many connections."""
        jobs = [
            _times(LANES // lanes, _job(client, op, view))
            for client, view in zip(self.clients[:lanes], self._views, strict=False)
        ]
        return Side(jobs, SIZE * LANES, self.pid)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def _job(client: RawClient, op: str, view: memoryview) -> Job:
    return (lambda: client.get(view)) if op == "get" else (lambda: client.put(view))


def _times(count: int, job: Job) -> Job:
    def repeated() -> None:
        for _ in range(count):
            job()

    return repeated


# Measuring.


def interleaved(sides: dict[str, Side], repeats: int) -> dict[str, Timing]:
    """Time the sides in turn, forwards and backwards."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    with Lanes(LANES) as lanes:
        for repeat in range(repeats + 1):
            order = list(sides.items())
            for name, side in order if repeat % 2 else reversed(order):
                before = cpu_of(side.server)
                one = lanes.run(side.jobs)
                if repeat:  # the first is for warming up
                    speeds[name].append(side.nbytes / one.seconds / 1e9)
                    cpu[name].append((one.cpu_s + cpu_of(side.server) - before) / side.nbytes * GIB)
    return {name: Timing(statistics.median(speeds[name]), statistics.mean(cpu[name])) for name in sides}


def round_trip_us(job: Job, count: int) -> float:
    """Median wall time of a call, in a thread, as lanes are."""

    def run() -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            job()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def figure(figures: dict[str, Any], name: str, value: float, unit: str, better: str, bar: float | None) -> None:
    figures[name] = {"value": round(value, 4), "unit": unit, "better": better, "bar": bar}
    verdict = ""
    if bar is not None:
        verdict = f"bar {bar:g}: {'met' if (value >= bar if better == 'higher' else value <= bar) else 'NOT MET'}"
    print(f"  {name:40} {value:10.4g} {unit:6} {verdict}", flush=True)


def throughput(figures: dict[str, Any], clients: dict[str, Client], raw: Raw, repeats: int) -> None:
    for op in ("get", "put"):
        sides = {f"raw x{lanes}": raw.side(op, lanes) for lanes in (1, 2, 4)}
        for name, client in clients.items():
            sides[f"{name} 16 MiB"] = client.side(op, SIZE, 1)
            sides[f"{name} 1024 x 16 KiB"] = client.side(op, SIZE, 1024)
        timings = interleaved(sides, repeats)
        print(f"\n{op.upper()} 16 MiB x {LANES} in flight: GB/s, CPU s/GiB of both processes")
        for name, timing in timings.items():
            print(f"  {name:24} {timing.gbytes_per_s:6.2f} {timing.cpu_s_per_gib:6.2f}")
        ceiling = max(timings[f"raw x{lanes}"].gbytes_per_s for lanes in (1, 2, 4))
        for name in clients:
            plain = name == "tcp"
            whole, pieces = timings[f"{name} 16 MiB"], timings[f"{name} 1024 x 16 KiB"]
            ratio = whole.gbytes_per_s / ceiling
            figure(figures, f"transport.{name}.{op}.16MiB.ratio", ratio, "x", "higher", 0.85 if plain else None)
            ratio = pieces.gbytes_per_s / ceiling
            figure(figures, f"transport.{name}.{op}.16KiB.ratio", ratio, "x", "higher", 0.5 if plain else None)


def round_trips(figures: dict[str, Any], clients: dict[str, Client], raw: Raw, count: int, repeats: int) -> None:
    short = memoryview(bytearray(8))
    jobs: dict[str, Job] = {"raw": lambda: raw.clients[0].get(short)}
    for name, client in clients.items():
        jobs[name] = _ping(client.channels[0])
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            times[name].append(round_trip_us(job, count // repeats))
    print(f"\nRound trip of 8 bytes, one channel, {count} times: median of {repeats} medians")
    for name in jobs:
        bar = 150.0 if name == "tcp" else None
        figure(figures, f"transport.{name}.round_trip.p50", statistics.median(times[name]), "us", "lower", bar)


def _ping(channel: Channel) -> Job:
    return lambda: channel.call(PING, b"12345678", deadline=soon(60)) and None


def curve(figures: dict[str, Any], clients: dict[str, Client], repeats: int) -> None:
    sizes = [64 << 10 << step for step in range(0, 9, 2)]
    for name, client in clients.items():
        sides = {f"{size >> 10}KiB": client.side("get", size, 1, calls=SIZE // size, lanes=1) for size in sizes}
        sides["batch"] = client.side("get", SIZE, 256, lanes=1)
        timings = interleaved(sides, repeats)
        print(f"\nGET over {name} by size of message, one channel: GB/s")
        print("  " + "  ".join(f"{label} {timing.gbytes_per_s:.2f}" for label, timing in timings.items()))
        ratio = timings["batch"].gbytes_per_s / timings["64KiB"].gbytes_per_s
        figure(figures, f"transport.{name}.batched_64KiB", ratio, "x", "higher", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="tcp", help="of " + ", ".join(BY_NAME))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "PATH", "CERTIFICATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(BY_NAME[options.serve[0]], *options.serve[1:])
        return
    repeats, count = (3, 2000) if options.quick else (options.repeats, 10_000)
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        certificate = str(make_certificate(Path(folder) / "cert.pem"))
        server = stack.enter_context(RawServer())
        raw = Raw(server.pid, server.port)
        stack.callback(raw.close)
        clients = {}
        for name in options.transports.split(","):
            kind = BY_NAME[name]
            place = f"{folder}/{name}.sock"
            pid, address = stack.enter_context(started(__file__, "--serve", name, place, certificate))
            tls = ssl.create_default_context(cafile=certificate) if kind.tls else None
            clients[name] = Client(kind, pid, address, tls)
            stack.callback(clients[name].close)
        throughput(figures, clients, raw, repeats)
        round_trips(figures, clients, raw, count, 3 if options.quick else 5)
        curve(figures, clients, repeats)
    if options.json:
        options.json.write_text(json.dumps({"figures": figures}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
