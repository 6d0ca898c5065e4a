"""The store: one interface over all backends. Sync-first, batched, completion-shaped.

    with kvstore.open_store("file:///mnt/kv") as store:
        done = store.submit_put(items, deadline=time.monotonic() + 5)
        ...
        hit = store.submit_lookup(keys, deadline=...).result()

A blocking call is `submit_*().result()`, an awaited one `await submit_*()`. Every call ends by its deadline. Trouble
with a record is an `Outcome`, never an exception (unless `on_error="raise"`): an engine treats everything but OK as a
miss. For those who have one prompt and want no machinery there are `put_many`, `get_many`, `hit_prefix`, `delete_many`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .backend import MISS, Backend, Capability, KeyInfo, Outcome, Read, Status
from .buffers import Buffer, BufferPool
from .codec import codec_by_name
from .completion import Completion
from .config import Config, load_config
from .errors import ClosedError, ConfigError, CorruptRecord, KVStoreError
from .keys import Key, KeyContext, opaque_key
from .layout import KVLayout
from .metrics import Metrics
from .placement import Placement
from .plan import group
from .reads import Reader
from .record import KIND_OPAQUE, RAW, Header, checksum, opaque_spec, parse_header
from .registry import open_backend, split_options
from .scheduler import Batch, LaneGroup, Priority, Timer, deadline_passed
from .targets import Counters, Item, Target, Want, attempt, flat_bytes
from .writes import Writer

__all__ = ["Item", "Priority", "Store", "Want", "open_store"]

logger = logging.getLogger("kvstore.store")

Name = str | bytes
"""How an opaque record is named: text or bytes (hashed with the namespace), or a `Key` as it is."""

_HEAD_BYTES = 4096
_MAX_EXPANSION = 1 << 36  # get_many without `into` allocates what a header claims, up to this many bytes


class Store:
    """KV cache records over one or several backends. Open one with `open_store`.

    Args:
        config: see `load_config`.
        backends: use these instead of opening `config.remote_url` (the store closes them); mostly for tests.

    Raises:
        ConfigError: the configuration makes no sense, or a backend cannot be opened.
    """

    def __init__(self, config: Config, *, backends: Sequence[Backend] | None = None) -> None:
        self.config = config
        self.metrics = Metrics()
        codec = codec_by_name(config.remote_serde)
        with contextlib.ExitStack() as undo:
            self._targets, self._placement = self._open_targets(backends, undo)
            undo.pop_all()
        self.pool = BufferPool(config.buffer_pool_bytes)
        for target in self._targets:
            if target.capabilities & Capability.REGISTERED_MEMORY:
                for slab in self.pool.slabs:
                    target.backend.register(slab)
        self._counters = Counters()
        raw = config.remote_serde == "raw"
        self._reader = Reader(self._targets, self._placement, self.pool, self._counters, raw=raw)
        self._writer = Writer(
            self._targets,
            self._placement,
            self._counters,
            codec=None if raw else codec,
            queue_bytes=config.write_queue_bytes,
        )
        self._timer = Timer()
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        ref = weakref.ref(self)
        self._atexit = lambda: _close_at_exit(ref)
        atexit.register(self._atexit)

    def _open_targets(
        self, backends: Sequence[Backend] | None, undo: contextlib.ExitStack
    ) -> tuple[list[Target], Placement]:
        names: list[str] = []
        weights: list[float] = []
        opened: list[Backend] = []
        settings: list[Mapping[str, Any]] = []  # of the wrappers
        if backends is not None:
            opened = [*backends]
            names, weights = [backend.name for backend in opened], [1.0] * len(opened)
            settings = [{}] * len(opened)
            for backend in opened:
                undo.callback(backend.close)
        else:
            from .wrappers import wrap

            for url in self.config.remote_url:
                overrides = self.config.backend_overrides(url)
                backend = open_backend(url, **overrides)
                undo.callback(backend.close)
                split = split_options(url, type(backend), overrides)
                names.append(self.config.backend_name(url))
                weights.append(split.placement["weight"])
                settings.append(split.wrapper)
                opened.append(wrap(backend, split.wrapper, metrics=self.metrics))
        placement = Placement(names, weights, self.config.replicas)
        if self.config.replicas == 1 and any(values.get("hedge") for values in settings):
            raise ConfigError("option 'hedge' needs another replica to read from; set replicas to 2 or more")
        if self.config.replicas > 1:
            opened = self._hedged(opened, settings, placement)
        targets = []
        for index, (name, backend) in enumerate(zip(names, opened, strict=True)):
            lanes = LaneGroup(name, backend.limits.lanes)
            targets.append(Target(index, name, backend, lanes, backend.limits, backend.capabilities))
        return targets, placement

    def _hedged(self, backends: Sequence[Backend], settings: Sequence[Mapping[str, Any]], placement: Placement) -> Any:
        """The backends, those with the option `hedge` with a second read to the next replica of each key."""
        from .replicas import NextReplica
        from .wrappers import hedge

        return [
            hedge(backend, NextReplica(index, backends, placement), values, metrics=self.metrics)
            for index, (backend, values) in enumerate(zip(backends, settings, strict=True))
        ]

    # The batched interface.

    def submit_lookup(self, keys: Sequence[Key], *, deadline: float | None = None) -> Completion[int]:
        """The hit prefix: how many leading keys are stored somewhere. A hole ends it; what is unknown by the
        deadline, or in trouble, counts as not there. It is a promise about names, not about bytes: only a get tells.

        Args:
            deadline: absolute `time.monotonic()` seconds; None means now + `lookup_timeout`.
        """

        def call(target: Target, some: Sequence[Key], until: float) -> Sequence[Any]:
            return target.backend.stat(some, deadline=until)

        batch = self._batch(len(keys), deadline, self.config.lookup_timeout, _prefix, "lookup")
        self._fan_out(batch, keys, call, "lookup", first_hit=True)
        return batch.completion

    def submit_get(
        self, wants: Sequence[Want], *, priority: Priority = Priority.DEMAND, deadline: float | None = None
    ) -> Completion[Sequence[Outcome]]:
        """Read and verify records. Outcomes are in the order of `wants`; OK means that the destination holds exactly
        the bytes that were stored. On anything else its content is undefined.

        Bytes are copied once, from the backend into `dst`, if the record is stored raw; encoded ones are decoded from
        a staging buffer of the pool. Until the completion is settled, `dst` belongs to the store.

        Args:
            deadline: absolute `time.monotonic()` seconds; None means now + `blocking_timeout`.

        Raises:
            ConfigError: a destination is not writable, not contiguous, or not as long as the spec says.
            ClosedError: the store is closed.
        """
        prepared = [_prepare(want) for want in wants]
        batch = self._batch(len(wants), deadline, self.config.blocking_timeout, self._outcomes, "get")
        self._reader.submit(batch, prepared, priority)
        return batch.completion

    def submit_put(
        self, items: Sequence[Item], *, priority: Priority = Priority.BACKGROUND, deadline: float | None = None
    ) -> Completion[Sequence[Outcome]]:
        """Store records, each atomically and write-once. OK: stored now; EXISTS: was there; ERROR: not stored.

        The segments are gathered, not copied: until the completion is settled they must not change (pool buffers
        given as `hold` are pinned, and may be released at once). What does not fit into the write queue is dropped
        with an ERROR at once.

        Args:
            deadline: absolute `time.monotonic()` seconds; None means now + `put_timeout`.

        Raises:
            ConfigError: segments are not contiguous, or not as long as the spec says.
            ClosedError: the store is closed.
        """
        prepared = [(item, _segments(item)) for item in items]
        batch = self._batch(len(items), deadline, self.config.put_timeout, self._outcomes, "put")
        self._writer.submit(batch, prepared, priority)
        return batch.completion

    def submit_lease(
        self, keys: Sequence[Key], *, deadline: float | None = None
    ) -> Completion[Sequence[Buffer | None]]:
        """Read-only leases on whole records that already lie in host memory, without a copy; None for all others.

        The view begins with the record's header: `kvstore.record.parse_header` tells where its segments are. Header
        and segments are verified. Encoded records are not leased. The caller releases each buffer.
        """
        batch = self._batch(len(keys), deadline, self.config.blocking_timeout, _leases, "lease")
        self._fan_out(batch, keys, self._lease, "lease", first_hit=True)
        return batch.completion

    def submit_delete(self, keys: Sequence[Key], *, deadline: float | None = None) -> Completion[Sequence[Outcome]]:
        """Remove records from every replica: OK if any had it, MISS if none."""

        def call(target: Target, some: Sequence[Key], until: float) -> Sequence[Any]:
            return target.backend.delete(some, deadline=until)

        batch = self._batch(len(keys), deadline, self.config.put_timeout, self._outcomes, "delete")
        self._fan_out(batch, keys, call, "delete", first_hit=False)
        return batch.completion

    def submit_heads(
        self, keys: Sequence[Key], *, deadline: float | None = None
    ) -> Completion[Sequence[Header | None]]:
        """The verified headers (shape, codec, meta) of records; None for those that are missing or damaged."""
        batch = self._batch(len(keys), deadline, self.config.blocking_timeout, _headers, "get")
        self._fan_out(batch, keys, self._heads, "get", first_hit=True)
        return batch.completion

    def list(self, *, deadline: float | None = None) -> Iterator[Sequence[KeyInfo]]:
        """Pages of stored records over all backends; one with several replicas appears once per replica.

        Raises:
            PermanentError: a backend cannot list.
        """
        self._check_open()
        until = math.inf if deadline is None else deadline
        for target in self._targets:
            yield from target.backend.list(deadline=until)

    # For one prompt and no machinery.

    def put_many(
        self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *, timeout: float | None = None
    ) -> Sequence[Outcome]:
        """Store opaque records by name and wait. Values are bytes-like. More than the write queue holds goes in waves.

        Args:
            items: name → bytes-like, or pairs. A name is text or bytes (kept apart by namespace), or a `Key`.
            timeout: seconds for each wave; None means `put_timeout`.
        """
        pairs = list(items.items()) if isinstance(items, Mapping) else list(items)
        prepared = []
        for name, value in pairs:
            flat = flat_bytes(value, writable=False)
            spec = opaque_spec(len(flat))
            prepared.append(Item(self._key(name), spec.split(flat), spec))
        outcomes: Any = []
        wave: Any = []
        size = 0
        for item in prepared:
            if wave and size + item.spec.nbytes > self.config.write_queue_bytes:
                outcomes += self._put_wave(wave, timeout)
                wave, size = [], 0
            wave.append(item)
            size += item.spec.nbytes
        if wave:
            outcomes += self._put_wave(wave, timeout)
        stored: Sequence[Outcome] = outcomes
        return stored

    def _put_wave(self, items: Sequence[Item], timeout: float | None) -> Sequence[Outcome]:
        deadline = time.monotonic() + (self.config.put_timeout if timeout is None else timeout)
        done = self.submit_put(items, priority=Priority.DEMAND, deadline=deadline)
        outcomes: Sequence[Outcome] = done.result()
        done.settled(None)  # the values are the caller's own memory
        return outcomes

    def get_many(
        self, names: Sequence[Any], into: Sequence[Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[Any]:
        """Read opaque records by name and wait.

        Args:
            into: one writable buffer for each name, exactly as long as the record. None allocates.
            timeout: seconds; None means `blocking_timeout`.

        Returns:
            With `into`: for each name the number of bytes, or None for a miss. Else a bytearray, or None for a miss.
        """
        deadline = time.monotonic() + (self.config.blocking_timeout if timeout is None else timeout)
        keys = [self._key(name) for name in names]
        if into is None:
            heads = self.submit_heads(keys, deadline=deadline).result()
            buffers = [
                bytearray(head.raw_bytes)
                if head is not None and head.kind == KIND_OPAQUE and head.raw_bytes <= _MAX_EXPANSION
                else None
                for head in heads
            ]
        else:
            if len(into) != len(names):
                raise ConfigError(f"{len(names)} names, but {len(into)} buffers to read into")
            buffers = list(into)
        wanted = [index for index, buffer in enumerate(buffers) if buffer is not None]
        wants = []
        for index in wanted:
            flat = flat_bytes(buffers[index], writable=True)
            wants.append(Want(keys[index], flat, opaque_spec(len(flat))))
        done = self.submit_get(wants, deadline=deadline)
        results: Any = [None] * len(names)
        for index, outcome in zip(wanted, done.result(), strict=True):
            if outcome.status is Status.OK:
                results[index] = buffers[index] if into is None else outcome.nbytes
        if into is not None:
            done.settled(None)  # the buffers are the caller's own memory
        found: Sequence[Any] = results
        return found

    def hit_prefix(self, names: Sequence[Any], *, timeout: float | None = None) -> int:
        """How many leading names are stored. Seconds; None means `lookup_timeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return self.submit_lookup([self._key(name) for name in names], deadline=deadline).result()

    def delete_many(self, names: Sequence[Any], *, timeout: float | None = None) -> Sequence[Outcome]:
        """Remove records by name and wait: OK, or MISS if there was none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return self.submit_delete([self._key(name) for name in names], deadline=deadline).result()

    def key_context(self, *, model: str, layout: KVLayout, dtype: str, **fields: Any) -> KeyContext:
        """A `KeyContext` with the namespace and the codec of this store's configuration."""
        own = {"namespace": self.config.namespace, "codec": self.config.remote_serde}
        return KeyContext(model=model, layout=layout, dtype=dtype, **{**own, **fields})

    # Life.

    def stats(self) -> dict[str, Any]:
        """Counters, the pool, the lanes of each backend, and the metrics of the wrappers."""
        return {
            **self._counters.values,
            "write_queue_bytes": self._writer.queued_bytes,
            "pool": self.pool.stats()._asdict(),
            "backends": {target.name: target.lanes.stats() for target in self._targets},
            "metrics": self.metrics.snapshot(),
        }

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the store. Always returns; may be called twice; later calls of other methods raise `ClosedError`.

        Args:
            drain: first finish the puts under way. Otherwise those not begun end with `ClosedError`.
            timeout: seconds for all of it; None means `close_timeout`. What a hung backend still holds then is left
                to its daemon threads.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._atexit)
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        end = time.monotonic() + (self.config.close_timeout if timeout is None else timeout)
        drained = drain and self._writer.drain(end)
        error = ClosedError("the store was closed before this was done")
        if not drained:
            self._fail_open(error)
        for target in self._targets:
            if not target.lanes.close(drop=not drained, timeout=max(0.0, end - time.monotonic())):
                logger.warning("backend %s still has I/O under way; its threads end with it", target.name)
        self._fail_open(error)
        for target in self._targets:
            target.backend.close()
        self._timer.close()
        self.pool.close()

    def _fail_open(self, error: KVStoreError) -> None:
        for batch in list(self._batches):
            batch.fail(error)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(target.name for target in self._targets)
        return f"<Store {names}{' (closed)' if self._closed else ''}>"

    # Plumbing.

    def _key(self, name: object) -> Key:
        if isinstance(name, Key):
            return name
        if isinstance(name, str | bytes):
            return opaque_key(name, namespace=self.config.namespace)
        raise ConfigError(f"a record is named by text, bytes or a Key, not by {type(name).__name__}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
        if os.getpid() != self._pid:
            raise ClosedError("this store was opened before fork(); open another one in the child")

    def _batch(
        self, size: int, deadline: float | None, default: float, finish: Callable[[Sequence[Any]], Any], operation: str
    ) -> Batch:
        self._check_open()
        batch = Batch(size, time.monotonic() + default if deadline is None else deadline, finish)
        self._batches.add(batch)
        self._timer.watch(batch, lambda: deadline_passed(None, operation))
        return batch

    def _outcomes(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """The result of a batch; with `on_error="raise"` its first error is raised instead."""
        if self.config.on_error == "raise":
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
        return outcomes

    def _fan_out(
        self,
        batch: Batch,
        keys: Sequence[Key],
        call: Callable[[Target, Sequence[Key], float], Sequence[Any]],
        operation: str,
        *,
        first_hit: bool,
    ) -> None:
        """Ask the replicas of each key, one after the other: until one has it, or all of them."""
        orders = [self._placement.order(key) for key in keys]
        best: Any = [MISS] * len(keys)

        def ask(indices: Sequence[int], number: int) -> None:
            by_target: dict[int, Any] = {}
            for index in indices:
                by_target.setdefault(orders[index][number], []).append(index)
            for place, some in by_target.items():
                target = self._targets[place]
                parts = group([1] * len(some), limits=target.limits, capabilities=target.capabilities)
                jobs = [_bind(run, target, some[begin:end], number) for begin, end in parts]
                try:
                    target.lanes.submit(jobs, Priority.DEMAND)
                except KVStoreError as error:
                    settle(some, [Outcome.failed(error)] * len(some), number)

        def run(target: Target, some: Sequence[int], number: int) -> None:
            asked = [keys[index] for index in some]
            if batch.alive:
                results = attempt(target.name, operation, len(some), lambda: call(target, asked, batch.deadline))
            else:
                results = [deadline_passed(target.name, operation)] * len(some)
            settle(some, results, number)

        def settle(some: Sequence[int], results: Sequence[Any], number: int) -> None:
            final, more = [], []
            for index, result in zip(some, results, strict=True):
                hit = not isinstance(result, Outcome) or result.status is Status.OK
                if hit or (isinstance(result, Outcome) and best[index] is MISS):
                    best[index] = result
                if number + 1 < len(orders[index]) and not (hit and first_hit):
                    more.append(index)
                else:
                    final.append((index, best[index]))
            for late in batch.settle(final):
                if isinstance(late, Buffer):
                    late.release()
            if more and batch.alive:
                ask(more, number + 1)

        ask(range(len(keys)), 0)

    def _lease(self, target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
        return [
            MISS if buffer is None else self._checked_lease(target, key, buffer)
            for key, buffer in zip(keys, target.backend.lease(keys, deadline=deadline), strict=True)
        ]

    @staticmethod
    def _checked_lease(target: Target, key: Key, buffer: Buffer) -> Buffer | Outcome:
        view = buffer.view
        try:
            header = parse_header(view, key=key, nbytes=len(view))
            if all(
                segment.codec == RAW
                and checksum(view[segment.offset : segment.offset + segment.length]) == segment.checksum
                for segment in header.segments
            ):
                return buffer
        except CorruptRecord as error:
            logger.warning("corrupt record %s… in %s: %s", key[:6].hex(), target.name, error)
        buffer.release()
        return MISS

    @staticmethod
    def _heads(target: Target, keys: Sequence[Key], deadline: float) -> Sequence[Any]:
        memory = memoryview(bytearray(_HEAD_BYTES * len(keys)))
        views = [memory[at : at + _HEAD_BYTES] for at in range(0, len(memory), _HEAD_BYTES)]
        reads = [Read(key, view) for key, view in zip(keys, views, strict=True)]
        results: Any = []
        for key, view, outcome in zip(keys, views, target.backend.get_into(reads, deadline=deadline), strict=True):
            if outcome.status is not Status.OK:
                results.append(outcome)
                continue
            try:
                results.append(_whole_header(target, key, view[: outcome.nbytes], deadline))
            except CorruptRecord as error:
                results.append(Outcome.failed(error))
        heads: Sequence[Any] = results
        return heads


def _whole_header(target: Target, key: Key, data: memoryview, deadline: float) -> Header | Outcome:
    from .record import NeedMore

    try:
        return parse_header(data, key=key)
    except NeedMore as more:
        longer = memoryview(bytearray(more.need))
        outcome = target.backend.get_into([Read(key, longer)], deadline=deadline)[0]
        return parse_header(longer[: outcome.nbytes], key=key) if outcome.status is Status.OK else outcome


def _prepare(want: Want) -> tuple[Any, ...]:
    """A want checked against its spec: (key, spec, first, views, flat, hold)."""
    key, dst, spec, first, count, hold = want
    total = len(spec.sizes)
    count = total - first if count is None else count
    if first < 0 or count < 1 or first + count > total:
        raise ConfigError(f"segments {first}..{first + count - 1} asked for, but the record has {total}")
    if isinstance(dst, Sequence) and not isinstance(dst, memoryview | bytes | bytearray):
        views = [flat_bytes(view, writable=True) for view in dst]
        sizes = spec.sizes[first : first + count]
        if len(views) != count or any(len(view) != size for view, size in zip(views, sizes, strict=True)):
            raise ConfigError(
                f"{len(views)} destinations of {list(map(len, views))[:4]}… bytes do not fit {count} segments"
            )
        return key, spec, first, views, views[0] if count == 1 else None, hold
    flat = flat_bytes(dst, writable=True)
    return key, spec, first, spec.split(flat, first, count), flat, hold


def _segments(item: Item) -> list[memoryview]:
    views = [flat_bytes(segment, writable=False) for segment in item.segments]
    if tuple(map(len, views)) != item.spec.sizes:
        raise ConfigError(
            f"{len(views)} segments of {list(map(len, views))[:4]}… bytes do not fit the spec"
            f" ({len(item.spec.sizes)} of {list(item.spec.sizes[:4])}…)"
        )
    return views


def _bind(run: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: run(*args)


def _prefix(outcomes: Sequence[Outcome]) -> int:
    """The number of leading hits."""
    for index, outcome in enumerate(outcomes):
        if outcome.status is not Status.OK:
            return index
    return len(outcomes)


def _leases(results: Sequence[Any]) -> Sequence[Buffer | None]:
    return [result if isinstance(result, Buffer) else None for result in results]


def _headers(results: Sequence[Any]) -> Sequence[Header | None]:
    return [result if isinstance(result, Header) else None for result in results]


def _close_at_exit(ref: weakref.ref[Store]) -> None:
    store = ref()
    if store is not None:
        store.close()


def open_store(
    remote_url: str | Sequence[str] | None = None, *, config_file: str | os.PathLike[str] | None = None, **options: Any
) -> Store:
    """Open a store.

    Args:
        remote_url: `scheme://authority/path?option=…`, or several of them (records are then spread over them).
        config_file: YAML; also `KVSTORE_CONFIG_FILE` and `LMCACHE_CONFIG_FILE`.
        options: any option of `kvstore.config`; they win over file and environment.

    Raises:
        ConfigError: an unknown scheme, option or unit, a missing extra, a place that cannot be opened.
    """
    return Store(load_config(remote_url, config_file=config_file, **options))
