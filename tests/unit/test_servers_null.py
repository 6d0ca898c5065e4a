"""The null server does what a client's ceiling and the benchmarks rely on."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.null_server import NullServer, build

DATA = bytes(range(256)) * 1000


class Client:
    """One keep-alive connection."""

    def __init__(self, server: NullServer) -> None:
        if server.certificate:
            context = ssl.create_default_context(cafile=str(server.certificate))
            self.connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", server.port, timeout=10, context=context
            )
        else:
            self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)

    def __call__(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        self.connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = self.connection.getresponse()
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, answer.read()


@pytest.fixture(params=["plain", "tls"])
def client(request: pytest.FixtureRequest, null_server: NullServer, null_server_tls: NullServer) -> Iterator[Client]:
    made = Client(null_server if request.param == "plain" else null_server_tls)
    yield made
    made.connection.close()


def test_what_is_put_comes_back(client: Client) -> None:
    assert client("PUT", "/b/whole", DATA, x_amz_meta_kind="test") == (200, b"")
    etag = client.headers["etag"]
    assert client("GET", "/b/whole") == (200, DATA)
    assert client.headers["etag"] == etag
    assert client.headers["x-amz-meta-kind"] == "test"
    assert client("HEAD", "/b/whole") == (200, b"")
    assert client.headers["content-length"] == str(len(DATA))
    assert client("DELETE", "/b/whole") == (204, b"")
    assert client("GET", "/b/whole")[0] == client("HEAD", "/b/whole")[0] == 404


def test_ranges(client: Client) -> None:
    client("PUT", "/b/ranged", DATA)
    assert client("GET", "/b/ranged", Range="bytes=10-19") == (206, DATA[10:20])
    assert client.headers["content-range"] == f"bytes 10-19/{len(DATA)}"
    assert client("GET", "/b/ranged", Range="bytes=-5") == (206, DATA[-5:])
    assert client("GET", "/b/ranged", Range="bytes=255990-999999") == (206, DATA[255990:])
    assert client("GET", "/b/ranged", Range="bytes=256000-")[0] == 416
    assert client("GET", "/b/ranged", If_Match='"other"')[0] == 412


def test_write_once(client: Client) -> None:
    client("DELETE", "/b/once")
    assert client("PUT", "/b/once", b"first", If_None_Match="*")[0] == 200
    assert client("PUT", "/b/once", b"second", If_None_Match="*")[0] == 412
    assert client("GET", "/b/once") == (200, b"first")


def test_sixteen_writers_of_one_key_have_one_winner(null_server: NullServer) -> None:
    found: list[int] = []
    barrier = threading.Barrier(16)

    def race(number: int) -> None:
        client = Client(null_server)
        barrier.wait()
        found.append(client("PUT", "/b/race", bytes([number]) * 100_000, If_None_Match="*")[0])
        client.connection.close()

    threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200, *[412] * 15]
    client = Client(null_server)
    assert len(set(client("GET", "/b/race")[1])) == 1
    client.connection.close()


def test_multipart(client: Client) -> None:
    upload = re.search(rb"<UploadId>(\w+)<", client("POST", "/b/parts?uploads", b"")[1])
    assert upload is not None
    number = upload[1].decode()
    for part in (2, 1):
        assert client("PUT", f"/b/parts?partNumber={part}&uploadId={number}", DATA[part:])[0] == 200
    assert client("GET", "/b/parts")[0] == 404, "invisible until complete"
    assert client("POST", f"/b/parts?uploadId={number}", b"<x/>")[0] == 200
    assert client("GET", "/b/parts") == (200, DATA[1:] + DATA[2:])
    assert client("POST", f"/b/parts?uploadId={number}", b"<x/>")[0] == 404, "once only"


def test_copy_list_and_delete_many(client: Client) -> None:
    names = [f"/l/list/{number:02}" for number in range(12)]
    for name in names:
        client("PUT", name, name.encode())
    assert client("PUT", "/l/list/copy", b"", x_amz_copy_source="l/list/03")[0] == 200
    assert client("GET", "/l/list/copy") == (200, b"/l/list/03")
    first = client("GET", "/l?list-type=2&prefix=list/&max-keys=5")[1].decode()
    found = re.findall("<Key>(.*?)</Key>", first)
    token = re.search("<NextContinuationToken>(.*?)<", first)
    assert token is not None
    rest = client("GET", f"/l?list-type=2&prefix=list/&continuation-token={token[1]}")[1].decode()
    assert [*found, *re.findall("<Key>(.*?)</Key>", rest)] == [*(name[3:] for name in names), "list/copy"]
    body = "".join(f"<Object><Key>{name[3:]}</Key></Object>" for name in [*names, "/l/list/copy"]).encode()
    assert client("POST", "/l?delete", body)[0] == 200
    assert b"<KeyCount>0<" in client("GET", "/l?list-type=2&prefix=list/")[1]


def test_deleted_memory_is_used_again() -> None:
    with NullServer(arena_mib=8) as server:
        client = Client(server)
        for turn in range(6):
            assert client("PUT", f"/b/{turn}", bytes([turn]) * (3 << 20))[0] == 200
            assert client("GET", f"/b/{turn}") == (200, bytes([turn]) * (3 << 20))
            client("DELETE", f"/b/{turn}")
        assert client("PUT", "/b/large", bytes(9 << 20))[0] == 507
        assert client("PUT", "/b/small", bytes(1 << 20))[0] == 200
        client.connection.close()


def test_dropped_bodies_keep_their_length() -> None:
    with NullServer(drop=True) as server:
        client = Client(server)
        assert client("PUT", "/b/k", DATA)[0] == 200
        status, body = client("GET", "/b/k")
        assert (status, len(body)) == (200, len(DATA))
        assert body != DATA
        assert client("GET", "/b/k", Range="bytes=100-199") == (206, body[100:200])
        client.connection.close()


def test_latency_bandwidth_and_throttling_can_be_set(null_server: NullServer) -> None:
    client = Client(null_server)
    client("PUT", "/b/slow", bytes(2_000_000))
    try:
        null_server.set(latency_ms=30)
        start = time.monotonic()
        client("HEAD", "/b/slow")
        assert time.monotonic() - start >= 0.030
        null_server.set(latency_ms=0, mb_per_s=20)
        start = time.monotonic()
        client("GET", "/b/slow")
        assert time.monotonic() - start >= 0.095
        null_server.set(mb_per_s=0, slowdown_percent=90)
        before = null_server.stats()
        answers = [client("GET", "/b/none")[0] for _ in range(200)]
        assert answers.count(503) == 180
        assert answers.count(404) == 20
        after = null_server.stats()
        assert after["get"] - before["get"] == 200
        assert after["slowdown"] - before["slowdown"] == 180
    finally:
        null_server.set(latency_ms=0, mb_per_s=0, slowdown_percent=0)
        client.connection.close()


def test_it_can_hang_and_comes_back(null_server: NullServer) -> None:
    null_server.set(hang=1)
    client = Client(null_server)
    client.connection.timeout = 0.2
    with pytest.raises(TimeoutError):
        client("GET", "/b/k")
    client.connection.close()
    null_server.set(hang=0)
    assert client("GET", "/b/never")[0] == 404
    client.connection.close()


def test_it_is_compiled_once(tmp_path: Path) -> None:
    first = build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp


def test_without_a_compiler_the_message_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get install gcc"):
        build(tmp_path)
