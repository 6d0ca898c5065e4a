"""`NodeInstance`: what a node lets be seen and done through the control API (`kvstore.control`).

    node = NodeServer(…)
    instance = NodeInstance(node, name="kv-0", http="http://10.0.0.1:8080")

Everything goes by the ways that clients' requests go, so nothing that is done here can bring back what was deleted, or
make the books wrong. Pinned records lie in memory (what is pinned comes up to it), at most half of it.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore._version import __version__
from kvstore.codec import LOSSY, codec_by_name, codec_number
from kvstore.control.instance import Health, Instance, InstanceInfo, Job, SnapshotPage, TierUsage, UnknownError
from kvstore.control.journal import Journal
from kvstore.errors import ClosedError, ConfigError, KVStoreError, TransientError
from kvstore.keys import Key
from kvstore_transport.addresses import parse_address

from . import _node_moves as moves
from ._node_hands import Hands
from ._node_jobs import Jobs, Progress
from ._node_space import Space
from ._node_tiers import DISK, MEMORY, REMOTE
from .node_server import NodeServer

__all__ = ["NodeInstance"]

_MOST_PINNED = 0.5  # of a namespace's memory
_SNAPSHOT_KEYS = 4096


class _Pin(NamedTuple):
    until: float  # monotonic
    nbytes: int
    settled: bool = False  # it has come into memory


class _Pins:
    """What is pinned in one namespace."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._most = int(space.store.pool.nbytes * _MOST_PINNED)
        self._lock = threading.Lock()
        self._pins: dict[Key, _Pin] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, sizes: dict[Key, int], until: float) -> set[Key]:
        """Those that are pinned now."""
        done: set[Key] = set()
        new: list[Key] = []
        with self._lock:
            for key, nbytes in sizes.items():
                before = self._pins.get(key)
                if before is None:
                    if self._nbytes + nbytes > self._most:
                        continue
                    self._nbytes += nbytes
                    new.append(key)
                self._pins[key] = _Pin(until, nbytes) if before is None else before._replace(until=until)
                done.add(key)
            with self._space.store.lock:
                self._space.store.policy.pin(new)
        return done

    def unpin(self, keys: Sequence[Key]) -> set[Key]:
        """Those that were pinned."""
        with self._lock:
            gone = {key: pin for key in keys if (pin := self._pins.pop(key, None)) is not None}
            self._nbytes -= sum(pin.nbytes for pin in gone.values())
            if gone:
                with self._space.store.lock:
                    self._space.store.policy.unpin([*gone])
        return {*gone}

    def among(self, keys: Sequence[Key]) -> set[Key]:
        """Which of them are pinned."""
        with self._lock:
            return {key for key in keys if key in self._pins}

    def settle(self, keys: Sequence[Key]) -> None:
        """They are in memory now."""
        with self._lock:
            for key in keys:
                if key in self._pins:
                    self._pins[key] = self._pins[key]._replace(settled=True)

    def sweep(self) -> None:
        """Unpin those whose time has come, and those that somebody has removed."""
        now = time.monotonic()
        with self._lock:
            due = [key for key, pin in self._pins.items() if pin.until <= now]
            settled = [key for key, pin in self._pins.items() if pin.settled]
        with self._space.store.lock:
            records = self._space.store.records
            due += [key for key in settled if key not in records]
        if due:
            self.unpin(due)


class NodeInstance(Instance):
    """See the module's docstring, and `Instance`.

    Args:
        node: serves; it is not closed by this.
        name: see `InstanceInfo`; "": the host's name and the node's port or socket.
        address: "host:port" of the node as others reach it; "": as it listens.
        http: URL of the control API, as others reach it.

    Raises:
        ConfigError: a name that cannot be one.
    """

    def __init__(self, node: NodeServer, *, name: str = "", address: str = "", http: str = "") -> None:
        name = name or _default_name(node)
        if not name.isprintable() or len(name.encode()) > 128 or set(name) & set("/,@"):
            raise ConfigError(
                f"an instance is not called {name[:80]!r}: at most 128 bytes of printable text without '/', ',' and '@'"
            )
        self._node = node
        self.journal: Journal = node.journal
        self._hands = {space_name: Hands(space) for space_name, space in node.spaces.items()}
        self._pins = {space_name: _Pins(space) for space_name, space in node.spaces.items()}
        self._jobs = Jobs()
        tiers = {tier for hands in self._hands.values() for tier in hands.tiers}
        self._info = InstanceInfo(
            name, address or node.address, node.unix_path, http, __version__, [*node.namespaces],
            [tier for tier in (MEMORY, DISK, REMOTE) if tier in tiers], time.time(),
        )  # fmt: skip
        node.on_sweep(self._sweep)

    def _sweep(self) -> None:
        for pins in self._pins.values():
            pins.sweep()

    def _space(self, namespace: str) -> Hands:
        hands = self._hands.get(namespace)
        if hands is None:
            raise UnknownError(f"there is no namespace {namespace[:80]!r} here")
        if self._jobs.closed or self._node.draining:
            raise ClosedError("the node is shutting down")
        return hands

    def info(self) -> InstanceInfo:
        return self._info

    # Where records are.

    def lookup(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[str | None]:
        hands = self._space(namespace)
        found: list[str | None] = [None] * len(keys)
        todo = [*range(len(keys))]
        for tier in hands.tiers:
            if not todo:
                break
            if time.monotonic() >= deadline:
                raise TransientError(f"the deadline passed before tier {tier} was asked", operation="lookup")
            left: list[int] = []  # also what a tier could not say: the others may have it, and `health` has the trouble
            for at, outcome in zip(todo, hands.stat(tier, [keys[at] for at in todo], deadline), strict=True):
                if outcome.ok:
                    found[at] = tier
                else:
                    left.append(at)
            todo = left
        return found

    # Pins.

    def pin(self, namespace: str, keys: Sequence[Key], *, ttl_s: float, deadline: float) -> list[bool]:
        if not ttl_s > 0:
            raise ConfigError(f"ttl_s is {ttl_s:g}; a pin lasts more than 0 seconds")
        hands, pins = self._space(namespace), self._pins[namespace]
        distinct = [*dict.fromkeys(keys)]
        # Pinned before they are brought up: the next one must not push out the last.
        below = hands.space.below
        sizes = {key: size for key, size in zip(distinct, hands.in_memory(distinct), strict=True) if size >= 0}
        missing = [key for key in distinct if key not in sizes]
        if missing and below is not None:
            for key, outcome in zip(missing, below.sizes(missing, deadline), strict=True):
                if outcome.ok:
                    sizes[key] = outcome.nbytes
        before = pins.among(distinct)
        pinned = pins.pin(sizes, time.monotonic() + ttl_s)
        there = hands.bring_up([key for key in distinct if key in pinned], deadline)
        gone = [key for key, yes in zip([key for key in distinct if key in pinned], there, strict=True) if not yes]
        pins.unpin([key for key in gone if key not in before])
        pinned.difference_update(gone)
        pins.settle([*pinned])
        return [key in pinned for key in keys]

    def unpin(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[bool]:
        self._space(namespace)
        gone = self._pins[namespace].unpin([*dict.fromkeys(keys)])
        return [key in gone for key in keys]

    # Jobs.

    def clear(
        self, namespace: str, *, model: str | None = None, keys: Sequence[Key] | None = None,
        prefix: Sequence[Key] | None = None,
    ) -> str:  # fmt: skip
        hands, pins = self._space(namespace), self._pins[namespace]
        if sum(each is not None for each in (model, keys, prefix)) > 1:
            raise ConfigError("clear takes one of model, keys and prefix, or none of them for all of the namespace")

        def work(progress: Progress) -> None:
            if model is not None:
                moves.clear_model(hands, model, progress)
            elif keys is not None:
                pins.unpin(keys)
                moves.clear_keys(hands, keys, progress)
            elif prefix is not None:
                with hands.space.store.lock:
                    links = hands.space.store.policy.links()
                behind = moves.hanging_on(links, prefix[-1:])
                pins.unpin([*prefix, *behind])
                moves.clear_keys(hands, [*reversed(behind), *reversed(prefix)], progress)
            else:
                moves.clear_namespace(hands, progress)

        return self._jobs.start(namespace, "clear", work)

    def move(self, namespace: str, keys: Sequence[Key], *, src: str, dst: str) -> str:
        hands = self._space(namespace)
        hands.check(src)
        pinned = self._pins[namespace].among
        if ":" not in dst:
            hands.check(dst)
            if src == dst:
                raise ConfigError(f"src and dst are both {src!r}")
            put = functools.partial(hands.put, dst)
            return self._jobs.start(
                namespace, "move", lambda progress: moves.move(hands, keys, src, put, pinned, progress)
            )
        try:
            address = parse_address(dst)
        except ValueError as error:
            raise ConfigError(f"dst {dst[:80]!r} is neither a tier nor the address of an instance: {error}") from None
        if dst in (self._node.address, self._info.address) or address.path:
            raise ConfigError(f"dst {dst[:80]!r} is not host:port of another instance")

        def work(progress: Progress) -> None:
            node = moves.open_node(dst, namespace, hands.space.namespace.token)
            try:
                moves.move(
                    hands, keys, src, lambda held, deadline: moves.put_to(node, held, deadline), pinned, progress
                )
            finally:
                node.close()

        return self._jobs.start(namespace, "move", work)

    def transcode(self, namespace: str, keys: Sequence[Key], *, codec: str, level: int | None) -> str:
        hands = self._space(namespace)
        if codec_number(codec) in LOSSY:
            raise ConfigError(
                f"codec {codec} loses something, which is part of a record's name; choose raw, lz4 or shuffle-zstd"
            )
        if level not in (None, 0):
            raise ConfigError(f"level {level}: codec {codec} has level 0 only")
        found = codec_by_name(codec)
        return self._jobs.start(
            namespace, "transcode", lambda progress: moves.transcode(hands, keys, found, progress)
        )  # fmt: skip

    def job(self, job_id: str) -> Job:
        return self._jobs.get(job_id)

    # How it is.

    def usage(self) -> Sequence[TierUsage]:
        found: list[TierUsage] = []
        for namespace, hands in self._hands.items():
            space = hands.space
            memory = space.backend.stats()
            found.append(
                TierUsage(
                    namespace,
                    MEMORY,
                    "",
                    memory.nbytes,
                    memory.capacity,
                    memory.records,
                    len(self._pins[namespace]),
                    space.hits_in_memory,
                    memory.evicted,
                )
            )
            for place in hands.places:
                found.append(self._usage_below(namespace, space, place.name, place.url, place.number))
        return found

    @staticmethod
    def _usage_below(namespace: str, space: Space, tier: str, url: str, number: int) -> TierUsage:
        below = space.below
        assert below is not None
        tiers = below.lower.tiers
        if tiers is not None:
            stats = tiers.stats()[number]
            bounded = stats["capacity"] is not None
            return TierUsage(
                namespace, tier, url, int(stats["used"]), int(stats["capacity"] or 0),
                int(stats["records"]) if bounded else -1, 0, int(stats["hits"]),
                int(stats["demotions"]) + int(stats["released"]) + int(stats["drops"]),
            )  # fmt: skip
        used, capacity, records, evicted = below.folder_usage()
        return TierUsage(namespace, tier, url, used, capacity, records, 0, below.counts()["loaded"], evicted)

    def health(self, *, deadline: float) -> Health:
        if self._node.draining:
            return Health(False, False, 1.0, ("the node is shutting down",))
        load = 0.0
        problems: list[str] = []
        ready = True
        for hands in self._hands.values():
            space = hands.space
            load = max(load, space.gate.used / space.gate.total + space.gate.waiting)
            if space.below is None:
                continue
            for tier, sentence in space.below.troubles():
                problems.append(f"{space.namespace.shown}: {sentence}")
                ready = ready and tier != DISK
        return Health(True, ready, load, tuple(problems))

    def snapshot(self, *, deadline: float) -> Iterator[SnapshotPage]:
        for namespace, hands in self._hands.items():
            for tier in hands.tiers:
                if tier == REMOTE:
                    continue
                try:
                    for page in hands.pages(tier, deadline):
                        for at in range(0, len(page), _SNAPSHOT_KEYS):
                            some = page[at : at + _SNAPSHOT_KEYS]
                            yield SnapshotPage(namespace, tier, b"".join(info.key for info in some))
                except TransientError:
                    raise
                except KVStoreError as error:
                    raise TransientError(
                        f"tier {tier} cannot be listed: {error.message}", operation="snapshot", cause=error
                    ) from error

    def close(self) -> None:
        """End the jobs and the waits of those who follow the journal. The node goes on."""
        self._jobs.close()
        self.journal.wake()


def _default_name(node: NodeServer) -> str:
    where = node.address.rpartition(":")[2] if node.address else node.unix_path.replace("/", "_")
    return f"{socket.gethostname()}:{where}"[-128:]
