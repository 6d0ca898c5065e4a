"""The store over backends that work: what goes in comes out, and nothing is copied on the way."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import buffers, flights, staged
from kvstore import store as store_module
from kvstore.backend import KeyInfo, Outcome, Read, Status, Write
from kvstore.completion import CompletionQueue
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import opaque_key
from kvstore.layout import KVLayout
from kvstore.record import kv_spec, opaque_spec, parse_header
from kvstore.store import Item, Priority, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import (
    DTYPE,
    LAYOUT,
    SPEC,
    TOKENS,
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
        with store_over(_Unclosed(backend), remote_serde=serde) as store:
            assert store.submit_put(items([key])).result()[0].ok
    for serde in SERDES:
        with store_over(_Unclosed(backend), remote_serde=serde) as store:
            got = poisoned(3)
            assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
            assert [bytes(each) for each in got] == [payload(key) for key in keys]


class _Unclosed(FaultyBackend):
    """Stays open when a store closes it, so that another store can go on with it."""

    def __init__(self, inner: DictBackend) -> None:
        super().__init__(inner)

    def close(self) -> None:
        return None


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


# Completion-shaped.


def test_await_and_eventfd_and_callback_see_the_same() -> None:
    keys = chain(2)
    with store_over(DictBackend()) as store:
        store.submit_put(items(keys)).result()

        async def asynchronous() -> Sequence[Outcome]:
            return await store.submit_get(wants(keys, poisoned(2)))

        expected = [Outcome(Status.OK, SPEC.raw_bytes)] * 2
        assert asyncio.run(asynchronous()) == expected
        with CompletionQueue() as queue:
            completion = queue.add(store.submit_get(wants(keys, poisoned(2))))
            assert select.select([queue], [], [], 20)[0]
            assert queue.drain() == [completion]
            assert completion.result() == expected
        called = threading.Event()
        store.submit_get(wants(keys, poisoned(2))).add_done_callback(lambda done: called.set())
        assert called.wait(20)


def test_demand_goes_before_background() -> None:
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    backend.inner.limits = backend.limits.__class__(lanes=1)  # type: ignore[misc]
    keys = chain(4)
    with store_over(backend) as store:
        first = store.submit_put(items(keys[:1]))
        backend.wait_hung()
        later = store.submit_put(items(keys[1:]))
        read = store.submit_get(wants(keys[:1], poisoned(1)), priority=Priority.DEMAND)
        backend.release()
        assert first.result()[0].ok
        assert read.result()[0].ok
        assert all(outcome.ok for outcome in later.result())
        order = [call.operation for call in backend.calls if call.operation in ("put", "get")]
        assert order == ["put", "get", "put"]


def test_background_writes_leave_a_lane_for_reads() -> None:
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()] * 10})
    backend.inner.limits = backend.limits.__class__(lanes=2)  # type: ignore[misc]
    with store_over(backend) as store:
        writes = [store.submit_put(items(chain(1, start=1000 * number))) for number in range(3)]
        backend.wait_hung()
        assert store.submit_get(wants(chain(1), poisoned(1))).result(20)[0].status is Status.MISS
        assert backend.hung == 1
        while not all(write.done() for write in writes):
            backend.release()
            time.sleep(0.001)  # until the next one hangs


# Bad input, and the end of life.


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (lambda key: Want(key, memoryview(bytes(SPEC.raw_bytes)), SPEC), "read-only"),
        (lambda key: Want(key, memoryview(bytearray(SPEC.raw_bytes - 1)), SPEC), "bytes"),
        (lambda key: Want(key, memoryview(bytearray(10)), SPEC, 3), "segments 3"),
        (lambda key: Want(key, memoryview(bytearray(2 * SPEC.raw_bytes))[::2], SPEC), "contiguous"),
        (lambda key: Want(key, [memoryview(bytearray(5))] * 3, SPEC), "do not fit"),
    ],
)
def test_a_bad_destination_is_refused_at_once(want: Any, words: str) -> None:
    with store_over(DictBackend()) as store, pytest.raises(ConfigError, match=words):
        store.submit_get([want(chain(1)[0])])


def test_segments_that_do_not_fit_are_refused_at_once() -> None:
    key = chain(1)[0]
    with store_over(DictBackend()) as store:
        with pytest.raises(ConfigError, match="do not fit"):
            store.submit_put([Item(key, [memoryview(b"short")], SPEC)])
        with pytest.raises(ConfigError, match="named by"):
            store.get_many([3])


@pytest.mark.parametrize("method", ["submit_lookup", "submit_lease", "submit_delete", "submit_heads"])
@pytest.mark.parametrize("keys", ["answer", b"answer", opaque_key("answer"), ["answer"], [bytes(32)], None, 7])
def test_what_is_no_key_never_reaches_a_backend(method: str, keys: Any) -> None:
    backend = FaultyBackend(DictBackend())
    with store_over(backend) as store, pytest.raises(ConfigError, match="not"):
        getattr(store, method)(keys)
    assert [call.operation for call in backend.calls] == ["close"]


def test_a_single_name_is_not_a_list_of_letters() -> None:
    with store_over(DictBackend()) as store:
        store.put_many({"a": b"1", "n": b"2"})
        for call in (store.get_many, store.hit_prefix, store.delete_many):
            with pytest.raises(ConfigError, match="list of names"):
                call("an")
        assert store.get_many(["a", "n"]) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: store.submit_get(["answer"]), "Want"),
        (lambda store: store.submit_get([("k", b"", SPEC)]), "Want"),
        (lambda store: store.submit_get([Want("answer", memoryview(bytearray(4)), opaque_spec(4))]), "Key"),
        (lambda store: store.submit_put(["answer"]), "Item"),
        (lambda store: store.submit_put([Item("answer", [b"1234"], opaque_spec(4))]), "Key"),
        (lambda store: store.put_many(["abc"]), "pairs"),
        (lambda store: store.put_many({"a": "text"}), "encode"),
        (lambda store: store.put_many({"a": b"1"}, timeout="5"), "timeout"),
        (lambda store: store.get_many(["a"], timeout=float("nan")), "timeout"),
    ],
)
def test_bad_arguments_are_named(call: Any, words: str) -> None:
    with store_over(DictBackend()) as store, pytest.raises(ConfigError, match=words):
        call(store)


def test_names_are_kept_apart_by_namespace() -> None:
    backend = DictBackend()
    with store_over(_Unclosed(backend), namespace="one") as store:
        store.put_many({"x": b"1"})
    with store_over(_Unclosed(backend), namespace="two") as store:
        assert store.get_many(["x"]) == [None]
        assert store.get_many([opaque_key("x", namespace="one")]) == [b"1"]


def test_another_shape_under_a_key_is_an_error_and_destroys_nothing() -> None:
    with store_over(DictBackend()) as store:
        store.put_many({"x": b"12345"})
        assert store.get_many(["x"], into=[bytearray(4)]) == [None]
        assert store.get_many(["x"]) == [b"12345"]
        assert store.stats().get("corrupt_records", 0) == 0


def test_two_models_and_short_prompts_in_one_store() -> None:
    with store_over(DictBackend()) as store:
        one, two = chain(2, model="a"), chain(2, model="b")
        store.submit_put(items(one)).result()
        assert store.submit_lookup(two).result() == 0
        assert kvstore.chunk_keys([1, 2, 3], context=store.key_context(model="a", layout=LAYOUT, dtype=DTYPE)) == []


def test_closed_means_closed() -> None:
    store = store_over(DictBackend())
    store.close()
    store.close()
    for call in (store.submit_get, store.submit_put, store.submit_lookup, store.submit_lease, store.submit_delete):
        with pytest.raises(ClosedError):
            call([])
    with pytest.raises(ClosedError):
        next(store.list())
    assert "closed" in repr(store)


def test_close_drains_what_was_put() -> None:
    backend = DictBackend()
    backend.limits = backend.limits.__class__(lanes=1)
    keys = chain(40)
    store = store_over(_Unclosed(backend))
    completion = store.submit_put(items(keys))
    store.close()
    assert all(outcome.ok for outcome in completion.result(0))
    assert sum(len(page) for page in backend.list(deadline=soon())) == 40


def test_close_without_drain_ends_what_has_not_begun() -> None:
    backend = FaultyBackend(DictBackend(), {"put": [Fault.hang()]})
    backend.inner.limits = backend.limits.__class__(lanes=1)  # type: ignore[misc]
    store = store_over(backend)
    running = store.submit_put(items(chain(1)))
    backend.wait_hung()
    waiting = store.submit_put(items(chain(1, start=500)))
    closer = threading.Thread(target=store.close, kwargs={"drain": False, "timeout": 0.05})
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    for completion in (running, waiting):
        with pytest.raises(ClosedError):
            completion.result(0)
    assert not running.settled()  # its memory is still in the hung call's hands
    backend.release()
    assert running.settled(20)


def test_a_forked_child_is_told_so() -> None:
    with store_over(DictBackend()) as store:
        store.put_many({"x": b"1"})
        pid = os.fork()
        if pid == 0:
            try:
                store.put_many({"y": b"2"})
            except ClosedError as error:
                os._exit(0 if "fork" in str(error) else 2)
            except BaseException:
                os._exit(3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.get_many(["x"]) == [b"1"]


def test_another_process_finds_what_this_one_stored(tmp_path: Path) -> None:
    import subprocess
    import sys

    with kvstore.open_store(f"file://{tmp_path}", buffer_pool_bytes=1 << 20) as store:
        store.put_many({"greeting": b"hello from another process"})
    code = (
        "import kvstore, sys\n"
        "with kvstore.open_store(sys.argv[1]) as store:\n"
        "    sys.stdout.buffer.write(store.get_many(['greeting'])[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, f"file://{tmp_path}"], capture_output=True, check=True)
    assert done.stdout == b"hello from another process"


def test_on_error_raise_raises_what_on_error_miss_returns() -> None:
    for on_error in ("miss", "raise"):
        backend = FaultyBackend(DictBackend(), {"get": [Fault.error()]})
        with store_over(backend, on_error=on_error) as store:
            completion = store.submit_get(wants(chain(1), poisoned(1)))
            if on_error == "raise":
                with pytest.raises(kvstore.TransientError):
                    completion.result()
            else:
                assert completion.result()[0].status is Status.ERROR


def test_a_large_record_is_shared_by_the_lanes() -> None:
    backend = FaultyBackend(DictBackend())
    backend.inner.limits = backend.limits.__class__(lanes=4, preferred_io_bytes=1 << 20)  # type: ignore[misc]
    data = os.urandom(8 << 20)
    with store_over(backend) as store:
        store.put_many({"big": data})
        assert store.get_many(["big"], into=[into := bytearray(len(data))]) == [len(data)]
        assert into == data
        assert len(backend.calls_of("get")) == 8
        assert opaque_spec(len(data)).raw_bytes == len(data)


def test_store_is_typed_and_lazy() -> None:
    assert isinstance(kvstore.open_store("memory://?bytes=1MiB").close(), type(None))
    assert kvstore.Store is Store
    assert TOKENS == 16


def test_a_claim_beyond_reason_is_not_allocated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A header that lies about its size, or many that together do, must not take all memory."""
    with store_over(DictBackend(), remote_serde="lz4") as store:
        zeros = {f"zeros {n}": bytes(100_000) for n in range(4)}
        store.put_many({**zeros, "noise": os.urandom(100_000)})
        assert store.get_many([*zeros]) == [*zeros.values()]
        assert caplog.text == ""
        monkeypatch.setattr(store_module, "_MAX_CLAIMS", 250_000)
        monkeypatch.setattr(store_module, "_MAX_EXPANSION", 2)
        assert [bool(each) for each in store.get_many([*zeros, "nothing"])] == [True, True, False, False, False]
        assert "2 of 5 records that claim up to 100000 bytes; read them with into=" in caplog.text
        monkeypatch.setattr(store_module, "_MAX_CLAIMS", 0)
        monkeypatch.setattr(store_module, "_MAX_EXPANSION", 3)
        found = store.get_many(["noise", *zeros])  # what is stored as it is gives credit
        assert [each is not None for each in found] == [True, True, True, False, False]
        monkeypatch.setattr(store_module, "_MAX_CLAIM", 99_999)
        assert store.get_many(["noise"]) == [None]
        assert store.get_many(["noise"], into=[bytearray(100_000)]) == [100_000]


def test_a_list_without_a_deadline_has_one() -> None:
    deadlines = []

    class Listing(DictBackend):
        def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
            deadlines.append(deadline)
            return super().list(deadline=deadline)

    with store_over(Listing(), put_timeout=7.0) as store:
        start = time.monotonic()
        assert list(store.list()) == []
        assert start + 7 <= deadlines[0] <= time.monotonic() + 7
        with pytest.raises(TransientError):
            list(store.list(deadline=start))
        with pytest.raises(ConfigError):
            next(store.list(deadline=float("nan")))


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
