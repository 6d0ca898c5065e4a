"""`kvstore-bench stream`: does a prompt's KV come within its SLO over links that change, and at what quality?

Real KV of a real text, encoded by each codec, crosses a token bucket whose rate is drawn anew for each request and, for
half of them, drops in the middle. Adaptive streaming (`kvstore.stream`) against loading everything in 8 bit or raw,
against computing everything, and against an oracle that knows the link's schedule. Lengths come from a trace.

Computing is a sleep by the prefill curve that was measured on this model here, scaled so that a prompt of mean length
takes `--text` SLOs to compute: so neither the machine's load nor its speed decides who wins.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.options import parse_duration
from kvstore.stream import Policy, PrefillModel
from kvstore.stream.course import Course
from kvstore.stream.estimates import LinkShare

from .models import model_folder
from .outputs import prepare_outputs, write_outputs
from .progress import progress_bar
from .report import Figure
from .stream_report import StreamReport, StreamRow
from .stream_sim import oracle, simulate

if TYPE_CHECKING:
    from .progress import Progress
    from .stream_run import Draw, Ran
    from .stream_world import Shelf, World

__all__ = ["Setting", "add_arguments", "draw_requests", "run", "run_stream"]

_LOW, _HIGH = 0.1, 10.0  # Gbit/s, as in CacheGen's evaluation; only their ratio to the mean matters here
_MEAN = (_LOW + _HIGH) / 2
_RAW_SLOS = 10.0  # loading raw KV takes so many SLOs at the mean bandwidth
_DROP_SHARE = 0.5  # of the links become slower in the middle
_DROP_AT = (0.1, 0.8)  # of the SLO
_DROP_BY = (2.0, 10.0)
_MOONCAKE = (2306, 6909, 15368)  # quartiles of the lengths in its conversation trace, for runs without a trace
_DECODE_SHARE = 0.25  # of the SLO, at most, that decoding a prompt of mean length takes
_GRID_S = 0.8  # that computing the longest prompt of the decision grid takes
_TOGETHER = 4
_SIMULATED = 300


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        requests: how many.
        mean: tokens of a prompt of mean length; the trace's lengths are scaled to it.
        most: no prompt is longer; tokens.
        slo_s: of every request, whatever its length. Loading a prompt of mean length raw takes ten of them at the mean
            bandwidth. Raised if this machine decodes so slowly that it would matter more than the link.
        text_slos: computing a prompt of mean length takes so many SLOs.
        new_tokens: behind the prompt.
        side_runs: requests that are also loaded raw and streamed with cachegen for real. When the other raw ones would
            have come follows from the link.
        grid: (rates, lengths in chunks) of the decision grid.
        packaged: take the profiles that come with the package where none were made here.
    """

    requests: int = 40
    mean: int = 1024
    most: int = 3072
    chunk: int = 128
    dtype: str = "float32"
    slo_s: float = 1.0
    text_slos: float = 2.0
    new_tokens: int = 8
    latency_s: float = 2e-3
    seed: int = 0
    side_runs: int = 15
    grid: tuple[int, tuple[int, ...]] = (12, (1, 2, 4, 6, 8))
    packaged: bool = False

    @classmethod
    def quick(cls) -> Setting:
        """Under a minute, if the profiles need not be made."""
        return cls(
            requests=18, mean=768, most=1536, slo_s=0.7, side_runs=2, grid=(6, (1, 2, 4)), packaged=True,
        )  # fmt: skip


def draw_requests(setting: Setting, lengths: Sequence[int], raw_bytes_per_token: int, most_chunks: int) -> list[Draw]:
    """Requests: lengths from the trace, scaled; a bandwidth each from U(0.1, 10) Gbit/s, scaled so that raw KV takes
    ten SLOs at the mean; half of the links drop by a factor of 2 to 10 in the middle. The same seed draws the same.

    Args:
        lengths: tokens of the trace's prompts; none: the quartiles of Mooncake's conversations.
        most_chunks: that are stored.
    """
    from .stream_run import Draw

    rng = random.Random(setting.seed)
    mean_rate = setting.mean * raw_bytes_per_token / (_RAW_SLOS * setting.slo_s)
    if not lengths:
        spread = math.log(_MOONCAKE[2] / _MOONCAKE[0]) / (2 * 0.6745)
        lengths = [round(_MOONCAKE[1] * math.exp(spread * rng.gauss(0, 1))) for _ in range(max(1000, setting.requests))]
    mean = statistics.mean(lengths)
    begin = rng.randrange(max(1, len(lengths) - setting.requests + 1))
    draws = []
    for tokens in lengths[begin : begin + setting.requests]:
        chunks = min(most_chunks, max(2, round(tokens / mean * setting.mean / setting.chunk)))
        rate = rng.uniform(_LOW, _HIGH) / _MEAN * mean_rate
        drop = None
        if rng.random() < _DROP_SHARE:
            drop = (rng.uniform(*_DROP_AT) * setting.slo_s, rate / rng.uniform(*_DROP_BY))
        draws.append(Draw(chunks, rate, drop))
    return draws


def run_stream(
    folder: Path,
    setting: Setting,
    *,
    trace: str | None = None,
    profiles: Sequence[str] = (),
    progress: Progress | None = None,
    command: str = "",
) -> StreamReport:
    """Measure.

    Args:
        folder: of the model.
        trace: see `kvstore-bench tiers`; lengths and their order are taken from it.
        profiles: profile files of kvt and cachegen; those missing are made.

    Raises:
        ConfigError: a setting that makes no sense, or a trace, model or profile that does not serve.
    """
    from kvstore import __version__

    from .machine import machine_facts
    from .stream_world import make_world

    lengths = _lengths(trace)
    report = StreamReport("stream", version=__version__, command=command)
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    report.machine = machine_facts()
    begun = time.monotonic()
    world = make_world(
        folder, tokens=setting.most, chunk=setting.chunk, dtype=setting.dtype, latency_s=setting.latency_s,
        profiles=profiles, packaged=setting.packaged, progress=progress,
    )  # fmt: skip
    try:
        setting = _slow_enough(setting, world)
        curve = world.measured.scaled(setting.text_slos * setting.slo_s / world.measured.seconds(0, setting.mean))
        report.machine |= {
            "model": folder.name, "dtype": setting.dtype, "chunk_tokens": setting.chunk, "slo_s": setting.slo_s,
            "prefill_tokens_per_s": round(world.measured.tokens_per_s(setting.mean // 2), 1),
            "computing": "sleeps by the measured prefill curve, scaled", "trace": trace or "lengths as Mooncake's",
        }  # fmt: skip
        raw = world.shelves["raw"].nbytes(world.count)
        for name, shelf in world.shelves.items():
            report.sizes[name] = [round(raw / sum(level), 2) for level in zip(*shelf.sizes, strict=True)]
        draws = draw_requests(setting, lengths, world.raw_bytes_per_token, world.count)
        for number, draw in enumerate(draws):
            if progress is not None:
                progress(f"request {number + 1}: {draw.chunks * setting.chunk} tokens", number, len(draws))
            report.stream_rows += _one(world, setting, curve, number, draw)
        _together(report, world, setting, curve, draws)
        _grid(report, world, setting, curve)
        _figures(report, len(world.shelves["kvt"].sizes[0]))
        _simulated(report, world, setting, curve, lengths)
        report.notes += world.notes
    finally:
        world.close()
    report.seconds = time.monotonic() - begun
    return report


def _slow_enough(setting: Setting, world: World) -> Setting:
    """An SLO in which a prompt of mean length is decoded, all levels, in a quarter of the time at most: on a GPU it is
    far less, and here it would not be the link that decides."""
    kvt = world.shelves["kvt"]
    least = setting.mean * sum(kvt.decode_s_per_token) / _DECODE_SHARE
    if setting.slo_s >= least:
        return setting
    world.notes.append(f"this machine decodes slowly now: the SLO was raised from {setting.slo_s:g} to {least:.2f} s")
    return replace(setting, slo_s=least)


def _lengths(trace: str | None) -> list[int]:
    if trace is None:
        return []
    from .tiers_traces import load_trace

    return [request.tokens for request in load_trace(trace)[0].requests]


def _one(world: World, setting: Setting, curve: PrefillModel, number: int, draw: Draw) -> list[StreamRow]:
    """One request, every way."""
    from .stream_run import Ran, run_adaptive, run_fixed

    slo, policy = setting.slo_s, Policy()
    tokens = draw.chunks * setting.chunk
    suffix = curve.seconds(tokens, setting.new_tokens)
    kvt = world.shelves["kvt"]
    rows: list[tuple[str, Ran, Shelf]] = []
    for name in ("kvt", "cachegen") if number < setting.side_runs else ("kvt",):
        shelf = world.shelves[name]
        ran = run_adaptive(shelf, draw, slo_s=slo, prefill=curve, new_tokens=setting.new_tokens, policy=policy)
        rows.append((f"adaptive {name}", ran, shelf))
    rows.append(("fixed int8", run_fixed(world.shelves["int8"], draw, slo_s=slo, suffix_s=suffix), kvt))
    raw = world.shelves["raw"]
    if number < setting.side_runs:
        rows.append(("raw", run_fixed(raw, draw, slo_s=slo, suffix_s=suffix), kvt))
    else:
        took = draw.trace.end(setting.latency_s, raw.nbytes(draw.chunks)) + suffix
        rows.append(("raw", Ran(took, took > slo, (0,) * draw.chunks, raw.nbytes(draw.chunks), followed=True), kvt))
    text = curve.seconds(0, tokens + setting.new_tokens)
    rows.append(("text", Ran(text, text > slo, (-2,) * draw.chunks, 0), kvt))
    best = oracle(
        kvt.groups(draw.chunks), draw.trace, slo_s=slo, latency_s=setting.latency_s, prefill=curve,
        decode_s_per_token=kvt.decode_s_per_token, new_tokens=setting.new_tokens,
    )  # fmt: skip
    rows.append(("oracle", Ran(best.seconds, best.violated, best.levels, 0), kvt))
    return [
        StreamRow(
            number, tokens, draw.rate, draw.rate / _mean_rate(world, setting), draw.drop, slo, name, ran.ttft_s,
            ran.violated, ran.levels, ran.nbytes, not ran.wrong, ran.followed,
        )
        for name, ran, _ in rows
    ]  # fmt: skip


def _mean_rate(world: World, setting: Setting) -> float:
    return setting.mean * world.raw_bytes_per_token / (_RAW_SLOS * setting.slo_s)


def _together(report: StreamReport, world: World, setting: Setting, curve: PrefillModel, draws: Sequence[Draw]) -> None:
    """Four requests of one length at once over a link four times as fast: no worse than one alone, or little."""
    from .stream_run import Draw, run_together

    chunks = max(2, setting.mean // setting.chunk)
    draw = Draw(chunks, _mean_rate(world, setting))
    ran = run_together(
        world.shelves["kvt"], [draw] * _TOGETHER, slo_s=setting.slo_s, prefill=curve,
        new_tokens=setting.new_tokens, policy=Policy(),
    )  # fmt: skip
    for number, each in enumerate(ran):
        report.stream_rows.append(
            StreamRow(
                len(draws) + number, chunks * setting.chunk, draw.rate * _TOGETHER, float(_TOGETHER), None,
                setting.slo_s, f"{_TOGETHER} at once", each.ttft_s, each.violated, each.levels, each.nbytes,
                not each.wrong, False,
            )
        )  # fmt: skip
    late = sum(each.violated for each in ran)
    report.notes.append(f"{_TOGETHER} requests at once over one link at {_TOGETHER} times the mean rate: {late} late")


def _grid(report: StreamReport, world: World, setting: Setting, curve: PrefillModel) -> None:
    """Bandwidth × length, both ways executed; the planner's choice made from one other transfer."""
    from .stream_run import decisions

    steps, lengths = setting.grid
    shelf = world.shelves["int8"]
    quick = curve.scaled(_GRID_S / curve.seconds(0, lengths[-1] * setting.chunk))  # so that it does not take minutes
    middle = shelf.nbytes(2) / quick.seconds(0, 2 * setting.chunk)
    rates = [middle * 10 ** (-1 + 2 * (step + 0.5) / steps) for step in range(steps)]
    report.cells = decisions(shelf, quick, rates, lengths)


def _figures(report: StreamReport, levels: int) -> None:
    def of(name: str) -> list[StreamRow]:
        return [row for row in report.stream_rows if row.policy == name]

    adaptive, fixed, best = of("adaptive kvt"), of("fixed int8"), of("oracle")
    late, late_fixed = (sum(row.violated for row in rows) for rows in (adaptive, fixed))
    mine, theirs = (statistics.mean(row.ttft_s for row in rows) for rows in (adaptive, best))
    count = len(adaptive)
    right = sum(cell.right for cell in report.cells) / len(report.cells)
    figures = {
        "stream.violations_vs_fixed8": Figure(round(late / max(1, late_fixed), 4), "ratio", "lower", 0.25),
        "stream.ttft_vs_oracle": Figure(round(mine / theirs, 4), "ratio", "lower", 1.15),
        "stream.decision_accuracy": Figure(round(right, 4), "ratio", "higher", 0.95),
    }
    for name in ("adaptive kvt", "adaptive cachegen", "fixed int8", "raw", "text", "oracle"):
        short = name.replace("adaptive ", "").replace("fixed ", "").replace(" ", "_")
        rows = of(name)
        figures[f"stream.{short}.violations"] = Figure(
            round(sum(r.violated for r in rows) / len(rows), 4), "share", "lower"
        )
        figures[f"stream.{short}.ttft"] = Figure(round(statistics.mean(r.ttft_s for r in rows), 4), "s", "lower")
    ranks = [statistics.mean(_rank(level, levels) for row in rows for level in row.levels) for rows in (adaptive, best)]
    figures["stream.quality_vs_oracle"] = Figure(round(ranks[0] / max(ranks[1], 1e-9), 4), "ratio", "higher")
    report.figures |= figures
    texts = sum(-2 in row.levels for row in adaptive)
    report.notes.append(f"text was computed, wholly or in part, in {texts} of {count} adaptive requests")


def _rank(level: int, levels: int) -> int:
    """1 for the coarsest level; text counts as one more than the finest."""
    return levels + 1 if level == -2 else level + 1


def _simulated(
    report: StreamReport, world: World, setting: Setting, curve: PrefillModel, lengths: Sequence[int]
) -> None:
    """The same planner in virtual time over many more links, with the sizes measured here: how the figures depend on
    what was chosen."""
    for text_slos, own in ((1.5, False), (2.0, False), (3.0, False), (2.0, True)):
        count = _SIMULATED if text_slos == setting.text_slos else _SIMULATED // 3
        many = replace(setting, requests=count, seed=setting.seed + 1, text_slos=text_slos)
        model = curve.scaled(text_slos / setting.text_slos)
        late = fixed = impossible = 0
        mine = theirs = 0.0
        shelf = world.shelves["kvt"]
        for draw in draw_requests(many, lengths, world.raw_bytes_per_token, world.count):
            tokens = draw.chunks * setting.chunk
            slo = setting.slo_s * (tokens / setting.mean if own else 1.0)
            groups = shelf.groups(draw.chunks)
            link = LinkShare(latency_s=setting.latency_s)
            decode = shelf.decode_s_per_token
            course = Course(
                groups, link, prefill=model, slo_s=slo, decode_s_per_token=decode, new_tokens=setting.new_tokens
            )
            (ran,) = simulate(
                [course], draw.trace, latency_s=setting.latency_s, prefill=model, decode_s_per_token=decode
            )
            best = oracle(
                groups, draw.trace, slo_s=slo, latency_s=setting.latency_s, prefill=model, decode_s_per_token=decode,
                new_tokens=setting.new_tokens,
            )  # fmt: skip
            late += ran.violated
            impossible += best.violated
            suffix = model.seconds(tokens, setting.new_tokens)
            fixed += draw.trace.end(setting.latency_s, world.shelves["int8"].nbytes(draw.chunks)) + suffix > slo
            mine += ran.ttft_s
            theirs += best.seconds
        slos = "SLO in proportion to the length" if own else "one SLO for all lengths"
        report.notes.append(
            f"in virtual time, {count} links, text takes {text_slos:g} SLOs, {slos}: late {late}, oracle "
            f"{impossible}, fixed int8 {fixed} (ratio {late / max(1, fixed):.3f}); TTFT {mine / theirs:.3f} of the "
            "oracle's"
        )
        if text_slos == setting.text_slos:
            name = "own_slo" if own else "simulated"
            report.figures[f"stream.violations_vs_fixed8.{name}"] = Figure(
                round(late / max(1, fixed), 4), "ratio", "lower"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench stream`."""
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter requests, with the profiles that come for SmolLM2: "
        "about a minute; for another --model they are made once, which takes minutes"
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="FILE", help="lengths of prompts: Mooncake's JSONL, Azure's CSV, or 'sharegpt'; default: "
        "drawn as Mooncake's conversations"
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default 0)")
    parser.add_argument("--requests", type=int, metavar="N", help="how many (default 40; quick: 18)")
    parser.add_argument("--slo", metavar="TIME", help="of a prompt of mean length (default 1s; quick: 700ms)")
    parser.add_argument(
        "--text", type=float, metavar="X", help="computing a prompt of mean length takes X SLOs (default 2)"
    )
    parser.add_argument("--latency", metavar="TIME", default="2ms", help="what each request waits (default 2ms)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="of the KV as it is stored raw (default float32, as this model computes it)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="append", default=[], metavar="FILE", help="of kvt or cachegen; default: made of Python's "
        "documentation (minutes), and kept in .cache/profiles"
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="FOLDER", help="a model shaped like Llama; default: SmolLM2, made if missing"
    )
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: everything that came was what was stored; 1: not so."""
    prepare_outputs(args)
    missing = [name for name in ("torch", "transformers", "numba") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be installed; install kvstore[transformers,codec]")
    setting = Setting.quick() if args.quick else Setting()
    setting = replace(
        setting, seed=args.seed, dtype=args.dtype, latency_s=parse_duration(args.latency, name="--latency")
    )
    if args.requests is not None:
        setting = replace(setting, requests=args.requests)
    if args.slo is not None:
        setting = replace(setting, slo_s=parse_duration(args.slo, name="--slo"))
    if args.text is not None:
        setting = replace(setting, text_slos=args.text)
    if setting.requests < 1 or not setting.slo_s > 0 or not setting.text_slos > 0:
        raise ConfigError("--requests, --slo and --text must be above 0")
    with progress_bar() as progress:
        report = run_stream(
            model_folder(args.model), setting, trace=args.trace, profiles=args.profile, progress=progress,
            command=_command(args),
        )  # fmt: skip
    return write_outputs(report, args)


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "stream", *(["--quick"] if args.quick else [])]
    for name, default in (
        ("trace", None), ("seed", 0), ("requests", None), ("slo", None), ("text", None), ("latency", "2ms"),
        ("dtype", "float32"), ("model", None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value != default:
            words += [f"--{name}", str(value)]
    for path in args.profile:
        words += ["--profile", path]
    return " ".join(words)
