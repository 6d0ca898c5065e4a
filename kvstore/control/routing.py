"""`choose`: where a prompt should go, a pure function of who has what and who has how much to do.

The cost of a candidate is the time to the first token there, counted in tokens of prefill:

    cost = queued + tokens - Σ worth[tier] · hit tokens in tier

`queued` are the tokens that wait to be prefilled at the candidate; the caller knows them best (a proxy counts what it
has sent), otherwise the load of the node stands in, as that part of `busy_tokens`. `worth` is the part of a token's
prefill that a hit saves: loading is not free, and dearer from slower tiers. So a long hit wins over a short queue until
the queue costs more than the hit saves, and without hits this is least-loaded routing.

Equal candidates are told apart by rendezvous hashing over the first chunk (`kvstore.placement`): prompts that begin
alike go to one place from the very first on, before anybody has reported anything, whichever router asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.placement import Placement

from .messages import Place, Route, Score

__all__ = ["RoutePolicy", "choose"]


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """How hits and load are weighed.

    Attributes:
        worth: part of a token's prefill that a hit saves, by tier, 0 to 1. 1 less the time to load a token over the
        time
            to prefill it: `kvstore-bench layers` and `io` measure the two.
        other: of tiers that `worth` does not name.
        load_weight: what a waiting token counts; 0: only hits count.
        busy_tokens: tokens that wait at a node whose load is 1, where nobody says how many.

    Raises:
        ConfigError: a value out of range.
    """

    worth: Mapping[str, float] = field(default_factory=lambda: {"memory": 0.95, "disk": 0.85, "remote": 0.7})
    other: float = 0.7
    load_weight: float = 1.0
    busy_tokens: float = 16384.0

    def __post_init__(self) -> None:
        for tier, worth in (*self.worth.items(), ("other", self.other)):
            if not 0 <= worth <= 1:
                raise ConfigError(f"the worth of tier {tier!r} is {worth:g}; it must be 0 to 1")
        if not (self.load_weight >= 0 and self.busy_tokens >= 0):
            raise ConfigError(f"load_weight={self.load_weight:g} and busy_tokens={self.busy_tokens:g} must be ≥ 0")


def choose(
    policy: RoutePolicy, candidates: Sequence[str], *, queued: Mapping[str, float], places: Sequence[Place],
    first: Key | None, tokens: int, strangers: Collection[str] = (),
) -> Route:  # fmt: skip
    """The candidate with the least cost.

    Args:
        candidates: names, at least one, all different.
        queued: tokens that wait at each candidate.
        places: who has what of the prompt.
        first: key of the prompt's first chunk; None: it is shorter than a chunk.
        tokens: of the prompt.
        strangers: candidates that do not report.

    Raises:
        ConfigError: no candidates.
    """
    if not candidates:
        raise ConfigError("nobody to route to: no instance is ready, or the list of candidates is empty")
    hits = {place.instance: place for place in places}
    costs: dict[str, float] = {}
    for name in candidates:
        place = hits.get(name)
        saved = 0.0
        if place is not None:
            saved = sum(policy.worth.get(tier, policy.other) * part for tier, part in place.tiers.items())
        costs[name] = policy.load_weight * queued[name] + tokens - saved
    least = min(costs.values())
    tied = sorted(name for name in candidates if costs[name] == least)
    best = tied[0] if first is None or len(tied) == 1 else tied[Placement(tied).order(first)[0]]
    ranked = sorted(candidates, key=lambda name: (name != best, costs[name], name))
    scores = [
        Score(name, hits[name].hit_tokens if name in hits else 0, queued[name], costs[name], name not in strangers)
        for name in ranked
    ]
    return Route(best, scores[0].hit_tokens, tokens, scores)
