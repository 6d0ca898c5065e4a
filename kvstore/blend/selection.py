"""Which tokens of stored chunks are worth computing again.

A selector gives each candidate a score, and the best are kept; how many, and that everything outside the spans is
computed whatever the scores, is not up to it. What it may look at is an `Evidence`, each part made when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from kvstore.errors import ConfigError

from .terms import BlendSettings, Span

__all__ = ["Deviation", "Evidence", "FirstTokens", "QueryAttention", "RandomTokens", "Selector", "best", "selector"]


@dataclass
class Evidence:
    """What is known of the candidates at a check layer.

    Attributes:
        layer: its number.
        positions: of the candidates in the prompt, int64 `[candidates]`, rising.
        spans: the spans of the prompt.
        measure_deviation, measure_attention: make `deviation` and `attention`.
    """

    layer: int
    positions: torch.Tensor
    spans: Sequence[Span]
    measure_deviation: Callable[[], torch.Tensor]
    measure_attention: Callable[[], torch.Tensor]

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Squared distance of stored and fresh KV in this layer, by the settings' measure; fp32 `[candidates]`."""
        return self.measure_deviation()

    @cached_property
    def attention(self) -> torch.Tensor:
        """Attention that the tokens after the last span give each candidate in this layer, summed over these tokens
        and all heads, fp32 `[candidates]`."""
        return self.measure_attention()

    @cached_property
    def offsets(self) -> torch.Tensor:
        """How many tokens of its span lie before each candidate, int64 `[candidates]`."""
        begins = torch.tensor([span.begin for span in self.spans], device=self.positions.device)
        return self.positions - begins[torch.searchsorted(begins, self.positions, right=True) - 1]


class Selector(Protocol):
    """Anything with this method can be `BlendSettings.selection`.

    With an attribute `compares = False` it says that it never looks at `Evidence.deviation`, so that the stored KV of
    the first check layer need not be loaded.
    """

    def scores(self, evidence: Evidence) -> torch.Tensor:
        """`[candidates]` of any real dtype; the highest are kept, of equal ones the first in the prompt."""
        ...  # pragma: no cover


class Deviation:
    """Where stored KV differs most from fresh (CacheBlend, arXiv 2405.16444 §4.2)."""

    def scores(self, evidence: Evidence) -> torch.Tensor:
        return evidence.deviation


class FirstTokens:
    """The first tokens of each chunk, the same number of each (as EPIC, arXiv 2410.15332): chunks that were encoded
    alone have an attention sink there that does not belong into the prompt."""

    compares = False

    def scores(self, evidence: Evidence) -> torch.Tensor:
        return -evidence.offsets


class QueryAttention:
    """What the question attends to."""

    compares = False

    def scores(self, evidence: Evidence) -> torch.Tensor:
        return evidence.attention


class RandomTokens:
    """A control. The tokens kept at one check layer are drawn from those kept before."""

    compares = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def scores(self, evidence: Evidence) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        # One draw per position of the prompt, whatever the layer and the device.
        draws = torch.rand(evidence.spans[-1].end, generator=generator)
        return draws.to(evidence.positions.device)[evidence.positions]


def selector(settings: BlendSettings) -> Selector:
    """The one that settings name, or hold."""
    if settings.selection == "random":
        return RandomTokens(settings.seed)
    if isinstance(settings.selection, str):
        named: dict[str, type[Selector]] = {"deviation": Deviation, "first": FirstTokens, "query": QueryAttention}
        return named[settings.selection]()
    return settings.selection


def best(scores: torch.Tensor, count: int, candidates: int) -> torch.Tensor:
    """Indices of the `count` highest scores, rising, int64 `[count]`; of equal ones the first.

    Raises:
        ConfigError: a selector's scores are not numbers `[candidates]`, or some are nan.
    """
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (candidates,) or scores.is_complex():
        found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ConfigError(f"a selector must give scores of shape ({candidates},), not {found}")
    if scores.layout != torch.strided or scores.device.type == "meta" or bool(scores.isnan().any()):
        raise ConfigError(f"the scores of a selector are no numbers: {scores.layout}, {scores.device}, or some are nan")
    order = torch.sort(scores, descending=True, stable=True).indices  # topk breaks ties as it likes
    return order[:count].sort().values
