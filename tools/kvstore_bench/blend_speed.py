"""The time to the first token of a blended prompt over a throttled link, against the formula of the pipeline.

In one run, in turn, for each rate of the link: t, all chunks loaded alone, layer by layer, K turned (`ChunkLoader`);
c, each layer computed alone with its KV at hand (`Recompute.layer`); T, `Blender.blend` of the whole prompt: looking
up, loading, computing. A layer takes max(t, c); T may be a tenth more than their sum, and one layer besides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .blend_report import CurvePoint, LinkRow

if TYPE_CHECKING:
    from kvstore.blend import Blender, BlendSettings, LayerKV, Span

    from .blend_world import Asked, World

__all__ = ["SHARES", "formula_seconds", "measure_curve", "measure_links"]

SHARES = (0.5, 1.0, 2.0)
"""Rates are chosen so that loading a layer takes so many times as long as computing it, at the ratio that is judged."""
_TIMEOUT_S = 120.0


def formula_seconds(load_s: Sequence[float], compute_s: Sequence[float]) -> tuple[float, float]:
    """Σ max(load, recompute) over the layers, and the mean of these: one layer. Seconds."""
    layers = [max(pair) for pair in zip(load_s, compute_s, strict=True)]
    return sum(layers), sum(layers) / len(layers)


class _Ways:
    """One prompt and its blender."""

    def __init__(self, world: World, blender: Blender, form: str, asked: Asked) -> None:
        self.world, self.blender, self.asked = world, blender, asked
        self.form = world.form(form)
        self.placed = world.placed(self.form, asked)
        self.nbytes = sum(self.form.spec(each.tokens).raw_bytes for each in self.placed)
        world.throttle(None)
        self.stored = self._stored()

    def _loader(self) -> Any:
        from kvstore.blend import ChunkLoader

        return ChunkLoader(self.form, self.placed, self.world.prefetcher, deadline=time.monotonic() + _TIMEOUT_S)

    def _stored(self) -> list[LayerKV]:
        from kvstore.blend import LayerKV

        with self._loader() as loader:
            return [LayerKV(kv.k.clone(), kv.v.clone()) for kv in loader.layers()]

    def load_alone(self) -> list[float]:
        """t: seconds per layer; all layers are alike, so the whole is shared out evenly (single layers come in groups,
        which would make the formula's sum larger)."""
        with self._loader() as loader:
            begin = time.perf_counter()
            for _ in loader.layers():
                pass
            seconds = time.perf_counter() - begin
        return [seconds / loader.num_layers] * loader.num_layers

    def compute_alone(self, settings: BlendSettings) -> list[float]:
        """c: seconds per layer, its KV at hand."""
        from kvstore.blend import Recompute

        run = Recompute(self.world.blend_model, self.asked.ids[0], self._spans(), settings, logits=1)
        seconds = []
        for layer, kv in enumerate(self.stored):
            begin = time.perf_counter()
            run.layer(kv if run.needs(layer) else None)
            seconds.append(time.perf_counter() - begin)
        run.finish()
        return seconds

    def _spans(self) -> list[Span]:
        from kvstore.blend import Span

        # The prefix, and what stands right behind it as when it was computed, are exact.
        return [Span(each.begin, each.end, each.begin == each.stored_at) for each in self.placed]

    def blend(self, ratio: float) -> tuple[float, bool]:
        """T, and whether everything that is stored was used."""
        begin = time.perf_counter()
        _, report = self.blender.blend(self.asked.parts[1:], ratio=ratio)
        seconds = time.perf_counter() - begin
        return seconds, report.hits == len(self.placed) and not report.lost


def measure_links(
    world: World,
    *,
    form: str,
    ratio: float,
    shares: Sequence[float] = SHARES,
    repeats: int = 5,
    number: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> list[LinkRow]:
    """A row for each rate.

    Args:
        number: of the prompt.
        repeats: of each; medians are reported.
    """
    blender = world.blender(form)
    asked = world.prompt(number)
    ways = _Ways(world, blender, form, asked)
    settings = blender.settings.at(ratio)
    ways.compute_alone(settings)
    rows = []
    for share in shares:
        usual = statistics.median(ways.compute_alone(settings))
        world.throttle(ways.nbytes / world.blend_model.num_layers / (share * usual))
        told(f"link, loading takes {share:g} times as long as computing")
        rows.append(_row(world, ways, settings, share, ratio, repeats))
        world.throttle(None)
    return rows


def _row(world: World, ways: _Ways, settings: BlendSettings, share: float, ratio: float, repeats: int) -> LinkRow:
    assert world.link.bucket is not None
    before = ways.load_alone(), ways.compute_alone(settings)
    prefill_s = [world.seconds(lambda: world.prefill(ways.asked))]
    measured: list[tuple[float, float, float]] = []  # T, formula, one layer
    loads, computes, wrong = [], [], 0
    for _ in range(repeats):
        seconds, good = ways.blend(ratio)
        after = ways.load_alone(), ways.compute_alone(settings)
        # What T is held against is measured before and after it, so that drift of the machine meets both alike.
        load, compute = (
            [statistics.mean(pair) for pair in zip(*both, strict=True)] for both in zip(before, after, strict=True)
        )
        measured.append((seconds, *formula_seconds(load, compute)))
        loads.append(sum(load))
        computes.append(sum(compute))
        wrong += not good
        before = after
    prefill_s.append(world.seconds(lambda: world.prefill(ways.asked)))
    ratios = [(seconds - layer) / total for seconds, total, layer in measured]
    return LinkRow(
        share=share, rate_bytes_per_s=world.link.bucket.bytes_per_s, latency_s=world.latency_s, ratio=ratio,
        repeats=repeats, load_s=statistics.median(loads), compute_s=statistics.median(computes),
        ttft_s=statistics.median(each[0] for each in measured),
        formula_s=statistics.median(each[1] for each in measured),
        layer_s=statistics.median(each[2] for each in measured),
        prefill_s=min(prefill_s),
        ttft_vs_formula=statistics.median(ratios), ttft_vs_formula_each=ratios, verified=not wrong,
    )  # fmt: skip


def measure_curve(
    world: World,
    rows: Sequence[LinkRow],
    ratios: Sequence[float],
    *,
    form: str,
    repeats: int = 2,
    number: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> list[CurvePoint]:
    """TTFT over r at the rates of these rows; the best of the repeats."""
    ways = _Ways(world, world.blender(form), form, world.prompt(number))
    points = []
    for row in rows:
        world.throttle(row.rate_bytes_per_s)
        told(f"TTFT over r, {row.rate_bytes_per_s / 1e6:.0f} MB/s")
        for ratio in ratios:
            seconds = min(ways.blend(ratio)[0] for _ in range(repeats))
            points.append(CurvePoint(row.rate_bytes_per_s, ratio, seconds))
        world.throttle(None)
    return points
