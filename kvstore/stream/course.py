"""The course of one request: what is there, what is under way, what is begun next. No I/O, no threads, no clock:
`streamer` tells it what happened when, and does what it says; a simulation can do the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.errors import ConfigError

from .estimates import LinkShare, PrefillModel, Transfer
from .planner import plan
from .terms import Group, Plan, Policy, Speeds, Standing, Step

__all__ = ["Actions", "Course", "Report"]

_STUCK = 6  # times its expected duration: a transfer that takes longer hangs, whatever the link does for others
_DEPTH = 2  # transfers under way at once: what comes next is asked for while the last one is decoded
_SETTLED = 0.25  # weight of a new measurement of the speed of computing


class Actions(NamedTuple):
    """What is to be done now.

    Attributes:
        load: transfers to begin.
        compute: the group to compute; None: nothing, or not yet.
        cancel: transfers to cancel: their groups are computed, or their time is over.
        finished: all is there (or will never be), and nothing more is worth waiting for.
        wake_at: look again then at the latest, seconds of the caller's clock; inf: only when something has happened.
    """

    load: tuple[Step, ...]
    compute: int | None
    cancel: tuple[Step, ...]
    finished: bool
    wake_at: float


@dataclass
class Report:
    """What came of a request.

    Attributes:
        slo_s: what was asked for, seconds from the beginning; inf: nothing.
        ready_s: seconds until all groups were there and refined as far as the SLO allowed; nan: they never were.
        ttft_s: `ready_s` and the time that the new tokens are estimated to take.
        violated: `ttft_s` is beyond the SLO, or something is missing.
        levels: of each group at the end: a level, `COMPUTED`, or -1.
        loaded_bytes: of transfers that succeeded.
        wasted_bytes: of transfers that were given up.
        loaded_tokens, computed_tokens: by where they came from.
        recompute_s: what computing all groups would have taken, by the model; None without one.
        saved_s: `recompute_s - ready_s`; negative: streaming lost. None without a model.
        failed: groups whose records were missing or in trouble.
        plans: how many times it was planned.
    """

    slo_s: float = math.inf
    ready_s: float = math.nan
    ttft_s: float = math.nan
    violated: bool = False
    levels: tuple[int, ...] = ()
    loaded_bytes: int = 0
    wasted_bytes: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    recompute_s: float | None = None
    saved_s: float | None = None
    failed: int = 0
    plans: int = 0
    chosen: Counter[int] = field(default_factory=Counter, repr=False)
    counted: bool = field(default=False, repr=False)


class _Flight:
    """A transfer under way."""

    __slots__ = ("asked", "nbytes", "step", "transfer")

    def __init__(self, step: Step, nbytes: int, asked: float, transfer: Transfer) -> None:
        self.step = step
        self.nbytes = nbytes
        self.asked = asked
        self.transfer = transfer


class Course:
    """One request. Not thread-safe: its owner's lock.

    Args:
        groups: of the prompt, in order.
        link: the link that all requests share.
        prefill: how long computing takes; None: nothing can be computed, so a hole ends the prefix.
        decode_s_per_token: see `Speeds`.
        slo_s: seconds from `begin` to the first token; None or inf: as fast as possible.
        deadline_s: seconds from `begin` after which nothing more is begun.
        new_tokens: tokens behind the groups, which are computed in any case, within the SLO.

    Attributes:
        standing: of each group.
        report: filled as it goes on.
        last: the last plan.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        link: LinkShare,
        *,
        prefill: PrefillModel | None = None,
        decode_s_per_token: Sequence[float] = (),
        slo_s: float | None = None,
        deadline_s: float = math.inf,
        new_tokens: int = 0,
        policy: Policy | None = None,
    ) -> None:
        slo = math.inf if slo_s is None else slo_s
        if not slo > 0 or math.isnan(deadline_s) or new_tokens < 0:
            raise ConfigError(f"slo_s={slo_s}, timeout={deadline_s}, new_tokens={new_tokens} make no sense")
        if not all(0 <= cost < math.inf for cost in decode_s_per_token):
            raise ConfigError(f"decode_s_per_token={tuple(decode_s_per_token)}: seconds are at least 0, and finite")
        self.groups = list(groups)
        self.link = link
        self.policy = policy or Policy()
        self.standing = [Standing() for _ in self.groups]
        self.report = Report(slo_s=slo)
        self.last = Plan()
        self._prefill = prefill
        self._decode = tuple(decode_s_per_token)
        self._slo_s, self._deadline_s, self._new = slo, deadline_s, new_tokens
        self._pace = 1.0  # measured over modelled seconds of computing
        self._flights: list[_Flight] = []
        self._computing: tuple[int, float, float] | None = None  # group, began, expected seconds
        self._held: int | None = None
        self._began = 0.0
        self._landed = -math.inf  # when the last transfer ended
        self._joined = self._over = False
        self._refining = False
        if prefill is not None:
            self.report.recompute_s = sum(prefill.seconds(g.begin, g.tokens) for g in self.groups)

    def begin(self, now: float) -> None:
        """The request begins: the clock of its SLO runs from here."""
        self._began = now

    @property
    def _aim(self) -> float:
        """When all is to be there: the SLO, and some time before it."""
        return self._began + self._slo_s - self.margin_s

    @property
    def margin_s(self) -> float:
        """Seconds at the end of the SLO that are kept free; 0 without one."""
        return self._slo_s * self.policy.margin if self._slo_s < math.inf else 0.0

    @property
    def ready(self) -> bool:
        """All groups are there."""
        return all(state.there for state in self.standing)

    @property
    def in_flight(self) -> list[Step]:
        """Transfers under way, oldest first."""
        return [flight.step for flight in self._flights]

    def suffix_s(self) -> float:
        """Seconds that the new tokens are estimated to take."""
        if self._prefill is None or not self._new:
            return 0.0
        end = self.groups[-1].begin + self.groups[-1].tokens if self.groups else 0
        return self._pace * self._prefill.seconds(end, self._new)

    # What happened.

    def started(self, step: Step, now: float) -> None:
        """A transfer was asked for."""
        state = self.standing[step.group]
        nbytes = self.groups[step.group].bytes_between(state.level, step.level)
        state.target = step.level
        self._flights.append(_Flight(step, nbytes, now, self.link.begin(nbytes, now)))

    def ended(self, step: Step, now: float, *, ok: bool, nbytes: int | None = None, cancelled: bool = False) -> None:
        """A transfer has ended.

        Args:
            ok: the group is decoded at the step's level now.
            nbytes: bytes that came; None: as many as the group's sizes say.
            cancelled: by this course itself: that says nothing against the record.
        """
        flight = next((each for each in self._flights if each.step == step), None)
        if flight is None:
            return
        self._flights.remove(flight)
        state = self.standing[step.group]
        state.target, state.left = None, 0
        came = flight.nbytes if nbytes is None else nbytes
        self.link.end(flight.transfer, now, nbytes=came if ok else 0)
        self._landed = now
        if ok and not state.computed:
            state.level = step.level
            self.report.loaded_bytes += came
            self.report.chosen[step.level] += 1
        elif ok:
            self.report.wasted_bytes += came
        elif not cancelled and state.loadable:
            state.loadable = False
            self.report.failed += 1
        else:
            self.report.wasted_bytes += came if nbytes is not None else 0

    def computing(self, group: int, now: float) -> None:
        """Computing a group has begun."""
        assert self._prefill is not None
        expected = self._pace * self._prefill.seconds(self.groups[group].begin, self.groups[group].tokens)
        self._computing = (group, now, expected)

    def computed(self, group: int, now: float) -> None:
        """It has ended: the group is there."""
        assert self._computing is not None
        assert self._prefill is not None
        _, began, _ = self._computing
        self._computing = None
        state = self.standing[group]
        state.computed, state.computing_s = True, None
        model = self._prefill.seconds(self.groups[group].begin, self.groups[group].tokens)
        if model > 0 and now > began:
            self._pace += _SETTLED * ((now - began) / model - self._pace)

    def missing(self, group: int) -> None:
        """A group's record is known not to be there: it is not asked for."""
        self.standing[group].loadable = False

    def spoiled(self, group: int) -> None:
        """What a group's memory holds is not known any more: it can only be computed."""
        state = self.standing[group]
        if not state.computed:
            state.level, state.loadable = -1, False

    def resize(self, group: int, sizes: Sequence[int]) -> None:
        """The sizes of a group's levels are known by now. Levels that it turned out not to have cost nothing."""
        known = self.groups[group]
        padded = (*sizes, *[sizes[-1]] * (len(known.sizes) - len(sizes)))[: len(known.sizes)]
        self.groups[group] = replace(known, sizes=tuple(padded))

    def hold(self, group: int | None) -> None:
        """Somebody looks at a group: it is not refined meanwhile. None: nobody does."""
        self._held = group

    def refine(self) -> None:
        """The first token is under way: from now on all that is there is refined, however long it takes."""
        self._refining, self._over = True, False

    # What to do.

    def decide(self, now: float) -> Actions:
        """Plan, and say what is to be begun now. Whatever it says must be told back by `started` and `computing`."""
        if now >= self._began + self._deadline_s:
            if self._computing is None:
                return self._end(now)
            # Whoever computes cannot be interrupted, and what he computes is there then.
            self._use_link(False)
            return Actions((), None, tuple(self.in_flight), False, math.inf)
        room = self._aim - now - self.suffix_s()
        if self.ready and self._computing is None and not self._refining and room <= 0:
            return self._end(now)  # refining would be at the cost of the first token
        self._estimate(now)
        policy, remaining = self.policy, self._aim - now
        if self._refining:
            policy, remaining = replace(policy, text="never"), math.inf
        rate = self.link.share(now, mine=self._joined)
        speeds = Speeds(rate, self.link.latency_s, self._decode, self._paced())
        self.last = found = plan(
            self.groups, self.standing, speeds, remaining_s=remaining, new_tokens=self._new, policy=policy
        )
        self.report.plans += 1
        self._use_link(bool(found.load or self._flights))
        load = self._loads(found)
        compute, cancel = self._compute(found)
        if not (found.load or self._flights or compute is not None or self._computing):
            return self._end(now)
        return Actions(load, compute, cancel, False, self._wake_at(now))

    def _loads(self, found: Plan) -> tuple[Step, ...]:
        depth = _DEPTH if self.link.bytes_per_s is not None else 1  # first find out what kind of link it is
        free = depth - len(self._flights)
        busy = {flight.step.group for flight in self._flights}
        chosen: list[Step] = []
        for step in found.load:
            if len(chosen) >= free:
                break
            if step.group in busy or step.group == self._held:
                if self.standing[step.group].level < 0:
                    break
                continue
            busy.add(step.group)
            chosen.append(step)
        return tuple(chosen)

    def _compute(self, found: Plan) -> tuple[int | None, tuple[Step, ...]]:
        if not found.compute or self._computing is not None:
            return None, ()
        group = found.compute[0]
        if not all(state.there for state in self.standing[:group]):
            return None, ()
        return group, tuple(flight.step for flight in self._flights if flight.step.group == group)

    def _paced(self) -> PrefillModel | None:
        return None if self._prefill is None else self._prefill.scaled(self._pace)

    def _estimate(self, now: float) -> None:
        """What is still to come of that which is under way."""
        rate = self.link.share(now, mine=self._joined) or 0.0
        count = len(self._flights)
        for flight in self._flights:
            since = max(flight.asked + self.link.latency_s, min(self._landed, now))
            left = flight.nbytes - rate / count * max(0.0, now - since)
            age = now - flight.asked
            if rate and age > _STUCK * (self.link.latency_s + flight.nbytes * count / rate):
                left = rate * age  # the link lives, but this one hangs: it is taken to need as long again
            self.standing[flight.step.group].left = max(0, math.ceil(left))
        if self._computing is not None:
            group, began, expected = self._computing
            self.standing[group].computing_s = max(0.0, began + expected - now)

    def _wake_at(self, now: float) -> float:
        """When to look again if nothing happens: once what is under way is overdue, and when its time is over."""
        ends = [self._began + self._deadline_s]
        if self.ready and not self._refining:
            ends.append(self._aim - self.suffix_s())
        ends += [self.link.overdue_at(flight.transfer, now) + 1e-3 for flight in self._flights]
        return max(now, min(ends))

    def _use_link(self, used: bool) -> None:
        if used != self._joined:
            self._joined = used
            (self.link.join if used else self.link.leave)()

    def _end(self, now: float) -> Actions:
        cancel = tuple(flight.step for flight in self._flights)
        if not self._over:
            self._over = True
            self._settle_report(now)
        self._use_link(False)
        return Actions((), None, cancel, True, math.inf)

    def _settle_report(self, now: float) -> None:
        report = self.report
        report.levels = tuple(-2 if state.computed else state.level for state in self.standing)
        report.computed_tokens = sum(g.tokens for g, s in zip(self.groups, self.standing, strict=True) if s.computed)
        report.loaded_tokens = sum(
            g.tokens for g, s in zip(self.groups, self.standing, strict=True) if s.level >= 0 and not s.computed
        )
        if self._refining:
            return
        if self.ready:
            report.ready_s = now - self._began
            report.ttft_s = report.ready_s + self.suffix_s()
            if report.recompute_s is not None:
                report.saved_s = report.recompute_s - report.ready_s
        report.violated = not report.ttft_s <= report.slo_s

    def close(self, now: float) -> None:
        """It is over, however far it came."""
        self._end(now)

    def abandon(self) -> None:
        """Whoever it was for is gone, without a word. From a garbage collection: takes no lock."""
        if self._joined:
            self._joined = False
            self.link.left_unsaid()
