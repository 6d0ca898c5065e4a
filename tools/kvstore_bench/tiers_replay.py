"""Replay of a trace through the real policies, with virtual time: what hits, what moves, what prefill is saved."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES, EvictionPolicy, LookAheadPolicy, RecordInfo, make_policy, prefill_seconds
from kvstore.keys import Key

from .tiers_traces import Request, Trace

__all__ = ["BELADY", "CostModel", "Replay", "policy_names", "replay"]

BELADY = "belady"
_QUEUE = "_queue"
_LAYERS = 32


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a token costs. An 8-billion-parameter model with grouped heads, on one accelerator.

    Attributes:
        per_token: seconds of prefill per token (16.1e9 operations at 400e12 per second).
        per_position: more seconds per token for each token before it (0.52e6 operations): C_prefill(t) = O((Σnᵢ)²),
            C_cached(t) = O(n_t·Σnᵢ).
        bytes_per_token: of KV (32 layers, 8 heads of 128, K and V, 2 bytes).
        bandwidth: bytes/s at which each tier is read, fastest first.
    """

    per_token: float = 40e-6
    per_position: float = 1.3e-9
    bytes_per_token: int = 131072
    bandwidth: Sequence[float] = (25e9, 5e9, 1.25e9)

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute tokens [start, end)."""
        return prefill_seconds(start, end, per_token=self.per_token, per_position=self.per_position)


@dataclass
class Replay:
    """What one policy did at one capacity.

    Attributes:
        hits, references: blocks in unbroken hit prefixes, and all; `halves`: the same for each half of the requests.
        saved_s, prefill_s: seconds of prefill saved, and without any cache.
        saved_halves: saved_s of each half.
        read_bytes: read from each tier; written_bytes: written to each tier; dropped_bytes: left the last one.
        ttft_mean_s, ttft_p99_s: simulated, see `replay`.
        turns: per turn (the last: this and later ones): requests, prompt tokens, tokens from cache, new tokens.
        replay_s: wall time.
        broken: times that a record of the announced window left the store.
    """

    trace: str
    capacity: str
    policy: str
    hits: int = 0
    references: int = 0
    halves: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])
    saved_s: float = 0.0
    saved_halves: list[float] = field(default_factory=lambda: [0.0, 0.0])
    prefill_s: float = 0.0
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    dropped_bytes: int = 0
    ttft_mean_s: float = 0.0
    ttft_p99_s: float = 0.0
    servers: int = 0
    turns: list[list[int]] = field(default_factory=lambda: [[0, 0, 0, 0] for _ in range(8)])
    replay_s: float = 0.0
    broken: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.references

    def half(self, number: int) -> float:
        """Hit rate of the first (0) or second (1) half of the requests."""
        hits, references = self.halves[number]
        return hits / references if references else 0.0


def policy_names(text: str) -> list[str]:
    """Names as in `--policies`: of kvstore.eviction, belady, or a name with `_queue64` (jobs announced).

    Raises:
        ConfigError: no such policy.
    """
    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        base, visible = split_name(name)
        if (base != BELADY and (base not in POLICIES or base == "none")) or (base == BELADY and visible):
            known = ", ".join(each for each in POLICIES if each != "none")
            raise ConfigError(f"--policies: {name!r} is none of {known}, {BELADY}; with a queue: default{_QUEUE}64")
    if not names:
        raise ConfigError("--policies: no policy")
    return names


def split_name(name: str) -> tuple[str, int]:
    """`default_queue64` → ("default", 64); without a queue 0."""
    base, mark, count = name.rpartition(_QUEUE)
    if mark and count.isdigit() and int(count) > 0:
        return base, int(count)
    return name, 0


def servers_for(trace: Trace, cost: CostModel) -> int:
    """The fewest accelerators that would be busy for 70 % of the trace without any cache."""
    total = sum(cost.prefill(0, request.tokens) for request in trace.requests)
    span = max(trace.requests[-1].at, 1.0)
    return max(1, math.ceil(total / span / 0.7))


def replay(trace: Trace, capacities: Sequence[int], name: str, cost: CostModel) -> Replay:
    """Send a trace through one policy (the same one in every tier).

    A record is in one tier. What is hit moves to the fastest, what does not fit there moves down, and out of the last
    it is gone; the blocks of the running request stay. Prompts wait for the first free of `servers_for` accelerators,
    first come, first served; there a prompt takes max(t, c) + min(t, c)/32 seconds: loading the hit prefix (t) and
    computing the rest (c) overlap layer by layer, except for the first of 32 layers. TTFT is the wait and that.

    Args:
        capacities: of the tiers in blocks, fastest first.
    """
    base, visible = split_name(name)
    result = Replay(trace.name, "+".join(str(each) for each in capacities), name, references=trace.references)
    began = time.perf_counter()
    result.servers = servers_for(trace, cost)
    store = _Belady(trace, sum(capacities)) if base == BELADY else _Tiers(trace, capacities, base, cost)
    result.read_bytes = [0] * len(capacities)
    waits = _Servers(result.servers)
    latencies = []
    half = len(trace.requests) // 2
    history: dict[str, int] = {}
    for index, request in enumerate(trace.requests):
        if visible and isinstance(store, _Tiers):
            store.announce([each.keys for each in trace.requests[index + 1 : index + 1 + visible]])
        tiers = store.serve(index, request)
        hits = len(tiers)
        result.hits += hits
        result.halves[index >= half][0] += hits
        result.halves[index >= half][1] += len(request.keys)
        cached = min(hits * trace.block, request.tokens)
        saved = cost.prefill(0, cached)
        result.saved_s += saved
        result.saved_halves[index >= half] += saved
        whole = cost.prefill(0, request.tokens)
        result.prefill_s += whole
        load = 0.0
        for place, tier in enumerate(tiers):
            nbytes = (min(trace.block, request.tokens - place * trace.block)) * cost.bytes_per_token
            result.read_bytes[tier] += nbytes
            load += nbytes / cost.bandwidth[min(tier, len(cost.bandwidth) - 1)]
        compute = whole - saved
        service = max(load, compute) + min(load, compute) / _LAYERS
        latencies.append(waits.run(request.at, service))
        turn = result.turns[min(request.turn, len(result.turns) - 1)]
        turn[0] += 1
        turn[1] += request.tokens
        turn[2] += cached
        turn[3] += max(1, request.tokens - history.get(request.session, 0))
        history[request.session] = request.tokens
    latencies.sort()
    result.ttft_mean_s = sum(latencies) / len(latencies)
    result.ttft_p99_s = latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))]
    result.written_bytes, result.dropped_bytes = store.written, store.dropped
    result.broken = store.broken
    result.replay_s = time.perf_counter() - began
    return result


class _Servers:
    """Accelerators that take prompts in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def run(self, at: float, service: float) -> float:
        """Seconds from arrival to the end."""
        start = max(at, heapq.heappop(self._free))
        heapq.heappush(self._free, start + service)
        return start + service - at


class _Tiers:
    """Tiers with a policy each, and no bytes."""

    def __init__(self, trace: Trace, capacities: Sequence[int], base: str, cost: CostModel) -> None:
        self._now = 0.0
        self._block, self._bytes = trace.block, trace.block * cost.bytes_per_token
        self._capacities = [each * self._bytes for each in capacities]
        self._slots = list(capacities)
        self._policies: list[EvictionPolicy] = []
        for tier in range(len(capacities)):
            options: dict[str, Any] = {}
            if base in ("default", "lookahead"):
                options = {"window": sum(self._capacities), "last": tier == len(capacities) - 1}
            if base == "value":
                options = {
                    "bandwidth": cost.bandwidth[min(tier, len(cost.bandwidth) - 1)],
                    "per_token": cost.per_token, "per_position": cost.per_position,
                }  # fmt: skip
            self._policies.append(make_policy(base, clock=lambda: self._now, **options))
        self._about: dict[Key, tuple[Key | None, RecordInfo]] = {}
        self.written = [0] * len(capacities)
        self.dropped = 0
        self.broken = 0

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        for policy in self._policies:
            policy.announce(waiting)

    def serve(self, index: int, request: Request) -> list[int]:
        """The tier of each block of the hit prefix; afterwards all its blocks are in the first tier, as far as they
        fit."""
        self._now = request.at
        policies, keys, about = self._policies, request.keys, self._about
        where: list[int] = []
        for key in keys:
            tier = next((tier for tier, policy in enumerate(policies) if key in policy), -1)
            if tier < 0:
                break
            where.append(tier)
        hits, first = len(where), policies[0]
        for key, tier in zip(keys, where, strict=False):
            if tier:
                self.written[0] += policies[tier].forget(key)
                first.admit(key, self._bytes, parent=about[key][0], info=about[key][1])
        if hits:
            first.touch(keys[:hits])
        parent = keys[hits - 1] if hits else None
        for place in range(hits, len(keys)):
            key = keys[place]
            for policy in policies[1:]:
                policy.forget(key)  # behind a hole: stored again above
            start = place * self._block
            info = RecordInfo(start, min(self._block, request.tokens - start), request.session, request.turn + 1)
            about[key] = (parent, info)
            first.admit(key, self._bytes, parent=parent, info=info)
            self.written[0] += self._bytes
            parent = key
        first.touch(keys[hits:])
        self._settle(frozenset(keys))
        return where

    def _settle(self, running: frozenset[Key]) -> None:
        for tier, policy in enumerate(self._policies):
            if len(policy) <= self._slots[tier]:
                continue
            for key in policy.victims(keep=running):
                self._down(tier, key)
                if len(policy) <= self._slots[tier]:
                    break
            else:
                # The running request alone is larger than the tier: what is left of it cannot stay either.
                for key in policy.victims():
                    self._down(tier, key)
                    if len(policy) <= self._slots[tier]:
                        break

    def _down(self, tier: int, key: Key) -> None:
        nbytes = self._policies[tier].forget(key)
        parent, info = self._about[key]
        if tier + 1 < len(self._policies):
            self._policies[tier + 1].admit(key, nbytes, parent=parent, info=info)
            self.written[tier + 1] += nbytes
            return
        del self._about[key]
        self.dropped += nbytes
        policy = self._policies[tier]
        self.broken += isinstance(policy, LookAheadPolicy) and key in policy.window


class _Belady:
    """Whose next use is farthest goes, the tail first. Knows the future, so it is what no policy can beat."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = capacity
        self._next: list[list[int]] = [[] for _ in trace.requests]  # of each block of each request
        later: dict[Key, int] = {}
        for index in range(len(trace.requests) - 1, -1, -1):
            keys = trace.requests[index].keys
            self._next[index] = [later.get(key, len(trace.requests)) for key in keys]
            later.update(dict.fromkeys(keys, index))
        self._here: dict[Key, tuple[int, int]] = {}  # next use, place
        self._heap: list[tuple[int, int, Key]] = []
        self.written = [0]
        self.dropped = 0
        self.broken = 0

    def serve(self, index: int, request: Request) -> list[int]:
        here, heap = self._here, self._heap
        hits = 0
        for key in request.keys:
            if key not in here:
                break
            hits += 1
        for place, (key, after) in enumerate(zip(request.keys, self._next[index], strict=True)):
            here[key] = (after, place)
            heapq.heappush(heap, (-after, -place, key))
        while len(here) > self._capacity:
            after, place, key = heapq.heappop(heap)
            if here.get(key) == (-after, -place):
                del here[key]
        return [0] * hits
