"""An engine attaches to the daemon and gets 16 MiB x 8 through its shared memory, next to memory of its own process.

    python tests/bench/bench_daemon.py [--json FILE] [--repeats 15] [--lanes 2]

The daemon is `kvstore serve`, a process of its own. This process attaches to its Unix socket (that is timed, from the
first byte of the handshake to the first answer, over all of `--repeats` attaches), puts eight records of 16 MiB, and
keeps the same eight in a `memory` backend of its own. A pass gets all eight into the same memory, which was touched
before, with `--lanes` calls at a time: from the daemon, and from `memory`. Passes take turns; the ratio is the median
of the ratios within a turn. What was got is compared in the end. Exits with 1 if that failed, or the ratio is below
0.80.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.backend import Backend, Read, Write
from kvstore.buffers import Slab
from kvstore.keys import Key
from kvstore.registry import open_backend

MIB = 1 << 20
RECORD, COUNT = 16 * MIB, 8
BAR = 0.80


def record(index: int) -> bytes:
    """16 MiB that no other record has."""
    return hashlib.shake_256(index.to_bytes(4, "little")).digest(MIB) * 16


def get(lanes: ThreadPoolExecutor, backend: Backend, parts: Sequence[Sequence[Read]]) -> float:
    """Seconds of one pass."""
    deadline = time.monotonic() + 60
    begun = time.perf_counter()
    answers = [*lanes.map(lambda part: backend.get_into(part, deadline=deadline), parts)]
    seconds = time.perf_counter() - begun
    if not all(outcome.nbytes == RECORD for some in answers for outcome in some):
        raise SystemExit(f"records were not got: {answers}")
    return seconds


def attach(url: str, repeats: int) -> list[float]:
    """Seconds from nothing to the first answer, of each of several attaches."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        backend = open_backend(url)
        backend.stat([Key(bytes(32))], deadline=time.monotonic() + 60)
        found.append(time.perf_counter() - begun)
        backend.close()
    return found


def measure(url: str, repeats: int, lane_count: int) -> dict[str, Any]:
    attached = attach(url, repeats)
    keys = [Key(hashlib.sha256(b"bench_daemon %d" % index).digest()) for index in range(COUNT)]
    daemon, memory = open_backend(url), open_backend(f"memory://?bytes={(COUNT + 1) * RECORD}")
    writes = [Write(key, [memoryview(record(index))]) for index, key in enumerate(keys)]
    for backend in (daemon, memory):
        if not all(outcome.stored for outcome in backend.put(writes, deadline=time.monotonic() + 60)):
            raise SystemExit("records were not stored")
    slab = Slab(COUNT * RECORD)
    slab.view[:] = bytes(COUNT * RECORD)
    views = [slab.view[index * RECORD : (index + 1) * RECORD] for index in range(COUNT)]
    reads = [Read(key, view) for key, view in zip(keys, views, strict=True)]
    parts = [reads[lane::lane_count] for lane in range(lane_count)]
    speeds: dict[str, list[float]] = {"daemon": [], "memory": []}
    with ThreadPoolExecutor(lane_count) as lanes:
        for backend in (daemon, memory):
            get(lanes, backend, parts)
        for turn in range(repeats):
            sides = [("daemon", daemon), ("memory", memory)]
            for name, backend in sides if turn % 2 else reversed(sides):
                speeds[name].append(COUNT * RECORD / get(lanes, backend, parts) / 1e9)
        slab.view[:] = bytes(COUNT * RECORD)
        get(lanes, daemon, parts)
    fine = all(view == write.src[0] for view, write in zip(views, writes, strict=True))
    daemon.close()
    memory.close()
    ratios = [ours / theirs for ours, theirs in zip(speeds["daemon"], speeds["memory"], strict=True)]
    return {
        "verified": fine, "lanes": lane_count, "attach_s": statistics.median(attached),
        "daemon_gb_s": statistics.median(speeds["daemon"]), "memory_gb_s": statistics.median(speeds["memory"]),
        "ratio": statistics.median(ratios), "ratios": ratios,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lanes", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/node.sock"
        words = ["serve", "--unix", path, "--memory", "1GiB", "--client-memory", "512MiB", "--json"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore_cli", *words], stdout=subprocess.PIPE, text=True, env=clean
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                return 1
            row = measure(f"node://{path}?transport=shm", arguments.repeats, arguments.lanes)
        finally:
            process.terminate()
            process.wait(30)
    figures = {
        "daemon.get.16MiB.ratio": {"value": row["ratio"], "unit": "", "better": "higher", "bar": BAR},
        "daemon.attach": {"value": row["attach_s"] * 1e3, "unit": "ms", "better": "lower", "bar": None},
    }
    print(
        f"get 16 MiB x {COUNT}, {row['lanes']} lanes: daemon {row['daemon_gb_s']:.2f} GB/s, memory "
        f"{row['memory_gb_s']:.2f} GB/s, ratio {row['ratio']:.3f} (bar {BAR}); attach {row['attach_s'] * 1e3:.1f} ms"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": [row], "figures": figures}, indent=1), encoding="utf-8")
    if not row["verified"]:
        print("what was got is not what was put", file=sys.stderr)
    return 0 if row["verified"] and row["ratio"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
