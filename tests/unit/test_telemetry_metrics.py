"""Prometheus' text, sources added up, the last hour, what a node counts, and the endpoint."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.errors import ClosedError, ConfigError
from kvstore.metrics import Metric, Metrics
from kvstore.telemetry import CONTENT_TYPE, History, Minute, exposition, node_source
from kvstore.telemetry.endpoint import MetricsEndpoint, serve_metrics
from kvstore.telemetry.node import NODE_METRICS
from kvstore.telemetry.prometheus import LMCACHE_NAMES, merged
from kvstore_backends.node_server import NodeServer

HITS = Metric("kvstore_test_hits_total", "counter", "Hits.", ("tier",))
LEVEL = Metric("kvstore_test_level", "gauge", "A level.")
WAIT = Metric("kvstore_test_seconds", "histogram", "A wait.", ("tier",), (0.1, 1.0))

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> Samples:
    """Every sample, as Prometheus' own parser reads it."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            assert series not in found, "given twice"
            found[series] = sample.value
    return found


def metrics() -> Metrics:
    return Metrics([HITS, LEVEL, WAIT])


# The text.


def test_every_kind_is_told() -> None:
    one = metrics()
    one.add(HITS.name, "disk", amount=3)
    one.set(LEVEL.name, value=-2.5)
    for value in (0.1, 0.5, 7):
        one.observe(WAIT.name, "disk", value=value)
    text = exposition(one)
    assert b"# TYPE kvstore_test_hits_total counter\n" in text
    assert b"# HELP kvstore_test_seconds A wait.\n" in text
    assert samples(text) == {
        ("kvstore_test_hits_total", (("tier", "disk"),)): 3,
        ("kvstore_test_level", ()): -2.5,
        ("kvstore_test_seconds_bucket", (("le", "0.1"), ("tier", "disk"))): 1,
        ("kvstore_test_seconds_bucket", (("le", "1.0"), ("tier", "disk"))): 2,
        ("kvstore_test_seconds_bucket", (("le", "+Inf"), ("tier", "disk"))): 3,
        ("kvstore_test_seconds_count", (("tier", "disk"),)): 3,
        ("kvstore_test_seconds_sum", (("tier", "disk"),)): 7.6,
    }


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=20), st.integers(0, 1 << 53), max_size=8))
@example({"file:///\udcff": 7, 'a"b\\\n': 8})  # a folder whose name is no UTF-8
def test_any_label_survives(values: dict[str, int]) -> None:
    one = metrics()
    for label, value in values.items():
        one.add(HITS.name, label, amount=value)
    found = samples(exposition(one))
    assert sorted(found.values()) == sorted(map(float, values.values()))


def test_sources_are_added_up() -> None:
    one, other = metrics(), metrics()
    for source, amount, level, wait in ((one, 3, 5, 0.05), (other, 4, 2, 5.0)):
        source.add(HITS.name, "disk", amount=amount)
        source.set(LEVEL.name, value=level)
        source.observe(WAIT.name, "disk", value=wait)
    other.add(HITS.name, "memory")
    found = samples(exposition(one, other))
    assert found["kvstore_test_hits_total", (("tier", "disk"),)] == 7
    assert found["kvstore_test_hits_total", (("tier", "memory"),)] == 1
    assert found["kvstore_test_level", ()] == 5, "of gauges the larger one"
    assert found["kvstore_test_seconds_bucket", (("le", "0.1"), ("tier", "disk"))] == 1
    assert found["kvstore_test_seconds_count", (("tier", "disk"),)] == 2
    assert merged(one, other.snapshot) == merged(one, other)


def test_sources_that_contradict_each_other_are_refused() -> None:
    other = Metrics([Metric(HITS.name, "counter", "Hits.", ("place",))])
    other.add(HITS.name, "disk")
    one = metrics()
    one.add(HITS.name, "disk")
    with pytest.raises(ConfigError, match="kvstore_test_hits_total"):
        exposition(one, other)


def test_lmcache_names_are_a_second_family_of_the_same() -> None:
    one = metrics()
    one.add("kvstore_hit_tokens_total", "file:///kv", "disk", amount=512)
    one.add("kvstore_hit_tokens_total", "memory", "memory", amount=256)
    one.operation("s3", "get").record(0.1, statuses={"ok": 2}, nbytes=4096)
    one.operation("s3", "put").record(0.1, statuses={"ok": 1}, nbytes=100)
    plain, more = exposition(one), exposition(one, lmcache_names=True)
    assert b"lmcache:" not in plain
    found = samples(more)
    assert found["lmcache:num_hit_tokens_total", ()] == 768
    assert found["lmcache:num_remote_read_bytes_total", ()] == 4096
    assert found["lmcache:num_remote_write_requests_total", ()] == 1
    assert ("lmcache:put_failed_count_total", ()) not in found, "nothing of ours is there"
    known = {metric.name for metric in kvstore.metrics.METRICS}
    assert {name for terms in LMCACHE_NAMES.values() for name, _ in terms} <= known


def test_without_the_client_library_a_hint_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstore\[control\]'"):
        exposition(metrics())


# Hooks.


def test_a_hook_fills_gauges_when_somebody_looks(caplog: pytest.LogCaptureFixture) -> None:
    one, calls = metrics(), []

    def hook() -> None:
        calls.append(1)
        one.set(LEVEL.name, value=len(calls))

    def closed() -> None:
        raise ClosedError("gone")

    def broken() -> None:
        raise RuntimeError("a fault of ours")

    for each in (closed, broken, hook):
        one.before_snapshot(each)
    assert not calls
    assert one.snapshot()[LEVEL.name]["series"][0]["value"] == 1
    assert samples(exposition(one))["kvstore_test_level", ()] == 2
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a fault of ours",)] * 2  # type: ignore[union-attr]


def test_an_observer_counts_as_observe_does() -> None:
    one, other = metrics(), metrics()
    observe = one.observer(WAIT.name, "disk")
    for value in (0.0, 0.1, 0.11, 1.0, 1.01, math.pi):
        observe(value)
        other.observe(WAIT.name, "disk", value=value)
    assert one.snapshot()[WAIT.name] == other.snapshot()[WAIT.name]
    with pytest.raises(ConfigError, match="no histogram"):
        one.observer(LEVEL.name)


# The last hour.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def hits(one: Metrics, amount: float) -> None:
    one.add("kvstore_hit_records_total", "memory", "memory", amount=amount)


def test_minutes_hold_differences() -> None:
    clock, one = Clock(), Metrics()
    hits(one, 1000)  # before
    history = History(one, minutes=3, clock=clock, monotonic=clock)
    for minute in range(5):
        hits(one, 10 * (minute + 1))
        one.add("kvstore_lookup_records_total", "miss", amount=10)
        one.add("kvstore_lookup_records_total", "hit", amount=99)
        clock.now += 30
        history.tick()
        clock.now += 30
        history.tick()
    hits(one, 7)
    clock.now += 6
    *done, under_way = history.rows()
    assert [row.hits for row in done] == [30, 40, 50]
    assert [row.start for row in done] == [1120, 1180, 1240]
    assert done[0].hit_rate == 0.75
    assert (under_way.start, under_way.seconds, under_way.hits, under_way.misses) == (1300, 6, 7, 0)
    assert under_way.hit_rate == 1
    assert history.rows()[-1].hits == 7, "looking changes nothing"


def test_a_clock_that_is_set_changes_no_minute() -> None:
    """Back by an hour, as a daemon without NTP has it at boot: minutes go on, and are as long as they were."""
    clock, steady, one = Clock(), Clock(), Metrics()
    history = History(one, clock=clock, monotonic=steady)
    for minute in range(4):
        hits(one, minute + 1)
        steady.now += 60
        clock.now += {1: -3600, 2: 86400}.get(minute, 0) + 60
        history.tick()
    *done, under_way = history.rows()
    assert [row.hits for row in done] == [1, 2, 3, 4]
    assert [row.seconds for row in done] == [60] * 4
    assert under_way.start == clock.now, "as the clock has it now"


def test_a_minute_without_anything_has_no_rate() -> None:
    assert Minute(0.0, 60.0).hit_rate is None
    assert History(Metrics()).rows()[-1].hit_rate is None


def test_a_source_that_began_anew_counts_from_zero() -> None:
    sources = [Metrics(), Metrics()]
    hits(sources[0], 100)
    hits(sources[1], 30)

    def now() -> Any:
        return sources[0].snapshot()

    history = History(now)
    hits(sources[0], 5)
    assert history.rows()[-1].hits == 5
    sources.pop(0)
    assert history.rows()[-1].hits == 35


def test_every_column_has_a_source() -> None:
    """Each number of a minute comes from metrics that exist."""
    from kvstore.telemetry.history import COLUMNS

    assert [*Minute._fields][2:] == [*COLUMNS]
    known = {metric.name: metric for metric in kvstore.metrics.METRICS} | NODE_METRICS
    for column in COLUMNS.values():
        for name, labels in (*column.store, *column.node, *column.always):
            assert labels.keys() <= set(known[name].labels), name


# Nodes.


class Tier:
    def __init__(self, namespace: str, name: str, **values: int) -> None:
        self.namespace, self.name = namespace, name
        given = {"used": 0, "capacity": 0, "records": 0, "pinned": 0, "hits": 0, "evicted": 0, **values}
        self.used, self.capacity, self.records = given["used"], given["capacity"], given["records"]
        self.pinned, self.hits, self.evicted = given["pinned"], given["hits"], given["evicted"]


def test_what_a_node_counts() -> None:
    with NodeServer("127.0.0.1:0", memory_bytes=8 << 20) as node:
        tiers = [Tier("", "memory", used=5, capacity=9, records=2, hits=3), Tier("", "remote", records=-1)]
        source = node_source(node.stats, lambda: tiers)
        history = History(source)
        with kvstore.open_store(f"node://{node.address}") as store:
            store.put_many({"a": bytes(1000), "b": bytes(1000)})
            store.get_many(["a", "nothing"], into=[bytearray(1000), bytearray(1000)])
        found = samples(exposition(source))
        default = ("namespace", "default")
        assert found["kvstore_node_records_total", (("event", "puts"), default)] == 2
        assert found["kvstore_node_records_total", (("event", "hits"), default)] > 0
        assert found["kvstore_node_bytes_total", (default, ("way", "in"))] > 2000
        assert found["kvstore_node_transport_requests_total", (("transport", "tcp"),)] > 0
        assert found["kvstore_node_tier_hits_total", (default, ("tier", "memory"))] == 3
        assert found["kvstore_node_tier_capacity_bytes", (default, ("tier", "memory"))] == 9
        assert ("kvstore_node_tier_capacity_bytes", (default, ("tier", "remote"))) not in found, "it has none"
        assert ("kvstore_node_tier_records", (default, ("tier", "remote"))) not in found, "nobody counts them"
        below = Metrics()  # what a node's disk counts is part of what the node does
        below.operation("file:///kv", "get").record(0.1, statuses={"error": 1}, nbytes=77, errors={"BackendError": 1})
        whole = History(source, below)
        below.operation("file:///kv", "get").record(0.1, statuses={"error": 2}, nbytes=77, errors={"BackendError": 2})
        assert (whole.rows()[-1].read_bytes, whole.rows()[-1].errors) == (0, 2)
        saving = History(node_source(node.stats, lambda: tiers, prefill_per_record=0.5))
        tiers[0].hits += 4
        assert saving.rows()[-1].saved_seconds == 2.0
        row = history.rows()[-1]
        assert row.hits == found["kvstore_node_records_total", (("event", "hits"), default)]
        assert row.misses == found["kvstore_node_records_total", (("event", "misses"), default)] > 0
        assert row.written_bytes > 2000
    assert exposition(source) == b"", "a closed node shows nothing"


def test_namespaces_without_number_are_added_up() -> None:
    """A thousand tenants are not a thousand times twenty series."""
    from kvstore.telemetry.node import MOST_NAMESPACES

    space = {"hits": 1, "bytes_out": 10, "held": 2, "busy": 0}
    count = MOST_NAMESPACES + 700
    stats = {
        "connections": 1, "accepted": 1, "refused": 0, "failed": 0, "pushed_out": 0, "requests": {},
        "received_bytes": {}, "sent_bytes": {}, "meta_bytes": 0, "sessions": 0, "listings": 0,
        "namespaces": {f"team-{number}\n\"x" if number else "": space for number in range(count)},
    }  # fmt: skip
    tiers = [Tier(name, "memory", used=3, hits=1) for name in stats["namespaces"]]  # type: ignore[attr-defined]
    found = samples(exposition(node_source(lambda: stats, lambda: tiers)))
    for name, each in (
        ("kvstore_node_bytes_total", 10),
        ("kvstore_node_held_bytes", 2),
        ("kvstore_node_tier_used_bytes", 3),
    ):
        mine = {labels: value for (sample, labels), value in found.items() if sample == name}
        assert len(mine) == MOST_NAMESPACES + 1
        assert sum(mine.values()) == each * count, "nothing is lost"
        (other,) = [value for labels, value in mine.items() if ("namespace", "other") in labels]
        assert other == each * 700


# The endpoint.


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsEndpoint]:
    monkeypatch.setattr("kvstore.telemetry.endpoint._STALL_S", 1.0)
    one = metrics()
    one.add(HITS.name, "disk", amount=3)
    found = MetricsEndpoint("127.0.0.1", 0, one)
    yield found
    found.close()


def ask(address: str, path: str) -> tuple[int, str | None, bytes]:
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read()


def test_it_answers_with_metrics_and_nothing_else(endpoint: MetricsEndpoint) -> None:
    status, kind, body = ask(endpoint.address, "/metrics?name=x")
    assert (status, kind) == (200, CONTENT_TYPE)
    assert samples(body)["kvstore_test_hits_total", (("tier", "disk"),)] == 3
    assert b"lmcache:" not in body
    assert ask(endpoint.address, "/metrics?lmcache=1")[0] == 200
    assert ask(endpoint.address, "/")[0] == 404
    assert ask(endpoint.address, "/../etc/passwd")[0] == 404


def test_those_who_say_nothing_do_not_fill_it(endpoint: MetricsEndpoint) -> None:
    host, _, port = endpoint.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for late in silent[8:]:
            late.settimeout(20)
            assert late.recv(1) == b"", "sent away at once"
    finally:
        for each in silent:
            each.close()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(endpoint.address, "/metrics")[0] == 200:
                return
        time.sleep(0.01)
    pytest.fail("nobody is answered any more")


def test_those_who_send_slowly_do_not_fill_it(endpoint: MetricsEndpoint) -> None:
    """Always something, never all of it: each wait is short, and it would go on for ever."""
    host, _, port = endpoint.address.rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for each in slow:
                with contextlib.suppress(OSError):
                    each.sendall(b"G")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(endpoint.address, "/metrics")[0] == 200:
                    return
            time.sleep(0.05)
    finally:
        for each in slow:
            each.close()
    pytest.fail("nobody is answered any more")


def test_ipv6() -> None:
    found = serve_metrics("[::1]:0", metrics())
    assert found is not None
    with closing(found):
        assert found.address.startswith("[::1]:")
        assert ask(found.address, "/metrics")[0] == 200


def test_a_child_of_a_fork_does_not_keep_the_address(endpoint: MetricsEndpoint) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)  # lives on
        os._exit(0)
    try:
        endpoint.close()
        host, _, port = endpoint.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=10)
    finally:
        os.write(write, b"x")
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_no_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("DNS may take a minute"))
    MetricsEndpoint("127.0.0.1", 0, metrics()).close()


def test_workers_of_one_engine_take_ports_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found: list[Any] = [serve_metrics(f"127.0.0.1:{port}", metrics()) for _ in range(2)]
        try:
            ports = [int(each.address.rpartition(":")[2]) for each in found]
            assert port < ports[0] < ports[1] < port + 16
        finally:
            for each in found:
                each.close()


def test_a_store_serves_its_own(tmp_path: Any) -> None:
    with kvstore.open_store(f"file://{tmp_path}/kv", metrics_listen="127.0.0.1:0") as store:
        store.put_many({"a": bytes(100)})
        endpoint = store._machinery.endpoint
        assert endpoint is not None
        found = samples(ask(endpoint.address, "/metrics")[2])
        assert found["kvstore_put_records_total", (("result", "stored"),)] == 1
    with pytest.raises(OSError, match="refused"):
        ask(endpoint.address, "/metrics")


@pytest.mark.parametrize("listen", ["127.0.0.1", "9464", "host:port", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_a_bad_place_is_named(listen: str) -> None:
    with pytest.raises(ConfigError, match="metrics_listen"):
        kvstore.open_store("memory://", metrics_listen=listen)


def test_an_address_of_somebody_else_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with kvstore.open_store("memory://", metrics_listen="203.0.113.1:9464") as store:
        assert store._machinery.endpoint is None
    assert "metrics_listen" in caplog.text


def test_counting_survives_a_fork() -> None:
    """In the child of a fork no lock is held by a thread that is not there."""
    one = metrics()
    observe = one.observer(WAIT.name, "disk")
    one._lock.acquire()
    pid = os.fork()
    if pid == 0:
        observe(0.5)
        os._exit(0 if samples(exposition(one))["kvstore_test_seconds_count", (("tier", "disk"),)] == 1 else 1)
    one._lock.release()
    end = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == (pid, 0)
