"""Loading chunks layer by layer, each moved to where it stands in a prompt, one layer ahead of the computation.

    with ChunkLoader(form, placed, prefetcher, deadline=…) as loader:
        for layer in run.layers(loader.layers(run.needs)):
            ...  # the next one is on its way meanwhile

Every chunk is a prefix of its own to the prefetcher, so a chunk that is missing, damaged or late costs nothing but
itself. If one is lost in a later layer, what was computed over it is worth nothing: `ChunksLost` says which, and the
caller begins again without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstore.errors import ConfigError
from kvstore.prefetch import Chunk, LayerPlan, LoadedLayer

from .terms import LayerKV

if TYPE_CHECKING:
    from kvstore.prefetch import Prefetcher

    from .chunks import Placed
    from .form import ChunkForm

__all__ = ["ChunkLoader", "ChunksLost"]


class ChunksLost(Exception):
    """Chunks that are not there in all layers.

    Attributes:
        chunks: their numbers.
        layer: in which that was seen.
    """

    def __init__(self, chunks: Sequence[int], layer: int) -> None:
        super().__init__(f"chunks {list(chunks)} are missing, damaged or late in layer {layer}")
        self.chunks = tuple(chunks)
        self.layer = layer


class ChunkLoader:
    """The KV of chunks of one prompt, layer by layer in order. One thread at a time.

    The memory of what `fetch_kv` and `layers` give is used again for the next layer: on a device there is one layer of
    the spans besides the cache.

    Args:
        form: how the chunks are stored.
        placed: the chunks in the order of the prompt.
        prefetcher: loads them.
        deadline: absolute monotonic seconds for all layers.
        compute_s: seconds that computing a layer is expected to take; None: not known.
        level: highest level of encoded records that is wanted; None: the store's `codec_level`.

    Attributes:
        wait_s: seconds that each layer was waited for; 0 for those that nobody needed.
        load_s: seconds in which each layer came: since the one before was there if it was waited for, else what its
            bytes take at the speed measured meanwhile (the speed of all streams of the prefetcher). A layer that nobody
            needed counts as much as the next one.
        move_s: seconds to copy and move, of each layer; on a device without waiting for it.
    """

    def __init__(
        self,
        form: ChunkForm,
        placed: Sequence[Placed],
        prefetcher: Prefetcher,
        *,
        deadline: float,
        compute_s: float | None = None,
        level: int | None = None,
    ) -> None:
        if not placed:
            raise ConfigError("there are no chunks to load")
        self._form = form
        self._placed = placed
        self._prefetcher = prefetcher
        prefixes = [[Chunk(each.key, form.spec(each.tokens))] for each in placed]
        self._rotation = form.moving(*placed)
        self._offsets = [0]
        for each in placed:
            self._offsets.append(self._offsets[-1] + each.length)
        model, layout = form.model, form.layout
        shape = (self._offsets[-1], layout.num_kv_heads, layout.head_dim)
        self._k, self._v = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self._loaded: LoadedLayer | None = None
        self._copied: Any = None  # an event of a device
        self._layer = -1
        self.wait_s, self.load_s, self.move_s = ([0.0] * layout.num_layers for _ in range(3))
        self._there = time.monotonic()
        self._stream = prefetcher.start(LayerPlan(prefixes, deadline, compute_s=compute_s, level=level))

    @property
    def num_layers(self) -> int:
        return self._form.layout.num_layers

    def layer_bytes(self, layer: int) -> int:
        """Raw bytes of a layer of all chunks."""
        return self._stream.plan.layer_bytes(layer)

    def fetch_kv(self, chunk: int, layer: int) -> LayerKV | None:
        """The paper's call: K, moved, and V of one chunk in one layer, `[tokens of the chunk, kv_heads, head_dim]`;
        None (the paper's -1) if it is not there. Waits for the layer; layers are asked for in order. On a device it may
        still be on its way: `synchronize`.

        Raises:
            ConfigError: no such chunk or layer, or a layer that was given back.
            KVStoreError: the store was closed, or with `on_error="raise"` the first error.
        """
        if not 0 <= chunk < len(self._placed):
            raise ConfigError(f"there is no chunk {chunk}; the prompt has {len(self._placed)}")
        if layer != self._layer:
            self._advance(layer)
        if not self._copy(chunk):
            return None
        begin, end = self._offsets[chunk : chunk + 2]
        k = self._k[begin:end]
        try:
            self._rotation.part(begin, end)(k, out=k)
        finally:
            self._mark()
        return LayerKV(k, self._v[begin:end])

    def _copy(self, chunk: int) -> bool:
        """The one copy on the way in: from pool memory onto the model's device, K not moved yet. False: it is lost."""
        assert self._loaded is not None  # `_advance` saw to it
        views = self._loaded.views(chunk)
        if not views:
            return False
        placed = self._placed[chunk]
        wanted = slice(placed.first, placed.first + placed.length)
        part = slice(*self._offsets[chunk : chunk + 2])
        for memory, stored in zip((self._k, self._v), self._form.tensors(views[0], placed.tokens), strict=True):
            memory[part].copy_(stored[wanted], non_blocking=True)
        return True

    def synchronize(self) -> None:
        """The paper's call: waits until all that was fetched is there, also on a device. What is computed from it in
        the same stream of the device need not wait."""
        event, self._copied = self._copied, None
        if event is not None:
            event.synchronize()

    def _mark(self) -> None:
        """Remember what a device has been told to copy until now."""
        if self._k.device.type == "cuda":
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._k.device))
            self._copied = event

    def fetch_layer(self, layer: int) -> LayerKV:
        """All chunks in one layer, in their order, `[tokens of all chunks, kv_heads, head_dim]`.

        Raises:
            ChunksLost: some are not there; nothing more is loaded of these.
        """
        if layer != self._layer:
            self._advance(layer)
        began = time.monotonic()
        try:
            lost = [chunk for chunk in range(len(self._placed)) if not self._copy(chunk)]
            if lost:
                raise ChunksLost(lost, layer)
            self._rotation(self._k, out=self._k)
        finally:
            self._mark()  # also of what nobody will use: the memory that a device still reads is not given back
        self.move_s[layer] = time.monotonic() - began
        return LayerKV(self._k, self._v)

    def layers(self, needs: Callable[[int], bool] | None = None) -> Iterator[LayerKV | None]:
        """The loading generator: layer after layer, as `fetch_layer`. What it gives holds still until it is asked for
        the next; that one is being loaded meanwhile.

        Args:
            needs: whether a layer is needed; None is given for the others, at once. None: all are.
        """
        for layer in range(self.num_layers):
            yield self.fetch_layer(layer) if needs is None or needs(layer) else None

    def close(self) -> None:
        """Give everything back. May be called twice."""
        self._release()
        self._stream.cancel()

    def _advance(self, layer: int) -> None:
        self._release()
        began = time.monotonic()
        loaded = self._stream.wait(layer)
        now = time.monotonic()
        passed, since = now - self._there, range(self._layer + 1, layer + 1)
        loaded.retain()  # also if the stream is cancelled by somebody else while this is looked at
        self._loaded, self._layer, self._there = loaded, layer, now
        self.wait_s[layer] = now - began
        speed = self._prefetcher.bandwidth
        took = min(passed, sum(map(self.layer_bytes, since)) / speed) if speed else passed
        if self.wait_s[layer] > took / 2:
            took = passed
        for each in since:
            self.load_s[each] = took / len(since)

    def _release(self) -> None:
        self.synchronize()  # a device may still read the memory
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.release()

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
