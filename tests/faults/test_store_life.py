"""How a store ends: closed in time, from anywhere, whatever hangs; dropped, forked, or left to the program's end."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.buffers import BufferPool
from kvstore.completion import Completion
from kvstore.config import Config
from kvstore.errors import ClosedError, ConfigError, PoolExhausted
from kvstore.store import Item, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.store_support import faulty, until
from tests.faults.support import SPEC, chain, items, payload, poisoned, store_over, wants

RAW = SPEC.raw_bytes


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-")]


# Closing while something hangs.


@pytest.mark.parametrize("drain", [True, False])
def test_what_was_queued_behind_a_hung_call_is_let_go_at_close(drain: bool) -> None:
    keys = chain(6)
    backend = faulty({"get": [Fault.hang()]})
    store = store_over(backend)
    with BufferPool(1 << 20) as pool:
        buffers = pool.acquire_many([RAW] * 4)
        running = store.submit_get([Want(keys[0], buffers[0].view, SPEC, hold=buffers[0])])
        backend.wait_hung()
        queued: list[Completion[Any]] = [
            store.submit_get([Want(keys[1], buffers[1].view, SPEC, hold=buffers[1])]),
            store.submit_get([Want(keys[0], buffers[2].view, SPEC, hold=buffers[2])]),  # rides along
            store.submit_put([Item(keys[2], SPEC.split(buffers[3].view), SPEC, hold=buffers[3])]),
            store.submit_lookup(keys),
            store.submit_lease(keys),
        ]
        start = time.monotonic()
        store.close(drain=drain, timeout=0.1)
        assert time.monotonic() - start < 10
        for done in (running, *queued):
            with pytest.raises(ClosedError):
                done.result(0)
        assert [done.settled() for done in (running, *queued)] == [False] + [True] * 5
        for buffer in buffers:
            buffer.release()
        assert pool.stats().pinned == 1  # the hung one's
        assert store.stats()["write_queue_bytes"] == 0
        backend.release()
        assert running.settled(20)
        assert pool.stats().in_use == 0
    assert store.stats()["backends"]["dict"]["failures"] == 0


@pytest.mark.parametrize("serde", ["raw", "lz4"])
def test_a_hung_read_that_returns_after_the_close_does_no_harm(serde: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = chain(2)
    backend = faulty(lanes=2)
    store = store_over(backend, remote_serde=serde)
    store.submit_put(items(keys)).result()
    backend.push(Fault.late(), Fault.hang(Fault.flip(9)), operation="get")
    got = poisoned(2)
    done = [store.submit_get(wants(keys[n : n + 1], got[n : n + 1])) for n in range(2)]
    backend.wait_hung(2)
    store.close(timeout=0.05)
    for each in done:
        with pytest.raises(ClosedError):
            each.result(0)
    caplog.clear()
    backend.release()
    assert all(each.settled(20) for each in done)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert store.stats()["backends"]["dict"]["failures"] == 0


def test_a_hung_backend_takes_no_time_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    backends = [FaultyBackend(DictBackend(name=name)) for name in ("a", "b", "c")]
    keys = chain(60)
    store = store_over(*backends)
    store.submit_put(items(keys)).result()
    backends[0].push(Fault.hang(), operation="get")
    store.submit_get(wants(keys, poisoned(60)))
    backends[0].wait_hung()
    start = time.monotonic()
    store.close(timeout=0.2)
    assert time.monotonic() - start < 10
    warned = [record.getMessage() for record in caplog.records if "under way" in record.getMessage()]
    assert len(warned) == 1
    assert "backend a" in warned[0]
    backends[0].release()


@pytest.mark.parametrize("fault", [Fault.raises(OSError(5, "io")), Fault.raises(ClosedError("twice")), Fault.hang()])
def test_a_backend_that_cannot_be_closed_stops_nothing(fault: Fault) -> None:
    bad = FaultyBackend(DictBackend(name="bad"), {"close": [fault]})
    good = FaultyBackend(DictBackend(name="good"))
    store = store_over(bad, good)
    store.put_many({str(number): b"x" for number in range(20)})
    start = time.monotonic()
    store.close(timeout=0.05)
    assert time.monotonic() - start < 10
    assert len(good.calls_of("close")) == 1
    with pytest.raises(ClosedError):
        store.pool.acquire(1)
    bad.release()


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 0, -5])
def test_any_number_of_seconds_will_do(timeout: float) -> None:
    store = store_over(DictBackend())
    done = store.submit_put(items(chain(1)))
    done.result()
    store.close(timeout=timeout)
    assert own_threads() == []


def test_close_waits_for_reads_under_way() -> None:
    (key,) = chain(1)
    backend = faulty()
    store = store_over(backend)
    store.submit_put(items([key])).result()
    backend.push(Fault.hang(), operation="get")
    done = store.submit_get(wants([key], got := poisoned(1)))
    backend.wait_hung()
    closer = threading.Thread(target=store.close)
    closer.start()
    until(lambda: "closed" in repr(store))
    assert not done.done()
    backend.release()
    closer.join(20)
    assert done.result(0)[0].ok
    assert got[0] == payload(key)


# Closing from anywhere, by anybody.


@pytest.mark.parametrize("where", ["lane", "timer"])
def test_close_in_a_callback_returns_and_the_store_closes_behind_it(where: str) -> None:
    keys = chain(30)
    inner = DictBackend(lanes=1)
    backend = FaultyBackend(inner)
    store = store_over(backend)
    closed: list[float] = []

    def close(done: Completion[Any]) -> None:
        start = time.monotonic()
        store.close()
        closed.append(time.monotonic() - start)

    if where == "timer":
        backend.push(Fault.hang(), operation="get")
        first: Completion[Any] = store.submit_get(wants(keys[:1], poisoned(1)), deadline=time.monotonic() + 0.7)
    else:
        backend.push(Fault.hang(), operation="put")
        first = store.submit_put(items(keys[:1]))
    backend.wait_hung()
    rest = [store.submit_put(items([key])) for key in keys[1:]]
    first.add_done_callback(close)
    if where == "timer":
        first.result(20)
    backend.release()
    assert all(each.result(20)[0].ok for each in rest)  # drained
    until(lambda: closed and not own_threads())
    assert closed[0] < 5
    assert len(backend.calls_of("close")) == 1


def test_the_second_to_close_waits_for_the_first() -> None:
    (key,) = chain(1)
    backend = faulty({"put": [Fault.hang()]})
    store = store_over(backend)
    put = store.submit_put(items([key]))
    backend.wait_hung()
    closers = [threading.Thread(target=store.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    until(lambda: "closed" in repr(store))
    store.close(timeout=0.01)
    assert all(closer.is_alive() for closer in closers)
    backend.release()
    for closer in closers:
        closer.join(20)
    assert put.result(0)[0].ok
    assert len(backend.calls_of("close")) == 1


def test_close_against_many_who_submit() -> None:
    keys = chain(4)
    for _ in range(25):
        store = store_over(FaultyBackend(DictBackend(lanes=2)))
        started = threading.Barrier(4)
        unfinished: list[Completion[Any]] = []

        def submit(store: Store = store, started: threading.Barrier = started, out: Any = unfinished) -> None:
            started.wait(20)
            try:
                while True:
                    out.append(store.submit_get(wants(keys, poisoned(4))))
                    out.append(store.submit_put(items(keys)))
                    out.append(store.submit_lookup(keys))
            except ClosedError:
                return

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait(20)
        store.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for done in unfinished:
            try:
                done.result(0)
            except ClosedError:
                pass
            assert done.settled()
        assert store.stats()["write_queue_bytes"] == 0


# Dropped without close.


def test_a_dropped_store_drains_and_ends_its_threads() -> None:
    keys = chain(30)
    backend = faulty({"put": [Fault.hang()]})
    store = store_over(backend)
    put = store.submit_put(items(keys))
    backend.wait_hung()
    gone = weakref.ref(store)
    pool = store.pool
    with pytest.warns(ResourceWarning, match="was not closed"):
        del store
    assert gone() is None
    backend.release()
    assert all(outcome.ok for outcome in put.result(20))
    until(lambda: not own_threads())
    assert len(backend.calls_of("close")) == 1
    with pytest.raises(ClosedError):
        pool.acquire(1)


def test_a_dropped_store_that_hangs_ends_what_it_owes() -> None:
    keys = chain(2)
    backend = faulty({"get": [Fault.hang()]})
    store = store_over(backend, close_timeout=0.05)
    running, queued = store.submit_get(wants(keys[:1], poisoned(1))), store.submit_get(wants(keys[1:], poisoned(1)))
    backend.wait_hung()
    with pytest.warns(ResourceWarning):
        del store
    for done in (running, queued):
        with pytest.raises(ClosedError):
            done.result(20)
    assert queued.settled(20)
    backend.release()
    until(lambda: not own_threads())


def test_a_store_in_a_cycle_is_collected_too() -> None:
    store = store_over(DictBackend())
    store.put_many({"x": b"1"})
    ring: list[Any] = [store]
    ring.append(ring)
    del store, ring
    with pytest.warns(ResourceWarning):
        gc.collect()
    until(lambda: not own_threads())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_store_closes_even_where_warnings_are_errors() -> None:
    backend = FaultyBackend(DictBackend())
    store = store_over(backend)
    store.put_many({"x": b"1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del store
    until(lambda: not own_threads() and backend.calls_of("close"))


def test_a_closed_store_is_dropped_in_silence() -> None:
    store = store_over(DictBackend())
    store.put_many({"x": b"1"})
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del store
        gc.collect()


# Beginning, forking, and the end of the program.


def test_what_was_opened_is_closed_if_the_rest_cannot_be() -> None:
    backends = [FaultyBackend(DictBackend(name="same")) for _ in range(2)]
    with pytest.raises(ConfigError):
        store_over(*backends)
    with pytest.raises((ConfigError, PoolExhausted)):
        Store(Config(remote_url=["memory://x"], buffer_pool_bytes=1 << 60), backends=backends[:1])
    assert [len(backend.calls_of("close")) for backend in backends] == [2, 1]


def test_a_forked_child_may_close_and_drop_whatever_lock_was_held() -> None:
    store = store_over(DictBackend())
    store.put_many({"x": b"1"})
    machinery = store._machinery
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with machinery._lock, machinery._timer._wake, machinery.targets[0].lanes._wake:
            held.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        try:
            store.close()
            del store
            gc.collect()
        except BaseException:
            os._exit(3)
        os._exit(0)
    end = time.monotonic() + 20
    code = None
    while code is None and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.001)
    if code is None:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    go_on.set()
    thread.join()
    assert code == 0
    assert store.get_many(["x"]) == [b"1"]
    store.close()


def _run(body: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import sys, threading, time, kvstore\n"
        "from kvstore.record import opaque_spec\n"
        "from kvstore.store import Item, Want\n"
        "from kvstore.keys import opaque_key\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + body, *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_end_of_the_program_drains_puts(tmp_path: Path) -> None:
    body = (
        "store = kvstore.open_store(sys.argv[1])\n"
        "spec = opaque_spec(1 << 16)\n"
        "items = [Item(opaque_key(str(n)), [memoryview(bytes([n]) * (1 << 16))], spec) for n in range(100)]\n"
        "store.submit_put(items)\n"
    )
    for tail in ("", "del store\n", "del store\nraise SystemExit(0)\n"):
        folder = tmp_path / f"kv{len(tail)}"
        folder.mkdir()
        done = _run(body + tail, f"file://{folder}")
        assert (done.returncode, done.stderr) == (0, "")
        with kvstore.open_store(f"file://{folder}", buffer_pool_bytes=1 << 20) as store:
            assert store.hit_prefix([str(number) for number in range(100)]) == 100


def test_a_hung_backend_does_not_keep_the_program_from_ending() -> None:
    body = (
        "from kvstore.config import Config\n"
        "from kvstore.store import Store\n"
        "from kvstore.testing import DictBackend, Fault, FaultyBackend\n"
        "backend = FaultyBackend(DictBackend(), otherwise=Fault.hang())\n"
        "store = Store(Config(remote_url='memory://x', close_timeout=0.2), backends=[backend])\n"
        "store.submit_get([Want(opaque_key('x'), memoryview(bytearray(5)), opaque_spec(5))])\n"
        "backend.wait_hung()\n"
    )
    start = time.monotonic()
    done = _run(body)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 30


def test_many_stores_open_and_close_leave_nothing() -> None:
    before = threading.active_count()
    seen: list[weakref.ref[Store]] = []
    for number in range(50):
        with store_over(DictBackend()) as store:
            store.put_many({str(number): b"x"})
            seen.append(weakref.ref(store))
        del store
    assert threading.active_count() == before
    assert all(ref() is None for ref in seen)


def test_a_call_after_close_is_refused_and_one_before_it_is_answered() -> None:
    store = store_over(DictBackend())
    store.put_many({"x": b"1"})
    store.close()
    calls: list[Callable[[], Any]] = [
        lambda: store.get_many(["x"]), lambda: store.put_many({"y": b""}), lambda: store.hit_prefix(["x"]),
        lambda: store.delete_many(["x"]), lambda: store.submit_heads([]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert store.stats()["put_stored"] == 1
