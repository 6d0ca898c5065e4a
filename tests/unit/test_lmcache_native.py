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
from kvstore.completion import Completion
from kvstore.config import load_config
from kvstore.errors import ClosedError, ConfigError
from kvstore.integrations._opaque import Client, Grumbler, Settler
from kvstore.integrations.lmcache import KVStoreL2
from kvstore.integrations.lmcache._client import logger, open_client
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
    client = Client(store, "lmcache/mp/", logger)
    assert client.put(["k"], [b"x" * 100]).result()[0].stored
    into = view(bytes(100))
    settler, told = Settler(logger), threading.Event()
    completion = client.get(["k"], [into])
    settler.when_settled(completion, told.set)
    assert backend.begun.wait(10)
    assert completion.result()[0].status.name == "ERROR"  # at its deadline
    assert not told.is_set()
    backend.let_go.set()
    assert told.wait(10)
    store.close()


def test_one_listener_that_fails_costs_nobody_his_answer(caplog: pytest.LogCaptureFixture) -> None:
    settler, told = Settler(logger), [threading.Event() for _ in range(3)]
    late: list[Completion[int]] = [Completion() for _ in range(3)]
    ends = [completion.expect_late_io() for completion in late]

    def fails() -> None:
        told[0].set()
        raise RuntimeError("a listener's own trouble")

    settler.when_settled(late[0], fails)
    settler.when_settled(late[1], told[1].set)
    for completion in late[:2]:
        completion.set_result(1)
    assert not told[0].is_set()
    ends[0].set()
    assert told[0].wait(10)
    ends[1].set()
    assert told[1].wait(10)
    settler.when_settled(late[2], told[2].set)  # the watcher begins again
    late[2].set_result(1)
    ends[2].set()
    assert told[2].wait(10)
    assert "could not be told" in caplog.text


# Views that are longer than what is stored, as LMCache's serde gives them.


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[KVStoreL2]:
    store = KVStoreL2(remote_url=f"file://{tmp_path}/kv", sizes="at_most")
    yield store
    store.close()


def test_a_record_lands_in_the_head_of_a_longer_view(roomy: KVStoreL2) -> None:
    sizes = [1, 5000, (1 << 20) + 1, 3 << 20]
    data = [os.urandom(size) for size in sizes]
    names = [f"k{size}" for size in sizes]
    assert answer_to(roomy, roomy.submit_batch_set(names, [view(each) for each in data]))[0]
    into = [view(b"\xaa" * (size + 4097)) for size in (*sizes, 0)]
    ok, error, results = answer_to(roomy, roomy.submit_batch_get([*names, "none"], into))
    assert (ok, error, results) == (True, "", [True] * 4 + [False])
    for each, there in zip(into, data, strict=False):
        assert each[: len(there)] == there
        assert each[len(there) :] == b"\xaa" * 4097
    assert into[-1] == b"\xaa" * 4097


def test_a_record_that_is_longer_than_its_view_is_no_hit(roomy: KVStoreL2) -> None:
    answer_to(roomy, roomy.submit_batch_set(["k", "l"], [view(b"K" * 100), view(b"L" * 50)]))
    into = [view(b"\xaa" * 99), view(bytes(50))]
    ok, error, results = answer_to(roomy, roomy.submit_batch_get(["k", "l"], into))
    assert (ok, results) == (True, [False, True])
    assert "holds 100 bytes, and there is room for 99" in error
    assert into[0] == b"\xaa" * 99
    assert into[1] == b"L" * 50


def test_damage_is_a_miss_there_too(roomy: KVStoreL2, tmp_path: Path) -> None:
    answer_to(roomy, roomy.submit_batch_set(["k"], [view(os.urandom(50_000))]))
    (record,) = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size >= 50_000]
    damaged = bytearray(record.read_bytes())
    damaged[-100] ^= 1
    record.chmod(0o644)
    record.write_bytes(damaged)
    assert answer_to(roomy, roomy.submit_batch_get(["k"], [view(bytes(60_000))]))[2] == [False]


def test_with_longer_views_too_memory_waits_for_a_hung_backend_and_time_is_shared() -> None:
    backend = _Hangs()
    backend.let_go.set()
    store = Store(load_config("memory://", env={}, blocking_timeout=0.3), backends=[backend])
    client = Client(store, "lmcache/mp/", logger)
    assert client.put(["k"], [b"x" * 100]).result()[0].stored
    got = client.get_at_most(["k"], [view(bytes(200))])
    assert [each.status.name for each in got.result(10)] == ["OK"]
    backend.let_go.clear()
    begin = time.monotonic()
    into = view(bytes(200))
    got = client.get_at_most(["k"], [into])  # the header is asked for, and does not come
    assert [each.status.name for each in got.result(10)] == ["MISS"]
    assert time.monotonic() - begin < 5
    backend.let_go.set()
    store.close()
    assert got.settled()
    assert into == bytes(200)


def test_a_closed_store_answers_a_load_of_longer_views(tmp_path: Path) -> None:
    client = open_client("mp", f"file://{tmp_path}/kv", None, {})
    client.close()
    with pytest.raises(ClosedError):
        client.get_at_most(["k"], [view(bytes(10))])


def test_another_word_for_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="'larger'"):
        KVStoreL2(remote_url="memory://", sizes="larger")


# Settings.


def test_secrets_are_refused_because_lmcache_would_log_them() -> None:
    secret = "hunter2secret"
    for options in (
        {"remote_url": "s3://bucket/p", "backend_options": {"s3": {"secret_access_key": secret}}},
        {"remote_url": f"s3://bucket/p?secret_access_key={secret}"},
        {"remote_url": f"valkey://user:{secret}@127.0.0.1:1/0"},
    ):
        with pytest.raises(ConfigError) as caught:
            KVStoreL2(**options)  # type: ignore[arg-type]
        assert secret not in str(caught.value)


def test_errors_are_not_raised_through_a_batch(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("remote_url: memory://\non_error: raise\n")
    with pytest.raises(ConfigError, match="on_error"):
        KVStoreL2(config_file=str(file))


def test_the_file_and_the_environment_win_over_our_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    l2 = KVStoreL2(remote_url="memory://")
    assert l2._client.store.config.write_queue_bytes == 1 << 40
    assert l2._client.store.config.buffer_pool_bytes == 64 << 20
    l2.close()
    file = tmp_path / "kv.yaml"
    file.write_text("remote_url: memory://\nbuffer_pool_bytes: 8MiB\n")
    monkeypatch.setenv("KVSTORE_WRITE_QUEUE_BYTES", "3MiB")
    l2 = KVStoreL2(config_file=str(file))
    assert l2._client.store.config.buffer_pool_bytes == 8 << 20
    assert l2._client.store.config.write_queue_bytes == 3 << 20
    l2.close()
    monkeypatch.setenv("KVSTORE_CONFIG_FILE", str(file))
    l2 = KVStoreL2(write_queue_bytes="5MiB")
    assert l2._client.store.config.buffer_pool_bytes == 8 << 20
    assert l2._client.store.config.write_queue_bytes == 5 << 20
    l2.close()


# Life.


def test_after_close_there_is_no_descriptor(tmp_path: Path) -> None:
    l2 = KVStoreL2(remote_url=f"file://{tmp_path}/kv")
    assert l2.event_fd() >= 0
    l2.close()
    with pytest.raises(ClosedError):
        l2.event_fd()
    assert l2.drain_completions() == []


def test_a_child_is_told_to_open_its_own(l2: KVStoreL2) -> None:
    answer_to(l2, l2.submit_batch_set(["k"], [view(b"x")]))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        told = b"nothing"
        try:
            l2.submit_batch_exists(["k"])
        except ClosedError as error:
            told = str(error).encode()
        finally:
            os.write(writer, told)
            l2.close()
            os.write(writer, b", and closed")
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert b"before fork()" in said
    assert said.endswith(b", and closed")
    assert answer_to(l2, l2.submit_batch_exists(["k"]))[2] == [True]


def test_two_at_once_answer_to_their_own(tmp_path: Path) -> None:
    one, two = (KVStoreL2(remote_url=f"file://{tmp_path}/kv", namespace=name) for name in ("one", "two"))
    answer_to(one, one.submit_batch_set(["k"], [view(b"1")]))
    calls = [one.submit_batch_exists(["k"]), two.submit_batch_exists(["k"])]
    assert answer_to(one, calls[0])[2] == [True]
    assert answer_to(two, calls[1])[2] == [False]
    one.close()
    assert answer_to(two, two.submit_batch_exists(["k"]))[0]
    two.close()


def test_many_answers_wake_a_poller_once(l2: KVStoreL2) -> None:
    calls = [l2.submit_batch_exists([f"k{n}"]) for n in range(200)]
    end = time.monotonic() + 20
    while len(l2._answers) < 200 and time.monotonic() < end:
        time.sleep(0.005)
    assert sorted(call for call, *_ in l2.drain_completions()) == calls
    poller = select.poll()
    poller.register(l2.event_fd(), select.POLLIN)
    assert not poller.poll(0)


def test_trouble_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    grumbler = Grumbler(logger)
    grumbler.warn("a load", "")
    for _ in range(50):
        grumbler.warn("a load", "2 of 3 failed")
    assert [record.getMessage() for record in caplog.records] == ["a load: 2 of 3 failed"]


def test_a_load_of_the_wrong_size_is_logged(l2: KVStoreL2, caplog: pytest.LogCaptureFixture) -> None:
    answer_to(l2, l2.submit_batch_set(["k"], [view(b"K" * 100)]))
    answer_to(l2, l2.submit_batch_get(["k"], [view(bytes(200))]))
    assert "a load of LMCache's is in trouble" in caplog.text


def test_surfaces_are_kept_apart() -> None:
    store = Store(load_config("memory://", env={}))
    mp, remote = Client(store, "lmcache/mp/", logger), Client(store, "lmcache/remote/", logger)
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
