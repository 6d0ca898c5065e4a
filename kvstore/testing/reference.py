"""`DictBackend`: the smallest backend that keeps the contract. A partner for oracles, an inner for wrappers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

from kvstore.backend import EXISTS, MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.errors import ClosedError, PermanentError, TransientError
from kvstore.keys import Key

__all__ = ["DictBackend", "deadline_outcomes"]


def deadline_outcomes(name: str, operation: str, keys: Sequence[Key]) -> list[Outcome]:
    """What a batch answers when its deadline has passed: ERROR with a `TransientError` for each key."""
    return [
        Outcome.failed(TransientError("the deadline passed", backend=name, operation=operation, key=key))
        for key in keys
    ]


class DictBackend(Backend):
    """A dict of bytes under one lock. Copies on put and on get; meant to be obviously right, not fast.

    Attributes:
        records: what is stored. A test may look at it and change it, behind the backend's back.
        quarantined: what `quarantine` put aside, oldest first.
    """

    def __init__(self, *, name: str = "dict", max_value_bytes: int = 1 << 30, lanes: int = 8) -> None:
        self.name = name
        self.capabilities = Capability.RANGED_READ | Capability.LIST
        self.limits = Limits(max_value_bytes=max_value_bytes, lanes=lanes)
        self.records: dict[Key, bytes] = {}
        self.quarantined: list[tuple[Key, bytes]] = []
        self._seen: dict[Key, bytes] = {}  # the version of a record that was read last
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def _late(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        """The outcomes of a batch whose deadline has passed, else None."""
        if self._pid != os.getpid():  # before the lock: another thread may have held it at the fork
            raise ClosedError("a DictBackend does not work in a forked child", backend=self.name, operation=operation)
        if self._closed:
            raise ClosedError("the backend is closed", backend=self.name, operation=operation)
        return deadline_outcomes(self.name, operation, keys) if time.monotonic() >= deadline else None

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        if (late := self._late("stat", keys, deadline)) is not None:
            return late
        with self._lock:
            found = [self.records.get(key) for key in keys]
        return [MISS if data is None else Outcome(Status.OK, len(data)) for data in found]

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        if (late := self._late("get", [read.key for read in reads], deadline)) is not None:
            return late
        outcomes = []
        with self._lock:
            for read in reads:
                data = self.records.get(read.key)
                if data is None:
                    outcomes.append(MISS)
                    continue
                self._seen[read.key] = data
                part = data[read.offset : read.offset + len(read.dst)]
                read.dst[: len(part)] = part
                outcomes.append(Outcome(Status.OK, len(part)))
        return outcomes

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        if (late := self._late("put", [write.key for write in writes], deadline)) is not None:
            return late
        return [self._put_one(write) for write in writes]

    def _put_one(self, write: Write) -> Outcome:
        nbytes, limit = write.nbytes, self.limits.max_value_bytes
        if nbytes > limit:
            text = f"the record has {nbytes} bytes; at most {limit} are accepted"
            return Outcome.failed(PermanentError(text, backend=self.name, operation="put", key=write.key))
        with self._lock:
            if write.key in self.records:
                return EXISTS
            self.records[write.key] = b"".join(write.src)
        return Outcome(Status.OK, nbytes)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        if (late := self._late("delete", keys, deadline)) is not None:
            return late
        with self._lock:
            return [MISS if self.records.pop(key, None) is None else OK for key in keys]

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        if (late := self._late("quarantine", keys, deadline)) is not None:
            return late
        outcomes = []
        with self._lock:
            for key in keys:
                data = self.records.get(key)
                if data is None or self._seen.get(key, data) is not data:  # gone, or not what was read: replaced
                    outcomes.append(MISS)
                    continue
                self.quarantined.append((key, self.records.pop(key)))
                outcomes.append(OK)
        return outcomes

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        if self._late("list", (), deadline) is not None:
            raise TransientError("the deadline passed", backend=self.name, operation="list")
        with self._lock:
            page = [KeyInfo(key, len(data)) for key, data in self.records.items()]
        return iter([page] if page else [])

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<DictBackend {self.name!r} of {len(self.records)} records>"
