"""`s3`: records as objects in S3, S3 Express One Zone, or anything that speaks their protocol.

A record is one object, written once (`If-None-Match: *`) and read by ranges straight into the caller's memory. Who does
what: `options`, `names` and `express` say where; `client` is the seam to a library, `native`, `stock` and `aio` are
behind it; `reads`, `writes`, `meta` and `expiry` are the operations; `errors` maps what goes wrong, `lanes` are the
threads.

Nothing is retried here but what the service never saw (an idle connection that had been closed), what is known to
help (expired credentials, once) and the rest of a broken body. The wrappers around the backend do the retrying.
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
from kvstore.errors import ClosedError
from kvstore.keys import Key
from kvstore.registry import BackendURL

from .calls import Calls
from .client import Client
from .expiry import Expiry
from .express import zone_of
from .meta import Meta
from .names import record_name
from .options import OPTIONS, Settings, settings_from_url
from .reads import Reader
from .session import make_session
from .writes import MAX_OBJECT_BYTES, Writer
from .zones import own_zone

__all__ = ["S3Backend", "open_client"]

logger = logging.getLogger("kvstore.backends.s3")

_PREFERRED_IO_BYTES = 8 << 20

_instances: weakref.WeakSet[S3Backend] = weakref.WeakSet()


def open_client(settings: Settings) -> Client:
    """The client that the settings name. Raises `ConfigError` if it is not installed or refuses them."""
    if settings.client == "native":
        from .native import NativeClient, uses_proxy

        native = NativeClient(settings)
        if not uses_proxy(settings, native.endpoint):
            return native
        native.close()
        logger.info(
            "%s: the environment names a proxy for it; client=boto3 is used, which knows proxies", settings.name
        )
    if settings.client == "aioboto3":
        from .aio import AioClient

        return AioClient(settings)
    from .stock import StockClient

    return StockClient(settings)


class S3Backend(Backend):
    """Records as objects of one bucket, below one prefix.

    Args:
        settings: where, and how.
        client: for tests; default: `open_client(settings)`.

    Raises:
        ConfigError: the settings make no sense, or something is not installed.
    """

    options = OPTIONS

    def __init__(self, settings: Settings, *, client: Client | None = None) -> None:
        self.settings = settings
        self.name = settings.name
        self._calls = Calls(settings, client or open_client(settings))
        self._expiry = Expiry(self._calls)
        self._reader = Reader(self._calls)
        try:
            self._writer = Writer(self._calls, self._expiry)
        except BaseException:
            self._calls.close()
            raise
        self._meta = Meta(self._calls, self._expiry)
        self._lock = threading.Lock()
        self._closed = ""
        self._distance = -1  # not known yet
        self.identity = ("s3", self.client.endpoint, settings.bucket, settings.prefix)
        self.capabilities = (
            Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.LIST | Capability.SHARED | Capability.DURABLE
            | Capability.LANDING | (Capability.TTL if settings.ttl is not None else Capability.NONE)
        )  # fmt: skip
        self.limits = Limits(
            max_value_bytes=MAX_OBJECT_BYTES, lanes=settings.lanes, preferred_io_bytes=_PREFERRED_IO_BYTES
        )
        _instances.add(self)

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> S3Backend:
        """`s3://bucket/prefix?region=…&endpoint_url=…`; see `OPTIONS`."""
        return cls(settings_from_url(url, options))

    def __repr__(self) -> str:
        return f"S3Backend({self.name!r}, client={self.client.name!r})"

    @property
    def client(self) -> Client:
        """The client behind the seam."""
        return self._calls.client

    @property
    def counters(self) -> dict[str, int]:
        """How often something unusual was dealt with: `follow_ups` of broken bodies, `renewals` of records,
        `retried_expired`, `throttled`, `parts_left` to the sweep."""
        return self._calls.counters()

    @property
    def distance(self) -> int:  # type: ignore[override]  # see `Backend.distance`
        """0: S3 Express in this machine's zone, or nobody knows in which; 1: in another zone; 2: S3, which has none."""
        if self._distance < 0:
            self._distance = 2
            if self.settings.express:
                zone = own_zone(self.settings.zone, make_session(self.settings))
                self._distance = int(zone is not None and zone != zone_of(self.settings.bucket))
        return self._distance

    @property
    def part_size(self) -> int:
        """Bytes of one request when a large read is split, as adapted."""
        return self._reader.splitter.size

    def object_name(self, key: Key) -> str:
        """The name of the object that holds the record of `key`."""
        return record_name(self.settings.prefix, key)

    def _check(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(self._closed, backend=self.name, operation=operation)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """See `Backend.stat`. One HEAD for each key, `meta_lanes` of them at once."""
        self._check("stat")
        return self._meta.stat(keys, deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        """See `Backend.get_into`. Ranges of one key at most `gap` bytes apart share a request."""
        self._check("get")
        if time.monotonic() >= deadline:
            return [self._calls.faults.late("get", read.key) for read in reads]
        return self._reader.get(reads, deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self._check("put")
        if time.monotonic() >= deadline:
            return [self._calls.faults.late("put", write.key) for write in writes]
        return self._writer.put(writes, deadline)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self._check("delete")
        if time.monotonic() >= deadline:
            return [self._calls.faults.late("delete", key) for key in keys]
        return self._meta.delete(keys, deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """See `Backend.quarantine`. The bytes stay under `quarantine/` until a lifecycle rule or a sweep."""
        self._check("quarantine")
        if time.monotonic() >= deadline:
            return [self._calls.faults.late("quarantine", key) for key in keys]
        return self._meta.quarantine(keys, self._reader.seen, deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of up to 1000 records, unordered on S3 Express. `last_used` is the time of the put or renewal."""
        self._check("list")
        return self._meta.pages(lambda: self._check("list"), deadline)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = "the backend is closed"
        _instances.discard(self)
        self._calls.close()

    def _after_fork(self) -> None:
        """In the child: connections and threads are the parent's."""
        self._lock = threading.Lock()
        self._closed = "this backend was opened before fork(); open another one in the child"
        self._calls.after_fork()


def _after_fork_in_child() -> None:
    for backend in list(_instances):
        backend._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
