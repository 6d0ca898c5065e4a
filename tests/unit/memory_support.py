"""What the tests of `MemoryBackend` share: records, calls, and copies that can be stopped."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import kvstore_backends.memory as memory_module
from kvstore.backend import NO_DEADLINE, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, copy_bytes
from kvstore.keys import Key
from kvstore_backends.memory import MemoryBackend

KiB, MiB = 1 << 10, 1 << 20
LARGE = 64 * KiB  # copied with the GIL released


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def keys(count: int, name: str = "k") -> list[Key]:
    return [key((name, i)) for i in range(count)]


def payload(name: object, nbytes: int) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def put(backend: MemoryBackend, records: dict[Key, bytes], *, deadline: float = NO_DEADLINE) -> list[Outcome]:
    return backend.put([Write(name, [memoryview(data)]) for name, data in records.items()], deadline=deadline)


def put_chain(
    backend: MemoryBackend, chain: Sequence[Key], data: bytes, *, parent: Key | None = None
) -> list[Outcome]:  # fmt: skip
    parents = [parent, *chain[:-1]]
    writes = [Write(each, [memoryview(data)], above) for each, above in zip(chain, parents, strict=True)]
    return backend.put(writes, deadline=NO_DEADLINE)


def get(backend: MemoryBackend, name: Key, nbytes: int) -> bytes | None:
    data = bytearray(nbytes)
    (outcome,) = backend.get_into([Read(name, memoryview(data))], deadline=NO_DEADLINE)
    assert outcome.error is None
    return bytes(data[: outcome.nbytes]) if outcome.ok else None


def here(backend: MemoryBackend, names: Sequence[Key]) -> list[bool]:
    return [outcome.ok for outcome in backend.stat(names, deadline=NO_DEADLINE)]


def hit_prefix(backend: MemoryBackend, names: Sequence[Key]) -> int:
    return [*here(backend, names), False].index(False)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def leased(backend: MemoryBackend, name: Key) -> Buffer:
    (buffer,) = backend.lease([name], deadline=NO_DEADLINE)
    assert buffer is not None
    return buffer


@pytest.fixture
def opened() -> Iterator[Callable[..., MemoryBackend]]:
    """Opens backends; afterwards they are closed and must have given all their memory back."""
    backends: list[MemoryBackend] = []

    def make(*args: Any, **options: Any) -> MemoryBackend:
        backends.append(MemoryBackend(*args, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
        stats = backend._memory.pool.stats()
        assert (stats.in_use, stats.buffers, stats.pinned) == (0, 0, 0)
        assert not backend._memory.pending


class Gate:
    """Stops the first copy of `name`'s direction until `open` is set; tells when it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: bool = False) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.fail = fail
        monkeypatch.setattr(memory_module, "copy_bytes", self.copy)

    def copy(self, dst: memoryview, src: memoryview) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.open.wait(10)
            if self.fail:
                raise ValueError("scripted")
        copy_bytes(dst, src)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a thread; the returned function joins it, and returns or raises what it did."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(20)
        assert not thread.is_alive()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    return join
