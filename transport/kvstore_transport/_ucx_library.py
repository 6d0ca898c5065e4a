"""The two Python bindings of UCX behind one small face: `Library` makes contexts and lanes; a `Lane` is one UCX worker
with one endpoint.

* **ucxx** (`pip install ucxx-cu12`, works without CUDA), by its classes in `ucxx.libucxx`.
* **ucx-py** (archived in 2025; `import ucp`), by those in `ucp._libs.ucx_api`: for users who have it. Closing an
  endpoint of it waits for a peer that may be frozen, for minutes, so a lane of it is never closed in anger but left as
  it is (`Lane.abort` says so), and the caller's memory is never given to it (`Lane.trusted`).

Neither is imported before it is needed. Environment variables (`UCX_…`) must be there before, because UCX reads them
when it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from .errors import ConnectionLost, ProtocolError, TransportError, TransportUnavailable

__all__ = [
    "HINT",
    "Lane",
    "Library",
    "Pending",
    "UcpLibrary",
    "UcxxLibrary",
    "keep_for_ever",
    "libucp_path",
    "load",
    "translate",
]

_LAST_CALLS = 100  # of progress after a close; one or two are needed

HINT = "pip install 'kvstore[ucx]'"


class Pending(ABC):
    """A message under way. Keeps its buffer alive."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended well. Not to be asked again after it said so, or after `Lane.abort`.

        Raises:
            One of `Library.errors`, if it failed or was cancelled.
        """


class Lane(ABC):
    """One UCX worker with one endpoint, driven by one thread at a time: nothing moves but in `progress`.

    Attributes:
        address: of the worker, for the other side's `connect`.
        fd: readable when there is something to progress after `arm`.
        trusted: whether `abort` ends all use of memory at once.
    """

    address: bytes
    fd: int
    trusted: bool

    @abstractmethod
    def connect(self, address: bytes) -> None:
        """Name the other side's worker. Returns at once."""

    @abstractmethod
    def send(self, buffer: object, tag: int) -> Pending: ...

    @abstractmethod
    def receive(self, buffer: object, tag: int) -> Pending:
        """`buffer` must have the message's length. A longer message fails; a shorter one may pass unnoticed."""

    @abstractmethod
    def progress(self) -> None:
        """Do what can be done now, without the GIL."""

    @abstractmethod
    def arm(self) -> bool:
        """Let `fd` tell what comes from now on; False: there is something already."""

    @abstractmethod
    def abort(self) -> bool:
        """End it now. Pending messages fail. False: the library may go on using memory that it was given."""

    @abstractmethod
    def parts(self) -> list[object]:
        """The library's objects, for `keep_for_ever`."""


class Library(ABC):
    """One binding.

    Attributes:
        name: "ucxx" or "ucx-py".
        version: of the binding.
        ucx_version: of UCX itself: "1.21.0".
        errors: what its functions raise.
    """

    name: str
    version: str
    ucx_version: str
    errors: tuple[type[Exception], ...]

    @abstractmethod
    def context(self, settings: Mapping[str, str]) -> Any:
        """A UCX context. `settings`: UCX options without "UCX_"; they go before the environment."""

    @abstractmethod
    def info(self, context: Any) -> str:
        """What UCX prints about a context: lines that end in "flags -- tcp/eth0" name transports and devices."""

    @abstractmethod
    def config(self, context: Any) -> dict[str, str]:
        """The options in effect, as UCX prints them."""

    @abstractmethod
    def lane(self, context: Any) -> Lane: ...


def load() -> Library:
    """ucxx if it is there, else ucx-py. Takes half a second the first time.

    Raises:
        TransportUnavailable: neither can be imported; says why.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # or UCX complains about variables that ucxx itself sets
    os.environ.setdefault("UCX_LOG_LEVEL", "error")  # or about each message that was cut half-way
    reasons = []
    for make in (UcxxLibrary, UcpLibrary):
        try:
            return make()
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"{make.name}: {error}")
    raise TransportUnavailable(f"UCX needs its Python binding ucxx: {HINT} ({'; '.join(reasons)})")


def translate(error: Exception, peer: str) -> TransportError:
    """One of `Library.errors` as ours."""
    name = type(error).__name__
    if "Truncated" in name or "length mismatch" in str(error):
        return ProtocolError(f"{peer}: a UCX message longer or shorter than agreed upon")
    if "Unreachable" in name:
        return TransportUnavailable(f"{peer} cannot be reached over UCX: {error}")
    return ConnectionLost(f"{peer}: UCX: {error or name}")


def keep_for_ever(things: list[object]) -> None:
    """Let the objects never be finalized: in a forked child, where they are the parent's."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def libucp_path() -> str:
    """The file of the UCX library that is loaded; "" if none is (proc_pid_maps(5))."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            _, slash, path = line.partition("/")
            if "libucp" in path:
                return slash + path.strip()
    return ""


# ucxx


class UcxxLibrary(Library):
    """ucxx 0.45 to 0.52 (docs.rapids.ai/api/ucxx; the classes are those of ucxx/_lib/libucxx.pyx)."""

    name = "ucxx"

    def __init__(self) -> None:
        ucxx = importlib.import_module("ucxx")
        self._api = importlib.import_module("ucxx._lib.libucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self.version = str(getattr(ucxx, "__version__", "unknown"))
        self.ucx_version = ".".join(map(str, self._api.get_ucx_version()))
        self.errors = _exceptions(importlib.import_module("ucxx.exceptions"))

    def context(self, settings: Mapping[str, str]) -> Any:
        api = self._api
        return api.UCXContext(dict(settings), feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))

    def info(self, context: Any) -> str:
        return str(context.info)

    def config(self, context: Any) -> dict[str, str]:
        return dict(context.config)

    def lane(self, context: Any) -> Lane:
        return _UcxxLane(self._api, self._array, context)


class _UcxxLane(Lane):
    trusted = True

    def __init__(self, api: Any, array: Any, context: Any) -> None:
        self._api = api
        self._array = array
        self._worker = api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._pending: set[_UcxxPending] = set()
        self._tag = api.UCXXTag
        self.fd = self._worker.epoll_file_descriptor
        self.address = bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> None:
        api = self._api
        self._endpoint = api.UCXEndpoint.create_from_worker_address(
            self._worker, api.UCXAddress.create_from_buffer(address), True
        )

    def send(self, buffer: object, tag: int) -> Pending:
        array = self._array(buffer)
        return self._kept(_UcxxPending(self._pending, self._endpoint.tag_send(array, self._tag(tag)), array))

    def receive(self, buffer: object, tag: int) -> Pending:
        array = self._array(buffer)
        return self._kept(_UcxxPending(self._pending, self._endpoint.tag_recv(array, self._tag(tag)), array))

    def _kept(self, pending: _UcxxPending) -> Pending:
        self._pending.add(pending)
        return pending

    def progress(self) -> None:
        self._worker.progress()

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def abort(self) -> bool:
        """Forced: it does not wait for the peer (UCP_EP_CLOSE_MODE_FORCE), whose remote keys become invalid. Messages
        of which nothing has moved end within the close or a few calls of progress; one that has come in part never does
        if its peer is frozen. The worker's end is the end of that, too."""
        endpoint, worker, self._endpoint, self._worker = self._endpoint, self._worker, None, None
        unfinished = [pending for pending in self._pending if not pending.ended()]
        if endpoint is not None:
            endpoint.close_blocking()
        for _ in range(_LAST_CALLS):
            if all(pending.ended() for pending in unfinished):
                break
            worker.progress()
        else:
            keep_for_ever([pending.request for pending in unfinished])
        if unfinished:
            _destroy(worker, endpoint, self.fd)
        for pending in self._pending:  # they hold the worker, and a traceback may hold them
            pending.drop()
        self._pending.clear()
        return True

    def parts(self) -> list[object]:
        return [part for part in (self._worker, self._endpoint) if part is not None]


def _destroy(worker: Any, endpoint: Any, fd: int) -> None:
    """Destroy a worker below ucxx, whose objects are never finalized then: they hold each other in a circle once a send
    was cancelled (ucxx 0.52), and would keep 9 descriptors and 2 MiB for ever."""
    keep_for_ever([worker, endpoint])
    ucp = ctypes.CDLL(libucp_path())
    ucp.ucp_worker_destroy.argtypes, ucp.ucp_worker_destroy.restype = [ctypes.c_void_p], None
    ucp.ucp_worker_destroy(worker.handle)
    os.close(fd)  # of ucxx, around UCX's


class _UcxxPending(Pending):
    __slots__ = ("_array", "_others", "request")

    def __init__(self, others: set[_UcxxPending], request: Any, array: Any) -> None:
        self._others = others
        self.request = request
        self._array = array

    def done(self) -> bool:
        if not self.request.completed:
            return False
        self.request.check_error()
        self._others.discard(self)
        self.drop()
        return True

    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self.request.completed)

    def drop(self) -> None:
        """Let go of the library's objects, and of the buffer."""
        self.request = self._array = None


# ucx-py


class UcpLibrary(Library):
    """ucx-py 0.32 to 0.45 (the classes are those of ucp/_libs/ucx_api.pyx)."""

    name = "ucx-py"

    def __init__(self) -> None:
        try:
            importlib.import_module("libucx").load_library()  # the wheel's UCX; else the system's is linked
        except ImportError:
            pass
        ucp = importlib.import_module("ucp")
        self._api = importlib.import_module("ucp._libs.ucx_api")
        self._array = importlib.import_module("ucp._libs.arr").Array
        self.version = str(getattr(ucp, "__version__", "unknown"))
        self.ucx_version = ".".join(map(str, self._api.get_ucx_version()))
        self.errors = _exceptions(importlib.import_module("ucp.exceptions"))

    def context(self, settings: Mapping[str, str]) -> Any:
        api = self._api
        return api.UCXContext(dict(settings), feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))

    def info(self, context: Any) -> str:
        return str(context.info())

    def config(self, context: Any) -> dict[str, str]:
        return dict(context.get_config())

    def lane(self, context: Any) -> Lane:
        return _UcpLane(self._api, self._array, context)


class _UcpLane(Lane):
    trusted = False

    def __init__(self, api: Any, array: Any, context: Any) -> None:
        self._api = api
        self._array = array
        self._worker = api.UCXWorker(context)
        self._endpoint: Any = None
        self.fd = self._worker.init_blocking_progress_mode()
        self.address = bytes(self._worker.get_address())

    def connect(self, address: bytes) -> None:
        api = self._api
        self._endpoint = api.UCXEndpoint.create_from_worker_address(
            self._worker, api.UCXAddress.from_buffer(address), endpoint_error_handling=True
        )

    def send(self, buffer: object, tag: int) -> Pending:
        array = self._array(buffer)
        pending = _UcpPending(self._endpoint, array)
        if self._api.tag_send_nb(self._endpoint, array, array.nbytes, tag, pending.ended) is None:
            pending.ended(None, None)
        return pending

    def receive(self, buffer: object, tag: int) -> Pending:
        array = self._array(buffer)
        pending = _UcpPending(self._endpoint, array)
        request = self._api.tag_recv_nb(self._worker, array, array.nbytes, tag, pending.ended, ep=self._endpoint)
        if request is None:
            pending.ended(None, None)
        return pending

    def progress(self) -> None:
        self._worker.progress()

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def abort(self) -> bool:
        """It is not closed, which could block for ever, but never progressed again, nor finalized."""
        keep_for_ever(self.parts())
        self._worker = self._endpoint = None
        return False

    def parts(self) -> list[object]:
        return [part for part in (self._worker, self._endpoint) if part is not None]


class _UcpPending(Pending):
    """ucx-py reports by a callback, while it is progressed; cancelled messages of a dead peer, too."""

    __slots__ = ("_array", "_ended", "_endpoint", "_error")

    def __init__(self, endpoint: Any, array: Any) -> None:
        self._endpoint = endpoint
        self._array = array
        self._ended = False
        self._error: Exception | None = None

    def ended(self, _request: object, error: Exception | None) -> None:
        self._ended = True
        self._error = error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        if not self._ended:
            self._endpoint.raise_on_error()
        return self._ended


def _exceptions(module: Any) -> tuple[type[Exception], ...]:
    """All that a binding raises: some of its exceptions have no common base."""
    found = [thing for thing in vars(module).values() if isinstance(thing, type) and issubclass(thing, Exception)]
    return tuple(found)
