"""The shim for ucx-py, with a stand-in for its modules (it cannot be installed from the public index), and what is said
when no binding is there."""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kvstore_transport import _ucx_library
from kvstore_transport._ucx_engine import NET, UcxEngine
from kvstore_transport._ucx_library import UcpLibrary, load, translate
from kvstore_transport.control import Control
from kvstore_transport.errors import ConnectionLost, DeadlinePassed, ProtocolError, TransportUnavailable
from kvstore_transport.seam import Limits
from kvstore_transport.ucx import UcxBodies, UcxWay, _open

MIB = 1 << 20
RANDOM = random.Random(5).randbytes(9 * MIB)


# ucx-py's modules: as much of ucp/_libs/ucx_api.pyx (0.45) as the shim calls.


class UCXBaseException(Exception):
    pass


class UCXError(UCXBaseException):
    pass


class UCXCanceled(UCXBaseException):
    pass


class UCXConnectionReset(UCXBaseException):
    pass


class Array:
    def __init__(self, obj: Any) -> None:
        self.obj = memoryview(obj).cast("B")
        self.nbytes = self.obj.nbytes


class Context:
    def __init__(self, config_dict: dict[str, str], feature_flags: tuple[str, ...]) -> None:
        assert feature_flags == ("tag", "wakeup")
        self.options = config_dict

    def info(self) -> str:
        return "#      resource 0  :  md 0  dev 0  flags -- self/memory\n#      resource 1 : flags -- tcp/lo\n"

    def get_config(self) -> dict[str, str]:
        return {"TLS": "all", **self.options}


class Address(bytes):
    @classmethod
    def from_buffer(cls, buffer: bytes) -> Address:
        return cls(buffer)


class Worker:
    """Messages meet receives in `progress` of the receiver, and the sender hears of it in its own."""

    all: ClassVar[dict[bytes, Worker]] = {}
    names = itertools.count()

    def __init__(self, context: Context) -> None:
        self.name = b"fake-%d" % next(self.names)
        self.all[self.name] = self
        self.arrived: deque[tuple[int, Array, Callable[[], None]]] = deque()
        self.posted: dict[int, tuple[Array, Callable[[object, Exception | None], None]]] = {}
        self.events: deque[Callable[[], None]] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def init_blocking_progress_mode(self) -> int:
        return self.fd

    def get_address(self) -> Address:
        return Address(self.name)

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def arm(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        return not self.events and not any(tag in self.posted for tag, _, _ in self.arrived)

    def progress(self) -> None:
        while self.events:
            self.events.popleft()()
        for _ in range(len(self.arrived)):
            tag, sent, done = self.arrived.popleft()
            if tag not in self.posted:
                self.arrived.append((tag, sent, done))
                continue
            into, ended = self.posted.pop(tag)
            into.obj[: sent.nbytes] = sent.obj
            short = sent.nbytes != into.nbytes
            ended(None, UCXError(f"length mismatch: {sent.nbytes} (got) != {into.nbytes}") if short else None)
            done()


class Endpoint:
    def __init__(self, worker: Worker, address: bytes, endpoint_error_handling: bool) -> None:
        assert endpoint_error_handling
        self.worker, self.peer = worker, Worker.all[bytes(address)]
        self.failed = False

    @classmethod
    def create_from_worker_address(cls, worker: Worker, address: Address, endpoint_error_handling: bool) -> Endpoint:
        return cls(worker, address, endpoint_error_handling)

    def raise_on_error(self) -> None:
        if self.failed:
            raise UCXConnectionReset("Endpoint error: Connection reset by remote peer")


def tag_send_nb(
    ep: Endpoint, buffer: Array, nbytes: int, tag: int, cb_func: Callable[[object, Exception | None], None]
) -> object:
    if nbytes < 10:  # at once: the call-back is not called
        buffer = Array(bytes(buffer.obj))
        ep.peer.arrived.append((tag, buffer, lambda: None))
        ep.peer.wake()
        return None

    def done() -> None:
        ep.worker.events.append(lambda: cb_func(None, None))
        ep.worker.wake()

    ep.peer.arrived.append((tag, buffer, done))
    ep.peer.wake()
    return object()


def tag_recv_nb(
    worker: Worker,
    buffer: Array,
    nbytes: int,
    tag: int,
    cb_func: Callable[[object, Exception | None], None],
    ep: Endpoint | None = None,
) -> object:
    assert ep is not None, "a receive of the worker would outlive its endpoint"
    worker.posted[tag] = (buffer, cb_func)
    return object()


@pytest.fixture
def fake_ucp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import ucp` works, `import ucxx` does not."""
    api = ModuleType("ucp._libs.ucx_api")
    feature = type("Feature", (), {"TAG": "tag", "WAKEUP": "wakeup"})
    for name, thing in {
        "UCXContext": Context,
        "UCXWorker": Worker,
        "UCXEndpoint": Endpoint,
        "UCXAddress": Address,
        "Feature": feature,
        "get_ucx_version": lambda: (1, 18, 1),
        "tag_send_nb": tag_send_nb,
        "tag_recv_nb": tag_recv_nb,
    }.items():
        setattr(api, name, thing)
    arr, exceptions, ucp = ModuleType("ucp._libs.arr"), ModuleType("ucp.exceptions"), ModuleType("ucp")
    arr.Array = Array  # type: ignore[attr-defined]
    for error in (UCXBaseException, UCXError, UCXCanceled, UCXConnectionReset):
        setattr(exceptions, error.__name__, error)
    ucp.__version__ = "0.45.0"  # type: ignore[attr-defined]
    found = {"ucp": ucp, "ucp._libs": ModuleType("ucp._libs"), "ucp._libs.ucx_api": api}
    for name, module in {**found, "ucp._libs.arr": arr, "ucp.exceptions": exceptions}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "libucx", None)
    yield
    for worker in Worker.all.values():
        os.close(worker.fd)
    Worker.all.clear()


class Ends:
    def __init__(self) -> None:
        self.engine = UcxEngine()
        left, right = socket.socketpair()
        self.controls = [Control(sock, name, stall_s=20) for sock, name in ((left, "a"), (right, "b"))]
        self.pool = ThreadPoolExecutor(1)

        def opened(control: Control, server: bool) -> UcxBodies:
            lane = self.engine.lane(NET)
            return _open(control, self.engine, lane, server=server, limits=Limits(), deadline=soon())

        other = self.pool.submit(opened, self.controls[1], True)
        self.a = opened(self.controls[0], False)
        self.b = other.result(30)

    def close(self) -> None:
        for bodies, control in zip((self.a, self.b), self.controls, strict=True):
            bodies.close()
            control.close()
        self.pool.shutdown()


@pytest.fixture
def ends(fake_ucp: None) -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_ucx_py_is_taken_where_ucxx_is_not(fake_ucp: None) -> None:
    library = load()
    assert (library.name, library.version, library.ucx_version) == ("ucx-py", "0.45.0", "1.18.1")
    context = library.context({"TLS": "tcp"})
    assert library.config(context) == {"TLS": "tcp"}
    assert "tcp/lo" in library.info(context)
    assert UCXCanceled in library.errors


@pytest.mark.parametrize("size", [9 * MIB, 1000, 400_000])
def test_bodies_travel_over_ucx_py(ends: Ends, size: int) -> None:
    views = [memoryview(RANDOM)[at : at + size] for at in range(0, len(RANDOM), size)]
    memory = bytearray(len(RANDOM))
    sending = ends.pool.submit(lambda: ends.a.send(views, len(RANDOM), number=3, deadline=soon()))
    ends.b.receive([memoryview(memory)], len(RANDOM), number=3, deadline=soon())
    sending.result(30)
    assert memory == RANDOM


def test_ucx_py_is_never_given_the_callers_memory(ends: Ends) -> None:
    """Since its abort may never return, memory that it was given may be written to for ever."""
    memory = bytearray(len(RANDOM))
    sending = ends.pool.submit(lambda: ends.a.send([memoryview(RANDOM)], len(RANDOM), number=1, deadline=soon()))
    seen: list[memoryview] = []
    worker = next(worker for worker in Worker.all.values() if worker.name == ends.b._messages._lane.address)  # type: ignore[union-attr]
    original = worker.progress

    def spy() -> None:
        seen.extend(array.obj for array, _ in worker.posted.values())
        original()

    worker.progress = spy  # type: ignore[method-assign]
    ends.b.receive([memoryview(memory)], len(RANDOM), number=1, deadline=soon())
    sending.result(30)
    assert seen
    assert all(view.obj is not memory for view in seen)


def test_after_trouble_the_staging_memory_is_never_used_again(ends: Ends) -> None:
    """The sender dies after the receiver granted: the endpoint is left as it is, with what it was given."""
    pool = ends.engine.receiving
    (warm,) = pool.acquire(1, wait=0)
    pool.release([warm])

    def vanish(*_: Any, **__: Any) -> Any:
        ends.controls[0].abort()
        raise ConnectionError

    ends.a._messages.post = vanish  # type: ignore[method-assign]
    vanishing = ends.pool.submit(ends.a.send, [memoryview(RANDOM)], len(RANDOM), number=1, deadline=soon())
    with pytest.raises(ConnectionLost):
        ends.b.receive([memoryview(bytearray(len(RANDOM)))], len(RANDOM), number=1, deadline=soon())
    assert isinstance(vanishing.exception(30), ConnectionError)
    slots = pool.acquire(16, wait=0)
    assert len(slots) == 16, "they were replaced"
    assert all(slot is not warm for slot in slots)


def test_a_deadline_ends_a_receive_over_ucx_py(ends: Ends) -> None:
    with pytest.raises(DeadlinePassed):
        ends.b.receive([memoryview(bytearray(MIB))], MIB, number=1, deadline=time.monotonic() + 0.1)


def test_an_endpoint_that_failed_fails_its_messages(fake_ucp: None) -> None:
    library = UcpLibrary()
    a, b = library.lane(library.context({})), library.lane(library.context({}))
    a.connect(b.address)
    pending = a.receive(bytearray(10), 1)
    assert not pending.done()
    (endpoint,) = [part for part in a.parts() if isinstance(part, Endpoint)]
    endpoint.failed = True
    with pytest.raises(UCXConnectionReset):
        pending.done()
    assert not a.abort(), "what it was given may still be used"


def test_a_message_of_another_length_fails(fake_ucp: None) -> None:
    library = UcpLibrary()
    a, b = library.lane(library.context({})), library.lane(library.context({}))
    a.connect(b.address)
    b.connect(a.address)
    pending = b.receive(bytearray(10), 1)
    a.send(bytes(5), 1)
    b.progress()
    with pytest.raises(UCXError) as caught:
        pending.done()
    assert isinstance(translate(caught.value, "peer"), ProtocolError)


def test_device_memory_needs_ucxx(ends: Ends) -> None:
    class Device:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (MIB,),
            "typestr": "|u1",
            "data": (1, False),
            "version": 3,
        }

        def __len__(self) -> int:
            return MIB

    with pytest.raises(TransportUnavailable, match="device memory needs ucxx instead of ucx-py"):
        ends.a.send([Device()], MIB, number=1, deadline=soon())  # type: ignore[list-item]


# None at all.


def test_without_a_binding_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ucxx", "ucp", "libucx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'kvstore\[ucx\]'"):
        load()
    monkeypatch.setattr(UcxEngine, "_one", None)
    with pytest.raises(TransportUnavailable, match=r"kvstore\[ucx\]"):
        UcxWay().facts(server=False)


def test_a_binding_that_refuses_its_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """ucxx raises ImportError for host UCX that is too old: its words reach the user."""

    class Old:
        name = "ucxx"

        def __init__(self) -> None:
            raise ImportError("Support for UCX 1.13.1 has ended.")

    monkeypatch.setattr(_ucx_library, "UcxxLibrary", Old)
    monkeypatch.setitem(sys.modules, "ucp", None)
    with pytest.raises(TransportUnavailable, match="has ended"):
        load()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("UCXMessageTruncatedError", ProtocolError),
        ("UCXUnreachableError", TransportUnavailable),
        ("UCXConnectionResetError", ConnectionLost),
        ("UCXCanceledError", ConnectionLost),
        ("UCXEndpointTimeoutError", ConnectionLost),
    ],
)
def test_errors_are_translated(name: str, kind: type[Exception]) -> None:
    error = translate(type(name, (Exception,), {})("what"), "10.0.0.1:7")
    assert type(error) is kind
    assert "10.0.0.1:7" in str(error)


def test_engines_are_made_once_by_many_threads(fake_ucp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UcxEngine, "_one", None)
    barrier = threading.Barrier(4)

    def get() -> UcxEngine:
        barrier.wait(30)
        return UcxEngine.get()

    with ThreadPoolExecutor(4) as threads:
        found = [future.result(30) for future in [threads.submit(get) for _ in range(4)]]
    assert len(set(map(id, found))) == 1


def test_a_context_whose_interfaces_are_gone_is_made_anew(fake_ucp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that ended took its veth with it: UCX then refuses every new worker of a context that knew it."""
    engine = UcxEngine()
    made = engine.library.lane
    gone: list[Any] = []

    def lane(context: Any) -> Any:
        if any(context is each for each in gone):
            raise UCXError("No such device")
        return made(context)

    monkeypatch.setattr(engine.library, "lane", lane)
    kept = engine.lane(NET)
    gone.append(engine._context(NET))
    again = engine.lane(NET)
    assert engine.lanes() == 2
    assert engine._context(NET) is not gone[0]
    gone.append(engine._context(NET))
    monkeypatch.setattr(engine.library, "context", lambda options: gone[0])
    with pytest.raises(TransportUnavailable, match="no worker: No such device"):
        engine.lane(NET)
    assert engine.lanes() == 2
    for each in (kept, again):
        engine.release(each)
