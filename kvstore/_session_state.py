"""What a conversation's context is made of, how it is cut, and how its state is written down. Pure functions of data.

A `History` is the tokens of a context and where their KV can be found: first the **base**, slices of records that were
made before a truncation, then the **tail**, full chunks of the tokens behind it.

Without a base the tail is the ordinary chain of `kvstore.keys`: conversations share these records with each other and
with everybody else. After a truncation the KV of a token is no longer that of its prefix: it was computed among tokens
that have been dropped since. So the records of the base keep the names that they were stored under, and the tail gets
a chain of its own, whose key context has the digest of the base (`lineage`) in it: only who has the same base, in the
same slices, finds it, and it can never be taken for the KV of a prompt that simply begins like this.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np

from .errors import ConfigError, CorruptRecord
from .keys import MAX_CHUNK_SIZE, Key, KeyContext, _u32_blocks, chunk_keys
from .record import _unpack_meta

__all__ = ["MAX_STATE_BYTES", "Cut", "History", "Piece", "Said", "Seen", "State", "Tokens", "token_array"]

MAX_TOKENS = 1 << 22
MAX_PIECES = 1 << 16
MAX_NAME_BYTES = 1024
MAX_STATE_BYTES = 4 * MAX_TOKENS + 44 * MAX_PIECES + (1 << 16)
STATE_VERSION = 1

_PIECE = struct.Struct("<32sIII")
LONGEST_TTL = 366 * 86400.0
_DIGEST_BYTES = 32
_BLOCK_BYTES = 4 * 256

Tokens = np.ndarray[Any, np.dtype[np.uint32]]


class Piece(NamedTuple):
    """Consecutive tokens of one stored record, and where they stand in the context.

    Attributes:
        key: name of the record.
        tokens: tokens in the record.
        first: its first token that is used.
        length: how many are used.
        position: place of the first one in the context; K is embedded there.
    """

    key: Key
    tokens: int
    first: int
    length: int
    position: int

    @property
    def end(self) -> int:
        return self.position + self.length


class Cut(NamedTuple):
    """Which tokens of a context stay: the first `head`, and those from `start` on."""

    head: int
    start: int


def token_array(token_ids: Any) -> Tokens:
    """Token ids (list, tuple, numpy or torch integers) as u32 `[tokens]`. Raises `ConfigError` for bad ones."""
    return np.frombuffer(b"".join(bytes(block) for block in _u32_blocks(token_ids, MAX_CHUNK_SIZE)), np.dtype("<u4"))


@dataclass(frozen=True)
class History:
    """The tokens of a context and the records that hold their KV.

    Attributes:
        context: key context of the records (without lineage).
        chunk_size: tokens per chunk.
        tokens: u32 `[tokens]`.
        base: slices of older records, without gaps from position 0.
    """

    context: KeyContext
    chunk_size: int
    tokens: Tokens
    base: tuple[Piece, ...] = ()

    @property
    def base_tokens(self) -> int:
        return self.base[-1].end if self.base else 0

    @property
    def tail_context(self) -> KeyContext:
        """The key context of the tail."""
        if not self.base:
            return self.context
        digest = hashlib.sha256(b"kvstore lineage 1")
        for piece in self.base:
            digest.update(_PIECE.pack(piece.key, piece.tokens, piece.first, piece.length))
        return replace(self.context, extra=(*self.context.extra, ("lineage", digest.hexdigest())))

    def tail(self) -> list[Piece]:
        """The full chunks behind the base."""
        begin, size = self.base_tokens, self.chunk_size
        keys = chunk_keys(self.tokens[begin:], context=self.tail_context, chunk_size=size)
        return [Piece(key, size, 0, size, begin + number * size) for number, key in enumerate(keys)]

    def pieces(self) -> list[Piece]:
        """Base and tail: everything that may be stored somewhere, in order and without gaps."""
        return [*self.base, *self.tail()]

    def extended(self, tokens: Tokens) -> History:
        return replace(self, tokens=np.concatenate([self.tokens, tokens]))

    def served(self, columns: int) -> History:
        """The history when only the first `columns` tokens could be had, and all behind them are computed anew.

        Slices of the base that were not there leave it: what is computed in their place is something else, and must
        not be stored under their names.
        """
        kept = tuple(piece for piece in self.base if piece.end <= columns)
        return self if len(kept) == len(self.base) else replace(self, base=kept)

    def without_base(self, context: KeyContext) -> History:
        return replace(self, base=(), context=context)

    def cut_to(self, head: int, most: int, *, movable: bool) -> Cut:
        """Where to cut so that the first `head` tokens and as many of the last ones stay as make `most` together.

        If K can be moved, the cut is put at the beginning of a record: up to one chunk more is dropped than needed,
        so that no record is read of which a part is not wanted. (Of the records of the head the rest is read in vain:
        `head` counts tokens.) Behind the last record there is nothing to align to.
        """
        start = len(self.tokens) - max(0, most - head)
        if movable:
            begins = [piece.position for piece in self.pieces()]
            start = next((begin for begin in begins if begin >= start), start)
        return Cut(head, start)

    def cut(self, cut: Cut, *, movable: bool) -> History:
        """The history of the tokens that stay. If K can be moved, its base is the slices of the records they are in."""
        tokens = np.concatenate([self.tokens[: cut.head], self.tokens[cut.start :]])
        base: list[Piece] = []
        if movable:
            position = 0
            for piece in self.pieces():
                for low, high in ((0, cut.head), (cut.start, len(self.tokens))):
                    begin, end = max(piece.position, low), min(piece.end, high)
                    if begin >= end:
                        continue
                    place = begin if low == 0 else begin - cut.start + cut.head
                    if place != position:  # tokens before it are in no record: they end what can be reused
                        return replace(self, tokens=tokens, base=tuple(base))
                    base.append(
                        Piece(piece.key, piece.tokens, piece.first + begin - piece.position, end - begin, place)
                    )
                    position += end - begin
        return replace(self, tokens=tokens, base=tuple(base))


@dataclass(frozen=True)
class Seen:
    """What a conversation was, without its tokens: a chain of SHA-256 over blocks of 256, and the rest as it is.

    Attributes:
        count: tokens in all.
        chain: over the full blocks, each as u32 little-endian behind the hash before it.
        rest: the tokens behind the last full block.
    """

    count: int = 0
    chain: bytes = bytes(_DIGEST_BYTES)
    rest: bytes = b""

    def plus(self, tokens: Tokens) -> Seen:
        data = self.rest + tokens.tobytes()
        chain, whole = self.chain, len(data) - len(data) % _BLOCK_BYTES
        for begin in range(0, whole, _BLOCK_BYTES):
            chain = hashlib.sha256(chain + data[begin : begin + _BLOCK_BYTES]).digest()
        return Seen(self.count + len(tokens), chain, data[whole:])


@dataclass(frozen=True)
class Said:
    """A conversation up to some turn.

    Attributes:
        history: its context.
        seen: all of it, dropped tokens included.
        dropped: how many of them were dropped.
    """

    history: History
    seen: Seen
    dropped: int


@dataclass
class State:
    """A session as it is written down: bounded, no pickle, msgpack of plain values.

    Attributes:
        name: the session's id.
        system: SHA-256 of the system prompt's tokens.
        history: the context after the last turn.
        turns: finished turns.
        seen: the whole conversation, dropped tokens included.
        dropped: how many of them were dropped.
        used: when the last turn ended, in seconds of the wall clock.
        ttl: seconds after which it is over.
    """

    name: str
    system: bytes
    history: History
    turns: int
    seen: Seen
    dropped: int
    used: float
    ttl: float

    def pack(self) -> bytes:
        """Raises `ConfigError` if there is too much of it."""
        history = self.history
        if len(history.tokens) > MAX_TOKENS or len(history.base) > MAX_PIECES:
            raise ConfigError(f"session {self.name!r} has {len(history.tokens)} tokens in {len(history.base)} slices; "
                              f"at most {MAX_TOKENS} in {MAX_PIECES} can be kept")  # fmt: skip
        values = {
            "version": STATE_VERSION, "name": self.name, "system": self.system, "context": history.context.digest,
            "chunk_size": history.chunk_size, "turns": self.turns, "seen": self.seen.count, "chain": self.seen.chain,
            "rest": self.seen.rest, "dropped": self.dropped, "used": self.used, "ttl": self.ttl,
            "tokens": history.tokens.tobytes(),
            "base": b"".join(_PIECE.pack(p.key, p.tokens, p.first, p.length) for p in history.base),
        }  # fmt: skip
        packed: bytes = msgpack.packb(values)
        return packed

    @classmethod
    def unpack(cls, data: bytes, *, name: str, system: bytes, context: KeyContext, chunk_size: int) -> State:
        """Read the state of this session.

        If it was written for another model, other weights, another rotary embedding or chunk size, its tokens are
        taken, and its base, which is of no use, is not.

        Raises:
            CorruptRecord: it is damaged, or of another session or system prompt.
        """
        try:
            if len(data) > MAX_STATE_BYTES:
                raise ValueError(f"it has {len(data)} bytes")
            values = _unpack_meta(data)  # bounded: allocates in proportion to the data, whatever it claims
            for field, expected in (("version", STATE_VERSION), ("name", name), ("system", system)):
                if values[field] != expected:
                    raise ValueError(f"it has another {field}")
            tokens = np.frombuffer(_of(values, "tokens", bytes), np.dtype("<u4"))
            if len(tokens) > MAX_TOKENS:
                raise ValueError("it has too many tokens")
            base = _unpack_base(_of(values, "base", bytes), len(tokens))
            if (values["context"], values["chunk_size"]) != (context.digest, chunk_size):
                base = ()
            turns, count, dropped = (_of(values, field, int) for field in ("turns", "seen", "dropped"))
            chain, rest = (_of(values, field, bytes) for field in ("chain", "rest"))
            used, ttl = (_of(values, field, float) for field in ("used", "ttl"))
            if min(turns, dropped) < 0 or count != len(tokens) + dropped:
                raise ValueError("its numbers contradict each other")
            if len(chain) != _DIGEST_BYTES or len(rest) != 4 * count % _BLOCK_BYTES:
                raise ValueError("its hashes are not of that many tokens")
            if not 0 < ttl <= LONGEST_TTL or not 0 <= used < 1 << 40:
                raise ValueError("its times are out of range")
        except (ValueError, KeyError, TypeError, RecursionError, struct.error, msgpack.UnpackException) as error:
            raise CorruptRecord(f"this is not the state of session {name!r}: {error}", cause=error) from error
        history = History(context, chunk_size, tokens, base)
        return cls(name, system, history, turns, Seen(count, chain, rest), dropped, used, ttl)


def _of(values: Mapping[str, Any], field: str, kind: type) -> Any:
    value = values[field]
    if type(value) is not kind:
        raise ValueError(f"its {field} is a {type(value).__name__}")
    return value


def _unpack_base(packed: bytes, tokens: int) -> tuple[Piece, ...]:
    base: list[Piece] = []
    position = 0
    for key, size, first, count in _PIECE.iter_unpack(packed):
        if not 0 < count <= size <= MAX_CHUNK_SIZE or first + count > size or position + count > tokens:
            raise ValueError("its slices contradict each other")
        base.append(Piece(Key(key), size, first, count, position))
        position += count
    if len(base) > MAX_PIECES:
        raise ValueError("it has too many slices")
    return tuple(base)
