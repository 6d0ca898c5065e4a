"""Writing: once, by If-None-Match, in one request or in parts."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.backend import EXISTS, MISS, Outcome, Status, Write
from kvstore.errors import PermanentError
from kvstore.keys import Key

from .calls import Calls
from .checksums import Checksum
from .client import Source, gather
from .errors import fault_of
from .expiry import Expiry, refuses_condition
from .http import LinkError
from .names import probe_name, record_name
from .session import is_aws

__all__ = ["MAX_OBJECT_BYTES", "Writer"]

logger = logging.getLogger("kvstore.backends.s3")

MAX_OBJECT_BYTES = 5 << 40
_MAX_PARTS = 10_000
_HEAD_FROM = 1 << 20
_ABORT_S = 5.0


class _There(Exception):
    """The service says that the object exists."""


class Writer:
    """`Backend.put`."""

    def __init__(self, calls: Calls, expiry: Expiry) -> None:
        self._calls = calls
        self._expiry = expiry
        self._checksum = Checksum(calls.settings.checksum)
        mode = calls.settings.conditional_writes
        self._conditional: bool | None = None
        if mode != "auto" or is_aws(calls.client.endpoint):
            self._conditional = mode != "off"
        self._probe_lock = threading.Lock()

    def after_fork(self) -> None:
        self._probe_lock = threading.Lock()

    def put(self, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = [MISS] * len(writes)
        by_key: dict[Key, list[int]] = {}
        for item, write in enumerate(writes):
            by_key.setdefault(write.key, []).append(item)
        groups = list(by_key.values())
        self._calls.misses.forget(list(by_key))

        def store(index: int) -> None:
            stored = False
            for item in groups[index]:  # the first of equal keys wins; if it fails, the next may
                outcomes[item] = EXISTS if stored else self._put(writes[item], deadline)
                stored = stored or outcomes[item].stored

        lanes = self._calls.settings.lanes
        self._calls.lanes.each(store, len(groups), at_once=lanes, pace=self._calls.pace)
        self._calls.misses.forget(list(by_key))
        return outcomes

    def _put(self, write: Write, deadline: float) -> Outcome:
        """Store one record. Never raises."""
        nbytes = write.nbytes
        if nbytes > MAX_OBJECT_BYTES:
            text = f"the record has {nbytes} bytes, but S3 takes at most {MAX_OBJECT_BYTES}"
            return Outcome.failed(PermanentError(text, backend=self._calls.name, operation="put", key=write.key))
        source: Source | None = None
        try:
            if time.monotonic() >= deadline:
                raise LinkError("deadline", "the deadline passed")
            name = record_name(self._calls.settings.prefix, write.key)
            if self._is_conditional(deadline) and not self._head_first(nbytes):
                pass
            elif self._expiry.there(name, deadline):
                return EXISTS
            source = Source(write.src, nbytes)
            if nbytes > self._calls.settings.multipart_size:
                self._put_parts(name, source, deadline)
            else:
                self._put_whole(name, source, deadline)
            return Outcome(Status.OK, nbytes)
        except _There:
            return EXISTS
        except Exception as error:  # noqa: BLE001 - mapped once, here
            return Outcome.failed(self._calls.failed(error, "put", write.key))
        finally:
            if source is not None:
                source.revoke()

    def _head_first(self, nbytes: int) -> bool:
        """Whether to ask before sending, though the put itself is conditional."""
        mode = self._calls.settings.head_first
        if self._calls.settings.ttl is not None:
            return True
        return mode == "always" or (mode == "auto" and nbytes >= _HEAD_FROM)

    def _condition(self) -> dict[str, str]:
        return {"IfNoneMatch": "*"} if self._conditional else {}

    def _put_whole(self, name: str, source: Source, deadline: float) -> None:
        params = {"Key": name, **self._condition(), **self._checksum.of(source.views)}
        for attempt in (0, 1):
            try:
                self._calls.put("PutObject", params, source, deadline)
                return
            except Exception as error:  # noqa: BLE001 - raised again unless it is a 409
                self._raise_there(error, last=bool(attempt))
            if self._calls.head(name, deadline) is not None:  # 409: who was in our way, has he succeeded?
                raise _There
        raise _There

    @staticmethod
    def _raise_there(error: Exception, *, last: bool) -> None:
        """412: it is there. 409 (another conditional request for the key is under way): it may be soon; try again."""
        fault = fault_of(error)
        if fault is not None:
            if fault.status == 412 or fault.code == "PreconditionFailed":
                raise _There from error
            if fault.code == "ConditionalRequestConflict" or fault.status == 409:
                if last:
                    raise _There from error
                return
        raise error

    # In parts.

    def _put_parts(self, name: str, source: Source, deadline: float) -> None:
        """CreateMultipartUpload, parts in parallel, CompleteMultipartUpload; aborted if anything fails."""
        calls = self._calls
        begun = calls.invoke("CreateMultipartUpload", {"Key": name, **self._checksum.announce()}, deadline)
        upload = {"Key": name, "UploadId": begun["UploadId"]}
        try:
            parts = self._upload(upload, source, deadline)
            complete = {**upload, "MultipartUpload": {"Parts": parts}, **self._condition()}
            try:
                calls.invoke("CompleteMultipartUpload", complete, deadline)
            except Exception as error:
                self._raise_there(error, last=False)
                if calls.head(name, deadline) is not None:
                    raise _There from error
                raise  # after a 409 the upload is void; the retry that this error asks for begins another
        except BaseException:
            self._abort(upload)
            raise

    def _upload(self, upload: Mapping[str, str], source: Source, deadline: float) -> list[dict[str, Any]]:
        settings = self._calls.settings
        size = max(settings.write_part_size, -(-source.nbytes // _MAX_PARTS))
        count = -(-source.nbytes // size)
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        failures: list[Exception] = []

        def send(index: int) -> None:
            if failures:
                return
            begin = index * size
            end = min(begin + size, source.nbytes)
            views = gather(source.views, begin, end)
            part = Source(views, end - begin)
            digest = self._checksum.of(views)
            params = {**upload, "PartNumber": index + 1, **digest}
            try:
                answer = self._calls.put("UploadPart", params, part, deadline)
                parts[index] = {"PartNumber": index + 1, "ETag": answer["ETag"], **digest}
            except Exception as error:  # noqa: BLE001 - raised below, by the caller's thread
                failures.append(error)
            finally:
                part.revoke()

        self._calls.lanes.each(send, count, at_once=settings.lanes, pace=self._calls.pace)
        if failures:
            raise failures[0]
        return parts

    def _abort(self, upload: Mapping[str, str]) -> None:
        """Give the parts back, in the background: the deadline of the put may be what ended it. What remains, because
        the process ends or the service is away, is swept (`kvstore_backends.s3.sweep`)."""

        def abort() -> None:
            try:
                self._calls.invoke("AbortMultipartUpload", upload, time.monotonic() + _ABORT_S)
            except Exception as error:  # noqa: BLE001 - nobody waits for it
                self._calls.count("parts_left")
                logger.info(
                    "%s: an unfinished upload was left to the sweep: %s", self._calls.name, type(error).__name__
                )

        self._calls.meta.spawn(abort)

    # Whether the service keeps a record that is there.

    def _is_conditional(self, deadline: float) -> bool:
        """Whether the service honours If-None-Match. Tried once, with an empty object of a name of its own."""
        if self._conditional is None:
            if not self._probe_lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))):
                raise LinkError("deadline", "the deadline passed")
            try:
                if self._conditional is None:
                    self._conditional = self._probe(deadline)
                    if not self._conditional:
                        logger.warning(
                            "%s: the service ignores If-None-Match; records are looked up before they are written, and "
                            "of two writers at the same moment the second may replace the first's record with its own",
                            self._calls.name,
                        )
            finally:
                self._probe_lock.release()
        return self._conditional

    def _probe(self, deadline: float) -> bool:
        name = probe_name(self._calls.settings.prefix, secrets.token_hex(8))
        params = {"Key": name, "IfNoneMatch": "*"}
        try:
            self._calls.put("PutObject", params, Source([], 0), deadline)
        except Exception as error:
            fault = fault_of(error)
            if fault is not None and refuses_condition(fault):
                return False
            raise
        try:
            self._calls.put("PutObject", params, Source([], 0), deadline)
            return False
        except Exception as error:
            fault = fault_of(error)
            if fault is not None and (fault.status in (409, 412)):
                return True
            raise
        finally:
            self._remove_probe(name, deadline)

    def _remove_probe(self, name: str, deadline: float) -> None:
        try:
            self._calls.invoke("DeleteObject", {"Key": name}, deadline)
        except Exception as error:  # noqa: BLE001 - a writer that may not delete has learnt all the same
            logger.info("%s: a probe was left to the sweep: %s", self._calls.name, self._calls.failed(error, "put"))
