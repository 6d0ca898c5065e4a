"""Loads of a worker that are under way, and the thread that brings those between steps forward."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from kvstore.prefetch import LayerStream

from ._arrivals import Arrivals
from ._messages import Load
from ._paging import blocks_covering

__all__ = ["Awaiting", "BetweenSteps", "Loading"]

logger = logging.getLogger("kvstore.integrations.vllm")

_POLL_S = 0.001  # between looks at loads that bytes are coming for


class Loading:
    """One load under way."""

    def __init__(self, load: Load, stream: LayerStream | None) -> None:
        self.load = load
        self.stream = stream  # None: it could not begin
        self.next_layer = 0
        self.good = 0 if stream is None else len(load.chunks)
        self.nbytes = 0
        self.started = time.monotonic()
        self.dropped = False  # nobody wants it any more

    @property
    def pause(self) -> float:
        """Seconds until it makes sense to look after it again."""
        return _POLL_S

    def failed_blocks(self, block_size: int) -> set[int]:
        """Blocks that hold tokens of chunks that did not come."""
        load = self.load
        if self.good == len(load.chunks) or self.dropped:
            return set()
        begin = max(load.begin, load.chunks[self.good].begin)
        return {load.blocks[index] for index in blocks_covering(begin, load.end, block_size)}


class Awaiting(Loading):
    """A load of chunks that another engine is storing: one part after the other, as they come."""

    def __init__(self, load: Load, arrivals: Arrivals) -> None:
        super().__init__(load, None)
        self.arrivals = arrivals
        self.part: Loading | None = None  # chunks that have come and are being loaded

    @property
    def pause(self) -> float:
        """See `Loading`."""
        return self.arrivals.pause if self.part is None else _POLL_S

    def next_part(self) -> Load | None:
        """What has come and is not loaded yet."""
        here = self.arrivals.look()
        if here == self.good:
            return None
        chunks = self.load.chunks[self.good : here]
        begin, end = max(self.load.begin, chunks[0].begin), min(self.load.end, chunks[-1].end)
        return self.load._replace(chunks=chunks, begin=begin, end=end, awaited=False)


class BetweenSteps:
    """A thread that brings asynchronous loads forward while there are any. It waits for none of them, so that one that
    hangs holds up no other."""

    def __init__(self, advance: Callable[[Loading], bool], ended: Callable[[Loading], None]) -> None:
        self._advance, self._end = advance, ended
        self._work = threading.Condition()
        self._active: list[Loading] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, loading: Loading) -> None:
        """Begin to look after a load."""
        with self._work:
            self._active.append(loading)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-vllm-loads", daemon=True)
                self._thread.start()
            self._work.notify()

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._active and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                active = list(self._active)
            over = []
            for loading in active:
                try:
                    if not self._advance(loading):
                        continue
                except Exception:  # it must be reported, or its request would wait for ever
                    logger.exception("request %s is computed, not loaded", loading.load.request)
                    loading.good = 0
                over.append(loading)
            for loading in over:
                self._end(loading)
            with self._work:
                self._active = [each for each in self._active if each not in over]
                if self._active and not over:
                    self._work.wait(min(each.pause for each in self._active))

    def drop(self, request_ids: Collection[str]) -> None:
        """See `WorkerSide.drop`."""
        with self._work:
            for loading in self._active:
                if loading.load.awaited and loading.load.request in request_ids:
                    loading.dropped = True
                    self._work.notify()

    def close(self) -> None:
        """Stop. Loads that have not ended are not told of."""
        with self._work:
            self._closed = True
            self._work.notify()
            thread = self._thread
        if thread is not None:
            thread.join(5)
