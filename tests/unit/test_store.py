"""The store over backends that work: what goes in comes out, and nothing is copied on the way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import buffers, flights, staged
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.layout import KVLayout
from kvstore.record import kv_spec, parse_header
from kvstore.store import Item, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import (
    DTYPE,
    LAYOUT,
    SPEC,
    Unclosed,
    chain,
    items,
    payload,
    poisoned,
    soon,
    store_over,
    wants,
)

SERDES = ("raw", "lz4", "shuffle-zstd")


@pytest.mark.parametrize("serde", SERDES)
def test_chunks_come_back_whole_and_by_layers(serde: str) -> None:
    keys = chain(5)
    with store_over(DictBackend(), remote_serde=serde) as store:
        assert [outcome.status for outcome in store.submit_put(items(keys)).result()] == [Status.OK] * 5
        assert store.submit_lookup([*keys, *chain(1, start=999)]).result() == 5
        got = poisoned(5)
        outcomes = store.submit_get(wants(keys, got)).result()
        assert outcomes == [Outcome(Status.OK, SPEC.raw_bytes)] * 5
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        size = SPEC.sizes[0]
        for first in range(LAYOUT.num_layers):
            part = bytearray(size * (LAYOUT.num_layers - first))
            assert store.submit_get([Want(keys[1], memoryview(part), SPEC, first)]).result()[0].ok
            assert part == payload(keys[1])[first * size :]
            one = bytearray(size)
            assert store.submit_get([Want(keys[1], [memoryview(one)], SPEC, first, 1)]).result()[0].ok
            assert one == payload(keys[1])[first * size :][:size]


@pytest.mark.parametrize("serde", SERDES)
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 3 << 20), max_size=4))
def test_opaque_records_of_any_size(serde: str, sizes: list[int]) -> None:
    values = {f"record {number}": os.urandom(size // 2) + bytes(size - size // 2) for number, size in enumerate(sizes)}
    with store_over(DictBackend(), remote_serde=serde) as store:
        assert all(outcome.ok for outcome in store.put_many(values))
        assert store.get_many([*values, "nothing"]) == [*values.values(), None]
        into = [bytearray(len(value)) for value in values.values()]
        assert store.get_many(list(values), into=into) == [len(value) for value in values.values()]
        assert into == list(values.values())
        assert store.hit_prefix([*values, "nothing"]) == len(values)


def test_any_store_reads_what_any_codec_stored() -> None:
    backend, keys = DictBackend(), chain(3)
    for serde, key in zip(SERDES, keys, strict=True):
        with store_over(Unclosed(backend), remote_serde=serde) as store:
            assert store.submit_put(items([key])).result()[0].ok
    for serde in SERDES:
        with store_over(Unclosed(backend), remote_serde=serde) as store:
            got = poisoned(3)
            assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
            assert [bytes(each) for each in got] == [payload(key) for key in keys]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_dtype_is_byte_exact(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layout, tokens = KVLayout(2, 2, 8), 16
    spec = kv_spec(layout, dtype, tokens)
    raw = torch.frombuffer(bytearray(os.urandom(spec.raw_bytes)), dtype=torch.uint8)  # NaNs, −0.0 and all
    tensor = raw.view(getattr(torch, dtype)).requires_grad_(False)
    key = chain(1, dtype=dtype)[0]
    with store_over(DictBackend()) as store:
        stored = spec.split(memoryview(tensor.view(torch.uint8).numpy()))
        assert store.submit_put([Item(key, stored, spec)]).result()[0].ok
        back = torch.empty_like(tensor)
        assert store.submit_get([Want(key, memoryview(back.view(torch.uint8).numpy()), spec)]).result()[0].ok
        assert torch.equal(back.view(torch.uint8), raw)


def test_read_only_sources_are_fine_and_views_of_wide_items_count_bytes() -> None:
    torch = pytest.importorskip("torch")
    with store_over(DictBackend()) as store:
        wide = memoryview(bytearray(64)).cast("d")
        assert store.put_many({"wide": wide, "read-only": memoryview(b"x" * 64)})[0].ok
        back = torch.zeros(8, dtype=torch.float64)
        assert store.get_many(["wide"], into=[memoryview(back.numpy())]) == [64]


# Copies are counted, not reasoned about.


class _Spy(DictBackend):
    """Notes which memory the backend is told to read into and write from."""

    def __init__(self) -> None:
        super().__init__()
        self.read_into: list[tuple[int, int]] = []
        self.written_from: list[tuple[int, int]] = []

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.read_into += [(_address(read.dst), len(read.dst)) for read in reads if len(read.dst)]
        return super().get_into(reads, deadline=deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self.written_from += [(_address(view), len(view)) for write in writes for view in write.src if len(view)]
        return super().put(writes, deadline=deadline)


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def _covered(spans: Sequence[tuple[int, int]], begin: int, nbytes: int) -> int:
    """Bytes of [begin, begin + nbytes) that the spans cover."""
    return sum(max(0, min(at + size, begin + nbytes) - max(at, begin)) for at, size in spans)


@pytest.mark.parametrize("preferred", [1 << 30, 4096])
def test_no_byte_is_copied_between_backend_and_caller(preferred: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def counting(dst: memoryview, src: memoryview) -> None:
        copied.append(len(src))
        buffers.copy_bytes(dst, src)

    for module in (flights, staged):
        monkeypatch.setattr(module, "copy_bytes", counting)
    backend = _Spy()
    backend.limits = backend.limits.__class__(lanes=4, preferred_io_bytes=preferred)
    keys = chain(3)
    with store_over(backend) as store:
        sources = [bytearray(payload(key)) for key in keys]
        store.submit_put(
            [Item(key, SPEC.split(memoryview(s)), SPEC) for key, s in zip(keys, sources, strict=True)]
        ).result()
        got = poisoned(3)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
        acquired = store.pool.stats().buffers
    assert got == sources
    assert copied == []
    assert acquired == 0  # no staging either
    for key_source, destination in zip(sources, got, strict=True):
        begin = ctypes.addressof(ctypes.c_char.from_buffer(key_source))
        assert _covered(backend.written_from, begin, len(key_source)) == len(key_source)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(destination))
        assert _covered(backend.read_into, begin, len(destination)) == len(destination)
    # Besides the payload only headers travel.
    assert sum(size for _, size in backend.read_into) == 3 * (SPEC.raw_bytes + SPEC.data_offset)


def test_a_record_in_memory_is_leased_without_a_copy() -> None:
    keys = chain(2)
    with kvstore.open_store("memory://?bytes=1MiB", buffer_pool_bytes=1 << 20) as store:
        store.submit_put(items(keys)).result()
        lease, missing = store.submit_lease([keys[0], *chain(1, start=7)]).result()
        assert missing is None
        assert lease is not None
        with lease:
            assert lease.view.readonly
            header = parse_header(lease.view, key=keys[0])
            segment = header.segments[1]
            start = segment.offset
            assert lease.view[start : start + segment.length] == payload(keys[0])[SPEC.sizes[0] : 2 * SPEC.sizes[0]]
            assert header.meta()["dtype"] == DTYPE


def test_an_encoded_record_is_not_leased() -> None:
    keys = chain(1)
    with kvstore.open_store("memory://?bytes=1MiB", buffer_pool_bytes=1 << 20, remote_serde="lz4") as store:
        segments = SPEC.split(memoryview(bytes(SPEC.raw_bytes)))
        store.submit_put([Item(keys[0], segments, SPEC)]).result()
        assert store.submit_lease(keys).result() == [None]


def test_no_byte_is_copied_between_the_file_system_and_the_caller(tmp_path: Path) -> None:
    """The same through the whole stack: what the kernel is told to fill and to write is the caller's own memory."""
    from kvstore.metrics import Metrics
    from kvstore.wrappers import wrap
    from kvstore_backends.file import FileBackend
    from kvstore_backends.file.oscalls import OsCalls

    filled: list[tuple[int, int]] = []
    written: list[tuple[int, int]] = []

    class Spy(OsCalls):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
            filled.extend((_address(view), len(view)) for view in buffers if len(view))
            return super().preadv(fd, buffers, offset)

        def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
            written.extend((_address(view), len(view)) for view in buffers if len(view))
            return super().pwritev(fd, buffers, offset)

    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=64)
    spec = kv_spec(layout, DTYPE, 512)  # segments of 1 MiB
    key = chain(1)[0]
    source, destination = bytearray(os.urandom(spec.raw_bytes)), bytearray(spec.raw_bytes)
    backend = wrap(FileBackend(tmp_path, calls=Spy()), {}, metrics=Metrics())
    with store_over(backend) as store:
        assert store.submit_put([Item(key, spec.split(memoryview(source)), spec)]).result()[0].ok
        assert store.submit_get([Want(key, memoryview(destination), spec)]).result()[0].ok
    assert destination == source
    for spans, memory in ((written, source), (filled, destination)):
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert _covered(spans, begin, len(memory)) == len(memory)
        assert sum(size for _, size in spans) == len(memory) + spec.data_offset


# The prefix, replicas, several backends.


def test_a_hole_ends_the_prefix() -> None:
    keys = chain(6)
    with store_over(DictBackend()) as store:
        store.submit_put(items([*keys[:3], *keys[4:]])).result()
        assert store.submit_lookup(keys).result() == 3
        assert store.submit_lookup(keys[4:]).result() == 2
        assert store.submit_lookup([]).result() == 0


def test_keys_spread_over_backends_and_come_back() -> None:
    backends = [DictBackend(name=name) for name in ("a", "b", "c")]
    keys = chain(60)
    with store_over(*backends) as store:
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())
        held = [sum(len(page) for page in backend.list(deadline=soon())) for backend in backends]
        assert sum(held) == 60
        assert min(held) > 5
        got = poisoned(60)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        assert store.submit_lookup(keys).result() == 60
        assert sum(len(page) for page in store.list()) == 60
        assert all(outcome.ok for outcome in store.submit_delete(keys).result())
        assert store.submit_lookup(keys).result() == 0


def test_a_replica_answers_when_the_first_is_gone_or_empty() -> None:
    inner = [DictBackend(name=name) for name in ("a", "b")]
    keys = chain(20)
    first = FaultyBackend(inner[0])
    with store_over(first, inner[1], replicas=2) as store:
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())
        inner[0].delete(keys[:5], deadline=soon())
        first.push(*[Fault.error()] * 50, operation="get")
        first.push(*[Fault.error()] * 50, operation="stat")
        got = poisoned(20)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        assert store.submit_lookup(keys).result() == 20


def test_stored_anywhere_is_stored_and_nowhere_is_an_error() -> None:
    bad = FaultyBackend(DictBackend(name="bad"), otherwise=Fault.error())
    with store_over(bad, DictBackend(name="good"), replicas=2) as store:
        assert [outcome.status for outcome in store.submit_put(items(chain(3))).result()] == [Status.OK] * 3
    with store_over(FaultyBackend(DictBackend(), otherwise=Fault.error())) as store:
        assert [outcome.status for outcome in store.submit_put(items(chain(3))).result()] == [Status.ERROR] * 3


def test_delete_removes_from_every_replica() -> None:
    backends = [DictBackend(name=name) for name in ("a", "b")]
    with store_over(*backends, replicas=2) as store:
        store.put_many({"x": b"1"})
        assert [outcome.status for outcome in store.delete_many(["x", "y"])] == [Status.OK, Status.MISS]
        assert all(not list(page) for backend in backends for page in backend.list(deadline=soon()))
