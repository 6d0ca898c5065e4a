"""S3 Express One Zone: one session for all lanes, renewed in time and after an early end, and a bucket that sleeps."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvstore
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.sweep import Swept, sweep
from tests.servers.express_stub import BUCKET, ExpressStub
from tests.servers.s3_support import all_of, data, error_of, get, key, put, secrets, settings, soon, url

CLIENTS = ("native", "boto3", "aioboto3")


@contextmanager
def opened(stub: ExpressStub, **options: Any) -> Iterator[S3Backend]:
    fields = {"region": stub.region, "addressing": "auto", "miss_memory": 0.0, **options}
    backend = S3Backend(settings(stub.endpoint, BUCKET, **fields))
    try:
        yield backend
    finally:
        backend.close()


def fill(backend: S3Backend, count: int, nbytes: int = 1000) -> list[Outcome]:
    writes = [Write(key(number), [memoryview(data(nbytes, number))]) for number in range(count)]
    return backend.put(writes, deadline=soon())


def read_all(backend: S3Backend, count: int, nbytes: int = 1000) -> list[Outcome]:
    memory = [bytearray(nbytes) for _ in range(count)]
    reads = [Read(key(number), memoryview(dst)) for number, dst in enumerate(memory)]
    outcomes = backend.get_into(reads, deadline=soon())
    for number, outcome in enumerate(outcomes):
        assert outcome.status is not Status.OK or memory[number] == data(nbytes, number)
    return outcomes


@pytest.mark.parametrize("client", CLIENTS)
def test_one_session_serves_all_lanes(express_stub: ExpressStub, client: str) -> None:
    with opened(express_stub, client=client, lanes=32) as backend:
        assert all_of(fill(backend, 64), Status.OK)
        assert all_of(read_all(backend, 64), Status.OK)
        assert all_of(backend.stat([key(number) for number in range(64)], deadline=soon()), Status.OK)
        assert all_of(fill(backend, 4), Status.EXISTS)
        assert all_of(backend.delete([key(number) for number in range(64)], deadline=soon()), Status.OK)
        assert all_of(backend.stat([key(number) for number in range(64)], deadline=soon()), Status.MISS)
    assert express_stub.counts["create_session"] == 1
    assert express_stub.counts["expired"] == 0


def test_sessions_are_renewed_before_they_end(express_stub: ExpressStub) -> None:
    """With sessions of 20 s every request falls into the time in which one is renewed early, at most once a second."""
    express_stub.ttl_s = 20.0
    with opened(express_stub) as backend:
        assert all_of(fill(backend, 4), Status.OK)
        begin = time.monotonic()
        while express_stub.counts["create_session"] < 3 and time.monotonic() - begin < 30:
            assert all_of(read_all(backend, 4), Status.OK)
        took = time.monotonic() - begin
    assert express_stub.counts["expired"] == 0
    assert 3 <= express_stub.counts["create_session"] <= 4 + took


def test_a_session_that_ended_early_is_renewed_once_for_all_lanes(express_stub: ExpressStub) -> None:
    with opened(express_stub, lanes=32) as backend:
        assert all_of(fill(backend, 32), Status.OK)
        express_stub.expire_sessions()
        assert all_of(read_all(backend, 32), Status.OK)
        assert express_stub.counts["expired"] >= 1
        assert express_stub.counts["create_session"] == 2
        express_stub.expire_sessions()
    with opened(express_stub, lanes=8) as backend:
        assert all_of(read_all(backend, 32), Status.OK)


def test_threads_that_meet_the_expiry_together_renew_once(express_stub: ExpressStub) -> None:
    with opened(express_stub, lanes=64, meta_lanes=64) as backend:
        fill(backend, 8)
        express_stub.expire_sessions()
        barrier, seen = threading.Barrier(64), list[Outcome]()

        def work(number: int) -> None:
            barrier.wait(20)
            outcome, body = get(backend, number % 8, 1000)
            assert outcome.status is not Status.OK or body == data(1000, number % 8)
            seen.append(outcome)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(seen) == 64
        assert all_of(seen, Status.OK)
        assert express_stub.counts["create_session"] == 2


def test_a_bucket_that_wakes_up_is_transient_and_the_store_gets_through(express_stub: ExpressStub) -> None:
    with opened(express_stub) as backend:
        express_stub.sleep(1)
        error_of(get(backend, "k", 1)[0], TransientError, "503")
        assert get(backend, "k", 1)[0].status is Status.MISS
    express_stub.sleep(2)
    where = url(express_stub.endpoint, BUCKET, "kv", region=express_stub.region).replace("&addressing=path", "")
    with kvstore.open_store(where, backend_options=secrets()) as store:
        (outcome,) = store.put_many({"k": b"value"})
        assert outcome.status is Status.OK
        assert store.get_many(["k"]) == [bytearray(b"value")]


def test_wrong_credentials_fail_at_the_session_and_are_named(express_stub: ExpressStub) -> None:
    with opened(express_stub, secret_access_key="wrong") as backend:
        error_of(get(backend, "k", 1)[0], PermanentError, "secret key")
        error_of(put(backend, "k", b"x"), PermanentError, "secret key")
        error_of(backend.stat([key("k")], deadline=soon())[0], PermanentError, "access denied")
    assert express_stub.counts["create_session"] == 0


def test_one_writer_wins_and_its_record_can_be_listed_and_set_aside(express_stub: ExpressStub) -> None:
    with opened(express_stub, prefix="kv/") as backend:
        outcomes: list[Outcome] = []
        barrier = threading.Barrier(16)

        def write(number: int) -> None:
            barrier.wait(20)
            outcomes.append(put(backend, "race", bytes([number]) * 1000))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(outcome.status.value for outcome in outcomes) == ["exists"] * 15 + ["ok"]
        assert [info.key for page in backend.list(deadline=soon()) for info in page] == [key("race")]
        get(backend, "race", 1000)
        assert backend.quarantine([key("race")], deadline=soon())[0].status is Status.OK
        assert put(backend, "race", b"healed").status is Status.OK
        assert any("quarantine/" in name for _, name in express_stub.objects)


def test_large_records_in_parts_and_ranges(express_stub: ExpressStub) -> None:
    body, rng = data(11 << 20), random.Random(3)
    sizes = {"multipart_size": 5 << 20, "write_part_size": 5 << 20, "part_size": 1 << 20, "part_adapt": False}
    with opened(express_stub, **sizes) as backend:
        assert put(backend, "large", body) == Outcome(Status.OK, len(body))
        assert not express_stub.uploads
        assert get(backend, "large", len(body)) == (Outcome(Status.OK, len(body)), body)
        for _ in range(5):
            offset = rng.randrange(len(body))
            outcome, brought = get(backend, "large", 3_000_000, offset)
            assert brought == body[offset : offset + 3_000_000]
            assert outcome.nbytes == len(brought)
        assert put(backend, "large", body).status is Status.EXISTS
        assert not express_stub.uploads


def test_more_than_a_page_and_more_than_a_batch(express_stub: ExpressStub) -> None:
    with opened(express_stub, prefix="kv/") as backend:
        assert all_of(fill(backend, 1005, 10), Status.OK)
        assert sum(len(page) for page in backend.list(deadline=soon())) == 1005
        assert all_of(backend.delete([key(number) for number in range(1005)], deadline=soon()), Status.OK)
        assert list(backend.list(deadline=soon())) == []


def test_a_record_stored_anew_in_the_middle_of_a_sweep_stays(
    express_stub: ExpressStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ETags are random here, so the old record is told from the new."""
    monkeypatch.setattr("kvstore_backends.s3.sweep.answered_at", lambda answer: time.time() + 1e9)
    with opened(express_stub, prefix="kv/", ttl=3600.0) as backend:
        for number in range(3):
            express_stub.seed(BUCKET, backend.object_name(key(number)), b"old")
        invoke = backend.client.invoke

        def overtaken(operation: str, params: Any, *, deadline: float) -> dict[str, Any]:
            if operation == "DeleteObjects":
                express_stub.seed(BUCKET, backend.object_name(key(1)), b"new")
            return invoke(operation, params, deadline=deadline)

        backend.client.invoke = overtaken  # type: ignore[method-assign]
        assert sweep(backend) == Swept(2, 0, 0, 6, 0)
        assert [found.body for found in express_stub.objects.values()] == [b"new"]


def test_the_name_must_hold_a_zone_id() -> None:
    with pytest.raises(ConfigError, match="usw2-az1"):
        S3Backend(settings("http://127.0.0.1:1", "kv--us-west-2a--x-s3"))
