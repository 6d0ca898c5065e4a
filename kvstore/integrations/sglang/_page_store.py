"""Pages of one rank of an engine, in a store: what `KVStoreHiCache` does, without SGLang.

Nothing here raises because of storage: what cannot be had by its deadline is a miss, or not stored. Calls come from a
few threads of SGLang's that wait for the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvstore.backend import Outcome, Status
from kvstore.completion import Completion
from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.integrations._opaque import Client, Grumbler, outcomes_of, what_failed
from kvstore.keys import Key, opaque_key

from ._pages import Pages

__all__ = ["PREFIX", "Moved", "PageStore"]

logger = logging.getLogger("kvstore.integrations.sglang")

PREFIX = "sglang/"
"""Begins the names of all pages."""

_MARK = "sglang"  # in the meta block of each record: whose it is
_CLEAR_S = 60.0  # the engine stands still meanwhile
_MOST_MOVED = 4096  # transfers that are remembered until somebody asks


class Moved(NamedTuple):
    """One call that moved pages.

    Attributes:
        pages, nbytes: that arrived.
        seconds: until the answer.
    """

    pages: int
    nbytes: int
    seconds: float

    @property
    def gbytes_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


class PageStore:
    """Pages in a store.

    Args:
        client: of the store.
        writer: this rank writes; else another one writes what it would.
        measured: calls are remembered for `moved`.
    """

    def __init__(self, client: Client, *, writer: bool, measured: bool) -> None:
        self._client = client
        self._writer = writer
        self._measured = measured
        self._pages: Pages | None = None
        self._identity = ""
        self._mark = ""
        self._load_grumbler, self._store_grumbler, self._lookup_grumbler = (Grumbler(logger) for _ in range(3))
        self._lock = threading.Lock()
        self._loads: list[Moved] = []
        self._stores: list[Moved] = []

    def use(self, pages: Pages, identity: str) -> None:
        """Pages lie here from now on, and their names begin so."""
        self._pages, self._identity = pages, identity
        namespace = self._client.store.config.namespace
        self._mark = opaque_key(f"sglang mark/{identity}", namespace=namespace).hex()[:32]

    @property
    def pages(self) -> Pages:
        """Raises `ConfigError` before `use`."""
        if self._pages is None:
            raise ConfigError("SGLang has not registered its host pool yet")
        return self._pages

    # Places in the host pool.

    def load(self, hashes: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages into their places in the host pool: no copy is made. True: it holds what was stored, checksums
        verified; False: what it holds is undefined. Returns once nothing can write there any more."""
        return self._move(self._load_grumbler, "load", hashes, lambda: self.pages.views(host_indices), self._read)

    def save(self, hashes: Sequence[str], host_indices: Any, before: str | None = None) -> list[bool]:
        """Store pages from their places in the host pool, without a copy. Returns once nothing reads there any more.

        Args:
            before: hash of the page that the first one continues.
        """
        return self._save(hashes, lambda: self.pages.views(host_indices), before)

    # Flat pages, each a tensor of its own.

    def load_flat(self, hashes: Sequence[str], flats: Sequence[Any]) -> list[bool]:
        """As `load`, into flat pages."""
        return self._move(self._load_grumbler, "load", hashes, lambda: [*map(self.pages.split, flats)], self._read)

    def save_flat(self, hashes: Sequence[str], flats: Sequence[Any]) -> list[bool]:
        """As `save`, from flat pages."""
        return self._save(hashes, lambda: [*map(self.pages.split, flats)], None)

    # What is there.

    def prefix(self, hashes: Sequence[str]) -> int:
        """How many leading pages are stored; 0 if that cannot be told by `lookup_timeout`."""
        try:
            return self._client.prefix(self._names(hashes)).result()
        except KVStoreError as error:
            self._lookup_grumbler.warn("a lookup of SGLang's is in trouble", str(error))
            return 0

    def clear(self) -> int:
        """Remove all pages of this rank's that the store has, of whichever process; returns how many records went.
        Looks into every record of the store: the engine must stand still for it, and does so for 60 s at most.

        Raises:
            KVStoreError: some may be left: the place cannot be listed or reached, or took too long.
        """
        if not self._mark or not self._writer:
            return 0
        store, end, removed, unread = self._client.store, time.monotonic() + _CLEAR_S, 0, 0
        for page in store.list(deadline=end):
            keys = [info.key for info in page]
            heads = store.submit_heads(keys, deadline=end).result()
            unread += self._still_there([key for key, head in zip(keys, heads, strict=True) if head is None], end)
            mine = [head.key for head in heads if head is not None and head.meta().get(_MARK) == self._mark]
            outcomes = store.submit_delete(mine, deadline=end).result() if mine else ()
            if trouble := what_failed(outcomes):
                raise TransientError(f"pages are left: {trouble}", operation="delete")
            removed += sum(outcome.ok for outcome in outcomes)
        if unread:
            raise TransientError(f"pages may be left: {unread} records could not be looked into", operation="delete")
        return removed

    def _still_there(self, keys: Sequence[Key], end: float) -> int:
        """How many of these are stored, as far as can be told."""
        outcomes = self._client.store.submit_stat(keys, deadline=end).result() if keys else ()
        return sum(outcome.status is not Status.MISS for outcome in outcomes)

    # What was done.

    def moved(self) -> tuple[list[Moved], list[Moved]]:
        """Loads and saves since the last call."""
        with self._lock:
            moved = self._loads, self._stores
            self._loads, self._stores = [], []
        return moved

    def stats(self) -> dict[str, Any]:
        """As `Store.stats`."""
        return self._client.store.stats()

    def close(self) -> None:
        """Finish what is being written (within `close_timeout`), and end. May be called twice."""
        self._client.close()

    # Plumbing.

    def _names(self, hashes: Sequence[str]) -> list[str]:
        start = self._identity
        if not start:
            raise ConfigError("SGLang has not registered its host pool yet")
        return [f"{start}/{each}" for each in hashes]

    def _read(self, hashes: Sequence[str], parts: Sequence[Sequence[memoryview]]) -> Completion[Sequence[Outcome]]:
        return self._client.get_scattered(self._names(hashes), parts, self.pages.spec)

    def _save(
        self, hashes: Sequence[str], parts: Callable[[], Sequence[Sequence[memoryview]]], before: str | None
    ) -> list[bool]:
        if not self._writer:
            return [True] * len(hashes)

        def write(hashes: Sequence[str], parts: Sequence[Sequence[memoryview]]) -> Completion[Sequence[Outcome]]:
            name = None if before is None else self._names([before])[0]
            spec = self.pages.spec
            return self._client.put_gathered(self._names(hashes), parts, spec, meta={_MARK: self._mark}, before=name)

        return self._move(self._store_grumbler, "store", hashes, parts, write)

    def _move(
        self,
        grumbler: Grumbler,
        what: str,
        hashes: Sequence[str],
        parts: Callable[[], Sequence[Sequence[memoryview]]],
        submit: Callable[[Sequence[str], Sequence[Sequence[memoryview]]], Completion[Sequence[Outcome]]],
    ) -> list[bool]:
        begin = time.monotonic()
        try:
            completion = submit(hashes, parts())
        except KVStoreError as error:
            grumbler.warn(f"a {what} of SGLang's cannot be asked for", str(error))
            return [False] * len(hashes)
        self._client.settler.wait(completion)
        outcomes = outcomes_of(completion, len(hashes))
        storing = what == "store"
        grumbler.warn(f"a {what} of SGLang's is in trouble", what_failed(outcomes, stored=storing))
        fine = [outcome.stored if storing else outcome.ok for outcome in outcomes]
        # What was there already was not written.
        pages = sum(outcome.ok for outcome in outcomes)
        if self._measured and pages:
            moved = Moved(pages, pages * self.pages.spec.raw_bytes, time.monotonic() - begin)
            with self._lock:
                kept = self._stores if storing else self._loads
                if len(kept) < _MOST_MOVED:
                    kept.append(moved)
        return fine
