"""The learned order: by how soon and how surely a record is used again."""

from __future__ import annotations

import time

from kvstore.errors import ConfigError

from .base import Clock, RecordInfo
from .chain import ChainPolicy, Queue, Record
from .reuse import Ghosts, ReuseModel, mix

__all__ = ["PARTIAL", "LearnedPolicy"]

_USE_CLASSES = (0, 1, 2, 3, 4, 4, 5, 5, 5)  # class by number of uses after the first; more: below
PARTIAL = 8
_STREAK = 16


def _class_of(uses: int) -> int:
    if uses < len(_USE_CLASSES):
        return _USE_CLASSES[uses]
    return 6 if uses < 32 else 7


class LearnedPolicy(ChainPolicy):
    """Lowest predicted reuse first, leaf-first. Learns while it runs; before it has learned, it is LRU.

    Classes are by the number of uses, with records that do not fill a chunk apart (the tail of a prompt is not seen
    again once the conversation goes on). A record that comes back soon after it was evicted has its uses again.
    Within a class the least recently used is the lowest. In a place so large that the oldest have lain for longer than
    99 % of all reuse takes, it is LRU. See `kvstore.eviction.reuse` for the model.

    Args:
        trust: how far the differences between classes are believed, 0 to 1; see `ReuseModel`.
        burst: seconds within which further uses count as one: of a `get` and the `put` that follows it, say.

    Raises:
        ConfigError: an argument out of range.
    """

    name = "learned"

    def __init__(self, *, trust: float = 0.7, burst: float = 1.0, clock: Clock = time.monotonic) -> None:
        if not 0 <= trust <= 1:
            raise ConfigError(f"trust must be from 0 to 1, not {trust}")
        if not burst >= 0:
            raise ConfigError(f"burst must be at least 0 seconds, not {burst}")
        super().__init__(clock=clock)
        self._burst = burst
        self._queues = [Queue(label) for label in range(PARTIAL + 1)]
        self._model = ReuseModel(len(self._queues), trust=trust)
        self._ghosts = Ghosts()
        self._full = 0  # tokens of a whole chunk: the most seen
        # Records of one request are alike: where the last victim came from, up to which last use the next may come from
        # there without looking elsewhere, and how many may.
        self._best: Queue | None = None
        self._until, self._streak = 0.0, 0

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        mixed = mix(record.key)
        record.uses = uses = self._ghosts.recall(mixed)
        label = _class_of(uses)
        if info is not None and info.tokens:
            if info.tokens > self._full:
                self._full = info.tokens
            elif info.tokens < self._full and not uses:
                label = PARTIAL
        queue = self._queue_of(label, record, info)
        if not mixed & self._model.select:
            self._model.used(mixed, record.last, queue.label, len(self._records))
        self._append(record, queue)

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        self._use(record, self._clock())

    def _use(self, record: Record, now: float) -> None:
        if now - record.last < self._burst:
            self._append(record, record.queue)
            return
        record.uses += 1
        record.last = now
        queue = self._queue_of(_class_of(record.uses), record, None)
        mixed = mix(record.key)
        if not mixed & self._model.select:
            self._model.used(mixed, now, queue.label, len(self._records))
        self._append(record, queue)

    def _gone(self, record: Record) -> None:
        self._ghosts.remember(mix(record.key), record.uses + 1, len(self._records) + 1)

    def _make_ready(self, record: Record) -> None:
        super()._make_ready(record)
        if record.queue is not self._best:
            self._streak = 0  # it may be lower than what was compared

    def _queue_of(self, label: int, record: Record, info: RecordInfo | None) -> Queue:
        """The queue for a class. `info` is None when a record was used."""
        return self._queues[label]

    def _pick(self) -> Record | None:
        queue = self._best
        if queue is not None and self._streak > 0:
            head = self._head(queue)
            if head is not None and head.last <= self._until:
                self._streak -= 1
                return head
        score, now = self._model.score, self._clock()
        best, lowest = None, float("inf")
        oldest, next_oldest = None, float("inf")
        for queue in self._queues:
            if not queue.order and not queue.ready:
                continue
            head = self._head(queue)
            if head is None:
                continue
            last = head.last
            if oldest is None or last < oldest.last:
                next_oldest = next_oldest if oldest is None else oldest.last
                oldest = head
            elif last < next_oldest:
                next_oldest = last
            value = score(queue.label, now - last) * queue.weight
            if value < lowest or (value == lowest and best is not None and last < best.last):
                best, lowest = head, value
        if oldest is None or best is None:
            return None
        # Where the oldest have lain for longer than nearly all reuse takes, there is nothing left to tell apart.
        horizon = now - self._model.horizon
        if oldest.last < horizon:
            best, self._until = oldest, min(next_oldest, horizon)
        else:
            self._until = best.last
        self._best, self._streak = best.queue, _STREAK
        return best
