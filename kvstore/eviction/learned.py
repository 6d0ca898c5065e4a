"""The learned order: by how soon and how surely a record is used again."""

from __future__ import annotations

import time

from kvstore.errors import ConfigError

from .base import Clock, RecordInfo
from .chain import ChainPolicy, Queue, Record
from .reuse import Ghosts, ReuseModel, mix

__all__ = ["LearnedPolicy"]

_USE_CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5)  # class by number of uses after the first; more: below
_PARTIAL = 8
_STREAK = 16


def _class_of(uses: int) -> int:
    if uses < len(_USE_CLASSES):
        return _USE_CLASSES[uses]
    return 6 if uses < 32 else 7


class LearnedPolicy(ChainPolicy):
    """Lowest predicted reuse first, leaf-first. Learns while it runs; before it has learned, it is LRU.

    Classes are by the number of uses, with records that do not fill a chunk apart (the tail of a prompt is not seen
    again once the conversation goes on). A record that comes back soon after it was evicted has its uses again.
    Within a class the least recently used is the lowest. See `kvstore.eviction.reuse` for the model.

    Args:
        trust: how far the differences between classes are believed, 0 to 1; see `ReuseModel`.
        burst: seconds within which further uses count as one: of a `get` and the `put` that follows it, say.

    Raises:
        ConfigError: an argument out of range.
    """

    name = "learned"

    def __init__(self, *, trust: float = 0.5, burst: float = 1.0, clock: Clock = time.monotonic) -> None:
        if not 0 <= trust <= 1:
            raise ConfigError(f"trust must be from 0 to 1, not {trust}")
        if not burst >= 0:
            raise ConfigError(f"burst must be at least 0 seconds, not {burst}")
        super().__init__(clock=clock)
        self._burst = burst
        self._queues = [Queue(label) for label in range(_PARTIAL + 1)]
        self._model = ReuseModel(len(self._queues), trust=trust)
        self._ghosts = Ghosts()
        self._full = 0  # tokens of a whole chunk: the most seen
        self._best: Queue | None = None  # where the last victim came from,
        self._bar = 0.0  # … the score up to which the next may come from there,
        self._streak = 0  # … and how many may

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        mixed = mix(record.key)
        record.uses = uses = self._ghosts.recall(mixed)
        label = _class_of(uses)
        if info is not None and info.tokens:
            if info.tokens > self._full:
                self._full = info.tokens
            elif info.tokens < self._full and not uses:
                label = _PARTIAL
        self._model.used(mixed, record.last, label, len(self._records))
        self._append(record, self._queue_of(label, record, info))

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        self._use(record, self._clock())

    def _use(self, record: Record, now: float) -> None:
        if now - record.last < self._burst:
            self._append(record, record.queue)
            return
        record.uses += 1
        record.last = now
        label = _class_of(record.uses)
        self._model.used(mix(record.key), now, label, len(self._records))
        self._append(record, self._queue_of(label, record, None))

    def _gone(self, record: Record) -> None:
        self._ghosts.remember(mix(record.key), record.uses + 1, len(self._records) + 1)

    def _queue_of(self, label: int, record: Record, info: RecordInfo | None) -> Queue:
        """The queue for a class. `info` is None when a record was used."""
        return self._queues[label]

    def _score(self, queue: Queue, age: float) -> float:
        return self._model.score(queue.label, age)

    def _pick(self) -> Record | None:
        score, now = self._score, self._clock()
        queue = self._best
        if queue is not None and self._streak > 0:
            head = self._head(queue)
            if head is not None and score(queue, now - head.last) <= self._bar:
                self._streak -= 1
                return head
        best, lowest, second = None, float("inf"), float("inf")
        for queue in self._queues:
            if not queue.order and not queue.ready:
                continue
            head = self._head(queue)
            if head is None:
                continue
            value = score(queue, now - head.last)
            if value < lowest or (value == lowest and best is not None and head.last < best.last):
                best, lowest, second = head, value, lowest
            elif value < second:
                second = value
        if best is not None:
            self._best, self._bar, self._streak = best.queue, second, _STREAK
        return best
