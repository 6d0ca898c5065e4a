"""What reads, writes and metadata share: the client with one retry after expired credentials, lanes, pace, errors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError, NoCredentialsError

from kvstore.errors import KVStoreError

from .client import Client, Found, Got, Source
from .errors import EXPIRED, Faults, Throttled, fault_of
from .http import LinkError
from .lanes import Lanes, Pace
from .misses import MissMemory
from .options import Settings

__all__ = ["Calls"]

logger = logging.getLogger("kvstore.backends.s3")

T = TypeVar("T")

_TOLD_S = 1.0  # how long the reason for refused HEADs is believed to be the same


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
        self._telling = threading.Lock()
        self._told: tuple[float, int, dict[str, Any]] = (-math.inf, 0, {})
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
        return self._noted(self.faults.of(error, operation, key))

    def refused(self, said: Mapping[str, Any], operation: str, key: bytes) -> KVStoreError:
        """The same for one entry of `Errors` in an answer of DeleteObjects."""
        return self._noted(self.faults.refused(said, operation, key))

    def _noted(self, mapped: KVStoreError) -> KVStoreError:
        if isinstance(mapped, Throttled):
            self.count("throttled")
            self.pace.note(throttled=True)
            self.meta_pace.note(throttled=True)
        return mapped

    def _call(self, call: Callable[[], T], deadline: float, pace: Pace) -> T:
        """`call`, and once more if its credentials have expired, or there were none, and now there are new ones."""
        generation = self.client.generation
        try:
            answer = call()
        except Exception as error:
            fault = fault_of(error)
            suspect = isinstance(error, NoCredentialsError) or (fault is not None and fault.code in EXPIRED)
            if not suspect or time.monotonic() >= deadline or not self.client.renew(generation, deadline=deadline):
                raise
            self.count("retried_expired")
            answer = call()
        pace.note(throttled=False)
        return answer

    def head(self, name: str, deadline: float) -> Found | None:
        def call() -> Found | None:
            generation = self.client.generation
            try:
                return self.client.head(name, deadline=deadline)
            except ClientError as error:
                fault = fault_of(error)
                if fault is None or fault.code not in ("400", "403"):
                    raise
                answer = self._reason(error.response, name, generation, deadline)
            raise ClientError(answer, "HeadObject")

        return self._call(call, deadline, self.meta_pace)

    def _reason(self, answer: dict[str, Any], name: str, generation: int, deadline: float) -> dict[str, Any]:
        """The answer that says why a HEAD was refused. Its own has no body, so no error code; that to a GET has. Asked
        once for many: access, a wrong clock and expired credentials concern all keys."""
        if not self._telling.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise LinkError("deadline", "the deadline passed")
        try:
            told_at, of, told = self._told
            if of == generation and time.monotonic() - told_at < _TOLD_S:
                return told
            try:
                self.client.get(name, 0, [memoryview(bytearray(1))], etag=None, deadline=deadline)
            except ClientError as error:
                answer = error.response
            except Exception as error:  # noqa: BLE001 - the link's trouble is not the reason
                logger.debug("%s: no reason for a refused HEAD: %s", self.name, type(error).__name__)
            self._told = (time.monotonic(), generation, answer)
            return answer
        finally:
            self._telling.release()

    def get(self, name: str, start: int, views: Sequence[memoryview], etag: str | None, deadline: float) -> Got | None:
        return self._call(
            lambda: self.client.get(name, start, views, etag=etag, deadline=deadline), deadline, self.pace
        )

    def put(self, operation: str, params: Mapping[str, Any], source: Source, deadline: float) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            source.seek(0)
            return self.client.put(operation, params, source, deadline=deadline)

        return self._call(call, deadline, self.pace)

    def invoke(self, operation: str, params: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        return self._call(lambda: self.client.invoke(operation, params, deadline=deadline), deadline, self.meta_pace)

    def after_fork(self) -> None:
        """In a forked child, where nothing works but `close`."""
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self.misses.after_fork()
        self.client.after_fork()
        self.lanes.after_fork()
        self.meta.after_fork()

    def close(self) -> None:
        self.client.close()
        self.lanes.close(1.0)
        self.meta.close(1.0)
