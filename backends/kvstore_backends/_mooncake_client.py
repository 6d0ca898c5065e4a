"""Mooncake Store's own client (`mooncake.store.MooncakeDistributedStore`): joining, return codes, registered memory.

What had to be known (measured with 0.3.13.post1, and read in `mooncake-store/include/types.h`):

* `setup` and `close` hold Python's GIL while they block, so a master that does not answer freezes the process: without
  limits for 90 s. So the master is called up by a socket of ours first, and `MC_RPC_TIMEOUT_MS` and
  `MC_STORE_CLIENT_SETUP_RETRIES` bound the rest. Every other call gives the GIL up, and has no deadline.
* `close` while another call is under way crashes the process; it takes up to a second.
* `put_from` of a key that exists returns 0 and says nothing; a put *session* says so (`OBJECT_ALREADY_EXISTS`).
* Ranges must lie inside the object (`INVALID_PARAMS` otherwise) and, whatever the protocol, in registered memory.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.registry import install_hint

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["CODES", "Client", "Member", "Region", "Settings", "address_of", "error_of", "load"]

DEFAULT_PORT = 50051
RPC_TIMEOUT_MS = 2000
_REJOIN_S = 1.0  # a master that could not be joined is not asked again before

OK, MISSING, EXISTS, NOT_READY, OUT_OF_RANGE, LEASED, BUSY = 0, -704, -705, -703, -600, -706, -708

CODES: dict[int, tuple[str, bool]] = {
    -1: ("INTERNAL_ERROR", True),
    -10: ("BUFFER_OVERFLOW", False),
    -100: ("SHARD_INDEX_OUT_OF_RANGE", False),
    -101: ("SEGMENT_NOT_FOUND: no process offers memory", True),
    -102: ("SEGMENT_ALREADY_EXISTS", False),
    -103: ("CLIENT_NOT_FOUND", True),
    -200: ("NO_AVAILABLE_HANDLE: no room, the master is evicting", True),
    -300: ("INVALID_VERSION", False),
    -400: ("INVALID_KEY", False),
    -500: ("WRITE_FAIL", True),
    -600: ("INVALID_PARAMS", False),
    -601: ("ILLEGAL_CLIENT", True),  # the put session was given to somebody else meanwhile
    -700: ("INVALID_WRITE", True),
    -701: ("INVALID_READ", True),
    -702: ("INVALID_REPLICA", True),
    -703: ("REPLICA_IS_NOT_READY", True),
    -704: ("OBJECT_NOT_FOUND", True),
    -705: ("OBJECT_ALREADY_EXISTS", True),
    -706: ("OBJECT_HAS_LEASE: it was looked up within the master's lease time", True),
    -707: ("LEASE_EXPIRED: the transfer took longer than the master's default_kv_lease_ttl", True),
    -708: ("OBJECT_HAS_REPLICATION_TASK", True),
    -709: ("OBJECT_NO_REPLICATION_TASK", False),
    -710: ("REPLICA_NOT_FOUND", True),
    -711: ("REPLICA_ALREADY_EXISTS", False),
    -712: ("REPLICA_IS_GONE", True),
    -800: ("TRANSFER_FAIL", True),
    -900: ("RPC_FAIL: the master is not reached", True),
    -901: ("RPC_TIMEOUT: the master does not answer", True),
    -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", True),
    -1011: ("UNAVAILABLE_IN_CURRENT_MODE", False),
}
"""Mooncake's return code → its name, and whether the same call may succeed later. Unknown codes are permanent."""


def error_of(code: int, *, backend: str, operation: str, key: bytes | None = None) -> KVStoreError:
    """The error for a return code that is neither a hit, nor a miss, nor EXISTS."""
    name, transient = CODES.get(code, ("unknown", False))
    kind = TransientError if transient else PermanentError
    return kind(f"Mooncake answered {code} ({name})", backend=backend, operation=operation, key=key)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `mooncake://`, typed. See `MooncakeBackend.options`.

    Attributes:
        master: (host, port) of `mooncake_master`.
        prefix: what object names begin with.
    """

    master: tuple[str, int]
    prefix: str = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str | None = None
    local_host: str | None = None
    tenant: str = "default"
    segment: int = 0
    local_buffer: int = 0
    staging: int = 64 << 20
    lanes: int = 4
    copies: int = 1
    max_value: int = 1 << 30
    direct_reads: bool = False
    force_delete: bool = False

    @property
    def membership(self) -> Hashable:
        """Equal for settings that can share one membership in the store."""
        return (
            self.master, self.metadata, self.protocol, self.device, self.local_host, self.tenant, self.segment,
            self.local_buffer,
        )  # fmt: skip

    @property
    def name(self) -> str:
        host, port = self.master
        return f"mooncake://{host}:{port}{'/' + self.prefix if self.prefix else ''}"


def load(local_host: str | None = None) -> Any:
    """The module `mooncake.store`. What its library reads from the environment gets defaults, where unset: calls of
    the master are bounded, the log holds errors only, and its listening socket is bound to `local_host`.

    Raises:
        ConfigError: it is not installed, or one of its system libraries is missing.
    """
    for variable, value in (
        ("MC_RPC_TIMEOUT_MS", str(RPC_TIMEOUT_MS)),
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),
        ("MC_LOG_LEVEL", "ERROR"),
        ("GLOG_minloglevel", "2"),
        ("MC_TCP_BIND_ADDRESS", local_host),
    ):
        if value:
            os.environ.setdefault(variable, value)
    try:
        store = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        hint = f"in this project's checkout run {install_hint('mooncake')}"
        raise ConfigError(f"mooncake:// needs {error.name}, which is not installed: {hint}") from error
    except ImportError as error:
        hint = "on Debian: apt-get install libibverbs1 libnuma1 libcurl4 (no RDMA device is needed)"
        raise ConfigError(f"mooncake:// cannot load Mooncake's client: {error}; {hint}", cause=error) from error
    return store


def address_of(view: memoryview) -> int:
    """Where a flat byte view begins, writable or not. Raises `ValueError` or `BufferError` for other views."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Registered memory; `view` keeps it mapped."""

    start: int
    end: int
    view: memoryview


class Member:
    """One membership of this process in a Mooncake Store. Backends whose settings agree on it share it: it has some
    thirty threads, two listening sockets, and takes up to a second to close.

    Attributes:
        pending: names that a put of this process has a session for (a second session is an error, not EXISTS).
        lock: guards `pending`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pending: set[str] = set()
        self.lock = threading.Lock()
        self.users = 0
        self._joining = threading.Lock()
        self._store: Any = None
        self._failed: tuple[float, TransientError] | None = None
        self._regions: dict[tuple[int, int], tuple[Region, int]] = {}

    def joined(self, operation: str) -> Any:
        """The `MooncakeDistributedStore`. Only from a thread that may block.

        Raises:
            TransientError: the master is not reached, or refused. For a second the same is said without trying again.
        """
        if self._store is not None:
            return self._store
        with self._joining:
            if self._store is None:
                if self._failed is not None and time.monotonic() < self._failed[0] + _REJOIN_S:
                    raise self._failed[1]
                try:
                    self._store = self._join(operation)
                except TransientError as error:
                    self._failed = (time.monotonic(), error)
                    raise
            return self._store

    def _join(self, operation: str) -> Any:
        settings, (host, port) = self.settings, self.settings.master
        try:
            with socket.create_connection((host, port), RPC_TIMEOUT_MS / 1e3) as probe:
                local = settings.local_host or str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
            why = getattr(error, "strerror", None) or error
            text = f"the Mooncake master at {host}:{port} is not reached: {why}"
            raise TransientError(text, backend=settings.name, operation=operation, cause=error) from error
        store = load(local).MooncakeDistributedStore()
        code = store.setup(
            local, settings.metadata, settings.segment, settings.local_buffer, settings.protocol, settings.device or "",
            f"{host}:{port}", tenant_id=settings.tenant,
        )  # fmt: skip
        if code:
            text = f"joining Mooncake Store failed with {code} (its log on standard error says why)"
            raise TransientError(text, backend=settings.name, operation=operation)
        return store

    def register(self, view: memoryview) -> Region | None:
        """Register memory, or count one more user of it; None if Mooncake refuses it."""
        start = address_of(view)
        place = (start, len(view))
        with self._joining:
            known = self._regions.get(place)
            if known is None:
                if self._store.register_buffer(*place):
                    return None
                known = (Region(start, start + len(view), view), 0)
            self._regions[place] = (known[0], known[1] + 1)
            return known[0]

    def unregister(self, region: Region) -> None:
        """One user of it less."""
        place = (region.start, region.end - region.start)
        with self._joining:
            _, users = self._regions[place]
            if users > 1:
                self._regions[place] = (region, users - 1)
                return
            del self._regions[place]
            self._store.unregister_buffer(region.start)

    def close(self) -> None:
        """Leave the store. Only when no call is under way."""
        if self._store is not None:
            self._store.close()
            self._store = None


class _Members:
    """The memberships of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of: dict[Hashable, Member] = {}
        self.parents: list[Member] = []

    def enter(self, settings: Settings) -> Member:
        with self.lock:
            member = self.of.setdefault(settings.membership, Member(settings))
            member.users += 1
        return member

    def leave(self, member: Member) -> None:
        with self.lock:
            member.users -= 1
            last = not member.users
            if last:
                del self.of[member.settings.membership]
        if last:
            member.close()

    def after_fork(self) -> None:
        """In a forked child the memberships are the parent's: nothing of them may be touched, nor freed."""
        self.lock = threading.Lock()
        self.parents += self.of.values()
        self.of = {}


_MEMBERS = _Members()
os.register_at_fork(after_in_child=_MEMBERS.after_fork)


class Client:
    """One backend's use of a membership, which is joined at its first call.

    Args:
        staging: memory that is registered as soon as it has joined.

    Attributes:
        regions: what is registered. Read without a lock: it is replaced, never changed.
    """

    def __init__(self, settings: Settings, staging: memoryview) -> None:
        self.settings = settings
        self.regions: Sequence[Region] = ()
        self.member = _MEMBERS.enter(settings)
        self._lock = threading.Lock()
        self._wanted: list[memoryview] = [staging]
        self._joined = False

    def joined(self, operation: str) -> Any:
        """The `MooncakeDistributedStore`, with our memory registered. Raises as `Member.joined`."""
        store = self.member.joined(operation)
        if not self._joined:
            with self._lock:
                if not self._joined:
                    for view in self._wanted:
                        self._register(view)
                    self._joined = True
        return store

    def config(self) -> Any:
        """How many copies of a new object Mooncake keeps, as its `ReplicateConfig`."""
        config = load().ReplicateConfig()
        config.replica_num = self.settings.copies
        return config

    def register(self, view: memoryview) -> None:
        """Register memory now, or as soon as it has joined. It stays mapped until `close`."""
        with self._lock:
            self._wanted.append(view)
            if self._joined:
                self._register(view)

    def _register(self, view: memoryview) -> None:
        # What Mooncake refuses (too much for the device, say) is not fatal: such memory goes through staging.
        region = self.member.register(view)
        if region is not None:
            self.regions = (*self.regions, region)

    def find(self, start: int, nbytes: int) -> Region | None:
        """The registered region that all of these bytes lie in."""
        for region in self.regions:
            if region.start <= start and start + nbytes <= region.end:
                return region
        return None

    def close(self) -> None:
        """Only when no call of this backend is under way."""
        for region in self.regions:
            self.member.unregister(region)
        self.regions = ()
        self._wanted.clear()
        _MEMBERS.leave(self.member)
