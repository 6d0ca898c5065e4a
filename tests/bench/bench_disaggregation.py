"""Prefill in one vLLM, decoding in another: what it costs requests that are being decoded, and the time to first token.

    python tests/bench/bench_disaggregation.py [--json FILE] [--repeats 5] [--tokens 2000] [--running 2]

Two real vLLM 0.32 engines (SmolLM2-135M, fp32, one thread each) and a node, each a process. `--running` requests are
decoded on the decoder; then a prompt of `--tokens` tokens arrives. In each repeat, one after the other:

* quiet: nothing arrives, before each of the following;
* elsewhere: the prefiller computes the prompt, and the decoder is not told: what two processes on one machine cost each
  other (memory bandwidth, caches, clock);
* for each transport (tcp, shm), chunks of 256 tokens: the decoder is told, and loads chunk by chunk;
* the same with chunks as large as a page, 16 tokens, in engines of their own;
* recompute: the decoder computes the prompt itself, 256 tokens a step.

The inter-token latency (ITL) of the running requests is the time between the engine's steps that gave them a token, by
the decoder's clock, from the arrival of the prompt to its first token. The rise is the ratio of the median to that of
"quiet" in the same repeat; the figure is the median of these ratios. The time to first token (TTFT) is from when one of
the two engines took the request to when the decoder said its first token. The decoder has core 0 for itself; prefiller
and node share core 1, so the prefill is slower than where each has its own. The text is compared each time.

On a machine that does something else as well, times tell of that. So the same is given in CPU time of the decoder, all
its threads together, which is what the time would be if it had its core for itself: what loading takes from decoding,
without what others take.

Exits with 1 if a text differs, or a figure misses its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
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


class Pair:
    """A prefiller and a decoder that share a node by one transport and one chunk size."""

    def __init__(self, prefiller: Role, decoder: Role, running: int) -> None:
        self.prefiller, self.decoder, self.running = prefiller, decoder, running
        self._count = 0

    def settle(self) -> None:
        """Requests are being decoded, and nothing else is done."""
        for n in range(self.running):
            self.decoder.ask(f"run {self._count} {n}", prompt_of(900 + n, 100), 1500, salt=f"run {n}")
        for n in range(self.running):
            self.decoder.until("token", name=f"run {self._count} {n}")
        self._heard(20)

    def _heard(self, steps: int) -> list[Mark]:
        """When so many steps of the running requests ended."""
        name = f"run {self._count} 0"
        return [mark(self.decoder.until("token", name=name)) for _ in range(steps)]

    def quiet(self, steps: int) -> list[Mark]:
        return gaps(self._heard(steps))

    def arrive(self, name: str, prompt: list[int], how: str) -> dict[str, Any]:
        """A prompt arrives; ITL until its first token, its TTFT, its text. `how`: elsewhere, told, recompute."""
        arrived = math.inf
        if how != "recompute":
            self.prefiller.ask(name, prompt, 1, params={"do_remote_decode": True})
            arrived = self.prefiller.until("asked", name=name)["at"]
        if how == "elsewhere":
            end = self.prefiller.until("done", name=name)["at"]
            marks = self._heard(1)
            while marks[-1].at < end:
                marks += self._heard(1)
            return {"gaps": gaps([each for each in marks if each.at >= arrived]), "ttft": end - arrived, "tokens": None}
        params = {"do_remote_prefill": True} if how == "told" else None
        self.decoder.ask(name, prompt, NEW_TOKENS, params=params, salt=None if how == "told" else f"{name} alone")
        asked = self.decoder.until("asked", name=name)
        marks, first = [mark(asked)], None
        while True:
            said = self.decoder.next()
            if said["event"] == "token" and said["name"] == f"run {self._count} 0" and first is None:
                marks.append(mark(said))
            elif said["event"] == "token" and said["name"] == name and first is None:
                first = said["at"]
            elif said["event"] == "done" and said["name"] == name:
                break
        assert first is not None
        if how == "told":
            self.prefiller.until("done", name=name)
        begun = min(asked["at"], arrived)
        return {"gaps": gaps(marks), "ttft": first - begun, "tokens": said["tokens"], "cached": said["cached"]}

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


@contextlib.contextmanager
def opened(python: Path, folder: Path, url: str, chunk: int, running: int) -> Iterator[Pair]:
    folder.mkdir()
    extra = {"chunk_size": chunk, "save_unfull_chunk": True, "namespace": f"chunk{chunk}", "prefill_timeout": "60s"}
    given = {"model": str(smollm2_folder()), "url": url, "longest": 4096, "blocks": 96, "alarm": 3000, "extra": extra}
    with (
        Role(
            python, folder / "prefill.log", {**given, "role": "kv_producer", "cores": [1], "batched": STEP}
        ) as prefiller,
        Role(
            python, folder / "decode.log", {**given, "role": "kv_consumer", "cores": [0], "batched": STEP + running}
        ) as decoder,
    ):
        for role in (prefiller, decoder):
            role.until("ready")
        yield Pair(prefiller, decoder, running)


def measure(args: argparse.Namespace, python: Path, folder: Path) -> list[dict[str, Any]]:
    """All rows. Chunks and pages take turns, each with engines of its own; whose turn it is not does nothing."""
    rows: list[dict[str, Any]] = []
    with served(folder, "4GiB", cores=[1]) as urls:
        for transport in args.transports:
            with contextlib.ExitStack() as stack:
                pairs = {
                    chunk: stack.enter_context(
                        opened(python, folder / f"{transport}{chunk}", urls[transport], chunk, args.running)
                    )
                    for chunk in (CHUNK, PAGE)
                }
                texts: dict[int, list[int]] = {}
                for repeat in range(-1, args.repeats):  # the first one warms up
                    for chunk, pair in pairs.items():
                        found = round_of(pair, f"{transport} {chunk}", repeat, args.tokens, texts)
                        print(json.dumps(found), file=sys.stderr, flush=True)
                        rows += found
    return [row for row in rows if row["repeat"] >= 0]


def round_of(pair: Pair, name: str, repeat: int, tokens: int, texts: dict[int, list[int]]) -> list[dict[str, Any]]:
    """One repeat: quiet, then the same prompt in each way. The first to have a prompt also computes its text, and
    measures what does not depend on the size of chunks."""
    prompt, other = prompt_of(repeat + 2, tokens), prompt_of(1000 + repeat, tokens)
    ways = {} if repeat in texts else {"elsewhere": other, "recompute": prompt}
    ways["told"] = prompt
    found: dict[str, Any] = {}
    pair.settle()
    for how, tokens_of in ways.items():
        quiet = median_of(pair.quiet(40))  # just before: their contexts grow, and the machine changes
        found[how] = {**pair.arrive(f"{how} {repeat}", tokens_of, how), "quiet": quiet}
    pair.stop()
    texts.setdefault(repeat, found.get("recompute", {}).get("tokens"))
    if found["told"]["tokens"] != texts[repeat]:
        raise SystemExit(f"{name}: another text than computed alone: {found['told']['tokens']} {texts[repeat]}")
    if found["told"]["cached"] != tokens - 1:
        raise SystemExit(f"{name}: only {found['told']['cached']} of {tokens} tokens were loaded")
    rows = []
    for how, each in found.items():
        times, itl, quiet = [gap.at for gap in each["gaps"]], median_of(each["gaps"]), each["quiet"]
        rows.append({
            "what": name if how == "told" else how, "of": name, "repeat": repeat, "steps": len(times),
            "quiet_ms": quiet.at * 1e3, "itl_ms": itl.at * 1e3, "rise": itl.at / quiet.at,
            "cpu_rise": itl.cpu / quiet.cpu, "p95_ms": percentile(times, 0.95) * 1e3,
            "longest_ms": max(times) * 1e3, "ttft_s": each["ttft"],
        })  # fmt: skip
    return rows


def median_of(spans: list[Mark]) -> Mark:
    return Mark(statistics.median(each.at for each in spans), statistics.median(each.cpu for each in spans))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures_of(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    def median(what: str, column: str, of: str | None = None) -> float:
        return statistics.median(r[column] for r in rows if r["what"] == what and (of is None or r["of"] == of))

    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float, unit: str, bar: float | None = None) -> None:
        figures[name] = {"value": value, "unit": unit, "better": "lower", "bar": bar}

    for transport in args.transports:
        chunked, paged = f"{transport} {CHUNK}", f"{transport} {PAGE}"
        add(f"disaggregation.{transport}.itl_rise", median(chunked, "rise"), "ratio", BAR)
        add(f"disaggregation.{transport}.itl_cpu_rise", median(chunked, "cpu_rise"), "ratio")
        add(f"disaggregation.{transport}.itl_rise_elsewhere", median("elsewhere", "rise", chunked), "ratio")
        add(f"disaggregation.{transport}.ttft", median(chunked, "ttft_s"), "s")
        add(f"disaggregation.{transport}.ttft_vs_pages", ratio(rows, chunked, paged), "ratio")
        add(f"disaggregation.{transport}.ttft_vs_recompute", own_ratio(rows, chunked), "ratio")
        add(f"disaggregation.{transport}.itl_rise_pages", median(paged, "rise"), "ratio")
    add("disaggregation.itl_rise_recompute", median("recompute", "rise"), "ratio")
    return figures


def ratio(rows: list[dict[str, Any]], ours: str, theirs: str) -> float:
    """TTFT of two runs, repeat by repeat."""
    by = {(row["what"], row["repeat"]): row["ttft_s"] for row in rows}
    return statistics.median(by[ours, n] / by[theirs, n] for what, n in by if what == ours)


def own_ratio(rows: list[dict[str, Any]], ours: str) -> float:
    """TTFT to recomputing, within each repeat of a run."""
    by = {(row["what"], row["repeat"]): row["ttft_s"] for row in rows if row["of"] == ours}
    return statistics.median(by[ours, n] / by["recompute", n] for what, n in by if what == ours)


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("quiet_ms", "itl_ms", "rise", "cpu_rise", "p95_ms", "longest_ms", "ttft_s")
    lines = []
    for what, of in dict.fromkeys((row["what"], row["of"]) for row in rows):
        some = [row for row in rows if (row["what"], row["of"]) == (what, of)]
        values = [f"{statistics.median(row[name] for row in some):.3g}" for name in columns]
        lines.append([what if what == of else f"{what} (beside {of})", *values])
    headings = ["the prompt is", "quiet ms", "ITL ms", "rise", "CPU rise", "p95 ms", "longest ms", "TTFT s"]
    return plain_table(headings, lines, text=(0,))


def main() -> int:
    parser = argparse.ArgumentParser(description="disaggregated prefill with two vLLM engines")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--running", type=int, default=2, help="requests that are being decoded")
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm"], choices=["tcp", "shm"])
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two cores are needed: one for each engine")
    python = interpreter("vllm")
    with tempfile.TemporaryDirectory(prefix="kvpd") as folder:
        rows = measure(args, python, Path(folder))
    figures = figures_of(rows, args)
    sys.stdout.write(table(rows))
    for name, figure in figures.items():
        bar = "" if figure["bar"] is None else f"  (bar: {figure['bar']})"
        print(f"{name}: {figure['value']:.3g} {figure['unit']}{bar}")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        machine = {"cores": os.cpu_count(), "decoder": [0], "prefiller_and_node": [1]}
        Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows, "figures": figures}, indent=1))
    missed = [name for name, f in figures.items() if f["bar"] is not None and f["value"] > f["bar"]]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
