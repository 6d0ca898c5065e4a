"""Bodies over UCX against UCX's own benchmark, memcpy and a blocking socket, in turns, in one run.

    python tests/bench/bench_ucx.py [--sizes 64KiB,1MiB,16MiB] [--repeats N] [--seconds S] [--json FILE]

A get or put moves a body of 64 MiB in views of the given size (four of 16 MiB: four messages under way), between two
processes on loopback. `shm` lets UCX use shared memory (sysv and cma), `tcp` does not. `ucx_perftest` is that of the
libucx wheel, which is the very UCX in use (Debian's `ucx-utils` has another version, and is not used): test tag_bw,
messages of the same size, 4 outstanding, the same transports and settings. Medians over the repeats of GB/s (1e9 B),
and CPU seconds per GB of both processes together.

Both processes of ucx_perftest spin without end, so on a machine with more work than cores it is the ceiling that falls:
then look at `of_perftests_best`, our median against its best pass. There is no bar on TCP: `transport=tcp` is for that.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.buffers import Slab  # noqa: E402
from kvstore_transport import Answer, Channel, Incoming, Server, connect  # noqa: E402
from kvstore_transport.bodies import TRANSPORTS  # noqa: E402
from kvstore_transport.ucx import UcxEngine  # noqa: E402

MIB = 1 << 20
BODY = 64 * MIB
BAR = 0.75
GET, PUT, CPU = 1, 2, 3
KINDS = {"shm": "ucx", "tcp": "ucx_net"}
TRANSPORTS["ucx_net"] = "ucx:UcxNetworkWay"


class Timing(NamedTuple):
    """Of one pass. `cpu_s_per_gb` is nan where it is not known."""

    gbytes_per_s: float
    cpu_s_per_gb: float


Pass = Callable[[], Timing]


def views_of(memory: memoryview, size: int) -> list[memoryview]:
    return [memory[at : at + size] for at in range(0, len(memory), size)]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# The server's process.


def serve(transport: str) -> None:
    slab = Slab(2 * BODY)
    slab.view[:BODY] = b"\x07" * BODY

    def handler(incoming: Incoming) -> Answer:
        size = int.from_bytes(incoming.meta, "little")
        if incoming.op == GET:
            return Answer(0, b"", views_of(slab.view[:BODY], size))
        if incoming.op == PUT:
            incoming.receive(views_of(slab.view[BODY:], size))
        return Answer(0, repr(cpu_s()).encode())

    with Server(handler, listen=("127.0.0.1", 0), transports=(transport,)) as server:
        print(server.address, flush=True)
        sys.stdin.read()


@contextmanager
def served(transport: str) -> Iterator[Channel]:
    command = [sys.executable, __file__, "--serve", transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with connect(process.stdout.readline().strip(), deadline=soon(), transport=transport) as channel:
                yield channel
        finally:
            process.kill()


def soon() -> float:
    return time.monotonic() + 60


# One pass of each side.


def ours(channel: Channel, memory: memoryview, op: int, size: int, seconds: float) -> Timing:
    views, meta = views_of(memory, size), size.to_bytes(8, "little")

    def call(op: int) -> bytes:
        if op == PUT:
            return channel.call(PUT, meta, views, deadline=soon()).meta
        if op == GET:
            return channel.call(GET, meta, plan=lambda status, meta, nbytes: views, deadline=soon()).meta
        return channel.call(CPU, b"", deadline=soon()).meta

    call(op)
    theirs, mine, began, calls = float(call(CPU)), cpu_s(), time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - began < seconds:
        call(op)
        calls += 1
    wall = time.perf_counter() - began
    used = cpu_s() - mine + float(call(CPU)) - theirs
    return Timing(calls * BODY / wall / 1e9, used / (calls * BODY / 1e9))


def memcpy(source: memoryview, into: memoryview, size: int, seconds: float) -> Timing:
    pairs = [
        (np.frombuffer(to, np.uint8), np.frombuffer(of, np.uint8))
        for to, of in zip(views_of(into, size), views_of(source, size), strict=True)
    ]
    began, used, moved = time.perf_counter(), cpu_s(), 0
    while not moved or time.perf_counter() - began < seconds:
        for to, of in pairs:
            np.copyto(to, of)
        moved += len(source)
    return Timing(moved / (time.perf_counter() - began) / 1e9, (cpu_s() - used) / (moved / 1e9))


SENDER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
size, b = int(sys.argv[2]), bytes(int(sys.argv[2]))
while s.recv(1):
    for _ in range(int(sys.argv[3]) // size): s.sendall(b)
"""


def raw_socket(into: memoryview, size: int, seconds: float) -> Timing:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", SENDER, str(port), str(size), str(len(into))]) as process:
            try:
                sock, _ = listener.accept()
                with sock:
                    receive_whole(sock, into)
                    began, calls = time.perf_counter(), 0
                    while not calls or time.perf_counter() - began < seconds:
                        receive_whole(sock, into)
                        calls += 1
                    return Timing(calls * len(into) / (time.perf_counter() - began) / 1e9, math.nan)
            finally:
                process.kill()


def receive_whole(sock: socket.socket, into: memoryview) -> None:
    sock.sendall(b"g")
    left = into
    while left:
        left = left[sock.recv_into(left, 0, socket.MSG_WAITALL) :]


class Perftest:
    """`ucx_perftest` of the wheel that is in use."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("libucx")
        places = list(spec.submodule_search_locations or ()) if spec else []
        folder = Path(places[0]) if places else Path()
        self.program = folder / "bin" / "ucx_perftest"
        self.libraries = folder / "lib"
        self.there = self.program.exists()

    def run(self, size: int, settings: dict[str, str], seconds: float) -> Timing:
        environment = {**os.environ, **settings, "LD_LIBRARY_PATH": str(self.libraries), "UCX_LOG_LEVEL": "error"}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        count = max(8, min(20000, int(4e9 * seconds / size)))
        base = [str(self.program), "-p", port]
        test = ["-t", "tag_bw", "-s", str(size), "-n", str(count), "-w", "4", "-O", "4", "-f", "-v"]
        server = subprocess.Popen(base, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                client = subprocess.run(
                    [*base, "127.0.0.1", *test],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                found = re.findall(r"^ *\d+,.*$", client.stdout, re.M)
                if found:
                    return Timing(float(found[-1].split(",")[5]) * MIB / 1e9, math.nan)
                threading.Event().wait(0.05)  # it does not listen yet
            raise RuntimeError(f"ucx_perftest did not work: {client.stderr}")
        finally:
            server.kill()
            server.wait()


# The run.


def run(sizes: list[int], repeats: int, seconds: float) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    engine, perftest = UcxEngine.get(), Perftest()
    slab = Slab(2 * BODY)
    source, into = slab.view[:BODY], slab.view[BODY:]
    rows: list[dict[str, Any]] = []
    figures: dict[str, dict[str, Any]] = {}
    print(f"{engine.library.name} {engine.library.version}, UCX {engine.version}, load {os.getloadavg()[0]:.1f}")
    if not perftest.there:
        print("no ucx_perftest in the libucx wheel: ratios are to memcpy and a raw socket only")
    with served(KINDS["shm"]) as shm, served(KINDS["tcp"]) as tcp:
        channels = {"shm": shm, "tcp": tcp}
        for size in sizes:
            sides: dict[str, Pass] = {
                "memcpy": functools.partial(memcpy, source, into, size, seconds),
                "socket": functools.partial(raw_socket, into, size, seconds),
            }
            for name, channel in channels.items():
                for op, word in ((GET, "get"), (PUT, "put")):
                    sides[f"{name}.{word}"] = functools.partial(ours, channel, into, op, size, seconds)
                if perftest.there:
                    kind = "host" if name == "shm" else "net"
                    settings = {f"UCX_{key}": value for key, value in engine.settings[kind].items()}
                    sides[f"{name}.perftest"] = functools.partial(perftest.run, size, settings, seconds)
            taken: dict[str, list[Timing]] = {name: [] for name in sides}
            for _ in range(repeats):
                for name, side in sides.items():
                    taken[name].append(side())
            report(size, taken, rows, figures)
    slab.close()
    return rows, figures


def report(
    size: int, taken: dict[str, list[Timing]], rows: list[dict[str, Any]], figures: dict[str, dict[str, Any]]
) -> None:
    speed = {name: statistics.median(t.gbytes_per_s for t in timings) for name, timings in taken.items()}
    label = f"{size >> 20}MiB" if size >= MIB else f"{size >> 10}KiB"
    for name, timings in taken.items():
        cpu = statistics.median(t.cpu_s_per_gb for t in timings)
        rows.append(
            {"size": size, "side": name, "gbytes_per_s": [t.gbytes_per_s for t in timings], "cpu_s_per_gb": cpu}
        )
        line = f"{label:>7} {name:14} {speed[name]:6.2f} GB/s"
        if not math.isnan(cpu):
            line += f"  {cpu:5.2f} CPU-s/GB"
        kind, _, word = name.partition(".")
        if word in ("get", "put"):
            for ceiling in (f"{kind}.perftest", "memcpy" if kind == "shm" else "socket"):
                if ceiling in speed:
                    ratio = speed[name] / speed[ceiling]
                    line += f"  {ratio:5.2f} of {ceiling.rpartition('.')[2]}"
                    if ceiling.endswith("perftest"):
                        best = speed[name] / max(t.gbytes_per_s for t in taken[ceiling])
                        line += f" ({best:.2f} of its best)"
                        figures[f"ucx.{kind}.{word}.{label}.of_perftests_best"] = {
                            "value": round(best, 3),
                            "unit": "ratio",
                            "better": "higher",
                            "bar": None,
                        }
                    bar = BAR if ceiling == "shm.perftest" and size == 16 * MIB else None
                    figure = f"ucx.{kind}.{word}.{label}.of_{ceiling.rpartition('.')[2]}"
                    figures[figure] = {"value": round(ratio, 3), "unit": "ratio", "better": "higher", "bar": bar}
                    if bar is not None:
                        line += f" (bar {bar}: {'met' if ratio >= bar else 'NOT MET'})"
        print(line, flush=True)


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KiB|MiB)", text)
    if not match or BODY % (size := int(match[1]) << (10 if match[2] == "KiB" else 20)):
        raise argparse.ArgumentTypeError(f"{text}: a size like 64KiB or 16MiB that divides 64 MiB")
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description="Bodies over UCX, against its own benchmark")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=lambda text: [size_of(part) for part in text.split(",")], default=[16 * MIB])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each pass")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    rows, figures = run(arguments.sizes, arguments.repeats, arguments.seconds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": rows, "figures": figures}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
