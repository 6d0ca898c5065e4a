"""`KVStoreConnector`: vLLM's KVConnectorBase_V1 over a store. See docs/vllm.md.

    vllm serve … --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore.integrations.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"remote_url": "s3://bucket/prefix"}}'

Written against vLLM 0.32. What it decides is in `_scheduler` and `_worker`, which know nothing of vLLM; here is how
vLLM calls them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvstore.integrations._weights import adapter_identity
from kvstore.keys import KeyContext

from ._keys import ContextOf, Shard
from ._messages import Isolation, Step
from ._model import Model, revision_of
from ._scheduler import SchedulerSide
from ._settings import Settings, SharedStore
from ._stats import KVStoreStats, make_metrics
from ._worker import WorkerSide

__all__ = ["KVStoreConnector", "KVStoreMetadata"]

logger = logging.getLogger("kvstore.integrations.vllm")


@dataclass
class KVStoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What a step asks of the workers.

    Attributes:
        revision: of the model, in keys. The scheduler's side finds it out, once for all workers.
    """

    step: Step = field(default_factory=Step)
    revision: str = ""


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Remote KV for vLLM, by prefix.

    Args:
        vllm_config, role, kv_cache_config: as vLLM gives them. `kv_connector_extra_config` has `remote_url`,
            `config_file`, the options of `_settings.Settings` and any option of `kvstore.config`.

    Raises:
        ConfigError: the configuration makes no sense; or the model's KV, or the way it is laid out or split, cannot be
            stored, which is said by name.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config or {})
        self._model = Model.of(vllm_config, kv_cache_config, self._settings)
        self._asynchronous = self._settings.asynchronous(
            ranks=len(self._model.shards), async_scheduling=bool(vllm_config.scheduler_config.async_scheduling)
        )
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: requests fail when their KV cannot be loaded; use 'recompute'",
                transfer.kv_load_failure_policy,
            )
        self._shared = SharedStore.of(self._settings)
        self._closed = False
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._last: dict[str, float] = {}
        self._revision = ""
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._revision = self._settings.revision or revision_of(vllm_config)
                writers = [shard for shard in self._model.shards if shard.writer]
                self._scheduler = SchedulerSide(
                    self._shared.store,
                    [self._context_of(shard) for shard in writers],
                    isolation=_isolation,
                    block_size=self._model.block_size,
                    asynchronous=self._asynchronous,
                    loads=transfer.is_kv_consumer,
                    saves=transfer.is_kv_producer,
                    save_generated=self._settings.save_generated,
                )
        except BaseException:
            self._shared.close()
            raise

    def _context_of(self, shard: Shard) -> ContextOf:
        """What makes the key context of a shard."""
        model, store = self._model, self._shared.store

        def context(isolation: Isolation) -> KeyContext:
            return store.key_context(
                model=model.name, layout=shard.layout, dtype=model.dtype, revision=self._revision,
                cache_salt=isolation.cache_salt, lora=isolation.lora, tp_rank=shard.tp_rank, tp_size=shard.tp_size,
                pp_rank=shard.pp_rank, pp_size=shard.pp_size,
                extra=() if isolation.epoch is None else (("epoch", isolation.epoch),),
            )  # fmt: skip

        context(Isolation())  # say now what makes no sense
        return context

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Yes: layers are loaded before, and saved after, each layer's attention."""
        return True

    # The scheduler's side.

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side. Only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        """See KVConnectorBase_V1. The lookup begins."""
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1. None while the lookup is under way."""
        found = self.scheduler.matched(request, num_computed_tokens)
        return found, bool(found) and self.scheduler.between_steps(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        ids = blocks.get_block_ids()[self._model.group] if num_external_tokens else ()
        self.scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVStoreMetadata:
        """See KVConnectorBase_V1."""
        counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        scheduled = [(new.req_id, new.num_computed_tokens, counts[new.req_id]) for new in
                     scheduler_output.scheduled_new_reqs]  # fmt: skip
        scheduled += [(name, computed, counts[name]) for name, computed in
                      zip(cached.req_ids, cached.num_computed_tokens, strict=True)]  # fmt: skip
        tables = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> list[int] | None:
            ids = None if tables is None else tables.get_block_ids(request_id)
            return None if ids is None else list(ids[self._model.group])

        return KVStoreMetadata(self.scheduler.step(scheduled, blocks_of), self._revision)

    def update_connector_output(self, connector_output: Any) -> None:
        """See KVConnectorBase_V1. Blocks that could not be loaded are taken out of vLLM's own prefix cache: with the
        policy "recompute" it leaves them there, and another request could match them before they are computed."""
        manager, group = self._kv_cache_manager, self._model.group
        if connector_output.invalid_block_ids and manager is not None:
            spoiled = self.scheduler.failed(
                connector_output.invalid_block_ids, lambda request_id: manager.get_block_ids(request_id)[group]
            )
            if spoiled:
                manager.evict_blocks(spoiled)
        self.scheduler.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1. Blocks may be freed at once: what is saved has been copied out of them. If the
        request was sent here for its prefill, its answer tells the engine that goes on what there is to load."""
        return False, self.scheduler.finished(request.request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SupportsHMA; as `request_finished`."""
        return self.request_finished(request, block_ids[self._model.group])

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1.

        Raises:
            ConfigError: the layout of the pages is not known.
        """
        shard = self._model.shard_of_this_rank(self._vllm_config)
        self._check_pool(shard)
        self._layers = {name: number for number, name in enumerate(self._model.layer_names)}
        self._worker = WorkerSide(
            self._shared.store,
            self._context_of(shard),
            layout=shard.layout,
            dtype=self._model.torch_dtype,
            pages=self._model.pages(kv_caches, shard.layout),
            writes=shard.writer,
            prefill_timeout=self._settings.prefill_timeout,
            meta=lambda: {
                "model": self._model.name, "revision": self._revision,
                "namespace": self._shared.store.config.namespace,
            },
        )  # fmt: skip

    def _check_pool(self, shard: Shard) -> None:
        """A step whose KV does not fit into the write buffer loses what does not."""
        config = self._shared.store.config
        tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        chunks = -(-tokens // config.chunk_size)
        step = chunks * shard.layout.chunk_bytes(config.chunk_size, self._model.dtype)
        if (
            shard.writer
            and self._vllm_config.kv_transfer_config.is_kv_producer
            and step > config.buffer_pool_bytes // 4
        ):
            logger.warning(
                "a step of max_num_batched_tokens=%d has %d MiB of KV, but saves have %d MiB, a quarter of "
                "buffer_pool_bytes; what does not fit is not saved", tokens, step >> 20, config.buffer_pool_bytes >> 22,
            )  # fmt: skip

    @property
    def worker(self) -> WorkerSide:
        """The worker's side. Only in a worker, once it has its KV cache."""
        assert self._worker is not None, "register_kv_caches was not called"
        return self._worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVStoreMetadata)
        self._revision = connector_metadata.revision
        self.worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1. Returns at once."""
        self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See KVConnectorBase_V1."""
        number = self._layers.get(layer_name)
        if number is not None:
            self.worker.wait_for_layer(number)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        number = self._layers.get(layer_name)
        if number is not None:
            self.worker.save_layer(number)

    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1. Waits for copies out of the pages, not for the store."""
        self.worker.finish()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See KVConnectorBase_V1. Loads between steps; saves hold no block, so they have nothing to tell. What waits
        for another engine's prefill does so no more once its request was aborted."""
        if finished_req_ids:
            self.worker.drop(finished_req_ids)
        return None, self.worker.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See KVConnectorBase_V1."""
        return self.worker.take_failed()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1. Nothing outlives a step in blocks that may be preempted: copies out of them ended
        with it, and vLLM does not preempt what waits for an asynchronous load."""

    # Both.

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """See KVConnectorBase_V1. What was counted since the last call."""
        side = self._worker or self._scheduler
        if side is None:
            return None
        now = {name: float(value) for name, value in side.counters.items()}
        since = {name: value - self._last.get(name, 0.0) for name, value in now.items()}
        self._last = now
        return KVStoreStats(data=since) if any(since.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """See KVConnectorBase_V1."""
        return KVStoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """See KVConnectorBase_V1."""
        return make_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """See KVConnectorBase_V1. The store, which others use, keeps what it has; this engine does not find it any
        more, nor they what it stores from now on. For weights that were changed in place."""
        self.scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """See KVConnectorBase_V1: none."""
        return ()

    def shutdown(self) -> None:
        """See KVConnectorBase_V1. Finishes what is being written, within the store's `close_timeout`."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.close()
        self._shared.close()


def _isolation(request: Any) -> Isolation:
    lora = request.lora_request
    return Isolation(
        request.cache_salt, None if lora is None else _adapter(lora.lora_name, lora.lora_path, lora.lora_int_id)
    )


@functools.lru_cache(maxsize=1024)
def _adapter(name: str, path: str, number: int) -> str:
    """Looked at once for each number: vLLM gives an adapter that is loaded again another one."""
    return adapter_identity(name, path)
