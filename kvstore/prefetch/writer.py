"""`LayerWriter`: KV is saved layer by layer, as it is produced, through a bounded write buffer.

The engine copies a layer into memory that it is given, says so, and goes on. Once the last layer of a chunk has come
its record is put into the store, in the background. The engine is never blocked longer than it allows: what finds no
room is dropped, and said to be.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.backend import EXISTS, Outcome, Status
from kvstore.buffers import Buffer
from kvstore.completion import CancelledError, Completion
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PoolExhausted, TransientError
from kvstore.keys import Key
from kvstore.metrics import renew_after_fork
from kvstore.record import RecordSpec
from kvstore.scheduler import Priority, seconds_left
from kvstore.targets import Item

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["ChunkSave", "LayerSave", "LayerWriter", "SaveReport"]

_POLL_S = 0.01  # between looks whether late I/O has let go of memory; there is no notice of that


class ChunkSave(NamedTuple):
    """One record to save; `meta` and `parent` as in `kvstore.Item`."""

    key: Key
    spec: RecordSpec
    meta: Mapping[str, Any] = {}
    parent: Key | None = None


class SaveReport(NamedTuple):
    """What became of the chunks of one save.

    Attributes:
        stored: written now.
        existing: were there already, or came by another writer.
        dropped: found no room in the write buffer or the store's queue, or were behind one that did not; or the
            save was given up before their last layer came.
        failed: could not be written.
        nbytes: bytes written.
        error: why the first of `dropped` and `failed` is not stored, or None.

    With `on_error="raise"` the store tells of the first error only, and it counts for all records that were put.
    """

    stored: int
    existing: int
    dropped: int
    failed: int
    nbytes: int
    error: KVStoreError | None = None


class LayerWriter:
    """The write buffer of a node, shared by its engine threads.

    Args:
        store: an open store. It is not closed.
        buffer_bytes: bound on the pool memory of all saves together; None: a quarter of the store's
            `buffer_pool_bytes`. A record that is larger runs alone.

    Raises:
        ConfigError: not a store, or a size that makes no sense.
    """

    def __init__(self, store: Store, *, buffer_bytes: int | None = None) -> None:
        if not hasattr(store, "submit_put"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        quarter = max(store.pool.nbytes // 4, 1)
        nbytes = quarter if buffer_bytes is None else buffer_bytes
        if not 1 <= nbytes <= store.pool.nbytes:
            raise ConfigError(f"buffer_bytes={nbytes} must be between 1 and the store's {store.pool.nbytes}")
        self.store = store
        self.buffer_bytes = nbytes
        self._less = threading.Condition()
        self._used = 0
        self._peak = 0
        self._late: list[tuple[Completion[Any], int]] = []
        self._left_behind: deque[_Save] = deque()  # saves whose owner let go of them
        self._saves: weakref.WeakSet[LayerSave] = weakref.WeakSet()
        self._closed = False
        renew_after_fork(self)

    def start(self, chunks: Sequence[ChunkSave], *, deadline: float | None = None, timeout: float = 0.0) -> LayerSave:
        """Begin to save the chunks of one prompt, given in the order of the prefix. Chunks that the store has already
        are left out, as far as it is known in time; memory is taken for the others. When there is no room for a
        chunk, it and those behind it are dropped: without its head a tail is worthless.

        Args:
            deadline: absolute monotonic seconds for all of it; None: the store's `put_timeout` from now on.
            timeout: how long this call may wait, for the lookup and for room. Seconds; 0 does not wait.

        Raises:
            ConfigError: records of different numbers of layers.
            ClosedError: the writer or its store is closed.
        """
        now = time.monotonic()
        if len({len(chunk.spec.sizes) for chunk in chunks}) > 1:
            raise ConfigError("the records of one save have different numbers of layers")
        self._check_open()
        until = now + self.store.config.put_timeout if deadline is None else deadline
        end = min(now + timeout, until)
        existing = self._known([chunk.key for chunk in chunks], end) if chunks and end > now else 0
        save = _Save(self, list(chunks), until)
        handle = LayerSave(save)  # from here on it gives back what it has got, whatever happens
        for index in range(existing):
            save.outcomes[index] = EXISTS
        for index in range(existing, len(chunks)):
            try:
                save.buffers[index] = self._take(chunks[index].spec.raw_bytes, end)
            except KVStoreError as error:
                outcome = _failed(error)
                for behind in range(index, len(chunks)):
                    save.outcomes[behind] = outcome
                    save.dropped.add(behind)
                break
        save.settle_if_over()
        with self._less:
            self._saves.add(handle)
            if not self._closed:
                return handle
        handle.cancel()  # `close` came in between
        return handle

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the layer writer is closed")

    def _known(self, keys: Sequence[Key], end: float) -> int:
        """How many leading chunks the store has, as far as that is known in time."""
        return self.store.submit_lookup(keys, deadline=end).result()

    def _take(self, nbytes: int, end: float) -> Buffer:
        """Memory for one record, within the bound."""
        self._bury()
        with self._less:
            while self._used and self._used + nbytes > self.buffer_bytes:
                self._reap()
                if not self._used or self._used + nbytes <= self.buffer_bytes:
                    break
                left = seconds_left(end)
                if not left:
                    raise TransientError(
                        f"dropped: the write buffer holds {self._used} of {self.buffer_bytes} bytes", operation="put"
                    )
                self._less.wait(min(left, _POLL_S) if self._late else left)
            self._used += nbytes
            self._peak = max(self._peak, self._used)
        try:
            return self.store.pool.acquire(nbytes, seconds_left(end))
        except BaseException:
            self._free(nbytes)
            raise

    def _bury(self) -> None:
        """Give back the memory of saves whose owner let go of them."""
        with contextlib.suppress(IndexError):
            while True:
                self._left_behind.popleft().abandon()

    def _reap(self) -> None:
        """Memory that late I/O has let go of is free again. Called with the lock held."""
        if self._late:
            still = [entry for entry in self._late if not entry[0].settled(0)]
            self._used -= sum(nbytes for _, nbytes in self._late) - sum(nbytes for _, nbytes in still)
            self._late = still

    def _free(self, nbytes: int, completion: Completion[Any] | None = None) -> None:
        with self._less:
            if completion is None or completion.settled(0):
                self._used -= nbytes
            else:
                self._late.append((completion, nbytes))
            self._less.notify_all()

    def stats(self) -> dict[str, int]:
        """Bound and bytes in use (now, and at most so far), and saves whose memory late I/O still holds."""
        self._bury()
        with self._less:
            self._reap()
            return {
                "buffer_bytes": self.buffer_bytes, "used_bytes": self._used, "peak_bytes": self._peak,
                "late": len(self._late),
            }  # fmt: skip

    def close(self) -> None:
        """No more saves; those that are not complete are given up, those that are go on. May be called twice."""
        with self._less:
            self._closed = True
            saves = list(self._saves)
        for save in saves:
            save.cancel()

    def _after_fork(self) -> None:
        """The child has neither the store's threads nor its memory, and maybe locks that nobody frees."""
        self._less, self._closed = threading.Condition(), True
        self._used, self._late = 0, []
        self._left_behind.clear()
        for save in list(self._saves):
            save._save.lock, save._save.buffers = threading.Lock(), {}

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Save:
    """The state of one save; `LayerSave` is what its owner holds of it."""

    def __init__(self, writer: LayerWriter, chunks: Sequence[ChunkSave], deadline: float) -> None:
        self.writer = writer
        self.chunks = chunks
        self.deadline = deadline
        self.num_layers = len(chunks[0].spec.sizes) if chunks else 0
        self.lock = threading.Lock()
        self.buffers: dict[int, Buffer] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.dropped: set[int] = set()
        self.layers: set[int] = set()  # that were begun
        self.copied = 0
        self.completion: Completion[SaveReport] = Completion()

    @contextlib.contextmanager
    def layer(self, layer: int) -> Iterator[list[memoryview | None]]:
        """See `LayerSave.layer`."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"there is no layer {layer}; the records have {self.num_layers}")
        with self.lock:
            if layer in self.layers:
                raise ConfigError(f"layer {layer} was saved before")
            self.layers.add(layer)
            # A cancel from elsewhere must not hand the memory to others while it is written to.
            kept = {index: buffer.retain() for index, buffer in self.buffers.items()}
        try:
            found: list[memoryview | None] = [None] * len(self.chunks)
            for index, buffer in kept.items():
                sizes = self.chunks[index].spec.sizes
                begin = sum(sizes[:layer])
                found[index] = buffer.view[begin : begin + sizes[layer]]
            yield found
        except BaseException:  # it was not copied: a record without it must never be put
            self.abandon()
            raise
        finally:
            for buffer in kept.values():
                buffer.release()
        self._commit()

    def _commit(self) -> None:
        """One more layer was copied."""
        with self.lock:
            self.copied += 1
            if self.copied < self.num_layers:
                return
            buffers, self.buffers = self.buffers, {}
        if buffers:
            self._put(buffers)

    def _put(self, buffers: dict[int, Buffer]) -> None:
        """All layers have come."""
        items = []
        for index, buffer in buffers.items():
            key, spec, meta, parent = self.chunks[index]
            items.append(Item(key, spec.split(buffer.view), spec, meta, parent, buffer))
        store, nbytes = self.writer.store, sum(buffer.nbytes for buffer in buffers.values())
        try:
            done = store.submit_put(items, priority=Priority.BACKGROUND, deadline=self.deadline)
        except KVStoreError as error:
            self._put_done(buffers, [_failed(error)] * len(buffers))
            self.writer._free(nbytes)
            return
        finally:
            for buffer in buffers.values():
                buffer.release()  # the store has pinned them

        def ended(done: Completion[Sequence[Outcome]]) -> None:
            try:
                outcomes = done.result(0)
            except CancelledError:
                outcomes = [Outcome.failed(TransientError("cancelled", operation="put"))] * len(buffers)
            except KVStoreError as error:  # on_error="raise"
                outcomes = [_failed(error)] * len(buffers)
            self.writer._free(nbytes, done)
            self._put_done(buffers, outcomes)

        done.add_done_callback(ended)

    def _put_done(self, indices: Mapping[int, Any], outcomes: Sequence[Outcome]) -> None:
        with self.lock:
            self.outcomes.update(zip(indices, outcomes, strict=True))
        self.settle_if_over()

    def abandon(self) -> None:
        """Nothing more comes: what is not complete is dropped."""
        gone = Outcome.failed(TransientError("dropped: not all of its layers came", operation="put"))
        with self.lock:
            buffers, self.buffers = self.buffers, {}
            self.outcomes.update(dict.fromkeys(buffers, gone))
            self.dropped.update(buffers)
        for buffer in buffers.values():
            buffer.release()
        if buffers:
            self.writer._free(sum(buffer.nbytes for buffer in buffers.values()))
        self.settle_if_over()

    def settle_if_over(self) -> None:
        with self.lock:
            if len(self.outcomes) < len(self.chunks):
                return
            outcomes = [self.outcomes[index] for index in range(len(self.chunks))]
            dropped = self.dropped | {n for n, each in enumerate(outcomes) if _refused(each)}
        bad = [n for n, outcome in enumerate(outcomes) if outcome.status is Status.ERROR]
        self.completion.set_result(
            SaveReport(
                sum(outcome.status is Status.OK for outcome in outcomes),
                sum(outcome.status is Status.EXISTS for outcome in outcomes),
                len(dropped),
                len(set(bad) - dropped),
                sum(outcome.nbytes for outcome in outcomes if outcome.status is Status.OK),
                outcomes[bad[0]].error if bad else None,
            )
        )


class LayerSave:
    """A save under way. Made by `LayerWriter.start`.

    Layers may come in any order, each once; the last one starts the put. One that is dropped before that gives its
    memory back.

        save = writer.start(chunks, timeout=0.01)
        for layer in range(layers):
            ...                                            # compute it
            with save.layer(layer) as segments:            # one per chunk; None: is stored already, or was dropped
                ...                                        # copy K and V of each chunk into its segment
        report = save.completion.result()                  # when somebody wants to know
    """

    def __init__(self, save: _Save) -> None:
        self._save = save
        self._finalizer = weakref.finalize(self, _dropped, save)
        self._finalizer.atexit = False

    @property
    def num_layers(self) -> int:
        return self._save.num_layers

    @property
    def completion(self) -> Completion[SaveReport]:
        """Done once it is known what became of every chunk."""
        return self._save.completion

    @property
    def wanted(self) -> list[bool]:
        """For each chunk, whether its layers are to be copied: it is not stored yet, and there was room for it."""
        with self._save.lock:
            return [index in self._save.buffers for index in range(len(self._save.chunks))]

    def layer(self, layer: int) -> contextlib.AbstractContextManager[list[memoryview | None]]:
        """A context in which one layer is copied: the segment of each chunk (K, then V, token-major), or None for a
        chunk that is not wanted. At its end the layer counts as copied; after the last one the records are put. Does
        not block. If the block raises, the save is given up. Entering raises `ConfigError` if there is no such layer,
        or it was begun before."""
        return self._save.layer(layer)

    def cancel(self) -> None:
        """Give up what is not complete; a put under way goes on. May be called any number of times."""
        self._save.abandon()

    def __enter__(self) -> LayerSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def _dropped(save: _Save) -> None:
    """Its owner has let go of it, maybe in the middle of a garbage collection, where no lock may be waited for."""
    if save.buffers:
        save.writer._left_behind.append(save)
        with contextlib.suppress(RuntimeError):  # no thread can be had: whoever needs memory next sees to it
            threading.Thread(target=save.writer._bury, name="kvstore-save-dropped", daemon=True).start()


def _failed(error: KVStoreError) -> Outcome:
    """Without its traceback, whose frames know the save: it would keep itself, and its memory, for ever."""
    return Outcome.failed(error.with_traceback(None))


def _refused(outcome: Outcome) -> bool:
    """Dropped by the store's own write queue, as `submit_put` says it."""
    error = outcome.error
    return isinstance(error, PoolExhausted) or (
        isinstance(error, TransientError) and error.backend is None and error.message.startswith("dropped")
    )
