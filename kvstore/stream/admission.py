"""Break-even: when loading beats computing, and what would never pay and is not worth storing. Pure functions.

Loading n tokens takes latency + n·s/B seconds (s stored bytes per token, B bytes per second), computing them behind p
others a·n + b·n·(p + (n-1)/2) (see `PrefillModel`). Per token, computing grows with the position and loading does not:
late chunks of long prompts pay first, short prompts never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import ConfigError

from .estimates import PrefillModel

__all__ = ["Admission", "Verdict", "break_even_bytes_per_s", "break_even_tokens", "load_is_faster"]

_MOST_TOKENS = 1 << 40


def load_is_faster(
    prefill: PrefillModel, tokens: int, nbytes: float, bytes_per_s: float, *, latency_s: float = 0.0, begin: int = 0
) -> bool:
    """Whether loading `nbytes` takes less time than computing `tokens` tokens behind `begin` others. One or the other,
    not both at once: `plan` finds what is faster than either."""
    if not bytes_per_s > 0:
        return False
    return latency_s + nbytes / bytes_per_s < prefill.seconds(begin, tokens)


def break_even_bytes_per_s(
    prefill: PrefillModel, tokens: int, nbytes: float, *, latency_s: float = 0.0, begin: int = 0
) -> float:
    """The speed of the link above which loading is faster; inf: never, the latency alone takes longer."""
    left = prefill.seconds(begin, tokens) - latency_s
    return nbytes / left if left > 0 else math.inf


def break_even_tokens(
    prefill: PrefillModel, bytes_per_token: float, bytes_per_s: float, *, latency_s: float = 0.0
) -> int | None:
    """The length of a prompt from which loading all of it is always faster than computing it; None: no length up to
    2^40 is.

    What computing takes longer than loading is a parabola of the length that opens upwards: beyond its lowest point it
    changes its sign once, at most.
    """
    if not bytes_per_s > 0:
        return None

    def wins(tokens: int) -> bool:
        return load_is_faster(prefill, tokens, tokens * bytes_per_token, bytes_per_s, latency_s=latency_s)

    slower = bytes_per_token / bytes_per_s - prefill.a  # seconds per token that loading is slower at the beginning
    lowest = slower / prefill.b + 0.5 if prefill.b else (math.inf if slower > 0 else 1.0)
    low = max(1, math.floor(min(lowest, float(_MOST_TOKENS))))
    if wins(low) and wins(low + 1):
        return 1
    if not wins(_MOST_TOKENS):
        return None
    high = _MOST_TOKENS
    if wins(low):
        low += 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


class Verdict(NamedTuple):
    """Whether something is worth storing, and why not."""

    admit: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """What is worth storing for readers behind a link.

    Attributes:
        prefill: how long a reader takes to compute tokens.
        slowest_bytes_per_s: of the slowest link that a reader is likely to have (`LinkShare.slowest`).
        latency_s: what a reader's request waits.
        min_tokens: shorter prompts are not stored, whatever the link; 0: no such bound.

    Raises:
        ConfigError: negative values.
    """

    prefill: PrefillModel
    slowest_bytes_per_s: float
    latency_s: float = 0.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.slowest_bytes_per_s >= 0 or not self.latency_s >= 0 or self.min_tokens < 0:
            raise ConfigError("an admission with negative speed, latency or length makes no sense")

    def chunk(self, begin: int, tokens: int, nbytes: float, *, prompt_tokens: int | None = None) -> Verdict:
        """Whether one chunk of a prompt is worth storing.

        Args:
            begin: position of its first token.
            nbytes: stored bytes of the coarsest level that a reader may use; more levels do not make it slower.
            prompt_tokens: of the whole prompt; None: it ends with this chunk.
        """
        total = begin + tokens if prompt_tokens is None else prompt_tokens
        if total < self.min_tokens:
            return Verdict(False, f"the prompt has {total} tokens; under {self.min_tokens} nothing is stored")
        whole = self.prefill.seconds(0, total)
        if whole <= self.latency_s:
            return Verdict(False, f"computing all {total} tokens takes {whole:.3g} s, no longer than one request waits")
        compute = self.prefill.seconds(begin, tokens)
        load = nbytes / self.slowest_bytes_per_s if self.slowest_bytes_per_s else math.inf
        if load >= compute:
            return Verdict(False, f"loading takes {load:.3g} s on the slowest likely link, computing {compute:.3g} s")
        return Verdict(True)
