"""The seam between the backend and a client library: five calls, three implementations.

`native` (botocore for everything but the bytes), `boto3` (stock) and `aioboto3` (stock, on a loop of its own). A client
knows one bucket, object names and byte ranges, nothing of records. It raises what its library raises, `LinkError`, or
`BodyBroken`; `errors.Faults` maps all of it.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["BEHIND", "BodyBroken", "Client", "Found", "Got", "Source", "gather"]

logger = logging.getLogger("kvstore.backends.s3")

_SELDOM_RENEWED_S = 5.0  # credentials that are expired at their source are not asked for again and again


class Found(NamedTuple):
    """An object, as HEAD reports it.

    Attributes:
        nbytes: its size.
        etag: as sent, with quotes.
        age: seconds since it was last modified, by the server's own clock; 0.0 if unknown.
        metadata: user metadata, names in lower case.
    """

    nbytes: int
    etag: str
    age: float
    metadata: Mapping[str, str]


class Got(NamedTuple):
    """What a ranged GET brought.

    Attributes:
        nbytes: bytes that lie in the views now, from their beginning.
        etag, age: as in `Found`.
        total: size of the object; negative if the answer did not say.
        seconds: from the request to the first byte of the answer; 0.0 if unknown.
    """

    nbytes: int
    etag: str
    age: float
    total: int
    seconds: float = 0.0


BEHIND = Got(0, "", 0.0, -1)
"""The answer to a range that begins at or behind the end of its object (416): it names no version."""


class BodyBroken(Exception):
    """The body of a GET ended early. What is there is in place, and can be followed up from `nbytes`.

    Attributes:
        nbytes: bytes in place.
        etag: of the version that they come from.
        cause: what happened.
    """

    def __init__(self, nbytes: int, etag: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.nbytes = nbytes
        self.etag = etag
        self.cause = cause


class Client(ABC):
    """One bucket. Every call ends by its deadline (absolute monotonic seconds), with an error if need be."""

    name: str
    """The value of the option `client`."""
    endpoint: str
    """The URL that requests go to, without the bucket."""

    @abstractmethod
    def head(self, key: str, *, deadline: float) -> Found | None:
        """The object, or None if there is none."""

    @abstractmethod
    def get(
        self, key: str, start: int, views: Sequence[memoryview], *, etag: str | None, deadline: float
    ) -> Got | None:
        """Fill `views` with the object's bytes from `start` on; None if there is no such object.

        Fewer bytes only where the object ends; `BEHIND` if that is before `start`. With `etag` only from that version.

        Raises:
            BodyBroken: the body was cut after the answer had begun.
        """

    @abstractmethod
    def put(self, operation: str, params: Mapping[str, Any], source: Source, *, deadline: float) -> dict[str, Any]:
        """PutObject or UploadPart with the body `source`. The answer is botocore's."""

    @abstractmethod
    def invoke(self, operation: str, params: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        """Any operation without a large body, by botocore's names ("ListObjectsV2"). The bucket is filled in."""

    @abstractmethod
    def reopen(self) -> None:
        """Begin anew with a new session of the library, which asks the credential chain again."""

    def __init__(self) -> None:
        self.generation = 0
        self._renew_lock = threading.Lock()
        self._renewed_at = -_SELDOM_RENEWED_S
        self._renewing: threading.Event | None = None

    def renew(self, failed: int, *, deadline: float) -> bool:
        """Forget credentials that the service called expired. One of many lanes does it, the others wait for it.

        Args:
            failed: the `generation` that the failed call began with.

        Returns:
            True if there may be new ones, and another try makes sense.
        """
        with self._renew_lock:
            if self.generation != failed:
                return True
            if self._renewing is None:
                if time.monotonic() - self._renewed_at < _SELDOM_RENEWED_S:
                    return False
                self._renewed_at = time.monotonic()
                self._renewing = threading.Event()
                threading.Thread(target=self._renew, name="kvstore-s3-renew", daemon=True).start()
            renewed = self._renewing
        renewed.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        return self.generation != failed

    def _renew(self) -> None:
        """In a thread: the chain may ask other services, with timeouts of their own."""
        done = False
        try:
            self.reopen()
            done = True
        except Exception as error:  # noqa: BLE001 - the call that needed it has the error that counts
            logger.warning("new credentials could not be fetched: %s", type(error).__name__)
        finally:
            with self._renew_lock:
                self.generation += done
                renewed, self._renewing = self._renewing, None
            if renewed is not None:
                renewed.set()

    def after_fork(self) -> None:
        """In a forked child: drop what is the parent's, without a word to the service."""
        self._renew_lock = threading.Lock()

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. May be called twice."""


class Source(io.RawIOBase):
    """Views as one seekable file, for client libraries. The native client takes `views` and copies nothing.

    After `revoke` every read fails: a call that was given up cannot read memory that is no longer ours.
    """

    def __init__(self, views: Sequence[memoryview], nbytes: int) -> None:
        super().__init__()
        self.views = views
        self.nbytes = nbytes
        self._starts: list[int] = []
        total = 0
        for view in views:
            self._starts.append(total)
            total += len(view)
        self._at = 0
        self._view = 0  # index of the view that holds `_at`
        self._revoked = False

    def __len__(self) -> int:
        return self.nbytes

    def __bool__(self) -> bool:
        return True

    def revoke(self) -> None:
        self._revoked = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {0: 0, 1: self._at, 2: self.nbytes}[whence]
        self._at = min(max(0, base + offset), self.nbytes)
        self._view = 0
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._revoked:
            raise OSError("the memory of this put was given back")
        into = memoryview(buffer).cast("B")
        done = 0
        while done < len(into) and self._view < len(self.views):
            view = self.views[self._view]
            begin = self._at - self._starts[self._view]
            if begin >= len(view):
                self._view += 1
                continue
            count = min(len(view) - begin, len(into) - done)
            into[done : done + count] = view[begin : begin + count]
            done += count
            self._at += count
        return done


def gather(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The views of bytes `start` to `end` of the concatenation of `views`."""
    found: list[memoryview] = []
    at = 0
    for view in views:
        begin, stop = max(start - at, 0), min(end - at, len(view))
        if begin < stop:
            found.append(view[begin:stop])
        at += len(view)
        if at >= end:
            break
    return found
