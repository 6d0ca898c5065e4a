"""Services that are not quite S3, or not quite well: conditions that are refused, listings that do not get on, deletes
that fail for some, and throttling of every kind."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.errors import Throttled
from kvstore_backends.s3.sweep import Swept, sweep
from tests.s3_support import ACCESS_KEY, BUCKET, SECRET_KEY, Asked, Raw, ScriptedServer, answer, error_answer, open_s3

MIB = 1 << 20
DONE = {"CopyObject": b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>"}


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: S3Backend, name: object, data: bytes) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon())[0]


def failure(outcome: Outcome, kind: type[KVStoreError]) -> str:
    assert isinstance(outcome.error, kind), outcome
    return str(outcome.error)


# Writes.


def test_a_writer_is_at_full_pace_again_after_a_storm_without_one_read() -> None:
    """Puts counted against the pace and never for it: a process that only writes stayed at one at a time."""
    storm = [True]

    def script(asked: Asked) -> Raw:
        return error_answer(503, "SlowDown") if storm[0] else answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, conditional_writes="on", lanes=4)
        pace = backend._calls.pace
        end = soon()
        while pace.allowed > 1 and time.monotonic() < end:
            failure(put(backend, "k", b"1"), Throttled)
        assert pace.allowed == 1
        storm[0] = False
        for number in range(40):
            assert put(backend, number, b"1").ok
        assert pace.allowed == 4
        backend.close()


def test_a_writer_that_may_not_delete_can_write() -> None:
    """What it tried out stays for the sweep."""
    stored: set[str] = set()

    def script(asked: Asked) -> Raw:
        if asked.method == "DELETE":
            return error_answer(403, "AccessDenied")
        if asked.path in stored:
            return error_answer(412, "PreconditionFailed")
        stored.add(asked.path)
        return answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        assert put(backend, "k", b"1").ok
        assert put(backend, "k", b"1").status is Status.EXISTS
        backend.close()


def test_an_upload_that_a_sweep_aborted_in_the_middle_may_be_tried_again() -> None:
    begun: list[int] = []

    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(404)
        if asked.method == "POST" and "uploadId" not in asked.target:
            begun.append(1)
            return answer(200, b"<R><UploadId>u%d</UploadId></R>" % len(begun))
        if asked.method == "POST":
            return answer(200, b"<R><ETag>e</ETag></R>")
        if asked.method == "DELETE" or "uploadId=u1" in asked.target:
            return error_answer(404, "NoSuchUpload")
        return answer(200, etag='"e"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, conditional_writes="on", multipart_size=5 * MIB)
        failure(put(backend, "k", bytes(6 * MIB)), TransientError)
        assert put(backend, "k", bytes(6 * MIB)).ok
        backend.close()


@pytest.mark.parametrize("code", ["SlowDown", "KMS.ThrottlingException", "RequestLimitExceeded"])
def test_throttling_has_many_names(code: str) -> None:
    with ScriptedServer(lambda asked: error_answer(400, code)) as server:
        backend = open_s3(server.endpoint, conditional_writes="on")
        failure(put(backend, "k", b"1"), Throttled)
        backend.close()


# Deletes.


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_service_that_refuses_a_condition_on_deletes_heals_all_the_same(refusal: tuple[int, str]) -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(200, etag='"v1"')
        if asked.method == "PUT":
            return answer(200, DONE["CopyObject"])
        return error_answer(*refusal) if "if-match" in asked.headers else answer(204)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        assert backend.quarantine([key("k")], deadline=soon()) == [Outcome(Status.OK)]
        assert [asked.method for asked in server.asked] == ["HEAD", "PUT", "DELETE", "DELETE"]
        backend.close()


def test_what_is_denied_is_not_tried_without_its_condition() -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "DELETE":
            return error_answer(403, "AccessDenied")
        return answer(200, DONE["CopyObject"], etag='"v1"') if asked.method == "PUT" else answer(200, etag='"v1"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        failure(backend.quarantine([key("k")], deadline=soon())[0], PermanentError)
        assert [asked.method for asked in server.asked].count("DELETE") == 1
        backend.close()


def test_what_is_too_large_to_be_copied_is_freed_and_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CopyObject takes 5 GiB."""
    monkeypatch.setattr("kvstore_backends.s3.expiry.MAX_COPY_BYTES", 99)
    monkeypatch.setattr("kvstore_backends.s3.meta.MAX_COPY_BYTES", 99)
    from email.utils import formatdate

    now = time.time()
    aged = {"date": formatdate(now, usegmt=True), "last_modified": formatdate(now - 70, usegmt=True)}

    def script(asked: Asked) -> Raw:
        assert "x-amz-copy-source" not in asked.headers
        return answer(200, bytes(100), etag='"v1"', **aged) if asked.method == "HEAD" else answer(204)

    with ScriptedServer(lambda asked: script(asked)._replace(data=_without_body(script(asked).data))) as server:
        backend = open_s3(server.endpoint, ttl=100.0, conditional_writes="on")
        assert put(backend, "k", b"data").status is Status.EXISTS
        assert backend.quarantine([key("k")], deadline=soon()) == [Outcome(Status.OK)]
        backend.close()


def _without_body(data: bytes) -> bytes:
    return data[: data.index(b"\r\n\r\n") + 4]


def test_throttling_of_single_deletes_slows_down_too() -> None:
    def script(asked: Asked) -> Raw:
        if asked.method == "HEAD":
            return answer(200, etag='"e"')
        bad = "".join(
            f"<Error><Key>{name}</Key><Code>SlowDown</Code></Error>"
            for name in (f"p/{key(n).hex()[:2]}/{key(n).hex()}" for n in range(2))
        )
        return answer(200, f"<DeleteResult>{bad}</DeleteResult>".encode())

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, "p/", meta_lanes=8)
        outcomes = backend.delete([key(number) for number in range(4)], deadline=soon())
        assert [outcome.status for outcome in outcomes] == [Status.ERROR, Status.ERROR, Status.OK, Status.OK]
        failure(outcomes[0], Throttled)
        assert backend.counters["throttled"] == 2
        assert backend._calls.meta_pace.allowed < 8
        backend.close()


# Listings.


def test_a_listing_that_does_not_get_on_ends() -> None:
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    page = b"<ListBucketResult>" + more + b"</ListBucketResult>"
    with ScriptedServer(lambda asked: answer(200, page)) as server:
        backend = open_s3(server.endpoint)
        with pytest.raises(PermanentError, match="does not get on"):
            list(backend.list(deadline=soon()))
        assert len(server.asked) == 2
        backend.close()


def listing(name: str, deleted: bytes) -> dict[str, bytes]:
    return {
        "list": (
            f"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>{name}</Key><Size>5</Size><ETag>e</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
        ).encode(),
        "uploads": (
            f"<R><IsTruncated>true</IsTruncated><Upload><Key>{name}</Key><UploadId>u</UploadId>"
            "<Initiated>2025-01-01T00:00:00.000Z</Initiated></Upload></R>"
        ).encode(),
        "delete": deleted,
    }


@pytest.mark.parametrize(
    ("code", "swept"),
    [("", (1, 0, 1, 5, 0)), ("AccessDenied", (0, 0, 1, 0, 1)), ("PreconditionFailed", (0, 0, 1, 0, 0)),
     ("NoSuchKey", (1, 0, 1, 5, 0))],
)  # fmt: skip
def test_a_sweep_counts_what_is_gone(code: str, swept: tuple[int, ...]) -> None:
    """Also: an upload that another sweep aborted is no failure, and a listing of uploads that does not get on ends."""
    name = f"p/{key(1).hex()[:2]}/{key(1).hex()}"
    error = f"<Error><Key>{name}</Key><Code>{code}</Code></Error>" if code else ""
    pages = listing(name, f"<DeleteResult>{error}</DeleteResult>".encode())

    def script(asked: Asked) -> Raw:
        if asked.method == "DELETE":
            return error_answer(404, "NoSuchUpload")
        kind = "delete" if asked.method == "POST" else "uploads" if "uploads" in asked.target else "list"
        return answer(200, pages[kind], date="Thu, 02 Jan 2025 00:00:01 GMT")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, "p/", ttl=3600.0)
        assert sweep(backend) == Swept(*swept)
        assert len(server.asked) == 4
        backend.close()


# One place.


def test_one_place_is_not_two_backends(tmp_path: Path) -> None:
    """A copy beside itself would be none."""
    with ScriptedServer(lambda asked: answer(404)) as server:
        where = f"s3://{BUCKET}/kv"
        more = f"?endpoint_url={server.endpoint}&region=us-east-1&addressing=path"
        own = {"s3": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}}
        with pytest.raises(ConfigError, match="one and the same place"):
            kvstore.open_store([where + more, where + "/" + more], backend_options=own)


def test_close_in_the_middle_of_a_batch_returns_and_so_does_the_batch() -> None:
    held, go = threading.Event(), threading.Event()

    def script(asked: Asked) -> Raw:
        held.set()
        assert go.wait(60)
        return answer(404) if asked.method == "HEAD" else error_answer(404, "NoSuchKey")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, lanes=4, meta_lanes=4, read_timeout=20.0)
        found: list[Outcome] = []

        def work() -> None:
            reads = [Read(key(number), memoryview(bytearray(8))) for number in range(12)]
            found.extend(backend.get_into(reads, deadline=soon()))

        thread = threading.Thread(target=work)
        thread.start()
        assert held.wait(30)
        backend.close()
        go.set()
        thread.join(30)
        assert len(found) == 12
        assert not [outcome for outcome in found if outcome.status is Status.OK]
