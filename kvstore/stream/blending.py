"""Blending: how much of what is loaded is computed again, and from where it is worth loading. Pure functions.

Chunks that were stored for another place in a prompt are repaired by computing a share r of their tokens once more,
layer by layer, while the next layer is loaded (CacheBlend, arXiv 2405.16444, section 5). With T_load seconds to load
all layers and T_prefill seconds to compute all tokens, a layer takes max(T_load, r · T_prefill) / L: up to
r = T_load / T_prefill the repair costs nothing, and below r_min the text suffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import ConfigError

__all__ = ["TierOffer", "blend_ratio", "cheapest_tier"]


class TierOffer(NamedTuple):
    """A place where chunks could lie.

    Attributes:
        name: for the answer.
        bytes_per_s: speed at which they come from there.
        cost: of keeping a byte there; any unit, the same for all offers.
        latency_s: seconds that a request waits there.
    """

    name: str
    bytes_per_s: float
    cost: float
    latency_s: float = 0.0

    def load_s(self, nbytes: float) -> float:
        """Seconds to load so many bytes from there."""
        if nbytes <= 0:
            return self.latency_s
        return self.latency_s + nbytes / self.bytes_per_s if self.bytes_per_s > 0 else math.inf


def blend_ratio(load_s: float, prefill_s: float, r_min: float) -> float:
    """r = max(r_min, T_load / T_prefill), at most 1. At 1 loading is no faster than computing, and nothing should be
    loaded.

    Args:
        load_s: seconds to load the KV of the tokens in question; inf: never.
        prefill_s: seconds to compute them.
        r_min: the share that is computed again in any case, 0 to 1.

    Raises:
        ConfigError: negative times, or a share that is none.
    """
    if not load_s >= 0 or not prefill_s >= 0 or not 0 <= r_min <= 1:
        raise ConfigError(f"load_s={load_s}, prefill_s={prefill_s} and r_min={r_min} give no share to compute again")
    if load_s >= prefill_s:
        return 1.0
    return max(r_min, load_s / prefill_s)


def cheapest_tier(tiers: Sequence[TierOffer], nbytes: float, prefill_s: float, r_min: float) -> TierOffer | None:
    """The cheapest place whose loading hides behind computing the share `r_min` again: T_load <= r_min · T_prefill.

    Args:
        tiers: the offers; of equal costs the faster one is taken, of equals the first.
        nbytes: stored bytes of the chunks in question.
        prefill_s: seconds to compute their tokens.

    Returns:
        None: from none of them.

    Raises:
        ConfigError: as `blend_ratio`.
    """
    blend_ratio(0.0, prefill_s, r_min)
    hiding = [tier for tier in tiers if tier.load_s(nbytes) <= r_min * prefill_s]
    return min(hiding, key=lambda tier: (tier.cost, tier.load_s(nbytes)), default=None)
