"""`LayerStream`: what an engine holds of a load under way; and the layers that it gives."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.errors import ClosedError, ConfigError
from kvstore.scheduler import seconds_left

from .parts import Part, State, StreamState

if TYPE_CHECKING:
    from .arbiter import Arbiter
    from .plan import LayerPlan

__all__ = ["LayerStream", "LoadedLayer", "LoadedPart"]


class _Loaded:
    """Memory of a stream that is looked at. As a context manager it gives it back at the end."""

    def __init__(self, stream: LayerStream, part: Part | None) -> None:
        self._stream = stream
        self._part = part
        self._extra = 0

    def _segments(self, layer: int, prefix: int) -> list[memoryview]:
        """The segments of one layer, in order of chunks, without those that cannot be used."""
        stream, part = self._stream, self._part
        if part is None:
            return []
        if part.state is not State.HELD:
            raise ClosedError("this layer was released")
        plan, hits = stream.plan, stream.hit_prefixes
        found = []
        for (number, chunk), buffer in zip(part.pairs, part.buffers, strict=True):
            if number == prefix and chunk < hits[prefix]:
                sizes = plan.prefixes[prefix][chunk].spec.sizes
                begin = sum(sizes[part.first : layer])
                found.append(buffer.view[begin : begin + sizes[layer]])
        return found

    @property
    def page_locked(self) -> bool:
        """True if a device can read the memory by itself."""
        part = self._part
        return part is not None and bool(part.buffers) and all(b.slab.page_locked for b in part.buffers)

    def retain(self) -> None:
        """Keep the memory also when the stream goes on or is cancelled, until `release`: for copies that a device makes
        by itself.

        Raises:
            CancelledError: the stream was cancelled before.
            ClosedError: it was given back before.
        """
        if self._part is not None:
            self._stream._arbiter.retain(self._stream.state, self._part)
        self._extra += 1

    def release(self) -> None:
        """Undo one `retain`. Raises `ClosedError` on one release too many."""
        if not self._extra:
            raise ClosedError("this layer was not retained, or was released before")
        self._extra -= 1
        if self._part is not None:
            self._stream._arbiter.let_go(self._part)


class LoadedLayer(_Loaded):
    """One layer of all chunks that are there. Valid until the stream is asked for a later layer, or the end of its
    `with` block."""

    def __init__(self, stream: LayerStream, part: Part | None, layer: int) -> None:
        super().__init__(stream, part)
        self.layer = layer

    def views(self, prefix: int = 0) -> list[memoryview]:
        """The layer's segments (K, then V, token-major; see `kvstore.layout`) of the chunks of one prefix, in order;
        as many as can be used. Empty on a miss. Raises `ClosedError` once the memory was given back."""
        return self._segments(self.layer, prefix)

    def __enter__(self) -> LoadedLayer:
        self.retain()  # a cancel from elsewhere must not take it away while it is looked at
        return self

    def __exit__(self, *_: object) -> None:
        self._stream._arbiter.advance(self._stream.state, self.layer + 1)
        self.release()


class LoadedPart(_Loaded):
    """Some consecutive layers of some chunks, in the order in which they are loaded. Valid until the next one.

    Attributes:
        first: the first of its layers.
        count: how many.
    """

    def __init__(self, stream: LayerStream, part: Part) -> None:
        super().__init__(stream, part)
        self.first = part.first
        self.count = part.count

    def chunks(self, prefix: int = 0) -> list[int]:
        """Which chunks of a prefix it has, as far as they can be used."""
        part = self._part
        hits = self._stream.hit_prefixes
        return [c for number, c in (part.pairs if part else ()) if number == prefix and c < hits[prefix]]

    def views(self, layer: int, prefix: int = 0) -> list[memoryview]:
        """The segments of a layer of the model, one for each of `chunks(prefix)`. Raises `ConfigError` if it has no
        such layer, `ClosedError` once the memory was given back."""
        if not self.first <= layer < self.first + self.count:
            raise ConfigError(f"this part has layers {self.first}..{self.first + self.count - 1}, not {layer}")
        return self._segments(layer, prefix)


class LayerStream:
    """A load under way. Made by `Prefetcher.start`. One thread at a time asks for layers; any may cancel.

    Layers are asked for in order; some may be left out, none may be asked for after a later one. A stream that is
    dropped without having been read to its end or cancelled gives everything back by itself.

    Attributes:
        plan: what is loaded.
    """

    def __init__(self, arbiter: Arbiter, state: StreamState) -> None:
        self._arbiter = arbiter
        self.state = state
        self.plan: LayerPlan = state.plan
        self._finalizer = weakref.finalize(self, arbiter.leave_behind, state)
        self._finalizer.atexit = False

    @property
    def num_layers(self) -> int:
        return self.plan.num_layers

    @property
    def hit_prefixes(self) -> tuple[int, ...]:
        """For each prefix, how many leading chunks are really there in all layers that came so far. It only ever
        shrinks: a chunk that is missing, damaged or late in any layer ends its prefix in all of them."""
        return tuple(self.state.hits)

    @property
    def hit_prefix(self) -> int:
        """`hit_prefixes` of a plan with one prefix. Raises `ConfigError` if it has several."""
        if len(self.state.hits) != 1:
            raise ConfigError(f"this plan has {len(self.state.hits)} prefixes; look at hit_prefixes")
        return self.state.hits[0]

    def wait(self, layer: int, timeout: float | None = None, *, deadline: float | None = None) -> LoadedLayer:
        """A layer, once all of it that can be used is there; gives back the layers before it.

        Trouble is a shorter `hit_prefixes`, not an exception; so is what is not there by the deadline of the plan.

        Args:
            timeout: seconds; None: until the plan's deadline.
            deadline: the same as absolute monotonic seconds. The earlier of both counts.

        Raises:
            ConfigError: there is no such layer, it was given back, or it comes in several parts (`parts`).
            TimeoutError: it is not there in time; it goes on loading.
            CancelledError: the stream was cancelled.
            KVStoreError: the store was closed, or with `on_error="raise"` the first error.
        """
        state = self.state
        end = math.inf if timeout is None else time.monotonic() + timeout
        if deadline is not None:
            end = min(end, deadline)
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"there is no layer {layer}; the plan has {self.num_layers}")
        if layer < state.reached and not state.over:
            raise ConfigError(f"layer {layer} was given back; layers are asked for in order")
        if state.split:
            raise ConfigError("layers of this plan come in several parts; use parts()")
        return LoadedLayer(self, self._front(end, layer=layer), layer)

    def _front(self, end: float, *, layer: int | None = None, keep: bool = False) -> Part | None:
        """See `Arbiter.await_front`."""
        try:
            return self._arbiter.await_front(self.state, end, layer=layer, keep=keep)
        finally:
            if self.state.over:  # an error that was raised knows this frame, and the finalizer would keep both for ever
                self._finalizer.detach()

    def parts(self) -> Iterator[LoadedPart]:
        """All parts in order, each as soon as it is there, and given back when the next one is asked for.

        A part is some layers of all chunks; with `LayerPlan.split` a layer that is too large comes in several parts, of
        some chunks each. Ends early when nothing is left of any prefix.

        Raises:
            As `wait`.
        """
        while (part := self._front(math.inf, keep=True)) is not None:
            try:
                yield LoadedPart(self, part)
            finally:
                self._arbiter.done_with(self.state, part)

    def ready(self, layer: int) -> bool:
        """True if `wait(layer)` would return at once: it is there, or nothing is left to wait for."""
        return self._arbiter.ready(self.state, layer)

    def limit(self, chunks: int, prefix: int = 0) -> None:
        """No more than the first `chunks` chunks of a prefix are wanted: the others are not read any more, and count
        as missing. Raises `ConfigError` if there is no such prefix."""
        if not 0 <= prefix < len(self.state.hits) or chunks < 0:
            raise ConfigError(f"there are no {chunks} chunks of prefix {prefix}")
        self._arbiter.limit(self.state, prefix, chunks)

    def cancel(self) -> None:
        """Give up: nothing more is asked for, and all memory goes back at once, but for what I/O under way may still
        write to, which goes when that has ended, and for what is being looked at (in a `with` block, by `parts`, or
        retained). May be called at any time, from any thread, any number of times."""
        self._finalizer.detach()
        self._arbiter.end(self.state)

    def settled(self, timeout: float | None = 0) -> bool:
        """True if no I/O of this stream can touch memory any more.

        Args:
            timeout: seconds to wait for that; 0 only looks, None waits without limit.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        return all(done.settled(seconds_left(end)) for done in list(self.state.completions))

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"<LayerStream of {self.num_layers} layers, hit {list(self.state.hits)}>"
