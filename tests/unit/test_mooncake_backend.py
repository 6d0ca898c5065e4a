"""The mooncake backend over a double of Mooncake's client: deadlines, late calls, sessions, leases, what it registers.

`tests/conformance/test_backends_mooncake.py` and `test_mooncake_server.py` run the same backend over the real thing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.backend import NO_DEADLINE, Capability, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, CorruptRecord, PermanentError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.testing.suite import payload
from kvstore_backends import mooncake
from kvstore_backends._mooncake_client import CODES, error_of
from kvstore_backends._mooncake_reads import HEADER_BYTES, new_header
from kvstore_backends.mooncake import MooncakeBackend, Settings
from tests.unit.mooncake_double import Place, double_place

Opener = Callable[..., MooncakeBackend]
LIMIT_S = 60.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Place, Opener]]:
    with double_place(monkeypatch) as both:
        yield both


class Gate:
    """Holds up calls of one name until it is opened."""

    def __init__(self, place: Place, call: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.inside = self.left = 0

        def before(name: str, _: Any) -> None:
            if name == call and not self.opened.is_set():
                self.inside += 1
                self.entered.set()
                assert self.opened.wait(LIMIT_S)
                self.left += 1

        place.before = before


def get(backend: MooncakeBackend, key: Key, nbytes: int, offset: int = 0, seconds: float = LIMIT_S) -> Outcome:
    memory = bytearray(nbytes)
    read = Read(key, memoryview(memory), offset)
    (outcome,) = backend.get_into([read], deadline=time.monotonic() + seconds)
    return outcome


def put(backend: MooncakeBackend, key: Key, data: bytes, seconds: float = LIMIT_S) -> Outcome:
    (outcome,) = backend.put([Write(key, [memoryview(data)])], deadline=time.monotonic() + seconds)
    return outcome


def until(done: Callable[[], bool]) -> None:
    """Wait for what another thread does soon."""
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def stored(place: Place, backend: MooncakeBackend, key: Key, data: bytes) -> str:
    name = backend.settings.prefix + key.hex()
    place.objects[name] = bytearray(new_header(len(data)) + data)
    return name


KEY = opaque_key("record")


# Deadlines and late calls.


@pytest.mark.parametrize("call", ["exist", "ranges", "start", "transfer", "end", "remove"])
def test_a_call_that_hangs_costs_its_deadline_and_no_more(world: tuple[Place, Opener], call: str) -> None:
    place, open_backend = world
    backend = open_backend(force_delete=True)
    name = stored(place, backend, KEY, b"old")
    gate = Gate(place, call)
    calls: dict[str, Callable[[float], list[Outcome]]] = {
        "exist": lambda end: backend.stat([KEY], deadline=end),
        "ranges": lambda end: backend.get_into([Read(KEY, memoryview(bytearray(3)))], deadline=end),
        "start": lambda end: backend.put([Write(opaque_key("new"), [memoryview(b"new")])], deadline=end),
        "remove": lambda end: backend.delete([KEY], deadline=end),
    }
    while not gate.entered.is_set():  # a worker that comes too late does nothing
        begin = time.monotonic()
        (outcome,) = calls.get(call, calls["start"])(begin + 0.1)
        assert time.monotonic() - begin >= 0.1
        assert isinstance(outcome.error, TransientError)
    assert gate.left == 0, "the call was waited for"
    gate.opened.set()
    until(lambda: not backend._pool.stats().in_use)
    if call != "remove":
        assert name in place.objects
        assert get(backend, KEY, 3).ok


def test_a_late_read_does_not_touch_the_destination(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"\x77" * 1000)
    gate = Gate(place, "ranges")
    memory = bytearray(1000)
    read = Read(KEY, memoryview(memory))
    while not gate.entered.is_set():
        (outcome,) = backend.get_into([read], deadline=time.monotonic() + 0.05)
        assert isinstance(outcome.error, TransientError)
    assert backend._pool.stats().in_use, "the staging memory of a call under way was given back"
    memory[:] = b"\xa5" * 1000
    gate.opened.set()
    until(lambda: not backend._pool.stats().in_use)
    assert memory == b"\xa5" * 1000


def test_a_late_put_stores_nothing_and_blocks_nobody(world: tuple[Place, Opener]) -> None:
    """Its source may have changed by the time it was read: it is revoked, and the key can be put again."""
    place, open_backend = world
    backend = open_backend()
    gate = Gate(place, "transfer")
    source = bytearray(b"old" * 1000)
    write = Write(KEY, [memoryview(source)])
    while not gate.entered.is_set():
        (outcome,) = backend.put([write], deadline=time.monotonic() + 0.05)
        assert isinstance(outcome.error, TransientError)
    source[:] = b"new" * 1000
    gate.opened.set()
    until(lambda: "revoke" in place.calls and not place.reserved)
    assert place.objects == {}
    assert put(backend, KEY, b"another").ok


def test_late_calls_leave_workers_for_others_until_there_are_none(world: tuple[Place, Opener]) -> None:
    """One per lane and four more may hang; what comes then ends at its own deadline, and all go on afterwards."""
    place, open_backend = world
    backend = open_backend(lanes=2)
    stored(place, backend, KEY, b"data")
    gate = Gate(place, "ranges")
    while gate.inside < 6:  # a call whose worker came too late did not get there
        assert isinstance(get(backend, KEY, 4, seconds=0.02).error, TransientError)
    assert isinstance(backend.stat([KEY], deadline=time.monotonic() + 0.02)[0].error, TransientError)
    assert "exist" not in place.calls
    gate.opened.set()
    assert backend.stat([KEY], deadline=NO_DEADLINE) == [Outcome(Status.OK, 4)]


def test_close_ends_calls_that_hang_and_leaves_when_they_are_over(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"data")
    gate = Gate(place, "ranges")
    caught: list[BaseException] = []

    def read() -> None:
        try:
            get(backend, KEY, 4)
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert gate.entered.wait(LIMIT_S)
    backend.close()
    thread.join(LIMIT_S)
    assert len(caught) == 1
    assert place.closed == 0, "left the store while a call was under way, which crashes the process"
    assert place.registered
    gate.opened.set()
    until(lambda: place.closed == 1)
    assert not place.registered


def test_direct_reads_wait_for_what_writes_into_the_callers_memory(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend(direct_reads=True)
    data = payload(300_000)
    stored(place, backend, KEY, data)
    with BufferPool(1 << 20) as pool, pool.acquire(len(data)) as buffer:
        backend.register(pool.slabs[0])
        assert get(backend, KEY, 10).ok  # joins, and registers
        gate = Gate(place, "ranges")
        results: list[Outcome] = []
        read = Read(KEY, buffer.view)
        deadline = time.monotonic() + 2
        thread = threading.Thread(target=lambda: results.extend(backend.get_into([read], deadline=deadline)))
        thread.start()
        assert gate.entered.wait(LIMIT_S)
        thread.join(2.5)
        assert thread.is_alive(), "the call returned while its destination was being written to"
        gate.opened.set()
        thread.join(LIMIT_S)
        (outcome,) = results
        if outcome.ok:
            assert buffer.view == data
        buffer.view[:] = bytes(len(data))
        backend.close()
        assert buffer.view == bytes(len(data))


def test_direct_reads_copy_nothing(world: tuple[Place, Opener], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes for registered memory go there; those for other memory are copied."""
    place, open_backend = world
    copied: list[int] = []
    monkeypatch.setattr(mooncake, "copy_bytes", lambda dst, src: copied.append(len(src)))
    backend = open_backend(direct_reads=True)
    data = payload(300_000)
    stored(place, backend, KEY, data)
    with BufferPool(1 << 20) as pool, pool.acquire(len(data)) as buffer:
        backend.register(pool.slabs[0])
        assert get(backend, KEY, 10).ok
        assert copied == [10]
        assert backend.get_into([Read(KEY, buffer.view)], deadline=NO_DEADLINE) == [Outcome(Status.OK, len(data))]
        assert copied == [10]
        assert buffer.view == data
        backend.close()


# Joining.


def test_nobody_is_asked_before_the_first_call(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend(segment=1 << 20, protocol="rdma", device="mlx5_0", tenant="t", local_buffer=4096)
    assert place.joined == []
    assert Capability.DURABLE not in backend.capabilities, "records in this process's own segment go with it"
    assert backend.stat([KEY], deadline=NO_DEADLINE)[0].status is Status.MISS
    ((host, metadata, segment, local, protocol, device, master, more),) = place.joined
    assert (host, metadata, segment, local) == ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 4096)
    assert (protocol, device, more) == ("rdma", "mlx5_0", {"tenant_id": "t"})
    assert master == backend.name.removeprefix("mooncake://")


def test_a_master_that_is_not_there_is_a_transient_error(world: tuple[Place, Opener]) -> None:
    """Mooncake's own client is not asked then: it would freeze the process for a minute and a half."""
    place, _ = world
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        backend = MooncakeBackend(Settings(("127.0.0.1", taken.getsockname()[1])))
        outcome = get(backend, KEY, 1)
        assert isinstance(outcome.error, TransientError)
        assert "is not reached" in outcome.error.message
        assert place.joined == []
        backend.close()


def test_a_master_that_refuses_is_asked_again_after_a_second(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    place.setup_code = -1
    for _ in range(3):
        assert isinstance(get(backend, KEY, 1).error, TransientError)
    assert len(place.joined) == 1
    place.setup_code = 0
    until(lambda: get(backend, KEY, 1).status is Status.MISS)


def test_backends_that_agree_share_a_membership(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    a, b, other = open_backend(prefix="a/"), open_backend(prefix="b/"), open_backend(tenant="another")
    with BufferPool(1 << 16) as pool:
        for backend in (a, b):
            backend.register(pool.slabs[0])
            assert put(backend, KEY, b"data").ok
        assert put(other, opaque_key("other"), b"data").ok
        assert len(place.joined) == 2
        assert sorted(place.objects) == sorted([f"a/{KEY.hex()}", f"b/{KEY.hex()}", opaque_key("other").hex()])
        a.close()
        assert place.closed == 0
        assert get(b, KEY, 4).ok
        b.close()
        assert place.closed == 1


# Writing.


def test_what_is_registered_is_not_copied_and_what_is_not_is_staged(world: tuple[Place, Opener]) -> None:
    """A record of both, larger than the staging memory, with many small views: nothing else reaches Mooncake (the
    double refuses it)."""
    place, open_backend = world
    backend = open_backend(staging=1 << 20, lanes=1)
    big = payload(3_000_000)
    with BufferPool(2 << 20) as pool, pool.acquire(1 << 20) as buffer:
        backend.register(pool.slabs[0])
        buffer.view[:] = payload(1 << 20, "registered")
        views = [memoryview(b"ab"), buffer.view, memoryview(big), buffer.view[:10], memoryview(b""), memoryview(b"z")]
        writes = [Write(KEY, views), Write(opaque_key("small"), [memoryview(b"s")])]
        outcomes = backend.put(writes, deadline=NO_DEADLINE)
        whole = b"".join(views)
        assert outcomes == [Outcome(Status.OK, len(whole)), Outcome(Status.OK, 1)]
        assert place.objects[KEY.hex()][HEADER_BYTES:] == whole
        memory = bytearray(len(whole))
        assert backend.get_into([Read(KEY, memoryview(memory))], deadline=NO_DEADLINE)[0].ok
        assert memory == whole
        backend.close()


def test_memory_that_mooncake_refuses_to_register_is_staged(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    place.refuses_memory = True
    with BufferPool(1 << 20) as pool, pool.acquire(1 << 20) as buffer:
        backend.register(pool.slabs[0])
        buffer.view[:] = payload(1 << 20)
        assert backend.put([Write(KEY, [buffer.view])], deadline=NO_DEADLINE)[0].ok
        assert place.objects[KEY.hex()][HEADER_BYTES:] == buffer.view


def test_a_record_that_is_there_is_not_sent(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"old")
    assert put(backend, KEY, b"new").status is Status.EXISTS
    assert "transfer" not in place.calls


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [("start", -200, TransientError), ("start", -400, PermanentError), ("transfer", -800, TransientError),
     ("transfer", 5, TransientError), ("end", -900, TransientError)],
)  # fmt: skip
def test_a_put_that_fails_is_revoked(world: tuple[Place, Opener], call: str, code: int, kind: type[Exception]) -> None:
    place, open_backend = world
    backend = open_backend()
    place.before = lambda name, what: [code] * len(what) if name == call else None
    assert isinstance(put(backend, KEY, b"data").error, kind)
    assert place.objects == {}
    assert place.reserved == {}
    place.before = lambda name, what: None
    assert put(backend, KEY, b"data").ok


def test_a_session_that_a_lost_revocation_left_is_revoked_again(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    place.before = lambda name, what: [-900] * len(what) if name in ("transfer", "revoke") else None
    assert isinstance(put(backend, KEY, b"data").error, TransientError)
    assert place.reserved
    place.before = lambda name, what: None
    assert put(backend, KEY, b"data").ok


def test_a_record_that_another_process_is_storing_is_waited_for(world: tuple[Place, Opener]) -> None:
    """It becomes EXISTS, or ours if the other one gives up; at the deadline it is a transient error that says so."""
    place, open_backend = world
    backend = open_backend()
    place.reserved[KEY.hex()] = 3
    outcome = put(backend, KEY, b"data", seconds=0.05)
    assert isinstance(outcome.error, TransientError)
    assert "another client" in outcome.error.message

    def finish(name: str, _: Any) -> None:
        if name == "exist" and place.calls.count("exist") > 5:
            place.reserved.pop(KEY.hex(), None)

    place.before = finish
    assert put(backend, KEY, b"ours").ok
    assert place.objects[KEY.hex()][HEADER_BYTES:] == b"ours"


def test_a_source_that_is_no_bytes_fails_alone(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    write = Write(KEY, [memoryview(b"x"), memoryview(bytearray(8)).cast("I")])
    good = Write(opaque_key("good"), [memoryview(bytearray(500_000))])
    first, second = backend.put([write, good], deadline=NO_DEADLINE)
    assert isinstance(first.error, PermanentError)
    assert second.ok
    assert set(place.objects) == {opaque_key("good").hex()}
    assert place.reserved == {}


# Reading.


@pytest.mark.parametrize("data", [b"", b"short", b"\x00" * 100, b"KVMC\x02" + bytes(100)])
def test_an_object_that_is_none_of_ours_is_corrupt_and_can_be_quarantined(
    world: tuple[Place, Opener], data: bytes
) -> None:
    place, open_backend = world
    backend = open_backend()
    place.objects[KEY.hex()] = bytearray(data)
    assert isinstance(get(backend, KEY, 10).error, CorruptRecord)
    assert backend.quarantine([KEY], deadline=NO_DEADLINE)[0].ok
    assert put(backend, KEY, b"healed").ok
    assert get(backend, KEY, 6).ok


def test_parts_of_two_versions_are_no_record(world: tuple[Place, Opener]) -> None:
    """A large read comes in several calls; the record is replaced in between."""
    place, open_backend = world
    backend = open_backend(staging=1 << 20, lanes=2)
    stored(place, backend, KEY, payload(1 << 20, "one"))

    def replace(name: str, _: Any) -> None:
        if name == "ranges" and place.calls.count("ranges") == 3:
            stored(place, backend, KEY, payload(1 << 20, "two"))

    place.before = replace
    outcome = get(backend, KEY, 1 << 20)
    assert isinstance(outcome.error, TransientError)
    assert "replaced" in outcome.error.message
    assert get(backend, KEY, 1 << 20).ok


@pytest.mark.parametrize("code", [-707, -800, -900, -901, -701])
def test_a_read_that_fails_is_transient(world: tuple[Place, Opener], code: int) -> None:
    """Among others LEASE_EXPIRED: the read took longer than the master protects the object."""
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"data")
    place.before = lambda name, what: [code] if name == "ranges" else None
    outcome = get(backend, KEY, 4)
    assert isinstance(outcome.error, TransientError)
    assert str(code) in outcome.error.message


def test_an_object_that_is_not_complete_is_a_miss(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    place.before = lambda name, what: [-703] if name == "ranges" else None
    assert get(open_backend(), KEY, 4).status is Status.MISS


def test_stat_asks_for_what_the_master_does_not_describe(world: tuple[Place, Opener]) -> None:
    """It has no description, and no code either, when the call of the master fails."""
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"data")
    place.before = lambda name, what: [] if name == "desc" else None
    assert backend.stat([KEY], deadline=NO_DEADLINE) == [Outcome(Status.OK, 4)]
    place.before = lambda name, what: [-900] if name in ("desc", "size") else None
    assert isinstance(backend.stat([KEY], deadline=NO_DEADLINE)[0].error, TransientError)
    place.before = lambda name, what: [-901] if name == "exist" else None
    assert isinstance(backend.stat([KEY], deadline=NO_DEADLINE)[0].error, TransientError)


def test_what_the_client_raises_is_an_error_of_ours(world: tuple[Place, Opener]) -> None:
    place, open_backend = world

    def fail(name: str, _: Any) -> None:
        if name == "ranges":
            raise RuntimeError("pybind says no")

    place.before = fail
    outcome = get(open_backend(), KEY, 4)
    assert isinstance(outcome.error, TransientError)
    assert "pybind says no" in outcome.error.message


# Removing.


def test_delete_waits_for_leases(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    name = stored(place, backend, KEY, b"data")
    free = opaque_key("free")
    stored(place, backend, free, b"data")
    place.leased.add(name)
    leased, other = backend.delete([KEY, free], deadline=time.monotonic() + 0.1)
    assert other.ok
    assert isinstance(leased.error, TransientError)
    assert "OBJECT_HAS_LEASE" in leased.error.message
    assert name in place.objects

    def expire(call: str, _: Any) -> None:
        if call == "remove" and place.calls.count("remove") > 6:
            place.leased.clear()

    place.before = expire
    assert backend.delete([KEY], deadline=NO_DEADLINE)[0].ok
    assert place.objects == {}


def test_a_lease_is_no_hindrance_to_quarantine_nor_to_a_forced_delete(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend, forced = open_backend(), open_backend(force_delete=True)
    for remove in (backend.quarantine, forced.delete):
        place.leased.add(stored(place, backend, KEY, b"data"))
        assert get(backend, KEY, 4).ok
        assert remove([KEY], deadline=NO_DEADLINE)[0].ok
        assert place.objects == {}


def test_quarantine_leaves_what_was_never_read(world: tuple[Place, Opener]) -> None:
    place, open_backend = world
    backend = open_backend()
    stored(place, backend, KEY, b"data")
    assert backend.quarantine([KEY, KEY], deadline=NO_DEADLINE) == [Outcome(Status.MISS)] * 2
    assert get(backend, KEY, 4).ok
    assert [o.status for o in backend.quarantine([KEY, KEY], deadline=NO_DEADLINE)] == [Status.OK, Status.MISS]


# Codes.


def test_codes_are_mapped_by_one_table() -> None:
    for code, (name, transient) in CODES.items():
        error = error_of(code, backend="b", operation="get", key=KEY)
        assert isinstance(error, TransientError if transient else PermanentError)
        assert str(code) in error.message
        assert name in error.message
        assert KEY.hex() not in str(error)
    assert isinstance(error_of(-99_999, backend="b", operation="get"), PermanentError)
