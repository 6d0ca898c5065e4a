"""`UcxEngine`: this process's UCX, made when it is first wanted: contexts, lanes and staging memory.

There is no thread and no event loop in it. Every connection has a UCX worker of its own (a `Lane`), and whoever moves a
body over it drives it. That was chosen by measurement (ucxx 0.52 over shared memory, 16 MiB, 4 in flight, a loaded
machine): its progress thread with futures 7.1 GB/s, a worker driven by the calling thread 7.6 to 11; idle, nothing
runs at all. It also keeps connections apart: UCX matches tags per worker, so a peer's messages can meet receives of its
own connection only, and memory that a worker was given is safe once its thread stops driving it.

A worker costs 7 ms, 2 MiB and 9 descriptors with shared memory, 2 ms, 0.1 MiB and 7 descriptors without (measured;
with a network card that has RDMA it takes more, which no machine here could show). So their number is limited
(`most_lanes`); further connections go over TCP and say why.

There are two contexts with settings of their own, since what is right on one host is wrong between two:

    on one host     UCX_TLS=^posix              one kind of shared memory instead of two: half the memory
                    UCX_SYSV_ERROR_HANDLING=y   else shared memory is silently not used
                    UCX_CMA_MEMORY_INVALIDATE=y else process_vm_readv(2) is silently not used with endpoints that handle
                                                errors: two copies through shared fragments instead of one. Nothing can
                                                make a reader stop, says UCX; `ucx` has its own way (GRANT "C")
                    UCX_RNDV_SCHEME=get_zcopy   the receiver copies out of the sender's memory. With put_zcopy the
                                                sender would write into ours, even after we gave up and used it anew.
                                                Not set where there is no such copy: 0.5 GB/s instead of 7
    between hosts   UCX_TLS=^sm
                    UCX_RNDV_SCHEME=put_zcopy   a GET over TCP is emulated: 0.3 GB/s; with this, TCP sends at once
                                                (eager), without a rendezvous in fragments of 8 KiB
                    UCX_TCP_TX_SEG_SIZE=64K, UCX_TCP_RX_SEG_SIZE=128K     1.8 → 3.5 GB/s, with the former
                    UCX_MAX_RNDV_RAILS=2        UCX's own default; `import ucxx` sets it to 1, which is one network card

What the user's environment sets is left alone, but for UCX_RNDV_SCHEME on one host, for the reason given.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _ucx_library
from ._shm_peer import host_id
from ._ucx_library import Lane, Library
from ._ucx_pieces import SLOT_BYTES
from .errors import TransportUnavailable

__all__ = ["HOST", "NET", "SlotPool", "UcxEngine"]

logger = logging.getLogger("kvstore.transport")

HOST, NET = "host", "net"
"""The two contexts."""

SETTINGS: Mapping[str, Mapping[str, str]] = {
    HOST: {
        "TLS": "^posix",
        "SYSV_ERROR_HANDLING": "y",
        "CMA_MEMORY_INVALIDATE": "y",
        "RNDV_SCHEME": "get_zcopy",
    },
    NET: {
        "TLS": "^sm",
        "RNDV_SCHEME": "put_zcopy",
        "TCP_TX_SEG_SIZE": "64K",
        "TCP_RX_SEG_SIZE": "128K",
        "MAX_RNDV_RAILS": "2",
    },
}

_RDMA = ("rc", "dc", "ud")  # rc_verbs, rc_mlx5, dc_mlx5, ud_verbs, …
_READERS = ("cma", "xpmem", "knem")  # read another process's memory
_SHARED = ("sysv", "posix", *_READERS)
_FDS_OF_LANE = 24  # a cautious share of the descriptors this process may have
_MOST_LANES = 256
_SLOTS = 16
NO_RDMA = (
    "no rc, dc or ud transport: this UCX build has no verbs, or there is no RDMA device. UCX of the libucx wheel never "
    "has any: install host UCX >= 1.19 with verbs (HPC-X, DOCA-OFED, conda-forge) and set "
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true; it needs libucs.so, the symlink of the -dev package"
)


class SlotPool:
    """Staging memory: page-aligned slots of 4 MiB, each made when it is first wanted. Thread-safe.

    Receivers and senders have one each. A sender takes its slots only after the receiver's grant, so what it waits for
    are senders whose receivers are ready: the two pools cannot block each other.
    """

    def __init__(self, count: int = _SLOTS) -> None:
        self._free: list[memoryview] = []
        self._unmade = count
        self._changed = threading.Condition()

    def acquire(self, count: int, *, wait: float) -> list[memoryview]:
        """`count` slots, all at once; none if they did not come free within `wait` seconds."""
        end = time.monotonic() + wait
        with self._changed:
            while len(self._free) + self._unmade < count:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return []
            slots = []
            for _ in range(count):
                if not self._free:
                    self._unmade -= 1
                    self._free.append(memoryview(mmap.mmap(-1, SLOT_BYTES)))
                slots.append(self._free.pop())
            return slots

    def release(self, slots: list[memoryview]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def forget(self, slots: list[memoryview]) -> None:
        """They may still be written to: never used again, and replaced by new ones."""
        _ucx_library.keep_for_ever([*slots])
        with self._changed:
            self._unmade += len(slots)
            self._changed.notify_all()


class _Forked(NamedTuple):
    """What is left of an engine in a forked child."""

    parts: list[object]


class UcxEngine:
    """Of this process: `UcxEngine.get()`.

    Args:
        library: the binding to use; None: whichever is installed.

    Attributes:
        library: the binding in use.
        sending, receiving: staging memory.
        most_lanes: how many connections may use UCX at a time.
    """

    _one: UcxEngine | _Forked | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> UcxEngine:
        """The engine, made at the first call.

        Raises:
            TransportUnavailable: there is no UCX, or it belongs to the process before `os.fork()`.
        """
        with cls._lock:
            if cls._one is None:
                cls._one = cls()
            if isinstance(cls._one, _Forked):
                raise TransportUnavailable(
                    "UCX was in use before os.fork() and cannot be used in the child: start processes with spawn, "
                    "or open kvstore after the fork"
                )
            return cls._one

    def __init__(self, library: Library | None = None) -> None:
        before = frozenset(os.environ)
        self.library = library or _ucx_library.load()
        self._failures: tuple[type[Exception], ...] = (*self.library.errors, OSError, RuntimeError)
        self.sending, self.receiving = SlotPool(), SlotPool()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_lanes = _MOST_LANES if soft < 0 else max(4, min(_MOST_LANES, soft // _FDS_OF_LANE))
        self.settings = {
            HOST: _ours(SETTINGS[HOST], before - {"UCX_RNDV_SCHEME"}),
            NET: _ours(SETTINGS[NET], before),
        }
        self._contexts: dict[str, Any] = {}
        self._lanes: set[Lane] = set()
        self._state = threading.Lock()

    @property
    def version(self) -> str:
        """Of UCX: "1.21.0". Two sides must have the same (github.com/openucx/ucx/issues/10376)."""
        return self.library.ucx_version

    def host(self) -> str:
        """The same for two processes that can share memory: under one kernel, and in the same IPC and PID namespaces
        (ipc_namespaces(7): System V segments; process_vm_readv(2): a process id). "" if UCX was told not to use any."""
        if not _has(_SHARED, self.library.info(self._context(HOST))):
            return ""
        names = []
        for name in ("ipc", "pid"):
            try:
                names.append(os.readlink(f"/proc/self/ns/{name}"))
            except OSError:
                return ""
        return "/".join([host_id(), *names])

    def devices(self, kind: str = NET) -> list[str]:
        """Transports and their devices that UCX found: "tcp/eth0", "rc_mlx5/mlx5_0:1".

        Raises:
            TransportUnavailable: UCX could not be started.
        """
        return _devices(self.library.info(self._context(kind)))

    def rdma_devices(self) -> list[str]:
        """Those of `devices` that move bytes by RDMA."""
        return [device for device in self.devices() if device.split("_")[0].split("/")[0] in _RDMA]

    def lane(self, kind: str) -> Lane:
        """A new worker; give it back with `release`.

        Raises:
            TransportUnavailable: too many, or UCX failed.
        """
        context = self._context(kind)
        with self._state:
            if len(self._lanes) >= self.most_lanes:
                raise TransportUnavailable(
                    f"{self.most_lanes} connections of this process use UCX already (raise the limit of open files, "
                    "ulimit -n, for more)"
                )
            try:
                lane = self.library.lane(context)
            except self._failures:
                # An interface that the context knows may be gone (a container's ended). A new one knows those there are
                # now; connections that are open keep theirs.
                if self._contexts.get(kind) is context:
                    del self._contexts[kind]
                context = self._known(kind)
                try:
                    lane = self.library.lane(context)
                except self._failures as error:
                    raise TransportUnavailable(f"UCX made no worker: {error}") from error
            self._lanes.add(lane)
            return lane

    def release(self, lane: Lane) -> bool:
        """Abort it. False: what it was given must not be used again."""
        with self._state:
            self._lanes.discard(lane)
        return lane.abort()

    def lanes(self) -> int:
        """How many are open."""
        return len(self._lanes)

    def config(self, kind: str) -> dict[str, str]:
        """The UCX options in effect, without "UCX_"."""
        return self.library.config(self._context(kind))

    def _context(self, kind: str) -> Any:
        with self._state:
            return self._known(kind)

    def _known(self, kind: str) -> Any:
        """The context of a kind. Called with the state locked."""
        if kind not in self._contexts:
            try:
                context = self.library.context(self.settings[kind])
                if kind == HOST and not _has(_READERS, self.library.info(context)):
                    self.settings[kind].pop("RNDV_SCHEME", None)
                    context = self.library.context(self.settings[kind])
                self._contexts[kind] = context
            except self._failures as error:
                raise TransportUnavailable(f"UCX could not be started: {error}") from error
        return self._contexts[kind]

    @classmethod
    def _in_child(cls) -> None:
        """After fork: nothing of the parent's is ever finalized here, which would talk to its peers."""
        cls._lock = threading.Lock()
        engine = cls._one
        if isinstance(engine, UcxEngine) and not engine._contexts:  # only loaded, never started
            cls._one = None
        elif isinstance(engine, UcxEngine):
            parts: list[object] = [*engine._contexts.values()]
            for lane in engine._lanes:
                parts += lane.parts()
            _ucx_library.keep_for_ever(parts)
            cls._one = _Forked(parts)


os.register_at_fork(after_in_child=UcxEngine._in_child)


def _devices(info: str) -> list[str]:
    return [line.partition("flags -- ")[2].strip() for line in info.splitlines() if "flags -- " in line]


def _has(transports: tuple[str, ...], info: str) -> bool:
    return any(device.partition("/")[0] in transports for device in _devices(info))


def _ours(settings: Mapping[str, str], environment: frozenset[str]) -> dict[str, str]:
    """`settings` that the user's environment, as it was before the library was imported, does not make."""
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in environment}
