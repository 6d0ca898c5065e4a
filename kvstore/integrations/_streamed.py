"""A prompt's KV streamed into a transformers cache within an SLO: loaded, or computed by the model itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import DynamicCache

from kvstore.errors import ConfigError
from kvstore.keys import chunk_keys
from kvstore.prefetch import Chunk

from ._batches import two_dimensional

if TYPE_CHECKING:
    from kvstore.stream import ReadyGroup, Report, Streamer, TextPart

    from .transformers import KVCacheStore

__all__ = ["Streamed", "stream_prefix"]


class Streamed(NamedTuple):
    """What `KVCacheStore.load_streamed` brought.

    Attributes:
        cache: of the first `tokens` tokens, on the model's device.
        tokens: how many it holds; the others are to be computed.
        report: what came of the request: levels, bytes, TTFT, whether the SLO was violated.
    """

    cache: DynamicCache
    tokens: int
    report: Report


def stream_prefix(
    kv: KVCacheStore, model: Any, streamer: Streamer, input_ids: Any, slo_s: float | None, timeout: float | None
) -> Streamed:
    """See `KVCacheStore.load_streamed`."""
    from kvstore.stream import Report

    begun = time.monotonic()
    if streamer.store is not kv.store:
        raise ConfigError("the streamer is one of another store")
    ids = two_dimensional(input_ids)
    if ids.shape[0] != 1:
        raise ConfigError(f"one prompt is streamed at a time, not a batch of {ids.shape[0]}")
    size = kv.store.config.chunk_size
    count = (ids.shape[1] - 1) // size  # one token must be left to compute
    if count < 1:
        return Streamed(DynamicCache(config=model.config), 0, Report())
    keys = chunk_keys(ids[0, : count * size], context=kv.context, chunk_size=size)
    into = _Destination(kv, model, ids[:, : count * size], size)
    if slo_s is not None and slo_s > 0:
        slo_s = max(1e-9, slo_s - (time.monotonic() - begun))
    with streamer.stream(
        [Chunk(key, into.spec) for key in keys],
        recompute=into.compute if streamer.prefill is not None else None,
        slo_s=slo_s,
        timeout=timeout,
        new_tokens=ids.shape[1] - count * size,
    ) as stream:
        for group in stream:
            into.copy(group)
        missing = stream.missing
        tokens = missing[0].begin if missing else count * size
        return Streamed(into.cache(tokens), tokens, stream.report)


class _Destination:
    """K and V `[1, kv_heads, tokens, head_dim]` of all layers, filled from both sides."""

    def __init__(self, kv: KVCacheStore, model: Any, ids: torch.Tensor, size: int) -> None:
        self._kv, self._model, self._size = kv, model, size
        self._ids = ids.to(kv.device)
        self.spec = kv._spec(size)
        shape = (1, kv.layout.num_kv_heads, ids.shape[1], kv.layout.head_dim)
        self._layers = [
            (torch.empty(shape, dtype=kv.dtype, device=kv.device), torch.empty(shape, dtype=kv.dtype, device=kv.device))
            for _ in range(kv.layout.num_layers)
        ]
        self._embed = None if kv.rotary is None else kv.rotary.applying(range(ids.shape[1]))

    def copy(self, group: ReadyGroup) -> None:
        """The one copy on the way in: from the stream's memory, transposed, onto the model's device. What was computed
        has no views: it is in its place already."""
        if group.level is None:
            return
        for number, view in zip(group.chunks, group.views, strict=True):
            begin, end = number * self._size, (number + 1) * self._size
            for (keys, values), segment in zip(self._layers, self.spec.split(view), strict=True):
                key, value = self._kv._tensors(segment, self._size)
                where = keys[0, :, begin:end].transpose(0, 1)
                if self._embed is None:
                    where.copy_(key)
                else:
                    self._embed.part(begin, end)(key.to(self._kv.device), out=where)
                values[0, :, begin:end] = value.transpose(0, 1)

    def cache(self, tokens: int) -> DynamicCache:
        """Over the first tokens; nothing is copied."""
        if not tokens:
            return DynamicCache(config=self._model.config)
        return self._kv._cache([(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in self._layers])

    def compute(self, part: TextPart) -> None:
        """A group by the model itself, over what is before it."""
        cache = self.cache(part.begin)
        with torch.inference_mode():
            self._model.base_model(
                input_ids=self._ids[:, part.begin : part.end], use_cache=True, **self._kv.cache_argument(cache)
            )
            slot: Any
            for slot, pair in zip(cache.layers, self._layers, strict=True):
                for into, fresh in zip(pair, (slot.keys, slot.values), strict=True):
                    into[:, :, part.begin : part.end] = fresh[:, :, part.begin : part.end]
