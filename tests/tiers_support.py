"""Hierarchies for tests: small records whose bytes follow from their number, and what is asked of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.backend import Backend, Capability, Outcome, Read, Status, Write
from kvstore.eviction import RecordInfo
from kvstore.keys import Key
from kvstore.testing import DictBackend
from kvstore.tiers import Tier, TieredBackend
from kvstore_backends.memory import MemoryBackend

SIZE = 1_000
Make = Callable[..., TieredBackend]


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def data(number: int, nbytes: int = SIZE) -> bytes:
    return bytes([number % 251]) * nbytes


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: Backend, *numbers: int, parent: bool = False, info: RecordInfo | None = None) -> list[Outcome]:
    writes = [
        Write(key(n), [memoryview(data(n))], key(n - 1) if parent and n else None, info) for n in numbers
    ]  # fmt: skip
    return backend.put(writes, deadline=soon())


def get(backend: Backend, *numbers: int, seconds: float = 30.0) -> list[Status]:
    memory = [bytearray(SIZE) for _ in numbers]
    reads = [Read(key(n), memoryview(m)) for n, m in zip(numbers, memory, strict=True)]
    outcomes = backend.get_into(reads, deadline=soon(seconds))
    for n, m, outcome in zip(numbers, memory, outcomes, strict=True):
        assert not outcome.ok or m == data(n)
    return [outcome.status for outcome in outcomes]


def durable(name: str = "below") -> DictBackend:
    backend = DictBackend(name=name)
    backend.capabilities |= Capability.DURABLE
    return backend


def memory(records: int, **options: Any) -> Tier:
    backend = MemoryBackend(records * SIZE + 64 * records + 4096, policy="none")
    return Tier(backend, records * SIZE, **options)


def held(tier: Tier) -> set[int]:
    pages = tier.backend.list(deadline=soon())
    return {int.from_bytes(info.key, "big") for page in pages for info in page}


@contextlib.contextmanager
def hierarchies() -> Iterator[Make]:
    """Makes hierarchies, and closes them after the test."""
    with contextlib.ExitStack() as stack:

        def make(*tiers: Tier, **options: Any) -> TieredBackend:
            backend = TieredBackend(tiers, **options)
            stack.callback(backend.close)
            assert backend.wait_quiet(10)
            return backend

        yield make


def quiet(backend: TieredBackend) -> TieredBackend:
    assert backend.wait_quiet(20), backend.stats()
    return backend
