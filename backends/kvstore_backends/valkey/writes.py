"""Storing: SET name … NX PX life, one command, so that nobody sees a record half written or without its expiry.

Large records are asked for first (EXISTS, which does not count as a use): a server reads all of a command before it
says no. Every record has an expiry: without a ttl ten years ahead, which makes the policies volatile-* work, too. It is
spread a little at random, so that two records that have one name at different times differ in it (see `reads`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import NoneType

from kvstore.backend import EXISTS, Outcome, Status, Write
from kvstore.keys import Key

from .dispatch import Dispatch, Job
from .errors import Faults, LinkError
from .names import record_name, slot_of
from .options import Settings
from .resp import Ask, about, set_once

__all__ = ["Writer"]

_FOR_EVER_MS = 10 * 365 * 86_400_000
_SPREAD_MS = 1 << 30  # twelve days of ten years
_MOST_SPREAD_MS = 600_000  # of a ttl


class Writer:
    """`Backend.put`.

    Args:
        rng: uniform in [0, 1); for tests.
    """

    def __init__(
        self, settings: Settings, dispatch: Dispatch, faults: Faults, rng: Callable[[], float] = random.random
    ) -> None:
        self._prefix = settings.prefix.encode()
        self._ask_from = settings.ask_from
        self._most = settings.max_value_bytes
        self._dispatch = dispatch
        self._faults = faults
        self._rng = rng
        if settings.ttl is None:
            self._life, self._spread = _FOR_EVER_MS, _SPREAD_MS
        else:
            self._life = round(settings.ttl * 1000)
            self._spread = min(self._life // 100, _MOST_SPREAD_MS)

    def put(self, writes: Sequence[Write], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(writes)
        sizes = [write.nbytes for write in writes]
        for item, size in enumerate(sizes):
            if size > self._most:
                text = f"a record of {size} bytes is too large: max_value_bytes is {self._most}"
                outcomes[item] = self._faults.refused(text, "put", writes[item].key)
        left = [item for item, outcome in enumerate(outcomes) if outcome is None]
        while left:
            first: dict[Key, int] = {}
            later: list[int] = []
            for item in left:
                if first.setdefault(writes[item].key, item) != item:
                    later.append(item)
            self._store(list(first.values()), writes, sizes, outcomes, deadline)
            left = []
            for item in later:  # of equal keys the first wins; the next one has its turn if that failed
                leader = outcomes[first[writes[item].key]]
                if leader is not None and leader.stored:
                    outcomes[item] = EXISTS
                else:
                    left.append(item)
        return [outcome for outcome in outcomes if outcome is not None]

    def _store(
        self, items: Sequence[int], writes: Sequence[Write], sizes: Sequence[int], outcomes: list[Outcome | None],
        deadline: float,
    ) -> None:  # fmt: skip
        """Fill in the outcomes of `items`, which have different keys."""
        names = {item: record_name(self._prefix, writes[item].key) for item in items}
        asked = {
            item: Job(slot_of(name), [Ask([about(b"EXISTS", name)], accepts=int)])
            for item, name in names.items()
            if sizes[item] >= self._ask_from
        }
        self._dispatch.run(list(asked.values()), deadline)
        jobs: dict[int, Job] = {}
        for item in items:
            before = asked.get(item)
            if before is not None and before.trouble is not None:
                outcomes[item] = self._faults.outcome(before.trouble, "put", writes[item].key)
            elif before is not None and before.asks[0].reply:
                outcomes[item] = EXISTS
            else:
                life = self._life + int(self._rng() * self._spread)
                parts = set_once(names[item], writes[item].src, sizes[item], life)
                jobs[item] = Job(slot_of(names[item]), [Ask(parts, halts=True, accepts=(bytes, NoneType))])
        self._dispatch.run(list(jobs.values()), deadline)
        for item, job in jobs.items():
            if job.trouble is not None:
                outcomes[item] = self._faults.outcome(job.trouble, "put", writes[item].key)
            elif job.asks[0].reply is None:
                outcomes[item] = EXISTS
            elif job.asks[0].reply == b"OK":
                outcomes[item] = Outcome(Status.OK, sizes[item])
            else:
                said = LinkError("protocol", "the server neither stored the record nor said why")
                outcomes[item] = self._faults.outcome(said, "put", writes[item].key)
