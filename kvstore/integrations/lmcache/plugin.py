"""LMCache's MP mode, surface `plugin`: the whole L2 adapter of 0.5.6, with usage and listeners.

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "kvstore.integrations.lmcache",
        "class_name": "KVStoreL2Adapter", "adapter_params": {"remote_url": "s3://bucket/prefix"}}'

The surface changes from release to release; `KVStoreL2` (native_plugin) does not, and stores the same records.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.backend import Outcome, Status
from kvstore.completion import Completion
from kvstore.errors import ConfigError, KVStoreError
from kvstore.integrations._opaque import Grumbler, outcomes_of, what_failed

from ._client import SIZES, logger, names_of, open_client

__all__ = ["KVStoreL2Adapter"]


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """A store as LMCache's L2 adapter.

    Args:
        params: `remote_url`, `config_file`, `sizes` (as of `KVStoreL2`), `max_capacity_gb` (for LMCache's own eviction;
            0: none), and any option of `kvstore.config`.
        l1_memory_desc: LMCache's memory; not needed, since reads and writes use it in place.

    Raises:
        ConfigError: as `kvstore.open_store`.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        options = dict(params)
        capacity = options.pop("max_capacity_gb", 0)
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or capacity < 0:
            raise ConfigError(f"max_capacity_gb must be a number of GiB, not {capacity!r}")
        sizes = options.pop("sizes", "exact")
        if sizes not in SIZES:
            raise ConfigError(f"option sizes must be one of {', '.join(SIZES)}, not {sizes!r}")
        super().__init__(max_capacity_bytes=int(capacity * (1 << 30)))
        remote_url, config_file = options.pop("remote_url", None), options.pop("config_file", None)
        self._client = open_client("mp", remote_url, config_file, options)
        self._get = self._client.get if sizes == "exact" else self._client.get_at_most
        self._grumbler = Grumbler(logger)
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._lock = threading.Lock()
        self._tasks = 0
        self._stored: dict[int, Any] = {}
        self._looked_up: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._sizes: dict[Any, int] = {}  # of what this process stored, for LMCache's accounts
        self._closed = False

    # Three descriptors, as LMCache wants them.

    def get_store_event_fd(self) -> int:
        """Readable once a store has ended."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable once a lookup has ended."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Readable once a load has ended."""
        return int(self._load_event.fileno())

    # Storing.

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; the task succeeds if all of them are stored."""
        views = [obj.byte_array for obj in objects]
        keys = list(keys)
        task = self._task()
        self._start(
            lambda: self._client.put(names_of(keys), views),
            len(keys),
            lambda outcomes: self._store_done(
                task, keys, [len(memoryview(view).cast("B")) for view in views], outcomes
            ),
        )
        return task

    def _store_done(self, task: int, keys: list[Any], sizes: list[int], outcomes: Sequence[Outcome]) -> None:
        trouble = what_failed(outcomes, stored=True)
        self._grumbler.warn("a store of LMCache's failed", trouble)
        new_bytes, told, told_sizes = 0, [], []
        with self._lock:
            for key, size, outcome in zip(keys, sizes, outcomes, strict=True):
                if outcome.stored:
                    fresh = key not in self._sizes
                    self._sizes[key] = size
                    told.append(key)
                    told_sizes.append(size if fresh else 0)
                    new_bytes += size if fresh else 0
            self._stored[task] = L2StoreResult(not trouble, new_bytes)
        try:
            if told:  # before LMCache hears of the end, so that its accounts are right when it looks
                self._notify_keys_stored(told, told_sizes)
        finally:
            self._ring(self._store_event)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of the stores that ended since the last call."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    # Looking up.

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any = None) -> int:
        """Ask which keys are stored. Nothing is locked: records are written once, and a load that comes too late is
        a miss. `group_layout_descs` is not needed: records know their own length."""
        task = self._task()
        count = len(keys)
        self._start(
            lambda: self._client.exists(names_of(keys)),
            count,
            lambda outcomes: self._answer(self._looked_up, self._lookup_event, task, outcomes),
        )
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Bitmap of what is stored, once; None before."""
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    # Loading.

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read records into objects; how long these must be, `sizes` says."""
        views = [obj.byte_array for obj in objects]
        keys = list(keys)
        task = self._task()

        def done(outcomes: Sequence[Outcome]) -> None:
            found = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.status is Status.OK]
            self._grumbler.warn("a load of LMCache's is in trouble", what_failed(outcomes))
            try:
                if found:
                    self._notify_keys_accessed(found)
            finally:
                self._answer(self._loaded, self._load_event, task, outcomes)

        self._start(lambda: self._get(names_of(keys), views), len(keys), done)
        return task

    def query_load_result(self, task_id: int) -> Any:
        """Bitmap of what was loaded, once; None before."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # Removing, usage, state.

    def delete(self, keys: list[Any]) -> None:
        """Remove records, and wait for it (`put_timeout` at most)."""
        if not keys:
            return
        outcomes = outcomes_of_waiting(self._client.delete(names_of(keys)), len(keys))
        gone, sizes = [], []
        with self._lock:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome.status is not Status.ERROR and key in self._sizes:
                    gone.append(key)
                    sizes.append(self._sizes.pop(key))
        if gone:
            self._notify_keys_deleted(gone, sizes)

    def report_status(self) -> dict[str, Any]:
        """Health, and the store's counters."""
        return {"is_healthy": not self._closed, "type": type(self).__name__, "store": self._client.store.stats()}

    def get_memory_tags(self) -> Any:
        """Wanted from 0.5.7 on: what is stored lies elsewhere."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE)

    def close(self) -> None:
        """Finish what is being written (within `close_timeout`), and end. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._client.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    # Plumbing.

    def _task(self) -> int:
        with self._lock:
            self._tasks += 1
            return self._tasks

    def _start(self, start: Any, count: int, done: Any) -> None:
        try:
            completion: Completion[Sequence[Outcome]] = start()
        except KVStoreError as error:
            done([Outcome.failed(error)] * count)
            return
        self._client.settler.when_settled(completion, lambda: done(outcomes_of(completion, count)))

    def _answer(self, into: dict[int, Any], event: Any, task: int, outcomes: Sequence[Outcome]) -> None:
        bitmap = Bitmap(len(outcomes))
        for index, outcome in enumerate(outcomes):
            if outcome.status is Status.OK:
                bitmap.set(index)
        with self._lock:
            into[task] = bitmap
        self._ring(event)

    def _ring(self, event: Any) -> None:
        with self._lock:
            if not self._closed:
                event.notify()


def outcomes_of_waiting(completion: Completion[Sequence[Outcome]], count: int) -> Sequence[Outcome]:
    """The outcomes, when they come (by the deadline)."""
    try:
        completion.result()
    except KVStoreError:
        pass
    return outcomes_of(completion, count)
