"""Fast refusals while a backend is down, and a way back."""

from __future__ import annotations

import enum
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.backend import Backend, KeyInfo, Outcome
from kvstore.errors import BackendError, ConfigError, KVStoreError, PoolExhausted, TransientError
from kvstore.metrics import Change, Metrics
from kvstore.options import Option

from .base import LocalWait, Operation, Unexpected, Wrapper, call_backend

if TYPE_CHECKING:
    from kvstore.buffers import Buffer
    from kvstore.keys import Key

__all__ = ["BreakerBackend", "BreakerState", "Probe"]

logger = logging.getLogger("kvstore.wrappers")

Probe = Callable[[Backend, float], bool]
"""Asks a backend, within a deadline (absolute monotonic seconds), whether it is back."""


_READS = frozenset({"stat", "get"})
"""Of the operations with outcomes those that count as reads; the others are writes."""


class BreakerState(enum.Enum):
    """What a breaker does with calls. The value is that of the gauge `kvstore_breaker_state`."""

    CLOSED = 0  # lets all through
    HALF_OPEN = 1  # one probe is under way, the others are refused
    OPEN = 2  # refuses all until the interval is over


class _Rules(NamedTuple):
    """What both circuits of a breaker go by; see the arguments of `BreakerBackend`."""

    inner: Backend
    failures: int
    open_for: float
    max_open_for: float
    metrics: Metrics | None
    clock: Callable[[], float]
    rng: Callable[[], float]


class _Circuit:
    """The state of a breaker for one side of a backend: its reads, or its writes.

    Attributes:
        epoch: number of changes of state.
    """

    def __init__(self, rules: _Rules, side: str) -> None:
        self._rules = rules
        self._side = side
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self.epoch = 0
        self._failures = 0  # in a row
        self._interval = rules.open_for
        self._next_probe = 0.0  # clock time from which a call may probe
        self._opened = 0.0  # clock time

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._state is BreakerState.HALF_OPEN:  # the thread that probes is in the parent
            self._next_probe = self._rules.clock()

    @property
    def state(self) -> BreakerState:
        """What it does with calls now."""
        return self._state

    def admit(self) -> tuple[int, bool] | None:
        """(epoch, is a probe) for a call that may go through; None if it is refused."""
        epoch = self.epoch  # no lock on the usual path; a stale view is sorted out by the epoch
        if self.state is BreakerState.CLOSED:
            return epoch, False
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return self.epoch, False
            now = self._rules.clock()
            if now < self._next_probe:
                return None
            if self._state is BreakerState.HALF_OPEN:  # the probe before this one never answered
                self._interval = min(self._interval * 2, self._rules.max_open_for)
            self._next_probe = now + self._rules.max_open_for  # from then on this probe is given up
            self._become(BreakerState.HALF_OPEN)
            return self.epoch, True

    def _become(self, state: BreakerState) -> None:
        """Called with the lock held."""
        self._state = state
        self.epoch += 1
        if self._rules.metrics is not None:
            changed: Change = (
                "kvstore_breaker_changes_total",
                (self._rules.inner.name, self._side, state.name.lower()),
                1,
            )
            now: Change = ("kvstore_breaker_state", (self._rules.inner.name, self._side), state.value)
            self._rules.metrics.update((changed, now))

    def settle(self, epoch: int, failed: bool | None, error: KVStoreError | None = None) -> None:
        """Take in how a call ended. `failed` None: it says nothing about the backend."""
        if failed is False and not self._failures and self.state is BreakerState.CLOSED:
            return
        opened = closed = False
        with self._lock:
            if epoch != self.epoch:
                return
            now = self._rules.clock()
            if self._state is BreakerState.HALF_OPEN:
                if failed is False:
                    closed = True
                    self._close_breaker()
                else:
                    self._open(now, grow=bool(failed))
                    if failed is None:  # nothing learnt: the next call probes
                        self._next_probe = now
            elif failed is False:
                self._failures = 0
            elif failed:
                self._failures += 1
                if self._failures >= self._rules.failures:
                    opened = True
                    self._opened = now
                    self._open(now, grow=False)
            down = now - self._opened
        if opened:
            logger.warning(
                "breaker for %s of backend %s opens after %d failed calls: %s",
                self._side,
                self._rules.inner.name,
                self._rules.failures,
                error or "no answer",
            )
        if closed:
            logger.info(
                "breaker for %s of backend %s closes: it answers again after %.1f s",
                self._side,
                self._rules.inner.name,
                down,
            )

    def _open(self, now: float, *, grow: bool) -> None:
        """Called with the lock held."""
        if grow:
            self._interval = min(self._interval * 2, self._rules.max_open_for)
        self._next_probe = now + self._interval * (0.5 + 0.5 * self._rules.rng())
        self._become(BreakerState.OPEN)

    def _close_breaker(self) -> None:
        """Called with the lock held."""
        self._failures = 0
        self._interval = self._rules.open_for
        self._become(BreakerState.CLOSED)


class BreakerBackend(Wrapper):
    """Refuses calls while the inner backend is down, and finds out by itself when it is back (M. Nygard, "Release
    It!", 2007, "Circuit Breaker").

    A call has failed if not one of its items got a definite answer and one failed with a `TransientError` (a hang up
    to the deadline is one), or if the backend broke its contract (a foreign exception). After `failures` failed calls
    in a row the breaker opens. OK, MISS, EXISTS, and permanent errors (too large, access denied) are definite
    answers. What says nothing about the backend is not counted: an empty batch, a `PoolExhausted`, a
    `LocalWait` (for a slot of `LimitedBackend`, for other users of a folder's counter), a call whose deadline had
    passed before it began.

    Reads (stat, get, lease, list) and writes (put, delete, quarantine) are counted apart and refused apart: a backend
    that is in trouble with writes still serves what it has.

    Open, it answers each item with a `TransientError` ("breaker open") within microseconds; `lease` with None, `list`
    by raising it. The interval is random between a half and the whole of `open_for`, which doubles with every failed
    probe up to `max_open_for`. The first call after the interval goes through as the probe, one at a time; its success
    closes the breaker at once. There is no thread and no traffic of its own: an idle breaker stays open at no cost,
    and the next call, whenever it comes, probes. A probe that has not answered within `max_open_for` is given up, and
    the next call probes. Results of calls that began before the last change of state are ignored.

    With `probe`, the question is asked of that function first, with at most `probe_timeout` seconds; the call goes
    through if it returns True, and is refused otherwise. So no caller waits for a hung backend for its whole deadline.

    Each change of state is counted; opening is logged once (warning), and so is closing (info).

    Args:
        failures: failed calls in a row that open it; at least 1.
        open_for, max_open_for: seconds.
        probe: None: the caller's own call is the probe.
        probe_timeout: seconds.
        metrics: None: counted nowhere.
        clock, rng: for tests.

    Raises:
        ConfigError: an argument out of range.
    """

    options = (
        Option("breaker_failures", "int", 5, "Failed calls in a row after which a backend is left alone for a while; 0 "
               "switches the breaker off.", minimum=0, maximum=1_000_000),
        Option("breaker_interval", "duration", 1.0, "How long a backend is left alone before it is tried again; "
               "doubles while it stays down.", minimum=0.001, maximum=3600.0),
        Option("breaker_max_interval", "duration", 30.0, "Upper bound of breaker_interval as it doubles.",
               minimum=0.001, maximum=3600.0),
    )  # fmt: skip

    def __init__(
        self,
        inner: Backend,
        *,
        failures: int = 5,
        open_for: float = 1.0,
        max_open_for: float = 30.0,
        probe: Probe | None = None,
        probe_timeout: float = 1.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        if failures < 1:
            raise ConfigError(f"failures={failures} must be at least 1")
        if not 0 < open_for <= max_open_for or probe_timeout <= 0:
            raise ConfigError(
                f"open_for={open_for}, max_open_for={max_open_for}, probe_timeout={probe_timeout}: must be positive, "
                "and open_for at most max_open_for"
            )
        self._probe = probe
        self._probe_timeout = probe_timeout
        self._metrics = metrics
        self._clock = clock
        rules = _Rules(inner, failures, open_for, max_open_for, metrics, clock, rng)
        self._reads, self._writes = _Circuit(rules, "reads"), _Circuit(rules, "writes")

    def _after_fork(self) -> None:
        for circuit in (self._reads, self._writes):
            circuit.after_fork()

    @property
    def state(self) -> BreakerState:
        """What it does with calls now: the worse of `read_state` and `write_state`."""
        return max(self.read_state, self.write_state, key=lambda state: state.value)

    @property
    def read_state(self) -> BreakerState:
        """What it does with stat, get, lease and list. OPEN after the interval means that the next call probes."""
        return self._reads.state

    @property
    def write_state(self) -> BreakerState:
        """What it does with put, delete and quarantine, likewise."""
        return self._writes.state

    def _refusal(self, operation: str, items: int) -> TransientError:
        if self._metrics is not None and items:
            self._metrics.add("kvstore_breaker_refused_total", self.name, operation, amount=items)
        return TransientError("breaker open: the backend failed and is left alone", backend=self.name,
                              operation=operation)  # fmt: skip

    def _asked(self, circuit: _Circuit, epoch: int, deadline: float) -> bool:
        """Ask the probe function. False: the backend is not back."""
        if self._probe is None:
            return True
        failed: bool | None = None
        try:
            failed = not self._probe(self._inner, min(deadline, self._clock() + self._probe_timeout))
        except Exception as error:  # noqa: BLE001 - whatever the probe raises, it got no answer
            logger.debug("the probe of backend %s raised %s", self.name, type(error).__name__)
            failed = True
        finally:
            circuit.settle(epoch, failed)
        return not failed

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        circuit = self._reads if operation in _READS else self._writes
        ticket = circuit.admit()
        if ticket is None or (ticket[1] and not self._asked(circuit, ticket[0], deadline)):
            return [Outcome.failed(self._refusal(operation, len(items)))] * len(items)
        epoch = ticket[0] if not ticket[1] or self._probe is None else circuit.epoch
        too_late = deadline <= self._clock()
        failed: bool | None = None
        error: KVStoreError | None = None
        try:
            outcomes = call_backend(self._inner, operation, items, deadline)
            if not too_late:
                failed, error = _verdict(outcomes)
        finally:
            circuit.settle(epoch, failed, error)
        return outcomes

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """As the inner backend; None throughout while the state of reads is not CLOSED. Neither counts nor probes."""
        self._check_open("lease")
        if self._reads.state is not BreakerState.CLOSED:
            return [None] * len(keys)
        return super().lease(keys, deadline=deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """As the inner backend; the first page is fetched at once and decides whether the call failed.

        Raises:
            TransientError: the breaker is open.
        """
        self._check_open("list")
        circuit = self._reads
        ticket = circuit.admit()
        if ticket is None or (ticket[1] and not self._asked(circuit, ticket[0], deadline)):
            raise self._refusal("list", 1)
        epoch = ticket[0] if not ticket[1] or self._probe is None else circuit.epoch
        too_late = deadline <= self._clock()
        failed: bool | None = None
        error: KVStoreError | None = None
        try:
            pages = super().list(deadline=deadline)
            first = next(pages, None)
            failed = None if too_late else False
        except BackendError as raised:
            error = raised
            if not too_late:
                failed, _ = _verdict([Outcome.failed(raised)])
            raise
        finally:
            circuit.settle(epoch, failed, error)
        return iter(()) if first is None else itertools.chain((first,), pages)


def _verdict(outcomes: Sequence[Outcome]) -> tuple[bool | None, KVStoreError | None]:
    """Whether a call failed (None: it says nothing about the backend), and the error that shows it."""
    shown: KVStoreError | None = None
    for outcome in outcomes:
        error = outcome.error
        if error is None or not isinstance(error, TransientError | PoolExhausted | Unexpected):
            return False, None
        if shown is None and not isinstance(error, LocalWait | PoolExhausted):
            shown = error
    return (True, shown) if shown is not None else (None, None)
