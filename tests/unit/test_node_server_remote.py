"""What is remote below a node: shared by nodes, slower than the client's patience, broken, and back again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore_backends._node_service as service_module
from kvstore.backend import NO_DEADLINE, Backend, Outcome, Write
from kvstore.control.journal import Journal, split_keys
from kvstore.errors import ConfigError, TransientError
from kvstore.tiers.backend import TieredBackend
from kvstore.wrappers import Wrapper
from kvstore.wrappers.base import Operation, call_backend
from kvstore_backends._node_space import Namespace, Space
from kvstore_backends.node.protocol import Code, Op
from kvstore_backends.node_server import NodeServer

from .node_server_disk_support import forget_memory, in_memory
from .node_server_support import KiB, Node, keys, payload

Opened = Callable[..., Node]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    nodes: list[Node] = []

    def make(*, disk: str = "", nbytes: int = 256 * KiB, **fields: Any) -> Node:
        if disk:
            fields["disk"] = f"file://{tmp_path}/{disk}{'' if '?' in disk else '?bytes=16MiB'}"
        fields.setdefault("remote", f"file://{tmp_path}/remote")
        nodes.append(Node(Namespace(**fields), nbytes=nbytes))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def tiers_of(node: Node) -> TieredBackend:
    assert node.space.below is not None
    tiers = node.space.below.lower.tiers
    assert tiers is not None
    return tiers


def settled(node: Node) -> None:
    assert node.space.below is not None
    assert node.space.below.settle(60)


def has(node: Node, place: int, names: Sequence[Any]) -> list[bool]:
    return [outcome.ok for outcome in tiers_of(node).tiers[place].backend.stat(names, deadline=NO_DEADLINE)]


class Away(Wrapper):
    """Fails until it comes back: at once, or, `silent`, at the deadline."""

    def __init__(self, inner: Backend, *, silent: bool = False) -> None:
        super().__init__(inner)
        self._back = threading.Event()
        self._silent = silent

    def come_back(self) -> None:
        self._back.set()

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        if self._silent:
            self._back.wait(max(0.0, deadline - time.monotonic()))
        if self._back.is_set():
            return call_backend(self._inner, operation, items, deadline)
        return [Outcome.failed(TransientError("away", backend=self.name, operation=operation))] * len(items)


def take_away(node: Node, *, silent: bool = False) -> Away:
    last = tiers_of(node).tiers[-1]
    last.backend = away = Away(last.backend, silent=silent)
    return away


@pytest.mark.parametrize("disk", ["", "kv"])
def test_records_go_all_the_way_down_and_come_back(opened: Opened, disk: str) -> None:
    node = opened(disk=disk)
    caller = node.caller()
    records = {name: payload(name, 4 * KiB) for name in keys(40)}
    for name, data in records.items():
        assert caller.put({name: data}) == [Code.OK]
        settled(node)
    assert has(node, -1, [*records]) == [True] * 40
    assert caller.stat([*records]) == [Code.OK] * 40
    forget_memory(node)
    assert caller.get([(name, 0, 8 * KiB) for name in [*records][:8]]) == [*records.values()][:8]
    assert in_memory(node, [*records][:8]) == [True] * 8
    assert caller.put(dict.fromkeys([*records][20:23], b"another")) == [Code.EXISTS] * 3
    assert caller.list_all() == dict.fromkeys(records, 4 * KiB)


def test_nodes_share_what_is_remote(opened: Opened) -> None:
    one, other = opened(disk="one"), opened(disk="other")
    records = {name: payload(name, 4 * KiB) for name in keys(4)}
    assert one.caller().put(records) == [Code.OK] * 4
    settled(one)
    caller = other.caller()
    assert [caller.whole(name) for name in records] == [*records.values()]
    assert caller.about(Op.DELETE, [*records][:1]) == [Code.OK]
    forget_memory(one)  # what another one deleted is gone here once memory and disk have let it go
    tiers_of(one).delete_in(0, [*records], deadline=NO_DEADLINE)
    assert one.caller().stat([*records]) == [Code.MISS, *[Code.OK] * 3]


def test_a_disk_that_is_full_moves_records_on_and_loses_none(opened: Opened) -> None:
    node = opened(disk="kv?bytes=64KiB")
    caller = node.caller()
    records = {name: payload(name, 4 * KiB) for name in keys(40)}
    for name, data in records.items():
        assert caller.put({name: data}) == [Code.OK]
        settled(node)
    assert tiers_of(node).wait_quiet(60)
    assert has(node, 0, [*records]).count(True) <= 16
    assert [caller.whole(name) for name in records] == [*records.values()]


def test_a_restart_finds_what_the_disk_has_and_brings_down_what_it_owed(opened: Opened) -> None:
    node = opened(disk="kv?bytes=48KiB")
    take_away(node)
    records = {name: payload(name, 4 * KiB) for name in keys(8)}
    assert node.caller().put(records) == [Code.OK] * 8
    assert node.space.below is not None
    assert node.space.below.backlog.settle(60)
    assert has(node, 0, [*records]) == [True] * 8
    node.close(0.0)  # what is remote never answered

    again = opened(disk="kv?bytes=48KiB")
    caller = again.caller()
    assert tiers_of(again).wait_quiet(60)
    assert has(again, 1, [*records]) == [True] * 8  # it was looked for, and brought there
    assert [caller.whole(name) for name in records] == [*records.values()]
    more = {name: payload(name, 4 * KiB) for name in keys(12, "more")}
    for name, data in more.items():
        assert caller.put({name: data}) == [Code.OK]
        settled(again)
    assert tiers_of(again).wait_quiet(60)
    forget_memory(again)
    everything = records | more
    assert [caller.whole(name) for name in everything] == [*everything.values()]  # what left the disk is remote now


def test_what_is_silent_below_costs_neither_the_hits_nor_the_deadline(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "GLANCE_S", 0.05)
    node = opened()
    caller = node.caller()
    here, there = keys(2, "here"), keys(2, "there")
    assert caller.put({name: payload(name, KiB) for name in (*here, *there)}) == [Code.OK] * 4
    settled(node)
    with node.space.store.lock:
        for name in there:
            node.space.store.remove_locked(name)
    away = take_away(node, silent=True)
    deadline = time.monotonic() + 0.5
    answer = caller.get_answer([(name, 0, KiB) for name in (here[0], there[0], here[1], there[1])], deadline=deadline)
    assert time.monotonic() < deadline  # the answer is there before the client gives up
    assert b"".join(answer.body) == payload(here[0], KiB) + payload(here[1], KiB)
    assert answer.done is not None
    answer.done()
    assert caller.outcomes(answer)[0] == [Code.OK, Code.FAILED, Code.OK, Code.FAILED]
    assert caller.about(Op.STAT, [here[0], there[0]], deadline=time.monotonic() + 0.3) == [Code.OK, Code.FAILED]
    assert caller.put({keys(1, "new")[0]: b"new"}) == [Code.OK]  # after a glance
    away.come_back()


def test_what_is_down_below_stops_nobody_and_is_caught_up_with(opened: Opened) -> None:
    node = opened(disk="kv")
    away = take_away(node)
    caller = node.caller()
    records = {name: payload(name, 4 * KiB) for name in keys(6)}
    for name, data in records.items():
        assert caller.put({name: data}) == [Code.OK]
    assert node.space.below is not None
    assert node.space.below.backlog.settle(60)
    assert has(node, 0, [*records]) == [True] * 6  # the disk took them meanwhile
    forget_memory(node)
    assert [caller.whole(name) for name in records] == [*records.values()]
    assert caller.whole(keys(1, "unknown")[0]) == Code.FAILED  # nobody knows; not a miss
    away.come_back()
    settled(node)
    assert has(node, 1, [*records]) == [True] * 6
    assert caller.whole(keys(1, "unknown")[0]) == Code.MISS


def test_what_is_removed_comes_back_from_nowhere(opened: Opened) -> None:
    node = opened(disk="kv")
    caller = node.caller()
    names = keys(3)
    assert caller.put({name: payload(name, 4 * KiB) for name in names}) == [Code.OK] * 3
    settled(node)
    assert caller.about(Op.DELETE, names[:1]) == [Code.OK]
    assert caller.whole(names[1]) == payload(names[1], 4 * KiB)
    assert caller.about(Op.QUARANTINE, names[1:2])[0] in (Code.OK, Code.MISS)
    forget_memory(node)
    assert [has(node, place, names[:1]) for place in (0, 1)] == [[False], [False]]
    assert caller.whole(names[0]) == Code.MISS
    assert caller.whole(names[2]) == payload(names[2], 4 * KiB)


def test_what_comes_and_goes_is_noted_in_order(tmp_path: Path) -> None:
    journal = Journal()
    namespace = Namespace(disk=f"file://{tmp_path}/kv?bytes=1MiB", remote=f"file://{tmp_path}/remote")
    space = Space(
        namespace, 16 * KiB, shared=False, share=0.5, credits_bytes=64 * KiB, clock=time.time, journal=journal
    )  # fmt: skip
    try:
        names = keys(6)
        for name in names:
            data = memoryview(payload(name, 4 * KiB))
            assert space.backend.put([Write(name, [data])], deadline=NO_DEADLINE)[0].ok
        assert space.below is not None
        space.below.backlog.offer(names[-2:], [None] * 2)
        assert space.below.settle(60)
        space.delete(names[-1:], time.monotonic() + 60)
        space.sweep()
        resident: dict[str, set[bytes]] = {"memory": set(), "disk": set()}
        for event in journal.read(0).events:
            some = split_keys(event.keys)
            if event.op == "admit":
                resident[event.tier].update(some)
            else:
                assert resident[event.tier].issuperset(some)
                resident[event.tier].difference_update(some)
        assert resident == {"memory": {*space.store.records}, "disk": {names[-2]}}
    finally:
        space.close(60)


def test_a_disk_with_a_cap_notes_what_it_evicts(tmp_path: Path) -> None:
    journal = Journal()
    space = Space(
        Namespace(disk=f"file://{tmp_path}/kv?bytes=16KiB"), 64 * KiB, shared=False, share=0.5,
        credits_bytes=64 * KiB, clock=time.time, journal=journal,
    )  # fmt: skip
    try:
        names = keys(8)
        for name in names:
            assert space.backend.put([Write(name, [memoryview(payload(name, 4 * KiB))])], deadline=NO_DEADLINE)[0].ok
            assert space.below is not None
            space.below.backlog.offer([name], [None])
            assert space.below.settle(60)
        on_disk: set[bytes] = set()
        for event in journal.read(0).events:
            if event.tier == "disk":
                (on_disk.update if event.op == "admit" else on_disk.difference_update)(split_keys(event.keys))
        assert space.below is not None
        there = space.below.backend.stat(names, deadline=NO_DEADLINE)
        assert on_disk == {name for name, outcome in zip(names, there, strict=True) if outcome.ok}
        assert len(on_disk) < 8
    finally:
        space.close(60)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"remote": "file:///x", "policy": "none"}, "policy=none"),
        ({"remote": "file:///x", "ttl": 60.0}, "ttl and remote do not go together"),
        ({"remote": "nosuch://x"}, "unknown scheme nosuch://"),
        ({"remote": "s3://bucket/x?token=hunter2"}, "'token' must not stand in a URL"),
        ({"disk": "file:///x", "remote": "file:///y"}, "the disk needs a cap"),
        ({"disk": "s3://bucket/x"}, "what lies elsewhere is 'remote'"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Node(Namespace(**fields))
    assert "hunter2" not in str(caught.value)


def test_two_namespaces_in_one_remote_place(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/remote"
    with pytest.raises(ConfigError, match="namespace 'a' has the remote place of the default namespace"):
        NodeServer(memory_bytes=1 << 20, remote=place, namespaces=[Namespace("a", b"token", remote=place)])


def test_a_node_below_itself() -> None:
    with pytest.raises(ConfigError, match="this node itself"):
        NodeServer("127.0.0.1:17071", memory_bytes=1 << 20, remote="node://127.0.0.1:17072,127.0.0.1:17071")


def test_a_node_below_a_node(tmp_path: Path) -> None:
    with NodeServer(memory_bytes=1 << 20) as last:
        node = Node(Namespace(disk=f"file://{tmp_path}/kv?bytes=1MiB", remote=f"node://{last.address}"))
        caller = node.caller()
        records = {name: payload(name, 4 * KiB) for name in keys(4)}
        assert caller.put(records) == [Code.OK] * 4
        settled(node)
        assert last.stats()["namespaces"][""]["records"] == 4
        forget_memory(node)
        assert [caller.whole(name) for name in records] == [*records.values()]
        node.close()
