"""The part of `BackendSuite` about bytes: reading, storing, removing, listing, leasing."""

from __future__ import annotations

import array
import mmap
import random
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.backend import Backend, Capability, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import PermanentError

from .suite_base import CANARY, SuiteBase, payload

__all__ = ["DataTests"]

_SIZE = 10_000
_RANGES = {
    "whole": (0, _SIZE),
    "first byte": (0, 1),
    "last byte": (_SIZE - 1, 1),
    "all but the first byte": (1, _SIZE - 1),
    "a page": (4096, 4096),
    "across pages": (4095, 4098),
    "odd": (777, 3333),
    "up to the end": (8192, _SIZE - 8192),
    "destination longer than the record": (0, _SIZE + 100),
    "across the end": (_SIZE - 10, 100),
    "at the end": (_SIZE, 10),
    "behind the end": (_SIZE + 1, 10),
    "far behind the end": (1 << 40, 10),
    "empty": (0, 0),
    "empty inside": (5, 0),
    "empty at the end": (_SIZE, 0),
}
_BATCHES = [0, 1, 64, 300]


class DataTests(SuiteBase):
    """Bytes go in and come out as the contract says."""

    # Reading.

    @pytest.mark.parametrize("name", _RANGES)
    def test_a_range_is_read(self, backend: Backend, name: str) -> None:
        """OK with fewer bytes means that the record ends there; at or behind the end that is OK with 0."""
        offset, length = _RANGES[name]
        key, data = self.key("record"), payload(_SIZE)
        self.seed(backend, key, data)
        outcome, got = self.get_one(backend, key, length, offset)
        assert outcome.status is Status.OK
        assert got == data[offset : offset + length]

    def test_many_ranges_of_many_records_in_one_batch(self, backend: Backend) -> None:
        """Results align, also when ranges of one record lie apart, overlap, repeat and run backwards."""
        keys = self.keys(3)
        data = {key: payload(_SIZE, index) for index, key in enumerate(keys)}
        for key in keys:
            self.seed(backend, key, data[key])
        reads = [(key, offset, length) for key in keys for offset, length in _RANGES.values()] * 2
        random.Random(1).shuffle(reads)
        for (key, offset, length), (outcome, got) in zip(reads, self.get(backend, reads), strict=True):
            assert outcome.status is Status.OK
            assert got == data[key][offset : offset + length]

    def test_neighbouring_ranges_land_in_one_memory(self, backend: Backend) -> None:
        """A run of neighbouring ranges, each into its piece of one memory, leaves the record there."""
        self.needs_value(backend, 1 << 20)
        key, data = self.key("record"), payload(1 << 20)
        self.seed(backend, key, data)
        step = 60_000
        memory = bytearray([CANARY]) * (len(data) + step)
        view = memoryview(memory)
        reads = [Read(key, view[at : at + step], at) for at in range(0, len(data), step)]
        outcomes = backend.get_into(reads, deadline=self.soon())
        self.check_shape(outcomes, len(reads), {Status.OK})
        assert sum(outcome.nbytes for outcome in outcomes) == len(data)
        assert memory[: len(data)] == data
        assert memory[len(data) :] == bytes([CANARY]) * step

    def test_every_kind_of_memory_is_written(self, backend: Backend) -> None:
        """Flat byte views of a bytearray, an mmap, numpy, an array and a pool buffer, aligned or not."""
        key, data = self.key("record"), payload(5_000)
        self.seed(backend, key, data)
        with BufferPool(1 << 16) as pool, pool.acquire(5_000) as buffer:
            views = [
                memoryview(bytearray(5_000)),
                memoryview(bytearray(5_003))[3:],
                memoryview(mmap.mmap(-1, 8192))[1:5_001],
                np.zeros(5_000, dtype=np.uint8).data,
                memoryview(array.array("B", bytes(5_000))),
                np.zeros(1_250, dtype=np.float32).data.cast("B"),
                buffer.view,
            ]
            outcomes = backend.get_into([Read(key, view) for view in views], deadline=self.soon())
            self.check_shape(outcomes, len(views), {Status.OK})
            for view in views:
                assert view == data

    @pytest.mark.parametrize("count", _BATCHES)
    def test_outcomes_align_in_mixed_batches(self, backend: Backend, count: int) -> None:
        """Hits and misses in any order: every outcome belongs to its input. No batch is too small or too large."""
        keys = self.keys(count)
        data = {key: payload(100 + index, index) for index, key in enumerate(keys) if index % 3 != 1}
        assert all(outcome.ok for outcome in self.put(backend, data))
        random.Random(count).shuffle(keys)
        for key, outcome in zip(keys, self.stat(backend, keys), strict=True):
            assert outcome.status is (Status.OK if key in data else Status.MISS)
            assert outcome.nbytes == len(data.get(key, b""))
        for key, (outcome, got) in zip(keys, self.get(backend, [(key, 7, 500) for key in keys]), strict=True):
            assert outcome.status is (Status.OK if key in data else Status.MISS)
            assert got == data.get(key, b"")[7:507]
        for key, outcome in zip(keys, self.delete(backend, keys), strict=True):
            assert outcome.status is (Status.OK if key in data else Status.MISS)
        assert all(outcome.status is Status.MISS for outcome in self.stat(backend, keys))

    def test_nothing_is_written_to_dst_after_the_return(self, backend: Backend) -> None:
        """Memory of a finished read belongs to the caller again, also if other calls and close follow."""
        keys = [*self.keys(3), self.key("missing")]
        for key in keys[:3]:
            self.seed(backend, key, payload(3_000, key))
        memory = bytearray(4 * 4_000)
        view = memoryview(memory)
        reads = [Read(key, view[i * 4_000 : i * 4_000 + 4_000]) for i, key in enumerate(keys)]
        backend.get_into(reads, deadline=self.soon())
        pattern = payload(len(memory), "pattern")
        memory[:] = pattern
        self.stat(backend, keys)
        self.get(backend, [(key, 0, 100) for key in keys])
        self.put(backend, {keys[3]: payload(3_000, "late")})
        self.delete(backend, keys)
        backend.close()
        assert memory == pattern

    def test_what_is_not_there_is_a_miss(self, backend: Backend) -> None:
        """MISS is data, for every operation; also if the destination is empty."""
        key = self.key("missing")
        assert [o.status for o in self.stat(backend, [key])] == [Status.MISS]
        assert [o.status for o, _ in self.get(backend, [(key, 0, 10), (key, 0, 0), (key, 99, 10)])] == [Status.MISS] * 3
        assert [o.status for o in self.delete(backend, [key])] == [Status.MISS]
        assert [o.status for o in self.quarantine(backend, [key])] == [Status.MISS]
        assert backend.lease([key], deadline=self.soon()) == [None]

    # Storing.

    @pytest.mark.parametrize("nbytes", [1, 63, 64, 4095, 4096, 4097, (1 << 20) + 13, (5 << 20) + 1])
    def test_a_record_is_stored(self, backend: Backend, nbytes: int) -> None:
        self.needs_value(backend, nbytes)
        key, data = self.key("record"), payload(nbytes)
        assert self.put(backend, {key: data})[0].ok
        assert self.inspect(backend, key) == data
        assert self.stat(backend, [key])[0].nbytes == nbytes
        outcome, got = self.get_one(backend, key, nbytes + 1)
        assert outcome.ok
        assert got == data

    def test_an_empty_record_is_no_miss(self, backend: Backend) -> None:
        """A record of 0 bytes is stored, or refused at put; it is never taken for a miss."""
        key = self.key("empty")
        (outcome,) = backend.put([Write(key, [])], deadline=self.soon())
        if not self.stores_empty:
            assert isinstance(outcome.error, PermanentError)
            assert self.stat(backend, [key])[0].status is Status.MISS
            return
        assert outcome == (Status.OK, 0, None)
        assert self.inspect(backend, key) == b""
        assert self.stat(backend, [key]) == [(Status.OK, 0, None)]
        assert self.get(backend, [(key, 0, 10), (key, 0, 0), (key, 3, 1)]) == [((Status.OK, 0, None), b"")] * 3
        assert self.put(backend, {key: b"x"})[0].status is Status.EXISTS
        assert self.delete(backend, [key])[0].ok

    def test_views_are_gathered(self, backend: Backend) -> None:
        """Any number of views, more than one system call takes; empty, read-only and unaligned ones among them."""
        data = payload(50_000)
        views, at = [], 0
        for index in range(2_500):
            step = index % 41
            piece = data[at : at + step]
            at += len(piece)
            views.append(memoryview(piece) if index % 2 else memoryview(bytearray(b"#" + piece))[1:])
        views += [memoryview(b""), memoryview(data)[at:], memoryview(b"")]
        mapped = mmap.mmap(-1, 4096)
        mapped[:100] = payload(100, "mapped")
        views += [memoryview(mapped)[:100], np.frombuffer(b"numpy", dtype=np.uint8).data]
        writes = [Write(self.key("gathered"), views), Write(self.key("one"), [memoryview(b"1")])]
        outcomes = backend.put(writes, deadline=self.soon())
        whole = data + payload(100, "mapped") + b"numpy"
        assert outcomes == [(Status.OK, len(whole), None), (Status.OK, 1, None)]
        assert self.inspect(backend, self.key("gathered")) == whole
        assert self.inspect(backend, self.key("one")) == b"1"

    def test_the_source_is_neither_changed_nor_kept(self, backend: Backend) -> None:
        """After put has returned, the caller may reuse its memory."""
        data = payload(20_000)
        memory = bytearray(data)
        key = self.key("record")
        assert backend.put([Write(key, [memoryview(memory)])], deadline=self.soon())[0].ok
        assert memory == data
        memory[:] = bytes(len(memory))
        assert self.inspect(backend, key) == data
        assert self.get_one(backend, key, len(data))[1] == data

    @pytest.mark.parametrize("seeded", [False, True], ids=["after a put", "after another's put"])
    def test_the_first_bytes_survive(self, backend: Backend, seeded: bool) -> None:
        """Write-once: the second writer gets EXISTS, whatever it brings."""
        key, first, second = self.key("record"), payload(5_000, "first"), payload(6_000, "second")
        if seeded:
            self.seed(backend, key, first)
        else:
            assert self.put(backend, {key: first})[0].ok
        for data in (second, first, b"x"):
            assert self.put(backend, {key: data})[0].status is Status.EXISTS
        assert self.inspect(backend, key) == first
        assert self.get_one(backend, key, 7_000)[1] == first

    def test_the_first_of_equal_keys_in_a_batch_wins(self, backend: Backend) -> None:
        a, b, c = self.keys(3)
        batch = [(a, b"a one"), (b, b"b"), (a, b"a two!"), (a, b"a one"), (c, b"c"), (b, b"b two")]
        statuses = [outcome.status for outcome in self.put(backend, batch)]
        assert statuses == [Status.OK, Status.OK, Status.EXISTS, Status.EXISTS, Status.OK, Status.EXISTS]
        assert [self.inspect(backend, key) for key in (a, b, c)] == [b"a one", b"b", b"c"]

    @pytest.mark.parametrize("count", _BATCHES)
    def test_a_batch_is_stored(self, backend: Backend, count: int) -> None:
        records = {key: payload(index * 7 % 513 + 1, index) for index, key in enumerate(self.keys(count))}
        assert all(outcome.ok for outcome in self.put(backend, records))
        for key in list(records)[:: max(1, count // 20)]:
            assert self.inspect(backend, key) == records[key]
        got = self.get(backend, [(key, 0, 600) for key in records])
        assert [data for _, data in got] == list(records.values())
        assert all(outcome.status is Status.EXISTS for outcome in self.put(backend, records))

    def test_a_parent_is_only_a_hint(self, backend: Backend) -> None:
        """A write may name a parent that is there, that is not, or that comes later in the batch."""
        a, b, c, stranger = self.keys(4)
        one = [memoryview(b"1")]
        writes = [Write(a, one, stranger), Write(c, one, b), Write(b, one, a), Write(self.key("self"), one, a)]
        outcomes = backend.put(writes, deadline=self.soon())
        self.check_shape(outcomes, 4, {Status.OK})
        assert self.inspect(backend, c) == b"1"
        assert self.inspect(backend, stranger) is None

    def test_a_record_that_is_too_large_is_refused(self) -> None:
        """PermanentError for that item alone, nothing left behind, and its key is free for a smaller record."""
        backend = self.open_limited(100_000)
        if backend is None:
            pytest.skip("open_limited() is not defined")
        self.opened(backend)
        limit = backend.limits.max_value_bytes
        assert 0 < limit <= 100_000
        before, large, after = self.keys(3)
        data = memoryview(payload(limit + 1))
        small = [data[:100]]
        batch = [Write(before, small), Write(large, [data[:60], data[60:]]), Write(after, small)]
        outcomes = backend.put(batch, deadline=self.soon())
        self.check_shape(outcomes, 3, {Status.OK, Status.ERROR})
        assert [outcome.ok for outcome in outcomes] == [True, False, True]
        assert isinstance(outcomes[1].error, PermanentError)
        assert [o.status for o in self.stat(backend, [before, large, after])] == [Status.OK, Status.MISS, Status.OK]
        if Capability.LIST in backend.capabilities:
            assert large not in self.listing(backend)
        exact = payload(limit, "exact")
        assert self.put(backend, {large: exact})[0].ok
        assert self.get_one(backend, large, limit)[1] == exact

    # Removing.

    def test_a_deleted_record_is_gone_and_its_key_free(self, backend: Backend) -> None:
        a, b = self.keys(2)
        self.seed(backend, a, b"old")
        assert self.put(backend, {b: b"stays"})[0].ok
        assert self.delete(backend, [a])[0].ok
        assert self.inspect(backend, a) is None
        assert self.get_one(backend, a, 10)[0].status is Status.MISS
        assert self.delete(backend, [a])[0].status is Status.MISS
        assert self.put(backend, {a: b"new one"})[0].ok
        assert self.inspect(backend, a) == b"new one"
        assert self.inspect(backend, b) == b"stays"

    def test_a_quarantined_record_is_out_of_reach_and_heals(self, backend: Backend) -> None:
        """After quarantine the key is a miss everywhere, and the next put of it succeeds."""
        bad, good = self.keys(2)
        self.seed(backend, bad, b"corrupt bytes")
        self.seed(backend, good, b"good bytes")
        assert self.get_one(backend, bad, 100)[0].ok  # how it was found to be corrupt
        assert self.quarantine(backend, [bad])[0].ok
        assert self.stat(backend, [bad, good])[0].status is Status.MISS
        assert self.get_one(backend, bad, 100)[0].status is Status.MISS
        assert self.inspect(backend, bad) is None
        assert self.quarantine(backend, [bad])[0].status is Status.MISS
        if Capability.LIST in backend.capabilities:
            assert bad not in self.listing(backend)
        assert self.put(backend, {bad: b"healed"})[0].ok
        assert self.get_one(backend, bad, 100)[1] == b"healed"
        assert self.get_one(backend, good, 100)[1] == b"good bytes"

    def test_quarantine_of_a_batch_aligns(self, backend: Backend) -> None:
        keys = self.keys(6)
        for key in keys[::2]:
            self.seed(backend, key, payload(50, key))
        self.get(backend, [(key, 0, 50) for key in keys])
        wanted = [Status.OK, Status.MISS] * 3
        assert [outcome.status for outcome in self.quarantine(backend, keys)] == wanted

    def test_the_same_record_can_be_quarantined_again_and_again(self, backend: Backend) -> None:
        """What was put aside before must not be in the way."""
        key = self.key("record")
        for turn in range(3):
            assert self.put(backend, {key: payload(100, turn)})[0].ok
            assert self.get_one(backend, key, 100)[1] == payload(100, turn)
            assert self.quarantine(backend, [key])[0].ok
        assert self.inspect(backend, key) is None

    def test_quarantine_spares_a_record_that_was_replaced(self, backend: Backend) -> None:
        """Two readers find one record corrupt; the second reports it after the first one's report was healed."""
        key = self.key("record")
        self.seed(backend, key, b"corrupt")
        assert self.get_one(backend, key, 100)[1] == b"corrupt"
        assert self.quarantine(backend, [key])[0].ok
        assert self.put(backend, {key: b"healed"})[0].ok
        self.quarantine(backend, [key])
        assert self.inspect(backend, key) == b"healed"
        assert self.get_one(backend, key, 100)[1] == b"healed"

    # Listing and leasing.

    def test_list_is_what_is_there(self, backend: Backend) -> None:
        """The capability is honest: with it list reports every record with its size, without it it says so."""
        if Capability.LIST not in backend.capabilities:
            with pytest.raises(PermanentError):
                list(backend.list(deadline=self.soon()))
            return
        before = self.listing(backend)
        keys = self.keys(40)
        assert not before.keys() & set(keys)
        records = {key: payload(index + 1, index) for index, key in enumerate(keys)}
        for key in keys[:5]:
            self.seed(backend, key, records[key])
        self.put(backend, {key: records[key] for key in keys[5:]})
        found = self.listing(backend)
        assert {key: info.nbytes for key, info in found.items() if key not in before} == {
            key: len(data) for key, data in records.items()
        }
        self.delete(backend, keys[::2])
        assert self.listing(backend).keys() - before.keys() == set(keys[1::2])

    def test_landed_is_called_when_all_of_a_read_is_there(self, backend: Backend) -> None:
        """The capability is honest: for each OK read once, when its bytes are final; without it never."""
        keys = self.keys(3)
        records = {key: payload(3_000_000, index) for index, key in enumerate(keys)}
        self.put(backend, records)
        ranges = [(0, 700), (4096, 1_000_000), (1_004_096, 1_500_000), (2_900_000, 200_000), (5, 0)]
        wanted = [(key, offset, length) for key in (*keys, self.key("missing")) for offset, length in ranges]
        memory = [bytearray([CANARY]) * length for _, _, length in wanted]
        seen: dict[int, bytes] = {}

        def landed(index: int) -> Callable[[], None]:
            return lambda: seen.update({index: bytes(memory[index])})

        reads = [
            Read(key, memoryview(dst), offset, landed(index))
            for index, ((key, offset, _), dst) in enumerate(zip(wanted, memory, strict=True))
        ]
        outcomes = backend.get_into(reads, deadline=self.soon())
        claimed = Capability.LANDING in backend.capabilities
        for index, ((key, offset, length), outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if key not in records:
                assert outcome.status is Status.MISS
                assert index not in seen
                continue
            assert outcome.status is Status.OK
            assert memory[index][: outcome.nbytes] == records[key][offset : offset + length]
            assert seen.get(index) == (bytes(memory[index]) if claimed else None)

    def test_leases_are_the_records(self, backend: Backend) -> None:
        """The capability is honest: read-only views of exactly the record, which outlive its removal."""
        keys = self.keys(8)
        records = {key: payload(1_000 + index, index) for index, key in enumerate(keys)}
        self.put(backend, records)
        asked = [keys[0], self.key("missing"), *keys[1:], keys[0]]
        leases: list[Buffer | None] = backend.lease(asked, deadline=self.soon())
        try:
            assert isinstance(leases, list)
            assert len(leases) == len(asked)
            assert leases[1] is None
            if Capability.LEASE not in backend.capabilities:
                assert leases == [None] * len(asked)
                return
            assert any(lease is not None for lease in leases), "LEASE is claimed, but nothing is leased"
            self.delete(backend, keys[:4])
            self.get(backend, [(key, 0, 10) for key in keys])
            self.quarantine(backend, keys[4:])
            self.put(backend, {key: payload(1_000 + index, "new") for index, key in enumerate(keys)})
            for key, lease in zip(asked, leases, strict=True):
                if lease is not None:
                    assert lease.view.readonly
                    assert lease.view == records[key]
        finally:
            for lease in leases:
                if lease is not None:
                    lease.release()
