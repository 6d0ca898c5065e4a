"""S3-FIFO: most of what comes is used once, so let it prove itself in a small queue first."""

from __future__ import annotations

import time
from collections import OrderedDict

from kvstore.errors import ConfigError
from kvstore.keys import Key

from .base import Clock, RecordInfo
from .chain import ChainPolicy, Queue, Record

__all__ = ["S3FIFOPolicy"]

_MOST_USES = 3


class S3FIFOPolicy(ChainPolicy):
    """S3-FIFO (Yang et al., SOSP'23), leaf-first.

    New records enter a small first-in-first-out queue; those used since go on to the main one, the others go, and
    their names are kept as ghosts. What comes back while it is a ghost enters the main queue at once. In the main
    queue a record that was used goes round again, with one use less.

    Args:
        small: share of the bytes for the small queue; more than 0, less than 1. 0.1 is the paper's.
    """

    name = "s3fifo"

    def __init__(self, *, small: float = 0.1, clock: Clock = time.monotonic) -> None:
        if not 0 < small < 1:
            raise ConfigError(f"small must be between 0 and 1, not {small}")
        super().__init__(clock=clock)
        self._share = small
        self._small, self._main = self._queues = [Queue(0), Queue(1)]
        self._small_bytes = 0
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def _arrive(self, record: Record, info: RecordInfo | None) -> None:
        if record.key in self._ghosts:
            del self._ghosts[record.key]
            self._append(record, self._main)
            return
        self._append(record, self._small)
        self._small_bytes += record.nbytes

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None, info: RecordInfo | None = None) -> None:
        record = self._records.get(key)
        if record is not None and record.queue is self._small:
            self._small_bytes += nbytes - record.nbytes
        super().admit(key, nbytes, parent=parent, info=info)

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        return

    def _use(self, record: Record, now: float) -> None:
        # Uses at the time of admission, as of a batch that is stored, are none.
        if now > record.last and record.uses < _MOST_USES:
            record.uses += 1
            record.last = now

    def _gone(self, record: Record) -> None:
        if record.queue is not self._small:
            return
        self._small_bytes -= record.nbytes
        self._ghosts[record.key] = None
        while len(self._ghosts) > len(self._records) + 1:
            self._ghosts.popitem(last=False)

    def _pick(self) -> Record | None:
        while True:
            small = self._head(self._small)
            if small is not None and (self._small_bytes > self._share * self._nbytes):
                if not small.uses:
                    return small
                self._move_on(small)
                continue
            main = self._head(self._main)
            if main is None:
                if small is None or not small.uses:
                    return small
                self._move_on(small)
                continue
            if not main.uses:
                return main
            main.uses -= 1
            self._take(main)
            self._append(main, self._main)

    def _move_on(self, record: Record) -> None:
        self._take(record)
        self._small_bytes -= record.nbytes
        record.uses = 0
        self._append(record, self._main)
