"""Layers onto a device: from a stream's memory, over a staging ring, into at most two layers of device memory.

    stage = DeviceStage(device, slot_bytes=largest_layer)
    for layer in stage.layers(stream):                     # the next one is copied while this one is used
        for segment in layer.segments(): ...               # uint8 tensors on the device

Copies run on a stream of the stage's own. The computation waits for a layer's copy by an event, and a slot is written
to again only behind the event of the computation that used it; the host waits for neither. On a CPU the same code runs
with copies that are done at once, and events that are nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from kvstore.errors import ClosedError, ConfigError

from .stream import LayerStream, LoadedLayer

__all__ = ["DeviceLayer", "DeviceStage"]

DEVICE_SLOTS = 2  # layers of extra device memory: one that is used, one that is being copied
_ALIGNMENT = 256  # of each segment in a slot: enough for every dtype and for vector loads


class _Event:
    """What a device does not have: everything has happened."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class _Queue:
    """Work on a device in order: a CUDA stream, or on a CPU nothing, since all work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._stream: Any = None if self._cuda is None else self._cuda.Stream(device)
        self._device = device

    def work(self) -> contextlib.AbstractContextManager[Any]:
        """Work given within goes into this queue."""
        return contextlib.nullcontext() if self._cuda is None else self._cuda.stream(self._stream)

    def mark(self) -> Any:
        """An event behind all work in this queue."""
        return _Event() if self._cuda is None else self._stream.record_event()

    def mark_caller(self) -> Any:
        """An event behind all work in the caller's current stream."""
        return _Event() if self._cuda is None else self._cuda.current_stream(self._device).record_event()

    def wait_for(self, event: Any) -> None:
        """Work given later begins behind the event."""
        if self._cuda is not None:
            self._stream.wait_event(event)

    def caller_waits_for(self, event: Any) -> None:
        """Work that the caller gives later into his current stream begins behind the event."""
        if self._cuda is not None:
            self._cuda.current_stream(self._device).wait_event(event)


class DeviceLayer:
    """One layer on the device. Valid until the next one is asked for.

    Attributes:
        layer: its number.
    """

    def __init__(self, layer: int, slot: torch.Tensor, places: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.layer = layer
        self._slot: torch.Tensor | None = slot
        self._places = places

    def segments(self, prefix: int = 0) -> list[torch.Tensor]:
        """The segments (K, then V, token-major) of the chunks of a prefix that can be used, as flat uint8 tensors on
        the device; `view(dtype)` them. Raises `ClosedError` once the next layer was asked for."""
        if self._slot is None:
            raise ClosedError("this layer was given back")
        return [self._slot[begin : begin + size] for begin, size in self._places[prefix]]

    def _close(self) -> None:
        self._slot = None


class DeviceStage:
    """Staging for one engine thread: a ring of host memory and two slots on the device.

    Bytes lie in page-locked memory before the device fetches them. If the store's pool is page-locked (torch with CUDA
    was loaded before the store was opened) they are fetched from there, and were copied once by then; else they are
    copied into the ring.

    Args:
        device: "cuda", "cuda:1", …, or "cpu".
        slot_bytes: bytes of the largest layer that will come, over all chunks of its prefixes; see `slot_bytes_for`.
        ring_slots: layers in the host's ring. Two let one be filled while another is fetched.

    Raises:
        ConfigError: sizes that make no sense.
    """

    def __init__(self, device: str | torch.device, slot_bytes: int, *, ring_slots: int = 2) -> None:
        if slot_bytes < 1 or ring_slots < 1:
            raise ConfigError(f"slot_bytes={slot_bytes} and ring_slots={ring_slots} must be at least 1")
        self.device = torch.device(device)
        self.slot_bytes = slot_bytes
        self._pin = self.device.type == "cuda"
        self._queue = _Queue(self.device)
        self._slots = [self._memory(self.device) for _ in range(DEVICE_SLOTS)]
        # Behind the last use of each slot; at first, whatever the caller's stream has in hand: torch may have given us
        # memory that work of that stream still uses.
        self._free: list[Any] = [self._queue.mark_caller() for _ in self._slots]
        self._num_ring = ring_slots
        self._ring: list[torch.Tensor] = []  # made when it is needed
        self._ring_free: list[Any] = []
        self._ring_turn = 0
        self._fetching: deque[tuple[Any, LoadedLayer]] = deque()  # memory of the pool that the device reads by itself

    def _memory(self, device: torch.device | None) -> torch.Tensor:
        if device is not None:
            return torch.empty(self.slot_bytes, dtype=torch.uint8, device=device)
        return torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=self._pin)

    @staticmethod
    def slot_bytes_for(stream: LayerStream) -> int:
        """Bytes of the largest layer of a stream, as it lies in a slot."""
        plan = stream.plan
        chunks = [chunk for prefix in plan.prefixes for chunk in prefix]
        return max(sum(_aligned(chunk.spec.sizes[layer]) for chunk in chunks) for layer in range(plan.num_layers))

    @property
    def device_bytes(self) -> int:
        """Device memory that the stage has taken."""
        return sum(slot.nbytes for slot in self._slots)

    @property
    def ring_bytes(self) -> int:
        """Host memory that the ring has taken; 0 if the pool is page-locked."""
        return sum(slot.nbytes for slot in self._ring)

    def layers(self, stream: LayerStream, timeout: float | None = None) -> Iterator[DeviceLayer]:
        """All layers of a stream in order, each when the device has it or will have it before what is given to the
        current stream next. The one behind it is copied meanwhile, if it has arrived. On a miss they have no segments.

        Args:
            timeout: seconds for each layer; see `LayerStream.wait`.

        Raises:
            ConfigError: a layer is larger than a slot.
            ClosedError: the stage is closed.
            As `LayerStream.wait`.
        """
        if not self._slots:
            raise ClosedError("the device stage is closed")
        copies: dict[int, tuple[Any, DeviceLayer]] = {}
        try:
            for number in range(stream.num_layers):
                if number not in copies:
                    copies[number] = self._copy(stream, number, timeout)
                event, layer = copies.pop(number)
                slot = self._turn_of(number)
                self._queue.caller_waits_for(event)
                following = number + 1
                if following < stream.num_layers and stream.ready(following):
                    copies[following] = self._copy(stream, following, timeout)
                try:
                    yield layer
                finally:
                    layer._close()
                    self._free[slot] = self._queue.mark_caller()
        finally:
            self._let_go(wait=True)

    @staticmethod
    def _turn_of(number: int) -> int:
        return number % DEVICE_SLOTS

    def _copy(self, stream: LayerStream, number: int, timeout: float | None) -> tuple[Any, DeviceLayer]:
        """Begin to copy a layer. Returns the event behind it."""
        self._let_go(wait=False)
        slot = self._slots[self._turn_of(number)]
        with stream.wait(number, timeout) as loaded:
            views = [loaded.views(prefix) for prefix in range(len(stream.plan.prefixes))]
            places: list[list[tuple[int, int]]] = []
            at = 0
            for some in views:
                places.append([])
                for view in some:
                    places[-1].append((at, len(view)))
                    at += _aligned(len(view))
            if at > self.slot_bytes:
                raise ConfigError(f"layer {number} has {at} bytes, a slot of the stage {self.slot_bytes}")
            flat = [view for some in views for view in some]
            where = [place for some in places for place in some]
            self._queue.wait_for(self._free[self._turn_of(number)])
            if loaded.page_locked:
                event = self._fetch(flat, where, slot)
                loaded.retain()  # until the device has read it
                self._fetching.append((event, loaded))
            else:
                event = self._over_the_ring(flat, where, slot, at)
        return event, DeviceLayer(number, slot, places)

    def _fetch(self, views: Sequence[memoryview], places: Sequence[tuple[int, int]], slot: torch.Tensor) -> Any:
        with self._queue.work():
            for view, (begin, size) in zip(views, places, strict=True):
                slot[begin : begin + size].copy_(torch.frombuffer(view, dtype=torch.uint8), non_blocking=True)
        return self._queue.mark()

    def _over_the_ring(
        self, views: Sequence[memoryview], places: Sequence[tuple[int, int]], slot: torch.Tensor, nbytes: int
    ) -> Any:
        """One copy by the host into page-locked memory, one by the device out of it."""
        if not self._ring:
            self._ring = [self._memory(None) for _ in range(self._num_ring)]
            self._ring_free = [_Event() for _ in self._ring]
        turn = self._ring_turn
        self._ring_turn = (turn + 1) % len(self._ring)
        self._ring_free[turn].synchronize()
        staged = self._ring[turn]
        for view, (begin, size) in zip(views, places, strict=True):
            staged[begin : begin + size] = torch.frombuffer(view, dtype=torch.uint8)
        with self._queue.work():
            slot[:nbytes].copy_(staged[:nbytes], non_blocking=True)
        event = self._ring_free[turn] = self._queue.mark()
        return event

    def _let_go(self, *, wait: bool) -> None:
        """Give back memory of the pool that the device has read."""
        while self._fetching:
            event, loaded = self._fetching[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._fetching.popleft()
            loaded.release()

    def close(self) -> None:
        """Wait for copies under way and free all memory. May be called twice."""
        self._let_go(wait=True)
        for event in (*self._free, *self._ring_free):
            event.synchronize()
        self._slots, self._free, self._ring, self._ring_free = [], [], [], []

    def __enter__(self) -> DeviceStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
