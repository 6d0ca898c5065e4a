"""What `kvstore doctor` finds: checks with an answer and an advice, and calls that end in time whatever they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

__all__ = ["Check", "Late", "Place", "within"]

T = TypeVar("T")


class Late(Exception):
    """A call did not end in time. It goes on in a thread of its own."""


def within(call: Callable[[], T], deadline: float) -> T:
    """What `call` returns or raises, if it does so by `deadline` (monotonic seconds); for calls that have no deadline
    of their own (a name server, a mounted file system, a credential process).

    Raises:
        Late: it did not.
    """
    done = threading.Event()
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
        done.set()

    thread = threading.Thread(target=run, name="kvstore-doctor", daemon=True)
    thread.start()
    if not done.wait(max(0.0, deadline - time.monotonic())):
        raise Late
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


@dataclass(slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        status: "ok", "warn" (it works, but), "fail", or "skip" (it could not be looked at, or has no meaning here).
        detail: what was found, one sentence; never a secret.
        advice: what to change; "" if nothing.
        data: the same as values, with units in the names.
    """

    name: str
    status: str
    detail: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Place:
    """All checks of one URL.

    Attributes:
        url: without options.
        deadline: of all of them, monotonic seconds.
    """

    url: str
    deadline: float
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, status: str, detail: str, advice: str = "", **data: Any) -> Check:
        check = Check(name, status, detail, advice, data)
        self.checks.append(check)
        return check

    def soon(self, seconds: float) -> float:
        """A deadline that far away, and within the place's own."""
        return min(self.deadline, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; not negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def failed(self) -> bool:
        return any(check.status == "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"url": self.url, "ok": not self.failed, "checks": [asdict(check) for check in self.checks]}
