"""What engines announce, and what a node brings into memory before they ask."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore_backends._node_ahead as ahead_module
from kvstore.backend import NO_DEADLINE, Write
from kvstore.errors import ClosedError
from kvstore.keys import Key
from kvstore.registry import open_backend
from kvstore_backends._node_ahead import MOST_ANNOUNCED
from kvstore_backends._node_space import Namespace
from kvstore_backends.node import NodeBackend
from kvstore_backends.node.protocol import Code, Malformed, Op, Status, pack_announce, unpack_announce
from kvstore_backends.node_server import NodeServer

from .node_server_disk_support import in_memory
from .node_server_support import Caller, KiB, Node, key, keys, payload


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """64 KiB of memory, so a window of 32 KiB, eight records; everything is remote, and nothing in memory."""
    opened = Node(
        Namespace(disk=f"file://{tmp_path}/kv?bytes=1MiB", remote=f"file://{tmp_path}/remote"), nbytes=64 * KiB
    )
    yield opened
    opened.close()


def stored(node: Node, names: Sequence[Key]) -> list[Key]:
    """Store records where they are remote, and nowhere else."""
    assert node.space.below is not None
    tiers = node.space.below.lower.tiers
    assert tiers is not None
    writes = [Write(name, [memoryview(payload(name, 4 * KiB))]) for name in names]
    assert all(outcome.ok for outcome in tiers.put_in(1, writes, deadline=NO_DEADLINE))
    return [*names]


def announce(caller: Caller, waiting: Sequence[Sequence[Key]]) -> None:
    assert caller.ask(Op.ANNOUNCE, pack_announce(waiting)).status == Status.OK


def until(condition: object, what: str = "") -> None:
    """Wait until it is true: a thread brings it about."""
    assert callable(condition)
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def prefetched(node: Node, count: int) -> None:
    until(lambda: node.stats()["prefetched"] == count, f"{node.stats()['prefetched']} of {count} came up")


def test_what_waits_is_in_memory_before_it_is_asked_for(node: Node) -> None:
    first, second = stored(node, keys(3, "first")), stored(node, keys(3, "second"))
    caller = node.caller()
    announce(caller, [first, second])
    prefetched(node, 6)
    assert in_memory(node, first + second) == [True] * 6
    assert node.stats()["waiting_jobs"] == 2
    assert [caller.whole(name) for name in first] == [payload(name, 4 * KiB) for name in first]
    assert node.stats()["hits"] == 3
    announce(caller, [])
    assert node.stats()["waiting_jobs"] == 0


def test_behind_a_hole_nothing_is_looked_for(node: Node) -> None:
    job = stored(node, keys(5))
    hole = key("nowhere")
    other = stored(node, keys(2, "other"))
    announce(node.caller(), [[*job[:2], hole, *job[2:]], other])
    prefetched(node, 4)
    assert in_memory(node, job + other) == [True, True, False, False, False, True, True]


def test_of_what_the_memory_has_no_room_for_the_disk_gets_what_it_can(node: Node) -> None:
    job = stored(node, keys(20))
    announce(node.caller(), [job])
    prefetched(node, 8)  # half of the memory
    assert in_memory(node, job) == [True] * 8 + [False] * 12


def test_a_disk_with_a_cap_holds_the_next_ones(tmp_path: Path) -> None:
    opened = Node(
        Namespace(disk=f"file://{tmp_path}/kv?bytes=64KiB", remote=f"file://{tmp_path}/remote"), nbytes=32 * KiB
    )  # fmt: skip
    try:
        job = stored(opened, keys(10))
        announce(opened.caller(), [job])
        prefetched(opened, 4)
        assert opened.space.below is not None
        tiers = opened.space.below.lower.tiers
        assert tiers is not None
        disk = tiers.tiers[0].backend

        def on_disk() -> list[bool]:
            return [outcome.ok for outcome in disk.stat(job, deadline=NO_DEADLINE)]

        until(lambda: on_disk()[4:] == [True] * 6, "the disk did not get them")
        assert on_disk()[:4] == [False] * 4  # those are in memory: not twice
    finally:
        opened.close()


def test_engines_are_served_in_turn_and_forgotten_when_they_go(node: Node) -> None:
    mine, theirs = stored(node, keys(20, "mine")), stored(node, keys(20, "theirs"))
    one, other = node.caller("one"), node.caller("other")
    announce(one, [mine[at : at + 2] for at in range(0, 20, 2)])
    prefetched(node, 8)
    announce(other, [theirs[at : at + 2] for at in range(0, 20, 2)])
    until(lambda: in_memory(node, theirs)[:4] == [True] * 4)
    assert node.stats()["waiting_jobs"] == 20
    other.end()
    assert node.stats()["waiting_jobs"] == 10
    again = node.caller("one")  # another connection of the same engine: its queue replaces the one before
    announce(again, [mine[:2]])
    assert node.stats()["waiting_jobs"] == 1
    one.end()
    assert node.stats()["waiting_jobs"] == 1
    again.end()
    assert node.stats()["waiting_jobs"] == 0


def test_without_anything_below_it_is_only_noted() -> None:
    opened = Node(nbytes=64 * KiB)
    caller = opened.caller()
    assert caller.put({key("a"): b"a"}) == [Code.OK]
    announce(caller, [[key("a"), key("b")]])
    assert opened.stats()["announced"] == 1
    assert opened.stats()["prefetched"] == 0
    assert caller.whole(key("a")) == b"a"
    opened.close()


def test_a_queue_longer_than_the_memory_evicts_nothing_it_needs_and_blocks_no_writer(tmp_path: Path) -> None:
    opened = Node(
        Namespace(remote=f"file://{tmp_path}/remote", policy="default"), nbytes=64 * KiB
    )  # fmt: skip
    try:
        caller = opened.caller()
        fill = keys(16, "fill")
        for name in fill:
            assert caller.put({name: payload(name, 4 * KiB)}) == [Code.OK]
        announce(caller, [[*fill, *keys(3000, "more")]])
        for name in keys(32, "new"):  # all of it is announced, yet there is room for what is new
            assert caller.put({name: payload(name, 4 * KiB)}) == [Code.OK]
    finally:
        opened.close()


@given(st.lists(st.lists(st.integers(0, 50), max_size=20), max_size=20), st.randoms())
def test_queues_travel_as_they_are(jobs: list[list[int]], chance: random.Random) -> None:
    waiting = [[key(each) for each in job] for job in jobs]
    meta = pack_announce(waiting)
    assert unpack_announce(meta) == waiting
    cut = meta[: chance.randrange(len(meta))]
    with pytest.raises(Malformed):
        unpack_announce(cut)
    with pytest.raises(Malformed):
        unpack_announce(meta + b"x")


def test_lengths_that_do_not_add_up() -> None:
    meta = bytearray(pack_announce([[key(1), key(2)]]))
    meta[-4] = 3
    with pytest.raises(Malformed, match="jobs of 3 records, and 2 keys"):
        unpack_announce(bytes(meta))


def test_the_nodes_of_a_pool_are_told_what_is_theirs(tmp_path: Path) -> None:
    def opened(name: str) -> NodeServer:
        return NodeServer(memory_bytes=1 << 20, disk=f"file://{tmp_path}/{name}")

    with opened("a") as one, opened("b") as other:
        backend = open_backend(f"node://{one.address},{other.address}")
        assert isinstance(backend, NodeBackend)
        names = keys(32)
        writes = [Write(name, [memoryview(payload(name, 4 * KiB))]) for name in names]
        assert all(outcome.ok for outcome in backend.put(writes, deadline=time.monotonic() + 60))
        nodes = (one, other)
        for node in nodes:
            assert node.settle(60)
            with (store := node.spaces[""].store).lock:
                for name in [*store.records]:
                    store.remove_locked(name)
        backend.announce([names[:16], names[16:]])

        def came() -> list[int]:
            return [node.stats()["namespaces"][""]["prefetched"] for node in nodes]

        until(lambda: sum(came()) == 32, f"{came()} came up")
        assert all(came())
        backend.announce([])
        until(lambda: [node.stats()["namespaces"][""]["waiting_jobs"] for node in nodes] == [0, 0])
        backend.close()
        with pytest.raises(ClosedError):
            backend.announce([names])


def test_of_a_queue_that_is_too_long_the_head_counts(node: Node) -> None:
    head = stored(node, keys(2))
    caller = node.caller()
    endless = [key(("endless", at)) for at in range(MOST_ANNOUNCED + 10)]
    announce(caller, [head, endless, stored(node, keys(1, "last"))])
    prefetched(node, 2)
    assert not in_memory(node, keys(1, "last"))[0]


def test_what_engines_announce_is_bounded_however_many_they_are(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the node's own memory, which is not what `memory` says."""
    monkeypatch.setattr(ahead_module, "MOST_ANNOUNCED", 64)
    monkeypatch.setattr(ahead_module, "_MOST_KEPT", 4 * 64)
    queue = [[key(("job", at))] for at in range(100)]
    callers = [node.caller(("engine", at)) for at in range(8)]
    for caller in callers:
        announce(caller, queue)
    assert node.stats()["waiting_jobs"] == 4 * 64  # of four of them the head
    callers[0].end()
    assert node.stats()["waiting_jobs"] == 3 * 64
    announce(callers[-1], queue)  # there is room again
    assert node.stats()["waiting_jobs"] == 4 * 64
    announce(callers[1], [])
    announce(callers[2], [[key(at)] for at in range(3)])
    assert node.stats()["waiting_jobs"] == 2 * 64 + 3
