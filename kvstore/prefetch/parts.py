"""What a stream consists of: parts, each some layers of some chunks, read by one `submit_get`. State only.

Everything here is changed with the prefetcher's lock held (`prefetcher.py`).
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.buffers import Buffer
from kvstore.plan import runs
from kvstore.scheduler import Priority
from kvstore.targets import HeadMemo

from .plan import LayerPlan, layer_groups

if TYPE_CHECKING:
    from kvstore.backend import Outcome
    from kvstore.completion import Completion

__all__ = ["Part", "State", "StreamState", "paged"]

_POOL_PAGE = 4096  # what a buffer takes in the pool is a multiple of this


class State(enum.Enum):
    """How far a part is."""

    PLANNED = "planned"  # not asked for yet, or given up for something more urgent
    LOADING = "loading"
    READY = "ready"
    HELD = "held"  # somebody looks at it
    GONE = "gone"


def paged(nbytes: int) -> int:
    """What a buffer of so many bytes takes in the pool."""
    return max(1, -(-nbytes // _POOL_PAGE)) * _POOL_PAGE


class Part:
    """Layers `first`, … of some chunks, each (prefix, chunk).

    Attributes:
        size: what buffers for its pairs take in the pool; as of the last `StreamState.prune`.
        nbytes: what those that it has take.
        holds: how many look at it.
        asked, under_way: when it was asked for, and how many bytes were under way then, its own included.
    """

    __slots__ = (
        "asked", "buffers", "completion", "count", "first", "holds", "nbytes", "pairs", "size", "state", "under_way",
        "within",
    )  # fmt: skip

    def __init__(self, first: int, count: int, pairs: Sequence[tuple[int, int]]) -> None:
        self.first = first
        self.count = count
        self.pairs = pairs
        self.state = State.PLANNED
        self.size = self.nbytes = self.under_way = 0
        self.asked = 0.0
        self.within: tuple[int, ...] = ()  # the hits that `pairs` and `size` fit
        self.holds = 0
        self.buffers: Sequence[Buffer] = ()
        self.completion: Completion[Sequence[Outcome]] | None = None

    @property
    def end(self) -> int:
        """The first layer behind it."""
        return self.first + self.count


class StreamState:
    """One stream, as the prefetcher sees it.

    Attributes:
        hits: per prefix, how many leading chunks can still be served.
        pending: parts that are not asked for, in order.
        active: parts that are, and have not been given back; in order, all before `pending`.
        reached: layers below this were given back.
        waiting: threads that wait for the first part that was not given back.
        started: the job has begun; before that it is speculation from the queue.
        stalled: speculation that found trouble; nothing more is asked for until the job starts.
        arrived: how many parts have arrived; the more, the more may be under way.
        need_pool: the pool has no room for the part that is waited for; who waits gets it himself.
        error: what ended the stream, to be raised; or None.
        completions: of what was asked for, as far as they may not be settled.
        memos: of each (prefix, chunk), so that its record's header is read once and not with every part.
        split: a layer comes in several parts.
        paged_bytes: what all layers would take in the pool.
        wake: set when something changed for those who wait.
    """

    def __init__(self, plan: LayerPlan, deadline: float, number: int, *, started: bool) -> None:
        self.plan = plan
        self.deadline = deadline
        self.number = number
        self.started = started
        self.priority = plan.priority if started else Priority.PREFETCH
        self.hits = [len(prefix) for prefix in plan.prefixes]
        self.pending: deque[Part] = deque()
        self.active: deque[Part] = deque()
        self.reached = 0
        self.waiting = 0
        self.stalled = False
        self.arrived = 0
        self.need_pool = False
        self.cancelled = False
        self.error: BaseException | None = None
        self.wake = threading.Event()
        self.completions: deque[Completion[Sequence[Outcome]]] = deque()
        self.memos: defaultdict[tuple[int, int], HeadMemo] = defaultdict(HeadMemo)
        self.split = False
        self.total_bytes = sum(map(plan.layer_bytes, range(plan.num_layers)))
        self.paged_bytes = self.total_bytes

    def lay_out(self, *, preferred: int, most: int, first: int, joined: float = math.inf) -> None:
        """Make the parts.

        Args:
            preferred, first: as of `layer_groups`.
            most: bytes of the largest group; what is cut further is a layer of a plan with `split`.
            joined: several layers are one group only up to so many bytes.
        """
        plan = self.plan
        pairs = [(n, chunk) for n, prefix in enumerate(plan.prefixes) for chunk in range(len(prefix))]
        chunks = [plan.prefixes[n][chunk] for n, chunk in pairs]
        kinds = Counter(chunk.spec for chunk in chunks)  # few: all full chunks of a prompt are alike
        totals = [sum(paged(spec.sizes[n]) * count for spec, count in kinds.items()) for n in range(plan.num_layers)]
        self.paged_bytes = sum(totals)
        largest = [max(spec.sizes[n] for spec in kinds) for n in range(plan.num_layers)]
        for begin, count in layer_groups(
            totals, largest, preferred=preferred, most=int(min(most, joined)), first=int(min(first, joined))
        ):
            cuts = []
            if plan.split and count == 1 and totals[begin] > most:
                cuts = runs([paged(chunk.spec.sizes[begin]) for chunk in chunks], most)
            if len(cuts) > 1:
                self.pending += [Part(begin, 1, pairs[at : at + number]) for at, number, _ in cuts]
                self.split = True
            else:
                self.pending.append(Part(begin, count, pairs))

    @property
    def over(self) -> bool:
        """Nothing more will be asked for or waited for."""
        return self.cancelled or self.error is not None

    @property
    def hopeless(self) -> bool:
        """Nothing is left of any prefix."""
        return not any(self.hits)

    @property
    def front(self) -> Part | None:
        """The first part that was not given back."""
        return self.active[0] if self.active else self.pending[0] if self.pending else None

    @property
    def ahead(self) -> int:
        """Bytes that are loaded or being loaded and that nobody looks at."""
        return sum(part.nbytes for part in self.active if part.state is not State.HELD)

    @property
    def loading(self) -> int:
        """Parts under way."""
        return sum(part.state is State.LOADING for part in self.active)

    def limit(self, prefix: int, chunk: int) -> None:
        """Prefix `prefix` has no more than its first `chunk` chunks."""
        self.hits[prefix] = min(self.hits[prefix], chunk)

    def prune(self) -> Part | None:
        """The next part to ask for, without the chunks that cannot be used any more; None if there is none."""
        while self.pending:
            part = self.pending[0]
            if part.within != (hits := tuple(self.hits)):
                part.pairs = [(prefix, chunk) for prefix, chunk in part.pairs if chunk < hits[prefix]]
                part.size, part.within = sum(paged(self.range_bytes(part, *pair)) for pair in part.pairs), hits
            if part.pairs:
                return part
            self.pending.popleft()
        return None

    def range_bytes(self, part: Part, prefix: int, chunk: int) -> int:
        """Raw bytes of a part's layers in one chunk."""
        return sum(self.plan.prefixes[prefix][chunk].spec.sizes[part.first : part.end])
