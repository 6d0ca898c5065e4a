"""What tests of the control API share: an instance in plain memory, servers of it, and a controller with nodes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.control import (
    Client,
    ControlSettings,
    Health,
    Instance,
    InstanceInfo,
    Job,
    Journal,
    Reporter,
    SnapshotPage,
    TierUsage,
    UnknownError,
)
from kvstore.control.instance import DONE
from kvstore.control.journal import ADMIT, CLEAR, EVICT
from kvstore.errors import ConfigError
from kvstore.keys import Key, KeyContext, chunk_keys
from kvstore.layout import KVLayout
from kvstore.metrics import Metrics

CONTEXT = KeyContext("org/model", KVLayout(2, 2, 64), "bfloat16")
TIERS = ("memory", "disk")


def keys_of(seed: int, count: int) -> list[Key]:
    """Keys of a prompt of `count` chunks; prompts of different seeds share none."""
    return chunk_keys([seed % 1000 + 1, seed // 1000] * (4 * count), context=CONTEXT, chunk_size=8)[:count]


class PlainInstance(Instance):
    """An `Instance` whose tiers are dicts from keys to models' names. Jobs are over when they are begun."""

    def __init__(
        self, name: str = "n0", namespaces: Sequence[str] = ("", "team-a"), *, address: str = "127.0.0.1:1",
        http: str = "", started: float | None = None, journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.journal = journal or Journal()
        self.lock = threading.Lock()
        self.tiers: dict[str, dict[str, dict[Key, str]]] = {
            namespace: {tier: {} for tier in TIERS} for namespace in namespaces
        }
        self.pins: dict[str, set[Key]] = {namespace: set() for namespace in namespaces}
        self.jobs: dict[str, Job] = {}
        self.healthy = Health(True, True, 0.0)
        self.calls: list[tuple[str, Any]] = []
        self.numbers = itertools.count(1)
        self.who = InstanceInfo(
            name, address, "", http, "0", tuple(namespaces), TIERS, time.time() if started is None else started
        )

    def info(self) -> InstanceInfo:
        return self.who

    def _space(self, namespace: str) -> dict[str, dict[Key, str]]:
        if namespace not in self.tiers:
            raise UnknownError(f"there is no namespace {namespace!r}")
        return self.tiers[namespace]

    def put(self, namespace: str, tier: str, keys: Sequence[Key], model: str = "org/model") -> None:
        with self.lock:
            self._space(namespace)[tier].update(dict.fromkeys(keys, model))
            self.journal.append(namespace, tier, ADMIT, keys)

    def evict(self, namespace: str, tier: str, keys: Sequence[Key]) -> None:
        with self.lock:
            for key in keys:
                self._space(namespace)[tier].pop(key, None)
            self.journal.append(namespace, tier, EVICT, keys)

    def lookup(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[str | None]:
        space = self._space(namespace)
        return [next((tier for tier in TIERS if key in space[tier]), None) for key in keys]

    def pin(self, namespace: str, keys: Sequence[Key], *, ttl_s: float, deadline: float) -> list[bool]:
        there = [tier is not None for tier in self.lookup(namespace, keys, deadline=deadline)]
        self.calls.append(("pin", ttl_s))
        self.pins[namespace] |= {key for key, found in zip(keys, there, strict=True) if found}
        return there

    def unpin(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[bool]:
        self._space(namespace)
        had = [key in self.pins[namespace] for key in keys]
        self.pins[namespace] -= set(keys)
        return had

    def _job(self, namespace: str, kind: str, count: int, error: str = "") -> str:
        name = f"j{next(self.numbers)}"
        self.jobs[name] = Job(name, namespace, kind, DONE, count, count, 0, 0, error, time.time())
        return name

    def clear(
        self, namespace: str, *, model: str | None = None, keys: Sequence[Key] | None = None,
        prefix: Sequence[Key] | None = None,
    ) -> str:  # fmt: skip
        chosen = keys if keys is not None else prefix
        gone: set[Key] = set()
        for tier, records in self._space(namespace).items():
            doomed = [
                key for key, whose in records.items()
                if (chosen is None or key in chosen) and (model is None or whose == model)
            ]  # fmt: skip
            gone |= set(doomed)
            if doomed and len(doomed) == len(records):
                with self.lock:
                    records.clear()
                    self.journal.append(namespace, tier, CLEAR)
            else:
                self.evict(namespace, tier, doomed)
        return self._job(namespace, "clear", len(gone))

    def move(self, namespace: str, keys: Sequence[Key], *, src: str, dst: str) -> str:
        space = self._space(namespace)
        if src not in space or (dst not in space and ":" not in dst):
            raise UnknownError(f"there is no tier {src if src not in space else dst!r}")
        self.calls.append(("move", dst))
        moved = [key for key in keys if key in space[src]]
        self.evict(namespace, src, moved)
        if dst in space:
            self.put(namespace, dst, moved)
        return self._job(namespace, "move", len(moved))

    def transcode(self, namespace: str, keys: Sequence[Key], *, codec: str, level: int | None) -> str:
        self._space(namespace)
        if codec not in ("raw", "lz4"):
            raise ConfigError(f"codec {codec!r} cannot be used here")
        self.calls.append(("transcode", (codec, level)))
        return self._job(namespace, "transcode", len(keys))

    def job(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise UnknownError(f"there is no job {job_id!r}")
        return self.jobs[job_id]

    def usage(self) -> Sequence[TierUsage]:
        return [
            TierUsage(namespace, tier, "", 100 * len(records), 1 << 20, len(records), len(self.pins[namespace]))
            for namespace, space in self.tiers.items() for tier, records in space.items()
        ]  # fmt: skip

    def health(self, *, deadline: float) -> Health:
        return self.healthy

    def snapshot(self, *, deadline: float) -> Iterator[SnapshotPage]:
        for namespace, space in self.tiers.items():
            for tier, records in space.items():
                yield SnapshotPage(namespace, tier, b"".join(records))


@contextlib.contextmanager
def served(instance: Instance, **settings: Any) -> Iterator[str]:
    """The URL of a server of `instance` on loopback."""
    from kvstore.control.app import build_app
    from kvstore.control.server import HttpServer

    control = ControlSettings(**settings)
    with HttpServer(build_app(instance, settings=control, metrics=Metrics()), control) as server:
        yield server.url


@contextlib.contextmanager
def plain_node(name: str, **settings: Any) -> Iterator[tuple[PlainInstance, str]]:
    """A `PlainInstance` that knows its own URL, served."""
    from kvstore.control.app import build_app
    from kvstore.control.server import HttpServer, listen

    control = ControlSettings(**settings)
    listener = listen(control)
    port = listener.getsockname()[1]
    url = f"{'https' if control.tls_cert else 'http'}://127.0.0.1:{port}"
    instance = PlainInstance(name, address=f"127.0.0.1:{port}", http=url)
    app = build_app(instance, settings=control, metrics=Metrics())
    with HttpServer(app, control, listener=listener) as server:
        assert server.url == url
        yield instance, url


@contextlib.contextmanager
def controller(controlled: Any = None, **settings: Any) -> Iterator[tuple[Any, str]]:
    """A controller, served: itself and its URL."""
    from kvstore.control.app import build_controller_app
    from kvstore.control.controller import Controller
    from kvstore.control.server import HttpServer

    found = controlled if controlled is not None else Controller()
    control = ControlSettings(**settings)
    app = build_controller_app(found, settings=control, metrics=Metrics())
    with HttpServer(app, control) as server:
        yield found, server.url


@contextlib.contextmanager
def reporting(instance: Instance, url: str, token: str = "") -> Iterator[Reporter]:
    reporter = Reporter(instance, Client(url, token=token), interval_s=0.2)
    try:
        yield reporter
    finally:
        reporter.close()


def eventually(question: Callable[[], Any], *, within: float = 20.0) -> Any:
    """The first true answer. Asked again and again, since another thread brings it about; late is a failure."""
    until = time.monotonic() + within
    while True:
        found = question()
        if found:
            return found
        assert time.monotonic() < until, f"still {found!r} after {within} s"
        time.sleep(0.01)
