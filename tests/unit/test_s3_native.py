"""The native client against a server that answers by a script: ranges, versions, broken bodies, throttling, deadlines,
credentials, and how many requests all of that takes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.errors import Throttled
from kvstore_backends.s3.http import Timing
from kvstore_backends.s3.native import NativeClient
from kvstore_backends.s3.transport import Hedging, Origin, Pool, Resolver
from tests.s3_support import (
    SECRET_KEY,
    Asked,
    Raw,
    ScriptedServer,
    answer,
    error_answer,
    open_s3,
    range_of,
)  # fmt: skip

DATA = bytes(range(256)) * 4096  # 1 MiB


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def get(backend: S3Backend, *ranges: tuple[int, int], name: object = "k", seconds: float = 30.0) -> Any:
    """Outcomes and bytes of ranges (offset, length) of one record."""
    memory = [bytearray(length) for _, length in ranges]
    reads = [Read(key(name), memoryview(into), start) for into, (start, _) in zip(memory, ranges, strict=True)]
    outcomes = backend.get_into(reads, deadline=soon(seconds))
    return [(o, bytes(into[: o.nbytes])) for o, into in zip(outcomes, memory, strict=True)]


def failure(outcome: Outcome) -> KVStoreError:
    assert outcome.error is not None, outcome
    assert SECRET_KEY not in str(outcome.error) + repr(outcome.error)
    return outcome.error


def serving(data: bytes) -> Callable[[Asked], Raw]:
    return lambda asked: range_of(asked, data) if asked.method == "GET" else answer(200, etag='"v1"')


# Ranges.


def test_header_table_and_first_layers_come_in_one_request() -> None:
    with ScriptedServer(serving(DATA)) as server:
        backend = open_s3(server.endpoint)
        got = get(backend, (4096, 1000), (0, 700), (5096, 3000), (900_000, 10))
        assert [data for _, data in got] == [DATA[4096:5096], DATA[:700], DATA[5096:8096], DATA[900_000:900_010]]
        assert sorted(asked.headers["range"] for asked in server.asked) == ["bytes=0-8095", "bytes=900000-900009"]
        backend.close()


def test_a_range_past_the_end_is_short_and_one_behind_it_empty() -> None:
    with ScriptedServer(serving(DATA[:1000])) as server:
        backend = open_s3(server.endpoint, gap=0)
        got = get(backend, (0, 1500), (990, 20), (5000, 10), (1000, 1), (3, 0))
        assert [(o.status, data) for o, data in got] == [
            (Status.OK, DATA[:1000]), (Status.OK, DATA[990:1000]), (Status.OK, b""), (Status.OK, b""), (Status.OK, b""),
        ]  # fmt: skip
        backend.close()


def test_a_large_range_is_split_and_put_together() -> None:
    with ScriptedServer(serving(DATA)) as server:
        backend = open_s3(server.endpoint, part_size=64 << 10, part_adapt=False, hedge_reads=False)
        assert get(backend, (10, 1 << 20)) == [((Status.OK, (1 << 20) - 10, None), DATA[10:])]
        assert len(server.asked) == 16
        backend.close()


@pytest.mark.parametrize("start", [0, 1000, 2_000_000])
def test_a_server_that_ignores_ranges(start: int) -> None:
    """200 with everything: what was asked for is found in it."""
    with ScriptedServer(lambda asked: answer(200, DATA, etag='"v1"')) as server:
        backend = open_s3(server.endpoint)
        for _ in range(2):
            ((outcome, data),) = get(backend, (start, 500))
            assert (outcome.status, data) == (Status.OK, DATA[start : start + 500])
        backend.close()


def test_an_answer_with_another_range_is_refused() -> None:
    def script(asked: Asked) -> Raw:
        return answer(206, DATA[:10], content_range="bytes 0-9/100", etag='"v1"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        ((outcome, _),) = get(backend, (5, 10))
        assert "another range" in str(failure(outcome))
        backend.close()


def test_404_is_a_miss_but_not_of_the_bucket() -> None:
    code = ["NoSuchKey"]
    with ScriptedServer(lambda asked: error_answer(404, code[0])) as server:
        backend = open_s3(server.endpoint)
        for _ in range(2):
            assert get(backend, (0, 10)) == [((Status.MISS, 0, None), b"")]
        code[0] = "NoSuchBucket"
        ((outcome, _),) = get(backend, (0, 10))
        assert "there is no bucket" in str(failure(outcome))
        backend.close()


def test_a_call_is_made_by_a_trace_after_the_first_one_a_miss_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of botocore costs three times as much, and most lookups are misses."""
    full: list[str] = []
    with ScriptedServer(
        lambda asked: error_answer(404, "NoSuchKey") if asked.method == "GET" else answer(404)
    ) as server:
        backend = open_s3(server.endpoint, miss_memory=0.0)
        client = backend.client
        assert isinstance(client, NativeClient)
        make = client._full

        def counted(operation: str, *args: Any, **more: Any) -> dict[str, Any]:
            full.append(operation)
            return make(operation, *args, **more)

        monkeypatch.setattr(client, "_full", counted)
        assert get(backend, (0, 10)) == [((Status.MISS, 0, None), b"")]
        for number in range(5):
            assert backend.stat([key(number)], deadline=soon())[0].status is Status.MISS
            assert get(backend, (0, 10), name=number) == [((Status.MISS, 0, None), b"")]
        assert sorted(full) == ["GetObject", "HeadObject"]
        backend.close()


# Versions.


def test_parts_of_two_versions_are_a_miss() -> None:
    def script(asked: Asked) -> Raw:
        first = int(asked.headers["range"][6:].split("-")[0])
        return range_of(asked, DATA, '"v1"' if first < 500_000 else '"v2"')

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, part_size=64 << 10, part_adapt=False)
        landed: list[int] = []
        memory = bytearray(1 << 20)
        reads = [Read(key("k"), memoryview(memory), 0, lambda: landed.append(1))]
        assert backend.get_into(reads, deadline=soon()) == [(Status.MISS, 0, None)]
        assert not landed
        backend.close()


def test_follow_ups_insist_on_the_version() -> None:
    """If-Match on every request after the first; 412 is a miss."""
    seen: list[str | None] = []

    def script(asked: Asked) -> Raw:
        seen.append(asked.headers.get("if-match"))
        if len(seen) == 1:
            whole = range_of(asked, DATA[:100_000])
            return Raw(whole.data[:50_000], "close")
        return error_answer(412, "PreconditionFailed")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, lanes=1)
        assert get(backend, (0, 100_000)) == [((Status.MISS, 0, None), b"")]
        assert seen == [None, '"v1"']
        backend.close()


# Broken bodies.


@pytest.mark.parametrize("then", ["close", "reset", "hang"])
def test_a_broken_body_is_followed_up(then: str) -> None:
    """Only what is missing is asked for again, of the same version."""

    def script(asked: Asked) -> Raw:
        whole = range_of(asked, DATA[:300_000])
        return Raw(whole.data[:100_000], then) if len(server.asked) <= 2 else whole

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint, read_timeout=0.2, hedge_reads=False)
        got = get(backend, (0, 100_000), (100_000, 200_000))
        assert [data for _, data in got] == [DATA[:100_000], DATA[100_000:300_000]]
        starts = [int(asked.headers["range"][6:].split("-")[0]) for asked in server.asked]
        assert starts == sorted(starts)
        assert starts[0] == 0 < starts[1] <= 100_000 if then != "reset" else len(starts) == 3
        assert backend.counters["follow_ups"] == 2
        backend.close()


def test_a_body_that_breaks_again_and_again_is_an_error() -> None:
    with ScriptedServer(lambda asked: Raw(range_of(asked, DATA).data[:2000], "close")) as server:
        backend = open_s3(server.endpoint, hedge_reads=False)
        ((outcome, _),) = get(backend, (0, 1 << 20))
        assert isinstance(failure(outcome), TransientError)
        assert "cut" in str(failure(outcome))
        assert len(server.asked) == 4
        backend.close()


# Time.


@pytest.mark.parametrize("where", ["accept", "head", "body"])
def test_a_hung_server_is_left_at_the_deadline(where: str) -> None:
    def script(asked: Asked) -> Raw:
        return Raw(b"" if where == "head" or asked.method != "GET" else range_of(asked, DATA).data[:1000], "hang")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint if where != "accept" else "http://192.0.2.1:9", read_timeout=30.0)
        begin = time.monotonic()
        ((outcome, _),) = get(backend, (0, 100_000), seconds=0.3)
        assert time.monotonic() - begin < 10.0
        assert isinstance(failure(outcome), TransientError)
        (stat,) = backend.stat([key("k")], deadline=soon(0.2))
        assert isinstance(failure(stat), TransientError)
        (put,) = backend.put([Write(key("k"), [memoryview(b"1")])], deadline=soon(0.2))
        assert isinstance(failure(put), TransientError)
        assert time.monotonic() - begin < 20.0
        backend.close()


# Connections.


def test_connections_are_kept_and_a_closed_one_is_replaced() -> None:
    closing = [False]

    def script(asked: Asked) -> Raw:
        whole = range_of(asked, DATA)
        return Raw(whole.data, "close" if closing[0] else "keep")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        for _ in range(5):
            get(backend, (0, 1000))
        assert server.connections == 1
        closing[0] = True  # without saying so: the next request meets a closed connection
        for _ in range(3):
            ((outcome, data),) = get(backend, (0, 1000))
            assert (outcome.status, data) == (Status.OK, DATA[:1000])
        backend.close()


def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    import ssl

    from tests.servers.certificate import make_certificate

    pem = make_certificate(tmp_path / "server.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with ScriptedServer(serving(DATA), tls=context) as server:
        backend = open_s3(server.endpoint)
        ((outcome, _),) = get(backend, (0, 10))
        assert isinstance(failure(outcome), PermanentError)
        assert "ca_bundle" in str(failure(outcome))
        backend.close()
        backend = open_s3(server.endpoint, ca_bundle=str(pem), conditional_writes="on", head_first="never")
        assert get(backend, (0, 1 << 20)) == [((Status.OK, 1 << 20, None), DATA)]
        (stored,) = backend.put([Write(key("k"), [memoryview(DATA), memoryview(b"x")])], deadline=soon())
        assert stored == (Status.OK, len(DATA) + 1, None)
        assert server.asked[-1].body == DATA + b"x"
        assert server.connections <= 4
        backend.close()


# Hedging.


def test_a_slow_first_byte_is_hedged_on_a_fresh_connection() -> None:
    slow = threading.Event()

    def script(asked: Asked) -> Raw:
        if slow.is_set():
            slow.clear()
            return Raw(b"", "hang")
        return range_of(asked, DATA)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        for _ in range(60):
            get(backend, (0, 1000))
        client = backend.client
        assert isinstance(client, NativeClient)
        assert client.transport.hedging is not None
        before = client.transport.hedging.sent
        slow.set()
        ((outcome, data),) = get(backend, (0, 100_000), seconds=10.0)
        assert (outcome.status, data) == (Status.OK, DATA[:100_000])
        assert client.transport.hedging.sent == before + 1
        assert client.transport.hedging.sent <= 0.05 * client.transport.requests + 1
        backend.close()


def test_hedges_are_paid_for_and_stop_while_the_service_throttles(monkeypatch: pytest.MonkeyPatch) -> None:
    hedging = Hedging(samples=4)
    for _ in range(40):
        hedging.begin("GetObject")
        hedging.note("GetObject", 0.010, throttled=False, won=False)
    assert hedging.begin("GetObject") == pytest.approx(0.010)
    assert hedging.pay()
    assert hedging.pay()
    assert not hedging.pay(), "41 requests earn two"
    hedging.refund()
    assert hedging.begin("GetObject") is not None
    hedging.note("GetObject", 0.001, throttled=True, won=False)
    assert hedging.begin("GetObject") is None


def test_the_loser_of_a_race_is_closed_and_a_dead_one_does_not_win() -> None:
    """The first connection ends without an answer; the second answers."""
    numbers: list[int] = []

    def script(asked: Asked) -> Raw:
        numbers.append(asked.connection)
        return Raw(b"", "close") if asked.connection == 1 and len(numbers) > 1 else range_of(asked, DATA)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        for _ in range(2):
            ((outcome, _),) = get(backend, (0, 1000))
            assert outcome.ok
        backend.close()


def test_a_pool_does_not_reuse_what_is_old_or_speaks_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(lambda asked: answer(200)) as server:
        pool = Pool(Resolver(), connect_timeout=5.0, tls=lambda: None, most_idle=1)  # type: ignore[arg-type,return-value]
        origin, timing = Origin("http", "127.0.0.1", server.port), Timing(soon(), 5.0)
        first, second = pool.connect(origin, timing), pool.connect(origin, timing)
        pool.give(origin, first)
        pool.give(origin, second)  # one too many
        assert pool.take(origin, timing) is first
        pool.give(origin, first)
        monkeypatch.setattr("kvstore_backends.s3.transport._IDLE_S", -1.0)
        third = pool.take(origin, timing)
        assert third is not first
        pool.close()
        pool.give(origin, third)
        assert pool.opened == 3


# Throttling and other answers.


def test_throttling_is_named_and_shrinks_the_pace() -> None:
    with ScriptedServer(lambda asked: error_answer(503, "SlowDown")) as server:
        backend = open_s3(server.endpoint, meta_lanes=8)
        outcomes = backend.stat([key(number) for number in range(40)], deadline=soon())
        assert all(isinstance(failure(outcome), Throttled) for outcome in outcomes)
        assert len(server.asked) == 40, "nothing is retried here"
        ((outcome, _),) = get(backend, (0, 10))
        assert isinstance(failure(outcome), Throttled)
        assert backend._calls.meta_pace.allowed < 8
        assert backend.counters["throttled"] == 41
        backend.close()


def test_a_wrong_region_is_named_after_one_redirect() -> None:
    def script(asked: Asked) -> Raw:
        return error_answer(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1")

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        ((outcome, _),) = get(backend, (0, 10))
        assert "set region=eu-west-1" in str(failure(outcome))
        assert len(server.asked) <= 3
        backend.close()


def test_a_redirect_is_followed_and_the_region_kept() -> None:
    """botocore signs for the region that the answer names, and so do all later requests."""

    def script(asked: Asked) -> Raw:
        if "/eu-west-1/s3/" not in asked.headers["authorization"]:
            return error_answer(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1")
        return range_of(asked, DATA)

    with ScriptedServer(script) as server:
        backend = open_s3(server.endpoint)
        for _ in range(4):
            ((outcome, _),) = get(backend, (0, 10))
            assert outcome.ok
        assert [("/eu-west-1/" in asked.headers["authorization"]) for asked in server.asked].count(False) == 1
        assert len(server.asked) == 5
        backend.close()


def test_a_wrong_clock_and_denied_access_are_named_and_not_retried() -> None:
    code = ["RequestTimeTooSkewed"]
    with ScriptedServer(lambda asked: error_answer(403, code[0])) as server:
        backend = open_s3(server.endpoint)
        ((outcome, _),) = get(backend, (0, 10))
        assert "clock" in str(failure(outcome))
        code[0] = "AccessDenied"
        ((outcome, _),) = get(backend, (0, 10))
        assert "s3:ListBucket" in str(failure(outcome))
        assert len(server.asked) == 2
        backend.close()


def test_payloads_are_neither_hashed_nor_checksummed_nor_announced() -> None:
    with ScriptedServer(serving(DATA)) as server:
        backend = open_s3(server.endpoint, conditional_writes="on", head_first="never")
        for number in range(3):
            backend.put([Write(key(number), [memoryview(DATA)])], deadline=soon())
        assert len(server.asked) == 3
        for asked in server.asked:
            assert asked.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
            assert asked.headers["if-none-match"] == "*"
            assert not {"expect", "transfer-encoding", "content-md5", "x-amz-trailer"} & asked.headers.keys()
            assert not [name for name in asked.headers if name.startswith("x-amz-checksum")]
            assert asked.body == DATA
        assert len({asked.headers["authorization"] for asked in server.asked}) == 3
        backend.close()


def test_a_proxy_of_the_environment_is_left_to_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    backend = open_s3("http://s3.example:9000")
    assert backend.client.name == "boto3"
    backend.close()
    monkeypatch.setenv("no_proxy", "s3.example")
    backend = open_s3("http://s3.example:9000")
    assert backend.client.name == "native"
    backend.close()
