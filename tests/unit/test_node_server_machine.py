"""Any order of promised, committed and abandoned puts, reads from below, deletes, quarantines, evictions and writes to
the disk of a node: what was removed does not come back, what is there is found, nobody waits for a stopped writer, and
the books add up.

Reads from below, writes to the disk and removals that wait for one stop in the middle until a later step lets them go
on, each in a thread of its own; all else happens in between.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvstore_backends._node_service as service_module
from kvstore.backend import Outcome, Read, Write
from kvstore.keys import Key
from kvstore_backends._memory_reservation import span
from kvstore_backends._node_space import Namespace
from kvstore_backends.node.protocol import Code, Op

from .node_server_support import Caller, KiB, Node, in_thread, keys, payload

_KEYS = keys(2)
_ANY = st.sampled_from(_KEYS)
_WHICH = st.integers(0, 5)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0)


class Pending:
    """What stopped in the middle.

    Attributes:
        before: what of the key was removed, or put, before it began.
    """

    def __init__(self, name: Key, join: Callable[[], Any], before: set[bytes], done: threading.Event) -> None:
        self.name = name
        self.join = join
        self.before = before
        self.done = done


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(service_module, "_PATIENCE_S", 0.0)
        self.folder = tempfile.mkdtemp(prefix="kvstore-machine-")
        self.node = Node(Namespace(disk=f"file://{self.folder}/kv"), nbytes=64 * KiB)
        self.store = self.node.space.store
        assert self.node.space.below is not None
        self.disk = self.node.space.below
        self.backend = self.disk.backend
        self.read_below, self.write_below = self.backend.get_into, self.backend.put
        self.patch.setattr(self.backend, "get_into", self.get_into)
        self.patch.setattr(self.backend, "put", self.put)
        self.gates: dict[int, tuple[threading.Event, threading.Event]] = {}  # by thread: begun, may go on
        self.writes, self.written = threading.Semaphore(0), 0
        self.free = False
        self.reader = self.node.caller("reader")
        self.tickets: list[tuple[Caller, int, Key, bytes]] = []
        self.loads: list[tuple[Pending, threading.Event]] = []
        self.removals: list[Pending] = []
        self.made = 0
        self.committed: dict[Key, set[bytes]] = {name: set() for name in _KEYS}
        self.dead: dict[Key, set[bytes]] = {name: set() for name in _KEYS}
        self.certain: dict[Key, bytes] = {}  # must be found

    # The disk, which stops.

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = self.read_below(reads, deadline=deadline)
        begun, go = self.gates.get(threading.get_ident(), (None, None))
        if begun is not None and go is not None and reads:
            begun.set()
            assert go.wait(60)
        return outcomes

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        if not self.free:
            assert self.writes.acquire(timeout=60)
        return self.write_below(writes, deadline=deadline)

    def being_written(self, name: Key) -> bool:
        """Whether the thread of the disk has it, or will in an instant."""
        backlog = self.disk.backlog
        until(lambda: backlog._writing or not backlog._waiting)
        return name in backlog._writing

    # Writing.

    @rule(name=_ANY, nbytes=st.sampled_from([1, 64, 1000]))
    def question(self, name: Key, nbytes: int) -> None:
        if len(self.tickets) == 4:
            return
        self.made += 1
        data = payload(self.made, nbytes) + b"%d" % self.made
        caller = self.node.caller(("writer", self.made))
        ticket, (code,) = caller.question({name: data})
        if code == Code.WANTED:
            assert name not in self.certain
            self.tickets.append((caller, ticket, name, data))
        else:
            assert code == Code.EXISTS

    @precondition(lambda self: self.tickets)
    @rule(which=_WHICH)
    def commit(self, which: int) -> None:
        caller, ticket, name, data = self.tickets.pop(which % len(self.tickets))
        ((code,), _) = caller.outcomes(caller.data(ticket, data))
        assert code in (Code.OK, Code.EXISTS)
        if code == Code.OK:
            self.committed[name].add(data)
            if not any(removal.name == name for removal in self.removals):
                self.certain[name] = data

    @rule(name=_ANY, rivals=st.integers(0, 2))
    def store_below(self, name: Key, rivals: int) -> None:
        """What takes many steps otherwise: a record that lies on the disk only, with writers of it who have stopped."""
        for _ in range(rivals):
            self.question(name, 64)
        self.question(name, 100)
        if self.tickets and self.tickets[-1][2] == name:
            self.commit(len(self.tickets) - 1)
            while self.being_written(name):
                self.write_a_batch()
        self.evict(name)

    @precondition(lambda self: self.tickets)
    @rule(which=_WHICH)
    def abandon(self, which: int) -> None:
        self.tickets.pop(which % len(self.tickets))[0].end()

    @rule()
    def write_a_batch(self) -> None:
        backlog = self.disk.backlog
        until(lambda: backlog._writing or not backlog._waiting)
        if not backlog._writing:
            return
        batch = backlog._writing
        self.writes.release()
        until(lambda: backlog._writing is not batch)
        for removal in [each for each in self.removals if each.name in batch]:
            self.removed(removal)

    # Removing.

    @rule(name=_ANY, operation=st.sampled_from([Op.DELETE, Op.QUARANTINE]))
    def remove(self, name: Key, operation: Op) -> None:
        before = set(self.committed[name])
        caller = self.node.caller(("remover", self.made))
        self.certain.pop(name, None)
        if self.being_written(name):
            join = in_thread(lambda: caller.about(operation, [name]))
            until(lambda: self.disk.backlog.is_held(name))
            self.removals.append(Pending(name, join, before, threading.Event()))
            return
        (code,) = caller.about(operation, [name])
        self.judge(name, operation, code, before)

    def judge(self, name: Key, operation: Op, code: Code, before: set[bytes]) -> None:
        assert code in (Code.OK, Code.MISS)
        if operation == Op.DELETE or code == Code.OK:
            self.dead[name] |= before

    def removed(self, removal: Pending) -> None:
        self.removals.remove(removal)
        (code,) = removal.join()
        self.judge(removal.name, Op.QUARANTINE, code, removal.before)

    @rule(name=_ANY)
    def evict(self, name: Key) -> None:
        with self.store.lock:
            record = self.store.records.get(name)
            if record is None or record.readers:
                return
            self.store.remove_locked(name)
        (below,) = self.backend.stat([name], deadline=time.monotonic() + 60)
        if not below.ok:
            self.certain.pop(name, None)

    # Reading.

    @rule(name=_ANY)
    def read(self, name: Key) -> None:
        if name in self.disk._loading:
            return  # he would wait for that one
        self.check(name, self.reader.whole(name), self.dead[name])

    @rule(name=_ANY)
    def begin_to_read(self, name: Key) -> None:
        if len(self.loads) == 3 or name in self.disk._loading:
            return
        if name in self.certain:
            self.evict(name)
        else:
            self.store_below(name, 1)
        begun, go, done = threading.Event(), threading.Event(), threading.Event()
        caller = self.node.caller(("reader", self.made, len(self.loads)))

        def work() -> bytes | Code:
            self.gates[threading.get_ident()] = (begun, go)
            try:
                return caller.whole(name)
            finally:
                del self.gates[threading.get_ident()]
                done.set()

        before = set(self.dead[name])
        join = in_thread(work)
        until(lambda: begun.is_set() or done.is_set())
        self.loads.append((Pending(name, join, before, done), go))

    @precondition(lambda self: self.loads)
    @rule(which=_WHICH)
    def read_on(self, which: int) -> None:
        pending, go = self.loads.pop(which % len(self.loads))
        go.set()
        found = pending.join()
        if found != Code.MISS:
            assert found in self.committed[pending.name] - pending.before

    def check(self, name: Key, found: bytes | Code, dead: set[bytes]) -> None:
        if name in self.certain:
            assert found == self.certain[name]
        elif found != Code.MISS:
            assert found in self.committed[name] - dead

    # The books.

    @invariant()
    def the_books_add_up(self) -> None:
        store = self.store
        with store.lock:
            assert {name for name in _KEYS if name in store.policy} == store.records.keys() | store.pending.keys()
            records = {*store.records.values(), *(each.record for each in [*self.disk.backlog._waiting.values()])}
            held = sum(span(record.found.nbytes) for record in records)
        promised = sum(span(len(data)) for _, _, _, data in self.tickets)
        assert held + promised <= store.pool.stats().in_use
        if not (self.loads or self.removals or self.disk.backlog._writing):
            assert held + promised == store.pool.stats().in_use

    def teardown(self) -> None:
        self.free = True
        self.writes.release(1000)
        try:
            for pending, go in self.loads:
                go.set()
                pending.join()
            for removal in [*self.removals]:
                self.removed(removal)
            assert self.disk.settle(60)
            assert self.disk.counts()["backlog"] == 0
            for name in _KEYS:
                self.check(name, self.reader.whole(name), self.dead[name])
        finally:
            self.node.close()
            self.patch.undo()
            shutil.rmtree(self.folder)


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
