"""Reads and questions: per key the fastest tier that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.backend import MISS, Capability, KeyInfo, Outcome, Read, Status, without_landing
from kvstore.buffers import Buffer
from kvstore.errors import KVStoreError
from kvstore.keys import Key
from kvstore.telemetry.served import SERVED

from .hierarchy import Hierarchy

__all__ = ["TierReader"]


class TierReader:
    """Asks one tier after the other, each only for what those above did not have.

    Args:
        promote: told, once per batch, which keys were served by which tier and might come up.
    """

    def __init__(self, hierarchy: Hierarchy, promote: Callable[[Sequence[Key], int], None]) -> None:
        self._h = hierarchy
        self._promote = promote

    def stat(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """OK from the fastest tier that has it. Where one failed and none has it: ERROR, since nobody knows."""
        h = self._h
        outcomes: list[Outcome] = [MISS] * len(keys)
        todo: Sequence[int] = range(len(keys))
        arrived = h.arrived
        for turn in range(2):
            for place in range(h.last + 1):
                if not todo:
                    break
                asked = keys if len(todo) == len(keys) else [keys[index] for index in todo]
                answers = h.ask(place, "stat", asked, h.until(place, deadline))
                if len(todo) == len(keys) and not [None for answer in answers if answer.status is not Status.OK]:
                    return answers
                todo = _merge(todo, answers, outcomes)
            if turn or not todo or h.arrived == arrived:
                break  # else something may have come up behind our back, and have left the tier below
        return outcomes

    def get_into(self, reads: Sequence[Read], deadline: float, *, landing: bool) -> list[Outcome]:
        """Straight into the given memory. Several reads of one key are served by one tier.

        Args:
            landing: every tier calls `Read.landed`, so it may be passed on. A record of which one read has landed and
                another one failed is then not read again from the next tier: what has landed may not be written again.
        """
        h = self._h
        if not landing:
            reads = without_landing(reads)
        outcomes: list[Outcome] = [MISS] * len(reads)
        todo: list[int] = list(range(len(reads)))
        arrived = h.arrived
        for turn in range(2):
            for place in range(h.last + 1):
                if todo:
                    todo = self._read_from(place, reads, todo, outcomes, deadline)
            if turn or not todo or h.arrived == arrived:
                break
        return outcomes

    def _read_from(
        self, place: int, reads: Sequence[Read], todo: list[int], outcomes: list[Outcome], deadline: float
    ) -> list[int]:  # fmt: skip
        """Read what is still to be read from one tier; returns what is left for the next."""
        h = self._h
        some = reads if len(todo) == len(reads) else [reads[index] for index in todo]
        answers = h.ask(place, "get", some, h.until(place, deadline))
        ok = Status.OK
        if not [None for answer in answers if answer.status is not ok]:
            keys = list(dict.fromkeys([read[0] for read in some]))
            for index, answer in zip(todo, answers, strict=True):
                outcomes[index] = answer
            self._served(place, keys, answers, (), 0)
            return []
        bad = {read[0] for read, answer in zip(some, answers, strict=True) if answer.status is not ok}
        good: dict[Key, None] = {}
        landed: set[Key] = set()
        for read, answer in zip(some, answers, strict=True):
            if answer.status is ok:
                if read.key not in bad:
                    good[read.key] = None
                elif read.landed is not None:
                    landed.add(read.key)
        left: list[int] = []
        errors = 0
        missed: list[Key] = []
        for index, read, answer in zip(todo, some, answers, strict=True):
            if read.key not in bad or read.key in landed:
                outcomes[index] = answer
                continue
            left.append(index)
            if answer.status is Status.ERROR:
                errors += 1
                outcomes[index] = answer
            elif answer.status is Status.MISS:
                missed.append(read.key)
                if outcomes[index].status is ok:
                    outcomes[index] = MISS
            else:  # the memory is about to be written again
                outcomes[index] = MISS
        self._served(place, [*good], [a for r, a in zip(some, answers, strict=True) if r.key in good], missed, errors)
        return left

    def _served(
        self, place: int, keys: Sequence[Key], answers: Sequence[Outcome], missed: Sequence[Key], errors: int
    ) -> None:  # fmt: skip
        h = self._h
        tier = h.tiers[place]
        SERVED.places.update(dict.fromkeys(keys, place))
        with h.lock:
            counts = tier.counts
            counts["hits"] += len(answers)
            counts["hit_bytes"] += sum([answer.nbytes for answer in answers])
            if missed or errors:
                counts["misses"] += len(missed)
                counts["errors"] += errors
            gone = h.missed_locked(missed, place)
            if keys:
                h.served_locked(keys, place)
                if tier.policy is not None:
                    tier.policy.touch(keys)
        if gone:
            h.wake_settling[place].wake()
        if place and keys:
            self._promote(keys, place)

    def lease(self, keys: Sequence[Key], deadline: float) -> list[Buffer | None]:
        """From the tiers that can, the fastest first."""
        h = self._h
        found: list[Buffer | None] = [None] * len(keys)
        for place, tier in enumerate(h.tiers):
            todo = [index for index, buffer in enumerate(found) if buffer is None]
            if not todo:
                break
            if Capability.LEASE not in tier.backend.capabilities:
                continue
            asked = [keys[index] for index in todo]
            try:
                leases = tier.backend.lease(asked, deadline=deadline)
                if len(leases) != len(asked):
                    raise IndexError(f"{len(leases)} leases for {len(asked)} keys")
            except (KVStoreError, OSError, IndexError, RuntimeError):
                if h.closed:
                    raise
                continue  # a lease is a short cut: without it the caller reads
            leased = [key for key, buffer in zip(asked, leases, strict=True) if buffer is not None]
            with h.lock:
                h.served_locked(leased, place)
                tier.counts["hits"] += len(leased)
                if tier.policy is not None:
                    tier.lend(asked, leases)
                    tier.policy.touch(leased)
            for index, buffer in zip(todo, leases, strict=True):
                found[index] = buffer
        return found

    def pages(self, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """What is stored, each record once: the tiers one after the other, from above. What moves down meanwhile is
        seen on its way."""
        h = self._h
        seen: set[Key] = set()
        for place, tier in enumerate(h.tiers):
            for page in tier.backend.list(deadline=deadline):
                fresh = [info for info in page if info.key not in seen]
                if place < h.last:
                    seen.update(info.key for info in fresh)
                if fresh:
                    yield fresh


def _merge(todo: Sequence[int], answers: Sequence[Outcome], outcomes: list[Outcome]) -> list[int]:
    """Take in the answers of one tier; returns what the next one is to be asked."""
    left = []
    for index, answer in zip(todo, answers, strict=True):
        if answer.status is Status.OK:
            outcomes[index] = answer
        else:
            left.append(index)
            if answer.status is Status.ERROR:
                outcomes[index] = answer
    return left
