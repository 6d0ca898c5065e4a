"""`Allotment`: which part of which stream is loaded next, within a budget of bytes.

The order in which memory is given: parts that somebody waits for, by deadline; then read-ahead of jobs that run, the
one with least ahead first; then speculation for the queue, by deadline. A part that is waited for takes the memory of
read-ahead, latest first, if there is no other. A job that waits holds nothing but what it has retained, so jobs cannot
block each other.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.backend import Status
from kvstore.buffers import Buffer
from kvstore.completion import CancelledError, Completion
from kvstore.errors import ClosedError, KVStoreError, PoolExhausted
from kvstore.scheduler import Priority
from kvstore.targets import Want

from .mailbox import Mailbox
from .parts import Part, State, StreamState
from .plan import LayerPlan, read_buffer_bytes
from .speed import Speed

if TYPE_CHECKING:
    from kvstore.backend import Outcome
    from kvstore.store import Store

__all__ = ["Allotment"]

logger = logging.getLogger("kvstore.prefetch")

_MOST_UNDER_WAY = 8  # parts of one stream: enough for every lane, each with many chunks
# What is under way side by side shares the link, so each part comes later the more there are. Over a slow link few and
# small parts fill it as well: see `Speed.window`.
_JOINED_S = 0.01  # what layers of one group take
_FULL_S = 0.02  # what the parts under way take, if there are two or more


class Allotment(Mailbox):
    """The streams of a prefetcher, and the memory that they share.

    Args:
        budget: bytes of the pool for all streams together.
        lookahead: how many of them streams that have not begun may have.
        first, most: bytes of the first and of the largest group of layers.
    """

    def __init__(self, store: Store, *, budget: int, lookahead: int, first: int, most: int) -> None:
        super().__init__()
        self._store = store
        self._pool = store.pool
        self._budget, self._lookahead = budget, lookahead
        self._first, self._most = first, most
        # A prefix's records may lie on any backend of the store; the largest wish costs the others nothing.
        self._preferred = max(target.limits.preferred_io_bytes for target in store._machinery.targets)
        self._streams: dict[StreamState, None] = {}
        self._queue: dict[tuple[Any, ...], StreamState] = {}  # announced, not begun
        self._late: list[tuple[Completion[Sequence[Outcome]], int]] = []  # memory that late I/O may still touch
        self._used = 0
        self._peak = 0
        self._revoked = 0
        self._number = 0
        self._closed = False
        self.speed = Speed()

    # Streams; the lock is held.

    def _new(self, plan: LayerPlan, deadline: float, *, started: bool) -> StreamState:
        self._number += 1
        state = StreamState(plan, deadline, self._number, started=started)
        joined = self.speed.window(_JOINED_S)
        state.lay_out(preferred=self._preferred, most=self._most, first=self._first, joined=joined)
        self._streams[state] = None
        return state

    def _same(self, state: StreamState | None, plan: LayerPlan) -> StreamState | None:
        """An announced stream over the records of `plan`, if it is of use for it; else it is ended."""
        if state is None or state.over:
            return None
        if state.plan.split != plan.split:  # its parts are of another shape
            self._end(state)
            return None
        return state

    def _adopt(self, state: StreamState, plan: LayerPlan, deadline: float) -> None:
        """An announced job begins. What is there stays; what is on its way with a low priority is asked for again,
        and joins it."""
        state.plan, state.deadline, state.priority = plan, deadline, plan.priority
        state.started, state.stalled = True, False
        while state.active and state.active[-1].state is not State.READY:
            self._take_back(state)

    def end(self, state: StreamState) -> None:
        """Cancel a stream."""
        with self._locked():
            self._end(state)
            self._pump()

    def leave_behind(self, state: StreamState) -> None:
        """A stream was collected, maybe in the middle of anything: no lock may be waited for."""
        if state in self._streams:
            self.post_from_anywhere(lambda: self._end(state))

    def _end(self, state: StreamState, error: BaseException | None = None) -> None:
        """Give everything back but what somebody holds."""
        if error is not None and state.error is None:
            state.error = error.with_traceback(None)  # which would keep the frames of whoever was here, and theirs
        state.cancelled = state.cancelled or error is None
        for part in list(state.active):
            self._free(state, part)
        state.pending.clear()
        self._streams.pop(state, None)
        if self._queue.get(state.plan.name) is state:
            del self._queue[state.plan.name]
        state.wake.set()

    def _free(self, state: StreamState, part: Part) -> None:
        """A part is not needed any more by its stream; its memory goes once nobody holds it."""
        state.active.remove(part)
        if not state.active and not state.pending:
            self._streams.pop(state, None)
        if part.state is State.HELD:
            part.holds -= 1
            if part.holds:
                return
        self._give_back(part)
        part.state = State.GONE

    def _give_back(self, part: Part) -> None:
        completion, part.completion = part.completion, None
        buffers, part.buffers = part.buffers, ()
        for buffer in buffers:
            buffer.release()
        if completion is None or completion.settled(0):
            self._used -= part.nbytes
        else:
            self._late.append((completion, part.nbytes))
            if not completion.done():
                self._later.append(completion.cancel)

    def _take_back(self, state: StreamState) -> None:
        """The stream's last active part is planned again."""
        part = state.active.pop()
        self._give_back(part)
        part.state = State.PLANNED
        state.pending.appendleft(part)

    def let_go(self, part: Part) -> None:
        """One of those who hold a part lets it go."""
        with self._locked():
            part.holds -= 1
            if not part.holds:
                self._give_back(part)
                part.state = State.GONE
                self._pump()

    def retain(self, state: StreamState, part: Part) -> None:
        """One more holds a part that is held."""
        with self._locked():
            if part.state is not State.HELD:
                if state.cancelled:
                    raise CancelledError("the stream was cancelled")
                raise ClosedError("this layer was given back")
            part.holds += 1

    def advance(self, state: StreamState, layer: int) -> None:
        """Layers below `layer` are not needed any more."""
        with self._locked():
            self._advance(state, layer)
            self._pump()

    def _advance(self, state: StreamState, layer: int) -> None:
        state.reached = max(state.reached, layer)
        while state.active and state.active[0].end <= state.reached:
            self._free(state, state.active[0])
        while not state.active and state.pending and state.pending[0].end <= state.reached:
            state.pending.popleft()

    def done_with(self, state: StreamState, part: Part) -> None:
        """The stream's first part, which was given to keep, is not needed any more."""
        self.let_go(part)
        with self._locked():
            if state.active and state.active[0] is part:
                self._free(state, part)
                if not state.front or state.front.first >= part.end:
                    state.reached = max(state.reached, part.end)
                self._pump()

    # Arrival.

    def _arrived(self, state: StreamState, part: Part, completion: Completion[Sequence[Outcome]]) -> None:
        outcomes: Sequence[Outcome] = ()
        error: KVStoreError | None = None
        try:
            outcomes = completion.result(0)
        except CancelledError:
            pass
        except KVStoreError as raised:  # on_error="raise", or a store that was closed
            error = raised
        now, nbytes = time.monotonic(), sum(outcome.nbytes for outcome in outcomes)
        self.speed.end(now, nbytes)
        if nbytes:
            self.speed.took(now - part.asked, part.under_way)
        while state.completions and state.completions[0].settled(0):
            state.completions.popleft()
        if part.state is not State.LOADING or part.completion is not completion:
            return  # nobody wants it any more
        if error is not None:
            self._end(state, error)
            return
        bad = [pair for pair, outcome in zip(part.pairs, outcomes, strict=True) if outcome.status is not Status.OK]
        if bad and not state.started:
            # It may be there when the job begins. Parts behind this one go too, since they must stay in order.
            state.stalled = True
            while part in state.active:
                self._take_back(state)
            return
        state.arrived += 1
        part.state = State.READY
        for pair in bad:
            state.limit(*pair)
        state.wake.set()

    def _reap(self) -> None:
        """Memory that late I/O has let go of is free again."""
        if self._late:
            still = [entry for entry in self._late if not entry[0].settled(0)]
            self._used -= sum(nbytes for _, nbytes in self._late) - sum(nbytes for _, nbytes in still)
            self._late = still

    # Asking for more; the lock is held.

    def _pump(self) -> None:
        """Ask the store for whatever is due and has room."""
        self._reap()
        blocked = [s for s in self._streams if s.waiting and not s.over and not s.active and not s.need_pool]
        for state in sorted(blocked, key=lambda s: (s.priority, s.deadline, s.number)):
            if state.prune() is None:
                state.wake.set()
            elif not self._ask(state, demanded=True) and not state.need_pool:
                return  # it comes next: nothing overtakes it
        while True:
            shares = self._shares()
            able = [state for state in self._streams if self._may_read_ahead(state, shares)]
            if not able or not self._ask(min(able, key=rank), demanded=False):
                return

    def _shares(self) -> dict[StreamState, int]:
        """How many bytes each announced job may have: what those before it will not need. Who has more gives it back,
        so that a job that comes late and is due early is not locked out."""
        shares, room = {}, self._lookahead
        for state in sorted((s for s in self._streams if not s.started), key=rank):
            shares[state] = room
            if not room and not state.active:
                continue
            while state.ahead > room and state.active[-1].state is State.READY:
                self._take_back(state)
            part = state.prune()
            limit = self._ahead_limit(state, part.size if part else 0)
            room = max(0, room - (state.ahead if state.stalled else int(min(limit, state.paged_bytes))))
        return shares

    def _may_read_ahead(self, state: StreamState, shares: dict[StreamState, int]) -> bool:
        if state.over or state.stalled or state.need_pool or not (state.started or shares[state]):
            return False
        part = state.prune()
        # Few at first: a miss costs little, and who waits for the first part does not wait for the lock.
        loading = [part.nbytes for part in state.active if part.state is State.LOADING]
        if part is None or len(loading) >= min(2 + state.arrived, _MOST_UNDER_WAY):
            return False
        if len(loading) >= 2 and sum(loading) >= self.speed.window(_FULL_S):
            return False
        size, ahead = part.size, state.ahead
        if not state.started and ahead + size > shares[state]:
            return False
        return not ahead or ahead + size <= self._ahead_limit(state, size)

    def _ahead_limit(self, state: StreamState, size: int) -> float:
        """How many bytes a stream may have loaded ahead: what loading would be short of, and always two parts."""
        compute_s, bandwidth = state.plan.compute_s, self.speed.bytes_per_s
        if compute_s is None or bandwidth is None:
            return math.inf
        layers = state.plan.num_layers - state.reached
        rest = state.total_bytes * layers / state.plan.num_layers
        needed = read_buffer_bytes(bandwidth, 1 / bandwidth, rest, compute_s, layers)
        return max(needed, 2 * size if state.started else size)

    def _ask(self, state: StreamState, *, demanded: bool) -> bool:
        """Ask the store for a stream's next part. False if there is no room for it."""
        part = state.pending[0]
        size = part.size
        while self._used and self._used + size > self._budget:
            if not demanded or not self._revoke(state):
                return False
        while True:
            try:
                buffers = self._pool.acquire_many(self._sizes(state, part), 0)
            except PoolExhausted:
                if not demanded:
                    return False
                if self._revoke(state):
                    continue
                state.need_pool = True  # others use the pool, too: its waiters are served in turn
                state.wake.set()
                return False
            except KVStoreError as error:  # a closed pool
                self._end(state, error)
                return True
            self._use(size)
            self._submit(state, part, buffers, size)
            return True

    def _use(self, size: int) -> None:
        self._used += size
        self._peak = max(self._peak, self._used)

    def _sizes(self, state: StreamState, part: Part) -> list[int]:
        return [state.range_bytes(part, *pair) for pair in part.pairs]

    def _submit(self, state: StreamState, part: Part, buffers: Sequence[Buffer], size: int) -> None:
        """Read a part, the first that is pending, into these buffers; `size` bytes of the budget are its."""
        state.pending.popleft()
        part.buffers, part.nbytes, part.state = buffers, size, State.LOADING
        state.active.append(part)
        wants = []
        for (prefix, number), buffer in zip(part.pairs, buffers, strict=True):
            chunk = state.plan.prefixes[prefix][number]
            memo = state.memos[prefix, number]
            level = state.plan.level
            wants.append(Want(chunk.key, buffer.view, chunk.spec, part.first, part.count, buffer, memo, level))
        now = time.monotonic()
        until = state.deadline if state.started else now + self._store.config.blocking_timeout
        try:
            completion = self._store.submit_get(wants, priority=state.priority, deadline=until)
        except KVStoreError as error:
            self._end(state, error)
            return
        self.speed.begin(now)
        part.completion, part.asked = completion, now
        part.under_way = sum(
            each.nbytes for stream in self._streams for each in stream.active if each.state is State.LOADING
        )
        state.completions.append(completion)
        completion.add_done_callback(lambda done: self.post(lambda: self._arrived(state, part, done)))

    def _revoke(self, demanding: StreamState) -> bool:
        """Give up one part of read-ahead, the least urgent of all, for one that is waited for. False: there is none."""
        rich = [
            s for s in self._streams
            if s is not demanding and s.priority >= demanding.priority and self._revocable(s)
        ]  # fmt: skip
        if not rich:
            return False
        state = max(rich, key=rank)
        self._take_back(state)
        self._revoked += 1
        return True

    @staticmethod
    def _revocable(state: StreamState) -> bool:
        """The last part is there, and nobody is about to take it."""
        if not state.active or state.active[-1].state is not State.READY:
            return False
        return not state.waiting or len(state.active) > 1


def rank(state: StreamState) -> tuple[float, ...]:
    """Whose read-ahead comes first; whose comes last gives way first."""
    if state.started and state.priority is not Priority.PREFETCH:
        return (state.priority, state.ahead, state.deadline, state.number)
    return (Priority.PREFETCH, math.inf if state.plan.deadline is None else state.plan.deadline, state.number)
