"""A worker's side: KV comes into the pages layer by layer, ahead of the computation, and leaves them behind it.

Loads of a step are streams of the prefetcher: before a layer computes, its tokens are copied from pool memory into the
pages. Trouble is a shorter prefix: the blocks behind it are reported, and vLLM computes them again. Saves of a step are
copied out of the pages as each layer is computed, and put in the background once the last one was. A save that would
read pages which could not be loaded is given up: what was computed from them is worthless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from kvstore.completion import CancelledError
from kvstore.errors import KVStoreError
from kvstore.keys import Key, keys_of
from kvstore.layout import KVLayout
from kvstore.prefetch import Chunk, ChunkSave, LayerPlan, LayerSave, LayerWriter, LoadedLayer, Prefetcher
from kvstore.record import RecordSpec, kv_spec

from ._arrivals import Arrivals
from ._keys import ContextOf
from ._loads import Awaiting, BetweenSteps, Loading
from ._messages import Announced, ChunkRef, Isolation, Load, Save, Step
from ._mover import Mover, Piece, mover_for
from ._paging import Pages, blocks_covering
from ._settings import PREFILL_TIMEOUT_S

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["WorkerSide"]

logger = logging.getLogger("kvstore.integrations.vllm")

_COMPUTE_S = 5.0  # a save has the store's put_timeout after its step, which is thought to take no longer than this,
_COMPUTE_SHARE = 2.0  # or so many times the longest step so far

Counters = dict[str, float]


class _Saving:
    """One save under way."""

    def __init__(self, save: Save, started: LayerSave) -> None:
        self.save = save
        self.started = started
        self.blocks = frozenset(save.blocks)


class WorkerSide:
    """See the module.

    Args:
        store: an open store.
        context: makes the key context of this rank's shard.
        layout, dtype: of this rank's KV cache.
        pages: of each layer, in the order of the record's segments.
        writes: this rank stores what it computes; of several ranks with the same KV only one does.
        prefill_timeout: how long nothing may come of a prompt that another engine computes. Seconds.
        meta: what records say of themselves, besides their place in the prompt.
    """

    def __init__(
        self,
        store: Store,
        context: ContextOf,
        *,
        layout: KVLayout,
        dtype: torch.dtype,
        pages: Sequence[Pages],
        writes: bool = True,
        prefill_timeout: float = PREFILL_TIMEOUT_S,
        meta: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.store = store
        self._context = context
        self._layout = layout
        self._dtype_name = str(dtype).removeprefix("torch.")
        self._pages = pages
        self._block_size = pages[0].block_size
        self._writes = writes
        self._prefill_timeout = prefill_timeout
        self._meta = meta
        self._prefetcher = Prefetcher(store)
        self._writer = LayerWriter(store)
        self._mover: Mover = mover_for(pages[0].keys.device, layout, dtype)
        self._on_device = pages[0].keys.device.type != "cpu"
        # Loads between steps run in a thread of their own, on a stream of their own.
        self._between_mover = mover_for(pages[0].keys.device, layout, dtype) if self._on_device else self._mover
        self._step = Step()
        self._step_begun = time.monotonic()
        self._longest_step = 0.0
        self._loading: list[Loading] = []  # of this step
        self._savings: list[_Saving] | None = None  # None: not begun in this step
        self._saved_layers: set[int] = set()
        self._open: list[AbstractContextManager[Any]] = []  # layers being copied from a device
        self._held: list[tuple[Any, LoadedLayer]] = []  # layers being copied to a device
        self._failed: set[int] = set()  # blocks, not reported yet
        self._spoiled: set[int] = set()  # blocks that this step could not load
        self._between = BetweenSteps(self._advance, self._ended)
        self._lock = threading.Lock()  # guards what follows, and `_failed`
        self._finished: set[str] = set()
        self.counters: Counters = dict.fromkeys(
            ("loads", "loads_failed", "load_tokens", "load_bytes", "load_seconds", "failed_blocks", "save_chunks",
             "save_dropped", "save_bytes", "wait_seconds", "arrived_chunks", "prefills_lost"), 0.0,
        )  # fmt: skip

    # A step.

    def begin(self, step: Step) -> None:
        """A step's orders have come."""
        self._step = step
        self._step_begun = time.monotonic()
        self._savings = None
        self._saved_layers = set()
        self._spoiled = set(step.spoiled)
        if step.spoiled:
            with self._lock:
                self._failed |= self._spoiled
        if step.announced is not None:
            self._announce(step.announced)

    def start_loads(self) -> None:
        """Everything this step loads is asked for. Returns at once."""
        loads, self._step = self._step.loads, Step(saves=self._step.saves)
        for load in loads:
            loading = self._await(load) if load.awaited else self._start(load)
            if load.asynchronous:
                self._between.add(loading)
            else:
                self._loading.append(loading)

    def wait_for_layer(self, layer: int) -> None:
        """The pages of this layer are as loaded: waits for what is not there yet, at most until the loads' deadline."""
        if not self._loading:
            return
        begin = time.monotonic()
        for loading in self._loading:
            while loading.next_layer <= layer and loading.good:
                self._load_layer(loading, loading.next_layer)
            loading.next_layer = max(loading.next_layer, layer + 1)
            if not loading.good or loading.next_layer == len(self._pages):
                self._close(loading)
            if loading.good < len(loading.load.chunks):
                self._spoiled |= loading.failed_blocks(self._block_size)
        self.counters["wait_seconds"] += time.monotonic() - begin

    def save_layer(self, layer: int) -> None:
        """This layer was computed: its part of what the step saves is copied out."""
        if not self._step.saves or layer in self._saved_layers:
            return
        if self._savings is None:
            self._savings = self._start_saves(self._step.saves)
        self._saved_layers.add(layer)
        for saving in self._savings:
            if not saving.blocks.isdisjoint(self._spoiled):
                saving.started.cancel()
            self._save_layer(saving, layer)

    def finish(self) -> None:
        """The step has ended: what is to be saved has left the pages, and what could not be loaded is known."""
        if self._loading:
            for loading in self._loading:
                if loading.next_layer < len(self._pages):  # the model did not ask for it: it computed without
                    loading.good = 0
                    self._close(loading)
                failed = loading.failed_blocks(self._block_size)
                self._spoiled |= failed
                self._ended(loading, failed)
            self._loading = []
        if self._step.saves:
            for layer in range(len(self._pages)):  # those that the model's hooks left out
                self.save_layer(layer)
        if self._on_device:
            self._mover.finish()
            self._let_go(wait=True)
            for each in self._open:
                each.__exit__(None, None, None)
            self._open = []
        for saving in self._savings or ():
            saving.started.completion.add_done_callback(self._count_save)
        self._step, self._savings = Step(), None
        self._longest_step = max(self._longest_step, time.monotonic() - self._step_begun)

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous load has ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def drop(self, request_ids: Collection[str]) -> None:
        """These requests have ended: what of them still waits for another engine does not any more."""
        self._between.drop(request_ids)

    def take_failed(self) -> set[int]:
        """Blocks that could not be loaded, as far as they were not told of before."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Loads are given up; puts go on. The store stays open."""
        self._between.close()
        self._prefetcher.close()
        self._writer.close()
        self._let_go(wait=True)

    def stats(self) -> dict[str, Any]:
        """Of the prefetcher and the writer."""
        return {"prefetch": self._prefetcher.stats(), "writer": self._writer.stats()}

    # Loading.

    def _plan(self, isolation: Isolation, chunks: Sequence[ChunkRef], deadline: float | None) -> LayerPlan:
        keys = keys_of([chunk.hash for chunk in chunks], context=self._context(isolation))
        prefix = [Chunk(key, self._spec(chunk.tokens)) for key, chunk in zip(keys, chunks, strict=True)]
        return LayerPlan([prefix], deadline)

    def _announce(self, queue: Sequence[Announced]) -> None:
        try:
            self._prefetcher.announce([self._plan(each.isolation, each.chunks, None) for each in queue])
        except KVStoreError as error:
            logger.warning("nothing is loaded ahead: %s", error)

    def _start(self, load: Load) -> Loading:
        deadline = time.monotonic() + self.store.config.blocking_timeout
        try:
            return Loading(load, self._prefetcher.start(self._plan(load.isolation, load.chunks, deadline)))
        except KVStoreError as error:
            logger.warning("request %s is computed, not loaded: %s", load.request, error)
            return Loading(load, None)

    def _await(self, load: Load) -> Loading:
        keys = keys_of([chunk.hash for chunk in load.chunks], context=self._context(load.isolation))
        return Awaiting(load, Arrivals(self.store, keys, patience=self._prefill_timeout))

    def _load_layer(self, loading: Loading, layer: int) -> None:
        """Wait for a layer, and copy it into the pages."""
        load, stream = loading.load, loading.stream
        assert stream is not None
        try:
            with stream.wait(layer) as loaded:
                views = loaded.views()
                loading.good = min(loading.good, len(views))
                pieces = []
                for chunk, segment in zip(load.chunks, views, strict=False):
                    begin, end = max(chunk.begin, load.begin), min(chunk.end, load.end)
                    pieces.append(Piece(segment, chunk.tokens, begin - chunk.begin, load.blocks, begin, end))
                    loading.nbytes += len(segment)
                mover = self._between_mover if load.asynchronous else self._mover
                event = mover.load(self._pages[layer], pieces) if pieces else None
                if event is not None and load.asynchronous:
                    event.synchronize()
                elif event is not None:
                    loaded.retain()
                    self._held.append((event, loaded))
        except (KVStoreError, CancelledError, TimeoutError) as error:
            logger.warning("request %s is computed, not loaded: %s", load.request, error)
            loading.good = 0
        loading.next_layer = layer + 1
        if not load.asynchronous:
            self._let_go()

    def _close(self, loading: Loading) -> None:
        stream, loading.stream = loading.stream, None
        if stream is not None:
            loading.good = min(loading.good, stream.hit_prefix)
            stream.cancel()

    def _let_go(self, wait: bool = False) -> None:
        """Pool memory whose copy to the device has ended."""
        while self._held and (wait or self._held[0][0].query()):
            event, loaded = self._held.pop(0)
            event.synchronize()
            loaded.release()

    def _advance(self, loading: Loading) -> bool:
        """An asynchronous load: copy what has come, without waiting. True once it has ended."""
        if isinstance(loading, Awaiting):
            return self._advance_awaiting(loading)
        while loading.good and loading.next_layer < len(self._pages):
            stream = loading.stream
            if stream is None or not stream.ready(loading.next_layer):
                return False
            self._load_layer(loading, loading.next_layer)
        self._close(loading)
        self._between_mover.finish()
        return True

    def _advance_awaiting(self, loading: Awaiting) -> bool:
        while True:
            part = loading.part
            if part is None:
                come = None if loading.dropped else loading.next_part()
                if come is None:
                    over = loading.dropped or loading.arrivals.over
                    if over:
                        loading.arrivals.close()
                    return over
                part = loading.part = self._start(come)
            if not self._advance(part):
                return False
            loading.part = None
            loading.good += part.good
            loading.nbytes += part.nbytes
            with self._lock:
                self.counters["arrived_chunks"] += part.good
            if part.good < len(part.load.chunks):  # it was there, and could not be had
                loading.arrivals.close()
                return True

    def _ended(self, loading: Loading, failed: set[int] | None = None) -> None:
        load = loading.load
        if failed is None:
            failed = loading.failed_blocks(self._block_size)
        lost = bool(failed) and load.awaited
        if lost:
            logger.warning(
                "request %s: %d of %d chunks came from the engine that computes its prefill; the others are computed "
                "here%s", load.request, loading.good, len(load.chunks),
                "" if loading.good else " (are model, weights, dtype, chunk_size and namespace the same there?)",
            )  # fmt: skip
        elif failed:
            logger.info("request %s: %d of %d blocks are computed, not loaded", load.request, len(failed),
                        len(blocks_covering(load.begin, load.end, self._block_size)))  # fmt: skip
        with self._lock:
            self._failed |= failed
            if load.asynchronous:
                self._finished.add(load.request)
            counters = self.counters
            counters["loads"] += 1
            counters["loads_failed"] += bool(failed)
            counters["prefills_lost"] += lost
            counters["failed_blocks"] += len(failed)
            counters["load_bytes"] += loading.nbytes
            counters["load_seconds"] += time.monotonic() - loading.started
            good = load.chunks[loading.good - 1].end if loading.good else load.begin
            counters["load_tokens"] += max(0, min(good, load.end) - load.begin)

    # Saving.

    def _start_saves(self, saves: Sequence[Save]) -> list[_Saving]:
        started: list[_Saving] = []
        if not self._writes:
            return started
        step = max(_COMPUTE_S, _COMPUTE_SHARE * self._longest_step)
        deadline = time.monotonic() + self.store.config.put_timeout + step
        for save in saves:
            hashes = [chunk.hash for chunk in save.chunks]
            keys = keys_of(
                hashes if save.parent is None else [save.parent, *hashes], context=self._context(save.isolation)
            )
            parents: list[Key | None] = [None, *keys[:-1]] if save.parent is None else list(keys[:-1])
            chunks = [
                ChunkSave(key, self._spec(chunk.tokens), self._described(chunk), parent)
                for key, chunk, parent in zip(keys[-len(hashes) :], save.chunks, parents, strict=True)
            ]
            try:
                started.append(_Saving(save, self._writer.start(chunks, deadline=deadline)))
            except KVStoreError as error:
                logger.warning("request %s is not saved: %s", save.request, error)
        return started

    def _save_layer(self, saving: _Saving, layer: int) -> None:
        save = saving.save
        copying = saving.started.layer(layer)
        segments = copying.__enter__()
        try:
            pieces = [
                Piece(segment, chunk.tokens, 0, save.blocks, chunk.begin, chunk.end)
                for chunk, segment in zip(save.chunks, segments, strict=True)
                if segment is not None
            ]
            if pieces:
                self._mover.save(self._pages[layer], pieces)
        except BaseException as error:
            copying.__exit__(type(error), error, error.__traceback__)
            raise
        if self._on_device:
            self._open.append(copying)
        else:
            copying.__exit__(None, None, None)

    def _count_save(self, done: Any) -> None:
        try:
            report = done.result(0)
        except (KVStoreError, CancelledError):
            return
        with self._lock:
            self.counters["save_chunks"] += report.stored
            self.counters["save_bytes"] += report.nbytes
            self.counters["save_dropped"] += report.dropped + report.failed
        if report.error is not None:
            logger.info("%d chunks are not saved: %s", report.dropped + report.failed, report.error)

    # Records.

    def _spec(self, tokens: int) -> RecordSpec:
        return kv_spec(self._layout, self._dtype_name, tokens)

    def _described(self, chunk: ChunkRef) -> dict[str, Any]:
        return {
            **self._meta(), "dtype": self._dtype_name, "tokens": [chunk.begin, chunk.end],
            "layers": self._layout.num_layers, "kv_heads": self._layout.num_kv_heads,
            "head_dim": self._layout.head_dim, "rope": "applied", "rotary": None,
        }  # fmt: skip
