"""Does a folder with a million records cost more per key than one with a thousand?

    python tests/bench/bench_scale.py [--keys N] [--folder DIR] [--json FILE]

Stat (64-key batches of keys drawn at random, half of them present) and listing, µs per key, with 1,000 and with N
records of a few bytes each, all seeded behind the backend's back. Figures: `file.scale.stat.ratio` and
`file.scale.list.ratio` (N against 1,000; at most 1.5). Needs about 4.5 GB of disk for a million files of one block.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from kvstore.backend import Backend
from kvstore.keys import Key
from kvstore.registry import open_backend

SMALL = 1000
BAR = 1.5


def key(number: int) -> Key:
    return Key(hashlib.sha256(b"scale %d" % number).digest())


def seed(folder: Path, count: int) -> None:
    """Make `count` records the way the backend lays them out, faster than it would write them."""
    with_one = open_backend(f"file://{folder}")
    from kvstore.backend import NO_DEADLINE, Write

    with_one.put([Write(key(0), [memoryview(b"record")])], deadline=NO_DEADLINE)
    with_one.close()
    sample = next(path for path in folder.rglob("*") if path.is_file() and key(0).hex() in path.name)
    suffix = sample.name.removeprefix(key(0).hex())
    depth = len(sample.relative_to(folder).parts) - 1
    made: set[str] = set()
    for number in range(1, count):
        name = key(number).hex()
        parent = os.path.join(folder, *(name[2 * level : 2 * level + 2] for level in range(depth)))
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        os.close(os.open(os.path.join(parent, name + suffix), os.O_CREAT | os.O_WRONLY, 0o644))


def stat_us(backend: Backend, count: int, repeats: int) -> float:
    """Median µs per key of a 64-key stat, half of the keys present."""
    rng = random.Random(0)
    times = []
    for _ in range(repeats):
        keys = [key(rng.randrange(count)) for _ in range(32)] + [key(count + rng.randrange(count)) for _ in range(32)]
        start = time.perf_counter()
        outcomes = backend.stat(keys, deadline=start + 3600)
        times.append((time.perf_counter() - start) / len(keys) * 1e6)
        if [outcome.ok for outcome in outcomes] != [True] * 32 + [False] * 32:
            raise SystemExit("stat gave a wrong answer")
    return statistics.median(times)


def list_us(backend: Backend, count: int, repeats: int) -> float:
    """Median µs per key of a full listing."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        total = sum(len(page) for page in backend.list(deadline=float("inf")))
        times.append((time.perf_counter() - start) / count * 1e6)
        if total != count:
            raise SystemExit(f"listing gave {total} keys instead of {count}")
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--folder", default=None, help="where to make the folders (default: the temporary folder)")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="kvstore-scale-", dir=args.folder))
    try:
        rows: dict[int, tuple[float, float]] = {}
        opened: dict[int, Backend] = {}
        for count in (SMALL, args.keys):
            folder = base / str(count)
            folder.mkdir()
            start = time.perf_counter()
            seed(folder, count)
            print(f"{count} records made in {time.perf_counter() - start:.0f} s", flush=True)
            opened[count] = open_backend(f"file://{folder}")
        stats: dict[int, list[float]] = {count: [] for count in opened}
        for _ in range(5):  # interleaved, so that noise hits both
            for count, backend in opened.items():
                stats[count].append(stat_us(backend, count, 100))
        lists = {count: list_us(backend, count, 50 if count == SMALL else 3) for count, backend in opened.items()}
        for count, backend in opened.items():
            rows[count] = (statistics.median(stats[count]), lists[count])
            print(f"{count:>9} records: stat {rows[count][0]:.2f} µs per key, list {rows[count][1]:.2f} µs per key")
            backend.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    figures = {
        name: {"value": rows[args.keys][at] / rows[SMALL][at], "unit": "", "better": "lower", "bar": BAR}
        for at, name in enumerate(("file.scale.stat.ratio", "file.scale.list.ratio"))
    }
    for name, figure in figures.items():
        print(f"{name} {figure['value']:.2f} (bar {BAR})")
    if args.json:
        Path(args.json).write_text(json.dumps({"figures": figures}, indent=1), encoding="utf-8")
    return 0 if all(float(figure["value"] or 0) <= BAR for figure in figures.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
