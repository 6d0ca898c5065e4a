"""The disk below a node: written behind, looked up below, read back; and the age of records on both."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore_backends._node_space as space_module
from kvstore.backend import NO_DEADLINE, OK, Outcome, Read, Write
from kvstore.errors import ConfigError, PermanentError
from kvstore.keys import Key
from kvstore_backends._node_disk import DiskTier
from kvstore_backends._node_space import Namespace
from kvstore_backends.file import FileBackend
from kvstore_backends.file.naming import record_path
from kvstore_backends.node.protocol import Code, Op, Status, pack_keys

from .node_server_support import Caller, KiB, MiB, Node, impatient, in_thread, key, keys, payload


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Opens nodes over the folder `kv`; options of the namespace by keyword."""
    nodes: list[Node] = []

    def make(*, query: str = "", nbytes: int = 64 * KiB, clock: Callable[[], float] = time.time, **fields: Any) -> Node:
        nodes.append(Node(Namespace(disk=f"file://{tmp_path}/kv{query}", **fields), nbytes=nbytes, clock=clock))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def disk_of(node: Node) -> DiskTier:
    assert node.space.disk is not None
    return node.space.disk


def settled(node: Node) -> DiskTier:
    disk = disk_of(node)
    assert disk.settle(60)
    return disk


def on_disk(node: Node, names: Sequence[Key]) -> list[bool]:
    return [outcome.ok for outcome in disk_of(node).backend.stat(names, deadline=NO_DEADLINE)]


def in_memory(node: Node, names: Sequence[Key]) -> list[bool]:
    return [name in node.space.store.records for name in names]


def forget_memory(node: Node) -> None:
    """As eviction would do it, all at once."""
    store = node.space.store
    with store.lock:
        for name in [*store.records]:
            store.remove_locked(name)


class SlowDisk:
    """Makes `backend.put` of a node wait until `open` is set."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        backend = disk_of(node).backend
        original = backend.put

        def put(writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
            self.begun.set()
            assert self.open.wait(60)
            return original(writes, deadline=deadline)

        monkeypatch.setattr(backend, "put", put)


# Down and up.


def test_records_are_written_behind_and_come_back(opened: Callable[..., Node]) -> None:
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
    assert caller.get([(name, 100, 1000) for name in names[:5]]) == [records[name][100:1100] for name in names[:5]]
    assert in_memory(node, names[:5]) == [True] * 5
    for name in names:
        assert caller.whole(name) == records[name]
    stats = node.stats()
    assert (stats["disk_written"], stats["disk_dropped"], stats["disk_failed"]) == (40, 0, 0)
    assert stats["disk_loaded"] > 24
    assert (stats["hits"], stats["misses"]) == (45, 0)


def test_what_is_on_disk_is_not_sent_again(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"data"})
    settled(node)
    forget_memory(node)
    assert caller.question({a: b"data"}) == (0, [Code.EXISTS])
    assert caller.put_at_once({a: b"data", b: b"b"}) == [Code.EXISTS, Code.OK]
    assert caller.whole(a) == b"data"


def test_a_restart_finds_the_records(opened: Callable[..., Node]) -> None:
    first = opened()
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


def test_delete_covers_both(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    a, b, c = keys(3)
    caller.put({a: b"a", b: b"b"})
    settled(node)
    forget_memory(node)
    caller.whole(a)
    assert in_memory(node, [a, b]) == [True, False]
    assert caller.about(Op.DELETE, [a, b, c]) == [Code.OK, Code.OK, Code.MISS]
    assert on_disk(node, [a, b]) == [False, False]
    assert caller.stat([a, b]) == [Code.MISS] * 2
    assert caller.put({a: b"new"}) == [Code.OK]
    assert caller.whole(a) == b"new"


def test_a_deleted_record_that_waits_to_be_written_does_not_come_back(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened()
    slow = SlowDisk(node, monkeypatch)
    caller, other = node.caller(), node.caller("other")
    a, b = keys(2)
    caller.put({a: b"a"})
    assert slow.begun.wait(60)
    caller.put({b: b"b"})  # waits; a is being written
    assert caller.about(Op.DELETE, [b]) == [Code.OK]
    answer = in_thread(lambda: other.about(Op.DELETE, [a]))
    while caller.stat([a]) != [Code.MISS]:
        pass
    slow.open.set()
    assert answer() == [Code.OK]
    settled(node)
    assert on_disk(node, [a, b]) == [False, False]
    assert caller.put({a: b"again", b: b"again"}) == [Code.OK, Code.OK]
    settled(node)
    forget_memory(node)
    assert (caller.whole(a), caller.whole(b)) == (b"again", b"again")


def test_a_delete_does_not_wait_past_its_deadline_for_the_disk(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened()
    slow = SlowDisk(node, monkeypatch)
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"a"})
    assert slow.begun.wait(60)
    answer = caller.ask(Op.DELETE, pack_keys([a]), deadline=time.monotonic() + 0.1)
    assert answer.status == Status.LATE or caller.outcomes(answer)[0] == [Code.FAILED]
    slow.open.set()


def test_a_backlog_that_is_full_is_counted_and_blocks_nobody(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_disk_that_refuses_is_counted(opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_node_that_closes_does_not_wait_for_ever_for_the_disk(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert disk_of(node).counts().dropped == 1
    releasing.join()
    disk_of(node)._thread.join(60)


def test_two_readers_bring_a_record_up_once(opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    callers = [node.caller(i) for i in range(4)]
    (a,) = keys(1)
    callers[0].put({a: payload("a", 5000)})
    settled(node)
    forget_memory(node)
    reads: list[int] = []
    begun, go = threading.Event(), threading.Event()
    backend = disk_of(node).backend
    original = backend.get_into

    def get_into(asked: Sequence[Read], *, deadline: float) -> list[Outcome]:
        reads.append(len(asked))
        begun.set()
        assert go.wait(60)
        return original(asked, deadline=deadline)

    monkeypatch.setattr(backend, "get_into", get_into)
    joins = [in_thread(lambda caller=caller: caller.whole(a)) for caller in callers]  # type: ignore[misc]
    assert begun.wait(60)
    assert node.caller("writer").question({a: b"other"}) == (0, [Code.EXISTS])
    go.set()
    assert [join() for join in joins] == [payload("a", 5000)] * 4
    assert [count for count in reads if count] == [1]


def test_a_record_that_cannot_be_read_is_said_to_be(opened: Callable[..., Node], tmp_path: Path) -> None:
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


def test_a_file_that_was_cut_short_is_no_record(opened: Callable[..., Node], tmp_path: Path) -> None:
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


def test_a_record_larger_than_the_memory_is_told_of(opened: Callable[..., Node], tmp_path: Path) -> None:
    with_it = FileBackend(tmp_path / "kv")
    (a,) = keys(1)
    with_it.put([Write(a, [memoryview(bytes(100 * KiB))])], deadline=NO_DEADLINE)
    with_it.close()
    caller = opened().caller()
    assert caller.stat([a]) == [Code.OK]
    assert caller.whole(a) == Code.FAILED
    assert "memory has" in caller.notes[0]


def test_quarantine_covers_both(opened: Callable[..., Node], tmp_path: Path) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"bad", b: b"bad"})
    settled(node)
    assert caller.about(Op.QUARANTINE, [a]) == [Code.MISS]  # new, nobody has read it
    assert on_disk(node, [a]) == [True]
    caller.whole(a)
    assert caller.about(Op.QUARANTINE, [a]) == [Code.OK]
    assert (on_disk(node, [a]), in_memory(node, [a])) == ([False], [False])
    assert len(list((tmp_path / "kv" / ".kvstore" / "quarantine").iterdir())) == 1
    forget_memory(node)
    caller.whole(b)
    assert caller.about(Op.QUARANTINE, [b, b]) == [Code.OK, Code.MISS]
    assert caller.put({a: b"good", b: b"good"}) == [Code.OK, Code.OK]
    settled(node)
    forget_memory(node)
    assert (caller.whole(a), caller.whole(b)) == (b"good", b"good")


def test_a_cap_on_the_disk_holds(opened: Callable[..., Node]) -> None:
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
            assert space.disk is not None
            assert space.disk.settle(60)
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


# Age.


class Clock:
    """The real time, and as much more as was added."""

    def __init__(self) -> None:
        self.more = 0.0

    def __call__(self) -> float:
        return time.time() + self.more


def test_what_is_too_old_on_disk_is_gone_at_once_and_swept(opened: Callable[..., Node], tmp_path: Path) -> None:
    clock = Clock()
    node = opened(ttl=1000.0, clock=clock)
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"a"})
    settled(node)
    forget_memory(node)
    clock.more += 600
    assert caller.stat([a]) == [Code.OK]
    clock.more += 600
    assert caller.put({b: b"b"}) == [Code.OK]
    settled(node)
    os.utime(tmp_path / "kv" / record_path(b), (clock(), clock()))  # the file system has no clock of ours
    assert caller.stat([a, b]) == [Code.MISS, Code.OK]
    assert caller.whole(a) == Code.MISS
    assert caller.list_all() == {b: 1}
    assert on_disk(node, [a, b]) == [True, True]  # its bytes are still there
    node.space.sweep()
    assert on_disk(node, [a, b]) == [False, True]
    assert node.stats()["disk_expired"] == 1


def test_what_is_in_use_in_memory_stays_on_disk(opened: Callable[..., Node]) -> None:
    clock = Clock()
    node = opened(ttl=1000.0, clock=clock)
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"a", b: b"b"})
    settled(node)
    clock.more += 600
    assert caller.whole(a) == b"a"
    clock.more += 600
    node.space.sweep()
    assert on_disk(node, [a, b]) == [True, False]
    forget_memory(node)
    assert (caller.whole(a), caller.whole(b)) == (b"a", Code.MISS)


def test_use_in_memory_counts_on_disk(opened: Callable[..., Node]) -> None:
    clock = Clock()
    node = opened(ttl=1000.0, clock=clock)
    caller = node.caller()
    a, b, c = keys(3)
    caller.put({a: b"a", b: b"b", c: b"c"})
    settled(node)
    clock.more += 600
    assert caller.whole(a) == b"a"
    node.space.sweep()  # tells the folder
    forget_memory(node)
    assert caller.put({b: b"b"}) == [Code.EXISTS]  # is a use as well
    clock.more += 600
    assert caller.stat([a, b, c]) == [Code.OK, Code.OK, Code.MISS]
    assert caller.whole(a) == b"a"
    forget_memory(node)
    clock.more += 600
    assert caller.stat([a, b]) == [Code.OK, Code.MISS]


def test_the_age_since_the_put_survives_the_way_down_and_up(opened: Callable[..., Node]) -> None:
    clock = Clock()
    node = opened(ttl=1000.0, ttl_from="put", clock=clock)
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"a"})
    settled(node)
    clock.more += 600
    forget_memory(node)
    assert caller.whole(a) == b"a"  # read back: no younger for that
    clock.more += 600
    assert caller.whole(a) == Code.MISS
    assert caller.put({a: b"new"}) == [Code.OK]
    assert caller.whole(a) == b"new"


def test_the_sweep_looks_now_and_then(opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(ttl=1000.0)
    looked: list[str] = []
    monkeypatch.setattr(node.space.store, "expire", lambda: looked.append("memory"))
    monkeypatch.setattr(disk_of(node), "sweep", lambda: looked.append("disk"))
    now = [1e9]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(space_module, "time", Time)
    for step in (0.0, 1.0, 58.0, 2.0, 38.0, 2.0):
        now[0] += step
        node.service.sweep()
    assert looked == ["memory", "disk", "memory", "disk"]


def test_a_request_of_records_on_disk_is_admitted_before_they_are_read(opened: Callable[..., Node]) -> None:
    node = opened()
    caller, other = node.caller(), node.caller("other")
    names = keys(10)
    for name in names:
        caller.put({name: payload(name, 8 * KiB)})
        settled(node)
    forget_memory(node)
    found = caller.get([(name, 0, 8 * KiB) for name in names])
    assert found == [payload(name, 8 * KiB) for name in names[:4]] + [Code.FAILED] * 6
    other.question({key("x"): bytes(32 * KiB)})
    with impatient():
        refused = caller.get_answer([(names[9], 0, 1)])
    assert refused.status == Status.BUSY
    assert not in_memory(node, names[9:])[0]


def test_both_ways_under_pressure(opened: Callable[..., Node]) -> None:
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
