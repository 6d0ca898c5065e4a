"""A diagnosis as one self-contained page: SVG made here, no scripts, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .diagnostics import Diagnosis

__all__ = ["heat_map", "line_chart", "page"]

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 110, 34, 44
_MAP = 300
# Okabe and Ito: told apart by every kind of colour vision; dashes besides.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("", "7 4", "2 3", "9 3 2 3")


def page(diagnosis: Diagnosis) -> str:
    """An HTML document: KV and attention deviation over layers for each ratio, and whose deviation foretells whose."""
    kv = {_name(run.ratio): list(enumerate(run.kv_deviation)) for run in diagnosis.runs}
    attention = {_name(run.ratio): list(enumerate(run.attention_deviation)) for run in diagnosis.runs}
    neighbours = {"with the next": [(layer, value) for layer, value in enumerate(diagnosis.neighbours, 1)]}
    settings = diagnosis.settings
    selection = settings.selection if isinstance(settings.selection, str) else type(settings.selection).__name__
    facts = (
        f"{diagnosis.model}, {diagnosis.tokens} tokens, {len(diagnosis.positions)} of them from storage and not exact; "
        f"selection {selection}, measure {settings.measure}, check layers {', '.join(map(str, settings.check_layers))}"
    )
    charts = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"
        for title, chart in (
            ("Deviation of KV from a full prefill", line_chart(kv, "layer", "‖ΔKV‖ / ‖KV‖")),
            ("Deviation of the question's attention", line_chart(attention, "layer", "‖A − A_full‖₂")),
            ("Rank correlation of token deviation, layer and next", line_chart(neighbours, "layer", "Spearman")),
            (
                "The same between any two layers (blue 1, white 0, orange -1)",
                heat_map(diagnosis.correlation.tolist(), "layer"),
            ),
        )
    )
    rows = "".join(
        f"<tr><td>{_name(run.ratio)}</td><td>{run.token_layers:.3f}</td><td>{run.kl:.4g}</td>"
        f"<td>{_mean(run.kv_deviation):.4g}</td><td>{_mean(run.attention_deviation):.4g}</td></tr>"
        for run in diagnosis.runs
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Blending: what deviates</title><style>{_STYLE}</style></head>
<body><main><h1>Blending: what deviates from a full prefill</h1><p>{escape(facts)}</p>
<div class="charts">{charts}</div>
<table><thead><tr><th>recomputed</th><th>token-layers</th><th>KL of the question, nats</th><th>mean deviation of KV</th>
<th>mean deviation of attention</th></tr></thead><tbody>{rows}</tbody></table></main></body></html>
"""


def line_chart(series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """An SVG of lines over a common, linear pair of axes, each named at its end. Points that are not finite are gaps.

    Args:
        series: points (x, y) of each line by its name, by rising x.
    """
    finite = [point for points in series.values() for point in points if all(map(math.isfinite, point))]
    xs, ys = [x for x, _ in finite] or [0.0], [0.0, *(y for _, y in finite)]
    low_x, high_x = min(xs), max(xs)
    high_x = high_x if high_x > low_x else low_x + 1
    step = _nice(max(ys) - min(ys))
    low_y, high_y = math.floor(min(ys) / step) * step, max(step, math.ceil(max(ys) / step) * step)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for index in range(round((high_y - low_y) / step) + 1):
        y = place(low_x, low_y + index * step)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{low_y + index * step:.6g}</text>')
    x_step = max(1.0, _nice(high_x - low_x)) if high_x - low_x >= 1 else _nice(high_x - low_x)
    tick = math.ceil(low_x / x_step) * x_step
    while tick <= high_x + x_step / 1e6:
        x = place(tick, low_y)[0]
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{tick:.6g}</text>')
        tick += x_step
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="8" y="18">{escape(y_label)}</text>')
    ends: list[tuple[float, str, str]] = []
    for number, (name, points) in enumerate(series.items()):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        for piece in _pieces(points):
            placed = [place(*point) for point in piece]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="line" stroke="{colour}" stroke-dasharray="{dash}" points="{path}"/>')
            parts += [
                f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{escape(name)}: '
                f"{escape(x_label)} {point[0]:.6g}, {point[1]:.4g}</title></circle>"
                for (x, y), point in zip(placed, piece, strict=True)
            ]
        last = [point for point in points if all(map(math.isfinite, point))][-1:]
        ends += [(place(*point)[1], name, colour) for point in last]
    below = -math.inf
    for y, name, colour in sorted(ends):
        below = max(y, below + 15)  # names never cover each other
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{below + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    label = escape(f"{y_label} over {x_label}: {', '.join(series)}", quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def heat_map(matrix: Sequence[Sequence[float]], label: str) -> str:
    """An SVG of a square matrix of numbers from -1 (orange) over 0 (white) to 1 (blue); nan is grey."""
    size = len(matrix)
    cell = _MAP / max(1, size)
    parts = []
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            said = "nothing to rank" if math.isnan(value) else f"{value:.3f}"
            parts.append(
                f'<rect x="{_LEFT + column * cell:.2f}" y="{row * cell + 8:.2f}" width="{cell:.2f}" '
                f'height="{cell:.2f}" fill="{_shade(value)}"><title>{escape(label)} {row} and {column}: {said}</title>'
                "</rect>"
            )
    for index in range(0, size, max(1, size // 6)):
        x, y = _LEFT + (index + 0.5) * cell, (index + 0.5) * cell + 12
        parts.append(f'<text x="{x:.1f}" y="{_MAP + 24}" text-anchor="middle">{index}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{index}</text>')
    aria = f'role="img" aria-label="{escape(label, quote=True)} by {escape(label, quote=True)}"'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" {aria}>{"".join(parts)}</svg>'


def _shade(value: float) -> str:
    if math.isnan(value):
        return "#999999"
    end = (0, 114, 178) if value > 0 else (213, 94, 0)
    share = min(1.0, abs(value))
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in end)


def _pieces(points: Points) -> list[list[tuple[float, float]]]:
    """Runs of finite points."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if all(map(math.isfinite, point)):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _nice(extent: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides `extent` into about five."""
    if extent <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(extent / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= extent / 5)


def _name(ratio: float) -> str:
    return "plain reuse" if ratio == 0 else f"r = {ratio:g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5a6472;--line:#d9dee5}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1a2029;--ink:#e6eaf0;--soft:#9aa5b4;--line:#323b48}}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px}h1{font-size:22px}
.charts{display:flex;flex-wrap:wrap;gap:16px}
figure{margin:0;flex:1 1 440px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.line{fill:none;stroke-width:2}
table{margin-top:16px;border-collapse:collapse;background:var(--card)}
th,td{padding:6px 12px;border:1px solid var(--line);text-align:right}
"""
