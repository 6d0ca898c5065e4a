"""Value density: what a byte here saves, times how surely it is used again."""

from __future__ import annotations

import bisect
import math
import time

from kvstore.errors import ConfigError

from .base import Clock, RecordInfo
from .chain import Queue, Record
from .learned import PARTIAL, LearnedPolicy
from .reuse import ReuseModel

__all__ = ["ValuePolicy", "prefill_seconds"]

_PER_DOUBLING = 2  # classes of density
_PLACES = (0, 4096, 16384, 32768)  # classes of position: long prompts come back less often


def prefill_seconds(start: float, end: float, *, per_token: float, per_position: float) -> float:
    """Seconds to compute the KV of tokens [start, end) whose prefix is there: Σ (per_token + per_position·p).

    The first term is the weights' share, the second attention to all that comes before: C_prefill = O((Σnᵢ)²).
    """
    return per_token * (end - start) + per_position * (end * end - start * start) / 2


class _Density(Queue):
    __slots__ = ("place", "seconds")

    def __init__(self, label: int, place: int, seconds: float) -> None:
        super().__init__(label)
        self.place = place  # class of position
        self.seconds = seconds  # of prefill per byte


class ValuePolicy(LearnedPolicy):
    """Lowest (seconds saved per byte) x (predicted reuse) first, leaf-first, so heads stay as long as their tails.

    Saved is what prefill would take for the record less what loading takes at this tier's bandwidth; a record that
    loads no faster than it is computed is worth nothing and goes first. Where `RecordInfo` is missing, a byte counts
    as much as the mean of the others. Reuse is predicted as in `LearnedPolicy`.

    Args:
        bandwidth: bytes/s at which this tier is read; None: loading is free. `measured` replaces it while running.
        per_token: seconds of prefill per token, whatever is before it.
        per_position: more seconds per token for each token before it. The defaults are an 8-billion-parameter model
            (16.1e9 and 0.52e6 operations) at 400e12 operations per second; only their ratio matters without bandwidth.
        trust: as in `LearnedPolicy`, but 1: what differs between classes is what this policy lives on.
        burst: see `LearnedPolicy`.
    """

    name = "value"

    def __init__(
        self,
        *,
        bandwidth: float | None = None,
        per_token: float = 40e-6,
        per_position: float = 1.3e-9,
        trust: float = 1.0,
        burst: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(trust=trust, burst=burst, clock=clock)
        if not per_token > 0 or not per_position >= 0:
            raise ConfigError(f"per_token must be more than 0 and per_position not less: {per_token}, {per_position}")
        self._queues = []
        self._by_class: dict[tuple[int, int, int], _Density] = {}
        self._model = ReuseModel((PARTIAL + 1) * len(_PLACES), trust=trust)
        self._per_token, self._per_position = per_token, per_position
        self._mean, self._seen = 0.0, 0  # density
        self._load = 0.0
        if bandwidth is not None:
            self.measured(bandwidth)
        self._density_queue(0, 0, 0)  # where `admit` lets a record begin

    def measured(self, bandwidth: float) -> None:
        """The bandwidth of the tier, bytes/s, as measured by now. Raises `ConfigError` unless more than 0."""
        if not bandwidth > 0:
            raise ConfigError(f"bandwidth must be more than 0 bytes/s, not {bandwidth}")
        self._load = 1.0 / bandwidth
        self._streak = 0
        for queue in self._by_class.values():
            self._weigh(queue)

    def _density_queue(self, label: int, place: int, density: int) -> _Density:
        queue = self._by_class.get((label, place, density))
        if queue is None:
            queue = _Density(label * len(_PLACES) + place, place, 2.0 ** (density / _PER_DOUBLING))
            self._by_class[label, place, density] = queue
            self._weigh(queue)
            self._queues.append(queue)
        return queue

    def _queue_of(self, label: int, record: Record, info: RecordInfo | None) -> Queue:
        place = 0
        if info is not None and info.tokens and record.nbytes > 0:
            seconds = prefill_seconds(
                info.start, info.start + info.tokens, per_token=self._per_token, per_position=self._per_position
            )
            density = seconds / record.nbytes
            self._seen = min(self._seen + 1, 4096)
            self._mean += (density - self._mean) / self._seen
            place = bisect.bisect_right(_PLACES, info.start) - 1
        elif record.number < 0:  # new, and nothing is known of it
            density = self._mean or 1.0
        else:
            assert isinstance(record.queue, _Density)
            density, place = record.queue.seconds, record.queue.place
        return self._density_queue(label, place, round(_PER_DOUBLING * math.log2(density)))

    def _weigh(self, queue: _Density) -> None:
        saved = queue.seconds - self._load
        queue.weight = saved if saved > 0 else 1e-9 * queue.seconds  # in order of age, and before all others
