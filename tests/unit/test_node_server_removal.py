"""What was deleted or quarantined from a node with a disk does not come back; nobody waits for a stopped writer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.backend import Outcome
from kvstore.errors import PermanentError
from kvstore.keys import Key
from kvstore_backends._memory_reservation import Record
from kvstore_backends.node.protocol import Code, Op, Status, pack_keys

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
from .node_server_support import in_thread, keys


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def test_delete_covers_both(opened: Nodes) -> None:
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
    opened: Nodes, monkeypatch: pytest.MonkeyPatch
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
    while not disk_of(node).backlog.is_held(a):
        time.sleep(0)
    assert caller.whole(a) == b"a"  # it is not gone yet
    slow.open.set()
    assert answer() == [Code.OK]
    settled(node)
    assert on_disk(node, [a, b]) == [False, False]
    assert caller.put({a: b"again", b: b"again"}) == [Code.OK, Code.OK]
    settled(node)
    forget_memory(node)
    assert (caller.whole(a), caller.whole(b)) == (b"again", b"again")


def test_a_delete_does_not_wait_past_its_deadline_for_the_disk(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    slow = SlowDisk(node, monkeypatch)
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"a"})
    assert slow.begun.wait(60)
    answer = caller.ask(Op.DELETE, pack_keys([a]), deadline=time.monotonic() + 0.1)
    assert answer.status == Status.LATE or caller.outcomes(answer)[0] == [Code.FAILED]
    slow.open.set()


def test_quarantine_covers_both(opened: Nodes, tmp_path: Path) -> None:
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


# Loads under way.


@pytest.mark.parametrize("operation", [Op.DELETE, Op.QUARANTINE])
def test_a_record_on_its_way_up_does_not_arrive_once_it_was_removed(
    opened: Nodes, monkeypatch: pytest.MonkeyPatch, operation: Op
) -> None:
    node = opened()
    caller, reader = node.caller(), node.caller("reader")
    a, b = keys(2)
    caller.put({a: b"a", b: b"b"})
    settled(node)
    forget_memory(node)
    slow = SlowReads(node, monkeypatch)
    read = in_thread(lambda: reader.get([(a, 0, 1), (b, 0, 1)]))
    assert slow.begun.wait(60)  # its bytes are in reserved memory
    assert caller.about(operation, [a]) == [Code.OK]
    slow.open.set()
    assert read() == [Code.MISS, b"b"]
    assert in_memory(node, [a, b]) == [False, True]
    assert caller.stat([a, b]) == [Code.MISS, Code.OK]
    assert caller.whole(a) == Code.MISS
    assert caller.put({a: b"new"}) == [Code.OK]
    assert caller.whole(a) == b"new"
    settled(node)
    forget_memory(node)
    assert caller.whole(a) == b"new"


def test_nothing_is_brought_up_between_the_two_removals(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that comes when the file is being deleted, and one when it is not yet: neither brings the record up."""
    node = opened()
    caller, reader = node.caller(), node.caller("reader")
    (a,) = keys(1)
    caller.put({a: b"a"})
    settled(node)
    forget_memory(node)
    backend = disk_of(node).backend
    original = backend.delete
    seen: list[object] = []

    def delete(keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        seen.append(reader.whole(a))
        outcomes = original(keys, deadline=deadline)
        seen.append(reader.whole(a))
        return outcomes

    monkeypatch.setattr(backend, "delete", delete)
    assert caller.about(Op.DELETE, [a]) == [Code.OK]
    assert seen == [Code.MISS, Code.MISS]
    assert caller.stat([a]) == [Code.MISS]


def test_what_is_put_while_it_is_removed_is_written_all_the_same(
    opened: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened()
    caller, writer = node.caller(), node.caller("writer")
    a, b = keys(2)
    caller.put({a: b"old", b: b"kept"})
    caller.whole(a)
    settled(node)
    backend = node.space.backend
    original = backend.delete

    def delete(keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        outcomes = original(keys, deadline=deadline)
        assert writer.put({a: b"new"}) == [Code.OK]
        return outcomes

    monkeypatch.setattr(backend, "delete", delete)
    assert caller.about(Op.DELETE, [a]) == [Code.OK]
    settled(node)
    forget_memory(node)
    assert (caller.whole(a), caller.whole(b)) == (b"new", b"kept")


def test_what_cannot_be_removed_below_stays_above(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would come up again. And it is still written, if that was what could not be waited for."""
    node = opened()
    caller = node.caller()
    slow = SlowDisk(node, monkeypatch)
    a, b = keys(2)
    caller.put({a: b"a"})
    assert slow.begun.wait(60)
    caller.put({b: b"b"})
    deadline = time.monotonic() + 0.05
    outcomes = node.space.delete([a, b], deadline)
    assert outcomes[0].error is not None
    assert "being written" in outcomes[0].error.message
    assert caller.whole(a) == b"a"
    slow.open.set()
    settled(node)
    refused = Outcome.failed(PermanentError("scripted"))
    with monkeypatch.context() as patch:
        patch.setattr(disk_of(node).backend, "delete", lambda keys, *, deadline: [refused] * len(keys))
        assert caller.about(Op.DELETE, [a]) == [Code.REFUSED]
    assert caller.whole(a) == b"a"
    assert caller.about(Op.DELETE, [a]) == [Code.OK]
    assert caller.whole(a) == Code.MISS


def test_a_record_that_is_only_offered_when_it_was_removed_is_not_written(
    opened: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pinned for the disk before, so it is still whole."""
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    store = node.space.store
    original = store.pin

    def pin(keys: Sequence[Key]) -> list[Record | None]:
        records = original(keys)
        monkeypatch.setattr(store, "pin", original)
        assert caller.about(Op.DELETE, [a]) == [Code.OK]
        return records

    monkeypatch.setattr(store, "pin", pin)
    assert node.caller("writer").put({a: b"a"}) == [Code.OK]
    settled(node)
    assert on_disk(node, [a]) == [False]
    assert caller.whole(a) == Code.MISS


def test_a_record_that_is_offered_while_it_is_removed_is_not_written(
    opened: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"a"})
    disk = settled(node)
    original = disk.backend.delete

    def delete(keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        outcomes = original(keys, deadline=deadline)
        disk.backlog.offer([a], [None])  # by a put that is a little late with it
        return outcomes

    monkeypatch.setattr(disk.backend, "delete", delete)
    assert caller.about(Op.DELETE, [a]) == [Code.OK]
    settled(node)
    assert on_disk(node, [a]) == [False]
    assert (caller.whole(a), node.stats()["in_use"]) == (Code.MISS, 0)


# Writers who stopped.


def test_a_read_does_not_wait_for_a_writer(opened: Nodes) -> None:
    """Of a record that is only promised: a miss; of one that lies below all the same: from there."""
    node = opened()
    caller, writer, rival = node.caller(), node.caller("writer"), node.caller("rival")
    a, b = keys(2)
    ticket, codes = writer.question({a: b"never sent", b: b"never sent"})
    assert codes == [Code.WANTED, Code.WANTED]
    assert caller.get([(a, 0, 1), (b, 0, 1)]) == [Code.MISS, Code.MISS]
    assert rival.put({b: b"by a rival"}) == [Code.OK]
    settled(node)
    forget_memory(node)
    assert b in node.space.store.pending
    assert caller.whole(b) == b"by a rival"
    assert writer.outcomes(writer.data(ticket, b"never sent" * 2))[0] == [Code.OK, Code.EXISTS]
    assert caller.get([(a, 0, 99), (b, 0, 99)]) == [b"never sent", b"by a rival"]


def test_a_stopped_writer_who_goes_on_finds_what_a_rival_stored(opened: Nodes) -> None:
    """Below, in the meantime: the first one stays, as ever."""
    node = opened()
    caller, writer, rival = node.caller(), node.caller("writer"), node.caller("rival")
    (a,) = keys(1)
    ticket, _ = writer.question({a: b"by the writer"})
    assert rival.put({a: b"by the rival"}) == [Code.OK]
    settled(node)
    forget_memory(node)
    assert writer.outcomes(writer.data(ticket, b"by the writer"))[0] == [Code.EXISTS]
    assert (node.stats()["in_use"], node.space.gate.used) == (0, 0)
    assert caller.whole(a) == b"by the rival"


def test_who_is_done_first_wins_over_a_read_from_below(opened: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"from below"})
    settled(node)
    forget_memory(node)
    slow = SlowReads(node, monkeypatch)
    read = in_thread(lambda: caller.whole(a))
    assert slow.begun.wait(60)
    first = node.space.store.claim([a], [5], [None], [0], rival=True).reservation
    (ready,) = first.rooms(0.0)
    first.views[0][:] = b"first"
    assert first.commit(ready) == []
    first.close()
    slow.open.set()
    assert read() == b"first"
    assert node.stats()["in_use"] == 64
