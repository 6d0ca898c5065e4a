"""What `kvstore-bench layers` found: a table, JSON, and a page with the pipeline drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, TextIO

from .report import Report, plain_table

__all__ = ["LayerRow", "LayersReport"]

_HEADINGS = (
    "link", "MB/s", "latency ms", "t ms", "c ms", "T ms", "formula ms", "load then compute ms", "recompute ms",
    "T/formula", "T/sequential", "extra layers", "verified",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One rate of the link. All seconds are medians over the repeats.

    Attributes:
        load_s: t_l of each layer, loaded alone.
        compute_s: c_l of each layer, computed alone with its KV there.
        pipelined_s: T, loading and computing at once.
        formula_s: t₁ + Σ max(c_l, t_{l+1}) + c_L of the same repeats.
        sequential_s: everything loaded, then everything computed.
        recompute_s: the whole prompt computed without a store.
        t_vs_formula: median of the ratios of the repeats, and each of them.
        extra_layers: most memory that held KV besides the cache itself, in layers.
        verified: every loaded cache was bit by bit the one that was computed.
        failed: how many were not.
    """

    rate_bytes_per_s: float
    latency_s: float
    repeats: int
    load_s: Sequence[float]
    compute_s: Sequence[float]
    pipelined_s: float
    formula_s: float
    sequential_s: float
    recompute_s: float
    t_vs_formula: float
    t_vs_formula_each: Sequence[float]
    t_vs_sequential: float
    extra_layers: float
    verified: bool
    failed: int


def _cells(row: LayerRow) -> list[str]:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    return [
        "token bucket", f"{row.rate_bytes_per_s / 1e6:.1f}", ms(row.latency_s), ms(sum(row.load_s) / len(row.load_s)),
        ms(sum(row.compute_s) / len(row.compute_s)), ms(row.pipelined_s), ms(row.formula_s), ms(row.sequential_s),
        ms(row.recompute_s), f"{row.t_vs_formula:.3f}", f"{row.t_vs_sequential:.3f}", f"{row.extra_layers:.2f}",
        "yes" if row.verified else "NO",
    ]  # fmt: skip


@dataclass
class LayersReport(Report):
    """The report of `kvstore-bench layers`: rows of its own kind."""

    layer_rows: list[LayerRow] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if everything that was loaded was verified."""
        return bool(self.layer_rows) and all(row.verified and not row.failed for row in self.layer_rows)

    @property
    def without_bar(self) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "rows": [asdict(row) for row in self.layer_rows]}

    def print_table(self, out: TextIO) -> None:
        """The table, plain on every kind of output: it is as wide as a page."""
        out.write(plain_table(_HEADINGS, [_cells(row) for row in self.layer_rows]))
        out.write("t, c: a layer loaded, computed alone (mean over layers); T: both at once, layer by layer\n")
        for name, figure in self.figures.items():
            unit = "" if figure.unit == "ratio" else f" {figure.unit}"
            bar = f"  (bar ≤ {figure.bar:g}: {'met' if figure.met else 'NOT met'})" if figure.bar is not None else ""
            out.write(f"{name} = {figure.value:.3g}{unit}{bar}\n")
        for note in self.notes:
            out.write(f"note: {note}\n")
        out.flush()

    def _page(self) -> str:
        from .html import _STYLE, _machine

        head = "".join(f'<th class="num" scope="col">{escape(name)}</th>' for name in _HEADINGS)
        body = "".join(
            f'<tr class="{"" if row.verified else "bad"}">'
            + "".join(f'<td class="num">{escape(cell)}</td>' for cell in _cells(row))
            + "</tr>"
            for row in self.layer_rows
        )
        figures = "".join(
            f"<li><code>{escape(name)}</code> = {figure.value:.3g}"
            + (f" (bar ≤ {figure.bar:g}: {'met' if figure.met else 'NOT met'})" if figure.bar is not None else "")
            + "</li>"
            for name, figure in self.figures.items()
        )
        cards = "".join(_card(row) for row in self.layer_rows)
        state = "Everything verified" if self.ok else "Not everything verified"
        repeats = self.layer_rows[0].repeats if self.layer_rows else 0
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench layers</title><style>{_STYLE}</style></head>
<body><main><header><h1>kvstore-bench layers</h1>
<p class="sub"><span class="badge {"good" if self.ok else "bad"}">{state}</span> {escape(self.started)} ·
took {self.seconds:.0f} s</p></header>
<section><ul>{figures}</ul></section>
<section><h2>Time to the last layer's output</h2>
<p class="hint">For each rate of the link: loading layer by layer while computing (T), the formula of the exact
pipeline, everything loaded and then computed, and the whole prompt recomputed. Medians of {repeats} repeats, measured
in turn.</p><div class="cards">{cards}</div></section>
<section><h2>All measurements</h2><div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div></section>
<section><h2>Machine and command</h2>{_machine(self)}</section></main></body></html>
"""


def _card(row: LayerRow) -> str:
    """Four bars, one below the other."""
    bars = (
        ("T, layer by layer", row.pipelined_s, "get"), ("formula", row.formula_s, "get"),
        ("load, then compute", row.sequential_s, "put"), ("recompute", row.recompute_s, "put"),
    )  # fmt: skip
    top = max(seconds for _, seconds, _ in bars) or 1.0
    parts = []
    for number, (name, seconds, kind) in enumerate(bars):
        y, width = 14 + number * 34, 300 * seconds / top
        parts.append(f'<text class="tick" x="130" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="dot {kind}" x="138" y="{y}" width="{width:.1f}" height="20"/>')
        parts.append(f'<text class="tick" x="{144 + width:.1f}" y="{y + 14}">{seconds * 1e3:.0f} ms</text>')
    title = f"{row.rate_bytes_per_s / 1e6:.0f} MB/s, {row.latency_s * 1e3:g} ms per request"
    label = f"{title}: T is {row.t_vs_formula:.2f} of the formula"
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<svg viewBox="0 0 520 156" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></figure>'
    )
