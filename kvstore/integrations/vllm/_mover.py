"""Copies between pages and pinned or plain host memory: on a CPU at once, on a GPU by one kernel and one transfer.

On a GPU everything runs on a stream of its own. On the way in, bytes go from the pool's pinned memory into a staging
tensor and from there, by one kernel (`_kernels.scatter`), into the pages; the computation waits for that by an event.
On the way out the kernel waits for the computation of the layer, gathers into the staging tensor, and one transfer
brings it to the pool; the next kernels of the computation that write to those pages are given after `finish`, which
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvstore.layout import KVLayout

from ._paging import Pages, segment_tensors, slots

__all__ = ["DeviceMover", "HostMover", "Mover", "Piece", "mover_for"]


class Piece(NamedTuple):
    """Some tokens of a chunk, on both sides.

    Attributes:
        segment: the layer's segment of the whole chunk, in host memory.
        tokens: how many tokens the chunk has.
        first: the first of them that is meant.
        blocks: the request's blocks from its first token on.
        begin, end: the tokens that are meant, as positions in the request.
    """

    segment: memoryview
    tokens: int
    first: int
    blocks: Sequence[int]
    begin: int
    end: int


class Mover(Protocol):
    """Moves pieces of a layer. What is given to it is done in order."""

    def load(self, pages: Pages, pieces: Sequence[Piece]) -> Any:
        """Segments → pages. Returns what tells by `query()` that the segments are not read any more, or None if that
        is so already. The computation that the caller gives next sees the pages filled."""

    def save(self, pages: Pages, pieces: Sequence[Piece]) -> None:
        """Pages → segments, as the computation given so far leaves them; complete at `finish`."""

    def finish(self) -> None:
        """Everything is done."""


class HostMover:
    """Pages in host memory: one strided copy per slice of a block."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype

    def load(self, pages: Pages, pieces: Sequence[Piece]) -> Any:
        """See `Mover`."""
        for piece in pieces:
            keys, values = segment_tensors(piece.segment, piece.tokens, self._layout, self._dtype)
            wanted = slice(piece.first, piece.first + piece.end - piece.begin)
            pages.scatter(piece.blocks, piece.begin, piece.end, keys[wanted], values[wanted])
        return None

    def save(self, pages: Pages, pieces: Sequence[Piece]) -> None:
        """See `Mover`."""
        for piece in pieces:
            keys, values = segment_tensors(piece.segment, piece.tokens, self._layout, self._dtype)
            wanted = slice(piece.first, piece.first + piece.end - piece.begin)
            pages.gather(piece.blocks, piece.begin, piece.end, keys[wanted], values[wanted])

    def finish(self) -> None:
        """See `Mover`."""


class DeviceMover:
    """Pages on a CUDA device. See the module."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        from . import _kernels

        self._kernels = _kernels
        self._layout = layout
        self._dtype = dtype
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._slots: dict[tuple[Any, ...], torch.Tensor] = {}

    def load(self, pages: Pages, pieces: Sequence[Piece]) -> Any:
        """See `Mover`."""
        # Not before the computation given so far: it may still read what lay in these pages.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                source = torch.frombuffer(piece.segment, dtype=torch.uint8)
                staged = source.to(self._device, non_blocking=True)
                keys, values = segment_views(staged, piece.tokens, self._layout, self._dtype)
                wanted = slice(piece.first, piece.first + piece.end - piece.begin)
                self._kernels.scatter(keys[wanted], values[wanted], pages, self._places(pages, piece))
            event = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(event)
        return event

    def save(self, pages: Pages, pieces: Sequence[Piece]) -> None:
        """See `Mover`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                staged = torch.empty(len(piece.segment), dtype=torch.uint8, device=self._device)
                keys, values = segment_views(staged, piece.tokens, self._layout, self._dtype)
                wanted = slice(piece.first, piece.first + piece.end - piece.begin)
                self._kernels.gather(keys[wanted], values[wanted], pages, self._places(pages, piece))
                torch.frombuffer(piece.segment, dtype=torch.uint8).copy_(staged, non_blocking=True)

    def finish(self) -> None:
        """See `Mover`."""
        self._stream.synchronize()
        self._slots.clear()

    def _places(self, pages: Pages, piece: Piece) -> torch.Tensor:
        """Slots on the device: made once for all layers of a step."""
        name = (id(piece.blocks), piece.begin, piece.end)
        places = self._slots.get(name)
        if places is None:
            host = slots(piece.blocks, piece.begin, piece.end, pages.block_size).pin_memory()
            places = self._slots[name] = host.to(self._device, non_blocking=True)
        return places


def segment_views(
    flat: torch.Tensor, tokens: int, layout: KVLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `segment_tensors`, over a tensor of bytes."""
    typed = flat.view(dtype)
    heads, width, v_width = layout.num_kv_heads, layout.head_dim, layout.v_head_dim or 0
    cut = tokens * heads * width
    return typed[:cut].view(tokens, heads, width), typed[cut:].view(tokens, heads, v_width)


def mover_for(device: torch.device, layout: KVLayout, dtype: torch.dtype) -> Mover:
    """The mover for pages on a device. Anything but a CPU and CUDA is for the caller to refuse."""
    return HostMover(layout, dtype) if device.type == "cpu" else DeviceMover(layout, dtype, device)
