"""What a store runs on: its backends, lanes, timer and pool, and how all of that begins and ends.

It knows nothing of the `Store` in front of it, so that a store that is dropped without `close` can be collected; its
machinery then closes by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .asks import Asker
from .backend import Backend, Capability
from .buffers import BufferPool
from .codec import open_codec
from .config import Config
from .errors import ClosedError, ConfigError
from .metrics import Metrics
from .placement import Placement
from .reads import Reader
from .registry import open_backend, split_options
from .scheduler import Batch, LaneGroup, seconds_left
from .targets import Counters, Target
from .telemetry.logs import attach_event_log
from .telemetry.tracing import open_tracer
from .telemetry.watch import StoreWatch
from .tiers.backend import TieredBackend
from .timer import Timer
from .writes import Writer

if TYPE_CHECKING:
    from .telemetry.endpoint import MetricsEndpoint

__all__ = ["Machinery", "close_dropped"]

logger = logging.getLogger("kvstore.store")

_CLOSE_GRACE_S = 1.0  # for the backends' own close, even if the time is up


class Machinery:
    """The running parts of one store.

    Args:
        backends: use these instead of opening `config.remote_url`; they are closed with the rest, also if this fails.

    Attributes:
        codec: what records are encoded with.
        tracer: makes spans; None: tracing is off.
        endpoint: answers to GET /metrics; None: nobody does.

    Raises:
        ConfigError: the configuration makes no sense, or a backend or a codec's profile cannot be opened.
    """

    def __init__(self, config: Config, backends: Sequence[Backend] | None) -> None:
        self.config = config
        self.metrics = Metrics()
        self.counters = Counters()
        with contextlib.ExitStack() as undo:
            for backend in backends or ():
                undo.callback(backend.close)
            self.tracer = open_tracer(config.tracing, chunk_size=config.chunk_size)
            if self.tracer is not None:
                undo.callback(self.tracer.close, 0.0)
            self.codec = codec = open_codec(config.remote_serde, config.codec_profile)
            self.targets, placement = self._open_targets(backends, undo)
            shared = any(target.capabilities & Capability.MAPPED_MEMORY for target in self.targets)
            self.pool = BufferPool(config.buffer_pool_bytes, shared=shared)
            undo.callback(self.pool.close)
            for target in self.targets:
                if target.capabilities & Capability.REGISTERED_MEMORY:
                    for slab in self.pool.slabs:
                        target.backend.register(slab)
            self.endpoint: MetricsEndpoint | None = None
            if config.metrics_listen:
                from .telemetry.endpoint import serve_metrics

                self.endpoint = serve_metrics(config.metrics_listen, self.metrics)
            undo.pop_all()
        raw = codec.number == 0
        self.reader = Reader(self.targets, placement, self.pool, self.counters, codec=codec, level=config.codec_level)
        self.asker = Asker(self.targets, placement, self.reader.stager, self.counters)
        self.writer = Writer(
            self.targets,
            placement,
            self.counters,
            codec=None if raw else codec,
            queue_bytes=config.write_queue_bytes,
        )
        for target in self.targets:
            target.lanes.tracer = self.tracer
        attach_event_log(config.event_log)
        self.watch = StoreWatch(config, self.metrics, self.counters, self.targets, self.pool, self.writer, self.tracer)
        self._timer = Timer()
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def _open_targets(
        self, backends: Sequence[Backend] | None, undo: contextlib.ExitStack
    ) -> tuple[list[Target], Placement]:
        names: list[str] = []
        weights: list[float] = []
        opened: list[Backend] = []
        settings: list[Mapping[str, Any]] = []  # of the wrappers
        if backends is None and self.config.tiers:
            from .tiers.opening import open_tiers

            backends = [open_tiers(self.config, self.metrics)]
            undo.callback(backends[0].close)
        if backends is not None:
            opened = [*backends]
            names, weights = [backend.name for backend in opened], [1.0] * len(opened)
            settings = [{}] * len(opened)
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
        _check_distinct(names, opened)
        for backend in opened:
            if backend.metrics is not None:
                self.metrics.include(backend.metrics)
        distances = [backend.distance for backend in opened] if self.config.replicas > 1 else None
        placement = Placement(names, weights, self.config.replicas, distances)
        if self.config.replicas == 1 and any(values.get("hedge") for values in settings):
            raise ConfigError("option 'hedge' needs another replica to read from; set replicas to 2 or more")
        if self.config.replicas > 1:
            opened = self._hedged(opened, settings, placement)
        targets = []
        for index, (name, backend) in enumerate(zip(names, opened, strict=True)):
            lanes = LaneGroup(name, backend.limits.lanes)
            target = Target(index, name, backend, lanes, backend.limits, backend.capabilities)
            if isinstance(backend, TieredBackend):
                target.copies = len(backend.tiers)
            targets.append(target)
        return targets, placement

    @property
    def tiers(self) -> TieredBackend | None:
        """The hierarchy that the store runs on, if it does."""
        backend = self.targets[0].backend
        return backend if isinstance(backend, TieredBackend) else None

    def _hedged(
        self, backends: Sequence[Backend], settings: Sequence[Mapping[str, Any]], placement: Placement
    ) -> list[Backend]:
        """The backends, those with the option `hedge` with a second read to the next replica of each key."""
        from .replicas import NextReplica
        from .wrappers import hedge

        return [
            hedge(backend, NextReplica(index, backends, placement), values, metrics=self.metrics)
            for index, (backend, values) in enumerate(zip(backends, settings, strict=True))
        ]

    @property
    def forked(self) -> bool:
        """True in a process that was forked off: it has none of the threads, and maybe locks that nobody frees."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raises `ClosedError` if it is closed, or was opened before a fork."""
        if self.closed:
            raise ClosedError("the store is closed")
        if self.forked:
            raise ClosedError("this store was opened before fork(); open another one in the child")

    def batch(
        self, size: int, deadline: float | None, default: float, finish: Callable[[Sequence[Any]], Any], operation: str,
        about: Sequence[Any] = (),
    ) -> Batch:  # fmt: skip
        """A batch that ends at its deadline, or when the store is closed.

        Args:
            deadline: absolute monotonic seconds; None: `default` seconds from now.
            about: its wants, items or keys, for traces and the event log.
        """
        until = time.monotonic() + default if deadline is None else deadline
        if until != until:  # noqa: PLR0124 - NaN: no comparison with it would ever be true
            raise ConfigError("the deadline is not a number")
        self.check_open()
        batch = Batch(size, until, self.watch.timed(operation, finish))
        with self._lock:
            self.check_open()  # from here on `close` sees the batch
            self._batches.add(batch)
        if self.watch.telling:
            self.watch.follow(batch, operation, about)
        self._timer.watch(batch, self.watch.late[operation])
        return batch

    def stats(self) -> dict[str, Any]:
        """See `Store.stats`."""
        tiers = self.tiers
        return {
            **self.counters.values,
            **({} if tiers is None else {"tiers": tiers.stats()}),
            "write_queue_bytes": self.writer.queued_bytes,
            "pool": self.pool.stats()._asdict(),
            "backends": {target.name: target.lanes.stats() for target in self.targets},
            "metrics": self.metrics.snapshot(),
        }

    # The end.

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """See `Store.close`."""
        if self.forked:
            self.closed = True
            return
        end = time.monotonic() + (self.config.close_timeout if timeout is None else timeout)
        with self._lock:
            first, self.closed = not self.closed, True
        own = self._timer.here or any(target.lanes.here for target in self.targets)
        if not first:
            if not own:  # somebody else is at it
                self._ended.wait(seconds_left(end))
        elif not own or not _started(functools.partial(self._close, drain, end)):  # a lane cannot wait for itself
            self._close(drain, end)

    def _close(self, drain: bool, end: float) -> None:
        try:
            drained = drain and self.writer.drain(end)
            if not drained:
                self._fail_open()
            if drain and self.tiers is not None:
                self.tiers.drain(end)
            for target in self.targets:
                target.lanes.shut(drop=not drained)
            for target in self.targets:
                if not target.lanes.join(end):
                    logger.warning("backend %s still has I/O under way; its threads end with it", target.name)
        finally:  # also after an interrupt
            self._fail_open()
            for target in self.targets:
                target.lanes.shut(drop=True)
            self._close_backends(max(end, time.monotonic() + _CLOSE_GRACE_S))
            self._timer.close(max(end, time.monotonic() + _CLOSE_GRACE_S))
            self.pool.close()
            if self.tracer is not None:
                self.tracer.close(seconds_left(end))
            if self.endpoint is not None:
                self.endpoint.close()
            atexit.unregister(self.close)
            self._ended.set()

    def _fail_open(self) -> None:
        with self._lock:
            batches = list(self._batches)
        for batch in batches:
            batch.fail(ClosedError("the store was closed before this was done"))

    def _close_backends(self, end: float) -> None:
        """Close all at once, and do not wait beyond `end`: a close may hang as any other call."""
        threads = []
        for target in self.targets:
            close = functools.partial(_close_backend, target)
            thread = threading.Thread(target=close, name=f"kvstore-close-{target.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end
                close()
            else:
                threads.append(thread)
        for thread in threads:
            thread.join(seconds_left(end))
            if thread.is_alive():
                logger.warning("%s has not ended in time", thread.name)


def _check_distinct(names: Sequence[str], backends: Sequence[Backend]) -> None:
    """Raises `ConfigError` if two backends are one place: replicas there would be none."""
    found: dict[Hashable, str] = {}
    for name, backend in zip(names, backends, strict=True):
        if backend.identity is None:
            continue
        if backend.identity in found:
            raise ConfigError(
                f"the backends {found[backend.identity]} and {name} are one and the same place "
                "(a link, or another mount of it?); name it once"
            )
        found[backend.identity] = name


def _close_backend(target: Target) -> None:
    try:
        target.backend.close()
    except Exception:
        logger.exception("closing backend %s failed", target.name)


def _started(work: Callable[[], None]) -> bool:
    """Have `work` done by a thread of its own. False if none can be had."""
    try:
        threading.Thread(target=work, name="kvstore-close", daemon=True).start()
    except RuntimeError:
        return False
    return True


def close_dropped(machinery: Machinery, name: str) -> None:
    """The store in front of `machinery` was collected without having been closed."""
    if not machinery.closed and not machinery.forked:
        # Whoever dropped the last reference, a collection in the middle of anything included, must not wait.
        if not _started(machinery.close):
            machinery.close()
        warnings.warn(f"{name} was not closed", ResourceWarning, stacklevel=2)  # last: it may be turned into an error
