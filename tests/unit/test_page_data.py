"""`kvstore.control.page.data`: what the page shows, computed from an instance and its numbers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.control.guard import CONTROL_METRICS
from kvstore.control.instance import Health, Instance, InstanceInfo, Job, SnapshotPage, TierUsage, UnknownError
from kvstore.control.journal import Journal
from kvstore.control.messages import Worker
from kvstore.control.page.data import MINUTES, PageData, _hour, _quantile
from kvstore.errors import TransientError
from kvstore.keys import Key
from kvstore.metrics import SECOND_BUCKETS, Metric, Metrics
from kvstore.telemetry import History, Minute

_NODE = (
    Metric("kvstore_node_bytes_total", "counter", "x", ("namespace", "way")),
    Metric("kvstore_node_records_total", "counter", "x", ("namespace", "event")),
    Metric("kvstore_tier_events_total", "counter", "x", ("tier", "event")),
    Metric("kvstore_node_connections", "gauge", "x"),
    *CONTROL_METRICS,
)


_WELL = Health(True, True, 0.25)


class Still(Instance):
    """An instance that says what it is told to."""

    def __init__(self, usage: Sequence[TierUsage], health: Health | Exception = _WELL) -> None:
        self.journal = Journal()
        self._usage = usage
        self._health = health

    def info(self) -> InstanceInfo:
        names = [*dict.fromkeys(each.namespace for each in self._usage)]
        tiers = [*dict.fromkeys(each.name for each in self._usage)]
        return InstanceInfo("n1", "10.0.0.1:7070", "", "", "0.1.0", names, tiers, 1000.0)

    def usage(self) -> Sequence[TierUsage]:
        return self._usage

    def health(self, *, deadline: float) -> Health:
        if isinstance(self._health, Exception):
            raise self._health
        return self._health

    def lookup(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[str | None]:
        raise NotImplementedError

    def pin(self, namespace: str, keys: Sequence[Key], *, ttl_s: float, deadline: float) -> list[bool]:
        raise NotImplementedError

    def unpin(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[bool]:
        raise NotImplementedError

    def clear(
        self, namespace: str, *, model: str | None = None, keys: Sequence[Key] | None = None,
        prefix: Sequence[Key] | None = None,
    ) -> str:  # fmt: skip
        raise NotImplementedError

    def move(self, namespace: str, keys: Sequence[Key], *, src: str, dst: str) -> str:
        raise NotImplementedError

    def transcode(self, namespace: str, keys: Sequence[Key], *, codec: str, level: int | None) -> str:
        raise NotImplementedError

    def job(self, job_id: str) -> Job:
        raise UnknownError(job_id)

    def snapshot(self, *, deadline: float) -> Iterator[SnapshotPage]:
        return iter(())


class World:
    """A page over numbers that a test makes, at times that it sets."""

    def __init__(self, *usage: TierUsage, health: Health | Exception = _WELL) -> None:
        self.now = 50.0
        self.metrics = Metrics(_NODE)
        self.history = History(self.metrics, clock=lambda: self.now, monotonic=lambda: self.now)
        self.instance = Still(usage or [TierUsage("", "memory", "", 10, 100, 1)], health)
        self.page = PageData(
            self.instance, self.metrics, self.history, clock=lambda: self.now, monotonic=lambda: self.now
        )

    def look(self, later: float = 0.0, workers: Sequence[Worker] = ()) -> dict[str, Any]:
        self.now += later
        found: dict[str, Any] = json.loads(json.dumps(self.page(workers), allow_nan=False))
        return found


DISK, REMOTE = "file:///nvme/kv?bytes=…", "s3://bucket/kv"


def test_tiers_are_added_over_namespaces_and_unknown_stays_unknown() -> None:
    world = World(
        TierUsage("", "memory", "", 10, 100, 1, pinned=1, hits=5, evicted=2),
        TierUsage("", "disk", DISK, 50, 0, 7),
        TierUsage("a", "memory", "", 20, 60, 3, hits=1),
        TierUsage("a", "disk", "file:///nvme/a", 5, 40, -1),
    )
    memory, disk = world.look()["tiers"]
    assert (memory["used"], memory["capacity"], memory["records"], memory["hits"]) == (30, 160, 4, 6)
    assert (memory["pinned"], memory["evicted"], memory["url"]) == (1, 2, "")
    assert (disk["used"], disk["capacity"], disk["records"], disk["url"]) == (55, 0, -1, "2 places")
    namespaces = world.look()["namespaces"]
    assert [row["name"] for row in namespaces] == ["", "a"]
    assert namespaces[1]["tiers"]["disk"] == {"used": 5, "capacity": 40, "records": -1}


def test_ten_thousand_namespaces_and_nodes_are_the_ones_that_matter() -> None:
    world = World(*(TierUsage(f"<b>{number}", "memory", "", number, 0, 1) for number in range(10_000)))
    states = ["lost" if number == 2777 else "ready" for number in range(3000)]
    workers = [
        Worker(f"n{number}", "", "", "", "", 0.0, [""], ["memory"], state, 0.1, 0.5, 7, [])
        for number, state in enumerate(states)
    ]
    found = world.look(workers=workers)
    assert [row["name"] for row in found["namespaces"]] == [f"<b>{number}" for number in range(9999, 9949, -1)]
    assert (found["more_namespaces"], found["tiers"][0]["used"]) == (9950, sum(range(10_000)))
    assert (len(found["nodes"]), found["more_nodes"]) == (200, 2800)
    assert [row["name"] for row in found["nodes"][:2]] == ["n1", "n2777"], "this one, and those that are not well"
    assert len(json.dumps(found)) < 100_000, "asked for every two seconds"


def test_flow_is_what_the_last_seconds_brought() -> None:
    world = World(
        TierUsage("", "memory", "", 0, 1, 0), TierUsage("", "disk", DISK, 0, 1, 0),
        TierUsage("", "remote", REMOTE, 0, 0, -1),
    )  # fmt: skip
    add = world.metrics.add
    add("kvstore_node_bytes_total", "default", "out", amount=1e9)
    assert [tier["read_bytes_s"] for tier in world.look()["tiers"]] == [None, None, None]
    add("kvstore_node_bytes_total", "default", "out", amount=3000)
    add("kvstore_node_bytes_total", "a", "out", amount=1000)
    add("kvstore_node_bytes_total", "a", "in", amount=500)
    add("kvstore_tier_events_total", "file:///nvme/kv", "stored_bytes", amount=800)
    add("kvstore_backend_bytes_total", "s3://bucket/kv", "get", amount=600)
    memory, disk, remote = world.look(2.0)["tiers"]
    assert (memory["read_bytes_s"], memory["write_bytes_s"]) == (2000, 250)
    assert (disk["read_bytes_s"], disk["write_bytes_s"]) == (0, 400)
    assert (remote["read_bytes_s"], remote["write_bytes_s"]) == (300, 0)
    assert [tier["read_bytes_s"] for tier in world.look(20.0)["tiers"]] == [None, None, None]  # nobody looked
    assert world.look(5.0)["tiers"][0]["read_bytes_s"] == 0


def test_flow_survives_a_counter_that_began_anew() -> None:
    world = World()
    values = iter([1e6, 1e6, 500.0])
    source = Metrics(_NODE)

    def snapshot() -> dict[str, Any]:
        series = [{"labels": {"namespace": "default", "way": "out"}, "value": next(values)}]
        labels = ["namespace", "way"]
        return {"kvstore_node_bytes_total": {"kind": "counter", "doc": "x", "labels": labels, "series": series}}

    page = PageData(
        world.instance, snapshot, History(source), clock=lambda: world.now, monotonic=lambda: world.now
    )  # fmt: skip
    page()
    world.now += 1
    assert page()["tiers"][0]["read_bytes_s"] == 0
    world.now += 1
    assert page()["tiers"][0]["read_bytes_s"] == 250


def test_operations_and_errors_are_of_the_last_hour() -> None:
    world = World(TierUsage("", "disk", DISK, 0, 1, 0))
    meter = world.metrics.operation("file:/nvme/kv", "get")
    for _ in range(50):
        meter.record(4.0, statuses={"ok": 1}, nbytes=100)
    world.metrics.add("kvstore_backend_errors_total", "file:/nvme/kv", "get", "CorruptRecord", amount=3)
    first = world.look(60.0)
    assert [(row["backend"], row["operation"], row["calls"]) for row in first["operations"]] == [("disk", "get", 50)]
    assert 2.5 < first["operations"][0]["p99_s"] <= 5.0
    assert first["operations"][0]["bytes_s"] == pytest.approx(25)
    assert first["errors"] == [{"backend": "disk", "operation": "get", "error": "CorruptRecord", "count": 3}]
    for _ in range(100):
        meter.record(0.0004, statuses={"ok": 1}, nbytes=100)
    for _ in range(61):
        world.now += 60
        world.page.tick()
    world.metrics.add("kvstore_node_records_total", "default", "disk_errors", amount=2)
    meter.record(0.02, statuses={"ok": 1}, nbytes=1)
    later = world.look()
    assert 3600 <= later["window_s"] <= 3660
    assert [row["calls"] for row in later["operations"]] == [1]
    assert 0.01 < later["operations"][0]["p99_s"] <= 0.025
    assert later["errors"] == [{"backend": "node", "operation": "", "error": "disk errors", "count": 2}]


def test_what_is_remembered_is_bounded() -> None:
    world = World()
    for _ in range(500):
        world.now += 61
        world.page.tick()
        for _ in range(3):
            world.look(0.2)
    assert len(world.page._minutes) <= 62
    assert len(world.page._recent) <= 11


def test_what_is_remembered_does_not_grow_with_namespaces() -> None:
    world = World()
    for number in range(50):
        for event in ("hits", "misses", "puts", "failed"):
            world.metrics.add("kvstore_node_records_total", f"tenant {number}", event)
        world.metrics.add("kvstore_node_bytes_total", f"tenant {number}", "out", amount=10)
    assert world.look(60.0)["errors"] == [{"backend": "node", "operation": "", "error": "failed", "count": 50}]
    assert len(world.page._minutes[-1].numbers) == 2


def test_the_page_itself_and_probes_are_no_slow_operations() -> None:
    world = World()
    for route in ("/", "/page/data", "/healthz", "/metrics", "/v1/lookup"):
        world.metrics.observe("kvstore_control_request_seconds", route, value=0.5)
    assert [(row["backend"], row["operation"]) for row in world.look()["operations"]] == [("http", "/v1/lookup")]


def test_slow_ones_beyond_the_last_bucket_say_more_than() -> None:
    world = World()
    world.metrics.operation("s3", "put").record(77.0, statuses={"ok": 1})
    (row,) = world.look()["operations"]
    assert (row["p99_s"], row["p99_over"]) == (10.0, True)


def test_breakers_the_worst_first_and_the_tier_that_is_down() -> None:
    world = World(TierUsage("", "memory", "", 0, 1, 0), TierUsage("", "remote", REMOTE, 0, 0, -1))
    world.metrics.set("kvstore_breaker_state", "a", "read", value=0)
    world.metrics.set("kvstore_breaker_state", "s3://bucket/kv", "read", value=2)
    world.metrics.set("kvstore_breaker_state", "s3://bucket/kv", "write", value=1)
    world.metrics.add("kvstore_breaker_refused_total", "s3://bucket/kv", "get", amount=4)
    found = world.look()
    assert [(row["backend"], row["side"], row["state"], row["refused"]) for row in found["breakers"]] == [
        ("remote", "read", "open", 4), ("remote", "write", "half-open", 4), ("a", "read", "closed", 0),
    ]  # fmt: skip
    assert [tier["state"] for tier in found["tiers"]] == ["closed", "open"]


@pytest.mark.parametrize(
    ("health", "state"),
    [
        (Health(True, True, 0.0), "ready"),
        (Health(True, True, 0.0, ["the disk is slow"]), "degraded"),
        (Health(True, False, 0.0, ["draining"]), "draining"),
        (Health(False, False, 0.0, ["closed"]), "down"),
    ],
)
def test_states(health: Health, state: str) -> None:
    assert World(health=health).look()["node"]["state"] == state


def test_an_instance_that_is_late_is_shown_all_the_same() -> None:
    found = World(health=TransientError("no answer in time")).look()
    assert found["node"]["state"] == "draining"
    assert found["node"]["problems"] == ["no answer in time"]
    assert found["nodes"][0]["name"] == "n1"


def test_nodes_are_this_one_or_all_that_a_controller_knows() -> None:
    usage = [TierUsage("", "memory", "", 10, 100, 4), TierUsage("", "disk", DISK, 1, 2, 9)]
    (alone,) = World(*usage).look()["nodes"]
    assert (alone["name"], alone["self"], alone["used"], alone["records"], alone["load"]) == ("n1", True, 10, 4, 0.25)
    workers = [
        Worker(name, address, "", "", "0.1.0", 0.0, [""], ["memory"], state, age, 0.5, 7, usage[:1])
        for name, address, state, age in (("n1", "10.0.0.1:7070", "ready", 0.1), ("n2", "10.0.0.2:7070", "lost", 40.0))
    ]
    rows = World(*usage).look(workers=workers)["nodes"]
    assert [(row["name"], row["self"], row["state"], row["heard_s"]) for row in rows] == [
        ("n1", True, "ready", 0.1), ("n2", False, "lost", 40.0),
    ]  # fmt: skip


def test_a_controller_has_no_instance_of_its_own() -> None:
    usage = [TierUsage("", "memory", "", 10, 100, 4)]
    worker = Worker("n2", "10.0.0.2:7070", "", "", "0.1.0", 0.0, [""], ["memory"], "ready", 0.1, 0.5, 7, usage)
    metrics = Metrics(_NODE)
    found = PageData(None, metrics, History(metrics))([worker, worker])
    assert (found["node"]["name"], found["node"]["state"], found["engines"]) == ("controller", "ready", None)
    assert found["tiers"][0]["used"] == 20
    assert found["hour"] is None
    assert [row["self"] for row in found["nodes"]] == [False, False]


# The routes.


def test_the_app_remembers_the_hour_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    from kvstore.control import page
    from kvstore.control.app import build_app
    from kvstore.control.settings import ControlSettings

    ticked = threading.Semaphore(0)
    monkeypatch.setattr(page, "_TICK_S", 0.001)
    monkeypatch.setattr(page.PageData, "tick", lambda _: ticked.release())
    metrics = Metrics(_NODE)
    odd = "file:///\udcff"  # a folder whose name is no UTF-8
    instance = Still([TierUsage("", "memory", "", 10, 100, 1), TierUsage("", "disk", odd, 10, 100, 1)])
    app = build_app(
        instance, settings=ControlSettings(admin_token=b"admin", tokens={"": b"mine"}), metrics=metrics,
        page=page.routes(instance, metrics, History(metrics)),
    )  # fmt: skip
    with TestClient(app) as client:
        assert ticked.acquire(timeout=30)
        assert ticked.acquire(timeout=30)
        for path in ("/", "/page/page.css", "/page/page.js", "/page/draw.js"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert client.get("/page/data").status_code == 401
        assert client.get("/page/data", headers={"Authorization": "Bearer mine"}).status_code == 401
        answer = client.get("/page/data", headers={"Authorization": "Bearer admin"})
        assert answer.json()["node"]["name"] == "n1"
        assert answer.json()["tiers"][1]["url"] == odd
        assert not any(path.startswith("/page") or path == "/" for path in client.get("/openapi.json").json()["paths"])


# The hour.


def test_the_hour_of_a_process_that_has_just_started() -> None:
    world = World()
    world.metrics.add("kvstore_node_records_total", "default", "hits", amount=6)
    world.metrics.add("kvstore_node_records_total", "default", "misses", amount=2)
    hour = world.look(10.0)["hour"]
    assert hour["hits"] == [None] * (MINUTES - 1) + [6]
    assert hour["asked"][-1] == 8
    assert hour["start"] == 50.0 - 60 * (MINUTES - 1)


@given(st.lists(st.tuples(st.floats(60, 1000), st.integers(0, 1000)), max_size=70), st.floats(0, 60))
def test_the_hour_loses_and_invents_nothing(rows: list[tuple[float, int]], under_way: float) -> None:
    minutes, start = [], 1e9
    for seconds, hits in [*rows, (under_way, 5)]:
        minutes.append(Minute(start, seconds, hits=hits))
        start += seconds
    hour = _hour(minutes, start)
    assert all(len(hour[name]) == MINUTES for name in ("asked", "hits", "saved_s", "bytes", "errors"))
    known = [value for value in hour["hits"] if value is not None]
    assert hour["hits"][-1] == 5
    total = sum(hits for _, hits in rows) + 5
    assert sum(known) <= total + 1e-6
    if sum(round(seconds / 60) for seconds, _ in rows) < MINUTES:  # all of it fits
        assert sum(known) == pytest.approx(total)
        assert hour["hits"][: MINUTES - len(known)] == [None] * (MINUTES - len(known))


@given(st.lists(st.floats(1e-6, 20.0), min_size=1, max_size=300), st.sampled_from((0.5, 0.9, 0.99)))
def test_a_quantile_is_in_the_bucket_of_the_value(values: list[float], part: float) -> None:
    counts = [sum(value <= bound for value in values) for bound in SECOND_BUCKETS]
    found, over = _quantile(SECOND_BUCKETS, counts, len(values), part)
    exact = sorted(values)[math.ceil(part * len(values)) - 1]
    if over:
        assert exact > SECOND_BUCKETS[-1] == found
        return
    high = next(bound for bound in SECOND_BUCKETS if exact <= bound)
    low = max((bound for bound in SECOND_BUCKETS if bound < high), default=0.0)
    assert low <= found <= high
