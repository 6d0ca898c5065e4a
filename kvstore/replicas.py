"""The other replica of whatever key: what a hedged read of one backend goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .backend import Backend, Capability, KeyInfo, Outcome, Read, Write
from .buffers import Buffer, Slab
from .errors import PermanentError
from .keys import Key
from .placement import Placement

__all__ = ["NextReplica"]


class NextReplica(Backend):
    """Reads each key from the backend that comes after `index` in the key's own placement order.

    Keys that one backend holds have their other copies on different backends; this routes each to its own. It reads
    only, and closes nothing: the store owns the backends.

    Args:
        index: the backend whose stand-in this is.
        backends: all backends of the store, in the placement's order.
    """

    def __init__(self, index: int, backends: Sequence[Backend], placement: Placement) -> None:
        self._index = index
        self._backends = backends
        self._placement = placement
        self.name = f"other replicas of {backends[index].name}"
        others = [backend for number, backend in enumerate(backends) if number != index]
        self.limits = others[0].limits
        self.capabilities = others[0].capabilities
        for other in others[1:]:
            self.capabilities &= other.capabilities
        self.capabilities &= ~(Capability.LIST | Capability.LEASE)

    def _route(self, keys: Sequence[Key], ask: Callable[[Backend, Sequence[int]], Sequence[Outcome]]) -> list[Outcome]:
        by_backend: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            order = self._placement.order(key)
            place = order.index(self._index) if self._index in order else -1
            by_backend.setdefault(order[(place + 1) % len(order)], []).append(position)
        results: list[Any] = [None] * len(keys)
        for number, positions in by_backend.items():
            for position, outcome in zip(positions, ask(self._backends[number], positions), strict=True):
                results[position] = outcome
        return results

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._route(keys, lambda backend, at: backend.stat([keys[i] for i in at], deadline=deadline))

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        keys = [read.key for read in reads]
        return self._route(keys, lambda backend, at: backend.get_into([reads[i] for i in at], deadline=deadline))

    def _read_only(self, operation: str, count: int) -> list[Outcome]:
        error = PermanentError("the other replicas are only read from here", backend=self.name, operation=operation)
        return [Outcome.failed(error)] * count

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return self._read_only("put", len(writes))

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._read_only("delete", len(keys))

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._read_only("quarantine", len(keys))

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        return [None] * len(keys)

    def register(self, slab: Slab) -> None:
        return None

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        raise PermanentError("the other replicas are only read from here", backend=self.name, operation="list")

    def close(self) -> None:
        return None
