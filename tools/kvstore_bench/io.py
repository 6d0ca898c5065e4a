"""`kvstore-bench io`: put and get of records of many sizes, each next to the ceiling of the same run.

Without a URL: the embedded default, `memory://` and `file://` in a temporary folder, and the whole store over both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.errors import ConfigError
from kvstore.options import parse_size

from .outputs import prepare_outputs, write_outputs
from .progress import Progress, progress_bar
from .workload import size_name

if TYPE_CHECKING:
    from kvstore.registry import BackendURL

    from .ceilings import Lanes
    from .ceilings_http import HttpPlace
    from .leftovers import Journal
    from .measure import Side
    from .nodes import NodePlace
    from .report import Report, Row
    from .targets import BackendTarget, Target

__all__ = ["Plan", "add_arguments", "plan_run", "run", "run_io"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB)
OPS = ("put", "get")
DEFAULT_MEMORY = GIB
DEFAULT_BATCH_BYTES = 128 * MIB  # per direction: well out of the caches, quick to move
MOST_BATCH, LEAST_BATCH = 64, 4
REGIONS = 4  # sources, destinations, the copy a memory backend keeps, and room for what it has not freed yet
MOST_LANES = 64
HTTP_LANES = 8  # what the raw HTTP ceiling may try at least, whatever the number of cores
TINY_BYTES, TINY_BATCH = 256, 64
CALL_TIMEOUT_S = 60.0

BARS: dict[str, float] = {
    "io.memory.get.16MiB.ratio": 0.85,
    "io.file.get.16MiB.ratio": 0.90,
    "io.file.put.16MiB.ratio": 0.85,
    "io.store_file.get.16MiB.ratio": 0.75,
    "io.s3.get.16MiB.ratio": 0.75,
    "io.s3.put.16MiB.ratio": 0.75,
    "io.store_memory.overhead_us_per_key": 15.0,
    "io.node_tcp.get.16MiB.ratio": 0.85,
    "io.node_tcp.put.16MiB.ratio": 0.85,
    "io.node_tcp.get.16KiB.ratio": 0.5,
    "io.node_tcp.put.16KiB.ratio": 0.5,
    "io.node_tcp.get.round_trip_us": 150.0,
    "io.node_tcp.get.64KiB.batched_vs_single": 4.0,
    "io.node_shm.get.16MiB.ratio": 0.80,
    "io.node_shm.put.16MiB.ratio": 0.80,
    "io.node_ucx.get.16MiB.ratio": 0.75,
    "io.node_ucx.put.16MiB.ratio": 0.75,
}

Place: TypeAlias = "Path | HttpPlace | NodePlace | None"
"""Where a ceiling works: a folder, a bucket, a pair of sockets, or nowhere (memory)."""


@dataclass(frozen=True)
class Plan:
    """What a run will do, checked.

    Attributes:
        sizes: bytes per record, as asked.
        batches: records per pass, for each size.
        ops: in the order measured.
        lanes: threads of ours, or None to find the best number.
        repeats: pairs of passes per row.
        pass_s, budget_s: aim of one pass and limit of one row, seconds.
        memory_bytes: limit of the working set.
    """

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    ops: tuple[str, ...]
    lanes: int | None
    repeats: int
    pass_s: float
    budget_s: float
    memory_bytes: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the largest batch, on whole pages."""
        return max(n * (-(-size // 4096) * 4096) for n, size in zip(self.batches, self.sizes, strict=True))


def plan_run(
    *,
    sizes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    batch: int | None = None,
    lanes: int | None = None,
    repeats: int | None = None,
    quick: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
) -> Plan:
    """Check what was asked for and choose the rest.

    Raises:
        ConfigError: a size, op or number makes no sense, or one record of a size does not fit into the memory limit.
    """
    chosen = tuple(dict.fromkeys(sizes if sizes is not None else QUICK_SIZES if quick else DEFAULT_SIZES))
    if not chosen or min(chosen) < 1:
        raise ConfigError("--sizes: every size must be at least 1 byte; write for instance 64KiB,1MiB,16MiB")
    wanted = tuple(dict.fromkeys(ops))
    for op in wanted:
        if op not in OPS:
            raise ConfigError(f"--ops: {op!r} is not known; known operations: {', '.join(OPS)}")
    if not wanted:
        raise ConfigError(f"--ops: name at least one of {', '.join(OPS)}")
    for name, value in (("--batch", batch), ("--lanes", lanes), ("--repeats", repeats)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if lanes is not None and lanes > MOST_LANES:
        raise ConfigError(f"--lanes must be at most {MOST_LANES}, not {lanes}")
    batches = []
    for size in chosen:
        fit = memory_bytes // (REGIONS * -(-size // 4096) * 4096)
        if fit < 1:
            raise ConfigError(
                f"records of {size_name(size)} need {size_name(REGIONS * size)} of memory, and --memory allows "
                f"{size_name(memory_bytes)}; raise --memory or leave the size out"
            )
        asked = batch or max(LEAST_BATCH, min(MOST_BATCH, DEFAULT_BATCH_BYTES // size))
        batches.append(min(asked, fit))
    return Plan(
        sizes=chosen,
        batches=tuple(batches),
        ops=tuple(op for op in OPS if op in wanted),
        lanes=lanes,
        repeats=repeats or (7 if quick else 15),
        pass_s=0.03 if quick else 0.05,
        budget_s=1.5 if quick else 4.0,
        memory_bytes=memory_bytes,
    )


def run_io(
    urls: Sequence[str] = (),
    *,
    sizes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
    batch: int | None = None,
    lanes: int | None = None,
    repeats: int | None = None,
    quick: bool = False,
    store: bool | None = None,
    compare_clients: bool = False,
    transport: str | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    command: str = "",
) -> Report:
    """Measure and return the report. Everything put is deleted again, also after an exception or Ctrl-C.

    Args:
        urls: backends; none means the embedded default.
        sizes: bytes per record.
        ops: "put", "get" or both.
        batch: records per pass; default by size, 4 to 64. Shrinks so that the working set keeps to `memory_bytes`.
        lanes: threads that call; None tries 1, 2, 4, … and takes the best. The memory ceiling uses the same number.
        repeats: pairs of passes per row; their medians are reported.
        quick: fewer sizes and repeats: under a minute on two slow cores.
        store: also measure the whole store over each URL; None: only for the embedded default.
        compare_clients: also measure s3 URLs through every other client there is.
        transport: of `node://` URLs that do not say one; `node://local` starts a node of its own.
        memory_bytes: limit of the working set: buffers of both directions and what a memory backend keeps.
        progress: called before each row.
        command: shown in the report; must not hold secrets.

    Raises:
        ConfigError: a URL, size, operation or number makes no sense, or there is not enough room on the disk.
        KVStoreError: a backend cannot be used at all.
        OSError: the raw files of the ceiling cannot be written.
    """
    plan = plan_run(
        sizes=sizes, ops=ops, batch=batch, lanes=lanes, repeats=repeats, quick=quick, memory_bytes=memory_bytes
    )
    from kvstore.registry import parse_url

    parsed = [parse_url(url) for url in urls]
    with contextlib.ExitStack() as stack:
        run = _Run(plan, stack, progress, compare_clients=compare_clients, transport=transport)
        return run.go(parsed, store=not urls if store is None else store, command=command)


class _Run:
    """One run: the open things, the shared memory, the rows so far."""

    def __init__(
        self, plan: Plan, stack: contextlib.ExitStack, progress: Progress | None, *, compare_clients: bool = False,
        transport: str | None = None,
    ) -> None:  # fmt: skip
        from kvstore import __version__

        from .ceilings import Lanes
        from .leftovers import Journal
        from .report import Report

        self.plan, self.stack, self.compare_clients, self.transport = plan, stack, compare_clients, transport
        self.progress = progress or (lambda what, done, total: None)
        self.report = Report("io", version=__version__)
        self.pool: Lanes = stack.enter_context(Lanes(MOST_LANES))
        self.run_id = secrets.token_hex(8)
        self.journal: Journal = stack.enter_context(Journal(self.run_id))
        self.done = self.total = 0
        self.labels: dict[str, int] = {}
        self.spreads: list[float] = []

    def go(self, urls: Sequence[BackendURL], *, store: bool, command: str) -> Report:
        from .leftovers import sweep
        from .machine import machine_facts
        from .nodes import NodePlace
        from .targets import BackendTarget
        from .workload import Region

        self.report.command = command
        self.report.started = datetime.now().astimezone().isoformat(timespec="seconds")
        self.report.machine = machine_facts()
        begin = time.monotonic()
        pairs = list(self._open(urls, store=store))
        self.report.notes += sweep(pairs)
        per_target = len(self.plan.sizes) * len(self.plan.ops)
        tiny = [target for target, _ in pairs if target.scheme == "store_memory"]
        self.total = per_target * sum(target not in tiny for target, _ in pairs) + 2 * len(tiny)
        room = max(self.plan.region_bytes, TINY_BATCH * 4096, 16 * MIB)
        shared = any(isinstance(place, NodePlace) and place.transport in ("shm", "auto") for _, place in pairs)
        self.regions = Region(room, shared=shared), Region(room, shared=shared)
        for target, place in pairs:
            if isinstance(target, BackendTarget):
                target.register([region.slab for region in self.regions if region.slab is not None])
            if target in tiny:
                self._overhead(target)
            else:
                self._target(target, place)
            if isinstance(place, NodePlace) and isinstance(target, BackendTarget):
                self._node_figures(target)
        if self.spreads:
            self.report.machine["ceiling_spread"] = round(statistics.median(self.spreads), 3)
        self.report.seconds = time.monotonic() - begin
        return self.report

    def _open(self, urls: Sequence[BackendURL], *, store: bool) -> Iterator[tuple[Target, Place]]:
        """The targets and where their ceiling works, if it needs a place. All are closed with the stack."""
        from kvstore.registry import BackendURL

        from .nodes import SCHEMES, NodePlace, open_place
        from .targets import BackendTarget, StoreTarget

        if not urls:
            root = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
            self.journal.folder(str(root))
            (root / "file").mkdir()
            urls = [BackendURL("memory"), BackendURL("file", path=str(root / "file"))]
        place: Place
        for asked in urls:
            url, label, place = asked, "", None
            if url.scheme in SCHEMES:
                most = 4 * self.plan.region_bytes + 256 * MIB
                url, label, place = self.stack.enter_context(open_place(url, self.transport, most))
            target = self._close_later(BackendTarget(url, lanes=self.plan.lanes))
            if isinstance(place, NodePlace):
                target.scheme, target.pids = label, place.pids
            if url.scheme == "file":
                place = self._raw_folder(Path(url.path))
            elif url.scheme == "s3":
                from .s3 import check_place, place_of

                check_place(url, self.run_id)
                place = place_of(url, self.run_id)
            yield self._named(target), place
            if store and url.scheme in ("memory", "file", "s3", *SCHEMES):
                queue = 2 * self.plan.region_bytes + 64 * MIB
                whole = self._close_later(StoreTarget(url, lanes=self.plan.lanes, queue_bytes=queue))
                whole.scheme, whole.pids = f"store_{target.scheme}", target.pids
                yield self._named(whole), place
            if self.compare_clients and url.scheme == "s3":
                from .s3 import other_clients

                for name, other in other_clients(url, lanes=self.plan.lanes):
                    if other is None:
                        self.report.notes.append(f"{name} is not installed and was left out")
                    else:
                        yield self._named(self._close_later(other)), place

    def _close_later(self, target: Target) -> Target:
        self.stack.callback(target.close)
        return target

    def _named(self, target: Target) -> Target:
        """Two URLs of one scheme get different labels, so that figures keep unique names."""
        seen = self.labels[target.scheme] = self.labels.get(target.scheme, 0) + 1
        if seen > 1:
            target.scheme = f"{target.scheme}_{seen}"
        return target

    def _raw_folder(self, root: Path) -> Path:
        """A temporary folder on the file system of `root`: beside it, or inside where beside is elsewhere."""
        beside = root.parent
        if not (os.access(beside, os.W_OK) and os.stat(beside).st_dev == os.stat(root).st_dev):
            beside = root
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix=".kvstore-bench-raw-", dir=beside)))
        self.journal.folder(str(folder))
        self._check_room(folder)
        from .machine import file_system

        systems = self.report.machine.setdefault("file_systems", {})
        systems[str(root)] = file_system(str(root))
        return folder

    def _check_room(self, folder: Path) -> None:
        need = 3 * self.plan.region_bytes + 64 * MIB
        free = shutil.disk_usage(folder).free
        if free < need:
            raise ConfigError(
                f"the file system of {folder.parent} has {free / MIB:.0f} MiB free, and these sizes need "
                f"{need / MIB:.0f} MiB; use smaller --sizes, a smaller --batch or another folder (TMPDIR)"
            )

    def _target(self, target: Target, place: Place) -> None:
        for size, count in zip(self.plan.sizes, self.plan.batches, strict=True):
            if size > target.max_bytes:
                self.report.notes.append(
                    f"{target.scheme}: {size_name(size)} is left out; the largest record is "
                    f"{size_name(target.max_bytes)}"
                )
                self._step("", len(self.plan.ops))
                continue
            for op in self.plan.ops:
                self._step(f"{target.scheme} {op} {size_name(size)}", 0)
                with self.journal.row(target, count):
                    row = self._row(target, op, size, count, place)
                self._step("", 1)
                self._figure(row, f"{op}.{size_name(size)}.ratio", row.ratio, "ratio", "higher")

    def _overhead(self, target: Target) -> None:
        """The whole store per key: 64 tiny records per call on `memory`, nothing subtracted."""
        for op in OPS:
            self._step(f"{target.scheme} {op}, 64 tiny records", 0)
            with self.journal.row(target, TINY_BATCH):
                row = self._row(target, op, TINY_BYTES, TINY_BATCH, None, tiny=True)
            self._step("", 1)
            what = f"{'' if op == 'get' else 'put_'}overhead_us_per_key"
            self._figure(row, what, row.seconds / TINY_BATCH * 1e6, "us/key", "lower")

    def _node_figures(self, target: BackendTarget) -> None:
        """A round trip, and what batching brings: of nodes only, where the distance counts."""
        from .nodes import batched_against_single, round_trip_us
        from .report import Figure

        if "get" not in self.plan.ops:
            return
        self._step(f"{target.scheme} round trips", 0)
        values = {
            "get.round_trip_us": (round_trip_us(target.backend, self.run_id), "us", "lower"),
            "get.64KiB.batched_vs_single": (
                batched_against_single(target.backend, self.run_id, self.regions[1].view), "times", "higher",
            ),
        }  # fmt: skip
        for what, (value, unit, better) in values.items():
            name = f"io.{target.scheme}.{what}"
            self.report.figures[name] = Figure(round(value, 3), unit, better, BARS.get(name))

    def _figure(self, row: Row, what: str, value: float, unit: str, better: str) -> None:
        """Add a row, and its figure if it is verified: a failed run is neither fast nor slow."""
        from .report import Figure

        self.report.rows.append(row)
        if row.verified and row.gbytes_per_s > 0:
            name = f"io.{row.scheme}.{what}"
            self.report.figures[name] = Figure(round(value, 4), unit, better, BARS.get(name))

    def _step(self, what: str, count: int) -> None:
        self.done += count
        self.progress(what, self.done, self.total)

    def _ceiling(
        self, target: Target, ours: Any, op: str, keys: Sequence[bytes], work: Any, place: Place, *, tiny: bool
    ) -> Side:
        from .ceilings import Memcpy, PythonLoop, ReadFiles, WriteFiles
        from .nodes import NodePlace
        from .targets import record_files

        if tiny:
            return PythonLoop(op, keys, work.sources, work.destinations)
        if place is None:
            return Memcpy(work.sources, work.destinations)
        if isinstance(place, NodePlace):
            return place.ceiling(op, work, self.regions)
        if not isinstance(place, Path):
            from .ceilings_http import HttpGet, HttpPut

            return HttpGet(place, work.sources, work.destinations) if op == "get" else HttpPut(place, work.sources)
        if op == "get":
            files = record_files(target.url, ours.keys, work.nbytes)
            return ReadFiles(place, work.sources, work.destinations, files)
        return WriteFiles(place, work.sources)

    def _row(self, target: Target, op: str, size: int, count: int, place: Place, *, tiny: bool = False) -> Row:
        from .measure import GetSide, PutSide, lane_counts, measure
        from .report import Ceiling, Row
        from .workload import Workload

        plan = self.plan
        names = f"{self.run_id}/{target.scheme}/{op}"
        work = Workload(
            *self.regions, count=count, nbytes=size, make_key=target.key, run_id=names, announce=self.journal.batch
        )
        ceiling_keys = work.new_keys() if tiny else []  # before `fill`: new keys bring new content
        ours = (GetSide if op == "get" else PutSide)(target, work, timeout=CALL_TIMEOUT_S, pids=target.pids)
        same = place is None and not target.whole
        most = min(count, target.lanes, MOST_LANES)
        cores = len(os.sched_getaffinity(0))
        our_lanes = [min(plan.lanes, most)] if plan.lanes else lane_counts(most)
        least = 4 if place is None or isinstance(place, Path) else HTTP_LANES
        ceiling_lanes = [1] if tiny else lane_counts(min(max(least, cores), most if same else count, MOST_LANES))
        if target.whole:
            our_lanes = [1]
        elif same:
            our_lanes = our_lanes if plan.lanes else ceiling_lanes
        with contextlib.ExitStack() as clean:
            for side in (ours, ours):  # twice: a Ctrl-C in the first clean-up is made good by the second
                clean.callback(side.close)
            filled = ours.fill(self.pool, our_lanes[-1]) if isinstance(ours, GetSide) else True
            ceiling = None
            if filled:
                ceiling = self._ceiling(target, ours, op, ceiling_keys, work, place, tiny=tiny)
                clean.callback(ceiling.close)
            measured = None
            verified = filled and ours.verify(self.pool, our_lanes[0])
            if ceiling is not None:
                measured = measure(
                    self.pool, ours, ceiling, our_lanes=our_lanes, ceiling_lanes=ceiling_lanes, same_lanes=same,
                    repeats=plan.repeats, pass_s=plan.pass_s, budget_s=plan.budget_s,
                )  # fmt: skip
                verified = ours.verify(self.pool, measured.lanes) and verified
                self.spreads.append(measured.spread)
        for kind, message in ours.failures.messages.items():
            self.report.notes.append(f"{target.scheme} {op} {size_name(size)}: {kind}: {message}")
        return Row(
            url=target.url,
            scheme=target.scheme,
            op=op,
            size_bytes=size,
            batch=count,
            lanes=measured.lanes if measured and not target.whole else target.lanes,
            seconds=measured.seconds if measured else 0.0,
            gbytes_per_s=measured.speed / 1e9 if measured else 0.0,
            ceiling=Ceiling(ceiling.name if ceiling else "none", measured.ceiling_speed / 1e9 if measured else 0.0),
            ratio=measured.ratio if measured else 0.0,
            p50_ms=percentile_ms(measured.calls, 0.5) if measured else 0.0,
            p99_ms=percentile_ms(measured.calls, 0.99) if measured else 0.0,
            cpu_s_per_gib=measured.cpu_s_per_byte * GIB if measured else 0.0,
            verified=verified,
            failed=ours.failures.count,
        )


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """A percentile of call times, in milliseconds."""
    from .measure import percentile

    return percentile(seconds, share) * 1e3


def sizes_of(text: str) -> list[int]:
    """The sizes of `--sizes`, in bytes. Raises `ConfigError`."""
    return [parse_size(part.strip(), name="--sizes") for part in text.split(",") if part.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench io`."""
    parser.epilog = (
        "What a run has put is deleted at its end, also after Ctrl-C and SIGTERM. A run that was killed (kill -9) "
        "leaves at most one batch and its temporary folders; they are listed in kvstore-bench-run-*.json in the "
        "temporary folder ($TMPDIR), and the next run of the same URL on this machine removes them."
    )
    parser.add_argument("urls", nargs="*", metavar="URL", help="backends to measure; none: memory:// and file:// here")
    parser.add_argument("--sizes", metavar="LIST", help="record sizes, e.g. 64KiB,1MiB,16MiB (default 64KiB…64MiB)")
    parser.add_argument("--batch", type=int, metavar="N", help="records per pass (default 4 to 64, by size)")
    parser.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="threads that call, and lanes of the backend (default: the best of 1, 2, 4, …)",
    )
    parser.add_argument("--ops", default="put,get", metavar="LIST", help="get, put or both (default put,get)")
    parser.add_argument("--quick", action="store_true", help="three sizes, fewer repeats: under a minute")
    parser.add_argument("--repeats", type=int, metavar="N", help="pairs of passes per row (default 15, quick 7)")
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also the whole, verified store over memory, file, s3 and node URLs (default: only without URL)",
    )
    parser.add_argument(
        "--compare-clients",
        action="store_true",
        help="s3 URLs also through boto3, aioboto3, obstore and awscrt, where installed",
    )
    parser.add_argument(
        "--transport", choices=("tcp", "ucx", "shm"), help="of node:// URLs; node://local starts a node of its own"
    )
    parser.add_argument("--memory", default="1GiB", metavar="SIZE", help="limit of the working set (default 1GiB)")
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: everything verified; 1: something failed or came back wrong. Raises what `run_io` raises."""
    prepare_outputs(args)
    ops = [part.strip() for part in args.ops.split(",") if part.strip()]
    with progress_bar() as progress:
        report = run_io(
            args.urls,
            sizes=sizes_of(args.sizes) if args.sizes is not None else None,
            ops=ops,
            batch=args.batch,
            lanes=args.lanes,
            repeats=args.repeats,
            quick=args.quick,
            store=args.store,
            compare_clients=args.compare_clients,
            transport=args.transport,
            memory_bytes=parse_size(args.memory, name="--memory"),
            progress=progress,
            command=_command(args),
        )
    status = write_outputs(report, args)
    if args.html and args.html != "-":
        print(f"wrote {args.html}", file=sys.stderr)
    return status


def _command(args: argparse.Namespace) -> str:
    """The command line again; a URL with a secret in it does not get this far."""
    words = ["kvstore-bench", "io", *args.urls]
    for name in ("sizes", "batch", "lanes", "repeats", "transport", "json", "html"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    for name, default in (("ops", "put,get"), ("memory", "1GiB")):
        if getattr(args, name) != default:
            words += [f"--{name}", str(getattr(args, name))]
    words += [f"--{name}" for name in ("quick", "compare-clients") if getattr(args, name.replace("-", "_"))]
    if args.store is not None:
        words.append("--store" if args.store else "--no-store")
    return shlex.join(words)
