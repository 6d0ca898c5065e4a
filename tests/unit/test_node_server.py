"""The service of a node, without a transport: what it answers, and what it holds and gives back."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import pytest

import kvstore_backends._node_service as service_module
import kvstore_backends._node_session as session_module
from kvstore.keys import Key
from kvstore_backends._node_space import Namespace
from kvstore_backends.node.protocol import (
    Code,
    Op,
    Status,
    pack_get,
    pack_keys,
    pack_list,
    pack_put,
)
from kvstore_transport.errors import ConnectionLost

from .node_server_support import Caller, KiB, MiB, Node, impatient, in_thread, key, keys, payload


@pytest.fixture
def opened() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*args: Any, **options: Any) -> Node:
        nodes.append(Node(*args, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


# Bytes.


@pytest.mark.parametrize("how", ["put", "put_at_once"])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 100_000])
def test_bytes_come_back(opened: Callable[..., Node], how: str, nbytes: int) -> None:
    caller = opened().caller()
    a, b = keys(2)
    records = {a: payload("a", nbytes), b: payload("b", nbytes)}
    put = getattr(caller, how)
    if how == "put" and not nbytes:
        put = caller.put_at_once  # a batch without bytes is final: there is nothing to ask for
    assert put(records) == [Code.OK, Code.OK]
    codes, sizes = caller.outcomes(caller.ask(Op.STAT, pack_keys([b, key("none"), a])))
    assert (codes, sizes) == ([Code.OK, Code.MISS, Code.OK], [nbytes, 0, nbytes])
    assert caller.get([(b, 0, nbytes), (key("none"), 0, 5), (a, 0, nbytes + 10)]) == [
        records[b], Code.MISS, records[a]
    ]  # fmt: skip
    assert put(records) == [Code.EXISTS, Code.EXISTS]


def test_ranges(opened: Callable[..., Node]) -> None:
    caller = opened().caller()
    a, b = keys(2)
    data = {a: payload("a", 10_000), b: payload("b", 10_000)}
    caller.put(data)
    rng = random.Random(1)
    reads = [
        (rng.choice([a, b]), rng.choice([0, 1, 5000, 9_999, 10_000, 10_001, 1 << 62]), rng.choice([0, 1, 700, 1 << 62]))
        for _ in range(300)
    ]
    reads += [(a, at, 1000) for at in range(0, 10_000, 1000)]
    assert caller.get(reads) == [data[name][offset : offset + length] for name, offset, length in reads]


def test_neighbouring_ranges_travel_as_one_piece(opened: Callable[..., Node]) -> None:
    caller = opened().caller()
    a, b = keys(2)
    caller.put({a: payload("a", 10_000), b: payload("b", 10_000)})
    answer = caller.get_answer([(a, at, 1000) for at in range(0, 10_000, 1000)] + [(b, 0, 10), (b, 10, 90), (b, 0, 5)])
    assert [len(view) for view in answer.body] == [10_000, 100, 5]
    assert all(view.readonly for view in answer.body)
    assert answer.done is not None
    answer.done()


def test_an_answer_is_the_memory_of_the_pool(opened: Callable[..., Node]) -> None:
    """No copy on the way out, none on the way in."""
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: payload("a", 10_000)})
    answer = caller.get_answer([(a, 0, 10_000)])
    record = node.space.store.records[a]
    record.view[5] ^= 255
    assert answer.body[0][5] == record.view[5] != payload("a", 10_000)[5]
    assert answer.done is not None
    answer.done()


def test_a_record_that_is_being_sent_is_not_given_away(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=16 * KiB)
    reader, caller = node.caller("reader"), node.caller()
    (a,) = keys(1)
    data = payload("a", 6 * KiB)
    caller.put({a: data})
    answer = reader.get_answer([(a, 0, 6 * KiB)])
    assert caller.about(Op.DELETE, [a]) == [Code.OK]
    for name in keys(100):
        assert caller.put_at_once({name: bytes(KiB)}) == [Code.OK]
    assert b"".join(answer.body) == data
    assert node.stats()["records"] == 10
    assert answer.done is not None
    answer.done()
    for name in keys(6, "more"):
        caller.put_at_once({name: bytes(KiB)})
    assert node.stats()["records"] == 16


# Putting.


def test_only_what_is_wanted_is_asked_for(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    a, b, c = keys(3)
    caller.put({b: payload("b", 1000)})
    records = {a: payload("a", 1000), b: payload("other", 1000), c: payload("c", 500)}
    ticket, codes = caller.question(records)
    assert codes == [Code.WANTED, Code.EXISTS, Code.WANTED]
    assert caller.stat([a, b, c]) == [Code.MISS, Code.OK, Code.MISS]
    codes, sizes = caller.outcomes(caller.data(ticket, records[a] + records[c]))
    assert (codes, sizes) == ([Code.OK, Code.OK], [1000, 500])
    assert [caller.whole(name) for name in (a, b, c)] == [records[a], payload("b", 1000), records[c]]
    ticket, codes = caller.question(records)
    assert (ticket, codes) == (0, [Code.EXISTS] * 3)
    assert node.stats()["bytes_in"] == 2500


def test_at_once_what_is_there_goes_nowhere(opened: Callable[..., Node]) -> None:
    caller = opened().caller()
    a, b, c = keys(3)
    caller.put({b: payload("b", 1000)})
    records = {a: payload("a", 1000), b: payload("other", 3000), c: payload("c", 500)}
    assert caller.put_at_once(records) == [Code.OK, Code.EXISTS, Code.OK]
    assert [caller.whole(name) for name in (a, b, c)] == [records[a], payload("b", 1000), records[c]]


def test_a_key_twice_in_a_batch(opened: Callable[..., Node]) -> None:
    caller = opened().caller()
    a, b = keys(2)
    meta = pack_put([a, b, a], [4, 1, 5], [None] * 3)
    codes, _ = caller.outcomes(caller.ask(Op.PUT, meta, b"aaaabAAAAA"))
    assert codes == [Code.OK, Code.OK, Code.EXISTS]
    assert caller.whole(a) == b"aaaa"


def test_parents_protect_heads(opened: Callable[..., Node]) -> None:
    caller = opened(nbytes=8 * KiB, share=0.9).caller()
    chain = keys(6, "chain")
    for name, parent in zip(chain, [None, *chain[:-1]], strict=True):
        caller.put({name: bytes(KiB)}, [parent])
    for name in keys(4, "other"):
        caller.put({name: bytes(KiB)})
    assert caller.stat(chain) == [Code.OK] * 4 + [Code.MISS] * 2


def test_too_large_and_no_room(opened: Callable[..., Node]) -> None:
    node = opened(Namespace(policy="none"), nbytes=64 * KiB, share=0.9)
    caller = node.caller()
    a, b, c = keys(3)
    _, codes = caller.question({a: bytes(64 * KiB + 1)})
    assert codes == [Code.TOO_LARGE]
    assert caller.put({key("large"): bytes(57 * KiB)}) == [Code.OK]
    records = {a: bytes(3 * KiB), b: bytes(3 * KiB), c: bytes(3 * KiB)}
    with impatient():
        ticket, codes = caller.question(records)
    assert codes == [Code.WANTED, Code.WANTED, Code.FULL]
    codes, _ = caller.outcomes(caller.data(ticket, bytes(6 * KiB)))
    assert codes == [Code.OK, Code.OK]
    assert caller.put({c: bytes(KiB)}) == [Code.OK]
    assert node.stats()["refused"] == 2


def test_a_record_longer_than_a_body_is_too_large(opened: Callable[..., Node]) -> None:
    caller = opened(max_body=10_000).caller()
    a, b = keys(2)
    _, codes = caller.question({a: bytes(10_001), b: bytes(10_000)})
    assert codes == [Code.TOO_LARGE, Code.WANTED]


# What breaks leaves nothing.


def test_the_connection_ends_between_question_and_bytes(opened: Callable[..., Node]) -> None:
    node = opened()
    caller, other = node.caller(), node.caller("other")
    (a,) = keys(1)
    caller.question({a: bytes(MiB)})
    assert node.space.gate.used == MiB
    caller.end()
    assert node.space.gate.used == 0
    assert node.stats()["in_use"] == 0
    assert node.stats()["abandoned"] == 1
    assert other.put({a: b"mine"}) == [Code.OK]


@pytest.mark.parametrize("how", ["data", "at once"])
@pytest.mark.parametrize("cut", [0, 500_000, 999_999])
def test_the_connection_dies_in_the_middle_of_the_bytes(opened: Callable[..., Node], how: str, cut: int) -> None:
    node = opened(nbytes=16 * MiB)
    caller, other = node.caller(), node.caller("other")
    a, b = keys(2)
    records = {a: payload("a", 500_000), b: payload("b", 500_000)}
    if how == "data":
        ticket, _ = caller.question(records)
        with pytest.raises(ConnectionLost):
            caller.data(ticket, b"".join(records.values()), cut=cut)
    else:
        with pytest.raises(ConnectionLost):
            caller.put_at_once(records, cut=cut)
    caller.end()
    stats = node.stats()
    assert (stats["in_use"], stats["held"], stats["abandoned"]) == (0, 0, 2)
    assert other.stat([a, b]) == [Code.MISS] * 2
    assert other.put(records) == [Code.OK, Code.OK]
    assert other.whole(a) == records[a]


def test_another_question_drops_the_ticket(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    first, _ = caller.question({a: bytes(1000)})
    second, _ = caller.question({b: b"data"})
    assert caller.data(first, bytes(1000)).status == Status.LATE
    assert caller.outcomes(caller.data(second, b"data"))[0] == [Code.OK]
    assert caller.data(second, b"data").status == Status.LATE  # a ticket is for once
    assert caller.put({a: b"a"}) == [Code.OK]


def test_a_ticket_is_of_its_connection(opened: Callable[..., Node]) -> None:
    node = opened()
    caller, other = node.caller(), node.caller()
    (a,) = keys(1)
    ticket, _ = caller.question({a: b"data"})
    assert other.data(ticket, b"evil").status == Status.LATE
    assert caller.outcomes(caller.data(ticket, b"data"))[0] == [Code.OK]


def test_bytes_that_do_not_fit_the_question(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    ticket, _ = caller.question({a: bytes(1000)})
    assert caller.data(ticket, bytes(999)).status == Status.BAD
    assert node.stats()["in_use"] == 0
    assert caller.ask(Op.PUT, pack_put([a], [10], [None]), b"123456789").status == Status.BAD
    assert caller.put({a: b"a"}) == [Code.OK]


def test_a_ticket_whose_bytes_never_come_is_swept(opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened(stall_s=50.0)
    caller = node.caller()
    (a,) = keys(1)
    ticket, _ = caller.question({a: bytes(1000)})
    node.service.sweep()
    assert node.space.gate.used == 1024  # its time is not over; another question drops it
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 49.0)
    node.service.sweep()
    assert node.space.gate.used == 1024
    monkeypatch.setattr(time, "monotonic", lambda: now + 51.0)
    node.service.sweep()
    assert node.space.gate.used == 0
    assert caller.data(ticket, bytes(1000), deadline=now + 100).status == Status.LATE
    monkeypatch.undo()
    monkeypatch.setattr(node.service, "_ticket_s", 0.0)
    ticket, _ = caller.question({a: bytes(1000)})
    node.service.sweep()
    assert node.space.gate.used == 0
    assert caller.data(ticket, bytes(1000)).status == Status.LATE
    assert node.stats()["abandoned"] == 2
    assert node.caller("other").put({a: b"a"}) == [Code.OK]


# Two at a time.


def test_two_clients_race_for_one_key(opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits a little for the first, then sends as well; who is ready first has stored it."""
    monkeypatch.setattr(service_module, "_PATIENCE_S", 0.05)
    node = opened()
    first, second = node.caller("first"), node.caller("second")
    (a,) = keys(1)
    one, codes = first.question({a: b"1" * 1000})
    assert codes == [Code.WANTED]
    two, codes = second.question({a: b"2" * 1000})
    assert codes == [Code.WANTED]
    assert second.outcomes(second.data(two, b"2" * 1000))[0] == [Code.OK]
    assert first.outcomes(first.data(one, b"1" * 1000))[0] == [Code.EXISTS]
    assert first.whole(a) == b"2" * 1000
    assert node.stats()["in_use"] == 1024


def test_the_second_finds_it_there_if_the_first_is_quick(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened()
    first, second = node.caller("first"), node.caller("second")
    (a,) = keys(1)
    ticket, _ = first.question({a: b"1" * 1000})
    store = node.space.store
    waits = threading.Event()
    original = store.wait_for_others

    def noticed(keys: Sequence[Key], deadline: float) -> None:
        waits.set()
        original(keys, deadline)

    monkeypatch.setattr(store, "wait_for_others", noticed)
    monkeypatch.setattr(service_module, "_PATIENCE_S", 60.0)
    join = in_thread(lambda: second.question({a: b"2" * 1000}))
    assert waits.wait(60)
    first.data(ticket, b"1" * 1000)
    assert join() == (0, [Code.EXISTS])


def test_many_clients_put_and_get_the_same(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=64 * KiB, share=0.9)
    names = keys(60)
    records = {name: payload(name, 1000 + 10 * i) for i, name in enumerate(names)}
    callers = [node.caller(thread) for thread in range(4)]
    hits = [0] * 4

    def work(thread: int) -> None:
        rng, caller = random.Random(thread), callers[thread]
        for turn in range(60):
            some = rng.sample(names, 6)
            put = caller.put if turn % 2 else caller.put_at_once
            put({name: records[name] for name in some})
            for name, data in zip(some, caller.get([(name, 0, 1 << 20) for name in some]), strict=True):
                if data != Code.MISS:
                    hits[thread] += 1
                    assert data == records[name]
            caller.about(Op.DELETE, some[:1])

    for join in [in_thread(lambda thread=thread: work(thread)) for thread in range(4)]:  # type: ignore[misc]
        join()
    assert min(hits) > 50
    assert node.stats()["held"] == 0


# Delete, quarantine, list, info.


def test_delete_and_quarantine(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: b"a", b: b"bad"})
    assert caller.about(Op.DELETE, [a, a, key("none")]) == [Code.OK, Code.MISS, Code.MISS]
    assert caller.about(Op.QUARANTINE, [b]) == [Code.MISS]  # nobody has read it yet
    assert caller.whole(b) == b"bad"
    assert caller.about(Op.QUARANTINE, [b]) == [Code.OK]
    assert caller.put({b: b"healed"}) == [Code.OK]
    assert caller.about(Op.QUARANTINE, [b]) == [Code.MISS]  # a late report about the old one
    assert caller.whole(b) == b"healed"
    stats = node.stats()
    assert (stats["deleted"], stats["quarantined"], stats["records"]) == (1, 1, 1)


def test_list_by_pages(opened: Callable[..., Node]) -> None:
    caller = opened().caller()
    records = {name: bytes(i) for i, name in enumerate(keys(25))}
    caller.put_at_once(records)
    page = caller.list_page(0, 10)
    assert len(page.keys) == 10
    assert page.cursor
    assert all(abs(stamp - time.time()) < 60 for stamp in page.last_used)
    for size in (1, 7, 25, 1000):
        assert caller.list_all(size) == {name: len(data) for name, data in records.items()}
    assert caller.list_page(page.cursor, 100).cursor == 0
    assert caller.ask(Op.LIST, pack_list(page.cursor, 10)).status == Status.BAD  # it has ended


def test_listings_are_bounded_and_end_with_their_connection(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_CURSORS", 6)
    node = opened()
    a, b = node.caller("a"), node.caller("b")
    a.put_at_once(dict.fromkeys(keys(10), b"x"))
    cursors = [a.list_page(0, 1).cursor for _ in range(6)]
    assert len(node.service._cursors) == 4  # of one connection
    assert a.ask(Op.LIST, pack_list(cursors[1], 1)).status == Status.BAD  # the oldest went
    assert b.ask(Op.LIST, pack_list(cursors[5], 1)).status == Status.BAD  # not his
    assert [b.list_page(0, 1).cursor > 0 for _ in range(2)] == [True, True]
    assert b.ask(Op.LIST, pack_list(0, 1)).status == Status.BUSY
    a.end()
    assert len(node.service._cursors) == 2
    assert b.list_page(0, 1).cursor
    monkeypatch.setattr(session_module, "_CURSOR_IDLE_S", -1.0)
    node.service.sweep()
    assert len(node.service._cursors) == 0


def test_info(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=MiB)
    caller = node.caller()
    caller.put({key("a"): bytes(100)})
    facts = msgpack.unpackb(caller.ask(Op.INFO, b"").meta)
    assert facts["max_value_bytes"] == MiB
    assert (facts["durable"], facts["ttl"], facts["capacity"]) == (False, False, True)
    assert facts["stats"]["records"] == 1
    assert facts["stats"]["puts"] == 1


def test_get_of_an_endless_deadline(opened: Callable[..., Node]) -> None:
    caller: Caller = opened().caller()
    a: Key = key("a")
    caller.put({a: b"data"})
    answer = caller.ask(Op.GET, pack_get([a], [0], [4]), deadline=math.inf)
    assert b"".join(answer.body) == b"data"
    assert answer.done is not None
    answer.done()
