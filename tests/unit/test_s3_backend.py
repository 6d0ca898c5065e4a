"""`S3Backend` by its URL, its writes and its clients, on a moto server and on scripted ones."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backend import Capability, Read, Status, Write
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.registry import open_backend, parse_url
from kvstore_cli.doctor_network import s3_endpoint
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
    unique_prefix,
)  # fmt: skip
from tests.unit.s3_backend_support import MIB, failure, key, moto, plain, put, read, soon

__all__ = ["moto", "plain"]  # fixtures


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


@pytest.mark.parametrize("client", ["native", "boto3", "aioboto3"])
def test_where_the_region_comes_from(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, AWS_REGION, AWS_DEFAULT_REGION, the profile: in requests' signatures, and for `kvstore doctor`."""
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-north-1\n", encoding="utf-8")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_PROFILE", raising=False)

    def signed(**options: Any) -> str:
        with ScriptedServer(lambda asked: answer(200, etag='"e"')) as server:
            backend = open_s3(server.endpoint, client=client, conditional_writes="on", **{"region": None, **options})
            assert put(backend, 1, b"x").ok
            backend.close()
            signatures = [asked.headers["authorization"] for asked in server.asked]
        (scope,) = {re.findall(r"Credential=[^/]*/[0-9]+/([^/]+)/", each)[0] for each in signatures}
        return str(scope)

    def doctors() -> str:
        return str(re.findall(r"s3\.(.+)\.amazonaws", s3_endpoint(parse_url("s3://bucket"), {}))[0])

    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert signed(region="eu-west-3") == "eu-west-3"
    assert (signed(), doctors()) == ("eu-west-1", "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "")
    assert (signed(), doctors()) == ("eu-west-2", "eu-west-2")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert (signed(), doctors()) == ("eu-north-1", "eu-north-1")


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
