"""What `kvstore-bench tiers` found: a table, savings per turn, JSON, and a page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, TextIO

from .report import Report, plain_table
from .tiers_replay import Replay

__all__ = ["TiersReport"]

_HEADINGS = (
    "trace", "capacity", "policy", "hit rate", "1st half", "2nd half", "saved s", "vs lru", "read GB", "written GB",
    "dropped GB", "TTFT s", "P99 s", "replay s",
)  # fmt: skip
_TEXT = (0, 1, 2)


def _giga(values: Sequence[int]) -> str:
    return "+".join(f"{value / 1e9:.0f}" for value in values)


@dataclass
class TiersReport(Report):
    """The report of `kvstore-bench tiers`: replays instead of rows.

    Attributes:
        replays: in the order done.
        wrong: what did not come out as it must.
    """

    replays: list[Replay] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if something was replayed and nothing came out wrong."""
        return bool(self.replays) and not self.wrong

    @property
    def without_bar(self) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(each), "hit_rate": each.hit_rate} for each in self.replays]
        return {**super().to_dict(), "rows": rows, "wrong": self.wrong}

    def _cells(self, each: Replay) -> list[str]:
        lru = next(
            (
                other for other in self.replays
                if (other.trace, other.capacity, other.policy) == (each.trace, each.capacity, "lru")
            ),
            None,
        )  # fmt: skip
        against = f"{each.saved_s / lru.saved_s - 1:+.1%}" if lru is not None and lru.saved_s else "-"
        moved = each.policy != "belady"  # of Belady only hits are counted
        return [
            each.trace, each.capacity, each.policy, f"{each.hit_rate:.4f}", f"{each.half(0):.4f}",
            f"{each.half(1):.4f}", f"{each.saved_s:.0f}", against, _giga(each.read_bytes),
            _giga(each.written_bytes) if moved else "-", f"{each.dropped_bytes / 1e9:.0f}" if moved else "-",
            f"{each.ttft_mean_s:.3f}", f"{each.ttft_p99_s:.3f}", f"{each.replay_s:.1f}",
        ]  # fmt: skip

    def print_table(self, out: TextIO) -> None:
        """The tables, plain on every kind of output: they are as wide as a page."""
        out.write(plain_table(_HEADINGS, [self._cells(each) for each in self.replays], text=_TEXT))
        for each in self._shown():
            out.write(f"\nSavings per turn, {each.trace} {each.capacity} {each.policy}: Savings(t) = 1 - n_t/Σnᵢ\n")
            out.write(
                plain_table(("turn", "requests", "tokens", "new", "Savings(t)", "reached"), _turns(each), text=(0,))
            )
        for name, figure in self.figures.items():
            if figure.bar is not None:
                out.write(f"{name} = {figure.value:.4g}  (bar ≥ {figure.bar:g}: {self.verdict(figure)})\n")
            elif name.endswith("pre_rope_gap"):
                out.write(f"{name} = {figure.value:+.4f}\n")
        for note in self.notes:
            out.write(f"note: {note}\n")
        for sentence in self.wrong:
            out.write(f"WRONG: {sentence}\n")
        out.flush()

    def _shown(self) -> list[Replay]:
        """Of each trace and capacity the replay whose turns are told: the default's, or the first."""
        groups: dict[tuple[str, str], Replay] = {}
        for each in self.replays:
            place = (each.trace, each.capacity)
            if place not in groups or each.policy == "default":
                groups[place] = each
        return list(groups.values())

    def _page(self) -> str:
        from .html import _STYLE, _machine

        head = "".join(
            f'<th class="{"" if place in _TEXT else "num"}" scope="col">{escape(name)}</th>'
            for place, name in enumerate(_HEADINGS)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td class="{"" if place in _TEXT else "num"}">{escape(cell)}</td>'
                for place, cell in enumerate(self._cells(each))
            )
            + "</tr>"
            for each in self.replays
        )
        figures = "".join(
            f"<li><code>{escape(name)}</code> = {figure.value:.4g} (bar ≥ {figure.bar:g}: "
            f"{escape(self.verdict(figure))})</li>"
            for name, figure in self.figures.items()
            if figure.bar is not None
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in (*self.wrong, *self.notes))
        cards = "".join(_bars(group) for group in self._groups()) + "".join(_curve(each) for each in self._by_trace())
        turns = "".join(_turn_card(each) for each in self._shown())
        state = "The replay gives what is known" if self.ok else "Not everything came out as it must"
        return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>kvstore-bench tiers</title><style>{_STYLE}</style></head>
<body><main><header><h1>kvstore-bench tiers</h1>
<p class="sub"><span class="badge {"good" if self.ok else "bad"}">{state}</span> {escape(self.started)} ·
took {self.seconds:.0f} s</p></header>
<section><ul>{figures}</ul>{f'<div class="notes"><ul>{notes}</ul></div>' if notes else ""}</section>
<section><h2>Hit rate</h2><p class="hint">Share of all blocks that lie in an unbroken hit prefix. Orange: Belady's,
which knows the future. <code>_queue64</code>: the next 64 requests are announced.</p>
<div class="cards">{cards}</div></section>
<section><h2>Savings per turn</h2><p class="hint">Savings(t) = 1 - n_t/Σnᵢ is what a cache that keeps everything saves
in turn t (outline), and what was reached (filled).</p><div class="cards">{turns}</div></section>
<section><h2>All replays</h2><div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div><p class="hint">TTFT is simulated: prompts wait for the first free accelerator;
loading the hit prefix and computing the rest overlap layer by layer. Written bytes are per tier.</p></section>
<section><h2>Machine and command</h2>{_machine(self)}</section></main></body></html>
"""

    def _groups(self) -> list[list[Replay]]:
        groups: dict[tuple[str, str], list[Replay]] = {}
        for each in self.replays:
            groups.setdefault((each.trace, each.capacity), []).append(each)
        return list(groups.values())

    def _by_trace(self) -> list[list[Replay]]:
        """Those with several capacities of one tier, for a curve."""
        groups: dict[str, list[Replay]] = {}
        for each in self.replays:
            if "+" not in each.capacity:
                groups.setdefault(each.trace, []).append(each)
        return [group for group in groups.values() if len({each.capacity for each in group}) > 1]


def _turns(each: Replay) -> list[list[str]]:
    """turn, requests, mean prompt, mean new tokens, Savings(t), what was reached."""
    rows = []
    for turn, (count, tokens, cached, new) in enumerate(each.turns):
        if count:
            name = f"{turn + 1}" + ("+" if turn + 1 == len(each.turns) else "")
            rows.append(
                [name, str(count), f"{tokens / count:.0f}", f"{new / count:.0f}", f"{_ideal(tokens, new):.3f}",
                 f"{cached / tokens:.3f}"]
            )  # fmt: skip
    return rows


def _ideal(tokens: int, new: int) -> float:
    return max(0.0, 1 - new / tokens)


def _bars(group: Sequence[Replay]) -> str:
    """One bar per policy at one capacity."""
    first = group[0]
    top = max(each.hit_rate for each in group) or 1.0
    parts = []
    for number, each in enumerate(group):
        y, width = 8 + number * 26, 290 * each.hit_rate / top
        kind = "put" if each.policy == "belady" else "get"
        parts.append(f'<text class="tick" x="150" y="{y + 15}" text-anchor="end">{escape(each.policy)}</text>')
        parts.append(f'<rect class="dot {kind}" x="156" y="{y}" width="{width:.1f}" height="19"/>')
        parts.append(f'<text class="tick" x="{162 + width:.1f}" y="{y + 15}">{each.hit_rate:.4f}</text>')
    title = f"{first.trace}, {first.capacity} blocks"
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<svg viewBox="0 0 520 {16 + 26 * len(group)}" role="img" aria-label="{escape("hit rates, " + title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _curve(group: Sequence[Replay]) -> str:
    """Hit rate over capacity, one line per policy."""
    sizes = sorted({int(each.capacity) for each in group})
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    top = max(each.hit_rate for each in group) or 1.0
    lines, ends = [], []
    for policy in dict.fromkeys(each.policy for each in group):
        some = sorted((each for each in group if each.policy == policy), key=lambda each: int(each.capacity))
        at = [
            (52 + 320 * (math.log(int(each.capacity)) - low) / (high - low), 290 - 260 * each.hit_rate / top, each)
            for each in some
        ]
        colour = "put" if policy == "belady" else "get"
        kind = "put dashed" if policy == "belady" else "get" if policy.startswith("default") else "get dashed"
        lines.append(f'<polyline class="line {kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)}"/>')
        lines += [
            f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{escape(each.policy)} {each.capacity}: {each.hit_rate:.4f}</title></circle>"
            for x, y, each in at
        ]
        ends.append((at[-1][1], policy))
    floor = -math.inf
    for y, policy in sorted(ends):  # names one below the other
        floor = max(y, floor + 14)
        lines.append(f'<text class="tick" x="382" y="{floor + 4:.1f}">{escape(policy)}</text>')
    ticks = "".join(
        f'<text class="tick" x="{52 + 320 * (math.log(size) - low) / (high - low):.1f}" y="312" text-anchor="middle">'
        f"{size}</text>"
        for size in sizes
    )
    return (
        f'<figure class="card"><figcaption><b>{escape(group[0].trace)}: hit rate over capacity</b></figcaption>'
        f'<svg viewBox="0 0 520 {max(320, int(floor) + 20)}" role="img" aria-label="hit rate over capacity">'
        f'<line class="axis" x1="52" y1="290" x2="372" y2="290"/><text class="tick" x="46" y="34" text-anchor="end">'
        f'{top:.2f}</text><text class="tick" x="46" y="294" text-anchor="end">0</text>{ticks}{"".join(lines)}'
        "</svg></figure>"
    )


def _turn_card(each: Replay) -> str:
    parts = []
    for turn, (count, tokens, cached, new) in enumerate(each.turns):
        if not count:
            continue
        x = 50 + turn * 56
        ideal, reached = 150 * _ideal(tokens, new), 150 * cached / tokens
        name = f"{turn + 1}" + ("+" if turn + 1 == len(each.turns) else "")
        parts.append(f'<rect class="dot get" x="{x}" y="{170 - reached:.1f}" width="34" height="{reached:.1f}"/>')
        parts.append(f'<rect class="line put" x="{x}" y="{170 - ideal:.1f}" width="34" height="{ideal:.1f}"/>')
        parts.append(f'<text class="tick" x="{x + 17}" y="188" text-anchor="middle">{name}</text>')
        parts.append(f'<text class="tick" x="{x + 17}" y="14" text-anchor="middle">{cached / tokens:.2f}</text>')
    title = f"{each.trace}, {each.capacity} blocks, {each.policy}"
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b></figcaption>'
        f'<svg viewBox="0 0 520 196" role="img" aria-label="{escape("savings per turn, " + title)}">'
        f'<line class="axis" x1="44" y1="170" x2="500" y2="170"/>{"".join(parts)}</svg></figure>'
    )
