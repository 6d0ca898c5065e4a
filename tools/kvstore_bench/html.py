"""The report as one self-contained page: no scripts, no fonts, nothing from elsewhere. SVG made here.

Read from the top by somebody in a hurry: one sentence per URL, one plot per URL, the table, the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .report import Figure, Report, Row, speed
from .workload import size_name

__all__ = ["page", "verdict"]

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 146, 32, 44


def page(report: Report) -> str:
    """The whole document."""
    groups = _groups(report.rows)
    charts = "".join(_card(scheme, rows, report) for scheme, rows in groups)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    state = "Everything verified" if report.ok else "Not everything verified"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench {escape(report.subcommand)}</title>
<style>{_STYLE}</style></head><body><main>
<header><h1>kvstore-bench {escape(report.subcommand)}</h1>
<p class="sub"><span class="badge {"good" if report.ok else "bad"}">{state}</span> {escape(_date(report.started))} ·
{escape(str(report.machine.get("cpu", "")))} · {report.machine.get("cores", "?")} cores ·
took {report.seconds:.0f} s</p></header>
<section aria-label="In one sentence each">
<ul class="verdicts">{"".join(_verdict_item(*each, report) for each in groups)}</ul>
{f'<p class="caution">Caution: {escape(report.caution)}.</p>' if report.caution else ""}
{f'<div class="notes"><h2>What went wrong or was left out</h2><ul>{notes}</ul></div>' if notes else ""}</section>
<section><h2>Throughput over record size</h2>
<p class="hint">Solid: kvstore. Dashed: the ceiling of the same machine, measured in turn with it. Hover for values.</p>
<div class="cards">{charts}{_figures(report)}</div></section>
<section><h2>All measurements</h2>{_table(report.rows)}
<p class="hint">GB/s is 10<sup>9</sup> bytes per second, median of the repeats. The ratio is the median of the ratios of
paired passes, so it may differ a little from the quotient of the two medians. p50 and p99 are of single calls, each of
batch ÷ lanes records (the store: the whole batch). Rows that begin with <code>store_</code> are the whole store,
with header and checksums verified inside the timing; the others are bare transfers, compared byte for
byte outside it.</p></section>
<section><h2>Machine and command</h2>{_machine(report)}</section>
</main></body></html>
"""


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.scheme, []).append(row)
    return list(groups.items())


def _date(started: str) -> str:
    return started.replace("T", " ")


def _title(scheme: str, rows: Sequence[Row]) -> str:
    """What a group is, for people."""
    store = scheme.startswith("store_")
    return f"{rows[0].url}{' through the whole store' if store else ''}"


def _tiny(rows: Sequence[Row]) -> bool:
    return all(row.size_bytes < 1024 for row in rows) and len({row.size_bytes for row in rows}) == 1


def verdict(scheme: str, rows: Sequence[Row], report: Report | None = None) -> str:
    """One sentence about one URL: what it reaches, of what, where; with a report also each operation's own bar."""
    failed = sum(row.failed for row in rows)
    wrong = [row for row in rows if not row.verified]
    label = scheme.replace("store_", "store over ")
    if wrong:
        sizes = ", ".join(dict.fromkeys(f"{row.op} {_spaced(row.size_bytes)}" for row in wrong))
        return f"{label}: not verified: {sizes}" + (f"; {failed} records failed." if failed else ".")
    if _tiny(rows):
        each = " and ".join(
            f"{row.seconds / row.batch * 1e6:.1f} µs per key in a {row.op}{_about_bar(row, report)}" for row in rows
        )
        return f"{label}: {each} of {rows[0].batch} records of {_spaced(rows[0].size_bytes)}."
    parts = []
    for op in dict.fromkeys(row.op for row in reversed(rows)):
        some = [row for row in rows if row.op == op]
        row = next((row for row in some if row.size_bytes == 16 << 20), max(some, key=lambda row: row.size_bytes))
        parts.append(
            f"{op} reaches {row.ratio:.2f} of {row.ceiling.name} at {_spaced(row.size_bytes)} "
            f"({speed(row.gbytes_per_s)} GB/s){_about_bar(row, report)}"
        )
    tail = f"; {failed} records failed" if failed else ""
    return f"{label}: {', '.join(parts)}{tail}."


def _spaced(nbytes: int) -> str:
    name = size_name(nbytes)
    digits = len(name) - len(name.lstrip("0123456789"))
    return f"{name[:digits]} {name[digits:]}"


def _figure_of(row: Row, report: Report) -> Figure | None:
    """The figure with a bar for just this row."""
    what = f"{row.op}.{size_name(row.size_bytes)}.ratio"
    if _tiny([row]):
        what = f"{'' if row.op == 'get' else 'put_'}overhead_us_per_key"
    figure = report.figures.get(f"io.{row.scheme}.{what}")
    return figure if figure is not None and figure.bar is not None else None


def _about_bar(row: Row, report: Report | None) -> str:
    if report is None:
        return ""
    figure = _figure_of(row, report)
    return " [no bar]" if figure is None else f" [bar {_bar(figure)}: {report.verdict(figure)}]"


def _verdict_item(scheme: str, rows: Sequence[Row], report: Report) -> str:
    figures = [figure for name, figure in report.figures.items() if name.split(".")[1] == scheme and figure.bar]
    good = all(row.verified and not row.failed for row in rows)
    missed = [figure for figure in figures if figure.met is False]
    # A tick says that a bar is met for every operation in the sentence; a dot, that nothing is wrong.
    barred = {row.op for row in rows if _figure_of(row, report) is not None}
    every = barred == {row.op for row in rows}
    mark, kind = ("✗", "bad") if not good else ("!", "warn") if missed else ("✓", "good") if every else ("·", "plain")
    said = "wrong" if not good else f"a bar is {report.verdict(missed[0])}" if missed else "verified"
    said += "" if every or not good else "; not every operation has a bar"
    label, _, rest = verdict(scheme, rows, report).partition(": ")
    return (
        f'<li class="{kind}"><span class="mark" role="img" aria-label="{said}">{mark}</span>'
        f"<span><b>{escape(label)}</b>: {escape(rest)}</span></li>"
    )


def _figures(report: Report) -> str:
    rows = [(name, figure) for name, figure in report.figures.items() if figure.bar is not None]
    if not rows:
        return ""
    bare = f"Without a bar here: {', '.join(report.without_bar)}." if report.without_bar else ""
    missed = f" {report.bars_missed[:1].upper()}{report.bars_missed[1:]}." if report.bars_missed else ""
    body = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_value(figure)}</td><td>{_bar(figure)}</td>"
        f'<td class="{"good" if figure.met else "warn"}">{escape(report.verdict(figure))}</td></tr>'
        for name, figure in rows
    )
    return (
        '<div class="card bars"><b>Figures with a bar</b><table><thead><tr><th scope="col">figure</th>'
        '<th scope="col">value</th><th scope="col">bar</th><th scope="col">reached</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
        f'<p class="hint">A bar is for the operation that its name says. {escape(bare)}{escape(missed)}</p></div>'
    )


def _value(figure: Figure) -> str:
    return f"{figure.value:.3g}" + ("" if figure.unit == "ratio" else f" {escape(figure.unit.replace('us', 'µs'))}")


def _bar(figure: Figure) -> str:
    return f"{'≥' if figure.better == 'higher' else '≤'} {figure.bar:g}"


# One plot.


def _card(scheme: str, rows: Sequence[Row], report: Report) -> str:
    if _tiny(rows):
        return ""
    name = scheme.replace("store_", "store over ")
    return (
        f'<figure class="card"><figcaption><b>{escape(name)}</b> <span class="url">{escape(rows[0].url)}</span>'
        f"</figcaption>{_plot(scheme, rows)}</figure>"
    )


class _Scale:
    """From bytes and GB/s to pixels."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.sizes = sorted({row.size_bytes for row in rows})
        low, high = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        pad = max(0.3, (high - low) * 0.03)
        self.low, self.high = low - pad, high + pad
        top = max(max(row.gbytes_per_s, row.ceiling.gbytes_per_s) for row in rows)
        self.step = _nice(top)
        self.top = max(self.step, math.ceil(top / self.step * 1.02) * self.step)

    def x(self, nbytes: int) -> float:
        share = (math.log2(nbytes) - self.low) / (self.high - self.low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)


def _nice(top: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that gives about four to six lines up to `top`."""
    if top <= 0:
        return 1.0
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def _plot(scheme: str, rows: Sequence[Row]) -> str:
    scale = _Scale(rows)
    parts = [_axes(scale)]
    labels: list[tuple[float, str, str]] = []  # y, text, class
    alike = len({row.ceiling.name for row in rows}) == 1 and len({row.op for row in rows}) > 1
    for op in ("get", "put"):
        some = sorted((row for row in rows if row.op == op), key=lambda row: row.size_bytes)
        if not some:
            continue
        parts.append(_line([(scale.x(r.size_bytes), scale.y(r.ceiling.gbytes_per_s)) for r in some], f"{op} dashed"))
        parts.append(_line([(scale.x(r.size_bytes), scale.y(r.gbytes_per_s)) for r in some], op))
        parts += [_points(scale, row) for row in some]
        labels.append((scale.y(some[-1].gbytes_per_s), op, f"{op} strong"))
        name = f"{some[-1].ceiling.name}{f' ({op})' if alike else ''}"
        labels.append((scale.y(some[-1].ceiling.gbytes_per_s), name, op))
    parts.append(_end_labels(labels))
    summary = escape(verdict(scheme, rows))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{summary}" preserveAspectRatio="xMidYMid meet">'
        f"{''.join(parts)}</svg>"
    )


def _axes(scale: _Scale) -> str:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for index in range(round(scale.top / scale.step) + 1):
        value = index * scale.step
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for nbytes in scale.sizes:
        x = scale.x(nbytes)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>')
    for nbytes in _spread(scale):
        text = f'<text class="tick" x="{scale.x(nbytes):.1f}" y="{floor + 17}" text-anchor="middle">'
        parts.append(f"{text}{_spaced(nbytes)}</text>")
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">record size (log)</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{_TOP - 14}" text-anchor="end">GB/s</text>')
    return "".join(parts)


def _spread(scale: _Scale) -> list[int]:
    """The sizes whose labels fit next to each other."""
    shown: list[int] = []
    for nbytes in scale.sizes:
        if not shown or scale.x(nbytes) - scale.x(shown[-1]) >= 58:
            shown.append(nbytes)
    return shown


def _line(points: Sequence[tuple[float, float]], kind: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {kind}" points="{path}"/>'


def _points(scale: _Scale, row: Row) -> str:
    """A mark of ours (get: circle, put: square) and of the ceiling, with the values behind a title."""
    x, y, top = scale.x(row.size_bytes), scale.y(row.gbytes_per_s), scale.y(row.ceiling.gbytes_per_s)
    size = _spaced(row.size_bytes)
    ours = (
        f"{row.op} {size}: {speed(row.gbytes_per_s)} GB/s, {row.ratio:.2f} of {row.ceiling.name}; "
        f"p50 {row.p50_ms:.3g} ms, p99 {row.p99_ms:.3g} ms, {row.batch} records, {row.lanes} lanes"
        + ("" if row.verified else "; NOT VERIFIED")
        + (f"; {row.failed} failed" if row.failed else "")
    )
    theirs = f"{row.ceiling.name} {size}: {speed(row.ceiling.gbytes_per_s)} GB/s (ceiling of {row.op})"
    mark = (
        f'<circle class="dot {row.op}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        if row.op == "get"
        else f'<rect class="dot {row.op}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    )
    cross = "" if row.verified and not row.failed else f'<text class="cross" x="{x:.1f}" y="{y - 9:.1f}">✗</text>'
    return (
        f'<g><title>{escape(theirs)}</title><circle class="ring {row.op}" cx="{x:.1f}" cy="{top:.1f}" r="2.5"/>'
        f'<circle class="reach" cx="{x:.1f}" cy="{top:.1f}" r="9"/></g>'
        f"<g><title>{escape(ours)}</title>{mark}{cross}"
        f'<circle class="reach" cx="{x:.1f}" cy="{y:.1f}" r="10"/></g>'
    )


def _end_labels(labels: Sequence[tuple[float, str, str]]) -> str:
    """Texts at the right ends of the lines, moved apart so that none covers another, each tied to its line."""
    gap, x = 15.0, _WIDTH - _RIGHT + 14
    placed: list[tuple[float, float, str, str]] = []
    below = -math.inf
    for y, text, kind in sorted(labels):
        below = max(y, below + gap)
        placed.append((y, below, text, kind))
    over = max(0.0, below - (_HEIGHT - _BOTTOM))
    parts = []
    for y, at, text, kind in placed:
        parts.append(f'<line class="tie" x1="{x - 12}" y1="{y:.1f}" x2="{x - 2}" y2="{at - over:.1f}"/>')
        parts.append(f'<text class="end {kind}" x="{x}" y="{at - over + 4:.1f}">{escape(text)}</text>')
    return "".join(parts)


# Tables.


def _table(rows: Sequence[Row]) -> str:
    from .report import HEADINGS, TEXT_COLUMNS, cells

    head = "".join(
        f'<th class="{"text" if index in TEXT_COLUMNS else "num"}" scope="col">{escape(name)}</th>'
        for index, name in enumerate(HEADINGS)
    )
    body = []
    for row in rows:
        good = row.verified and not row.failed
        line = "".join(
            f'<td class="{"text" if index in TEXT_COLUMNS else "num"}">{escape(cell)}</td>'
            for index, cell in enumerate(cells(row))
        )
        body.append(f'<tr class="{"" if good else "bad"}" title="{escape(row.url)}">{line}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _machine(report: Report) -> str:
    facts = dict(report.machine)
    memory = facts.pop("memory_bytes", None)
    systems = facts.pop("file_systems", {})
    spread = facts.pop("ceiling_spread", None)
    pairs = [
        ("command", report.command or "(called as a library)"),
        ("date", _date(report.started)),
        ("kvstore", report.version),
        *((name.replace("_", " "), str(value)) for name, value in facts.items()),
        *([("memory", f"{memory / (1 << 30):.1f} GiB")] if memory else []),
        *([("spread of the ceilings", f"{spread:.0%} between the quartiles")] if spread is not None else []),
        *((f"file system of {path}", kind) for path, kind in systems.items()),
    ]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"


# Blue and vermilion of Okabe and Ito, told apart by every kind of colour vision; circle and square besides.
_STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5a6472;--line:#d9dee5;--get:#0072b2;--put:#c44e00;--good:#1a7f4b;
--warn:#8a5a00;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1a2029;--ink:#e6eaf0;--soft:#9aa5b4;--line:#323b48;
--get:#56b4e9;--put:#f0954a;--good:#5fcf96;--warn:#e6b450;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .4rem}
.sub,.hint{color:var(--soft);margin:.3rem 0 .8rem;font-size:.92rem}
.badge{font-weight:600;border:1px solid;border-radius:99px;padding:1px 10px}
.badge.good,.verdicts .good .mark,td.good{color:var(--good)}.badge.bad,.verdicts .bad .mark{color:var(--bad)}
.verdicts .warn .mark,td.warn{color:var(--warn)}
.verdicts{list-style:none;margin:1rem 0;padding:0;font-size:1.08rem}
.verdicts li{display:flex;gap:.6rem;padding:.3rem 0}.mark{font-weight:700;width:1.1em;flex:none;text-align:center}
.caution{color:var(--warn)}.notes{border-left:4px solid var(--bad);padding:.1rem 1rem;background:var(--card)}
.notes h2{margin:.6rem 0 0;font-size:1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:16px}
.card,.scroll{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:12px 12px 4px;min-width:0}.card svg{width:100%;height:auto;display:block}
.url{color:var(--soft);font-size:.82rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;white-space:nowrap;border-bottom:1px solid var(--line);text-align:left}
th{color:var(--soft);font-weight:600}th.num,td.num{text-align:right}tbody tr:last-child td{border-bottom:0}
tbody tr:hover{background:color-mix(in srgb,var(--get) 9%,transparent)}tr.bad td{color:var(--bad);font-weight:600}
.bars{overflow-x:auto;padding-bottom:12px}.bars table{margin-top:8px}.bars td,.bars th{padding:5px 8px 5px 0}
code{font-size:.93em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:0;font-size:.92rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.tick{fill:var(--soft);font-size:12.5px}
.line{fill:none;stroke-width:2.4;stroke-linejoin:round}.dashed{stroke-dasharray:6 5;stroke-width:1.6;opacity:.85}
.line.get,.ring.get{stroke:var(--get)}.line.put,.ring.put{stroke:var(--put)}
.dot.get,.end.get{fill:var(--get)}.dot.put,.end.put{fill:var(--put)}
.dot{stroke:var(--card);stroke-width:1.5}.ring{fill:var(--card);stroke-width:1.4}.reach{fill:transparent}
.tie{stroke:var(--line)}.end{font-size:13px}.end.strong{font-weight:700}
.cross{fill:var(--bad);font-size:14px;text-anchor:middle}
@media (max-width:600px){main{padding:16px 12px 32px}dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}
.tick,.end{font-size:15px}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--get:#0072b2;--put:#c44e00;--good:#1a7f4b;
--warn:#8a5a00;--bad:#b3261e}main{max-width:none;padding:0}.card,tr,li{break-inside:avoid}.scroll,.bars{overflow:visible}
body{font-size:10.5pt}
table{font-size:7.5pt}th,td{padding:2px 4px}.cards{grid-template-columns:1fr 1fr}}
"""
