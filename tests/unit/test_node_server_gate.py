"""`Gate`: who gets leave to hold how much of a node's memory, and who waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore_backends._node_gate import Gate, Pass

from .node_server_support import KiB, MiB, in_thread, soon


def wait(gate: Gate, client: bytes, nbytes: int, order: list[bytes] | None = None) -> Callable[[], Any]:
    """Enter in a thread, and return when that waits."""
    before = gate.waiting

    def enter() -> Pass | None:
        given = gate.enter(client, nbytes, soon())
        if order is not None:
            order.append(client)
        return given

    join = in_thread(enter)
    while gate.waiting == before:
        time.sleep(0)
    return join


def at_once(gate: Gate, client: bytes, nbytes: int) -> Pass:
    given = gate.enter(client, nbytes, 0.0)
    assert given is not None
    return given


def test_it_serves_in_order_and_passes_over_who_is_at_his_limit() -> None:
    gate = Gate(800, 1000)  # 700 for any, 100 for those of at most 12; 200 for each client
    first = at_once(gate, b"a", 200)
    assert gate.enter(b"a", 13, 0.0) is None
    order: list[bytes] = []
    a = wait(gate, b"a", 100, order)
    b = gate.enter(b"b", 200, soon())  # passes a, who is at its limit
    assert b is not None
    c, d = at_once(gate, b"c", 200), at_once(gate, b"d", 50)
    e = wait(gate, b"e", 100, order)  # 650 of 700: does not fit, and holds up all behind
    f = wait(gate, b"f", 50, order)
    assert gate.enter(b"g", 50, time.monotonic() + 0.02) is None
    assert order == []
    b.leave()
    given_e, given_f = e(), f()
    assert gate.used == 600
    first.leave()
    given_a = a()
    for each in (c, d, given_a, given_e, given_f):
        each.leave()
        each.leave()  # nothing
    assert (gate.used, gate.waiting) == (0, 0)


def test_one_client_gets_a_quarter_whatever_he_may() -> None:
    gate = Gate(MiB, 100 * MiB)
    assert gate.per_client == 256 * KiB
    at_once(gate, b"a", 200 * KiB)
    assert gate.enter(b"a", 57 * KiB, 0.0) is None
    at_once(gate, b"a", 56 * KiB)
    assert Gate(MiB, 100).per_client == 100
    assert Gate(1, 1).per_client == 1


def test_the_oversized_run_alone() -> None:
    gate = Gate(800, 1000)
    large = at_once(gate, b"a", 10_000)
    assert gate.enter(b"b", 20, 0.0) is None
    assert gate.enter(b"a", 1, 0.0) is None
    small = at_once(gate, b"b", 12)  # of the reserve
    large.leave()
    small.leave()
    small = at_once(gate, b"b", 20)
    assert gate.enter(b"a", 1000, 0.0) is None
    small.leave()


def test_small_ones_get_through_however_many_large_ones_stick() -> None:
    gate = Gate(800, 1000)
    for client in (b"a", b"b", b"c"):
        at_once(gate, client, 200)
    at_once(gate, b"d", 100)
    waiting = wait(gate, b"e", 200)
    small = [at_once(gate, b"e", 12) for _ in range(2)]
    assert gate.enter(b"e", 12, 0.0) is None  # his part of the reserve
    small += [at_once(gate, client, 12) for client in (b"f", b"f", b"g", b"g", b"h", b"h")]
    assert gate.enter(b"i", 12, 0.0) is None  # and that was all of it
    assert gate.used == 700 + 8 * 12
    later = wait(gate, b"i", 12)
    small.pop().leave()
    small.append(later())
    for each in small:
        each.leave()
    gate.close()
    assert waiting() is None


def test_small_ones_do_not_take_the_room_that_a_large_one_waits_for() -> None:
    gate = Gate(800, 1000)
    small = [at_once(gate, b"%d" % n, 10) for n in range(70)]  # all of what is for any
    large = wait(gate, b"large", 100)
    for each in small[:9]:
        each.leave()
    reserved = at_once(gate, b"x", 10)
    assert gate.enter(b"x", 10, 0.0) is not None
    assert gate.enter(b"x", 10, 0.0) is None  # 90 are free, and kept
    small[9].leave()
    given = large()
    assert given.nbytes == 100
    reserved.leave()


def test_what_holds_nothing_waits_for_nobody() -> None:
    gate = Gate(800, 1000)
    at_once(gate, b"a", 10_000)
    waiting = wait(gate, b"b", 100)
    at_once(gate, b"a", 0).leave()
    at_once(gate, b"b", 0).leave()
    gate.close()
    assert waiting() is None


def test_who_gives_up_is_in_nobodys_way() -> None:
    gate = Gate(800, 1000)
    first = [at_once(gate, client, 200) for client in (b"a", b"b", b"c")]
    gone = threading.Event()

    def enter() -> Any:
        try:
            return gate.enter(b"d", 200, time.monotonic() + 0.3)
        finally:
            gone.set()

    large = in_thread(enter)
    while not (gate.waiting or gone.is_set()):
        time.sleep(0)
    small = gate.enter(b"e", 50, soon())  # waits behind the large one until that gives up
    assert small is not None
    assert large() is None
    for each in (*first, small):
        each.leave()
    assert gate.used == 0


def test_a_closed_gate_sends_everybody_away() -> None:
    gate = Gate(10, 10)
    first = at_once(gate, b"a", 10)
    waiting = in_thread(lambda: gate.enter(b"b", 10, math.inf))
    while not gate.waiting:
        time.sleep(0)
    gate.close()
    assert waiting() is None
    assert gate.enter(b"c", 1, soon()) is None
    assert gate.enter(b"c", 0, soon()) is None
    first.leave()
    assert gate.used == 0


class GateMachine(RuleBasedStateMachine):
    """Any order of asking and leaving: no limit is ever passed but by one that runs alone, and all comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(800, 300)
        self.held: list[tuple[bytes, int, Pass]] = []

    @rule(client=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), nbytes=st.sampled_from([0, 1, 12, 13, 100, 200, 900]))
    def enter(self, client: bytes, nbytes: int) -> None:
        before, mine = self.gate.used, sum(n for who, n, _ in self.held if who == client)
        given = self.gate.enter(client, nbytes, 0.0)
        if given is not None:
            self.held.append((client, nbytes, given))
        elif mine + min(nbytes, 200) <= 200:  # it is not his own limit
            assert before + min(nbytes, 700) > 700 - 12

    @rule(which=st.integers(0, 30))
    def leave(self, which: int) -> None:
        if self.held:
            _, _, given = self.held.pop(which % len(self.held))
            given.leave()
            given.leave()

    @invariant()
    def limits_hold(self) -> None:
        assert self.gate.used == sum(nbytes for _, nbytes, _ in self.held)
        large = [nbytes for _, nbytes, _ in self.held if nbytes > 12]
        assert sum(large) <= 700 or len(large) == 1
        for client in {who for who, _, _ in self.held}:
            mine = [nbytes for who, nbytes, _ in self.held if who == client and nbytes]
            assert sum(mine) <= 200 or len(mine) == 1
        if not self.held:
            assert self.gate.used == 0


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
