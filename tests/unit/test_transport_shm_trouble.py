"""Shared memory whose peer lies, stalls, closes or forks; both sides in this process."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_transport import _shm_places, shm
from kvstore_transport._shm_memory import Attachment
from kvstore_transport._shm_places import INLINE, Place, pack_places, pack_slabs
from kvstore_transport.control import Control
from kvstore_transport.errors import (
    ConnectionLost,
    DeadlinePassed,
    ProtocolError,
    TransportClosed,
    TransportUnavailable,
)
from kvstore_transport.frames import Header, Kind
from kvstore_transport.seam import Limits
from kvstore_transport.shm import SharedWay
from tests.unit.shm_support import MIB, RANDOM, Done, ends, lease, no_memory_left_behind, private, slab

__all__ = ["no_memory_left_behind"]  # fixtures


# --- the peer lies ---------------------------------------------------------------------------------------------------


LIES: dict[str, bytes] = {
    "nothing": b"",
    "no letter of ours": b"X" + bytes(20),
    "half a place": pack_places([Place(0, 0, 100_000)])[:-1],
    "no place at all": b"B",
    "an unknown slab": pack_places([Place(1, 0, 100_000)]),
    "behind the end": pack_places([Place(0, MIB - 99_999, 100_000)]),
    "beyond 2^64": pack_places([Place(0, (1 << 64) - 1, 100_000)]),
    "wholly outside": pack_places([Place(0, 1 << 40, 100_000)]),
    "an empty place": pack_places([Place(0, 0, 100_000), Place(0, 0, 0)]),
    "too little": pack_places([Place(0, 0, 99_999)]),
    "too much": pack_places([Place(0, 0, 100_001)]),
    "a sum beyond 2^64": pack_places([Place(INLINE, 0, (1 << 64) - 1), Place(0, 0, 100_001)]),
    "an offset of bytes that are sent": pack_places([Place(INLINE, 1, 100_000)]),
    "no slab": b"A",
    "half a slab": b"A" + bytes(7),
    "too many slabs at a time": pack_slabs([4096] * 65),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_places(lie: str) -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        both.move([memory.view[:50_000]], [private(50_000)])  # slab 0 is known now
        both.grant(LIES[lie], number=2)
        into = private(100_000, 0xA5)
        with pytest.raises(ProtocolError):
            both.receive([into], number=2, deadline=time.monotonic() + 30)
        assert into == b"\xa5" * 100_000
        assert both.a_control.peer_gone()


def test_lies_about_leases() -> None:
    for place in (
        b"",
        *LIES.values(),
        pack_places([Place(INLINE, 0, 100_000)]),
        pack_places([Place(0, 0, 50_000)] * 2),
    ):
        with ends() as both, slab(MIB) as memory:
            both.a.register(memory.view, memory.fd)
            both.move([memory.view[:50_000]], [private(50_000)])
            with pytest.raises(ProtocolError):
                both.b.take(place, 100_000, number=2, deadline=math.inf)
            assert both.a_control.peer_gone()


def test_too_many_slabs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shm_places, "MAX_SLABS", 3)
    with ends() as both, slab(4096) as memory:
        assert memory.fd is not None
        for count in (2, 2):
            both.grant(pack_slabs([4096] * count))
            both.a_control.send_fds([memory.fd] * count, deadline=math.inf)
        with pytest.raises(ProtocolError, match="2 slabs"):
            both.receive([private(10)])


def sealed(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def huge() -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(fd, 2 * MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED | 0x10)
    return fd


FALSE: dict[str, Callable[[], int]] = {
    "a device": lambda: os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC),
    "a file": lambda: os.open(__file__, os.O_RDONLY | os.O_CLOEXEC),
    "a file that could shrink": lambda: sealed(2 * MIB, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE),
    "one that could grow": lambda: sealed(2 * MIB, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
    "one that we could write to": lambda: sealed(2 * MIB, FIXED),
    "one of another size": lambda: sealed(2 * MIB - 1, FIXED | fcntl.F_SEAL_WRITE),
    "an empty one": lambda: sealed(0, FIXED | fcntl.F_SEAL_WRITE),
    "huge pages that may not be there": huge,
}


@pytest.mark.parametrize("what", FALSE)
@pytest.mark.parametrize("first", [0, 1])
def test_memory_that_could_hurt_us_is_refused(what: str, first: int) -> None:
    try:
        fd = FALSE[what]()
    except OSError as error:  # no such pages in this kernel
        pytest.skip(str(error))
    with ends() as both, slab(2 * MIB) as good:
        assert good.fd is not None
        both.grant(pack_slabs([2 * MIB] * 2))
        both.a_control.send_fds([fd, good.fd][:: 1 if first else -1], deadline=math.inf)
        with pytest.raises(ProtocolError, match="the peer passed"):
            both.receive([private(10)])
        os.close(fd)
        assert both.a_control.peer_gone()


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_descriptors_than_announced(count: int) -> None:
    with ends() as both, slab(4096) as memory:
        assert memory.fd is not None
        both.grant(pack_slabs([4096] * 2))
        both.a_control.send_fds([memory.fd] * count, deadline=math.inf)
        with pytest.raises(ProtocolError):
            both.receive([private(10)])


@pytest.mark.parametrize("kind", [Kind.RELEASE, Kind.GRANT, Kind.REQUEST])
def test_frames_out_of_turn(kind: Kind) -> None:
    with ends() as both, slab(MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view], number=3)
        both.b_control.send_frame(Header(kind, number=4), b"", deadline=math.inf)
        with pytest.raises(ProtocolError, match="out of turn"):
            sending.result(30)
        assert both.b_control.peer_gone()


# --- time, and ends --------------------------------------------------------------------------------------------------


def test_nobody_releases() -> None:
    for limits, deadline, error in (({}, 0.1, DeadlinePassed), ({"stall_s": 0.1}, math.inf, ConnectionLost)):
        with ends(**limits) as both, slab(MIB) as memory:
            both.a.register(memory.view, memory.fd)
            begin = time.monotonic()
            with pytest.raises(error):
                both.a.send([memory.view], MIB, number=1, deadline=begin + deadline)
            assert time.monotonic() - begin >= 0.1
            assert both.b_control.peer_gone()  # before `send` came back


def test_nobody_says_where() -> None:
    for limits, deadline, error in (({}, 0.1, DeadlinePassed), ({"stall_s": 0.1}, math.inf, ConnectionLost)):
        with ends(**limits) as both, pytest.raises(error):
            both.receive([private(10)], deadline=time.monotonic() + deadline)


def test_nobody_passes_what_was_announced() -> None:
    """A peer that is stopped between GRANT and its descriptors costs the call's deadline, not its patience."""
    for limits, deadline, error in (({}, 0.1, DeadlinePassed), ({"stall_s": 0.1}, math.inf, ConnectionLost)):
        with ends(**limits) as both:
            both.grant(pack_slabs([4096]))
            with pytest.raises(error):
                both.receive([private(10)], deadline=time.monotonic() + deadline)
            assert both.a_control.peer_gone()


class Gate:
    """Holds up the copy of the first piece of a body, in the receiver, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = Attachment.read_into

        def read_into(attachment: Any, views: Any, offset: int) -> None:
            original(attachment, views, offset)
            self.reached.set()
            assert self.go.wait(30)

        monkeypatch.setattr(Attachment, "read_into", read_into)
        monkeypatch.setattr(shm, "_COPY_BYTES", MIB)


def test_bytes_that_changed_under_the_copy_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB, RANDOM[: 4 * MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view], deadline=time.monotonic() + 2.0)
        into = private(4 * MIB)
        receiving = both.pool.submit(lambda: both.receive([into], number=1))
        assert gate.reached.wait(30)
        with pytest.raises(DeadlinePassed):
            sending.result(30)
        memory.view[:] = bytes(4 * MIB)  # its owner may
        gate.go.set()
        with pytest.raises(ConnectionLost):
            receiving.result(30)
        assert into == RANDOM[:MIB] + bytes(3 * MIB)  # torn indeed


def test_nothing_is_written_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB, RANDOM[: 4 * MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        into = private(4 * MIB)
        receiving = both.pool.submit(lambda: both.receive([into]))
        assert gate.reached.wait(30)
        aborting = threading.Thread(target=both.b.abort)
        aborting.start()
        aborting.join(0.05)
        assert aborting.is_alive()  # it waits for the piece that is under way
        gate.go.set()
        aborting.join(30)
        into[:] = b"\xa5" * len(into)
        for future in (sending, receiving):
            with pytest.raises((TransportClosed, ConnectionLost)):
                future.result(30)
        assert into == b"\xa5" * len(into)


def test_the_deadline_holds_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ends() as both, slab(4 * MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        deadline = time.monotonic() + 1.0
        receiving = both.pool.submit(lambda: both.receive([private(4 * MIB)], deadline=deadline))
        assert gate.reached.wait(30)
        with pytest.raises(TimeoutError):
            receiving.result(max(0.0, deadline - time.monotonic()) + 0.01)
        gate.go.set()
        with pytest.raises(DeadlinePassed):
            receiving.result(30)
        with pytest.raises(ConnectionLost):
            sending.result(30)


def test_the_other_side_closes() -> None:
    with ends() as both, slab(MIB) as memory:
        both.a.register(memory.view, memory.fd)
        sending = both.send([memory.view])
        both.b.abort()
        with pytest.raises(ConnectionLost):
            sending.result(30)
    with ends() as both:
        both.a.abort()
        with pytest.raises(ConnectionLost):
            both.receive([private(10)])
        with pytest.raises(TransportClosed):
            both.receive([private(10)])


# --- who, and where --------------------------------------------------------------------------------------------------


def test_facts_and_agreement() -> None:
    way = SharedWay()
    mine = way.facts(server=True)
    assert way.agree(mine, way.facts(server=False)) == ""
    others: list[dict[str, object]] = [{}, {"host": "another"}, {"host": 5}, {"host": ["x"]}]
    for theirs in others:
        assert way.agree(mine, theirs) == "not on the same host"


def test_only_over_a_unix_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        control = Control(accepted, "x")
        with pytest.raises(TransportUnavailable, match="path of a Unix socket"):
            SharedWay().open(control, server=True, mine={}, theirs={}, limits=Limits(), deadline=math.inf)
        control.close()
        client.close()


def test_a_forked_child_leaves_the_connection_alone() -> None:
    with ends() as both, slab(MIB, RANDOM[:MIB]) as memory:
        both.a.register(memory.view, memory.fd)
        done = Done()
        view = lease(both, memory.view, done)
        with shm._ATTACHMENTS._lock, both.b._state, both.a._state, both.a._order:  # as if other threads held them
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    both.b.release(1)
                    for bodies in (both.a, both.b):
                        bodies.abort()
                        bodies.close()
                        try:
                            bodies.receive([private(10)], 10, number=1, deadline=math.inf)
                        except TransportClosed:
                            code = 0
                finally:
                    os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert done.count == 0
        assert not both.b_control.peer_gone()
        into = private(MIB)
        both.move([memory.view], [into], number=2)
        assert into == view
        view.release()
