"""`Announcer`: tells each node of a pool which of its records the jobs that wait will need.

In the background, and only the last queue: the scheduler that announces is never held up, and what it announced while a
node was slow is not told any more.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from kvstore.errors import ClosedError, KVStoreError
from kvstore.keys import Key

from .background import Background
from .node import Node
from .pool import Pool

__all__ = ["Announcer"]

logger = logging.getLogger("kvstore.node")

_CALL_S = 2.0  # for one node


class Announcer:
    """See the module's docstring."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: list[list[Key]] | None = None
        self._worker = Background(self._tell, "kvstore-node-announce")

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """See `NodeBackend.announce`. Raises `ClosedError`."""
        self._pool.check("announce")
        with self._lock:
            self._waiting = [[*job] for job in waiting]
        self._worker.wake()

    def _tell(self) -> float:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return math.inf
        try:
            with self._pool.use("announce") as snapshot:
                queues: dict[Node, list[list[Key]]] = {node: [] for node in snapshot.nodes if node.up}
                if len(snapshot.nodes) == 1:
                    for node in queues:
                        queues[node] = waiting
                else:
                    for job in waiting:
                        parts: dict[Node, list[Key]] = {}
                        for key in job:
                            owner = next((node for node in snapshot.owners(key) if node.up), None)
                            if owner is not None:
                                parts.setdefault(owner, []).append(key)
                        for node, part in parts.items():
                            queues[node].append(part)
                for node, queue in queues.items():  # also an empty one: it ends the last
                    try:
                        node.client.tell_waiting(queue, deadline=time.monotonic() + _CALL_S)
                    except ClosedError:
                        return math.inf
                    except KVStoreError as error:
                        logger.debug("%s could not be told what waits: %s", node.name, error)
        except ClosedError:
            pass
        return math.inf

    def close(self) -> None:
        """Does not wait."""
        self._worker.close()
