"""What LMCache's surfaces have in common: a store of opaque records, and when memory that was lent may be told free."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.backend import MISS, Outcome, Status
from kvstore.completion import CancelledError, Completion
from kvstore.config import load_config, read_yaml
from kvstore.errors import ConfigError, KVStoreError, PermanentError
from kvstore.keys import Key, opaque_key
from kvstore.record import KIND_OPAQUE, Header, opaque_spec
from kvstore.store import Store
from kvstore.targets import Item, Want, flat_bytes

__all__ = ["SIZES", "Client", "Grumbler", "Settler", "names_of", "open_client", "outcomes_of", "what_failed"]

logger = logging.getLogger("kvstore.integrations.lmcache")

SIZES = ("exact", "at_most")
"""How long a view must be: as the record; or at least so long, for what a serde wrote, which says its own length."""

_LOOK_S = 0.02  # how often memory is looked at that a hung backend still holds
_GRUMBLE_S = 10.0  # between two warnings about the same kind of trouble

_DEFAULTS: dict[str, Any] = {
    # What is being written lies in LMCache's memory, whose size it bounds itself; nothing is copied into our queue.
    "write_queue_bytes": 1 << 40,
    # Reads land in LMCache's memory and writes leave from it: the pool serves second looks only.
    "buffer_pool_bytes": 64 << 20,
}


def open_client(
    surface: str, remote_url: Any, config_file: str | os.PathLike[str] | None, options: dict[str, Any]
) -> Client:
    """A client for one of LMCache's surfaces.

    LMCache's own environment and file describe LMCache, not our store: `LMCACHE_*` is not read here.

    Raises:
        ConfigError: as `kvstore.open_store`; or `backend_options` among the options.
    """
    if "backend_options" in options:
        raise ConfigError(
            "backend_options may hold secrets, and LMCache writes its settings into its log: put them into a file and "
            "name it as config_file, or use environment variables KVSTORE_<SCHEME>_<OPTION>; what is no secret goes "
            "into the URL"
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    path = config_file if config_file is not None else env.get("KVSTORE_CONFIG_FILE")
    in_file = read_yaml(path) if path else {}
    for name, value in _DEFAULTS.items():
        if name not in in_file and f"KVSTORE_{name.upper()}" not in env:
            options.setdefault(name, value)
    config = load_config(remote_url, config_file=config_file, env=env, **options)
    if config.on_error == "raise":
        raise ConfigError(
            "option on_error=raise: one record in trouble would cost LMCache its whole batch; leave it out"
        )
    return Client(Store(config), surface)


class Client:
    """Opaque records under names of one surface. Calls return at once; answers come through `settler`.

    Args:
        surface: part of every name, so that what different surfaces call by one name stays apart.

    Attributes:
        settler: tells results once lent memory is free.
    """

    def __init__(self, store: Store, surface: str) -> None:
        self.store = store
        self.settler = Settler()
        self._prefix = f"lmcache/{surface}/"

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

    def exists(self, names: Sequence[str]) -> Completion[Sequence[Outcome]]:
        """Which records are there: OK or not."""
        return self.store.submit_stat(self.keys(names))

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


def names_of(keys: Sequence[Any]) -> list[str]:
    """LMCache's object keys as text, as `native_plugin` writes them, so that both surfaces share records."""
    return [
        f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
        + (f"@{key.cache_salt}" if key.cache_salt else "")
        for key in keys
    ]


class Grumbler:
    """Warns of trouble that LMCache does not pass on; at most every ten seconds, so that an outage fills no disk."""

    def __init__(self) -> None:
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
        logger.warning("%s: %s%s", what, trouble, f" ({silent} more since the last warning)" if silent else "")


class Settler:
    """Tells results of completions once the memory that was lent for them is really free.

    A completion is done at its deadline; a backend that hangs may touch the memory after that. LMCache takes memory
    back as soon as it has an answer, so its answer waits for `settled`. That is at once unless a deadline passed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: list[tuple[Completion[Any], Callable[[], None]]] = []
        self._watching = False

    def when_settled(self, completion: Completion[Any], tell: Callable[[], None]) -> None:
        """Call `tell` once `completion` is settled: in the thread that resolves it, or in one of our own. What `tell`
        raises is logged and goes no further."""
        completion.add_done_callback(lambda done: self._done(done, tell))

    def _done(self, completion: Completion[Any], tell: Callable[[], None]) -> None:
        if completion.settled():
            _call(tell)
            return
        with self._lock:
            self._late.append((completion, tell))
            if self._watching:
                return
            self._watching = True
        logger.warning("a backend holds memory of LMCache's beyond the deadline; the answer waits until it lets go")
        threading.Thread(target=self._watch, name="kvstore-lmcache-settle", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                late, self._late = self._late, []
            held: list[tuple[Completion[Any], Callable[[], None]]] = []
            for completion, tell in late:
                if completion.settled():
                    _call(tell)
                else:
                    held.append((completion, tell))
            with self._lock:
                self._late = held + self._late
                if not self._late:
                    self._watching = False
                    return
            time.sleep(_LOOK_S)


def _call(tell: Callable[[], None]) -> None:
    try:
        tell()
    except Exception:  # of LMCache's listeners, say: others wait for their answers
        logger.exception("an answer could not be told")


def outcomes_of(completion: Completion[Sequence[Outcome]], count: int) -> Sequence[Outcome]:
    """The outcomes of a completion that is done; an error of the whole batch is that of each."""
    try:
        return completion.result(0)
    except KVStoreError as error:
        return [Outcome.failed(error)] * count
    except (CancelledError, TimeoutError) as error:
        return [Outcome.failed(KVStoreError(f"given up: {type(error).__name__}"))] * count
