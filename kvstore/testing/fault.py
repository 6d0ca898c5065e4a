"""`Fault`: one step of a script for a `FaultyBackend`; `Call`: what reached it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.backend import Outcome
from kvstore.errors import KVStoreError
from kvstore.keys import Key

__all__ = ["APPLIES", "OK_FAULT", "Call", "Fault"]

_ALWAYS = {"ok", "raises", "hang", "each"}
APPLIES = {
    "stat": _ALWAYS | {"miss", "error", "late", "short"},
    "get": _ALWAYS | {"miss", "error", "late", "short", "cut", "flip", "drop"},
    "put": _ALWAYS | {"error", "late", "short", "cut", "flip", "drop"},
    "delete": _ALWAYS | {"miss", "error", "late", "drop"},
    "quarantine": _ALWAYS | {"miss", "error", "late", "drop"},
    "lease": _ALWAYS | {"miss", "error", "late"},
    "list": _ALWAYS | {"miss", "error", "late", "cut"},
    "register": {"ok", "raises", "hang"},
    "close": {"ok", "raises", "hang"},
}
"""The kinds of fault that make sense for an operation, by its name in `Call`."""


@dataclass(frozen=True)
class Fault:
    """One step of a script. Made by the static methods; `on` limits it to some items of the batch."""

    kind: str
    amount: int = 0
    exception: BaseException | type[BaseException] | None = None
    then: Fault | None = None
    items: Mapping[int, Fault] = field(default_factory=dict)

    @staticmethod
    def ok() -> Fault:
        """What the inner backend does."""
        return Fault("ok")

    @staticmethod
    def miss() -> Fault:
        """MISS, without asking the inner backend. For list: nothing is there; for lease: None."""
        return Fault("miss")

    @staticmethod
    def error(error: KVStoreError | None = None) -> Fault:
        """ERROR as the outcome, without asking the inner backend; default: a `TransientError`. list raises it."""
        return Fault("error", exception=error)

    @staticmethod
    def raises(error: BaseException | type[BaseException]) -> Fault:
        """The call raises `error`, of any type, without asking the inner backend."""
        return Fault("raises", exception=error)

    @staticmethod
    def hang(then: Fault | None = None) -> Fault:
        """The call does not return before `release`, as a read from a hung NFS server; then it does `then` (default
        `ok`) with its own deadline. Memory is not touched meanwhile."""
        return Fault("hang", then=then or Fault.ok())

    @staticmethod
    def late() -> Fault:
        """Late success: hangs until `release`, then succeeds whatever the deadline was. A get has its bytes ready
        beforehand and writes them to `dst` only after the release, even if the backend was closed meanwhile."""
        return Fault("late")

    @staticmethod
    def short(nbytes: int) -> Fault:
        """get: the record seems to end `nbytes` bytes behind the offset (OK, rest of `dst` untouched).
        put: only the first `nbytes` bytes are stored, and OK is answered for all. stat: reports at most `nbytes`."""
        return Fault("short", nbytes)

    @staticmethod
    def cut(nbytes: int) -> Fault:
        """get: `nbytes` bytes arrive in `dst`, then the connection breaks (ERROR). put: breaks likewise, nothing is
        stored. list: breaks (raises) after `nbytes` pages."""
        return Fault("cut", nbytes)

    @staticmethod
    def flip(bit: int) -> Fault:
        """Bit `bit` (modulo the number of bits; bit 0 is the lowest of byte 0) of what a get brought into `dst`, or
        of what a put stores, is inverted."""
        return Fault("flip", bit)

    @staticmethod
    def drop() -> Fault:
        """Acknowledge but drop: OK for all bytes, and nothing was stored, deleted or written to `dst`."""
        return Fault("drop")

    @staticmethod
    def each(items: Mapping[int, Fault]) -> Fault:
        """A fault of its own for some items of the batch, by index; the others are `ok`."""
        return Fault("each", items=dict(items))

    def on(self, *items: int) -> Fault:
        """This fault for these items of the batch only, by index."""
        return Fault.each(dict.fromkeys(items, self))


OK_FAULT = Fault.ok()


@dataclass(eq=False)
class Call:
    """One call that reached a `FaultyBackend`, in the order the calls began.

    Attributes:
        operation: "stat", "get", "put", "delete", "quarantine", "lease", "list", "register" or "close".
        ranges: of a get: (offset, length) per item.
        nbytes: bytes asked for by a get, or handed over by a put.
        fault: the step of the script.
        outcomes: what was answered; None while the call runs, when it raised, and for what answers otherwise.
        exception: what was raised.
        done: True once the call has ended.
    """

    operation: str
    keys: tuple[Key, ...]
    deadline: float
    ranges: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0
    fault: Fault = OK_FAULT
    thread: str = ""
    outcomes: Sequence[Outcome] | None = None
    exception: BaseException | None = None
    done: bool = False
