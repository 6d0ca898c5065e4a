"""The seam below the store: what a place that keeps records must do.

A backend moves bytes between memory it is handed and one place (a folder, a bucket, other nodes). It knows
keys and byte ranges, nothing of models, layers or codecs. The contract, each line of which is a test of
`kvstore.testing.BackendSuite`:

* Results align with inputs: same length, same order. Trouble with one item is an `Outcome`; a call raises only
  when the backend as a whole is unusable (`ClosedError`, `ConfigError`).
* `get_into` writes to `dst` only before it returns. On anything but OK the content of `dst` is undefined.
  OK with `nbytes < len(dst)` means that the record ends there (as `pread` at the end of a file); a body that
  was cut on the way is ERROR, never a short OK. An offset at or behind the end is OK with `nbytes == 0`.
* `put` is atomic and write-once. A reader sees nothing or everything; the second writer of a key gets EXISTS
  and transfers as little as possible; within one batch the first of equal keys wins. A put that fails
  half-way leaves nothing visible and nothing that blocks a later put.
* `deadline` is absolute, in seconds of `time.monotonic()`, and covers everything: waiting, connects, retries.
  What was not done by then is ERROR with a `TransientError`.
* `quarantine` frees a name whose bytes proved corrupt, so that the next put of the key succeeds, and keeps the
  bytes where an operator can look at them if the backend can. It never touches a record that was replaced since this
  backend last read it.
* Methods may be called from up to `limits.lanes` threads at once.
* After `os.fork()` a backend works in the child, or raises `ClosedError` with a sentence that says so.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .errors import KVStoreError, PermanentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .buffers import Buffer, Slab
    from .eviction import RecordInfo
    from .keys import Key
    from .metrics import Metrics
    from .options import Option
    from .registry import BackendURL

__all__ = [
    "EXISTS",
    "MISS",
    "NO_DEADLINE",
    "OK",
    "Backend",
    "Capability",
    "KeyInfo",
    "Limits",
    "Outcome",
    "Read",
    "Status",
    "Write",
    "without_landing",
]

NO_DEADLINE = math.inf
"""A deadline that never passes. For tools and tests; an engine always sets a real one."""


class Status(enum.Enum):
    """How one item of a batch ended."""

    OK = "ok"
    MISS = "miss"
    EXISTS = "exists"  # put only: a record of this key is already there
    ERROR = "error"


class Outcome(NamedTuple):
    """How one item of a batch ended.

    Attributes:
        nbytes: stat: size of the record; get: bytes written to `dst`; put: bytes stored (0 for EXISTS); else 0.
        error: set if and only if `status` is ERROR.
    """

    status: Status
    nbytes: int = 0
    error: KVStoreError | None = None

    @property
    def ok(self) -> bool:
        """True for OK only. EXISTS after a put is not OK, but means that the record is there: see `stored`."""
        return self.status is Status.OK

    @property
    def stored(self) -> bool:
        """After a put: the record is there, whoever wrote it."""
        return self.status is Status.OK or self.status is Status.EXISTS

    @classmethod
    def failed(cls, error: KVStoreError) -> Outcome:
        return cls(Status.ERROR, 0, error)


OK = Outcome(Status.OK)
MISS = Outcome(Status.MISS)
EXISTS = Outcome(Status.EXISTS)


class Read(NamedTuple):
    """Read `len(dst)` bytes of the record `key`, beginning at byte `offset`, into `dst` (writable, flat, bytes).

    `landed` is where the store checksums a segment while it is still in the CPU's cache. A backend with
    `Capability.LANDING` calls it for each read that will be OK, before the call returns, once all of `dst` has arrived
    and will not be written again by this call; the others never call it. It is quick and does not raise. A wrapper
    that moves or changes bytes after the inner call must not claim the capability.
    """

    key: Key
    dst: memoryview
    offset: int = 0
    landed: Callable[[], None] | None = None


def without_landing(reads: Sequence[Read]) -> Sequence[Read]:
    """The reads without `landed`, for a wrapper that may change bytes after the inner call."""
    if all(read.landed is None for read in reads):
        return reads
    return [read._replace(landed=None) for read in reads]


class Write(NamedTuple):
    """Store the concatenation of `src` (flat byte views, gathered and never joined) under `key`.

    `parent` is a hint for eviction: the key of the chunk before this one in its prefix. Without its head a tail is
    worthless, so a policy takes tails first. None: unknown or none. `info` is what else a policy may use; None:
    nothing.
    """

    key: Key
    src: Sequence[memoryview]
    parent: Key | None = None
    info: RecordInfo | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.src))


class KeyInfo(NamedTuple):
    """One stored record, as `list` reports it.

    Attributes:
        nbytes: size of the record at rest, in bytes.
        last_used: seconds since the epoch of the last put or recorded access, or 0.0 if unknown.
    """

    key: Key
    nbytes: int
    last_used: float = 0.0


class Capability(enum.Flag):
    """What a backend can do beyond the minimum. Positive flags only: knowing nothing claims nothing."""

    NONE = 0
    RANGED_READ = enum.auto()  # an offset or a short dst costs about what it transfers
    NATIVE_BATCH = enum.auto()  # one call with many items is cheaper than many calls
    REGISTERED_MEMORY = enum.auto()  # uses `register`
    MAPPED_MEMORY = enum.auto()  # the other side reads registered memory that is a memfd in place: see `Slab(shared=)`
    LEASE = enum.auto()  # `lease` hands out stored records without copying
    LIST = enum.auto()  # `list` works
    TTL = enum.auto()  # expires records by itself
    SHARED = enum.auto()  # other processes or hosts see the same records
    DURABLE = enum.auto()  # records survive a restart of this process
    CAPACITY = enum.auto()  # enforces a limit in bytes by evicting
    LANDING = enum.auto()  # calls `Read.landed`


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend can bear and what it likes.

    Attributes:
        max_value_bytes: largest record accepted; a larger one is refused before anything is sent or evicted.
        alignment: offsets and lengths of reads that are multiples of this are fastest; bytes.
        lanes: useful number of concurrent calls (threads).
        preferred_io_bytes: size from which one I/O runs at full speed; the planner splits and joins towards it.
    """

    max_value_bytes: int = 1 << 40
    alignment: int = 1
    lanes: int = 4
    preferred_io_bytes: int = 4 << 20


class Backend(ABC):
    """One place that stores records. See the module's docstring for the contract.

    Subclasses take the parsed URL and typed options in `from_url`, set `name` (shown in errors and metrics,
    without secrets), `capabilities` and `limits` in `__init__`, and list their `options`.

    Attributes:
        identity: equal for two backends of this process that store in one and the same place, which a store refuses;
            None if that cannot be told.
        distance: how far the place is for this process: of the replicas of a key the nearest is read first. 0: near, or
            unknown. Asked once, when a store with several replicas is opened.
        metrics: what the backend counts besides its wrappers, under its own names; a store shows it in its `stats`.
            None: nothing.
    """

    options: ClassVar[Sequence[Option]] = ()
    name: str
    capabilities: Capability = Capability.NONE
    limits: Limits = Limits()
    identity: Hashable | None = None
    distance: int = 0
    metrics: Metrics | None = None

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> Backend:
        """The backend a URL names. `options` holds a typed value for each of `cls.options`.

        Raises:
            ConfigError: the URL or an option does not make sense, or an extra is not installed.
        """
        raise NotImplementedError(f"{cls.__name__} is not opened by URL")

    @abstractmethod
    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """OK with the record's size, or MISS, for each key. Does not change recency (several lookups must not
        wipe each other's) and does not verify content."""

    @abstractmethod
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        """Read byte ranges of records into the given memory. Several reads of one key come from one version of
        it; neighbouring ranges of one key, given next to each other, are fetched together where that is cheaper."""

    @abstractmethod
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        """Store records, each atomically and write-once. OK only after the backend's own acknowledgement."""

    @abstractmethod
    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """Remove records: OK, or MISS if there was none."""

    @abstractmethod
    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """Free the names of records whose bytes proved corrupt: OK, or MISS if there was none. Where possible the
        bytes are kept aside, out of `list` and out of reach of `get_into`."""

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """Read-only leases on records that already lie in host memory, without a copy; None for the others.
        The caller releases each. Backends without `Capability.LEASE` answer None throughout."""
        return [None] * len(keys)

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """The scheduler's waiting queue, first to run first: the keys of each job in prefix order. A backend with
        faster and slower places brings them nearer. Replaces what was announced before; an empty one ends it. Returns
        at once; a hint, so trouble with it is no error. Others do nothing."""
        return

    def register(self, slab: Slab) -> None:
        """Make a slab of a `BufferPool` known to the transport (RDMA registration). Called once per slab, before
        its memory is used; a no-op without `Capability.REGISTERED_MEMORY`."""
        return

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of stored records, in any order; records that come or go meanwhile may be in or out.

        Raises:
            PermanentError: the backend lacks `Capability.LIST`.
            TransientError: the deadline passed; raised when it is noticed, at the call or between pages.
        """
        raise PermanentError("this backend cannot list its records", backend=self.name, operation="list")

    @abstractmethod
    def close(self) -> None:
        """Release everything. Always returns, also with work in flight; may be called twice. Afterwards every
        other method raises `ClosedError`."""
