"""Deletes and quarantine: in all tiers, once nothing moves the record any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.backend import MISS, OK, Outcome, Status
from kvstore.errors import KVStoreError
from kvstore.keys import Key

from .hierarchy import Hierarchy
from .moving import Mover, damaged

__all__ = ["TierRemover"]


class TierRemover:
    """Runs the deletes and quarantines of a `TieredBackend`."""

    def __init__(self, hierarchy: Hierarchy, mover: Mover) -> None:
        self._h = hierarchy
        self._mover = mover

    def delete(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """OK if any tier had it, MISS if none; ERROR if one could not be asked: it may still have it."""
        return self._in_turn(keys, deadline, "delete", self._delete)

    def delete_in(self, place: int, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """From one tier alone, without those that are pinned."""
        h = self._h

        def delete(taken: Sequence[Key], until: float) -> dict[Key, Outcome]:
            with h.lock:
                some = [key for key in taken if key not in h.pins]
            outcomes, _ = h.remove(place, some, until)
            return {**dict.fromkeys(taken, MISS), **dict(zip(some, outcomes, strict=True))}

        return self._in_turn(keys, deadline, "delete", delete)

    def quarantine(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Puts aside the copy that was read last, and those of other tiers unless they prove to be sound. A record that
        was not read since it was put is left alone."""
        return self._in_turn(keys, deadline, "quarantine", self._quarantine)

    def _in_turn(
        self, keys: Sequence[Key], deadline: float, operation: str,
        how: Callable[[Sequence[Key], float], dict[Key, Outcome]],
    ) -> list[Outcome]:  # fmt: skip
        """Claim keys as they become free, and do it to them. A key given twice is MISS the second time."""
        h = self._h
        outcomes: list[Outcome] = [MISS] * len(keys)
        places: dict[Key, int] = {}
        for index, key in enumerate(keys):
            places.setdefault(key, index)
        while places:
            taken = h.take(places, deadline)
            if not taken or time.monotonic() >= deadline:
                h.give(taken)
                for index in places.values():
                    outcomes[index] = h.late(operation)
                break
            try:
                for key, outcome in how(taken, deadline).items():
                    outcomes[places[key]] = outcome
            finally:
                h.give(taken)
            for key in taken:
                del places[key]
        return outcomes

    def _delete(self, keys: Sequence[Key], deadline: float) -> dict[Key, Outcome]:
        h = self._h
        best: dict[Key, Outcome] = dict.fromkeys(keys, MISS)
        with h.lock:
            for key in keys:
                h.served.pop(key, None)
        for place in range(h.last + 1):
            outcomes, _ = h.remove(place, keys, h.until(place, deadline))
            for key, outcome in zip(keys, outcomes, strict=True):
                _rank(best, key, outcome)
        return best

    def _quarantine(self, keys: Sequence[Key], deadline: float) -> dict[Key, Outcome]:
        h = self._h
        best: dict[Key, Outcome] = dict.fromkeys(keys, MISS)
        with h.lock:
            served = {key: place for key in keys if (place := h.served.pop(key, None)) is not None}
        for place in range(h.last + 1):
            until = h.until(place, deadline)
            bad = [key for key, read_from in served.items() if read_from == place]
            others = [key for key, read_from in served.items() if read_from != place]
            bad += self._unsound(place, others, until, best)
            if bad:
                for key, outcome in zip(bad, self._mover.quarantine(place, bad, until), strict=True):
                    _rank(best, key, outcome)
        return best

    def _unsound(self, place: int, keys: Sequence[Key], deadline: float, best: dict[Key, Outcome]) -> list[Key]:
        """Of the records that a tier has, those that cannot be shown to be what they should be."""
        h = self._h
        bad: list[Key] = []
        if not keys:
            return bad
        for key, found in zip(keys, h.ask(place, "stat", keys, deadline), strict=True):
            if found.status is Status.ERROR:
                _rank(best, key, found)
            elif found.status is Status.OK:
                try:
                    staged = self._mover.read_whole(place, [key], [found.nbytes], deadline)
                except KVStoreError as error:  # no memory to look at it
                    _rank(best, key, Outcome.failed(error))
                    continue
                for _, view, buffer in staged:
                    if damaged(view, key) is not False:
                        bad.append(key)
                    if buffer is not None:
                        buffer.release()
        return bad


def _rank(best: dict[Key, Outcome], key: Key, outcome: Outcome) -> None:
    """ERROR beats OK beats MISS."""
    if outcome.status is Status.ERROR:
        best[key] = outcome
    elif outcome.status is Status.OK and best[key].status is Status.MISS:
        best[key] = OK
