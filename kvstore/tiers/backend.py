"""`TieredBackend`: several places as one, the fastest first."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.backend import Backend, Capability, KeyInfo, Limits, Outcome, Read, Write
from kvstore.buffers import Buffer, Slab
from kvstore.errors import ClosedError, ConfigError, KVStoreError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metric, Metrics

from .hierarchy import Hierarchy
from .moving import Mover
from .reading import TierReader
from .removing import TierRemover
from .tier import COUNTS, Tier
from .workers import DROP_WAIT_S, Background
from .writing import TierWriter

__all__ = ["TIER_METRICS", "TieredBackend"]

logger = logging.getLogger("kvstore.tiers")

_OF_ALL = (
    Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.LIST | Capability.SHARED | Capability.CAPACITY
    | Capability.LANDING
)  # fmt: skip
_OF_ANY = Capability.LEASE | Capability.REGISTERED_MEMORY | Capability.MAPPED_MEMORY

TIER_METRICS: tuple[Metric, ...] = (
    Metric("kvstore_tier_events_total", "counter", "What happened in a tier, by what it was (see docs/tiers.md).",
           ("tier", "event")),
    Metric("kvstore_tier_used_bytes", "gauge", "Bytes of the records in a tier with a capacity.", ("tier",)),
    Metric("kvstore_tier_capacity_bytes", "gauge", "Its capacity.", ("tier",)),
    Metric("kvstore_tier_records", "gauge", "Records in a tier with a capacity.", ("tier",)),
    Metric("kvstore_tier_queued_bytes", "gauge", "Bytes that wait to be brought down from a tier.", ("tier",)),
)  # fmt: skip
"""Published by `TieredBackend.publish`."""


class TieredBackend(Backend):
    """A hierarchy of places, the fastest first, that is one backend to its caller.

    Reads come from the fastest tier that has a record; what is found below may come up, in the background. Puts are
    acknowledged by the first tier with `write: back`, else by the last one, and every faster tier gets them from the
    same memory. A tier with a capacity is kept below it: from its high watermark on records move down in the
    background, in the order of its policy, and one leaves a tier only once a slower one has acknowledged it; out of the
    last tier it leaves the store. A put that finds a tier full goes to the next one and does not wait. A tier that
    fails is passed over, and takes part again as soon as it answers (put a `BreakerBackend` around each, as a store
    does).

    Deletes and quarantine reach all tiers, and wait for a move of their record that is under way. Quarantine puts aside
    the copy that was read, and spares sound copies of records in other tiers. After `os.fork()` every call in the child
    raises `ClosedError`.

    Args:
        tiers: see `Tier`; they, and their backends, belong to this one. What lies in a tier with a capacity already is
            listed in the background; meanwhile it serves.
        name: for errors and metrics.
        staging_bytes: memory for moves that cannot be made from where the record lies.

    Raises:
        ConfigError: no tiers, or two of them in one place.
    """

    def __init__(self, tiers: Sequence[Tier], *, name: str = "tiers", staging_bytes: int = 64 << 20) -> None:
        if not tiers:
            raise ConfigError("a hierarchy needs at least one tier")
        self.name = name
        self.tiers = tuple(tiers)
        _check_distinct(self.tiers)
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._hierarchy = h = Hierarchy(self.tiers, name)
        self._mover = Mover(h, staging_bytes)
        self._background = Background(h, self._mover)
        self._reader = TierReader(h, self._background.used)
        self._writer = TierWriter(h, self._mover)
        self._remover = TierRemover(h, self._mover)
        self._published: dict[tuple[str, str], int] = {}
        self._background.start()

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        """What is true of the whole: most of it must hold for all tiers, a lease or registration for one."""
        each = [tier.backend.capabilities for tier in self.tiers]
        of_all, of_any = ~Capability.NONE, Capability.NONE
        for one in each:
            of_all &= one
            of_any |= one
        found = (of_all & _OF_ALL & ~Capability.CAPACITY) | (of_any & _OF_ANY)
        if all(tier.capacity is not None for tier in self.tiers):
            found |= Capability.CAPACITY
        if any(tier.expires for tier in self.tiers):
            found |= Capability.TTL
        last = self._hierarchy.last
        if self.tiers[last].durable and all(t.durable for t in self.tiers[:last] if t.write == "back"):
            found |= Capability.DURABLE
        return found

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """The largest record that any tier takes, and that a slower one takes too, if there is one; lanes and sizes of
        the tier that wants most."""
        each = [tier.backend.limits for tier in self.tiers]
        return Limits(
            max_value_bytes=max(map(self._hierarchy.largest, range(len(self.tiers)))),
            alignment=max(one.alignment for one in each),
            lanes=max(one.lanes for one in each),
            preferred_io_bytes=max(one.preferred_io_bytes for one in each),
        )

    @property
    def distance(self) -> int:  # type: ignore[override]
        """That of the last tier: the others are near."""
        return self.tiers[-1].backend.distance

    @property
    def identity(self) -> Hashable | None:  # type: ignore[override]
        return self.tiers[-1].backend.identity

    def _check_process(self, operation: str) -> None:
        if self._pid != os.getpid():  # before any lock: another thread may have held it at the fork
            raise ClosedError(
                "these tiers were opened before fork(); open others in the child", backend=self.name,
                operation=operation,
            )  # fmt: skip

    def _check(self, operation: str) -> None:
        self._check_process(operation)
        if self._hierarchy.closed:
            raise ClosedError("the tiers are closed", backend=self.name, operation=operation)

    def _late(self, operation: str, count: int, deadline: float) -> list[Outcome] | None:
        self._check(operation)
        return [self._hierarchy.late(operation)] * count if time.monotonic() >= deadline else None

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        late = self._late("stat", len(keys), deadline)
        return self._reader.stat(keys, deadline) if late is None else late

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        late = self._late("get", len(reads), deadline)
        if late is not None:
            return late
        landing = all(Capability.LANDING in tier.backend.capabilities for tier in self.tiers)
        return self._reader.get_into(reads, deadline, landing=landing)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        late = self._late("put", len(writes), deadline)
        return self._writer.put(writes, deadline) if late is None else late

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        late = self._late("delete", len(keys), deadline)
        return self._remover.delete(keys, deadline) if late is None else late

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        late = self._late("quarantine", len(keys), deadline)
        return self._remover.quarantine(keys, deadline) if late is None else late

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        self._check("lease")
        return self._reader.lease(keys, deadline)

    def register(self, slab: Slab) -> None:
        self._check("register")
        for tier in self.tiers:
            if Capability.REGISTERED_MEMORY in tier.backend.capabilities:
                tier.backend.register(slab)

    # The scheduler's side.

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """The scheduler's waiting queue, first to run first: the keys of each job in prefix order. Replaces what was
        announced before; an empty one ends it.

        Records within the prefetch window (C_mem / S_kv, with S_kv the mean size of a record) are brought up in this
        order; none within the eviction window (the capacities of all tiers together, over S_kv) leaves the store.
        Tiers that have tiers of their own (nodes) are told as well.
        """
        self._check("announce")
        self._background.announce(waiting)
        for tier in self.tiers:  # nodes have tiers of their own
            try:
                tier.backend.announce(waiting)
            except KVStoreError as error:
                logger.debug("tier %s could not be told what waits: %s", tier.name, error)

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep these records, usually the head of a chain of chunks, in every tier that has them or gets them, until
        `unpin`. Counted. What is pinned takes room from all others."""
        self._check("pin")
        keys = [*keys]
        h = self._hierarchy
        with h.changed:
            for key in keys:
                h.pins[key] = h.pins.get(key, 0) + 1
            for tier in self.tiers:
                if tier.policy is not None:
                    tier.policy.pin(keys)
            h.wait_dropped_locked(h.pins, time.monotonic() + DROP_WAIT_S)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Take one pin from each; a key that has none is ignored."""
        self._check("unpin")
        keys = [*keys]
        h = self._hierarchy
        with h.lock:
            for key in keys:
                count = h.pins.pop(key, 0)
                if count > 1:
                    h.pins[key] = count - 1
            for tier in self.tiers:
                if tier.policy is not None:
                    tier.policy.unpin(keys)

    # By hand.

    def put_in(self, place: int, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        """Store records in one tier alone, whatever the others have.

        Args:
            place: of the tier; 0 is the fastest.
        """
        late = self._late("put", len(writes), deadline)
        return self._writer.put_in(place, writes, deadline) if late is None else late

    def delete_in(self, place: int, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """Delete records in one tier alone; those that are pinned stay, and are MISS."""
        late = self._late("delete", len(keys), deadline)
        return self._remover.delete_in(place, keys, deadline) if late is None else late

    # What there is.

    def usage(self) -> dict[str, int]:
        """Bytes of the records in each tier with a capacity, by the tier's name."""
        self._check_process("usage")
        with self._hierarchy.lock:
            return {tier.name: tier.used for tier in self.tiers if tier.capacity is not None}

    def stats(self) -> list[dict[str, Any]]:
        """For each tier, the fastest first: name, capacity, used, records, reserved, queued_bytes, queued_records, and
        the counters of `kvstore.tiers.tier.COUNTS`."""
        self._check_process("stats")
        with self._hierarchy.lock:
            return [tier.stats() for tier in self.tiers]

    def publish(self, metrics: Metrics) -> None:
        """Bring the metrics of `TIER_METRICS` up to date."""
        self._check_process("publish")
        for metric in TIER_METRICS:
            metrics.define(metric)
        changes: list[tuple[str, tuple[str, ...], float]] = []
        with self._hierarchy.lock:
            for tier in self.tiers:
                for event in COUNTS:
                    count, before = tier.counts[event], self._published.get((tier.name, event), 0)
                    if count > before:
                        changes.append(("kvstore_tier_events_total", (tier.name, event), count - before))
                        self._published[tier.name, event] = count
                changes.append(("kvstore_tier_queued_bytes", (tier.name,), tier.owed_bytes))
                if tier.policy is not None:
                    changes.append(("kvstore_tier_used_bytes", (tier.name,), tier.used))
                    changes.append(("kvstore_tier_capacity_bytes", (tier.name,), tier.capacity or 0))
                    changes.append(("kvstore_tier_records", (tier.name,), len(tier.policy)))
        metrics.update(changes)

    def wait_quiet(self, timeout: float) -> bool:
        """Wait until nothing goes on in the background. False if that took too long. For tests and tools.

        Args:
            timeout: seconds.
        """
        self._check_process("wait_quiet")
        end = time.monotonic() + timeout
        while not self._background.quiet():
            if time.monotonic() >= end:
                return False
            self._background.hurry()
            time.sleep(0.002)
        return True

    # The end.

    def drain(self, end: float) -> Mapping[str, int]:
        """Bring down what waits for it, until the monotonic time `end`. Returns how many records still wait, by tier;
        they are named in the log too, since a tier that does not outlive this process loses them."""
        self._check("drain")
        left = self._background.drain(end)
        for name, count in left.items():
            logger.warning("%s: %d records of tier %s were not brought down in time", self.name, count, name)
        return left

    def close(self) -> None:
        """At once: what waits to be brought down stays where it is (see `drain`)."""
        if self._pid != os.getpid():
            for tier in self.tiers:
                _close(tier)
            return
        with self._close_lock:
            h = self._hierarchy
            with h.changed:
                if h.closed:
                    return
                h.closed = True
                owed = {tier.name: len(tier.owed) for tier in self.tiers if tier.owed and not tier.durable}
                h.changed.notify_all()
            for name, count in owed.items():
                logger.warning("%s: closed with %d records in tier %s that no slower tier has", self.name, count, name)
            self._background.stop()
            for tier in self.tiers:
                _close(tier)
            self._mover.close()
            self._background.join()

    def __repr__(self) -> str:
        return f"TieredBackend({', '.join(tier.name for tier in self.tiers)})"

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        self._check("list")
        if Capability.LIST not in self.capabilities:
            return super().list(deadline=deadline)
        if time.monotonic() >= deadline:
            raise TransientError("the deadline passed", backend=self.name, operation="list")
        return self._reader.pages(deadline)


def _close(tier: Tier) -> None:
    try:
        tier.backend.close()
    except Exception:
        logger.exception("closing tier %s failed", tier.name)


def _check_distinct(tiers: Sequence[Tier]) -> None:
    places: dict[Hashable, str] = {}
    names = [tier.name for tier in tiers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two tiers have the name {twice[0]}; give each its own")
    for tier in tiers:
        try:
            identity = tier.backend.identity
        except KVStoreError:
            continue
        if identity is not None and places.setdefault(identity, tier.name) != tier.name:
            raise ConfigError(f"the tiers {places[identity]} and {tier.name} are one and the same place; name it once")
