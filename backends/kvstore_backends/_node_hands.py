"""Records of one namespace taken in hand for the control API: read in one tier, written to one, removed from one.

The tiers are those of `Space`: the memory, and the places below it. All that is stored or removed goes by the ways that
everything else goes, so that what is counted stays right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvstore.backend import MISS, OK, Backend, Capability, KeyInfo, Outcome, Read, Write
from kvstore.control.instance import UnknownError
from kvstore.errors import CorruptRecord, PoolExhausted
from kvstore.keys import Key
from kvstore.record import Header, NeedMore, parse_header

from ._memory_reservation import Record
from ._node_space import Space
from ._node_tiers import MEMORY, Place

__all__ = ["BATCH_BYTES", "CALL_S", "Hands", "Held"]

BATCH_BYTES = 32 << 20
"""Bytes of records that one step of a job holds."""

CALL_S = 60.0
"""Deadline of one step."""

_HEAD_BYTES = 4096
_LIST_S = 3600.0
_PUT_BACK_S = 10.0  # at least, for what was removed to be put in its place


class Held(NamedTuple):
    """A record in hand."""

    key: Key
    view: memoryview


class Hands:
    """The tiers of a namespace, by name."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._places = {place.name: place for place in (space.below.lower.places if space.below is not None else ())}

    @property
    def tiers(self) -> list[str]:
        """Names, the fastest first."""
        return [MEMORY, *self._places]

    @property
    def places(self) -> Sequence[Place]:
        """Those below the memory, the fastest first."""
        return [*self._places.values()]

    def check(self, tier: str) -> None:
        """Raises `UnknownError` if the namespace has no such tier."""
        if tier != MEMORY and tier not in self._places:
            raise UnknownError(
                f"{self.space.namespace.shown} has no tier {tier[:64]!r}; it has {', '.join(self.tiers)}"
            )

    # Where records are.

    def in_memory(self, keys: Sequence[Key]) -> list[int]:
        """Bytes of each record in memory, -1 if it is not there."""
        store = self.space.store
        with store.lock:
            store.check("stat")
            records = store.look_locked(keys)
        return [-1 if record is None else record.found.nbytes for record in records]

    def stat(self, tier: str, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """As `Backend.stat`, of one tier."""
        if tier == MEMORY:
            return self.space.backend.stat(keys, deadline=deadline)
        place = self._places[tier]
        if place.number < 0 and self.space.below is not None:  # a folder alone has records that are too old
            return self.space.below.sizes(keys, deadline)
        return place.backend.stat(keys, deadline=deadline)

    def pages(self, tier: str, deadline: float | None = None) -> Iterator[Sequence[KeyInfo]]:
        """As `Backend.list`, of one tier; nothing if it cannot be listed."""
        until = time.monotonic() + _LIST_S if deadline is None else deadline
        if tier == MEMORY:
            yield from self.space.backend.list(deadline=until)
        elif self._places[tier].number < 0 and self.space.below is not None:
            yield from self.space.below.pages(until)
        elif Capability.LIST in self._places[tier].backend.capabilities:
            yield from self._places[tier].backend.list(deadline=until)

    # Reading.

    @contextmanager
    def whole(self, tier: str, keys: Sequence[Key], deadline: float) -> Iterator[tuple[list[Held], dict[Key, str]]]:
        """Whole records of one tier, as long as the block lasts, and why others could not be had. Those in memory are
        where they lie."""
        failures: dict[Key, str] = {}
        if tier == MEMORY:
            pinned = self.space.store.pin(keys)
            try:
                found = [Held(key, each.view.toreadonly()) for key, each in zip(keys, pinned, strict=True) if each]
                failures.update(
                    (key, "it is not there") for key, each in zip(keys, pinned, strict=True) if each is None
                )
                yield found, failures
            finally:
                self.space.store.let_go(pinned)
            return
        sizes = self.stat(tier, keys, deadline)
        wanted: list[Held] = []
        for key, outcome in zip(keys, sizes, strict=True):
            if outcome.ok:
                wanted.append(Held(key, memoryview(bytearray(outcome.nbytes))))
            else:
                failures[key] = "it is not there" if outcome.error is None else outcome.error.message
        reads = [Read(key, view) for key, view in wanted]
        answers = self._places[tier].backend.get_into(reads, deadline=deadline)
        found = []
        for held, answer in zip(wanted, answers, strict=True):
            if answer.ok and answer.nbytes == len(held.view):
                found.append(held)
            else:
                failures[held.key] = "it is not there" if answer.error is None else answer.error.message
        yield found, failures

    def headers(self, tier: str, infos: Sequence[KeyInfo], deadline: float) -> list[Header | None]:
        """The headers of records of one tier; None: it could not be read, or is no record of kvstore's."""
        heads = self._heads(tier, [(info.key, min(info.nbytes, _HEAD_BYTES)) for info in infos], deadline)
        return [
            None if head is None else self._header(tier, info, head, deadline)
            for info, head in zip(infos, heads, strict=True)
        ]

    def _header(self, tier: str, info: KeyInfo, head: memoryview, deadline: float) -> Header | None:
        """Of the first bytes of a record; reads once more if they are too few."""
        for again in (True, False):
            try:
                return parse_header(head, key=info.key, nbytes=info.nbytes)
            except NeedMore as error:
                longer = self._heads(tier, [(info.key, min(error.need, info.nbytes))], deadline)[0] if again else None
                if longer is None:
                    return None
                head = longer
            except CorruptRecord:
                return None
        return None

    def _heads(self, tier: str, wanted: Sequence[tuple[Key, int]], deadline: float) -> list[memoryview | None]:
        views = [memoryview(bytearray(nbytes)) for _, nbytes in wanted]
        reads = [Read(key, view) for (key, _), view in zip(wanted, views, strict=True)]
        if tier == MEMORY:
            pinned = self.space.store.pin([key for key, _ in wanted])  # not `get`, which would count as use
            try:
                for view, record in zip(views, pinned, strict=True):
                    if record is not None:
                        view[:] = record.view[: len(view)]
            finally:
                self.space.store.let_go(pinned)
            return [None if record is None else view for view, record in zip(views, pinned, strict=True)]
        answers = self._places[tier].backend.get_into(reads, deadline=deadline)
        return [
            view if each.ok and each.nbytes == len(view) else None for view, each in zip(views, answers, strict=True)
        ]

    # Writing.

    def put(self, tier: str, records: Sequence[Held], deadline: float) -> list[Outcome]:
        """Store records in one tier. What is put into memory is not written below for that."""
        writes = [Write(held.key, (held.view,)) for held in records]
        if tier == MEMORY:
            return self.space.backend.put(writes, deadline=deadline)
        place, below = self._places[tier], self.space.below
        assert below is not None
        tiers = below.lower.tiers
        if tiers is None:
            return below.backend.put(writes, deadline=deadline)
        return tiers.put_in(place.number, writes, deadline=deadline)

    def replace(self, records: Sequence[tuple[Held, memoryview]], deadline: float) -> dict[Key, str]:
        """Have other bytes in the place of records, in all tiers that have them. They are in memory first, and stay
        pinned there until each tier below has the new bytes or its old ones again, so nothing is lost if a tier fails.

        Args:
            records: what was there, as it was read, and what is to be there.

        Returns:
            why, of those that are not in all tiers as they should be.
        """
        failures: dict[Key, str] = {}
        store, below = self.space.store, self.space.below
        for held, data in records:
            try:
                if not store.replace(held.key, data, deadline):
                    stored = self.space.backend.put([Write(held.key, (data,))], deadline=deadline)[0]
                    if stored.error is not None:
                        failures[held.key] = stored.error.message
            except PoolExhausted as error:
                failures[held.key] = error.message
        todo = [each for each in records if each[0].key not in failures]
        if below is None or not todo:
            return failures
        keys = [held.key for held, _ in todo]
        pinned = store.pin(keys)
        try:
            with below.replacing(keys, deadline) as late:
                failures.update((key, "it is being written or removed") for key in late)
                gone = {key for key, record in zip(keys, pinned, strict=True) if record is None or record.gone}
                here = [each for each in todo if each[0].key not in late and each[0].key not in gone]
                _replace_below(below.backend, here, deadline, failures)
            below.backlog.offer(keys, [None] * len(keys))  # what was nowhere below, or could not be put there
        finally:
            store.let_go(pinned)
        return failures

    def bring_up(self, keys: Sequence[Key], deadline: float) -> list[bool]:
        """Have records in memory; whether they are."""
        below = self.space.below
        if below is not None:
            missing = [key for key, size in zip(keys, self.in_memory(keys), strict=True) if size < 0]
            sizes = below.sizes(missing, deadline)
            wanted = {key: each.nbytes for key, each in zip(missing, sizes, strict=True) if each.ok}
            if wanted:
                loaded = below.load([*wanted], [*wanted.values()], deadline)
                self.space.store.let_go([*loaded.records.values()])
        return [size >= 0 for size in self.in_memory(keys)]

    # Removing.

    def remove(self, tier: str, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Remove records from one tier alone. What the memory must still write below stays there: `PoolExhausted`."""
        if tier != MEMORY:
            place, below = self._places[tier], self.space.below
            assert below is not None
            tiers = below.lower.tiers
            if tiers is None:
                return below.backend.delete(keys, deadline=deadline)
            return tiers.delete_in(place.number, keys, deadline=deadline)
        store = self.space.store
        outcomes: list[Outcome] = []
        busy = Outcome.failed(PoolExhausted("it is being read, leased or written below", backend=store.name))
        with store.lock:
            store.check("delete")
            for key in keys:
                record: Record | None = store.records.get(key)
                if record is None:
                    outcomes.append(MISS)
                elif record.readers or not record.buffer.exclusive:
                    outcomes.append(busy)
                else:
                    store.remove_locked(key)
                    outcomes.append(OK)
            store.tell_locked()
            store.changed.notify_all()
        return outcomes

    def remove_all(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """From all tiers."""
        return self.space.delete(keys, deadline)


def _replace_below(
    backend: Backend, records: Sequence[tuple[Held, memoryview]], deadline: float, failures: dict[Key, str]
) -> None:  # fmt: skip
    removed = backend.delete([held.key for held, _ in records], deadline=deadline) if records else []
    todo: list[tuple[Held, memoryview]] = []
    for each, outcome in zip(records, removed, strict=True):
        if outcome.error is not None:
            failures[each[0].key] = outcome.error.message
        elif outcome.ok:
            todo.append(each)
    for anew in (True, False):  # what is new, else what was there
        if todo:
            writes = [Write(held.key, (data if anew else held.view,)) for held, data in todo]
            stored = backend.put(writes, deadline=max(deadline, time.monotonic() + _PUT_BACK_S))
            failures.update(
                (write.key, outcome.error.message)
                for write, outcome in zip(writes, stored, strict=True)
                if outcome.error is not None
            )
            todo = [each for each, outcome in zip(todo, stored, strict=True) if outcome.error is not None]
