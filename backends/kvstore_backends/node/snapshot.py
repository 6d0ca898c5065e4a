"""The nodes at one time: who holds which key, and whom to ask. Immutable, and swapped as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.backend import Backend, Capability, Limits
from kvstore.buffers import BufferPool
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.placement import Placement
from kvstore.replicas import NextReplica
from kvstore.wrappers import HedgedBackend

from .node import Node, Patient

__all__ = ["Former", "Snapshot"]

_MOST_LANES = 64
_HEDGED_SHARE = 0.05

_ALWAYS = Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.LIST | Capability.SHARED
_OF_ALL = Capability.DURABLE | Capability.TTL | Capability.CAPACITY
_OF_ANY = Capability.LEASE | Capability.REGISTERED_MEMORY | Capability.MAPPED_MEMORY


class Former:
    """Who held the keys before nodes came or went.

    Attributes:
        until: monotonic seconds; afterwards nobody is asked any more.
    """

    def __init__(self, nodes: Sequence[Node], placement: Placement, until: float) -> None:
        self.nodes = nodes
        self.until = until
        self._placement = placement

    def owners(self, key: Key) -> list[Node]:
        """The nodes that held `key`, best first."""
        return [self.nodes[index] for index in self._placement.order(key)]


class Snapshot:
    """See the module's docstring.

    Args:
        nodes: in any order; empty: none is known (yet).
        replicas: nodes per key; fewer if there are fewer.
        former: who held the keys before; None: nobody else.
        scratch: memory for hedged reads; None: reads are not hedged.
        metrics: where hedged reads are counted.

    Attributes:
        readers: for each node, what to read through: the node itself, or one that goes on to the next replica of each
            key when that is slow, or does not have it.
        users: calls that use this snapshot now; guarded by its owner's lock.
        retired: another one has taken its place; likewise.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        replicas: int,
        *,
        former: Former | None = None,
        scratch: BufferPool | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        weights = [node.member.weight for node in nodes]
        usable = sum(1 for weight in weights if weight)
        self.replicas = min(replicas, usable)
        self.placement = Placement([node.member.name for node in nodes], weights, self.replicas) if usable else None
        self.former = former
        self.users = 0
        self.retired = False
        self.readers: Sequence[Backend] = self.nodes
        self._hedges: list[HedgedBackend] = []
        self._empty_pool = BufferPool(1) if self.replicas > 1 and scratch is None else None
        if self.placement is not None and self.replicas > 1:
            pool = scratch if scratch is not None else self._empty_pool
            for index, node in enumerate(self.nodes):
                self._hedges.append(
                    HedgedBackend(
                        Patient(node),
                        NextReplica(index, self.nodes, self.placement),
                        pool=pool,
                        max_extra=_HEDGED_SHARE if scratch is not None else 0.0,
                        metrics=metrics,
                    )
                )
            self.readers = self._hedges

    @property
    def capabilities(self) -> Capability:
        found = _ALWAYS
        if self.nodes:
            each = [node.capabilities for node in self.nodes]
            for flag in _OF_ALL:
                if all(flag in one for one in each):
                    found |= flag
            for flag in _OF_ANY:
                if any(flag in one for one in each):
                    found |= flag
        return found

    @property
    def limits(self) -> Limits:
        if not self.nodes:
            return Limits()
        each = [node.limits for node in self.nodes]
        return Limits(
            max_value_bytes=min(limits.max_value_bytes for limits in each),
            lanes=min(_MOST_LANES, sum(limits.lanes for limits in each)),
            preferred_io_bytes=max(limits.preferred_io_bytes for limits in each),
        )

    def owners(self, key: Key) -> list[Node]:
        """The nodes that hold `key`, best first."""
        return [] if self.placement is None else [self.nodes[index] for index in self.placement.order(key)]

    def choose(self, keys: Sequence[Key], sizes: Sequence[int]) -> dict[int, list[int]]:
        """Whom to read from: node index → indices of items. Of the replicas that are up, the one that will be done
        first by what is measured, by what waits there already, and by how long that has been waiting, which tells of a
        node that hangs; all items of one key from one node. Whose calls wait longest comes last: if no thread is free,
        nobody else waits for it."""
        placement = self.placement
        if placement is None:
            return {}
        if len(self.nodes) == 1:
            return {0: [*range(len(keys))]}
        order = placement.order
        groups: dict[int, list[int]] = {}
        if self.replicas == 1:
            for at, key in enumerate(keys):
                groups.setdefault(order(key)[0], []).append(at)
            return {index: groups[index] for index in sorted(groups, key=lambda index: self.nodes[index].stuck())}
        stuck = [node.stuck() for node in self.nodes]
        costs = [node.cost() for node in self.nodes]
        paces, waiting = [pace for pace, _ in costs], [nbytes for _, nbytes in costs]
        down = [not node.up for node in self.nodes]
        chosen: dict[Key, int] = {}
        for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            best = chosen.get(key)
            if best is None:
                best = min(
                    order(key), key=lambda index: (down[index], max(waiting[index] * paces[index], stuck[index]))
                )
                chosen[key] = best
            waiting[best] += size
            groups.setdefault(best, []).append(at)
        return {index: groups[index] for index in sorted(groups, key=stuck.__getitem__)}

    def close(self) -> None:
        """Let go of what belongs to this snapshot alone; the nodes stay open."""
        for hedge in self._hedges:
            hedge.close()
        if self._empty_pool is not None:
            self._empty_pool.close()
