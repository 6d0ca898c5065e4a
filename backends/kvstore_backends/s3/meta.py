"""Everything about records but their bytes: stat, delete, quarantine, list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.backend import MISS, OK, KeyInfo, Outcome, Status
from kvstore.errors import PermanentError, TransientError
from kvstore.keys import Key

from .answers import answered_at
from .calls import Calls
from .errors import fault_of
from .expiry import MAX_COPY_BYTES, Expiry
from .http import LinkError
from .names import key_of, quarantine_name, record_name

__all__ = ["Meta"]

_DELETE_AT_ONCE = 1000
_GONE = frozenset({"NoSuchKey", "PreconditionFailed"})


class Meta:
    """The small requests. Those of one batch go out together, over `meta_lanes` threads."""

    def __init__(self, calls: Calls, expiry: Expiry) -> None:
        self._calls = calls
        self._expiry = expiry
        self._prefix = calls.settings.prefix

    def _all(
        self, keys: Sequence[Key], operation: str, deadline: float, ask: Callable[[Key], Outcome]
    ) -> list[Outcome]:
        """`ask` for each key; what it raises becomes that key's outcome."""
        outcomes: list[Outcome] = [MISS] * len(keys)
        calls = self._calls

        def one(index: int) -> None:
            key = keys[index]
            try:
                if time.monotonic() >= deadline:
                    raise LinkError("deadline", "the deadline passed")
                outcomes[index] = ask(key)
            except Exception as error:  # noqa: BLE001 - mapped once, here
                outcomes[index] = Outcome.failed(calls.failed(error, operation, key))

        calls.meta.each(one, len(keys), at_once=calls.settings.meta_lanes, pace=calls.meta_pace)
        return outcomes

    # stat

    def _stat(self, key: Key, deadline: float) -> Outcome:
        found = self._calls.head(record_name(self._prefix, key), deadline, lookup=True)
        if found is None or self._calls.expired(found.age):
            return MISS
        return Outcome(Status.OK, found.nbytes)

    def stat(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """One HEAD for each key that is not known to have been missing a moment ago; equal keys share one."""
        misses = self._calls.misses
        if time.monotonic() >= deadline:
            return [self._calls.faults.late("stat", key) for key in keys]
        epoch = misses.epoch
        wanted = list(dict.fromkeys(key for key in keys if key not in misses))
        found = dict(
            zip(wanted, self._all(wanted, "stat", deadline, lambda key: self._stat(key, deadline)), strict=True)
        )
        misses.add([key for key, outcome in found.items() if outcome.status is Status.MISS], epoch)
        return [found.get(key, MISS) for key in keys]

    # delete

    def delete(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Ask which are there (DeleteObjects does not say), then delete those, 1000 at a time."""
        wanted = list(dict.fromkeys(keys))
        found = dict(
            zip(wanted, self._all(wanted, "delete", deadline, lambda key: self._stat(key, deadline)), strict=True)
        )
        there = [key for key, outcome in found.items() if outcome.status is Status.OK]
        for begin in range(0, len(there), _DELETE_AT_ONCE):
            found.update(self._delete_some(there[begin : begin + _DELETE_AT_ONCE], deadline))
        outcomes: list[Outcome] = []
        for key in keys:
            outcomes.append(found[key])
            if found[key].status is Status.OK:
                found[key] = MISS  # a second mention finds nothing
        return outcomes

    def _delete_some(self, keys: Sequence[Key], deadline: float) -> dict[Key, Outcome]:
        calls = self._calls
        outcomes = dict.fromkeys(keys, OK)
        names = {record_name(self._prefix, key): key for key in keys}
        try:
            if time.monotonic() >= deadline:
                raise LinkError("deadline", "the deadline passed")
            if len(keys) == 1:
                calls.invoke("DeleteObject", {"Key": next(iter(names))}, deadline)
                return outcomes
            batch = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            answer = calls.invoke("DeleteObjects", {"Delete": batch}, deadline)
        except Exception as error:  # noqa: BLE001 - mapped once, here
            return dict.fromkeys(keys, Outcome.failed(calls.failed(error, "delete")))
        for said in answer.get("Errors", ()):
            key = names.get(said.get("Key", ""))
            if key is not None and said.get("Code") != "NoSuchKey":
                outcomes[key] = Outcome.failed(calls.refused(said, "delete", key))
        return outcomes

    # quarantine

    def quarantine(self, keys: Sequence[Key], seen: Callable[[Key], str | None], deadline: float) -> list[Outcome]:
        """Copy each aside on the server and delete it, both only if it still is the version last read."""
        wanted = list(dict.fromkeys(keys))
        ask = {key: seen(key) for key in wanted}
        done = self._all(wanted, "quarantine", deadline, lambda key: self._set_aside(key, ask[key], deadline))
        found = dict(zip(wanted, done, strict=True))
        outcomes: list[Outcome] = []
        for key in keys:
            outcomes.append(found[key])
            if found[key].status is Status.OK:
                found[key] = MISS
        return outcomes

    def _set_aside(self, key: Key, etag: str | None, deadline: float) -> Outcome:
        calls = self._calls
        name = record_name(self._prefix, key)
        found = calls.head(name, deadline)
        if found is None or (etag is not None and found.etag != etag):
            return MISS
        aside = quarantine_name(self._prefix, key, time.time_ns() // 1_000_000)
        source = {"Bucket": calls.settings.bucket, "Key": name}
        try:
            if calls.settings.quarantine and found.nbytes <= MAX_COPY_BYTES:
                copy = {"Key": aside, "CopySource": source, "CopySourceIfMatch": found.etag}
                calls.invoke("CopyObject", copy, deadline)
            removed = self._expiry.remove(name, found.etag, deadline)
        except Exception as error:
            fault = fault_of(error)
            if fault is not None and (fault.status in (404, 412) or fault.code in _GONE):
                return MISS  # somebody replaced or removed it
            raise
        return OK if removed else MISS

    # list

    def pages(self, check: Callable[[], None], deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of ListObjectsV2, by continuation token (S3 Express knows no StartAfter, and no order)."""
        for answer in list_pages(self._calls, self._prefix, check, deadline):
            now = answered_at(answer)
            page: list[KeyInfo] = []
            for entry in answer.get("Contents", ()):
                key = key_of(self._prefix, entry["Key"])
                modified = entry["LastModified"].timestamp()
                if key is not None and not self._calls.expired(now - modified):
                    page.append(KeyInfo(key, entry["Size"], modified))
            if page:
                yield page


def list_pages(calls: Calls, prefix: str, check: Callable[[], None], deadline: float) -> Iterator[dict[str, Any]]:
    """The answers of ListObjectsV2, one after the other.

    Raises:
        KVStoreError: as mapped; `TransientError` at the deadline.
    """
    params: dict[str, Any] = {"Prefix": prefix} if prefix else {}
    while True:
        check()
        if time.monotonic() >= deadline:
            raise TransientError("the deadline passed", backend=calls.name, operation="list")
        try:
            answer = calls.invoke("ListObjectsV2", params, deadline)
        except Exception as error:  # noqa: BLE001 - mapped once, here
            mapped = calls.failed(error, "list")
            raise mapped from mapped.cause
        yield answer
        token = answer.get("NextContinuationToken")
        if not answer.get("IsTruncated") or not token:
            return
        if token == params.get("ContinuationToken"):
            raise PermanentError(
                "the listing does not get on: the same page again", backend=calls.name, operation="list"
            )
        params = {**params, "ContinuationToken": token}
