"""`kvstore-bench compare PEER`: the same records through a peer's own code and through ours, in turn, in one run.

Ours is `node://`, over plain TCP unless told otherwise, with a node in a process of its own; this process is its
client. The peer's client, with its memory registered, and whatever it consists of besides, are processes of their own
too (`peers/child.py`). Each side moves the same number of records of the same size, with the number of threads and, the
peer, with the call that is fastest for it, found in short trials. CPU seconds are those of both ends. Every record of
every call is compared byte for byte before the timing, ours also after it.

LMCache is compared with otherwise: see `compare_lmcache`.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

from .io import CALL_TIMEOUT_S, GIB, MIB, MOST_LANES, OPS, percentile_ms, plan_run, sizes_of
from .outputs import prepare_outputs, write_outputs
from .peers.process import PEERS, PeerProcess, PeerSide
from .progress import Progress, progress_bar
from .report import Report
from .workload import size_name

if TYPE_CHECKING:
    from .ceilings import Lanes
    from .io import Plan
    from .measure import GetSide, Measurement, PutSide
    from .targets import BackendTarget

__all__ = ["BARS", "add_arguments", "run", "run_compare"]

SIZES = (4 * MIB, 32 * MIB)
BARS = {
    f"compare.mooncake.{op}.{size}.{what}": bar
    for op in OPS
    for size in ("4MiB", "32MiB")
    for what, bar in (("speed_ratio", 1.15), ("cpu_ratio", 0.6))
}
TRANSPORTS = ("tcp", "ucx", "shm")


@dataclass
class CompareReport(Report):
    """A report whose figures are named by the peer, and whose rows are ours."""

    @property
    def without_bar(self) -> list[str]:
        return []


def run_compare(
    peer: str,
    *,
    sizes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    batch: int | None = None,
    repeats: int | None = None,
    quick: bool = False,
    python: str = "",
    transport: str = "tcp",
    memory_bytes: int = GIB,
    progress: Progress | None = None,
    command: str = "",
) -> Report:
    """Measure and return the report; everything that was started is ended again.

    Args:
        peer: a name of `PEERS`.
        sizes, ops, batch, repeats, quick, memory_bytes, progress, command: as for `kvstore_bench.io.run_io`.
        python: interpreter that has the peer's wheel; "" is ours.
        transport: of ours.

    Raises:
        ConfigError: the peer is unknown or not installed, or a size or number makes no sense.
        BackendError: a process died.
    """
    from kvstore import __version__

    from .ceilings import Lanes
    from .machine import machine_facts
    from .processes import NodeProcess
    from .targets import BackendTarget

    if peer not in PEERS:
        raise ConfigError(f"unknown peer {peer!r}; known peers: {', '.join(_ALL)}")
    if transport not in TRANSPORTS:
        raise ConfigError(f"unknown transport {transport!r}; choices: {', '.join(TRANSPORTS)}")
    plan = plan_run(sizes=sizes or SIZES, ops=ops, batch=batch, repeats=repeats, quick=quick, memory_bytes=memory_bytes)
    report = CompareReport("compare", version=__version__, command=command)
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    report.machine = machine_facts()
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(PeerProcess(peer, python))
        node = stack.enter_context(NodeProcess(memory_bytes=4 * plan.region_bytes + 256 * MIB))
        target = BackendTarget(_url(node.address, transport))
        stack.callback(target.close)
        target.scheme = f"node_{transport}"
        pool = stack.enter_context(Lanes(MOST_LANES))
        comparison = _Comparison(plan, report, peer, other, target, node.pid, pool)
        comparison.go(progress or (lambda what, done, total: None))
    report.seconds = time.monotonic() - begin
    return report


def _url(address: str, transport: str) -> Any:
    from kvstore.registry import parse_url

    return parse_url(f"node://{address}?transport={transport}")


class _Comparison:
    """The rows of one run."""

    def __init__(
        self, plan: Plan, report: Report, peer: str, other: PeerProcess, target: BackendTarget, node_pid: int,
        pool: Lanes,
    ) -> None:  # fmt: skip
        from .workload import Region

        self.plan, self.report, self.peer, self.other, self.target = plan, report, peer, other, target
        self.node_pid, self.pool, self.run_id = node_pid, pool, secrets.token_hex(8)
        self.regions = Region(plan.region_bytes), Region(plan.region_bytes)
        self.spreads: list[float] = []

    def go(self, progress: Progress) -> None:
        steps = [
            (size, n, op) for size, n in zip(self.plan.sizes, self.plan.batches, strict=True) for op in self.plan.ops
        ]
        for done, (size, count, op) in enumerate(steps):
            progress(f"{self.peer} {op} {size_name(size)}", done, len(steps))
            self._row(op, size, count)
        self.report.machine["ceiling_spread"] = round(statistics.median(self.spreads), 3) if self.spreads else 0.0
        self.report.notes.insert(0, f"the peer is {self.other.name}: {PEERS[self.peer]}")

    def _row(self, op: str, size: int, count: int) -> None:
        from .measure import GetSide, PutSide, lane_counts, measure
        from .report import Ceiling, Row
        from .workload import Workload

        work = Workload(
            *self.regions, count=count, nbytes=size, make_key=self.target.key, run_id=f"{self.run_id}/{op}"
        )  # fmt: skip
        kind = GetSide if op == "get" else PutSide
        ours = kind(self.target, work, timeout=CALL_TIMEOUT_S, pids=[self.node_pid])
        our_lanes = lane_counts(min(count, self.target.lanes, MOST_LANES))
        with contextlib.ExitStack() as clean:
            for side in (ours, ours):  # twice: a Ctrl-C in the first clean-up is made good by the second
                clean.callback(side.close)
            verified = ours.fill(self.pool, our_lanes[-1]) if isinstance(ours, GetSide) else True
            verified = verified and ours.verify(self.pool, our_lanes[0])
            theirs = PeerSide(self.other, op, count=count, nbytes=size)
            clean.callback(theirs.close)
            verified = theirs.verify() and verified
            theirs.choose(self.pool)
            measured = measure(
                self.pool, ours, theirs, our_lanes=our_lanes, ceiling_lanes=lane_counts(min(count, self.other.lanes)),
                same_lanes=False, repeats=self.plan.repeats, pass_s=self.plan.pass_s,
                budget_s=4 * self.plan.budget_s,
            )  # fmt: skip
            verified = ours.verify(self.pool, measured.lanes) and verified
        self.spreads.append(measured.spread)
        self._notes(op, size, ours, theirs, measured)
        self.report.rows.append(
            Row(
                url=self.target.url, scheme=self.target.scheme, op=op, size_bytes=size, batch=count,
                lanes=measured.lanes, seconds=measured.seconds, gbytes_per_s=measured.speed / 1e9,
                ceiling=Ceiling(theirs.name, measured.ceiling_speed / 1e9), ratio=measured.ratio,
                p50_ms=percentile_ms(measured.calls, 0.5), p99_ms=percentile_ms(measured.calls, 0.99),
                cpu_s_per_gib=measured.cpu_s_per_byte * GIB, verified=verified,
                failed=ours.failures.count + theirs.failures.count,
            )
        )  # fmt: skip
        if verified and not self.report.rows[-1].failed:
            self._figures(op, size, measured)

    def _figures(self, op: str, size: int, measured: Measurement) -> None:
        from .report import Figure

        cpu, peers = measured.cpu_s_per_byte, measured.ceiling_cpu_s_per_byte
        prefix = f"compare.{self.peer}.{op}.{size_name(size)}"
        for what, value, unit, better in (
            ("speed_ratio", measured.ratio, "ratio", "higher"),
            ("cpu_ratio", cpu / peers if peers else 0.0, "ratio", "lower"),
            ("gbytes_per_s", measured.speed / 1e9, "GB/s", "higher"),
            ("peer_gbytes_per_s", measured.ceiling_speed / 1e9, "GB/s", "higher"),
            ("cpu_s_per_gib", cpu * GIB, "s/GiB", "lower"),
            ("peer_cpu_s_per_gib", peers * GIB, "s/GiB", "lower"),
        ):
            self.report.figures[f"{prefix}.{what}"] = Figure(
                round(value, 4), unit, better, BARS.get(f"{prefix}.{what}")
            )

    def _notes(self, op: str, size: int, ours: GetSide | PutSide, theirs: PeerSide, measured: Measurement) -> None:
        where = f"{op} {size_name(size)}"
        for side in (ours, theirs):
            for kind, message in side.failures.messages.items():
                self.report.notes.append(f"{where}: {side.name}: {kind}: {message}")
        self.report.notes.append(
            f"{where}: CPU s/GiB of both ends: ours {measured.cpu_s_per_byte * GIB:.2f}, {theirs.name} "
            f"{measured.ceiling_cpu_s_per_byte * GIB:.2f}; threads: ours {measured.lanes}, "
            f"theirs {measured.ceiling_lanes}"
        )


_LMCACHE = "lmcache"
_ALL = {**PEERS, _LMCACHE: "LMCache's own fs and fs_native adapters and ours, all through LMCache's own benchmark"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench compare`."""
    parser.epilog = "Peers: " + "; ".join(f"{name}: {what}" for name, what in _ALL.items()) + ". See docs/peers.md."
    parser.add_argument("peer", metavar="PEER", help=", ".join(_ALL))
    parser.add_argument("--sizes", metavar="LIST", help="record sizes (default 4MiB,32MiB)")
    parser.add_argument("--ops", default="put,get", metavar="LIST", help="get, put or both (default put,get)")
    parser.add_argument("--batch", type=int, metavar="N", help="records per pass (default 4 to 64, by size)")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="pairs of passes per row (default 15, quick 7; lmcache 5)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under a minute")
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter that has the peer's wheel")
    parser.add_argument("--transport", default="tcp", metavar="NAME", help="of ours: tcp, ucx or shm (default tcp)")
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: everything verified; 1: something failed or came back wrong. Raises what `run_compare` raises."""
    prepare_outputs(args)
    sizes = sizes_of(args.sizes) if args.sizes is not None else None
    with progress_bar() as progress:
        if args.peer == _LMCACHE:
            return write_outputs(_run_lmcache(args, sizes, progress), args)
        report = run_compare(
            args.peer,
            sizes=sizes,
            ops=[part.strip() for part in args.ops.split(",") if part.strip()],
            batch=args.batch,
            repeats=args.repeats,
            quick=args.quick,
            python=args.python,
            transport=args.transport,
            progress=progress,
            command=_command(args),
        )
    return write_outputs(report, args)


def _run_lmcache(args: argparse.Namespace, sizes: Sequence[int] | None, progress: Progress | None) -> Report:
    from .compare_lmcache import run_compare_lmcache

    for option, default in (("ops", "put,get"), ("batch", None), ("transport", "tcp")):
        if getattr(args, option) != default:
            raise ConfigError(f"--{option} means nothing with lmcache: its own benchmark stores and loads")
    return run_compare_lmcache(
        sizes=sizes, repeats=args.repeats, quick=args.quick, python=args.python, progress=progress,
        command=_command(args),
    )  # fmt: skip


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "compare", args.peer]
    for name, default in (
        ("sizes", None), ("ops", "put,get"), ("batch", None), ("repeats", None), ("python", ""), ("transport", "tcp"),
        ("json", None), ("html", None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value != default:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *(["--quick"] if args.quick else [])])
