"""Streaming in virtual time: the real planner and the real course of a request over a scripted link. No threads, no
sleeps, no bytes; what takes minutes is known in milliseconds, and comes out the same on every machine.

The link serves one transfer after the other, in the order in which they were asked for; decoding and computing of each
request go on beside it. `oracle` finds the best plan of somebody who knows the whole schedule of the link.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.stream.course import Course, Report
from kvstore.stream.estimates import PrefillModel
from kvstore.stream.terms import COMPUTED, Group, Step

__all__ = ["LinkTrace", "Oracle", "oracle", "simulate"]

_TICKS = 100_000  # decisions after which a simulation is taken not to end


@dataclass(frozen=True)
class LinkTrace:
    """The rate of a link over time.

    Attributes:
        steps: (seconds, bytes per second) in order of time; the first at 0, each rate holds until the next.

    Raises:
        ConfigError: not in order, negative rates, or none at 0.
    """

    steps: tuple[tuple[float, float], ...]
    _carried: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        times = [when for when, _ in self.steps]
        if not self.steps or times[0] != 0 or times != sorted(times) or any(not rate >= 0 for _, rate in self.steps):
            raise ConfigError(f"{self.steps} is no schedule of a link")
        carried, total = [0.0], 0.0
        for (begin, rate), (end, _) in itertools.pairwise(self.steps):
            total += rate * (end - begin)
            carried.append(total)
        object.__setattr__(self, "_carried", tuple(carried))

    def carried(self, until: float) -> float:
        """Bytes that come in from 0 on, if it is never idle."""
        index = bisect.bisect_right(self.steps, (until, math.inf)) - 1
        begin, rate = self.steps[index]
        return self._carried[index] + rate * (until - begin)

    def rate(self, at: float) -> float:
        """Bytes per second at a time."""
        return self.steps[bisect.bisect_right(self.steps, (at, math.inf)) - 1][1]

    def end(self, begin: float, nbytes: float) -> float:
        """When a transfer that begins then has come; inf: never."""
        if nbytes <= 0:
            return begin
        need = self.carried(begin) + nbytes
        for (when, rate), before, (after, _) in zip(
            self.steps, self._carried, [*self.steps[1:], (math.inf, 0.0)], strict=True
        ):
            if rate > 0:
                at = when + (need - before) / rate
                if at <= after and at >= begin:
                    return at
        return math.inf


@dataclass
class _Transfer:
    owner: int
    step: Step
    nbytes: float
    asked: float
    began: float = math.nan
    came: float = math.inf
    done: float = math.inf


class _Link:
    """First come, first served."""

    def __init__(self, trace: LinkTrace, latency_s: float) -> None:
        self._trace, self._latency = trace, latency_s
        self.queue: list[_Transfer] = []
        self._free = 0.0

    def add(self, transfer: _Transfer) -> None:
        self.queue.append(transfer)
        self._plan()

    def drop(self, transfer: _Transfer, now: float) -> None:
        """Gone: what comes behind it begins now."""
        first = self.queue and self.queue[0] is transfer
        self.queue = [each for each in self.queue if each is not transfer]
        if first:
            self._free = max(now, min(self._free, now))
        self._plan()

    def finish(self, transfer: _Transfer) -> None:
        self.queue = [each for each in self.queue if each is not transfer]
        self._free = max(self._free, transfer.came)
        self._plan()

    def _plan(self) -> None:
        free = self._free
        for transfer in self.queue:
            transfer.began = max(transfer.asked + self._latency, free)
            transfer.came = free = self._trace.end(transfer.began, transfer.nbytes)


class _Run:
    """One course in virtual time."""

    def __init__(self, course: Course, starts: float) -> None:
        self.course = course
        self.starts = starts
        self.flights: list[_Transfer] = []
        self.compute: tuple[int, float] | None = None
        self.decoder_free = 0.0
        self.wake = starts
        self.finished = False


def simulate(
    courses: Sequence[Course],
    trace: LinkTrace,
    *,
    latency_s: float = 0.0,
    prefill: PrefillModel | None = None,
    decode_s_per_token: Sequence[float] = (),
    starts: Sequence[float] | None = None,
    misses: Callable[[int, Step], bool] = lambda owner, step: False,
) -> list[Report]:
    """Let requests run to their ends over one link.

    Args:
        courses: the requests; each begins at its `starts`.
        trace: of the link.
        latency_s: seconds per transfer.
        prefill: what computing really takes (the courses may believe otherwise); each request computes for itself.
        decode_s_per_token: what decoding a level really takes.
        misses: whether a transfer of a request fails, once its time has come.
    """
    link = _Link(trace, latency_s)
    runs = [_Run(course, at) for course, at in zip(courses, starts or [0.0] * len(courses), strict=True)]
    for run in runs:
        run.course.begin(run.starts)
    now = 0.0
    for _ in range(_TICKS):
        live = [run for run in runs if not run.finished]
        if not live:
            return [run.course.report for run in runs]
        now = max(now, min(_next(run) for run in live))
        if now == math.inf:
            for run in live:
                run.course.close(now)
            return [run.course.report for run in runs]
        for owner, run in enumerate(runs):
            if not run.finished and _next(run) <= now:
                _advance(run, owner, link, now, prefill, decode_s_per_token, misses)
    raise ConfigError("the simulation does not come to an end")


def _next(run: _Run) -> float:
    ends = [run.wake, *(_done(run, flight) for flight in run.flights)]
    if run.compute is not None:
        ends.append(run.compute[1])
    return min(ends)


def _done(run: _Run, flight: _Transfer) -> float:
    return max(flight.came, run.decoder_free) + flight.done


def _advance(
    run: _Run,
    owner: int,
    link: _Link,
    now: float,
    prefill: PrefillModel | None,
    decode: Sequence[float],
    misses: Callable[[int, Step], bool],
) -> None:
    course = run.course
    for flight in sorted(run.flights, key=lambda each: each.came):
        if _done(run, flight) <= now:
            run.decoder_free = _done(run, flight)
            run.flights.remove(flight)
            link.finish(flight)
            course.ended(flight.step, now, ok=not misses(owner, flight.step))
    if run.compute is not None and run.compute[1] <= now:
        course.computed(run.compute[0], now)
        run.compute = None
    found = course.decide(now)
    for step in found.cancel:
        gone = next((each for each in run.flights if each.step == step), None)
        if gone is not None:
            run.flights.remove(gone)
            link.drop(gone, now)
            course.ended(step, now, ok=False, cancelled=True, nbytes=0)
    if found.finished:
        run.finished = True
        return
    for step in found.load:
        group, state = course.groups[step.group], course.standing[step.group]
        flight = _Transfer(owner, step, group.bytes_between(state.level, step.level), now)
        last = len(decode) - 1
        flight.done = (
            group.tokens * sum(decode[min(each, last)] for each in range(state.level + 1, step.level + 1))
            if decode
            else 0.0
        )
        course.started(step, now)
        run.flights.append(flight)
        link.add(flight)
    if found.compute is not None:
        assert prefill is not None
        group = course.groups[found.compute]
        course.computing(found.compute, now)
        run.compute = (found.compute, now + prefill.seconds(group.begin, group.tokens))
    run.wake = found.wake_at if found.wake_at > now else now + 1e-6


@dataclass(frozen=True, slots=True)
class Oracle:
    """The best plan of somebody who knows the link's whole schedule.

    Attributes:
        seconds: to the first token, new tokens included.
        violated: nothing is within the SLO; then it is the fastest.
        levels: of each group.
    """

    seconds: float
    violated: bool
    levels: tuple[int, ...]


def oracle(
    groups: Sequence[Group],
    trace: LinkTrace,
    *,
    slo_s: float = math.inf,
    latency_s: float = 0.0,
    prefill: PrefillModel | None = None,
    decode_s_per_token: Sequence[float] = (),
    new_tokens: int = 0,
    text: str = "quality",
) -> Oracle:
    """The same aims as the planner's (the SLO, then quality, then time), with the schedule known: all numbers of groups
    computed at the front, for each the best levels that fit, transfers one behind the other without a pause.

    It is optimal for groups of one size: see the exchange argument in `kvstore.stream.planner`; a brute force in the
    tests agrees. With decoding it is a lower bound: either the link is the bottleneck and the last group is decoded
    behind it, or the decoder is, which begins when the first group is there.
    """
    count = len(groups)
    top = max((group.finest for group in groups), default=0)
    end = groups[-1].begin + groups[-1].tokens if groups else 0
    suffix = prefill.seconds(end, new_tokens) if prefill is not None else 0.0
    last = len(decode_s_per_token) - 1
    decode = list(itertools.accumulate(decode_s_per_token[min(level, last)] for level in range(top + 1) if last >= 0))
    best: tuple[tuple[float, ...], Oracle] | None = None
    for m in range(count + 1 if prefill is not None and text != "never" else 1):
        front = sum(prefill.seconds(g.begin, g.tokens) for g in groups[:m]) if prefill is not None else 0.0
        back = groups[m:]

        def seconds(levels: Sequence[int], front: float = front, back: Sequence[Group] = back) -> float:
            if not back:
                return front + suffix
            sizes = [group.sizes[level] for group, level in zip(back, levels, strict=True)]
            there = trace.end(latency_s, sum(sizes))
            if decode_s_per_token:
                times = [group.tokens * decode[min(level, top)] for group, level in zip(back, levels, strict=True)]
                there = max(there + times[-1], trace.end(latency_s, sizes[0]) + sum(times))
            return max(front, there) + suffix

        levels = [0] * len(back)
        if seconds(levels) <= slo_s:
            for target in range(1, top + 1):
                for index in range(len(back)):
                    if levels[index] == target - 1 and back[index].finest >= target:
                        levels[index] = target
                        if seconds(levels) > slo_s:
                            levels[index] = target - 1
        took = seconds(levels)
        chosen = (*[COMPUTED] * m, *levels)
        ceiling = top if text == "time" or slo_s == math.inf else top + 1
        ranks = sorted(ceiling if level == COMPUTED else level for level in chosen)
        late = took > slo_s
        # Greater is better: in time; then, within the SLO, the worst ranks; then the time.
        worth = (0.0, -took) if late else (1.0, *map(float, ranks), -took)
        if best is None or worth > best[0]:
            best = worth, Oracle(took, late, chosen)
    assert best is not None
    return best[1]
