"""`kvstore-bench transports`: which transports there are between nodes, with what, and how fast each is here.

For each of tcp, ucx and shm: whether it can be used, what it needs if not, versions, devices, whether there is RDMA;
then records of 16 MiB through a node in a process of its own on loopback, as `kvstore-bench io node://local` does it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from kvstore.errors import BackendError, ConfigError

from .io import MIB, run_io
from .nodes import TRANSPORTS
from .outputs import prepare_outputs, table_stream, write_files
from .progress import progress_bar
from .report import Figure, Report

if TYPE_CHECKING:
    from .progress import Progress

__all__ = ["add_arguments", "facts_of", "run", "run_transports"]

SIZE = 16 * MIB


def facts_of(name: str) -> dict[str, Any]:
    """What there is to know about a transport without opening a connection.

    Returns:
        usable: whether; why: what is missing and what to install, if it is not; further facts by name.
    """
    from kvstore_transport import TransportUnavailable
    from kvstore_transport.bodies import way

    try:
        way(name).facts(server=False)
        facts: dict[str, Any] = {"usable": True, "why": ""}
        if name == "ucx":
            from kvstore_transport.ucx import describe

            facts |= describe()
        elif name == "tcp":
            facts |= {"kernel": platform.release(), "devices": sorted(os.listdir("/sys/class/net"))}
        else:
            facts |= {"kernel": platform.release(), "copies": "1 from registered memory, 2 from other memory"}
    except TransportUnavailable as error:
        return {"usable": False, "why": str(error)}
    return facts


def run_transports(*, require_rdma: bool = False, measure: bool = True, progress: Progress | None = None,
                   command: str = "") -> Report:  # fmt: skip
    """Look at every transport, and measure those that can be used.

    Args:
        require_rdma: fail unless UCX has an RDMA device.
        measure: False: only look.

    Raises:
        ConfigError: `require_rdma`, and there is none: says what to install.
    """
    from kvstore import __version__

    from .machine import machine_facts

    report = Report("transports", version=__version__, command=command)
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    report.machine = machine_facts()
    begin = time.monotonic()
    found = {name: facts_of(name) for name in TRANSPORTS}
    report.machine["transports"] = found
    if require_rdma and not found["ucx"].get("rdma"):
        raise ConfigError(found["ucx"].get("rdma_hint") or found["ucx"]["why"])
    spreads = []
    for name in (name for name, facts in found.items() if facts["usable"] and measure):
        try:
            one = run_io(["node://local"], sizes=[SIZE], quick=True, transport=name, progress=progress)
        except (ConfigError, BackendError) as error:
            found[name] |= {"usable": False, "why": str(error)}
            report.notes.append(f"{name}: {error}")
            continue
        report.rows += one.rows
        report.notes += one.notes
        spreads.append(one.machine.get("ceiling_spread", 0.0))
        for row in one.rows:
            if row.verified:
                label = f"transports.{name}.{row.op}.16MiB"
                report.figures[f"{label}.gbytes_per_s"] = Figure(round(row.gbytes_per_s, 3), "GB/s", "higher")
                report.figures[f"{label}.ratio"] = Figure(round(row.ratio, 3), "ratio", "higher")
        trip = one.figures.get(f"io.node_{name}.get.round_trip_us")
        if trip is not None:
            report.figures[f"transports.{name}.round_trip_us"] = Figure(trip.value, "us", "lower")
    report.machine["ceiling_spread"] = max(spreads, default=0.0)
    report.seconds = time.monotonic() - begin
    return report


def print_facts(report: Report, out: TextIO) -> None:
    """A paragraph for each transport."""
    for name, facts in report.machine["transports"].items():
        out.write(f"{name}: {'usable' if facts['usable'] else 'not usable: ' + str(facts['why'])}\n")
        for fact, value in facts.items():
            if fact in ("usable", "why") or value in ("", [], {}):
                continue
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            out.write(f"    {fact.replace('_', ' ')}: {text}\n")
        for what, unit in (("round_trip_us", "µs round trip, p50 of 10,000 small gets"),):
            figure = report.figures.get(f"transports.{name}.{what}")
            if figure is not None:
                out.write(f"    {figure.value:.0f} {unit}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench transports`."""
    parser.add_argument("--quick", action="store_true", help="do not measure, only look")
    parser.add_argument(
        "--require-rdma", action="store_true", help="fail, and say what to install, unless UCX has RDMA"
    )
    parser.add_argument("--json", metavar="FILE", help="write facts, rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: what can be used was measured and verified (or looked at); 1: something failed."""
    prepare_outputs(args)
    command = "kvstore-bench transports" + "".join(
        f" --{name.replace('_', '-')}" for name in ("quick", "require_rdma") if getattr(args, name)
    )
    with progress_bar() as progress:
        report = run_transports(
            require_rdma=args.require_rdma, measure=not args.quick, progress=progress, command=command
        )
    out = table_stream(args)
    print_facts(report, out)
    if report.rows:
        report.print_table(out)
    write_files(report, args)
    measured = all(row.verified and not row.failed for row in report.rows)
    complete = args.quick or {row.scheme for row in report.rows} >= {"node_tcp"}
    return 0 if measured and complete else 1
