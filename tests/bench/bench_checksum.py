"""Which checksum: speed per core on blocks that are not in a cache, and what two threads do together.

    python tests/bench/bench_checksum.py [--json FILE] [--block 262144] [--total 536870912] [--repeats 9]

Each pass goes once over `--total` bytes (far more than the caches hold) in `--block` pieces. The candidates, and for
comparison a memcpy of the same blocks into one that stays in the cache, take turns, repeat by repeat, so that a busy
machine slows all of them; medians are given. "2 threads" is the throughput of two threads over that of one, each on its
half: near 2 means that the GIL is released and two cores are free. "GIL" shows it without a second free core, as the
share of its usual steps that a counting Python thread makes while checksums of large blocks run: near 0 it is held,
about 0.5 it is released on one core, near 1 on two. blake3, crc32c and zlib-ng show up if they are installed. Exits
with 1 if the figure does not reach its bar.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore.record import checksum

BARS = {"record.checksum.gb_s": 12.0}
Work = Callable[[memoryview], object]


def candidates() -> dict[str, Work]:
    found: dict[str, Work] = {
        "kvstore": checksum,
        "xxh3_64": xxhash.xxh3_64_intdigest,
        "xxh3_128": xxhash.xxh3_128_intdigest,
        "xxh64": xxhash.xxh64_intdigest,
        "crc32": zlib.crc32,
        "adler32": zlib.adler32,
        "blake2b": lambda block: hashlib.blake2b(block).digest(),
        "sha256": lambda block: hashlib.sha256(block).digest(),
    }
    for module, name in (("blake3", "blake3"), ("crc32c", "crc32c"), ("zlib_ng.zlib_ng", "crc32")):
        try:
            function = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        found[module] = function
    return found


def one_pass(work: Work, blocks: list[memoryview]) -> float:
    begin = time.perf_counter()
    for block in blocks:
        work(block)
    return time.perf_counter() - begin


def two_threads(work: Work, blocks: list[memoryview], threads: ThreadPoolExecutor) -> float:
    begin = time.perf_counter()
    list(threads.map(lambda part: one_pass(work, part), (blocks[::2], blocks[1::2])))
    return time.perf_counter() - begin


def gil_share(work: Work, large: memoryview) -> float:
    """Steps per second of a counting thread while `work` runs, over those while this thread merely waits."""
    stop = threading.Event()
    count = [0]

    def counting() -> None:
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=counting)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that a held GIL is not shared fairly between the calls
    thread.start()
    rates = []
    for busy in (False, True):
        begin, before = time.perf_counter(), count[0]
        if busy:
            while time.perf_counter() - begin < 0.1:
                work(large)
        else:
            threading.Event().wait(0.1)
        rates.append((count[0] - before) / (time.perf_counter() - begin))
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    return rates[1] / max(rates[0], 1.0)


def measure(block_bytes: int, total: int, repeats: int) -> list[dict[str, Any]]:
    memory = np.random.default_rng(2).integers(0, 256, total, dtype=np.uint8)
    blocks = [memory[at : at + block_bytes].data for at in range(0, total - block_bytes + 1, block_bytes)]
    work = candidates()
    slow = {name for name, run in work.items() if one_pass(run, blocks[:16]) > 16 * block_bytes / 3e9}
    one: dict[str, list[float]] = {name: [] for name in ("[memcpy]", *work)}
    two: dict[str, list[float]] = {name: [] for name in work}
    cached = np.zeros(block_bytes, np.uint8)

    def copy(block: memoryview) -> None:
        np.copyto(cached, np.frombuffer(block, np.uint8))

    with ThreadPoolExecutor(2) as threads:
        for _ in range(repeats):
            part = blocks[: len(blocks) // 8]
            one["[memcpy]"].append(one_pass(copy, blocks) / len(blocks))
            for name, run in work.items():
                mine = part if name in slow else blocks
                one[name].append(one_pass(run, mine) / len(mine))
                two[name].append(two_threads(run, mine, threads) / len(mine))
    rows = []
    for name, taken in one.items():
        row = {"name": name, "block_bytes": block_bytes, "gb_s": block_bytes / statistics.median(taken) / 1e9}
        if name in two:
            row["two_threads"] = statistics.median(a / b for a, b in zip(taken, two[name], strict=True))
            row["gil_share"] = gil_share(work[name], memory[: 256 << 20].data)
        rows.append(row)
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    speed = next(row["gb_s"] for row in rows if row["name"] == "kvstore")
    name = "record.checksum.gb_s"
    return {name: {"value": round(speed, 1), "unit": "GB/s", "better": "higher", "bar": BARS[name]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and figures")
    parser.add_argument("--block", type=int, default=256 << 10, metavar="BYTES")
    parser.add_argument("--total", type=int, default=512 << 20, metavar="BYTES")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    rows = measure(given.block, given.total, given.repeats)
    found = figures(rows)
    print(f"blocks of {given.block} bytes out of {given.total >> 20} MiB, median of {given.repeats}")
    for row in sorted(rows, key=lambda row: -row["gb_s"]):
        more = f"   2 threads {row['two_threads']:4.2f}   GIL {row['gil_share']:4.2f}" if "two_threads" in row else ""
        print(f"{row['name']:>18} {row['gb_s']:6.2f} GB/s{more}")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "figures": found}, indent=1) + "\n")
    missed = [name for name, figure in found.items() if figure["value"] < figure["bar"]]
    if missed:
        print(f"not reached: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
