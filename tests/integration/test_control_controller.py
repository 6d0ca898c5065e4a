"""A controller over HTTP, with nodes that report to it: what it knows, when, and what it passes on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.control import Client, DeniedError, Health, Journal, UnknownError
from kvstore.control.access import Access
from kvstore.control.controller import Controller
from kvstore.control.requests import Prompt, Report
from kvstore.control.service import Ask
from kvstore.control.settings import ControlSettings
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key
from tests.control_support import PlainInstance, controller, eventually, keys_of, plain_node, reporting
from tests.servers.certificate import make_certificate

NOBODY = Access(ControlSettings()).recognise(None)


def _has(client: Client, keys: list[Key], **expected: int) -> bool:
    return {place.instance: place.hit_chunks for place in client.lookup(keys=keys).places} == expected


@contextlib.contextmanager
def _two_nodes(**settings_: Any) -> Iterator[tuple[PlainInstance, PlainInstance, Client, str]]:
    with contextlib.ExitStack() as stack:
        first, _ = stack.enter_context(plain_node("n0", **settings_))
        second, _ = stack.enter_context(plain_node("n1", **settings_))
        _, url = stack.enter_context(controller(**settings_))
        token = settings_.get("admin_token", b"").decode()
        for instance in (first, second):
            stack.enter_context(reporting(instance, url, token))
        client = stack.enter_context(Client(url, token=token))
        eventually(lambda: {w.instance: w.state for w in client.workers()} == {"n0": "ready", "n1": "ready"})
        yield first, second, client, url


def test_it_knows_what_came_before_and_after_it_and_what_left() -> None:
    keys = keys_of(1, 6)
    first = PlainInstance("n0")
    first.put("", "disk", keys[:2])  # before anybody listened: only a snapshot tells
    with controller() as (_, url), Client(url) as client, reporting(first, url):
        eventually(lambda: _has(client, keys, n0=2))
        first.put("", "memory", keys[:4])
        eventually(lambda: _has(client, keys, n0=4))
        found = client.lookup(keys=keys, chunk_size=8)
        assert (found.instance, found.hit_tokens, found.tier) == ("n0", 32, "memory")
        first.evict("", "memory", keys[1:4])
        eventually(lambda: _has(client, keys, n0=2))
        assert client.lookup(keys=keys, chunk_size=8).places[0].tiers == {"memory": 8, "disk": 8}
        assert client.workers()[0].chunks == 2
        first.clear("")
        eventually(lambda: _has(client, keys))


def test_a_controller_that_was_started_anew_is_told_all_again() -> None:
    keys = keys_of(1, 3000)
    first = PlainInstance("n0")
    with controller() as (_, url):
        port = url.rpartition(":")[2]
        with reporting(first, url):
            first.put("", "memory", keys)
            with Client(url) as client:
                eventually(lambda: _has(client, keys, n0=3000))
    with reporting(first, url) as reporter:
        eventually(lambda: reporter.failing)
        first.put("", "disk", keys_of(2, 4))
        with controller(listen=f"127.0.0.1:{port}"), Client(url) as client:
            eventually(lambda: _has(client, keys, n0=3000))
            eventually(lambda: _has(client, keys_of(2, 4), n0=4))
            assert not reporter.failing


def test_a_node_that_falls_behind_takes_a_snapshot() -> None:
    keys = keys_of(1, 40)
    first = PlainInstance("n0", journal=Journal(capacity=30))
    with controller() as (_, url), Client(url) as client, reporting(first, url):
        eventually(lambda: client.workers() and client.workers()[0].state == "ready")
        for key in keys:
            first.put("", "memory", [key])
        eventually(lambda: _has(client, keys, n0=40))


def test_a_node_that_was_started_anew_has_nothing_of_before() -> None:
    keys = keys_of(1, 4)
    old = PlainInstance("n0", started=1000.0)
    old.put("", "memory", keys)
    with controller() as (_, url), Client(url) as client:
        with reporting(old, url):
            eventually(lambda: _has(client, keys, n0=4))
        new = PlainInstance("n0", started=2000.0)
        new.put("", "memory", keys[:1])
        with reporting(new, url):
            eventually(lambda: _has(client, keys, n0=1))


def test_two_nodes_of_one_name_are_told_apart_and_the_later_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvstore.control")
    keys = keys_of(1, 4)
    new, old = PlainInstance("n0", started=2000.0), PlainInstance("n0", started=1000.0)
    new.put("", "memory", keys)
    with controller() as (_, url), Client(url) as client, reporting(new, url):
        eventually(lambda: _has(client, keys, n0=4))
        with reporting(old, url) as reporter:
            eventually(lambda: reporter.failing)
        assert "another instance of the name 'n0'" in caplog.text
        assert _has(client, keys, n0=4)


def test_many_events_and_large_ones_arrive_in_order() -> None:
    """One batch is larger than a report may be; and a record comes and goes many times."""
    first = PlainInstance("n0")
    many, few = keys_of(1, 20_000), keys_of(2, 3)
    with controller() as (_, url), Client(url, timeout=60) as client, reporting(first, url):
        eventually(lambda: client.workers() and client.workers()[0].state == "ready")
        first.put("", "memory", many)
        for _ in range(300):
            first.put("", "memory", few)
            first.evict("", "memory", few[1:])
        eventually(lambda: client.workers()[0].chunks == 20_001, within=60)
        assert _has(client, few, n0=1)
        assert _has(client, many[-5000:], n0=5000)


def test_a_prompt_goes_where_it_was_before_unless_too_much_waits_there() -> None:
    keys = keys_of(1, 8)
    with _two_nodes() as (first, second, client, _):
        first.put("", "memory", keys)
        second.put("", "memory", keys[:4])
        eventually(lambda: _has(client, keys, n0=8, n1=4))
        found = client.route(keys=keys)
        assert (found.instance, found.hit_tokens, found.tokens) == ("n0", 2048, 2048)
        assert client.route(keys=keys, candidates={"n0": 900, "n1": 0}).instance == "n0"
        assert client.route(keys=keys, candidates={"n0": 1100, "n1": 0}).instance == "n1"
        assert client.route(keys=keys, candidates=["n1"]).instance == "n1"
        # One that does not report has no hits, and counts as busy unless the caller knows better.
        assert client.route(keys=keys, candidates=["n1", "stranger"]).instance == "n1"
        assert client.route(keys=keys_of(5, 8), candidates={"n0": 10, "stranger": 0}).instance == "stranger"
        first.healthy = Health(True, False, 0.0)
        eventually(lambda: client.route(keys=keys).instance == "n1")
        first.healthy = Health(True, True, 5.0)
        eventually(lambda: {h.instance: h.health.load for h in client.health()} == {"n0": 5.0, "n1": 0.0})
        assert client.route(keys=keys).instance == "n1"
        second.healthy = Health(True, False, 0.0)
        first.healthy = Health(False, True, 0.0)
        eventually(lambda: [h.state for h in client.health()] == ["draining", "draining"])
        with pytest.raises(TransientError, match="no instance is ready"):
            client.route(keys=keys)


def test_what_is_done_is_done_by_the_nodes_that_it_concerns() -> None:
    keys = keys_of(1, 4)
    with _two_nodes() as (first, second, client, _):
        first.put("", "memory", keys)
        second.put("", "disk", keys[:1])
        eventually(lambda: _has(client, keys, n0=4, n1=1))
        assert client.pin(keys=keys[2:]).instances == {"n0": 2}
        assert client.pin(keys=keys).instances == {"n0": 4, "n1": 1}
        assert client.unpin(keys=keys, instances=["n1"]).instances == {"n1": 1}
        moved = client.wait(client.move(keys=keys, src="memory", dst="n1", to_instance=True))
        assert moved.ok
        assert set(moved.jobs) == {"n0"}
        assert ("move", second.who.address) in first.calls
        cleared = client.wait(client.clear(everything=True))
        assert set(cleared.jobs) == {"n0", "n1"}
        assert cleared.ok
        eventually(lambda: _has(client, keys))
        assert client.clear(everything=True, namespace="team-a").event.count("@") == 2
        nothing = client.compress("lz4", keys=keys)
        assert nothing.event == ""
        assert client.wait(nothing).ok
        with pytest.raises(UnknownError, match="'n7'"):
            client.pin(keys=keys, instances=["n7"])
        with pytest.raises(UnknownError, match="none of this"):
            client.check_finish("rubbish")
        # One that fails does not stop the others, and is named.
        first.put("", "memory", keys)
        second.put("", "memory", keys)
        eventually(lambda: _has(client, keys, n0=4, n1=4))
        started = client.compress("cachegen", keys=keys)
        assert {failure.instance for failure in started.failures} == {"n0", "n1"}
        assert "cachegen" in started.failures[0].error


def test_it_says_where_instances_are() -> None:
    with _two_nodes() as (first, _, client, _url):
        (found,) = client.query_ip(["n0"])
        assert (found.ip, found.address, found.http) == ("127.0.0.1", first.who.address, first.who.http)
        assert [each.instance for each in client.query_ip()] == ["n0", "n1"]
        with pytest.raises(UnknownError, match="'n9'"):
            client.query_ip(["n0", "n9"])


def test_nodes_are_asked_with_the_callers_token_and_namespaces_stay_apart() -> None:
    tokens = {"admin_token": b"the-admin", "tokens": {"": b"default-secret", "team-a": b"secret-a"}}
    keys = keys_of(1, 3)
    with _two_nodes(**tokens) as (first, _, admin, url):
        first.put("", "memory", keys)
        first.put("team-a", "memory", keys[:1])
        eventually(lambda: _has(admin, keys, n0=3))
        with Client(url, token="secret-a") as mine, Client(url) as nobody:
            eventually(lambda: mine.lookup(keys=keys, namespace="team-a").hit_chunks == 1)
            with pytest.raises(DeniedError):
                mine.lookup(keys=keys)
            assert mine.workers()[0].chunks == 1
            assert {tier.namespace for tier in mine.workers()[0].usage} == {"team-a"}
            assert mine.pin(keys=keys, namespace="team-a").count == 1
            event = mine.clear(everything=True, namespace="team-a")
            assert mine.wait(event).ok
            theirs = admin.clear(keys=keys[:1])
            found = mine.check_finish(theirs)
            assert found.finished
            assert not found.ok
            assert not found.jobs
            with pytest.raises(DeniedError, match="admin token"):
                mine.move(keys=keys, namespace="team-a", src="memory", dst="n1", to_instance=True)
            for client in (mine, nobody):
                with pytest.raises(DeniedError, match=r"report token|needs a token"):
                    client.report(_report(first))


# The rest is the controller itself, with a clock of the test's own.


def _report(instance: PlainInstance, **changes: Any) -> dict[str, Any]:
    return {
        "instance": asdict(instance.info()), "epoch": instance.journal.epoch, "health": asdict(Health(True, True, 0.0)),
        "usage": None, "since": 0, "next": 0, "events": [], "snapshot": None, **changes,
    }  # fmt: skip


def _snapshot(keys: list[Key], *, page: int = 0, last: bool = True, at: int = 0, name: str = "s") -> dict[str, Any]:
    pages = [{"namespace": "", "tier": "memory", "op": "admit", "keys": base64.b64encode(b"".join(keys)).decode()}]
    return {"id": name, "page": page, "last": last, "at": at, "pages": pages}


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _ask() -> Ask:
    return Ask(NOBODY, "", None, 1e12)


def test_who_has_not_reported_is_lost_then_forgotten_and_comes_back_as_he_was() -> None:
    keys = keys_of(1, 2)

    async def run() -> None:
        clock = _Clock()
        controlled = Controller(clock=clock, lost_s=10, forget_s=100)
        instance = PlainInstance("n0")

        async def tell(**changes: Any) -> bool:
            return (await controlled.report(Report(**_report(instance, **changes)))).snapshot

        async def hits() -> int:
            return (await controlled.lookup(_ask(), Prompt(keys, 8))).hit_chunks

        assert await tell()  # wants a snapshot
        assert (await controlled.workers(_ask()))[0].state == "loading"
        assert not await tell(snapshot=_snapshot(keys))
        assert await hits() == 2
        clock.now += 10.5
        assert await hits() == 0
        assert (await controlled.workers(_ask()))[0].state == "lost"
        assert not await tell()
        assert await hits() == 2
        clock.now += 101
        await controlled.tick()
        assert await controlled.workers(_ask()) == []
        assert await tell()
        assert await hits() == 0
        await controlled.stop()

    asyncio.run(run())


def test_a_node_whose_clock_went_back_gets_its_name_when_the_old_one_is_lost() -> None:
    async def run() -> None:
        clock = _Clock()
        controlled = Controller(clock=clock, lost_s=10)
        before, after = PlainInstance("n0", started=2000.0), PlainInstance("n0", started=1000.0)
        await controlled.report(Report(**_report(before)))
        with pytest.raises(ConfigError, match="another instance of the name 'n0'"):
            await controlled.report(Report(**_report(after)))
        clock.now += 10.5
        await controlled.report(Report(**_report(after)))
        assert (await controlled.workers(_ask()))[0].started == 1000.0
        await controlled.stop()

    asyncio.run(run())


def test_replies_that_were_lost_and_reports_that_were_do_no_harm() -> None:
    keys = keys_of(1, 4)

    async def run() -> None:
        controlled = Controller()
        instance = PlainInstance("n0")

        def event(op: str, some: list[Key]) -> dict[str, Any]:
            joined = base64.b64encode(b"".join(some)).decode()
            return {"namespace": "", "tier": "memory", "op": op, "keys": joined}

        async def tell(**changes: Any) -> tuple[bool, int]:
            return tuple(asdict(await controlled.report(Report(**_report(instance, **changes)))).values())  # type: ignore[return-value]

        async def hits() -> int:
            return (await controlled.lookup(_ask(), Prompt(keys, 8))).hit_chunks

        assert await tell(snapshot=_snapshot(keys[:2], at=5)) == (False, 5)
        first = {"since": 5, "next": 6, "events": [event("admit", keys[2:])]}
        assert await tell(**first) == (False, 6)
        assert await tell(since=6, next=7, events=[event("evict", keys[2:])]) == (False, 7)
        assert await hits() == 2
        assert await tell(**first) == (False, 7)  # an old one again: known
        assert await hits() == 2
        # Told again together with something new: in order, so the last word counts.
        again = [*first["events"], event("evict", keys[2:]), event("evict", keys[1:2])]
        assert await tell(since=5, next=8, events=again) == (False, 8)
        assert await hits() == 1
        assert await tell(since=9, next=10, events=[event("admit", keys)]) == (True, 0)  # one is missing
        assert await hits() == 1
        # A snapshot whose pages do not follow each other is begun anew; what was known counts until it is whole.
        assert (await tell(snapshot=_snapshot(keys, last=False, at=10)))[0] is False
        assert (await tell(snapshot=_snapshot(keys, page=2, at=10)))[0] is True
        assert (await tell(snapshot=_snapshot(keys, page=1, name="other", at=10)))[0] is True
        assert await hits() == 1
        assert (await tell(snapshot=_snapshot(keys[:3], last=False, at=10)))[0] is False
        assert await hits() == 1
        assert (await tell(snapshot=_snapshot(keys[3:], page=1, at=10))) == (False, 10)
        assert await hits() == 4
        with pytest.raises(ConfigError, match="'tape'"):
            await tell(since=10, next=11, events=[{**event("admit", keys), "tier": "tape"}])
        joined = base64.b64encode(b"x" * 31).decode()
        with pytest.raises(ConfigError, match="31 bytes"):
            await tell(since=10, next=11, events=[{**event("admit", []), "keys": joined}])
        await controlled.stop()

    asyncio.run(run())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 30), st.integers(20, 200))
def test_whatever_is_lost_on_the_way_in_the_end_it_knows_what_the_node_has(seed: int, capacity: int) -> None:
    """A node changes at random, and tells by the reporter's own steps, over a wire that loses reports and replies, to a
    controller that is started anew now and then."""
    from kvstore.control.reporter import Reporter

    source = random.Random(seed)
    keys = keys_of(1, 24)
    instance = PlainInstance("n0", journal=Journal(capacity=capacity))
    loop = asyncio.new_event_loop()
    box = {"controller": Controller()}

    class Wire:
        url = "wire"

        def report(self, body: dict[str, Any], *, timeout: float | None = None) -> Any:
            if source.random() < 0.15:
                raise TransientError("lost on the way there")
            reply = loop.run_until_complete(box["controller"].report(Report(**body)))
            if source.random() < 0.15:
                raise TransientError("lost on the way back")
            return reply

    reporter = Reporter.__new__(Reporter)  # without its thread: its steps are taken here
    reporter.__dict__.update(
        _instance=instance, _client=Wire(), _interval=0.0, _info=asdict(instance.info()), _since=0, _told_usage=-1e9,
    )  # fmt: skip
    reporter._stop = type("Never", (), {"is_set": lambda self: False})()  # type: ignore[assignment]
    snapshot = True
    for _ in range(60):
        some = source.sample(keys, source.randrange(1, 8))
        tier = source.choice(("memory", "disk"))
        what = source.random()
        if what < 0.5:
            instance.put("", tier, some)
        elif what < 0.9:
            instance.evict("", tier, some)
        elif what < 0.93:
            instance.clear("")
        elif what < 0.96:
            box["controller"] = Controller()
        if source.random() < 0.5:
            with contextlib.suppress(TransientError):
                snapshot = reporter._snapshot() if snapshot else reporter._events()
    source.random = lambda: 1.0  # type: ignore[method-assign]  # nothing is lost any more
    for _ in range(6):
        snapshot = reporter._snapshot() if snapshot else reporter._events()
    assert not snapshot
    for key in keys:
        found = loop.run_until_complete(box["controller"].lookup(_ask(), Prompt([key], 8)))
        expected = instance.lookup("", [key], deadline=1e12)[0]
        assert found.tier == (expected or "")
    loop.close()


def test_a_report_that_ends_in_the_middle_is_told_again() -> None:
    """The deadline of a report may pass while it is taken in; nothing is lost by that."""
    keys = keys_of(1, 4000)

    async def run() -> None:
        controlled = Controller()
        instance = PlainInstance("n0")
        await controlled.report(Report(**_report(instance, snapshot=_snapshot([]))))
        joined = base64.b64encode(b"".join(keys)).decode()
        event = {"namespace": "", "tier": "memory", "op": "admit", "keys": joined}
        report = Report(**_report(instance, since=0, next=1, events=[event]))
        task = asyncio.create_task(controlled.report(report))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await controlled.report(report)).next == 1
        assert (await controlled.lookup(_ask(), Prompt(keys, 8))).hit_chunks == 4000
        assert (await controlled.workers(_ask()))[0].chunks == 4000
        await controlled.stop()

    asyncio.run(run())


def test_a_name_that_cannot_stand_in_an_event_is_refused() -> None:
    with controller() as (_, url), Client(url) as client:
        for name in ("a@b", "a,b", "a/b", "", "x" * 200):
            instance = PlainInstance("n0")
            instance.who = replace(instance.who, name=name)
            with pytest.raises(ConfigError, match="name"):
                client.report(_report(instance))
        assert client.workers() == []


# Nodes that lie, or whose words cross.


def _event(op: str, keys: list[Key], tier: str = "memory", namespace: str = "") -> dict[str, Any]:
    return {"namespace": namespace, "tier": tier, "op": op, "keys": base64.b64encode(b"".join(keys)).decode()}


def test_what_a_node_still_tells_when_its_successor_is_there_counts_for_nobody() -> None:
    """A report is taken in in slices; between two of them the node is started anew, tells all it has, and the slot of
    its old self goes to another."""
    keys = keys_of(1, 5000)

    async def run(**told: Any) -> None:
        controlled = Controller()
        old, new = PlainInstance("n0", started=1000.0), PlainInstance("n0", started=2000.0)
        other = PlainInstance("n1")
        if "snapshot" not in told:
            await controlled.report(Report(**_report(old, snapshot=_snapshot([]))))
        late = asyncio.create_task(controlled.report(Report(**_report(old, **told))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not late.done()
        for instance in (new, other):
            reply = await controlled.report(Report(**_report(instance, snapshot=_snapshot([]))))
            assert not reply.snapshot
            await controlled.tick()
        assert (await late).snapshot
        await controlled.tick()
        for key in (keys[0], keys[-1]):
            assert (await controlled.lookup(_ask(), Prompt([key], 8))).places == ()
        assert [worker.chunks for worker in await controlled.workers(_ask())] == [0, 0]
        assert len(controlled._index) == 0
        await controlled.stop()

    asyncio.run(run(since=0, next=1, events=[_event("admit", keys)]))
    asyncio.run(run(snapshot=_snapshot(keys)))
    asyncio.run(run(snapshot=_snapshot(keys, last=False)))


def test_a_node_speaks_of_its_own_namespaces_only() -> None:
    async def run() -> None:
        controlled = Controller()
        instance = PlainInstance("n0")
        await controlled.report(Report(**_report(instance, snapshot=_snapshot([]))))
        for op in ("admit", "evict", "clear"):
            event = _event(op, keys_of(1, 2) if op != "clear" else [], namespace="team-b")
            with pytest.raises(ConfigError, match="namespace 'team-b', which it has not named"):
                await controlled.report(Report(**_report(instance, since=0, next=1, events=[event])))
        assert controlled._index.namespaces() == []
        await controlled.stop()

    asyncio.run(run())


def test_two_nodes_of_one_name_that_were_started_at_one_moment_do_not_take_turns() -> None:
    async def run() -> None:
        controlled = Controller()
        twins = [PlainInstance("n0", started=1000.0) for _ in range(2)]
        refused = 0
        for _ in range(4):
            for twin in twins:
                try:
                    await controlled.report(Report(**_report(twin, snapshot=_snapshot(keys_of(1, 1)))))
                except ConfigError:
                    refused += 1
        assert refused in (3, 4)  # one of them from its first word on, or as soon as the other has spoken
        await controlled.stop()

    asyncio.run(run())


def test_there_are_not_more_nodes_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.control.controller._MOST_NODES", 3)

    async def run() -> None:
        controlled = Controller()
        for number in range(3):
            await controlled.report(Report(**_report(PlainInstance(f"n{number}"))))
        with pytest.raises(TransientError, match="3 instances report here already"):
            await controlled.report(Report(**_report(PlainInstance("n3"))))
        await controlled.report(Report(**_report(PlainInstance("n1"))))
        assert len(await controlled.workers(_ask())) == 3
        await controlled.stop()

    asyncio.run(run())


def test_where_nodes_show_certificates_no_token_is_sent_to_one_that_has_none(tmp_path: Path) -> None:
    ca = str(make_certificate(tmp_path / "ca.pem"))

    async def run() -> None:
        controlled = Controller(ca=ca)
        with pytest.raises(ConfigError, match="https"):
            await controlled.report(Report(**_report(PlainInstance("n0", http="http://127.0.0.1:1"))))
        await controlled.report(Report(**_report(PlainInstance("n1", http="https://127.0.0.1:1"))))
        await controlled.report(Report(**_report(PlainInstance("n2"))))
        assert [worker.instance for worker in await controlled.workers(_ask())] == ["n1", "n2"]
        await controlled.stop()

    asyncio.run(run())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "true", "1e999", "9" * 400])
def test_a_load_that_is_no_load_is_refused(number: str) -> None:
    with controller() as (_, url), Client(url) as client:
        body = json.dumps(_report(PlainInstance("n0"))).replace('"load": 0.0', f'"load": {number}')
        assert number in body
        request = urllib.request.Request(f"{url}/v1/report", body.encode(), {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as error:
            assert error.code == 422
            assert "load" in json.load(error)["error"]["message"]
        assert client.workers() == []


def test_a_node_that_drains_or_is_lost_has_no_hits_to_route_by() -> None:
    keys = keys_of(1, 4)

    async def run() -> None:
        clock = _Clock()
        controlled = Controller(clock=clock)
        holder, other = PlainInstance("n0"), PlainInstance("n1")
        both = {"n0": 0.0, "n1": 0.0}
        # The candidate that has it is not the one that rendezvous hashing would take.
        nobody = await controlled.route(_ask(), Prompt(keys, 8), both)
        if nobody.instance == "n0":
            holder, other = other, holder
        name = holder.info().name
        await controlled.report(Report(**_report(holder, snapshot=_snapshot(keys))))
        await controlled.report(Report(**_report(other, snapshot=_snapshot([]))))
        assert (await controlled.route(_ask(), Prompt(keys, 8), both)).instance == name
        holder.healthy = Health(True, False, 0.0)
        await controlled.report(Report(**_report(holder, health=asdict(holder.healthy))))
        found = await controlled.route(_ask(), Prompt(keys, 8), both)
        assert (found.instance, found.hit_tokens) == (other.info().name, 0)
        await controlled.report(Report(**_report(holder)))
        assert (await controlled.route(_ask(), Prompt(keys, 8), both)).instance == name
        clock.now += 11
        await controlled.report(Report(**_report(other)))
        assert (await controlled.route(_ask(), Prompt(keys, 8), both)).hit_tokens == 0
        # Only such ones: somebody is better than nobody, since he who asks named them.
        assert (await controlled.route(_ask(), Prompt(keys, 8), {name: None})).instance == name
        await controlled.stop()

    asyncio.run(run())
