"""What reads, writes and metadata share: the client with one retry after expired credentials, lanes, pace, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.errors import KVStoreError

from .client import Client, Found, Got, Source
from .errors import EXPIRED, Faults, Throttled, fault_of
from .lanes import Lanes, Pace
from .misses import MissMemory
from .options import Settings

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """One open bucket.

    Attributes:
        lanes, meta: threads for bodies and for small requests.
        pace: shrinks both while the service throttles.
    """

    def __init__(self, settings: Settings, client: Client) -> None:
        self.settings = settings
        self.client = client
        self.name = settings.name
        self.faults = Faults(self.name, settings.bucket)
        self.lanes = Lanes(settings.lanes, "s3")
        self.meta = Lanes(settings.meta_lanes, "s3-meta")
        self.pace = Pace(settings.lanes)
        self.meta_pace = Pace(settings.meta_lanes)
        self.misses = MissMemory(settings.miss_memory)
        self._lock = threading.Lock()
        self._counters = {"follow_ups": 0, "renewals": 0, "retried_expired": 0, "throttled": 0, "parts_left": 0}

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counters[what] += number

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def expired(self, age: float) -> bool:
        """Whether a record that was stored or renewed `age` seconds ago counts as a miss."""
        return self.settings.ttl is not None and age >= self.settings.ttl

    def failed(self, error: Exception, operation: str, key: bytes | None = None) -> KVStoreError:
        """The error of ours for whatever a call raised; takes note of throttling."""
        mapped = self.faults.of(error, operation, key)
        if isinstance(mapped, Throttled):
            self.count("throttled")
            self.pace.note(throttled=True)
            self.meta_pace.note(throttled=True)
        return mapped

    def _once_more(self, call: Callable[[], T], deadline: float, *, bodiless: bool = False) -> T:
        """`call`, and once more if the service says that the credentials have expired and there are new ones.

        Args:
            bodiless: an answer to HEAD: it has no error code, so the status is all there is.
        """
        generation = self.client.generation
        try:
            return call()
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            suspect = fault.code in EXPIRED or (bodiless and fault.code in ("400", "403"))
            if not suspect or time.monotonic() >= deadline or not self.client.renew(generation, deadline=deadline):
                raise
        self.count("retried_expired")
        return call()

    def head(self, name: str, deadline: float) -> Found | None:
        found = self._once_more(lambda: self.client.head(name, deadline=deadline), deadline, bodiless=True)
        self.meta_pace.note(throttled=False)
        return found

    def get(self, name: str, start: int, views: Sequence[memoryview], etag: str | None, deadline: float) -> Got | None:
        got = self._once_more(lambda: self.client.get(name, start, views, etag=etag, deadline=deadline), deadline)
        self.pace.note(throttled=False)
        return got

    def put(self, operation: str, params: Mapping[str, Any], source: Source, deadline: float) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            source.seek(0)
            return self.client.put(operation, params, source, deadline=deadline)

        return self._once_more(call, deadline)

    def invoke(self, operation: str, params: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        return self._once_more(lambda: self.client.invoke(operation, params, deadline=deadline), deadline)

    def after_fork(self) -> None:
        """In a forked child, where nothing works but `close`."""
        self._lock = threading.Lock()
        self.misses.after_fork()
        self.client.after_fork()
        self.lanes.after_fork()
        self.meta.after_fork()

    def close(self) -> None:
        self.client.close()
        self.lanes.close(1.0)
        self.meta.close(1.0)
