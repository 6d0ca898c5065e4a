"""`kvstore-bench tiers`: hit rate, bytes moved, simulated TTFT and prefill saved of every policy on a trace.

The policies are the ones the tiers use (`kvstore.eviction`), with a virtual clock; no bytes are moved.

    kvstore-bench tiers --trace mooncake_conversation_trace.jsonl --capacity 10000
    kvstore-bench tiers --trace sharegpt --capacity 1000,1000+9000 --html tiers.html

A capacity is a number of blocks, or several for tiers, fastest first: `1000+9000`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from kvstore import __version__
from kvstore.errors import ConfigError
from kvstore.options import parse_size

from .machine import machine_facts
from .outputs import prepare_outputs, write_outputs
from .progress import Progress, progress_bar
from .report import Figure
from .tiers_replay import CostModel, Replay, policy_names, replay
from .tiers_report import TiersReport
from .tiers_traces import Trace, load_trace

__all__ = ["add_arguments", "parse_capacities", "run", "run_tiers"]

_ALL = "lru,fifo,s3fifo,ttl,session,value,lookahead_queue64,default,default_queue64,belady"
_QUICK = "lru,default,default_queue64,belady"

# What the replay must give, if it is right: (trace, requests, references) → capacity → hit rates. From the traces'
# README, which has them from another program.
_KNOWN: dict[tuple[str, int, int], dict[str, dict[str, float]]] = {
    ("conversation", 12031, 288500): {
        "10000": {"lru": 0.211, "belady": 0.366}, "30000": {"lru": 0.326, "belady": 0.366},
    },
    ("synthetic", 3993, 121877): {
        "10000": {"lru": 0.423, "belady": 0.618}, "30000": {"lru": 0.624, "belady": 0.640},
    },
}  # fmt: skip
_TOLERANCE = 0.002

_BARS = {
    "conversation.10000.default.hit_rate": 0.211,
    "conversation.10000.default_queue64.hit_rate": 0.222,
    "conversation.10000.default.seconds_saved_vs_lru": 1.03,
}


def parse_capacities(text: str) -> list[tuple[int, ...]]:
    """`1000,1000+9000` → [(1000,), (1000, 9000)].

    Raises:
        ConfigError: not numbers of blocks, or more than three tiers.
    """
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        try:
            tiers = tuple(int(each) for each in part.split("+"))
        except ValueError:
            raise ConfigError(f"--capacity {part!r}: write a number of blocks, or 1000+9000 for two tiers") from None
        if min(tiers) < 1 or len(tiers) > 3:
            raise ConfigError(f"--capacity {part!r}: one to three tiers of at least one block each")
        found.append(tiers)
    if not found:
        raise ConfigError("--capacity: no capacity")
    return found


def run_tiers(
    traces: Sequence[Trace],
    capacities: Sequence[tuple[int, ...]],
    policies: Sequence[str],
    *,
    cost: CostModel | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> TiersReport:
    """Replay every trace at every capacity through every policy.

    Args:
        policies: names as `policy_names` gives them.
    """
    cost = cost or CostModel()
    started, began = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    report = TiersReport("tiers", version=__version__, command=command)
    total = len(traces) * len(capacities) * len(policies)
    for trace in traces:
        if trace.note:
            report.notes.append(f"{trace.name}: {trace.note}")
        for tiers in capacities:
            some: list[Replay] = []
            for name in policies:
                if progress is not None:
                    at = "+".join(str(each) for each in tiers)
                    progress(f"{trace.name} {at} {name}", len(report.replays), total)
                some.append(replay(trace, tiers, name, cost))
                report.replays.append(some[-1])
            _check(report, trace, some)
            _figures(report, some)
    _gaps(report)
    report.machine, report.started = machine_facts(), started
    report.seconds = time.monotonic() - began
    return report


def _check(report: TiersReport, trace: Trace, some: Sequence[Replay]) -> None:
    """Where it is known what must come out, see that it does; nothing beats Belady's; the window never leaves."""
    known = _KNOWN.get((trace.name, len(trace.requests), trace.references), {})
    ceiling = next((each.hit_rate for each in some if each.policy == "belady"), None)
    for each in some:
        expected = known.get(each.capacity, {}).get(each.policy)
        if expected is not None and abs(each.hit_rate - expected) > _TOLERANCE:
            report.wrong.append(
                f"{trace.name} {each.capacity} {each.policy}: hit rate {each.hit_rate:.4f}, known is {expected}"
            )
        if ceiling is not None and each.hit_rate > ceiling + _TOLERANCE:
            report.wrong.append(f"{trace.name} {each.capacity} {each.policy}: beats Belady's, which cannot be")
        if each.broken and each.policy.startswith(("default", "lookahead")):
            report.wrong.append(
                f"{trace.name} {each.capacity} {each.policy}: {each.broken} records of the window left the store"
            )


def _figures(report: TiersReport, some: Sequence[Replay]) -> None:
    lru = next((each for each in some if each.policy == "lru"), None)
    for each in some:
        stem = f"{each.trace}.{each.capacity}.{each.policy}"
        values: list[tuple[str, float, str]] = [
            ("hit_rate", each.hit_rate, "ratio"),
            ("hit_rate_first_half", each.half(0), "ratio"),
            ("hit_rate_second_half", each.half(1), "ratio"),
            ("seconds_saved", each.saved_s, "s"),
            ("ttft_mean", each.ttft_mean_s, "s"),
            ("ttft_p99", each.ttft_p99_s, "s"),
        ]
        if lru is not None and lru.saved_s and each is not lru:
            values.append(("seconds_saved_vs_lru", each.saved_s / lru.saved_s, "ratio"))
            if lru.saved_halves[1]:
                values.append(("seconds_saved_vs_lru_second_half", each.saved_halves[1] / lru.saved_halves[1], "ratio"))
        for what, value, unit in values:
            better = "lower" if what.startswith("ttft") else "higher"
            report.figures[f"tiers.{stem}.{what}"] = Figure(value, unit, better, _BARS.get(f"{stem}.{what}"))


def _gaps(report: TiersReport) -> None:
    """What K before RoPE is worth on the generated workload."""
    after = {(each.capacity, each.policy): each for each in report.replays if each.trace == "sharegpt_post_rope"}
    for each in report.replays:
        other = after.get((each.capacity, each.policy))
        if each.trace == "sharegpt" and other is not None:
            name = f"tiers.sharegpt.{each.capacity}.{each.policy}.pre_rope_gap"
            report.figures[name] = Figure(each.hit_rate - other.hit_rate, "ratio", "higher")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench tiers`."""
    parser.add_argument(
        "--trace", required=True, metavar="FILE",
        help="Mooncake's JSONL, Azure's CSV, or sharegpt[:sessions=2000,rate=1,seed=0,window=2048] for a generator",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", default="10000", metavar="BLOCKS",
        help="blocks, several separated by commas; 1000+9000 is two tiers, fastest first (default 10000)",
    )  # fmt: skip
    parser.add_argument("--policies", metavar="LIST", help=f"which (default {_ALL}; NAME_queue64: 64 jobs announced)")
    parser.add_argument("--requests", type=int, metavar="N", help="only so many, from the start")
    parser.add_argument(
        "--bandwidth", metavar="LIST", help="bytes/s at which the tiers are read (default 25GB,5GB,1.25GB)"
    )
    parser.add_argument("--quick", action="store_true", help=f"fewer policies ({_QUICK})")
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: the replay gives what is known and no window was broken; 1: not so."""
    prepare_outputs(args)
    capacities = parse_capacities(args.capacity)
    policies = policy_names(args.policies if args.policies is not None else _QUICK if args.quick else _ALL)
    if args.requests is not None and args.requests < 2:
        raise ConfigError(f"--requests {args.requests}: at least 2")
    cost = CostModel()
    if args.bandwidth is not None:
        speeds = [float(parse_size(part.strip(), name="--bandwidth")) for part in args.bandwidth.split(",")]
        if min(speeds) < 1:
            raise ConfigError(f"--bandwidth {args.bandwidth!r}: at least 1 byte per second")
        cost = CostModel(bandwidth=speeds)
    traces = load_trace(args.trace, limit=args.requests)
    with progress_bar() as progress:
        report = run_tiers(traces, capacities, policies, cost=cost, progress=progress, command=_command(args))
    return write_outputs(report, args)


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "tiers", "--trace", args.trace, "--capacity", args.capacity]
    words += [word for name in ("policies", "requests", "bandwidth") if (value := getattr(args, name)) is not None
              for word in (f"--{name}", str(value))]  # fmt: skip
    return " ".join([*words, *(["--quick"] if args.quick else [])])
