"""A plan as one self-contained page: no scripts, nothing from elsewhere; the break-even plot is SVG made here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvstore.stream.estimates import PrefillModel

from .plan_core import Load
from .plan_show import bytes_text, seconds_text, tokens_text

__all__ = ["page"]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 170, 14, 44
_LEAST, _MOST = 64, 1 << 20  # tokens
_LABEL_HEIGHT = 17.0


def page(plan: Mapping[str, Any]) -> str:
    """The whole document for the result of `make_plan`."""
    inputs, advice = plan["inputs"], plan["recommendation"]
    reasons = "".join(f"<li>{escape(text)}</li>" for text in advice["reasons"])
    tiers = "".join(
        f"<li><b>{escape(each['title'])}</b> <code>{escape(each['url'])}</code>, "
        f"ttl {escape(seconds_text(each['ttl_s']))}</li>"
        for each in advice["tiers"]
    )
    notes = "".join(f"<li>{escape(text)}</li>" for text in plan["notes"])
    title = f"kvstore plan: {inputs['model']}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
<p class="soft">{inputs["requests_per_day"]:,.0f} requests a day of {inputs["prompt_tokens"]:,} tokens, hit rate
{inputs["hit_rate"]:.0%}, {escape(inputs["gpu"])} ({escape(inputs["pricing"])}, {escape(inputs["region"])}), codec
{escape(inputs["codec"])}; prices of {escape(plan["prices"]["date"])}</p>
<section><h2>Recommended: {escape(advice["folder"])}, about ${advice["monthly_usd"]:,.0f} a month</h2>
<ul>{reasons}{tiers}</ul></section>
<section><h2>Load or recompute</h2>
<p class="soft">Seconds for a prefix of so many tokens, both axes logarithmic. A tier pays where its line lies below the
dark one, which is this GPU's prefill; dots mark where the two meet. The dashed line is what is loaded here:
{plan_hit(plan):,} tokens.</p>
<div class="card">{_plot(plan)}</div></section>
<section><h2>Tiers, a month</h2><div class="card">{_tiers(plan)}</div></section>
<section><h2>Break-even prefix by network</h2><div class="card">{_links(plan)}</div></section>
<section><h2>Numbers</h2><div class="card">{_numbers(plan)}</div></section>
<section><h2>Notes</h2><ul class="soft">{notes}</ul></section>
</main></body></html>
"""


def plan_hit(plan: Mapping[str, Any]) -> int:
    """Tokens that a request loads."""
    return int(plan["ttft"]["hit_tokens"])


def _tiers(plan: Mapping[str, Any]) -> str:
    return _table(
        ("tier", "$ a month", "made of", "saves $", "load", "TTFT", "from tokens", "from hit rate", "keep idle"),
        [
            (tier["title"], f"{tier['monthly_usd']:,.2f}",
             ", ".join(f"{name} {usd:,.2f}" for name, usd in tier["items"].items() if usd) or "nothing",
             f"{tier['saved_usd']:,.2f}", seconds_text(tier["load_s"]), seconds_text(tier["ttft_s"]),
             tokens_text(tier["break_even_tokens"]),
             "never" if tier["break_even_hit_rate"] is None else f"{tier['break_even_hit_rate']:.1%}",
             seconds_text(tier["idle_s"]))
            for tier in plan["tiers"]
        ],
        text=(0, 2),
    )  # fmt: skip


def _links(plan: Mapping[str, Any]) -> str:
    links = list(plan["tiers"][0]["break_even_by_link"])
    rows = [
        (tier["title"], *(tokens_text(each) for each in tier["break_even_by_link"].values())) for tier in plan["tiers"]
    ]
    return _table(("tier", *links), rows)


def _numbers(plan: Mapping[str, Any]) -> str:
    kv, volume, gpu, ttft = plan["kv"], plan["volume"], plan["gpu"], plan["ttft"]
    rows = [
        ("KV per token", bytes_text(kv["bytes_per_token"])),
        ("KV per chunk", bytes_text(kv["bytes_per_chunk"])),
        ("stored per token", bytes_text(kv["stored_bytes_per_token"])),
        *((f"stored with a ttl of {name}", bytes_text(value)) for name, value in volume["by_ttl"].items()),
        ("prefill of a whole prompt", seconds_text(plan["prefill"]["prompt_s"])),
        ("bandwidth at the peak, all hosts", f"{ttft['peak_bytes_per_s'] / 1e9:,.3g} GB/s"),
        (
            "busy GPU hours a month, without and with",
            f"{gpu['busy_hours_without']:,.1f}, {gpu['busy_hours_with']:,.1f}",
        ),
        ("instances at the peak, without and with", f"{gpu['instances_without']}, {gpu['instances']}"),
    ]
    return _table(("what", "value"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)) -> str:
    def cells(tag: str, line: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if place in text else ' class=num'}>{escape(cell)}</{tag}>" for place, cell in enumerate(line)
        )

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", headings)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


class _Scale:
    """From tokens and seconds to pixels, both logarithmic."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))

    def x(self, tokens: float) -> float:
        share = math.log(tokens / _LEAST) / math.log(_MOST / _LEAST)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, seconds: float) -> float:
        share = (math.log10(max(seconds, 1e-12)) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - min(1.0, max(0.0, share)) * (_HEIGHT - _TOP - _BOTTOM)


def _plot(plan: Mapping[str, Any]) -> str:
    prefill = PrefillModel(plan["prefill"]["a"], plan["prefill"]["b"])
    lines = {tier["title"]: Load(tier["latency_s"], tier["load_s_per_token"]) for tier in plan["tiers"]}
    steps = [_LEAST * (_MOST / _LEAST) ** (step / 48) for step in range(49)]
    computed = [prefill.seconds(0, round(tokens)) for tokens in steps]
    loaded = {title: [load.seconds(tokens) for tokens in steps] for title, load in lines.items()}
    every = [value for values in (computed, *loaded.values()) for value in values]
    scale = _Scale(max(min(every), 1e-6), max(*every, 1e-5))
    parts = [_axes(scale)]
    hit = plan_hit(plan)
    if _LEAST <= hit <= _MOST:
        parts.append(
            f'<line class="hit" x1="{scale.x(hit):.1f}" x2="{scale.x(hit):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
    labels = [(scale.y(computed[-1]), "recompute", "own")]
    for place, (title, values) in enumerate(loaded.items()):
        parts.append(_line(scale, steps, values, f"s{place}", title))
        labels.append((scale.y(values[-1]), title, f"s{place}"))
    parts.append(_line(scale, steps, computed, "own", "recompute"))
    for place, tier in enumerate(plan["tiers"]):
        least = tier["break_even_tokens"]
        if least is not None and _LEAST <= least <= _MOST:
            parts.append(
                f'<circle class="s{place}" cx="{scale.x(least):.1f}" cy="{scale.y(prefill.seconds(0, least)):.1f}" '
                f'r="4">'
                f"<title>{escape(tier['title'])}: from {least:,} tokens on</title></circle>"
            )
    parts.append(_labels(labels))
    meets = "; ".join(f"{tier['title']} from {tokens_text(tier['break_even_tokens'])}" for tier in plan["tiers"])
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Break-even prefix in tokens: {escape(meets)}">'
        f"{''.join(parts)}</svg>"
    )


def _line(scale: _Scale, steps: Sequence[float], values: Sequence[float], kind: str, title: str) -> str:
    points = " ".join(f"{scale.x(t):.1f},{scale.y(v):.1f}" for t, v in zip(steps, values, strict=True))
    return f'<polyline class="line {kind}" points="{points}"><title>{escape(title)}</title></polyline>'


def _axes(scale: _Scale) -> str:
    parts = []
    for power in range(scale.low, scale.high + 1):
        y = scale.y(10.0**power)
        name = f"{10 ** (power + 3):g} ms" if power < 0 else f"{10**power:,} s"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    tokens = _LEAST
    while tokens <= _MOST:
        name = f"{tokens >> 10}K" if tokens >= 1024 and tokens < _MOST else "1M" if tokens == _MOST else str(tokens)
        x = scale.x(tokens)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{name}</text>')
        tokens *= 4
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">tokens of the prefix</text>'
    )
    return "".join(parts)


def _labels(labels: Sequence[tuple[float, str, str]]) -> str:
    """Names at the ends of the lines, moved apart, and kept inside the picture."""
    placed = sorted(labels)
    top = -math.inf
    for place, (y, name, kind) in enumerate(placed):  # from above, push down what is too near
        top = max(y, top + _LABEL_HEIGHT)
        placed[place] = (top, name, kind)
    limit = float(_HEIGHT - _BOTTOM)
    for place, (y, name, kind) in reversed(list(enumerate(placed))):  # from below, push up what does not fit
        limit = min(y, limit)
        placed[place] = (limit, name, kind)
        limit -= _LABEL_HEIGHT
    x = _WIDTH - _RIGHT + 8
    return "".join(
        f'<text class="name {kind}" x="{x}" y="{y + 4:.1f}">{escape(name)}</text>' for y, name, kind in placed
    )


_COLOURS = ("#0072b2", "#009e73", "#c44e00", "#cc79a7", "#7a5195", "#b8860b", "#d62728", "#17798b")
_BRIGHT = ("#56b4e9", "#2fd6a2", "#f0954a", "#e8a5cb", "#b79ae0", "#e6c34d", "#ff7b72", "#5cc8da")


def _coloured(colours: Sequence[str], prefix: str = "") -> str:
    return "".join(
        f"{prefix}.line.s{place}{{stroke:{colour}}}{prefix}circle.s{place},{prefix}.name.s{place}{{fill:{colour}}}"
        for place, colour in enumerate(colours)
    )


_STYLE = (
    """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5a6472;--line:#d9dee5}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1a2029;--ink:#e6eaf0;--soft:#9aa5b4;--line:#323b48}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 48px}h1{font-size:1.6rem;margin:0}
h2{font-size:1.15rem;margin:1.8rem 0 .4rem}.soft{color:var(--soft);margin:.3rem 0 .8rem;font-size:.92rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 12px}
.card svg{width:100%;height:auto;display:block}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}th{color:var(--soft)}
.num{text-align:right}tbody tr:last-child td{border-bottom:0}code{font-size:.93em;overflow-wrap:anywhere}
.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:12.5px}.hit{stroke:var(--soft);stroke-dasharray:4 5}
.line{fill:none;stroke-width:2}.line.own{stroke:var(--ink);stroke-width:3}.name{font-size:13px}
.name.own{fill:var(--ink);font-weight:700}
@media (max-width:600px){main{padding:16px 12px 32px}.tick,.name{font-size:15px}}
"""
    + _coloured(_COLOURS)
    + "@media (prefers-color-scheme:dark){"
    + _coloured(_BRIGHT)
    + "}"
)
