"""What answers lose when documents are reused out of place, and what repairing them costs: SmolLM2 on made prompts.

Each prompt is prefilled by the model itself, then blended by every scheme through the whole store. The question (and
the answer behind it) is then read over each cache, so what is judged is the cache that would be served. KL is against
the model's own prefill, the mean over the tokens of the question.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .blend_report import SchemeRow

if TYPE_CHECKING:
    from kvstore.blend import Blender

    from .blend_world import Asked, World

__all__ = ["CURVE", "FULL", "RATIO", "SCHEMES", "Quality", "Scheme", "architectures", "measure_quality"]

RATIO = 0.15
FULL = "full prefill"


@dataclass(frozen=True)
class Scheme:
    """One way to make the cache of a prompt.

    Attributes:
        curve: measured on fewer prompts, for the curve over r.
    """

    name: str
    form: str
    ratio: float
    selection: str = "deviation"
    check_layers: tuple[int, ...] = (1,)
    curve: bool = False


SCHEMES = tuple(
    scheme
    for form in ("alone", "shared_prefix")
    for scheme in (
        Scheme("full reuse", form, 0.0),
        Scheme("random", form, RATIO, "random"),
        Scheme("first", form, RATIO, "first"),
        Scheme("query", form, RATIO, "query"),
        Scheme("deviation", form, RATIO),
        Scheme("gradual", form, RATIO, check_layers=(1, 2, 4)),
    )
)
CURVE = tuple(
    Scheme("deviation", form, ratio, curve=True)
    for form in ("alone", "shared_prefix")
    for ratio in (0.05, 0.3, 0.5, 1.0)
)


LONG = 900
"""Tokens from which on CPU time is held against a bar; shorter prompts count only where none is as long."""


@dataclass
class _Score:
    """One prompt, one scheme."""

    kl: float
    kl_last: float
    nll: float
    exact: bool
    token_layers: float = 1.0
    cpu_ratio: float = 1.0
    tokens: int = 0


@dataclass
class Quality:
    """What was found.

    Attributes:
        rows: of all schemes, the full prefill first; then the curve.
        r1_logits: largest difference of any logit at r = 1 from the prefill's.
        r0_unequal: caches at r = 0 that were not, bit by bit, the documents' own KV, turned to their places.
        wrong: blended prompts of which something stored was not used.
        tokens: of each prompt.
    """

    rows: list[SchemeRow] = field(default_factory=list)
    r1_logits: float = 0.0
    r0_unequal: int = 0
    wrong: int = 0
    tokens: list[int] = field(default_factory=list)

    def row(self, name: str, form: str, ratio: float) -> SchemeRow:
        """The one of a scheme."""
        return next(each for each in self.rows if (each.scheme, each.form, each.ratio) == (name, form, ratio))


def measure_quality(
    world: World,
    *,
    prompts: int,
    curve_prompts: int,
    schemes: Sequence[Scheme] = SCHEMES + CURVE,
    told: Callable[[str], None] = lambda _: None,
) -> Quality:
    """Measure on the first prompts of the world; the curve on the first `curve_prompts` of these."""
    from kvstore.blend.selection import RandomTokens

    found = Quality()
    draws = RandomTokens(0)
    blenders: dict[tuple[object, ...], Blender] = {}
    for form in dict.fromkeys(scheme.form for scheme in schemes):
        told(f"storing documents, {form}")
        world.precompute(world.blender(form))
    for scheme in schemes:
        name = (scheme.form, scheme.selection, scheme.check_layers)
        if name not in blenders:
            selection = draws if scheme.selection == "random" else scheme.selection
            blenders[name] = world.blender(scheme.form, check_layers=scheme.check_layers, selection=selection)
    scores: dict[Scheme, list[_Score]] = {scheme: [] for scheme in schemes}
    plain: list[_Score] = []
    world.prefill(world.prompt(0))  # the first time torch does things that it does once
    for number in range(prompts):
        asked = world.prompt(number)
        told(f"prompt {number + 1}: {asked.tokens} tokens")
        draws.seed = number
        found.tokens.append(asked.tokens)
        began = time.process_time()
        cache, last = world.prefill(asked)
        full_cpu = time.process_time() - began
        truth = world.question_logits(cache, asked)
        plain.append(_score(truth, truth, asked))
        for scheme in schemes:
            if scheme.curve and number >= curve_prompts:
                continue
            blender = blenders[scheme.form, scheme.selection, scheme.check_layers]
            began = time.process_time()
            cache, report = blender.blend([*asked.parts[1:]], ratio=scheme.ratio)
            cpu = time.process_time() - began
            found.wrong += report.hits != len(asked.parts) - 1 or bool(report.lost or report.misses)
            if scheme.ratio == 0 and number < curve_prompts:
                found.r0_unequal += not _is_reuse(world, scheme.form, asked, cache)
            logits = world.question_logits(cache, asked)
            score = _score(logits, truth, asked)
            score.token_layers, score.cpu_ratio, score.tokens = report.token_layers, cpu / full_cpu, asked.tokens
            scores[scheme].append(score)
            found.wrong += not math.isfinite(score.kl)
            if scheme.ratio == 1:
                differences = (logits - truth).abs().max(), (report.logits - last).abs().max()
                found.r1_logits = max(found.r1_logits, *map(float, differences))
    found.rows.append(_row(Scheme(FULL, "", 1.0), plain, None))
    for curved in (False, True):
        for scheme in schemes:
            if scheme.curve is curved and scores[scheme]:
                base = scores.get(_REUSE, [])[: len(scores[scheme])]
                found.rows.append(_row(scheme, scores[scheme], [each.kl for each in base] or None))
    return found


_REUSE = Scheme("full reuse", "alone", 0.0)


def _score(logits: Any, truth: Any, asked: Asked) -> _Score:
    theirs, mine = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (theirs.exp() * (theirs - mine)).sum(-1)[: asked.question]
    behind = mine[asked.question - 1 :]
    nll = -behind.gather(1, asked.answer[:, None]).mean()
    exact = bool((behind.argmax(-1) == asked.answer).all())
    return _Score(float(kl.mean()), float(kl[-1]), float(nll), exact)


def _row(scheme: Scheme, scores: Sequence[_Score], base: Sequence[float] | None) -> SchemeRow:
    def both(values: list[float]) -> tuple[float, float]:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return statistics.fmean(values), error

    kl, kl_se = both([each.kl for each in scores])
    nll, nll_se = both([each.nll for each in scores])
    return SchemeRow(
        scheme=scheme.name, form=scheme.form, ratio=scheme.ratio, prompts=len(scores), kl=kl, kl_se=kl_se,
        kl_last=statistics.fmean(each.kl_last for each in scores),
        kl_vs_reuse=None if base is None else kl / statistics.fmean(base),
        nll=nll, nll_se=nll_se, exact=statistics.fmean(each.exact for each in scores),
        token_layers=statistics.fmean(each.token_layers for each in scores),
        cpu_ratio=statistics.median([s.cpu_ratio for s in scores if s.tokens >= LONG] or [s.cpu_ratio for s in scores]),
    )  # fmt: skip


def _is_reuse(world: World, form_name: str, asked: Asked, cache: Any) -> bool:
    """Whether the cache holds, bit by bit, each document's KV as the model computes it alone (or behind the prefix),
    with K turned to its place. What the store had no part in."""
    form = world.form(form_name)
    for begin, end in asked.documents:
        ids = asked.ids[0, begin:end].numpy()
        turn = form.moving(form.place(ids, begin))
        for (k, v), layer in zip(form.compute(ids), cache.layers, strict=True):
            if not world.torch.equal(
                turn(k[0].transpose(0, 1).contiguous()), layer.keys[0, :, begin:end].transpose(0, 1)
            ):
                return False
            if not world.torch.equal(v[0], layer.values[0, :, begin:end]):
                return False
    return True


def architectures() -> dict[str, float]:
    """Of a tiny random Llama, Qwen2 and Mistral: the largest difference of any logit of the question and of the next
    token at r = 1 from the model's own prefill."""
    import torch

    from kvstore.blend import Blender
    from kvstore.config import Config
    from kvstore.store import Store
    from kvstore.testing.models import tiny_model

    from .blend_world import MIN_TOKENS, REVISION, Asked, question_logits
    from .layers_link import LinkBackend

    generator = torch.Generator().manual_seed(0)
    found = {}
    for kind in ("llama", "qwen2", "mistral"):
        model = tiny_model(kind, num_hidden_layers=4)
        parts = [torch.randint(2, 1024, (count,), generator=generator) for count in (20, 60, 70, 80, 9, 2)]
        asked = Asked(parts[0], parts[1:4], parts[4], parts[5])
        config = Config(
            remote_url=("memory://tiny",), enable_blending=True, blend_min_tokens=MIN_TOKENS,  # type: ignore[arg-type]
            buffer_pool_bytes=64 << 20,
        )  # fmt: skip
        with Store(config, backends=[LinkBackend()]) as store:
            blender = Blender(model, store, prefix=parts[0], revision=REVISION)
            blender.precompute(parts[1:4])
            cache, report = blender.blend(parts[1:5], ratio=1.0)
            logits = question_logits(model, cache, asked, blender.cache_argument)
        ids = torch.cat([asked.ids[0], asked.answer[:-1]])[None]
        with torch.inference_mode():
            truth = model(ids).logits[0, asked.tokens - asked.question :]
        differences = (logits - truth).abs().max(), (report.logits - truth[asked.question - 1]).abs().max()
        found[kind] = max(map(float, differences))
    return found
