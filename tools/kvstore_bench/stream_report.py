"""What `kvstore-bench stream` found: a table per way of bringing a prompt, JSON, and a page with the plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from .report import Report, plain_table

if TYPE_CHECKING:
    from .stream_run import Cell

__all__ = ["StreamReport", "StreamRow"]

_HEADINGS = ("way", "requests", "late", "late %", "mean TTFT s", "of its SLO", "text %", "level 0 1 2 … %", "MB",
             "verified")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One request, one way.

    Attributes:
        request: its number.
        rate: of its link in the beginning, bytes/s.
        rate_of_mean: that over the mean rate.
        drop: (seconds, bytes/s) from which on the link is slower.
        policy: the way.
        levels: of each group; -2: computed.
        verified: what came was what was stored, at its level, byte for byte.
        followed: late and given up; when it would have come follows from the link's schedule.
    """

    request: int
    tokens: int
    rate: float
    rate_of_mean: float
    drop: tuple[float, float] | None
    slo_s: float
    policy: str
    ttft_s: float
    violated: bool
    levels: Sequence[int]
    nbytes: int
    verified: bool
    followed: bool


def _ways(rows: Sequence[StreamRow]) -> dict[str, list[StreamRow]]:
    ways: dict[str, list[StreamRow]] = {}
    for row in rows:
        ways.setdefault(row.policy, []).append(row)
    return ways


def _cells(name: str, rows: Sequence[StreamRow], finest: int) -> list[str]:
    levels = [level for row in rows for level in row.levels]
    late = sum(row.violated for row in rows)

    def share(level: int) -> float:
        return 100 * levels.count(level) / max(1, len(levels))

    return [
        name, str(len(rows)), str(late), f"{100 * late / len(rows):.0f}",
        f"{statistics.mean(row.ttft_s for row in rows):.3f}",
        f"{statistics.mean(row.ttft_s / row.slo_s for row in rows):.2f}", f"{share(-2):.0f}",
        " ".join(f"{share(level):.0f}" for level in range(finest + 1)), f"{sum(row.nbytes for row in rows) / 1e6:.1f}",
        "yes" if all(row.verified for row in rows) else "NO",
    ]  # fmt: skip


@dataclass
class StreamReport(Report):
    """The report of `kvstore-bench stream`.

    Attributes:
        stream_rows: requests.
        cells: of the decision grid.
        sizes: codec → raw bytes over stored bytes, levels 0, 0..1, …
    """

    stream_rows: list[StreamRow] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    sizes: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if everything that came was verified."""
        return bool(self.stream_rows) and all(row.verified for row in self.stream_rows)

    @property
    def finest(self) -> int:
        """The finest level that came."""
        return max((level for row in self.stream_rows for level in row.levels), default=0)

    @property
    def without_bar(self) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        cells = [{**asdict(cell), "load_s": cell.load_s if cell.load_s < float("inf") else None} for cell in self.cells]
        rows = [asdict(row) for row in self.stream_rows]
        return {**super().to_dict(), "rows": rows, "decisions": cells, "sizes": self.sizes}

    def print_table(self, out: TextIO) -> None:
        """The table, plain on every kind of output."""
        out.write(
            plain_table(_HEADINGS, [_cells(name, rows, self.finest) for name, rows in _ways(self.stream_rows).items()])
        )
        out.write(
            "late: the first token came after the SLO; text: computed; followed rows count as the link would end\n"
        )
        ratios = ", ".join(f"{name} {'/'.join(map(str, values))}" for name, values in self.sizes.items())
        out.write(f"raw bytes over stored bytes by level: {ratios}\n")
        right = sum(cell.right for cell in self.cells)
        out.write(f"load or recompute: the faster of the two in {right} of {len(self.cells)} cells\n")
        for name, figure in self.figures.items():
            if figure.bar is None:
                continue
            sign = "≥" if figure.better == "higher" else "≤"
            out.write(f"{name} = {figure.value:.3g}  (bar {sign} {figure.bar:g}: {self.verdict(figure)})\n")
        for note in self.notes:
            out.write(f"note: {note}\n")
        out.flush()

    def _page(self) -> str:
        from .html import _STYLE, _machine

        ways = _ways(self.stream_rows)
        head = "".join(f'<th class="num" scope="col">{escape(name)}</th>' for name in _HEADINGS)
        body = "".join(
            "<tr>"
            + "".join(f'<td class="num">{escape(cell)}</td>' for cell in _cells(name, rows, self.finest))
            + "</tr>"
            for name, rows in ways.items()
        )
        figures = "".join(
            f"<li><code>{escape(name)}</code> = {figure.value:.3g}"
            + (f" (bar {figure.bar:g}: {self.verdict(figure)})" if figure.bar is not None else "")
            + "</li>"
            for name, figure in self.figures.items()
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        state = "Everything verified" if self.ok else "Not everything verified"
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench stream</title><style>{_STYLE}</style></head>
<body><main><header><h1>kvstore-bench stream</h1>
<p class="sub"><span class="badge {"good" if self.ok else "bad"}">{state}</span> {escape(self.started)} ·
took {self.seconds:.0f} s</p></header>
<section><ul>{figures}</ul></section>
<section><h2>Time to the first token over the link's speed</h2>
<p class="hint">Each mark is a request: its TTFT in its own SLOs, over the speed of its link in the beginning (1 is the
mean). Below the line is in time; what takes more than {_TOP:g} SLOs lies on the upper edge. Hover for values.</p>
<div class="cards">{_scatter(ways)}{_grid(self.cells)}</div></section>
<section><h2>All ways</h2><div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div><ul>{notes}</ul></section>
<section><h2>Machine and command</h2>{_machine(self)}</section></main></body></html>
"""


_TOP = 4.0
_SHAPES = {"adaptive kvt": ("circle", "get"), "fixed int8": ("square", "put"), "oracle": ("ring", "get"),
           "text": ("cross", "put")}  # fmt: skip


def _scatter(ways: dict[str, list[StreamRow]]) -> str:
    """TTFT in SLOs over bandwidth in means."""
    width, height, left, bottom = 520, 320, 40, 36
    right = max((row.rate_of_mean for name in _SHAPES for row in ways.get(name, ())), default=2.0) * 1.05

    def place(row: StreamRow) -> tuple[float, float]:
        y = min(row.ttft_s / row.slo_s, _TOP)
        return left + row.rate_of_mean / right * (width - left - 10), (height - bottom) * (1 - y / _TOP) + 6

    line = (height - bottom) * (1 - 1 / _TOP) + 6
    parts = [
        f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{line:.1f}" y2="{line:.1f}" stroke="currentColor"/>'
    ]
    for slos in range(int(_TOP) + 1):
        y = (height - bottom) * (1 - slos / _TOP) + 10
        parts.append(f'<text class="tick" x="{left - 6}" y="{y:.1f}" text-anchor="end">{slos}</text>')
    parts.append(f'<text class="tick" x="{width / 2}" y="{height - 6}" text-anchor="middle">bandwidth over mean</text>')
    for name, (shape, kind) in _SHAPES.items():
        for row in ways.get(name, ()):
            x, y = place(row)
            text = f"{name}: {row.tokens} tokens, {row.ttft_s:.2f} s of {row.slo_s:.2f}{', drops' if row.drop else ''}"
            parts.append(_mark(shape, kind, x, y, text))
    for index, (name, (shape, kind)) in enumerate(_SHAPES.items()):
        x, y = width - 130, 18 + 16 * index
        parts.append(_mark(shape, kind, x, y - 4, name))
        parts.append(f'<text class="tick" x="{x + 10}" y="{y}">{escape(name)}</text>')
    return (
        '<figure class="card"><figcaption><b>Requests</b></figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="TTFT over bandwidth">{"".join(parts)}</svg>'
        "</figure>"
    )


def _mark(shape: str, kind: str, x: float, y: float, text: str) -> str:
    title = f"<title>{escape(text)}</title>"
    if shape == "square":
        return f'<rect class="dot {kind}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7">{title}</rect>'
    if shape == "cross":
        path = f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
        return f'<path d="{path}" fill="none" stroke="var(--{kind})" stroke-width="1.5">{title}</path>'
    if shape == "ring":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="var(--{kind})" stroke-width="1.2">{title}'
            "</circle>"
        )
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'


def _grid(cells: Sequence[Cell]) -> str:
    """The decisions: bandwidth to the right, length upwards; filled: loaded."""
    if not cells:
        return ""
    rates = sorted({cell.rate for cell in cells})
    lengths = sorted({cell.tokens for cell in cells})
    step = min(40.0, 420 / len(rates))
    parts = []
    for cell in cells:
        x = 70 + step * rates.index(cell.rate)
        y = 20 + step * (len(lengths) - 1 - lengths.index(cell.tokens))
        kind = "get" if cell.loads else "put"
        text = f"{cell.tokens} tokens, {cell.rate / 1e6:.1f} MB/s: load {cell.load_s:.3f} s, text {cell.text_s:.3f} s"
        mark = "" if cell.right else f'<text x="{x + step / 3:.1f}" y="{y + step * 0.7:.1f}">✗</text>'
        parts.append(
            f'<rect class="dot {kind}" x="{x:.1f}" y="{y:.1f}" width="{step - 3:.1f}" height="{step - 3:.1f}">'
            f"<title>{escape(text)}</title></rect>{mark}"
        )
    for number, tokens in enumerate(lengths):
        y = 20 + step * (len(lengths) - 1 - number) + step * 0.6
        parts.append(f'<text class="tick" x="62" y="{y:.1f}" text-anchor="end">{tokens}</text>')
    height = 50 + step * len(lengths)
    parts.append(f'<text class="tick" x="280" y="{height - 10:.1f}" text-anchor="middle">bandwidth</text>')
    return (
        '<figure class="card"><figcaption><b>Load (blue) or recompute; ✗: the other was faster</b></figcaption>'
        f'<svg viewBox="0 0 520 {height:.0f}" role="img" aria-label="decisions">{"".join(parts)}</svg></figure>'
    )
