"""The age of records in memory and on the disk below it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore_backends._node_space as space_module
from kvstore_backends.file.naming import record_path
from kvstore_backends.node.protocol import Code

from .node_server_disk_support import Nodes, disk_of, forget_memory, on_disk, settled
from .node_server_support import keys


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


class Clock:
    """The real time, and as much more as was added."""

    def __init__(self) -> None:
        self.more = 0.0

    def __call__(self) -> float:
        return time.time() + self.more


def test_what_is_too_old_on_disk_is_gone_at_once_and_swept(opened: Nodes, tmp_path: Path) -> None:
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


def test_what_is_in_use_in_memory_stays_on_disk(opened: Nodes) -> None:
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


def test_use_in_memory_counts_on_disk(opened: Nodes) -> None:
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


def test_the_age_since_the_put_survives_the_way_down_and_up(opened: Nodes) -> None:
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


def test_the_sweep_looks_now_and_then(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_whose_time_has_come_is_not_in_the_way_of_a_new_put(opened: Nodes) -> None:
    """Neither before the sweep, nor does a sweep that began before remove the new one."""
    clock = Clock()
    node = opened(ttl=1000.0, clock=clock)
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"old", b: b"old"})
    settled(node)
    clock.more += 2000
    assert caller.put({a: b"new"}) == [Code.OK]
    disk = settled(node)
    folder = disk._folder
    assert (Path(folder) / record_path(a)).read_bytes() == b"new"
    os.utime(f"{folder}/{record_path(a)}", (clock(), clock()))  # the file system has no clock of ours
    assert disk._remove_expired([a, b]) == 1
    assert on_disk(node, [a, b]) == [True, False]
