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
from collections.abc import Sequence
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
from kvstore.eviction.base import RecordInfo
from kvstore.integrations import _models
from kvstore.integrations._batches import Reading, Row, real_tokens, two_dimensional
from kvstore.integrations._models import weights_fingerprint, weights_token
from kvstore.integrations._rotary import model_rotary
from kvstore.integrations._streamed import Streamed, stream_prefix
from kvstore.keys import KeyContext, chunk_keys
from kvstore.layout import canonical_dtype
from kvstore.prefetch import Chunk, LayerPlan, LoadedPart, Prefetcher
from kvstore.record import RecordSpec, kv_spec
from kvstore.rope import RotarySpec, Rotation
from kvstore.scheduler import Priority
from kvstore.targets import Item

if TYPE_CHECKING:
    from kvstore.sessions import Turn
    from kvstore.store import Store
    from kvstore.stream import Streamer

__all__ = ["KVCacheStore", "SaveResult", "Streamed", "weights_fingerprint"]

logger = logging.getLogger("kvstore.integrations.transformers")

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
        rope: "post": K is stored as the cache has it, after the rotary embedding. "pre": before it, and embedded when
            it is loaded, so that `kvstore.sessions` can truncate a conversation and go on using what is stored. Both
            cost the same room; their records never mix. Undoing and redoing the embedding changes the last digits of K
            (`kvstore.rope` has the bounds), so texts are the same but for ties.
        prefetcher: loads through this one, of the same store; say, one that bounds the memory of several models. None:
            one of its own.

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
        rope: str = "post",
        prefetcher: Prefetcher | None = None,
    ) -> None:
        if not hasattr(store, "submit_get"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        if not hasattr(model, "config") or not hasattr(model, "forward"):
            raise ConfigError(f"a causal language model of transformers is needed, not {type(model).__name__}")
        if prefetcher is not None and prefetcher.store is not store:
            raise ConfigError("the prefetcher is one of another store")
        if rope not in ("post", "pre"):
            raise ConfigError(f"rope={rope!r} is not known; K is stored 'post' (after) or 'pre' (before) its embedding")
        self.store = store
        self.rope = rope
        self.prefetcher = Prefetcher(store) if prefetcher is None else prefetcher
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
        self.rotary: RotarySpec | None = None
        if self.rope == "pre":
            self.rotary = model_rotary(self._model, self._config, self.layout.head_dim)
        self.context: KeyContext = self.store.key_context(
            model=self._name,
            layout=self.layout,
            dtype=canonical_dtype(self.dtype),
            revision=revision,
            extra=() if self.rotary is None else (("rope", "pre"), ("rotary", self.rotary.text)),
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
        mask = None if attention_mask is None else two_dimensional(attention_mask)[:, :held]
        return self._save(cache, self._rows(ids[:, :held], mask), timeout)

    def save_turn(self, turn: Turn, cache: Any, *, timeout: float | None = None) -> SaveResult:
        """Store the new full chunks of a session's turn; see `kvstore.sessions`.

        Args:
            cache: the cache of just this turn's tokens, as `generate` leaves it, begun with what `load_turn` gave.
            timeout: as of `save`, as are the errors.
        """
        self._notice_changes()
        held = min(self._check_cache(cache, 1), len(turn.tokens))
        pieces = turn.new_chunks(held)
        if turn.context.digest != self.context.digest:
            error = ConfigError("the model changed since this turn began; its KV is not stored")
            return SaveResult(len(pieces), 0, 0, len(pieces), 0, error)
        return self._save(cache, [Row(0, held, pieces, turn.base_key)], timeout, turn)

    def _save(self, cache: Any, rows: Sequence[Row], timeout: float | None, turn: Turn | None = None) -> SaveResult:
        deadline = time.monotonic() + (self.store.config.put_timeout if timeout is None else timeout)
        known = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        pending: deque[Completion[Sequence[Outcome]]] = deque()
        existing = failed = 0
        reason: KVStoreError | None = None
        for number, (row, hits) in enumerate(zip(rows, known, strict=True)):
            first = hits.result()
            existing += first
            undo = None
            if self.rotary is not None and first < len(row.pieces):
                undo = self.rotary.undoing(range(row.pieces[-1].end))
            for piece in range(first, len(row.pieces)):
                try:
                    pending.append(self._put_piece(cache, number, row, piece, undo, turn, deadline))
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
        return SaveResult(sum(len(row.pieces) for row in rows), stored, existing, failed, nbytes, reason)

    def _put_piece(
        self, cache: Any, number: int, row: Row, index: int, undo: Rotation | None, turn: Turn | None, deadline: float
    ) -> Completion[Sequence[Outcome]]:
        piece = row.pieces[index]
        begin, end = piece.position, piece.end
        spec = self._spec(piece.tokens)
        # The one copy on the way out: from the cache, transposed to token-major, into pool memory.
        with self.store.pool.acquire(spec.raw_bytes, max(0.0, deadline - time.monotonic())) as buffer:
            views = spec.split(buffer.view)
            where = slice(row.begin + begin, row.begin + end)
            turn_back = None if undo is None else undo.part(begin, end)
            for layer, view in zip(cache.layers, views, strict=True):
                key, value = self._tensors(view, piece.tokens)
                embedded = layer.keys[number, :, where].transpose(0, 1)
                if turn_back is None:
                    key.copy_(embedded)
                elif embedded.device.type == "cpu":
                    turn_back(embedded, out=key)
                else:  # on the device, then in one transfer
                    key.copy_(turn_back(embedded))
                value.copy_(layer.values[number, :, where].transpose(0, 1))
            meta = {
                "model": self.context.model, "revision": self.context.revision, "namespace": self.context.namespace,
                "dtype": self.context.dtype, "tokens": [begin, end], "layers": self.layout.num_layers,
                "kv_heads": self.layout.num_kv_heads, "head_dim": self.layout.head_dim,
                "rope": "applied" if self.rotary is None else "none",
                "rotary": None if self.rotary is None else self.rotary.text,
            }  # fmt: skip
            parent = row.pieces[index - 1].key if index else row.parent
            info = RecordInfo(begin, piece.tokens) if turn is None else turn.info(piece)
            return self._put(Item(piece.key, views, spec, meta, parent, buffer, info), deadline)

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
        """The KV of the longest stored prefix, read layer by layer through the prefetcher: the first layers in a small
        group, later ones in larger groups, each being copied into the cache while the next ones are read.

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
        return self._load(rows, width, deadline)

    def load_streamed(
        self, input_ids: Any, streamer: Streamer, *, slo_s: float | None = None, timeout: float | None = None
    ) -> Streamed:
        """The KV of a prompt's full chunks within an SLO: what the link allows is loaded at the level that it allows,
        the rest is computed by the model itself, group by group (docs/streaming.md). One prompt; its last token is
        always left to compute.

        What is computed behind a group that was loaded at a lossy level is computed over that; do not `save` such a
        cache under a lossless codec's name: nothing can tell. The pool holds all that is loaded until the end; what it
        has no room for is computed.

        Args:
            input_ids: token ids, `[tokens]` or `[1, tokens]`.
            streamer: over this store. One with `prefill=` also computes; without it the cache ends at the first chunk
                that is not there.
            slo_s: seconds to the first token, from now; None: as fast as possible at the finest level.
            timeout: seconds after which nothing more is waited for; None: the store's `blocking_timeout`.

        Raises:
            ConfigError: a batch, a streamer of another store, or numbers that make no sense.
        """
        self._notice_changes()
        return stream_prefix(self, self._model, streamer, input_ids, slo_s, timeout)

    def load_turn(self, turn: Turn, *, timeout: float | None = None) -> tuple[DynamicCache, int]:
        """The KV of the leading pieces of a session's turn, as `load`: what was stored before a truncation is embedded
        at its new positions. Tells the turn what of it was found."""
        self._notice_changes()
        if turn.context.digest != self.context.digest:
            turn.rebound(self.context)
        deadline = time.monotonic() + (self.store.config.blocking_timeout if timeout is None else timeout)
        width = len(turn.tokens)
        cache, columns = self._load([Row(0, width, turn.pieces)], width, deadline)
        turn.served(columns)
        return cache, columns

    def _load(self, rows: Sequence[Row], width: int, deadline: float) -> tuple[DynamicCache, int]:
        lookups = [self.store.submit_lookup(row.keys, deadline=deadline) for row in rows]
        reading = Reading(rows, width - 1)  # one token must be left to compute
        for number, done in enumerate(lookups):
            reading.limit(number, done.result())
        if reading.hopeless or not self._read(reading, deadline):
            return DynamicCache(config=self._full_config), 0
        columns = reading.columns
        return self._cache([(k[:, :, :columns], v[:, :, :columns]) for k, v in reading.tensors]), columns

    def _read(self, reading: Reading, deadline: float) -> bool:
        """Read all layers of the pieces that can still be used. False if that leaves nothing."""
        prefixes = [
            [Chunk(piece.key, self._spec(piece.tokens)) for piece in row.pieces[: reading.usable(row)]]
            for row in reading.rows
        ]
        embed = None if self.rotary is None else self.rotary.applying(range(reading.columns))
        with self.prefetcher.start(LayerPlan(prefixes, deadline, split=True)) as stream:
            for part in stream.parts():
                for number, hits in enumerate(stream.hit_prefixes):
                    reading.limit(number, hits)
                if reading.hopeless:
                    return False
                self._scatter(part, reading, embed)
                for number, row in enumerate(reading.rows):  # the shortest row decides for all
                    stream.limit(reading.usable(row), number)
            return all(stream.hit_prefixes)

    def _scatter(self, part: LoadedPart, reading: Reading, embed: Rotation | None) -> None:
        """The one copy on the way in: from pool memory, transposed to head-major, onto the model's device."""
        shape = (len(reading.rows), self.layout.num_kv_heads, reading.columns, self.layout.head_dim)
        make = torch.zeros if any(row.begin for row in reading.rows) else torch.empty
        for layer in range(part.first, part.first + part.count):
            if layer == len(reading.tensors):  # else its first chunks came with another part
                keys, values = (make(shape, dtype=self.dtype, device=self.device) for _ in range(2))
                reading.tensors.append((keys, values))
            keys, values = reading.tensors[layer]
            for number, row in enumerate(reading.rows):
                for index, segment in zip(part.chunks(number), part.views(layer, number), strict=True):
                    if not reading.needs(number, index):
                        continue
                    piece = row.pieces[index]
                    key, value = self._tensors(segment, piece.tokens)
                    begin = row.begin + piece.position
                    end = min(begin + piece.length, reading.columns)
                    wanted = slice(piece.first, piece.first + end - begin)
                    into = keys[number, :, begin:end].transpose(0, 1)
                    if embed is None:
                        into.copy_(key[wanted])
                    else:
                        embed.part(piece.position, piece.position + end - begin)(key[wanted].to(self.device), out=into)
                    values[number, :, begin:end] = value[wanted].transpose(0, 1)

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
            rows.append(Row.of(begin, end - begin, keys, self.store.config.chunk_size))
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


def _only_outcome(completion: Completion[Sequence[Outcome]]) -> Outcome:
    """The outcome of a batch of one, also with `on_error="raise"`."""
    try:
        return completion.result()[0]
    except KVStoreError as error:
        return Outcome.failed(error)
