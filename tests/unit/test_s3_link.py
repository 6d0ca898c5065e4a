"""The link of the native client: what TLS and servers say while a body is being sent, hedged requests on a dead server,
certificates, and endpoints of every kind."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.http import Connection, LinkError, Timing
from kvstore_backends.s3.native import NativeClient, uses_proxy
from kvstore_backends.s3.options import Settings
from kvstore_backends.s3.session import is_aws
from kvstore_backends.s3.transport import Hedging, Origin, Pool, Request, Resolver, Transport
from tests.s3_support import BUCKET, Asked, Raw, ScriptedServer, answer, open_s3, range_of, settings
from tests.servers.certificate import make_certificate

MIB = 1 << 20
DATA = hashlib.shake_256(b"link").digest(100_000)


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: S3Backend, name: object, data: bytes, seconds: float = 30.0) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon(seconds))[0]


def get(backend: S3Backend, size: int = 1000, seconds: float = 30.0) -> tuple[Outcome, bytes]:
    memory = bytearray(size)
    (outcome,) = backend.get_into([Read(key("k"), memoryview(memory))], deadline=soon(seconds))
    return outcome, bytes(memory[: outcome.nbytes])


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("link") / "server.pem")


@pytest.fixture
def tls(pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


# While a body is being sent.


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
def test_session_tickets_do_not_end_an_upload(tls: ssl.SSLContext, pem: Path, parts: bool) -> None:
    """TLS 1.3 servers send them after the handshake. Anything above 4 MiB over a fresh connection met them, and was
    taken for refused."""
    assert tls.num_tickets > 0

    def script(asked: Asked) -> Raw:
        if asked.method == "POST":
            done = "uploadId" in asked.target
            return answer(200, b"<R><UploadId>u</UploadId><ETag>e</ETag></R>" if not done else b"<R><ETag>e</ETag></R>")
        return answer(404) if asked.method == "HEAD" else answer(200, etag='"e"')

    data = bytes(12 * MIB)
    size = 5 * MIB if parts else 64 * MIB
    with ScriptedServer(script, tls=tls) as server:
        backend = open_s3(
            server.endpoint, ca_bundle=str(pem), conditional_writes="on", head_first="never", read_timeout=20.0,
            multipart_size=size, write_part_size=6 * MIB,
        )  # fmt: skip
        assert put(backend, "k", data) == Outcome(Status.OK, len(data))
        assert sum(len(asked.body) for asked in server.asked if asked.method == "PUT") == len(data)
        backend.close()


class Eager:
    """A server that says `first` as soon as it has the head of a request, then takes the body and answers 200."""

    def __init__(self, first: bytes, *, wait_for: int) -> None:
        self._first, self._wait_for = first, wait_for
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.got = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer, peer.makefile("rb") as file:
            while (line := file.readline()) and line != b"\r\n":
                pass
            peer.sendall(self._first)
            while self.got < self._wait_for and (piece := file.read1(MIB)):
                self.got += len(piece)
            peer.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

    def __enter__(self) -> Eager:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        self._listener.close()


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 3, b"HTTP/1"]
)
def test_interim_answers_do_not_end_an_upload(first: bytes) -> None:
    """Some servers send 100 unasked. (What may still become a 1xx does not end it either, but is none here.)"""
    data = bytes(24 * MIB)
    with Eager(first, wait_for=len(data)) as server:
        backend = open_s3(server.endpoint, conditional_writes="on", head_first="never")
        outcome = put(backend, "k", data)
        assert server.got == len(data)
        assert outcome == Outcome(Status.OK, len(data)) or first == b"HTTP/1"
        backend.close()


# Hedged requests.


class Deaf:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._sockets.append(self._listener.accept()[0])
            except OSError:
                return

    def __enter__(self) -> Deaf:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for sock in self._sockets:
            sock.close()


def warm(delay: float) -> Hedging:
    """A hedging that sends a second request after `delay` seconds."""
    hedging = Hedging(samples=4)
    for _ in range(200):
        hedging.begin("GetObject")
        hedging.note("GetObject", delay, throttled=False, won=False)
    return hedging


def test_two_requests_to_a_silent_server_end_with_its_silence() -> None:
    """Not at a deadline that may be far."""
    with Deaf() as server:
        pool = Pool(Resolver(), connect_timeout=5.0, tls=ssl.create_default_context, most_idle=4)
        transport = Transport(pool, warm(0.01))
        request = Request(Origin("http", "127.0.0.1", server.port), "GET", b"GET / HTTP/1.1\r\n\r\n")
        begin = time.monotonic()
        with pytest.raises(LinkError) as caught:
            transport.exchange(request, Timing(begin + 600, 0.3), hedge="GetObject")
        assert caught.value.kind == "silence"
        assert time.monotonic() - begin < 30
        assert transport.hedging is not None
        assert transport.hedging.sent == 1
        pool.close()


def test_a_second_connection_that_cannot_be_made_does_not_hold_up_the_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets a tenth of a second, not the connect timeout."""
    asked: list[float] = []
    with ScriptedServer(lambda asked: answer(200)) as server:
        pool = Pool(Resolver(), connect_timeout=60.0, tls=ssl.create_default_context, most_idle=4)
        transport = Transport(pool, warm(0.01))
        origin = Origin("http", "127.0.0.1", server.port)
        connect = pool.connect

        def second(origin: Origin, timing: Timing) -> Connection:
            asked.append(timing.until - time.monotonic())
            raise LinkError("connect", "dropped")

        first = connect(origin, Timing(soon(), 30.0))
        pool.give(origin, first)
        monkeypatch.setattr(pool, "connect", second)
        monkeypatch.setattr(Connection, "readable", lambda self, seconds=0.0: False)
        request = Request(origin, "GET", b"GET / HTTP/1.1\r\n\r\n")
        connection, head = transport.exchange(request, Timing(soon(600), 30.0), hedge="GetObject")
        assert head.status == 200
        assert len(asked) == 1
        assert asked[0] <= 0.1
        connection.close()
        pool.close()


# Certificates.


@pytest.mark.parametrize("client", ["native", "boto3", "aioboto3"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_bundle_that_is_none_is_refused_at_open(client: str, content: str | None, tmp_path: Path) -> None:
    """It was a transient error of each call, without a name."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        open_s3("https://127.0.0.1:9", client=client, ca_bundle=str(path))


def test_a_bundle_of_the_environment_is_used_and_refused_alike(
    tls: ssl.SSLContext, pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE"):
        open_s3("https://127.0.0.1:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pem))
    with ScriptedServer(lambda asked: range_of(asked, DATA), tls=tls) as server:
        backend = open_s3(server.endpoint)
        assert get(backend) == (Outcome(Status.OK, 1000), DATA[:1000])
        backend.close()


def test_a_certificate_of_another_host_is_named(tls: ssl.SSLContext, pem: Path) -> None:
    with ScriptedServer(lambda asked: range_of(asked, DATA), tls=tls) as server:
        resolver = Resolver(lambda *_: [(socket.AF_INET, 1, 6, "", ("127.0.0.1", server.port))])
        own = settings(f"https://elsewhere.example:{server.port}", ca_bundle=str(pem))
        backend = S3Backend(own, client=NativeClient(own, resolver=resolver))
        outcome, _ = get(backend)
        assert isinstance(outcome.error, PermanentError)
        assert "elsewhere.example" in str(outcome.error)
        assert "match" in str(outcome.error).lower()
        backend.close()


def test_plain_http_where_tls_is_meant_and_the_other_way_round(tls: ssl.SSLContext, pem: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def plain() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(100)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=plain)
    thread.start()
    backend = open_s3(f"https://127.0.0.1:{listener.getsockname()[1]}", ca_bundle=str(pem))
    outcome, _ = get(backend)
    assert isinstance(outcome.error, TransientError)
    assert "does it speak TLS?" in str(outcome.error)
    backend.close()
    thread.join(30)
    listener.close()
    with ScriptedServer(lambda asked: range_of(asked, DATA), tls=tls) as server:
        backend = open_s3(server.endpoint.replace("https:", "http:"), read_timeout=5.0)
        outcome, _ = get(backend)
        assert isinstance(outcome.error, TransientError)
        backend.close()


# Endpoints.


@pytest.mark.parametrize("path", ["", "/", "/gateway", "/a/b/"])
@pytest.mark.parametrize("client", ["native", "boto3", "aioboto3"])
def test_an_endpoint_may_have_a_path(client: str, path: str) -> None:
    def script(asked: Asked) -> Raw:
        return range_of(asked, DATA) if asked.method == "GET" else answer(200, etag='"v1"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint + path, "p/", client=client, conditional_writes="on", hedge_reads=False)
        for _ in range(2):
            assert get(backend) == (Outcome(Status.OK, 1000), DATA[:1000])
            assert put(backend, "k", b"1").stored
        name = f"{path.rstrip('/')}/{BUCKET}/p/{key('k').hex()[:2]}/{key('k').hex()}"
        assert {asked.path for asked in server.asked} == {name}
        backend.close()


@pytest.mark.parametrize(
    "endpoint",
    ["host:9000", "ftp://host", "http://", "http://host:99999", "http://host:0", "http://user:hunter2@host",
     "http://host?x=1", "http://host/#x", "http://[::1", "http://host:port"],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint_url must be") as caught:
        Settings(bucket="bucket", endpoint_url=endpoint)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def six() -> Iterator[ScriptedServer]:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
    server = ScriptedServer(lambda asked: range_of(asked, DATA))
    server._listener.close()
    server._listener = listener
    with server:
        server.endpoint = f"http://[::1]:{listener.getsockname()[1]}"
        yield server


@pytest.mark.parametrize("client", ["native", "boto3", "aioboto3"])
def test_an_endpoint_may_be_an_address_of_ipv6(client: str, six: ScriptedServer) -> None:
    backend = open_s3(six.endpoint, client=client, hedge_reads=False)
    for _ in range(2):
        assert get(backend) == (Outcome(Status.OK, 1000), DATA[:1000])
    assert six.asked[-1].headers["host"] == six.endpoint.removeprefix("http://")
    backend.close()


def test_a_bucket_with_dots_is_not_put_into_a_host_name_over_tls() -> None:
    """No wildcard certificate covers it."""
    for addressing in ("auto", "virtual"):
        backend = S3Backend(Settings(bucket="a.bucket.with.dots", region="us-west-2", addressing=addressing,
                                     access_key_id="a", secret_access_key="s"))  # fmt: skip
        client = backend.client
        assert isinstance(client, NativeClient)
        url = client._boto.generate_presigned_url("get_object", Params={"Bucket": "a.bucket.with.dots", "Key": "k"})
        assert url.startswith("https://s3.us-west-2.amazonaws.com/a.bucket.with.dots/k")
        backend.close()


@pytest.mark.parametrize("prefix", ["a b/", "+plus/", "50%/", "ü/日本/", "a=b&c/", "q?x/", "#h/", "'quote\"/",
                                    "a;b,c:@$!*()~/", "%2F/", "<xml>&amp;/", "back\\slash/", "{}|^`/"])  # fmt: skip
def test_a_prefix_may_hold_any_characters(prefix: str) -> None:
    from urllib.parse import quote, unquote

    there: set[str] = set()

    def script(asked: Asked) -> Raw:
        name = unquote(asked.path)
        if asked.method == "PUT":
            there.add(name)
            return answer(200, etag='"e"')
        if asked.method == "GET":
            return range_of(asked, DATA)
        return answer(200 if name in there else 404, etag='"e"')

    for client in ("native", "boto3", "aioboto3"):
        there.clear()
        with ScriptedServer(script) as server:
            backend = open_s3(server.endpoint, prefix, client=client, conditional_writes="on", miss_memory=0.0,
                              hedge_reads=False)  # fmt: skip
            for number in range(2):
                assert put(backend, number, b"1").ok
                assert backend.stat([key(number)], deadline=soon())[0].ok
                assert get(backend)[0].ok
            assert there == {f"/{BUCKET}/{backend.object_name(key(number))}" for number in range(2)}
            wire = {asked.path for asked in server.asked if asked.method == "PUT"}
            assert wire == {quote(name, safe="/~") for name in there}
            backend.close()


# Proxies, and what is Amazon's.


@pytest.mark.parametrize(
    ("no_proxy", "bucket", "endpoint", "proxied"),
    [
        ("", "bucket", "https://s3.us-west-2.amazonaws.com", True),
        ("s3.us-west-2.amazonaws.com", "bucket", "https://s3.us-west-2.amazonaws.com", False),
        (".us-west-2.amazonaws.com", "bucket", "https://s3.us-west-2.amazonaws.com", False),
        ("bucket.s3.us-west-2.amazonaws.com", "bucket", "https://s3.us-west-2.amazonaws.com", False),
        ("s3.amazonaws.com", "bucket", "https://s3.us-west-2.amazonaws.com", True),
        (
            "s3express-usw2-az1.us-west-2.amazonaws.com",
            "b--usw2-az1--x-s3",
            "https://s3.us-west-2.amazonaws.com",
            False,
        ),
        ("minio", "bucket", "https://minio:9000", False),
        ("minio:9000", "bucket", "https://minio:9000", False),
        ("*", "bucket", "https://minio:9000", False),
        ("", "bucket", "http://minio:9000", False),  # the variable is for https
    ],
)
def test_which_endpoints_are_behind_a_proxy(
    no_proxy: str, bucket: str, endpoint: str, proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that requests go to, which has the region and the bucket in it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert uses_proxy(Settings(bucket=bucket, region="us-west-2"), endpoint) is proxied


def test_what_is_amazons() -> None:
    for endpoint in ("https://s3.us-west-2.amazonaws.com", "https://s3.cn-north-1.amazonaws.com.cn",
                     "https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com"):  # fmt: skip
        assert is_aws(endpoint)
    for endpoint in ("http://127.0.0.1:8333", "https://amazonaws.com.example", "https://notamazonaws.com"):
        assert not is_aws(endpoint)


def test_an_endpoint_of_the_environment_is_not_taken_for_amazons(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_ENDPOINT_URL_S3 points botocore elsewhere: whether that honours conditions is tried."""
    stored: list[Any] = []

    def script(asked: Asked) -> Raw:
        stored.append(asked)
        return answer(404) if asked.method == "HEAD" else answer(204 if asked.method == "DELETE" else 200, etag='"e"')

    with ScriptedServer(script) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        given = {**{name: getattr(settings(server.endpoint), name) for name in ("bucket", "access_key_id", "region")},
                 "secret_access_key": "s", "addressing": "path"}  # fmt: skip
        backend = S3Backend(Settings(**given))
        assert put(backend, "k", b"1").ok
        assert [asked.method for asked in server.asked if "/probe/" in asked.path] == ["PUT", "PUT", "DELETE"]
        backend.close()
