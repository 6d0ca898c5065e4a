"""Conversations: their tokens, turns and TTL, and what happens when one outgrows the model's window.

    sessions = SessionStore(kv, window=2048)              # kv: a KVCacheStore, best with rope="pre"
    session = sessions.open("user 7", system=system_ids)
    turn = session.turn(question_ids)                     # drops the oldest tokens if they do not fit any more
    cache, hit = sessions.load(turn)
    out = model.generate(turn.input_ids, **kv.cache_argument(cache))
    turn.finish(answer_ids)
    sessions.save(turn, cache)                            # the KV, and the session's state for other nodes

A session is named by its id and by its system prompt: with another system prompt the same id is another session, and
what this store knew of the old one is forgotten.

**Truncation.** When history, new tokens and the reserve for the answer exceed the window, the oldest tokens behind the
head (`sinks`, and the system prompt) are dropped, `drop` of the window at least, and the rest moves forward. With K
stored before the rotary embedding (`rope="pre"`) the KV of the rest is still there: the session keeps the list of its
records under the names that they were stored under, uses slices of them, and K is embedded at the new positions when it
is loaded. Cuts are made at the beginning of a record (up to a chunk more is dropped). This *approximates* computing the
truncated text: the kept KV has seen the dropped tokens, as in CachedAttention (arXiv 2403.19708, "decoupled positional
encoding"). So what is computed on top of it gets names of its own, from which nobody else takes it for the exact KV of
the truncated text (`kvstore._session_state`). With K stored after the embedding (`rope="post"`) the truncated text is a
new prompt, and everything is computed again.

**Persistence.** `save` writes the state as a small opaque record, one per turn, and removes the one before the last:
stores are write-once, so a state is never overwritten, and a reader finds the old one or the new one. If two nodes
continue one session at once, the first to save wins: `save` tells the other, and its next `open` gives what was saved.
A state that is lost or damaged costs recomputation only: `turn(whole=...)` takes the conversation as the client sends
it.

A session is used by one thread at a time; a `SessionStore` by any number.
"""

from __future__ import annotations

import hashlib
import reprlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ._session_slots import StateSlots, Written, deadline_after
from ._session_state import LONGEST_TTL, MAX_NAME_BYTES, History, Piece, Said, Seen, State, Tokens, token_array
from ._session_turn import Turn
from .errors import ConfigError
from .keys import KeyContext

if TYPE_CHECKING:
    from .store import Store

__all__ = ["Piece", "Saved", "Session", "SessionStore", "Turn", "TurnCache"]

_COUNTERS = (
    "truncations", "dropped_tokens", "tokens", "hit_tokens", "restored", "expired", "invalidated", "stored",
    "conflict", "failed",
)  # fmt: skip


class TurnCache(Protocol):
    """What moves the KV of a turn: `kvstore.integrations.transformers.KVCacheStore`, or an engine's own.

    Attributes:
        store: the open store.
        context: key context of the records, as the model is now; changes when its weights change.
        rope: "pre" if K is stored before the rotary embedding, else "post".
    """

    store: Store
    context: KeyContext
    rope: str

    def load_turn(self, turn: Turn, *, timeout: float | None = None) -> tuple[Any, int]:
        """A cache with the KV of the leading `turn.pieces` that are stored, K embedded at `Piece.position`, and how
        many tokens it holds. Must call `turn.served` with that number."""

    def save_turn(self, turn: Turn, cache: Any, *, timeout: float | None = None) -> Any:
        """Store the chunks `turn.new_chunks(columns)` of a cache that holds that many tokens."""


@dataclass(frozen=True)
class _Limits:
    window: int | None
    reserve: int
    sinks: int
    keep_system: bool
    drop: float
    ttl: float


class Session:
    """One conversation. Made by `SessionStore.open`.

    Attributes:
        name: its id.
        system: tokens of the system prompt, with which every context begins; `system_hash` is their SHA-256.
        turns: finished turns.
        dropped: tokens of the conversation that were dropped.
        ttl: seconds without a turn after which it is over.
        used: when it was used last, in seconds of the wall clock.
        restarts: how often `turn(whole=...)` found that the conversation was not the one known.
    """

    def __init__(self, owner: SessionStore, name: str, system: Tokens) -> None:
        self._owner = owner
        self.name = name
        self.system = system
        self.system_hash = hashlib.sha256(system.tobytes()).digest()
        self.ttl = owner.limits.ttl
        self.used = float(owner.clock())
        self.turns = self.restarts = 0
        self._current: Turn | None = None
        self._saved_turns = 0
        self._overtaken = False
        self._said = self._beginning_with(system)

    @property
    def tokens(self) -> Tokens:
        """The context after the last turn, u32 `[tokens]`."""
        return self._said.history.tokens

    @property
    def seen(self) -> int:
        """Tokens of the whole conversation, dropped ones included."""
        return self._said.seen.count

    @property
    def dropped(self) -> int:
        return self._said.dropped

    @property
    def expired(self) -> bool:
        return self._owner.clock() - self.used >= self.ttl

    def turn(self, new: Any = None, *, whole: Any = None) -> Turn:
        """Begin a turn; one that was begun and not finished is forgotten, as if it had never been.

        Args:
            new: the token ids that came since the last turn (a user's message), without answers and system prompt.
            whole: instead, all token ids of the conversation so far, system prompt and answers included, as stateless
                clients send them. If they do not continue what this session knows (an edit, a lost state), it begins
                again with them; if they are too many for the window then, `drop` does not apply, and as many of the
                last ones stay as fit.

        Raises:
            ConfigError: no new tokens, bad token ids, a conversation that does not begin with the system prompt, or
                new tokens that do not fit the window with the head and the reserve.
        """
        if (new is None) == (whole is None):
            raise ConfigError("a turn needs either its new tokens or the whole conversation")
        self._follow_model()
        limits, before = self._owner.limits, self._said
        if whole is None:
            added = token_array(new)
        else:
            before, added = self._continued(token_array(whole))
        if not len(added) and (whole is None or not before.seen.count):
            raise ConfigError(f"a turn of session {self.name!r} needs at least one new token")
        history, dropped = before.history, 0
        if limits.window is not None and len(history.tokens) + len(added) > limits.window - limits.reserve:
            history = self._truncated(history, limits.window, len(added))
            dropped = len(before.history.tokens) - len(history.tokens)
            self._owner.count(truncations=1, dropped_tokens=dropped)
        self._current = Turn(self, before, history.extended(added), dropped)
        return self._current

    def state(self) -> State:
        """What `SessionStore.save` writes."""
        said = self._said
        return State(
            self.name, self.system_hash, said.history, self.turns, said.seen, said.dropped, self.used, self.ttl
        )

    def _head(self) -> int:
        limits = self._owner.limits
        return max(limits.sinks, len(self.system) if limits.keep_system else 0)

    def _truncated(self, history: History, window: int, added: int) -> History:
        limits = self._owner.limits
        head, room = min(self._head(), len(history.tokens)), window - limits.reserve - added
        if room < head:
            raise ConfigError(
                f"session {self.name!r}: a window of {window} tokens has no room for {added} new ones, the {head} kept "
                f"at the head (sinks, system prompt) and a reserve of {limits.reserve}"
            )
        # Of a conversation that comes as a whole nobody knows where the new message begins: as much stays as fits.
        most = min(room, max(head, int(window * (1 - limits.drop)))) if added else room
        movable = self._owner.kv.rope == "pre"
        return history.cut(history.cut_to(head, most, movable=movable), movable=movable)

    def _continued(self, whole: Tokens) -> tuple[Said, Tokens]:
        """What a conversation has of this session, and the tokens behind it; all of it if it is another one."""
        if not np.array_equal(whole[: len(self.system)], self.system):
            raise ConfigError(f"the conversation of session {self.name!r} does not begin with its system prompt")
        if self.turns:
            limits, new = self._owner.limits, len(whole) - self.seen
            fits = limits.window is None or new + self._head() <= limits.window - limits.reserve
            if new > 0 and fits and Seen().plus(whole[: self.seen]) == self._said.seen:
                return self._said, whole[self.seen :]
            self.restarts += 1
        return self._beginning_with(whole), whole[:0]

    def _beginning_with(self, tokens: Tokens) -> Said:
        kv = self._owner.kv
        return Said(History(kv.context, kv.store.config.chunk_size, tokens), Seen().plus(tokens), 0)

    def _take(self, state: State) -> None:
        self._said = Said(state.history, state.seen, state.dropped)
        self.turns, self.used, self.ttl = state.turns, state.used, state.ttl
        self._saved_turns = state.turns
        self._overtaken = False
        self._current = None

    @property
    def _behind(self) -> int:
        """States after more turns than these replace this session: once another node was faster, all it saved do."""
        return self._saved_turns if self._overtaken else self.turns

    def _follow_model(self) -> None:
        """With other weights nothing that is stored is of use; the tokens are."""
        context = self._owner.kv.context
        if context.digest != self._said.history.context.digest:
            self._said = replace(self._said, history=self._said.history.without_base(context))

    def _finish(self, turn: Turn, history: History) -> None:
        if turn is not self._current:
            raise ConfigError(f"this turn of session {self.name!r} is over, or another one has begun")
        self._current, before = None, turn._before
        new = history.tokens[len(before.history.tokens) - turn.dropped :]
        self._said = Said(history, before.seen.plus(new), before.dropped + turn.dropped)
        self.turns += 1
        self.used = float(self._owner.clock())


class Saved(NamedTuple):
    """What `SessionStore.save` did.

    Attributes:
        kv: what `TurnCache.save_turn` returned.
        state: True if the session's state is stored as it is now. False: another node has continued the session
            meanwhile (at this turn, or beyond it), or the store could not; the log says which.
    """

    kv: Any
    state: bool


class SessionStore:
    """The sessions of one model over one store.

    Args:
        kv: what moves KV: a `KVCacheStore`, or an engine's own `TurnCache`.
        window: tokens that the model may have in its context, answer included; None: never truncate.
        reserve: tokens of the window kept free for the answer.
        sinks: tokens at the head that are never dropped: attention leans on the first ones, whatever they are.
        keep_system: keep the whole system prompt too.
        drop: share of the window that a truncation frees at least, 0 to 1, so that not every turn truncates.
        ttl: seconds without a turn after which a session is over (at most a year).
        persist: write states and look for those of other nodes.
        max_sessions: how many are kept in memory; beyond, those used longest ago are forgotten there.
        clock: seconds of the wall clock, the same on all nodes.

    Raises:
        ConfigError: an impossible number.
    """

    def __init__(
        self,
        kv: TurnCache,
        *,
        window: int | None = None,
        reserve: int = 0,
        sinks: int = 4,
        keep_system: bool = True,
        drop: float = 0.5,
        ttl: float = 3600.0,
        persist: bool = True,
        max_sessions: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, value, least in (
            ("window", 1 if window is None else window, 1), ("reserve", reserve, 0), ("sinks", sinks, 0),
            ("max_sessions", max_sessions, 1),
        ):  # fmt: skip
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"sessions: {name}={value!r} must be an integer of at least {least}")
        for name in ("store", "context", "rope", "load_turn", "save_turn"):
            if not hasattr(kv, name):
                raise ConfigError(f"sessions: a KVCacheStore or another TurnCache is needed; {type(kv).__name__} has "
                                  f"no {name}")  # fmt: skip
        if window is not None and window <= reserve + sinks:
            raise ConfigError(f"sessions: window={window} has no room beside reserve={reserve} and sinks={sinks}")
        if not _is_number(drop) or not 0 <= drop <= 1:
            raise ConfigError(f"sessions: drop={drop!r} must be a number between 0 and 1")
        if not _is_number(ttl) or not 0 < ttl <= LONGEST_TTL:
            raise ConfigError(f"sessions: ttl={ttl!r} must be more than 0 and at most {LONGEST_TTL:.0f} seconds")
        if not callable(clock):
            raise ConfigError(f"sessions: clock={clock!r} must be a function that gives seconds")
        self.kv = kv
        self.limits = _Limits(window, reserve, sinks, keep_system, float(drop), float(ttl))
        self.clock = clock
        self._persist = persist
        self._most = max_sessions
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._states = StateSlots(kv)

    def open(self, name: str, *, system: Any = (), timeout: float | None = None) -> Session:
        """The session of this id and system prompt: as it is here, or as another node left it if that is newer, or new.

        Args:
            name: the session's id, text of at most 1,024 bytes in UTF-8.
            system: token ids of the system prompt.
            timeout: seconds for everything; None means the store's `lookup_timeout`. What is not found by then counts
                as not there.

        Raises:
            ConfigError: an id, a token or a timeout that cannot be one.
        """
        _check_name(name)
        deadline = deadline_after(timeout, self.kv.store.config.lookup_timeout)
        tokens = token_array(system)
        fresh = Session(self, name, tokens)
        with self._lock:
            known = self._sessions.get(name)
        session, over = known or fresh, False
        if known is not None and known.system_hash != fresh.system_hash:
            self.count(invalidated=1)
            session = fresh
        elif known is not None and known.expired:  # here; another node may have gone on
            session, over = fresh, True
        if self._persist:
            found = self._states.newest(name, session.system_hash, session._behind, float(self.clock()), deadline)
            if found.state is not None:
                self.count(restored=1)
                session._take(found.state)
                over = False
            elif not session.turns and found.over:
                over = True
                self._states.delete(found.over, deadline)
            if known is not None and known.system_hash != session.system_hash:
                self._states.remove([(name, known.system_hash, known.turns)], known.used, deadline)
        self.count(expired=int(over))
        with self._lock:
            other = self._sessions.get(name)
            if other is not None and other is not known:  # another thread was faster
                session = other if other.system_hash == session.system_hash else session
            self._sessions[name] = session
            self._sessions.move_to_end(name)
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
        return session

    def load(self, turn: Turn, *, timeout: float | None = None) -> tuple[Any, int]:
        """The KV of the turn's leading pieces: a cache, and how many tokens it holds.

        Raises:
            ConfigError: the turn is not one of this store.
            KVStoreError: of `load_turn`: the store is closed, or any trouble with `on_error="raise"`.
        """
        self._check_turn(turn)
        cache, hit = self.kv.load_turn(turn, timeout=timeout)
        self.count(tokens=len(turn.tokens), hit_tokens=hit)
        return cache, hit

    def save(self, turn: Turn, cache: Any, *, timeout: float | None = None) -> Saved:
        """Store the KV of a turn, and, once the turn is finished, the state of its session.

        Args:
            cache: what holds the KV, begun with what `load` gave.
            timeout: seconds for the KV, and as many for the state; None means the store's `put_timeout`.

        Raises:
            ConfigError: the turn is not one of this store, or the cache not one of the turn.
            KVStoreError: of `save_turn`, with `on_error="raise"`. The state is written all the same.
        """
        self._check_turn(turn)
        saved = False
        try:
            kv = self.kv.save_turn(turn, cache, timeout=timeout)
        finally:
            saved = self.save_state(turn.session, timeout=timeout)
        return Saved(kv, saved)

    def save_state(self, session: Session, *, timeout: float | None = None) -> bool:
        """Store a session's state, for engines that move KV on their own. See `Saved.state`."""
        if not self._persist:
            return False
        if session._saved_turns == session.turns:
            return True
        written = self._states.write(session.state(), deadline_after(timeout, self.kv.store.config.put_timeout))
        self.count(**{written.name.lower(): 1})
        session._overtaken = written is Written.CONFLICT
        if written is Written.STORED:
            session._saved_turns = session.turns
        return written is Written.STORED

    def expire(self, name: str | None = None, *, timeout: float | None = None) -> list[str]:
        """End the session `name`, or all that are past their TTL, of those in memory; their states are removed, unless
        another node has gone on with the session. Records of KV stay: other sessions may share them, and the eviction
        policy knows their TTL.

        Args:
            timeout: seconds for removing states; None means the store's `put_timeout`. What is left is past its TTL,
                and taken by nobody.

        Returns:
            The ids of those that ended.
        """
        if name is not None:
            _check_name(name)
        deadline = deadline_after(timeout, self.kv.store.config.put_timeout)
        with self._lock:
            known = self._sessions.values() if name is None else [self._sessions.get(name)]
            ended = [each for each in known if each is not None and (name is not None or each.expired)]
            for session in ended:
                del self._sessions[session.name]
        self.count(expired=len(ended))
        if self._persist:
            named = [(each.name, each.system_hash, each.turns) for each in ended]
            self._states.remove(named, float(self.clock()), deadline)
        return [session.name for session in ended]

    def stats(self) -> dict[str, int]:
        """Counters since the start, and `sessions`: how many are in memory."""
        with self._lock:
            return {**self._counts, "sessions": len(self._sessions)}

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def _check_turn(self, turn: Any) -> None:
        if not isinstance(turn, Turn):
            raise ConfigError(f"a turn is needed, as Session.turn gives it, not {type(turn).__name__}")
        if turn.session._owner is not self:
            raise ConfigError(f"this turn of session {turn.session.name!r} belongs to another SessionStore")


def _check_name(name: Any) -> None:
    try:
        if not isinstance(name, str) or not name:
            raise ValueError("it must be non-empty text")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"it has more than {MAX_NAME_BYTES} bytes")
    except ValueError as error:  # half a surrogate pair has no encoding
        raise ConfigError(f"{reprlib.repr(name)} cannot be the id of a session: {error}", cause=error) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
