"""The pages of SGLang's host pool: where their bytes are, and what is to be known of them for their names."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.errors import ConfigError
from kvstore.record import KIND_OPAQUE, OPAQUE_SEGMENT_BYTES, RecordSpec

__all__ = ["LAYOUTS", "Pages"]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Pages:
    """Memory of the pages of one host pool, without copies.

    A page lies in the pool as pieces: K and V of all its layers (page_first, page_first_direct, page_head), or of each
    layer (layer_first); one instead of two for MLA. Its record has them in the order of their addresses, which is the
    order of SGLang's flat pages, each piece cut into segments of at most 1 MiB.

    Args:
        pool: SGLang's host pool: `layout`, `page_size`, `kv_buffer`, `get_page_buffer_meta`, `get_size_per_token`.

    Attributes:
        size: tokens per page.
        dtype: torch's name of what the pool holds: "uint8" for every 8-bit kind of KV.
        tag: what SGLang appends to the model's name for pages of a format of their own; None: nothing.
        spec: of the record of a page.
        geometry: what tells these pages from others of as many bytes, for their names.

    Raises:
        ConfigError: the pool's layout is not known, or its memory is not what it says.
    """

    def __init__(self, pool: Any) -> None:
        kind, layout = type(pool).__name__, getattr(pool, "layout", None)
        if layout not in LAYOUTS:
            raise ConfigError(
                f"host pool {kind} has the layout {layout!r}, which is not known here; "
                f"--hicache-mem-layout must be one of {', '.join(LAYOUTS)}"
            )
        buffer = getattr(pool, "kv_buffer", None)
        if not isinstance(buffer, torch.Tensor) or not hasattr(pool, "get_page_buffer_meta"):
            raise ConfigError(f"host pool {kind} does not say where its pages are; its KV cannot be stored")
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ConfigError(f"host pool {kind} is not one contiguous piece of host memory")
        self._pool = pool
        # The tensor is kept alive by the array behind the view.
        self._memory = _bytes_of(buffer)
        self._base = buffer.data_ptr()
        self.size = int(pool.page_size)
        self.dtype = str(buffer.dtype).removeprefix("torch.")
        self.tag: str | None = getattr(pool, "storage_format_tag", None)
        pointers, sizes = pool.get_page_buffer_meta(torch.arange(self.size, device="cpu"))
        self._pieces = len(pointers)
        order = sorted(range(self._pieces), key=pointers.__getitem__)
        # For each segment: which pointer of its page, and where in the piece behind it.
        self._cuts: list[tuple[int, int, int]] = [
            (piece, begin, min(begin + OPAQUE_SEGMENT_BYTES, int(sizes[piece])))
            for piece in order
            for begin in range(0, int(sizes[piece]), OPAQUE_SEGMENT_BYTES)
        ]
        self._sizes = [int(size) for size in sizes]
        self.spec = RecordSpec.of(KIND_OPAQUE, [end - begin for _, begin, end in self._cuts])
        page_bytes = int(pool.get_size_per_token()) * self.size
        if page_bytes != self.spec.raw_bytes:
            raise ConfigError(
                f"host pool {kind} has pages of {page_bytes} bytes, but gives {self.spec.raw_bytes} bytes in "
                f"{self._pieces} pieces; its KV cannot be stored"
            )
        self.geometry = [
            kind, layout, self.size,
            [getattr(pool, name, None) for name in ("start_layer", "end_layer", "layer_num", "head_num", "head_dim")],
            self._sizes,
        ]  # fmt: skip

    def views(self, host_indices: torch.Tensor) -> list[list[memoryview]]:
        """The segments of each page, writable, in the order of `spec`.

        Args:
            host_indices: `[pages * size]`, places of tokens in the pool.

        Raises:
            ConfigError: not whole pages, or not in the pool.
        """
        if len(host_indices) % self.size:
            raise ConfigError(f"{len(host_indices)} tokens are no whole pages of {self.size}")
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        count = len(host_indices) // self.size
        if len(pointers) != count * self._pieces or sizes != self._sizes * count:
            raise ConfigError(f"the host pool gives {len(pointers)} pieces for {count} pages of {self._pieces} each")
        if not pointers:
            return []
        last = self._base + len(self._memory) - max(self._sizes)
        if min(pointers) < self._base or max(pointers) > last:
            raise ConfigError("the host pool gives a place outside of its memory")
        memory, base, cuts = self._memory, self._base, self._cuts
        pages = []
        for first in range(0, len(pointers), self._pieces):
            starts = [pointer - base for pointer in pointers[first : first + self._pieces]]
            pages.append([memory[starts[piece] + begin : starts[piece] + end] for piece, begin, end in cuts])
        return pages

    def split(self, page: torch.Tensor) -> list[memoryview]:
        """The segments of a flat page, as SGLang's other interface hands it over. Not copied; writable.

        Raises:
            ConfigError: it is not contiguous host memory of a page.
        """
        if page.device.type != "cpu" or not page.is_contiguous():
            raise ConfigError("a page must be contiguous host memory")
        return self.spec.split(_bytes_of(page))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
