"""Where the states of sessions lie in a store, so that another node can go on.

Stores are write-once, so a state is not overwritten. A session has three places, and the state after turn n goes to
place n mod 3; then the next place is emptied. So the newest state and the one before it are there, and whoever reads
all three headers (they say which turn it is) finds one of them at any moment.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._session_state import MAX_STATE_BYTES, State
from .backend import Status
from .errors import ConfigError, CorruptRecord, KVStoreError
from .keys import Key, _encode, opaque_key
from .record import Header, opaque_spec
from .targets import Item, Want

if TYPE_CHECKING:
    from .sessions import TurnCache

__all__ = ["StateSlots", "Written"]

logger = logging.getLogger("kvstore.sessions")

_SLOTS = 3
_TURNS = "session_turns"  # in the meta block


class Written(enum.Enum):
    """What became of a state: it is there; another node has written this turn or a later one; the store could not."""

    STORED = "stored"
    CONFLICT = "conflict"
    FAILED = "failed"


class StateSlots:
    """The states of all sessions of one model. Never raises for trouble of the store: a state is only a hint."""

    def __init__(self, kv: TurnCache) -> None:
        self._kv = kv

    def keys(self, name: str, system: bytes) -> list[Key]:
        """The names of a session's places. The model is in them by its name, not by its weights: tokens stay valid
        when those change."""
        context = self._kv.context
        identity = _encode(["kvstore session", 1, name, system, context.model, context.cache_salt])
        return [opaque_key(identity + bytes([slot]), namespace=context.namespace) for slot in range(_SLOTS)]

    def newest(self, name: str, system: bytes, behind: int, timeout: float | None) -> State | None:
        """The newest state after more than `behind` turns, or None. Two round trips at most."""
        store = self._kv.store
        deadline = time.monotonic() + (store.config.lookup_timeout if timeout is None else timeout)
        try:
            heads = store.submit_heads(self.keys(name, system), deadline=deadline).result()
            found = [(_turns_of(head), head) for head in heads if head is not None]
            for turns, head in sorted(found, key=lambda each: each[0], reverse=True):
                if turns <= behind or (data := self._content(head, deadline)) is None:
                    continue
                try:
                    return State.unpack(
                        data, name=name, system=system, context=self._kv.context, chunk_size=store.config.chunk_size
                    )
                except CorruptRecord as error:
                    logger.warning("%s", error)
        except KVStoreError as error:
            logger.warning("the state of session %r is not read: %s", name, error)
        return None

    def write(self, state: State, timeout: float | None) -> Written:
        """Store a state, and make room for the next."""
        store = self._kv.store
        deadline = time.monotonic() + (store.config.put_timeout if timeout is None else timeout)
        places, data = self.keys(state.name, state.system), state.pack()
        key, after = (places[turn % _SLOTS] for turn in (state.turns, state.turns + 1))
        spec = opaque_spec(len(data))
        item = Item(key, spec.split(memoryview(data)), spec, {_TURNS: state.turns})
        trouble: object = "an old state cannot be removed"
        try:
            for _ in range(2):
                outcome = store.submit_put([item], deadline=deadline).result()[0]
                if outcome.status is Status.OK:
                    self._delete([after], deadline)
                    return Written.STORED
                if outcome.status is not Status.EXISTS:
                    trouble = outcome.error
                    break
                head = store.submit_heads([key], deadline=deadline).result()[0]
                there = -1 if head is None else _turns_of(head)
                if head is not None and there >= state.turns:
                    if self._content(head, deadline) == data:
                        return Written.STORED
                    logger.warning("session %r was continued elsewhere: turn %d is stored there", state.name, there)
                    return Written.CONFLICT
                # An old state that could not be removed in its time, or a damaged one.
                self._delete([key], deadline)
        except ConfigError:
            raise  # too large: the caller's doing
        except KVStoreError as error:
            trouble = error
        logger.warning("the state of session %r is not stored: %s", state.name, trouble)
        return Written.FAILED

    def remove(self, sessions: Sequence[tuple[str, bytes]]) -> None:
        """Remove the states of these (id, hash of the system prompt). What cannot be removed is past its TTL anyway,
        or is found under no name that anybody asks for."""
        keys = [key for name, system in sessions for key in self.keys(name, system)]
        if keys:
            self._delete(keys, None)

    def _delete(self, keys: Sequence[Key], deadline: float | None) -> None:
        try:
            self._kv.store.submit_delete(keys, deadline=deadline).result()
        except KVStoreError as error:
            logger.warning("old states of sessions are not removed: %s", error)

    def _content(self, head: Header, deadline: float) -> bytes | None:
        if head.raw_bytes > MAX_STATE_BYTES:
            return None
        data = bytearray(head.raw_bytes)
        want = Want(head.key, memoryview(data), opaque_spec(len(data)))
        outcome = self._kv.store.submit_get([want], deadline=deadline).result()[0]
        return bytes(data) if outcome.status is Status.OK else None


def _turns_of(head: Header) -> int:
    """Which turn a state is of, by its header; -1 if it does not say."""
    try:
        turns = head.meta().get(_TURNS)
    except CorruptRecord:
        return -1
    return turns if type(turns) is int else -1
