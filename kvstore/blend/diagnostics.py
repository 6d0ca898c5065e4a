"""What reuse breaks and recomputing repairs, as the paper measures it (arXiv 2405.16444 §3.3, §4.1, §4.3).

    diagnosis = diagnose(model, input_ids, spans, stored, BlendSettings(), ratios=(0.05, 0.15, 0.3))
    Path("blend.html").write_text(page(diagnosis))                # kvstore.blend.plot

Every figure is taken against a full prefill of the same prompt, which is computed once. `diagnose` is for looking at a
model, not for serving: it holds the KV of two prompts at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import ConfigError

from .model import BlendModel
from .recompute import Recompute
from .terms import MEASURES, BlendSettings, LayerKV, Span

__all__ = [
    "Diagnosis",
    "Run",
    "attention_deviation",
    "attention_matrices",
    "diagnose",
    "kl_divergence",
    "kv_deviation",
    "rank_correlation",
    "token_deviation",
]

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, `[1, kv_heads, tokens, head_dim]`, as `Recompute.kv` has them."""


@dataclass(frozen=True)
class Run:
    """One ratio, against a full prefill.

    Attributes:
        ratio: share of the stored tokens that was computed again.
        kv_deviation: per layer, ‖KV − KV_full‖ / ‖KV_full‖.
        attention_deviation: per layer, ‖A − A_full‖₂ of the attention of the tokens behind the last span.
        kl: mean Kullback-Leibler divergence of their next-token distributions from the full prefill's, nats.
        token_layers: share of tokens × layers that was computed.
    """

    ratio: float
    kv_deviation: tuple[float, ...]
    attention_deviation: tuple[float, ...]
    kl: float
    token_layers: float


@dataclass(frozen=True)
class Diagnosis:
    """Of one prompt.

    Attributes:
        model: its name.
        tokens: of the prompt.
        settings: of the runs, but for their ratios.
        runs: by rising ratio; the first is plain reuse.
        positions: of the tokens that could be computed again, int64 `[n]`, on the CPU.
        deviation: of plain reuse, of these tokens in each layer, fp32 `[layers, n]`; see `token_deviation`.
        correlation: Spearman's between the deviations of any two layers, fp32 `[layers, layers]`; nan where a layer
            has no deviation to rank.
    """

    model: str
    tokens: int
    settings: BlendSettings
    runs: tuple[Run, ...]
    positions: torch.Tensor = field(repr=False)
    deviation: torch.Tensor = field(repr=False)
    correlation: torch.Tensor = field(repr=False)

    @property
    def neighbours(self) -> tuple[float, ...]:
        """Rank correlation of each layer from 1 on with the next: whether who deviates here deviates there."""
        return tuple(self.correlation.diagonal(1)[1:].tolist())


def token_deviation(kv: Layers, full: Layers, measure: str = "kv") -> torch.Tensor:
    """How far each token's KV is from a full prefill's, in units of the layer's root mean square over tokens, so that
    K and V, and layers, can be compared.

    Args:
        kv, full: of the same prompt.
        measure: "k", "v", or "kv": the square root of the sum of both squares.

    Returns:
        fp32 `[layers, tokens]`, on the CPU.

    Raises:
        ConfigError: they do not match, or the measure is not known.
    """
    if measure not in MEASURES:
        raise ConfigError(f"measure={measure!r} is not known; use {', '.join(MEASURES)}")
    rows = []
    for mine, theirs in _pairs(kv, full):
        total: Any = 0
        for name, one, other in zip("kv", mine, theirs, strict=True):
            if name in measure:
                unit = other.float().square().sum((0, 1, 3)).mean()
                total = total + (one.float() - other.float()).square().sum((0, 1, 3)) / unit
        rows.append(total.sqrt().cpu())
    return torch.stack(rows)


def kv_deviation(kv: Layers, full: Layers) -> tuple[float, ...]:
    """Per layer, ‖KV − KV_full‖ / ‖KV_full‖ with K and V each in units of its own size (root mean square of the two).

    Raises:
        ConfigError: they are not of the same prompt and model.
    """
    return tuple((token_deviation(kv, full).square().mean(1) / 2).sqrt().tolist())


@torch.no_grad()
def attention_matrices(model: BlendModel, input_ids: Any, kv: Layers, rows: int) -> Iterator[torch.Tensor]:
    """How the last tokens of a prompt attend over a finished cache of it, layer by layer.

    Args:
        input_ids: of the prompt, `[tokens]`.
        kv: of the whole prompt.
        rows: how many of the last tokens.

    Yields:
        Per layer, fp32 `[heads, rows, tokens]`, each row summing to 1 (the paper's forward attention matrix).
    """
    ids = torch.as_tensor(input_ids).to(model.device, torch.int64)
    positions = torch.arange(len(ids) - rows, len(ids), device=model.device)
    mask, rotations = model.mask(positions, len(ids)), model.rotations(positions)
    hidden = model.embed(ids[positions])
    for layer, (keys, values) in enumerate(kv):
        q = model.queries(layer, model.normed(layer, hidden), rotations)
        yield model.scores(layer, q, keys, mask)
        hidden = hidden + model.attend(layer, q, keys, values, mask)
        hidden = hidden + model.feed(layer, hidden)


def attention_deviation(model: BlendModel, input_ids: Any, kv: Layers, full: Layers, rows: int) -> tuple[float, ...]:
    """Per layer, ‖A − A_full‖₂ over all heads of the last `rows` tokens (square root of the sum of squares)."""
    pairs = zip(
        attention_matrices(model, input_ids, kv, rows), attention_matrices(model, input_ids, full, rows), strict=True
    )
    return tuple(float((mine - theirs).norm()) for mine, theirs in pairs)


def rank_correlation(deviation: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation between all layers; equal values share the mean of their ranks.

    Args:
        deviation: `[layers, tokens]`.

    Returns:
        fp32 `[layers, layers]`; nan for a layer whose values are all equal.
    """
    ranks = torch.stack([_ranks(row) for row in deviation])
    centred = ranks - ranks.mean(1, keepdim=True)
    sizes = centred.norm(dim=1)
    correlation: torch.Tensor = centred @ centred.T / (sizes[:, None] * sizes[None])
    return correlation.float()


def kl_divergence(logits: torch.Tensor, full: torch.Tensor) -> float:
    """Mean over rows of KL(full ‖ these), in nats; both `[rows, vocabulary]`."""
    theirs, mine = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((theirs.exp() * (theirs - mine)).sum(-1).mean())


def diagnose(
    model: BlendModel,
    input_ids: Any,
    spans: Sequence[Span],
    stored: Sequence[LayerKV],
    settings: BlendSettings,
    *,
    ratios: Sequence[float] = (0.05, 0.15, 0.3),
) -> Diagnosis:
    """Compute a prompt in full, by plain reuse, and blended at each ratio, and compare.

    Args:
        input_ids, spans, settings: as of a `Recompute`.
        stored: the KV of each layer.
        ratios: above 0; plain reuse is always among the runs.

    Raises:
        ConfigError: as `Recompute`; nothing is stored but what is exact; a layer is missing.
    """
    if len(stored) != model.num_layers:
        raise ConfigError(f"stored KV has {len(stored)} layers, {model.name} {model.num_layers}")
    if all(span.exact for span in spans):
        raise ConfigError("no span of this prompt could deviate: there is nothing to diagnose")
    ids = torch.as_tensor(input_ids)
    behind = max(1, len(ids) - spans[-1].end)
    truth, expected = _run(model, ids, (), stored, settings.at(1.0), behind)
    runs: list[Run] = []
    for ratio in sorted({0.0, *ratios}):
        run, logits = _run(model, ids, spans, stored, settings.at(ratio), behind)
        if ratio == 0:
            whole = token_deviation(run.kv, truth.kv, settings.measure)
        runs.append(
            Run(
                ratio,
                kv_deviation(run.kv, truth.kv),
                attention_deviation(model, ids, run.kv, truth.kv, behind),
                kl_divergence(logits, expected),
                run.token_layers,
            )
        )
    positions = torch.cat([torch.arange(span.begin, span.end) for span in spans if not span.exact])
    positions = positions[positions < len(ids) - 1]
    deviation = whole[:, positions]
    return Diagnosis(model.name, len(ids), settings, tuple(runs), positions, deviation, rank_correlation(deviation))


def _run(
    model: BlendModel,
    ids: torch.Tensor,
    spans: Sequence[Span],
    stored: Sequence[LayerKV],
    settings: BlendSettings,
    logits: int,
) -> tuple[Recompute, torch.Tensor]:
    run = Recompute(model, ids, spans, settings, logits=logits)
    for layer, kv in enumerate(stored):
        run.layer(kv if run.needs(layer) else None)
    return run, run.finish()[1]


def _pairs(
    kv: Layers, full: Layers
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    if len(kv) != len(full):
        raise ConfigError(f"one cache has {len(kv)} layers, the other {len(full)}")
    for number, (mine, theirs) in enumerate(zip(kv, full, strict=True)):
        for one, other in zip(mine, theirs, strict=True):
            if one.shape != other.shape:
                raise ConfigError(f"layer {number} has shapes {tuple(one.shape)} and {tuple(other.shape)}")
        yield mine, theirs


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """fp64 `[n]`, from 0; equal values get the mean of their ranks."""
    _, group, counts = torch.unique(values, sorted=True, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0)
    ranks: torch.Tensor = (ends - (counts + 1) / 2).double()
    return ranks[group]
