"""A pool of nodes: where records go, what is left when nodes go, and what comes back."""

from __future__ import annotations

import contextlib
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import Item
from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.placement import Placement
from kvstore.record import opaque_spec
from kvstore.wrappers import BreakerBackend, BreakerState, wrap
from kvstore.wrappers.base import LocalWait
from kvstore_backends.node import NodeBackend
from kvstore_backends.node.members import Member, parse_authority
from kvstore_backends.node.node import Node
from kvstore_backends.node.options import Settings
from kvstore_backends.node_server import NodeServer
from tests.node_support import (
    MEMORY,
    copies,
    data,
    get,
    key,
    keys,
    member,
    pool,
    put,
    servers,
    settings,
    soon,
    statuses,
    wait_until,
)


def addresses_of(nodes: Sequence[NodeServer]) -> list[str]:
    return [node.address for node in nodes]


@contextlib.contextmanager
def pool_of(nodes: Sequence[NodeServer], **options: Any) -> Iterator[NodeBackend]:
    with contextlib.closing(pool(addresses_of(nodes), **options)) as backend:
        yield backend


def split_by_owner(addresses: Sequence[str], some: Sequence[Key]) -> list[list[Key]]:
    """The keys by the node that is the first of theirs."""
    placement = Placement(addresses)
    groups: list[list[Key]] = [[] for _ in addresses]
    for each in some:
        groups[placement.order(each)[0]].append(each)
    return groups


def counted(backend: NodeBackend, name: str, *labels: str) -> float:
    return backend.metrics.value(f"kvstore_node_{name}", backend.name, *labels)


# Where records are.


def test_each_record_is_where_the_placement_says() -> None:
    with servers(3) as nodes, pool_of(nodes) as backend:
        addresses = addresses_of(nodes)
        records = {each: data(100, each) for each in keys(60)}
        assert statuses(put(backend, records)) == [Status.OK] * 60
        groups = split_by_owner(addresses, [*records])
        for address, group in zip(addresses, groups, strict=True):
            assert len(group) > 5
            for each in group[:3]:
                assert copies(addresses, each, 100) == [records[each] if a == address else None for a in addresses]


def test_replicas_are_on_as_many_nodes() -> None:
    with servers(4) as nodes, pool_of(nodes, replicas=3, write_quorum=3) as backend:
        records = {each: data(100, each) for each in keys(10)}
        assert statuses(put(backend, records)) == [Status.OK] * 10
        placement = Placement(addresses_of(nodes), replicas=3)
        for each, value in records.items():
            wanted = [value if at in placement.order(each) else None for at in range(4)]
            assert copies(addresses_of(nodes), each, 100) == wanted


# Nodes that are down.


def test_a_lost_node_costs_only_its_share() -> None:
    """Its keys are misses and its puts fail, at once; a breaker around the pool stays closed; and it comes back."""
    with servers(2) as nodes, contextlib.ExitStack() as stack:
        lost = stack.enter_context(NodeServer(memory_bytes=MEMORY))
        addresses = [*addresses_of(nodes), lost.address]
        backend = stack.enter_context(contextlib.closing(pool(addresses)))
        outer = BreakerBackend(backend, failures=2)
        records = {each: data(100, each) for each in keys(90)}
        assert statuses(put(outer, records)) == [Status.OK] * 90
        *kept, gone = split_by_owner(addresses, [*records])
        lost.close()
        wait_until(lambda: self_noticed(outer, gone[0]), "the node is found to be down")
        start = time.monotonic()
        for _ in range(20):
            got = get(outer, [*records], 100)
            for each, (outcome, value) in zip(records, got, strict=True):
                assert outcome.status is (Status.MISS if each in gone else Status.OK)
                assert value == (b"" if each in gone else records[each])
            assert statuses(get(outer, [gone[0]], 100)[0][:1]) == [Status.MISS]
            assert outer.stat([gone[0]], deadline=soon())[0].status is Status.MISS
        assert time.monotonic() - start < 20.0  # no call waited for its deadline of a minute
        assert counted(backend, "unreachable_reads_total") >= 20 * len(gone)
        for _ in range(20):
            (outcome,) = put(outer, {gone[0]: b"new"})
            assert isinstance(outcome.error, LocalWait)
            assert isinstance(outer.delete([gone[0]], deadline=soon())[0].error, LocalWait)
        assert outer.state is BreakerState.CLOSED
        assert counted(backend, "down") == 1
        assert {state["state"] for state in backend.stats()["nodes"].values()} == {"closed", "open"}
        stack.enter_context(NodeServer(lost.address, memory_bytes=MEMORY))
        wait_until(lambda: counted(backend, "down") == 0, "the node is found to be back")
        assert statuses(put(outer, {gone[0]: b"new"})) == [Status.OK]
        assert get(outer, [gone[0]], 10)[0][1] == b"new"
        assert len(kept) == 2


def self_noticed(backend: Any, gone: Key) -> bool:
    """Call until the node of `gone` is left alone for reads and for writes."""
    found: Outcome = get(backend, [gone], 100)[0][0]
    put(backend, {gone: b"x"})
    (again,) = put(backend, {gone: b"x"})
    return found.status is Status.MISS and "left alone" in str(again.error)


def test_if_no_node_is_up_the_pool_is_down() -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(servers(2))
        backend = stack.enter_context(contextlib.closing(pool(addresses_of(nodes))))
        outer = BreakerBackend(backend, failures=5)
        put(backend, dict.fromkeys(keys(10), b"x"))
        for node in nodes:
            node.close()
        wait_until(
            lambda: (
                statuses(get(outer, keys(10), 1)[0][:1]) == [Status.ERROR] and outer.read_state is BreakerState.OPEN
            ),
            "the breaker around the pool opens",
        )
        for outcome, _ in get(backend, keys(10), 1):
            assert isinstance(outcome.error, TransientError)
            assert not isinstance(outcome.error, LocalWait)


def test_with_replicas_nothing_is_lost_and_a_node_that_lost_its_memory_is_filled_again() -> None:
    with servers(2) as nodes, contextlib.ExitStack() as stack:
        lost = stack.enter_context(NodeServer(memory_bytes=MEMORY))
        addresses = [*addresses_of(nodes), lost.address]
        backend = stack.enter_context(contextlib.closing(pool(addresses, replicas=2)))
        records = {each: data(3000, each) for each in keys(60)}
        assert statuses(put(backend, records)) == [Status.OK] * 60
        lost.close()
        for _ in range(8):
            assert [value for _, value in get(backend, [*records], 3000)] == [*records.values()]
        more = {each: data(3000, each) for each in keys(60, "more")}
        assert statuses(put(backend, more)) == [Status.OK] * 60
        assert counted(backend, "underreplicated_puts_total") > 0
        stack.enter_context(NodeServer(lost.address, memory_bytes=MEMORY))  # with nothing in it
        wait_until(lambda: counted(backend, "down") == 0, "the node is found to be back")
        placement = Placement(addresses, replicas=2)
        short = [each for each in (*records, *more) if 2 in placement.order(each)]
        everything = {**records, **more}

        def filled() -> bool:
            assert [value for _, value in get(backend, [*everything], 3000)] == [*everything.values()]
            return all(copies([lost.address], each, 3000) == [everything[each]] for each in short[::7])

        wait_until(filled, "read repair fills the node")
        assert counted(backend, "repairs_total", "ok") > 0


def test_a_quorum_that_is_not_reached_is_an_error() -> None:
    with servers(1) as nodes, contextlib.ExitStack() as stack:
        lost = stack.enter_context(NodeServer(memory_bytes=MEMORY))
        addresses = [*addresses_of(nodes), lost.address]
        strict = stack.enter_context(contextlib.closing(pool(addresses, replicas=2, write_quorum=2)))
        lenient = stack.enter_context(contextlib.closing(pool(addresses, replicas=2)))
        lost.close()
        (outcome,) = put(strict, {key("a"): b"a"})
        assert isinstance(outcome.error, TransientError)
        assert "1 of 2 nodes" in str(outcome.error)
        assert statuses(put(lenient, {key("b"): b"b"})) == [Status.OK]
        assert get(lenient, [key("b")], 1)[0][1] == b"b"


def test_two_writers_with_different_bytes_leave_the_same_everywhere() -> None:
    with servers(3) as nodes, pool_of(nodes, replicas=3) as one, pool_of(nodes, replicas=3) as two:
        for turn in range(30):
            mine = key(f"contended {turn}")
            barrier = threading.Barrier(2)
            found: dict[int, Outcome] = {}

            def write(
                number: int, backend: NodeBackend, mine: Key = mine, barrier: Any = barrier, found: Any = found
            ) -> None:
                barrier.wait(60)
                found[number] = put(backend, {mine: bytes([number]) * (400_000 if number % 2 else 300_000)})[0]

            threads = [threading.Thread(target=write, args=pair) for pair in ((1, one), (2, two))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (won,) = (number for number, outcome in found.items() if outcome.ok)
            for value in copies(addresses_of(nodes), mine, 400_000):
                assert value is not None
                assert set(value) == {won}


# Membership.


def members_of(nodes: Sequence[NodeServer]) -> list[Member]:
    return [member(node.address) for node in nodes]


def test_a_new_node_gets_its_share_of_what_is_read() -> None:
    """Until then the nodes that had the keys before are asked."""
    with servers(3) as nodes, pool_of(nodes[:2]) as backend:
        addresses = addresses_of(nodes)
        records = {each: data(2000, each) for each in keys(90)}
        put(backend, records)
        backend.pool.update(members_of(nodes))
        *_, moved = split_by_owner(addresses, [*records])
        assert len(moved) > 10
        assert [value for _, value in get(backend, [*records], 2000)] == [*records.values()]
        assert backend.stat(moved, deadline=soon()) == [Outcome(Status.OK, 2000)] * len(moved)
        assert counted(backend, "former_hits_total") >= len(moved)
        assert backend.repairer.settled(60)
        assert copies([addresses[2]], moved[0], 2000) == [records[moved[0]]]
        assert {info.key for page in backend.list(deadline=soon()) for info in page} == records.keys()
        before = counted(backend, "former_hits_total")
        assert [value for _, value in get(backend, [*records], 2000)] == [*records.values()]
        assert counted(backend, "former_hits_total") == before


def test_a_record_is_removed_where_it_was_before_too() -> None:
    with servers(3) as nodes, pool_of(nodes[:2], read_repair=False) as backend:
        records = {each: data(200, each) for each in keys(60)}
        put(backend, records)
        backend.pool.update(members_of(nodes))
        get(backend, [*records], 200)  # so that quarantine believes that they were read
        assert statuses(backend.delete([*records][:30], deadline=soon())) == [Status.OK] * 30
        assert statuses(backend.quarantine([*records][30:], deadline=soon())) == [Status.OK] * 30
        assert backend.stat([*records], deadline=soon()) == [Outcome(Status.MISS)] * 60
        for each in [*records][::9]:
            assert copies(addresses_of(nodes), each, 200) == [None] * 3


def test_grace_ends_and_what_nobody_uses_is_closed() -> None:
    with servers(2) as nodes, pool_of(nodes[:1], rebalance_grace=0.3, read_repair=False) as backend:
        records = {each: data(200, each) for each in keys(40)}
        put(backend, records)
        backend.pool.update(members_of(nodes[1:]))
        assert [value for _, value in get(backend, [*records], 200)] == [*records.values()]
        assert nodes[0].stats()["connections"] > 0
        wait_until(lambda: backend.pool.now.former is None, "grace ends")
        wait_until(lambda: nodes[0].stats()["connections"] == 0, "its connections are closed")
        assert backend.stat([*records], deadline=soon()) == [Outcome(Status.MISS)] * 40
        assert [*backend.list(deadline=soon())] == []


def test_without_grace_a_node_that_left_is_let_go_when_its_calls_are_over() -> None:
    with servers(2) as nodes, pool_of(nodes[:1], rebalance_grace=0.0) as backend:
        put(backend, {key("k"): b"1"})
        with backend.pool.use("test") as snapshot:
            backend.pool.update(members_of(nodes[1:]))
            assert snapshot.retired
            assert snapshot.readers[0].stat([key("k")], deadline=soon())[0].ok  # a call under way goes on
        wait_until(lambda: nodes[0].stats()["connections"] == 0, "its connections are closed")
        assert backend.stat([key("k")], deadline=soon())[0].status is Status.MISS


def test_nodes_come_and_go_under_load() -> None:
    """With replicas, and one change at a time, no read fails and every byte is right."""
    options = {"replicas": 2, "rebalance_grace": 60.0}
    with servers(4) as nodes, pool_of(nodes[:3], **options) as backend:
        records = {each: data(4000, each) for each in keys(60)}
        put(backend, records)
        done = threading.Event()
        errors: list[BaseException] = []
        reads = [0]

        def read(number: int) -> None:
            picks = random.Random(number)
            try:
                while not done.is_set():
                    some = picks.sample([*records], 10)
                    got = get(backend, some, 4000)
                    assert [value for _, value in got] == [records[each] for each in some], statuses(
                        [o for o, _ in got]
                    )
                    reads[0] += 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(12):
                now = reads[0]
                backend.pool.update(members_of([*nodes[: turn % 4], *nodes[turn % 4 + 1 :]]))
                wait_until(lambda now=now: bool(errors) or reads[0] > now + 6, "reads go on")  # type: ignore[misc]
                if errors:
                    break
                assert backend.repairer.settled(60)
                get(backend, [*records], 4000)
                assert backend.repairer.settled(60)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not errors, errors[0]
        assert counted(backend, "membership_changes_total") == 12


def test_a_file_of_nodes_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nodes"
    with servers(2) as nodes:
        path.write_text(f"{nodes[0].address} name=a\n")
        found = Settings(path=str(path), discover="file", refresh=0.05, transport="tcp")
        with contextlib.closing(NodeBackend(found)) as backend:
            assert [*backend.stats()["nodes"]] == ["a"]
            path.write_text("what is this\n")
            wait_until(lambda: counted(backend, "membership_errors_total") >= 3, "the broken file is noticed")
            assert [*backend.stats()["nodes"]] == ["a"]
            assert len([r for r in caplog.records if "line 1" in r.getMessage()]) == 1  # counted often, logged once
            new = tmp_path / "new"
            new.write_text(f"{nodes[0].address} name=a\n{nodes[1].address} name=b weight=2\n")
            os.replace(new, path)
            wait_until(lambda: [*backend.stats()["nodes"]] == ["a", "b"], "the new node is there")
            assert statuses(put(backend, dict.fromkeys(keys(20), b"x"))) == [Status.OK] * 20


def test_a_broken_file_at_open_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("what is this\n")
    for name, what in (("nodes", "line 1"), ("missing", "No such file")):
        with pytest.raises(ConfigError, match=what):
            NodeBackend(Settings(path=str(tmp_path / name), discover="file"))


def test_a_name_may_come_to_be_known_later() -> None:
    """Until then calls fail, and say why."""
    with servers(1) as (node,):
        port = int(node.address.rpartition(":")[2])
        known: list[str] = []

        def resolve(host: str, port: int) -> list[str]:
            if not known:
                raise OSError(f"{host} is not known")
            return known

        found = Settings(
            members=parse_authority(f"kv.test:{port}"), discover="dns", refresh=0.05, transport="tcp", replicas=2
        )
        with contextlib.closing(NodeBackend(found, resolve=resolve)) as backend:
            for outcome in (*backend.stat(keys(2), deadline=soon()), *put(backend, {key("k"): b"x"})):
                assert isinstance(outcome.error, TransientError)
                assert "no node is known" in str(outcome.error)
            assert [*backend.list(deadline=soon())] == []
            known.append("127.0.0.1")
            wait_until(lambda: len(backend.stats()["nodes"]) == 1, "the node is there")
            assert statuses(put(backend, {key("k"): b"x"})) == [Status.OK]  # fewer nodes than replicas are used all
            assert get(backend, [key("k")], 1)[0][1] == b"x"


# Closing, and the whole.


def test_a_closed_pool_says_so() -> None:
    with servers(2) as nodes, pool_of(nodes, replicas=2) as backend:
        pages = backend.list(deadline=soon())
        backend.close()
        backend.close()
        with pytest.raises(ClosedError):
            next(pages)
        with pytest.raises(ClosedError):
            backend.stat([], deadline=soon())
        assert "closed" in repr(backend)


def test_a_store_over_a_pool() -> None:
    """From the URL to verified bytes, with a node that is lost on the way."""
    with servers(2) as nodes, contextlib.ExitStack() as stack:
        lost = stack.enter_context(NodeServer(memory_bytes=MEMORY))
        where = ",".join([*addresses_of(nodes), lost.address])
        store = stack.enter_context(kvstore.open_store(f"node://{where}?replicas=2&transport=tcp"))
        records = {each: data(50_000, each) for each in keys(20)}
        assert all(outcome.ok for outcome in store.put_many(records))
        assert store.get_many([*records]) == [*records.values()]
        (members,) = store.stats()["metrics"]["kvstore_node_members"]["series"]
        assert members == {"labels": {"backend": f"node://{where}"}, "value": 3}
        lost.close()
        for _ in range(5):
            assert store.get_many([*records]) == [*records.values()]
        assert store.hit_prefix([*records]) == 20
        breakers = store.stats()["metrics"]["kvstore_breaker_changes_total"]["series"]
        assert f"node {lost.address}" in {series["labels"]["backend"] for series in breakers}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stores_pool_is_mapped_for_a_node_that_reads_it_in_place(transport: str) -> None:
    """Over shared memory the node copies a put from the pool itself, and needs no socket for its bytes."""
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        node = NodeServer(unix_path=Path(folder) / "s", memory_bytes=MEMORY)
        with node, kvstore.open_store(f"node://{node.address}?transport={transport}") as store:
            assert (store.pool.slabs[0].fd is not None) == (transport == "shm")
            spec = opaque_spec(300_000)
            with store.pool.acquire(spec.raw_bytes) as buffer:
                buffer.view[:] = data(spec.raw_bytes)
                item = Item(key("k"), spec.split(buffer.view), spec, hold=buffer)
                assert store.submit_put([item]).result()[0].ok
            assert store.get_many([key("k")]) == [data(spec.raw_bytes)]


def test_wrapped_by_the_standard_stack_a_lost_node_slows_nobody() -> None:
    with servers(1) as (node,), servers(1) as (lost,):
        addresses = [node.address, lost.address]
        with contextlib.closing(wrap(pool(addresses), {}, metrics=Metrics())) as backend:
            lost.close()
            wait_until(
                lambda: all(outcome.error is None for outcome, _ in get(backend, keys(40), 10)), "the share is misses"
            )
            start = time.monotonic()
            for _ in range(50):
                assert all(outcome.status is Status.MISS for outcome, _ in get(backend, keys(40), 10))
            assert time.monotonic() - start < 20


def test_hedged_reads_do_not_wait_for_a_node_that_hangs() -> None:
    """With replicas a node that hangs costs half of the deadline at most, and no read."""
    hanging = threading.Event()
    go = threading.Event()
    with servers(2) as nodes:
        from kvstore_backends.node.dial import dialler

        found = settings(addresses_of(nodes), replicas=2)
        real = dialler(found)

        def dial(each: Member, deadline: float) -> Any:
            channel = real(each, deadline)
            call = channel.call

            def slow(*args: Any, **options: Any) -> Any:
                if hanging.is_set() and each.address == nodes[0].address:
                    go.wait(max(0.0, options["deadline"] - time.monotonic()))
                return call(*args, **options)

            channel.call = slow  # type: ignore[method-assign]
            return channel

        with contextlib.closing(NodeBackend(found, dial=dial)) as backend:
            records = {each: data(1000, each) for each in keys(20)}
            put(backend, records)
            hanging.set()
            try:
                for _ in range(2):
                    assert [v for _, v in get(backend, [*records], 1000, seconds=4.0)] == [*records.values()]
            finally:
                go.set()


def test_no_deadline_at_all() -> None:
    with servers(2) as nodes, pool_of(nodes, replicas=2) as backend:
        assert backend.put([Write(key("k"), [memoryview(b"x")])], deadline=math.inf)[0].ok
        assert backend.get_into([Read(key("k"), memoryview(bytearray(1)))], deadline=math.inf)[0].ok


def test_a_node_shows_its_state() -> None:
    with servers(1) as nodes, pool_of(nodes) as backend:
        (node,) = backend.pool.now.nodes
        assert isinstance(node, Node)
        assert repr(node).endswith(" up>")
