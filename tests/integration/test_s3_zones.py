"""Several S3 Express buckets, one per zone: a record is in all of them, and each machine reads that of its own zone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import kvstore
from kvstore.backend import Status
from kvstore.errors import ConfigError, TransientError
from kvstore_backends.s3 import S3Backend, zones
from kvstore_backends.s3.session import make_session
from tests.servers.express_stub import BUCKET, ExpressStub
from tests.servers.fault_proxy import FaultProxy
from tests.servers.s3_support import error_of, get, key, put, secrets, settings, soon

ZONES = ("usw2-az1", "usw2-az2", "usw2-az3")
NAMES = [f"record {number}" for number in range(24)]


def bucket(zone: str) -> str:
    return f"kv--{zone}--x-s3"


def url(zone: str, endpoint: str, **options: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"s3://{bucket(zone)}/kv?endpoint_url={endpoint}&region=us-west-2&conditional_writes=on{more}"


@contextmanager
def store_in(zone: str, stub: ExpressStub, *, endpoints: dict[str, str] | None = None) -> Iterator[kvstore.Store]:
    """As a machine in this zone opens it."""
    endpoints = endpoints or {}
    urls = [url(each, endpoints.get(each, stub.endpoint)) for each in ZONES]
    own = secrets(zone=zone, miss_memory=0.0, connect_timeout=0.5, read_timeout=2.0, hedge_reads=False)
    with kvstore.open_store(urls, replicas=3, backend_options=own) as store:
        yield store


def read_from(stub: ExpressStub) -> set[str]:
    """The buckets that gets and heads went to since the last call."""
    found = {seen.bucket for seen in stub.seen if seen.operation in ("get", "head")}
    stub.seen.clear()
    return found


def test_each_machine_reads_from_its_own_zone(express_stub: ExpressStub) -> None:
    with store_in("usw2-az1", express_stub) as store:
        assert all(outcome.ok for outcome in store.put_many({name: name.encode() for name in NAMES}))
    assert {place for place, _ in express_stub.objects} == {bucket(zone) for zone in ZONES}
    for zone in ZONES:
        with store_in(zone, express_stub) as store:
            express_stub.seen.clear()
            assert store.get_many(NAMES) == [name.encode() for name in NAMES]
            assert store.hit_prefix([*NAMES, "none"]) == len(NAMES)
            zones_asked = read_from(express_stub)
            assert bucket(zone) in zones_asked
            assert store.get_many(NAMES, into=[bytearray(len(name)) for name in NAMES]) == [len(n) for n in NAMES]
            assert read_from(express_stub) == {bucket(zone)}


def test_the_other_zones_stand_in_for_what_is_missing_and_for_one_that_is_away(express_stub: ExpressStub) -> None:
    with store_in("usw2-az2", express_stub) as store:
        store.put_many({name: name.encode() for name in NAMES})
        near = [place for place in express_stub.objects if place[0] == bucket("usw2-az2")]
        for place in near[::2]:
            del express_stub.objects[place]
        assert store.get_many(NAMES) == [name.encode() for name in NAMES]
        assert store.hit_prefix(NAMES) == len(NAMES)
    with (
        FaultProxy(express_stub.port) as proxy,
        store_in("usw2-az2", express_stub, endpoints={"usw2-az2": proxy.endpoint}) as store,
    ):
        assert store.get_many(NAMES) == [name.encode() for name in NAMES]
        proxy.refuse()
        assert store.get_many(NAMES) == [name.encode() for name in NAMES]


def test_machines_agree_on_where_records_are_whatever_their_zone(express_stub: ExpressStub) -> None:
    """With two copies over three zones: nearness orders reads, it does not choose the buckets."""
    places = []
    for zone in (*ZONES, "usw2-az4"):
        own = secrets(zone=zone)
        urls = [url(each, express_stub.endpoint) for each in ZONES]
        with kvstore.open_store(urls, replicas=2, backend_options=own) as store:
            store.put_many(dict.fromkeys(NAMES, b"x"))
            places.append(set(express_stub.objects))
    assert places == [places[0]] * 4
    assert len(places[0]) == 2 * len(NAMES)


# Which zone.


class _Metadata(BaseHTTPRequestHandler):
    """The instance's metadata service, version 2."""

    answers: tuple[int, bytes] = (200, b"usw2-az2")

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, b"token")

    def do_GET(self) -> None:
        good = self.headers["X-aws-ec2-metadata-token"] == "token" and self.path == "/" + zones._ZONE
        self._answer(*self.answers if good else (401, b""))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Metadata]]:
    class Handler(_Metadata):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_AVAILABILITY_ZONE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}/")
    monkeypatch.setattr(zones, "_known", {})
    yield Handler
    server.shutdown()
    thread.join(10)
    server.server_close()


def distance(zone: str = "auto", name: str = BUCKET) -> int:
    backend = S3Backend(settings("http://127.0.0.1:9", name, zone=zone, addressing="auto"))
    try:
        return backend.distance
    finally:
        backend.close()


def test_the_metadata_service_tells_the_zone(metadata: type[_Metadata], monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(name=bucket("usw2-az2")) == 0
    metadata.answers = (500, b"")  # asked once
    assert distance(name=bucket("usw2-az1")) == 1
    monkeypatch.setenv("AWS_AVAILABILITY_ZONE_ID", "usw2-az1")
    assert distance(name=bucket("usw2-az1")) == 0
    assert distance("usw2-az3", bucket("usw2-az1")) == 1
    assert distance("usw2-az3", "plain-bucket") == 2


@pytest.mark.parametrize("answer", [(404, b""), (200, b"us-west-2a"), (200, b"<html>" * 2000)])
def test_a_zone_that_is_not_told_is_unknown(metadata: type[_Metadata], answer: tuple[int, bytes]) -> None:
    metadata.answers = answer
    assert [distance(name=bucket(zone)) for zone in ZONES] == [0, 0, 0]


def test_nobody_is_asked_where_that_is_forbidden(metadata: type[_Metadata], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert distance(name=bucket("usw2-az1")) == 0
    assert not zones._known


def test_a_name_is_not_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="us-west-2a"):
        distance("us-west-2a")
    monkeypatch.setenv("AWS_AVAILABILITY_ZONE_ID", "us-west-2b")
    with pytest.raises(ConfigError, match="AWS_AVAILABILITY_ZONE_ID"):
        zones.own_zone("auto", make_session(settings("http://127.0.0.1:9", BUCKET)))


# Sessions and deadlines.


def test_a_session_that_is_not_answered_costs_no_call_its_deadline(express_stub: ExpressStub) -> None:
    """Neither the lane that would ask for it nor those that wait for it."""
    backend = S3Backend(settings(express_stub.endpoint, BUCKET, region="us-west-2", addressing="auto", miss_memory=0.0))
    express_stub.gate.clear()
    late: list[float] = []

    def work() -> None:
        begin = time.monotonic()
        error_of(get(backend, "k", 1, seconds=0.2)[0], TransientError, "deadline")
        late.append(time.monotonic() - begin)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(late) == 8
    assert max(late) < 3.0, "less than read_timeout, which is what CreateSession itself may take"
    express_stub.gate.set()
    assert put(backend, "k", b"1").status is Status.OK
    assert backend.stat([key("k")], deadline=soon())[0].ok
    backend.close()
    assert express_stub.counts["create_session"] == 1
