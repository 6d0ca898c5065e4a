"""Answers that cannot be those of an S3 service, or come from something in between: each is refused by name, by every
client, and none of it is ever taken for a record, a short one or a miss."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import BackendError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.answers import UNKNOWN, behind, coming, content_range, found_of
from kvstore_backends.s3.http import LinkError
from tests.s3_support import Asked, Raw, ScriptedServer, answer, error_answer, open_s3, range_of

CLIENTS = ("native", "boto3", "aioboto3")
DATA = hashlib.shake_256(b"answers").digest(30_000)
SIZE = len(DATA)


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def get(backend: S3Backend, start: int, nbytes: int) -> tuple[Outcome, bytes]:
    memory = bytearray(b"\xa5" * nbytes)
    (outcome,) = backend.get_into([Read(key("k"), memoryview(memory), start)], deadline=soon())
    return outcome, bytes(memory[: outcome.nbytes])


def wanted(asked: Asked) -> tuple[int, int]:
    first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1, SIZE)


def part(asked: Asked, body: bytes | None = None, *, span: str | None = None, **headers: str) -> Raw:
    start, end = wanted(asked)
    span = f"bytes {start}-{end - 1}/{SIZE}" if span is None else span
    more = {"content_range": span} if span else {}
    return answer(206, DATA[start:end] if body is None else body, **{"etag": '"v1"', **more, **headers})


def stream(head: str, body: bytes, then: str = "close") -> Raw:
    return Raw(f'HTTP/1.1 {head}\r\nETag: "v1"\r\n'.encode() + body, then)


def chunks(data: bytes, size: int = 777) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def compressed(asked: Asked) -> Raw:
    start, end = wanted(asked)
    return part(asked, gzip.compress(DATA[start:end], 0), content_encoding="gzip")


def fewer(asked: Asked) -> Raw:
    start, _ = wanted(asked)
    return part(asked, DATA[start : start + 100], span=f"bytes {start}-{start + 99}/{SIZE}")


def chunked_short(asked: Asked) -> Raw:
    start, end = wanted(asked)
    span = f"Content-Range: bytes {start}-{end - 1}/{SIZE}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return stream("206 P", span.encode() + chunks(DATA[start : start + 100]), "keep")


def shifted(asked: Asked) -> Raw:
    start, end = wanted(asked)
    return part(asked, DATA[start + 1 : end + 1], span=f"bytes {start + 1}-{end}/{SIZE}")


def to_the_end(asked: Asked) -> Raw:
    start, end = wanted(asked)
    return stream("206 P", f"Content-Range: bytes {start}-{end - 1}/{SIZE}\r\n\r\n".encode() + DATA[start : start + 50])


BAD: dict[str, tuple[Callable[[Asked], Raw], str]] = {
    "compressed": (compressed, "encoded"),
    "fewer bytes than asked for": (fewer, "another range"),
    "another range": (shifted, "another range"),
    "no range": (lambda a: part(a, span=""), "which"),
    "a range of an object of unknown size": (lambda a: part(a, span="bytes 1000-1999/*"), "which"),
    "lengths that contradict each other": (lambda a: part(a, DATA[:10]), "contradict"),
    "chunks that end early": (chunked_short, "early|before the end"),
    "a body up to the end of the connection": (to_the_end, "early|before the end"),
    "everything, of no length": (lambda a: stream("200 OK", b"\r\n" + DATA[:5000]), "how long"),
    "no version": (lambda a: part(a, etag=""), "ETag"),
    "a page": (lambda a: answer(200, b"<html>Please log in</html>" * 100, content_type="text/html"), "ETag"),
    "nothing": (lambda a: answer(204), "204"),
    "something later": (lambda a: answer(202, b"wait"), "202"),
    "not modified": (lambda a: answer(304, etag='"v1"'), "304"),
    "no such page": (lambda a: answer(404, b"<html>nope</html>"), "404.*endpoint_url"),
    "no range like this": (lambda a: answer(416, content_range=f"bytes */{SIZE}"), "refused a range"),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_right_is_refused_by_name(client: str, case: str) -> None:
    script, said = BAD[case]
    with ScriptedServer(lambda asked: script(asked) if asked.method == "GET" else answer(200, etag='"v1"')) as server:
        backend = open_s3(server.endpoint, client=client, hedge_reads=False)
        for _ in range(2):  # in full, and by a trace
            outcome, _ = get(backend, 1000, 1000)
            assert isinstance(outcome.error, BackendError), outcome
            with pytest.raises(BackendError, match=said):
                raise outcome.error
        backend.close()


@pytest.mark.parametrize(
    "body",
    [b"-5\r\n" + b"Z" * 9000, b"0x10\r\n" + b"Z" * 16, b"1_0\r\n" + b"Z" * 16, b"\r\n", b"f" * 20 + b"\r\nZ",
     b" 5\r\nabcde"],
    ids=["negative", "0x", "underscore", "empty", "huge", "space"],
)  # fmt: skip
def test_chunks_of_no_length_end_the_body(body: bytes) -> None:
    """-5 went round for ever."""
    with ScriptedServer(lambda a: stream("200 OK", b"Transfer-Encoding: chunked\r\n\r\n" + body)) as server:
        backend = open_s3(server.endpoint, hedge_reads=False)
        outcome, _ = get(backend, 0, 5000)
        assert isinstance(outcome.error, TransientError)
        assert "no length" in str(outcome.error)
        backend.close()


@pytest.mark.parametrize("headers", [b"Content-Length: " + b"9" * 5000, b"Content-Length: 5\r\nContent-Length: 6",
                                     b"Transfer-Encoding: gzip, chunked", b"Content-Length: +5"])  # fmt: skip
def test_lengths_that_are_none(headers: bytes) -> None:
    with ScriptedServer(lambda a: stream("200 OK", headers + b"\r\n\r\n" + DATA)) as server:
        backend = open_s3(server.endpoint, hedge_reads=False)
        outcome, _ = get(backend, 0, 100)
        assert isinstance(outcome.error, TransientError)
        backend.close()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("ranges", [True, False], ids=["a range", "everything"])
def test_bodies_in_chunks_are_as_good_as_others(client: str, ranges: bool) -> None:
    def script(asked: Asked) -> Raw:
        start, end = wanted(asked)
        if ranges:
            span = f"Content-Range: bytes {start}-{end - 1}/{SIZE}\r\n"
            return stream(
                "206 P", f"{span}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks(DATA[start:end]), "keep"
            )
        return stream("200 OK", b"Transfer-Encoding: chunked\r\n\r\n" + chunks(DATA), "keep")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, client=client, hedge_reads=False)
        for start, nbytes in ((0, 5000), (1000, 20_000), (29_000, 5000), (20_000, 10_000)):
            outcome, data = get(backend, start, nbytes)
            assert outcome == Outcome(Status.OK, min(nbytes, SIZE - start))
            assert data == DATA[start : start + nbytes]
        backend.close()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("head", [b'200 OK\r\nETag: "v1"\r\n\r\n', b"200 OK\r\nContent-Length: 5\r\n\r\n",
                                  b'204 X\r\nETag: "v1"\r\nContent-Length: 5\r\n\r\n'])  # fmt: skip
def test_a_head_without_a_length_or_a_version_is_no_record(client: str, head: bytes) -> None:
    with ScriptedServer(lambda asked: Raw(b"HTTP/1.1 " + head, "close")) as server:
        backend = open_s3(server.endpoint, client=client, hedge_reads=False)
        for _ in range(2):
            (outcome,) = backend.stat([key("k")], deadline=soon())
            assert isinstance(outcome.error, BackendError), outcome
        backend.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_put_that_fails_in_a_200_was_not_stored(client: str) -> None:
    body = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"
    with ScriptedServer(lambda asked: answer(200, body, etag='"v1"')) as server:
        backend = open_s3(server.endpoint, client=client, conditional_writes="on")
        for number in range(2):
            (outcome,) = backend.put([Write(key(number), [memoryview(b"data")])], deadline=soon())
            assert isinstance(outcome.error, TransientError), outcome
            assert "InternalError" in str(outcome.error)
        backend.close()


# Versions.


def test_a_server_that_ignores_if_match_cannot_mix_versions() -> None:
    """The body breaks, and what follows it comes from another version."""
    other = DATA[::-1]

    def script(asked: Asked) -> Raw:
        if len(server.asked) == 1:
            whole = range_of(asked, DATA)
            return Raw(whole.data[:-10_000], "close")
        return range_of(asked, other, '"v2"')

    for client in CLIENTS:
        with ScriptedServer(script) as server:
            backend = open_s3(server.endpoint, client=client, hedge_reads=False)
            assert get(backend, 0, 20_000)[0].status is Status.MISS
            backend.close()


def test_a_range_behind_the_end_of_another_version_does_not_shorten_the_record() -> None:
    """The first part comes from a long version, and the second finds a short one: 416 names no version."""

    def script(asked: Asked) -> Raw:
        start, _ = wanted(asked)
        return error_answer(416, "InvalidRange") if start else range_of(asked, DATA)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, gap=0, hedge_reads=False)
        memory = bytearray(2000)
        view = memoryview(memory)
        reads = [Read(key("k"), view[:1000], 0), Read(key("k"), view[1000:], 20_000)]
        assert [o.status for o in backend.get_into(reads, deadline=soon())] == [Status.MISS, Status.MISS]
        backend.close()


def test_ranges_within_and_behind_one_version() -> None:
    with ScriptedServer(lambda asked: range_of(asked, DATA)) as server:
        backend = open_s3(server.endpoint, gap=0, hedge_reads=False)
        memory = bytearray(4000)
        view = memoryview(memory)
        reads = [Read(key("k"), view[:1000], 0), Read(key("k"), view[1000:2000], SIZE - 10),
                 Read(key("k"), view[2000:], SIZE + 5)]  # fmt: skip
        assert [o.nbytes for o in backend.get_into(reads, deadline=soon())] == [1000, 10, 0]
        only_behind = backend.get_into([Read(key("k"), view, SIZE)], deadline=soon())
        assert only_behind == [Outcome(Status.OK, 0)]
        backend.close()


# What is cut or slow in the part that is skipped.


def test_a_body_cut_before_the_wanted_bytes_is_followed_up() -> None:
    def script(asked: Asked) -> Raw:
        whole = answer(200, DATA, etag='"v1"')
        return Raw(whole.data[:3000], "close") if len(server.asked) == 1 else whole

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, hedge_reads=False)
        assert get(backend, 10_000, 500) == (Outcome(Status.OK, 500), DATA[10_000:10_500])
        assert len(server.asked) == 2
        backend.close()


def test_headers_one_byte_at_a_time_end_at_the_deadline() -> None:
    stop = threading.Event()
    piece = b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 100

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            for at in range(len(piece)):
                if stop.wait(0.02):
                    return
                try:
                    peer.sendall(piece[at : at + 1])
                except OSError:
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    backend = open_s3(f"http://127.0.0.1:{listener.getsockname()[1]}", hedge_reads=False)
    begin = time.monotonic()
    (outcome,) = backend.get_into([Read(key("k"), memoryview(bytearray(5)))], deadline=soon(0.4))
    took = time.monotonic() - begin
    assert isinstance(outcome.error, TransientError)
    assert "deadline" in str(outcome.error)
    assert took < 3.0, "all of it would take 20 s"
    stop.set()
    thread.join(10)
    listener.close()
    backend.close()


# The functions.


def test_content_ranges() -> None:
    assert content_range("bytes 5-9/100") == (5, 9, 100)
    for text in ("", "bytes 5-9/*", "bytes */7", "bytes 9-5/100", "bytes 5-100/100", "5-9/100", "bytes ٥-9/100",
                 "bytes 5-9/100, bytes 1-2/3", f"bytes 0-1/{'9' * 30}"):  # fmt: skip
        assert content_range(text) is None, text


def test_what_comes() -> None:
    whole = {"etag": '"e"', "content-length": "100"}
    assert coming(200, whole, 0, 10)[2:] == (0, 10, 100)
    assert coming(200, whole, 95, 10)[2:] == (95, 5, 100)
    assert coming(200, whole, 200, 10)[2:] == (200, 0, 100)
    assert coming(200, {"etag": '"e"', "transfer-encoding": "chunked"}, 3, 10)[2:] == (3, UNKNOWN, UNKNOWN)
    assert coming(206, {"etag": '"e"', "content-range": "bytes 95-99/100"}, 95, 10)[2:] == (0, 5, 100)
    assert coming(200, {**whole, "content-encoding": "aws-chunked"}, 0, 10).nbytes == 10
    found = found_of(200, {**whole, "x-amz-meta-a": "b"})
    assert (found.nbytes, found.etag, found.metadata) == (100, '"e"', {"a": "b"})
    assert behind({}, 5).nbytes == behind({"content-range": "bytes */5"}, 5).nbytes == 0
    with pytest.raises(LinkError):
        behind({"content-range": "bytes */6"}, 5)


def test_a_missing_record_is_no_error_and_an_error_no_missing_record() -> None:
    code = ["NoSuchKey"]
    for client in CLIENTS:
        with ScriptedServer(lambda asked: error_answer(404, code[0])) as server:
            backend = open_s3(server.endpoint, client=client, miss_memory=0.0)
            for code[0], kind in (("NoSuchKey", None), ("NoSuchBucket", PermanentError), ("Odd", PermanentError)):
                outcome, _ = get(backend, 0, 10)
                assert outcome.status is Status.MISS if kind is None else isinstance(outcome.error, kind), outcome
            backend.close()
