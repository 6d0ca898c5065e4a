"""The load controller: which stored chunks are loaded, and what share of them is computed again, by the one planner.

What is stored is a group to `kvstore.stream.plan` (out of place: with a `repair`), what is not is one that can only be
computed, and so is the question: it is computed layer by layer with all others, beside the loading. So the choice
between loading, level, recompute and blend is made in one, from the measured link and the measured prefill; see
`kvstore.stream.blending` for the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.stream import COMPUTED, Group, Policy, Speeds, Standing, plan

__all__ = ["BLEND_POLICY", "Decision", "Stored", "decide"]

BLEND_POLICY = Policy(text="time", pointers=False)
"""CacheBlend's rule: all that is stored is blended, unless computing everything is faster. `pointers=True` also
computes chunks from the front in full while the others are loaded, if that is ready sooner."""


class Stored(NamedTuple):
    """A chunk that could be loaded.

    Attributes:
        begin, end: positions in the prompt.
        sizes: stored bytes up to each level, as `Group.sizes`.
        lossless: the finest is exact.
        exact: it stands where it was computed, behind the same tokens: nothing of it needs to be computed again.
    """

    begin: int
    end: int
    sizes: tuple[int, ...]
    lossless: bool = True
    exact: bool = False


class Decision(NamedTuple):
    """What is done.

    Attributes:
        load: numbers of the chunks that are loaded; the others are computed.
        ratio: share of the tokens of loaded chunks that is computed again. Exact chunks count, but need no repair: the
            others get all of it. 1: whatever is not exact is computed.
        level: highest level that is loaded; None: the store's `codec_level`.
        seconds: expected until the first token, from now; inf: not known.
        meets: that is within the SLO, as far as it is known.
    """

    load: tuple[int, ...]
    ratio: float
    level: int | None = None
    seconds: float = math.inf
    meets: bool = True


def decide(
    chunks: Sequence[Stored],
    question: int,
    tokens: int,
    speeds: Speeds,
    *,
    r_min: float,
    remaining_s: float = math.inf,
    policy: Policy = BLEND_POLICY,
) -> Decision:
    """Decide for one prompt.

    Args:
        chunks: what is stored, in the order of the prompt, none overlapping.
        question: position from which on everything is computed in any case.
        tokens: of the whole prompt.
        speeds: of the link and of the prefill. Without the one or the other everything is loaded, at `r_min`.
        r_min: the least share that is computed again.
        remaining_s: what is left of an SLO; inf: there is none.

    Raises:
        ConfigError: chunks that overlap or lie behind the question, no question, or an `r_min` that is no share.
    """
    if not 0 <= r_min <= 1:
        raise ConfigError(f"r_min={r_min} must lie between 0 and 1")
    if not 0 <= question < tokens:
        raise ConfigError(f"a prompt of {tokens} tokens has no question at {question}")
    lengths = [chunk.end - chunk.begin for chunk in chunks]
    moved = sum(length for chunk, length in zip(chunks, lengths, strict=True) if not chunk.exact)
    repair = min(1.0, r_min * sum(lengths) / moved) if moved else 0.0  # of the chunks that are out of place
    groups: list[Group] = []
    standing: list[Standing] = []
    which: dict[int, int] = {}  # group → chunk
    at = 0
    for number, chunk in enumerate(chunks):
        if not at <= chunk.begin < chunk.end <= question:
            raise ConfigError(
                f"a chunk from {chunk.begin} to {chunk.end} overlaps another or the question at {question}"
            )
        if chunk.begin > at:
            groups.append(Group(at, chunk.begin - at, (0,), lossless=True))
            standing.append(Standing(loadable=False))
        which[len(groups)] = number
        share = None if chunk.exact else repair
        groups.append(Group(chunk.begin, lengths[number], chunk.sizes, chunk.lossless, share))
        standing.append(Standing())
        at = chunk.end
    if at < tokens:
        groups.append(Group(at, tokens - at, (0,), lossless=True))
        standing.append(Standing(loadable=False))
    everything = tuple(range(len(chunks)))
    if not chunks or speeds.prefill is None or speeds.bytes_per_s is None:
        return Decision(everything, r_min)
    # All chunks come with one request per layer group, not with one each.
    spread = Speeds(speeds.bytes_per_s, speeds.latency_s / len(chunks), speeds.decode_s_per_token, speeds.prefill)
    made = plan(groups, standing, spread, remaining_s=remaining_s, policy=policy, layered=True)
    load = tuple(which[group] for group, level in enumerate(made.levels) if group in which and level != COMPUTED)
    if not load:
        return Decision((), 1.0, None, made.seconds, made.meets)
    # All are loaded up to one level, so that of the coarsest; a chunk that has no finer one does not count.
    coarse = [made.levels[g] for g, number in which.items() if number in load and made.levels[g] < groups[g].finest]
    again = made.repair * sum(lengths[number] for number in load if not chunks[number].exact)
    ratio = 1.0 if made.repair >= 1 else again / sum(lengths[number] for number in load)
    return Decision(load, max(r_min, ratio), min(coarse, default=None), made.seconds, made.meets)
