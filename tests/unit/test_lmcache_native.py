"""`KVStoreL2`, as LMCache's MP mode drives it: a descriptor to poll, batches in, answers out. LMCache itself is not
needed here; tests/engines runs its own tools."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Outcome, Read
from kvstore.config import load_config
from kvstore.errors import ClosedError, ConfigError
from kvstore.integrations.lmcache import KVStoreL2
from kvstore.integrations.lmcache._client import Client, Settler
from kvstore.keys import opaque_key
from kvstore.store import Store
from kvstore.testing import DictBackend


@pytest.fixture
def l2(tmp_path: Path) -> Iterator[KVStoreL2]:
    store = KVStoreL2(remote_url=f"file://{tmp_path}/kv")
    yield store
    store.close()


def answer_to(l2: KVStoreL2, call: int, seconds: float = 20) -> tuple[bool, str, list[bool] | None]:
    """Poll as LMCache's demux thread does."""
    end = time.monotonic() + seconds
    poller = select.poll()
    poller.register(l2.event_fd(), select.POLLIN)
    while time.monotonic() < end:
        if poller.poll(200):
            for number, ok, error, results in l2.drain_completions():
                if number == call:
                    return ok, error, results
    raise AssertionError("no answer")


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def test_what_was_stored_comes_back_into_the_callers_memory(l2: KVStoreL2) -> None:
    data = [os.urandom(n) for n in (1, 4096, (1 << 20) + 7)]
    names = [f"org/model@00000000@0@{n:064x}" for n in range(3)]
    assert answer_to(l2, l2.submit_batch_exists(names)) == (True, "", [False] * 3)
    assert answer_to(l2, l2.submit_batch_set(names, [view(each) for each in data])) == (True, "", None)
    assert answer_to(l2, l2.submit_batch_exists(names)) == (True, "", [True] * 3)
    into = [view(bytes(len(each))) for each in data]
    assert answer_to(l2, l2.submit_batch_get(names, into)) == (True, "", [True] * 3)
    assert [bytes(each) for each in into] == data


def test_a_hole_stays_a_hole(l2: KVStoreL2) -> None:
    answer_to(l2, l2.submit_batch_set(["a", "c"], [view(b"A" * 100), view(b"C" * 100)]))
    into = [view(bytes(100)) for _ in "abc"]
    ok, _, results = answer_to(l2, l2.submit_batch_get(["a", "b", "c"], into))
    assert (ok, results) == (True, [True, False, True])
    assert bytes(into[0]) == b"A" * 100
    assert bytes(into[2]) == b"C" * 100


@pytest.mark.parametrize("length", [99, 101, 1 << 21])
def test_an_object_of_another_size_is_no_hit(l2: KVStoreL2, length: int) -> None:
    answer_to(l2, l2.submit_batch_set(["k"], [view(b"K" * 100)]))
    ok, error, results = answer_to(l2, l2.submit_batch_get(["k"], [view(bytes(length))]))
    assert (ok, results) == (True, [False])
    assert "100 bytes" in error


def test_a_corrupt_object_is_a_miss_and_heals(l2: KVStoreL2, tmp_path: Path) -> None:
    data = os.urandom(50_000)
    answer_to(l2, l2.submit_batch_set(["k"], [view(data)]))
    (record,) = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size >= 50_000]
    damaged = bytearray(record.read_bytes())
    damaged[-100] ^= 1
    record.chmod(0o644)
    record.write_bytes(damaged)
    into = view(bytes(50_000))
    assert answer_to(l2, l2.submit_batch_get(["k"], [into]))[2] == [False]
    assert answer_to(l2, l2.submit_batch_set(["k"], [view(data)]))[0]
    assert answer_to(l2, l2.submit_batch_get(["k"], [into]))[2] == [True]
    assert bytes(into) == data


def test_a_second_store_of_a_key_is_well(l2: KVStoreL2) -> None:
    for _ in range(2):
        assert answer_to(l2, l2.submit_batch_set(["k"], [view(b"x" * 10)]))[0]


def test_deleted_is_gone(l2: KVStoreL2) -> None:
    answer_to(l2, l2.submit_batch_set(["k"], [view(b"x" * 10)]))
    assert answer_to(l2, l2.submit_batch_delete(["k", "never"])) == (True, "", [True, False])
    assert answer_to(l2, l2.submit_batch_exists(["k"]))[2] == [False]


def test_names_with_separators_do_not_meet(l2: KVStoreL2) -> None:
    names = ["org/model_x@1", "org_model/x@1", "org/model/x@1", "org@model/x@1", "org/model x@1", "ö" * 300]
    answer_to(l2, l2.submit_batch_set(names, [view(name.encode()) for name in names]))
    into = [view(bytes(len(name.encode()))) for name in names]
    assert answer_to(l2, l2.submit_batch_get(names, into))[2] == [True] * len(names)
    assert [bytes(each).decode() for each in into] == names


def test_what_cannot_be_asked_is_answered_with_the_reason(l2: KVStoreL2) -> None:
    ok, error, _ = answer_to(l2, l2.submit_batch_get(["k"], [memoryview(b"read-only")]))
    assert not ok
    assert "read-only" in error
    ok, error, _ = answer_to(l2, l2.submit_batch_set(["a", "b"], [view(b"one")]))
    assert not ok
    assert "2 keys" in error


def test_a_store_that_takes_nothing_is_said_to_have_failed() -> None:
    l2 = KVStoreL2(remote_url="memory://?bytes=1MiB&policy=none")
    try:
        ok, error, results = answer_to(l2, l2.submit_batch_set(["big"], [view(bytes(8 << 20))]))
        assert not ok
        assert results is None
        assert "1 of 1 failed" in error
    finally:
        l2.close()


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="chunk_sise"):
        KVStoreL2(remote_url="memory://", chunk_sise=3)


def test_lmcaches_own_settings_are_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "lmcache.yaml"
    config.write_text("remote_url: nothing-of-ours://x\nremote_serde: cachegen\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(config))
    monkeypatch.setenv("LMCACHE_REMOTE_SERDE", "cachegen")
    l2 = KVStoreL2(remote_url="memory://")
    assert l2._client.store.config.remote_serde == "raw"
    l2.close()


def test_close_ends_with_work_under_way_and_twice(tmp_path: Path) -> None:
    l2 = KVStoreL2(remote_url=f"file://{tmp_path}/kv")
    for number in range(20):
        l2.submit_batch_set([f"k{number}"], [view(bytes(1 << 20))])
    l2.close()
    l2.close()
    with pytest.raises(ClosedError):
        l2.submit_batch_exists(["k0"])
    again = KVStoreL2(remote_url=f"file://{tmp_path}/kv")  # what was under way was finished
    assert answer_to(again, again.submit_batch_exists([f"k{n}" for n in range(20)]))[2] == [True] * 20
    again.close()


class _Hangs(DictBackend):
    """Reads that write into their destination only when they are let go, whatever the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.begun = threading.Event()

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.begun.set()
        self.let_go.wait(30)
        return super().get_into(reads, deadline=deadline)


def test_memory_is_not_given_back_while_a_hung_backend_may_write_into_it() -> None:
    backend = _Hangs()
    config = load_config("memory://", env={}, blocking_timeout=0.05)
    store = Store(config, backends=[backend])
    client = Client(store, "mp")
    assert client.put(["k"], [b"x" * 100]).result()[0].stored
    into = view(bytes(100))
    settler, told = Settler(), threading.Event()
    completion = client.get(["k"], [into])
    settler.when_settled(completion, told.set)
    assert backend.begun.wait(10)
    assert completion.result()[0].status.name == "ERROR"  # at its deadline
    assert not told.is_set()
    backend.let_go.set()
    assert told.wait(10)
    store.close()


def test_surfaces_are_kept_apart() -> None:
    store = Store(load_config("memory://", env={}))
    mp, remote = Client(store, "mp"), Client(store, "remote")
    assert mp.keys(["k"]) != remote.keys(["k"])
    assert mp.keys(["k"]) == [opaque_key("lmcache/mp/k")]
    store.close()


def test_many_threads(l2: KVStoreL2) -> None:
    """LMCache calls from two controller threads, and drains in a third."""
    answers: dict[int, Any] = {}
    stop = threading.Event()

    def drain() -> None:
        poller = select.poll()
        poller.register(l2.event_fd(), select.POLLIN)
        while not stop.is_set():
            if poller.poll(50):
                for number, ok, _, results in l2.drain_completions():
                    assert number not in answers
                    answers[number] = (ok, results)

    calls: list[int] = []

    def work(call: Callable[[], int]) -> None:
        for _ in range(50):
            calls.append(call())

    drainer = threading.Thread(target=drain)
    workers = [
        threading.Thread(target=work, args=(lambda: l2.submit_batch_set(["a", "b"], [view(b"1"), view(b"2")]),)),
        threading.Thread(target=work, args=(lambda: l2.submit_batch_exists(["a", "b", "c"]),)),
        threading.Thread(target=work, args=(lambda: l2.submit_batch_get(["a"], [view(b"0")]),)),
    ]
    for thread in (drainer, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    end = time.monotonic() + 20
    while len(answers) < 150 and time.monotonic() < end:
        time.sleep(0.005)
    stop.set()
    drainer.join()
    assert sorted(answers) == sorted(calls)
    assert all(ok for ok, _ in answers.values())
