"""The rules of `kvstore_transport.seam` that are about processes: killed, stopped, forked, restarted, idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore_transport import ConnectionLost, DeadlinePassed, TransportClosed, TransportError
from tests.transport_support import (
    ECHO,
    KILL_SELF,
    KINDS,
    MAKE,
    MIB,
    POISON,
    REMOTE,
    ROOT,
    STOP_SELF,
    WHAT,
    Kind,
    Memory,
    Remote,
    Service,
    Toy,
    context_switches,
    digest,
    params,
    pattern,
    plan_into,
    remote,
    soon,
    wait_until,
)

NBYTES = 16 * MIB  # more than sockets take in that nobody reads from
SIZE = NBYTES.to_bytes(8, "little")
PLAIN = [kind for kind in REMOTE if not kind.tls]


@pytest.fixture(scope="module", params=params(PLAIN))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if why := found.missing():
        pytest.skip(why)
    return found


@pytest.fixture
def node(kind: Kind, tmp_path: Path) -> Iterator[Remote]:
    with remote(kind, tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for all tests that leave it alive; it has gone on when they end."""
    with remote(kind, tmp_path_factory.mktemp("lasting")) as found:
        yield found


def _in_the_middle_of_a_get(node: Remote, how: str) -> None:
    """The bytes are the right ones, or the call fails by its deadline, and then no byte lands any more."""
    into = bytearray([POISON]) * NBYTES
    channel = node.connect()

    def plan(status: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        getattr(node, how)()
        return [memoryview(into)]

    began = time.monotonic()
    raised: TransportError | None = None
    try:
        channel.call(MAKE, SIZE, plan=plan, deadline=soon(60 if how == "kill" else 1.0))
    except TransportError as error:
        raised = error
    if raised is not None:
        assert isinstance(raised, ConnectionLost if how == "kill" else DeadlinePassed), raised
        assert not channel.usable
    else:
        assert node.kind.transport == "shm", "nothing else has the bytes in reach"
        assert into == pattern(NBYTES, NBYTES)
    assert time.monotonic() - began < 20
    into[:] = bytes([POISON]) * NBYTES  # the caller's again
    if how == "stop":
        node.go_on()
        with node.connect() as other:  # it is well, and has gone on with whatever it had begun
            other.call(ECHO, b"", deadline=soon())
    channel.close()
    assert into == bytearray([POISON]) * NBYTES


def test_a_peer_that_is_killed_in_the_middle_of_a_get(node: Remote) -> None:
    _in_the_middle_of_a_get(node, "kill")


def test_a_peer_that_is_stopped_in_the_middle_of_a_get(lasting: Remote) -> None:
    _in_the_middle_of_a_get(lasting, "stop")


def test_a_peer_that_stops_in_the_middle_of_a_put(lasting: Remote) -> None:
    """What it has received, if it says that it received it, is what was sent, not what came into the memory later."""
    data = bytearray(pattern(NBYTES, 1))
    expected = digest(bytes(data)).hex()

    def heard() -> list[str]:
        with lasting.connect() as other:
            return other.call(WHAT, b"", deadline=soon()).meta.decode().splitlines()

    before = len(heard())
    channel = lasting.connect()
    with pytest.raises(DeadlinePassed):
        channel.call(STOP_SELF, b"", [memoryview(data)], deadline=time.monotonic() + 1.0)
    assert not channel.usable
    data[:] = bytes([POISON]) * NBYTES
    lasting.wait_stopped()
    lasting.go_on()
    wait_until(lambda: len(heard()) > before)
    (what,) = heard()[before:]
    assert what.startswith("failed") or what == f"received {expected}"
    channel.close()


def test_a_peer_that_is_killed_in_the_middle_of_a_put(node: Remote) -> None:
    channel = node.connect()
    began = time.monotonic()
    with pytest.raises(ConnectionLost):
        channel.call(KILL_SELF, b"", [memoryview(bytes(NBYTES))], deadline=soon(60))
    assert time.monotonic() - began < 30
    assert not channel.usable
    channel.close()
    with pytest.raises(ConnectionLost):
        node.connect()


def test_a_stopped_peer_does_not_hold_up_a_connect(lasting: Remote) -> None:
    lasting.stop()
    began = time.monotonic()
    try:
        with pytest.raises(DeadlinePassed):
            lasting.connect(deadline=time.monotonic() + 0.5)
    finally:
        lasting.go_on()
    assert time.monotonic() - began < 20


def test_a_server_can_be_started_again_at_once_at_the_same_place(kind: Kind, tmp_path: Path) -> None:
    with remote(kind, tmp_path) as first:
        with ThreadPoolExecutor(4) as pool:
            channels = list(pool.map(lambda _: first.connect(), range(4)))
        into = bytearray(MIB)
        for channel in channels:
            channel.call(MAKE, MIB.to_bytes(8, "little"), plan=plan_into(memoryview(into)), deadline=soon())
        first.kill()
        place = first.address
        for channel in channels:
            with pytest.raises(ConnectionLost):
                channel.call(ECHO, b"", deadline=soon())
            channel.close()
    with remote(kind, tmp_path, listen=place) as second:
        assert second.address == place
        with second.connect() as channel:
            channel.call(MAKE, MIB.to_bytes(8, "little"), plan=plan_into(memoryview(into)), deadline=soon())
            assert into == pattern(MIB, MIB)


_VICTIM = """
import os, signal, sys
from tests.transport_support import BY_NAME, MAKE, connect_to, soon
def plan(status, meta, nbytes):
    os.kill(os.getpid(), signal.SIGKILL)
kind, address, nbytes = sys.argv[1:]
channel = connect_to(BY_NAME[kind], address)
channel.call(MAKE, int(nbytes).to_bytes(8, "little"), plan=plan, deadline=soon())
"""


def test_what_a_killed_client_was_given_comes_back_once(kind: Kind, tmp_path: Path) -> None:
    memory = Memory()
    toy = Toy(memory)
    toy.made(NBYTES)
    with Service(kind, toy, tmp_path) as service:
        assert service.server is not None
        memory.register(service.server)
        done = subprocess.run(
            [sys.executable, "-c", _VICTIM, kind.name, service.address, str(NBYTES)], cwd=ROOT, timeout=60, check=False
        )
        assert done.returncode == -signal.SIGKILL
        wait_until(lambda: toy.back == toy.given == 1)
        with service.connect() as channel:
            assert channel.call(ECHO, b"well", deadline=soon()).meta == b"well"
    assert toy.back == toy.given == 2
    memory.close()


@pytest.mark.parametrize("kind", params(KINDS))
def test_after_a_fork_the_channel_is_the_parents_alone(kind: Kind, tmp_path: Path) -> None:
    with Service(kind, Toy(), tmp_path) as service, service.connect() as channel:
        channel.call(ECHO, b"before", deadline=soon())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                assert not channel.usable
                with pytest.raises(TransportClosed, match="fork"):
                    channel.call(ECHO, b"", deadline=soon())
                channel.abort()
                channel.close()
                service.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert channel.usable
        assert channel.alive()
        assert channel.call(ECHO, b"after", deadline=soon()).meta == b"after"
        with service.connect() as another:
            assert another.call(ECHO, b"another", deadline=soon()).meta == b"another"


def test_idle_connections_wake_nobody(lasting: Remote) -> None:
    channels = [lasting.connect() for _ in range(20)]
    for channel in channels:
        channel.call(ECHO, b"", deadline=soon())
    sleep = threading.Event()
    fewest = 1 << 60
    for _ in range(5):  # something else may wake a process; the best of five seconds counts
        before = context_switches(lasting.process.pid) + context_switches()
        sleep.wait(1.0)
        fewest = min(fewest, context_switches(lasting.process.pid) + context_switches() - before)
        if fewest < 10:
            break
    assert fewest < 10, f"{fewest} wake-ups in a second"
    for channel in channels:
        assert channel.alive()
        channel.close()
