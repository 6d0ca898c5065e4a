"""The shipped suite over hierarchies: what several tiers do together is what one backend must do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.testing import BackendSuite, DictBackend, FaultyBackend, backend_state_machine
from kvstore.tiers import Tier, TieredBackend
from kvstore_backends.file import FileBackend
from kvstore_backends.memory import MemoryBackend

_MEMORY_BYTES = 8 << 20


def memory(nbytes: int = _MEMORY_BYTES, **options: str) -> Tier:
    return Tier(MemoryBackend(nbytes, policy="none"), nbytes, **options)  # type: ignore[arg-type]


class TieredSuite(BackendSuite):
    """Memory above something; records are seeded and inspected below."""

    def lower(self) -> Backend:
        raise NotImplementedError

    def open(self) -> Backend:
        self.below = self.lower()
        return TieredBackend([memory(), Tier(self.below)])

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.put_through(self.below, key, data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        return self.read_through(self.below, key)


class TestMemoryOverFile(TieredSuite):
    requires = (
        Capability.RANGED_READ | Capability.LIST | Capability.LEASE | Capability.DURABLE | Capability.LANDING
    )  # fmt: skip

    def begin(self, path: Path) -> None:
        super().begin(path)
        self.places = 0

    def lower(self) -> Backend:
        return FileBackend(self.path / "kv", lanes=6)

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        """As another process would do it."""
        other = FileBackend(self.path / "kv")
        self.put_through(other, key, data)
        other.close()

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        other = FileBackend(self.path / "kv")
        try:
            return self.read_through(other, key)
        finally:
            other.close()

    def open_limited(self, max_value_bytes: int) -> Backend:
        file = FileBackend(self.path / "limited", nbytes=max_value_bytes, policy="none")
        return TieredBackend([memory(max_value_bytes // 2), Tier(file, max_value_bytes)])

    def open_capacity(self, capacity_bytes: int) -> Backend:
        """A memory tier that takes nothing of what the suite stores: which records are left then follows from the
        history alone."""
        self.places += 1
        small = 4096
        file = FileBackend(self.path / f"capacity{self.places}", nbytes=capacity_bytes - small, policy="none")
        return TieredBackend([memory(small), Tier(file, capacity_bytes - small, high=1.0, low=1.0)])


class TestMemoryOverFaulty(TieredSuite):
    """Below lies a `FaultyBackend` without faults: no landing, no leases, a `DictBackend` inside."""

    requires = Capability.RANGED_READ | Capability.LIST | Capability.LEASE

    def lower(self) -> Backend:
        return FaultyBackend(DictBackend())

    def open_limited(self, max_value_bytes: int) -> Backend:
        return TieredBackend([memory(4096), Tier(DictBackend(max_value_bytes=max_value_bytes))])


class TestWriteBack(TestMemoryOverFaulty):
    """Memory acknowledges. What is below follows; so records are inspected where they are read."""

    def open(self) -> Backend:
        self.below = self.lower()
        return TieredBackend([memory(write="back"), Tier(self.below)])

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.put_through(backend, key, data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        return self.read_through(backend, key)


class TestThreeTiers(TestMemoryOverFaulty):
    """Two of them with a capacity that is always exceeded, so that everything moves all the time."""

    def open(self) -> Backend:
        self.below = self.lower()
        middle = Tier(DictBackend(name="middle"), 256 << 10)
        return TieredBackend([memory(64 << 10, promote="always"), middle, Tier(self.below)])


def test_the_suites_name_what_is_skipped(request: pytest.FixtureRequest) -> None:
    """A hierarchy with one tier that has no leases and no list claims neither."""
    plain = TieredBackend([Tier(DictBackend())])
    assert Capability.LEASE not in plain.capabilities
    assert Capability.LIST in plain.capabilities
    plain.close()


TestTiersStateful = backend_state_machine(
    lambda path: TieredBackend([memory(16 << 10), Tier(FileBackend(path / "kv"))]), max_examples=25
).TestCase
TestTiersBackStateful = backend_state_machine(
    lambda path: TieredBackend([memory(16 << 10, write="back"), Tier(DictBackend())]), max_examples=25
).TestCase
