"""`LatencyBackend`: a backend as if at the far end of a link. For benchmarks, and with a fake clock for tests."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore.backend import Backend, Capability, KeyInfo, Limits, Outcome, Read, Write
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import Key

from .reference import deadline_outcomes

if TYPE_CHECKING:
    from kvstore.buffers import Buffer, Slab

__all__ = ["LatencyBackend"]


def _merge(done: list[Outcome], late: list[Outcome], booked: list[bool]) -> list[Outcome]:
    """One outcome per item: the next of `done` where it was booked, else its own of `late`."""
    rest = iter(done)
    return [next(rest) if ok else outcome for outcome, ok in zip(late, booked, strict=True)]


class LatencyBackend(Backend):
    """Every call costs `latency_s`, and every byte moved its time on a link.

    A call never sleeps past its deadline: items that the link cannot carry by then are ERROR with a
    `TransientError`, and a put of such an item is not begun. EXISTS costs no bytes. Each page of `list` costs one
    latency, and so does finding the end. Bytes are not copied here.

    Args:
        inner: the backend that does the work.
        latency_s: seconds per call; calls of several threads wait at the same time.
        gbytes_per_s: bandwidth in 10^9 bytes per second; None: without limit.
        shared: True: all threads share one link, in order of arrival; False: each call has a link of its own.
        clock, sleep: replaceable for tests; `clock` must count as `time.monotonic`, in which deadlines are given.

    Raises:
        ConfigError: a negative latency, or a bandwidth that is not positive.
    """

    def __init__(
        self,
        inner: Backend,
        latency_s: float,
        *,
        gbytes_per_s: float | None = None,
        shared: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not latency_s >= 0 or (gbytes_per_s is not None and not gbytes_per_s > 0):
            raise ConfigError(f"latency_s={latency_s} must be ≥ 0 and gbytes_per_s={gbytes_per_s} > 0 or None")
        self.inner = inner
        self._latency = latency_s
        self._seconds_per_byte = 0.0 if gbytes_per_s is None else 1e-9 / gbytes_per_s
        self._shared = shared
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._free_at = -1.0  # when the shared link has carried everything promised so far
        self._closed = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        return self.inner.capabilities

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        return self.inner.limits

    def _enter(self, operation: str, deadline: float) -> bool:
        """Pay the latency. False if the deadline passed before that was done."""
        if self._closed:
            raise ClosedError("the backend is closed", backend=self.name, operation=operation)
        if self._pid != os.getpid():  # the lock may have been held at the fork
            self._lock = threading.Lock()
            self._pid = os.getpid()
        now = self._clock()
        self._pause(min(self._latency, deadline - now))
        return now + self._latency < deadline

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)

    def _reserve(self, sizes: Sequence[int], deadline: float) -> tuple[float, list[bool]]:
        """Book the link for as many of these transfers, in order, as end before the deadline.

        Returns when the first of them begins, and which are booked. What moves nothing is always booked.
        """
        with self._lock:
            begin = max(self._clock(), self._free_at) if self._shared else self._clock()
            end, booked = begin, []
            for size in sizes:
                after = end + size * self._seconds_per_byte
                booked.append(size == 0 or after < deadline)
                if booked[-1]:
                    end = after
            if self._shared:
                self._free_at = end
        return begin, booked

    def _carry(self, begin: float, nbytes: int) -> None:
        self._pause(begin + nbytes * self._seconds_per_byte - self._clock())

    def _small(
        self,
        operation: str,
        keys: Sequence[Key],
        deadline: float,
        call: Callable[..., list[Outcome]],
    ) -> list[Outcome]:
        if keys and not self._enter(operation, deadline):
            return deadline_outcomes(self.name, operation, keys)
        return call(keys, deadline=deadline)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._small("stat", keys, deadline, self.inner.stat)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._small("delete", keys, deadline, self.inner.delete)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._small("quarantine", keys, deadline, self.inner.quarantine)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        if reads and not self._enter("get", deadline):
            return deadline_outcomes(self.name, "get", [read.key for read in reads])
        outcomes = self.inner.get_into(reads, deadline=deadline)
        begin, booked = self._reserve([outcome.nbytes for outcome in outcomes], deadline)
        if all(booked):
            self._carry(begin, sum(outcome.nbytes for outcome in outcomes))
            return outcomes
        self._pause(deadline - self._clock())
        late = deadline_outcomes(self.name, "get", [read.key for read in reads])
        return _merge(list(itertools.compress(outcomes, booked)), late, booked)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        if writes and not self._enter("put", deadline):
            return deadline_outcomes(self.name, "put", [write.key for write in writes])
        sizes = [write.nbytes for write in writes]
        # What will be refused moves nothing.
        limit = self.limits.max_value_bytes
        begin, booked = self._reserve([size if size <= limit else 0 for size in sizes], deadline)
        if all(booked):
            outcomes = self.inner.put(writes, deadline=deadline)
        else:
            sent = self.inner.put(list(itertools.compress(writes, booked)), deadline=deadline)
            late = deadline_outcomes(self.name, "put", [write.key for write in writes])
            outcomes = _merge(sent, late, booked)
        moved = sum(outcome.nbytes for outcome in outcomes)
        promised = sum(size for size, ok in zip(sizes, booked, strict=True) if ok and size <= limit)
        if self._shared:
            with self._lock:
                self._free_at -= (promised - moved) * self._seconds_per_byte
        if all(booked):
            self._carry(begin, moved)
        else:
            self._pause(deadline - self._clock())
        return outcomes

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        if keys and not self._enter("lease", deadline):
            return [None] * len(keys)
        return self.inner.lease(keys, deadline=deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        pages = self.inner.list(deadline=deadline)

        def paced() -> Iterator[Sequence[KeyInfo]]:
            while True:
                if not self._enter("list", deadline):
                    raise TransientError("the deadline passed", backend=self.name, operation="list")
                page = next(pages, None)
                if page is None:
                    return
                yield page

        return paced()

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        self.inner.announce(waiting)

    def register(self, slab: Slab) -> None:
        self.inner.register(slab)

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    def __repr__(self) -> str:
        return f"<LatencyBackend {self._latency * 1000:g} ms over {self.inner!r}>"
