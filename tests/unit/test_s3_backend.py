"""Writes, metadata, expiry and the sweep, on a moto server and on scripted ones."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvstore
from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.registry import open_backend
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.expiry import lifecycle_configuration
from kvstore_backends.s3.sweep import Swept, main, sweep
from tests.s3_support import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    Asked,
    Raw,
    ScriptedServer,
    answer,
    error_answer,
    moto_server,
    open_s3,
    plain_client,
    put_object,
    read_object,
    unique_prefix,
)  # fmt: skip

MIB = 1 << 20
OLD = "Wed, 01 Jan 2025 00:00:00 GMT"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def plain(moto: str) -> Iterator[Any]:
    with plain_client(moto) as client:
        yield client


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: S3Backend, name: object, data: bytes) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon())[0]


def read(backend: S3Backend, name: object, size: int) -> tuple[Status, bytes]:
    memory = bytearray(size)
    (outcome,) = backend.get_into([Read(key(name), memoryview(memory))], deadline=soon())
    return outcome.status, bytes(memory[: outcome.nbytes])


def failure(outcome: Outcome) -> KVStoreError:
    assert outcome.error is not None, outcome
    return outcome.error


def names(plain: Any, prefix: str) -> list[str]:
    found = plain.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [entry["Key"] for entry in found.get("Contents", ())]


# By URL, through the store.


def test_a_store_by_url(moto: str) -> None:
    url = f"s3://{BUCKET}/{unique_prefix()}?endpoint_url={moto}&region=us-east-1&addressing=path&connect_timeout=5s"
    secrets = {"s3": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}}
    with kvstore.open_store(url, backend_options=secrets) as store:
        big = bytes(range(256)) * 40_000
        assert all(outcome.ok for outcome in store.put_many({"a": b"one", "b": big}))
        assert store.get_many(["a", "x", "b"]) == [b"one", None, big]
        assert store.hit_prefix(["a", "b", "x"]) == 2
        assert SECRET_KEY not in repr(store) + repr(store.config)


def test_what_the_backend_says_of_itself(moto: str) -> None:
    backend = open_s3(moto, "p/", ttl=60.0, lanes=3)
    assert repr(backend) == f"S3Backend('s3://{BUCKET}/p', client='native')"
    assert backend.name == f"s3://{BUCKET}/p"
    assert Capability.TTL in backend.capabilities
    assert (backend.limits.lanes, backend.limits.preferred_io_bytes, backend.part_size) == (3, 8 * MIB, 8 * MIB)
    backend.close()


# Writes.


@pytest.mark.parametrize("client", ["native", "boto3", "aioboto3"])
@pytest.mark.parametrize("checksum", ["none", "crc32"])
def test_a_large_record_goes_in_parts(moto: str, plain: Any, client: str, checksum: str) -> None:
    backend = open_s3(moto, client=client, multipart_size=5 * MIB, write_part_size=5 * MIB, checksum=checksum)
    data = hashlib.shake_256(client.encode()).digest(11 * MIB)
    views = [memoryview(data)[at : at + MIB] for at in range(0, len(data), MIB)]
    assert backend.put([Write(key("big"), views)], deadline=soon()) == [(Status.OK, len(data), None)]
    assert read(backend, "big", len(data) + 1) == (Status.OK, data)
    head = plain.head_object(Bucket=BUCKET, Key=backend.object_name(key("big")))
    assert head["ETag"].strip('"').endswith("-3")
    assert put(backend, "big", data).status is Status.EXISTS
    assert not plain.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    backend.close()


def test_a_failed_upload_is_aborted(moto: str) -> None:
    """A part fails: the upload is aborted, its answer says why, and nothing is visible."""
    aborted = threading.Event()

    def script(asked: Asked) -> Raw:
        if asked.method == "DELETE":
            aborted.set()
            return answer(204)
        if asked.method == "POST":
            return answer(
                200, b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
            )
        if asked.method == "HEAD":
            return answer(404)
        return error_answer(500, "InternalError") if "partNumber=2" in asked.target else answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, multipart_size=5 * MIB, write_part_size=5 * MIB, conditional_writes="on")
        assert isinstance(failure(put(backend, "big", bytes(11 * MIB))), TransientError)
        assert aborted.wait(30)
        assert not [asked for asked in server.asked if asked.method == "POST" and "uploadId" in asked.target]
        backend.close()


@pytest.mark.parametrize(
    ("complete", "status"),
    [
        (error_answer(412, "PreconditionFailed"), Status.EXISTS),
        (answer(200, b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"), Status.ERROR),
        (error_answer(409, "ConditionalRequestConflict"), Status.ERROR),
    ],
)
def test_how_an_upload_ends(complete: Raw, status: Status) -> None:
    """Also a 200 whose body is an error."""

    def script(asked: Asked) -> Raw:
        if asked.method == "POST":
            if "uploadId" in asked.target:
                assert asked.headers["if-none-match"] == "*"
                return complete
            return answer(
                200, b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
            )
        return answer(404) if asked.method == "HEAD" else answer(204 if asked.method == "DELETE" else 200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, multipart_size=5 * MIB, conditional_writes="on")
        outcome = put(backend, "big", bytes(6 * MIB))
        assert outcome.status is status
        if status is Status.ERROR:
            assert isinstance(failure(outcome), TransientError)
        backend.close()


@pytest.mark.parametrize(("then", "status"), [(200, Status.OK), (412, Status.EXISTS), (409, Status.EXISTS)])
def test_another_conditional_put_is_under_way(then: int, status: Status) -> None:
    """409 ConditionalRequestConflict: one more try, if nobody's record is there by then."""
    puts: list[int] = []

    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(404)
        puts.append(1)
        if len(puts) == 1:
            return error_answer(409, "ConditionalRequestConflict")
        return answer(200, etag='"e"') if then == 200 else error_answer(then, "ConditionalRequestConflict")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, conditional_writes="on")
        assert put(backend, "k", b"data").status is status
        assert len(puts) == 2
        backend.close()


def test_a_large_record_that_is_there_is_not_sent() -> None:
    with ScriptedServer(lambda asked: answer(200, etag='"e"')) as server:
        backend = open_s3(server.endpoint, conditional_writes="on")
        assert put(backend, "k", bytes(2 * MIB)).status is Status.EXISTS
        assert [asked.method for asked in server.asked] == ["HEAD"]
        backend.close()


@pytest.mark.parametrize(("honest", "requests"), [(True, 3), (False, 3)])
def test_whether_conditions_count_is_tried_once(honest: bool, requests: int, caplog: pytest.LogCaptureFixture) -> None:
    stored: set[str] = set()

    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(200 if asked.path in stored else 404, etag='"e"')
        if asked.method == "DELETE":
            return answer(204)
        if honest and asked.path in stored:
            return error_answer(412, "PreconditionFailed")
        stored.add(asked.path)
        return answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        assert put(backend, "k", b"data").ok
        probes = [asked for asked in server.asked if "/probe/" in asked.path]
        assert [asked.method for asked in probes] == ["PUT", "PUT", "DELETE"]
        assert len(probes) == requests
        assert put(backend, "k", b"other").status is Status.EXISTS
        assert len([asked for asked in server.asked if "/probe/" in asked.path]) == requests
        heads = [asked for asked in server.asked if asked.method == "HEAD"]
        assert len(heads) == (0 if honest else 2)
        assert ("ignores If-None-Match" in caplog.text) != honest
        backend.close()


def test_a_probe_that_fails_is_no_verdict() -> None:
    code = [500]
    with ScriptedServer(lambda asked: error_answer(code[0], "x") if asked.method == "PUT" else answer(404)) as server:
        backend = open_s3(server.endpoint)
        assert isinstance(failure(put(backend, "k", b"1")), TransientError)
        code[0] = 501
        put(backend, "k", b"1")
        assert backend._writer._conditional is False
        backend.close()


def test_a_record_beyond_the_limit_is_refused(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_backends.s3.writes.MAX_OBJECT_BYTES", 10)
    backend = open_s3(moto)
    assert isinstance(failure(put(backend, "k", bytes(11))), PermanentError)
    assert put(backend, "k", bytes(10)).ok
    backend.close()


def test_the_second_of_equal_keys_may_succeed_where_the_first_failed() -> None:
    puts: list[bytes] = []

    def script(asked: Asked) -> Raw:
        puts.append(asked.body)
        return error_answer(500, "InternalError") if len(puts) == 1 else answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, conditional_writes="on")
        batch = [Write(key("k"), [memoryview(data)]) for data in (b"1", b"2", b"3")]
        outcomes = backend.put(batch, deadline=soon())
        assert [outcome.status for outcome in outcomes] == [Status.ERROR, Status.OK, Status.EXISTS]
        assert puts == [b"1", b"2"]
        backend.close()


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme"])
def test_a_checksum_goes_along(algorithm: str) -> None:
    if algorithm != "crc32":
        pytest.importorskip("awscrt")
    with ScriptedServer(lambda asked: answer(200, etag='"e"')) as server:
        backend = open_s3(server.endpoint, conditional_writes="on", checksum=algorithm)
        for number in range(3):
            assert put(backend, number, b"123456789").ok
        values = {asked.headers[f"x-amz-checksum-{algorithm}"] for asked in server.asked}
        assert values == {{"crc32": "y/Q5Jg==", "crc32c": "4waSgw==", "crc64nvme": "rosUhgp5mIg="}[algorithm]}
        backend.close()


# Metadata.


def test_a_lookup_is_one_request_for_each_key_that_is_not_known_to_be_missing() -> None:
    there = {f"/{BUCKET}/p/{key(n).hex()[:2]}/{key(n).hex()}" for n in range(0, 100, 2)}

    def script(asked: Asked) -> Raw:
        return answer(200 if asked.path in there else 404, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, "p/", miss_memory=60.0, hedge_reads=False)
        assert backend.stat([key(0)], deadline=soon())[
            0
        ].ok  # or a miss would be asked about, whether there is a bucket
        server.asked.clear()
        keys = [key(number) for number in range(100)]
        for asked in (100, 150):
            outcomes = backend.stat(keys + keys[:3], deadline=soon())
            assert [o.status is Status.OK for o in outcomes] == [n % 2 == 0 for n in [*range(100), 0, 1, 2]]
            assert len(server.asked) == asked
        backend.put([Write(keys[1], [memoryview(b"1")])], deadline=soon())
        before = len(server.asked)
        backend.stat(keys[:4], deadline=soon())
        assert len(server.asked) == before + 3, "a put makes it forget"
        backend.close()


def test_an_error_is_no_miss() -> None:
    status = [500]
    with ScriptedServer(lambda asked: answer(status[0], etag='"e"')) as server:
        backend = open_s3(server.endpoint, miss_memory=60.0)
        assert isinstance(failure(backend.stat([key("k")], deadline=soon())[0]), TransientError)
        status[0] = 200
        assert backend.stat([key("k")], deadline=soon())[0].ok
        backend.close()


def test_deletes_go_in_batches_with_an_error_for_each_key() -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(404 if key(3).hex() in asked.path else 200, etag='"e"')
        if asked.method == "GET":  # whether there is a bucket, if the one that is missing is asked for first
            return error_answer(404, "NoSuchKey")
        assert asked.target.endswith("?delete")
        assert asked.headers["content-md5"]
        body = asked.body.decode()
        assert body.count("<Key>") == 4
        name = f"p/{key(1).hex()[:2]}/{key(1).hex()}"
        bad = f"<Error><Key>{name}</Key><Code>AccessDenied</Code></Error>"
        return answer(200, f"<DeleteResult>{bad}</DeleteResult>".encode())

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, "p/")
        outcomes = backend.delete([key(number) for number in (0, 1, 2, 3, 4, 0)], deadline=soon())
        assert [outcome.status for outcome in outcomes] == [
            Status.OK, Status.ERROR, Status.OK, Status.MISS, Status.OK, Status.MISS,
        ]  # fmt: skip
        assert "access denied" in str(failure(outcomes[1]))
        backend.close()


def test_more_deletes_than_a_batch_holds(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_backends.s3.meta._DELETE_AT_ONCE", 3)
    backend = open_s3(moto)
    keys = [key(number) for number in range(10)]
    backend.put([Write(name, [memoryview(b"1")]) for name in keys], deadline=soon())
    assert all(outcome.ok for outcome in backend.delete(keys, deadline=soon()))
    assert list(backend.list(deadline=soon())) == []
    backend.close()


def test_listing_follows_tokens_and_skips_what_is_not_ours(moto: str, plain: Any) -> None:
    prefix = unique_prefix()
    backend = open_s3(moto, prefix)
    keys = [key(number) for number in range(7)]
    backend.put([Write(name, [memoryview(b"12")]) for name in keys], deadline=soon())
    plain.put_object(Bucket=BUCKET, Key=f"{prefix}notes.txt", Body=b"x")
    plain.put_object(Bucket=BUCKET, Key=f"{prefix}00/short", Body=b"x")
    invoke = backend.client.invoke
    asked: list[dict[str, Any]] = []

    def small_pages(operation: str, params: Any, *, deadline: float) -> dict[str, Any]:
        asked.append(dict(params))
        return invoke(operation, {**params, "MaxKeys": 2}, deadline=deadline)

    backend.client.invoke = small_pages  # type: ignore[method-assign]
    found = [info for page in backend.list(deadline=soon()) for info in page]
    assert sorted(info.key for info in found) == sorted(keys)
    assert all(info.nbytes == 2 and abs(info.last_used - time.time()) < 3600 for info in found)
    assert len(asked) == 5
    assert not [params for params in asked if "StartAfter" in params or "Delimiter" in params]
    backend.close()


def test_quarantine_keeps_the_bytes_aside(moto: str, plain: Any) -> None:
    prefix = unique_prefix()
    backend = open_s3(moto, prefix)
    put_object(moto, backend, key("k"), b"corrupt")
    assert read(backend, "k", 10) == (Status.OK, b"corrupt")
    assert backend.quarantine([key("k"), key("k")], deadline=soon()) == [(Status.OK, 0, None), (Status.MISS, 0, None)]
    (aside,) = names(plain, prefix)
    assert aside.startswith(f"{prefix}quarantine/{key('k').hex()}.")
    assert plain.get_object(Bucket=BUCKET, Key=aside)["Body"].read() == b"corrupt"
    put_object(moto, backend, key("k"), b"healed")
    assert backend.quarantine([key("k")], deadline=soon())[0].status is Status.MISS
    assert read_object(moto, backend, key("k")) == b"healed"
    backend.close()
    backend = open_s3(moto, unique_prefix(), quarantine=False)
    assert put(backend, "k", b"1").ok
    assert backend.quarantine([key("k")], deadline=soon())[0].ok
    assert names(plain, backend.settings.prefix) == []
    backend.close()


def test_quarantine_is_conditional_at_every_step() -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(200, etag='"v1"')
        if asked.method == "PUT":
            assert asked.headers["x-amz-copy-source-if-match"] == '"v1"'
            return answer(200, b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
        assert asked.headers["if-match"] == '"v1"'
        return error_answer(412, "PreconditionFailed")  # replaced between copy and delete

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        assert backend.quarantine([key("k")], deadline=soon()) == [(Status.MISS, 0, None)]
        assert [asked.method for asked in server.asked] == ["HEAD", "PUT", "DELETE"]
        backend.close()


# Expiry.


def aged(seconds: int) -> dict[str, Any]:
    from email.utils import formatdate

    now = time.time()
    return {"date": formatdate(now, usegmt=True), "last_modified": formatdate(now - seconds, usegmt=True)}


@pytest.mark.parametrize(
    ("age", "methods", "status"),
    [
        (10, ["HEAD"], Status.EXISTS),
        (70, ["HEAD", "PUT"], Status.EXISTS),  # renewed by a copy
        (101, ["HEAD", "DELETE", "PUT"], Status.OK),  # stored anew
    ],
)
def test_what_a_put_does_with_an_old_record(age: int, methods: list[str], status: Status) -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(200, etag='"v1"', x_amz_meta_a="b", **aged(age))
        if "x-amz-copy-source" in asked.headers:
            assert asked.headers["x-amz-metadata-directive"] == "REPLACE"
            assert asked.headers["x-amz-copy-source-if-match"] == '"v1"'
            assert asked.headers["x-amz-meta-a"] == "b"
            assert asked.headers["x-amz-copy-source"].endswith(asked.path.removeprefix(f"/{BUCKET}/"))
            return answer(200, b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
        return answer(204 if asked.method == "DELETE" else 200, etag='"v2"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, ttl=100.0, conditional_writes="on")
        assert put(backend, "k", b"data").status is status
        assert [asked.method for asked in server.asked] == methods
        assert backend.counters["renewals"] == (age == 70)
        backend.close()


@pytest.mark.parametrize(("age", "status"), [(99, Status.OK), (100, Status.MISS), (10_000, Status.MISS)])
def test_an_expired_record_is_a_miss(age: int, status: Status) -> None:
    def script(asked: Asked) -> Raw:
        extra = {"content_range": "bytes 0-0/1"} if asked.method == "GET" else {}
        return answer(206 if extra else 200, b"1" if extra else b"", etag='"v1"', **extra, **aged(age))

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, ttl=100.0)
        assert backend.stat([key("k")], deadline=soon())[0].status is status
        assert read(backend, "k", 1)[0] is status
        assert read(backend, "k", 0)[0] is status
        backend.close()
        backend = open_s3(server.endpoint)
        assert read(backend, "k", 1) == (Status.OK, b"1")
        backend.close()


def test_a_renewal_that_fails_does_no_harm() -> None:
    def script(asked: Asked) -> Raw:
        return answer(200, etag='"v1"', **aged(70)) if asked.method == "HEAD" else error_answer(403, "AccessDenied")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, ttl=100.0, conditional_writes="on")
        assert put(backend, "k", b"data").status is Status.EXISTS
        backend.close()


# The sweep.


def test_the_sweep_removes_what_is_old_and_ours(moto: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = unique_prefix()
    backend = open_s3(moto, prefix, ttl=100.0)
    for number in range(5):
        assert put(backend, number, b"12345").ok
    backend.quarantine([key(0)], deadline=soon())
    for name in (f"{prefix}foreign", f"{prefix}probe/x"):
        plain.put_object(Bucket=BUCKET, Key=name, Body=b"1")
    assert sweep(backend, upload_age=math.inf) == Swept(0, 0, 0, 0, 0)
    shift = [161.0]
    monkeypatch.setattr("kvstore_backends.s3.sweep.answered_at", lambda answer: time.time() + shift[0])
    assert sweep(backend, dry_run=True) == Swept(4, 0, 0, 20, 0)
    assert sweep(backend) == Swept(4, 0, 0, 20, 0)
    shift[0] = 8 * 86400.0
    assert sweep(backend) == Swept(0, 2, 0, 6, 0)
    assert names(plain, prefix) == [f"{prefix}foreign"]
    with pytest.raises(TransientError):
        sweep(backend, deadline=time.monotonic() - 1)
    backend.close()


def test_the_sweep_aborts_old_uploads_over_all_pages() -> None:
    aborted: list[str] = []

    def script(asked: Asked) -> Raw:
        if asked.method == "DELETE":
            aborted.append(asked.target)
            return answer(204) if len(aborted) == 1 else error_answer(500, "InternalError")
        if "uploads" not in asked.target:
            return answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        number = 2 if "key-marker" in asked.target else 1
        name = f"p/{key(number).hex()[:2]}/{key(number).hex()}"
        body = (
            f"<ListMultipartUploadsResult><IsTruncated>{str(number == 1).lower()}</IsTruncated><NextKeyMarker>m"
            f"</NextKeyMarker><NextUploadIdMarker>n</NextUploadIdMarker><Upload><Key>{name}</Key><UploadId>u{number}"
            "</UploadId><Initiated>2025-01-01T00:00:00.000Z</Initiated></Upload><Upload><Key>p/foreign</Key><UploadId>x"
            "</UploadId><Initiated>2025-01-01T00:00:00.000Z</Initiated></Upload></ListMultipartUploadsResult>"
        )
        return answer(200, body.encode(), date="Thu, 02 Jan 2025 00:00:00 GMT")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, "p/")
        assert sweep(backend, upload_age=3600.0) == Swept(0, 0, 1, 0, 1)
        assert ["uploadId=u1" in aborted[0], "uploadId=u2" in aborted[1]] == [True, True]
        assert sweep(backend, upload_age=2 * 86400.0).uploads == 0
        backend.close()


def test_the_command(moto: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    prefix = unique_prefix()
    url = f"s3://{BUCKET}/{prefix}?endpoint_url={moto}&region=us-east-1&addressing=path&connect_timeout=5s"
    backend = open_backend(url)
    assert isinstance(backend, S3Backend)
    assert put(backend, "k", b"1").ok
    backend.close()
    said: list[str] = []
    assert main([url, "--ttl", "1d"], out=said.append) == 0
    assert said == ["removed 0 expired records, 0 corrupt ones and 0 unfinished uploads, 0 bytes; 0 failed"]
    assert main([url, "--ttl", "36h", "--lifecycle", "--quarantine", "3d"], out=said.append) == 0
    assert json.loads(said[1]) == lifecycle_configuration(prefix, 129_600.0, quarantine_days=3)
    assert main(["memory://"]) == 2
    assert main([url.replace(BUCKET, "no-such-bucket")]) == 2
    assert "no bucket no-such-bucket" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([url, "--ttl", "soon"])


# Clients.


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, moto: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aioboto3", None)
    with pytest.raises(ConfigError, match=r"checkout run pip install -c constraints.txt '\.\[s3-async\]'"):
        open_s3(moto, client="aioboto3")


def test_a_region_is_needed_on_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match="which region"):
        open_backend("s3://bucket")


@pytest.mark.parametrize("client", ["boto3", "aioboto3"])
@pytest.mark.parametrize("where", ["head", "body"])
def test_stock_clients_keep_deadlines_and_let_go_of_memory(client: str, where: str) -> None:
    """A PUT to a silent server (aiobotocore would hang for ever on Expect), a GET that never answers or stops."""
    data = bytes(100_000)

    def script(asked: Asked) -> Raw:
        whole = answer(206, data, etag='"e"', content_range="bytes 0-99999/100000")
        return Raw(whole.data[:1000] if where == "body" and asked.method == "GET" else b"", "hang")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, client=client, conditional_writes="on", read_timeout=20.0)
        begin = time.monotonic()
        memory = bytearray(100_000)
        (outcome,) = backend.get_into([Read(key("k"), memoryview(memory))], deadline=soon(0.3))
        assert isinstance(failure(outcome), TransientError)
        source = bytearray(200_000)
        (outcome,) = backend.put([Write(key("k"), [memoryview(source)])], deadline=soon(0.3))
        assert isinstance(failure(outcome), TransientError)
        assert time.monotonic() - begin < 10.0
        memory[:] = b"\xa5" * len(memory)
        assert all("expect" not in asked.headers for asked in server.asked)
    backend.close()
    assert memory == b"\xa5" * len(memory)


@pytest.mark.parametrize("client", ["boto3", "aioboto3"])
@pytest.mark.parametrize("then", ["close", "reset"])
def test_stock_clients_follow_up_a_broken_body(client: str, then: str) -> None:
    data = hashlib.shake_256(b"x").digest(300_000)

    def script(asked: Asked) -> Raw:
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        whole = answer(206, part, etag='"e"', content_range=f"bytes {first}-{last}/300000")
        return Raw(whole.data[:100_000], then) if len(server.asked) == 1 else whole

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, client=client)
        assert read(backend, "k", 300_000) == (Status.OK, data)
        assert backend.counters["follow_ups"] == 1
        assert server.asked[-1].headers.get("if-match") == '"e"'
        backend.close()


@pytest.mark.parametrize("client", ["boto3", "aioboto3"])
def test_stock_clients_find_a_range_in_everything(client: str) -> None:
    data = hashlib.shake_256(b"y").digest(500_000)
    with ScriptedServer(lambda asked: answer(200, data, etag='"e"')) as server:
        backend = open_s3(server.endpoint, client=client)
        memory = bytearray(1000)
        for start in (0, 400_000, 499_500, 600_000):
            read_it = Read(key("k"), memoryview(memory), start)
            (outcome,) = backend.get_into([read_it], deadline=soon())
            assert (outcome.status, bytes(memory[: outcome.nbytes])) == (Status.OK, data[start : start + 1000])
        backend.close()
