"""Where the states of sessions lie in a store, so that another node can go on.

Stores are write-once, so a state is not overwritten. A session has three places, and the state after turn n goes to
place n mod 3; then the next place is emptied. So the newest state and the one before it are there, and whoever reads
all three headers finds one of them at any moment.

A header says which turn its state is of, and when the session is over if nobody goes on. What is over counts as not
there, so nothing depends on its removal; and what is not over and newer than one's own is never removed.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ._session_state import MAX_STATE_BYTES, State
from .backend import Status
from .errors import ConfigError, CorruptRecord, KVStoreError
from .eviction.base import RecordInfo
from .keys import Key, _encode, opaque_key
from .record import Header, opaque_spec
from .targets import Item, Want

if TYPE_CHECKING:
    from .sessions import TurnCache

__all__ = ["StateSlots", "Written", "deadline_after"]

logger = logging.getLogger("kvstore.sessions")

_SLOTS = 3
_TURNS, _END = "session_turns", "session_end"  # in the meta block
_AT_ONCE = 1024  # sessions that are removed with one call


class Written(enum.Enum):
    """What became of a state: it is there; another node has written this turn or a later one; the store could not."""

    STORED = "stored"
    CONFLICT = "conflict"
    FAILED = "failed"


class Found(NamedTuple):
    """What `StateSlots.newest` found.

    Attributes:
        state: the newest state that is not over.
        over: the places of states that are over, or whose header says nothing.
    """

    state: State | None
    over: list[Key]


class _Place(NamedTuple):
    """A place that is taken: by the state of which turn, and when (seconds of the wall clock) that is over."""

    head: Header
    turns: int
    end: float


def deadline_after(timeout: float | None, default: float) -> float:
    """Absolute monotonic seconds. Raises `ConfigError` for a timeout that is no number."""
    seconds = default if timeout is None else timeout
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or math.isnan(seconds):
        raise ConfigError(f"timeout={timeout!r} must be a number of seconds")
    return time.monotonic() + seconds


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

    def newest(self, name: str, system: bytes, behind: int, now: float, deadline: float) -> Found:
        """The newest state after more than `behind` turns that is not over at `now`. Two round trips, as a rule."""
        over: list[Key] = []
        try:
            places = [place for place in self._look(self.keys(name, system), deadline) if place is not None]
            over = [place.head.key for place in places if place.end <= now]
            for head, turns, end in sorted(places, key=lambda place: place.turns, reverse=True):
                if turns <= behind or end <= now or (data := self._content(head, deadline)) is None:
                    continue
                try:
                    state = State.unpack(
                        data,
                        name=name,
                        system=system,
                        context=self._kv.context,
                        chunk_size=self._kv.store.config.chunk_size,
                    )
                except CorruptRecord as error:
                    logger.warning("%s", error)
                    continue
                if state.turns == turns:
                    return Found(state, over)
                logger.warning("the state of session %r after turn %d says turn %d", name, turns, state.turns)
        except KVStoreError as error:
            logger.warning("the state of session %r is not read: %s", name, error)
        return Found(None, over)

    def write(self, state: State, deadline: float) -> Written:
        """Store a state, and make room for the next. Three round trips, as a rule."""
        store = self._kv.store
        places, data = self.keys(state.name, state.system), state.pack()
        number, after = state.turns % _SLOTS, (state.turns + 1) % _SLOTS
        spec = opaque_spec(len(data))
        meta = {_TURNS: state.turns, _END: state.used + state.ttl}
        info = RecordInfo(session=state.name, turns=state.turns, ttl=state.ttl)
        item = Item(places[number], spec.split(memoryview(data)), spec, meta, info=info)
        trouble: object = "an old state cannot be removed"
        for _ in range(2):
            try:
                outcome = store.submit_put([item], deadline=deadline).result()[0]
                if outcome.status not in (Status.OK, Status.EXISTS):
                    trouble = outcome.error
                    break
                stored = outcome.status is Status.OK
                try:
                    there = self._look(places, deadline)
                except KVStoreError:
                    if stored:
                        return Written.STORED
                    raise
                mine = there[number]
                newest = max((place.turns for place in there if place and place.end > state.used), default=-1)
                if newest > state.turns or (newest == state.turns and not stored):
                    if mine is not None and mine.turns == newest and self._content(mine.head, deadline) == data:
                        return Written.STORED
                    if stored:
                        self.delete([places[number]], deadline)
                    logger.warning("session %r was continued elsewhere: turn %d is stored there", state.name, newest)
                    return Written.CONFLICT
                if stored:
                    if there[after] is not None:
                        self.delete([places[after]], deadline)
                    return Written.STORED
                if mine is None:  # it may be anything, so it stays
                    trouble = "what lies in its place cannot be read"
                    break
                # An old state that could not be removed in its time, or one that is over.
                self.delete([places[number]], deadline)
            except ConfigError:
                raise  # too large: the caller's doing
            except KVStoreError as error:
                trouble = error
                break
        logger.warning("the state of session %r is not stored: %s", state.name, trouble)
        return Written.FAILED

    def remove(self, sessions: Sequence[tuple[str, bytes, int]], now: float, deadline: float) -> None:
        """Remove the states of these (id, hash of the system prompt, turns), but not those that are newer than these
        turns and not over at `now`: somebody has gone on with them."""
        for begin in range(0, len(sessions), _AT_ONCE):
            some = sessions[begin : begin + _AT_ONCE]
            keys = [key for name, system, _ in some for key in self.keys(name, system)]
            try:
                there = self._look(keys, deadline)
            except KVStoreError as error:
                logger.warning("old states of sessions are not removed: %s", error)
                return
            turns = [turns for _, _, turns in some for _ in range(_SLOTS)]
            pairs = zip(there, turns, strict=True)
            self.delete([p.head.key for p, known in pairs if p and (p.turns <= known or p.end <= now)], deadline)

    def _look(self, keys: Sequence[Key], deadline: float) -> list[_Place | None]:
        heads = self._kv.store.submit_heads(keys, deadline=deadline).result()
        return [None if head is None else _place(head) for head in heads]

    def delete(self, keys: Sequence[Key], deadline: float) -> None:
        if not keys:
            return
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


def _place(head: Header) -> _Place:
    """What a header says; of turn -1 and over if it does not say it."""
    try:
        meta = head.meta()
    except CorruptRecord:
        meta = {}
    turns, end = meta.get(_TURNS), meta.get(_END)
    if type(turns) is not int or turns < 0 or type(end) is not float or not math.isfinite(end):
        return _Place(head, -1, -math.inf)
    return _Place(head, turns, end)
