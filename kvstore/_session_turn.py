"""One turn of a session: what it computes on, what of that may be stored somewhere, and what is to be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._session_state import History, Piece, Said, Tokens, token_array
from .errors import ConfigError
from .eviction.base import RecordInfo
from .keys import Key, KeyContext

if TYPE_CHECKING:
    from .sessions import Session

__all__ = ["Turn"]


class Turn:
    """One turn: the tokens to compute on, and where KV for them may be found.

    Attributes:
        session: whose.
        dropped: tokens dropped from the history for this turn.
        hit: tokens whose KV was loaded; None until `served`.
    """

    def __init__(self, session: Session, before: Said, history: History, dropped: int) -> None:
        self.session = session
        self.dropped = dropped
        self._before = before
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
        if not isinstance(columns, int) or not 0 <= columns <= len(self.tokens):
            raise ConfigError(f"{columns!r} tokens cannot have been loaded of a context of {len(self.tokens)}")
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
