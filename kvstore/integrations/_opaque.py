"""What integrations share whose engine hands over a name and bytes: opaque records of a store, and when memory that
an engine lent may be told free."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.backend import MISS, Outcome, Status
from kvstore.completion import CancelledError, Completion
from kvstore.config import load_config, read_yaml
from kvstore.errors import ConfigError, KVStoreError, PermanentError
from kvstore.keys import Key, opaque_key
from kvstore.record import KIND_OPAQUE, Header, RecordSpec, opaque_spec
from kvstore.store import Store
from kvstore.targets import Item, Want, flat_bytes

__all__ = ["Client", "Grumbler", "Settler", "open_client", "outcomes_of", "what_failed"]

_LOOK_S = 0.02  # how often memory is looked at that a hung backend still holds
_GRUMBLE_S = 10.0  # between two warnings about the same kind of trouble

_DEFAULTS: dict[str, Any] = {
    # What is being written lies in the engine's memory, whose size it bounds itself; nothing is copied into our queue.
    "write_queue_bytes": 1 << 40,
    # Reads land in the engine's memory and writes leave from it: the pool serves second looks only.
    "buffer_pool_bytes": 64 << 20,
}


def open_client(
    engine: str,
    prefix: str,
    remote_url: Any,
    config_file: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
) -> Client:
    """A client for an engine.

    Args:
        engine: its name, for messages; in lower case, of its log.
        prefix: begins every name.
        options: of `kvstore.config`.
        env: the environment; None: this process's.

    Raises:
        ConfigError: as `kvstore.open_store`; or `backend_options`, or `on_error: raise`, among the options.
    """
    if "backend_options" in options:
        raise ConfigError(
            f"backend_options may hold secrets, and {engine} writes its settings into its log: put them into a file "
            "and name it as config_file, or use environment variables KVSTORE_<SCHEME>_<OPTION>; what is no secret "
            "goes into the URL"
        )
    env = os.environ if env is None else env
    options = dict(options)
    path = config_file if config_file is not None else env.get("KVSTORE_CONFIG_FILE")
    in_file = read_yaml(path) if path else {}
    for name, value in _DEFAULTS.items():
        if name not in in_file and f"KVSTORE_{name.upper()}" not in env:
            options.setdefault(name, value)
    config = load_config(remote_url, config_file=config_file, env=env, **options)
    if config.on_error == "raise":
        raise ConfigError(
            f"option on_error=raise: one record in trouble would cost {engine} its whole batch; leave it out"
        )
    return Client(Store(config), prefix, logging.getLogger(f"kvstore.integrations.{engine.lower()}"))


class Client:
    """Opaque records under names that begin with `prefix`. Calls return at once; answers come through `settler`.

    Args:
        prefix: part of every name, so that what different engines call by one name stays apart.
        logger: where trouble is told that the engine does not pass on.

    Attributes:
        settler: tells results once lent memory is free.
    """

    def __init__(self, store: Store, prefix: str, logger: logging.Logger) -> None:
        self.store = store
        self.settler = Settler(logger)
        self._prefix = prefix

    def keys(self, names: Sequence[str]) -> list[Key]:
        """Keys of records. Any text is a name; nothing in it is special, so no two names meet."""
        prefix, namespace = self._prefix, self.store.config.namespace
        return [opaque_key(prefix + name, namespace=namespace) for name in names]

    def get(self, names: Sequence[str], views: Sequence[object]) -> Completion[Sequence[Outcome]]:
        """Read records straight into memory of the caller's own; one of another size is no hit.

        Raises:
            ConfigError: a view is not writable, or not contiguous; their number differs.
        """
        _check_count(names, views)
        flats = [flat_bytes(view, writable=True) for view in views]
        keys = self.keys(names)
        wants = [Want(key, flat, opaque_spec(len(flat))) for key, flat in zip(keys, flats, strict=True)]
        return self.store.submit_get(wants)

    def get_at_most(self, names: Sequence[str], views: Sequence[object]) -> Completion[Sequence[Outcome]]:
        """Read records into the heads of views, which may be longer: each record's header is read first. What lies
        behind a record in its view stays as it was.

        The completion is done when it is settled, too: it needs no `when_settled`, but takes it.

        Raises:
            ConfigError: as `get`.
        """
        _check_count(names, views)
        flats = [flat_bytes(view, writable=True) for view in views]
        keys = self.keys(names)
        deadline = time.monotonic() + self.store.config.blocking_timeout
        done: Completion[Sequence[Outcome]] = Completion()
        heads = self.store.submit_heads(keys, deadline=deadline)
        heads.add_done_callback(lambda _: self._get_found(keys, flats, heads, deadline, done))
        return done

    def _get_found(
        self, keys: Sequence[Key], flats: Sequence[memoryview], heads: Completion[Sequence[Header | None]],
        deadline: float, done: Completion[Sequence[Outcome]],
    ) -> None:  # fmt: skip
        """The headers are known: read what fits. Runs in a thread of the store's, and blocks nowhere."""
        try:
            outcomes = [MISS] * len(keys)
            wanted: list[int] = []
            wants: list[Want] = []
            for index, head in enumerate(heads.result(0)):
                if head is None:
                    continue
                size, room = head.raw_bytes, len(flats[index])
                if head.kind != KIND_OPAQUE or size > room:
                    what = f"the record holds {size} bytes, and there is room for {room}"
                    outcomes[index] = Outcome.failed(PermanentError(what, operation="get", key=keys[index]))
                    continue
                wanted.append(index)
                wants.append(Want(keys[index], flats[index][:size], opaque_spec(size)))
            got = self.store.submit_get(wants, deadline=deadline)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            done.set_exception(
                error if isinstance(error, KVStoreError) else KVStoreError(f"the load failed: {error!r}")
            )
            return

        def tell() -> None:
            for index, outcome in zip(wanted, outcomes_of(got, len(wanted)), strict=True):
                outcomes[index] = outcome
            done.set_result(outcomes)

        self.settler.when_settled(got, tell)

    def get_scattered(
        self, names: Sequence[str], parts: Sequence[Sequence[memoryview]], spec: RecordSpec
    ) -> Completion[Sequence[Outcome]]:
        """Read records of one shape, each straight into the segments of memory that are given for it; one of another
        shape is no hit.

        Args:
            parts: for each name, a writable view for each segment of `spec`.

        Raises:
            ConfigError: views that do not fit `spec`, or are not writable; their number differs.
        """
        _check_count(names, parts)
        return self.store.submit_get([Want(key, each, spec) for key, each in zip(self.keys(names), parts, strict=True)])

    def put(
        self, names: Sequence[str], views: Sequence[object], meta: Sequence[dict[str, Any]] | None = None
    ) -> Completion[Sequence[Outcome]]:
        """Store records from the caller's memory, without a copy.

        Raises:
            ConfigError: a view is not contiguous; their number differs.
        """
        _check_count(names, views)
        items = []
        for index, (key, view) in enumerate(zip(self.keys(names), views, strict=True)):
            flat = flat_bytes(view, writable=False)
            spec = opaque_spec(len(flat))
            items.append(Item(key, spec.split(flat), spec, meta[index] if meta else {}))
        return self.store.submit_put(items)

    def put_gathered(
        self,
        names: Sequence[str],
        parts: Sequence[Sequence[memoryview]],
        spec: RecordSpec,
        *,
        meta: Mapping[str, Any],
        before: str | None = None,
    ) -> Completion[Sequence[Outcome]]:
        """Store records of one shape, each from the segments of memory that are given for it, without a copy.

        Args:
            parts: for each name, a view for each segment of `spec`.
            meta: kept in the header of each.
            before: name of the record that the first one continues, if it is known; each continues the one before it,
                so that eviction takes tails first.

        Raises:
            ConfigError: views that do not fit `spec`; their number differs.
        """
        _check_count(names, parts)
        parent = None if before is None else self.keys([before])[0]
        items = []
        for key, each in zip(self.keys(names), parts, strict=True):
            items.append(Item(key, each, spec, meta, parent))
            parent = key
        return self.store.submit_put(items)

    def exists(self, names: Sequence[str]) -> Completion[Sequence[Outcome]]:
        """Which records are there: OK or not."""
        return self.store.submit_stat(self.keys(names))

    def prefix(self, names: Sequence[str]) -> Completion[int]:
        """How many leading records are there."""
        return self.store.submit_lookup(self.keys(names))

    def delete(self, names: Sequence[str]) -> Completion[Sequence[Outcome]]:
        """Remove records: OK if any place had it."""
        return self.store.submit_delete(self.keys(names))

    def close(self) -> None:
        """Close the store: finishes what is being written, within `close_timeout`."""
        self.store.close()


def _check_count(names: Sequence[str], views: Sequence[object]) -> None:
    if len(names) != len(views):
        raise ConfigError(f"{len(names)} keys, but {len(views)} memory views")


def what_failed(outcomes: Sequence[Outcome], *, stored: bool = False) -> str:
    """One sentence about the first outcome that is in trouble; empty if none is."""
    bad = [each for each in outcomes if each.status is Status.ERROR or (stored and not each.stored)]
    if not bad:
        return ""
    reason = bad[0].error or "no place took it"
    return f"{len(bad)} of {len(outcomes)} failed; the first: {reason}"


class Grumbler:
    """Warns of trouble that an engine does not pass on; at most every ten seconds, so that an outage fills no disk."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._next = 0.0
        self._silent = 0

    def warn(self, what: str, trouble: str) -> None:
        """`what`: what was being done; `trouble`: a sentence, or "" if there is none."""
        if not trouble:
            return
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._silent += 1
                return
            self._next, silent, self._silent = now + _GRUMBLE_S, self._silent, 0
        self._logger.warning("%s: %s%s", what, trouble, f" ({silent} more since the last warning)" if silent else "")


class Settler:
    """Tells results of completions once the memory that was lent for them is really free.

    A completion is done at its deadline; a backend that hangs may touch the memory after that. An engine takes memory
    back as soon as it has an answer, so its answer waits for `settled`. That is at once unless a deadline passed.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._late: list[tuple[Completion[Any], Callable[[], None]]] = []
        self._watching = False

    def when_settled(self, completion: Completion[Any], tell: Callable[[], None]) -> None:
        """Call `tell` once `completion` is settled: in the thread that resolves it, or in one of our own. What `tell`
        raises is logged and goes no further."""
        completion.add_done_callback(lambda done: self._done(done, tell))

    def wait(self, completion: Completion[Any]) -> None:
        """Wait in the caller's thread until `completion` is settled. What it ended with is not looked at."""
        try:
            completion.result()
        except (KVStoreError, CancelledError, TimeoutError):
            pass
        if not completion.settled():
            self._warn()
            completion.settled(None)

    def _warn(self) -> None:
        self._logger.warning(
            "a backend holds memory of the engine's beyond the deadline; the answer waits until it lets go"
        )

    def _done(self, completion: Completion[Any], tell: Callable[[], None]) -> None:
        if completion.settled():
            self._call(tell)
            return
        with self._lock:
            self._late.append((completion, tell))
            if self._watching:
                return
            self._watching = True
        self._warn()
        threading.Thread(target=self._watch, name="kvstore-settle", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                late, self._late = self._late, []
            held: list[tuple[Completion[Any], Callable[[], None]]] = []
            for completion, tell in late:
                if completion.settled():
                    self._call(tell)
                else:
                    held.append((completion, tell))
            with self._lock:
                self._late = held + self._late
                if not self._late:
                    self._watching = False
                    return
            time.sleep(_LOOK_S)

    def _call(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception:  # of an engine's listeners, say: others wait for their answers
            self._logger.exception("an answer could not be told")


def outcomes_of(completion: Completion[Sequence[Outcome]], count: int) -> Sequence[Outcome]:
    """The outcomes of a completion that is done; an error of the whole batch is that of each."""
    try:
        return completion.result(0)
    except KVStoreError as error:
        return [Outcome.failed(error)] * count
    except (CancelledError, TimeoutError) as error:
        return [Outcome.failed(KVStoreError(f"given up: {type(error).__name__}"))] * count
