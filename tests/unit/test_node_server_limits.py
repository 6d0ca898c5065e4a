"""The service of a node, without a transport: limits, namespaces, and requests that make no sense."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.backend import Outcome
from kvstore.errors import ConfigError, TransientError
from kvstore_backends._node_space import Namespace, share_memory
from kvstore_backends.node.protocol import (
    MAX_ITEMS,
    Code,
    Op,
    Status,
    pack_keys,
    pack_list,
    pack_put,
    unpack_outcomes,
)
from kvstore_transport.seam import Answer

from .node_server_support import KiB, MiB, Node, impatient, in_thread, key, keys, payload


@pytest.fixture
def opened() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*args: Any, **options: Any) -> Node:
        nodes.append(Node(*args, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


# Admission.


def test_a_stopped_reader_keeps_the_pool_from_nobody(opened: Callable[..., Node]) -> None:
    """He holds what he may, his next requests are told that the node is busy; others read and write as before."""
    node = opened(nbytes=2 * MiB, share=0.5, credits_bytes=200 * KiB)
    reader, other = node.caller("reader"), node.caller("other")
    names = keys(10)
    for name in names:
        other.put({name: payload(name, 64 * KiB)})
    stopped = [reader.get_answer([(name, 0, 64 * KiB)]) for name in names[:3]]
    assert node.space.gate.used == 192 * KiB
    with impatient():
        refused = reader.get_answer([(names[3], 0, 64 * KiB)])
        also_refused = reader.ask(Op.PUT, pack_put([key("x")], [64 * KiB], [None]))
    assert refused.status == Status.BUSY
    assert also_refused.status == Status.BUSY
    assert other.whole(names[3]) == payload(names[3], 64 * KiB)
    for name in keys(20, "more"):
        assert other.put({name: payload(name, 64 * KiB)}) == [Code.OK]
    assert [bytes(answer.body[0]) for answer in stopped] == [payload(name, 64 * KiB) for name in names[:3]]
    assert node.stats()["busy"] == 2
    waiting = in_thread(lambda: reader.whole(key(("more", 19))))
    while not node.space.gate.waiting:
        time.sleep(0)
    done_with(stopped)
    assert waiting() == payload(key(("more", 19)), 64 * KiB)


def done_with(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.done is not None:
            answer.done()


def test_a_handful_of_stopped_readers_leave_room(opened: Callable[..., Node]) -> None:
    """Each asks for as much as he can get, and takes nothing of it: a quarter each, whatever his credits say. The
    fourth finds no room for so much, and small records get through to all the end."""
    node = opened(nbytes=8 * MiB, share=0.5)  # 4 MiB for all: 3.5 for any, 0.5 for small ones
    writer = node.caller("writer")
    names, small = keys(30), key("small")
    for name in names:
        writer.put({name: payload(name, 128 * KiB)})
    writer.put({small: payload("small", 10 * KiB)})
    readers = [node.caller(i) for i in range(6)]
    with impatient():
        answers = [reader.get_answer([(name, 0, 1) for name in names]) for reader in readers]
    assert [answer.status for answer in answers] == [Status.OK] * 3 + [Status.BUSY] * 3
    assert node.space.gate.used == 3 * MiB
    with impatient():
        some = writer.get_answer([(name, 0, 1) for name in names[:4]])
        refused = writer.get_answer([(names[0], 0, 1)])
        refused_put = writer.ask(Op.PUT, pack_put([key("y")], [128 * KiB], [None]))
    assert some.status == Status.OK
    assert (refused.status, refused_put.status) == (Status.BUSY, Status.BUSY)
    with impatient():
        assert writer.whole(small) == payload("small", 10 * KiB)
        assert writer.put({key("z"): b"small as well"}) == [Code.OK]
        assert writer.get([(key("none"), 0, 1)]) == [Code.MISS]
    assert writer.stat(names) == [Code.OK] * 30  # what needs no memory goes on
    done_with([*answers, some])
    assert node.space.gate.used == 0


def test_a_batch_for_more_than_one_client_may_hold_is_served_in_part(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=4 * MiB, share=0.5)
    caller = node.caller()
    names = keys(12)
    for name in names:
        caller.put({name: payload(name, 64 * KiB)})
    found = caller.get([(name, 0, 64 * KiB) for name in names])
    assert found[:8] == [payload(name, 64 * KiB) for name in names[:8]]
    assert found[8:] == [Code.FAILED] * 4
    assert "ask for fewer" in caller.notes[8]
    assert caller.whole(names[11]) == payload(names[11], 64 * KiB)
    fresh = {name: bytes(64 * KiB) for name in keys(9, "fresh")}
    ticket, codes = caller.question(fresh)
    assert codes == [Code.WANTED] * 8 + [Code.FULL]
    assert node.space.gate.used == node.space.gate.per_client == 512 * KiB
    assert caller.outcomes(caller.data(ticket, bytes(512 * KiB)))[0] == [Code.OK] * 8


def test_one_record_larger_than_the_share_is_served_alone(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=1 * MiB, share=0.1)
    caller = node.caller()
    data = payload("large", 900 * KiB)
    assert caller.put({key("large"): data}) == [Code.OK]
    assert caller.whole(key("large")) == data
    assert node.space.gate.used == 0


def test_bytes_that_nobody_wants_take_no_memory(opened: Callable[..., Node]) -> None:
    """A put that brings along much that is there already would have to be received somewhere."""
    node = opened(nbytes=16 * MiB)
    caller = node.caller()
    a, b = keys(2)
    caller.put({a: bytes(3 * MiB)})
    codes = caller.put_at_once({a: bytes(3 * MiB), b: b"wanted"})
    assert codes == [Code.EXISTS, Code.FAILED]
    assert "ask first" in caller.notes[1]
    assert node.space.gate.used == 0
    assert caller.put({b: b"wanted"}) == [Code.OK]


# What fits into a reply.


@pytest.mark.parametrize("max_meta", [64 * KiB, 16 * MiB])
def test_replies_fit_what_the_client_takes(
    opened: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, max_meta: int
) -> None:
    node = opened(nbytes=8 * MiB)
    caller = node.caller()
    caller.peer = caller.peer._replace(max_meta=max_meta)
    names = keys(1300)
    caller.put_at_once(dict.fromkeys(names, b"x"))
    long = "\udcff" + "ä" * 10_000
    error = TransientError(long)
    monkeypatch.setattr(node.space.backend, "stat", lambda keys, *, deadline: [Outcome.failed(error)] * len(keys))
    answer = caller.ask(Op.STAT, pack_keys(names))
    assert len(answer.meta) <= 64 * KiB
    codes, _ = caller.outcomes(answer)
    assert codes == [Code.FAILED] * 1300
    assert caller.notes[0].startswith("?ää")
    assert 5 < len(caller.notes) < 20
    page = caller.ask(Op.LIST, pack_list(0, 4096))
    assert len(page.meta) <= max_meta
    assert len(caller.list_all(4096)) == 1300
    monkeypatch.setattr(node.space.backend, "stat", lambda keys, *, deadline: fail(error))
    whole = caller.ask(Op.STAT, pack_keys(names))
    assert whole.status == Status.BUSY
    assert len(whole.meta) < 10_000


def fail(error: Exception) -> list[Outcome]:
    raise error


# What makes no sense.


@pytest.mark.parametrize("op", [*Op, 0, 99, 255])
def test_random_bytes_are_refused(opened: Callable[..., Node], op: int) -> None:
    node = opened()
    caller = node.caller()
    rng = random.Random(op)
    for _ in range(200):
        answer = caller.ask(op, rng.randbytes(rng.choice([1, 3, 7, 13, 37, 100])))
        assert answer.status == (Status.OK if op == Op.INFO else Status.BAD)


def test_lengths_beyond_all_limits_cost_nothing(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    for count in (MAX_ITEMS + 1, (1 << 32) - 1):
        meta = struct.pack("<I", count) + bytes(32)
        assert caller.ask(Op.STAT, meta).status == Status.BAD
        assert caller.ask(Op.GET, meta).status == Status.BAD
        assert caller.ask(Op.PUT, meta).status == Status.BAD
    caller.put({a: b"data"})
    huge = (1 << 64) - 1
    assert caller.get([(a, huge, huge), (a, 0, huge), (a, huge, 0)]) == [b"", b"data", b""]
    answer = caller.ask(Op.PUT, pack_put([key("b"), key("c")], [huge, huge], [None, None]))
    codes, _, _ = unpack_outcomes(answer.meta[8:])
    assert codes == [Code.TOO_LARGE] * 2
    assert caller.ask(Op.LIST, pack_list(12345, 10)).status == Status.BAD
    assert caller.list_page(0, (1 << 32) - 1).keys == [a]
    assert node.stats()["in_use"] == 64


def test_more_than_the_client_takes_is_refused(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    caller.put({key("a"): bytes(2000)})
    caller.peer = caller.peer._replace(max_body=1999)
    assert caller.get_answer([(key("a"), 0, 2000)]).status == Status.BAD
    assert node.space.gate.used == 0


def test_what_came_too_late_is_not_done(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    (a,) = keys(1)
    caller.put({a: b"data"})
    for op in Op:
        assert caller.ask(op, pack_keys([a]), deadline=time.monotonic()).status == Status.LATE
    assert caller.stat([a]) == [Code.OK]
    assert node.stats()["late"] == len(Op)


def test_a_node_that_stops_says_so(opened: Callable[..., Node]) -> None:
    node = opened()
    caller = node.caller()
    ticket, _ = caller.question({key("a"): b"data"})
    node.service.stop()
    assert caller.data(ticket, b"data").status == Status.CLOSED
    assert caller.ask(Op.INFO, b"").status == Status.CLOSED


# Namespaces.


def test_nothing_crosses_between_namespaces(opened: Callable[..., Node]) -> None:
    node = opened(Namespace("a", b"t", memory_bytes=64 * KiB), Namespace("b", b"t", memory_bytes=64 * KiB))
    a, b = node.caller(namespace="a"), node.caller(namespace="b")
    (name,) = keys(1)
    assert a.put({name: b"of a"}) == [Code.OK]
    assert b.stat([name]) == [Code.MISS]
    assert b.whole(name) == Code.MISS
    assert b.list_all() == {}
    assert b.about(Op.DELETE, [name]) == [Code.MISS]
    assert b.about(Op.QUARANTINE, [name]) == [Code.MISS]
    assert b.put({name: b"of b"}) == [Code.OK]
    assert (a.whole(name), b.whole(name)) == (b"of a", b"of b")
    for each in keys(200, "flood"):
        b.put({each: bytes(KiB)})
    assert node.stats("b")["evicted"] > 100
    assert a.whole(name) == b"of a"
    assert node.stats("a")["evicted"] == 0
    ticket, _ = a.question({key("x"): b"x"})
    assert b.data(ticket, b"x").status == Status.LATE
    assert node.caller(namespace="c").ask(Op.INFO, b"").status == Status.BAD


def test_a_tenant_who_holds_all_he_may_stops_no_other(opened: Callable[..., Node]) -> None:
    node = opened(Namespace("a", b"t", memory_bytes=MiB), Namespace("b", b"t", memory_bytes=MiB))
    a, b = node.caller(namespace="a"), node.caller(namespace="b")
    a.question({key("x"): bytes(500 * KiB)})
    with impatient():
        refused = node.caller("a2", "a").ask(Op.PUT, pack_put([key("w")], [100 * KiB], [None]))
    assert refused.status == Status.BUSY
    assert b.put({key("y"): bytes(400 * KiB)}) == [Code.OK]


def test_memory_is_shared_out() -> None:
    a, b, c = Namespace("a", memory_bytes=600), Namespace("b"), Namespace("c")
    assert share_memory([a, b, c], 1000) == [600, 200, 200]
    assert share_memory([a], 1000) == [600]
    with pytest.raises(ConfigError, match="too little for namespace 'b'"):
        share_memory([a, b], 620)
    with pytest.raises(ConfigError, match="1200"):
        share_memory([a, a], 1000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "x" * 300}, "256 bytes"),
        ({"name": "a\nb"}, "printable"),
        ({"ttl": 0.0}, "more than 0"),
        ({"ttl_from": "never"}, "use or put"),
        ({"memory_bytes": -1}, "-1"),
        ({"disk": "file:///x", "policy": "none"}, "policy=none"),
    ],
)
def test_namespaces_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Namespace(**fields)


def test_a_token_is_never_shown() -> None:
    assert "hunter2" not in repr(Namespace("a", b"hunter2"))
