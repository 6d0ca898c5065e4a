"""Streaming within an SLO: what is loaded at which level, what is computed from text, decided from measured speeds.

    streamer = Streamer(store, prefill=PrefillModel.fit(samples))        # one per link, shared by all requests
    with streamer.stream(chunks, recompute=compute, slo_s=0.5, new_tokens=64) as stream:
        for group in stream:
            ...                                                          # copy group.views into the cache

`planner` decides (pure functions over `terms`; `blending` has its rule for chunks out of place), `estimates` measures,
`course` follows one request, `streamer` and `stream` do it over a store, `admission` says what is not worth storing.
docs/streaming.md and docs/blending.md tell more.
"""

from __future__ import annotations

from .admission import Admission, Verdict, break_even_bytes_per_s, break_even_tokens, load_is_faster
from .blending import TierOffer, blend_ratio, cheapest_tier
from .course import Report
from .estimates import LinkShare, PrefillModel, PrefillSample
from .planner import plan
from .streamer import Chunk, ReadyGroup, Stream, Streamer, TextPart
from .terms import COMPUTED, Group, Plan, Policy, Speeds, Standing, Step

__all__ = [
    "COMPUTED",
    "Admission",
    "Chunk",
    "Group",
    "LinkShare",
    "Plan",
    "Policy",
    "PrefillModel",
    "PrefillSample",
    "ReadyGroup",
    "Report",
    "Speeds",
    "Standing",
    "Step",
    "Stream",
    "Streamer",
    "TextPart",
    "TierOffer",
    "Verdict",
    "blend_ratio",
    "break_even_bytes_per_s",
    "break_even_tokens",
    "cheapest_tier",
    "load_is_faster",
    "plan",
]
