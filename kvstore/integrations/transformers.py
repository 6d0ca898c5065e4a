"""KV caches of Hugging Face transformers models in a store.

    kv = KVCacheStore(store, model)
    cache, hit = kv.load(input_ids)                       # layer by layer; hit tokens need no prefill
    out = model.generate(input_ids, **kv.cache_argument(cache))
    kv.save(input_ids, cache)

For decoder models with rotary position embeddings and full attention (Llama, Qwen2, Mistral and models shaped like
them), transformers 5.19 to 5.24, batch 1 and larger, fp32, bf16 and fp16. What cannot be stored rightly (sliding
windows, no rotary embedding or one that depends on the prompt's length, MLA, recurrent layers) is refused by name.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
    from transformers import DynamicCache
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed; install kvstore with its extra 'transformers'", name=missing.name
    ) from missing

from kvstore.backend import Outcome, Status
from kvstore.completion import Completion
from kvstore.errors import ConfigError, KVStoreError, PoolExhausted, TransientError
from kvstore.integrations import _models
from kvstore.integrations._batches import Group, Reading, Row, put_back, real_tokens, two_dimensional
from kvstore.integrations._models import weights_fingerprint, weights_token
from kvstore.keys import KeyContext, chunk_keys
from kvstore.layout import canonical_dtype
from kvstore.record import RecordSpec, kv_spec
from kvstore.scheduler import Priority
from kvstore.targets import Item, Want

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["KVCacheStore", "SaveResult", "weights_fingerprint"]

logger = logging.getLogger("kvstore.integrations.transformers")

_FIRST_GROUP_BYTES = 4 << 20
_GROUP_GROWTH = 2
_POOL_PAGE = 4096  # what a buffer takes in the pool is a multiple of this
_PUT_TRIES = 8  # others may be faster to take the room in the write queue that was waited for


class SaveResult(NamedTuple):
    """What `save` did, in chunks over all rows of the batch.

    Attributes:
        chunks: chunks of the prompts.
        stored: written now.
        existing: were in the store already, or came in by another writer.
        failed: could not be written; they will be recomputed when needed.
        nbytes: bytes written.
        error: why the first of `failed` could not be written, or None.
    """

    chunks: int
    stored: int
    existing: int
    failed: int
    nbytes: int
    error: KVStoreError | None = None


class KVCacheStore:
    """Saves and loads the KV caches of one model.

    Args:
        store: an open store; its `chunk_size` and `save_unfull_chunk` apply. It is not closed.
        model: a causal language model of transformers.
        model_name: name in the keys; default: the model's `name_or_path` (only the last part of a local folder).
            Processes share caches if name, revision, dtype and shape agree.
        revision: version of the weights in the keys; default: `weights_fingerprint`, over every byte of them, so that
            other weights under the same name do not match. It is taken again when `save` or `load` find that the
            weights or the active adapters changed (they look at what `weights_token` lists; after writing to a part
            of a tensor through `.data`, call `refresh`). A revision that is given is the caller's promise: nothing is
            looked at, and whoever changes the weights must make another `KVCacheStore`.
        lora: identity and version of an active adapter, needed with a `revision` that does not tell of it.
        cache_salt: a further isolation within the store's namespace.

    Raises:
        ConfigError: the model's cache cannot be stored; says why.
    """

    def __init__(
        self,
        store: Store,
        model: Any,
        *,
        model_name: str | None = None,
        revision: str | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        if not hasattr(store, "submit_get"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        if not hasattr(model, "config") or not hasattr(model, "forward"):
            raise ConfigError(f"a causal language model of transformers is needed, not {type(model).__name__}")
        self.store = store
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self.layout = _models.cache_layout(model, self._config)
        self._full_config = model.config
        parameters = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self._name = model_name or _models.model_name(model)
        self._isolation = {"lora": lora, "cache_salt": cache_salt}
        self._given_revision = revision
        self._token: object = None
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: its dtype, its device and, unless a revision was given, all its weights. `save` and
        `load` do so by themselves if they can see a change. Reads all weights.

        Raises:
            ConfigError: the weights cannot be read (say, they are offloaded); give a revision.
        """
        self.dtype: torch.dtype = self._model.dtype
        self.device: torch.device = self._model.device
        revision = self._given_revision
        if revision is None:
            self._token = weights_token(self._model)
            revision = weights_fingerprint(self._model)
        self.context: KeyContext = self.store.key_context(
            model=self._name,
            layout=self.layout,
            dtype=canonical_dtype(self.dtype),
            revision=revision,
            **self._isolation,
        )

    def _notice_changes(self) -> None:
        moved = (self._model.dtype, self._model.device) != (self.dtype, self.device)
        if moved or (self._given_revision is None and weights_token(self._model) != self._token):
            self.refresh()

    def cache_argument(self, cache: DynamicCache) -> dict[str, DynamicCache]:
        """The keyword under which this version of transformers takes a cache: `generate(ids, **cache_argument(c))`."""
        return {self._argument: cache}

    # Saving.

    def save(
        self,
        input_ids: Any,
        cache: Any,
        *,
        attention_mask: Any = None,
        timeout: float | None = None,
    ) -> SaveResult:
        """Store the KV of the prompts' full chunks (and of a last partial one with `save_unfull_chunk`), and wait.

        Chunks that do not fit into the write queue yet wait for room there, until the deadline. A chunk is copied into
        the pool as a whole, so `buffer_pool_bytes` must be at least the size of one over all layers.

        Args:
            input_ids: token ids, `[tokens]` or `[batch, tokens]`; only those that the cache holds are stored.
            cache: a `DynamicCache` with keys and values `[batch, kv_heads, tokens, head_dim]` of the model's dtype,
                on any device, after the rotary embedding, positions counted from each row's first real token (as
                `generate` does). It must be the cache of just these tokens, made with the weights and adapters as
                they are now: nothing can tell if it is not, and other prompts would get wrong KV.
            attention_mask: `[batch, tokens]`, 0 for padding on either side; None: no padding.
            timeout: seconds for everything but looking at weights that changed; None means the store's `put_timeout`.

        Raises:
            ConfigError: the cache is not one of this model.
            KVStoreError: the first chunk that failed, with `on_error="raise"`, after all others were tried.
        """
        self._notice_changes()
        ids = two_dimensional(input_ids)
        held = self._check_cache(cache, ids.shape[0])
        deadline = time.monotonic() + (self.store.config.put_timeout if timeout is None else timeout)
        mask = None if attention_mask is None else two_dimensional(attention_mask)[:, :held]
        rows = self._rows(ids[:, :held], mask)
        known = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        pending: deque[Completion[Sequence[Outcome]]] = deque()
        existing = failed = 0
        reason: KVStoreError | None = None
        for number, (row, hits) in enumerate(zip(rows, known, strict=True)):
            first = hits.result()
            existing += first
            for chunk in range(first, len(row.keys)):
                try:
                    pending.append(self._put_chunk(cache, number, row, chunk, deadline))
                except PoolExhausted as error:
                    failed += 1
                    reason = reason or error
        stored = nbytes = 0
        for completion in pending:
            outcome = _only_outcome(completion)
            stored += outcome.status is Status.OK
            existing += outcome.status is Status.EXISTS
            failed += outcome.status is Status.ERROR
            reason = reason or outcome.error
            nbytes += outcome.nbytes
        if reason is not None and self.store.config.on_error == "raise":
            raise reason
        return SaveResult(sum(len(row.keys) for row in rows), stored, existing, failed, nbytes, reason)

    def _put_chunk(
        self, cache: Any, number: int, row: Row, chunk: int, deadline: float
    ) -> Completion[Sequence[Outcome]]:
        size = self.store.config.chunk_size
        begin, end = chunk * size, min((chunk + 1) * size, row.tokens)
        spec = self._spec(end - begin)
        # The one copy on the way out: from the cache, transposed to token-major, into pool memory.
        with self.store.pool.acquire(spec.raw_bytes, max(0.0, deadline - time.monotonic())) as buffer:
            views = spec.split(buffer.view)
            where = slice(row.begin + begin, row.begin + end)
            for layer, view in zip(cache.layers, views, strict=True):
                key, value = self._tensors(view, end - begin)
                key.copy_(layer.keys[number, :, where].transpose(0, 1))
                value.copy_(layer.values[number, :, where].transpose(0, 1))
            meta = {
                "model": self.context.model, "revision": self.context.revision, "namespace": self.context.namespace,
                "dtype": self.context.dtype, "tokens": [begin, end], "layers": self.layout.num_layers,
                "kv_heads": self.layout.num_kv_heads, "head_dim": self.layout.head_dim, "rope": "applied",
            }  # fmt: skip
            parent = row.keys[chunk - 1] if chunk else None
            return self._put(Item(row.keys[chunk], views, spec, meta, parent, buffer), deadline)

    def _put(self, item: Item, deadline: float) -> Completion[Sequence[Outcome]]:
        """Submit one record, waiting for room in the write queue. `submit_put` would drop it instead."""
        tries = 0
        while True:
            done = self.store._put([item], Priority.BACKGROUND, deadline, wait=True)
            tries += 1
            if tries == _PUT_TRIES or not done.done() or time.monotonic() >= deadline:
                return done
            error = _only_outcome(done).error
            if not isinstance(error, TransientError) or error.backend is not None:
                return done
            # Refused by the store itself: another writer was faster to take the room.

    # Loading.

    def load(
        self, input_ids: Any, *, attention_mask: Any = None, timeout: float | None = None
    ) -> tuple[DynamicCache, int]:
        """The KV of the longest stored prefix, read layer by layer: the first layers in a small group, later ones in
        growing groups, each being copied into the cache while the next is read.

        What misses in one layer is not read in later ones. A prompt of any length is read if the pool holds one layer
        of one chunk; if it does not, or is full until the deadline, that is logged, and nothing is loaded.

        Args:
            input_ids: `[tokens]` or `[batch, tokens]`. A batch gets as many columns as all its rows can be served.
            attention_mask: `[batch, tokens]`, 0 for padding on the left; None: no padding.
            timeout: seconds for everything but looking at weights that changed; None means the store's
                `blocking_timeout`. What is complete by then counts.

        Returns:
            A cache (empty on a miss) on the model's device, and the number of leading columns it holds: at most one
            less than the prompt has, since the model needs a token to compute.

        Raises:
            ConfigError: the mask does not fit the ids, or has padding on the right or between tokens.
        """
        self._notice_changes()
        ids = two_dimensional(input_ids)
        deadline = time.monotonic() + (self.store.config.blocking_timeout if timeout is None else timeout)
        mask = None if attention_mask is None else two_dimensional(attention_mask)
        rows = self._rows(ids, mask)
        width = ids.shape[1]
        for number, row in enumerate(rows):
            if row.begin + row.tokens != width:
                raise ConfigError(f"row {number} of the attention mask has padding on the right; pad on the left")
        lookups = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        reading = Reading(rows, self.store.config.chunk_size, width - 1)  # one token must be left to compute
        for number, done in enumerate(lookups):
            reading.limit(number, done.result())
        if reading.hopeless or not self._read(reading, deadline):
            return DynamicCache(config=self._full_config), 0
        columns = reading.columns
        return self._cache([(k[:, :, :columns], v[:, :, :columns]) for k, v in reading.tensors]), columns

    def _read(self, reading: Reading, deadline: float) -> bool:
        """Read all layers of the chunks that can still be used. False if that leaves nothing."""
        waiting: deque[tuple[Group, Completion[Sequence[Outcome]]]] = deque()
        groups = self._groups(reading)
        try:
            while True:
                # Two groups under way: one is read while the other is copied into the cache.
                while len(waiting) < 2 and (group := next(groups, None)) is not None:
                    group.chunks = [each for each in group.chunks if reading.needs(*each)]
                    if not group.chunks:
                        continue
                    if not self._acquire(group, reading, deadline, bool(waiting)):
                        groups = put_back(group, groups)
                        break
                    waiting.append((group, self._submit(group, reading, deadline)))
                if not waiting:
                    return True
                group, completion = waiting[0]
                for (number, chunk), outcome in zip(group.chunks, completion.result(), strict=True):
                    if outcome.status is not Status.OK:
                        reading.limit(number, chunk)
                if reading.hopeless:
                    return False
                self._scatter(group, reading)
                waiting.popleft()
                group.release()
        except PoolExhausted as error:
            logger.warning("a prompt is not loaded: %s; buffer_pool_bytes may be too small", error)
            return False
        finally:
            for group, completion in waiting:
                completion.cancel()
                group.release()

    def _groups(self, reading: Reading) -> Iterator[Group]:
        """The layers in order, in groups of growing size that fit the pool. A layer that does not fit is cut into
        groups of some of its chunks. Chunks that cannot be used any more are left out as soon as that is known."""
        most = max(self.store.pool.nbytes // 4, 1)
        target = _FIRST_GROUP_BYTES
        layer = 0
        while layer < self.layout.num_layers:
            chunks = [(n, chunk) for n, row in enumerate(reading.rows) for chunk in range(reading.usable(row))]
            sizes = [_paged(self._chunk_spec(reading, *each).sizes[0]) for each in chunks]
            per_layer = sum(sizes)
            count = 1
            if per_layer <= most:
                count = min(max(1, min(target, most) // per_layer), self.layout.num_layers - layer)
                yield Group(layer, count, chunks)
            else:
                begin = total = 0
                for index, size in enumerate(sizes):
                    if index > begin and total + size > most:
                        yield Group(layer, 1, chunks[begin:index])
                        begin, total = index, 0
                    total += size
                yield Group(layer, 1, chunks[begin:])
            layer += count
            target *= _GROUP_GROWTH

    def _acquire(self, group: Group, reading: Reading, deadline: float, may_wait: bool) -> bool:
        """Pool memory for a group; False if there is none now and another group will give some back."""
        specs = [self._chunk_spec(reading, *each) for each in group.chunks]
        sizes = [sum(spec.sizes[group.first : group.first + group.count]) for spec in specs]
        try:
            timeout = 0 if may_wait else max(0.0, deadline - time.monotonic())
            group.buffers = self.store.pool.acquire_many(sizes, timeout)
        except PoolExhausted:
            if may_wait:
                return False
            raise
        return True

    def _submit(self, group: Group, reading: Reading, deadline: float) -> Completion[Sequence[Outcome]]:
        wants = [
            Want(
                reading.rows[number].keys[chunk],
                buffer.view,
                self._chunk_spec(reading, number, chunk),
                group.first,
                group.count,
                buffer,
            )
            for (number, chunk), buffer in zip(group.chunks, group.buffers, strict=True)
        ]
        try:
            return self.store.submit_get(wants, priority=Priority.DEMAND, deadline=deadline)
        except BaseException:  # a store that was closed: nobody else knows the buffers yet
            group.release()
            raise

    def _scatter(self, group: Group, reading: Reading) -> None:
        """The one copy on the way in: from pool memory, transposed to head-major, onto the model's device."""
        shape = (len(reading.rows), self.layout.num_kv_heads, reading.columns, self.layout.head_dim)
        make = torch.zeros if any(row.begin for row in reading.rows) else torch.empty
        for number in range(group.count):
            if group.first + number == len(reading.tensors):  # else its first chunks came with another group
                keys, values = (make(shape, dtype=self.dtype, device=self.device) for _ in range(2))
                reading.tensors.append((keys, values))
            keys, values = reading.tensors[group.first + number]
            for (row_number, chunk), buffer in zip(group.chunks, group.buffers, strict=True):
                if not reading.needs(row_number, chunk):
                    continue
                row = reading.rows[row_number]
                tokens = self._chunk_tokens(row, chunk)
                size = buffer.nbytes // group.count
                key, value = self._tensors(buffer.view[number * size : (number + 1) * size], tokens)
                begin = row.begin + chunk * reading.size
                end = min(begin + tokens, reading.columns)
                keys[row_number, :, begin:end] = key[: end - begin].transpose(0, 1)
                values[row_number, :, begin:end] = value[: end - begin].transpose(0, 1)

    def _cache(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
        cache = DynamicCache(config=self._full_config)
        layer: Any
        for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
            # Not through `update`, which would copy everything once more.
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    # Shapes.

    def _spec(self, tokens: int) -> RecordSpec:
        return kv_spec(self.layout, self.context.dtype, tokens)

    def _chunk_spec(self, reading: Reading, number: int, chunk: int) -> RecordSpec:
        return self._spec(self._chunk_tokens(reading.rows[number], chunk))

    def _chunk_tokens(self, row: Row, chunk: int) -> int:
        size = self.store.config.chunk_size
        return min(size, row.tokens - chunk * size)

    def _tensors(self, segment: memoryview, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` over the memory of a layer segment."""
        flat = torch.frombuffer(segment, dtype=torch.uint8).view(self.dtype)
        key, value = flat.view(2, tokens, self.layout.num_kv_heads, self.layout.head_dim)
        return key, value

    def _rows(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[Row]:
        if mask is not None and mask.shape != ids.shape:
            raise ConfigError(f"the attention mask has shape {tuple(mask.shape)}, the token ids {tuple(ids.shape)}")
        rows = []
        for number, row in enumerate(ids):
            begin, end = (0, len(row)) if mask is None else real_tokens(mask[number], number)
            keys = chunk_keys(
                row[begin:end],
                context=self.context,
                chunk_size=self.store.config.chunk_size,
                save_unfull_chunk=self.store.config.save_unfull_chunk,
            )
            rows.append(Row(begin, end - begin, keys))
        return rows

    def _check_cache(self, cache: Any, batch: int) -> int:
        """The number of tokens the cache holds. Raises `ConfigError` if it is not one of this model."""
        layers = getattr(cache, "layers", None)
        if layers is None or len(layers) != self.layout.num_layers:
            found = "no layers" if layers is None else f"{len(layers)} layers"
            raise ConfigError(f"the cache has {found}, the model {self.layout.num_layers}; pass a DynamicCache of it")
        held = -1
        for number, layer in enumerate(layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise ConfigError(f"layer {number} of the cache is empty; run the model before saving")
            tokens = int(layer.get_seq_length())
            expected = (batch, self.layout.num_kv_heads, tokens, self.layout.head_dim)
            for what, tensor in (("keys", keys), ("values", values)):
                if tuple(tensor.shape) != expected:
                    found = f"{what} of shape {tuple(tensor.shape)} instead of {expected}"
                    raise ConfigError(f"layer {number} of the cache has {found}; pass a DynamicCache of this model")
                if tensor.dtype != self.dtype:
                    raise ConfigError(f"layer {number} of the cache has {what} of {tensor.dtype}, not {self.dtype}")
            if held not in (-1, tokens):
                raise ConfigError(f"layer {number} of the cache holds {tokens} tokens, layer 0 {held}")
            held = tokens
        return held


def _paged(nbytes: int) -> int:
    return -(-nbytes // _POOL_PAGE) * _POOL_PAGE


def _only_outcome(completion: Completion[Sequence[Outcome]]) -> Outcome:
    """The outcome of a batch of one, also with `on_error="raise"`."""
    try:
        return completion.result()[0]
    except KVStoreError as error:
        return Outcome.failed(error)
