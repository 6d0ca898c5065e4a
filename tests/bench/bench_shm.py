"""Shared memory between two processes of one host: get and put of large records, and leases.

    python tests/bench/bench_shm.py [--json FILE] [--records 24] [--repeats 9] [--lanes 4]

A server process and this one, with `--lanes` channels, each with one call in flight. A pass moves `--records` records
of 16 MiB (384 MiB, far more than the caches hold; all memory was touched before): get, from the server's slab into
private memory of this process; put, from a slab of this process into private memory of the server; and put of memory
that was not registered, which the socket copies. The ceiling is libc's memmove over as many bytes in this process, with
1, 2 and 4 threads, from private and from shared memory: the best of these six, by its median. Passes of ours and of the
ceilings take turns; a ratio is the median of the ratios within a turn. CPU seconds are those of both processes.

A lease is taken and given back without a copy, of 64 KiB and of 64 MiB in turn: call, one look at its first and last
byte, release. What was moved is compared in the end. Exits with 1 if that failed or a figure does not reach its bar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.buffers import Slab
from kvstore_bench.ceilings import Job, Lanes, Memcpy, split
from kvstore_transport import Answer, Channel, Incoming, Server, connect

MIB = 1 << 20
RECORD = 16 * MIB
LEASES = (64 << 10, 64 * MIB)
GET, PUT, SUMS, CPU = 1, 2, 3, 4
BARS = {"shm.get.16MiB.ratio": 0.80, "shm.put.16MiB.ratio": 0.80}
LEASE_BAR = 1.25


def record(index: int) -> bytes:
    """16 MiB that no other record has."""
    return hashlib.shake_256(index.to_bytes(4, "little")).digest(MIB) * 16


def digest(view: memoryview) -> bytes:
    return hashlib.blake2b(view, digest_size=16).digest()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


# The server.


def serve(path: str, count: int) -> None:
    slab, landing = Slab(count * RECORD, shared=True), Slab(count * RECORD)
    for index in range(count):
        slab.view[index * RECORD : (index + 1) * RECORD] = record(index)
    landing.view[:] = bytes(len(landing.view))

    def handle(incoming: Incoming) -> Answer:
        if incoming.op == GET:
            at, nbytes = (int.from_bytes(incoming.meta[i : i + 8], "little") for i in (0, 8))
            return Answer(0, b"", [slab.view[at : at + nbytes]])
        if incoming.op == PUT:
            at = int.from_bytes(incoming.meta, "little")
            incoming.receive([landing.view[at : at + incoming.body_nbytes]])
            return Answer(0)
        if incoming.op == SUMS:
            return Answer(
                0, b"".join(digest(landing.view[at : at + RECORD]) for at in range(0, count * RECORD, RECORD))
            )
        return Answer(0, number(int(cpu_s() * 1e6)))

    server = Server(handle, path=path, transports=("shm",))
    server.register(slab.view, slab.fd)
    print("ready", flush=True)
    sys.stdin.read()
    server.close()


# The client.


class Side:
    """`jobs` of ours or of a ceiling, timed by passes: GB/s and CPU seconds per GB."""

    def __init__(self, name: str, lanes: Lanes, jobs: Sequence[Job], nbytes: int, cpu: Callable[[], float]) -> None:
        self.name = name
        self.speeds: list[float] = []
        self.costs: list[float] = []
        self._lanes, self._jobs, self._nbytes, self._cpu = lanes, jobs, nbytes, cpu

    def once(self) -> None:
        before = self._cpu()
        seconds = self._lanes.run(self._jobs).seconds
        self.speeds.append(self._nbytes / seconds / 1e9)
        self.costs.append((self._cpu() - before) / self._nbytes * 1e9)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "gb_s": statistics.median(self.speeds),
            "gb_s_all": self.speeds,
            "cpu_s_per_gb": statistics.median(self.costs),
        }


def bodies(count: int, lanes: Lanes, lane_count: int, channels: Sequence[Channel], repeats: int) -> dict[str, Any]:
    nbytes = count * RECORD
    source, landing, private = Slab(nbytes, shared=True), Slab(nbytes), Slab(nbytes)
    for index in range(count):
        for memory in (source, private):
            memory.view[index * RECORD : (index + 1) * RECORD] = record(index)
    landing.view[:] = bytes(nbytes)
    for channel in channels:
        channel.register(source.view, source.fd)

    def get(channel: Channel, part: range) -> Job:
        def job() -> None:
            for index in part:
                at = index * RECORD
                channel.call(
                    GET,
                    number(at) + number(RECORD),
                    plan=lambda *_, at=at: [landing.view[at : at + RECORD]],
                    deadline=time.monotonic() + 60,
                )

        return job

    def put(channel: Channel, part: range, memory: Slab) -> Job:
        def job() -> None:
            for index in part:
                at = index * RECORD
                channel.call(PUT, number(at), [memory.view[at : at + RECORD]], deadline=time.monotonic() + 60)

        return job

    def cpu() -> float:
        theirs = channels[0].call(CPU, b"", deadline=time.monotonic() + 60).meta
        return cpu_s() + int.from_bytes(theirs, "little") / 1e6

    parts = [*zip(channels[:lane_count], split(count, lane_count), strict=True)]
    ours = [
        Side("get", lanes, [get(channel, part) for channel, part in parts], nbytes, cpu),
        Side("put", lanes, [put(channel, part, source) for channel, part in parts], nbytes, cpu),
        Side("get, 1 in flight", lanes, [get(channels[0], range(count))], nbytes, cpu),
        Side("put, 1 in flight", lanes, [put(channels[0], range(count), source)], nbytes, cpu),
        Side("put, not registered", lanes, [put(channel, part, private) for channel, part in parts], nbytes, cpu),
    ]
    views = [
        [memory.view[at : at + RECORD] for at in range(0, nbytes, RECORD)] for memory in (private, source, landing)
    ]
    ceilings = [
        Side(
            f"memcpy from {name} memory, {threads} threads",
            lanes,
            Memcpy(views[which], views[2]).jobs(threads),
            nbytes,
            cpu_s,
        )
        for which, name in ((0, "private"), (1, "shared"))
        for threads in (1, 2, 4)
    ]
    for side in (*ours, *ceilings):  # warm, and the descriptors are passed
        side.once()
        side.speeds.clear()
        side.costs.clear()
    order = [*ours[:1], *ceilings[:3], *ours[1:2], *ceilings[3:], *ours[2:]]
    for turn in range(repeats):
        for side in order if turn % 2 == 0 else reversed(order):
            side.once()
    best = max(ceilings, key=lambda side: statistics.median(side.speeds))
    rows = []
    for side in ours:
        ratios = [mine / theirs for mine, theirs in zip(side.speeds, best.speeds, strict=True)]
        rows.append({**side.row(), "ratio": statistics.median(ratios), "ratios": ratios})
    landing.view[:] = bytes(nbytes)
    ours[0].once()
    expected = b"".join(digest(memoryview(record(index))) for index in range(count))
    got = b"".join(digest(landing.view[at : at + RECORD]) for at in range(0, nbytes, RECORD))
    stored = channels[0].call(SUMS, b"", deadline=time.monotonic() + 60).meta
    return {
        "rows": [*rows, *(side.row() for side in ceilings)],
        "ceiling": best.name,
        "right": got == expected and stored == expected,
    }


def leases(channel: Channel, repeats: int) -> dict[int, float]:
    """Median µs of a lease of each size."""
    times: dict[int, list[float]] = {nbytes: [] for nbytes in LEASES}
    expected = {nbytes: ends_of(nbytes) for nbytes in LEASES}
    for turn in range(repeats * 50):
        for nbytes in LEASES if turn % 2 else LEASES[::-1]:
            begin = time.perf_counter()
            leased = channel.call_leased(GET, number(0) + number(nbytes), deadline=time.monotonic() + 60)
            if leased is None:
                raise SystemExit("no lease was given")
            ends = leased.body[0], leased.body[-1]
            leased.release()
            times[nbytes].append((time.perf_counter() - begin) * 1e6)
            if len(leased.body) != nbytes or ends != expected[nbytes]:
                raise SystemExit("a lease held other bytes")
    return {nbytes: statistics.median(of) for nbytes, of in times.items()}


def ends_of(nbytes: int) -> tuple[int, int]:
    """The first and the last byte of a lease."""
    return record(0)[0], record((nbytes - 1) // RECORD)[(nbytes - 1) % RECORD]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.records)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", path, "--records", str(args.records)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            if server.stdout is None or server.stdout.readline() != b"ready\n":
                raise SystemExit("the server did not start")
            channels = [
                connect(path, transport="shm", deadline=time.monotonic() + 30) for _ in range(max(4, args.lanes))
            ]
            with Lanes(max(4, args.lanes)) as lanes:
                found = bodies(args.records, lanes, args.lanes, channels, args.repeats)
            lease_us = leases(channels[0], args.repeats)
            for channel in channels:
                channel.close()
        finally:
            if server.stdin is not None:
                server.stdin.close()
            server.wait()
    report(found, lease_us, args.json)


def report(found: dict[str, Any], lease_us: dict[int, float], path: Path | None) -> None:
    print(f"{'16 MiB records':44} {'GB/s':>6} {'CPU s/GB':>9} {'of the ceiling':>15}")
    for row in found["rows"]:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "← ceiling" if row["name"] == found["ceiling"] else ""
        print(f"{row['name']:44} {row['gb_s']:6.2f} {row['cpu_s_per_gb']:9.3f} {ratio:>15}")
    small, large = (lease_us[nbytes] for nbytes in LEASES)
    print(f"a lease of 64 KiB: {small:.0f} µs, of 64 MiB: {large:.0f} µs, {large / small:.2f} times as long")
    ratios = {f"shm.{row['name']}.16MiB.ratio": row["ratio"] for row in found["rows"][:2]}
    figures = {
        name: {"value": value, "unit": "ratio", "better": "higher", "bar": BARS[name]} for name, value in ratios.items()
    }
    figures["shm.lease.64MiB_vs_64KiB"] = {
        "value": large / small, "unit": "ratio", "better": "lower", "bar": LEASE_BAR,
    }  # fmt: skip
    if path is not None:
        rows = [*found["rows"], *({"name": f"lease of {nbytes} B", "us": us} for nbytes, us in lease_us.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, "figures": figures}, indent=1) + "\n", encoding="utf-8")
    missed = [
        name
        for name, figure in figures.items()
        if (figure["value"] < figure["bar"] if figure["better"] == "higher" else figure["value"] > figure["bar"])
    ]
    if not found["right"]:
        raise SystemExit("bytes arrived that were not sent")
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


if __name__ == "__main__":
    main()
