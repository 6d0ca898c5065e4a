"""Value density: what a byte here saves, times how surely it is used again."""

from __future__ import annotations

import math
import time

from kvstore.errors import ConfigError

from .base import Clock, RecordInfo
from .chain import Queue, Record
from .learned import LearnedPolicy

__all__ = ["ValuePolicy", "prefill_seconds"]

_PER_DOUBLING = 2  # classes of density


def prefill_seconds(start: float, end: float, *, per_token: float, per_position: float) -> float:
    """Seconds to compute the KV of tokens [start, end) whose prefix is there: Σ (per_token + per_position·p).

    The first term is the weights' share, the second attention to all that comes before: C_prefill = O((Σnᵢ)²).
    """
    return per_token * (end - start) + per_position * (end * end - start * start) / 2


class _Density(Queue):
    __slots__ = ("seconds",)

    def __init__(self, label: int, seconds: float) -> None:
        super().__init__(label)
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
        trust, burst: see `LearnedPolicy`.
    """

    name = "value"

    def __init__(
        self,
        *,
        bandwidth: float | None = None,
        per_token: float = 40e-6,
        per_position: float = 1.3e-9,
        trust: float = 0.5,
        burst: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(trust=trust, burst=burst, clock=clock)
        if not per_token > 0 or not per_position >= 0:
            raise ConfigError(f"per_token must be more than 0 and per_position not less: {per_token}, {per_position}")
        self._queues = []
        self._by_class: dict[tuple[int, int], _Density] = {}
        self._per_token, self._per_position = per_token, per_position
        self._mean, self._seen = 0.0, 0  # density
        self._load = 0.0
        if bandwidth is not None:
            self.measured(bandwidth)
        self._queues.append(self._density_queue(0, 0))  # where `admit` lets a record begin

    def measured(self, bandwidth: float) -> None:
        """The bandwidth of the tier, bytes/s, as measured by now. Raises `ConfigError` unless more than 0."""
        if not bandwidth > 0:
            raise ConfigError(f"bandwidth must be more than 0 bytes/s, not {bandwidth}")
        self._load = 1.0 / bandwidth

    def _density_queue(self, label: int, place: int) -> _Density:
        queue = self._by_class.get((label, place))
        if queue is None:
            queue = self._by_class[label, place] = _Density(label, 2.0 ** (place / _PER_DOUBLING))
            if self._queues:
                self._queues.append(queue)
        return queue

    def _queue_of(self, label: int, record: Record, info: RecordInfo | None) -> Queue:
        if info is not None and info.tokens and record.nbytes > 0:
            seconds = prefill_seconds(
                info.start, info.start + info.tokens, per_token=self._per_token, per_position=self._per_position
            )
            density = seconds / record.nbytes
            self._seen = min(self._seen + 1, 4096)
            self._mean += (density - self._mean) / self._seen
        elif record.number < 0:  # new, and nothing is known of it
            density = self._mean or 1.0
        else:
            assert isinstance(record.queue, _Density)
            density = record.queue.seconds
        return self._density_queue(label, round(_PER_DOUBLING * math.log2(density)))

    def _score(self, queue: Queue, age: float) -> float:
        assert isinstance(queue, _Density)
        saved = queue.seconds - self._load
        if saved <= 0:  # still in order of age, and before all others
            saved = 1e-9 * queue.seconds
        return self._model.score(queue.label, age) * saved
