"""The service of a node, without a transport: limits, namespaces, and requests that make no sense."""

from __future__ import annotations

import math
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore_backends._node_gate import Gate
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

from .node_server_support import KiB, MiB, Node, impatient, in_thread, key, keys, payload, soon


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
    node = opened(nbytes=1 * MiB, share=0.5, credits_bytes=200 * KiB)
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
    for answer in stopped:
        assert answer.done is not None
        answer.done()
    assert waiting() == payload(key(("more", 19)), 64 * KiB)


def test_many_stopped_readers_hold_no_more_than_their_share(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=1 * MiB, share=0.5)
    names = keys(15)
    writer = node.caller("writer")
    for name in names:
        writer.put({name: payload(name, 64 * KiB)})
    readers = [node.caller(i) for i in range(15)]
    with impatient():
        answers = [reader.get_answer([(name, 0, 1)]) for reader, name in zip(readers, names, strict=True)]
        refused = writer.ask(Op.PUT, pack_put([key("y")], [64 * KiB], [None]))
    assert [answer.status for answer in answers] == [Status.OK] * 8 + [Status.BUSY] * 7
    assert refused.status == Status.BUSY
    assert writer.stat(names) == [Code.OK] * 15  # what needs no memory goes on
    for answer in answers[:8]:
        assert answer.done is not None
        answer.done()
    assert writer.put({key("y"): bytes(64 * KiB)}) == [Code.OK]


def test_a_request_for_more_than_may_be_held_is_served_in_part(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=1 * MiB, share=0.5)
    caller = node.caller()
    names = keys(12)
    for name in names:
        caller.put({name: payload(name, 64 * KiB)})
    found = caller.get([(name, 0, 64 * KiB) for name in names])
    assert found[:8] == [payload(name, 64 * KiB) for name in names[:8]]
    assert found[8:] == [Code.FAILED] * 4
    assert "ask for fewer" in caller.notes[8]
    assert caller.whole(names[11]) == payload(names[11], 64 * KiB)


def test_one_record_larger_than_the_share_is_served_alone(opened: Callable[..., Node]) -> None:
    node = opened(nbytes=1 * MiB, share=0.1)
    caller = node.caller()
    data = payload("large", 900 * KiB)
    assert caller.put({key("large"): data}) == [Code.OK]
    assert caller.whole(key("large")) == data
    assert node.space.gate.used == 0


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


# The gate itself.


def test_a_gate_serves_in_order_and_passes_over_who_is_at_his_limit() -> None:
    gate = Gate(100, 40)
    first = gate.enter(b"a", 40, 0.0)
    assert first is not None
    assert gate.enter(b"a", 1, 0.0) is None
    order: list[str] = []

    def wait(client: bytes, nbytes: int, name: str) -> Callable[[], Any]:
        before = gate.waiting

        def enter() -> Any:
            given = gate.enter(client, nbytes, soon())
            order.append(name)
            return given

        join = in_thread(enter)
        while gate.waiting == before:
            time.sleep(0)
        return join

    a = wait(b"a", 10, "a")
    b = gate.enter(b"b", 40, soon())  # passes a, who is at its limit
    assert b is not None
    c = wait(b"c", 40, "c")  # 80 of 100: does not fit, and holds up all behind
    d = wait(b"d", 10, "d")
    assert gate.enter(b"e", 1, time.monotonic() + 0.02) is None
    assert order == []
    b.leave()
    given_c, given_d = c(), d()
    assert gate.used == 90
    first.leave()
    given_a = a()
    for each in (given_a, given_c, given_d):
        each.leave()
        each.leave()  # nothing
    assert (gate.used, gate.waiting) == (0, 0)


def test_a_gate_lets_the_oversized_run_alone() -> None:
    gate = Gate(100, 40)
    large = gate.enter(b"a", 1000, 0.0)
    assert large is not None
    assert gate.enter(b"b", 1, 0.0) is None
    large.leave()
    small = gate.enter(b"b", 1, 0.0)
    assert small is not None
    assert gate.enter(b"a", 1000, 0.0) is None
    small.leave()


def test_who_gives_up_is_in_nobodys_way() -> None:
    gate = Gate(100, 100)
    first = gate.enter(b"a", 60, 0.0)
    assert first is not None
    gone = threading.Event()

    def wait() -> Any:
        try:
            return gate.enter(b"b", 100, time.monotonic() + 0.3)
        finally:
            gone.set()

    large = in_thread(wait)
    while not (gate.waiting or gone.is_set()):
        time.sleep(0)
    small = gate.enter(b"c", 10, soon())  # waits behind the large one until that gives up
    assert small is not None
    assert large() is None
    first.leave()
    small.leave()


def test_a_closed_gate_sends_everybody_away() -> None:
    gate = Gate(10, 10)
    first = gate.enter(b"a", 10, 0.0)
    assert first is not None
    waiting = in_thread(lambda: gate.enter(b"b", 10, math.inf))
    while not gate.waiting:
        time.sleep(0)
    gate.close()
    assert waiting() is None
    assert gate.enter(b"c", 1, soon()) is None
    first.leave()
    assert gate.used == 0
