"""A throttled link that carries real bytes: records in memory behind a token bucket, with a latency per request.

Nothing is slept in place of a transfer: bytes are copied into the destination slice by slice, each when the link has
brought it, so that the memory traffic, the wake-ups and the checksums of a real transfer are all there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.backend import MISS, Limits, Outcome, Read, Status
from kvstore.errors import ConfigError
from kvstore.testing.reference import DictBackend, deadline_outcomes

__all__ = ["LinkBackend", "TokenBucket"]

_SLICE_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20  # as a socket's receive buffer: what comes in while the reader's thread does not run


class TokenBucket:
    """A link that `bytes_per_s` come in through while anything is being transferred. Thread-safe; first come, first
    served.

    Args:
        bytes_per_s: the rate.
        then: (seconds, rate) in order: from so many seconds after `start` on the rate is another one. Needs `start`.
        buffer: bytes that may come in before somebody takes them. An idle link brings nothing.
        clock, sleep: replaceable for tests.

    Raises:
        ConfigError: a rate or a buffer that is not positive, times that are not in order.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        then: Sequence[tuple[float, float]] = (),
        buffer: int = _BUFFER_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0 or buffer < 1:
            raise ConfigError(f"a rate of {bytes_per_s} bytes/s with a buffer of {buffer} makes no sense")
        times = [0.0, *(when for when, _ in then)]
        if times != sorted(times) or not all(rate > 0 for _, rate in then):
            raise ConfigError(f"a link whose rate changes as {list(then)} makes no sense")
        self.bytes_per_s = float(bytes_per_s)
        self._then = [(float(when), float(rate)) for when, rate in then]
        self._started = float("inf")
        self._buffer_s = buffer / bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._taken_until = -float("inf")  # when everything that was taken so far has come in
        self._transfers = 0

    def start(self) -> None:
        """The times of `then` count from now."""
        with self._lock:
            self._started = self._clock()

    def _come_in(self, begin: float, nbytes: float) -> float:
        """When so many bytes have come in, if the first of them may come at `begin`."""
        rate = self.bytes_per_s
        for when, after in self._then:
            change = self._started + when
            if change > begin:
                before = (change - begin) * rate
                if before >= nbytes:
                    break
                begin, nbytes = change, nbytes - before
            rate = after
        return begin + nbytes / rate

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Something is asked for and comes in."""
        with self._lock:
            if not self._transfers:
                self._taken_until = max(self._taken_until, self._clock())
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1

    def take(self, nbytes: int, deadline: float) -> bool:
        """Wait until so many bytes have come in, and take them. False, at once, if that is not before the deadline."""
        with self._lock:
            begin = max(self._taken_until, self._clock() - self._buffer_s)
            ready = self._come_in(begin, nbytes)
            if ready >= deadline:
                return False
            self._taken_until = ready
        wait = ready - self._clock()
        if wait > 0:
            self._sleep(wait)
        return True


class LinkBackend(DictBackend):
    """Records at the far end of a link that all lanes share. Puts cost nothing; gets cost latency and bandwidth.

    Args:
        latency_s: seconds that each call of `get_into` waits before its first byte comes; calls wait side by side.

    Attributes:
        bucket: the link; None: without limit. May be exchanged between calls.
        carried: bytes so far.
    """

    def __init__(self, *, latency_s: float = 0.0, lanes: int = 4, preferred_io_bytes: int = 4 << 20) -> None:
        super().__init__(name="link", lanes=lanes)
        self.limits = Limits(max_value_bytes=1 << 40, lanes=lanes, preferred_io_bytes=preferred_io_bytes)
        self.bucket: TokenBucket | None = None
        self.latency_s = latency_s
        self.carried = 0

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        if (late := self._late("get", [read.key for read in reads], deadline)) is not None:
            return late
        if self.latency_s:
            time.sleep(max(0.0, min(self.latency_s, deadline - time.monotonic())))
        with self.bucket.transfer() if self.bucket else contextlib.nullcontext():
            return [self._carry(read, deadline) for read in reads]

    def _carry(self, read: Read, deadline: float) -> Outcome:
        data = self.records.get(read.key)
        if data is None:
            return MISS
        source = memoryview(data)[read.offset : read.offset + len(read.dst)]
        for begin in range(0, len(source), _SLICE_BYTES):
            piece = source[begin : begin + _SLICE_BYTES]
            if time.monotonic() >= deadline or (self.bucket and not self.bucket.take(len(piece), deadline)):
                return deadline_outcomes(self.name, "get", [read.key])[0]
            read.dst[begin : begin + len(piece)] = piece
        with self._lock:
            self.carried += len(source)
        return Outcome(Status.OK, len(source))
