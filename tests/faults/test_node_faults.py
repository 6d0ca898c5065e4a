"""Nodes that are killed, stopped, replaced, half open, silent, of another version: with real processes and sockets.

What holds in every case: a call returns by its deadline; a record is whole or not there; nothing is written into memory
after the call that was given it has returned; and what was lost is found again without anybody's help.
"""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.backend import NO_DEADLINE, Outcome, Read, Status, Write
from kvstore.errors import KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.node import NodeBackend, NodeClient
from kvstore_transport import frames
from tests.node_support import (
    NodeProcess,
    client,
    copies,
    data,
    get,
    key,
    keys,
    member,
    pool,
    processes,
    put,
    servers,
    soon,
    statuses,
    wait_until,
)

SLACK_S = 1.5  # a busy machine may hold a thread up for so long
CANARY = 0xA5


def timed(call: Callable[[float], Any], seconds: float) -> Any:
    """The result of a call, which must be there by its deadline."""
    start = time.monotonic()
    found = call(start + seconds)
    took = time.monotonic() - start
    assert took < seconds + SLACK_S, f"{took:.2f} s instead of {seconds}"
    return found


def each_operation(backend: Any) -> dict[str, Callable[[float], Outcome]]:
    def listed(deadline: float) -> Outcome:
        try:
            list(backend.list(deadline=deadline))
        except KVStoreError as error:
            return Outcome.failed(error)
        return Outcome(Status.OK)

    return {
        "stat": lambda deadline: backend.stat([key("k")], deadline=deadline)[0],
        "get": lambda deadline: backend.get_into([Read(key("k"), memoryview(bytearray(10)))], deadline=deadline)[0],
        "put": lambda deadline: backend.put([Write(key("new"), [memoryview(b"x")])], deadline=deadline)[0],
        "large put": lambda d: backend.put([Write(key("large"), [memoryview(bytes(1 << 20))])], deadline=d)[0],
        "delete": lambda deadline: backend.delete([key("gone")], deadline=deadline)[0],
        "quarantine": lambda deadline: backend.quarantine([key("gone")], deadline=deadline)[0],
        "list": listed,
    }


class Mover:
    """Calls `work` in a thread until `stop`, and says how often it was done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None
        self.count = 0
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                self._work()
                self.count += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def wait_for(self, more: int) -> None:
        until = self.count + more
        wait_until(lambda: self.error is not None or self.count >= until, "calls go on")


# Killed and stopped, in the middle.

BIG = 48 << 20  # takes so long that a signal comes in the middle of it


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_node_that_goes_in_the_middle_of_a_get(how: str) -> None:
    """The call ends by its deadline, and nothing lands in its memory afterwards."""
    with NodeProcess(memory=128 << 20) as node, contextlib.closing(client(node.address)) as backend:
        value = data(BIG)
        assert put(backend, {key("big"): value})[0].ok
        memory = bytearray([CANARY]) * BIG
        view = memoryview(memory)
        found: list[Outcome] = []

        def read() -> None:
            found.extend(timed(lambda d: backend.get_into([Read(key("big"), view)], deadline=d), 1.0))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: memory[0] != CANARY or bool(found), "the first bytes are here")
        node.kill() if how == "kill" else node.stop()
        thread.join()
        (outcome,) = found
        if outcome.ok:  # it was quicker than the signal
            assert memory == value
        else:
            assert isinstance(outcome.error, TransientError)
        memory[:] = bytes([CANARY]) * BIG
        if how == "kill":
            node.start()
        else:
            node.go_on()
        (again, got) = get(backend, [key("big")], BIG)[0]
        assert again.status is (Status.MISS if how == "kill" else Status.OK)
        assert got == (b"" if how == "kill" else value)
        assert memory == bytes([CANARY]) * BIG


class Telling(Sequence[memoryview]):
    """Views that tell when they are taken to be sent."""

    def __init__(self, value: bytes) -> None:
        self.taken = threading.Event()
        self._parts = [memoryview(value)[at : at + (1 << 20)] for at in range(0, len(value), 1 << 20)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        self.taken.set()
        return self._parts[at]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_node_that_goes_in_the_middle_of_a_put(how: str) -> None:
    """The call ends by its deadline; the record is whole or not there; and its key is free."""
    with NodeProcess(memory=256 << 20) as node, contextlib.closing(client(node.address)) as backend:
        for turn in range(2):
            value, mine = data(BIG, turn), key(f"big {turn}")
            source = Telling(value)
            found: list[Outcome] = []

            def write(mine: Key = mine, source: Any = source, found: list[Outcome] = found) -> None:
                found.extend(timed(lambda d: backend.put([Write(mine, source)], deadline=d), 1.0))

            thread = threading.Thread(target=write)
            thread.start()
            assert source.taken.wait(30)
            time.sleep(0.002 * turn)  # not for luck: whatever the moment is, the same holds
            node.kill() if how == "kill" else node.stop()
            thread.join()
            assert found[0].stored or isinstance(found[0].error, TransientError)
            if how == "kill":
                node.start()
            else:
                node.go_on()
            (outcome, got) = get(backend, [mine], BIG)[0]
            assert got == (value if outcome.ok else b"")
            assert put(backend, {mine: value})[0].stored
            assert get(backend, [mine], BIG)[0][1] == value


@pytest.mark.parametrize("operation", [*each_operation(None)])
def test_a_node_that_hangs_costs_each_call_its_deadline(operation: str) -> None:
    with NodeProcess() as node, contextlib.closing(client(node.address)) as backend:
        assert put(backend, {key("k"): b"0123456789"})[0].ok
        call = each_operation(backend)[operation]
        node.stop()
        for _ in range(2):  # over a connection that is there, and over one that is not
            outcome = timed(call, 0.3)
            assert isinstance(outcome.error, TransientError)
        node.go_on()
        assert get(backend, [key("k")], 10)[0][1] == b"0123456789"
        assert each_operation(backend)[operation](soon()).error is None


def test_a_node_that_is_started_again_at_once_is_used_at_once() -> None:
    with NodeProcess() as node, contextlib.closing(client(node.address)) as backend:
        for turn in range(3):
            assert put(backend, {key(turn): data(1000, turn)})[0].ok
            assert get(backend, [key(turn)], 1000)[0][1] == data(1000, turn)
            node.kill()
            node.start()
            assert get(backend, [key(turn)], 1000)[0][0].status is Status.MISS


# Bad connections and bad peers.


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """A peer that accepts, and does with each connection what `serve` does; None: nothing, ever."""
    open_ones: list[socket.socket] = []
    threads: list[threading.Thread] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_ones.append(connection)
                if serve is not None:
                    thread = threading.Thread(target=run, args=(connection,))
                    threads.append(thread)
                    thread.start()

        def run(connection: socket.socket) -> None:
            assert serve is not None
            with contextlib.suppress(OSError):
                serve(connection)
                connection.shutdown(socket.SHUT_RDWR)

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for connection in open_ones:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for connection in open_ones:
                connection.close()


def test_a_peer_that_accepts_and_never_answers() -> None:
    with listener(None) as address, contextlib.closing(client(address)) as backend:
        for call in each_operation(backend).values():
            outcome = timed(call, 0.15)
            assert isinstance(outcome.error, TransientError)
        outcome = each_operation(backend)["stat"](NO_DEADLINE)  # connect_timeout holds all the same
        assert isinstance(outcome.error, TransientError)


@pytest.mark.parametrize(
    "noise",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(48),
        b"\xff" * 4096,
        frames.MAGIC + b"\xff" * 60,
        # A WELCOME whose lengths claim 2^31 bytes of meta and 2^62 of body.
        struct.pack("<4sBBHIIQQQQ", frames.MAGIC, 2, 0, 0, 0, 1 << 31, 1 << 62, 0, 0, 0),
    ],
)
def test_a_peer_that_is_something_else_or_lies_about_lengths(noise: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(noise)

    with listener(serve) as address, contextlib.closing(client(address)) as backend:
        for call in each_operation(backend).values():
            assert isinstance(timed(call, 10.0).error, TransientError)


class Relay:
    """Bytes between a client and a node, which can be held up, cut, or let into the void from one moment on."""

    def __init__(self, address: str) -> None:
        self._upstream = address
        self.silent = threading.Event()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def serve(self, connection: socket.socket) -> None:
        host, _, port = self._upstream.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as upstream:
            upstream.settimeout(None)
            self.pairs.append((connection, upstream))
            back = threading.Thread(target=self._pump, args=(upstream, connection))
            back.start()
            self._pump(connection, upstream)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                if not self.silent.is_set():  # else: as if the machine behind the cable were gone
                    sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Reset both sides."""
        for pair in self.pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RDWR)


def test_connections_that_are_half_open() -> None:
    """The peer is gone and nobody said so: a call costs its deadline, and the next one a new connection."""
    with servers(1) as (node,):
        relay = Relay(node.address)
        with listener(relay.serve) as address, contextlib.closing(client(address)) as backend:
            assert put(backend, {key("k"): b"0123456789"})[0].ok
            relay.silent.set()
            for call in each_operation(backend).values():
                assert isinstance(timed(call, 0.15).error, TransientError)
            relay.silent.clear()
            assert get(backend, [key("k")], 10)[0][1] == b"0123456789"
            assert all(call(soon()).error is None for call in each_operation(backend).values())


def test_connections_that_are_cut_while_they_lie_idle_cost_nothing() -> None:
    with servers(1) as (node,):
        relay = Relay(node.address)
        with listener(relay.serve) as address, contextlib.closing(client(address)) as backend:
            assert put(backend, {key("k"): b"0123456789"})[0].ok
            for _ in range(3):
                relay.cut()
                assert get(backend, [key("k")], 10)[0][1] == b"0123456789"


def test_another_version_of_the_protocol_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with NodeProcess() as node:
        monkeypatch.setattr("kvstore_transport.handshake.PROTOCOL_VERSION", 99)
        with contextlib.closing(client(node.address)) as backend:
            (outcome,) = backend.stat([key("k")], deadline=soon())
            assert isinstance(outcome.error, PermanentError)
            assert "version" in str(outcome.error)


def test_a_wrong_token_says_so() -> None:
    with NodeProcess(token="right") as node, contextlib.closing(client(node.address)) as backend:
        (outcome,) = backend.stat([key("k")], deadline=soon())
        assert isinstance(outcome.error, PermanentError)
        assert "token" in str(outcome.error)


# Many, and under load.


def test_two_hundred_clients() -> None:
    with NodeProcess() as node, contextlib.ExitStack() as stack:
        clients: list[NodeClient] = []
        for _ in range(200):
            clients.append(client(node.address))
            stack.callback(clients[-1].close)
        assert put(clients[0], {key("k"): data(1000)})[0].ok
        errors: list[BaseException] = []

        def work(some: Sequence[NodeClient]) -> None:
            try:
                for _ in range(2):
                    for each in some:
                        assert get(each, [key("k")], 1000)[0][1] == data(1000)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(clients[at::8],)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]


def readers_and_writers(
    backend: NodeBackend, records: dict[Key, bytes], seconds: float, count: int = 3
) -> tuple[list[Mover], dict[str, int]]:
    """Load on a pool. Every read must be right; failed reads are counted."""
    totals = {"reads": 0, "failed": 0, "misses": 0, "late": 0}
    lock = threading.Lock()
    size = len(next(iter(records.values())))

    def read(picks: random.Random) -> None:
        some = picks.sample([*records], 8)
        memory = [bytearray([CANARY]) * size for _ in some]
        reads = [Read(each, memoryview(dst)) for each, dst in zip(some, memory, strict=True)]
        start = time.monotonic()
        outcomes = backend.get_into(reads, deadline=start + seconds)
        late = time.monotonic() - start > seconds + SLACK_S
        for each, dst, outcome in zip(some, memory, outcomes, strict=True):
            if outcome.ok:
                assert outcome.nbytes == size
                assert dst == records[each], "wrong bytes"
        with lock:
            totals["reads"] += len(some)
            totals["failed"] += sum(outcome.status is Status.ERROR for outcome in outcomes)
            totals["misses"] += sum(outcome.status is Status.MISS for outcome in outcomes)
            totals["late"] += late

    def write(picks: random.Random) -> None:
        mine = key(f"more {picks.random()}")
        outcome = put(backend, {mine: data(size, "more")}, seconds=seconds)[0]
        assert outcome.stored or isinstance(outcome.error, KVStoreError)

    movers = [Mover(functools.partial(read, random.Random(number))) for number in range(count)]
    movers.append(Mover(functools.partial(write, random.Random(99))))
    return movers, totals


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_one_of_three_nodes_is_lost_under_load(how: str) -> None:
    """replicas=2: no wrong byte, no miss, no call beyond its deadline; and no failed read, if the node was killed, or,
    if it hangs, none after one deadline."""
    seconds = 4.0
    with processes(3) as nodes, contextlib.closing(pool([node.address for node in nodes], replicas=2)) as backend:
        records = {each: data(60_000, each) for each in keys(64)}
        assert statuses(put(backend, records)) == [Status.OK] * 64
        movers, totals = readers_and_writers(backend, records, seconds)
        try:
            movers[0].wait_for(60)
            nodes[1].kill() if how == "kill" else nodes[1].stop()
            wait_until(lambda: backend.metrics.value("kvstore_node_down", backend.name) == 1, "it is noticed")
            failed = totals["failed"]
            for mover in movers:
                mover.wait_for(40)
            nodes[1].start() if how == "kill" else nodes[1].go_on()
            wait_until(lambda: backend.metrics.value("kvstore_node_down", backend.name) == 0, "it is back")
            for mover in movers:
                mover.wait_for(40)
        finally:
            for mover in movers:
                mover.stop()
        assert totals["reads"] > 1000
        assert totals["misses"] == totals["late"] == 0, totals
        assert totals["failed"] == failed == 0, totals


@pytest.mark.slow
def test_nodes_join_and_leave_under_load() -> None:
    """Those that leave die at once, as machines do; and one that joins is empty."""
    with processes(4) as nodes:
        every = [node.address for node in nodes]
        with contextlib.closing(pool(every[:3], replicas=2, rebalance_grace=30.0)) as backend:
            records = {each: data(20_000, each) for each in keys(48)}
            assert statuses(put(backend, records)) == [Status.OK] * 48
            movers, totals = readers_and_writers(backend, records, 4.0)
            try:
                for turn in range(6):
                    leaving = turn % 4
                    now = [member(address) for at, address in enumerate(every) if at != leaving]
                    backend.pool.update(now)
                    for mover in movers:
                        mover.wait_for(10)
                    assert [value for _, value in get(backend, [*records], 20_000)] == [*records.values()]
                    assert backend.repairer.settled(60)
                    assert [value for _, value in get(backend, [*records], 20_000)] == [*records.values()]
                    assert backend.repairer.settled(60)
                    nodes[leaving].kill()
                    nodes[leaving].start()
            finally:
                for mover in movers:
                    mover.stop()
            assert totals["misses"] == totals["late"] == totals["failed"] == 0, totals


def test_no_replica_differs_after_all_of_that() -> None:
    """Writers of one key with different bytes, while a node comes and goes: what is there is one writer's."""
    with processes(3) as nodes:
        addresses = [node.address for node in nodes]
        with (
            contextlib.closing(pool(addresses, replicas=2, read_repair=False)) as one,
            contextlib.closing(pool(addresses, replicas=2, read_repair=False)) as two,
        ):
            numbers = {id(one): iter(range(10_000)), id(two): iter(range(10_000))}

            def write(backend: NodeBackend, tag: int) -> None:
                put(backend, {key(f"both {next(numbers[id(backend)])}"): bytes([tag]) * 50_000}, seconds=2.0)

            movers = [Mover(lambda: write(one, 1)), Mover(lambda: write(two, 2))]
            try:
                for mover in movers:
                    mover.wait_for(50)
            finally:
                for mover in movers:
                    mover.stop()
        for number in range(0, 50, 3):
            found = {value for value in copies(addresses, key(f"both {number}"), 50_000) if value is not None}
            assert len(found) == 1
