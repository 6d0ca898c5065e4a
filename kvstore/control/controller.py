"""`Controller`: what several nodes report to. It knows who has what, says where a prompt should go, and passes on what
is to be done.

Nothing is kept on disk: a controller that was started anew asks every node for a snapshot when it next reports. What it
knows may be a second old; it is used to choose, never to read: who is sent to a node that has lost a record gets a
miss.

It has no rights of its own over nodes: what is to be done there is sent with the token of whoever asked.
"""

from __future__ import annotations

import asyncio
import binascii
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metric, Metrics

from .client import Client
from .index import TIERS, Index
from .instance import Health, InstanceInfo, Job, TierUsage, UnknownError
from .journal import ADMIT, EVICT, split_keys
from .messages import (
    Acted,
    Address,
    Failure,
    Finished,
    InstanceHealth,
    Lookup,
    Place,
    ReportReply,
    Route,
    Started,
    Worker,
)
from .node import Calls, address_of
from .requests import EventModel, Prompt, Report, SnapshotModel
from .routing import RoutePolicy, choose
from .service import Ask, Readiness, Service, Target, best_of, place_of, seen_usage

__all__ = ["CONTROLLER_METRICS", "Controller"]

T = TypeVar("T")
_Call = Callable[[str, Client, float], T]
"""What is asked of a node: its name, a client, seconds that are left."""

CONTROLLER_METRICS: tuple[Metric, ...] = (
    Metric("kvstore_controller_workers", "gauge", "Instances by state: ready, draining, loading, lost.", ("state",)),
    Metric("kvstore_controller_chunks", "gauge", "Records that the index knows."),
    Metric("kvstore_controller_forgotten_total", "counter", "Records dropped from the index for want of room."),
    Metric("kvstore_controller_reports_total", "counter", "Reports of nodes."),
    Metric("kvstore_controller_event_keys_total", "counter", "Keys in events, by what happened to them.", ("op",)),
    Metric("kvstore_controller_snapshots_total", "counter", "Snapshots of nodes that were taken in whole."),
)  # fmt: skip
"""What a controller counts besides its requests."""

_STATES = ("ready", "draining", "loading", "lost")
_SLICE = 1024  # keys that are taken in at a time; other requests have their turn in between
_TICK_S = 1.0
_MOST_NODES = 4096


class _GoneError(Exception):
    """The node was forgotten, or started anew, while its report was taken in."""


@dataclass(slots=True)
class _Node:
    """An instance that reports.

    Attributes:
        epoch: of its journal.
        seq: the last event that the index knows; -1: nothing is known.
        slot: in the index; None: nothing is known.
        loading: a snapshot that is coming in: its id, the next page, its slot and its `at`.
        seen: when it was heard of last.
        gone: forgotten. Whoever waited must look: its slots may be another's by now.
    """

    info: InstanceInfo
    health: Health
    usage: Sequence[TierUsage]
    client: Client | None
    seen: float
    epoch: str
    seq: int = -1
    slot: int | None = None
    loading: tuple[str, int, int, int] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False


class Controller(Service):
    """Answers for all nodes that report. All of it happens on the server's loop, but for calls of nodes.

    Args:
        policy: of `route`.
        capacity: records in the index.
        lost_s: a node that has not reported for so long is not used.
        forget_s: and after so long, forgotten.
        ca: PEM file with the authorities of the nodes' certificates, and then each must have one; "": those of the
            system.
        threads: calls of nodes at a time.
        metrics: where it counts; see `CONTROLLER_METRICS`.
        clock: seconds that only grow.

    Raises:
        ConfigError: times that make no sense.
    """

    role = "controller"

    def __init__(
        self, *, policy: RoutePolicy | None = None, capacity: int = 16 << 20, lost_s: float = 10.0,
        forget_s: float = 600.0, ca: str = "", threads: int = 32, metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not 0 < lost_s <= forget_s:
            raise ConfigError(f"lost_s={lost_s:g} must be more than 0 and at most forget_s={forget_s:g}")
        self._policy = policy or RoutePolicy()
        self._index = Index(capacity)
        self._lost_s, self._forget_s = lost_s, forget_s
        self._ca = ca
        self._calls = Calls(threads)
        self._metrics = metrics if metrics is not None else Metrics()
        for metric in CONTROLLER_METRICS:
            self._metrics.define(metric)
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._forgotten = 0
        self._ticking: asyncio.Task[None] | None = None

    # What nodes say.

    async def report(self, report: Report) -> ReportReply:
        node = self._hear(report)
        self._metrics.add("kvstore_controller_reports_total")
        async with node.lock:
            try:
                return await self._take_in(node, report)
            except _GoneError:
                return ReportReply(snapshot=True)

    async def _take_in(self, node: _Node, report: Report) -> ReportReply:
        if node.gone:
            raise _GoneError
        if report.snapshot is not None:
            return await self._load(node, report.snapshot)
        self._drop_loading(node)
        if node.slot is None or report.since > node.seq:
            return ReportReply(snapshot=True)
        if report.next >= node.seq:  # else all of it is known: the last reply was lost
            for event in report.events:
                await self._apply(node, node.slot, event)
            node.seq = report.next
        return ReportReply(snapshot=False, next=node.seq)

    def _hear(self, report: Report) -> _Node:
        """The node that reports, as it is now."""
        told = report.instance
        info = InstanceInfo(
            told.name, told.address, told.unix, told.http, told.version, tuple(told.namespaces), tuple(told.tiers),
            told.started,
        )  # fmt: skip
        health = Health(report.health.ok, report.health.ready, report.health.load, tuple(report.health.problems))
        now = self._clock()
        node = self._nodes.get(info.name)
        other = node is not None and node.epoch != report.epoch
        # Once the known one is lost the newcomer has its name, whatever its host's clock says.
        if node is not None and other and self._state(node) != "lost" and (
            (info.started, report.epoch) < (node.info.started, node.epoch)
        ):  # fmt: skip
            raise ConfigError(
                f"another instance of the name {info.name!r} reports, which was started later, at {node.info.address} "
                f"({node.info.http}): give each node a name of its own"
            )
        if node is not None and (other or node.info.tiers != info.tiers):
            self._forget(node)
            node = None
        if node is None:
            if len(self._nodes) >= _MOST_NODES:
                raise TransientError(f"{len(self._nodes)} instances report here already", operation="report")
            client = Client(info.http, ca=self._ca) if info.http else None  # refuses plain HTTP if there is a `ca`
            node = self._nodes[info.name] = _Node(info, health, (), client, now, report.epoch)
        node.info, node.health, node.seen = info, health, now
        if report.usage is not None:
            node.usage = [TierUsage(**usage.model_dump()) for usage in report.usage]
        return node

    async def _load(self, node: _Node, page: SnapshotModel) -> ReportReply:
        """Take in a page of a snapshot; when the last one is there, it replaces what was known."""
        if page.page == 0:
            self._drop_loading(node)
            node.loading = (page.id, 0, self._index.open(), page.at)
        if node.loading is None or node.loading[:2] != (page.id, page.page):
            self._drop_loading(node)
            return ReportReply(snapshot=True)
        name, number, slot, at = node.loading
        for event in page.pages:
            await self._apply(node, slot, event)
        if not page.last:
            node.loading = (name, number + 1, slot, at)
            return ReportReply(snapshot=False, next=at)
        if node.slot is not None:
            self._index.retire(node.slot)
        node.slot, node.seq, node.loading = slot, at, None
        self._metrics.add("kvstore_controller_snapshots_total")
        return ReportReply(snapshot=False, next=at)

    async def _apply(self, node: _Node, slot: int, event: EventModel) -> None:
        """Take in an event, in slices; others have their turn in between.

        Raises:
            ConfigError: the event makes no sense.
            _GoneError: `node` has gone meanwhile.
        """
        for what, word, named in (
            ("tier", event.tier, node.info.tiers), ("namespace", event.namespace, node.info.namespaces),
        ):  # fmt: skip
            if word not in named:
                raise ConfigError(
                    f"instance {node.info.name!r} reports of {what} {word[:80]!r}, which it has not named"
                )
        tier = min(node.info.tiers.index(event.tier), TIERS - 1)
        if event.op == "clear":
            for changed in self._index.clear(slot, event.namespace, tier):
                if changed:
                    await self._others(node)
            return
        try:
            keys = split_keys(binascii.a2b_base64(event.keys))
        except binascii.Error as error:
            raise ConfigError(f"the keys of an event are not base64: {error}") from error
        change = self._index.admit if event.op == ADMIT else self._index.evict
        assert event.op in (ADMIT, EVICT)
        for at in range(0, len(keys), _SLICE):
            change(slot, event.namespace, tier, keys[at : at + _SLICE])
            if len(keys) > _SLICE:
                await self._others(node)
        self._metrics.add("kvstore_controller_event_keys_total", event.op, amount=len(keys))

    async def _others(self, node: _Node) -> None:
        """Other requests have their turn. Raises `_GoneError`."""
        await asyncio.sleep(0)
        if node.gone:
            raise _GoneError

    def _drop_loading(self, node: _Node) -> None:
        if node.loading is not None:
            self._index.retire(node.loading[2])
            node.loading = None

    def _forget(self, node: _Node) -> None:
        node.gone = True
        self._drop_loading(node)
        if node.slot is not None:
            self._index.retire(node.slot)
            node.slot = None
        if node.client is not None:
            node.client.close()
        if self._nodes.get(node.info.name) is node:
            del self._nodes[node.info.name]

    # Time.

    async def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick_for_ever(), name="kvstore-controller")

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        self._calls.close()
        for node in [*self._nodes.values()]:
            self._forget(node)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Forget who has long been lost, clean up after those who left, count. Once a second."""
        now = self._clock()
        for node in [*self._nodes.values()]:
            if now - node.seen > self._forget_s:
                self._forget(node)
        while self._index.sweep():
            await asyncio.sleep(0)
        states = [self._state(node) for node in self._nodes.values()]
        forgotten = self._index.dropped - self._forgotten
        self._forgotten = self._index.dropped
        self._metrics.update(
            [
                *(("kvstore_controller_workers", (state,), states.count(state)) for state in _STATES),
                ("kvstore_controller_chunks", (), len(self._index)),
                ("kvstore_controller_forgotten_total", (), forgotten),
            ]
        )

    def _state(self, node: _Node) -> str:
        if self._clock() - node.seen > self._lost_s:
            return "lost"
        if not (node.health.ok and node.health.ready):
            return "draining"
        return "ready" if node.slot is not None else "loading"

    # What it is asked.

    def _named(self, names: Sequence[str]) -> list[_Node]:
        """Raises `UnknownError`: nobody of that name reports."""
        found = []
        for name in dict.fromkeys(names):
            node = self._nodes.get(name)
            if node is None:
                raise UnknownError(f"no instance of the name {name!r} reports here")
            found.append(node)
        return found

    def _usable(self, names: Sequence[str] | None) -> list[_Node]:
        """Nodes that are not lost, of those named."""
        nodes = [*self._nodes.values()] if names is None else self._named(names)
        return [node for node in nodes if self._state(node) != "lost"]

    def _places(self, namespace: str, prompt: Prompt, nodes: Sequence[_Node]) -> list[Place]:
        slots = {node.slot: node for node in nodes if node.slot is not None}
        places = []
        for holding in self._index.lookup(namespace, prompt.keys, [*slots]):
            info = slots[holding.slot].info
            tiers = [info.tiers[tier] for tier in holding.tiers]
            places.append(place_of(info.name, tiers, info.tiers, prompt.chunk_size))
        return places

    async def lookup(self, ask: Ask, prompt: Prompt) -> Lookup:
        nodes = self._usable(ask.instances)
        orders = {node.info.name: node.info.tiers for node in nodes}
        return best_of(self._places(ask.namespace, prompt, nodes), orders, prompt)

    async def route(self, ask: Ask, prompt: Prompt, candidates: Mapping[str, float | None] | None) -> Route:
        if candidates is None:
            candidates = {node.info.name: None for node in self._nodes.values() if self._state(node) == "ready"}
            if not candidates:
                raise TransientError("no instance is ready", operation="route")
        # What a node has that drains will be gone before it is of use.
        nodes = [node for name in candidates if (node := self._nodes.get(name)) and self._state(node) == "ready"]
        load = {node.info.name: node.health.load for node in nodes}
        queued = {
            name: load.get(name, 1.0) * self._policy.busy_tokens if waiting is None else waiting
            for name, waiting in candidates.items()
        }
        return choose(
            self._policy, [*candidates], queued=queued, places=self._places(ask.namespace, prompt, nodes),
            first=prompt.keys[0] if prompt.keys else None, tokens=len(prompt.keys) * prompt.chunk_size,
            strangers=candidates.keys() - self._nodes.keys(),
        )  # fmt: skip

    def _in_order(self) -> list[_Node]:
        """All nodes by name: who asks twice sees one order, whoever reported first."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    async def addresses(self, ask: Ask) -> Sequence[Address]:
        nodes = self._in_order() if ask.instances is None else self._named(ask.instances)
        return [address_of(n.info.name, n.info.address, n.info.unix, n.info.http) for n in nodes]

    async def workers(self, ask: Ask) -> Sequence[Worker]:
        now = self._clock()
        found = []
        for node in self._in_order():
            info = node.info
            seen = ask.who.only(info.namespaces)
            found.append(Worker(
                info.name, info.address, info.unix, info.http, info.version, info.started, seen, info.tiers,
                self._state(node), now - node.seen, node.health.load,
                0 if node.slot is None else self._index.count(node.slot, seen), seen_usage(node.usage, ask.who),
            ))  # fmt: skip
        return found

    async def health(self, ask: Ask) -> Sequence[InstanceHealth]:
        now = self._clock()
        found = []
        for node in self._in_order():
            health = node.health
            if not ask.who.operator:
                health = Health(health.ok, health.ready, health.load)
            found.append(InstanceHealth(node.info.name, self._state(node), health, now - node.seen))
        return found

    async def readiness(self) -> Readiness:
        return Readiness(True, ())

    # What is passed on.

    async def _each(
        self, ask: Ask, nodes: Sequence[_Node], call: _Call[T]
    ) -> tuple[dict[str, T], dict[str, KVStoreError]]:
        """Ask nodes at the same time, with the token of whoever asked. Returns answers and failures by name."""

        async def one(node: _Node) -> T:
            if node.client is None:
                raise ConfigError(f"instance {node.info.name!r} has no control API (http)")
            client = node.client.with_token(ask.who.token)
            # A little less than there is: their answers, and those of who did not answer, must be back in time.
            left = max(0.001, (ask.deadline - time.monotonic()) * 0.9)
            return await self._calls.run(lambda: call(node.info.name, client, left), ask.deadline)

        answers = await asyncio.gather(*map(one, nodes), return_exceptions=True)
        done: dict[str, T] = {}
        failures: dict[str, KVStoreError] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, KVStoreError):
                failures[node.info.name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done[node.info.name] = answer
        return done, failures

    def _holders(self, ask: Ask, keys: Sequence[Key]) -> list[_Node]:
        """Nodes that have any of these records, or those that are named."""
        if ask.instances is not None:
            return self._named(ask.instances)
        slots = self._index.holders(ask.namespace, keys)
        return [node for node in self._usable(None) if node.slot in slots]

    async def pin(self, ask: Ask, keys: Sequence[Key], ttl_s: float) -> Acted:
        return await self._act(ask, keys, lambda _, client, left: client.pin(
            keys=keys, namespace=ask.namespace, ttl_s=ttl_s, timeout=left
        ))  # fmt: skip

    async def unpin(self, ask: Ask, keys: Sequence[Key]) -> Acted:
        return await self._act(
            ask, keys, lambda _, client, left: client.unpin(keys=keys, namespace=ask.namespace, timeout=left)
        )

    async def _act(self, ask: Ask, keys: Sequence[Key], call: _Call[Acted]) -> Acted:
        done, failures = await self._each(ask, self._holders(ask, keys), call)
        counts = {name: acted.count for name, acted in done.items()}
        return Acted(sum(counts.values()), counts, _told(failures))

    async def clear(self, ask: Ask, target: Target) -> Started:
        nodes = (
            self._named(ask.instances) if ask.instances is not None
            else [node for node in self._nodes.values() if ask.namespace in node.info.namespaces]
        )  # fmt: skip

        def call(_: str, client: Client, left: float) -> Started:
            return client.clear(
                namespace=ask.namespace, everything=target == Target(), model=target.model,
                keys=target.prefix if target.keys is None else target.keys, below=target.prefix is not None,
                timeout=left,
            )  # fmt: skip

        return await self._begin(ask, nodes, call)

    async def move(self, ask: Ask, keys: Sequence[Key], *, src: str, to_tier: str, to_instance: str) -> Started:
        address = ""
        whose = [*self._nodes.values()] if ask.instances is None else self._named(ask.instances)
        tiers = dict.fromkeys(tier for node in whose for tier in node.info.tiers)
        for tier in filter(None, (src, to_tier)):
            if tiers and tier not in tiers:
                raise UnknownError(f"no instance has a tier {tier[:80]!r}; there are: {', '.join(tiers)}")
        if to_instance:
            (target,) = self._named([to_instance])
            address = target.info.address
            if not address:
                raise ConfigError(f"instance {to_instance!r} does not listen on TCP: nothing can be moved there")
        nodes = [node for node in self._holders(ask, keys) if node.info.name != to_instance]

        def call(_: str, client: Client, left: float) -> Started:
            return client.move(
                src=src, dst=address or to_tier, to_instance=bool(address), keys=keys, namespace=ask.namespace,
                timeout=left,
            )  # fmt: skip

        return await self._begin(ask, nodes, call)

    async def transcode(self, ask: Ask, keys: Sequence[Key], *, codec: str, level: int | None) -> Started:
        def call(_: str, client: Client, left: float) -> Started:
            return client.compress(codec, level, keys=keys, namespace=ask.namespace, timeout=left)

        return await self._begin(ask, self._holders(ask, keys), call)

    async def _begin(self, ask: Ask, nodes: Sequence[_Node], call: _Call[Started]) -> Started:
        done, failures = await self._each(ask, nodes, call)
        return Started(",".join(started.event for started in done.values() if started.event), _told(failures))

    async def check_finish(self, ask: Ask, event: str) -> Finished:
        parts: dict[str, str] = {}
        for part in event.split(","):
            job_id, at, name = part.rpartition("@")
            if not job_id or not at or name in parts:
                raise UnknownError(f"event {event[:80]!r} is none of this controller's")
            parts[name] = part
        known = [node for name in parts if (node := self._nodes.get(name)) is not None]
        done, failures = await self._each(
            ask, known, lambda name, client, left: client.check_finish(parts[name], timeout=left)
        )
        jobs: dict[str, Job] = {name: job for each in done.values() for name, job in each.jobs.items()}
        # Who does not answer now may do so the next time; who has left, or has forgotten, never will.
        finished = all(each.finished for each in done.values()) and not any(
            isinstance(error, TransientError) for error in failures.values()
        )
        gone = [Failure(name, "does not report here any more") for name in parts if name not in self._nodes]
        ok = finished and not failures and not gone and all(each.ok for each in done.values())
        return Finished(event, finished, ok, jobs, [*_told(failures), *gone])


def _told(failures: Mapping[str, KVStoreError]) -> list[Failure]:
    return [Failure(name, str(error)) for name, error in failures.items()]
