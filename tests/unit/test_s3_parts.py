"""The parts of the S3 backend that do no I/O: options, names, plans, lanes, memory of misses, checksums, errors."""

from __future__ import annotations

import base64
import io
import itertools
import threading
import zlib
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError

from kvstore.backend import Status
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.registry import backend_class, parse_url, split_options
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.answers import age_of
from kvstore_backends.s3.checksums import Checksum
from kvstore_backends.s3.client import BodyBroken, Source, gather
from kvstore_backends.s3.errors import Faults, Throttled
from kvstore_backends.s3.expiry import lifecycle_configuration
from kvstore_backends.s3.express import is_express, zone_of
from kvstore_backends.s3.http import LinkError
from kvstore_backends.s3.lanes import Lanes, Pace
from kvstore_backends.s3.misses import MissMemory
from kvstore_backends.s3.names import key_of, probe_name, quarantine_name, record_name
from kvstore_backends.s3.options import Settings, settings_from_url
from kvstore_backends.s3.plan import Piece, Splitter, parts_of, spans_of

MIB = 1 << 20
KEY = Key(bytes(range(32)))
EXPRESS = "kv--usw2-az1--x-s3"


def settings_of(text: str, **secrets: object) -> Settings:
    url = parse_url(text)
    return settings_from_url(url, split_options(url, S3Backend, secrets).own)


# Options and URLs.


def test_a_url_names_bucket_prefix_and_options() -> None:
    found = settings_of("s3://bucket/a/b/?region=eu-central-1&ttl=6h&lanes=4&hedge_reads=off&part_size=4MiB")
    assert (found.bucket, found.prefix, found.region, found.ttl) == ("bucket", "a/b/", "eu-central-1", 21600.0)
    assert (found.lanes, found.hedge_reads, found.part_size, found.name) == (4, False, 4 * MIB, "s3://bucket/a/b")
    assert settings_of("s3://bucket").prefix == settings_of("s3://bucket/").prefix == ""


@pytest.mark.parametrize(
    ("host", "bucket", "region"),
    [
        ("kvs.s3.us-west-2.amazonaws.com", "kvs", "us-west-2"),
        ("a.b.s3-eu-west-1.amazonaws.com", "a.b", "eu-west-1"),
        (f"{EXPRESS}.s3express-usw2-az1.us-west-2.amazonaws.com", EXPRESS, "us-west-2"),
    ],
)
def test_the_host_form_of_aws_is_understood(host: str, bucket: str, region: str) -> None:
    found = settings_of(f"s3://{host}/p")
    assert (found.bucket, found.region, found.prefix) == (bucket, region, "p/")
    assert settings_of(f"s3://{host}?region=us-east-2").region == "us-east-2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3:///x", "needs a bucket"),
        ("s3://ab", "not the name of a bucket"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/a/../b", "prefix"),
        ("s3://bucket?addressing=hosted", "addressing"),
        ("s3://bucket?client=minio", "client"),
        ("s3://bucket?endpoint_url=minio:9000", "endpoint_url must be"),
        ("s3://bucket?endpoint_url=http://me:hunter2@minio:9000", "endpoint_url must be"),
        ("s3://bucket?lanes=0", "lanes"),
        ("s3://bucket?multipart_size=1MiB", "multipart_size"),
        ("s3://kv--us-west-2a--x-s3", "id of its zone"),
        ("s3://--x-s3", "not the name of a bucket"),
        (f"s3://{EXPRESS}?addressing=path", "virtual addressing only"),
        ("s3://bucket?secret_access_key=hunter2", "must not stand in a URL"),
    ],
)
def test_a_wrong_url_is_refused_without_secrets(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        settings_of(text)
    assert "hunter2" not in str(caught.value)


def test_credentials_come_together() -> None:
    with pytest.raises(ConfigError, match="come together"):
        settings_of("s3://bucket", access_key_id="a")
    with pytest.raises(ConfigError, match="session_token needs"):
        settings_of("s3://bucket", session_token="hunter2")
    found = settings_of("s3://bucket", access_key_id="hunter1", secret_access_key="hunter2", session_token="hunter3")
    assert "hunter" not in repr(found)


def test_the_scheme_is_registered() -> None:
    assert backend_class("s3") is S3Backend


def test_express_is_known_by_its_name() -> None:
    assert is_express(EXPRESS)
    assert zone_of(EXPRESS) == "usw2-az1"
    assert zone_of("a-b--use1-az4--x-s3") == "use1-az4"
    assert not is_express("bucket--x")


# Names.


@pytest.mark.parametrize("prefix", ["", "a/", "00/"])
def test_names_and_keys(prefix: str) -> None:
    name = record_name(prefix, KEY)
    assert name == f"{prefix}00/{KEY.hex()}"
    assert key_of(prefix, name) == KEY
    for other in (
        quarantine_name(prefix, KEY, 255), probe_name(prefix, "x"), f"x{name}", f"{name}.part", name.upper(),
        f"{prefix}01/{KEY.hex()}", f"{prefix}{KEY.hex()}", f"{prefix}00/{KEY.hex()[:-1]}", "",
    ):  # fmt: skip
        assert key_of(prefix, other) is None
    assert quarantine_name(prefix, KEY, 255) == f"{prefix}quarantine/{KEY.hex()}.ff"


# Plans.

WASTE = memoryview(bytearray(1000))


def piece(item: int, offset: int, size: int) -> Piece:
    return Piece(item, offset, memoryview(bytearray(size)))


def test_neighbours_share_a_span_and_gaps_go_to_waste() -> None:
    pieces = [piece(0, 0, 700), piece(1, 4096, 1000), piece(2, 900, 100), piece(3, 5096, 50), piece(4, 800, 0)]
    spans = spans_of(pieces, 200, WASTE)
    assert [(span.start, span.nbytes, [len(view) for view in span.views]) for span in spans] == [
        (0, 1000, [700, 200, 100]),
        (4096, 1050, [1000, 50]),
    ]
    assert spans[0].views[0] is pieces[0].dst
    (whole,) = spans_of(pieces, 4000, memoryview(bytearray(4000)))
    assert (whole.start, whole.nbytes) == (0, 5146)


def test_overlapping_ranges_each_get_their_bytes() -> None:
    pieces = [piece(0, 0, 100), piece(1, 50, 100), piece(2, 0, 100), piece(3, 150, 10)]
    spans = spans_of(pieces, 0, WASTE)
    wanted = sorted((p.offset, len(p.dst)) for p in pieces)
    found = []
    for span in spans:
        at = span.start
        for view in span.views:
            found.append((at, len(view)))
            at += len(view)
    assert sorted(found) == wanted
    assert sum(span.nbytes for span in spans) == 310


def test_a_large_span_is_cut_into_parts() -> None:
    (span,) = spans_of([piece(0, 10, 5 * MIB), piece(1, 10 + 5 * MIB, 30 * MIB)], 0, WASTE)
    parts = parts_of(span, 8 * MIB)
    assert [part.nbytes for part in parts] == [7 * MIB] * 5
    assert [part.start for part in parts] == [10 + 7 * MIB * number for number in range(5)]
    assert [len(view) for view in parts[0].views] == [5 * MIB, 2 * MIB]
    assert parts_of(span, 20 * MIB) == [span], "two parts would not be worth it"


def test_the_size_of_parts_follows_latency_and_bandwidth() -> None:
    splitter = Splitter(8 * MIB)
    for _ in range(60):
        splitter.note(8 * MIB, 0.02, 8 * MIB / 100e6)  # 20 ms, 100 MB/s: 4 × 2 MB
    assert splitter.size == 8 * MIB
    for _ in range(60):
        splitter.note(8 * MIB, 0.1, 8 * MIB / 50e6)
    assert 18 * MIB <= splitter.size <= 20 * MIB
    for _ in range(200):
        splitter.note(8 * MIB, 0.0002, 8 * MIB / 2e9)
    assert splitter.size == 4 * MIB, "not below"
    for _ in range(200):
        splitter.note(8 * MIB, 1.0, 8 * MIB / 2e9)
    assert splitter.size == 32 * MIB, "not above"
    splitter.note(1000, 9.0, 1e-9)
    assert splitter.size == 32 * MIB, "small ones say nothing"
    fixed = Splitter(MIB, adapt=False)
    fixed.note(8 * MIB, 1.0, 1.0)
    assert fixed.size == MIB


def test_gather_takes_views_apart() -> None:
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh"), memoryview(b"i")]
    for start, end in itertools.combinations(range(10), 2):
        assert b"".join(gather(views, start, end)) == b"abcdefghi"[start:end]


def test_a_source_is_a_file() -> None:
    source = Source([memoryview(b"abc"), memoryview(b""), memoryview(b"defgh")], 8)
    assert (len(source), bool(source), source.read()) == (8, True, b"abcdefgh")
    assert source.seek(2) == source.tell() == 2
    assert source.read(3) == b"cde"
    assert source.seek(-1, io.SEEK_END) == 7
    assert source.read(9) == b"h"
    assert source.read(9) == b""
    assert bool(Source([], 0))
    source.seek(0)
    source.revoke()
    with pytest.raises(OSError, match="given back"):
        source.read(1)


def test_ages_from_headers() -> None:
    modified = "Wed, 01 Jan 2025 00:00:00 GMT"
    assert age_of({"last-modified": modified, "date": "Wed, 01 Jan 2025 01:00:01 GMT"}) == 3601.0
    assert age_of({"last-modified": modified, "date": "Tue, 31 Dec 2024 00:00:00 GMT"}) == 0.0
    assert age_of({"last-modified": "nonsense", "date": modified}) == 0.0
    assert age_of({"date": modified}) == 0.0
    assert age_of({"last-modified": modified}) > 86400.0, "our clock stands in for a Date that was taken out"


# Lanes.


def test_lanes_do_everything_once_and_together() -> None:
    lanes = Lanes(7, "test")
    barrier = threading.Barrier(8)
    done: list[int] = []

    def do(index: int) -> None:
        if index < 8:
            barrier.wait(30)  # passes only if eight are at work at once
        done.append(index)

    lanes.each(do, 100, at_once=8)
    assert sorted(done) == list(range(100))
    lanes.each(do, 0, at_once=8)
    assert lanes.close(5.0)


def test_a_busy_pool_does_not_hold_up_a_caller() -> None:
    """The caller does its own work if no helper is free, and does not wait for one that has not begun."""
    lanes, release, begun = Lanes(1, "test"), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(30)

    lanes.spawn(hang)
    assert begun.wait(30)
    done: list[int] = []
    lanes.each(done.append, 10, at_once=4)
    assert sorted(done) == list(range(10))
    assert not lanes.close(0.01)
    release.set()
    assert lanes.close(5.0)
    lanes.each(done.append, 3, at_once=4)  # after close the caller still can
    lanes.spawn(hang)


def test_what_a_helper_raises_is_raised() -> None:
    lanes = Lanes(3, "test")
    barrier = threading.Barrier(2)

    def do(index: int) -> None:
        barrier.wait(30)
        if threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.each(do, 2, at_once=2)
    assert lanes.close(5.0)


def test_the_pace_halves_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvstore_backends.s3.lanes.time.monotonic", lambda: now[0])
    pace = Pace(16)
    pace.note(throttled=True)
    pace.note(throttled=True)  # of the same round
    assert pace.allowed == 8
    for _ in range(9):
        now[0] += 1
        pace.note(throttled=True)
    assert pace.allowed == 1
    for _ in range(200):
        pace.note(throttled=False)
    assert pace.allowed == 16


# Memory of misses.


def test_a_miss_is_remembered_briefly() -> None:
    now = [0.0]
    misses = MissMemory(0.5, most=2, clock=lambda: now[0])
    misses.add([KEY], misses.epoch)
    assert KEY in misses
    now[0] = 0.51
    assert KEY not in misses
    misses.add([KEY], misses.epoch)
    misses.forget([KEY])
    assert KEY not in misses
    epoch = misses.epoch
    misses.forget([KEY])  # a put between question and answer
    misses.add([KEY], epoch)
    assert KEY not in misses
    others = [Key(bytes([number]) * 32) for number in range(3)]
    misses.add(others, misses.epoch)
    assert [key in misses for key in others] == [False, True, True]
    off = MissMemory(0.0)
    off.add([KEY], off.epoch)
    assert KEY not in off


# Checksums.


def test_checksums_are_over_the_views_joined() -> None:
    views = [memoryview(b"1234"), memoryview(b""), memoryview(b"56789")]
    crc = base64.b64encode(zlib.crc32(b"123456789").to_bytes(4, "big")).decode()
    assert Checksum("crc32").of(views) == {"ChecksumCRC32": crc}
    assert Checksum("crc32").announce() == {"ChecksumAlgorithm": "CRC32", "ChecksumType": "COMPOSITE"}
    assert Checksum("none").of(views) == Checksum("none").announce() == {}


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("crc32c", 0xE3069283, "COMPOSITE"), ("crc64nvme", 0xAE8B14860A799888, "FULL_OBJECT")]
)
def test_checksums_of_awscrt(name: str, value: int, kind: str) -> None:
    """Check values of "123456789" (CRC RevEng catalogue)."""
    pytest.importorskip("awscrt")
    (got,) = Checksum(name).of([memoryview(b"1234"), memoryview(b"56789")]).values()
    assert int.from_bytes(base64.b64decode(got), "big") == value
    assert Checksum(name).announce()["ChecksumType"] == kind


def test_a_checksum_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "awscrt", None)
    with pytest.raises(ConfigError, match="pip install awscrt"):
        Checksum("crc32c")


# Lifecycle.


def test_the_lifecycle_has_whole_days() -> None:
    rules = {rule["ID"]: rule for rule in lifecycle_configuration("p/", 90_000.0)["Rules"]}
    assert rules["kvstore-ttl"]["Expiration"] == {"Days": 2}
    assert rules["kvstore-ttl"]["Filter"] == {"Prefix": "p/"}
    assert rules["kvstore-quarantine"]["Filter"] == {"Prefix": "p/quarantine/"}
    assert "kvstore-ttl" not in {rule["ID"] for rule in lifecycle_configuration("", None)["Rules"]}


# Errors.


def client_error(status: int, code: str, message: str = "", **headers: str) -> ClientError:
    meta: Any = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": meta}, "GetObject")


FAULTS = Faults("s3://bucket", "bucket")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (client_error(503, "SlowDown"), Throttled, "fewer requests"),
        (client_error(429, ""), Throttled, "fewer requests"),
        (client_error(400, "RequestThrottled"), Throttled, "fewer requests"),
        (client_error(500, "InternalError", "try again"), TransientError, "try again"),
        (client_error(502, "502"), TransientError, "502"),
        (client_error(408, "RequestTimeout"), TransientError, "RequestTimeout"),
        (client_error(409, "OperationAborted"), TransientError, "OperationAborted"),
        (client_error(400, "BadDigest"), TransientError, "BadDigest"),
        (client_error(403, "RequestTimeTooSkewed"), PermanentError, "clock is wrong"),
        (client_error(403, "AccessDenied"), PermanentError, "s3:ListBucket on bucket"),
        (client_error(403, "403"), PermanentError, "access denied"),
        (client_error(403, "InvalidAccessKeyId", "AKIAhunter2"), PermanentError, "access key does not exist"),
        (client_error(403, "SignatureDoesNotMatch", "hunter2"), PermanentError, "secret key does not fit"),
        (client_error(400, "ExpiredToken", "hunter2"), PermanentError, "have expired"),
        (client_error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"}), PermanentError, "=eu-west-1"),
        (client_error(400, "AuthorizationHeaderMalformed"), PermanentError, "set option region"),
        (client_error(404, "NoSuchBucket"), PermanentError, "no bucket bucket"),
        (client_error(400, "EntityTooLarge", "too large"), PermanentError, "too large"),
        (client_error(501, "NotImplemented"), PermanentError, "NotImplemented"),
        (LinkError("deadline", "the deadline passed"), TransientError, "deadline"),
        (LinkError("tls", "not trusted"), PermanentError, "not trusted"),
        (BodyBroken(7, "e", LinkError("short", "cut")), TransientError, "cut after 7 bytes: cut"),
        (BodyBroken(7, "e", ReadTimeoutError(endpoint_url="http://hunter2")), TransientError, "fell silent"),
        (NoCredentialsError(), PermanentError, "no credentials were found"),
        (ConnectionResetError(104, "reset"), TransientError, "reset"),
        (TimeoutError(), TransientError, "deadline"),
        (ValueError("hunter2"), PermanentError, "raised ValueError"),
    ],
)
def test_every_failure_has_its_error(error: Exception, kind: type[KVStoreError], said: str) -> None:
    found = FAULTS.of(error, "get", KEY)
    assert type(found) is kind
    assert said in str(found)
    assert "hunter2" not in str(found)
    assert (found.backend, found.operation, found.key, found.cause) == ("s3://bucket", "get", KEY, error)
    assert FAULTS.outcome(error, "get").status is Status.ERROR
    assert FAULTS.of(found, "put") is found


def test_refused_deletes_have_their_error() -> None:
    assert "access denied" in str(FAULTS.refused({"Code": "AccessDenied"}, "delete", KEY))
    assert isinstance(FAULTS.refused({"Code": "InternalError"}, "delete", KEY), TransientError)
    assert isinstance(FAULTS.refused({"Code": "SlowDown"}, "delete", KEY), Throttled)


def test_express_asks_for_its_own_permission() -> None:
    text = str(Faults("s3://x", EXPRESS).of(client_error(403, "AccessDenied"), "get"))
    assert "s3express:CreateSession" in text
