"""Opens what lies below a node's memory: a folder, a remote place (any URL of `kvstore`), or one above the other.

With a remote place it is a `kvstore.tiers` hierarchy, as in a store: the folder acknowledges what comes from memory and
brings it down in the background, so that a slow or broken remote place delays nobody; what was read from the remote
place twice comes up to the folder. A folder alone is a `file` backend, which keeps its own cap.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.backend import Backend, Outcome, Status
from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.registry import BackendURL, open_backend, parse_url
from kvstore.tiers.backend import TieredBackend
from kvstore.tiers.opening import open_tiers
from kvstore.wrappers import MeteredBackend, Wrapper
from kvstore.wrappers.base import Operation

from .file.backend import FileBackend

__all__ = ["DISK", "MEMORY", "REMOTE", "Lower", "Note", "Place", "check_disk", "open_lower"]

MEMORY, DISK, REMOTE = "memory", "disk", "remote"
"""Names of a node's tiers, the fastest first."""

Note = Callable[[str, str, Sequence[Key]], None]
"""Told of a batch: (tier, "admit" or "evict", keys)."""


class Place(NamedTuple):
    """One tier below the memory.

    Attributes:
        name: `DISK` or `REMOTE`.
        url: without the values of its options.
        number: its place in the hierarchy; -1: it is not in one.
        backend: to ask it alone. Writes and removals go through the whole.
    """

    name: str
    url: str
    number: int
    backend: Backend


class Lower(NamedTuple):
    """What lies below the memory, as one backend, and its parts, the fastest first."""

    backend: Backend
    places: Sequence[Place]

    @property
    def tiers(self) -> TieredBackend | None:
        """The hierarchy, if it is one."""
        return self.backend if isinstance(self.backend, TieredBackend) else None


class _Noted(Wrapper):
    """Tells what came into a place and what left it, once per batch."""

    def __init__(self, inner: Backend, note: Callable[[str, Sequence[Key]], None]) -> None:
        super().__init__(inner)
        self._note = note

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        outcomes = super()._run(operation, items, deadline)
        if operation == "put":
            stored = [write.key for write, each in zip(items, outcomes, strict=True) if each.status is Status.OK]
            if stored:
                self._note("admit", stored)
        elif operation in ("delete", "quarantine"):
            gone = [key for key, each in zip(items, outcomes, strict=True) if each.status is Status.OK]
            if gone:
                self._note("evict", gone)
        return outcomes


def check_disk(url: str) -> BackendURL:
    """The URL of a node's folder. Raises `ConfigError` if it is none."""
    parsed = parse_url(url)
    if parsed.scheme != "file":
        raise ConfigError(
            f"the disk below a node is a folder, file:///…, not {parsed.scheme}://; what lies elsewhere is 'remote'"
        )
    return parsed


def open_lower(disk: str, remote: str, metrics: Metrics, note: Note) -> Lower:
    """Open what lies below the memory; at least one of the two is given.

    Args:
        disk: URL of a folder, or ""; above a remote place with its option `bytes`.
        remote: any URL, or "". Options that may not stand in a URL come from the environment, `KVSTORE_<SCHEME>_…`.
        metrics: where the wrappers count.
        note: told what comes into the folder and leaves it.

    Raises:
        ConfigError: a URL makes no sense, or cannot be opened.
    """
    if not remote:
        url = check_disk(disk)
        folder = open_backend(url)
        if isinstance(folder, FileBackend):
            folder.on_evicted(lambda keys: note(DISK, "evict", keys))
        if folder.metrics is not None:
            metrics.include(folder.metrics)
        noted = _Noted(MeteredBackend(folder, metrics), lambda op, keys: note(DISK, op, keys))
        return Lower(noted, [Place(DISK, url.shown, -1, noted)])
    urls = [check_disk(disk)] if disk else []
    urls.append(parse_url(remote))
    specs: list[object] = [{"url": urls[-1]}]
    if disk:
        capacity = urls[0].options.get("bytes")
        if not capacity:
            raise ConfigError(
                "with something remote below it the disk needs a cap, or nothing would ever leave it: "
                f"{urls[0].base}?bytes=400GiB"
            )
        specs.insert(0, {"url": urls[0], "write": "back", "promote": "second_use", "queue": capacity})
    config = load_config(tiers=specs, env=_variables(os.environ, urls))
    tiers = open_tiers(config, metrics)
    if disk:
        tiers.tiers[0].backend = _Noted(tiers.tiers[0].backend, lambda op, keys: note(DISK, op, keys))
    names = [DISK, REMOTE] if disk else [REMOTE]
    places = [
        Place(name, url.shown, number, tier.backend)
        for number, (name, url, tier) in enumerate(zip(names, urls, tiers.tiers, strict=True))
    ]
    return Lower(tiers, places)


def _variables(env: Mapping[str, str], urls: Sequence[BackendURL]) -> dict[str, str]:
    """The variables that are options of these backends; those of a store in the same shell are none of ours."""
    prefixes = tuple(f"KVSTORE_{re.sub('[^A-Z0-9]', '_', url.scheme.upper())}_" for url in urls)
    return {name: value for name, value in env.items() if name.startswith(prefixes)}
