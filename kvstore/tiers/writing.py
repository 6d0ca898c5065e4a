"""Puts: to the tier that acknowledges first, then to the faster ones, and by and by to the slower ones.

The tier that acknowledges is the first one with `write: back`, else the last one. It decides whether the record is new
(write-once), and only then the faster tiers get it, from the same memory. What it cannot take, because it is full or
fails, goes to the next slower one, at last to a faster one; the slower ones get it later. If the tier that should have
acknowledged keeps records over a restart, only one that does so may do it in its place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.backend import EXISTS, Outcome, Status, Write
from kvstore.errors import PoolExhausted, TransientError
from kvstore.keys import Key

from .hierarchy import Hierarchy
from .moving import Mover

__all__ = ["TierWriter"]

_GLANCE_SECONDS = 1.0  # for asking slower tiers before a put that they do not take part in


class TierWriter:
    """Runs the puts of a `TieredBackend`."""

    def __init__(self, hierarchy: Hierarchy, mover: Mover) -> None:
        self._h = hierarchy
        self._mover = mover
        backs = [place for place, tier in enumerate(hierarchy.tiers) if tier.write == "back"]
        self.acknowledges = backs[0] if backs else hierarchy.last

    def put(self, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        h = self._h
        outcomes: list[Outcome | None] = [None] * len(writes)
        left = list(range(len(writes)))
        while left:
            first: dict[Key, int] = {}
            for index in left:
                first.setdefault(writes[index].key, index)
            taken = h.take(first, deadline)
            if not taken or time.monotonic() >= deadline:
                h.give(taken)
                for index in left:
                    outcomes[index] = h.late("put")
                break
            try:
                self._put(writes, [first[key] for key in taken], outcomes, deadline)
            finally:
                h.give(taken)
            left = [index for index in left if outcomes[index] is None]
        return [outcome if outcome is not None else h.late("put") for outcome in outcomes]

    def put_in(self, place: int, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        """Store records in one tier alone."""
        h = self._h
        outcomes = [h.late("put")] * len(writes)
        first: dict[Key, int] = {}
        for index, write in enumerate(writes):
            if first.setdefault(write.key, index) != index:
                outcomes[index] = EXISTS
        while first and (taken := h.take(first, deadline)):
            try:
                answers = h.store(place, [writes[first[key]] for key in taken], deadline)
                with h.lock:
                    for key, answer in zip(taken, answers, strict=True):
                        outcomes[first.pop(key)] = answer
                        if answer.status is Status.OK and h.tiers[place].policy is not None:
                            h.loose.add(key)  # whether a slower tier has it is not known
            finally:
                h.give(taken)
        return outcomes

    def _put(
        self, writes: Sequence[Write], mine: Sequence[int], outcomes: list[Outcome | None], deadline: float
    ) -> None:  # fmt: skip
        """Put records that are claimed."""
        todo = self._not_there(writes, mine, outcomes, deadline)
        for start, some in self._by_start(writes, todo).items():
            self._put_from(start, writes, some, outcomes, deadline)

    def _by_start(self, writes: Sequence[Write], todo: Sequence[int]) -> dict[int, list[int]]:
        """By the tier that acknowledges. What does not fit into the queue of one goes through it."""
        h = self._h
        by_start: dict[int, list[int]] = {}
        with h.lock:
            waiting = {place: tier.owed_bytes for place, tier in enumerate(h.tiers)}
            for index in todo:
                start, nbytes = self.acknowledges, writes[index].nbytes
                while start < h.last:
                    tier = h.tiers[start]
                    queued = waiting[start]
                    if tier.write == "back" and (not queued or queued + nbytes <= tier.queue_bytes):
                        waiting[start] += nbytes
                        break
                    start += 1
                by_start.setdefault(start, []).append(index)
        return by_start

    def _not_there(
        self, writes: Sequence[Write], mine: Sequence[int], outcomes: list[Outcome | None], deadline: float
    ) -> list[int]:  # fmt: skip
        """Records that no tier is known to have. The tier that acknowledges answers for itself."""
        h, start = self._h, self.acknowledges
        todo = list(mine)
        for place in range(h.last + 1):
            if place == start or not todo:
                continue
            until = h.until(place, deadline)
            if place > start:
                until = min(until, time.monotonic() + _GLANCE_SECONDS)
            answers = h.ask(place, "stat", [writes[index].key for index in todo], until)
            there = [index for index, answer in zip(todo, answers, strict=True) if answer.status is Status.OK]
            if there:
                todo = [index for index, answer in zip(todo, answers, strict=True) if answer.status is not Status.OK]
                self._exists(place, writes, there, outcomes, deadline)
        return todo

    def _exists(
        self, place: int, writes: Sequence[Write], there: Sequence[int], outcomes: list[Outcome | None], deadline: float
    ) -> None:  # fmt: skip
        """A tier has these already. If it is not one that may acknowledge them, they are brought down first."""
        h, start = self._h, self.acknowledges
        keys = [writes[index].key for index in there]
        with h.lock:
            tier = h.tiers[place]
            if tier.policy is not None:
                tier.policy.touch(keys)
        for index in there:
            outcomes[index] = EXISTS
        if place > start or h.tiers[place].durable or not h.tiers[start].durable:
            return
        with h.lock:
            short = [key for key in keys if not h.covered_locked(key, place)]
        if not short:
            return
        below = self._mover.copy(place, short, range(place + 1, h.last + 1), to="down", deadline=deadline)
        with h.changed:
            for key, ((*_, lowest), nbytes) in below.items():
                h.tiers[place].settle(key)
                if lowest < h.last:
                    h.tiers[lowest].owe(key, nbytes)
        by_key = {writes[index].key: index for index in there}
        for key in short:
            if key not in below or not h.tiers[below[key][0][-1]].durable:
                text = f"{h.tiers[place].name} has it, but {h.tiers[start].name} has not"
                outcomes[by_key[key]] = Outcome.failed(TransientError(text, backend=h.name, operation="put", key=key))

    def _put_from(
        self, start: int, writes: Sequence[Write], some: Sequence[int], outcomes: list[Outcome | None], deadline: float
    ) -> None:  # fmt: skip
        h = self._h
        order = [*range(start, h.last + 1), *range(start - 1, -1, -1)]
        todo = list(some)
        tried: list[int] = []
        for place in order:
            if not todo:
                break
            now = time.monotonic()
            until = deadline if place == order[-1] else now + (deadline - now) / 2  # time for another one, if it hangs
            answers = h.store(place, [writes[index] for index in todo], until)
            tried.append(place)
            stored: list[int] = []
            still: list[int] = []
            for index, answer in zip(todo, answers, strict=True):
                if answer.status is Status.EXISTS:
                    outcomes[index] = EXISTS
                elif answer.status is Status.OK:
                    outcomes[index] = self._acknowledged(start, place, answer, outcomes[index])
                    stored.append(index)
                else:
                    still.append(index)
                    before = outcomes[index]
                    if before is None or isinstance(before.error, PoolExhausted):
                        outcomes[index] = answer
            todo = still
            if stored:
                self._spread(place, tried, writes, stored, deadline)

    def _acknowledged(self, start: int, place: int, answer: Outcome, before: Outcome | None) -> Outcome:
        h = self._h
        if place == start or before is None or h.tiers[place].durable or not h.tiers[start].durable:
            return answer
        return before  # it is kept and served, but it would not outlive this process

    def _spread(
        self, place: int, tried: Sequence[int], writes: Sequence[Write], stored: Sequence[int], deadline: float
    ) -> None:  # fmt: skip
        """A tier took these: the faster ones get them too, the slower ones later."""
        h = self._h
        with h.changed:
            for index in stored:
                h.served.pop(writes[index].key, None)
                if place < h.last:
                    h.tiers[place].owe(writes[index].key, writes[index].nbytes)
                if h.tiers[place].policy is not None:
                    h.loose.add(writes[index].key)
        for faster in range(place - 1, -1, -1):
            if faster not in tried and time.monotonic() < deadline:
                h.store(faster, [writes[index] for index in stored], h.until(faster, deadline))
        if place < h.last and place in h.wake_settling:
            h.wake_settling[place].wake()
