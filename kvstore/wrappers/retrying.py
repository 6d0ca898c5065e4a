"""A second and third try for what failed in passing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.backend import Backend, KeyInfo, Outcome
from kvstore.errors import ClosedError, ConfigError, KVStoreError
from kvstore.metrics import Metrics
from kvstore.options import Option

from .base import Operation, Wrapper, call_backend

__all__ = ["RetryingBackend"]

_MAX_ATTEMPTS = 3  # one request and two more: more of them turn a throttled service into a dead one
_FORGET = 1.02  # how fast the shortest call seen is forgotten, per call


class RetryingBackend(Wrapper):
    """Tries again what failed with a retryable error, only those items, inside the deadline.

    Between tries it sleeps for a uniformly random part of an exponentially growing time ("full jitter": M. Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), never past the deadline. A try that would have less
    time left than the shortest successful call of that operation lately took is not begun.

    Every operation may be repeated. A put is write-once: if the first try landed but its answer was lost, the next
    one says EXISTS, which is `Outcome.stored`. A repeated delete or quarantine may say MISS for the same reason.

    Args:
        attempts: requests per item at most, the first included; 1 to 3.
        base_delay: upper end of the first sleep, seconds; it doubles with each try.
        max_delay: upper end of any sleep, seconds.
        metrics: counts tries; None: counted nowhere.
        clock, sleep, rng: for tests; `sleep` ends early when the backend is closed, `rng` is uniform in [0, 1).

    Raises:
        ConfigError: an argument out of range.
    """

    options = (
        Option("retries", "int", 2, "Further tries after a transient error, for the items that failed; 0 switches them "
               "off.", minimum=0, maximum=_MAX_ATTEMPTS - 1),
        Option("retry_delay", "duration", 0.02, "Longest pause before the first further try (a random part of it is "
               "slept); twice that before the second.", minimum=0.0, maximum=60.0),
    )  # fmt: skip

    def __init__(
        self,
        inner: Backend,
        *,
        attempts: int = 3,
        base_delay: float = 0.02,
        max_delay: float = 1.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        if not 1 <= attempts <= _MAX_ATTEMPTS:
            raise ConfigError(f"attempts={attempts} must be between 1 and {_MAX_ATTEMPTS}")
        if not 0 <= base_delay <= max_delay:
            raise ConfigError(f"base_delay={base_delay} must be between 0 and max_delay={max_delay}")
        self._attempts = attempts
        self._base_delay = base_delay
        self._max_delay = max_delay
        self._metrics = metrics
        self._clock = clock
        self._closing = threading.Event()  # ends sleeps
        self._sleep = sleep
        self._rng = rng
        self._shortest: dict[str, float] = {}  # seconds of the shortest successful call; racy writes do no harm

    def _after_fork(self) -> None:
        closed, self._closing = self._closed, threading.Event()
        if closed:
            self._closing.set()

    def _pause(self, attempt: int, operation: str, deadline: float) -> bool:
        """Sleep before try number `attempt` (1 = the first further one). False: no time is left for it."""
        latest = deadline - self._shortest.get(operation, 0.0) - self._clock()
        if latest <= 0 or self._closed:
            return False
        delay = self._rng() * min(self._max_delay, self._base_delay * 2.0 ** (attempt - 1), latest)
        if delay > 0:
            (self._sleep or self._closing.wait)(delay)
        return not self._closed and self._clock() + self._shortest.get(operation, 0.0) < deadline

    def _note(self, operation: str, seconds: float) -> None:
        known = self._shortest.get(operation)
        self._shortest[operation] = seconds if known is None else min(seconds, known * _FORGET)

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        start = self._clock()
        outcomes = call_backend(self._inner, operation, items, deadline)
        todo = [at for at, outcome in enumerate(outcomes) if outcome.error is not None and outcome.error.retryable]
        if not todo:
            self._note(operation, self._clock() - start)
            return outcomes
        outcomes = [*outcomes]  # the inner backend may keep its list
        failed, tries, tried = len(todo), 0, 0
        for attempt in range(1, self._attempts):
            if not self._pause(attempt, operation, deadline):
                break
            tries += 1
            tried += len(todo)
            try:
                again = call_backend(self._inner, operation, [items[at] for at in todo], deadline)
            except (ClosedError, ConfigError):
                break  # what the first try did stands
            for at, outcome in zip(todo, again, strict=True):
                outcomes[at] = outcome
            todo = [at for at in todo if (error := outcomes[at].error) is not None and error.retryable]
            if not todo:
                break
        if self._metrics is not None and tries:
            labels = (self.name, operation)
            self._metrics.update((
                ("kvstore_retries_total", labels, tries),
                ("kvstore_retried_items_total", labels, tried),
                ("kvstore_recovered_items_total", labels, failed - len(todo)),
            ))  # fmt: skip
        return outcomes

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """As the inner backend; begun anew after a retryable error as long as no page was handed out."""
        pages, attempt = self._begin_list(1, deadline)
        return self._retry_pages(pages, attempt, deadline)

    def _again(self, attempt: int, deadline: float) -> bool:
        return attempt < self._attempts and self._pause(attempt, "list", deadline)

    def _begin_list(self, attempt: int, deadline: float) -> tuple[Iterator[Sequence[KeyInfo]], int]:
        while True:
            try:
                return super().list(deadline=deadline), attempt
            except KVStoreError as error:
                if not error.retryable or not self._again(attempt, deadline):
                    raise
                attempt += 1

    def _retry_pages(
        self, pages: Iterator[Sequence[KeyInfo]], attempt: int, deadline: float
    ) -> Iterator[Sequence[KeyInfo]]:
        begun = False
        while True:
            try:
                for page in pages:
                    begun = True
                    yield page
                return
            except KVStoreError as error:
                if begun or not error.retryable or not self._again(attempt, deadline):
                    raise
            pages, attempt = self._begin_list(attempt + 1, deadline)

    def close(self) -> None:
        """As `Wrapper.close`; sleeping tries end at once, and their calls with the error they have."""
        self._closed = True
        self._closing.set()
        super().close()
