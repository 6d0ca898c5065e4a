"""A check that a wrapper forwards everything: what it forgets falls back to the base class, silently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.backend import MISS, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool, Slab
from kvstore.keys import Key

__all__ = ["assert_forwards_everything"]

_ATTRIBUTES = ("name", "capabilities", "limits")
_NOT_FORWARDED = ("options", "from_url")  # how a backend is made, not what it does


def assert_forwards_everything(wrapper_cls: type[Backend], make: Callable[[Backend], Backend] | None = None) -> None:
    """Check that `wrapper_cls` inherits no public method or property from `Backend` itself.

    Args:
        wrapper_cls: the wrapper; a base class that it shares with other wrappers may do the forwarding.
        make: makes a wrapper around the given backend. With it, every method is also called once, and must reach the
            inner backend with its arguments and bring back what that answered; and the attributes must be the inner
            backend's (limits may be tighter, capabilities fewer).

    Raises:
        AssertionError: names what is not forwarded.
    """
    own: set[str] = set()
    for cls in wrapper_cls.__mro__[: wrapper_cls.__mro__.index(Backend)]:
        own |= vars(cls).keys()
    methods = {
        name
        for name, value in vars(Backend).items()
        if callable(value) and not name.startswith("_") and name not in _NOT_FORWARDED
    }
    missing = sorted(methods - own)
    if make is None:
        missing += [name for name in _ATTRIBUTES if name not in own]
    if missing:
        raise AssertionError(
            f"{wrapper_cls.__name__} inherits from Backend instead of forwarding: {', '.join(missing)}"
        )
    if make is not None:
        _check_calls(wrapper_cls, make)


class _Probe(Backend):
    """Answers each operation with something no default would give, and records what it was asked."""

    def __init__(self) -> None:
        self.name = "probe"
        self.capabilities = ~Capability.NONE
        self.limits = Limits(max_value_bytes=12_345, alignment=512, lanes=3, preferred_io_bytes=6_789)
        self.asked: list[tuple[str, Any, float]] = []
        self.pool = BufferPool(4096)
        self.leased = self.pool.acquire(16)
        self.closed = 0

    def _answer(self, operation: str, items: Sequence[Any], deadline: float, outcome: Outcome) -> list[Outcome]:
        self.asked.append((operation, list(items), deadline))
        return [outcome] * len(items)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._answer("stat", keys, deadline, Outcome(Status.OK, 1001))

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return self._answer("get_into", reads, deadline, Outcome(Status.OK, 7))

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return self._answer("put", writes, deadline, Outcome(Status.OK, 9))

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._answer("delete", keys, deadline, MISS)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._answer("quarantine", keys, deadline, MISS)

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        self.asked.append(("lease", list(keys), deadline))
        return [self.leased.retain() for _ in keys]

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        self.asked.append(("announce", waiting, math.inf))

    def register(self, slab: Slab) -> None:
        self.asked.append(("register", slab, math.inf))

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        self.asked.append(("list", None, deadline))
        yield [KeyInfo(Key(bytes(32)), 4, 5.0)]

    def close(self) -> None:
        self.closed += 1


def _check_calls(wrapper_cls: type[Backend], make: Callable[[Backend], Backend]) -> None:
    probe = _Probe()
    backend = make(probe)
    wrong: list[str] = []

    def expect(what: str, happened: bool) -> None:
        if not happened:
            wrong.append(what)

    def asked(operation: str, items: object, deadline: float) -> bool:
        return any(name == operation and got == items and until <= deadline for name, got, until in probe.asked)

    key, deadline = Key(bytes(range(32))), math.inf
    read = Read(key, memoryview(bytearray(7)), 3)
    write = Write(key, [memoryview(b"123456789")], Key(bytes(32)))
    try:
        expect("name", "probe" in backend.name)
        expect("capabilities", backend.capabilities in probe.capabilities and bool(backend.capabilities))
        expect("limits.max_value_bytes", 0 < backend.limits.max_value_bytes <= probe.limits.max_value_bytes)
        expect("limits.alignment", backend.limits.alignment == probe.limits.alignment)
        expect("limits.lanes", 0 < backend.limits.lanes <= probe.limits.lanes)
        expect("limits.preferred_io_bytes", backend.limits.preferred_io_bytes == probe.limits.preferred_io_bytes)
        answers = {
            "stat": (backend.stat([key], deadline=deadline), [Outcome(Status.OK, 1001)], [key]),
            "get_into": (backend.get_into([read], deadline=deadline), [Outcome(Status.OK, 7)], [read]),
            "put": (backend.put([write], deadline=deadline), [Outcome(Status.OK, 9)], [write]),
            "delete": (backend.delete([key], deadline=deadline), [MISS], [key]),
            "quarantine": (backend.quarantine([key], deadline=deadline), [MISS], [key]),
        }
        for operation, (answer, wanted, items) in answers.items():
            expect(f"{operation} (answer {answer})", answer == wanted)
            expect(f"{operation} (arguments)", asked(operation, items, deadline))
        pages = [list(page) for page in backend.list(deadline=deadline)]
        expect("list", pages == [[KeyInfo(Key(bytes(32)), 4, 5.0)]] and asked("list", None, deadline))
        leases = backend.lease([key], deadline=deadline)
        expect("lease", leases == [probe.leased] and asked("lease", [key], deadline))
        for lease in leases:
            if lease is not None:
                lease.release()
        backend.register(probe.leased.slab)
        expect("register", asked("register", probe.leased.slab, deadline))
    finally:
        backend.close()
        probe.leased.release()
        probe.pool.close()
    expect("close", probe.closed >= 1)
    if wrong:
        raise AssertionError(f"{wrapper_cls.__name__} does not forward: {', '.join(wrong)}")
