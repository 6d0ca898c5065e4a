"""Writes of documents under way, and what came of those that ended."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from kvstore.backend import Status
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.completion import Completion

__all__ = ["Writes"]


class Writes:
    """Writes under way, and what came of those that ended.

    Attributes:
        pending: those under way.
        stored, existing, failed: how many ended so.
        nbytes: bytes written.
        error: why the first of `failed` failed, or None.
    """

    def __init__(self) -> None:
        self.pending: deque[Completion[Any]] = deque()
        self.stored = self.existing = self.failed = self.nbytes = 0
        self.error: KVStoreError | None = None

    def fail(self, error: KVStoreError | None) -> None:
        self.failed += 1
        self.error = self.error or error

    def drain(self, most: int) -> None:
        """Wait until at most so many are under way."""
        while len(self.pending) > most:
            try:
                outcome = self.pending.popleft().result()[0]
            except KVStoreError as error:  # on_error="raise"
                self.fail(error)
                continue
            self.stored += outcome.status is Status.OK
            self.existing += outcome.status is Status.EXISTS
            self.nbytes += outcome.nbytes
            if outcome.status not in (Status.OK, Status.EXISTS):
                self.fail(outcome.error)
