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

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import asks
from .backend import Backend, KeyInfo, Outcome, Status
from .buffers import Buffer
from .completion import Completion
from .config import Config, load_config
from .errors import ConfigError, KVStoreError, TransientError
from .keys import Key, KeyContext, opaque_key
from .layout import KVLayout, canonical_dtype
from .machinery import Machinery, close_dropped
from .record import KIND_OPAQUE, Header, opaque_spec
from .scheduler import Priority, seconds_left
from .targets import Item, Progress, Want, flat_bytes
from .wants import check_apart, check_keys, check_once, prepare, segments_of
from .writes import Put

__all__ = ["Item", "Priority", "Progress", "Store", "Want", "open_store"]

logger = logging.getLogger("kvstore.store")

Name = str | bytes
"""How an opaque record is named: text or bytes (hashed with the namespace), or a `Key` as it is."""

# What get_many without `into` allocates because a header says so: for one record, and for all of one call.
_MAX_CLAIM = 1 << 30
_MAX_CLAIMS = 64 << 20  # … or, if that is more, so many bytes for each byte that is stored:
_MAX_EXPANSION = 256
_SETTLE_GRACE_S = 1.0  # how long blocking calls wait, after their deadline, for a hung backend to let go of memory


class Store:
    """KV cache records over one or several backends. Open one with `open_store`.

    Args:
        config: see `load_config`.
        backends: use these instead of opening `config.remote_url` (the store closes them); mostly for tests.

    Attributes:
        codec: what records are encoded with.
        metrics: what it counts; `kvstore.telemetry.exposition` makes Prometheus' text of it.
        tracer: makes spans (option `tracing`); None: they are off.
        tiers: the hierarchy of the option `tiers`, with `announce`, `pin`, `unpin`, `usage`; None without it.

    Raises:
        ConfigError: the configuration makes no sense, or a backend cannot be opened.
    """

    def __init__(self, config: Config, *, backends: Sequence[Backend] | None = None) -> None:
        self._machinery = machinery = Machinery(config, backends)
        self.config = config
        self.pool = machinery.pool
        self.metrics = machinery.metrics
        self.tiers = machinery.tiers
        self.codec = machinery.codec
        self.tracer = machinery.tracer
        self._warned: set[str] = set()  # models that the codec's profile is not of
        self._finish = _first_error_raised if config.on_error == "raise" else _as_they_are
        self._dropped = weakref.finalize(self, close_dropped, machinery, repr(self))
        self._dropped.atexit = False  # the machinery sees to that itself

    # The batched interface.

    def submit_lookup(self, keys: Sequence[Key], *, deadline: float | None = None) -> Completion[int]:
        """The hit prefix: how many leading keys are stored somewhere. A hole ends it; what is unknown by the
        deadline, or in trouble, counts as not there. It is a promise about names, not about bytes: only a get tells.

        Args:
            deadline: absolute `time.monotonic()` seconds; None means now + `lookup_timeout`.
        """

        check_keys(keys)
        machinery = self._machinery
        batch = machinery.batch(len(keys), deadline, self.config.lookup_timeout, self._prefix, "lookup", keys)
        machinery.asker.submit(batch, keys, asks.stat, "lookup", first_hit=True)
        return batch.completion

    def submit_stat(self, keys: Sequence[Key], *, deadline: float | None = None) -> Completion[Sequence[Outcome]]:
        """Which records are stored, each for itself: OK with their stored bytes, MISS, or ERROR if it is not known.

        Like a lookup it is a promise about names, not about bytes.
        """
        check_keys(keys)
        batch = self._machinery.batch(len(keys), deadline, self.config.lookup_timeout, self._finish, "lookup", keys)
        self._machinery.asker.submit(batch, keys, asks.stat, "lookup", first_hit=True)
        return batch.completion

    def submit_get(
        self, wants: Sequence[Want], *, priority: Priority = Priority.DEMAND, deadline: float | None = None
    ) -> Completion[Sequence[Outcome]]:
        """Read and verify records. Outcomes are in the order of `wants`; OK means that the destination holds exactly
        the bytes that were stored. On anything else its content is undefined.

        Bytes are copied once, from the backend into `dst`, if the record is stored raw; encoded ones are decoded from
        a staging buffer of the pool. With a lossy codec "exactly the bytes" are those that the wanted level decodes to;
        a store of another codec never gets them (a miss, counted as `wrong_codec`). Until the completion is settled,
        `dst` belongs to the store. Destinations must not overlap: each want is verified for itself, so what one read
        brings could spoil what another one was told is OK. A full check would cost too much here; only one and the same
        `dst` given twice is refused.

        Args:
            deadline: absolute `time.monotonic()` seconds; None means now + `blocking_timeout`.

        Raises:
            ConfigError: a destination is not writable, not contiguous, not as long as the spec says, or given twice;
                a `progress` that is in use, or belongs to something else.
            ClosedError: the store is closed.
        """
        flights = [prepare(want) for want in wants]
        if len({id(want.dst) for want in wants}) < len(wants):
            check_once(wants)
        machinery = self._machinery
        batch = machinery.batch(len(flights), deadline, self.config.blocking_timeout, self._finish, "get", wants)
        machinery.reader.submit(batch, flights, priority)
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
        return self._put(items, priority, deadline, wait=False)

    def _put(
        self, items: Sequence[Item], priority: Priority, deadline: float | None, *, wait: bool
    ) -> Completion[Sequence[Outcome]]:
        puts = [Put(item, segments_of(item)) for item in items]
        batch = self._machinery.batch(len(puts), deadline, self.config.put_timeout, self._finish, "put", items)
        self._machinery.writer.submit(batch, puts, priority, wait=wait)
        return batch.completion

    def submit_lease(
        self, keys: Sequence[Key], *, deadline: float | None = None
    ) -> Completion[Sequence[Buffer | None]]:
        """Read-only leases on whole records that already lie in host memory, without a copy; None for all others.

        The view begins with the record's header: `kvstore.record.parse_header` tells where its segments are. Header
        and segments are verified; damaged records are quarantined, as by a get. Encoded records are not leased. The
        caller releases each buffer.
        """
        check_keys(keys)
        asker = self._machinery.asker
        batch = self._machinery.batch(len(keys), deadline, self.config.blocking_timeout, _leases, "lease", keys)
        asker.submit(batch, keys, asker.lease, "lease", first_hit=True)
        return batch.completion

    def submit_delete(self, keys: Sequence[Key], *, deadline: float | None = None) -> Completion[Sequence[Outcome]]:
        """Remove records from every replica: OK if any had it, MISS if none."""
        check_keys(keys)
        batch = self._machinery.batch(len(keys), deadline, self.config.put_timeout, self._finish, "delete", keys)
        self._machinery.asker.submit(batch, keys, asks.delete, "delete", first_hit=False)
        return batch.completion

    def submit_heads(
        self, keys: Sequence[Key], *, deadline: float | None = None
    ) -> Completion[Sequence[Header | None]]:
        """The verified headers (shape, codec, meta) of records; None for those that are missing or damaged."""
        check_keys(keys)
        asker = self._machinery.asker
        batch = self._machinery.batch(len(keys), deadline, self.config.blocking_timeout, _headers, "get", keys)
        asker.submit(batch, keys, asker.heads, "get", first_hit=True)
        return batch.completion

    def list(self, *, deadline: float | None = None) -> Iterator[Sequence[KeyInfo]]:
        """Pages of stored records over all backends; one with several replicas appears once per replica.

        The backends are asked in the caller's own thread, a page at a time: one that hangs and does not keep to the
        deadline holds the caller. Use it for tools, not on the way to an answer.

        Args:
            deadline: for all pages: absolute `time.monotonic()` seconds; None means now + `put_timeout`. A long walk
                needs more: `math.inf` is no bound.

        Raises:
            PermanentError: a backend cannot list.
            TransientError: the deadline passed.
        """
        until = time.monotonic() + self.config.put_timeout if deadline is None else deadline
        if math.isnan(until):
            raise ConfigError("the deadline is not a number")
        self._machinery.check_open()
        for target in self._machinery.targets:
            yield from target.backend.list(deadline=until)

    # For one prompt and no machinery.

    def put_many(
        self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *, timeout: float | None = None
    ) -> Sequence[Outcome]:
        """Store opaque records by name and wait. More than the write queue holds goes in waves, and waits for room.

        Args:
            items: name → bytes-like, or pairs. A name is text or bytes (kept apart by namespace), or a `Key`.
            timeout: seconds for each wave; None means `put_timeout`.

        Raises:
            TransientError: a second after the deadline a backend that hangs still holds a value that might change
                (one that is not `bytes`).
        """
        pairs = _pairs(items)
        frozen = all(type(value) is bytes for _, value in pairs)
        seconds = _seconds(timeout, self.config.put_timeout)
        prepared = []
        for name, value in pairs:
            flat = flat_bytes(value, writable=False)
            spec = opaque_spec(len(flat))
            prepared.append(Item(self._key(name), spec.split(flat), spec))
        outcomes: Any = []
        begin = size = 0
        for index, item in enumerate(prepared):
            if index > begin and size + item.spec.nbytes > self.config.write_queue_bytes:
                outcomes += self._put_wave(prepared[begin:index], seconds, frozen)
                begin, size = index, 0
            size += item.spec.nbytes
        if prepared:
            outcomes += self._put_wave(prepared[begin:], seconds, frozen)
        stored: Sequence[Outcome] = outcomes
        return stored

    def _put_wave(self, items: Sequence[Item], seconds: float, frozen: bool) -> Sequence[Outcome]:
        deadline = time.monotonic() + seconds
        done = self._put(items, Priority.DEMAND, deadline, wait=True)
        return _wait_for(done, deadline, "put", lent=not frozen)

    def get_many(
        self, names: Sequence[Any], into: Sequence[Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[Any]:
        """Read opaque records by name and wait.

        Args:
            into: one writable buffer for each name, exactly as long as the record; they must not overlap. None
                allocates: at most 1 GiB for a record, and for all of them 64 MiB or 256 times what is stored, if that
                is more. What a header claims beyond that is a miss, with a warning in the log.
            timeout: seconds; None means `blocking_timeout`.

        Returns:
            With `into`: for each name the number of bytes, or None for a miss. Else a bytearray, or None for a miss.

        Raises:
            ConfigError: buffers that are not writable, not contiguous, or overlap.
            TransientError: a second after the deadline a backend that hangs may still write to `into`.
        """
        deadline = time.monotonic() + _seconds(timeout, self.config.blocking_timeout)
        keys = self._keys(names)
        if into is None:
            heads = self.submit_heads(keys, deadline=deadline).result()
            buffers: list[Any] = _rooms_for(heads)
        elif len(into) != len(names):
            raise ConfigError(f"{len(names)} names, but {len(into)} buffers to read into")
        else:
            buffers = list(into)
        wanted = [index for index, buffer in enumerate(buffers) if buffer is not None]
        flats = [flat_bytes(buffers[index], writable=True) for index in wanted]
        if into is not None:
            check_apart(flats)
        wants = [Want(keys[index], flat, opaque_spec(len(flat))) for index, flat in zip(wanted, flats, strict=True)]
        done = self.submit_get(wants, deadline=deadline)
        results: Any = [None] * len(names)
        for index, outcome in zip(wanted, _wait_for(done, deadline, "get", lent=into is not None), strict=True):
            if outcome.status is Status.OK:
                results[index] = buffers[index] if into is None else outcome.nbytes
        found: Sequence[Any] = results
        return found

    def hit_prefix(self, names: Sequence[Any], *, timeout: float | None = None) -> int:
        """How many leading names are stored. Seconds; None means `lookup_timeout`."""
        deadline = time.monotonic() + _seconds(timeout, self.config.lookup_timeout)
        return self.submit_lookup(self._keys(names), deadline=deadline).result()

    def delete_many(self, names: Sequence[Any], *, timeout: float | None = None) -> Sequence[Outcome]:
        """Remove records by name and wait: OK, or MISS if there was none."""
        deadline = time.monotonic() + _seconds(timeout, self.config.put_timeout)
        return self.submit_delete(self._keys(names), deadline=deadline).result()

    def key_context(self, *, model: str, layout: KVLayout, dtype: str, **fields: Any) -> KeyContext:
        """A `KeyContext` with the namespace, the codec and the id of its profile of this store's configuration.

        Where the codec's profile was made of a model of another name, a warning says so: if it really is another one,
        what comes back is worth little.

        Raises:
            ConfigError: a field that makes no sense; or the codec's profile is for another layout or dtype.
        """
        self._machinery.watch.model = model
        profile = self._machinery.codec.profile
        if profile is not None:
            profile.check_layout(layout, canonical_dtype(dtype))
            if not profile.is_of(model) and model not in self._warned:
                self._warned.add(model)
                logger.warning("%s is used for KV of model %r", profile, model)
        own = {
            "namespace": self.config.namespace,
            "codec": self.config.remote_serde,
            "codec_profile": None if profile is None else profile.id,
        }
        return KeyContext(model=model, layout=layout, dtype=dtype, **{**own, **fields})

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """The scheduler's waiting queue, first to run first: the keys of each job in prefix order. Tiers and nodes
        bring them up in this order, and keep them; other backends do nothing. Replaces what was announced before; an
        empty one ends it. Returns at once; trouble with it is no error.

        Raises:
            ClosedError: the store is closed.
        """
        self._machinery.check_open()
        for target in self._machinery.targets:
            try:
                target.backend.announce(waiting)
            except KVStoreError as error:
                logger.debug("%s could not be told what waits: %s", target.name, error)

    # Life.

    def stats(self) -> dict[str, Any]:
        """Counters, the pool, the lanes of each backend, the tiers, and the metrics of the wrappers."""
        return self._machinery.stats()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the store. Always returns; may be called twice; later calls of other methods raise `ClosedError`.

        In a callback of a completion, which may run in a thread of the store's own, it returns at once, and the store
        closes behind it. A store that is dropped without `close` closes likewise, with a `ResourceWarning`.

        Args:
            drain: first finish the puts under way, and bring down what tiers owe. Otherwise puts not begun end with
                `ClosedError`. What was not brought down in time is named in the log.
            timeout: seconds for all of it; None means `close_timeout`. What a hung backend still holds then is left
                to its daemon threads. A backend whose own close hangs may take a second more.
        """
        self._machinery.close(drain=drain, timeout=timeout)
        self._dropped.detach()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(target.name for target in self._machinery.targets)
        return f"<Store {names}{' (closed)' if self._machinery.closed else ''}>"

    # Plumbing.

    def _prefix(self, outcomes: Sequence[Outcome]) -> int:
        """The number of leading hits, counted."""
        hits = len(outcomes)
        for index, outcome in enumerate(outcomes):
            if outcome.status is not Status.OK:
                hits = index
                break
        self._machinery.watch.looked(hits, len(outcomes))
        return hits

    def _keys(self, names: Sequence[Any]) -> Sequence[Key]:
        if isinstance(names, str | bytes):  # taken as a list, it would name one record per letter
            raise ConfigError(f"a list of names is needed, not one {type(names).__name__}; write [{names!r:.60}]")
        return [self._key(name) for name in names]

    def _key(self, name: object) -> Key:
        if isinstance(name, Key):
            return name
        if isinstance(name, str | bytes):
            return opaque_key(name, namespace=self.config.namespace)
        raise ConfigError(f"a record is named by text, bytes or a Key, not by {type(name).__name__}")


def _pairs(items: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
    if isinstance(items, Mapping):
        return [*items.items()]
    pairs = [*items]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"put_many takes a mapping, or pairs of name and bytes, not {type(pair).__name__}")
    return pairs


def _seconds(timeout: float | None, default: float) -> float:
    """A timeout in seconds. Raises `ConfigError` if it is not a number."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ConfigError(f"timeout must be a number of seconds, not {timeout!r}")
    return float(timeout)


def _rooms_for(heads: Sequence[Header | None]) -> list[bytearray | None]:
    """Memory for the records that headers describe; None if there is none to be read, or no memory for it."""
    rooms: list[bytearray | None] = []
    claimed = stored = refused = largest = 0
    for head in heads:
        room = None
        if head is not None and head.kind == KIND_OPAQUE:
            nbytes, size = head.raw_bytes, sum(segment.length for segment in head.segments)
            most = max(_MAX_CLAIMS, _MAX_EXPANSION * (stored + size))
            if nbytes <= _MAX_CLAIM and claimed + nbytes <= most:
                with contextlib.suppress(MemoryError):
                    room = bytearray(nbytes)
            if room is None:
                refused, largest = refused + 1, max(largest, nbytes)
            else:
                claimed, stored = claimed + nbytes, stored + size
        rooms.append(room)
    if refused:
        logger.warning(
            "get_many: no memory is allocated for %d of %d records that claim up to %d bytes; read them with into=",
            refused, len(heads), largest,
        )  # fmt: skip
    return rooms


def _wait_for(done: Completion[Sequence[Outcome]], deadline: float, operation: str, *, lent: bool) -> Sequence[Outcome]:
    """The outcomes, once no I/O can touch the caller's memory any more.

    Args:
        lent: the memory is the caller's own; else nobody minds late I/O.
    """
    try:
        outcomes = done.result()
    except BaseException:  # an interrupt, or on_error="raise"
        done.cancel()  # what has not begun never begins
        if lent:
            done.settled(_SETTLE_GRACE_S)
        raise
    if lent and not done.settled(seconds_left(deadline) + _SETTLE_GRACE_S):
        raise TransientError("a backend hangs and still holds the memory that it was given", operation=operation)
    return outcomes


def _as_they_are(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return outcomes


def _first_error_raised(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """The outcomes of a batch with `on_error="raise"`."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes


def _leases(results: Sequence[Any]) -> Sequence[Buffer | None]:
    return [result if isinstance(result, Buffer) else None for result in results]


def _headers(results: Sequence[Any]) -> Sequence[Header | None]:
    return [result if isinstance(result, Header) else None for result in results]


def open_store(
    remote_url: str | Sequence[str] | None = None, *, config_file: str | os.PathLike[str] | None = None, **options: Any
) -> Store:
    """Open a store.

    Args:
        remote_url: `scheme://authority/path?option=…`, or several of them (records are then spread over them); with
            the option `tiers` the last tier, or nothing.
        config_file: YAML; also `KVSTORE_CONFIG_FILE` and `LMCACHE_CONFIG_FILE`.
        options: any option of `kvstore.config`; they win over file and environment.

    Raises:
        ConfigError: an unknown scheme, option or unit, a missing extra, a place that cannot be opened.
    """
    return Store(load_config(remote_url, config_file=config_file, **options))
