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
continue one session at once, the first to save wins, and `save` tells the other. A state that is lost or damaged costs
recomputation only: `turn(whole=...)` takes the conversation as the client sends it.

A session is used by one thread at a time; a `SessionStore` by any number.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ._session_slots import StateSlots, Written
from ._session_state import LONGEST_TTL, History, Piece, Seen, State, Tokens, token_array
from .errors import ConfigError
from .eviction.base import RecordInfo
from .keys import Key, KeyContext

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


class Turn:
    """One turn: the tokens to compute on, and where KV for them may be found.

    Attributes:
        session: whose.
        dropped: tokens dropped from the history for this turn.
        hit: tokens whose KV was loaded; None until `served`.
    """

    def __init__(self, session: Session, history: History, dropped: int) -> None:
        self.session = session
        self.dropped = dropped
        self.hit: int | None = None
        self._prompt = len(history.tokens)
        # A token is left to compute. A slice of the base is taken whole or not at all: else a part of it would lie in
        # a chunk that is named for KV computed on top of the base.
        self._history = history.served(self._prompt - 1)
        self._pieces: list[Piece] | None = None

    @property
    def tokens(self) -> Tokens:
        """The whole context: what was kept, the new tokens, and after `finish` the answer; u32 `[tokens]`."""
        return self._history.tokens

    @property
    def input_ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The prompt as a batch of one, `[1, tokens]`: `torch.from_numpy(turn.input_ids)`."""
        return self.tokens[None, : self._prompt].astype(np.int64)

    @property
    def context(self) -> KeyContext:
        """The key context under which the pieces were named."""
        return self._history.context

    @property
    def pieces(self) -> list[Piece]:
        """Everything that may be stored, in order, without gaps from position 0."""
        if self._pieces is None:
            self._pieces = self._history.pieces()
        return self._pieces

    @property
    def keys(self) -> list[Key]:
        """The names of the pieces, for `store.tiers.announce` and `pin`."""
        return [piece.key for piece in self.pieces]

    def served(self, columns: int) -> None:
        """The KV of the first `columns` tokens was loaded, the rest is computed. Must be told before anything is saved:
        slices of the base that were not found are no longer counted on. The loaded part of the base ends with a piece.
        """
        if not 0 <= columns <= len(self.tokens):
            raise ConfigError(f"{columns} tokens cannot have been loaded of a context of {len(self.tokens)}")
        self.hit = columns
        self._replace(self._history.served(columns))

    def rebound(self, context: KeyContext) -> None:
        """The model changed since this turn began: nothing that was stored is of use."""
        self.hit = 0
        self._replace(self._history.without_base(context))

    def new_chunks(self, columns: int) -> list[Piece]:
        """The chunks behind the base that a cache of `columns` tokens holds in full: what is to be stored. They are
        named for KV that was computed on top of just the pieces before them.

        Raises:
            ConfigError: the session was truncated, and nobody said what of it was loaded (`served`).
        """
        base = len(self._history.base)
        if base and self.hit is None:
            raise ConfigError(f"a turn of session {self.session.name!r} is saved before it was loaded; its context was "
                              "truncated, so it must be said what of it was loaded (Turn.served)")  # fmt: skip
        return [piece for piece in self.pieces[base:] if piece.end <= columns]

    @property
    def base_key(self) -> Key | None:
        """The key of the last piece before the chunks that are stored."""
        return self._history.base[-1].key if self._history.base else None

    def info(self, piece: Piece) -> RecordInfo:
        """What eviction policies are told about a piece."""
        session = self.session
        return RecordInfo(piece.position, piece.tokens, session.name, session.turns, session.ttl)

    def finish(self, answer: Any = ()) -> None:
        """The turn is over, with these tokens generated. Also says that the session was used now.

        Raises:
            ConfigError: bad token ids, or another turn has begun or ended since.
        """
        history = self._history.extended(token_array(answer))
        self.session._finish(self, history)
        self._replace(history)

    def _replace(self, history: History) -> None:
        if history is not self._history:
            self._history = history
            self._pieces = None


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
        self.used = owner.clock()
        self.turns = self.restarts = 0
        self._current: Turn | None = None
        self._saved_turns = 0
        self._restart(system)

    @property
    def tokens(self) -> Tokens:
        """The context after the last turn, u32 `[tokens]`."""
        return self._history.tokens

    @property
    def seen(self) -> int:
        """Tokens of the whole conversation, dropped ones included."""
        return self._seen.count

    @property
    def expired(self) -> bool:
        return self._owner.clock() - self.used >= self.ttl

    def turn(self, new: Any = None, *, whole: Any = None) -> Turn:
        """Begin a turn; one that was begun and not finished is forgotten.

        Args:
            new: the token ids that came since the last turn (a user's message), without answers and system prompt.
            whole: instead, all token ids of the conversation so far, system prompt and answers included, as stateless
                clients send them. If they do not continue what this session knows (an edit, a lost state), it begins
                again with them.

        Raises:
            ConfigError: no new tokens, bad token ids, a conversation that does not begin with the system prompt, or
                new tokens that do not fit the window with the head and the reserve.
        """
        if (new is None) == (whole is None):
            raise ConfigError("a turn needs either its new tokens or the whole conversation")
        self._follow_model()
        limits = self._owner.limits
        added = token_array(new) if whole is None else self._continuation(token_array(whole))
        if not len(added) and (whole is None or not self.seen):
            raise ConfigError(f"a turn of session {self.name!r} needs at least one new token")
        history, dropped = self._history, 0
        if limits.window is not None and len(history.tokens) + len(added) > limits.window - limits.reserve:
            history = self._truncated(history, limits.window, len(added))
            dropped = len(self._history.tokens) - len(history.tokens)
            self._owner.count(truncations=1, dropped_tokens=dropped)
        self._current = Turn(self, history.extended(added), dropped)
        return self._current

    def state(self) -> State:
        """What `SessionStore.save` writes."""
        return State(
            self.name, self.system_hash, self._history, self.turns, self._seen, self.dropped, self.used, self.ttl
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
                f"at the head and a reserve of {limits.reserve}"
            )
        most = min(room, max(head, int(window * (1 - limits.drop))))
        movable = self._owner.kv.rope == "pre"
        return history.cut(history.cut_to(head, most, movable=movable), movable=movable)

    def _continuation(self, whole: Tokens) -> Tokens:
        """The tokens of a conversation that this session does not know yet; all of it if it is another one."""
        if not np.array_equal(whole[: len(self.system)], self.system):
            raise ConfigError(f"the conversation of session {self.name!r} does not begin with its system prompt")
        if self.turns:
            limits, new = self._owner.limits, len(whole) - self.seen
            fits = limits.window is None or new + self._head() <= limits.window - limits.reserve
            if new > 0 and fits and Seen().plus(whole[: self.seen]) == self._seen:
                return whole[self.seen :]
            self.restarts += 1
        self._restart(whole)
        return whole[:0]

    def _restart(self, tokens: Tokens) -> None:
        kv = self._owner.kv
        self._history = History(kv.context, kv.store.config.chunk_size, tokens)
        self._seen, self.dropped = Seen().plus(tokens), 0

    def _take(self, state: State) -> None:
        self._history, self._seen = state.history, state.seen
        self.turns, self.dropped, self.used, self.ttl = state.turns, state.dropped, state.used, state.ttl
        self._saved_turns = state.turns
        self._current = None

    def _follow_model(self) -> None:
        """With other weights nothing that is stored is of use; the tokens are."""
        context = self._owner.kv.context
        if context.digest != self._history.context.digest:
            self._history = self._history.without_base(context)

    def _finish(self, turn: Turn, history: History) -> None:
        if turn is not self._current:
            raise ConfigError(f"this turn of session {self.name!r} is over, or another one has begun")
        self._current = None
        self._seen = self._seen.plus(history.tokens[len(self._history.tokens) - turn.dropped :])
        self._history = history
        self.dropped += turn.dropped
        self.turns += 1
        self.used = self._owner.clock()


class Saved(NamedTuple):
    """What `SessionStore.save` did.

    Attributes:
        kv: what `TurnCache.save_turn` returned.
        state: True if the session's state is stored as it is now. False: another node has continued the session
            meanwhile, or the store could not; the log says which.
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
        if window is not None and window <= reserve + sinks:
            raise ConfigError(f"sessions: window={window} has no room beside reserve={reserve} and sinks={sinks}")
        if not 0 <= drop <= 1:
            raise ConfigError(f"sessions: drop={drop!r} must be between 0 and 1")
        if not 0 < ttl <= LONGEST_TTL:
            raise ConfigError(f"sessions: ttl={ttl!r} must be more than 0 and at most {LONGEST_TTL:.0f} seconds")
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
            name: the session's id, any text.
            system: token ids of the system prompt.
            timeout: seconds to look for a state; None means the store's `lookup_timeout`. What is not found by then
                counts as not there.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the id of a session must be non-empty text, not {name!r}")
        tokens = token_array(system)
        fresh = Session(self, name, tokens)
        with self._lock:
            known = self._sessions.get(name)
        gone: list[Session] = []
        if known is not None and (known.expired or known.system_hash != fresh.system_hash):
            self.count(**{"expired" if known.expired else "invalidated": 1})
            gone.append(known)
            known = None
        session = known or fresh
        if self._persist:
            self._forget(gone)
            state = self._states.newest(session.name, session.system_hash, session.turns, timeout)
            if state is not None:
                if self.clock() - state.used >= state.ttl:
                    self.count(expired=1)
                    self._forget([session])
                else:
                    self.count(restored=1)
                    session._take(state)
        with self._lock:
            other = self._sessions.get(name)
            if other is not None and other is not known and other not in gone:  # another thread was faster
                session = other if other.system_hash == session.system_hash else session
            self._sessions[name] = session
            self._sessions.move_to_end(name)
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
        return session

    def load(self, turn: Turn, *, timeout: float | None = None) -> tuple[Any, int]:
        """The KV of the turn's leading pieces: a cache, and how many tokens it holds."""
        cache, hit = self.kv.load_turn(turn, timeout=timeout)
        self.count(tokens=len(turn.tokens), hit_tokens=hit)
        return cache, hit

    def save(self, turn: Turn, cache: Any, *, timeout: float | None = None) -> Saved:
        """Store the KV of a turn, and, once the turn is finished, the state of its session."""
        return Saved(self.kv.save_turn(turn, cache, timeout=timeout), self.save_state(turn.session, timeout=timeout))

    def save_state(self, session: Session, *, timeout: float | None = None) -> bool:
        """Store a session's state, for engines that move KV on their own. See `Saved.state`."""
        if not self._persist:
            return False
        if session._saved_turns == session.turns:
            return True
        written = self._states.write(session.state(), timeout)
        self.count(**{written.name.lower(): 1})
        if written is Written.STORED:
            session._saved_turns = session.turns
        return written is Written.STORED

    def expire(self, name: str | None = None) -> list[str]:
        """End the session `name`, or all in memory that are past their TTL; their states are removed. Records of KV
        stay: other sessions may share them, and the eviction policy knows their TTL.

        Returns:
            The ids of those that ended.
        """
        with self._lock:
            over = [each for each in self._sessions.values() if (each.name == name if name else each.expired)]
            for session in over:
                del self._sessions[session.name]
        self.count(expired=len(over))
        if self._persist:
            self._forget(over)
        return [session.name for session in over]

    def stats(self) -> dict[str, int]:
        """Counters since the start, and `sessions`: how many are in memory."""
        with self._lock:
            return {**self._counts, "sessions": len(self._sessions)}

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def _forget(self, sessions: Sequence[Session]) -> None:
        """Remove the states of sessions that are over."""
        self._states.remove([(session.name, session.system_hash) for session in sessions])
