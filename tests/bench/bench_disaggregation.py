"""Prefill in one vLLM, decoding in another: what it costs requests that are being decoded, and the time to first token.

    python tests/bench/bench_disaggregation.py [--quick] [--json FILE] [--repeats 5] [--tokens 2000] [--running 2]

Real vLLM 0.32 engines (SmolLM2-135M, fp32, one thread each) and a node, each a process. `--running` requests are
decoded on a decoder; then a prompt of `--tokens` tokens arrives. In each repeat, one after the other:

* recompute: the decoder computes the prompt itself, 256 tokens a step;
* elsewhere, then serial: the prefiller computes it, and the decoder is told only once that has ended. Until then it is
  measured what two processes on one machine cost each other (memory bandwidth, caches, clock);
* tcp 256, shm 256: both are asked at once, and the decoder loads chunk by chunk while the prefiller computes;
* tcp 16: the same with chunks as large as a page.

Each of the last three has two engines of its own; whose turn it is not does nothing.

The inter-token latency (ITL) of the running requests is the time between the engine's steps that gave them a token, by
the decoder's clock, from the arrival of the prompt to its first token. The rise is the ratio of its median to what it
is when nothing arrives: the mean of the medians just before and just after, since contexts grow meanwhile. The time to
first token (TTFT) is from when one of the two engines took the request to when the decoder said its first token. Ratios
are taken within a repeat; a figure is the median of them. Decoders have core 0 for themselves; prefillers and node
share core 1, so the prefill is slower than where each has its own. Texts are compared.

On a machine that does something else as well, times tell of that. So the rise is given in CPU time of the decoder, too,
all its threads together: what loading takes from decoding, without what others take.

Exits with 1 if a text differs, or a figure misses its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvstore.testing.models import smollm2_folder
from kvstore_bench.report import plain_table
from tests.engines.support import interpreter
from tests.engines.vllm_roles import Role, served

BAR = 1.10  # median ITL while a prompt arrives, over the median when none does
CHUNK, PAGE, STEP = 256, 16, 256
NEW_TOKENS = 4
WARM_UP = 600  # tokens
QUICK_REPEATS, QUICK_S = 3, 225.0
DECODE, PREFILL = {"do_remote_decode": True}, {"do_remote_prefill": True}

Row = dict[str, Any]


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Token ids that no other seed gives."""
    ids, state = [], seed * 7919 + 1
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(200 + state % 40000)
    return ids


class Mark(NamedTuple):
    """A moment, or a span: seconds by the clock, and CPU seconds of the decoder."""

    at: float
    cpu: float


class Arrival(NamedTuple):
    """What happened while a prompt arrived.

    Attributes:
        what: see the module.
        gaps: between steps that gave a running request a token.
        ttft: seconds; of "elsewhere", until the prefill has ended.
        tokens, cached: of the answer.
        early: which part of the chunks that came was loaded before the prefill had ended.
    """

    what: str
    gaps: list[Mark]
    ttft: float
    tokens: list[int] | None = None
    cached: int | None = None
    early: float | None = None


class Pair:
    """A prefiller and a decoder that share a node by one transport and one chunk size."""

    def __init__(self, name: str, prefiller: Role, decoder: Role, running: int) -> None:
        self.name, self.prefiller, self.decoder, self.running = name, prefiller, decoder, running
        self._count = 0

    @property
    def _watched(self) -> str:
        return f"run {self._count} 0"

    def settle(self) -> None:
        """Requests are being decoded, and nothing else is done."""
        for n in range(self.running):
            self.decoder.ask(f"run {self._count} {n}", prompt_of(900 + n, 100), 1500, salt=f"run {n}")
        for n in range(self.running):
            self.decoder.until("token", name=f"run {self._count} {n}")
        self._heard(20)

    def _heard(self, steps: int) -> list[Mark]:
        """When so many steps of the running requests ended."""
        return [mark(self.decoder.until("token", name=self._watched)) for _ in range(steps)]

    def quiet(self, steps: int) -> Mark:
        """The median step when nothing arrives."""
        return median_of(gaps(self._heard(steps)))

    def recompute(self, name: str, prompt: list[int]) -> Arrival:
        """The decoder computes it itself, and stores and loads nothing."""
        self.decoder.ask(name, prompt, NEW_TOKENS, salt=f"{name} alone")
        asked = self.decoder.until("asked", name=name)
        return self._answered("recompute", name, asked["at"], [mark(asked)])

    def told(self, name: str, prompt: list[int]) -> Arrival:
        """Both are asked at once."""
        self.prefiller.ask(name, prompt, 1, params=DECODE)
        self.decoder.ask(name, prompt, NEW_TOKENS, params=PREFILL)
        begun = self.prefiller.until("asked", name=name)["at"]
        asked, before = self.decoder.until("asked", name=name), len(self.decoder.heard)
        found = self._answered(self.name, name, min(begun, asked["at"]), [mark(asked)])
        end = self.prefiller.until("done", name=name)["at"]
        came = [said for said in self.decoder.heard[before:] if said["event"] == "arrived"]
        if not came:
            raise SystemExit(f"{self.name}: nothing came of a prompt that the prefiller computed")
        none = came[0]["before"]
        in_time = max((said["chunks"] for said in came if said["at"] < end), default=none)
        return found._replace(early=(in_time - none) / (came[-1]["chunks"] - none))

    def serial(self, name: str, prompt: list[int]) -> list[Arrival]:
        """The decoder is asked once the prefill has ended. Also what happens until then."""
        self.prefiller.ask(name, prompt, 1, params=DECODE)
        arrived = self.prefiller.until("asked", name=name)["at"]
        end = self.prefiller.until("done", name=name)["at"]
        self.decoder.ask(name, prompt, NEW_TOKENS, params=PREFILL)
        marks = self._heard(1)
        while marks[-1].at < end:
            marks += self._heard(1)
        marks = [each for each in marks if each.at >= arrived]
        return [Arrival("elsewhere", gaps(marks), end - arrived), self._answered("serial", name, arrived, marks)]

    def _answered(self, what: str, name: str, begun: float, marks: list[Mark]) -> Arrival:
        """Until the decoder has answered."""
        first = None
        while True:
            said = self.decoder.next()
            if said["event"] == "token" and said["name"] == self._watched and first is None:
                marks.append(mark(said))
            elif said["event"] == "token" and said["name"] == name and first is None:
                first = said["at"]
            elif said["event"] == "done" and said["name"] == name:
                break
        assert first is not None
        return Arrival(what, gaps(marks), first - begun, said["tokens"], said["cached"])

    def stop(self) -> None:
        """No request is running any more; both engines' own prefix caches are empty."""
        for n in range(self.running):
            self.decoder.order("abort", name=f"run {self._count} {n}")
            self.decoder.until("aborted")
        self._count += 1
        for role in (self.prefiller, self.decoder):
            role.order("reset")
            role.until("reset")


def mark(said: dict[str, Any]) -> Mark:
    return Mark(said["at"], said["cpu"])


def gaps(marks: list[Mark]) -> list[Mark]:
    return [Mark(later.at - earlier.at, later.cpu - earlier.cpu) for earlier, later in itertools.pairwise(marks)]


def median_of(spans: Sequence[Mark]) -> Mark:
    return Mark(statistics.median(each.at for each in spans), statistics.median(each.cpu for each in spans))


@contextlib.contextmanager
def opened(python: Path, folder: Path, urls: dict[str, str], running: int) -> Iterator[list[Pair]]:
    """A pair for each transport, and one with pages for the first of them; all are started at once."""
    kinds = [(transport, CHUNK) for transport in urls] + [(next(iter(urls)), PAGE)]
    with contextlib.ExitStack() as stack:
        pairs = []
        for transport, chunk in kinds:
            name = f"{transport} {chunk}"
            extra = {"chunk_size": chunk, "save_unfull_chunk": True, "namespace": name, "prefill_timeout": "60s"}
            given = {"model": str(smollm2_folder()), "url": urls[transport], "longest": 4096, "blocks": 96,
                     "alarm": 3000, "extra": extra}  # fmt: skip
            prefiller, decoder = (
                stack.enter_context(Role(python, folder / f"{name} {role}.log", {**given, "role": role, **more}))
                for role, more in (
                    ("kv_producer", {"cores": [1], "batched": STEP}),
                    ("kv_consumer", {"cores": [0], "batched": STEP + running}),
                )
            )
            pairs.append(Pair(name, prefiller, decoder, running))
        for pair in pairs:
            for role in (pair.prefiller, pair.decoder):
                role.until("ready")
        yield pairs
        for pair in pairs:  # all at once; whoever leaves the context waits for each
            for role in (pair.prefiller, pair.decoder):
                role.order("end")


def measure(args: argparse.Namespace, python: Path, folder: Path) -> list[Row]:
    """All rows. With `--quick` no repeat is begun that might not end in time."""
    begun, rows = time.monotonic(), list[Row]()
    steps = 24 if args.quick else 60
    with served(folder, "4GiB", cores=[1]) as urls:
        wanted = {transport: urls[transport] for transport in args.transports}
        with opened(python, folder, wanted, args.running) as pairs:
            for pair in pairs:
                round_of(pair, [lambda pair=pair: [pair.told("warm up", prompt_of(1, WARM_UP))]], 3)  # type: ignore[misc]
            print(f"started after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            longest = 0.0
            for repeat in range(args.repeats):
                left = QUICK_S - (time.monotonic() - begun)
                if args.quick and repeat and longest * 1.05 > left:
                    print(f"{repeat} repeats: there is no time for another one", file=sys.stderr)
                    break
                start = time.monotonic()
                found = repeated(pairs, repeat, args.tokens, steps)
                print(json.dumps(found), file=sys.stderr, flush=True)
                rows += found
                longest = max(longest, time.monotonic() - start)
    return rows


def repeated(pairs: Sequence[Pair], repeat: int, tokens: int, steps: int) -> list[Row]:
    """One repeat: the same prompt in each way, and another one for "serial"."""
    prompt, other = prompt_of(repeat + 2, tokens), prompt_of(1000 + repeat, tokens)
    rows = []
    text: list[int] | None = None
    for number, pair in enumerate(pairs):
        ways: list[Callable[[], list[Arrival]]] = [lambda pair=pair: [pair.told(f"told {repeat}", prompt)]]  # type: ignore[misc]
        if not number:
            ways += [lambda pair=pair: pair.serial(f"serial {repeat}", other)]  # type: ignore[misc]
            if repeat % 2:
                ways.reverse()
            ways.insert(0, lambda pair=pair: [pair.recompute(f"recompute {repeat}", prompt)])  # type: ignore[misc]
        for arrival, quiet in round_of(pair, ways, steps):
            if arrival.what == "recompute":
                text = arrival.tokens
            if arrival.what == pair.name and arrival.tokens != text:
                raise SystemExit(f"{pair.name}: another text than computed alone: {arrival.tokens} {text}")
            if arrival.cached is not None and arrival.what != "recompute" and arrival.cached != tokens - 1:
                raise SystemExit(f"{arrival.what}: only {arrival.cached} of {tokens} tokens were loaded")
            rows.append(row_of(arrival, quiet, repeat))
    return rows


def round_of(
    pair: Pair, ways: Sequence[Callable[[], list[Arrival]]], steps: int
) -> list[tuple[Arrival, Mark]]:  # fmt: skip
    """A prompt arrives in each way, with what a step takes before and after."""
    pair.settle()
    found = []
    before = pair.quiet(steps)
    for way in ways:
        arrivals = way()
        after = pair.quiet(steps)
        quiet = Mark((before.at + after.at) / 2, (before.cpu + after.cpu) / 2)
        found += [(arrival, quiet) for arrival in arrivals]
        before = after
    pair.stop()
    return found


def row_of(arrival: Arrival, quiet: Mark, repeat: int) -> Row:
    times, itl = [gap.at for gap in arrival.gaps], median_of(arrival.gaps)
    return {
        "what": arrival.what, "repeat": repeat, "steps": len(times), "quiet_ms": quiet.at * 1e3,
        "itl_ms": itl.at * 1e3, "rise": itl.at / quiet.at, "cpu_rise": itl.cpu / quiet.cpu,
        "p95_ms": percentile(times, 0.95) * 1e3, "longest_ms": max(times) * 1e3, "ttft_s": arrival.ttft,
        "early": arrival.early,
    }  # fmt: skip


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures_of(rows: list[Row], transports: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ratios of TTFT are of the first transport."""
    by = {(row["what"], row["repeat"]): row for row in rows}
    repeats = range(1 + max(row["repeat"] for row in rows))
    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, values: Iterator[float], unit: str, bar: float | None = None, better: str = "lower") -> None:
        figures[f"disaggregation.{name}"] = {
            "value": statistics.median(values), "unit": unit, "better": better, "bar": bar,
        }  # fmt: skip

    for transport in transports:
        ours = f"{transport} {CHUNK}"
        add(f"itl_rise.{transport}", (by[ours, n]["rise"] for n in repeats), "ratio", BAR)
        add(f"itl_cpu_rise.{transport}", (by[ours, n]["cpu_rise"] for n in repeats), "ratio")
        add(f"ttft.{transport}", (by[ours, n]["ttft_s"] for n in repeats), "s")
        add(f"loaded_early.{transport}", (by[ours, n]["early"] for n in repeats), "ratio", better="higher")
    chunked, paged = f"{transports[0]} {CHUNK}", f"{transports[0]} {PAGE}"
    for name, theirs in (("pages", paged), ("recompute", "recompute"), ("serial", "serial")):
        add(f"ttft_vs_{name}", (by[chunked, n]["ttft_s"] / by[theirs, n]["ttft_s"] for n in repeats), "ratio")
    add("ttft_after_prefill", (by["serial", n]["ttft_s"] - by["elsewhere", n]["ttft_s"] for n in repeats), "s")
    for name, what in (("elsewhere", "elsewhere"), ("pages", paged), ("recompute", "recompute")):
        add(f"itl_rise.{name}", (by[what, n]["rise"] for n in repeats), "ratio")
    return figures


def table(rows: list[Row]) -> str:
    columns = ("quiet_ms", "itl_ms", "rise", "cpu_rise", "p95_ms", "longest_ms", "ttft_s")
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        some = [row for row in rows if row["what"] == what]
        lines.append([what, *(f"{statistics.median(row[name] for row in some):.3g}" for name in columns)])
    headings = ["the prompt is", "quiet ms", "ITL ms", "rise", "CPU rise", "p95 ms", "longest ms", "TTFT s"]
    return plain_table(headings, lines, text=(0,))


def main() -> int:
    parser = argparse.ArgumentParser(description="disaggregated prefill with vLLM engines")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_REPEATS} repeats, and 4 minutes")
    parser.add_argument("--repeats", type=int, default=None, help="default: 5")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--running", type=int, default=2, help="requests that are being decoded")
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm"], choices=["tcp", "shm"])
    args = parser.parse_args()
    args.repeats = args.repeats or (QUICK_REPEATS if args.quick else 5)
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two cores are needed: one for decoders, one for prefillers")
    python, load = interpreter("vllm"), os.getloadavg()[0]
    os.sched_setaffinity(0, [1])  # decoders have core 0 for themselves
    with tempfile.TemporaryDirectory(prefix="kvpd") as folder:
        rows = measure(args, python, Path(folder))
    figures = figures_of(rows, args.transports)
    sys.stdout.write(table(rows))
    for name, figure in figures.items():
        bar = "" if figure["bar"] is None else f"  (bar: {figure['bar']})"
        print(f"{name}: {figure['value']:.3g} {figure['unit']}{bar}")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        repeats = 1 + max(row["repeat"] for row in rows)
        machine = {"cores": os.cpu_count(), "decoder": [0], "prefiller_and_node": [1], "load_before": load}
        found = {"machine": machine, "repeats": repeats, "rows": rows, "figures": figures}
        Path(args.json).write_text(json.dumps(found, indent=1))
    missed = [name for name, f in figures.items() if f["bar"] is not None and f["value"] > f["bar"]]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
