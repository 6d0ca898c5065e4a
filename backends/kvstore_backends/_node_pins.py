"""The records of a GET, pinned for as long as its answer is being sent: found in memory, or brought up from the disk.

What may be pinned is bounded by the `Gate`, and nothing is pinned before there is leave.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvstore.errors import KVStoreError, PermanentError, PoolExhausted
from kvstore.keys import Key
from kvstore_transport.seam import Incoming

from ._memory_reservation import Record, span, spans
from ._node_below import before
from ._node_gate import Pass
from ._node_space import Space
from .node.protocol import Code, Status

__all__ = ["LEAVE_S", "Pins", "Refused", "code_of", "pin"]

LEAVE_S = 60.0
"""Longest wait for leave to hold memory, in seconds, even if the deadline is later."""

_LEASE_LEAVE_S = 0.1  # and for a lease: it is refused well before its deadline, which would cost the connection


class Refused(Exception):
    """The whole request is answered with `status`."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pins(NamedTuple):
    """Attributes:
    records: of each item of a batch; None: there is none.
    pins: what to let go, once for each reader.
    notes: code and reason of items that failed, by index.
    brought: records that came up from below for this.
    postponed: how many items failed only because the batch is too large: the client asks for them again.
    """

    space: Space
    held: Pass
    records: Sequence[Record | None]
    pins: Sequence[Record | None]
    notes: dict[int, tuple[Code, str]]
    brought: Collection[Key] = ()
    postponed: int = 0

    def drop(self) -> None:
        self.space.store.let_go(self.pins)
        self.held.leave()


def code_of(error: KVStoreError) -> Code:
    """What an error is on the wire."""
    if isinstance(error, PoolExhausted):
        return Code.FULL
    return Code.REFUSED if isinstance(error, PermanentError) else Code.FAILED


def pin(incoming: Incoming, space: Space, keys: Sequence[Key]) -> Pins:
    """The records of `keys`, which stay as they are until `Pins.drop`.

    Usually they are in memory and there is leave at once. Else they are let go while we wait, since what waits must
    not pin either.
    """
    store, client = space.store, incoming.peer.client
    records = store.find(keys, "get")
    if space.below is None or None not in records:
        charge, count = _charge(records)
        if charge <= space.gate.room(client) or count == 1:
            held = (space.gate.lend if incoming.leasing else space.gate.enter)(client, charge, 0.0)
            if held is not None:
                return Pins(space, held, records, records, {})
    store.let_go(records)
    return _pin_later(incoming, space, keys)


def _pin_later(incoming: Incoming, space: Space, keys: Sequence[Key]) -> Pins:
    notes: dict[int, tuple[Code, str]] = {}
    failures: dict[Key, KVStoreError] = {}
    client, room = incoming.peer.client, space.gate.room(incoming.peer.client)
    until = before(incoming.deadline)
    sizes = _sizes(space, keys, failures, until)
    # No more than one client may ever hold: the first record, and those after it that fit.
    wanted: dict[Key, None] = {}
    charge = 0
    for index, key in enumerate(keys):
        if key in wanted or key not in sizes:
            continue
        if wanted and charge + span(sizes[key]) > room:
            text = f"more than {room} bytes of the node's memory at a time: ask for fewer records"
            notes[index] = (Code.FAILED, text)
            continue
        wanted[key] = None
        charge += span(sizes[key])
    postponed = len(notes)
    now = time.monotonic()
    if incoming.leasing:
        held = space.gate.lend(client, charge, now + min((incoming.deadline - now) / 2, _LEASE_LEAVE_S))
    else:
        held = space.gate.enter(client, charge, min(incoming.deadline, now + LEAVE_S))
    if held is None:
        raise Refused(Status.BUSY, f"no leave to hold {charge} bytes of memory came in time")
    found: dict[Key, Record] = {}
    brought: set[Key] = set()
    try:
        _bring(space, [*wanted], sizes, found, brought, failures, until)
    except BaseException:
        space.store.let_go([*found.values()])
        held.leave()
        raise
    records = [found.get(key) for key in keys]
    for index, key in enumerate(keys):
        if records[index] is None and key in failures:
            notes[index] = code_of(failures[key]), str(failures[key])
    return Pins(space, held, records, [*found.values()], notes, brought, postponed)


def _bring(
    space: Space, missing: Sequence[Key], sizes: Mapping[Key, int], found: dict[Key, Record], brought: set[Key],
    failures: dict[Key, KVStoreError], deadline: float,
) -> None:  # fmt: skip
    """Pin records in memory, or bring them up from below; what is in neither is left out. What somebody else brings up
    at the same time may be evicted before we see it there, so we look again."""
    store, below = space.store, space.below
    while missing:
        records = store.find(missing, "get")
        found.update((key, record) for key, record in zip(missing, records, strict=True) if record is not None)
        missing = [key for key, record in zip(missing, records, strict=True) if record is None]
        if below is None or not missing:
            return
        if not sizes:
            outcomes = below.sizes(missing, deadline)
            sizes = {key: each.nbytes for key, each in zip(missing, outcomes, strict=True) if each.ok}
            failures.update((key, each.error) for key, each in zip(missing, outcomes, strict=True) if each.error)
        wanted = [key for key in missing if key in sizes]
        loaded = below.load(wanted, [sizes[key] for key in wanted], deadline)
        found.update(loaded.records)
        brought.update(loaded.records)
        failures.update(loaded.failures)
        missing, sizes = loaded.elsewhere, {}


def _sizes(
    space: Space, keys: Sequence[Key], failures: dict[Key, KVStoreError], deadline: float
) -> dict[Key, int]:  # fmt: skip
    """Bytes of the records of `keys` that are in memory or on disk; `failures` takes those that cannot be told."""
    store = space.store
    with store.lock:
        store.check("get")
        records = store.look_locked(keys)
    sizes = {key: record.found.nbytes for key, record in zip(keys, records, strict=True) if record is not None}
    if space.below is not None:
        missing = [*dict.fromkeys(key for key in keys if key not in sizes)]
        for key, outcome in zip(missing, space.below.sizes(missing, deadline), strict=True):
            if outcome.ok:
                sizes[key] = outcome.nbytes
            elif outcome.error is not None:
                failures[key] = outcome.error
    return sizes


def _charge(records: Sequence[Record | None]) -> tuple[int, int]:
    """(bytes of memory that a reader of `records` holds, how many records they are)."""
    sizes = [record.found[1] for record in {*records} if record is not None]
    return spans(sizes), len(sizes)
