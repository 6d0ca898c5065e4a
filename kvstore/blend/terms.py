"""What the parts of blending say to each other: settings, spans, and the KV of one layer."""

from __future__ import annotations

import itertools
import math
import numbers
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from .selection import Selector

__all__ = ["MEASURES", "SELECTIONS", "BlendSettings", "LayerKV", "Span"]

MEASURES = ("k", "v", "kv")
SELECTIONS = ("deviation", "first", "query", "random")

_GRADUAL = 1 / 3  # by how much the first check layer keeps more than the last, if only the last one's ratio is given


class Span(NamedTuple):
    """Positions of a prompt whose KV comes from storage; everything outside all spans is computed.

    Attributes:
        begin, end: token positions in the prompt.
        exact: the KV is what a full prefill would compute (all before it in the prompt is what it was encoded behind),
            so none of it is computed again.
    """

    begin: int
    end: int
    exact: bool = False


class LayerKV(NamedTuple):
    """The stored KV of one layer for the tokens of all spans, in order.

    Attributes:
        k: K, embedded at its position in this prompt; `[tokens of all spans, kv_heads, head_dim]`, the model's dtype.
        v: V, of the same shape.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class BlendSettings:
    """Which tokens of stored chunks are computed again.

    Attributes:
        check_layers: layers (counted from 0, rising) at which tokens are chosen. All layers before the first one are
            computed in full; layer 0 is never one, since K and V there depend on nothing but the token.
        ratios: share of the tokens of all spans that is kept at each check layer, falling (arXiv 2405.16444 §4.3); or
            only the last layer's, and earlier ones keep up to a third more. 0: plain reuse, 1: full prefill.
        measure: whose deviation counts, "k", "v" or "kv". "v" by measurement (docs/blending.md).
        selection: one of `SELECTIONS`, or a `Selector`.
        seed: of the selection "random".

    Raises:
        ConfigError: names the option (`blend_check_layers`, `blend_recompute_ratios`, …) and the choices.
    """

    check_layers: Sequence[int] = (1,)
    ratios: Sequence[float] = (0.15,)
    measure: str = "v"
    selection: str | Selector = "deviation"
    seed: int = 0

    def __post_init__(self) -> None:
        layers = _numbers("blend_check_layers", self.check_layers, int)
        if layers[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(layers)):
            raise ConfigError(
                f"blend_check_layers={reprlib.repr(list(layers))} must be rising numbers of layers from 1 on (in layer "
                "0 nothing deviates)"
            )
        ratios = tuple(float(ratio) for ratio in _numbers("blend_recompute_ratios", self.ratios, (int, float)))
        if len(ratios) not in (1, len(layers)):
            raise ConfigError(
                f"blend_recompute_ratios has {len(ratios)} ratios for {len(layers)} check layers; give one for each, "
                "or one for the last"
            )
        if not all(0 <= ratio <= 1 for ratio in ratios):
            raise ConfigError(f"blend_recompute_ratios={reprlib.repr(list(ratios))} must lie between 0 and 1")
        if any(later > earlier for earlier, later in itertools.pairwise(ratios)):
            raise ConfigError(
                f"blend_recompute_ratios={reprlib.repr(list(ratios))} must not rise: only what was kept can be kept on"
            )
        if len(ratios) == 1:
            steps = len(layers) - 1
            ratios = tuple(
                min(1.0, ratios[0] * (1 + _GRADUAL * (steps - index) / steps)) if steps else ratios[0]
                for index in range(len(layers))
            )
        if self.measure not in MEASURES:
            raise ConfigError(f"blend_measure={self.measure!r} is not known; use {', '.join(MEASURES)}")
        if isinstance(self.selection, str):
            if self.selection not in SELECTIONS:
                raise ConfigError(f"blend_selection={self.selection!r} is not known; use {', '.join(SELECTIONS)}")
        elif not callable(getattr(self.selection, "scores", None)):
            raise ConfigError(f"blend_selection={reprlib.repr(self.selection)} has no method scores(evidence)")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"blend_seed={reprlib.repr(self.seed)} must be an integer from 0 on, below 2**63")
        object.__setattr__(self, "check_layers", layers)
        object.__setattr__(self, "ratios", ratios)

    @property
    def ratio(self) -> float:
        """The share that is computed through the last layers."""
        return self.ratios[-1]

    def at(self, ratio: float) -> BlendSettings:
        """The same with another ratio, earlier check layers in proportion (at most 1)."""
        given: Any = ratio
        if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 <= ratio <= 1:
            raise ConfigError(f"blend_recompute_ratios={ratio!r} must lie between 0 and 1")
        ratio = float(given)
        if self.ratio == 0 or ratio in (0, 1):
            return replace(self, ratios=(ratio,) * len(self.check_layers))
        # Equal ratios must not come apart by rounding.
        earlier = [max(ratio, min(1.0, each * (ratio / self.ratio))) for each in self.ratios[:-1]]
        return replace(self, ratios=(*earlier, ratio))


def _numbers(option: str, values: Any, kind: Any) -> tuple[Any, ...]:
    shown = f"{option}={reprlib.repr(values)}"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise ConfigError(f"{shown} must be a list of at least one number")
    if not all(isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) for value in values):
        raise ConfigError(f"{shown} must be a list of {'integers' if kind is int else 'numbers'}")
    return tuple(values)
