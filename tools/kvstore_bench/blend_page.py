"""The report of `kvstore-bench blend` as one self-contained page: KL and TTFT over r, the controller, all rows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .blend_report import LINK_HEADINGS, SCHEME_HEADINGS, link_cells, scheme_cells
from .html import _STYLE, _machine

if TYPE_CHECKING:
    from .blend_report import BlendBenchReport

__all__ = ["page"]

_MORE = """
.cards svg text{font-size:12.5px;fill:var(--soft)}.cards .line{stroke-width:2}
"""

Series = dict[str, list[tuple[float, float]]]


def page(report: BlendBenchReport) -> str:
    """The whole document."""
    from kvstore.blend.plot import line_chart

    state = "Everything came from the store, as stored" if report.ok else "Not everything was as it must be"
    figures = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td class='num'>{figure.value:.4g}</td>"
        f"<td>{escape('' if figure.unit == 'ratio' else figure.unit)}</td>"
        f'<td class="{"" if figure.met is None else "good" if figure.met else "warn"}">'
        f"{escape(report.bar_text(name, figure))}</td></tr>"
        for name, figure in report.figures.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    setting = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.setting.items())
    cards = "".join(
        f'<figure class="card"><figcaption><b>{escape(title)}</b></figcaption>{line_chart(series, across, up)}</figure>'
        for title, series, across, up in (
            ("KL of the question over r, deviation", kl_over_r(report), "r", "KL over that of full reuse"),
            ("Time to the first token over r", ttft_over_r(report), "r", "s"),
            ("What the controller chooses, and brute force", choices(report), "bandwidth, log10 of bytes/s", "r"),
        )
        if any(series.values())
    )
    schemes = [scheme_cells(row) for row in report.schemes]
    links = [link_cells(row) for row in report.links]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench blend</title><style>{_STYLE}{_MORE}</style></head>
<body><main><header><h1>kvstore-bench blend</h1>
<p class="sub"><span class="badge {"good" if report.ok else "bad"}">{state}</span> {escape(report.started)} ·
took {report.seconds:.0f} s</p></header>
<section><h2>Over r, the share of reused tokens that is computed again</h2>
<p class="hint">Left: how far the model is from its own full prefill while it reads the question. Right: until the first
token, over a link of each rate; the level line is a full prefill. Hover for values.</p>
<div class="cards">{cards}</div></section>
<section><h2>Figures</h2><div class="scroll" tabindex="0"><table><thead><tr><th scope="col">figure</th>
<th class="num" scope="col">value</th><th scope="col">unit</th><th scope="col">bar</th></tr></thead>
<tbody>{figures}</tbody></table></div>{f'<div class="notes"><ul>{notes}</ul></div>' if notes else ""}</section>
<section><h2>All schemes</h2>{_table(SCHEME_HEADINGS, schemes, 2)}
<p class="hint">KL to the full prefill over the question's tokens; ± is the standard error of the value before it.
Answer NLL and exact match have no bar: what answers lose cannot be shown on a model of this size.</p></section>
<section><h2>Links</h2>{_table(LINK_HEADINGS, links, 0)}
<p class="hint">Medians. Formula: max(load, recompute) per layer, summed; TTFT/formula after one layer is taken off.</p>
</section>
<section><h2>What was measured</h2><dl>{setting}</dl><h2>Machine and command</h2>{_machine(report)}</section>
</main></body></html>
"""


def kl_over_r(report: BlendBenchReport) -> Series:
    """A line per form, from plain reuse to everything computed again; over the KL of plain reuse of the same prompts,
    since some points are of fewer prompts."""
    lines: Series = {}
    for row in report.schemes:
        if row.form and row.scheme in ("full reuse", "deviation") and row.kl_vs_reuse is not None:
            lines.setdefault(row.form.replace("_", " "), []).append((row.ratio, row.kl_vs_reuse))
    return {name: sorted(points) for name, points in lines.items()}


def ttft_over_r(report: BlendBenchReport) -> Series:
    """A line per rate, and the full prefill."""
    lines: Series = {}
    for point in report.curve:
        lines.setdefault(f"{point.rate_bytes_per_s / 1e6:.0f} MB/s", []).append((point.ratio, point.ttft_s))
    if report.links and lines:
        ratios = sorted({point.ratio for point in report.curve})
        prefill = sum(row.prefill_s for row in report.links) / len(report.links)
        lines["full prefill"] = [(ratio, prefill) for ratio in (ratios[0], ratios[-1])]
    return lines


def choices(report: BlendBenchReport) -> Series:
    """r over the bandwidth."""
    from math import log10

    return {
        "controller": [(log10(each.rate), each.chosen) for each in report.choices],
        "brute force": [(log10(each.rate), each.best) for each in report.choices],
    }


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], text: int) -> str:
    """The first `text` columns are words."""

    def line(cells: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f'<{tag} class="{"text" if place < text else "num"}"{scope}>{escape(cell)}</{tag}>'
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{line(headings, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
