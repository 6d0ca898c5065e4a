"""What eviction policies cost: time per decision and memory per record, at a million records.

    python tests/bench/bench_eviction.py [--records N] [--policies LIST] [--json FILE]

Records are in chains of 16, as prompts are, with sessions. At that many records, each of up to 12,500 rounds uses an
old chain (`touch`), brings a new one (`admit` each, `touch` all), and makes room for it (`victims`, `forget` each).
Timed apart, per record: `touch_us`, `admit_us` (with its touch), and `decision_us` for what goes. Memory is what
`tracemalloc` counts after all have come and each was used once more; keys and what the owner says of them
(`RecordInfo`) are made before, as they are not the policy's. Figures: `eviction.POLICY.decision_us` (bar 5),
`.admit_us`, `.touch_us`, `.bytes_per_record` (bar 400).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from kvstore.eviction import POLICIES, EvictionPolicy, RecordInfo, make_policy
from kvstore.keys import Key

CHAIN = 16
TOKENS = 256
BARS = {"decision_us": 5.0, "bytes_per_record": 400.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_keys(count: int, seed: int) -> list[Key]:
    random_ = random.Random(seed)
    return [Key(random_.randbytes(32)) for _ in range(count)]


def infos(session: str) -> list[RecordInfo]:
    return [RecordInfo(place * TOKENS, TOKENS, session, 1) for place in range(CHAIN)]


def fill(policy: EvictionPolicy, clock: Clock, keys: Sequence[Key], about: Sequence[list[RecordInfo]]) -> None:
    for number, start in enumerate(range(0, len(keys), CHAIN)):
        clock.now += 0.25
        parent = None
        for key, info in zip(keys[start : start + CHAIN], about[number], strict=False):
            policy.admit(key, 1 << 20, parent=parent, info=info)
            parent = key
        policy.touch(keys[start : start + CHAIN])


def measure(name: str, records: int) -> dict[str, float]:
    keys = make_keys(records, 1)
    about = [infos(f"s{number}") for number in range(-(-records // CHAIN))]
    clock = Clock()
    gc.collect()
    tracemalloc.start()
    policy = make_policy(name, clock=clock)
    fill(policy, clock, keys, about)
    for start in range(0, records, CHAIN):
        clock.now += 0.25
        policy.touch(keys[start : start + CHAIN])
    memory = tracemalloc.get_traced_memory()[0] / records
    tracemalloc.stop()

    # Steady state at this size: every request brings a new chain and uses an old one.
    count = min(200_000, records // 2) // CHAIN * CHAIN
    fresh = make_keys(count, 2)
    fresh_about = [infos(f"f{number}") for number in range(count // CHAIN)]
    random_ = random.Random(3)
    old = [random_.randrange(records // CHAIN) * CHAIN for _ in range(count // CHAIN)]
    touching = admitting = deciding = 0
    gc.collect()
    for number, start in enumerate(range(0, count, CHAIN)):
        clock.now += 0.25
        chain, again, info = fresh[start : start + CHAIN], keys[old[number] : old[number] + CHAIN], fresh_about[number]
        first = time.process_time_ns()
        policy.touch(again)
        second = time.process_time_ns()
        parent = None
        for key, each in zip(chain, info, strict=True):
            policy.admit(key, 1 << 20, parent=parent, info=each)
            parent = key
        policy.touch(chain)
        third = time.process_time_ns()
        left = CHAIN
        for victim in policy.victims():
            policy.forget(victim)
            left -= 1
            if not left:
                break
        deciding += time.process_time_ns() - third
        admitting += third - second
        touching += second - first
    assert len(policy) == records
    return {
        "decision_us": deciding / count / 1e3,
        "admit_us": admitting / count / 1e3,
        "touch_us": touching / count / 1e3,
        "bytes_per_record": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--policies", default=",".join(name for name in POLICIES if name != "none"))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for name in args.policies.split(","):
        for what, value in measure(name, args.records).items():
            bar = BARS.get(what)
            figures[f"eviction.{name}.{what}"] = {
                "value": value, "unit": "bytes" if what.startswith("bytes") else "us", "better": "lower", "bar": bar,
            }  # fmt: skip
            verdict = "" if bar is None else f"  (bar ≤ {bar:g}: {'met' if value <= bar else 'NOT met'})"
            sys.stdout.write(f"eviction.{name}.{what} = {value:.2f}{verdict}\n")
            sys.stdout.flush()
    if args.json:
        Path(args.json).write_text(json.dumps({"figures": figures}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
