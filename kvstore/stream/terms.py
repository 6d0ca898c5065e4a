"""What the planner is told and what it says: groups and how they stand, speeds, the policy; steps and the plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.errors import ConfigError

from .estimates import PrefillModel

__all__ = ["ABSENT", "COMPUTED", "Group", "Plan", "Policy", "Speeds", "Standing", "Step"]

COMPUTED = -2
"""In `Plan.levels`: the group is computed, not loaded."""
ABSENT = -1
"""A level: nothing is there."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive chunks that are streamed together.

    Attributes:
        begin: position of the first token.
        tokens: how many.
        sizes: bytes that bring level 0, levels 0..1, 0..2 and so on; rising.
        lossless: whether the finest level is exact.
        repair: least share of its tokens that has to be computed again once it was loaded, since it was stored for
            another place (`kvstore.blend`); None: it was stored for this place. Counts until the group is there.

    Raises:
        ConfigError: no tokens, no levels, sizes that fall, or a share that is none.
    """

    begin: int
    tokens: int
    sizes: tuple[int, ...]
    lossless: bool = False
    repair: float | None = None

    def __post_init__(self) -> None:
        rising = all(low <= high for low, high in itertools.pairwise(self.sizes))
        if self.begin < 0 or self.tokens < 1 or not self.sizes or self.sizes[0] < 0 or not rising:
            raise ConfigError(f"a group of {self.tokens} tokens from {self.begin} with sizes {self.sizes} is none")
        if self.repair is not None and not 0 <= self.repair <= 1:
            raise ConfigError(f"repair={self.repair} of a group must lie between 0 and 1")

    @property
    def finest(self) -> int:
        return len(self.sizes) - 1

    def bytes_between(self, level: int, target: int) -> int:
        """Bytes that bring it from one level (`ABSENT`: nothing) to a finer one."""
        return self.sizes[target] - (self.sizes[level] if level >= 0 else 0)


@dataclass(slots=True)
class Standing:
    """Where a group stands.

    Attributes:
        level: what is decoded; -1: nothing.
        computed: it was computed from text.
        loadable: False: its record is missing or failed, so it can only be computed.
        target: the level that is on its way; None: nothing is.
        left: bytes of that which have not come yet.
        computing_s: seconds that its computation, under way, still takes; None: it is not under way.
    """

    level: int = ABSENT
    computed: bool = False
    loadable: bool = True
    target: int | None = None
    left: int = 0
    computing_s: float | None = None

    @property
    def there(self) -> bool:
        return self.computed or self.level >= 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is known of the machine and the link now.

    Attributes:
        bytes_per_s: this request's share of the link; None: nothing was measured and nothing is known; 0: it is down.
        latency_s: seconds that a request waits before its first byte.
        decode_s_per_token: seconds to decode one token's KV of each level, that level's share alone. Missing levels
            cost as much as the last one given; empty: nothing.
        prefill: seconds to compute tokens; None: text cannot be computed here.
    """

    bytes_per_s: float | None
    latency_s: float = 0.0
    decode_s_per_token: Sequence[float] = ()
    prefill: PrefillModel | None = None

    def load_s(self, nbytes: float) -> float:
        """Seconds that one request for so many bytes takes."""
        if nbytes <= 0:
            return self.latency_s
        if not self.bytes_per_s:
            return math.inf
        return self.latency_s + nbytes / self.bytes_per_s

    def decode_s(self, group: Group, level: int, target: int) -> float:
        """Seconds to decode a group from one level to a finer one."""
        costs = self.decode_s_per_token
        if not costs:
            return 0.0
        last = len(costs) - 1
        return group.tokens * sum(costs[min(each, last)] for each in range(level + 1, target + 1))


@dataclass(frozen=True, slots=True)
class Policy:
    """How the planner weighs things.

    Attributes:
        text: "quality": text is computed wherever the SLO has room for it, since it is exact (CacheGen's rule).
            "time": only where that is faster than loading the finest level. "never": only what cannot be loaded.
            Without an SLO, with lossless levels or with a `max_level`, "quality" is "time".
        pointers: the front may be computed while the back is loaded; False: all by one of the two.
        commit: share of its speed that the link is trusted to keep until all groups are there. 1: at once at the
            best level that fits (and at the medium one as long as nothing is known of the link).
        safety: share of the measured speeds, of the link and of computing, that is planned with.
        margin: share of the SLO that is kept free at its end. Used by `Course`; the planner is told what remains.
        min_level, max_level: no coarser and no finer level is used (None: the finest there is).

    Raises:
        ConfigError: a share outside (0, 1], an unknown `text`, or levels that leave none.
    """

    text: str = "quality"
    pointers: bool = True
    commit: float = 0.1
    safety: float = 0.9
    margin: float = 0.05
    min_level: int = 0
    max_level: int | None = None

    def __post_init__(self) -> None:
        if self.text not in ("quality", "time", "never"):
            raise ConfigError(f"text={self.text!r} is not known; use 'quality', 'time' or 'never'")
        for name in ("commit", "safety"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin} must be at least 0 and below 1")
        if self.min_level < 0 or (self.max_level is not None and self.max_level < self.min_level):
            raise ConfigError(f"no level is between min_level={self.min_level} and max_level={self.max_level}")

    def floor(self, group: Group) -> int:
        """The coarsest level of a group that may be used: `min_level`, or its finest if it has no such level."""
        return min(self.min_level, group.finest)

    def ceiling(self, group: Group) -> int:
        """The finest one."""
        return group.finest if self.max_level is None else min(self.max_level, group.finest)

    def capped(self, most: int | None) -> Policy:
        """The same with `most` (the option `codec_level`) as `max_level`, if it has none."""
        if self.max_level is not None or most is None:
            return self
        return replace(self, max_level=max(most, self.min_level))


class Step(NamedTuple):
    """One transfer: bring a group to a level."""

    group: int
    level: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next, and what comes of it if all goes as estimated.

    Attributes:
        load: transfers in order; the first is to be begun when the link is free.
        compute: groups to compute, in order; the first may be begun when all groups before it are there.
        levels: of each group in the end: a level, `COMPUTED`, or -1: it will not be there (nothing can bring it).
        seconds: from now until the first token could be computed, new tokens included; inf: never. Unknown speed of the
            link counts as none.
        meets: that is within the SLO.
        abandon: groups whose transfer is under way, but which are better computed when their turn comes.
        repair: share of the tokens of all loaded groups with a `Group.repair` that can be computed again without being
            ready later (`blending.blend_ratio`), at least their own; 0: there are none.
    """

    load: tuple[Step, ...] = ()
    compute: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    seconds: float = 0.0
    meets: bool = True
    abandon: tuple[int, ...] = ()
    finest: int = field(default=0, repr=False)
    repair: float = 0.0

    @property
    def quality(self) -> tuple[int, ...]:
        """Ranks of all groups, worst first: a level, or one more than the finest for what is computed. Of two plans
        the one with the greater tuple is better: its coarsest group is finer, or fewer groups are that coarse."""
        return tuple(sorted(self.finest + 1 if level == COMPUTED else level for level in self.levels))
