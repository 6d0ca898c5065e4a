"""`KVStoreHiCache`: a store as the storage behind SGLang's HiCache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvstore", "module_path": "kvstore.integrations.sglang", "class_name": "KVStoreHiCache",
          "interface_v1": 1, "remote_url": "s3://bucket/prefix"}'

Pages are opaque records. They are read into SGLang's host pool, and written from it, without a copy of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore.errors import ConfigError
from kvstore.integrations._opaque import open_client

from ._identity import dtype_of, identity_of, revision_of
from ._page_store import PREFIX, PageStore
from ._pages import Pages
from ._settings import Settings

__all__ = ["KVStoreHiCache"]

logger = logging.getLogger("kvstore.integrations.sglang")


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """A store as a HiCacheStorage.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` has `remote_url`, `config_file`,
            `model_name`, `revision` and any option of `kvstore.config`.
        kwargs: what SGLang's factory was given besides; nothing of it is used.

    Raises:
        ConfigError: as `kvstore.open_store`; an option that cannot be had here.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        if storage_config.tp_lcm_size:
            raise ConfigError("tp_lcm_size: pages are not split by heads here, so ranks of other sizes share none")
        self._config = storage_config
        self._settings = settings = Settings.of(storage_config.extra_config)
        if not settings.zero_copy:
            logger.warning('SGLang copies every page twice without "interface_v1": 1 in the backend\'s extra config')
        client = open_client("SGLang", PREFIX, settings.remote_url, settings.config_file, settings.options)
        self._store = PageStore(
            client,
            writer=bool(storage_config.is_storage_writer),
            measured=bool(storage_config.enable_storage_metrics),
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that pages are read into and written from.

        Raises:
            ConfigError: its pages are of no kind that is known here; which weights they are of cannot be told.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = Pages(mem_pool_host)
        revision = self._settings.revision or revision_of()
        identity = identity_of(self._config, self._settings.model_name, revision, dtype_of(pages), pages)
        self._store.use(pages, identity)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises `ConfigError` for any pool but that of full attention."""
        if host_pool_name != PoolName.KV:
            raise ConfigError(
                f"this model also has a host pool {str(host_pool_name)!r}: models with sliding windows, Mamba or an "
                "indexer beside full attention need HiCache's interface v2, which kvstore has not got"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # The interface of host pools.

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. See `PageStore.load`."""
        return self._store.load(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages from the host pool. True on a rank whose pages another one writes (MLA)."""
        before = getattr(extra_info, "prefix_keys", None)
        return self._store.save(keys, host_indices, before[-1] if before else None)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored; ends by `lookup_timeout`."""
        return self._store.prefix(keys)

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self._store.prefix([key]) == 1

    # The interface of flat pages, which SGLang uses without `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A flat page, read into the tensor `target_location`; None if there is none.

        Raises:
            ConfigError: no tensor is given.
        """
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Flat pages, each read into its tensor; None for what is not there.

        Raises:
            ConfigError: the tensors are not given.
        """
        flats = _tensors(keys, target_locations, "target_locations")
        return [flat if ok else None for flat, ok in zip(flats, self._store.load_flat(keys, flats), strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page.

        Raises:
            ConfigError: no tensor is given.
        """
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; True if all of them are stored.

        Raises:
            ConfigError: the tensors are not given.
        """
        return all(self._store.save_flat(keys, _tensors(keys, values, "values")))

    # The rest.

    def clear(self) -> None:
        """Remove this rank's pages, of whichever process. See `PageStore.clear`.

        Raises:
            KVStoreError: some may be left.
        """
        logger.info("%d pages were removed", self._store.clear())

    def get_stats(self) -> StorageMetrics:
        """What was moved since the last call, for SGLang's metrics."""
        loads, saves = self._store.moved()
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in loads],
            backup_pgs=[each.pages for each in saves],
            prefetch_bandwidth=[each.gbytes_per_s for each in loads],
            backup_bandwidth=[each.gbytes_per_s for each in saves],
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the store; see `Store.stats`."""
        return self._store.stats()

    def close(self) -> None:
        """Finish what is being written (within `close_timeout`), and end. May be called twice."""
        self._store.close()


def _tensors(keys: Sequence[str], given: Any, name: str) -> Sequence[Any]:
    if given is None or len(given) != len(keys) or any(each is None for each in given):
        raise ConfigError(f"{name}: a tensor is needed for each of {len(keys)} pages")
    flats: Sequence[Any] = given
    return flats
