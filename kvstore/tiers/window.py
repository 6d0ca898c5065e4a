"""The look-ahead window: which records the jobs that wait will need, and in which order (CachedAttention, ATC'24,
section 3.3: scheduler-aware fetching and eviction)."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.keys import Key

__all__ = ["Window", "window_of"]

_MOST = 1 << 17  # records, whatever the capacities are


class Window:
    """Records of the waiting jobs, the most urgent first.

    Attributes:
        rank: position of each record; also the container that says what is protected.
        parents: the record before each in its prefix.
        wanted: for each bounded tier, how far down the ranks it should hold records: the prefetch window of the first
            is C_mem / S_kv records, the eviction window of all together (C_mem + C_disk) / S_kv.
    """

    __slots__ = ("parents", "rank", "wanted")

    def __init__(self, rank: dict[Key, int], parents: dict[Key, Key | None], wanted: Sequence[int]) -> None:
        self.rank = rank
        self.parents = parents
        self.wanted = wanted


EMPTY = Window({}, {}, ())


def window_of(waiting: Sequence[Sequence[Key]], capacities: Sequence[int], mean: float) -> Window:
    """The window of a queue.

    Args:
        waiting: keys of each waiting job in prefix order, the first to run first.
        capacities: of the bounded tiers, in bytes, fastest first.
        mean: mean bytes of a record (S_kv); 0: unknown, then the window is not cut.
    """
    wanted, total = [], 0
    for capacity in capacities:
        total += capacity
        wanted.append(int(min(_MOST, total / mean)) if mean else _MOST)
    most = wanted[-1] if wanted else _MOST
    rank: dict[Key, int] = {}
    parents: dict[Key, Key | None] = {}
    for chain in waiting:
        parent = None
        for key in chain:
            if key not in rank:
                if len(rank) >= most:
                    return Window(rank, parents, wanted)
                rank[key] = len(rank)
                parents[key] = parent
            parent = key
    return Window(rank, parents, wanted)
