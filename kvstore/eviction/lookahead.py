"""Scheduler-aware eviction around any order (CachedAttention, arXiv 2403.19708, section 3.3)."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence

from kvstore.errors import ConfigError
from kvstore.keys import Key

from .base import Clock, EvictionPolicy, RecordInfo
from .learned import LearnedPolicy

__all__ = ["DefaultPolicy", "LookAheadPolicy", "eviction_window", "prefetch_window"]


def prefetch_window(memory: int, session: float) -> int:
    """How many waiting jobs should be brought up: C_mem / S_kv.

    Args:
        memory: capacity of the fast tier, in bytes.
        session: mean bytes of a job's KV; more than 0.
    """
    return int(memory / session)


def eviction_window(memory: int, disk: int, session: float) -> int:
    """How many waiting jobs must not leave the store: (C_mem + C_disk) / S_kv. Arguments as above."""
    return int((memory + disk) / session)


class LookAheadPolicy(EvictionPolicy):
    """Another policy's order for what no waiting job needs; what one needs goes last, or never.

    The window is the head of the announced queue whose distinct records fit into `window` bytes: for jobs of equal
    size the formula (C_mem + C_disk) / S_kv. Records whose size is not known count with the mean size.
    Within the window, victims come from its tail: the last records of the last job first.

    Args:
        inner: the order of the rest.
        window: bytes of all tiers together, C_mem + C_disk; None: the whole queue is the window.
        last: victims leave the store (this is the slowest tier): then none comes from the window. False: they go to a
            slower tier, so those nearest the window's tail may.
    """

    name = "lookahead"

    def __init__(
        self,
        inner: str | EvictionPolicy = "lru",
        *,
        window: int | None = None,
        last: bool = True,
        clock: Clock = time.monotonic,
        **options: object,
    ) -> None:
        super().__init__(clock=clock)
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ConfigError(f"window must be at least 1 byte or None, not {window!r}")
        if isinstance(inner, str):
            from . import make_policy  # the table has this class in it

            if inner in (LookAheadPolicy.name, DefaultPolicy.name):
                raise ConfigError(f"lookahead around {inner} would look ahead twice; choose another inner policy")
            inner = make_policy(inner, clock=clock, **options)
        self._inner = inner
        self._limit = window
        self._last = last
        self._largest = 1  # bytes of a record, so far
        self._window: dict[Key, None] = {}  # the most urgent first; each pinned in `_inner`, but for
        self._given: list[Key] = []  # … those offered already

    def admit(self, key: Key, nbytes: int, *, parent: Key | None = None, info: RecordInfo | None = None) -> None:
        self._largest = max(self._largest, nbytes)
        self._inner.admit(key, nbytes, parent=parent, info=info)

    def touch(self, keys: Sequence[Key]) -> None:
        self._inner.touch(keys)

    def forget(self, key: Key) -> int:
        return self._inner.forget(key)

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        self._take_back()
        new = self._cut(waiting)
        old = self._window
        self._window = new
        self._inner.pin([key for key in new if key not in old])
        self._inner.unpin([key for key in old if key not in new])

    @property
    def window(self) -> Container[Key]:
        """What the waiting jobs in the window need, resident or not."""
        return self._window

    def _cut(self, waiting: Sequence[Sequence[Key]]) -> dict[Key, None]:
        whole: dict[Key, None] = {}
        for chain in waiting:
            whole.update(dict.fromkeys(chain))
        if self._limit is None or len(whole) * self._largest <= self._limit:
            return whole  # no need to look at each
        window: dict[Key, None] = {}
        inner, room = self._inner, float(self._limit)
        mean = inner.nbytes / len(inner) if len(inner) else 1.0
        for chain in waiting:
            fresh = [key for key in chain if key not in window]
            need = sum(inner.size_of(key) or mean for key in fresh)
            if need > room:
                break
            room -= need
            window.update(dict.fromkeys(fresh))
        return window

    def victims(self, *, keep: Container[Key] = ()) -> Iterator[Key]:
        self._take_back()
        inner, window, given = self._inner, self._window, self._given
        offered: set[Key] = set()
        for key in inner.victims(keep=keep):
            offered.add(key)
            yield key
        if self._last:
            return
        for key in list(reversed(window)):
            if key not in inner or key in keep or window is not self._window or key not in window:
                continue
            given.append(key)
            inner.unpin((key,))
            for victim in inner.victims(keep=keep):
                if victim not in offered:
                    offered.add(victim)
                    yield victim

    def _take_back(self) -> None:
        """What was offered from the window and is in it still is protected again."""
        if self._given:
            self._inner.pin(self._given)
            self._given.clear()

    def expired(self) -> Iterator[Key]:
        return self._inner.expired()

    @property
    def expires(self) -> bool:
        return self._inner.expires

    def pin(self, keys: Iterable[Key]) -> None:
        keys = list(keys)
        self._inner.pin({key for key in keys if key not in self._pins})  # once, however often it is pinned here
        super().pin(keys)

    def _unpinned(self, key: Key) -> None:
        # Counted here, so that nobody takes the window's own pins away: the caller's last pin is one of the inner ones.
        self._inner.unpin((key,))

    def links(self) -> list[tuple[Key, Key]]:
        return self._inner.links()

    def size_of(self, key: Key) -> int:
        return self._inner.size_of(key)

    def __contains__(self, key: object) -> bool:
        return key in self._inner

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes


class DefaultPolicy(LookAheadPolicy):
    """The one that wins on the traces: the learned order, with look-ahead where a queue is announced.

    Args:
        window, last: see `LookAheadPolicy`.
        trust, burst: see `LearnedPolicy`.
    """

    name = "default"

    def __init__(
        self,
        *,
        window: int | None = None,
        last: bool = True,
        trust: float = 0.7,
        burst: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(LearnedPolicy(trust=trust, burst=burst, clock=clock), window=window, last=last, clock=clock)
