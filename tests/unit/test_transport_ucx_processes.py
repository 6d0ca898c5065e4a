"""UCX between processes: what is frozen, killed, forked, missing or idle. The rules of all transports (a peer killed or
stopped within a get and a put, restarts) are in tests/conformance/test_transports_processes.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_transport import DeadlinePassed, Server, TransportError, connect
from kvstore_transport._ucx_engine import HOST, NET, UcxEngine
from kvstore_transport._ucx_messages import Messages
from kvstore_transport.errors import TransportUnavailable
from kvstore_transport.ucx import UcxWay
from tests.transport_support import (
    BY_NAME,
    ECHO,
    MAKE,
    MIB,
    ROOT,
    SINK,
    WHAT,
    Kind,
    Remote,
    Service,
    Toy,
    digest,
    pattern,
    plan_into,
    remote,
    soon,
    wait_until,
)

NBYTES = 64 * MIB
SIZE = NBYTES.to_bytes(8, "little")
UCX = [BY_NAME["ucx"], BY_NAME["ucx_tcp"]]
CANARY = b"\xc5"

if UCX[0].missing():
    pytest.skip(UCX[0].missing(), allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def contexts() -> None:
    """UCX keeps descriptors per process from its first use on: before the audit of a test looks."""
    for kind in (HOST, NET):
        UcxEngine.get().devices(kind)


@pytest.fixture(params=UCX, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def node(kind: Kind, tmp_path: Path) -> Iterator[Remote]:
    with remote(kind, tmp_path) as found:
        yield found


def before_grant(monkeypatch: pytest.MonkeyPatch, letter: bytes, action: Callable[[], None]) -> None:
    """Do something right before this side sends the next GRANT of that letter, once."""
    original, todo = Messages.grant, [action]

    def grant(self: Messages, number: int, meta: bytes, deadline: float) -> None:
        if meta[:1] == letter and todo:
            todo.pop()()
        original(self, number, meta, deadline)

    monkeypatch.setattr(Messages, "grant", grant)


def heard(node: Remote) -> list[str]:
    with node.connect() as channel:
        return channel.call(WHAT, b"", deadline=soon()).meta.decode().splitlines()


# A frozen peer, and memory that is used anew.


def test_no_byte_lands_after_a_get_gave_up(node: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is frozen when our receives are posted, and goes on when their memory has another owner."""
    memory = bytearray(NBYTES)
    channel = node.connect()
    before_grant(monkeypatch, b"P", node.stop)
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        channel.call(MAKE, SIZE, plan=plan_into(memoryview(memory)), deadline=began + 1.0)
    assert time.monotonic() - began < 20
    memory[:] = CANARY * NBYTES
    node.go_on()
    assert heard(node) == []  # it lives, and has had its time
    channel.close()
    assert memory == CANARY * NBYTES


_FREEZING = """
import os, signal, sys
from kvstore_transport._ucx_library import _UcxxLane
from tests.transport_support import _main
send, large = _UcxxLane.send, []
def freezing(self, buffer, tag):
    if len(buffer) > 1 << 20:
        large.append(tag)
    if len(large) == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return send(self, buffer, tag)
_UcxxLane.send = freezing
_main(*sys.argv[1:])
"""


def test_no_byte_lands_after_a_get_gave_up_half_way(tmp_path: Path) -> None:
    """The server freezes itself when it has handed the first message of four to UCX, which has sent as much of it as
    the sockets took in."""
    kind = BY_NAME["ucx_tcp"]
    memory = bytearray(NBYTES)
    with remote(kind, tmp_path, code=_FREEZING) as node:
        channel = node.connect()
        with pytest.raises(DeadlinePassed):
            channel.call(MAKE, SIZE, plan=plan_into(memoryview(memory)), deadline=time.monotonic() + 2.0)
        node.wait_stopped()
        memory[:] = CANARY * NBYTES
        node.go_on()
        assert heard(node) == []
        channel.close()
        assert memory == CANARY * NBYTES


def test_a_put_whose_memory_changed_after_it_gave_up_is_not_believed(
    node: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is frozen with its receives posted; it reads our memory when that has another owner."""
    memory = bytearray(pattern(NBYTES, 1))
    channel = node.connect()
    original = Messages.walk

    def walk(self: Messages, *given: Any) -> Any:  # the server's table is there, nothing was sent yet
        node.stop()
        return original(self, *given)

    monkeypatch.setattr(Messages, "walk", walk)
    with pytest.raises(DeadlinePassed):
        channel.call(SINK, b"", [memoryview(memory)], deadline=time.monotonic() + 1.0)
    memory[:] = CANARY * NBYTES
    monkeypatch.undo()
    node.go_on()
    wait_until(lambda: heard(node) != [])
    assert heard(node)[0].startswith("failed"), "it must not say that it received something"
    channel.close()


def test_a_put_that_was_sent_but_not_confirmed_is_not_believed(node: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes have gone, and then the sender dies before it says so."""
    data = pattern(NBYTES, 2)
    channel = node.connect()
    before_grant(monkeypatch, b"C", channel.abort)
    with pytest.raises(TransportError):
        channel.call(SINK, b"", [memoryview(data)], deadline=soon())
    channel.close()
    wait_until(lambda: heard(node) != [])
    assert heard(node)[0].startswith("failed")


def test_many_peers_that_freeze_cost_no_descriptors(node: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(NBYTES)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        channel = node.connect()
        before_grant(monkeypatch, b"P", node.stop)
        with pytest.raises(DeadlinePassed):
            channel.call(MAKE, SIZE, plan=plan_into(memoryview(memory)), deadline=time.monotonic() + 0.3)
        monkeypatch.undo()
        node.go_on()
        channel.close()
    assert UcxEngine.get().lanes() == 0
    assert len(os.listdir("/proc/self/fd")) == before


# Falling back.


def toy_over(*transports: str) -> Server:
    return Server(Toy(), listen=("127.0.0.1", 0), transports=transports)


def test_other_versions_of_ucx_talk_over_tcp_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = UcxWay.facts

    def facts(self: UcxWay, *, server: bool) -> dict[str, object]:
        return {**original(self, server=server), "version": "1.21.0" if server else "1.20.1"}

    monkeypatch.setattr(UcxWay, "facts", facts)
    with toy_over("ucx", "tcp") as server, connect(server.address, deadline=soon(), transport="ucx,tcp") as channel:
        assert channel.peer.transport == "tcp"
        assert "UCX 1.21.0 here, 1.20.1 there" in channel.peer.note
        assert channel.call(SINK, b"", [memoryview(b"x")], deadline=soon()).meta == digest(b"x")
        with pytest.raises(TransportUnavailable, match="they must be the same"):
            connect(server.address, deadline=soon(), transport="ucx")


def test_a_connection_that_ucx_cannot_make_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when both sides agreed on UCX before it showed."""
    monkeypatch.setattr(UcxEngine.get(), "most_lanes", 0)
    with toy_over("ucx", "tcp") as server, connect(server.address, deadline=soon(), transport="ucx,tcp") as channel:
        assert channel.peer.transport == "tcp"
        assert "ucx:" in channel.peer.note
        assert channel.call(SINK, b"", [memoryview(b"x")], deadline=soon()).meta == digest(b"x")


def test_with_tls_ucx_is_not_used(tmp_path: Path) -> None:
    tls = BY_NAME["tls"]
    with Service(tls, Toy(), tmp_path) as service, service.connect(transport="ucx,tcp") as channel:
        assert channel.peer.transport == "tcp"
        assert "TLS" in channel.peer.note


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_process_without_ucxx_talks_over_tcp(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
for name in ("ucxx", "ucp", "libucx"):
    sys.modules[name] = None
from kvstore_transport import TransportUnavailable, connect
deadline = time.monotonic() + 60
with connect(sys.argv[1], deadline=deadline, transport="ucx,tcp") as channel:
    print(channel.peer.transport, channel.peer.note)
try:
    connect(sys.argv[1], deadline=deadline, transport="ucx")
except TransportUnavailable as error:
    print(error)
assert "libucp" not in pathlib.Path("/proc/self/maps").read_text()
"""
    with toy_over("ucx", "tcp") as server:
        done = run_python(code, server.address)
    assert (done.returncode, done.stderr) == (0, "")
    note, error = done.stdout.splitlines()
    assert note.startswith("tcp ucx: UCX needs its Python binding ucxx: pip install 'kvstore[ucx]'")
    assert "pip install 'kvstore[ucx]'" in error


def test_importing_the_transports_loads_no_ucx() -> None:
    code = "import kvstore_transport, sys; print('ucxx' in sys.modules, 'ucp' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code).stdout.split() == ["False", "False", "False"]


# The life of a process.


def test_a_process_that_closes_nothing_ends_quietly(kind: Kind, tmp_path: Path) -> None:
    code = """
import sys, warnings
from tests.transport_support import BY_NAME, MAKE, MIB, connect_to, plan_into, soon
warnings.simplefilter("ignore", ResourceWarning)  # of the socket; UCX has no word to say
channel = connect_to(BY_NAME[sys.argv[1]], sys.argv[2])
channel.call(MAKE, MIB.to_bytes(8, "little"), plan=plan_into(memoryview(bytearray(MIB))), deadline=soon())
print("done")
"""
    with Service(kind, Toy(), tmp_path) as service:
        done = run_python(code, kind.name, service.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def in_child(action: Callable[[], None]) -> int:
    """The exit code of a forked child that did it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_told_and_harms_nobody(kind: Kind, tmp_path: Path) -> None:
    with Service(kind, Toy(), tmp_path) as service, service.connect() as channel:

        def child() -> None:
            with pytest.raises(TransportUnavailable, match=r"before os\.fork\(\)"):
                UcxWay().facts(server=False)
            channel.close()

        assert in_child(child) == 0
        into = bytearray(4 * MIB)
        size = len(into).to_bytes(8, "little")
        channel.call(MAKE, size, plan=plan_into(memoryview(into)), deadline=soon())
        assert into == pattern(len(into), len(into))


def test_a_child_forked_before_the_first_use_may_use_ucx() -> None:
    code = """
import os, sys
from kvstore_transport._ucx_engine import NET, UcxEngine
UcxEngine.get()  # loaded, not started
child = os.fork()
if child == 0:
    lane = UcxEngine.get().lane(NET)
    os._exit(0 if UcxEngine.get().release(lane) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_python(code.replace("import os, sys", "import os, sys, warnings; warnings.simplefilter('ignore')"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_idle_connections_cost_no_cpu(node: Remote) -> None:
    """Less than 2 % of a core for a connection; it is nothing that can be measured."""
    channels = [node.connect() for _ in range(10)]
    into = bytearray(MIB)
    for channel in channels:
        channel.call(MAKE, MIB.to_bytes(8, "little"), plan=plan_into(memoryview(into)), deadline=soon())
    stat = Path(f"/proc/{node.process.pid}/stat")

    def ticks() -> int:
        fields = stat.read_text(encoding="ascii").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, mine, began = ticks(), time.process_time(), time.monotonic()
    threading.Event().wait(5.0)
    seconds = time.monotonic() - began
    theirs = (ticks() - before) / os.sysconf("SC_CLK_TCK")
    assert (theirs + time.process_time() - mine) / seconds / len(channels) < 0.005
    for channel in channels:
        channel.close()


@pytest.mark.slow
def test_many_clients_at_once_have_their_bytes(kind: Kind, tmp_path: Path) -> None:
    """24 connections, busy together; with the server's half, 48 lanes of this process."""
    with Service(kind, Toy(), tmp_path) as service:
        channels = [service.connect() for _ in range(24)]
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for size in (100, 300_000, 3 * MIB + number):
                    data = pattern(size, number)
                    into = bytearray(size)
                    channels[number].call(
                        ECHO, b"", [memoryview(data)], plan=plan_into(memoryview(into)), deadline=soon(120)
                    )
                    assert into == data
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(channels))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        for channel in channels:
            channel.close()
