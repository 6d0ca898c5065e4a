"""`S3Backend`: metadata, listing, expiry and the sweep."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from kvstore.backend import Status, Write
from kvstore.errors import TransientError
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
    open_s3,
    put_object,
    read_object,
    unique_prefix,
)  # fmt: skip
from tests.unit.s3_backend_support import failure, key, moto, names, plain, put, read, soon

__all__ = ["moto", "plain"]  # fixtures


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
