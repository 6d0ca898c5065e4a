"""`Index`: which instance has which record in which tier, as far as they reported. What a controller remembers.

A record is one entry of a dict: its 32-byte key, and a number whose bits say who has it. Every instance has a *slot* of
`TIERS` neighbouring bits, one for each of its tiers, so a prefix common to all holders is a few ANDs. Dicts are split
in 256 by the first byte of the key: none of them is ever large enough for its growth to be felt. That is 120 bytes per
record (measured: tests/bench/bench_control.py), whatever the number of instances up to fifteen, and a byte more for
every two further ones.

An instance that leaves, or tells all it has anew, gives up its slot at once: its bits do not count any more, and
`sweep` takes them out bit by bit. Then the slot is free. Not thread-safe: a controller uses it from one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.errors import ConfigError

__all__ = ["TIERS", "Holding", "Index"]

TIERS = 4
"""Tiers of an instance that are told apart; further ones count as the last."""

_SHARDS = 256
_SAME_MOST = 1 << 16
_NOTHING: dict[bytes, int] = {}  # every shard that has no records: a namespace with few costs little


class Holding(NamedTuple):
    """A leading part of a prompt that one slot holds.

    Attributes:
        slot: as `Index.open` gave it.
        tiers: for each leading chunk that it has, the number of its fastest tier.
    """

    slot: int
    tiers: Sequence[int]


class _Space:
    """The records of one namespace."""

    __slots__ = ("count", "next", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[bytes, int]] = [_NOTHING] * _SHARDS
        self.count = 0
        self.next = 0  # shard from which the next ones are dropped for want of room


class Index:
    """Records by namespace, and who has them.

    Args:
        capacity: records that are remembered. Of more than that, the oldest of the namespace that has most are
            forgotten; they are then found again by nobody until an instance reports them anew.

    Attributes:
        dropped: records that were forgotten for want of room.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity: int = 16 << 20) -> None:
        if capacity < 1:
            raise ConfigError(f"an index of {capacity} records; give it room for at least 1")
        self._capacity = capacity
        self._spaces: dict[str, _Space] = {}
        self._live = 0  # bits of slots in use
        self._opened: set[int] = set()
        self._dying: set[int] = set()  # given up; their bits may still be in the records
        self._sweeping: Iterator[int] | None = None
        self._same: dict[int, int] = {}  # equal numbers are one object
        self._counts: dict[int, dict[str, int]] = {}  # by slot and namespace
        self._total = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._total

    # Slots.

    def open(self) -> int:
        """A slot for an instance; it has nothing yet."""
        slot = next(n for n in itertools.count() if n not in self._opened and n not in self._dying)
        self._opened.add(slot)
        self._counts[slot] = {}
        self._live |= _bits(slot)
        return slot

    def retire(self, slot: int) -> None:
        """Its instance has left: what it had is found no more, from now on."""
        if slot not in self._opened:
            return
        self._opened.discard(slot)
        del self._counts[slot]
        self._live &= ~_bits(slot)
        self._dying.add(slot)

    # Records.

    def admit(self, slot: int, namespace: str, tier: int, keys: Sequence[bytes]) -> None:
        """Records are in a tier now."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = _Space()
        bit, bits = _bit(slot, tier), _bits(slot)
        shards, same = space.shards, self._same
        fresh = own = 0
        for key in keys:
            shard = shards[key[0]]
            found = shard.get(key)
            if found is None:
                if shard is _NOTHING:
                    shard = shards[key[0]] = {}
                fresh += 1
                found = 0
            if not found & bits:
                own += 1
            mask = found | bit
            shard[key] = same.setdefault(mask, mask)
        if len(same) > _SAME_MOST:
            self._same = {}
        space.count += fresh
        self._total += fresh
        self._count(slot, namespace, own)
        if self._total > self._capacity:
            self._make_room()

    def evict(self, slot: int, namespace: str, tier: int, keys: Sequence[bytes]) -> None:
        """Records are in a tier no more."""
        space = self._spaces.get(namespace)
        if space is None:
            return
        keep, bits = ~_bit(slot, tier), _bits(slot)
        gone = own = 0
        for key in keys:
            shard = space.shards[key[0]]
            found = shard.get(key)
            if found is not None:
                mask = found & keep
                if found & bits and not mask & bits:
                    own += 1
                if mask:
                    shard[key] = self._same.setdefault(mask, mask)
                else:
                    del shard[key]
                    gone += 1
        self._count(slot, namespace, -own)
        self._less(namespace, space, gone)

    def _count(self, slot: int, namespace: str, more: int) -> None:
        counts = self._counts.get(slot)
        if counts is not None and more:
            now = counts.get(namespace, 0) + more
            if now:
                counts[namespace] = now
            else:
                counts.pop(namespace, None)

    def clear(self, slot: int, namespace: str, tier: int) -> Iterator[int]:
        """Nothing of the namespace is in a tier any more. A shard per step, for whoever has other things to do."""
        space = self._spaces.get(namespace)
        if space is not None:
            yield from self._strip(namespace, space, ~_bit(slot, tier), slot)

    def _less(self, namespace: str, space: _Space, gone: int) -> None:
        space.count -= gone
        self._total -= gone
        if not space.count and self._spaces.get(namespace) is space:
            del self._spaces[namespace]

    def _strip(self, namespace: str, space: _Space, keep: int, slot: int | None = None) -> Iterator[int]:
        """Only bits of `keep` stay; a shard per step. `slot`: the one in use that loses some, if one does."""
        same = self._same
        for index, shard in enumerate(space.shards):
            changed = {key: mask & keep for key, mask in shard.items() if mask & ~keep}
            gone = [key for key, mask in changed.items() if not mask]
            if slot is not None:
                self._count(slot, namespace, -sum(1 for mask in changed.values() if not mask & _bits(slot)))
            for key, mask in changed.items():
                shard[key] = same.setdefault(mask, mask)
            for key in gone:
                del shard[key]
            if gone:
                space.shards[index] = dict(shard) or _NOTHING  # a dict does not shrink by itself
                self._less(namespace, space, len(gone))
            yield len(changed)

    def _make_room(self) -> None:
        while self._total > self._capacity:
            name, space = max(self._spaces.items(), key=lambda item: item[1].count)
            shard = space.shards[space.next]
            gone = list(itertools.islice(shard, (len(shard) + 7) // 8))
            for key in gone:
                mask = shard.pop(key) & self._live
                while mask:
                    slot = ((mask & -mask).bit_length() - 1) // TIERS
                    mask &= ~_bits(slot)
                    self._count(slot, name, -1)
            space.shards[space.next] = dict(shard) or _NOTHING
            space.next = (space.next + 1) % _SHARDS
            self.dropped += len(gone)
            self._less(name, space, len(gone))

    def sweep(self) -> bool:
        """Take the bits of retired slots out of one shard; True while there is more to do."""
        if self._sweeping is None:
            if not self._dying:
                return False
            self._sweeping = self._sweep(frozenset(self._dying))
        if next(self._sweeping, None) is None:
            self._sweeping = None
        return self._sweeping is not None or bool(self._dying)

    def _sweep(self, slots: frozenset[int]) -> Iterator[int]:
        keep = ~0
        for slot in slots:
            keep &= ~_bits(slot)
        for name, space in list(self._spaces.items()):
            yield from self._strip(name, space, keep)
        self._dying -= slots
        self._same = {}

    # Questions.

    def lookup(self, namespace: str, keys: Sequence[bytes], slots: Sequence[int] | None = None) -> list[Holding]:
        """Who has how long a leading part of `keys`.

        Args:
            slots: only these; None: all.

        Returns:
            one for each slot that has the first of them, in no order.
        """
        space = self._spaces.get(namespace)
        if space is None or not keys:
            return []
        live = self._live
        if slots is not None:
            live = 0
            for slot in slots:
                live |= _bits(slot)
            live &= self._live
        masks: list[int] = []
        for key in keys:
            mask = space.shards[key[0]].get(key, 0) & live
            if not mask:
                break
            masks.append(mask)
        if not masks:
            return []
        found = []
        first = masks[0]
        while first:
            slot = ((first & -first).bit_length() - 1) // TIERS
            shift = slot * TIERS
            first &= ~_bits(slot)
            tiers = []
            for mask in masks:
                own = mask >> shift & _ALL
                if not own:
                    break
                tiers.append((own & -own).bit_length() - 1)
            found.append(Holding(slot, tiers))
        return found

    def holders(self, namespace: str, keys: Sequence[bytes]) -> set[int]:
        """Slots that have any of these records, in any tier."""
        space = self._spaces.get(namespace)
        mask = 0
        if space is not None:
            for key in keys:
                mask |= space.shards[key[0]].get(key, 0)
        mask &= self._live
        found = set()
        while mask:
            slot = ((mask & -mask).bit_length() - 1) // TIERS
            mask &= ~_bits(slot)
            found.add(slot)
        return found

    def count(self, slot: int, namespaces: Sequence[str]) -> int:
        """Records that a slot has in some tier."""
        counts = self._counts.get(slot, {})
        return sum(counts.get(name, 0) for name in namespaces)

    def namespaces(self) -> list[str]:
        """Names of those that have any record."""
        return [*self._spaces]


_ALL = (1 << TIERS) - 1


def _bits(slot: int) -> int:
    return _ALL << slot * TIERS


def _bit(slot: int, tier: int) -> int:
    return 1 << slot * TIERS + min(tier, TIERS - 1)
