"""The load controller against brute force: over a sweep of bandwidths, which r it chooses, and which one costs nothing.

Brute force knows nothing of the controller's rule. It goes through a prompt layer by layer, for every r of a grid: a
layer takes max(loading its chunks, computing what is not stored and what r says of what is). The best r is the largest
one that is no slower than r_min; where computing everything is faster than even that, nothing is loaded, and r is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.stream import PrefillModel

__all__ = ["STEP", "Choice", "ChunkCost", "brute_force", "sweep"]

STEP = 0.05
"""Of the grid of r."""


@dataclass(frozen=True)
class ChunkCost:
    """A stored chunk: where it stands, its bytes, and whether it is exact there."""

    begin: int
    end: int
    nbytes: int
    exact: bool = False


@dataclass(frozen=True)
class Choice:
    """One bandwidth.

    Attributes:
        rate: bytes per second.
        chosen, best: r of the controller and of brute force; 1: everything is computed.
        steps: how many steps of the grid they are apart.
    """

    rate: float
    chosen: float
    best: float
    steps: float


def _seconds(
    chunks: Sequence[ChunkCost], tokens: int, layers: int, rate: float, prefill: PrefillModel, ratio: float | None
) -> float:
    """Of one prompt, layer by layer; `ratio` None: nothing is loaded."""
    whole = prefill.seconds(0, tokens)
    if ratio is None:
        return whole
    load_s = sum(chunk.nbytes for chunk in chunks) / layers / rate
    # A call's fixed costs come once, with what is computed anyway.
    stored = [prefill.seconds(chunk.begin, chunk.end - chunk.begin) - prefill.fixed_s for chunk in chunks]
    fresh_s = whole - sum(stored)
    # r is a share of all reused tokens, and exact ones need no repair: the others get all of it.
    moved = sum(chunk.end - chunk.begin for chunk in chunks if not chunk.exact)
    again = min(1.0, ratio * sum(chunk.end - chunk.begin for chunk in chunks) / moved) if moved else 0.0
    again_s = sum(again * cost for chunk, cost in zip(chunks, stored, strict=True) if not chunk.exact)
    total = 0.0
    for _ in range(layers):
        total += max(load_s, (fresh_s + again_s) / layers)
    return total


def brute_force(
    chunks: Sequence[ChunkCost],
    tokens: int,
    layers: int,
    rate: float,
    prefill: PrefillModel,
    *,
    r_min: float,
    step: float = STEP,
) -> float:
    """The best r, of `r_min`, `r_min` + step, …, 1."""
    grid = [r_min + step * number for number in range(int((1 - r_min) / step + 1e-9) + 1)]
    costs = {ratio: _seconds(chunks, tokens, layers, rate, prefill, ratio) for ratio in grid}
    whole = _seconds(chunks, tokens, layers, rate, prefill, None)
    if whole < costs[r_min]:
        return 1.0
    return max(ratio for ratio, seconds in costs.items() if seconds <= costs[r_min] * (1 + 1e-9))


def sweep(
    chunks: Sequence[ChunkCost],
    question: int,
    tokens: int,
    layers: int,
    prefill: PrefillModel,
    *,
    r_min: float,
    points: int = 60,
    step: float = STEP,
) -> list[Choice]:
    """From a link that needs ten times as long as computing everything to one that needs a thousandth of it.

    Args:
        question: position from which on everything is computed.
    """
    from kvstore.blend import Stored, decide
    from kvstore.stream import Speeds

    nbytes = sum(chunk.nbytes for chunk in chunks)
    stored = [Stored(chunk.begin, chunk.end, (chunk.nbytes,), True, chunk.exact) for chunk in chunks]
    found = []
    for point in range(points):
        rate = nbytes / prefill.seconds(0, tokens) * 10 ** (-1 + 4 * point / (points - 1))
        made = decide(stored, question, tokens, Speeds(rate, 0.0, (), prefill), r_min=r_min)
        chosen = made.ratio if made.load else 1.0
        best = brute_force(chunks, tokens, layers, rate, prefill, r_min=r_min, step=step)
        found.append(Choice(rate, chosen, best, abs(chosen - best) / step))
    return found
