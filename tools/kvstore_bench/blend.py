"""`kvstore-bench blend`: what reusing documents at any position costs in quality, and saves in time.

    kvstore-bench blend --html blend.html
    kvstore-bench blend --quick

In one run, with a real model on one thread: prompts of a system prompt and six documents of about 150 tokens, each with
a planted fact, and a question about one of them. Documents are stored once, in both forms, and every prompt is computed
in full, by plain reuse, and repaired by every selection, through the whole store; the question is then read over each
cache. Then the time to the first token over a throttled link against max(load, recompute) per layer, and the load
controller against brute force over a sweep of bandwidths.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.options import parse_duration

from .blend_report import BlendBenchReport, LinkRow, SchemeRow
from .models import model_folder
from .outputs import prepare_outputs, write_outputs
from .progress import Steps, progress_bar
from .report import Figure

if TYPE_CHECKING:
    from .blend_control import Choice
    from .blend_quality import Quality
    from .blend_world import World
    from .progress import Progress

__all__ = ["JUDGED", "Plan", "add_arguments", "figures_of", "run", "run_blend"]

JUDGED = 50
"""Prompts from which on means are held against their bars."""
_FORM = "shared_prefix"  # what a `Blender` does unless told otherwise
_R = "0.15"


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        prompts: blended by every scheme.
        curve_prompts: of these, at further ratios; and compared bit by bit at r = 0.
        documents: that prompts are made of, six each.
        all_schemes: False: plain reuse, random and deviation alone.
        shares: of the link, see `blend_speed.SHARES`; `repeats` of each.
        ratios: at which the time to the first token is measured.
        latency_s: of a request over the link.
    """

    prompts: int = JUDGED
    curve_prompts: int = 10
    documents: int = 48
    all_schemes: bool = True
    shares: tuple[float, ...] = (0.5, 1.0, 2.0)
    repeats: int = 5
    ratios: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3, 0.5, 0.75, 1.0)
    latency_s: float = 1e-3
    seed: int = 0

    @classmethod
    def quick(cls) -> Plan:
        """For a minute."""
        return cls(2, 1, 7, all_schemes=False, shares=(1.0,), repeats=2, ratios=(0.0, 0.15, 0.5))


def run_blend(folder: Path, plan: Plan, *, progress: Progress | None = None, command: str = "") -> BlendBenchReport:
    """Measure.

    Args:
        folder: of the model.

    Raises:
        ConfigError: a model that cannot be blended, or numbers that make no sense.
    """
    from kvstore import __version__

    from .blend_quality import CURVE, RATIO, SCHEMES, architectures, measure_quality
    from .blend_speed import measure_curve, measure_links
    from .blend_world import World
    from .machine import machine_facts

    if min(plan.prompts, plan.curve_prompts, plan.repeats) < 1 or plan.curve_prompts > plan.prompts:
        raise ConfigError(
            f"{plan.prompts} prompts, {plan.curve_prompts} of them for the curve, {plan.repeats} repeats make no sense"
        )
    report = BlendBenchReport("blend", version=__version__, command=command, machine=machine_facts())
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    begun = time.monotonic()
    told = Steps(progress, 2 + plan.prompts + 2 * len(plan.shares))
    schemes = [
        scheme
        for scheme in SCHEMES + CURVE
        if plan.all_schemes or (not scheme.curve and scheme.name in ("full reuse", "random", "deviation"))
        or (scheme.form == _FORM and scheme.ratio == 1)
    ]  # fmt: skip
    world = World(
        folder, documents=plan.documents, prompts=plan.prompts, seed=plan.seed, latency_s=plan.latency_s
    )  # fmt: skip
    try:
        quality = measure_quality(
            world, prompts=plan.prompts, curve_prompts=plan.curve_prompts, schemes=schemes, told=told
        )
        links = measure_links(world, form=_FORM, ratio=RATIO, shares=plan.shares, repeats=plan.repeats, told=told)
        report.curve = measure_curve(
            world, links, plan.ratios, form=_FORM, repeats=1 if plan.repeats < 3 else 2, told=told
        )
        report.schemes, report.links = quality.rows, links
        report.wrong = quality.wrong + quality.r0_unequal
        tiny = architectures()
        quality.r1_logits = max(quality.r1_logits, *tiny.values())
        report.choices, prefill = _controller(world, RATIO)
        report.figures = figures_of(quality, links, max(choice.steps for choice in report.choices))
        report.setting = {
            "model": f"{folder.name}, fp32, one thread; prefill {prefill:.0f} tokens/s",
            "prompts": f"{plan.prompts}, of {min(quality.tokens)} to {max(quality.tokens)} tokens, from "
            f"{plan.documents} documents, seed {plan.seed}",
            "recompute": f"measure {world.store.config.blend_measure}, checked at layer 1 (gradual: 1, 2, 4)",
        }
    finally:
        world.close()
    if plan.prompts < JUDGED:
        _do_not_judge(report, plan.prompts)
    report.seconds = time.monotonic() - begun
    return report


def _controller(world: World, r_min: float) -> tuple[list[Choice], float]:
    """The sweep for the first prompt, with the speed of this model; and that, tokens per second."""
    from kvstore.stream import PrefillModel, PrefillSample

    from .blend_control import ChunkCost, sweep

    asked = world.prompt(0)
    samples = [
        PrefillSample(0, tokens, world.compute_seconds(asked.ids[:, :tokens]))
        for tokens in (asked.tokens // 4, asked.tokens // 2, asked.tokens)
    ]
    model = PrefillModel.fit(samples)
    form = world.form(_FORM)
    chunks = [
        ChunkCost(each.begin, each.end, form.spec(each.tokens).raw_bytes, each.begin == each.stored_at)
        for each in world.placed(form, asked)
    ]
    choices = sweep(
        chunks, asked.tokens - asked.question, asked.tokens, world.blend_model.num_layers, model, r_min=r_min
    )
    return choices, asked.tokens / samples[-1].seconds


def figures_of(quality: Quality, links: Sequence[LinkRow], steps: float) -> dict[str, Figure]:
    """Every figure with its bar.

    Args:
        steps: of the controller's grid.
    """

    def value(number: float, better: str = "lower", bar: float | None = None, unit: str = "ratio") -> Figure:
        return Figure(float(f"{number:.5g}"), unit, better, bar)

    def row(name: str, form: str, ratio: float = 0.15) -> SchemeRow:
        return quality.row(name, form, ratio)

    from .blend_quality import LONG

    full = quality.rows[0]
    reuse, shared_reuse = row("full reuse", "alone", 0.0), row("full reuse", _FORM, 0.0)
    alone, shared = row("deviation", "alone"), row("deviation", _FORM)
    figures = {
        f"blend.kl_ratio.{_R}": value(alone.kl / reuse.kl, bar=0.5),
        f"blend.kl_ratio_shared_prefix.{_R}": value(shared.kl / reuse.kl, bar=0.35),
        f"blend.random_vs_deviation.{_R}": value(row("random", "alone").kl / alone.kl, "higher", 1.5),
        f"blend.prefill_compute.{_R}": value(max(alone.token_layers, shared.token_layers), bar=0.25),
    }
    if max(quality.tokens) >= LONG:
        figures[f"blend.prefill_cpu.{_R}"] = value(max(alone.cpu_ratio, shared.cpu_ratio), bar=0.35)
    figures |= {
        "blend.r1_logits": value(quality.r1_logits, bar=1e-4, unit="logits"),
        "blend.r0_unequal": value(quality.r0_unequal, bar=0, unit="caches"),
        "blend.ttft_vs_formula": value(max(link.ttft_vs_formula for link in links), bar=1.10),
        "blend.controller_vs_bruteforce": value(steps, bar=1, unit="steps"),
        "blend.kl_ratio_shared_prefix.0": value(shared_reuse.kl / reuse.kl),
        f"blend.random_vs_deviation_shared_prefix.{_R}": value(row("random", _FORM).kl / shared.kl, "higher"),
        f"blend.ttft_vs_prefill.{_R}": value(min(link.ttft_s / link.prefill_s for link in links)),
    }
    for name, each in (("full", full), ("reuse", reuse), ("blend", alone), ("blend_shared_prefix", shared)):
        figures[f"blend.answer_nll.{name}"] = value(each.nll, unit="nats")
        figures[f"blend.exact_match.{name}"] = value(each.exact, "higher", unit="share")
    return figures


def _do_not_judge(report: BlendBenchReport, prompts: int) -> None:
    """Means over few prompts have no bar; what holds for every single prompt keeps it."""
    for name, figure in report.figures.items():
        if figure.bar is not None and ("kl_ratio" in name or "random_vs" in name):
            report.figures[name] = replace(figure, bar=None)
            report.unjudged.append(name)
    report.notes.append(f"{prompts} prompts: KL is judged from {JUDGED} on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench blend`."""
    parser.add_argument(
        "--quick", action="store_true", help="two prompts, three schemes, one link: about a minute; KL is not judged"
    )
    parser.add_argument("--prompts", type=int, metavar="N", help=f"how many (default {JUDGED}; quick: 2)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each time over the link (default 5; quick: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of documents and prompts (default 0)")
    parser.add_argument("--latency", metavar="TIME", default="1ms", help="what each request waits (default 1ms)")
    parser.add_argument(
        "--model", metavar="FOLDER", help="a Llama, Qwen2 or Mistral with tokenizer (default: SmolLM2, made if missing)"
    )
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: everything blended came from the store, as stored; 1: not so."""
    prepare_outputs(args)
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be installed; install kvstore[transformers]")
    plan = Plan.quick() if args.quick else Plan()
    plan = replace(plan, seed=args.seed, latency_s=parse_duration(args.latency, name="--latency"))
    if args.prompts is not None:
        plan = replace(plan, prompts=args.prompts, curve_prompts=max(1, min(plan.curve_prompts, args.prompts)))
    if args.repeats is not None:
        plan = replace(plan, repeats=args.repeats)
    if plan.prompts < 1 or plan.repeats < 1:
        raise ConfigError("--prompts and --repeats must be at least 1")
    with progress_bar() as progress:
        report = run_blend(model_folder(args.model), plan, progress=progress, command=_command(args))
    return write_outputs(report, args)


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "blend", *(["--quick"] if args.quick else [])]
    for name, default in (("prompts", None), ("repeats", None), ("seed", 0), ("latency", "1ms"), ("model", None)):
        value = getattr(args, name)
        if value != default:
            words += [f"--{name}", str(value)]
    return " ".join(words)
