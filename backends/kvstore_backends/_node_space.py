"""`Namespace` and `Space`: one tenant of a node, as it is configured and as it runs.

Each has memory, a folder, a remote place and limits of its own, so nothing crosses, and no tenant can evict another's
records.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.backend import MISS, Outcome, Status
from kvstore.control.journal import Journal
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key

from ._memory_reservation import ALIGNMENT, Expiry
from ._node_ahead import Ahead
from ._node_below import Below
from ._node_gate import Gate
from ._node_tiers import MEMORY
from .memory import MemoryBackend

__all__ = ["Counts", "Namespace", "Space", "share_memory"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """One tenant of a node.

    Attributes:
        name: as clients give it; "" is the default one.
        token: its secret, which clients must prove to know; b"": open to everybody. Never shown.
        memory_bytes: its share of the node's memory; 0: an equal part of what the others leave.
        policy: what goes when its memory is full (`kvstore.eviction`).
        disk: URL of a folder below the memory, `file:///nvme/kv?bytes=400GiB`; "": none.
        ttl: seconds after which a record goes; math.inf: never.
        ttl_from: "use": counted from the last get or put; "put": from the put that stored it.
        remote: URL of what lies below memory and disk, anything that `kvstore.open_store` takes, which other nodes may
            share; "": none.

    Raises:
        ConfigError: a value that makes no sense.
    """

    name: str = ""
    token: bytes = field(default=b"", repr=False)
    memory_bytes: int = 0
    policy: str = "lru"
    disk: str = ""
    ttl: float = math.inf
    ttl_from: str = "use"
    remote: str = ""

    def __post_init__(self) -> None:
        if len(self.name.encode()) > 256 or not self.name.isprintable():
            raise ConfigError(f"{self.shown}: a name of a namespace is at most 256 bytes of printable text")
        if self.ttl_from not in {"use", "put"}:
            raise ConfigError(f"{self.shown}: ttl_from is {self.ttl_from!r}; it must be use or put")
        if self.ttl <= 0:
            raise ConfigError(f"{self.shown}: ttl is {self.ttl:g} s; it must be more than 0")
        if self.memory_bytes < 0:
            raise ConfigError(f"{self.shown}: {self.memory_bytes} bytes of memory")
        if (self.disk or self.remote) and self.policy == "none":
            raise ConfigError(
                f"{self.shown}: with policy=none nothing ever leaves the memory, so nothing can be read back into it "
                "from the disk or from what is remote; use another policy, or neither of them"
            )

    @property
    def shown(self) -> str:
        """For messages."""
        return f"namespace {self.name[:80]!r}" if self.name else "the default namespace"


def share_memory(namespaces: Sequence[Namespace], total: int) -> list[int]:
    """How many bytes each namespace gets of `total`.

    Raises:
        ConfigError: they want more than there is, or nothing is left for those that want an equal part.
    """
    asked = sum(namespace.memory_bytes for namespace in namespaces)
    rest = [namespace for namespace in namespaces if not namespace.memory_bytes]
    left = (total - asked) // max(1, len(rest))
    if asked > total or (rest and left < ALIGNMENT):
        raise ConfigError(
            f"the node has {total} bytes of memory; its namespaces want {asked}"
            + (f", which leaves too little for {', '.join(n.shown for n in rest)}" if rest else "")
        )
    return [namespace.memory_bytes or left for namespace in namespaces]


@dataclass(slots=True)
class Counts:
    """What happened in a namespace since the node started. Records, if it does not say otherwise.

    Attributes:
        hits, misses: records that were read, leased, or not there. One that is read in parts counts with its beginning.
        from_below: hits that were brought into memory for it.
        absent: records that were asked for, and not there (lookups).
        puts, exists: records stored; offered, but there already.
        refused: records for which there was no room, or that are too large.
        failed: reads that failed for another reason.
        postponed: reads that did not fit into the same answer; clients ask for them again.
        deleted, quarantined: records.
        bytes_in, bytes_out: bytes of records received and sent.
        busy: requests that were sent away because there was too much under way.
        late: requests whose deadline had passed when they came.
        abandoned: writes that ended in the middle: the connection broke, or the bytes never came.
    """

    hits: int = 0
    misses: int = 0
    from_below: int = 0
    absent: int = 0
    puts: int = 0
    exists: int = 0
    refused: int = 0
    failed: int = 0
    postponed: int = 0
    deleted: int = 0
    quarantined: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy: int = 0
    late: int = 0
    abandoned: int = 0


class Space:
    """A namespace at work.

    Args:
        nbytes: its memory.
        shared: the memory is shared memory, for clients on this host.
        share: part of the memory that answers and writes under way may hold; the backlog of the disk may hold half of
            what is left.
        credits_bytes: what one client may hold of that.
        clock: for ttl, seconds since the epoch.
        journal: where it is noted what comes into memory and disk, and what leaves them; None: nowhere.

    Raises:
        ConfigError: see `MemoryBackend` and `Below`.
    """

    def __init__(
        self, namespace: Namespace, nbytes: int, *, shared: bool, share: float, credits_bytes: int,
        clock: Callable[[], float], journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.namespace = namespace
        self._journal = journal
        expiry = Expiry(namespace.ttl, namespace.ttl_from == "use", clock)
        name = f"node:{namespace.name}" if namespace.name else "node"
        self.backend = MemoryBackend(nbytes, policy=namespace.policy, name=name, shared=shared, expiry=expiry)
        self.store = self.backend.store
        pool = self.store.pool.nbytes
        self.gate = Gate(int(pool * share), credits_bytes)
        if journal is not None:
            self.store.note = functools.partial(self._note, MEMORY)
        self.below: Below | None = None
        if namespace.disk or namespace.remote:
            backlog_bytes = int(pool * (1 - share) / 2)
            try:
                self.below = Below(
                    namespace.disk, namespace.remote, self.store, backlog_bytes=backlog_bytes, note=self._note
                )
            except ConfigError as error:
                self.backend.close()
                raise ConfigError(f"{namespace.shown}: {error.message}", cause=error) from error
            except BaseException:
                self.backend.close()
                raise
        self.ahead = Ahead(self.store, self.below)
        self._lock = threading.Lock()
        self._counts = Counts()
        self._next_memory = self._next_disk = 0.0

    def _note(self, tier: str, op: str, keys: Sequence[Key]) -> None:
        if self._journal is not None:
            self._journal.append(self.namespace.name, tier, op, keys)

    def count(self, **more: int) -> None:
        """Add to the counts."""
        counts = self._counts
        with self._lock:
            for name, value in more.items():
                setattr(counts, name, getattr(counts, name) + value)

    @property
    def hits_in_memory(self) -> int:
        """Records that were had from memory. Only grows."""
        with self._lock:
            return self._counts.hits - self._counts.from_below

    def delete(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """As `Backend.delete`, of memory and what lies below together."""
        return self._remove(keys, deadline, quarantine=False)

    def quarantine(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """As `Backend.quarantine`, of memory and what lies below together, but not of records that were stored anew and
        that nobody has read since."""
        return self._remove(keys, deadline, quarantine=True)

    def _remove(self, keys: Sequence[Key], deadline: float, *, quarantine: bool) -> list[Outcome]:
        """Below first: what is still below can come up again. What cannot be removed there stays above as well."""
        operation = "quarantine" if quarantine else "delete"
        above: Callable[..., list[Outcome]] = getattr(self.backend, operation)
        if self.below is None:
            return above(keys, deadline=deadline)
        below: Callable[..., list[Outcome]] = getattr(self.below.backend, operation)
        with self.below.removing(keys, deadline) as late:
            kept: set[Key] = set()
            if quarantine:
                with self.store.lock:
                    records = self.store.look_locked(keys)
                kept = {
                    key for key, record in zip(keys, records, strict=True) if record is not None and not record.read
                }
            writing = TransientError(
                "the record is being written", backend=self.below.backend.name, operation=operation
            )
            outcomes = [Outcome.failed(writing) if key in late else MISS for key in keys]
            todo = [index for index, key in enumerate(keys) if key not in late and key not in kept]
            done = below([keys[index] for index in todo], deadline=deadline)
            todo = self._merge(outcomes, todo, done)
            self._merge(outcomes, todo, above([keys[index] for index in todo], deadline=math.inf))
        return outcomes

    @staticmethod
    def _merge(outcomes: list[Outcome], indices: Sequence[int], done: Sequence[Outcome]) -> list[int]:
        """Take what was done at `indices` over; those without an error."""
        for index, outcome in zip(indices, done, strict=True):
            if outcome.status is not Status.MISS:
                outcomes[index] = outcome
        return [index for index, outcome in zip(indices, done, strict=True) if outcome.error is None]

    def sweep(self) -> None:
        """Have noted what has left the memory. Remove what has become too old, if it is time to look: ten times per
        ttl, but at most every second; in memory at least every minute, on disk at least every hour. Cheap otherwise."""
        with self.store.lock:
            self.store.tell_locked()
        if self.below is not None:
            self.below.look_again()
        ttl, now = self.namespace.ttl, time.monotonic()
        if ttl == math.inf:
            return
        if now >= self._next_memory:
            self._next_memory = now + min(60.0, max(1.0, ttl / 10))
            self.store.expire()
        if self.below is not None and now >= self._next_disk:
            self._next_disk = now + min(3600.0, max(1.0, ttl / 10))
            self.below.sweep()

    def stats(self) -> dict[str, Any]:
        """What it holds, and its counts; see `Counts` and `NodeServer.stats`."""
        memory = self.backend.stats()
        with self._lock:
            found: dict[str, Any] = {name: getattr(self._counts, name) for name in Counts.__slots__}
        found.update(
            records=memory.records, nbytes=memory.nbytes, capacity=memory.capacity, in_use=memory.in_use,
            evicted=memory.evicted, expired=memory.expired, held=self.gate.used, waiting=self.gate.waiting,
        )  # fmt: skip
        found.update(self.ahead.counts())
        if self.below is not None:
            found.update({f"disk_{name}": value for name, value in self.below.counts().items()})
        return found

    def close(self, drain_s: float) -> None:
        """Write what waits for what lies below, for `drain_s` seconds at most, and give everything back."""
        end = time.monotonic() + drain_s
        self.gate.close()
        self.ahead.close()
        if self.below is not None:
            self.below.close(max(0.0, end - time.monotonic()))
        self.backend.close()
