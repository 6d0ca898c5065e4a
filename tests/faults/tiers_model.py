"""A hierarchy under test, with faults, next to a simple model of what may be in it.

The model knows for each key which versions may be read: a put adds its own, a delete that was acknowledged takes all
away. Every version of a record has bytes of its own, so what comes back is told from what must not.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.errors import TransientError
from kvstore.keys import Key
from kvstore.record import build_record, opaque_spec
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.tiers import Tier, TieredBackend
from kvstore.tiers.moving import damaged
from kvstore.tiers.tier import COUNTS
from kvstore_backends.memory import MemoryBackend

KEYS = [Key(bytes([index]) * 32) for index in range(40)]
PATIENCE_S = 60.0
_SIZES = (500, 1_500, 3_000, 3_000, 6_000)


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def record_of(key: Key, version: int) -> bytes:
    """A real record whose bytes say which version it is."""
    size = _SIZES[version % len(_SIZES)]
    data = random.Random(version).randbytes(size)
    spec = opaque_spec(size)
    return b"".join(build_record(key, spec, spec.split(memoryview(data)), meta={"version": version}))


class Forgetful(DictBackend):
    """Does what it is asked to, but may lose the answer, as a connection that breaks at the wrong moment.

    Attributes:
        lose: so many of the next answers to puts and deletes are lost.
    """

    lose = 0

    def _answer(self, outcomes: list[Outcome]) -> list[Outcome]:
        if self.lose and outcomes:
            self.lose -= 1
            return [Outcome.failed(TransientError("the answer was lost", backend=self.name))] * len(outcomes)
        return outcomes

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return self._answer(super().put(writes, deadline=deadline))

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._answer(super().delete(keys, deadline=deadline))


class Place:
    """Something that outlives a hierarchy: a dict of records, opened again and again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: dict[Key, bytes] = {}

    def open(self) -> Forgetful:
        backend = Forgetful(name=self.name)
        backend.capabilities |= Capability.DURABLE
        backend.records = self.records
        return backend


class Model:
    """Args:
    capacities: of memory, and of the places below; None: no limit.
    write: of the memory tier.
    """

    def __init__(self, capacities: Sequence[int | None], *, write: str = "through", promote: str = "always") -> None:
        self.capacities = capacities
        self.write, self.promote = write, promote
        self.places = [Place(f"place{number}") for number in range(1, len(capacities))]
        self.valid: dict[Key, set[int]] = {}
        self.version = 0
        self.protected: set[Key] = set()
        self.announced: list[list[Key]] = []
        self.faults = 0
        self.hits = self.stored = 0
        self.counts: Counter[str] = Counter()  # over all tiers and restarts
        self.open()

    def open(self) -> None:
        self.memory = MemoryBackend(self.capacities[0] or 1 << 20, policy="none")
        self.faulty = [FaultyBackend(self.memory), *(FaultyBackend(place.open()) for place in self.places)]
        tiers = [
            Tier(backend, capacity, write=self.write if number == 0 else "through", promote=self.promote)
            for number, (backend, capacity) in enumerate(zip(self.faulty, self.capacities, strict=True))
        ]
        self.backend = TieredBackend(tiers, staging_bytes=1 << 16)

    def close(self) -> None:
        for tier in self.backend.stats():
            self.counts.update({name: tier[name] for name in COUNTS})
        self.backend.close()

    # Operations.

    def fault(self, number: int, operation: str, kind: str) -> None:
        """One fault for the next call of this operation of a tier, whoever makes it."""
        if kind == "lost":
            inner = self.faulty[number].inner
            if isinstance(inner, Forgetful):
                inner.lose += 1
                self.faults += 1
            return
        fault = {
            "error": Fault.error(),
            "raises": Fault.raises(OSError("scripted")),
            "transient": Fault.raises(TransientError("scripted")),
            "cut": Fault.cut(100),
            "flip": Fault.flip(8 * 900),  # in the bytes of a segment
            "first": Fault.error().on(0),
        }[kind]
        if kind in ("cut", "flip") and operation not in ("get", "put"):
            return
        if kind == "first" and operation == "lease":
            return
        if kind == "flip":  # a record may be damaged where it lies, and a sound one be taken for damaged twice
            self.protected = set()
        self.faulty[number].push(fault, operation=operation)
        self.faults += 1

    def calm(self) -> None:
        """No more faults, and everything in the background done."""
        for backend in self.faulty:
            for steps in backend._by_operation.values():
                steps.clear()
            if isinstance(backend.inner, Forgetful):
                backend.inner.lose = 0
        assert self.backend.wait_quiet(PATIENCE_S), self.backend.stats()

    def put(self, keys: Sequence[Key]) -> None:
        versions = []
        writes = []
        for key in keys:
            self.version += 1
            versions.append(self.version)
            data = record_of(key, self.version)
            writes.append(Write(key, [memoryview(data)[:200], memoryview(data)[200:]]))
        # With a lost answer EXISTS may mean our own record, found when it was looked for.
        lossy = any(isinstance(each.inner, Forgetful) and each.inner.lose for each in self.faulty)
        outcomes = self.backend.put(writes, deadline=soon())
        assert len(outcomes) == len(keys)
        for key, version, outcome in zip(keys, versions, outcomes, strict=True):
            assert outcome.status is not Status.MISS
            if outcome.status is Status.EXISTS and not lossy:
                assert self.valid.get(key), "a record is said to be there that nobody has put"
            else:
                self.valid.setdefault(key, set()).add(version)
                self.stored += outcome.ok

    def get(self, keys: Sequence[Key]) -> None:
        """As the store reads: the header and the rest, and a report of what is damaged."""
        memories = [bytearray(8192) for _ in keys]
        reads = []
        for key, memory in zip(keys, memories, strict=True):
            reads += [Read(key, memoryview(memory)[:96]), Read(key, memoryview(memory)[96:], 96)]
        outcomes = self.backend.get_into(reads, deadline=soon())
        for index, (key, memory) in enumerate(zip(keys, memories, strict=True)):
            head, body = outcomes[2 * index : 2 * index + 2]
            if not (head.ok and body.ok):
                continue
            nbytes = head.nbytes + body.nbytes
            self._check(key, memoryview(memory)[:nbytes])

    def _check(self, key: Key, view: memoryview) -> None:
        if damaged(view, key) is not False:
            self.protected.discard(key)
            self.backend.quarantine([key], deadline=soon())
            return
        self.hits += 1
        good = {bytes(record_of(key, version)) for version in self.valid.get(key, ())}
        assert bytes(view) in good, f"{key!r}: bytes that nobody has put, or that were deleted"

    def lease(self, keys: Sequence[Key]) -> None:
        for key, buffer in zip(keys, self.backend.lease(keys, deadline=soon()), strict=True):
            if buffer is not None:
                with buffer:
                    if damaged(buffer.view, key) is False:
                        self._check(key, buffer.view)

    def stat(self, keys: Sequence[Key]) -> list[Outcome]:
        outcomes = self.backend.stat(keys, deadline=soon())
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.ok:
                assert self.valid.get(key), f"{key!r} is there again after it was deleted"
        return outcomes

    def delete(self, keys: Sequence[Key]) -> None:
        self.protected.difference_update(keys)
        for key, outcome in zip(keys, self.backend.delete(keys, deadline=soon()), strict=True):
            if outcome.status is not Status.ERROR:
                self.valid.pop(key, None)
        self.stat([key for key in keys if key not in self.valid])

    def announce(self, waiting: list[list[Key]]) -> None:
        """Afterwards nothing that is there now and within the window may leave."""
        self.calm()
        self.backend.announce(waiting)
        self.announced = waiting
        window = [*self.backend._hierarchy.window.rank]
        there = {key for key, outcome in zip(window, self.stat(window), strict=True) if outcome.ok}
        self.protected = {key for key in there if self._sound(key)}

    def _sound(self, key: Key) -> bool:
        """Whether every copy below memory is what it should be."""
        copies = [place.records[key] for place in self.places if key in place.records]
        return all(damaged(memoryview(copy), key) is False for copy in copies)

    def restart(self, *, drain: bool) -> None:
        """A new process: what was in memory is gone."""
        if drain:
            self.calm()
            assert self.backend.drain(soon()) == {}
        self.close()
        self.protected = set()
        self.open()
        self.backend.announce(self.announced)
        if drain:
            self.calm()

    # What always holds.

    def check_capacity(self) -> None:
        """Never more than the capacity and one record."""
        for place, capacity in zip(self.places, self.capacities[1:], strict=True):
            if capacity is not None:
                held = sum(len(data) for data in list(place.records.values()))
                assert held <= capacity + 8192

    def check_calm(self) -> None:
        """With no faults and no work under way: the books are exact, nothing is leased, the window is whole."""
        self.calm()
        memory = self.memory.stats()
        usage = self.backend.usage()
        assert usage["memory"] == memory.nbytes
        assert memory.in_use == sum(-(-len(data) // 64) * 64 for data in self._in_memory())
        assert memory.nbytes <= (self.capacities[0] or 0)
        for place, capacity in zip(self.places, self.capacities[1:], strict=True):
            if capacity is not None:
                held = sum(map(len, place.records.values()))
                assert usage[place.name] == held, f"{place.name} counts otherwise than what lies there"
                assert held <= capacity
        window = sorted(self.protected)
        there = self.stat(window)
        gone = [key for key, outcome in zip(window, there, strict=True) if not outcome.ok]
        assert not gone, f"{len(gone)} records left although waiting jobs need them"
        assert not self.backend._hierarchy.claimed
        pool = self.backend._mover._pool
        assert pool is None or pool.stats().in_use == 0

    def _in_memory(self) -> list[bytes]:
        return [bytes(info.nbytes) for page in self.memory.list(deadline=soon()) for info in page]
