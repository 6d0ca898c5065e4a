"""The report of `kvstore-bench codec` as one self-contained page: KL over bits per value, speeds, all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .codec_figures import KL_BAR
from .codec_report import (
    QUALITY_HEADINGS,
    SPEED_HEADINGS,
    TEXT_COLUMNS,
    QualityRow,
    quality_cells,
    speed_cells,
)
from .html import _STYLE, _machine

if TYPE_CHECKING:
    from .codec_report import CodecReport

__all__ = ["page", "plot"]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 26, 48
_FLOOR = 1e-5  # nats; what is below lies on the lower edge
_KINDS = {"kvt": "a", "cachegen": "b", "lmcache": "c"}  # the others are "d": marks, not lines

# Okabe and Ito's blue, vermilion and green, told apart by every kind of colour vision; shapes besides.
_MORE = """
:root{--third:#00785a;--fourth:#5a6472}
@media (prefers-color-scheme:dark){:root{--third:#3cc79d;--fourth:#9aa5b4}}
.line.a{stroke:var(--get)}.line.b{stroke:var(--put)}.line.c{stroke:var(--third)}
.dot.a,.end.a{fill:var(--get)}.dot.b,.end.b{fill:var(--put)}.dot.c,.end.c{fill:var(--third)}
.dot.d,.end.d{fill:var(--fourth)}.barline{stroke:var(--warn);stroke-dasharray:3 4}.barname{fill:var(--warn)}
.wide{grid-column:1/-1}
"""


def page(report: CodecReport) -> str:
    """The whole document."""
    state = "Everything verified" if report.ok else "Not everything verified"
    figures = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td class='num'>{figure.value:.4g}</td>"
        f"<td>{escape('' if figure.unit == 'ratio' else figure.unit)}</td>"
        + (
            f'<td class="{"good" if figure.met else "warn"}">{escape(report.bar_text(name, figure))}</td></tr>'
            if figure.bar is not None
            else "<td></td></tr>"
        )
        for name, figure in report.figures.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    caution = f'<p class="caution">Caution: {escape(report.caution)}.</p>' if report.caution else ""
    setting = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.setting.items())
    cards = "".join(
        _card(report.quality, text, record)
        for text, record in dict.fromkeys((row.text, row.record_tokens) for row in report.quality if row.kl is not None)
    )
    quality = [quality_cells(row) for row in report.quality]
    speeds = [speed_cells(row, report.memcpy(row)) for row in report.speeds]
    bad = [not row.verified for row in report.quality]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench codec</title><style>{_STYLE}{_MORE}</style></head>
<body><main><header><h1>kvstore-bench codec</h1>
<p class="sub"><span class="badge {"good" if report.ok else "bad"}">{state}</span> {escape(report.started)} ·
took {report.seconds:.0f} s</p></header>
<section><h2>Quality over size</h2>
<p class="hint">KL to the model's answers on its uncompressed cache, over all stored bits per value. Left and low is
better. One line per codec, a point per level; hover for values. Lossless codecs have no point: their KL is 0.</p>
<div class="cards">{cards}</div></section>
<section><h2>Figures</h2><div class="scroll" tabindex="0"><table><thead><tr><th scope="col">figure</th>
<th class="num" scope="col">value</th><th scope="col">unit</th><th scope="col">bar</th></tr></thead>
<tbody>{figures}</tbody></table></div>{caution}{f'<div class="notes"><ul>{notes}</ul></div>' if notes else ""}</section>
<section><h2>Quality and size, all levels</h2>{_table(QUALITY_HEADINGS, quality, TEXT_COLUMNS, bad)}
<p class="hint">A level's bytes are all that its reader fetches: header, table, scales, sinks, padding. int8/this: how
many times larger int8 with a scale per (token, head) is. ± is the standard error over contexts. bytes/entropy: over
what the codec's own distributions say.</p></section>
<section><h2>Speed on one core</h2>{_table(SPEED_HEADINGS, speeds, (0, 1), [False] * len(speeds))}
<p class="hint">Millions of elements of K and V per second, end to end; all take turns on the same core; medians.</p>
</section>
<section><h2>What was measured</h2><dl>{setting}</dl><h2>Machine and command</h2>{_machine(report)}</section>
</main></body></html>
"""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int], bad: Sequence[bool]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f'<{tag} class="{"text" if place in text else "num"}"{scope}>{escape(cell)}</{tag}>'
            for place, cell in enumerate(cells)
        )

    body = "".join(
        f'<tr class="{"bad" if wrong else ""}">{row(cells, "td")}</tr>' for cells, wrong in zip(rows, bad, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{row(headings, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _card(rows: Sequence[QualityRow], text: str, record: int) -> str:
    some = [row for row in rows if (row.text, row.record_tokens) == (text, record) and row.kl is not None]
    first = some[0]
    title = f"{text}: {first.contexts} contexts of {first.tokens} tokens, records of {record}"
    return f'<figure class="card wide"><figcaption><b>{escape(title)}</b></figcaption>{plot(some, title)}</figure>'


def plot(rows: Sequence[QualityRow], title: str) -> str:
    """KL over bits per value, both on logarithmic scales, as SVG."""
    shown = [row for row in rows if row.kl is not None and math.isfinite(row.kl) and not row.lossless]
    if not shown:
        return "<p class='hint'>No lossy codec was judged.</p>"
    scale = _Scale(shown)
    parts = [_axes(scale)]
    labels: list[tuple[float, float, str, str]] = []
    for codec in dict.fromkeys(row.codec for row in shown):
        some = sorted((row for row in shown if row.codec == codec), key=lambda row: row.bits_per_value)
        kind = _KINDS.get(codec, "d")
        at = [(scale.x(row.bits_per_value), scale.y(row.kl or 0.0)) for row in some]
        if len(some) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        for row, (x, y) in zip(some, at, strict=True):
            tip = (
                f"{codec} {row.level}: {row.bits_per_value:.3f} bits per value, KL {row.kl:.4f}, ΔNLL {row.dnll:+.4f}, "
                f"top-1 {row.top1:.3f}"
            )
            parts.append(f"<g><title>{escape(tip)}</title>{_mark(kind, x, y)}</g>")
        labels.append((*at[-1], codec, kind))
    parts.append(_labels(labels))
    summary = f"KL over bits per value, {title}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(summary)}">{"".join(parts)}</svg>'


class _Scale:
    """From bits and nats to pixels."""

    def __init__(self, rows: Sequence[QualityRow]) -> None:
        bits = [row.bits_per_value for row in rows]
        kls = [max(row.kl or 0.0, _FLOOR) for row in rows]
        self.bits = (min(1.0, min(bits) * 0.9), max(9.0, max(bits) * 1.05))
        self.kls = (10 ** math.floor(math.log10(min(kls))), 10 ** math.ceil(math.log10(max(*kls, 0.1))))

    def x(self, bits: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * _share(bits, self.bits)

    def y(self, kl: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * _share(max(kl, self.kls[0]), self.kls)


def _share(value: float, ends: tuple[float, float]) -> float:
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _axes(scale: _Scale) -> str:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    decade = scale.kls[0]
    while decade <= scale.kls[1] * 1.001:
        y = scale.y(decade)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{decade:.6g}</text>')
        decade *= 10
    for bits in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16):
        if scale.bits[0] <= bits <= scale.bits[1]:
            x = scale.x(bits)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{bits:g}</text>')
    y = scale.y(KL_BAR)
    parts.append(f'<line class="barline" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(f'<text class="tick barname" x="{right - 4}" y="{y - 5:.1f}" text-anchor="end">KL {KL_BAR:g}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">bits per value (log)</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{_TOP - 10}" text-anchor="end">KL, nats</text>')
    return "".join(parts)


def _mark(kind: str, x: float, y: float) -> str:
    reach = f'<circle class="reach" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
    if kind == "a":
        return f'<circle class="dot a" cx="{x:.1f}" cy="{y:.1f}" r="5"/>{reach}'
    if kind == "b":
        return f'<rect class="dot b" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>{reach}'
    shape = [(0, -6.5), (6, 5), (-6, 5)] if kind == "c" else [(0, -6), (6, 0), (0, 6), (-6, 0)]  # triangle, diamond
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shape)
    return f'<polygon class="dot {kind}" points="{points}"/>{reach}'


def _labels(labels: Sequence[tuple[float, float, str, str]]) -> str:
    """Names at the right, one below the other, each tied to the last point of its codec."""
    x, gap, below = _WIDTH - _RIGHT + 22, 16.0, -math.inf
    parts = []
    for at_x, y, name, kind in sorted(labels, key=lambda each: each[1]):
        below = max(y, below + gap)
        parts.append(f'<line class="tie" x1="{at_x + 7:.1f}" y1="{y:.1f}" x2="{x - 4}" y2="{below:.1f}"/>')
        parts.append(f'<text class="end {kind}" x="{x}" y="{below + 4:.1f}">{escape(name)}</text>')
    return "".join(parts)
