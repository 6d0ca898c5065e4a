"""The result of a benchmark: rows as measured, figures with their bars, a table for people and JSON for tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .workload import size_name

__all__ = ["Ceiling", "Figure", "Report", "Row"]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine does without us: which way, and how fast (median, 1e9 bytes/s)."""

    name: str
    gbytes_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        url: what was measured, without secrets.
        scheme: its label, also in figures; `store_…` is the whole store, verified inside the timing.
        op: "get" or "put".
        size_bytes: size of one record.
        batch: records moved per pass.
        lanes: threads that called (for the store: its own lanes).
        seconds: median wall time to move the batch once.
        gbytes_per_s: median, 1e9 bytes/s; failed records count nothing.
        ceiling: the ceiling of the same run, interleaved.
        ratio: median of the paired ratios (not exactly the quotient of the two medians).
        p50_ms, p99_ms: of the single calls, each `batch / lanes` records.
        cpu_s_per_gib: CPU seconds of this process per GiB moved.
        verified: every record of two passes, before and after the timed ones, came back byte for byte.
        failed: records that did not move, in all passes; they count nothing in throughput.
    """

    url: str
    scheme: str
    op: str
    size_bytes: int
    batch: int
    lanes: int
    seconds: float
    gbytes_per_s: float
    ceiling: Ceiling
    ratio: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_gib: float
    verified: bool
    failed: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A named value. `better` is "higher" or "lower"; `bar` is what it should reach, or None."""

    value: float
    unit: str
    better: str
    bar: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.better == "higher" else self.value <= self.bar


@dataclass
class Report:
    """Everything one run found.

    Attributes:
        rows: in the order measured.
        figures: by stable name.
        notes: sentences about what failed or was left out.
        machine: see `machine_facts`.
        command: the command line, without secrets.
        started: local time with offset, ISO 8601.
        seconds: wall time of the run.
    """

    subcommand: str
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    version: str = ""

    @property
    def ok(self) -> bool:
        """True if every row was verified and nothing failed."""
        return bool(self.rows) and all(row.verified and not row.failed for row in self.rows)

    @property
    def caution(self) -> str:
        """A sentence if the ceilings themselves varied so much that no single ratio should be trusted; else ""."""
        spread = self.machine.get("ceiling_spread", 0.0)
        if spread <= BUSY_SPREAD:
            return ""
        return (
            f"the machine was busy: the ceilings themselves varied by {spread:.0%} between repeats; "
            "measure again on a quiet one before quoting a ratio"
        )

    def verdict(self, figure: Figure) -> str:
        """What to say about a figure's bar: a noisy run can show that it is met, not that it is not; "" without one."""
        if figure.met is None:
            return ""
        return "met" if figure.met else "not met in this noisy run" if self.caution else "NOT met"

    def bar_text(self, name: str, figure: Figure) -> str:  # reports that judge by name have it
        """ "bar ≥ 0.8: met"; "" without a bar."""
        if figure.bar is None:
            return ""
        return f"bar {'≥' if figure.better == 'higher' else '≤'} {figure.bar:g}: {self.verdict(figure)}"

    @property
    def bars_missed(self) -> str:
        """A sentence if bars are not met, which the exit status says nothing about; else ""."""
        barred = [figure for figure in self.figures.values() if figure.bar is not None]
        missed = sum(not figure.met for figure in barred)
        if not missed:
            return ""
        noisy = " in this noisy run, which says little about kvstore" if self.caution else ""
        return (
            f"{missed} of {len(barred)} bars {'is' if missed == 1 else 'are'} not met{noisy}; the exit status does not "
            "depend on it, only on whether everything was verified"
        )

    @property
    def without_bar(self) -> list[str]:
        """What was measured and has no bar to meet, e.g. "memory put"."""
        barred = {
            (parts[1], "put" if parts[2].startswith("put") else "get")
            for parts in (name.split(".") for name, figure in self.figures.items() if figure.bar is not None)
        }
        measured = dict.fromkeys((row.scheme, row.op) for row in self.rows)
        return [f"{scheme} {op}" for scheme, op in measured if (scheme, op) not in barred]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as plain values."""
        return {
            "tool": "kvstore-bench",
            "version": self.version,
            "subcommand": self.subcommand,
            "command": self.command,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "machine": self.machine,
            "ok": self.ok,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
        }

    def to_json(self) -> str:
        """The JSON document as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def write_json(self, path: str) -> None:
        """Write the JSON to a file, or to standard output for "-". Raises `OSError`."""
        if path == "-":
            sys.stdout.write(self.to_json())
            sys.stdout.flush()
        else:
            Path(path).write_text(self.to_json(), encoding="utf-8")

    def write_html(self, path: str) -> None:
        """Write the self-contained page to a file, or to standard output for "-". Raises `OSError`."""
        if path == "-":
            sys.stdout.write(self._page())
            sys.stdout.flush()
            return
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        from .html import page

        return page(self)

    def print_table(self, out: TextIO) -> None:
        """The table: with rules and colours on a terminal, plain aligned text elsewhere."""
        if out.isatty():
            _rich_table(self, out)
        else:
            out.write(plain_table(HEADINGS, [cells(row) for row in self.rows]))
        for name, figure in self.figures.items():
            if figure.bar is not None:
                unit = "" if figure.unit == "ratio" else f" {figure.unit}"
                out.write(f"{name} = {figure.value:.3g}{unit}  ({self.bar_text(name, figure)})\n")
        if self.without_bar and any(figure.bar is not None for figure in self.figures.values()):
            out.write(f"without a bar here: {', '.join(self.without_bar)}\n")
        self.write_end(out)

    def write_figures(self, out: TextIO) -> None:
        """A line for each figure, those without a bar too; then `write_end`."""
        for name, figure in self.figures.items():
            unit = "" if figure.unit == "ratio" else f" {figure.unit}"
            said = self.bar_text(name, figure)
            out.write(f"{name} = {figure.value:.4g}{unit}{f'  ({said})' if said else ''}\n")
        self.write_end(out)

    def write_end(self, out: TextIO) -> None:
        """What stands below every table: how far to trust it, what is missed, and notes."""
        if self.caution:
            out.write(f"caution: {self.caution}\n")
        if self.bars_missed:
            out.write(f"{self.bars_missed}\n")
        for note in self.notes:
            out.write(f"note: {note}\n")
        out.flush()


BUSY_SPREAD = 0.15  # of the median, between the quartiles; a quiet machine stays well under a tenth

HEADINGS = (
    "what", "op", "size", "batch", "lanes", "GB/s", "ceiling", "its GB/s", "ratio", "p50 ms", "p99 ms", "CPU s/GiB",
    "verified", "failed",
)  # fmt: skip
TEXT_COLUMNS = (0, 1, 6, 12)
NARROW = (0, 1, 2, 5, 7, 8, 10, 12, 13)  # what still fits into 80 columns


def cells(row: Row) -> list[str]:
    """A row as text, one cell per heading."""
    return [
        row.scheme, row.op, size_name(row.size_bytes), str(row.batch), str(row.lanes), speed(row.gbytes_per_s),
        row.ceiling.name, speed(row.ceiling.gbytes_per_s), f"{row.ratio:.2f}", millis(row.p50_ms), millis(row.p99_ms),
        f"{row.cpu_s_per_gib:.2f}", "yes" if row.verified else "NO", str(row.failed),
    ]  # fmt: skip


def speed(gbytes_per_s: float) -> str:
    """Three significant digits without exponents."""
    return f"{gbytes_per_s:.2f}" if gbytes_per_s >= 0.1 or not gbytes_per_s else f"{gbytes_per_s:.4f}"


def millis(value: float) -> str:
    """Milliseconds with as many digits as mean something."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = TEXT_COLUMNS) -> str:
    """Aligned text: two spaces between columns, those of `text` left, numbers right."""
    widths = [max(len(line[index]) for line in (headings, *rows)) for index in range(len(headings))]
    lines = []
    for line in (headings, *rows):
        padded = [
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def _rich_table(report: Report, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False)
    shown = range(len(HEADINGS)) if console.width >= 125 else NARROW
    table = Table(title=f"kvstore-bench {report.subcommand}", title_justify="left", pad_edge=False)
    for index in shown:
        table.add_column(HEADINGS[index], justify="left" if index in TEXT_COLUMNS else "right", no_wrap=True)
    for row in report.rows:
        texts = cells(row)
        table.add_row(*(texts[index] for index in shown), style="" if row.verified and not row.failed else "bold red")
    console.print(table)
