"""The seam: what a policy is told and what it is asked. Owners and policies know nothing else of each other."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from kvstore.keys import Key

__all__ = ["Clock", "EvictionPolicy", "RecordInfo"]

Clock = Callable[[], float]
"""Seconds that only grow; replays inject a virtual one."""


class RecordInfo(NamedTuple):
    """What is known of a record beyond its size. Every field may be unknown; a policy does without.

    Attributes:
        start: tokens before its first token in its prefix.
        tokens: tokens in it; 0: unknown.
        session: id of the conversation it belongs to; None: unknown.
        turns: turns that this conversation has had; 0: unknown.
        ttl: seconds it may lie unused; None: the policy's default.
    """

    start: int = 0
    tokens: int = 0
    session: str | None = None
    turns: int = 0
    ttl: float | None = None


class EvictionPolicy(ABC):
    """Decides the order in which records go. Not thread-safe: its owner calls it under a lock.

    `len(policy)` and `key in policy` tell what it knows, `nbytes` the sum of the sizes.

    Args:
        clock: seconds that only grow.
    """

    name: ClassVar[str]

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._pins: dict[Key, int] = {}

    @abstractmethod
    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None, info: RecordInfo | None = None) -> None:
        """A record is there; it is now the newest. Admitting it again refreshes it and replaces `nbytes`.

        Args:
            nbytes: what it occupies, in bytes.
            parent: key of the chunk before it in its prefix; None: unknown (a parent known before stays).
            info: what else is known; None: nothing new (what was known before stays).
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

    def expired(self) -> Iterator[Key]:
        """Records whose time to live is over now, children before parents. Like `victims`, but not because room is
        needed: an owner asks now and then and removes them. Pinned records and those they hang on are not among them.
        A policy that knows no time to live has none."""
        return iter(())

    @property
    def expires(self) -> bool:
        """Whether `expired` can name any at all."""
        return type(self).expired is not EvictionPolicy.expired

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """The scheduler's waiting queue, first to run first: the keys of each job in prefix order. Replaces what was
        announced before; an empty one ends it. A policy that does not look ahead ignores it."""
        return

    def pin(self, keys: Iterable[Key]) -> None:
        """Never offer these as victims, nor the records they hang on, until `unpin`. Counted: as many `unpin` as `pin`.
        A key that is not resident is pinned as soon as it is; a pin outlives `forget`."""
        pins = self._pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """Take one pin from each. A key that has none is ignored."""
        pins = self._pins
        for key in keys:
            count = pins.get(key, 0)
            if count > 1:
                pins[key] = count - 1
            elif count:
                del pins[key]
                self._unpinned(key)

    def _unpinned(self, key: Key) -> None:
        """The last pin of `key` has gone."""
        return

    def links(self) -> list[tuple[Key, Key]]:
        """(record, its parent) of the resident records that name one. A policy that knows no parents has none."""
        return []

    @abstractmethod
    def size_of(self, key: Key) -> int:
        """Bytes of a record, 0 if it is unknown."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Sum of the sizes of all records, in bytes."""
