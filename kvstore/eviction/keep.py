"""No order at all."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence

from kvstore.keys import Key

from .base import Clock, EvictionPolicy, RecordInfo

__all__ = ["KeepPolicy"]


class KeepPolicy(EvictionPolicy):
    """Nothing is ever evicted: a full place refuses new records."""

    name = "none"

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._sizes: dict[Key, int] = {}
        self._nbytes = 0

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None, info: RecordInfo | None = None) -> None:
        self._nbytes += nbytes - self._sizes.get(key, 0)
        self._sizes[key] = nbytes

    def touch(self, keys: Sequence[Key]) -> None:
        return

    def forget(self, key: Key) -> int:
        nbytes = self._sizes.pop(key, 0)
        self._nbytes -= nbytes
        return nbytes

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        return iter(())

    def size_of(self, key: Key) -> int:
        return self._sizes.get(key, 0)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        return self._nbytes
