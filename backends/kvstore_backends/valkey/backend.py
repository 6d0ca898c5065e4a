"""`valkey`: records as strings in Valkey or Redis: one server, a primary with replicas, or a cluster.

A record is one name (`names`), written once (`writes`), read by ranges straight into the caller's memory (`reads`).
Who does what: `resp` and `link` speak the protocol, `exchange` drives pipelines to several servers from one thread,
`pool` keeps connections, `topology` knows who owns which slot, `dispatch` sends jobs there, and on where they are sent;
`errors` maps what goes wrong.

No client library: they give values as objects of their own. Measured here, receiving 16 MiB values costs 0.2 to 0.3 CPU
seconds per GiB this way, 0.6 with redis-py and valkey-py with their C parsers and with valkey-glide, 3 without; and
none of them keeps a deadline against a server that sends a byte now and then (docs/valkey.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.backend import Backend, Capability, KeyInfo, Limits, Outcome, Read, Write
from kvstore.errors import ClosedError, ConfigError, PermanentError
from kvstore.keys import Key
from kvstore.registry import BackendURL

from .dispatch import Dispatch
from .errors import Faults, LinkError, ReplyError
from .facts import Facts, read_facts
from .meta import Meta
from .options import OPTIONS, Settings, settings_from_url
from .pool import Pool
from .reads import Reader
from .topology import Topology
from .writes import Writer

__all__ = ["ValkeyBackend"]

logger = logging.getLogger("kvstore.backends.valkey")

_PREFERRED_IO_BYTES = 4 << 20

_instances: weakref.WeakSet[ValkeyBackend] = weakref.WeakSet()


class ValkeyBackend(Backend):
    """Records in Valkey or Redis, below one prefix.

    The servers are asked who they are when it opens. If they cannot be reached, it opens all the same, says so in the
    log, and asks again when it is used.

    Args:
        settings: where, and how.

    Raises:
        ConfigError: the settings make no sense, or the servers answered and will never let us in: wrong password,
            certificate not trusted, too old.
    """

    options = OPTIONS

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.name
        self._faults = Faults(self.name, (settings.username, settings.password, settings.sentinel_password))
        self._pool = Pool(settings)
        self._topology = Topology(settings, self._pool)
        self._dispatch = Dispatch(settings, self._pool, self._topology)
        self._reader = Reader(settings, self._dispatch, self._faults)
        self._writer = Writer(settings, self._dispatch, self._faults)
        self._meta = Meta(settings, self._dispatch, self._topology, self._faults, self._reader.seen)
        self._lock = threading.Lock()
        self._closed = ""
        self.capabilities = (
            Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.LIST | Capability.SHARED | Capability.DURABLE
            | Capability.LANDING | (Capability.TTL if settings.ttl is not None else Capability.NONE)
        )  # fmt: skip
        self.limits = Limits(
            max_value_bytes=settings.max_value_bytes, lanes=settings.lanes, preferred_io_bytes=_PREFERRED_IO_BYTES
        )
        self.identity = ("valkey", frozenset(settings.seeds), settings.sentinel, settings.database, settings.prefix)
        self.facts = Facts()
        try:
            self._meet()
        except BaseException:
            self._pool.close()
            raise
        _instances.add(self)

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> ValkeyBackend:
        """`valkey://host:port[,host:port]/prefix?cluster=…`, or `valkeys://` over TLS; see `OPTIONS`."""
        return cls(settings_from_url(url, options))

    def __repr__(self) -> str:
        return f"ValkeyBackend({self.name!r})"

    @property
    def counters(self) -> dict[str, int]:
        """How often something unusual was dealt with: `moved` and `asked` (slots elsewhere), `refreshes` of the map,
        `broken` connections; and `connections` opened so far."""
        return {**self._topology.counters, **self._dispatch.counters, "connections": self._pool.opened}

    def _meet(self) -> None:
        """Ask the servers who they are, and what they do when they are full; once, at open."""
        deadline = time.monotonic() + 2 * self.settings.connect_timeout
        try:
            self.facts = read_facts(self._topology.view(deadline), self._dispatch, deadline)
        except (LinkError, ReplyError) as error:
            mapped = self._faults.of(error, "open")
            if isinstance(mapped, PermanentError):
                raise ConfigError(f"{self.name}: {mapped.message}", cause=mapped.cause) from mapped.cause
            logger.warning(
                "%s cannot be reached now, and is tried again when it is used: %s", self.name, mapped.message
            )
            return
        for advice in self.facts.advice:
            logger.warning("%s: %s", self.name, advice)

    def _check(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(self._closed, backend=self.name, operation=operation)

    def _begin(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        """The outcomes of a call that comes too late; None: go on."""
        self._check(operation)
        if time.monotonic() >= deadline:
            return [self._faults.late(operation, key) for key in keys]
        return None

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """See `Backend.stat`. No body is sent; before Redis 7.2 it counts as a use of the record."""
        return self._begin("stat", keys, deadline) or self._meta.stat(keys, deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        """See `Backend.get_into`. One pipeline for each server."""
        late = self._begin("get", [read.key for read in reads], deadline)
        return late or self._reader.get(reads, deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        late = self._begin("put", [write.key for write in writes], deadline)
        return late or self._writer.put(writes, deadline)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._begin("delete", keys, deadline) or self._meta.delete(keys, deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """See `Backend.quarantine`. The bytes are kept under PREFIX/quarantine/ for a while (option `quarantine`)."""
        return self._begin("quarantine", keys, deadline) or self._meta.quarantine(keys, deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of up to some 1000 records, by SCAN. `last_used` is what OBJECT IDLETIME says; 0.0 with LFU policies,
        which do not track it."""
        self._check("list")
        return self._meta.pages(lambda: self._check("list"), deadline)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = "the backend is closed"
        _instances.discard(self)
        self._pool.close()

    def _after_fork(self) -> None:
        """In the child: the connections are the parent's. It opens its own."""
        self._lock = threading.Lock()
        for part in (self._pool, self._topology, self._dispatch, self._reader):
            part.after_fork()


def _after_fork_in_child() -> None:
    for backend in list(_instances):
        backend._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
