"""The planner: which stream groups are loaded, at which level, in which order, and which are computed from their text.
Pure functions and values; no I/O, no clock. What it is told is measured by `estimates` and carried out by `streamer`.

A prompt is a row of **groups** (of chunks). A group is *there* when its KV was loaded at some level or computed. Levels
are embedded: level l of a group is had by bringing the bytes of the levels before it and its own, at once or in steps.
The prompt is ready when all groups are there and the new tokens behind them are computed.

Three resources work side by side, each on one thing at a time: the link, the decoder (group i is decoded while i + 1
comes) and the prefill. Computing a group needs the KV of all groups before it; loading needs nothing. So the groups
that are computed are the first ones (the front), the link loads the others beginning at the back, and the two meet:
computing the front is the cheapest (attention grows with the position) and never waits, so no other choice of as many
groups is ready sooner. A partly computed prefix changes nothing for the groups behind it.

The rule (CacheGen, SIGCOMM'24, section 5.3, with some things added): quality first within the SLO, lossless before
finer before coarser; if nothing fits, the fastest, and the caller counts a violation.

* Text. As many groups from the front as can be computed within the SLO are computed; if that is all of them, no byte is
  loaded (CacheGen's "T_recompute(rest) <= remaining: text"). With `text="time"`, computing is no better than the finest
  level and is chosen only where it is faster.
* Levels, mixed. The best level at which all remaining groups still fit; what is left of the SLO refines as many groups
  as possible by one more. With embedded levels that is the plan whose coarsest group is best (`Plan.quality`).
* Blending. A group that was stored for another place in a prompt is loaded and repaired: a share of its tokens is
  computed again (`Group.repair`). Then everything is computed layer by layer beside the loading, so nothing waits for a
  hole, and the plan costs the longer of the link and all computing. Loaded at a level, computed from text, or loaded
  and repaired is decided in one by that. What the computation has left until the link is done repairs more
  (`Plan.repair`); `pointers=False` is CacheBlend's rule: all is blended, or, where loading is slower, all is computed.
* Order. No group is refined before all groups are there at a level that would fit even if the link kept only `commit`
  of its speed. So a link that breaks down in the middle costs quality, not the SLO.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from kvstore.errors import ConfigError

from .blending import blend_ratio
from .terms import ABSENT, COMPUTED, Group, Plan, Policy, Speeds, Standing, Step

__all__ = ["plan"]


def plan(
    groups: Sequence[Group],
    standing: Sequence[Standing],
    speeds: Speeds,
    *,
    remaining_s: float = math.inf,
    new_tokens: int = 0,
    policy: Policy | None = None,
    layered: bool = False,
) -> Plan:
    """Decide. About groups · log(groups) · levels operations, without state: called again whenever something has ended
    or is overdue.

    Args:
        groups: in order; each begins where the one before ends.
        standing: of each group.
        remaining_s: what is left of the SLO; may be negative; inf: no SLO, then as fast as possible at `max_level`.
        new_tokens: tokens behind the last group that have to be computed in any case.
        layered: everything is computed layer by layer beside the loading, in one call, so nothing waits for a hole. So
            it is wherever something is to be repaired.

    Raises:
        ConfigError: not one standing per group, groups that do not follow each other, a number that is none, or a
            group to repair where nothing can be computed.
    """
    if len(groups) != len(standing):
        raise ConfigError(f"{len(groups)} groups, but {len(standing)} standings")
    if any(one.begin + one.tokens != two.begin for one, two in itertools.pairwise(groups)):
        raise ConfigError("the groups of a plan must follow each other without holes")
    if math.isnan(remaining_s) or (speeds.bytes_per_s is not None and not speeds.bytes_per_s >= 0):
        raise ConfigError(f"remaining_s={remaining_s} or bytes_per_s={speeds.bytes_per_s} is not a sensible number")
    moved = (s for g, s in zip(groups, standing, strict=True) if g.repair is not None)
    if speeds.prefill is None and not all(s.there for s in moved):
        raise ConfigError("a group to repair needs a prefill model")
    return _Planner(groups, standing, speeds, remaining_s, new_tokens, policy or Policy(), layered).plan()


class _Planner:
    """One decision. `_pending` are the groups that are not there; the first `m` of them may be computed."""

    def __init__(
        self,
        groups: Sequence[Group],
        standing: Sequence[Standing],
        speeds: Speeds,
        remaining_s: float,
        new_tokens: int,
        policy: Policy,
        layered: bool,
    ) -> None:
        self._groups = groups
        self._standing = standing
        self._policy = policy
        self._unknown = speeds.bytes_per_s is None
        rate, share = speeds.bytes_per_s, policy.safety
        prefill = speeds.prefill.scaled(1 / share) if speeds.prefill is not None else None
        known = None if rate is None else rate * share
        self._speeds = Speeds(known, speeds.latency_s, speeds.decode_s_per_token, prefill)
        self._can_compute = prefill is not None
        reach = len(groups)
        if not self._can_compute:  # what lies behind a hole is of no use to anybody
            reach = next((i for i, s in enumerate(standing) if not s.there and not s.loadable), reach)
        self._reach = reach
        end = groups[reach - 1].begin + groups[reach - 1].tokens if reach else 0
        self._suffix_s = prefill.seconds(end, new_tokens) if prefill is not None and new_tokens > 0 else 0.0
        self._room_s = remaining_s - self._suffix_s
        self._busy = next((i for i in range(reach) if standing[i].computing_s is not None), None)
        self._pending = [i for i in range(reach) if not standing[i].there and i != self._busy]
        self._forced = [i for i in self._pending if not standing[i].loadable]
        self._hole = self._forced[-1] if self._forced else -1
        slo = remaining_s < math.inf
        exact = all(groups[i].lossless and groups[i].repair is None for i in range(reach))
        self._text_first = policy.text == "quality" and slo and not exact and policy.max_level is None
        self._top = max((policy.ceiling(groups[i]) for i in range(reach)), default=0)
        self._layered = layered or any(groups[i].repair is not None for i in self._pending)
        once = prefill.fixed_s if prefill is not None and self._layered else 0.0
        # What computing the first m pending groups takes, for each m.
        started = 0.0 if self._busy is None else standing[self._busy].computing_s or 0.0
        self._compute_s = [max(0.0, started)]
        for index in self._pending:
            cost = math.inf if prefill is None else prefill.seconds(groups[index].begin, groups[index].tokens) - once
            self._compute_s.append(self._compute_s[-1] + cost)
        # Layer by layer: what computing the others takes besides the first m, for each m, and what the call takes.
        self._besides_s = [0.0] * len(self._compute_s)
        if self._layered and prefill is not None:
            for m in reversed(range(len(self._pending))):
                share = (groups[self._pending[m]].repair or 0.0) if standing[self._pending[m]].loadable else 1.0
                self._besides_s[m] = self._besides_s[m + 1] + share * (self._compute_s[m + 1] - self._compute_s[m])
            self._besides_s = [each + once for each in self._besides_s]

    # The choice of m.

    def plan(self) -> Plan:
        if self._unknown and self._pending:
            return self._first_plan()
        if self._text_first:
            most = self._most_computed()
            if self._finish(most, self._floors(most)) <= self._room_s:
                return self._make(most, self._filled(most), meets=True)
        else:
            best, seconds = self._fastest(self._ceilings)
            if seconds <= self._room_s and (seconds < math.inf or self._room_s == math.inf):
                return self._make(best, self._ceilings(best), meets=seconds < math.inf)
            most = self._most_computed()
            if self._finish(most, self._floors(most)) <= self._room_s:
                return self._make(most, self._filled(most), meets=True)
        best, _ = self._fastest(self._floors)
        return self._make(best, self._floors(best), meets=False)

    def _choices(self) -> list[int]:
        """How many of the pending groups may be computed from the front."""
        count = len(self._pending)
        if not self._can_compute or self._policy.text == "never" or not count:
            return [0]
        return list(range(count + 1)) if self._policy.pointers else [0, count]

    def _most_computed(self) -> int:
        """The most groups whose computation fits into the SLO: the fewer are loaded, the finer they can be, and the
        sooner they are there. So if not even these fit at the coarsest level, nothing does."""
        choices = self._choices()
        return max((m for m in choices if self._computing_s(m) <= self._room_s), default=0)

    def _computing_s(self, m: int) -> float:
        """What is computed if the first m pending groups are, repairs included, but for what lies behind holes."""
        return self._compute_s[m] + self._besides_s[m]

    def _fastest(self, levels_of: Callable[[int], dict[int, int]]) -> tuple[int, float]:
        """The m that is ready soonest with such levels, the smallest of equals; and when.

        Computing more takes longer and loading fewer takes shorter, so the best lies where the two cross: only the two
        values around that are looked at (all of them if holes make some computations wait for loads).
        """
        choices = self._choices()
        if (self._layered or not self._forced) and len(choices) > 4:
            low, high = 0, len(choices) - 1  # the first m whose computation takes as long as loading the rest
            while low < high:
                middle = (low + high) // 2
                if self._computing_s(middle) >= self._finish(middle, levels_of(middle)):
                    high = middle
                else:
                    low = middle + 1
            choices = sorted({0, max(0, low - 1), low, len(choices) - 1})
        seconds = {m: self._finish(m, levels_of(m)) for m in choices}
        best = min(choices, key=lambda m: (seconds[m], m))
        return best, seconds[best]

    def _computed(self, m: int) -> list[int]:
        """The groups that are computed: the first m pending ones, and those that can only be computed."""
        return self._pending[:m] + [i for i in self._pending[m:] if not self._standing[i].loadable]

    def _floors(self, m: int) -> dict[int, int]:
        """Everything that is loaded as coarse as it may be."""
        return {
            i: max(self._policy.floor(self._groups[i]), self._coming(i))
            for i in self._pending[m:]
            if self._standing[i].loadable
        }

    def _ceilings(self, m: int) -> dict[int, int]:
        """Everything that is loaded or was loaded as fine as it may be."""
        levels = {i: self._policy.ceiling(self._groups[i]) for i in self._pending[m:] if self._standing[i].loadable}
        for index in range(self._reach):
            state = self._standing[index]
            if state.level >= 0 and not state.computed:
                levels[index] = self._policy.ceiling(self._groups[index]) if state.loadable else state.level
        return {i: max(level, self._coming(i)) for i, level in levels.items()}

    def _first_plan(self) -> Plan:
        """Nothing is known of the link. The text that fits is computed in any case, if text comes first; else only what
        must be. With levels to be added later the coarsest is asked for, else the medium one; the next plan knows more.
        """
        most = self._most_computed() if self._text_first else 0
        levels = {}
        for index in self._pending[most:]:
            if self._standing[index].loadable:
                low, high = self._policy.floor(self._groups[index]), self._policy.ceiling(self._groups[index])
                if self._room_s < math.inf:
                    high = low if self._policy.commit < 1 else (low + high) // 2
                levels[index] = max(self._coming(index), high)
        return self._make(most, levels, meets=True)

    # Evaluation.

    def _order(self, levels: dict[int, int]) -> list[int]:
        """In which order groups are loaded: first what lies before the last hole, then from the back. Without text from
        the front: what has come is then of use whatever happens to the rest."""
        if not self._can_compute:
            return sorted(levels)
        return sorted(levels, key=lambda i: (i > self._hole, -i))

    def _finish(self, m: int, levels: dict[int, int]) -> float:
        """Seconds until all is there: the link, the decoder, and the computation that waits for both."""
        computed = self._computed(m)
        decoded, at = self._loaded(computed, levels)
        done = self._computing_s(m) if self._layered or m == len(computed) else self._holes(m, computed, at)
        return max(done, decoded, self._compute_s[0])

    def _loaded(self, computed: Sequence[int], levels: dict[int, int]) -> tuple[float, dict[int, float]]:
        """Seconds until the link and the decoder have done all, and when each group is there."""
        speeds, groups, standing = self._speeds, self._groups, self._standing
        dropped = set(computed)
        link = decoded = 0.0
        at: dict[int, float] = {}
        for index, state in enumerate(standing[: self._reach]):
            if state.target is not None and index not in dropped:
                link += speeds.load_s(state.left)
                decoded = max(decoded, link) + speeds.decode_s(groups[index], state.level, state.target)
                at[index] = decoded
        for index in self._order(levels):
            have = self._coming(index)
            if have >= levels[index]:
                continue
            link += speeds.load_s(groups[index].bytes_between(have, levels[index]))
            decoded = max(decoded, link) + speeds.decode_s(groups[index], have, levels[index])
            at[index] = max(at.get(index, 0.0), decoded)
        return decoded, at

    def _repair(self, m: int, levels: dict[int, int]) -> float:
        """See `Plan.repair`."""
        again = {i: self._groups[i].repair for i in self._pending[m:] if self._standing[i].loadable}
        spread = {i: share for i, share in again.items() if share is not None}
        costs = {i: self._compute_s[n + 1] - self._compute_s[n] for n, i in enumerate(self._pending)}
        whole = sum(costs[i] for i in spread)
        if not whole:
            return max(spread.values(), default=0.0)
        least = sum(share * costs[i] for i, share in spread.items())
        if self._unknown:
            return least / whole
        decoded, _ = self._loaded(self._computed(m), levels)
        return blend_ratio(max(0.0, decoded - (self._computing_s(m) - least)), whole, min(1.0, least / whole))

    def _coming(self, index: int) -> int:
        """The level that a group has, or will have with what is on its way."""
        state = self._standing[index]
        return state.level if state.target is None else max(state.level, state.target)

    def _holes(self, m: int, computed: Sequence[int], at: dict[int, float]) -> float:
        """Computing the front, and then what lies behind groups that are loaded."""
        now = self._compute_s[m]
        prefill = self._speeds.prefill
        if prefill is None:
            return math.inf
        loads = sorted(at.items())
        for index in computed[m:]:
            for before, when in loads:
                if before < index:
                    now = max(now, when)
            now += prefill.seconds(self._groups[index].begin, self._groups[index].tokens)
        return now

    # Levels.

    def _filled(self, m: int) -> dict[int, int]:
        """The best levels that fit: all groups one level finer while there is room, then as many as possible.

        The time of a plan is the sum of its transfers (plus what decoding adds at the end), so the cheapest groups are
        refined first: that refines the most.
        """
        levels = self._floors(m)
        for index in range(self._reach):
            state = self._standing[index]
            if state.level >= 0 and not state.computed:
                levels[index] = self._coming(index)
        for target in range(1, self._top + 1):
            eligible = [
                i
                for i in levels
                if levels[i] == target - 1 <= self._policy.ceiling(self._groups[i]) - 1 and self._standing[i].loadable
            ]
            if not eligible:
                continue
            eligible.sort(key=lambda i: (self._groups[i].bytes_between(target - 1, target), i))
            low, high = 0, len(eligible)  # so many fit; one more does not
            while low < high:
                middle = (low + high + 1) // 2
                tried = {**levels, **dict.fromkeys(eligible[:middle], target)}
                if self._finish_in_steps(m, tried) <= self._room_s:
                    low = middle
                else:
                    high = middle - 1
            levels.update(dict.fromkeys(eligible[:low], target))
        return levels

    def _finish_in_steps(self, m: int, levels: dict[int, int]) -> float:
        """As `_finish`, and the waits for the further requests that refining in steps takes."""
        extra = 0
        if self._speeds.latency_s:
            extra = max(0, len(self._steps(levels)) - sum(self._coming(i) < levels[i] for i in levels))
        return self._finish(m, levels) + extra * self._speeds.latency_s

    def _pass_level(self, levels: dict[int, int]) -> int:
        """The finest level at which all that is still missing fits into `commit` of what is left."""
        missing = [i for i in levels if self._coming(i) < 0]
        if self._room_s == math.inf or self._unknown:
            return self._top
        room = max(0.0, self._room_s) * self._policy.commit
        rate, best = self._speeds.bytes_per_s or 0.0, 0
        for level in range(1, self._top + 1):
            nbytes = sum(self._groups[i].bytes_between(ABSENT, min(level, levels[i])) for i in missing)
            if nbytes > rate * room:
                break
            best = level
        return best

    def _steps(self, levels: dict[int, int]) -> list[Step]:
        """Transfers in order: first all groups that are missing, then level by level."""
        order = self._order(levels)
        first = self._pass_level(levels)
        now = {i: self._coming(i) for i in levels}
        steps = []
        for index in order:
            if now[index] < 0:
                now[index] = min(levels[index], max(first, self._policy.floor(self._groups[index])))
                steps.append(Step(index, now[index]))
        for target in range(1, self._top + 1):
            for index in order:
                if now[index] < target <= levels[index]:
                    now[index] = target
                    steps.append(Step(index, target))
        return steps

    def _make(self, m: int, levels: dict[int, int], *, meets: bool) -> Plan:
        computed = self._computed(m)
        final = []
        for index, state in enumerate(self._standing):
            if state.computed or index == self._busy or index in computed:
                final.append(COMPUTED)
            elif index >= self._reach:
                final.append(self._coming(index) if state.level >= 0 else ABSENT)
            else:
                final.append(levels.get(index, self._coming(index)))
        steps = self._steps(levels)
        coming = any(state.target is not None for i, state in enumerate(self._standing) if i not in computed)
        known = not self._unknown or not (steps or coming)
        took = self._finish(m, levels) if known else math.inf
        if self._unknown:  # nobody has looked yet whether it fits
            meets = meets and took <= self._room_s
        abandon = tuple(i for i in computed if self._standing[i].target is not None)
        finest = max((group.finest for group in self._groups), default=0)
        return Plan(
            tuple(steps),
            tuple(computed),
            tuple(final),
            took + self._suffix_s,
            meets and took < math.inf,
            abandon,
            finest,
            self._repair(m, levels) if self._layered else 0.0,
        )
