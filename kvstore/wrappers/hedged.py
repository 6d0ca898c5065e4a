"""A second request to another replica for reads that take unusually long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kvstore.backend import Backend, Capability, Outcome, Read, Status, without_landing
from kvstore.buffers import Buffer, BufferPool, copy_bytes
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PoolExhausted, TransientError
from kvstore.metrics import Change, Metrics
from kvstore.options import Option

from .base import Operation, Wrapper, call_backend
from .hedging import Budget, LatencyTable, Workers

if TYPE_CHECKING:
    from kvstore.buffers import Slab

__all__ = ["HedgedBackend"]

_HUNG = 4.0  # times the usual: not just slow
_JOIN_SECONDS = 1.0  # how long close waits for requests under way


class _Try:
    """One request under way in a worker, into scratch memory of its own."""

    __slots__ = ("answers", "backend", "deadline", "items", "note", "operation", "outcomes", "raised", "scratch")

    def __init__(
        self,
        backend: Backend,
        operation: Operation,
        items: Sequence[Any],
        deadline: float,
        answers: SimpleQueue[_Try],
        scratch: Buffer | None,
        note: Callable[[list[Outcome]], None] | None,
    ) -> None:
        self.backend = backend
        self.operation: Operation = operation
        self.items = items
        self.deadline = deadline
        self.answers = answers
        self.scratch = scratch
        self.note = note
        self.outcomes: list[Outcome] = []
        self.raised: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.outcomes, self.raised = _ask(self.backend, self.operation, self.items, self.deadline)
            if self.note is not None:
                self.note(self.outcomes)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, not to this thread
            self.raised = error
        finally:
            if self.scratch is not None:
                self.scratch.unpin()  # if the caller has gone, this gives the memory back
            self.answers.put(self)


class _Race:
    """The outcomes of one batch of reads, each taken from the first replica that has them.

    All reads of one key come from one replica, since two replicas may hold different versions of a record.
    """

    def __init__(self, operation: Operation, items: Sequence[Any]) -> None:
        self.items = items
        self.keys: Sequence[bytes] = [item.key for item in items] if operation == "get" else items
        self.results: list[Outcome | None] = [None] * len(items)
        self.missing = len(items)

    def take(self, outcomes: Sequence[Outcome], reads: Sequence[Read] | None) -> int:
        """Accept what one replica answered, for keys of which it has everything and that are still missing. Returns
        how many. `reads`: where the bytes lie now; None: they are where they belong, or there are none."""
        bad = {key for key, outcome in zip(self.keys, outcomes, strict=True) if not outcome.ok}
        wanted = [at for at, key in enumerate(self.keys) if self.results[at] is None and key not in bad]
        self.force(wanted, outcomes, reads)
        return len(wanted)

    def force(self, wanted: Sequence[int], outcomes: Sequence[Outcome], reads: Sequence[Read] | None) -> None:
        """Accept the outcomes of the items `wanted`, whatever they are."""
        for at in wanted:
            outcome = outcomes[at]
            if reads is not None and outcome.ok:
                dst: memoryview = self.items[at].dst
                count = min(outcome.nbytes, len(dst))
                copy_bytes(dst[:count], reads[at].dst[:count])
            self.results[at] = outcome
        self.missing -= len(wanted)

    def left(self) -> list[int]:
        """Indices of the items without an outcome."""
        return [at for at, outcome in enumerate(self.results) if outcome is None]


class HedgedBackend(Wrapper):
    """Reads from `primary`, and from `alternate` too when `primary` takes longer than it usually does (J. Dean and
    L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013).

    For `get_into` and `stat`:

    * A second request goes to the alternate when the primary has not answered within the `quantile` of its recent
      latencies for calls of about that size (at least `min_delay`). For each key the first replica that has all its
      reads wins. Second requests are at most `max_extra` of all requests, counted in items. Half of what can be saved
      up is not spent on what is a little slow, but only when four times the usual has passed: the primary hangs.
    * What the primary answers with MISS or ERROR is asked of the alternate. This needs no budget. If the alternate has
      no OK either, the primary's outcome stands.
    * If the primary is unusable (`ClosedError`), the alternate serves. Only if both are, the call raises.

    Everything else (put, delete, quarantine, lease, list) goes to the primary only: whoever keeps replicas writes to
    and deletes from each of them. Both replicas must hold the same bytes under a key, since two *calls* may be answered
    by two replicas.

    Where bytes are copied: a read that may be hedged lands in scratch memory of the pool and is copied once into
    `dst`, by the calling thread, before the call returns; so a late loser can never write to `dst`. Its scratch memory
    stays pinned until it has really ended. A read that cannot be hedged anyway is not copied: too few latencies are
    known, the budget is spent, no scratch memory or no thread is free, or the deadline is nearer than the delay. It
    runs in the calling thread straight into `dst`, and the fall-through to the alternate does too.

    After `os.fork` the child reads without hedging; falling through goes on.

    Args:
        primary, alternate: two replicas; both are closed with this.
        quantile: in (0, 1).
        max_extra: second requests as a share of all, 0 to 1. 0 leaves only the fall-through.
        pool: scratch memory, not closed with this; None: a pool of `scratch_bytes` of its own.
        scratch_bytes: size of its own pool.
        min_samples: latencies of a size class needed before reads of that class are hedged.
        min_delay: seconds; a shorter one would mostly measure the scheduler.
        threads: requests under way at once in threads of its own; default: twice the primary's lanes.
        metrics: None: counted nowhere.
        clock: `time.monotonic`, or one that advances with it.

    Raises:
        ConfigError: an argument out of range.
    """

    options = (
        Option("hedge", "bool", False, "Send a second read to another replica when the first takes unusually long; "
               "needs replicas."),
        Option("hedge_quantile", "float", 0.95, "What is unusually long: the quantile of recent latencies.",
               minimum=0.5, maximum=0.999),
        Option("hedge_extra", "float", 0.05, "Second reads as a share of all reads, at most.", minimum=0.0,
               maximum=1.0),
        Option("hedge_memory", "size", 64 << 20, "Memory that hedged reads land in before they are copied to their "
               "destination.", minimum=4096),
    )  # fmt: skip

    def __init__(
        self,
        primary: Backend,
        alternate: Backend,
        *,
        quantile: float = 0.95,
        max_extra: float = 0.05,
        pool: BufferPool | None = None,
        scratch_bytes: int = 64 << 20,
        min_samples: int = 32,
        min_delay: float = 0.001,
        threads: int | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(primary)
        if not 0 < quantile < 1 or not 0 <= max_extra <= 1 or min_samples < 1 or min_delay < 0:
            raise ConfigError(
                f"quantile={quantile}, max_extra={max_extra}, min_samples={min_samples}, min_delay={min_delay}: must "
                "be in (0, 1), in [0, 1], at least 1, and not negative"
            )
        most = 2 * primary.limits.lanes if threads is None else threads
        if most < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        self._alternate = alternate
        self._own_pool = pool is None
        self._pool = BufferPool(scratch_bytes) if pool is None else pool
        self._min_delay = min_delay
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._latencies = LatencyTable(quantile, min_samples)
        self._budget = Budget(max_extra)
        self._workers = Workers(most, primary.name)
        self._may_hedge = max_extra > 0
        try:
            for slab in self._pool.slabs:
                self.register(slab)
        except KVStoreError:
            if self._own_pool:
                self._pool.close()
            raise

    @property
    def alternate(self) -> Backend:
        """The other replica."""
        return self._alternate

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        """The primary's, and what concerns `register` if the alternate has it: memory must be made known to both. Not
        `LANDING`: bytes may come from either, through scratch memory."""
        own = self._inner.capabilities & ~Capability.LANDING
        both = Capability.REGISTERED_MEMORY | Capability.MAPPED_MEMORY
        return own | (self._alternate.capabilities & both)

    def _after_fork(self) -> None:
        # The threads are in the parent, and the pool's lock may have been held by one of them.
        self._lock = threading.Lock()
        self._may_hedge = False
        self._own_pool = False
        self._workers = Workers(1, "forked")

    def _count(self, operation: str, items: int, result: str) -> None:
        if self._metrics is not None:
            self._metrics.add("kvstore_hedged_reads_total", self.name, operation, result, amount=items)

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        self._check_open(operation)
        if operation not in {"get", "stat"} or not items:
            return call_backend(self._inner, operation, items, deadline)
        if operation == "get":
            items = without_landing(items)
        size = sum([len(item.dst) for item in items]) if operation == "get" else len(items)
        race = _Race(operation, items)
        if self._may_hedge:
            with self._lock:
                self._budget.earn(len(items))
                usual = self._latencies.quantile(operation, size)
                affordable = self._budget.covers(len(items))
            if usual is not None:
                delay = max(usual, self._min_delay)
                if not affordable:
                    self._count(operation, len(items), "budget")
                elif self._clock() + delay < deadline and self._hedge(race, operation, size, delay, deadline):
                    return [outcome for outcome in race.results if outcome is not None]
        self._plain(race, operation, size, deadline)
        return [outcome for outcome in race.results if outcome is not None]

    def _noting(self, operation: Operation, size: int) -> Callable[[list[Outcome]], None]:
        """What takes in the latency of a call of the primary that begins now, if it is a usual one: not a failed one,
        nor, of gets, a missed one."""
        start = self._clock()

        def note(outcomes: list[Outcome]) -> None:
            wanted = {Status.OK, Status.MISS} if operation == "stat" else {Status.OK}
            if all(outcome.status in wanted for outcome in outcomes):
                with self._lock:
                    self._latencies.note(operation, size, self._clock() - start)

        return note

    def _plain(self, race: _Race, operation: Operation, size: int, deadline: float) -> None:
        """Ask the primary in this thread, straight into the destinations; then fall through."""
        note = self._noting(operation, size)
        outcomes, raised = _ask(self._inner, operation, race.items, deadline)
        if self._may_hedge:
            note(outcomes)
        race.take(outcomes, None)
        if race.missing:
            self._fall_through(race, operation, outcomes, raised, None, deadline)

    def _fall_through(
        self,
        race: _Race,
        operation: Operation,
        first: Sequence[Outcome],
        raised: BaseException | None,
        scratch: Sequence[Read] | None,
        deadline: float,
    ) -> None:
        """Ask the alternate, in this thread and straight into the destinations, for what the primary does not have.
        The primary has ended, so nothing else writes there. `scratch`: where the primary's bytes lie, None: in the
        destinations.
        """
        left = race.left()
        if self._clock() >= deadline:
            race.force(left, first, scratch)
            return
        second, also = _ask(self._alternate, operation, [race.items[at] for at in left], deadline)
        if raised is not None and also is not None:
            raise raised
        saved = 0
        for at, outcome in zip(left, second, strict=True):
            if outcome.ok:
                race.results[at] = outcome
                saved += 1
            elif first[at].ok:  # of a key with mixed luck; the alternate may have written over its bytes
                race.results[at] = outcome if outcome.error is not None else _lost(self.name, operation)
            else:
                race.results[at] = first[at]
        race.missing = 0
        if self._metrics is not None:
            where = (self.name, operation)
            changes: tuple[Change, Change] = (
                ("kvstore_fallthrough_items_total", (*where, "saved"), saved),
                ("kvstore_fallthrough_items_total", (*where, "lost"), len(left) - saved),
            )
            self._metrics.update(changes)

    def _start(
        self,
        backend: Backend,
        race: _Race,
        operation: Operation,
        deadline: float,
        answers: SimpleQueue[_Try],
        note: Callable[[list[Outcome]], None] | None,
    ) -> _Try | None:
        """Begin a request in a worker. None (and counted): no memory or no thread is free."""
        scratch: Buffer | None = None
        items = race.items
        if operation == "get":
            sizes = [_spaced(len(item.dst)) for item in items]
            try:
                scratch = self._pool.acquire(sum(sizes), timeout=0)
            except (PoolExhausted, ClosedError):
                self._count(operation, len(items), "memory")
                return None
            scratch.pin()
            view, at, reads = scratch.view, 0, []
            for item, size in zip(items, sizes, strict=True):
                reads.append(Read(item.key, view[at : at + len(item.dst)], item.offset))
                at += size
            items = reads
        begun = _Try(backend, operation, items, deadline, answers, scratch, note)
        if self._workers.submit(begun):
            return begun
        if scratch is not None:
            scratch.unpin()
            scratch.release()
        self._count(operation, len(items), "threads")
        return None

    def _hedge(self, race: _Race, operation: Operation, size: int, delay: float, deadline: float) -> bool:
        """Fill `race` from both replicas. False, with nothing done: the first request could not be begun here."""
        answers: SimpleQueue[_Try] = SimpleQueue()
        start = self._clock()
        first = self._start(self._inner, race, operation, deadline, answers, self._noting(operation, size))
        if first is None:
            return False
        tries = [first]
        try:
            self._await(race, operation, tries, answers, (start + delay, start + _HUNG * delay), deadline)
        finally:
            for each in tries:
                if each.scratch is not None:
                    each.scratch.release()  # one that is still under way keeps its pin until it has ended
        return True

    def _await(
        self,
        race: _Race,
        operation: Operation,
        tries: list[_Try],
        answers: SimpleQueue[_Try],
        ask_again_at: tuple[float, float],
        deadline: float,
    ) -> None:
        """Args:
        ask_again_at: when the primary is late, and when it seems to hang.
        """
        slow_at, hung_at = ask_again_at
        ask_at = slow_at
        first, ended = tries[0], []
        result: str | None = "fast"  # None: counted by _start
        while race.missing:
            answer = _next_answer(answers, min(deadline, ask_at) - self._clock())
            if answer is not None:
                if answer.raised is not None and not isinstance(answer.raised, KVStoreError):
                    raise answer.raised  # an interrupt of the worker is one of the caller
                ended.append(answer)
                won = race.take(answer.outcomes, _reads(answer)) if answer.raised is None else 0
                if answer is not first and won:
                    result = "won"
                if race.missing and len(ended) == len(tries):
                    break
            elif self._clock() >= deadline:
                break
            elif len(tries) == 1 and ask_at < deadline:
                urgent = self._clock() >= hung_at
                result = self._ask_again(race, operation, tries, answers, deadline, urgent=urgent)
                ask_at = hung_at if result == "budget" and not urgent else deadline
        if result is not None:
            self._count(operation, len(race.items), result)
        if not race.missing:
            return
        raised = [each.raised for each in ended]
        if first not in ended:
            late = TransientError("no replica answered before the deadline", backend=self.name, operation=operation)
            race.force(race.left(), [Outcome.failed(late)] * len(race.items), None)
        elif len(tries) == 1:
            self._fall_through(race, operation, first.outcomes, first.raised, _reads(first), deadline)
        elif len(ended) == 2 and None not in raised and first.raised is not None:
            raise first.raised
        else:
            race.force(race.left(), first.outcomes, _reads(first))

    def _ask_again(
        self,
        race: _Race,
        operation: Operation,
        tries: list[_Try],
        answers: SimpleQueue[_Try],
        deadline: float,
        *,
        urgent: bool,
    ) -> str | None:
        """The second request, if it can be paid for. Returns what to count if it does not win."""
        cost = len(race.items)
        with self._lock:
            paid = self._budget.pay(cost, urgent=urgent)
        if not paid:
            return "budget"
        second = self._start(self._alternate, race, operation, deadline, answers, None)
        if second is None:
            with self._lock:
                self._budget.refund(cost)
            return None
        tries.append(second)
        return "lost"

    def register(self, slab: Slab) -> None:
        """Make a slab known to both replicas."""
        super().register(slab)
        self._register_with(self._alternate, slab)

    def close(self) -> None:
        """Close both replicas. Waits up to a second for requests under way; one that is still hung then keeps its
        thread and its scratch memory until it ends, and nothing else."""
        if self._closed:
            return
        self._closed = True
        self._workers.stop()
        self._close_inner(self._inner)
        self._close_inner(self._alternate)
        self._workers.join(_JOIN_SECONDS)
        if self._own_pool:
            self._pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r}, {self._alternate!r})"


def _ask(
    backend: Backend, operation: Operation, items: Sequence[Any], deadline: float
) -> tuple[list[Outcome], KVStoreError | None]:
    """The outcomes, and what the backend raised because it is unusable (then each outcome is that error)."""
    try:
        return call_backend(backend, operation, items, deadline), None
    except (ClosedError, ConfigError) as error:
        return [Outcome.failed(error)] * len(items), error


def _lost(backend: str, operation: str) -> Outcome:
    text = "one replica has a part of the record and the other none of it"
    return Outcome.failed(TransientError(text, backend=backend, operation=operation))


def _reads(tried: _Try) -> Sequence[Read] | None:
    return None if tried.scratch is None else tried.items


def _next_answer(answers: SimpleQueue[_Try], timeout: float) -> _Try | None:
    """The next request that ends within `timeout` seconds."""
    try:
        if timeout <= 0:
            return answers.get_nowait()
        return answers.get(timeout=min(timeout, threading.TIMEOUT_MAX))
    except Empty:
        return None


def _spaced(nbytes: int) -> int:
    """Room for one read in scratch memory, so that the next begins at a page (small ones: at a cache line)."""
    unit = 4096 if nbytes >= 4096 else 64
    return (nbytes + unit - 1) // unit * unit
