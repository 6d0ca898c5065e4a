"""What the tests of `BackendSuite` share: hooks and knobs to override, and helpers."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

from kvstore.backend import Backend, Capability, KeyInfo, Outcome, Read, Status, Write
from kvstore.errors import KVStoreError, TransientError
from kvstore.keys import Key

__all__ = ["Child", "Guarded", "SuiteBase", "payload", "run_in_child", "run_threads"]

CANARY = 0xA5
_GUARD = 64


class SuiteBase:
    """Hooks, knobs and helpers. See `kvstore.testing.BackendSuite` for how to use them."""

    requires: ClassVar[Capability] = Capability.NONE
    """Capabilities that the backend must claim; the suite tests every capability it does claim."""
    max_value: ClassVar[int] = 64 << 20
    """Largest record, in bytes, that the suite stores. Tests that need a larger one are skipped."""
    stores_empty: ClassVar[bool] = True
    """False: a record of 0 bytes is refused at put with a `PermanentError`, instead of stored."""
    patience_s: ClassVar[float] = 60.0
    """Deadline of ordinary calls, in seconds from now."""
    fork_limit_s: ClassVar[float] = 20.0
    """After so many seconds a forked child counts as hung."""
    forbidden_text: ClassVar[Sequence[str]] = ()
    """Secrets that the backend was opened with: they must not show in its name, repr or errors."""

    path: Path
    """A folder of this test alone."""

    # Hooks.

    def open(self) -> Backend:
        """A new instance of the backend. Several of them in one test name the same place, if the backend is SHARED."""
        raise NotImplementedError(f"{type(self).__name__} must define open()")

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        """Make `data` the record of `key`, replacing what is there, behind the backend's back: write the file, call
        the server's own client, change the dict. `put_through` a second instance is second best."""
        raise NotImplementedError(f"{type(self).__name__} must define seed()")

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        """The stored bytes of `key`, or None, found behind the backend's back. `read_through` is second best."""
        raise NotImplementedError(f"{type(self).__name__} must define inspect()")

    def reopen(self) -> Backend:
        """Open the same place again after it was closed; called for DURABLE backends only."""
        return self.open()

    def open_limited(self, max_value_bytes: int) -> Backend | None:
        """An instance that accepts records of at most so many bytes; None: there is no such option."""
        return None

    def open_capacity(self, capacity_bytes: int) -> Backend | None:
        """An instance on a new, empty place that may hold so many bytes; None: there is no such option. Every call
        in one test gives another place."""
        return None

    # What subclasses may use.

    def put_through(self, backend: Backend, key: Key, data: bytes) -> None:
        """Replace the record of `key` by way of `backend` (a second instance, or the inner one of a wrapper)."""
        backend.delete([key], deadline=self.soon())
        (outcome,) = backend.put([Write(key, [memoryview(data)])], deadline=self.soon())
        if outcome.status is not Status.OK:
            raise RuntimeError(f"seeding failed: {outcome}")

    def read_through(self, backend: Backend, key: Key) -> bytes | None:
        """The record of `key` by way of `backend`."""
        (size,) = backend.stat([key], deadline=self.soon())
        if size.status is Status.MISS:
            return None
        data = bytearray(size.nbytes)
        (outcome,) = backend.get_into([Read(key, memoryview(data))], deadline=self.soon())
        if outcome != size:
            raise RuntimeError(f"inspecting failed: stat gave {size}, get gave {outcome}")
        return bytes(data)

    # What the tests use.

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path) -> Iterator[None]:
        self.begin(tmp_path)
        yield
        self.end()

    @pytest.fixture
    def backend(self, suite_place: None) -> Backend:
        return self.opened(self.open())

    def begin(self, path: Path) -> None:
        """Called before each test."""
        self.path = path
        self._opened: list[Backend] = []
        self._nonce = secrets.token_bytes(8)  # a shared place may hold records of an earlier run

    def end(self) -> None:
        """Called after each test: closes what it opened."""
        for backend in reversed(self._opened):
            backend.close()

    def opened(self, backend: Backend) -> Backend:
        """Have `backend` closed after the test."""
        self._opened.append(backend)
        return backend

    def soon(self) -> float:
        return time.monotonic() + self.patience_s

    def key(self, name: object) -> Key:
        """A key of this test alone."""
        return Key(hashlib.sha256(self._nonce + str(name).encode()).digest())

    def keys(self, count: int, name: str = "k") -> list[Key]:
        return [self.key(f"{name}{index}") for index in range(count)]

    def needs_value(self, backend: Backend, nbytes: int) -> None:
        """Skip the test if records of `nbytes` bytes cannot be stored."""
        if nbytes > min(self.max_value, backend.limits.max_value_bytes):
            pytest.skip(f"records of {nbytes} bytes are too large here")

    def put(self, backend: Backend, records: Mapping[Key, bytes] | Iterable[tuple[Key, bytes]]) -> list[Outcome]:
        """Put whole records, in order, and check the outcomes' shape."""
        items = list(records.items() if isinstance(records, Mapping) else records)
        writes = [Write(key, [memoryview(data)]) for key, data in items]
        outcomes = backend.put(writes, deadline=self.soon())
        self.check_shape(outcomes, len(items), {Status.OK, Status.EXISTS, Status.ERROR})
        for outcome, (_, data) in zip(outcomes, items, strict=True):
            assert outcome.nbytes == (len(data) if outcome.ok else 0)
        return outcomes

    def get(self, backend: Backend, reads: Sequence[tuple[Key, int, int]]) -> list[tuple[Outcome, bytes]]:
        """Read (key, offset, length) triples in one batch: each outcome with the bytes it brought.

        Checks the outcomes' shape, and that nothing around a destination or behind the bytes brought was touched.
        """
        targets = [Guarded(length) for _, _, length in reads]
        batch = [Read(key, target.view, offset) for (key, offset, _), target in zip(reads, targets, strict=True)]
        outcomes = backend.get_into(batch, deadline=self.soon())
        self.check_shape(outcomes, len(reads), {Status.OK, Status.MISS, Status.ERROR})
        for outcome, target in zip(outcomes, targets, strict=True):
            assert outcome.nbytes <= len(target.view), "more bytes reported than the destination holds"
            target.check(outcome.nbytes if outcome.ok else None)
        return [
            (outcome, bytes(target.view[: outcome.nbytes])) for outcome, target in zip(outcomes, targets, strict=True)
        ]

    def get_one(self, backend: Backend, key: Key, length: int, offset: int = 0) -> tuple[Outcome, bytes]:
        return self.get(backend, [(key, offset, length)])[0]

    def stat(self, backend: Backend, keys: Sequence[Key]) -> list[Outcome]:
        outcomes = backend.stat(keys, deadline=self.soon())
        self.check_shape(outcomes, len(keys), {Status.OK, Status.MISS, Status.ERROR})
        return outcomes

    def delete(self, backend: Backend, keys: Sequence[Key]) -> list[Outcome]:
        outcomes = backend.delete(keys, deadline=self.soon())
        self.check_shape(outcomes, len(keys), {Status.OK, Status.MISS, Status.ERROR}, nbytes=False)
        return outcomes

    def quarantine(self, backend: Backend, keys: Sequence[Key]) -> list[Outcome]:
        outcomes = backend.quarantine(keys, deadline=self.soon())
        self.check_shape(outcomes, len(keys), {Status.OK, Status.MISS, Status.ERROR}, nbytes=False)
        return outcomes

    def listing(self, backend: Backend) -> dict[Key, KeyInfo]:
        """Everything `list` reports. Checks the pages' shape, and that no key appears twice."""
        found: dict[Key, KeyInfo] = {}
        for page in backend.list(deadline=self.soon()):
            for info in page:
                assert isinstance(info, KeyInfo)
                assert type(info.key) is Key
                assert info.key not in found, "a key appears twice in list"
                assert info.nbytes >= 0
                assert info.last_used >= 0.0
                found[info.key] = info
        return found

    def check_shape(
        self, outcomes: Sequence[Outcome], count: int, allowed: set[Status], *, nbytes: bool = True
    ) -> None:
        """Outcomes align with inputs, and each is well formed."""
        assert isinstance(outcomes, list), f"outcomes come as a list, not as {type(outcomes).__name__}"
        assert len(outcomes) == count, f"{len(outcomes)} outcomes for {count} items"
        for outcome in outcomes:
            assert isinstance(outcome, Outcome)
            assert outcome.status in allowed, f"{outcome} is not an answer to this operation"
            assert (outcome.error is not None) == (outcome.status is Status.ERROR)
            assert outcome.error is None or isinstance(outcome.error, KVStoreError)
            assert outcome.nbytes >= 0
            if not nbytes or outcome.status is not Status.OK:
                assert outcome.nbytes == 0, f"{outcome} reports bytes that there cannot be"

    def check_late(self, outcomes: Sequence[Outcome], count: int, operation: str) -> None:
        """Every item is ERROR with a `TransientError` that says where it comes from."""
        self.check_shape(outcomes, count, {Status.ERROR})
        for outcome in outcomes:
            assert isinstance(outcome.error, TransientError), f"{outcome.error!r} is not a TransientError"
            assert outcome.error.operation == operation
            assert outcome.error.backend


def payload(nbytes: int, tag: object = "") -> bytes:
    """Bytes that look random and are the same in every run."""
    return random.Random(f"{tag}/{nbytes}").randbytes(nbytes)


class Guarded:
    """Memory for a read, between guard bytes. `view` is the destination."""

    def __init__(self, nbytes: int) -> None:
        self._all = bytearray([CANARY]) * (nbytes + 2 * _GUARD)
        self.view = memoryview(self._all)[_GUARD : _GUARD + nbytes]

    def check(self, nbytes: int | None) -> None:
        """Nothing outside the destination was written, and nothing of it behind `nbytes`, if that is known."""
        end = _GUARD + len(self.view)
        assert self._all[:_GUARD] == bytes([CANARY]) * _GUARD, "bytes before the destination were written"
        assert self._all[end:] == bytes([CANARY]) * _GUARD, "bytes behind the destination were written"
        if nbytes is not None:
            rest = self.view[nbytes:]
            assert rest == bytes([CANARY]) * len(rest), "bytes of the destination that were not read were written"


def run_threads(works: Sequence[Callable[[], None]], *, limit_s: float = 60.0) -> None:
    """Run each of `works` in a thread of its own, started together; raise the first error among them.

    Raises:
        AssertionError: they did not all end within `limit_s` seconds.
    """
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(limit_s)
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(work,), name=f"suite-{i}", daemon=True) for i, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise AssertionError(f"a thread was still busy after {limit_s} s")


class Child(NamedTuple):
    """How a forked child ended: `text` is what its function returned, or the traceback of its error."""

    ok: bool
    text: str


def run_in_child(work: Callable[[], str], *, limit_s: float) -> Child:
    """Run `work` in a child made by `os.fork`, and return what it returned. A child that does not end is killed.

    Raises:
        AssertionError: it did not end within `limit_s` seconds.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork with threads: the point here
        pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        status = 1
        try:
            os.close(reading)
            try:
                status, text = 0, work()
            except BaseException:  # noqa: BLE001 - nothing may leave the child but its report
                status, text = 1, traceback.format_exc()
            os.write(writing, text.encode()[:60_000])
        finally:
            os._exit(status)
    os.close(writing)
    chunks: list[bytes] = []
    end = time.monotonic() + limit_s
    try:
        while True:
            if not select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"the forked child hung for {limit_s} s")
            chunk = os.read(reading, 65_536)
            if not chunk:
                break
            chunks.append(chunk)
    finally:
        os.close(reading)
        _, status = os.waitpid(pid, 0)
    return Child(status == 0, b"".join(chunks).decode(errors="replace"))
