"""What reads, writes and metadata share: the client with one retry after expired credentials, lanes, pace, errors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError, NoCredentialsError

from kvstore.errors import KVStoreError, PermanentError

from .client import Client, Found, Got, Source
from .errors import EXPIRED, Faults, Throttled, fault_of
from .http import LinkError
from .lanes import Lanes, Pace
from .misses import MissMemory
from .options import Settings

__all__ = ["Calls"]

logger = logging.getLogger("kvstore.backends.s3")

T = TypeVar("T")

_WARN_AGAIN_S = 300.0  # after which the same trouble is logged again
_WARNINGS = 16
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
        self._warned: dict[str, float] = {}
        self._telling = threading.Lock()
        self._bucket_seen = False
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
        if isinstance(mapped, PermanentError):
            self._warn(mapped.message)
        if isinstance(mapped, Throttled):
            self.count("throttled")
            self.pace.note(throttled=True)
            self.meta_pace.note(throttled=True)
        return mapped

    def _warn(self, message: str) -> None:
        """An engine sees misses where nothing can be read, for instance because the bucket's name is wrong: say it in
        the log, once in a while."""
        now = time.monotonic()
        with self._lock:
            if self._warned.get(message, -math.inf) > now - _WARN_AGAIN_S:
                return
            if len(self._warned) >= _WARNINGS:
                self._warned.clear()
            self._warned[message] = now
        logger.warning("%s: %s", self.name, message)

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

    def head(self, name: str, deadline: float, *, lookup: bool = False) -> Found | None:
        """Ask for an object; None: there is none.

        Args:
            lookup: nothing else follows that would show whether there is a bucket at all.
        """

        def call() -> Found | None:
            generation = self.client.generation
            try:
                found = self.client.head(name, deadline=deadline)
                if found is not None:
                    self._bucket_seen = True
                elif lookup and not self._bucket_seen:
                    self._see_bucket(name, deadline)
                return found
            except ClientError as error:
                fault = fault_of(error)
                if fault is None or fault.code not in ("400", "403"):
                    raise
                answer = self._reason(error.response, name, generation, deadline)
            raise ClientError(answer, "HeadObject")

        return self._call(call, deadline, self.meta_pace)

    def _see_bucket(self, name: str, deadline: float) -> None:
        """Once, after a HEAD that found nothing: its answer is the same where there is no bucket, that to a GET is not.

        Raises:
            ClientError: there is no bucket.
        """
        with self._lock:
            if self._bucket_seen:
                return
            self._bucket_seen = True  # one asks, and the others do not wait for it
        try:
            self.client.get(name, 0, [memoryview(bytearray(1))], etag=None, deadline=deadline)
        except Exception as error:
            fault = fault_of(error)
            self._bucket_seen = fault is not None and fault.code != "NoSuchBucket"
            if fault is not None and not self._bucket_seen:
                raise

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
        got = self._call(lambda: self.client.get(name, start, views, etag=etag, deadline=deadline), deadline, self.pace)
        self._bucket_seen = True
        return got

    def put(self, operation: str, params: Mapping[str, Any], source: Source, deadline: float) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            source.seek(0)
            return self.client.put(operation, params, source, deadline=deadline)

        answer = self._call(call, deadline, self.pace)
        self._bucket_seen = True
        return answer

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
