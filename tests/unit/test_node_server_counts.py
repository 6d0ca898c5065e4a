"""What a node counts: records, not reads; each once, however it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.keys import Key
from kvstore_backends._node_space import Namespace
from kvstore_backends.node.protocol import Code
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import NodeServer

from .node_server_disk_support import forget_memory
from .node_server_support import Caller, KiB, MiB, Node, keys, payload


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    opened = Node(Namespace(disk=f"file://{tmp_path}/kv?bytes=1MiB"), nbytes=256 * KiB)
    yield opened
    opened.close()


def stored(node: Node, caller: Caller, count: int) -> dict[Key, bytes]:
    records = {name: payload(name, 4 * KiB) for name in keys(count)}
    assert caller.put(records) == [Code.OK] * count
    assert node.space.below is not None
    assert node.space.below.settle(60)
    return records


def counts(node: Node) -> tuple[int, ...]:
    stats = node.stats()
    return tuple(stats[name] for name in ("hits", "misses", "absent", "failed", "postponed"))


def test_a_record_that_is_read_in_parts_is_one(node: Node) -> None:
    caller = node.caller()
    records = stored(node, caller, 2)
    one, other = keys(2)
    assert caller.get([(one, 0, 100), (one, 100, 1000), (other, 0, 100)])[0] == records[one][:100]
    assert counts(node) == (2, 0, 0, 0, 0)
    caller.get([(one, 1100, 1000)])  # its next layer
    assert counts(node) == (2, 0, 0, 0, 0)
    nowhere = keys(1, "nowhere")[0]
    assert caller.get([(nowhere, 0, 100), (nowhere, 100, 1000)]) == [Code.MISS] * 2
    assert counts(node) == (2, 1, 0, 0, 0)


def test_lookups_count_what_is_absent(node: Node) -> None:
    caller = node.caller()
    stored(node, caller, 2)
    assert caller.stat([*keys(2), *keys(3, "nowhere")]) == [Code.OK] * 2 + [Code.MISS] * 3
    assert counts(node) == (0, 0, 3, 0, 0)


def test_what_does_not_fit_into_one_answer_has_not_failed(node: Node) -> None:
    caller = node.caller()
    names = keys(32)
    for name in names:
        caller.put({name: payload(name, 4 * KiB)})
    found = caller.get([(name, 0, 4 * KiB) for name in names])
    assert found.count(Code.FAILED) > 0
    hits = len(names) - found.count(Code.FAILED)
    assert counts(node) == (hits, 0, 0, 0, 32 - hits)
    many = {name: payload(name, 4 * KiB) for name in keys(32, "many")}
    codes = caller.put(many)
    assert codes.count(Code.FULL) > 0
    stats = node.stats()
    assert (stats["refused"], stats["postponed"]) == (0, 32 - hits + codes.count(Code.FULL))


def test_a_tier_s_hits_add_up_and_never_shrink(tmp_path: Path) -> None:
    with NodeServer(memory_bytes=MiB, disk=f"file://{tmp_path}/kv?bytes=1MiB") as served:
        instance = NodeInstance(served)
        caller = Caller(served._service)
        names = keys(4)
        assert caller.put({name: payload(name, 4 * KiB) for name in names}) == [Code.OK] * 4
        space = served.spaces[""]
        assert space.below is not None
        assert space.below.settle(60)

        def hits() -> tuple[int, ...]:
            return tuple(tier.hits for tier in instance.usage())

        assert caller.get([(name, 0, 4 * KiB) for name in names[:3]])[0] == payload(names[0], 4 * KiB)
        assert hits() == (3, 0)
        forget(served)
        assert caller.get([(names[0], 100, 100)]) == [payload(names[0], 4 * KiB)[100:200]]  # brought up, but no hit
        assert hits() == (3, 1)
        assert caller.get([(names[1], 0, 100)]) == [payload(names[1], 4 * KiB)[:100]]
        assert hits() == (3, 2)
        assert caller.get([(names[1], 0, 100)]) == [payload(names[1], 4 * KiB)[:100]]
        assert hits() == (4, 2)
        caller.end()
        instance.close()


def forget(served: NodeServer) -> None:
    node = Node.__new__(Node)
    node.space = served.spaces[""]
    forget_memory(node)


def test_a_folder_alone_says_how_full_it_is_and_how_many_records_it_has(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?bytes=32KiB"
    with NodeServer(memory_bytes=MiB, disk=url) as served:
        instance = NodeInstance(served)
        caller = Caller(served._service)
        for name in keys(12):
            caller.put({name: payload(name, 4 * KiB)})
            assert served.settle(60)
        disk = instance.usage()[1]
        assert (disk.name, disk.capacity, disk.records, disk.used) == ("disk", 32 * KiB, 8, 32 * KiB)
        assert disk.evicted == 4
        space = served.spaces[""]
        assert space.below is not None
        seen = space.below.metrics.snapshot()["kvstore_backend_bytes_total"]["series"]
        assert {each["labels"]["operation"]: each["value"] for each in seen} == {"stat": 0, "put": 48 * KiB}  # its flow
        caller.end()
        instance.close()
    with NodeServer(memory_bytes=MiB, disk=f"file://{tmp_path}/other") as served:
        instance = NodeInstance(served)
        assert instance.usage()[1].records == -1  # nobody counts what has no cap
        instance.close()
