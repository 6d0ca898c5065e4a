"""The s3 backend against a real server: credentials, races, ranges, listing, deleting, healing, and the whole store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvstore
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import PermanentError
from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore_backends.s3 import S3Backend
from tests.servers.s3_support import all_of, data, error_of, get, key, opened, put, secrets, soon, url
from tests.servers.seaweedfs import SeaweedFS

CLIENTS = ("native", "boto3", "aioboto3")


def names_in(server: SeaweedFS, bucket: str, prefix: str = "") -> list[str]:
    client = server.client()
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    finally:
        client.close()


def together(works: list[Callable[[], None]]) -> None:
    """Run all in threads that start together; raise the first error."""
    barrier, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_round_trip_through_each_client(seaweedfs: SeaweedFS, s3_bucket: str, client: str) -> None:
    with opened(seaweedfs.endpoint, s3_bucket, client=client, prefix="deep/down/") as backend:
        for nbytes in (0, 1, 4096, 3_000_001):
            body = data(nbytes)
            assert put(backend, nbytes, body) == Outcome(Status.OK, nbytes)
            assert put(backend, nbytes, b"another") == Outcome(Status.EXISTS)
            assert get(backend, nbytes, nbytes + 10) == (Outcome(Status.OK, nbytes), body)
        assert get(backend, "none", 4)[0].status is Status.MISS
        keys = [key(name) for name in (0, "none", 4096)]
        sizes = backend.stat(keys, deadline=soon())
        assert sizes == [Outcome(Status.OK, 0), Outcome(Status.MISS), Outcome(Status.OK, 4096)]
        assert [outcome.status for outcome in backend.delete(keys, deadline=soon())] == [
            Status.OK,
            Status.MISS,
            Status.OK,
        ]
        assert all_of(backend.stat(keys, deadline=soon()), Status.MISS)
    assert all(name.startswith("deep/down/") for name in names_in(seaweedfs, s3_bucket))


# Credentials.


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"secret_access_key": "not the secret"}, "secret key"), ({"access_key_id": "nobody"}, "access key")],
)
def test_wrong_credentials_name_what_to_check(
    seaweedfs: SeaweedFS, s3_bucket: str, client: str, wrong: dict[str, Any], said: str
) -> None:
    with opened(seaweedfs.endpoint, s3_bucket, client=client, **wrong) as backend:
        error_of(put(backend, "k", b"x"), PermanentError, "access denied", said)
        error_of(get(backend, "k", 1)[0], PermanentError, "access denied", said)
        for outcome in (
            backend.stat([key("k")], deadline=soon())[0],
            backend.delete([key("k")], deadline=soon())[0],
            backend.quarantine([key("k")], deadline=soon())[0],
        ):  # HEAD has no body, so a GET asks why
            error_of(outcome, PermanentError, "access denied", said)
        with pytest.raises(PermanentError, match="access denied"):
            list(backend.list(deadline=soon()))
    assert names_in(seaweedfs, s3_bucket) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_bucket_that_is_not_there_is_named(
    seaweedfs: SeaweedFS, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a lookup, whose HEAD looks the same with and without a bucket; and once in the log, for those who see
    misses only."""
    said = "there is no bucket no-such-bucket"
    for _ in range(2):
        with opened(seaweedfs.endpoint, "no-such-bucket", client=client) as backend:
            error_of(backend.stat([key("k")], deadline=soon())[0], PermanentError, said)
            error_of(get(backend, "k", 1)[0], PermanentError, said)
            error_of(backend.stat([key("k")], deadline=soon())[0], PermanentError, said)
    assert [said in record.getMessage() for record in caplog.records] == [True, True]


# Races.


@pytest.mark.parametrize("backends", [1, 4])
def test_sixteen_writers_of_one_key_leave_one_whole_record(seaweedfs: SeaweedFS, s3_bucket: str, backends: int) -> None:
    several = [opened(seaweedfs.endpoint, s3_bucket) for _ in range(backends)]
    handles = [each.__enter__() for each in several]
    outcomes: list[Outcome] = []

    def write(number: int) -> Callable[[], None]:
        return lambda: outcomes.append(put(handles[number % backends], "race", bytes([number]) * 50_000))

    try:
        together([write(number) for number in range(16)])
        assert sorted(outcome.status.value for outcome in outcomes) == ["exists"] * 15 + ["ok"]
        outcome, body = get(handles[0], "race", 50_000)
        assert outcome == Outcome(Status.OK, 50_000)
        assert len(set(body)) == 1, "one writer's bytes"
    finally:
        for each in several:
            each.__exit__(None, None, None)


def test_two_writers_in_parts_leave_one_record_and_no_parts(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    body, outcomes = data(6 << 20), list[Outcome]()
    with opened(
        seaweedfs.endpoint,
        s3_bucket,
        multipart_size=5 << 20,
        write_part_size=5 << 20,
        head_first="never",
        read_timeout=20,
    ) as backend:
        together([lambda: outcomes.append(put(backend, "parts", body))] * 2)
        # SeaweedFS looks first and completes then, so both may win (S3 lets one), with the same bytes. Who comes
        # later loses for certain.
        assert {outcome.status.value for outcome in outcomes} <= {"exists", "ok"}
        assert put(backend, "parts", body).status is Status.EXISTS
        assert get(backend, "parts", len(body)) == (Outcome(Status.OK, len(body)), body)
        client = seaweedfs.client()
        for _ in range(100):  # the loser's upload is aborted in the background
            if not client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads"):
                break
            time.sleep(0.02)
        assert not client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads")
        client.close()


# Ranges, listing, deleting.


def test_any_ranges_of_a_record_in_any_batch(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    body, rng = data(1_500_000), random.Random(7)
    with opened(seaweedfs.endpoint, s3_bucket, part_size=64 << 10, part_adapt=False, gap=5000) as backend:
        put(backend, "r", body)
        for _ in range(8):
            wanted = [(rng.randrange(1_600_000), rng.choice([0, 1, 100, 70_000, 500_000])) for _ in range(6)]
            memory = [bytearray(nbytes) for _, nbytes in wanted]
            reads = [Read(key("r"), memoryview(m), offset) for (offset, _), m in zip(wanted, memory, strict=True)]
            outcomes = backend.get_into(reads, deadline=soon())
            for (offset, nbytes), outcome, brought in zip(wanted, outcomes, memory, strict=True):
                right = body[offset : offset + nbytes]
                assert outcome == Outcome(Status.OK, len(right))
                assert brought[: len(right)] == right


def test_pages_of_a_listing_and_deletes_by_the_thousand(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    client = seaweedfs.client()
    client.put_object(Bucket=s3_bucket, Key="kv/foreign.txt", Body=b"somebody else's")
    client.put_object(Bucket=s3_bucket, Key="kvx/outside", Body=b"outside")
    client.close()
    keys = [key(f"page {number}") for number in range(1010)]
    with opened(seaweedfs.endpoint, s3_bucket, prefix="kv/") as backend:
        writes = [Write(each, [memoryview(b"record")]) for each in keys]
        assert all_of(backend.put(writes, deadline=soon(60)), Status.OK)
        pages = [list(page) for page in backend.list(deadline=soon())]
        assert len(pages) > 1
        assert sorted(info.key for page in pages for info in page) == sorted(keys)
        assert {info.nbytes for page in pages for info in page} == {6}
        assert all(abs(info.last_used - time.time()) < 120 for page in pages for info in page)
        outcomes = backend.delete([*keys, key("never")], deadline=soon(60))
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 1010 + [Status.MISS]
        assert list(backend.list(deadline=soon())) == []
    assert names_in(seaweedfs, s3_bucket) == ["kv/foreign.txt", "kvx/outside"]


# Corrupt records.


def corrupt(server: SeaweedFS, bucket: str, backend: S3Backend, name: object, body: bytes) -> None:
    client = server.client()
    client.put_object(Bucket=bucket, Key=backend.object_name(key(name)), Body=body)
    client.close()


def test_quarantine_frees_the_name_and_keeps_the_bytes(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    with opened(seaweedfs.endpoint, s3_bucket, prefix="q/") as backend:
        put(backend, "bad", b"corrupt")
        get(backend, "bad", 7)
        assert backend.quarantine([key("bad"), key("none")], deadline=soon()) == [
            Outcome(Status.OK), Outcome(Status.MISS),
        ]  # fmt: skip
        assert get(backend, "bad", 7)[0].status is Status.MISS
        assert list(backend.list(deadline=soon())) == []
        assert put(backend, "bad", b"healthy") == Outcome(Status.OK, 7)
        aside = names_in(seaweedfs, s3_bucket, "q/quarantine/")
        assert len(aside) == 1
        assert key("bad").hex() in aside[0]


def test_quarantine_spares_a_record_that_was_replaced(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    with opened(seaweedfs.endpoint, s3_bucket) as backend:
        put(backend, "k", b"corrupt")
        get(backend, "k", 7)
        corrupt(seaweedfs, s3_bucket, backend, "k", b"healthy")
        assert backend.quarantine([key("k")], deadline=soon())[0].status is Status.MISS
        assert get(backend, "k", 7) == (Outcome(Status.OK, 7), b"healthy")


# Checksums of the service, and expiry.


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme"])
def test_the_service_verifies_a_checksum_if_asked_to(seaweedfs: SeaweedFS, s3_bucket: str, algorithm: str) -> None:
    if algorithm != "crc32":
        pytest.importorskip("awscrt", reason="crc32c and crc64nvme need awscrt")
    body = data(6 << 20)
    with opened(
        seaweedfs.endpoint,
        s3_bucket,
        checksum=algorithm,
        multipart_size=5 << 20,
        write_part_size=5 << 20,
        read_timeout=20,
    ) as backend:
        small = [Write(key("small"), [memoryview(body)[:1000], memoryview(body)[1000:5000]])]
        assert backend.put(small, deadline=soon()) == [Outcome(Status.OK, 5000)]
        client = seaweedfs.client()
        head = client.head_object(Bucket=s3_bucket, Key=backend.object_name(key("small")), ChecksumMode="ENABLED")
        client.close()
        assert head.get(f"Checksum{algorithm.upper()}"), "stored with it"
        assert put(backend, "parts", body) == Outcome(Status.OK, len(body))
        assert get(backend, "parts", len(body)) == (Outcome(Status.OK, len(body)), body)


def test_records_expire_and_can_be_stored_again(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    with opened(seaweedfs.endpoint, s3_bucket, ttl=2.0, miss_memory=0.0) as backend:
        assert put(backend, "k", b"first") == Outcome(Status.OK, 5)
        assert get(backend, "k", 5)[0] == Outcome(Status.OK, 5)
        end = time.monotonic() + 10
        while backend.stat([key("k")], deadline=soon())[0].status is Status.OK and time.monotonic() < end:
            time.sleep(0.1)
        assert get(backend, "k", 5)[0].status is Status.MISS
        assert put(backend, "k", b"second").stored
        assert get(backend, "k", 6)[0].status is Status.OK


# The whole store.

DEMO = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)  # SmolLM2-135M
TOKENS = 256
SPEC = kv_spec(DEMO, "bfloat16", TOKENS)


def demo_chunk(number: int) -> bytearray:
    """The size of a chunk of the demo, with bytes of which every second one repeats, as bf16 KV does."""
    body = bytearray(data(SPEC.raw_bytes, number))
    body[1::2] = bytes([number + 60]) * len(body[1::2])
    return body


@pytest.mark.parametrize("codec", ["raw", "lz4", "shuffle-zstd"])
def test_chunks_of_the_demo_through_the_whole_store(seaweedfs: SeaweedFS, s3_bucket: str, codec: str) -> None:
    keys = [key(f"{codec} {number}") for number in range(3)]
    bodies = [demo_chunk(number) for number in range(3)]
    where = url(seaweedfs.endpoint, s3_bucket, "store")
    with kvstore.open_store(where, remote_serde=codec, backend_options=secrets(read_timeout="30s")) as store:
        items = [kvstore.Item(k, SPEC.split(memoryview(body)), SPEC) for k, body in zip(keys, bodies, strict=True)]
        assert all_of(store.submit_put(items, deadline=soon(60)).result(), Status.OK)
    with kvstore.open_store(where, remote_serde=codec, backend_options=secrets()) as store:
        assert store.submit_lookup([*keys, key("none")], deadline=soon()).result() == 3
        whole = [bytearray(SPEC.raw_bytes) for _ in keys]
        wants = [kvstore.Want(k, memoryview(dst), SPEC) for k, dst in zip(keys, whole, strict=True)]
        assert all_of(store.submit_get(wants, deadline=soon()).result(), Status.OK)
        assert whole == bodies
        part = bytearray(SPEC.raw_bytes // 30 * 4)
        layers = kvstore.Want(keys[1], memoryview(part), SPEC, first=7, num_segments=4)
        assert all_of(store.submit_get([layers], deadline=soon()).result(), Status.OK)
        assert part == bodies[1][SPEC.raw_bytes // 30 * 7 :][: len(part)]


def test_a_corrupt_object_is_a_miss_is_set_aside_and_heals(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    where = url(seaweedfs.endpoint, s3_bucket)
    with kvstore.open_store(where, backend_options=secrets(miss_memory="0s")) as store:
        assert all_of(store.put_many({"a": data(200_000), "b": b"fine"}), Status.OK)
        client = seaweedfs.client()
        (name,) = [
            entry["Key"] for entry in client.list_objects_v2(Bucket=s3_bucket)["Contents"] if entry["Size"] > 100_000
        ]
        body = bytearray(client.get_object(Bucket=s3_bucket, Key=name)["Body"].read())
        body[150_000] ^= 1
        client.put_object(Bucket=s3_bucket, Key=name, Body=bytes(body))
        client.close()
        assert store.get_many(["a", "b"], into=[bytearray(200_000), bytearray(4)]) == [None, 4]
        assert names_in(seaweedfs, s3_bucket, "quarantine/")
        assert all_of(store.put_many({"a": data(200_000)}), Status.OK)
        again = bytearray(200_000)
        assert store.get_many(["a"], into=[again]) == [200_000]
        assert again == data(200_000)
