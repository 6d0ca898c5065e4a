"""The store's calls: completions of every shape, bad input, and the end of life."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import store as store_module
from kvstore.backend import Capability, KeyInfo, Outcome, Status
from kvstore.completion import CompletionQueue
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import opaque_key
from kvstore.record import opaque_spec
from kvstore.store import Item, Priority, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.support import (
    DTYPE,
    LAYOUT,
    SPEC,
    TOKENS,
    Unclosed,
    chain,
    items,
    poisoned,
    soon,
    store_over,
    wants,
)

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
    with store_over(Unclosed(backend), namespace="one") as store:
        store.put_many({"x": b"1"})
    with store_over(Unclosed(backend), namespace="two") as store:
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
    store = store_over(Unclosed(backend))
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


@pytest.mark.parametrize("native", [False, True])
def test_large_records_are_written_soon_after_they_are_checksummed(native: bool) -> None:
    """One at a time, unless a batch is cheaper for the backend; each gets its own outcome."""
    backend = FaultyBackend(DictBackend(), {"put": [Fault.ok(), Fault.error()] if not native else []})
    backend.inner.limits = backend.limits.__class__(lanes=1, preferred_io_bytes=64 << 20)  # type: ignore[misc]
    if native:
        backend.inner.capabilities |= Capability.NATIVE_BATCH  # type: ignore[misc]
    data = {f"big {number}": os.urandom(3 << 20) for number in range(3)}
    data["small"] = b"small"
    with store_over(backend) as store:
        stored = store.put_many(data)
        assert [len(call.keys) for call in backend.calls_of("put")] == ([4] if native else [1, 1, 2])
        assert [outcome.status for outcome in stored] == [
            Status.OK,
            Status.OK if native else Status.ERROR,
            Status.OK,
            Status.OK,
        ]
        into = [bytearray(len(each)) for each in data.values()]
        found = store.get_many(list(data), into=into)
        for number, each in enumerate(data.values()):
            if native or number != 1:
                assert found[number] == len(each)
                assert into[number] == each
            else:
                assert found[number] is None


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
