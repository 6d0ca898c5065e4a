"""`FaultyBackend`: any backend, with faults where a script names them.

Order and time are the script's, never a sleep's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.backend import (
    MISS,
    NO_DEADLINE,
    OK,
    Backend,
    Capability,
    KeyInfo,
    Limits,
    Outcome,
    Read,
    Status,
    Write,
    without_landing,
)
from kvstore.errors import ClosedError, ConfigError, KVStoreError, TransientError
from kvstore.keys import Key

from .fault import APPLIES, OK_FAULT, Call, Fault

if TYPE_CHECKING:
    from kvstore.buffers import Buffer, Slab

__all__ = ["Call", "Fault", "FaultyBackend"]

_Item = TypeVar("_Item", Key, Read, Write)

_SCRIPTED_BY_NAME_ONLY = ("register", "close")


class FaultyBackend(Backend):
    """A backend that fails where its script says so, and records every call.

    One step of the script is consumed per call, in the order the calls arrive; an empty script means `otherwise`.
    Callable from any number of threads. Nothing is copied, but by `flip` and `short` on put and `late` on get.

    Args:
        inner: the backend that does what is not faulty.
        script: steps for calls of any operation (but register and close); or steps per operation, by its name in
            `Call`.
        by_key: steps for a key, or for an (operation, key); consumed one per call that has the key, and applied to
            its items alone, in place of what the script says for them.
        otherwise: what is done when there is no step, for ever.
        hang_limit_s: after so many seconds a call that nobody released raises `RuntimeError`: a faulty test shall
            fail, not hang.

    Attributes:
        calls: every call so far.
    """

    def __init__(
        self,
        inner: Backend,
        script: Iterable[Fault] | Mapping[str, Iterable[Fault]] = (),
        *,
        by_key: Mapping[Key | tuple[str, Key], Iterable[Fault]] | None = None,
        otherwise: Fault = OK_FAULT,
        hang_limit_s: float = 60.0,
    ) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self._any: deque[Fault] = deque()
        self._by_operation: dict[str, deque[Fault]] = {name: deque() for name in APPLIES}
        self._by_key: dict[tuple[str, Key], deque[Fault]] = {}
        self._otherwise = otherwise
        self._hang_limit_s = hang_limit_s
        self._hung: list[threading.Event] = []
        self._changed = threading.Condition()
        self._misapplied: list[str] = []
        self._pid = os.getpid()
        if isinstance(script, Mapping):
            for operation, steps in script.items():
                self.push(*steps, operation=operation)
        else:
            self.push(*script)
        for where, steps in (by_key or {}).items():
            operation, key = where if isinstance(where, tuple) else ("", where)
            if operation and operation not in APPLIES:
                raise ConfigError(f"no operation {operation!r}; known: {', '.join(APPLIES)}")
            self._by_key[operation, key] = deque(steps)

    # The script, and what came of it.

    def push(self, *steps: Fault, operation: str | None = None) -> None:
        """Add steps to the end of the script, of all operations or of one."""
        if operation is not None and operation not in APPLIES:
            raise ConfigError(f"no operation {operation!r}; known: {', '.join(APPLIES)}")
        with self._changed:
            (self._any if operation is None else self._by_operation[operation]).extend(steps)

    def release(self, count: int | None = None) -> int:
        """Let calls that hang now go on, those that hung first before others; all, or `count`. Returns how many."""
        with self._changed:
            free, self._hung = self._hung[:count], [] if count is None else self._hung[count:]
            for event in free:
                event.set()
        return len(free)

    def wait_hung(self, count: int = 1, timeout: float = 30.0) -> None:
        """Block until at least `count` calls hang. Raises `TimeoutError` if they do not within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._hung) >= count, timeout):
                raise TimeoutError(f"{len(self._hung)} calls hang after {timeout} s instead of {count}")

    def wait_done(self, count: int = 1, operation: str | None = None, timeout: float = 30.0) -> None:
        """Block until at least `count` calls (of `operation`) have ended. Raises `TimeoutError` as `wait_hung`."""

        def ended() -> int:
            return sum(call.done and operation in (None, call.operation) for call in self.calls)

        with self._changed:
            if not self._changed.wait_for(lambda: ended() >= count, timeout):
                raise TimeoutError(f"{ended()} calls ended after {timeout} s instead of {count}")

    @property
    def hung(self) -> int:
        """Number of calls that hang now."""
        with self._changed:
            return len(self._hung)

    def calls_of(self, operation: str) -> list[Call]:
        """The calls of one operation so far."""
        with self._changed:
            return [call for call in self.calls if call.operation == operation]

    def count(self, operation: str, key: Key | None = None) -> int:
        """Number of items (of one key) that calls of an operation had so far: 3 gets of 8 keys are 24."""
        return sum(len(call.keys) if key is None else call.keys.count(key) for call in self.calls_of(operation))

    def assert_done(self) -> None:
        """Raise `AssertionError` unless every step was consumed and applied: a fault that never happened proves
        nothing."""
        with self._changed:
            left = {"any": self._any, **self._by_operation}
            named = {f"{operation or 'any'} of {key!r}": steps for (operation, key), steps in self._by_key.items()}
            unused = [f"{where}: {len(steps)}" for where, steps in {**left, **named}.items() if steps]
            wrong = list(self._misapplied)
        if unused or wrong:
            raise AssertionError(f"steps left: {', '.join(unused) or 'none'}; misapplied: {', '.join(wrong) or 'none'}")

    # Carrying out.

    def _begin(self, call: Call) -> list[Fault]:
        """Record the call, take its step, and return the fault of each item. Call-wide waits and raises are done."""
        if self._pid != os.getpid():
            raise ClosedError("a FaultyBackend does not work in a forked child", operation=call.operation)
        call.thread = threading.current_thread().name
        with self._changed:
            self.calls.append(call)
            if self._by_operation[call.operation]:
                call.fault = self._by_operation[call.operation].popleft()
            elif call.operation not in _SCRIPTED_BY_NAME_ONLY:
                call.fault = self._any.popleft() if self._any else self._otherwise
            special: dict[Key, Fault] = {}
            for key in dict.fromkeys(call.keys) if self._by_key else ():
                for steps in (self._by_key.get((call.operation, key)), self._by_key.get(("", key))):
                    if steps:
                        special[key] = steps.popleft()
                        break
        fault = call.fault
        while fault.kind in ("hang", "raises"):
            fault = self._wait_or_raise(fault)
        faults = [
            special.get(key, fault.items.get(i, OK_FAULT) if fault.items else fault) for i, key in enumerate(call.keys)
        ]
        if beyond := [index for index in fault.items if index >= len(call.keys)]:
            self._misapplied.append(f"{call.operation} of {len(call.keys)} items has no item {beyond[0]}")
        for index in range(len(faults)):
            while faults[index].kind in ("hang", "raises"):  # an item that hangs hangs its batch
                faults[index] = self._wait_or_raise(faults[index])
        for one in {f.kind: f for f in (faults if call.keys else [fault])}.values():
            if one.kind not in APPLIES[call.operation]:
                self._misapplied.append(f"{one.kind} on {call.operation}")
                raise TypeError(f"Fault.{one.kind} does not apply to {call.operation}")
        return faults if call.keys else [fault]

    def _wait_or_raise(self, fault: Fault) -> Fault:
        if fault.kind == "raises" and fault.exception is not None:
            raise fault.exception
        self._hang()
        return fault.then or OK_FAULT

    def _hang(self) -> None:
        event = threading.Event()
        with self._changed:
            self._hung.append(event)
            self._changed.notify_all()
        if not event.wait(self._hang_limit_s):
            with self._changed:
                self._hung = [other for other in self._hung if other is not event]
            raise RuntimeError(f"a scripted hang was not released within {self._hang_limit_s} s")

    def _end(
        self, call: Call, outcomes: Sequence[Outcome] | None = None, exception: BaseException | None = None
    ) -> None:
        if self._pid != os.getpid():  # another thread may have held the lock at the fork
            return
        with self._changed:
            call.outcomes, call.exception, call.done = outcomes, exception, True
            self._changed.notify_all()

    def _failed(self, call: Call, key: Key, text: str) -> Outcome:
        return Outcome.failed(TransientError(text, backend=self.name, operation=call.operation, key=key))

    def _batch(
        self, call: Call, items: Sequence[_Item], forward: Callable[[Sequence[_Item], float], list[Outcome]]
    ) -> list[Outcome]:
        """One batch call of an operation that answers outcomes."""
        try:
            faults = self._begin(call) if items else self._begin(call)[:0]
            if any(fault.kind == "late" for fault in faults):
                outcomes = self._late(call, items, faults, forward)
            else:
                outcomes = self._apply(call, items, faults, forward, call.deadline)
        except BaseException as error:
            self._end(call, exception=error)
            raise
        self._end(call, outcomes)
        return outcomes

    def _late(
        self,
        call: Call,
        items: Sequence[_Item],
        faults: list[Fault],
        forward: Callable[[Sequence[_Item], float], list[Outcome]],
    ) -> list[Outcome]:
        faults = [OK_FAULT if fault.kind == "late" else fault for fault in faults]
        if call.operation != "get":
            self._hang()
            return self._apply(call, items, faults, forward, NO_DEADLINE)
        reads: Sequence[Any] = items
        shadows = [read._replace(dst=memoryview(bytearray(len(read.dst)))) for read in reads]
        outcomes = self._apply(call, shadows, faults, forward, NO_DEADLINE)
        self._hang()
        for read, shadow, fault, outcome in zip(reads, shadows, faults, outcomes, strict=True):
            arrived = fault.amount if fault.kind == "cut" else 0 if fault.kind == "drop" else outcome.nbytes
            read.dst[:arrived] = shadow.dst[:arrived]
        return outcomes

    def _apply(
        self,
        call: Call,
        items: Sequence[_Item],
        faults: list[Fault],
        forward: Callable[[Sequence[_Item], float], list[Outcome]],
        deadline: float,
    ) -> list[Outcome]:
        if all(fault is OK_FAULT or fault.kind == "ok" for fault in faults):
            return forward(items, deadline)
        outcomes: list[Outcome | None] = []
        sent: list[_Item] = []
        for key, item, fault in zip(call.keys, items, faults, strict=True):
            answer = self._answer(call, key, item, fault)
            outcomes.append(answer)
            if answer is None:
                sent.append(_disturbed(item, fault))
        answers = iter(forward(sent, deadline) if sent else ())
        return [
            outcome if outcome is not None else self._finish(call, key, item, fault, next(answers))
            for key, item, fault, outcome in zip(call.keys, items, faults, outcomes, strict=True)
        ]

    def _answer(self, call: Call, key: Key, item: Key | Read | Write, fault: Fault) -> Outcome | None:
        """The outcome of an item that does not reach the inner backend, or None."""
        if fault.kind == "miss":
            return MISS
        if fault.kind == "error":
            if isinstance(fault.exception, KVStoreError):
                return Outcome.failed(fault.exception)
            return self._failed(call, key, "scripted error")
        if fault.kind == "cut" and isinstance(item, Write):
            return self._failed(call, key, f"the connection broke after {fault.amount} bytes (scripted)")
        if fault.kind == "drop":
            return Outcome(Status.OK, _size(item))
        return None

    def _finish(self, call: Call, key: Key, item: Key | Read | Write, fault: Fault, outcome: Outcome) -> Outcome:
        """The outcome of an item that reached the inner backend."""
        if not outcome.ok:
            return outcome
        if fault.kind == "cut":
            return self._failed(call, key, f"the connection broke after {outcome.nbytes} bytes (scripted)")
        if fault.kind == "flip" and isinstance(item, Read) and outcome.nbytes:
            _flip(item.dst[: outcome.nbytes], fault.amount)
        if fault.kind == "short":
            if isinstance(item, Write):
                return Outcome(Status.OK, item.nbytes)
            if call.operation == "stat":
                return Outcome(Status.OK, min(outcome.nbytes, fault.amount))
        return outcome

    # Backend.

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        return self.inner.capabilities & ~Capability.LANDING  # bytes may change after they landed

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        return self.inner.limits

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        call = Call("stat", tuple(keys), deadline)
        return self._batch(call, keys, lambda items, end: self.inner.stat(items, deadline=end))

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        ranges = tuple((read.offset, len(read.dst)) for read in reads)
        keys = tuple(read.key for read in reads)
        call = Call("get", keys, deadline, ranges, sum(length for _, length in ranges))
        plain = without_landing(reads)
        return self._batch(call, plain, lambda items, end: self.inner.get_into(items, deadline=end))

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        keys = tuple(write.key for write in writes)
        call = Call("put", keys, deadline, nbytes=sum(write.nbytes for write in writes))
        return self._batch(call, writes, lambda items, end: self.inner.put(items, deadline=end))

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        call = Call("delete", tuple(keys), deadline)
        return self._batch(call, keys, lambda items, end: self.inner.delete(items, deadline=end))

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        call = Call("quarantine", tuple(keys), deadline)
        return self._batch(call, keys, lambda items, end: self.inner.quarantine(items, deadline=end))

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        call = Call("lease", tuple(keys), deadline)
        try:
            faults = self._begin(call)[: len(keys)]
            if late := any(fault.kind == "late" for fault in faults):
                self._hang()
            wanted = [key for key, fault in zip(keys, faults, strict=True) if fault.kind in ("ok", "late")]
            found = iter(self.inner.lease(wanted, deadline=NO_DEADLINE if late else deadline))
            leases = [next(found) if fault.kind in ("ok", "late") else None for fault in faults]
        except BaseException as error:
            self._end(call, exception=error)
            raise
        self._end(call)
        return leases

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        call = Call("list", (), deadline)
        try:
            (fault,) = self._begin(call)
            if fault.kind == "late":
                self._hang()
            if fault.kind == "error":
                raise fault.exception or TransientError("scripted error", backend=self.name, operation="list")
            pages = self.inner.list(deadline=NO_DEADLINE if fault.kind == "late" else deadline)
        except BaseException as error:
            self._end(call, exception=error)
            raise
        self._end(call)
        if fault.kind == "miss":
            return iter(())
        return self._cut_pages(pages, fault.amount) if fault.kind == "cut" else pages

    def _cut_pages(self, pages: Iterator[Sequence[KeyInfo]], count: int) -> Iterator[Sequence[KeyInfo]]:
        for _, page in zip(range(count), pages, strict=False):
            yield page
        raise TransientError(
            f"the connection broke after {count} pages (scripted)", backend=self.name, operation="list"
        )

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        self.inner.announce(waiting)

    def register(self, slab: Slab) -> None:
        self._plain("register", lambda: self.inner.register(slab))

    def close(self) -> None:
        """Close the inner backend. Calls that hang go on hanging until `release`, as calls to a dead server do."""
        if self._pid != os.getpid():
            self.inner.close()
            return
        self._plain("close", self.inner.close)

    def _plain(self, operation: str, forward: Callable[[], None]) -> None:
        call = Call(operation, (), NO_DEADLINE)
        try:
            self._begin(call)
            forward()
        except BaseException as error:
            self._end(call, exception=error)
            raise
        self._end(call)

    def __repr__(self) -> str:
        return f"<FaultyBackend over {self.inner!r}>"


def _size(item: Key | Read | Write) -> int:
    """The bytes that OK would report for an item whose record is as long as asked for."""
    if isinstance(item, Read):
        return len(item.dst)
    return item.nbytes if isinstance(item, Write) else OK.nbytes


def _disturbed(item: _Item, fault: Fault) -> _Item:
    """What reaches the inner backend in place of `item`."""
    if isinstance(item, Read) and fault.kind in ("short", "cut"):
        return item._replace(dst=item.dst[: fault.amount])
    if isinstance(item, Write) and fault.kind in ("short", "flip"):
        stored = bytearray().join(item.src)
        if fault.kind == "short":
            del stored[fault.amount :]
        elif stored:
            _flip(memoryview(stored), fault.amount)
        return item._replace(src=[memoryview(stored)])
    return item


def _flip(data: memoryview, bit: int) -> None:
    byte, bit = divmod(bit % (8 * len(data)), 8)
    data[byte] ^= 1 << bit
