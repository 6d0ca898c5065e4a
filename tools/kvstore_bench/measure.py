"""How it is measured: two sides in turn, A B B A, so that whatever else the machine does meets both.

The ratio of a row is the **median of the paired ratios**: each repeat times one pass of ours and, right before or
after it, one pass of the ceiling over the same bytes, and gives one ratio. Throughputs are medians of their own side.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.backend import Outcome, Status
from kvstore.keys import Key

from .ceilings import Job, Lanes, Pass, split
from .processes import cpu_of
from .targets import Target
from .workload import Workload

__all__ = ["Failures", "GetSide", "Measurement", "PutSide", "Side", "lane_counts", "measure", "percentile"]


class Side(Protocol):
    """One of the two things compared. `ceilings` has the other implementations. One that works in other processes too
    also has `cpu_s()`: CPU seconds so far of all of them. One that is a program with a clock of its own has
    `timed(lanes, rounds)` instead of `jobs`.

    Attributes:
        name: shown in the row.
        repeatable: True if the same jobs may be called several times in one pass (reads), False if each call needs
            fresh jobs and a clean-up after it (writes).
    """

    @property
    def name(self) -> str: ...

    @property
    def repeatable(self) -> bool: ...

    def jobs(self, lanes: int) -> list[Job]:
        """One job per lane; together they move the batch once. Not timed."""

    def settle(self, rounds: int) -> int:
        """After a pass: undo it if need be, and say how many bytes were really moved. Not timed."""

    def close(self) -> None:
        """Remove what is left."""


class Failures:
    """What did not work, counted; the first message of each kind of call is kept for the reader."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: dict[str, str] = {}

    def add(self, op: str, message: str) -> None:
        self.count += 1
        self.messages.setdefault(op, message)


def describe(outcome: Outcome, wanted: int) -> str:
    """What is wrong with an outcome, in a few words."""
    if outcome.status is Status.ERROR:
        return str(outcome.error)
    if outcome.ok:
        return f"only {outcome.nbytes} of {wanted} bytes"
    return str(outcome.status.value)


class _OurSide:
    """What reading and writing have in common: the work is split over lanes, outcomes are looked at afterwards."""

    def __init__(self, target: Target, work: Workload, *, timeout: float, pids: Sequence[int] = ()) -> None:
        self.name = target.scheme
        self.pids = pids  # of other processes whose CPU counts
        self.cpu_s: Callable[[], float] | None = self._cpu_s if pids else None
        self.failures = Failures()
        self._target, self._work, self._timeout = target, work, timeout
        self._outcomes: list[tuple[range, Sequence[Outcome]]] = []

    def _cpu_s(self) -> float:
        return time.process_time() + sum(map(cpu_of, self.pids))

    def _job(self, part: range, call: Callable[[float], Sequence[Outcome]]) -> Job:
        done, timeout, clock = self._outcomes.append, self._timeout, time.monotonic

        def job() -> None:
            done((part, call(clock() + timeout)))

        return job

    def _parts(self, lanes: int) -> list[range]:
        return split(self._work.count, 1 if self._target.whole else lanes)

    def _count(self, op: str) -> int:
        """Bytes of the outcomes that are OK; the others are failures. A put may report more: header and padding."""
        outcomes, nbytes, moved = list(self._outcomes), self._work.nbytes, 0
        self._outcomes.clear()
        for part, results in outcomes:
            for outcome in results:
                if outcome.ok and (outcome.nbytes == nbytes or (op == "put" and outcome.nbytes > nbytes)):
                    moved += nbytes
                else:
                    self.failures.add(op, describe(outcome, nbytes))
            for _ in range(len(part) - len(results)):
                self.failures.add(op, "no outcome for a record of the batch")
        return moved

    def _put(self, keys: Sequence[Key], lanes: int) -> list[Job]:
        sources = self._work.sources
        return [
            self._job(part, self._target.writer(keys[part.start : part.stop], sources[part.start : part.stop]))
            for part in self._parts(lanes)
        ]

    def _get(self, keys: Sequence[Key], lanes: int) -> list[Job]:
        views = self._work.destinations
        return [
            self._job(part, self._target.reader(keys[part.start : part.stop], views[part.start : part.stop]))
            for part in self._parts(lanes)
        ]

    def _delete(self, keys: Sequence[Key]) -> list[Outcome]:
        """Remove records that this run put. Those that cannot be removed are failures with the key in the message."""
        if not keys:
            return []
        outcomes = list(self._target.delete(keys, time.monotonic() + self._timeout))
        for outcome in outcomes:
            if outcome.status is Status.ERROR:
                self.failures.add("delete", describe(outcome, 0))
        return outcomes

    def _read_back(self, keys: Sequence[Key], lanes: int, pool: Lanes) -> bool:
        """Read everything into poisoned memory and compare it with what was put."""
        self._work.poison()
        pool.run(self._get(keys, lanes))
        moved = self._count("get")
        wrong = self._work.wrong()
        if wrong and moved == self._work.count * self._work.nbytes:
            self.failures.messages.setdefault(
                "verify", f"{len(wrong)} of {self._work.count} records came back with other bytes"
            )
        return not wrong


class GetSide(_OurSide):
    """Whole records into the caller's memory. `fill` stores them first, `close` removes them."""

    repeatable = True

    def __init__(self, target: Target, work: Workload, *, timeout: float, pids: Sequence[int] = ()) -> None:
        super().__init__(target, work, timeout=timeout, pids=pids)
        self._keys: list[Key] = []

    @property
    def keys(self) -> Sequence[Key]:
        """The records that are read."""
        return self._keys

    def fill(self, pool: Lanes, lanes: int) -> bool:
        """Store the records (not timed). False if not all of them were."""
        self._keys = self._work.new_keys()
        pool.run(self._put(self._keys, lanes))
        return self._count("put") == self._work.count * self._work.nbytes

    def verify(self, pool: Lanes, lanes: int) -> bool:
        return self._read_back(self._keys, lanes, pool)

    def jobs(self, lanes: int) -> list[Job]:
        return self._get(self._keys, lanes)

    def settle(self, rounds: int) -> int:
        return self._count("get")

    def close(self) -> None:
        self._delete(self._keys)
        self._keys = []  # only now: an interrupted delete is tried again


class PutSide(_OurSide):
    """New records from the caller's memory; each pass has names of its own and is deleted after it."""

    repeatable = False

    def __init__(self, target: Target, work: Workload, *, timeout: float, pids: Sequence[int] = ()) -> None:
        super().__init__(target, work, timeout=timeout, pids=pids)
        self._live: list[Key] = []

    def verify(self, pool: Lanes, lanes: int) -> bool:
        self._live = self._work.new_keys()
        pool.run(self._put(self._live, lanes))
        self._count("put")
        good = self._read_back(self._live, lanes, pool)
        self.close()
        return good

    def jobs(self, lanes: int) -> list[Job]:
        self._live = self._work.new_keys()
        return self._put(self._live, lanes)

    def settle(self, rounds: int) -> int:
        acknowledged = self._outcomes and all(o.ok for _, results in self._outcomes for o in results)
        moved = self._count("put")
        for outcome in self._delete(self._live):
            if acknowledged and outcome.status is Status.MISS:
                self.failures.add("put", "a record was acknowledged and is not there")
        self._live = []  # only now: an interrupted delete is tried again
        return moved

    def close(self) -> None:
        self._delete(self._live)
        self._live = []


@dataclass
class _Timing:
    seconds: list[float] = field(default_factory=list)  # for the batch once
    speeds: list[float] = field(default_factory=list)  # bytes/s of what was really moved
    calls: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    moved: int = 0

    def add(self, one: Pass, rounds: int, moved: int) -> None:
        self.seconds.append(one.seconds / rounds)
        self.speeds.append(moved / one.seconds if one.seconds else 0.0)
        self.calls += one.calls
        self.cpu_s += one.cpu_s
        self.moved += moved


@dataclass(frozen=True)
class Measurement:
    """Both sides of one row.

    Attributes:
        seconds: median wall time to move the batch once.
        speed, ceiling_speed: medians over the repeats, bytes/s; failures moved nothing.
        ratio: median of the paired ratios.
        calls: wall seconds of every call of ours.
        cpu_s_per_byte: CPU seconds per byte moved, ours: of this process, and of the side's others.
        ceiling_cpu_s_per_byte: the same for the ceiling.
        lanes, ceiling_lanes: threads used.
        spread: how much the ceiling itself varied: interquartile range of its speeds over their median.
    """

    seconds: float
    speed: float
    ceiling_speed: float
    ratio: float
    calls: list[float]
    cpu_s_per_byte: float
    ceiling_cpu_s_per_byte: float
    lanes: int
    ceiling_lanes: int
    repeats: int
    spread: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0.0 if there are none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def lane_counts(most: int) -> list[int]:
    """1, 2, 4, … and `most`."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if most <= 1 else [*counts, most]


def _timed(pool: Lanes, side: Side, lanes: int, rounds: int) -> Pass:
    """Run the jobs of a side, with the CPU of all its processes. A program with a clock of its own times itself."""
    timed: Callable[[int, int], Pass] | None = getattr(side, "timed", None)
    if timed is not None:
        return timed(lanes, rounds)
    jobs = side.jobs(lanes)
    clock: Callable[[], float] | None = getattr(side, "cpu_s", None)
    if clock is None:
        return pool.run(jobs, rounds)
    before = clock()
    one = pool.run(jobs, rounds)
    return one._replace(cpu_s=clock() - before)


def _one(pool: Lanes, side: Side, lanes: int, rounds: int) -> tuple[Pass, int]:
    """One pass of a side over the batch, `rounds` times. Returns the timing and the bytes really moved."""
    if side.repeatable:
        one = _timed(pool, side, lanes, rounds)
        return one, side.settle(rounds)
    seconds, cpu_s, moved, calls = 0.0, 0.0, 0, []
    for _ in range(rounds):
        one = _timed(pool, side, lanes, 1)
        moved += side.settle(1)
        seconds += one.seconds
        cpu_s += one.cpu_s
        calls += one.calls
    return Pass(seconds, cpu_s, calls), moved


def _best(pool: Lanes, sides: Sequence[tuple[Side, Sequence[int]]], budget_s: float) -> list[tuple[int, float]]:
    """For each side the number of lanes that moves most, and the seconds of its batch then.

    Every candidate is tried several times, in turn with the others, and its best pass counts; what is slow is tried
    once, and not all of it. More lanes must win by 3 %: the smaller number is kept where it makes no difference.
    """
    speeds: list[dict[int, float]] = [dict.fromkeys(counts, 0.0) for _, counts in sides]
    seconds: list[dict[int, float]] = [dict.fromkeys(counts, math.inf) for _, counts in sides]
    end = time.monotonic() + budget_s
    for turn in range(6):
        for (side, counts), speed, second in zip(sides, speeds, seconds, strict=True):
            for lanes in counts:
                if time.monotonic() > end and (turn or speed[counts[0]]):
                    break
                one, moved = _one(pool, side, lanes, 1)
                speed[lanes] = max(speed[lanes], moved / one.seconds if one.seconds else 0.0)
                second[lanes] = min(second[lanes], one.seconds)
        if time.monotonic() > end:
            break
    best = []
    for speed, second in zip(speeds, seconds, strict=True):
        chosen, top = 0, 0.0
        for lanes, value in sorted(speed.items()):
            if not chosen or value > top * 1.03:
                chosen, top = lanes, value
        best.append((chosen, second[chosen]))
    return best


def measure(
    pool: Lanes,
    ours: Side,
    ceiling: Side,
    *,
    our_lanes: Sequence[int],
    ceiling_lanes: Sequence[int],
    same_lanes: bool,
    repeats: int,
    pass_s: float,
    budget_s: float,
) -> Measurement:
    """Warm both sides up, find their lanes, time them in turn.

    Args:
        our_lanes, ceiling_lanes: numbers of threads to try.
        same_lanes: use the ceiling's best number for ours too (memory), if it is among `our_lanes`.
        repeats: pairs of passes; fewer, but at least 3, once `budget_s` is used up.
        pass_s: aim of one timed pass, in seconds; short batches are moved several times.
    """
    start = time.monotonic()
    _one(pool, ours, our_lanes[0], 1)
    _one(pool, ceiling, ceiling_lanes[0], 1)
    (mine, batch_s), (theirs, _) = _best(pool, [(ours, our_lanes), (ceiling, ceiling_lanes)], budget_s / 4)
    if same_lanes:
        if len(our_lanes) == 1:
            theirs = our_lanes[0]
        else:
            mine = theirs
    rounds = max(1, min(10_000, round(pass_s / max(batch_s, 1e-7))))
    a, b, ratios = _Timing(), _Timing(), []
    for repeat in range(repeats):
        for first in (True, False) if repeat % 2 == 0 else (False, True):
            side, lanes, timing = (ours, mine, a) if first else (ceiling, theirs, b)
            one, moved = _one(pool, side, lanes, rounds)
            timing.add(one, rounds, moved)
        ratios.append(a.speeds[-1] / b.speeds[-1] if b.speeds[-1] else 0.0)
        if repeat >= 2 and time.monotonic() - start > budget_s:
            break
    return Measurement(
        seconds=statistics.median(a.seconds),
        speed=statistics.median(a.speeds),
        ceiling_speed=statistics.median(b.speeds),
        ratio=statistics.median(ratios),
        calls=a.calls,
        cpu_s_per_byte=a.cpu_s / a.moved if a.moved else 0.0,
        ceiling_cpu_s_per_byte=b.cpu_s / b.moved if b.moved else 0.0,
        lanes=mine,
        ceiling_lanes=theirs,
        repeats=len(ratios),
        spread=(percentile(b.speeds, 0.75) - percentile(b.speeds, 0.25)) / (statistics.median(b.speeds) or 1.0),
    )
