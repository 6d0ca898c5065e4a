"""What the planner is told, measured: how fast tokens are computed, and how fast the link is now. No I/O, no threads;
the clock is the caller's, so a test can give any."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvstore.errors import ConfigError

__all__ = ["LinkShare", "PrefillModel", "PrefillSample", "Transfer"]

_REMEMBERED = 64  # measurements
OVERDUE = 1.25
"""A transfer that takes so many times as long as expected shows that something has changed."""

_MOST_LATENCY = 15 / 16
_SLOWER, _FASTER = 1.0, 0.5  # weight of a new measurement that is slower, faster than what was known


class PrefillSample(NamedTuple):
    """One measured prefill: `tokens` tokens behind `begin` others took `seconds`."""

    begin: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds to compute the KV of tokens: a token at position n takes a + b·n (its share of the matrices, and
    attention over what is before it), a call `fixed_s` more.

    Attributes:
        a: seconds per token.
        b: seconds per token and position before it.
        fixed_s: seconds per call.

    Raises:
        ConfigError: a negative or not finite value, or all zero.
    """

    a: float
    b: float = 0.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        values = (self.a, self.b, self.fixed_s)
        if not all(0 <= value < math.inf for value in values) or not any(values):
            raise ConfigError(f"a prefill model of a={self.a}, b={self.b}, fixed_s={self.fixed_s} makes no sense")

    def seconds(self, begin: int, tokens: int) -> float:
        """Seconds to compute `tokens` tokens behind `begin` others: Σ a + b·n. 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + self.a * tokens + self.b * tokens * (begin + (tokens - 1) / 2)

    def tokens_per_s(self, position: int) -> float:
        """Speed at a position, without what a call costs."""
        cost = self.a + self.b * position
        return 1 / cost if cost > 0 else math.inf

    def scaled(self, factor: float) -> PrefillModel:
        """The model of a machine on which everything takes `factor` times as long."""
        return replace(self, a=self.a * factor, b=self.b * factor, fixed_s=self.fixed_s * factor)

    @classmethod
    def fit(cls, samples: Sequence[PrefillSample]) -> PrefillModel:
        """Least squares over relative errors, with a, b and `fixed_s` not negative.

        Relative: a prefill of 30 s must not drown one of 30 ms. Fewer than three samples give no `fixed_s`, one no b.

        Raises:
            ConfigError: no samples, or samples without tokens or time.
        """
        if not samples or any(s.tokens < 1 or s.begin < 0 or not 0 < s.seconds < math.inf for s in samples):
            raise ConfigError("a prefill model is fitted to measured prefills of at least one token and some time")
        rows = [
            (s.tokens / s.seconds, s.tokens * (s.begin + (s.tokens - 1) / 2) / s.seconds, 1 / s.seconds)
            for s in samples
        ]
        candidates: list[tuple[int, ...]] = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
        best: tuple[float, PrefillModel] | None = None
        for columns in candidates:  # the best of those whose solution is not negative is the solution
            if len(columns) > len(samples) or (2 in columns and len(samples) < 3):
                continue
            found = _least_squares([[row[c] for c in columns] for row in rows])
            if found is None or any(value < 0 for value in found) or not any(found):
                continue
            values = [0.0, 0.0, 0.0]
            for column, value in zip(columns, found, strict=True):
                values[column] = value
            error = sum((sum(v * r for v, r in zip(values, row, strict=True)) - 1) ** 2 for row in rows)
            if best is None or error < best[0] - 1e-12:
                best = error, cls(*values)
        if best is None:
            raise ConfigError("no prefill model fits these samples")
        return best[1]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x that minimises Σ (row·x - 1)², by the normal equations of scaled columns; None if they are singular."""
    width = len(rows[0])
    scale = [math.sqrt(sum(row[c] ** 2 for row in rows)) for c in range(width)]
    if not all(scale):
        return None
    matrix = [
        [sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) for j in range(width)]
        + [sum(r[i] for r in rows) / scale[i]]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(width):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [x - factor * y for x, y in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]


class Transfer:
    """One transfer under way on a `LinkShare`."""

    __slots__ = ("began", "most", "nbytes")

    def __init__(self, nbytes: int, began: float) -> None:
        self.nbytes = nbytes
        self.began = began
        self.most = 1  # transfers under way at once while it was


class LinkShare:
    """How fast one link is, and what each of the requests that share it gets. One for all streams over one link;
    thread-safe.

    Each transfer that ends is a measurement: its bytes over the time since the one before it ended (since it was asked
    for and the latency has passed, if the link was idle), and those of the last two together, whichever is slower. If
    more than two were under way, maybe side by side, those that end last seem to come in no time: then it is the bytes
    of the last so many together. A slower one counts at once, a faster one by half: to be too slow costs some quality,
    to be too fast costs the SLO.

    Args:
        bytes_per_s: the speed to begin with (a figure of `kvstore-bench io`, the last run's); None: not known.
        latency_s: seconds that a request waits before its first byte; None: learned from small requests.

    Attributes:
        latency_s: as known now.

    Raises:
        ConfigError: values that are none.
    """

    def __init__(self, bytes_per_s: float | None = None, *, latency_s: float | None = None) -> None:
        if bytes_per_s is not None and not 0 <= bytes_per_s < math.inf:
            raise ConfigError(f"a link of {bytes_per_s} bytes/s makes no sense")
        if latency_s is not None and not 0 <= latency_s < math.inf:
            raise ConfigError(f"a latency of {latency_s} s makes no sense")
        self.latency_s = latency_s or 0.0
        self._learns = latency_s is None
        self._lock = threading.Lock()
        self._total = bytes_per_s
        self._measured: deque[float] = deque(maxlen=_REMEMBERED)
        self._active: set[Transfer] = set()
        self._requests = 0
        self._gone: deque[None] = deque()  # streams that were dropped; counted out by whoever has the lock next
        self._busy_from = -math.inf  # when bytes could come at the earliest, after the link was idle
        self._ended = -math.inf  # when the last transfer ended
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # bytes and seconds of what has ended

    @property
    def bytes_per_s(self) -> float | None:
        """The speed of the whole link; None: nothing is known yet."""
        return self._total

    def slowest(self, share: float = 0.1) -> float | None:
        """The speed that all but this share of the last 64 measurements reached: for `Admission`. None: none yet."""
        with self._lock:
            ordered = sorted(self._measured)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    @property
    def requests(self) -> int:
        """How many streams use it."""
        return max(0, self._requests - len(self._gone))

    def answered(self, seconds: float) -> None:
        """A request for hardly any bytes took so long: the latency is not more. The least of them counts."""
        if self._learns and seconds >= 0:
            self.latency_s = min(seconds, self.latency_s or math.inf)

    def join(self) -> None:
        """One more stream uses the link."""
        with self._lock:
            self._requests += 1

    def leave(self) -> None:
        """One stream less."""
        with self._lock:
            while self._gone:
                self._gone.pop()
                self._requests -= 1
            self._requests = max(0, self._requests - 1)

    def left_unsaid(self) -> None:
        """One stream less: it was dropped. From a garbage collection: takes no lock, which this thread may hold."""
        self._gone.append(None)

    def begin(self, nbytes: int, now: float) -> Transfer:
        """A transfer of so many bytes was asked for."""
        with self._lock:
            if not self._active:
                self._busy_from = now + self.latency_s
            transfer = Transfer(nbytes, now)
            self._active.add(transfer)
            count = len(self._active)
            for each in self._active:
                each.most = max(each.most, count)
            return transfer

    def end(self, transfer: Transfer, now: float, *, nbytes: int | None = None) -> None:
        """A transfer has ended; `nbytes` have come (None: all; 0: it failed, and says nothing)."""
        with self._lock:
            if transfer not in self._active:
                return
            self._active.discard(transfer)
            came = transfer.nbytes if nbytes is None else nbytes
            # If the latency was less than it is said to be, not all of it is taken off.
            idle_end = min(self._busy_from, transfer.began + (now - transfer.began) * _MOST_LATENCY)
            seconds = now - max(self._ended, idle_end)
            if came > 0:
                self._measure(came, max(0.0, seconds), transfer.most)
            elif (slower := self._at_most(transfer, now, len(self._active) + 1)) is not None:
                # It was given up because it was overdue. If nothing else is known, too: else it would be begun anew.
                self._total = slower if self._total is None else min(self._total, slower)
            self._ended = now

    def _measure(self, nbytes: int, seconds: float, together: int) -> None:
        self._recent.append((nbytes, seconds))
        speeds = []
        for count in (1, 2) if together <= 2 else (together,):
            some = list(itertools.islice(reversed(self._recent), count))
            took = sum(each for _, each in some)
            if took > 0:
                speeds.append(sum(each for each, _ in some) / took)
        if not speeds:
            return
        speed = min(speeds)
        self._measured.append(speed)
        if self._total is None or self._total <= 0:
            self._total = speed
        else:
            weight = _SLOWER if speed < self._total else _FASTER
            self._total += weight * (speed - self._total)

    def share(self, now: float, *, mine: bool = True) -> float | None:
        """Bytes per second that one stream gets now; None: nothing is known.

        A transfer that is under way for longer than its bytes should take shows that the link is slower. Nobody knows
        when it will end; it is taken to need as long again as it has taken by now, as is one of which nothing is known.

        Args:
            mine: the one who asks is among `requests`.
        """
        with self._lock:
            total = self._total
            count = max(1, self._requests - len(self._gone) + (not mine))
            active = len(self._active)
            for transfer in self._active:
                slower = self._at_most(transfer, now, active)
                if slower is not None:
                    total = slower if total is None else min(total, slower)
            return None if total is None else total / count

    def overdue_at(self, transfer: Transfer, now: float) -> float:
        """When a transfer that is under way shows, or shows again, that the link is slower than it is said to be."""
        with self._lock:
            begun, expected = self._begun(transfer, len(self._active))
        due = begun + OVERDUE * expected
        return due if due > now else now + (OVERDUE - 1) * max(now - begun, 0.0)

    def _begun(self, transfer: Transfer, active: int) -> tuple[float, float]:
        """When a transfer's bytes began to come, and how long they should take."""
        begun = transfer.began + self.latency_s
        expected = transfer.nbytes * active / self._total if self._total else 0.0
        return max(begun, self._ended), expected  # it may have had to wait for those that were asked for before it

    def _at_most(self, transfer: Transfer, now: float, active: int) -> float | None:
        """The speed of the link that an overdue transfer speaks for; None: it is not overdue, or brings no bytes."""
        if transfer.nbytes <= 0:
            return None
        begun, expected = self._begun(transfer, active)
        passed = now - begun
        return transfer.nbytes * active / (2 * passed) if passed > OVERDUE * expected else None
