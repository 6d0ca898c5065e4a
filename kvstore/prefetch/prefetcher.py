"""`Prefetcher`: loads KV layer by layer, ahead of the computation, for all engine threads of a node."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.errors import ClosedError, ConfigError

from .arbiter import Arbiter
from .plan import FIRST_GROUP_BYTES, LayerPlan
from .stream import LayerStream

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["Prefetcher"]

_GROUPS_IN_BUDGET = 3  # one that is looked at, one that is ready, one that is loaded


class Prefetcher:
    """Loads KV layer by layer, ahead of the computation, for all engine threads of a node.

    Args:
        store: an open store. It is not closed.
        budget_bytes: bound on the pool memory of all streams together, late I/O of cancelled ones included; None: half
            the store's `buffer_pool_bytes`, which is also the most (encoded records are decoded from the other half).
            A part that is larger runs alone.
        lookahead_bytes: how much of it announced jobs that have not begun may have; None: half.
        first_group_bytes: size of a stream's first group of layers. It is at least one layer.
        max_group_bytes: size of its largest; None: a third of the budget.

    Raises:
        ConfigError: not a store, or sizes that make no sense.
    """

    def __init__(
        self,
        store: Store,
        *,
        budget_bytes: int | None = None,
        lookahead_bytes: int | None = None,
        first_group_bytes: int = FIRST_GROUP_BYTES,
        max_group_bytes: int | None = None,
    ) -> None:
        if not hasattr(store, "submit_get"):
            raise ConfigError(f"an open kvstore.Store is needed, not {type(store).__name__}")
        half = max(store.pool.nbytes // 2, 1)
        budget = half if budget_bytes is None else budget_bytes
        if not 1 <= budget <= half:
            raise ConfigError(
                f"budget_bytes={budget} must be between 1 and {half}, half of the store's buffer_pool_bytes"
            )
        most = max(1, budget // _GROUPS_IN_BUDGET) if max_group_bytes is None else max_group_bytes
        ahead = budget // 2 if lookahead_bytes is None else lookahead_bytes
        if first_group_bytes < 1 or most < 1 or ahead < 0:
            raise ConfigError(f"sizes of groups ({first_group_bytes}, {most}) and of lookahead ({ahead}) make no sense")
        self.store = store
        self.budget_bytes = budget
        self._arbiter = Arbiter(store, budget=budget, lookahead=ahead, first=first_group_bytes, most=most)

    def start(self, plan: LayerPlan) -> LayerStream:
        """Begin to load. Returns at once. What an announcement of the same records has loaded is taken over.

        Raises:
            ClosedError: the prefetcher is closed.
        """
        timeout = self.store.config.blocking_timeout
        deadline = time.monotonic() + timeout if plan.deadline is None else plan.deadline
        return LayerStream(self._arbiter, self._arbiter.start(plan, deadline))

    def announce(self, queue: Sequence[LayerPlan]) -> None:
        """The jobs that wait, first to run first; each call replaces the one before. A plan with a deadline goes
        before those that have none or a later one.

        The beginnings of their KV are brought into host memory, as far as `lookahead_bytes` go and nobody else needs
        the memory: of each the read buffer S_buf if its plan and the measured speed give one, else as much as there is
        room for. The store is told, too, so that records come up from slower tiers, also those of nodes, and stay.
        Returns at once. Trouble with speculation is no miss: `start` looks again.
        """
        order = sorted(queue, key=lambda plan: math.inf if plan.deadline is None else plan.deadline)
        with contextlib.suppress(ClosedError):  # `start` will say so
            self.store.announce([[chunk.key for prefix in plan.prefixes for chunk in prefix] for plan in order])
        self._arbiter.announce(order)

    @property
    def bandwidth(self) -> float | None:
        """Measured bytes per second over all streams while anything was loading; None before the first."""
        return self._arbiter.speed.bytes_per_s

    def stats(self) -> dict[str, Any]:
        """Budget and bytes in use (now, and at most so far), streams, announced jobs, parts given up for more urgent
        ones, parts that late I/O still holds, and the measured bandwidth (bytes per second)."""
        return self._arbiter.stats()

    def close(self) -> None:
        """Cancel all streams. May be called twice. The store stays open."""
        self._arbiter.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
