"""Layer by layer between a store and an engine: loading while it computes, saving while it computes.

    prefetcher = Prefetcher(store)                       # one per node, shared by its engines' threads
    with prefetcher.start(LayerPlan.of(keys, spec)) as stream:
        for layer in range(stream.num_layers):
            with stream.wait(layer) as loaded:           # the layers behind it are on their way meanwhile
                ...                                      # loaded.views(): one per chunk of the hit prefix

`prefetcher` and `stream` load, `writer` saves, `offload` frees pages of a device ahead of need, `device` (the only
module here that imports torch) brings layers to a device. `plan` has the pure functions. docs/prefetch.md tells more.
"""

from __future__ import annotations

from .offload import OffloadWindow, PageOffloader
from .plan import Chunk, LayerPlan, layer_groups, pipeline_seconds, read_buffer_bytes
from .prefetcher import Prefetcher
from .stream import LayerStream, LoadedLayer, LoadedPart
from .writer import ChunkSave, LayerSave, LayerWriter, SaveReport

__all__ = [
    "Chunk",
    "ChunkSave",
    "LayerPlan",
    "LayerSave",
    "LayerStream",
    "LayerWriter",
    "LoadedLayer",
    "LoadedPart",
    "OffloadWindow",
    "PageOffloader",
    "Prefetcher",
    "SaveReport",
    "layer_groups",
    "pipeline_seconds",
    "read_buffer_bytes",
]
