"""Every backend and every wrapper runs the shipped suite, and every backend the shipped state machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore.wrappers
from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.registry import BackendURL
from kvstore.testing import (
    BackendSuite,
    DictBackend,
    FaultyBackend,
    LatencyBackend,
    assert_forwards_everything,
    backend_state_machine,
)
from kvstore.wrappers import BreakerBackend, HedgedBackend, LimitedBackend, MeteredBackend, RetryingBackend
from kvstore_backends.file import FileBackend
from kvstore_backends.memory import MemoryBackend

_MEMORY_BYTES = 64 << 20


class DictSuite(BackendSuite):
    """Over a `DictBackend`, whose records lie open."""

    def wrap(self, inner: Backend) -> Backend:
        return inner

    def open(self) -> Backend:
        self.inner = DictBackend()
        return self.wrap(self.inner)

    def open_limited(self, max_value_bytes: int) -> Backend:
        self.inner = DictBackend(max_value_bytes=max_value_bytes)
        return self.wrap(self.inner)

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.inner.records[key] = data

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        return self.inner.records.get(key)


class TestDict(DictSuite):
    requires = Capability.RANGED_READ | Capability.LIST


class TestFaulty(DictSuite):
    """Without a script, a `FaultyBackend` is no other than what it surrounds."""

    def wrap(self, inner: Backend) -> Backend:
        return FaultyBackend(inner)


class TestLatency(DictSuite):
    def wrap(self, inner: Backend) -> Backend:
        return LatencyBackend(inner, 20e-6, gbytes_per_s=20)


class MemorySuite(BackendSuite):
    """Over a named `MemoryBackend`: a second handle of that name sees the same records."""

    def wrap(self, inner: Backend) -> Backend:
        return inner

    def handle(self) -> MemoryBackend:
        return MemoryBackend.from_url(
            BackendURL("memory", f"suite-{id(self)}"), {"bytes": _MEMORY_BYTES, "policy": "lru"}
        )

    def begin(self, path: Path) -> None:
        super().begin(path)
        self.other: MemoryBackend | None = None

    def open(self) -> Backend:
        backend = self.wrap(self.handle())
        if self.other is None:
            self.other = self.handle()
            self.opened(self.other)
        return backend

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        assert self.other is not None
        self.put_through(self.other, key, data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        assert self.other is not None
        return self.read_through(self.other, key)

    def open_limited(self, max_value_bytes: int) -> Backend:
        return self.wrap(MemoryBackend(max_value_bytes))

    def open_capacity(self, capacity_bytes: int) -> Backend:
        return self.wrap(MemoryBackend(capacity_bytes))


class TestMemory(MemorySuite):
    requires = Capability.RANGED_READ | Capability.LIST | Capability.LEASE | Capability.CAPACITY


class FileSuite(BackendSuite):
    """Over a `FileBackend`; seeded and inspected as files, by the layout that the manual promises."""

    def begin(self, path: Path) -> None:
        super().begin(path)
        self.places = 0

    def make(self, root: Path, nbytes: int | None = None) -> Backend:
        return FileBackend(root, nbytes=nbytes, lanes=6)

    def open(self) -> Backend:
        return self.make(self.path / "kv")

    def open_limited(self, max_value_bytes: int) -> Backend:
        return self.make(self.path / "limited", max_value_bytes)

    def open_capacity(self, capacity_bytes: int) -> Backend:
        self.places += 1
        return self.make(self.path / f"capacity{self.places}", capacity_bytes)

    def file(self, key: Key) -> Path:
        name = key.hex()
        return self.path / "kv" / name[:2] / f"{name}.kv"

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        file = self.file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".seed")
        temporary.write_bytes(data)
        temporary.replace(file)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        try:
            return self.file(key).read_bytes()
        except FileNotFoundError:
            return None


_FILE = Capability.RANGED_READ | Capability.LIST | Capability.SHARED | Capability.DURABLE


class TestFile(FileSuite):
    requires = _FILE


class TestFileDirect(FileSuite):
    """With O_DIRECT wherever the file system and the memory allow it."""

    requires = _FILE

    def make(self, root: Path, nbytes: int | None = None) -> Backend:
        return FileBackend(root, nbytes=nbytes, direct="on", lanes=3)


class TestFileCapped(FileSuite):
    """With a cap, which is not reached but where the test says so."""

    requires = _FILE | Capability.CAPACITY

    def make(self, root: Path, nbytes: int | None = None) -> Backend:
        return FileBackend(root, nbytes=nbytes or 1 << 30, fsync="full")


class TestFileStack(FileSuite):
    requires = _FILE

    def make(self, root: Path, nbytes: int | None = None) -> Backend:
        inner = RetryingBackend(LimitedBackend(FileBackend(root, nbytes=nbytes), concurrency=4))
        return MeteredBackend(BreakerBackend(inner), Metrics())


class TestMetered(MemorySuite):
    def wrap(self, inner: Backend) -> Backend:
        return MeteredBackend(inner, Metrics())


class TestLimited(MemorySuite):
    def wrap(self, inner: Backend) -> Backend:
        return LimitedBackend(inner, concurrency=2, bytes_in_flight=1 << 20)


class TestRetrying(MemorySuite):
    def wrap(self, inner: Backend) -> Backend:
        return RetryingBackend(inner)


class TestBreaker(MemorySuite):
    def wrap(self, inner: Backend) -> Backend:
        return BreakerBackend(inner)


class TestHedged(MemorySuite):
    """Two handles of one store are two replicas; nearly every read has scratch memory and a second request."""

    def wrap(self, inner: Backend) -> Backend:
        return HedgedBackend(
            inner, self.handle(), max_extra=1.0, scratch_bytes=8 << 20, min_samples=1, min_delay=1e-6, quantile=0.01
        )


class TestStack(MemorySuite):
    """All of them, in the order in which the store puts them around a backend."""

    def wrap(self, inner: Backend) -> Backend:
        inner = RetryingBackend(LimitedBackend(inner, concurrency=4))
        return MeteredBackend(BreakerBackend(inner), Metrics())


WRAPPERS: dict[type[Backend], Callable[[Backend], Backend]] = {
    BreakerBackend: BreakerBackend,
    FaultyBackend: FaultyBackend,
    HedgedBackend: lambda inner: HedgedBackend(inner, inner),
    LatencyBackend: lambda inner: LatencyBackend(inner, 0.0),
    LimitedBackend: lambda inner: LimitedBackend(inner, concurrency=4),
    MeteredBackend: lambda inner: MeteredBackend(inner, Metrics()),
    RetryingBackend: RetryingBackend,
}


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_a_wrapper_forwards_everything(wrapper: type[Backend]) -> None:
    assert_forwards_everything(wrapper, WRAPPERS[wrapper])


def test_no_wrapper_is_left_out() -> None:
    exported = [getattr(kvstore.wrappers, name) for name in kvstore.wrappers.__all__]
    found = {thing for thing in exported if isinstance(thing, type) and issubclass(thing, Backend)}
    assert found - {kvstore.wrappers.Wrapper} <= WRAPPERS.keys()


TestDictStateful = backend_state_machine(lambda path: DictBackend()).TestCase
TestFaultyStateful = backend_state_machine(lambda path: FaultyBackend(DictBackend()), max_examples=15).TestCase
TestStackStateful = backend_state_machine(
    lambda path: MeteredBackend(BreakerBackend(RetryingBackend(MemoryBackend(_MEMORY_BYTES))), Metrics()),
    max_examples=15,
).TestCase
TestFileStateful = backend_state_machine(lambda path: FileBackend(path / "kv")).TestCase
TestFileCappedStateful = backend_state_machine(
    lambda path: FileBackend(path / "kv", nbytes=64 << 20), max_examples=15
).TestCase
TestMemoryStateful = backend_state_machine(lambda path: MemoryBackend(_MEMORY_BYTES)).TestCase
