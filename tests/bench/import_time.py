"""What `import kvstore` costs: the median of many interpreters, less that of a bare one.

    python tests/bench/import_time.py

The figure to stay under is 150 ms. Runs of all kinds are interleaved, so that a busy machine slows them alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 21
CASES = {"bare": "pass", "kvstore": "import kvstore", "kvstore.open_store": "import kvstore; kvstore.open_store"}


def main() -> int:
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):
        for name, code in CASES.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:20} {median:7.1f} ms   {median - medians['bare']:+7.1f} ms")
    return 0 if medians["kvstore"] - medians["bare"] < 150 else 1


if __name__ == "__main__":
    sys.exit(main())
