"""The scheduler's side: what of a request is stored, what is to be loaded and saved in a step. It never blocks.

A request's lookup starts when the request arrives. Until it has answered, the scheduler is told to ask again; what it
found is announced to the workers, which bring the beginnings of it into host memory while the request waits.

A request whose `kv_transfer_params` say `do_remote_prefill` is computed by another engine (docs/disaggregation.md). It
is not looked up: its blocks are allocated at once, and workers load each chunk between steps as it appears.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.completion import CancelledError, Completion
from kvstore.errors import ConfigError, KVStoreError
from kvstore.keys import keys_of

from ._arrivals import announced_tokens, handed_over
from ._keys import ContextOf, chunk_refs, hashed, multimodal_items
from ._messages import Announced, ChunkRef, Isolation, Load, Save, Step
from ._paging import blocks_covering

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["BlocksOf", "Scheduled", "SchedulerSide"]

logger = logging.getLogger("kvstore.integrations.vllm")

_ANNOUNCED = 64  # requests of the queue that workers are told of

Scheduled = tuple[str, int, int]
"""A request in a step: its id, its tokens computed before, and how many more this step computes."""

BlocksOf = Callable[[str], Sequence[int] | None]
"""The blocks of a request, from its first token on."""


class _State:
    """One request.

    Attributes:
        hashes: of its chunks, as far as `hashed_tokens` go.
        lookups: of all shards, under way; None: none has begun, or its answer was taken.
        hits: how many leading chunks are stored on all shards; None: not known yet.
        limit: chunks from this one on were found to be bad.
        matched: (begin, end) of the tokens that were offered to the scheduler last.
        awaited: tokens from the first one on that another engine is computing; None: it is not.
        saved: chunks before this one are stored, or being stored.
        tail_saved: the same of the prompt's last, partial chunk.
    """

    __slots__ = (
        "awaited", "hashed_tokens", "hashes", "hits", "isolation", "items", "limit", "lookups", "matched", "request",
        "saved", "tail_saved",
    )  # fmt: skip

    def __init__(self, request: Any, isolation: Isolation) -> None:
        self.request = request
        self.isolation = isolation
        self.items = multimodal_items(request.mm_features)
        self.hashes: list[bytes] = []
        self.hashed_tokens = 0
        self.lookups: list[Completion[int]] | None = None
        self.hits: int | None = None
        self.limit: int | None = None
        self.matched = (0, 0)
        self.awaited = announced_tokens(request)
        self.saved = 0
        self.tail_saved = False


class SchedulerSide:
    """See the module.

    Args:
        store: its `chunk_size` and `save_unfull_chunk` apply.
        contexts: of each shard whose records must be there for a hit, what makes its key context.
        isolation: of a request: its adapter and salt. What it raises means that the request is not stored.
        block_size: tokens in a block of the engine's.
        asynchronous: loads run between steps.
        loads, saves: which of both this engine does.
        save_generated: chunks that the engine generates are saved as well.
    """

    def __init__(
        self,
        store: Store,
        contexts: Sequence[ContextOf],
        *,
        isolation: Callable[[Any], Isolation],
        block_size: int,
        asynchronous: bool,
        loads: bool = True,
        saves: bool = True,
        save_generated: bool = True,
    ) -> None:
        self.store = store
        self.chunk_size = store.config.chunk_size
        self._asynchronous = asynchronous
        self._unfull = store.config.save_unfull_chunk
        self._contexts = contexts
        self._isolation = isolation
        self._block_size = block_size
        self._loads_wanted, self._saves_wanted = loads, saves
        self._generated = save_generated
        self._states: dict[str, _State] = {}
        self._queue: dict[str, _State] = {}  # waiting requests, in order of arrival
        self._epoch: str | None = None
        self._told: Sequence[Announced] = ()
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}  # until it is known how they went
        self._bad: set[int] = set()  # blocks of failed loads that nobody has computed since
        self.counters = dict.fromkeys(("lookups", "lookup_hit_tokens", "lookup_pending", "failed_tokens", "awaited"), 0)

    # A request comes, waits, is scheduled and ends.

    def arrived(self, request: Any) -> None:
        """A new request: its lookup begins."""
        if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
            return
        try:
            state = _State(request, self._isolation(request)._replace(epoch=self._epoch))
            if self._epoch is not None:
                state.awaited = None  # no other engine stores anything under this one's names
            waiting = self._look_up(state)
        except (KVStoreError, OSError) as error:  # what has no name is not stored; it is no reason not to serve it
            logger.warning("request %s is neither loaded nor saved: %s", request.request_id, error)
            return
        self._states[request.request_id] = state
        if waiting:
            self._queue[request.request_id] = state

    def reset(self) -> None:
        """What is stored so far is not for this engine any more (its weights changed): it goes on under other names,
        which no other engine knows."""
        self._epoch = uuid.uuid4().hex
        for state in self._states.values():
            for lookup in state.lookups or ():
                lookup.cancel()
            state.isolation = state.isolation._replace(epoch=self._epoch)
            state.hits = state.lookups = state.limit = state.awaited = None
            state.saved, state.tail_saved = 0, False

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens beyond the first `computed` can be loaded; None: not known yet. Leaves at least one token
        to compute."""
        state = self._states.get(request.request_id)
        if state is None or not self._loads_wanted or request.skip_reading_prefix_cache:
            return 0
        if state.hits is None and state.lookups is None:  # it was preempted, or its load failed
            self._look_up(state)
        if not self._answered(state):
            self.counters["lookup_pending"] += 1
            return None
        end = min(self._end(state, self._usable(state)), request.num_tokens - 1)
        state.matched = (computed, max(end, computed))
        return max(0, int(end) - computed)

    def between_steps(self, request: Any) -> bool:
        """Whether what `matched` offered is loaded between steps."""
        state = self._states.get(request.request_id)
        return self._asynchronous or (state is not None and state.awaited is not None)

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """The request has its blocks, and `external` of the tokens that were offered are to be loaded into them."""
        request_id = request.request_id
        state = self._states.get(request_id)
        if state is None:
            return
        if self._queue.pop(request_id, None) is not None or external:
            hits = self._usable(state)
            state.hits = None  # if it comes again, its lookup does
            state.saved = max(state.saved, min(hits, len(self._full(state))))
            state.tail_saved = state.tail_saved or hits > len(self._full(state))
        awaited, state.awaited = state.awaited is not None, None  # if it comes again, it is looked up
        if not external:
            return
        begin = state.matched[0]
        end = begin + external
        if end > state.matched[1]:
            raise ConfigError(f"{external} tokens are to be loaded, but only {state.matched[1] - begin} were offered")
        chunks = [chunk for chunk in self._chunks(state) if chunk.begin < end and chunk.end > begin]
        between = self._asynchronous or awaited
        load = Load(request_id, state.isolation, chunks, begin, end, tuple(blocks), between, awaited)
        self._loading[request_id] = load
        self._loads.append(load)
        if self._bad:
            self._bad.difference_update(blocks[begin // self._block_size : -(-end // self._block_size)])
        if awaited:
            self.counters["awaited"] += 1
        else:
            self.counters["lookup_hit_tokens"] += external

    def step(self, scheduled: Iterable[Scheduled], blocks_of: BlocksOf) -> Step:
        """What the workers have to do in the step that was just planned."""
        loads, self._loads = self._loads, []
        for load in [each for each in self._loading.values() if not each.asynchronous]:
            del self._loading[load.request]  # the step that loaded it has ended
        self._loading.update((load.request, load) for load in loads)
        work = list(scheduled)
        dirty, spoiled = self._dirty(work, blocks_of) if self._bad else (set(), set())
        saves = []
        if self._saves_wanted:
            for request_id, computed, count in work:
                state = self._states.get(request_id)
                if state is None or request_id in dirty:
                    continue
                if (save := self._save(state, computed + count, blocks_of)) is not None:
                    saves.append(save)
        return Step(loads, saves, self._announcement(), tuple(spoiled))

    def failed(self, invalid: Collection[int], blocks_of: BlocksOf) -> set[int]:
        """Blocks that workers could not load. Those loads' chunks will not be asked for again by their requests, and
        are saved anew once they are computed.

        Args:
            blocks_of: the blocks of a request as they are now.

        Returns:
            Blocks that hold no good KV, and that others may find: those, and the ones behind them of every request
            that has them. Not those of loads between steps, which nobody has seen.
        """
        visible = set(invalid)
        spoiled = set[int]()
        for request_id, load in self._loading.items():  # also of requests that were aborted meanwhile
            for index in blocks_covering(load.begin, load.end, self._block_size):
                if load.blocks[index] in invalid:
                    first = max(index * self._block_size, load.begin)
                    self.counters["failed_tokens"] += load.end - first
                    if load.asynchronous:
                        visible.difference_update(load.blocks[index:])
                    else:
                        spoiled.update(load.blocks[index:])
                    if request_id in self._states:
                        self._forget(self._states[request_id], first // self.chunk_size)
                    break
        spoiled |= visible
        if not visible:
            return spoiled
        for request_id, state in self._states.items():
            table = blocks_of(request_id) or ()
            lost = [number for number, block in enumerate(table) if block in visible]
            if lost:
                spoiled.update(table[lost[0] :])
                state.saved = min(state.saved, lost[0] * self._block_size // self.chunk_size)
                state.tail_saved = False
        self._bad |= spoiled
        return spoiled

    def _dirty(self, work: Sequence[Scheduled], blocks_of: BlocksOf) -> tuple[set[str], set[int]]:
        """Requests that compute from bad blocks in this step, and those blocks. A request that shares the blocks of one
        whose load failed is thought by vLLM to have them, also while the other one computes them anew in several
        steps; they are reported once more for it, so that it computes them itself."""
        size = self._block_size
        tables = {request_id: blocks_of(request_id) or () for request_id, _, _ in work}
        for request_id, computed, count in work:
            self._bad.difference_update(tables[request_id][computed // size : (computed + count) // size])
        dirty, spoiled = set[str](), set[int]()
        for request_id, computed, _ in work:
            read = self._bad.intersection(tables[request_id][: computed // size])
            if read:
                dirty.add(request_id)
                spoiled |= read
        for request_id, computed, count in work:
            if request_id in dirty:
                self._bad.update(tables[request_id][computed // size : -(-(computed + count) // size)])
        return dirty, spoiled

    def _forget(self, state: _State, chunk: int) -> None:
        """A chunk, and those behind it, cannot be had."""
        state.limit = chunk if state.limit is None else min(state.limit, chunk)
        state.saved, state.tail_saved = min(state.saved, chunk), False
        if state.lookups is None:
            state.hits = state.limit  # those came: if the request has to begin again, nobody need be asked

    def loaded(self, request_ids: Iterable[str]) -> None:
        """These asynchronous loads have ended."""
        for request_id in request_ids:
            self._loading.pop(request_id, None)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request has ended, or was aborted. Returns what its answer tells the engine that goes on with it, if it was
        sent here for its prefill."""
        state = self._states.pop(request_id, None)
        self._queue.pop(request_id, None)
        if state is None:
            return None
        for lookup in state.lookups or ():
            lookup.cancel()
        if not self._saves_wanted:
            return None
        request = state.request
        if self._epoch is not None:
            return handed_over(request, 0)  # nobody else knows the names
        return handed_over(request, request.num_prompt_tokens if state.tail_saved else state.saved * self.chunk_size)

    @property
    def outstanding(self) -> int:
        """Requests that are known."""
        return len(self._states)

    # Lookups.

    def _look_up(self, state: _State) -> bool:
        """Ask all shards. False if there is nothing to ask for."""
        self._hash(state, state.request.num_tokens)
        state.hits = None
        if not state.hashes or not self._loads_wanted:
            state.hits, state.lookups = 0, None
            return False
        if state.awaited is not None:
            state.hits, state.lookups = self._announced_chunks(state, state.awaited), None
            if state.hits:
                return True
            state.hits = state.awaited = None  # nothing that one could wait for
        self.counters["lookups"] += 1
        try:
            keys = [keys_of(state.hashes, context=context(state.isolation)) for context in self._contexts]
            state.lookups = [self.store.submit_lookup(each) for each in keys]
        except KVStoreError as error:
            logger.warning("the store cannot be asked: %s", error)
            state.hits, state.lookups = 0, None
            return False
        return True

    def _answered(self, state: _State) -> bool:
        if state.lookups is None:
            return state.hits is not None
        if not all(lookup.done() for lookup in state.lookups):
            return False
        state.hits, state.lookups = min(map(_hits, state.lookups)), None
        return True

    def _usable(self, state: _State) -> int:
        """Leading chunks that are stored, without those that were found to be bad."""
        hits = state.hits or 0
        return hits if state.limit is None else min(hits, state.limit)

    def _announcement(self) -> Sequence[Announced] | None:
        """The queue, if it is another one than was told last."""
        queue: list[Announced] = []
        for state in self._queue.values():
            if len(queue) == _ANNOUNCED:
                break
            if state.awaited is None and self._answered(state) and state.hits:
                begin = state.matched[0]
                chunks = [chunk for chunk in self._chunks(state)[: state.hits] if chunk.end > begin]
                if chunks:
                    queue.append(Announced(state.isolation, chunks))
        if queue == self._told:
            return None
        self._told = queue
        return queue

    def _announced_chunks(self, state: _State, tokens: int) -> int:
        """How many chunks lie within so many tokens."""
        return sum(chunk.end <= tokens for chunk in self._chunks(state))

    # Chunks.

    def _hash(self, state: _State, tokens: int) -> None:
        if tokens != state.hashed_tokens:
            known = list(state.request.all_token_ids)[:tokens]
            state.hashes = hashed(known, chunk_size=self.chunk_size, unfull=self._unfull, items=state.items)
            state.hashed_tokens = tokens

    def _chunks(self, state: _State) -> list[ChunkRef]:
        return chunk_refs(state.hashes, state.hashed_tokens, self.chunk_size)

    def _full(self, state: _State) -> list[bytes]:
        """Hashes of the full chunks."""
        return state.hashes[: state.hashed_tokens // self.chunk_size]

    def _end(self, state: _State, chunks: int) -> int:
        return min(chunks * self.chunk_size, state.hashed_tokens)

    # Saving.

    def _save(self, state: _State, end: int, blocks_of: BlocksOf) -> Save | None:
        request, size = state.request, self.chunk_size
        prompt = request.num_prompt_tokens
        # Not beyond what is known: drafts may be rejected, and with asynchronous scheduling ids come later.
        end = min(end, request.num_tokens if self._generated else prompt)
        full = end // size
        tail = self._unfull and not state.tail_saved and end >= prompt and prompt % size != 0
        if full <= state.saved and not tail:
            return None
        blocks = blocks_of(request.request_id)
        if blocks is None:
            return None
        chunks: list[ChunkRef] = []
        parent = None
        if full > state.saved:
            if full * size > state.hashed_tokens:
                self._hash(state, full * size)
            chunks = self._chunks(state)[state.saved : full]
            parent = state.hashes[state.saved - 1] if state.saved else None
            state.saved = full
        if tail:
            state.tail_saved = True
            hashes = state.hashes
            if state.hashed_tokens != prompt:
                known = list(request.all_token_ids)[:prompt]
                hashes = hashed(known, chunk_size=size, unfull=True, items=state.items)
            last = chunk_refs(hashes, prompt, size)[-1]
            if not chunks and last.begin:
                parent = hashes[-2]
            if not chunks or chunks[-1].end == last.begin:
                chunks.append(last)
        return Save(request.request_id, state.isolation, chunks, parent, tuple(blocks)) if chunks else None


def _hits(lookup: Completion[int]) -> int:
    try:
        return lookup.result(0)
    except (KVStoreError, CancelledError):  # on_error="raise", or the store was closed
        return 0
