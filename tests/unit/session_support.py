"""A model whose KV tells what it was computed on, and what moves it to a store: sessions without a neural network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from kvstore.keys import KeyContext
from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.sessions import SessionStore, Turn
from kvstore.store import Item, Store, Want

CHUNK = 8
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8)
SPEC = kv_spec(LAYOUT, "uint8", CHUNK)
SYSTEM = list(range(900, 911))
ENTRY = 16  # bytes of a token's KV

Cache = list[bytes]
"""The KV of each token of a context."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def compute(cache: Cache, tokens: Iterable[int]) -> Cache:
    """The cache after these tokens: the KV of each depends on all KV before it, wherever that came from."""
    cache = list(cache)
    for token in tokens:
        cache.append(hashlib.blake2b(b"".join(cache) + int(token).to_bytes(4, "little"), digest_size=ENTRY).digest())
    return cache


class FakeKV:
    """A `TurnCache` over a real store, one per node.

    Attributes:
        contents: what was ever stored under each key, by all nodes that share the dictionary.
    """

    def __init__(self, store: Store, *, rope: str = "pre", contents: dict[bytes, bytes] | None = None) -> None:
        self.store = store
        self.rope = rope
        self.context = KeyContext("org/model", LAYOUT, "uint8", revision="1", extra=(("rope", rope),))
        self.contents = {} if contents is None else contents

    def load_turn(self, turn: Turn, *, timeout: float | None = None) -> tuple[Cache, int]:
        cache: Cache = []
        for piece in turn.pieces:
            data = bytearray(SPEC.raw_bytes)
            outcome = self.store.submit_get([Want(piece.key, memoryview(data), SPEC)]).result()[0]
            if outcome.nbytes == 0:
                break
            assert bytes(data) == self.contents[piece.key]
            assert piece.position == len(cache)
            at = range(piece.first * ENTRY, (piece.first + piece.length) * ENTRY, ENTRY)
            cache += [bytes(data[begin : begin + ENTRY]) for begin in at]
        if len(cache) == len(turn.tokens):  # a token is left to compute
            cache.pop()
        turn.served(len(cache))
        return cache, len(cache)

    def save_turn(self, turn: Turn, cache: Cache, *, timeout: float | None = None) -> int:
        stored = 0
        for piece in turn.new_chunks(len(cache)):
            data = b"".join(cache[piece.position : piece.end])
            # A name stands for one content, however it came about.
            assert self.contents.setdefault(piece.key, data) == data
            item = Item(piece.key, [memoryview(data)], SPEC, info=turn.info(piece))
            stored += self.store.submit_put([item]).result()[0].nbytes > 0
        return stored


def play(sessions: Any, turn: Turn, answer: Iterable[int]) -> tuple[Cache, int]:
    """Load, compute, answer, save. The cache holds all but the last token, as after `generate`."""
    cache, hit = sessions.load(turn)
    answer = list(answer)
    cache = compute(cache, [*turn.tokens[hit:], *answer[:-1]])
    turn.finish(answer)
    sessions.save(turn, cache)
    return cache, hit


def over(store: Store, **options: Any) -> SessionStore:
    kv = FakeKV(store, rope=options.pop("rope", "pre"), contents=options.pop("contents", None))
    return SessionStore(kv, **options)


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))
