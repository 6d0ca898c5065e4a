"""What goes first when a place is full. The only eviction policies: memory, file, node and tiers use them.

A policy keeps the order, not the records: its owner tells it what came (`admit`), what was used (`touch`) and what
went (`forget`), and asks for `victims` when it needs room. It takes no lock; the owner calls it under its own.

Prefix chains. Without its head the tail of a prefix is worthless, so heads must outlive tails:

* Where the owner knows the preceding chunk (`admit(parent=…)`), no record is a victim while a record that names it
  as parent is resident, however old it is (leaf-first, as SGLang's radix cache does it; Zheng et al., 2024). That
  holds also if the heads are served from a faster tier, so that only tails are ever touched here.
* Within one `touch` the head ends up the most recent, so plain recency takes tails first. An owner that stores a batch
  admits each record and then touches the batch.

Cost: a few dictionary operations per call, whatever the number of records and the length of chains; nothing
recurses. Parents may come after their children, go before them, or never come.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import ClassVar

from .errors import ConfigError
from .keys import Key

__all__ = ["POLICIES", "EvictionPolicy", "FIFOPolicy", "KeepPolicy", "LRUPolicy", "make_policy"]


class EvictionPolicy(ABC):
    """Decides the order in which records go. Not thread-safe: its owner calls it under a lock.

    `len(policy)` and `key in policy` tell what it knows, `nbytes` the sum of the sizes.
    """

    name: ClassVar[str]

    @abstractmethod
    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None) -> None:
        """A record is there; it is now the newest. Admitting it again refreshes it and replaces `nbytes`.

        Args:
            nbytes: what it occupies, in bytes.
            parent: key of the chunk before it in its prefix; None: unknown (a parent known before stays).
        """

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """Records were used together, given in prefix order (head first). Afterwards they are the newest, and the
        head is newer than the tail. Unknown keys are ignored."""

    @abstractmethod
    def forget(self, key: Key) -> int:
        """A record is gone. Returns the bytes it had, 0 if it was unknown."""

    @abstractmethod
    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        """Records in the order in which they should go.

        The owner removes what it is given and calls `forget`, until it has enough room. It may as well call any other
        method meanwhile. A victim that cannot be removed is left as it is, and the owner goes on: it is not offered
        again by this iterator, and it goes on protecting its parents until nothing else is left.

        Args:
            keep: records that must not go now, for instance those being stored; nor will their parents.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Sum of the sizes of all records, in bytes."""


class LRUPolicy(EvictionPolicy):
    """Least recently used first, among the records that no resident record names as its parent.

    `_order` holds the records by recency. A walk (`victims`) takes them from its old end. What it passes, because
    children protect it or because it is a victim, moves to `_passed` with a running number, so that no later walk
    passes it again: everything in `_passed` is older than everything in `_order`, and the numbers have the order of
    age. When the last child of a passed record goes, the record joins `_ready`, a heap by that number.
    """

    name = "lru"
    _refresh = True  # whether use makes a record new again

    def __init__(self) -> None:
        self._order: OrderedDict[Key, int] = OrderedDict()  # bytes, oldest first
        self._passed: dict[Key, tuple[int, int]] = {}  # (number, bytes)
        self._ready: list[tuple[int, Key]] = []  # may hold outdated entries
        self._parent: dict[Key, Key] = {}  # of resident records
        self._children: dict[Key, int] = {}  # how many resident records name this key, resident or not, as parent
        self._number = 0
        self._nbytes = 0

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None) -> None:
        order = self._order
        known = order.get(key)
        if known is not None:
            if self._refresh:
                order.move_to_end(key)
            order[key] = nbytes
            self._nbytes -= known
        elif (entry := self._passed.get(key)) is not None:
            if self._refresh:
                del self._passed[key]
                order[key] = nbytes
            else:
                self._passed[key] = (entry[0], nbytes)
            self._nbytes -= entry[1]
        else:
            order[key] = nbytes
        self._nbytes += nbytes
        if parent is not None and parent != key:
            self._link(key, parent)

    def touch(self, keys: Sequence[Key]) -> None:
        if not self._refresh:
            return
        move = self._order.move_to_end
        for key in reversed(keys):
            try:
                move(key)
            except KeyError:
                entry = self._passed.pop(key, None)
                if entry is not None:
                    self._order[key] = entry[1]

    def forget(self, key: Key) -> int:
        nbytes = self._order.pop(key, None)
        if nbytes is None:
            entry = self._passed.pop(key, None)
            if entry is None:
                return 0
            nbytes = entry[1]
        self._nbytes -= nbytes
        self._unlink(key)
        return nbytes

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        held: dict[Key, int] = {}  # passed by this walk and left here: key -> number
        offered: list[Key] = []  # those of `held` that protect their parents although the owner let them be
        try:
            while True:
                item = self._next()
                if item is None:
                    # Only parents are left: of victims that could not be removed, or of each other.
                    if offered:
                        for key in offered:
                            if self._is(key, held.get(key)):
                                self._unlink(key)
                        offered.clear()
                    elif not self._break_cycles():
                        return
                    continue
                number, key = item
                again = key in held
                held[key] = number
                if again or key in keep:
                    continue
                yield key
                if key in self:
                    offered.append(key)
                else:
                    del held[key]
        finally:
            for key, number in held.items():
                if self._is(key, number):
                    self._make_ready(number, key)

    def _next(self) -> tuple[int, Key] | None:
        """The next record without children, after moving it to `_passed`; None if there is none."""
        ready, children, order = self._ready, self._children, self._order
        while ready:
            number, key = heapq.heappop(ready)
            if self._is(key, number) and key not in children:
                return number, key
        while order:
            key, nbytes = order.popitem(last=False)
            self._number += 1
            self._passed[key] = (self._number, nbytes)
            if key not in children:
                return self._number, key
        return None

    def _is(self, key: Key, number: int | None) -> bool:
        """Whether `key` is still what it was when it was passed under `number`: not gone, not used since."""
        entry = self._passed.get(key)
        return entry is not None and entry[0] == number

    def _make_ready(self, number: int, key: Key) -> None:
        if len(self._ready) > 2 * len(self._passed) + 64:  # mostly outdated
            self._ready = [item for item in set(self._ready) if self._is(item[1], item[0])]
            heapq.heapify(self._ready)
        heapq.heappush(self._ready, (number, key))

    def _link(self, key: Key, parent: Key) -> None:
        if self._parent.get(key) != parent:
            self._unlink(key)
            self._parent[key] = parent
            self._children[parent] = self._children.get(parent, 0) + 1

    def _unlink(self, key: Key) -> None:
        parent = self._parent.pop(key, None)
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        entry = self._passed.get(parent)
        if entry is not None:
            self._make_ready(entry[0], parent)

    def _break_cycles(self) -> bool:
        """In each circle of parents (malformed hints) let the oldest record go first. False if there was none.
        Called when every record has been passed."""
        passed, parent_of = self._passed, self._parent
        seen: dict[Key, Key] = {}  # where the search that came by began
        cut: list[Key] = []
        for start in passed:
            key: Key | None = start
            while key is not None and key in passed and key not in seen:
                seen[key] = start
                key = parent_of.get(key)
            if key is None or seen.get(key) != start or key not in passed:
                continue
            # `key` lies on a circle that was not seen before: find its oldest member, and who names that as parent.
            child, oldest = key, parent_of[key]
            member = oldest
            while member != key:
                above = parent_of[member]
                if passed[above][0] < passed[oldest][0]:
                    child, oldest = member, above
                member = above
            cut.append(child)
        for child in cut:
            self._unlink(child)
        return bool(cut)

    def __contains__(self, key: object) -> bool:
        return key in self._order or key in self._passed

    def __len__(self) -> int:
        return len(self._order) + len(self._passed)

    @property
    def nbytes(self) -> int:
        return self._nbytes


class FIFOPolicy(LRUPolicy):
    """First in, first out, among the records that no resident record names as its parent. Use changes nothing."""

    name = "fifo"
    _refresh = False


class KeepPolicy(EvictionPolicy):
    """Nothing is ever evicted: a full place refuses new records."""

    name = "none"

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._nbytes = 0

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None) -> None:
        self._nbytes += nbytes - self._sizes.get(key, 0)
        self._sizes[key] = nbytes

    def touch(self, keys: Sequence[Key]) -> None:
        return

    def forget(self, key: Key) -> int:
        nbytes = self._sizes.pop(key, 0)
        self._nbytes -= nbytes
        return nbytes

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        return iter(())

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        return self._nbytes


POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRUPolicy, FIFOPolicy, KeepPolicy)}
"""Policies by the name they have in options. A further policy is one class and one entry here."""


def make_policy(name: str) -> EvictionPolicy:
    """A new, empty policy.

    Raises:
        ConfigError: no policy has that name; names the choices.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown eviction policy {name!r}; choices: {', '.join(POLICIES)}")
    return policy()
