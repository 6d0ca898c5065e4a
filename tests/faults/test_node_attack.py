"""What an attack on nodes found: each of these lost records, reads or leases before.

A node that was started again with less memory, one that will not have us any more, leases up to a client's limit, and a
process without a free descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.backend import Read, Status
from kvstore.errors import PermanentError
from kvstore_backends._node_gate import Gate
from kvstore_backends.node import NodeClient
from kvstore_backends.node_server import NodeServer
from kvstore_transport import Channel, connect
from tests.node_support import client, data, get, keys, pool, put, servers, soon, statuses

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kvstore-")  # a socket's path has at most 107 bytes
    yield Path(path)
    shutil.rmtree(path)


# Started again, as something else.


def test_batches_go_on_when_a_node_has_less_memory_than_it_said() -> None:
    """It was started again so quickly that nobody asked it anew what it has: the requests are too large for it."""
    records = {each: data(400_000, each) for each in keys(12)}
    with NodeServer(memory_bytes=256 * MIB) as node, contextlib.closing(client(node.address)) as backend:
        backend.info(deadline=soon())
        address, large = node.address, backend.most_bytes
    backend = client(address)
    backend.facts = {"credits": 2 * large}
    with NodeServer(address, memory_bytes=256 * MIB, client_bytes=MIB), contextlib.closing(backend):
        assert statuses(put(backend, records)) == [Status.OK] * 12
        assert backend.most_bytes == large
        assert [value for _, value in get(backend, [*records], 400_000)] == [*records.values()]


def test_a_replica_takes_what_a_node_that_will_not_have_us_does_not() -> None:
    """One of three wants a token now (or is of another version, in the middle of an update)."""
    with servers(2) as (one, two), NodeServer(memory_bytes=64 * MIB, token=b"another") as refusing:
        addresses = [one.address, two.address, refusing.address]
        with contextlib.closing(pool(addresses, replicas=2)) as backend:
            records = {each: data(5_000, each) for each in keys(48)}
            snapshot = backend.pool.now
            first = {snapshot.owners(each)[0].member.address for each in records}
            assert refusing.address in first
            assert statuses(put(backend, records)) == [Status.OK] * 48
            assert [value for _, value in get(backend, [*records], 5_000)] == [*records.values()]
            outcomes = put(backend.pool.now.nodes[addresses.index(refusing.address)], records)  # it says why
            assert all(isinstance(outcome.error, PermanentError) for outcome in outcomes)


# Leases.


def test_leases_leave_their_holder_room_to_read_and_write(folder: Path) -> None:
    """Half of what a client may hold is leased, the rest of the keys are None, at once; and nothing that is held is
    lost by asking for more."""
    with (
        NodeServer("", unix_path=folder / "s", memory_bytes=64 * MIB, client_bytes=8 * MIB) as node,
        contextlib.closing(client(node.unix_path, transport="shm")) as backend,
    ):
        records = {each: data(MIB, each) for each in keys(12)}
        assert statuses(put(backend, records)) == [Status.OK] * 12
        start = time.monotonic()
        held = [lease for lease in backend.lease([*records], deadline=soon()) if lease is not None]
        assert 3 <= len(held) <= 4
        assert backend.lease([*records][6:], deadline=soon()) == [None] * 6
        assert [value for _, value in get(backend, [*records], MIB)] == [*records.values()]
        more = {each: data(MIB, each) for each in keys(6, "more")}
        assert statuses(put(backend, more)) == [Status.OK] * 6
        assert time.monotonic() - start < 30  # of 60: none of it waited for the leases to come back
        assert all(lease.intact for lease in held)
        assert [bytes(lease.view) for lease in held] == [*records.values()][: len(held)]
        for lease in held:
            lease.release()
        again = backend.lease([*records][6:8], deadline=soon())
        assert [lease is not None for lease in again] == [True, True]
        for each in again:
            assert each is not None
            each.release()


def test_the_gate_counts_leases_by_themselves() -> None:
    gate = Gate(4096, 1024)
    a, b = b"a", b"b"
    first = gate.lend(a, 400, 0.0)
    assert first is not None
    assert gate.lend(a, 200, 0.0) is None  # beyond the half
    assert gate.room(a) == 624
    large = gate.enter(a, 900, 0.0)  # counts as the limit beside the leases: it need not wait for them
    assert large is not None
    assert gate.enter(a, 1, 0.0) is None
    large.leave()
    first.leave()
    first.leave()
    assert (gate.room(a), gate.used) == (1024, 0)
    single = gate.lend(b, 2000, 0.0)  # one alone may be larger, and leaves half of the limit
    assert single is not None
    assert gate.lend(b, 1, 0.0) is None
    small = gate.enter(b, 512, 0.0)
    assert small is not None
    assert gate.enter(b, 1, 0.0) is None
    small.leave()
    single.leave()
    assert gate.used == 0


# No descriptor free.


def test_the_connections_that_are_there_do_while_there_is_no_descriptor() -> None:
    with servers(1) as (node,):
        opened = 0

        def dial(deadline: float) -> Channel:
            nonlocal opened
            if opened >= 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            opened += 1
            return connect(node.address, deadline=deadline, transport="tcp")

        with contextlib.closing(NodeClient(dial, name="few", lanes=8)) as backend:
            records = {each: data(100_000, each) for each in keys(8)}
            assert statuses(put(backend, records)) == [Status.OK] * 8
            wrong: list[object] = []
            start = threading.Barrier(6)

            def read() -> None:
                start.wait()
                for _ in range(20):
                    for each, value in records.items():
                        memory = bytearray(100_000)
                        (outcome,) = backend.get_into([Read(each, memoryview(memory))], deadline=soon())
                        if not outcome.ok or memory != value:
                            wrong.append(outcome)

            threads = [threading.Thread(target=read) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong
        opened = 2
        with contextlib.closing(NodeClient(dial, name="none", lanes=8)) as backend:
            (outcome,) = backend.stat(keys(1), deadline=soon(5.0))
            assert outcome.error is not None
            assert "Too many open files" in str(outcome.error)
