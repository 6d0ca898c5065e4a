"""The disk below a node: written behind, looked up below, read back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import NO_DEADLINE, OK, Outcome, Read, Write
from kvstore.errors import ConfigError, PermanentError
from kvstore_backends._node_space import Namespace
from kvstore_backends.file import FileBackend
from kvstore_backends.file.naming import record_path
from kvstore_backends.node.protocol import Code, Op, Status

from .node_server_disk_support import (
    Nodes,
    SlowDisk,
    SlowReads,
    disk_of,
    forget_memory,
    in_memory,
    on_disk,
    settled,
)
from .node_server_support import Caller, KiB, MiB, Node, impatient, in_thread, key, keys, payload


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


# Down and up.


def test_records_are_written_behind_and_come_back(opened: Nodes) -> None:
    node = opened()
    caller = node.caller()
    names = keys(40)
    records = {name: payload(name, 4 * KiB) for name in names}
    for name in names:
        assert caller.put({name: records[name]}) == [Code.OK]
        settled(node)
    assert on_disk(node, names) == [True] * 40
    assert in_memory(node, names).count(True) == 16
    assert caller.stat(names) == [Code.OK] * 40
    assert in_memory(node, names).count(True) == 16  # asking brings nothing up
    assert caller.get([(name, 100, 1000) for name in names[:2]]) == [records[name][100:1100] for name in names[:2]]
    assert in_memory(node, names[:2]) == [True] * 2
    for name in names:
        assert caller.whole(name) == records[name]
    stats = node.stats()
    assert (stats["disk_written"], stats["disk_dropped"], stats["disk_failed"]) == (40, 0, 0)
    assert stats["disk_loaded"] > 24
    assert (stats["hits"], stats["misses"]) == (40, 0)  # whole records: parts without their beginning are none


def test_what_is_on_disk_is_not_sent_again(opened: Nodes) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"data"})
    settled(node)
    forget_memory(node)
    assert caller.question({a: b"data"}) == (0, [Code.EXISTS])
    assert caller.put_at_once({a: b"data", b: b"b"}) == [Code.EXISTS, Code.OK]
    assert caller.whole(a) == b"data"


def test_a_restart_finds_the_records(opened: Nodes) -> None:
    first = opened(nbytes=256 * KiB)
    caller = first.caller()
    records = {name: payload(name, 3000) for name in keys(5)}
    caller.put(records)
    first.close()  # writes what waits
    second = opened()
    caller = second.caller()
    assert caller.list_all(3) == dict.fromkeys(records, 3000)
    for name, data in records.items():
        assert caller.whole(name) == data
    assert caller.list_all(3) == dict.fromkeys(records, 3000)  # what is in both is listed once


def test_a_backlog_that_is_full_is_counted_and_blocks_nobody(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()  # 64 KiB; the backlog takes 16
    slow = SlowDisk(node, monkeypatch)
    caller = node.caller()
    names = keys(30)
    for name in names:
        assert caller.put({name: bytes(4 * KiB)}) == [Code.OK]
    stats = node.stats()
    assert stats["disk_backlog"] == 16 * KiB
    assert stats["disk_dropped"] == 26
    assert in_memory(node, names[:4]) == [True] * 4  # pinned until they are written
    slow.open.set()
    settled(node)
    assert on_disk(node, names) == [True] * 4 + [False] * 26
    assert node.stats()["disk_backlog"] == 0


def test_a_disk_that_refuses_is_counted(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()

    def put(writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [Outcome.failed(PermanentError("scripted"))] * len(writes)

    monkeypatch.setattr(disk_of(node).backend, "put", put)
    caller = node.caller()
    (a,) = keys(1)
    assert caller.put({a: b"a"}) == [Code.OK]
    settled(node)
    assert caller.whole(a) == b"a"
    assert node.stats()["disk_failed"] == 1


def test_a_disk_that_breaks_in_unforeseen_ways_ends_nothing(
    opened: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written is served from memory, is counted, said once, and what comes later is written."""
    node = opened()
    caller = node.caller()
    names = keys(5)
    backend = disk_of(node).backend

    def broken(writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        raise RuntimeError("scripted")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(backend, "put", broken)
        for name in names[:4]:
            assert caller.put({name: payload(name, 100)}) == [Code.OK]
            settled(node)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert caller.put({names[4]: payload(names[4], 100)}) == [Code.OK]
    settled(node)
    assert [caller.whole(name) for name in names] == [payload(name, 100) for name in names]
    assert on_disk(node, names) == [False] * 4 + [True]
    stats = node.stats()
    assert (stats["disk_failed"], stats["disk_errors"], stats["disk_written"]) == (4, 4, 1)
    assert (stats["disk_backlog"], stats["held"]) == (0, 0)


def test_a_read_that_breaks_in_unforeseen_ways_leaves_nothing(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"a", b: b"b"})
    settled(node)
    forget_memory(node)

    def broken(reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        raise RuntimeError("scripted")

    with monkeypatch.context() as patch:
        patch.setattr(disk_of(node).backend, "get_into", broken)
        with pytest.raises(RuntimeError):
            caller.get([(a, 0, 1), (b, 0, 1)])
    assert (node.stats()["in_use"], node.space.gate.used) == (0, 0)
    assert caller.get([(a, 0, 1), (b, 0, 1)]) == [b"a", b"b"]


def test_a_node_that_closes_does_not_wait_for_ever_for_the_disk(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    slow = SlowDisk(node, monkeypatch)
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"a"})
    assert slow.begun.wait(60)
    caller.put({b: b"b"})
    releasing = threading.Timer(0.5, slow.open.set)
    releasing.start()
    disk_of(node).close(0.1)
    assert disk_of(node).counts()["dropped"] == 1
    releasing.join()
    disk_of(node).backlog._thread.join(60)


def test_two_readers_bring_a_record_up_once(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    callers = [node.caller(i) for i in range(4)]
    (a,) = keys(1)
    callers[0].put({a: payload("a", 5000)})
    settled(node)
    forget_memory(node)
    slow = SlowReads(node, monkeypatch)
    joins = [in_thread(lambda caller=caller: caller.whole(a)) for caller in callers]  # type: ignore[misc]
    assert slow.begun.wait(60)
    assert node.caller("writer").question({a: b"other"}) == (0, [Code.EXISTS])
    slow.open.set()
    assert [join() for join in joins] == [payload("a", 5000)] * 4
    assert slow.counts == [1]


def test_a_record_that_cannot_be_read_is_said_to_be(opened: Nodes, tmp_path: Path) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: bytes(1000), b: b"b"})
    settled(node)
    forget_memory(node)
    disk_of(node).backend.get_into = lambda reads, *, deadline: [  # type: ignore[method-assign]
        Outcome.failed(PermanentError("scripted")) if read.key == a else OK._replace(nbytes=len(read.dst))
        for read in reads
    ]
    found = caller.get([(a, 0, 10), (b, 0, 1)])
    assert found[0] == Code.REFUSED
    assert found[1] != Code.MISS
    assert "scripted" in caller.notes[0]
    assert node.space.gate.used == 0


def test_a_file_that_was_cut_short_is_no_record(opened: Nodes, tmp_path: Path) -> None:
    """Cut between the look at its size and the read: never a record with a hole."""
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: bytes(1000)})
    settled(node)
    forget_memory(node)
    original = disk_of(node).sizes
    disk_of(node).sizes = lambda keys, deadline: [  # type: ignore[method-assign]
        outcome._replace(nbytes=2000) for outcome in original(keys, deadline)
    ]
    assert caller.whole(a) == Code.MISS
    assert not in_memory(node, [a])[0]


def test_a_record_larger_than_the_memory_is_told_of(opened: Nodes, tmp_path: Path) -> None:
    with_it = FileBackend(tmp_path / "kv")
    (a,) = keys(1)
    with_it.put([Write(a, [memoryview(bytes(100 * KiB))])], deadline=NO_DEADLINE)
    with_it.close()
    caller = opened().caller()
    assert caller.stat([a]) == [Code.OK]
    assert caller.whole(a) == Code.FAILED
    assert "memory has" in caller.notes[0]


def test_a_cap_on_the_disk_holds(opened: Nodes) -> None:
    node = opened(query="?bytes=40KiB")
    caller = node.caller()
    names = keys(20)
    for name in names:
        caller.put({name: bytes(4 * KiB)})
        settled(node)
    assert on_disk(node, names).count(True) <= 10
    assert on_disk(node, names)[-1]


def test_each_namespace_has_its_folder(tmp_path: Path) -> None:
    node = Node(
        Namespace("a", b"t", disk=f"file://{tmp_path}/a"), Namespace("b", b"t", disk=f"file://{tmp_path}/b"),
        nbytes=MiB,
    )  # fmt: skip
    try:
        a, b = node.caller(namespace="a"), node.caller(namespace="b")
        (name,) = keys(1)
        a.put({name: b"of a"})
        for space in node.spaces.values():
            assert space.below is not None
            assert space.below.settle(60)
        assert (tmp_path / "a" / record_path(name)).read_bytes() == b"of a"
        assert not (tmp_path / "b" / record_path(name)).exists()
        assert (b.stat([name]), b.list_all(), b.about(Op.DELETE, [name])) == ([Code.MISS], {}, [Code.MISS])
        assert a.whole(name) == b"of a"
    finally:
        node.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disk": "memory://x"}, "a folder"),
        ({"disk": "file:///x?bites=1"}, "bytes"),
        ({"disk": "/nvme/kv"}, "file://"),
        ({"disk": "file:///x?bytes=1GiB", "ttl": 5.0, "ttl_from": "put"}, "policy=fifo"),
    ],
)
def test_disks_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node(Namespace(**fields))


def test_a_request_of_records_on_disk_is_admitted_before_they_are_read(opened: Nodes) -> None:
    node = opened(nbytes=256 * KiB)
    caller = node.caller()
    names = keys(10)
    for name in names:
        caller.put({name: payload(name, 8 * KiB)})
        settled(node)
    forget_memory(node)
    found = caller.get([(name, 0, 8 * KiB) for name in names])
    assert found == [payload(name, 8 * KiB) for name in names[:4]] + [Code.FAILED] * 6
    for client, nbytes in enumerate((32 * KiB, 32 * KiB, 32 * KiB, 16 * KiB)):
        node.caller(client).question({key(("x", client)): bytes(nbytes)})
    with impatient():
        refused = caller.get_answer([(names[9], 0, 1)])
    assert refused.status == Status.BUSY
    assert not in_memory(node, names[9:])[0]


def test_both_ways_under_pressure(opened: Nodes) -> None:
    """Readers and writers over three times the memory: what was stored can be read, every time."""
    node = opened(nbytes=128 * KiB)
    names = keys(48)
    records = {name: payload(name, 8 * KiB) for name in names}
    setup = node.caller("setup")
    for name in names:
        setup.put({name: records[name]})
        settled(node)

    def work(caller: Caller, at: int) -> None:
        for turn in range(40):
            some = [names[(at + turn * 7 + step) % 48] for step in range(2)]
            assert caller.get([(name, 0, 8 * KiB) for name in some]) == [records[name] for name in some]
            assert caller.put({some[0]: records[some[0]]}) == [Code.EXISTS]

    callers = [node.caller(i) for i in range(4)]
    for join in [in_thread(lambda at=at: work(callers[at], at * 11)) for at in range(4)]:  # type: ignore[misc]
        join()
    assert node.stats()["disk_loaded"] > 0
