"""`NodeService`: the control API of one node, over its `Instance`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key

from .access import Principal
from .instance import DONE, RUNNING, Health, Instance, UnknownError
from .messages import (
    Acted,
    Address,
    Finished,
    InstanceHealth,
    Lookup,
    ReportReply,
    Route,
    Started,
    Worker,
)
from .requests import Prompt, Report
from .routing import RoutePolicy, choose
from .service import Ask, Readiness, Service, Target, best_of, place_of, seen_usage

__all__ = ["Calls", "LateError", "NodeService", "address_of"]

T = TypeVar("T")

_GRACE_S = 0.1  # for a call to notice its own deadline
_PROBE_S = 1.0
_NOW_S = 0.25  # how old what a probe says may be


class LateError(TransientError):
    """The request's time is over."""


class Calls:
    """Blocking calls of a server, a bounded number at a time, each with a deadline.

    Args:
        threads: at a time.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-control")

    async def run(self, call: Callable[[], T], deadline: float) -> T:
        """What `call` returns; it is expected to keep the deadline, and is left to itself if it does not.

        Raises:
            LateError: it has not returned, or was not even begun.
        """
        left = deadline - time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.wait_for(future, max(0.0, left) + _GRACE_S)
        except TimeoutError:
            raise LateError("the deadline of the request has passed", operation="control") from None

    def close(self) -> None:
        """Nothing new is begun; what is under way ends by its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class NodeService(Service):
    """Answers for one instance. All of its calls happen in threads: some wait for locks, or look at a disk.

    Args:
        instance: what it answers for.
        threads: calls at a time.
        policy: of `route`, which here has one candidate only.
    """

    role = "node"

    def __init__(self, instance: Instance, *, threads: int = 32, policy: RoutePolicy | None = None) -> None:
        self._instance = instance
        self._info = instance.info()
        self._calls = Calls(threads)
        self._policy = policy or RoutePolicy()
        self._probed: tuple[float, Health] | None = None

    def _mine(self, names: Sequence[str] | None) -> None:
        """Raises `UnknownError` if others are asked."""
        for name in names or ():
            if name != self._info.name:
                raise UnknownError(f"this is instance {self._info.name!r}, not {name!r}; ask the controller")

    async def lookup(self, ask: Ask, prompt: Prompt) -> Lookup:
        self._mine(ask.instances)
        found = await self._calls.run(
            lambda: self._instance.lookup(ask.namespace, prompt.keys, deadline=ask.deadline), ask.deadline
        )
        tiers: list[str] = []
        for tier in found:
            if tier is None:
                break
            tiers.append(tier)
        order = [*dict.fromkeys((*self._info.tiers, *tiers))]
        places = [place_of(self._info.name, tiers, order, prompt.chunk_size)] if tiers else []
        return best_of(places, {self._info.name: order}, prompt)

    async def addresses(self, ask: Ask) -> Sequence[Address]:
        self._mine(ask.instances)
        info = self._info
        return [address_of(info.name, info.address, info.unix, info.http)]

    async def pin(self, ask: Ask, keys: Sequence[Key], ttl_s: float) -> Acted:
        self._mine(ask.instances)
        done = await self._calls.run(
            lambda: self._instance.pin(ask.namespace, keys, ttl_s=ttl_s, deadline=ask.deadline), ask.deadline
        )
        return Acted(sum(done), {self._info.name: sum(done)})

    async def unpin(self, ask: Ask, keys: Sequence[Key]) -> Acted:
        self._mine(ask.instances)
        done = await self._calls.run(
            lambda: self._instance.unpin(ask.namespace, keys, deadline=ask.deadline), ask.deadline
        )
        return Acted(sum(done), {self._info.name: sum(done)})

    async def clear(self, ask: Ask, target: Target) -> Started:
        return await self._start(ask, lambda: self._instance.clear(ask.namespace, **target._asdict()))

    async def move(self, ask: Ask, keys: Sequence[Key], *, src: str, to_tier: str, to_instance: str) -> Started:
        if to_instance and ":" not in to_instance:
            raise ConfigError(f"a node moves records to host:port, not to {to_instance!r}; a controller knows names")
        return await self._start(
            ask, lambda: self._instance.move(ask.namespace, keys, src=src, dst=to_tier or to_instance), keys
        )

    async def transcode(self, ask: Ask, keys: Sequence[Key], *, codec: str, level: int | None) -> Started:
        return await self._start(
            ask, lambda: self._instance.transcode(ask.namespace, keys, codec=codec, level=level), keys
        )  # fmt: skip

    async def _start(self, ask: Ask, start: Callable[[], str], keys: Sequence[Key] = ()) -> Started:
        """Begin a job. If it is about records of which not one is here there is nothing to follow: no event."""
        self._mine(ask.instances)

        def begin() -> str:
            here = not keys or self._any(ask, keys)
            job_id = start()  # in any case: it says what makes no sense
            return f"{job_id}@{self._info.name}" if here else ""

        return Started(await self._calls.run(begin, ask.deadline))

    def _any(self, ask: Ask, keys: Sequence[Key]) -> bool:
        """Whether any of them is here; also where a tier does not say so within half of the time."""
        now = time.monotonic()
        try:
            return any(self._instance.lookup(ask.namespace, keys, deadline=now + (ask.deadline - now) / 2))
        except TransientError:
            return True

    async def check_finish(self, ask: Ask, event: str) -> Finished:
        job_id, _, name = event.rpartition("@")
        if name != self._info.name or not job_id:
            raise UnknownError(f"event {event[:80]!r} is none of instance {self._info.name!r}")
        job = await self._calls.run(lambda: self._instance.job(job_id), ask.deadline)
        if not ask.who.sees(job.namespace):
            raise UnknownError(f"there is no job {job_id[:80]!r} here, or it ended long ago")
        return Finished(event, job.state != RUNNING, job.state == DONE and not job.failed, {name: job})

    async def workers(self, ask: Ask) -> Sequence[Worker]:
        info = self._info
        health, usage = await self._calls.run(
            lambda: (self._instance.health(deadline=ask.deadline), self._instance.usage()), ask.deadline
        )
        seen = seen_usage(usage, ask.who)
        fastest = {tier.namespace: tier for tier in reversed(seen)}  # the fastest tier of a namespace comes first
        return [
            Worker(
                info.name, info.address, info.unix, info.http, info.version, info.started,
                ask.who.only(info.namespaces), list(info.tiers), _state(health), 0.0, health.load,
                sum(max(0, tier.records) for tier in fastest.values()), seen,
            )
        ]  # fmt: skip

    async def health(self, ask: Ask) -> Sequence[InstanceHealth]:
        found = await self._calls.run(lambda: self._instance.health(deadline=ask.deadline), ask.deadline)
        return [InstanceHealth(self._info.name, _state(found), _for(ask.who, found), 0.0)]

    async def route(self, ask: Ask, prompt: Prompt, candidates: Mapping[str, float | None] | None) -> Route:
        names = [self._info.name] if candidates is None else [*candidates]
        self._mine(names)
        found = await self.lookup(ask, prompt)
        queued = (candidates or {}).get(self._info.name) or 0.0
        return choose(
            self._policy, names, queued={self._info.name: queued}, places=found.places,
            first=prompt.keys[0] if prompt.keys else None, tokens=found.tokens,
        )  # fmt: skip

    async def report(self, report: Report) -> ReportReply:
        raise UnknownError("this is a node; nodes report to a controller (kvstore ctl serve)")

    async def readiness(self) -> Readiness:
        now = time.monotonic()
        if self._probed is None or now - self._probed[0] > _NOW_S:
            health = await self._calls.run(lambda: self._instance.health(deadline=now + _PROBE_S), now + _PROBE_S)
            self._probed = (now, health)
        health = self._probed[1]
        return Readiness(health.ok and health.ready, health.problems)

    async def stop(self) -> None:
        self._calls.close()


def address_of(name: str, address: str, unix: str, http: str) -> Address:
    """Where an instance is; the ip is what stands before the port."""
    return Address(name, address.rpartition(":")[0].removeprefix("[").removesuffix("]"), address, unix, http)


def _state(health: Health) -> str:
    return "ready" if health.ok and health.ready else "draining"


def _for(who: Principal, health: Health) -> Health:
    """Problems are sentences about the whole node: for operators."""
    return health if who.operator else Health(health.ok, health.ready, health.load)
