"""`client=boto3`: what closing leaves behind, and bodies without a socket (moto's `mock_aws`)."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import time
from typing import Any

import boto3
import pytest
from moto import mock_aws

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.client import BodyBroken
from kvstore_backends.s3.http import LinkError
from kvstore_backends.s3.options import Settings
from kvstore_backends.s3.stock import StockClient, _Late, _Rest
from tests.s3_support import ACCESS_KEY, BUCKET, SECRET_KEY, Asked, Raw, ScriptedServer, answer, open_s3, range_of
from tests.s3_support import settings as settings_of

_closed: list[object] = []  # kept past the audit of descriptors: nothing may be closed by the garbage collector alone
DATA = hashlib.shake_256(b"stock").digest(100_000)


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Closing.


def test_no_call_begins_after_close() -> None:
    """It would open connections that nobody closes; and it is refused at once, not left to its deadline."""
    with ScriptedServer(lambda asked: range_of(asked, DATA)) as server:
        client = StockClient(settings_of(server.endpoint))
        view = memoryview(bytearray(len(DATA)))
        got = client.get("k", 0, [view], etag=None, deadline=soon())
        assert got is not None
        assert (got.nbytes, bytes(view)) == (len(DATA), DATA)
        client.close()
        client.close()
        begin = time.monotonic()
        for call in (
            lambda: client.get("k", 0, [view], etag=None, deadline=soon()),
            lambda: client.head("k", deadline=soon()),
            lambda: client.invoke("ListObjectsV2", {}, deadline=soon()),
        ):
            with pytest.raises(LinkError, match="closed"):
                call()
        assert time.monotonic() - begin < 5
        assert len(server.asked) == 1


def test_a_call_that_outlasts_close_leaves_no_connection() -> None:
    """It is held up before it connects, `close` goes past it, and then it connects in a client that is closed."""
    held, go = threading.Event(), threading.Event()
    with ScriptedServer(lambda asked: answer(200, etag='"e"')) as server:
        client = StockClient(settings_of(server.endpoint, read_timeout=5.0))
        _closed.append(client)
        client.head("k", deadline=soon())

        def hold(**_: Any) -> None:
            held.set()
            assert go.wait(30)

        client._boto.meta.events.register_first("before-sign.s3", hold)
        late: list[BaseException | None] = []

        def ask() -> None:
            try:
                late.append(client.head("k", deadline=soon()) and None)
            except BaseException as error:
                late.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert held.wait(30)
        client.close()
        go.set()
        asking.join(30)
        assert late == [None]
        assert server.connections == 2, "it did connect again, and the audit of descriptors finds it closed"


def test_a_body_that_is_read_on_after_close_leaves_no_connection() -> None:
    """`close` comes between the answer and its body. The body is read to its end, or the error says why not."""
    half, go = threading.Event(), threading.Event()

    def script(asked: Asked) -> Raw:
        half.set()
        assert go.wait(30)
        return range_of(asked, DATA)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, client="boto3")
        _closed.append(backend)
        memory = bytearray(len(DATA))
        found: list[Outcome] = []

        def read() -> None:
            found.extend(backend.get_into([Read(key("k"), memoryview(memory))], deadline=soon()))

        reading = threading.Thread(target=read)
        reading.start()
        assert half.wait(30)
        closing = threading.Thread(target=backend.close)
        closing.start()
        go.set()
        closing.join(30)
        reading.join(30)
    (outcome,) = found
    assert outcome == Outcome(Status.OK, len(DATA)) or isinstance(outcome.error, TransientError)
    assert not outcome.ok or memory == DATA


def test_an_error_is_kept_by_nobody() -> None:
    """Its traceback holds the frames of botocore, and with them the pool of connections."""

    def fail() -> None:
        raise ValueError("no")

    late = _Late(fail)
    late()
    with pytest.raises(ValueError, match="no"):
        late.wait(soon())
    assert late._error is None


# Bodies without a socket.


def test_under_mock_aws(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with mock_aws():
        plain = boto3.client("s3", region_name="us-east-1")
        plain.create_bucket(Bucket=BUCKET)
        backend = S3Backend(Settings(bucket=BUCKET, prefix="p/", region="us-east-1", client="boto3"))
        assert backend.put([Write(key("k"), [memoryview(DATA)])], deadline=soon()) == [Outcome(Status.OK, len(DATA))]
        for start, size in ((0, len(DATA)), (5, 1000), (99_000, 5000)):
            memory = bytearray(size)
            (outcome,) = backend.get_into([Read(key("k"), memoryview(memory), start)], deadline=soon())
            assert outcome.status is Status.OK, outcome
            assert memory[: outcome.nbytes] == DATA[start : start + size]
        assert backend.get_into([Read(key("none"), memoryview(bytearray(4)))], deadline=soon())[0].status is Status.MISS
        backend.close()
        plain.close()
    assert quiet(caplog)


@pytest.mark.parametrize("client", ["native", "aioboto3"])
def test_other_clients_are_refused_under_mock_aws(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would talk to Amazon. To a server of one's own they may talk meanwhile."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with mock_aws():
        with pytest.raises(ConfigError, match="only client=boto3 works"):
            S3Backend(Settings(bucket=BUCKET, region="us-east-1", client=client))
        with ScriptedServer(lambda asked: answer(200, etag='"e"')) as server:
            backend = open_s3(server.endpoint, client=client)
            if client == "native":
                assert backend.stat([key("k")], deadline=soon())[0].ok
            backend.close()


@pytest.mark.parametrize("sent", [len(DATA), 60_000], ids=["to its end", "cut"])
def test_bodies_are_read_without_a_word_of_botocore(caplog: pytest.LogCaptureFixture, sent: int) -> None:
    """The timeout is set again for each piece here, and botocore would log an error once there is no socket."""

    def script(asked: Asked) -> Raw:
        whole = range_of(asked, DATA)
        return Raw(whole.data[: len(whole.data) - len(DATA) + sent], "close")

    with ScriptedServer(script) as server:
        client = StockClient(settings_of(server.endpoint, read_timeout=600.0))
        memory = bytearray(len(DATA))
        views = [memoryview(memory)[at : at + 1000] for at in range(0, len(DATA), 1000)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore_backends.s3.stock._RESET_S", -1.0)
            if sent == len(DATA):
                assert client.get("k", 0, views, etag=None, deadline=soon()) is not None
                assert memory == DATA
            else:
                with pytest.raises(BodyBroken):
                    client.get("k", 0, views, etag=None, deadline=soon())
        client.close()
    assert quiet(caplog)


class _Stream(io.BytesIO):
    """A body as botocore's, over something that it does not know."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.asked = 0

    def set_socket_timeout(self, seconds: float) -> None:
        self.asked += 1
        raise AttributeError("no socket")


def test_a_body_of_an_old_botocore_is_read() -> None:
    """Its StreamingBody has no readinto."""

    class Old:
        def __init__(self) -> None:
            self._data = io.BytesIO(DATA)

        def read(self, amt: int) -> bytes:
            return self._data.read(amt)

    rest = _Rest(Old(), len(DATA), soon(), 600.0)
    memory = memoryview(bytearray(len(DATA)))
    at = 0
    while rest.left:
        at += rest.some(memory[at : at + 30_000])
    assert bytes(memory) == DATA


def test_a_body_of_an_unknown_kind_is_asked_once() -> None:
    body = _Stream(DATA)
    rest = _Rest(body, len(DATA), soon(), 0.0)
    memory = memoryview(bytearray(len(DATA)))
    at = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore_backends.s3.stock._RESET_S", -1.0)
        while rest.left:
            at += rest.some(memory[at : at + 30_000])
    assert (bytes(memory), body.asked) == (DATA, 1)
