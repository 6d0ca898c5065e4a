"""Stores over scripted backends, and records to put into them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from kvstore.backend import Backend
from kvstore.config import Config
from kvstore.keys import Key, KeyContext, chunk_keys
from kvstore.layout import KVLayout
from kvstore.record import RecordSpec, kv_spec
from kvstore.store import Item, Store, Want
from kvstore.testing import DictBackend, FaultyBackend

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8)
DTYPE = "bfloat16"
TOKENS = 16
SPEC = kv_spec(LAYOUT, DTYPE, TOKENS)
POISON = 0xA5


def store_over(*backends: Backend, **options: Any) -> Store:
    """A store over these backends, with a pool that suits tests."""
    fields: dict[str, Any] = {"buffer_pool_bytes": 4 << 20, "chunk_size": TOKENS, **options}
    return Store(Config(remote_url=[f"memory://unused-{n}" for n in range(len(backends))], **fields), backends=backends)


def context(**fields: Any) -> KeyContext:
    return KeyContext(**{"model": "org/model", "layout": LAYOUT, "dtype": DTYPE, **fields})


def chain(count: int, *, start: int = 0, **fields: Any) -> list[Key]:
    """The keys of a prompt of `count` chunks."""
    return chunk_keys(list(range(start, start + count * TOKENS)), context=context(**fields), chunk_size=TOKENS)


def payload(key: bytes, nbytes: int = SPEC.raw_bytes) -> bytes:
    """Bytes that belong to a key and to no other."""
    return hashlib.shake_256(key).digest(nbytes)


def items(keys: Sequence[Key], spec: RecordSpec = SPEC) -> list[Item]:
    return [
        Item(
            key,
            spec.split(memoryview(payload(key, spec.raw_bytes))),
            spec,
            {"dtype": DTYPE},
            keys[i - 1] if i else None,
        )
        for i, key in enumerate(keys)
    ]


def poisoned(count: int, nbytes: int = SPEC.raw_bytes) -> list[bytearray]:
    """Destinations in which an untouched byte shows."""
    return [bytearray([POISON]) * nbytes for _ in range(count)]


def wants(keys: Sequence[Key], destinations: Sequence[bytearray], spec: RecordSpec = SPEC) -> list[Want]:
    return [Want(key, memoryview(dst), spec) for key, dst in zip(keys, destinations, strict=True)]


def soon(seconds: float = 20.0) -> float:
    """A deadline that a test which works never reaches."""
    return time.monotonic() + seconds


class Unclosed(FaultyBackend):
    """Stays open when a store closes it, so that another store can go on with it."""

    def __init__(self, inner: DictBackend) -> None:
        super().__init__(inner)

    def close(self) -> None:
        return None
