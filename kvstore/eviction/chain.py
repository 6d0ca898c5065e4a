"""Leaf-first along prefix chains, for any order: the part that all policies with an order share."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence

from kvstore.keys import Key

from .base import Clock, EvictionPolicy, RecordInfo

__all__ = ["ChainPolicy", "Queue", "Record"]


class Record:
    """What a policy keeps of a resident record.

    Attributes:
        parent: the record before it in its prefix, resident or not.
        children: how many resident records name this one as parent.
        queue: where it stands.
        number: 0: in `queue.order`; else it has been passed, under this running number.
        last: when it was used last, on the policy's clock.
        uses: what the policy counts.
    """

    __slots__ = ("children", "key", "last", "nbytes", "number", "parent", "queue", "uses")

    def __init__(self, key: Key, nbytes: int, children: int, last: float, queue: Queue) -> None:
        self.key = key
        self.nbytes = nbytes
        self.parent: Key | None = None
        self.children = children
        self.queue = queue
        self.number = 0
        self.last = last
        self.uses = 0


class Queue:
    """Records in the order in which they go.

    A walk takes from the old end of `order`. What it passes, because children or pins protect it or because it is a
    victim, leaves `order` for good, with a running number, so that no later walk passes it again: all that was passed
    is older than all in `order`, and the numbers have the order of age. When nothing protects a passed record any more,
    it joins `ready`, a heap by that number (which may hold outdated entries).
    """

    __slots__ = ("label", "order", "ready", "weight")

    def __init__(self, label: int = 0) -> None:
        self.label = label  # what the policy calls it
        self.weight = 1.0  # … and what it makes of it
        self.order: OrderedDict[Key, Record] = OrderedDict()
        self.ready: list[tuple[int, Key]] = []


class ChainPolicy(EvictionPolicy):
    """Keeps the records, their parents and the queues. A subclass says which queue a record joins (`_arrive`), what use
    does (`_use`), and from which queue the next victim comes (`_pick`). This class as it is: one queue, by recency."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._records: dict[Key, Record] = {}
        self._orphans: dict[Key, int] = {}  # absent parents: how many resident records name them
        self._queues: list[Queue] = [Queue()]
        self._number = 0
        self._nbytes = 0

    # What a policy decides.

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        """A new record: put it into a queue."""
        self._append(record, self._queues[0])

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        """A known record was admitted again."""
        self._use(record, self._clock())

    def _use(self, record: Record, now: float) -> None:
        """A record was used."""
        record.last = now
        self._append(record, record.queue)

    def _pick(self) -> Record | None:
        """The record to go next: the `_head` of some queue; None if no queue has one."""
        return self._head(self._queues[0])

    def _gone(self, record: Record) -> None:
        """A record was forgotten."""
        return

    # What owners call.

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None, info: RecordInfo | None = None) -> None:
        record = self._records.get(key)
        if record is None:
            record = Record(key, nbytes, self._orphans.pop(key, 0), self._clock(), self._queues[0])
            record.number = -1  # in no queue yet
            self._records[key] = record
            self._nbytes += nbytes
            if parent is not None and parent != key:
                self._link(record, parent)
            self._arrive(record, info)
        else:
            self._nbytes += nbytes - record.nbytes
            record.nbytes = nbytes
            self._again(record, info)
            if parent is not None and parent not in (key, record.parent):
                self._unlink(record)
                self._link(record, parent)

    def touch(self, keys: Sequence[Key]) -> None:
        get, use, now = self._records.get, self._use, self._clock()
        for key in reversed(keys):
            record = get(key)
            if record is not None:
                use(record, now)

    def forget(self, key: Key) -> int:
        record = self._records.pop(key, None)
        if record is None:
            return 0
        if not record.number:
            del record.queue.order[key]
        record.number = -1
        self._nbytes -= record.nbytes
        if record.children:
            self._orphans[key] = record.children
        self._unlink(record)
        self._gone(record)
        return record.nbytes

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        return self._walk(self._pick, keep, all_of_them=True)

    def _walk(self, pick: Callable[[], Record | None], keep: Container[Key], *, all_of_them: bool) -> Iterator[Key]:
        """Offer what `pick` says until it has nothing more. `all_of_them`: then also the parents of what could not be
        removed, and circles."""
        records, pins = self._records, self._pins
        held: dict[Key, int] = {}  # passed by this walk and left here: key -> number
        cut: list[tuple[Record, Key]] = []  # child and parent, until the walk ends
        offered: list[Key] = []  # those of `held` that protect their parents although the owner let them be
        try:
            while True:
                record = pick()
                if record is None:
                    if not all_of_them:
                        return
                    # Only parents are left: of victims that could not be removed, or of each other.
                    if offered:
                        for key in offered:
                            if key not in pins and self._is(key, held.get(key)):
                                record = records[key]
                                if record.parent is not None:
                                    cut.append((record, record.parent))
                                    self._unlink(record)
                        offered.clear()
                    elif not self._break_cycles():
                        return
                    continue
                self._take(record)
                key = record.key
                again = key in held
                held[key] = record.number
                if again or key in keep:
                    continue
                yield key
                if key in records:
                    offered.append(key)
                else:
                    del held[key]
        finally:
            for record, parent in cut:
                if record.parent is None and records.get(record.key) is record:
                    self._link(record, parent)
            for key, number in held.items():
                if self._is(key, number):
                    self._make_ready(records[key])

    def links(self) -> list[tuple[Key, Key]]:
        return [(key, record.parent) for key, record in self._records.items() if record.parent is not None]

    # Queues.

    def _append(self, record: Record, queue: Queue) -> None:
        """Make it the newest of a queue, wherever it was."""
        if record.number:
            record.number = 0
            record.queue = queue
            queue.order[record.key] = record
        elif record.queue is queue:
            queue.order.move_to_end(record.key)
        else:
            del record.queue.order[record.key]
            record.queue = queue
            queue.order[record.key] = record

    def _head(self, queue: Queue) -> Record | None:
        """The oldest record of a queue that nothing protects; it stays where it is."""
        records, pins, ready = self._records, self._pins, queue.ready
        while ready:
            number, key = ready[0]
            record = records.get(key)
            if (
                record is not None and record.number == number and record.queue is queue
                and not record.children and key not in pins
            ):  # fmt: skip
                return record
            heapq.heappop(ready)
        order = queue.order
        while order:
            key = next(iter(order))
            record = order[key]
            if not record.children and key not in pins:
                return record
            self._pass(record)
        return None

    def _take(self, record: Record) -> None:
        """Take the head of its queue out of it."""
        if record.number:
            heapq.heappop(record.queue.ready)
        else:
            self._pass(record)

    def _pass(self, record: Record) -> None:
        del record.queue.order[record.key]
        self._number += 1
        record.number = self._number

    def _is(self, key: Key, number: int | None) -> bool:
        """Whether `key` is still what it was when it was passed under `number`: not gone, not used since."""
        record = self._records.get(key)
        return record is not None and record.number == number

    def _make_ready(self, record: Record) -> None:
        ready = record.queue.ready
        if len(ready) > 2 * len(self._records) + 64:  # mostly outdated
            ready[:] = [item for item in set(ready) if self._is(item[1], item[0])]
            heapq.heapify(ready)
        heapq.heappush(ready, (record.number, record.key))

    def _unpinned(self, key: Key) -> None:
        record = self._records.get(key)
        if record is not None and record.number > 0 and not record.children:
            self._make_ready(record)

    # Chains.

    def _link(self, record: Record, parent: Key) -> None:
        record.parent = parent
        above = self._records.get(parent)
        if above is None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        else:
            above.children += 1

    def _unlink(self, record: Record) -> None:
        parent = record.parent
        if parent is None:
            return
        record.parent = None
        above = self._records.get(parent)
        if above is not None:
            above.children -= 1
            if not above.children:
                self._freed(above)
        elif (left := self._orphans[parent] - 1) > 0:
            self._orphans[parent] = left
        else:
            del self._orphans[parent]

    def _freed(self, record: Record) -> None:
        """The last child of a record has gone."""
        if record.number > 0:
            self._make_ready(record)

    def _break_cycles(self) -> bool:
        """In each circle of parents (malformed hints) without a pin let the oldest record go first. False if there was
        none. Called when every record has been passed."""
        records, pins = self._records, self._pins
        seen: dict[Key, Key] = {}  # where the search that came by began
        cut: list[Record] = []
        for start in records:
            key: Key | None = start
            while key is not None and key in records and key not in seen:
                seen[key] = start
                key = records[key].parent
            if key is None or seen.get(key) != start or key not in records:
                continue
            # `key` lies on a circle that was not seen before: find its oldest member, and who names that as parent.
            circle = [records[key]]
            while (parent := circle[-1].parent) != key:
                assert parent is not None  # a circle
                circle.append(records[parent])
            if any(member.key in pins for member in circle):
                continue
            oldest = min(range(len(circle)), key=lambda place: circle[place].number)
            cut.append(circle[oldest - 1])
        for child in cut:
            self._unlink(child)
        return bool(cut)

    def size_of(self, key: Key) -> int:
        record = self._records.get(key)
        return 0 if record is None else record.nbytes

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        return self._nbytes
