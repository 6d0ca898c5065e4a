"""How many token ids per second become keys, on one core, next to SHA-256 of the same bytes in the same run.

    python tests/bench/bench_keys.py [--json FILE] [--tokens 131072] [--repeats 25]

The forms and the ceiling take turns, repeat by repeat, so that a busy machine slows all of them; medians are given, and
the ratio to the ceiling is taken per repeat. The ceiling is one SHA-256 over all token ids as u32: ours hashes the same
bytes in chunks and derives a key from each, and a wider array has to be narrowed and checked first. Exits with 1 if a
figure does not reach its bar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.keys import KeyContext, chunk_keys
from kvstore.layout import KVLayout

BARS = {"keys.numpy.mtok_s": 60.0, "keys.list.mtok_s": 20.0}
CONTEXT = KeyContext(model="HuggingFaceTB/SmolLM2-135M-Instruct", layout=KVLayout(30, 3, 64), dtype="bfloat16")


def contestants(count: int) -> dict[str, Callable[[], object]]:
    """By name; all work on the same token ids."""
    tokens = np.random.default_rng(1).integers(0, 151_936, count)
    narrow, plain = tokens.astype(np.uint32), tokens.tolist()
    data = narrow.tobytes()
    return {
        "ceiling": lambda: hashlib.sha256(data).digest(),
        "numpy": lambda: chunk_keys(tokens, context=CONTEXT),  # int64, as torch and most tokenizers give them
        "numpy_u32": lambda: chunk_keys(narrow, context=CONTEXT),
        "list": lambda: chunk_keys(plain, context=CONTEXT),
        "list_chunk16": lambda: chunk_keys(plain, context=CONTEXT, chunk_size=16),
    }


def measure(count: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each contestant: median seconds, M tokens/s, ratio to the ceiling of the same repeat."""
    work = contestants(count)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, run in work.items():
            begin = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, taken in seconds.items():
        ratios = [top / mine for top, mine in zip(seconds["ceiling"], taken, strict=True)]
        median = statistics.median(taken)
        rows.append({"name": name, "tokens": count, "seconds": median, "mtok_s": count / median / 1e6,
                     "best_mtok_s": count / min(taken) / 1e6, "ratio": statistics.median(ratios)})  # fmt: skip
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        f"keys.{row['name']}.mtok_s": {
            "value": round(row["mtok_s"], 1), "unit": "M tokens/s", "better": "higher",
            "bar": BARS.get(f"keys.{row['name']}.mtok_s"),
        }
        for row in rows
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and figures")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=25)
    given = parser.parse_args()
    rows = measure(given.tokens, given.repeats)
    found = figures(rows)
    print(f"{given.tokens} tokens, chunks of 256, median of {given.repeats}; ceiling: one SHA-256 over the token ids")
    for row in rows:
        bar = found[f"keys.{row['name']}.mtok_s"]["bar"]
        print(
            f"{row['name']:>13} {row['mtok_s']:8.1f} M tokens/s  (best {row['best_mtok_s']:6.1f})  {row['ratio']:5.2f}"
            + f" of the ceiling{f'   bar {bar:g}' if bar else ''}"
        )
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "figures": found}, indent=1) + "\n")
    missed = [name for name, figure in found.items() if figure["bar"] and figure["value"] < figure["bar"]]
    if missed:
        print(f"not reached: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
