"""Fault 30: a real cluster whose slots move, whose shards die, and whose replicas take over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import open_backend
from kvstore_backends.valkey import ValkeyBackend
from kvstore_backends.valkey.names import record_name, slot_of
from tests.servers.valkey import Cluster, Server, needs_server, until
from tests.servers.valkey_doubles import Scripted, Words, array, bulk, hello

SLACK_S = 5.0
PREFIX = "moving/"


def key(name: object) -> Key:
    return opaque_key(f"cluster {name}")


def slot(of: Key) -> int:
    return slot_of(record_name(PREFIX.encode(), of))


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def opened(address: str, **options: Any) -> Iterator[ValkeyBackend]:
    backend = open_backend(f"valkey://{address}/{PREFIX}", **{"connect_timeout": 5.0, **options})
    assert isinstance(backend, ValkeyBackend)
    try:
        yield backend
    finally:
        backend.close()


def data_of(name: object) -> bytes:
    return f"{name}/".encode() * 500


def put(backend: ValkeyBackend, names: Sequence[object], seconds: float = 20.0) -> list[Status]:
    writes = [Write(key(name), [memoryview(data_of(name))]) for name in names]
    return [outcome.status for outcome in backend.put(writes, deadline=soon(seconds))]


def get(backend: ValkeyBackend, names: Sequence[object], seconds: float = 20.0) -> list[Outcome]:
    """Outcomes; what is OK is exact."""
    memory = [bytearray(10_000) for _ in names]
    reads = [Read(key(name), memoryview(dst)) for name, dst in zip(names, memory, strict=True)]
    outcomes = backend.get_into(reads, deadline=soon(seconds))
    for name, dst, outcome in zip(names, memory, outcomes, strict=True):
        if outcome.ok:
            assert dst[: outcome.nbytes] == data_of(name)
    return outcomes


@pytest.fixture
def clean(valkey_cluster: Cluster) -> Iterator[Cluster]:
    yield valkey_cluster
    for server in valkey_cluster.shards:
        server.call("FLUSHALL")


def test_fifty_keys_come_from_three_shards_in_order(clean: Cluster) -> None:
    names = list(range(50))
    with opened(clean.shards[2].address) as backend:
        assert put(backend, names) == [Status.OK] * 50
        assert all(outcome.ok for outcome in get(backend, names))
        assert [server.call("DBSIZE") > 5 for server in clean.shards] == [True] * 3
        mixed = [name for pair in zip(names, [f"missing {name}" for name in names], strict=True) for name in pair]
        assert [outcome.status for outcome in get(backend, mixed)] == [Status.OK, Status.MISS] * 50
        assert backend.counters["connections"] <= 4, "one to each shard, and the one that asked for the map"
        assert backend.counters["moved"] == 0


def test_a_slot_that_has_moved_is_followed_and_the_map_is_learnt_again(clean: Cluster) -> None:
    names = list(range(20))
    source = clean.of(slot(key(0)))
    target = next(server for server in clean.shards if server is not source)
    with opened(clean.shards[0].address) as backend:
        assert put(backend, names) == [Status.OK] * 20
        before = backend.counters
        assert until(lambda: time.monotonic() - backend._topology._tried_at > 0.1), "it was asked for just now"
        clean.move_slot(slot(key(0)), source, target)
        try:
            assert all(outcome.ok for outcome in get(backend, names))
            assert backend.counters["moved"] == before["moved"] + 1
            assert backend.counters["refreshes"] == before["refreshes"] + 1
            assert all(outcome.ok for outcome in get(backend, names))
            assert backend.counters["moved"] == before["moved"] + 1, "once"
            assert backend.quarantine([key(0)], deadline=soon())[0].ok
            assert put(backend, [0]) == [Status.OK]
        finally:
            clean.move_slot(slot(key(0)), target, source)
        assert all(outcome.ok for outcome in get(backend, names))


def test_a_slot_that_is_being_moved_is_asked_for_at_both_ends(clean: Cluster) -> None:
    """ASK: the map stays as it is, and only what has moved already is asked for at the target."""
    source = clean.of(slot(key("asked")))
    target = next(server for server in clean.shards if server is not source)
    ids = {server: server.call("CLUSTER", "MYID").decode() for server in (source, target)}
    number = slot(key("asked"))
    with opened(source.address) as backend:
        assert put(backend, ["asked"]) == [Status.OK]
        target.call("CLUSTER", "SETSLOT", number, "IMPORTING", ids[source])
        source.call("CLUSTER", "SETSLOT", number, "MIGRATING", ids[target])
        try:
            assert get(backend, ["asked"])[0].ok, "still at the source"
            assert backend.counters["asked"] == 0
            clean.move_names(number, source, target)
            assert get(backend, ["asked"])[0].ok, "at the target by now"
            assert backend.stat([key("asked")], deadline=soon())[0].ok
            assert backend.counters["asked"] >= 2
            assert backend.counters["moved"] == 0
            assert backend.delete([key("asked")], deadline=soon())[0].ok
            assert put(backend, ["asked"]) == [Status.OK]
            assert target.call("CLUSTER", "COUNTKEYSINSLOT", number) == 1
        finally:
            backend.delete([key("asked")], deadline=soon())
            for server in (source, target):
                server.call("CLUSTER", "SETSLOT", number, "STABLE")


def test_all_lanes_learn_the_map_together() -> None:
    """One refresh for all: sixteen calls meet MOVED at once, and few of them ask for the map."""
    shards: list[Scripted] = []
    owner = [0]
    gate = threading.Barrier(16)

    def reply(number: int, words: Words) -> bytes | None:
        if words[:2] == [b"CLUSTER", b"SLOTS"]:
            port = b":%d\r\n" % shards[owner[0]].port
            return array(array(b":0\r\n", b":16383\r\n", array(bulk(b"127.0.0.1"), port)))
        if words[0] == b"HELLO":
            return None
        if number != owner[0]:
            return b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(words[1]), shards[owner[0]].port)
        return b":1\r\n"

    greeting = hello(mode=b"cluster")
    with (
        Scripted(lambda words: reply(0, words), greeting=greeting) as one,
        Scripted(lambda words: reply(1, words), greeting=greeting) as other,
    ):
        shards += [one, other]
        with opened(one.address, lanes=16) as backend:
            assert until(lambda: time.monotonic() - backend._topology._tried_at > 0.1), "it was asked for just now"
            owner[0] = 1
            before = backend.counters["refreshes"]
            found: list[Outcome] = []

            def call(number: int) -> None:
                gate.wait(20)
                found.extend(backend.delete([key(f"{number}/{n}") for n in range(20)], deadline=soon()))

            threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [outcome.status for outcome in found] == [Status.OK] * 320
            assert 1 <= backend.counters["refreshes"] - before <= 4


def test_nodes_that_send_each_other_on_for_ever_end() -> None:
    """Two nodes that each say the other owns the slot."""
    shards: list[Scripted] = []

    def reply(number: int, words: Words) -> bytes | None:
        if words[:2] == [b"CLUSTER", b"SLOTS"]:
            return array(array(b":0\r\n", b":16383\r\n", array(bulk(b""), b":%d\r\n" % shards[number].port)))
        if words[0] == b"HELLO":
            return None
        return b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(words[1]), shards[1 - number].port)

    greeting = hello(mode=b"cluster")
    with (
        Scripted(lambda words: reply(0, words), greeting=greeting) as one,
        Scripted(lambda words: reply(1, words), greeting=greeting) as other,
    ):
        shards += [one, other]
        with opened(one.address) as backend:
            (outcome,) = backend.delete([key("x")], deadline=soon())
            assert isinstance(outcome.error, TransientError)
            assert "do not agree" in str(outcome.error)
            assert one.count(b"UNLINK") + other.count(b"UNLINK") <= 8


def test_cluster_off_says_what_to_set(clean: Cluster) -> None:
    with opened(clean.shards[0].address, cluster="off") as backend:
        errors = [outcome.error for outcome in get(backend, list(range(20))) if outcome.error is not None]
        assert errors
        assert "cluster=off" in str(errors[0])


# Shards that die. A cluster of its own.


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The first shard has a replica."""
    needs_server()
    words = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with Cluster(tmp_path_factory.mktemp("mortal"), *words, replicas=1) as cluster:
        yield cluster


def _by_shard(cluster: Cluster, count: int) -> dict[Server, list[int]]:
    found: dict[Server, list[int]] = {server: [] for server in cluster.shards}
    for name in range(count):
        found[cluster.of(slot(key(name)))].append(name)
    return found


@pytest.mark.slow
@pytest.mark.leaves("a server of the module's is started again")
def test_shards_die_and_replicas_take_over(mortal: Cluster) -> None:
    """A shard without a replica costs only its keys; one with a replica is back by itself; and all of it under load,
    with nothing wrong ever read (`get` compares)."""
    names = list(range(60))
    shares = _by_shard(mortal, 60)
    first, second, third = mortal.shards
    seeds = f"{second.address},{third.address}"
    with opened(seeds, read_timeout=1.0, connect_timeout=1.0) as backend:
        assert until(lambda: set(put(backend, names)) <= {Status.OK, Status.EXISTS})
        assert until(lambda: mortal.replicas[0].call("DBSIZE") == first.call("DBSIZE"))

        third.stop()
        start = time.monotonic()
        outcomes = get(backend, names, seconds=5.0)
        assert time.monotonic() - start < 5.0 + SLACK_S
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome.ok == (name not in shares[third]), outcome
        dead = next(outcome.error for outcome in outcomes if outcome.error is not None)
        assert isinstance(dead, TransientError)
        assert third.address in str(dead)
        third.start()
        assert until(lambda: Cluster.state(third) == "ok")
        assert until(lambda: [o.status for o in get(backend, shares[third])] == [Status.MISS] * len(shares[third]))

        stop = threading.Event()
        longest: list[float] = []

        def load() -> None:
            while not stop.is_set():
                begin = time.monotonic()
                get(backend, names, seconds=1.0)
                longest.append(time.monotonic() - begin)

        readers = [threading.Thread(target=load) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            first.stop()
            assert until(lambda: all(o.ok for o in get(backend, shares[first])), limit_s=30.0)
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert max(longest) < 1.0 + SLACK_S
        assert put(backend, ["after"]) == [Status.OK]
        assert all(outcome.ok for outcome in get(backend, [*shares[first], "after"]))


def test_a_cluster_is_listed_whole(clean: Cluster) -> None:
    with opened(clean.shards[1].address) as backend:
        put(backend, list(range(30)))
        foreign = clean.client()
        foreign.set("moving/elsewhere", b"not ours")
        foreign.rpush(f"{PREFIX}{key('list').hex()}", "a list of somebody's")
        foreign.close()
        found = [info for page in backend.list(deadline=soon()) for info in page]
        assert {info.key: info.nbytes for info in found} == {key(n): len(data_of(n)) for n in range(30)}
        assert all(0 <= time.time() - info.last_used < 60 for info in found)


def test_quarantine_stays_in_its_slot(clean: Cluster) -> None:
    with opened(clean.shards[0].address, quarantine=100.0) as backend:
        names = list(range(30))
        put(backend, names)
        get(backend, names)
        assert all(outcome.ok for outcome in backend.quarantine([key(n) for n in names], deadline=soon()))
        client = clean.client()
        aside = sorted(client.scan_iter(match=f"{PREFIX}quarantine/*"))
        assert len(aside) == 30
        assert all(0 < client.ttl(name) <= 100 for name in aside)
        assert {client.get(name) for name in aside} == {data_of(n) for n in names}
        client.close()
        assert all(name.decode().startswith(f"{PREFIX}quarantine/{{{PREFIX}") for name in aside)
