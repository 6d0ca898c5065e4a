"""Moves between tiers, all of them in the background: demotion, bringing down what is owed, promotion.

One buffer, several destinations: a record that lies in memory is leased and written from where it lies; anything else
is read once into staging memory and written from there. What looks like a record of ours is verified on the way: damage
is not copied, and a copy that proves damaged twice is quarantined in its tier alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import CorruptRecord, KVStoreError, PoolExhausted
from kvstore.keys import Key
from kvstore.record import MAGIC, checksum, parse_header
from kvstore.scheduler import seconds_left

from .hierarchy import Hierarchy

__all__ = ["Mover", "damaged"]

logger = logging.getLogger("kvstore.tiers")

MOVE_SECONDS = 30.0
_STAGING_WAIT_S = 5.0
_PATIENCE_S = 0.5  # of a demotion, for room in the next tier
_STUCK_S = 30.0  # a record that no slower tier took is passed over for so long

Copies = dict[Key, tuple[list[int], int]]
"""Records that were copied: the tiers that they came to, and their bytes."""

Reach = Literal["one", "down", "room"]
"""To how many of several tiers a record is copied; see `Mover.copy`."""


def damaged(view: memoryview, key: Key) -> bool | None:
    """Whether a record that was read as a whole is corrupt; None: it does not look like a record at all."""
    if view[: len(MAGIC)] != MAGIC:
        return None
    try:
        header = parse_header(view, key=key, nbytes=len(view))
        for segment in header.segments:
            if checksum(view[segment.offset : segment.offset + segment.length]) != segment.checksum:
                return True
    except CorruptRecord:
        return True
    return False


class Mover:
    """Copies records from tier to tier. Whoever calls it has claimed the keys.

    Args:
        staging_bytes: size of the staging pool; it is mapped when first needed. A record that is larger is moved alone,
            through memory of its own.
    """

    def __init__(self, hierarchy: Hierarchy, staging_bytes: int) -> None:
        self._h = hierarchy
        self._staging_bytes = staging_bytes
        self._pool: BufferPool | None = None

    # Memory.

    def pool(self) -> BufferPool:
        """The staging pool. Raises `ClosedError`."""
        h = self._h
        with h.lock:
            if self._pool is None:
                self._pool = pool = BufferPool(self._staging_bytes)
                if h.closed:
                    pool.close()
            else:
                return self._pool
        for tier in h.tiers:
            if Capability.REGISTERED_MEMORY in tier.backend.capabilities:
                for slab in pool.slabs:
                    tier.backend.register(slab)
        return pool

    def close(self) -> None:
        """No more moves; the memory goes with the last buffer."""
        with self._h.lock:
            pool = self._pool
        if pool is not None:
            pool.close()

    def read_whole(
        self, place: int, keys: Sequence[Key], sizes: Sequence[int], deadline: float
    ) -> list[tuple[Key, memoryview, Buffer | None]]:
        """Whole records of one tier, of known sizes, in memory of our own; without those that could not be read. The
        caller releases the buffers. Raises `KVStoreError` if there is no memory."""
        pool = self.pool()
        if len(keys) == 1 and sizes[0] > pool.largest:
            buffers: list[Buffer | None] = [None]
            views = [memoryview(bytearray(sizes[0]))]
        else:
            got = pool.acquire_many(sizes, min(_STAGING_WAIT_S, seconds_left(deadline)))
            buffers, views = [*got], [buffer.view for buffer in got]
        found: list[tuple[Key, memoryview, Buffer | None]] = []
        try:
            reads = [Read(key, view) for key, view in zip(keys, views, strict=True)]
            answers = self._h.ask(place, "get", reads, deadline)
            for key, view, buffer, answer in zip(keys, views, buffers, answers, strict=True):
                if answer.status is Status.OK and answer.nbytes == len(view):
                    found.append((key, view, buffer))
            return found
        finally:
            kept = {id(buffer) for _, _, buffer in found}
            for buffer in buffers:
                if buffer is not None and id(buffer) not in kept:
                    buffer.release()

    # Copies.

    def copy(
        self, src: int, keys: Sequence[Key], dsts: Iterable[int], *, to: Reach, deadline: float,
        missing: set[Key] | None = None,
    ) -> Copies:  # fmt: skip
        """Copy claimed records from one tier to others.

        Args:
            dsts: tiers in the order in which they are tried.
            to: "one": the first of them that takes it; "down": each of them, up to one that brings records down
                itself; "room": each of them that has room now.
            missing: gets what `src` does not have.

        Returns:
            for each record that is in some of `dsts` now: these, in their order, and its bytes.
        """
        dsts = list(dsts)
        tier = self._h.tiers[src]
        done: Copies = {}
        rest = list(keys)
        if Capability.LEASE in tier.backend.capabilities:
            rest = self._copy_leased(src, keys, dsts, done, to=to, deadline=deadline)
        for group, sizes in self._groups(src, rest, dsts, to, deadline, set() if missing is None else missing):
            if time.monotonic() >= deadline:
                break
            try:
                staged = self.read_whole(src, group, sizes, deadline)
            except PoolExhausted as error:
                logger.warning("tier %s: no staging memory for a move: %s", tier.name, error)
                continue
            try:
                sound = [(key, view) for key, view, _ in staged if not self._spoilt(src, key, view, deadline)]
                self._spread(sound, dsts, done, to=to, deadline=deadline)
            finally:
                for _, _, buffer in staged:
                    if buffer is not None:
                        buffer.release()
        return done

    def _copy_leased(
        self, src: int, keys: Sequence[Key], dsts: Sequence[int], done: Copies, *, to: Reach, deadline: float
    ) -> list[Key]:  # fmt: skip
        """From where they lie in memory; returns the keys that cannot be leased."""
        tier = self._h.tiers[src]
        try:
            leases = tier.backend.lease(keys, deadline=deadline)
        except (KVStoreError, OSError):
            return list(keys)
        try:
            if len(leases) != len(keys):
                return list(keys)
            sound = []
            for key, lease in zip(keys, leases, strict=True):
                if lease is not None and not self._spoilt(src, key, lease.view, deadline):
                    sound.append((key, lease.view))
            self._spread(sound, dsts, done, to=to, deadline=deadline)
            return [key for key, lease in zip(keys, leases, strict=True) if lease is None]
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()

    def _groups(
        self, src: int, keys: Sequence[Key], dsts: Sequence[int], to: Reach, deadline: float, missing: set[Key]
    ) -> list[tuple[list[Key], list[int]]]:
        """Keys with their sizes, in groups that fit half the staging memory. Without those that no destination would
        take: they would be read in vain."""
        h = self._h
        if not keys:
            return []
        with h.lock:
            left = {dst: h.room_locked(dst) if to == "room" else math.inf for dst in dsts}
        most = max(1, self._staging_bytes // 2)
        groups: list[tuple[list[Key], list[int]]] = []
        room = 0
        for key, found in zip(keys, h.ask(src, "stat", keys, deadline), strict=True):
            if found.status is not Status.OK:
                if found.status is Status.MISS:
                    missing.add(key)
                continue
            takers = [dst for dst in dsts if found.nbytes <= min(left[dst], h.largest(dst))]
            if not takers:
                continue
            for dst in takers:
                left[dst] -= found.nbytes
            size = (found.nbytes + 4095) & -4096
            if size > room or not groups:
                groups.append(([], []))
                room = most
            room -= size
            groups[-1][0].append(key)
            groups[-1][1].append(found.nbytes)
        return groups

    def _spoilt(self, place: int, key: Key, view: memoryview, deadline: float) -> bool:
        """Whether bytes that were read from a tier must not be copied. If they are damaged twice, they are put aside in
        that tier."""
        if not damaged(view, key):
            return False
        self.judge(place, key, len(view), deadline)
        return True

    def judge(self, place: int, key: Key, nbytes: int, deadline: float) -> None:
        """Read a claimed record that looked damaged once more, and quarantine that copy if it still does."""
        h = self._h
        try:
            staged = self.read_whole(place, [key], [nbytes], deadline)
        except KVStoreError:
            return
        for _, view, buffer in staged:
            bad = damaged(view, key)
            if buffer is not None:
                buffer.release()
            if bad is not False:
                self.quarantine(place, [key], deadline)
                logger.warning("tier %s: a damaged copy of record %s… is put aside", h.tiers[place].name, key[:6].hex())

    def quarantine(self, place: int, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Quarantine claimed records in one tier."""
        h = self._h
        outcomes = h.ask(place, "quarantine", keys, deadline)
        # MISS: none there, or one that came meanwhile: only another look can tell.
        sure = [
            (key, outcome) for key, outcome in zip(keys, outcomes, strict=True) if outcome.status is not Status.MISS
        ]
        unsure = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.status is Status.MISS]
        h.removed(place, [key for key, _ in sure], [outcome for _, outcome in sure])
        if unsure and h.tiers[place].policy is not None:
            h.look_again(place, unsure, deadline)
        with h.lock:
            h.tiers[place].counts["quarantined"] += sum(outcome.ok for outcome in outcomes)
        return outcomes

    def _spread(
        self, sound: Sequence[tuple[Key, memoryview]], dsts: Sequence[int], done: Copies, *, to: Reach, deadline: float
    ) -> None:  # fmt: skip
        """Write records to their destinations, from one memory."""
        h = self._h
        with h.lock:
            todo = [Write(key, (view,), *h.hint_locked(key)) for key, view in sound]
        for dst in dsts:
            if not todo:
                return
            more: list[Write] = []
            for write, answer in zip(todo, h.store(dst, todo, deadline), strict=True):
                if answer.stored:
                    done.setdefault(write.key, ([], write.nbytes))[0].append(dst)
                if not answer.stored or to == "room" or (to == "down" and h.tiers[dst].write != "back"):
                    more.append(write)
            todo = more

    # Down.

    def demote(self, place: int, keys: Sequence[Key]) -> int:
        """Move claimed records from a bounded tier to a slower one, and give their claims back. A record leaves only
        once a slower tier has acknowledged it. Returns how many have left."""
        h = self._h
        tier = h.tiers[place]
        deadline = time.monotonic() + MOVE_SECONDS
        try:
            with h.lock:
                covered = [key for key in keys if h.covered_locked(key, place)]
                due = {key: tier.owed[key] for key in keys if key in tier.owed}
                mean = h.mean_bytes_locked()
            short = [key for key in keys if key not in {*covered}]
            copied: Copies = {}
            if short:
                if place + 1 < h.last:  # else they go to a slower tier than need be; the last one makes room itself
                    h.make_way(place + 1, int(mean * len(short)), time.monotonic() + _PATIENCE_S)
                copied = self.copy(place, short, range(place + 1, h.last + 1), to="one", deadline=deadline)
            missing = [key for key in short if key not in copied]
            with h.lock:  # it goes on being owed, by the tier that has it now
                for key, ((lower,), nbytes) in copied.items():
                    if key in due and lower < h.last:
                        h.tiers[lower].owe(key, nbytes)
                        h.wake_settling[lower].wake()
                for key in covered:
                    if key in due and (lower_place := self._holder_locked(key, place)) is not None:
                        h.tiers[lower_place].owe(key, due[key])
                        h.wake_settling[lower_place].wake()
                leaving = [key for key in (*covered, *copied) if key not in h.pins]  # pinned meanwhile: it stays
            outcomes, _ = h.remove(place, leaving, deadline)
            if missing:
                h.look_again(place, missing, deadline)
                with h.lock:
                    until = time.monotonic() + _STUCK_S
                    tier.stuck.update({key: until for key in missing if tier.policy is not None and key in tier.policy})
            gone = sum(outcome.status is not Status.ERROR for outcome in outcomes)
            with h.lock:
                tier.counts["demotions"] += len(copied)
                tier.counts["demoted_bytes"] += sum(nbytes for _, nbytes in copied.values())
                tier.counts["released"] += len(covered)
                gone += sum(tier.policy is not None and key not in tier.policy for key in missing)
            return gone
        finally:
            h.give(keys)

    def _holder_locked(self, key: Key, place: int) -> int | None:
        """The bounded tier below that has a record which must go further down; None: an unbounded one has it."""
        h = self._h
        for lower in range(place + 1, h.last):
            policy = h.tiers[lower].policy
            if policy is not None and key in policy:
                return lower
        return None

    def bring_down(self, place: int, keys: Sequence[Key]) -> int:
        """Bring claimed records that are owed to the slower tiers, and give their claims back. Returns how many need
        not be brought any more."""
        h = self._h
        tier = h.tiers[place]
        deadline = time.monotonic() + MOVE_SECONDS
        try:
            below = self.copy(place, keys, range(place + 1, h.last + 1), to="down", deadline=deadline)
            missing = [key for key in keys if key not in below]
            there = h.ask(place, "stat", missing, deadline)
            settled = 0
            with h.changed:
                for key, ((*_, lowest), nbytes) in below.items():
                    tier.settle(key)
                    settled += 1
                    if lowest < h.last:
                        h.tiers[lowest].owe(key, nbytes)
                        h.wake_settling[lowest].wake()
                for key, outcome in zip(missing, there, strict=True):
                    if outcome.status is Status.MISS:  # it has gone; there is nothing to bring
                        tier.settle(key)
                        settled += 1
                    elif key in tier.owed:
                        tier.owed[key] = tier.owed.pop(key)  # behind the others, which may be luckier
                h.changed.notify_all()
            return settled
        finally:
            h.give(keys)

    # Up.

    def promote(self, dsts: Sequence[int], keys: Sequence[Key]) -> set[Key]:
        """Bring claimed records up into faster tiers, each read once for all of these, and give their claims back.
        Returns what no slower tier has."""
        h = self._h
        deadline = time.monotonic() + MOVE_SECONDS
        came: Copies = {}
        try:
            todo, nowhere = list(keys), set(keys)
            for src in range(min(dsts) + 1, h.last + 1):
                if todo:
                    faster, until, missing = [dst for dst in dsts if dst < src], h.until(src, deadline), set[Key]()
                    came.update(self.copy(src, todo, faster, to="room", deadline=until, missing=missing))
                    nowhere &= missing
                    todo = [key for key in todo if key in missing]
            with h.lock:
                h.arrived += len(came)
                for dst in dsts:
                    tier = h.tiers[dst]
                    here = [key for key in keys if key in came and dst in came[key][0]]
                    tier.counts["promotions"] += len(here)
                    tier.counts["promoted_bytes"] += sum(came[key][1] for key in here)
                    if tier.policy is not None:
                        tier.policy.touch(here)
            return nowhere
        finally:
            h.give(keys)
