"""`kvstore cloudwatch`: what it reads, what it makes of it, what it sends. AWS is moto."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import math
import signal
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, EndpointConnectionError
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws

from kvstore.errors import ConfigError, TransientError
from kvstore.metrics import Metrics
from kvstore.store import open_store
from kvstore.telemetry import RequestReport, exposition, node_source, report_request
from kvstore_backends.node_server import NodeServer
from kvstore_cli.cloudwatch_gpu import Gpu, read_gpus
from kvstore_cli.cloudwatch_metrics import NAMESPACES, Datum, compute
from kvstore_cli.cloudwatch_publish import EmfSink, Publisher, PutSink, aws_client
from kvstore_cli.cloudwatch_scrape import Endpoint, Interval, parse_metrics, quantile
from kvstore_cli.main import main
from tests.unit.cloudwatch_support import DCGM, NONE, VLLM, Place, pretended_aws

TIERS, RAG, CACHEGEN, LMCACHE = NAMESPACES
DAY = dt.date(2026, 11, 29)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_aws(monkeypatch):
        yield


def shown(data: Sequence[Datum]) -> dict[tuple[str, str], Any]:
    assert len({(datum.namespace, datum.name) for datum in data}) == len(data)
    return {
        (datum.namespace, datum.name): datum.values[0] if len(datum.values) == 1 else list(datum.values)
        for datum in data
    }


def between(*texts: tuple[str, str]) -> Interval:
    """The interval between two answers of each of several places."""
    interval = Interval()
    for before, after in texts:
        interval.add(parse_metrics(before), parse_metrics(after))
    return interval


def text_of(*sources: Any) -> str:
    return exposition(*sources).decode()


# What it is computed from.


def test_an_engine() -> None:
    before = VLLM.format(**{**NONE, "queries": 1000, "hits": 900, "all": 50, "fast": 50, "seconds": 500})
    after = VLLM.format(
        queries=2000, hits=1150, external_queries=750, external_hits=300, fast=130, all=150, seconds=512
    )
    found = shown(compute(between((before, after))))
    assert found == {
        (TIERS, "GPUCacheHitRate"): 25.0,
        (RAG, "TTFT_P95"): pytest.approx(400.0),  # 80 of 100 below 0.1 s, the others up to 0.5 s
        (CACHEGEN, "TTFT"): pytest.approx(120.0),
        (LMCACHE, "CacheHitRate"): 40.0,
        (LMCACHE, "TokensSaved"): 300,
    }


def test_a_store(tmp_path: Path) -> None:
    from tests.unit.test_telemetry_store import keys, put, wants

    tiers = ["memory://?bytes=4MiB", f"file://{tmp_path}/kv"]
    with open_store(tiers=tiers, remote_serde="int8", buffer_pool_bytes="4MiB") as store:
        before = text_of(store.metrics)
        names = keys(4)
        put(store, names[:3])
        assert store.submit_lookup(names).result() == 3
        assert all(outcome.ok for outcome in store.submit_get(wants(names[:3])).result())
        found = shown(compute(between((before, text_of(store.metrics)))))
    assert found.pop((CACHEGEN, "CompressionRatio")) > 1
    assert found == {
        (TIERS, "CPUCacheHitRate"): 75.0, (TIERS, "SSDCacheHitRate"): 0.0, (LMCACHE, "CacheHitRate"): 75.0,
        (LMCACHE, "TokensSaved"): 96,
    }  # fmt: skip


def test_a_node_and_its_tiers() -> None:
    from tests.unit.test_telemetry_metrics import Tier

    with NodeServer("127.0.0.1:0", memory_bytes=4 << 20) as node:
        tiers = [Tier("", "memory"), Tier("", "disk"), Tier("", "remote")]
        source = node_source(node.stats, lambda: tiers)
        before = text_of(source)
        with open_store(f"node://{node.address}") as store:
            misses = text_of(store.metrics)
            store.get_many([f"{n}" for n in range(10)], into=[bytearray(1) for _ in range(10)])
            asked = text_of(store.metrics)
        tiers = [Tier("", "memory", hits=20), Tier("", "disk", hits=5), Tier("team", "remote", hits=5)]
        alone = shown(compute(between((before, text_of(source)))))
        both = shown(compute(between((before, text_of(source)), (misses, asked))))
    # A store says what was asked for and was not there: 10 records of 40.
    assert both[TIERS, "CPUCacheHitRate"] == 50.0
    assert both[TIERS, "SSDCacheHitRate"] == 12.5
    assert both[TIERS, "RemoteCacheHitRate"] == 12.5
    assert both[LMCACHE, "CacheHitRate"] == 75.0
    assert alone[TIERS, "SSDCacheHitRate"] == alone[TIERS, "RemoteCacheHitRate"] > 0
    assert (LMCACHE, "TokensSaved") not in alone, "a node knows no tokens"


def test_requests_made_of_documents() -> None:
    metrics = Metrics()
    report_request(RequestReport(input_tokens=1, doc_count=1), metrics=metrics)
    before = text_of(metrics)
    for _ in range(4):
        report_request(
            RequestReport(input_tokens=100, tokens_saved=85, ttft_s=0.2, doc_count=5, doc_hits=4), metrics=metrics
        )
    found = shown(compute(between((before, text_of(metrics)))))
    assert found[RAG, "CacheHitRate"] == 80.0
    assert found[RAG, "RecomputeRatio"] == pytest.approx(0.15)
    assert 100 < found[RAG, "TTFT_P95"] <= 250, "within its bucket"
    assert found[CACHEGEN, "TTFT"] == pytest.approx(200)


def test_gpus_by_dcgm_or_nvidia_smi_or_not_at_all() -> None:
    dcgm = between((DCGM.format(busy=10), DCGM.format(busy=90)))
    smi = [Gpu(11.0, 22.0), Gpu(None, 33.0)]
    assert shown(compute(dcgm, smi)) == {
        (CACHEGEN, "GPUUtilization"): [90, 50], (CACHEGEN, "GPUMemoryUtilization"): [75, 25],
    }  # fmt: skip
    assert shown(compute(Interval(), smi)) == {
        (CACHEGEN, "GPUUtilization"): 11.0, (CACHEGEN, "GPUMemoryUtilization"): [22.0, 33.0],
    }  # fmt: skip
    assert compute(Interval()) == []
    assert compute(between((VLLM.format(**NONE), VLLM.format(**NONE)))) == [
        Datum(LMCACHE, "TokensSaved", (0.0,), "Count", "vllm:external_prefix_cache_hits")
    ], "a rate of nothing is not published"


def test_every_name_is_one_that_terraform_watches() -> None:
    from tests.terraform.test_observability import METRICS

    metrics = Metrics()
    report_request(RequestReport(input_tokens=9, tokens_saved=3, ttft_s=0.1, doc_count=2, doc_hits=1), metrics=metrics)
    with open_store("memory://?bytes=4MiB", remote_serde="int8") as store:
        store.put_many({"a": bytes(1 << 16)})
        store.get_many(["a"])
        texts = [(VLLM.format(**NONE), VLLM.format(**dict.fromkeys(NONE, 5))), ("", text_of(metrics)),
                 ("", text_of(store.metrics)), ("", DCGM.format(busy=1))]  # fmt: skip
    tiers = '# TYPE kvstore_node_tier_hits counter\nkvstore_node_tier_hits_total{{namespace="n",tier="{}"}} 4\n'
    data = compute(between(*texts, *(("", tiers.format(tier)) for tier in ("memory", "disk", "remote"))))
    published: dict[str, set[str]] = {}
    for datum in data:
        published.setdefault(datum.namespace, set()).add(datum.name)
    assert published == {name: METRICS[name] for name in NAMESPACES}


def test_counters_that_began_anew_and_places_that_come_and_go() -> None:
    interval = Interval()
    count = '# TYPE a counter\na_total{{x="{}"}} {}\n'
    interval.add(parse_metrics(count.format(1, 100)), parse_metrics(count.format(1, 7) + 'a_total{x="2"} 3\n'))
    interval.add(parse_metrics(count.format(1, 0)), parse_metrics(count.format(1, 5)))
    assert interval.sum("a_total", x="1") == 12
    assert interval.sum("a_total") == 15
    assert interval.values("a_total", x="1") == [7, 5]
    assert interval.sum("a_total", x="9") is None


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=8),
    st.floats(0, 1),
)
def test_quantiles_lie_in_the_right_bucket(counts: list[int], share: float) -> None:
    bounds = [float(2**n) for n in range(len(counts) - 1)] + [math.inf]
    cumulative = [sum(counts[: n + 1]) for n in range(len(counts))]
    found = quantile(list(zip(bounds, map(float, cumulative), strict=True)), share)
    if not cumulative[-1]:
        assert found is None
        return
    assert found is not None
    at = next(n for n, count in enumerate(cumulative) if count >= share * cumulative[-1])
    low = bounds[at - 1] if at else 0.0
    assert low <= found <= (low if math.isinf(bounds[at]) else bounds[at])


# Scraping.


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host/metrics", "http://", "http://user:secret@host/", "http://host:port/"]
)
def test_an_address_that_makes_no_sense_is_named_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Endpoint(url)
    assert "secret" not in str(raised.value)


def test_a_token_goes_to_nodes_only_and_never_on(place: Place) -> None:
    place.text = "a 1\n"
    Endpoint(place.url, token="t-1").scrape()
    Endpoint(place.url).scrape()
    assert [headers.get("authorization") for headers in place.headers] == ["Bearer t-1", None]
    place.status = 302
    with pytest.raises(TransientError, match="answered 302"):
        Endpoint(place.url, token="t-1").scrape()


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [("a 1", 503, "answered 503"), ("<html>", 200, "has no metrics"), ("a" * (17 << 20), 200, "more than 16 MiB")],
)
def test_answers_that_are_no_metrics(place: Place, text: str, status: int, message: str) -> None:
    place.text, place.status = text, status
    with pytest.raises(TransientError, match=message):
        Endpoint(place.url).scrape()


def test_a_place_that_is_gone_is_left_out_until_it_is_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    other = Place()
    place.text, other.text = VLLM.format(**NONE), DCGM.format(busy=1)
    publisher = Publisher([Endpoint(place.url), Endpoint(other.url)], None, gpu="off")
    publisher.step()
    place.status = 500
    assert {datum.name for datum in publisher.step()} == {"GPUUtilization", "GPUMemoryUtilization"}
    publisher.step()
    assert caplog.text.count("left out") == 1, "once, not every minute"
    assert publisher.answering == 1
    place.status, place.text = 200, VLLM.format(**{**NONE, "external_queries": 10, "external_hits": 5})
    assert (LMCACHE, "CacheHitRate") not in shown(publisher.step()), "what happened meanwhile is not known"
    place.text = VLLM.format(**{**NONE, "external_queries": 20, "external_hits": 6})
    assert shown(publisher.step())[LMCACHE, "CacheHitRate"] == 10.0
    assert publisher.answering == 2
    other.close()


# Publishing.


def points(namespace: str, name: str, statistic: str) -> list[float]:
    client = boto3.client("cloudwatch")
    now = dt.datetime.now(dt.UTC)
    answer = client.get_metric_statistics(
        Namespace=namespace, MetricName=name, Period=60, Statistics=[statistic],
        StartTime=now - dt.timedelta(hours=2), EndTime=now + dt.timedelta(hours=1),
    )  # fmt: skip
    return [point[statistic] for point in sorted(answer["Datapoints"], key=lambda point: point["Timestamp"])]


@pytest.mark.usefixtures("aws")
def test_what_is_published_is_there(place: Place) -> None:
    place.text = VLLM.format(**NONE) + DCGM.format(busy=5)
    publisher = Publisher([Endpoint(place.url)], PutSink(boto3.client("cloudwatch")), gpu="off")
    publisher.step()
    place.text = VLLM.format(**{**NONE, "queries": 10, "hits": 5, "external_hits": 40}) + DCGM.format(busy=100)
    publisher.step()
    assert points(TIERS, "GPUCacheHitRate", "Average") == [50.0]
    assert points(LMCACHE, "TokensSaved", "Sum") == [40.0]
    metrics = boto3.client("cloudwatch").list_metrics()["Metrics"]
    assert all(metric["Dimensions"] == [] for metric in metrics), "alarms name no dimensions"
    assert publisher.waiting == 0


class Client:
    """CloudWatch that is out of reach for some calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries = 0
        self.calls: list[tuple[str, list[dict[str, Any]]]] = []

    def put_metric_data(self, *, Namespace: str, MetricData: list[dict[str, Any]]) -> None:
        self.tries += 1
        if self.failures:
            self.failures -= 1
            raise EndpointConnectionError(endpoint_url="https://monitoring.us-east-1.amazonaws.com/")
        self.calls.append((Namespace, MetricData))


def test_one_request_per_namespace_and_what_failed_goes_later(place: Place) -> None:
    clock = iter(range(1000, 2000))
    client = Client(2)
    publisher = Publisher([Endpoint(place.url)], PutSink(client), gpu="off", clock=lambda: float(next(clock)))
    place.text = VLLM.format(**NONE)
    publisher.step()
    for number in range(1, 4):
        place.text = VLLM.format(**dict.fromkeys(NONE, 10 * number))
        publisher.step()
        assert publisher.waiting == {1: 5, 2: 10, 3: 0}[number], "what failed goes with the next interval"
    assert client.tries == 1 + 1 + 4, "nobody waits four times in a row for somebody who does not answer"
    sent = [(namespace, each["MetricName"], each["Timestamp"]) for namespace, data in client.calls for each in data]
    assert len(set(sent)) == len(sent), "nothing twice"
    assert {when for _, name, when in sent if name == "TTFT"} == {1001, 1002, 1003}, "under its own time"
    names = [namespace for namespace, _ in client.calls]
    assert names.count(CACHEGEN) <= 3


class Refusing:
    """CloudWatch as its API's reference has it: it takes all of a request, or nothing."""

    def __init__(self, *errors: str) -> None:
        self.errors = [*errors]
        self.taken: list[float] = []
        self.calls = 0

    def put_metric_data(self, *, Namespace: str, MetricData: list[dict[str, Any]]) -> None:
        self.calls += 1
        code = self.errors.pop(0) if self.errors else ""
        values = [value for datum in MetricData for value in datum["Values"]]
        if any(not abs(value) <= 2.0**360 for value in values):
            code = "InvalidParameterValue"
        if code:
            raise ClientError({"Error": {"Code": code, "Message": "no"}}, "PutMetricData")
        self.taken += values


def data(*values: float) -> list[tuple[float, Datum]]:
    return [(1.0, Datum(LMCACHE, "TokensSaved", (value,), "Count", "x")) for value in values]


def test_a_value_that_is_refused_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    client = Refusing()
    assert not list(PutSink(client).send(data(*range(40), math.nan, *range(40, 99))))
    assert client.taken == [*range(99)]
    assert client.calls < 20
    (line,) = [record.message for record in caplog.records]
    assert "TokensSaved=[nan] is given up" in line, "said, and said once"


@pytest.mark.parametrize("code", ["Throttling", "ThrottlingException", "InternalServiceFault", "AccessDenied"])
def test_what_passes_is_waited_for(code: str) -> None:
    client = Refusing(code)
    sink = PutSink(client)
    waiting = [*sink.send(data(1, 2))]
    assert waiting == data(1, 2)
    assert not list(sink.send(waiting))
    assert client.taken == [1, 2], "nothing lost, nothing twice"


def test_half_of_a_request_that_was_refused_is_not_sent_twice() -> None:
    """It is cut; one part arrives, the next one meets a throttle."""
    client = Refusing("", "", "Throttling")
    sink = PutSink(client)
    waiting = [*sink.send(data(1, 2, math.inf, 4))]
    while waiting:
        waiting = [*sink.send(waiting)]
    assert sorted(client.taken) == [1, 2, 4]


def test_what_waited_for_an_hour_is_given_up(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    publisher = Publisher([Endpoint(place.url)], PutSink(Client(3)), gpu="off", clock=lambda: now[0])
    place.text = DCGM.format(busy=1)
    for later in (0, 60, 3601 + 60):
        now[0] = 1000.0 + later
        publisher.step()
    assert publisher.waiting == 2
    assert "2 values are given up: they waited for an hour" in caplog.text


class Service(ThreadingHTTPServer):
    """CloudWatch's end of the wire, which throttles for a while. (moto has no limits.)"""

    def __init__(self, throttled: int) -> None:
        self.left, self.taken, self.refused = throttled, 0, 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body, status = b"<PutMetricDataResponse/>", 200
                if service.left:
                    service.left -= 1
                    service.refused += 1
                    body, status = b"<ErrorResponse><Error><Code>Throttling</Code></Error></ErrorResponse>", 400
                else:
                    service.taken += 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.mark.parametrize("throttled", [2, 7])
def test_a_throttle_is_tried_again_within_bounds(monkeypatch: pytest.MonkeyPatch, throttled: int) -> None:
    """By AWS's own client a few times at once, then with the next interval; in the end it has arrived, once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr("time.sleep", lambda _: None)
    service = Service(throttled)
    sink = PutSink(aws_client("cloudwatch", "us-east-1", endpoint_url=f"http://127.0.0.1:{service.server_address[1]}"))
    waiting, rounds = [*data(7)], 0
    try:
        while waiting:
            waiting = [*sink.send(waiting)]
            rounds += 1
    finally:
        service.shutdown()
        service.server_close()
    assert (service.taken, service.refused) == (1, throttled)
    assert rounds == throttled // 4 + 1, "four tries each"


@pytest.mark.usefixtures("aws")
def test_an_answer_of_somebody_in_between_is_waited_out() -> None:
    client = aws_client("cloudwatch", "us-east-1")
    raw = type("Raw", (), {"stream": lambda *_: [b"please log in"]})()
    client.meta.events.register(
        "before-send.cloudwatch.PutMetricData", lambda **_: AWSResponse("https://portal", 403, {}, raw)
    )
    assert [*PutSink(client).send(data(7))] == data(7)


def test_a_full_disk_and_the_embedded_metric_format() -> None:
    with open("/dev/full", "w") as full:
        sink = EmfSink(full)
        assert [*sink.send(data(1, 2))] == data(1, 2)

        def gone(*_: Any) -> int:
            raise BrokenPipeError

        full.write = gone  # type: ignore[method-assign]
        with pytest.raises(BrokenPipeError):
            sink.send(data(1))
        with contextlib.suppress(OSError):
            full.close()


def test_a_driver_that_fails_later_ends_nothing(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    place.text = VLLM.format(**NONE)
    publisher = Publisher([Endpoint(place.url)], None, gpu="nvidia-smi")
    publisher.step()
    place.text = VLLM.format(**dict.fromkeys(NONE, 3))
    assert (LMCACHE, "TokensSaved") in shown(publisher.step())


# Nonsense from engines.


@pytest.mark.parametrize("bad", ["NaN", "+Inf", "-Inf", "1e308", "-5", "1e400"])
def test_numbers_that_are_none_are_left_out(bad: str) -> None:
    """Never a rate of 100 % made of NaN, never a failure of what is right beside it."""
    for name in NONE:
        after = {**dict.fromkeys(NONE, 10), name: bad}
        twice = VLLM.format(**after) + VLLM.format(**after).replace('engine="0"', 'engine="1"')
        found = compute(between((VLLM.format(**NONE), twice), ("", DCGM.format(busy=bad))))
        assert all(0 <= value <= 2.0**360 for datum in found for value in datum.values)
        assert shown(found)[CACHEGEN, "GPUUtilization"] == 50.0, "of the other GPU"
        if name == "hits":
            assert (TIERS, "GPUCacheHitRate") not in shown(found)


def test_buckets_without_a_bound_are_left_out() -> None:
    ttft = "vllm:time_to_first_token_seconds"
    text = (
        f'# TYPE {ttft} histogram\n{ttft}_bucket 9\n{ttft}_bucket{{le="x"}} 9\n{ttft}_bucket{{le="nan"}} 9\n'
        f'{ttft}_bucket{{le="0.5"}} 4\n{ttft}_bucket{{le="+Inf"}} 4\n{ttft}_count 4\n{ttft}_sum 1\n'
    )
    assert shown(compute(between(("", text))))[RAG, "TTFT_P95"] == pytest.approx(475)


def test_a_histogram_begins_anew_as_a_whole() -> None:
    """Of an engine that was started again and is busy, some buckets are larger than before by now."""
    before = VLLM.format(**{**NONE, "fast": 90, "all": 100, "seconds": 50})
    after = VLLM.format(**{**NONE, "fast": 10, "all": 110, "seconds": 40})
    found = shown(compute(between((before, after))))
    assert found[CACHEGEN, "TTFT"] == pytest.approx(1e3 * 40 / 110)
    assert found[RAG, "TTFT_P95"] == pytest.approx(100 + 400 * (0.95 * 110 - 10) / 100)


class Endless(socketserver.ThreadingTCPServer):
    """Answers, and never ends: a byte now and then, so that no single wait is long."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, head: bytes) -> None:
        stop = self.stop = threading.Event()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    self.request.sendall(head)
                    while not stop.wait(0.02):
                        self.request.sendall(b"a")

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"],
)
def test_an_answer_that_never_ends_is_cut_off(head: bytes) -> None:
    server = Endless(head)
    try:
        with pytest.raises(TransientError, match=r"not within 0\.3 s"):
            Endpoint(server.url, timeout=0.3).scrape()
    finally:
        server.stop.set()
        server.shutdown()
        server.server_close()


def test_a_secret_in_an_address_is_used_and_never_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher([Endpoint(f"{place.url}/metrics?token=s3cret")], None, gpu="off")
    place.status = 500
    publisher.step()
    assert publisher.answering == 0
    assert "answered 500" in caplog.text
    assert "s3cret" not in caplog.text
    assert place.paths == ["/metrics?token=s3cret"]


def test_large_batches_are_cut() -> None:
    client = Client(0)
    datum = Datum(LMCACHE, "TokensSaved", (1.0,), "Count", "x")
    assert not list(PutSink(client).send([(float(n), datum) for n in range(1201)]))
    assert [len(data) for _, data in client.calls] == [500, 500, 201]


def test_the_embedded_metric_format() -> None:
    out = io.StringIO()
    data = [
        Datum(LMCACHE, "CacheHitRate", (50.0,), "Percent", "x"), Datum(LMCACHE, "TokensSaved", (7.0,), "Count", "x"),
        Datum(RAG, "CacheHitRate", (25.0,), "Percent", "x"),
        Datum(CACHEGEN, "GPUUtilization", (1.0, 2.0), "Percent", "x"),
    ]  # fmt: skip
    EmfSink(out).send([(1.5, datum) for datum in data])
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] == {
        "_aws": {
            "Timestamp": 1500,
            "CloudWatchMetrics": [
                {
                    "Namespace": LMCACHE,
                    "Dimensions": [[]],
                    "Metrics": [{"Name": "CacheHitRate", "Unit": "Percent"}, {"Name": "TokensSaved", "Unit": "Count"}],
                }
            ],
        },
        "CacheHitRate": 50.0,
        "TokensSaved": 7.0,
    }
    assert [line["_aws"]["CloudWatchMetrics"][0]["Namespace"] for line in lines] == [LMCACHE, RAG, CACHEGEN]
    assert lines[1]["CacheHitRate"] == 25.0, "one name in two namespaces is two lines"
    assert lines[2]["GPUUtilization"] == [1.0, 2.0]


# The command.


def test_a_dry_run_shows_and_sends_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.text = VLLM.format(**NONE)

    def grow() -> None:
        while not place.answered:
            time.sleep(0.005)
        place.text = VLLM.format(**{**NONE, "external_queries": 4, "external_hits": 1})

    usual = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    thread = threading.Thread(target=grow)
    thread.start()
    with mock_aws():  # whatever is sent would be seen
        status = main(["cloudwatch", "publish", "--scrape", place.url, "--dry-run", "--interval", "1s", "--gpu", "off"])
        assert boto3.client("cloudwatch", region_name="us-east-1").list_metrics()["Metrics"] == []
    thread.join()
    assert status == 0
    out, err = capsys.readouterr()
    assert "CacheHitRate" in out
    assert "vllm:external_prefix_cache" in out
    assert err == "kvstore: measuring for 1 s\n"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == usual


@pytest.mark.parametrize("more", [[], ["--emf"]])
def test_an_interval_in_which_nothing_happened_says_so(
    place: Place, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    place.text = "# TYPE process_open_fds gauge\nprocess_open_fds 7\n"
    words = ["--scrape", place.url, "--dry-run", "--interval", "1s", "--gpu", "off", *more]
    assert main(["cloudwatch", "publish", *words]) == 0
    out, err = capsys.readouterr()
    assert out == "", "a head without a line is no answer"
    assert err == "kvstore: measuring for 1 s\nkvstore: nothing was asked for in this interval\n"


@pytest.mark.usefixtures("aws")
def test_once_and_json(place: Place, tmp_path: Path) -> None:
    place.text = DCGM.format(busy=40)
    target = tmp_path / "data.json"
    (tmp_path / "token").write_text("t-9\n")
    words = ["--node", place.url, "--token-file", f"{tmp_path}/token", "--once", "--interval", "1s", "--gpu", "off"]
    assert main(["cloudwatch", "publish", *words, "--json", str(target)]) == 0
    assert {row["name"]: row["values"] for row in json.loads(target.read_text())} == {
        "GPUUtilization": [40.0, 50.0], "GPUMemoryUtilization": [75.0, 25.0],
    }  # fmt: skip
    assert all(headers["authorization"] == "Bearer t-9" for headers in place.headers)
    assert points(CACHEGEN, "GPUUtilization", "Maximum")[-1] == 50.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--node"),
        (["--scrape", "nowhere"], "nowhere"),
        (["--scrape", "http://h", "--interval", "1ms"], "--interval"),
        (["--scrape", "http://h", "--interval", "soon"], "interval"),
        (["--scrape", "http://h", "--json", "-"], "--once"),
        (["--scrape", "http://h", "--once", "--emf", "--json", "-"], "--emf"),
        (["--node", "http://h", "--token-file", "/nowhere/token"], "/nowhere/token"),
        (["--scrape", "http://h", "--gpu", "lspci"], "lspci"),
    ],
)
def test_what_makes_no_sense_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cloudwatch", "publish", *words]) == 2
    assert said in capsys.readouterr().err


def test_nothing_that_answers_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scrape", "http://127.0.0.1:9/metrics", "--dry-run", "--interval", "1s", "--gpu", "off"]
    assert main(["cloudwatch", "publish", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing was asked for" not in err


def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --query-gpu=utilization.gpu,memory.used,memory.total ] || exit 9\n'
        "echo '87, 40000, 80000'\necho '[N/A], 20000, 80000'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_gpus("auto") == read_gpus("nvidia-smi") == [Gpu(87.0, 50.0), Gpu(None, 25.0)]
    assert read_gpus("off") == []
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert read_gpus("auto") == []
    with pytest.raises(ConfigError, match="NVIDIA-SMI has failed"):
        read_gpus("nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert read_gpus("auto") == []
    with pytest.raises(ConfigError, match="PATH"):
        read_gpus("nvidia-smi")
