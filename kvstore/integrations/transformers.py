"""KV caches of Hugging Face transformers models in a store.

    kv = KVCacheStore(store, model)
    cache, hit = kv.load(input_ids)                       # layer by layer; hit tokens need no prefill
    out = model.generate(input_ids, **kv.cache_argument(cache))
    kv.save(input_ids, cache)

For decoder models with rotary position embeddings and full attention (Llama, Qwen2, Mistral and models shaped like
them), transformers 5.19 to 5.24, batch 1 and larger, fp32, bf16 and fp16. What cannot be stored rightly (sliding
windows, no rotary embedding, MLA, recurrent layers) is refused by name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
    from transformers import DynamicCache
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed; install kvstore with its extra 'transformers'", name=missing.name
    ) from missing

from kvstore.backend import Outcome, Status
from kvstore.buffers import Buffer
from kvstore.completion import Completion
from kvstore.errors import ConfigError, KVStoreError, PoolExhausted
from kvstore.keys import Key, KeyContext, chunk_keys
from kvstore.layout import KVLayout, canonical_dtype
from kvstore.record import RecordSpec, kv_spec
from kvstore.scheduler import Priority
from kvstore.targets import Item, Want

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["KVCacheStore", "SaveResult", "weights_fingerprint"]

_FIRST_GROUP_BYTES = 4 << 20
_GROUP_GROWTH = 2
_SAMPLE_ELEMENTS = 1024


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


@dataclass(frozen=True)
class _Row:
    """One row of a batch: its real tokens, where they begin in the row, and their chunks."""

    begin: int
    tokens: int
    keys: Sequence[Key]


class KVCacheStore:
    """Saves and loads the KV caches of one model.

    Args:
        store: an open store; its `chunk_size` and `save_unfull_chunk` apply. It is not closed.
        model: a causal language model of transformers.
        model_name: name in the keys; default: the model's `name_or_path` (only the last part of a local folder).
            Processes share caches if name, revision, dtype and shape agree.
        revision: version of the weights in the keys; default: a fingerprint of a sample of every weight and of the
            rotary parameters, so that other weights under the same name never match.
        lora: identity and version of an active adapter, if the fingerprint cannot see it.
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
        self._config = model.config.get_text_config(decoder=True)
        self.layout = _layout(model, self._config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._full_config = model.config
        parameters = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        name = model_name or _model_name(model)
        self.context: KeyContext = store.key_context(
            model=name,
            layout=self.layout,
            dtype=canonical_dtype(self.dtype),
            revision=revision if revision is not None else weights_fingerprint(model),
            lora=lora,
            cache_salt=cache_salt,
        )

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

        Args:
            input_ids: token ids, `[tokens]` or `[batch, tokens]`; only those that the cache holds are stored.
            cache: a `DynamicCache` with keys and values `[batch, kv_heads, tokens, head_dim]` after the rotary
                embedding, positions counted from each row's first real token (as `generate` does). It must be the
                cache of just these tokens: nothing can tell if it is not, and other prompts would get wrong KV.
            attention_mask: `[batch, tokens]`, 0 for padding on either side; None: no padding.
            timeout: seconds for everything; None means the store's `put_timeout`.

        Raises:
            ConfigError: the cache is not one of this model.
        """
        ids = _two_dimensional(input_ids)
        held = self._check_cache(cache, ids.shape[0])
        deadline = time.monotonic() + (self.store.config.put_timeout if timeout is None else timeout)
        mask = None if attention_mask is None else _two_dimensional(attention_mask)[:, :held]
        rows = self._rows(ids[:, :held], mask)
        known = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        pending: list[tuple[int, Completion[Sequence[Outcome]]]] = []
        existing = failed = 0
        reason: KVStoreError | None = None
        for number, (row, hits) in enumerate(zip(rows, known, strict=True)):
            first = hits.result()
            existing += first
            for chunk in range(first, len(row.keys)):
                try:
                    pending.append((1, self._put_chunk(cache, number, row, chunk, deadline)))
                except PoolExhausted as error:
                    failed += 1
                    reason = reason or error
        stored = nbytes = 0
        for _, completion in pending:
            outcome = completion.result()[0]
            stored += outcome.status is Status.OK
            existing += outcome.status is Status.EXISTS
            failed += outcome.status is Status.ERROR
            reason = reason or outcome.error
            nbytes += outcome.nbytes
        return SaveResult(sum(len(row.keys) for row in rows), stored, existing, failed, nbytes, reason)

    def _put_chunk(
        self, cache: Any, number: int, row: _Row, chunk: int, deadline: float
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
            item = Item(row.keys[chunk], views, spec, meta, parent, buffer)
            return self.store.submit_put([item], priority=Priority.BACKGROUND, deadline=deadline)

    # Loading.

    def load(
        self, input_ids: Any, *, attention_mask: Any = None, timeout: float | None = None
    ) -> tuple[DynamicCache, int]:
        """The KV of the longest stored prefix, read layer by layer: the first layers in a small group, later ones in
        growing groups, each being copied into the cache while the next is read.

        Args:
            input_ids: `[tokens]` or `[batch, tokens]`. A batch gets as many columns as all its rows can be served.
            attention_mask: `[batch, tokens]`, 0 for padding on the left; None: no padding.
            timeout: seconds for everything; None means the store's `blocking_timeout`. What is complete by then counts.

        Returns:
            A cache (empty on a miss) on the model's device, and the number of leading columns it holds: at most one
            less than the prompt has, since the model needs a token to compute.
        """
        ids = _two_dimensional(input_ids)
        deadline = time.monotonic() + (self.store.config.blocking_timeout if timeout is None else timeout)
        mask = None if attention_mask is None else _two_dimensional(attention_mask)
        rows = self._rows(ids, mask)
        lookups = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        columns = min(self._columns(row, done.result()) for row, done in zip(rows, lookups, strict=True))
        tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        if columns > max(row.begin for row in rows):
            columns = self._read(rows, columns, tensors, deadline)
        # One token must be left to compute, and padding alone is no hit.
        columns = min(columns, ids.shape[1] - 1)
        if columns <= max(row.begin for row in rows):
            return DynamicCache(config=self._full_config), 0
        return self._cache([(k[:, :, :columns], v[:, :, :columns]) for k, v in tensors]), columns

    def _columns(self, row: _Row, chunks: int) -> int:
        """Columns of the batch that the first `chunks` chunks of a row cover."""
        return row.begin + min(chunks * self.store.config.chunk_size, row.tokens)

    def _read(
        self,
        rows: Sequence[_Row],
        columns: int,
        tensors: list[tuple[torch.Tensor, torch.Tensor]],
        deadline: float,
    ) -> int:
        """Read all layers of the chunks that cover `columns` into `tensors`; returns how many columns are good."""
        size = self.store.config.chunk_size
        chunks = [
            (number, chunk)
            for number, row in enumerate(rows)
            for chunk in range(-(-(columns - row.begin) // size))
            if chunk < len(row.keys)
        ]
        good = [-(-(columns - row.begin) // size) for row in rows]
        waiting: list[tuple[_Group, Completion[Sequence[Outcome]]]] = []
        groups = self._groups(rows, chunks)
        try:
            while True:
                # Two groups under way: one is read while the other is copied into the cache.
                while len(waiting) < 2 and (group := next(groups, None)) is not None:
                    group.buffers = self._acquire(group, deadline, bool(waiting))
                    if group.buffers is None:
                        groups = _put_back(group, groups)
                        break
                    waiting.append((group, self._submit(group, deadline)))
                if not waiting:
                    break
                group, completion = waiting.pop(0)
                try:
                    for (number, chunk), outcome in zip(group.chunks, completion.result(), strict=True):
                        if outcome.status is not Status.OK:
                            good[number] = min(good[number], chunk)
                    self._scatter(group, rows, columns, good, tensors)
                finally:
                    group.release()
        except PoolExhausted:
            return 0
        finally:
            for group, completion in waiting:
                completion.cancel()
                group.release()
        return min(self._columns(row, chunks) for row, chunks in zip(rows, good, strict=True))

    def _groups(self, rows: Sequence[_Row], chunks: Sequence[tuple[int, int]]) -> Iterator[_Group]:
        """The layers in order, in groups of growing size that fit the pool."""
        specs = [self._spec(self._chunk_tokens(rows[number], chunk)) for number, chunk in chunks]
        per_layer = sum(spec.sizes[0] for spec in specs)
        most = max(self.store.pool.nbytes // 4, 1)
        target = _FIRST_GROUP_BYTES
        first = 0
        while first < self.layout.num_layers:
            count = max(1, min(target, most) // per_layer)
            count = min(count, self.layout.num_layers - first)
            keys = [rows[number].keys[chunk] for number, chunk in chunks]
            yield _Group(first, count, chunks, keys, specs)
            first += count
            target *= _GROUP_GROWTH

    def _acquire(self, group: _Group, deadline: float, may_wait: bool) -> list[Buffer] | None:
        """Pool memory for a group; None if there is none now and another group will give some back."""
        sizes = [sum(spec.sizes[group.first : group.first + group.count]) for spec in group.specs]
        try:
            return self.store.pool.acquire_many(sizes, 0 if may_wait else max(0.0, deadline - time.monotonic()))
        except PoolExhausted:
            if may_wait:
                return None
            raise

    def _submit(self, group: _Group, deadline: float) -> Completion[Sequence[Outcome]]:
        wants = [
            Want(key, buffer.view, spec, group.first, group.count, buffer)
            for key, buffer, spec in zip(group.keys, group.buffers or (), group.specs, strict=True)
        ]
        return self.store.submit_get(wants, priority=Priority.DEMAND, deadline=deadline)

    def _scatter(
        self,
        group: _Group,
        rows: Sequence[_Row],
        columns: int,
        good: Sequence[int],
        tensors: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """The one copy on the way in: from pool memory, transposed to head-major, onto the model's device."""
        shape = (len(rows), self.layout.num_kv_heads, columns, self.layout.head_dim)
        padded = any(row.begin for row in rows)
        make = torch.zeros if padded else torch.empty
        for number in range(group.count):
            keys = make(shape, dtype=self.dtype, device=self.device)
            values = make(shape, dtype=self.dtype, device=self.device)
            for (row_number, chunk), spec, buffer in zip(group.chunks, group.specs, group.buffers or (), strict=True):
                if chunk >= good[row_number]:
                    continue
                tokens = self._chunk_tokens(rows[row_number], chunk)
                size = spec.sizes[0]
                key, value = self._tensors(buffer.view[number * size : (number + 1) * size], tokens)
                begin = rows[row_number].begin + chunk * self.store.config.chunk_size
                end = min(begin + tokens, columns)
                keys[row_number, :, begin:end] = key[: end - begin].transpose(0, 1)
                values[row_number, :, begin:end] = value[: end - begin].transpose(0, 1)
            tensors.append((keys, values))

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

    def _chunk_tokens(self, row: _Row, chunk: int) -> int:
        size = self.store.config.chunk_size
        return min(size, row.tokens - chunk * size)

    def _tensors(self, segment: memoryview, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` over the memory of a layer segment."""
        flat = torch.frombuffer(segment, dtype=torch.uint8).view(self.dtype)
        key, value = flat.view(2, tokens, self.layout.num_kv_heads, self.layout.head_dim)
        return key, value

    def _rows(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[_Row]:
        if mask is not None and mask.shape != ids.shape:
            raise ConfigError(f"the attention mask has shape {tuple(mask.shape)}, the token ids {tuple(ids.shape)}")
        rows = []
        for number, row in enumerate(ids):
            begin, end = (0, len(row)) if mask is None else _real(mask[number], number)
            keys = chunk_keys(
                row[begin:end],
                context=self.context,
                chunk_size=self.store.config.chunk_size,
                save_unfull_chunk=self.store.config.save_unfull_chunk,
            )
            rows.append(_Row(begin, end - begin, keys))
        return rows

    def _check_cache(self, cache: Any, batch: int) -> int:
        """The number of tokens the cache holds. Raises `ConfigError` if it is not one of this model."""
        layers = getattr(cache, "layers", None)
        if layers is None or len(layers) != self.layout.num_layers:
            found = "no layers" if layers is None else f"{len(layers)} layers"
            raise ConfigError(f"the cache has {found}, the model {self.layout.num_layers}; pass a DynamicCache of it")
        held = -1
        for number, layer in enumerate(layers):
            keys, values = layer.keys, layer.values
            if keys is None or values is None:
                raise ConfigError(f"layer {number} of the cache is empty; run the model before saving")
            expected = (batch, self.layout.num_kv_heads, keys.shape[-2], self.layout.head_dim)
            if tuple(keys.shape) != expected or tuple(values.shape) != expected:
                raise ConfigError(f"layer {number} of the cache has shape {tuple(keys.shape)} instead of {expected}")
            if keys.dtype != self.dtype:
                raise ConfigError(f"layer {number} of the cache is {keys.dtype}, the model {self.dtype}")
            if held not in (-1, keys.shape[-2]):
                raise ConfigError(f"layer {number} of the cache holds {keys.shape[-2]} tokens, layer 0 {held}")
            held = keys.shape[-2]
        return held


@dataclass
class _Group:
    """Some consecutive layers of all chunks that are read together."""

    first: int
    count: int
    chunks: Sequence[tuple[int, int]]
    keys: Sequence[Key]
    specs: Sequence[RecordSpec]
    buffers: list[Buffer] | None = None

    def release(self) -> None:
        for buffer in self.buffers or ():
            buffer.release()
        self.buffers = None


def _put_back(group: _Group, groups: Iterator[_Group]) -> Iterator[_Group]:
    yield group
    yield from groups


def _two_dimensional(ids: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"token ids must be integers, not {type(ids).__name__}: {error}") from error
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or not len(tensor) or tensor.is_floating_point():
        raise ConfigError(f"token ids must be integers of shape [tokens] or [batch, tokens], not {tuple(tensor.shape)}")
    return tensor.cpu()


def _real(mask: torch.Tensor, number: int) -> tuple[int, int]:
    """Begin and end of the ones in a row of an attention mask. Raises `ConfigError` if they have gaps."""
    ones = mask.nonzero().flatten()
    if not len(ones):
        raise ConfigError(f"row {number} of the attention mask has no tokens")
    begin, end = int(ones[0]), int(ones[-1]) + 1
    if end - begin != len(ones):
        raise ConfigError(f"row {number} of the attention mask has padding between tokens")
    return begin, end


def _layout(model: Any, config: Any) -> KVLayout:
    """The layout of a model's cache. Raises `ConfigError` naming what makes it unfit."""
    name = f"{type(model).__name__} ({config.model_type})"
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder model; only decoder-only models can be stored")
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(f"{name} uses multi-head latent attention, which this integration does not store yet")
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention"}:
        raise ConfigError(f"{name} has layers of type {', '.join(sorted(other))}; only full attention can be stored")
    window = getattr(config, "sliding_window", None)
    if window and not kinds and getattr(config, "use_sliding_window", True):
        raise ConfigError(f"{name} attends over a sliding window of {window} tokens; its cache cannot be stored whole")
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    if not rotary:
        raise ConfigError(f"{name} has no rotary position embedding; its cache cannot be stored by prefix chunks")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout(config.num_hidden_layers, kv_heads, head_dim)


def _model_name(model: Any) -> str:
    name = str(getattr(model, "name_or_path", "") or model.config.name_or_path or "")
    if os.path.isdir(name):  # a path means nothing on another host
        name = os.path.basename(os.path.abspath(name))
    return name or type(model).__name__


def weights_fingerprint(model: Any) -> str:
    """A fingerprint of what the weights and the rotary parameters are: SHA-256 over 1,024 elements of every
    parameter, its name, shape and dtype, and the configuration's attention and rotary fields. Takes milliseconds.
    """
    digest = hashlib.sha256(b"kvstore weights 1")
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLE_ELEMENTS)
        sample = flat[::step][:_SAMPLE_ELEMENTS].contiguous().cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    config = model.config.get_text_config(decoder=True).to_dict()
    relevant = {
        key: value
        for key, value in config.items()
        if key.startswith(("rope", "rotary", "partial_rotary", "max_position", "attention_", "sliding", "layer_types"))
        or key in ("rms_norm_eps", "hidden_act", "original_max_position_embeddings")
    }
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]
