"""What is measured: a bare backend, or the whole store over one, behind one small face.

A request is prepared outside the timing (the caller of a backend has its `Read`s in hand) and then called in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.backend import Outcome, Read, Write
from kvstore.keys import Key, opaque_key
from kvstore.registry import parse_url

if TYPE_CHECKING:
    from kvstore.backend import Backend
    from kvstore.buffers import Slab
    from kvstore.registry import BackendURL

__all__ = ["BackendTarget", "Call", "StoreTarget", "Target", "configured", "record_files"]

Call = Callable[[float], Sequence[Outcome]]
"""A prepared request: given the deadline, does it and returns one outcome per record."""


class Target(ABC):
    """One thing that is measured.

    Attributes:
        url: shown in rows; without secrets.
        scheme: the label of its rows and figures.
        lanes: useful number of threads that call it at once.
        max_bytes: largest record it takes.
        pids: other processes whose CPU counts as ours.
        whole: True if one call takes the whole batch, whatever the number of lanes (the store has lanes of its own).
    """

    url: str
    scheme: str
    lanes: int
    max_bytes: int = 1 << 40
    pids: tuple[int, ...] = ()
    whole = False

    def key(self, name: str) -> Key:
        """The key of an opaque record of this name."""
        return opaque_key(name)

    @abstractmethod
    def reader(self, keys: Sequence[Key], destinations: Sequence[memoryview]) -> Call:
        """A request that reads whole records of `len(destination)` bytes."""

    @abstractmethod
    def writer(self, keys: Sequence[Key], sources: Sequence[memoryview]) -> Call:
        """A request that stores records."""

    @abstractmethod
    def delete(self, keys: Sequence[Key], deadline: float) -> Sequence[Outcome]:
        """Remove records."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def _lanes_option(url: BackendURL, lanes: int | None) -> dict[str, Any]:
    """The option that gives a backend this many lanes, if it has one and a number was asked for."""
    from kvstore.registry import backend_class

    if lanes is None or all(option.name != "lanes" for option in backend_class(url.scheme).options):
        return {}
    return {"lanes": lanes}


def configured(url: BackendURL) -> dict[str, object]:
    """The options that the configuration file and the environment hold for a backend, as a store takes them: a token,
    for instance, which no URL may hold. Raises `ConfigError`."""
    from kvstore.config import load_config

    return load_config(url).backend_overrides(url)


class BackendTarget(Target):
    """The bare transfer: `get_into` and `put` of a backend, nothing verified, called from as many threads as lanes.

    Opened with the options that a store would open it with (`configured`).
    """

    def __init__(self, url: BackendURL, backend: Backend | None = None, *, lanes: int | None = None) -> None:
        if backend is None:
            from kvstore.registry import open_backend

            backend = open_backend(url, **{**configured(url), **_lanes_option(url, lanes)})
        self.url, self.scheme = str(url), url.scheme
        self.lanes = max(1, backend.limits.lanes)
        self.max_bytes = backend.limits.max_value_bytes
        self.backend = backend

    def reader(self, keys: Sequence[Key], destinations: Sequence[memoryview]) -> Call:
        reads = [Read(key, dst) for key, dst in zip(keys, destinations, strict=True)]
        get_into = self.backend.get_into
        return lambda deadline: get_into(reads, deadline=deadline)

    def writer(self, keys: Sequence[Key], sources: Sequence[memoryview]) -> Call:
        writes = [Write(key, (src,)) for key, src in zip(keys, sources, strict=True)]
        put = self.backend.put
        return lambda deadline: put(writes, deadline=deadline)

    def delete(self, keys: Sequence[Key], deadline: float) -> Sequence[Outcome]:
        return self.backend.delete(keys, deadline=deadline)

    def register(self, slabs: Sequence[Slab]) -> None:
        """Make the memory of the measurement known, as a store does with its pool's."""
        for slab in slabs:
            self.backend.register(slab)

    def close(self) -> None:
        self.backend.close()


class StoreTarget(Target):
    """The whole store: header, checksums and scheduling included; every get is verified inside the timing.

    One call hands over the whole batch; the store spreads it over the lanes of its backend. Records are stored raw,
    whatever the environment says about codecs, and with the priority of somebody who waits.

    Args:
        lanes: lanes of the backend, if it has the option; None leaves it to the backend.
        queue_bytes: what one batch needs of the write queue.
    """

    whole = True

    def __init__(self, url: BackendURL, *, lanes: int | None, queue_bytes: int) -> None:
        from kvstore.store import open_store

        options: dict[str, Any] = {}
        if own := _lanes_option(url, lanes):
            options["backend_options"] = {url.scheme: own}
        self.url, self.scheme = str(url), f"store_{url.scheme}"
        self._store = open_store(
            str(url), remote_serde="raw", on_error="miss", replicas=1, write_queue_bytes=queue_bytes, **options
        )
        self.lanes = sum(each["lanes"] for each in self._store.stats()["backends"].values())

    def reader(self, keys: Sequence[Key], destinations: Sequence[memoryview]) -> Call:
        from kvstore.record import opaque_spec
        from kvstore.store import Want

        wants = [Want(key, dst, opaque_spec(len(dst))) for key, dst in zip(keys, destinations, strict=True)]
        submit = self._store.submit_get
        return lambda deadline: submit(wants, deadline=deadline).result()

    def writer(self, keys: Sequence[Key], sources: Sequence[memoryview]) -> Call:
        from kvstore.record import opaque_spec
        from kvstore.store import Item, Priority

        items = []
        for key, src in zip(keys, sources, strict=True):
            spec = opaque_spec(len(src))
            items.append(Item(key, spec.split(src), spec))
        submit, demand = self._store.submit_put, Priority.DEMAND
        return lambda deadline: submit(items, priority=demand, deadline=deadline).result()

    def delete(self, keys: Sequence[Key], deadline: float) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = self._store.submit_delete(keys, deadline=deadline).result()
        return outcomes

    def close(self) -> None:
        self._store.close()


def record_files(url: str, keys: Sequence[Key], nbytes: int) -> list[tuple[Path, int]] | None:
    """The files that hold records of a `file://` URL, and where in each the last `nbytes` bytes begin; None if they
    do not lie in files named by their keys."""
    found = {path.name[:64]: path for path in Path(parse_url(url).path).glob("*/*.kv")}
    paths = [found.get(key.hex()) for key in keys]
    files = [(path, path.stat().st_size - nbytes) for path in paths if path is not None]
    return files if len(files) == len(keys) else None
