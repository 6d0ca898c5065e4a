"""The mooncake backend over a real Mooncake Store, whose processes are stopped and killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backend import NO_DEADLINE, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import TransientError
from kvstore.keys import opaque_key
from kvstore.testing.suite import payload
from kvstore_backends._mooncake_reads import HEADER_BYTES
from kvstore_backends.mooncake import MooncakeBackend, Settings
from tests.servers.mooncake import MISSING, Mooncake, mooncake_folder

pytestmark = pytest.mark.leaves("Mooncake's library keeps sockets and event loops for the life of the process")

KEY = opaque_key("record")
LIMIT_S = 60.0


def opened(server: Mooncake, **options: Any) -> MooncakeBackend:
    return MooncakeBackend(Settings(("127.0.0.1", server.port), **{"staging": 8 << 20, "lanes": 2, **options}))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Mooncake]:
    """A store of this test alone, for it is harmed."""
    if mooncake_folder() is None:
        pytest.skip(MISSING)
    with Mooncake(tmp_path, segment=256 << 20) as server:
        yield server


@pytest.fixture
def harmed(own: Mooncake) -> Iterator[tuple[Mooncake, MooncakeBackend]]:
    backend = opened(own)
    yield own, backend
    backend.close()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def test_records_larger_than_the_staging_memory(mooncake: Mooncake) -> None:
    """Registered or not, in pieces or whole, they come back as they went."""
    backend = opened(mooncake, prefix="large/", staging=1 << 20, force_delete=True)
    data = payload(20_000_003)
    with BufferPool(32 << 20) as pool, pool.acquire(len(data)) as source, pool.acquire(10_000_000) as piece:
        backend.register(pool.slabs[0])
        source.view[:] = data
        for key, views in (
            (opaque_key("registered"), [source.view]),
            (opaque_key("not"), [memoryview(data)]),
            (opaque_key("both"), [memoryview(data)[:7_000_001], source.view[7_000_001:]]),
        ):
            assert backend.put([Write(key, views)], deadline=soon()) == [Outcome(Status.OK, len(data))]
            memory = bytearray(len(data) + 1)
            reads = [Read(key, memoryview(memory)), Read(key, piece.view, 5_000_000)]
            whole, part = backend.get_into(reads, deadline=soon())
            assert whole == (Status.OK, len(data), None)
            assert part == (Status.OK, 10_000_000, None)
            assert memory[:-1] == data
            assert piece.view == data[5_000_000:15_000_000]
            assert backend.delete([key], deadline=soon())[0].ok
        backend.close()


def test_another_member_sees_the_same_records_at_once(mooncake: Mooncake) -> None:
    """Two clients of Mooncake, as in two processes, and not two backends that share one."""
    a, b = opened(mooncake, prefix="members/"), opened(mooncake, prefix="members/", local_buffer=1 << 20)
    try:
        keys = [opaque_key(f"member {index}") for index in range(20)]
        outcomes: dict[str, list[Outcome]] = {}
        barrier = threading.Barrier(2)

        def put(name: str, backend: MooncakeBackend) -> None:
            writes = [Write(key, [memoryview(name.encode() * 50_000)]) for key in keys]
            barrier.wait(LIMIT_S)
            outcomes[name] = backend.put(writes, deadline=soon())

        threads = [threading.Thread(target=put, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        for index, key in enumerate(keys):
            mine, other = outcomes["a"][index], outcomes["b"][index]
            assert {mine.status, other.status} == {Status.OK, Status.EXISTS}
            for backend in (a, b):
                memory = bytearray(50_000)
                assert backend.get_into([Read(key, memoryview(memory))], deadline=soon())[0].ok
                assert memory == (b"a" if mine.ok else b"b") * 50_000
    finally:
        a.close()
        b.close()


def test_a_whole_store_over_it(mooncake: Mooncake) -> None:
    """Records are verified; one that is damaged is a miss, and the next put heals it."""
    records = {f"record {index}": payload(100_000, index) for index in range(8)}
    raw = mooncake.client()
    with kvstore.open_store(f"mooncake://{mooncake.address}/store?staging=8MiB&lanes=2") as store:
        assert all(outcome.stored for outcome in store.put_many(records))
        memories = {name: bytearray(100_000) for name in records}
        assert store.get_many([*records], into=list(memories.values())) == [100_000] * 8
        assert memories == records
        name = "store/" + opaque_key("record 3").hex()
        whole = bytearray(raw.get(name))
        whole[HEADER_BYTES + 50_000] ^= 1
        raw.remove(name, True)
        assert raw.put(name, bytes(whole)) == 0
        assert store.get_many(["record 3"], into=[memoryview(bytearray(100_000))]) == [None]
        assert store.put_many({"record 3": records["record 3"]})[0].ok
        assert store.get_many(["record 3"], into=[memoryview(memories["record 3"])]) == [100_000]
        assert memories == records
    raw.close()


def test_delete_respects_the_lease_of_readers(mooncake: Mooncake) -> None:
    backend = opened(mooncake, prefix="lease/")
    assert backend.put([Write(KEY, [memoryview(b"data")])], deadline=soon())[0].ok
    memory = memoryview(bytearray(4))
    assert backend.get_into([Read(KEY, memory)], deadline=soon())[0].ok
    (outcome,) = backend.delete([KEY], deadline=soon(0.2))
    assert isinstance(outcome.error, TransientError)
    assert "OBJECT_HAS_LEASE" in outcome.error.message
    assert backend.get_into([Read(KEY, memory)], deadline=soon())[0].ok
    assert backend.quarantine([KEY], deadline=soon())[0].ok
    assert backend.stat([KEY], deadline=soon())[0].status is Status.MISS
    backend.close()


def test_delete_succeeds_when_the_lease_has_ended(tmp_path: Path) -> None:
    if mooncake_folder() is None:
        pytest.skip(MISSING)
    with Mooncake(tmp_path, segment=64 << 20, lease_ms=200) as server:
        backend = opened(server)
        assert backend.put([Write(KEY, [memoryview(b"data")])], deadline=soon())[0].ok
        assert backend.stat([KEY], deadline=soon())[0].ok  # a lookup gives a lease too
        assert backend.delete([KEY], deadline=soon())[0].ok
        backend.close()


@pytest.mark.parametrize("which", ["node", "master"])
def test_a_process_that_is_stopped_costs_the_deadline(harmed: tuple[Mooncake, MooncakeBackend], which: str) -> None:
    """SIGSTOP: calls end by their deadlines, nothing late lands in the caller's memory, and all is as before when it
    goes on."""
    server, backend = harmed
    data = payload(4_000_000)
    assert backend.put([Write(KEY, [memoryview(data)])], deadline=soon())[0].ok
    process = getattr(server, which)
    process.send_signal(signal.SIGSTOP)
    try:
        memory = bytearray(b"\xa5" * len(data))
        begin = time.monotonic()
        (read,) = backend.get_into([Read(KEY, memoryview(memory))], deadline=begin + 0.3)
        (write,) = backend.put([Write(opaque_key("new"), [memoryview(data)])], deadline=soon(0.3))
        assert isinstance(read.error, TransientError)
        assert isinstance(write.error, TransientError)
        assert backend._pool.stats().in_use or which == "master"
        memory[:] = b"\xa5" * len(data)
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: not backend._pool.stats().in_use)
    assert memory == b"\xa5" * len(data)
    until(lambda: backend.get_into([Read(KEY, memoryview(memory))], deadline=soon())[0].ok)
    assert memory == data
    until(lambda: backend.put([Write(opaque_key("new"), [memoryview(data)])], deadline=soon())[0].stored)
    memory[:] = bytes(len(data))
    assert backend.get_into([Read(opaque_key("new"), memoryview(memory))], deadline=soon())[0].ok
    assert memory == data, "a put that was given up left other bytes"


def test_processes_that_are_killed_and_come_back(harmed: tuple[Mooncake, MooncakeBackend]) -> None:
    """Without its memory a record cannot be had, and is never wrong; without the master nothing can. Both come back on
    the same port, and the client finds them by itself."""
    server, backend = harmed
    data = payload(100_000)
    assert backend.put([Write(KEY, [memoryview(data)])], deadline=soon())[0].ok
    for kill in (server.kill_node, server.kill_master):
        kill()
        begin = time.monotonic()
        (outcome,) = backend.get_into([Read(KEY, memoryview(bytearray(100_000)))], deadline=begin + 2)
        assert outcome.status is Status.MISS or isinstance(outcome.error, TransientError)
    server.start_master()
    server.start_node()
    until(lambda: backend.put([Write(KEY, [memoryview(data)])], deadline=soon())[0].stored)
    memory = bytearray(len(data))
    assert backend.get_into([Read(KEY, memoryview(memory))], deadline=NO_DEADLINE)[0].ok
    assert memory == data
