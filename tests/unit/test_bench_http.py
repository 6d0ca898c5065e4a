"""The raw HTTP ceiling moves the bytes it says, over plain HTTP and TLS, and lies about nothing."""

from __future__ import annotations

import ast
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.config import Config

from kvstore_bench import ceilings_http
from kvstore_bench.ceilings import Lanes
from kvstore_bench.ceilings_http import HttpGet, HttpPlace, HttpPut
from tests.servers.fault_proxy import Answer, Cut, FaultProxy
from tests.servers.null_server import NullServer

SIZES = (0, 1, 4096, 1_000_003)


def place_at(endpoint: str, certificate: Path | None = None) -> HttpPlace:
    client = {
        "endpoint_url": endpoint, "region_name": "us-east-1", "verify": str(certificate) if certificate else None,
        "config": Config(signature_version="s3v4", retries={"total_max_attempts": 1}),
    }  # fmt: skip
    return HttpPlace("b", "raw", client, {"aws_access_key_id": "k", "aws_secret_access_key": "s"})


@pytest.fixture(params=["plain", "tls"])
def place(
    request: pytest.FixtureRequest, null_server: NullServer, null_server_tls: NullServer, certificate: Path
) -> HttpPlace:
    if request.param == "plain":
        return place_at(null_server.endpoint)
    return place_at(null_server_tls.endpoint, certificate)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    with Lanes(4) as pool:
        yield pool


def views(count: int, nbytes: int, start: int = 0) -> list[memoryview]:
    return [memoryview(bytearray((start + index) % 256 for index in range(n, n + nbytes))) for n in range(count)]


def names_in(endpoint: str, certificate: Path | None = None) -> bytes:
    port = int(endpoint.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/b?list-type=2&prefix=raw")
    body = connection.getresponse().read()
    connection.close()
    return body


def test_the_file_imports_nothing_of_kvstore() -> None:
    tree = ast.parse(Path(ceilings_http.__file__).read_text(encoding="utf-8"))
    found = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) if n.level == 0 or n.module]
    found += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert not [name for name in found if name.startswith("kvstore")]


@pytest.mark.parametrize("nbytes", SIZES[1:])
def test_get_brings_the_bytes(place: HttpPlace, lanes: Lanes, nbytes: int) -> None:
    sources, destinations = views(5, nbytes), [memoryview(bytearray(nbytes)) for _ in range(5)]
    side = HttpGet(place, sources, destinations)
    try:
        for count in (1, 2, 4):
            for view in destinations:
                view[:] = bytes(nbytes)
            one = lanes.run(side.jobs(count), 2)
            assert destinations == sources
            assert len(one.calls) == 2 * count
        assert side.settle(3) == 3 * 5 * nbytes
    finally:
        side.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_put_stores_them_and_settle_removes_them(null_server: NullServer, lanes: Lanes, nbytes: int) -> None:
    sources = views(5, nbytes)
    before = null_server.stats()
    side = HttpPut(place_at(null_server.endpoint), sources)
    try:
        lanes.run(side.jobs(3))
        after = null_server.stats()
        assert after["put"] - before["put"] == 5
        assert after["bytes_in"] - before["bytes_in"] == 5 * nbytes
        assert names_in(null_server.endpoint).count(b"<Key>") == 5
        assert side.settle(1) == 5 * nbytes
        assert names_in(null_server.endpoint).count(b"<Key>") == 0
        lanes.run(side.jobs(2))
        assert names_in(null_server.endpoint).count(b"<Key>") == 5, "new names each time"
    finally:
        side.close()
    assert names_in(null_server.endpoint).count(b"<Key>") == 0


def test_connections_are_kept(null_server: NullServer, lanes: Lanes) -> None:
    side = HttpGet(place_at(null_server.endpoint), views(4, 100), [memoryview(bytearray(100)) for _ in range(4)])
    try:
        lanes.run(side.jobs(4))
        before = null_server.stats()["connections"]
        for _ in range(3):
            lanes.run(side.jobs(4), 5)
        assert null_server.stats()["connections"] - before == 1, "that of this very question"
    finally:
        side.close()


def test_whatever_is_not_a_success_ends_it(null_proxy: FaultProxy, lanes: Lanes) -> None:
    place = place_at(null_proxy.endpoint)
    sources, destinations = views(2, 100_000), [memoryview(bytearray(100_000)) for _ in range(2)]
    for fault, said in (
        (Answer(503, "SlowDown"), "503"),
        (Cut("fin", after=1000), "ended after"),
        (Cut("fin", after=None), "closed a connection"),
    ):
        side = HttpGet(place, sources, destinations)
        try:
            null_proxy.next(fault, only="GET")
            with pytest.raises(OSError, match=said):
                lanes.run(side.jobs(1))
        finally:
            side.close()


def test_another_length_is_an_error(null_server: NullServer, lanes: Lanes) -> None:
    side = HttpGet(place_at(null_server.endpoint), views(1, 100), [memoryview(bytearray(99))])
    try:
        with pytest.raises(OSError, match="got 100 bytes where 99"):
            lanes.run(side.jobs(1))
    finally:
        side.close()
